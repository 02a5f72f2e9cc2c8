/* smooth.c - moe_smooth.h: float networks keep their bits, s is what the paper says, quantization
   errors fall, failures change nothing.

     cc -std=c99 -O2 -I. tests/unit/smooth.c -o smooth -lm && ./smooth
     (also with -DMOE_REAL=double, and as C++)

   Exit status 1 if a check failed. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 16, ROWS = 40, LENGTH = 8, TOKENS = 10, OUT = 5 };
enum { NORM = 3, MIXTURE = 4, SECOND_NORM = 6, SECOND = 7 }; /* modules */

static moe_rng rng;
static moe_real *inputs; /* [ROWS,WIDTH] */
static int32_t tokens[ROWS];

static moe_data rows_of(const moe_net *net) {
    moe_data data;
    memset(&data, 0, sizeof data);
    data.n = ROWS;
    data.x = net->d_in > 0 ? inputs : NULL;
    data.token_ids = tokens;
    data.length = LENGTH;
    return data;
}

/* ---- networks ---- */

enum { LAYER_NORM, RMS_NORM, RMS_NORM_BIAS };

static void add_norm(moe_net *net, int kind) {
    moe_module m;
    memset(&m, 0, sizeof m);
    m.kind = kind == LAYER_NORM ? MOE_MODULE_LAYER_NORM : MOE_MODULE_RMS_NORM;
    m.bias = kind == RMS_NORM_BIAS;
    (void)moe_net_append(net, &m);
}

static moe_status layer_of(const char *settings, moe_layer_config *c) {
    moe_error error;
    moe_status status;
    memset(c, 0, sizeof *c);
    c->router.n_experts = 4;
    c->d_ff = 12;
    status = moe_fields_apply(moe_layer_fields(), c, settings, &error);
    CHECKF(status == MOE_OK, "%s: %s", settings, error.message);
    return status;
}

/* Biases and gains start at one value; outliers begin as gains and rows of up. */
static void shake(moe_net *net, double outlier) {
    size_t i, j;
    for (i = 0; i < net->n_tensors; i++) {
        moe_tensor *t = &net->tensors[i];
        const int rows = strstr(t->name, ".up") != NULL || strstr(t->name, "fc1.weight") != NULL;
        const size_t each = rows ? t->shape[t->n_dims - 1] : 1;
        if (t->flags & (MOE_PARAM_STATE | MOE_PARAM_FROZEN)) continue;
        for (j = 0; j < t->count; j++) {
            if (t->flags & MOE_PARAM_NO_DECAY) t->data[j] += (moe_real)0.25 * moe_rng_normal(&rng);
            if ((rows || (t->flags & MOE_PARAM_NO_DECAY && t->n_dims == 1)) && j / each % 7 == 2)
                t->data[j] *= (moe_real)outlier;
        }
    }
}

/* Attention, the layer of `settings` and, if there are any, a second one, each behind a norm and
   beside a residual. attention: NULL: {0}. */
static moe_status block(moe_net *net, const char *settings, const char *second, const moe_attention_config *attention,
                        int kernels, const moe_allocator *allocator) {
    moe_layer_config c;
    moe_error error;
    moe_status status;
    moe_net_init(net, WIDTH, kernels, allocator);
    add_norm(net, LAYER_NORM);
    moe_net_attention(net, attention);
    moe_net_residual(net, 2);
    add_norm(net, RMS_NORM_BIAS);
    if (layer_of(settings, &c) == MOE_OK) moe_net_mixture(net, &c);
    moe_net_residual(net, 2);
    add_norm(net, LAYER_NORM);
    if (second == NULL) moe_net_feed_forward(net, NULL);
    else if (layer_of(second, &c) == MOE_OK) moe_net_mixture(net, &c);
    moe_net_residual(net, 2);
    add_norm(net, RMS_NORM_BIAS);
    moe_net_linear(net, OUT);
    status = moe_net_build(net, 0, 7, &error);
    CHECKF(status == MOE_OK, "%s: %s", settings, error.message);
    if (status == MOE_OK) shake(net, 64);
    return status;
}

/* The output, [ROWS,d_out]; NULL if the network needs more of a call. */
static moe_real *outputs(const moe_net *net, int training) {
    moe_data data = rows_of(net);
    int32_t starts[ROWS / LENGTH + 1];
    moe_rng noise = {5};
    moe_real *y = NULL;
    moe_net_pass pass;
    moe_call call;
    size_t bytes, i;
    void *work;
    memset(&call, 0, sizeof call);
    for (i = 0; i <= ROWS / LENGTH; i++) starts[i] = (int32_t)(i * LENGTH);
    call.n_tokens = ROWS;
    call.x = data.x;
    call.token_ids = data.token_ids;
    call.sequences = starts;
    call.n_sequences = ROWS / LENGTH;
    call.training = training;
    call.rng = &noise;
    if (moe_net_work_size(net, ROWS, training, &bytes) != MOE_OK) return NULL;
    work = grab(bytes, 1);
    if (moe_net_forward(net, &call, work, bytes, &pass) == MOE_OK) {
        y = reals(ROWS * (size_t)net->d_out);
        memcpy(y, pass.y, ROWS * (size_t)net->d_out * sizeof *y);
    }
    free(work);
    return y;
}

static moe_real *tensors_of(const moe_net *net) {
    moe_real *all;
    size_t i, n = 0;
    for (i = 0; i < net->n_tensors; i++) n += net->tensors[i].count;
    all = reals(n);
    for (i = n = 0; i < net->n_tensors; n += net->tensors[i++].count)
        memcpy(all + n, net->tensors[i].data, net->tensors[i].count * sizeof *all);
    return all;
}

static size_t numbers_of(const moe_net *net) { return moe_net_parameter_count(net, NULL); }

static moe_tensor tensor(const moe_net *net, size_t module, const char *name) {
    char all[MOE_NAME_SIZE];
    moe_tensor t;
    memset(&t, 0, sizeof t);
    sprintf(all, "%d.%.40s", (int)module, name);
    (void)moe_net_find(net, all, &t);
    return t;
}

/* Whether a tensor of the network differs from that in `before`. */
static int changed(const moe_net *net, const moe_real *before, size_t module, const char *name) {
    const moe_tensor t = tensor(net, module, name);
    size_t i, at = 0;
    if (t.data == NULL) return 0;
    for (i = 0; net->tensors[i].data != t.data; i++) at += net->tensors[i].count;
    return !same_reals(before + at, t.data, t.count);
}

/* ---- the bits of float networks ---- */

/* Smooths a network, whose outputs keep their bits in calls for inference and training, and
   smooths it again, which changes nothing. *before receives the tensors as they were. */
static moe_status smooth_exactly(moe_net *net, moe_real **before, moe_smooth_result *result) {
    moe_data data = rows_of(net);
    moe_real *y = outputs(net, 0), *trained = outputs(net, 1), *again, *kept;
    moe_smooth_result nothing;
    moe_error error;
    moe_status status;
    *before = tensors_of(net);
    memset(&error, 0, sizeof error);
    status = moe_smooth(net, &data, NULL, result, &error);
    CHECKF((status == MOE_OK) == (y != NULL), "%s", error.message);
    if (status == MOE_OK && y != NULL) {
        again = outputs(net, 0);
        CHECK(again != NULL && same_reals(y, again, ROWS * (size_t)net->d_out), "inference");
        free(again);
        again = outputs(net, 1);
        CHECK((trained == NULL) == (again == NULL) &&
                  (again == NULL || same_reals(trained, again, ROWS * (size_t)net->d_out)),
              "training");
        free(again);
        kept = tensors_of(net);
        CHECK_STATUS(moe_smooth(net, &data, NULL, &nothing, &error), MOE_OK, "again");
        again = tensors_of(net);
        CHECK(nothing.channels == 0 && nothing.modules == 0 && nothing.least == 0 && nothing.most == 0, "again");
        CHECK(same_reals(kept, again, numbers_of(net)), "again");
        free(kept);
        free(again);
    }
    free(y);
    free(trained);
    return status;
}

/* What is scaled: input: the norm before the layer; hidden: the matrix behind the hidden channels;
   shared: of shared experts. */
static const struct {
    const char *settings, *second;
    int input, hidden, shared;
} cases[] = {
    {"", NULL, 1, 1, 0},
    {"n_shared=2 d_shared=6 shared_sigmoid=1 router_bias=1", NULL, 1, 1, 1},
    {"n_shared=1 shared_act=gelu expert=linear", NULL, 1, 0, 1},
    {"expert_bias=1 swiglu_alpha=1.7", NULL, 1, 1, 0},
    {"swiglu_limit=7", NULL, 1, 0, 0},
    {"swiglu_offset=1", NULL, 1, 0, 0},
    {"swiglu_offset=-1 expert_bias=1", NULL, 1, 0, 0},
    {"expert=glu act=gelu expert_bias=1", NULL, 1, 1, 0},
    {"expert=glu act=relu", NULL, 1, 1, 0},
    {"expert=mlp", NULL, 1, 1, 0},
    {"expert=mlp act=identity no_expert_bias=1", NULL, 1, 1, 0},
    {"expert=mlp act=gelu", NULL, 1, 0, 0},
    {"expert=mlp act=relu2", NULL, 1, 0, 0},
    {"expert=factorised d_low=6", NULL, 1, 1, 0},
    {"d_latent=8 n_shared=1", NULL, 1, 1, 1},
    {"n_zero=1", NULL, 1, 1, 0},
    {"n_copy=1", NULL, 0, 1, 0},
    {"n_constant=1", NULL, 0, 1, 0},
    {"add_input=1 n_shared=1", NULL, 0, 1, 1},
    {"apply_to=input", NULL, 1, 1, 0},
    {"score=random", NULL, 1, 1, 0},
    {"score=mlp", NULL, 1, 1, 0},
    {"score=dselect gate=identity select=positive weight=sum", NULL, 1, 1, 0},
    {"score=cosine", NULL, 0, 1, 0},
    {"score=grap", NULL, 0, 1, 0},
    {"score=norm norm_node=gate", NULL, 1, 1, 0},
    {"score=norm norm_node=up", NULL, 1, 0, 0},
    {"score=norm norm_node=act", NULL, 1, 1, 0},
    {"score=norm norm_node=product", NULL, 1, 0, 0},
    {"score=norm norm_node=output", NULL, 1, 1, 0},
    {"score=norm norm_node=down expert=factorised", NULL, 1, 1, 0},
    {"score=norm norm_node=gate expert=mlp", NULL, 1, 0, 0},
    {"score=norm norm_node=act expert=mlp", NULL, 1, 0, 0},
    {"score=attentive router_hidden=12", NULL, 1, 0, 0},
    {"score=competition", NULL, 1, 1, 0},
    {"input=jitter", NULL, 1, 1, 0},
    {"input=scaled_rms", NULL, 0, 1, 0},
    {"input=scaled_rms raw_input=1", NULL, 1, 1, 0},
    {"score=cosine raw_input=1", NULL, 1, 1, 0},
    {"noise=noisy_topk", NULL, 1, 1, 0},
    {"refine=similarity", NULL, 0, 1, 0},
    {"refine=attention", NULL, 0, 1, 0},
    {"refine=similarity raw_input=1", NULL, 1, 1, 0},
    {"select=soft slots=2 soft_sequences=5", NULL, 1, 1, 0},
    {"select=soft slots=2 soft_sequences=5 soft_normalise=1", NULL, 0, 1, 0},
    {"select=expert_choice", NULL, 1, 1, 0},
    {"select=expert_choice predictor=1", NULL, 1, 1, 0},
    {"select=hash table_size=10 weight=uniform student=1 loss_distill=1 distill=ce_hard freeze_at=5", NULL, 1, 1, 0},
    {"capacity_factor_eval=1", NULL, 1, 1, 0},
    {"capacity_bound=every", NULL, 0, 1, 0},
    {"", "", 1, 1, 0},
    {"", "router_residual=1", 1, 1, 0},
    {"", "input=adaptive_clustering", 0, 1, 0},
    {"", "input=adaptive_clustering ac_mode=code", 0, 1, 0},
};

static void test_layers(int kernels) {
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe_smooth_result result;
        moe_real *before;
        moe_net net;
        test_about = cases[i].settings;
        if (block(&net, cases[i].settings, cases[i].second, NULL, kernels, NULL) == MOE_OK &&
            smooth_exactly(&net, &before, &result) == MOE_OK) {
            CHECK(result.channels > 0 && result.modules >= 3 && result.least <= 0 && result.most >= 0, "a result");
            CHECK(changed(&net, before, 0, "weight"), "the norm before attention");
            CHECK(changed(&net, before, NORM, "weight") == cases[i].input, "the norm");
            CHECK(changed(&net, before, NORM, "bias") == cases[i].input, "its bias");
            CHECK((changed(&net, before, MIXTURE, "experts.down") ||
                   changed(&net, before, MIXTURE, "experts.fc2.weight")) == cases[i].hidden,
                  "the hidden channels");
            CHECK(changed(&net, before, MIXTURE, "shared.down") == cases[i].shared, "shared experts");
            CHECK(changed(&net, before, MIXTURE, "router.weight") <= cases[i].input, "the router");
            free(before);
        } else CHECK(0, "a network");
        moe_net_free(&net);
    }
    test_about = "";
}

static moe_status first_expert(void *ctx, const moe_router *router, const moe_call *call, const moe_real *logits,
                               const moe_real *probabilities, unsigned char *chosen) {
    const size_t experts = (size_t)router->config.n_experts;
    size_t i;
    (void)ctx;
    (void)logits;
    (void)probabilities;
    for (i = 0; i < call->n_tokens * experts; i++) chosen[i] = i % experts == 0;
    return MOE_OK;
}

/* A function of the caller may read the input, also one that selects only up to switch_at. */
static void test_custom(void) {
    static const char *const settings[] = {"select=custom", "switch_at=9 switch_from=custom"};
    moe_smooth_result result;
    moe_real *before;
    moe_net net;
    size_t i;
    for (i = 0; i < 2; i++) {
        if (block(&net, settings[i], NULL, NULL, MOE_KERNELS_C, NULL) == MOE_OK) {
            net.modules[MIXTURE].layer.router.custom.select = first_expert;
            CHECK_STATUS(smooth_exactly(&net, &before, &result), MOE_OK);
            CHECKF(!changed(&net, before, NORM, "weight"), "%s", settings[i]);
            free(before);
        }
        moe_net_free(&net);
    }
}

/* Only the next MoE layer reads this one's inputs: clusters of the one after that do not matter. */
static void test_later_clusters(void) {
    static const char *const settings[] = {"", "", "input=adaptive_clustering"};
    moe_smooth_result result;
    moe_layer_config c;
    moe_error error;
    moe_real *before;
    moe_net net;
    size_t i;
    moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
    add_norm(&net, RMS_NORM);
    for (i = 0; i < 3 && layer_of(settings[i], &c) == MOE_OK; i++) moe_net_mixture(&net, &c);
    CHECK_STATUS(moe_net_build(&net, 0, 7, &error), MOE_OK);
    shake(&net, 64);
    if (CHECK_STATUS(smooth_exactly(&net, &before, &result), MOE_OK)) {
        CHECK(changed(&net, before, 0, "weight"), "the norm");
        free(before);
    }
    moe_net_free(&net);
}

/* Every preset: what the table above leaves out, and what is added later. */
static void test_presets(void) {
    const moe_preset *preset;
    int smoothed = 0;
    for (preset = moe_presets(); preset->name != NULL; preset++) {
        moe_layer_config c, first;
        moe_smooth_result result;
        moe_real *before = NULL;
        moe_error error;
        moe_net net;
        test_about = preset->name;
        CHECK_STATUS(moe_layer_preset(preset->name, &c, &error), MOE_OK);
        c.router.d_model = WIDTH;
        c.d_ff = 8;
        if (c.router.select == MOE_SELECT_HASH || c.router.student_dim > 0) c.router.table_size = TOKENS;
        if (c.router.select == MOE_SELECT_SOFT) c.router.soft_sequences = ROWS / LENGTH;
        moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
        moe_net_attention(&net, NULL);
        if (layer_of("", &first) == MOE_OK) {
            first.router.n_experts = c.router.n_experts; /* which some routers want of the layer before */
            moe_net_mixture(&net, &first);
        }
        add_norm(&net, RMS_NORM_BIAS);
        moe_net_mixture(&net, &c);
        moe_net_residual(&net, 2);
        if (moe_net_build(&net, 0, 3, &error) == MOE_OK) {
            shake(&net, 64);
            if (smooth_exactly(&net, &before, &result) == MOE_OK) smoothed++;
            free(before);
        } else CHECKF(0, "%s", error.message);
        moe_net_free(&net);
    }
    test_about = "";
    CHECKF(smoothed > 30, "%d presets", smoothed);
}

/* ---- other modules ---- */

static moe_attention_config attention_of(const char *settings) {
    moe_attention_config c;
    moe_error error;
    memset(&c, 0, sizeof c);
    CHECKF(moe_fields_apply(test_attention_fields(), &c, settings, &error) == MOE_OK, "%s", error.message);
    return c;
}

/* A language model. Bits, and which norms change: those before attention, the convolution and the
   linear module, but not the one before the tied module, whose matrix embeds the tokens. */
static void test_attention(void) {
    static const char *const settings[] = {"", "heads=4 kv_heads=2 bias=1 qk_norm=head rotary=1 clamp=3",
                                           "heads=2 d_head=12 rotary=1 rotary_dims=4 kv_lora=8",
                                           "heads=2 d_head=12 rotary=1 rotary_dims=4 kv_lora=8 q_lora=16"};
    static const int scaled[] = {2, 5, 8};
    size_t i, k;
    for (i = 0; i < sizeof settings / sizeof *settings; i++) {
        const moe_attention_config c = attention_of(settings[i]);
        moe_smooth_result result;
        moe_module m;
        moe_real *before = NULL;
        moe_error error;
        moe_net net;
        test_about = settings[i];
        memset(&m, 0, sizeof m);
        m.kind = MOE_MODULE_CONVOLUTION;
        m.length = 3;
        moe_net_init(&net, 0, MOE_KERNELS_AUTO, NULL);
        moe_net_embedding(&net, TOKENS, WIDTH);
        moe_net_positions(&net, LENGTH);
        add_norm(&net, RMS_NORM_BIAS);
        moe_net_attention(&net, &c);
        moe_net_residual(&net, 2);
        add_norm(&net, LAYER_NORM);
        (void)moe_net_append(&net, &m);
        moe_net_residual(&net, 2);
        add_norm(&net, RMS_NORM_BIAS);
        moe_net_linear(&net, WIDTH);
        add_norm(&net, RMS_NORM_BIAS);
        moe_net_tied(&net);
        CHECKF(moe_net_build(&net, 0, 3, &error) == MOE_OK, "%s", error.message);
        shake(&net, 64);
        CHECK_STATUS(smooth_exactly(&net, &before, &result), MOE_OK);
        CHECK(result.modules == 3, "three modules read scaled channels");
        for (k = 0; k < 3; k++) CHECK(changed(&net, before, (size_t)scaled[k], "weight"), "a norm");
        CHECK(!changed(&net, before, 10, "weight") && !changed(&net, before, 0, "weight"), "tied");
        CHECK(!changed(&net, before, 3, "output") && !changed(&net, before, 6, "out") &&
                  !changed(&net, before, 6, "taps"),
              "what does not read a norm");
        CHECK(c.kv_lora == 0 || !changed(&net, before, 3, "key"), "MLA: key reads the latent vector");
        CHECK(c.q_lora == 0 || !changed(&net, before, 3, "query"), "MLA: query reads query_down");
        free(before);
        moe_net_free(&net);
    }
    test_about = "";
}

/* Norms that something else reads, or nothing. */
static void test_left_alone(void) {
    enum { LAST, RESIDUAL, TWO, ACTIVATION, DROPOUT, CASES };
    int which;
    for (which = 0; which < CASES; which++) {
        moe_smooth_result result;
        moe_real *before = NULL;
        moe_error error;
        moe_net net;
        moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
        if (which != LAST) add_norm(&net, RMS_NORM_BIAS);
        if (which == TWO) add_norm(&net, LAYER_NORM);
        if (which == ACTIVATION) moe_net_activation(&net, MOE_ACT_RELU);
        if (which == DROPOUT) moe_net_dropout(&net, (moe_real)0.5);
        moe_net_linear(&net, WIDTH);
        if (which == RESIDUAL) moe_net_residual(&net, 1);
        if (which == LAST) add_norm(&net, RMS_NORM_BIAS);
        CHECK_STATUS(moe_net_build(&net, 0, 3, &error), MOE_OK);
        shake(&net, 64);
        CHECK_STATUS(smooth_exactly(&net, &before, &result), MOE_OK);
        CHECKF((result.channels > 0) == (which == TWO), "case %d", which);
        CHECKF(!changed(&net, before, which == LAST, "weight"), "case %d", which);
        free(before);
        moe_net_free(&net);
    }
}

/* ---- s ---- */

static int exponent_of(double x, double w, double alpha) {
    return x > 0 && w > 0 ? (int)floor(log2(pow(x, alpha) / pow(w, 1 - alpha)) + 0.5) : 0;
}

/* A norm and a linear module, s by the formula; outputs of the norm are computed here. */
static void test_formula(moe_real alpha) {
    const double a = alpha > 0 ? (double)alpha : 0.5;
    moe_smooth_config config;
    moe_smooth_result result;
    moe_net net;
    moe_error error;
    moe_data data;
    moe_real *gain, *w, *before;
    double most_x[WIDTH] = {0}, most_w[WIDTH] = {0};
    size_t i, j, n = 0;
    int least = 0, most = 0;
    memset(&config, 0, sizeof config);
    config.alpha = alpha;
    moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
    moe_net_rms_norm(&net);
    moe_net_linear(&net, OUT);
    CHECK_STATUS(moe_net_build(&net, 0, 3, &error), MOE_OK);
    gain = tensor(&net, 0, "weight").data;
    w = tensor(&net, 1, "weight").data;
    for (j = 0; j < WIDTH; j++) gain[j] = (moe_real)ldexp(1.0 + (double)j / WIDTH, (int)j - 6);
    gain[3] = 0;
    for (i = 0; i < OUT; i++) w[i * WIDTH + 5] = 0;
    for (i = 0; i < ROWS; i++) {
        double square = 0;
        for (j = 0; j < WIDTH; j++) square += pow((double)inputs[i * WIDTH + j], 2) / WIDTH;
        for (j = 0; j < WIDTH; j++)
            most_x[j] = fmax(most_x[j], fabs((double)inputs[i * WIDTH + j] * (double)gain[j]) / sqrt(square + 1e-5));
    }
    for (i = 0; i < OUT; i++)
        for (j = 0; j < WIDTH; j++) most_w[j] = fmax(most_w[j], fabs((double)w[i * WIDTH + j]));
    before = tensors_of(&net);
    data = rows_of(&net);
    CHECKF(moe_smooth(&net, &data, &config, &result, &error) == MOE_OK, "%s", error.message);
    for (j = 0; j < WIDTH; j++) {
        const int k = exponent_of(most_x[j], most_w[j], a);
        CHECKF(near_to((double)gain[j], ldexp((double)before[j], -k), 0), "gain %d, 2^%d", (int)j, k);
        for (i = 0; i < OUT; i++)
            CHECKF(near_to((double)w[i * WIDTH + j], ldexp((double)before[WIDTH + i * WIDTH + j], k), 0), "w %d",
                   (int)j);
        n += k != 0;
        if (k < least) least = k;
        if (k > most) most = k;
    }
    CHECK(n > 5 && result.channels == n && result.modules == 1 && result.least == least && result.most == most,
          "the result");
    free(before);
    moe_net_free(&net);
}

/* The rows behind the last whole batch are looked at, too: where the only large one stands does not
   matter. */
static void test_last_batch(void) {
    enum { MANY = 65 };
    moe_real *x = (moe_real *)grab(MANY * WIDTH, sizeof *x), *made[2];
    moe_error error;
    size_t i;
    int last;
    for (last = 0; last < 2; last++) {
        moe_data data;
        moe_net net;
        memset(&data, 0, sizeof data);
        for (i = 0; i < MANY * WIDTH; i++) x[i] = 1;
        for (i = 1; i < WIDTH; i++) x[(last ? (size_t)(MANY - 1) * WIDTH : 0) + i] = 0;
        data.n = MANY;
        data.x = x;
        moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
        moe_net_rms_norm(&net);
        moe_net_linear(&net, OUT);
        CHECK_STATUS(moe_net_build(&net, 0, 3, &error), MOE_OK);
        CHECKF(moe_smooth(&net, &data, NULL, NULL, &error) == MOE_OK, "%s", error.message);
        made[last] = tensors_of(&net);
        moe_net_free(&net);
    }
    CHECK(same_bits(made[0], made[1], WIDTH * sizeof(moe_real)), "the gains");
    free(made[0]);
    free(made[1]);
    free(x);
}

/* Hidden channels of an mlp, s by the formula. */
static void test_hidden_formula(void) {
    enum { HIDDEN = 12 };
    moe_smooth_result result;
    moe_layer_config c;
    moe_net net;
    moe_error error;
    moe_data data;
    moe_real *fc1, *bias, *fc2, *old1, *old_bias, *old2;
    size_t i, j, f, n = 0;
    memset(&c, 0, sizeof c);
    c.expert = MOE_EXPERT_MLP;
    c.d_ff = HIDDEN;
    moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
    moe_net_feed_forward(&net, &c);
    CHECK_STATUS(moe_net_build(&net, 0, 3, &error), MOE_OK);
    shake(&net, 64);
    fc1 = tensor(&net, 0, "experts.fc1.weight").data;
    bias = tensor(&net, 0, "experts.fc1.bias").data;
    fc2 = tensor(&net, 0, "experts.fc2.weight").data;
    bias[4] = -1000; /* never active */
    old1 = reals(HIDDEN * WIDTH);
    old_bias = reals(HIDDEN);
    old2 = reals(WIDTH * HIDDEN);
    memcpy(old1, fc1, HIDDEN * WIDTH * sizeof *fc1);
    memcpy(old_bias, bias, HIDDEN * sizeof *bias);
    memcpy(old2, fc2, WIDTH * HIDDEN * sizeof *fc2);
    data = rows_of(&net);
    CHECK_STATUS(moe_smooth(&net, &data, NULL, &result, &error), MOE_OK);
    for (f = 0; f < HIDDEN; f++) {
        double x = 0, w = 0;
        int k;
        for (i = 0; i < ROWS; i++) {
            double sum = (double)old_bias[f];
            for (j = 0; j < WIDTH; j++) sum += (double)old1[f * WIDTH + j] * (double)inputs[i * WIDTH + j];
            x = fmax(x, sum);
        }
        for (j = 0; j < WIDTH; j++) w = fmax(w, fabs((double)old2[j * HIDDEN + f]));
        k = exponent_of(x, w, 0.5);
        n += k != 0;
        CHECK(f != 4 || k == 0, "a channel that is always 0");
        CHECKF(near_to((double)bias[f], ldexp((double)old_bias[f], -k), 0), "bias %d", (int)f);
        for (j = 0; j < WIDTH; j++)
            CHECKF(near_to((double)fc1[f * WIDTH + j], ldexp((double)old1[f * WIDTH + j], -k), 0) &&
                       near_to((double)fc2[j * HIDDEN + f], ldexp((double)old2[j * HIDDEN + f], k), 0),
                   "channel %d", (int)f);
    }
    CHECK(n > 1 && result.channels == n && result.modules == 1, "the result");
    free(old1);
    free(old_bias);
    free(old2);
    moe_net_free(&net);
}

/* A channel keeps s = 1 where a weight would leave the normal range, and s has bounds. */
static void test_range(void) {
    const moe_real tiny = MOE_REAL_IS_DOUBLE ? (moe_real)DBL_MIN : (moe_real)FLT_MIN;
    moe_smooth_result result;
    moe_net net;
    moe_error error;
    moe_data data;
    moe_real *gain, *bias, *w;
    size_t i, j;
    moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
    add_norm(&net, RMS_NORM_BIAS);
    moe_net_linear(&net, OUT);
    CHECK_STATUS(moe_net_build(&net, 0, 3, &error), MOE_OK);
    gain = tensor(&net, 0, "weight").data;
    bias = tensor(&net, 0, "bias").data;
    w = tensor(&net, 1, "weight").data;
    for (j = 0; j < WIDTH; j++) {
        gain[j] = 1;
        for (i = 0; i < OUT; i++) w[i * WIDTH + j] = 1;
    }
    w[1] = 1024; /* s is about 2^-5 */
    w[2] = 1024;
    w[WIDTH + 2] = tiny * 4; /* which s would take out of the range */
    gain[3] = tiny;          /* s would be 2^-62 */
    gain[4] = 1024;          /* s is about 2^5 */
    gain[5] = 1024;
    bias[5] = tiny * 4;
    data = rows_of(&net);
    CHECK_STATUS(moe_smooth(&net, &data, NULL, &result, &error), MOE_OK);
    CHECK(gain[1] > 1 && w[1] < 1024 && gain[4] < 1024 && w[4] > 1, "scaled");
    CHECK(near_to((double)gain[2], 1, 0) && near_to((double)w[2], 1024, 0), "a weight at the end of the range");
    CHECK(near_to((double)gain[5], 1024, 0) && near_to((double)w[5], 1, 0), "a bias at the end of the range");
    CHECK(near_to((double)gain[3], (double)tiny, 0) && near_to((double)w[3], 1, 0), "s beyond its bounds");
    moe_net_free(&net);
}

/* The same at the other end, where alpha = 1 makes s the largest x alone. */
static void test_largest(void) {
    const moe_real huge = MOE_REAL_IS_DOUBLE ? (moe_real)(DBL_MAX / 8) : (moe_real)(FLT_MAX / 8);
    moe_smooth_config config;
    moe_net net;
    moe_error error;
    moe_data data;
    moe_real *gain, *w;
    moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
    add_norm(&net, RMS_NORM);
    moe_net_linear(&net, OUT);
    CHECK_STATUS(moe_net_build(&net, 0, 3, &error), MOE_OK);
    gain = tensor(&net, 0, "weight").data;
    w = tensor(&net, 1, "weight").data;
    gain[1] = gain[2] = 1024;
    w[1] = huge;
    memset(&config, 0, sizeof config);
    config.alpha = 1;
    data = rows_of(&net);
    CHECK_STATUS(moe_smooth(&net, &data, &config, NULL, &error), MOE_OK);
    CHECK(near_to((double)gain[1], 1024, 0) && same_bits(&w[1], &huge, sizeof huge), "it would overflow");
    CHECK(gain[2] < 2, "scaled");
    moe_net_free(&net);
}

/* ---- quantization ---- */

/* The vectors of a network of quantized_net and all that writes and reads them, by name. */
static const struct {
    const char *sources[2]; /* rows are channels */
    int own;                /* 1: each expert has channels of its own */
    const char *readers[8]; /* columns are channels; not all routers have both of theirs */
} vectors[] = {
    {{"0.weight", "0.bias"}, 0, {"1.query", "1.key", "1.value"}},
    {{"3.weight", NULL},
     0,
     {"4.experts.gate", "4.experts.up", "4.shared.gate", "4.shared.up", "4.shared.sigmoid", "4.router.weight",
      "4.router.slots"}},
    {{"4.experts.up", "4.experts.up_bias"}, 1, {"4.experts.down"}},
    {{"4.shared.up", NULL}, 1, {"4.shared.down"}},
    {{"6.weight", "6.bias"}, 0, {"7.experts.fc1.weight"}},
    {{"7.experts.fc1.weight", "7.experts.fc1.bias"}, 1, {"7.experts.fc2.weight"}},
    {{"9.weight", NULL}, 0, {"10.weight"}},
};
enum { VECTORS = sizeof vectors / sizeof *vectors, D = 64, BLOCK = 32, CALIBRATION = 256 };

static moe_real *wide_inputs; /* [CALIBRATION,D] */

static moe_data calibration_rows(void) {
    moe_data data;
    memset(&data, 0, sizeof data);
    data.n = CALIBRATION;
    data.x = wide_inputs;
    data.length = LENGTH;
    return data;
}

/* more: settings of its mixture. */
static void quantized_net(moe_net *net, const char *more, int seed) {
    moe_layer_config c;
    moe_error error;
    char settings[100];
    sprintf(settings, "expert_bias=1 d_ff=64 n_shared=1 shared_sigmoid=1 %.40s", more);
    moe_net_init(net, D, MOE_KERNELS_AUTO, NULL);
    add_norm(net, LAYER_NORM);
    moe_net_attention(net, NULL);
    moe_net_residual(net, 2);
    add_norm(net, RMS_NORM);
    if (layer_of(settings, &c) == MOE_OK) moe_net_mixture(net, &c);
    moe_net_residual(net, 2);
    add_norm(net, LAYER_NORM);
    if (layer_of("expert=mlp d_ff=64", &c) == MOE_OK) {
        memset(&c.router, 0, sizeof c.router);
        moe_net_feed_forward(net, &c);
    }
    moe_net_residual(net, 2);
    add_norm(net, RMS_NORM);
    moe_net_linear(net, OUT);
    CHECKF(moe_net_build(net, 0, (uint64_t)seed, &error) == MOE_OK, "%s", error.message);
    moe_rng_seed(&rng, (uint64_t)seed);
    shake(net, 1);
}

/* Multiplies channel j of every vector, counted over all experts, by 2^k[j % n_k] and divides the
   weights that read it: the float network stays as it is. */
static void plant(moe_net *net, const int *k, size_t n_k) {
    size_t v, i, j, r;
    for (v = 0; v < VECTORS; v++) {
        for (i = 0; i < 2; i++) {
            moe_tensor t;
            size_t width;
            if (vectors[v].sources[i] == NULL) continue;
            if (!CHECK(moe_net_find(net, vectors[v].sources[i], &t) == MOE_OK, vectors[v].sources[i])) continue;
            width = strstr(t.name, "bias") != NULL || t.n_dims == 1 ? 1 : t.shape[t.n_dims - 1];
            for (j = 0; j < t.count; j++) t.data[j] *= (moe_real)ldexp(1.0, k[j / width % n_k]);
        }
        for (r = 0; r < 8 && vectors[v].readers[r] != NULL; r++) {
            moe_tensor t;
            size_t block; /* of an expert */
            if (moe_net_find(net, vectors[v].readers[r], &t) != MOE_OK) {
                CHECK(strstr(vectors[v].readers[r], "router") != NULL, vectors[v].readers[r]);
                continue;
            }
            block = vectors[v].own ? t.shape[t.n_dims - 2] * D : t.count;
            for (j = 0; j < t.count; j++) t.data[j] *= (moe_real)ldexp(1.0, -k[(j / block * D + j % D) % n_k]);
        }
    }
}

/* Smoothing has one result for all networks that differ by powers of two per channel. So a network
   with planted outliers becomes, number by number, what it becomes without them. */
static void test_one_result(const char *settings, double alpha) {
    moe_data data = calibration_rows();
    moe_smooth_config config;
    moe_error error;
    int seed;
    memset(&config, 0, sizeof config);
    config.alpha = (moe_real)alpha;
    for (seed = 1; seed <= 3; seed++) {
        moe_real *plain, *planted;
        moe_net net, other;
        int k[7], i;
        quantized_net(&net, settings, seed);
        quantized_net(&other, settings, seed);
        for (i = 0; i < 7; i++) k[i] = (int)moe_rng_below(&rng, 17) - 8;
        plant(&other, k, 7);
        CHECKF(moe_smooth(&net, &data, &config, NULL, &error) == MOE_OK, "%s", error.message);
        plain = tensors_of(&other);
        planted = tensors_of(&net);
        CHECK(!same_reals(plain, planted, numbers_of(&net)), "planted");
        free(plain);
        CHECKF(moe_smooth(&other, &data, &config, NULL, &error) == MOE_OK, "%s", error.message);
        plain = tensors_of(&other);
        CHECK(same_reals(plain, planted, numbers_of(&net)), "the same network");
        free(plain);
        free(planted);
        moe_net_free(&net);
        moe_net_free(&other);
    }
}

/* The error of the output of a quantized network, which is unpacked again. */
static double quantization_error(moe_net *net, int type) {
    moe_data data = calibration_rows();
    moe_quant_error *errors = (moe_quant_error *)grab(net->n_modules, sizeof *errors);
    int32_t starts[CALIBRATION / LENGTH + 1];
    moe_call call;
    moe_error error;
    size_t bytes, work_bytes, i;
    void *memory, *work;
    double found;
    memset(&call, 0, sizeof call);
    call.n_tokens = CALIBRATION;
    call.x = data.x;
    for (i = 0; i <= CALIBRATION / LENGTH; i++) starts[i] = (int32_t)(i * LENGTH);
    call.sequences = starts;
    call.n_sequences = CALIBRATION / LENGTH;
    CHECK_STATUS(moe_net_pack_size(net, type, CALIBRATION, &bytes, &work_bytes), MOE_OK);
    memory = grab(bytes, 1);
    work = grab(work_bytes, 1);
    CHECKF(moe_net_quantize(net, type, memory, bytes, &call, work, work_bytes, errors, &error) == MOE_OK, "%s",
           error.message);
    found = (double)errors[net->n_modules - 1].output;
    for (i = 0; i < net->n_modules; i++) net->modules[i].layer.is_packed = 0;
    free(errors);
    free(memory);
    free(work);
    return found;
}

/* |integers - float| / |float| over the outputs of an exported model. */
static double model_error(const moe_net *net, int weights) {
    moe_data data = calibration_rows();
    moe_model_config config;
    moe_built_model built;
    moe_error error;
    moe_net_pass pass;
    moe_call call;
    int32_t starts[CALIBRATION / LENGTH + 1];
    int8_t levels[D];
    int16_t y[OUT];
    double difference = 0, all = 0;
    size_t bytes, i, j;
    void *work, *scratch;
    memset(&config, 0, sizeof config);
    memset(&call, 0, sizeof call);
    config.weights = weights;
    config.calibration = &data;
    config.length = LENGTH;
    call.n_tokens = CALIBRATION;
    call.x = data.x;
    for (i = 0; i <= CALIBRATION / LENGTH; i++) starts[i] = (int32_t)(i * LENGTH);
    call.sequences = starts;
    call.n_sequences = CALIBRATION / LENGTH;
    CHECK_STATUS(moe_net_work_size(net, CALIBRATION, 0, &bytes), MOE_OK);
    work = grab(bytes, 1);
    CHECK_STATUS(moe_net_forward(net, &call, work, bytes, &pass), MOE_OK);
    if (!CHECKF(moe_model_create(&built, net, &config, &error) == MOE_OK, "%s", error.message)) return 1;
    scratch = grab(built.model.scratch_size, 1);
    for (i = 0; i < CALIBRATION; i++) {
        if (i % LENGTH == 0) begin_sequence(scratch, built.model.scratch_size);
        moe_infer_levels(&built.model, data.x + i * D, levels);
        CHECK_STATUS(moe_infer(&built.model, NULL, levels, y, scratch, built.model.scratch_size), MOE_OK);
        for (j = 0; j < OUT; j++) {
            const double is = (double)pass.y[i * OUT + j];
            difference += pow((double)y[j] * (double)built.model.output_scale - is, 2);
            all += is * is;
        }
    }
    free(scratch);
    free(work);
    moe_model_free(&built);
    return sqrt(difference / all);
}

static double error_of(moe_net *net, int type) {
    return type < 0 ? model_error(net, -type) : quantization_error(net, type);
}

/* One channel in 32 is 64 times as large and its weights are 1/64 of what they were, as in trained
   networks with outliers. What that costs, for normal numbers of deviation 1, whose largest of 64
   is about 2.4: a step of int8 is 2.4 / 127, an error of 0.0055 each of activations and weights,
   together 0.0077. With outliers the step of activations is some 50 / 127, an error of 0.12; and
   int8 rounds weights of 1/64 with an error of 0.35, which is 0.062 of a sum in which 1 of 32
   addends has it. An exported int8 model loses the second alone, since it gives such activations 16
   bits: 8 times the error of before. int4 has an error of 0.09 before; it drops weights of 1/64,
   0.18 of the sum, and takes activations in 8 bits: 0.21. The bars are half of these factors or, of
   int4, 2/3. What remains of the outliers are s that are off by up to the square root of 2, both
   ways. */
static void test_errors(void) {
    static const struct {
        const char *name;
        int type;
        double falls; /* by at least this factor */
    } types[] = {{"int8 rows", MOE_TYPE_Q8, 17.0 / 2},
                 {"int8 blocks", MOE_TYPE_Q8_BLOCK, 8.0 / 2},
                 {"int4", MOE_TYPE_Q4, 2.3 * 2 / 3},
                 {"int8 model", -MOE_WEIGHTS_INT8, 8.0 / 2},
                 {"int4 model", -MOE_WEIGHTS_INT4, 2.3 * 2 / 3}};
    moe_data data = calibration_rows();
    moe_error error;
    size_t i;
    int seed;
    for (seed = 1; seed <= 3; seed++)
        for (i = 0; i < sizeof types / sizeof *types; i++) {
            int k[BLOCK] = {0};
            double plain, planted, smooth;
            moe_net net;
            quantized_net(&net, "", seed);
            plain = error_of(&net, types[i].type);
            k[5] = 6;
            plant(&net, k, BLOCK);
            planted = error_of(&net, types[i].type);
            CHECKF(moe_smooth(&net, &data, NULL, NULL, &error) == MOE_OK, "%s", error.message);
            smooth = error_of(&net, types[i].type);
            CHECKF(planted >= types[i].falls * smooth && smooth <= 2 * plain,
                   "%s: %.4f, with outliers %.4f, smoothed %.4f", types[i].name, plain, planted, smooth);
            moe_net_free(&net);
        }
}

/* Outliers that the weights do not make up for: s is 8, and activations and weights share the loss,
   8 * sqrt(2) instead of 64: a factor of 5.6, of which half is asked. */
static void test_gains(void) {
    moe_data data = calibration_rows();
    moe_error error;
    int seed;
    for (seed = 1; seed <= 3; seed++) {
        double planted, smooth;
        moe_real *gain;
        size_t i;
        moe_net net;
        moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
        add_norm(&net, RMS_NORM);
        moe_net_linear(&net, D);
        CHECK_STATUS(moe_net_build(&net, 0, (uint64_t)seed, &error), MOE_OK);
        gain = tensor(&net, 0, "weight").data;
        for (i = 5; i < D; i += BLOCK) gain[i] = 64;
        planted = quantization_error(&net, MOE_TYPE_Q8);
        CHECKF(moe_smooth(&net, &data, NULL, NULL, &error) == MOE_OK, "%s", error.message);
        smooth = quantization_error(&net, MOE_TYPE_Q8);
        CHECKF(planted >= 2.8 * smooth, "with outliers %.5f, smoothed %.5f", planted, smooth);
        moe_net_free(&net);
    }
}

/* ---- failures ---- */

/* The call fails with a message that has `words`, and changes nothing. */
static void refuse(moe_net *net, const moe_data *data, const moe_smooth_config *config, moe_status wanted,
                   const char *words, int line) {
    moe_real *before = net != NULL ? tensors_of(net) : NULL, *after;
    moe_smooth_result result, untouched;
    moe_error error;
    memset(&result, 9, sizeof result);
    untouched = result;
    memset(&error, 0, sizeof error);
    CHECK_STATUS_AT(line, moe_smooth(net, data, config, &result, &error), wanted, words);
    CHECK_AT(line, strstr(error.message, words) != NULL && error.code == wanted, error.message);
    CHECK_AT(line, same_bits(&result, &untouched, sizeof result), "result");
    CHECK_AT(line, moe_smooth(net, data, config, NULL, NULL) == wanted, "without an error");
    if (net == NULL) return;
    after = tensors_of(net);
    CHECK_AT(line, same_reals(before, after, numbers_of(net)), "tensors");
    free(before);
    free(after);
}
#define REFUSE(net, data, config, wanted, words) refuse(net, data, config, wanted, words, __LINE__)

static void test_data_errors(void) {
    moe_smooth_config config;
    moe_error error;
    moe_net net, ids;
    moe_data good, data;
    moe_call call;
    const moe_real kept = inputs[33];
    if (block(&net, "", NULL, NULL, MOE_KERNELS_AUTO, NULL) != MOE_OK) return;
    good = rows_of(&net);
    memset(&config, 0, sizeof config);
    memset(&call, 0, sizeof call);
    REFUSE(NULL, &good, NULL, MOE_ERR_ARGUMENT, "net must not be NULL");
    REFUSE(&net, NULL, NULL, MOE_ERR_ARGUMENT, "data must not be NULL");
    config.alpha = (moe_real)-0.5;
    REFUSE(&net, &good, &config, MOE_ERR_CONFIG, "alpha = -0.5");
    config.alpha = (moe_real)1.5;
    REFUSE(&net, &good, &config, MOE_ERR_CONFIG, "alpha = 1.5");
    config.alpha = (moe_real)(HUGE_VAL - HUGE_VAL);
    REFUSE(&net, &good, &config, MOE_ERR_CONFIG, "alpha");
    data = good;
    data.n = 0;
    REFUSE(&net, &data, NULL, MOE_ERR_ARGUMENT, "n = 0");
    data.n = ROWS - 1;
    REFUSE(&net, &data, NULL, MOE_ERR_ARGUMENT, "n = 39: must be a multiple of length = 8");
    data = good;
    data.length = 0;
    REFUSE(&net, &data, NULL, MOE_ERR_ARGUMENT, "length = 0: module 1");
    data = good;
    data.x = NULL;
    REFUSE(&net, &data, NULL, MOE_ERR_ARGUMENT, "x must not be NULL");
    data = good;
    data.call = &call;
    REFUSE(&net, &data, NULL, MOE_ERR_ARGUMENT, "call must be NULL");
    inputs[33] = (moe_real)HUGE_VAL;
    REFUSE(&net, &good, NULL, MOE_ERR_NONFINITE, "x[");
    inputs[33] = kept;
    moe_net_free(&net);

    moe_net_init(&ids, 0, MOE_KERNELS_AUTO, NULL);
    moe_net_embedding(&ids, TOKENS, WIDTH);
    moe_net_positions(&ids, LENGTH);
    add_norm(&ids, RMS_NORM);
    moe_net_linear(&ids, OUT);
    CHECK_STATUS(moe_net_build(&ids, 0, 1, &error), MOE_OK);
    data = rows_of(&ids);
    data.token_ids = NULL;
    REFUSE(&ids, &data, NULL, MOE_ERR_ARGUMENT, "token_ids must not be NULL");
    data = rows_of(&ids);
    data.length = 2 * LENGTH;
    data.n = 2 * LENGTH;
    REFUSE(&ids, &data, NULL, MOE_ERR_ARGUMENT, "length = 16: module 1");
    moe_net_free(&ids);
}

static void test_state_errors(void) {
    static unsigned char memory[400000];
    moe_external external;
    moe_error error;
    moe_net net;
    moe_data data;
    moe_real *w, kept;
    size_t bytes, i;
    moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
    add_norm(&net, RMS_NORM);
    moe_net_linear(&net, OUT);
    data = rows_of(&net);
    REFUSE(&net, &data, NULL, MOE_ERR_STATE, "not built");
    moe_net_free(&net);
    if (block(&net, "", NULL, NULL, MOE_KERNELS_AUTO, NULL) != MOE_OK) return;
    memset(&external, 0, sizeof external);
    CHECK_STATUS(moe_net_pack_size(&net, MOE_TYPE_Q8, 0, &bytes, NULL), MOE_OK);
    if (!CHECK(bytes <= sizeof memory)) return;
    CHECK_STATUS(moe_net_pack(&net, MOE_TYPE_Q8, memory, bytes, &error), MOE_OK);
    for (i = 0; i < net.n_modules; i++) net.modules[i].layer.is_packed = i == 1 || i == 4;
    REFUSE(&net, &data, NULL, MOE_ERR_STATE, "module 1 (attention) is packed");
    net.modules[1].layer.is_packed = 0;
    REFUSE(&net, &data, NULL, MOE_ERR_STATE, "module 4 (mixture) is packed");
    net.modules[4].layer.is_packed = 0;
    net.external = 1;
    REFUSE(&net, &data, NULL, MOE_ERR_STATE, "not the network's own");
    net.external = 0;
    net.modules[1].external = &external;
    REFUSE(&net, &data, NULL, MOE_ERR_STATE, "module 1 (attention) has tensors");
    net.modules[1].external = NULL;
    net.modules[4].layer.external[MOE_ROUTER_WEIGHT] = &external;
    REFUSE(&net, &data, NULL, MOE_ERR_STATE, "module 4 (mixture) has tensors");
    net.modules[4].layer.external[MOE_ROUTER_WEIGHT] = NULL;
    net.transport = (const struct moe_transport *)(const void *)&external;
    REFUSE(&net, &data, NULL, MOE_ERR_UNSUPPORTED, "transport");
    net.transport = NULL;
    w = tensor(&net, 9, "weight").data; /* of the last norm */
    kept = *w;
    *w = (moe_real)HUGE_VAL;
    REFUSE(&net, &data, NULL, MOE_ERR_NONFINITE, "data: ");
    *w = (moe_real)(HUGE_VAL - HUGE_VAL);
    REFUSE(&net, &data, NULL, MOE_ERR_NONFINITE, "data: ");
    *w = kept;
    w = tensor(&net, 3, "weight").data; /* in front of a mixture, which refuses it itself */
    kept = *w;
    *w = (moe_real)(HUGE_VAL - HUGE_VAL);
    REFUSE(&net, &data, NULL, MOE_ERR_NONFINITE, "data: module 4 (mixture)");
    *w = kept;
    CHECK_STATUS(moe_smooth(&net, &data, NULL, NULL, &error), MOE_OK, "and now it works");
    moe_net_free(&net);
}

/* Every allocation fails once; nothing is lost, nothing changes. */
static void test_memory(void) {
    test_heap heap;
    moe_allocator allocator = test_allocator(&heap, 0);
    moe_error error;
    moe_net net;
    moe_data data;
    long before, blocks, k;
    if (block(&net, "n_shared=1", NULL, NULL, MOE_KERNELS_AUTO, &allocator) != MOE_OK) return;
    data = rows_of(&net);
    blocks = heap.blocks;
    for (k = 1; k < 10; k++) {
        moe_real *old = tensors_of(&net), *now;
        moe_status status;
        before = heap.calls;
        heap.fail_at = before + k;
        status = moe_smooth(&net, &data, NULL, NULL, &error);
        CHECK(heap.blocks == blocks && !heap.wrong_size, "memory is given back");
        now = tensors_of(&net);
        CHECK(same_reals(old, now, numbers_of(&net)) == (status != MOE_OK), "tensors");
        free(old);
        free(now);
        if (status == MOE_OK) break;
        CHECK(status == MOE_ERR_MEMORY && error.code == MOE_ERR_MEMORY, error.message);
    }
    CHECK(k == 3, "two allocations");
    heap.fail_at = 0;
    moe_net_free(&net);
    CHECK(heap.blocks == 0, "freed");
}

/* Nothing to scale: no norms and experts, or only zeros. */
static void test_nothing(void) {
    moe_smooth_result result;
    moe_real *zeros = reals(ROWS * WIDTH), *before, *after;
    moe_error error;
    moe_net net;
    moe_data data;
    moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
    moe_net_linear(&net, OUT);
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK);
    data = rows_of(&net);
    data.length = 0;
    memset(&result, 9, sizeof result);
    CHECK_STATUS(moe_smooth(&net, &data, NULL, &result, &error), MOE_OK);
    CHECK(result.modules == 0 && result.channels == 0 && result.least == 0 && result.most == 0);
    moe_net_free(&net);
    moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
    moe_net_rms_norm(&net);
    moe_net_feed_forward(&net, NULL);
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK);
    before = tensors_of(&net);
    data.x = zeros;
    CHECK_STATUS(moe_smooth(&net, &data, NULL, &result, &error), MOE_OK);
    after = tensors_of(&net);
    CHECK(result.modules == 0 && result.channels == 0 && same_reals(before, after, numbers_of(&net)));
    moe_net_free(&net);
    free(before);
    free(after);
    free(zeros);
}

int main(void) {
    int i;
    moe_rng_seed(&rng, 1);
    inputs = normals_of(&rng, ROWS * WIDTH, 1);
    wide_inputs = normals_of(&rng, CALIBRATION * D, 1);
    for (i = 0; i < ROWS; i++) tokens[i] = (int32_t)moe_rng_below(&rng, TOKENS);
    CASE(test_layers(MOE_KERNELS_C));
    CASE(test_layers(MOE_KERNELS_AUTO));
    CASE(test_presets());
    CASE(test_later_clusters());
    CASE(test_custom());
    CASE(test_attention());
    CASE(test_left_alone());
    CASE(test_formula(0));
    CASE(test_formula((moe_real)0.25));
    CASE(test_formula(1));
    CASE(test_last_batch());
    CASE(test_hidden_formula());
    CASE(test_range());
    CASE(test_largest());
    CASE(test_one_result("", 0));
    CASE(test_one_result("", 0.25));
    CASE(test_one_result("score=competition", 0));
    CASE(test_one_result("select=soft slots=2 soft_sequences=64", 0));
    CASE(test_errors());
    CASE(test_gains());
    CASE(test_data_errors());
    CASE(test_state_errors());
    CASE(test_memory());
    CASE(test_nothing());
    free(inputs);
    free(wide_inputs);
    return test_end();
}
