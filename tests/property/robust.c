/* robust.c - numbers that nobody wants: zeros of both signs, subnormal and huge numbers, infinities
   and NaN in every place where a function takes a number, and what the headers say of it; long
   training; the same bits twice and for any number of threads.

     cc -std=c99 -O2 -I. tests/property/robust.c -o robust -lm && ./robust
     (also with -DMOE_REAL=double and -DMOE_NO_SIMD)

   ./robust quick: less of the long training, for valgrind and emulators. ./robust steps=N: the long
   training with N steps a network [100000]. The table at the end names every public function of the
   headers, and what in it is a number. Exit status 1 if a check failed. */

#define MOE_IMPLEMENTATION /* private functions are tested too */
#include "../all.h"
#include "../test.h"
#include "../unit/vocab.h"
#include "../unit/whole.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static moe_rng rng;

/* ---- which functions were called ---- */

static const char *called[512];
static size_t n_called;

static void tested(const char *name) {
    size_t i;
    for (i = 0; i < n_called; i++)
        if (called[i] == name || strcmp(called[i], name) == 0) return;
    if (n_called < sizeof called / sizeof called[0]) called[n_called++] = name;
}

/* A function under test, by its name: T(moe_dot)(k, n, a, b). The list at the end wants them
   all. */
#define T(function) (tested(#function), function)

/* ---- numbers ---- */

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
static const char *const special_names[SPECIALS] = {"0",    "-0",    "tiny",    "-tiny", "normal", "1e4", "-1e4",
                                                    "huge", "-huge", "largest", "inf",   "-inf",   "nan"};

static void make_specials(void) {
    specials[0] = 0;
    specials[1] = -specials[0];
    specials[2] = TINY;
    specials[3] = -TINY;
    specials[4] = SMALLEST_NORMAL;
    specials[5] = 10000;
    specials[6] = -10000;
    specials[7] = HUGE_ONE;
    specials[8] = -HUGE_ONE;
    specials[9] = LARGEST;
    specials[10] = infinity_of(1);
    specials[11] = infinity_of(-1);
    specials[12] = not_a_number();
}

static int is_nan(moe_real x) { return !moe_is_finite(x) && !(x > 0) && !(x < 0); }
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

static size_t below(size_t n) { return (size_t)moe_rng_below(&rng, (uint64_t)n); }

static const moe_kernels *tables[MOE_KERNELS_COUNT];
static int n_tables;

static void find_tables(void) {
    int i;
    for (i = MOE_KERNELS_C; i < MOE_KERNELS_COUNT; i++)
        if (moe_kernels_select(i) != NULL) tables[n_tables++] = moe_kernels_select(i);
}

/* ---- kernels: number by number ----
   One special number in one place of one array; what comes out there is as wanted, and the bits of
   all other places are as without it. */

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

/* Twice the argument of the tanh of gelu_tanh. */
static wide gelu_tanh_exponent(wide v) {
    return v > 10000 ? v : 2 * 0.79788456080286535588 * (v + 0.044715 * v * v * v);
}

static wide act_of(int act, moe_real x) {
    const wide v = x;
    switch (act) {
    case MOE_ACT_RELU: return x < 0 ? 0 : v;
    case MOE_ACT_RELU2: return x < 0 ? 0 : v * v;
    case MOE_ACT_GELU_TANH: return x < -1000 ? 0 : v * sigmoid_of(gelu_tanh_exponent(v));
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
    if (act == MOE_ACT_RELU2) return x <= 0 ? 0 : 2 * v;
    if (act == MOE_ACT_IDENTITY) return 1;
    if (is_nan(x)) return v;
    if (x > 10000 || x < -10000) return act == MOE_ACT_TANH || act == MOE_ACT_SIGMOID ? 0 : x > 0;
    switch (act) {
    case MOE_ACT_GELU_TANH:
        return sigmoid_of(gelu_tanh_exponent(v)) *
               (1 + 2 * 0.79788456080286535588 * v * (1 + 0.134145 * v * v) * sigmoid_of(-gelu_tanh_exponent(v)));
    case MOE_ACT_SILU: return sigmoid_of(v) * (1 + v * sigmoid_of(-v));
    case MOE_ACT_GELU:
        return 0.5 * WIDE(erfc)(-v * 0.70710678118654752440) + v * 0.39894228040143267794 * WIDE(exp)(-0.5 * v * v);
    case MOE_ACT_TANH: return 4 * sigmoid_of(2 * v) * sigmoid_of(-2 * v);
    default: return sigmoid_of(v) * sigmoid_of(-v);
    }
}

static void copy_to(size_t n, const moe_real *from, moe_real *to) { memcpy(to, from, n * sizeof *to); }

static void run_multiply(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    moei_multiply(k, n, in[0], in[1], out[0]);
}
static wide want_multiply(int which, const moe_real *in) {
    (void)which;
    return (wide)in[0] * in[1];
}
static void run_axpy(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    copy_to(n, in[1], out[0]);
    T(moe_axpy)(k, n, now_alpha, in[0], out[0]);
}
static wide want_axpy(int which, const moe_real *in) {
    (void)which;
    return (wide)in[1] + (wide)now_alpha * in[0];
}
static void run_activate(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    T(moe_activate)(k, now_act, n, in[0], out[0]);
}
static wide want_activate(int which, const moe_real *in) {
    (void)which;
    return act_of(now_act, in[0]);
}
static void run_activate_backward(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    T(moe_activate_backward)(k, now_act, n, in[0], in[1], out[0]);
}
static wide want_activate_backward(int which, const moe_real *in) {
    (void)which;
    if (in[0] <= 0 && (now_act == MOE_ACT_RELU || now_act == MOE_ACT_RELU2)) return 0;
    if (now_act == MOE_ACT_RELU) return (wide)in[1]; /* a choice, not a product */
    return (wide)in[1] * slope_of(now_act, in[0]);
}
static void run_gated(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    T(moe_gated)(k, now_act, 1, n, in[0], n, in[1], n, out[0], n);
}
static wide want_gated(int which, const moe_real *in) {
    (void)which;
    return (wide)(moe_real)act_of(now_act, in[0]) * in[1];
}
static void run_gated_backward(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    T(moe_gated_backward)(k, now_act, n, in[0], in[1], in[2], out[0], out[1]);
}
static wide want_gated_backward(int which, const moe_real *in) {
    const moe_real both = (moe_real)((wide)in[2] * in[1]);
    if (which == 1) return (wide)in[2] * (moe_real)act_of(now_act, in[0]);
    if (in[0] <= 0 && (now_act == MOE_ACT_RELU || now_act == MOE_ACT_RELU2)) return 0;
    if (now_act == MOE_ACT_RELU) return (wide)both;
    return both * slope_of(now_act, in[0]);
}
static const moe_adamw_step adamw_step = {
    1, (moe_real)0.1, (moe_real)0.9, (moe_real)0.99, (moe_real)1e-8, (moe_real)0.01, 2, 3};
static void run_adamw(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    size_t i;
    copy_to(n, in[1], out[0]);
    copy_to(n, in[3], out[2]);
    for (i = 0; i < n; i++) out[1][i] = in[2][i] < 0 ? -in[2][i] : in[2][i]; /* a mean of squares */
    T(moe_adamw)(k, &adamw_step, n, in[0], out[0], out[1], out[2]);
}
static wide want_adamw(int which, const moe_real *in) {
    const moe_adamw_step *s = &adamw_step;
    const moe_real m = (moe_real)((wide)s->beta1 * in[1] + (1 - (wide)s->beta1) * in[0]);
    const moe_real v = (moe_real)((wide)s->beta2 * (in[2] < 0 ? -in[2] : in[2]) + (1 - (wide)s->beta2) * in[0] * in[0]);
    const moe_real m1 = (moe_real)((wide)m * s->correction1), v1 = (moe_real)((wide)v * s->correction2);
    if (which < 2) return which == 0 ? m : v;
    return in[3] - s->lr * (m1 / (WIDE(sqrt)((wide)v1) + s->epsilon) + (wide)s->weight_decay * in[3]);
}
static void run_posterior(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    copy_to(n, in[0], out[0]);
    (void)moei_log_posterior(k, n, 2, in[1], in[2], out[0]);
}
static wide want_posterior(int which, const moe_real *in) {
    (void)which;
    return in[2] > 0 ? (wide)(moe_real)(2 * ((wide)in[0] - in[1])) + WIDE(log)((wide)in[2]) : -(wide)HUGE_VAL;
}
static void run_spread(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    static moe_real rows[2 * LENGTH];
    static const int32_t both[2] = {1, 0};
    memcpy(rows, in[0], n * sizeof *rows);
    memcpy(rows + n, in[1], n * sizeof *rows);
    moei_dispersion(k, now_squared, 2, both, n, rows, n, in[2], out[0]);
}
static wide want_spread(int which, const moe_real *in) {
    const wide a = (wide)in[0] - in[2], b = (wide)in[1] - in[2];
    (void)which;
    /* the sum may be too large for the type */
    return (wide)(moe_real)(now_squared ? a * a + b * b : WIDE(fabs)(a) + WIDE(fabs)(b)) / 2;
}
static void run_sigmoid(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    size_t i;
    (void)k;
    for (i = 0; i < n; i++) {
        out[0][i] = T(moe_sigmoid)(in[0][i]);
        out[1][i] = moei_softplus(in[0][i]);
    }
}
static wide want_sigmoid(int which, const moe_real *in) {
    if (is_nan(in[0])) return in[0];
    if (which == 0) return sigmoid_of(in[0]);
    return in[0] > 0 ? in[0] + WIDE(log1p)(WIDE(exp)(-(wide)in[0])) : WIDE(log1p)(WIDE(exp)((wide)in[0]));
}
static void run_numberwise_exp(const moe_kernels *k, size_t n, moe_real *const *in, moe_real *const *out) {
    copy_to(n, in[0], out[0]);
    (void)moei_exp_sum(k, n, 30, out[0]);
}
static wide want_numberwise_exp(int which, const moe_real *in) {
    (void)which;
    return WIDE(exp)((wide)in[0] - 30);
}

/* Of each: the special value number `special` at every place of every input. */
static void test_numberwise(const numberwise *f, const moe_kernels *k, int first_special, int last_special) {
    moe_real *in[MOST_IN], *out[MOST_OUT], *plain[MOST_OUT];
    int special, which, i;
    size_t at, j;
    for (i = 0; i < f->n_in; i++) {
        in[i] = normals_of(&rng, LENGTH, 1);
        for (j = 0; j < LENGTH; j++) in[i][j] = in[i][j] < 0 ? in[i][j] - 1 : in[i][j] + 1; /* away from 0 */
    }
    for (i = 0; i < f->n_out; i++) {
        out[i] = (moe_real *)grab(LENGTH, sizeof **out);
        plain[i] = (moe_real *)grab(LENGTH, sizeof **plain);
    }
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
                    leaks += !same_bits(out[i], plain[i], at * sizeof(moe_real)) ||
                             !same_bits(out[i] + at + 1, plain[i] + at + 1, (LENGTH - at - 1) * sizeof(moe_real));
                    if (!alike(out[i][at], wanted, bound)) {
                        wrong++;
                        got = out[i][at];
                        want = (moe_real)wanted;
                    }
                }
            }
            CHECKF(wrong == 0, "%s of %s, act %d: input %d = %s gives %g, wanted %g", f->name, k->name, now_act, which,
                   special_names[special], (double)got, (double)want);
            CHECKF(leaks == 0, "%s of %s, act %d: input %d = %s reaches other places", f->name, k->name, now_act, which,
                   special_names[special]);
        }
    for (i = 0; i < f->n_in; i++) free(in[i]);
    for (i = 0; i < f->n_out; i++) {
        free(out[i]);
        free(plain[i]);
    }
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
            for (i = 0; i < sizeof with_act / sizeof with_act[0]; i++)
                test_numberwise(&with_act[i], tables[t], 0, SPECIALS);
        now_act = 0;
        for (i = 0; i < sizeof others / sizeof others[0]; i++) test_numberwise(&others[i], tables[t], 0, SPECIALS);
        for (now_squared = 0; now_squared < 2; now_squared++) test_numberwise(&spread, tables[t], 0, SPECIALS);
        test_numberwise(&exp_sum, tables[t], 0, 5);
        test_numberwise(&exp_sum, tables[t], 11, SPECIALS); /* max is at least every number, so no +inf */
    }
}

/* ---- kernels: sums ---- */

/* One special number in a or b [n], anywhere; a smaller stretch of places for long sums. */
static void test_dot(const moe_kernels *k) {
    static const size_t lengths[] = {1, 2, 7, 16, 31, 64, 300};
    size_t i, j, at;
    int special, which;
    for (i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        const size_t n = lengths[i];
        moe_real *v[2];
        int wrong = 0;
        v[0] = normals_of(&rng, n, 1);
        v[1] = normals_of(&rng, n, 1);
        for (which = 0; which < 2; which++)
            for (special = 0; special < SPECIALS; special++)
                for (at = 0; at < n; at += 1 + n / 40) {
                    const moe_real kept = v[which][at];
                    wide sum = 0, size = 0;
                    v[which][at] = specials[special];
                    for (j = 0; j < n; j++) {
                        sum += (wide)v[0][j] * v[1][j];
                        size += WIDE(fabs)((wide)v[0][j] * v[1][j]);
                    }
                    wrong += !alike(T(moe_dot)(k, n, v[0], v[1]), sum, size * 1e-5 + SMALLEST_NORMAL);
                    v[which][at] = kept;
                }
        CHECKF(wrong == 0, "dot of %s, n = %d: %d wrong", k->name, (int)n, wrong);
        free(v[0]);
        free(v[1]);
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
        sum += (wide)a * b;
        *size += WIDE(fabs)((wide)a * b);
    }
    return sum;
}

/* A special number in A reaches its row of C alone, one in B its column: by the rules of IEEE 754,
   0 times infinity included. */
static void test_products(const moe_kernels *kernels) {
    static const size_t shapes[][3] = {{1, 5, 40}, {1, 37, 300}, {13, 37, 70}, {7, 16, 261}, {3, 50, 33}};
    size_t shape, round, at, i, j;
    int special;
    for (shape = 0; shape < sizeof shapes / sizeof shapes[0]; shape++)
        for (special = 0; special < SPECIALS; special++) {
            product p;
            int wrong = 0, leaks = 0;
            p.m = shapes[shape][0];
            p.n = shapes[shape][1];
            p.k = shapes[shape][2];
            p.a = normals_of(&rng, p.m * p.k, 1);
            p.b = normals_of(&rng, p.n * p.k, 1);
            p.c = (moe_real *)grab(p.m * p.n, sizeof *p.c);
            p.plain = (moe_real *)grab(p.m * p.n, sizeof *p.plain);
            for (i = 0; i < p.m * p.k; i += 17) p.a[i] = 0;
            for (p.op = 0; p.op < MOE_MATMUL_COUNT; p.op++)
                for (round = 0; round < 6; round++) {
                    const size_t k = p.k;
                    const size_t lda = p.op == MOE_MATMUL_TN ? p.m : k, ldb = p.op == MOE_MATMUL_NT ? k : p.n;
                    moe_real *v = round < 3 ? p.a : p.b, kept;
                    size_t own;
                    at = below(round < 3 ? p.m * k : p.n * k);
                    own = round < 3 ? (p.op == MOE_MATMUL_TN ? at % p.m : at / k)
                                    : (p.op == MOE_MATMUL_NT ? at / k : at % p.n);
                    T(moe_matmul)(kernels, p.op, MOE_TYPE_REAL, p.m, p.n, k, p.a, lda, p.b, ldb, p.plain, p.n, 0);
                    kept = v[at];
                    v[at] = specials[special];
                    T(moe_matmul)(kernels, p.op, MOE_TYPE_REAL, p.m, p.n, k, p.a, lda, p.b, ldb, p.c, p.n, 0);
                    for (i = 0; i < p.m; i++)
                        for (j = 0; j < p.n; j++)
                            if ((round < 3 ? i : j) == own) {
                                wide size, want = want_product(&p, i, j, &size);
                                wrong += !alike(p.c[i * p.n + j], want, size * 1e-5);
                            } else leaks += !same_bits(p.c + i * p.n + j, p.plain + i * p.n + j, sizeof(moe_real));
                    v[at] = kept;
                }
            CHECKF(wrong == 0, "product of %s, shape %d, %s: %d wrong", kernels->name, (int)shape,
                   special_names[special], wrong);
            CHECKF(leaks == 0, "product of %s, shape %d, %s: %d other numbers change", kernels->name, (int)shape,
                   special_names[special], leaks);
            free(p.a);
            free(p.b);
            free(p.c);
            free(p.plain);
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
                    for (i = 0; i < n; i++)
                        wrong += lost ? !is_nan(y[i]) : !alike(y[i], want[i], 1e-5 * want[i] + 2 * SMALLEST_NORMAL);
                    for (i = 0; i < n && !lost; i++) wrong += x[i] < -LARGEST && (y[i] < 0 || y[i] > 0);
                    copy_to(n, x, again);
                    T(moe_softmax)(k, n, again, temperatures[t], again); /* in place */
                    wrong += !lost && !same_bits(again, y, n * sizeof(moe_real));
                }
            CHECKF(wrong == 0, "softmax of %s, T = %g with %s: %d wrong", k->name, (double)temperatures[t],
                   special_names[special], wrong);
        }
    for (n = 1; n <= LENGTH; n++) {
        for (i = 0; i < n; i++) x[i] = specials[11];
        T(moe_softmax)(k, n, x, 1, y);
        for (i = 0; i < n && !(y[i] < 0) && !(y[i] > 0) && !is_nan(y[i]);) i++;
        CHECKF(i == n, "softmax of %s of -inf alone", k->name);
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
                if (p[i] > 0) {
                    want -= p[i] * WIDE(log)((wide)p[i]);
                    size += WIDE(fabs)(p[i] * WIDE(log)((wide)p[i]));
                }
            got = moei_row_entropy(k, n, p);
            wrong += !alike(got, want, size * 1e-4 + 1e-6); /* NaN is not above 0 */
            if (p[at] > 4) continue; /* max is at least every number */
            memcpy(e, p, sizeof e);
            got = moei_exp_sum(k, n, 5, e);
            for (i = 0, sum = 0; i < n; i++) sum += WIDE(exp)((wide)p[i] - 5);
            wrong_exp += !alike(got, sum, sum * 1e-4 + SMALLEST_NORMAL);
        }
        CHECKF(wrong == 0, "entropy of %s with %s: %d wrong", k->name, special_names[special], wrong);
        CHECKF(wrong_exp == 0, "exp_sum of %s with %s: %d wrong", k->name, special_names[special], wrong_exp);
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
            want = special == 10             ? (wide)specials[10]
                   : special == 12           ? (wide)specials[12]
                   : n == 1 && special == 11 ? (wide)specials[11]
                                             : max + WIDE(log)(sum);
            wrong += !alike(T(moe_log_sum_exp)(n, x), want, 1e-5 * WIDE(fabs)(want) + 1e-6);
        }
        CHECKF(wrong == 0, "log_sum_exp with %s: %d wrong", special_names[special], wrong);
    }
    CHECK(T(moe_log_sum_exp)(0, NULL) < -LARGEST, "log_sum_exp of nothing");
    for (i = 0; i < LENGTH; i++) x[i] = specials[11];
    CHECK(T(moe_log_sum_exp)(LENGTH, x) < -LARGEST, "log_sum_exp of -inf alone");
}

static void check_rms_norm(moe_real *x, moe_real *y, moe_real *gain, size_t n, int special, int beyond) {
    size_t i;
    int broken;
    for (i = 0, broken = 0; i < n; i++) broken += !moe_is_finite(y[i]);
    CHECKF((special >= FIRST_ENDLESS) == (broken > 0) && (special != IS_NAN || broken == (int)n),
           "rms_norm of a row with %s: %d", special_names[special], broken);
    if (special < FIRST_ENDLESS && !beyond) {
        wide v = 0;
        for (i = 0; i < n; i++) v += (wide)x[i] * x[i];
        for (i = 0, broken = 0; i < n; i++)
            broken += !alike(y[i], x[i] / WIDE(sqrt)(v / (wide)n + 1e-5) * gain[i], 1e-4);
        CHECKF(broken == 0, "rms_norm is right with %s", special_names[special]);
    }
}

/* Norms of one row: NaN and infinity show as NaN somewhere in it; up to a square root of the
   largest number a norm is right. */
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
            for (i = 0; i < n; i++) {
                x[i] = moe_rng_normal(&rng);
                gain[i] = 1 + moe_rng_uniform(&rng);
                dy[i] = moe_rng_normal(&rng);
            }
            x[at] = special_now;
            T(moe_layer_norm)(n, x, gain, NULL, (moe_real)1e-5, y, &mean, &rstd);
            if (special >= FIRST_ENDLESS) CHECKF(all_nan(n, y), "layer_norm of a row with %s", special_names[special]);
            else
                CHECKF(all_finite(n, y) && moe_is_finite(mean) && moe_is_finite(rstd), "layer_norm of a row with %s",
                       special_names[special]);
            if (special < FIRST_ENDLESS && !beyond && n > 1) {
                wide m = 0, v = 0;
                for (i = 0; i < n; i++) m += x[i];
                m /= (wide)n;
                for (i = 0; i < n; i++) v += (x[i] - m) * (x[i] - m);
                for (i = 0, broken = 0; i < n; i++)
                    broken += !alike(y[i], (x[i] - m) / WIDE(sqrt)(v / (wide)n + 1e-5) * gain[i], 1e-4);
                CHECKF(broken == 0, "layer_norm is right with %s", special_names[special]);
            }
            T(moe_rms_norm)(n, x, gain, (moe_real)1e-5, y, &rstd);
            check_rms_norm(x, y, gain, n, special, beyond);
            for (i = 0; i < n; i++) x[i] = moe_rng_normal(&rng);
            T(moe_layer_norm)(n, x, gain, NULL, (moe_real)1e-5, y, &mean, &rstd);
            for (which = 0; which < 2; which++) {
                /* the special number in dy: with 0 times anything left out, dgain and dbias are
                   numbers elsewhere */
                memset(dx, 0, sizeof dx);
                memset(dgain, 0, sizeof dgain);
                memset(dbias, 0, sizeof dbias);
                dy[at] = specials[special];
                if (which == 0) T(moe_layer_norm_backward)(n, x, gain, mean, rstd, dy, dx, dgain, dbias);
                else T(moe_rms_norm_backward)(n, x, gain, rstd, dy, dx, dgain);
                for (i = 0, broken = 0; i < n; i++)
                    broken += i != at && (!moe_is_finite(dgain[i]) || !moe_is_finite(dbias[i]));
                CHECKF(broken == 0, "dgain and dbias of other places with dy = %s", special_names[special]);
                if (special < 7)
                    CHECKF(all_finite(n, dx) && all_finite(n, dgain) && all_finite(n, dbias), "gradients with dy = %s",
                           special_names[special]);
                if (special >= FIRST_ENDLESS && n > 1)
                    CHECKF(!all_finite(n, dx), "dx with dy = %s", special_names[special]);
            }
        }
}

/* Gradients of a softmax: what is not finite in dy goes to all of dx; 0 stays 0 for finite
   numbers. */
static void test_softmax_backward(void) {
    moe_real x[LENGTH], y[LENGTH], dy[LENGTH], dx[LENGTH];
    size_t n, i, at;
    int special;
    for (n = 2; n <= LENGTH; n += 5)
        for (special = 0; special < SPECIALS; special++) {
            for (i = 0; i < n; i++) {
                x[i] = moe_rng_normal(&rng);
                dy[i] = moe_rng_normal(&rng);
                dx[i] = 0;
            }
            T(moe_softmax)(NULL, n, x, 1, y);
            at = below(n);
            dy[at] = specials[special];
            T(moe_softmax_backward)(n, y, dy, 1, dx);
            if (special < FIRST_ENDLESS - 1)
                CHECKF(all_finite(n, dx), "softmax_backward with dy = %s", special_names[special]);
            for (i = 0; i < n && special >= FIRST_ENDLESS; i++)
                CHECKF(!moe_is_finite(dx[i]), "softmax_backward with dy = %s", special_names[special]);
            memset(y, 0, sizeof y);
            memset(dx, 0, sizeof dx);
            y[at] = 1;
            if (special < FIRST_ENDLESS - 1) {
                T(moe_softmax_backward)(n, y, dy, 1, dx);
                for (i = 0; i < n && !(dx[i] < 0) && !(dx[i] > 0) && moe_is_finite(dx[i]);) i++;
                CHECKF(i == n, "a sure softmax passes no gradient, dy = %s", special_names[special]);
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
        n = below(LENGTH) + 1;
        k = below(n + 3);
        for (i = 0; i < n; i++) {
            score[i] = specials[below(SPECIALS)];
            real += !is_nan(score[i]) && score[i] >= -LARGEST;
        }
        taken = T(moe_top_k)(n, score, k, index);
        CHECK(taken == (real < k ? real : k), "top_k of special numbers takes what is a number");
        for (i = 0; i < taken; i++) {
            size_t j, before = 0;
            for (j = 0; j < n; j++)
                before += score[j] > score[index[i]] ||
                          (j < (size_t)index[i] && !(score[j] < score[index[i]]) && !is_nan(score[j]));
            wrong += before != i;
        }
        CHECK(wrong == 0, "top_k of special numbers keeps their order");
    }
}

/* ---- kernels: packed and quantized weights ---- */

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
            at = below(N * K);
            row = at / K;
            w[at] = specials[special];
            CHECKF(T(moe_pack)(k, type, N, K, w, K, packed, 1) == MOE_OK, "packs %s", special_names[special]);
            CHECK(T(moe_unpack)(type, N, K, packed, 1, back, K) == MOE_OK, "unpacks");
            want = back[at];
            expected = specials[special];
            if (type == MOE_TYPE_F16 && special > 6)
                expected = special == IS_NAN ? specials[IS_NAN] : infinity_of(expected > 0 ? 1 : -1);
            if (type == MOE_TYPE_F16 && special < 5) expected = 0;
            if (type == MOE_TYPE_BF16 && special == 9) expected = infinity_of(1);
            if (type == MOE_TYPE_BF16 && MOE_REAL_IS_DOUBLE && special < FIRST_ENDLESS && special > 6)
                expected = infinity_of(expected > 0 ? 1 : -1);
            CHECKF(type == MOE_TYPE_REAL && special != IS_NAN
                       ? same_bits(&want, &expected, sizeof want)
                       : alike(want, expected, WIDE(fabs)((wide)expected) / 200 + SMALLEST_NORMAL),
                   "type %d: %s becomes %g", type, special_names[special], (double)want);
            T(moe_matmul_packed)(k, type, M, N, K, a, K, packed, c, N);
            for (i = 0; i < M; i++)
                for (j = 0; j < N; j++)
                    if (j != row) leaks += !same_bits(c + i * N + j, plain + i * N + j, sizeof(moe_real));
                    else if (!moe_is_finite(want)) leaks += moe_is_finite(c[i * N + j]);
            CHECKF(leaks == 0, "packed product of %s, type %d: a weight %s reaches its output alone: %d", k->name, type,
                   special_names[special], leaks);
            free(packed);
        }
}

/* Rows of 16-bit floats where another program has left them. */
static void test_external(const moe_kernels *k) {
    enum { M = 3, N = 21, K = 70 };
    static moe_real w[N * K], a[M * K], c[M * N], plain[M * N];
    static unsigned char bytes[N * K * 2];
    const moe_rng kept = rng;
    moe_external matrix;
    int special;
    size_t i, j, at;
    for (special = 0; special < SPECIALS; special++) {
        moe_real want;
        int wrong = 0;
        for (i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(i % 2 == 0 ? below(256) : 0x3c);
        at = below(N * K);
        bytes[2 * at] = (unsigned char)(special == IS_NAN);
        bytes[2 * at + 1] = special == 0 ? 0 : special == 1 ? 0xfc : 0x7c;
        memset(&matrix, 0, sizeof matrix);
        matrix.type = &moei_gguf_type_find(1)->external;
        matrix.data = bytes;
        matrix.row = K * 2;
        matrix.column = 2;
        for (i = 0; i < N; i++) matrix.type->unpack(k, &matrix, i, 0, K, w + i * K);
        for (i = 0; i < M * K; i++) a[i] = moe_rng_normal(&rng);
        T(moe_matmul)(k, MOE_MATMUL_NT, MOE_TYPE_REAL, M, N, K, a, K, w, K, plain, N, 0);
        CHECK(T(moe_external_work_size)(&matrix, M, K) == 0, "no work");
        T(moe_matmul_external)(k, &matrix, 0, M, N, K, a, K, NULL, c, N);
        want = w[at];
        for (i = 0; i < M; i++)
            for (j = 0; j < N; j++) {
                if (moe_is_finite(want) || j != at / K)
                    wrong += !same_bits(c + i * N + j, plain + i * N + j, sizeof(moe_real));
                else wrong += moe_is_finite(c[i * N + j]);
            }
        CHECKF(wrong == 0, "%s: external weights, one %g: %d wrong", k->name, (double)want, wrong);
    }
    rng = kept;
}

#ifndef MOE_NO_QUANT
/* Rows from other programs: their scales may be anything. */
static void test_quantized_blocks(void) {
    int type;
    size_t i, bytes;
    enum { ROWS = 3, INNER = 64 };
    unsigned char blocks[ROWS * INNER / 32 * 34], again[sizeof blocks], *packed;
    static const unsigned scale[4] = {0x7c00u, 0xfe01u, 0x0001u, 0x8000u}; /* inf, NaN, the smallest, -0 */
    for (type = 0; type < 2; type++) {
        const int kind = type == 0 ? MOE_TYPE_Q8_BLOCK : MOE_TYPE_Q4;
        const size_t block = type == 0 ? 34 : 18, all = ROWS * INNER / 32 * block;
        for (i = 0; i < all; i++) blocks[i] = (unsigned char)below(256);
        for (i = 0; i < ROWS * INNER / 32; i++) {
            blocks[i * block] = (unsigned char)(scale[i % 4] & 255u);
            blocks[i * block + 1] = (unsigned char)(scale[i % 4] >> 8);
        }
        CHECK(T(moe_panel_size)(kind, INNER, &bytes) == MOE_OK, "size");
        packed = (unsigned char *)grab(bytes, 1);
        CHECK(T(moe_import_pack_blocks)(kind, ROWS, INNER, blocks, packed, 1) == MOE_OK &&
                  T(moe_import_unpack_blocks)(kind, ROWS, INNER, packed, 1, again) == MOE_OK,
              "Q8_0, Q4_0");
        CHECK(memcmp(blocks, again, all) == 0, "any scale comes back bit for bit");
        free(packed);
    }
}

static void check_small_rows(const moe_kernels *k, moe_real *x, moe_real *c, int type, unsigned char *packed,
                             unsigned char *rows) {
    enum { M = 5, N = 19, K = 70 };
    int special, wrong;
    size_t i, j;
    for (special = 0; special < 5; special++) { /* rows of one small number */
        for (i = 0; i < K; i++) x[i] = specials[special];
        T(moe_rows_quantize)(k, type, M, K, x, K, rows);
        T(moe_matmul_quantized)(k, type, M, N, K, rows, packed, 1, c, N);
        for (j = 0, wrong = 0; j < N; j++) wrong += !(WIDE(fabs)((wide)c[j]) < 1e-30);
        CHECKF(wrong == 0, "type %d of %s: a row of %s", type, k->name, special_names[special]);
    }
}

static void check_small_outputs(const moe_kernels *k, moe_real *plain, int type) {
    enum { M = 5, N = 19, K = 70 };
    int wrong;
    size_t i;
    for (i = 0, wrong = 0; i < M; i++)
        wrong += plain[i * N] < 0 || plain[i * N] > 0 || !(WIDE(fabs)((wide)plain[i * N + 1]) < 1e-30) ||
                 !(WIDE(fabs)((wide)plain[i * N + 2]) < 1e-30);
    CHECKF(wrong == 0 && all_finite(M * N, plain), "type %d of %s: they give 0", type, k->name);
}

static void test_quantized(const moe_kernels *k) {
    enum { M = 5, N = 19, K = 70 };
    static moe_real w[N * K], x[M * K], c[M * N], plain[M * N];
    int type, special, wrong;
    size_t i, j, bytes, at, size;
    for (type = MOE_TYPE_Q8; type < MOE_TYPE_COUNT; type++) {
        unsigned char *packed, *before, *rows;
        for (i = 0; i < N * K; i++) w[i] = moe_rng_normal(&rng);
        for (i = 0; i < M * K; i++) x[i] = moe_rng_normal(&rng);
        CHECK(T(moe_panel_size)(type, K, &bytes) == MOE_OK, "size");
        size = T(moe_quantized_row_size)(type, K);
        packed = (unsigned char *)grab(2 * bytes, 1);
        before = (unsigned char *)grab(2 * bytes, 1);
        rows = (unsigned char *)grab(M * size, 1);
        for (special = 0; special < SPECIALS; special++) { /* in a weight */
            const moe_real kept = w[at = below(N * K)];
            moe_status status, wanted = special >= FIRST_ENDLESS ? MOE_ERR_NONFINITE : MOE_OK;
            w[at] = specials[special];
            if (special > 6 && special < FIRST_ENDLESS && (type != MOE_TYPE_Q8 || MOE_REAL_IS_DOUBLE))
                wanted = MOE_ERR_OVERFLOW;
            memset(packed, 0x5a, 2 * bytes);
            memcpy(before, packed, 2 * bytes);
            status = T(moe_pack)(k, type, N, K, w, K, packed, 1);
            CHECKF(status == wanted && (status == MOE_OK || memcmp(packed, before, 2 * bytes) == 0),
                   "type %d: a weight %s: %s", type, special_names[special], moe_status_text(status));
            w[at] = kept;
        }
        for (i = 0; i < 3 * K; i++) w[i] = i < K ? 0 : i < 2 * K ? TINY : SMALLEST_NORMAL; /* outputs 0 to 2 */
        CHECK(T(moe_pack)(k, type, N, K, w, K, packed, 1) == MOE_OK, "rows of nothing and next to nothing");
        T(moe_rows_quantize)(k, type, M, K, x, K, rows);
        T(moe_matmul_quantized)(k, type, M, N, K, rows, packed, 1, plain, N);
        check_small_outputs(k, plain, type);
        for (special = 0; special < SPECIALS; special++) { /* in an activation */
            size_t row;
            moe_real kept;
            at = below(M * K);
            row = at / K;
            kept = x[at];
            x[at] = specials[special];
            T(moe_rows_quantize)(k, type, M, K, x, K, rows);
            T(moe_matmul_quantized)(k, type, M, N, K, rows, packed, 1, c, N);
            for (i = 0, wrong = 0; i < M; i++)
                for (j = 0; j < N; j++)
                    if (i != row) wrong += !same_bits(c + i * N + j, plain + i * N + j, sizeof(moe_real));
                    else
                        wrong += special >= FIRST_ENDLESS ? !is_nan(c[i * N + j])
                                                          : special < 9 && !moe_is_finite(c[i * N + j]);
            CHECKF(wrong == 0, "type %d of %s: an activation %s: %d wrong", type, k->name, special_names[special],
                   wrong);
            x[at] = kept;
        }
        check_small_rows(k, x, c, type, packed, rows);
        free(packed);
        free(before);
        free(rows);
    }
    test_quantized_blocks();
}
#endif

static void test_kernels(void) {
    size_t i;
    int t;
    for (i = 0; i < SPECIALS; i++)
        CHECKF(T(moe_is_finite)(specials[i]) == (i < FIRST_ENDLESS), "is_finite of %s", special_names[i]);
    test_all_numberwise();
    for (t = 0; t < n_tables; t++) {
        test_dot(tables[t]);
        test_products(tables[t]);
        test_softmaxes(tables[t]);
        test_sums_of_logarithms(tables[t]);
        test_packed(tables[t]);
        test_external(tables[t]);
#ifndef MOE_NO_QUANT
        test_quantized(tables[t]);
#endif
    }
    test_log_sum_exp();
    test_norms();
    test_softmax_backward();
    test_top_k();
}

/* ---- routers and layers ----
   Every preset and every value of every choice of a router's configuration, with one special number
   in one place of what a call hands over: the call ends with MOE_OK and finite weights or with
   MOE_ERR_NONFINITE. Moderate numbers give finite results and gradients. */

enum { TOKENS = 9, WIDTH = 24, EXPERTS = 8, MOST_ARRAYS = 14 };

typedef struct array {
    const char *name;
    moe_real *data;
    size_t rows, width; /* rows: TOKENS where row t belongs to token t, else 1 */
    /* 1: takes any float; 0: probabilities and the like, which are not negative or not
       large */
    int whole_line;
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

static moe_status custom_score(void *ctx, const struct moe_router *router, const moe_call *call, const moe_real *u,
                               moe_real *logits) {
    size_t t, e;
    (void)ctx;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < (size_t)router->config.n_experts; e++)
            logits[t * (size_t)router->config.n_experts + e] = u[t * (size_t)router->config.d_model + e];
    return MOE_OK;
}

static moe_status custom_select(void *ctx, const struct moe_router *router, const moe_call *call,
                                const moe_real *logits, const moe_real *probabilities, unsigned char *chosen) {
    size_t t;
    (void)ctx;
    (void)logits;
    (void)probabilities;
    for (t = 0; t < call->n_tokens; t++)
        chosen[t * (size_t)router->config.n_experts + t % (size_t)router->config.n_experts] = 1;
    return MOE_OK;
}

static moe_real *add_array(scene *s, const char *name, size_t rows, size_t width, int whole_line) {
    array *a = &s->arrays[s->n_arrays++];
    size_t i;
    a->name = name;
    a->rows = rows;
    a->width = width;
    a->whole_line = whole_line;
    a->data = normals_of(&rng, rows * width, 1);
    for (i = 0; i < rows * width && !whole_line; i++)
        a->data[i] = moe_rng_uniform(&rng) / (moe_real)TOKENS + (moe_real)0.01;
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
    if (config->router.select == MOE_SELECT_CUSTOM || config->router.switch_from == MOE_SELECT_CUSTOM)
        s->layer.router.custom.select = custom_select;
    for (i = 0; T(moe_layer_tensor)(&s->layer, i, &tensor) == MOE_OK; i++) s->n_gradients += tensor.count;
    for (i = 0; i < TOKENS; i++) {
        s->mask[i] = i != 4;
        s->ids[i] = (int32_t)below(8);
        s->previous[i] = (int32_t)below(EXPERTS);
        s->home[i] = (int32_t)below(2);
        s->given[i * 2] = (int32_t)(i % EXPERTS);
        s->given[i * 2 + 1] = (int32_t)((i + 3) % EXPERTS);
    }
    s->call.n_tokens = TOKENS;
    s->call.mask = s->mask;
    s->call.token_ids = s->ids;
    s->call.token_machine = s->home;
    s->call.x = add_array(s, "x", TOKENS, WIDTH, 1);
    s->call.previous_input = add_array(s, "previous_input", TOKENS, WIDTH, 1);
    s->call.previous_weights = add_array(s, "previous_weights", TOKENS, 1, 0);
    s->call.previous_experts = s->previous;
    s->call.n_previous = 1;
    s->call.attention_weights = add_array(s, "attention_weights", 1, heads * TOKENS * TOKENS, 0);
    s->call.attention_outputs = add_array(s, "attention_outputs", 1, heads * TOKENS * WIDTH, 1);
    s->call.attention_output = add_array(s, "attention_output", TOKENS, WIDTH, 1);
    s->call.jitter = add_array(s, "jitter", TOKENS, WIDTH, 0);
    s->call.teacher = add_array(s, "teacher", TOKENS, EXPERTS, 1);
    s->call.distances = add_array(s, "distances", 1, TOKENS * TOKENS, 0);
    if (config->router.noise != MOE_NOISE_NONE) s->call.noise = add_array(s, "noise", TOKENS, EXPERTS, 1);
    if (config->router.select == MOE_SELECT_GIVEN || config->router.switch_from == MOE_SELECT_GIVEN)
        s->call.given = s->given;
    s->dy = normals_of(&rng, TOKENS * WIDTH, 1);
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
    memset(r->y, 0, sizeof r->y);
    memset(r->dx, 0, sizeof r->dx);
    T(moe_rng_seed)(&own, 3);
    call.training = training;
    call.rng = &own;
    CHECK(T(moe_layer_work_size)(&s->layer, TOKENS, training, &bytes) == MOE_OK, "work size");
    r->work = realloc(r->work, bytes + 1);
    if (r->work == NULL) exit(2);
    memset(r->work, 0xff, bytes); /* NaN where something is read that was not written */
    memset(&pass, 0x5a, sizeof pass);
    memcpy(before, &pass, sizeof pass);
    r->status = T(moe_layer_forward)(&s->layer, &call, r->y, r->work, bytes, &pass);
    if (r->status != MOE_OK) {
        CHECK(memcmp(before, &pass, sizeof pass) == 0, "a failed call leaves the pass");
        return;
    }
    r->routing = pass.routing;
    if (!training) return;
    for (i = 0; T(moe_layer_tensor)(&s->layer, i, &t) == MOE_OK; i++) memset(t.gradient, 0, t.count * sizeof(moe_real));
    CHECK(T(moe_layer_backward)(&s->layer, s->dy, r->dx, NULL, &pass) == MOE_OK, "backward");
    for (i = 0; T(moe_layer_tensor)(&s->layer, i, &t) == MOE_OK; at += t.count, i++)
        memcpy(r->gradients + at, t.gradient, t.count * sizeof(moe_real));
}

/* What holds of every routing: indices in range, sums that agree, finite weights. */
static int routing_is_sound(const moe_routing *r) {
    const moe_dispatch_plan *p = &r->plan;
    size_t e, i, pairs = 0, t;
    int good = p->offsets[0] == 0;
    for (e = 0; e < r->n_experts; e++)
        for (i = p->offsets[e], good &= p->offsets[e] <= p->offsets[e + 1]; i < p->offsets[e + 1]; i++)
            good &= p->assignments[i].token >= 0 && (size_t)p->assignments[i].token < r->n_tokens &&
                    moe_is_finite(p->assignments[i].weight_in) && moe_is_finite(p->assignments[i].weight_out);
    if (p->rows > 0) return good;
    for (t = 0; t < r->n_tokens; t++) {
        pairs += (size_t)r->n_choices[t];
        for (i = 0; i < (size_t)r->n_choices[t]; i++) {
            const int32_t choice = r->choices[t * r->max_choices + i];
            good &= choice >= 0 && (size_t)choice < r->n_experts &&
                    moe_is_finite(r->probabilities[t * r->n_experts + (size_t)choice]);
        }
    }
    return good && pairs == r->n_dropped + p->offsets[r->n_experts];
}

/* Where a selection takes K experts, every real token has K. */
static int choices_are_whole(const scene *s, const moe_routing *r) {
    const int select = s->layer.config.router.select;
    size_t t;
    if (s->layer.config.router.switch_at > 0) return 1; /* until then another one takes them */
    if (select != MOE_SELECT_TOP_K && select != MOE_SELECT_GROUPED_TOP_K && select != MOE_SELECT_SINKHORN &&
        select != MOE_SELECT_HASH && select != MOE_SELECT_GIVEN && select != MOE_SELECT_BALANCED &&
        select != MOE_SELECT_GROUPED_EACH)
        return 1;
    for (t = 0; t < TOKENS; t++)
        if (r->n_choices[t] != (s->mask[t] ? r->top_k : 0)) return 0;
    return 1;
}

static long nonfinite_calls, good_calls;

/* One special number in one place of an array of the call. */
static void test_place(scene *s, const char *name, const array *a, int special, int training, const outcome *plain,
                       outcome *r) {
    const unsigned traits = moe_router_traits(&s->layer.config.router);
    const size_t at = below(a->rows * a->width), token = at / a->width;
    const size_t o = (size_t)s->layer.config.d_out;
    const int padding = a->rows == TOKENS && !s->mask[token];
    const moe_real kept = a->data[at];
    int moderate = special <= (a->whole_line ? 6 : 4);
    size_t t;
    a->data[at] = specials[special];
    run_scene(s, training, r);
    a->data[at] = kept;
    CHECKF(r->status == MOE_OK || (r->status == MOE_ERR_NONFINITE && !moderate && !padding), "%s: %s = %s: %s", name,
           a->name, special_names[special], moe_status_text(r->status));
    if (r->status != MOE_OK) {
        nonfinite_calls++;
        return;
    }
    good_calls++;
    CHECKF(routing_is_sound(&r->routing), "%s, training %d: %s = %s: the routing is not sound", name, training, a->name,
           special_names[special]);
    CHECKF(choices_are_whole(s, &r->routing), "%s, training %d: %s = %s: a token has fewer than K experts", name,
           training, a->name, special_names[special]);
    if (moderate)
        CHECKF(all_finite(TOKENS * o, r->y), "%s, training %d: %s = %s: y is not finite", name, training, a->name,
               special_names[special]);
    if (moderate && training)
        CHECKF(all_finite(s->n_gradients, r->gradients) && all_finite(TOKENS * WIDTH, r->dx),
               "%s: %s = %s: a gradient is not finite", name, a->name, special_names[special]);
    if (padding && training && s->layer.config.n_shared == 0) /* the shared expert takes padding like any row */
        CHECKF(same_bits(r->gradients, plain->gradients, (s->n_gradients) * sizeof(moe_real)),
               "%s: padding, %s = %s, reaches a gradient", name, a->name, special_names[special]);
    for (t = 0; t < TOKENS; t++) {
        if (t == token && a->rows == TOKENS) continue;
        if (padding ||
            (a->rows == TOKENS && (traits & MOE_TRAIT_CAUSAL) && (t < token || !(traits & MOE_TRAIT_NEEDS_BATCH))))
            CHECKF(same_bits(r->y + t * o, plain->y + t * o, o * sizeof(moe_real)),
                   "%s, training %d: %s of token %d = %s reaches token %d", name, training, a->name, (int)token,
                   special_names[special], (int)t);
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
        CHECKF(r->status == MOE_OK || r->status == MOE_ERR_NONFINITE ||
                   (r->status == MOE_ERR_ARGUMENT && strcmp(t.name, "router.table") == 0),
               "%s: %s = %s: %s", name, t.name, special_names[special], moe_status_text(r->status));
        if (r->status == MOE_OK)
            CHECKF(routing_is_sound(&r->routing), "%s: %s = %s: the routing is not sound", name, t.name,
                   special_names[special]);
    }
}

/* All of x small or large: logits far apart, gates that are sure, weights and sums that underflow.
   Up to 1e4 everything is finite. */
static void test_scales(scene *s, const char *name, int training, outcome *r) {
    static const double scales[] = {0, 1e-36, 1e-20, 1e-6, 3, 12, 25, 40, 100, 1e3, 1e4, 1e10, 1e18};
    moe_real *x = s->arrays[0].data, kept[TOKENS * WIDTH];
    size_t i, t;
    memcpy(kept, x, sizeof kept);
    for (i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        for (t = 0; t < TOKENS * WIDTH; t++) x[t] = (moe_real)(scales[i] * (double)kept[t]);
        run_scene(s, training, r);
        CHECKF(r->status == MOE_OK || (scales[i] > 1e4 && r->status == MOE_ERR_NONFINITE),
               "%s, training %d: x times %g: %s", name, training, scales[i], moe_status_text(r->status));
        if (r->status != MOE_OK) continue;
        CHECKF(routing_is_sound(&r->routing), "%s, training %d: x times %g: the routing is not sound", name, training,
               scales[i]);
        CHECKF(choices_are_whole(s, &r->routing), "%s, training %d: x times %g: a token has fewer than K experts", name,
               training, scales[i]);
        if (scales[i] > 1e4) continue;
        CHECKF(all_finite(TOKENS * (size_t)s->layer.config.d_out, r->y), "%s, training %d: x times %g: y", name,
               training, scales[i]);
        if (!training) continue;
        CHECKF(all_finite(s->n_gradients, r->gradients) && all_finite(TOKENS * WIDTH, r->dx),
               "%s: x times %g: a gradient", name, scales[i]);
    }
    memcpy(x, kept, sizeof kept);
}

/* 0: there is no such layer. */
static int test_layer_config(const moe_layer_config *config, const char *name, int tries) {
    scene s;
    outcome plain, r;
    int training, special, i;
    size_t a;
    if (!begin_scene(&s, config)) return 0;
    memset(&plain, 0, sizeof plain);
    memset(&r, 0, sizeof r);
    plain.gradients = (moe_real *)grab(s.n_gradients, sizeof *plain.gradients);
    r.gradients = (moe_real *)grab(s.n_gradients, sizeof *r.gradients);
    for (training = 0; training < 2; training++) {
        run_scene(&s, training, &plain);
        if (!CHECKF(plain.status == MOE_OK, "%s: %s", name, moe_status_text(plain.status))) continue;
        CHECKF(routing_is_sound(&plain.routing) && all_finite(TOKENS * (size_t)s.layer.config.d_out, plain.y),
               "%s: a plain call", name);
        test_scales(&s, name, training, &r);
        for (a = 0; a < s.n_arrays; a++)
            for (special = 0; special < SPECIALS; special++)
                for (i = 0; i < tries; i++) test_place(&s, name, &s.arrays[a], special, training, &plain, &r);
        for (special = 0; special < SPECIALS; special++) test_tensor_place(&s, name, special, &r);
    }
    free(plain.gradients);
    free(plain.work);
    free(r.gradients);
    free(r.work);
    end_scene(&s);
    return 1;
}

static void test_layer_scales(const moe_layer_config *config, const char *name) {
    scene s;
    outcome r;
    int training;
    if (!begin_scene(&s, config)) return;
    memset(&r, 0, sizeof r);
    r.gradients = (moe_real *)grab(s.n_gradients, sizeof *r.gradients);
    for (training = 0; training < 2; training++) test_scales(&s, name, training, &r);
    free(r.gradients);
    free(r.work);
    end_scene(&s);
}

static moe_layer_config small_layer(void) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.d_model = WIDTH;
    c.router.n_experts = EXPERTS;
    c.router.top_k = 2;
    c.d_ff = 5;
    return c;
}

/* What a configuration with one unusual choice needs besides to be accepted. */
static void complete(moe_layer_config *c) {
    moe_router_config *r = &c->router;
    if (r->select == MOE_SELECT_HASH || r->student_dim > 0) r->table_size = 8;
    if (r->select == MOE_SELECT_GROUPED_TOP_K) {
        r->groups = 4;
        r->groups_kept = 2;
        if (r->top_k > 4) r->top_k = 4;
    }
    if (r->select == MOE_SELECT_EXPERT_CHOICE) r->capacity_factor = 2;
    if (r->select == MOE_SELECT_BALANCED || r->select == MOE_SELECT_AFFINITY) {
        r->top_k = 1;
        r->weight = MOE_WEIGHT_RAW;
    }
    if (r->score == MOE_SCORE_DSELECT) {
        r->gate = MOE_GATE_IDENTITY;
        r->select = MOE_SELECT_POSITIVE;
    }
    if (r->score == MOE_SCORE_NORM) {
        c->expert = MOE_EXPERT_FACTORISED;
        c->d_low = 4;
    }
    if (r->refine == MOE_REFINE_ATTENTION) r->heads = 2;
    if (r->heads > 2) r->heads = 2;
    if (r->n_experts == 0 || r->n_experts > EXPERTS) r->n_experts = EXPERTS;
    TEST_FEWER_EXPERTS(*r);
    if (r->top_k > EXPERTS) r->top_k = EXPERTS;
    if (r->groups > EXPERTS) {
        r->groups = 4;
        r->groups_kept = 2;
    }
    r->untrained = 1;
}

/* What a field or one of its values needs to have an effect. */
static const char *needed_by(const char *setting) {
    static const char *const rows[][2] = {
        {"ac_", "input=adaptive_clustering"},
        {"cosine_", "score=cosine"},
        {"norm_", "score=norm"},
        {"router_act", "score=mlp"},
        {"grap_", "score=grap"},
        {"attention_", "refine=attention"},
        {"group_score", "select=grouped_top_k"},
        {"custom_batch", "score=custom"},
        {"threshold_sigmoid", "gate=sigmoid select=threshold threshold_learned=1"},
        {"threshold_", "gate=sigmoid select=threshold"},
        {"expert_choice_", "select=expert_choice"},
        {"predictor", "select=expert_choice"},
        {"sample_", "select=sample"},
        {"expert_dropout_scope", "expert_dropout=0.5"},
        {"soft_normalise", "select=soft slots=2"},
        {"weight_over", "n_zero=1"},
        {"sparsemixer_sample", "weight=sparsemixer"},
        {"drop_order", "capacity_factor=1"},
        {"renormalize", "capacity_factor=1"},
        {"zero_average", "n_zero=1 n_copy=1 loss_balance=1"},
        {"importance_over", "loss_importance=1"},
        {"unbiased", "loss_importance=1"},
        {"distill", "loss_distill=1"},
        {"student", "student=1 freeze_at=3 loss_distill=1"},
        {"compete", "compete_rate=0.5"},
        {"bias_", "gate=sigmoid selection_bias=1 bias_rate=0.01"},
        {"l1_controller", "gate=relu select=positive weight=raw"},
        {"tau_schedule=cosine", "score=cosine schedule_steps=9 tau_end=0.5"},
        {"tau_schedule=similarity", "refine=similarity schedule_steps=9 tau_end=0.5"},
        {"tau_schedule=attention", "refine=attention schedule_steps=9 tau_end=0.5"},
        {"tau_schedule", "schedule_steps=9 tau_end=0.5"},
        {"switch_from=hash", "switch_at=3 table_size=8"},
        {"switch_from=balanced", "switch_at=3 top_k=1 weight=raw"},
        {"switch_from", "switch_at=3"},
        {"act", "expert=mlp"},
        {"no_expert_bias", "expert=mlp"},
        {"shared_", "n_shared=1"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (strncmp(setting, rows[i][0], strlen(rows[i][0])) == 0) return rows[i][1];
    return "";
}

static void test_routers(void) {
    const moe_preset *preset;
    const moe_field *f;
    char name[96];
    int i;
    for (preset = T(moe_presets)(); preset->name != NULL; preset++) {
        moe_layer_config c;
        if (!CHECK(T(moe_layer_preset)(preset->name, &c, NULL) == MOE_OK, "preset")) continue;
        c.router.d_model = WIDTH;
        c.d_ff = 5;
        complete(&c);
        CHECKF(test_layer_config(&c, preset->name, 1), "%s is not tested", preset->name);
    }
    for (f = T(moe_layer_fields)(); f->name != NULL; f++)
        for (i = 1; f->kind == MOE_FIELD_CHOICE ? f->choices[i] != NULL : f->kind == MOE_FIELD_FLAG && i < 2; i++) {
            int both, tested_ones = 0;
            if (strcmp(f->name, "kernels") == 0) continue;
            for (both = 0; both < 2; both++) {
                moe_layer_config c = small_layer();
                sprintf(name, "%s=%s", f->name, f->kind == MOE_FIELD_CHOICE ? f->choices[i] : "1");
                if (both) {
                    c.router.refine = MOE_REFINE_SIMILARITY;
                    c.router.gate = MOE_GATE_SIGMOID;
                    c.router.loss_z = 1;
                    c.router.loss_balance = 1;
                }
                CHECKF(T(moe_fields_apply)(T(moe_layer_fields)(), &c, needed_by(name), NULL) == MOE_OK, "%s", name);
                *(int *)(void *)((unsigned char *)&c + f->offset) = i;
                complete(&c);
                if (both) strcat(name, " with similarity");
                if (T(moe_layer_check)(&c, NULL, NULL) == MOE_OK) tested_ones += test_layer_config(&c, name, 1);
            }
            CHECKF(tested_ones > 0 || strncmp(name, "switch_from=soft", 16) == 0, "%s is not tested", name);
        }
}

/* Swiglu experts with biases and shaped gates, of any size. */
static void test_shaped(void) {
    static const char *const settings[] = {"expert_bias=1 swiglu_alpha=1.702 swiglu_limit=7 swiglu_offset=1",
                                           "swiglu_alpha=1e6 swiglu_offset=-1e6", "swiglu_alpha=1e-6 swiglu_limit=1e6",
                                           "expert_bias=1 swiglu_limit=1e-6",
                                           "swiglu_offset=1e6 swiglu_limit=1e6 swiglu_alpha=1e6"};
    size_t i;
    for (i = 0; i < sizeof settings / sizeof *settings; i++) {
        moe_layer_config c = small_layer();
        CHECKF(T(moe_fields_apply)(T(moe_layer_fields)(), &c, settings[i], NULL) == MOE_OK, "%s", settings[i]);
        CHECK(test_layer_config(&c, settings[i], 1), settings[i]);
        test_layer_scales(&c, settings[i]);
    }
}

/* Gates, selections and weights with each other, all losses on. */
static void test_scaled_grid(void) {
    static const int selects[] = {MOE_SELECT_TOP_K,         MOE_SELECT_DENSE,     MOE_SELECT_GIVEN,
                                  MOE_SELECT_TOP_P,         MOE_SELECT_THRESHOLD, MOE_SELECT_POSITIVE,
                                  MOE_SELECT_EXPERT_CHOICE, MOE_SELECT_AFFINITY,  MOE_SELECT_HASH,
                                  MOE_SELECT_SINKHORN,      MOE_SELECT_SAMPLE,    MOE_SELECT_BALANCED};
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
                    r->gate = gate;
                    r->weight = weight;
                    r->select = selects[select];
                    r->score = score;
                    if (variant == 1) {
                        r->renormalize = MOE_RENORMALIZE_AFTER;
                        r->loss_balance = r->loss_z = r->loss_importance = r->loss_entropy = r->loss_usage_entropy = 1;
                    }
                    if (variant == 2) {
                        r->weight_p = 3;
                        r->loss_l1 = r->loss_similarity_same = r->loss_similarity_diff = 1;
                        r->loss_distill = 1;
                        r->distill = MOE_DISTILL_CE_SOFT;
                    }
                    if (variant == 3) {
                        r->cosine_tau = (moe_real)0.01;
                        r->loss_orthogonal = 1;
                        r->threshold_learned = r->select == MOE_SELECT_THRESHOLD;
                    }
                    if (weight != MOE_WEIGHT_P_NORM) r->weight_p = 0;
                    if (r->renormalize == MOE_RENORMALIZE_AFTER && r->select != MOE_SELECT_EXPERT_CHOICE)
                        r->drop_capacity = 3;
                    complete(&c);
                    r->weight = weight;
                    sprintf(name, "gate %d, weight %d, select %d, variant %d", gate, weight, selects[select], variant);
                    if (T(moe_layer_check)(&c, NULL, NULL) == MOE_OK) test_layer_scales(&c, name);
                }
}

/* Logits of any finite size, as a score of one's own may give them: every selection ends, with
   MOE_ERR_NONFINITE or a plan that is sound. */
static moe_status any_logits(void *ctx, const struct moe_router *router, const moe_call *call, const moe_real *u,
                             moe_real *logits) {
    size_t i;
    (void)u;
    for (i = 0; i < call->n_tokens * (size_t)router->config.n_experts; i++) {
        const moe_real size = specials[below(FIRST_ENDLESS)]; /* drawn before its sign, by every compiler */
        logits[i] = size * (moe_real)(below(2) ? 1 : -1) * *(const moe_real *)ctx;
    }
    return MOE_OK;
}

static void test_any_logits(void) {
    static moe_real factors[] = {1, (moe_real)1e-3, (moe_real)1e-30};
    int gate, weight, select, trial;
    size_t refused = 0, good = 0;
    for (select = 0; select < MOE_SELECT_COUNT; select++)
        for (gate = 0; gate < MOE_GATE_COUNT; gate++)
            for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++) {
                moe_layer_config c = small_layer();
                scene s;
                outcome r;
                c.router.score = MOE_SCORE_CUSTOM;
                c.router.select = select;
                c.router.gate = gate;
                if (weight == MOE_WEIGHT_RAW) {
                    c.router.loss_balance = c.router.loss_z = c.router.loss_importance = 1;
                    c.router.drop_capacity = 2;
                    c.router.drop_order = MOE_DROP_SCORE;
                }
                complete(&c);
                c.router.weight = weight;
                if (select == MOE_SELECT_EXPERT_CHOICE) c.router.drop_capacity = 0;
                if (T(moe_layer_check)(&c, NULL, NULL) != MOE_OK || !begin_scene(&s, &c)) continue;
                s.layer.router.custom.score = any_logits;
                memset(&r, 0, sizeof r);
                r.gradients = (moe_real *)grab(s.n_gradients, sizeof *r.gradients);
                for (trial = 0; trial < 12; trial++) {
                    s.layer.router.custom.ctx = &factors[trial % 3];
                    run_scene(&s, trial / 3 % 2, &r);
                    CHECKF(r.status == MOE_OK || r.status == MOE_ERR_NONFINITE, "select %d, gate %d, weight %d: %s",
                           select, gate, weight, moe_status_text(r.status));
                    CHECKF(r.status != MOE_OK || (routing_is_sound(&r.routing) && choices_are_whole(&s, &r.routing)),
                           "select %d, gate %d, weight %d: any logits", select, gate, weight);
                    refused += r.status != MOE_OK;
                    good += r.status == MOE_OK;
                }
                free(r.gradients);
                free(r.work);
                end_scene(&s);
            }
    CHECKF(good > 20 * refused && good > 1000, "any logits: %d good, %d refused", (int)good, (int)refused);
}

/* ---- networks ---- */

enum { NET_WIDTH = 16, NET_TOKENS = 150, FEED_FORWARD = 0, MIXTURE = 1, LINEAR = 2 };

/* Modules that look at one token at a time, or at the earlier ones. */
static void begin_net(moe_net *net, int kernels, int middle, int trainable) {
    moe_attention_config attention;
    moe_layer_config layer = small_layer();
    moe_error error;
    memset(&attention, 0, sizeof attention);
    attention.heads = 2;
    attention.rotary = 1;
    layer.router.d_model = 0;
    layer.router.n_experts = 4;
    layer.d_ff = 12;
    CHECK(T(moe_net_init)(net, NET_WIDTH, kernels, NULL) == MOE_OK, "net");
    (void)T(moe_net_positions)(net, NET_TOKENS);
    (void)T(moe_net_rms_norm)(net);
    (void)T(moe_net_attention)(net, &attention);
    (void)T(moe_net_residual)(net, 2);
    (void)T(moe_net_layer_norm)(net);
    (void)(middle == MIXTURE  ? T(moe_net_mixture)(net, &layer)
           : middle == LINEAR ? T(moe_net_linear)(net, NET_WIDTH)
                              : T(moe_net_feed_forward)(net, NULL));
    (void)T(moe_net_residual)(net, 2);
    (void)T(moe_net_linear)(net, 24);
    (void)T(moe_net_activation)(net, MOE_ACT_GELU);
    (void)T(moe_net_dropout)(net, (moe_real)0.1);
    (void)T(moe_net_linear)(net, NET_WIDTH);
    if (!CHECKF(T(moe_net_build)(net, trainable, 3, &error) == MOE_OK, "build: %s", error.message)) exit(1);
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

/* A token's number reaches no earlier token, to the bit; decoding gives the bits of the whole
   sequence even behind such a number. */
static void test_net_rows(int kernels, int middle) {
    moe_net net;
    moe_call call;
    moe_real *x = normals_of(&rng, NET_TOKENS * NET_WIDTH, 1);
    moe_real *plain = normals_of(&rng, NET_TOKENS * NET_WIDTH, 1);
    moe_real *y = normals_of(&rng, NET_TOKENS * NET_WIDTH, 1);
    unsigned char mask[NET_TOKENS];
    int special;
    size_t i;
    begin_net(&net, kernels, middle, 0);
    memset(&call, 0, sizeof call);
    call.n_tokens = NET_TOKENS;
    call.x = x;
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
                CHECKF(status == MOE_ERR_NONFINITE && middle != LINEAR && special > 8, "net %d, %s: %s", middle,
                       special_names[special], moe_status_text(status));
                continue;
            }
            CHECKF(same_bits(y, plain, (t * NET_WIDTH) * sizeof(moe_real)), "%s in token %d reaches an earlier one",
                   special_names[special], (int)t);
            CHECKF(special > 6 || all_finite(NET_TOKENS * NET_WIDTH, y), "%s in token %d", special_names[special],
                   (int)t);
            CHECK(special != IS_NAN || all_nan((NET_TOKENS - t) * NET_WIDTH, y + t * NET_WIDTH),
                  "NaN is not lost on its way");
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
        if (!CHECKF(run_net(&net, &call, y) == MOE_OK, "net %d: padding of %s", middle, special_names[special]))
            continue;
        for (i = 0; i < NET_TOKENS; i++)
            reached += mask[i] && !same_bits(y + i * NET_WIDTH, plain + i * NET_WIDTH, NET_WIDTH * sizeof(moe_real));
        CHECKF(reached == 0, "net %d: padding of %s reaches %d tokens", middle, special_names[special], reached);
    }
    T(moe_net_free)(&net);
    free(x);
    free(plain);
    free(y);
}

static void test_decoding(void) {
    enum { N = 70 };
    moe_net net;
    moe_cache cache;
    moe_call call;
    moe_net_pass pass;
    moe_error error;
    moe_real *x = normals_of(&rng, N * NET_WIDTH, 1), *whole = normals_of(&rng, N * NET_WIDTH, 1);
    size_t bytes = 0, work_bytes = 0, i;
    void *memory, *work;
    begin_net(&net, MOE_KERNELS_AUTO, LINEAR, 0);
    memset(&call, 0, sizeof call);
    x[40 * NET_WIDTH + 3] = specials[IS_NAN];
    call.n_tokens = N;
    call.x = x;
    CHECK(run_net(&net, &call, whole) == MOE_OK, "a whole sequence");
    CHECK(T(moe_net_decode_size)(&net, N, 1, &bytes, NULL, NULL) == MOE_OK &&
              T(moe_net_decode_size)(&net, N, 1, NULL, &work_bytes, NULL) == MOE_OK,
          "sizes");
    memory = grab(bytes, 1);
    work = grab(work_bytes, 1);
    CHECK(T(moe_net_cache_init)(&cache, &net, N, memory, bytes, &error) == MOE_OK, "a cache");
    for (i = 0; i < N; i++) {
        call.n_tokens = 1;
        call.x = x + i * NET_WIDTH;
        if (!CHECKF(T(moe_net_decode)(&net, &cache, &call, work, work_bytes, &pass) == MOE_OK, "decodes token %d",
                    (int)i))
            break;
        CHECKF(i < 40 ? same_bits(pass.y, whole + i * NET_WIDTH, NET_WIDTH * sizeof(moe_real))
                      : all_nan(NET_WIDTH, pass.y),
               "token %d of a sequence with NaN at 40", (int)i);
    }
    cache.n_tokens = 40; /* back to before it: as if it had never been */
    for (i = 0; i < NET_WIDTH; i++) x[40 * NET_WIDTH + i] = 1;
    call.x = x + 40 * NET_WIDTH;
    CHECK(T(moe_net_decode)(&net, &cache, &call, work, work_bytes, &pass) == MOE_OK && all_finite(NET_WIDTH, pass.y),
          "and back");
    free(memory);
    free(work);
    free(x);
    free(whole);
    T(moe_net_free)(&net);
}

static void test_nets(void) {
    int t;
    for (t = 0; t < n_tables; t++) {
        test_net_rows(tables[t]->id, FEED_FORWARD);
        test_net_rows(tables[t]->id, MIXTURE);
        test_net_rows(tables[t]->id, LINEAR);
    }
    test_decoding();
}

/* ---- training ---- */

enum { BATCH = 8 };

typedef struct lesson {
    moe_net net;
    moe_trainer trainer;
    moe_data data;
    moe_real x[BATCH * NET_WIDTH], targets[BATCH * NET_WIDTH];
} lesson;

static void begin_lesson(lesson *s, const moe_train_config *config) {
    moe_error error;
    size_t i;
    memset(s, 0, sizeof *s);
    begin_net(&s->net, MOE_KERNELS_AUTO, MIXTURE, 1);
    for (i = 0; i < BATCH * NET_WIDTH; i++) {
        s->x[i] = moe_rng_normal(&rng);
        s->targets[i] = moe_rng_normal(&rng);
    }
    s->data.n = BATCH;
    s->data.x = s->x;
    s->data.targets = s->targets;
    s->data.length = 4;
    if (!CHECKF(T(moe_trainer_init)(&s->trainer, &s->net, config, &error) == MOE_OK, "trainer: %s", error.message))
        exit(1);
}

static void end_lesson(lesson *s) {
    T(moe_trainer_free)(&s->trainer);
    T(moe_net_free)(&s->net);
}

static size_t numbers_of(const moe_net *net) { return T(moe_net_parameter_count)(net, NULL); }

/* Everything that a failed step leaves alone. */
static int same_lesson(const lesson *s, const moe_real *values, const moe_real *moments, const moe_trainer *trainer) {
    return same_bits(values, s->net.memory, (numbers_of(&s->net)) * sizeof(moe_real)) &&
           memcmp(moments, s->trainer.memory, s->trainer.memory_size) == 0 && trainer->steps == s->trainer.steps &&
           trainer->rng.state == s->trainer.rng.state && trainer->n_accumulated == s->trainer.n_accumulated;
}

/* A batch that is refused, and nothing has changed. */
static void refused_step(lesson *s, const char *what, const char *says) {
    const size_t n = numbers_of(&s->net);
    moe_real *values = (moe_real *)grab(n, sizeof *values), *moments = (moe_real *)grab(s->trainer.memory_size, 1);
    moe_trainer before = s->trainer;
    moe_step step, kept;
    moe_error error;
    memset(&step, 0x5a, sizeof step);
    kept = step;
    memcpy(values, s->net.memory, n * sizeof *values);
    memcpy(moments, s->trainer.memory, s->trainer.memory_size);
    error.message[0] = '\0';
    CHECKF(T(moe_trainer_step)(&s->trainer, &s->data, &step, &error) == MOE_ERR_NONFINITE &&
               error.code == MOE_ERR_NONFINITE,
           "%s", what);
    CHECKF(strstr(error.message, says) != NULL, "%s says: %s", what, error.message);
    CHECKF(same_lesson(s, values, moments, &before) && memcmp(&step, &kept, sizeof step) == 0, "%s changes nothing",
           what);
    error.message[0] = '\0';
    CHECKF(T(moe_trainer_accumulate)(&s->trainer, &s->data, &step, &error) == MOE_ERR_NONFINITE &&
               strstr(error.message, says) != NULL,
           "accumulate: %s", what);
    CHECKF(same_lesson(s, values, moments, &before) && memcmp(&step, &kept, sizeof step) == 0,
           "%s changes nothing in accumulate", what);
    free(values);
    free(moments);
}

static moe_train_config lesson_config(int optimizer) {
    moe_train_config config;
    memset(&config, 0, sizeof config);
    config.criterion = MOE_CRITERION_SQUARED_ERROR;
    config.batch = BATCH;
    config.optimizer = optimizer;
    return config;
}

/* Numbers of samples that are refused, and losses and gradients beyond the type. */
static void refuse_samples(lesson *s) {
    moe_evaluation result, kept;
    moe_error error;
    moe_real was;
    moe_real huge = MOE_REAL_IS_DOUBLE ? (moe_real)1e160 : (moe_real)3e19;
    size_t i, at;
    int special;
    memset(&result, 0x5a, sizeof result);
    kept = result;
    for (special = 0; special < SPECIALS; special++) {
        at = below(BATCH * NET_WIDTH);
        was = s->x[at];
        s->x[at] = specials[special];
        if (special >= FIRST_ENDLESS) {
            refused_step(s, "x", "x[");
            CHECKF(T(moe_evaluate)(&s->net, &s->data, MOE_CRITERION_SQUARED_ERROR, &result, &error) ==
                           MOE_ERR_NONFINITE &&
                       memcmp(&result, &kept, sizeof kept) == 0,
                   "evaluates no %s", special_names[special]);
        } else if (special < 7)
            CHECKF(T(moe_trainer_accumulate)(&s->trainer, &s->data, NULL, &error) == MOE_OK, "x = %s: %s",
                   special_names[special], error.message);
        s->x[at] = was;
        s->trainer.n_accumulated = 0;
        was = s->targets[at];
        s->targets[at] = specials[special];
        if (special >= FIRST_ENDLESS) refused_step(s, "a target", "targets[");
        else if (special < 7)
            CHECKF(T(moe_trainer_accumulate)(&s->trainer, &s->data, NULL, &error) == MOE_OK, "a target = %s: %s",
                   special_names[special], error.message);
        s->targets[at] = was;
        s->trainer.n_accumulated = 0;
    }
    was = s->targets[3];
    s->targets[3] = LARGEST;
    refused_step(s, "a loss beyond the type", "the loss is not finite");
    s->targets[3] = was;
    for (i = 0; i < BATCH * NET_WIDTH; i++) s->x[i] *= 1000;
    { /* a loss that is finite, and a gradient that is not to be squared */
        moe_tensor *last = net_tensor(&s->net, "10.weight");
        moe_real *copy = (moe_real *)grab(last->count, sizeof *copy);
        memcpy(copy, last->data, last->count * sizeof *copy);
        for (i = 0; i < last->count; i++) last->data[i] *= huge;
        CHECK(T(moe_trainer_step)(&s->trainer, &s->data, NULL, &error) == MOE_ERR_NONFINITE,
              "numbers too large to square");
        memcpy(last->data, copy, last->count * sizeof *copy);
        free(copy);
    }
}

static void test_refused_steps(void) {
    moe_train_config config = lesson_config(MOE_OPTIMIZER_ADAMW);
    moe_error error;
    moe_real was;
    lesson s;
    size_t i, at;
    int special, failures = 0;
    begin_lesson(&s, &config);
    for (i = 0; i < 3; i++)
        CHECKF(T(moe_trainer_step)(&s.trainer, &s.data, NULL, &error) == MOE_OK, "a step: %s", error.message);
    refuse_samples(&s);
    for (i = 0; i < BATCH * NET_WIDTH; i++) s.x[i] /= 1000;
    for (i = 0; i < s.net.n_tensors; i++) /* a broken weight, in every tensor */
        for (special = FIRST_ENDLESS; special < SPECIALS; special++) {
            const moe_tensor *t = &s.net.tensors[i];
            moe_status status;
            at = below(t->count);
            was = t->data[at];
            t->data[at] = specials[special];
            s.trainer.n_accumulated = 0;
            status = T(moe_trainer_accumulate)(&s.trainer, &s.data, NULL, &error);
            CHECKF(status == MOE_OK || status == MOE_ERR_NONFINITE, "%s = %s: %s", t->name, special_names[special],
                   error.message);
            CHECKF(status != MOE_OK || (strcmp(t->name, "0.weight") == 0 && at >= 4 * NET_WIDTH) ||
                       strstr(t->name, "experts") != NULL || special == 11,
                   "%s = %s is not seen", t->name, special_names[special]);
            failures += status != MOE_OK;
            t->data[at] = was;
        }
    CHECKF(failures > 20, "broken weights are seen: %d", failures);
    s.trainer.n_accumulated = 0;
    CHECK(T(moe_trainer_accumulate)(&s.trainer, &s.data, NULL, &error) == MOE_OK, "a batch");
    { /* a gradient that breaks before the update */
        moe_real *g = s.net.tensors[3].gradient;
        const moe_real gradient = g[1], weight = s.net.tensors[3].data[1];
        g[1] = specials[IS_NAN];
        CHECKF(T(moe_trainer_update)(&s.trainer, NULL, &error) == MOE_ERR_NONFINITE &&
                   strstr(error.message, "number 1 of the gradient") != NULL,
               "update: %s", error.message);
        CHECK(s.trainer.n_accumulated == 1 && same_bits(&weight, &s.net.tensors[3].data[1], sizeof(moe_real)),
              "changes nothing");
        g[1] = gradient;
        CHECK(T(moe_trainer_update)(&s.trainer, NULL, &error) == MOE_OK, "and goes on");
    }
    s.trainer.rate = specials[IS_NAN];
    CHECK(T(moe_trainer_step)(&s.trainer, &s.data, NULL, &error) == MOE_ERR_ARGUMENT, "a rate that is no number");
    end_lesson(&s);
}

/* A clipped gradient of any size up to the limit moves the weights by a clipped step; zero
   gradients move nothing and divide by nothing. */
static void test_clipping(void) {
    static const double sizes[] = {0, 1e-30, 1, 1e6, 1e12, 1e17};
    moe_train_config config = lesson_config(MOE_OPTIMIZER_SGD);
    moe_error error;
    moe_step step;
    lesson s;
    size_t i, j, n;
    config.clip = 1;
    config.rate = 1;
    config.momentum = -1;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        moe_real *before;
        wide moved = 0;
        begin_lesson(&s, &config);
        n = numbers_of(&s.net);
        before = (moe_real *)grab(n, sizeof *before);
        memcpy(before, s.net.memory, n * sizeof *before);
        CHECK(T(moe_trainer_accumulate)(&s.trainer, &s.data, NULL, &error) == MOE_OK, "a batch");
        for (j = 0; j < s.net.n_tensors; j++) {
            moe_tensor *t = &s.net.tensors[j];
            size_t l;
            for (l = 0; l < t->count; l++) t->gradient[l] = j == 2 && l == 5 ? (moe_real)sizes[i] : 0;
        }
        CHECKF(T(moe_trainer_update)(&s.trainer, &step, &error) == MOE_OK, "a clipped step: %s", error.message);
        CHECK(alike(step.gradient_norm, (wide)sizes[i], (wide)sizes[i] * 1e-5), "the norm before clipping");
        for (j = 0; j < n; j++) moved += ((wide)s.net.memory[j] - before[j]) * ((wide)s.net.memory[j] - before[j]);
        CHECKF(alike((moe_real)WIDE(sqrt)(moved), sizes[i] < 1 ? (wide)sizes[i] : 1, 1e-5),
               "a gradient of %g moves by %g", sizes[i], (double)WIDE(sqrt)(moved));
        free(before);
        end_lesson(&s);
    }
}

static int count_steps(void *ctx, const moe_progress *progress) {
    *(uint64_t *)ctx = progress->total_step;
    return 0;
}

/* Training that diverges stops with the place where it did; the network keeps what the last good
   step left, which is finite. */
static void test_divergence(void) {
    moe_train_config config = lesson_config(MOE_OPTIMIZER_SGD);
    moe_error error;
    uint64_t good = 0;
    lesson s;
    char says[64];
    config.rate = 1e6;
    config.momentum = -1;
    config.epochs = 1000;
    config.progress = count_steps;
    config.progress_ctx = &good;
    begin_lesson(&s, &config);
    s.data.length = 4;
    CHECK(T(moe_fit)(&s.net, &s.data, NULL, &config, &error) == MOE_ERR_NONFINITE, "a rate of a million diverges");
    sprintf(says, "epoch %d, step 1: ", (int)good + 1);
    CHECKF(strncmp(error.message, says, strlen(says)) == 0 && strlen(error.message) > strlen(says) + 10,
           "%s... is said: %s", says, error.message);
    CHECK(all_finite(numbers_of(&s.net), s.net.memory), "the weights are finite");
    end_lesson(&s);
    { /* training goes well, the test set does not: its numbers are finite, what the network makes of them is not */
        moe_data test;
        moe_real *x = normals_of(&rng, BATCH * NET_WIDTH, 1);
        size_t i;
        config = lesson_config(MOE_OPTIMIZER_ADAMW);
        config.epochs = 3;
        begin_lesson(&s, &config);
        for (i = 0; i < BATCH * NET_WIDTH; i++) x[i] = LARGEST;
        test = s.data;
        test.x = x;
        CHECKF(T(moe_fit)(&s.net, &s.data, &test, &config, &error) == MOE_ERR_NONFINITE &&
                   strncmp(error.message, "epoch 1, step 1: ", 17) == 0,
               "a test set: %s", error.message);
        CHECK(all_finite(numbers_of(&s.net), s.net.memory), "the weights are finite");
        free(x);
        end_lesson(&s);
    }
}

static void test_losses(void) {
    enum { ROWS = 3, CLASSES = 7 };
    static const int32_t labels[ROWS] = {2, -1, 6}, none[ROWS] = {-1, -1, -1};
    moe_real y[ROWS * CLASSES], other[ROWS * CLASSES], dy[ROWS * CLASSES], db[ROWS * CLASSES], loss;
    int special, trial;
    size_t i, at;
    for (special = 0; special < SPECIALS; special++)
        for (trial = 0; trial < 20; trial++) {
            int finite = 1;
            for (i = 0; i < ROWS * CLASSES; i++) {
                y[i] = moe_rng_normal(&rng);
                other[i] = moe_rng_normal(&rng);
            }
            at = below(ROWS * CLASSES);
            y[at] = specials[special];
            loss = T(moe_cross_entropy)(ROWS, CLASSES, y, labels, dy);
            if (special < FIRST_ENDLESS || at / CLASSES == 1)
                CHECKF(moe_is_finite(loss) && all_finite(ROWS * CLASSES, dy), "cross-entropy with %s",
                       special_names[special]);
            else if (special != 11 || labels[at / CLASSES] == (int32_t)(at % CLASSES)) finite = 0;
            CHECKF(moe_is_finite(loss) == finite, "cross-entropy with %s in row %d: %g", special_names[special],
                   (int)(at / CLASSES), (double)loss);
            for (i = 0; i < CLASSES && !finite && special != 11; i++) /* -inf makes the loss alone so */
                CHECKF(!moe_is_finite(dy[at / CLASSES * CLASSES + i]), "a row with %s has no gradient",
                       special_names[special]);
            for (i = 0; i < CLASSES; i++)
                CHECK(!(dy[CLASSES + i] < 0) && !(dy[CLASSES + i] > 0), "a row without a label has no gradient");
            loss = T(moe_squared_error)(ROWS, CLASSES, y, other, dy);
            if (special < 7) CHECKF(moe_is_finite(loss), "squared error with %s", special_names[special]);
            if (special >= 9)
                CHECKF(!moe_is_finite(loss) && loss != 0, "squared error with %s", special_names[special]);
            for (i = 0; i < ROWS * CLASSES; i++)
                CHECK(i == at || moe_is_finite(dy[i]), "each gradient of the squared error is its own");
            loss = T(moe_consistency_loss)(ROWS, CLASSES, y, other, dy, db);
            if (special < 9)
                CHECKF(moe_is_finite(loss) && all_finite(ROWS * CLASSES, dy) && all_finite(ROWS * CLASSES, db),
                       "consistency with %s: %g", special_names[special], (double)loss);
            if (special >= FIRST_ENDLESS)
                CHECKF(!moe_is_finite(loss), "consistency with %s: %g", special_names[special], (double)loss);
        }
    CHECK(!(T(moe_cross_entropy)(0, 3, NULL, NULL, NULL) > 0) && !(T(moe_squared_error)(0, 3, NULL, NULL, NULL) > 0) &&
              !(T(moe_consistency_loss)(0, 3, NULL, NULL, NULL, NULL) > 0),
          "of nothing: 0");
    memset(y, 0, sizeof y);
    CHECK(!(T(moe_cross_entropy)(ROWS, 1, y, none, dy) > 0), "no labeled row: 0");
}

static void test_training(void) {
    test_refused_steps();
    test_clipping();
    test_divergence();
    test_losses();
}

/* ---- sampling, metrics, the classical mixture ---- */

static void test_sampling(void) {
    enum { N = 11 };
    static const moe_sampling hows[] = {{0, 0, 0, 0},
                                        {1, 0, 0, 0},
                                        {0, (moe_real)1e-6, 0, 0},
                                        {0, (moe_real)1e6, 3, 0},
                                        {0, 1, 0, (moe_real)0.5},
                                        {0, 0, 4, (moe_real)1e-9}};
    moe_real logits[N], p[N], kept[N];
    int32_t order[N], token, before;
    moe_rng own;
    moe_error error;
    size_t how, i, at;
    int special, trial;
    for (how = 0; how < sizeof hows / sizeof hows[0]; how++)
        for (special = 0; special < SPECIALS; special++)
            for (trial = 0; trial < 12; trial++) {
                wide sum = 0;
                moe_status status;
                for (i = 0; i < N; i++) {
                    logits[i] = trial == 11 ? specials[special] : moe_rng_normal(&rng);
                    p[i] = 7;
                }
                at = below(N);
                logits[at] = specials[special];
                memcpy(kept, p, sizeof p);
                T(moe_rng_seed)(&own, (uint64_t)trial);
                token = before = -5;
                status = T(moe_sample)(&hows[how], N, logits, &own, p, order, &token, &error);
                if (special >= FIRST_ENDLESS) {
                    CHECKF(status == MOE_ERR_NONFINITE && token == before && own.state == (uint64_t)trial &&
                               memcmp(p, kept, sizeof p) == 0,
                           "sample of %s", special_names[special]);
                    CHECKF(strstr(error.message, "logits[") != NULL, "sample names the logit: %s", error.message);
                    continue;
                }
                CHECKF(status == MOE_OK && token >= 0 && token < N && p[token] > 0, "sample with %s",
                       special_names[special]);
                for (i = 0; i < N; i++) sum += p[i];
                CHECKF(alike((moe_real)sum, 1, 1e-5) && all_finite(N, p), "probabilities with %s",
                       special_names[special]);
                if (special == 9 && trial < 11) CHECK(token == (int32_t)at, "the largest number is taken");
            }
    for (special = 0; special < SPECIALS; special++) { /* fields */
        moe_sampling bad = {0, 0, 0, 0};
        for (i = 0; i < N; i++) logits[i] = moe_rng_normal(&rng);
        bad.temperature = specials[special];
        CHECKF((T(moe_sample)(&bad, N, logits, &own, p, order, &token, &error) == MOE_OK) ==
                   (special < 2 || special == 5),
               "temperature = %s", special_names[special]);
        bad.temperature = 0;
        bad.top_p = specials[special];
        CHECKF((T(moe_sample)(&bad, N, logits, &own, p, order, &token, &error) == MOE_OK) ==
                   (special < 3 || special == 4),
               "top_p = %s", special_names[special]);
    }
}

static void test_no_data(void) {
    enum { N = 6, E = 4, D = 5 };
    moe_instability_report instability;
    moe_error_shares shares;
    double value, room[64];
    int32_t first[N], classes[N], predicted[N * E];
    unsigned char trivial[E];
    size_t i;
    /* data that are no data */
    for (i = 0; i < N; i++) {
        first[i] = -1;
        classes[i] = -1;
    }
    for (i = 0; i < N * E; i++) predicted[i] = -1;
    CHECK(T(moe_fluctuation)(N, first, first, NULL, &value) == MOE_OK && !(value > 0), "nobody changes");
    CHECK(T(moe_fluctuation)(0, NULL, NULL, NULL, &value) == MOE_OK && !(value > 0), "nobody is there");
    CHECK((E + 1) * (E + 1) <= sizeof room / sizeof room[0], "room");
    CHECK(T(moe_instability)(N, first, E, first, E, NULL, room, &instability) == MOE_OK &&
              !(instability.instability > 0) && !(instability.q1 > 0),
          "no experts");
    CHECK(T(moe_instability)(1, first, E, first, E, NULL, room, &instability) == MOE_OK && !(instability.chance > 0),
          "one token");
    CHECK(T(moe_gate_errors)(N, E, predicted, classes, classes, NULL, trivial, &shares) == MOE_OK &&
              shares.n_samples == 0 && !(shares.error > 0),
          "no labels");
    CHECK(shares.n_trivial == 0 && trivial[0] == 0, "no answers");
}

static void test_cosine_and_information(void) {
    enum { N = 6, E = 4, D = 5 };
    moe_real x[N * D];
    double scratch[D], table[4], value;
    size_t i;
    int special;
    for (special = 0; special < SPECIALS; special++) {
        for (i = 0; i < N * D; i++) x[i] = moe_rng_normal(&rng);
        x[7] = specials[special];
        value = -9;
        if (special < FIRST_ENDLESS)
            CHECKF(T(moe_token_cosine)(N, D, x, NULL, scratch, &value) == MOE_OK && value >= -1 && value <= 1,
                   "cosine with %s: %g", special_names[special], value);
        else
            CHECKF(T(moe_token_cosine)(N, D, x, NULL, scratch, &value) == MOE_ERR_NONFINITE && value < -8,
                   "cosine with %s", special_names[special]);
        for (i = 0; i < 4; i++) table[i] = 3;
        table[2] = (double)specials[special];
        value = -9;
        if (special < 3 || special == 4 || special == 5 || special == 7)
            CHECKF(T(moe_mutual_information)(2, 2, table, &value) == MOE_OK && value >= 0 && value < 1,
                   "information with %s: %g", special_names[special], value);
        if (special >= FIRST_ENDLESS)
            CHECKF(T(moe_mutual_information)(2, 2, table, &value) ==
                           (special == 11 ? MOE_ERR_ARGUMENT : MOE_ERR_NONFINITE) &&
                       value < -8,
                   "information with %s", special_names[special]);
    }
    memset(x, 0, sizeof x);
    CHECK(T(moe_token_cosine)(N, D, x, NULL, scratch, &value) == MOE_OK && !(fabs(value) > 0), "cosine of zeros");
}

static void check_report_finite(moe_report *report, int special, int gate, const double *numbers) {
    size_t i, count;
    for (i = 0, count = 0;
         i < (offsetof(moe_report, trivial_gate) - offsetof(moe_report, n_calls)) / sizeof(double); i++)
        count += !(fabs(numbers[offsetof(moe_report, n_calls) / sizeof(double) + i]) < 1e300);
    CHECKF((count == 0 || (MOE_REAL_IS_DOUBLE && special > 6)) && fabs(report->information) < 2 &&
               fabs(report->information_chance) < 2,
           "metrics of gate %d with %s: %d numbers are not finite", gate, special_names[special], (int)count);
}

static void check_nothing_added(moe_report *report) {
    size_t i;
    for (i = 0; i < 4; i++) CHECK(!(fabs((&report->n_calls)[i]) > 0), "nothing added: 0");
    CHECK(!(report->gate_entropy > 0) && !(report->load_cv2 > 0) && !(report->information > 0) &&
              !(report->importance_cv2 > 0) && !(report->load_max_over_mean > 0),
          "nothing added: 0");
}

static void test_metrics(void) {
    enum { N = 6, E = 4, D = 5 };
    moe_router_config config;
    moe_router router;
    moe_call call;
    moe_routing routing;
    moe_metrics metrics;
    moe_report report;
    moe_real weight[E * D], x[N * D];
    int32_t first[N], classes[N], predicted[N * E];
    unsigned char *memory, *work;
    size_t bytes = 0, work_bytes = 0, i;
    int special, gate;
    for (gate = 0; gate < MOE_GATE_COUNT; gate++) {
        memset(&config, 0, sizeof config);
        memset(&call, 0, sizeof call);
        config.d_model = D;
        config.n_experts = E;
        config.gate = gate;
        config.weight = MOE_WEIGHT_RAW;
        CHECK(T(moe_router_init)(&router, &config, NULL, NULL) == MOE_OK, "router");
        router.tensors[MOE_ROUTER_WEIGHT] = weight;
        call.n_tokens = N;
        call.x = x;
        CHECK(T(moe_route_size)(&router, N, 0, &work_bytes) == MOE_OK && T(moe_metrics_size)(E, 3, &bytes) == MOE_OK,
              "sizes");
        memory = (unsigned char *)grab(bytes, 1);
        work = (unsigned char *)grab(work_bytes, 1);
        for (special = 0; special < SPECIALS; special++) {
            moe_status status;
            const double *numbers = (const double *)(void *)&report;
            CHECK(T(moe_metrics_init)(&metrics, E, 3, memory, bytes) == MOE_OK &&
                      T(moe_metrics_report)(&metrics, &report) == MOE_OK,
                  "metrics");
            check_nothing_added(&report);
            for (i = 0; i < E * D; i++) weight[i] = special < 4 ? specials[special] : moe_rng_normal(&rng);
            for (i = 0; i < N * D; i++) x[i] = moe_rng_normal(&rng);
            for (i = 0; i < N; i++) classes[i] = (int32_t)(i % 3);
            x[below(N * D)] = specials[special];
            status = T(moe_route)(&router, &call, work, work_bytes, &routing);
            CHECKF(status ==
                       (special >= FIRST_ENDLESS || (status != MOE_OK && special == 9) ? MOE_ERR_NONFINITE : MOE_OK),
                   "route with %s", special_names[special]);
            if (status != MOE_OK) continue;
            CHECK(T(moe_metrics_add)(&metrics, &routing, NULL, classes) == MOE_OK &&
                      T(moe_metrics_report)(&metrics, &report) == MOE_OK,
                  "metrics");
            check_report_finite(&report, special, gate, numbers);
            CHECK(T(moe_routing_choices)(&routing, 1, 1, first) == MOE_OK &&
                      T(moe_routing_choices)(&routing, routing.max_choices, 1, predicted) == MOE_OK,
                  "choices");
        }
        free(memory);
        free(work);
    }
    test_cosine_and_information();
    test_no_data();
}

static void check_mixture_losses(moe_real *p, moe_real *o, moe_real *targets, moe_mixture *m) {
    enum { N = 4, E = 3, C = 3, D = 2 };
    moe_real d_p[N * E], d_o[E * N * C], answer[N * C], loss;
    moe_error error;
    int criterion, special, which, trial;
    size_t i, at;
    for (criterion = 0; criterion < MOE_CRITERION_COUNT; criterion++)
        for (special = 0; special < SPECIALS; special++)
            for (which = 0; which < 3; which++)
                for (trial = 0; trial < 8; trial++) {
                    moe_status status;
                    moe_real *arrays[3];
                    const size_t counts[3] = {N * E, E * N * C, N * C};
                    const int read = which < 2 || criterion == MOE_CRITERION_SQUARED_ERROR ||
                                     criterion == MOE_CRITERION_STOCHASTIC_SQUARED ||
                                     criterion == MOE_CRITERION_JACOBS_SQUARED;
                    arrays[0] = p;
                    arrays[1] = o;
                    arrays[2] = targets;
                    for (i = 0; i < N * E; i++) {
                        p[i] = moe_rng_uniform(&rng);
                        d_p[i] = 5;
                    }
                    for (i = 0; i < E * N * C; i++) {
                        o[i] = moe_rng_normal(&rng);
                        d_o[i] = 5;
                    }
                    for (i = 0; i < N * C; i++) targets[i] = moe_rng_normal(&rng);
                    at = below(counts[which]);
                    arrays[which][at] = specials[special];
                    loss = -77;
                    status = T(moe_mixture_loss)(criterion, m, &loss, d_p, d_o, &error);
                    if (special >= FIRST_ENDLESS && read)
                        CHECKF(status == MOE_ERR_NONFINITE ||
                                   (which == 0 && special == 11 && status == MOE_ERR_ARGUMENT),
                               "mixture loss %d, %s in %d: %s", criterion, special_names[special], which,
                               moe_status_text(status));
                    if (special < 7 && !(which == 0 && (special == 3 || special == 6)))
                        CHECKF(status == MOE_OK, "mixture loss %d, %s in %d: %s", criterion, special_names[special],
                               which, moe_status_text(status));
                    if (status == MOE_OK)
                        CHECKF(moe_is_finite(loss) && all_finite(N * E, d_p) && all_finite(E * N * C, d_o),
                               "mixture loss %d, %s in %d is finite", criterion, special_names[special], which);
                    else CHECK(loss < -76 && d_p[0] > 4 && d_o[0] > 4, "a failed loss changes nothing");
                    if (which == 2) continue;
                    status = T(moe_mixture_answer)(criterion, m, NULL, answer, &error);
                    if (special >= FIRST_ENDLESS)
                        CHECKF(status == MOE_ERR_NONFINITE ||
                                   (which == 0 && special == 11 && status == MOE_ERR_ARGUMENT),
                               "mixture answer %d, %s: %s", criterion, special_names[special], moe_status_text(status));
                    if (status == MOE_OK && special < 9)
                        CHECKF(all_finite(N * C, answer), "mixture answer %d, %s in %d is finite", criterion,
                               special_names[special], which);
                }
}

static void test_classical(void) {
    enum { N = 4, E = 3, C = 3, D = 2 };
    moe_real p[N * E], o[E * N * C], targets[N * C];
    int32_t labels[N] = {0, 2, 1, 1};
    moe_mixture m;
    memset(&m, 0, sizeof m);
    m.n = N;
    m.experts = E;
    m.width = C;
    m.p = p;
    m.outputs = o;
    m.labels = labels;
    m.targets = targets;
    check_mixture_losses(p, o, targets, &m);
}

static void check_hme_answers(moe_real *x, moe_hme *hme, moe_data *data, int special) {
    enum { N = 20, D = 2, C = 2 };
    moe_real answer[N * C];
    double group[N * 2], expert[N * 4];
    moe_error error;
    size_t i;
    moe_status status;
    status = T(moe_hme_predict)(hme, N, x, answer, &error);
    CHECKF(status == MOE_OK ? all_finite(N * C, answer) : status == MOE_ERR_NONFINITE && special >= 7,
           "predict with %s", special_names[special]);
    status = T(moe_hme_posteriors)(hme, data, group, expert, &error);
    CHECKF(status == MOE_OK || (status == MOE_ERR_NONFINITE && special >= 7), "posteriors with %s",
           special_names[special]);
    for (i = 0; i < N && status == MOE_OK; i++)
        CHECKF(fabs(group[2 * i] + group[2 * i + 1] - 1) < 1e-9, "posteriors sum to 1 with %s",
               special_names[special]);
}

static void linear_samples(moe_real *x, moe_real *y, int32_t *labels) {
    enum { N = 20, D = 2, C = 2 };
    size_t i;
    for (i = 0; i < N * D; i++) x[i] = moe_rng_normal(&rng);
    for (i = 0; i < N; i++) {
        y[2 * i] = x[2 * i] + 1;
        y[2 * i + 1] = x[2 * i + 1] * 2;
        labels[i] = (int32_t)(i % 2);
    }
}

static void check_hme_rates(moe_hme *hme, moe_data *data, int special) {
    double h[20 * 4], after; /* 20 samples, 4 experts */
    moe_error error;
    size_t i, at;
    moe_status status;
    for (i = 0; i < SPECIALS; i++) {
        status =
            T(moe_hme_gradient)(hme, data, i == 9 || i == 7 || i == 8 ? 0 : specials[i], h, &after, &error);
        if (i >= FIRST_ENDLESS)
            CHECKF(status == MOE_ERR_ARGUMENT || special >= 7, "a rate of %s: %s", special_names[i],
                   moe_status_text(status));
        for (at = 0; at < hme->n_parameters; at++)
            if (!(fabs(hme->parameters[at]) <= 1e308)) break;
        CHECKF(at == hme->n_parameters, "parameters stay finite with x = %s and a rate of %s",
               special_names[special], special_names[i]);
    }
}

static void test_hierarchical(void) {
    enum { N = 20, D = 2, C = 2 };
    moe_real x[N * D], y[N * C];
    int32_t labels[N];
    double h[N * 4], before, after;
    moe_hme hme;
    moe_hme_config config;
    moe_data data;
    moe_error error;
    int family, special, step;
    size_t at;
    for (family = 0; family < MOE_HME_COUNT; family++)
        for (special = 0; special < SPECIALS; special++) {
            const moe_status wanted = special >= FIRST_ENDLESS ? MOE_ERR_NONFINITE : MOE_OK;
            moe_status status;
            double *kept;
            memset(&config, 0, sizeof config);
            memset(&data, 0, sizeof data);
            config.d_in = D;
            config.d_out = C;
            config.family = family;
            if (!CHECK(T(moe_hme_create)(&hme, &config, 9, NULL, &error) == MOE_OK, "hme")) continue;
            linear_samples(x, y, labels);
            at = below(N * D);
            x[at] = specials[special];
            data.n = N;
            data.x = x;
            data.targets = y;
            data.labels = labels;
            kept = (double *)grab(hme.n_parameters, sizeof *kept);
            memcpy(kept, hme.parameters, hme.n_parameters * sizeof *kept);
            status = T(moe_hme_log_likelihood)(&hme, &data, &before, &error);
            CHECKF(special >= 7 && special < FIRST_ENDLESS ? status == MOE_OK || status == MOE_ERR_NONFINITE
                                                           : status == wanted,
                   "hme %d with %s: %s", family, special_names[special], moe_status_text(status));
            check_hme_answers(x, &hme, &data, special);
            for (step = 0; step < 3; step++) {
                status = T(moe_hme_em)(&hme, &data, h, &after, &error);
                CHECKF(status == MOE_OK || (status == MOE_ERR_NONFINITE && special >= 7), "em with %s: %s",
                       special_names[special], moe_status_text(status));
                if (status != MOE_OK)
                    CHECK(memcmp(kept, hme.parameters, hme.n_parameters * sizeof *kept) == 0,
                          "a failed step changes nothing");
                else
                    CHECKF(after >= before || special >= 7, "em does not lose with %s: %g, %g", special_names[special],
                           before, after);
                if (status == MOE_OK) {
                    before = after;
                    memcpy(kept, hme.parameters, hme.n_parameters * sizeof *kept);
                }
            }
            check_hme_rates(&hme, &data, special);
            free(kept);
            T(moe_hme_free)(&hme);
        }
}

/* ---- configurations, files, models ---- */

static void test_module_fields(void) {
    moe_error error;
    size_t i;
    for (i = 0; i < SPECIALS; i++) { /* the numbers of modules and trainers */
        moe_attention_config attention;
        moe_module scale;
        moe_net net;
        moe_status status;
        size_t j;
        static const size_t reals[] = {offsetof(moe_train_config, rate),     offsetof(moe_train_config, final_rate),
                                       offsetof(moe_train_config, momentum), offsetof(moe_train_config, beta1),
                                       offsetof(moe_train_config, beta2),    offsetof(moe_train_config, epsilon),
                                       offsetof(moe_train_config, decay),    offsetof(moe_train_config, clip)};
        moe_trainer trainer;
        moe_param_group group;
        CHECK(T(moe_net_init)(&net, 8, 0, NULL) == MOE_OK, "net");
        status = T(moe_net_dropout)(&net, specials[i]);
        CHECKF((status == MOE_OK) == (i < 3 || i == 4), "dropout of %s", special_names[i]);
        T(moe_net_free)(&net);
        memset(&scale, 0, sizeof scale);
        scale.kind = MOE_MODULE_SCALE;
        scale.scale = specials[i];
        CHECK(T(moe_net_init)(&net, 8, 0, NULL) == MOE_OK, "net");
        status = T(moe_net_append)(&net, &scale);
        CHECKF(i < FIRST_ENDLESS ? status == MOE_OK || status == MOE_ERR_CONFIG : status == MOE_ERR_CONFIG,
               "scale = %s", special_names[i]);
        T(moe_net_free)(&net);
        memset(&attention, 0, sizeof attention);
        attention.rotary = 1;
        attention.rotary_base = specials[i];
        attention.heads = 2;
        CHECK(T(moe_net_init)(&net, 8, 0, NULL) == MOE_OK, "net");
        status = T(moe_net_attention)(&net, &attention);
        CHECKF(i < FIRST_ENDLESS ? status == MOE_OK || status == MOE_ERR_CONFIG : status == MOE_ERR_CONFIG,
               "rotary_base = %s", special_names[i]);
        T(moe_net_free)(&net);
        begin_net(&net, 0, LINEAR, 1);
        for (j = 0; j < sizeof reals / sizeof reals[0]; j++) {
            moe_train_config config = lesson_config(0);
            memcpy((unsigned char *)&config + reals[j], &specials[i], sizeof(moe_real));
            status = T(moe_trainer_init)(&trainer, &net, &config, &error);
            CHECKF(i < FIRST_ENDLESS ? status == MOE_OK || status == MOE_ERR_CONFIG : status == MOE_ERR_CONFIG,
                   "number %d of a trainer = %s", (int)j, special_names[i]);
            if (status == MOE_OK) T(moe_trainer_free)(&trainer);
        }
        for (j = 0; j < 2; j++) {
            moe_train_config config = lesson_config(0);
            memset(&group, 0, sizeof group);
            group.pattern = "*";
            config.groups = &group;
            config.n_groups = 1;
            if (j == 0) group.rate = specials[i];
            else group.decay = specials[i];
            status = T(moe_trainer_init)(&trainer, &net, &config, &error);
            CHECKF(i < FIRST_ENDLESS ? status == MOE_OK || status == MOE_ERR_CONFIG : status == MOE_ERR_CONFIG,
                   "group with %s", special_names[i]);
            if (status == MOE_OK) T(moe_trainer_free)(&trainer);
        }
        T(moe_net_free)(&net);
    }
}

static void test_fields(void) {
    static const char *const texts[] = {"inf", "-inf", "nan", "1e999", "-1e999", "INFINITY", "1e39999999999999999999"};
    const moe_field *fields = T(moe_layer_fields)(), *f;
    moe_error error;
    moe_layer_config c, out, kept;
    size_t i;
    for (f = fields; f->name != NULL; f++) {
        if (f->kind != MOE_FIELD_REAL) continue;
        c = small_layer();
        kept = c;
        for (i = 0; i < sizeof texts / sizeof texts[0]; i++)
            CHECKF(T(moe_field_set)(fields, &c, f->name, texts[i], &error) == MOE_ERR_CONFIG &&
                       memcmp(&c, &kept, sizeof c) == 0,
                   "%s = %s", f->name, texts[i]);
        for (i = 0; i < SPECIALS; i++) {
            char text[40], again[40];
            moe_status status;
            c = small_layer();
            memset(&out, 0x11, sizeof out);
            kept = out;
            memcpy((unsigned char *)&c + f->offset, &specials[i], sizeof(moe_real));
            status = T(moe_layer_check)(&c, &out, &error);
            if (i >= FIRST_ENDLESS)
                CHECKF(status == MOE_ERR_CONFIG && strstr(error.message, f->name) != NULL &&
                           memcmp(&out, &kept, sizeof out) == 0,
                       "%s = %s: %s", f->name, special_names[i], error.message);
            else CHECKF(status == MOE_OK || status == MOE_ERR_CONFIG, "%s = %s", f->name, special_names[i]);
            T(moe_field_text)(f, &c, text, sizeof text);
            if (i >= FIRST_ENDLESS) continue;
            memset((unsigned char *)&c + f->offset, 0, sizeof(moe_real));
            CHECKF(T(moe_field_set)(fields, &c, f->name, text, &error) == MOE_OK, "%s reads back %s", f->name, text);
            T(moe_field_text)(f, &c, again, sizeof again);
            CHECKF((i == 1 || same_bits((unsigned char *)&c + f->offset, &specials[i], sizeof(moe_real))) &&
                       strcmp(text, again) == 0,
                   "%s of %s comes back as %s", f->name, text, again);
        }
    }
    test_module_fields();
}

static void test_layer_files(void) {
    moe_buffer buffer;
    moe_stream stream;
    moe_error error;
    moe_layer layer, other;
    moe_layer_config c = small_layer();
    CHECK(T(moe_layer_create)(&layer, &c, 0, 3, NULL, &error) == MOE_OK, "layer");
    memcpy((moe_real *)(void *)(uintptr_t)layer.tensors[MOE_ROUTER_WEIGHT], specials, sizeof specials);
    memset(&buffer, 0, sizeof buffer);
    stream = T(moe_buffer_stream)(&buffer);
    CHECK(T(moe_layer_write)(&layer, &stream, &error) == MOE_OK &&
              T(moe_layer_read)(&other, buffer.data, buffer.size, 0, MOE_KERNELS_AUTO, NULL, &error) == MOE_OK,
          "a layer");
    CHECK(same_bits(other.tensors[MOE_ROUTER_WEIGHT], specials, IS_NAN * sizeof(moe_real)) &&
              is_nan(other.tensors[MOE_ROUTER_WEIGHT][IS_NAN]),
          "bit for bit");
    T(moe_layer_free)(&other);
    CHECK(T(moe_layer_read_part)(&other, buffer.data, buffer.size, 0, MOE_KERNELS_AUTO, NULL, NULL, &error) == MOE_OK &&
              same_bits(other.tensors[MOE_ROUTER_WEIGHT], specials, IS_NAN * sizeof(moe_real)),
          "a layer alone");
    T(moe_buffer_free)(&buffer);
    T(moe_layer_free)(&layer);
    T(moe_layer_free)(&other);
    { /* a trainer's moments */
        moe_train_config config = lesson_config(0);
        lesson s;
        begin_lesson(&s, &config);
        CHECK(T(moe_trainer_step)(&s.trainer, &s.data, NULL, &error) == MOE_OK, "a step");
        s.trainer.memory[3] = specials[IS_NAN];
        s.trainer.memory[4] = TINY;
        s.trainer.memory[5] = -specials[0];
        memset(&buffer, 0, sizeof buffer);
        stream = T(moe_buffer_stream)(&buffer);
        CHECK(T(moe_trainer_write)(&s.trainer, &stream, &error) == MOE_OK, "writes moments");
        memset(s.trainer.memory, 1, 6 * sizeof *s.trainer.memory);
        CHECK(T(moe_trainer_read)(&s.trainer, buffer.data, buffer.size, &error) == MOE_OK &&
                  is_nan(s.trainer.memory[3]) && same_bits(&s.trainer.memory[4], &specials[2], sizeof(moe_real)) &&
                  same_bits(&s.trainer.memory[5], &specials[1], sizeof(moe_real)),
              "and reads them");
        T(moe_buffer_free)(&buffer);
        end_lesson(&s);
    }
}

/* Files keep every bit of every number; what is no number is read as it is, and met where it is
   used. */
static void test_files(void) {
    moe_net net, copy;
    moe_buffer buffer;
    moe_stream stream;
    moe_error error;
    moe_file file;
    moe_file_tensor tensor;
    moe_real values[SPECIALS];
    size_t i;
    memset(&buffer, 0, sizeof buffer);
    memset(&copy, 0, sizeof copy);
    begin_net(&net, 0, MIXTURE, 1);
    for (i = 0; i < SPECIALS; i++) net.tensors[0].data[i] = specials[i];
    stream = T(moe_buffer_stream)(&buffer);
    CHECK(T(moe_net_write)(&net, &stream, &error) == MOE_OK, "writes special numbers");
    CHECK(T(moe_net_read)(&copy, buffer.data, buffer.size, 0, 0, NULL, &error) == MOE_OK, "and reads them");
    CHECK(same_bits(copy.tensors[0].data, specials, SPECIALS * sizeof(moe_real)) ||
              is_nan(copy.tensors[0].data[IS_NAN]),
          "bit for bit");
    CHECK(same_bits(copy.tensors[0].data, specials, IS_NAN * sizeof(moe_real)), "bit for bit");
    CHECK(T(moe_file_open)(&file, buffer.data, buffer.size, &error) == MOE_OK &&
              T(moe_file_find)(&file, net.tensors[0].name, &tensor) == MOE_OK,
          "opens");
    CHECK(T(moe_file_values)(&tensor, 0, SPECIALS, values, NULL) == MOE_OK &&
              same_bits(values, specials, IS_NAN * sizeof(moe_real)) && is_nan(values[IS_NAN]),
          "values");
    T(moe_buffer_free)(&buffer);
    memset(&buffer, 0, sizeof buffer);
    stream = T(moe_buffer_stream)(&buffer);
    CHECK(T(moe_file_write)(&stream, net.tensors, 1, NULL, 0, NULL, &error) == MOE_OK &&
              T(moe_file_open)(&file, buffer.data, buffer.size, &error) == MOE_OK,
          "writes one tensor");
    CHECK(T(moe_file_find)(&file, net.tensors[0].name, &tensor) == MOE_OK &&
              T(moe_file_values)(&tensor, 9, 1, values, NULL) == MOE_OK &&
              same_bits(values, specials + 9, sizeof(moe_real)),
          "the largest number");
    T(moe_buffer_free)(&buffer);
    T(moe_net_free)(&copy);
    memset(&buffer, 0, sizeof buffer);
    stream = T(moe_buffer_stream)(&buffer);
    CHECK(T(moe_net_write)(&net, &stream, &error) == MOE_OK &&
              T(moe_net_read_part)(&copy, buffer.data, buffer.size, 0, 0, NULL, NULL, &error) == MOE_OK,
          "reads them alone");
    CHECK(same_bits(copy.tensors[0].data, specials, IS_NAN * sizeof(moe_real)), "bit for bit");
    T(moe_buffer_free)(&buffer);
    T(moe_net_free)(&copy);
    T(moe_net_free)(&net);
    test_layer_files();
}

/* The same for files with other programs' names. */
static void test_published(void) {
    static const char settings[] =
        "{\"model_type\":\"deepseek_v2\",\"num_experts_per_tok\":1,\"routed_scaling_factor\":1e999}";
    moe_layer layer, other;
    moe_layer_config c;
    moe_buffer buffer;
    moe_stream stream;
    moe_import_source sources[2];
    moe_error error;
    CHECK(T(moe_layer_preset)("mixtral", &c, &error) == MOE_OK, "preset");
    c.router.d_model = SPECIALS;
    c.router.n_experts = 2;
    c.d_ff = 1;
    CHECK(T(moe_layer_create)(&layer, &c, 0, 3, NULL, &error) == MOE_OK, "layer");
    memcpy((moe_real *)(void *)(uintptr_t)layer.tensors[MOE_ROUTER_WEIGHT], specials, sizeof specials);
    memset(&buffer, 0, sizeof buffer);
    stream = T(moe_buffer_stream)(&buffer);
    CHECK(T(moe_import_write)(&layer, &stream, "m", "qwen3_moe", MOE_REAL_IS_DOUBLE ? MOE_DTYPE_F64 : MOE_DTYPE_F32,
                              &error) == MOE_OK,
          "writes special numbers");
    sources[0] = T(moe_import_memory)("m", buffer.data, buffer.size);
    sources[1] = T(moe_import_memory)("config.json", settings, sizeof settings - 1);
    CHECK(T(moe_import_read)(&other, sources, 1, "m", "grok1", NULL, &error) == MOE_OK, "and reads them");
    CHECK(same_bits(other.tensors[MOE_ROUTER_WEIGHT], specials, IS_NAN * sizeof(moe_real)) &&
              is_nan(other.tensors[MOE_ROUTER_WEIGHT][IS_NAN]),
          "bit for bit");
    T(moe_layer_free)(&other);
    CHECKF(T(moe_import_read)(&other, sources, 2, "m", NULL, NULL, &error) == MOE_ERR_CONFIG,
           "a scale that is not finite is refused: %s", error.message);
    T(moe_buffer_free)(&buffer);
    memset(&buffer, 0, sizeof buffer);
    stream = T(moe_buffer_stream)(&buffer);
    CHECK(T(moe_import_write)(&layer, &stream, "m", "qwen3_moe", MOE_DTYPE_BF16, &error) == MOE_OK,
          "writes them narrow");
    sources[0] = T(moe_import_memory)("m", buffer.data, buffer.size);
    CHECK(T(moe_import_read)(&other, sources, 1, "m", "grok1", NULL, &error) == MOE_OK &&
              is_nan(other.tensors[MOE_ROUTER_WEIGHT][IS_NAN]),
          "what is no number stays none");
    T(moe_layer_free)(&other);
    T(moe_layer_free)(&layer);
    T(moe_buffer_free)(&buffer);
}

/* Runs the tokens 1, 2 and 0 through a whole model with two numbers of the caller's. */
static moe_status run_whole(float first, float epsilon, moe_real *y) {
    static const int32_t ids[3] = {1, 2, 0};
    moe_imported model;
    moe_import_source source;
    moe_buffer file;
    moe_call call;
    moe_error error;
    moe_status status;
    memset(&file, 0, sizeof file);
    memset(&call, 0, sizeof call);
    call.n_tokens = 3;
    call.token_ids = ids;
    whole_gguf(&file, first, epsilon);
    source = moe_import_memory("whole.gguf", file.data, file.size);
    status = T(moe_import_read_model)(&model, &source, 1, NULL, NULL, &error);
    CHECKF(status == MOE_OK || status == MOE_ERR_CONFIG, "%s", error.message);
    if (status == MOE_OK) status = run_net(&model.net, &call, y);
    T(moe_import_free)(&model);
    T(moe_buffer_free)(&file);
    return status;
}

/* Weights of a whole model pass as they are: earlier tokens have the same logits, and a router
   refuses what is not finite. */
static void test_whole(void) {
    static moe_real plain[3 * WHOLE_TOKENS], odd[3 * WHOLE_TOKENS];
    const float huge = 3.4028235e38f, firsts[] = {-0.0f, 1e-40f, 1e18f, huge * 2, -huge * 2, (huge * 2) * 0};
    size_t i, t;
    CHECK(run_whole(0.5f, 1e-5f, plain) == MOE_OK && all_finite(3 * WHOLE_TOKENS, plain), "ordinary numbers");
    for (i = 0; i < sizeof firsts / sizeof *firsts; i++) {
        const moe_status status = run_whole(firsts[i], 1e-5f, odd);
        CHECKF(status == (i < 3 ? MOE_OK : MOE_ERR_NONFINITE), "number %d: %s", (int)i, moe_status_text(status));
        for (t = 0; status == MOE_OK && t < 2; t++) /* the logit of token 0 reads the same row */
            CHECK(same_bits(plain + t * WHOLE_TOKENS + 1, odd + t * WHOLE_TOKENS + 1,
                            (WHOLE_TOKENS - 1) * sizeof *odd),
                  "tokens before it");
        if (i > 2) CHECKF(run_whole(0.5f, firsts[i], odd) == MOE_ERR_CONFIG, "an epsilon, number %d", (int)i);
    }
}

static void refuse_models(moe_net *net, moe_model_config *config, moe_built_model *built, moe_real *x, int weights) {
    moe_profile profile;
    moe_error error;
    moe_real kept;
    int special;
    size_t i, at;
    for (special = 7; special < SPECIALS && weights > 0; special++) {
        /* a calibration and weights that are not finite, or huge */
        moe_status status;
        memset(built, 0, sizeof *built);
        at = below(40 * NET_WIDTH);
        kept = x[at];
        x[at] = specials[special];
        status = T(moe_model_create)(built, net, config, &error);
        CHECKF(special < FIRST_ENDLESS
                   ? status == MOE_OK || status == MOE_ERR_OVERFLOW || status == MOE_ERR_NONFINITE
                   : status == MOE_ERR_NONFINITE,
               "calibration with %s: %s", special_names[special], moe_status_text(status));
        if (status == MOE_OK) T(moe_model_free)(built);
        CHECK(T(moe_model_profile)(&profile, net, config, NULL, &error) == status, error.message);
        if (status == MOE_OK) T(moe_profile_free)(&profile);
        x[at] = kept;
        kept = net->tensors[0].data[5];
        net->tensors[0].data[5] = specials[special];
        status = T(moe_model_create)(built, net, config, &error);
        CHECKF(special < FIRST_ENDLESS
                   ? status == MOE_OK || status == MOE_ERR_OVERFLOW || status == MOE_ERR_NONFINITE
                   : status == MOE_ERR_NONFINITE,
               "a weight %s: %s", special_names[special], moe_status_text(status));
        if (special >= FIRST_ENDLESS)
            CHECKF(strstr(error.message, net->tensors[0].name) != NULL, "the weight is named: %s", error.message);
        if (status == MOE_OK) T(moe_model_free)(built);
        net->tensors[0].data[5] = kept;
    }
    for (special = 0; special < 5 && weights > 0; special++) { /* weights of nothing */
        moe_real all[NET_WIDTH * NET_WIDTH];
        memcpy(all, net->tensors[0].data, sizeof all);
        for (i = 0; i < NET_WIDTH * NET_WIDTH; i++) net->tensors[0].data[i] = specials[special];
        {
            /* subnormal doubles may be too far from the rest */
            const moe_status status = T(moe_model_create)(built, net, config, &error);
            CHECKF(status == MOE_OK || (MOE_REAL_IS_DOUBLE && status == MOE_ERR_OVERFLOW), "weights of %s: %s",
                   special_names[special], error.message);
            if (status == MOE_OK) T(moe_model_free)(built);
        }
        memcpy(net->tensors[0].data, all, sizeof all);
    }
}

static void infer_specials(moe_built_model *built, moe_real *x, int weights, void *scratch) {
    moe_real y[NET_WIDTH];
    int8_t levels[NET_WIDTH];
    int16_t out[NET_WIDTH];
    int special;
    size_t at;
    for (special = 0; special < SPECIALS; special++) {
        moe_real input[NET_WIDTH];
        moe_status status;
        memcpy(input, x, sizeof input);
        at = below(NET_WIDTH);
        input[at] = specials[special];
        if (weights == MOE_WEIGHTS_FLOAT) {
            status = T(moe_infer)(&built->model, NULL, input, y, scratch, built->model.scratch_size);
            if (special < 7)
                CHECKF(status == MOE_OK && all_finite(NET_WIDTH, y), "infers with %s", special_names[special]);
            if (special >= FIRST_ENDLESS)
                CHECKF(status == MOE_ERR_NONFINITE, "infers with %s: %s", special_names[special],
                       moe_status_text(status));
            continue;
        }
        memset(levels, 1, sizeof levels);
        T(moe_infer_levels)(&built->model, input, levels);
        CHECKF(levels[at] == (special < 5 || special == IS_NAN ? 0
                              : specials[special] > 0          ? 127
                                                               : -127),
               "the level of %s is %d", special_names[special], levels[at]);
        CHECK(T(moe_infer)(&built->model, NULL, levels, out, scratch, built->model.scratch_size) == MOE_OK,
              "integers infer whatever comes");
    }
}

/* Float models do what the network does; integer models clamp, and refuse to be made of what is not
   finite. */
static void test_models(void) {
    moe_net net;
    moe_error error;
    moe_model_config config;
    moe_built_model built;
    moe_data calibration;
    moe_layer_config layer = small_layer();
    moe_real x[40 * NET_WIDTH];
    int weights;
    size_t i;
    void *scratch;
    layer.router.d_model = 0;
    layer.d_ff = 8;
    CHECK(T(moe_net_init)(&net, NET_WIDTH, MOE_KERNELS_C, NULL) == MOE_OK, "net");
    (void)T(moe_net_linear)(&net, NET_WIDTH);
    (void)T(moe_net_mixture)(&net, &layer);
    (void)T(moe_net_residual)(&net, 1);
    (void)T(moe_net_rms_norm)(&net);
    CHECK(T(moe_net_build)(&net, 0, 4, &error) == MOE_OK, "build");
    memset(&config, 0, sizeof config);
    memset(&calibration, 0, sizeof calibration);
    for (i = 0; i < 40 * NET_WIDTH; i++) x[i] = moe_rng_normal(&rng);
    calibration.n = 40;
    calibration.x = x;
    config.calibration = &calibration;
    for (weights = 0; weights < MOE_WEIGHTS_COUNT; weights++) {
        config.weights = weights;
        if (MOE_REAL_IS_DOUBLE && weights == MOE_WEIGHTS_FLOAT) continue; /* which has none */
        if (!CHECKF(T(moe_model_create)(&built, &net, &config, &error) == MOE_OK, "model: %s", error.message)) continue;
        scratch = grab(built.model.scratch_size, 1);
        infer_specials(&built, x, weights, scratch);
        free(scratch);
        T(moe_model_free)(&built);
        refuse_models(&net, &config, &built, x, weights);
    }
    T(moe_net_free)(&net);
}

/* ---- long training ----
   A hundred thousand steps of small networks, one for each kind of router that keeps state, draws
   random numbers or balances: every step is good, every number stays finite, and the loss falls. */

enum { SAMPLES = 64, SMALL = 6 };

typedef struct course {
    const char *name, *router; /* settings as in presets */
    int optimizer;
    double rate, decay;
} course;

static const course courses[] = {
    {"top 2", "loss_balance=0.01 loss_z=0.001", 0, 0.003, 0},
    {"noisy top k", "noise=noisy_topk loss_importance=0.1 importance_over=weights loss_load=0.1 unbiased=1", 0, 0.003,
     0},
    {"balanced by bias", "gate=sigmoid selection_bias=1 bias_rate=0.001", 0, 0.003, 0.01},
    {"expert choice", "select=expert_choice capacity_factor=2 weight=raw", 0, 0.003, 0},
    {"ReMoE", "gate=relu select=positive weight=raw l1_controller=1 loss_l1=1e-8", 0, 0.003, 0},
    {"similarity", "refine=similarity similarity_scale=l2 loss_entropy=0.01", 0, 0.003, 0},
    {"learned threshold",
     "gate=sigmoid select=threshold threshold=0.5 threshold_learned=1 threshold_sigmoid=1 weight=uniform", 0, 0.003, 0},
    {"cosine, dropping",
     "score=cosine cosine_tau=0.1 cosine_learn_tau=1 capacity_factor=1 drop_rule=gshard renormalize=after", 0, 0.003,
     0},
    {"decay, sgd", "noise=gaussian loss_usage_entropy=0.1", 1, 0.02, 0.001},
};

typedef struct pupil {
    moe_net net;
    moe_trainer trainer;
    moe_real *x, *targets;
} pupil;

/* Targets that depend on the cluster that a sample belongs to: something for experts. */
static void begin_pupil(pupil *p, const course *c, int kernels) {
    moe_layer_config layer = small_layer();
    moe_train_config config = lesson_config(c->optimizer);
    moe_rng own;
    moe_error error;
    size_t i, j;
    memset(p, 0, sizeof *p);
    layer.router.d_model = 0;
    layer.router.n_experts = 4;
    layer.d_ff = 6;
    CHECKF(T(moe_fields_apply)(T(moe_layer_fields)(), &layer, c->router, &error) == MOE_OK, "%s: %s", c->name,
           error.message);
    config.rate = (moe_real)c->rate;
    config.decay = (moe_real)c->decay;
    config.clip = 5;
    config.seed = 11;
    (void)T(moe_net_init)(&p->net, SMALL, kernels, NULL);
    (void)T(moe_net_mixture)(&p->net, &layer);
    (void)T(moe_net_residual)(&p->net, 1);
    (void)T(moe_net_linear)(&p->net, 2);
    if (!CHECKF(T(moe_net_build)(&p->net, 1, 21, &error) == MOE_OK, "%s: %s", c->name, error.message)) exit(1);
    if (!CHECKF(T(moe_trainer_init)(&p->trainer, &p->net, &config, &error) == MOE_OK, "%s: %s", c->name, error.message))
        exit(1);
    p->x = (moe_real *)grab(SAMPLES * SMALL, sizeof *p->x);
    p->targets = (moe_real *)grab(SAMPLES * 2, sizeof *p->targets);
    T(moe_rng_seed)(&own, 5);
    for (i = 0; i < SAMPLES; i++) {
        for (j = 0; j < SMALL; j++) p->x[i * SMALL + j] = moe_rng_normal(&own) + (moe_real)(j == i % 4 ? 2 : 0);
        p->targets[2 * i] = i % 2 ? p->x[i * SMALL] : -p->x[i * SMALL + 1];
        p->targets[2 * i + 1] = (moe_real)(i % 4) - (moe_real)1.5;
    }
}

static void end_pupil(pupil *p) {
    T(moe_trainer_free)(&p->trainer);
    T(moe_net_free)(&p->net);
    free(p->x);
    free(p->targets);
}

/* Steps from..to-1; the mean loss of the last 64 of them in *last. */
static int train_pupil(pupil *p, const course *c, long from, long to, const moe_call *call, double *last) {
    moe_data batch;
    moe_step step;
    moe_error error;
    double sum = 0;
    long i;
    memset(&batch, 0, sizeof batch);
    batch.n = BATCH;
    batch.call = call;
    for (i = from; i < to; i++) {
        const size_t at = (size_t)i * BATCH % SAMPLES;
        batch.x = p->x + at * SMALL;
        batch.targets = p->targets + at * 2;
        if (moe_trainer_step(&p->trainer, &batch, &step, &error) != MOE_OK)
            return CHECKF(0, "%s: step %ld: %s", c->name, i, error.message);
        if (!moe_is_finite(step.loss) || !moe_is_finite(step.router_loss) || !moe_is_finite(step.gradient_norm))
            return CHECKF(0, "%s: step %ld", c->name, i);
        if (i >= to - 64) sum += (double)step.loss;
    }
    *last = sum / 64;
    return 1;
}

static void test_long_training(long steps) {
    size_t i;
    for (i = 0; i < sizeof courses / sizeof courses[0]; i++) {
        pupil p;
        double first = 0, last = 0;
        begin_pupil(&p, &courses[i], MOE_KERNELS_AUTO);
        if (train_pupil(&p, &courses[i], 0, 64, NULL, &first) && train_pupil(&p, &courses[i], 64, steps, NULL, &last)) {
            CHECKF(p.trainer.steps == (uint64_t)steps, "%s: all steps", courses[i].name);
            CHECKF(all_finite(numbers_of(&p.net), p.net.memory) &&
                       all_finite(2 * numbers_of(&p.net) / (courses[i].optimizer ? 2 : 1), p.trainer.memory),
                   "%s: every number is finite", courses[i].name);
            CHECKF(last < first / 2, "%s: the loss falls: %g, then %g", courses[i].name, first, last);
        }
        end_pupil(&p);
    }
}

/* Tasks one after the other, the last first: what one leaves behind must not matter to another. */
static void backwards(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    int i;
    *(long *)ctx += 1;
    for (i = count - 1; i >= 0; i--) task(work, i);
}

/* The same seed gives the same bits twice, whatever the number of threads. */
static void test_same_bits(long steps) {
    size_t i, n;
    int threads, t;
    for (i = 0; i < sizeof courses / sizeof courses[0]; i++)
        for (t = 0; t < n_tables; t++) {
            pupil p, q;
            double last;
            begin_pupil(&p, &courses[i], tables[t]->id);
            n = numbers_of(&p.net);
            (void)train_pupil(&p, &courses[i], 0, steps, NULL, &last);
            for (threads = 1; threads < 5; threads++) {
                moe_parallel team;
                moe_call call;
                long calls = 0;
                memset(&team, 0, sizeof team);
                memset(&call, 0, sizeof call);
                team.ctx = &calls;
                team.threads = threads;
                team.always = 1;
                team.run = backwards;
                call.parallel = &team;
                begin_pupil(&q, &courses[i], tables[t]->id);
                (void)train_pupil(&q, &courses[i], 0, steps, &call, &last);
                CHECKF(same_bits(p.net.memory, q.net.memory, n * sizeof(moe_real)) &&
                           memcmp(p.trainer.memory, q.trainer.memory, p.trainer.memory_size) == 0 &&
                           p.trainer.rng.state == q.trainer.rng.state,
                       "%s with %s: %d threads give other bits", courses[i].name, tables[t]->name, threads);
                CHECKF((calls > 0) == (threads > 1), "%s: the threads are used", courses[i].name);
                end_pupil(&q);
            }
            end_pupil(&p);
        }
}

/* Weights of which all are subnormal: training moves out of there, and stays finite. */
static void test_subnormal_weights(void) {
    size_t i, j;
    for (i = 0; i < sizeof courses / sizeof courses[0]; i++) {
        pupil p;
        double last;
        begin_pupil(&p, &courses[i], MOE_KERNELS_AUTO);
        for (j = 0; j < p.net.n_tensors; j++) {
            moe_tensor *t = &p.net.tensors[j];
            size_t l;
            if (strstr(t->name, "temperature") != NULL) continue; /* a divisor */
            for (l = 0; l < t->count && !(t->flags & (unsigned)MOE_PARAM_STATE); l++)
                t->data[l] = t->data[l] * SMALLEST_NORMAL;
        }
        if (train_pupil(&p, &courses[i], 0, 300, NULL, &last))
            CHECKF(all_finite(numbers_of(&p.net), p.net.memory), "%s: subnormal weights stay finite", courses[i].name);
        end_pupil(&p);
    }
}

/* ---- the rest: packed layers, ways back alone, states, modular networks, routers in integers
   ---- */

static void forward_packed(moe_layer *layer, moe_call *call, int type, int special, moe_status status) {
    moe_real y[TOKENS * WIDTH];
    size_t i, at;
    if (status == MOE_OK) {
        size_t more;
        void *room;
        CHECK(T(moe_layer_work_size)(layer, TOKENS, 0, &more) == MOE_OK, "size");
        room = grab(more, 1);
        CHECKF(T(moe_layer_forward)(layer, call, y, room, more, NULL) == MOE_OK &&
                   (special > 6 || all_finite(TOKENS * WIDTH, y)),
               "type %d: forward with a weight of %s", type, special_names[special]);
        for (at = 0, i = 0; i < TOKENS; i++) at += (size_t)all_finite(WIDTH, y + i * WIDTH);
        CHECK(at > 0, "a weight reaches the tokens of its expert alone");
        free(room);
    }
}

/* A special number as a setting is accepted in its range; as a weight of the dense expert it is
   copied, and what is drawn anew stays finite beside numbers that are. */
static void test_upcycling(void) {
    moe_layer_config c = small_layer(), one = c;
    moe_layer layer, dense;
    moe_error error;
    moe_real *source;
    size_t i, bad;
    int special;
    one.router.n_experts = one.router.top_k = 1;
    one.router.weight = MOE_WEIGHT_RAW;
    CHECK(T(moe_layer_create)(&layer, &c, 1, 8, NULL, &error) == MOE_OK, "layer");
    CHECKF(T(moe_layer_create)(&dense, &one, 1, 9, NULL, &error) == MOE_OK, "%s", error.message);
    memcpy(&source, &dense.tensors[MOE_EXPERTS_DOWN], sizeof source);
    for (special = 0; special < SPECIALS; special++) {
        const moe_real s = specials[special], kept = source[11];
        const moe_real *down = layer.tensors[MOE_EXPERTS_DOWN];
        CHECKF((T(moe_layer_upcycle)(&layer, &dense, s, 0, 1, &error) == MOE_OK) == (s >= 0 && s <= 1), "share %s",
               special_names[special]);
        CHECKF((T(moe_layer_upcycle)(&layer, &dense, 0, s, 1, &error) == MOE_OK) == (s >= 0 && s <= MOEI_R(1e6)),
               "noise %s", special_names[special]);
        source[11] = s;
        CHECK(T(moe_layer_upcycle)(&layer, &dense, 0, 0, 1, &error) == MOE_OK &&
                  memcmp(&down[11], &s, sizeof s) == 0,
              "copied");
        CHECK(T(moe_layer_upcycle)(&layer, &dense, MOEI_R(0.5), 0, 1, &error) == MOE_OK, "drawn");
        for (i = bad = 0; i < (size_t)(EXPERTS * WIDTH * c.d_ff); i++) bad += !moe_is_finite(down[i]);
        CHECKF(bad == 0 || special >= 7, "%d numbers beside %s", (int)bad, special_names[special]);
        source[11] = kept;
    }
    T(moe_layer_free)(&layer);
    T(moe_layer_free)(&dense);
}

static void test_packed_layers(void) {
    moe_layer_config c = small_layer();
    moe_layer layer;
    moe_call call;
    moe_quant_error errors[EXPERTS];
    moe_error error;
    moe_real x[TOKENS * WIDTH], *down;
    size_t bytes, work_bytes, i;
    void *memory, *work;
    int type, special;
    c.d_ff = 40;
    CHECK(T(moe_layer_create)(&layer, &c, 0, 8, NULL, &error) == MOE_OK, "layer");
    for (i = 0; i < TOKENS * WIDTH; i++) x[i] = moe_rng_normal(&rng);
    memset(&call, 0, sizeof call);
    call.n_tokens = TOKENS;
    call.x = x;
    memcpy(&down, &layer.tensors[MOE_EXPERTS_DOWN], sizeof down);
    for (type = MOE_TYPE_REAL; type < MOE_TYPE_COUNT; type++) {
#ifdef MOE_NO_QUANT
        if (type >= MOE_TYPE_Q8) continue;
#endif
        CHECK(T(moe_layer_pack_size)(&layer, type, 0, &bytes, NULL) == MOE_OK &&
                  T(moe_layer_pack_size)(&layer, type, TOKENS, NULL, &work_bytes) == MOE_OK,
              "sizes");
        memory = grab(bytes, 1);
        work = grab(work_bytes, 1);
        for (special = 0; special < SPECIALS; special++) {
            const moe_real kept = x[7], weight = down[11];
            moe_status status;
            layer.is_packed = 0;
            x[7] = specials[special];
            status = T(moe_layer_quantize)(&layer, type, memory, bytes, &call, work, work_bytes, errors, &error);
            CHECKF(status == MOE_OK || (status == MOE_ERR_NONFINITE && special > 8), "calibration with %s: %s",
                   special_names[special], moe_status_text(status));
            CHECK(status == MOE_OK || !layer.is_packed, "a failed call packs nothing");
            for (i = 0; i < (size_t)EXPERTS && special < 7 && status == MOE_OK; i++)
                CHECKF(moe_is_finite(errors[i].output), "type %d: the error of expert %d with %s", type, (int)i,
                       special_names[special]);
            x[7] = kept;
            layer.is_packed = 0;
            down[11] = specials[special];
            status = T(moe_layer_pack)(&layer, type, memory, bytes, &error);
            if (type < MOE_TYPE_Q8 || special < 7)
                CHECKF(status == MOE_OK, "packs a weight of %s", special_names[special]);
            else
                CHECKF(status == (special >= FIRST_ENDLESS                    ? MOE_ERR_NONFINITE
                                  : type != MOE_TYPE_Q8 || MOE_REAL_IS_DOUBLE ? MOE_ERR_OVERFLOW
                                                                              : MOE_OK),
                       "type %d: a weight of %s: %s", type, special_names[special], moe_status_text(status));
            forward_packed(&layer, &call, type, special, status);
            down[11] = weight;
        }
        free(memory);
        free(work);
    }
    T(moe_layer_free)(&layer);
}

/* A special number as alpha, in the data and as a weight: what is scaled stays finite beside it. */
static void test_smoothing(void) {
    moe_smooth_config config;
    moe_net net;
    moe_data data;
    moe_error error;
    moe_real x[TOKENS * WIDTH], first[WIDTH * WIDTH], *weight, *gain;
    size_t i;
    int special;
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    CHECK(T(moe_net_init)(&net, WIDTH, 0, NULL) == MOE_OK && T(moe_net_rms_norm)(&net) == MOE_OK &&
              T(moe_net_linear)(&net, WIDTH) == MOE_OK && T(moe_net_build)(&net, 0, 8, &error) == MOE_OK,
          "net");
    for (i = 0; i < TOKENS * WIDTH; i++) x[i] = moe_rng_normal(&rng);
    data.n = TOKENS;
    data.x = x;
    gain = net.modules[0].tensors[MOE_MODULE_WEIGHT];
    weight = net.modules[1].tensors[MOE_MODULE_WEIGHT];
    memcpy(first, weight, sizeof first);
    for (special = 0; special < SPECIALS; special++) {
        const moe_real s = specials[special], kept = x[7];
        moe_status status;
        size_t bad = 0;
        config.alpha = s;
        status = T(moe_smooth)(&net, &data, &config, NULL, &error);
        CHECKF(status == (s >= 0 && s <= 1 ? MOE_OK : MOE_ERR_CONFIG), "alpha %s", special_names[special]);
        x[7] = s;
        status = T(moe_smooth)(&net, &data, NULL, NULL, &error);
        CHECKF(status == (moe_is_finite(s) ? MOE_OK : MOE_ERR_NONFINITE), "x %s", special_names[special]);
        x[7] = kept;
        weight[11] = s;
        CHECKF(T(moe_smooth)(&net, &data, NULL, NULL, &error) == MOE_OK, "a weight of %s", special_names[special]);
        for (i = 0; i < WIDTH * WIDTH; i++) bad += i != 11 && !moe_is_finite(weight[i]);
        CHECKF(bad == 0 && all_finite(WIDTH, gain) && moe_is_finite(weight[11]) == moe_is_finite(s),
               "%d numbers beside %s", (int)bad, special_names[special]);
        for (i = 0; i < WIDTH; i++) gain[i] = 1;
        memcpy(weight, first, sizeof first);
    }
    T(moe_net_free)(&net);
}

/* A network's attention and last module, packed. */
static void test_packed_nets(void) {
    moe_net net;
    moe_net_pass pass;
    moe_call call;
    moe_quant_error errors[2];
    moe_error error;
    moe_real x[TOKENS * WIDTH], *weight;
    size_t bytes = 0, work_bytes = 0, i;
    void *memory, *work;
    int type, special;
    CHECK(T(moe_net_init)(&net, WIDTH, 0, NULL) == MOE_OK && T(moe_net_attention)(&net, NULL) == MOE_OK &&
              T(moe_net_linear)(&net, WIDTH) == MOE_OK && T(moe_net_build)(&net, 0, 8, &error) == MOE_OK,
          "net");
    for (i = 0; i < TOKENS * WIDTH; i++) x[i] = moe_rng_normal(&rng);
    memset(&call, 0, sizeof call);
    call.n_tokens = TOKENS;
    call.x = x;
    weight = net.modules[1].tensors[MOE_MODULE_WEIGHT];
    for (type = MOE_TYPE_REAL; type < MOE_TYPE_COUNT; type++) {
#ifdef MOE_NO_QUANT
        if (type >= MOE_TYPE_Q8) continue;
#endif
        CHECK(T(moe_net_pack_size)(&net, type, TOKENS, &bytes, &work_bytes) == MOE_OK, "sizes");
        memory = grab(bytes, 1);
        work = grab(work_bytes, 1);
        for (special = 0; special < SPECIALS; special++) {
            const moe_real kept = x[7], before = weight[11];
            moe_status status;
            x[7] = specials[special];
            status = T(moe_net_quantize)(&net, type, memory, bytes, &call, work, work_bytes, errors, &error);
            CHECKF(status == MOE_OK, "calibration with %s: %s", special_names[special], moe_status_text(status));
            CHECKF(special > 6 || (moe_is_finite(errors[0].output) && moe_is_finite(errors[1].output)),
                   "type %d: the errors with %s", type, special_names[special]);
            x[7] = kept;
            weight[11] = specials[special];
            status = T(moe_net_pack)(&net, type, memory, bytes, &error);
            CHECKF(status == (type < MOE_TYPE_Q8 || special < 7             ? MOE_OK
                              : special >= FIRST_ENDLESS                    ? MOE_ERR_NONFINITE
                              : type != MOE_TYPE_Q8 || MOE_REAL_IS_DOUBLE ? MOE_ERR_OVERFLOW
                                                                            : MOE_OK),
                   "type %d: a weight of %s: %s", type, special_names[special], moe_status_text(status));
            CHECK(net.modules[1].layer.is_packed == (status == MOE_OK), "a failed call packs nothing");
            if (status == MOE_OK) {
                CHECKF(T(moe_net_forward)(&net, &call, work, work_bytes, &pass) == MOE_OK &&
                           (special > 6 || all_finite(TOKENS * WIDTH, pass.y)),
                       "type %d: forward with a weight of %s", type, special_names[special]);
                for (i = 0; i < TOKENS; i++)
                    CHECK(all_finite(WIDTH - 1, pass.y + i * WIDTH + 1), "a weight reaches its output alone");
            }
            weight[11] = before;
        }
        free(memory);
        free(work);
    }
    T(moe_net_free)(&net);
}

/* A network's. */
static void test_ways_back_net(void) {
    moe_call call;
    moe_real dx[TOKENS * WIDTH];
    size_t bytes, i;
    void *work;
    int special;
    lesson s;
    moe_train_config config = lesson_config(0);
    moe_net_pass net_pass;
    moe_rng own;
    moe_real dy[BATCH * NET_WIDTH];
    begin_lesson(&s, &config);
    memset(&call, 0, sizeof call);
    memset(&own, 0, sizeof own);
    call.n_tokens = BATCH;
    call.x = s.x;
    call.training = 1;
    call.rng = &own;
    CHECK(T(moe_net_work_size)(&s.net, BATCH, 1, &bytes) == MOE_OK, "size");
    work = grab(bytes, 1);
    for (special = 0; special < SPECIALS; special++) {
        net_zero_gradients(&s.net);
        for (i = 0; i < BATCH * NET_WIDTH; i++) {
            dy[i] = moe_rng_normal(&rng);
            dx[i] = 0;
        }
        dy[9] = specials[special];
        CHECK(T(moe_net_forward)(&s.net, &call, work, bytes, &net_pass) == MOE_OK &&
                  T(moe_net_backward)(&s.net, dy, dx, &net_pass) == MOE_OK,
              "backward");
        if (special < 7)
            CHECKF(all_finite(BATCH * NET_WIDTH, dx) &&
                       all_finite(numbers_of(&s.net), s.net.memory + numbers_of(&s.net)),
                   "a net's gradients with %s", special_names[special]);
        if (special >= FIRST_ENDLESS)
            CHECKF(!all_finite(BATCH * NET_WIDTH, dx), "a net's gradients with %s show it", special_names[special]);
        CHECK(T(moe_net_observe)(&s.net, &net_pass) == MOE_OK && T(moe_net_advance)(&s.net) == MOE_OK, "state");
    }
    free(work);
    end_lesson(&s);
}

static void check_gradients_shown(moe_layer *layer, moe_real *dx, int special, int which) {
    if (special < 7)
        CHECKF(all_finite(TOKENS * WIDTH, dx) &&
                   all_finite(EXPERTS * WIDTH, layer->gradients[MOE_ROUTER_WEIGHT]),
               "%s in the backward pass %d", special_names[special], which);
    if (special >= FIRST_ENDLESS)
        CHECKF(!all_finite(TOKENS * WIDTH, dx), "%s in the backward pass %d shows", special_names[special],
               which);
    if (which == 1)
        CHECK(all_finite(EXPERTS * 5 * WIDTH, layer->gradients[MOE_EXPERTS_GATE]),
              "the weights' gradient is the router's alone");
}

/* Gradients that are not finite come out as such, in the tensors that they belong to, and nowhere
   as a crash. */
static void test_ways_back(void) {
    moe_layer_config c = small_layer();
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    moe_error error;
    moe_real x[TOKENS * WIDTH], y[TOKENS * WIDTH], dx[TOKENS * WIDTH], *d_outputs, *d_weights;
    moe_real *d_tensors[MOE_ROUTER_PARAMETER_COUNT];
    size_t bytes, i, pairs;
    void *work;
    int special, which;
    CHECK(T(moe_layer_create)(&layer, &c, 1, 8, NULL, &error) == MOE_OK, "layer");
    for (i = 0; i < TOKENS * WIDTH; i++) x[i] = moe_rng_normal(&rng);
    memset(&call, 0, sizeof call);
    call.n_tokens = TOKENS;
    call.x = x;
    call.training = 1;
    CHECK(T(moe_layer_work_size)(&layer, TOKENS, 1, &bytes) == MOE_OK, "size");
    work = grab(bytes, 1);
    for (special = 0; special < SPECIALS; special++)
        for (which = 0; which < 3; which++) {
            CHECK(T(moe_layer_forward)(&layer, &call, y, work, bytes, &pass) == MOE_OK && pass.expert_outputs != NULL,
                  "forward");
            pairs = pass.routing.plan.offsets[EXPERTS];
            d_outputs = normals_of(&rng, pairs * WIDTH, 1);
            d_weights = normals_of(&rng, pairs, 1);
            memset(dx, 0, sizeof dx);
            for (i = 0; i < MOE_LAYER_PARAMETER_COUNT; i++)
                if (layer.gradients[i] != NULL) {
                    moe_parameter slot;
                    CHECK(T(moe_layer_parameter)(&layer.config, (int)i, &slot) == MOE_OK, "slot");
                    memset(layer.gradients[i], 0, slot.count * sizeof(moe_real));
                }
            if (which == 0) d_outputs[5] = specials[special];
            if (which == 1) d_weights[3] = specials[special];
            if (which < 2)
                CHECK(T(moe_layer_backward_experts)(&layer, d_outputs, d_weights, dx, NULL, &pass) == MOE_OK,
                      "backward");
            else {
                moe_router router = layer.router;
                for (i = 0; i < MOE_ROUTER_PARAMETER_COUNT; i++) {
                    router.tensors[i] = layer.tensors[i];
                    d_tensors[i] = layer.gradients[i];
                }
                memset(pass.routing.d_weight_in, 0, pairs * sizeof *d_weights);
                memcpy(pass.routing.d_weight_out, d_weights, pairs * sizeof *d_weights);
                pass.routing.d_weight_out[2] = specials[special];
                CHECK(T(moe_route_backward)(&router, &call, &pass.routing, d_tensors, dx, NULL) == MOE_OK,
                      "the router's backward pass");
            }
            check_gradients_shown(&layer, dx, special, which);
            free(d_outputs);
            free(d_weights);
        }
    free(work);
    T(moe_layer_free)(&layer);
    test_ways_back_net();
}

/* Whatever stands in a router's state: no crash, K in its range, and the next step is made. */
static void test_states(void) {
    static const char *const settings[] = {"gate=sigmoid selection_bias=1 bias_rate=0.01 schedule_steps=10 k_end=1",
                                           "gate=relu select=positive weight=raw l1_controller=1 loss_l1=1e-8",
                                           "capacity_bound=first",
                                           "capacity_bound=every capacity_rho=0.5",
                                           "tau_schedule=gate_temperature schedule_steps=5 tau_end=0.5 freeze_at=3",
                                           "switch_at=3 select=expert_choice weight=raw"};
    size_t i, at;
    int special, slot;
    for (i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        moe_layer_config c = small_layer();
        scene s;
        outcome r;
        CHECKF(T(moe_fields_apply)(T(moe_layer_fields)(), &c, settings[i], NULL) == MOE_OK, "%s", settings[i]);
        if (!CHECKF(begin_scene(&s, &c), "%s", settings[i])) continue;
        memset(&r, 0, sizeof r);
        r.gradients = (moe_real *)grab(s.n_gradients, sizeof *r.gradients);
        for (slot = MOE_ROUTER_SELECTION_BIAS; slot < MOE_ROUTER_PARAMETER_COUNT; slot++)
            for (special = 0; special < SPECIALS; special++) {
                moe_real *states[MOE_ROUTER_PARAMETER_COUNT], kept;
                moe_router router = s.layer.router;
                moe_call call = s.call;
                moe_parameter description;
                if (s.layer.tensors[slot] == NULL) continue;
                CHECK(T(moe_router_parameter)(&s.layer.config.router, slot, &description) == MOE_OK, "slot");
                memcpy(states, s.layer.tensors, sizeof states);
                memcpy(router.tensors, s.layer.tensors, sizeof router.tensors);
                at = below(description.count);
                kept = states[slot][at];
                states[slot][at] = specials[special];
                run_scene(&s, 1, &r);
                CHECKF(r.status == MOE_OK || r.status == MOE_ERR_NONFINITE, "%s: %s = %s: %s", settings[i],
                       description.name, special_names[special], moe_status_text(r.status));
                if (r.status == MOE_OK) {
                    CHECKF(routing_is_sound(&r.routing) && r.routing.top_k >= 1 && r.routing.top_k <= EXPERTS,
                           "%s: %s = %s", settings[i], description.name, special_names[special]);
                    call.training = 1;
                    CHECK(T(moe_router_observe)(&router, &call, &r.routing, states) == MOE_OK &&
                              T(moe_router_advance)(&router, states) == MOE_OK,
                          "state goes on");
                }
                states[slot][at] = kept;
            }
        free(r.gradients);
        free(r.work);
        end_scene(&s);
    }
}

static void test_modular(void) {
    moe_layer_config c;
    moe_train_config config = lesson_config(0);
    moe_net net;
    moe_trainer trainer;
    moe_modular modular;
    moe_modular_step_result result;
    moe_data data;
    moe_error error;
    moe_real x[BATCH * 2], targets[BATCH];
    int32_t choices[BATCH];
    int special;
    size_t i;
    memset(&c, 0, sizeof c);
    memset(&data, 0, sizeof data);
    c.router.n_experts = 3;
    c.router.top_k = 1;
    c.router.select = MOE_SELECT_SAMPLE;
    c.router.weight = MOE_WEIGHT_ONE;
    c.router.loss_distill = 1;
    c.expert = MOE_EXPERT_LINEAR;
    c.d_out = 1;
    CHECK(T(moe_net_init)(&net, 2, 0, NULL) == MOE_OK && T(moe_net_mixture)(&net, &c) == MOE_OK &&
              T(moe_net_build)(&net, 1, 2, &error) == MOE_OK,
          "net");
    CHECK(T(moe_trainer_init)(&trainer, &net, &config, &error) == MOE_OK &&
              T(moe_modular_init)(&modular, &trainer, &error) == MOE_OK,
          "modular");
    data.n = BATCH;
    data.x = x;
    data.targets = targets;
    for (special = 0; special < SPECIALS; special++) {
        moe_status status;
        for (i = 0; i < BATCH; i++) {
            x[2 * i] = moe_rng_normal(&rng);
            x[2 * i + 1] = moe_rng_normal(&rng);
            targets[i] = moe_rng_normal(&rng);
            choices[i] = -1;
        }
        x[3] = specials[special];
        status = T(moe_modular_step)(&modular, &data, 3, 1, choices, &result, &error);
        if (special < 7)
            CHECKF(status == MOE_OK && fabs(result.log_likelihood) < 1e300, "EM with %s: %s", special_names[special],
                   moe_status_text(status));
        else
            CHECKF(special < FIRST_ENDLESS ? status == MOE_OK || status == MOE_ERR_NONFINITE
                                           : status == MOE_ERR_NONFINITE,
                   "EM with %s: %s", special_names[special], moe_status_text(status));
        CHECKF(all_finite(numbers_of(&net), net.memory), "weights after EM with %s", special_names[special]);
    }
    T(moe_modular_free)(&modular);
    T(moe_trainer_free)(&trainer);
    T(moe_net_free)(&net);
}

static void test_int_plan(void) {
    moe_router_config c;
    moei_int_router_plan plan;
    moe_real bias[EXPERTS], scale[EXPERTS];
    const moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT];
    moe_error error;
    unsigned char *table = (unsigned char *)grab(512, 4);
    int special, which;
    size_t i;
    memset(&c, 0, sizeof c);
    memset(tensors, 0, sizeof tensors);
    c.d_model = WIDTH;
    c.n_experts = EXPERTS;
    c.gate = MOE_GATE_SIGMOID;
    c.selection_bias = 1;
    c.expert_scale = 1;
    tensors[MOE_ROUTER_SELECTION_BIAS] = bias;
    tensors[MOE_ROUTER_EXPERT_SCALE] = scale;
    for (special = 0; special < SPECIALS; special++)
        for (which = 0; which < 3; which++) {
            moe_status status;
            for (i = 0; i < EXPERTS; i++) {
                bias[i] = moe_rng_uniform(&rng) / 100;
                scale[i] = 1;
            }
            if (which == 0) bias[3] = specials[special];
            for (i = 0; i < EXPERTS && which == 1; i++) scale[i] = i == 2 || special < 5 ? specials[special] : 1;
            status = T(moei_int_router_plan_make)(&c, tensors, which == 2 ? specials[special] : 4, table, 512, &plan,
                                                  &error);
            if (special >= FIRST_ENDLESS)
                CHECKF(status == MOE_ERR_ARGUMENT, "a plan of %s, %d: %s", special_names[special], which,
                       moe_status_text(status));
            else
                CHECKF(status == MOE_OK || status == MOE_ERR_ARGUMENT || status == MOE_ERR_UNSUPPORTED ||
                           status == MOE_ERR_OVERFLOW,
                       "a plan of %s, %d: %s", special_names[special], which, moe_status_text(status));
            if (special < 3 || special == 4)
                CHECKF(status == MOE_OK, "a plan of %s, %d: %s", special_names[special], which, error.message);
            if (status == MOE_OK)
                CHECKF(moe_is_finite(plan.z_scale) && plan.z_scale > 0 && moe_is_finite(plan.weight_scale),
                       "a plan of %s, %d is finite", special_names[special], which);
        }
    free(table);
}

/* Random numbers lie where the header says. */
static void test_random(void) {
    moe_rng own;
    uint64_t i;
    int wrong = 0;
    T(moe_rng_seed)(&own, UINT64_MAX);
    for (i = 0; i < 20000; i++) {
        const moe_real u = T(moe_rng_uniform)(&own), n = T(moe_rng_normal)(&own);
        wrong += !(u >= 0 && u < 1) || !(n > (moe_real)-8.7 && n < (moe_real)8.7);
        wrong += T(moe_rng_below)(&own, i) >= (i > 0 ? i : 1);
    }
    CHECKF(wrong == 0, "random numbers out of range: %d", wrong);
}

/* ---- the list of functions ----
   Every public function: the floats that it takes and what becomes of them, as the headers
   say it at length. "" stands for a function that takes none but sizes, bytes, names or whole
   numbers. The program reads the headers' declarations and wants each to have a row here, and each
   row with numbers to have been called above. */

typedef struct row {
    const char *name, *numbers;
} row;

static const row rows[] = {
    {"moe_version", ""},
    {"moe_status_text", ""},
    {"moe_cpu_features", ""},
    {"moe_kernels_select", ""},
    {"moe_kernels_name", ""},
    {"moe_matmul", "IEEE 754; a number of A reaches its row of C alone, one of B its column, 0 times infinity is NaN"},
    {"moe_matmul_packed", "as moe_matmul, with the weights as they are stored"},
    {"moe_dot", "IEEE 754"},
    {"moe_axpy", "IEEE 754, place by place"},
    {"moe_activate", "NaN stays, infinities give the limit; place by place"},
    {"moe_activate_backward",
     "dy times the limit of the slope, NaN stays; relu chooses: 0 for x <= 0, else dy, NaN included"},
    {"moe_softmax", "NaN or +inf: all NaN; -inf: exactly 0; all -inf: all 0"},
    {"moe_softmax_backward", "what is not finite in dy goes to all of dx"},
    {"moe_log_sum_exp", "NaN shows, +inf gives +inf, all -inf gives -inf"},
    {"moe_sigmoid", "limits, NaN stays"},
    {"moe_layer_norm", "NaN, infinity: all of the row NaN; squares that overflow: rstd = 0, y = bias"},
    {"moe_layer_norm_backward", "IEEE 754, a row at a time"},
    {"moe_rms_norm", "NaN: all of the row NaN; infinity: NaN there; squares that overflow: y = 0"},
    {"moe_rms_norm_backward", "IEEE 754, a row at a time"},
    {"moe_gated", "as moe_activate, times IEEE 754"},
    {"moe_gated_backward", "as moe_activate_backward"},
    {"moe_adamw", "IEEE 754, place by place"},
    {"moe_top_k", "NaN and -inf are never taken"},
    {"moe_is_finite", "any: 1 or 0 by the bits"},
    {"moe_panel_size", ""},
    {"moe_pack",
     "16 bits: NaN stays, too large is infinite; quantized: MOE_ERR_NONFINITE, MOE_ERR_OVERFLOW, packed untouched"},
    {"moe_unpack", "what was packed"},
    {"moe_import_pack_blocks", "scales of any bits pass"},
    {"moe_import_unpack_blocks", "bit for bit"},
    {"moe_external_work_size", ""},
    {"moe_matmul_external", "a weight that is not finite reaches its output alone"},
    {"moe_quantized_row_size", ""},
    {"moe_rows_quantize", "next to nothing counts as 0; not finite: scale NaN, this group alone"},
    {"moe_matmul_quantized", "a row with a NaN scale is NaN, no other"},
    {"moe_rng_seed", ""},
    {"moe_rng_next", ""},
    {"moe_rng_below", ""},
    {"moe_rng_uniform", "gives [0,1)"},
    {"moe_rng_normal", "gives |x| < 8.7"},
    {"moe_field_find", ""},
    {"moe_field_set", "inf, nan and what overflows are no numbers: MOE_ERR_CONFIG"},
    {"moe_field_text", "reads back to the same bits, -0 to 0"},
    {"moe_fields_apply", "as moe_field_set"},
    {"moe_router_fields", ""},
    {"moe_router_check", ""},
    {"moe_router_check_training", ""},
    {"moe_router_check_decoding", ""},
    {"moe_router_traits", ""},
    {"moe_trait_name", ""},
    {"moe_loss_name", ""},
    {"moe_presets", ""},
    {"moe_preset_find", ""},
    {"moe_router_preset", ""},
    {"moe_router_parameter", ""},
    {"moe_router_init", ""},
    {"moe_route_size", ""},
    {"moe_route", "MOE_ERR_NONFINITE (logits, refined p, weights) or a finite plan"},
    {"moe_route_backward", "IEEE 754"},
    {"moe_router_observe", "state that is not finite is no error"},
    {"moe_router_advance", "the same"},
    {"moe_route_batch_size", ""},
    {"moe_routing_choices", ""},
    {"moe_metrics_size", ""},
    {"moe_metrics_init", ""},
    {"moe_metrics_add", "what moe_route gives with MOE_OK gives finite sums"},
    {"moe_metrics_report", "0 where nothing was added"},
    {"moe_fluctuation", "0 for no token"},
    {"moe_instability", "0 for fewer than two tokens"},
    {"moe_mutual_information", "below 0: MOE_ERR_ARGUMENT; not finite: MOE_ERR_NONFINITE; empty: 0"},
    {"moe_token_cosine", "MOE_ERR_NONFINITE; zeros: 0"},
    {"moe_gate_errors", "0 without labels"},
    {"moe_struct_names", ""},
    {"moe_struct_place", ""},
    {"moe_arena_allocator", ""},
    {"moe_buffer_stream", ""},
    {"moe_buffer_free", ""},
    {"moe_file_read", ""},
    {"moe_file_replace", ""},
    {"moe_file_open", ""},
    {"moe_file_limit", ""},
    {"moe_file_next", ""},
    {"moe_file_find", ""},
    {"moe_file_metadata", ""},
    {"moe_file_values", "as stored"},
    {"moe_file_write", "as given"},
    {"moe_layer_fields", ""},
    {"moe_layer_check", "a field that is not finite or out of range: MOE_ERR_CONFIG names it"},
    {"moe_layer_preset", ""},
    {"moe_layer_parameter", ""},
    {"moe_layer_init", ""},
    {"moe_layer_create", ""},
    {"moe_layer_free", ""},
    {"moe_layer_tensor", ""},
    {"moe_layer_find", ""},
    {"moe_layer_parameter_count", ""},
    {"moe_layer_pack", "as moe_pack"},
    {"moe_layer_pack_size", ""},
    {"moe_layer_quantize", "as moe_pack and moe_route"},
    {"moe_layer_work_size", ""},
    {"moe_layer_forward", "as moe_route; experts by IEEE 754, each row by itself"},
    {"moe_layer_backward", "IEEE 754; padding reaches no gradient but the shared expert's"},
    {"moe_classic_losses", ""},
    {"moe_layer_backward_experts", "IEEE 754"},
    {"moe_layer_observe", ""},
    {"moe_layer_advance", ""},
    {"moe_layer_upcycle", "moments of what is replaced in doubles"},
    {"moe_smooth", "alpha out of its range: MOE_ERR_CONFIG; MOE_ERR_NONFINITE; weights that are not finite stay"},
    {"moe_blocks_init", ""},
    {"moe_blocks_loader", ""},
    {"moe_blocks_pin", ""},
    {"moe_rank_part", ""},
    {"moe_transport_begin", ""},
    {"moe_transport_end", ""},
    {"moe_transport_agree", ""},
    {"moe_transport_status", ""},
    {"moe_layer_write", "bits as they are"},
    {"moe_layer_save", ""},
    {"moe_layer_read", "bits as they are"},
    {"moe_layer_load", ""},
    {"moe_layer_read_part", "bits as they are"},
    {"moe_layer_load_part", ""},
    {"moe_import_memory", ""},
    {"moe_import_read", "numbers as they are; a setting that is not finite is none"},
    {"moe_import_layer", ""},
    {"moe_import_read_model", "weights as they are; a setting that is not finite: MOE_ERR_CONFIG"},
    {"moe_import_model", ""},
    {"moe_import_free", ""},
    {"moe_import_tokenizer", ""},
    {"moe_import_read_tokenizer", ""},
    {"moe_tokenizer_free", ""},
    {"moe_tokenizer_encode", ""},
    {"moe_tokenizer_decode", ""},
    {"moe_tokenizer_room", ""},
    {"moe_tokenizer_find", ""},
    {"moe_tokenizer_is_end", ""},
    {"moe_chat_find", ""},
    {"moe_chat_put", ""},
    {"moe_import_write", "F32 in the float build: bits as they are; what a type cannot hold is infinite there"},
    {"moe_import_save", ""},
    {"moe_net_init", ""},
    {"moe_net_linear", ""},
    {"moe_net_activation", ""},
    {"moe_net_layer_norm", ""},
    {"moe_net_mixture", ""},
    {"moe_net_residual", ""},
    {"moe_net_embedding", ""},
    {"moe_net_positions", ""},
    {"moe_net_attention", "rotary_base not finite: MOE_ERR_CONFIG"},
    {"moe_net_rms_norm", ""},
    {"moe_net_dropout", "rate outside of [0,1): MOE_ERR_CONFIG"},
    {"moe_net_feed_forward", ""},
    {"moe_net_tied", ""},
    {"moe_net_append", "a real field out of its range or not finite: MOE_ERR_CONFIG"},
    {"moe_net_build", ""},
    {"moe_net_free", ""},
    {"moe_net_find", ""},
    {"moe_net_parameter_count", ""},
    {"moe_net_work_size", ""},
    {"moe_net_pack", "as moe_pack"},
    {"moe_net_pack_size", ""},
    {"moe_net_quantize", "as moe_pack and moe_net_forward"},
    {"moe_net_forward", "as moe_layer_forward; attention hands numbers to tokens that see them alone"},
    {"moe_net_routing", ""},
    {"moe_net_cache_init", ""},
    {"moe_net_decode_size", ""},
    {"moe_net_decode", "as moe_net_forward"},
    {"moe_sample", "MOE_ERR_NONFINITE names the logit, nothing changes"},
    {"moe_net_backward", "IEEE 754"},
    {"moe_net_observe", "as moe_router_observe"},
    {"moe_net_advance", "as moe_router_advance"},
    {"moe_cross_entropy", "IEEE 754: a row that is not finite makes the loss so; rows without label do not count"},
    {"moe_squared_error", "IEEE 754"},
    {"moe_consistency_loss", "finite for finite logits up to 1e30; else NaN"},
    {"moe_trainer_init", "MOE_ERR_CONFIG"},
    {"moe_trainer_step", "MOE_ERR_NONFINITE, nothing but gradients changes"},
    {"moe_trainer_accumulate", "MOE_ERR_NONFINITE"},
    {"moe_trainer_update", "MOE_ERR_NONFINITE, nothing changes"},
    {"moe_trainer_write", "bits as they are"},
    {"moe_trainer_read", "bits as they are"},
    {"moe_trainer_save", ""},
    {"moe_trainer_load", ""},
    {"moe_trainer_free", ""},
    {"moe_modular_init", ""},
    {"moe_modular_free", ""},
    {"moe_modular_step", "MOE_ERR_NONFINITE"},
    {"moe_fit", "MOE_ERR_NONFINITE names epoch and step; the net keeps what it learned"},
    {"moe_evaluate", "MOE_ERR_NONFINITE, result untouched"},
    {"moe_mixture_loss", "MOE_ERR_NONFINITE, nothing changes; gradients are cut at 1e38"},
    {"moe_mixture_answer", "the same"},
    {"moe_hme_create", ""},
    {"moe_hme_free", ""},
    {"moe_hme_predict", "MOE_ERR_NONFINITE"},
    {"moe_hme_log_likelihood", "MOE_ERR_NONFINITE"},
    {"moe_hme_posteriors", "MOE_ERR_NONFINITE"},
    {"moe_hme_em", "MOE_ERR_NONFINITE, hme as it was"},
    {"moe_hme_gradient", "the same; rate not finite: MOE_ERR_ARGUMENT"},
    {"moe_net_write", "bits as they are"},
    {"moe_net_save", ""},
    {"moe_net_read", "bits as they are"},
    {"moe_net_load", ""},
    {"moe_net_read_part", "bits as they are"},
    {"moe_net_load_part", ""},
    {"moe_infer", "float: as moe_net_forward; integers: any levels"},
    {"moe_infer_levels", "held within +-127, NaN: 0"},
    {"moe_infer_choices", ""},
    {"moe_model_check", ""},
    {"moe_model_create", "MOE_ERR_NONFINITE for integers"},
    {"moe_model_free", ""},
    {"moe_model_profile", "as moe_model_create"},
    {"moe_profile_free", ""},
    {"moe_export_c", ""},
    {"moe_export_experts", ""},
    {"moe_report_svg", "what is not finite is no value"},
    {"moe_report_html", "as moe_report_svg"},
    {"moe_report_text", "as moe_report_svg"},
    {"moe_report_save", "as moe_report_svg"},
    {"moe_figure_classes", ""},
    {"moe_figure_load", ""},
    {"moe_history_add", "kept as they are"},
    {"moe_figure_history", ""},
};

/* ---- reports: any numbers in any kind of figure ---- */

static void test_reports(void) {
    const double odd[] = {0, -0.0,   5e-324, 1.7976931348623157e308, -1.7976931348623157e308, HUGE_VAL, -HUGE_VAL,
                          1, 1e-300, -3};
    enum { ODD = sizeof odd / sizeof odd[0] };
    static moe_history history;
    double values[12];
    int32_t chosen[12];
    size_t i, j;
    moe_figure f;
    moe_error error;
    memset(&f, 0, sizeof f);
    f.rows = 3;
    f.columns = 4;
    f.values = f.x = f.y = values;
    f.experts = chosen;
    for (i = 0; i < 12; i++) chosen[i] = (int32_t)(i % 5) - 1;
    for (f.kind = 0; f.kind < MOE_FIGURE_COUNT; f.kind++)
        for (i = 0; i < ODD * 3; i++) {
            moe_buffer buffer;
            moe_stream stream;
            memset(&buffer, 0, sizeof buffer);
            stream = moe_buffer_stream(&buffer);
            for (j = 0; j < 12; j++) values[j] = i < ODD ? odd[i] : odd[(i * 7 + j * (1 + i / ODD)) % ODD];
            values[i % 12] = (double)(odd[5] - odd[5]); /* NaN */
            f.reference = values[5];
            f.half_widths = f.kind == MOE_FIGURE_BARS || f.kind == MOE_FIGURE_TABLE ? values : NULL;
            CHECK(T(moe_report_svg)(&f, &stream, &error) == MOE_OK &&
                      T(moe_report_html)("x", &f, 1, &stream, &error) == MOE_OK,
                  "a figure of odd numbers");
            CHECK(T(moe_report_text)(&f, 0, 0, &stream, &error) == MOE_OK && buffer.size > 100,
                  "a text of odd numbers");
            CHECK(memchr(buffer.data, '\0', buffer.size) == NULL, "no zero bytes");
            moe_buffer_free(&buffer);
        }
    for (i = 0; i < ODD; i++)
        CHECK(T(moe_history_add)(&history, odd[i], &odd[i], 1) == MOE_OK &&
                  memcmp(&history.values[0][i], &odd[i], sizeof odd[i]) == 0,
              "kept");
    f = moe_figure_history(&history, 0, 1, NULL);
    CHECKF(T(moe_report_save)("robust-report.html", NULL, &f, 1, &error) == MOE_OK && remove("robust-report.html") == 0,
           "%s", error.message);
}

/* Names of the functions that a header declares. */
static size_t read_declarations(const char *header, char (*names)[64], size_t n, size_t room) {
    char line[512], path[64];
    FILE *file = fopen(header, "r");
    sprintf(path, "tests/../%s", header); /* tests/run has a link to this folder where it runs programs */
    if (file == NULL) file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char *end = strchr(line, '('), *begin = end;
        if (strncmp(line, "MOE_API ", 8) != 0 || end == NULL) continue;
        while (begin > line &&
               (begin[-1] == '_' || (begin[-1] >= 'a' && begin[-1] <= 'z') || (begin[-1] >= '0' && begin[-1] <= '9')))
            begin--;
        if (strncmp(begin, "moei_", 5) == 0) continue; /* private */
        if (n == room || end - begin >= 64) return room;
        memset(names[n], 0, sizeof names[n]);
        memcpy(names[n++], begin, (size_t)(end - begin));
    }
    if (file == NULL) return SIZE_MAX;
    fclose(file);
    return n;
}

static int is_called(const char *name) {
    size_t i;
    for (i = 0; i < n_called; i++)
        if (strcmp(called[i], name) == 0) return 1;
    return 0;
}

static void test_list(void) {
    static const char *const headers[] = {"moe_kernels.h",
                                          "moe_routers.h",
                                          "moe.h",
                                          "examples/extras/moe_blocks.h",
                                          "examples/extras/moe_check.h",
                                          "examples/extras/moe_classic.h",
                                          "examples/extras/moe_export.h",
                                          "examples/extras/moe_import.h",
                                          "examples/extras/moe_layout.h",
                                          "examples/extras/moe_ranks.h",
                                          "examples/extras/moe_report.h",
                                          "examples/extras/moe_smooth.h",
                                          "examples/extras/moe_upcycle.h"};
    static char names[400][64];
    const size_t n_rows = sizeof rows / sizeof rows[0];
    size_t n = 0, i, j, header, with_numbers = 0;
    for (i = 0; i < n_rows; i++) {
        with_numbers += rows[i].numbers[0] != '\0';
        CHECKF(rows[i].numbers[0] == '\0' || is_called(rows[i].name), "%s takes numbers and is not tested here",
               rows[i].name);
    }
    for (header = 0; header < sizeof headers / sizeof headers[0] && n < 400; header++)
        n = read_declarations(headers[header], names, n, 400);
    if (n == SIZE_MAX) {
        printf("note: the headers are not found from the current folder; the list of functions is not compared with "
               "them\n");
        return;
    }
    CHECKF(n > 150 && n < 400, "declarations: %d", (int)n);
    for (i = 0; i < n; i++) {
        for (j = 0; j < n_rows && strcmp(rows[j].name, names[i]) != 0;) j++;
        CHECKF(j < n_rows, "%s has no row", names[i]);
    }
    for (j = 0; j < n_rows; j++) {
        for (i = 0; i < n && strcmp(rows[j].name, names[i]) != 0;) i++;
        CHECKF(i < n, "%s is no function", rows[j].name);
    }
    printf("functions: %d, of which %d take floats\n", (int)n_rows, (int)with_numbers);
}

int main(int argc, char **argv) {
    long steps = 100000;
    int i;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "quick") == 0) steps = 1500;
        else if (strncmp(argv[i], "steps=", 6) == 0 && atol(argv[i] + 6) > 128) steps = atol(argv[i] + 6);
        else {
            fprintf(stderr, "usage: robust [quick] [steps=N]\n");
            return 2;
        }
    }
    T(moe_rng_seed)(&rng, 7);
    make_specials();
    find_tables();
    CASE(test_kernels());
    CASE(test_random());
    CASE(test_routers());
    CASE(test_shaped());
    CASE(test_scaled_grid());
    CASE(test_any_logits());
    printf("routed calls with a special number: %ld good, %ld refused as not finite\n", good_calls, nonfinite_calls);
    CASE(test_packed_layers());
    CASE(test_packed_nets());
    CASE(test_upcycling());
    CASE(test_smoothing());
    CASE(test_ways_back());
    CASE(test_states());
    CASE(test_nets());
    CASE(test_training());
    CASE(test_modular());
    CASE(test_sampling());
    CASE(test_metrics());
    CASE(test_reports());
    CASE(test_classical());
    CASE(test_hierarchical());
    CASE(test_fields());
    CASE(test_files());
    CASE(test_published());
    CASE(test_whole());
    CASE(test_models());
    CASE(test_int_plan());
    CASE(test_long_training(steps));
    CASE(test_same_bits(steps < 2000 ? 20 : 200));
    CASE(test_subnormal_weights());
    CASE(test_list());
    return test_end();
}
