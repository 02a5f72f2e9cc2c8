/* Profiles of inference models (moe_model_profile) against what this program finds by itself: SNR,
   saturation, multiply-accumulates, bytes, and the map of scratch memory, whose dead parts are
   overwritten before every operation. Random networks of all kinds of operations.
       cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/profile.c -o profile -lm && ./profile
   "profile quick" has fewer networks; "profile seed N" takes others. */

#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 96, LENGTH = 8, WIDEST = 32, WORDS = 11, MOST_OPS = 400 };

static int seeds = 120;
static uint64_t first_seed = 1;
static moe_rng rng;
static moe_real x[ROWS * WIDEST];
static int32_t ids[ROWS];
static moe_data data;

/* ---- random networks ---- */

static int below(int n) { return (int)(moe_rng_uniform(&rng) * (moe_real)n) % n; }

static moe_status add_mixture(moe_net *net) {
    static const int experts[] = {MOE_EXPERT_SWIGLU, MOE_EXPERT_MLP, MOE_EXPERT_GLU, MOE_EXPERT_LINEAR,
                                  MOE_EXPERT_FACTORISED};
    static const int scores[] = {MOE_SCORE_LINEAR, MOE_SCORE_MLP,       MOE_SCORE_COSINE,      MOE_SCORE_NORM,
                                 MOE_SCORE_GRAP,   MOE_SCORE_ATTENTIVE, MOE_SCORE_COMPETITION, MOE_SCORE_LINEAR};
    moe_layer_config c;
    int reads_experts;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 2 + below(5);
    c.router.top_k = 1 + below(c.router.n_experts);
    c.router.score = scores[below(8)];
    reads_experts = c.router.score == MOE_SCORE_NORM || c.router.score == MOE_SCORE_ATTENTIVE ||
                    c.router.score == MOE_SCORE_COMPETITION;
    if (c.router.score == MOE_SCORE_NORM) {
        c.router.norm_order = below(3);
        c.router.norm_node = MOE_NODE_OUTPUT;
    }
    c.expert = experts[below(5)];
    if (c.expert == MOE_EXPERT_MLP || c.expert == MOE_EXPERT_GLU) c.act = below(MOE_ACT_COUNT);
    c.d_ff = 3 + below(30);
    c.d_low = c.expert == MOE_EXPERT_FACTORISED ? 3 + below(4) : 0;
    c.d_out = below(2) ? 4 + below(20) : 0;
    c.n_shared = below(3) == 0;
    c.shared_sigmoid = c.n_shared && below(2);
    if (c.d_out == 0) c.add_input = below(4) == 0;
    if (below(4) == 0) c.router.selection_bias = 1;
    if (reads_experts) return moe_net_mixture(net, &c);
    if (below(4) == 0) c.router.apply_to = MOE_APPLY_INPUT;
    if (below(4) == 0) c.router.input = MOE_INPUT_SCALED_RMS;
    if (below(6) == 0) c.router.logit_cap = 2;
    if (c.d_out == 0 && below(3) == 0) {
        c.router.n_experts += 4;
        c.router.n_zero = 1;
        c.router.n_copy = below(2);
        c.router.n_constant = below(3);
    }
    if (below(4) == 0 && moe_net_mixture(net, &c) == MOE_OK) {
        c.router.input = MOE_INPUT_ADAPTIVE_CLUSTERING;
        c.router.ac_mode = MOE_AC_RANDOM;
        c.d_out = 0;
    }
    return moe_net_mixture(net, &c);
}

static void add_module(moe_net *net, int kind) {
    moe_attention_config attention;
    moe_layer_config layer;
    memset(&attention, 0, sizeof attention);
    memset(&layer, 0, sizeof layer);
    attention.heads = 1 + below(2);
    attention.rotary = below(2);
    layer.d_ff = 5 + below(20);
    layer.expert = below(2) ? MOE_EXPERT_GLU : MOE_EXPERT_MLP;
    if (kind == 0) (void)moe_net_linear(net, 1 + below(WIDEST));
    else if (kind == 1) (void)moe_net_activation(net, below(MOE_ACT_COUNT));
    else if (kind == 2) (void)(below(2) ? moe_net_layer_norm(net) : moe_net_rms_norm(net));
    else if (kind == 3) (void)moe_net_attention(net, &attention);
    else if (kind == 4) (void)moe_net_residual(net, 1);
    else if (kind == 5) (void)moe_net_feed_forward(net, &layer);
    else if (kind == 6) (void)moe_net_dropout(net, (moe_real)0.1);
    else (void)add_mixture(net);
}

static int draw_net(moe_net *net, uint64_t seed, moe_model_config *config) {
    size_t i, j;
    int n, words;
    memset(net, 0, sizeof *net);
    memset(config, 0, sizeof *config);
    memset(&data, 0, sizeof data);
    moe_rng_seed(&rng, seed);
    words = below(4) == 0;
    (void)moe_net_init(net, words ? 0 : 2 * (1 + below(WIDEST / 2)), MOE_KERNELS_C, NULL);
    if (words) (void)moe_net_embedding(net, WORDS, 4 * (1 + below(6)));
    if (words && below(2)) (void)moe_net_positions(net, LENGTH);
    for (n = 1 + below(5); n > 0; n--) {
        add_module(net, below(10));
        memset(&net->error, 0, sizeof net->error); /* a module that does not fit is left out */
    }
    if (words && below(2)) (void)moe_net_tied(net);
    if (moe_net_build(net, 0, seed, NULL) != MOE_OK) return 0;
    for (i = 0; i < net->n_tensors; i++)
        for (j = 0; j < net->tensors[i].count; j++)
            if (strstr(net->tensors[i].name, "bias") != NULL && strstr(net->tensors[i].name, "router") == NULL)
                net->tensors[i].data[j] = (moe_real)0.2 * moe_rng_normal(&rng);
    for (i = 0; i < sizeof x / sizeof *x; i++) x[i] = moe_rng_normal(&rng);
    for (i = 0; i < ROWS; i++) ids[i] = below(WORDS);
    data.n = ROWS;
    if (net->d_in > 0) data.x = x;
    else data.token_ids = ids;
    data.length = LENGTH;
    config->length = LENGTH;
    config->calibration = &data;
    config->weights = 1 + below(2);
    config->loader = below(4) == 0;
#if !MOE_REAL_IS_DOUBLE
    if (below(5) == 0) config->weights = config->loader = 0;
#endif
    return 1;
}

/* ---- a model whose operations are counted, and for which dead memory is overwritten ---- */

typedef struct watched {
    moe_model model; /* first: runs lead back to it */
    moe_built_model built;
    const moe_profile *profile;
    moei_int_op ops[MOST_OPS];
    size_t row[MOST_OPS], calls[MOST_OPS], products;
    double signal[MOST_OPS], noise[MOST_OPS]; /* of mixtures: what their sums are rounded to */
} watched;

/* Whether a vector has this byte at this row. */
static int is_live(const moe_profile *profile, size_t row, size_t at) {
    size_t i;
    for (i = 0; i < profile->n_vectors; i++) {
        const moe_profile_vector *v = &profile->vectors[i];
        if (v->first <= row && row <= v->last && v->at <= at && at < v->at + v->size) return 1;
    }
    return 0;
}

/* A mixture rounds its sum, to which it has added what makes the shift round to nearest. */
static void watch_rounding(watched *w, const moei_int_op *op, const moei_int_run *run) {
    const int32_t *sum = (const int32_t *)(const void *)(run->vectors + w->model.mixtures[op->index].sum);
    const int16_t *out = run->vectors + op->out;
    const size_t i = (size_t)(op - w->ops);
    size_t j;
    for (j = 0; j < op->shape.n; j++) {
        double y = sum[j] / ldexp(1, op->shape.shift) - (op->shape.shift > 0 ? 0.5 : 0);
        if (y < op->shape.low) y = op->shape.low;
        if (y > op->shape.high) y = op->shape.high;
        w->signal[i] += y * y;
        w->noise[i] += (out[j] - y) * (out[j] - y);
    }
}

static void watch_op(const moei_int_op *op, moei_int_run *run) {
    watched *w = (watched *)(void *)(uintptr_t)run->model;
    const size_t i = (size_t)(op - w->ops);
    const char *name = w->profile->rows[w->row[i]].name;
    const size_t size = w->model.scratch_size - (MOEI_INT_ALIGN - 1);
    size_t row = w->row[i], at;
    /* what enters a mixture is read by its inner operations, whose rows come before */
    if (strcmp(name, "mixture") == 0) {
        const moei_int_mixture *m = &w->model.mixtures[op->index];
        row = w->row[m->score < m->expert ? m->score : m->expert];
    }
    for (at = 0; at < size; at++)
        if (!is_live(w->profile, row, at)) run->state[at] = (unsigned char)moe_rng_next(&rng);
    w->calls[i]++;
    if (strstr(name, "int8") != NULL || strstr(name, "int4") != NULL || strstr(name, "product") != NULL)
        w->products += (size_t)op->shape.n * op->shape.k;
    if (strstr(name, "int16") != NULL) w->products += 2 * (size_t)op->shape.n * op->shape.k;
    w->built.ops[i].run(op, run);
    if (strcmp(name, "mixture") == 0 && w->model.weights_are != MOE_WEIGHTS_FLOAT) watch_rounding(w, op, run);
}

static moe_status fetch(void *ctx, size_t at, size_t size, void *to) {
    memcpy(to, ((const moe_built_model *)ctx)->experts.data + at, size);
    return MOE_OK;
}

static moe_status infer(const watched *w, const moe_model *model, size_t row, void *output, unsigned char *scratch) {
    moe_real input[WIDEST];
    moe_loader loader;
    loader.ctx = (void *)(uintptr_t)&w->built;
    loader.fetch = fetch;
    if (row % LENGTH == 0) begin_sequence(scratch, model->scratch_size);
    if (model->d_in == 0) memcpy(input, ids + row, sizeof *ids);
    else if (model->weights_are == MOE_WEIGHTS_FLOAT) memcpy(input, x + row * model->d_in, model->d_in * sizeof *x);
    else moe_infer_levels(model, x + row * model->d_in, (int8_t *)input);
    return moe_infer(model, w->built.external ? &loader : NULL, input, output, scratch, model->scratch_size);
}

static double output_of(const moe_model *model, const void *y, size_t j) {
    if (model->weights_are == MOE_WEIGHTS_FLOAT) return (double)((const moe_real *)y)[j];
    return ((const int16_t *)y)[j] * (double)model->output_scale;
}

/* The outputs survive poison; the last row's SNR is that of the outputs against the network's. */
static void check_runs(watched *w, const moe_net *net, uint64_t seed) {
    const moe_profile_row *last = &w->profile->rows[w->profile->n_rows - 1];
    const size_t n = w->model.d_out;
    unsigned char *scratch[2] = {(unsigned char *)grab(w->model.scratch_size, 1),
                                 (unsigned char *)grab(w->model.scratch_size, 1)};
    moe_real y[2][256];
    double signal = 0, noise = 0;
    size_t i, j, bytes = 0;
    int32_t starts[ROWS / LENGTH + 1];
    moe_net_pass pass;
    moe_call call;
    void *work;
    memset(&call, 0, sizeof call);
    call.n_tokens = ROWS;
    call.x = data.x;
    call.token_ids = data.token_ids;
    call.n_sequences = ROWS / LENGTH;
    for (i = 0; i <= ROWS / LENGTH; i++) starts[i] = (int32_t)(i * LENGTH);
    call.sequences = starts;
    CHECK_STATUS(moe_net_work_size(net, ROWS, 0, &bytes), MOE_OK);
    work = grab(bytes, 1);
    CHECK_STATUS(moe_net_forward(net, &call, work, bytes, &pass), MOE_OK);
    memset(y, 0, sizeof y);
    for (i = 0; i < ROWS; i++) {
        const int same = infer(w, &w->built.model, i, y[0], scratch[0]) == MOE_OK &&
                         infer(w, &w->model, i, y[1], scratch[1]) == MOE_OK && memcmp(y[0], y[1], sizeof *y) == 0;
        if (!CHECKF(same, "seed %d input %d: memory outside the map matters", (int)seed, (int)i)) break;
        for (j = 0; j < n; j++) {
            const double wanted = (double)pass.y[i * n + j], off = output_of(&w->model, y[0], j) - wanted;
            signal += wanted * wanted;
            noise += off * off;
        }
    }
    if (noise > 0 && signal > 0) CHECK_NEAR(last->net_snr, 10 * log10(signal / noise), 1e-3);
    CHECK(last->net_compared == ROWS * n);
    free(scratch[0]);
    free(scratch[1]);
    free(work);
}

/* ---- sums and bounds of the rows ---- */

static int seen[64];

static void check_rows(const watched *w, uint64_t seed) {
    const moe_profile *p = w->profile;
    static const double bounds[] = {90, 24, 8}; /* in dB: float, int8, int4 */
    const double bound = bounds[w->model.weights_are];
    size_t bytes = 0, multiplications = 0;
    size_t attends = 0, r, k, i;
    double least;
    int adds, fixed = 1; /* experts without matrices make the number of products vary */
    for (i = 0; i < w->model.n_mixtures; i++)
        fixed &= w->model.mixtures[i].zeros == 0 || w->model.mixtures[i].zeros == w->model.mixtures[i].router.n_experts;
    for (r = 0; r < p->n_rows; r++) {
        const moe_profile_row *row = &p->rows[r];
        bytes += row->weight_bytes;
        multiplications += row->multiplications;
        if (strcmp(row->name, "route") == 0) {
            CHECKF(row->net_compared == ROWS * row->inputs, "seed %d row %d route: %d weights compared, not %d",
                   (int)seed, (int)r, (int)row->net_compared, (int)(ROWS * row->inputs));
            continue;
        }
        if (strcmp(row->name, "attention") == 0) attends += row->multiplications;
        CHECKF(fixed ? w->calls[row->op] == ROWS * row->calls : w->calls[row->op] <= ROWS * row->calls || !row->calls,
               "seed %d row %d %s: %d calls, not %d", (int)seed, (int)r, row->name, (int)w->calls[row->op],
               (int)row->calls);
        if (w->noise[row->op] > 0 && row->saturated <= 0)
            CHECK_NEAR(row->snr, 10 * log10(w->signal[row->op] / w->noise[row->op]), 1e-3);
        /* where only a tenth of the codes is used, they are coarse */
        adds = moei_profile_kind_of(&w->built.ops[row->op])->flags & MOEI_ADDS;
        least = bound > 80 ? bound : adds ? 8 : row->used > 0.1 ? bound : 0;
        CHECKF(row->compared == 0 || row->snr >= least, "seed %d row %d module %d %s: %g dB, %g saturated, %g used",
               (int)seed, (int)r, (int)row->module,
               row->name, row->snr, row->saturated, row->used);
        for (k = 0; k < sizeof moei_profile_kinds / sizeof *moei_profile_kinds; k++)
            if (moei_profile_kinds[k].run == w->built.ops[row->op].run && row->compared > 0) seen[k]++;
    }
    CHECKF(bytes == w->model.weights_size + w->model.experts_size, "seed %d: %d bytes of %d", (int)seed, (int)bytes,
           (int)(w->model.weights_size + w->model.experts_size));
    CHECKF(multiplications == w->model.multiplications, "seed %d: %d multiplications, not %d", (int)seed,
           (int)multiplications, (int)w->model.multiplications);
    CHECKF(fixed ? w->products == ROWS * (multiplications - attends) : w->products <= ROWS * multiplications,
           "seed %d: %d products, not %d", (int)seed, (int)(w->products / ROWS), (int)multiplications);
}

static void try_net(uint64_t seed) {
    moe_net net;
    moe_model_config config;
    moe_profile profile;
    moe_error error;
    watched *w = (watched *)grab(1, sizeof *w);
    moe_status status;
    size_t i, r;
    memset(&error, 0, sizeof error);
    status = draw_net(&net, seed, &config) ? moe_model_create(&w->built, &net, &config, &error) : MOE_ERR_CONFIG;
    if (status == MOE_OK && w->built.ops != NULL && w->built.model.n_ops <= MOST_OPS && net.d_out <= 256 &&
        CHECK_STATUS(moe_model_profile(&profile, &net, &config, NULL, &error), MOE_OK, error.message)) {
        w->model = w->built.model;
        w->profile = &profile;
        w->model.ops = w->ops;
        for (i = 0; i < w->model.n_ops; i++) {
            w->ops[i] = w->built.ops[i];
            w->ops[i].run = watch_op;
        }
        for (r = 0; r < profile.n_rows; r++)
            if (strcmp(profile.rows[r].name, "route") != 0) w->row[profile.rows[r].op] = r;
        check_runs(w, &net, seed);
        check_rows(w, seed);
        moe_profile_free(&profile);
    }
    moe_model_free(&w->built);
    moe_net_free(&net);
    free(w);
}

static void test_random(void) {
    size_t k;
    int i;
    for (i = 0; i < seeds; i++) try_net(first_seed + (uint64_t)i);
    for (k = 0; seeds >= 120 && first_seed == 1 && k < sizeof moei_profile_kinds / sizeof *moei_profile_kinds; k++)
        if (moei_profile_kinds[k].reference != NULL || moei_profile_kinds[k].flags & MOEI_MEASURES)
            CHECKF(seen[k] > 0, "%s: in no network", moei_function_name((moei_any_function)moei_profile_kinds[k].run));
}

/* ---- single operations: the SNR is that of the output, on the inputs that codes stand for ---- */

/* Output j of a network of one module, a linear one or a norm. */
static double alone(const moe_module *m, const moe_real *t, size_t j) {
    const size_t d = (size_t)m->d_in;
    const moe_real *w = m->tensors[MOE_MODULE_WEIGHT];
    double sum = 0, square = 0;
    size_t q;
    if (m->kind == MOE_MODULE_LINEAR) {
        for (q = 0; q < d; q++) sum += (double)w[j * d + q] * (double)t[q];
        return sum + (double)m->tensors[MOE_MODULE_BIAS][j];
    }
    for (q = 0; q < d && m->kind == MOE_MODULE_LAYER_NORM; q++) sum += (double)t[q] / (double)d;
    for (q = 0; q < d; q++) square += pow((double)t[q] - sum, 2) / (double)d;
    return ((double)t[j] - sum) / sqrt(square + (double)moei_eps_of(m->eps)) * (double)w[j];
}

static void test_alone(void) {
    moe_net net;
    moe_model_config config;
    moe_built_model built;
    moe_profile profile;
    int kind, weights;
    size_t i, j;
    for (kind = 0; kind < 6; kind++)
        for (weights = MOE_WEIGHTS_INT8; weights <= MOE_WEIGHTS_INT4; weights++) {
            const size_t d = 24;
            double signal = 0, noise = 0;
            int16_t y[WIDEST];
            int8_t codes[WIDEST];
            unsigned char scratch[4096];
            moe_rng_seed(&rng, (uint64_t)(kind * 2 + weights));
            memset(&net, 0, sizeof net);
            memset(&config, 0, sizeof config);
            memset(&data, 0, sizeof data);
            for (i = 0; i < ROWS * d; i++) x[i] = moe_rng_normal(&rng);
            data.n = ROWS;
            data.x = x;
            config.weights = weights;
            config.calibration = &data;
            (void)moe_net_init(&net, (int)d, MOE_KERNELS_C, NULL);
            add_module(&net, kind % 3 == 1 ? 0 : kind % 3);
            if (kind % 3 == 0) add_module(&net, 6); /* changes nothing */
            CHECK_STATUS(moe_net_build(&net, 0, 1, NULL), MOE_OK);
            CHECK_STATUS(moe_model_create(&built, &net, &config, NULL), MOE_OK);
            for (i = 0; i < ROWS; i++) { /* from now on inputs are those of codes */
                moe_infer_levels(&built.model, x + i * d, codes);
                for (j = 0; j < d; j++) x[i * d + j] = (moe_real)(codes[j] * (double)built.model.input_scale);
            }
            moe_model_free(&built);
            CHECK_STATUS(moe_model_create(&built, &net, &config, NULL), MOE_OK);
            CHECK_STATUS(moe_model_profile(&profile, &net, &config, NULL, NULL), MOE_OK);
            for (i = 0; i < ROWS; i++) {
                moe_infer_levels(&built.model, x + i * d, codes);
                CHECK_STATUS(moe_infer(&built.model, NULL, codes, y, scratch, sizeof scratch), MOE_OK);
                for (j = 0; j < (size_t)net.d_out; j++) {
                    const double wanted = alone(&net.modules[0], x + i * d, j);
                    noise += pow(y[j] * (double)built.model.output_scale - wanted, 2);
                    signal += wanted * wanted;
                }
            }
            CHECK_NEAR(profile.rows[profile.n_rows - 1].snr, 10 * log10(signal / noise), 0.05);
            moe_profile_free(&profile);
            moe_model_free(&built);
            moe_net_free(&net);
        }
}

/* ---- saturation: calibration sees one input at a time, the samples have all at once ---- */

static void test_saturated(void) {
    moe_net net;
    moe_model_config config;
    moe_profile profile;
    moe_data samples;
    size_t i, j, d = 16;
    memset(&net, 0, sizeof net);
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    memset(x, 0, sizeof x);
    (void)moe_net_init(&net, (int)d, MOE_KERNELS_C, NULL);
    (void)moe_net_linear(&net, 4);
    (void)moe_net_linear(&net, 2);
    CHECK_STATUS(moe_net_build(&net, 0, 1, NULL), MOE_OK);
    for (i = 0; i < 4 * d; i++) *(moe_real *)(uintptr_t)&net.modules[0].tensors[MOE_MODULE_WEIGHT][i] = 1;
    for (i = 0; i < 32; i++) x[i * d + i % d] = i < 16 ? 1 : -1;
    for (i = 32; i < 48; i++) /* rows that count down: 16, 15, ... inputs of 1; above 1 the codes end */
        for (j = 0; j < 48 - i; j++) x[i * d + j] = 1;
    data.n = 32;
    data.x = x;
    samples = data;
    samples.n = 16;
    samples.x = x + 32 * d;
    config.weights = MOE_WEIGHTS_INT8;
    config.calibration = &data;
    CHECK_STATUS(moe_model_profile(&profile, &net, &config, NULL, NULL), MOE_OK);
    CHECK(profile.n_rows == 2 && profile.rows[0].saturated <= 0);
    moe_profile_free(&profile);
    CHECK_STATUS(moe_model_profile(&profile, &net, &config, &samples, NULL), MOE_OK);
    CHECK_NEAR(profile.rows[0].saturated, 15.0 / 16, 1e-9);
    CHECK_NEAR(profile.rows[0].used, 1, 1e-9);
    CHECK(profile.rows[0].snr < 3 && profile.rows[0].module == 0 && profile.rows[0].outputs == 4);
    moe_profile_free(&profile);
    moe_net_free(&net);
}

/* A curve's input saturates beyond twice the calibrated range; but where the curve ends, nothing is
   lost: gelu of large numbers. */
static void test_saturated_curves(void) {
    int large;
    for (large = 0; large < 2; large++) {
        moe_net net;
        moe_model_config config;
        moe_profile profile;
        moe_data samples;
        size_t i, saturated = 0;
        memset(&config, 0, sizeof config);
        memset(&data, 0, sizeof data);
        (void)moe_net_init(&net, 4, MOE_KERNELS_C, NULL);
        if (!large) (void)moe_net_linear(&net, 4);
        (void)moe_net_activation(&net, large ? MOE_ACT_GELU : MOE_ACT_SILU);
        CHECK_STATUS(moe_net_build(&net, 0, 1, NULL), MOE_OK);
        for (i = 0; i < 16 && !large; i++) net.tensors[0].data[i] = 1;
        for (i = 0; i < 16 * 4; i++) /* one input at a time, then all at once */
            x[i] = (moe_real)(large ? 1e6 : i >= 8 * 4 || i % 4 == i / 4 % 4) * (moe_real)(i % 3 + 1);
        samples = data;
        data.n = samples.n = large ? 16 : 8;
        data.x = x;
        samples.x = large ? x : x + 8 * 4;
        config.weights = MOE_WEIGHTS_INT8;
        config.calibration = &data;
        CHECK_STATUS(moe_model_profile(&profile, &net, &config, &samples, NULL), MOE_OK);
        for (i = 0; i < profile.n_rows; i++)
            if (strcmp(profile.rows[i].name, "rescale") == 0) {
                saturated += profile.rows[i].saturated > 0.1;
                CHECKF(large ? profile.rows[i].snr > 40 : profile.rows[i].snr < 30, "row %d: %g dB", (int)i,
                       profile.rows[i].snr);
            }
        CHECKF(saturated == (large ? 0u : 1u), "%d rows", (int)saturated);
        moe_profile_free(&profile);
        moe_net_free(&net);
    }
}

/* ---- what is refused; the header shows the rows ---- */

static void test_refused(void) {
    moe_attention_config attention;
    moe_net net;
    moe_model_config config;
    moe_profile profile, untouched;
    moe_data samples;
    moe_error error;
    memset(&net, 0, sizeof net);
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    memset(&attention, 0, sizeof attention);
    memset(&untouched, 0x5a, sizeof untouched);
    profile = untouched;
    attention.heads = 2;
    (void)moe_net_init(&net, 8, MOE_KERNELS_C, NULL);
    CHECK_STATUS(moe_net_attention(&net, &attention), MOE_OK);
    CHECK_STATUS(moe_net_build(&net, 0, 1, NULL), MOE_OK);
    data.n = ROWS;
    data.x = x;
    data.length = config.length = LENGTH;
    samples = data;
    samples.n = LENGTH + 1;
    config.calibration = &data;
    config.weights = MOE_WEIGHTS_INT8;
    CHECK_STATUS(moe_model_profile(&profile, &net, &config, &samples, &error), MOE_ERR_ARGUMENT);
    CHECK(strcmp(error.message, "samples: n = 9: must be a multiple of length = 8") == 0, error.message);
    config.weights = MOE_WEIGHTS_FLOAT;
    CHECK_STATUS(moe_model_profile(&profile, &net, &config, NULL, &error), MOE_ERR_UNSUPPORTED);
    if (!MOE_REAL_IS_DOUBLE)
        CHECK(strstr(error.message, "the model is not a list of operations: ") == error.message, error.message);
    CHECK(memcmp(&profile, &untouched, sizeof profile) == 0, "untouched");
    moe_net_free(&net);
}

/* ---- each allocation fails: all of it is given back, and the call says so ---- */

/* How many allocations failed; 0: no model is made of this network. */
static long fail_each(const moe_net *net, moe_model_config *config, int fail_on, uint64_t seed) {
    const moe_profile untouched = {0};
    moe_profile profile;
    moe_error error;
    moe_status status;
    test_heap heap;
    long at = 0, failed = 0;
    do {
        memset(&error, 0, sizeof error);
        profile = untouched;
        config->allocator = test_allocator(&heap, at);
        heap.fail_on = fail_on;
        status = moe_model_profile(&profile, net, config, NULL, &error);
        if (at == 0 && status != MOE_OK) return 0;
        if (status != MOE_OK) {
            failed++;
            CHECKF(status == MOE_ERR_MEMORY && error.code == MOE_ERR_MEMORY && error.message[0] != '\0',
                   "seed %d, allocation %d: %s", (int)seed, (int)at, error.message);
            CHECKF(memcmp(&profile, &untouched, sizeof profile) == 0, "seed %d, allocation %d", (int)seed, (int)at);
        } else moe_profile_free(&profile);
        CHECKF(heap.blocks == 0 && !heap.wrong_size, "seed %d, allocation %d: %d blocks are left", (int)seed, (int)at,
               (int)heap.blocks);
    } while (heap.calls >= at++);
    return failed;
}

static void test_memory(void) {
    const int wanted = seeds / 3;
    uint64_t seed = first_seed + 5000;
    long failed = 0;
    int made = 0;
    for (; made < wanted; seed++) {
        moe_net net;
        moe_model_config config;
        if (draw_net(&net, seed, &config)) {
            long count;
            data.n = 2 * LENGTH;
            count = fail_each(&net, &config, (int)(seed % 2), seed);
            made += count > 0;
            failed += count;
        }
        moe_net_free(&net);
    }
    CHECKF(failed > 40L * wanted, "only %d allocations failed", (int)failed);
}

static void test_header(void) {
    moe_net net;
    moe_model_config config;
    moe_built_model built;
    moe_profile profile;
    moe_buffer text;
    moe_stream stream;
    moe_error error;
    uint64_t seed = 1;
    const char *first;
    char line[80], row[208];
    size_t i;
    memset(&text, 0, sizeof text);
    stream = moe_buffer_stream(&text);
    CHECK_STATUS(moe_model_profile(NULL, NULL, NULL, NULL, &error), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_model_profile(&profile, NULL, NULL, NULL, &error), MOE_ERR_ARGUMENT);
    while (!draw_net(&net, seed, &config) || net.n_modules < 3 || config.weights == 0 || config.loader ||
           moe_model_create(&built, &net, &config, NULL) != MOE_OK) {
        moe_net_free(&net);
        seed++;
    }
    data.length = 5; /* does not divide n */
    CHECK_STATUS(moe_model_profile(&profile, &net, &config, NULL, &error), MOE_ERR_ARGUMENT);
    data.length = LENGTH;
    CHECK_STATUS(moe_model_profile(&profile, &net, &config, NULL, &error), MOE_OK);
    profile.rows[0].compared = profile.rows[0].net_compared = 1;
    profile.rows[0].snr = -HUGE_VAL;
    profile.rows[0].net_snr = HUGE_VAL;
    built.profile = &profile;
    CHECK_STATUS(moe_export_c(&built, "shown", &stream, &error), MOE_OK);
    CHECK_STATUS(stream.write(stream.ctx, "", 1), MOE_OK);
    for (i = 0; i < profile.n_rows; i++) {
        sprintf(line, "\n     %4d  %-16s", (int)i, profile.rows[i].name);
        CHECK(strstr((const char *)text.data, line) != NULL, line);
    }
    first = strstr((const char *)text.data, "\n        0  ");
    if (CHECK(first != NULL)) {
        sprintf(row, "%.*s ", (int)strcspn(first + 1, "\n") % 200, first + 1);
        CHECK(strstr(row, " -inf ") != NULL && strstr(row, " exact ") != NULL, row);
    }
    for (i = 0; i < profile.n_vectors; i++) {
        sprintf(line, "\n     %6d%7d  ", (int)profile.vectors[i].at, (int)profile.vectors[i].size);
        CHECK(strstr((const char *)text.data, line) != NULL, line);
    }
    moe_buffer_free(&text);
    moe_profile_free(&profile);
    moe_profile_free(&profile);
    moe_profile_free(NULL);
    moe_model_free(&built);
    moe_net_free(&net);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "quick") == 0) seeds = 40;
    if (argc > 2 && strcmp(argv[1], "seed") == 0) first_seed = strtoull(argv[2], NULL, 10);
    CASE(test_random());
    CASE(test_alone());
    CASE(test_saturated());
    CASE(test_saturated_curves());
    CASE(test_refused());
    CASE(test_memory());
    CASE(test_header());
    return test_end();
}
