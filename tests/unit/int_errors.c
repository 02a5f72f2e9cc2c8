/* The error of integer models (MOE_WEIGHTS_INT8) against the same network in float, run on the same
   dequantized inputs: every module, every kind of expert, every activation, with few and many
   inputs, rows that calibration has not seen, inputs of several distributions. The relative root
   mean square error of each network stays below 2 % (attention: 3.5 %, its keys and values have 8
   bits), and the mean of a kind of networks little above what rounding to nearest costs it. Then
   what is accepted, and what is refused with which advice.
       cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/int_errors.c -o int_errors -lm && ./int_errors
   "int_errors quick" has one seed of each; "int_errors show" prints a line for each network;
   "int_errors seed N" takes other seeds. */

#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { CALIBRATION = 512, ROWS = 256, WIDEST = 192 };

static int shows, seeds = 3, weights = MOE_WEIGHTS_INT8;
static uint64_t first_seed = 1;
static moe_rng rng;
static moe_real x[(CALIBRATION + ROWS) * WIDEST];
static double worst, total; /* errors: of all networks, of this kind */
static int networks;

/* ---- inputs: normal; uniform; of many magnitudes; few far from 0 ---- */

enum { NORMAL, UNIFORM, SCALED, SPARSE, DISTRIBUTIONS };

static void draw(int distribution, size_t rows, size_t d) {
    size_t i, j;
    for (i = 0; i < rows; i++) {
        const moe_real scale = distribution == SCALED ? (moe_real)(0.2 + 2 * (double)moe_rng_uniform(&rng)) : 1;
        for (j = 0; j < d; j++) {
            moe_real v = moe_rng_normal(&rng);
            if (distribution == UNIFORM) v = 2 * moe_rng_uniform(&rng) - 1;
            if (distribution == SPARSE && moe_rng_uniform(&rng) < (moe_real)0.7) v = 0;
            x[i * d + j] = scale * v;
        }
    }
}

/* ---- networks ---- */

typedef struct trial {
    const char *name;
    int act, variant;
    size_t d;
    /* appends the modules; what it refuses is no trial */
    moe_status (*make)(moe_net *net, const struct trial *t);
} trial;

static moe_status make_linear(moe_net *net, const trial *t) { return moe_net_linear(net, t->variant ? 3 : 40); }

static moe_status make_activation(moe_net *net, const trial *t) {
    moe_status status = moe_net_linear(net, 48);
    if (status == MOE_OK) status = moe_net_activation(net, t->act);
    return status != MOE_OK || t->variant ? status : moe_net_linear(net, 12);
}

static moe_layer_config layer_of(int expert, int act) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 4;
    c.router.top_k = 4; /* so that routing makes no difference */
    c.d_ff = 40;
    c.expert = expert;
    c.act = act;
    return c;
}

/* variant: 0 mlp, 1 glu, 2 mlp and 3 glu as feed_forward, 4 latent experts */
static moe_status make_experts(moe_net *net, const trial *t) {
    moe_layer_config c = layer_of(t->variant % 2 ? MOE_EXPERT_GLU : MOE_EXPERT_MLP, t->act);
    c.d_out = 16;
    if (t->variant == 2 || t->variant == 3) {
        memset(&c.router, 0, sizeof c.router);
        return moe_net_feed_forward(net, &c);
    }
    return moe_net_mixture(net, &c);
}

/* variant: 0 swiglu, 1 linear, 2 factorised, 3 shared experts, 4 weighted inputs, 5 weighted by raw
   probabilities, 6 shared experts with a sigmoid, 7 add_input, 8 shaped, 9 weighted inputs of
   linear experts, 10 a zero expert, 11 copies, 12 constant experts, 13 all of these with weights
   over the experts with matrices, 14 inputs of copies and constant experts with weights that sum to
   3, 15 logit_cap, 16 and 17 the logits of another layer, without and with logit_cap */
static moe_status make_mixture(moe_net *net, const trial *t) {
    moe_layer_config c = layer_of(MOE_EXPERT_SWIGLU, 0);
    if (t->variant == 1 || t->variant == 9) c.expert = MOE_EXPERT_LINEAR;
    if (t->variant == 2) {
        c.expert = MOE_EXPERT_FACTORISED;
        c.d_low = 6;
    }
    if (t->variant == 3 || t->variant == 6) c.n_shared = 1;
    c.shared_sigmoid = t->variant == 6;
    if (t->variant == 4 || t->variant == 9) c.router.apply_to = MOE_APPLY_INPUT;
    if (t->variant == 5) c.router.weight = MOE_WEIGHT_RAW;
    c.add_input = t->variant == 7;
    if (c.add_input) c.router.scale = (moe_real)0.5; /* half of the input is added, not 0 of it */
    if (t->variant == 8) {
        c.swiglu_limit = 7;
        c.swiglu_alpha = (moe_real)1.702;
        c.swiglu_offset = 1;
    }
    if (t->variant >= 10 && t->variant <= 14) {
        c.router.n_experts = c.router.top_k = 6;
        c.router.n_zero = t->variant == 10 || t->variant == 13;
        c.router.n_copy = (t->variant == 11) + (t->variant >= 13);
        c.router.n_constant = t->variant >= 12 ? 2 : 0;
        if (t->variant == 14) {
            c.router.apply_to = MOE_APPLY_INPUT;
            c.router.scale = 3;
        }
        if (t->variant == 13) c.router.weight_over = MOE_WEIGHT_OVER_REAL;
    }
    if (t->variant == 15 || t->variant == 17) c.router.logit_cap = 1;
    if (t->variant >= 16) {
        moe_status status;
        if (t->d < 8) return MOE_ERR_UNSUPPORTED; /* two layers of few inputs leave the calibrated range */
        c.router.scale = (moe_real)0.1; /* so that the errors are those of the second layer */
        status = moe_net_mixture(net, &c);
        if (status == MOE_OK) status = moe_net_residual(net, 1);
        if (status != MOE_OK) return status;
        c.router.scale = 0;
        c.router.router_residual = 1;
    }
    return moe_net_mixture(net, &c);
}

static moe_status make_norm(moe_net *net, const trial *t) {
    const moe_status status = t->variant % 2 ? moe_net_layer_norm(net) : moe_net_rms_norm(net);
    return status != MOE_OK || t->variant < 2 ? status : moe_net_linear(net, 20);
}

/* Gains that are small beside the biases: the output is practically the biases. */
static moe_status make_biases(moe_net *net, const trial *t) {
    const moe_status status = moe_net_layer_norm(net);
    return status != MOE_OK || t->variant % 2 == 0 ? status : moe_net_linear(net, 20);
}

static moe_status make_residual(moe_net *net, const trial *t) {
    moe_status status = moe_net_linear(net, (int)t->d);
    if (status == MOE_OK) status = moe_net_residual(net, 1);
    return status != MOE_OK || !t->variant ? status : moe_net_linear(net, 24);
}

/* An MoE layer whose output is 0, because its last matrix is (variant 0 and 1: added to its input)
   or the one before it, beside large weights (2: its sigmoid). */
static moe_status make_zeros(moe_net *net, const trial *t) {
    moe_layer_config c = layer_of(MOE_EXPERT_SWIGLU, 0);
    moe_status status;
    if (t->variant == 2) c.router.n_experts = c.router.top_k = 32;
    status = moe_net_mixture(net, &c);
    if (status != MOE_OK) return status;
    if (t->variant == 2) return moe_net_activation(net, MOE_ACT_SIGMOID);
    status = moe_net_residual(net, 1);
    return status != MOE_OK || t->variant == 0 ? status : moe_net_linear(net, 24);
}

/* A constant expert of weighted inputs, beside experts whose output is 0. */
static moe_status make_constant(moe_net *net, const trial *t) {
    moe_layer_config c = layer_of(MOE_EXPERT_SWIGLU, 0);
    (void)t;
    c.router.n_constant = 1;
    c.router.gate = MOE_GATE_SIGMOID;
    c.router.weight = MOE_WEIGHT_RAW;
    c.router.apply_to = MOE_APPLY_INPUT;
    return moe_net_mixture(net, &c);
}

static moe_status make_attention(moe_net *net, const trial *t) {
    moe_attention_config c;
    memset(&c, 0, sizeof c);
    c.heads = 2;
    c.rotary = t->variant;
    return moe_net_attention(net, &c);
}

/* ---- one network ---- */

/* Biases and gains that training would have found. */
static void randomise(moe_net *net) {
    size_t i, j;
    for (i = 0; i < net->n_tensors; i++) {
        const char *name = net->tensors[i].name;
        const int bias = strstr(name, "bias") != NULL, norm = net->tensors[i].count == (size_t)net->d_in && !bias;
        for (j = 0; j < net->tensors[i].count && strstr(name, "router") == NULL; j++) {
            if (bias) net->tensors[i].data[j] = (moe_real)0.2 * moe_rng_normal(&rng);
            else if (norm) net->tensors[i].data[j] *= (moe_real)0.5 + moe_rng_uniform(&rng);
        }
    }
}

static void tensor_fill(moe_net *net, const char *name, moe_real value) {
    moe_tensor tensor;
    size_t i;
    CHECK_STATUS(moe_net_find(net, name, &tensor), MOE_OK, name);
    for (i = 0; i < tensor.count; i++) tensor.data[i] = value;
}

/* What makes of a trial a special one. */
static void finish(moe_net *net, const trial *t) {
    if (t->make == make_biases) tensor_fill(net, "0.weight", t->variant < 2 ? 0 : (moe_real)1e-5);
    if (t->make == make_constant) tensor_fill(net, "0.experts.down", 0);
    if (t->make != make_zeros) return;
    tensor_fill(net, "0.experts.down", t->variant == 2 ? 20 : 0);
    if (t->variant == 2) tensor_fill(net, "0.experts.up", 0);
}

static double relative_error(const moe_net *net, const moe_built_model *built, size_t d, const trial *t) {
    const moe_model *model = &built->model;
    const size_t n = (size_t)net->d_out, length = model->length > 0 ? 16 : 1;
    int8_t codes[WIDEST];
    int16_t *y = (int16_t *)malloc(n * sizeof *y);
    unsigned char *scratch = (unsigned char *)calloc(model->scratch_size, 1);
    moe_real *real = (moe_real *)malloc(ROWS * d * sizeof *real);
    int32_t starts[ROWS + 1];
    double error = 0, size = 0;
    size_t bytes = 0, i, j;
    void *work;
    moe_call call;
    moe_net_pass pass;
    for (i = 0; i < ROWS * d; i += d) {
        moe_infer_levels(model, x + CALIBRATION * d + i, codes);
        for (j = 0; j < d; j++) real[i + j] = (moe_real)(codes[j] * (double)model->input_scale);
    }
    memset(&call, 0, sizeof call);
    call.n_tokens = ROWS;
    call.x = real;
    call.n_sequences = ROWS / length;
    for (i = 0; i <= call.n_sequences; i++) starts[i] = (int32_t)(i * length);
    call.sequences = starts;
    CHECK_STATUS(moe_net_work_size(net, ROWS, 0, &bytes), MOE_OK, t->name);
    work = malloc(bytes);
    CHECK_STATUS(moe_net_forward(net, &call, work, bytes, &pass), MOE_OK, t->name);
    for (i = 0; i < ROWS; i++) {
        if (i % length == 0) memset(scratch, 0, model->scratch_size < 32 ? model->scratch_size : 32);
        moe_infer_levels(model, real + i * d, codes);
        CHECK_STATUS(moe_infer(model, NULL, codes, y, scratch, model->scratch_size), MOE_OK, t->name);
        for (j = 0; j < n; j++) {
            const double wanted = (double)pass.y[i * n + j], off = y[j] * (double)model->output_scale - wanted;
            error += off * off;
            size += wanted * wanted;
        }
    }
    free(y);
    free(scratch);
    free(real);
    free(work);
    return size > 0 ? sqrt(error / size) : error > 0;
}

static void try_one(const trial *t, int distribution, uint64_t seed) {
    moe_net net;
    moe_model_config config;
    moe_built_model built;
    moe_data data;
    moe_error error;
    double off;
    memset(&net, 0, sizeof net);
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    moe_rng_seed(&rng, seed * 1000 + (uint64_t)(t->act * 40 + t->variant) + t->d);
    draw(distribution, CALIBRATION + ROWS, t->d);
    (void)moe_net_init(&net, (int)t->d, MOE_KERNELS_C, NULL);
    if (t->make(&net, t) == MOE_OK && CHECK_STATUS(moe_net_build(&net, 0, seed, &error), MOE_OK, error.message)) {
        randomise(&net);
        finish(&net, t);
        config.weights = weights;
        config.length = 16;
        config.calibration = &data;
        data.n = CALIBRATION;
        data.x = x;
        data.length = t->make == make_attention ? 16 : 0;
        if (CHECK_STATUS(moe_model_create(&built, &net, &config, &error), MOE_OK, error.message)) {
            off = relative_error(&net, &built, t->d, t);
            if (off > worst) worst = off;
            total += off;
            networks++;
            if (shows)
                printf("%6.3f %% %s %d %s d %d distribution %d\n", 100 * off, t->name, t->variant,
                       moei_act_names[t->act], (int)t->d, distribution);
            CHECKF(weights == MOE_WEIGHTS_INT4 || off < (t->make == make_attention ? 0.035 : 0.02),
                   "%.2f %% %s %d %s d %d distribution %d seed %d", 100 * off, t->name, t->variant,
                   moei_act_names[t->act], (int)t->d, distribution, (int)seed);
            moe_model_free(&built);
        }
    }
    moe_net_free(&net);
}

/* mean: what the mean of the errors in percent may be, a little above what it is. */
static void try_all(const char *name, moe_status (*make)(moe_net *net, const trial *t), int acts, int variants,
                    double mean) {
    static const size_t widths[] = {1, 2, 3, 8, 40, WIDEST};
    trial t;
    size_t i;
    int distribution, seed;
    memset(&t, 0, sizeof t);
    total = 0;
    networks = 0;
    t.name = name;
    t.make = make;
    for (t.act = 0; t.act < acts; t.act++)
        for (t.variant = 0; t.variant < variants; t.variant++)
            for (i = 0; i < sizeof widths / sizeof *widths; i++)
                for (seed = 0; seed < seeds; seed++) {
                    t.d = widths[i];
                    if (make == make_attention && t.d % 4 != 0) continue;
                    distribution = (int)((i + (size_t)seed + (size_t)t.variant) % DISTRIBUTIONS);
                    try_one(&t, distribution, first_seed + (uint64_t)seed);
                }
    CHECKF(100 * total < mean * networks, "%s: %.3f %% in the mean of %d", name, 100 * total / networks, networks);
}

/* moe_check.h accepts a layer with a copy that is larger than all that the other experts add: it is
   there once. */
static void one_copy(void) {
    static unsigned char scratch[4096];
    moe_layer_config c = layer_of(MOE_EXPERT_SWIGLU, 0);
    moe_model_config config;
    moe_built_model built;
    moe_data data;
    moe_net net;
    moe_tensor down;
    moe_error error;
    size_t i;
    uint64_t seed;
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    c.router.n_experts = 40;
    c.router.top_k = 20;
    c.router.n_copy = 1;
    c.d_ff = 5;
    config.weights = MOE_WEIGHTS_INT8;
    config.calibration = &data;
    data.n = 24;
    data.x = x;
    for (seed = 1; seed <= 8; seed++) {
        moe_rng_seed(&rng, seed);
        draw(NORMAL, data.n, 6);
        (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
        (void)moe_net_mixture(&net, &c);
        CHECK_STATUS(moe_net_build(&net, 0, seed, &error), MOE_OK, error.message);
        CHECK_STATUS(moe_net_find(&net, "0.experts.down", &down), MOE_OK, "down");
        for (i = 0; i < down.count; i++) down.data[i] *= (moe_real)0.01;
        CHECK_STATUS(moe_model_create(&built, &net, &config, &error), MOE_OK, error.message);
        CHECK_STATUS(moe_model_check(&built.model, NULL, scratch, sizeof scratch, &error), MOE_OK, error.message);
        moe_model_free(&built);
        moe_net_free(&net);
    }
}

/* What float models refuse too is not said to work with them. */
static void no_model(void) {
    static const char *const settings[] = {"select=given top_k=2", "select=custom", "score=custom"};
    moe_model_config config;
    moe_built_model built;
    moe_data data;
    moe_net net;
    moe_error error;
    int i;
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    config.calibration = &data;
    data.n = 4;
    data.x = x;
    for (i = 0; i < 6; i++) {
        moe_layer_config c = layer_of(MOE_EXPERT_MLP, 0);
        const char *setting = settings[i / 2];
        CHECK_STATUS(moe_fields_apply(moe_layer_fields(), &c, setting, &error), MOE_OK, error.message);
        (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
        (void)moe_net_mixture(&net, &c);
        CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK, error.message);
        config.weights = i % 2 ? MOE_WEIGHTS_INT8 : MOE_WEIGHTS_FLOAT;
        CHECK_STATUS(moe_model_create(&built, &net, &config, &error), MOE_ERR_UNSUPPORTED, setting);
        CHECKF(strstr(error.message, "FLOAT") == NULL && strstr(error.message, "float") == NULL, "%s", error.message);
        moe_net_free(&net);
    }
}

int main(int argc, char **argv) {
    shows = argc > 1 && strcmp(argv[1], "show") == 0;
    if (argc > 1 && strcmp(argv[1], "quick") == 0) seeds = 1;
    if (argc > 2 && strcmp(argv[1], "seed") == 0) first_seed = strtoull(argv[2], NULL, 10);
    CASE(try_all("linear", make_linear, 1, 2, 0.42));
    CASE(try_all("activation", make_activation, MOE_ACT_COUNT, 2, 0.72));
    CASE(try_all("experts", make_experts, MOE_ACT_COUNT, 4, 1.25));
    CASE(try_all("mixture", make_mixture, 1, 18, 1.25));
    CASE(try_all("norm", make_norm, 1, 4, 0.36));
    CASE(try_all("biases", make_biases, 1, 4, 0.22));
    CASE(try_all("residual", make_residual, 1, 2, 0.65));
    CASE(try_all("zeros", make_zeros, 1, 3, 0.17));
    CASE(try_all("constant", make_constant, 1, 1, 0.65));
    CASE(try_all("attention", make_attention, 1, 2, 1.9));
    weights = MOE_WEIGHTS_INT4;
    CASE(try_all("int4", make_linear, 1, 2, 5.1));
    CASE(one_copy());
    CASE(no_model());
    if (shows) printf("worst %.3f %%\n", 100 * worst);
    return test_end();
}
