/* theory.c - what papers prove of routers, and what has to hold of every router whatever its
   numbers: random inputs, many sizes.

     cc -std=c99 -O2 -I. tests/property/theory.c -o theory -lm && ./theory
     (also with -DMOE_REAL=double, and as C++)

   Only what moe_routers.h makes public is used. What a theorem is about (mixing weights, spreads,
   error probabilities, success rates) is computed here once more from its definition, in double.
   Bounds on rounding are multiples of the real type's epsilon, worked out beside each check;
   frequencies must lie within four standard errors. Sizes include one token, one expert, K = E and
   calls with one real token; rows of padding hold NaN. Exit status 1 if a check failed. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../../moe_routers.h"
#include "../test.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MOE_REAL_IS_DOUBLE
#define EPS DBL_EPSILON
#else
#define EPS ((double)FLT_EPSILON)
#endif

enum { POOL_ROOM = 256, MOST_TOKENS = 64, MOST_EXPERTS = 16, MOST_HEADS = 3 };

static int trial_now;
static char trial_text[30]; /* is test_about */
static uint64_t test_now;
static moe_rng rng;
static const moe_kernels *fastest; /* every third trial uses these */
static void *pool[POOL_ROOM];
static size_t pooled;

/* Every trial has a stream of its own, so that one alone can be run again. */
static void begin(int trial) {
    trial_now = trial;
    sprintf(trial_text, "trial %d", trial);
    test_about = trial_text;
    moe_rng_seed(&rng, test_now * 1000003u + (uint64_t)trial);
}

/* Zeroed memory, given back by release in the opposite order. */
static void *pooled_block(size_t count, size_t size) {
    void *p = pooled < POOL_ROOM ? calloc(count > 0 ? count : 1, size) : NULL;
    if (p == NULL) {
        fprintf(stderr, "theory: out of memory\n");
        exit(2);
    }
    pool[pooled++] = p;
    return p;
}

static void release(size_t mark) {
    while (pooled > mark) free(pool[--pooled]);
}

static int below(int n) { return (int)moe_rng_below(&rng, (uint64_t)n); }

static size_t index_below(size_t n) { return (size_t)moe_rng_below(&rng, (uint64_t)n); }

static double normal(void) { return (double)moe_rng_normal(&rng); }

static double uniform(void) { return (double)moe_rng_uniform(&rng); }

static moe_real *normals(size_t count, double spread) {
    moe_real *v = (moe_real *)pooled_block(count, sizeof *v);
    size_t i;
    for (i = 0; i < count; i++) v[i] = (moe_real)(spread * normal());
    return v;
}

static moe_real *copy_of(const moe_real *from, size_t count) {
    moe_real *v = (moe_real *)pooled_block(count, sizeof *v);
    memcpy(v, from, count * sizeof *v);
    return v;
}

static int32_t *copy_of_indices(const int32_t *from, size_t count) {
    int32_t *v = (int32_t *)pooled_block(count, sizeof *v);
    memcpy(v, from, count * sizeof *v);
    return v;
}

static int is_near(double a, double b, double slack) { return fabs(a - b) <= slack; }

static double larger(double a, double b) { return a > b ? a : b; }

static double smaller(double a, double b) { return a < b ? a : b; }

/* Whether what happened count times in n draws has this probability, within four standard errors,
   and one draw since draws are whole. What has probability 0 never happens, and 1 always. */
static int is_share(double count, double probability, size_t n) {
    double mean = (double)n * probability;
    if (probability < 1e-12 || probability > 1.0 - 1e-12) return is_near(count, mean, 0.5);
    return is_near(count, mean, 4.0 * sqrt(mean * (1.0 - probability)) + 1.0);
}

/* ---- a router with random tensors, one call ---- */

typedef struct rig {
    moe_router router;
    moe_call call;
    moe_routing r;
    size_t n, d, experts, k, mark, room;
    moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT], *x;
    unsigned char *mask;
    moe_rng rng;
    void *memory;
} rig;

static moe_real *first_values(const moe_parameter *slot, int place, size_t experts) {
    moe_real *v = normals(slot->count, slot->n_dims == 2 ? 1.5 / sqrt((double)slot->shape[1]) : 0.25);
    size_t i;
    if (place == MOE_ROUTER_TEMPERATURE || place == MOE_ROUTER_SLOT_SCALE) v[0] = 2;
    for (i = 0; i < slot->count && place == MOE_ROUTER_EXPERT_SCALE; i++) v[i] = (moe_real)(1.0 + 0.5 * uniform());
    for (i = 0; i < slot->count && place == MOE_ROUTER_TABLE; i++)
        v[i] = (moe_real)((i / slot->shape[1] * 3 + i % slot->shape[1]) % experts);
    return v;
}

/* Changes fields; tensors that were there stay. */
static int rig_apply(rig *g, const char *settings) {
    moe_router_config c = g->router.config;
    moe_router made;
    moe_error error;
    moe_parameter slot;
    int place;
    error.message[0] = '\0';
    c.preset = MOEI_OF_A_FILE; /* what has no effect is reset */
    if (!CHECK(moe_fields_apply(moe_router_fields(), &c, settings, &error) == MOE_OK &&
                   moe_router_init(&made, &c, trial_now % 3 == 2 ? fastest : NULL, &error) == MOE_OK,
               settings)) {
        printf("  %s\n", error.message);
        return 0;
    }
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++) {
        if (moe_router_parameter(&made.config, place, &slot) != MOE_OK) continue;
        if (g->tensors[place] == NULL) g->tensors[place] = first_values(&slot, place, (size_t)made.config.n_experts);
        made.tensors[place] = g->tensors[place];
    }
    g->router = made;
    return 1;
}

static int rig_set(rig *g, const char *format, ...) {
    char settings[400];
    va_list list;
    va_start(list, format);
    vsnprintf(settings, sizeof settings, format, list);
    va_end(list);
    return rig_apply(g, settings);
}

/* n random tokens of width d for a router of E experts, K of them per token, and further settings.
   Logits have a spread of about 1.5. */
static int rig_start(rig *g, size_t n, size_t d, size_t experts, size_t k, const char *format, ...) {
    char settings[400];
    va_list list;
    memset(g, 0, sizeof *g);
    g->mark = pooled;
    g->n = n;
    g->d = d;
    g->experts = experts;
    g->k = k;
    g->router.config.d_model = (int)d;
    g->router.config.n_experts = (int)experts;
    g->router.config.top_k = (int)k;
    va_start(list, format);
    vsnprintf(settings, sizeof settings, format, list);
    va_end(list);
    if (!rig_apply(g, settings)) return 0;
    g->call.n_tokens = n;
    g->call.x = g->x = normals(n * d, 1.0);
    return 1;
}

static void rig_end(rig *g) { release(g->mark); }

/* Each call draws the same numbers; what an earlier call returned is overwritten. */
static int route(rig *g) {
    size_t size = 0;
    moe_status status = moe_route_size(&g->router, g->n, g->call.training, &size);
    if (size > g->room) {
        g->memory = pooled_block(size, 1);
        g->room = size;
    }
    moe_rng_seed(&g->rng, 5);
    g->call.rng = &g->rng;
    if (status == MOE_OK) status = moe_route(&g->router, &g->call, g->memory, g->room, &g->r);
    if (!CHECK(status == MOE_OK, "routes")) printf("  %s\n", moe_status_text(status));
    return status == MOE_OK;
}

static int is_real(const rig *g, size_t t) { return g->mask == NULL || g->mask[t]; }

static size_t count_real(const rig *g) {
    size_t t, count = 0;
    for (t = 0; t < g->n; t++) count += (size_t)is_real(g, t);
    return count;
}

static void blot(moe_real *row, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) row[i] = (moe_real)nan("");
}

/* Pads about a third of the tokens, or all but one; at least one stays real. */
static void mask_some(rig *g, int all_but_one) {
    size_t t, stays = index_below(g->n);
    g->call.mask = g->mask = (unsigned char *)pooled_block(g->n, 1);
    for (t = 0; t < g->n; t++) {
        g->mask[t] = (unsigned char)(t == stays || (below(3) > 0 && !all_but_one));
        if (!g->mask[t]) blot(g->x + t * g->d, g->d);
    }
}

/* Up to four sequences; some may be empty. */
static void split(rig *g) {
    int32_t *at = (int32_t *)pooled_block(5, sizeof *at);
    size_t i, pieces = 1 + index_below(4);
    for (i = 1; i < pieces; i++) at[i] = at[i - 1] + (int32_t)index_below(g->n - (size_t)at[i - 1] + 1);
    at[pieces] = (int32_t)g->n;
    g->call.sequences = at;
    g->call.n_sequences = pieces;
}

static void sequence_of(const rig *g, size_t t, size_t *from, size_t *to) {
    size_t i = 0;
    *from = 0;
    *to = g->n;
    if (g->call.sequences == NULL) return;
    while ((size_t)g->call.sequences[i + 1] <= t) i++;
    *from = (size_t)g->call.sequences[i];
    *to = (size_t)g->call.sequences[i + 1];
}

/* Padding and sequences in half of the trials each. */
static void vary_call(rig *g, int trial) {
    if (trial % 8 == 3) mask_some(g, 1);
    else if (below(2)) mask_some(g, 0);
    if (below(2)) split(g);
}

static void sizes(int trial, size_t *n, size_t *experts, size_t *k) {
    *n = trial % 8 == 0 ? 1 : 1 + index_below(14);
    *experts = trial % 8 == 1 ? 1 : 1 + index_below(9);
    *k = 1 + index_below(*experts);
    if (trial % 8 == 2) *k = *experts;
}

/* z = x: the tokens are the logits, exactly. */
static void read_logits_from_x(rig *g) {
    size_t e, q;
    for (e = 0; e < g->experts; e++)
        for (q = 0; q < g->d; q++) g->tensors[MOE_ROUTER_WEIGHT][e * g->d + q] = (moe_real)(e == q);
}

static double z_of(const rig *g, size_t t, size_t e) { return (double)g->r.logits[t * g->experts + e]; }
static double gate_of(const rig *g, size_t t, size_t e) { return (double)g->r.gate[t * g->experts + e]; }
static double p_of(const rig *g, size_t t, size_t e) { return (double)g->r.probabilities[t * g->experts + e]; }
static double w_of(const rig *g, size_t t, size_t e) { return (double)g->r.weights[t * g->experts + e]; }
static size_t choice_of(const rig *g, size_t t, size_t i) { return (size_t)g->r.choices[t * g->r.max_choices + i]; }

static int has_chosen(const rig *g, size_t t, size_t e) {
    size_t i;
    for (i = 0; i < (size_t)g->r.n_choices[t]; i++)
        if (choice_of(g, t, i) == e) return 1;
    return 0;
}

/* Gradients of the losses alone, into zeroed dw [E,d] and dx [N,d]. */
static int loss_gradients(rig *g, moe_real *dw, moe_real *dx) {
    moe_real *gradients[MOE_ROUTER_PARAMETER_COUNT];
    size_t pairs = g->r.plan.offsets[g->experts];
    memset(gradients, 0, sizeof gradients);
    gradients[MOE_ROUTER_WEIGHT] = dw;
    memset(g->r.d_weight_in, 0, pairs * sizeof(moe_real));
    memset(g->r.d_weight_out, 0, pairs * sizeof(moe_real));
    return CHECK(moe_route_backward(&g->router, &g->call, &g->r, gradients, dx, NULL) == MOE_OK, "backward");
}

/* ---- small mathematics, in double ---- */

static double x_ln_x(double x) { return x > 0.0 ? x * log(x) : 0.0; }

static double entropy_of(const double *v, size_t n) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < n; i++) sum -= x_ln_x(v[i]);
    return sum;
}

static double row_entropy(const moe_real *v, size_t n) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < n; i++) sum -= x_ln_x((double)v[i]);
    return sum;
}

/* The most that the entropy of n numbers can change when half their summed change is at most apart
   (Fannes; Audenaert). */
static double entropy_slack(double apart, size_t n) {
    double most = 1.0 - 1.0 / (double)n;
    if (n < 2 || apart <= 0.0) return 0.0;
    if (apart > most) apart = most;
    return apart * log(larger((double)n - 1.0, 1.0)) - x_ln_x(apart) - x_ln_x(1.0 - apart);
}

static double largest_of(const moe_real *v, size_t n) {
    double most = 0.0;
    size_t i;
    for (i = 0; i < n; i++) most = larger(most, fabs((double)v[i]));
    return most;
}

/* The upper tail of the standard normal distribution. */
static double normal_tail(double x) { return erfc(x / sqrt(2.0)) / 2.0; }

/* P(B <= most), B binomial. */
static double binomial_at_most(size_t n, double p, size_t most) {
    double sum = 0.0;
    size_t k;
    if (most >= n || p <= 0.0) return 1.0;
    if (p >= 1.0) return 0.0;
    for (k = 0; k <= most; k++)
        sum += exp(lgamma((double)n + 1.0) - lgamma((double)k + 1.0) - lgamma((double)(n - k) + 1.0) +
                   (double)k * log(p) + (double)(n - k) * log1p(-p));
    return smaller(sum, 1.0);
}

/* a[n] becomes its softmax; 0 and nothing done when no entry is above minus infinity. */
static int softmax_of(double *a, size_t n) {
    double most = -HUGE_VAL, sum = 0.0;
    size_t i;
    for (i = 0; i < n; i++) most = larger(most, a[i]);
    if (!(most > -HUGE_VAL)) return 0;
    for (i = 0; i < n; i++) {
        a[i] = exp(a[i] - most);
        sum += a[i];
    }
    for (i = 0; i < n; i++) a[i] /= sum;
    return 1;
}

/* ---- weights ---- */

/* For the softmax gate at T = 1 without refinement the weights sum and softmax are the same number,
   exp(z_e) / sum over S of exp(z), whatever selects S; at T = 2 they are not. */
static void test_sum_is_softmax(void) {
    static const char *const selects[] = {"top_k",    "dense",         "grouped_top_k", "top_p",    "threshold",
                                          "positive", "expert_choice", "affinity",      "sinkhorn", "sample"};
    int trial, differs = 0;
    for (trial = 0; trial < 400; trial++) {
        rig g;
        size_t n, experts, k, t, e, d;
        moe_real *sum;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        d = 1 + index_below(8);
        if (!rig_start(&g, n, d, experts, k, "select=%s weight=sum", selects[trial % 10])) return;
        vary_call(&g, trial);
        g.call.training = below(2);
        if (!route(&g)) return;
        sum = copy_of(g.r.weights, n * experts);
        if (!rig_set(&g, "weight=softmax") || !route(&g)) return;
        for (t = 0; t < n; t++) {
            /* the arguments of exp are rounded by span * EPS at most; then sums of at most E
               numbers */
            double span = 0.0;
            for (e = 0; e < experts && is_real(&g, t); e++) span = larger(span, 2.0 * fabs(z_of(&g, t, e)));
            for (e = 0; e < experts; e++)
                CHECK(is_near((double)sum[t * experts + e], w_of(&g, t, e),
                              EPS * (2.0 * span + 2.0 * (double)experts + 16.0)),
                      "sum and softmax agree");
        }
        if (trial % 10 > 1 || !rig_set(&g, "weight=sum gate_temperature=2") || !route(&g)) {
            rig_end(&g);
            continue;
        }
        for (t = 0; t < n * experts; t++) differs += fabs((double)sum[t] - (double)g.r.weights[t]) > 1e-3;
        rig_end(&g);
    }
    CHECK(differs > 300, "at another temperature they differ");
}

/* ---- refinement ---- */

/* The mixing weights s of one token over heads and tokens, from their definition. */
typedef struct mixing {
    double s[MOST_HEADS * MOST_TOKENS];
    size_t heads;
    double apart; /* the library's s differs from this one by at most so much, in sum: by rounding of the exponents */
    int clear;    /* no entropy is compared with one so near that rounding decides */
} mixing;

/* log s of one pair up to a constant, and what rounding may do to the library's value. exact: all
   products are exact by the choice of numbers. similarity: u_i . W u_j / tau. */
static double similarity_exponent(const rig *g, size_t i, size_t j, int exact, double *off) {
    const moe_router_config *c = &g->router.config;
    const moe_real *u = g->x + i * g->d, *v = g->x + j * g->d;
    const moe_real *matrix = g->tensors[MOE_ROUTER_SIMILARITY];
    double dot = 0.0, size = 0.0;
    double u_length = 0.0, v_length = 0.0;
    double scale = 1.0 / (double)c->similarity_tau;
    size_t q, o;
    for (q = 0; q < g->d; q++) {
        double key = c->similarity_learned ? 0.0 : (double)v[q], key_size = fabs(key);
        for (o = 0; o < g->d && c->similarity_learned; o++) {
            double product = (double)matrix[q * g->d + o] * (double)v[o];
            key += product;
            key_size += fabs(product);
        }
        dot += (double)u[q] * key;
        size += fabs((double)u[q]) * key_size;
        u_length += (double)u[q] * (double)u[q];
        v_length += (double)v[q] * (double)v[q];
    }
    if (c->similarity_scale == MOE_SIMILARITY_RSQRT_D) scale /= sqrt((double)g->d);
    if (c->similarity_scale == MOE_SIMILARITY_L2) scale /= sqrt(u_length * v_length);
    *off = exact ? 0.0 : EPS * 3.0 * ((double)g->d + 4.0) * size * scale;
    return dot * scale;
}

/* attention: log A_hij - |u_i - o_hj|^2 / (2 sigma^2). The library leaves |u_i|^2 out. */
static double attention_exponent(const rig *g, size_t h, size_t i, size_t j, int exact, double *off) {
    const moe_real *u = g->router.config.attention_u == MOE_ATTENTION_U_OUTPUT ? g->call.attention_output : g->x;
    const moe_real *o = g->call.attention_outputs + (h * g->n + j) * g->d;
    double a = (double)g->call.attention_weights[(h * g->n + i) * g->n + j];
    double sigma = (double)g->router.config.attention_sigma;
    double square = 0.0, size = 0.0;
    size_t q;
    *off = 0.0;
    if (!(a > 0.0)) return -HUGE_VAL;
    for (q = 0; q < g->d; q++) {
        double x = (double)u[i * g->d + q], y = (double)o[q];
        square += (x - y) * (x - y);
        size += fabs(x * y) + y * y / 2.0;
    }
    if (!exact) *off = EPS * (((double)g->d + 6.0) * size / (sigma * sigma) + 2.0 * fabs(log(a)));
    return log(a) - square / (2.0 * sigma * sigma);
}

/* The head whose rows have the least mean entropy over the real tokens of a sequence. */
static size_t sharpest_head(const rig *g, size_t from, size_t to) {
    double best = HUGE_VAL, sum;
    size_t h, t, at = 0;
    for (h = 0; h < (size_t)g->router.config.heads; h++) {
        for (t = from, sum = 0.0; t < to; t++)
            if (is_real(g, t)) sum += row_entropy(g->call.attention_weights + (h * g->n + t) * g->n, g->n);
        if (sum < best) {
            best = sum;
            at = h;
        }
    }
    return at;
}

/* Whether j may take part in refining i. */
static int takes_part(const rig *g, size_t i, size_t j, int *clear) {
    const moe_router_config *c = &g->router.config;
    double mine = row_entropy(g->r.gate + i * g->experts, g->experts), other;
    if (!is_real(g, j) || (c->causal && j > i)) return 0;
    if (!c->lower_entropy_only || i == j) return 1;
    other = row_entropy(g->r.gate + j * g->experts, g->experts);
    /* each of E terms p log p is at most 1/e and rounded a few times */
    if (mine < other || mine > other) *clear &= fabs(mine - other) > EPS * 8.0 * (double)g->experts;
    return other <= mine;
}

static void mixing_of(const rig *g, size_t i, int exact, mixing *m) {
    const moe_router_config *c = &g->router.config;
    size_t from, to, first = 0, end = 1, h, j;
    double off, most = 0.0;
    sequence_of(g, i, &from, &to);
    if (c->refine == MOE_REFINE_ATTENTION) {
        if (c->attention_heads == MOE_HEADS_ALL) end = (size_t)c->heads;
        else {
            first = c->attention_heads == MOE_HEADS_FIXED ? (size_t)c->attention_head : sharpest_head(g, from, to);
            end = first + 1;
        }
    }
    m->heads = (size_t)c->heads;
    m->clear = 1;
    for (j = 0; j < m->heads * g->n; j++) m->s[j] = -HUGE_VAL;
    for (h = first; h < end; h++)
        for (j = from; j < to; j++) {
            if (!takes_part(g, i, j, &m->clear)) continue;
            m->s[h * g->n + j] = c->refine == MOE_REFINE_ATTENTION ? attention_exponent(g, h, i, j, exact, &off)
                                                                   : similarity_exponent(g, i, j, exact, &off);
            most = larger(most, off);
        }
    m->apart = expm1(smaller(2.0 * most, 50.0)) + EPS * ((double)(m->heads * g->n) + 8.0);
    if (softmax_of(m->s, m->heads * g->n)) return;
    /* nobody takes part: p_i = r_i */
    for (j = 0; j < m->heads * g->n; j++) m->s[j] = j == first * g->n + i ? 1.0 : 0.0;
}

/* p_i = sum_j s_ij r_j, and its entropy is between the mean of the entropies and that plus H(s_i).
   Returns how many rows said something: where rounding of s may be large, nothing can be seen. */
static int check_entropies(const rig *g, int exact) {
    size_t i, j, e;
    int seen = 0;
    for (i = 0; i < g->n; i++) {
        mixing m;
        double mean = 0.0, own, got, slack;
        if (!is_real(g, i)) continue;
        mixing_of(g, i, exact, &m);
        if (!m.clear || m.apart > 0.05) continue;
        seen++;
        for (e = 0; e < g->experts; e++) {
            double want = 0.0;
            for (j = 0; j < m.heads * g->n; j++) want += m.s[j] > 0.0 ? m.s[j] * gate_of(g, j % g->n, e) : 0.0;
            CHECK(is_near(p_of(g, i, e), want, m.apart), "p is the mixture of r by s");
        }
        for (j = 0; j < m.heads * g->n; j++)
            if (m.s[j] > 0.0) mean += m.s[j] * row_entropy(g->r.gate + j % g->n * g->experts, g->experts);
        own = entropy_of(m.s, m.heads * g->n);
        got = row_entropy(g->r.probabilities + i * g->experts, g->experts);
        slack = entropy_slack(m.apart, g->experts) + EPS * 8.0 * (double)g->experts;
        CHECK(got <= mean + own + slack, "H(p) <= sum s H(r) + H(s)");
        CHECK(got >= mean - slack, "H(p) >= sum s H(r)");
    }
    return seen;
}

/* Seven values from 1e-3 to 1e3; powers of two where products must be exact. */
static double grid_value(int i, int exact) {
    static const int exponents[7] = {-10, -7, -3, 0, 3, 7, 10};
    return exact ? ldexp(1.0, exponents[i]) : pow(10.0, (double)i - 3.0);
}

/* Multiples of 1/4 in -2 .. 2: sums of their products are exact in both real types. */
static void make_quarters(moe_real *v, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) v[i] = (moe_real)((double)(below(17) - 8) / 4.0);
}

/* Similarity: H(p_i) <= sum_j s_ij H(r_j) + H(s_i) at every tau, because p_i is the distribution of
   what is drawn from r_j when j is drawn from s_i: H(p) <= H(j, e) = H(s) + sum s H(r). Concavity
   of H gives the lower bound sum_j s_ij H(r_j). */
static void test_entropy_of_similarity(void) {
    static const char *const scales[] = {"none", "l2", "rsqrt_d"};
    int trial, seen = 0, rows = 0;
    for (trial = 0; trial < 560; trial++) {
        rig g;
        int exact = trial % 2, learned, low, causal;
        size_t n, experts, k, d;
        begin(trial);
        sizes(trial / 2, &n, &experts, &k);
        d = 1 + index_below(6);
        learned = below(2) && !exact;
        low = below(3) == 0;
        causal = below(3) == 0;
        if (!rig_start(&g, n, d, experts, k,
                       "refine=similarity similarity_tau=%.17g similarity_scale=%s similarity_learned=%d "
                       "lower_entropy_only=%d causal=%d",
                       grid_value(trial % 7, exact), scales[exact ? 0 : trial / 7 % 3], learned, low, causal))
            return;
        if (exact) make_quarters(g.x, n * d);
        vary_call(&g, trial / 2);
        if (!route(&g)) return;
        seen += check_entropies(&g, exact);
        rows += (int)count_real(&g);
        rig_end(&g);
    }
    CHECK(seen * 4 > rows * 3, "most rows can be judged");
}

/* A [heads,N,N] and o [heads,N,d]: each row of A spreads over the real tokens of its sequence, with
   some entries 0 and some rows 0; plain: entries are 0 or 1. Rows of padding hold NaN, its columns
   0. */
static void supply_attention(rig *g, size_t heads, int plain) {
    moe_real *a = (moe_real *)pooled_block(heads * g->n * g->n, sizeof *a), *o = normals(heads * g->n * g->d, 1.0);
    size_t h, i, j, from, to;
    if (plain) make_quarters(o, heads * g->n * g->d);
    for (h = 0; h < heads; h++)
        for (i = 0; i < g->n; i++) {
            moe_real *row = a + (h * g->n + i) * g->n;
            double sum = 0.0;
            int none = below(20) == 0;
            if (!is_real(g, i)) {
                blot(row, g->n);
                blot(o + (h * g->n + i) * g->d, g->d);
                continue;
            }
            sequence_of(g, i, &from, &to);
            for (j = from; j < to; j++) {
                double weight = plain ? 1.0 : exp(2.0 * normal());
                int there = below(4) > 0 || j == i;
                if (is_real(g, j) && there && !none) {
                    row[j] = (moe_real)weight;
                    sum += weight;
                }
            }
            for (j = from; j < to && sum > 0.0 && !plain; j++) row[j] = (moe_real)((double)row[j] / sum);
        }
    g->call.attention_weights = a;
    g->call.attention_outputs = o;
}

/* Attention: the same bound at every sigma, with s the posterior over the tokens of one head, or
   over heads and tokens (all: the weight of head and token is proportional to A_hij exp(-|u_i -
   o_hj|^2 / (2 sigma^2))). */
static void test_entropy_of_attention(void) {
    static const char *const which[] = {"min_entropy", "all", "fixed"};
    int trial, seen = 0, rows = 0;
    for (trial = 0; trial < 840; trial++) {
        rig g;
        int exact = trial % 2, low, output, head;
        size_t n, experts, k, d, heads;
        begin(trial);
        sizes(trial / 2, &n, &experts, &k);
        d = 1 + index_below(6);
        heads = 1 + index_below(MOST_HEADS);
        low = below(3) == 0;
        output = below(2);
        head = (int)index_below(heads);
        if (!rig_start(&g, n, d, experts, k,
                       "refine=attention attention_sigma=%.17g attention_heads=%s attention_head=%d heads=%d "
                       "lower_entropy_only=%d attention_u=%s",
                       grid_value(trial % 7, exact), which[trial / 7 % 3], head, (int)heads, low,
                       output ? "output" : "input"))
            return;
        g.call.attention_output = normals(n * d, 1.0);
        if (exact) {
            make_quarters(g.x, n * d);
            g.call.attention_output = copy_of(g.x, n * d);
        }
        vary_call(&g, trial / 2);
        supply_attention(&g, heads, exact);
        if (!route(&g)) return;
        seen += check_entropies(&g, exact);
        rows += (int)count_real(&g);
        rig_end(&g);
    }
    CHECK(seen * 4 > rows * 3, "most rows can be judged");
}

/* One token per expert, z the unit matrix, gate identity: row i of p is then the posterior of token
   i itself. The query is the attention output, so that x is free for that. */
static int start_posterior(rig *g, size_t m, size_t heads, const char *settings) {
    size_t t;
    if (!rig_start(g, m, m, m, 1, "gate=identity weight=raw refine=attention attention_u=output heads=%d %s",
                   (int)heads, settings))
        return 0;
    read_logits_from_x(g);
    memset(g->x, 0, m * m * sizeof *g->x);
    for (t = 0; t < m; t++) g->x[t * m + t] = 1;
    return 1;
}

/* A multi-head attention in double: A [heads,m,m], o [heads,m,d] with o_hj = H W_O,h W_V,h x_j, and
   the output y [m,d] as the concatenation of the heads' results times W_O. */
typedef struct tiny_attention {
    size_t count, m, d, width; /* heads, tokens, features, features per head */
    double a[3 * 6 * 6], o[3 * 6 * 6], y[6 * 6];
} tiny_attention;

static void fill_normal(double *v, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) v[i] = normal();
}

/* out = matrix [rows,columns] v */
static void multiply(const double *matrix, size_t rows, size_t columns, const double *v, double *out) {
    size_t i, j;
    for (i = 0; i < rows; i++)
        for (j = 0, out[i] = 0.0; j < columns; j++) out[i] += matrix[i * columns + j] * v[j];
}

static void run_attention(tiny_attention *t) {
    double x[36], wq[18], wk[18], wv[18], wo[3 * 18], query[3], key[3], value[3], joined[6][9];
    size_t h, i, j, q, all = t->count * t->width;
    fill_normal(x, t->m * t->d);
    fill_normal(wo, t->d * all);
    for (h = 0; h < t->count; h++) {
        fill_normal(wq, t->width * t->d);
        fill_normal(wk, t->width * t->d);
        fill_normal(wv, t->width * t->d);
        for (i = 0; i < t->m; i++) {
            double *row = t->a + (h * t->m + i) * t->m;
            multiply(wq, t->width, t->d, x + i * t->d, query);
            for (j = 0; j < t->m; j++) {
                multiply(wk, t->width, t->d, x + j * t->d, key);
                for (q = 0, row[j] = 0.0; q < t->width; q++) row[j] += query[q] * key[q] / sqrt((double)t->width);
            }
            softmax_of(row, t->m);
            for (q = 0; q < t->width; q++) joined[i][h * t->width + q] = 0.0;
            for (j = 0; j < t->m; j++) {
                multiply(wv, t->width, t->d, x + j * t->d, value);
                for (q = 0; q < t->width; q++) joined[i][h * t->width + q] += row[j] * value[q];
            }
        }
        for (j = 0; j < t->m; j++) {
            multiply(wv, t->width, t->d, x + j * t->d, value);
            for (i = 0; i < t->d; i++) {
                double *o = t->o + (h * t->m + j) * t->d + i;
                for (q = 0, *o = 0.0; q < t->width; q++)
                    *o += (double)t->count * wo[i * all + h * t->width + q] * value[q];
            }
        }
    }
    for (i = 0; i < t->m; i++) multiply(wo, t->d, all, joined[i], t->y + i * t->d);
}

static moe_real *rounded(const double *v, size_t n) {
    moe_real *out = (moe_real *)pooled_block(n, sizeof *out);
    size_t i;
    for (i = 0; i < n; i++) out[i] = (moe_real)v[i];
    return out;
}

/* With o_hj = H W_O,h W_V,h x_j the mean over heads of sum_j A_hij o_hj is the attention output
   y_i; so it is with the library's own posteriors in place of A when sigma is so large that they
   are A. */
static void test_attention_output(void) {
    int trial;
    for (trial = 0; trial < 60; trial++) {
        tiny_attention t;
        double mean[36] = {0}, seen[36] = {0};
        double size = 0.0;
        size_t h, i, j, q;
        rig g;
        begin(trial);
        memset(&t, 0, sizeof t);
        t.count = 1 + index_below(3);
        t.m = t.d = 1 + index_below(6);
        t.width = 1 + index_below(3);
        run_attention(&t);
        for (i = 0; i < t.count * t.m * t.d; i++) size += fabs(t.o[i]);
        if (!start_posterior(&g, t.m, t.count, "attention_heads=fixed attention_sigma=1e6")) return;
        g.call.attention_weights = rounded(t.a, t.count * t.m * t.m);
        g.call.attention_outputs = rounded(t.o, t.count * t.m * t.d);
        g.call.attention_output = rounded(t.y, t.m * t.d);
        for (h = 0; h < t.count; h++) {
            if (!rig_set(&g, "attention_head=%d", (int)h) || !route(&g)) return;
            for (i = 0; i < t.m; i++)
                for (j = 0; j < t.m; j++)
                    for (q = 0; q < t.d; q++) {
                        double o = t.o[(h * t.m + j) * t.d + q] / (double)t.count;
                        mean[i * t.d + q] += t.a[(h * t.m + i) * t.m + j] * o;
                        seen[i * t.d + q] += p_of(&g, i, j) * o;
                    }
        }
        for (i = 0; i < t.m * t.d; i++) {
            CHECK(is_near(mean[i], t.y[i], DBL_EPSILON * 64.0 * size), "the mean over heads is the output");
            /* exponents |u - o|^2 / 2e12 are below 1e-8 for these numbers */
            CHECK(is_near(seen[i], t.y[i], (EPS * 32.0 + 1e-8) * size),
                  "and so it is with the posteriors of a large sigma");
        }
        rig_end(&g);
    }
}

/* attention_u = output with the attention output y is attention_u = input when u is y: the same
   bits forward, and the gradients that go to y and to x add up to the one that goes to u. */
static void test_attention_of_output(void) {
    static const char *const which[] = {"min_entropy", "all", "fixed"};
    int trial;
    for (trial = 0; trial < 120; trial++) {
        rig g;
        size_t n, experts, k, d, heads, i, cells;
        moe_real *p, *weights, *dx, *dx_split, *d_output, *d_weight, *gradients[MOE_ROUTER_PARAMETER_COUNT];
        double most = 0.0;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        d = 1 + index_below(6);
        heads = 1 + index_below(3);
        cells = n * experts;
        if (!rig_start(&g, n, d, experts, k, "refine=attention attention_heads=%s heads=%d", which[trial % 3],
                       (int)heads))
            return;
        vary_call(&g, trial);
        supply_attention(&g, heads, 0);
        g.call.attention_output = g.x;
        g.call.training = 1;
        dx = normals(n * d, 0.0);
        dx_split = normals(n * d, 0.0);
        d_output = normals(n * d, 0.0);
        d_weight = normals(n * k, 1.0);
        memset(gradients, 0, sizeof gradients);
        if (!route(&g)) return;
        p = copy_of(g.r.probabilities, cells);
        weights = copy_of(g.r.weights, cells);
        memset(g.r.d_weight_in, 0, n * k * sizeof(moe_real));
        memcpy(g.r.d_weight_out, d_weight, n * k * sizeof(moe_real));
        CHECK(moe_route_backward(&g.router, &g.call, &g.r, gradients, dx, NULL) == MOE_OK, "backward");
        g.call.d_attention_output = d_output;
        if (!rig_set(&g, "attention_u=output") || !route(&g)) return;
        for (i = 0; i < cells; i++)
            if (is_real(&g, i / experts)) CHECK(same_bits(p + i, g.r.probabilities + i, sizeof *p), "the same p");
        CHECK(same_bits(weights, g.r.weights, cells * sizeof *weights), "the same weights");
        memset(g.r.d_weight_in, 0, n * k * sizeof(moe_real));
        memcpy(g.r.d_weight_out, d_weight, n * k * sizeof(moe_real));
        CHECK(moe_route_backward(&g.router, &g.call, &g.r, gradients, dx_split, NULL) == MOE_OK, "backward");
        for (i = 0; i < n * d; i++) most = larger(most, fabs((double)dx_split[i]) + fabs((double)d_output[i]));
        for (i = 0; i < n * d; i++) /* one addition in another order */
            CHECK(is_near((double)dx[i], (double)dx_split[i] + (double)d_output[i], EPS * 16.0 * most),
                  "the gradients add up");
        rig_end(&g);
    }
}

/* ---- adaptive clustering ---- */

/* A call in which u shows M: x is 1 everywhere, h the previous layer's input. */
static int start_clusters(rig *g, size_t n, size_t d, size_t experts, const char *settings) {
    int32_t *previous;
    moe_real *ones;
    size_t i;
    if (!rig_start(g, n, d, experts, 1, "input=adaptive_clustering %s", settings)) return 0;
    for (i = 0; i < n * d; i++) g->x[i] = 1;
    previous = (int32_t *)pooled_block(n, sizeof *previous);
    ones = (moe_real *)pooled_block(n, sizeof *ones);
    for (i = 0; i < n; i++) {
        previous[i] = (int32_t)index_below(experts);
        ones[i] = 1;
    }
    g->call.previous_experts = previous;
    g->call.previous_weights = ones;
    g->call.n_previous = 1;
    return 1;
}

/* s of one cluster and its size; *most is the largest |h| that rounding of s is measured by. */
static size_t spread_of(const rig *g, int32_t cluster, double *s, double *most) {
    const moe_real *h = g->call.previous_input;
    size_t t, o, q, count = 0;
    *most = 0.0;
    for (t = 0; t < g->n; t++) count += is_real(g, t) && g->call.previous_experts[t] == cluster;
    for (q = 0; q < g->d; q++) {
        double mean = 0.0;
        s[q] = 0.0;
        for (t = 0; t < g->n; t++) {
            double x = (double)h[t * g->d + q];
            if (!is_real(g, t) || g->call.previous_experts[t] != cluster) continue;
            mean += x / (double)count;
            *most = larger(*most, g->router.config.ac_spread == MOE_SPREAD_VARIANCE ? x * x : fabs(x));
        }
        for (t = 0; t < g->n; t++) {
            double x = (double)h[t * g->d + q];
            if (!is_real(g, t) || g->call.previous_experts[t] != cluster) continue;
            if (g->router.config.ac_spread == MOE_SPREAD_MAD) s[q] += fabs(x - mean) / (double)count;
            if (g->router.config.ac_spread == MOE_SPREAD_VARIANCE) s[q] += (x - mean) * (x - mean) / (double)count;
            for (o = 0; o < g->n && g->router.config.ac_spread == MOE_SPREAD_PAIRWISE; o++)
                if (is_real(g, o) && g->call.previous_experts[o] == cluster)
                    s[q] += fabs(x - (double)h[o * g->d + q]) / ((double)count * (double)count);
        }
    }
    return count;
}

/* F(w) = sum_q w_q s_q - lambda sum_q log w_q */
static double clustering_criterion(const double *w, const double *s, size_t d, double lambda) {
    double sum = 0.0;
    size_t q;
    for (q = 0; q < d; q++) sum += w[q] * s[q] - lambda * log(w[q]);
    return sum;
}

static void scale_to_mean_one(double *w, size_t d) {
    double sum = 0.0;
    size_t q;
    for (q = 0; q < d; q++) sum += w[q];
    for (q = 0; q < d; q++) w[q] *= (double)d / sum;
}

/* Nobody does better: 600 random weights far and near, and steps from one feature to another. slack
   covers the rounding of m. */
static void check_minimum(const double *m, const double *s, size_t d, double lambda, double slack) {
    double best = clustering_criterion(m, s, d, lambda), w[MOST_EXPERTS];
    size_t q, o;
    int i;
    for (i = 0; i < 600; i++) {
        double reach = i % 3 == 0 ? 2.0 : i % 3 == 1 ? 0.3 : 0.02;
        for (q = 0; q < d; q++) w[q] = (i % 2 ? m[q] : 1.0) * exp(reach * normal());
        scale_to_mean_one(w, d);
        CHECK(clustering_criterion(w, s, d, lambda) >= best - slack, "no random weights are better");
    }
    for (i = 1; i < 5; i++)
        for (q = 0; q < d; q++)
            for (o = 0; o < d; o++) {
                double step = m[o] * pow(10.0, -(double)i);
                if (o == q) continue;
                memcpy(w, m, d * sizeof *w);
                w[q] += step;
                w[o] -= step;
                CHECK(clustering_criterion(w, s, d, lambda) >= best - slack, "no small step is better");
            }
}

/* The weights of one cluster, which u shows: they are lambda/(s + alpha), have mean 1 and are the
   minimum. 0: rounding hides it, or there is nothing to see. */
static int check_exact_weights(const rig *g, size_t cluster) {
    double s[MOST_EXPERTS], m[MOST_EXPERTS], lambda = (double)g->router.config.ac_lambda, most;
    double top = 0.0, mean = 0.0, alpha, off;
    size_t count = spread_of(g, (int32_t)cluster, s, &most), d = g->d, q;
    size_t t = 0;
    if (count == 0) return 0;
    while (!is_real(g, t) || g->call.previous_experts[t] != (int32_t)cluster) t++;
    for (q = 0; q < d; q++) {
        m[q] = (double)g->r.u[t * d + q];
        mean += m[q] / (double)d;
        top = larger(top, m[q]);
    }
    for (q = 0; q < d && count < 2; q++) CHECK(m[q] >= 1.0 && m[q] <= 1.0, "a cluster of one has M = 1");
    /* the relative error of M: s is rounded (n + 8) times at most, and s + alpha = lambda/M once
       more */
    off = EPS * 2.0 * ((double)g->n + 8.0) * (1.0 + most * top / lambda);
    if (count < 2 || off > 0.02) return 0;
    CHECK(is_near(mean, 1.0, off), "the mean is 1");
    for (q = 0, alpha = lambda / m[0] - s[0]; q < d; q++) {
        CHECK(m[q] > 0.0, "weights are positive");
        CHECK(is_near(lambda / m[q] - s[q], alpha, off * (lambda / m[q] + lambda / m[0])), "M = lambda/(s + alpha)");
    }
    scale_to_mean_one(m, d);
    /* at the minimum F grows with the square of the relative error */
    check_minimum(m, s, d, lambda,
                  4.0 * lambda * (double)d * off * off + 1e-13 * (double)d * (lambda + most) * (1.0 + top));
    return 1;
}

/* M_kq = lambda/(s_kq + alpha_k), mean 1, minimizes sum_q w_q s_kq - lambda sum_q log w_q over w of
   mean 1: AC's criterion (as COSA's, spread plus lambda KL(uniform | w/d)), strictly convex, with
   s_q - lambda/w_q + alpha = 0 at its minimum: no feasible w does better. */
static void test_exact_weights(void) {
    static const char *const spreads[] = {"mad", "variance", "pairwise"};
    int trial, seen = 0;
    for (trial = 0; trial < 90; trial++) {
        rig g;
        size_t n, d, experts, k, q, t;
        moe_real *h;
        char settings[80];
        begin(trial);
        n = 2 + index_below(16);
        d = 1 + index_below(8);
        experts = 1 + index_below(4);
        snprintf(settings, sizeof settings, "ac_spread=%s ac_lambda=%.9g", spreads[trial % 3],
                 pow(10.0, 4.0 * uniform() - 2.0));
        if (!start_clusters(&g, n, d, experts, settings)) return;
        g.call.previous_input = h = normals(n * d, 1.0);
        for (q = 0; q < d; q++) {
            double scale = exp(normal());
            for (t = 0; t < n; t++) h[t * d + q] = (moe_real)((double)h[t * d + q] * scale);
        }
        if (below(2)) mask_some(&g, 0);
        for (t = 0; t < n; t++)
            if (!is_real(&g, t)) blot(h + t * d, d);
        if (!route(&g)) return;
        for (k = 0; k < experts; k++) seen += check_exact_weights(&g, k);
        rig_end(&g);
    }
    CHECK(seen > 60, "most clusters can be judged");
}

/* For every lambda that the field allows, and spreads of any size, the exact weights are finite,
   positive and have mean 1, up to the rounding of d quotients and their sum. */
static void test_any_lambda(void) {
    int trial;
    for (trial = 0; trial < 200; trial++) {
        rig g;
        size_t d, q, t;
        double sum;
        moe_real *h;
        char settings[40];
        begin(trial);
        d = 1 + index_below(8);
        snprintf(settings, sizeof settings, "ac_lambda=%.9g", pow(10.0, 17.9 * uniform() - 8.95));
        if (!start_clusters(&g, 6, d, 1, settings)) return;
        g.call.previous_input = h = normals(6 * d, pow(10.0, 6.0 * uniform() - 3.0));
        if (!route(&g)) return;
        for (t = 0; t < 6; t++) {
            for (q = 0, sum = 0.0; q < d; q++) {
                sum += (double)g.r.u[t * d + q];
                CHECK(moe_is_finite(g.r.u[t * d + q]) && g.r.u[t * d + q] > 0, "finite and positive");
            }
            CHECK(is_near(sum / (double)d, 1.0, EPS * (double)(2 * d + 8)), "the mean is 1");
        }
        rig_end(&g);
    }
}

/* P(a token of N(mu_a, diag v) is nearer to mu_b in the metric m): sum_q m_q delta_q (x - mu_a)_q >
   sum_q m_q delta_q^2 / 2. */
static double misassigned(const double *m, const double *v, const double *delta, size_t d) {
    double distance = 0.0, variance = 0.0;
    size_t q;
    for (q = 0; q < d; q++) {
        distance += m[q] * delta[q] * delta[q];
        variance += m[q] * m[q] * v[q] * delta[q] * delta[q];
    }
    return normal_tail(distance / (2.0 * sqrt(variance)));
}

/* Two Gaussian clusters with diagonal covariances. */
typedef struct clusters {
    size_t d;
    double mu[2][8], variance[2][8], metric[2][8]; /* metric: what the router finds */
} clusters;

static void draw_token(const clusters *c, size_t cluster, moe_real *x) {
    size_t q;
    for (q = 0; q < c->d; q++) x[q] = (moe_real)(c->mu[cluster][q] + sqrt(c->variance[cluster][q]) * normal());
}

/* The router's own M for both clusters, from 3000 tokens. */
static int learn_metric(clusters *c, const char *spread) {
    enum { TOKENS = 3000 };
    moe_real *h;
    int32_t *previous;
    char settings[40];
    size_t t, q;
    rig g;
    snprintf(settings, sizeof settings, "ac_spread=%s", spread);
    if (!start_clusters(&g, TOKENS, c->d, 2, settings)) return 0;
    g.call.previous_input = h = normals(TOKENS * c->d, 0.0);
    g.call.previous_experts = previous = (int32_t *)pooled_block(TOKENS, sizeof *previous);
    for (t = 0; t < TOKENS; t++) {
        previous[t] = (int32_t)(t % 2);
        draw_token(c, t % 2, h + t * c->d);
    }
    if (!route(&g)) return 0;
    for (t = 0; t < 2; t++)
        for (q = 0; q < c->d; q++) c->metric[t][q] = (double)g.r.u[t * c->d + q];
    rig_end(&g);
    return 1;
}

/* How many of n tokens of a cluster the router sends to the other one. It is the rule of the
   nearest mean in the metric m, for -(x - mu)' M (x - mu) / 2 = x' M mu - mu' M mu / 2 + what is
   the same for both. */
static double count_misassigned(const clusters *c, size_t cluster, int adaptive, size_t n) {
    rig g;
    size_t e, q, t;
    double wrong;
    int32_t *previous;
    moe_real *ones;
    if (!rig_start(&g, n, c->d, 2, 1, "router_bias=1 %s",
                   adaptive ? "input=adaptive_clustering ac_mode=running" : "input=plain"))
        return 0.0;
    previous = (int32_t *)pooled_block(n, sizeof *previous);
    ones = normals(n, 1.0);
    for (t = 0; t < n; t++) {
        previous[t] = (int32_t)cluster;
        draw_token(c, cluster, g.x + t * c->d);
    }
    g.call.previous_experts = previous;
    g.call.previous_weights = ones;
    g.call.n_previous = 1;
    for (e = 0; e < 2; e++) {
        double square = 0.0;
        for (q = 0; q < c->d; q++) {
            g.tensors[MOE_ROUTER_WEIGHT][e * c->d + q] = (moe_real)c->mu[e][q];
            if (adaptive) g.tensors[MOE_ROUTER_AC_RUNNING][e * c->d + q] = (moe_real)c->metric[e][q];
            square += (adaptive ? c->metric[cluster][q] : 1.0) * c->mu[e][q] * c->mu[e][q];
        }
        g.tensors[MOE_ROUTER_BIAS][e] = (moe_real)(-square / 2.0);
    }
    if (!route(&g)) return 0.0;
    wrong = (double)g.r.first_counts[1 - cluster];
    rig_end(&g);
    return wrong;
}

/* A token of cluster a goes to b with probability Phi(-delta' M delta / (2 sqrt(delta' M Sigma_a M
   delta))), delta = mu_b - mu_a. M = 1/spread makes it no larger than M = 1 (by Cauchy for
   variances, Hoelder for mean deviations), and smaller for uneven spreads. */
static void test_misassignment(void) {
    enum { TOKENS = 6000 };
    static const char *const spreads[] = {"mad", "variance", "pairwise"};
    double wrong[2] = {0.0, 0.0};
    int trial;
    for (trial = 0; trial < 24; trial++) {
        clusters c;
        size_t a, q;
        int even = trial % 4 == 3, adaptive;
        begin(trial);
        c.d = 2 + index_below(5);
        for (q = 0; q < c.d; q++)
            for (a = 0; a < 2; a++) {
                c.mu[a][q] = 0.8 * normal();
                c.variance[a][q] = even ? 0.5 : exp(1.2 * normal());
            }
        if (!learn_metric(&c, spreads[trial / 4 % 3])) return;
        for (a = 0; a < 2; a++) {
            double delta[8], plain[8], expected[2], count;
            for (q = 0; q < c.d; q++) {
                delta[q] = c.mu[1 - a][q] - c.mu[a][q];
                plain[q] = 1.0;
            }
            for (adaptive = 0; adaptive < 2; adaptive++) {
                expected[adaptive] = misassigned(adaptive ? c.metric[a] : plain, c.variance[a], delta, c.d);
                count = count_misassigned(&c, a, adaptive, TOKENS);
                CHECK(is_share(count, expected[adaptive], TOKENS), "the formula of the misassignment probability");
                if (!even) wrong[adaptive] += count;
            }
            /* M comes from 1500 tokens: a standard error of a few per cent per feature, of second
               order at the optimum */
            CHECK(expected[1] <= expected[0] + 0.003, "the weights do not make it worse");
        }
    }
    CHECK(wrong[0] - wrong[1] > 4.0 * sqrt(wrong[0] + wrong[1]),
          "uneven spreads: fewer tokens go wrong with the weights");
}

/* ---- success rates ---- */

/* The model of the next two functions (LocMoE+, after Chowdhury et al. 2023). A sample is n tokens;
   one of them, at a place drawn evenly, carries the class and belongs to expert 0; the sample
   trains well when expert 0 gets it. Each expert takes C tokens. Token choice: that token goes to
   expert 0 with probability p, each other token to an expert drawn evenly; first come, first
   served. With j tokens before it, the place is there when at most C - 1 of them went to expert 0:
       P = p / n sum_{j<n} P(Binomial(j, 1/E) <= C - 1).
   Expert choice: each other token is nearer to expert 0 with probability q; P = P(Binomial(n - 1,
   q) <= C - 1). */
static double token_choice_success(size_t n, size_t experts, size_t capacity, double p) {
    double sum = 0.0;
    size_t j;
    for (j = 0; j < n; j++) sum += binomial_at_most(j, 1.0 / (double)experts, capacity - 1);
    return p * sum / (double)n;
}

static double expert_choice_success(size_t n, size_t capacity, double q) {
    return binomial_at_most(n - 1, q, capacity - 1);
}

/* One sample's logits into x; returns the place of the token with the class. */
static size_t draw_sample(rig *g, int token_choice, double chance) {
    size_t place = index_below(g->n), t, e, taken;
    for (t = 0; t < g->n; t++) {
        for (e = 0; e < g->experts; e++) g->x[t * g->d + e] = 0;
        if (token_choice) {
            taken = index_below(g->experts);
            if (t == place) taken = uniform() < chance ? 0 : 1 + index_below(g->experts - 1);
            g->x[t * g->d + taken] = 1;
        } else g->x[t * g->d] = (moe_real)(t == place ? 1.0 - chance : uniform());
    }
    return place;
}

/* How many of so many samples train well. */
static double simulate_success(size_t n, size_t experts, size_t capacity, int token_choice, double chance,
                               int samples) {
    rig g;
    int i;
    double good = 0.0;
    if (token_choice) {
        if (!rig_start(&g, n, experts, experts, 1, "weight=raw drop_capacity=%d", (int)capacity)) return -1.0;
    } else if (!rig_start(&g, n, experts, experts, 1,
                          "select=expert_choice expert_choice_score=z weight=raw capacity_factor=%.9g",
                          (double)(capacity * experts) / (double)n))
        return -1.0;
    read_logits_from_x(&g);
    for (i = 0; i < samples; i++) {
        size_t place = draw_sample(&g, token_choice, chance);
        if (!route(&g)) break;
        good += g.r.selected[place * experts];
    }
    rig_end(&g);
    return good;
}

/* Success rates of token choice with a capacity and of expert choice are the binomial sums above:
   the library's own selections, sample by sample, lie within four standard errors of them. */
static void test_success_by_simulation(void) {
    enum { SAMPLES = 3000 };
    int trial;
    for (trial = 0; trial < 24; trial++) {
        size_t n, experts, capacity;
        double chance, want;
        int token_choice = trial % 2;
        begin(trial);
        n = 4 + index_below(25);
        experts = 2 + index_below(4);
        capacity = 1 + index_below(n / 2);
        chance = 0.05 + 0.9 * uniform();
        /* where the rate is neither 0 nor 1 */
        if (!token_choice && trial % 4 == 0) chance = (double)capacity / (double)n;
        want = token_choice ? token_choice_success(n, experts, capacity, chance)
                            : expert_choice_success(n, capacity, chance);
        CHECK(is_share(simulate_success(n, experts, capacity, token_choice, chance, SAMPLES), want, SAMPLES),
              "the success rate");
    }
}

/* Why LocMoE+ goes from token choice with a large capacity to experts' choice with a small one:
   with C = n token choice reaches p, never more, and expert choice 1; before training (q near 1/2)
   the first is better, after it (q near 0) the second, with far less capacity. */
static void test_success_by_formula(void) {
    int trial;
    for (trial = 0; trial < 200; trial++) {
        size_t n, experts, c;
        double p, q, last_token = 0.0, last_expert = 0.0;
        begin(trial);
        n = 1 + index_below(40);
        experts = 1 + index_below(8);
        p = uniform();
        q = uniform();
        for (c = 1; c <= n; c++) {
            double token = token_choice_success(n, experts, c, p), expert = expert_choice_success(n, c, q);
            CHECK(token >= last_token - 1e-12 && expert >= last_expert - 1e-12, "more capacity, more success");
            CHECK(token <= p + 1e-12, "token choice has no more success than right choices");
            last_token = token;
            last_expert = expert;
        }
        CHECK(is_near(last_token, p, 1e-12) && is_near(last_expert, 1.0, 1e-12), "what is reached with C = n");
    }
    CHECK(token_choice_success(32, 4, 32, 0.5) > 0.49 && expert_choice_success(32, 8, 0.5) < 0.01, "before training");
    CHECK(token_choice_success(32, 4, 2, 0.99) < 0.4 && expert_choice_success(32, 2, 0.01) > 0.95, "after training");
}

/* ---- gates ---- */

/* Rows of softmax sum to 1, refined or not; softmax and sigmoid lie in 0..1, sqrt_softplus and relu
   are not negative, identity is z; refined values lie between the sequence's smallest and largest
   gate value. All are finite, also for logits of some hundreds. */
static void test_gate_ranges(void) {
    static const char *const gates[] = {"softmax", "sigmoid", "sqrt_softplus", "relu", "identity"};
    int trial;
    for (trial = 0; trial < 600; trial++) {
        rig g;
        int gate = trial % 5, refined = trial / 5 % 2;
        double stretch;
        size_t n, experts, k, t, e, o, from, to, i;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        stretch = below(3) == 0 ? 300.0 : 1.0;
        if (!rig_start(&g, n, 3, experts, k, "gate=%s refine=%s weight=raw similarity_tau=3", gates[gate],
                       refined ? "similarity" : "none"))
            return;
        for (i = 0; i < experts * 3; i++)
            g.tensors[MOE_ROUTER_WEIGHT][i] = (moe_real)(stretch * (double)g.tensors[MOE_ROUTER_WEIGHT][i]);
        vary_call(&g, trial);
        if (!route(&g)) return;
        for (t = 0; t < n; t++) {
            double sum = 0.0, refined_sum = 0.0;
            if (!is_real(&g, t)) continue;
            sequence_of(&g, t, &from, &to);
            for (e = 0; e < experts; e++) {
                double r = gate_of(&g, t, e), p = p_of(&g, t, e);
                double least = r, most = r, slack;
                sum += r;
                refined_sum += p;
                CHECK(moe_is_finite(g.r.gate[t * experts + e]) && moe_is_finite(g.r.probabilities[t * experts + e]),
                      "gates are finite");
                CHECK(gate == 4 ? r >= z_of(&g, t, e) && r <= z_of(&g, t, e) : r >= 0.0,
                      "identity is z, others are not negative");
                CHECK(gate > 1 || r <= 1.0, "softmax and sigmoid are at most 1");
                for (o = from; o < to; o++)
                    if (is_real(&g, o)) {
                        least = smaller(least, gate_of(&g, o, e));
                        most = larger(most, gate_of(&g, o, e));
                    }
                slack = EPS * (double)(n + 4) * larger(fabs(least), fabs(most));
                CHECK(p >= least - slack && p <= most + slack, "refined values lie between gate values");
            }
            if (gate != 0) continue;
            CHECK(is_near(sum, 1.0, EPS * (double)(experts + 2)), "a row of softmax sums to 1");
            CHECK(is_near(refined_sum, 1.0, EPS * (double)(experts + n + 4)), "a refined row of softmax sums to 1");
        }
        rig_end(&g);
    }
}

/* ---- limits of refinement and clustering ---- */

/* The least difference of two of n values. */
static double least_gap(const moe_real *v, size_t n) {
    double gap = HUGE_VAL;
    size_t i, j;
    for (i = 0; i < n; i++)
        for (j = 0; j < i; j++) gap = smaller(gap, fabs((double)v[i] - (double)v[j]));
    return gap;
}

/* sum over j != i of exp(-(1 - cos(u_i, u_j)) / tau), each cosine taken larger by what rounding may
   do to it. */
static double similarity_rest(const rig *g, size_t i, double tau) {
    size_t from, to, j, q;
    double rest = 0.0;
    sequence_of(g, i, &from, &to);
    for (j = from; j < to; j++) {
        double dot = 0.0, a = 0.0;
        double b = 0.0;
        if (j == i || !is_real(g, j)) continue;
        for (q = 0; q < g->d; q++) {
            double x = (double)g->x[i * g->d + q], y = (double)g->x[j * g->d + q];
            dot += x * y;
            a += x * x;
            b += y * y;
        }
        rest += exp((dot / sqrt(a * b) - 1.0 + 4.0 * (double)g->d * EPS) / tau);
    }
    return rest;
}

/* With unit vectors u_i . u_i = 1 > u_i . u_j, so similarity tends to the plain router as tau goes
   to 0: |p_i - r_i|_1 is at most 2 sum_{j != i} exp(-(1 - u_i . u_j) / tau), and where that is
   nothing the choices are those of the plain router. */
static void test_small_tau(void) {
    int trial, settled = 0;
    for (trial = 0; trial < 200; trial++) {
        rig g, plain;
        size_t n, experts, k, t, e;
        double tau = pow(10.0, -(double)(1 + trial % 4));
        begin(trial);
        sizes(trial, &n, &experts, &k);
        if (!rig_start(&g, n, 5, experts, k, "weight=raw refine=similarity similarity_scale=l2 similarity_tau=%.9g",
                       tau))
            return;
        vary_call(&g, trial);
        if (!route(&g) || !rig_start(&plain, n, 5, experts, k, "weight=raw")) return;
        memcpy(plain.tensors[MOE_ROUTER_WEIGHT], g.tensors[MOE_ROUTER_WEIGHT], experts * 5 * sizeof(moe_real));
        plain.call = g.call;
        plain.x = g.x;
        plain.mask = g.mask;
        if (!route(&plain)) return;
        for (t = 0; t < n; t++) {
            double rest, apart = 0.0;
            if (!is_real(&g, t)) continue;
            rest = similarity_rest(&g, t, tau);
            for (e = 0; e < experts; e++) apart += fabs(p_of(&g, t, e) - gate_of(&plain, t, e));
            CHECK(apart <= 2.0 * rest + EPS * (double)(n + experts + 8), "p tends to r");
            if (rest > EPS || least_gap(plain.r.probabilities + t * experts, experts) < EPS * 32.0) continue;
            settled++;
            for (e = 0; e < k; e++)
                CHECK(choice_of(&g, t, e) == choice_of(&plain, t, e), "the choices of the plain router");
        }
        rig_end(&g);
    }
    CHECK(settled > 300, "many tokens are settled");
}

/* h [N,d] and clusters of pairs mean + c, mean - c, integers, so that all features of a
   cluster have one spread, exactly; even: all clusters have it. The order within pairs is the same
   for all features, so pairwise distances are even too. */
static void supply_even_clusters(rig *g, int even) {
    moe_real *h = normals(g->n * g->d, 0.0);
    int32_t *previous = (int32_t *)pooled_block(g->n, sizeof *previous);
    size_t i, q;
    for (i = 0; i < g->n; i += 2) {
        int c = even ? 1 : 1 + below(3), cluster = (int)(i / 2 % g->experts);
        previous[i] = previous[i + 1] = (int32_t)cluster;
        for (q = 0; q < g->d; q++) {
            int mean = 3 * cluster - (int)q;
            h[i * g->d + q] = (moe_real)(mean + c);
            h[(i + 1) * g->d + q] = (moe_real)(mean - c);
        }
    }
    g->call.previous_input = h;
    g->call.previous_experts = previous;
}

/* g as routed now against an earlier call's results; off is by how much logits may differ, and
   weights 8 times as much. */
static void check_same_routing(const rig *g, size_t t, const moe_real *logits, const moe_real *weights,
                               const int32_t *choices, double off) {
    size_t row = t * g->experts, e, i;
    for (e = 0; e < g->experts; e++) CHECK(is_near((double)logits[row + e], z_of(g, t, e), off), "the same logits");
    if (least_gap(g->r.logits + row, g->experts) < 4.0 * off) return;
    for (i = 0; i < g->k; i++)
        CHECK((size_t)choices[t * g->r.max_choices + i] == choice_of(g, t, i), "the same choices");
    for (e = 0; e < g->experts; e++)
        CHECK(is_near((double)weights[row + e], w_of(g, t, e), 8.0 * (off + EPS * 4.0)), "the same weights");
}

/* Equal spreads of all features give M = 1 (mode code: of all clusters, too): adaptive clustering
   is then the plain router, with every spread, scaled or exact. */
static void test_equal_spreads(void) {
    static const char *const settings[] = {"ac_spread=mad",
                                           "ac_spread=variance",
                                           "ac_spread=mad ac_lambda=0.5",
                                           "ac_spread=variance ac_lambda=2",
                                           "ac_spread=pairwise ac_lambda=1",
                                           "ac_mode=code ac_spread=mad"};
    int trial;
    for (trial = 0; trial < 120; trial++) {
        rig g;
        size_t n, d, experts, k, i, t;
        int code = trial % 6 == 5;
        double slack;
        moe_real *logits, *weights;
        int32_t *choices;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        n *= 4;
        d = 1 + index_below(6);
        slack = EPS * (double)(n + 2 * d + 10);
        if (!start_clusters(&g, n, d, experts, settings[trial % 6]) || !rig_set(&g, "top_k=%d", (int)k)) return;
        g.k = k;
        supply_even_clusters(&g, code);
        /* mode code clusters x itself */
        for (i = 0; i < n * d; i++) g.x[i] = code ? g.call.previous_input[i] : (moe_real)normal();
        if (!route(&g)) return;
        for (i = 0; i < n * d; i++)
            CHECK(is_near((double)g.r.u[i], (double)g.x[i], slack * fabs((double)g.x[i])), "u is x");
        logits = copy_of(g.r.logits, n * experts);
        weights = copy_of(g.r.weights, n * experts);
        choices = copy_of_indices(g.r.choices, n * g.r.max_choices);
        if (!rig_set(&g, "input=plain ac_mode=paper") || !route(&g)) return;
        for (t = 0; t < n; t++) {
            double size = 0.0;
            for (i = 0; i < d; i++) size += fabs((double)g.x[t * d + i]);
            check_same_routing(&g, t, logits, weights, choices,
                               slack * size * largest_of(g.tensors[MOE_ROUTER_WEIGHT], experts * d));
        }
        rig_end(&g);
    }
}

/* Row i of the posterior of the heads [first, end). Returns how many of its entries are compared
   with A. */
static int check_posterior(const rig *g, size_t i, size_t first, size_t end) {
    double sum = 0.0, rows = 0.0;
    double most = 0.0, size = 0.0;
    double sigma = (double)g->router.config.attention_sigma;
    size_t m = g->n, h, j, q;
    int settled = 0;
    for (h = first; h < end; h++)
        for (j = 0; j < m; j++) {
            double square = 0.0, a = (double)g->call.attention_weights[(h * m + i) * m + j];
            rows += a;
            for (q = 0; q < m && a > 0.0; q++) {
                double x = (double)g->call.attention_output[i * m + q];
                double y = (double)g->call.attention_outputs[(h * m + j) * m + q];
                square += (x - y) * (x - y);
                size = larger(size, fabs(x) + fabs(y));
            }
            most = larger(most, square / (2.0 * sigma * sigma));
        }
    for (j = 0; j < m; j++) {
        double p = p_of(g, i, j), mean = 0.0, slack;
        sum += p;
        CHECK(p >= 0.0, "a posterior is not negative");
        for (h = first; h < end; h++) mean += (double)g->call.attention_weights[(h * m + i) * m + j];
        if (!(rows > 0.0)) {
            CHECK(p >= (double)(i == j) && p <= (double)(i == j), "a row without a positive entry leaves r as it is");
            continue;
        }
        CHECK(mean > 0.0 || p <= 0.0, "the posterior is 0 where A is 0");
        if (most > 1.0) continue;
        mean /= rows;
        /* exponents are rounded by so much, as in attention_exponent */
        slack = EPS * ((double)((m + 6) * m) * size * size / (sigma * sigma) + (double)(m * (end - first)) + 40.0);
        CHECK(is_near(p, mean, mean * (expm1(2.0 * most) + slack)), "the posterior tends to A");
        settled++;
    }
    CHECK(is_near(sum, 1.0, EPS * (double)(m * (end - first) + 4)), "a posterior sums to 1");
    return settled;
}

/* The attention posterior, seen as p (gate identity, z = 1), is not negative, sums to 1, is 0 where
   A is, and tends to A as sigma grows: A'_ij/A_ij is within exp(-+2D), D the row's largest |u_i -
   o_j|^2 / (2 sigma^2); all heads together tend to their mean. */
static void test_posterior(void) {
    static const char *const which[] = {"fixed", "min_entropy", "all"};
    int trial, settled = 0;
    for (trial = 0; trial < 350; trial++) {
        rig g;
        char settings[80];
        size_t m, heads, i, first, from, to;
        int kind = trial / 7 % 3;
        begin(trial);
        m = 1 + index_below(10);
        heads = 1 + index_below(3);
        snprintf(settings, sizeof settings, "attention_heads=%s attention_sigma=%.9g", which[kind],
                 pow(10.0, (double)(trial % 7 - 2)));
        if (!start_posterior(&g, m, heads, settings)) return;
        if (below(2)) mask_some(&g, 0);
        if (below(2)) split(&g);
        supply_attention(&g, heads, 0);
        g.call.attention_output = normals(m * m, 1.0);
        if (!route(&g)) return;
        for (i = 0; i < m; i++) {
            if (!is_real(&g, i)) continue;
            sequence_of(&g, i, &from, &to);
            first = kind == 1 ? sharpest_head(&g, from, to) : 0;
            settled += check_posterior(&g, i, first, kind == 2 ? heads : first + 1);
        }
        rig_end(&g);
    }
    CHECK(settled > 1000, "many posteriors are near A");
}

/* The entropy proposition. With J_i = {j: H(r_j) <= H(r_i)} every term of sum_j s_ij (H(r_i) -
   H(r_j)) is at least 0, so H(p_i) <= H(r_i) + H(s_i), and H(p_i) <= H(r_i) wherever that sum is at
   least H(s_i): the proposition's condition. */
static int check_proposition(const rig *g, double *before, double *after, double *spread, int *seen) {
    size_t i, j;
    int strict = 0;
    for (i = 0; i < g->n; i++) {
        mixing m;
        double mine, own, gain = 0.0, got, slack;
        if (!is_real(g, i)) continue;
        mixing_of(g, i, 0, &m);
        if (!m.clear || m.apart > 0.02) continue;
        mine = row_entropy(g->r.gate + i * g->experts, g->experts);
        own = entropy_of(m.s, m.heads * g->n);
        for (j = 0; j < m.heads * g->n; j++)
            if (m.s[j] > 0.0) gain += m.s[j] * (mine - row_entropy(g->r.gate + j % g->n * g->experts, g->experts));
        got = row_entropy(g->r.probabilities + i * g->experts, g->experts);
        slack = entropy_slack(m.apart, g->experts) + EPS * 8.0 * (double)g->experts;
        CHECK(gain >= -slack, "only tokens that are as sure take part");
        CHECK(got <= mine + own + slack, "H(p) <= H(r) + H(s)");
        *seen += 1;
        *before += mine;
        *after += got;
        *spread += own;
        if (gain < own) continue;
        CHECK(got <= mine + slack, "H(p) <= H(r) where the decrease covers H(s)");
        strict += own > 1e-3 && gain > 1e-3;
    }
    return strict;
}

/* lower_entropy_only: the proposition holds token by token for similarity at every tau and
   attention at every sigma; with a small one, where s is nearly one token and H(s) nearly 0, the
   mean of H(p_i) is at most that of H(r_i). */
static void test_entropy_proposition(void) {
    int trial, strict[2] = {0, 0}, seen, narrow = 0;
    for (trial = 0; trial < 600; trial++) {
        rig g;
        int attention = trial % 2, small = trial % 3 == 0;
        size_t n, experts, heads;
        double before = 0.0, after = 0.0;
        double spread = 0.0, width;
        begin(trial);
        n = trial % 20 == 0 ? 1 : 1 + index_below(14);
        experts = 2 + index_below(8);
        heads = 1 + index_below(2);
        width = small ? attention ? 0.1 : MOE_REAL_IS_DOUBLE ? 1e-4 : 1e-2 : pow(10.0, 1.5 * uniform() - 1.0);
        if (!rig_start(&g, n, 4, experts, 1, "weight=raw lower_entropy_only=1 heads=%d attention_heads=all %s=%.9g",
                       (int)heads, attention ? "refine=attention attention_sigma" : "refine=similarity similarity_tau",
                       width))
            return;
        vary_call(&g, trial);
        if (attention) supply_attention(&g, heads, 0);
        if (!route(&g)) return;
        seen = 0;
        strict[attention] += check_proposition(&g, &before, &after, &spread, &seen);
        if (small && spread <= 0.01 * (double)seen) {
            CHECK(after <= before + 0.011 * (double)seen, "the mean entropy does not grow when s is narrow");
            narrow += seen > 1;
        }
        rig_end(&g);
    }
    CHECK(strict[0] > 20 && strict[1] > 20 && narrow > 50, "the condition is met, and not only in the limit");
}

/* ---- plans ---- */

/* Entries ascend by token within an expert, are real, carry the dense matrix's weight, and are as
   many as selected cells. */
static void check_plan(const rig *g) {
    const moe_dispatch_plan *plan = &g->r.plan;
    size_t e, i, cells = 0;
    int good = plan->offsets[0] == 0;
    for (e = 0; e < g->experts; e++)
        for (i = plan->offsets[e]; i < plan->offsets[e + 1]; i++) {
            size_t t = (size_t)plan->assignments[i].token;
            good &= t < g->n && is_real(g, t) && g->r.selected[t * g->experts + e];
            good &= i == plan->offsets[e] || plan->assignments[i].token > plan->assignments[i - 1].token;
            good &= same_bits(&plan->assignments[i].weight_out, g->r.weights + t * g->experts + e, sizeof(moe_real));
        }
    for (i = 0; i < g->n * g->experts; i++) cells += g->r.selected[i];
    CHECK(good && cells == plan->offsets[g->experts], "the plan is the dense matrix");
}

/* Dropless plans serve everyone: each real token has K different experts, padding has none, and the
   counts add up to the plan's entries, whoever selects. */
static void test_dropless(void) {
    static const char *const selects[] = {"top_k", "grouped_top_k", "hash", "sinkhorn", "sample", "given", "dense"};
    int trial;
    for (trial = 0; trial < 420; trial++) {
        rig g;
        size_t n, experts, k, t, e, i, sum = 0;
        int hash = trial % 7 == 2;
        int32_t *ids;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        if (!rig_start(&g, n, 4, experts, trial % 7 == 6 ? experts : k, "select=%s table_size=%d", selects[trial % 7],
                       hash ? 11 : 0))
            return;
        ids = (int32_t *)pooled_block(n * g.k, sizeof *ids);
        for (t = 0; t < n; t++)
            for (i = 0; i < g.k; i++) ids[t * g.k + i] = (int32_t)((t * 5 + i) % experts);
        g.call.given = ids;
        if (hash) { /* any K different experts for each id */
            for (i = 0; i < 11 * k; i++) g.tensors[MOE_ROUTER_TABLE][i] = (moe_real)((i / k + i % k) % experts);
            g.call.token_ids = ids = (int32_t *)pooled_block(n, sizeof *ids);
            for (t = 0; t < n; t++) ids[t] = below(11);
        }
        vary_call(&g, trial);
        g.call.training = below(2);
        if (!route(&g)) return;
        for (t = 0; t < n; t++) {
            size_t mine = 0;
            for (e = 0; e < experts; e++) mine += g.r.selected[t * experts + e];
            CHECK((size_t)g.r.n_choices[t] == mine && mine == (is_real(&g, t) ? g.k : 0),
                  "K experts for each real token");
            for (i = 0; i < (size_t)g.r.n_choices[t]; i++)
                CHECK(g.r.kept[t * g.r.max_choices + i], "every choice stays");
        }
        for (e = 0; e < experts; e++) {
            sum += g.r.counts[e];
            CHECK(g.r.counts[e] == g.r.plan.offsets[e + 1] - g.r.plan.offsets[e], "counts are the plan's rows");
        }
        CHECK(sum == g.k * count_real(&g) && sum == g.r.plan.offsets[experts] && g.r.n_dropped == 0,
              "the counts add up");
        CHECK(g.r.n_real == count_real(&g), "real tokens are counted");
        check_plan(&g);
        rig_end(&g);
    }
}

/* Whether choice i of token t is placed before choice j of token u; 0 also where the order is
   random. */
static int placed_before(const rig *g, size_t t, size_t i, size_t u, size_t j) {
    int order = g->router.config.drop_order;
    double a = 0.0, b = 0.0;
    size_t e;
    if (order == MOE_DROP_SCORE) {
        a = p_of(g, t, choice_of(g, t, i));
        b = p_of(g, u, choice_of(g, u, j));
    } else if (i != j) return i < j;
    if (order == MOE_DROP_RANDOM) return 0;
    for (e = 0; e < g->experts && order == MOE_DROP_PRIORITY; e++) {
        a = larger(a, p_of(g, t, e));
        b = larger(b, p_of(g, u, e));
    }
    return a > b || (a >= b && t < u);
}

/* What stays at expert e: never more than capacity, all that fits when no rule drops at random, and
   nobody before one who had to go. */
static void check_capacity(const rig *g, size_t e, size_t capacity) {
    size_t t, u, i, j, kept = g->r.plan.offsets[e + 1] - g->r.plan.offsets[e];
    int rule = g->router.config.drop_rule != MOE_DROP_RULE_NONE && g->call.training, fair = 1;
    CHECK(kept <= capacity, "no more than the capacity");
    CHECK(rule ? kept <= g->r.counts[e] : kept == (g->r.counts[e] < capacity ? g->r.counts[e] : capacity),
          "all that fits");
    for (t = 0; t < g->n && !rule; t++)
        for (i = 0; i < (size_t)g->r.n_choices[t]; i++) {
            if (choice_of(g, t, i) != e || g->r.kept[t * g->r.max_choices + i]) continue;
            for (u = 0; u < g->n; u++)
                for (j = 0; j < (size_t)g->r.n_choices[u]; j++)
                    if (choice_of(g, u, j) == e && g->r.kept[u * g->r.max_choices + j])
                        fair &= !placed_before(g, t, i, u, j);
        }
    CHECK(fair, "nobody is dropped for one who comes later in the order");
}

/* C = max(capacity_min, ceil(cf K N / E)), at most N, is never exceeded, in any drop order and
   under any rule, in training and evaluation; a rule never drops a first choice, and without one
   all that fits stays, in the drop order. */
static void test_capacity(void) {
    static const char *const orders[] = {"position", "priority", "random", "score"};
    static const char *const rules[] = {"none", "gshard", "st_moe"};
    static const char *const selects[] = {"top_k", "top_p", "threshold", "dense"};
    int trial, dropped = 0;
    for (trial = 0; trial < 960; trial++) {
        rig g;
        size_t n, experts, k, e, t, i, capacity, real, sum = 0;
        int eighths, eval_eighths, least, fixed;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        n += index_below(10);
        eighths = 1 + below(16);
        eval_eighths = 1 + below(16);
        least = 1 + below(4);
        fixed = below(4) == 0 ? 1 + below(6) : 0;
        if (!rig_start(&g, n, 4, experts, k,
                       "capacity_factor=%.9g capacity_factor_eval=%.9g capacity_min=%d drop_capacity=%d drop_order=%s "
                       "drop_rule=%s select=%s weight=raw renormalize=%s",
                       eighths / 8.0, eval_eighths / 8.0, least, fixed, orders[trial % 4], rules[trial / 4 % 3],
                       selects[trial / 12 % 4], below(2) ? "before" : "after"))
            return;
        vary_call(&g, trial);
        g.call.training = below(2);
        if (!route(&g)) return;
        real = count_real(&g);
        /* ceil(cf K N / E) in integers */
        capacity = ((size_t)(g.call.training ? eighths : eval_eighths) * k * real + 8 * experts - 1) / (8 * experts);
        if (capacity < (size_t)least) capacity = (size_t)least;
        if (fixed > 0) capacity = (size_t)fixed;
        if (capacity > real) capacity = real;
        for (e = 0; e < experts; e++) {
            check_capacity(&g, e, capacity);
            sum += g.r.counts[e];
        }
        for (t = 0; t < n; t++)
            for (i = 0; i < (size_t)g.r.n_choices[t]; i++) dropped += !g.r.kept[t * g.r.max_choices + i];
        CHECK(sum == g.r.plan.offsets[experts] + g.r.n_dropped, "every pair is kept or counted as dropped");
        if (capacity == real)
            for (t = 0; t < n; t++)
                CHECK(g.r.n_choices[t] == 0 || g.r.kept[t * g.r.max_choices], "no rule drops a first choice");
        check_plan(&g);
        rig_end(&g);
    }
    CHECK(dropped > 1000, "many pairs are dropped");
}

/* Expert choice: every expert takes exactly C = max(1, round(cf N / E)) tokens, or all N real ones
   if they are fewer, and nobody whom it leaves out has a larger score than one it takes. */
static void test_expert_choice(void) {
    static const char *const gates[] = {"softmax", "sigmoid", "relu", "identity"};
    int trial;
    for (trial = 0; trial < 320; trial++) {
        rig g;
        size_t n, experts, k, e, t, u, capacity, real;
        int eighths, by_z, best = 1;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        n += index_below(20);
        eighths = 1 + below(40);
        by_z = below(2);
        if (!rig_start(&g, n, 4, experts, k,
                       "select=expert_choice capacity_factor=%.9g expert_choice_score=%s weight=raw gate=%s",
                       eighths / 8.0, by_z ? "z" : "p", gates[trial / 8 % 4]))
            return;
        vary_call(&g, trial);
        if (!route(&g)) return;
        real = count_real(&g);
        capacity = ((size_t)eighths * real * 2 + 8 * experts) / (16 * experts); /* floor(cf N / E + 1/2) */
        if (capacity < 1) capacity = 1;
        if (capacity > real) capacity = real;
        for (e = 0; e < experts; e++) {
            CHECK(g.r.counts[e] == capacity, "every expert takes C tokens");
            for (t = 0; t < n; t++)
                for (u = 0; u < n; u++) {
                    if (!is_real(&g, t) || !is_real(&g, u) || !has_chosen(&g, t, e) || has_chosen(&g, u, e)) continue;
                    best &= by_z ? z_of(&g, t, e) >= z_of(&g, u, e) : p_of(&g, t, e) >= p_of(&g, u, e);
                }
        }
        CHECK(best, "experts take their best tokens");
        check_plan(&g);
        rig_end(&g);
    }
}

/* Affinity: a token goes to its best expert or nowhere; of the a_e tokens that come to it an expert
   keeps the best, at least capacity_min, at most capacity, and between these the fewest that hold
   the mass. */
static void test_affinity(void) {
    int trial;
    for (trial = 0; trial < 320; trial++) {
        rig g;
        size_t n, experts, k, e, t, i, kept, come, least, most;
        double mass;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        n += index_below(20);
        least = 1 + index_below(4);
        most = index_below(6);
        mass = 0.1 + 0.9 * uniform();
        if (!rig_start(&g, n, 4, experts, k,
                       "select=affinity affinity_mass=%.9g capacity_min=%d capacity=%d weight=raw", mass, (int)least,
                       (int)most))
            return;
        mass = (double)g.router.config.affinity_mass;
        vary_call(&g, trial);
        if (!route(&g)) return;
        if (most == 0) most = n;
        for (e = 0; e < experts; e++) {
            double total = 0.0, held = 0.0;
            double last = HUGE_VAL, left = -HUGE_VAL, slack;
            for (t = 0, come = kept = 0; t < n; t++) {
                size_t best = 0;
                if (!is_real(&g, t)) continue;
                for (i = 1; i < experts; i++)
                    if (z_of(&g, t, i) > z_of(&g, t, best)) best = i;
                CHECK(best == e || !has_chosen(&g, t, e), "a token goes to its best expert only");
                if (best != e) continue;
                come++;
                total += larger(z_of(&g, t, e), 0.0);
                if (!has_chosen(&g, t, e)) {
                    left = larger(left, z_of(&g, t, e));
                    continue;
                }
                kept++;
                held += larger(z_of(&g, t, e), 0.0);
                last = smaller(last, z_of(&g, t, e));
            }
            slack = EPS * (double)(2 * n + 4) * total;
            CHECK(kept <= most && kept <= come, "at most the capacity");
            CHECK(kept >= most || kept >= come || kept >= least, "at least capacity_min");
            CHECK(left <= last, "the best tokens are kept");
            CHECK(kept == most || kept == come || held >= mass * total - slack, "what is kept holds the mass");
            CHECK(kept <= least || kept == 0 || held - larger(last, 0.0) < mass * total + slack,
                  "without its last token it would not");
        }
        check_plan(&g);
        rig_end(&g);
    }
}

/* top_p: the chosen experts are the best by p, their sum exceeds P with the last of them and not
   before, and all are chosen if it never does; sums may be rounded E times. */
static void test_top_p(void) {
    static const char *const gates[] = {"softmax", "sigmoid", "relu"};
    int trial, all = 0;
    for (trial = 0; trial < 300; trial++) {
        rig g;
        size_t n, experts, k, t, e;
        double wanted;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        wanted = below(6) == 0 ? 1.0 : 0.05 + 0.9 * uniform();
        if (!rig_start(&g, n, 4, experts, k, "select=top_p top_p=%.9g gate=%s weight=raw selection_bias=%d", wanted,
                       gates[trial / 8 % 3], trial % 2))
            return;
        wanted = (double)g.router.config.top_p;
        vary_call(&g, trial);
        if (!route(&g)) return;
        for (t = 0; t < n; t++) {
            double sum = 0.0, last = HUGE_VAL;
            double left = -HUGE_VAL, slack = EPS * (double)(2 * experts);
            if (!is_real(&g, t)) continue;
            for (e = 0; e < experts; e++) {
                if (has_chosen(&g, t, e)) {
                    sum += p_of(&g, t, e);
                    last = smaller(last, p_of(&g, t, e));
                } else left = larger(left, p_of(&g, t, e));
            }
            slack *= larger(sum, 1.0);
            CHECK(left <= last, "the best experts");
            CHECK((size_t)g.r.n_choices[t] == experts || sum > wanted - slack, "the sum exceeds P, or all are chosen");
            CHECK(sum - last <= wanted + slack, "with the last one only");
            all += (size_t)g.r.n_choices[t] == experts && experts > 1;
        }
        rig_end(&g);
    }
    CHECK(all > 20, "sometimes all are chosen");
}

/* threshold chooses exactly {e: p_e > theta_e}, or the best expert when that is empty and the
   fallback is on (always, or outside training); positive chooses exactly {e: p_e > 0}. The
   selection bias takes no part. */
static void test_threshold(void) {
    static const char *const settings[] = {"select=positive gate=relu",
                                           "select=threshold threshold=0.3 threshold_fallback=always",
                                           "select=threshold threshold=0.3 threshold_fallback=evaluation",
                                           "select=threshold threshold=0.3 threshold_fallback=never",
                                           "select=threshold threshold=0.3 threshold_learned=1 gate=sigmoid",
                                           "select=positive gate=identity"};
    int trial, empty = 0;
    for (trial = 0; trial < 360; trial++) {
        rig g;
        int kind = trial % 6, fallback;
        size_t n, experts, k, t, e, count, best;
        begin(trial);
        sizes(trial / 2, &n, &experts, &k);
        if (!rig_start(&g, n, 4, experts, k, "weight=raw selection_bias=%d %s", trial / 6 % 2, settings[kind])) return;
        vary_call(&g, trial / 2);
        g.call.training = below(2);
        if (!route(&g)) return;
        fallback = kind == 1 || kind == 4 || (kind == 2 && !g.call.training);
        for (t = 0; t < n; t++) {
            if (!is_real(&g, t)) continue;
            for (e = 0, count = best = 0; e < experts; e++) {
                double theta = kind == 0 || kind == 5 ? 0.0
                                                      : (double)(kind == 4 ? g.tensors[MOE_ROUTER_THRESHOLD][e]
                                                                           : g.router.config.threshold);
                int above = p_of(&g, t, e) > theta;
                count += (size_t)above;
                if (p_of(&g, t, e) > p_of(&g, t, best)) best = e;
                if (above) CHECK(has_chosen(&g, t, e), "all above the threshold");
            }
            CHECK((size_t)g.r.n_choices[t] == (count == 0 && fallback ? 1 : count), "and nobody else");
            if (count == 0 && fallback) CHECK(choice_of(&g, t, 0) == best, "the best one as fallback");
            empty += count == 0;
        }
        rig_end(&g);
    }
    CHECK(empty > 100, "the fallback matters");
}

/* p + b as the selection sees it. */
static double biased_of(const rig *g, size_t t, size_t e) {
    const moe_real *bias = g->tensors[MOE_ROUTER_SELECTION_BIAS];
    moe_real sum = g->r.probabilities[t * g->experts + e];
    if (bias != NULL) sum += bias[e];
    return (double)sum;
}

/* What a group is worth: its best p + b, or its two best together. */
static double group_value(const rig *g, size_t t, size_t group, size_t size) {
    double best = -HUGE_VAL, second = -HUGE_VAL;
    size_t i;
    for (i = 0; i < size; i++) {
        double v = biased_of(g, t, group * size + i);
        second = larger(second, smaller(best, v));
        best = larger(best, v);
    }
    if (g->router.config.group_score == MOE_GROUP_TOP2_SUM && size > 1)
        return (double)((moe_real)best + (moe_real)second);
    return best;
}

/* The choices of one token lie in the groups_kept best groups, the lower of equals first, and are
   the best there. */
static void check_groups(const rig *g, size_t t, size_t groups, size_t kept) {
    size_t size = g->experts / groups, i, o, e;
    double value[MOST_EXPERTS], worst = HUGE_VAL;
    int inside[MOST_EXPERTS], good = 1;
    for (i = 0; i < groups; i++) value[i] = group_value(g, t, i, size);
    for (i = 0; i < groups; i++) {
        size_t before = 0;
        for (o = 0; o < groups; o++) before += value[o] > value[i] || (value[o] >= value[i] && o < i);
        inside[i] = before < kept;
    }
    for (i = 0; i < (size_t)g->r.n_choices[t]; i++) {
        CHECK(inside[choice_of(g, t, i) / size], "only the best groups are used");
        worst = smaller(worst, biased_of(g, t, choice_of(g, t, i)));
    }
    for (e = 0; e < g->experts; e++)
        if (inside[e / size] && !has_chosen(g, t, e)) good &= biased_of(g, t, e) <= worst;
    CHECK(good && (size_t)g->r.n_choices[t] == g->k, "inside them the K best");
}

/* grouped_top_k: a token's experts lie in at most groups_kept groups, those with the largest best p
   + b (max) or the largest sum of the two best (top2_sum), and inside these they are the K best of
   p + b. */
static void test_grouped_top_k(void) {
    int trial;
    for (trial = 0; trial < 300; trial++) {
        rig g;
        size_t n, groups, size, kept, k, t;
        int biased;
        begin(trial);
        n = trial % 8 == 0 ? 1 : 1 + index_below(14);
        groups = 1 + index_below(5);
        size = 1 + index_below(3);
        kept = 1 + index_below(groups);
        k = 1 + index_below(kept * size);
        biased = below(2);
        if (!rig_start(
                &g, n, 4, groups * size, k,
                "select=grouped_top_k groups=%d groups_kept=%d group_score=%s selection_bias=%d gate=%s weight=raw",
                (int)groups, (int)kept, trial % 2 ? "max" : "top2_sum", biased, trial / 2 % 2 ? "sigmoid" : "softmax"))
            return;
        vary_call(&g, trial);
        if (!route(&g)) return;
        for (t = 0; t < n; t++)
            if (is_real(&g, t)) check_groups(&g, t, groups, kept);
        rig_end(&g);
    }
}

/* The standard deviation of the loads over the experts. */
static double load_deviation(const rig *g) {
    double mean = (double)g->r.plan.offsets[g->experts] / (double)g->experts, sum = 0.0;
    size_t e;
    for (e = 0; e < g->experts; e++) sum += ((double)g->r.counts[e] - mean) * ((double)g->r.counts[e] - mean);
    return sqrt(sum / (double)g->experts);
}

/* Sinkhorn balances in training: where logits favor some expert its loads deviate less than those
   of top_k, in every trial, and several times less on the whole. Outside training it is top_k. */
static void test_sinkhorn(void) {
    double plain = 0.0, even = 0.0;
    int trial;
    for (trial = 0; trial < 40; trial++) {
        rig g;
        double a, b;
        size_t experts, e, n = 300;
        int32_t *choices;
        begin(trial);
        experts = 2 + index_below(7);
        if (!rig_start(&g, n, 6, experts, experts > 4 && trial % 2 ? 2 : 1, "router_bias=1 weight=raw")) return;
        for (e = 0; e < experts; e++) g.tensors[MOE_ROUTER_BIAS][e] = (moe_real)(e == 0 ? 2.0 : -fabs(1.5 * normal()));
        if (below(2)) mask_some(&g, 0);
        g.call.training = 1;
        if (!route(&g)) return;
        a = load_deviation(&g);
        choices = copy_of_indices(g.r.choices, n * g.k);
        if (!rig_set(&g, "select=sinkhorn") || !route(&g)) return;
        b = load_deviation(&g);
        CHECK(b < a, "sinkhorn is more even than top_k");
        plain += a;
        even += b;
        g.call.training = 0;
        if (!route(&g)) return;
        for (e = 0; e < n; e++)
            if (is_real(&g, e))
                CHECK(same_bits(choices + e * g.k, g.r.choices + e * g.k, g.k * sizeof *choices),
                      "outside training it is top_k");
        rig_end(&g);
    }
    CHECK(even * 4.0 < plain, "several times more even");
}

/* The probability that K draws without replacement from p give the set of the marked experts, for K
   = 1 and 2. */
static double set_probability(const double *p, size_t a, size_t b) {
    return a == b ? p[a] : p[a] * p[b] / (1.0 - p[a]) + p[b] * p[a] / (1.0 - p[b]);
}

/* sample in training: the frequency of each expert (K = 1) and each pair (K = 2, without
   replacement) is its exact probability, also for gates that do not sum to 1; an expert with p = 0
   is never drawn. Outside training the K largest p are taken. */
static void test_sample(void) {
    enum { TOKENS = 6000 };
    static const char *const gates[] = {"softmax", "sigmoid", "relu"};
    int trial;
    for (trial = 0; trial < 36; trial++) {
        rig g;
        size_t experts, k, e, o, t, positive = 0;
        double p[MOST_EXPERTS], sum = 0.0;
        size_t seen[5][5];
        begin(trial);
        memset(seen, 0, sizeof seen);
        experts = trial % 12 == 0 ? 1 : 2 + index_below(4);
        k = trial % 2 && experts > 1 ? 2 : 1;
        if (!rig_start(&g, TOKENS, 1, experts, k, "select=sample router_bias=1 gate=%s weight=one",
                       gates[trial / 2 % 3]))
            return;
        for (t = 0; t < TOKENS; t++) g.x[t] = 0; /* all tokens are alike */
        for (e = 0; e < experts; e++)
            g.tensors[MOE_ROUTER_BIAS][e] = (moe_real)(e < 2 ? 0.2 + uniform() : 1.2 * normal());
        g.call.training = 1;
        if (!route(&g)) return;
        for (e = 0; e < experts; e++) {
            p[e] = p_of(&g, 0, e);
            sum += p[e];
            positive += p[e] > 0.0;
        }
        for (e = 0; e < experts; e++) p[e] /= sum;
        for (t = 0; t < TOKENS; t++) {
            size_t a = choice_of(&g, t, 0), b = choice_of(&g, t, k - 1);
            CHECK((size_t)g.r.n_choices[t] == k, "K draws");
            seen[a < b ? a : b][a < b ? b : a]++;
        }
        for (e = 0; e < experts; e++)
            for (o = e; o < experts; o++) {
                if ((e == o) != (k == 1)) continue;
                CHECK(is_share((double)seen[e][o],
                               positive <= k ? (double)(p[e] > 0.0 && p[o] > 0.0) : set_probability(p, e, o), TOKENS),
                      "the frequency is the probability");
            }
        g.call.training = 0;
        if (!route(&g)) return;
        for (e = 0; e < experts; e++)
            if (!has_chosen(&g, 0, e))
                CHECK(p_of(&g, 0, e) <= p_of(&g, 0, choice_of(&g, 0, k - 1)), "the K largest outside training");
        rig_end(&g);
    }
}

/* ---- losses ---- */

/* Choices that load all experts evenly, n a multiple of E: token t takes t, t + 1, ... (mod E).
   first: its best expert is t (mod E), so first choices are even, and its other ones are the
   lowest, so pairs are not. */
static void supply_even_load(rig *g, int first) {
    int32_t *given = (int32_t *)pooled_block(g->n * g->k, sizeof *given);
    size_t t, i;
    for (t = 0; t < g->n; t++) {
        size_t best = t % g->experts;
        for (i = 0; i < g->k; i++)
            given[t * g->k + i] = (int32_t)(first && i > 0 ? i - (i <= best) : (best + i) % g->experts);
        if (first) g->x[t * g->d + best] = 6;
    }
    g->call.given = given;
}

/* The balance loss is alpha at uniform gates whatever the load, and at an even load whatever the
   gates (rows of sigmoid and the like are normalized first), since alpha E sum f P has P = 1/E or f
   = 1/E. Over tokens f sums to K: K alpha. */
static void test_balance_loss(void) {
    static const char *const gates[] = {"softmax", "sigmoid", "sqrt_softplus"};
    static const char *const over[] = {"pairs", "tokens", "first"};
    int trial;
    for (trial = 0; trial < 360; trial++) {
        rig g;
        int even_gates = trial % 2, kind = trial / 2 % 3;
        size_t n, experts, k;
        double alpha, want;
        begin(trial);
        sizes(trial / 2, &n, &experts, &k);
        alpha = 0.1 + uniform();
        if (!even_gates) n *= experts;
        if (!rig_start(&g, n, experts, experts, k,
                       "select=%s gate=%s loss_balance=%.9g balance_over=%s balance_scope=%s",
                       even_gates ? "top_k" : "given", gates[trial / 6 % 3], alpha, over[kind],
                       even_gates && below(2) ? "sequences" : "batch"))
            return;
        if (even_gates) {
            memset(g.tensors[MOE_ROUTER_WEIGHT], 0, experts * experts * sizeof(moe_real));
            vary_call(&g, trial / 2);
        } else {
            read_logits_from_x(&g);
            supply_even_load(&g, kind == 2);
        }
        g.call.training = 1;
        if (!route(&g)) return;
        want = (double)g.router.config.loss_balance * (double)(kind == 1 ? k : 1);
        CHECK(is_near((double)g.r.loss[MOE_LOSS_BALANCE], want, EPS * want * (double)(2 * n + experts + 8)),
              "balance is alpha");
        rig_end(&g);
    }
}

static int all_finite(const moe_real *v, size_t n) {
    size_t i;
    for (i = 0; i < n; i++)
        if (!moe_is_finite(v[i])) return 0;
    return 1;
}

/* The importance loss is not negative, and it and its gradient are finite, also when no gate is
   positive, and 0 at perfect balance: exactly with uniform gates and for one expert, up to rounding
   when each expert gets the same values by turns. */
static void test_importance_loss(void) {
    static const char *const gates[] = {"softmax", "sigmoid", "relu"};
    static const char *const over[] = {"probabilities", "gate", "weights"};
    int trial;
    for (trial = 0; trial < 450; trial++) {
        rig g;
        int kind = trial % 5; /* 0: uniform gates, 1: even by turns, 2: no expert is positive, others: random */
        size_t n, experts, k, t, e;
        moe_real *dw, *dx;
        double loss;
        begin(trial);
        sizes(trial / 5, &n, &experts, &k);
        if (kind == 1) n = experts * (1 + index_below(3));
        if (!rig_start(&g, n, experts, experts, k,
                       "gate=%s loss_importance=1 importance_over=%s unbiased=%d weight=raw select=%s",
                       gates[kind == 2 ? 2 : trial / 5 % 3], over[trial / 15 % 3], trial / 45 % 2,
                       trial / 15 % 3 == 2 && kind < 2 ? "dense" : "top_k"))
            return;
        read_logits_from_x(&g);
        for (t = 0; t < n; t++)
            for (e = 0; e < experts; e++) {
                if (kind == 0) g.x[t * experts + e] = (moe_real)(1 + (int)(t % 3));
                if (kind == 1 && t > 0) g.x[t * experts + e] = g.x[(t - 1) * experts + (e + 1) % experts];
                if (kind == 1 && t == 0 && e == 0) g.x[0] = 1; /* with relu something must be positive */
                if (kind == 2) g.x[t * experts + e] = -(moe_real)uniform();
            }
        if (kind != 1) vary_call(&g, trial / 5);
        g.call.training = 1;
        if (!route(&g)) return;
        dw = normals(experts * experts, 0.0);
        dx = normals(n * experts, 0.0);
        if (!loss_gradients(&g, dw, dx)) return;
        loss = (double)g.r.loss[MOE_LOSS_IMPORTANCE];
        CHECK(moe_is_finite(g.r.loss[MOE_LOSS_IMPORTANCE]) && all_finite(dw, experts * experts) &&
                  all_finite(dx, n * experts),
              "finite");
        CHECK(loss >= 0.0, "CV^2 is not negative");
        if (kind == 0 || kind == 2 || experts == 1)
            CHECK(loss <= 0.0 && largest_of(dw, experts * experts) <= 0.0 && largest_of(dx, n * experts) <= 0.0,
                  "exactly 0 at balance");
        if (kind == 1) {
            /* sums of n values, each a quotient by a sum of E, in other orders; squared in the
               loss, not in the gradient */
            double apart = EPS * (double)(n + experts + 8);
            double steep = 4.0 * (double)(experts + 2) * (1.0 + largest_of(g.x, n * experts));
            CHECK(loss <= apart * apart * (double)experts * 4.0, "0 at balance by turns");
            CHECK(largest_of(dx, n * experts) <= apart * steep, "and so is its gradient");
        }
        rig_end(&g);
    }
}

/* The z loss is beta (log E + c)^2 when every logit is c: with logits 0 it is beta log(E)^2, and
   with one expert and logits 0 it is 0. */
static void test_z_loss(void) {
    int trial;
    for (trial = 0; trial < 160; trial++) {
        rig g;
        size_t n, experts, k, i;
        double c = 0.0, beta, want;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        beta = 0.01 + uniform();
        if (trial % 2) c = 3.0 * normal();
        if (!rig_start(&g, n, experts, experts, k, "loss_z=%.9g", beta)) return;
        read_logits_from_x(&g);
        for (i = 0; i < n * experts; i++) g.x[i] = (moe_real)c;
        vary_call(&g, trial);
        g.call.training = 1;
        if (!route(&g)) return;
        c = (double)(moe_real)c;
        want = log((double)experts) + c;
        CHECK(is_near((double)g.r.loss[MOE_LOSS_Z], (double)g.router.config.loss_z * want * want,
                      (double)g.router.config.loss_z * EPS * (double)(n + 16) * (want * want + fabs(c) + 4.0)),
              "z loss at equal logits");
        rig_end(&g);
    }
}

/* 0 <= entropy loss <= gamma log E and -gamma log E <= usage entropy <= 0 for a softmax gate; at
   uniform gates they are +-gamma log E; by concavity mean_t H(p_t) <= H(mean_t p_t), with equality
   when all tokens are alike. */
static void test_entropy_losses(void) {
    int trial;
    for (trial = 0; trial < 240; trial++) {
        rig g;
        int kind = trial % 3; /* 0: uniform, 1: all tokens alike, 2: random */
        size_t n, experts, k, t;
        double entropy, usage, most, slack;
        begin(trial);
        sizes(trial / 3, &n, &experts, &k);
        if (!rig_start(&g, n, 4, experts, k, "loss_entropy=2 loss_usage_entropy=2")) return;
        if (kind == 0) memset(g.tensors[MOE_ROUTER_WEIGHT], 0, experts * 4 * sizeof(moe_real));
        for (t = 1; t < n && kind == 1; t++) memcpy(g.x + t * 4, g.x, 4 * sizeof(moe_real));
        vary_call(&g, trial / 3);
        g.call.training = 1;
        if (!route(&g)) return;
        entropy = (double)g.r.loss[MOE_LOSS_ENTROPY];
        usage = (double)g.r.loss[MOE_LOSS_USAGE_ENTROPY];
        most = 2.0 * log((double)experts);
        slack = EPS * (double)(n + experts + 8) * (most + 2.0);
        CHECK(entropy >= -slack && entropy <= most + slack && usage <= slack && usage >= -most - slack,
              "entropies lie in 0 .. log E");
        CHECK(entropy <= -usage + slack, "the mean entropy is at most the entropy of the mean");
        if (kind == 0) CHECK(is_near(entropy, most, slack) && is_near(usage, -most, slack), "log E at uniform gates");
        if (kind == 1) CHECK(is_near(entropy, -usage, slack), "equal when all tokens are alike");
        rig_end(&g);
    }
}

/* l1 by hand, gate relu: if every p is c, n_e = N and lambda E/(K N^2) sum_e n_e sum_t p_te =
   lambda c E^2 / K; if token t has the one positive value c at expert t mod E (E divides N), n_e =
   N/E and the loss is lambda c / K. */
static void test_l1_loss(void) {
    int trial;
    for (trial = 0; trial < 160; trial++) {
        rig g;
        int turns = trial % 2;
        size_t n, experts, k, t, e;
        double c, want;
        begin(trial);
        sizes(trial / 2, &n, &experts, &k);
        if (turns) n = experts * (1 + index_below(4));
        c = 0.1 + uniform();
        if (!rig_start(&g, n, experts, experts, k, "gate=relu select=positive weight=raw loss_l1=0.5")) return;
        read_logits_from_x(&g);
        for (t = 0; t < n; t++)
            for (e = 0; e < experts; e++) g.x[t * experts + e] = (moe_real)(!turns || t % experts == e ? c : -1.0);
        if (!turns) vary_call(&g, trial / 2);
        g.call.training = 1;
        if (!route(&g)) return;
        want = 0.5 * (double)(moe_real)c / (double)k * (turns ? 1.0 : (double)(experts * experts));
        CHECK(is_near((double)g.r.loss[MOE_LOSS_L1], want, EPS * want * (double)(n * experts + 8)), "l1 by hand");
        rig_end(&g);
    }
}

/* orthogonal by hand, w = 1/2: E vectors of one direction give w E (E - 1), orthogonal ones 0, two
   at the angle a 2 w cos(a)^2, and E > 1 directions spread evenly over the half circle w E (E - 2)
   / 2. Lengths do not matter. */
static void test_orthogonal_loss(void) {
    const double pi = 3.14159265358979323846;
    int trial;
    for (trial = 0; trial < 160; trial++) {
        rig g;
        int kind = trial % 4;
        size_t experts, e, q;
        double want = 0.0, angle, count;
        begin(trial);
        experts = kind == 2 ? 2 : 1 + index_below(8);
        angle = 2.0 * pi * uniform();
        if (!rig_start(&g, 3, 8, experts, 1, "loss_orthogonal=0.5 score=%s", trial / 4 % 2 ? "linear" : "cosine"))
            return;
        count = (double)experts;
        for (e = 0; e < experts; e++) {
            double length = exp(normal()), turn = kind == 2 ? angle * (double)e : pi * (double)e / count;
            moe_real *row = g.tensors[MOE_ROUTER_WEIGHT] + e * 8;
            for (q = 0; q < 8; q++) row[q] = 0;
            if (kind == 0)
                for (q = 0; q < 8; q++) row[q] = (moe_real)(length * (double)((int)q - 3));
            if (kind == 1) row[e] = (moe_real)length;
            if (kind > 1) {
                row[2] = (moe_real)(length * cos(turn));
                row[5] = (moe_real)(length * sin(turn));
            }
        }
        g.call.training = 1;
        if (!route(&g)) return;
        if (kind == 0) want = 0.5 * count * (count - 1.0);
        if (kind == 2) want = cos(angle) * cos(angle);
        if (kind == 3 && experts > 1) want = 0.25 * count * (count - 2.0);
        CHECK(is_near((double)g.r.loss[MOE_LOSS_ORTHOGONAL], want, EPS * 40.0 * (1.0 + count * count)),
              "orthogonal by hand");
        rig_end(&g);
    }
}

/* similarity by hand, D the mean distance of two tokens: all certain of one expert give lambda_same
   D/E, two certain of different ones -lambda_diff D/(E^2 - E), uniform p (lambda_same -
   lambda_diff) D/E^2 (E = 1: without lambda_diff), one token 0. */
static void test_similarity_loss(void) {
    int trial;
    for (trial = 0; trial < 240; trial++) {
        rig g;
        int kind = trial % 3, supplied = trial / 3 % 2;
        size_t n, experts, k, t, o, q, e, real;
        double mean = 0.0, want, most = 0.0, count;
        moe_real *distances;
        begin(trial);
        sizes(trial / 3, &n, &experts, &k);
        if (kind == 1) {
            n = 2;
            experts += experts < 2;
        }
        if (!rig_start(&g, n, experts, experts, 1, "gate=identity loss_similarity_same=0.75 loss_similarity_diff=0.5"))
            return;
        g.call.router_x = g.x; /* logits from one array, distances from another */
        g.call.x = normals(n * experts, 1.0);
        read_logits_from_x(&g);
        for (t = 0; t < n; t++)
            for (e = 0; e < experts; e++)
                g.x[t * experts + e] = (moe_real)(kind == 2                                      ? 1.0 / (double)experts
                                                  : e == (kind == 1 && t == 1 ? experts - 1 : 0) ? 1.0
                                                                                                 : 0.0);
        if (kind != 1) vary_call(&g, trial / 3);
        g.call.training = 1;
        distances = normals(n * n, 1.0);
        if (supplied) g.call.distances = distances;
        if (!route(&g)) return;
        real = count_real(&g);
        count = (double)experts;
        for (t = 0; t < n; t++)
            for (o = 0; o < n; o++) {
                double square = 0.0;
                if (t == o || !is_real(&g, t) || !is_real(&g, o)) continue;
                for (q = 0; q < experts; q++)
                    square += pow((double)g.call.x[t * experts + q] - (double)g.call.x[o * experts + q], 2.0);
                square = supplied ? (double)distances[t * n + o] : sqrt(square);
                mean += square / ((double)real * (double)real - (double)real);
                most = larger(most, fabs(square));
            }
        want = kind == 0   ? 0.75 * mean / count
               : kind == 1 ? -0.5 * mean / (count * count - count)
                           : (0.75 - (experts > 1 ? 0.5 : 0.0)) * mean / (count * count);
        CHECK(is_near((double)g.r.loss[MOE_LOSS_SIMILARITY], want,
                      EPS * (double)(n * n + 2 * experts + 16) * (most + 1.0)),
              "similarity by hand");
        rig_end(&g);
    }
}

/* locality by hand on M machines, l = 1 - eps at the own machine and eps/(M-1) elsewhere: p = l
   gives 0, all p at the own machine log 1/(1-eps), all at one other machine log (M-1)/eps, even p
   sum_j 1/M log(1/(M l_j)); each is the same for all machines, so their shares do not matter. */
static void test_locality_loss(void) {
    int trial;
    for (trial = 0; trial < 240; trial++) {
        rig g;
        int kind = trial % 4;
        size_t n, experts, nodes, each, t, e;
        int32_t *home, *owner;
        double eps = 0.01, want = 0.0, count, away;
        begin(trial);
        nodes = 2 + index_below(4);
        each = 1 + index_below(3);
        experts = nodes * each;
        n = trial % 8 == 0 ? 1 : 1 + index_below(14);
        if (!rig_start(&g, n, experts, experts, 1, "gate=identity loss_locality=0.5 nodes=%d", (int)nodes)) return;
        read_logits_from_x(&g);
        home = (int32_t *)pooled_block(n, sizeof *home);
        owner = (int32_t *)pooled_block(experts, sizeof *owner);
        count = (double)nodes;
        away = eps / (count - 1.0);
        for (e = 0; e < experts; e++) owner[e] = (int32_t)(trial / 4 % 2 ? e % nodes : e / each);
        for (t = 0; t < n; t++) {
            home[t] = (int32_t)index_below(nodes);
            for (e = 0; e < experts; e++) {
                int at_home = owner[e] == home[t], next = owner[e] == (home[t] + 1) % (int32_t)nodes;
                double mass = kind == 0   ? (at_home ? 1.0 - eps : away)
                              : kind == 1 ? (double)at_home
                              : kind == 2 ? (double)next
                                          : 1.0 / count;
                g.x[t * experts + e] = (moe_real)(mass / (double)each);
            }
        }
        vary_call(&g, trial);
        g.call.training = 1;
        g.call.token_machine = home;
        if (trial / 4 % 2) g.call.expert_machine = owner; /* else the default: consecutive experts share a node */
        if (!route(&g)) return;
        if (kind == 1) want = -0.5 * log(1.0 - eps);
        if (kind == 2) want = -0.5 * log(away);
        if (kind == 3) want = -0.5 * (log(count) + (log(1.0 - eps) + (count - 1.0) * log(away)) / count);
        /* the mass on a node is a sum of n E terms; its logarithm is off by as much */
        CHECK(is_near((double)g.r.loss[MOE_LOSS_LOCALITY], want, EPS * (double)(n * experts + 24) * 8.0),
              "locality by hand");
        rig_end(&g);
    }
}

/* ---- selection bias ---- */

/* One routing with a bias against p of the routing without; decides: the bias is so large that it
   alone makes the order. Returns how many tokens chose otherwise. */
static int check_biased(const rig *g, const moe_real *p, const int32_t *choices, int decides) {
    const moe_real *bias = g->tensors[MOE_ROUTER_SELECTION_BIAS];
    size_t t, e, i, above;
    int changed = 0;
    for (t = 0; t < g->n; t++) {
        if (!is_real(g, t)) continue;
        CHECK(same_bits(p + t * g->experts, g->r.probabilities + t * g->experts, g->experts * sizeof *p),
              "a bias does not change p");
        changed += !same_bits(choices + t * g->k, g->r.choices + t * g->k, g->k * sizeof *choices);
        for (i = 0; i < g->k; i++) {
            size_t cell = t * g->experts + choice_of(g, t, i);
            CHECK(same_bits(g->r.weights + cell, p + cell, sizeof *p), "raw weights are p");
            for (e = above = 0; e < g->experts; e++) above += bias[e] > bias[choice_of(g, t, i)];
            CHECK(!decides || above == i, "a large bias decides");
        }
    }
    return changed;
}

/* The selection bias takes part in choosing only: gates are the same bits and raw weights are the p
   of the chosen, whatever it is; a large bias decides, the K experts with the largest bias are
   chosen, in that order. */
static void test_selection_bias(void) {
    static const char *const gates[] = {"softmax", "sigmoid", "sqrt_softplus", "relu", "identity"};
    int trial, changed = 0;
    for (trial = 0; trial < 300; trial++) {
        rig g;
        int grouped = trial / 5 % 2;
        size_t n, experts, k, e, groups;
        moe_real *p, *bias;
        int32_t *choices;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        groups = grouped && experts % 3 == 0 && k <= experts / 3 ? 3 : 1; /* the first of three groups can hold all K */
        if (!rig_start(&g, n, 4, experts, k, "gate=%s weight=raw selection_bias=1 select=%s groups=%d",
                       gates[trial % 5], grouped ? "grouped_top_k" : "top_k", (int)groups))
            return;
        vary_call(&g, trial);
        bias = g.tensors[MOE_ROUTER_SELECTION_BIAS];
        memset(bias, 0, experts * sizeof *bias);
        if (!route(&g)) return;
        p = copy_of(g.r.probabilities, n * experts);
        choices = copy_of_indices(g.r.choices, n * k);
        for (e = 0; e < experts; e++) bias[e] = (moe_real)(0.5 * normal());
        if (!route(&g)) return;
        changed += check_biased(&g, p, choices, 0);
        for (e = 0; e < experts; e++) /* p is some tens at most */
            bias[e] = (moe_real)(1000.0 * (double)(groups > 1 ? experts - e : (e + (size_t)trial) % experts));
        if (!route(&g)) return;
        changed += check_biased(&g, p, choices, 1);
        rig_end(&g);
    }
    CHECK(changed > 200, "the bias changes choices");
}

/* ---- permutations ---- */

static size_t *draw_permutation(size_t n) {
    size_t *order = (size_t *)pooled_block(n, sizeof *order), i;
    for (i = 0; i < n; i++) {
        size_t at = index_below(i + 1);
        order[i] = order[at];
        order[at] = i;
    }
    return order;
}

/* Rows of to are those of from in another order: row order[i] of to is row i of from. */
static void permute_rows(const moe_real *from, moe_real *to, const size_t *order, size_t rows, size_t width) {
    size_t i;
    for (i = 0; i < rows; i++) memcpy(to + order[i] * width, from + i * width, width * sizeof *to);
}

/* Numbering the experts in another order permutes logits (the same bits), choices and weights,
   whatever selects; sums over experts are rounded in another order, and where sinkhorn has to
   choose between values as near as that, it may choose either. */
static void test_expert_permutation(void) {
    static const int places[] = {MOE_ROUTER_WEIGHT, MOE_ROUTER_BIAS, MOE_ROUTER_SELECTION_BIAS,
                                 MOE_ROUTER_EXPERT_SCALE};
    static const char *const selects[] = {"top_k",    "top_p",   "threshold threshold_fallback=never",
                                          "positive", "dense",   "expert_choice expert_choice_score=z",
                                          /* with relu all p may be 0: a fallback would choose from
                                             a tie */
                                          "affinity", "sinkhorn"};
    static const char *const gates[] = {"softmax", "sigmoid", "sqrt_softplus", "relu"};
    long tokens = 0, other = 0;
    int trial;
    for (trial = 0; trial < 480; trial++) {
        rig g;
        size_t n, experts, k, t, e, i, *order;
        moe_real *logits, *weights;
        unsigned char *selected;
        begin(trial);
        sizes(trial / 8, &n, &experts, &k);
        if (!rig_start(&g, n, 5, experts, k, "router_bias=1 selection_bias=%d expert_scale=1 gate=%s select=%s",
                       trial % 8 == 0, gates[trial / 8 % 4], selects[trial % 8]))
            return;
        vary_call(&g, trial / 8);
        g.call.training = 1;
        if (!route(&g)) return;
        logits = copy_of(g.r.logits, n * experts);
        weights = copy_of(g.r.weights, n * experts);
        selected = (unsigned char *)pooled_block(n * experts, 1);
        memcpy(selected, g.r.selected, n * experts);
        order = draw_permutation(experts);
        for (i = 0; i < 4; i++) {
            moe_real *tensor = g.tensors[places[i]];
            size_t width = i == 0 ? 5 : 1;
            if (tensor != NULL) permute_rows(copy_of(tensor, experts * width), tensor, order, experts, width);
        }
        if (!route(&g)) return;
        for (t = 0; t < n; t++) {
            double slack = EPS * (double)(8 * experts + 32);
            int same = 1;
            if (!is_real(&g, t)) continue;
            for (e = 0; e < experts; e++) {
                CHECK(same_bits(logits + t * experts + e, g.r.logits + t * experts + order[e], sizeof *logits),
                      "logits are permuted");
                same &= selected[t * experts + e] == g.r.selected[t * experts + order[e]];
            }
            /* one token alone is a tie of all experts */
            if (trial % 8 == 7 && count_real(&g) > 1) {
                tokens++;
                other += !same;
            }
            CHECK(same || trial % 8 == 7, "choices are permuted");
            for (e = 0; e < experts && same; e++) {
                double w = (double)weights[t * experts + e];
                CHECK(is_near(w, w_of(&g, t, order[e]), slack * (fabs(w) + EPS)), "weights are permuted");
            }
        }
        rig_end(&g);
    }
    CHECK(other * 100 < tokens, "near ties are rare");
}

/* Another order of the tokens permutes the results of selections that place nobody first: of top_k
   and expert_choice without ties bit for bit, of soft and sinkhorn up to rounding of their sums
   over tokens. */
static void test_token_permutation(void) {
    static const char *const selects[] = {"top_k", "expert_choice", "sinkhorn", "soft slots=2"};
    long tokens = 0, other = 0;
    int trial;
    for (trial = 0; trial < 240; trial++) {
        rig g;
        int soft = trial % 4 == 3, sinkhorn = trial % 4 == 2;
        size_t n, experts, k, t, e, *order, columns;
        moe_real *x, *weights, *dispatch, *combine;
        unsigned char *mask;
        begin(trial);
        sizes(trial / 4, &n, &experts, &k);
        if (!rig_start(&g, n, 5, experts, k, "select=%s", selects[trial % 4])) return;
        if (below(2)) mask_some(&g, 0);
        g.call.training = 1;
        if (!route(&g)) return;
        columns = soft ? 2 * experts : experts;
        weights = copy_of(g.r.weights, n * experts);
        dispatch = copy_of(g.r.gate, n * columns);
        combine = copy_of(g.r.probabilities, n * columns);
        order = draw_permutation(n);
        x = copy_of(g.x, n * 5);
        mask = g.mask;
        permute_rows(x, g.x, order, n, 5);
        if (mask != NULL) {
            g.call.mask = g.mask = (unsigned char *)pooled_block(n, 1);
            for (t = 0; t < n; t++) g.mask[order[t]] = mask[t];
        }
        if (!route(&g)) return;
        for (t = 0; t < n; t++) {
            size_t to = order[t];
            int same = same_bits(weights + t * experts, g.r.weights + to * experts, experts * sizeof *weights);
            if (!is_real(&g, to)) continue;
            tokens += sinkhorn;
            other += sinkhorn && !same;
            if (!soft) CHECK(same || sinkhorn, "weights are permuted, bit for bit");
            for (e = 0; e < columns && soft; e++) { /* a softmax over n tokens, whose sum is in another order */
                double d = (double)dispatch[t * columns + e], c = (double)combine[t * columns + e];
                CHECK(is_near(d, (double)g.r.gate[to * columns + e], EPS * (double)(n + 4) * d),
                      "dispatch is permuted");
                CHECK(is_near(c, p_of(&g, 0, to * columns + e), EPS * 4.0 * c), "combine is permuted");
            }
        }
        rig_end(&g);
    }
    CHECK(other * 200 < tokens, "near ties of sinkhorn are rare");
}

/* ---- invariances ---- */

/* top_k with a softmax gate does not see a constant c that is added to all logits: the same choices
   and weights. The sum rounds a logit by |z + c| EPS, so choices are compared where the logits
   differ by more. */
static void test_constant_shift(void) {
    static const char *const weights_of[] = {"raw", "sum", "softmax", "p_norm weight_p=3", "uniform"};
    int trial, settled = 0;
    for (trial = 0; trial < 300; trial++) {
        rig g;
        size_t n, experts, k, t, e, i;
        double c;
        moe_real *logits, *weights;
        int32_t *choices;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        c = pow(10.0, 5.0 * uniform() - 2.0) * (below(2) ? 1.0 : -1.0);
        if (!rig_start(&g, n, 5, experts, k, "router_bias=1 weight=%s", weights_of[trial / 8 % 5])) return;
        vary_call(&g, trial);
        memset(g.tensors[MOE_ROUTER_BIAS], 0, experts * sizeof(moe_real));
        if (!route(&g)) return;
        logits = copy_of(g.r.logits, n * experts);
        weights = copy_of(g.r.weights, n * experts);
        choices = copy_of_indices(g.r.choices, n * k);
        for (e = 0; e < experts; e++) g.tensors[MOE_ROUTER_BIAS][e] = (moe_real)c;
        if (!route(&g)) return;
        for (t = 0; t < n; t++) {
            double off = EPS * (fabs(c) + 20.0);
            if (!is_real(&g, t) || least_gap(logits + t * experts, experts) < 2.0 * off) continue;
            settled++;
            for (i = 0; i < k; i++) CHECK((size_t)choices[t * k + i] == choice_of(&g, t, i), "the same choices");
            for (e = 0; e < experts; e++)
                CHECK(is_near((double)weights[t * experts + e], w_of(&g, t, e),
                              4.0 * off + EPS * (double)(4 * experts + 16)),
                      "the same weights");
        }
        rig_end(&g);
    }
    CHECK(settled > 800, "most tokens are settled");
}

/* The most that a logit can be off in relation to EPS: 1 for a cosine, |x| where the length stays
   in, and |x|/|P x| where P x, that a cosine is taken of, may be shorter than what it is rounded
   by. by: what the token's length was multiplied with. */
static double length_slack(const rig *g, size_t t, double by) {
    const moe_real *projection = g->tensors[MOE_ROUTER_PROJECTION], *x = g->x + t * g->d;
    double size = 0.0, square = 0.0;
    size_t q, o;
    for (q = 0; q < g->d; q++) size += fabs((double)x[q]) / by;
    if (g->router.config.cosine_keep_length ||
        (g->router.config.score == MOE_SCORE_GRAP && !g->router.config.grap_cosine))
        return 1.0 + size;
    if (projection == NULL) return 2.0;
    for (o = 0; o < (size_t)g->router.config.cosine_dim; o++) {
        double sum = 0.0;
        for (q = 0; q < g->d; q++) sum += (double)projection[o * g->d + q] * (double)x[q] / by;
        square += sum * sum;
    }
    return 2.0 + 2.0 * size * largest_of(projection, (size_t)g->router.config.cosine_dim * g->d) / sqrt(square);
}

/* cosine does not depend on the lengths of tokens and experts; with cosine_keep_length it is
   proportional to the token's; grap_cosine does not depend on the token's length, grap is
   proportional to it. Lengths change by factors from 1e-3 to 1e3. */
static void test_lengths(void) {
    static const char *const scores[] = {"cosine cosine_tau=0.5", "cosine cosine_dim=3", "cosine cosine_keep_length=1",
                                         "grap grap_cosine=1", "grap"};
    int trial;
    for (trial = 0; trial < 300; trial++) {
        rig g;
        int kind = trial % 5;
        size_t n, experts, k, d, t, e, q, width;
        double *by;
        moe_real *logits;
        begin(trial);
        sizes(trial / 5, &n, &experts, &k);
        d = kind > 2 ? experts * (1 + index_below(3)) : 1 + index_below(8);
        if (!rig_start(&g, n, d, experts, k, "score=%s", scores[kind])) return;
        vary_call(&g, trial / 5);
        if (!route(&g)) return;
        logits = copy_of(g.r.logits, n * experts);
        by = (double *)pooled_block(n, sizeof *by);
        for (t = 0; t < n; t++)
            for (q = 0, by[t] = pow(10.0, 6.0 * uniform() - 3.0); q < d; q++)
                g.x[t * d + q] = (moe_real)(by[t] * (double)g.x[t * d + q]);
        for (e = 0, width = kind == 1 ? 3 : d; e < experts && kind < 3; e++) {
            moe_real *row = g.tensors[MOE_ROUTER_WEIGHT] + e * width;
            double factor = pow(10.0, 6.0 * uniform() - 3.0);
            for (q = 0; q < width; q++) row[q] = (moe_real)(factor * (double)row[q]);
        }
        if (!route(&g)) return;
        for (t = 0; t < n; t++)
            for (e = 0; e < experts && is_real(&g, t);
                 e++) /* every number is rounded once more by its factor; then d products, two lengths */
                CHECK(is_near(z_of(&g, t, e) / (kind == 2 || kind == 4 ? by[t] : 1.0), (double)logits[t * experts + e],
                              EPS * (double)(2 * d + 24) * length_slack(&g, t, by[t])),
                      "a length that does not matter");
        rig_end(&g);
    }
}

/* sparsemixer: the first pick weighs 1 when every other expert is further than 2 eps from the best,
   relative to the larger of |z| and the best; of E equal logits, positive or negative or 0, the
   first pick weighs 1/E, the second 1/(E - 1), and so on. */
static void test_sparsemixer(void) {
    int trial;
    for (trial = 0; trial < 200; trial++) {
        rig g;
        int equal = trial % 2;
        size_t n, experts, k, t, e, i;
        double eps;
        begin(trial);
        sizes(trial / 2, &n, &experts, &k);
        eps = pow(10.0, -3.0 * uniform() - 0.5);
        if (!rig_start(&g, n, experts, experts, k, "weight=sparsemixer sparsemixer_eps=%.9g", eps)) return;
        read_logits_from_x(&g);
        for (t = 0; t < n; t++) {
            size_t best = index_below(experts);
            double c = t % 4 == 0 ? 0.0 : 3.0 * normal(), top = 0.1 + fabs(normal());
            for (e = 0; e < experts; e++) {
                /* (top - z) / top > 2 eps for z in (-top, top (1 - 2 eps)), and for z below -top
                   since then |z| > top */
                double lower = top * (1.0 - 2.02 * eps - 3.0 * uniform());
                g.x[t * experts + e] = (moe_real)(equal ? c : e == best ? top : lower);
            }
        }
        vary_call(&g, trial / 2);
        if (!route(&g)) return;
        for (t = 0; t < n; t++) {
            if (!is_real(&g, t)) continue;
            for (i = 0; i < k && equal; i++) {
                CHECK(choice_of(&g, t, i) == i, "equal logits: the lower index first");
                CHECK(is_near(w_of(&g, t, i), 1.0 / (double)(experts - i), EPS * (double)experts), "1/E, 1/(E-1), ...");
            }
            if (!equal)
                CHECK(w_of(&g, t, choice_of(&g, t, 0)) >= 1.0 && w_of(&g, t, choice_of(&g, t, 0)) <= 1.0,
                      "no rival: weight 1");
        }
        rig_end(&g);
    }
}

/* ---- balanced assignment ---- */

static int start_balanced(rig *g, size_t n, size_t experts) {
    if (!rig_start(g, n, experts, experts, 1, "select=balanced weight=raw")) return 0;
    read_logits_from_x(g);
    g->call.training = 1;
    return 1;
}

/* Logits of many kinds: normal ones, few integers (many ties), all equal, favoring one
   expert, of very different sizes. */
static void draw_logits(rig *g, int kind) {
    size_t i;
    for (i = 0; i < g->n * g->experts; i++) {
        double z = normal();
        if (kind == 1) z = (double)(below(3) - 1);
        if (kind == 2) z = 0.25;
        if (kind == 3 && i % g->experts == 0) z += 5.0;
        if (kind == 4) z *= exp(3.0 * normal());
        g->x[i] = (moe_real)z;
    }
}

/* The sum of z over the choices, and the largest |z|. */
static double assigned_sum(const rig *g, double *most) {
    double sum = 0.0;
    size_t t, e;
    for (t = 0, *most = 0.0; t < g->n; t++) {
        if (!is_real(g, t)) continue;
        sum += z_of(g, t, choice_of(g, t, 0));
        for (e = 0; e < g->experts; e++) *most = larger(*most, fabs(z_of(g, t, e)));
    }
    return sum;
}

/* balanced in training: each real token has one expert, padding none, and the loads of the experts
   differ by at most 1, whatever the logits; raw weights are the gate's p; outside training it is
   top_k with K = 1. */
static void test_balanced_loads(void) {
    int trial;
    for (trial = 0; trial < 300; trial++) {
        rig g;
        size_t n, experts, k, t, e, real, sum = 0;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        n += index_below(40);
        if (!start_balanced(&g, n, experts)) return;
        draw_logits(&g, trial / 8 % 5);
        vary_call(&g, trial);
        if (!route(&g)) return;
        real = count_real(&g);
        for (e = 0; e < experts; e++) {
            CHECK(g.r.counts[e] == real / experts || g.r.counts[e] == (real + experts - 1) / experts,
                  "loads differ by at most 1");
            sum += g.r.counts[e];
        }
        CHECK(sum == real && g.r.n_dropped == 0, "every real token is served");
        for (t = 0; t < n; t++) {
            CHECK(g.r.n_choices[t] == is_real(&g, t), "one expert for each real token");
            if (is_real(&g, t))
                CHECK(same_bits(g.r.weights + t * experts + choice_of(&g, t, 0),
                                g.r.probabilities + t * experts + choice_of(&g, t, 0), sizeof(moe_real)),
                      "raw weights are p");
        }
        check_plan(&g);
        g.call.training = 0;
        if (!route(&g)) return;
        for (t = 0; t < n; t++) {
            size_t best = 0;
            if (!is_real(&g, t)) continue;
            for (e = 1; e < experts; e++)
                if (z_of(&g, t, e) > z_of(&g, t, best)) best = e;
            CHECK(choice_of(&g, t, 0) == best, "outside training it is top_k");
        }
        rig_end(&g);
    }
}

/* The largest sum of z over all assignments of the real tokens from t on, with room[e] places left
   at e and `extra` experts that may still take one token more than that. */
static double best_sum(const rig *g, size_t t, int *room, int extra) {
    double best = -HUGE_VAL;
    size_t e;
    while (t < g->n && !is_real(g, t)) t++;
    if (t == g->n) return 0.0;
    for (e = 0; e < g->experts; e++) {
        int last = room[e] == 0; /* 0: full but for the one more; -1: that is taken as well */
        if (room[e] < 0 || (last && extra == 0)) continue;
        room[e]--;
        best = larger(best, z_of(g, t, e) + best_sum(g, t + 1, room, extra - last));
        room[e]++;
    }
    return best;
}

/* balanced is optimal: for up to 7 tokens and 4 experts no assignment with loads within 1 of each
   other has a larger sum of z (all are tried). */
static void test_balanced_optimum(void) {
    int trial;
    for (trial = 0; trial < 250; trial++) {
        rig g;
        size_t n, experts, e, real;
        int room[4];
        double most, got;
        begin(trial);
        n = trial % 8 == 0 ? 1 : 1 + index_below(7);
        experts = trial % 8 == 1 ? 1 : 1 + index_below(4);
        if (!start_balanced(&g, n, experts)) return;
        draw_logits(&g, trial / 8 % 5);
        vary_call(&g, trial);
        if (!route(&g)) return;
        real = count_real(&g);
        for (e = 0; e < experts; e++) room[e] = (int)(real / experts);
        got = assigned_sum(&g, &most);
        CHECK(got >= best_sum(&g, 0, room, (int)(real % experts)) - EPS * 4.0 * (double)n * most,
              "no assignment is better");
        rig_end(&g);
    }
}

/* balanced is optimal at any size: an assignment is optimal if and only if no cyclic exchange of
   tokens between experts gains, where an expert with one token more may also pass one on to an
   expert with one fewer (no negative cycle in the residual graph of the flow). */
static void test_balanced_exchanges(void) {
    int trial;
    for (trial = 0; trial < 120; trial++) {
        rig g;
        size_t n, experts, a, b, c, t;
        double gain[MOST_EXPERTS][MOST_EXPERTS], most, sum;
        begin(trial);
        n = 1 + index_below(150);
        experts = 1 + index_below(12);
        if (!start_balanced(&g, n, experts)) return;
        draw_logits(&g, trial % 5);
        vary_call(&g, trial);
        if (!route(&g)) return;
        sum = assigned_sum(&g, &most);
        for (a = 0; a < experts; a++)
            for (b = 0; b < experts; b++) {
                /* the most that moving one token from a to b gains; back from fewer to more costs
                   nothing */
                gain[a][b] = a != b && g.r.counts[a] < g.r.counts[b] ? 0.0 : -HUGE_VAL;
                for (t = 0; t < n && a != b; t++)
                    if (is_real(&g, t) && choice_of(&g, t, 0) == a)
                        gain[a][b] = larger(gain[a][b], z_of(&g, t, b) - z_of(&g, t, a));
            }
        for (c = 0; c < experts; c++) /* the best paths; a circle that gains would show as gain[a][a] > 0 */
            for (a = 0; a < experts; a++)
                for (b = 0; b < experts; b++)
                    if (gain[a][c] > -HUGE_VAL && gain[c][b] > -HUGE_VAL)
                        gain[a][b] = larger(gain[a][b], gain[a][c] + gain[c][b]);
        for (a = 0; a < experts; a++)
            CHECK(!(gain[a][a] > EPS * 8.0 * (double)(n + experts) * (most + fabs(sum) / (double)n)),
                  "no exchange of tokens gains");
        rig_end(&g);
    }
}

/* balanced compares logits of any size: z times a power of 2 gives the same experts. */
static void test_balanced_sizes(void) {
    const int far = sizeof(moe_real) == sizeof(double) ? 1000 : 100;
    int trial;
    for (trial = 0; trial < 60; trial++) {
        rig g;
        size_t n, i, t, before[40];
        begin(trial);
        n = 10 + index_below(30);
        if (!start_balanced(&g, n, 2 + index_below(6))) return;
        draw_logits(&g, trial % 2 * 3);
        if (!route(&g)) return;
        for (t = 0; t < n; t++) before[t] = choice_of(&g, t, 0);
        for (i = 0; i < n * g.experts; i++) g.x[i] *= (moe_real)ldexp(1, trial % 3 == 0 ? far : -far);
        if (!route(&g)) return;
        for (t = 0; t < n; t++) CHECK(choice_of(&g, t, 0) == before[t], "the same experts for logits of another size");
        rig_end(&g);
    }
}

/* Padding is ignored by balanced: the real tokens alone have the same sum of z, and when the
   optimum is unique (normal z) the same experts. More than one expert per token is refused. */
static void test_balanced_padding(void) {
    moe_router_config c;
    moe_error error;
    int trial;
    for (trial = 0; trial < 120; trial++) {
        rig g, alone;
        size_t n, experts, k, t, at = 0, real;
        double most, with, without;
        begin(trial);
        sizes(trial, &n, &experts, &k);
        n += index_below(20);
        if (!start_balanced(&g, n, experts)) return;
        draw_logits(&g, 0);
        mask_some(&g, trial % 8 == 3);
        if (!route(&g)) return;
        real = count_real(&g);
        with = assigned_sum(&g, &most);
        if (!start_balanced(&alone, real, experts)) return;
        for (t = 0; t < n; t++)
            if (is_real(&g, t)) memcpy(alone.x + at++ * experts, g.x + t * experts, experts * sizeof(moe_real));
        if (!route(&alone)) return;
        without = assigned_sum(&alone, &most);
        CHECK(is_near(with, without, EPS * 4.0 * (double)n * most), "the same sum without padding");
        for (t = at = 0; t < n; t++)
            if (is_real(&g, t))
                CHECK(choice_of(&g, t, 0) == choice_of(&alone, at++, 0), "the same experts without padding");
        rig_end(&g);
    }
    memset(&c, 0, sizeof c);
    c.d_model = 4;
    c.n_experts = 4;
    c.top_k = 2;
    c.select = MOE_SELECT_BALANCED;
    error.message[0] = '\0';
    CHECK(moe_router_check(&c, NULL, &error) == MOE_ERR_CONFIG && strstr(error.message, "top_k") != NULL,
          "K = 2 is refused, and named");
}

static void run(void (*test)(void)) {
    test_now++;
    test();
    release(0);
}

int main(void) {
    fastest = moe_kernels_select(MOE_KERNELS_AUTO);
    CASE(run(test_sum_is_softmax));
    CASE(run(test_entropy_of_similarity));
    CASE(run(test_entropy_of_attention));
    CASE(run(test_attention_output));
    CASE(run(test_attention_of_output));
    CASE(run(test_exact_weights));
    CASE(run(test_any_lambda));
    CASE(run(test_misassignment));
    CASE(run(test_success_by_simulation));
    CASE(run(test_success_by_formula));
    CASE(run(test_gate_ranges));
    CASE(run(test_small_tau));
    CASE(run(test_equal_spreads));
    CASE(run(test_posterior));
    CASE(run(test_entropy_proposition));
    CASE(run(test_dropless));
    CASE(run(test_capacity));
    CASE(run(test_expert_choice));
    CASE(run(test_affinity));
    CASE(run(test_top_p));
    CASE(run(test_threshold));
    CASE(run(test_grouped_top_k));
    CASE(run(test_sinkhorn));
    CASE(run(test_sample));
    CASE(run(test_balance_loss));
    CASE(run(test_importance_loss));
    CASE(run(test_z_loss));
    CASE(run(test_entropy_losses));
    CASE(run(test_l1_loss));
    CASE(run(test_orthogonal_loss));
    CASE(run(test_similarity_loss));
    CASE(run(test_locality_loss));
    CASE(run(test_selection_bias));
    CASE(run(test_expert_permutation));
    CASE(run(test_token_permutation));
    CASE(run(test_constant_shift));
    CASE(run(test_lengths));
    CASE(run(test_sparsemixer));
    CASE(run(test_balanced_loads));
    CASE(run(test_balanced_optimum));
    CASE(run(test_balanced_exchanges));
    CASE(run(test_balanced_sizes));
    CASE(run(test_balanced_padding));
    return test_end();
}
