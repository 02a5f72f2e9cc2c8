/* robust.c - numbers that nobody wants: zeros of both signs, subnormal and huge numbers, infinities and NaN in every place where a function
   takes a number, and what the headers say of it; long training; the same bits twice and for any number of threads.

     cc -std=c99 -O2 -I. tests/robust.c -o robust -lm && ./robust      (also with -DMOE_REAL=double and -DMOE_NO_SIMD)

   ./robust few: less of the long training, for valgrind and emulators. ./robust steps=N: the long training with N steps a net [100000].
   The table at the end names every public function of the headers, and what in it is a number. Exit status 1 if a check failed. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../moe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long passed, failed;
static moe_rng rng;

#define CHECK(condition, ...) check((condition) != 0, __LINE__, __VA_ARGS__)

#if defined(__GNUC__)
__attribute__((__format__(__printf__, 3, 4)))
#endif
static int
check(int good, int line, const char *what, ...);

#include <stdarg.h>

static int check(int good, int line, const char *what, ...) {
    va_list arguments;
    if (good) passed++;
    else if (failed++ < 60) {
        printf("FAILED: robust.c:%d: ", line);
        va_start(arguments, what);
        vprintf(what, arguments);
        va_end(arguments);
        printf("\n");
    }
    return good;
}

/* ---- which functions were called -------------------------------------------------------------------------------------------------- */

static const char *called[512];
static size_t n_called;

static void tested(const char *name) {
    size_t i;
    for (i = 0; i < n_called; i++)
        if (called[i] == name || strcmp(called[i], name) == 0) return;
    if (n_called < sizeof called / sizeof called[0]) called[n_called++] = name;
}

/* A function under test, by its name: T(moe_dot)(k, n, a, b). The list at the end wants them all. */
#define T(function) (tested(#function), function)

/* ---- numbers ------------------------------------------------------------------------------------------------------------------------ */

/* What expected values are computed in. */
#if MOE_REAL_IS_DOUBLE
typedef long double wide;
#define WIDE(name) name##l
#else
typedef double wide;
#define WIDE(name) name
#endif

#if MOE_REAL_IS_DOUBLE
#define LARGEST ((moe_real)1.7976931348623157e308)
#define TINY ((moe_real)4e-310)
#define SMALLEST_NORMAL ((moe_real)2.2250738585072014e-308)
#define HUGE_ONE ((moe_real)1e200)
#else
#define LARGEST ((moe_real)3.4028234663852886e38)
#define TINY ((moe_real)1e-40)
#define SMALLEST_NORMAL ((moe_real)1.1754943508222875e-38)
#define HUGE_ONE ((moe_real)1e30)
#endif

static moe_real infinity_of(int sign) {
    volatile moe_real large = LARGEST;
    return (moe_real)(large * 10) * (moe_real)sign;
}

static moe_real not_a_number(void) {
    volatile moe_real endless = infinity_of(1);
    return endless - endless;
}

enum { SPECIALS = 13, FIRST_ENDLESS = 10, IS_NAN = 12 };
static moe_real specials[SPECIALS];
static const char *const special_names[SPECIALS] = {"0", "-0", "tiny", "-tiny", "normal", "1e4", "-1e4", "huge", "-huge", "largest", "inf", "-inf", "nan"};

static void make_specials(void) {
    specials[0] = 0, specials[1] = -specials[0], specials[2] = TINY, specials[3] = -TINY, specials[4] = SMALLEST_NORMAL;
    specials[5] = 10000, specials[6] = -10000, specials[7] = HUGE_ONE, specials[8] = -HUGE_ONE, specials[9] = LARGEST;
    specials[10] = infinity_of(1), specials[11] = infinity_of(-1), specials[12] = not_a_number();
}

static int is_nan(moe_real x) { return !moe_is_finite(x) && !(x > 0) && !(x < 0); }
static int same_bits(const void *a, const void *b, size_t n) { return memcmp(a, b, n * sizeof(moe_real)) == 0; }

static int all_finite(size_t n, const moe_real *x) {
    size_t i;
    for (i = 0; i < n; i++)
        if (!moe_is_finite(x[i])) return 0;
    return 1;
}

static int all_nan(size_t n, const moe_real *x) {
    size_t i;
    for (i = 0; i < n; i++)
        if (!is_nan(x[i])) return 0;
    return 1;
}

/* The same kind of number, and near where it is finite. */
static int alike(moe_real got, wide want, wide bound) {
    const moe_real rounded = (moe_real)want;
    if (is_nan(rounded)) return is_nan(got);
    if (!moe_is_finite(rounded)) return !is_nan(got) && !moe_is_finite(got) && (got > 0) == (rounded > 0);
    return moe_is_finite(got) && WIDE(fabs)((wide)got - want) <= bound;
}

static void *grab(size_t count, size_t size) {
    void *p = calloc(count > 0 ? count : 1, size);
    if (p == NULL) {
        fprintf(stderr, "robust: out of memory\n");
        exit(2);
    }
    return p;
}

static moe_real *normals(size_t count) {
    moe_real *v = (moe_real *)grab(count, sizeof *v);
    size_t i;
    for (i = 0; i < count; i++) v[i] = moe_rng_normal(&rng);
    return v;
}

static size_t below(size_t n) { return (size_t)moe_rng_below(&rng, (uint64_t)n); }

static const moe_kernels *tables[MOE_KERNELS_COUNT];
static int n_tables;

static void find_tables(void) {
    int i;
    for (i = MOE_KERNELS_C; i < MOE_KERNELS_COUNT; i++)
        if (moe_kernels_select(i) != NULL) tables[n_tables++] = moe_kernels_select(i);
}

/* ---- kernels: number by number -------------------------------------------------------------------------------------------------------
   One special number in one place of one array; what comes out there is as wanted, and the bits of all other places are as without it. */

enum { MOST_IN = 4, MOST_OUT = 3, LENGTH = 37 };

typedef struct numberwise {
    const char *name;
    int n_in, n_out;
    void (*run)(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out);
    wide (*want)(int which, const moe_real *in); /* output `which` from one number of each input */
} numberwise;

static int now_act, now_squared;
static moe_real now_alpha = (moe_real)-1.5;

static wide sigmoid_of(wide x) { return x > -11000 ? 1 / (1 + WIDE(exp)(-x)) : 0 * (x == x ? 1 : x); }

static wide act_of(int act, moe_real x) {
    const wide v = x;
    switch (act) {
    case MOE_ACT_RELU: return x < 0 ? 0 : v;
    case MOE_ACT_SILU: return x < -10000 ? 0 : v * sigmoid_of(v);
    case MOE_ACT_GELU: return x < -1000 ? 0 : v * 0.5 * WIDE(erfc)(-v * 0.70710678118654752440);
    case MOE_ACT_TANH: return WIDE(tanh)(v);
    case MOE_ACT_SIGMOID: return is_nan(x) ? v : sigmoid_of(v);
    default: return v;
    }
}

static wide slope_of(int act, moe_real x) {
    const wide v = x;
    if (act == MOE_ACT_RELU) return x <= 0 ? 0 : 1;
    if (act == MOE_ACT_IDENTITY) return 1;
    if (is_nan(x)) return v;
    if (x > 10000 || x < -10000) return act == MOE_ACT_SILU || act == MOE_ACT_GELU ? x > 0 : 0;
    switch (act) {
    case MOE_ACT_SILU: return sigmoid_of(v) * (1 + v * sigmoid_of(-v));
    case MOE_ACT_GELU: return 0.5 * WIDE(erfc)(-v * 0.70710678118654752440) + v * 0.39894228040143267794 * WIDE(exp)(-0.5 * v * v);
    case MOE_ACT_TANH: return 4 * sigmoid_of(2 * v) * sigmoid_of(-2 * v);
    default: return sigmoid_of(v) * sigmoid_of(-v);
    }
}

static void copy_to(size_t n, const moe_real *from, moe_real *to) { memcpy(to, from, n * sizeof *to); }

static void run_multiply(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) { T(moe_multiply)(k, n, in[0], in[1], out[0]); }
static wide want_multiply(int which, const moe_real *in) { return (void)which, (wide)in[0] * in[1]; }
static void run_axpy(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    copy_to(n, in[1], out[0]);
    T(moe_axpy)(k, n, now_alpha, in[0], out[0]);
}
static wide want_axpy(int which, const moe_real *in) { return (void)which, (wide)in[1] + (wide)now_alpha * in[0]; }
static void run_activate(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) { T(moe_activate)(k, now_act, n, in[0], out[0]); }
static wide want_activate(int which, const moe_real *in) { return (void)which, act_of(now_act, in[0]); }
static void run_activate_backward(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    T(moe_activate_backward)(k, now_act, n, in[0], in[1], out[0]);
}
static wide want_activate_backward(int which, const moe_real *in) {
    (void)which;
    if (now_act == MOE_ACT_RELU) return in[0] <= 0 ? 0 : (wide)in[1]; /* a choice, not a product */
    return (wide)in[1] * slope_of(now_act, in[0]);
}
static void run_gated(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    T(moe_gated)(k, now_act, 1, n, in[0], n, in[1], n, out[0], n);
}
static wide want_gated(int which, const moe_real *in) { return (void)which, (wide)(moe_real)act_of(now_act, in[0]) * in[1]; }
static void run_gated_backward(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    T(moe_gated_backward)(k, now_act, n, in[0], in[1], in[2], out[0], out[1]);
}
static wide want_gated_backward(int which, const moe_real *in) {
    const moe_real both = (moe_real)((wide)in[2] * in[1]);
    if (which == 1) return (wide)in[2] * (moe_real)act_of(now_act, in[0]);
    if (now_act == MOE_ACT_RELU) return in[0] <= 0 ? 0 : (wide)both;
    return both * slope_of(now_act, in[0]);
}
static const moe_adamw_step adamw_step = {1, (moe_real)0.1, (moe_real)0.9, (moe_real)0.99, (moe_real)1e-8, (moe_real)0.01, 2, 3};
static void run_adamw(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    size_t i;
    copy_to(n, in[1], out[0]), copy_to(n, in[3], out[2]);
    for (i = 0; i < n; i++) out[1][i] = in[2][i] < 0 ? -in[2][i] : in[2][i]; /* a mean of squares */
    T(moe_adamw)(k, &adamw_step, n, in[0], out[0], out[1], out[2]);
}
static wide want_adamw(int which, const moe_real *in) {
    const moe_adamw_step *s = &adamw_step;
    const moe_real m = (moe_real)((wide)s->beta1 * in[1] + (1 - (wide)s->beta1) * in[0]);
    const moe_real v = (moe_real)((wide)s->beta2 * (in[2] < 0 ? -in[2] : in[2]) + (1 - (wide)s->beta2) * in[0] * in[0]);
    const moe_real m1 = (moe_real)((wide)m * s->over1), v1 = (moe_real)((wide)v * s->over2);
    if (which < 2) return which == 0 ? m : v;
    return in[3] - s->rate * (m1 / (WIDE(sqrt)((wide)v1) + s->epsilon) + (wide)s->decay * in[3]);
}
static void run_posterior(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    copy_to(n, in[0], out[0]);
    (void)T(moe_log_posterior)(k, n, 2, in[1], in[2], out[0]);
}
static wide want_posterior(int which, const moe_real *in) {
    (void)which;
    return in[2] > 0 ? (wide)(moe_real)(2 * ((wide)in[0] - in[1])) + WIDE(log)((wide)in[2]) : -(wide)HUGE_VAL;
}
static void run_spread(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    static moe_real rows[2 * LENGTH];
    static const int32_t both[2] = {1, 0};
    memcpy(rows, in[0], n * sizeof *rows), memcpy(rows + n, in[1], n * sizeof *rows);
    T(moe_spread)(k, now_squared, 2, both, n, rows, n, in[2], out[0]);
}
static wide want_spread(int which, const moe_real *in) {
    const wide a = (wide)in[0] - in[2], b = (wide)in[1] - in[2];
    (void)which;
    return (wide)(moe_real)(now_squared ? a * a + b * b : WIDE(fabs)(a) + WIDE(fabs)(b)) / 2; /* the sum may be too large for the type */
}
static void run_sigmoid(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    size_t i;
    (void)k;
    for (i = 0; i < n; i++) out[0][i] = T(moe_sigmoid)(in[0][i]), out[1][i] = T(moe_softplus)(in[0][i]);
}
static wide want_sigmoid(int which, const moe_real *in) {
    if (is_nan(in[0])) return in[0];
    if (which == 0) return sigmoid_of(in[0]);
    return in[0] > 0 ? in[0] + WIDE(log1p)(WIDE(exp)(-(wide)in[0])) : WIDE(log1p)(WIDE(exp)((wide)in[0]));
}
static void run_numberwise_exp(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    copy_to(n, in[0], out[0]);
    (void)T(moe_exp_sum)(k, n, 30, out[0]);
}
static wide want_numberwise_exp(int which, const moe_real *in) { return (void)which, WIDE(exp)((wide)in[0] - 30); }

/* Of each: the special value number `special` at every place of every input. */
static void test_numberwise(const numberwise *f, const moe_kernels *k, int first_special, int last_special) {
    moe_real *in[MOST_IN], *out[MOST_OUT], *plain[MOST_OUT];
    int special, which, i;
    size_t at, j;
    for (i = 0; i < f->n_in; i++) {
        in[i] = normals(LENGTH);
        for (j = 0; j < LENGTH; j++) in[i][j] = in[i][j] < 0 ? in[i][j] - 1 : in[i][j] + 1; /* away from 0 */
    }
    for (i = 0; i < f->n_out; i++) out[i] = (moe_real *)grab(LENGTH, sizeof **out), plain[i] = (moe_real *)grab(LENGTH, sizeof **plain);
    f->run(k, LENGTH, in, plain);
    for (which = 0; which < f->n_in; which++)
        for (special = first_special; special < last_special; special++) {
            int wrong = 0, leaks = 0;
            moe_real got = 0, want = 0;
            for (at = 0; at < LENGTH; at++) {
                const moe_real kept = in[which][at];
                moe_real one[MOST_IN];
                in[which][at] = specials[special];
                for (i = 0; i < f->n_in; i++) one[i] = in[i][at];
                f->run(k, LENGTH, in, out);
                in[which][at] = kept;
                for (i = 0; i < f->n_out; i++) {
                    const wide wanted = f->want(i, one), bound = WIDE(fabs)(wanted) * 1e-4 + SMALLEST_NORMAL;
                    leaks += !same_bits(out[i], plain[i], at) || !same_bits(out[i] + at + 1, plain[i] + at + 1, LENGTH - at - 1);
                    if (!alike(out[i][at], wanted, bound)) wrong++, got = out[i][at], want = (moe_real)wanted;
                }
            }
            CHECK(wrong == 0, "%s of %s, act %d: input %d = %s gives %g, wanted %g", f->name, k->name, now_act, which, special_names[special], (double)got, (double)want);
            CHECK(leaks == 0, "%s of %s, act %d: input %d = %s reaches other places", f->name, k->name, now_act, which, special_names[special]);
        }
    for (i = 0; i < f->n_in; i++) free(in[i]);
    for (i = 0; i < f->n_out; i++) free(out[i]), free(plain[i]);
}

static void test_all_numberwise(void) {
    static const numberwise with_act[] = {{"activate", 1, 1, run_activate, want_activate},
                                          {"activate_backward", 2, 1, run_activate_backward, want_activate_backward},
                                          {"gated", 2, 1, run_gated, want_gated},
                                          {"gated_backward", 3, 2, run_gated_backward, want_gated_backward}};
    static const numberwise others[] = {{"multiply", 2, 1, run_multiply, want_multiply},
                                        {"axpy", 2, 1, run_axpy, want_axpy},
                                        {"adamw", 4, 3, run_adamw, want_adamw},
                                        {"log_posterior", 3, 1, run_posterior, want_posterior},
                                        {"sigmoid, softplus", 1, 2, run_sigmoid, want_sigmoid}};
    static const numberwise spread = {"spread", 3, 1, run_spread, want_spread};
    static const numberwise exp_sum = {"exp_sum", 1, 1, run_numberwise_exp, want_numberwise_exp};
    size_t i;
    int t;
    for (t = 0; t < n_tables; t++) {
        for (now_act = 0; now_act < MOE_ACT_COUNT; now_act++)
            for (i = 0; i < sizeof with_act / sizeof with_act[0]; i++) test_numberwise(&with_act[i], tables[t], 0, SPECIALS);
        now_act = 0;
        for (i = 0; i < sizeof others / sizeof others[0]; i++) test_numberwise(&others[i], tables[t], 0, SPECIALS);
        for (now_squared = 0; now_squared < 2; now_squared++) test_numberwise(&spread, tables[t], 0, SPECIALS);
        test_numberwise(&exp_sum, tables[t], 0, 5);
        test_numberwise(&exp_sum, tables[t], 11, SPECIALS); /* max is at least every number, so no +inf */
    }
}

/* ---- kernels: sums ------------------------------------------------------------------------------------------------------------------- */

/* One special number in a or b [n], anywhere; a smaller stretch of places for long sums. */
static void test_dot(const moe_kernels *k) {
    static const size_t lengths[] = {1, 2, 7, 16, 31, 64, 300};
    size_t i, j, at;
    int special, which;
    for (i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        const size_t n = lengths[i];
        moe_real *v[2];
        int wrong = 0;
        v[0] = normals(n), v[1] = normals(n);
        for (which = 0; which < 2; which++)
            for (special = 0; special < SPECIALS; special++)
                for (at = 0; at < n; at += 1 + n / 40) {
                    const moe_real kept = v[which][at];
                    wide sum = 0, size = 0;
                    v[which][at] = specials[special];
                    for (j = 0; j < n; j++) sum += (wide)v[0][j] * v[1][j], size += WIDE(fabs)((wide)v[0][j] * v[1][j]);
                    wrong += !alike(T(moe_dot)(k, n, v[0], v[1]), sum, size * 1e-5 + SMALLEST_NORMAL);
                    v[which][at] = kept;
                }
        CHECK(wrong == 0, "dot of %s, n = %d: %d wrong", k->name, (int)n, wrong);
        free(v[0]), free(v[1]);
    }
}

typedef struct product {
    size_t m, n, k, rows_a, columns_a, rows_b, columns_b;
    moe_real *a, *b, *c, *plain;
    int op;
} product;

static wide want_product(const product *p, size_t i, size_t j, wide *size) {
    wide sum = 0;
    size_t l;
    for (l = 0, *size = 0; l < p->k; l++) {
        const moe_real a = p->op == MOE_MATMUL_TN ? p->a[l * p->m + i] : p->a[i * p->k + l];
        const moe_real b = p->op == MOE_MATMUL_NT ? p->b[j * p->k + l] : p->b[l * p->n + j];
        sum += (wide)a * b, *size += WIDE(fabs)((wide)a * b);
    }
    return sum;
}

/* A special number in A reaches its row of C alone, one in B its column: by the rules of IEEE 754, 0 times infinity included. */
static void test_products(const moe_kernels *kernels) {
    static const size_t shapes[][3] = {{1, 5, 40}, {1, 37, 300}, {13, 37, 70}, {7, 16, 261}, {3, 50, 33}};
    size_t shape, round, at, i, j;
    int special;
    for (shape = 0; shape < sizeof shapes / sizeof shapes[0]; shape++)
        for (special = 0; special < SPECIALS; special++) {
            product p;
            int wrong = 0, leaks = 0;
            p.m = shapes[shape][0], p.n = shapes[shape][1], p.k = shapes[shape][2];
            p.a = normals(p.m * p.k), p.b = normals(p.n * p.k);
            p.c = (moe_real *)grab(p.m * p.n, sizeof *p.c), p.plain = (moe_real *)grab(p.m * p.n, sizeof *p.plain);
            for (i = 0; i < p.m * p.k; i += 17) p.a[i] = 0;
            for (p.op = 0; p.op < MOE_MATMUL_COUNT; p.op++)
                for (round = 0; round < 6; round++) {
                    const size_t k = p.k;
                    const size_t lda = p.op == MOE_MATMUL_TN ? p.m : k, ldb = p.op == MOE_MATMUL_NT ? k : p.n;
                    moe_real *v = round < 3 ? p.a : p.b, kept;
                    size_t own;
                    at = below(round < 3 ? p.m * k : p.n * k);
                    own = round < 3 ? (p.op == MOE_MATMUL_TN ? at % p.m : at / k) : (p.op == MOE_MATMUL_NT ? at / k : at % p.n);
                    T(moe_matmul)(kernels, p.op, MOE_TYPE_REAL, p.m, p.n, k, p.a, lda, p.b, ldb, p.plain, p.n, 0);
                    kept = v[at], v[at] = specials[special];
                    T(moe_matmul)(kernels, p.op, MOE_TYPE_REAL, p.m, p.n, k, p.a, lda, p.b, ldb, p.c, p.n, 0);
                    for (i = 0; i < p.m; i++)
                        for (j = 0; j < p.n; j++)
                            if ((round < 3 ? i : j) == own) {
                                wide size, want = want_product(&p, i, j, &size);
                                wrong += !alike(p.c[i * p.n + j], want, size * 1e-5);
                            } else leaks += !same_bits(p.c + i * p.n + j, p.plain + i * p.n + j, 1);
                    v[at] = kept;
                }
            CHECK(wrong == 0, "product of %s, shape %d, %s: %d wrong", kernels->name, (int)shape, special_names[special], wrong);
            CHECK(leaks == 0, "product of %s, shape %d, %s: %d other numbers change", kernels->name, (int)shape, special_names[special], leaks);
            free(p.a), free(p.b), free(p.c), free(p.plain);
        }
}

/* A softmax by its definition in wide numbers; 1: everything must be NaN. */
static int want_softmax(size_t n, const moe_real *x, moe_real temperature, wide *y) {
    wide max = -(wide)HUGE_VAL, sum = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        if (is_nan(x[i]) || (!moe_is_finite(x[i]) && x[i] > 0)) return 1;
        if (x[i] > max) max = x[i];
    }
    for (i = 0; i < n; i++) {
        y[i] = x[i] < -LARGEST ? 0 : WIDE(exp)(((wide)x[i] - max) / temperature);
        sum += y[i];
    }
    for (i = 0; i < n && sum > 0; i++) y[i] /= sum;
    return 0;
}

static void test_softmaxes(const moe_kernels *k) {
    static const moe_real temperatures[] = {1, (moe_real)1e-6, (moe_real)1e6};
    moe_real x[LENGTH], y[LENGTH], again[LENGTH];
    wide want[LENGTH];
    size_t n, i, t, trial;
    int special;
    for (t = 0; t < 3; t++)
        for (special = 0; special < SPECIALS; special++) {
            int wrong = 0;
            for (n = 1; n <= LENGTH; n++)
                for (trial = 0; trial < 4; trial++) {
                    int lost;
                    for (i = 0; i < n; i++) x[i] = trial == 3 ? specials[special] : moe_rng_normal(&rng);
                    x[trial == 0 ? 0 : trial == 1 ? n - 1 : below(n)] = specials[special];
                    lost = want_softmax(n, x, temperatures[t], want);
                    T(moe_softmax)(k, n, x, temperatures[t], y);
                    for (i = 0; i < n; i++) wrong += lost ? !is_nan(y[i]) : !alike(y[i], want[i], 1e-5 * want[i] + 2 * SMALLEST_NORMAL);
                    for (i = 0; i < n && !lost; i++) wrong += x[i] < -LARGEST && (y[i] < 0 || y[i] > 0);
                    copy_to(n, x, again);
                    T(moe_softmax)(k, n, again, temperatures[t], again); /* in place */
                    wrong += !lost && !same_bits(again, y, n);
                }
            CHECK(wrong == 0, "softmax of %s, T = %g with %s: %d wrong", k->name, (double)temperatures[t], special_names[special], wrong);
        }
    for (n = 1; n <= LENGTH; n++) {
        for (i = 0; i < n; i++) x[i] = specials[11];
        T(moe_softmax)(k, n, x, 1, y);
        for (i = 0; i < n && !(y[i] < 0) && !(y[i] > 0) && !is_nan(y[i]);) i++;
        CHECK(i == n, "softmax of %s of -inf alone", k->name);
    }
}

/* -sum p ln p counts what is above 0; NaN is not. */
static void test_sums_of_logarithms(const moe_kernels *k) {
    moe_real p[LENGTH];
    size_t n, at, i;
    int special;
    for (special = 0; special < SPECIALS; special++) {
        int wrong = 0, wrong_exp = 0;
        for (n = 1; n <= LENGTH; n++) {
            wide want = 0, size = 0, sum;
            moe_real got, e[LENGTH];
            at = below(n);
            for (i = 0; i < n; i++) p[i] = moe_rng_uniform(&rng);
            p[at] = specials[special];
            for (i = 0; i < n; i++)
                if (p[i] > 0) want -= p[i] * WIDE(log)((wide)p[i]), size += WIDE(fabs)(p[i] * WIDE(log)((wide)p[i]));
            got = T(moe_entropy)(k, n, p);
            wrong += special == IS_NAN ? !is_nan(got) && !alike(got, want, size * 1e-4) : !alike(got, want, size * 1e-4 + 1e-6);
            if (p[at] > 4) continue; /* max is at least every number */
            memcpy(e, p, sizeof e);
            got = T(moe_exp_sum)(k, n, 5, e);
            for (i = 0, sum = 0; i < n; i++) sum += WIDE(exp)((wide)p[i] - 5);
            wrong_exp += !alike(got, sum, sum * 1e-4 + SMALLEST_NORMAL);
        }
        CHECK(wrong == 0, "entropy of %s with %s: %d wrong", k->name, special_names[special], wrong);
        CHECK(wrong_exp == 0, "exp_sum of %s with %s: %d wrong", k->name, special_names[special], wrong_exp);
    }
}

static void test_log_sum_exp(void) {
    moe_real x[LENGTH];
    size_t n, i;
    int special;
    for (special = 0; special < SPECIALS; special++) {
        int wrong = 0;
        for (n = 1; n <= LENGTH; n++) {
            wide sum = 0, max = -(wide)HUGE_VAL, want;
            for (i = 0; i < n; i++) x[i] = moe_rng_normal(&rng);
            x[below(n)] = specials[special];
            for (i = 0; i < n; i++)
                if (x[i] > max) max = x[i];
            for (i = 0; i < n; i++) sum += WIDE(exp)((wide)x[i] - max);
            want = special == 10 ? (wide)specials[10] : special == 12 ? (wide)specials[12] : n == 1 && special == 11 ? (wide)specials[11] : max + WIDE(log)(sum);
            wrong += !alike(T(moe_log_sum_exp)(n, x), want, 1e-5 * WIDE(fabs)(want) + 1e-6);
        }
        CHECK(wrong == 0, "log_sum_exp with %s: %d wrong", special_names[special], wrong);
    }
    CHECK(T(moe_log_sum_exp)(0, NULL) < -LARGEST, "log_sum_exp of nothing");
    for (i = 0; i < LENGTH; i++) x[i] = specials[11];
    CHECK(T(moe_log_sum_exp)(LENGTH, x) < -LARGEST, "log_sum_exp of -inf alone");
}

/* Norms of one row: NaN and infinity show as NaN somewhere in it; up to a square root of the largest number a norm is right. */
static void test_norms(void) {
    const moe_real moderate = MOE_REAL_IS_DOUBLE ? (moe_real)1e150 : (moe_real)1e18;
    moe_real x[LENGTH], y[LENGTH], dx[LENGTH], dy[LENGTH], gain[LENGTH], dgain[LENGTH], dbias[LENGTH], mean, rstd;
    size_t n, i;
    int special;
    for (special = 0; special < SPECIALS; special++)
        for (n = 1; n <= LENGTH; n += 6) {
            size_t at = below(n);
            const moe_real special_now = special == 7 ? moderate : special == 8 ? -moderate : specials[special];
            int broken, beyond = special == 9, which;
            for (i = 0; i < n; i++) x[i] = moe_rng_normal(&rng), gain[i] = 1 + moe_rng_uniform(&rng), dy[i] = moe_rng_normal(&rng);
            x[at] = special_now;
            T(moe_layer_norm)(n, x, gain, NULL, (moe_real)1e-5, y, &mean, &rstd);
            if (special >= FIRST_ENDLESS) CHECK(all_nan(n, y), "layer_norm of a row with %s", special_names[special]);
            else CHECK(all_finite(n, y) && moe_is_finite(mean) && moe_is_finite(rstd), "layer_norm of a row with %s", special_names[special]);
            if (special < FIRST_ENDLESS && !beyond && n > 1) {
                wide m = 0, v = 0;
                for (i = 0; i < n; i++) m += x[i];
                m /= n;
                for (i = 0; i < n; i++) v += (x[i] - m) * (x[i] - m);
                for (i = 0, broken = 0; i < n; i++) broken += !alike(y[i], (x[i] - m) / WIDE(sqrt)(v / n + 1e-5) * gain[i], 1e-4);
                CHECK(broken == 0, "layer_norm is right with %s", special_names[special]);
            }
            T(moe_rms_norm)(n, x, gain, (moe_real)1e-5, y, &rstd);
            for (i = 0, broken = 0; i < n; i++) broken += !moe_is_finite(y[i]);
            CHECK((special >= FIRST_ENDLESS) == (broken > 0) && (special != IS_NAN || broken == (int)n), "rms_norm of a row with %s: %d", special_names[special], broken);
            if (special < FIRST_ENDLESS && !beyond) {
                wide v = 0;
                for (i = 0; i < n; i++) v += (wide)x[i] * x[i];
                for (i = 0, broken = 0; i < n; i++) broken += !alike(y[i], x[i] / WIDE(sqrt)(v / n + 1e-5) * gain[i], 1e-4);
                CHECK(broken == 0, "rms_norm is right with %s", special_names[special]);
            }
            for (i = 0; i < n; i++) x[i] = moe_rng_normal(&rng);
            T(moe_layer_norm)(n, x, gain, NULL, (moe_real)1e-5, y, &mean, &rstd);
            for (which = 0; which < 2; which++) { /* the special number in dy: with 0 times anything left out, dgain and dbias are numbers elsewhere */
                memset(dx, 0, sizeof dx), memset(dgain, 0, sizeof dgain), memset(dbias, 0, sizeof dbias);
                dy[at] = specials[special];
                if (which == 0) T(moe_layer_norm_backward)(n, x, gain, mean, rstd, dy, dx, dgain, dbias);
                else T(moe_rms_norm_backward)(n, x, gain, rstd, dy, dx, dgain);
                for (i = 0, broken = 0; i < n; i++) broken += i != at && (!moe_is_finite(dgain[i]) || !moe_is_finite(dbias[i]));
                CHECK(broken == 0, "dgain and dbias of other places with dy = %s", special_names[special]);
                if (special < 7) CHECK(all_finite(n, dx) && all_finite(n, dgain) && all_finite(n, dbias), "gradients with dy = %s", special_names[special]);
                if (special >= FIRST_ENDLESS && n > 1) CHECK(!all_finite(n, dx), "dx with dy = %s", special_names[special]);
            }
        }
}

/* Gradients of a softmax: what is not finite in dy goes to all of dx; 0 stays 0 for finite numbers. */
static void test_softmax_backward(void) {
    moe_real x[LENGTH], y[LENGTH], dy[LENGTH], dx[LENGTH];
    size_t n, i, at;
    int special;
    for (n = 2; n <= LENGTH; n += 5)
        for (special = 0; special < SPECIALS; special++) {
            for (i = 0; i < n; i++) x[i] = moe_rng_normal(&rng), dy[i] = moe_rng_normal(&rng), dx[i] = 0;
            T(moe_softmax)(NULL, n, x, 1, y);
            at = below(n), dy[at] = specials[special];
            T(moe_softmax_backward)(n, y, dy, 1, dx);
            if (special < FIRST_ENDLESS - 1) CHECK(all_finite(n, dx), "softmax_backward with dy = %s", special_names[special]);
            for (i = 0; i < n && special >= FIRST_ENDLESS; i++) CHECK(!moe_is_finite(dx[i]), "softmax_backward with dy = %s", special_names[special]);
            memset(y, 0, sizeof y), memset(dx, 0, sizeof dx), y[at] = 1;
            if (special < FIRST_ENDLESS - 1) {
                T(moe_softmax_backward)(n, y, dy, 1, dx);
                for (i = 0; i < n && !(dx[i] < 0) && !(dx[i] > 0) && moe_is_finite(dx[i]);) i++;
                CHECK(i == n, "a sure softmax passes no gradient, dy = %s", special_names[special]);
            }
        }
}

static void test_top_k(void) {
    moe_real score[LENGTH];
    int32_t index[LENGTH];
    size_t n, k, i, taken, trial;
    for (trial = 0; trial < 400; trial++) {
        int wrong = 0;
        size_t real = 0;
        n = below(LENGTH) + 1, k = below(n + 3);
        for (i = 0; i < n; i++) score[i] = specials[below(SPECIALS)], real += !is_nan(score[i]) && score[i] >= -LARGEST;
        taken = T(moe_top_k)(n, score, k, index);
        CHECK(taken == (real < k ? real : k), "top_k of special numbers takes what is a number");
        for (i = 0; i < taken; i++) {
            size_t j, before = 0;
            for (j = 0; j < n; j++) before += score[j] > score[index[i]] || (j < (size_t)index[i] && !(score[j] < score[index[i]]) && !is_nan(score[j]));
            wrong += before != i;
        }
        CHECK(wrong == 0, "top_k of special numbers keeps their order");
    }
}

/* ---- kernels: packed and quantised weights ---------------------------------------------------------------------------------------------- */

static void test_packed(const moe_kernels *k) {
    enum { M = 3, N = 21, K = 70 };
    static moe_real w[N * K], a[M * K], back[N * K], c[M * N], plain[M * N];
    int type, special;
    size_t i, j, bytes, at, row;
    for (type = MOE_TYPE_REAL; type <= MOE_TYPE_BF16; type++)
        for (special = 0; special < SPECIALS; special++) {
            void *packed;
            moe_real want, expected;
            int leaks = 0;
            for (i = 0; i < N * K; i++) w[i] = moe_rng_normal(&rng);
            for (i = 0; i < M * K; i++) a[i] = moe_rng_normal(&rng);
            CHECK(T(moe_panel_size)(type, K, &bytes) == MOE_OK, "size");
            packed = grab(2 * bytes, 1);
            CHECK(T(moe_pack)(k, type, N, K, w, K, packed, 1) == MOE_OK, "packs");
            T(moe_matmul_packed)(k, type, M, N, K, a, K, packed, plain, N);
            at = below(N * K), row = at / K, w[at] = specials[special];
            CHECK(T(moe_pack)(k, type, N, K, w, K, packed, 1) == MOE_OK, "packs %s", special_names[special]);
            CHECK(T(moe_unpack)(type, N, K, packed, 1, back, K) == MOE_OK, "unpacks");
            want = back[at], expected = specials[special];
            if (type == MOE_TYPE_F16 && special > 6) expected = special == IS_NAN ? specials[IS_NAN] : infinity_of(expected > 0 ? 1 : -1);
            if (type == MOE_TYPE_F16 && special < 5) expected = 0;
            if (type == MOE_TYPE_BF16 && special == 9) expected = infinity_of(1);
            if (type == MOE_TYPE_BF16 && MOE_REAL_IS_DOUBLE && special < FIRST_ENDLESS && special > 6) expected = infinity_of(expected > 0 ? 1 : -1);
            CHECK(alike(want, expected, WIDE(fabs)((wide)expected) / 200 + SMALLEST_NORMAL), "type %d: %s becomes %g", type, special_names[special], (double)want);
            T(moe_matmul_packed)(k, type, M, N, K, a, K, packed, c, N);
            for (i = 0; i < M; i++)
                for (j = 0; j < N; j++)
                    if (j != row) leaks += !same_bits(c + i * N + j, plain + i * N + j, 1);
                    else if (!moe_is_finite(want)) leaks += moe_is_finite(c[i * N + j]);
            CHECK(leaks == 0, "packed product of %s, type %d: a weight %s reaches its output alone: %d", k->name, type, special_names[special], leaks);
            free(packed);
        }
}

#ifndef MOE_NO_QUANT
static void test_quantised(const moe_kernels *k) {
    enum { M = 5, N = 19, K = 70 };
    static moe_real w[N * K], x[M * K], c[M * N], plain[M * N];
    int type, special, wrong;
    size_t i, j, bytes, at, size;
    for (type = MOE_TYPE_Q8; type < MOE_TYPE_COUNT; type++) {
        unsigned char *packed, *before, *rows;
        for (i = 0; i < N * K; i++) w[i] = moe_rng_normal(&rng);
        for (i = 0; i < M * K; i++) x[i] = moe_rng_normal(&rng);
        CHECK(T(moe_panel_size)(type, K, &bytes) == MOE_OK, "size");
        size = T(moe_quant_row_size)(type, K);
        packed = (unsigned char *)grab(2 * bytes, 1), before = (unsigned char *)grab(2 * bytes, 1), rows = (unsigned char *)grab(M * size, 1);
        for (special = 0; special < SPECIALS; special++) { /* in a weight */
            const moe_real kept = w[at = below(N * K)];
            moe_status status, wanted = special >= FIRST_ENDLESS ? MOE_ERR_NONFINITE : MOE_OK;
            w[at] = specials[special];
            if (special > 6 && special < FIRST_ENDLESS && (type != MOE_TYPE_Q8 || MOE_REAL_IS_DOUBLE)) wanted = MOE_ERR_OVERFLOW;
            memset(packed, 0x5a, 2 * bytes), memcpy(before, packed, 2 * bytes);
            status = T(moe_pack)(k, type, N, K, w, K, packed, 1);
            CHECK(status == wanted && (status == MOE_OK || memcmp(packed, before, 2 * bytes) == 0), "type %d: a weight %s: %s", type, special_names[special], moe_status_text(status));
            w[at] = kept;
        }
        for (i = 0; i < 3 * K; i++) w[i] = i < K ? 0 : i < 2 * K ? TINY : SMALLEST_NORMAL; /* outputs 0 to 2 */
        CHECK(T(moe_pack)(k, type, N, K, w, K, packed, 1) == MOE_OK, "rows of nothing and next to nothing");
        T(moe_quantise_rows)(k, type, M, K, x, K, rows);
        T(moe_matmul_quant)(k, type, M, N, K, rows, packed, 1, plain, N);
        for (i = 0, wrong = 0; i < M; i++) wrong += plain[i * N] < 0 || plain[i * N] > 0 || !(WIDE(fabs)((wide)plain[i * N + 1]) < 1e-30) || !(WIDE(fabs)((wide)plain[i * N + 2]) < 1e-30);
        CHECK(wrong == 0 && all_finite(M * N, plain), "type %d of %s: they give 0", type, k->name);
        for (special = 0; special < SPECIALS; special++) { /* in an activation */
            size_t row;
            moe_real kept;
            at = below(M * K), row = at / K, kept = x[at], x[at] = specials[special];
            T(moe_quantise_rows)(k, type, M, K, x, K, rows);
            T(moe_matmul_quant)(k, type, M, N, K, rows, packed, 1, c, N);
            for (i = 0, wrong = 0; i < M; i++)
                for (j = 0; j < N; j++)
                    if (i != row) wrong += !same_bits(c + i * N + j, plain + i * N + j, 1);
                    else wrong += special >= FIRST_ENDLESS ? !is_nan(c[i * N + j]) : special < 9 && !moe_is_finite(c[i * N + j]);
            CHECK(wrong == 0, "type %d of %s: an activation %s: %d wrong", type, k->name, special_names[special], wrong);
            x[at] = kept;
        }
        for (special = 0; special < 5; special++) { /* rows of one small number */
            for (i = 0; i < K; i++) x[i] = specials[special];
            T(moe_quantise_rows)(k, type, M, K, x, K, rows);
            T(moe_matmul_quant)(k, type, M, N, K, rows, packed, 1, c, N);
            for (j = 0, wrong = 0; j < N; j++) wrong += !(WIDE(fabs)((wide)c[j]) < 1e-30);
            CHECK(wrong == 0, "type %d of %s: a row of %s", type, k->name, special_names[special]);
        }
        free(packed), free(before), free(rows);
    }
    { /* rows from other programs: their scales may be anything */
        enum { ROWS = 3, INNER = 64 };
        unsigned char blocks[ROWS * INNER / 32 * 34], again[sizeof blocks], *packed;
        static const unsigned scale[4] = {0x7c00u, 0xfe01u, 0x0001u, 0x8000u}; /* inf, NaN, the smallest, -0 */
        for (type = 0; type < 2; type++) {
            const size_t block = type == 0 ? 34 : 18, all = ROWS * INNER / 32 * block;
            for (i = 0; i < all; i++) blocks[i] = (unsigned char)below(256);
            for (i = 0; i < ROWS * INNER / 32; i++) blocks[i * block] = (unsigned char)(scale[i % 4] & 255u), blocks[i * block + 1] = (unsigned char)(scale[i % 4] >> 8);
            CHECK(T(moe_panel_size)(type == 0 ? MOE_TYPE_Q8_BLOCK : MOE_TYPE_Q4, INNER, &bytes) == MOE_OK, "size");
            packed = (unsigned char *)grab(bytes, 1);
            if (type == 0) CHECK(T(moe_pack_q8_0)(ROWS, INNER, blocks, packed, 1) == MOE_OK && T(moe_unpack_q8_0)(ROWS, INNER, packed, 1, again) == MOE_OK, "Q8_0");
            else CHECK(T(moe_pack_q4_0)(ROWS, INNER, blocks, packed, 1) == MOE_OK && T(moe_unpack_q4_0)(ROWS, INNER, packed, 1, again) == MOE_OK, "Q4_0");
            CHECK(memcmp(blocks, again, all) == 0, "any scale comes back bit for bit");
            free(packed);
        }
    }
}
#endif

static void test_kernels(void) {
    size_t i;
    int t;
    for (i = 0; i < SPECIALS; i++) CHECK(T(moe_is_finite)(specials[i]) == (i < FIRST_ENDLESS), "is_finite of %s", special_names[i]);
    test_all_numberwise();
    for (t = 0; t < n_tables; t++) {
        test_dot(tables[t]);
        test_products(tables[t]);
        test_softmaxes(tables[t]);
        test_sums_of_logarithms(tables[t]);
        test_packed(tables[t]);
#ifndef MOE_NO_QUANT
        test_quantised(tables[t]);
#endif
    }
    test_log_sum_exp();
    test_norms();
    test_softmax_backward();
    test_top_k();
}

/* ---- routers and layers --------------------------------------------------------------------------------------------------------------------
   Every preset and every value of every choice of a router's configuration, with one special number in one place of what a call hands over:
   the call ends with MOE_OK and finite weights or with MOE_ERR_NONFINITE. Moderate numbers give finite results and gradients. */

enum { TOKENS = 9, WIDTH = 24, EXPERTS = 8, MOST_ARRAYS = 14 };

typedef struct array {
    const char *name;
    moe_real *data;
    size_t rows, width; /* rows: TOKENS where row t belongs to token t, else 1 */
    int whole_line;     /* 1: takes any real number; 0: probabilities and the like, which are not negative or not large */
} array;

typedef struct scene {
    moe_layer layer;
    moe_call call;
    unsigned char mask[TOKENS];
    int32_t ids[TOKENS], previous[TOKENS], given[TOKENS * EXPERTS], home[TOKENS], sequences[2];
    array arrays[MOST_ARRAYS];
    size_t n_arrays;
    moe_real *dy;
    size_t n_gradients;
} scene;

typedef struct outcome {
    moe_status status;
    moe_real y[TOKENS * WIDTH], dx[TOKENS * WIDTH], *gradients;
    moe_routing routing;
    void *work;
} outcome;

static moe_status custom_score(void *ctx, const struct moe_router *router, const moe_call *call, const moe_real *u, moe_real *logits) {
    size_t t, e;
    (void)ctx;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < (size_t)router->config.n_experts; e++) logits[t * (size_t)router->config.n_experts + e] = u[t * (size_t)router->config.d_model + e];
    return MOE_OK;
}

static moe_status custom_select(void *ctx, const struct moe_router *router, const moe_call *call, const moe_real *logits, const moe_real *probabilities,
                                unsigned char *chosen) {
    size_t t;
    (void)ctx, (void)logits, (void)probabilities;
    for (t = 0; t < call->n_tokens; t++) chosen[t * (size_t)router->config.n_experts + t % (size_t)router->config.n_experts] = 1;
    return MOE_OK;
}

static moe_real *add_array(scene *s, const char *name, size_t rows, size_t width, int whole_line) {
    array *a = &s->arrays[s->n_arrays++];
    size_t i;
    a->name = name, a->rows = rows, a->width = width, a->whole_line = whole_line;
    a->data = normals(rows * width);
    for (i = 0; i < rows * width && !whole_line; i++) a->data[i] = moe_rng_uniform(&rng) / (moe_real)TOKENS + (moe_real)0.01;
    return a->data;
}

/* What some router asks for, all of it. */
static int begin_scene(scene *s, const moe_layer_config *config) {
    const size_t heads = config->router.heads > 0 ? (size_t)config->router.heads : 1;
    moe_tensor tensor;
    moe_error error;
    size_t i;
    memset(s, 0, sizeof *s);
    if (T(moe_layer_create)(&s->layer, config, 1, 5, NULL, &error) != MOE_OK) return 0;
    if (config->router.score == MOE_SCORE_CUSTOM) s->layer.router.custom.score = custom_score;
    if (config->router.select == MOE_SELECT_CUSTOM) s->layer.router.custom.select = custom_select;
    for (i = 0; T(moe_layer_tensor)(&s->layer, i, &tensor) == MOE_OK; i++) s->n_gradients += tensor.count;
    for (i = 0; i < TOKENS; i++) {
        s->mask[i] = i != 4, s->ids[i] = (int32_t)below(8), s->previous[i] = (int32_t)below(EXPERTS), s->home[i] = (int32_t)below(2);
        s->given[i * 2] = (int32_t)(i % EXPERTS), s->given[i * 2 + 1] = (int32_t)((i + 3) % EXPERTS);
    }
    s->call.n_tokens = TOKENS, s->call.mask = s->mask, s->call.token_ids = s->ids, s->call.home = s->home;
    s->call.x = add_array(s, "x", TOKENS, WIDTH, 1);
    s->call.previous_input = add_array(s, "previous_input", TOKENS, WIDTH, 1);
    s->call.previous_weights = add_array(s, "previous_weights", TOKENS, 1, 0);
    s->call.previous_experts = s->previous, s->call.n_previous = 1;
    s->call.attention_weights = add_array(s, "attention_weights", 1, heads * TOKENS * TOKENS, 0);
    s->call.attention_outputs = add_array(s, "attention_outputs", 1, heads * TOKENS * WIDTH, 1);
    s->call.attention_output = add_array(s, "attention_output", TOKENS, WIDTH, 1);
    s->call.jitter = add_array(s, "jitter", TOKENS, WIDTH, 0);
    s->call.teacher = add_array(s, "teacher", TOKENS, EXPERTS, 1);
    s->call.distances = add_array(s, "distances", 1, TOKENS * TOKENS, 0);
    if (config->router.noise != MOE_NOISE_NONE) s->call.noise = add_array(s, "noise", TOKENS, EXPERTS, 1);
    if (config->router.select == MOE_SELECT_GIVEN) s->call.given = s->given;
    s->dy = normals(TOKENS * WIDTH);
    return 1;
}

static void end_scene(scene *s) {
    size_t i;
    for (i = 0; i < s->n_arrays; i++) free(s->arrays[i].data);
    free(s->dy);
    T(moe_layer_free)(&s->layer);
}

static void run_scene(const scene *s, int training, outcome *r) {
    moe_layer_pass pass;
    moe_call call = s->call;
    moe_rng own;
    moe_tensor t;
    unsigned char before[sizeof pass];
    size_t bytes = 0, i, at = 0;
    memset(r->y, 0, sizeof r->y), memset(r->dx, 0, sizeof r->dx);
    T(moe_rng_seed)(&own, 3);
    call.training = training, call.rng = &own;
    CHECK(T(moe_layer_work_size)(&s->layer, TOKENS, training, &bytes) == MOE_OK, "work size");
    r->work = realloc(r->work, bytes + 1);
    if (r->work == NULL) exit(2);
    memset(r->work, 0xff, bytes); /* NaN where something is read that was not written */
    memset(&pass, 0x5a, sizeof pass), memcpy(before, &pass, sizeof pass);
    r->status = T(moe_layer_forward)(&s->layer, &call, r->y, r->work, bytes, &pass);
    if (r->status != MOE_OK) {
        CHECK(memcmp(before, &pass, sizeof pass) == 0, "a failed call leaves the pass");
        return;
    }
    r->routing = pass.routing;
    if (!training) return;
    for (i = 0; T(moe_layer_tensor)(&s->layer, i, &t) == MOE_OK; i++) memset(t.gradient, 0, t.count * sizeof(moe_real));
    CHECK(T(moe_layer_backward)(&s->layer, s->dy, r->dx, NULL, &pass) == MOE_OK, "backward");
    for (i = 0; T(moe_layer_tensor)(&s->layer, i, &t) == MOE_OK; at += t.count, i++) memcpy(r->gradients + at, t.gradient, t.count * sizeof(moe_real));
}

/* What holds of every routing: indices in range, sums that agree, finite weights. */
static int routing_is_sound(const moe_routing *r) {
    const moe_plan *p = &r->plan;
    size_t e, i, pairs = 0, t;
    int good = p->offsets[0] == 0;
    for (e = 0; e < r->n_experts; e++)
        for (i = p->offsets[e], good &= p->offsets[e] <= p->offsets[e + 1]; i < p->offsets[e + 1]; i++)
            good &= p->entries[i].token >= 0 && (size_t)p->entries[i].token < r->n_tokens && moe_is_finite(p->entries[i].weight_in) && moe_is_finite(p->entries[i].weight_out);
    if (p->rows > 0) return good;
    for (t = 0; t < r->n_tokens; t++) {
        pairs += (size_t)r->n_choices[t];
        for (i = 0; i < (size_t)r->n_choices[t]; i++) {
            const int32_t choice = r->choices[t * r->max_choices + i];
            good &= choice >= 0 && (size_t)choice < r->n_experts && moe_is_finite(r->probabilities[t * r->n_experts + (size_t)choice]);
        }
    }
    return good && pairs == r->n_dropped + p->offsets[r->n_experts];
}

static long nonfinite_calls, good_calls;

/* One special number in one place of an array of the call. */
static void test_place(scene *s, const char *name, const array *a, int special, int training, const outcome *plain, outcome *r) {
    const unsigned traits = moe_router_traits(&s->layer.config.router);
    const size_t at = below(a->rows * a->width), token = at / a->width, o = (size_t)s->layer.config.d_out;
    const int padding = a->rows == TOKENS && !s->mask[token];
    const moe_real kept = a->data[at];
    int moderate = special <= (a->whole_line ? 6 : 4);
    size_t t;
    a->data[at] = specials[special];
    run_scene(s, training, r);
    a->data[at] = kept;
    CHECK(r->status == MOE_OK || (r->status == MOE_ERR_NONFINITE && !moderate && !padding), "%s: %s = %s: %s", name, a->name, special_names[special], moe_status_text(r->status));
    if (r->status != MOE_OK) {
        nonfinite_calls++;
        return;
    }
    good_calls++;
    CHECK(routing_is_sound(&r->routing), "%s, training %d: %s = %s: the routing is not sound", name, training, a->name, special_names[special]);
    if (moderate) CHECK(all_finite(TOKENS * o, r->y), "%s, training %d: %s = %s: y is not finite", name, training, a->name, special_names[special]);
    if (moderate && training)
        CHECK(all_finite(s->n_gradients, r->gradients) && all_finite(TOKENS * WIDTH, r->dx), "%s: %s = %s: a gradient is not finite", name, a->name, special_names[special]);
    if (padding && training && s->layer.config.n_shared == 0) /* the shared expert takes padding like any row */
        CHECK(same_bits(r->gradients, plain->gradients, s->n_gradients), "%s: padding, %s = %s, reaches a gradient", name, a->name, special_names[special]);
    for (t = 0; t < TOKENS; t++) {
        if (t == token && a->rows == TOKENS) continue;
        if (padding || (a->rows == TOKENS && (traits & MOE_TRAIT_CAUSAL) && (t < token || !(traits & MOE_TRAIT_NEEDS_BATCH))))
            CHECK(same_bits(r->y + t * o, plain->y + t * o, o), "%s, training %d: %s of token %d = %s reaches token %d", name, training, a->name, (int)token, special_names[special], (int)t);
    }
}

static void test_tensor_place(scene *s, const char *name, int special, outcome *r) {
    moe_tensor t;
    size_t i;
    for (i = 0; T(moe_layer_tensor)(&s->layer, i, &t) == MOE_OK; i++) {
        const size_t at = below(t.count);
        const moe_real kept = t.data[at];
        t.data[at] = specials[special];
        run_scene(s, (int)below(2), r);
        t.data[at] = kept;
        CHECK(r->status == MOE_OK || r->status == MOE_ERR_NONFINITE || (r->status == MOE_ERR_ARGUMENT && strcmp(t.name, "router.table") == 0), "%s: %s = %s: %s", name,
              t.name, special_names[special], moe_status_text(r->status));
        if (r->status == MOE_OK) CHECK(routing_is_sound(&r->routing), "%s: %s = %s: the routing is not sound", name, t.name, special_names[special]);
    }
}

/* All of x small or large: logits far apart, gates that are sure, weights and sums that underflow. Up to 1e4 everything is finite. */
static void test_scales(scene *s, const char *name, int training, outcome *r) {
    static const double scales[] = {0, 1e-36, 1e-20, 1e-6, 3, 12, 25, 40, 100, 1e3, 1e4, 1e10, 1e18};
    const moe_router_config *c = &s->layer.config.router;
    const int fixed = c->select == MOE_SELECT_TOP_K || c->select == MOE_SELECT_GROUPED_TOP_K || c->select == MOE_SELECT_SINKHORN || c->select == MOE_SELECT_HASH ||
                      c->select == MOE_SELECT_GIVEN || c->select == MOE_SELECT_BALANCED;
    moe_real *x = s->arrays[0].data, kept[TOKENS * WIDTH];
    size_t i, t;
    memcpy(kept, x, sizeof kept);
    for (i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        for (t = 0; t < TOKENS * WIDTH; t++) x[t] = (moe_real)(scales[i] * (double)kept[t]);
        run_scene(s, training, r);
        CHECK(r->status == MOE_OK || (scales[i] > 1e4 && r->status == MOE_ERR_NONFINITE), "%s, training %d: x times %g: %s", name, training, scales[i], moe_status_text(r->status));
        if (r->status != MOE_OK) continue;
        CHECK(routing_is_sound(&r->routing), "%s, training %d: x times %g: the routing is not sound", name, training, scales[i]);
        for (t = 0; t < TOKENS && fixed; t++)
            CHECK(r->routing.n_choices[t] == (s->mask[t] ? r->routing.top_k : 0), "%s, training %d: x times %g: token %d has %d experts", name, training, scales[i], (int)t,
                  (int)r->routing.n_choices[t]);
        if (scales[i] > 1e4) continue;
        CHECK(all_finite(TOKENS * (size_t)s->layer.config.d_out, r->y), "%s, training %d: x times %g: y", name, training, scales[i]);
        if (!training) continue;
        CHECK(all_finite(s->n_gradients, r->gradients) && all_finite(TOKENS * WIDTH, r->dx), "%s: x times %g: a gradient", name, scales[i]);
    }
    memcpy(x, kept, sizeof kept);
}

static void test_layer_config(const moe_layer_config *config, const char *name, int tries) {
    scene s;
    outcome plain, r;
    int training, special, i;
    size_t a;
    if (!begin_scene(&s, config)) return;
    memset(&plain, 0, sizeof plain), memset(&r, 0, sizeof r);
    plain.gradients = (moe_real *)grab(s.n_gradients, sizeof *plain.gradients), r.gradients = (moe_real *)grab(s.n_gradients, sizeof *r.gradients);
    for (training = 0; training < 2; training++) {
        run_scene(&s, training, &plain);
        if (!CHECK(plain.status == MOE_OK, "%s: %s", name, moe_status_text(plain.status))) continue;
        CHECK(routing_is_sound(&plain.routing) && all_finite(TOKENS * (size_t)s.layer.config.d_out, plain.y), "%s: a plain call", name);
        test_scales(&s, name, training, &r);
        for (a = 0; a < s.n_arrays; a++)
            for (special = 0; special < SPECIALS; special++)
                for (i = 0; i < tries; i++) test_place(&s, name, &s.arrays[a], special, training, &plain, &r);
        for (special = 0; special < SPECIALS; special++) test_tensor_place(&s, name, special, &r);
    }
    free(plain.gradients), free(plain.work), free(r.gradients), free(r.work);
    end_scene(&s);
}

static void test_layer_scales(const moe_layer_config *config, const char *name) {
    scene s;
    outcome r;
    int training;
    if (!begin_scene(&s, config)) return;
    memset(&r, 0, sizeof r);
    r.gradients = (moe_real *)grab(s.n_gradients, sizeof *r.gradients);
    for (training = 0; training < 2; training++) test_scales(&s, name, training, &r);
    free(r.gradients), free(r.work);
    end_scene(&s);
}

static moe_layer_config small_layer(void) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.d_model = WIDTH, c.router.n_experts = EXPERTS, c.router.top_k = 2, c.d_ff = 5;
    return c;
}

/* What a configuration with one unusual choice needs besides to be accepted. */
static void complete(moe_layer_config *c) {
    moe_router_config *r = &c->router;
    if (r->select == MOE_SELECT_HASH) r->table_size = 8;
    if (r->select == MOE_SELECT_GROUPED_TOP_K) r->groups = 4, r->groups_kept = 2;
    if (r->select == MOE_SELECT_EXPERT_CHOICE) r->capacity_factor = 2;
    if (r->select == MOE_SELECT_BALANCED || r->select == MOE_SELECT_AFFINITY) r->top_k = 1, r->weight = MOE_WEIGHT_RAW;
    if (r->score == MOE_SCORE_DSELECT) r->gate = MOE_GATE_IDENTITY, r->select = MOE_SELECT_POSITIVE;
    if (r->score == MOE_SCORE_NORM) c->expert = MOE_EXPERT_FACTORISED, c->d_low = 4;
    if (r->refine == MOE_REFINE_ATTENTION) r->heads = 2;
    if (r->heads > 2) r->heads = 2;
    if (r->n_experts == 0 || r->n_experts > EXPERTS) r->n_experts = EXPERTS;
    if (r->top_k > EXPERTS) r->top_k = EXPERTS;
    if (r->groups > EXPERTS) r->groups = 4, r->groups_kept = 2;
    r->untrained = 1;
}

static void test_routers(void) {
    const moe_preset *preset;
    const moe_field *f;
    char name[96];
    int i;
    for (preset = T(moe_presets)(); preset->name != NULL; preset++) {
        moe_layer_config c;
        if (!CHECK(T(moe_layer_preset)(preset->name, &c, NULL) == MOE_OK, "preset")) continue;
        c.router.d_model = WIDTH, c.d_ff = 5;
        complete(&c);
        test_layer_config(&c, preset->name, 1);
    }
    for (f = T(moe_layer_fields)(); f->name != NULL; f++)
        for (i = 1; f->kind == MOE_FIELD_CHOICE ? f->choices[i] != NULL : f->kind == MOE_FIELD_FLAG && i < 2; i++) {
            moe_layer_config c = small_layer();
            int both;
            if (strcmp(f->name, "kernels") == 0) continue;
            for (both = 0; both < 2; both++) {
                c = small_layer();
                if (both) c.router.refine = MOE_REFINE_SIMILARITY, c.router.gate = MOE_GATE_SIGMOID, c.router.loss_z = 1, c.router.loss_balance = 1;
                *(int *)(void *)((unsigned char *)&c + f->offset) = i;
                complete(&c);
                sprintf(name, "%s = %d%s", f->name, i, both ? " with similarity" : "");
                if (T(moe_layer_check)(&c, NULL, NULL) == MOE_OK) test_layer_config(&c, name, 1);
            }
        }
}

/* Gates, selections and weights with each other, all losses on. */
static void test_scaled_grid(void) {
    static const int selects[] = {MOE_SELECT_TOP_K, MOE_SELECT_DENSE, MOE_SELECT_GIVEN, MOE_SELECT_TOP_P, MOE_SELECT_THRESHOLD, MOE_SELECT_POSITIVE, MOE_SELECT_EXPERT_CHOICE,
                                  MOE_SELECT_AFFINITY, MOE_SELECT_HASH, MOE_SELECT_SINKHORN, MOE_SELECT_SAMPLE, MOE_SELECT_BALANCED};
    size_t select;
    int gate, weight, score, variant;
    char name[96];
    for (gate = 0; gate < MOE_GATE_COUNT; gate++)
        for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++)
            for (select = 0; select < sizeof selects / sizeof selects[0]; select++)
                for (variant = 0; variant < 4; variant++) {
                    moe_layer_config c = small_layer();
                    moe_router_config *r = &c.router;
                    score = variant == 3 ? MOE_SCORE_COSINE : MOE_SCORE_LINEAR;
                    r->gate = gate, r->weight = weight, r->select = selects[select], r->score = score;
                    if (variant == 1) r->renormalize = MOE_RENORMALIZE_AFTER, r->loss_balance = r->loss_z = r->loss_importance = r->loss_entropy = r->loss_usage_entropy = 1;
                    if (variant == 2) r->weight_p = 3, r->loss_l1 = r->loss_similarity_same = r->loss_similarity_diff = 1, r->loss_distill = 1, r->distill = MOE_DISTILL_CE_SOFT;
                    if (variant == 3) r->cosine_tau = (moe_real)0.01, r->loss_orthogonal = 1, r->threshold_learned = r->select == MOE_SELECT_THRESHOLD;
                    if (weight != MOE_WEIGHT_P_NORM) r->weight_p = 0;
                    if (r->renormalize == MOE_RENORMALIZE_AFTER && r->select != MOE_SELECT_EXPERT_CHOICE) r->drop_capacity = 3;
                    complete(&c);
                    r->weight = weight;
                    sprintf(name, "gate %d, weight %d, select %d, variant %d", gate, weight, selects[select], variant);
                    if (T(moe_layer_check)(&c, NULL, NULL) == MOE_OK) test_layer_scales(&c, name);
                }
}

/* ---- nets --------------------------------------------------------------------------------------------------------------------------------- */

enum { NET_WIDTH = 16, NET_TOKENS = 150, FEED_FORWARD = 0, MIXTURE = 1, LINEAR = 2 };

/* Modules that look at one token at a time, or at the earlier ones. */
static void begin_net(moe_net *net, int kernels, int middle, int trainable) {
    moe_attention_config attention;
    moe_layer_config layer = small_layer();
    moe_error error;
    memset(&attention, 0, sizeof attention);
    attention.heads = 2, attention.rotary = 1;
    layer.router.d_model = 0, layer.router.n_experts = 4, layer.d_ff = 12;
    CHECK(T(moe_net_init)(net, NET_WIDTH, kernels, NULL) == MOE_OK, "net");
    (void)T(moe_net_positions)(net, NET_TOKENS);
    (void)T(moe_net_rms_norm)(net), (void)T(moe_net_attention)(net, &attention), (void)T(moe_net_residual)(net, 2);
    (void)T(moe_net_layer_norm)(net);
    (void)(middle == MIXTURE ? T(moe_net_mixture)(net, &layer) : middle == LINEAR ? T(moe_net_linear)(net, NET_WIDTH) : T(moe_net_feed_forward)(net, NULL));
    (void)T(moe_net_residual)(net, 2);
    (void)T(moe_net_linear)(net, 24), (void)T(moe_net_activation)(net, MOE_ACT_GELU), (void)T(moe_net_dropout)(net, (moe_real)0.1), (void)T(moe_net_linear)(net, NET_WIDTH);
    if (!CHECK(T(moe_net_build)(net, trainable, 3, &error) == MOE_OK, "build: %s", error.message)) exit(1);
}

/* y of every token after a forward, or where the call failed. */
static moe_status run_net(const moe_net *net, moe_call *call, moe_real *y) {
    moe_net_pass pass;
    moe_status status;
    size_t bytes = 0;
    void *work;
    CHECK(T(moe_net_work_size)(net, call->n_tokens, 0, &bytes) == MOE_OK, "work size");
    work = grab(bytes, 1);
    memset(work, 0xff, bytes);
    status = T(moe_net_forward)(net, call, work, bytes, &pass);
    if (status == MOE_OK) memcpy(y, pass.y, call->n_tokens * (size_t)net->d_out * sizeof *y);
    free(work);
    return status;
}

/* A token's number reaches no earlier token, to the bit; decoding gives the bits of the whole sequence even behind such a number. */
static void test_net_rows(int kernels, int middle) {
    moe_net net;
    moe_call call;
    moe_real *x = normals(NET_TOKENS * NET_WIDTH), *plain = normals(NET_TOKENS * NET_WIDTH), *y = normals(NET_TOKENS * NET_WIDTH);
    unsigned char mask[NET_TOKENS];
    int special;
    size_t i;
    begin_net(&net, kernels, middle, 0);
    memset(&call, 0, sizeof call);
    call.n_tokens = NET_TOKENS, call.x = x;
    CHECK(run_net(&net, &call, plain) == MOE_OK && all_finite(NET_TOKENS * NET_WIDTH, plain), "a plain call");
    for (special = 0; special < SPECIALS; special++) {
        static const size_t places[] = {0, 1, 40, 63, 64, 100, 149};
        for (i = 0; i < sizeof places / sizeof places[0]; i++) {
            const size_t t = places[i], at = t * NET_WIDTH + below(NET_WIDTH);
            const moe_real kept = x[at];
            moe_status status;
            x[at] = specials[special];
            status = run_net(&net, &call, y);
            x[at] = kept;
            if (status != MOE_OK) {
                CHECK(status == MOE_ERR_NONFINITE && middle != LINEAR && special > 8, "net %d, %s: %s", middle, special_names[special], moe_status_text(status));
                continue;
            }
            CHECK(same_bits(y, plain, t * NET_WIDTH), "%s in token %d reaches an earlier one", special_names[special], (int)t);
            CHECK(special > 6 || all_finite(NET_TOKENS * NET_WIDTH, y), "%s in token %d", special_names[special], (int)t);
            CHECK(special != IS_NAN || all_nan((NET_TOKENS - t) * NET_WIDTH, y + t * NET_WIDTH), "NaN is not lost on its way");
        }
    }
    for (i = 0; i < NET_TOKENS; i++) mask[i] = (unsigned char)(i % 7 != 3);
    call.mask = mask; /* padding passes like any row, but attention and mixtures do not look at it */
    CHECK(run_net(&net, &call, plain) == MOE_OK, "a call with padding");
    for (special = 0; special < (middle == FEED_FORWARD ? 9 : SPECIALS); special++) {
        int reached = 0;
        size_t j;
        for (i = 3; i < NET_TOKENS; i += 7)
            for (j = 0; j < NET_WIDTH; j++) x[i * NET_WIDTH + j] = specials[special];
        if (!CHECK(run_net(&net, &call, y) == MOE_OK, "net %d: padding of %s", middle, special_names[special])) continue;
        for (i = 0; i < NET_TOKENS; i++) reached += mask[i] && !same_bits(y + i * NET_WIDTH, plain + i * NET_WIDTH, NET_WIDTH);
        CHECK(reached == 0, "net %d: padding of %s reaches %d tokens", middle, special_names[special], reached);
    }
    T(moe_net_free)(&net);
    free(x), free(plain), free(y);
}

static void test_decoding(void) {
    enum { N = 70 };
    moe_net net;
    moe_cache cache;
    moe_call call;
    moe_net_pass pass;
    moe_error error;
    moe_real *x = normals(N * NET_WIDTH), *whole = normals(N * NET_WIDTH);
    size_t bytes = 0, work_bytes = 0, i;
    void *memory, *work;
    begin_net(&net, MOE_KERNELS_AUTO, LINEAR, 0);
    memset(&call, 0, sizeof call);
    x[40 * NET_WIDTH + 3] = specials[IS_NAN];
    call.n_tokens = N, call.x = x;
    CHECK(run_net(&net, &call, whole) == MOE_OK, "a whole sequence");
    CHECK(T(moe_net_cache_size)(&net, N, &bytes) == MOE_OK && T(moe_net_decode_work_size)(&net, N, 1, &work_bytes) == MOE_OK, "sizes");
    memory = grab(bytes, 1), work = grab(work_bytes, 1);
    CHECK(T(moe_net_cache_init)(&cache, &net, N, memory, bytes, &error) == MOE_OK, "a cache");
    for (i = 0; i < N; i++) {
        call.n_tokens = 1, call.x = x + i * NET_WIDTH;
        if (!CHECK(T(moe_net_decode)(&net, &cache, &call, work, work_bytes, &pass) == MOE_OK, "decodes token %d", (int)i)) break;
        CHECK(i < 40 ? same_bits(pass.y, whole + i * NET_WIDTH, NET_WIDTH) : all_nan(NET_WIDTH, pass.y), "token %d of a sequence with NaN at 40", (int)i);
    }
    cache.n_tokens = 40; /* back to before it: as if it had never been */
    for (i = 0; i < NET_WIDTH; i++) x[40 * NET_WIDTH + i] = 1;
    call.x = x + 40 * NET_WIDTH;
    CHECK(T(moe_net_decode)(&net, &cache, &call, work, work_bytes, &pass) == MOE_OK && all_finite(NET_WIDTH, pass.y), "and back");
    free(memory), free(work), free(x), free(whole);
    T(moe_net_free)(&net);
}

static void test_nets(void) {
    int t;
    for (t = 0; t < n_tables; t++) test_net_rows(tables[t]->id, FEED_FORWARD), test_net_rows(tables[t]->id, MIXTURE), test_net_rows(tables[t]->id, LINEAR);
    test_decoding();
}
