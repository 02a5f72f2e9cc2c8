/* routers.c - what moe_routers.h promises: messages, text, presets, plans, edges, and random
   routings against a naive reference.

     cc -std=c99 -O2 -I. tests/unit/routers.c -o routers -lm && ./routers
     (also with -DMOE_REAL=double, and as C++)

   Only moe_routers.h is included: it must work without the rest. Exit status 1 if a check
   failed. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../../moe_routers.h"
#include "../test.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MOE_REAL_IS_DOUBLE
#define NEAR 1e-9
#else
#define NEAR 1e-4
#endif

static int quick; /* "routers quick" draws fewer numbers and configurations */
static moe_rng rng;

static moe_real *normals(size_t count, double spread) { return normals_of(&rng, count, spread); }

static int below(int n) { return (int)moe_rng_below(&rng, (uint64_t)n); }

static int near(double a, double b) { return fabs(a - b) <= NEAR * (1.0 + fabs(b)); }

static moe_router_config small_config(void) {
    moe_router_config c;
    memset(&c, 0, sizeof c);
    c.d_model = 8;
    c.n_experts = 4;
    c.top_k = 2;
    return c;
}

static moe_router_config config_of(const char *settings) {
    moe_router_config c = small_config();
    moe_error error;
    if (!CHECK(moe_fields_apply(moe_router_fields(), &c, settings, &error) == MOE_OK, settings))
        printf("  %s\n", error.message);
    return c;
}

/* ---- a router with random tensors, one call, its routing ---- */

typedef struct bench {
    moe_router router;
    moe_call call;
    moe_routing routing;
    moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT], *x, *router_x, *nodes, *noise, *jitter, *previous_input,
        *previous_weights, *attention, *outputs;
    moe_real *teacher, *own_weight; /* own_weight [E,d]: of the custom score */
    unsigned char *mask;
    int32_t *given, *token_ids, *previous_experts, *home, *expert_machine;
    moe_rng rng;
    void *memory;
    size_t size;
    moe_status status;
} bench;

static void bench_route(bench *b) {
    free(b->memory);
    b->memory = NULL;
    memset(&b->routing, 0, sizeof b->routing);
    moe_rng_seed(&b->rng, 3); /* the same draws each time */
    b->status = moe_route_size(&b->router, b->call.n_tokens, b->call.training, &b->size);
    if (b->status != MOE_OK) return;
    b->memory = grab(b->size, 1);
    memset(b->memory, 0x55, b->size); /* numbers of an earlier call */
    b->status = moe_route(&b->router, &b->call, b->memory, b->size, &b->routing);
}

static int32_t *integers(size_t n, int limit) {
    int32_t *v = (int32_t *)grab(n, sizeof *v);
    size_t i;
    for (i = 0; i < n; i++) v[i] = (int32_t)below(limit);
    return v;
}

/* A score of the test's own: linear, by plain loops. */
static moe_status own_score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                            moe_real *logits) {
    const bench *b = (const bench *)ctx;
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts, t, e, q;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++) {
            moe_real sum = 0;
            for (q = 0; q < d; q++) sum += u[t * d + q] * b->own_weight[e * d + q];
            logits[t * experts + e] = sum;
        }
    return MOE_OK;
}

static moe_status own_score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                     const moe_real *d_logits, moe_real *d_u, moe_real *d_parameters) {
    const bench *b = (const bench *)ctx;
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts, t, e, q;
    (void)u;
    (void)d_parameters;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++)
            for (q = 0; q < d; q++) d_u[t * d + q] += d_logits[t * experts + e] * b->own_weight[e * d + q];
    return MOE_OK;
}

/* A selection of the test's own: expert 0 and all with a larger p. */
static moe_status own_select(void *ctx, const moe_router *router, const moe_call *call, const moe_real *logits,
                             const moe_real *probabilities, unsigned char *chosen) {
    size_t experts = (size_t)router->config.n_experts, t, e;
    (void)ctx;
    (void)logits;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++)
            chosen[t * experts + e] = e == 0 || probabilities[t * experts + e] > probabilities[t * experts];
    return MOE_OK;
}

/* All that some stage may ask of a call. */
static void supply(bench *b, double spread) {
    const moe_router_config *c = &b->router.config;
    size_t n = b->call.n_tokens, d = (size_t)c->d_model;
    size_t experts = (size_t)c->n_experts, k = most_choices(c);
    size_t heads = (size_t)c->heads, i;
    b->call.rng = &b->rng;
    b->call.activation_width =
        c->score == MOE_SCORE_ATTENTIVE ? (c->router_hidden > 0 ? (size_t)c->router_hidden : d) : 5;
    b->call.activations = b->nodes = normals(n * b->call.activation_width * experts, spread);
    if (c->select == MOE_SELECT_GIVEN) { /* with other selections it would take their place */
        b->call.given = b->given = integers(n * k, 1);
        for (i = 0; i < n * k; i++) b->given[i] = (int32_t)(i % k);
    }
    b->call.teacher = b->teacher = normals(n * experts, 1.0);
    b->own_weight = normals(experts * d, spread);
    b->router.custom.ctx = b;
    b->router.custom.score = own_score;
    b->router.custom.score_backward = own_score_backward;
    b->router.custom.select = own_select;
    b->call.token_ids = b->token_ids = integers(n, c->table_size > 0 ? c->table_size : 1);
    b->call.previous_input = b->previous_input = normals(n * d, 1.0);
    b->call.previous_experts = b->previous_experts = integers(n, c->n_experts);
    b->call.previous_weights = b->previous_weights = normals(n, 1.0);
    b->call.n_previous = 1;
    b->call.attention_weights = b->attention = normals(heads * n * n, 1.0);
    for (i = 0; i < heads * n * n; i++) b->attention[i] = (moe_real)fabs((double)b->attention[i]);
    b->call.attention_outputs = b->call.attention_output = b->outputs = normals(heads * n * d, 1.0);
    b->call.token_machine = b->home = integers(n, c->nodes);
    b->call.expert_machine = b->expert_machine = integers(experts, c->nodes);
}

/* spread of the tensors: 0 gives logits that are all equal. */
static int bench_start(bench *b, const moe_router_config *config, const moe_kernels *kernels, size_t n, double spread) {
    moe_parameter slot;
    moe_error error;
    size_t i;
    int place;
    memset(b, 0, sizeof *b);
    b->status = moe_router_init(&b->router, config, kernels, &error);
    if (!CHECK(b->status == MOE_OK, "moe_router_init")) {
        printf("  %s\n", error.message);
        return 0;
    }
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++) {
        if (moe_router_parameter(&b->router.config, place, &slot) != MOE_OK) continue;
        b->router.tensors[place] = b->tensors[place] = normals(slot.count, spread);
        if (place == MOE_ROUTER_TEMPERATURE) b->tensors[place][0] = (moe_real)0.5;
        if (place == MOE_ROUTER_STEP) b->tensors[place][0] = (moe_real)below(8);
        if (place == MOE_ROUTER_L1) b->tensors[place][0] = 1;
        if (place == MOE_ROUTER_CUTOFF_UPDATES) b->tensors[place][0] = (moe_real)below(4);
        if (place == MOE_ROUTER_CAPACITY) b->tensors[place][0] = (moe_real)(1.5 * below(2));
        for (i = 0; i < slot.count && place == MOE_ROUTER_LOAD; i++) b->tensors[place][i] = 0;
        for (i = 0; i < slot.count && place == MOE_ROUTER_TABLE; i++)
            b->tensors[place][i] =
                (moe_real)((i / slot.shape[1] + i % slot.shape[1]) % (size_t)b->router.config.n_experts);
    }
    b->call.n_tokens = n;
    b->call.x = b->x = normals(n * (size_t)b->router.config.d_model, 1.0);
    b->call.training = 1;
    supply(b, spread);
    bench_route(b);
    return b->status == MOE_OK;
}

static void bench_end(bench *b) {
    int place;
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++) free(b->tensors[place]);
    free(b->x);
    free(b->router_x);
    free(b->nodes);
    free(b->mask);
    free(b->given);
    free(b->memory);
    free(b->noise);
    free(b->jitter);
    free(b->token_ids);
    free(b->previous_input);
    free(b->previous_experts);
    free(b->previous_weights);
    free(b->attention);
    free(b->outputs);
    free(b->home);
    free(b->expert_machine);
    free(b->teacher);
    free(b->own_weight);
}

static void mask_some(bench *b) {
    size_t t;
    b->call.mask = b->mask = (unsigned char *)grab(b->call.n_tokens, 1);
    for (t = 0; t < b->call.n_tokens; t++) b->mask[t] = below(3) > 0;
}

static int is_real(const bench *b, size_t t) { return b->call.mask == NULL || b->call.mask[t]; }

static int all_zero(const moe_real *v, size_t n) {
    size_t i;
    for (i = 0; i < n; i++)
        if (v[i] < 0 || v[i] > 0 || !moe_is_finite(v[i])) return 0;
    return 1;
}

/* A call that must fail with status and leave *routing as it was. */
static void expect_call_refused(bench *b, moe_status status, const char *what) {
    moe_routing routing;
    unsigned char kept[sizeof routing];
    memset(&routing, 99, sizeof routing);
    memcpy(kept, &routing, sizeof routing);
    CHECK(moe_route(&b->router, &b->call, b->memory, b->size, &routing) == status, what);
    CHECK(same_bits(kept, &routing, sizeof routing), "a failed call leaves the routing as it was");
}

/* The same, and the error says `words`. */
static void expect_call_says(bench *b, moe_status status, const char *words) {
    moe_error error;
    error.message[0] = '\0';
    b->call.error = &error;
    expect_call_refused(b, status, words);
    CHECKF(strstr(error.message, words) != NULL, "\"%s\" does not say \"%s\"", error.message, words);
    b->call.error = NULL;
}

/* ---- fields: ranges, clashes, text ---- */

static void put_int(void *config, const moe_field *f, int value) {
    memcpy((char *)config + f->offset, &value, sizeof value);
}

static void put_real(void *config, const moe_field *f, double value) {
    moe_real real = (moe_real)value;
    memcpy((char *)config + f->offset, &real, sizeof real);
}

/* config must be refused with a message that holds both texts; out stays untouched. */
static void expect_refused(const moe_router_config *config, const char *one, const char *two) {
    moe_router_config out;
    moe_error error;
    unsigned char kept[sizeof out];
    memset(&out, 77, sizeof out);
    memcpy(kept, &out, sizeof out);
    memset(&error, 0, sizeof error);
    if (!CHECK(moe_router_check(config, &out, &error) == MOE_ERR_CONFIG, one)) return;
    CHECK(error.code == MOE_ERR_CONFIG, "code of the error");
    CHECK(same_bits(kept, &out, sizeof out), "a failed check leaves *out as it was");
    if (!CHECK(strstr(error.message, one) != NULL && strstr(error.message, two) != NULL,
               "the message names what clashes"))
        printf("  %s, %s: %s\n", one, two, error.message);
    CHECK(moe_router_check(config, NULL, NULL) == MOE_ERR_CONFIG, "out and error may be NULL");
}

static void expect_int_refused(const moe_field *f, int value) {
    moe_router_config c = small_config();
    char text[40];
    put_int(&c, f, value);
    sprintf(text, "= %d", value);
    expect_refused(&c, f->name, text);
}

static void expect_real_refused(const moe_field *f, double value, const char *text) {
    moe_router_config c = small_config();
    put_real(&c, f, value);
    expect_refused(&c, f->name, text);
}

static void test_ranges(void) {
    const moe_field *f;
    moe_router_config c = small_config();
    for (f = moe_router_fields(); f->name != NULL; f++) {
        if (f->kind == MOE_FIELD_REAL) {
            expect_real_refused(f, f->max * 2.0, "= ");
            expect_real_refused(f, f->min < 0.0 ? f->min * 2.0 : -1.0, "= -");
            if (f->min > 0.0) expect_real_refused(f, f->min / 2.0, "= ");
            expect_real_refused(f, HUGE_VAL, "inf");
            expect_real_refused(f, -HUGE_VAL, "-inf");
            expect_real_refused(f, HUGE_VAL - HUGE_VAL, "nan");
        } else {
            expect_int_refused(f, (int)f->max + 1);
            expect_int_refused(f, f->min < 0 ? (int)f->min - 1 : -1);
            expect_int_refused(f, INT_MIN);
            expect_int_refused(f, INT_MAX);
        }
    }
    c.d_model = 0;
    expect_refused(&c, "d_model", "= 0");
    CHECK(moe_router_check(NULL, NULL, NULL) == MOE_ERR_ARGUMENT, "config NULL");
    memset(&c, 0, sizeof c);
    c.d_model = 3;
    CHECK(moe_router_check(&c, &c, NULL) == MOE_OK && c.n_experts == 8 && c.top_k == 2 && near((double)c.scale, 1.0),
          "out may be config itself");
}

static void test_clashes(void) {
    static const char *const rows[][3] = {
        {"n_experts=4 top_k=5", "top_k = 5", "n_experts = 4"},
        {"n_experts=1 top_k=2", "top_k = 2", "n_experts = 1"},
        {"weight=sparsemixer select=dense", "sparsemixer", "select = dense"},
        {"weight=sparsemixer select=given", "sparsemixer", "select = given"},
        {"weight=sparsemixer selection_bias=1", "sparsemixer", "selection_bias"},
        {"score=mlp router_bias=1", "router_bias", "score = mlp"},
        {"score=cosine router_bias=1", "router_bias", "score = cosine"},
        {"score=norm router_bias=1", "router_bias", "score = norm"},
        {"cosine_dim=3", "cosine_dim", "score = linear"},
        {"score=mlp cosine_dim=3", "cosine_dim", "score = mlp"},
        {"score=random cosine_keep_length=1", "cosine_keep_length", "score = random"},
        {"score=norm cosine_learn_tau=1", "cosine_learn_tau", "score = norm"},
        {"select=soft score=mlp", "score = mlp", "select = soft"},
        {"select=soft router_bias=1", "router_bias", "select = soft"},
        {"select=soft noise=gaussian", "noise = gaussian", "select = soft"},
        {"select=soft gate=sigmoid", "gate = sigmoid", "select = soft"},
        {"select=soft refine=similarity", "refine = similarity", "select = soft"},
        {"select=soft selection_bias=1", "selection_bias", "select = soft"},
        {"select=soft weight=raw", "weight = raw", "select = soft"},
        {"select=soft expert_scale=1", "expert_scale", "select = soft"},
        {"select=soft apply_to=input", "apply_to = input", "select = soft"},
        {"select=soft loss_z=0.5", "loss_z = 0.5", "select = soft"},
        {"select=soft drop_capacity=2", "drop_capacity = 2", "select = soft"},
        {"slots=2", "slots", "select = top_k"},
        {"soft_normalise=1 select=dense", "soft_normalise", "select = dense"},
        {"soft_sequences=2", "soft_sequences", "select = top_k"},
        {"refine=similarity weight=softmax", "weight = softmax", "refine = similarity"},
        {"refine=attention weight=sparsemixer", "weight = sparsemixer", "refine = attention"},
        {"similarity_learned=1", "similarity_learned", "refine = none"},
        {"similarity_learned=1 refine=attention", "similarity_learned", "refine = attention"},
        {"causal=1", "causal", "refine = none"},
        {"lower_entropy_only=1", "lower_entropy_only", "refine = none"},
        {"refine=attention heads=2 attention_heads=fixed attention_head=2", "attention_head = 2", "heads = 2"},
        {"loss_load=0.5", "loss_load = 0.5", "noise = none"},
        {"loss_load=0.5 noise=gumbel", "loss_load = 0.5", "noise = gumbel"},
        {"score=grap n_experts=3", "n_experts = 3", "d_model = 8"},
        {"grap_cosine=1", "grap_cosine", "score = linear"},
        {"select=grouped_top_k groups=3", "groups = 3", "n_experts = 4"},
        {"select=grouped_top_k groups=2 groups_kept=3", "groups_kept = 3", "groups = 2"},
        {"select=grouped_top_k groups=4 groups_kept=1", "top_k = 2", "groups_kept = 1"},
        {"groups=2", "groups = 2", "select = top_k"},
        {"threshold_learned=1", "threshold_learned", "select = top_k"},
        {"threshold_learned=1 select=threshold weight=softmax", "threshold_learned", "weight = softmax"},
        {"threshold_sigmoid=1 select=threshold", "threshold_sigmoid = 1", "threshold_learned"},
        {"threshold_sigmoid=1 threshold_learned=1 threshold=1.5 select=threshold", "threshold = 1.5",
         "threshold_sigmoid = 1"},
        {"select=hash", "table_size = 0", "select = hash"},
        {"table_size=3", "table_size = 3", "select = top_k"},
        {"loss_orthogonal=0.5 score=mlp", "loss_orthogonal = 0.5", "score = mlp"},
        {"loss_locality=0.5", "loss_locality = 0.5", "nodes"},
        {"select=balanced", "select = balanced", "top_k = 2"},
        {"bias_rate=0.5", "bias_rate = 0.5", "selection_bias"},
        {"ac_rho=0.5", "ac_rho = 0.5", "ac_mode = running"},
        {"k_end=5", "k_end = 5", "n_experts = 4"},
        {"k_end=5 schedule_steps=9", "k_end = 5", "n_experts = 4"},
        {"k_end=3 schedule_steps=9 score=dselect", "k_end = 3", "score = dselect"},
        {"k_end=3 schedule_steps=9 select=top_p", "k_end = 3", "select = top_p"},
        {"k_end=1 schedule_steps=9 select=balanced top_k=1", "k_end = 1", "select = balanced"},
        {"schedule_steps=9", "schedule_steps = 9", "k_end"},
        {"switch_share=0.5 switch_at=3 switch_from=dense", "switch_share = 0.5", "switch_at"},
        {"jitter_eps=0.2", "jitter_eps = 0.2", "input = plain"},
        {"ac_spread=variance", "ac_spread = variance", "input = plain"},
        {"input=adaptive_clustering ac_mode=random ac_lambda=2", "ac_lambda = 2", "ac_mode = random"},
        {"cosine_tau=2", "cosine_tau = 2", "score = linear"},
        {"norm_order=l1", "norm_order = l1", "score = linear"},
        {"router_act=silu", "router_act = silu", "score = linear"},
        {"noise=gaussian noise_floor=1", "noise_floor = 1", "noise = gaussian"},
        {"noise=gumbel noise_sigma=1", "noise_sigma = 1", "noise = gumbel"},
        {"gate=relu gate_temperature=2", "gate_temperature = 2", "gate = relu"},
        {"gate=identity gate_temperature=2", "gate_temperature = 2", "gate = identity"},
        {"refine=similarity attention_sigma=2", "attention_sigma = 2", "refine = similarity"},
        {"similarity_tau=2", "similarity_tau = 2", "refine = none"},
        {"group_score=top2_sum", "group_score = top2_sum", "select = top_k"},
        {"top_p=0.5 select=threshold", "top_p = 0.5", "select = threshold"},
        {"threshold=0.5", "threshold = 0.5", "select = top_k"},
        {"expert_choice_score=z", "expert_choice_score = z", "select = top_k"},
        {"affinity_mass=0.5", "affinity_mass = 0.5", "select = top_k"},
        {"affinity_sum_auto=0.5", "affinity_sum_auto = 0.5", "select = top_k"},
        {"capacity=3", "capacity = 3", "select = top_k"},
        {"weight_p=2", "weight_p = 2", "weight = sum"},
        {"sparsemixer_eps=2", "sparsemixer_eps = 2", "weight = sum"},
        {"balance_over=first", "balance_over = first", "loss_balance"},
        {"importance_over=weights", "importance_over = weights", "loss_importance"},
        {"selection_bias=1 select=top_p", "selection_bias = 1", "select = top_p"},
        {"selection_bias=1 select=threshold", "selection_bias = 1", "select = threshold"},
        {"selection_bias=1 select=dense", "selection_bias = 1", "select = dense"},
        {"selection_bias=1 select=positive", "selection_bias = 1", "select = positive"},
        {"selection_bias=1 select=expert_choice", "selection_bias = 1", "select = expert_choice"},
        {"selection_bias=1 select=sinkhorn", "selection_bias = 1", "select = sinkhorn"},
        {"noise=gaussian select=hash table_size=3 weight=uniform", "noise = gaussian", "select = hash"},
        {"noise=gumbel select=dense weight=one", "noise = gumbel", "weight = one"},
        {"switch_share=0.5 switch_from=hash", "table_size = 0", "switch_from = hash"},
        {"switch_share=0.5 switch_from=soft", "switch_share = 0.5", "switch_from = soft"},
        {"sample_at=always", "sample_at = always", "select = top_k"},
        {"sample_scope=call", "sample_scope", "select = top_k"},
        {"sample_seed=3 select=sample", "sample_seed = 3", "sample_at = always"},
        {"affinity_sum_auto=0.5 affinity_sum=2 select=affinity", "affinity_sum_auto = 0.5", "affinity_sum = 2"},
        {"loss_diversity=1 score=mlp", "loss_diversity = 1", "score = mlp"},
        {"loss_simplicity=1 score=grap", "loss_simplicity = 1", "score = grap"},
        {"tau_schedule=gate_temperature schedule_steps=9", "tau_schedule = gate_temperature", "tau_end"},
        {"tau_end=2 k_end=1 schedule_steps=9", "tau_end = 2", "tau_schedule"},
        {"tau_schedule=cosine_tau tau_end=2 schedule_steps=9", "tau_schedule = cosine_tau", "score = cosine"},
        {"tau_schedule=cosine_tau tau_end=2 schedule_steps=9 score=cosine cosine_learn_tau=1",
         "tau_schedule = cosine_tau", "cosine_learn_tau"},
        {"tau_schedule=similarity_tau tau_end=2 schedule_steps=9 refine=attention", "tau_schedule = similarity_tau",
         "refine = similarity"},
        {"tau_schedule=attention_sigma tau_end=2 schedule_steps=9 refine=similarity", "tau_schedule = attention_sigma",
         "refine = attention"},
        {"switch_from=dense", "switch_from = dense", "switch_at"},
        {"switch_from=soft switch_at=3", "switch_from = soft", "switch_at = 3"},
        {"switch_from=hash switch_at=3", "table_size = 0", "switch_from = hash"},
        {"switch_from=grouped_each switch_at=3 groups=4", "top_k = 2", "switch_from = grouped_each"},
        {"switch_from=hash switch_at=3 table_size=3 k_end=3 schedule_steps=9", "k_end = 3", "switch_from = hash"},
        {"drop_order=random", "drop_order = random", "capacity_factor"},
        {"drop_order=score select=expert_choice", "drop_order = score", "drop_capacity"},
        {"drop_order=priority select=affinity", "drop_order = priority", "capacity_factor"},
        {"renormalize=after", "renormalize = after", "capacity_factor"},
        {"renormalize=after weight=p_norm select=expert_threshold", "renormalize = after", "drop_capacity"},
        {"capacity_min=3", "capacity_min = 3", "capacity_factor"},
        {"capacity_min=3 drop_capacity=5", "capacity_min = 3", "drop_capacity = 5"},
        {"capacity_factor=2 drop_capacity=5", "capacity_factor = 2", "drop_capacity = 5"},
        {"capacity_factor_eval=2 drop_capacity=5", "capacity_factor_eval = 2", "drop_capacity = 5"},
        {"capacity_factor_eval=2 select=expert_choice", "capacity_factor_eval = 2", "select = expert_choice"},
        {"affinity_mass=0.5 affinity_sum=2 select=affinity", "affinity_mass = 0.5", "affinity_sum = 2"},
        {"affinity_mass=0.5 affinity_sum_auto=2 select=affinity", "affinity_mass = 0.5", "affinity_sum_auto = 2"},
        {"unbiased=1", "unbiased = 1", "loss_importance"},
        {"drop_rule=gshard top_k=1", "drop_rule = gshard", "top_k = 1"},
        {"drop_rule=st_moe select=affinity", "drop_rule = st_moe", "select = affinity"},
        {"drop_rule=st_moe weight=one", "drop_rule = st_moe", "weight = one"},
        {"drop_rule=gshard weight=uniform", "drop_rule = gshard", "weight = uniform"},
        {"nodes=2", "nodes = 2", "loss_locality"},
        {"compete_rate=1 score=cosine", "compete_rate = 1", "score = linear"},
        {"compete_rate=1 select=dense", "compete_rate = 1", "select = top_k"},
        {"compete_rate=1 refine=similarity", "compete_rate = 1", "refine = none"},
        {"compete_rate=1 noise=gumbel", "compete_rate = 1", "noise = none"},
        {"compete_rate=1 weight=sparsemixer", "compete_rate = 1", "weight = sparsemixer"},
        {"compete_rate=1 selection_bias=1", "compete_rate = 1", "selection_bias = 1"},
        {"compete_rate=1 router_residual=1", "compete_rate = 1", "router_residual = 1"},
        {"compete_rate=1 logit_cap=3", "logit_cap = 3", "compete_rate = 1"},
        {"compete_rate=1 student=1 freeze_at=3 loss_distill=1", "compete_rate = 1", "student = 1"},
        {"compete_rate=1 n_copy=1", "compete_rate = 1", "n_copy = 1"},
        {"compete_from=3", "compete_from = 3", "compete_rate"},
        {"compete=norm", "compete = norm", "compete_rate"},
        {"select=grouped_each groups=4", "top_k = 2", "groups = 4"},
        {"select=grouped_each groups=3", "groups = 3", "n_experts = 4"},
        {"select=expert_threshold selection_bias=1", "selection_bias = 1", "select = expert_threshold"},
        {"select=expert_threshold capacity_factor_eval=2", "capacity_factor_eval = 2", "select = expert_threshold"},
        {"threshold_rho=0.5", "threshold_rho = 0.5", "select = expert_threshold"},
        {"select=expert_threshold k_end=3 schedule_steps=9", "k_end = 3", "select"},
        {"logit_cap=3 score=dselect", "logit_cap = 3", "score = dselect"},
        {"logit_cap=3 select=soft", "logit_cap = 3", "select = soft"},
        {"sparsemixer_sample=1", "sparsemixer_sample = 1", "weight = sparsemixer"},
        {"expert_dropout=0.1 select=top_p", "expert_dropout = 0.1", "select = top_p"},
        {"expert_dropout=0.1 select=soft", "expert_dropout = 0.1", "select = soft"},
        {"expert_dropout=0.1 switch_at=3 switch_from=top_p", "expert_dropout = 0.1", "switch_from = top_p"},
        {"expert_dropout=0.1 weight=sparsemixer", "expert_dropout = 0.1", "weight = sparsemixer"},
        {"expert_dropout_scope=call", "expert_dropout_scope = call", "expert_dropout"},
        {"expert_dropout=1", "expert_dropout = 1", "0.999999"},
        {"loss_selector_entropy=1", "loss_selector_entropy = 1", "score = dselect"},
        {"loss_selector_reach=1 n_experts=5", "loss_selector_reach = 1", "score = dselect"},
        {"loss_selector_reach=1 score=dselect", "loss_selector_reach = 1", "n_experts = 4"},
        {"loss_stable_balance=1 select=soft", "loss_stable_balance = 1", "select = soft"},
        {"bias_rule=smebu selection_bias=1", "bias_rule = smebu", "bias_rate"},
        {"bias_centre=1 selection_bias=1", "bias_centre = 1", "bias_rate"},
        {"bias_real=1 bias_rate=1 selection_bias=1", "bias_real", "n_zero"},
        {"bias_real=3 bias_rate=1 selection_bias=1 n_copy=1", "bias_real = 3", "top_k = 2"},
        {"bias_real=1 n_copy=1", "bias_real = 1", "bias_rate"},
        {"bias_kappa=3 bias_rate=1 selection_bias=1", "bias_kappa = 3", "bias_rule = smebu"},
        {"bias_beta=0.25 bias_rate=1 selection_bias=1", "bias_beta = 0.25", "bias_rule = smebu"},
        {"switch_from=grouped_top_k switch_at=3 groups=2 top_k=3", "top_k = 3", "groups_kept = 1"},
        {"switch_from=balanced switch_at=3", "switch_from = balanced", "top_k = 2"},
        {"switch_at=3 select=soft", "switch_at = 3", "select = soft"},
        {"switch_at=3 switch_from=dense weight=sparsemixer", "switch_at = 3", "weight = sparsemixer"},
        {"l1_controller=layer", "l1_controller = layer", "select = positive"},
        {"capacity_bound=every score=mlp", "capacity_bound = every", "score = mlp"},
        {"capacity_bound=first score=dselect", "capacity_bound = first", "score = dselect"},
        {"capacity_bound=first score=custom", "capacity_bound = first", "score = custom"},
        {"capacity_bound=first select=soft", "capacity_bound = first", "select = soft"},
        {"capacity_bound=first select=expert_choice", "capacity_bound = first", "select = expert_choice"},
        {"capacity_rho=0.5 capacity_bound=first", "capacity_rho = 0.5", "capacity_bound = every"},
        {"student=1 loss_distill=1", "student = 1", "freeze_at"},
        {"student_dim=3", "student_dim = 3", "student"},
        {"student=1 loss_distill=1 freeze_at=3 student_dim=3", "student_dim = 3", "table_size"},
        {"predictor=1 loss_predictor=1", "predictor = 1", "select = top_k"},
        {"loss_predictor=1 select=expert_choice", "loss_predictor = 1", "predictor"},
        {"predictor=1 loss_predictor=1 select=expert_choice student=1 freeze_at=3 loss_distill=1", "predictor = 1",
         "student = 1"},
        {"expert_choice_scope=sequences", "expert_choice_scope = sequences", "select = top_k"},
        {"student=1 freeze_at=9", "student = 1", "loss_distill"},
        {"student=1 freeze_at=9 loss_distill=1 select=soft", "student = 1", "select = soft"},
        {"student=1 freeze_at=9 loss_distill=1 weight=sparsemixer", "student = 1", "weight = sparsemixer"},
        {"distill=mse", "distill = mse", "loss_distill"},
        {"select=soft loss_distill=1", "loss_distill = 1", "select = soft"},
        {"select=soft expert_temperature=2", "expert_temperature = 2", "select = soft"},
        {"custom_batch=1", "custom_batch = 1", "custom"},
        {"n_zero=4", "n_zero = 4", "n_experts = 4"},
        {"n_zero=1 n_copy=2 n_constant=1", "n_copy = 2", "n_experts = 4"},
        {"n_zero=1 score=norm", "n_zero = 1", "score = norm"},
        {"n_copy=1 score=attentive", "n_copy = 1", "score = attentive"},
        {"n_constant=1 score=competition", "n_constant = 1", "score = competition"},
        {"n_zero=1 select=soft", "n_zero = 1", "select = soft"},
        {"n_copy=1 select=soft", "n_copy = 1", "select = soft"},
        {"n_constant=1 select=soft", "n_constant = 1", "select = soft"},
        {"router_residual=1 select=soft", "router_residual = 1", "select = soft"},
        {"router_residual=1 score=dselect", "router_residual = 1", "score = dselect"},
        {"weight_over=real", "weight_over = real", "n_zero"},
        {"weight_over=nonzero n_copy=1", "weight_over = nonzero", "n_zero"},
        {"weight_over=real n_copy=1 weight=raw", "weight_over = real", "weight = raw"},
        {"zero_average=1 loss_balance=1", "zero_average = 1", "n_zero"},
        {"zero_average=1 n_zero=2", "zero_average = 1", "loss_balance"},
        {"zero_tau=0.5 loss_balance=1", "zero_tau", "n_zero"},
        {"zero_tau=0.5 n_zero=1", "zero_tau = 0.5", "loss_balance"},
        {"zero_tau=0.5 n_zero=1 drop_capacity=2", "zero_tau = 0.5", "capacity_factor"},
        {"zero_tau=0.5 n_zero=1 select=expert_choice", "zero_tau = 0.5", "capacity_factor"},
        {"select=soft gate_temperature=2", "gate_temperature = 2", "select = soft"},
        {"select=soft drop_rule=gshard", "drop_rule = gshard", "select = soft"},
        {"select=soft capacity_factor_eval=2", "capacity_factor_eval = 2", "select = soft"},
        {"select=soft tau_schedule=gate_temperature tau_end=2", "tau_schedule = gate_temperature", "select = soft"},
        {"gate=relu tau_schedule=gate_temperature tau_end=2", "tau_schedule = gate_temperature", "gate = relu"},
        {"capacity_min=3 select=expert_choice", "capacity_min = 3", "select = expert_choice"},
        {"capacity_min=3 select=expert_threshold", "capacity_min = 3", "select = expert_threshold"},
        {"capacity_min=3 select=expert_threshold switch_at=3", "capacity_min = 3", "select = expert_threshold"},
        {"capacity_factor_eval=3 select=expert_threshold switch_at=3", "capacity_factor_eval = 3",
         "select = expert_threshold"},
        {"switch_at=3", "switch_at = 3", "select = top_k"},
        {"switch_share=0.5 switch_from=dense select=dense", "switch_from = dense", "select = dense"},
        {"n_copy=1 loss_balance=1 zero_average=1", "zero_average = 1", "n_copy = 1"},
        {"loss_stable_balance=1 select=dense", "loss_stable_balance = 1", "select = dense"},
        {"loss_stable_balance=1 select=expert_choice", "loss_stable_balance = 1", "select = expert_choice"},
        {"apply_to=input weight=one", "apply_to = input", "weight = one"},
        {"input=jitter score=norm", "input = jitter", "score = norm"},
        {"raw_input=1 score=competition", "raw_input = 1", "score = competition"}};
    static const char *const fine[] = {"top_k=4",
                                       "capacity_min=3 select=expert_choice switch_at=3",
                                       "loss_stable_balance=1 select=dense expert_dropout=0.1",
                                       "loss_stable_balance=1 select=dense switch_at=3",
                                       "apply_to=input weight=one scale=2",
                                       "apply_to=input weight=one renormalize=after drop_capacity=2",
                                       "input=jitter score=norm refine=similarity",
                                       "n_copy=2 loss_balance=1 zero_average=1",
                                       "n_experts=1 top_k=1",
                                       "weight=sparsemixer",
                                       "score=random router_bias=1",
                                       "router_bias=1",
                                       "score=cosine cosine_dim=3 cosine_keep_length=1 cosine_learn_tau=1",
                                       "n_experts=1 top_k=0",
                                       "select=soft slots=3 soft_normalise=1 soft_sequences=4",
                                       "refine=similarity similarity_learned=1 causal=1 lower_entropy_only=1",
                                       "refine=attention heads=3 attention_heads=fixed attention_head=2",
                                       "noise=gaussian loss_load=0.1",
                                       "score=grap grap_cosine=1",
                                       "select=grouped_top_k groups=2 groups_kept=1",
                                       "select=threshold threshold_learned=1",
                                       "select=hash table_size=10",
                                       "loss_orthogonal=0.1",
                                       "loss_locality=0.1 nodes=4",
                                       "select=affinity affinity_sum=3 capacity=2 capacity_min=1",
                                       "input=adaptive_clustering ac_mode=code ac_lambda=0.5",
                                       "drop_capacity=3 drop_order=score renormalize=after",
                                       "select=balanced top_k=1",
                                       "selection_bias=1 bias_rate=0.5",
                                       "input=adaptive_clustering ac_mode=running ac_rho=0.5",
                                       "k_end=4 schedule_steps=9 switch_at=3 switch_from=dense freeze_at=12",
                                       "tau_schedule=cosine_tau tau_end=2 schedule_steps=9 score=cosine",
                                       "tau_schedule=similarity_tau tau_end=2 schedule_steps=9 refine=similarity",
                                       "tau_schedule=attention_sigma tau_end=2 schedule_steps=9 refine=attention",
                                       "switch_from=balanced switch_at=3 top_k=1",
                                       "l1_controller=1 select=positive",
                                       "capacity_bound=every capacity_rho=0.5 score=grap",
                                       "student=1 freeze_at=9 loss_distill=1 distill=mse",
                                       "score=custom custom_batch=1",
                                       "select=custom custom_batch=1",
                                       "score=dselect gate=identity select=positive"};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_router_config c = config_of(rows[i][0]);
        expect_refused(&c, rows[i][1], rows[i][2]);
    }
    for (i = 0; i < sizeof fine / sizeof fine[0]; i++) {
        moe_router_config c = config_of(fine[i]);
        CHECK(moe_router_check(&c, NULL, NULL) == MOE_OK, fine[i]);
    }
}

/* Settings without effect that files have, because their tensors are there: they stay. */
static void test_idle_in_files(void) {
    static const char *const rows[] = {"score=competition input=scaled_rms",
                                       "switch_from=top_k switch_at=3",
                                       "gate=relu tau_schedule=gate_temperature tau_end=0.5 schedule_steps=9",
                                       "select=top_p selection_bias=1"};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_router_config c = config_of(rows[i]), out;
        moe_error error;
        CHECK(moe_router_check(&c, NULL, NULL) == MOE_ERR_CONFIG, rows[i]);
        c.preset = MOEI_OF_A_FILE;
        if (!CHECK_STATUS(moe_router_check(&c, &out, &error), MOE_OK, rows[i])) continue;
        CHECK(out.input == c.input && out.switch_at == c.switch_at && out.switch_from == c.switch_from &&
                  out.tau_schedule == c.tau_schedule && out.selection_bias == c.selection_bias,
              rows[i]);
    }
}

/* Settings that look idle, but have an effect. */
static void check_effects(void) {
    static const char *const settings[] = {
        "noise=gaussian select=dense weight=one loss_z=0.1",   "drop_rule=gshard weight=uniform top_k=3",
        "drop_rule=st_moe weight=uniform n_experts=8 top_k=6", "weight=softmax expert_scale=1 renormalize=after",
        "custom_batch=1 switch_at=3 switch_from=custom",       "custom_batch=1 select=custom"};
    moe_error error;
    size_t i;
    for (i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        moe_router_config c = config_of(settings[i]);
        if (!CHECK(moe_router_check(&c, NULL, &error) == MOE_OK, settings[i])) printf("  %s\n", error.message);
    }
}

/* Defaults that follow from other fields. */
static void check_defaults(void) {
    moe_router_config c = config_of("select=expert_choice"), full;
    if (CHECK(moe_router_check(&c, &full, NULL) == MOE_OK))
        CHECK(near((double)full.capacity_factor, 1.0) && near((double)full.capacity_factor_eval, 1.0),
              "evaluation has the factor of training");
    c = config_of("switch_at=3 switch_from=expert_threshold");
    if (CHECK(moe_router_check(&c, &full, NULL) == MOE_OK))
        CHECK(near((double)full.threshold_rho, 0.99), "of an earlier selection, too");
    c = config_of("compete_rate=1 loss_distill=0.5");
    CHECK(!(moe_router_traits(&c) & MOE_TRAIT_STOCHASTIC), "experts that always compete are not drawn");
    c.compete_rate = (moe_real)0.5;
    CHECK(moe_router_traits(&c) & MOE_TRAIT_STOCHASTIC, "those of half of the calls are");
}

/* K = 1 with a weight that is always 1. */
static void test_training_check(void) {
    static const char *const refused[] = {"top_k=1",
                                          "top_k=1 weight=softmax",
                                          "top_k=1 score=mlp",
                                          "top_k=1 score=cosine weight=softmax",
                                          "top_k=1 weight=p_norm",
                                          "n_experts=1 top_k=0"};
    static const char *const fine[] = {"top_k=2",
                                       "top_k=1 weight=raw",
                                       "top_k=1 untrained=1",
                                       "top_k=1 k_end=2 schedule_steps=9",
                                       "top_k=1 loss_balance=0.01",
                                       "top_k=1 loss_z=0.1",
                                       "top_k=1 score=norm",
                                       "top_k=1 score=random weight=softmax",
                                       "top_k=1 loss_entropy=0.1",
                                       "top_k=1 loss_importance=0.1",
                                       "top_k=1 select=dense"};
    moe_error error;
    size_t i;
    for (i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        moe_router_config c = config_of(refused[i]);
        CHECK(moe_router_check(&c, NULL, NULL) == MOE_OK, "good for inference");
        error.message[0] = '\0';
        CHECK(moe_router_check_training(&c, &error) == MOE_ERR_CONFIG, refused[i]);
        CHECK(strstr(error.message, "top_k = 1") != NULL && strstr(error.message, "weight") != NULL,
              "the message names top_k and weight");
    }
    for (i = 0; i < sizeof fine / sizeof fine[0]; i++) {
        moe_router_config c = config_of(fine[i]);
        CHECK(moe_router_check_training(&c, NULL) == MOE_OK, fine[i]);
    }
    check_effects();
    check_defaults();
}

/* Setting name to value must fail, say both, and change nothing. */
static void expect_not_set(const char *name, const char *value, moe_status want) {
    moe_router_config c = small_config(), kept = c;
    moe_error error;
    error.message[0] = '\0';
    CHECK(moe_field_set(moe_router_fields(), &c, name, value, &error) == want, value);
    CHECK(same_bits(&c, &kept, sizeof c), "a failed set changes nothing");
    if (!CHECK(strstr(error.message, name) != NULL, "the message names the field")) printf("  %s\n", error.message);
    if (want == MOE_ERR_CONFIG && !CHECK(strstr(error.message, value) != NULL, "the message names the value"))
        printf("  %s\n", error.message);
    CHECK(moe_field_set(moe_router_fields(), &c, name, value, NULL) == want, "error may be NULL");
}

static void test_setting(void) {
    static const char *const bad_numbers[] = {"",   "x",  "2x", "1..2", "-",   "+",   ".",     "e5",
                                              "1e", " 2", "2 ", "0x10", "inf", "nan", "1e999", "--1"};
    static const char *const no_integers[] = {"0.5", "1e30", "16777217", "1.00000001"}; /* 2^24 + 1 */
    static const char *const bad_settings[] = {"top_k",
                                               "top_k 3",
                                               "=3",
                                               "top_k=",
                                               "top_k=2 bogus=1",
                                               "a_name_that_is_far_too_long_for_any_field_there_is=1",
                                               "top_k=2,weight=raw"};
    moe_router_config zero, c;
    const moe_field *f;
    moe_error error;
    size_t i;
    expect_not_set("bogus", "1", MOE_ERR_NOT_FOUND);
    expect_not_set("Top_K", "1", MOE_ERR_NOT_FOUND);
    for (f = moe_router_fields(); f->name != NULL; f++) {
        CHECK(moe_field_find(moe_router_fields(), f->name) == f, f->name);
        CHECK(f->about != NULL && f->about[0] != '\0', "a field has a line about it");
        if (f->kind == MOE_FIELD_CHOICE) {
            expect_not_set(f->name, "bogus", MOE_ERR_CONFIG);
            expect_not_set(f->name, "", MOE_ERR_CONFIG);
            /* a flag of 0.1 takes 0 and 1 as well */
            expect_not_set(f->name, strcmp(f->name, "l1_controller") == 0 ? "2" : "0", MOE_ERR_CONFIG);
        } else {
            for (i = 0; i < sizeof bad_numbers / sizeof bad_numbers[0]; i++)
                expect_not_set(f->name, bad_numbers[i], MOE_ERR_CONFIG);
            for (i = 0; f->kind != MOE_FIELD_REAL && i < sizeof no_integers / sizeof no_integers[0]; i++)
                expect_not_set(f->name, no_integers[i], MOE_ERR_CONFIG);
            if (f->kind == MOE_FIELD_FLAG) expect_not_set(f->name, "2", MOE_ERR_CONFIG);
            if (f->kind == MOE_FIELD_FLAG) expect_not_set(f->name, "-1", MOE_ERR_CONFIG);
        }
    }
    for (i = 0; i < sizeof bad_settings / sizeof bad_settings[0]; i++) {
        c = small_config();
        CHECK(moe_fields_apply(moe_router_fields(), &c, bad_settings[i], &error) != MOE_OK, bad_settings[i]);
    }
    c = small_config();
    CHECK(moe_fields_apply(moe_router_fields(), &c, NULL, NULL) == MOE_OK &&
              moe_fields_apply(moe_router_fields(), &c, "", NULL) == MOE_OK,
          "no settings");
    CHECK(moe_fields_apply(moe_router_fields(), &c, "  top_k=3   score=cosine scale=-2.5e-1  weight=raw ", NULL) ==
              MOE_OK,
          "spaces");
    CHECK(c.top_k == 3 && c.score == MOE_SCORE_COSINE && near((double)c.scale, -0.25) && c.weight == MOE_WEIGHT_RAW,
          "settings arrive");
    CHECK(moe_fields_apply(moe_router_fields(), &c, "top_k= scale=1", &error) == MOE_ERR_CONFIG &&
              strcmp(error.message, "top_k = : must be an integer") == 0,
          "a value that is missing");
    memset(&c, 0, sizeof c);
    memset(&zero, 0, sizeof zero);
    CHECK(moe_fields_apply(moe_router_fields(), &c, "scale=-0 loss_balance=-0.000 capacity_factor=-1e-999 top_k=-0",
                           NULL) == MOE_OK &&
              memcmp(&c, &zero, sizeof c) == 0,
          "-0 is the default, to the bit");
    CHECK(moe_field_find(moe_router_fields(), "bogus") == NULL && moe_field_find(moe_router_fields(), NULL) == NULL &&
              moe_field_find(NULL, "x") == NULL,
          "no such row");
    error.message[0] = '\0';
    CHECK(moe_fields_apply(moe_router_fields(), &c, "topk=2", &error) == MOE_ERR_NOT_FOUND &&
              strstr(error.message, "did you mean top_k?") != NULL,
          "the nearest name is suggested");
    CHECK(moe_field_set(moe_router_fields(), &c, "gate_temprature", "2", &error) == MOE_ERR_NOT_FOUND &&
              strstr(error.message, "did you mean gate_temperature?") != NULL,
          "a typing error");
    CHECK(moe_field_set(moe_router_fields(), &c, "xyzzy", "2", &error) == MOE_ERR_NOT_FOUND &&
              strstr(error.message, "did you mean") == NULL,
          "nothing is near");
}

/* Why a call failed is written to call.error. */
static void test_reasons(void) {
    moe_router_config c = small_config();
    moe_error error;
    bench b;
    if (!bench_start(&b, &c, NULL, 3, 1.0)) return;
    b.call.error = &error;
    b.router.tensors[MOE_ROUTER_WEIGHT] = NULL;
    error.message[0] = '\0';
    expect_call_refused(&b, MOE_ERR_ARGUMENT, "no weight");
    CHECK(error.code == MOE_ERR_ARGUMENT && strstr(error.message, "router.weight") != NULL, "the parameter is named");
    b.router.tensors[MOE_ROUTER_WEIGHT] = b.tensors[MOE_ROUTER_WEIGHT];
    b.size /= 2;
    expect_call_refused(&b, MOE_ERR_SPACE, "half the workspace");
    CHECK(error.code == MOE_ERR_SPACE && strstr(error.message, "bytes") != NULL, "the bytes are named");
    bench_end(&b);
}

/* value -> text -> value, bit for bit, and the cut text is terminated. */
static void round_trip(const moe_field *f, const moe_router_config *from) {
    moe_router_config to;
    char text[64], cut[8];
    size_t size = f->kind == MOE_FIELD_REAL ? sizeof(moe_real) : sizeof(int), room;
    memset(&to, 0, sizeof to);
    moe_field_text(f, from, text, sizeof text);
    if (!CHECK(moe_field_set(moe_router_fields(), &to, f->name, text, NULL) == MOE_OK, f->name))
        printf("  \"%s\"\n", text);
    if (!CHECK(same_bits((const char *)&to + f->offset, (const char *)from + f->offset, size), f->name))
        printf("  \"%s\"\n", text);
    for (room = 0; room < sizeof cut; room++) {
        memset(cut, '?', sizeof cut);
        moe_field_text(f, from, cut, room);
        if (room == 0) CHECK(cut[0] == '?', "there is no room");
        else
            CHECK(strlen(cut) == (strlen(text) < room ? strlen(text) : room - 1) &&
                      strncmp(cut, text, strlen(cut)) == 0,
                  "as much of the text as fits");
    }
}

static void test_round_trips(void) {
    const moe_field *f;
    moe_router_config c;
    int i;
    memset(&c, 0, sizeof c);
    for (f = moe_router_fields(); f->name != NULL; f++)
        for (i = 0; i < (quick ? 20 : 300); i++) {
            if (f->kind == MOE_FIELD_REAL) {
                double u = (double)moe_rng_uniform(&rng), v;
                v = i == 0    ? f->min
                    : i == 1  ? f->max
                    : i < 100 ? f->min + (f->max - f->min) * u
                              : pow(10.0, 40.0 * u - 30.0);
                if (i % 3 == 2 && f->min < 0.0) v = -v;
                put_real(&c, f, v);
            } else
                put_int(&c, f,
                        i <= (int)f->max - (int)f->min ? (int)f->min + i
                                                       : (int)f->min + below((int)f->max - (int)f->min + 1));
            if (i >= 10 && f->kind == MOE_FIELD_FLAG) break;
            if (f->kind == MOE_FIELD_CHOICE && i > (int)f->max) break;
            round_trip(f, &c);
        }
}

static void test_names(void) {
    static const char *const traits[] = {
        "causal",     "needs_batch", "needs_token_ids", "needs_attention", "needs_previous_layer", "needs_all_experts",
        "stochastic", "stateful",    "needs_given"};
    static const char *const losses[MOE_LOSS_COUNT] = {"balance",       "z",          "importance", "entropy",
                                                       "usage_entropy", "similarity", "locality",   "l1",
                                                       "orthogonal",    "load",       "distill",    "diversity",
                                                       "simplicity",    "stable_balance", "selector_entropy",
                                                       "selector_reach", "predictor"};
    enum { CAUSAL = MOE_TRAIT_CAUSAL, BATCH = MOE_TRAIT_NEEDS_BATCH };
    static const struct {
        const char *settings;
        unsigned traits;
    } rows[] = {
        {"refine=similarity", BATCH},
        {"refine=similarity causal=1", CAUSAL | BATCH},
        {"refine=attention causal=1 attention_heads=all", CAUSAL | BATCH | MOE_TRAIT_NEEDS_ATTENTION},
        {"refine=attention causal=1", BATCH | MOE_TRAIT_NEEDS_ATTENTION},
        {"select=expert_choice", BATCH},
        {"select=affinity", BATCH},
        {"select=soft", BATCH},
        {"select=sinkhorn", BATCH},
        {"select=sample", CAUSAL | MOE_TRAIT_STOCHASTIC},
        {"select=sample sample_scope=sequence", CAUSAL | BATCH | MOE_TRAIT_STOCHASTIC},
        {"select=sample sample_scope=call", CAUSAL | BATCH | MOE_TRAIT_STOCHASTIC},
        {"select=hash table_size=3", CAUSAL | MOE_TRAIT_NEEDS_TOKEN_IDS},
        {"select=grouped_top_k groups=2", CAUSAL},
        {"select=grouped_each groups=2", CAUSAL},
        {"select=expert_threshold", CAUSAL | MOE_TRAIT_STATEFUL},
        {"select=expert_threshold capacity_factor=2", CAUSAL | MOE_TRAIT_STATEFUL},
        {"select=expert_threshold drop_capacity=2", BATCH | MOE_TRAIT_STATEFUL},
        {"select=expert_threshold switch_at=3 switch_from=expert_choice", BATCH | MOE_TRAIT_STATEFUL},
        {"weight=sparsemixer sparsemixer_sample=1", CAUSAL | MOE_TRAIT_STOCHASTIC},
        {"expert_dropout=0.2", CAUSAL | MOE_TRAIT_STOCHASTIC},
        {"logit_cap=3", CAUSAL},
        {"select=top_p", CAUSAL},
        {"select=threshold", CAUSAL},
        {"select=positive", CAUSAL},
        {"drop_capacity=2", BATCH},
        {"capacity_factor=1", BATCH},
        {"input=jitter", CAUSAL | MOE_TRAIT_STOCHASTIC},
        {"noise=gaussian", CAUSAL | MOE_TRAIT_STOCHASTIC},
        {"input=adaptive_clustering", BATCH | MOE_TRAIT_NEEDS_PREVIOUS_LAYER},
        {"input=adaptive_clustering ac_mode=running", CAUSAL | MOE_TRAIT_NEEDS_PREVIOUS_LAYER | MOE_TRAIT_STATEFUL},
        {"score=attentive", CAUSAL | MOE_TRAIT_NEEDS_ALL_EXPERTS},
        {"score=competition", CAUSAL | MOE_TRAIT_NEEDS_ALL_EXPERTS},
        {"score=dselect", CAUSAL},
        {"score=custom", CAUSAL},
        {"select=custom", CAUSAL},
        {"score=custom custom_batch=1", BATCH},
        {"select=custom custom_batch=1", BATCH},
        {"select=balanced top_k=1", BATCH},
        {"capacity_factor_eval=1", BATCH},
        {"capacity_bound=every", BATCH},
        {"capacity_bound=every capacity_rho=0.5", BATCH | MOE_TRAIT_STATEFUL},
        {"capacity_bound=first", BATCH | MOE_TRAIT_STATEFUL},
        {"switch_at=3 switch_from=affinity", BATCH | MOE_TRAIT_STATEFUL},
        {"switch_at=3 switch_from=sample", CAUSAL | MOE_TRAIT_STOCHASTIC | MOE_TRAIT_STATEFUL},
        {"freeze_at=3", CAUSAL | MOE_TRAIT_STATEFUL},
        {"k_end=1 schedule_steps=3", CAUSAL | MOE_TRAIT_STATEFUL},
        {"select=positive l1_controller=1", CAUSAL | MOE_TRAIT_STATEFUL},
        {"loss_distill=1", CAUSAL}};
    moe_router_config c = small_config();
    unsigned i;
    for (i = 0; i < 9; i++)
        CHECK(moe_trait_name(1u << i) != NULL && strcmp(moe_trait_name(1u << i), traits[i]) == 0, traits[i]);
    CHECK(moe_trait_name(0) == NULL && moe_trait_name(3) == NULL && moe_trait_name(1u << 31) == NULL, "no such trait");
    for (i = 0; i < MOE_LOSS_COUNT; i++) CHECK(strcmp(moe_loss_name((int)i), losses[i]) == 0, losses[i]);
    CHECK(moe_loss_name(-1) == NULL && moe_loss_name(MOE_LOSS_COUNT) == NULL, "no such loss");
    CHECK(moe_router_traits(&c) == MOE_TRAIT_CAUSAL, "traits of the default");
    c.score = MOE_SCORE_NORM;
    CHECK(moe_router_traits(&c) == (MOE_TRAIT_CAUSAL | MOE_TRAIT_NEEDS_ALL_EXPERTS), "traits of norm");
    c.score = 0;
    c.select = MOE_SELECT_GIVEN;
    CHECK(moe_router_traits(&c) == (MOE_TRAIT_CAUSAL | MOE_TRAIT_NEEDS_GIVEN), "traits of given");
    c.select = 0;
    c.selection_bias = 1;
    CHECK(moe_router_traits(&c) == (MOE_TRAIT_CAUSAL | MOE_TRAIT_STATEFUL), "traits of a selection bias");
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        c = config_of(rows[i].settings);
        if (!CHECK(moe_router_traits(&c) == rows[i].traits, rows[i].settings)) printf("  %u\n", moe_router_traits(&c));
    }
}

/* ---- the plan ---- */

/* All that a routing says must agree with itself. */
static void check_consistent(const bench *b) {
    const moe_routing *r = &b->routing;
    const moe_router_config *c = &b->router.config;
    size_t experts = (size_t)c->n_experts, n = b->call.n_tokens, e, t, i;
    size_t real = 0, pairs = 0;
    size_t choices = 0, cells = 0;
    size_t *first = (size_t *)grab(experts, sizeof *first), *all = (size_t *)grab(experts, sizeof *all);
    int good = r->n_tokens == n && r->n_experts == experts && r->plan.n_tokens == n && r->plan.n_experts == experts &&
               r->plan.rows == 0;
    CHECK(good && r->max_choices == most_choices(c), "sizes");
    CHECK(r->plan.offsets[0] == 0, "the first row starts at 0");
    for (e = 0; e < experts; e++) {
        size_t from = r->plan.offsets[e], to = r->plan.offsets[e + 1];
        CHECK(from <= to && to - from <= r->counts[e], "a row is no longer than the count");
        for (i = from; i < to; i++) {
            const moe_assignment *entry = &r->plan.assignments[i];
            good = entry->token >= 0 && (size_t)entry->token < n && (i == from || entry->token > entry[-1].token);
            if (!CHECK(good, "a row ascends by token")) break;
            t = (size_t)entry->token;
            CHECK(is_real(b, t), "padding is routed nowhere");
            good = entry->choice >= 0 && entry->choice < r->n_choices[t] &&
                   (size_t)r->choices[t * r->max_choices + (size_t)entry->choice] == e;
            CHECK(good, "the rank is the place among the choices");
            good = c->apply_to == MOE_APPLY_INPUT
                       ? same_bits(&entry->weight_in, &r->weights[t * experts + e], sizeof(moe_real)) &&
                             entry->weight_out == (moe_real)1
                       : same_bits(&entry->weight_out, &r->weights[t * experts + e], sizeof(moe_real)) &&
                             entry->weight_in == (moe_real)1;
            CHECK(good, "the entry's weight is that of the matrix");
            CHECK(r->selected[t * experts + e] == 1, "an entry is selected");
        }
        pairs += to - from;
    }
    for (t = 0; t < n; t++) {
        real += (size_t)is_real(b, t);
        CHECK(is_real(b, t) || r->n_choices[t] == 0, "padding has no choices");
        CHECK(r->n_choices[t] >= 0 && (size_t)r->n_choices[t] <= r->max_choices, "the number of choices");
        choices += (size_t)r->n_choices[t];
        for (i = 0; i < (size_t)r->n_choices[t]; i++) {
            e = (size_t)r->choices[t * r->max_choices + i];
            if (!CHECK(e < experts, "a choice is an expert")) continue;
            all[e]++;
            first[e] += i == 0;
            CHECK(r->selected[t * experts + e] == (r->kept[t * r->max_choices + i] != 0),
                  "selected is chosen and kept");
        }
    }
    for (e = 0; e < experts; e++)
        CHECK(all[e] == r->counts[e] && first[e] == r->first_counts[e], "counts are those before capacity");
    CHECK(real == r->n_real && choices == pairs + r->n_dropped, "tokens and pairs");
    for (i = 0; i < n * experts; i++) {
        cells += r->selected[i];
        CHECK(r->selected[i] <= 1 && (r->selected[i] || !(r->weights[i] < 0 || r->weights[i] > 0)),
              "the matrix is 0 where nothing is selected");
    }
    CHECK(cells == pairs, "the matrix has as many cells as the plan");
    free(first);
    free(all);
}

/* Soft: each column of D sums to 1 over a sequence, each row of C over the slots, and the plan
   holds both. */
static void check_soft(const bench *b) {
    const moe_routing *r = &b->routing;
    size_t experts = (size_t)b->router.config.n_experts, slots = (size_t)b->router.config.slots;
    size_t total = experts * slots, n = b->call.n_tokens, i, t, e, slot;
    size_t parts = b->call.sequences != NULL ? b->call.n_sequences : 1;
    for (i = 0; i < parts; i++) {
        size_t from = b->call.sequences != NULL ? (size_t)b->call.sequences[i] : 0,
               to = b->call.sequences != NULL ? (size_t)b->call.sequences[i + 1] : n;
        size_t real = 0;
        for (slot = 0; slot < total; slot++) {
            double sum = 0.0;
            for (t = from, real = 0; t < to; t++)
                if (is_real(b, t)) {
                    sum += (double)r->gate[t * total + slot];
                    real++;
                }
            CHECK(real == 0 || near(sum, 1.0), "dispatch sums to 1 over the tokens");
        }
    }
    for (t = 0; t < n; t++) {
        double sum = 0.0;
        if (!is_real(b, t)) continue;
        for (slot = 0; slot < total; slot++) sum += (double)r->probabilities[t * total + slot];
        CHECK(near(sum, 1.0), "combine sums to 1 over the slots");
    }
    for (e = 0; e < experts; e++)
        for (i = r->plan.offsets[e]; i < r->plan.offsets[e + 1]; i++) {
            const moe_assignment *entry = &r->plan.assignments[i];
            size_t cell = (size_t)entry->token * total + e * slots + (size_t)entry->choice % slots;
            CHECK((size_t)entry->choice < r->plan.rows && is_real(b, (size_t)entry->token), "an entry of soft");
            CHECK(same_bits(&entry->weight_in, &r->gate[cell], sizeof(moe_real)) &&
                      same_bits(&entry->weight_out, &r->probabilities[cell], sizeof(moe_real)),
                  "weights of soft");
        }
    CHECK(r->plan.offsets[experts] == r->n_real * total && r->plan.rows == slots * parts, "every token at every slot");
}

/* ---- a naive reference, in double ---- */

static double ref_dot(const moe_real *a, const moe_real *b, size_t n) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
    return sum;
}

static double ref_act(int act, double x) {
    switch (act) {
    case MOE_ACT_RELU: return x > 0.0 ? x : 0.0;
    case MOE_ACT_SILU: return x / (1.0 + exp(-x));
    case MOE_ACT_GELU: return 0.5 * x * (1.0 + erf(x / sqrt(2.0)));
    case MOE_ACT_TANH: return tanh(x);
    case MOE_ACT_SIGMOID: return 1.0 / (1.0 + exp(-x));
    case MOE_ACT_GELU_TANH: return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
    case MOE_ACT_RELU2: return x > 0.0 ? x * x : 0.0;
    default: return x;
    }
}

static double ref_cosine(const bench *b, const moe_real *u, size_t e) {
    const moe_router_config *c = &b->router.config;
    size_t d = (size_t)c->d_model, width = c->cosine_dim > 0 ? (size_t)c->cosine_dim : d, i;
    const moe_real *w = b->tensors[MOE_ROUTER_WEIGHT] + e * width;
    double dot = 0.0, token = 0.0;
    double expert = 0.0,
           tau = c->cosine_learn_tau ? (double)b->tensors[MOE_ROUTER_TEMPERATURE][0] : (double)c->cosine_tau;
    for (i = 0; i < width; i++) {
        double v = c->cosine_dim > 0 ? ref_dot(b->tensors[MOE_ROUTER_PROJECTION] + i * d, u, d) : (double)u[i];
        dot += v * (double)w[i];
        token += v * v;
        expert += (double)w[i] * (double)w[i];
    }
    return dot / sqrt(expert) / (c->cosine_keep_length ? 1.0 : sqrt(token)) / tau;
}

static double ref_norm(const bench *b, size_t t, size_t e) {
    const moe_real *v = b->nodes + (e * b->call.n_tokens + t) * b->call.activation_width;
    double squares = 0.0, sum = 0.0;
    double largest = 0.0;
    size_t i;
    for (i = 0; i < b->call.activation_width; i++) {
        double a = fabs((double)v[i]);
        squares += a * a;
        sum += a;
        if (a > largest) largest = a;
    }
    return b->router.config.norm_order == MOE_NORM_L2   ? sqrt(squares)
           : b->router.config.norm_order == MOE_NORM_L1 ? sum
                                                        : largest;
}

static double ref_logit(const bench *b, size_t t, size_t e) {
    const moe_router_config *c = &b->router.config;
    size_t d = (size_t)c->d_model, h = (size_t)c->router_hidden, i;
    const moe_real *u = (b->call.router_x != NULL ? b->call.router_x : b->call.x) + t * d;
    double z;
    if (c->score == MOE_SCORE_COSINE) return ref_cosine(b, u, e);
    if (c->score == MOE_SCORE_NORM) return ref_norm(b, t, e);
    if (c->score != MOE_SCORE_MLP)
        return ref_dot(b->tensors[MOE_ROUTER_WEIGHT] + e * d, u, d) +
               (c->router_bias ? (double)b->tensors[MOE_ROUTER_BIAS][e] : 0.0);
    z = (double)b->tensors[MOE_ROUTER_FC2_BIAS][e];
    for (i = 0; i < h; i++)
        z += (double)b->tensors[MOE_ROUTER_FC2_WEIGHT][e * h + i] *
             ref_act(c->router_act, ref_dot(b->tensors[MOE_ROUTER_FC1_WEIGHT] + i * d, u, d) +
                                        (double)b->tensors[MOE_ROUTER_FC1_BIAS][i]);
    return z;
}

static void ref_gate(const moe_router_config *c, const double *z, double *p) {
    size_t e, experts = (size_t)c->n_experts;
    double sum = 0.0, top = z[0];
    double temperature = (double)c->gate_temperature;
    for (e = 0; e < experts; e++)
        if (z[e] > top) top = z[e];
    for (e = 0; e < experts; e++) sum += exp((z[e] - top) / temperature);
    for (e = 0; e < experts; e++) switch (c->gate) {
        case MOE_GATE_SOFTMAX:
            p[e] = exp((z[e] - top) / temperature) / sum;
            break;
        case MOE_GATE_SIGMOID:
            p[e] = 1.0 / (1.0 + exp(-z[e] / temperature));
            break;
        case MOE_GATE_SQRT_SOFTPLUS:
            p[e] = sqrt(z[e] > 30.0 ? z[e] : log1p(exp(z[e])));
            break;
        case MOE_GATE_RELU:
            p[e] = z[e] > 0.0 ? z[e] : 0.0;
            break;
        default: p[e] = z[e];
        }
}

/* One pick of sparsemixer: its weight, or -1 when an expert stands too near the edge to tell. */
static double ref_sparsemixer(const moe_router_config *c, const double *z, const int32_t *picks, size_t i) {
    size_t e, j, experts = (size_t)c->n_experts;
    double sum = 0.0, best = z[picks[i]];
    for (e = 0; e < experts; e++) {
        double size = fabs(z[e]) > best ? fabs(z[e]) : best, distance = size > 0.0 ? (best - z[e]) / size : 0.0;
        double edge = 2.0 * (double)c->sparsemixer_eps;
        for (j = 0; j < i && (size_t)picks[j] != e; j++) {
        }
        if (j < i) continue;
        if (fabs(distance - edge) < 1e-3) return -1.0;
        if (distance <= edge) sum += exp(z[e] - best);
    }
    return 1.0 / sum;
}

/* w of the chosen; 0 when they are too ill-conditioned to compare. */
static int ref_weights(const moe_router_config *c, const double *z, const double *p, const int32_t *picks, size_t n,
                       double *w) {
    double sum = 0.0, sizes = 0.0;
    double exps = 0.0, powers = 0.0;
    double power = (double)c->weight_p, norm;
    size_t i;
    for (i = 0; i < n; i++) {
        double a = p[picks[i]];
        sum += a;
        sizes += fabs(a);
        powers += pow(fabs(a), power);
        exps += exp(z[picks[i]] - z[picks[0]]);
    }
    norm = power == 1.0 ? sum : pow(powers, 1.0 / power);
    if (c->weight == MOE_WEIGHT_SUM) norm = sum;
    if ((c->weight == MOE_WEIGHT_SUM || c->weight == MOE_WEIGHT_P_NORM) && sizes > 0.0 && fabs(norm) < 0.02 * sizes)
        return 0;
    if ((c->weight == MOE_WEIGHT_SUM || c->weight == MOE_WEIGHT_P_NORM) && sizes > 0.0 && sizes < 1e-3) return 0;
    for (i = 0; i < n; i++) switch (c->weight) {
        case MOE_WEIGHT_SUM:
        case MOE_WEIGHT_P_NORM:
            w[i] = sizes > 0.0 ? p[picks[i]] / norm : 0.0;
            break;
        case MOE_WEIGHT_SOFTMAX:
            w[i] = exp(z[picks[i]] - z[picks[0]]) / exps;
            break;
        case MOE_WEIGHT_RAW:
            w[i] = p[picks[i]];
            break;
        case MOE_WEIGHT_UNIFORM:
            w[i] = 1.0 / (double)n;
            break;
        case MOE_WEIGHT_ONE:
            w[i] = 1.0;
            break;
        default:
            w[i] = ref_sparsemixer(c, z, picks, i);
            if (w[i] < 0.0) return 0;
        }
    return 1;
}

/* The score that orders the choices: p + b for dense, z or p + b for top_k. */
static double ref_selection_score(const bench *b, const double *z, const double *p, size_t e) {
    const moe_router_config *c = &b->router.config;
    int rises = c->gate == MOE_GATE_SOFTMAX || c->gate == MOE_GATE_SIGMOID || c->gate == MOE_GATE_SQRT_SOFTPLUS;
    if (c->selection_bias) return p[e] + (double)b->tensors[MOE_ROUTER_SELECTION_BIAS][e];
    return c->select == MOE_SELECT_TOP_K && rises ? z[e] : p[e];
}

static void check_token(const bench *b, size_t t, double *z, double *p, double *w) {
    const moe_routing *r = &b->routing;
    const moe_router_config *c = &b->router.config;
    size_t experts = (size_t)c->n_experts, e, i, n = (size_t)r->n_choices[t];
    const int32_t *picks = r->choices + t * r->max_choices;
    for (e = 0; e < experts; e++) {
        z[e] = ref_logit(b, t, e);
        CHECK(near((double)r->logits[t * experts + e], z[e]), "logit");
    }
    ref_gate(c, z, p);
    for (e = 0; e < experts; e++) {
        CHECK(near((double)r->gate[t * experts + e], p[e]), "gate");
        CHECK(near((double)r->probabilities[t * experts + e], p[e]), "probability");
    }
    if (c->select == MOE_SELECT_TOP_K) CHECK(n == (size_t)c->top_k, "K choices");
    if (c->select == MOE_SELECT_DENSE) CHECK(n == experts, "all chosen");
    if (c->select != MOE_SELECT_GIVEN)
        for (i = 0; i < n; i++) {
            double mine = ref_selection_score(b, z, p, (size_t)picks[i]);
            if (i > 0)
                CHECK(ref_selection_score(b, z, p, (size_t)picks[i - 1]) >= mine - NEAR * (1.0 + fabs(mine)),
                      "choices descend");
            for (e = 0; e < experts; e++)
                CHECK(r->selected[t * experts + e] ||
                          ref_selection_score(b, z, p, e) <= mine + NEAR * (1.0 + fabs(mine)),
                      "no better expert was left out");
        }
    if (!ref_weights(c, z, p, picks, n, w)) return;
    for (i = 0; i < n; i++) {
        double section = w[i] * (c->expert_scale ? (double)b->tensors[MOE_ROUTER_EXPERT_SCALE][picks[i]] : 1.0);
        CHECK(fabs((double)r->choice_weights[t * r->max_choices + i] - section) <= 50.0 * NEAR * (1.0 + fabs(section)),
              "weight of the section");
        section *= (double)c->scale;
        CHECK(fabs((double)r->weights[t * experts + (size_t)picks[i]] - section) <= 50.0 * NEAR * (1.0 + fabs(section)),
              "weight");
    }
}

/* The losses from the routing's own p, counts and weights, over the real tokens [from, to). */
static double ref_balance(const bench *b, size_t from, size_t to) {
    const moe_routing *r = &b->routing;
    const moe_router_config *c = &b->router.config;
    size_t experts = (size_t)c->n_experts, t, e, i, real = 0;
    double *f = (double *)grab(experts, sizeof *f), *mean = (double *)grab(experts, sizeof *mean);
    double total = 0.0, sum = 0.0;
    for (t = from; t < to; t++) {
        double mass = 0.0;
        size_t n = (size_t)r->n_choices[t];
        if (!is_real(b, t)) continue;
        real++;
        for (e = 0; e < experts; e++) mass += (double)r->probabilities[t * experts + e];
        if (c->gate == MOE_GATE_SOFTMAX) mass = 1.0;
        for (e = 0; e < experts; e++)
            mean[e] += mass < 0.0 || mass > 0.0 ? (double)r->probabilities[t * experts + e] / mass : 0.0;
        if (c->balance_over == MOE_BALANCE_FIRST && n > 1) n = 1;
        for (i = 0; i < n; i++) {
            f[r->choices[t * r->max_choices + i]] += 1.0;
            total += 1.0;
        }
    }
    if (c->balance_over == MOE_BALANCE_TOKENS) total = (double)real;
    for (e = 0; e < experts && total > 0.0; e++) sum += f[e] / total * mean[e] / (double)real;
    free(f);
    free(mean);
    return real > 0 ? sum * (double)experts : -1.0;
}

static double ref_loss(const bench *b, int loss) {
    const moe_routing *r = &b->routing;
    const moe_router_config *c = &b->router.config;
    size_t experts = (size_t)c->n_experts, t, e, i;
    double sum = 0.0, parts = 0.0;
    double mean = 0.0, variance = 0.0, *load;
    if (loss == MOE_LOSS_BALANCE) {
        if (c->balance_scope == MOE_SCOPE_BATCH || b->call.sequences == NULL)
            return (double)c->loss_balance * ref_balance(b, 0, b->call.n_tokens);
        for (i = 0; i < b->call.n_sequences; i++) {
            double part = ref_balance(b, (size_t)b->call.sequences[i], (size_t)b->call.sequences[i + 1]);
            if (part >= 0.0) {
                sum += part;
                parts += 1.0;
            }
        }
        return (double)c->loss_balance * sum / parts;
    }
    load = (double *)grab(experts, sizeof *load);
    for (t = 0; t < b->call.n_tokens; t++) {
        double row = 0.0, top = (double)r->logits[t * experts];
        if (!is_real(b, t)) continue;
        for (e = 0; e < experts; e++)
            if ((double)r->logits[t * experts + e] > top) top = (double)r->logits[t * experts + e];
        for (e = 0; e < experts; e++) {
            double p = (double)r->probabilities[t * experts + e];
            if (loss == MOE_LOSS_Z) row += exp((double)r->logits[t * experts + e] - top);
            if (loss == MOE_LOSS_ENTROPY && p > 0.0) row -= p * log(p);
            if (loss == MOE_LOSS_IMPORTANCE && c->importance_over != MOE_IMPORTANCE_WEIGHTS) load[e] += p;
        }
        for (i = 0;
             i < (size_t)r->n_choices[t] && loss == MOE_LOSS_IMPORTANCE && c->importance_over == MOE_IMPORTANCE_WEIGHTS;
             i++)
            load[r->choices[t * r->max_choices + i]] += (double)r->choice_weights[t * r->max_choices + i];
        sum += loss == MOE_LOSS_Z ? (log(row) + top) * (log(row) + top) : row;
    }
    for (e = 0; e < experts; e++) mean += load[e] / (double)experts;
    for (e = 0; e < experts; e++)
        variance += (load[e] - mean) * (load[e] - mean) / (double)(c->unbiased ? experts - 1 : experts);
    free(load);
    if (loss == MOE_LOSS_Z) return (double)c->loss_z * sum / (double)r->n_real;
    if (loss == MOE_LOSS_ENTROPY) return (double)c->loss_entropy * sum / (double)r->n_real;
    return experts < 2 || (c->unbiased && experts < 2) ? 0.0 : (double)c->loss_importance * variance / (mean * mean);
}

static void draw_config(moe_router_config *c) {
    memset(c, 0, sizeof *c);
    c->preset = MOEI_OF_A_FILE; /* what has no effect is reset */
    c->d_model = 1 + below(20);
    c->n_experts = 1 + below(9);
    c->top_k = 1 + below(c->n_experts);
    c->score = below(MOE_SCORE_NORM + 1);
    c->gate = below(MOE_GATE_COUNT);
    c->select = below(MOE_SELECT_GIVEN + 1);
    c->weight = below(MOE_WEIGHT_COUNT);
    c->router_bias = c->score <= MOE_SCORE_RANDOM && below(2);
    if (c->score == MOE_SCORE_COSINE) {
        c->cosine_dim = below(7);
        c->cosine_keep_length = below(2);
        c->cosine_learn_tau = below(2);
        c->cosine_tau = (moe_real)0.7;
    }
    c->norm_order = below(MOE_NORM_COUNT);
    c->router_hidden = below(7);
    c->router_act = below(MOE_ACT_COUNT);
    c->gate_temperature = (moe_real)(0.5 * below(5));
    c->selection_bias = c->weight != MOE_WEIGHT_SPARSEMIXER && below(3) == 0;
    c->weight_p = (moe_real)(below(3) * 0.75);
    c->sparsemixer_eps = (moe_real)(below(2) * 0.3);
    c->expert_scale = below(3) == 0;
    c->scale = (moe_real)(below(2) * 1.75);
    c->apply_to = below(2);
    c->balance_over = below(MOE_BALANCE_COUNT);
    c->balance_scope = below(2);
    c->importance_over = below(MOE_IMPORTANCE_COUNT);
    c->unbiased = below(2);
    if (below(2)) {
        c->loss_balance = (moe_real)0.5;
        c->loss_z = (moe_real)0.25;
        c->loss_importance = (moe_real)2;
        c->loss_entropy = (moe_real)0.75;
    }
}

static void test_reference(void) {
    int trial, compared = 0, loss;
    static double z[400], p[400], w[400];
    for (trial = 0; trial < 3000; trial++) {
        moe_router_config c;
        bench b;
        size_t t, n = (size_t)(1 + below(12));
        int32_t sequences[4] = {0, 0, 0, 0};
        draw_config(&c);
        if (trial % 50 == 0) {
            c.n_experts = 10 + below(390);
            c.top_k = 1 + below(64 < c.n_experts ? 64 : c.n_experts);
        }
        if (moe_router_check(&c, NULL, NULL) != MOE_OK) continue;
        if (!CHECK(bench_start(&b, &c, moe_kernels_select(below(2)), n, 0.8), "a router that was checked routes")) {
            bench_end(&b);
            continue;
        }
        if (below(2)) b.call.router_x = b.router_x = normals(n * (size_t)c.d_model, 1.0);
        if (below(3) == 0) mask_some(&b);
        if (below(2)) {
            sequences[1] = (int32_t)(n / 3);
            sequences[2] = (int32_t)(n / 2);
            sequences[3] = (int32_t)n;
            b.call.sequences = sequences;
            b.call.n_sequences = 3;
        }
        bench_route(&b);
        if (CHECK(b.status == MOE_OK, "routes")) {
            check_consistent(&b);
            for (t = 0; t < n; t++)
                if (is_real(&b, t)) check_token(&b, t, z, p, w);
            for (loss = 0; loss <= MOE_LOSS_ENTROPY; loss++) {
                double want = ref_loss(&b, loss), got = (double)b.routing.loss[loss];
                if (!(b.router.config.loss_balance > 0) || b.routing.n_real == 0)
                    CHECK(!(got < 0.0) && !(got > 0.0), "a loss that is off is 0");
                else if (c.gate != MOE_GATE_IDENTITY && fabs(want) < 100.0)
                    CHECK(fabs(got - want) <= 20.0 * NEAR * (1.0 + fabs(want)), moe_loss_name(loss));
            }
            compared++;
        }
        bench_end(&b);
    }
    CHECK(compared > 2000, "most random configurations are good");
}

/* ---- every stage at once: consistency, and naive selections and capacity from the routing's own p
   and z ---- */

static int chance(int percent) { return below(100) < percent; }

/* What the schedules make of the configuration at the bench's step; *student: the student
   chooses. */
static moe_router_config effective(const bench *b, int *student) {
    moe_router_config c = b->router.config;
    int step = b->tensors[MOE_ROUTER_STEP] != NULL ? (int)b->tensors[MOE_ROUTER_STEP][0] : 0;
    int steps = c.schedule_steps, way = step < steps ? step : steps;
    /* rounded, in integers */
    if (c.k_end > 0) c.top_k = (2 * c.top_k * steps + 2 * (c.k_end - c.top_k) * way + steps) / (2 * steps);
    if (step < c.switch_at && (b->call.training || c.select != MOE_SELECT_EXPERT_THRESHOLD)) c.select = c.switch_from;
    *student = c.student && step >= c.freeze_at && b->call.given == NULL;
    if (*student) c.select = MOE_SELECT_TOP_K;
    if (b->call.given != NULL) c.select = MOE_SELECT_GIVEN; /* recorded choices stand before all else */
    return c;
}

static int frozen(const bench *b) {
    return b->router.config.freeze_at > 0 && b->tensors[MOE_ROUTER_STEP][0] >= (moe_real)b->router.config.freeze_at;
}

/* State, schedules, student. */
static void draw_state(moe_router_config *c) {
    if (c->select == MOE_SELECT_BALANCED) c->top_k = 1;
    if (chance(20) &&
        (c->select == MOE_SELECT_TOP_K || c->select == MOE_SELECT_SINKHORN || c->select == MOE_SELECT_SAMPLE)) {
        c->schedule_steps = 1 + below(9);
        c->k_end = 1 + below(c->n_experts);
    }
    if (chance(15)) {
        c->schedule_steps = 1 + below(9);
        c->tau_schedule = MOE_TAU_GATE_TEMPERATURE;
        c->tau_end = (moe_real)(0.5 + 0.5 * below(4));
    }
    if (chance(15)) {
        c->switch_at = 1 + below(9);
        c->switch_from = below(MOE_SELECT_COUNT);
        /* recorded choices would stand in all steps */
        if (c->switch_from == MOE_SELECT_GIVEN) c->switch_from = MOE_SELECT_TOP_K;
    }
    if (chance(20)) c->freeze_at = 1 + below(9);
    if (chance(20)) {
        c->loss_distill = 1;
        c->distill = below(MOE_DISTILL_COUNT);
        c->student = c->freeze_at > 0 && below(2);
    }
    if (chance(20) && (c->score <= MOE_SCORE_RANDOM || c->score == MOE_SCORE_COSINE || c->score == MOE_SCORE_GRAP)) {
        c->capacity_bound = below(MOE_BOUND_COUNT);
        c->capacity_rho = (moe_real)(c->capacity_bound == MOE_BOUND_EVERY ? 0.25 * below(3) : 0.0);
    }
    if (c->selection_bias && below(2)) c->bias_rate = (moe_real)0.01;
    c->l1_controller = c->select == MOE_SELECT_POSITIVE && below(2);
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING && c->ac_mode == MOE_AC_RUNNING && below(2))
        c->ac_rho = (moe_real)0.5;
}

static void draw_selection(moe_router_config *c) {
    if (c->select == MOE_SELECT_HASH || c->switch_from == MOE_SELECT_HASH || c->student_dim > 0) c->table_size = 5;
    c->top_p = (moe_real)(0.2 * (1 + below(4)));
    c->threshold = (moe_real)(0.2 * below(4));
    c->threshold_fallback = below(3);
    c->threshold_learned = c->select == MOE_SELECT_THRESHOLD && below(2);
    c->expert_choice_score = below(2);
    c->affinity_mass = (moe_real)(0.25 * (1 + below(4)));
    c->affinity_sum = (moe_real)(chance(30) ? 1.5 : 0.0);
    c->capacity = below(4);
    c->capacity_min = below(3);
    if (c->select == MOE_SELECT_SOFT) return;
    c->selection_bias = c->select != MOE_SELECT_EXPERT_THRESHOLD && chance(30);
    c->expert_scale = chance(30);
    c->apply_to = below(2);
    c->renormalize = below(2);
    c->drop_order = below(MOE_DROP_COUNT);
    draw_state(c);
    if (chance(40)) c->drop_capacity = 1 + below(4);
    else if (chance(40)) {
        c->capacity_factor = (moe_real)(0.5 + 0.25 * below(4));
        c->drop_rule = below(MOE_DROP_RULE_COUNT);
    }
    if (chance(30)) {
        c->loss_usage_entropy = 1;
        c->loss_l1 = 1;
        c->loss_similarity_same = 1;
        c->loss_similarity_diff = 1;
        c->loss_locality = c->n_experts > 1;
        c->nodes = 2;
    }
    if (c->n_experts == 1) c->nodes = 0;
}

static void draw_any(moe_router_config *c) {
    memset(c, 0, sizeof *c);
    c->preset = MOEI_OF_A_FILE; /* what has no effect is reset */
    c->d_model = 4 * (1 + below(3));
    c->n_experts = 1 + below(8);
    c->top_k = 1 + below(c->n_experts);
    c->input = chance(50) ? 0 : below(MOE_INPUT_COUNT);
    c->ac_mode = below(MOE_AC_COUNT);
    c->ac_spread = below(MOE_SPREAD_COUNT);
    if (chance(30)) c->ac_lambda = (moe_real)0.5;
    c->score = below(MOE_SCORE_COUNT);
    c->router_hidden = 3;
    c->norm_order = below(MOE_NORM_COUNT);
    c->noise = chance(70) ? 0 : below(MOE_NOISE_COUNT);
    c->gate = below(MOE_GATE_COUNT);
    c->refine = chance(60) ? 0 : below(MOE_REFINE_COUNT);
    if (c->refine != MOE_REFINE_NONE) {
        c->causal = below(2);
        c->lower_entropy_only = below(2);
        c->heads = 1 + below(2);
        c->attention_heads = below(MOE_HEADS_COUNT);
        c->similarity_scale = below(3);
    }
    c->select = below(MOE_SELECT_COUNT);
    c->weight = below(MOE_WEIGHT_COUNT);
    if (c->select == MOE_SELECT_SOFT) {
        c->score = c->noise = c->gate = c->refine = c->weight = c->causal = c->lower_entropy_only = 0;
        c->slots = 1 + below(3);
        c->soft_normalise = below(2);
        c->soft_sequences = 3;
    }
    if (c->select == MOE_SELECT_GROUPED_EACH) c->groups = 1 + below(3);
    if (c->select == MOE_SELECT_EXPERT_THRESHOLD) c->threshold_rho = (moe_real)(0.25 * below(4));
    c->logit_cap = (moe_real)(chance(20) && c->score != MOE_SCORE_DSELECT && c->select != MOE_SELECT_SOFT ? 1.5 : 0.0);
    if (c->select == MOE_SELECT_GROUPED_TOP_K) {
        c->groups = 1 + below(3);
        c->groups_kept = 1 + below(3);
        c->group_score = below(2);
    }
    draw_selection(c);
}

/* Of two experts, whether a comes before b: the larger score, then the lower index. */
static int comes_before(const moe_real *score, size_t a, size_t b) {
    return score[a] > score[b] || (!(score[b] > score[a]) && a < b);
}

static size_t count_before(const moe_real *score, size_t n, size_t e, const unsigned char *among) {
    size_t i, count = 0;
    for (i = 0; i < n; i++) count += (among == NULL || among[i]) && comes_before(score, i, e);
    return count;
}

/* The K best by the student; 0 when rounding decides. */
static int naive_student(const bench *b, size_t t, unsigned char *want, size_t k) {
    size_t d = (size_t)b->router.config.d_model, experts = b->routing.n_experts, e, f;
    double v[16];
    for (e = 0; e < experts; e++) v[e] = ref_dot(b->routing.u + t * d, b->tensors[MOE_ROUTER_STUDENT] + e * d, d);
    for (e = 0; e < experts; e++) {
        size_t before = 0;
        for (f = 0; f < experts; f++) {
            if (f != e && fabs(v[f] - v[e]) < 1e-4) return 0;
            before += v[f] > v[e];
        }
        want[e] = before < k;
    }
    return 1;
}

static void naive_groups(const moe_router_config *c, const moe_real *score, size_t experts, unsigned char *want) {
    const size_t size = experts / (size_t)c->groups;
    moe_real best[16];
    unsigned char open[16];
    size_t e, g, taken;
    for (g = 0; g < (size_t)c->groups; g++) {
        moe_real first = score[g * size], second;
        for (e = g * size; e < (g + 1) * size; e++)
            if (score[e] > first) first = score[e];
        best[g] = first;
        if (c->group_score == MOE_GROUP_TOP2_SUM && size > 1) {
            for (e = g * size, second = -first - 1000, taken = 0; e < (g + 1) * size; e++)
                if (score[e] < first || taken++ > 0) second = score[e] > second ? score[e] : second;
            best[g] = first + second;
        }
    }
    for (e = 0; e < experts; e++)
        open[e] = count_before(best, (size_t)c->groups, e / size, NULL) < (size_t)c->groups_kept;
    for (e = 0; e < experts; e++) want[e] = open[e] && count_before(score, experts, e, open) < (size_t)c->top_k;
}

/* The K/G best of each group. */
static void naive_each(const moe_router_config *c, const moe_real *score, size_t experts, unsigned char *want) {
    const size_t size = experts / (size_t)c->groups;
    size_t e;
    for (e = 0; e < experts; e++)
        want[e] = count_before(score + e / size * size, size, e % size, NULL) < (size_t)(c->top_k / c->groups);
}

/* All experts with z at or above their cutoffs; 0 when rounding decides. */
static int naive_cutoffs(const bench *b, const moe_real *z, unsigned char *want) {
    const double updates = (double)b->tensors[MOE_ROUTER_CUTOFF_UPDATES][0];
    const double share = updates > 0 ? 1.0 - pow((double)b->router.config.threshold_rho, updates) : 1.0;
    size_t e;
    for (e = 0; e < b->routing.n_experts; e++) {
        const double cutoff = (double)b->tensors[MOE_ROUTER_CUTOFF][e] / share;
        if (fabs((double)z[e] - cutoff) < 1e-5 * (1.0 + fabs(cutoff))) return 0;
        want[e] = (double)z[e] > cutoff;
    }
    return 1;
}

static void naive_threshold(const bench *b, const moe_router_config *c, const moe_real *p, size_t experts,
                            unsigned char *want) {
    moe_real theta;
    size_t e, taken = 0;
    for (e = 0; e < experts; e++) {
        theta = c->select == MOE_SELECT_POSITIVE ? 0
                : c->threshold_learned           ? b->tensors[MOE_ROUTER_THRESHOLD][e]
                                                 : c->threshold;
        want[e] = p[e] > theta;
        taken += want[e];
    }
    if (taken == 0 && c->select == MOE_SELECT_THRESHOLD &&
        (c->threshold_fallback == MOE_FALLBACK_ALWAYS ||
         (c->threshold_fallback == MOE_FALLBACK_EVALUATION && !b->call.training)))
        for (e = 0; e < experts; e++) want[e] = count_before(p, experts, e, NULL) == 0;
}

/* Which experts the token takes, for selections that look at one token; 0 when rounding decides. */
static int naive_choice(const bench *b, size_t t, unsigned char *want) {
    int student;
    moe_router_config now = effective(b, &student), *c = &now;
    const moe_real *bias = b->tensors[MOE_ROUTER_SELECTION_BIAS];
    const moe_real *p = b->routing.probabilities + t * b->routing.n_experts;
    const moe_real *z = b->routing.logits + t * b->routing.n_experts;
    size_t experts = b->routing.n_experts, e;
    size_t taken = 0;
    moe_real score[16];
    int rises = c->gate == MOE_GATE_SOFTMAX || c->gate == MOE_GATE_SIGMOID || c->gate == MOE_GATE_SQRT_SOFTPLUS ||
                c->weight == MOE_WEIGHT_SPARSEMIXER;
    double sum = 0.0;
    for (e = 0; e < experts; e++) {
        score[e] = bias != NULL ? p[e] + bias[e] : p[e];
        want[e] = 0;
    }
    if (student) return naive_student(b, t, want, (size_t)c->top_k);
    switch (c->select) {
    case MOE_SELECT_TOP_K:
        for (e = 0; e < experts; e++)
            want[e] = count_before(rises && bias == NULL && c->refine == MOE_REFINE_NONE ? z : score, experts, e,
                                   NULL) < (size_t)c->top_k;
        return 1;
    case MOE_SELECT_DENSE:
        memset(want, 1, experts);
        return 1;
    case MOE_SELECT_GIVEN:
        for (e = 0; e < b->routing.max_choices; e++) want[b->given[t * b->routing.max_choices + e]] = 1;
        return 1;
    case MOE_SELECT_CUSTOM:
        for (e = 0; e < experts; e++) want[e] = e == 0 || p[e] > p[0];
        return 1;
    case MOE_SELECT_HASH:
        for (e = 0; e < (size_t)c->top_k; e++)
            want[(size_t)b->tensors[MOE_ROUTER_TABLE][(size_t)b->token_ids[t] * (size_t)c->top_k + e]] = 1;
        return 1;
    case MOE_SELECT_GROUPED_TOP_K:
        naive_groups(c, score, experts, want);
        return 1;
    case MOE_SELECT_GROUPED_EACH:
        naive_each(c, rises && bias == NULL && c->refine == MOE_REFINE_NONE ? z : score, experts, want);
        return 1;
    case MOE_SELECT_EXPERT_THRESHOLD: return naive_cutoffs(b, z, want);
    case MOE_SELECT_TOP_P:
        for (taken = 0; taken < experts; taken++) { /* the taken-th best */
            for (e = 0; e < experts && count_before(p, experts, e, NULL) != taken; e++) {
            }
            want[e] = 1;
            sum += (double)p[e];
            if (fabs(sum - (double)c->top_p) < 1e-4) return 0;
            if (sum > (double)c->top_p) break;
        }
        return 1;
    case MOE_SELECT_POSITIVE:
    case MOE_SELECT_THRESHOLD:
        naive_threshold(b, c, p, experts, want);
        return 1;
    default: return 0;
    }
}

/* expert_choice: each expert's C best tokens. */
static void check_expert_choice(const bench *b) {
    const moe_routing *r = &b->routing;
    const moe_router_config *c = &b->router.config;
    size_t n = r->n_tokens, experts = r->n_experts, e, t, u;
    double factor = c->capacity_factor > 0 ? (double)c->capacity_factor : 1.0;
    size_t capacity = (size_t)floor(factor * (double)r->n_real / (double)experts + 0.5);
    const moe_real *score = c->expert_choice_score == MOE_EXPERT_CHOICE_Z ? r->logits : r->probabilities;
    if (capacity < 1) capacity = 1;
    for (e = 0; e < experts; e++)
        for (t = 0; t < n; t++) {
            size_t before = 0;
            int chosen = 0, i;
            if (!is_real(b, t)) continue;
            for (u = 0; u < n; u++)
                before += is_real(b, u) && (score[u * experts + e] > score[t * experts + e] ||
                                            (!(score[t * experts + e] > score[u * experts + e]) && u < t));
            for (i = 0; i < r->n_choices[t]; i++) chosen |= (size_t)r->choices[t * r->max_choices + (size_t)i] == e;
            CHECK(chosen == (before < capacity), "an expert takes its best tokens");
        }
}

/* Who stays when each expert takes at most C pairs; 0 when the order is random. */
static int naive_capacity(const bench *b, unsigned char *want) {
    const moe_routing *r = &b->routing;
    const moe_router_config *c = &b->router.config;
    size_t n = r->n_tokens, experts = r->n_experts, t, u, e, i, rank;
    size_t capacity = (size_t)c->drop_capacity, *used, *order;
    if (capacity == 0 || c->drop_rule != MOE_DROP_RULE_NONE) return 0;
    if (c->drop_order == MOE_DROP_RANDOM || (c->drop_order == MOE_DROP_PRIORITY && c->gate == MOE_GATE_IDENTITY))
        return 0;
    if (capacity > r->n_real) capacity = r->n_real;
    memset(want, 0, n * experts);
    used = (size_t *)grab(experts, sizeof *used);
    order = (size_t *)grab(n, sizeof *order);
    for (t = 0; t < n; t++) { /* order[k]: the k-th token to be placed */
        size_t before = 0;
        moe_real mine = 0, other;
        for (e = 0; e < experts; e++)
            if (r->probabilities[t * experts + e] > mine) mine = r->probabilities[t * experts + e];
        for (u = 0; u < n; u++) {
            for (e = 0, other = 0; e < experts; e++)
                if (r->probabilities[u * experts + e] > other) other = r->probabilities[u * experts + e];
            if (!is_real(b, t) || !is_real(b, u))
                before += is_real(b, u) > is_real(b, t) || (is_real(b, u) == is_real(b, t) && u < t);
            else before += c->drop_order == MOE_DROP_PRIORITY ? other > mine || (!(mine > other) && u < t) : u < t;
        }
        order[before] = t;
    }
    for (rank = 0; rank < r->max_choices && c->drop_order != MOE_DROP_SCORE; rank++)
        for (i = 0; i < n; i++) {
            t = order[i];
            if (rank >= (size_t)r->n_choices[t]) continue;
            e = (size_t)r->choices[t * r->max_choices + rank];
            if (used[e]++ < capacity) want[t * experts + e] = 1;
        }
    for (t = 0; t < n && c->drop_order == MOE_DROP_SCORE; t++)
        for (i = 0; i < (size_t)r->n_choices[t]; i++) {
            size_t before = 0, k;
            e = (size_t)r->choices[t * r->max_choices + i];
            for (u = 0; u < n; u++)
                for (k = 0; k < (size_t)r->n_choices[u]; k++)
                    before += (size_t)r->choices[u * r->max_choices + k] == e &&
                              (r->probabilities[u * experts + e] > r->probabilities[t * experts + e] ||
                               (!(r->probabilities[t * experts + e] > r->probabilities[u * experts + e]) && u < t));
            want[t * experts + e] = before < capacity;
        }
    free(used);
    free(order);
    return 1;
}

static double naive_wide_loss(const bench *b, int loss) {
    const moe_routing *r = &b->routing;
    const moe_router_config *c = &b->router.config;
    size_t n = r->n_tokens, experts = r->n_experts, t, u, e, f;
    size_t d = (size_t)c->d_model, o, j;
    double sum = 0.0, mean, real = (double)r->n_real, mass, q[2], home;
    if (loss == MOE_LOSS_USAGE_ENTROPY || loss == MOE_LOSS_L1)
        for (e = 0; e < experts; e++) {
            for (t = 0, mean = 0.0; t < n; t++)
                mean += is_real(b, t) ? (double)r->probabilities[t * experts + e] / real : 0.0;
            if (loss == MOE_LOSS_L1) sum += (double)r->counts[e] * mean * (double)experts / ((double)r->top_k * real);
            else if (mean > 0.0) sum += mean * log(mean);
        }
    if (loss == MOE_LOSS_SIMILARITY)
        for (t = 0; t < n; t++)
            for (u = 0; u < n; u++) {
                double distance = 0.0;
                if (t == u || !is_real(b, t) || !is_real(b, u)) continue;
                for (e = 0; e < d; e++) distance += pow((double)b->x[t * d + e] - (double)b->x[u * d + e], 2.0);
                for (e = 0; e < experts; e++)
                    for (f = 0; f < experts; f++) {
                        double both = (double)r->probabilities[t * experts + e] *
                                      (double)r->probabilities[u * experts + f] * sqrt(distance) / (real * real - real);
                        sum += e == f ? (double)c->loss_similarity_same * both / (double)experts
                                      : -(double)c->loss_similarity_diff * both / (double)(experts * experts - experts);
                    }
            }
    for (o = 0; o < 2 && loss == MOE_LOSS_LOCALITY; o++) {
        q[0] = q[1] = home = 0.0;
        for (t = 0; t < n; t++) {
            if (!is_real(b, t) || (size_t)b->home[t] != o) continue;
            home += 1.0;
            for (e = 0; e < experts; e++) q[b->expert_machine[e]] += (double)r->probabilities[t * experts + e];
        }
        for (j = 0; j < 2 && home > 0.0; j++) {
            mass = q[j] / home;
            if (mass > 0.0) sum += home / real * mass * log(mass / (j == o ? 0.99 : 0.01));
        }
    }
    return sum;
}

static void check_wide_losses(const bench *b) {
    static const int losses[] = {MOE_LOSS_USAGE_ENTROPY, MOE_LOSS_L1, MOE_LOSS_SIMILARITY, MOE_LOSS_LOCALITY};
    size_t i;
    for (i = 0; i < MOE_LOSS_COUNT && frozen(b); i++)
        CHECK(all_zero(&b->routing.loss[i], 1), "a frozen router has no losses");
    if (!(b->router.config.loss_usage_entropy > 0) || b->routing.n_real == 0 ||
        b->router.config.gate == MOE_GATE_IDENTITY || frozen(b))
        return;
    for (i = 0; i < 4; i++) {
        double want, got = (double)b->routing.loss[losses[i]];
        if (losses[i] == MOE_LOSS_LOCALITY && b->router.config.nodes < 2) continue;
        want = losses[i] == MOE_LOSS_SIMILARITY && b->routing.n_real < 2 ? 0.0 : naive_wide_loss(b, losses[i]);
        CHECK(fabs(got - want) <= 20.0 * NEAR * (1.0 + fabs(want)), moe_loss_name(losses[i]));
    }
}

static void check_routed(moe_router_config *c, bench *b, size_t n) {
    size_t t, e;
    unsigned char want[16], kept[12 * 16];
    int student;
    moe_router_config now = effective(b, &student);
    check_consistent(b);
    CHECK(b->routing.top_k == now.top_k, "K of this step");
    for (t = 0; t < n; t++) {
        unsigned char chosen[16] = {0};
        int i;
        if (!is_real(b, t) || !naive_choice(b, t, want)) continue;
        for (i = 0; i < b->routing.n_choices[t]; i++)
            chosen[b->routing.choices[t * b->routing.max_choices + (size_t)i]] = 1;
        CHECK(same_bits(chosen, want, (size_t)c->n_experts), "the selection is that of the naive reference");
    }
    if (now.select == MOE_SELECT_EXPERT_CHOICE && b->routing.n_real > 0) check_expert_choice(b);
    if (naive_capacity(b, kept))
        CHECK(same_bits(kept, b->routing.selected, n * (size_t)c->n_experts),
              "capacity keeps whom the naive reference keeps");
    else if (b->router.config.drop_capacity > 0)
        for (e = 0; e < (size_t)c->n_experts; e++)
            CHECK(b->routing.plan.offsets[e + 1] - b->routing.plan.offsets[e] <= (size_t)c->drop_capacity,
                  "no more than the capacity");
    if (b->router.config.drop_capacity == 0 && !(b->router.config.capacity_factor > 0) &&
        c->drop_rule == MOE_DROP_RULE_NONE && c->capacity_bound == MOE_BOUND_NONE)
        CHECK(b->routing.n_dropped == 0, "dropless");
    if (b->call.training) check_wide_losses(b);
}

static void test_everything(void) {
    int trial, compared = 0, refused = 0;
    for (trial = 0; trial < (quick ? 1500 : 6000); trial++) {
        moe_router_config c;
        moe_error error;
        moe_status status;
        bench b;
        size_t n = (size_t)below(12);
        int32_t sequences[4] = {0, 0, 0, 0};
        draw_any(&c);
        error.message[0] = '\0';
        status = moe_router_check(&c, NULL, &error);
        if (status != MOE_OK) {
            CHECK(status == MOE_ERR_CONFIG && strchr(error.message, '=') != NULL, error.message);
            refused++;
            continue;
        }
        if (!bench_start(&b, &c, moe_kernels_select(below(2)), n, 0.8)) {
            CHECK(0, moe_status_text(b.status));
            bench_end(&b);
            continue;
        }
        b.call.training = chance(70);
        if (chance(30)) b.call.router_x = b.router_x = normals(n * (size_t)c.d_model, 1.0);
        if (chance(40)) mask_some(&b);
        if (chance(40)) {
            sequences[1] = (int32_t)(n / 3);
            sequences[2] = (int32_t)(n / 2);
            sequences[3] = (int32_t)n;
            b.call.sequences = sequences;
            b.call.n_sequences = 3;
        }
        bench_route(&b);
        if (!CHECK(b.status == MOE_OK, "routes")) printf("  %s\n", moe_status_text(b.status));
        else if (c.select == MOE_SELECT_SOFT) {
            if (n > 0) check_soft(&b);
        } else {
            check_routed(&c, &b, n);
            compared++;
        }
        bench_end(&b);
    }
    printf("random routers: %d compared, %d refused\n", compared, refused);
    CHECK(compared > (quick ? 600 : 2500), "many random configurations are good");
}

/* affinity_sum_auto: a token that no expert has affinity for adds nothing to the sum. */
static void test_affinity_sum(void) {
    moe_router_config c = config_of("select=affinity affinity_sum_auto=0.6 weight=raw router_bias=1");
    double wanted = 0;
    size_t t, e, below_0 = 0;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, 40, 1.0), "routes")) return;
    for (e = 0; e < 4; e++) b.tensors[MOE_ROUTER_BIAS][e] = -2;
    b.tensors[MOE_ROUTER_AFFINITY_SUM][0] = 0;
    bench_route(&b);
    for (t = 0; t < 40 && CHECK_STATUS(b.status, MOE_OK); t++) {
        double best = (double)b.routing.logits[t * 4];
        for (e = 1; e < 4; e++) best = fmax(best, (double)b.routing.logits[t * 4 + e]);
        wanted += fmax(best, 0) * 0.6 / 4;
        below_0 += best < 0;
    }
    CHECK(below_0 > 3 && below_0 < 37, "some tokens");
    CHECK_NEAR(b.routing.affinity_now, wanted, 1e-4 * wanted);
    bench_end(&b);
}

/* Affinity: a token goes to its best expert by z only, and an expert keeps its best tokens. */
static void test_affinity(void) {
    int trial;
    for (trial = 0; trial < 300; trial++) {
        moe_router_config c = small_config();
        bench b;
        size_t t, u, e, k, best;
        double mass = 0.25 * (double)(1 + trial % 4);
        c.select = MOE_SELECT_AFFINITY;
        c.affinity_mass = (moe_real)mass;
        c.weight = MOE_WEIGHT_RAW;
        if (trial % 3 == 0) c.capacity = 3;
        if (trial % 5 == 0) c.capacity_min = 2;
        if (trial % 7 == 0) c.capacity_factor = (moe_real)0.5; /* of what the experts keep */
        if (!CHECK(bench_start(&b, &c, NULL, 15, 1.0), "routes")) continue;
        for (e = 0; e < 4; e++) {
            size_t mine[15], n = 0, keep = 0, most;
            double total = 0.0, sum = 0.0;
            int clear = 1;
            for (t = 0; t < 15; t++) {
                for (best = 0, k = 1; k < 4; k++)
                    if (b.routing.logits[t * 4 + k] > b.routing.logits[t * 4 + best]) best = k;
                if (best == e) mine[n++] = t;
            }
            for (t = 0; t < n; t++)
                for (u = t + 1; u < n; u++)
                    if (b.routing.logits[mine[u] * 4 + e] > b.routing.logits[mine[t] * 4 + e]) {
                        best = mine[t];
                        mine[t] = mine[u];
                        mine[u] = best;
                    }
            for (t = 0; t < n; t++) total += fmax((double)b.routing.logits[mine[t] * 4 + e], 0.0);
            for (keep = 0; keep < n && sum < mass * total; keep++) {
                sum += fmax((double)b.routing.logits[mine[keep] * 4 + e], 0.0);
                clear &= fabs(sum - mass * total) > 1e-4 * total;
            }
            if (keep < (size_t)(c.capacity_min > 0 ? c.capacity_min : 1))
                keep = (size_t)(c.capacity_min > 0 ? c.capacity_min : 1);
            if (c.capacity > 0 && keep > (size_t)c.capacity) keep = (size_t)c.capacity;
            if (keep > n) keep = n;
            if (!clear) continue;
            CHECK(b.routing.counts[e] == keep, "the shortest prefix that holds the mass");
            for (t = 0; t < keep && trial % 7 != 0; t++)
                CHECK(b.routing.selected[mine[t] * 4 + e], "the best of an expert's tokens");
            most = keep < 4 || trial % 7 != 0 ? keep : 4; /* ceil(0.5 K N / E) with K = 2 */
            CHECK(b.routing.plan.offsets[e + 1] - b.routing.plan.offsets[e] == most, "the capacity is the limit");
        }
        check_consistent(&b);
        bench_end(&b);
    }
    test_affinity_sum();
}

/* drop_order = random: each of six tokens is as often the one that an expert has room for; outside
   training without random numbers it is the first. */
static void test_random_order(void) {
    moe_router_config c = config_of("top_k=1 drop_capacity=1 drop_order=random");
    size_t kept[6] = {0}, calls = 3000, t;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.0), "routes")) return;
    for (t = 0; t < calls; t++) {
        b.status = moe_route(&b.router, &b.call, b.memory, b.size, &b.routing);
        if (!CHECK_STATUS(b.status, MOE_OK) || !CHECK(b.routing.plan.offsets[1] == 1, "one token")) return;
        kept[b.routing.plan.assignments[0].token]++;
    }
    for (t = 0; t < 6; t++)
        CHECK(fabs((double)kept[t] / (double)calls - 1.0 / 6) < 5.0 * sqrt(5.0 / 36 / (double)calls), "evenly");
    b.call.training = 0;
    b.call.rng = NULL;
    bench_route(&b);
    CHECK(b.status == MOE_OK && b.routing.plan.assignments[0].token == 0, "by position");
    bench_end(&b);
}

/* C = max(capacity_min, ceil(cf K N / E)), at most N, with a factor of its own outside training.
   Equal logits send all tokens to expert 0. */
static void test_capacity_factor(void) {
    static const struct {
        const char *settings;
        size_t n, training, evaluation;
    } rows[] = {{"top_k=1 capacity_factor=1", 12, 3, 3},
                {"top_k=1 capacity_factor=1", 13, 4, 4},
                {"top_k=2 capacity_factor=1.25 capacity_factor_eval=2", 12, 8, 12},
                {"top_k=1 capacity_factor=1.25 capacity_factor_eval=2", 16, 5, 8},
                {"top_k=1 capacity_factor=0.01", 10, 1, 1},
                {"top_k=1 capacity_factor=0.01 capacity_min=3", 10, 3, 3},
                {"top_k=1 capacity_factor=1 capacity_min=30", 10, 10, 10},
                {"top_k=1 capacity_factor=100", 10, 10, 10},
                {"top_k=1 drop_capacity=4", 12, 4, 4},
                {"top_k=1 drop_capacity=400", 12, 12, 12}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_router_config c = config_of(rows[i].settings);
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, rows[i].n, 0.0), "routes")) return;
        if (!CHECK(b.routing.plan.offsets[1] == rows[i].training, rows[i].settings))
            printf("  %lu\n", (unsigned long)b.routing.plan.offsets[1]);
        CHECK(b.routing.counts[0] == rows[i].n, "counts are before capacity");
        b.call.training = 0;
        bench_route(&b);
        CHECK(b.routing.plan.offsets[1] == rows[i].evaluation, rows[i].settings);
        check_consistent(&b);
        bench_end(&b);
    }
    test_random_order();
}

/* Factors that would leave the range: expert 3 is far behind for all tokens, or expert 1 for all
   but the last, or each token has but one expert, too many of them expert 2. */
static void test_sinkhorn_limits(void) {
    enum { N = 8000 };
    const moe_real far = (moe_real)(MOE_REAL_IS_DOUBLE ? -740 : -100), none = -4000;
    const moe_real logits[3][3][4] = {{{0, -5, -9, far}, {-9, -5, 0, far}, {-9, 0, -9, far}},
                                      {{0, none, -9, -5}, {-9, none, 0, -5}, {-9, 0, -9, -5}},
                                      {{0, none, none, none}, {none, none, 0, none}, {none, 0, none, none}}};
    static const size_t best[3] = {0, 2, 1};
    size_t row, kind, t, e, wrong;
    for (row = 0; row < 3; row++) {
        moe_router_config c = config_of("select=sinkhorn weight=raw top_k=1");
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, N, 0.0), "routes")) return;
        for (kind = 0; kind < 3; kind++)
            for (e = 0; e < 4; e++) b.tensors[MOE_ROUTER_WEIGHT][e * 8 + kind] = logits[row][kind][e];
        memset(b.x, 0, N * 8 * sizeof *b.x);
        for (t = 0; t < N; t++) b.x[t * 8 + (t == N - 1 ? 2 : (size_t)(t % 8 > (row < 2 ? 3u : 0u)))] = 1;
        bench_route(&b);
        for (t = wrong = 0; t < N && CHECK_STATUS(b.status, MOE_OK); t++)
            for (kind = 0; kind < 3; kind++)
                wrong += b.x[t * 8 + kind] > 0 && !b.routing.selected[t * 4 + best[kind]];
        CHECK(wrong == 0, "sinkhorn stays within the range");
        bench_end(&b);
    }
}

/* Sinkhorn by its definition, in double, until it stands still. */
static void test_sinkhorn(void) {
    int trial, clear = 0;
    for (trial = 0; trial < 60; trial++) {
        moe_router_config c = config_of("select=sinkhorn weight=raw top_k=1");
        double q[20 * 4], d0[20], d1[4], sum, change = 1.0;
        size_t n = 20, t, e, best, step;
        bench b;
        c.top_k = 1 + trial % 2;
        if (!CHECK(bench_start(&b, &c, NULL, n, 0.8), "routes")) return;
        for (t = 0; t < n; t++) {
            for (e = 0, sum = -HUGE_VAL; e < 4; e++) sum = fmax(sum, (double)b.routing.logits[t * 4 + e]);
            for (e = 0; e < 4; e++) q[t * 4 + e] = exp((double)b.routing.logits[t * 4 + e] - sum);
        }
        for (e = 0; e < 4; e++) d1[e] = 1.0;
        for (step = 0; step < 100 && change >= 1e-4; step++) {
            for (t = 0; t < n; t++) {
                for (e = 0, sum = 0.0; e < 4; e++) sum += q[t * 4 + e] * d1[e];
                d0[t] = 1.0 / ((double)n * sum);
            }
            for (e = 0, change = 0.0; e < 4; e++) {
                for (t = 0, sum = 0.0; t < n; t++) sum += q[t * 4 + e] * d0[t];
                change += fabs(d1[e] - 1.0 / (4.0 * sum)) / 4.0;
                d1[e] = 1.0 / (4.0 * sum);
            }
        }
        for (t = 0; t < n; t++) {
            size_t kept[4] = {0, 1, 2, 3}, k, hold;
            for (e = 0; e < 4; e++)
                for (best = e + 1; best < 4; best++)
                    if (q[t * 4 + kept[best]] * d1[kept[best]] > q[t * 4 + kept[e]] * d1[kept[e]]) {
                        hold = kept[e];
                        kept[e] = kept[best];
                        kept[best] = hold;
                    }
            k = (size_t)c.top_k;
            if (q[t * 4 + kept[k - 1]] * d1[kept[k - 1]] < 1.001 * q[t * 4 + kept[k]] * d1[kept[k]]) continue;
            for (e = 0; e < k; e++) CHECK(b.routing.selected[t * 4 + kept[e]], "sinkhorn by its definition");
            clear++;
        }
        b.call.training = 0;
        bench_route(&b);
        for (t = 0; t < n; t++)
            for (e = 0; e < 4; e++)
                CHECK(b.routing.logits[t * 4 + (size_t)b.routing.choices[t * b.routing.max_choices]] >=
                          b.routing.logits[t * 4 + e],
                      "top_k outside training");
        bench_end(&b);
    }
    CHECK(clear > 900, "most choices of sinkhorn are clear");
    test_sinkhorn_limits();
}

/* ---- randomness ---- */

/* Mean and variance of values, compared with what they should be within five standard errors. */
static void check_moments(const double *v, size_t n, double mean, double variance, const char *what) {
    double sum = 0.0, squares = 0.0;
    size_t i;
    for (i = 0; i < n; i++) sum += v[i] / (double)n;
    for (i = 0; i < n; i++) squares += (v[i] - sum) * (v[i] - sum) / (double)n;
    CHECK(fabs(sum - mean) < 5.0 * sqrt(variance / (double)n), what);
    if (!CHECK(fabs(squares / variance - 1.0) < 5.0 * sqrt(5.0 / (double)n), what))
        printf("  %g, %g\n", squares, variance);
}

static void test_noise(void) {
    static const char *const settings[] = {"noise=gaussian noise_sigma=0.5", "noise=gaussian", "noise=gumbel",
                                           "noise=noisy_topk noise_floor=0.25"};
    const double pi = 3.14159265358979323846;
    double means[4] = {0.0, 0.0, 0.57721566490153286, 0.0}, variances[4] = {0.25, 0.0625, 1.0, 1.0}, *v;
    size_t i, k, n = 3000;
    variances[2] = pi * pi / 6.0;
    variances[3] = pow(log(2.0) + 0.25, 2.0);
    for (i = 0; i < 4; i++) {
        moe_router_config c = config_of(settings[i]);
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, n, 0.0), "routes")) return;
        v = (double *)grab(n * 4, sizeof *v);
        for (k = 0; k < n * 4; k++) v[k] = (double)b.routing.logits[k];
        check_moments(v, n * 4, means[i], variances[i], settings[i]);
        b.call.training = 0;
        bench_route(&b);
        CHECK(all_zero(b.routing.logits, n * 4), "no noise outside training");
        b.call.training = 1;
        b.call.rng = NULL;
        expect_call_refused(&b, MOE_ERR_ARGUMENT, "noise wants random numbers");
        free(v);
        bench_end(&b);
    }
    {
        moe_router_config c = config_of("input=jitter jitter_eps=0.2");
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, n, 0.5), "routes")) return;
        v = (double *)grab(n * 8, sizeof *v);
        for (k = 0; k < n * 8; k++) {
            v[k] = (double)b.routing.u[k] / (double)b.x[k];
            CHECK(v[k] >= 0.8 - 1e-5 && v[k] <= 1.2 + 1e-5, "jitter stays in its range");
        }
        check_moments(v, n * 8, 1.0, 0.4 * 0.4 / 12.0, "jitter");
        free(v);
        bench_end(&b);
    }
}

/* Runs b without dropout, with the pairs of `dropped`, and drawn: nothing dropped is selected, gate
   values stay, what is left is chosen as without it, and evaluation knows of nothing. */
static void check_dropout(bench *b, const char *settings) {
    const size_t n = b->call.n_tokens, experts = b->routing.n_experts;
    const int by_call = b->router.config.expert_dropout_scope == MOE_DROPOUT_SCOPE_CALL;
    unsigned char *dropped = (unsigned char *)grab(n * experts, 1);
    moe_real *p = (moe_real *)grab(n * experts, sizeof *p);
    size_t i, wrong = 0, changed = 0;
    size_t none = 0, free_pairs = 0;
    for (i = 0; i < n * experts; i++) dropped[i] = (unsigned char)(i / experts < 3 || below(3) == 0);
    if (by_call)
        for (i = 0; i < experts; i++) dropped[i] = i % 2 == 1;
    b->call.training = 0;
    bench_route(b);
    memcpy(p, b->routing.probabilities, n * experts * sizeof *p);
    b->call.training = 1;
    b->call.dropped = dropped;
    bench_route(b);
    for (i = 0; i < n * experts; i++) {
        const int out = dropped[by_call ? i % experts : i] != 0;
        wrong += out && b->routing.selected[i];
        free_pairs += !out && b->routing.selected[i];
        changed += !same_bits(&p[i], &b->routing.probabilities[i], sizeof *p);
    }
    for (i = 0; i < n; i++) none += b->routing.n_choices[i] == 0;
    CHECK(wrong == 0 && changed == 0 && free_pairs > 0, settings);
    CHECK(by_call || none >= 3, settings);
    check_consistent(b);
    b->call.dropped = NULL;
    bench_route(b);
    check_consistent(b);
    b->call.rng = NULL;
    expect_call_refused(b, MOE_ERR_ARGUMENT, "dropout wants random numbers");
    free(dropped);
    free(p);
}

static void test_expert_dropout(void) {
    static const char *const settings[] = {"", "selection_bias=1", "select=grouped_each groups=2",
                                           "select=threshold threshold=0.2 threshold_fallback=never weight=raw",
                                           "select=positive gate=relu weight=raw", "select=dense",
                                           "select=expert_choice weight=raw"};
    size_t i, k, n = 2000, open;
    int scope;
    for (i = 0; i < sizeof settings / sizeof *settings; i++)
        for (scope = 0; scope < 2; scope++) {
            moe_router_config c = config_of(settings[i]);
            bench b;
            c.expert_dropout = (moe_real)0.25;
            c.expert_dropout_scope = scope;
            if (!CHECK(bench_start(&b, &c, NULL, 40, 1.0), settings[i])) return;
            check_dropout(&b, settings[i]);
            bench_end(&b);
        }
    for (scope = 0; scope < 2; scope++) {
        moe_router_config c = config_of("select=dense expert_dropout=0.25");
        bench b;
        c.expert_dropout_scope = scope;
        if (!CHECK(bench_start(&b, &c, NULL, n, 1.0), "routes")) return;
        for (k = 0, open = 0; k < n * 4; k++) open += b.routing.selected[k];
        if (scope == MOE_DROPOUT_SCOPE_TOKEN)
            CHECK(fabs((double)open / (double)(n * 4) - 0.75) <= 5.0 * sqrt(0.1875 / (double)(n * 4)), "its share");
        for (k = 4; k < n * 4 && scope == MOE_DROPOUT_SCOPE_CALL; k++)
            CHECK(b.routing.selected[k] == b.routing.selected[k % 4], "one draw for the call");
        b.call.training = 0;
        bench_route(&b);
        for (k = 0, open = 0; k < n * 4; k++) open += b.routing.selected[k];
        CHECK(open == n * 4, "nothing is dropped outside training");
        bench_end(&b);
    }
}

/* Weak choices are dropped with the probability of the rule, the first never, and never outside
   training. */
static void test_drop_rules(void) {
    static const char *const settings[] = {"n_experts=16 top_k=3 weight=raw drop_rule=gshard",
                                           "n_experts=16 top_k=3 weight=raw drop_rule=st_moe"};
    size_t i, n = 5000, t, kept[3];
    for (i = 0; i < 2; i++) {
        moe_router_config c = config_of(settings[i]);
        double want[3], share;
        bench b;
        want[0] = 1.0;
        want[1] = i ? 0.3125 : 0.125;
        want[2] = i ? 0.3125 : 1.0; /* p is 1/16 everywhere */
        if (!CHECK(bench_start(&b, &c, NULL, n, 0.0), "routes")) return;
        kept[0] = kept[1] = kept[2] = 0;
        for (t = 0; t < 3 * n; t++) kept[t % 3] += b.routing.kept[t];
        for (t = 0; t < 3; t++) {
            share = (double)kept[t] / (double)n;
            CHECK(fabs(share - want[t]) <= 5.0 * sqrt(want[t] * (1.0 - want[t]) / (double)n), settings[i]);
        }
        check_consistent(&b);
        b.call.training = 0;
        bench_route(&b);
        CHECK(b.routing.n_dropped == 0, "no random dropping outside training");
        bench_end(&b);
    }
}

/* What the rule drops takes no place from the others: an expert keeps all that fits of the rest. */
static void test_drop_rule_and_capacity(void) {
    enum { N = 60, EXPERTS = 8, CAPACITY = 12 };
    int order;
    for (order = 0; order < MOE_DROP_COUNT; order++) {
        moe_router_config c = config_of("n_experts=8 top_k=3 weight=raw drop_rule=st_moe");
        size_t left[EXPERTS] = {0}, kept[EXPERTS] = {0};
        size_t over = 0, pair, e;
        unsigned char by_rule[3 * N];
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, N, 0.2), "routes")) return;
        b.router.config.drop_order = order;
        CHECK(b.routing.max_choices == 3 && b.routing.n_dropped > 0 && b.routing.n_dropped < 2 * N, "the rule drops");
        memcpy(by_rule, b.routing.kept, sizeof by_rule);
        for (pair = 0; pair < 3 * N; pair++) left[b.routing.choices[pair]] += by_rule[pair];
        b.router.config.drop_capacity = CAPACITY;
        bench_route(&b);
        if (!CHECK(b.status == MOE_OK, "routes")) return;
        for (pair = 0; pair < 3 * N; pair++) {
            CHECK(by_rule[pair] || !b.routing.kept[pair], "what the rule has dropped stays dropped");
            kept[b.routing.choices[pair]] += b.routing.kept[pair];
        }
        for (e = 0; e < EXPERTS; e++) {
            CHECK(kept[e] == (left[e] < CAPACITY ? left[e] : (size_t)CAPACITY), "all that fits");
            over += left[e] > CAPACITY;
        }
        CHECK(over > 0, "some expert is full");
        check_consistent(&b);
        bench_end(&b);
    }
}

static int same_choices(const bench *b, size_t t, size_t other) {
    return same_bits(b->routing.selected + t * 8, b->routing.selected + other * 8, 8);
}

/* sample_scope: the tokens of a sequence share a draw, and other sequences have other ones; those
   of a call do so in training alone. */
static void test_sample_scopes(void) {
    static const int32_t sequences[4] = {0, 5, 11, 20};
    moe_router_config c = config_of("n_experts=8 top_k=2 select=sample sample_scope=sequence sample_at=always");
    size_t i, t;
    bench b;
    int other;
    for (c.sample_scope = MOE_SAMPLE_SEQUENCE; c.sample_scope <= MOE_SAMPLE_CALL; c.sample_scope++) {
        const int by_call = c.sample_scope == MOE_SAMPLE_CALL;
        if (!CHECK(bench_start(&b, &c, NULL, 20, 0.2), "routes")) return;
        b.call.sequences = sequences;
        b.call.n_sequences = 3;
        for (b.call.training = 0; b.call.training < 2; b.call.training++) {
            bench_route(&b);
            for (i = 0, other = 0; i < 3 && CHECK_STATUS(b.status, MOE_OK); i++) {
                const size_t from = (size_t)sequences[i];
                for (t = from; t < (size_t)sequences[i + 1]; t++)
                    CHECK(same_choices(&b, t, from) || (by_call && !b.call.training), "a sequence shares its draw");
                for (t = 1; t < 20; t++) other += !same_choices(&b, t, 0);
            }
            CHECK((other > 0) == !(by_call && b.call.training), "others draw for themselves");
        }
        bench_end(&b);
    }
}

/* Sampling draws in proportion to p and without replacement; even rows and columns for sinkhorn. */
static void test_sampling(void) {
    moe_router_config c = config_of("n_experts=3 top_k=1 select=sample router_bias=1 weight=one");
    size_t n = 8000, e, t;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, n, 0.0), "routes")) return;
    b.tensors[MOE_ROUTER_BIAS][0] = (moe_real)log(6.0);
    b.tensors[MOE_ROUTER_BIAS][1] = (moe_real)log(3.0);
    b.tensors[MOE_ROUTER_BIAS][2] = 0;
    bench_route(&b);
    for (e = 0; e < 3; e++) {
        double want = (e == 0 ? 6.0 : e == 1 ? 3.0 : 1.0) / 10.0;
        CHECK(fabs((double)b.routing.counts[e] / (double)n - want) < 5.0 * sqrt(want * (1.0 - want) / (double)n),
              "samples follow p");
    }
    b.call.training = 0;
    bench_route(&b);
    CHECK(b.routing.counts[0] == n, "the best one outside training");
    bench_end(&b);
    c = config_of("top_k=3 select=sample");
    if (!CHECK(bench_start(&b, &c, NULL, 500, 1.0), "routes")) return;
    for (t = 0; t < 500; t++) CHECK(b.routing.n_choices[t] == 3, "K draws without replacement");
    check_consistent(&b);
    bench_end(&b);
    c = config_of("top_k=1 select=sinkhorn weight=raw");
    if (!CHECK(bench_start(&b, &c, NULL, 400, 1.5), "routes")) return;
    for (e = 0; e < 4; e++) CHECK(b.routing.counts[e] > 60 && b.routing.counts[e] < 140, "sinkhorn is nearly even");
    check_consistent(&b);
    bench_end(&b);
    test_sample_scopes();
}

/* A token for which no expert is left draws all the same: what comes later keeps its draws. */
static void test_draws_are_counted(void) {
    moe_router_config c = config_of("n_experts=4 top_k=2 select=sample router_bias=1 weight=one");
    unsigned char selected[40 * 4];
    moe_real *w;
    bench b;
    size_t t, e;
    if (!CHECK(bench_start(&b, &c, NULL, 40, 0.3), "routes")) return;
    w = b.tensors[MOE_ROUTER_WEIGHT];
    for (t = 0; t < 40; t++)
        for (e = 0; e < 8; e++) b.x[t * 8 + e] = t == 3 && e == 0 ? 1 : e == 0 ? 0 : b.x[t * 8 + e];
    bench_route(&b); /* the first number of x is 0 but for one token */
    memcpy(selected, b.routing.selected, sizeof selected);
    for (e = 0; e < 4; e++) w[e * 8] = e == 2 ? 2000 : -2000; /* whose one expert has all of p */
    bench_route(&b);
    CHECK(b.routing.n_choices[3] == 1 && b.routing.choices[3 * b.routing.max_choices] == 2, "one expert has p");
    CHECK(same_bits(selected + 4 * 4, b.routing.selected + 4 * 4, 36 * 4), "later tokens keep their draws");
    bench_end(&b);
}

/* What is wrong in the last row, the last number of a row, or a fraction, is refused. */
static void test_last_ones_are_checked(void) {
    moe_router_config c = config_of("n_experts=3 select=soft slots=3");
    unsigned char mask[6] = {1, 0, 1, 1, 0, 1};
    int32_t experts[6 * 2] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 4};
    moe_real weights[6 * 2] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    bench b;
    size_t i;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 1.0), "soft routes")) return;
    b.call.mask = mask;
    for (i = 0; i < 8; i++) b.x[5 * 8 + i] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e308 : 3e38);
    for (i = 0; i < 9 * 8; i++) b.tensors[MOE_ROUTER_SLOT_VECTORS][i] *= 1000;
    expect_call_says(&b, MOE_ERR_NONFINITE, "a logit");
    bench_end(&b);
    c = config_of("input=adaptive_clustering");
    if (!CHECK(bench_start(&b, &c, NULL, 6, 1.0), "clusters")) return;
    b.call.n_previous = 2;
    b.call.previous_experts = experts;
    b.call.previous_weights = weights;
    expect_call_says(&b, MOE_ERR_ARGUMENT, "call.previous_experts[11] = 4");
    mask[5] = 0;
    b.call.mask = mask;
    bench_route(&b);
    CHECK_STATUS(b.status, MOE_OK, "the expert of padding is not read");
    bench_end(&b);
    c = config_of("select=hash table_size=5");
    if (!CHECK(bench_start(&b, &c, NULL, 6, 1.0), "hashes")) return;
    b.token_ids[5] = 4;
    for (i = 0; i < 2; i++) b.tensors[MOE_ROUTER_TABLE][4 * 2 + i] += (moe_real)0.5;
    expect_call_says(&b, MOE_ERR_ARGUMENT, "router.table: ");
    bench_end(&b);
}

/* Without an array expert e is at machine e nodes / E, rounded down. */
static void test_machines(void) {
    static const int32_t where[4] = {0, 0, 1, 2};
    moe_router_config c = config_of("nodes=3 loss_locality=1");
    moe_real with;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, 9, 1.0), "routes")) return;
    b.call.expert_machine = where;
    bench_route(&b);
    with = b.routing.loss[MOE_LOSS_LOCALITY];
    b.call.expert_machine = NULL;
    bench_route(&b);
    CHECK(with > 0 && same_reals(&with, &b.routing.loss[MOE_LOSS_LOCALITY], 1), "the machines of four experts");
    mask_some(&b);
    b.mask[0] = 1;
    b.mask[8] = 0;
    b.home[8] = -1;
    bench_route(&b);
    CHECK_STATUS(b.status, MOE_OK, "padding has no machine");
    b.home[0] = 3;
    expect_call_says(&b, MOE_ERR_ARGUMENT, "call.token_machine[0] = 3: must be 0 to 2");
    bench_end(&b);
}

/* A step takes the loads of the steps before it off, for a frozen router too. */
static void test_loads_are_taken_off(void) {
    moe_router_config c = config_of("selection_bias=1 bias_rate=0.1 freeze_at=2");
    bench b;
    int step;
    if (!CHECK(bench_start(&b, &c, NULL, 5, 1.0), "routes")) return;
    for (step = 0; step < 4; step++) {
        b.tensors[MOE_ROUTER_STEP][0] = (moe_real)step;
        CHECK_STATUS(moe_router_observe(&b.router, &b.call, &b.routing, b.tensors), MOE_OK);
        CHECK(b.tensors[MOE_ROUTER_LOAD][4] > 0, "tokens are counted");
        CHECK_STATUS(moe_router_advance(&b.router, b.tensors), MOE_OK);
        CHECK(all_zero(b.tensors[MOE_ROUTER_LOAD], 5), "loads are taken off");
    }
    bench_end(&b);
}

/* ---- properties ---- */

static void test_presets(void) {
    const moe_preset *preset, *other;
    moe_router_config c, kept;
    moe_error error;
    int count = 0;
    for (preset = moe_presets(); preset->name != NULL; preset++, count++) {
        bench b;
        const char *word = preset->aliases;
        CHECK(moe_preset_find(preset->name) == preset, preset->name);
        while (*word != '\0') {
            char alias[64];
            size_t n = strcspn(word, " ");
            memcpy(alias, word, n);
            alias[n] = '\0';
            CHECK(moe_preset_find(alias) == preset, alias);
            word += n + (word[n] == ' ');
        }
        CHECK(preset->source[0] != '\0' && preset->formula[0] != '\0' && preset->router[0] != '\0' &&
                  preset->layer != NULL,
              preset->name);
        for (other = moe_presets(); other < preset; other++)
            CHECK(strcmp(other->name, preset->name) != 0, "names are unique");
        if (!CHECK(moe_router_preset(preset->name, &c, &error) == MOE_OK, preset->name)) continue;
        CHECK(c.d_model == 0, "the width is left to the caller");
        c.d_model = 16;
        if ((c.select == MOE_SELECT_HASH || c.student_dim > 0) && c.table_size == 0)
            c.table_size = 5; /* a size, like d_model */
        CHECK(moe_router_check(&c, NULL, NULL) == MOE_OK, preset->name);
        CHECK(moe_router_check_training(&c, NULL) == MOE_OK, preset->name);
        if (c.n_experts > 8) c.n_experts = 8;
        TEST_FEWER_EXPERTS(c);
        if (c.top_k > c.n_experts) c.top_k = c.n_experts;
        if (c.select == MOE_SELECT_GROUPED_TOP_K) {
            c.groups = 4;
            c.groups_kept = 2;
            c.top_k = 3;
        }
        if (!bench_start(&b, &c, NULL, 7, 0.5)) CHECK(0, preset->name);
        else if (c.select == MOE_SELECT_SOFT) check_soft(&b);
        else check_consistent(&b);
        bench_end(&b);
    }
    CHECK(count >= 20, "presets");
    memset(&c, 7, sizeof c);
    kept = c;
    CHECK(moe_router_preset("bogus", &c, &error) == MOE_ERR_NOT_FOUND && strstr(error.message, "bogus") != NULL,
          "an unknown preset is named");
    CHECK(moe_router_preset("", &c, NULL) == MOE_ERR_NOT_FOUND &&
              moe_router_preset(NULL, &c, NULL) == MOE_ERR_NOT_FOUND,
          "no name");
    CHECK(same_bits(&c, &kept, sizeof c), "a failed preset leaves the configuration");
    CHECK(moe_preset_find("bogus") == NULL && moe_preset_find(NULL) == NULL && moe_preset_find("") == NULL,
          "no such preset");
}

/* Replaying what was recorded gives the same weights bit for bit. */
static void test_replay(void) {
    int gate, weight, masked;
    for (gate = 0; gate < MOE_GATE_COUNT; gate++)
        for (weight = 0; weight < MOE_WEIGHT_SPARSEMIXER; weight++)
            for (masked = 0; masked < 2; masked++) {
                moe_router_config c = small_config();
                bench b;
                moe_real *weights;
                int32_t *choices;
                size_t cells;
                c.n_experts = 7;
                c.top_k = 3;
                c.gate = gate;
                c.weight = weight;
                if (!CHECK(bench_start(&b, &c, NULL, 11, 0.6), "routes")) continue;
                if (masked) {
                    mask_some(&b);
                    bench_route(&b);
                }
                cells = 11 * 7;
                weights = (moe_real *)grab(cells, sizeof *weights);
                choices = (int32_t *)grab(11 * 3, sizeof *choices);
                memcpy(weights, b.routing.weights, cells * sizeof *weights);
                memcpy(choices, b.routing.choices, 11 * 3 * sizeof *choices);
                b.router.config.select = MOE_SELECT_GIVEN;
                b.call.given = choices;
                bench_route(&b);
                CHECK(b.status == MOE_OK && same_bits(weights, b.routing.weights, cells * sizeof *weights), "replay");
                check_consistent(&b);
                free(weights);
                free(choices);
                bench_end(&b);
            }
}

static void test_bad_given(void) {
    static const int32_t bad[][2] = {{0, 0},  {3, 3},         {4, 0},         {0, 4},
                                     {-2, 0}, {0, INT32_MAX}, {INT32_MIN, 1}, {65536, 1}};
    static const int32_t good[][2] = {{0, 3}, {-1, 2}, {2, -1}, {-1, -1}};
    moe_router_config c = config_of("select=given");
    bench b;
    size_t i, k;
    if (!CHECK(bench_start(&b, &c, NULL, 3, 0.6), "routes")) return;
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        b.given[4] = bad[i][0];
        b.given[5] = bad[i][1];
        expect_call_refused(&b, MOE_ERR_ARGUMENT, "bad indices");
    }
    for (i = 0; i < sizeof good / sizeof good[0]; i++) {
        int32_t n = 0;
        b.given[4] = good[i][0];
        b.given[5] = good[i][1];
        bench_route(&b);
        if (!CHECK(b.status == MOE_OK, "good indices")) continue;
        for (k = 0; k < 2; k++) {
            if (good[i][k] < 0) continue;
            CHECK(b.routing.selected[2 * 4 + good[i][k]], "the caller's experts");
            n++;
        }
        CHECK(n < 2 || b.routing.probabilities[8 + b.routing.choices[4]] >=
                           b.routing.probabilities[8 + b.routing.choices[5]],
              "ranks follow p");
        CHECK(b.routing.n_choices[2] == n, "-1 is none");
        check_consistent(&b);
    }
    b.call.given = NULL;
    expect_call_refused(&b, MOE_ERR_ARGUMENT, "no indices");
    bench_end(&b);
}

/* Zero weights make all logits equal: every gate is uniform and the balance loss is its factor,
   exactly where 1/E is exact. */
static void test_uniform(void) {
    int experts, gate, over, select, scope;
    for (experts = 1; experts <= 16; experts++)
        for (gate = 0; gate < MOE_GATE_RELU; gate++)
            for (over = 0; over < MOE_BALANCE_COUNT; over++)
                for (select = 0; select < 2; select++)
                    for (scope = 0; scope < 2; scope++) {
                        moe_router_config c = small_config();
                        bench b;
                        int32_t sequences[3] = {0, 3, 8};
                        double want, got;
                        c.n_experts = experts;
                        c.top_k = experts < 2 ? 1 : 2;
                        c.gate = gate;
                        c.select = select;
                        c.loss_balance = (moe_real)0.375;
                        c.balance_over = over;
                        c.balance_scope = scope;
                        c.loss_importance = (moe_real)0.5;
                        c.unbiased = scope;
                        if (!CHECK(bench_start(&b, &c, NULL, 8, 0.0), "routes")) continue;
                        b.call.sequences = sequences;
                        b.call.n_sequences = 2;
                        bench_route(&b);
                        want = 0.375 * (over == MOE_BALANCE_TOKENS
                                            ? (double)(select == MOE_SELECT_DENSE ? experts : c.top_k)
                                            : 1.0);
                        got = (double)b.routing.loss[MOE_LOSS_BALANCE];
                        CHECK(near(got, want), "balance at uniform");
                        if ((experts & (experts - 1)) == 0 && gate == MOE_GATE_SOFTMAX && scope == 0)
                            CHECK(!(got < want) && !(got > want), "balance is exactly its factor at uniform");
                        CHECK(!(b.routing.loss[MOE_LOSS_IMPORTANCE] < 0) && !(b.routing.loss[MOE_LOSS_IMPORTANCE] > 0),
                              "importance is 0 at balance");
                        bench_end(&b);
                    }
}

/* The gradient of the importance loss alone, with equal gates, is exactly 0. */
static void test_importance_gradient(void) {
    int experts, gate, over, unbiased;
    for (experts = 1; experts <= 9; experts++)
        for (gate = 0; gate < MOE_GATE_RELU; gate++)
            for (over = 0; over < 2; over++)
                for (unbiased = 0; unbiased < 2; unbiased++) {
                    moe_router_config c = small_config();
                    moe_real *gradients[MOE_ROUTER_PARAMETER_COUNT], *dx, *dw;
                    bench b;
                    c.n_experts = experts;
                    c.top_k = 1;
                    c.gate = gate;
                    c.loss_importance = 1;
                    c.importance_over = over;
                    c.unbiased = unbiased;
                    if (!CHECK(bench_start(&b, &c, NULL, 7, 0.0), "routes")) continue;
                    memset(gradients, 0, sizeof gradients);
                    dw = normals((size_t)experts * 8, 0.0);
                    dx = normals(7 * 8, 0.0);
                    gradients[MOE_ROUTER_WEIGHT] = dw;
                    memset(b.routing.d_weight_in, 0, b.routing.plan.offsets[experts] * sizeof(moe_real));
                    memset(b.routing.d_weight_out, 0, b.routing.plan.offsets[experts] * sizeof(moe_real));
                    CHECK(moe_route_backward(&b.router, &b.call, &b.routing, gradients, dx, NULL) == MOE_OK,
                          "backward");
                    CHECK(all_zero(dw, (size_t)experts * 8) && all_zero(dx, 7 * 8),
                          "the gradient of importance is exactly 0 at balance");
                    free(dw);
                    free(dx);
                    bench_end(&b);
                }
}

/* One expert has nearly everything, the first one or another: the importance keeps its digits. */
static void test_importance_of_one(void) {
    int most, e;
    for (most = 0; most < 64; most += 21) {
        moe_router_config c = small_config();
        bench b;
        double want, got;
        c.n_experts = 64;
        c.loss_importance = 1;
        if (!CHECK(bench_start(&b, &c, NULL, 1, 0.0), "routes")) continue;
        b.x[0] = 1;
        for (e = 0; e < 64; e++) b.tensors[MOE_ROUTER_WEIGHT][e * 8] = (moe_real)(e == most ? 9 : e % 3);
        bench_route(&b);
        want = ref_loss(&b, MOE_LOSS_IMPORTANCE);
        got = (double)b.routing.loss[MOE_LOSS_IMPORTANCE];
        CHECKF(fabs(got - want) < 2e-6 * want, "expert %d: %.9g, not %.9g", most, got, want);
        bench_end(&b);
    }
}

/* Equal scores: the lower index comes first, for every gate, with and without a bias that is equal
   for all. */
static void test_ties(void) {
    int gate, select, biased;
    size_t t, i;
    for (gate = 0; gate < MOE_GATE_COUNT; gate++)
        for (select = 0; select < 2; select++)
            for (biased = 0; biased < 2; biased++) {
                moe_router_config c = small_config();
                bench b;
                if (biased && select == MOE_SELECT_DENSE) continue;
                c.n_experts = 9;
                c.top_k = 4;
                c.gate = gate;
                c.select = select;
                c.selection_bias = biased;
                if (!CHECK(bench_start(&b, &c, NULL, 3, 0.0), "routes")) continue;
                for (t = 0; t < 3; t++)
                    for (i = 0; i < (size_t)b.routing.n_choices[t]; i++)
                        CHECK((size_t)b.routing.choices[t * b.routing.max_choices + i] == i,
                              "ties take the lower index");
                check_consistent(&b);
                bench_end(&b);
            }
    { /* a saturated gate is no tie: the logits decide */
        moe_router_config c = config_of("n_experts=3 top_k=1 gate=sigmoid router_bias=1");
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, 1, 0.0), "routes")) return;
        b.tensors[MOE_ROUTER_BIAS][0] = 100;
        b.tensors[MOE_ROUTER_BIAS][1] = 101;
        b.tensors[MOE_ROUTER_BIAS][2] = 99;
        bench_route(&b);
        CHECK(b.routing.choices[0] == 1, "a saturated sigmoid does not tie");
        bench_end(&b);
    }
    { /* all negative under relu: all p are 0, the lower index wins and a zero denominator gives 0 */
        moe_router_config c = config_of("gate=relu router_bias=1");
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, 2, 0.0), "routes")) return;
        for (i = 0; i < 4; i++) b.tensors[MOE_ROUTER_BIAS][i] = (moe_real)i - 10;
        bench_route(&b);
        CHECK(b.routing.choices[0] == 0 && b.routing.choices[1] == 1 && all_zero(b.routing.weights, 8),
              "nothing passes relu");
        bench_end(&b);
    }
}

static void test_sizes(void) {
    int experts, score, training;
    for (score = 0; score < MOE_SCORE_COUNT; score++)
        for (experts = 1; experts < 4; experts++)
            for (training = 0; training < 2; training++) {
                size_t n;
                for (n = 0; n < 3; n++) {
                    moe_router_config c = small_config();
                    moe_real *gradients[MOE_ROUTER_PARAMETER_COUNT], *dx;
                    bench b;
                    int loss;
                    c.d_model = 6;
                    c.score = score;
                    c.n_experts = c.top_k = experts;
                    c.loss_balance = c.loss_z = c.loss_entropy = c.loss_importance = 1;
                    if (!CHECK(bench_start(&b, &c, NULL, n, 0.7), "few tokens and experts")) continue;
                    b.call.training = training;
                    if (n == 0) {
                        b.call.x = NULL;
                        b.call.activations = NULL;
                    }
                    bench_route(&b);
                    if (CHECK(b.status == MOE_OK, "few tokens and experts")) {
                        check_consistent(&b);
                        CHECK(b.routing.plan.offsets[experts] == n * (size_t)experts, "K = E takes all");
                        for (loss = 0; loss < MOE_LOSS_COUNT; loss++)
                            CHECK(moe_is_finite(b.routing.loss[loss]) &&
                                      ((n > 0 && training) || all_zero(&b.routing.loss[loss], 1)),
                                  "losses");
                        memset(gradients, 0, sizeof gradients);
                        dx = normals(n * 8, 0.0);
                        if (training && n > 0)
                            memset(b.routing.d_weight_out, 0, n * (size_t)experts * sizeof(moe_real));
                        CHECK(moe_route_backward(&b.router, &b.call, &b.routing, gradients, dx, NULL) ==
                                  (training ? MOE_OK : MOE_ERR_STATE),
                              "backward needs training");
                        free(dx);
                    }
                    bench_end(&b);
                }
            }
    { /* all padding */
        moe_router_config c =
            config_of("loss_balance=1 loss_z=1 loss_importance=1 loss_entropy=1 balance_scope=sequences");
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, 4, 0.7), "routes")) return;
        b.call.mask = b.mask = (unsigned char *)grab(4, 1);
        bench_route(&b);
        CHECK(b.status == MOE_OK && b.routing.n_real == 0 && b.routing.plan.offsets[4] == 0 &&
                  all_zero(b.routing.loss, MOE_LOSS_COUNT),
              "all padding");
        bench_end(&b);
    }
}

static void test_nonfinite(void) {
    int score;
    size_t i;
    moe_rng_seed(&rng, 78); /* hidden units of both signs, whatever ran before */
    for (score = 0; score < MOE_SCORE_COUNT; score++)
        for (i = 0; i < 4; i++) {
            double values[4];
            moe_router_config c = small_config();
            moe_real *at;
            bench b;
            values[0] = HUGE_VAL;
            values[1] = -HUGE_VAL;
            values[2] = HUGE_VAL - HUGE_VAL;
            values[3] = 3.0e38;
            if (i == 1 && score == MOE_SCORE_COMPETITION) continue;                    /* softplus(-inf) is 0 */
            /* its steps are 0 or 1 at infinity */
            if (i < 2 && score == MOE_SCORE_DSELECT) continue;
            /* cosine and norms can stay finite */
            if (i == 3 && (MOE_REAL_IS_DOUBLE || score >= MOE_SCORE_COSINE)) continue;
            c.score = score;
            if (!CHECK(bench_start(&b, &c, NULL, 3, 30.0), "routes")) continue;
            /* the second token */
            at = score == MOE_SCORE_NORM || score == MOE_SCORE_COMPETITION ? b.nodes + 5 : b.x + 8;
            *at = (moe_real)values[i];
            if (i == 3) /* finite, but its products are not */
                for (; at < b.x + 16; at++) *at = (moe_real)values[3];
            expect_call_refused(&b, MOE_ERR_NONFINITE, "a logit that is not finite");
            b.call.mask = b.mask = (unsigned char *)grab(3, 1);
            b.mask[0] = b.mask[2] = 1;
            bench_route(&b);
            CHECK(b.status == MOE_OK, "padding may hold anything");
            if (b.status == MOE_OK) check_consistent(&b);
            bench_end(&b);
        }
}

/* The asked size suffices at every alignment, one byte less does not, and nothing outside is
   touched. */
static void test_memory(void) {
    enum { GUARD = 64 };
    int trial;
    for (trial = 0; trial < 500; trial++) {
        moe_router_config c;
        bench b;
        size_t shift, i, n = (size_t)below(8);
        unsigned char *memory;
        moe_routing r;
        draw_any(&c);
        if (moe_router_check(&c, NULL, NULL) != MOE_OK) continue;
        if (!CHECK(bench_start(&b, &c, NULL, n, 0.8), "routes")) continue;
        if (below(2)) mask_some(&b);
        b.call.training = below(2);
        bench_route(&b);
        memory = (unsigned char *)grab(b.size + 16 + 2 * GUARD, 1);
        for (shift = 0; shift < 16; shift++) {
            unsigned char *at = memory + GUARD + shift;
            int good = 1;
            memset(memory, 0xA5, b.size + 16 + 2 * GUARD);
            moe_rng_seed(&b.rng, 3);
            CHECK(moe_route(&b.router, &b.call, at, b.size, &r) == MOE_OK, "the exact size");
            CHECK(same_bits(r.weights, b.routing.weights, n * (size_t)c.n_experts * sizeof(moe_real)),
                  "alignment changes nothing");
            if (b.call.training && n > 0) {
                memset(r.d_weight_out, 0, r.plan.offsets[c.n_experts] * sizeof(moe_real));
                memset(r.d_weight_in, 0, r.plan.offsets[c.n_experts] * sizeof(moe_real));
            }
            if (b.call.training) {
                moe_real *gradients[MOE_ROUTER_PARAMETER_COUNT], *dx = normals(n * (size_t)c.d_model, 0.0);
                memset(gradients, 0, sizeof gradients);
                CHECK(moe_route_backward(&b.router, &b.call, &r, gradients, dx, NULL) == MOE_OK, "backward");
                free(dx);
            }
            for (i = 0; i < GUARD + shift; i++) good &= memory[i] == 0xA5;
            for (i = GUARD + shift + b.size; i < b.size + 16 + 2 * GUARD; i++) good &= memory[i] == 0xA5;
            CHECK(good, "guard bytes");
        }
        b.size--;
        expect_call_refused(&b, MOE_ERR_SPACE, "one byte too few");
        b.size = 0;
        expect_call_refused(&b, MOE_ERR_SPACE, "no bytes");
        free(memory);
        bench_end(&b);
    }
}

static void test_bad_calls(void) {
    moe_router_config c = config_of("router_bias=1");
    bench b;
    moe_routing r;
    size_t bytes = 12345, i;
    static const int32_t bad[][4] = {{1, 2, 3, 5}, {0, 3, 2, 5},  {0, 2, 3, 4},
                                     {0, 2, 3, 6}, {-1, 2, 3, 5}, {0, -1, 3, 5}};
    if (!CHECK(bench_start(&b, &c, NULL, 5, 0.6), "routes")) return;
    CHECK(moe_route_size(NULL, 5, 1, &bytes) == MOE_ERR_ARGUMENT &&
              moe_route_size(&b.router, 5, 1, NULL) == MOE_ERR_ARGUMENT,
          "NULL");
    CHECK(moe_route(NULL, &b.call, b.memory, b.size, &r) == MOE_ERR_ARGUMENT &&
              moe_route(&b.router, NULL, b.memory, b.size, &r) == MOE_ERR_ARGUMENT &&
              moe_route(&b.router, &b.call, NULL, b.size, &r) == MOE_ERR_ARGUMENT &&
              moe_route(&b.router, &b.call, b.memory, b.size, NULL) == MOE_ERR_ARGUMENT,
          "NULL");
#if SIZE_MAX > 0xFFFFFFFF
    CHECK(moe_route_size(&b.router, (size_t)INT32_MAX + 1, 0, &bytes) == MOE_ERR_OVERFLOW && bytes == 12345,
          "too many tokens");
    CHECK(moe_route_size(&b.router, SIZE_MAX, 0, &bytes) == MOE_ERR_OVERFLOW && bytes == 12345, "far too many tokens");
    b.call.n_tokens = SIZE_MAX;
    expect_call_refused(&b, MOE_ERR_OVERFLOW, "far too many tokens");
    b.call.n_tokens = 5;
#endif
    b.call.x = NULL;
    expect_call_refused(&b, MOE_ERR_ARGUMENT, "no x");
    b.call.x = b.x;
    b.router.tensors[MOE_ROUTER_BIAS] = NULL;
    expect_call_refused(&b, MOE_ERR_ARGUMENT, "a tensor is missing");
    b.router.tensors[MOE_ROUTER_BIAS] = b.tensors[MOE_ROUTER_BIAS];
    b.call.n_sequences = 3;
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        b.call.sequences = bad[i];
        expect_call_refused(&b, MOE_ERR_ARGUMENT, "bad offsets");
    }
    b.call.n_sequences = 0;
    expect_call_refused(&b, MOE_ERR_ARGUMENT, "no sequences");
    b.call.sequences = NULL;
    bench_route(&b);
    CHECK(b.status == MOE_OK, "good again");
    CHECK(moe_router_init(NULL, &c, NULL, NULL) == MOE_ERR_ARGUMENT, "router NULL");
    CHECK(moe_router_parameter(&b.router.config, -1, NULL) == MOE_ERR_NOT_FOUND &&
              moe_router_parameter(&b.router.config, MOE_ROUTER_PARAMETER_COUNT, NULL) == MOE_ERR_NOT_FOUND,
          "no such slot");
    bench_end(&b);
    c.n_experts = c.d_model = c.slots = INT32_MAX;
    c.select = MOE_SELECT_SOFT;
    CHECK(moe_router_parameter(&c, MOE_ROUTER_SLOT_VECTORS, NULL) == MOE_ERR_OVERFLOW, "a size beyond memory");
    c = config_of("score=norm");
    if (!CHECK(bench_start(&b, &c, NULL, 5, 0.6), "routes")) return;
    b.call.activations = NULL;
    expect_call_refused(&b, MOE_ERR_ARGUMENT, "no activations");
    bench_end(&b);
}

static void spoil_supply(size_t i, size_t bad, int32_t *sequences, bench *b) {
    switch (i) {
    case 0:
        b->home[3] = bad ? 2 : -1;
        break;
    case 1:
        b->expert_machine[3] = bad ? 2 : -1;
        break;
    case 2:
        b->previous_experts[3] = bad ? 4 : -2;
        break;
    case 3:
        b->call.previous_input = bad ? b->previous_input : NULL;
        b->call.previous_weights = bad ? NULL : b->previous_weights;
        break;
    case 4:
        b->token_ids[2] = bad ? 5 : -1;
        break;
    case 5:
        b->tensors[MOE_ROUTER_TABLE][2 * (size_t)b->token_ids[2]] = (moe_real)(bad ? 4 : -1);
        break;
    case 6: /* one expert twice for a token, or no number of an expert at all */
        b->tensors[MOE_ROUTER_TABLE][2 * (size_t)b->token_ids[2]] =
            bad ? b->tensors[MOE_ROUTER_TABLE][2 * (size_t)b->token_ids[2] + 1] : (moe_real)(HUGE_VAL - HUGE_VAL);
        break;
    case 7:
        b->call.sequences = sequences;
        b->call.n_sequences = 2;
        break;
    case 8:
        b->call.attention_weights = bad ? NULL : b->attention;
        b->call.attention_outputs = bad ? b->outputs : NULL;
        break;
    case 9:
        b->call.attention_output = NULL;
        break;
    case 10:
        b->call.previous_experts = NULL;
        break;
    case 11:
        b->call.token_ids = NULL;
        break;
    case 12:
    case 13:
        b->call.activations = NULL;
        break;
    case 17:
        b->call.teacher = NULL;
        break;
    case 18:
        b->router.custom.score = NULL;
        break;
    case 19:
        b->router.custom.select = NULL;
        break;
    default:
        b->call.rng = NULL;
        break;
    }
}

/* The picks of sparsemixer need a generator unless both of their random numbers are supplied. */
static void check_supplied_draws(void) {
    moe_router_config c = config_of("weight=sparsemixer sparsemixer_sample=1");
    moe_real *gumbel, *uniform;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, 3, 0.6), "routes")) return;
    gumbel = normals(3 * 2 * 4, 1.0);
    uniform = normals(3 * 2, 0.0);
    b.call.rng = NULL;
    b.call.gumbel = gumbel;
    expect_call_says(&b, MOE_ERR_ARGUMENT, "call.rng is NULL");
    b.call.gumbel = NULL;
    b.call.uniform = uniform;
    expect_call_says(&b, MOE_ERR_ARGUMENT, "call.rng is NULL");
    b.call.gumbel = gumbel;
    bench_route(&b);
    CHECK(b.status == MOE_OK, "nothing is left to draw");
    bench_end(&b);
    free(gumbel);
    free(uniform);
}

/* Supplied random numbers lie max_choices apart, however few choices this step makes. */
static void check_scheduled_draws(void) {
    enum { N = 12, E = 4 };
    moe_router_config c = config_of("weight=sparsemixer sparsemixer_sample=1 top_k=1 k_end=2 schedule_steps=9");
    moe_router_config one = config_of("weight=sparsemixer sparsemixer_sample=1 top_k=1");
    moe_real gumbel[N][2][E] = {{{0}}}, uniform[N][2] = {{0}}, first[N][E];
    bench b;
    size_t t, e;
    if (!CHECK(bench_start(&b, &c, NULL, N, 0.0), "routes")) return; /* equal logits: any expert may be picked */
    for (t = 0; t < N; t++)
        for (e = 0; e < E; e++) first[t][e] = gumbel[t][0][e] = (moe_real)below(100);
    b.tensors[MOE_ROUTER_STEP][0] = 0;
    b.call.gumbel = &gumbel[0][0][0];
    b.call.uniform = uniform[0];
    bench_route(&b);
    if (CHECK_STATUS(b.status, MOE_OK)) {
        int32_t chosen[N];
        CHECK_STATUS(moe_routing_choices(&b.routing, 1, 1, chosen), MOE_OK);
        CHECK_STATUS(moe_router_init(&b.router, &one, NULL, NULL), MOE_OK);
        b.router.tensors[MOE_ROUTER_WEIGHT] = b.tensors[MOE_ROUTER_WEIGHT];
        b.call.gumbel = first[0];
        bench_route(&b);
        for (t = 0; t < N && CHECK_STATUS(b.status, MOE_OK); t++) CHECK(b.routing.choices[t] == chosen[t]);
    }
    bench_end(&b);
}

/* A quarter of 10 steps is 3 steps; what a call must supply depends on its step. */
static void check_switch_step(void) {
    moe_router_config c = config_of("table_size=5 switch_share=0.25 schedule_steps=10 switch_from=hash");
    bench b;
    int step;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.5), "routes")) return;
    for (step = 0; step < 6; step++) {
        b.tensors[MOE_ROUTER_STEP][0] = (moe_real)step;
        b.call.token_ids = NULL;
        bench_route(&b);
        CHECK_STATUS(b.status, step < 3 ? MOE_ERR_ARGUMENT : MOE_OK, "token ids are those of the hash");
        b.call.token_ids = b.token_ids;
        bench_route(&b);
        CHECK_STATUS(b.status, MOE_OK);
    }
    b.tensors[MOE_ROUTER_STEP][0] = 0;
    b.call.token_ids = NULL;
    expect_call_says(&b, MOE_ERR_ARGUMENT, "call.token_ids is NULL: switch_from = hash needs it");
    bench_end(&b);
}

/* Past freeze_at nobody competes, even if the call has activations. */
static void check_frozen_competition(void) {
    moe_router_config c = config_of("compete_rate=1 loss_distill=0.5 freeze_at=3");
    moe_real logits[6 * 4];
    bench b;
    int step;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.5), "routes")) return;
    for (step = 2; step < 5; step++) {
        b.tensors[MOE_ROUTER_STEP][0] = (moe_real)step;
        b.call.training = 0;
        bench_route(&b);
        memcpy(logits, b.routing.logits, sizeof logits);
        b.call.training = 1;
        bench_route(&b);
        CHECK_STATUS(b.status, MOE_OK);
        CHECK(same_bits(logits, b.routing.logits, sizeof logits) == (step >= 3), "whose logits");
    }
    bench_end(&b);
}

/* What an expert's cutoff learns is its second largest logit among four tokens; padding is none. */
static void check_padded_cutoffs(void) {
    static const unsigned char mask[8] = {1, 0, 0, 1, 1, 0, 1, 0};
    moe_router_config c = config_of("select=expert_threshold weight=raw capacity_factor=2");
    bench b;
    size_t t, e;
    if (!CHECK(bench_start(&b, &c, NULL, 8, 0.8), "routes")) return;
    b.call.mask = mask;
    bench_route(&b);
    memset(b.tensors[MOE_ROUTER_CUTOFF_SUM], 0, 4 * sizeof(moe_real));
    CHECK_STATUS(moe_router_observe(&b.router, &b.call, &b.routing, b.tensors), MOE_OK);
    for (e = 0; e < 4; e++) {
        int larger = 0;
        for (t = 0; t < 8; t++) larger += mask[t] && b.routing.logits[4 * t + e] > b.tensors[MOE_ROUTER_CUTOFF_SUM][e];
        CHECK(larger == 1);
    }
    bench_end(&b);
}

/* Groups of one expert have no second best. */
static void check_groups_of_one(void) {
    moe_router_config c = config_of("select=grouped_top_k groups=4 groups_kept=3 group_score=top2_sum");
    bench b;
    size_t i;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.5), "routes")) return;
    for (i = 0; i < 6; i++) {
        int32_t best[2];
        moe_top_k(4, b.routing.probabilities + 4 * i, 2, best);
        CHECK(same_bits(best, b.routing.choices + 2 * i, sizeof best), "the largest of all");
    }
    bench_end(&b);
}

/* What stages read beside x: missing or out of range. */
static void test_bad_supplies(void) {
    static const char *const settings[] = {"loss_locality=1 nodes=2",
                                           "loss_locality=1 nodes=2",
                                           "input=adaptive_clustering",
                                           "input=adaptive_clustering",
                                           "select=hash table_size=5",
                                           "select=hash table_size=5",
                                           "select=hash table_size=5",
                                           "select=soft",
                                           "refine=attention",
                                           "refine=attention attention_u=output",
                                           "input=adaptive_clustering",
                                           "select=hash table_size=5",
                                           "score=attentive",
                                           "score=competition",
                                           "select=sample",
                                           "input=jitter",
                                           "switch_at=9 switch_from=sample",
                                           "loss_distill=1",
                                           "score=custom",
                                           "select=custom"};
    size_t i, bad;
    int32_t sequences[] = {0, 2, 6};
    for (i = 0; i < sizeof settings / sizeof settings[0]; i++)
        for (bad = 0; bad < 2; bad++) {
            moe_router_config c = config_of(settings[i]);
            bench b;
            if (!CHECK(bench_start(&b, &c, NULL, 6, 0.5), settings[i])) continue;
            spoil_supply(i, bad, sequences, &b);
            if (i == 4)
                expect_call_says(&b, MOE_ERR_ARGUMENT,
                                 bad ? "token_ids[2] = 5: must be 0 to 4" : "token_ids[2] = -1: must be 0 to 4");
            else expect_call_refused(&b, MOE_ERR_ARGUMENT, settings[i]);
            bench_end(&b);
        }
    check_supplied_draws();
    check_scheduled_draws();
    check_switch_step();
    check_frozen_competition();
    check_groups_of_one();
    check_padded_cutoffs();
}

/* A token alone is the token in the batch, and inference is training, bit for bit, for every kernel
   table. */
static void test_independence(void) {
    int trial, table;
    for (trial = 0; trial < 200; trial++) {
        moe_router_config c;
        draw_config(&c);
        if (c.score == MOE_SCORE_NORM) c.score = MOE_SCORE_LINEAR; /* its arrays are not one token's */
        if (trial % 4 == 0) {
            c.select = MOE_SELECT_TOP_P;
            c.router_bias = 0;
        }
        if (trial % 4 == 1) {
            c.select = MOE_SELECT_THRESHOLD;
            c.input = MOE_INPUT_SCALED_RMS;
        }
        c.d_model = 1 + below(600);
        if (moe_router_check(&c, NULL, NULL) != MOE_OK) continue;
        for (table = 1; table < MOE_KERNELS_COUNT; table++) {
            bench b;
            moe_call one;
            moe_routing r, single;
            size_t t, d = (size_t)c.d_model, experts = (size_t)c.n_experts, k;
            if (moe_kernels_select(table) == NULL) continue;
            if (!CHECK(bench_start(&b, &c, moe_kernels_select(table), 9, 0.4), "routes")) continue;
            r = b.routing;
            k = (size_t)b.router.config.top_k;
            one = b.call;
            one.training = 0;
            for (t = 0; t < 9; t++) {
                void *memory;
                size_t bytes = 0;
                one.n_tokens = 1;
                one.x = b.call.x + t * d;
                one.given = b.given != NULL ? b.given + t * k : NULL;
                CHECK(moe_route_size(&b.router, 1, 0, &bytes) == MOE_OK, "size");
                memory = grab(bytes, 1);
                if (CHECK(moe_route(&b.router, &one, memory, bytes, &single) == MOE_OK, "routes")) {
                    CHECK(same_bits(single.weights, r.weights + t * experts, experts * sizeof(moe_real)),
                          "a token alone has the same weights");
                    CHECK(same_bits(single.logits, r.logits + t * experts, experts * sizeof(moe_real)),
                          "a token alone has the same logits");
                    CHECK(same_bits(single.choices, r.choices + t * r.max_choices,
                                    (size_t)r.n_choices[t] * sizeof(int32_t)),
                          "a token alone makes the same choices");
                }
                free(memory);
            }
            bench_end(&b);
        }
    }
}

/* ---- few tokens and many: what is quick must be the same ---- */

/* The k best by counting who comes before whom. */
static size_t naive_top_k(size_t n, const moe_real *score, size_t k, int32_t *index) {
    size_t e, taken = 0, place;
    unsigned char *among = (unsigned char *)grab(n, 1);
    for (e = 0; e < n; e++) { /* neither -inf nor NaN */
        among[e] = score[e] > -(moe_real)HUGE_VAL;
        taken += among[e];
    }
    for (e = 0; e < n; e++) {
        place = among[e] ? count_before(score, n, e, among) : k;
        if (place < k) index[place] = (int32_t)e;
    }
    free(among);
    return taken < k ? taken : k;
}

/* Every table's top-k for all numbers of scores up to 140: ties, zeros of both signs, infinities,
   NaN; nothing beyond the k places is written. */
static void test_top_k(void) {
    const double special[] = {-HUGE_VAL, HUGE_VAL, 0.0, -0.0, 1.0, -1.0};
    moe_real score[140];
    int32_t got[141], want[141];
    size_t n, k, i, found;
    int table, trial;
    for (table = 1; table < MOE_KERNELS_COUNT; table++) {
        const moe_kernels *kernels = moe_kernels_select(table);
        for (n = 0; n <= 140 && kernels != NULL; n++)
            for (trial = 0; trial < 12; trial++) {
                k = trial < 4 ? (size_t)trial : (size_t)below((int)n + 2);
                for (i = 0; i < n; i++) {
                    score[i] = trial % 3 == 0 ? moe_rng_normal(&rng) : (moe_real)below(trial % 3 == 1 ? 4 : 40);
                    if (below(trial % 2 == 0 ? 3 : 50) == 0) score[i] = (moe_real)special[below(6)];
                    if (trial > 5 && below(5) == 0) score[i] = (moe_real)NAN;
                }
                for (i = 0; i < 141; i++) got[i] = want[i] = -7;
                found = kernels->top_k(n, score, k, got);
                CHECK(found == naive_top_k(n, score, k, want) && same_bits(got, want, sizeof got),
                      "the k best, the lower index first");
            }
    }
}

static void same_row(const void *a, const void *b, size_t t, size_t columns, size_t size, const char *what) {
    CHECK(same_bits((const unsigned char *)a, (const unsigned char *)b + t * columns * size, columns * size), what);
}

/* Token t of b alone, in memory full of ones: a NaN wherever something is not written. */
static void check_alone(const bench *b, size_t t) {
    const moe_routing *r = &b->routing;
    size_t experts = r->n_experts, e, bytes = 0;
    moe_call one = b->call;
    moe_routing single;
    unsigned char *memory;
    one.n_tokens = 1;
    one.x = b->call.x + t * (size_t)b->router.config.d_model;
    one.mask = NULL;
    one.training = 0;
    CHECK(moe_route_size(&b->router, 1, 0, &bytes) == MOE_OK, "size");
    memory = (unsigned char *)grab(bytes, 1);
    memset(memory, 0xff, bytes);
    if (CHECK(moe_route(&b->router, &one, memory, bytes, &single) == MOE_OK, "routes")) {
        same_row(single.logits, r->logits, t, experts, sizeof(moe_real), "a token alone: logits");
        same_row(single.gate, r->gate, t, experts, sizeof(moe_real), "a token alone: gate");
        same_row(single.probabilities, r->probabilities, t, experts, sizeof(moe_real), "a token alone: probabilities");
        same_row(single.weights, r->weights, t, experts, sizeof(moe_real), "a token alone: weights");
        same_row(single.selected, r->selected, t, experts, 1, "a token alone: selected");
        CHECK(single.n_choices[0] == r->n_choices[t], "a token alone: how many");
        CHECK(same_bits(single.choices, r->choices + t * r->max_choices, (size_t)single.n_choices[0] * sizeof(int32_t)),
              "a token alone: choices");
        CHECK(same_bits(single.choice_weights, r->choice_weights + t * r->max_choices,
                        (size_t)single.n_choices[0] * sizeof(moe_real)),
              "a token alone: section weights");
        CHECK(single.n_real == 1 && single.n_dropped == 0 && single.top_k == b->router.config.top_k &&
                  single.plan.rows == 0,
              "a token alone: numbers");
        for (e = 0; e < experts; e++) {
            size_t from = single.plan.offsets[e], to = single.plan.offsets[e + 1];
            CHECK(to - from == single.counts[e] && to - from == single.selected[e] &&
                      single.first_counts[e] <= single.counts[e],
                  "a token alone: plan");
            if (to > from)
                CHECK(same_bits(&single.plan.assignments[from].weight_out, &single.weights[e], sizeof(moe_real)),
                      "a token alone: entry");
        }
    }
    free(memory);
}

/* What the stages one by one make of a token's logits: gate, choices and weights, by the kernels'
   own functions. */
static void check_stages(const bench *b, size_t t) {
    const moe_routing *r = &b->routing;
    const moe_router_config *c = &b->router.config;
    const moe_real *z = r->logits + t * r->n_experts, *p = r->gate + t * r->n_experts;
    const moe_real *w = r->choice_weights + t * r->max_choices;
    const moe_real *bias = b->tensors[MOE_ROUTER_SELECTION_BIAS];
    size_t experts = r->n_experts, e, i, k = (size_t)c->top_k;
    moe_real *row = (moe_real *)grab(experts, sizeof *row), sum = 0;
    int32_t *want = (int32_t *)grab(experts + 1, sizeof *want);
    const int32_t *choice = r->choices + t * r->max_choices;
    if (c->gate == MOE_GATE_SOFTMAX) moe_softmax(b->router.kernels, experts, z, c->gate_temperature, row);
    for (e = 0; e < experts && c->gate == MOE_GATE_SIGMOID; e++) row[e] = moe_sigmoid(z[e] / c->gate_temperature);
    for (e = 0; e < experts && c->gate == MOE_GATE_RELU; e++) row[e] = z[e] > 0 ? z[e] : 0;
    if (c->gate == MOE_GATE_SIGMOID)
        for (e = 0; e < experts; e++) CHECK(near((double)p[e], (double)row[e]), "sigmoid");
    else
        CHECK(same_bits(row, p, experts * sizeof *row), "the gate is a row's own");
    for (e = 0; e < experts; e++) row[e] = bias != NULL ? p[e] + bias[e] : c->gate == MOE_GATE_RELU ? p[e] : z[e];
    CHECK((size_t)r->n_choices[t] == naive_top_k(experts, row, k, want) && same_bits(want, choice, k * sizeof *want),
          "the K best");
    for (i = 0; i < k; i++) {
        sum += p[choice[i]];
        row[i] = z[choice[i]];
    }
    if (c->weight == MOE_WEIGHT_SOFTMAX) moe_softmax(b->router.kernels, k, row, 1, row);
    for (i = 0; i < k && c->weight != MOE_WEIGHT_SOFTMAX; i++) {
        row[i] = p[choice[i]];
        if (c->weight == MOE_WEIGHT_SUM) row[i] = sum > 0 ? row[i] / sum : 0;
    }
    CHECK(same_bits(row, w, k * sizeof *row), "the weights");
    for (i = 0; i < k; i++)
        CHECK(same_bits(&w[i], &r->weights[t * experts + (size_t)choice[i]], sizeof *w),
              "the matrix holds the weights");
    free(row);
    free(want);
}

/* All numbers of experts from 1 to 70: the batch agrees with its stages, with its tokens alone, and
   with itself under a mask and in training. */
static void test_few_and_many(void) {
    static const int gates[] = {MOE_GATE_SOFTMAX, MOE_GATE_SIGMOID, MOE_GATE_RELU};
    static const int weights[] = {MOE_WEIGHT_SUM, MOE_WEIGHT_SOFTMAX, MOE_WEIGHT_RAW};
    static const int widths[] = {1, 3, 16, 64, 255, 256, 257, 511, 512, 700, 1024, 1300};
    int experts, table, round;
    size_t t, i;
    for (experts = 1; experts <= 70; experts++)
        for (round = 0; round < 3; round++)
            for (table = 1; table < MOE_KERNELS_COUNT; table++) {
                moe_router_config c;
                bench b;
                if (moe_kernels_select(table) == NULL) continue;
                memset(&c, 0, sizeof c);
                c.n_experts = experts;
                c.d_model = widths[below(12)];
                c.top_k = round == 0 && experts > 1 ? 2 : 1 + below(experts);
                c.gate = gates[below(3)];
                c.weight = weights[below(3)];
                c.untrained = 1;
                c.selection_bias = round == 2 && c.weight != MOE_WEIGHT_SPARSEMIXER;
                if (round == 1 && c.gate != MOE_GATE_RELU) c.gate_temperature = (moe_real)0.7;
                if (!CHECK(bench_start(&b, &c, moe_kernels_select(table), 11,
                                       round == 0 ? 0.0 : 1.0 / sqrt((double)c.d_model)),
                           "routes"))
                    continue;
                for (i = 0; round == 0 && i < (size_t)experts * (size_t)c.d_model; i++)
                    b.tensors[MOE_ROUTER_WEIGHT][i] = (moe_real)(below(3) - 1);
                /* integers: ties */
                for (i = 0; round == 0 && i < 11 * (size_t)c.d_model; i++) b.x[i] = (moe_real)(below(3) - 1);
                if (table % 2 == 0 && round == 1) mask_some(&b);
                b.call.training = below(2);
                bench_route(&b);
                if (!CHECK(b.status == MOE_OK, "routes")) continue;
                check_consistent(&b);
                for (t = 0; t < 11; t++)
                    if (is_real(&b, t)) {
                        check_stages(&b, t);
                        check_alone(&b, t);
                    }
                bench_end(&b);
            }
}

/* One number that is not finite, anywhere, is found; in padding it is not. */
static void test_finite_everywhere(void) {
    int experts, sign;
    size_t at, n = 3;
    for (experts = 1; experts <= 9; experts++)
        for (sign = 0; sign < 3; sign++) {
            moe_router_config c = small_config();
            bench b;
            c.d_model = 1;
            c.n_experts = experts;
            c.top_k = 1;
            c.untrained = 1;
            c.router_bias = 1;
            if (!CHECK(bench_start(&b, &c, NULL, n, 1.0), "routes")) continue;
            for (at = 0; at < (size_t)experts; at++) {
                moe_real kept = b.tensors[MOE_ROUTER_BIAS][at];
                b.tensors[MOE_ROUTER_BIAS][at] = sign == 0   ? (moe_real)NAN
                                                 : sign == 1 ? (moe_real)HUGE_VAL
                                                             : -(moe_real)HUGE_VAL;
                bench_route(&b);
                CHECK(b.status == MOE_ERR_NONFINITE, "a logit that is not finite");
                b.tensors[MOE_ROUTER_BIAS][at] = kept;
            }
            for (at = 0; at < n; at++) {
                moe_real kept = b.x[at];
                b.x[at] = sign == 0 ? (moe_real)NAN : (moe_real)HUGE_VAL;
                bench_route(&b);
                CHECK(b.status == MOE_ERR_NONFINITE, "a token that is not finite");
                b.call.mask = b.mask = (unsigned char *)grab(n, 1);
                memset(b.mask, 1, n);
                b.mask[at] = 0;
                bench_route(&b);
                CHECK(b.status == MOE_OK && b.routing.n_real == n - 1, "padding may be anything");
                free(b.mask);
                b.call.mask = b.mask = NULL;
                b.x[at] = kept;
            }
            bench_end(&b);
        }
}

static void check_columns(const int32_t *parts, const moe_real *nothing, int experts, bench *b) {
    size_t i, t, slot, count, total;
    moe_real *column;
    check_soft(b);
    total = (size_t)experts * 3;
    column = (moe_real *)grab(201, sizeof *column);
    for (slot = 0; slot < total; slot++)
        for (i = 0; i < 3; i++) {
            size_t from = (size_t)parts[i], to = (size_t)parts[i + 1];
            size_t entry = b->routing.plan.offsets[slot / 3];
            int same = 1;
            for (t = from, count = 0; t < to; t++)
                if (is_real(b, t)) column[count++] = b->routing.logits[t * total + slot];
            moe_softmax(b->router.kernels, count, column, 1, column);
            for (t = 0; t < from; t++) entry += is_real(b, t) ? 3u : 0u;
            entry += slot % 3;
            for (t = from, count = 0; t < to; t++) {
                const moe_assignment *of = b->routing.plan.assignments + entry + 3 * count;
                same &= same_bits(&b->routing.gate[t * total + slot],
                                  is_real(b, t) ? &column[count] : nothing, sizeof(moe_real));
                if (!is_real(b, t)) continue;
                same &= of->token == (int32_t)t && of->choice == (int32_t)(i * 3 + slot % 3) &&
                        same_bits(&of->weight_in, &column[count], sizeof(moe_real));
                count++;
            }
            CHECK(same, "a slot's dispatch is the softmax of its column, and its entries ascend");
        }
    free(column);
}

/* Selections and softmaxes over many tokens: more columns than are turned at a time, ties, padding,
   sequences. */
static void test_columns(void) {
    static const int32_t parts[] = {0, 70, 70, 201};
    const moe_real nothing = 0;
    int experts, masked, select;
    size_t i;
    for (experts = 1; experts <= 37; experts += 6)
        for (masked = 0; masked < 2; masked++)
            for (select = 0; select < 2; select++) {
                moe_router_config c = small_config();
                bench b;
                c.n_experts = experts;
                c.top_k = 1;
                c.untrained = 1;
                c.select = select == 0 ? MOE_SELECT_EXPERT_CHOICE : MOE_SELECT_SOFT;
                c.capacity_factor = select == 0 ? (moe_real)1.7 : 0;
                c.slots = select == 0 ? 0 : 3;
                c.soft_sequences = select == 0 ? 0 : 3;
                if (!CHECK(bench_start(&b, &c, moe_kernels_select(MOE_KERNELS_AUTO), 201, 1.0), "routes")) continue;
                for (i = 0; i < 201 * 8 && select == 0; i++) b.x[i] = (moe_real)below(2);
                for (i = 0; i < (size_t)experts * 8 && select == 0; i++)
                    b.tensors[MOE_ROUTER_WEIGHT][i] = (moe_real)below(3);
                if (masked) mask_some(&b);
                if (select == 1) {
                    b.call.sequences = parts;
                    b.call.n_sequences = 3;
                }
                bench_route(&b);
                if (!CHECK(b.status == MOE_OK, "routes")) continue;
                if (select == 0) {
                    check_consistent(&b);
                    check_expert_choice(&b);
                } else {
                    check_columns(parts, &nothing, experts, &b);
                }
                bench_end(&b);
            }
}

/* Sparsemixer at its edge: an expert exactly 2 eps away stays, one a little further does not; picks
   do not count twice. */
static void test_sparsemixer(void) {
    static const double logits[][3] = {{2.0, 1.0, -5.0}, {2.0, 0.99, -5.0}, {3.0, 3.0, 3.0}, {-1.0, -2.0, -2.5}};
    double want[4][2], e1 = exp(1.0);
    size_t i, e;
    want[0][0] = e1 / (e1 + 1.0);
    want[0][1] = 1.0;
    want[1][0] = 1.0;
    want[1][1] = 1.0;
    want[2][0] = 1.0 / 3.0;
    want[2][1] = 0.5;
    want[3][0] = e1 / (e1 + 1.0);
    want[3][1] = 1.0 / (1.0 + exp(-0.5));
    for (i = 0; i < 4; i++) {
        moe_router_config c = config_of("n_experts=3 top_k=2 weight=sparsemixer sparsemixer_eps=0.25 router_bias=1");
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, 1, 0.0), "routes")) return;
        for (e = 0; e < 3; e++) b.tensors[MOE_ROUTER_BIAS][e] = (moe_real)logits[i][e];
        bench_route(&b);
        CHECK(b.routing.choices[0] == 0 && b.routing.choices[1] == 1, "the picks of sparsemixer");
        CHECK(near((double)b.routing.weights[0], want[i][0]) && near((double)b.routing.weights[1], want[i][1]),
              "the weights of sparsemixer");
        bench_end(&b);
    }
}

/* A vector shorter than 1e-12 has cosine 0 and passes no gradient, a longer one is like any
   other. */
static void test_short_vectors(void) {
    static const double lengths[] = {0.0, 1e-20, 1e-14, 1e-10, 1e-3, 1e10};
    size_t i, k;
    for (i = 0; i < 12; i++) {
        moe_router_config c = config_of(i % 2 ? "score=cosine cosine_dim=3 weight=raw" : "score=cosine weight=raw");
        double length = lengths[i / 2];
        moe_real *gradients[MOE_ROUTER_PARAMETER_COUNT], *dx, *dw;
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, 2, 1.0), "routes")) return;
        for (k = 0; k < 8; k++) b.x[8 + k] = (moe_real)length * b.x[k];
        bench_route(&b);
        for (k = 0; k < 4; k++) {
            if (length < 1e-12) CHECK(all_zero(b.routing.logits + 4 + k, 1), "a short token has cosine 0");
            else
                CHECK(near((double)b.routing.logits[4 + k], (double)b.routing.logits[k]),
                      "a cosine does not depend on the length");
        }
        memset(gradients, 0, sizeof gradients);
        dx = normals(16, 0.0);
        gradients[MOE_ROUTER_WEIGHT] = dw = normals(32, 0.0);
        for (k = 0; k < 4; k++) b.routing.d_weight_out[k] = 1;
        CHECK(moe_route_backward(&b.router, &b.call, &b.routing, gradients, dx, NULL) == MOE_OK, "backward");
        CHECK(!all_zero(dx, 8) && all_zero(dx + 8, 8) == (length < 1e-12), "a short token passes no gradient");
        free(dx);
        free(dw);
        /* the first expert's vector */
        memset(b.tensors[MOE_ROUTER_WEIGHT], 0, (size_t)(i % 2 ? 3 : 8) * sizeof(moe_real));
        bench_route(&b);
        CHECK(b.status == MOE_OK && all_zero(b.routing.logits, 1), "an expert without a vector has cosine 0");
        bench_end(&b);
    }
}

/* Backward adds to what is there and skips what is not wanted. */
static void test_backward_adds(void) {
    moe_router_config c = config_of("router_bias=1 loss_z=1 weight=raw");
    moe_real *once[MOE_ROUTER_PARAMETER_COUNT], *twice[MOE_ROUTER_PARAMETER_COUNT], *dx, *dx2;
    bench b;
    size_t i;
    int good = 1;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.6), "routes")) return;
    memset(once, 0, sizeof once);
    memset(twice, 0, sizeof twice);
    once[MOE_ROUTER_WEIGHT] = normals(32, 0.0);
    twice[MOE_ROUTER_WEIGHT] = normals(32, 0.0);
    twice[MOE_ROUTER_BIAS] = normals(4, 0.0);
    dx = normals(48, 0.0);
    dx2 = normals(48, 0.0);
    for (i = 0; i < 12; i++) b.routing.d_weight_out[i] = moe_rng_normal(&rng);
    CHECK(moe_route_backward(&b.router, &b.call, &b.routing, once, dx, NULL) == MOE_OK, "backward");
    CHECK(moe_route_backward(&b.router, &b.call, &b.routing, twice, dx2, NULL) == MOE_OK, "backward");
    CHECK(same_bits(dx, dx2, 48 * sizeof *dx) &&
              same_bits(once[MOE_ROUTER_WEIGHT], twice[MOE_ROUTER_WEIGHT], 32 * sizeof *dx),
          "a second time the same");
    CHECK(moe_route_backward(&b.router, &b.call, &b.routing, twice, NULL, NULL) == MOE_OK, "dx is not wanted");
    CHECK(moe_route_backward(NULL, &b.call, &b.routing, twice, dx, NULL) == MOE_ERR_ARGUMENT, "no router");
    CHECK(moe_route_backward(&b.router, NULL, &b.routing, twice, dx, NULL) == MOE_ERR_ARGUMENT, "no call");
    CHECK(moe_route_backward(&b.router, &b.call, NULL, twice, dx, NULL) == MOE_ERR_ARGUMENT, "no routing");
    for (i = 0; i < 32; i++)
        good &= near((double)twice[MOE_ROUTER_WEIGHT][i], 2.0 * (double)once[MOE_ROUTER_WEIGHT][i]);
    CHECK(good && !all_zero(twice[MOE_ROUTER_BIAS], 4), "gradients add up");
    free(once[MOE_ROUTER_WEIGHT]);
    free(twice[MOE_ROUTER_WEIGHT]);
    free(twice[MOE_ROUTER_BIAS]);
    free(dx);
    free(dx2);
    bench_end(&b);
}

/* What a selection of the caller's own marks: any number but 0 is a choice, and padding chooses
   nothing, wherever the rows stand. */
static moe_status loud_select(void *ctx, const moe_router *router, const moe_call *call, const moe_real *logits,
                              const moe_real *probabilities, unsigned char *chosen) {
    size_t experts = (size_t)router->config.n_experts, t;
    (void)ctx;
    (void)logits;
    (void)probabilities;
    for (t = 0; t < call->n_tokens; t++) {
        chosen[t * experts + t % experts] = (unsigned char)(2 + t);
        chosen[t * experts + (t + 1) % experts] = 128;
    }
    return MOE_OK;
}

static void test_custom_select(void) {
    static const unsigned char mask[6] = {1, 0, 1, 1, 0, 1};
    moe_router_config c = config_of("select=custom weight=raw");
    size_t t, e;
    int good = 1;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.6), "routes")) return;
    b.router.custom.select = loud_select;
    b.call.mask = mask;
    bench_route(&b);
    CHECK(b.status == MOE_OK && b.routing.n_real == 4, "routes with padding");
    for (t = 0; t < 6; t++)
        for (e = 0; e < 4; e++) good &= b.routing.selected[t * 4 + e] == (mask[t] && (e == t % 4 || e == (t + 1) % 4));
    CHECK(good && b.routing.plan.offsets[4] == 8, "two experts for each real token");
    for (t = 0; t < 6; t++) CHECK(b.routing.n_choices[t] == (mask[t] ? 2 : 0), "as many choices");
    bench_end(&b);
}

/* Backward adds to the gradients of attention what it means for them, wherever they begin. */
static void test_attention_backward_adds(void) {
    moe_router_config c = config_of("refine=attention heads=2 attention_heads=all weight=raw");
    enum { N = 5, A = 2 * N * N };
    moe_real zero[A], one[A];
    size_t i;
    int good = 1, any = 0;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, N, 0.6), "routes")) return;
    for (i = 0; i < b.routing.plan.offsets[4]; i++) b.routing.d_weight_out[i] = moe_rng_normal(&rng);
    for (i = 0; i < A; i++) {
        zero[i] = 0;
        one[i] = 1;
    }
    b.call.d_attention_weights = zero;
    CHECK(moe_route_backward(&b.router, &b.call, &b.routing, NULL, NULL, NULL) == MOE_OK, "backward");
    b.call.d_attention_weights = one;
    CHECK(moe_route_backward(&b.router, &b.call, &b.routing, NULL, NULL, NULL) == MOE_OK, "backward");
    for (i = 0; i < A; i++) {
        good &= near((double)one[i], 1.0 + (double)zero[i]);
        any |= fabs((double)zero[i]) > 10 * NEAR;
    }
    CHECK(good && any, "gradients of attention add up");
    bench_end(&b);
}

/* Attention weights of which dL/dA = da / A would be infinite: only they lead to near tokens. Times
   A, which is what the softmax before it makes of it, dL/dA is no larger than da. */
static void test_attention_backward_tiny(void) {
    moe_router_config c = config_of("refine=attention weight=raw");
    enum { N = 5 };
    const moe_real tiny = MOE_REAL_IS_DOUBLE ? (moe_real)5e-324 : (moe_real)1.5e-45f;
    moe_real back[N * N] = {0}, largest = 0;
    size_t i;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, N, 0.6), "routes")) return;
    for (i = 0; i < N * N; i++) b.attention[i] = i % N < 2 ? (moe_real)(1 + i % N) * tiny : (moe_real)0.3;
    for (i = 0; i < N * (size_t)c.d_model; i++) b.outputs[i] = (moe_real)(i < 2 * (size_t)c.d_model ? 0 : 1e3);
    b.call.d_attention_weights = back;
    bench_route(&b);
    if (CHECK(b.status == MOE_OK, "routes over tiny weights")) {
        for (i = 0; i < b.routing.plan.offsets[4]; i++) b.routing.d_weight_out[i] = moe_rng_normal(&rng);
        CHECK(moe_route_backward(&b.router, &b.call, &b.routing, NULL, NULL, NULL) == MOE_OK, "backward");
        for (i = 0; i < N * N; i++) {
            CHECK(moe_is_finite(back[i]) && moe_is_finite(2 * back[i]), "a gradient of a tiny weight is finite");
            if (fabs((double)back[i]) > (double)largest) largest = (moe_real)fabs((double)back[i]);
        }
        CHECK((double)largest > 1e37, "and large");
    }
    bench_end(&b);
}

static moe_status gather_nothing(void *ctx, moe_status status, size_t row_bytes, void *rows) {
    (void)ctx;
    (void)row_bytes;
    (void)rows;
    return status;
}

/* A router that has its own input reads nothing of x, whatever its input stage. */
static void check_router_x(void) {
    static const char *const settings[] = {"weight=raw", "input=scaled_rms", "input=jitter",
                                           "input=adaptive_clustering ac_mode=code",
                                           "input=adaptive_clustering ac_mode=code ac_spread=variance"};
    enum { N = 9 };
    size_t i, k;
    for (i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        moe_router_config c = config_of(settings[i]);
        moe_real *gradients[MOE_ROUTER_PARAMETER_COUNT], *dx[2], *other = normals(N * 8, 1.0), weights[N * 4];
        bench b;
        int with;
        if (!CHECK(bench_start(&b, &c, NULL, N, 0.8), settings[i])) return;
        memset(gradients, 0, sizeof gradients);
        for (with = 0; with < 2; with++) {
            b.call.x = with ? other : b.x;
            b.call.router_x = with ? b.x : NULL;
            bench_route(&b);
            if (!CHECK_STATUS(b.status, MOE_OK, settings[i])) return;
            if (with) CHECK(same_bits(weights, b.routing.weights, sizeof weights), settings[i]);
            memcpy(weights, b.routing.weights, sizeof weights);
            dx[with] = reals(N * 8);
            for (k = 0; k < b.routing.plan.offsets[4]; k++) b.routing.d_weight_out[k] = (moe_real)(k % 3);
            CHECK_STATUS(moe_route_backward(&b.router, &b.call, &b.routing, gradients, dx[with], NULL), MOE_OK);
        }
        CHECK(same_bits(dx[0], dx[1], N * 8 * sizeof(moe_real)) && !all_zero(dx[0], N * 8), settings[i]);
        free(dx[0]);
        free(dx[1]);
        free(other);
        bench_end(&b);
    }
}

/* A batch of one process is routed as the call alone: the clusters of the previous layer are not
   taken for what affinity chooses. */
static void test_batch_of_one(void) {
    static const char *const settings[] = {
        "select=affinity affinity_mass=0.6", "input=adaptive_clustering select=affinity affinity_mass=0.6",
        "input=adaptive_clustering ac_mode=running select=affinity affinity_mass=0.6",
        "input=adaptive_clustering switch_at=9 switch_from=affinity", "input=adaptive_clustering capacity_factor=0.5"};
    size_t row, cells = 40 * 4;
    for (row = 0; row < sizeof settings / sizeof settings[0]; row++) {
        moe_router_config c = config_of(settings[row]);
        moe_batch batch;
        moe_real *alone;
        size_t dropped;
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, 40, 0.5), settings[row])) return;
        alone = reals(cells);
        memcpy(alone, b.routing.weights, cells * sizeof *alone);
        dropped = b.routing.n_dropped;
        memset(&batch, 0, sizeof batch);
        batch.total = 40;
        batch.gather = gather_nothing;
        batch.lead = 1;
        b.call.batch = &batch;
        CHECK_STATUS(moe_route_batch_size(&b.router, 40, 40, 1, &b.size), MOE_OK, settings[row]);
        free(b.memory);
        b.memory = grab(b.size, 1);
        CHECK_STATUS(moe_route(&b.router, &b.call, b.memory, b.size, &b.routing), MOE_OK, settings[row]);
        CHECK(same_reals(alone, b.routing.weights, cells) && b.routing.n_dropped == dropped, settings[row]);
        free(alone);
        bench_end(&b);
    }
    check_router_x();
}

/* C is that of the factor as it is written, whatever the nearest float or double is. */
static void test_capacity_of_decimals(void) {
    static const struct {
        size_t tenths, k, experts;
    } rows[] = {{3, 4, 4},  {6, 4, 4},  {7, 4, 4},  {9, 4, 4},   {11, 4, 4}, {12, 4, 4},
                {13, 4, 4}, {14, 4, 4}, {24, 4, 4}, {4, 14, 15}, {6, 7, 9},  {11, 3, 12}};
    char settings[80];
    size_t row, n;
    for (row = 0; row < sizeof rows / sizeof rows[0]; row++)
        for (n = 1; n <= 100; n++) {
            const size_t tenths = rows[row].tenths, experts = rows[row].experts;
            const size_t exact = (tenths * rows[row].k * n + 10 * experts - 1) / (10 * experts);
            moe_router_config c;
            bench b;
            sprintf(settings, "n_experts=%d top_k=%d capacity_factor=%d.%d", (int)experts, (int)rows[row].k,
                    (int)tenths / 10, (int)tenths % 10);
            c = config_of(settings);
            if (!CHECK(bench_start(&b, &c, NULL, n, 0.5), settings)) return;
            bench_route(&b);
            CHECKF(b.status == MOE_OK && b.routing.capacity == (exact < n ? exact : n), "%s, N %d: C %d, not %d",
                   settings, (int)n, (int)b.routing.capacity, (int)exact);
            bench_end(&b);
        }
}

/* round(f N / E) of expert_choice is that of f as it is written, too, where it ends in a half. */
static void test_choice_of_decimals(void) {
    static const int hundredths[] = {53, 59, 65, 106, 117, 118, 50, 125, 29};
    char settings[80];
    size_t row, n, t;
    for (row = 0; row < sizeof hundredths / sizeof hundredths[0]; row++)
        for (n = 10; n <= 200; n += 10) {
            const size_t f = (size_t)hundredths[row], exact = (2 * f * n + 400) / 800; /* E = 4 */
            size_t taken = 0;
            moe_router_config c;
            bench b;
            sprintf(settings, "select=expert_choice weight=raw n_experts=4 capacity_factor=%d.%02d",
                    hundredths[row] / 100, hundredths[row] % 100);
            c = config_of(settings);
            if (!CHECK(bench_start(&b, &c, NULL, n, 0.5), settings)) return;
            bench_route(&b);
            for (t = 0; t < n; t++) taken += b.routing.selected[4 * t];
            CHECKF(b.status == MOE_OK && taken == exact, "%s, N %d: %d, not %d", settings, (int)n, (int)taken,
                   (int)exact);
            bench_end(&b);
        }
}

/* capacity_factor is expert_threshold's own, also where that selects only before switch_at, and no
   limit of the other selection while that selects. */
static void test_capacity_of_the_step(void) {
    static const char *const settings[] = {
        "select=top_k switch_from=expert_threshold switch_at=10 capacity_factor=0.5",
        "select=expert_threshold switch_from=top_k switch_at=10 capacity_factor=0.5",
        "select=top_k switch_from=expert_choice switch_at=10 capacity_factor=0.5"};
    size_t row;
    int later;
    for (row = 0; row < sizeof settings / sizeof settings[0]; row++)
        for (later = 0; later < 2; later++) {
            moe_router_config c = config_of(settings[row]);
            const size_t limit = later && row != 1 ? 5 : 0; /* ceil(0.5 * 2 * 20 / 4) */
            bench b;
            if (!CHECK(bench_start(&b, &c, NULL, 20, 0.5), settings[row])) return;
            b.tensors[MOE_ROUTER_STEP][0] = (moe_real)(later ? 10 : 9);
            bench_route(&b);
            CHECK_STATUS(b.status, MOE_OK, settings[row]);
            CHECKF(b.routing.capacity == limit && (limit > 0 || b.routing.n_dropped == 0), "%s: C %d, %d dropped",
                   settings[row], (int)b.routing.capacity, (int)b.routing.n_dropped);
            bench_end(&b);
        }
}

/* The gradient of the learned scale of soft_normalise where the scale is 0 and all logits are: that
   of a small scale. */
static void test_soft_scale_of_zero(void) {
    moe_router_config c = config_of("select=soft slots=2 soft_normalise=1");
    moe_real *d_tensors[MOE_ROUTER_PARAMETER_COUNT] = {NULL}, slope[2], *phi;
    size_t i, cells = 4 * 2 * 8;
    int step;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.5), "routes")) return;
    d_tensors[MOE_ROUTER_SLOT_VECTORS] = phi = reals(cells);
    for (step = 0; step < 2; step++) {
        b.tensors[MOE_ROUTER_SLOT_SCALE][0] = (moe_real)(step == 0 ? 1e-6 : 0);
        slope[step] = 0;
        d_tensors[MOE_ROUTER_SLOT_SCALE] = &slope[step];
        bench_route(&b);
        CHECK_STATUS(b.status, MOE_OK, "routes");
        for (i = 0; i < b.routing.plan.offsets[4]; i++) {
            b.routing.d_weight_in[i] = (moe_real)sin((double)(i * i));
            b.routing.d_weight_out[i] = (moe_real)cos((double)(i * i));
        }
        memset(phi, 0, cells * sizeof *phi);
        CHECK_STATUS(moe_route_backward(&b.router, &b.call, &b.routing, d_tensors, NULL, NULL), MOE_OK, "backward");
    }
    CHECKF(fabs((double)slope[0]) > 1e-3 && near_to((double)slope[1], (double)slope[0], 1e-3), "%g, not %g",
           (double)slope[1], (double)slope[0]);
    CHECK(all_zero(phi, cells), "a scale of 0 passes nothing to the slots");
    free(phi);
    bench_end(&b);
}

/* Forced choices of sparsemixer may lie so far below the best that exp of the distance is infinite:
   weights and gradients are finite. */
static void sparsemixer_far_below(void) {
    moe_router_config c = config_of("weight=sparsemixer top_k=1");
    moe_real *d_tensors[MOE_ROUTER_PARAMETER_COUNT] = {NULL}, *d_w, *dx;
    size_t i, e, q;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, 4, 0.5), "routes")) return;
    b.call.given = b.given = integers(4, 1);
    for (i = 0; i < 4; i++) b.given[i] = (int32_t)i;
    for (e = 0; e < 4; e++)
        for (q = 0; q < 8; q++) b.tensors[MOE_ROUTER_WEIGHT][e * 8 + q] = (moe_real)(q == 0 ? -(double)e : 0);
    for (i = 0; i < 4 * 8; i++) b.x[i] = (moe_real)1e4;
    d_tensors[MOE_ROUTER_WEIGHT] = d_w = reals(4 * 8);
    dx = reals(4 * 8);
    bench_route(&b);
    CHECK_STATUS(b.status, MOE_OK, "routes");
    CHECK(b.routing.plan.offsets[4] == 4, "a choice for each");
    for (i = 0; i < 4; i++) {
        CHECK_NEAR(b.routing.plan.assignments[i].weight_out, i == 0 ? 1 : 0, NEAR);
        b.routing.d_weight_out[i] = 1;
    }
    CHECK_STATUS(moe_route_backward(&b.router, &b.call, &b.routing, d_tensors, dx, NULL), MOE_OK, "backward");
    CHECK(all_zero(d_w, 4 * 8) && all_zero(dx, 4 * 8), "a saturated softmax passes nothing");
    free(d_w);
    free(dx);
    bench_end(&b);
}

/* Powers of p that leave the range of a float, below and above: of two equal ones w is 2^(-1/P). */
static void far_powers(void) {
    static const char *const settings[] = {"n_experts=64 weight=p_norm weight_p=64",
                                           "n_experts=64 weight=p_norm weight_p=64 gate=identity router_bias=1"};
    size_t i, e;
    for (i = 0; i < 2; i++) {
        moe_router_config c = config_of(settings[i]);
        bench b;
        if (!CHECK(bench_start(&b, &c, NULL, 1, 0.0), settings[i])) continue;
        for (e = 0; e < 64 && i > 0; e++) b.tensors[MOE_ROUTER_BIAS][e] = (moe_real)1e4;
        bench_route(&b);
        CHECKF(fabs((double)b.routing.choice_weights[0] - pow(2.0, -1.0 / 64)) < 1e-6, "%s: w = %g", settings[i],
               (double)b.routing.choice_weights[0]);
        bench_end(&b);
    }
}

static void test_far_weights(void) {
    sparsemixer_far_below();
    far_powers();
}

/* The previous layer's weights may all be negative, as with its scale below 0: they are divided by
   their sum as well. */
static void test_clusters_of_negative_weights(void) {
    moe_router_config c = config_of("input=adaptive_clustering ac_mode=running ac_mix=2");
    size_t i, t, q;
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.5), "routes")) return;
    free(b.previous_experts);
    free(b.previous_weights);
    b.call.n_previous = 2;
    b.call.previous_experts = b.previous_experts = integers(12, 1);
    b.call.previous_weights = b.previous_weights = reals(12);
    for (i = 0; i < 12; i++) {
        b.previous_experts[i] = (int32_t)(i % 4);
        b.previous_weights[i] = (moe_real)(i % 2 == 0 ? -0.25 : -0.75);
    }
    bench_route(&b);
    CHECK_STATUS(b.status, MOE_OK, "routes");
    for (t = 0; t < 6; t++)
        for (q = 0; q < 8; q++) {
            const moe_real *m = b.tensors[MOE_ROUTER_AC_RUNNING];
            const double one = (double)m[(size_t)b.previous_experts[2 * t] * 8 + q],
                         two = (double)m[(size_t)b.previous_experts[2 * t + 1] * 8 + q];
            CHECK_NEAR(b.routing.u[t * 8 + q], (0.25 * one + 0.75 * two) * (double)b.x[t * 8 + q], NEAR);
        }
    bench_end(&b);
}

/* What one stage was given does not hide what another lacks. */
static void test_every_stage_is_checked(void) {
    moe_router_config c = config_of("input=adaptive_clustering score=attentive");
    bench b;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.5), "routes")) return;
    b.call.activation_width++;
    expect_call_says(&b, MOE_ERR_SHAPE, "score = attentive needs router_hidden = ");
    bench_end(&b);
}

/* Soft routing has no first choices, whatever was in its memory. */
static void test_soft_counts(void) {
    moe_router_config c = small_config();
    moe_routing routing;
    size_t e;
    bench b;
    c.select = MOE_SELECT_SOFT;
    c.slots = 2;
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.5), "routes")) return;
    memset(b.memory, 170, b.size);
    CHECK(moe_route(&b.router, &b.call, b.memory, b.size, &routing) == MOE_OK);
    for (e = 0; e < routing.n_experts; e++) CHECK(routing.first_counts[e] == 0);
    bench_end(&b);
}

/* What a call or a field lacks is named. */
static void test_refusals_name_the_cause(void) {
    static const char *const settings[] = {"input=adaptive_clustering", "score=attentive", "top_k=2"};
    moe_router_config c = config_of("top_k=2");
    moe_batch batch;
    moe_error error;
    bench b;
    size_t i;
    for (i = 0; i < 3; i++) {
        moe_router_config one = config_of(settings[i]);
        if (!CHECK(bench_start(&b, &one, NULL, 6, 0.5), settings[i])) continue;
        if (i == 0) {
            b.call.n_previous = 0;
            expect_call_says(&b, MOE_ERR_ARGUMENT, "call.n_previous = 0: input = adaptive_clustering needs at least 1");
        } else if (i == 1) {
            b.call.activation_width++;
            expect_call_says(&b, MOE_ERR_SHAPE, "score = attentive needs router_hidden = ");
        } else {
            b.router.tensors[MOE_ROUTER_BIAS] = b.x;
            expect_call_says(&b, MOE_ERR_ARGUMENT, "a parameter is set that the configuration does not have");
        }
        bench_end(&b);
    }
    if (!CHECK(bench_start(&b, &c, NULL, 6, 0.5), "routes")) return;
    memset(&batch, 0, sizeof batch);
    b.call.batch = &batch;
    batch.total = 6; /* no gather */
    expect_call_says(&b, MOE_ERR_ARGUMENT, "call.batch: first, total or gather is invalid");
    batch.gather = gather_nothing;
    batch.total = 5; /* the call has 6 */
    expect_call_says(&b, MOE_ERR_ARGUMENT, "call.batch: ");
    batch.total = 8;
    batch.first = 3;
    expect_call_says(&b, MOE_ERR_ARGUMENT, "call.batch: ");
    batch.first = 9;
    expect_call_says(&b, MOE_ERR_ARGUMENT, "call.batch: ");
    b.call.batch = NULL;
    bench_end(&b);
    CHECK(moe_fields_apply(moe_router_fields(), &c, "a_name_that_is_too_long_for_any_field=1", &error) ==
              MOE_ERR_NOT_FOUND &&
          strstr(error.message, ": unknown field") != NULL);
    CHECK(moe_field_set(moe_router_fields(), NULL, "top_k", "1", &error) == MOE_ERR_ARGUMENT &&
          strcmp(error.message, "config and value must not be NULL") == 0);
    CHECK(moe_field_set(moe_router_fields(), &c, "top_k", NULL, &error) == MOE_ERR_ARGUMENT &&
          strcmp(error.message, "config and value must not be NULL") == 0);
    CHECK(moe_field_set(moe_router_fields(), &c, NULL, "1", &error) == MOE_ERR_NOT_FOUND &&
          strcmp(error.message, "name and fields must not be NULL") == 0);
    CHECK(moe_field_set(NULL, &c, "top_k", "1", &error) == MOE_ERR_NOT_FOUND &&
          strcmp(error.message, "name and fields must not be NULL") == 0);
}

int main(int argc, char **argv) {
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    moe_rng_seed(&rng, 77);
    CASE(test_ranges());
    CASE(test_clashes());
    CASE(test_idle_in_files());
    CASE(test_training_check());
    CASE(test_setting());
    CASE(test_reasons());
    CASE(test_round_trips());
    CASE(test_names());
    CASE(test_presets());
    CASE(test_replay());
    CASE(test_bad_given());
    CASE(test_uniform());
    CASE(test_importance_gradient());
    CASE(test_importance_of_one());
    CASE(test_ties());
    CASE(test_sizes());
    CASE(test_nonfinite());
    CASE(test_memory());
    CASE(test_bad_calls());
    CASE(test_independence());
    CASE(test_top_k());
    CASE(test_few_and_many());
    CASE(test_finite_everywhere());
    CASE(test_columns());
    CASE(test_backward_adds());
    CASE(test_attention_backward_adds());
    CASE(test_attention_backward_tiny());
    CASE(test_custom_select());
    CASE(test_sparsemixer());
    CASE(test_far_weights());
    CASE(test_short_vectors());
    CASE(test_bad_supplies());
    CASE(test_refusals_name_the_cause());
    CASE(test_every_stage_is_checked());
    CASE(test_soft_counts());
    CASE(test_soft_scale_of_zero());
    CASE(test_batch_of_one());
    CASE(test_capacity_of_the_step());
    CASE(test_capacity_of_decimals());
    CASE(test_choice_of_decimals());
    CASE(test_clusters_of_negative_weights());
    CASE(test_capacity_factor());
    CASE(test_sinkhorn());
    CASE(test_affinity());
    CASE(test_noise());
    CASE(test_expert_dropout());
    CASE(test_drop_rules());
    CASE(test_drop_rule_and_capacity());
    CASE(test_sampling());
    CASE(test_draws_are_counted());
    CASE(test_last_ones_are_checked());
    CASE(test_machines());
    CASE(test_loads_are_taken_off());
    CASE(test_reference());
    CASE(test_everything());
    return test_end();
}
