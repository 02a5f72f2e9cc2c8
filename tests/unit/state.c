/* state.c - what moe_routers.h and moe.h promise of state, schedules, replay, custom stages,
   students, clusters in networks and decoding.

     cc -std=c99 -O2 -I. tests/unit/state.c -o state -lm && ./state
     (also with -DMOE_REAL=double, and as C++)

   Everything goes through the public functions and is compared with computations of the test's own.
   Exit status 1 if a check failed. */

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
#define NEAR 1e-9
#else
#define NEAR 2e-4
#endif

/* Relative where the number is large. */
#define NEARLY(got, want, what) CHECK_NEAR_AT(__LINE__, got, want, NEAR * (1.0 + fabs((double)(want))), what)

static moe_rng rng; /* of the test itself */

static moe_real *normals(size_t count, double spread, uint64_t seed) {
    moe_real *v = reals(count);
    moe_rng own;
    size_t i;
    moe_rng_seed(&own, seed);
    for (i = 0; i < count; i++) v[i] = (moe_real)spread * moe_rng_normal(&own);
    return v;
}

static moe_real *copy_of(const moe_real *v, size_t count) {
    moe_real *made = reals(count);
    if (count > 0) memcpy(made, v, count * sizeof *v);
    return made;
}

static int below(int n) { return (int)moe_rng_below(&rng, (uint64_t)n); }

static int all_zero(const moe_real *v, size_t n) {
    size_t i;
    for (i = 0; i < n; i++)
        if (v[i] < 0 || v[i] > 0 || !moe_is_finite(v[i])) return 0;
    return 1;
}

static moe_router_config config_of(const char *settings) {
    moe_router_config c;
    moe_error error;
    memset(&c, 0, sizeof c);
    c.preset = MOEI_OF_A_FILE; /* what has no effect is reset */
    if (!CHECK(moe_fields_apply(moe_router_fields(), &c, settings, &error) == MOE_OK, settings))
        printf("  %s\n", error.message);
    return c;
}

static moe_layer_config layer_of(const char *settings) {
    moe_layer_config c;
    moe_error error;
    memset(&c, 0, sizeof c);
    if (!CHECK(moe_fields_apply(moe_layer_fields(), &c, settings, &error) == MOE_OK, settings))
        printf("  %s\n", error.message);
    return c;
}

/* ---- a router alone, with all that a call may have to bring ---- */

typedef struct bench {
    moe_router router;
    moe_call call;
    moe_routing routing;
    moe_rng rng;
    moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT], *gradients[MOE_ROUTER_PARAMETER_COUNT];
    size_t counts[MOE_ROUTER_PARAMETER_COUNT];
    moe_real *x, *dx, *previous_input, *previous_weights, *attention, *outputs, *teacher, *nodes;
    int32_t *token_ids, *previous_experts, *home;
    unsigned char *mask;
    void *memory;
    size_t size;
} bench;

/* Values that depend only on the place and the shape, so that two routers with a tensor in common
   have the same. State is at its start. */
static void fill_tensor(int place, const moe_parameter *slot, size_t experts, moe_real *v) {
    moe_rng own;
    size_t i;
    moe_rng_seed(&own, 1000u + (uint64_t)place);
    for (i = 0; i < slot->count; i++) {
        moe_real spread = slot->init_std > 0 ? slot->init_std : (moe_real)0.3, draw = moe_rng_normal(&own);
        v[i] = slot->init_value + ((slot->flags & (unsigned)MOE_PARAM_STATE) != 0 ? (moe_real)0 : spread * draw);
        if (place == MOE_ROUTER_TABLE) v[i] = (moe_real)((i / slot->shape[1] + i % slot->shape[1]) % experts);
        if (place == MOE_ROUTER_TEMPERATURE) v[i] = (moe_real)0.7;
    }
}

static void bench_supply(bench *b) {
    const moe_router_config *c = &b->router.config;
    size_t n = b->call.n_tokens, d = (size_t)c->d_model;
    size_t experts = (size_t)c->n_experts, heads = (size_t)c->heads, i;
    b->token_ids = (int32_t *)grab(n, sizeof(int32_t));
    b->home = (int32_t *)grab(n, sizeof(int32_t));
    b->previous_experts = (int32_t *)grab(2 * n, sizeof(int32_t));
    b->previous_input = normals(n * d, 1.0, 21);
    b->previous_weights = normals(2 * n, 1.0, 22);
    b->attention = normals(heads * n * n, 1.0, 23);
    b->outputs = normals(heads * n * d, 1.0, 24);
    b->teacher = normals(n * experts, 1.0, 25);
    b->nodes = normals(n * experts * 3, 1.0, 26);
    for (i = 0; i < n; i++) {
        b->token_ids[i] = (int32_t)(i % (size_t)(c->table_size > 0 ? c->table_size : 1));
        b->home[i] = (int32_t)(i % (size_t)c->nodes);
    }
    for (i = 0; i < 2 * n; i++) {
        b->previous_experts[i] = (int32_t)((i * 7 + i / 3) % experts);
        b->previous_weights[i] = (moe_real)fabs((double)b->previous_weights[i]);
    }
    for (i = 0; i < heads * n * n; i++) b->attention[i] = (moe_real)(fabs((double)b->attention[i]) + 0.01);
    b->call.token_ids = b->token_ids;
    b->call.token_machine = b->home;
    b->call.previous_input = b->previous_input;
    b->call.previous_experts = b->previous_experts;
    b->call.previous_weights = b->previous_weights;
    b->call.n_previous = 2;
    b->call.attention_weights = b->attention;
    b->call.attention_outputs = b->outputs;
    b->call.attention_output = b->outputs;
    b->call.teacher = b->teacher;
    b->call.activations = b->nodes;
    b->call.activation_width = 3;
    b->call.rng = &b->rng;
}

static int bench_open(bench *b, const moe_router_config *config, size_t n) {
    moe_parameter slot;
    moe_error error;
    int place;
    memset(b, 0, sizeof *b);
    error.message[0] = '\0';
    if (!CHECK(moe_router_init(&b->router, config, NULL, &error) == MOE_OK, error.message)) return 0;
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++) {
        if (moe_router_parameter(&b->router.config, place, &slot) != MOE_OK) continue;
        b->counts[place] = slot.count;
        b->tensors[place] = reals(slot.count);
        b->gradients[place] = reals(slot.count);
        fill_tensor(place, &slot, (size_t)b->router.config.n_experts, b->tensors[place]);
        b->router.tensors[place] = b->tensors[place];
    }
    b->call.n_tokens = n;
    b->call.training = 1;
    b->call.x = b->x = normals(n * (size_t)b->router.config.d_model, 1.0, 20);
    b->dx = reals(n * (size_t)b->router.config.d_model);
    bench_supply(b);
    return 1;
}

static int bench_of(bench *b, const char *settings, size_t n) {
    moe_router_config c = config_of(settings);
    return CHECK(bench_open(b, &c, n), settings);
}

static void bench_close(bench *b) {
    int place;
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++) {
        free(b->tensors[place]);
        free(b->gradients[place]);
    }
    free(b->x);
    free(b->dx);
    free(b->previous_input);
    free(b->previous_weights);
    free(b->attention);
    free(b->outputs);
    free(b->teacher);
    free(b->nodes);
    free(b->token_ids);
    free(b->previous_experts);
    free(b->home);
    free(b->mask);
    free(b->memory);
    memset(b, 0, sizeof *b);
}

/* In memory of exactly the size that was asked for; the same random numbers each time. */
static moe_status bench_route(bench *b) {
    moe_status status = moe_route_size(&b->router, b->call.n_tokens, b->call.training, &b->size);
    free(b->memory);
    b->memory = NULL;
    memset(&b->routing, 0, sizeof b->routing);
    moe_rng_seed(&b->rng, 7);
    if (status != MOE_OK) return status;
    b->memory = grab(b->size, 1);
    return moe_route(&b->router, &b->call, b->memory, b->size, &b->routing);
}

/* Backward with fixed gradients of the weights, times scale. */
static moe_status bench_backward(bench *b, double scale) {
    size_t entries = b->routing.plan.offsets[b->routing.n_experts], i;
    moe_rng own;
    int place;
    moe_rng_seed(&own, 55);
    for (i = 0; i < entries; i++) {
        b->routing.d_weight_out[i] = (moe_real)scale * moe_rng_normal(&own);
        b->routing.d_weight_in[i] = (moe_real)scale * moe_rng_normal(&own);
    }
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++)
        if (b->gradients[place] != NULL) memset(b->gradients[place], 0, b->counts[place] * sizeof(moe_real));
    memset(b->dx, 0, b->call.n_tokens * (size_t)b->router.config.d_model * sizeof(moe_real));
    return moe_route_backward(&b->router, &b->call, &b->routing, b->gradients, b->dx, NULL);
}

static moe_status bench_observe(bench *b) { return moe_router_observe(&b->router, &b->call, &b->routing, b->tensors); }

static moe_status bench_advance(bench *b) { return moe_router_advance(&b->router, b->tensors); }

static void bench_renew_x(bench *b, uint64_t seed) {
    moe_rng own;
    size_t i;
    moe_rng_seed(&own, seed);
    for (i = 0; i < b->call.n_tokens * (size_t)b->router.config.d_model; i++) b->x[i] = moe_rng_normal(&own);
}

static void bench_mask(bench *b, int every) {
    size_t t;
    if (b->mask == NULL) b->mask = (unsigned char *)grab(b->call.n_tokens, 1);
    for (t = 0; t < b->call.n_tokens; t++) b->mask[t] = t % (size_t)every != 1;
    b->call.mask = b->mask;
}

static int is_real(const bench *b, size_t t) { return b->call.mask == NULL || b->call.mask[t]; }

static moe_real step_of(const bench *b) { return b->tensors[MOE_ROUTER_STEP][0]; }

/* What two routings of the same tokens decided, bit for bit; the rows of choices may be of
   different length. */
static int same_choices(const moe_routing *a, const moe_routing *b) {
    size_t t, count;
    if (a->n_tokens != b->n_tokens || a->n_experts != b->n_experts || a->n_dropped != b->n_dropped) return 0;
    if (!same_bits(a->n_choices, b->n_choices, a->n_tokens * sizeof(int32_t)) ||
        !same_bits(a->selected, b->selected, a->n_tokens * a->n_experts))
        return 0;
    for (t = 0; t < a->n_tokens; t++) {
        size_t at_a = t * a->max_choices, at_b = t * b->max_choices;
        count = (size_t)a->n_choices[t];
        if (!same_bits(a->choices + at_a, b->choices + at_b, count * sizeof(int32_t)) ||
            !same_bits(a->kept + at_a, b->kept + at_b, count) ||
            !same_reals(a->choice_weights + at_a, b->choice_weights + at_b, count))
            return 0;
    }
    return 1;
}

static int same_plan(const moe_dispatch_plan *a, const moe_dispatch_plan *b) {
    size_t i;
    if (!same_bits(a->offsets, b->offsets, (a->n_experts + 1) * sizeof(size_t))) return 0;
    for (i = 0; i < a->offsets[a->n_experts]; i++)
        if (a->assignments[i].token != b->assignments[i].token ||
            a->assignments[i].choice != b->assignments[i].choice ||
            !same_reals(&a->assignments[i].weight_in, &b->assignments[i].weight_in, 1) ||
            !same_reals(&a->assignments[i].weight_out, &b->assignments[i].weight_out, 1))
            return 0;
    return 1;
}

static int same_routing(const moe_routing *a, const moe_routing *b) {
    size_t cells = a->n_tokens * a->n_experts;
    return same_choices(a, b) && same_plan(&a->plan, &b->plan) && same_reals(a->logits, b->logits, cells) &&
           same_reals(a->gate, b->gate, cells) && same_reals(a->probabilities, b->probabilities, cells) &&
           same_reals(a->weights, b->weights, cells) && same_reals(a->loss, b->loss, MOE_LOSS_COUNT);
}

/* ---- the selection bias ---- */

/* b_e += gamma sign(mean n - n_e) per step, over all calls since the last one. */
static void test_bias_rule(void) {
    static const int experts[] = {2, 3, 5, 6, 7, 13};
    size_t row, e, t, i;
    int step, call;
    for (row = 0; row < sizeof experts / sizeof experts[0]; row++) {
        moe_router_config c = config_of("d_model=5 top_k=2 gate=sigmoid selection_bias=1 bias_rate=0.01");
        moe_real want[13], rate = (moe_real)0.01;
        size_t count = (size_t)experts[row];
        bench b;
        c.n_experts = experts[row];
        if (!bench_open(&b, &c, 19)) return;
        for (e = 0; e < count; e++) want[e] = 0;
        for (step = 0; step < 12; step++) {
            long load[13] = {0}, sum = 0;
            for (call = 0; call <= step % 3; call++) {
                bench_renew_x(&b, (uint64_t)(100 * step + call));
                if (call == 1) bench_mask(&b, 3);
                else b.call.mask = NULL;
                CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
                for (t = 0; t < 19; t++)
                    for (i = 0; i < (size_t)b.routing.n_choices[t]; i++) {
                        load[b.routing.choices[t * b.routing.max_choices + i]]++;
                        sum++;
                    }
                CHECK_STATUS(bench_observe(&b), MOE_OK, "observe");
                CHECK(same_reals(b.tensors[MOE_ROUTER_SELECTION_BIAS], want, count),
                      "the bias moves once per step only");
            }
            for (e = 0; e < count; e++) {
                CHECK((long)b.tensors[MOE_ROUTER_LOAD][e] == load[e], "the load of all calls of the step");
                if (sum > load[e] * experts[row]) want[e] += rate;
                if (sum < load[e] * experts[row]) want[e] -= rate;
            }
            CHECK_STATUS(bench_advance(&b), MOE_OK, "advance");
            CHECK(same_reals(b.tensors[MOE_ROUTER_SELECTION_BIAS], want, count), "b += gamma sign(mean n - n)");
            CHECK(all_zero(b.tensors[MOE_ROUTER_LOAD], count + 1), "the load is counted anew");
        }
        CHECK_STATUS(bench_advance(&b), MOE_OK, "a step without a call");
        CHECK(same_reals(b.tensors[MOE_ROUTER_SELECTION_BIAS], want, count), "no load, no change");
        bench_close(&b);
    }
}

/* An even load leaves the bias as it is, for every number of experts. */
static void test_bias_ties(void) {
    int experts, each;
    for (experts = 1; experts <= 40; experts++)
        for (each = 1; each <= 9; each++) {
            moe_router_config c = config_of("d_model=1 top_k=1 gate=sigmoid weight=raw selection_bias=1 bias_rate=0.5");
            size_t n = (size_t)(experts * each), t, e;
            int32_t *given = (int32_t *)grab(n, sizeof *given);
            bench b;
            c.n_experts = experts;
            if (!bench_open(&b, &c, n)) return;
            for (t = 0; t < n; t++) given[t] = (int32_t)(t % (size_t)experts);
            b.call.given = given;
            CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
            CHECK(bench_observe(&b) == MOE_OK && bench_advance(&b) == MOE_OK, "state");
            CHECK(all_zero(b.tensors[MOE_ROUTER_SELECTION_BIAS], (size_t)experts), "a tie leaves the bias");
            for (t = 0; t < n && experts > 1; t++) given[t] = t == 0 ? 1 : 0; /* expert 0 has all but one */
            CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
            CHECK(bench_observe(&b) == MOE_OK && bench_advance(&b) == MOE_OK, "state");
            for (e = 0; e < (size_t)experts && experts > 2 && each > 1; e++)
                NEARLY(b.tensors[MOE_ROUTER_SELECTION_BIAS][e], e == 0 ? -0.5 : 0.5, "an uneven load moves it");
            free(given);
            bench_close(&b);
        }
}

/* The bias chooses but never enters a gate value or a weight. */
static void test_bias_gates(void) {
    int gate;
    for (gate = 0; gate < MOE_GATE_COUNT; gate++) {
        moe_router_config c =
            config_of("d_model=6 n_experts=7 top_k=3 weight=raw selection_bias=1 bias_rate=0.01 loss_z=0.1");
        bench plain, biased;
        size_t t, e, moved = 0;
        c.gate = gate;
        if (!bench_open(&plain, &c, 23) || !bench_open(&biased, &c, 23)) return;
        for (e = 0; e < 7; e++) biased.tensors[MOE_ROUTER_SELECTION_BIAS][e] = (moe_real)(0.5 * (double)e);
        CHECK(bench_route(&plain) == MOE_OK && bench_route(&biased) == MOE_OK, "routes");
        CHECK(same_reals(plain.routing.logits, biased.routing.logits, 23 * 7) &&
                  same_reals(plain.routing.gate, biased.routing.gate, 23 * 7) &&
                  same_reals(plain.routing.probabilities, biased.routing.probabilities, 23 * 7) &&
                  same_reals(plain.routing.loss, biased.routing.loss, MOE_LOSS_COUNT),
              "the bias changes no gate value");
        for (t = 0; t < 23 * 7; t++) {
            if (biased.routing.selected[t])
                CHECK(same_reals(&biased.routing.weights[t], &biased.routing.probabilities[t], 1),
                      "the weight is p alone");
            moved += biased.routing.selected[t] != plain.routing.selected[t];
        }
        CHECK(moved > 0, "but the choice");
        bench_close(&plain);
        bench_close(&biased);
    }
}

/* max n / mean n over the last rounds. */
static void test_bias_balances(void) {
    bench b;
    double first = 0.0, last = 0.0;
    int step;
    size_t e;
    if (!bench_of(&b,
                  "d_model=8 n_experts=8 top_k=2 gate=sigmoid weight=raw router_bias=1 selection_bias=1 bias_rate=0.01",
                  64))
        return;
    for (e = 0; e < 8; e++) b.tensors[MOE_ROUTER_BIAS][e] = (moe_real)(2.0 - 0.6 * (double)e);
    for (step = 0; step < 400; step++) {
        size_t most = 0;
        bench_renew_x(&b, (uint64_t)(5000 + step));
        CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
        for (e = 0; e < 8; e++)
            if (b.routing.counts[e] > most) most = b.routing.counts[e];
        if (step < 20) first += (double)most / 16.0 / 20.0;
        if (step >= 380) last += (double)most / 16.0 / 20.0;
        CHECK(bench_observe(&b) == MOE_OK && bench_advance(&b) == MOE_OK, "state");
    }
    if (!CHECK(first > 2.2 && last < 1.5, "a skewed router becomes even"))
        printf("  max/mean from %g to %g\n", first, last);
    bench_close(&b);
}

/* ---- running feature weights of adaptive clustering ---- */

/* The previous expert with the largest weight, the first of equals; -1: none. */
static int cluster_of(const bench *b, size_t t) {
    int best = -1;
    size_t j, at = 0;
    for (j = 0; j < 2; j++) {
        if (b->previous_experts[2 * t + j] < 0) continue;
        if (best < 0 || b->previous_weights[2 * t + j] > b->previous_weights[2 * t + at]) {
            best = b->previous_experts[2 * t + j];
            at = j;
        }
    }
    return best;
}

/* s_q of one cluster by its definition. */
static double spread_of(const bench *b, int cluster, size_t q, size_t *count) {
    size_t d = (size_t)b->router.config.d_model, n = b->call.n_tokens, t, u;
    double mean = 0.0, sum = 0.0;
    double size = 0.0;
    for (t = 0; t < n; t++)
        if (is_real(b, t) && cluster_of(b, t) == cluster) {
            size += 1.0;
            mean += (double)b->previous_input[t * d + q];
        }
    *count = (size_t)size;
    mean /= size > 0.0 ? size : 1.0;
    for (t = 0; t < n; t++) {
        double h = (double)b->previous_input[t * d + q];
        if (!is_real(b, t) || cluster_of(b, t) != cluster) continue;
        if (b->router.config.ac_spread == MOE_SPREAD_MAD) sum += fabs(h - mean) / size;
        if (b->router.config.ac_spread == MOE_SPREAD_VARIANCE) sum += (h - mean) * (h - mean) / size;
        for (u = 0; u < n && b->router.config.ac_spread == MOE_SPREAD_PAIRWISE; u++)
            if (is_real(b, u) && cluster_of(b, u) == cluster)
                sum += fabs(h - (double)b->previous_input[u * d + q]) / (size * size);
    }
    return sum;
}

/* M of one cluster, mode paper: 1/(s + 1e-6) with mean 1, or lambda/(s + alpha) with alpha found
   here by bisection. */
static void paper_weights(const bench *b, const double *s, double *m) {
    size_t d = (size_t)b->router.config.d_model, q;
    double lambda = (double)b->router.config.ac_lambda, least = s[0];
    double mean = 0.0, low, high;
    int round;
    for (q = 0; q < d; q++) least = s[q] < least ? s[q] : least;
    for (q = 0; q < d; q++) mean += 1.0 / (s[q] + 1e-6) / (double)d;
    for (q = 0; q < d; q++) m[q] = 1.0 / (s[q] + 1e-6) / mean;
    if (!(lambda > 0.0)) return;
    for (low = -least, high = lambda - least, round = 0; round < 300; round++) {
        double alpha = 0.5 * (low + high);
        for (q = 0, mean = 0.0; q < d; q++) mean += lambda / (s[q] + alpha) / (double)d;
        if (mean > 1.0) low = alpha;
        else high = alpha;
    }
    for (q = 0; q < d; q++) m[q] = lambda / (s[q] + high);
}

/* u = m * x with m the row of the token's cluster. */
static void check_running_input(const bench *b) {
    size_t d = (size_t)b->router.config.d_model, t, q;
    for (t = 0; t < b->call.n_tokens; t++)
        for (q = 0; q < d && is_real(b, t); q++) {
            int k = cluster_of(b, t);
            double m = k < 0 ? 1.0 : (double)b->tensors[MOE_ROUTER_AC_RUNNING][(size_t)k * d + q];
            NEARLY(b->routing.u[t * d + q], m * (double)b->x[t * d + q], "u = m * x");
        }
}

/* One token in a call of its own is what it is among the others. */
static void check_running_decodes(bench *b) {
    size_t d = (size_t)b->router.config.d_model, experts = (size_t)b->router.config.n_experts, t;
    size_t bytes = 0;
    moe_call one;
    moe_routing single;
    void *memory;
    b->call.training = 0;
    CHECK_STATUS(bench_route(b), MOE_OK, "inference");
    CHECK(moe_route_size(&b->router, 1, 0, &bytes) == MOE_OK, "size");
    memory = grab(bytes, 1);
    for (t = 0; t < b->call.n_tokens; t++) {
        one = b->call;
        one.n_tokens = 1;
        one.decoding = 1;
        one.mask = NULL;
        one.x = b->x + t * d;
        one.previous_input = NULL;
        one.previous_experts = b->previous_experts + 2 * t;
        one.previous_weights = b->previous_weights + 2 * t;
        if (!is_real(b, t) || !CHECK_STATUS(moe_route(&b->router, &one, memory, bytes, &single), MOE_OK, "decodes"))
            continue;
        CHECK(same_reals(single.logits, b->routing.logits + t * experts, experts) &&
                  same_reals(single.weights, b->routing.weights + t * experts, experts),
              "a token alone has the same result");
    }
    free(memory);
    b->call.training = 1;
}

static void test_ac_running_of(int spread, double lambda, double rho) {
    enum { N = 24, D = 6, E = 5 };
    moe_router_config c = config_of("d_model=6 n_experts=5 top_k=2 input=adaptive_clustering ac_mode=running");
    double want[E * D], s[D], m[D], used = rho > 0.0 ? rho : 0.9;
    moe_real *before;
    bench b;
    size_t e, q, i, count = 0;
    int round;
    c.ac_spread = spread;
    c.ac_lambda = (moe_real)lambda;
    c.ac_rho = (moe_real)rho;
    if (!bench_open(&b, &c, N)) return;
    for (i = 0; i < E * D; i++) want[i] = 1.0;
    for (round = 0; round < 5; round++) {
        free(b.previous_input);
        b.call.previous_input = b.previous_input = normals(N * D, 0.5 + round, (uint64_t)(300 + round));
        for (i = 0; i < 2 * N; i++) {
            b.previous_experts[i] = below(E + 1) - 1;                                /* -1: a choice that was dropped */
            b.previous_weights[i] = (moe_real)(below(4) * 0.25);                     /* ties too */
            if (b.previous_experts[i] == E - 1 && i > 3) b.previous_experts[i] = -1; /* the last expert has very few */
        }
        if (round % 2) bench_mask(&b, 4);
        else b.call.mask = NULL;
        before = copy_of(b.tensors[MOE_ROUTER_AC_RUNNING], E * D);
        CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
        CHECK(same_reals(before, b.tensors[MOE_ROUTER_AC_RUNNING], E * D), "routing reads the table only");
        check_running_input(&b);
        CHECK_STATUS(bench_observe(&b), MOE_OK, "observe");
        for (e = 0; e < E; e++) {
            for (q = 0; q < D; q++) s[q] = spread_of(&b, (int)e, q, &count);
            if (count < 2) {
                CHECK(same_reals(before + e * D, b.tensors[MOE_ROUTER_AC_RUNNING] + e * D, D),
                      "a cluster of one token changes nothing");
                continue;
            }
            paper_weights(&b, s, m);
            for (q = 0; q < D; q++) {
                want[e * D + q] = used * want[e * D + q] + (1.0 - used) * m[q];
                NEARLY(b.tensors[MOE_ROUTER_AC_RUNNING][e * D + q], want[e * D + q],
                       "table <- rho table + (1 - rho) M");
            }
        }
        free(before);
        before = copy_of(b.tensors[MOE_ROUTER_AC_RUNNING], E * D);
        check_running_decodes(&b);
        b.call.training = 0;
        CHECK_STATUS(bench_observe(&b), MOE_ERR_STATE, "observe at inference");
        b.call.training = 1;
        b.call.previous_input = NULL;
        CHECK_STATUS(bench_observe(&b), MOE_ERR_ARGUMENT, "observe without the previous input");
        b.call.previous_input = b.previous_input;
        CHECK_STATUS(bench_advance(&b), MOE_OK, "advance");
        CHECK(same_reals(before, b.tensors[MOE_ROUTER_AC_RUNNING], E * D),
              "neither inference nor a failed call changes the table");
        free(before);
    }
    bench_close(&b);
}

static void test_ac_running(void) {
    int spread;
    for (spread = 0; spread < MOE_SPREAD_COUNT; spread++) {
        test_ac_running_of(spread, 0.0, 0.0);
        test_ac_running_of(spread, 0.5, 0.25);
        test_ac_running_of(spread, 0.0, 1.0);
    }
}

/* ---- the controller of the L1 loss ---- */

/* The factor as it must go on, from the pairs that were open since the last step. */
static moe_real next_factor(moe_real factor, long pairs, long tokens, long k) {
    return pairs > k * tokens ? factor * (moe_real)1.2 : factor / (moe_real)1.2;
}

static void test_l1_sequence(void) {
    bench b;
    moe_real want = (moe_real)1e-8;
    long ups = 0;
    int step, call;
    size_t t, e;
    if (!bench_of(
            &b, "d_model=6 n_experts=5 top_k=2 router_bias=1 gate=relu select=positive weight=raw l1_controller=1", 17))
        return;
    for (step = 0; step < 230; step++) {
        long pairs = 0, tokens = 0;
        for (e = 0; e < 5; e++) b.tensors[MOE_ROUTER_BIAS][e] = (moe_real)(step < 60 ? 0.5 * (below(5) - 2) : -0.6);
        for (call = 0; call <= step % 3; call++) {
            double sum = 0.0;
            bench_renew_x(&b, (uint64_t)(700 + 10 * step + call));
            if (call == 1) bench_mask(&b, 3);
            else b.call.mask = NULL;
            CHECK(same_reals(b.tensors[MOE_ROUTER_L1], &want, 1), "the factor of this step");
            CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
            for (t = 0; t < 17; t++)
                for (e = 0; e < 5 && is_real(&b, t); e++)
                    sum += (double)b.routing.counts[e] * (double)b.routing.probabilities[t * 5 + e];
            sum *= (double)want * 5.0 / (2.0 * (double)b.routing.n_real * (double)b.routing.n_real);
            CHECK(fabs((double)b.routing.loss[MOE_LOSS_L1] - sum) <= 1e-5 * sum, "the loss has this factor");
            for (t = 0; t < 17; t++) {
                pairs += b.routing.n_choices[t];
                tokens += is_real(&b, t);
            }
            CHECK_STATUS(bench_observe(&b), MOE_OK, "observe");
        }
        ups += pairs > 2 * tokens;
        want = next_factor(want, pairs, tokens, 2);
        CHECK_STATUS(bench_advance(&b), MOE_OK, "advance");
    }
    CHECK(ups > 5, "the factor went up and down");
    for (step = 0; step < 200; step++)
        CHECK(bench_route(&b) == MOE_OK && bench_observe(&b) == MOE_OK && bench_advance(&b) == MOE_OK, "one step");
    CHECK(b.tensors[MOE_ROUTER_L1][0] > 0 && b.tensors[MOE_ROUTER_L1][0] < (moe_real)1e-28,
          "it never becomes 0, from where it could not rise");
    bench_close(&b);
}

/* Exactly K of E open pairs are enough: the factor falls. One pair more and it rises. */
static void test_l1_border(void) {
    int experts, k, more;
    for (experts = 2; experts <= 20; experts++)
        for (k = 1; k < experts; k++)
            for (more = -1; more <= 1; more++) {
                moe_router_config c =
                    config_of("d_model=1 gate=relu select=positive weight=raw l1_controller=1 loss_l1=0.5");
                moe_real want = next_factor((moe_real)0.5, 10 * k + more, 10, k);
                int32_t *given;
                size_t t, i, e = (size_t)experts;
                bench b;
                c.n_experts = experts;
                c.top_k = k;
                if (!bench_open(&b, &c, 10)) return;
                given = (int32_t *)grab(10 * e, sizeof *given);
                for (t = 0; t < 10; t++)
                    for (i = 0; i < e; i++) given[t * e + i] = (int)i < k + (t == 0 ? more : 0) ? (int32_t)i : -1;
                b.call.given = given;
                CHECK(bench_route(&b) == MOE_OK && bench_observe(&b) == MOE_OK && bench_advance(&b) == MOE_OK,
                      "one step");
                CHECK(same_reals(b.tensors[MOE_ROUTER_L1], &want, 1), "the border of the controller");
                free(given);
                bench_close(&b);
            }
}

/* ---- schedules ---- */

/* round(K0 + (K1 - K0) step / steps), in integers. */
static int wanted_k(int first, int last, int steps, int step) {
    long way = step < steps ? step : steps;
    return (int)((2L * first * steps + 2L * (last - first) * way + steps) / (2L * steps));
}

static void check_k(bench *b, int want) {
    size_t t;
    CHECK_STATUS(bench_route(b), MOE_OK, "routes in the memory of the largest K");
    CHECK(b->routing.top_k == want, "K of the step");
    for (t = 0; t < b->call.n_tokens; t++) CHECK(b->routing.n_choices[t] == want, "K choices");
    CHECK(b->routing.plan.offsets[b->routing.n_experts] == b->call.n_tokens * (size_t)want, "K pairs per token");
}

static void test_k_schedule(void) {
    static const struct {
        const char *select;
        int first, last, steps;
    } rows[] = {{"top_k", 1, 8, 20},   {"top_k", 8, 1, 13}, {"top_k", 2, 3, 6},
                {"sinkhorn", 1, 4, 9}, {"sample", 5, 2, 8}, {"top_k", 3, 3, 4}};
    static const int long_steps[] = {999, 30000, 131072, 16777216};
    size_t row, i, bytes = 0, evaluation = 0;
    for (row = 0; row < sizeof rows / sizeof rows[0]; row++) {
        char settings[200];
        bench b;
        int step;
        sprintf(settings, "d_model=6 n_experts=8 select=%s top_k=%d k_end=%d schedule_steps=%d loss_balance=0.1",
                rows[row].select, rows[row].first, rows[row].last, rows[row].steps);
        if (!bench_of(&b, settings, 7)) return;
        CHECK(moe_route_size(&b.router, 7, 1, &bytes) == MOE_OK &&
                  moe_route_size(&b.router, 7, 0, &evaluation) == MOE_OK,
              "sizes");
        for (step = 0; step < rows[row].steps + 4; step++) {
            int want = wanted_k(rows[row].first, rows[row].last, rows[row].steps, step);
            CHECK(!(step_of(&b) < (moe_real)step) && !(step_of(&b) > (moe_real)step), "advance counts steps");
            b.call.training = 1;
            check_k(&b, want);
            CHECK(b.size == bytes, "one size for all steps");
            CHECK_STATUS(bench_backward(&b, 1.0), MOE_OK, "backward");
            CHECK_STATUS(bench_observe(&b), MOE_OK, "observe");
            b.call.training = 0;
            check_k(&b, want);
            CHECK(b.size == evaluation, "one size for all steps");
            CHECK_STATUS(bench_advance(&b), MOE_OK, "advance");
        }
        b.router.tensors[MOE_ROUTER_STEP] = NULL;
        check_k(&b, rows[row].first);
        bench_close(&b);
    }
    for (i = 0; i < sizeof long_steps / sizeof long_steps[0]; i++) {
        moe_router_config c = config_of("d_model=2 n_experts=8 top_k=1 k_end=6");
        bench b;
        int part;
        c.schedule_steps = long_steps[i];
        if (!bench_open(&b, &c, 1)) return;
        for (part = 0; part <= 40; part++) {
            int step = (int)((double)long_steps[i] * part / 40.0);
            b.tensors[MOE_ROUTER_STEP][0] = (moe_real)step;
            check_k(&b, wanted_k(1, 6, long_steps[i], step));
        }
        b.tensors[MOE_ROUTER_STEP][0] = (moe_real)16777216;
        CHECK(bench_advance(&b) == MOE_OK && !(step_of(&b) > (moe_real)16777216), "the count stops at 2^24");
        check_k(&b, 6);
        bench_close(&b);
    }
}

/* bias_real's target is so many real experts per token, whatever K a schedule has reached. */
static void test_bias_of_scheduled_k(void) {
    const char *settings = "d_model=6 n_experts=6 n_zero=2 top_k=2 k_end=4 schedule_steps=2 gate=sigmoid"
                           " selection_bias=1 bias_rate=0.5 bias_rule=proportional bias_real=1.5";
    bench b;
    int step;
    size_t e;
    if (!bench_of(&b, settings, 20)) return;
    for (step = 0; step < 4; step++) {
        const double k = step == 0 ? 2 : step == 1 ? 3 : 4;
        for (e = 0; e < 6; e++) b.tensors[MOE_ROUTER_SELECTION_BIAS][e] = 0;
        check_k(&b, (int)k);
        CHECK(bench_observe(&b) == MOE_OK && bench_advance(&b) == MOE_OK, "state");
        for (e = 0; e < 4; e++)
            NEARLY(b.tensors[MOE_ROUTER_SELECTION_BIAS][e],
                   0.5 * (1.5 * 20 / 4 - (double)b.routing.counts[e]) / (20 * k), "the target of the step's K");
    }
    bench_close(&b);
}

/* A step may come from a stranger's file: whatever it is, K and the temperature stay between their
   ends. */
static void test_strange_steps(void) {
    static const char *const settings[] = {"top_k=2 k_end=9", "top_k=9 k_end=2"};
    double steps[7];
    size_t row, i, t;
    steps[0] = -1e6;
    steps[1] = HUGE_VAL - HUGE_VAL;
    steps[2] = -HUGE_VAL;
    steps[3] = -0.5;
    steps[4] = HUGE_VAL;
    steps[5] = 1e30;
    steps[6] = 3.7;
    for (row = 0; row < 2; row++)
        for (i = 0; i < 7; i++) {
            char text[200];
            int first = row == 0 ? 2 : 9, last = row == 0 ? 9 : 2;
            bench b;
            sprintf(text,
                    "d_model=3 n_experts=30 %s schedule_steps=8 tau_schedule=gate_temperature tau_end=4 gate=sigmoid",
                    settings[row]);
            if (!bench_of(&b, text, 6)) return;
            b.tensors[MOE_ROUTER_STEP][0] = (moe_real)steps[i];
            check_k(&b, wanted_k(first, last, 8, i < 4 ? 0 : i < 6 ? 8 : 3));
            for (t = 0; t < 6 * 30; t++) {
                double z = (double)b.routing.logits[t], p = (double)b.routing.gate[t];
                double q = z < 0.0 ? 1.0 - p : p;
                CHECK(q >= 1.0 / (1.0 + exp(-fabs(z) / 4.0)) - NEAR && q <= 1.0 / (1.0 + exp(-fabs(z))) + NEAR,
                      "a temperature from 1 to 4");
            }
            bench_close(&b);
        }
}

/* At every step the router is one whose temperature is fixed at that value; at both ends bit for
   bit. */
static void test_tau_schedule(void) {
    static const struct {
        const char *settings, *field;
        double first, last;
    } rows[] = {
        {"gate=softmax", "gate_temperature", 2.0, 0.25},   {"gate=sigmoid", "gate_temperature", 0.5, 4.0},
        {"score=cosine", "cosine_tau", 0.07, 1.3},         {"score=cosine cosine_dim=3", "cosine_tau", 1.0, 0.01},
        {"refine=similarity", "similarity_tau", 0.3, 3.0}, {"refine=attention heads=2", "attention_sigma", 4.0, 0.5},
        {"gate=softmax", "gate_temperature", 1e6, 1e-3},   {"gate=sigmoid", "gate_temperature", 1e-5, 1e5},
        {"score=cosine", "cosine_tau", 300000.0, 1e-6}};
    size_t row;
    for (row = 0; row < sizeof rows / sizeof rows[0]; row++) {
        char settings[300];
        int steps = 7, step;
        bench b;
        sprintf(settings, "d_model=6 n_experts=5 %s %s=%.9g tau_schedule=%s tau_end=%.9g schedule_steps=%d",
                rows[row].settings, rows[row].field, rows[row].first, rows[row].field, rows[row].last, steps);
        if (!bench_of(&b, settings, 9)) return;
        for (step = 0; step < steps + 2; step++) {
            double way = step < steps ? (double)step / steps : 1.0;
            double value = rows[row].first + (rows[row].last - rows[row].first) * way;
            int end = step == 0 || step >= steps;
            bench fixed;
            size_t i;
            if (step >= steps) value = rows[row].last;
            sprintf(settings, "d_model=6 n_experts=5 %s %s=%.17g", rows[row].settings, rows[row].field, value);
            if (!bench_of(&fixed, settings, 9)) return;
            CHECK(bench_route(&b) == MOE_OK && bench_route(&fixed) == MOE_OK, "routes");
            if (end) CHECK(same_routing(&b.routing, &fixed.routing), "the temperature at an end of its schedule");
            for (i = 0; i < 9 * 5; i++) {
                double z = (double)fixed.routing.logits[i];
                CHECK(fabs((double)b.routing.logits[i] - z) <= NEAR * (1.0 + fabs(z)),
                      "the logits at this temperature");
                NEARLY(b.routing.probabilities[i], fixed.routing.probabilities[i], "p at this temperature");
            }
            b.call.training = 0;
            fixed.call.training = 0;
            CHECK(bench_route(&b) == MOE_OK && bench_route(&fixed) == MOE_OK, "routes");
            if (end) CHECK(same_routing(&b.routing, &fixed.routing), "in evaluation too");
            b.call.training = 1;
            CHECK_STATUS(bench_advance(&b), MOE_OK, "advance");
            bench_close(&fixed);
        }
        bench_close(&b);
    }
}

/* One step of the state rules: they rest if the router is frozen, else each moves its tensor, which
   is then what it was before; the L1 factor is not, as nothing reads it. */
static void advance_state(bench *b, int frozen) {
    static const int states[] = {MOE_ROUTER_SELECTION_BIAS, MOE_ROUTER_L1, MOE_ROUTER_AC_RUNNING};
    moe_real *before[3] = {NULL, NULL, NULL};
    size_t i;
    for (i = 0; i < 3; i++)
        if (b->tensors[states[i]] != NULL) before[i] = copy_of(b->tensors[states[i]], b->counts[states[i]]);
    CHECK(bench_observe(b) == MOE_OK && bench_advance(b) == MOE_OK, "state");
    for (i = 0; i < 3; i++) {
        moe_real *state = b->tensors[states[i]];
        size_t count = b->counts[states[i]];
        if (state == NULL) continue;
        CHECK(same_reals(before[i], state, count) == frozen, "the state rules rest as well");
        if (states[i] != MOE_ROUTER_L1) memcpy(state, before[i], count * sizeof(moe_real));
        free(before[i]);
    }
}

/* From freeze_at on: no loss, no gradient of a tensor; all else, dx included, is that of the same
   router without losses. */
static void test_freeze(void) {
    static const char *const settings[] = {"router_bias=1",
                                           "score=mlp router_hidden=4",
                                           "score=cosine cosine_dim=3 cosine_learn_tau=1",
                                           "score=dselect gate=identity select=positive",
                                           "score=grap n_experts=4",
                                           "noise=noisy_topk",
                                           "input=scaled_rms expert_scale=1",
                                           "select=threshold threshold_learned=1 weight=raw",
                                           "refine=similarity similarity_learned=1",
                                           "select=soft soft_normalise=1 slots=2",
                                           "gate=relu select=positive weight=raw l1_controller=1",
                                           "selection_bias=1 bias_rate=0.5 gate=sigmoid",
                                           "input=adaptive_clustering ac_mode=running"};
    static const char *const losses =
        "loss_balance=0.1 loss_z=0.1 loss_importance=0.1 loss_entropy=0.1 loss_usage_entropy=0.1 "
        "loss_similarity_same=0.1 loss_similarity_diff=0.1 loss_locality=0.1 nodes=2 loss_distill=0.1";
    size_t row, i;
    int place, step;
    for (row = 0; row < sizeof settings / sizeof settings[0]; row++) {
        char text[600];
        int soft = strstr(settings[row], "soft ") != NULL, learns = strstr(settings[row], "grap") == NULL;
        bench b, plain;
        sprintf(text, "d_model=8 n_experts=6 top_k=2 %s %s freeze_at=2", settings[row], soft ? "" : losses);
        if (!bench_of(&b, text, 11)) return;
        sprintf(text, "d_model=8 n_experts=6 top_k=2 %s", settings[row]);
        if (!bench_of(&plain, text, 11)) return;
        if (plain.tensors[MOE_ROUTER_L1] != NULL) {
            plain.router.config.l1_controller = 0;
            plain.router.config.loss_l1 = 0;
            plain.tensors[MOE_ROUTER_L1][0] = 0;
        }
        CHECK_STATUS(bench_route(&plain), MOE_OK, "routes");
        CHECK_STATUS(bench_backward(&plain, 1.0), MOE_OK, "backward");
        for (step = 0; step < 4; step++) {
            int moved = 0, lost = 0;
            CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
            CHECK_STATUS(bench_backward(&b, 1.0), MOE_OK, "backward");
            for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++)
                if (b.gradients[place] != NULL) moved |= !all_zero(b.gradients[place], b.counts[place]);
            for (i = 0; i < MOE_LOSS_COUNT; i++) lost |= !all_zero(&b.routing.loss[i], 1);
            CHECK(moved == (step < 2 && learns), "gradients until freeze_at only");
            CHECK(lost == (step < 2 && !soft), "losses until freeze_at only");
            CHECK(!all_zero(b.dx, 11 * 8), "dx is there");
            if (step >= 2) {
                CHECK(same_reals(b.dx, plain.dx, 11 * 8), "dx is that of the weights alone");
                CHECK(soft || same_choices(&b.routing, &plain.routing), "a frozen router chooses as before");
            }
            advance_state(&b, step >= 2);
        }
        bench_close(&b);
        bench_close(&plain);
    }
}

/* The K best by u . V_e; 0 when rounding decides. */
static int student_choice(const bench *b, size_t t, size_t k, unsigned char *want) {
    size_t d = (size_t)b->router.config.d_model, experts = (size_t)b->router.config.n_experts, e, f, q;
    double v[16];
    for (e = 0; e < experts; e++)
        for (q = 0, v[e] = 0.0; q < d; q++)
            v[e] += (double)b->routing.u[t * d + q] * (double)b->tensors[MOE_ROUTER_STUDENT][e * d + q];
    for (e = 0; e < experts; e++) {
        size_t before = 0;
        for (f = 0; f < experts; f++) {
            if (f != e && fabs(v[e] - v[f]) < 1e-4) return 0;
            before += v[f] > v[e];
        }
        want[e] = before < k;
    }
    return 1;
}

/* A student of token ids: past freeze_at equal ids have equal choices, those of the embedding. */
static void test_student_of_ids(void) {
    enum { N = 30, E = 6, V = 5, W = 3 };
    size_t t, e, f, q, before;
    int ids[V] = {0};
    bench b;
    if (!bench_of(&b, "d_model=7 n_experts=6 top_k=1 gate=sigmoid weight=raw loss_distill=1 student=1 student_dim=3 "
                      "table_size=5 freeze_at=1", N))
        return;
    CHECK(moe_router_traits(&b.router.config) & MOE_TRAIT_NEEDS_TOKEN_IDS, "reads token ids");
    CHECK(b.counts[MOE_ROUTER_STUDENT_EMBEDDING] == V * W && b.counts[MOE_ROUTER_STUDENT_WEIGHT] == E * W, "shapes");
    CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
    CHECK_STATUS(bench_backward(&b, 0.0), MOE_OK, "backward");
    CHECK(!all_zero(b.gradients[MOE_ROUTER_STUDENT_EMBEDDING], V * W) &&
              !all_zero(b.gradients[MOE_ROUTER_STUDENT_WEIGHT], E * W), "the student learns");
    CHECK(all_zero(b.gradients[MOE_ROUTER_WEIGHT], E * 7) && all_zero(b.dx, N * 7), "and nothing else of its loss");
    CHECK_STATUS(bench_advance(&b), MOE_OK, "advance");
    CHECK_STATUS(bench_route(&b), MOE_OK, "the student chooses");
    for (t = 0; t < N; t++) {
        const moe_real *row = b.tensors[MOE_ROUTER_STUDENT_EMBEDDING] + b.token_ids[t] * W;
        double v[E];
        for (e = 0; e < E; e++)
            for (q = 0, v[e] = 0.0; q < W; q++)
                v[e] += (double)row[q] * (double)b.tensors[MOE_ROUTER_STUDENT_WEIGHT][e * W + q];
        for (e = 0; e < E; e++) {
            for (f = 0, before = 0; f < E; f++) before += v[f] > v[e];
            CHECK(b.routing.selected[t * E + e] == (before == 0), "the largest of the id's logits");
        }
        ids[b.token_ids[t]] = 1;
    }
    CHECK(ids[0] && ids[V - 1], "all ids");
    b.token_ids[N - 1] = V;
    CHECK_STATUS(bench_route(&b), MOE_ERR_ARGUMENT, "an id without a row");
    b.call.token_ids = NULL;
    CHECK_STATUS(bench_route(&b), MOE_ERR_ARGUMENT, "no ids");
    bench_close(&b);
}

/* Each expert's share of each sequence: that many, and none better left out. */
static void check_choice_per_sequence(const bench *b, const int32_t *offsets, size_t n_sequences, double factor) {
    const moe_routing *r = &b->routing;
    size_t s, e, t;
    for (s = 0; s < n_sequences; s++)
        for (e = 0; e < r->n_experts; e++) {
            double least = HUGE_VAL, most = -HUGE_VAL, even;
            size_t real = 0, taken = 0;
            for (t = (size_t)offsets[s]; t < (size_t)offsets[s + 1]; t++) {
                double p = (double)r->probabilities[t * r->n_experts + e];
                if (!b->call.mask[t]) continue;
                real++;
                if (!r->selected[t * r->n_experts + e]) most = fmax(most, p);
                else {
                    least = fmin(least, p);
                    taken++;
                }
            }
            even = floor(factor * (double)real / (double)r->n_experts + 0.5);
            CHECK((double)taken == (real == 0 ? 0.0 : even < 1.0 ? 1.0 : even) && least >= most, "the best tokens");
        }
}

/* Mixture of depths: experts choose in each sequence, the predictor learns it and decides in
   decoding. */
static void test_predictor(void) {
    enum { N = 40, E = 3, D = 5 };
    static const int32_t offsets[] = {0, 7, 7, 23, 40};
    unsigned char mask[N], whole[N * E];
    double agreed = 0.0, memory[64];
    moe_metrics metrics;
    moe_report report;
    bench b;
    size_t t;
    if (!bench_of(&b, "d_model=5 n_experts=3 gate=sigmoid weight=raw select=expert_choice capacity_factor=0.6 "
                      "expert_choice_scope=sequences predictor=1 loss_predictor=0.5", N))
        return;
    for (t = 0; t < N; t++) mask[t] = t % 5 != 3;
    b.call.sequences = offsets;
    b.call.n_sequences = 4;
    b.call.mask = mask;
    CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
    check_choice_per_sequence(&b, offsets, 4, 0.6);
    CHECK(b.routing.loss[MOE_LOSS_PREDICTOR] > 0, "a loss");
    CHECK_STATUS(bench_backward(&b, 0.0), MOE_OK, "backward");
    CHECK(!all_zero(b.gradients[MOE_ROUTER_PREDICTOR], E * D), "the predictor learns");
    CHECK(all_zero(b.gradients[MOE_ROUTER_WEIGHT], E * D) && all_zero(b.dx, N * D), "and nothing else of its loss");
    for (t = 0; t < N * E; t++)
        agreed += mask[t / E] && (b.routing.predicted[t] > 0) == b.routing.selected[t] ? 1.0 : 0.0;
    CHECK(moe_metrics_init(&metrics, E, 0, memory, sizeof memory) == MOE_OK, "metrics");
    CHECK_STATUS(moe_metrics_add(&metrics, &b.routing, mask, NULL), MOE_OK, "added");
    CHECK_STATUS(moe_metrics_report(&metrics, &report), MOE_OK, "reported");
    NEARLY(report.predictor_agreement, agreed / (double)(b.routing.n_real * E), "the share of agreement");
    b.call.training = 0;
    b.call.decoding = 1;
    CHECK_STATUS(bench_route(&b), MOE_OK, "decodes");
    memcpy(whole, b.routing.selected, sizeof whole);
    for (t = 0; t < N * E; t++)
        CHECK(whole[t] == (mask[t / E] && b.routing.predicted[t] > 0), "what the predictor takes");
    b.call.sequences = NULL;
    b.call.mask = NULL;
    b.call.n_tokens = 1;
    for (t = 0; t < N; t++, b.call.x += D) {
        CHECK_STATUS(bench_route(&b), MOE_OK, "one token");
        CHECK(!mask[t] || same_bits(b.routing.selected, whole + t * E, E), "a token alone is the same");
    }
    bench_close(&b);
}

/* StableMoE: the router chooses and the student learns; from freeze_at on the student chooses and
   rests, and the router's gate goes on. */
static void test_student(void) {
    enum { N = 40, E = 6 };
    static const char *const selects[] = {"top_k=1", "top_k=3", "top_k=2 select=grouped_top_k groups=2 groups_kept=1",
                                          "top_k=2 select=top_p top_p=0.5", "top_k=1 select=balanced"};
    size_t row, t, e, clear = 0;
    int step;
    for (row = 0; row < sizeof selects / sizeof selects[0]; row++) {
        char text[300];
        bench b, plain;
        sprintf(
            text,
            "d_model=7 n_experts=6 %s gate=sigmoid weight=raw loss_distill=1 student=1 freeze_at=2 loss_balance=0.1",
            selects[row]);
        if (!bench_of(&b, text, N)) return;
        sprintf(text, "d_model=7 n_experts=6 %s gate=sigmoid weight=raw", selects[row]);
        if (!bench_of(&plain, text, N)) return;
        CHECK_STATUS(bench_route(&plain), MOE_OK, "routes");
        for (step = 0; step < 4; step++) {
            CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
            CHECK_STATUS(bench_backward(&b, 1.0), MOE_OK, "backward");
            CHECK(!all_zero(b.gradients[MOE_ROUTER_WEIGHT], E * 7), "the router's gate learns all the time");
            CHECK(all_zero(b.gradients[MOE_ROUTER_STUDENT], E * 7) == (step >= 2), "the student until freeze_at");
            CHECK(same_reals(b.routing.gate, plain.routing.gate, N * E), "gate values are the router's");
            if (step < 2)
                CHECK(same_choices(&b.routing, &plain.routing) && b.routing.loss[MOE_LOSS_DISTILL] > 0,
                      "the router chooses, the student learns");
            for (e = 0; e < MOE_LOSS_COUNT && step >= 2; e++)
                CHECK(all_zero(&b.routing.loss[e], 1), "no losses any more");
            for (t = 0; t < N && step >= 2; t++) {
                unsigned char want[E];
                if (!student_choice(&b, t, (size_t)b.router.config.top_k, want)) continue;
                clear++;
                CHECK(same_bits(want, b.routing.selected + t * E, E), "the student chooses");
                for (e = 0; e < E; e++)
                    if (want[e])
                        CHECK(same_reals(&b.routing.weights[t * E + e], &b.routing.gate[t * E + e], 1),
                              "with the router's weight");
            }
            b.call.training = 0;
            CHECK_STATUS(bench_route(&b), MOE_OK, "evaluation");
            for (t = 0; t < N && step >= 2; t++) {
                unsigned char want[E];
                if (student_choice(&b, t, (size_t)b.router.config.top_k, want))
                    CHECK(same_bits(want, b.routing.selected + t * E, E), "in evaluation too");
            }
            b.call.training = 1;
            CHECK_STATUS(bench_advance(&b), MOE_OK, "advance");
        }
        b.tensors[MOE_ROUTER_STUDENT][3] = (moe_real)(HUGE_VAL - HUGE_VAL);
        CHECK_STATUS(bench_route(&b), MOE_ERR_NONFINITE, "a student that is no number is never asked");
        bench_close(&b);
        bench_close(&plain);
    }
    CHECK(clear > 300, "most choices of the student are clear");
}

static moe_status choose_even(void *ctx, const moe_router *router, const moe_call *call, const moe_real *logits,
                              const moe_real *probabilities, unsigned char *chosen) {
    size_t experts = (size_t)router->config.n_experts, t;
    (void)ctx;
    (void)logits;
    (void)probabilities;
    for (t = 0; t < call->n_tokens; t++) chosen[t * experts + t % experts] = 1;
    return MOE_OK;
}

/* Until switch_at the router is one with select = switch_from, afterwards one with its own. */
static void test_switch(void) {
    static const char *const from[] = {"top_k",    "dense",    "top_p",  "threshold", "positive",
                                       "affinity", "sinkhorn", "sample", "balanced",  "custom"};
    static const char *const to[] = {
        "top_k",        "dense",  "top_p",    "threshold", "positive",          "affinity",
        "sinkhorn",     "sample", "balanced", "custom",    "hash table_size=7", "grouped_top_k groups=2",
        "expert_choice"};
    static const char *const rest =
        "d_model=6 n_experts=6 top_k=1 weight=raw gate=softmax threshold=0.2 affinity_mass=0.5 capacity_factor=1.5";
    size_t i, k;
    int step, training;
    for (i = 0; i < sizeof from / sizeof from[0]; i++)
        for (k = 0; k < sizeof to / sizeof to[0]; k++) {
            char text[400];
            bench b, plain[2];
            if (strcmp(to[k], from[i]) == 0) continue; /* refused: nothing would change */
            sprintf(text, "%s select=%s switch_at=3 switch_from=%s", rest, to[k], from[i]);
            if (!bench_of(&b, text, 20)) return;
            sprintf(text, "%s select=%s", rest, from[i]);
            if (!bench_of(&plain[0], text, 20)) return;
            sprintf(text, "%s select=%s", rest, to[k]);
            if (!bench_of(&plain[1], text, 20)) return;
            b.router.custom.select = plain[0].router.custom.select = plain[1].router.custom.select = choose_even;
            for (training = 0; training < 2; training++)
                for (step = 0; step < 6; step++) {
                    bench *want = &plain[step >= 3];
                    b.tensors[MOE_ROUTER_STEP][0] = (moe_real)step;
                    b.call.training = want->call.training = training;
                    CHECK(bench_route(&b) == MOE_OK && bench_route(want) == MOE_OK, "routes");
                    if (!CHECK(same_routing(&b.routing, &want->routing), "the selection of this step"))
                        printf("  %s, then %s, step %d\n", from[i], to[k], step);
                    CHECK(b.routing.capacity == want->routing.capacity, "the capacity of this step");
                }
            bench_close(&b);
            bench_close(&plain[0]);
            bench_close(&plain[1]);
        }
}

/* All schedules at once, against routers without any. */
static void test_combination(void) {
    static const char *const losses = "loss_balance=0.125 loss_z=0.25";
    bench b, plain;
    int step, training;
    if (!bench_of(&b,
                  "d_model=6 n_experts=8 top_k=4 k_end=1 schedule_steps=4 tau_schedule=gate_temperature "
                  "gate_temperature=1 tau_end=3 switch_at=2 switch_from=dense freeze_at=3 selection_bias=1 "
                  "bias_rate=0.5 loss_balance=0.125 loss_z=0.25",
                  15))
        return;
    for (step = 0; step < 7; step++) {
        char text[300];
        sprintf(text, "d_model=6 n_experts=8 top_k=%d gate_temperature=%g select=%s selection_bias=1 %s",
                wanted_k(4, 1, 4, step), step < 4 ? 1.0 + 0.5 * step : 3.0, step < 2 ? "dense" : "top_k",
                step < 3 ? losses : "");
        if (!bench_of(&plain, text, 15)) return;
        memcpy(plain.tensors[MOE_ROUTER_SELECTION_BIAS], b.tensors[MOE_ROUTER_SELECTION_BIAS], 8 * sizeof(moe_real));
        for (training = 0; training < 2; training++) {
            b.call.training = plain.call.training = training;
            CHECK(bench_route(&b) == MOE_OK && bench_route(&plain) == MOE_OK, "routes");
            CHECK(same_routing(&b.routing, &plain.routing), "all schedules at once");
        }
        CHECK(bench_backward(&b, 1.0) == MOE_OK && bench_backward(&plain, 1.0) == MOE_OK, "backward");
        CHECK(same_reals(b.dx, plain.dx, 15 * 6), "dx of this step");
        if (step < 3)
            CHECK(same_reals(b.gradients[MOE_ROUTER_WEIGHT], plain.gradients[MOE_ROUTER_WEIGHT], 8 * 6),
                  "gradients of this step");
        else CHECK(all_zero(b.gradients[MOE_ROUTER_WEIGHT], 8 * 6), "no gradients any more");
        CHECK(bench_observe(&b) == MOE_OK && bench_advance(&b) == MOE_OK, "state");
        bench_close(&plain);
    }
    bench_close(&b);
}

/* ---- the least capacity of LocMoE ---- */

static double cosine_of(const double *a, const double *b, size_t n) {
    double ab = 0.0, aa = 0.0;
    double bb = 0.0;
    size_t i;
    for (i = 0; i < n; i++) {
        ab += a[i] * b[i];
        aa += a[i] * a[i];
        bb += b[i] * b[i];
    }
    return aa > 0.0 && bb > 0.0 ? ab / sqrt(aa) / sqrt(bb) : 0.0;
}

/* ln C_min = w delta^2 / (2 - delta^2) - ln E, delta the largest |cos| between a real token and a
   gating vector, w their width. */
static double wanted_bound(const bench *b) {
    const moe_router_config *c = &b->router.config;
    size_t d = (size_t)c->d_model, experts = (size_t)c->n_experts;
    size_t width = c->cosine_dim > 0 ? (size_t)c->cosine_dim : d, t, e, q, i;
    double *v = (double *)grab(width, sizeof *v), *w = (double *)grab(width, sizeof *w);
    double delta = 0.0;
    for (t = 0; t < b->call.n_tokens; t++) {
        if (!is_real(b, t)) continue;
        for (q = 0; q < width; q++) {
            v[q] = c->cosine_dim > 0 ? 0.0 : (double)b->x[t * d + q];
            for (i = 0; i < d && c->cosine_dim > 0; i++)
                v[q] += (double)b->tensors[MOE_ROUTER_PROJECTION][q * d + i] * (double)b->x[t * d + i];
        }
        for (e = 0; e < experts; e++) {
            for (q = 0; q < width; q++)
                w[q] = c->score == MOE_SCORE_GRAP ? (q / (d / experts) == e ? 1.0 : 0.0)
                                                  : (double)b->tensors[MOE_ROUTER_WEIGHT][e * width + q];
            delta = fabs(cosine_of(v, w, width)) > delta ? fabs(cosine_of(v, w, width)) : delta;
        }
    }
    free(v);
    free(w);
    return (double)width * delta * delta / (2.0 - delta * delta) - log((double)experts);
}

/* max(least, ceil(C)) up to N; -1 when rounding decides. */
static double wanted_capacity(const bench *b, double log_bound, double least) {
    double n = (double)b->routing.n_real, bound = log_bound < 30.0 ? exp(log_bound) : 1e12;
    double near = floor(bound + 0.5);
    if (bound < n && fabs(bound - near) < 1e-3 * (1.0 + bound)) return -1.0;
    if (ceil(bound) > least) least = ceil(bound);
    return least < n ? least : n;
}

static void check_bound(const bench *b, double log_bound, double least) {
    double capacity = wanted_capacity(b, log_bound, least);
    size_t e, kept = 0, over = 0;
    NEARLY(b->routing.capacity_bound, log_bound, "ln C_min");
    if (fabs(exp(log_bound < 30.0 ? log_bound : 30.0) - (double)b->routing.n_real) > 1e-3 * (double)b->routing.n_real)
        CHECK(b->routing.capacity_clamped == (exp(log_bound < 30.0 ? log_bound : 30.0) > (double)b->routing.n_real),
              "clamping is said");
    if (capacity < 0.0) return;
    CHECK(!((double)b->routing.capacity < capacity) && !((double)b->routing.capacity > capacity),
          "capacity from the bound");
    for (e = 0; e < b->routing.n_experts; e++) {
        size_t have = b->routing.plan.offsets[e + 1] - b->routing.plan.offsets[e], want = b->routing.counts[e];
        if (want > b->routing.capacity) {
            over += want - b->routing.capacity;
            want = b->routing.capacity;
        }
        CHECK(have == want, "an expert is filled up to the capacity");
        kept += have;
    }
    CHECK(over == b->routing.n_dropped && kept == b->routing.plan.offsets[b->routing.n_experts], "the rest is dropped");
}

static void test_bound_value(void) {
    static const char *const scores[] = {"router_bias=1",
                                         "score=random router_bias=1",
                                         "score=cosine",
                                         "score=cosine cosine_dim=3",
                                         "score=cosine cosine_dim=11 cosine_keep_length=1",
                                         "score=grap",
                                         "score=grap grap_cosine=1"};
    static const char *const limits[] = {"", "capacity_min=5", "capacity_factor=2 capacity_factor_eval=0.5",
                                         "drop_capacity=3"};
    size_t row, limit, clamped = 0, open = 0;
    int round, training;
    for (row = 0; row < sizeof scores / sizeof scores[0]; row++)
        for (limit = 0; limit < sizeof limits / sizeof limits[0]; limit++) {
            char text[300];
            bench b;
            sprintf(text, "d_model=8 n_experts=4 top_k=1 weight=raw capacity_bound=every %s %s", scores[row],
                    limits[limit]);
            if (!bench_of(&b, text, 60)) return;
            CHECK(b.counts[MOE_ROUTER_CAPACITY] == 0, "bound every has no state");
            for (round = 0; round < 12; round++)
                for (training = 0; training < 2; training++) {
                    double bound, least = limit == 1 ? 5.0 : 1.0;
                    size_t t;
                    bench_renew_x(&b, (uint64_t)(900 + round));
                    for (t = 0; t < 60 * 8; t++) b.x[t] += (moe_real)(0.4 * round); /* from all sides to one */
                    if (round % 3 == 0) bench_mask(&b, 4);
                    else b.call.mask = NULL;
                    b.call.training = training;
                    CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
                    bound = wanted_bound(&b);
                    if (limit == 2) least = ceil((training ? 2.0 : 0.5) * (double)b.routing.n_real / 4.0);
                    if (limit == 3) { /* a number of pairs stands for itself */
                        NEARLY(b.routing.capacity_bound, bound, "ln C_min");
                        CHECK(b.routing.capacity == 3, "drop_capacity is the capacity");
                        continue;
                    }
                    check_bound(&b, bound, least);
                    clamped += (size_t)b.routing.capacity_clamped;
                    open += (size_t)!b.routing.capacity_clamped;
                }
            bench_close(&b);
        }
    CHECK(clamped > 30 && open > 30, "both sides of the clamp were met");
}

/* Wide tokens that point at their expert: C_min is far beyond any number, and clamped. */
static void test_bound_of_wide_tokens(void) {
    static const int widths[] = {200, 4096, 1 << 20};
    size_t i, t;
    int bound;
    for (i = 0; i < 3; i++)
        for (bound = MOE_BOUND_FIRST; bound <= MOE_BOUND_EVERY; bound++) {
            moe_router_config c = config_of("n_experts=2 top_k=1 score=grap weight=raw");
            bench b;
            c.d_model = widths[i];
            c.capacity_bound = bound;
            if (!bench_open(&b, &c, 3)) return;
            for (t = 0; t < 3 * (size_t)widths[i]; t++)
                b.x[t] = t % (size_t)widths[i] < (size_t)widths[i] / 2 ? (moe_real)0.5 : 0;
            CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
            CHECK(fabs((double)b.routing.capacity_bound - ((double)widths[i] - log(2.0))) < 1e-3 * (double)widths[i],
                  "ln C_min = d - ln E");
            CHECK(b.routing.capacity_clamped && b.routing.capacity == 3 && b.routing.n_dropped == 0, "clamped to N");
            CHECK_STATUS(bench_observe(&b), MOE_OK, "observe");
            if (bound == MOE_BOUND_FIRST)
                NEARLY(b.tensors[MOE_ROUTER_CAPACITY][0], 16777216.0, "the state keeps at most 2^24");
            CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
            CHECK(b.routing.capacity_clamped && b.routing.capacity == 3 && moe_is_finite(b.routing.capacity_bound),
                  "also from the state");
            bench_close(&b);
        }
}

/* first: C_min of the first training call, whatever comes later. */
static void test_bound_first(void) {
    bench b;
    double first = 0.0;
    moe_real kept;
    int round;
    if (!bench_of(&b, "d_model=8 n_experts=4 top_k=1 weight=raw capacity_bound=first", 40)) return;
    b.call.training = 0;
    CHECK_STATUS(bench_route(&b), MOE_OK, "evaluation before any training");
    check_bound(&b, wanted_bound(&b), 1.0);
    CHECK_STATUS(bench_observe(&b), MOE_ERR_STATE, "evaluation is not observed");
    CHECK(all_zero(b.tensors[MOE_ROUTER_CAPACITY], 1), "no state yet");
    for (round = 0; round < 6; round++) {
        bench_renew_x(&b, (uint64_t)(40 + round));
        b.call.training = 1;
        CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
        if (round == 0) first = wanted_bound(&b);
        check_bound(&b, first, 1.0);
        kept = b.tensors[MOE_ROUTER_CAPACITY][0];
        CHECK(bench_observe(&b) == MOE_OK && bench_advance(&b) == MOE_OK, "state");
        if (round == 0) NEARLY(b.tensors[MOE_ROUTER_CAPACITY][0], exp(first), "C_min of the first call is kept");
        else CHECK(same_reals(&kept, b.tensors[MOE_ROUTER_CAPACITY], 1), "and stays");
        b.call.training = 0;
        CHECK_STATUS(bench_route(&b), MOE_OK, "evaluation");
        check_bound(&b, first, 1.0);
    }
    b.router.tensors[MOE_ROUTER_CAPACITY] = NULL;
    CHECK_STATUS(bench_route(&b), MOE_OK, "without the state: as at the start");
    check_bound(&b, wanted_bound(&b), 1.0);
    bench_close(&b);
}

/* every with capacity_rho: mean <- rho mean + (1 - rho) C_min over training calls. */
static void test_bound_average(void) {
    bench b;
    double mean = 0.0;
    int round;
    if (!bench_of(&b, "d_model=6 n_experts=4 top_k=1 weight=raw capacity_bound=every capacity_rho=0.75", 200)) return;
    for (round = 0; round < 8; round++) {
        double now, used, capacity;
        moe_real kept = b.tensors[MOE_ROUTER_CAPACITY][0];
        size_t t;
        bench_renew_x(&b, (uint64_t)(60 + round));
        for (t = 0; t < 200 * 6; t++) b.x[t] += (moe_real)(0.3 * (round % 4));
        now = exp(wanted_bound(&b));
        used = round == 0 ? now : 0.75 * mean + 0.25 * now;
        for (b.call.training = 0; b.call.training < 2; b.call.training++) {
            CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
            NEARLY(b.routing.capacity_bound, log(now), "ln C_min of this call");
            capacity = wanted_capacity(&b, log(used), 1.0);
            CHECK(capacity < 0.0 ||
                      (!((double)b.routing.capacity < capacity) && !((double)b.routing.capacity > capacity)),
                  "the capacity is the average");
            CHECK(same_reals(&kept, b.tensors[MOE_ROUTER_CAPACITY], 1), "routing changes no state");
        }
        b.call.training = 1;
        CHECK(bench_observe(&b) == MOE_OK && bench_advance(&b) == MOE_OK, "state");
        CHECK(fabs((double)b.tensors[MOE_ROUTER_CAPACITY][0] - used) < 10 * NEAR * (1.0 + used), "the average is kept");
        mean = used;
    }
    bench_close(&b);
}

/* Of affinity the bound is the least that an expert keeps. */
static void test_bound_of_affinity(void) {
    static const char *const limits[] = {"", "capacity=3", "capacity_min=4"};
    size_t limit, e, raised = 0;
    int round;
    for (limit = 0; limit < 3; limit++)
        for (round = 0; round < 10; round++) {
            char text[300];
            double bound, least;
            bench b;
            sprintf(
                text,
                "d_model=8 n_experts=4 top_k=1 weight=raw select=affinity affinity_mass=1e-6 capacity_bound=every %s",
                limits[limit]);
            if (!bench_of(&b, text, 50)) return;
            bench_renew_x(&b, (uint64_t)(80 + round));
            CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
            bound = wanted_bound(&b);
            least = wanted_capacity(&b, bound, limit == 2 ? 4.0 : 1.0);
            NEARLY(b.routing.capacity_bound, bound, "ln C_min");
            if (limit == 1 && least > 3.0) least = 3.0;
            for (e = 0; e < 4 && least > 0.0; e++) {
                size_t t, k, mine = 0;
                for (t = 0; t < 50; t++) {
                    size_t best = 0;
                    for (k = 1; k < 4; k++)
                        if (b.routing.logits[t * 4 + k] > b.routing.logits[t * 4 + best]) best = k;
                    mine += best == e;
                }
                CHECK(b.routing.counts[e] == (mine < (size_t)least ? mine : (size_t)least),
                      "an expert keeps at least C_min of its tokens");
                raised += b.routing.counts[e] > 1;
            }
            bench_close(&b);
        }
    CHECK(raised > 20, "the bound was at work");
}

/* ---- errors of observe and advance ---- */

static void test_state_errors(void) {
    static const int places[] = {MOE_ROUTER_SELECTION_BIAS, MOE_ROUTER_STEP, MOE_ROUTER_LOAD};
    bench b, plain;
    moe_real *kept, before[3][8];
    size_t i, k;
    if (!bench_of(&b, "d_model=4 n_experts=3 top_k=2 gate=sigmoid selection_bias=1 bias_rate=0.5 freeze_at=9", 6))
        return;
    CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
    CHECK_STATUS(bench_observe(&b), MOE_OK, "observe");
    for (i = 0; i < 3; i++) memcpy(before[i], b.tensors[places[i]], b.counts[places[i]] * sizeof(moe_real));
    CHECK_STATUS(moe_router_observe(NULL, &b.call, &b.routing, b.tensors), MOE_ERR_ARGUMENT, "no router");
    CHECK_STATUS(moe_router_observe(&b.router, NULL, &b.routing, b.tensors), MOE_ERR_ARGUMENT, "no call");
    CHECK_STATUS(moe_router_observe(&b.router, &b.call, NULL, b.tensors), MOE_ERR_ARGUMENT, "no routing");
    CHECK_STATUS(moe_router_observe(&b.router, &b.call, &b.routing, NULL), MOE_ERR_ARGUMENT, "no state");
    CHECK_STATUS(moe_router_advance(NULL, b.tensors), MOE_ERR_ARGUMENT, "no router");
    CHECK_STATUS(moe_router_advance(&b.router, NULL), MOE_ERR_ARGUMENT, "no state");
    for (i = 0; i < 3; i++) {
        kept = b.tensors[places[i]];
        b.tensors[places[i]] = NULL;
        CHECK_STATUS(bench_observe(&b), MOE_ERR_ARGUMENT, "a state tensor is missing");
        CHECK_STATUS(bench_advance(&b), MOE_ERR_ARGUMENT, "a state tensor is missing");
        b.tensors[places[i]] = kept;
    }
    b.call.training = 0;
    CHECK_STATUS(bench_observe(&b), MOE_ERR_STATE, "not a training call");
    for (i = 0; i < 3; i++)
        CHECK(same_reals(before[i], b.tensors[places[i]], b.counts[places[i]]), "a failed call changes nothing");
    b.call.training = 1;
    b.call.n_tokens = 0;
    CHECK_STATUS(bench_route(&b), MOE_OK, "no tokens");
    CHECK_STATUS(bench_observe(&b), MOE_OK, "nothing to observe");
    b.call.n_tokens = 6;
    b.call.mask = b.mask = (unsigned char *)grab(6, 1);
    CHECK_STATUS(bench_route(&b), MOE_OK, "padding alone");
    CHECK_STATUS(bench_observe(&b), MOE_OK, "nothing to observe");
    for (i = 0; i < 3; i++)
        CHECK(same_reals(before[i], b.tensors[places[i]], b.counts[places[i]]), "and nothing was changed");
    bench_close(&b);
    if (!bench_of(&plain, "d_model=4 n_experts=3", 6)) return;
    kept = copy_of(plain.tensors[MOE_ROUTER_WEIGHT], 12);
    CHECK_STATUS(bench_route(&plain), MOE_OK, "routes");
    CHECK(bench_observe(&plain) == MOE_OK && bench_advance(&plain) == MOE_OK &&
              same_reals(kept, plain.tensors[MOE_ROUTER_WEIGHT], 12),
          "a router without state");
    for (k = 0; k < MOE_ROUTER_PARAMETER_COUNT; k++)
        if (k != MOE_ROUTER_WEIGHT) CHECK(plain.tensors[k] == NULL, "no other tensor");
    free(kept);
    bench_close(&plain);
}

/* ---- balanced: the best even assignment ---- */

/* A score that hands over logits [N,E]. */
static moe_status hand_score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                             moe_real *logits) {
    (void)u;
    memcpy(logits, ctx, call->n_tokens * (size_t)router->config.n_experts * sizeof *logits);
    return MOE_OK;
}

static int bench_hand(bench *b, const char *settings, size_t n, size_t experts, moe_real *logits) {
    moe_router_config c = config_of(settings);
    c.score = MOE_SCORE_CUSTOM;
    c.d_model = 1;
    c.n_experts = (int)experts;
    if (!bench_open(b, &c, n)) return 0;
    b->router.custom.ctx = logits;
    b->router.custom.score = hand_score;
    return 1;
}

/* The largest sum of z over all assignments of the real tokens with loads that differ by at most 1,
   by trying them all. */
static double best_even_sum(const bench *b, const moe_real *z, size_t n, size_t experts) {
    size_t tokens[16], real = 0, t, e, pick[16] = {0};
    double best = -HUGE_VAL;
    for (t = 0; t < n; t++)
        if (is_real(b, t)) tokens[real++] = t;
    for (;;) {
        size_t load[8] = {0}, most = 0;
        size_t least = real;
        double sum = 0.0;
        for (t = 0; t < real; t++) {
            load[pick[t]]++;
            sum += (double)z[tokens[t] * experts + pick[t]];
        }
        for (e = 0; e < experts; e++) {
            most = load[e] > most ? load[e] : most;
            least = load[e] < least ? load[e] : least;
        }
        if (most - least <= 1 && sum > best) best = sum;
        for (t = 0; t < real && ++pick[t] == experts; t++) pick[t] = 0;
        if (t == real) return best;
    }
}

static double chosen_sum(const bench *b, const moe_real *z) {
    double sum = 0.0;
    size_t t;
    for (t = 0; t < b->call.n_tokens; t++)
        if (b->routing.n_choices[t] > 0) sum += (double)z[t * b->routing.n_experts + (size_t)b->routing.choices[t]];
    return sum;
}

static void check_even(const bench *b) {
    size_t t, e, most = 0, least = b->routing.n_real;
    for (t = 0; t < b->call.n_tokens; t++) CHECK(b->routing.n_choices[t] == is_real(b, t), "one expert per token");
    for (e = 0; e < b->routing.n_experts; e++) {
        most = b->routing.counts[e] > most ? b->routing.counts[e] : most;
        least = b->routing.counts[e] < least ? b->routing.counts[e] : least;
    }
    CHECK(b->routing.max_choices == 1 && most - least <= 1, "loads differ by at most 1");
}

static void test_balanced_optimal(void) {
    size_t n, experts, t, e;
    int trial;
    for (n = 0; n <= 7; n++)
        for (experts = 1; experts <= 4; experts++)
            for (trial = 0; trial < (n > 5 && experts == 4 ? 12 : 30); trial++) {
                moe_real *z = reals(n * experts);
                bench b;
                /* small integers, which tie; normal; all tokens alike or nearly; of very
                   different sizes */
                for (t = 0; t < n * experts; t++)
                    z[t] = trial % 4 == 0   ? (moe_real)(below(3) - 1)
                           : trial % 4 == 1 ? moe_rng_normal(&rng)
                           : trial % 4 == 2 ? (moe_real)(t % experts) + (moe_real)(trial % 8 == 6 ? 1e-6 * below(9) : 0)
                                            : moe_rng_normal(&rng) * (moe_real)pow(10.0, below(7) - 3);
                if (!bench_hand(&b, "top_k=1 select=balanced weight=raw gate=sigmoid", n, experts, z)) return;
                if (trial % 3 == 2 && n > 0) bench_mask(&b, 2 + below(3));
                CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
                check_even(&b);
                if (b.routing.n_real > 0) {
                    double best = best_even_sum(&b, z, n, experts), got = chosen_sum(&b, z);
                    if (!CHECK(fabs(best - got) <= 1e-11 * (1.0 + fabs(best)), "the sum is the largest there is"))
                        printf("  %g instead of %g\n", got, best);
                }
                b.call.training = 0;
                CHECK_STATUS(bench_route(&b), MOE_OK, "evaluation");
                for (t = 0; t < n; t++) {
                    size_t first = 0;
                    for (e = 1; e < experts; e++)
                        if (z[t * experts + e] > z[t * experts + first]) first = e;
                    if (is_real(&b, t)) CHECK((size_t)b.routing.choices[t] == first, "evaluation is top_k");
                }
                free(z);
                bench_close(&b);
            }
}

/* No chain of moves gains anything: with price[a][b] the least loss of moving a token of a to b,
   and node E for experts that may give up or take the one token more, there is no negative
   cycle. */
static int no_better_chain(const bench *b, const moe_real *z) {
    size_t experts = b->routing.n_experts, nodes = experts + 1;
    size_t own = b->routing.n_real / experts, t, a, c, k;
    double *price = (double *)grab(nodes * nodes, sizeof *price), size = 0.0;
    int good = 1;
    for (a = 0; a < nodes * nodes; a++) price[a] = 1e300;
    for (t = 0; t < b->call.n_tokens; t++)
        for (a = (size_t)b->routing.choices[t], c = 0; c < experts; c++) {
            double loss = (double)z[t * experts + a] - (double)z[t * experts + c];
            size = fabs(loss) > size ? fabs(loss) : size;
            if (loss < price[a * nodes + c]) price[a * nodes + c] = loss;
        }
    for (a = 0; a < experts; a++) { /* an expert with one token more may lose it, another may get it */
        if (b->routing.counts[a] == own + 1) price[experts * nodes + a] = 0.0;
        if (b->routing.counts[a] == own) price[a * nodes + experts] = 0.0;
    }
    for (k = 0; k < nodes; k++)
        for (a = 0; a < nodes; a++)
            for (c = 0; c < nodes; c++)
                if (price[a * nodes + k] < 1e299 && price[k * nodes + c] < 1e299 &&
                    price[a * nodes + k] + price[k * nodes + c] < price[a * nodes + c])
                    price[a * nodes + c] = price[a * nodes + k] + price[k * nodes + c];
    for (a = 0; a < nodes; a++) good &= price[a * nodes + a] > -1e-12 * size * (double)experts;
    free(price);
    return good;
}

static void test_balanced_larger(void) {
    int trial;
    size_t i;
    for (trial = 0; trial < 30; trial++) {
        size_t n = (size_t)(20 + below(80)), experts = (size_t)(2 + below(9));
        moe_real *z = normals(n * experts, 1.0, (uint64_t)(400 + trial));
        bench b;
        for (i = 0; i < n * experts; i++)
            z[i] +=
                (moe_real)((trial % 3) * 3.0 * (i % experts == 0)) + (moe_real)((trial % 2) * (double)(i % experts));
        if (trial % 5 == 0)
            for (i = 0; i < n * experts; i++) z[i] = (moe_real)floor((double)z[i]);
        if (!bench_hand(&b, "top_k=1 select=balanced weight=raw gate=sigmoid", n, experts, z)) return;
        CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
        check_even(&b);
        CHECK(no_better_chain(&b, z), "no chain of moves is better");
        free(z);
        bench_close(&b);
    }
}

/* Many tokens: random rows, a favorite expert, a slope, rows nearly equal, equal, of 8 kinds, of
   nearly 8 kinds, multiples of one row. */
static void test_balanced_many(void) {
    enum { N = 2070, E = 64 };
    int kind;
    for (kind = 0; kind < 8; kind++) {
        moe_real *z = normals(N * E, 1.0, 77);
        size_t i;
        bench b;
        for (i = 0; i < N * E; i++) {
            const double own = (double)z[i], row = (double)z[i % E];
            const double first = (double)z[i % (8 * E)];
            if (kind == 1) z[i] += (moe_real)(i % E == 0 ? 8 : 0);
            if (kind == 2) z[i] += (moe_real)(0.2 * (double)(i % E));
            if (i < 8 * E) continue;
            if (kind == 3) z[i] = (moe_real)(row + 1e-6 * own);
            if (kind == 4) z[i] = (moe_real)row;
            if (kind == 5) z[i] = (moe_real)first;
            if (kind == 6) z[i] = (moe_real)(first + 1e-6 * own);
            if (kind == 7) z[i] = (moe_real)(row * sin((double)(i / E)));
        }
        if (!bench_hand(&b, "top_k=1 select=balanced weight=raw gate=sigmoid", N, E, z)) return;
        CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
        check_even(&b);
        CHECK(no_better_chain(&b, z), "no chain of moves is better");
        free(z);
        bench_close(&b);
    }
}

/* ---- layers: one call, with memory of exactly its size ---- */

typedef struct run {
    moe_layer_pass pass;
    moe_real *y;
    void *work;
    moe_status status;
} run;

static void run_start(run *r, const moe_layer *layer, const moe_call *call) {
    size_t bytes = 0;
    memset(r, 0, sizeof *r);
    r->status = moe_layer_work_size(layer, call->n_tokens, call->training, &bytes);
    if (r->status != MOE_OK) return;
    r->work = grab(bytes, 1);
    r->y = reals(call->n_tokens * (size_t)layer->config.d_out);
    r->status = moe_layer_forward(layer, call, r->y, r->work, bytes, &r->pass);
}

static void run_end(run *r) {
    free(r->y);
    free(r->work);
    memset(r, 0, sizeof *r);
}

static int make_layer(moe_layer *layer, const moe_layer_config *config, int trainable, uint64_t seed) {
    moe_error error;
    error.message[0] = '\0';
    memset(layer, 0, sizeof *layer);
    return CHECK(moe_layer_create(layer, config, trainable, seed, NULL, &error) == MOE_OK, error.message);
}

/* The values of a tensor that may be changed; NULL when the layer has none. */
static moe_real *tensor_of(const moe_layer *layer, const char *name, size_t *count) {
    moe_tensor t;
    if (moe_layer_find(layer, name, &t) != MOE_OK) return NULL;
    if (count != NULL) *count = t.count;
    return t.data;
}

static void zero_gradients(moe_layer *layer) {
    moe_tensor t;
    size_t i;
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++) memset(t.gradient, 0, t.count * sizeof(moe_real));
}

/* All gradients of a layer, one after another. */
static moe_real *gradients_of(const moe_layer *layer, size_t *count) {
    moe_tensor t;
    size_t i, at = 0;
    moe_real *all;
    for (i = 0, *count = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++) *count += t.count;
    all = reals(*count);
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; at += t.count, i++)
        memcpy(all + at, t.gradient, t.count * sizeof(moe_real));
    return all;
}

/* Plain gradient descent on the layer's own tensors. */
static void layer_descend(moe_layer *layer, double rate) {
    moe_tensor t;
    size_t i, k;
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++)
        for (k = 0; k < t.count && (t.flags & (unsigned)(MOE_PARAM_FROZEN | MOE_PARAM_STATE)) == 0; k++)
            t.data[k] -= (moe_real)rate * t.gradient[k];
}

/* ---- networks ---- */

typedef struct net_run {
    moe_net_pass pass;
    void *work;
    moe_status status;
} net_run;

static void net_run_start(net_run *r, const moe_net *net, const moe_call *call) {
    size_t bytes = 0;
    memset(r, 0, sizeof *r);
    r->status = moe_net_work_size(net, call->n_tokens, call->training, &bytes);
    if (r->status != MOE_OK) return;
    r->work = grab(bytes, 1);
    r->status = moe_net_forward(net, call, r->work, bytes, &r->pass);
}

static void net_run_end(net_run *r) {
    free(r->work);
    memset(r, 0, sizeof *r);
}

/* The bits of all tensors, state included. */
static uint64_t fingerprint(const moe_net *net) {
    uint64_t hash = 1;
    size_t i, k;
    for (i = 0; i < net->n_tensors; i++) {
        const unsigned char *p = (const unsigned char *)net->tensors[i].data;
        for (k = 0; k < net->tensors[i].count * sizeof(moe_real); k++) hash = (hash ^ p[k]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static void add_mixture(moe_net *net, const char *settings) {
    moe_layer_config c = layer_of(settings);
    if (moe_net_mixture(net, &c) != MOE_OK) CHECK(0, net->error.message);
}

static int build(moe_net *net, int trainable, uint64_t seed) {
    moe_error error;
    error.message[0] = '\0';
    return CHECK(moe_net_build(net, trainable, seed, &error) == MOE_OK, error.message);
}

static moe_train_config plain_descent(int batch, double rate) {
    moe_train_config c;
    memset(&c, 0, sizeof c);
    c.criterion = MOE_CRITERION_SQUARED_ERROR;
    c.optimizer = MOE_OPTIMIZER_SGD;
    c.momentum = -1;
    c.batch = batch;
    c.rate = (moe_real)rate;
    c.clip = 1;
    return c;
}

static moe_data data_of(size_t n, size_t d_in, size_t d_out, uint64_t seed) {
    moe_data data;
    moe_real *x = normals(n * d_in, 1.0, seed), *targets = reals(n * d_out);
    moe_real *mix = normals(d_in * d_out, 1.0, 91);
    size_t t, i, k;
    memset(&data, 0, sizeof data);
    for (t = 0; t < n; t++)
        for (k = 0; k < d_out; k++) {
            double sum = 0.0;
            for (i = 0; i < d_in; i++) sum += (double)mix[k * d_in + i] * (double)x[t * d_in + i];
            targets[t * d_out + k] = (moe_real)sin(sum);
        }
    free(mix);
    data.n = n;
    data.x = x;
    data.targets = targets;
    return data;
}

static void drop_data(moe_data *data) {
    moe_real *v;
    memcpy(&v, &data->x, sizeof v);
    free(v);
    memcpy(&v, &data->targets, sizeof v);
    free(v);
}

/* ---- state in files ---- */

/* Every kind of state and schedule, spread over five mixtures; some schedules end, freeze and
   switch behind the interruption. */
static int stateful_net(moe_net *net) {
    moe_net_init(net, 6, MOE_KERNELS_C, NULL);
    moe_net_linear(net, 6);
    moe_net_layer_norm(net);
    add_mixture(
        net,
        "n_experts=4 top_k=1 k_end=3 schedule_steps=10 gate=sigmoid weight=raw selection_bias=1 bias_rate=0.05 d_ff=5");
    moe_net_residual(net, 1);
    moe_net_layer_norm(net);
    add_mixture(net, "n_experts=4 input=adaptive_clustering ac_mode=running ac_rho=0.75 tau_schedule=gate_temperature "
                     "tau_end=2 schedule_steps=12 d_ff=5");
    moe_net_layer_norm(net);
    add_mixture(net,
                "n_experts=4 gate=relu select=positive weight=raw router_bias=1 l1_controller=1 loss_l1=0.01 d_ff=5");
    moe_net_layer_norm(net);
    add_mixture(net, "n_experts=4 score=cosine gate=sigmoid weight=raw top_k=1 capacity_bound=every capacity_rho=0.5 "
                     "student=1 freeze_at=9 loss_distill=0.5 d_ff=5");
    moe_net_residual(net, 1);
    moe_net_layer_norm(net);
    add_mixture(net, "n_experts=3 score=grap weight=raw top_k=1 capacity_bound=first select=affinity affinity_mass=0.5 "
                     "switch_at=8 switch_from=top_k d_ff=5");
    moe_net_linear(net, 2);
    return build(net, 1, 17);
}

static void check_state_moved(const moe_net *net) {
    static const char *const names[] = {"2.router.selection_bias", "2.router.step",     "5.router.ac_running",
                                        "5.router.step",           "7.router.l1",       "9.router.step",
                                        "9.router.capacity",       "12.router.capacity"};
    moe_net fresh;
    size_t i;
    if (!stateful_net(&fresh)) return;
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        moe_tensor *now = net_tensor(net, names[i]), *then = net_tensor(&fresh, names[i]);
        if (CHECK(now != NULL && then != NULL && (now->flags & (unsigned)MOE_PARAM_STATE) != 0, names[i]))
            CHECK(!same_reals(now->data, then->data, now->count), "this state has moved");
    }
    moe_net_free(&fresh);
}

/* Training that is interrupted by a file goes on as if nothing had happened, bit for bit. */
static void test_saved_net(void) {
    enum { BEFORE = 6, AFTER = 8, BATCH = 20 };
    moe_train_config t = plain_descent(BATCH, 0.02);
    moe_data data = data_of(BATCH * (BEFORE + AFTER), 6, 2, 3);
    moe_net one, two;
    moe_trainer first, second;
    moe_buffer file;
    moe_stream stream;
    moe_error error;
    int step;
    error.message[0] = '\0';
    memset(&file, 0, sizeof file);
    if (!stateful_net(&one) || !CHECK_STATUS(moe_trainer_init(&first, &one, &t, &error), MOE_OK, "trainer")) return;
    for (step = 0; step < BEFORE + AFTER; step++) {
        moe_data batch = data;
        moe_step a, b;
        batch.n = BATCH;
        batch.x += step * BATCH * 6;
        batch.targets += step * BATCH * 2;
        if (step == BEFORE) {
            stream = moe_buffer_stream(&file);
            CHECK_STATUS(moe_net_write(&one, &stream, &error), MOE_OK, "write");
            if (!CHECK_STATUS(moe_net_read(&two, file.data, file.size, 1, MOE_KERNELS_C, NULL, &error), MOE_OK,
                              error.message))
                return;
            CHECK_STATUS(moe_trainer_init(&second, &two, &t, &error), MOE_OK, "trainer");
            CHECK(fingerprint(&one) == fingerprint(&two), "all tensors and all state are in the file");
            check_state_moved(&two);
        }
        if (!CHECK_STATUS(moe_trainer_step(&first, &batch, &a, &error), MOE_OK, "step"))
            printf("  %s\n", error.message);
        if (step >= BEFORE) {
            moe_call call;
            net_run here, there;
            memset(&call, 0, sizeof call);
            CHECK_STATUS(moe_trainer_step(&second, &batch, &b, &error), MOE_OK, "step");
            CHECK(same_reals(&a.loss, &b.loss, 1) && same_reals(&a.router_loss, &b.router_loss, 1) &&
                      same_reals(&a.gradient_norm, &b.gradient_norm, 1),
                  "the same step");
            CHECK(fingerprint(&one) == fingerprint(&two), "the same weights and state");
            call.n_tokens = BATCH;
            call.x = batch.x;
            net_run_start(&here, &one, &call);
            net_run_start(&there, &two, &call);
            CHECK(here.status == MOE_OK && there.status == MOE_OK && same_reals(here.pass.y, there.pass.y, BATCH * 2),
                  "the same outputs");
            net_run_end(&here);
            net_run_end(&there);
        }
    }
    NEARLY(net_tensor(&two, "2.router.step")->data[0], BEFORE + AFTER, "all steps are counted");
    moe_trainer_free(&first);
    moe_trainer_free(&second);
    moe_net_free(&one);
    moe_net_free(&two);
    moe_buffer_free(&file);
    drop_data(&data);
}

/* Some steps of a layer by hand. */
static void layer_steps(moe_layer *layer, int from, int to, moe_real *y) {
    int step;
    for (step = from; step < to; step++) {
        moe_real *x = normals(15 * 6, 1.0, (uint64_t)(800 + step));
        moe_real *dy = normals(15 * 6, 1.0, (uint64_t)(900 + step)), *dx = reals(15 * 6);
        moe_call call;
        run r;
        memset(&call, 0, sizeof call);
        call.n_tokens = 15;
        call.x = x;
        call.training = 1;
        zero_gradients(layer);
        run_start(&r, layer, &call);
        CHECK(r.status == MOE_OK && moe_layer_backward(layer, dy, dx, NULL, &r.pass) == MOE_OK, "forward and backward");
        CHECK(moe_layer_observe(layer, &r.pass) == MOE_OK && moe_layer_advance(layer) == MOE_OK, "state");
        layer_descend(layer, 0.01);
        memcpy(y, r.y, 15 * 6 * sizeof *y);
        run_end(&r);
        free(x);
        free(dy);
        free(dx);
    }
}

static void test_saved_layer(void) {
    static const char *const settings[] = {
        "top_k=2 k_end=1 schedule_steps=9 gate=sigmoid weight=raw selection_bias=1 bias_rate=0.1 "
        "tau_schedule=gate_temperature tau_end=3",
        "top_k=2 gate=relu select=positive weight=raw router_bias=1 l1_controller=1 loss_l1=0.01",
        "top_k=1 weight=raw gate=sigmoid capacity_bound=every capacity_rho=0.5 student=1 freeze_at=6 loss_distill=1",
        "top_k=1 weight=raw capacity_bound=first switch_at=5 switch_from=dense"};
    size_t i;
    for (i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        moe_layer_config c = layer_of(settings[i]);
        moe_layer one, two;
        moe_buffer file;
        moe_stream stream;
        moe_error error;
        moe_tensor a, b;
        moe_real y[2][15 * 6];
        size_t k;
        c.router.d_model = 6;
        c.router.n_experts = 5;
        c.d_ff = 4;
        memset(&file, 0, sizeof file);
        if (!make_layer(&one, &c, 1, 31)) return;
        layer_steps(&one, 0, 4, y[0]);
        stream = moe_buffer_stream(&file);
        CHECK_STATUS(moe_layer_write(&one, &stream, &error), MOE_OK, "write");
        if (!CHECK_STATUS(moe_layer_read(&two, file.data, file.size, 1, MOE_KERNELS_AUTO, NULL, &error), MOE_OK,
                          "read"))
            return;
        layer_steps(&one, 4, 9, y[0]);
        layer_steps(&two, 4, 9, y[1]);
        CHECK(same_reals(y[0], y[1], 15 * 6), "the same output after the interruption");
        for (k = 0; moe_layer_tensor(&one, k, &a) == MOE_OK; k++)
            CHECK(moe_layer_tensor(&two, k, &b) == MOE_OK && same_reals(a.data, b.data, a.count),
                  "the same weights and state");
        moe_layer_free(&one);
        moe_layer_free(&two);
        moe_buffer_free(&file);
    }
}

/* A step that fails changes no state. */
static void test_failed_step(void) {
    moe_train_config t = plain_descent(20, 0.02);
    moe_data data = data_of(20, 6, 2, 3), bad = data;
    moe_real *targets = copy_of(data.targets, 40), *x = copy_of(data.x, 120);
    moe_net net;
    moe_trainer trainer;
    moe_error error;
    uint64_t before;
    size_t i;
    if (!stateful_net(&net) || !CHECK_STATUS(moe_trainer_init(&trainer, &net, &t, &error), MOE_OK, "trainer")) return;
    CHECK_STATUS(moe_trainer_step(&trainer, &data, NULL, &error), MOE_OK, "a good step");
    before = fingerprint(&net);
    targets[7] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e200 : 1e30); /* finite, but not its square */
    bad.targets = targets;
    CHECK_STATUS(moe_trainer_step(&trainer, &bad, NULL, &error), MOE_ERR_NONFINITE, "a loss that is not finite");
    CHECK(fingerprint(&net) == before && trainer.steps == 1, "no state has changed");
    /* a finite loss, but too large a gradient */
    targets[7] = 0;
    targets[1] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1.5e150 : 1.5e19);
    bad.n = 1;
    CHECK_STATUS(moe_trainer_step(&trainer, &bad, NULL, &error), MOE_ERR_NONFINITE, "a gradient that is too large");
    CHECK(fingerprint(&net) == before && trainer.steps == 1, "no state has changed");
    for (i = 0; i < 120; i++) x[i] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e308 : 3e38);
    bad = data;
    bad.x = x;
    CHECK(moe_trainer_step(&trainer, &bad, NULL, &error) != MOE_OK, "a forward pass that fails");
    CHECK(fingerprint(&net) == before && trainer.steps == 1, "no state has changed");
    CHECK_STATUS(moe_trainer_step(&trainer, &data, NULL, &error), MOE_OK, "a good step");
    CHECK(fingerprint(&net) != before, "which counts");
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    free(targets);
    free(x);
    drop_data(&data);
}

/* observe and advance of layers and nets. */
static void test_object_errors(void) {
    moe_layer_config c = layer_of("d_model=6 n_experts=3 gate=sigmoid selection_bias=1 bias_rate=0.5 d_ff=4"),
                     plain = layer_of("d_model=6 n_experts=3 d_ff=4");
    moe_real *x = normals(5 * 6, 1.0, 1);
    moe_call call;
    moe_layer layer, still, stateless;
    moe_net net, fixed;
    run r;
    net_run n;
    memset(&call, 0, sizeof call);
    call.n_tokens = 5;
    call.x = x;
    call.training = 1;
    if (!make_layer(&layer, &c, 1, 1) || !make_layer(&still, &c, 0, 1) || !make_layer(&stateless, &plain, 0, 1)) return;
    run_start(&r, &layer, &call);
    CHECK_STATUS(moe_layer_observe(NULL, &r.pass), MOE_ERR_ARGUMENT, "no layer");
    CHECK_STATUS(moe_layer_observe(&layer, NULL), MOE_ERR_ARGUMENT, "no pass");
    CHECK_STATUS(moe_layer_advance(NULL), MOE_ERR_ARGUMENT, "no layer");
    CHECK_STATUS(moe_layer_observe(&layer, &r.pass), MOE_OK, "observe");
    run_end(&r);
    run_start(&r, &still, &call);
    CHECK_STATUS(moe_layer_observe(&still, &r.pass), MOE_ERR_STATE, "not trainable");
    CHECK_STATUS(moe_layer_advance(&still), MOE_ERR_STATE, "not trainable");
    run_end(&r);
    run_start(&r, &stateless, &call);
    CHECK_STATUS(moe_layer_observe(&stateless, &r.pass), MOE_OK, "a layer without state");
    CHECK_STATUS(moe_layer_advance(&stateless), MOE_OK, "a layer without state");
    run_end(&r);
    call.training = 0;
    run_start(&r, &layer, &call);
    CHECK_STATUS(moe_layer_observe(&layer, &r.pass), MOE_ERR_STATE, "an inference pass");
    run_end(&r);
    if (!stateful_net(&net)) return;
    moe_net_init(&fixed, 6, MOE_KERNELS_C, NULL);
    moe_net_mixture(&fixed, &c);
    if (!build(&fixed, 0, 1)) return;
    net_run_start(&n, &net, &call);
    CHECK_STATUS(moe_net_observe(&net, &n.pass), MOE_ERR_STATE, "an inference pass");
    CHECK_STATUS(moe_net_observe(NULL, &n.pass), MOE_ERR_ARGUMENT, "no net");
    CHECK_STATUS(moe_net_observe(&net, NULL), MOE_ERR_ARGUMENT, "no pass");
    CHECK_STATUS(moe_net_advance(NULL), MOE_ERR_ARGUMENT, "no net");
    net_run_end(&n);
    call.training = 1;
    net_run_start(&n, &fixed, &call);
    CHECK_STATUS(moe_net_observe(&fixed, &n.pass), MOE_ERR_STATE, "not trainable");
    CHECK_STATUS(moe_net_advance(&fixed), MOE_ERR_STATE, "not trainable");
    net_run_end(&n);
    moe_net_free(&net);
    moe_net_free(&fixed);
    moe_layer_free(&layer);
    moe_layer_free(&still);
    moe_layer_free(&stateless);
    free(x);
}

/* In training the controller of remoe leads the share of open pairs to K/E. */
static void test_remoe_share(void) {
    enum { STEPS = 400, BATCH = 32, E = 8, K = 2 };
    moe_layer_config c;
    moe_train_config t = plain_descent(BATCH, 0.3);
    moe_data data = data_of(256, 6, 3, 8);
    moe_net net;
    moe_trainer trainer;
    moe_error error;
    double first = 0.0, last = 0.0;
    int step;
    CHECK_STATUS(moe_layer_preset("remoe", &c, &error), MOE_OK, "preset");
    c.router.n_experts = E;
    c.router.top_k = K;
    c.router.router_bias = 1;
    c.router.loss_l1 = (moe_real)0.001;
    c.d_ff = 8; /* x has no mean that could close a gate */
    moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &c);
    moe_net_linear(&net, 3);
    if (!build(&net, 1, 4) || !CHECK_STATUS(moe_trainer_init(&trainer, &net, &t, &error), MOE_OK, "trainer")) return;
    for (step = 0; step < STEPS; step++) {
        moe_data batch = data;
        moe_call call;
        net_run r;
        size_t from = (size_t)(step * BATCH % 256);
        batch.n = BATCH;
        batch.x += from * 6;
        batch.targets += from * 3;
        CHECK_STATUS(moe_trainer_step(&trainer, &batch, NULL, &error), MOE_OK, "step");
        if (step >= 10 && step < STEPS - 40) continue;
        memset(&call, 0, sizeof call);
        call.n_tokens = 256;
        call.x = data.x;
        net_run_start(&r, &net, &call);
        if (step < 10) first += (double)moe_net_routing(&net, &r.pass, 0)->plan.offsets[E] / (256.0 * E) / 10.0;
        else last += (double)moe_net_routing(&net, &r.pass, 0)->plan.offsets[E] / (256.0 * E) / 40.0;
        net_run_end(&r);
    }
    if (!CHECK(first > 0.4 && fabs(last - (double)K / E) < 0.05, "the share of open pairs approaches K/E"))
        printf("  from %g to %g\n", first, last);
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    drop_data(&data);
}

/* ---- stages of the caller's own ---- */

typedef struct own_stage {
    moe_real *weight, *gradient; /* [E,d] */
    moe_status fail_score, fail_backward, fail_select;
} own_stage;

/* What the score linear does, by the same kernels. */
static moe_status own_score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                            moe_real *logits) {
    const own_stage *own = (const own_stage *)ctx;
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts;
    moe_matmul(router->kernels, MOE_MATMUL_NT, MOE_TYPE_REAL, call->n_tokens, experts, d, u, d, own->weight, d, logits,
               experts, 0);
    return own->fail_score;
}

static moe_status own_score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                     const moe_real *d_logits, moe_real *d_u, moe_real *d_parameters) {
    own_stage *own = (own_stage *)ctx;
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts;
    size_t n = call->n_tokens;
    (void)d_parameters;
    moe_matmul(router->kernels, MOE_MATMUL_NN, MOE_TYPE_REAL, n, d, experts, d_logits, experts, own->weight, d, d_u, d,
               1);
    moe_matmul(router->kernels, MOE_MATMUL_TN, MOE_TYPE_REAL, experts, d, n, d_logits, experts, u, d, own->gradient, d,
               1);
    return own->fail_backward;
}

/* What top_k does under a softmax: by z, or by p where it was refined. */
static moe_status own_select(void *ctx, const moe_router *router, const moe_call *call, const moe_real *logits,
                             const moe_real *probabilities, unsigned char *chosen) {
    const own_stage *own = (const own_stage *)ctx;
    const moe_real *score = router->config.refine == MOE_REFINE_NONE ? logits : probabilities;
    size_t experts = (size_t)router->config.n_experts, t, i, found;
    int32_t best[16];
    for (t = 0; t < call->n_tokens; t++) {
        found = moe_top_k(experts, score + t * experts, (size_t)router->config.top_k, best);
        /* any number but 0 */
        for (i = 0; i < found; i++) chosen[t * experts + (size_t)best[i]] = (unsigned char)(1 + i);
    }
    return own->fail_select;
}

static moe_custom own_custom(own_stage *own) {
    moe_custom custom;
    memset(&custom, 0, sizeof custom);
    custom.ctx = own;
    custom.score = own_score;
    custom.score_backward = own_score_backward;
    custom.select = own_select;
    return custom;
}

/* Every number of two reports. */
static int same_reports(const moe_report *a, const moe_report *b) {
    static const size_t numbers[] = {offsetof(moe_report, n_calls),
                                     offsetof(moe_report, n_tokens),
                                     offsetof(moe_report, n_assignments),
                                     offsetof(moe_report, n_dropped),
                                     offsetof(moe_report, dropped_share),
                                     offsetof(moe_report, experts_per_token),
                                     offsetof(moe_report, gate_entropy),
                                     offsetof(moe_report, usage_entropy),
                                     offsetof(moe_report, usage_entropy_calls),
                                     offsetof(moe_report, confidence_entropy),
                                     offsetof(moe_report, importance_cv2),
                                     offsetof(moe_report, load_entropy),
                                     offsetof(moe_report, load_balance_score),
                                     offsetof(moe_report, load_cv2),
                                     offsetof(moe_report, load_max_over_mean),
                                     offsetof(moe_report, load_max_minus_min),
                                     offsetof(moe_report, capacity_use),
                                     offsetof(moe_report, first_share_max),
                                     offsetof(moe_report, n_classified),
                                     offsetof(moe_report, information),
                                     offsetof(moe_report, information_chance),
                                     offsetof(moe_report, information_first),
                                     offsetof(moe_report, information_first_chance)};
    size_t i, experts = a->n_experts;
    for (i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (!same_bits((const char *)a + numbers[i], (const char *)b + numbers[i], sizeof(double))) return 0;
    return a->trivial_gate == b->trivial_gate && same_bits(a->load, b->load, experts * sizeof(double)) &&
           same_bits(a->first, b->first, experts * sizeof(double)) &&
           same_bits(a->kept, b->kept, experts * sizeof(double)) &&
           same_bits(a->mean_gate, b->mean_gate, experts * sizeof(double)) &&
           same_bits(a->mean_logit, b->mean_logit, experts * sizeof(double)) &&
           same_bits(a->classes, b->classes, 3 * experts * sizeof(double));
}

static void check_same_metrics(const bench *a, const bench *b) {
    const bench *of[2];
    moe_metrics metrics[2];
    moe_report report[2];
    void *memory[2];
    int32_t *classes = (int32_t *)grab(a->call.n_tokens, sizeof *classes);
    size_t bytes = 0, t, i;
    of[0] = a;
    of[1] = b;
    for (t = 0; t < a->call.n_tokens; t++) classes[t] = (int32_t)(t % 3);
    for (i = 0; i < 2; i++) {
        CHECK(moe_metrics_size(a->routing.n_experts, 3, &bytes) == MOE_OK, "size");
        memory[i] = grab(bytes, 1);
        CHECK(moe_metrics_init(&metrics[i], a->routing.n_experts, 3, memory[i], bytes) == MOE_OK, "metrics");
        CHECK(moe_metrics_add(&metrics[i], &of[i]->routing, of[i]->call.mask, classes) == MOE_OK, "add");
        CHECK(moe_metrics_report(&metrics[i], &report[i]) == MOE_OK, "report");
    }
    CHECK(same_reports(&report[0], &report[1]), "the same metrics");
    free(memory[0]);
    free(memory[1]);
    free(classes);
}

/* A score equal to linear and a selection equal to top_k give the built-in router, bit for bit,
   with every loss. */
static void test_custom_router(void) {
    static const char *const rest[] = {
        ("loss_balance=0.1 loss_z=0.1 loss_importance=0.1 loss_entropy=0.1 loss_usage_entropy=0.1 "
         "loss_similarity_same=0.1 loss_similarity_diff=0.2 loss_locality=0.1 nodes=2 loss_l1=0.1 loss_distill=0.1"),
        "noise=gaussian loss_load=0.1 loss_importance=0.1 importance_over=gate weight=raw loss_balance=0.1 "
        "balance_over=first",
        "input=scaled_rms weight=softmax capacity_factor=1 renormalize=after loss_importance=0.1 "
        "importance_over=weights unbiased=1",
        "input=jitter refine=similarity causal=1 weight=raw drop_capacity=4 drop_order=score loss_z=0.1",
        "expert_scale=1 scale=2 apply_to=input drop_rule=st_moe capacity_factor=1.5 drop_order=priority "
        "loss_distill=0.3 distill=mse"};
    static const char *const stages[] = {"score=custom", "select=custom", "score=custom select=custom"};
    size_t row, stage;
    int masked;
    for (row = 0; row < sizeof rest / sizeof rest[0]; row++)
        for (stage = 0; stage < 3; stage++)
            for (masked = 0; masked < 2; masked++) {
                char text[500];
                own_stage own;
                bench plain, custom;
                int scores = stage != 1;
                memset(&own, 0, sizeof own);
                sprintf(text, "d_model=9 n_experts=6 top_k=2 %s", rest[row]);
                if (!bench_of(&plain, text, 21)) return;
                sprintf(text, "d_model=9 n_experts=6 top_k=2 %s %s", stages[stage], rest[row]);
                if (!bench_of(&custom, text, 21)) return;
                if (masked) {
                    bench_mask(&plain, 4);
                    bench_mask(&custom, 4);
                }
                own.weight = copy_of(plain.tensors[MOE_ROUTER_WEIGHT], 54);
                own.gradient = reals(54);
                custom.router.custom = own_custom(&own);
                CHECK(bench_route(&plain) == MOE_OK && bench_route(&custom) == MOE_OK, "routes");
                CHECK(same_routing(&plain.routing, &custom.routing), "the built-in router, bit for bit");
                check_same_metrics(&plain, &custom);
                CHECK(bench_backward(&plain, 1.0) == MOE_OK && bench_backward(&custom, 1.0) == MOE_OK, "backward");
                CHECK(same_reals(plain.dx, custom.dx, 21 * 9) && !all_zero(plain.dx, 21 * 9), "the same dx");
                CHECK(same_reals(plain.gradients[MOE_ROUTER_WEIGHT],
                                 scores ? own.gradient : custom.gradients[MOE_ROUTER_WEIGHT], 54),
                      "the same gradient");
                plain.call.training = custom.call.training = 0;
                CHECK(bench_route(&plain) == MOE_OK && bench_route(&custom) == MOE_OK, "routes");
                CHECK(same_routing(&plain.routing, &custom.routing), "in evaluation too");
                free(own.weight);
                free(own.gradient);
                bench_close(&plain);
                bench_close(&custom);
            }
}

static void test_custom_errors(void) {
    own_stage own;
    moe_routing untouched, routing;
    moe_router_config c;
    moe_error error;
    bench b;
    memset(&own, 0, sizeof own);
    if (!bench_of(&b, "d_model=9 n_experts=6 top_k=2 score=custom select=custom", 5)) return;
    own.weight = normals(54, 1.0, 1);
    own.gradient = reals(54);
    CHECK_STATUS(bench_route(&b), MOE_ERR_ARGUMENT, "no callbacks");
    b.router.custom = own_custom(&own);
    b.router.custom.score = NULL;
    CHECK_STATUS(bench_route(&b), MOE_ERR_ARGUMENT, "no score");
    b.router.custom = own_custom(&own);
    b.router.custom.select = NULL;
    CHECK_STATUS(bench_route(&b), MOE_ERR_ARGUMENT, "no selection");
    b.router.custom = own_custom(&own);
    CHECK_STATUS(bench_route(&b), MOE_OK, "both");
    own.fail_backward = MOE_ERR_STOPPED;
    CHECK_STATUS(bench_backward(&b, 1.0), MOE_ERR_STOPPED, "an error of the backward pass comes back");
    own.fail_backward = MOE_OK;
    memset(&untouched, 3, sizeof untouched);
    routing = untouched;
    own.fail_score = MOE_ERR_IO;
    CHECK_STATUS(moe_route(&b.router, &b.call, b.memory, b.size, &routing), MOE_ERR_IO,
                 "an error of the score comes back");
    own.fail_score = MOE_OK;
    own.fail_select = MOE_ERR_UNSUPPORTED;
    CHECK_STATUS(moe_route(&b.router, &b.call, b.memory, b.size, &routing), MOE_ERR_UNSUPPORTED,
                 "an error of the selection comes back");
    CHECK(same_bits(&untouched, &routing, sizeof routing), "a failed call leaves the routing");
    own.fail_select = MOE_OK;
    own.weight[20] = (moe_real)HUGE_VAL;
    CHECK_STATUS(bench_route(&b), MOE_ERR_NONFINITE, "a score that is not finite");
    own.weight[20] = 0;
    b.router.custom.score_backward = NULL;
    CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
    CHECK_STATUS(bench_backward(&b, 1.0), MOE_OK, "a score that passes no gradient");
    CHECK(all_zero(b.dx, 45), "no gradient");
    c = config_of("d_model=9 n_experts=6 score=custom loss_orthogonal=0.1");
    CHECK_STATUS(moe_router_check(&c, NULL, &error), MOE_ERR_CONFIG, "a score of the caller's own has no vectors");
    CHECK(strstr(error.message, "loss_orthogonal") != NULL && strstr(error.message, "score = custom") != NULL,
          "by name");
    free(own.weight);
    free(own.gradient);
    bench_close(&b);
}

/* A layer with stages of its own, against the same layer without. */
static void test_custom_layer(void) {
    moe_layer_config c = layer_of("d_model=9 n_experts=6 top_k=2 d_ff=5 loss_balance=0.1 n_shared=1");
    moe_real *x = normals(13 * 9, 1.0, 2), *dy = normals(13 * 9, 1.0, 3), *dx[2];
    moe_layer plain, custom;
    moe_tensor a, b;
    moe_call call;
    own_stage own;
    run r[2];
    size_t i;
    memset(&own, 0, sizeof own);
    memset(&call, 0, sizeof call);
    call.n_tokens = 13;
    call.x = x;
    call.training = 1;
    if (!make_layer(&plain, &c, 1, 5)) return;
    c.router.score = MOE_SCORE_CUSTOM;
    c.router.select = MOE_SELECT_CUSTOM;
    if (!make_layer(&custom, &c, 1, 6)) return;
    run_start(&r[1], &custom, &call);
    CHECK_STATUS(r[1].status, MOE_ERR_ARGUMENT, "a layer without its stages");
    run_end(&r[1]);
    own.weight = copy_of(tensor_of(&plain, "router.weight", NULL), 54);
    own.gradient = reals(54);
    custom.router.custom = own_custom(&own);
    for (i = 0; moe_layer_tensor(&custom, i, &b) == MOE_OK; i++)
        if (CHECK(moe_layer_find(&plain, b.name, &a) == MOE_OK && a.count == b.count, b.name))
            memcpy(b.data, a.data, a.count * sizeof(moe_real));
    dx[0] = reals(13 * 9);
    dx[1] = reals(13 * 9);
    run_start(&r[0], &plain, &call);
    run_start(&r[1], &custom, &call);
    CHECK(r[0].status == MOE_OK && r[1].status == MOE_OK && same_reals(r[0].y, r[1].y, 13 * 9), "the same output");
    CHECK(moe_layer_backward(&plain, dy, dx[0], NULL, &r[0].pass) == MOE_OK &&
              moe_layer_backward(&custom, dy, dx[1], NULL, &r[1].pass) == MOE_OK,
          "backward");
    CHECK(same_reals(dx[0], dx[1], 13 * 9), "the same dx");
    for (i = 0; moe_layer_tensor(&custom, i, &b) == MOE_OK; i++)
        if (moe_layer_find(&plain, b.name, &a) == MOE_OK)
            CHECK(same_reals(a.gradient, b.gradient, a.count), "the same gradients");
    CHECK(moe_layer_find(&plain, "router.weight", &a) == MOE_OK && same_reals(a.gradient, own.gradient, 54),
          "of the score as well");
    run_end(&r[0]);
    run_end(&r[1]);
    moe_layer_free(&plain);
    moe_layer_free(&custom);
    free(x);
    free(dy);
    free(dx[0]);
    free(dx[1]);
    free(own.weight);
    free(own.gradient);
}

static void step_custom(moe_data *data, moe_trainer *trainer, own_stage *own, moe_step *seen) {
    enum { BATCH = 16, STEPS = 25 };
    moe_error error;
    moe_step start;
    size_t i, k;
    int step;
    memset(&start, 0, sizeof start);
    for (step = 0; step < STEPS; step++) {
        moe_data batch = *data;
        batch.n = BATCH;
        batch.x += step % 4 * BATCH * 9;
        batch.targets += step % 4 * BATCH * 3;
        memset(own->gradient, 0, 54 * sizeof(moe_real));
        for (i = 0; i < 2; i++) CHECK_STATUS(moe_trainer_step(&trainer[i], &batch, &seen[i], &error), MOE_OK, "step");
        for (k = 0; k < 54; k++) own->weight[k] -= (moe_real)0.02 * own->gradient[k];
        if (step == 0) {
            start = seen[0];
            CHECK(same_reals(&seen[0].loss, &seen[1].loss, 1) &&
                      same_reals(&seen[0].router_loss, &seen[1].router_loss, 1),
                  "the same loss");
        }
        NEARLY(seen[1].loss, seen[0].loss, "both learn alike");
    }
    CHECK(seen[1].loss < start.loss * (moe_real)0.9, "and both learn");
}

/* A network with stages of its own learns as the network without. */
static void test_custom_net(void) {
    enum { BATCH = 16, STEPS = 25 };
    static const char *const settings[] = {"n_experts=6 top_k=2 d_ff=5 loss_balance=0.1",
                                           "n_experts=6 top_k=2 d_ff=5 loss_balance=0.1 score=custom select=custom"};
    moe_train_config t = plain_descent(BATCH, 0.02);
    moe_data data = data_of(BATCH * 4, 9, 3, 12);
    moe_net net[2];
    moe_trainer trainer[2];
    moe_error error;
    own_stage own;
    moe_step seen[2];
    size_t i, k;
    t.clip = 0; /* the network cannot clip a gradient that it does not hold */
    memset(&own, 0, sizeof own);
    memset(seen, 0, sizeof seen);
    for (i = 0; i < 2; i++) {
        moe_net_init(&net[i], 9, MOE_KERNELS_C, NULL);
        moe_net_linear(&net[i], 9);
        add_mixture(&net[i], settings[i]);
        moe_net_linear(&net[i], 3);
        if (!build(&net[i], 1, 6) ||
            !CHECK_STATUS(moe_trainer_init(&trainer[i], &net[i], &t, &error), MOE_OK, "trainer"))
            return;
    }
    for (i = 0; i < net[1].n_tensors; i++) {
        moe_tensor *from = net_tensor(&net[0], net[1].tensors[i].name);
        if (CHECK(from != NULL, "a tensor of both"))
            memcpy(net[1].tensors[i].data, from->data, from->count * sizeof(moe_real));
    }
    own.weight = copy_of(net_tensor(&net[0], "1.router.weight")->data, 54);
    own.gradient = reals(54);
    {
        moe_data batch = data;
        batch.n = BATCH;
        CHECK_STATUS(moe_trainer_step(&trainer[1], &batch, NULL, &error), MOE_ERR_ARGUMENT, "a net without its stages");
    }
    net[1].modules[1].layer.router.custom = own_custom(&own);
    step_custom(&data, trainer, &own, seen);
    for (k = 0; k < 54; k++) NEARLY(own.weight[k], net_tensor(&net[0], "1.router.weight")->data[k], "the same weights");
    for (i = 0; i < 2; i++) {
        moe_trainer_free(&trainer[i]);
        moe_net_free(&net[i]);
    }
    free(own.weight);
    free(own.gradient);
    drop_data(&data);
}

/* A score with parameters of its own: z = W2 tanh(W1 u), W1 [h,d] and then W2 [E,h]. */
enum { MLP_D = 6, MLP_H = 5, MLP_E = 4, MLP_PARAMETERS = MLP_H * MLP_D + MLP_E * MLP_H };

static moe_status mlp_score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                            moe_real *logits) {
    const moe_real *w1 = router->tensors[MOE_ROUTER_CUSTOM], *w2 = w1 + MLP_H * MLP_D;
    size_t t, h, i;
    (void)ctx;
    memset(logits, 0, call->n_tokens * MLP_E * sizeof *logits);
    for (t = 0; t < call->n_tokens; t++)
        for (h = 0; h < MLP_H; h++) {
            double sum = 0.0;
            for (i = 0; i < MLP_D; i++) sum += (double)w1[h * MLP_D + i] * (double)u[t * MLP_D + i];
            for (i = 0; i < MLP_E; i++) logits[t * MLP_E + i] += w2[i * MLP_H + h] * (moe_real)tanh(sum);
        }
    return MOE_OK;
}

static moe_status mlp_score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                     const moe_real *d_logits, moe_real *d_u, moe_real *d_parameters) {
    const moe_real *w1 = router->tensors[MOE_ROUTER_CUSTOM], *w2 = w1 + MLP_H * MLP_D;
    size_t t, h, i;
    (void)ctx;
    for (t = 0; t < call->n_tokens; t++)
        for (h = 0; h < MLP_H; h++) {
            const moe_real *dz = d_logits + t * MLP_E;
            double sum = 0.0, slope = 0.0;
            for (i = 0; i < MLP_D; i++) sum += (double)w1[h * MLP_D + i] * (double)u[t * MLP_D + i];
            for (i = 0; i < MLP_E; i++) slope += (double)dz[i] * (double)w2[i * MLP_H + h];
            slope *= 1.0 - tanh(sum) * tanh(sum);
            for (i = 0; i < MLP_D; i++) d_u[t * MLP_D + i] += (moe_real)slope * w1[h * MLP_D + i];
            if (d_parameters == NULL) continue;
            for (i = 0; i < MLP_D; i++) d_parameters[h * MLP_D + i] += (moe_real)slope * u[t * MLP_D + i];
            for (i = 0; i < MLP_E; i++)
                d_parameters[MLP_H * MLP_D + i * MLP_H + h] += dz[i] * (moe_real)tanh(sum);
        }
    return MOE_OK;
}

static moe_custom mlp_custom(void) {
    moe_custom custom;
    memset(&custom, 0, sizeof custom);
    custom.score = mlp_score;
    custom.score_backward = mlp_score_backward;
    custom.n_parameters = MLP_PARAMETERS;
    return custom;
}

static const char mlp_settings[] = "n_experts=4 top_k=2 d_ff=5 score=custom custom_parameters=50 loss_z=0.1 "
                                   "loss_balance=0.1 weight=softmax";

static int mlp_net(moe_net *net, uint64_t seed) {
    moe_net_init(net, MLP_D, MOE_KERNELS_C, NULL);
    moe_net_linear(net, MLP_D);
    add_mixture(net, mlp_settings);
    moe_net_linear(net, 2);
    return build(net, 1, seed);
}

/* The configuration, the parameter that follows from it, and what is refused. */
static void test_custom_parameter(void) {
    static const char *const refused[][3] = {
        {"custom_parameters=4", "custom_parameters = 4", "score = custom"},
        {"score=mlp custom_parameters=4", "custom_parameters = 4", "score = mlp"},
        {"score=custom custom_parameters=-1", "custom_parameters = -1", "must be 1 to 16777216"}};
    moe_router_config c;
    moe_parameter p;
    moe_error error;
    size_t i;
    for (i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        c = config_of(refused[i][0]);
        c.d_model = 6;
        CHECK_STATUS(moe_router_check(&c, NULL, &error), MOE_ERR_CONFIG, refused[i][0]);
        CHECK(strstr(error.message, refused[i][1]) != NULL && strstr(error.message, refused[i][2]) != NULL,
              error.message);
    }
    c = config_of("d_model=16 n_experts=4 score=custom");
    CHECK_STATUS(moe_router_parameter(&c, MOE_ROUTER_CUSTOM, &p), MOE_ERR_NOT_FOUND, "no parameter unless asked for");
    c.custom_parameters = 7;
    CHECK_STATUS(moe_router_parameter(&c, MOE_ROUTER_CUSTOM, &p), MOE_OK, "the parameter");
    CHECK(strcmp(p.name, "router.custom") == 0 && p.n_dims == 1 && p.shape[0] == 7 && p.count == 7, "its shape");
    CHECK(p.flags == MOE_PARAM_TRAINED, "trained and decayed");
    NEARLY(p.init_std, 0.25, "1 / sqrt(d)");
    NEARLY(p.init_value, 0.0, "around 0");
    c.top_k = 1;
    CHECK_STATUS(moe_router_check_training(&c, &error), MOE_ERR_CONFIG, "a weight of 1 trains no parameters");
    c.custom_parameters = 0;
    CHECK_STATUS(moe_router_check_training(&c, &error), MOE_OK, "there are none to train");
}

/* What is missing is named: the module, the field, both numbers. */
static void check_named(const moe_net *net, int training, moe_status wanted, const char *text) {
    moe_real *x = normals(5 * MLP_D, 1.0, 2);
    moe_call call;
    moe_error error;
    net_run r;
    memset(&call, 0, sizeof call);
    call.n_tokens = 5;
    call.x = x;
    call.training = training;
    call.error = &error;
    error.message[0] = '\0';
    net_run_start(&r, net, &call);
    CHECK_STATUS(r.status, wanted, text);
    CHECKF(strncmp(error.message, text, strlen(text)) == 0, "\"%s\", wanted \"%s\"", error.message, text);
    net_run_end(&r);
    free(x);
}

static void test_custom_missing(void) {
    moe_net net;
    moe_custom *custom;
    if (!mlp_net(&net, 3)) return;
    custom = &net.modules[1].layer.router.custom;
    check_named(&net, 0, MOE_ERR_ARGUMENT, "module 1 (mixture): router.custom.score is NULL: score = custom needs it");
    *custom = mlp_custom();
    custom->n_parameters = 49;
    check_named(&net, 0, MOE_ERR_SHAPE,
                "module 1 (mixture): router.custom.n_parameters = 49: must be that of the configuration, "
                "custom_parameters = 50");
    *custom = mlp_custom();
    custom->score_backward = NULL;
    check_named(&net, 0, MOE_OK, "");
    check_named(&net, 1, MOE_ERR_ARGUMENT, "module 1 (mixture): router.custom.score_backward is NULL: training");
    moe_net_free(&net);
}

/* L = y . dy + the router's losses, the network's only outputs. */
static double mlp_loss(const moe_net *net, const moe_call *call, const moe_real *dy, net_run *r) {
    double sum = 0.0;
    size_t i;
    net_run_start(r, net, call);
    if (!CHECK_STATUS(r->status, MOE_OK, "forward")) return 0.0;
    for (i = 0; i < call->n_tokens * 2; i++) sum += (double)r->pass.y[i] * (double)dy[i];
    for (i = 0; i < MOE_LOSS_COUNT; i++) sum += (double)moe_net_routing(net, &r->pass, 1)->loss[i];
    return sum;
}

static moe_status failing_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                   const moe_real *d_logits, moe_real *d_u, moe_real *d_parameters) {
    (void)ctx;
    (void)router;
    (void)call;
    (void)u;
    (void)d_logits;
    (void)d_u;
    (void)d_parameters;
    return MOE_ERR_NONFINITE;
}

/* A module whose backward pass fails ends that of the network, which says why. */
static void test_custom_backward_fails(void) {
    moe_real *x = normals(4 * MLP_D, 1.0, 4), *dy = normals(4 * 2, 1.0, 5);
    const moe_tensor *first;
    moe_error error;
    moe_call call;
    moe_net net;
    net_run r;
    size_t i;
    if (!mlp_net(&net, 3)) return;
    net.modules[1].layer.router.custom = mlp_custom();
    net.modules[1].layer.router.custom.score_backward = failing_backward;
    memset(&call, 0, sizeof call);
    memset(&error, 0, sizeof error);
    call.n_tokens = 4;
    call.x = x;
    call.training = 1;
    call.error = &error;
    net_run_start(&r, &net, &call);
    CHECK_STATUS(r.status, MOE_OK, "forward");
    CHECK_STATUS(moe_net_backward(&net, dy, NULL, &r.pass), MOE_ERR_NONFINITE, "backward");
    CHECK(strncmp(error.message, "module 1 (mixture): ", 20) == 0, error.message);
    first = net_tensor(&net, "0.weight");
    if (CHECK(first != NULL && first->gradient != NULL))
        for (i = 0; i < first->count; i++) NEARLY(first->gradient[i], 0.0, "no gradient before the module");
    net_run_end(&r);
    moe_net_free(&net);
    free(x);
    free(dy);
}

/* Every own parameter of a network by central differences. */
static void test_custom_differences(void) {
    enum { N = 12 };
    const double step = 1e-6;
    moe_real *x = normals(N * MLP_D, 1.0, 4), *dy = normals(N * 2, 1.0, 5);
    unsigned char mask[N];
    moe_tensor *own;
    moe_call call;
    moe_net net;
    net_run r;
    size_t i;
    if (!mlp_net(&net, 3)) return;
    net.modules[1].layer.router.custom = mlp_custom();
    own = net_tensor(&net, "1.router.custom");
    if (!CHECK(own != NULL && own->count == MLP_PARAMETERS && own->gradient != NULL, "in the net's list")) return;
    memset(&call, 0, sizeof call);
    for (i = 0; i < N; i++) mask[i] = i != 3;
    call.n_tokens = N;
    call.x = x;
    call.mask = mask;
    call.training = 1;
    (void)mlp_loss(&net, &call, dy, &r);
    CHECK_STATUS(moe_net_backward(&net, dy, NULL, &r.pass), MOE_OK, "backward");
    net_run_end(&r);
    for (i = 0; i < own->count; i++) {
        const moe_real before = own->data[i];
        double up, down;
        own->data[i] = before + (moe_real)step;
        up = mlp_loss(&net, &call, dy, &r);
        net_run_end(&r);
        own->data[i] = before - (moe_real)step;
        down = mlp_loss(&net, &call, dy, &r);
        net_run_end(&r);
        own->data[i] = before;
        CHECK_NEAR(own->gradient[i], (up - down) / (2.0 * step), 1e-7 * (1.0 + fabs((double)own->gradient[i])));
    }
    CHECK(!all_zero(own->gradient, own->count), "the gradient is not 0");
    moe_net_free(&net);
    free(x);
    free(dy);
}

/* AdamW with weight decay on the own parameters alone: they change, the loss falls, all else stays;
   a checkpoint in between changes no bit. */
static void test_custom_training(void) {
    enum { BATCH = 32, STEPS = 40, SAVED = 15 };
    const moe_param_group groups[] = {{"*", 1, 1, 1}, {"*.router.custom", 1, 1, 0}};
    moe_train_config t;
    moe_data data = data_of(BATCH, MLP_D, 2, 12);
    moe_real *before[2];
    moe_net net[2];
    moe_trainer trainer[2];
    moe_step seen, start;
    moe_buffer file;
    moe_stream stream;
    moe_error error;
    int i, step;
    memset(&t, 0, sizeof t);
    memset(&file, 0, sizeof file);
    t.criterion = MOE_CRITERION_SQUARED_ERROR;
    t.rate = (moe_real)0.02;
    t.decay = (moe_real)0.01;
    t.groups = groups;
    t.n_groups = 2;
    for (i = 0; i < 2; i++) {
        if (!mlp_net(&net[i], 7 + (uint64_t)i)) return;
        net[i].modules[1].layer.router.custom = mlp_custom();
        if (!CHECK_STATUS(moe_trainer_init(&trainer[i], &net[i], &t, &error), MOE_OK, error.message)) return;
    }
    before[0] = copy_of(net_tensor(&net[0], "1.router.custom")->data, MLP_PARAMETERS);
    before[1] = copy_of(net_tensor(&net[0], "1.experts.gate")->data, 4 * 5 * MLP_D);
    memset(&start, 0, sizeof start);
    memset(&seen, 0, sizeof seen);
    for (step = 0; step < STEPS; step++) {
        CHECK_STATUS(moe_trainer_step(&trainer[0], &data, &seen, &error), MOE_OK, error.message);
        if (step == 0) start = seen;
        if (step == SAVED) {
            stream = moe_buffer_stream(&file);
            CHECK_STATUS(moe_trainer_write(&trainer[0], &stream, &error), MOE_OK, error.message);
            CHECK_STATUS(moe_trainer_read(&trainer[1], file.data, file.size, &error), MOE_OK, error.message);
        }
        if (step > SAVED) CHECK_STATUS(moe_trainer_step(&trainer[1], &data, NULL, &error), MOE_OK, error.message);
    }
    CHECKF(seen.loss + seen.router_loss < (start.loss + start.router_loss) * (moe_real)0.95, "%g of %g",
           (double)(seen.loss + seen.router_loss), (double)(start.loss + start.router_loss));
    CHECK(!same_reals(before[0], net_tensor(&net[0], "1.router.custom")->data, MLP_PARAMETERS), "they are trained");
    CHECK(same_reals(before[1], net_tensor(&net[0], "1.experts.gate")->data, 4 * 5 * MLP_D), "the rest is frozen");
    CHECK(fingerprint(&net[0]) == fingerprint(&net[1]), "resumed, bit for bit");
    for (i = 0; i < 2; i++) {
        moe_trainer_free(&trainer[i]);
        moe_net_free(&net[i]);
        free(before[i]);
    }
    moe_buffer_free(&file);
    drop_data(&data);
}

static void custom_layer_file(moe_buffer *file, moe_call *call) {
    enum { N = 9 };
    moe_layer_config c = layer_of(mlp_settings);
    moe_layer layer[2];
    run r[2];
    moe_stream stream;
    moe_tensor own[2];
    moe_error error;
    int i;
    c.router.d_model = MLP_D;
    c.kernels = MOE_KERNELS_C;
    if (!make_layer(&layer[0], &c, 1, 9)) return;
    stream = moe_buffer_stream(file);
    CHECK_STATUS(moe_layer_write(&layer[0], &stream, &error), MOE_OK, error.message);
    if (!CHECK_STATUS(moe_layer_read(&layer[1], file->data, file->size, 0, MOE_KERNELS_C, NULL, &error), MOE_OK,
                      error.message))
        return;
    for (i = 0; i < 2; i++) {
        layer[i].router.custom = mlp_custom();
        run_start(&r[i], &layer[i], call);
        CHECK_STATUS(moe_layer_find(&layer[i], "router.custom", &own[i]), MOE_OK, "by name");
    }
    CHECK(own[0].gradient == layer[0].gradients[MOE_ROUTER_CUSTOM] && own[0].gradient != NULL, "with its gradient");
    CHECK(same_reals(own[0].data, own[1].data, MLP_PARAMETERS) && !all_zero(own[0].data, MLP_PARAMETERS), "saved");
    CHECK(r[0].status == MOE_OK && r[1].status == MOE_OK && same_reals(r[0].y, r[1].y, N * MLP_D), "the same bits");
    for (i = 0; i < 2; i++) {
        run_end(&r[i]);
        moe_layer_free(&layer[i]);
    }
    moe_buffer_free(file);
}

/* Through a file: a network, and a layer alone. The functions are set again, or the call says which
   are missing. */
static void test_custom_files(void) {
    enum { N = 9 };
    moe_real *x = normals(N * MLP_D, 1.0, 6);
    moe_net net[2];
    net_run n[2];
    moe_buffer file;
    moe_stream stream;
    moe_call call;
    moe_error error;
    int i;
    memset(&call, 0, sizeof call);
    memset(&file, 0, sizeof file);
    call.n_tokens = N;
    call.x = x;
    if (!mlp_net(&net[0], 8)) return;
    stream = moe_buffer_stream(&file);
    CHECK_STATUS(moe_net_write(&net[0], &stream, &error), MOE_OK, error.message);
    if (!CHECK_STATUS(moe_net_read(&net[1], file.data, file.size, 1, MOE_KERNELS_C, NULL, &error), MOE_OK,
                      error.message))
        return;
    CHECK(fingerprint(&net[0]) == fingerprint(&net[1]), "every tensor");
    CHECK(moe_net_parameter_count(&net[1], NULL) == moe_net_parameter_count(&net[0], NULL), "as many parameters");
    check_named(&net[1], 0, MOE_ERR_ARGUMENT, "module 1 (mixture): router.custom.score is NULL");
    for (i = 0; i < 2; i++) {
        net[i].modules[1].layer.router.custom = mlp_custom();
        net_run_start(&n[i], &net[i], &call);
    }
    CHECK(n[0].status == MOE_OK && n[1].status == MOE_OK, "forward");
    CHECK(same_reals(n[0].pass.y, n[1].pass.y, N * 2), "the same bits");
    for (i = 0; i < 2; i++) {
        net_run_end(&n[i]);
        moe_net_free(&net[i]);
    }
    moe_buffer_free(&file);
    custom_layer_file(&file, &call);
    free(x);
}

/* ---- replay ---- */

static moe_status choose_some(void *ctx, const moe_router *router, const moe_call *call, const moe_real *logits,
                              const moe_real *probabilities, unsigned char *chosen) {
    size_t experts = (size_t)router->config.n_experts, t, e;
    (void)ctx;
    (void)probabilities;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++) chosen[t * experts + e] = logits[t * experts + e] > logits[t * experts];
    return MOE_OK;
}

/* A call of a layer with all that its router may ask for; padding in the mask. */
typedef struct replay_call {
    moe_call call;
    moe_rng rng;
    moe_real *x;
    int32_t *token_ids, *given; /* given [RN,2]: for select = given */
    unsigned char *mask;
} replay_call;

enum { RN = 17, RD = 8, RE = 6 }; /* tokens, width and experts of the replay tests */

static void replay_start(replay_call *c, int masked) {
    size_t t;
    memset(c, 0, sizeof *c);
    c->x = normals(RN * RD, 1.0, 61);
    c->given = (int32_t *)grab(2 * RN, sizeof(int32_t));
    for (t = 0; t < RN; t++) {
        c->given[2 * t] = (int32_t)(t % RE);
        c->given[2 * t + 1] = t % 3 ? (int32_t)((t + 2) % RE) : -1;
    }
    c->token_ids = (int32_t *)grab(RN, sizeof(int32_t));
    c->mask = (unsigned char *)grab(RN, 1);
    for (t = 0; t < RN; t++) {
        c->token_ids[t] = (int32_t)(t % 7);
        c->mask[t] = t % 5 != 2;
    }
    c->call.n_tokens = RN;
    c->call.x = c->x;
    c->call.token_ids = c->token_ids;
    c->call.rng = &c->rng;
    if (masked) c->call.mask = c->mask;
}

static void replay_end(replay_call *c) {
    free(c->x);
    free(c->token_ids);
    free(c->mask);
    free(c->given);
}

/* A run with dx and the gradients of all tensors. */
typedef struct replay_run {
    run r;
    moe_real *dx, *gradients;
    size_t count;
} replay_run;

static void replay_forward(replay_run *r, moe_layer *layer, replay_call *c) {
    moe_real *dy = normals(RN * RD, 1.0, 62);
    memset(r, 0, sizeof *r);
    moe_rng_seed(&c->rng, 9);
    run_start(&r->r, layer, &c->call);
    r->dx = reals(RN * RD);
    zero_gradients(layer);
    if (CHECK_STATUS(r->r.status, MOE_OK, "forward") && c->call.training)
        CHECK_STATUS(moe_layer_backward(layer, dy, r->dx, NULL, &r->r.pass), MOE_OK, "backward");
    r->gradients = gradients_of(layer, &r->count);
    free(dy);
}

static void replay_drop(replay_run *r) {
    run_end(&r->r);
    free(r->dx);
    free(r->gradients);
}

static int32_t *recorded(const moe_routing *routing, int keep_dropped) {
    int32_t *given = (int32_t *)grab(routing->n_tokens * routing->max_choices, sizeof *given);
    CHECK_STATUS(moe_routing_choices(routing, routing->max_choices, keep_dropped, given), MOE_OK, "recorded choices");
    return given;
}

/* Whether the choices of a routing are exactly the experts in given. */
static int chose_given(const moe_routing *r, const int32_t *given, const unsigned char *mask) {
    size_t t, i, k;
    for (t = 0; t < r->n_tokens; t++) {
        size_t count = 0;
        for (i = 0; i < r->max_choices; i++) {
            int found = 0;
            if (given[t * r->max_choices + i] < 0) continue;
            count++;
            for (k = 0; k < (size_t)r->n_choices[t]; k++)
                found |= r->choices[t * r->max_choices + k] == given[t * r->max_choices + i];
            if (!found) return 0;
        }
        if (count != (size_t)r->n_choices[t] || (count > 0 && mask != NULL && !mask[t])) return 0;
    }
    return 1;
}

/* Where a weight is p itself, it follows the new p. */
static void check_raw_weights(const moe_layer *layer, const moe_routing *r) {
    size_t i;
    if (layer->config.router.weight != MOE_WEIGHT_RAW || layer->config.router.scale < 1 ||
        layer->config.router.scale > 1)
        return;
    if (layer->config.router.renormalize != MOE_RENORMALIZE_BEFORE) return;
    for (i = 0; i < RN * RE; i++)
        if (r->selected[i]) CHECK(same_reals(&r->weights[i], &r->probabilities[i], 1), "weights follow the parameters");
}

/* After other parameters the choices are still those on record. */
static void check_changed_parameters(moe_layer *layer, replay_call *c, const moe_routing *before) {
    static const char *const names[] = {"router.weight", "router.codes", "router.mix"};
    moe_real *old = copy_of(before->probabilities, RN * RE);
    size_t i, k, count = 0;
    replay_run r;
    for (i = 0; i < 3; i++) {
        moe_real *w = tensor_of(layer, names[i], &count);
        for (k = 0; w != NULL && k < count; k++) w[k] = w[k] * (moe_real)0.9 + (moe_real)(0.05 * (double)(k % 3));
    }
    replay_forward(&r, layer, c);
    CHECK(chose_given(&r.r.pass.routing, c->call.given, c->call.mask), "recorded choices stay");
    CHECK(!same_reals(old, r.r.pass.routing.probabilities, RN * RE), "p has changed");
    check_raw_weights(layer, &r.r.pass.routing);
    replay_drop(&r);
    free(old);
}

static void check_without_dropped(moe_layer *layer, replay_call *c, const moe_routing *before) {
    int32_t *given = recorded(before, 0);
    unsigned char *selected = (unsigned char *)grab(RN * RE, 1);
    replay_run r;
    memcpy(selected, before->selected, RN * RE);
    c->call.given = given;
    replay_forward(&r, layer, c);
    CHECK(r.r.pass.routing.n_dropped == 0 && same_bits(selected, r.r.pass.routing.selected, RN * RE),
          "without the dropped ones nothing is dropped");
    replay_drop(&r);
    free(given);
    free(selected);
}

static void check_replay(const moe_layer_config *config, double sharp, int training, int masked, const char *what) {
    replay_call c;
    replay_run first, second;
    moe_layer layer;
    int32_t *given;
    size_t i, count = 0;
    moe_real *w;
    if (!make_layer(&layer, config, 1, 71)) return;
    layer.router.custom.select = choose_some;
    w = tensor_of(&layer, "router.weight", &count);
    for (i = 0; w != NULL && i < count; i++) w[i] *= (moe_real)sharp;
    w = tensor_of(&layer, "router.selection_bias", &count);
    for (i = 0; w != NULL && i < count; i++) w[i] = (moe_real)(0.1 * (double)(i % 4));
    w = tensor_of(&layer, "router.step", &count);
    for (i = 0; w != NULL && i < count; i++) w[i] = 5;
    replay_start(&c, masked);
    c.call.training = training;
    if (layer.config.router.select == MOE_SELECT_GIVEN) c.call.given = c.given;
    replay_forward(&first, &layer, &c);
    given = recorded(&first.r.pass.routing, 1);
    c.call.given = given;
    c.call.rng = NULL;
    replay_forward(&second, &layer, &c);
    if (!CHECK(same_routing(&first.r.pass.routing, &second.r.pass.routing), "the same choices and weights"))
        printf("  %s\n", what);
    CHECK(same_reals(first.r.y, second.r.y, RN * RD) && !all_zero(first.r.y, RN * RD), "the same output");
    CHECK(same_reals(first.dx, second.dx, RN * RD) && same_reals(first.gradients, second.gradients, first.count),
          "the same gradients");
    replay_drop(&second);
    check_changed_parameters(&layer, &c, &first.r.pass.routing);
    replay_drop(&first);
    c.call.given = layer.config.router.select == MOE_SELECT_GIVEN ? c.given : NULL;
    c.call.rng = &c.rng;
    free(given);
    replay_forward(&first, &layer, &c); /* once more, to leave out what capacity drops */
    check_without_dropped(&layer, &c, &first.r.pass.routing);
    replay_drop(&first);
    replay_end(&c);
    moe_layer_free(&layer);
}

/* Every selection, in training and outside, masked and not, with a gate that saturates and one that
   does not. */
static void test_replay(void) {
    static const char *const settings[] = {"top_k=3",
                                           "top_k=3 gate=sigmoid",
                                           "top_k=3 gate=sigmoid selection_bias=1 weight=raw",
                                           "select=dense weight=raw",
                                           "select=given top_k=2 weight=raw",
                                           "select=grouped_top_k groups=3 groups_kept=2 top_k=3 gate=sigmoid",
                                           "select=top_p top_p=0.7 weight=raw",
                                           "select=threshold threshold=0.15 weight=raw",
                                           "select=positive gate=relu weight=raw",
                                           "select=expert_choice capacity_factor=2 weight=raw",
                                           "select=affinity affinity_mass=0.6 top_k=1 weight=raw",
                                           "select=hash table_size=7 top_k=2 weight=uniform",
                                           "select=sinkhorn top_k=2 weight=raw",
                                           "select=sample top_k=2 weight=raw",
                                           "select=balanced top_k=1 weight=raw gate=sigmoid",
                                           "select=custom",
                                           "score=dselect gate=identity select=positive",
                                           "top_k=3 drop_capacity=5 weight=raw renormalize=after",
                                           "top_k=2 capacity_factor=1 drop_order=priority weight=raw",
                                           "top_k=3 weight=sparsemixer sparsemixer_eps=0.3",
                                           "top_k=2 k_end=4 schedule_steps=8 weight=raw",
                                           "top_k=3 student=1 loss_distill=1 freeze_at=3 gate=sigmoid weight=raw",
                                           "top_k=2 switch_at=9 switch_from=top_p",
                                           "top_k=2 expert_scale=1 apply_to=input scale=1.5"};
    moe_layer_config c;
    moe_layer layer;
    replay_call call;
    run r;
    int32_t given[RN * RE];
    size_t row;
    int training, masked, sharp;
    for (row = 0; row < sizeof settings / sizeof settings[0]; row++)
        for (training = 0; training < 2; training++)
            for (masked = 0; masked < 2; masked++)
                for (sharp = 0; sharp < 2; sharp++) {
                    char text[300];
                    sprintf(text, "d_model=8 n_experts=6 d_ff=5 loss_z=0.01 loss_importance=0.1 %s", settings[row]);
                    c = layer_of(text);
                    check_replay(&c, sharp ? 60.0 : 1.0, training, masked, settings[row]);
                }
    c = layer_of("d_model=8 n_experts=6 d_ff=5 select=soft");
    if (!make_layer(&layer, &c, 1, 1)) return;
    replay_start(&call, 0);
    run_start(&r, &layer, &call.call);
    CHECK_STATUS(moe_routing_choices(&r.pass.routing, 1, 1, given), MOE_OK, "soft has no choices");
    CHECK(given[0] == -1, "none");
    CHECK_STATUS(moe_routing_choices(NULL, 1, 1, given), MOE_ERR_ARGUMENT, "no routing");
    run_end(&r);
    memset(given, 0, sizeof given);
    call.call.given = given;
    run_start(&r, &layer, &call.call);
    CHECK_STATUS(r.status, MOE_ERR_ARGUMENT, "soft cannot replay");
    run_end(&r);
    replay_end(&call);
    moe_layer_free(&layer);
}

static void replay_parts(moe_net *net, moe_call *call, net_run *first, net_run *second, const moe_routing **routing,
                         int32_t *given, int32_t **part, size_t *sizes) {
    enum { N = 14 };
    const moe_routing *again[2];
    size_t i;
    net_run_start(second, net, call);
    again[0] = moe_net_routing(net, &second->pass, 0);
    again[1] = moe_net_routing(net, &second->pass, 4);
    for (i = 0; i < 2 && second->status == MOE_OK; i++) {
        CHECK(chose_given(again[i], part[i], NULL), "recorded choices stay when the net has learned");
        CHECK(!same_reals(routing[i]->weights, again[i]->weights, N * again[i]->n_experts), "and weights follow");
    }
    net_run_end(second);
    given[sizes[0] + 3] = 5;
    net_run_start(second, net, call);
    CHECK_STATUS(second->status, MOE_ERR_ARGUMENT, "a bad index of the second mixture");
    net_run_end(second);
    net_run_end(first);
    free(given);
    free(part[0]);
    free(part[1]);
}

/* In a network the choices of all mixtures stand one after another; soft ones have none. */
static void test_replay_net(void) {
    enum { N = 14 };
    moe_train_config t = plain_descent(N, 0.1);
    moe_data data = data_of(N, 6, 3, 33);
    moe_net net;
    moe_trainer trainer;
    moe_error error;
    moe_call call;
    net_run first, second;
    const moe_routing *routing[2];
    int32_t *given, *part[2];
    size_t sizes[2], i;
    moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
    add_mixture(&net, "n_experts=4 top_k=2 d_ff=5 gate=sigmoid weight=raw");
    moe_net_residual(&net, 1);
    add_mixture(&net, "n_experts=3 select=soft slots=2 d_ff=5");
    moe_net_layer_norm(&net);
    add_mixture(&net, "n_experts=5 select=top_p top_p=0.5 weight=raw d_ff=5");
    moe_net_linear(&net, 3);
    if (!build(&net, 1, 44)) return;
    memset(&call, 0, sizeof call);
    call.n_tokens = N;
    call.x = data.x;
    call.training = 1;
    net_run_start(&first, &net, &call);
    routing[0] = moe_net_routing(&net, &first.pass, 0);
    routing[1] = moe_net_routing(&net, &first.pass, 4);
    if (!CHECK(routing[0] != NULL && routing[1] != NULL && first.status == MOE_OK, "two routings")) return;
    for (i = 0; i < 2; i++) {
        part[i] = recorded(routing[i], 1);
        sizes[i] = N * routing[i]->max_choices;
    }
    CHECK(sizes[0] == N * 2 && sizes[1] == N * 5, "rows of K, and of E where K is open");
    given = (int32_t *)grab(sizes[0] + sizes[1], sizeof *given);
    memcpy(given, part[0], sizes[0] * sizeof *given);
    memcpy(given + sizes[0], part[1], sizes[1] * sizeof *given);
    call.given = given;
    net_run_start(&second, &net, &call);
    if (CHECK(second.status == MOE_OK, "replay")) {
        CHECK(same_reals(first.pass.y, second.pass.y, N * 3), "the same output, bit for bit");
        CHECK(same_routing(routing[0], moe_net_routing(&net, &second.pass, 0)) &&
                  same_routing(routing[1], moe_net_routing(&net, &second.pass, 4)),
              "the same routings");
    }
    net_run_end(&second);
    CHECK_STATUS(moe_trainer_init(&trainer, &net, &t, &error), MOE_OK, "trainer");
    for (i = 0; i < 20; i++) CHECK_STATUS(moe_trainer_step(&trainer, &data, NULL, &error), MOE_OK, "step");
    replay_parts(&net, &call, &first, &second, routing, given, part, sizes);
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    drop_data(&data);
}

/* ---- distances from a teacher ---- */

static void soft_row(const double *z, size_t n, double *p) {
    double top = z[0], sum = 0.0;
    size_t i;
    for (i = 1; i < n; i++) top = z[i] > top ? z[i] : top;
    for (i = 0; i < n; i++) {
        p[i] = exp(z[i] - top);
        sum += p[i];
    }
    for (i = 0; i < n; i++) p[i] /= sum;
}

/* The distance of one row of logits v from the teacher's and its gradient by v. */
static double distance_row(int kind, const double *v, const double *teacher, size_t n, double *dv) {
    double q[16], p[16], value = 0.0, along = 0.0;
    size_t i, best = 0;
    soft_row(v, n, q);
    soft_row(teacher, n, p);
    for (i = 1; i < n; i++)
        if (teacher[i] > teacher[best]) best = i;
    if (kind == MOE_DISTILL_MSE) {
        for (i = 0; i < n; i++) {
            value += (q[i] - p[i]) * (q[i] - p[i]) / (double)n;
            along += 2.0 / (double)n * (q[i] - p[i]) * q[i];
        }
        for (i = 0; i < n; i++) dv[i] = q[i] * (2.0 / (double)n * (q[i] - p[i]) - along);
        return value;
    }
    for (i = 0; i < n; i++) {
        double wanted = kind == MOE_DISTILL_CE_HARD ? (i == best ? 1.0 : 0.0) : p[i];
        value -= wanted * log(q[i]);
        dv[i] = q[i] - wanted;
    }
    return value;
}

static void test_distill(void) {
    enum { N = 13, D = 5, E = 6 };
    static const char *const kinds[] = {"ce_hard", "ce_soft", "mse"};
    int kind, student, masked;
    for (kind = 0; kind < MOE_DISTILL_COUNT; kind++)
        for (student = 0; student < 2; student++)
            for (masked = 0; masked < 2; masked++) {
                char text[200];
                double value = 0.0, dw[E * D] = {0};
                double dx[N * D] = {0}, share;
                size_t t, e, q;
                const moe_real *w;
                bench b;
                sprintf(text, "d_model=5 n_experts=6 top_k=2 loss_distill=0.75 distill=%s %s", kinds[kind],
                        student ? "student=1 freeze_at=9" : "");
                if (!bench_of(&b, text, N)) return;
                if (masked) bench_mask(&b, 3);
                /* of equal ones the first is the best */
                if (kind == MOE_DISTILL_CE_HARD) b.teacher[2] = b.teacher[4] = 9;
                CHECK_STATUS(bench_route(&b), MOE_OK, "routes");
                CHECK_STATUS(bench_backward(&b, 0.0), MOE_OK, "backward"); /* of the loss alone */
                w = b.tensors[student ? MOE_ROUTER_STUDENT : MOE_ROUTER_WEIGHT];
                share = 0.75 / (double)b.routing.n_real;
                for (t = 0; t < N; t++) {
                    double v[E], teacher[E], dv[E];
                    if (!is_real(&b, t)) continue;
                    for (e = 0; e < E; e++) {
                        for (q = 0, v[e] = 0.0; q < D; q++) v[e] += (double)w[e * D + q] * (double)b.x[t * D + q];
                        teacher[e] = student ? (double)b.routing.logits[t * E + e] : (double)b.teacher[t * E + e];
                    }
                    value += share * distance_row(kind, v, teacher, E, dv);
                    for (e = 0; e < E; e++)
                        for (q = 0; q < D; q++) {
                            dw[e * D + q] += share * dv[e] * (double)b.x[t * D + q];
                            dx[t * D + q] += share * dv[e] * (double)w[e * D + q];
                        }
                }
                NEARLY(b.routing.loss[MOE_LOSS_DISTILL], value, "the distance from the teacher");
                for (e = 0; e < E * D; e++)
                    NEARLY(b.gradients[student ? MOE_ROUTER_STUDENT : MOE_ROUTER_WEIGHT][e], dw[e],
                           "its gradient by the weights");
                for (t = 0; t < N * D; t++) NEARLY(b.dx[t], dx[t], "its gradient by x");
                if (student) CHECK(all_zero(b.gradients[MOE_ROUTER_WEIGHT], E * D), "a teacher gets no gradient");
                b.call.teacher = NULL;
                CHECK_STATUS(bench_route(&b), student ? MOE_OK : MOE_ERR_ARGUMENT, "no teacher");
                b.call.training = 0;
                CHECK_STATUS(bench_route(&b), MOE_OK, "evaluation needs none");
                CHECK(all_zero(&b.routing.loss[MOE_LOSS_DISTILL], 1), "and has no loss");
                bench_close(&b);
            }
}

/* In a network the teachers of all mixtures stand one after another. moe_fit has none to give, and
   says so. */
static void test_distill_net(void) {
    enum { N = 9 };
    moe_data data = data_of(N, 6, 6, 5);
    moe_real *teacher = normals(N * (4 + 5), 1.0, 6);
    moe_net net;
    moe_error error;
    moe_call call, one;
    net_run all;
    run part;
    moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
    add_mixture(&net, "n_experts=4 d_ff=5 loss_z=0.1");
    add_mixture(&net, "n_experts=3 d_ff=5 select=soft");
    add_mixture(&net, "n_experts=5 d_ff=5 loss_distill=0.5 distill=ce_soft");
    if (!build(&net, 1, 3)) return;
    error.message[0] = '\0';
    CHECK_STATUS(moe_fit(&net, &data, NULL, NULL, &error), MOE_ERR_ARGUMENT, "no teacher");
    CHECK(strstr(error.message, "module 2") != NULL && strstr(error.message, "loss_distill") != NULL &&
              strstr(error.message, "teacher") != NULL,
          "by name");
    memset(&call, 0, sizeof call);
    call.n_tokens = N;
    call.x = data.x;
    call.training = 1;
    net_run_start(&all, &net, &call);
    CHECK_STATUS(all.status, MOE_ERR_ARGUMENT, "no teacher");
    net_run_end(&all);
    call.teacher = teacher;
    net_run_start(&all, &net, &call);
    CHECK_STATUS(all.status, MOE_OK, "with a teacher");
    one = call;
    run_start(&part, &net.modules[0].layer, &one);
    {
        run middle, last;
        one.teacher = NULL;
        one.x = part.y;
        run_start(&middle, &net.modules[1].layer, &one);
        one.teacher = teacher + N * 4;
        one.x = middle.y;
        run_start(&last, &net.modules[2].layer, &one);
        CHECK(last.status == MOE_OK &&
                  same_reals(last.pass.routing.loss, moe_net_routing(&net, &all.pass, 2)->loss, MOE_LOSS_COUNT),
              "the rows behind those of the first");
        CHECK(last.pass.routing.loss[MOE_LOSS_DISTILL] > 0, "a loss");
        run_end(&middle);
        run_end(&last);
    }
    run_end(&part);
    net_run_end(&all);
    moe_net_free(&net);
    free(teacher);
    drop_data(&data);
}

/* ---- clusters in networks ---- */

/* What the next mixture reads of a pass, made by hand: surviving choices and their weights; of soft
   the sum over an expert's slots. */
static void previous_of(const run *r, const moe_layer *layer, moe_call *next, int32_t **experts, moe_real **weights) {
    const moe_routing *p = &r->pass.routing;
    size_t e_count = p->n_experts, slots = (size_t)layer->config.router.slots, t, j, k, width;
    int soft = layer->config.router.select == MOE_SELECT_SOFT;
    width = soft ? e_count : p->max_choices;
    *experts = (int32_t *)grab(p->n_tokens * width, sizeof **experts);
    *weights = reals(p->n_tokens * width);
    for (t = 0; t < p->n_tokens; t++)
        for (j = 0; j < width; j++) {
            size_t at = t * width + j;
            (*experts)[at] = -1;
            if (soft && (next->mask == NULL || next->mask[t])) {
                (*experts)[at] = (int32_t)j;
                for (k = 0; k < slots; k++) (*weights)[at] += p->probabilities[t * e_count * slots + j * slots + k];
            } else if (!soft && j < (size_t)p->n_choices[t] && p->kept[at]) {
                (*experts)[at] = p->choices[at];
                (*weights)[at] = p->weights[t * e_count + (size_t)p->choices[at]];
            }
        }
    next->previous_experts = *experts;
    next->previous_weights = *weights;
    next->n_previous = width;
}

static void end_parts(moe_real **entered, int32_t **experts, moe_real **weights, run *part) {
    size_t i;
    for (i = 0; i < 3; i++) {
        run_end(&part[i]);
        free(entered[i]);
    }
    for (i = 0; i < 2; i++) {
        free(experts[i]);
        free(weights[i]);
    }
}

static void two_of_three(const char *const *settings, moe_net *net, moe_net *hand) {
    enum { N = 22, D = 6 };
    size_t i;
    moe_net_init(net, D, MOE_KERNELS_C, NULL);
    moe_net_init(hand, D, MOE_KERNELS_C, NULL);
    for (i = 0; i < 3; i++) {
        add_mixture(net, settings[i]);
        add_mixture(hand, settings[i]);
        if (i < 2) {
            moe_net_residual(net, 1);
            moe_net_residual(hand, 1);
        }
    }
}

/* The network first, residual, second, residual, third against its layers called one by one; the
   second and the third read the one before. */
static void check_clusters(const char *const *settings, int masked, int training, size_t *dropped) {
    enum { N = 22, D = 6 };
    moe_real *x = normals(N * D, 1.0, 51), *entered[3], *sum = reals(N * D);
    unsigned char mask[N];
    int32_t *experts[2] = {NULL, NULL};
    moe_real *weights[2] = {NULL, NULL};
    moe_net net, hand;
    moe_call call, one;
    net_run all;
    run part[3];
    size_t i, t, q;
    memset(part, 0, sizeof part);
    two_of_three(settings, &net, &hand);
    if (!build(&net, training, 8) || !build(&hand, training, 8)) return;
    memset(&call, 0, sizeof call);
    for (t = 0; t < N; t++) mask[t] = t % 4 != 1;
    call.n_tokens = N;
    call.x = x;
    call.training = training;
    call.mask = masked ? mask : NULL;
    net_run_start(&all, &net, &call);
    CHECK_STATUS(all.status, MOE_OK, "the net");
    one = call;
    for (i = 0; i < 3 && all.status == MOE_OK; i++) {
        const moe_layer *layer = &hand.modules[2 * i].layer;
        entered[i] = copy_of(i > 0 ? sum : x, N * D);
        one.x = entered[i];
        if (i > 0) {
            previous_of(&part[i - 1], &hand.modules[2 * i - 2].layer, &one, &experts[i - 1], &weights[i - 1]);
            one.previous_input = entered[i - 1];
        }
        run_start(&part[i], layer, &one);
        if (!CHECK_STATUS(part[i].status, MOE_OK, settings[i])) return;
        for (t = 0; t < N * D; t++) sum[t] = part[i].y[t] + entered[i][t];
        CHECK(same_reals(part[i].pass.routing.weights, moe_net_routing(&net, &all.pass, 2 * i)->weights,
                         N * part[i].pass.routing.n_experts),
              "the routing of the layer alone");
        for (t = 0; t < N && i > 0; t++) {
            int left = 0;
            for (q = 0; q < one.n_previous; q++) left |= experts[i - 1][t * one.n_previous + q] >= 0;
            if (left || (masked && !mask[t])) continue;
            *dropped += 1;
            CHECK(same_reals(part[i].pass.routing.u + t * D, entered[i] + t * D, D),
                  "a token without an expert before has M = 1");
        }
        if (training) CHECK_STATUS(moe_layer_observe(&hand.modules[2 * i].layer, &part[i].pass), MOE_OK, "observe");
    }
    CHECK(same_reals(all.pass.y, part[2].y, N * D) && !all_zero(part[2].y, N * D),
          "the output of the layers one by one, bit for bit");
    if (training) CHECK_STATUS(moe_net_observe(&net, &all.pass), MOE_OK, "observe");
    CHECK(fingerprint(&net) == fingerprint(&hand), "the same state");
    end_parts(entered, experts, weights, part);
    net_run_end(&all);
    moe_net_free(&net);
    moe_net_free(&hand);
    free(x);
    free(sum);
}

static void test_clusters_in_nets(void) {
    static const char *const rows[][3] = {
        {"n_experts=4 top_k=2 d_ff=5", "n_experts=4 input=adaptive_clustering d_ff=5",
         "n_experts=4 input=adaptive_clustering ac_mix=2 d_ff=5"},
        {"n_experts=4 top_k=2 d_ff=5", "n_experts=4 input=adaptive_clustering ac_mode=code d_ff=5",
         "n_experts=4 input=adaptive_clustering ac_mode=random d_ff=5"},
        {"n_experts=4 top_k=2 d_ff=5", "n_experts=4 input=adaptive_clustering ac_mode=running d_ff=5",
         "n_experts=5 input=adaptive_clustering ac_mode=running ac_mix=2 d_ff=5"},
        {"n_experts=4 top_k=1 weight=raw drop_capacity=3 d_ff=5",
         "n_experts=4 input=adaptive_clustering top_k=1 weight=raw drop_capacity=4 d_ff=5",
         "n_experts=4 input=adaptive_clustering ac_spread=variance d_ff=5"},
        {"n_experts=4 top_k=3 drop_capacity=2 d_ff=5",
         "n_experts=6 input=adaptive_clustering ac_mix=2 drop_capacity=3 renormalize=after d_ff=5",
         "n_experts=6 input=adaptive_clustering ac_spread=pairwise ac_lambda=0.5 d_ff=5"},
        {"n_experts=3 select=soft slots=2 soft_normalise=1 d_ff=5",
         "n_experts=4 input=adaptive_clustering ac_mix=2 d_ff=5", "n_experts=4 input=adaptive_clustering d_ff=5"},
        {"n_experts=4 top_k=2 d_ff=5", "n_experts=4 input=adaptive_clustering select=soft slots=3 d_ff=5",
         "n_experts=4 input=adaptive_clustering ac_mix=3 d_ff=5"},
        {"n_experts=2 select=positive gate=relu weight=raw d_ff=5",
         "n_experts=5 input=adaptive_clustering select=top_p weight=raw d_ff=5",
         "n_experts=7 input=adaptive_clustering ac_mix=2 d_ff=5"},
        {"n_experts=4 select=expert_choice weight=raw d_ff=5",
         "n_experts=4 input=adaptive_clustering select=threshold threshold=0.3 threshold_fallback=never d_ff=5",
         "n_experts=4 input=adaptive_clustering score=cosine cosine_keep_length=1 ac_mode=code d_ff=5"}};
    size_t row, dropped = 0;
    int masked, training;
    for (row = 0; row < sizeof rows / sizeof rows[0]; row++)
        for (masked = 0; masked < 2; masked++)
            for (training = 0; training < 2; training++) check_clusters(rows[row], masked, training, &dropped);
    CHECK(dropped > 50, "tokens without an expert were met");
}

static void expect_mixture_refused(const char *first, int width, const char *second, const char *one, const char *two) {
    moe_layer_config c = layer_of(second);
    moe_net net;
    size_t modules;
    moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
    if (first != NULL) add_mixture(&net, first);
    if (width > 0) moe_net_linear(&net, width);
    modules = net.n_modules;
    CHECK_STATUS(moe_net_mixture(&net, &c), MOE_ERR_CONFIG, second);
    if (!CHECK(strstr(net.error.message, one) != NULL && strstr(net.error.message, two) != NULL,
               "the message names module and reason"))
        printf("  %s\n", net.error.message);
    CHECK(net.n_modules == modules, "nothing was added");
    moe_net_free(&net);
}

static void test_clusters_refused(void) {
    static const char *const widths[] = {"paper", "running", "code", "random"};
    size_t i;
    expect_mixture_refused(NULL, 0, "input=adaptive_clustering", "module 0 (mixture)", "first MoE layer");
    expect_mixture_refused(NULL, 6, "input=adaptive_clustering", "module 1 (mixture)", "first MoE layer");
    expect_mixture_refused("n_experts=5", 0, "input=adaptive_clustering n_experts=4", "module 1 (mixture)",
                           "n_experts = 4");
    expect_mixture_refused("n_experts=5", 6, "input=adaptive_clustering n_experts=4", "module 2 (mixture)", "module 0");
    expect_mixture_refused("n_experts=5", 0, "router_residual=1 n_experts=4", "n_experts = 4", "module 0");
    expect_mixture_refused("n_experts=5", 0, "router_residual=1 n_experts=6", "n_experts = 6", "router_residual = 1");
    expect_mixture_refused("select=soft", 0, "router_residual=1", "router_residual = 1", "select = soft");
    for (i = 0; i < 4; i++) {
        char text[100];
        moe_layer_config c;
        moe_net net;
        sprintf(text, "n_experts=4 input=adaptive_clustering ac_mode=%s", widths[i]);
        if (i < 2) {
            expect_mixture_refused("n_experts=4", 5, text, "module 2 (mixture)", widths[i]);
            continue;
        }
        c = layer_of(text);
        moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
        add_mixture(&net, "n_experts=4");
        moe_net_linear(&net, 5);
        CHECK_STATUS(moe_net_mixture(&net, &c), MOE_OK, "this mode does not read the previous x");
        moe_net_free(&net);
    }
}

/* A network of seven methods, layer by layer, learns. */
static void test_mixed_presets(void) {
    enum { ROWS = 96, BATCH = 24, D = 12 };
    static const char *const names[] = {"smoe", "smoe", "acmoe", "aoe", "soft_moe", "expert_choice", "deepseek_v3"};
    moe_train_config t;
    moe_data data = data_of(ROWS, D, 2, 71);
    moe_evaluation before, after;
    moe_net net;
    moe_error error;
    size_t i;
    memset(&t, 0, sizeof t);
    t.criterion = MOE_CRITERION_SQUARED_ERROR;
    t.batch = BATCH;
    t.epochs = 25;
    t.rate = (moe_real)0.003;
    t.clip = 1;
    t.seed = 2;
    error.message[0] = '\0';
    moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        moe_layer_config c;
        CHECK_STATUS(moe_layer_preset(names[i], &c, &error), MOE_OK, names[i]);
        c.router.n_experts = 8;
        c.d_ff = 10;
        if (c.router.select == MOE_SELECT_GROUPED_TOP_K) {
            c.router.groups = 4;
            c.router.groups_kept = 2;
            c.router.top_k = 3;
        }
        moe_net_layer_norm(&net);
        if (moe_net_mixture(&net, &c) != MOE_OK) CHECK(0, net.error.message);
        moe_net_residual(&net, 2);
    }
    moe_net_layer_norm(&net);
    moe_net_linear(&net, 2);
    if (!build(&net, 1, 6)) return;
    CHECK_STATUS(moe_evaluate(&net, &data, t.criterion, &before, &error), MOE_OK, "evaluate");
    if (!CHECK_STATUS(moe_fit(&net, &data, NULL, &t, &error), MOE_OK, "fit")) printf("  %s\n", error.message);
    CHECK_STATUS(moe_evaluate(&net, &data, t.criterion, &after, &error), MOE_OK, "evaluate");
    if (!CHECK(after.loss < (moe_real)0.5 * before.loss, "the loss of the mixed net falls"))
        printf("  %g to %g\n", (double)before.loss, (double)after.loss);
    CHECK(!all_zero(net_tensor(&net, "19.router.selection_bias")->data, 8), "the bias of the last mixture has moved");
    moe_net_free(&net);
    drop_data(&data);
}

/* ---- decoding: a token alone, in the batch, in two calls ---- */

enum { TN = 24, TD = 16, TH = 2, TJ = 2 }; /* tokens, width, attention heads, previous experts */

/* All that the routers of presets may read of one sequence. */
typedef struct text {
    moe_real *x, *previous_input, *previous_weights, *attention, *outputs, *output;
    int32_t *token_ids, *previous_experts;
} text;

/* Tokens that lean to one side, so that some experts are wanted by many. */
static void text_start(text *s, uint64_t seed) {
    moe_real *side = normals(TD, 1.0, seed + 1);
    moe_rng own;
    size_t i, j, h;
    s->x = normals(TN * TD, 1.0, seed);
    s->previous_input = normals(TN * TD, 1.0, seed + 2);
    s->previous_weights = normals(TN * TJ, 1.0, seed + 3);
    s->attention = reals(TH * TN * TN);
    s->outputs = normals(TH * TN * TD, 1.0, seed + 5);
    s->output = normals(TN * TD, 1.0, seed + 6);
    s->token_ids = (int32_t *)grab(TN, sizeof(int32_t));
    s->previous_experts = (int32_t *)grab(TN * TJ, sizeof(int32_t));
    for (i = 0; i < TN * TD; i++) s->x[i] += (moe_real)0.7 * side[i % TD];
    moe_rng_seed(&own, seed + 7);
    for (i = 0; i < TN; i++) {
        s->token_ids[i] = (int32_t)moe_rng_below(&own, 11);
        for (j = 0; j < TJ; j++) {
            s->previous_experts[i * TJ + j] = (int32_t)moe_rng_below(&own, 8);
            s->previous_weights[i * TJ + j] = (moe_real)(0.05 + fabs((double)s->previous_weights[i * TJ + j]));
        }
    }
    for (h = 0; h < TH; h++) /* causal attention: no token sees later ones */
        for (i = 0; i < TN; i++) {
            double sum = 0.0;
            for (j = 0; j <= i; j++) {
                s->attention[(h * TN + i) * TN + j] = (moe_real)(0.1 + (double)moe_rng_uniform(&own));
                sum += (double)s->attention[(h * TN + i) * TN + j];
            }
            for (j = 0; j <= i; j++) s->attention[(h * TN + i) * TN + j] /= (moe_real)sum;
        }
    free(side);
}

static void text_end(text *s) {
    free(s->x);
    free(s->previous_input);
    free(s->previous_weights);
    free(s->attention);
    free(s->outputs);
    free(s->output);
    free(s->token_ids);
    free(s->previous_experts);
}

/* Another token at place t: everything that belongs to it. */
static void text_change(text *s, size_t t, uint64_t seed) {
    text other;
    size_t h;
    text_start(&other, seed);
    memcpy(s->x + t * TD, other.x + t * TD, TD * sizeof(moe_real));
    memcpy(s->previous_input + t * TD, other.previous_input + t * TD, TD * sizeof(moe_real));
    memcpy(s->previous_weights + t * TJ, other.previous_weights + t * TJ, TJ * sizeof(moe_real));
    memcpy(s->previous_experts + t * TJ, other.previous_experts + t * TJ, TJ * sizeof(int32_t));
    memcpy(s->output + t * TD, other.output + t * TD, TD * sizeof(moe_real));
    for (h = 0; h < TH; h++) {
        memcpy(s->attention + (h * TN + t) * TN, other.attention + (h * TN + t) * TN, TN * sizeof(moe_real));
        memcpy(s->outputs + (h * TN + t) * TD, other.outputs + (h * TN + t) * TD, TD * sizeof(moe_real));
    }
    s->token_ids[t] = (s->token_ids[t] + 1) % 11;
    text_end(&other);
}

/* Tokens from .. to-1 of the sequence in a call of their own. Attention matrices belong to whole
   sequences only. */
static moe_call text_part(const text *s, size_t from, size_t to, int decoding) {
    moe_call call;
    memset(&call, 0, sizeof call);
    call.n_tokens = to - from;
    call.x = s->x + from * TD;
    call.token_ids = s->token_ids + from;
    call.decoding = decoding;
    call.previous_input = s->previous_input + from * TD;
    call.previous_experts = s->previous_experts + from * TJ;
    call.previous_weights = s->previous_weights + from * TJ;
    call.n_previous = TJ;
    if (from == 0 && to == TN) {
        call.attention_weights = s->attention;
        call.attention_outputs = s->outputs;
        call.attention_output = s->output;
    }
    return call;
}

/* Logits, weights, choices and output of token a of one run and token b of another. */
static int same_token(const run *one, size_t a, const run *two, size_t b) {
    const moe_routing *r = &one->pass.routing, *s = &two->pass.routing;
    size_t experts = r->n_experts, columns = r->plan.rows > 0 ? r->max_choices : experts;
    return same_reals(r->logits + a * columns, s->logits + b * columns, columns) &&
           same_reals(r->weights + a * experts, s->weights + b * experts, experts) &&
           r->n_choices[a] == s->n_choices[b] &&
           same_bits(r->choices + a * r->max_choices, s->choices + b * s->max_choices,
                     (size_t)r->n_choices[a] * sizeof(int32_t)) &&
           same_reals(one->y + a * TD, two->y + b * TD, TD);
}

/* Changing token `last` changes no token before it. */
static int ahead_is_unseen(const moe_layer *layer, uint64_t seed, size_t last) {
    text s;
    moe_call call;
    run before, after;
    size_t t;
    int same = 1, own;
    text_start(&s, seed);
    call = text_part(&s, 0, TN, layer->config.router.predictor);
    run_start(&before, layer, &call);
    text_change(&s, last, seed + 100);
    run_start(&after, layer, &call);
    CHECK(before.status == MOE_OK && after.status == MOE_OK, "whole sequences");
    for (t = 0; t < last && before.status == MOE_OK && after.status == MOE_OK; t++)
        same &= same_token(&before, t, &after, t);
    /* y alone may be the same: 0 if capacity drops both */
    own = before.status == MOE_OK && after.status == MOE_OK && same_token(&before, last, &after, last);
    CHECK(!own, "the changed token itself is another");
    run_end(&before);
    run_end(&after);
    text_end(&s);
    return same;
}

/* Whether every token alone is what it is among the others; with a predictor among others that it
   chooses from. */
static int alone_is_the_same(const moe_layer *layer, uint64_t seed, int decoding) {
    text s;
    moe_call call;
    run whole, one;
    size_t t;
    int same = 1;
    text_start(&s, seed);
    call = text_part(&s, 0, TN, layer->config.router.predictor);
    run_start(&whole, layer, &call);
    for (t = 0; t < TN; t++) {
        call = text_part(&s, t, t + 1, decoding);
        run_start(&one, layer, &call);
        same &= one.status == MOE_OK && whole.status == MOE_OK && same_token(&whole, t, &one, 0);
        run_end(&one);
    }
    run_end(&whole);
    text_end(&s);
    return same;
}

/* In two calls, cut anywhere, the tokens are what they are in one. */
static void check_splits(const moe_layer *layer, uint64_t seed, const char *what) {
    text s;
    moe_call call;
    run whole, head, tail;
    size_t cut, t;
    int same = 1;
    text_start(&s, seed);
    call = text_part(&s, 0, TN, layer->config.router.predictor);
    run_start(&whole, layer, &call);
    for (cut = 0; cut <= TN; cut++) {
        call = text_part(&s, 0, cut, layer->config.router.predictor);
        run_start(&head, layer, &call);
        call = text_part(&s, cut, TN, 1);
        run_start(&tail, layer, &call);
        if (CHECK_STATUS(head.status, MOE_OK, what) && CHECK_STATUS(tail.status, MOE_OK, what))
            for (t = 0; t < TN; t++)
                same &= t < cut ? same_token(&whole, t, &head, t) : same_token(&whole, t, &tail, t - cut);
        run_end(&head);
        run_end(&tail);
    }
    CHECK(same, what);
    run_end(&whole);
    text_end(&s);
}

/* A trained look: state that is not at its start. */
static void stir_state(moe_layer *layer, double step) {
    static const char *const names[] = {"router.selection_bias", "router.ac_running", "router.step"};
    size_t i, k, count = 0;
    for (i = 0; i < 3; i++) {
        moe_real *v = tensor_of(layer, names[i], &count), *draws = normals(v != NULL ? count : 0, 0.3, 12);
        for (k = 0; v != NULL && k < count; k++)
            v[k] = i == 0 ? draws[k] : i == 1 ? (moe_real)(0.5 + fabs((double)draws[k])) : (moe_real)step;
        free(draws);
    }
}

/* Sizes for a test; what belongs to the method stays. */
static void shrink(moe_layer_config *c) {
    c->router.d_model = TD;
    c->d_ff = 8;
    if (c->router.n_experts == 0 || c->router.n_experts > 8) c->router.n_experts = 8;
    TEST_FEWER_EXPERTS(c->router);
    if (c->router.top_k > 3) c->router.top_k = 3;
    if (c->router.select == MOE_SELECT_GROUPED_TOP_K) {
        c->router.groups = 4;
        c->router.groups_kept = 2;
    }
    if (c->router.select == MOE_SELECT_HASH || c->router.student_dim > 0) c->router.table_size = 11;
    if (c->router.refine == MOE_REFINE_ATTENTION) c->router.heads = TH;
    if (c->router.switch_share > 0) c->router.schedule_steps = 10;
}

static void check_decodes(const moe_layer_config *c, const char *name) {
    moe_layer layer;
    uint64_t seed;
    int late;
    for (late = 0; late < 2; late++) {
        if (!make_layer(&layer, c, 0, 41)) return;
        stir_state(&layer, late ? 1e6 : 0.0);
        for (seed = 1; seed < 4; seed++) {
            if (!CHECK(ahead_is_unseen(&layer, seed * 1000, TN - 1) && ahead_is_unseen(&layer, seed * 1000, TN / 2),
                       "a later token changes nothing before it"))
                printf("  %s\n", name);
            if (c->router.refine != MOE_REFINE_NONE) continue; /* reads the tokens before it: whole sequences only */
            if (!CHECK(alone_is_the_same(&layer, seed * 1000, 1), "a token alone is the same")) printf("  %s\n", name);
            if (seed == 1) check_splits(&layer, seed * 1000, name);
        }
        moe_layer_free(&layer);
    }
}

/* Does what the message advises; 0 when it advises nothing that is known here. */
static int follow_advice(moe_router_config *c, const char *message) {
    double whole = (double)c->n_experts / (double)(c->top_k > 0 ? c->top_k : 2);
    if (strncmp(message, "select = ", 9) == 0 && strstr(message, "select = top_k") != NULL) {
        c->select = MOE_SELECT_TOP_K;
        c->slots = c->soft_normalise = 0;
        if (c->switch_share > 0 && c->switch_from == MOE_SELECT_TOP_K) c->schedule_steps = 0; /* nothing follows it */
        return 1;
    }
    if (strncmp(message, "switch_from = ", 14) == 0 && strstr(message, "switch_from = top_k") != NULL) {
        c->switch_from = MOE_SELECT_TOP_K;
        return 1;
    }
    if (strncmp(message, "ac_mode = ", 10) == 0 && strstr(message, "ac_mode = running") != NULL) {
        c->ac_mode = MOE_AC_RUNNING;
        return 1;
    }
    if (strncmp(message, "attention_heads = ", 18) == 0 &&
        strstr(message, "attention_heads = fixed with causal = 1") != NULL) {
        c->attention_heads = MOE_HEADS_FIXED;
        c->causal = 1;
        return 1;
    }
    if (strncmp(message, "refine = ", 9) == 0 && strstr(message, "causal = 1") != NULL) {
        c->causal = 1;
        return 1;
    }
    if (strncmp(message, "custom_batch = ", 15) == 0 && strstr(message, "custom_batch = 0") != NULL) {
        c->custom_batch = 0;
        return 1;
    }
    if (strncmp(message, "k_end = ", 8) == 0 && strstr(message, "capacity_factor_eval = n_experts / k_end") != NULL) {
        c->capacity_factor_eval = (moe_real)((double)c->n_experts / (double)c->k_end);
        return 1;
    }
    if (strstr(message, "capacity_factor_eval = (zero_tau R + Z) / (top_k min(1, zero_tau))") != NULL) {
        const double zero = c->n_zero + c->n_copy + c->n_constant, tau = (double)c->zero_tau;
        const double top_k = c->top_k > 0 ? c->top_k : 2;
        c->capacity_factor_eval = (moe_real)((tau * (c->n_experts - zero) + zero) / (top_k * (tau < 1 ? tau : 1)));
        return 1;
    }
    if (strstr(message, "capacity_factor_eval = n_experts / top_k") == NULL) return 0;
    c->capacity_factor_eval = (moe_real)whole;
    if (strncmp(message, "drop_capacity = ", 16) == 0) c->drop_capacity = 0;
    return strncmp(message, "drop_capacity = ", 16) == 0 || strncmp(message, "capacity_factor_eval = ", 23) == 0 ||
           strncmp(message, "capacity_bound = ", 17) == 0;
}

/* Follows the advice of the messages until the router decodes: one obstacle after another, each
   named with its trait and its mode. */
static int advise(moe_router_config *c, const char *name) {
    moe_error error;
    int rounds;
    for (rounds = 0; rounds < 4; rounds++) {
        error.message[0] = '\0';
        error.code = MOE_OK;
        if (moe_router_check_decoding(c, &error) == MOE_OK) return rounds;
        CHECK(error.code == MOE_ERR_UNSUPPORTED && strstr(error.message, "has the trait needs_batch") != NULL &&
                  strstr(error.message, "decode") != NULL,
              "the message names the trait");
        CHECK(strlen(error.message) + strlen("module 4095 (mixture): ") < sizeof error.message, "nothing is cut off");
        if (!CHECK(follow_advice(c, error.message), "and a mode that works")) {
            printf("  %s: %s\n", name, error.message);
            return rounds;
        }
    }
    CHECK(0, "the advice leads to a router that decodes");
    return rounds;
}

/* A refused router really reads other tokens: 2, a later one is seen; 1, a token needs its batch; 0
   neither. */
static int leak_of(const moe_layer_config *c) {
    moe_layer layer;
    uint64_t seed;
    int found = 0;
    if (!make_layer(&layer, c, 0, 41)) return 0;
    stir_state(&layer, c->router.switch_share > 0 ? 1e6 : 0.0);
    for (seed = 1; seed < 40 && found < 2; seed++) {
        if (!ahead_is_unseen(&layer, seed * 1000, TN - 1)) found = 2;
        else if (found == 0 && !alone_is_the_same(&layer, seed * 1000, 0)) found = 1;
    }
    moe_layer_free(&layer);
    return found;
}

static void check_refused(const moe_layer_config *c, const char *name) {
    moe_layer layer;
    moe_layer_config better = *c;
    moe_call call;
    text s;
    run r;
    if (!make_layer(&layer, c, 0, 41)) return;
    text_start(&s, 3);
    call = text_part(&s, 0, TN, 1);
    run_start(&r, &layer, &call);
    CHECK_STATUS(r.status, MOE_ERR_UNSUPPORTED, "a call that decodes is refused as well");
    run_end(&r);
    text_end(&s);
    moe_layer_free(&layer);
    CHECK((moe_router_traits(&c->router) & (unsigned)MOE_TRAIT_NEEDS_BATCH) != 0, "the traits say so too");
    CHECK(advise(&better.router, name) > 0, "there is advice");
    check_decodes(&better, name);
}

static void test_decoding_presets(void) {
    const moe_preset *preset;
    char leaking[2000] = "", needing[2000] = "";
    int accepted = 0, refused = 0, leak;
    for (preset = moe_presets(); preset->name != NULL; preset++) {
        moe_layer_config c;
        moe_error error;
        CHECK_STATUS(moe_layer_preset(preset->name, &c, &error), MOE_OK, preset->name);
        shrink(&c);
        if (moe_router_check_decoding(&c.router, NULL) == MOE_OK) {
            accepted++;
            check_decodes(&c, preset->name);
            continue;
        }
        refused++;
        check_refused(&c, preset->name);
        leak = leak_of(&c);
        if (!CHECK(leak > 0, "a refused preset really reads other tokens")) printf("  %s\n", preset->name);
        if (leak == 2) strcat(strcat(leaking, " "), preset->name);
        if (leak == 1) strcat(strcat(needing, " "), preset->name);
    }
    CHECK(accepted > 30 && refused > 15, "presets of both kinds");
    printf("note: leaking presets:%s; in need of their batch:%s\n", leaking, needing[0] != '\0' ? needing : " none");
}

static void decoding_weights(void) {
    moe_router_config c;
    moe_error error;
    int experts, k, n;
    CHECK(moe_router_check_decoding(NULL, &error) == MOE_ERR_ARGUMENT, "no configuration");
    c = config_of("d_model=8 top_k=20");
    CHECK(moe_router_check_decoding(&c, &error) == MOE_ERR_CONFIG, "a bad configuration");
    for (experts = 1; experts <= 40; experts++) /* n_experts / top_k drops nothing, however it was rounded */
        for (k = 1; k <= experts; k++) {
            bench b;
            c = config_of("d_model=1");
            c.n_experts = experts;
            c.top_k = k;
            c.capacity_factor_eval = (moe_real)((double)experts / (double)k);
            CHECK_STATUS(moe_router_check_decoding(&c, &error), MOE_OK, "a quotient that is rounded");
            for (n = 1; n < 60; n += 17) {
                if (!bench_open(&b, &c, (size_t)n)) return;
                b.call.training = 0;
                b.call.decoding = 1;
                CHECK_STATUS(bench_route(&b), MOE_OK, "decodes");
                CHECK(b.routing.n_dropped == 0 && b.routing.capacity == (size_t)n, "nothing is dropped");
                bench_close(&b);
            }
        }
    {
        bench b;
        if (!bench_of(&b, "d_model=8", 3)) return;
        b.call.decoding = 1;
        CHECK_STATUS(bench_route(&b), MOE_ERR_UNSUPPORTED, "decoding is no training");
        bench_close(&b);
    }
}

/* What keeps from decoding, and what does not. */
static void test_decoding_rules(void) {
    static const struct {
        const char *settings, *field; /* NULL: decodes */
    } rows[] = {{"", NULL},
                {"select=balanced top_k=1", NULL},
                {"select=sinkhorn", NULL},
                {"select=sample", NULL},
                {"select=custom", NULL},
                {"score=custom custom_batch=1", "custom_batch = 1"},
                {"select=expert_choice", "select = expert_choice"},
                {"select=affinity", "select = affinity"},
                {"select=soft", "select = soft"},
                {"switch_at=9 switch_from=affinity", "switch_from = affinity"},
                {"switch_at=9 switch_from=balanced top_k=1", NULL},
                {"select=affinity switch_at=9", "select = affinity"},
                {"select=expert_choice predictor=1 loss_predictor=1 switch_at=9 capacity_factor=0.5",
                 "capacity_factor_eval = 0.5"},
                {"drop_capacity=3", "drop_capacity = 3"},
                {"capacity_factor=1", "capacity_factor_eval = 1"},
                {"capacity_factor=1 capacity_factor_eval=4", NULL},
                {"capacity_factor_eval=1", "capacity_factor_eval = 1"},
                {"capacity_factor=1 capacity_factor_eval=2 top_k=4 k_end=1 schedule_steps=9", "k_end = 1"},
                {"capacity_factor=1 capacity_factor_eval=8 top_k=4 k_end=1 schedule_steps=9", NULL},
                {"capacity_bound=first", "capacity_bound = first"},
                {"capacity_bound=every capacity_factor_eval=4", NULL},
                {"refine=similarity", "refine = similarity"},
                {"refine=similarity causal=1", NULL},
                {"refine=attention causal=1", "attention_heads = min_entropy"},
                {"refine=attention causal=1 attention_heads=all", NULL},
                {"refine=attention attention_heads=fixed", "refine = attention"},
                {"input=adaptive_clustering", "ac_mode = paper"},
                {"input=adaptive_clustering ac_mode=code", "ac_mode = code"},
                {"input=adaptive_clustering ac_mode=running", NULL},
                {"input=adaptive_clustering ac_mode=random", NULL},
                {"noise=gaussian drop_rule=st_moe", NULL}};
    moe_router_config c;
    moe_error error;
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char settings[200];
        moe_status status;
        sprintf(settings, "d_model=8 n_experts=8 %s", rows[i].settings);
        c = config_of(settings);
        error.message[0] = '\0';
        status = moe_router_check_decoding(&c, &error);
        if (!CHECK(status == (rows[i].field != NULL ? MOE_ERR_UNSUPPORTED : MOE_OK), settings))
            printf("  %s\n", error.message);
        if (rows[i].field == NULL) continue;
        if (!CHECK(strncmp(error.message, rows[i].field, strlen(rows[i].field)) == 0,
                   "the field and its value come first"))
            printf("  %s\n", error.message);
        CHECK(advise(&c, settings) > 0, "there is advice");
        CHECK(moe_router_check_decoding(&c, NULL) == MOE_OK, "error may be NULL");
    }
    decoding_weights();
}

static void test_decoding_nets(void) {
    moe_net net;
    moe_error error;
    moe_call call;
    net_run whole, one;
    moe_real *x = normals(9 * 6, 1.0, 4);
    size_t t;
    moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
    add_mixture(&net, "n_experts=4 d_ff=5");
    moe_net_residual(&net, 1);
    add_mixture(&net, "n_experts=4 d_ff=5 input=adaptive_clustering ac_mode=running ac_mix=2");
    if (!build(&net, 0, 4)) return;
    for (t = 0; t < 24; t++) net_tensor(&net, "2.router.ac_running")->data[t] = (moe_real)(0.5 + 0.1 * (double)t);
    CHECK_STATUS(moe_net_decode_size(&net, 1, 1, NULL, NULL, &error), MOE_OK, "a net that decodes");
    CHECK_STATUS(moe_net_decode_size(NULL, 1, 1, NULL, NULL, &error), MOE_ERR_ARGUMENT, "no net");
    memset(&call, 0, sizeof call);
    call.n_tokens = 9;
    call.x = x;
    net_run_start(&whole, &net, &call);
    for (t = 0; t < 9; t++) {
        call.n_tokens = 1;
        call.x = x + t * 6;
        call.decoding = 1;
        net_run_start(&one, &net, &call);
        CHECK(whole.status == MOE_OK && one.status == MOE_OK && same_reals(one.pass.y, whole.pass.y + t * 6, 6),
              "token by token through a net");
        net_run_end(&one);
    }
    net_run_end(&whole);
    moe_net_free(&net);
    moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
    add_mixture(&net, "n_experts=4 d_ff=5");
    add_mixture(&net, "n_experts=4 d_ff=5 input=adaptive_clustering");
    if (!build(&net, 0, 4)) return;
    CHECK_STATUS(moe_net_decode_size(&net, 1, 1, NULL, NULL, &error), MOE_ERR_UNSUPPORTED, "a net that does not");
    CHECK(strstr(error.message, "module 1 (mixture)") != NULL && strstr(error.message, "ac_mode = paper") != NULL &&
              strstr(error.message, "needs_batch") != NULL,
          "by name");
    net_run_start(&one, &net, &call);
    CHECK_STATUS(one.status, MOE_ERR_UNSUPPORTED, "nor does its call");
    net_run_end(&one);
    moe_net_free(&net);
    free(x);
}

/* ---- instability between layers ---- */

static void count_pairs(size_t n, const int32_t *first, const int32_t *second, const unsigned char *mask,
                        double *instability, double *q1, double *q2) {
    double pairs = 0.0;
    size_t t, u;
    *instability = *q1 = *q2 = 0.0;
    for (t = 0; t < n; t++)
        for (u = 0; u < t; u++) {
            int one = first[t] >= 0 && first[t] == first[u], two = second[t] >= 0 && second[t] == second[u];
            if (mask != NULL && (!mask[t] || !mask[u])) continue;
            pairs += 1.0;
            *q1 += one;
            *q2 += two;
            *instability += one != two;
        }
    if (pairs > 0.0) {
        *q1 /= pairs;
        *q2 /= pairs;
        *instability /= pairs;
    }
}

static void close_to(double got, double want, const char *what) {
    if (!CHECK(fabs(got - want) <= 1e-12 * (1.0 + fabs(want)), what)) printf("  got %.17g, wanted %.17g\n", got, want);
}

static void instability_by_chance(int32_t *first, int32_t *second, double *scratch, moe_instability_report *before) {
    enum { MOST = 60 };
    int32_t shuffled[MOST];
    double instability, q1, q2;
    int trial;
    size_t t;
    for (trial = 0; trial < 4; trial++) { /* chance: the mean over all ways to shuffle the tokens of one layer */
        enum { SHUFFLES = 3000 };
        double sum = 0.0, squares = 0.0, mean, error;
        int round;
        for (t = 0; t < MOST; t++) {
            first[t] = below(4 + trial) - (trial > 1);
            second[t] = trial % 2 ? first[t] : below(5) - 1;
        }
        for (t = 0; t < MOST; t++) {
            first[t] = first[t] < 4 ? first[t] : 0;
            second[t] = second[t] < 5 ? second[t] : 0;
        }
        CHECK_STATUS(moe_instability(MOST, first, 4, second, 5, NULL, scratch, before), MOE_OK, "instability");
        memcpy(shuffled, second, sizeof shuffled);
        for (round = 0; round < SHUFFLES; round++) {
            for (t = MOST; t > 1; t--) {
                size_t other = (size_t)below((int)t);
                int32_t kept = shuffled[t - 1];
                shuffled[t - 1] = shuffled[other];
                shuffled[other] = kept;
            }
            count_pairs(MOST, first, shuffled, NULL, &instability, &q1, &q2);
            sum += instability;
            squares += instability * instability;
        }
        mean = sum / SHUFFLES;
        error = sqrt((squares / SHUFFLES - mean * mean) / SHUFFLES);
        if (!CHECK(fabs(mean - before->chance) <= 4.0 * error + 1e-12, "the chance level is that of shuffled tokens"))
            printf("  %g, shuffled %g +- %g\n", before->chance, mean, error);
    }
}

static void test_instability(void) {
    enum { MOST = 60 };
    int32_t first[MOST], second[MOST];
    unsigned char mask[MOST];
    double scratch[20 * 20], instability, q1, q2;
    moe_instability_report r, before;
    int trial;
    size_t t;
    for (trial = 0; trial < 300; trial++) {
        size_t n = (size_t)below(MOST + 1), e1 = (size_t)(1 + below(9));
        size_t e2 = (size_t)(1 + below(9));
        const unsigned char *used = trial % 3 == 0 ? mask : NULL;
        for (t = 0; t < MOST; t++) {
            first[t] = below((int)e1 + 1) - 1;
            second[t] = below(2) ? (first[t] < (int32_t)e2 ? first[t] : -1) : below((int)e2 + 1) - 1;
            mask[t] = below(4) > 0;
            if (used != NULL && !mask[t]) first[t] = second[t] = 1000; /* padding may hold anything */
        }
        CHECK_STATUS(moe_instability(n, first, e1, second, e2, used, scratch, &r), MOE_OK, "instability");
        count_pairs(n, first, second, used, &instability, &q1, &q2);
        close_to(r.instability, instability, "by counting pairs");
        close_to(r.q1, q1, "pairs together at the first");
        close_to(r.q2, q2, "at the second");
        close_to(r.chance, q1 * (1.0 - q2) + q2 * (1.0 - q1), "chance");
        CHECK_STATUS(moe_instability(n, first, e1, first, e1, used, scratch, &r), MOE_OK, "a layer and itself");
        close_to(r.instability, 0.0, "are stable");
    }
    memset(&r, 5, sizeof r);
    before = r;
    first[0] = 0;
    first[1] = 3;
    second[0] = second[1] = 0;
    CHECK_STATUS(moe_instability(2, first, 3, second, 1, NULL, scratch, &r), MOE_ERR_ARGUMENT,
                 "an expert out of range");
    first[1] = -2;
    CHECK_STATUS(moe_instability(2, first, 3, second, 1, NULL, scratch, &r), MOE_ERR_ARGUMENT, "below -1");
    first[1] = 1;
    CHECK_STATUS(moe_instability(2, NULL, 3, second, 1, NULL, scratch, &r), MOE_ERR_ARGUMENT, "no first");
    CHECK_STATUS(moe_instability(2, first, 3, NULL, 1, NULL, scratch, &r), MOE_ERR_ARGUMENT, "no second");
    CHECK_STATUS(moe_instability(2, first, 3, second, 1, NULL, NULL, &r), MOE_ERR_ARGUMENT, "no scratch");
    CHECK_STATUS(moe_instability(2, first, 3, second, 1, NULL, scratch, NULL), MOE_ERR_ARGUMENT, "no report");
    CHECK(same_bits(&r, &before, sizeof r), "a failed call changes nothing");
    CHECK_STATUS(moe_instability(0, NULL, 3, NULL, 1, NULL, scratch, &r), MOE_OK, "no tokens");
    CHECK(!(r.instability > 0) && !(r.chance > 0) && !(r.q1 > 0) && !(r.q2 > 0), "all 0");
    CHECK_STATUS(moe_instability(0, NULL, (size_t)-1, NULL, 2, NULL, scratch, &r), MOE_ERR_ARGUMENT,
                 "scratch that does not fit");
    CHECK_STATUS(moe_instability(0, NULL, (size_t)-2, NULL, (size_t)-2, NULL, scratch, &r), MOE_ERR_ARGUMENT,
                 "nor does this");
    instability_by_chance(first, second, scratch, &before);
}

/* ---- consistency of two passes ---- */

/* Mean over rows of (KL(p || q) + KL(q || p)) / 2, in double. */
static double wanted_consistency(size_t n, size_t classes, const double *a, const double *b) {
    double p[16], q[16], sum = 0.0;
    size_t t, i;
    for (t = 0; t < n; t++) {
        soft_row(a + t * classes, classes, p);
        soft_row(b + t * classes, classes, q);
        for (i = 0; i < classes; i++) sum += 0.5 * (p[i] * log(p[i] / q[i]) + q[i] * log(q[i] / p[i]));
    }
    return n > 0 ? sum / (double)n : 0.0;
}

static double consistency_slope(size_t n, size_t classes, double *a, double *b, double *at) {
    double kept = *at, step = 1e-5, up, down;
    *at = kept + step;
    up = wanted_consistency(n, classes, a, b);
    *at = kept - step;
    down = wanted_consistency(n, classes, a, b);
    *at = kept;
    return (up - down) / (2.0 * step);
}

static void test_consistency(void) {
    static const size_t rows[] = {1, 5, 3}, classes[] = {2, 7, 1};
    size_t i, k;
    for (i = 0; i < 3; i++) {
        size_t cells = rows[i] * classes[i];
        moe_real *a = normals(cells, 1.5, 6 + i), *b = normals(cells, 1.5, 16 + i);
        moe_real *da = normals(cells, 1.0, 1), *db = normals(cells, 1.0, 2);
        moe_real *shifted = reals(cells);
        double *wide_a = (double *)grab(cells, sizeof *wide_a), *wide_b = (double *)grab(cells, sizeof *wide_b), want;
        for (k = 0; k < cells; k++) {
            wide_a[k] = (double)a[k];
            wide_b[k] = (double)b[k];
            shifted[k] = a[k] + (moe_real)(100.0 * (double)(k / classes[i]));
        }
        want = wanted_consistency(rows[i], classes[i], wide_a, wide_b);
        NEARLY(moe_consistency_loss(rows[i], classes[i], a, b, da, db), want, "the two divergences");
        for (k = 0; k < cells; k++) {
            NEARLY(da[k], consistency_slope(rows[i], classes[i], wide_a, wide_b, wide_a + k), "gradient of a");
            NEARLY(db[k], consistency_slope(rows[i], classes[i], wide_a, wide_b, wide_b + k), "gradient of b");
        }
        NEARLY(moe_consistency_loss(rows[i], classes[i], b, a, NULL, da), want, "symmetric, and no gradient is wanted");
        CHECK(fabs((double)moe_consistency_loss(rows[i], classes[i], shifted, b, NULL, NULL) - want) <=
                  20 * NEAR * (1.0 + want),
              "the same for shifted logits");
        CHECK(fabs((double)moe_consistency_loss(rows[i], classes[i], a, a, da, db)) <= 1e-6 * (1.0 + NEAR),
              "0 for equal logits");
        for (k = 0; k < cells; k++) CHECK(fabs((double)da[k]) + fabs((double)db[k]) <= 1e-5, "and no gradient");
        free(a);
        free(b);
        free(da);
        free(db);
        free(shifted);
        free(wide_a);
        free(wide_b);
    }
    CHECK(!(moe_consistency_loss(0, 3, NULL, NULL, NULL, NULL) > 0) &&
              !(moe_consistency_loss(0, 3, NULL, NULL, NULL, NULL) < 0),
          "0 for no rows");
    {
        moe_real far_a[2] = {200, -200}, far_b[2] = {-200, 200}, d[2];
        moe_real far_loss = moe_consistency_loss(1, 2, far_a, far_b, d, NULL);
        NEARLY(far_loss, 400.0, "far apart, and finite");
        CHECK(moe_is_finite(d[0]) && moe_is_finite(d[1]), "with finite gradients");
    }
}

/* ---- decoding with refine: earlier tokens from the caller's memory ---- */

enum { PAST_N = 37, PAST_D = 6, PAST_E = 5, PAST_H = 3 };

static void refuse_past(moe_router *router, moe_call *call, size_t bytes, void *second) {
    moe_routing part;
    moe_call bad;
    bad = *call;
    bad.past_u = NULL;
    CHECK_STATUS(moe_route(router, &bad, second, bytes, &part), MOE_ERR_ARGUMENT, "a past without u");
    bad = *call;
    bad.past_gate = NULL;
    CHECK_STATUS(moe_route(router, &bad, second, bytes, &part), MOE_ERR_ARGUMENT, "a past without gate");
    bad = *call;
    bad.n_past = (size_t)-1;
    CHECK_STATUS(moe_route(router, &bad, second, bytes, &part), MOE_ERR_ARGUMENT, "a past that cannot be");
    bad = *call;
    bad.decoding = 0;
    CHECK_STATUS(moe_route(router, &bad, second, bytes, &part), MOE_OK, "a past without decoding");
    bad.training = 1;
    CHECK_STATUS(moe_route(router, &bad, second, bytes, &part), MOE_ERR_ARGUMENT, "a past in training");
    bad = *call;
    bad.n_past = INT32_MAX; /* it alone may be, but not with the call's token */
    CHECK_STATUS(moe_route(router, &bad, second, bytes, &part), MOE_ERR_ARGUMENT, "more tokens than an int32 counts");
    bad.n_past = PAST_N;
    CHECK_STATUS(moe_route(router, &bad, second, bytes, &part), MOE_ERR_SPACE, "memory without the past");
}

static void past_tensors(moe_router *router, uint64_t seed) {
    moe_parameter slot;
    int place;
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++)
        if (moe_router_parameter(&router->config, place, &slot) == MOE_OK)
            router->tensors[place] = normals(slot.count, 1.0, seed);
}

static void past_attention(moe_real *a, uint64_t seed) {
    size_t h, j;
    moe_rng_seed(&rng, seed);
    for (h = 0; h < PAST_H * PAST_N; h++)
        for (j = 0; j <= h % PAST_N; j++) a[h * PAST_N + j] = j % 5 == 4 || h % PAST_N == 6 ? 0 : moe_rng_uniform(&rng);
}

static void past_call(moe_call *call, size_t n, const moe_real *x, const moe_real *a, const moe_real *o,
                      const moe_real *output) {
    call->n_tokens = n;
    call->x = x;
    call->attention_weights = a;
    call->attention_outputs = o;
    call->attention_output = output;
}

/* The n tokens after t are routed as in the whole. */
static void check_part(const moe_routing *part, const moe_routing *whole, size_t t, size_t n) {
    size_t i;
    for (i = 0; i < n * PAST_E; i++)
        NEARLY(part->probabilities[i], whole->probabilities[t * PAST_E + i], "p with the past from memory");
    for (i = 0; i < n; i++) CHECK(part->n_choices[i] == whole->n_choices[t + i], "as many choices");
}

static void free_tensors(const moe_router *router) {
    int place;
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++) {
        void *mine = NULL;
        memcpy(&mine, &router->tensors[place], sizeof mine);
        free(mine);
    }
}

/* Attention of n tokens after t: their rows of a, and of o what they and the past have. */
static void past_heads(moe_real *some_a, moe_real *some_o, const moe_real *a, const moe_real *o, size_t t, size_t n) {
    size_t h, i;
    for (h = 0; h < PAST_H; h++) {
        for (i = 0; i < n; i++)
            memcpy(some_a + (h * n + i) * (t + n), a + (h * PAST_N + t + i) * PAST_N, (t + n) * sizeof(moe_real));
        memcpy(some_o + h * (t + n) * PAST_D, o + h * PAST_N * PAST_D, (t + n) * PAST_D * sizeof(moe_real));
    }
}

/* All tokens of one sequence in one call, and the same in parts that are given the u and gate of
   the tokens before them. */
static void check_past(const char *settings, uint64_t seed) {
    moe_router_config c = config_of(settings);
    moe_real *x = normals(PAST_N * PAST_D, 1.0, seed);
    moe_real *output = normals(PAST_N * PAST_D, 1.0, seed + 1);
    moe_real *a = reals(PAST_H * PAST_N * PAST_N);
    moe_real *o = normals(PAST_H * PAST_N * PAST_D, 1.0, seed + 2);
    moe_real *past_u = reals(PAST_N * PAST_D), *past_gate = reals(PAST_N * PAST_E);
    moe_router router;
    moe_routing whole, part;
    moe_call call;
    moe_error error;
    size_t bytes, t, n;
    void *first, *second;
    c.d_model = PAST_D;
    c.n_experts = PAST_E;
    if (!CHECK_STATUS(moe_router_init(&router, &c, moe_kernels_select(MOE_KERNELS_AUTO), &error), MOE_OK, settings))
        return;
    CHECK_STATUS(moe_router_check_decoding(&c, &error), MOE_OK, "causal refining decodes");
    past_tensors(&router, seed + 3);
    past_attention(a, seed);
    memset(&call, 0, sizeof call);
    past_call(&call, PAST_N, x, a, o, output);
    CHECK_STATUS(moe_route_size(&router, PAST_N, 0, &bytes), MOE_OK, "size");
    first = grab(bytes, 1);
    second = grab(bytes, 1);
    if (!CHECK_STATUS(moe_route(&router, &call, first, bytes, &whole), MOE_OK, settings)) return;
    for (t = 0; t < PAST_N; t += n) {
        moe_real *some_a, *some_o;
        n = 1 + (size_t)moe_rng_below(&rng, 4);
        if (n > PAST_N - t) n = PAST_N - t;
        some_a = reals(PAST_H * n * (t + n));
        some_o = reals(PAST_H * (t + n) * PAST_D);
        past_heads(some_a, some_o, a, o, t, n);
        past_call(&call, n, x + t * PAST_D, some_a, some_o, output + t * PAST_D);
        call.decoding = 1;
        call.n_past = t;
        call.past_u = past_u;
        call.past_gate = past_gate;
        if (!CHECK_STATUS(moe_route(&router, &call, second, bytes, &part), MOE_OK, settings)) return;
        check_part(&part, &whole, t, n);
        memcpy(past_u + t * PAST_D, part.u, n * PAST_D * sizeof(moe_real));
        memcpy(past_gate + t * PAST_E, part.gate, n * PAST_E * sizeof(moe_real));
        free(some_a);
        free(some_o);
    }
    past_call(&call, 1, x, a, o, output);
    call.n_past = 3;
    refuse_past(&router, &call, bytes, second);
    free_tensors(&router);
    free(x);
    free(output);
    free(a);
    free(o);
    free(past_u);
    free(past_gate);
    free(first);
    free(second);
}

static void test_past(void) {
    static const char *const settings[] = {
        "refine=similarity causal=1",
        "refine=similarity causal=1 similarity_scale=l2 similarity_learned=1 similarity_tau=0.3",
        "refine=similarity causal=1 similarity_scale=rsqrt_d lower_entropy_only=1 gate=sigmoid",
        "refine=attention causal=1 attention_heads=fixed heads=3 attention_head=1",
        "refine=attention causal=1 attention_heads=all heads=3 attention_u=output lower_entropy_only=1 "
        "attention_sigma=2"};
    /* nothing is refined; the rows of A that choose the head are not all there */
    static const char *const refused[] = {"d_model=6", "d_model=6 refine=attention causal=1"};
    moe_router router;
    moe_call call;
    moe_routing routing;
    moe_real x[12] = {0}, gate[8] = {0};
    unsigned char memory[4096];
    size_t i;
    for (i = 0; i < sizeof settings / sizeof settings[0]; i++) check_past(settings[i], 40 + i);
    memset(&call, 0, sizeof call);
    past_call(&call, 1, x, x + 6, x, NULL);
    call.n_past = 1;
    call.past_u = x;
    call.past_gate = gate;
    for (i = 0; i < 2; i++) {
        moe_router_config c = config_of(refused[i]);
        if (!CHECK_STATUS(moe_router_init(&router, &c, NULL, NULL), MOE_OK, refused[i])) return;
        past_tensors(&router, 4);
        CHECK_STATUS(moe_route(&router, &call, memory, sizeof memory, &routing), MOE_ERR_ARGUMENT, refused[i]);
        free_tensors(&router);
    }
}

int main(void) {
    moe_rng_seed(&rng, 5);
    CASE(test_bias_rule());
    CASE(test_bias_ties());
    CASE(test_bias_gates());
    CASE(test_bias_balances());
    CASE(test_ac_running());
    CASE(test_l1_sequence());
    CASE(test_l1_border());
    CASE(test_k_schedule());
    CASE(test_bias_of_scheduled_k());
    CASE(test_strange_steps());
    CASE(test_tau_schedule());
    CASE(test_freeze());
    CASE(test_student());
    CASE(test_student_of_ids());
    CASE(test_predictor());
    CASE(test_switch());
    CASE(test_combination());
    CASE(test_bound_value());
    CASE(test_bound_of_wide_tokens());
    CASE(test_bound_first());
    CASE(test_bound_average());
    CASE(test_bound_of_affinity());
    CASE(test_state_errors());
    CASE(test_balanced_optimal());
    CASE(test_balanced_larger());
    CASE(test_balanced_many());
    CASE(test_saved_net());
    CASE(test_saved_layer());
    CASE(test_failed_step());
    CASE(test_object_errors());
    CASE(test_remoe_share());
    CASE(test_custom_router());
    CASE(test_custom_errors());
    CASE(test_custom_layer());
    CASE(test_custom_net());
    CASE(test_custom_parameter());
    CASE(test_custom_missing());
    CASE(test_custom_backward_fails());
    if (sizeof(moe_real) == 8) CASE(test_custom_differences());
    CASE(test_custom_training());
    CASE(test_custom_files());
    CASE(test_replay());
    CASE(test_replay_net());
    CASE(test_distill());
    CASE(test_distill_net());
    CASE(test_clusters_in_nets());
    CASE(test_clusters_refused());
    CASE(test_mixed_presets());
    CASE(test_decoding_presets());
    CASE(test_decoding_rules());
    CASE(test_decoding_nets());
    CASE(test_past());
    CASE(test_instability());
    CASE(test_consistency());
    return test_end();
}
