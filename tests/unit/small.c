/* Tests what only small builds use: the mathematics of MOE_NO_LIBM against libm in double, and the
   texts of numbers.
       cc -std=c99 -O2 -I. tests/unit/small.c -o small -lm && ./small
   "small all" takes every float instead of one in 251, "small quick" one in 20011. Always float. */

#define MOE_NO_TRAIN
#define MOE_NO_LIBM
#define MOE_NO_SIMD
#define MOE_IMPLEMENTATION
#include "moe_routers.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>

/* ---- functions against libm ---- */

typedef float own_fn(float x);
typedef double fine_fn(double x);

static double exact_sqrt(double x) { return sqrt(x); }
static double exact_exp(double x) { return exp(x); }
static double exact_log(double x) { return log(x); }
static double exact_log1p(double x) { return log1p(x); }
static double exact_tanh(double x) { return tanh(x); }
static double exact_erfc(double x) { return erfc(x); }
static double exact_ceil(double x) { return ceil(x); }
static double exact_fabs(double x) { return fabs(x); }
static double exact_square(double x) { return pow(fabs(x), 2.5); }
static double exact_root(double x) { return pow(fabs(x), (double)0.4f); }
static float own_square(float x) { return moei_fallback_pow(moei_fallback_fabs(x), 2.5f); }
static float own_root(float x) { return moei_fallback_pow(moei_fallback_fabs(x), 0.4f); }

typedef struct own_row {
    const char *name;
    own_fn *own;
    fine_fn *exact;
    double bound; /* in units in the last place; the header's top names them */
} own_row;

static const own_row own_rows[] = {
    {"exp", moei_fallback_exp, exact_exp, 1.5},       {"log", moei_fallback_log, exact_log, 1.5},
    {"log1p", moei_fallback_log1p, exact_log1p, 2.0}, {"tanh", moei_fallback_tanh, exact_tanh, 3.0},
    {"erfc", moei_fallback_erfc, exact_erfc, 8.0},    {"sqrt", moei_fallback_sqrt, exact_sqrt, 0.5},
    {"ceil", moei_fallback_ceil, exact_ceil, 0.0},    {"fabs", moei_fallback_fabs, exact_fabs, 0.0},
    {"pow 2.5", own_square, exact_square, 1.0},       {"pow 0.4", own_root, exact_root, 1.0}};

/* The distance of got from exact in units in the last place of a float of exact's size; 0 for the
   same infinity, and NaN for NaN. */
static double units(float got, double exact) {
    /* what rounds to infinity lies above */
    const double least = ldexp(1.0, -149), most = ldexp(1.0, 128) - ldexp(1.0, 103);
    double unit;
    int exponent;
    if (exact != exact) return got != got ? 0.0 : HUGE_VAL;
    if (fabs(exact) > most)
        return isinf(got) && (got > 0) == (exact > 0)                                        ? 0.0
               : (fabs((double)got) >= (double)3.4028234e38f && fabs(exact) < 1.0001 * most) ? 1.0
                                                                                             : HUGE_VAL;
    if (got != got) return HUGE_VAL;
    if (isinf(got)) return fabs(exact) > 0.999999 * most ? 1.0 : HUGE_VAL;
    frexp(exact, &exponent);
    unit = ldexp(1.0, exponent - 24);
    if (unit < least) unit = least;
    return fabs((double)got - exact) / unit;
}

static void test_own(uint32_t step) {
    size_t i;
    for (i = 0; i < sizeof own_rows / sizeof *own_rows; i++) {
        const own_row *row = &own_rows[i];
        double worst = 0.0, worst_small = 0.0;
        double at = 0.0;
        uint64_t bits;
        for (bits = 0; bits <= 0xffffffffu; bits += step) {
            const float x = moei_float_from_bits((uint32_t)bits);
            const double exact = row->exact((double)x), off = units(row->own(x), exact);
            if (fabs(exact) < 1.17549435e-38) { /* subnormal results: rounded twice at most */
                if (off > worst_small) worst_small = off;
            } else if (off > worst) {
                worst = off;
                at = (double)x;
            }
        }
        printf("%-8s %6.3f units in the last place at %.9g, %.3f where the result is subnormal\n", row->name, worst, at,
               worst_small);
        CHECK(worst <= row->bound);
        CHECK(worst_small <= row->bound + 0.5);
    }
}

static void test_own_specials(void) {
    const float inf = MOEI_INFINITY, zero = 0.0f;
    const float nan = inf - inf;
    CHECK(moei_fallback_exp(-inf) == 0.0f && moei_fallback_exp(inf) == inf && moei_fallback_exp(0.0f) == 1.0f &&
          moei_is_nan(moei_fallback_exp(nan)));
    CHECK(moei_fallback_log(0.0f) == -inf && moei_fallback_log(-zero) == -inf && moei_fallback_log(1.0f) == 0.0f &&
          moei_fallback_log(inf) == inf);
    CHECK(moei_is_nan(moei_fallback_log(-1.0f)) && moei_is_nan(moei_fallback_log(nan)) &&
          moei_is_nan(moei_fallback_log(-inf)));
    CHECK(moei_fallback_log1p(0.0f) == 0.0f && moei_fallback_log1p(-1.0f) == -inf && moei_fallback_log1p(inf) == inf &&
          moei_is_nan(moei_fallback_log1p(-2.0f)));
    CHECK(moei_float_bits(moei_fallback_tanh(-zero)) == 0x80000000u && moei_float_bits(moei_fallback_tanh(0.0f)) == 0);
    CHECK(moei_fallback_tanh(inf) == 1.0f && moei_fallback_tanh(-inf) == -1.0f && moei_is_nan(moei_fallback_tanh(nan)));
    CHECK(moei_fallback_erfc(inf) == 0.0f && moei_fallback_erfc(-inf) == 2.0f && moei_is_nan(moei_fallback_erfc(nan)));
    CHECK(moei_float_bits(moei_fallback_sqrt(-zero)) == 0x80000000u && moei_fallback_sqrt(inf) == inf &&
          moei_is_nan(moei_fallback_sqrt(-1.0f)));
    CHECK(moei_fallback_pow(0.0f, 2.0f) == 0.0f && moei_fallback_pow(inf, 0.5f) == inf &&
          moei_fallback_pow(1.0f, nan) == 1.0f && moei_fallback_pow(3.0f, 0.0f) == 1.0f);
}

static void test_fine(void) {
    double worst[6] = {0}, x, off;
    int i, floors = 0;
    for (i = 0; i < 200000; i++) {
        x = -100.0 + 188.0 * i / 200000.0;
        off = fabs(moei_fallback64_exp(x) / exp(x) - 1.0);
        worst[0] = off > worst[0] ? off : worst[0];
        off = fabs(moei_fallback64_log(exp(x)) - log(exp(x))) / (fabs(x) > 1e-2 ? fabs(x) : 1.0);
        worst[1] = off > worst[1] ? off : worst[1];
        off = fabs(moei_fallback64_sqrt(exp(x)) / sqrt(exp(x)) - 1.0);
        worst[2] = off > worst[2] ? off : worst[2];
        x = (double)i * 1.234567;
        off = fabs(moei_fallback64_cos(x) - cos(x));
        worst[3] = off > worst[3] ? off : worst[3];
        off = fabs(moei_fallback64_sin(-x) - sin(-x));
        worst[4] = off > worst[4] ? off : worst[4];
        off = fabs(moei_fallback64_pow(10000.0, -(double)i / 200000.0) / pow(10000.0, -(double)i / 200000.0) - 1.0);
        worst[5] = off > worst[5] ? off : worst[5];
        x = ((double)i - 100000.0) / 64.0;
        floors += moei_fallback64_floor(x) == floor(x);
    }
    CHECK(floors == 200000);
    printf("in double: exp %.2g, log %.2g, sqrt %.2g, pow %.2g relative; cos %.2g, sin %.2g\n", worst[0], worst[1],
           worst[2], worst[5], worst[3], worst[4]);
    CHECK(worst[0] < 3e-15 && worst[1] < 5e-15 && worst[2] < 4e-16 && worst[5] < 3e-15);
    CHECK(worst[3] < 1e-13 && worst[4] < 1e-13);
    CHECK(moei_fallback64_sqrt(0.0) == 0.0 && moei_fallback64_floor(-1e300) == -1e300 &&
          moei_fallback64_log(0.0) == -HUGE_VAL);
    CHECK(moei_fallback64_sqrt(1e-60) > 0.99e-30 && moei_fallback64_sqrt(1e-60) < 1.01e-30 &&
          moei_fallback64_sqrt(1e60) > 0.99e30 && moei_fallback64_sqrt(1e60) < 1.01e30);
}

/* ---- texts of numbers ---- */

static void test_texts(uint32_t step) {
    char digits[64];
    moei_text t;
    uint64_t bits;
    long bad = 0;
    float back;
    for (bits = 0; bits <= 0xffffffffu; bits += step) {
        const float x = moei_float_from_bits((uint32_t)bits);
        if (!moe_is_finite(x)) continue;
        t.out = digits;
        t.room = sizeof digits;
        t.length = 0;
        moei_put_real(&t, x);
        bad += !moei_parse_real(digits, t.length, &back) || back != x;
    }
    CHECK(bad == 0);
}

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "";
    const uint32_t step = strcmp(how, "all") == 0 ? 1 : strcmp(how, "quick") == 0 ? 20011 : 251;
    CASE(test_own(step));
    CASE(test_own_specials());
    CASE(test_fine());
    CASE(test_texts(step * 97 + 10));
    return test_end();
}
