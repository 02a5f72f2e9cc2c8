/* layer.c - what moe.h promises of a MoE layer: tensors, forward against a naive reference,
   memory, files, failures.

     cc -std=c99 -O2 -I. tests/unit/layer.c -o layer -lm && ./layer [FOLDER]
     (also with -DMOE_REAL=double, and as C++)

   FOLDER, by default the current one, takes two small files that are removed again. Exit status 1
   if a check failed. */

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
#define NEAR 1e-10
#else
#define NEAR 1e-4
#endif

static moe_rng rng;

static moe_real *normals(size_t count, double spread) { return normals_of(&rng, count, spread); }

static int below(int n) { return (int)moe_rng_below(&rng, (uint64_t)n); }

static int all_zero(const moe_real *v, size_t n) {
    size_t i;
    for (i = 0; i < n; i++)
        if (v[i] < 0 || v[i] > 0 || !moe_is_finite(v[i])) return 0;
    return 1;
}

/* ---- a layer, one call, its results ---- */

typedef struct bench {
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    moe_real *x, *y, *dy, *dx, *attention, *teacher;
    int32_t *experts; /* replay, stages that read the layer before, or token ids */
    moe_rng rng;
    unsigned char *mask;
    void *work;
    size_t work_size;
    moe_status status;
} bench;

static moe_layer_config small_config(void) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.d_model = 6;
    c.router.n_experts = 4;
    c.router.top_k = 2;
    c.d_ff = 5;
    return c;
}

/* Biases and gains start at one value; random ones test more. */
static void shake(const moe_layer *layer) {
    moe_tensor t;
    size_t i, k;
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++)
        for (k = 0; k < t.count; k++)
            if (t.flags & MOE_PARAM_NO_DECAY || strcmp(t.name, "shared.sigmoid") == 0)
                t.data[k] += (moe_real)0.25 * moe_rng_normal(&rng);
}

static void run(bench *b) {
    size_t count = b->call.n_tokens * (size_t)b->layer.config.d_out;
    free(b->work);
    free(b->y);
    b->work = NULL;
    b->y = normals(count, 100.0); /* forward must overwrite it */
    b->status = moe_layer_work_size(&b->layer, b->call.n_tokens, b->call.training, &b->work_size);
    if (b->status != MOE_OK) return;
    b->work = grab(b->work_size, 1);
    memset(b->work, 0x55, b->work_size); /* numbers of an earlier call */
    b->status = moe_layer_forward(&b->layer, &b->call, b->y, b->work, b->work_size, &b->pass);
}

/* score = custom: z_te = u_t(e mod d) minus the mean of u_t; ctx may hold a status to fail with. */
static moe_status own_score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                            moe_real *logits) {
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts, t, e, q;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++) {
            moe_real mean = 0;
            for (q = 0; q < d; q++) mean += u[t * d + q] / (moe_real)d;
            logits[t * experts + e] = u[t * d + e % d] - mean;
        }
    return ctx != NULL ? *(const moe_status *)ctx : MOE_OK;
}

static moe_status own_score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                     const moe_real *d_logits, moe_real *d_u, moe_real *d_parameters) {
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts, t, e, q;
    (void)ctx;
    (void)u;
    (void)d_parameters;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++) {
            d_u[t * d + e % d] += d_logits[t * experts + e];
            for (q = 0; q < d; q++) d_u[t * d + q] -= d_logits[t * experts + e] / (moe_real)d;
        }
    return MOE_OK;
}

/* select = custom: the experts with a positive logit, and number 0. */
static moe_status own_select(void *ctx, const moe_router *router, const moe_call *call, const moe_real *logits,
                             const moe_real *probabilities, unsigned char *chosen) {
    size_t experts = (size_t)router->config.n_experts, i;
    (void)probabilities;
    for (i = 0; i < call->n_tokens * experts; i++) chosen[i] = i % experts == 0 || logits[i] > 0;
    return ctx != NULL ? *(const moe_status *)ctx : MOE_OK;
}

/* What stages beyond x ask of a call. */
static void supply(bench *b) {
    const moe_router_config *c = &b->layer.config.router;
    size_t n = b->call.n_tokens, d = (size_t)c->d_model, i;
    moe_tensor table;
    b->call.rng = &b->rng;
    b->experts = (int32_t *)grab(n * (size_t)c->top_k, sizeof *b->experts);
    for (i = 0; i < n * (size_t)c->top_k; i++) b->experts[i] = (int32_t)(i % (size_t)c->top_k);
    b->attention = normals(n * n * (size_t)c->heads + n * d * (size_t)c->heads, 1.0);
    for (i = 0; i < n * n * (size_t)c->heads; i++) b->attention[i] = (moe_real)fabs((double)b->attention[i]);
    if (c->select == MOE_SELECT_GIVEN) b->call.given = b->experts;
    b->call.token_ids = b->call.previous_experts = b->experts;
    if (c->loss_distill > 0 && !c->student) b->call.teacher = b->teacher = normals(n * (size_t)c->n_experts, 1.0);
    b->layer.router.custom.score = own_score;
    b->layer.router.custom.score_backward = own_score_backward;
    b->layer.router.custom.select = own_select;
    b->call.previous_input = b->call.previous_weights = b->dy;
    b->call.n_previous = 1;
    b->call.attention_weights = b->attention;
    b->call.attention_outputs = b->call.attention_output = b->attention + n * n * (size_t)c->heads;
    if (c->select == MOE_SELECT_HASH && moe_layer_find(&b->layer, "router.table", &table) == MOE_OK)
        for (i = 0; i < table.count; i++)
            table.data[i] = (moe_real)((i / table.shape[1] + i % table.shape[1]) % (size_t)c->n_experts);
}

/* The table that a layer starts with for hash: in every block of E ids each expert stands once in
   each column, and no row has one twice. */
static void test_hash_table(void) {
    static const char *const settings[] = {"select=hash table_size=24 top_k=3 n_experts=8",
                                           "select=hash table_size=30 top_k=2 n_experts=7",
                                           "select=hash table_size=3 top_k=4 n_experts=5"};
    size_t i, row, column, other;
    for (i = 0; i < 3; i++) {
        moe_layer_config c;
        moe_layer layer;
        moe_tensor table;
        moe_error error;
        size_t experts, wrong = 0;
        memset(&c, 0, sizeof c);
        c.router.d_model = 6;
        c.d_ff = 4;
        CHECK(moe_fields_apply(moe_layer_fields(), &c, settings[i], &error) == MOE_OK, settings[i]);
        if (!CHECK(moe_layer_create(&layer, &c, 0, 5 + i, NULL, &error) == MOE_OK, "moe_layer_create")) continue;
        experts = (size_t)c.router.n_experts;
        if (CHECK(moe_layer_find(&layer, "router.table", &table) == MOE_OK &&
                      table.shape[0] == (size_t)c.router.table_size,
                  "router.table"))
            for (row = 0; row < table.shape[0]; row++)
                for (column = 0; column < table.shape[1]; column++) {
                    const moe_real e = table.data[row * table.shape[1] + column];
                    wrong += !(e >= 0) || e > (moe_real)(experts - 1) || floor((double)e) < (double)e;
                    for (other = 0; other < column; other++)
                        wrong += !(fabs((double)(table.data[row * table.shape[1] + other] - e)) > 0.5);
                    for (other = row / experts * experts; other < row; other++)
                        wrong += !(fabs((double)(table.data[other * table.shape[1] + column] - e)) > 0.5);
                }
        CHECK(wrong == 0, "each expert once in a column of a block, none twice in a row");
        moe_layer_free(&layer);
    }
}

static int start(bench *b, const moe_layer_config *config, int trainable, size_t n) {
    moe_error error;
    moe_layer_config c = *config;
    memset(b, 0, sizeof *b);
    c.router.untrained = 1;
    error.message[0] = '\0';
    if (!CHECK(moe_layer_create(&b->layer, &c, trainable, moe_rng_next(&rng), NULL, &error) == MOE_OK,
               "moe_layer_create")) {
        printf("  %s\n", error.message);
        return 0;
    }
    shake(&b->layer);
    b->call.n_tokens = n;
    b->call.training = trainable;
    b->call.x = b->x = normals(n * (size_t)c.router.d_model, 1.0);
    b->dy = normals(n * (size_t)b->layer.config.d_out, 1.0);
    b->dx = normals(n * (size_t)c.router.d_model, 0.0);
    supply(b);
    run(b);
    return CHECK(b->status == MOE_OK, "moe_layer_forward");
}

static void end(bench *b) {
    free(b->x);
    free(b->y);
    free(b->dy);
    free(b->dx);
    free(b->mask);
    free(b->work);
    free(b->experts);
    free(b->attention);
    free(b->teacher);
    moe_layer_free(&b->layer);
}

static void mask_some(bench *b) {
    size_t t;
    b->call.mask = b->mask = (unsigned char *)grab(b->call.n_tokens, 1);
    for (t = 0; t < b->call.n_tokens; t++) b->mask[t] = below(3) > 0;
}

/* ---- the naive layer, in double ---- */

static double *affine(const moe_real *w, const moe_real *bias, size_t out, size_t in, const double *x) {
    double *y = (double *)grab(out, sizeof *y);
    size_t i, k;
    for (i = 0; i < out; i++) {
        y[i] = bias != NULL ? (double)bias[i] : 0.0;
        for (k = 0; k < in; k++) y[i] += (double)w[i * in + k] * x[k];
    }
    return y;
}

static double act_of(int act, double x) {
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

static const moe_real *block_of(const moe_layer *layer, int place, size_t e, size_t size) {
    return layer->tensors[place] != NULL ? layer->tensors[place] + e * size : NULL;
}

/* A configuration of swiglu experts with some of what is beyond the plain one; limits that many
   numbers reach. */
static void shape(moe_layer_config *c) {
    c->expert = MOE_EXPERT_SWIGLU;
    c->expert_bias = below(2);
    c->swiglu_alpha = below(3) == 0 ? 0 : (moe_real)(below(2) ? 1.702 : 0.25);
    c->swiglu_limit = below(3) == 0 ? 0 : (moe_real)(below(2) ? 0.5 : 7);
    c->swiglu_offset = below(3) == 0 ? 0 : (moe_real)(below(2) ? 1 : -0.75);
}

/* What a glu, or a swiglu with the fields swiglu_, makes of a gate g and an up u. */
static double shaped(const moe_layer_config *c, double g, double u) {
    double alpha = c->swiglu_alpha > 0 ? (double)c->swiglu_alpha : 1.0, limit = (double)c->swiglu_limit;
    if (c->expert == MOE_EXPERT_GLU) return act_of(c->act, g) * u;
    if (limit > 0.0 && g > limit) g = limit;
    if (limit > 0.0 && u > limit) u = limit;
    if (limit > 0.0 && u < -limit) u = -limit;
    return g / (1.0 + exp(-alpha * g)) * (u + (double)c->swiglu_offset);
}

static double *naive_swiglu(const moe_layer *layer, size_t e, const double *x) {
    const moe_layer_config *c = &layer->config;
    size_t d = (size_t)(c->d_latent > 0 ? c->d_latent : c->router.d_model), f = (size_t)c->d_ff;
    size_t o = (size_t)(c->d_latent > 0 ? c->d_latent : c->d_out), i;
    double *gate =
        affine(block_of(layer, MOE_EXPERTS_GATE, e, f * d), block_of(layer, MOE_EXPERTS_GATE_BIAS, e, f), f, d, x);
    double *up = affine(block_of(layer, MOE_EXPERTS_UP, e, f * d), block_of(layer, MOE_EXPERTS_UP_BIAS, e, f), f, d, x),
           *y;
    for (i = 0; i < f; i++) gate[i] = shaped(c, gate[i], up[i]);
    y = affine(block_of(layer, MOE_EXPERTS_DOWN, e, o * f), block_of(layer, MOE_EXPERTS_DOWN_BIAS, e, o), o, f, gate);
    free(gate);
    free(up);
    return y;
}

/* down (act(gate) * up) */
static double *gated(int act, double *gate, double *up, const moe_real *down, size_t out, size_t f) {
    double *y;
    size_t i;
    for (i = 0; i < f; i++) gate[i] = act_of(act, gate[i]) * up[i];
    y = affine(down, NULL, out, f, gate);
    free(gate);
    free(up);
    return y;
}

/* x is of the width in which experts work. */
static double *naive_plain_expert(const moe_layer *layer, size_t e, const double *x) {
    const moe_layer_config *c = &layer->config;
    size_t d = (size_t)(c->d_latent > 0 ? c->d_latent : c->router.d_model), f = (size_t)c->d_ff;
    size_t o = (size_t)(c->d_latent > 0 ? c->d_latent : c->d_out), low = (size_t)c->d_low, i;
    double *hidden, *y;
    if (c->expert == MOE_EXPERT_LINEAR)
        return affine(block_of(layer, MOE_EXPERTS_WEIGHT, e, o * d), block_of(layer, MOE_EXPERTS_BIAS, e, o), o, d, x);
    if (c->expert == MOE_EXPERT_SWIGLU || c->expert == MOE_EXPERT_GLU) return naive_swiglu(layer, e, x);
    if (c->expert == MOE_EXPERT_FACTORISED) {
        hidden = affine(block_of(layer, MOE_EXPERTS_REDUCE, e, low * d), NULL, low, d, x);
        y = gated(MOE_ACT_SILU, affine(block_of(layer, MOE_EXPERTS_EXPAND, e, f * low), NULL, f, low, hidden),
                  affine(block_of(layer, MOE_EXPERTS_UP, e, f * d), NULL, f, d, x),
                  block_of(layer, MOE_EXPERTS_DOWN, e, o * f), o, f);
        free(hidden);
        return y;
    }
    hidden =
        affine(block_of(layer, MOE_EXPERTS_FC1_WEIGHT, e, f * d), block_of(layer, MOE_EXPERTS_FC1_BIAS, e, f), f, d, x);
    for (i = 0; i < f; i++) hidden[i] = act_of(c->act, hidden[i]);
    y = affine(block_of(layer, MOE_EXPERTS_FC2_WEIGHT, e, o * f), block_of(layer, MOE_EXPERTS_FC2_BIAS, e, o), o, f,
               hidden);
    free(hidden);
    return y;
}

/* The last experts, which have no matrices: 0, x, or a1 x + a2 v. */
static double *naive_zero(const moe_layer *layer, size_t e, const double *x) {
    const moe_router_config *c = &layer->config.router;
    size_t d = (size_t)c->d_model, constants = (size_t)(c->n_experts - c->n_constant), i;
    const size_t k = e - constants;
    double *out = (double *)grab((size_t)layer->config.d_out, sizeof *out), *a;
    if (e < constants - (size_t)c->n_copy) return out;
    for (i = 0; i < d; i++) out[i] = x[i];
    if (e < constants) return out;
    a = affine(layer->tensors[MOE_EXPERTS_CONSTANT_GATE] + 2 * d * k, NULL, 2, d, x);
    for (i = 0; i < d; i++)
        out[i] = (exp(a[0]) * x[i] + exp(a[1]) * (double)layer->tensors[MOE_EXPERTS_CONSTANT][k * d + i]) /
                 (exp(a[0]) + exp(a[1]));
    free(a);
    return out;
}

/* With d_latent W_out f(W_in x): W_out is linear, so each expert's output may pass it alone. */
static double *naive_expert(const moe_layer *layer, size_t e, const double *x) {
    const moe_router_config *c = &layer->config.router;
    size_t width = (size_t)layer->config.d_latent;
    double *h, *f, *y;
    if (e >= (size_t)(c->n_experts - c->n_zero - c->n_copy - c->n_constant)) return naive_zero(layer, e, x);
    if (width == 0) return naive_plain_expert(layer, e, x);
    h = affine(layer->tensors[MOE_LATENT_IN], NULL, width, (size_t)layer->config.router.d_model, x);
    f = naive_plain_expert(layer, e, h);
    y = affine(layer->tensors[MOE_LATENT_OUT], NULL, (size_t)layer->config.d_out, width, f);
    free(h);
    free(f);
    return y;
}

static void add_naive_shared(const moe_layer *layer, const double *x, double *y) {
    size_t d = (size_t)layer->config.router.d_model, s = (size_t)(layer->config.n_shared * layer->config.d_shared);
    size_t o = (size_t)layer->config.d_out, i;
    double factor = 1.0, sum = 0.0, *shared;
    if (layer->config.n_shared == 0) return;
    for (i = 0; i < d && layer->config.shared_sigmoid; i++) sum += (double)layer->tensors[MOE_SHARED_SIGMOID][i] * x[i];
    if (layer->config.shared_sigmoid) factor = 1.0 / (1.0 + exp(-sum));
    shared = gated(layer->config.shared_act != 0 ? layer->config.shared_act : (int)MOE_ACT_SILU,
                   affine(layer->tensors[MOE_SHARED_GATE], NULL, s, d, x),
                   affine(layer->tensors[MOE_SHARED_UP], NULL, s, d, x), layer->tensors[MOE_SHARED_DOWN], o, s);
    for (i = 0; i < o; i++) y[i] += factor * shared[i];
    free(shared);
}

/* The weights that a linear softmax router with sum gives to the experts that were selected; checks
   that they are the best. */
static void check_naive_weights(const bench *b, size_t t, double *w) {
    size_t experts = (size_t)b->layer.config.router.n_experts, e, d = (size_t)b->layer.config.router.d_model;
    size_t n = 0;
    double *x = (double *)grab(d, sizeof *x), *z, sum = 0.0;
    double lowest = HUGE_VAL, highest = -HUGE_VAL;
    for (e = 0; e < d; e++) x[e] = (double)b->x[t * d + e];
    z = affine(b->layer.tensors[MOE_ROUTER_WEIGHT], NULL, experts, d, x);
    for (e = 0; e < experts; e++) {
        w[e] = b->pass.routing.selected[t * experts + e] ? exp(z[e]) : 0.0;
        sum += w[e];
        if (w[e] > 0.0 && z[e] < lowest) lowest = z[e];
        if (!(w[e] > 0.0) && z[e] > highest) highest = z[e];
        n += w[e] > 0.0;
    }
    CHECK(n == (size_t)b->layer.config.router.top_k && highest <= lowest + 1e-4, "the best experts are chosen");
    for (e = 0; e < experts; e++) {
        w[e] /= sum;
        CHECK(fabs((double)b->pass.routing.weights[t * experts + e] - w[e]) <= NEAR * 10.0, "weights");
    }
    free(x);
    free(z);
}

/* add_input: y += (1 - sum w) x, w of the experts that took the token. */
static void add_naive_input(const bench *b, size_t t, const double *w, double *y) {
    size_t d = (size_t)b->layer.config.router.d_model, experts = (size_t)b->layer.config.router.n_experts, e, i;
    double share = 1.0;
    for (e = 0; e < experts; e++) share -= b->pass.routing.selected[t * experts + e] ? w[e] : 0.0;
    for (i = 0; i < d; i++) y[i] += share * (double)b->x[t * d + i];
}

/* y of every token from the weights that were used; for a plain router these are checked too. */
static void check_naive(const bench *b) {
    const moe_layer_config *c = &b->layer.config;
    size_t d = (size_t)c->router.d_model, o = (size_t)c->d_out;
    size_t experts = (size_t)c->router.n_experts, t, e, i;
    double *x = (double *)grab(d, sizeof *x), *y = (double *)grab(o, sizeof *y);
    double *w = (double *)grab(experts, sizeof *w), size = 1e-3;
    double worst = 0.0;
    int plain = c->router.score == MOE_SCORE_LINEAR && c->router.select == MOE_SELECT_TOP_K &&
                c->router.weight == MOE_WEIGHT_SUM && !c->router.router_bias && c->router.gate == MOE_GATE_SOFTMAX &&
                c->router.apply_to == MOE_APPLY_OUTPUT && !c->router.selection_bias &&
                c->router.input == MOE_INPUT_PLAIN && c->router.noise == MOE_NOISE_NONE &&
                c->router.refine == MOE_REFINE_NONE && c->router.drop_capacity == 0 &&
                c->router.weight_over == MOE_WEIGHT_OVER_ALL &&
                !(c->router.capacity_factor > 0) && b->call.router_x == NULL;
    for (t = 0; t < b->call.n_tokens; t++) {
        int real = b->call.mask == NULL || b->call.mask[t];
        for (e = 0; e < experts; e++) w[e] = (double)b->pass.routing.weights[t * experts + e];
        if (plain && real) check_naive_weights(b, t, w);
        for (i = 0; i < o; i++) y[i] = 0.0;
        for (e = 0; e < experts && real; e++) {
            double *out;
            if (!b->pass.routing.selected[t * experts + e]) continue;
            for (i = 0; i < d; i++)
                x[i] = (double)b->x[t * d + i] * (c->router.apply_to == MOE_APPLY_INPUT ? w[e] : 1.0);
            out = naive_expert(&b->layer, e, x);
            for (i = 0; i < o; i++) y[i] += out[i] * (c->router.apply_to == MOE_APPLY_INPUT ? 1.0 : w[e]);
            free(out);
        }
        if (c->add_input && real) add_naive_input(b, t, w, y);
        for (i = 0; i < d; i++) x[i] = (double)b->x[t * d + i];
        add_naive_shared(&b->layer, x, y);
        for (i = 0; i < o; i++) {
            double difference = fabs(y[i] - (double)b->y[t * o + i]);
            if (fabs(y[i]) > size) size = fabs(y[i]);
            if (!(difference <= worst)) worst = difference;
        }
    }
    if (!CHECK(worst <= NEAR * size, "y is that of the naive layer")) printf("  off by %g of %g\n", worst, size);
    free(x);
    free(y);
    free(w);
}

/* Soft: every expert works on mixtures of a sequence's tokens, D^T x, and y = C times what it made
   of them. */
static void check_naive_soft(const bench *b) {
    const moe_layer_config *c = &b->layer.config;
    size_t d = (size_t)c->router.d_model, o = (size_t)c->d_out;
    size_t experts = (size_t)c->router.n_experts, slots = (size_t)c->router.slots;
    size_t total = experts * slots, n = b->call.n_tokens;
    size_t t, slot, i;
    double *y = (double *)grab(n * o, sizeof *y), *x = (double *)grab(d, sizeof *x);
    double *own = (double *)grab(d, sizeof *own), worst = 0.0;
    double size = 1e-3;
    for (slot = 0; slot < total; slot++) {
        double *out, sum = 0.0, top = -HUGE_VAL;
        double *z = (double *)grab(n, sizeof *z);
        for (t = 0; t < n; t++) {
            for (i = 0; i < d; i++)
                z[t] += (double)b->x[t * d + i] * (double)b->layer.tensors[MOE_ROUTER_SLOT_VECTORS][slot * d + i];
            if (z[t] > top && (b->call.mask == NULL || b->call.mask[t])) top = z[t];
        }
        for (t = 0; t < n; t++) {
            z[t] = b->call.mask == NULL || b->call.mask[t] ? exp(z[t] - top) : 0.0;
            sum += z[t];
        }
        for (i = 0; i < d; i++) x[i] = 0.0;
        for (t = 0; t < n; t++)
            for (i = 0; i < d && z[t] > 0.0; i++) x[i] += z[t] / sum * (double)b->x[t * d + i];
        out = naive_expert(&b->layer, slot / slots, x);
        for (t = 0; t < n; t++)
            for (i = 0; i < o && z[t] > 0.0; i++)
                y[t * o + i] += (double)b->pass.routing.probabilities[t * total + slot] * out[i];
        free(out);
        free(z);
    }
    for (t = 0; t < n; t++) {
        for (i = 0; i < d; i++) own[i] = (double)b->x[t * d + i];
        add_naive_shared(&b->layer, own, y + t * o);
        for (i = 0; i < o; i++) {
            double difference = fabs(y[t * o + i] - (double)b->y[t * o + i]);
            if (fabs(y[t * o + i]) > size) size = fabs(y[t * o + i]);
            if (!(difference <= worst)) worst = difference;
        }
    }
    CHECK(worst <= NEAR * size, "y is that of the naive soft layer");
    free(y);
    free(x);
    free(own);
}

/* ---- promises of one forward call ---- */

/* Inference gives the bits of training, a token alone those of the batch (where the router is
   causal and looks at one token). */
static void check_bits(bench *b) {
    unsigned traits = moe_router_traits(&b->layer.config.router);
    size_t d = (size_t)b->layer.config.router.d_model, o = (size_t)b->layer.config.d_out, t;
    size_t bytes = 0;
    moe_call call = b->call;
    moe_real *y = normals(b->call.n_tokens * o, 100.0);
    void *work;
    if (traits & MOE_TRAIT_STOCHASTIC) {
        free(y);
        return;
    }
    call.training = !b->call.training;
    CHECK(moe_layer_work_size(&b->layer, call.n_tokens, call.training, &bytes) == MOE_OK, "size");
    work = grab(bytes, 1);
    CHECK(moe_layer_forward(&b->layer, &call, y, work, bytes, NULL) == MOE_OK, "the pass may be NULL");
    CHECK(same_bits(y, b->y, call.n_tokens * o * sizeof *y), "inference gives the bits of training");
    free(work);
    if ((traits & (MOE_TRAIT_CAUSAL | MOE_TRAIT_NEEDS_BATCH)) != MOE_TRAIT_CAUSAL ||
        b->layer.config.router.select == MOE_SELECT_HASH) {
        free(y);
        return;
    }
    call.n_tokens = 1;
    call.training = 0;
    CHECK(moe_layer_work_size(&b->layer, 1, 0, &bytes) == MOE_OK, "size");
    work = grab(bytes, 1);
    for (t = 0; t < b->call.n_tokens; t++) {
        call.x = b->call.x + t * d;
        call.mask = b->call.mask != NULL ? b->call.mask + t : NULL;
        CHECK(moe_layer_forward(&b->layer, &call, y, work, bytes, NULL) == MOE_OK, "one token");
        CHECK(same_bits(y, b->y + t * o, o * sizeof *y), "a token alone has the bits of the batch");
    }
    free(work);
    free(y);
}

/* ---- refining over many tokens ---- */

/* ln of what S_ij of one head is in proportion to; -infinity: j takes no part. */
static double refine_exponent(const bench *b, size_t h, size_t i, size_t j) {
    const moe_router_config *c = &b->layer.config.router;
    size_t d = (size_t)c->d_model, n = b->call.n_tokens, q;
    const moe_real *u = b->pass.routing.u + i * d, *key = b->pass.routing.u + j * d;
    double dot = 0.0, distance = 0.0, weight;
    if (c->causal && j > i) return -HUGE_VAL;
    if (c->refine == MOE_REFINE_ATTENTION) key = b->call.attention_outputs + (h * n + j) * d;
    for (q = 0; q < d; q++) {
        const double off = (double)u[q] - (double)key[q];
        dot += (double)u[q] * (double)key[q];
        distance += off * off;
    }
    if (c->refine == MOE_REFINE_SIMILARITY) return dot / (double)c->similarity_tau;
    weight = (double)b->call.attention_weights[(h * n + i) * n + j];
    return weight > 0.0 ? log(weight) - distance / (2.0 * (double)c->attention_sigma * (double)c->attention_sigma)
                        : -HUGE_VAL;
}

/* p_i by its formula. */
static void check_refined_row(const bench *b, size_t i) {
    const moe_router_config *c = &b->layer.config.router;
    size_t first = 0, end = 1, h, j, e;
    size_t experts = (size_t)c->n_experts;
    double p[8] = {0}, sum = 0.0;
    double most = -HUGE_VAL, exponent;
    if (c->refine == MOE_REFINE_ATTENTION && c->attention_heads == MOE_HEADS_ALL) end = (size_t)c->heads;
    if (c->refine == MOE_REFINE_ATTENTION && c->attention_heads == MOE_HEADS_FIXED) {
        first = (size_t)c->attention_head;
        end = first + 1;
    }
    for (h = first; h < end; h++)
        for (j = 0; j < b->call.n_tokens; j++) {
            exponent = refine_exponent(b, h, i, j);
            if (exponent > most) most = exponent;
        }
    for (h = first; h < end; h++)
        for (j = 0; j < b->call.n_tokens; j++) {
            const double share = exp(refine_exponent(b, h, i, j) - most);
            sum += share;
            for (e = 0; e < experts; e++) p[e] += share * (double)b->pass.routing.gate[j * experts + e];
        }
    for (e = 0; e < experts; e++)
        CHECK(fabs(p[e] / sum - (double)b->pass.routing.probabilities[i * experts + e]) <= NEAR * 0.1,
              "p of a refined row");
}

/* The same tokens without the last ones: what is left has the same bits. */
static void check_prefix(const bench *b, size_t n) {
    const moe_router_config *c = &b->layer.config.router;
    size_t d = (size_t)c->d_model, all = b->call.n_tokens;
    size_t heads = (size_t)c->heads, experts = (size_t)c->n_experts, h, i;
    size_t bytes = 0;
    moe_real *attention = normals(heads * n * (n + d), 1.0), *outputs = attention + heads * n * n;
    moe_real *y = normals(n * d, 1.0);
    moe_call call = b->call;
    moe_layer_pass pass;
    void *work;
    for (h = 0; h < heads; h++) {
        for (i = 0; i < n; i++)
            memcpy(attention + (h * n + i) * n, b->call.attention_weights + (h * all + i) * all, n * sizeof *attention);
        memcpy(outputs + h * n * d, b->call.attention_outputs + h * all * d, n * d * sizeof *outputs);
    }
    call.n_tokens = n;
    call.attention_weights = attention;
    call.attention_outputs = outputs;
    CHECK(moe_layer_work_size(&b->layer, n, 0, &bytes) == MOE_OK, "size");
    work = grab(bytes, 1);
    if (CHECK(moe_layer_forward(&b->layer, &call, y, work, bytes, &pass) == MOE_OK, "fewer tokens"))
        CHECK(same_bits(pass.routing.probabilities, b->pass.routing.probabilities, n * experts * sizeof *y),
              "later tokens change no bit");
    free(attention);
    free(y);
    free(work);
}

/* Blocks have 96 rows and end in steps of 24; products and panels know 16 and 256 columns. */
static void test_long_refine(void) {
    static const char *const settings[] = {
        "refine=similarity similarity_tau=2",
        "refine=similarity similarity_tau=2 causal=1",
        "refine=attention heads=3 attention_heads=fixed attention_head=2 attention_sigma=2",
        "refine=attention heads=3 attention_heads=fixed attention_head=1 attention_sigma=2 causal=1",
        "refine=attention heads=3 attention_heads=all attention_sigma=2",
        "refine=attention heads=3 attention_heads=all attention_sigma=2 causal=1"};
    static const size_t lengths[] = {1, 2, 23, 24, 25, 95, 96, 97, 192, 193, 255, 256, 257, 299};
    int table, k;
    size_t i;
    for (table = 1; table < MOE_KERNELS_COUNT; table++)
        for (k = 0; k < 6 && moe_kernels_select(table) != NULL; k++) {
            moe_layer_config c = small_config();
            bench b;
            c.kernels = table;
            CHECK(moe_fields_apply(moe_layer_fields(), &c, settings[k], NULL) == MOE_OK, "settings");
            if (start(&b, &c, 0, 300) && CHECK(b.status == MOE_OK, "300 tokens")) {
                for (i = 0; i < 300; i += 1 + (size_t)below(4)) check_refined_row(&b, i);
                for (i = 0; i < sizeof lengths / sizeof *lengths && c.router.causal; i++) check_prefix(&b, lengths[i]);
            }
            end(&b);
        }
}

static void test_forward(void) {
    static const int widths[] = {1, 3, 17, 67};
    int a, f, n, experts, table, kind = 0;
    for (table = 1; table < MOE_KERNELS_COUNT; table++) {
        if (moe_kernels_select(table) == NULL) continue;
        for (a = 0; a < 4; a++)
            for (f = 0; f < 4; f++)
                for (n = 0; n < 4; n++)
                    for (experts = 1; experts <= 9; experts += 1 + (a == 3 || f == 3 || n == 3)) {
                        moe_layer_config c = small_config();
                        bench b;
                        c.kernels = table;
                        c.router.d_model = widths[a];
                        c.d_ff = widths[f];
                        c.router.n_experts = experts;
                        c.router.top_k = 1 + below(experts);
                        c.expert = kind++ % MOE_EXPERT_COUNT;
                        if (c.expert == MOE_EXPERT_MLP) {
                            c.act = below(MOE_ACT_COUNT);
                            c.no_expert_bias = below(2);
                        }
                        if (c.expert == MOE_EXPERT_GLU) {
                            c.act = below(MOE_ACT_COUNT);
                            c.expert_bias = below(2);
                        }
                        if (c.expert == MOE_EXPERT_SWIGLU && below(4) > 0) shape(&c);
                        if (below(3) == 0) c.d_out = 1 + below(20);
                        if (below(4) == 0) c.d_latent = below(2) ? 1 + below(40) : -1 - below(4);
                        if (below(3) == 0) {
                            c.n_shared = 1 + below(2);
                            c.d_shared = below(9);
                            c.shared_act = below(MOE_ACT_COUNT);
                            c.shared_sigmoid = below(2);
                        }
                        if (below(3) == 0) c.router.apply_to = MOE_APPLY_INPUT;
                        else if (c.d_out == 0) c.add_input = below(3) == 0;
                        if (below(4) == 0) c.router.select = MOE_SELECT_DENSE;
                        if (below(4) == 0) {
                            c.router.gate = MOE_GATE_SIGMOID;
                            c.router.weight = MOE_WEIGHT_RAW;
                        }
                        if (below(4) == 0 && c.expert == MOE_EXPERT_FACTORISED) c.router.score = MOE_SCORE_NORM;
                        if (start(&b, &c, 1, (size_t)widths[n])) {
                            if (below(3) == 0) {
                                mask_some(&b);
                                run(&b);
                            }
                            CHECK(b.status == MOE_OK && b.layer.kernels->id == table, "the table that was asked for");
                            check_naive(&b);
                            check_bits(&b);
                        }
                        end(&b);
                    }
    }
}

/* Selections that even out the load in training only. */
static int balances_in_training(const moe_router_config *c) {
    return c->select == MOE_SELECT_SINKHORN || c->select == MOE_SELECT_BALANCED;
}

/* Every selection, capacity and soft, with every kind of expert, against the naive layer. */
static void test_selections(void) {
    int trial;
    for (trial = 0; trial < 600; trial++) {
        moe_layer_config c = small_config();
        bench b;
        c.expert = trial % MOE_EXPERT_COUNT;
        c.router.n_experts = 1 + below(6);
        c.router.top_k = 1 + below(c.router.n_experts);
        c.router.d_model = 6 + 6 * below(2);
        if (c.expert == MOE_EXPERT_MLP || c.expert == MOE_EXPERT_GLU) c.act = below(MOE_ACT_COUNT);
        if (c.expert == MOE_EXPERT_SWIGLU && below(2)) shape(&c);
        c.router.select = trial % MOE_SELECT_COUNT;
        if (c.router.select == MOE_SELECT_BALANCED) c.router.top_k = 1;
        c.router.score = below(3) == 0 ? MOE_SCORE_CUSTOM : MOE_SCORE_LINEAR;
        c.n_shared = below(2);
        c.d_out = below(2) * 5;
        c.d_latent = below(3) * 2;
        if (c.router.select == MOE_SELECT_SOFT) {
            c.router.slots = 1 + below(3);
            c.router.score = MOE_SCORE_LINEAR;
        } else {
            c.router.gate = below(MOE_GATE_COUNT);
            c.router.weight = MOE_WEIGHT_RAW;
            c.router.apply_to = below(2);
            c.router.scale = (moe_real)1.5;
            c.router.drop_capacity = below(4);
            c.router.drop_order = below(2) * MOE_DROP_SCORE;
            c.router.renormalize = c.router.gate != MOE_GATE_IDENTITY && below(2);
            c.router.refine = below(3) == 0 ? MOE_REFINE_SIMILARITY : MOE_REFINE_NONE;
            c.add_input = c.d_out == 0 && c.router.apply_to == MOE_APPLY_OUTPUT && below(2);
        }
        if (c.router.select == MOE_SELECT_GIVEN || c.router.select == MOE_SELECT_HASH ||
            c.router.select == MOE_SELECT_SAMPLE)
            continue; /* these want more of a call */
        if (moe_layer_check(&c, NULL, NULL) != MOE_OK) continue;
        if (start(&b, &c, 1, (size_t)below(14))) {
            if (below(2)) {
                mask_some(&b);
                run(&b);
            }
            CHECK(b.status == MOE_OK, "forward");
            if (c.router.select == MOE_SELECT_SOFT) check_naive_soft(&b);
            else check_naive(&b);
            if (!balances_in_training(&c.router)) check_bits(&b);
            CHECK(moe_layer_backward(&b.layer, b.dy, b.dx, NULL, &b.pass) == MOE_OK, "backward");
        }
        end(&b);
    }
}

/* Soft: sequences of a call have the outputs and gradients that they have alone. */
static void test_soft_sequences(void) {
    int trial;
    for (trial = 0; trial < 30; trial++) {
        moe_layer_config c = small_config();
        int32_t sequences[4] = {0, 0, 0, 0};
        size_t d = (size_t)c.router.d_model, s;
        moe_real *y, *dx;
        bench b;
        c.router.select = MOE_SELECT_SOFT;
        c.router.slots = 1 + below(12);
        c.router.soft_sequences = 3;
        for (s = 1; s < 4; s++) sequences[s] = sequences[s - 1] + 1 + below(20);
        if (!start(&b, &c, 1, (size_t)sequences[3])) return;
        if (below(2)) mask_some(&b);
        b.call.sequences = sequences;
        b.call.n_sequences = 3;
        run(&b);
        memset(b.dx, 0, (size_t)sequences[3] * d * sizeof *b.dx);
        CHECK(moe_layer_backward(&b.layer, b.dy, b.dx, NULL, &b.pass) == MOE_OK, "backward");
        y = b.y;
        dx = b.dx;
        b.y = NULL;
        b.call.sequences = NULL;
        for (s = 0; s < 3; s++) {
            const size_t first = (size_t)sequences[s];
            b.call.x = b.x + first * d;
            b.call.mask = b.mask == NULL ? NULL : b.mask + first;
            b.call.n_tokens = (size_t)sequences[s + 1] - first;
            b.dx = (moe_real *)grab(b.call.n_tokens * d, sizeof *b.dx);
            run(&b);
            CHECK(same_bits(b.y, y + first * d, b.call.n_tokens * d * sizeof *y), "y of a sequence");
            CHECK(moe_layer_backward(&b.layer, b.dy + first * d, b.dx, NULL, &b.pass) == MOE_OK, "backward");
            CHECK(same_bits(b.dx, dx + first * d, b.call.n_tokens * d * sizeof *y), "dx of a sequence");
            free(b.dx);
        }
        free(y);
        b.dx = dx;
        end(&b);
    }
}

/* Padding gets 0 plus the shared expert, and real tokens are as if it were not there. */
static void test_mask(void) {
    int shared, trial;
    for (shared = 0; shared < 2; shared++)
        for (trial = 0; trial < 20; trial++) {
            moe_layer_config c = small_config();
            bench b, only;
            size_t t, n = 11, real = 0;
            size_t d = 6, i;
            c.n_shared = shared;
            c.d_latent = trial / MOE_EXPERT_COUNT; /* every width with every kind */
            c.expert = trial % MOE_EXPERT_COUNT;
            if (trial % 3 == 0 && c.expert == MOE_EXPERT_FACTORISED) c.router.score = MOE_SCORE_NORM;
            if (!start(&b, &c, 1, n)) continue;
            mask_some(&b);
            run(&b);
            memset(&only, 0, sizeof only);
            only = b;
            only.mask = NULL;
            only.call.mask = NULL;
            only.work = NULL;
            only.y = NULL;
            only.x = normals(n * d, 0.0);
            for (t = 0; t < n; t++)
                if (b.mask[t]) memcpy(only.x + real++ * d, b.x + t * d, d * sizeof(moe_real));
            only.call.x = only.x;
            only.call.n_tokens = real;
            run(&only);
            CHECK(only.status == MOE_OK, "without padding");
            for (t = 0, i = 0; t < n; t++) {
                if (b.mask[t])
                    CHECK(same_bits(only.y + i++ * d, b.y + t * d, d * sizeof(moe_real)), "padding changes nothing");
                else CHECK(shared || all_zero(b.y + t * d, d), "padding gets 0");
            }
            check_naive(&b);
            free(only.x);
            free(only.y);
            free(only.work);
            end(&b);
        }
}

/* Experts without tokens: no gradient, no effect. */
static void test_empty_experts(void) {
    moe_layer_config c = small_config();
    bench b;
    moe_tensor t;
    size_t i, e;
    c.router.n_experts = 9;
    c.router.top_k = 1;
    c.router.weight = MOE_WEIGHT_RAW;
    if (!start(&b, &c, 1, 3)) return;
    check_naive(&b);
    CHECK(moe_layer_backward(&b.layer, b.dy, b.dx, NULL, &b.pass) == MOE_OK, "backward");
    for (i = 0; moe_layer_tensor(&b.layer, i, &t) == MOE_OK; i++)
        for (e = 0; e < 9 && strncmp(t.name, "experts.", 8) == 0; e++)
            CHECK(all_zero(t.gradient + e * (t.count / 9), t.count / 9) == (b.pass.routing.counts[e] == 0),
                  "only experts with tokens get a gradient");
    end(&b);
}

/* ---- memory ---- */

static void test_work_memory(void) {
    enum { GUARD = 64 };
    int trial;
    for (trial = 0; trial < 60; trial++) {
        moe_layer_config c = small_config();
        moe_layer_pass pass;
        unsigned char *memory, kept[sizeof pass];
        moe_real *y;
        bench b;
        size_t shift, i, n = (size_t)(trial / MOE_EXPERT_COUNT % 5) * 3, count; /* every n with every kind */
        c.router.d_model = 1 + below(30);
        c.router.n_experts = 1 + below(6);
        c.router.top_k = 1;
        c.d_ff = 1 + below(30);
        c.expert = trial % MOE_EXPERT_COUNT;
        c.router.apply_to = below(2);
        c.n_shared = below(2);
        c.d_latent = below(3) * 4;
        c.router.select = below(2);
        if (below(2)) {
            c.router.score = MOE_SCORE_NORM;
            c.router.norm_node = MOE_NODE_ACT;
        }
        if (moe_layer_check(&c, NULL, NULL) != MOE_OK) { /* a kind without that activation */
            c.router.score = MOE_SCORE_LINEAR;
            c.router.norm_node = 0;
        }
        if (!start(&b, &c, 1, n)) continue;
        b.call.training = below(2);
        if (below(2)) mask_some(&b);
        run(&b);
        count = n * (size_t)b.layer.config.d_out;
        memory = (unsigned char *)grab(b.work_size + 16 + 2 * GUARD, 1);
        y = normals(count, 1.0);
        for (shift = 0; shift < 16; shift++) {
            int good = 1;
            memset(memory, 0xA5, b.work_size + 16 + 2 * GUARD);
            CHECK(moe_layer_forward(&b.layer, &b.call, y, memory + GUARD + shift, b.work_size, &pass) == MOE_OK,
                  "the exact size");
            CHECK(same_bits(y, b.y, count * sizeof *y), "alignment changes nothing");
            CHECK(moe_layer_backward(&b.layer, b.dy, b.dx, NULL, &pass) == (b.call.training ? MOE_OK : MOE_ERR_STATE),
                  "backward needs training");
            for (i = 0; i < GUARD + shift; i++) good &= memory[i] == 0xA5;
            for (i = GUARD + shift + b.work_size; i < b.work_size + 16 + 2 * GUARD; i++) good &= memory[i] == 0xA5;
            CHECK(good, "guard bytes");
        }
        memset(&pass, 99, sizeof pass);
        memcpy(kept, &pass, sizeof pass);
        CHECK(moe_layer_forward(&b.layer, &b.call, y, memory, b.work_size - 1, &pass) == MOE_ERR_SPACE,
              "one byte too few");
        CHECK(moe_layer_forward(&b.layer, &b.call, y, memory, 0, &pass) == MOE_ERR_SPACE, "no bytes");
        CHECK(moe_layer_forward(&b.layer, &b.call, y, NULL, b.work_size, &pass) == MOE_ERR_ARGUMENT, "no memory");
        CHECK(same_bits(kept, &pass, sizeof pass), "a failed call leaves the pass as it was");
        free(memory);
        free(y);
        end(&b);
    }
}

static moe_layer_config rich_config(void) {
    moe_layer_config c = small_config();
    c.router.score = MOE_SCORE_COSINE;
    c.router.cosine_dim = 3;
    c.router.cosine_learn_tau = 1;
    c.router.cosine_tau = (moe_real)0.3;
    c.router.gate_temperature = (moe_real)1.0 / (moe_real)3.0;
    c.router.scale = (moe_real)-1.1;
    c.router.selection_bias = 1;
    c.router.expert_scale = 1;
    c.router.loss_balance = (moe_real)0.01;
    c.router.balance_over = MOE_BALANCE_FIRST;
    c.router.weight = MOE_WEIGHT_RAW;
    c.expert = MOE_EXPERT_MLP;
    c.act = MOE_ACT_GELU;
    c.d_out = 4;
    c.n_shared = 2;
    c.d_shared = 3;
    c.shared_sigmoid = 1;
    return c;
}

static void write_layer(const moe_layer *layer, moe_buffer *buffer) {
    moe_stream stream;
    moe_error error;
    memset(buffer, 0, sizeof *buffer);
    stream = moe_buffer_stream(buffer);
    error.message[0] = '\0';
    if (!CHECK(moe_layer_write(layer, &stream, &error) == MOE_OK, "moe_layer_write")) printf("  %s\n", error.message);
}

static void layer_in_arena(moe_layer_config *c) {
    moe_layer made;
    moe_error error;
    moe_allocator a;
    memset(&made, 0, sizeof made);
    moe_layer_free(&made);
    moe_layer_free(NULL);
    { /* an arena is an allocator */
        moe_arena arena;
        size_t room = 1 << 16;
        memset(&arena, 0, sizeof arena);
        arena.base = grab(room, 1);
        arena.size = room;
        a = moe_arena_allocator(&arena);
        CHECK(moe_layer_create(&made, c, 1, 5, &a, &error) == MOE_OK && arena.used > 0, "an arena");
        moe_layer_free(&made);
        CHECK(arena.used == 0, "an arena takes the last block back");
        arena.size = 100;
        CHECK(moe_layer_create(&made, c, 1, 5, &a, &error) == MOE_ERR_MEMORY, "a small arena");
        free(arena.base);
    }
}

static void write_without_memory(moe_layer *made, moe_buffer *file, test_heap *heap, moe_allocator *a) {
    moe_error error;
    long at;
    moe_status status;
    for (at = 0;; at++) { /* write */
        size_t bytes = heap->bytes, blocks = heap->blocks;
        moe_buffer buffer;
        moe_stream stream;
        memset(&buffer, 0, sizeof buffer);
        buffer.allocator = *a;
        stream = moe_buffer_stream(&buffer);
        heap->calls = 0;
        heap->fail_at = at + 1;
        status = moe_layer_write(made, &stream, &error);
        heap->fail_at = 0;
        if (status == MOE_OK)
            CHECK(buffer.size == file->size && same_bits(buffer.data, file->data, file->size), "the same bytes");
        moe_buffer_free(&buffer);
        CHECK(heap->bytes == bytes && heap->blocks == blocks, "write gives all back");
        if (status == MOE_OK) break;
        CHECK(status == MOE_ERR_MEMORY, "write without memory");
        if (!CHECK(at < 1000, "write ends")) break;
    }
}

static void test_allocations(void) {
    moe_layer_config c = rich_config();
    moe_layer made, kept;
    moe_buffer file;
    moe_error error;
    test_heap heap;
    moe_allocator a;
    long at;
    int trainable;
    moe_status status;
    memset(&made, 0x5A, sizeof made);
    memcpy(&kept, &made, sizeof made);
    for (trainable = 0; trainable < 2; trainable++) {
        for (at = 0;; at++) { /* create */
            a = test_allocator(&heap, at + 1);
            status = moe_layer_create(&made, &c, trainable, 5, &a, &error);
            if (status == MOE_OK) break;
            CHECK(status == MOE_ERR_MEMORY && error.code == MOE_ERR_MEMORY && heap.bytes == 0 && heap.blocks == 0,
                  "create without memory");
            CHECK(same_bits(&made, &kept, sizeof made), "a failed create leaves the layer as it was");
            if (!CHECK(at < 1000, "create ends")) return;
        }
        CHECK(at >= 1, "create uses the allocator");
        heap.fail_at = 0; /* the layer goes on using it */
        write_layer(&made, &file);
        moe_layer_free(&made);
        CHECK(heap.bytes == 0 && heap.blocks == 0, "free gives all back");
        moe_layer_free(&made);
        memcpy(&made, &kept, sizeof made);
        for (at = 0;; at++) { /* read */
            a = test_allocator(&heap, at + 1);
            status = moe_layer_read(&made, file.data, file.size, trainable, MOE_KERNELS_AUTO, &a, &error);
            if (status == MOE_OK) break;
            CHECK(status == MOE_ERR_MEMORY && heap.bytes == 0 && heap.blocks == 0, "read without memory");
            CHECK(same_bits(&made, &kept, sizeof made), "a failed read leaves the layer as it was");
            if (!CHECK(at < 1000, "read ends")) return;
        }
        moe_layer_free(&made);
        CHECK(heap.bytes == 0 && heap.blocks == 0, "free gives all back after read");
        a = test_allocator(&heap, 0);
        CHECK(moe_layer_create(&made, &c, trainable, 5, &a, NULL) == MOE_OK, "create");
        write_without_memory(&made, &file, &heap, &a);
        moe_layer_free(&made);
        moe_buffer_free(&file);
        memcpy(&made, &kept, sizeof made);
    }
    layer_in_arena(&c);
}

/* ---- tensors ---- */

typedef struct expected {
    const char *name;
    int n_dims;
    size_t shape[3];
} expected;

static void check_tensors(const moe_layer_config *config, int trainable, const expected *list, size_t n,
                          size_t used_want) {
    moe_layer layer;
    moe_tensor t, found;
    moe_parameter slot;
    size_t i, count = 0, used = 0;
    size_t places = 0;
    int k, place;
    if (!CHECK(moe_layer_create(&layer, config, trainable, 1, NULL, NULL) == MOE_OK, "create")) return;
    for (i = 0; i < n; i++) {
        if (!CHECK(moe_layer_tensor(&layer, i, &t) == MOE_OK && strcmp(t.name, list[i].name) == 0, list[i].name))
            continue;
        CHECK(t.n_dims == list[i].n_dims, list[i].name);
        for (k = 0; k < t.n_dims; k++) CHECK(t.shape[k] == list[i].shape[k], list[i].name);
        CHECK(t.data != NULL && (t.gradient != NULL) == trainable, "gradients are there when trainable");
        if (t.gradient != NULL) CHECK(all_zero(t.gradient, t.count), "gradients start at 0");
        CHECK(moe_layer_find(&layer, t.name, &found) == MOE_OK && same_bits(&found, &t, sizeof t), "found by name");
        count += t.count;
    }
    CHECK(moe_layer_tensor(&layer, n, &t) == MOE_ERR_NOT_FOUND &&
              moe_layer_tensor(&layer, (size_t)-1, &t) == MOE_ERR_NOT_FOUND,
          "past the last");
    CHECK(moe_layer_find(&layer, "router.bogus", &t) == MOE_ERR_NOT_FOUND &&
              moe_layer_find(&layer, "", &t) == MOE_ERR_NOT_FOUND,
          "no such tensor");
    CHECK(moe_layer_parameter_count(&layer, &used) == count && used == used_want, "numbers in all and per token");
    CHECK(moe_layer_parameter_count(&layer, NULL) == count && moe_layer_parameter_count(NULL, NULL) == 0,
          "numbers in all");
    for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++)
        places += moe_layer_parameter(&layer.config, place, &slot) == MOE_OK;
    CHECK(places == n && moe_layer_parameter(&layer.config, MOE_LAYER_PARAMETER_COUNT, &slot) == MOE_ERR_NOT_FOUND &&
              moe_layer_parameter(&layer.config, -1, &slot) == MOE_ERR_NOT_FOUND,
          "places");
    moe_layer_free(&layer);
}

static void test_tensors(void) {
    static const expected swiglu[] = {{"router.weight", 2, {4, 6, 0}},
                                      {"experts.gate", 3, {4, 5, 6}},
                                      {"experts.up", 3, {4, 5, 6}},
                                      {"experts.down", 3, {4, 3, 5}}};
    static const expected mlp[] = {{"router.weight", 2, {4, 3, 0}},       {"router.projection", 2, {3, 6, 0}},
                                   {"router.temperature", 1, {1, 0, 0}},  {"router.selection_bias", 1, {4, 0, 0}},
                                   {"router.expert_scale", 1, {4, 0, 0}}, {"experts.fc1.weight", 3, {4, 5, 6}},
                                   {"experts.fc1.bias", 2, {4, 5, 0}},    {"experts.fc2.weight", 3, {4, 4, 5}},
                                   {"experts.fc2.bias", 2, {4, 4, 0}},    {"shared.gate", 2, {6, 6, 0}},
                                   {"shared.up", 2, {6, 6, 0}},           {"shared.down", 2, {4, 6, 0}},
                                   {"shared.sigmoid", 1, {6, 0, 0}}};
    static const expected linear[] = {{"router.fc1.weight", 2, {6, 6, 0}},
                                      {"router.fc1.bias", 1, {6, 0, 0}},
                                      {"router.fc2.weight", 2, {4, 6, 0}},
                                      {"router.fc2.bias", 1, {4, 0, 0}},
                                      {"experts.weight", 3, {4, 6, 6}}};
    static const expected factorised[] = {{"experts.up", 3, {4, 5, 6}},
                                          {"experts.down", 3, {4, 6, 5}},
                                          {"experts.reduce", 3, {4, 2, 6}},
                                          {"experts.expand", 3, {4, 5, 2}}};
    static const expected biased[] = {{"router.weight", 2, {4, 6, 0}},     {"experts.gate", 3, {4, 5, 6}},
                                      {"experts.up", 3, {4, 5, 6}},        {"experts.down", 3, {4, 3, 5}},
                                      {"experts.gate_bias", 2, {4, 5, 0}}, {"experts.up_bias", 2, {4, 5, 0}},
                                      {"experts.down_bias", 2, {4, 3, 0}}};
    moe_layer_config c = small_config();
    int trainable;
    for (trainable = 0; trainable < 2; trainable++) {
        c = small_config();
        c.d_out = 3;
        c.expert_bias = 1;
        check_tensors(&c, trainable, biased, sizeof biased / sizeof biased[0], 24 + 2 * (30 + 30 + 15 + 5 + 5 + 3));
        c = small_config();
        c.d_out = 3;
        check_tensors(&c, trainable, swiglu, sizeof swiglu / sizeof swiglu[0], 24 + 2 * (30 + 30 + 15));
        c = rich_config();
        check_tensors(&c, trainable, mlp, sizeof mlp / sizeof mlp[0],
                      12 + 18 + 1 + 4 + 4 + 2 * (30 + 5 + 20 + 4) + 36 + 36 + 24 + 6);
        c = small_config();
        c.expert = MOE_EXPERT_LINEAR;
        c.no_expert_bias = 1;
        c.router.score = MOE_SCORE_MLP;
        c.router.select = MOE_SELECT_DENSE;
        check_tensors(&c, trainable, linear, sizeof linear / sizeof linear[0], 36 + 6 + 24 + 4 + 4 * 36);
        c = small_config();
        c.expert = MOE_EXPERT_FACTORISED;
        c.router.score = MOE_SCORE_NORM;
        check_tensors(&c, trainable, factorised, sizeof factorised / sizeof factorised[0], 4 * 12 + 2 * (30 + 30 + 10));
    }
}

static void test_used_per_token(void) {
    static const struct {
        const char *settings;
        size_t used; /* a router has 24 parameters, an expert 90, with d_model = 8 120, a constant one 18 */
    } rows[] = {{"n_constant=2", 24 + 2 * 90},
                {"n_constant=3", 24 + 90 + 18},
                {"n_constant=3 d_model=2 d_out=2 expert=linear no_expert_bias=1", 8 + 2 * 6}, /* not 2 * 2 */
                {"d_model=8 score=grap select=affinity", 120},
                {"d_model=8 score=grap select=affinity switch_at=9", 1 + 2 * 120}, /* from top_k */
                {"d_model=8 score=grap switch_from=affinity switch_at=9", 1 + 2 * 120}};
    size_t i, used;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_layer_config c = small_config();
        moe_layer layer;
        if (!CHECK(moe_fields_apply(moe_layer_fields(), &c, rows[i].settings, NULL) == MOE_OK)) continue;
        if (!CHECK(moe_layer_init(&layer, &c, NULL) == MOE_OK, rows[i].settings)) continue;
        (void)moe_layer_parameter_count(&layer, &used);
        CHECK(used == rows[i].used, rows[i].settings);
    }
}

static void test_create(void) {
    moe_layer_config c;
    moe_layer a, b;
    moe_error error;
    size_t i, differ = 0;
    moe_tensor t, u;
    memset(&c, 0, sizeof c);
    c.router.d_model = 16;
    CHECK(moe_layer_create(&a, &c, 1, 7, NULL, NULL) == MOE_OK && moe_layer_create(&b, &c, 0, 7, NULL, NULL) == MOE_OK,
          "defaults");
    CHECK(a.config.router.n_experts == 8 && a.config.router.top_k == 2 && a.config.d_ff == 64 && a.config.d_out == 16 &&
              a.config.expert == MOE_EXPERT_SWIGLU,
          "defaults");
    for (i = 0; moe_layer_tensor(&a, i, &t) == MOE_OK && moe_layer_tensor(&b, i, &u) == MOE_OK; i++)
        CHECK(t.count == u.count && same_bits(t.data, u.data, t.count * sizeof(moe_real)),
              "a seed gives the same start");
    moe_layer_free(&b);
    CHECK(moe_layer_create(&b, &c, 0, 8, NULL, NULL) == MOE_OK, "another seed");
    for (i = 0; moe_layer_tensor(&a, i, &t) == MOE_OK && moe_layer_tensor(&b, i, &u) == MOE_OK; i++)
        differ += !same_bits(t.data, u.data, t.count * sizeof(moe_real));
    CHECK(differ == i, "another seed gives another start");
    moe_layer_free(&a);
    moe_layer_free(&b);
    c.router.top_k = 1;
    CHECK(moe_layer_create(&a, &c, 0, 7, NULL, &error) == MOE_OK, "K = 1 for inference");
    moe_layer_free(&a);
    CHECK(moe_layer_create(&a, &c, 1, 7, NULL, &error) == MOE_ERR_CONFIG && strstr(error.message, "top_k = 1") != NULL,
          "a router that cannot learn is refused for training");
    CHECK(moe_layer_create(NULL, &c, 1, 7, NULL, &error) == MOE_ERR_ARGUMENT &&
              moe_layer_create(&a, NULL, 1, 7, NULL, &error) == MOE_ERR_ARGUMENT,
          "NULL");
    for (i = 1; i < MOE_KERNELS_COUNT; i++) {
        c = small_config();
        c.kernels = (int)i;
        if (moe_kernels_select((int)i) != NULL) continue;
        CHECK(moe_layer_create(&a, &c, 1, 7, NULL, &error) == MOE_ERR_UNSUPPORTED &&
                  strstr(error.message, moe_kernels_name((int)i)) != NULL,
              "kernels that are not there");
    }
    c = small_config();
    /* 2^64 numbers per tensor */
    c.router.d_model = MOE_MAX_WIDTH;
    c.d_ff = MOE_MAX_WIDTH;
    c.router.n_experts = MOE_MAX_EXPERTS;
    CHECK(moe_layer_create(&a, &c, 1, 7, NULL, &error) == MOE_ERR_OVERFLOW, "tensors beyond size_t");
}

static void expect_refused(const moe_layer_config *config, const char *one, const char *two) {
    moe_layer_config out;
    unsigned char kept[sizeof out];
    moe_error error;
    memset(&out, 77, sizeof out);
    memcpy(kept, &out, sizeof out);
    error.message[0] = '\0';
    CHECK(moe_layer_check(config, &out, &error) == MOE_ERR_CONFIG && same_bits(kept, &out, sizeof out), one);
    if (!CHECK(strstr(error.message, one) != NULL && strstr(error.message, two) != NULL,
               "the message names what clashes"))
        printf("  %s, %s: %s\n", one, two, error.message);
}

static void test_messages(void) {
    static const char *const rows[][3] = {{"expert=swiglu act=gelu", "act", "swiglu"},
                                          {"expert=linear act=tanh", "act", "linear"},
                                          {"d_low=3", "d_low", "swiglu"},
                                          {"expert=mlp d_low=3", "d_low", "mlp"},
                                          {"no_expert_bias=1", "no_expert_bias", "swiglu"},
                                          {"expert=factorised no_expert_bias=1", "no_expert_bias", "factorised"},
                                          {"expert=mlp expert_bias=1", "expert_bias = 1", "mlp"},
                                          {"expert=linear swiglu_alpha=2", "swiglu_alpha = 2", "linear"},
                                          {"expert=mlp swiglu_limit=2", "swiglu_limit", "mlp"},
                                          {"expert=factorised swiglu_offset=-1", "swiglu_offset = -1", "factorised"},
                                          {"expert=factorised expert_bias=1", "expert_bias", "factorised"},
                                          {"swiglu_alpha=-1", "swiglu_alpha = -1", "1e-6 to 1000000"},
                                          {"swiglu_limit=-7", "swiglu_limit = -7", "1e-6 to 1000000"},
                                          {"swiglu_limit=1e7", "swiglu_limit = 1", "1e-6 to 1000000"},
                                          {"swiglu_offset=1e7", "swiglu_offset = 1", "-1000000 to 1000000"},
                                          {"d_shared=3", "d_shared", "n_shared"},
                                          {"shared_act=gelu", "shared_act", "n_shared"},
                                          {"shared_sigmoid=1", "shared_sigmoid", "n_shared"},
                                          {"score=norm", "norm_node", "swiglu"},
                                          {"score=norm norm_node=up expert=linear", "norm_node", "linear"},
                                          {"score=norm norm_node=act expert=linear", "norm_node", "linear"},
                                          {"top_k=5", "top_k", "n_experts"},
                                          {"score=norm expert=mlp", "score = norm", "mlp"},
                                          {"add_input=1 d_out=3", "add_input", "d_out = 3"},
                                          {"n_copy=1 d_out=3", "n_copy", "d_out = 3"},
                                          {"n_constant=1 d_out=3", "n_constant", "d_out = 3"},
                                          {"n_copy=1 d_latent=3", "n_copy", "d_latent = 3"},
                                          {"n_constant=1 d_latent=3", "n_constant", "d_latent = 3"},
                                          {"add_input=1 apply_to=input", "add_input", "apply_to = input"},
                                          {"add_input=1 select=soft", "add_input", "select = soft"},
                                          {"n_shared=4096 d_shared=16777216", "d_shared", "n_shared"}};
    const moe_field *f;
    moe_layer_config c;
    moe_error error;
    size_t i;
    int value;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        c = small_config();
        if (CHECK(moe_fields_apply(moe_layer_fields(), &c, rows[i][0], NULL) == MOE_OK, rows[i][0]))
            expect_refused(&c, rows[i][1], rows[i][2]);
    }
    for (f = moe_layer_fields(); f->name != NULL; f++) {
        CHECK(moe_field_find(moe_layer_fields(), f->name) == f && f->about != NULL, f->name);
        if (f->kind == MOE_FIELD_REAL) continue;
        c = small_config();
        value = f->min < 0 ? (int)f->min - 1 : -3;
        memcpy((char *)&c + f->offset, &value, sizeof value);
        expect_refused(&c, f->name, f->min < 0 ? "= -" : "-3");
        value = (int)f->max + 1;
        memcpy((char *)&c + f->offset, &value, sizeof value);
        expect_refused(&c, f->name, "= ");
    }
    for (f = moe_router_fields(); f->name != NULL; f++)
        CHECK(moe_field_find(moe_layer_fields(), f->name) != NULL, "a layer has its router's fields");
    CHECK(moe_field_set(moe_layer_fields(), &c, "expert", "bogus", &error) == MOE_ERR_CONFIG &&
              strstr(error.message, "bogus") != NULL,
          "unknown value");
    CHECK(moe_layer_check(NULL, NULL, NULL) == MOE_ERR_ARGUMENT, "NULL");
}

/* Whether the system was asked for huge pages at an address; -1: it does not tell. */
static int huge_asked(const void *address) {
    char line[512];
    int here = 0, asked = -1;
    FILE *f = fopen("/proc/self/smaps", "r");
    while (f != NULL && asked < 0 && fgets(line, (int)sizeof line, f) != NULL) {
        char *dash, *end;
        const unsigned long long from = strtoull(line, &dash, 16);
        if (dash > line && *dash == '-')
            here = from <= (uintptr_t)address && (uintptr_t)address < strtoull(dash + 1, &end, 16);
        else if (here && strncmp(line, "VmFlags:", 8) == 0) asked = strstr(line, " hg") != NULL;
    }
    if (f != NULL) fclose(f);
    return asked;
}

/* A large layer of the heap asks for huge pages. */
static void test_huge_pages(void) {
    moe_layer_config c;
    moe_layer layer;
    FILE *system = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
    int asked;
    memset(&c, 0, sizeof c);
    c.router.d_model = 256;
    c.router.n_experts = 16;
    c.d_ff = 512;
    if (!CHECK_STATUS(moe_layer_create(&layer, &c, 0, 1, NULL, NULL), MOE_OK)) return;
    asked = huge_asked((const unsigned char *)layer.memory + (4 << 20));
    CHECKF(system == NULL || asked != 0, "huge pages were not asked for");
    if (system != NULL) fclose(system);
    moe_layer_free(&layer);
}

/* Constants in place of owned tensors. */
static void test_const_tensors(void) {
    moe_layer_config c = rich_config();
    moe_layer layer;
    moe_layer_pass pass;
    bench b;
    moe_real *y;
    moe_tensor t;
    int place, missing = 0;
    size_t i;
    if (!start(&b, &c, 0, 7)) return;
    y = normals(7 * 4, 1.0);
    c.router.untrained = 1;
    CHECK(moe_layer_init(&layer, &c, NULL) == MOE_OK && layer.memory == NULL, "init");
    CHECK(moe_layer_forward(&layer, &b.call, y, b.work, b.work_size, NULL) == MOE_ERR_ARGUMENT, "no tensors yet");
    for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++) layer.tensors[place] = b.layer.tensors[place];
    CHECK(moe_layer_forward(&layer, &b.call, y, b.work, b.work_size, NULL) == MOE_OK &&
              same_bits(y, b.y, 7 * 4 * sizeof *y),
          "the caller's tensors");
    for (i = 0; moe_layer_tensor(&layer, i, &t) == MOE_OK; i++) CHECK(t.gradient == NULL, "no gradients");
    CHECK(i == 13, "tensors by number");
    for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++) {
        const moe_real *kept = layer.tensors[place];
        layer.tensors[place] = kept != NULL ? NULL : b.x;
        missing += moe_layer_forward(&layer, &b.call, y, b.work, b.work_size, NULL) == MOE_ERR_ARGUMENT;
        layer.tensors[place] = kept;
    }
    CHECK(missing == MOE_LAYER_PARAMETER_COUNT, "a missing tensor, or one too many, is refused");
    { /* gradients only where they are wanted */
        size_t bytes = 0;
        void *work;
        moe_real *d_weight = normals(12, 0.0);
        moe_call call = b.call;
        call.training = 1;
        CHECK(moe_layer_work_size(&layer, 7, 1, &bytes) == MOE_OK, "size");
        work = grab(bytes, 1);
        layer.gradients[MOE_ROUTER_WEIGHT] = d_weight;
        CHECK(moe_layer_forward(&layer, &call, y, work, bytes, &pass) == MOE_OK &&
                  moe_layer_backward(&layer, b.dy, NULL, NULL, &pass) == MOE_OK,
              "one gradient");
        CHECK(!all_zero(d_weight, 12), "one gradient");
        free(work);
        free(d_weight);
    }
    moe_layer_free(&layer);
    free(y);
    end(&b);
}

/* ---- backward ---- */

/* It adds, in the same bits each time, and takes what is not wanted as NULL. */
static void test_backward(void) {
    int kind, with_router_x;
    for (kind = 0; kind < MOE_EXPERT_COUNT; kind++)
        for (with_router_x = 0; with_router_x < 2; with_router_x++) {
            moe_layer_config c = small_config();
            moe_real *router_x = normals(9 * 6, 1.0), *d_router_x = normals(9 * 6, 0.0);
            moe_real *dx = normals(9 * 6, 0.0), *first;
            bench b;
            moe_tensor t;
            size_t i, k;
            int good = 1;
            c.expert = kind;
            c.n_shared = 1;
            c.shared_sigmoid = 1;
            c.router.loss_z = (moe_real)0.1;
            if (start(&b, &c, 1, 9)) {
                if (with_router_x) b.call.router_x = router_x;
                run(&b);
                CHECK(moe_layer_backward(&b.layer, b.dy, b.dx, with_router_x ? d_router_x : NULL, &b.pass) == MOE_OK,
                      "backward");
                CHECK(all_zero(d_router_x, 54) == !with_router_x && !all_zero(b.dx, 54), "where the gradients go");
                CHECK(moe_layer_tensor(&b.layer, 1, &t) == MOE_OK, "tensor");
                first = normals(t.count, 0.0);
                memcpy(first, t.gradient, t.count * sizeof *first);
                CHECK(moe_layer_backward(&b.layer, b.dy, NULL, NULL, &b.pass) == MOE_OK, "dx is not wanted");
                for (i = 0; i < t.count; i++)
                    good &=
                        fabs((double)t.gradient[i] - 2.0 * (double)first[i]) <= NEAR * (1.0 + fabs((double)first[i]));
                CHECK(good, "gradients add up");
                for (i = 0; moe_layer_tensor(&b.layer, i, &t) == MOE_OK; i++)
                    for (k = 0; k < t.count; k++) t.gradient[k] = 0;
                CHECK(moe_layer_backward(&b.layer, b.dy, dx, NULL, &b.pass) == MOE_OK &&
                          same_bits(dx, b.dx, 54 * sizeof *dx),
                      "a second time the same");
                CHECK(moe_layer_tensor(&b.layer, 1, &t) == MOE_OK &&
                          same_bits(first, t.gradient, t.count * sizeof *first),
                      "a second time the same");
                CHECK(moe_layer_backward(&b.layer, NULL, dx, NULL, &b.pass) == MOE_ERR_ARGUMENT &&
                          moe_layer_backward(&b.layer, b.dy, dx, NULL, NULL) == MOE_ERR_ARGUMENT &&
                          moe_layer_backward(NULL, b.dy, dx, NULL, &b.pass) == MOE_ERR_ARGUMENT,
                      "NULL");
                b.call.training = 0;
                run(&b);
                CHECK(moe_layer_backward(&b.layer, b.dy, dx, NULL, &b.pass) == MOE_ERR_STATE,
                      "no training, no backward");
                free(first);
            }
            free(router_x);
            free(d_router_x);
            free(dx);
            end(&b);
        }
}

/* Parameters get the same gradients whether or not that of x is wanted. */
static void check_without_dx(int kind, int apply_to) {
    moe_layer_config c = small_config();
    moe_real *kept[MOE_LAYER_PARAMETER_COUNT] = {NULL};
    bench b;
    moe_tensor t;
    size_t i, n = 0;
    int pass;
    c.expert = kind;
    c.router.apply_to = apply_to;
    if (start(&b, &c, 1, 9)) {
        for (pass = 0; pass < 2; pass++) {
            for (i = 0; moe_layer_tensor(&b.layer, i, &t) == MOE_OK; i++)
                memset(t.gradient, 0, t.count * sizeof *t.gradient);
            run(&b);
            CHECK(moe_layer_backward(&b.layer, b.dy, pass == 0 ? b.dx : NULL, NULL, &b.pass) == MOE_OK, "backward");
            for (i = 0; moe_layer_tensor(&b.layer, i, &t) == MOE_OK; i++) {
                if (pass == 0) kept[i] = normals(t.count, 0.0);
                if (pass == 0) memcpy(kept[i], t.gradient, t.count * sizeof *t.gradient);
                else CHECK(same_bits(kept[i], t.gradient, t.count * sizeof *t.gradient), t.name);
                n += pass == 0 && !all_zero(t.gradient, t.count);
            }
        }
        CHECK(n > 1, "gradients of the router and of the experts");
    }
    for (i = 0; i < MOE_LAYER_PARAMETER_COUNT; i++) free(kept[i]);
    end(&b);
}

/* The gradient of a constant expert's W where its softmax saturates: 1 - a, of an a near 1, would
   have few digits. With x = (1, 0), dy = (1, 0) and weight 1: dW_00 = a_0 a_1 (1 - v_0). */
static void test_saturated_constant(void) {
    moe_layer_config c = small_config();
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    const moe_real x[2] = {1, 0}, gate[4] = {-10, 0, 0, 0};
    const moe_real v[2] = {(moe_real)0.5, 0};
    moe_real y[2];
    size_t bytes;
    void *work;
    const double small = 1 / (1 + exp(10.0)), want = small * (1 - small) * 0.5;
    memset(&call, 0, sizeof call);
    c.router.d_model = 2;
    c.router.n_experts = c.router.top_k = 2;
    c.router.n_constant = 1;
    c.router.weight = MOE_WEIGHT_ONE;
    if (!CHECK(moe_layer_create(&layer, &c, 1, 1, NULL, NULL) == MOE_OK)) return;
    layer.tensors[MOE_EXPERTS_CONSTANT_GATE] = gate;
    layer.tensors[MOE_EXPERTS_CONSTANT] = v;
    call.n_tokens = 1;
    call.x = x;
    call.training = 1;
    CHECK(moe_layer_work_size(&layer, 1, 1, &bytes) == MOE_OK);
    work = malloc(bytes);
    CHECK(moe_layer_forward(&layer, &call, y, work, bytes, &pass) == MOE_OK);
    CHECK(moe_layer_backward(&layer, x, NULL, NULL, &pass) == MOE_OK);
    CHECK(fabs((double)layer.gradients[MOE_EXPERTS_CONSTANT_GATE][0] - want) < 1e-5 * want);
    free(work);
    moe_layer_free(&layer);
}

static void test_backward_without_dx(void) {
    int kind;
    for (kind = 0; kind < MOE_EXPERT_COUNT; kind++) {
        check_without_dx(kind, MOE_APPLY_OUTPUT);
        check_without_dx(kind, MOE_APPLY_INPUT);
    }
}

/* ---- the input itself ---- */

/* Two features, two linear experts f_0 = 2 x + (1, 0) and f_1 = (x_2, x_1 - 1), p = z = x: every
   number is exact. */
static void check_added_input(const char *settings, const moe_real *wanted) {
    static const moe_real router[4] = {1, 0, 0, 1}, weight[8] = {2, 0, 0, 2, 0, 1, 1, 0};
    static const moe_real bias[4] = {1, 0, 0, -1};
    static const unsigned char mask[4] = {1, 1, 0, 1};
    moe_real x[8] = {(moe_real)0.5,  (moe_real)0.25, (moe_real)0.75, (moe_real)0.25, 0, 0,
                     (moe_real)0.25, (moe_real)0.5},
             y[8];
    moe_layer_config c;
    moe_layer layer;
    moe_call call;
    moe_error error;
    size_t bytes = 0, i;
    void *work;
    int training;
    memset(&c, 0, sizeof c);
    memset(&call, 0, sizeof call);
    c.router.d_model = 2;
    c.router.n_experts = 2;
    c.router.top_k = 1;
    c.router.gate = MOE_GATE_IDENTITY;
    c.router.weight = MOE_WEIGHT_RAW;
    c.expert = MOE_EXPERT_LINEAR;
    c.add_input = 1;
    error.message[0] = '\0';
    if (!CHECK(moe_fields_apply(moe_layer_fields(), &c, settings, &error) == MOE_OK &&
                   moe_layer_init(&layer, &c, &error) == MOE_OK,
               settings)) {
        printf("  %s\n", error.message);
        return;
    }
    layer.tensors[MOE_ROUTER_WEIGHT] = router;
    layer.tensors[MOE_EXPERTS_WEIGHT] = weight;
    layer.tensors[MOE_EXPERTS_BIAS] = bias;
    x[4] = x[5] = (moe_real)(HUGE_VAL - HUGE_VAL); /* padding may hold anything */
    call.n_tokens = 4;
    call.x = x;
    call.mask = mask;
    for (training = 0; training < 2; training++) {
        call.training = training;
        CHECK(moe_layer_work_size(&layer, 4, training, &bytes) == MOE_OK, settings);
        work = grab(bytes, 1);
        for (i = 0; i < 8; i++) y[i] = 99;
        CHECK(moe_layer_forward(&layer, &call, y, work, bytes, NULL) == MOE_OK, settings);
        for (i = 0; i < 8; i++)
            if (!CHECK(!(y[i] < wanted[i]) && !(y[i] > wanted[i]), settings))
                printf("  y[%d] = %g\n", (int)i, (double)y[i]);
        free(work);
    }
}

static void test_add_input(void) {
    /* x/2 + f_0/2;  x/4 + 3 f_0/4;  padding;  x/2 + f_1/2 */
    static const moe_real one[8] = {(moe_real)1.25,  (moe_real)0.375, (moe_real)2.0625, (moe_real)0.4375, 0, 0,
                                    (moe_real)0.375, (moe_real)-0.125};
    /* expert 0 has room for the first token only: the second keeps all of x */
    static const moe_real dropped[8] = {(moe_real)1.25,  (moe_real)0.375, (moe_real)0.75, (moe_real)0.25, 0, 0,
                                        (moe_real)0.375, (moe_real)-0.125};
    /* both experts: f_0/2 + f_1/4 + x/4;  3 f_0/4 + f_1/4;  padding;  f_0/4 + f_1/2 + x/4 */
    static const moe_real both[8] = {
        (moe_real)1.1875, (moe_real)0.1875, (moe_real)1.9375, (moe_real)0.3125, 0, 0, (moe_real)0.6875, 0};
    /* weights times 2: x * (1 - 1) + f_0;  -x/2 + 3 f_0/2;  padding;  f_1 */
    static const moe_real scaled[8] = {2, (moe_real)0.5, (moe_real)3.375, (moe_real)0.625, 0,
                                       0, (moe_real)0.5, (moe_real)-0.75};
    check_added_input("", one);
    check_added_input("drop_capacity=1", dropped);
    check_added_input("select=dense", both);
    check_added_input("scale=2", scaled);
}

/* ---- experts one by one ---- */

/* Row i of the plan is what its expert makes of its token. */
static void check_expert_outputs(const bench *b) {
    size_t d = (size_t)b->layer.config.router.d_model, o = (size_t)b->layer.config.d_out, e, i, k;
    const moe_dispatch_plan *plan = &b->pass.routing.plan;
    const moe_real *outputs = b->pass.expert_outputs;
    double *x = (double *)grab(d, sizeof *x), size = 1e-3;
    double worst = 0.0;
    if (!CHECK(outputs != NULL, "the experts' outputs")) return;
    for (e = 0; e < plan->n_experts; e++)
        for (i = plan->offsets[e]; i < plan->offsets[e + 1]; i++) {
            double *out;
            for (k = 0; k < d; k++) x[k] = (double)b->x[(size_t)plan->assignments[i].token * d + k];
            out = naive_expert(&b->layer, e, x);
            for (k = 0; k < o; k++) {
                double difference = fabs(out[k] - (double)outputs[i * o + k]);
                if (fabs(out[k]) > size) size = fabs(out[k]);
                if (!(difference <= worst)) worst = difference;
            }
            free(out);
        }
    CHECK(worst <= NEAR * size, "the experts' outputs in the plan's order");
    free(x);
}

/* A loss that reads y through the experts gives the gradients of one that reads y. */
static void check_backward_experts(bench *b) {
    size_t d = (size_t)b->layer.config.router.d_model, o = (size_t)b->layer.config.d_out;
    size_t n = b->call.n_tokens, i, k;
    const moe_dispatch_plan *plan = &b->pass.routing.plan;
    size_t entries = plan->offsets[plan->n_experts];
    moe_real *d_outputs = normals(entries * o, 0.0), *d_weights = normals(entries, 0.0);
    moe_real *dx = normals(n * d, 0.0), *first[MOE_LAYER_PARAMETER_COUNT];
    const moe_real *outputs = b->pass.expert_outputs;
    moe_tensor t;
    double size = 1e-3, worst = 0.0;
    for (i = 0; i < entries; i++)
        for (k = 0; k < o; k++) {
            moe_real dy = b->dy[(size_t)plan->assignments[i].token * o + k];
            d_outputs[i * o + k] = plan->assignments[i].weight_out * dy;
            d_weights[i] += outputs[i * o + k] * dy;
        }
    CHECK(moe_layer_backward(&b->layer, b->dy, b->dx, NULL, &b->pass) == MOE_OK, "backward");
    for (i = 0; moe_layer_tensor(&b->layer, i, &t) == MOE_OK; i++) {
        first[i] = normals(t.count, 0.0);
        memcpy(first[i], t.gradient, t.count * sizeof(moe_real));
        memset(t.gradient, 0, t.count * sizeof(moe_real));
    }
    CHECK(moe_layer_backward_experts(&b->layer, d_outputs, d_weights, dx, NULL, &b->pass) == MOE_OK,
          "backward by experts");
    for (i = 0; moe_layer_tensor(&b->layer, i, &t) == MOE_OK; i++) {
        for (k = 0; k < t.count; k++) {
            double difference = fabs((double)t.gradient[k] - (double)first[i][k]);
            if (fabs((double)first[i][k]) > size) size = fabs((double)first[i][k]);
            if (!(difference <= worst)) worst = difference;
        }
        free(first[i]);
    }
    for (i = 0; i < n * d; i++)
        if (!(fabs((double)dx[i] - (double)b->dx[i]) <= worst)) worst = fabs((double)dx[i] - (double)b->dx[i]);
    CHECK(worst <= NEAR * size, "the same gradients");
    free(d_outputs);
    free(d_weights);
    free(dx);
}

static void test_by_experts(void) {
    int trial;
    for (trial = 0; trial < 60; trial++) {
        moe_layer_config c = small_config();
        bench b;
        c.expert = trial / 12 % MOE_EXPERT_COUNT; /* each with all that follows */
        c.d_out = below(2) * 4;
        c.router.loss_z = (moe_real)0.1;
        if (trial % 3 == 0) c.router.select = MOE_SELECT_DENSE;
        if (trial % 5 == 0) c.router.score = MOE_SCORE_COMPETITION;
        if (trial % 5 == 1) c.router.drop_capacity = 2;
        if (trial % 7 == 0) {
            c.router.gate = MOE_GATE_SIGMOID;
            c.router.weight = MOE_WEIGHT_RAW;
        }
        if (trial % 4 == 2 && trial % 5 != 0 && c.d_out == 0) c.router.n_copy = 1;
        if (start(&b, &c, 1, 5)) {
            if (trial & 1) {
                mask_some(&b);
                run(&b);
            }
            check_expert_outputs(&b);
            if (c.router.select == MOE_SELECT_DENSE && b.mask == NULL && c.router.drop_capacity == 0)
                CHECK(b.pass.routing.plan.offsets[4] == 20 && b.pass.routing.plan.assignments[7].token == 2,
                      "dense is [E,N,o]");
            check_backward_experts(&b);
        }
        end(&b);
    }
}

/* A token that attends not at all to another gives that weight no gradient, not one of 0 / 0; what
   attention has put out for padding is not read, in the backward pass neither. */
static void test_attention_backward(void) {
    enum { N = 5, D = 6, HEADS = 2, PADDING = 2 };
    moe_layer_config c = small_config();
    moe_real d_weights[HEADS * N * N] = {0}, d_outputs[HEADS * N * D] = {0}, *outputs;
    unsigned char mask[N] = {1, 1, 1, 1, 1};
    bench b;
    size_t i;
    c.router.refine = MOE_REFINE_ATTENTION;
    c.router.heads = HEADS;
    c.router.attention_heads = MOE_HEADS_ALL;
    c.router.attention_sigma = 2;
    mask[PADDING] = 0;
    if (start(&b, &c, 1, N)) {
        outputs = b.attention + HEADS * N * N;
        for (i = 0; i < HEADS * N * N; i += 3) b.attention[i] = 0;
        for (i = 0; i < HEADS * N * D; i++)
            if (i / D % N == PADDING) outputs[i] = (moe_real)NAN;
        b.call.mask = mask;
        b.call.d_attention_weights = d_weights;
        b.call.d_attention_outputs = d_outputs;
        run(&b);
        CHECK(b.status == MOE_OK && moe_layer_backward(&b.layer, b.dy, b.dx, NULL, &b.pass) == MOE_OK);
        for (i = 0; i < HEADS * N * N; i++) CHECK(moe_is_finite(d_weights[i]));
        for (i = 0; i < HEADS * N * D; i++) CHECK(moe_is_finite(d_outputs[i]));
        for (i = 0; i < N * D; i++) CHECK(moe_is_finite(b.dx[i]));
    }
    end(&b);
}

/* One kind of refusal; nothing moves. */
static void refuse_by_experts(const char *settings, int training, moe_status wanted) {
    moe_layer_config c = small_config();
    moe_tensor t;
    bench b;
    size_t i;
    if (!CHECK(moe_fields_apply(moe_layer_fields(), &c, settings, NULL) == MOE_OK, settings)) return;
    if (start(&b, &c, 1, 5)) {
        moe_real *d = normals(5 * 4 * 6, 1.0);
        if (!training) {
            b.call.training = 0;
            run(&b);
        }
        CHECK(moe_layer_backward_experts(&b.layer, d, d, b.dx, NULL, &b.pass) == wanted, settings);
        CHECK((b.pass.expert_outputs == NULL) == (wanted == MOE_ERR_STATE || c.d_latent > 0), settings);
        for (i = 0; moe_layer_tensor(&b.layer, i, &t) == MOE_OK; i++) CHECK(all_zero(t.gradient, t.count), settings);
        CHECK(all_zero(b.dx, 5 * 6), settings);
        free(d);
    }
    end(&b);
}

static void test_by_experts_errors(void) {
    moe_layer_config c = small_config();
    bench b;
    refuse_by_experts("", 0, MOE_ERR_STATE);
    refuse_by_experts("select=soft", 1, MOE_ERR_STATE);
    refuse_by_experts("n_shared=1", 1, MOE_ERR_UNSUPPORTED);
    refuse_by_experts("add_input=1", 1, MOE_ERR_UNSUPPORTED);
    refuse_by_experts("apply_to=input", 1, MOE_ERR_UNSUPPORTED);
    refuse_by_experts("d_latent=2", 1, MOE_ERR_UNSUPPORTED);
    if (start(&b, &c, 1, 5)) {
        moe_real *d = normals(5 * 2 * 6, 1.0);
        CHECK(moe_layer_backward_experts(NULL, d, d, b.dx, NULL, &b.pass) == MOE_ERR_ARGUMENT &&
                  moe_layer_backward_experts(&b.layer, d, d, b.dx, NULL, NULL) == MOE_ERR_ARGUMENT &&
                  moe_layer_backward_experts(&b.layer, NULL, d, b.dx, NULL, &b.pass) == MOE_ERR_ARGUMENT &&
                  moe_layer_backward_experts(&b.layer, d, NULL, b.dx, NULL, &b.pass) == MOE_ERR_ARGUMENT,
              "NULL");
        CHECK(all_zero(b.dx, 5 * 6), "a refused call moves nothing");
        CHECK(moe_layer_backward_experts(&b.layer, d, d, NULL, NULL, &b.pass) == MOE_OK, "dx is not wanted");
        free(d);
    }
    end(&b);
    if (start(&b, &c, 1, 0))
        CHECK(moe_layer_backward_experts(&b.layer, NULL, NULL, NULL, NULL, &b.pass) == MOE_OK, "no tokens");
    end(&b);
}

/* ---- state ---- */

static moe_real *tensor_of(const bench *b, const char *name) {
    moe_tensor t;
    return CHECK(moe_layer_find(&b->layer, name, &t) == MOE_OK, name) ? t.data : b->dx;
}

static void count_passes(bench *b) {
    size_t e;
    moe_real *load = tensor_of(b, "router.load");
    moe_real *bias = tensor_of(b, "router.selection_bias");
    moe_real *step = tensor_of(b, "router.step"), was[4];
    memset(load, 0, 5 * sizeof *load);
    step[0] = 0;
    memcpy(was, bias, sizeof was);
    CHECK(moe_layer_observe(&b->layer, &b->pass) == MOE_OK && moe_layer_observe(&b->layer, &b->pass) == MOE_OK,
          "observe");
    for (e = 0; e < 4; e++)
        CHECK(fabs((double)load[e] - 2.0 * (double)b->pass.routing.counts[e]) < 1e-6, "the load of two passes");
    CHECK(fabs((double)load[4] - 18.0) < 1e-6 && same_bits(bias, was, sizeof was) && !(step[0] > 0),
          "observe only counts");
    CHECK(moe_layer_advance(&b->layer) == MOE_OK && all_zero(load, 5) && fabs((double)step[0] - 1.0) < 1e-6,
          "advance counts anew");
    for (e = 0; e < 4; e++) { /* 9 tokens, 4 experts: no load is the mean */
        double move = b->pass.routing.counts[e] > 2 ? -0.125 : 0.125;
        CHECK(fabs((double)bias[e] - (double)was[e] - move) < 1e-6, "the bias moves against the load");
    }
    CHECK(moe_layer_observe(NULL, &b->pass) == MOE_ERR_ARGUMENT &&
              moe_layer_observe(&b->layer, NULL) == MOE_ERR_ARGUMENT && moe_layer_advance(NULL) == MOE_ERR_ARGUMENT,
          "NULL");
    b->call.training = 0;
    run(b);
    CHECK(b->status == MOE_OK && moe_layer_observe(&b->layer, &b->pass) == MOE_ERR_STATE && all_zero(load, 5),
          "not a pass of training");
}

static void test_state(void) {
    moe_layer_config c = small_config();
    moe_buffer before, after;
    bench b;
    c.router.selection_bias = 1;
    c.router.bias_rate = (moe_real)0.125;
    c.router.freeze_at = 3;
    c.router.top_k = 1;
    if (start(&b, &c, 1, 9)) { /* two passes are counted, one step is made */
        count_passes(&b);
    }
    end(&b);
    if (start(&b, &c, 0, 9)) { /* made for inference: nobody may change it */
        b.call.training = 1;
        run(&b);
        write_layer(&b.layer, &before);
        CHECK(b.status == MOE_OK && moe_layer_observe(&b.layer, &b.pass) == MOE_ERR_STATE &&
                  moe_layer_advance(&b.layer) == MOE_ERR_STATE,
              "not made with trainable = 1");
        write_layer(&b.layer, &after);
        CHECK(before.size == after.size && same_bits(before.data, after.data, before.size),
              "a refused call changes nothing");
        moe_buffer_free(&before);
        moe_buffer_free(&after);
    }
    end(&b);
    c = small_config();
    if (start(&b, &c, 1, 9)) {
        write_layer(&b.layer, &before);
        CHECK(moe_layer_observe(&b.layer, &b.pass) == MOE_OK && moe_layer_advance(&b.layer) == MOE_OK, "no state");
        write_layer(&b.layer, &after);
        CHECK(before.size == after.size && same_bits(before.data, after.data, before.size),
              "a layer without state is left as it is");
        moe_buffer_free(&before);
        moe_buffer_free(&after);
    }
    end(&b);
}

/* ---- stages of the caller, replay ---- */

static void expect_call_refused(bench *b, moe_status status, const char *what) {
    moe_layer_pass pass;
    unsigned char kept[sizeof pass];
    memset(&pass, 99, sizeof pass);
    memcpy(kept, &pass, sizeof pass);
    CHECK(moe_layer_forward(&b->layer, &b->call, b->y, b->work, b->work_size, &pass) == status, what);
    CHECK(same_bits(kept, &pass, sizeof pass), "a failed call leaves the pass as it was");
}

static void test_custom(void) {
    moe_layer_config c = small_config();
    moe_status stop = MOE_ERR_STOPPED;
    bench b;
    int which;
    for (which = 0; which < 2; which++) {
        c = small_config();
        if (which) c.router.select = MOE_SELECT_CUSTOM;
        else c.router.score = MOE_SCORE_CUSTOM;
        if (start(&b, &c, 1, 6)) {
            check_naive(&b);
            CHECK(moe_layer_backward(&b.layer, b.dy, b.dx, NULL, &b.pass) == MOE_OK && !all_zero(b.dx, 36), "backward");
            b.layer.router.custom.ctx = &stop;
            expect_call_refused(&b, MOE_ERR_STOPPED, "the status of a custom stage");
            memset(&b.layer.router.custom, 0, sizeof b.layer.router.custom);
            expect_call_refused(&b, MOE_ERR_ARGUMENT, "a custom stage that is not there");
        }
        end(&b);
    }
}

static int takes_any(int select) {
    return select == MOE_SELECT_DENSE || select == MOE_SELECT_TOP_P || select == MOE_SELECT_THRESHOLD ||
           select == MOE_SELECT_POSITIVE || select == MOE_SELECT_EXPERT_CHOICE || select == MOE_SELECT_AFFINITY ||
           select == MOE_SELECT_CUSTOM || select == MOE_SELECT_EXPERT_THRESHOLD;
}

/* The recorded choices of a call, replayed, give its bits, whatever selected them; x may change. */
static void test_replay(void) {
    int select, after;
    for (select = 0; select < MOE_SELECT_COUNT; select++)
        for (after = 0; after < 2; after++) {
            moe_layer_config c = small_config();
            bench b;
            size_t stride, i;
            int32_t *given;
            moe_real *y;
            c.router.select = select;
            c.router.table_size = select == MOE_SELECT_HASH ? 7 : 0;
            if (select == MOE_SELECT_BALANCED) c.router.top_k = 1;
            if (select == MOE_SELECT_THRESHOLD) c.router.threshold = (moe_real)0.3;
            c.expert = select % MOE_EXPERT_COUNT;
            c.router.weight = select == MOE_SELECT_SOFT ? 0 : (int)MOE_WEIGHT_RAW;
            c.add_input = select != MOE_SELECT_SOFT && after;
            if (!start(&b, &c, 1, 8)) continue;
            stride = b.pass.routing.max_choices;
            given = (int32_t *)grab(8 * stride, sizeof *given);
            y = normals(48, 0.0);
            memcpy(y, b.y, 48 * sizeof *y);
            if (select == MOE_SELECT_SOFT) {
                CHECK(moe_routing_choices(&b.pass.routing, 1, 1, given) == MOE_OK && given[0] == -1,
                      "soft has no choices");
                b.call.given = given;
                expect_call_refused(&b, MOE_ERR_ARGUMENT, "soft replays nothing");
            } else {
                unsigned char *selected = (unsigned char *)grab(32, 1);
                memcpy(selected, b.pass.routing.selected, 32);
                CHECK(moe_routing_choices(&b.pass.routing, b.pass.routing.max_choices, 1, given) == MOE_OK, "record");
                CHECK(stride == (c.router.select == MOE_SELECT_BALANCED ? 1u
                                 : takes_any(select)                    ? 4u
                                                                        : 2u),
                      "the stride of given");
                b.call.given = given;
                run(&b);
                CHECK(b.status == MOE_OK && same_bits(y, b.y, 48 * sizeof *y), "replay gives the same bits");
                for (i = 0; i < 48; i++) b.x[i] = moe_rng_normal(&rng);
                run(&b);
                CHECK(b.status == MOE_OK && same_bits(selected, b.pass.routing.selected, 32),
                      "replay of other tokens takes the same experts");
                check_naive(&b);
                given[0] = 4;
                expect_call_refused(&b, MOE_ERR_ARGUMENT, "no such expert");
                given[0] = -2;
                expect_call_refused(&b, MOE_ERR_ARGUMENT, "no such expert");
                if (stride > 1) {
                    given[0] = given[1] = 3;
                    expect_call_refused(&b, MOE_ERR_ARGUMENT, "an expert twice");
                }
                free(selected);
            }
            free(given);
            free(y);
            end(&b);
        }
}

static void test_bad_calls(void) {
    moe_layer_config c = small_config();
    size_t bytes = 4321;
    int32_t sequences[] = {0, 4, 3, 7};
    bench b;
    int kind;
    if (!start(&b, &c, 1, 7)) return;
    CHECK(moe_layer_work_size(NULL, 7, 1, &bytes) == MOE_ERR_ARGUMENT &&
              moe_layer_work_size(&b.layer, 7, 1, NULL) == MOE_ERR_ARGUMENT,
          "NULL");
    CHECK(moe_layer_forward(NULL, &b.call, b.y, b.work, b.work_size, NULL) == MOE_ERR_ARGUMENT &&
              moe_layer_forward(&b.layer, NULL, b.y, b.work, b.work_size, NULL) == MOE_ERR_ARGUMENT &&
              moe_layer_forward(&b.layer, &b.call, NULL, b.work, b.work_size, NULL) == MOE_ERR_ARGUMENT,
          "NULL");
#if SIZE_MAX > 0xFFFFFFFF
    CHECK(moe_layer_work_size(&b.layer, (size_t)INT32_MAX + 1, 0, &bytes) == MOE_ERR_OVERFLOW &&
              moe_layer_work_size(&b.layer, SIZE_MAX, 1, &bytes) == MOE_ERR_OVERFLOW && bytes == 4321,
          "too many tokens");
    b.call.n_tokens = SIZE_MAX / 2;
    expect_call_refused(&b, MOE_ERR_OVERFLOW, "too many tokens");
    b.call.n_tokens = 7;
#endif
    b.call.x = NULL;
    expect_call_refused(&b, MOE_ERR_ARGUMENT, "no x");
    b.call.x = b.x;
    b.call.sequences = sequences;
    b.call.n_sequences = 3;
    expect_call_refused(&b, MOE_ERR_ARGUMENT, "bad offsets");
    b.call.sequences = NULL;
    b.x[20] = (moe_real)(HUGE_VAL - HUGE_VAL);
    expect_call_refused(&b, MOE_ERR_NONFINITE, "NaN in a token");
    end(&b);
    c.router.student = 1;
    c.router.loss_distill = (moe_real)0.5;
    c.router.freeze_at = 1;
    if (start(&b, &c, 1, 7)) {
        moe_tensor t;
        CHECK(moe_layer_find(&b.layer, "router.student", &t) == MOE_OK && moe_layer_advance(&b.layer) == MOE_OK,
              "the student chooses");
        t.data[2] = (moe_real)(HUGE_VAL - HUGE_VAL);
        expect_call_refused(&b, MOE_ERR_NONFINITE, "NaN in a student");
    }
    end(&b);
    for (kind = 0; kind < MOE_EXPERT_COUNT; kind++) { /* no tokens at all */
        c = small_config();
        c.expert = kind;
        c.n_shared = 1;
        c.d_latent = kind;
        if (kind == MOE_EXPERT_FACTORISED) c.router.score = MOE_SCORE_NORM;
        if (start(&b, &c, 1, 0)) {
            b.call.x = NULL;
            CHECK(moe_layer_forward(&b.layer, &b.call, NULL, b.work, b.work_size, &b.pass) == MOE_OK, "no tokens");
            CHECK(moe_layer_backward(&b.layer, NULL, NULL, NULL, &b.pass) == MOE_OK, "no tokens back");
        }
        end(&b);
    }
}

/* ---- files ---- */

static void draw_layer_config(moe_layer_config *c) {
    for (;;) {
        memset(c, 0, sizeof *c);
        c->router.d_model = 1 + below(12);
        c->router.n_experts = 1 + below(5);
        c->router.top_k = 1;
        c->router.score = below(MOE_SCORE_COUNT);
        c->router.gate = below(MOE_GATE_COUNT);
        c->router.weight = below(MOE_WEIGHT_COUNT);
        c->router.select = below(MOE_SELECT_COUNT);
        c->router.slots = below(3);
        c->router.table_size = below(2) * 7;
        c->router.groups = below(3);
        c->router.input = below(MOE_INPUT_COUNT);
        c->router.noise = below(MOE_NOISE_COUNT);
        c->router.refine = below(MOE_REFINE_COUNT);
        c->router.threshold_learned = below(2);
        c->router.drop_capacity = below(3);
        c->router.selection_bias = below(2);
        c->router.expert_scale = below(2);
        c->router.cosine_learn_tau = below(2);
        c->router.router_bias = below(2);
        c->router.apply_to = below(2);
        c->router.scale = moe_rng_normal(&rng);
        c->router.gate_temperature = (moe_real)0.001 + moe_rng_uniform(&rng);
        c->router.loss_z = moe_rng_uniform(&rng) / 100;
        c->expert = below(MOE_EXPERT_COUNT);
        c->d_ff = 1 + below(9);
        c->d_low = below(3);
        c->act = below(MOE_ACT_COUNT);
        c->no_expert_bias = below(2);
        if (below(2)) {
            shape(c);
            c->act = c->d_low = c->no_expert_bias = 0;
        }
        c->n_shared = below(3);
        c->d_shared = below(4);
        c->shared_sigmoid = below(2);
        c->d_out = below(7);
        c->add_input = below(4) == 0;
        c->d_latent = below(4) == 0 ? below(9) - 4 : 0;
        c->router.capacity_bound = below(6) == 0 ? 1 + below(2) : 0;
        if (below(3) == 0) {
            c->router.loss_distill = moe_rng_uniform(&rng);
            c->router.distill = below(MOE_DISTILL_COUNT);
            c->router.student = below(2);
            c->router.freeze_at = below(5);
        }
        if (below(6) == 0) {
            c->router.schedule_steps = 1 + below(9);
            c->router.k_end = 1;
            c->router.l1_controller = below(2);
        }
        if (c->router.selection_bias) c->router.bias_rate = moe_rng_uniform(&rng) / 10;
        if (moe_layer_check(c, NULL, NULL) == MOE_OK && moe_router_check_training(&c->router, NULL) == MOE_OK) return;
    }
}

static void test_round_trip(void) {
    int trial;
    for (trial = 0; trial < 200; trial++) {
        moe_layer_config c;
        moe_layer back;
        moe_buffer one, two;
        moe_error error;
        moe_tensor t, u;
        size_t i;
        bench b;
        draw_layer_config(&c);
        c.kernels = below(2);
        memset(&b, 0, sizeof b);
        if (!CHECK(moe_layer_create(&b.layer, &c, 1, moe_rng_next(&rng), NULL, NULL) == MOE_OK, "create")) continue;
        shake(&b.layer);
        write_layer(&b.layer, &one);
        error.message[0] = '\0';
        if (CHECK(moe_layer_read(&back, one.data, one.size, trial % 2, MOE_KERNELS_AUTO, NULL, &error) == MOE_OK,
                  "read")) {
            moe_layer_config kept = b.layer.config;
            kept.kernels = back.config.kernels; /* not saved */
            if (!CHECK(same_bits(&kept, &back.config, sizeof kept), "the configuration comes back")) {
                const moe_field *f;
                char was[64], is[64];
                for (f = moe_layer_fields(); f->name != NULL; f++) {
                    moe_field_text(f, &kept, was, sizeof was);
                    moe_field_text(f, &back.config, is, sizeof is);
                    if (strcmp(was, is) != 0) printf("  %s: %s, %s\n", f->name, was, is);
                }
            }
            for (i = 0; moe_layer_tensor(&b.layer, i, &t) == MOE_OK; i++)
                CHECK(moe_layer_tensor(&back, i, &u) == MOE_OK && strcmp(t.name, u.name) == 0 &&
                          same_bits(t.data, u.data, t.count * sizeof(moe_real)) && (u.gradient != NULL) == (trial % 2),
                      t.name);
            write_layer(&back, &two);
            CHECK(one.size == two.size && same_bits(one.data, two.data, one.size),
                  "save, load, save gives the same bytes");
            moe_buffer_free(&two);
            moe_layer_free(&back);
        } else printf("  %s\n", error.message);
        moe_buffer_free(&one);
        end(&b);
    }
}

/* A file that must be refused, with nothing changed and nothing lost. */
static moe_status refused(const void *bytes, size_t size) {
    moe_layer layer, kept;
    test_heap heap;
    moe_allocator a = test_allocator(&heap, 0);
    moe_error error;
    moe_status status;
    memset(&layer, 0x3C, sizeof layer);
    memcpy(&kept, &layer, sizeof layer);
    error.message[0] = '\0';
    status = moe_layer_read(&layer, bytes, size, 1, MOE_KERNELS_AUTO, &a, &error);
    if (status == MOE_OK) {
        moe_layer_free(&layer);
        CHECK(heap.bytes == 0 && heap.blocks == 0, "a layer that was read is freed");
        return status;
    }
    CHECK(same_bits(&layer, &kept, sizeof layer) && heap.bytes == 0 && heap.blocks == 0,
          "a failed read changes and keeps nothing");
    CHECK(error.message[0] != '\0' && error.code == status, "a failed read says why");
    return status;
}

/* The same file with one text replaced by another of the same length. */
static moe_status refused_with(const moe_buffer *file, const char *from, const char *to) {
    unsigned char *copy = (unsigned char *)grab(file->size, 1);
    size_t n = strlen(from), i, found = 0;
    moe_status status;
    memcpy(copy, file->data, file->size);
    for (i = 0; i + n <= file->size; i++)
        if (memcmp(copy + i, from, n) == 0) {
            memcpy(copy + i, to, n);
            found++;
        }
    CHECK(found > 0 && strlen(to) == n, from);
    status = refused(copy, file->size);
    free(copy);
    return status;
}

static void test_bad_files(void) {
    moe_layer_config c = rich_config();
    moe_buffer file;
    unsigned char *copy;
    size_t i;
    int trial;
    bench b;
    if (!start(&b, &c, 1, 1)) return;
    write_layer(&b.layer, &file);
    CHECK(refused(file.data, file.size) == MOE_OK, "the file is good");
    for (i = 0; i < file.size; i++) CHECK(refused(file.data, i) != MOE_OK, "a truncated file");
    CHECK(refused_with(&file, "router.weight", "router.weighs") != MOE_OK, "a tensor of another name");
    CHECK(refused_with(&file, "shared.sigmoid", "__shared.sigmo") != MOE_OK, "a tensor is missing");
    CHECK(refused_with(&file, "expert_scale", "expert_scalf") != MOE_OK, "an unknown field");
    CHECK(refused_with(&file, "gelu", "gelv") != MOE_OK, "an unknown activation");
    CHECK(refused_with(&file, "cosine\\\"", "cosinf\\\"") != MOE_OK, "an unknown score");
    copy = (unsigned char *)grab(file.size, 1);
    for (trial = 0; trial < 3000; trial++) { /* any answer, but no crash and no leak */
        size_t flips = 1 + (size_t)below(3), header = file.size < 2500 ? file.size : 2500;
        memcpy(copy, file.data, file.size);
        while (flips-- > 0) copy[moe_rng_below(&rng, header)] = (unsigned char)below(256);
        (void)refused(copy, file.size);
    }
    free(copy);
    moe_buffer_free(&file);
    end(&b);
}

static long file_size(const char *path) {
    FILE *f = fopen(path, "rb");
    long n;
    if (f == NULL) return -1;
    n = fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    fclose(f);
    return n;
}

static void test_disk(const char *folder) {
    moe_layer_config c = rich_config();
    moe_layer back;
    moe_error error;
    bench b;
    char path[512], absent[512];
    moe_buffer one, two;
    if (strlen(folder) > 400 || !start(&b, &c, 1, 5)) return;
    sprintf(path, "%s/layer_test.safetensors", folder);
    sprintf(absent, "%s/no_such_folder/layer_test.safetensors", folder);
    remove(path);
    error.message[0] = '\0';
    if (!CHECK(moe_layer_save(&b.layer, path, &error) == MOE_OK, "save")) printf("  %s\n", error.message);
    write_layer(&b.layer, &one);
    CHECK(file_size(path) == (long)one.size, "the file has the bytes of the stream");
    if (CHECK(moe_layer_load(&back, path, 1, MOE_KERNELS_AUTO, NULL, &error) == MOE_OK, "load")) {
        moe_real *y = normals(5 * 4, 1.0);
        CHECK(moe_layer_forward(&back, &b.call, y, b.work, b.work_size, NULL) == MOE_OK &&
                  same_bits(y, b.y, 20 * sizeof *y),
              "the same answers bit for bit");
        write_layer(&back, &two);
        CHECK(one.size == two.size && same_bits(one.data, two.data, one.size), "the same bytes");
        CHECK(moe_layer_save(&back, path, NULL) == MOE_OK && file_size(path) == (long)one.size, "a file is replaced");
        moe_buffer_free(&two);
        moe_layer_free(&back);
        free(y);
    }
    CHECK(moe_layer_save(&b.layer, absent, &error) == MOE_ERR_IO && error.message[0] != '\0',
          "save where there is no folder");
    CHECK(moe_layer_load(&back, absent, 1, MOE_KERNELS_AUTO, NULL, &error) == MOE_ERR_IO && error.message[0] != '\0',
          "load what is not there");
    remove(path);
    moe_buffer_free(&one);
    end(&b);
}

/* ---- presets ---- */

static void test_presets(void) {
    const moe_preset *preset;
    moe_layer_config c, kept;
    moe_error error;
    for (preset = moe_presets(); preset->name != NULL; preset++) {
        bench b;
        error.message[0] = '\0';
        if (!CHECK(moe_layer_preset(preset->name, &c, &error) == MOE_OK, preset->name)) continue;
        c.router.d_model = 48;
        c.d_ff = 7;
        if ((c.router.select == MOE_SELECT_HASH || c.router.student_dim > 0) && c.router.table_size == 0)
            c.router.table_size = 300;
        if (c.router.score == MOE_SCORE_ATTENTIVE && c.router.router_hidden > 0) c.d_ff = c.router.router_hidden;
        if (!CHECK(moe_layer_check(&c, NULL, &error) == MOE_OK &&
                       moe_router_check_training(&c.router, &error) == MOE_OK,
                   preset->name))
            printf("  %s\n", error.message);
        if (c.router.n_experts > 12) c.router.n_experts = 12;
        if (c.router.top_k > 12) c.router.top_k = 12;
        TEST_FEWER_EXPERTS(c.router);
        if (c.router.select == MOE_SELECT_GROUPED_TOP_K) {
            c.router.groups = 4;
            c.router.groups_kept = 3;
        }
        if (start(&b, &c, 1, 6)) {
            if (c.router.select != MOE_SELECT_SOFT) check_naive(&b);
            if (!(moe_router_traits(&c.router) & MOE_TRAIT_NEEDS_PREVIOUS_LAYER) && !balances_in_training(&c.router) &&
                !(c.router.capacity_factor > 0))
                check_bits(&b);
            CHECK(moe_layer_backward(&b.layer, b.dy, b.dx, NULL, &b.pass) == MOE_OK && !all_zero(b.dx, 6 * 48),
                  preset->name);
        }
        end(&b);
    }
    memset(&c, 3, sizeof c);
    kept = c;
    CHECK(moe_layer_preset("bogus", &c, &error) == MOE_ERR_NOT_FOUND && strstr(error.message, "bogus") != NULL &&
              same_bits(&c, &kept, sizeof c),
          "an unknown preset");
    CHECK(moe_layer_preset("sparse_moe", &c, NULL) == MOE_OK && c.router.weight == MOE_WEIGHT_SOFTMAX, "an alias");
    CHECK(moe_layer_preset("smoe", NULL, NULL) == MOE_ERR_ARGUMENT, "NULL");
    CHECK(moe_layer_preset("llama4", &c, NULL) == MOE_OK && c.n_shared == 1 && c.router.apply_to == MOE_APPLY_INPUT,
          "a preset sets experts too");
    CHECK(moe_layer_preset("aoe", &c, NULL) == MOE_OK && c.expert == MOE_EXPERT_FACTORISED &&
              c.router.score == MOE_SCORE_NORM,
          "a preset sets experts too");
}

/* ---- upcycling ---- */

enum { DENSE_WIDTH = 40, UPCYCLED = 3 };

/* A network of one feed_forward, and a layer of experts of its kind. */
static int begin_upcycling(const char *settings, moe_net *net, moe_layer *layer) {
    moe_layer_config c, dense;
    moe_error error;
    memset(&dense, 0, sizeof dense);
    CHECK(moe_fields_apply(moe_layer_fields(), &dense, settings, NULL) == MOE_OK, settings);
    c = dense;
    c.router.d_model = 6;
    c.router.n_experts = UPCYCLED;
    c.router.top_k = 2;
    moe_net_init(net, 6, MOE_KERNELS_AUTO, NULL);
    moe_net_feed_forward(net, &dense);
    return CHECK(moe_net_build(net, 1, 5, &error) == MOE_OK, settings) &&
           CHECK(moe_layer_create(layer, &c, 1, 6, NULL, &error) == MOE_OK, settings);
}

/* Copies compute what the feed_forward computes: their weights sum to 1. */
static void check_copies(const moe_net *net, const moe_layer *layer) {
    enum { N = 9 };
    size_t bytes = 0, net_bytes = 0, i;
    moe_real *x = normals(N * 6, 1.0), *y = normals(N * 6, 1.0);
    moe_net_pass pass;
    moe_call call;
    void *work, *net_work;
    memset(&call, 0, sizeof call);
    call.n_tokens = N;
    call.x = x;
    moe_layer_work_size(layer, N, 0, &bytes);
    moe_net_work_size(net, N, 0, &net_bytes);
    work = grab(bytes, 1);
    net_work = grab(net_bytes, 1);
    CHECK(moe_layer_forward(layer, &call, y, work, bytes, NULL) == MOE_OK &&
              moe_net_forward(net, &call, net_work, net_bytes, &pass) == MOE_OK,
          "forward");
    for (i = 0; i < N * 6; i++)
        CHECK(fabs((double)y[i] - (double)pass.y[i]) < NEAR * 10.0, "copies compute what the dense layer does");
    free(work);
    free(net_work);
    free(x);
    free(y);
}

/* The numbers of a matrix of expert e that differ from the dense layer's, by hidden unit; a unit
   differs as a whole or not at all. */
static size_t units_of(const moe_layer *layer, const moe_layer *dense, int index, size_t e, int columns, int *changed) {
    const moe_real *w = layer->tensors[index] + e * DENSE_WIDTH * 6, *from = dense->tensors[index];
    size_t u, i, n = 0;
    for (u = 0; u < DENSE_WIDTH; u++) {
        size_t differ = 0;
        for (i = 0; i < 6; i++) {
            size_t at = columns ? i * DENSE_WIDTH + u : u * 6 + i;
            differ += !same_bits(&w[at], &from[at], sizeof w[at]);
        }
        CHECK(differ == 0 || differ == 6, "a unit is drawn as a whole");
        changed[u] = differ > 0;
        n += differ > 0;
    }
    return n;
}

static void check_shares(const moe_layer *layer, const moe_layer *dense, size_t wanted, int up) {
    int gate[DENSE_WIDTH], other[DENSE_WIDTH], before[DENSE_WIDTH];
    int first = up ? MOE_EXPERTS_GATE : MOE_EXPERTS_FC1_WEIGHT, last = up ? MOE_EXPERTS_DOWN : MOE_EXPERTS_FC2_WEIGHT;
    size_t e;
    for (e = 0; e < UPCYCLED; e++) {
        CHECK(units_of(layer, dense, first, e, 0, gate) == wanted, "so many units are drawn");
        (void)units_of(layer, dense, last, e, 1, other);
        CHECK(same_bits(gate, other, sizeof gate), "the same units of all matrices");
        if (up) (void)units_of(layer, dense, MOE_EXPERTS_UP, e, 0, other);
        CHECK(same_bits(gate, other, sizeof gate), "the same units of all matrices");
        CHECK(e == 0 || wanted == 0 || wanted == DENSE_WIDTH || !same_bits(gate, before, sizeof gate),
              "every expert has its own units");
        memcpy(before, gate, sizeof gate);
    }
}

/* Mean and standard deviation of the numbers in which two layers differ. */
static void moments_of(const moe_real *w, const moe_real *minus, size_t n, double *mean, double *deviation) {
    double sum = 0.0, squares = 0.0;
    size_t i;
    for (i = 0; i < n; i++) {
        double v = (double)w[i] - (minus != NULL ? (double)minus[i] : 0.0);
        sum += v;
        squares += v * v;
    }
    *mean = sum / (double)n;
    *deviation = sqrt(squares / (double)n - *mean * *mean);
}

static void test_upcycle(void) {
    static const char *const rows[] = {"d_ff=40", "d_ff=40 expert=mlp act=gelu", "d_ff=40 expert=factorised d_low=3",
                                       "expert=linear", "d_ff=40 expert_bias=1 swiglu_limit=2"};
    static const double shares[] = {0, 0.01, 0.3, 0.7, 1};
    size_t row, i, j;
    moe_error error;
    for (row = 0; row < sizeof rows / sizeof rows[0]; row++) {
        moe_net net;
        moe_layer layer;
        const moe_layer *dense;
        int up = row != 1;
        if (!begin_upcycling(rows[row], &net, &layer)) continue;
        dense = &net.modules[0].layer;
        for (i = 0; i < net.n_tensors; i++) /* biases too */
            for (j = 0; j < net.tensors[i].count; j++) net.tensors[i].data[j] += (moe_real)0.25;
        CHECK(moe_layer_upcycle(&layer, dense, 0, 0, 3, &error) == MOE_OK, rows[row]);
        check_copies(&net, &layer);
        for (i = 0; i < 5 && row != 2 && row != 3; i++) {
            CHECK(moe_layer_upcycle(&layer, dense, (moe_real)shares[i], 0, 3, &error) == MOE_OK, rows[row]);
            check_shares(&layer, dense, (size_t)(shares[i] * DENSE_WIDTH + 1e-6), up);
        }
        if (row == 1 || row == 4) {
            int bias = row == 1 ? MOE_EXPERTS_FC1_BIAS : MOE_EXPERTS_UP_BIAS;
            CHECK(same_bits(layer.tensors[bias] + DENSE_WIDTH, dense->tensors[bias], DENSE_WIDTH * sizeof(moe_real)),
                  "hidden biases stay");
        }
        if (row == 0) {
            double mean, deviation, was, wide;
            enum { all = DENSE_WIDTH * 6 };
            moe_real first[UPCYCLED * all];
            moments_of(dense->tensors[MOE_EXPERTS_UP], NULL, all, &was, &wide);
            for (i = 0; i < UPCYCLED; i++) { /* every number is drawn again: 240 of them */
                moments_of(layer.tensors[MOE_EXPERTS_UP] + i * all, NULL, all, &mean, &deviation);
                CHECK(fabs(mean - was) < 0.3 * wide && fabs(deviation / wide - 1.0) < 0.2, "as the replaced ones");
            }
            layer.is_packed = 1; /* nothing reads where, because it must not be any more */
            CHECK(moe_layer_upcycle(&layer, dense, 0, (moe_real)0.5, 3, &error) == MOE_OK, "noise");
            CHECK(!layer.is_packed, "packed weights are those of before");
            moments_of(layer.tensors[MOE_EXPERTS_DOWN], dense->tensors[MOE_EXPERTS_DOWN], all, &mean, &deviation);
            CHECK(fabs(mean) < 0.15 && fabs(deviation - 0.5) < 0.1, "noise of this deviation");
            memcpy(first, layer.tensors[MOE_EXPERTS_DOWN], sizeof first);
            CHECK(memcmp(first, first + all, all * sizeof *first) != 0, "each expert has noise of its own");
            CHECK(moe_layer_upcycle(&layer, dense, 0, (moe_real)0.5, 4, &error) == MOE_OK, "another seed");
            CHECK(memcmp(first, layer.tensors[MOE_EXPERTS_DOWN], sizeof first) != 0, "gives other noise");
            CHECK(moe_layer_upcycle(&layer, dense, 0, (moe_real)0.5, 3, &error) == MOE_OK, "the same seed");
            CHECK(same_bits(first, layer.tensors[MOE_EXPERTS_DOWN], sizeof first), "gives the same noise");
        }
        moe_layer_free(&layer);
        moe_net_free(&net);
    }
}

/* floor(r d_ff) is that of r as it is written, whatever the nearest number is: below 53 in float,
   below 57 in double. */
static void test_upcycle_decimals(void) {
    static const int hundredths[] = {29, 53, 57, 58, 59, 100, 1, 0};
    size_t row, u;
    for (row = 0; row < sizeof hundredths / sizeof hundredths[0]; row++) {
        size_t drawn = 0;
        moe_net net;
        moe_layer layer;
        moe_error error;
        if (!begin_upcycling("d_ff=100", &net, &layer)) return;
        CHECK(moe_layer_upcycle(&layer, &net.modules[0].layer, (moe_real)hundredths[row] / 100, 0, 3, &error) == MOE_OK,
              error.message);
        for (u = 0; u < 100; u++)
            drawn += !same_bits(layer.tensors[MOE_EXPERTS_UP] + 6 * u,
                                net.modules[0].layer.tensors[MOE_EXPERTS_UP] + 6 * u, 6 * sizeof(moe_real));
        CHECKF(drawn == (size_t)hundredths[row], "%d of 100 units, not %d", (int)drawn, hundredths[row]);
        moe_layer_free(&layer);
        moe_net_free(&net);
    }
}

static void refuse_upcycling(const char *settings, const char *other, double share, double noise, moe_status wanted,
                             const char *words) {
    moe_net net, wrong;
    moe_layer layer, more;
    moe_error error;
    moe_real *kept;
    size_t bytes;
    if (!begin_upcycling(settings, &net, &layer) || !begin_upcycling(other, &wrong, &more)) return;
    bytes = layer.memory_size / 2;
    kept = (moe_real *)grab(bytes, 1);
    memcpy(kept, layer.memory, bytes);
    CHECK(moe_layer_upcycle(&layer, &wrong.modules[0].layer, (moe_real)share, (moe_real)noise, 1, &error) == wanted,
          words);
    if (!CHECK(strstr(error.message, words) != NULL, words)) printf("        %s\n", error.message);
    CHECK(same_bits(kept, layer.memory, bytes), "nothing has changed");
    free(kept);
    moe_layer_free(&layer);
    moe_layer_free(&more);
    moe_net_free(&net);
    moe_net_free(&wrong);
}

static void test_refused_upcycling(void) {
    const char *plain = "d_ff=40";
    moe_layer_config c = small_config();
    moe_net net;
    moe_layer layer, latent, dense;
    moe_error error;
    refuse_upcycling(plain, "d_ff=41", 0, 0, MOE_ERR_CONFIG, "d_ff = 40: the dense layer has 41");
    refuse_upcycling(plain, "d_ff=40 expert=mlp", 0, 0, MOE_ERR_CONFIG, "expert = swiglu: the dense layer has mlp");
    refuse_upcycling("d_ff=40 expert_bias=1", plain, 0, 0, MOE_ERR_CONFIG, "expert_bias = 1: the dense layer has 0");
    refuse_upcycling(plain, plain, 1.5, 0, MOE_ERR_ARGUMENT, "upcycle_share = 1.5");
    refuse_upcycling(plain, plain, -0.5, 0, MOE_ERR_ARGUMENT, "upcycle_share = -0.5");
    refuse_upcycling(plain, plain, 0, -1, MOE_ERR_ARGUMENT, "upcycle_noise = -1");
    refuse_upcycling(plain, plain, 0, HUGE_VAL - HUGE_VAL, MOE_ERR_ARGUMENT, "upcycle_noise");
    refuse_upcycling("expert=linear", "expert=linear", 0.5, 0, MOE_ERR_CONFIG, "expert = linear has no hidden units");
    if (!begin_upcycling(plain, &net, &layer)) return;
    CHECK(moe_layer_upcycle(NULL, &layer, 0, 0, 1, NULL) == MOE_ERR_ARGUMENT, "no layer");
    CHECK(moe_layer_upcycle(&layer, NULL, 0, 0, 1, NULL) == MOE_ERR_ARGUMENT, "no dense layer");
    CHECK(moe_layer_upcycle(&layer, &layer, 0, 0, 1, &error) == MOE_ERR_CONFIG &&
              strstr(error.message, "n_experts = 3") != NULL,
          "several experts");
    c.d_ff = 40;
    c.d_latent = 6;
    CHECK(moe_layer_create(&latent, &c, 1, 6, NULL, &error) == MOE_OK &&
              moe_layer_upcycle(&latent, &net.modules[0].layer, 0, 0, 1, &error) == MOE_ERR_CONFIG &&
              strstr(error.message, "d_latent = 6") != NULL,
          "d_latent");
    net.modules[0].layer.config.d_latent = 5;
    CHECK(moe_layer_upcycle(&layer, &net.modules[0].layer, 0, 0, 1, &error) == MOE_ERR_CONFIG &&
              strstr(error.message, "d_latent = 5") != NULL,
          "d_latent of the dense layer");
    net.modules[0].layer.config.d_latent = 0;
    dense = net.modules[0].layer;
    dense.tensors[MOE_EXPERTS_DOWN] = NULL;
    CHECK(moe_layer_upcycle(&layer, &dense, 0, 0, 1, &error) == MOE_ERR_ARGUMENT &&
              strstr(error.message, "experts.down") != NULL,
          "a tensor of the dense layer that is not set");
    moe_layer_free(&latent);
    c.d_latent = 0;
    c.d_out = 3;
    CHECK(moe_layer_create(&latent, &c, 1, 6, NULL, &error) == MOE_OK &&
              moe_layer_upcycle(&latent, &net.modules[0].layer, 0, 0, 1, &error) == MOE_ERR_SHAPE &&
              strstr(error.message, "experts.down") != NULL,
          "another width");
    latent.tensors[MOE_EXPERTS_UP] = NULL;
    CHECK(moe_layer_upcycle(&latent, &net.modules[0].layer, 0, 0, 1, &error) == MOE_ERR_ARGUMENT &&
              strstr(error.message, "experts.up") != NULL,
          "a tensor that is not set");
    moe_layer_free(&latent);
    c.router.d_model = 4; /* the outputs are as wide as those of the dense layer */
    c.d_out = 6;
    CHECK(moe_layer_create(&latent, &c, 1, 6, NULL, &error) == MOE_OK &&
              moe_layer_upcycle(&latent, &net.modules[0].layer, 0, 0, 1, &error) == MOE_ERR_SHAPE,
          "another width of the input");
    moe_layer_free(&latent);
    moe_layer_free(&layer);
    moe_net_free(&net);
}

int main(int argc, char **argv) {
    moe_rng_seed(&rng, 4711);
    CASE(test_tensors());
    CASE(test_used_per_token());
    CASE(test_create());
    CASE(test_hash_table());
    CASE(test_messages());
    CASE(test_forward());
    CASE(test_long_refine());
    CASE(test_selections());
    CASE(test_soft_sequences());
    CASE(test_mask());
    CASE(test_empty_experts());
    CASE(test_work_memory());
    CASE(test_allocations());
    CASE(test_huge_pages());
    CASE(test_const_tensors());
    CASE(test_backward());
    CASE(test_saturated_constant());
    CASE(test_backward_without_dx());
    CASE(test_add_input());
    CASE(test_by_experts());
    CASE(test_attention_backward());
    CASE(test_by_experts_errors());
    CASE(test_state());
    CASE(test_custom());
    CASE(test_replay());
    CASE(test_bad_calls());
    CASE(test_round_trip());
    CASE(test_bad_files());
    CASE(test_disk(argc > 1 ? argv[1] : "."));
    CASE(test_presets());
    CASE(test_upcycle());
    CASE(test_upcycle_decimals());
    CASE(test_refused_upcycling());
    return test_end();
}
