/* classic.c - what moe.h promises of the classical mixture: losses over plain arrays, answers, the
   hierarchical mixture of experts.

     cc -std=c99 -O1 -I. tests/unit/classic.c -o classic -lm && ./classic
     (also with -DMOE_REAL=double, and as C++)

   Losses and probabilities are written down once more below, straight from their formulas in
   double, and gradients are their finite differences. Exit status 1 if a check failed. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MOE_REAL_IS_DOUBLE
#define ROUNDING 1e-12
#define NEAR 1e-6
#else
#define ROUNDING 1e-5
#define NEAR 2e-5
#endif

/* |got - want| <= bound (1 + |want|); not a number fails. */

/* The call fails as wanted, and the message has the words. */
/* Relative where the number is large. */
#define CHECK_CLOSE(got, want, bound, what) CHECK_CLOSE_AT(__LINE__, got, want, bound, what)
#define CHECK_CLOSE_AT(line, got, want, bound, what) \
    CHECK_NEAR_AT(line, got, want, (bound) * (1.0 + fabs((double)(want))), what)

#define CHECK_REFUSED(call, wanted, words) \
    do { \
        memset(&error, 0, sizeof error); \
        CHECK_STATUS(call, wanted, words); \
        CHECK(error.code == wanted && strstr(error.message, words) != NULL, error.message); \
    } while (0)

static double uniform(moe_rng *rng) { return (double)moe_rng_uniform(rng); }
static double normal(moe_rng *rng) { return (double)moe_rng_normal(rng); }
static size_t below(moe_rng *rng, size_t n) { return (size_t)moe_rng_below(rng, n); }

static moe_real infinite(void) { return (moe_real)HUGE_VAL; }

static moe_real not_a_number(void) {
    volatile moe_real endless = infinite();
    return endless - endless;
}

/* ---- the losses once more ---- */

enum { N = 5, E = 4, C = 4 };

static const char *const criterion_names[MOE_CRITERION_COUNT] = {
    "cross_entropy", "squared_error", "expectation", "stochastic", "stochastic_squared", "jacobs", "jacobs_squared"};

/* One problem in double: what the finite differences move. */
typedef struct problem {
    size_t n, experts, width;
    double p[N * E], o[E * N * C], target[N * C], temperature;
    int32_t label[N];
} problem;

static double wanted_cross_entropy(size_t width, const double *y, int32_t label) {
    double most = y[0], sum = 0;
    size_t j;
    for (j = 1; j < width; j++) most = y[j] > most ? y[j] : most;
    for (j = 0; j < width; j++) sum += exp(y[j] - most);
    return log(sum) - (y[label] - most);
}

static double wanted_squares(size_t width, const double *y, const double *target) {
    double sum = 0;
    size_t j;
    for (j = 0; j < width; j++) sum += (y[j] - target[j]) * (y[j] - target[j]);
    return sum;
}

/* -log sum_i p_i exp(-l_i); p may be slightly negative under a finite difference. */
static double wanted_log_sum(size_t experts, const double *p, const double *l) {
    double least = 1e300, sum = 0;
    size_t i;
    for (i = 0; i < experts; i++)
        if (p[i] > 0 && l[i] < least) least = l[i];
    for (i = 0; i < experts; i++) sum += p[i] * exp(least - l[i]);
    return least - log(sum);
}

static double wanted_loss_of(int criterion, const problem *a, size_t t) {
    const double *p = a->p + t * a->experts, *target = a->target + t * a->width;
    double mixed[C] = {0}, l[E], sum = 0;
    size_t i, j;
    for (i = 0; i < a->experts; i++) {
        const double *o = a->o + (i * a->n + t) * a->width;
        for (j = 0; j < a->width; j++)
            mixed[j] += p[i] * o[j] / (criterion == MOE_CRITERION_CROSS_ENTROPY ? a->temperature : 1);
        switch (criterion) {
        case MOE_CRITERION_EXPECTATION:
        case MOE_CRITERION_STOCHASTIC:
            l[i] = wanted_cross_entropy(a->width, o, a->label[t]);
            break;
        case MOE_CRITERION_JACOBS:
            l[i] = wanted_cross_entropy(a->width, o, a->label[t]) / 2;
            break;
        default:
            l[i] = wanted_squares(a->width, o, target) / 2;
            break;
        }
        sum += p[i] * l[i];
    }
    switch (criterion) {
    case MOE_CRITERION_CROSS_ENTROPY: return wanted_cross_entropy(a->width, mixed, a->label[t]);
    case MOE_CRITERION_SQUARED_ERROR: return wanted_squares(a->width, mixed, target) / 2;
    case MOE_CRITERION_STOCHASTIC:
    case MOE_CRITERION_STOCHASTIC_SQUARED: return sum;
    default: return wanted_log_sum(a->experts, p, l);
    }
}

static double wanted_loss(int criterion, const problem *a) {
    double sum = 0;
    size_t t;
    for (t = 0; t < a->n; t++) sum += wanted_loss_of(criterion, a, t);
    return sum / (double)a->n;
}

/* d wanted_loss / d *v, where v is a number of the problem. */
static double wanted_slope(int criterion, problem *a, double *v) {
    double h = 1e-5, at = *v, above, under;
    *v = at + h;
    above = wanted_loss(criterion, a);
    *v = at - h;
    under = wanted_loss(criterion, a);
    *v = at;
    return (above - under) / (2 * h);
}

/* ---- the same as the library sees it ---- */

typedef struct arrays {
    moe_real p[N * E], q[N * E], o[E * N * C], target[N * C], loss, d_p[N * E], d_o[E * N * C];
    moe_mixture m;
} arrays;

static void to_reals(size_t n, const double *from, moe_real *to) {
    size_t i;
    for (i = 0; i < n; i++) to[i] = (moe_real)from[i];
}

/* Rounds the problem to what the real type holds, so that both see the same numbers. */
static void bind(arrays *r, problem *a) {
    size_t i;
    memset(r, 0, sizeof *r);
    to_reals(N * E, a->p, r->p);
    to_reals(E * N * C, a->o, r->o);
    to_reals(N * C, a->target, r->target);
    for (i = 0; i < N * E; i++) a->p[i] = (double)r->p[i];
    for (i = 0; i < E * N * C; i++) a->o[i] = (double)r->o[i];
    for (i = 0; i < N * C; i++) a->target[i] = (double)r->target[i];
    r->m.n = a->n;
    r->m.experts = a->experts;
    r->m.width = a->width;
    r->m.p = r->p;
    r->m.outputs = r->o;
    r->m.labels = a->label;
    r->m.targets = r->target;
}

static void random_problem(problem *a, size_t n, size_t experts, size_t width, double spread, moe_rng *rng) {
    size_t t, i;
    memset(a, 0, sizeof *a);
    a->n = n;
    a->experts = experts;
    a->width = width;
    a->temperature = 1;
    for (t = 0; t < n; t++) {
        double sum = 0;
        for (i = 0; i < experts; i++) sum += a->p[t * experts + i] = 0.1 + uniform(rng);
        for (i = 0; i < experts; i++) a->p[t * experts + i] /= sum;
        a->label[t] = (int32_t)below(rng, width);
    }
    for (i = 0; i < experts * n * width; i++) a->o[i] = spread * normal(rng);
    for (i = 0; i < n * width; i++) a->target[i] = normal(rng);
}

/* Loss and both gradients against the formulas; gradients of the outputs against those with the
   gate q, where there is one. */
static void compare(int criterion, problem *a, const problem *q, double bound, const char *what, int line) {
    arrays r;
    moe_error error;
    problem experts = *a;
    size_t i;
    char text[120];
    bind(&r, a);
    experts = *a;
    sprintf(text, "%s, %.20s", what, criterion_names[criterion]);
    if (criterion == MOE_CRITERION_CROSS_ENTROPY && a->temperature < 1) r.m.temperature = (moe_real)a->temperature;
    if (q != NULL) {
        to_reals(N * E, q->p, r.q);
        for (i = 0; i < N * E; i++) experts.p[i] = (double)r.q[i];
        r.m.expert_p = r.q;
    }
    if (!CHECK_STATUS_AT(line, moe_mixture_loss(criterion, &r.m, &r.loss, r.d_p, r.d_o, &error), MOE_OK, text)) return;
    CHECK_CLOSE_AT(line, (double)r.loss, wanted_loss(criterion, a), ROUNDING, text);
    for (i = 0; i < a->n * a->experts; i++)
        CHECK_CLOSE_AT(line, (double)r.d_p[i], wanted_slope(criterion, a, &a->p[i]), bound, text);
    for (i = 0; i < a->experts * a->n * a->width; i++)
        CHECK_CLOSE_AT(line, (double)r.d_o[i], wanted_slope(criterion, &experts, &experts.o[i]), bound, text);
}

#define COMPARE(criterion, a, q, bound, what) compare(criterion, a, q, bound, what, __LINE__)

static void test_losses(void) {
    static const size_t sizes[][3] = {{N, E, C}, {1, E, C}, {N, 1, C}, {N, E, 1}, {1, 1, 1}, {3, 2, 2}};
    moe_rng rng = {11};
    problem a, q;
    size_t s, i;
    int criterion;
    for (criterion = 0; criterion < MOE_CRITERION_COUNT; criterion++) {
        for (s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            random_problem(&a, sizes[s][0], sizes[s][1], sizes[s][2], 1, &rng);
            COMPARE(criterion, &a, NULL, NEAR, "gradients");
            random_problem(&q, sizes[s][0], sizes[s][1], sizes[s][2], 1, &rng);
            COMPARE(criterion, &a, &q, NEAR, "dual temperature");
            for (i = 0; i < a.n * a.experts; i++) a.p[i] *= 1.7;
            COMPARE(criterion, &a, NULL, NEAR, "p that does not sum to 1");
        }
        random_problem(&a, N, E, C, 1, &rng);
        for (i = 0; i < N; i++) {
            a.p[i * E + i % E] = 0;
            a.p[i * E + (i + 2) % E] = i % 2 ? 0 : 0.3;
        }
        COMPARE(criterion, &a, NULL, NEAR, "p of exactly 0");
        q = a;
        random_problem(&a, N, E, C, 1, &rng);
        COMPARE(criterion, &a, &q, NEAR, "expert_p of exactly 0");
        a.temperature = 0.5;
        COMPARE(criterion, &a, NULL, NEAR, "temperature");
    }
}

/* Beside logits of a thousand; posteriors are 0 and 1 to all digits, so what is left is known. */
static void test_large(void) {
    moe_rng rng = {12};
    problem a;
    size_t i;
    int criterion;
    for (criterion = 0; criterion < MOE_CRITERION_COUNT; criterion++) {
        random_problem(&a, N, E, C, 1000, &rng);
        COMPARE(criterion, &a, NULL, MOE_REAL_IS_DOUBLE ? 1e-4 : 1e-3, "large outputs");
        for (i = 0; i < N * C; i++) a.target[i] = a.o[i]; /* one expert is right, all others are off by millions */
        COMPARE(criterion, &a, NULL, MOE_REAL_IS_DOUBLE ? 1e-4 : 1e-3, "large outputs, one that fits");
    }
}

/* A gate that has given up an expert that is right by 2000: the derivative exp(2000) is cut,
   nothing else is hurt. */
static void test_cut(void) {
    const moe_real p[2] = {1, 0}, o[4] = {2000, 0, 0, 2000};
    const int32_t label[1] = {1};
    moe_real loss, d_p[2], d_o[4];
    moe_error error;
    moe_mixture m;
    memset(&m, 0, sizeof m);
    m.n = 1;
    m.experts = 2;
    m.width = 2;
    m.p = p;
    m.outputs = o;
    m.labels = label;
    CHECK_STATUS(moe_mixture_loss(MOE_CRITERION_EXPECTATION, &m, &loss, d_p, d_o, &error), MOE_OK,
                 "a gate that gave up");
    CHECK_CLOSE(loss, 2000, ROUNDING, "its loss");
    CHECK_CLOSE(d_p[0], -1, ROUNDING, "d_p of the expert that is used");
    CHECK(moe_is_finite(d_p[1]) && (double)d_p[1] <= -0.99e38, "d_p of the other is cut");
    CHECK_CLOSE(d_o[0], 1, ROUNDING, "d_o");
    CHECK_CLOSE(d_o[1], -1, ROUNDING, "d_o");
    CHECK_CLOSE(d_o[2], 0, 0, "d_o of an expert with p = 0");
    CHECK_CLOSE(d_o[3], 0, 0, "d_o of an expert with p = 0");
}

/* The same upwards: an expert without weight whose squared error has no place in the real type. */
static void test_cut_upwards(void) {
    const moe_real far_off = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e200 : 1e30), p[2] = {1, 0};
    const moe_real target[1] = {1};
    moe_real o[2] = {3, 0}, loss, d_p[2], d_o[2];
    moe_mixture m;
    o[1] = far_off;
    memset(&m, 0, sizeof m);
    m.n = m.width = 1;
    m.experts = 2;
    m.p = p;
    m.outputs = o;
    m.targets = target;
    CHECK_STATUS(moe_mixture_loss(MOE_CRITERION_STOCHASTIC_SQUARED, &m, &loss, d_p, d_o, NULL), MOE_OK,
                 "an expert far off");
    CHECK_CLOSE(loss, 2, ROUNDING, "its loss does not count");
    CHECK(moe_is_finite(d_p[1]) && (double)d_p[1] >= 0.99e38, "d_p is cut");
    CHECK_CLOSE(d_o[0], 2, ROUNDING, "d_o");
    CHECK_CLOSE(d_o[1], 0, 0, "d_o of an expert with p = 0");
    CHECK_STATUS(moe_mixture_loss(MOE_CRITERION_JACOBS_SQUARED, &m, &loss, d_p, d_o, NULL), MOE_OK,
                 "an expert far off");
    CHECK_CLOSE(d_p[0], -1, ROUNDING, "d_p");
    CHECK_CLOSE(d_p[1], 0, 0, "d_p of an expert without likelihood");
}

/* -log softmax of a margin of 30 is about exp(-30): relative digits count. */
static void test_small(void) {
    static const int criteria[] = {MOE_CRITERION_CROSS_ENTROPY, MOE_CRITERION_EXPECTATION, MOE_CRITERION_STOCHASTIC,
                                   MOE_CRITERION_JACOBS};
    const moe_real p[1] = {1}, o[2] = {1030, 1000};
    const int32_t label[1] = {0};
    moe_real loss;
    moe_mixture m;
    size_t i;
    memset(&m, 0, sizeof m);
    m.n = m.experts = 1;
    m.width = 2;
    m.p = p;
    m.outputs = o;
    m.labels = label;
    for (i = 0; i < 4; i++) {
        double wanted = log1p(exp(-30.0)) * (criteria[i] == MOE_CRITERION_JACOBS ? 0.5 : 1);
        CHECK_STATUS(moe_mixture_loss(criteria[i], &m, &loss, NULL, NULL, NULL), MOE_OK, "a small loss");
        CHECK_CLOSE((double)loss / wanted, 1, ROUNDING, "a small loss keeps its digits");
    }
}

/* ---- answers ---- */

static void test_answers(void) {
    moe_rng rng = {13};
    problem a;
    arrays r;
    moe_real answer[N * C];
    moe_error error;
    size_t t, i, j, best;
    int criterion;
    for (criterion = 0; criterion < MOE_CRITERION_COUNT; criterion++) {
        random_problem(&a, N, E, C, criterion == MOE_CRITERION_EXPECTATION ? 300 : 1, &rng);
        a.p[0] = a.p[1] = a.p[2] = a.p[3] = 0.25; /* the first of equals */
        a.p[4] = a.p[6] = 0.1;
        a.p[5] = a.p[7] = 0.4;
        bind(&r, &a);
        r.m.labels = NULL;
        r.m.targets = NULL;
        if (criterion == MOE_CRITERION_CROSS_ENTROPY) r.m.temperature = (moe_real)0.25;
        if (!CHECK_STATUS(moe_mixture_answer(criterion, &r.m, NULL, answer, &error), MOE_OK, "answer")) continue;
        for (t = 0; t < N; t++) {
            for (best = 0, i = 1; i < E; i++)
                if (a.p[t * E + i] > a.p[t * E + best]) best = i;
            for (j = 0; j < C; j++) {
                double sum = 0, mixed = 0;
                for (i = 0; i < E; i++) {
                    const double *o = a.o + (i * N + t) * C;
                    mixed += a.p[t * E + i] * o[j];
                    sum += a.p[t * E + i] * exp(-wanted_cross_entropy(C, o, (int32_t)j));
                }
                if (criterion == MOE_CRITERION_EXPECTATION)
                    CHECK_CLOSE(answer[t * C + j], sum, ROUNDING, "sum of probabilities");
                else if (criterion == MOE_CRITERION_CROSS_ENTROPY)
                    CHECK_CLOSE(answer[t * C + j], 4 * mixed, ROUNDING, "logits over T");
                else if (criterion == MOE_CRITERION_SQUARED_ERROR)
                    CHECK_CLOSE(answer[t * C + j], mixed, ROUNDING, "sum of outputs");
                else CHECK_CLOSE(answer[t * C + j], a.o[(best * N + t) * C + j], 0, "the best expert's output");
            }
        }
    }
}

/* Drawn experts come as often as p says (p need not sum to 1), one with p = 0 never; one draw per
   sample. */
static void test_sampled(void) {
    enum { TIMES = 20000 };
    const moe_real p[4] = {(moe_real)0.2, 0, (moe_real)1.2, (moe_real)0.6}, o[4] = {0, 1, 2, 3};
    long count[4] = {0};
    moe_rng rng = {14}, other = {14};
    moe_mixture m;
    size_t i;
    memset(&m, 0, sizeof m);
    m.n = 1;
    m.experts = 4;
    m.width = 1;
    m.p = p;
    m.outputs = o;
    for (i = 0; i < TIMES; i++) {
        moe_real answer = -1;
        if (moe_mixture_answer(MOE_CRITERION_JACOBS, &m, &rng, &answer, NULL) != MOE_OK || !(answer >= 0) || answer > 3)
            break;
        count[(int)answer]++;
        (void)moe_rng_next(&other);
    }
    CHECK(i == TIMES, "all drawn");
    CHECK(rng.state == other.state, "one draw of the stream per sample");
    CHECK(count[1] == 0, "p = 0 is never drawn");
    for (i = 0; i < 4; i++)
        CHECK(fabs((double)count[i] / (double)TIMES - (double)p[i] / 2) < 0.02, "drawn as often as p says");
    for (i = 0; i < 2; i++) {
        moe_real answer = -1;
        CHECK_STATUS(moe_mixture_answer(MOE_CRITERION_STOCHASTIC, &m, NULL, &answer, NULL), MOE_OK, "without rng");
        CHECK_CLOSE(answer, 2, 0, "without rng the best");
    }
}

/* Every field of a loss's problem that may be wrong. */
static void refuse_problem(int criterion, problem *a, arrays *r) {
    moe_error error;
    int squared = strstr(criterion_names[criterion], "squared") != NULL;
    moe_real kept;
#define REFUSED(change, back, wanted, words) \
    change; \
    CHECK_REFUSED(moe_mixture_loss(criterion, &r->m, &r->loss, r->d_p, r->d_o, &error), wanted, words); \
    back
    REFUSED(r->m.experts = 0, r->m.experts = E, MOE_ERR_ARGUMENT, "experts = 0");
    REFUSED(r->m.width = 0, r->m.width = C, MOE_ERR_ARGUMENT, "width = 0");
    REFUSED(r->m.p = NULL, r->m.p = r->p, MOE_ERR_ARGUMENT, "p ");
    REFUSED(r->m.outputs = NULL, r->m.outputs = r->o, MOE_ERR_ARGUMENT, "outputs");
    REFUSED(r->m.n = (size_t)-1 / 2, r->m.n = N, MOE_ERR_OVERFLOW, "too large");
    r->m.experts = E - 1;
    REFUSED(r->m.n = (size_t)-1 / 2, r->m.n = N, MOE_ERR_OVERFLOW, "experts = 3, width = 4: too large");
    r->m.experts = E;
    REFUSED(r->m.temperature = -1, r->m.temperature = 0, MOE_ERR_ARGUMENT, "temperature = -1");
    REFUSED(r->m.temperature = not_a_number(), r->m.temperature = 0, MOE_ERR_ARGUMENT, "temperature = nan");
    if (criterion != MOE_CRITERION_CROSS_ENTROPY) {
        REFUSED(r->m.temperature = 2, r->m.temperature = 1, MOE_ERR_ARGUMENT, "temperature = 2: must be 1 to 1");
    } else {
        REFUSED(r->m.temperature = (moe_real)1e-9, r->m.temperature = 1, MOE_ERR_ARGUMENT, "temperature = 1e-9");
    }
    kept = r->p[6];
    REFUSED(r->p[6] = -1, r->p[6] = kept, MOE_ERR_ARGUMENT, "p[1][2] = -1");
    REFUSED(r->p[6] = not_a_number(), r->p[6] = kept, MOE_ERR_NONFINITE, "p[1][2] = nan");
    kept = r->o[9];
    REFUSED(r->o[9] = infinite(), r->o[9] = kept, MOE_ERR_NONFINITE, "outputs[2][1] = inf");
    r->m.expert_p = r->q;
    REFUSED(r->q[1] = -2, r->q[1] = 0, MOE_ERR_ARGUMENT, "expert_p[0][1] = -2");
    r->m.expert_p = NULL;
    if (squared) {
        REFUSED(r->m.targets = NULL, r->m.targets = r->target, MOE_ERR_ARGUMENT, "targets");
        kept = r->target[5];
        REFUSED(r->target[5] = not_a_number(), r->target[5] = kept, MOE_ERR_NONFINITE, "targets[1][1] = nan");
        kept = r->target[0];
        REFUSED(r->target[0] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e200 : 1e38), r->target[0] = kept, MOE_ERR_NONFINITE,
                "sample 0");
    } else {
        REFUSED(r->m.labels = NULL, r->m.labels = a->label, MOE_ERR_ARGUMENT, "labels");
        a->label[3] = C;
        REFUSED((void)0, a->label[3] = -1, MOE_ERR_ARGUMENT, "labels[3] = 4: must be 0 to 3");
        REFUSED((void)0, a->label[3] = 0, MOE_ERR_ARGUMENT, "labels[3] = -1");
    }
    if (criterion >= MOE_CRITERION_JACOBS || criterion == MOE_CRITERION_EXPECTATION) {
        moe_real row[E];
        memcpy(row, r->p + 2 * E, sizeof row);
        memset(r->p + 2 * E, 0, sizeof row);
        REFUSED((void)0, memcpy(r->p + 2 * E, row, sizeof row), MOE_ERR_NONFINITE, "sample 2 is not finite");
        /* under the experts' p alone */
        memcpy(r->q, r->p, sizeof r->q);
        memset(r->q + 2 * E, 0, sizeof row);
        r->m.expert_p = r->q;
        REFUSED((void)0, r->m.expert_p = NULL, MOE_ERR_NONFINITE, "sample 2 is not finite");
    }
#undef REFUSED
}

static void test_refused_losses(void) {
    moe_rng rng = {15};
    problem a;
    arrays r;
    moe_error error;
    moe_real answer[N * C], before;
    int criterion;
    random_problem(&a, N, E, C, 1, &rng);
    bind(&r, &a);
    r.loss = r.d_p[0] = r.d_o[0] = 77;
    CHECK_REFUSED(moe_mixture_loss(-1, &r.m, &r.loss, r.d_p, r.d_o, &error), MOE_ERR_ARGUMENT, "criterion = -1");
    CHECK_REFUSED(moe_mixture_loss(MOE_CRITERION_COUNT, &r.m, &r.loss, r.d_p, r.d_o, &error), MOE_ERR_ARGUMENT,
                  "criterion = 7");
    CHECK_REFUSED(moe_mixture_answer(MOE_CRITERION_COUNT, &r.m, NULL, answer, &error), MOE_ERR_ARGUMENT,
                  "criterion = 7");
    CHECK_REFUSED(moe_mixture_loss(0, NULL, &r.loss, r.d_p, r.d_o, &error), MOE_ERR_ARGUMENT, "NULL");
    CHECK_REFUSED(moe_mixture_loss(0, &r.m, NULL, r.d_p, r.d_o, &error), MOE_ERR_ARGUMENT, "NULL");
    CHECK_REFUSED(moe_mixture_answer(0, &r.m, NULL, NULL, &error), MOE_ERR_ARGUMENT, "NULL");
    for (criterion = 0; criterion < MOE_CRITERION_COUNT; criterion++) {
        refuse_problem(criterion, &a, &r);
        CHECK(r.loss > 76 && r.d_p[0] > 76 && r.d_o[0] > 76, "a failed call changes nothing");
        before = r.loss;
        r.m.n = 0;
        CHECK(moe_mixture_loss(criterion, &r.m, &r.loss, r.d_p, r.d_o, &error) == MOE_OK && !(r.loss > 0) &&
                  !(r.loss < 0),
              "no samples");
        CHECK(moe_mixture_answer(criterion, &r.m, NULL, answer, &error) == MOE_OK, "no samples");
        r.loss = before;
        r.m.n = N;
        r.m.temperature = 0;
    }
}

/* ---- networks: the trainer reads the experts of the last module one by one ---- */

enum { CASES = 24, INPUTS = 3, CLASSES = 4 };

typedef struct lesson {
    moe_real x[CASES * INPUTS], targets[CASES * CLASSES];
    int32_t labels[CASES];
    moe_data data;
} lesson;

static void lesson_begin(lesson *l, uint64_t seed) {
    moe_rng rng;
    int i;
    moe_rng_seed(&rng, seed);
    memset(l, 0, sizeof *l);
    for (i = 0; i < CASES * INPUTS; i++) l->x[i] = moe_rng_normal(&rng);
    for (i = 0; i < CASES * CLASSES; i++) l->targets[i] = moe_rng_normal(&rng);
    for (i = 0; i < CASES; i++) l->labels[i] = (int32_t)moe_rng_below(&rng, CLASSES);
    l->data.n = CASES;
    l->data.x = l->x;
    l->data.labels = l->labels;
    l->data.targets = l->targets;
}

/* A hidden layer, then small networks as experts under a gate that sees them all. */
static moe_status school(moe_net *net, const char *settings, int trainable, moe_error *error) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    memset(net, 0, sizeof *net);
    if (moe_fields_apply(moe_layer_fields(), &c, settings, error) != MOE_OK) return MOE_ERR_CONFIG;
    c.d_out = CLASSES;
    moe_net_init(net, INPUTS, MOE_KERNELS_C, NULL);
    net->mixture_losses = moe_classic_losses();
    moe_net_linear(net, 5);
    moe_net_activation(net, MOE_ACT_TANH);
    moe_net_mixture(net, &c);
    return moe_net_build(net, trainable, 7, error);
}

#define CLASSIC \
    "n_experts=3 score=mlp router_hidden=4 router_act=tanh select=dense weight=raw expert=mlp act=tanh d_ff=4"

/* The gradient that one step leaves is that of the loss that moe_evaluate sees: of the gate's
   tensors and what comes before under `gate_net`, of the experts' under `expert_net`, which has the
   same tensors. */
static void check_lesson(int criterion, moe_net *net, moe_net *gate_net, moe_net *expert_net) {
    moe_train_config t;
    moe_trainer trainer;
    moe_evaluation low, high;
    moe_error error;
    lesson l;
    size_t i, j;
    lesson_begin(&l, 3);
    memset(&t, 0, sizeof t);
    t.criterion = criterion;
    t.batch = CASES;
    t.optimizer = MOE_OPTIMIZER_SGD;
    t.momentum = -1;
    t.rate = (moe_real)1e-9;
    if (!CHECK_STATUS(moe_trainer_init(&trainer, net, &t, &error), MOE_OK, "trainer")) return;
    CHECK_STATUS(moe_trainer_step(&trainer, &l.data, NULL, &error), MOE_OK, "step");
    for (i = 0; i < net->n_tensors; i++) {
        int expert = strstr(net->tensors[i].name, "experts.") != NULL;
        moe_net *other = expert ? expert_net : gate_net;
        if (other == NULL) continue;
        for (j = 0; j < net->tensors[i].count; j += 1 + net->tensors[i].count / 5) {
            moe_real *value = other->tensors[i].data + j, kept = *value;
            moe_real h = MOE_REAL_IS_DOUBLE ? (moe_real)1e-5 : (moe_real)1e-2;
            *value = kept + h;
            CHECK_STATUS(moe_evaluate(other, &l.data, criterion, &high, &error), MOE_OK, "evaluate");
            *value = kept - h;
            CHECK_STATUS(moe_evaluate(other, &l.data, criterion, &low, &error), MOE_OK, "evaluate");
            *value = kept;
            CHECK_CLOSE(net->tensors[i].gradient[j], ((double)high.loss - (double)low.loss) / (2 * (double)h),
                        MOE_REAL_IS_DOUBLE ? 1e-7 : 2e-3, net->tensors[i].name);
        }
    }
    moe_trainer_free(&trainer);
}

/* What moe_evaluate counts as right is the answer's largest number: experts that know but one
   class, whatever the gate says. */
static void test_accuracy(void) {
    int criterion, label, i;
    for (criterion = 0; criterion < MOE_CRITERION_COUNT; criterion++) {
        moe_net net;
        moe_error error;
        moe_evaluation seen;
        moe_tensor *weight, *bias;
        lesson l;
        lesson_begin(&l, 5);
        if (!CHECK_STATUS(school(&net, CLASSIC, 0, &error), MOE_OK, "net")) return;
        weight = net_tensor(&net, "2.experts.fc2.weight");
        bias = net_tensor(&net, "2.experts.fc2.bias");
        if (!CHECK(weight != NULL && bias != NULL && bias->count == 3 * CLASSES, "the experts' last layer")) return;
        memset(weight->data, 0, weight->count * sizeof(moe_real));
        for (label = 0; label < CLASSES; label++) {
            int right = 0;
            for (i = 0; i < 3 * CLASSES; i++)
                bias->data[i] = (moe_real)(i % CLASSES == label ? 2 + i / CLASSES : i % 3);
            for (i = 0; i < CASES; i++) right += l.labels[i] == label;
            CHECK_STATUS(moe_evaluate(&net, &l.data, criterion, &seen, &error), MOE_OK, "evaluate");
            if (criterion != MOE_CRITERION_SQUARED_ERROR && criterion != MOE_CRITERION_STOCHASTIC_SQUARED &&
                criterion != MOE_CRITERION_JACOBS_SQUARED)
                CHECK_CLOSE(seen.accuracy, (double)right / CASES, ROUNDING, "the share of samples with that label");
            else CHECK_CLOSE(seen.accuracy, 0, 0, "of targets there is none");
        }
        moe_net_free(&net);
    }
}

/* Forced routing names every expert, as the loss reads them all. A loss that is too large ends the
   step, and says at which sample. */
static void test_steps_refused(void) {
    int32_t given[3 * CASES];
    int i;
    moe_call call;
    moe_net net;
    moe_error error;
    moe_train_config t;
    moe_trainer trainer;
    lesson l;
    lesson_begin(&l, 6);
    memset(&t, 0, sizeof t);
    t.criterion = MOE_CRITERION_STOCHASTIC_SQUARED;
    t.batch = CASES;
    t.rate = (moe_real)0.01;
    if (!CHECK_STATUS(school(&net, CLASSIC, 1, &error), MOE_OK, "net")) return;
    if (!CHECK_STATUS(moe_trainer_init(&trainer, &net, &t, &error), MOE_OK, "trainer")) return;
    memset(&call, 0, sizeof call);
    call.given = given;
    l.data.call = &call;
    for (i = 0; i < 3 * CASES; i++) given[i] = 2 - i % 3;
    CHECK_STATUS(moe_trainer_step(&trainer, &l.data, NULL, &error), MOE_OK, "a step");
    given[3 * 5 + 1] = -1;
    CHECK_REFUSED(moe_trainer_step(&trainer, &l.data, NULL, &error), MOE_ERR_ARGUMENT, "all experts in call.given");
    l.data.call = NULL;
    l.targets[7 * CLASSES] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e200 : 1e38);
    CHECK_REFUSED(moe_trainer_step(&trainer, &l.data, NULL, &error), MOE_ERR_NONFINITE,
                  "the loss of sample 7 is not finite");
    CHECK(trainer.steps == 1, "no step was made");
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

/* Losses that read every expert know no sample without a label; moe_fit finds one before the first
   step, wherever it is. */
static void test_label_of_every_row(void) {
    moe_net net;
    moe_error error;
    moe_train_config t;
    moe_real before[5];
    lesson l;
    lesson_begin(&l, 8);
    memset(&t, 0, sizeof t);
    t.criterion = MOE_CRITERION_EXPECTATION;
    t.epochs = 1;
    t.batch = CASES / 2;
    t.rate = (moe_real)0.1;
    if (!CHECK_STATUS(school(&net, CLASSIC, 1, &error), MOE_OK, "net")) return;
    memcpy(before, net.tensors[0].data, sizeof before);
    l.data.n = CASES / 2;
    CHECK_STATUS(moe_fit(&net, &l.data, NULL, &t, &error), MOE_OK, "with labels");
    CHECK(!same_reals(before, net.tensors[0].data, 5), "it learns");
    memcpy(before, net.tensors[0].data, sizeof before);
    l.data.n = CASES;
    l.labels[CASES - 1] = -1;
    CHECK_REFUSED(moe_fit(&net, &l.data, NULL, &t, &error), MOE_ERR_ARGUMENT, "labels[23] = -1: must be 0 to 3");
    CHECK(same_reals(before, net.tensors[0].data, 5), "no step was made");
    moe_net_free(&net);
}

static void test_nets_learn(void) {
    int criterion;
    for (criterion = 0; criterion < MOE_CRITERION_COUNT; criterion++) {
        moe_net net, dual, hot;
        moe_error error;
        moe_train_config t;
        moe_evaluation before, after;
        lesson l;
        lesson_begin(&l, 4);
        if (!CHECK_STATUS(school(&net, CLASSIC, 1, &error), MOE_OK, "net")) return;
        check_lesson(criterion, &net, &net, &net);
        /* dual temperature: the gate as in the plain net, the experts as in one whose gate has that
           temperature */
        if (!CHECK_STATUS(school(&dual, CLASSIC " expert_temperature=3", 1, &error), MOE_OK, "dual")) return;
        if (!CHECK_STATUS(school(&hot, CLASSIC " gate_temperature=3", 1, &error), MOE_OK, "hot")) return;
        check_lesson(criterion, &dual, NULL, &hot);
        memset(&t, 0, sizeof t);
        t.criterion = criterion;
        t.epochs = 150;
        t.batch = 8;
        t.rate = (moe_real)0.02;
        CHECK_STATUS(moe_evaluate(&net, &l.data, criterion, &before, &error), MOE_OK, "before");
        CHECK_STATUS(moe_fit(&net, &l.data, &l.data, &t, &error), MOE_OK, "fit");
        CHECK_STATUS(moe_evaluate(&net, &l.data, criterion, &after, &error), MOE_OK, "after");
        CHECK(after.loss < before.loss / 2 || after.loss < 0, "the loss falls");
        moe_net_free(&net);
        moe_net_free(&dual);
        moe_net_free(&hot);
    }
}

/* A network that such a loss cannot read is refused, and told what is missing. */
static void test_nets_refused(void) {
    static const char *const wrong[] = {"select=top_k",   "weight=sum", "scale=2",
                                        "expert_scale=1", "n_shared=1", "apply_to=input"};
    moe_net net;
    moe_error error;
    moe_trainer trainer;
    moe_train_config t;
    moe_evaluation result;
    moe_data data;
    size_t i;
    memset(&net, 0, sizeof net);
    memset(&t, 0, sizeof t);
    memset(&data, 0, sizeof data);
    moe_net_init(&net, 3, MOE_KERNELS_C, NULL);
    moe_net_linear(&net, 2);
    if (!CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build")) return;
    for (t.criterion = MOE_CRITERION_EXPECTATION; t.criterion < MOE_CRITERION_COUNT; t.criterion++) {
        CHECK_REFUSED(moe_trainer_init(&trainer, &net, &t, &error), MOE_ERR_CONFIG, "must be an MoE layer");
        CHECK_REFUSED(moe_evaluate(&net, &data, t.criterion, &result, &error), MOE_ERR_CONFIG, "must be an MoE layer");
    }
    CHECK_REFUSED(moe_evaluate(&net, &data, MOE_CRITERION_COUNT, &result, &error), MOE_ERR_ARGUMENT, "no such");
    moe_net_free(&net);
    t.criterion = MOE_CRITERION_EXPECTATION;
    for (i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char settings[200];
        sprintf(settings, "%s %s", CLASSIC, wrong[i]);
        if (!CHECK_STATUS(school(&net, settings, 1, &error), MOE_OK, settings)) continue;
        CHECK_REFUSED(moe_trainer_init(&trainer, &net, &t, &error), MOE_ERR_CONFIG, "select = dense and weight = raw");
        moe_net_free(&net);
    }
    if (!CHECK_STATUS(school(&net, CLASSIC, 1, &error), MOE_OK, "net")) return;
    net.mixture_losses = NULL;
    CHECK_REFUSED(moe_trainer_init(&trainer, &net, &t, &error), MOE_ERR_UNSUPPORTED, "net.mixture_losses");
    CHECK_REFUSED(moe_evaluate(&net, &data, t.criterion, &result, &error), MOE_ERR_UNSUPPORTED, "net.mixture_losses");
    moe_net_free(&net);
    if (!CHECK_STATUS(school(&net, CLASSIC " gate=sigmoid expert_temperature=2", 1, &error), MOE_OK, "sigmoid")) return;
    t.criterion = 0;
    CHECK_REFUSED(moe_trainer_init(&trainer, &net, &t, &error), MOE_ERR_CONFIG,
                  "expert_temperature needs gate = softmax");
    moe_net_free(&net);
}

/* ---- modular networks ---- */

/* A sample without choices takes none from the others: with the same draws they keep what they keep
   beside one that has some. */
static void modular_newcomer(const int32_t *choices, moe_modular *modular, const moe_data *data) {
    enum { SEEN = 96 };
    int32_t beside[2][2 * SEEN];
    moe_error error;
    const moe_rng rng = modular->trainer->rng;
    int i, k;
    for (k = 0; k < 2; k++) {
        memcpy(beside[k], choices, sizeof beside[k]);
        if (k == 1) beside[k][7] = beside[k][SEEN + 7] = -1;
        modular->trainer->rng = rng;
        CHECK_STATUS(moe_modular_step(modular, data, 1, 0, beside[k], NULL, &error), MOE_OK, "one draw");
    }
    CHECK(beside[1][7] >= 0 && beside[1][SEEN + 7] >= 0, "the newcomer gets modules");
    for (i = 0; i < 2 * SEEN; i++)
        CHECK(i % SEEN == 7 || beside[0][i] == beside[1][i], "the others keep the best of theirs");
}

/* The mean over samples of -(y - target)^2 / 2 + the sum over layers of ln p(choice). */
static double modular_likelihood(const int32_t *choices, const moe_modular *modular, const moe_data *data) {
    const moe_net *net = modular->trainer->net;
    double sum = 0, error;
    size_t i, t, layer = 0;
    moe_net_pass pass;
    moe_call call;
    memset(&call, 0, sizeof call);
    call.n_tokens = data->n;
    call.x = data->x;
    call.training = 1;
    call.given = choices;
    call.teacher = modular->teacher;
    call.rng = &modular->trainer->rng;
    CHECK(moe_net_forward(net, &call, modular->net_work, modular->net_size, &pass) == MOE_OK);
    for (t = 0; t < data->n; t++) {
        error = (double)pass.y[t] - (double)data->targets[t];
        sum -= error * error / 2;
    }
    for (i = 0; i < net->n_modules; i++) {
        const moe_routing *r = moe_net_routing(net, &pass, i);
        for (t = 0; r != NULL && t < data->n; t++)
            sum += log((double)r->probabilities[t * 3 + (size_t)choices[layer * data->n + t]]);
        layer += r != NULL;
    }
    return sum / (double)data->n;
}

static void modular_steps(int32_t *choices, moe_modular *modular, moe_data *data) {
    enum { SEEN = 96 };
    int32_t kept[2 * SEEN];
    unsigned char mask[SEEN];
    moe_modular_step_result first, result;
    moe_call call;
    moe_error error;
    double before;
    int i;
    memset(&call, 0, sizeof call);
    memset(mask, 1, sizeof mask);
    mask[2] = 0;
    call.mask = mask;
    data->call = &call; /* padding has no module, so no place in the teacher's rows */
    CHECK_REFUSED(moe_modular_step(modular, data, 1, 1, choices, NULL, &error), MOE_ERR_ARGUMENT, "mask[2] = 0");
    data->call = NULL;
    CHECK_REFUSED(moe_modular_step(modular, data, 0, 1, choices, NULL, &error), MOE_ERR_ARGUMENT, "E-step");
    CHECK_STATUS(moe_modular_step(modular, data, 4, 0, choices, &first, &error), MOE_OK, "an E-step alone");
    CHECK(first.changed > 0.99, "every sample got its modules");
    for (before = first.log_likelihood, i = 0; i < 10; i++) {
        CHECK_STATUS(moe_modular_step(modular, data, 3, 0, choices, &result, &error), MOE_OK, "another");
        CHECK(result.log_likelihood >= before - ROUNDING * (1 + fabs(before)), "more draws never lose");
        before = result.log_likelihood;
    }
    memcpy(kept, choices, sizeof kept);
    CHECK_STATUS(moe_modular_step(modular, data, 0, 0, choices, &result, &error), MOE_OK, "no draws");
    CHECK(memcmp(kept, choices, sizeof kept) == 0 && !(result.changed > 0), "without draws the choices stay");
    CHECK_CLOSE(result.log_likelihood, before, ROUNDING, "and so does their log-likelihood");
    CHECK_CLOSE(result.log_likelihood, modular_likelihood(choices, modular, data), ROUNDING, "which is its formula");
    modular_newcomer(choices, modular, data);
    for (i = 0; i < 120; i++)
        CHECK_STATUS(moe_modular_step(modular, data, 4, 5, choices, &result, &error), MOE_OK, "EM");
    CHECK(result.log_likelihood > first.log_likelihood + 2 && result.last.loss < (moe_real)0.05,
          "it learns a function that is linear in pieces");
    data->n = SEEN + 1;
    CHECK_REFUSED(moe_modular_step(modular, data, 1, 1, choices, NULL, &error), MOE_ERR_ARGUMENT,
                  "must be 1 to batch");
}

static const char *const modular_settings =
    "n_experts=3 top_k=1 select=sample weight=one loss_distill=1 expert=linear";

/* Two layers of linear modules fit a function that is linear in pieces. The assigned choices'
   log-likelihood never falls in an E-step that only adds draws; the module that the gate prefers in
   the end is the one that was assigned; errors name what is wrong. */
static void test_modular(void) {
    enum { SEEN = 96 };
    moe_real x[SEEN * 2], targets[SEEN];
    int32_t choices[2 * SEEN];
    moe_layer_config c;
    moe_net net;
    moe_train_config t;
    moe_trainer trainer;
    moe_modular modular;
    moe_error error;
    moe_data data;
    moe_rng rng;
    int i;
    moe_rng_seed(&rng, 5);
    memset(&net, 0, sizeof net);
    memset(&t, 0, sizeof t);
    memset(&c, 0, sizeof c);
    memset(&data, 0, sizeof data);
    memset(&modular, 0, sizeof modular);
    for (i = 0; i < SEEN; i++) {
        x[2 * i] = moe_rng_normal(&rng);
        x[2 * i + 1] = moe_rng_normal(&rng);
        targets[i] = x[2 * i] > 0 ? 3 * x[2 * i + 1] : 1 - 3 * x[2 * i + 1];
    }
    for (i = 0; i < 2 * SEEN; i++) choices[i] = -1;
    CHECK_STATUS(moe_fields_apply(moe_layer_fields(), &c, modular_settings, &error), MOE_OK, modular_settings);
    moe_net_init(&net, 2, MOE_KERNELS_C, NULL);
    c.d_out = 4;
    moe_net_mixture(&net, &c);
    c.d_out = 1;
    moe_net_mixture(&net, &c);
    t.criterion = MOE_CRITERION_SQUARED_ERROR;
    t.batch = SEEN;
    t.rate = (moe_real)0.01;
    data.n = SEEN;
    data.x = x;
    data.targets = targets;
    if (!CHECK_STATUS(moe_net_build(&net, 1, 3, &error), MOE_OK, "build")) return;
    if (!CHECK_STATUS(moe_trainer_init(&trainer, &net, &t, &error), MOE_OK, "trainer")) return;
    CHECK_STATUS(moe_modular_init(&modular, &trainer, &error), MOE_OK, "modular");
    modular_steps(choices, &modular, &data);
    /* the teacher of the last step, layer by layer: 1 at the choice */
    for (i = 0; i < 2 * SEEN; i++) CHECK_NEAR(modular.teacher[3 * i + choices[i]], 1, 0);
    moe_modular_free(&modular);
    moe_modular_free(&modular);
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    memset(&net, 0, sizeof net);
    c.router.select = MOE_SELECT_TOP_K;
    moe_net_init(&net, 2, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &c);
    if (!CHECK_STATUS(moe_net_build(&net, 1, 3, &error), MOE_OK, "build")) return;
    if (!CHECK_STATUS(moe_trainer_init(&trainer, &net, &t, &error), MOE_OK, "trainer")) return;
    CHECK_REFUSED(moe_modular_init(&modular, &trainer, &error), MOE_ERR_CONFIG, "select = sample");
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

/* A gate that chooses no module leaves the sample without one, which no step may teach; one that
   chooses several has no single module to keep. */
static void modular_none(const char *settings, int switched, moe_status begun, moe_status stepped) {
    enum { SEEN = 32 };
    moe_real x[SEEN * 2], targets[SEEN] = {0};
    int32_t choices[SEEN];
    moe_layer_config c;
    moe_net net;
    moe_train_config t;
    moe_trainer trainer;
    moe_modular modular;
    moe_error error;
    moe_data data;
    moe_rng rng;
    moe_status status;
    int i, none = 0;
    moe_rng_seed(&rng, 5);
    memset(&t, 0, sizeof t);
    memset(&c, 0, sizeof c);
    memset(&data, 0, sizeof data);
    for (i = 0; i < 2 * SEEN; i++) x[i] = moe_rng_normal(&rng);
    for (i = 0; i < SEEN; i++) choices[i] = -1;
    CHECK_STATUS(moe_fields_apply(moe_layer_fields(), &c, modular_settings, &error), MOE_OK, modular_settings);
    CHECK_STATUS(moe_fields_apply(moe_layer_fields(), &c, settings, &error), MOE_OK, settings);
    c.d_out = 1;
    if (switched) c.router.switch_at = 100;
    moe_net_init(&net, 2, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &c);
    t.criterion = MOE_CRITERION_SQUARED_ERROR;
    t.batch = SEEN;
    data.n = SEEN;
    data.x = x;
    data.targets = targets;
    if (!CHECK_STATUS(moe_net_build(&net, 1, 3, &error), MOE_OK, "build")) return;
    if (!CHECK_STATUS(moe_trainer_init(&trainer, &net, &t, &error), MOE_OK, "trainer")) return;
    status = moe_modular_init(&modular, &trainer, &error);
    CHECK_STATUS(status, begun, settings);
    CHECK(begun == MOE_OK || strstr(error.message, "switch_from") != NULL, error.message);
    if (status == MOE_OK && begun == MOE_OK) {
        CHECK_STATUS(moe_modular_step(&modular, &data, 2, 1, choices, NULL, &error), stepped, settings);
        for (i = 0; i < SEEN; i++) none += choices[i] < 0;
        CHECK(stepped == MOE_OK ? none == 0 : none > 0 && none < SEEN, "samples without a module");
        CHECK(stepped == MOE_OK || strstr(error.message, "the gate of MoE layer 0 chose no module") != NULL,
              error.message);
    }
    if (status == MOE_OK) moe_modular_free(&modular);
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

static void test_modular_none(void) {
    modular_none("gate=relu switch_from=top_k", 1, MOE_OK, MOE_OK);
    modular_none("gate=relu", 0, MOE_OK, MOE_ERR_ARGUMENT);
    modular_none("switch_from=threshold", 1, MOE_ERR_CONFIG, MOE_OK);
    modular_none("student=1 freeze_at=9", 0, MOE_ERR_CONFIG, MOE_OK);
    modular_none("k_end=2 schedule_steps=9", 0, MOE_ERR_CONFIG, MOE_OK);
}

/* One step of a modular network with attention before its `experts` modules; rate: dropout's. The
   samples are two sequences, by length or as the call says. */
static moe_status modular_step_of(int experts, moe_real rate, int by_call, moe_real step_rate, int32_t *choices,
                                  moe_modular_step_result *result) {
    static const int32_t starts[] = {0, 4, 8};
    moe_real x[8 * 4], targets[8];
    moe_layer_config c;
    moe_net net;
    moe_train_config t;
    moe_trainer trainer;
    moe_modular modular;
    moe_error error;
    moe_data data;
    moe_call call;
    moe_rng rng;
    moe_status status;
    int i;
    moe_rng_seed(&rng, 6);
    memset(&t, 0, sizeof t);
    memset(&c, 0, sizeof c);
    memset(&data, 0, sizeof data);
    memset(&call, 0, sizeof call);
    for (i = 0; i < 8 * 4; i++) x[i] = moe_rng_normal(&rng);
    for (i = 0; i < 8; i++) targets[i] = moe_rng_normal(&rng);
    CHECK_STATUS(moe_fields_apply(moe_layer_fields(), &c, modular_settings, &error), MOE_OK, modular_settings);
    c.router.n_experts = experts;
    c.d_out = 1;
    moe_net_init(&net, 4, MOE_KERNELS_C, NULL);
    moe_net_attention(&net, NULL);
    moe_net_dropout(&net, rate);
    if (experts > 0) moe_net_mixture(&net, &c);
    else moe_net_linear(&net, 1);
    t.criterion = MOE_CRITERION_SQUARED_ERROR;
    t.batch = 8;
    data.n = 8;
    data.x = x;
    data.targets = targets;
    call.sequences = starts;
    call.n_sequences = 2;
    if (by_call) data.call = &call;
    else data.length = 4;
    CHECK_STATUS(moe_net_build(&net, 1, 3, &error), MOE_OK, "build");
    CHECK_STATUS(moe_trainer_init(&trainer, &net, &t, &error), MOE_OK, "trainer");
    trainer.rate = step_rate;
    status = moe_modular_init(&modular, &trainer, &error);
    if (status == MOE_OK) {
        status = moe_modular_step(&modular, &data, 6, 1, choices, result, &error);
        moe_modular_free(&modular);
    }
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    return status;
}

/* Sequences of the call hold in both steps; draws of choices that are known change nothing; what
   fails leaves the result. */
static void test_modular_calls(void) {
    const moe_real rate = (moe_real)0.01;
    moe_modular_step_result by_length, by_call, kept;
    int32_t choices[8];
    int i;
    for (i = 0; i < 8; i++) choices[i] = i % 3;
    CHECK_STATUS(modular_step_of(3, 0, 0, rate, choices, &by_length), MOE_OK);
    for (i = 0; i < 8; i++) choices[i] = i % 3;
    CHECK_STATUS(modular_step_of(3, 0, 1, rate, choices, &by_call), MOE_OK);
    CHECK_NEAR(by_call.last.loss, by_length.last.loss, 0);
    CHECK(by_length.last.loss > 0);
    memset(choices, 0, sizeof choices);
    CHECK_STATUS(modular_step_of(1, (moe_real)0.5, 0, rate, choices, &by_length), MOE_OK);
    CHECK_NEAR(by_length.changed, 0, 0);
    kept = by_length;
    CHECK_STATUS(modular_step_of(3, 0, 0, infinite(), choices, &by_length), MOE_ERR_ARGUMENT);
    CHECK(memcmp(&kept, &by_length, sizeof kept) == 0);
    CHECK_STATUS(modular_step_of(0, 0, 0, rate, choices, NULL), MOE_ERR_CONFIG, "no modules");
}

/* ---- decoupled training, and an attentive gate that teaches an ordinary one ---- */

enum { REGIONS = 3, POINTS = 240 };

/* Three regions of the plane, each with its own line. */
static void draw_regions(moe_real *x, moe_real *targets, int32_t *region) {
    moe_rng rng;
    int i;
    moe_rng_seed(&rng, 21);
    for (i = 0; i < POINTS; i++) {
        moe_real a = moe_rng_normal(&rng), b = moe_rng_normal(&rng);
        region[i] = a > 0 && b > 0 ? 0 : a > b ? 1 : 2;
        x[2 * i] = a;
        x[2 * i + 1] = b;
        targets[i] = region[i] == 0 ? 2 * a - b : region[i] == 1 ? 1 + b : a - 3;
    }
}

/* Experts learn the regions that they are given, by replay; then they are frozen and the gate alone
   learns to send points to them. */
static void test_decoupled(void) {
    moe_real x[POINTS * 2], targets[POINTS];
    int32_t region[POINTS];
    moe_layer_config c;
    moe_net net;
    moe_train_config t;
    moe_trainer trainer;
    moe_evaluation before, after;
    moe_error error;
    moe_data data;
    moe_call call;
    moe_tensor *experts;
    moe_real kept[REGIONS * 2];
    int32_t given[POINTS * REGIONS];
    size_t i;
    int step;
    memset(&c, 0, sizeof c);
    memset(&net, 0, sizeof net);
    memset(&t, 0, sizeof t);
    memset(&data, 0, sizeof data);
    memset(&call, 0, sizeof call);
    draw_regions(x, targets, region);
    CHECK_STATUS(moe_fields_apply(
                     moe_layer_fields(), &c,
                     "n_experts=3 score=mlp router_hidden=16 select=dense weight=sum expert=linear d_out=1", &error),
                 MOE_OK, "settings");
    moe_net_init(&net, 2, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &c);
    if (!CHECK_STATUS(moe_net_build(&net, 1, 3, &error), MOE_OK, "build")) return;
    for (i = 0; i < POINTS * REGIONS; i++) given[i] = i % REGIONS == 0 ? region[i / REGIONS] : -1;
    t.criterion = MOE_CRITERION_SQUARED_ERROR;
    t.batch = POINTS;
    t.rate = (moe_real)0.05;
    data.n = POINTS;
    data.x = x;
    data.targets = targets;
    call.given = given;
    data.call = &call;
    if (!CHECK_STATUS(moe_trainer_init(&trainer, &net, &t, &error), MOE_OK, "trainer")) return;
    for (step = 0; step < 400; step++)
        CHECK_STATUS(moe_trainer_step(&trainer, &data, NULL, &error), MOE_OK, "an expert's split");
    moe_trainer_free(&trainer);
    data.call = NULL;
    experts = net_tensor(&net, "0.experts.weight");
    if (!CHECK(experts != NULL && experts->count == REGIONS * 2, "the experts")) return;
    CHECK_CLOSE(experts->data[0], 2, 1e-2, "the first expert knows its region");
    experts->flags |= MOE_PARAM_FROZEN;
    net_tensor(&net, "0.experts.bias")->flags |= MOE_PARAM_FROZEN;
    memcpy(kept, experts->data, sizeof kept);
    CHECK_STATUS(moe_evaluate(&net, &data, t.criterion, &before, &error), MOE_OK, "before");
    t.epochs = 300;
    t.batch = 40;
    t.rate = (moe_real)0.02;
    CHECK_STATUS(moe_fit(&net, &data, NULL, &t, &error), MOE_OK, "the gate alone");
    CHECK_STATUS(moe_evaluate(&net, &data, t.criterion, &after, &error), MOE_OK, "after");
    CHECK(memcmp(kept, experts->data, sizeof kept) == 0, "frozen experts stay, to the bit");
    CHECK(after.loss < before.loss / 4, "the gate has learned");
    moe_net_free(&net);
}

static void teach_pupil(moe_real *x, moe_real *teacher, moe_layer *attentive, moe_net *pupil, moe_train_config *t,
                        moe_data *data, void *work) {
    moe_trainer trainer;
    moe_net_pass seen;
    moe_error error;
    size_t bytes, i;
    size_t agree[2] = {0, 0};
    int step, round;
    if (!CHECK_STATUS(moe_trainer_init(&trainer, pupil, t, &error), MOE_OK, "trainer")) return;
    for (round = 0; round < 2; round++) {
        const moe_routing *r;
        moe_call again;
        void *memory;
        memset(&again, 0, sizeof again);
        again.n_tokens = POINTS;
        again.x = x;
        CHECK_STATUS(moe_net_work_size(pupil, POINTS, 0, &bytes), MOE_OK, "size");
        memory = malloc(bytes);
        if (!CHECK(memory != NULL && moe_net_forward(pupil, &again, memory, bytes, &seen) == MOE_OK,
                   "the pupil's call"))
            return;
        r = moe_net_routing(pupil, &seen, 0);
        for (i = 0; i < POINTS; i++) {
            int32_t mine, its;
            (void)moe_top_k(4, r->logits + 4 * i, 1, &mine);
            (void)moe_top_k(4, teacher + 4 * i, 1, &its);
            agree[round] += mine == its;
        }
        free(memory);
        for (step = 0; round == 0 && step < 600; step++)
            CHECK_STATUS(moe_trainer_step(&trainer, data, NULL, &error), MOE_OK, "a lesson");
    }
    CHECK(agree[1] * 100 > POINTS * 93 && agree[1] > agree[0], "the ordinary gate chooses as the attentive one does");
    moe_trainer_free(&trainer);
    moe_net_free(pupil);
    moe_layer_free(attentive);
    free(work);
}

/* The attentive gate needs all experts' hidden layers; an ordinary gate learns from its logits and
   then needs none. */
static void test_attentive_teacher(void) {
    moe_real x[POINTS * 2], targets[POINTS], y[POINTS], *teacher;
    int32_t region[POINTS];
    moe_layer_config c;
    moe_layer attentive;
    moe_layer_pass pass;
    moe_net pupil;
    moe_train_config t;
    moe_error error;
    moe_data data;
    moe_call call;
    moe_tensor tensor;
    size_t bytes, i;
    void *work;
    memset(&c, 0, sizeof c);
    memset(&pupil, 0, sizeof pupil);
    memset(&t, 0, sizeof t);
    memset(&data, 0, sizeof data);
    memset(&call, 0, sizeof call);
    draw_regions(x, targets, region);
    CHECK_STATUS(moe_fields_apply(
                     moe_layer_fields(), &c,
                     "d_model=2 n_experts=4 score=attentive select=dense weight=raw expert=mlp d_ff=6 d_out=1", &error),
                 MOE_OK, "settings");
    if (!CHECK_STATUS(moe_layer_create(&attentive, &c, 0, 5, NULL, &error), MOE_OK, "attentive")) return;
    for (i = 0; moe_layer_tensor(&attentive, i, &tensor) == MOE_OK; i++) { /* a gate with opinions */
        size_t j;
        for (j = 0; strncmp(tensor.name, "router.", 7) == 0 && j < tensor.count; j++) tensor.data[j] *= 2;
    }
    call.n_tokens = POINTS;
    call.x = x;
    CHECK_STATUS(moe_layer_work_size(&attentive, POINTS, 0, &bytes), MOE_OK, "size");
    work = malloc(bytes);
    if (!CHECK(work != NULL && moe_layer_forward(&attentive, &call, y, work, bytes, &pass) == MOE_OK,
               "the teacher's call"))
        return;
    teacher = pass.routing.logits;
    CHECK_STATUS(
        moe_fields_apply(moe_layer_fields(), &c, "score=mlp router_hidden=16 loss_distill=1 distill=ce_soft", &error),
        MOE_OK, "settings");
    moe_net_init(&pupil, 2, MOE_KERNELS_C, NULL);
    moe_net_mixture(&pupil, &c);
    if (!CHECK_STATUS(moe_net_build(&pupil, 1, 9, &error), MOE_OK, "pupil")) return;
    t.criterion = MOE_CRITERION_SQUARED_ERROR;
    t.batch = POINTS;
    t.rate = (moe_real)0.02;
    memset(&call, 0, sizeof call);
    call.teacher = teacher;
    data.n = POINTS;
    data.x = x;
    data.targets = y;
    data.call = &call;
    teach_pupil(x, teacher, &attentive, &pupil, &t, &data, work);
}

/* ---- hierarchical mixtures: data ---- */

enum { SAMPLES = 400, WIDTH = 6, MODELS = 16 };

/* Samples in memory of their own. */
typedef struct samples {
    moe_real x[SAMPLES * WIDTH], y[SAMPLES * WIDTH], answer[SAMPLES * WIDTH];
    int32_t label[SAMPLES];
    double h[SAMPLES * MODELS], group[SAMPLES * MODELS], expert[SAMPLES * MODELS];
    moe_data data;
} samples;

static samples *new_samples(size_t n) {
    samples *s = (samples *)calloc(1, sizeof *s);
    if (s == NULL) {
        fprintf(stderr, "classic: out of memory\n");
        exit(2);
    }
    s->data.n = n;
    s->data.x = s->x;
    s->data.targets = s->y;
    s->data.labels = s->label;
    return s;
}

static samples *random_samples(size_t n, const moe_hme_config *c, moe_rng *rng) {
    samples *s = new_samples(n);
    size_t i, d = (size_t)c->d_in, width = (size_t)c->d_out;
    for (i = 0; i < n * d; i++) s->x[i] = moe_rng_normal(rng);
    for (i = 0; i < n * width; i++) s->y[i] = moe_rng_normal(rng);
    for (i = 0; i < n; i++) s->label[i] = (int32_t)below(rng, width);
    return s;
}

static moe_hme_config hme_config(int family, int d_in, int d_out, int groups, int experts) {
    moe_hme_config c;
    memset(&c, 0, sizeof c);
    c.family = family;
    c.d_in = d_in;
    c.d_out = d_out;
    c.n_groups = groups;
    c.n_experts = experts;
    return c;
}

static moe_hme new_hme(const moe_hme_config *c, uint64_t seed) {
    moe_hme m;
    moe_error error;
    memset(&m, 0, sizeof m);
    if (!CHECK_STATUS(moe_hme_create(&m, c, seed, NULL, &error), MOE_OK, "create")) {
        printf("        %s\n", error.message);
        exit(1);
    }
    return m;
}

/* All parameters at random, away from the small ones that create makes. */
static void shake(moe_hme *m, moe_rng *rng) {
    double *p;
    for (p = m->parameters; p < m->variances; p++) *p = normal(rng);
    for (; p < m->parameters + m->n_parameters; p++) *p = 0.5 + uniform(rng);
}

static double log_likelihood(const moe_hme *m, const moe_data *data) {
    double value = -1e9;
    moe_error error;
    if (!CHECK_STATUS(moe_hme_log_likelihood(m, data, &value, &error), MOE_OK, "log-likelihood"))
        printf("        %s\n", error.message);
    return value;
}

/* ---- the mixture once more, straight from its formula ---- */

static double row_dot(const moe_hme *m, const double *w, const moe_real *x) {
    double sum = w[m->config.d_in];
    int q;
    for (q = 0; q < m->config.d_in; q++) sum += w[q] * (double)x[q];
    return sum;
}

/* probability [n] = softmax of n rows */
static void rows_softmax(const moe_hme *m, const double *rows, int n, const moe_real *x, double *probability) {
    double sum = 0;
    int k;
    for (k = 0; k < n; k++) sum += probability[k] = exp(row_dot(m, rows + k * (m->config.d_in + 1), x));
    for (k = 0; k < n; k++) probability[k] /= sum;
}

/* Prior g_i g_{j|i}, density p_ij(y | x) and mean y_ij of sample t for every expert. */
static void wanted_sample(const moe_hme *m, const samples *s, size_t t, double *prior, double *density,
                          double mean[MODELS][WIDTH]) {
    const moe_hme_config *c = &m->config;
    const moe_real *x = s->x + t * (size_t)c->d_in;
    double top[MODELS], inner[MODELS];
    int i, j, k, row = c->d_in + 1;
    rows_softmax(m, m->gate, c->n_groups, x, top);
    for (i = 0; i < c->n_groups; i++) {
        rows_softmax(m, m->gates + i * c->n_experts * row, c->n_experts, x, inner);
        for (j = 0; j < c->n_experts; j++) {
            int e = i * c->n_experts + j;
            const double *w = m->experts + e * c->d_out * row;
            double v = m->variances[e];
            prior[e] = top[i] * inner[j];
            if (c->family == MOE_HME_SOFTMAX) {
                rows_softmax(m, w, c->d_out, x, mean[e]);
                density[e] = mean[e][s->label[t]];
                continue;
            }
            for (density[e] = 1, k = 0; k < c->d_out; k++) {
                double gap = (double)s->y[t * (size_t)c->d_out + (size_t)k] - (mean[e][k] = row_dot(m, w + k * row, x));
                density[e] *= exp(-gap * gap / (2 * v)) / sqrt(2 * 3.14159265358979324 * v);
            }
        }
    }
}

static void test_probabilities(void) {
    moe_rng rng = {21};
    moe_error error;
    int run;
    for (run = 0; run < 12; run++) {
        moe_hme_config c = hme_config(run % 2, 1 + run % 4, 1 + run % 3, 1 + run / 2 % 3, 1 + run / 3 % 4);
        moe_hme m = new_hme(&c, (uint64_t)run);
        samples *s = random_samples(20, &c, &rng);
        size_t t, all = (size_t)(c.n_groups * c.n_experts), e, i;
        double sum = 0, got;
        moe_data no_y = s->data;
        shake(&m, &rng);
        no_y.labels = NULL;
        no_y.targets = NULL;
        CHECK_STATUS(moe_hme_predict(&m, 20, s->x, s->answer, &error), MOE_OK, "predict");
        CHECK_STATUS(moe_hme_posteriors(&m, &s->data, s->group, s->expert, &error), MOE_OK, "posteriors");
        for (t = 0; t < 20; t++) {
            double prior[MODELS], density[MODELS], mean[MODELS][WIDTH], given = 0, total = 0;
            int k;
            wanted_sample(&m, s, t, prior, density, mean);
            for (e = 0; e < all; e++) given += prior[e] * density[e];
            sum += log(given) / 20;
            for (i = 0; i < (size_t)c.n_groups; i++) {
                double group = 0;
                for (e = i * (size_t)c.n_experts; e < (i + 1) * (size_t)c.n_experts; e++)
                    group += prior[e] * density[e];
                CHECK_CLOSE(s->group[t * (size_t)c.n_groups + i], group / given, 1e-10, "h_i");
                for (e = i * (size_t)c.n_experts; e < (i + 1) * (size_t)c.n_experts; e++)
                    CHECK_CLOSE(s->expert[t * all + e], prior[e] * density[e] / group, 1e-10, "h_{j|i}");
            }
            for (k = 0; k < c.d_out; k++) {
                double y = 0;
                for (e = 0; e < all; e++) y += prior[e] * mean[e][k];
                CHECK_CLOSE(s->answer[t * (size_t)c.d_out + (size_t)k], y, ROUNDING, "prediction");
                CHECK(c.family != MOE_HME_SOFTMAX || s->answer[t * (size_t)c.d_out + (size_t)k] >= 0,
                      "no negative probability");
                total += (double)s->answer[t * (size_t)c.d_out + (size_t)k];
            }
            if (c.family == MOE_HME_SOFTMAX) CHECK_CLOSE(total, 1, ROUNDING, "probabilities sum to 1");
        }
        got = log_likelihood(&m, &s->data);
        CHECK_CLOSE(got, sum, 1e-10, "log-likelihood");
        CHECK_STATUS(moe_hme_posteriors(&m, &no_y, s->group, s->expert, &error), MOE_OK, "gates alone");
        for (t = 0; t < 20; t++) {
            double prior[MODELS], density[MODELS], mean[MODELS][WIDTH];
            wanted_sample(&m, s, t, prior, density, mean);
            for (e = 0; e < all; e++)
                CHECK_CLOSE(s->group[t * (size_t)c.n_groups + e / (size_t)c.n_experts] * s->expert[t * all + e],
                            prior[e], 1e-10, "gates");
        }
        moe_hme_free(&m);
        free(s);
    }
}

/* Gates and logits in the thousands: probabilities stay probabilities, nothing overflows. */
static void test_steep(void) {
    moe_rng rng = {22};
    moe_error error;
    int family;
    for (family = 0; family < MOE_HME_COUNT; family++) {
        moe_hme_config c = hme_config(family, 3, 3, 2, 3);
        moe_hme m = new_hme(&c, 5);
        samples *s = random_samples(50, &c, &rng);
        double sum, group, expert;
        size_t i, k;
        shake(&m, &rng);
        for (i = 0; i < (size_t)(m.variances - m.parameters); i++) m.parameters[i] *= 1e4;
        CHECK(log_likelihood(&m, &s->data) < 0, "a bad fit");
        CHECK_STATUS(moe_hme_posteriors(&m, &s->data, s->group, s->expert, &error), MOE_OK, "posteriors");
        CHECK_STATUS(moe_hme_predict(&m, 50, s->x, s->answer, &error), MOE_OK, "predict");
        for (i = 0; i < 50; i++) {
            for (sum = 0, k = 0; k < 3; k++) sum += (double)s->answer[i * 3 + k];
            if (family == MOE_HME_SOFTMAX) CHECK_CLOSE(sum, 1, ROUNDING, "probabilities sum to 1");
            for (group = 0, k = 0; k < 2; k++) group += s->group[i * 2 + k];
            for (expert = 0, k = 0; k < 3; k++) expert += s->expert[i * 6 + k];
            CHECK_CLOSE(group, 1, 1e-12, "h_i sum to 1");
            CHECK_CLOSE(expert, 1, 1e-12, "h_{j|i} sum to 1");
        }
        moe_hme_free(&m);
        free(s);
    }
}

/* ---- gradients ---- */

/* The expected complete log-likelihood under fixed posteriors h. */
static double expected_complete(const moe_hme *m, const samples *s, const double *h) {
    size_t t, e, all = (size_t)(m->config.n_groups * m->config.n_experts);
    double prior[MODELS], density[MODELS], mean[MODELS][WIDTH], sum = 0;
    for (t = 0; t < s->data.n; t++) {
        wanted_sample(m, s, t, prior, density, mean);
        for (e = 0; e < all; e++) sum += h[t * all + e] * log(prior[e] * density[e]);
    }
    return sum / (double)s->data.n;
}

/* moe_hme_gradient moves along the finite differences of the log-likelihood, and those of the
   expected complete log-likelihood under the E-step's posteriors are the same (Dempster, Laird,
   Rubin 1977). Variances by their logarithm. */
static void test_gradient(void) {
    moe_rng rng = {23};
    moe_error error;
    int run;
    for (run = 0; run < 8; run++) {
        moe_hme_config c = hme_config(run % 2, 1 + run % 3, run < 2 ? 1 : 2, 1 + run / 2 % 3, 1 + run / 3);
        moe_hme m = new_hme(&c, 1);
        samples *s = random_samples(12, &c, &rng);
        double before = 0, kept[200], moved[200], step = 1e-6;
        const moe_real rate = (moe_real)0.0078125;
        size_t i, weights;
        shake(&m, &rng);
        weights = (size_t)(m.variances - m.parameters);
        if (!CHECK(m.n_parameters <= 200, "room in the test")) return;
        memcpy(kept, m.parameters, m.n_parameters * sizeof *kept);
        CHECK_STATUS(moe_hme_gradient(&m, &s->data, rate, s->h, &before, &error), MOE_OK, "gradient");
        memcpy(moved, m.parameters, m.n_parameters * sizeof *kept);
        memcpy(m.parameters, kept, m.n_parameters * sizeof *kept);
        CHECK_CLOSE(before, log_likelihood(&m, &s->data), 1e-14, "the log-likelihood before");
        for (i = 0; i < m.n_parameters; i++) {
            double around[2], complete[2], slope;
            int side;
            if (i >= weights && c.family == MOE_HME_SOFTMAX) {
                CHECK_CLOSE(moved[i], kept[i], 0, "softmax has no variances");
                continue;
            }
            for (side = 0; side < 2; side++) {
                double by = side ? step : -step;
                m.parameters[i] = i < weights ? kept[i] + by : kept[i] * exp(by);
                around[side] = log_likelihood(&m, &s->data);
                complete[side] = expected_complete(&m, s, s->h);
            }
            m.parameters[i] = kept[i];
            slope = (i < weights ? moved[i] - kept[i] : log(moved[i] / kept[i])) / (double)rate;
            CHECK_CLOSE(slope, (around[1] - around[0]) / (2 * step), 1e-6, "gradient of the log-likelihood");
            CHECK_CLOSE(slope, (complete[1] - complete[0]) / (2 * step), 1e-6,
                        "gradient of the expected complete log-likelihood");
        }
        moe_hme_free(&m);
        free(s);
    }
}

static void test_ascent(void) {
    moe_rng rng = {24};
    moe_error error;
    int family;
    for (family = 0; family < MOE_HME_COUNT; family++) {
        moe_hme_config c = hme_config(family, 2, 2, 2, 2);
        moe_hme m = new_hme(&c, 3);
        samples *s = random_samples(60, &c, &rng);
        double first = log_likelihood(&m, &s->data), last = first;
        double now = first;
        int i;
        for (i = 0; i < 200; i++) {
            CHECK_STATUS(moe_hme_gradient(&m, &s->data, (moe_real)0.1, s->h, &now, &error), MOE_OK, "gradient");
            CHECK(now >= last - 1e-12, "small steps only climb");
            last = now;
        }
        CHECK(log_likelihood(&m, &s->data) > first + 0.02, "200 steps climb");
        moe_hme_free(&m);
        free(s);
    }
}

/* ---- EM: what one iteration is ---- */

/* Gaussian experts end at the solution of the normal equations weighted by h, their variances at
   the weighted mean square. */
static void test_least_squares(void) {
    moe_rng rng = {25};
    moe_error error;
    int run;
    for (run = 0; run < 6; run++) {
        moe_hme_config c = hme_config(MOE_HME_GAUSSIAN, 1 + run % 4, 1 + run % 3, 1 + run % 2, 1 + run / 2);
        moe_hme m = new_hme(&c, 1);
        samples *s = random_samples(80, &c, &rng);
        size_t all = (size_t)(c.n_groups * c.n_experts), d = (size_t)c.d_in;
        size_t width = (size_t)c.d_out, e, k, q, t;
        shake(&m, &rng);
        CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, NULL, &error), MOE_OK, "em");
        for (e = 0; e < all; e++) {
            double squares = 0, mass = 0;
            for (t = 0; t < 80; t++) mass += s->h[t * all + e];
            for (k = 0; k < width; k++)
                for (q = 0; q <= d; q++) {
                    double sum = 0;
                    for (t = 0; t < 80; t++) {
                        double gap = (double)s->y[t * width + k] -
                                     row_dot(&m, m.experts + (e * width + k) * (d + 1), s->x + t * d);
                        sum += s->h[t * all + e] * gap * (q < d ? (double)s->x[t * d + q] : 1);
                        if (q == d) squares += s->h[t * all + e] * gap * gap;
                    }
                    CHECK_CLOSE(sum, 0, 1e-6, "normal equations");
                }
            CHECK_CLOSE(m.variances[e], squares / (mass * (double)width), 1e-9, "variance");
        }
        moe_hme_free(&m);
        free(s);
    }
}

/* With IRLS steps to spare, gates and softmax experts end where their weighted log-likelihood is
   flat. */
static void test_flat(void) {
    moe_rng rng = {26};
    moe_error error;
    int run;
    for (run = 0; run < 6; run++) {
        moe_hme_config c = hme_config(run % 2, 2, 2 + run / 4, 1 + run / 2, 3);
        moe_hme m;
        samples *s = random_samples(100, &c, &rng);
        double around[2], step = 1e-5, kept;
        size_t i;
        int side;
        c.steps = 100;
        m = new_hme(&c, 1);
        CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, NULL, &error), MOE_OK, "em");
        for (i = 0; i < m.n_parameters; i++) {
            for (kept = m.parameters[i], side = 0; side < 2; side++) {
                m.parameters[i] = kept + (side ? step : -step);
                around[side] = expected_complete(&m, s, s->h);
            }
            m.parameters[i] = kept;
            CHECK_CLOSE((around[1] - around[0]) / (2 * step), 0, 1e-5, "the maximum of the M-step");
        }
        moe_hme_free(&m);
        free(s);
    }
}

/* One expert without gates is logistic regression: its only maximum. Here of known weights, from
   counts: log odds 0, 1 and 2 thirds. */
static void test_logistic(void) {
    moe_hme_config c = hme_config(MOE_HME_SOFTMAX, 1, 2, 1, 1);
    moe_hme m = new_hme(&c, 9);
    samples *s = new_samples(24);
    moe_error error;
    double slope, bias;
    int i;
    for (i = 0; i < 12; i++) { /* 3 of 12 */
        s->x[i] = 0;
        s->label[i] = i < 3;
    }
    for (i = 12; i < 24; i++) { /* 9 of 12 */
        s->x[i] = 1;
        s->label[i] = i < 21;
    }
    for (i = 0; i < 30; i++) CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, NULL, &error), MOE_OK, "em");
    slope = m.experts[2] - m.experts[0];
    bias = m.experts[3] - m.experts[1];
    CHECK_CLOSE(bias, -log(3.0), 1e-7, "log odds at 0");
    CHECK_CLOSE(slope + bias, log(3.0), 1e-7, "log odds at 1");
    moe_hme_free(&m);
    free(s);
}

/* ---- EM: the log-likelihood never falls ---- */

/* Data of many kinds, half of them degenerate. */
static samples *odd_samples(const moe_hme_config *c, int kind, size_t n, moe_rng *rng) {
    samples *s = random_samples(n, c, rng);
    size_t d = (size_t)c->d_in, width = (size_t)c->d_out, t, q;
    for (t = 0; t < n; t++) {
        moe_real *x = s->x + t * d, *y = s->y + t * width;
        switch (kind) {
        case 1: /* piecewise linear, little noise */
            for (q = 0; q < width; q++) y[q] = (moe_real)(fabs((double)x[0] - 0.3 * (double)q) + 0.01 * (double)y[q]);
            s->label[t] = (int32_t)(x[0] > 0) % (int32_t)width;
            break;
        case 2: /* every sample the same */
            for (q = 0; q < d; q++) x[q] = s->x[q];
            for (q = 0; q < width; q++) y[q] = s->y[q];
            s->label[t] = s->label[0];
            break;
        case 3: /* every feature the same, and one that is always 0 */
            for (q = 0; q < d; q++) x[q] = q + 1 < d || d == 1 ? x[0] : 0;
            break;
        case 4: /* far from 0, and of very different sizes */
            for (q = 0; q < d; q++) x[q] = (moe_real)(1000 + (double)x[q] * pow(10, (double)q - 2));
            for (q = 0; q < width; q++) y[q] = (moe_real)(-500 + 30 * (double)x[0] + 100 * (double)y[q]);
            break;
        case 5: /* interpolated exactly: variances run into their bound */
            for (q = 0; q < width; q++) y[q] = 2 * x[0] - 1;
            s->label[t] = 0;
            break;
        case 6: /* an outlier */
            if (t == 0) {
                x[0] = (moe_real)1e6;
                y[0] = (moe_real)-1e5;
            }
            break;
        default: break;
        }
    }
    return s;
}

static int all_finite(const moe_hme *m) {
    size_t i;
    for (i = 0; i < m->n_parameters; i++)
        if (!(fabs(m->parameters[i]) <= 1e300)) return 0;
    return 1;
}

static void test_never_falls(void) {
    enum { PROBLEMS = 240, ITERATIONS = 10 };
    moe_rng rng = {27};
    moe_error error;
    int run, i, climbs = 0, benign = 0;
    int iterations = 0;
    for (run = 0; run < PROBLEMS; run++) {
        int kind = run / 2 % 8;
        int d_in = 1 + (int)below(&rng, 5), d_out = 1 + (int)below(&rng, 4);
        int groups = 1 + (int)below(&rng, 3);
        moe_hme_config c = hme_config(run % 2, d_in, d_out, groups, 1 + (int)below(&rng, 4));
        size_t n = kind == 7 ? below(&rng, 3) : 1 + below(&rng, 60), t, e, all;
        samples *s = odd_samples(&c, kind, n, &rng);
        moe_hme m;
        double last, now = 0, first;
        c.steps = (int)below(&rng, 4);
        if (run % 5 == 0) c.variance = (moe_real)0.3;
        m = new_hme(&c, (uint64_t)run);
        if (run % 3 == 0) shake(&m, &rng);
        all = (size_t)(m.config.n_groups * m.config.n_experts);
        first = last = log_likelihood(&m, &s->data);
        for (i = 0; i < ITERATIONS; i++) {
            if (!CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, &now, &error), MOE_OK, "em"))
                printf("        %s\n", error.message);
            iterations++;
            if (!CHECK(now >= last, "the log-likelihood fell"))
                printf("        run %d, iteration %d: %.17g to %.17g\n", run, i, last, now);
            if (kind < 2 && n > 20 && i == 0 && (c.family == MOE_HME_GAUSSIAN || c.d_out > 1)) {
                benign++;
                climbs += now > first + 1e-4;
            }
            for (t = 0; t < n; t++) {
                double sum = 0;
                for (e = 0; e < all; e++) sum += s->h[t * all + e];
                if (fabs(sum - 1) > 1e-10) CHECK(0, "posteriors sum to 1");
            }
            last = now;
        }
        CHECK_CLOSE(log_likelihood(&m, &s->data), now, 1e-13, "what em says is what it is");
        CHECK(all_finite(&m), "parameters are finite");
        for (e = 0; e < all; e++) {
            if (c.variance > 0 && !(run % 3 == 0)) CHECK_CLOSE(m.variances[e], c.variance, 0, "a fixed variance stays");
            CHECK(m.variances[e] >= (double)m.config.min_variance, "variances stay above their bound");
        }
        if (n == 0) CHECK_CLOSE(now, 0, 0, "no samples");
        moe_hme_free(&m);
        free(s);
    }
    CHECK(iterations == PROBLEMS * ITERATIONS, "all ran");
    CHECK(benign > 20 && climbs == benign, "the first iteration of an ordinary problem climbs");
}

/* Long after it has converged, where only rounding is left to make it fall. */
static void test_converged(void) {
    moe_rng rng = {34};
    moe_error error;
    int run, i;
    for (run = 0; run < 4; run++) {
        moe_hme_config c = hme_config(run % 2, 2, 2, 1 + run / 2, 2);
        moe_hme m = new_hme(&c, (uint64_t)run);
        samples *s = random_samples(40, &c, &rng);
        double last = log_likelihood(&m, &s->data), now = last;
        size_t t;
        for (t = 0; t < 40; t++) s->y[2 * t] += s->x[2 * t] > 0 ? 3 * s->x[2 * t] : 0;
        last = log_likelihood(&m, &s->data);
        for (i = 0; i < 600; i++) {
            CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, &now, &error), MOE_OK, "em");
            if (!CHECK(now >= last, "the log-likelihood fell")) break;
            last = now;
        }
        moe_hme_free(&m);
        free(s);
    }
}

/* A feature that stands there twice and one that is always 0 change nothing: both problems end at
   the same fit, in both families. */
static void test_singular(void) {
    moe_rng rng = {35};
    moe_error error;
    int family, i;
    for (family = 0; family < MOE_HME_COUNT; family++) {
        moe_hme_config narrow = hme_config(family, 1, 2, 1, 1), wide = hme_config(family, 3, 2, 1, 1);
        moe_hme m = new_hme(&narrow, 1), singular = new_hme(&wide, 2);
        samples *s = random_samples(50, &narrow, &rng), *w = random_samples(50, &wide, &rng);
        double best = 0, now = 0;
        size_t t;
        for (t = 0; t < 50; t++) {
            s->y[2 * t] += s->x[t];
            s->label[t] = 2 * normal(&rng) < (double)s->x[t];
            w->x[3 * t] = w->x[3 * t + 2] = s->x[t];
            w->x[3 * t + 1] = 0;
            w->y[2 * t] = s->y[2 * t];
            w->y[2 * t + 1] = s->y[2 * t + 1];
            w->label[t] = s->label[t];
        }
        for (i = 0; i < 10; i++) {
            CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, &best, &error), MOE_OK, "em");
            CHECK_STATUS(moe_hme_em(&singular, &w->data, w->h, &now, &error), MOE_OK, "em");
        }
        CHECK_CLOSE(now, best, 1e-9, "singular equations are solved all the same");
        moe_hme_free(&m);
        moe_hme_free(&singular);
        free(s);
        free(w);
    }
}

/* Gates that start wrong by far: the curvature there is 0 to all digits, and still a few steps turn
   them round. */
static void test_wrong_gate(void) {
    moe_hme_config c = hme_config(MOE_HME_SOFTMAX, 1, 2, 1, 1);
    moe_hme m = new_hme(&c, 1);
    moe_error error;
    samples *s = new_samples(40);
    double now = 0;
    int i;
    /* some on the wrong side */
    for (i = 0; i < 40; i++) {
        s->x[i] = (moe_real)(i - 19.5) / 10;
        s->label[i] = (i > 19) != (i % 8 == 0);
    }
    m.experts[0] = 100;
    m.experts[1] = 0;
    m.experts[2] = -100;
    m.experts[3] = 0;
    for (i = 0; i < 30; i++) CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, &now, &error), MOE_OK, "em");
    moe_hme_free(&m);
    m = new_hme(&c, 1);
    for (i = 0; i < 30; i++) CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, NULL, &error), MOE_OK, "em");
    CHECK_CLOSE(now, log_likelihood(&m, &s->data), 1e-6, "the maximum is the same from anywhere");
    moe_hme_free(&m);
    free(s);
}

/* Data that an expert fits exactly: the variance stops at its bound, also at one above 1, and the
   log-likelihood with it. */
static void test_bound(void) {
    static const double bounds[] = {0.0009765625, 4};
    moe_hme_config c = hme_config(MOE_HME_GAUSSIAN, 2, 3, 1, 1);
    moe_rng rng = {28};
    moe_error error;
    double now = 0;
    size_t t, i, k;
    for (k = 0; k < 2; k++) {
        moe_hme m;
        samples *s;
        c.min_variance = (moe_real)bounds[k];
        m = new_hme(&c, 1);
        s = random_samples(30, &c, &rng);
        for (t = 0; t < 30; t++)
            for (i = 0; i < 3; i++) s->y[t * 3 + i] = (s->x[t * 2] - 2 * s->x[t * 2 + 1]) / 8;
        for (i = 0; i < 5; i++) CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, &now, &error), MOE_OK, "em");
        CHECK_CLOSE(m.variances[0], bounds[k], 0, "the bound");
        CHECK_CLOSE(now, -1.5 * log(2 * 3.14159265358979324 * bounds[k]), 1e-6, "the log-likelihood at the bound");
        moe_hme_free(&m);
        free(s);
    }
}

/* Squares beyond the numbers: no likelihood is left to compare, and still all is finite. */
static void test_huge(void) {
    moe_hme_config c = hme_config(MOE_HME_GAUSSIAN, 2, 1, 2, 2);
    moe_hme m = new_hme(&c, 1);
    moe_rng rng = {36};
    moe_error error;
    samples *s = random_samples(20, &c, &rng);
    double before, now = 0;
    size_t t;
    for (t = 0; t < 20; t++) s->y[t] *= (moe_real)(MOE_REAL_IS_DOUBLE ? 1e200 : 1e30);
    before = log_likelihood(&m, &s->data);
    for (t = 0; t < 3; t++) CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, &now, &error), MOE_OK, "em");
    CHECK(now >= before && all_finite(&m), "parameters are finite");
    CHECK_STATUS(moe_hme_posteriors(&m, &s->data, s->group, s->expert, &error), MOE_OK, "posteriors");
    for (t = 0; t < 20; t++) CHECK_CLOSE(s->group[2 * t] + s->group[2 * t + 1], 1, 1e-12, "posteriors");
    moe_hme_free(&m);
    free(s);
}

/* The top gate gives group 1 nothing at all: it stays as it was, bit for bit, and the rest
   learns. */
static void test_empty_group(void) {
    moe_rng rng = {29};
    moe_error error;
    int family;
    for (family = 0; family < MOE_HME_COUNT; family++) {
        moe_hme_config c = hme_config(family, 2, 2, 2, 2);
        moe_hme m = new_hme(&c, 4), before;
        samples *s = random_samples(40, &c, &rng);
        double gates[6], experts[12], variances[2], first, now = 0;
        size_t t;
        memset(m.gate, 0, 6 * sizeof *m.gate);
        m.gate[2] = 1e4; /* bias of group 0 */
        memcpy(gates, m.gates + 6, sizeof gates);
        memcpy(experts, m.experts + 12, sizeof experts);
        memcpy(variances, m.variances + 2, sizeof variances);
        before = m;
        first = log_likelihood(&m, &s->data);
        for (t = 0; t < 5; t++) CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, &now, &error), MOE_OK, "em");
        for (t = 0; t < 40; t++) CHECK_CLOSE(s->h[t * 4 + 2] + s->h[t * 4 + 3], 0, 0, "the group has nothing");
        CHECK(now > first + 1e-3, "the other group learns");
        CHECK(memcmp(gates, m.gates + 6, sizeof gates) == 0 && memcmp(experts, m.experts + 12, sizeof experts) == 0 &&
                  memcmp(variances, m.variances + 2, sizeof variances) == 0, "the empty group stays");
        CHECK(before.memory == m.memory, "em moves no memory");
        CHECK_STATUS(moe_hme_posteriors(&m, &s->data, s->group, s->expert, &error), MOE_OK, "posteriors");
        for (t = 0; t < 40; t++)
            CHECK_CLOSE(s->expert[t * 4 + 2] + s->expert[t * 4 + 3], 1, 1e-12, "h_{j|i} of a group without mass");
        moe_hme_free(&m);
        free(s);
    }
}

/* ---- EM finds things ---- */

/* Mean squared error of the mixture after so many iterations. */
static double fitted(int groups, int experts, samples *s, uint64_t seed, int iterations) {
    moe_hme_config c = hme_config(MOE_HME_GAUSSIAN, 1, 1, groups, experts);
    moe_hme m = new_hme(&c, seed);
    moe_error error;
    double sum = 0;
    size_t t;
    while (iterations-- > 0) CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, NULL, &error), MOE_OK, "em");
    CHECK_STATUS(moe_hme_predict(&m, s->data.n, s->x, s->answer, &error), MOE_OK, "predict");
    for (t = 0; t < s->data.n; t++) sum += pow((double)s->answer[t] - (double)s->y[t], 2) / (double)s->data.n;
    moe_hme_free(&m);
    return sum;
}

static void test_piecewise_linear(void) {
    moe_rng rng = {30};
    samples *s = new_samples(300);
    double line;
    int seed, good = 0;
    size_t t;
    for (t = 0; t < 300; t++) {
        s->x[t] = (moe_real)(4 * uniform(&rng) - 2);
        s->y[t] = (moe_real)(fabs((double)s->x[t]) + 0.05 * normal(&rng));
    }
    line = fitted(1, 1, s, 1, 3);
    CHECK(line > 0.2, "one line does not fit");
    for (seed = 0; seed < 8; seed++) good += fitted(2, 2, s, (uint64_t)seed, 30) < 0.03 * line;
    CHECK(good >= 7, "two groups of two lines do, from nearly every start");
    free(s);
}

/* Which side of a cross a point is on: no linear classifier does better than chance. */
static void test_cross(void) {
    moe_hme_config c = hme_config(MOE_HME_SOFTMAX, 2, 2, 2, 2);
    moe_rng rng = {31};
    moe_error error;
    samples *s = random_samples(300, &c, &rng);
    int seed, good = 0, i;
    size_t t, right;
    for (t = 0; t < 300; t++) s->label[t] = (s->x[2 * t] > 0) == (s->x[2 * t + 1] > 0);
    for (seed = 0; seed < 8; seed++) {
        moe_hme m = new_hme(&c, (uint64_t)seed);
        for (i = 0; i < 40; i++) CHECK_STATUS(moe_hme_em(&m, &s->data, s->h, NULL, &error), MOE_OK, "em");
        CHECK_STATUS(moe_hme_predict(&m, 300, s->x, s->answer, &error), MOE_OK, "predict");
        for (right = 0, t = 0; t < 300; t++) right += (s->answer[2 * t + 1] > s->answer[2 * t]) == (s->label[t] == 1);
        good += right > 285;
        moe_hme_free(&m);
    }
    CHECK(good >= 5, "a mixture of linear classifiers does, from most starts");
    free(s);
}

/* ---- making, refusing, freeing ---- */

static void test_create(void) {
    moe_hme_config c = hme_config(MOE_HME_GAUSSIAN, 3, 2, 0, 0);
    moe_hme m = new_hme(&c, 7), same = new_hme(&c, 7);
    moe_hme other = new_hme(&c, 8), none;
    moe_error error;
    CHECK(m.config.n_groups == 2 && m.config.n_experts == 2 && m.config.steps == 2, "defaults");
    CHECK_CLOSE(m.config.min_variance, 1e-6, 1e-12, "that of the variance");
    CHECK(m.n_parameters == 2 * 4 + 4 * 4 + 8 * 4 + 4, "parameters");
    CHECK(m.gate == m.parameters && m.gates == m.gate + 8 && m.experts == m.gates + 16 && m.variances == m.experts + 32,
          "places");
    CHECK_CLOSE(m.variances[3], 1, 0, "variances start at 1");
    CHECK(memcmp(m.parameters, same.parameters, m.n_parameters * sizeof(double)) == 0, "the same seed");
    CHECK(memcmp(m.parameters, other.parameters, m.n_parameters * sizeof(double)) != 0, "another seed");
    moe_hme_free(&m);
    moe_hme_free(&m);
    moe_hme_free(&same);
    moe_hme_free(&other);
    moe_hme_free(NULL);
    memset(&none, 0, sizeof none);
    moe_hme_free(&none);
    CHECK_REFUSED(moe_hme_create(NULL, &c, 1, NULL, &error), MOE_ERR_ARGUMENT, "hme");
    CHECK_REFUSED(moe_hme_create(&none, NULL, 1, NULL, &error), MOE_ERR_ARGUMENT, "config");
#define REFUSED(change, words) \
    do { \
        moe_hme_config bad = c; \
        change; \
        CHECK_REFUSED(moe_hme_create(&none, &bad, 1, NULL, &error), MOE_ERR_CONFIG, words); \
        CHECK(none.memory == NULL, "untouched"); \
    } while (0)
    REFUSED(bad.d_in = 0, "d_in = 0");
    REFUSED(bad.d_in = -1, "d_in = -1");
    REFUSED(bad.d_out = 0, "d_out = 0");
    REFUSED(bad.n_groups = -2, "n_groups = -2");
    REFUSED(bad.n_experts = 100000, "n_experts = 100000");
    REFUSED(bad.family = MOE_HME_COUNT, "family = 2: must be a constant for one of gaussian, softmax");
    REFUSED(bad.steps = 101, "steps = 101");
    REFUSED(bad.variance = -1, "variance = -1");
    REFUSED(bad.variance = not_a_number(), "variance = nan");
    REFUSED(bad.min_variance = (moe_real)1e13, "min_variance = ");
#undef REFUSED
    c.n_groups = c.n_experts = MOE_MAX_EXPERTS;
    c.d_in = c.d_out = MOE_MAX_WIDTH;
    CHECK_REFUSED(moe_hme_create(&none, &c, 1, NULL, &error), MOE_ERR_OVERFLOW, "memory");
}

static void test_memory(void) {
    moe_hme_config c = hme_config(MOE_HME_SOFTMAX, 3, 4, 3, 2);
    test_heap place;
    moe_allocator allocator;
    moe_error error;
    moe_hme m;
    samples *s;
    moe_rng rng = {32};
    double h[10 * 6];
    allocator = test_allocator(&place, 1);
    place.fail_on = 1;
    memset(&m, 0x55, sizeof m);
    CHECK_REFUSED(moe_hme_create(&m, &c, 1, &allocator, &error), MOE_ERR_MEMORY, "no memory");
    CHECK(m.n_parameters == (size_t)-1 / 3, "untouched"); /* 0x5555... */
    place.fail_at = 0;
    if (!CHECK_STATUS(moe_hme_create(&m, &c, 1, &allocator, &error), MOE_OK, "create")) return;
    CHECK(place.blocks == 1 && place.bytes == m.memory_size, "one block");
    place.fail_at = 1; /* from here on nothing may ask for memory */
    s = random_samples(10, &c, &rng);
    CHECK_STATUS(moe_hme_em(&m, &s->data, h, NULL, &error), MOE_OK, "em");
    CHECK_STATUS(moe_hme_gradient(&m, &s->data, 1, h, NULL, &error), MOE_OK, "gradient");
    CHECK_STATUS(moe_hme_posteriors(&m, &s->data, s->group, s->expert, &error), MOE_OK, "posteriors");
    CHECK_STATUS(moe_hme_predict(&m, 10, s->x, s->answer, &error), MOE_OK, "predict");
    moe_hme_free(&m);
    CHECK(place.blocks == 0 && !place.wrong_size && place.calls == 2 && m.memory == NULL,
          "all given back, and nothing grew");
    free(s);
}

static void refuse_calls(moe_hme *m, samples *s, double *kept) {
    moe_error error;
    double value = 77;
    size_t i;
#if MOE_REAL_IS_DOUBLE
    moe_real was;
#endif
    CHECK_REFUSED(moe_hme_em(NULL, &s->data, s->h, &value, &error), MOE_ERR_ARGUMENT, "NULL");
    CHECK_REFUSED(moe_hme_em(m, NULL, s->h, &value, &error), MOE_ERR_ARGUMENT, "NULL");
    CHECK_REFUSED(moe_hme_em(m, &s->data, NULL, &value, &error), MOE_ERR_ARGUMENT, "NULL");
    CHECK_REFUSED(moe_hme_log_likelihood(m, &s->data, NULL, &error), MOE_ERR_ARGUMENT, "NULL");
    CHECK_REFUSED(moe_hme_posteriors(m, &s->data, NULL, s->expert, &error), MOE_ERR_ARGUMENT, "NULL");
    CHECK_REFUSED(moe_hme_posteriors(m, &s->data, s->group, NULL, &error), MOE_ERR_ARGUMENT, "NULL");
    CHECK_REFUSED(moe_hme_predict(m, 10, s->x, NULL, &error), MOE_ERR_ARGUMENT, "NULL");
    CHECK_REFUSED(moe_hme_gradient(m, &s->data, not_a_number(), s->h, &value, &error), MOE_ERR_ARGUMENT,
                  "rate = nan");
    if (m->config.family == MOE_HME_GAUSSIAN) { /* the same answer of all experts, beyond any moe_real */
        for (i = m->row - 1; i < m->all * m->width * m->row; i += m->row)
            m->experts[i] = MOE_REAL_IS_DOUBLE ? 1.5e308 : 1e60;
        CHECK_REFUSED(moe_hme_predict(m, 10, s->x, s->answer, &error), MOE_ERR_NONFINITE, "y[0] is not finite");
        memcpy(m->parameters, kept, m->n_parameters * sizeof(double));
    }
#if MOE_REAL_IS_DOUBLE
    if (m->config.family == MOE_HME_GAUSSIAN) {
        was = s->y[0];
        s->y[0] = 1e100;
        CHECK_REFUSED(moe_hme_gradient(m, &s->data, 1e250, s->h, &value, &error), MOE_ERR_NONFINITE,
                      "rate = 1e250");
        s->y[0] = was;
    }
    was = s->x[0];
    s->x[0] = 1e308;
    s->x[1] = 1e308;
    m->gate[0] = 1e10;
    m->gate[1] = -1e10;
    CHECK_REFUSED(moe_hme_em(m, &s->data, s->h, &value, &error), MOE_ERR_NONFINITE, "not finite");
    CHECK_REFUSED(moe_hme_predict(m, 10, s->x, s->answer, &error), MOE_ERR_NONFINITE, "y[0] is not finite");
    s->x[0] = s->x[1] = was;
    m->gate[0] = kept[0];
    m->gate[1] = kept[1];
#endif
    CHECK(value > 76 && value < 78, "a failed call gives nothing");
    CHECK(memcmp(kept, m->parameters, m->n_parameters * sizeof(double)) == 0, "a failed call changes nothing");
    s->data.n = 0;
    CHECK_STATUS(moe_hme_em(m, &s->data, NULL, &value, &error), MOE_OK, "no samples");
    CHECK_CLOSE(value, 0, 0, "no samples");
    CHECK_STATUS(moe_hme_gradient(m, &s->data, 1, NULL, &value, &error), MOE_OK, "no samples");
    CHECK_STATUS(moe_hme_predict(m, 0, NULL, NULL, &error), MOE_OK, "no samples");
    CHECK(memcmp(kept, m->parameters, m->n_parameters * sizeof(double)) == 0, "no samples change nothing");
}

static void test_refused_data(void) {
    moe_rng rng = {33};
    moe_error error;
    int family;
    for (family = 0; family < MOE_HME_COUNT; family++) {
        moe_hme_config c = hme_config(family, 2, 3, 2, 2);
        moe_hme m = new_hme(&c, 7), none;
        samples *s = random_samples(10, &c, &rng);
        double kept[100], value = 77;
        moe_real was;
        memset(&none, 0, sizeof none);
        memcpy(kept, m.parameters, m.n_parameters * sizeof(double));
/* All four calls that read y. */
#define REFUSED(wanted, words) \
    do { \
        CHECK_REFUSED(moe_hme_em(&m, &s->data, s->h, &value, &error), wanted, words); \
        CHECK_REFUSED(moe_hme_gradient(&m, &s->data, 1, s->h, &value, &error), wanted, words); \
        CHECK_REFUSED(moe_hme_log_likelihood(&m, &s->data, &value, &error), wanted, words); \
    } while (0)
        was = s->x[7];
        s->x[7] = not_a_number();
        REFUSED(MOE_ERR_NONFINITE, "x[3][1] = nan");
        CHECK_REFUSED(moe_hme_predict(&m, 10, s->x, s->answer, &error), MOE_ERR_NONFINITE, "x[3][1] = nan");
        CHECK_REFUSED(moe_hme_posteriors(&m, &s->data, s->group, s->expert, &error), MOE_ERR_NONFINITE,
                      "x[3][1] = nan");
        s->x[7] = was;
        if (family == MOE_HME_SOFTMAX) {
            s->label[4] = 3;
            REFUSED(MOE_ERR_ARGUMENT, "labels[4] = 3: must be 0 to 2");
            CHECK_REFUSED(moe_hme_posteriors(&m, &s->data, s->group, s->expert, &error), MOE_ERR_ARGUMENT,
                          "labels[4] = 3");
            s->label[4] = -1;
            REFUSED(MOE_ERR_ARGUMENT, "labels[4] = -1");
            s->label[4] = 0;
            s->data.labels = NULL;
            REFUSED(MOE_ERR_ARGUMENT, "labels");
            s->data.labels = s->label;
        } else {
            was = s->y[5];
            s->y[5] = infinite();
            REFUSED(MOE_ERR_NONFINITE, "targets[1][2] = inf");
            s->y[5] = was;
            s->data.targets = NULL;
            REFUSED(MOE_ERR_ARGUMENT, "targets");
            s->data.targets = s->y;
        }
        s->data.x = NULL;
        REFUSED(MOE_ERR_ARGUMENT, "x");
        s->data.x = s->x;
        s->data.n = (size_t)-1 / 4;
        REFUSED(MOE_ERR_OVERFLOW, "too large");
        s->data.n = 10;
#undef REFUSED
        CHECK_REFUSED(moe_hme_em(&none, &s->data, s->h, &value, &error), MOE_ERR_STATE, "not created");
        refuse_calls(&m, s, kept);
        moe_hme_free(&m);
        free(s);
    }
}

int main(void) {
    CASE(test_losses());
    CASE(test_large());
    CASE(test_cut());
    CASE(test_cut_upwards());
    CASE(test_small());
    CASE(test_answers());
    CASE(test_sampled());
    CASE(test_refused_losses());
    CASE(test_accuracy());
    CASE(test_steps_refused());
    CASE(test_label_of_every_row());
    CASE(test_nets_learn());
    CASE(test_nets_refused());
    CASE(test_modular());
    CASE(test_modular_none());
    CASE(test_modular_calls());
    CASE(test_decoupled());
    CASE(test_attentive_teacher());
    CASE(test_probabilities());
    CASE(test_steep());
    CASE(test_gradient());
    CASE(test_ascent());
    CASE(test_least_squares());
    CASE(test_flat());
    CASE(test_logistic());
    CASE(test_never_falls());
    CASE(test_converged());
    CASE(test_singular());
    CASE(test_wrong_gate());
    CASE(test_bound());
    CASE(test_huge());
    CASE(test_empty_group());
    CASE(test_piecewise_linear());
    CASE(test_cross());
    CASE(test_create());
    CASE(test_memory());
    CASE(test_refused_data());
    return test_end();
}
