/* int_routers.c - routing in integers (moei_int_route) against moe_route on the same logits: every
   combination of gate, selection, weight and option that has an integer form, every preset, ties,
   refusals by name, and a hash of integer results that is the same on every machine.

     cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/int_routers.c -o int_routers -lm
     ./int_routers [quick]
     (also with -DMOE_REAL=double, and as C++)
     -DMOE_TEST_SMALL: only the integers, below 8 KB of memory, for devices; MOE_NO_FLOAT does as
     well

   These presets have an integer form:
     smoe glam noisy_topk xmoe xmoe_code smoe_dropout aoe aoe_code aoe_top_p norm_routing
     importance_gate dual_temperature attentive_gate similarity_gate hash base stablemoe (before
     freeze_at) dselect_k sinkhorn top_p dynmoe competesmoe remoe mixtral qwen2_moe qwen3_moe
     olmoe deepseek_v2 deepseek_v3 deepseek_v4 llama4 gpt_oss dbrx grok1 phi35_moe granite_moe
     gemma4 minimax_m2 sigma_moe expert_threshold moge trinity adamoe grok2
   and switch, gshard, vmoe, locmoe, moe_pp with a capacity that drops nothing, and thor with
   sample_at = training. Without one: refining,
   adaptive clustering by batch, expert_choice, affinity, soft, and more than 256 experts
   (nemotron3, longcat_flash). */

#define MOE_IMPLEMENTATION /* private functions are tested too */
#if defined(MOE_NO_FLOAT) && !defined(MOE_TEST_SMALL)
#define MOE_TEST_SMALL
#endif
#ifdef MOE_TEST_SMALL
#include "../../moe_routers.h"
#else
#include "../all.h"
#endif
#include "../test.h"

#include <stdio.h>
#include <string.h>

/* ---- integers alone: what devices run ---- */

enum { SMALL = 16 };

static uint32_t lcg_state = 1;

/* 16 random bits, the same on every machine. */
static int32_t lcg(void) {
    lcg_state = lcg_state * 1664525u + 1013904223u;
    return (int32_t)(lcg_state >> 16);
}

static uint32_t fnv = 2166136261u;

static void fnv_16(int16_t v) {
    fnv = (fnv ^ ((uint32_t)v & 255u)) * 16777619u;
    fnv = (fnv ^ ((uint32_t)v >> 8 & 255u)) * 16777619u;
}

/* int32 bias[16] at 0, int32 thresholds[16] at 64, int16 scales[16] at 128, experts of 4 token ids
   at 160 */
static const unsigned char constants[168] MOE_FLASH = {
    0, 16,  0,   0,   0,   240, 255, 255, 0,   0,   0, 0,  44,  1,   0,   0,   0, 32,  0,   0,   0,   0,   0,   0,
    0, 224, 255, 255, 1,   0,   0,   0,   0,   64,  0, 0,  255, 255, 255, 255, 0, 8,   0,   0,   0,   0,   0,   0,
    0, 192, 255, 255, 100, 0,   0,   0,   0,   4,   0, 0,  0,   252, 255, 255, 0, 16,  0,   0,   0,   240, 255, 255,
    0, 0,   0,   0,   44,  1,   0,   0,   0,   32,  0, 0,  0,   0,   0,   0,   0, 224, 255, 255, 1,   0,   0,   0,
    0, 64,  0,   0,   255, 255, 255, 255, 0,   8,   0, 0,  0,   0,   0,   0,   0, 192, 255, 255, 100, 0,   0,   0,
    0, 4,   0,   0,   0,   252, 255, 255, 255, 127, 0, 64, 0,   32,  0,   192, 1, 128, 0,   0,   1,   0,   255, 127,
    0, 96,  0,   80,  0,   48,  0,   16,  0,   8,   0, 4,  0,   2,   0,   1,   3, 9,   15,  0,   7,   8,   4,   3};

static const moei_int_router plain = {moei_int_gate_logits,
                                      moei_int_select_top_k,
                                      moei_int_share_softmax,
                                      moei_int_weight_sum,
                                      NULL,
                                      SMALL,
                                      2,
                                      2,
                                      SMALL,
                                      0,
                                      0,
                                      0,
                                      10,
                                      5,
                                      0,
                                      0,
                                      0,
                                      MOEI_INT_NONE,
                                      MOEI_INT_NONE,
                                      MOEI_INT_NONE,
                                      MOEI_INT_NONE,
                                      NULL,
                                      NULL,
                                      0,
                                      0};

typedef struct gate_row {
    moei_int_gate *gate, *share;
    int z_bits, weight_shift;
} gate_row;

static const gate_row gates[] = {{moei_int_gate_softmax, moei_int_share_softmax, 10, 5},
                                 {moei_int_gate_sigmoid, moei_int_share_sigmoid, 11, 5},
                                 {moei_int_gate_sqrt_softplus, moei_int_share_sqrt_softplus, 10, 1},
                                 {moei_int_gate_relu, moei_int_gate_relu, 0, 8},
                                 {moei_int_gate_logits, moei_int_gate_logits, 0, 8}};
static moei_int_select *const selects[] = {moei_int_select_top_k,     moei_int_select_grouped, moei_int_select_top_p,
                                           moei_int_select_threshold, moei_int_select_hash,    moei_int_select_logits};
static moei_int_weight *const weighting[] = {moei_int_weight_raw,        moei_int_weight_sum,     moei_int_weight_norm,
                                             moei_int_weight_softmax,    moei_int_weight_uniform, moei_int_weight_one,
                                             moei_int_weight_sparsemixer};

/* What holds for every router: experts in range and different, and as many as there may be. */
static int is_sound(const moei_int_router *r, size_t count, const int16_t *experts) {
    size_t i, j;
    if (count > r->most) return 0;
    for (i = 0; i < count; i++) {
        if (experts[i] < 0 || experts[i] >= (int16_t)r->n_experts) return 0;
        for (j = 0; j < i; j++)
            if (experts[i] == experts[j]) return 0;
    }
    return 1;
}

static void hash_one(const moei_int_router *r, const int16_t *z) {
    static int32_t p[2 * SMALL];
    static int16_t experts[SMALL], weights[SMALL];
    size_t count = 99, i;
    moe_status status = moei_int_route(r, constants, (int32_t)(z[0] & 3), z, p, experts, weights, &count);
    if (status != MOE_OK || !is_sound(r, count, experts)) {
        CHECK(0, "a route on the list is not sound");
        return;
    }
    fnv_16((int16_t)count);
    for (i = 0; i < count; i++) {
        fnv_16(experts[i]);
        fnv_16(weights[i]);
    }
}

/* Every gate with every selection, weight and table: some make little sense, all have a defined
   result. */
static void hash_all(void) {
    static int16_t z[SMALL];
    size_t g, s, w, options, i;
    for (g = 0; g < sizeof gates / sizeof gates[0]; g++)
        for (s = 0; s < sizeof selects / sizeof selects[0]; s++)
            for (w = 0; w < sizeof weighting / sizeof weighting[0]; w++)
                for (options = 0; options < 8; options++) {
                    moei_int_router r = plain;
                    r.gate = gates[g].gate;
                    r.select = selects[s];
                    r.weight = weighting[w];
                    r.values = w == 0 ? gates[g].gate : gates[g].share;
                    r.z_bits = (uint8_t)gates[g].z_bits;
                    r.weight_shift = (uint8_t)gates[g].weight_shift;
                    r.most = SMALL;
                    r.scratch = 2 * SMALL;
                    r.groups = 4;
                    r.groups_kept = 2;
                    r.flags = (uint8_t)(options & 3);
                    r.threshold = w == 6 ? 1311 : s == 2 ? (int32_t)1 << 19 : 100000;
                    r.tokens = s == 4 ? 4 : 0;
                    r.table = 160;
                    if (options & 4) {
                        r.bias = 0;
                        r.thresholds = 64;
                        r.scales = 128;
                    }
                    r.factor = 20000;
                    r.scale = options & 2 ? moei_int_scale_weights : NULL;
                    if (g == 4 && w == 1) continue; /* sums of both signs */
                    for (i = 0; i < SMALL; i++)
                        z[i] = (int16_t)((options & 1) != 0 ? lcg() % 7 * 300 - 900 : lcg() % 65535 - 32767);
                    hash_one(&r, z);
                }
}

static void hash_by_hand(int16_t *experts, int16_t *weights, moei_int_router *r) {
    size_t count;
    r->select = moei_int_select_hash;
    r->tokens = 4;
    r->table = 160;
    r->gate = NULL;
    r->values = NULL;
    r->weight = moei_int_weight_uniform;
    r->scratch = 0;
    count = 99;
    CHECK(moei_int_route(r, constants, 4, NULL, NULL, experts, weights, &count) == MOE_ERR_ARGUMENT && count == 99,
          "no such token id");
    CHECK(moei_int_route(r, constants, -1, NULL, NULL, experts, weights, &count) == MOE_ERR_ARGUMENT && count == 99,
          "a negative token id");
    CHECK(moei_int_route(r, constants, 3, NULL, NULL, experts, weights, &count) == MOE_OK && count == 2 &&
              experts[0] == 4 && experts[1] == 3 && weights[1] == 16384,
          "a table of token ids alone");
}

/* What can be seen by eye. */
static void by_hand(void) {
    static const int16_t z[SMALL] = {0, 5, 1024, 5, 0, -7, 1024, 0, 0, 0, 0, 0, 0, 0, 0, -32767};
    static int32_t p[2 * SMALL];
    static int16_t experts[SMALL], weights[SMALL];
    moei_int_router r = plain;
    size_t count = 99;
    CHECK(moei_int_route(&r, NULL, 0, z, p, experts, weights, &count) == MOE_OK && count == 2, "the two best");
    CHECK(experts[0] == 2 && experts[1] == 6 && weights[0] == 16384 && weights[1] == 16384,
          "a tie: the lower index first, equal weights");
    r.top_k = r.most = 3;
    (void)moei_int_route(&r, NULL, 0, z, p, experts, weights, &count);
    CHECK(count == 3 && experts[2] == 1, "the lower one of a tie at the end");
    r.gate = NULL;
    r.select = moei_int_select_logits;
    (void)moei_int_route(&r, NULL, 0, z, p, experts, weights, &count);
    CHECK(count == 3 && experts[0] == 2 && experts[1] == 6 && experts[2] == 1, "the same without a gate");
    r.top_k = 1;
    (void)moei_int_route(&r, NULL, 0, z, p, experts, weights, &count);
    CHECK(count == 1 && experts[0] == 2 && weights[0] == 32767, "one expert has weight 1");
    r.top_k = r.most = 2;
    r.n_experts = SMALL - 1;
    (void)moei_int_route(&r, NULL, 0, z + 1, p, experts, weights, &count); /* 1024 and 1024 behind one place less */
    CHECK(experts[0] == 1 && experts[1] == 5, "the lower of equals, wherever they stand");
    r = plain;
    r.weight = moei_int_weight_raw;
    r.weight_shift = 8;
    r.values = moei_int_gate_logits;
    (void)moei_int_route(&r, NULL, 0, z, p, experts, weights, &count);
    CHECK(weights[0] == 1024 && weights[1] == 1024, "raw weights are the gate");
    r.select = moei_int_select_threshold;
    r.threshold = (int32_t)1024 * 256;
    r.most = SMALL;
    (void)moei_int_route(&r, NULL, 0, z, p, experts, weights, &count);
    CHECK(count == 0, "not above its threshold is not chosen");
    r.flags = MOEI_INT_FALLBACK;
    (void)moei_int_route(&r, NULL, 0, z, p, experts, weights, &count);
    CHECK(count == 1 && experts[0] == 2 && weights[0] == 1024, "the best one instead, the lower of two");
    r.threshold = (int32_t)1024 * 256 - 1;
    (void)moei_int_route(&r, NULL, 0, z, p, experts, weights, &count);
    CHECK(count == 2, "above a threshold by one");
    r.select = moei_int_select_each;
    r.groups = 4;
    r.top_k = 8;
    (void)moei_int_route(&r, NULL, 0, z, p, experts, weights, &count);
    CHECK(count == 8 && experts[0] == 2 && experts[1] == 6 && experts[2] == 1 && experts[3] == 4 && experts[4] == 8 &&
              experts[5] == 9 && experts[6] == 12 && experts[7] == 13,
          "the two best of each group of four, the lower of equals");
    r.select = moei_int_select_threshold;
    r.top_k = 2;
    r.gate = moei_int_gate_softmax;
    r.values = NULL;
    r.weight = moei_int_weight_softmax;
    r.threshold = (int32_t)1 << 20;
    (void)moei_int_route(&r, NULL, 0, z, p, experts, weights, &count);
    /* 1 / 8.501 */
    CHECK(count == 1 && experts[0] == 2 && weights[0] > 3852 && weights[0] < 3857,
          "what a threshold left out has its p again as the best one");
    hash_by_hand(experts, weights, &r);
}

#ifdef MOE_TEST_SMALL
int main(void) {
    CASE(by_hand());
    CASE(hash_all());
    printf("hash %08lx\n", (unsigned long)fnv);
    test_case("hash");
    CHECK(fnv == 0x4aac30feul, "the hash of all integer results");
    return test_end();
}
#else

#include <math.h>
#include <stdlib.h>

static moe_rng rng;

static int below(int n) { return (int)moe_rng_below(&rng, (uint64_t)n); }

/* ---- one router in both arithmetics ---- */

enum { MOST = MOEI_INT_EXPERTS };

/* A configuration with tensors, its plan, and a router in floating point whose logits are x: score
   linear with the identity as its weight. */
typedef struct pair {
    moe_router_config config; /* checked, of the router in floating point */
    moe_router router;
    moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT];
    moei_int_router_plan plan;
    unsigned char *base;
    void *memory;
    size_t size;
} pair;

/* The same router behind its logits: any score, any input become x itself. */
static moe_router_config behind_logits(moe_router_config c) {
    c.d_model = c.n_experts;
    c.input = MOE_INPUT_PLAIN;
    c.score = MOE_SCORE_LINEAR;
    c.router_bias = 0;
    c.ac_mode = c.ac_mix = 0;
    c.ac_rho = 0;
    c.cosine_dim = c.cosine_keep_length = c.cosine_learn_tau = c.grap_cosine = 0;
    c.capacity_bound = MOE_BOUND_NONE;
    c.capacity_rho = 0;
    c.logit_cap = 0;
    c.router_residual = 0;
    if (c.tau_schedule == MOE_TAU_COSINE_TAU) {
        c.tau_schedule = 0;
        c.tau_end = 0;
        c.schedule_steps = c.k_end > 0 ? c.schedule_steps : 0;
    }
    return c;
}

static void pair_free(pair *q) {
    int slot;
    for (slot = 0; slot < MOE_ROUTER_PARAMETER_COUNT; slot++) free(q->tensors[slot]);
    free(q->base);
    free(q->memory);
    memset(q, 0, sizeof *q);
}

/* Tensors with random values where they matter. */
static void pair_tensors(pair *q) {
    const moe_router_config *c = &q->config;
    size_t e, i, n = (size_t)c->n_experts, k = (size_t)c->top_k;
    int slot;
    for (slot = 0; slot < MOE_ROUTER_PARAMETER_COUNT; slot++) {
        moe_parameter made;
        if (moe_router_parameter(c, slot, &made) != MOE_OK) continue;
        q->tensors[slot] = (moe_real *)grab(made.count, sizeof(moe_real));
        for (i = 0; i < made.count; i++) q->tensors[slot][i] = made.init_value;
    }
    for (e = 0; e < n && q->tensors[MOE_ROUTER_WEIGHT] != NULL; e++) q->tensors[MOE_ROUTER_WEIGHT][e * n + e] = 1;
    for (e = 0; e < n && q->tensors[MOE_ROUTER_SELECTION_BIAS] != NULL; e++)
        q->tensors[MOE_ROUTER_SELECTION_BIAS][e] = (moe_real)0.1 * moe_rng_normal(&rng);
    for (e = 0; e < n && q->tensors[MOE_ROUTER_EXPERT_SCALE] != NULL; e++)
        q->tensors[MOE_ROUTER_EXPERT_SCALE][e] = (moe_real)1 + (moe_real)0.5 * moe_rng_normal(&rng);
    for (e = 0; e < n && q->tensors[MOE_ROUTER_THRESHOLD] != NULL; e++)
        q->tensors[MOE_ROUTER_THRESHOLD][e] += (moe_real)0.05 * moe_rng_normal(&rng);
    for (e = 0; e < n && q->tensors[MOE_ROUTER_CUTOFF] != NULL; e++)
        q->tensors[MOE_ROUTER_CUTOFF][e] = (moe_real)0.3 * moe_rng_normal(&rng);
    if (q->tensors[MOE_ROUTER_CUTOFF_UPDATES] != NULL)
        q->tensors[MOE_ROUTER_CUTOFF_UPDATES][0] = (moe_real)below(4);
    for (i = 0; q->tensors[MOE_ROUTER_TABLE] != NULL && i < (size_t)c->table_size * k; i++)
        q->tensors[MOE_ROUTER_TABLE][i] = (moe_real)((i / k * 5 + i % k) % n);
}

/* Makes both. step: of router.step, where there is one. */
static moe_status pair_make(pair *q, const moe_router_config *given, double logit_most, double step, moe_error *error) {
    moe_router_config c = *given;
    const unsigned lead = 64; /* the table stands behind other constants */
    moe_status status;
    memset(q, 0, sizeof *q);
    c.d_model = c.n_experts > 0 ? c.n_experts : 8;
    status = moe_router_check(&c, NULL, error);
    if (status != MOE_OK) return status;
    if (c.n_experts == 0) c.n_experts = 8;
    q->config = behind_logits(c);
    status = moe_router_init(&q->router, &q->config, NULL, error);
    if (status != MOE_OK) return status;
    q->config = q->router.config;
    pair_tensors(q);
    if (q->tensors[MOE_ROUTER_STEP] != NULL) q->tensors[MOE_ROUTER_STEP][0] = (moe_real)step;
    memcpy(q->router.tensors, q->tensors, sizeof q->tensors);
    status = moei_int_router_plan_make(&c, q->router.tensors, (moe_real)logit_most, NULL, 0, &q->plan, error);
    if (status == MOE_OK) {
        q->base = (unsigned char *)grab(lead + q->plan.table_size, 1);
        status = moei_int_router_plan_make(&c, q->router.tensors, (moe_real)logit_most, q->base + lead,
                                           q->plan.table_size, &q->plan, error);
        moei_int_router_move(&q->plan.router, lead);
    }
    if (status == MOE_OK) status = moe_route_size(&q->router, 1, 0, &q->size);
    if (status == MOE_OK) q->memory = grab(q->size, 1);
    else pair_free(q);
    return status;
}

/* ---- the judge: p and keys of a token in double, from z ---- */

static double gate_of(const moe_router_config *c, const double *logit, size_t e) {
    const double t = (double)c->gate_temperature;
    double sum = 0, largest = logit[0];
    size_t i;
    switch (c->gate) {
    case MOE_GATE_SOFTMAX:
        for (i = 0; i < (size_t)c->n_experts; i++)
            if (logit[i] > largest) largest = logit[i];
        for (i = 0; i < (size_t)c->n_experts; i++) sum += exp((logit[i] - largest) / t);
        return exp((logit[e] - largest) / t) / sum;
    case MOE_GATE_SIGMOID: return 1 / (1 + exp(-logit[e] / t));
    case MOE_GATE_SQRT_SOFTPLUS: return sqrt(logit[e] > 30 ? logit[e] : log(1 + exp(logit[e])));
    case MOE_GATE_RELU: return logit[e] > 0 ? logit[e] : 0;
    default: return logit[e];
    }
}

typedef struct tally {
    long tokens, close, usual_tokens, usual_close, weights; /* usual: up to 16 experts, logits up to 40 */
    double worst;                                          /* error of a weight in 2^-13 of weight_scale */
} tally;

/* How close two keys must be for another choice to be no fault: the promise at moei_int_router. */
static double quantum(const pair *q) {
    const double units = q->config.gate == MOE_GATE_SQRT_SOFTPLUS ? 4 * ldexp(0.8326, -(8 + q->plan.router.z_bits / 2))
                                                                  : 2 * (double)q->plan.z_scale / 256;
    const double unit =
        q->config.gate == MOE_GATE_SOFTMAX || q->config.gate == MOE_GATE_SIGMOID ? ldexp(1.0, -13) : units;
    return q->config.group_score == MOE_GROUP_TOP2_SUM ? 2 * unit : unit;
}

/* Where choices must be the same to the last expert: where floating point compares the logits
   themselves. */
static int is_exact(const moe_router_config *c) {
    int monotone = c->gate != MOE_GATE_RELU && c->gate != MOE_GATE_IDENTITY;
    if (c->weight == MOE_WEIGHT_SPARSEMIXER) return 1;
    if (c->selection_bias) return 0;
    if (c->select == MOE_SELECT_SINKHORN || c->select == MOE_SELECT_BALANCED) return 1;
    if (c->select == MOE_SELECT_POSITIVE) return !monotone;
    return c->select == MOE_SELECT_TOP_K || c->select == MOE_SELECT_DENSE || (c->select == MOE_SELECT_HASH && monotone);
}

/* Whether there is a pair of experts, a sum or a threshold so close that rounding may decide. */
static int is_close_call(const pair *q, const double *logit, const moe_real *bias) {
    const moe_router_config *c = &q->config;
    const size_t n = (size_t)c->n_experts;
    static double p[MOST], key[MOST], value[MOST];
    static unsigned char used[MOST];
    const double near = quantum(q);
    /* these have no p that is the same for different z but by rounding */
    const int monotone = c->gate != MOE_GATE_RELU && c->gate != MOE_GATE_IDENTITY;
    size_t e, other, size = n / (size_t)c->groups;
    double sum = 0;
    for (e = 0; e < n; e++) {
        p[e] = gate_of(c, logit, e);
        key[e] = p[e] + (bias != NULL ? (double)bias[e] : 0);
    }
    for (e = 0; e < n; e++)
        for (other = 0; other < e; other++) {
            double d = key[e] - key[other];
            if (fabs(d) < near && (fabs(d) > 0 || (monotone && fabs(logit[e] - logit[other]) > 0))) return 1;
            d = p[e] - p[other];
            if (fabs(d) < near && (fabs(d) > 0 || (monotone && fabs(logit[e] - logit[other]) > 0))) return 1;
        }
    for (e = 0; e < n && c->select == MOE_SELECT_POSITIVE; e++)
        /* nothing is left of it in floating point */
        if (c->gate < MOE_GATE_RELU && p[e] < (MOE_REAL_IS_DOUBLE ? 1e-150 : 1e-18)) return 1;
    for (e = 0; e < n && c->select == MOE_SELECT_THRESHOLD; e++) {
        double theta = c->threshold_learned ? (double)q->tensors[MOE_ROUTER_THRESHOLD][e] : (double)c->threshold;
        if (c->threshold_sigmoid) theta = 1 / (1 + exp(-theta));
        if (fabs(p[e] - theta) < near) return 1;
    }
    memset(used, 0, sizeof used);
    for (other = 0; other < n && c->select == MOE_SELECT_TOP_P; other++) {
        size_t best = n;
        for (e = 0; e < n; e++)
            if (!used[e] && (best == n || p[e] > p[best])) best = e;
        used[best] = 1;
        sum += p[best];
        if (fabs(sum - (double)c->top_p) < near * (1 + (double)other)) return 1;
    }
    for (e = 0; e < n && c->select == MOE_SELECT_EXPERT_THRESHOLD; e++) {
        const double updates = (double)q->tensors[MOE_ROUTER_CUTOFF_UPDATES][0];
        const double cutoff = (double)q->tensors[MOE_ROUTER_CUTOFF][e] / (updates > 0 ? 1 - pow(0.5, updates) : 1);
        if (fabs(logit[e] - cutoff) < 1e-5 * (1 + fabs(cutoff))) return 1;
    }
    for (e = 0; e < (size_t)c->groups && c->select == MOE_SELECT_GROUPED_TOP_K; e++) {
        double first = -1e30, second = -1e30;
        size_t i;
        for (i = e * size; i < (e + 1) * size; i++) {
            if (key[i] > first) {
                second = first;
                first = key[i];
            } else if (key[i] > second) second = key[i];
        }
        value[e] = c->group_score == MOE_GROUP_TOP2_SUM && size > 1 ? first + second : first;
        for (other = 0; other < e; other++)
            if (fabs(value[e] - value[other]) < near) return 1;
    }
    return 0;
}

/* Whether an expert stands so near to the edge of 2 eps that rounding may decide about it. */
static int is_sparse_edge(const pair *q, const int16_t *z, const int16_t *experts, size_t count) {
    size_t i, e;
    if (q->config.weight != MOE_WEIGHT_SPARSEMIXER) return 0;
    for (i = 0; i < count; i++)
        for (e = 0; e < (size_t)q->config.n_experts; e++) {
            double best = z[experts[i]], v = z[e];
            double size = fabs(v) > best ? fabs(v) : best;
            if (fabs(best - v - 2 * (double)q->config.sparsemixer_eps * size) <= 1.0 && best > v) return 1;
        }
    return 0;
}

/* Whether p is so small that squares of floats vanish, so that floating point is no judge. */
static int is_tiny(const moe_router_config *c, const moe_routing *routing, size_t count, const int16_t *experts) {
    double largest = 0;
    size_t i;
    for (i = 0; i < count; i++)
        if ((double)routing->probabilities[experts[i]] > largest) largest = (double)routing->probabilities[experts[i]];
    return c->gate != MOE_GATE_RELU && c->gate != MOE_GATE_IDENTITY && largest < (MOE_REAL_IS_DOUBLE ? 1e-140 : 1e-15);
}

/* Routes one z in both ways. 0: a fault. */
static int same_route(pair *q, const int16_t *z, int32_t token, int usual, tally *t) {
    static moe_real x[MOST];
    static double logit[MOST];
    static int32_t p[2 * MOST];
    static int16_t experts[MOST], weights[MOST];
    const moei_int_router *r = &q->plan.router;
    const size_t n = r->n_experts;
    moe_call call;
    moe_routing routing;
    size_t count = 0, e, i;
    /* p or a bias orders them there */
    const int order = q->config.select != MOE_SELECT_SINKHORN &&
                      !(q->config.select == MOE_SELECT_SAMPLE && q->config.selection_bias);
    int same;
    double bound =
        q->config.gate == MOE_GATE_SQRT_SOFTPLUS && r->z_bits < 8 ? ldexp(1.0, -9 - r->z_bits / 2) : ldexp(1.0, -13);
    memset(&call, 0, sizeof call);
    for (e = 0; e < n; e++) {
        x[e] = (moe_real)(z[e] * (double)q->plan.z_scale);
        logit[e] = z[e] * (double)q->plan.z_scale;
    }
    call.n_tokens = 1;
    call.x = x;
    call.token_ids = &token;
    if (moe_route(&q->router, &call, q->memory, q->size, &routing) != MOE_OK) return 0;
    memset(experts, 77, sizeof experts);
    memset(weights, 77, sizeof weights);
    if (moei_int_route(r, q->base, token, q->plan.needs_logits ? z : NULL, r->scratch > 0 ? p : NULL, experts, weights,
                       &count) != MOE_OK)
        return 0;
    if (!is_sound(r, count, experts)) return 0;
    for (i = r->most; i < MOST; i++)
        if (experts[i] != 0x4d4d || weights[i] != 0x4d4d) return 0;
    t->tokens++;
    t->usual_tokens += usual;
    same = count == (size_t)routing.n_choices[0];
    for (i = 0; i < count && same; i++)
        same = order ? experts[i] == routing.choices[i] : routing.selected[experts[i]] != 0;
    if (!same) {
        t->close++;
        t->usual_close += usual;
        return !is_exact(&q->config) && is_close_call(q, logit, q->tensors[MOE_ROUTER_SELECTION_BIAS]);
    }
    if (is_sparse_edge(q, z, experts, count) || is_tiny(&q->config, &routing, count, experts)) return 1;
    for (i = 0; i < count; i++) {
        double error = fabs(weights[i] / 32768.0 * (double)q->plan.weight_scale - (double)routing.weights[experts[i]]) /
                       (double)q->plan.weight_scale;
        t->weights++;
        if (error * 8192 > t->worst) t->worst = error * 8192;
        if (!(error < bound)) return 0;
    }
    return 1;
}

/* Random z: all over the range, within some units, in coarse steps with many ties, or all
   negative. */
static void draw_z(const pair *q, double logit_most, int kind, int positive, int16_t *z) {
    const double most = logit_most / (double)q->plan.z_scale, spread = most / (1 << below(6));
    size_t e;
    for (e = 0; e < q->plan.router.n_experts; e++) {
        double v = kind == 0   ? most * (2 * (double)moe_rng_uniform(&rng) - 1)
                   : kind == 1 ? below(9) - 4
                               : spread * 0.4 * (double)moe_rng_normal(&rng);
        if (kind == 2) v = floor(v / (spread / 4 + 1)) * floor(spread / 4 + 1);
        if (kind == 3) v = -fabs(v) - (double)(1 << below(14));
        z[e] = (int16_t)(v > 32767 ? 32767 : v < -32767 ? -32767 : v);
        if (positive && z[e] < 0) z[e] = (int16_t)-z[e];
    }
}

static int try_pair(pair *q, double logit_most, int rounds, int positive, tally *t, const char *name) {
    static int16_t z[MOST];
    int i;
    for (i = 0; i < rounds; i++) {
        const int kind = below(5), usual = kind != 1 && q->config.n_experts <= 16 && logit_most < 41;
        draw_z(q, logit_most, kind, positive, z);
        if (same_route(q, z, q->config.table_size > 0 ? below(q->config.table_size) : 0, usual, t)) continue;
        if (test_shown)
            printf("   %s: E %d K %d gate %d select %d weight %d bias %d T %g logits %g z_bits %d\n", name,
                   q->config.n_experts, q->config.top_k, q->config.gate, q->config.select, q->config.weight,
                   q->config.selection_bias, (double)q->config.gate_temperature, logit_most, q->plan.router.z_bits);
        return 0;
    }
    return 1;
}

static void report(const char *name, const tally *t) {
    printf("%-14s %8ld tokens, %6ld close calls; usual %8ld, %5ld; %9ld weights, worst %.3f of 2^-13\n", name,
           t->tokens, t->close, t->usual_tokens, t->usual_close, t->weights, t->worst);
}

/* ---- every preset ---- */

static const char *const with_integers =
    " smoe glam noisy_topk xmoe xmoe_code smoe_dropout aoe aoe_code aoe_top_p norm_routing importance_gate "
    "dual_temperature attentive_gate similarity_gate hash base stablemoe dselect_k sinkhorn top_p dynmoe "
    "competesmoe remoe mixtral qwen2_moe qwen3_moe olmoe deepseek_v2 deepseek_v3 deepseek_v4 llama4 gpt_oss dbrx grok1 "
    "phi35_moe granite_moe gemma4 minimax_m2 sigma_moe expert_threshold moge trinity mixture_of_depths "
    "adamoe grok2 ";

static int is_listed(const char *name) {
    char word[40];
    sprintf(word, " %.36s ", name);
    return strstr(with_integers, word) != NULL;
}

static void try_presets(int rounds, int quick) {
    const moe_preset *preset;
    tally t;
    memset(&t, 0, sizeof t);
    for (preset = moe_presets(); preset->name != NULL; preset++) {
        moe_router_config c;
        moe_error error;
        moe_status status;
        pair q;
        CHECK(moe_router_preset(preset->name, &c, NULL) == MOE_OK, preset->name);
        if (c.select == MOE_SELECT_HASH || c.student_dim > 0) c.table_size = 50;
        c.loss_selector_entropy = 0; /* of a score that the pair replaces */
        status = pair_make(&q, &c, 12.0, 0.0, &error);
        CHECK(status == (is_listed(preset->name) ? MOE_OK : MOE_ERR_UNSUPPORTED), preset->name);
        if (status == MOE_OK && !c.predictor) /* int_scores.c compares what a predictor decides */
            CHECK(try_pair(&q, 12.0, rounds, c.score == MOE_SCORE_COMPETITION || c.score == MOE_SCORE_NORM, &t,
                           preset->name),
                  preset->name);
        if (status == MOE_OK) pair_free(&q);
    }
    report("presets", &t);
    CHECK(t.usual_close * 50 < t.usual_tokens || quick, "close calls of presets are rare");
}

/* ---- every combination ---- */

static const int sizes[] = {1, 2, 3, 4, 5, 8, 12, 16, 31, 64, 256};
static const double logits[] = {0.5, 3, 10, 40, 300};
static const double temperatures[] = {1, 1, 1, 0.5, 2, 0.07};
static const double scales[] = {1, 1, 2.5, -1.5, 16, 0.3};

static moe_router_config draw_config(int gate, int select, int weight) {
    moe_router_config c;
    memset(&c, 0, sizeof c);
    c.preset = MOEI_OF_A_FILE; /* what has no effect is reset */
    c.n_experts = sizes[below((int)(sizeof sizes / sizeof sizes[0]))];
    c.top_k = 1 + below(c.n_experts < 9 ? c.n_experts : 9);
    c.gate = gate;
    c.select = select;
    c.weight = weight;
    c.gate_temperature = (moe_real)temperatures[below(6)];
    c.scale = (moe_real)scales[below(6)];
    c.expert_scale = below(3) == 0;
    c.selection_bias = below(3) == 0 && weight != MOE_WEIGHT_SPARSEMIXER;
    c.weight_p = (moe_real)(1 + below(2));
    c.renormalize = below(4) == 0 ? MOE_RENORMALIZE_AFTER : MOE_RENORMALIZE_BEFORE;
    c.threshold = (moe_real)(0.02 * (below(20) - 1));
    c.threshold_fallback = below(3);
    c.threshold_learned = select == MOE_SELECT_THRESHOLD && below(2) && weight != MOE_WEIGHT_SOFTMAX;
    c.threshold_sigmoid = c.threshold_learned && c.threshold > 0 && below(2);
    c.top_p = (moe_real)(0.1 * (1 + below(10)));
    c.table_size = select == MOE_SELECT_HASH ? 20 : 0;
    if (select == MOE_SELECT_BALANCED) c.top_k = 1;
    if ((c.n_experts == 5 || c.n_experts == 12) &&
        (weight == MOE_WEIGHT_SUM || weight == MOE_WEIGHT_SOFTMAX || weight == MOE_WEIGHT_P_NORM)) {
        c.n_zero = 1 + below(2);
        c.n_copy = below(2);
        c.weight_over = below(3);
    }
    if (select == MOE_SELECT_EXPERT_THRESHOLD) {
        c.selection_bias = 0;
        c.threshold_rho = (moe_real)0.5;
    }
    if (select == MOE_SELECT_GROUPED_EACH)
        for (c.groups = c.top_k; c.n_experts % c.groups != 0 || c.top_k % c.groups != 0; c.groups--) {}
    if (select == MOE_SELECT_GROUPED_TOP_K) {
        for (c.groups = 1 + below(c.n_experts < 8 ? c.n_experts : 8); c.n_experts % c.groups != 0; c.groups--) {}
        c.groups_kept = 1 + below(c.groups);
        c.group_score = below(2);
        while (c.top_k > c.groups_kept * (c.n_experts / c.groups)) c.top_k--;
    }
    return c;
}

/* What the plan has to refuse among the settings above; written down once more, from the other
   side. */
static int must_refuse(const moe_router_config *c) {
    const int softened = c->gate == MOE_GATE_SOFTMAX || c->gate == MOE_GATE_SIGMOID;
    const int after = c->renormalize == MOE_RENORMALIZE_AFTER;
    const int own_bias = c->selection_bias && c->select != MOE_SELECT_SINKHORN && c->select != MOE_SELECT_BALANCED &&
                         c->select != MOE_SELECT_SAMPLE;
    const int divides = c->weight == MOE_WEIGHT_SUM ||
                        (c->weight == MOE_WEIGHT_P_NORM && (after || (double)c->weight_p < 1.5)) ||
                        (c->weight == MOE_WEIGHT_RAW && after);
    const int hot = (double)c->gate_temperature < 0.99 || (double)c->gate_temperature > 1.01;
    const int over = c->weight_over != MOE_WEIGHT_OVER_ALL && (c->weight == MOE_WEIGHT_SUM ||
                                                               c->weight == MOE_WEIGHT_SOFTMAX ||
                                                               c->weight == MOE_WEIGHT_P_NORM);
    int reads_p = own_bias || c->select == MOE_SELECT_TOP_P ||
                  (c->select == MOE_SELECT_THRESHOLD && c->gate == MOE_GATE_SOFTMAX) ||
                  (c->select == MOE_SELECT_GROUPED_TOP_K && c->group_score == MOE_GROUP_TOP2_SUM);
    if (after && (c->expert_scale || c->weight == MOE_WEIGHT_SPARSEMIXER)) return 1;
    if (c->select == MOE_SELECT_EXPERT_THRESHOLD && c->gate == MOE_GATE_RELU) return 1;
    if (over && (!softened || after)) return 1;
    if (over && c->weight == MOE_WEIGHT_SOFTMAX && hot) return 1;
    if (c->gate == MOE_GATE_IDENTITY && divides && c->select != MOE_SELECT_POSITIVE) {
        /* learned ones: some are negative */
        if (c->select == MOE_SELECT_THRESHOLD)
            return c->threshold_learned ? !c->threshold_sigmoid : (double)c->threshold < 0;
        return c->select == MOE_SELECT_TOP_P || c->select == MOE_SELECT_DENSE ||
                       c->select == MOE_SELECT_EXPERT_THRESHOLD
                   ? c->n_experts > 1
                   : c->top_k > 1;
    }
    return softened && hot && reads_p && c->weight == MOE_WEIGHT_SOFTMAX;
}

static void try_combinations(int draws, int rounds, int quick) {
    static const int selections[] = {
        MOE_SELECT_TOP_K,    MOE_SELECT_DENSE, MOE_SELECT_GROUPED_TOP_K, MOE_SELECT_TOP_P,  MOE_SELECT_THRESHOLD,
        MOE_SELECT_POSITIVE, MOE_SELECT_HASH,  MOE_SELECT_SINKHORN,      MOE_SELECT_SAMPLE, MOE_SELECT_BALANCED,
        MOE_SELECT_GROUPED_EACH, MOE_SELECT_EXPERT_THRESHOLD};
    size_t s;
    int gate, weight, draw;
    long refused = 0, made = 0;
    for (gate = 0; gate < MOE_GATE_COUNT; gate++) {
        tally t;
        memset(&t, 0, sizeof t);
        for (s = 0; s < sizeof selections / sizeof selections[0]; s++)
            for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++)
                for (draw = 0; draw < draws; draw++) {
                    moe_router_config c = draw_config(gate, selections[s], weight);
                    double most = logits[below(5)];
                    moe_error error;
                    moe_status status;
                    pair q;
                    int refuse;
                    if (weight == MOE_WEIGHT_SPARSEMIXER && selections[s] != MOE_SELECT_TOP_K) continue;
                    if (c.weight_over && most > 40 * (double)c.gate_temperature) /* p of all of a set is not 0 */
                        most = 40 * (double)c.gate_temperature;
                    memset(&error, 0, sizeof error);
                    status = pair_make(&q, &c, most, 0.0, &error);
                    refuse = must_refuse(&c);
                    if (status != MOE_OK) {
                        refused++;
                        if (!CHECK(status == MOE_ERR_UNSUPPORTED &&
                                       strstr(error.message, "use weights = float") != NULL &&
                                       (refuse || (c.threshold_learned && gate == MOE_GATE_IDENTITY)),
                                   "refused only what has no integer form"))
                            printf("   %s\n", error.message);
                        continue;
                    }
                    made++;
                    CHECK(!refuse || c.threshold_learned, "what has no integer form is refused");
                    CHECK(try_pair(&q, most, rounds, 0, &t, "combination"), "integers route as floating point does");
                    pair_free(&q);
                }
        report(gate == 0   ? "softmax"
               : gate == 1 ? "sigmoid"
               : gate == 2 ? "sqrt_softplus"
               : gate == 3 ? "relu"
                           : "identity",
               &t);
        CHECK((t.usual_close * 50 < t.usual_tokens && t.close * 15 < t.tokens) || quick, "close calls are rare");
    }
    printf("%-16s %9ld routers, %ld refused\n", "combinations", made, refused);
    CHECK(made > 20 * draws, "most combinations have an integer form");
}

/* ---- refusals and errors ---- */

static moe_status plan_of(const char *settings, double step, moe_error *error, moei_int_router_plan *plan) {
    moe_router_config c;
    moe_status status;
    pair q;
    memset(&c, 0, sizeof c);
    memset(error, 0, sizeof *error);
    status = moe_fields_apply(moe_router_fields(), &c, settings, error);
    CHECK(status == MOE_OK, settings);
    status = pair_make(&q, &c, 10.0, step, error);
    if (status != MOE_OK) return status;
    if (plan != NULL) *plan = q.plan;
    pair_free(&q);
    return MOE_OK;
}

static void try_refusals(void) {
    static const struct {
        const char *settings, *said;
        int takes_float;
    } rows[] = {{"select=given", "select = given", 1},
                {"select=custom", "select = custom", 1},
                {"refine=similarity causal=1", "refine = similarity", 1},
                {"weight=p_norm weight_p=3", "weight_p = 3 has no integer form: only 1 and 2 have", 1},
                {"n_experts=257", "n_experts = 257", 1},
                {"renormalize=after expert_scale=1", "renormalize = after", 1},
                {"renormalize=after weight=sparsemixer", "renormalize = after", 1},
                {"gate=identity weight=sum", "gate = identity", 1},
                {"gate=identity weight=p_norm", "gate = identity", 1},
                {"gate=identity weight=raw renormalize=after", "gate = identity", 1},
                {"gate=identity select=threshold threshold=-1", "gate = identity", 1},
                {"gate_temperature=0.5 select=top_p weight=softmax", "gate_temperature = 0.5", 1},
                {"gate_temperature=1e-6 weight=sum", "gate_temperature = 1e-6", 1},
                {"loss_distill=1 student=1 freeze_at=3", "student = 1", 1}, /* at step 5 */
                {"n_zero=1 weight_over=nonzero gate=relu", "weight_over = nonzero", 1},
                {"n_zero=1 weight_over=nonzero renormalize=after", "renormalize = after", 1},
                {"n_copy=1 weight_over=real weight=softmax gate_temperature=2", "gate_temperature = 2", 1},
                {"predictor=1 select=expert_choice score=cosine", "predictor = 1 has no integer form with this", 1},
                {"select=soft", "select = soft", 0},
                {"select=expert_choice", "select = expert_choice", 0},
                {"select=affinity", "select = affinity", 0},
                {"refine=similarity", "refine = similarity", 0},
                {"refine=attention", "attention_heads = min_entropy", 0},
                {"capacity_factor=1.25", "capacity_factor_eval = 1.25", 0},
                {"drop_capacity=3", "drop_capacity = 3", 0},
                {"switch_at=9 switch_from=affinity", "switch_from = affinity", 0}};
    static const char *const good[] = {"capacity_factor=4",
                                       "capacity_factor=1 capacity_factor_eval=4",
                                       "noise=gaussian",
                                       "input=jitter",
                                       "drop_rule=st_moe",
                                       "loss_distill=1 student=1 freeze_at=6",
                                       "gate=identity select=positive",
                                       "gate=identity weight=p_norm weight_p=2",
                                       "gate=identity select=threshold threshold=0.1",
                                       "gate_temperature=1e-6 weight=one",
                                       "gate_temperature=0.5 weight=softmax",
                                       "score=competition gate=identity",
                                       "select=sample",
                                       "apply_to=input",
                                       "n_zero=1 n_copy=2 n_constant=1 weight_over=nonzero",
                                       "n_copy=1 weight_over=real weight=p_norm weight_p=2 gate=sigmoid",
                                       "router_residual=1 logit_cap=5",
                                       "renormalize=after weight=raw"};
    moe_error error;
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        CHECK(plan_of(rows[i].settings, 5.0, &error, NULL) == MOE_ERR_UNSUPPORTED && error.code == MOE_ERR_UNSUPPORTED,
              rows[i].settings);
        if (!CHECK(strncmp(error.message, rows[i].said, strlen(rows[i].said)) == 0,
                   "a refusal names the option and its value"))
            printf("   %s\n", error.message);
        CHECK((strstr(error.message, "use weights = float") != NULL) == rows[i].takes_float, rows[i].settings);
    }
    for (i = 0; i < sizeof good / sizeof good[0]; i++)
        if (!CHECK(plan_of(good[i], 5.0, &error, NULL) == MOE_OK, good[i])) printf("   %s\n", error.message);
}

/* Schedules, as inference at a step sees them. */
static void try_schedules(void) {
    moei_int_router_plan a, b;
    moe_error error;
    CHECK(plan_of("top_k=1 k_end=5 schedule_steps=10", 5.0, &error, &a) == MOE_OK && a.router.top_k == 3, "K halfway");
    CHECK(plan_of("top_k=1 k_end=5 schedule_steps=10", 99.0, &error, &a) == MOE_OK && a.router.top_k == 5,
          "K at the end");
    CHECK(plan_of("gate_temperature=2", 0.0, &error, &a) == MOE_OK &&
              plan_of("gate_temperature=4 tau_schedule=gate_temperature tau_end=1 schedule_steps=3", 2.0, &error, &b) ==
                  MOE_OK &&
              fabs((double)a.z_scale - (double)b.z_scale) < 1e-6 * (double)a.z_scale &&
              a.router.z_bits == b.router.z_bits,
          "the temperature on its way");
    CHECK(plan_of("select=threshold switch_at=4", 3.0, &error, &a) == MOE_OK &&
              a.router.select == moei_int_select_logits,
          "before the switch");
    CHECK(plan_of("select=threshold switch_at=4", 4.0, &error, &a) == MOE_OK &&
              a.router.select == moei_int_select_threshold,
          "after it");
}

static void try_plan_errors(unsigned char *table, const moe_real **tensors, moe_router_config *c,
                            moei_int_router_plan *plan) {
    static moe_real ids[4] = {0, 1, 2, 7};
    moe_error error;
    CHECK(moei_int_router_plan_make(c, tensors, 1, table, 32, plan, NULL) == MOE_OK && table[32] == 33 &&
              plan->router.bias == 0,
          "just enough room");
    CHECK(table[4] == 0 && table[5] == 0 && table[6] == 16 && table[7] == 0, "a bias of 1 is 2^20, the low byte first");
    moei_int_router_move(&plan->router, 40);
    CHECK(plan->router.bias == 40 && plan->router.scales == MOEI_INT_NONE && plan->router.thresholds == MOEI_INT_NONE &&
              plan->router.table == MOEI_INT_NONE,
          "moved offsets");
    c->selection_bias = 0;
    c->select = MOE_SELECT_HASH;
    c->table_size = 2;
    CHECK(moei_int_router_plan_make(c, tensors, 1, table, 64, plan, &error) == MOE_ERR_ARGUMENT &&
              strstr(error.message, "router.table") != NULL,
          "no table");
    tensors[MOE_ROUTER_TABLE] = ids;
    CHECK(moei_int_router_plan_make(c, tensors, 1, table, 64, plan, &error) == MOE_OK && table[3] == 7 &&
              plan->table_size == 4,
          "a table");
    ids[3] = 8;
    CHECK(moei_int_router_plan_make(c, tensors, 1, table, 64, plan, &error) == MOE_ERR_ARGUMENT,
          "an expert that is not there");
    ids[3] = (moe_real)2.5;
    CHECK(moei_int_router_plan_make(c, tensors, 1, table, 64, plan, &error) == MOE_ERR_ARGUMENT, "half an expert");
    ids[3] = 2;
    CHECK(moei_int_router_plan_make(c, tensors, 1, table, 64, plan, &error) == MOE_ERR_ARGUMENT &&
              strstr(error.message, "router.table[3]") != NULL,
          "an expert twice");
    c->weight = MOE_WEIGHT_UNIFORM;
    c->top_k = 1;
    ids[3] = 3;
}

static void try_errors(void) {
    static unsigned char table[64], kept[64];
    const moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT] = {NULL};
    static moe_real bias[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    moe_router_config c;
    moei_int_router_plan plan, before;
    moe_error error;
    moe_real wrong = 0;
    memset(&c, 0, sizeof c);
    memset(&plan, 33, sizeof plan);
    memset(table, 33, sizeof table);
    memcpy(&before, &plan, sizeof plan);
    memcpy(kept, table, sizeof kept);
    CHECK(moei_int_router_plan_make(&c, tensors, 1, NULL, 0, &plan, &error) == MOE_ERR_CONFIG &&
              strstr(error.message, "d_model = 0") != NULL,
          "d_model");
    c.d_model = 8;
    c.selection_bias = 1;
    CHECK(moei_int_router_plan_make(NULL, tensors, 1, NULL, 0, &plan, &error) == MOE_ERR_ARGUMENT, "no configuration");
    CHECK(moei_int_router_plan_make(&c, NULL, 1, NULL, 0, &plan, &error) == MOE_ERR_ARGUMENT, "no tensors");
    CHECK(moei_int_router_plan_make(&c, tensors, 1, NULL, 0, NULL, &error) == MOE_ERR_ARGUMENT, "no plan");
    CHECK(moei_int_router_plan_make(&c, tensors, 1, NULL, 0, &plan, &error) == MOE_ERR_ARGUMENT &&
              strstr(error.message, "router.selection_bias") != NULL,
          "no bias");
    tensors[MOE_ROUTER_SELECTION_BIAS] = bias;
    CHECK(moei_int_router_plan_make(&c, tensors, (moe_real)-1, NULL, 0, &plan, &error) == MOE_ERR_ARGUMENT,
          "a negative logit_most");
    CHECK(moei_int_router_plan_make(&c, tensors, (moe_real)1 / wrong, NULL, 0, &plan, &error) == MOE_ERR_ARGUMENT,
          "an infinite logit_most");
    CHECK(moei_int_router_plan_make(&c, tensors, 1, table, 31, &plan, &error) == MOE_ERR_SPACE, "too little room");
    bias[3] = 257; /* times 2^20 */
    CHECK(moei_int_router_plan_make(&c, tensors, 1, table, 64, &plan, &error) == MOE_ERR_UNSUPPORTED &&
              strstr(error.message, "router.selection_bias[3] = ") != NULL,
          "a bias beyond 2^28");
    bias[3] = 3 / wrong;
    CHECK(moei_int_router_plan_make(&c, tensors, 1, table, 64, &plan, &error) == MOE_ERR_ARGUMENT, "an infinite bias");
    CHECK(memcmp(&plan, &before, sizeof plan) == 0, "a failed call changes no plan");
    bias[3] = 3;
    CHECK(moei_int_router_plan_make(&c, tensors, 1, NULL, 0, &plan, NULL) == MOE_OK && plan.table_size == 32 &&
              memcmp(table, kept, sizeof table) == 0,
          "asking for the size");
    try_plan_errors(table, tensors, &c, &plan);
    CHECK(moei_int_router_plan_make(&c, tensors, 1, NULL, 0, &plan, &error) == MOE_OK && !plan.needs_logits &&
              plan.router.scratch == 0,
          "a table without logits");
    c.table_size = 1 << 24;
    c.top_k = 256;
    c.n_experts = 256;
    CHECK(moei_int_router_plan_make(&c, tensors, 1, NULL, 0, &plan, &error) == MOE_ERR_OVERFLOW, "a table beyond 2 GB");
}

static int32_t threshold_at(const unsigned char *table, size_t e) {
    const unsigned char *at = table + 4 * e;
    return (int32_t)(at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
}

/* Thresholds of p as what logits are compared with: those that every p passes and that none does
   are the ends of the range. */
static void try_thresholds(void) {
    static const struct {
        int gate;
        double p[4];
        int ends[4]; /* -1: all pass; 1: none does; 0: between */
    } rows[] = {{MOE_GATE_SIGMOID, {-0.5, 0, 0.25, 1}, {-1, -1, 0, 1}},
                {MOE_GATE_SIGMOID, {1.5, 0.5, 0.75, 0.25}, {1, 0, 0, 0}},
                {MOE_GATE_SQRT_SOFTPLUS, {-1, 0.5, 6.5, 1}, {-1, 0, 0, 0}},
                {MOE_GATE_SQRT_SOFTPLUS, {-1, 6.5, 27, 26}, {-1, 0, 0, 0}}}; /* exp(27^2) is infinite */
    const int32_t end = 1073741823;
    int32_t levels[4];
    static unsigned char table[64];
    moe_real thresholds[4] = {0}, updates = 1;
    const moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT] = {NULL};
    moei_int_router_plan plan;
    moe_router_config c;
    moe_error error;
    size_t i, e;
    memset(&c, 0, sizeof c);
    c.d_model = 8;
    c.n_experts = 4;
    c.select = MOE_SELECT_THRESHOLD;
    c.threshold_learned = 1;
    c.gate = MOE_GATE_SIGMOID;
    CHECK(moei_int_router_plan_make(&c, tensors, 8, NULL, 0, &plan, &error) == MOE_ERR_ARGUMENT &&
              strstr(error.message, "router.threshold") != NULL,
          "no thresholds");
    c.select = MOE_SELECT_EXPERT_THRESHOLD;
    c.threshold_learned = 0;
    for (i = 0; i < 2; i++) {
        CHECK(moei_int_router_plan_make(&c, tensors, 8, NULL, 0, &plan, &error) == MOE_ERR_ARGUMENT &&
                  strstr(error.message, i == 0 ? "router.cutoff is" : "router.cutoff_updates") != NULL,
              error.message);
        tensors[MOE_ROUTER_CUTOFF] = thresholds;
    }
    c.select = MOE_SELECT_THRESHOLD;
    c.threshold_learned = 1;
    tensors[MOE_ROUTER_THRESHOLD] = thresholds;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        c.gate = rows[i].gate;
        for (e = 0; e < 4; e++) thresholds[e] = (moe_real)rows[i].p[e];
        if (!CHECK(moei_int_router_plan_make(&c, tensors, 8, table, sizeof table, &plan, &error) == MOE_OK,
                   error.message))
            continue;
        for (e = 0; e < 4; e++) {
            levels[e] = threshold_at(table + plan.router.thresholds, e);
            CHECK(rows[i].ends[e] == (levels[e] == end) - (levels[e] == -end), "the ends of the range");
        }
        for (e = 1; e < 4; e++)
            CHECK(rows[i].ends[e - 1] != 0 || rows[i].ends[e] != 0 ||
                      (levels[e] > levels[e - 1]) == (rows[i].p[e] > rows[i].p[e - 1]),
                  "levels rise with p");
    }
    memset(thresholds, 0, sizeof thresholds); /* cutoffs that are reached count as passed */
    c.select = MOE_SELECT_EXPERT_THRESHOLD;
    c.threshold_learned = 0;
    c.gate = MOE_GATE_SIGMOID;
    tensors[MOE_ROUTER_CUTOFF_UPDATES] = &updates;
    if (CHECK(moei_int_router_plan_make(&c, tensors, 8, table, sizeof table, &plan, &error) == MOE_OK, error.message))
        CHECK(threshold_at(table + plan.router.thresholds, 0) == -1);
}

static moe_router_config learned_thresholds(void) {
    moe_router_config c;
    memset(&c, 0, sizeof c);
    c.d_model = 8;
    c.n_experts = 4;
    c.select = MOE_SELECT_THRESHOLD;
    c.threshold_learned = 1;
    return c;
}

/* sigmoid(z / T) = sigmoid(theta) where z = T theta. */
static void try_warm_thresholds(void) {
    static unsigned char table[64];
    const moe_real thresholds[4] = {1, 0, 0, 0};
    const moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT] = {NULL};
    moei_int_router_plan plan;
    moe_router_config c;
    moe_error error;
    c = learned_thresholds();
    c.threshold_sigmoid = 1;
    c.gate = MOE_GATE_SIGMOID;
    c.gate_temperature = 2;
    tensors[MOE_ROUTER_THRESHOLD] = thresholds;
    if (CHECK(moei_int_router_plan_make(&c, tensors, 8, table, sizeof table, &plan, &error) == MOE_OK, error.message))
        CHECK_NEAR(threshold_at(table + plan.router.thresholds, 0) * (double)plan.z_scale / 256, 2, 1e-3);
}

/* Weights of both signs that are divided by their sum are refused; thresholds that leave one sign
   are not. */
static void try_signs(void) {
    moe_real thresholds[4] = {0, (moe_real)0.5, 1, 2};
    size_t e;
    const moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT] = {NULL};
    moei_int_router_plan plan;
    moe_router_config c;
    moe_error error;
    c = learned_thresholds();
    c.gate = MOE_GATE_IDENTITY;
    c.weight = MOE_WEIGHT_SUM;
    CHECK(moei_int_router_plan_make(&c, tensors, 8, NULL, 0, &plan, &error) == MOE_ERR_ARGUMENT &&
              strstr(error.message, "router.threshold") != NULL,
          "no thresholds");
    tensors[MOE_ROUTER_THRESHOLD] = thresholds;
    CHECK(moei_int_router_plan_make(&c, tensors, 8, NULL, 0, &plan, &error) == MOE_OK, error.message);
    for (e = 0; e < 4; e++) {
        const moe_real was = thresholds[e];
        thresholds[e] = (moe_real)-0.25;
        CHECK(moei_int_router_plan_make(&c, tensors, 8, NULL, 0, &plan, &error) == MOE_ERR_UNSUPPORTED &&
                  strstr(error.message, "gate = identity has no integer form") != NULL,
              "a threshold below 0");
        if (e < 3) thresholds[e] = was;
    }
    c.threshold_sigmoid = 1; /* a sigmoid is above 0 */
    CHECK(moei_int_router_plan_make(&c, tensors, 8, NULL, 0, &plan, &error) == MOE_OK, error.message);
    c.threshold_sigmoid = c.threshold_learned = 0;
    c.select = MOE_SELECT_TOP_K;
    c.top_k = 2;
    c.score = MOE_SCORE_DSELECT; /* weights of one sign */
    CHECK(moei_int_router_plan_make(&c, tensors, 8, NULL, 0, &plan, &error) == MOE_OK, error.message);
    /* a table with a number below 0 */
    memset(&c, 0, sizeof c);
    c.d_model = 8;
    c.n_experts = 4;
    c.select = MOE_SELECT_HASH;
    c.top_k = 1;
    c.table_size = 4;
    thresholds[2] = -1;
    thresholds[1] = 0;
    tensors[MOE_ROUTER_TABLE] = thresholds;
    CHECK(moei_int_router_plan_make(&c, tensors, 8, NULL, 0, &plan, &error) == MOE_ERR_ARGUMENT &&
              strstr(error.message, "router.table[2] = -1") != NULL,
          error.message);
}

/* The window of sparsemixer, 2 eps, is rounded to nearest; above 1 it is everything. */
static void try_windows(void) {
    static const double eps[] = {1e-4, 0.1, 0.3, 0.75, 1.5};
    moei_int_router_plan plan;
    moe_error error;
    char text[80];
    size_t i;
    for (i = 0; i < sizeof eps / sizeof *eps; i++) {
        sprintf(text, "weight=sparsemixer sparsemixer_eps=%g select=top_k top_k=2", eps[i]);
        CHECK(plan_of(text, 5.0, &error, &plan) == MOE_OK, error.message);
        CHECK_NEAR(plan.router.threshold, eps[i] < 1 ? floor(eps[i] * 131072 + 0.5) : 131072, 0);
    }
}

/* The default and what is printed of it. */
static void try_names(void) {
    moei_int_router_plan plan;
    moe_error error;
    CHECK(plan_of("n_experts=8", 0.0, &error, &plan) == MOE_OK, "the default");
    CHECK(plan.router.gate == NULL && plan.router.select == moei_int_select_logits &&
              plan.router.values == moei_int_share_softmax && plan.router.weight == moei_int_weight_sum &&
              plan.router.scale == NULL,
          "the stages of the default");
    CHECK(plan.router.z_bits == 10 && fabs((double)plan.z_scale - 0.69314718 / 1024) < 1e-9 &&
              fabs((double)plan.weight_scale - 1) < 1e-9,
          "logits to 12.5 in octaves");
    CHECK(plan.router.most == 2 && plan.router.scratch == 2 && plan.table_size == 0 && plan.needs_logits, "its room");
    CHECK(plan_of("scale=2.5 weight=raw gate=sigmoid", 0.0, &error, &plan) == MOE_OK &&
              plan.router.scale == moei_int_scale_weights && plan.router.factor == 20480 &&
              fabs((double)plan.weight_scale - 4) < 1e-9,
          "a scale between powers of two");
    CHECK(plan_of("scale=1e-42", 0.0, &error, &plan) == MOE_OK &&
              (double)plan.weight_scale > 0.999 * ldexp(1.0, -126) &&
              (double)plan.weight_scale < 1.001 * ldexp(1.0, -126),
          "the smallest scale");
    CHECK(plan_of("scale=16", 0.0, &error, &plan) == MOE_OK && plan.router.scale == NULL &&
              fabs((double)plan.weight_scale - 16) < 1e-9,
          "a scale that is a power of two");
    CHECK(plan_of("scale=-2", 0.0, &error, &plan) == MOE_OK && plan.router.scale == moei_int_scale_weights &&
              plan.router.factor == -32767 && fabs((double)plan.weight_scale - 2) < 1e-9,
          "a scale below 0");
    CHECK(plan_of("select=grouped_top_k groups=4 groups_kept=2 group_score=top2_sum", 0.0, &error, &plan) == MOE_OK &&
              plan.router.gate == moei_int_gate_softmax && plan.router.scratch == 8 + 4,
          "sums of two p, and room for those of the groups");
}

int main(int argc, char **argv) {
    const int quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    moe_rng_seed(&rng, 20);
    CASE(by_hand());
    CASE(hash_all());
    printf("hash %08lx\n", (unsigned long)fnv);
    test_case("hash");
    CHECK(fnv == 0x4aac30feul, "the hash of all integer results");
    CASE(try_names());
    CASE(try_presets(quick ? 20 : 400, quick));
    CASE(try_combinations(quick ? 3 : 60, quick ? 5 : 25, quick));
    CASE(try_refusals());
    CASE(try_schedules());
    CASE(try_errors());
    CASE(try_thresholds());
    CASE(try_warm_thresholds());
    CASE(try_signs());
    CASE(try_windows());
    return test_end();
}
#endif
