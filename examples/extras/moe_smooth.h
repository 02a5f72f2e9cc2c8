/* moe_smooth.h - moves outliers of activations into weights before quantization - an extra of moe

   An activation channel that is much larger than the others costs them precision in int8.
   SmoothQuant divides such channels by s and multiplies the weights that read them by s, so that
   both quantize well and the float network computes the same. It needs no training. MIT or public
   domain, as moe.h.

   Contents (search for the tag)
     >>call        moe_smooth
     >>manual      what is scaled and what is not
     >>code        the implementation

   Recipe
     1. Copy moe_smooth.h into your project, beside moe.h.
     2. Include it after moe.h. Where MOE_IMPLEMENTATION is defined, it brings its implementation.
     It needs no option and no other extra.

   First program: a norm's gain with an outlier, before a layer of experts.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "moe_smooth.h"
 * #include <stdio.h>
 * #include <string.h>
 *
 * int main(void) {
 *     static moe_real x[64 * 8];
 *     moe_layer_config experts; // {0}: 8 experts, the best 2 for each token
 *     moe_smooth_result result;
 *     moe_rng rng = {1};
 *     moe_net net;
 *     moe_data data;
 *     moe_error error;
 *     moe_tensor gain;
 *     int i;
 *     memset(&experts, 0, sizeof experts);
 *     memset(&data, 0, sizeof data);
 *     moe_net_init(&net, 8, 0, NULL);
 *     moe_net_rms_norm(&net);
 *     moe_net_mixture(&net, &experts);
 *     if (moe_net_build(&net, 0, 1, &error)) return puts(error.message), 1;
 *     if (moe_net_find(&net, "0.weight", &gain)) return 1;
 *     gain.data[3] = 64; // the outlier
 *     for (i = 0; i < 64 * 8; i++) x[i] = moe_rng_normal(&rng);
 *     data.n = 64;
 *     data.x = x;
 *     if (moe_smooth(&net, &data, NULL, &result, &error)) return puts(error.message), 1;
 *     printf("%d channels of %d modules, s up to 2^%d; the gain is now %g\n", (int)result.channels,
 *            (int)result.modules, result.most, (double)gain.data[3]);
 *     moe_net_free(&net);
 *     return 0;
 * }
 * --- end ---

   Options: those of moe.h. MOE_NO_TRAIN and MOE_NO_FLOAT leave out everything.

   >>manual

   Call it on a trained network before moe_net_quantize, moe_layer_pack or moe_model_create. For
   channel j, with max |x_j| over the data and max |w_j| over all weights that read the channel,
     s_j = 2^round(log2(max |x_j|^alpha / max |w_j|^(1 - alpha)))
   (Xiao et al. 2023, SmoothQuant: Accurate and efficient post-training quantization for large
   language models; there s is not a power of two). A channel keeps s = 1 if one of the maxima is 0,
   s is not 2^-16 to 2^16, or a weight would leave the normal range.

   alpha = 0.5 suits 8 bits on both sides. 4-bit weights tolerate less: try 0.25. Without outliers
   smoothing gains little, and int4 can get worse: compare (`sh examples/run quantize --smooth`).

   Channels that are scaled:
     hidden channels of experts   the rows of up (swiglu, glu, factorised, shared experts) or fc1
       (mlp with act = relu or identity) and their biases by 1/s, the columns of down or fc2 by s;
       each expert has its own s. Not: mlp with another act, swiglu_limit, swiglu_offset, a score
       that reads the channel (norm, attentive)
     outputs of layer_norm and rms_norm   g and b by 1/s; the columns of all weights that read them
       by s: those of the linear, convolution, attention, feed_forward or mixture module after the
       norm (experts or latent.in, shared experts, router). Not: any other module after it, a
       residual that also reads it, add_input, copy and constant experts, a later MoE layer whose
       clusters read it; a router that does not read it linearly: score = cosine, grap or custom,
       select = custom, refine, scaled_rms, adaptive_clustering, soft_normalise, capacity_bound.
       Such a router is allowed with raw_input = 1, unless it is custom: it does not read the norm

   Exactness. A factor 2^k changes no digit of a product or sum, so y keeps its bits, with all
   kernels, MOE_TYPE_REAL weights and any number of threads, in inference and in training, unless an
   activation leaves the normal range of moe_real. A second call on the same data changes nothing.
   Losses that read weights or inputs (orthogonal, similarity), gradients, weight decay and the
   moments of a trainer do change: smooth after training. Decoding caches stay valid.

   Errors, NULL and promises are as in moe.h. Threads: there are no globals.
*/
#ifndef MOE_H
#error "moe_smooth.h: include moe.h before it"
#endif

#ifndef MOE_SMOOTH_H
#define MOE_SMOOTH_H

#if !defined(MOE_NO_TRAIN) && !defined(MOE_NO_FLOAT)

#if MOE_REAL_IS_DOUBLE
#define moe_smooth moe_smooth_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>call ================================================================================== */

/* {0} is a valid default. */
typedef struct moe_smooth_config {
    moe_real alpha; /* the share of an outlier that moves into weights, above 0 and up to 1 [0.5] */
} moe_smooth_config;

typedef struct moe_smooth_result {
    size_t modules;  /* that read scaled channels */
    size_t channels; /* whose s is not 1; each expert's hidden channels count */
    int least, most; /* exponents of s: log2 of the smallest and of the largest, or of 1 */
} moe_smooth_result;

/* Smooths a built network. data: representative inputs, as for moe_evaluate, but labels and targets
   are not needed. Runs the network on them, with memory from its allocator. config NULL: {0};
   result may be NULL.
     MOE_ERR_ARGUMENT     NULL, n = 0, inputs that moe_evaluate refuses; as moe_net_forward
     MOE_ERR_CONFIG       alpha is out of range
     MOE_ERR_STATE        not built, packed, or has tensors that are not its own (external)
     MOE_ERR_UNSUPPORTED  the network has a transport
     MOE_ERR_NONFINITE    an activation is infinite or NaN; as moe_net_forward
     MOE_ERR_MEMORY, MOE_ERR_OVERFLOW
   On failure the network and *result are unchanged. */
MOE_API moe_status moe_smooth(moe_net *net, const moe_data *data, const moe_smooth_config *config,
                              moe_smooth_result *result, moe_error *error);

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_TRAIN */
#endif /* MOE_SMOOTH_H */

/* ==== >>code ================================================================================== */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_SMOOTH_IMPLEMENTED)
#define MOEI_SMOOTH_IMPLEMENTED

#if !defined(MOE_NO_TRAIN) && !defined(MOE_NO_FLOAT)

#include <float.h>
#include <math.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MOEI_SMOOTH_EXPONENT = 16, MOEI_SMOOTH_READERS = 16, MOEI_SMOOTH_SEQUENCES = 512 };

/* The channels of one vector. Channel j is a row of each source and a column of each reader. */
typedef struct moei_channels {
    size_t n;
    moe_real *source[2], *reader[MOEI_SMOOTH_READERS]; /* [n,width], [rows,n] */
    size_t width[2], rows[MOEI_SMOOTH_READERS];
    int n_sources, n_readers;
} moei_channels;

typedef struct moei_smoothing {
    const moe_net *net;
    double alpha;
    moe_real *most; /* the largest magnitudes of the channels, vector after vector */
    size_t n_most, widest;
    moe_real *least_w, *most_w, *s; /* [widest] magnitudes of one vector's readers; s */
    moe_smooth_result found;
} moei_smoothing;

/* The hidden vectors of a layer's experts that can be scaled. */
typedef struct moei_hidden {
    int node;
    size_t experts, width, ld, in, out;
    const moei_step *source, *reader;
} moei_hidden;

/* Fills *h for experts of a kind; 0: there are no hidden channels that scale exactly. */
static int moei_hidden_of(const moe_layer *layer, int kind, moei_hidden *h) {
    const moei_expert_run run = moei_expert_run_begin(layer, kind, 0);
    const moei_step *steps = run.kind->steps, *made = steps;
    int from, i;
    size_t first;
    memset(h, 0, sizeof *h);
    if (run.kind->n_stages < 2) return 0;
    h->reader = h->source = &steps[run.kind->n_steps - 1];
    h->node = h->reader->from;
    for (i = 0; i < run.kind->n_steps; i++)
        if (steps[i].to == h->node) made = &steps[i];
    if (made->op == MOEI_STEP_GATED) {
        from = made->second;
        if (run.limit < MOEI_INFINITY || run.offset < 0 || run.offset > 0) return 0;
    } else {
        from = made->from;
        if (run.act != MOE_ACT_RELU && run.act != MOE_ACT_IDENTITY) return 0;
    }
    if (run.scored == from || run.scored == h->node) return 0;
    for (i = 0; i < run.kind->n_steps; i++)
        if (steps[i].to == from) h->source = &steps[i];
    h->experts = kind == MOEI_SHARED ? 1 : moei_own_experts(&layer->config, &first);
    h->width = run.width[h->node];
    h->ld = run.ld[h->node];
    h->in = run.width[h->source->from];
    h->out = run.width[MOE_NODE_OUTPUT];
    return 1;
}

/* The kinds of experts of a layer: k = 0, 1, ...; -1: no more. */
static int moei_smooth_kind(const moe_layer *layer, int k) {
    if (k == 0) return layer->config.expert;
    return k == 1 && layer->config.n_shared > 0 ? (int)MOEI_SHARED : -1;
}

static int moei_smooth_is_norm(const moe_module *m) {
    return m->kind == MOE_MODULE_LAYER_NORM || m->kind == MOE_MODULE_RMS_NORM;
}

/* ---- the largest magnitudes ---- */

/* Raises most [n] to the magnitudes of x; NaN counts as infinite. */
static void moei_smooth_include(moe_real *most, const moe_real *x, size_t rows, size_t n, size_t ld) {
    size_t i, j;
    for (i = 0; i < rows; i++)
        for (j = 0; j < n; j++) {
            const moe_real a = MOEI_F(fabs)(x[i * ld + j]);
            if (!(a <= most[j])) most[j] = a < MOEI_INFINITY ? a : MOEI_INFINITY;
        }
}

/* Includes the hidden vectors of expert e, in the rows that a call with keep = 1 stores. */
static void moei_smooth_hidden(const moei_hidden *h, const moe_layer_pass *p, int kind, size_t e, moe_real *most) {
    const moe_dispatch_plan *plan = &p->routing.plan;
    const size_t n = p->call.n_tokens;
    size_t first;
    if (kind == MOEI_SHARED) moei_smooth_include(most, p->shared[h->node], n, h->width, h->ld);
    else if (p->all[h->node] != NULL) /* computed for all tokens, because the score reads it */
        moei_smooth_include(most, p->all[h->node] + e * n * h->width, n, h->width, h->width);
    else {
        first = plan->rows > 0 ? e * plan->rows : plan->offsets[e];
        moei_smooth_include(most, p->node[h->node] + first * h->ld,
                            plan->rows > 0 ? plan->rows : plan->offsets[e + 1] - first, h->width, h->ld);
    }
}

/* Includes the activations of a pass; pass NULL: counts the channels. */
static void moei_smooth_pass(moei_smoothing *s, const moe_net_pass *pass) {
    moei_hidden h;
    size_t at = 0, i, e;
    int k, kind;
    for (i = 0; i < s->net->n_modules; i++) {
        const moe_module *m = &s->net->modules[i];
        size_t width = (size_t)m->d_out;
        if (moei_smooth_is_norm(m)) {
            if (pass != NULL) moei_smooth_include(s->most + at, pass->modules[i].y, pass->n_tokens, width, width);
            at += width;
            if (width > s->widest) s->widest = width;
        }
        for (k = 0; moei_is_layer(m) && (kind = moei_smooth_kind(&m->layer, k)) >= 0; k++) {
            if (!moei_hidden_of(&m->layer, kind, &h)) continue;
            for (e = 0; e < h.experts; e++, at += h.width)
                if (pass != NULL) moei_smooth_hidden(&h, pass->modules[i].layer, kind, e, s->most + at);
            if (h.width > s->widest) s->widest = h.width;
        }
    }
    s->n_most = at;
}

/* Runs the network over the data, in batches as moe_evaluate. */
static moe_status moei_smooth_measure(moei_smoothing *s, const moe_data *data, moe_error *error) {
    const moe_net *net = s->net;
    const size_t batch = moei_evaluate_most(net, data);
    int32_t starts[MOEI_SMOOTH_SEQUENCES + 1];
    moe_net_pass pass;
    moe_error why;
    void *work = NULL;
    size_t at, i, bytes = 0;
    moe_status status = moe_net_work_size(net, batch, 1, &bytes);
    memset(&why, 0, sizeof why);
    if (status == MOE_OK && (work = moei_alloc(&net->allocator, bytes, 1)) == NULL) status = MOE_ERR_MEMORY;
    for (at = 0; at < data->n && status == MOE_OK; at += batch) {
        const moe_data part = moei_data_part(net, data, at, data->n - at < batch ? data->n - at : batch);
        moe_call call = moei_data_call(&part, starts);
        call.keep = 1; /* the rows of all experts */
        call.error = &why;
        status = moe_net_forward(net, &call, work, bytes, &pass);
        if (status == MOE_OK) moei_smooth_pass(s, &pass);
    }
    moei_free(&net->allocator, work, bytes);
    if (status != MOE_OK)
        return moei_error(error, status, "data: %s", why.message[0] != '\0' ? why.message : moe_status_text(status));
    for (i = 0; i < s->n_most; i++)
        if (!moe_is_finite(s->most[i]))
            return moei_error(error, MOE_ERR_NONFINITE, "data: the network computes an infinite number or NaN");
    return MOE_OK;
}

/* ---- scaling ---- */

/* The smallest nonzero and the largest magnitude of each of n columns. */
static void moei_smooth_extremes(const moe_real *w, size_t rows, size_t n, moe_real *least, moe_real *most) {
    size_t i, j;
    for (i = 0; i < rows; i++)
        for (j = 0; j < n; j++) {
            const moe_real a = MOEI_F(fabs)(w[i * n + j]);
            if (a > most[j]) most[j] = a;
            if (a > 0 && a < least[j]) least[j] = a;
        }
}

/* Exact for powers of two. */
static double moei_smooth_log2(moe_real x) {
    int exponent = 0; /* frexp may not set it if x is infinite */
    const double fraction = frexp((double)x, &exponent);
    return (double)exponent + log(fraction) / log(2.0);
}

/* Whether numbers of these magnitudes (infinity, 0 if all are 0) stay normal when scaled by 2^k. */
static int moei_smooth_fits(moe_real least, moe_real most, int k) {
    const double smallest = MOE_REAL_IS_DOUBLE ? DBL_MIN : (double)FLT_MIN;
    const double largest = MOE_REAL_IS_DOUBLE ? DBL_MAX : (double)FLT_MAX;
    return ldexp((double)least, k) >= smallest && ldexp((double)most, k) <= largest;
}

/* log2 of s for channel j. */
static int moei_smooth_exponent(const moei_smoothing *s, const moei_channels *c, size_t j, moe_real most_x) {
    double wanted;
    int k, i;
    if (!(most_x > 0 && s->most_w[j] > 0)) return 0;
    wanted = s->alpha * moei_smooth_log2(most_x) - (1.0 - s->alpha) * moei_smooth_log2(s->most_w[j]);
    wanted = floor(wanted + 0.5);
    if (!(fabs(wanted) <= (double)MOEI_SMOOTH_EXPONENT)) return 0; /* a weight may be infinite */
    k = (int)wanted;
    if (!moei_smooth_fits(s->least_w[j], s->most_w[j], k)) return 0;
    for (i = 0; i < c->n_sources; i++) {
        moe_real least = MOEI_INFINITY, most = 0;
        moei_smooth_extremes(c->source[i] + j * c->width[i], c->width[i], 1, &least, &most);
        if (!moei_smooth_fits(least, most, -k)) return 0;
    }
    return k;
}

/* Scales the channels of a vector, whose largest magnitudes are most_x[n]. */
static void moei_smooth_channels(moei_smoothing *s, const moei_channels *c, const moe_real *most_x) {
    size_t j, r;
    int i;
    for (j = 0; j < c->n; j++) {
        s->least_w[j] = MOEI_INFINITY;
        s->most_w[j] = 0;
    }
    for (i = 0; i < c->n_readers; i++) moei_smooth_extremes(c->reader[i], c->rows[i], c->n, s->least_w, s->most_w);
    for (j = 0; j < c->n; j++) {
        const int k = moei_smooth_exponent(s, c, j, most_x[j]);
        s->s[j] = (moe_real)ldexp(1.0, k);
        s->found.channels += k != 0;
        if (k < s->found.least) s->found.least = k;
        if (k > s->found.most) s->found.most = k;
        for (i = 0; i < c->n_sources && k != 0; i++)
            for (r = 0; r < c->width[i]; r++) c->source[i][j * c->width[i] + r] /= s->s[j];
    }
    for (i = 0; i < c->n_readers; i++)
        for (r = 0; r < c->rows[i]; r++)
            for (j = 0; j < c->n; j++) c->reader[i][r * c->n + j] *= s->s[j];
}

/* A layer's tensor, writable because it lies in the memory of the network. */
static moe_real *moei_smooth_tensor(const moe_layer *layer, int index) {
    moe_real *values = NULL;
    if (index >= 0) memcpy(&values, &layer->tensors[index], sizeof values);
    return values;
}

static void moei_smooth_source(moei_channels *c, moe_real *values, size_t width) {
    if (values == NULL) return;
    c->source[c->n_sources] = values;
    c->width[c->n_sources++] = width;
}

static void moei_smooth_reader(moei_channels *c, moe_real *values, size_t rows) {
    c->reader[c->n_readers] = values;
    c->rows[c->n_readers++] = rows;
}

/* Scales the hidden channels of all experts of a layer; returns their number. */
static size_t moei_smooth_experts(moei_smoothing *s, const moe_layer *layer, const moe_real *most) {
    moei_channels c;
    moei_hidden h;
    size_t e, at = 0;
    int k, kind;
    for (k = 0; (kind = moei_smooth_kind(layer, k)) >= 0; k++) {
        if (!moei_hidden_of(layer, kind, &h)) continue;
        for (e = 0; e < h.experts; e++, at += h.width) {
            moe_real *bias = moei_smooth_tensor(layer, h.source->bias);
            memset(&c, 0, sizeof c);
            c.n = h.width;
            moei_smooth_source(&c, moei_smooth_tensor(layer, h.source->weight) + e * h.width * h.in, h.in);
            moei_smooth_source(&c, bias != NULL ? bias + e * h.width : NULL, 1);
            moei_smooth_reader(&c, moei_smooth_tensor(layer, h.reader->weight) + e * h.out * h.width, h.out);
            moei_smooth_channels(s, &c, most + at);
        }
    }
    return at;
}

/* ---- what reads a norm ---- */

/* Adds a layer's tensor [..,n] to the readers, if the layer has it. */
static void moei_smooth_parameter(moei_channels *c, const moe_layer *layer, int index) {
    moe_parameter slot;
    if (moe_layer_parameter(&layer->config, index, &slot) == MOE_OK)
        moei_smooth_reader(c, moei_smooth_tensor(layer, index), slot.count / c->n);
}

/* Whether a router's results stay the same if its input and the tensors that read it are scaled. */
static int moei_smooth_router_fits(const moe_router_config *r) {
    if (r->score == MOE_SCORE_CUSTOM || r->select == MOE_SELECT_CUSTOM || r->switch_from == MOE_SELECT_CUSTOM) return 0;
    if (r->raw_input) return 1; /* it reads the input of the norm */
    return (r->input == MOE_INPUT_PLAIN || r->input == MOE_INPUT_JITTER) && r->refine == MOE_REFINE_NONE &&
           r->score != MOE_SCORE_COSINE && r->score != MOE_SCORE_GRAP && !r->soft_normalise &&
           r->capacity_bound == MOE_BOUND_NONE;
}

/* Whether the next MoE layer's router clusters the inputs of this one. */
static int moei_smooth_clustered(const moe_net *net, size_t i) {
    for (i++; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE)
            return net->modules[i].layer.config.router.input == MOE_INPUT_ADAPTIVE_CLUSTERING;
    return 0;
}

/* Collects the tensors that read a layer's input; 0: something else reads it, too. */
static int moei_smooth_layer_reads(const moe_net *net, size_t i, moei_channels *c) {
    static const int of_router[] = {MOE_ROUTER_WEIGHT,  MOE_ROUTER_FC1_WEIGHT,   MOE_ROUTER_NOISE_WEIGHT,
                                    MOE_ROUTER_STUDENT, MOE_ROUTER_SLOT_VECTORS, MOE_ROUTER_CODES,
                                    MOE_ROUTER_MIX,     MOE_ROUTER_PREDICTOR};
    const moe_layer *layer = &net->modules[i].layer;
    const moe_layer_config *l = &layer->config;
    const int routes = net->modules[i].kind == MOE_MODULE_MIXTURE;
    size_t j;
    int k, kind, step;
    if (routes && (!moei_smooth_router_fits(&l->router) || moei_smooth_clustered(net, i))) return 0;
    if (l->add_input || l->router.n_copy + l->router.n_constant > 0) return 0;
    for (k = 0; (kind = moei_smooth_kind(layer, k)) >= 0; k++) {
        if (k == 0 && l->d_latent > 0) kind = MOEI_LATENT_IN;
        for (step = 0; step < moei_experts[kind].n_steps; step++)
            if (moei_experts[kind].steps[step].from == MOEI_X)
                moei_smooth_parameter(c, layer, moei_experts[kind].steps[step].weight);
    }
    moei_smooth_parameter(c, layer, MOE_SHARED_SIGMOID);
    for (j = 0; j < sizeof of_router / sizeof *of_router && routes && !l->router.raw_input; j++)
        moei_smooth_parameter(c, layer, of_router[j]);
    return 1;
}

/* The matrices with which a module other than a layer reads its input, as bits; 0: it reads it in
   another way. */
static unsigned moei_smooth_places(const moe_module *m) {
    if (m->kind == MOE_MODULE_LINEAR) return 1u << MOE_MODULE_WEIGHT;
    if (m->kind == MOE_MODULE_CONVOLUTION) return 1u << MOE_MODULE_IN;
    if (m->kind != MOE_MODULE_ATTENTION) return 0;
    if (m->attention.kv_lora == 0) return 1u << MOE_MODULE_QUERY | 1u << MOE_MODULE_KEY | 1u << MOE_MODULE_VALUE;
    return 1u << MOE_MODULE_LATENT | 1u << (m->attention.q_lora > 0 ? MOE_MODULE_QUERY_DOWN : MOE_MODULE_QUERY);
}

/* The channels of the output of norm i, which is not the last module; 0: they cannot be scaled.
   Without readers nothing is scaled. */
static int moei_smooth_norm(const moe_net *net, size_t i, moei_channels *c) {
    const moe_module *norm = &net->modules[i], *m = norm + 1;
    int place;
    if (moei_last_reader(net, i) != i + 1) return 0;
    memset(c, 0, sizeof *c);
    c->n = (size_t)norm->d_out;
    moei_smooth_source(c, norm->tensors[MOE_MODULE_WEIGHT], 1);
    moei_smooth_source(c, norm->tensors[MOE_MODULE_BIAS], 1);
    if (moei_is_layer(m)) return moei_smooth_layer_reads(net, i + 1, c);
    for (place = 0; place < MOE_MODULE_SLOTS; place++)
        if (moei_smooth_places(m) >> place & 1u)
            moei_smooth_reader(c, m->tensors[place], (size_t)moei_module_tensor_of(m, place).rows);
    return 1;
}

/* Scales all vectors: a module's hidden ones before the norm that it reads. So in a second call the
   norm finds the same rows of up, whose s are then 1. */
static void moei_smooth_net(moei_smoothing *s) {
    const moe_net *net = s->net;
    const moe_real *of_norm = s->most, *most = s->most;
    moei_channels c;
    size_t i;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        const moe_real *own = most;
        const size_t before = s->found.channels;
        if (moei_is_layer(m)) most += moei_smooth_experts(s, &m->layer, most);
        if (i > 0 && moei_smooth_is_norm(m - 1) && moei_smooth_norm(net, i - 1, &c))
            moei_smooth_channels(s, &c, of_norm);
        if (moei_smooth_is_norm(m)) most += (size_t)m->d_out;
        of_norm = own;
        s->found.modules += s->found.channels > before;
    }
}

/* ---- the call ---- */

/* Checks that all tensors lie in the network's memory, and that none is packed. */
static moe_status moei_smooth_state(const moe_net *net, moe_error *error) {
    size_t i;
    int j;
    if (!net->built) return moei_error(error, MOE_ERR_STATE, "the network is not built");
    if (net->transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED,
                          "net.transport must be NULL: smoothing needs the data of all ranks");
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        int external = net->external || m->external != NULL;
        for (j = 0; j < MOE_LAYER_PARAMETER_COUNT; j++) external |= m->layer.external[j] != NULL;
        if (external || m->layer.is_packed)
            return moei_error(error, MOE_ERR_STATE, "module %z (%s) %s", i, moei_module_names[m->kind],
                              external ? "has tensors that are not the network's own (external)"
                                       : "is packed: smooth before packing");
    }
    return MOE_OK;
}

static moe_status moei_smooth_check(const moe_net *net, const moe_data *data, const moe_smooth_config *config,
                                    moe_error *error) {
    moe_status status;
    if (net == NULL || data == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "%s must not be NULL", net == NULL ? "net" : "data");
    if (config != NULL && !(config->alpha >= 0 && config->alpha <= MOEI_R(1.0)))
        return moei_error(error, MOE_ERR_CONFIG, "alpha = %g: must be above 0 and at most 1, or 0 for 0.5",
                          (double)config->alpha);
    status = moei_smooth_state(net, error);
    if (status != MOE_OK) return status;
    if (data->n == 0) return moei_error(error, MOE_ERR_ARGUMENT, "n = 0: samples are needed to measure activations");
    if (data->length > 0 && data->n % data->length != 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "n = %z: must be a multiple of length = %z", data->n, data->length);
    status = moei_samples_alone(net, data, error);
    if (status == MOE_OK) status = moei_length_check(net, data, error);
    return status == MOE_OK ? moei_inputs_check(net, data, error) : status;
}

moe_status moe_smooth(moe_net *net, const moe_data *data, const moe_smooth_config *config, moe_smooth_result *result,
                      moe_error *error) {
    moei_smoothing s;
    size_t numbers;
    moe_status status = moei_smooth_check(net, data, config, error);
    if (status != MOE_OK) return status;
    memset(&s, 0, sizeof s);
    s.net = net;
    s.alpha = config != NULL && config->alpha > 0 ? (double)config->alpha : 0.5;
    moei_smooth_pass(&s, NULL);
    numbers = s.n_most + 3 * s.widest; /* no overflow: at most four per row of a matrix or norm in memory */
    if (numbers > 0) {
        s.most = (moe_real *)moei_alloc(&net->allocator, numbers, sizeof *s.most);
        if (s.most == NULL)
            return moei_error(error, MOE_ERR_MEMORY, "no memory for the maxima of %z channels", s.n_most);
        s.least_w = s.most + s.n_most;
        s.most_w = s.least_w + s.widest;
        s.s = s.most_w + s.widest;
        status = moei_smooth_measure(&s, data, error);
        if (status == MOE_OK) moei_smooth_net(&s);
        moei_free(&net->allocator, s.most, numbers * sizeof *s.most);
    }
    if (status == MOE_OK && result != NULL) *result = s.found;
    return status;
}

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_TRAIN */
#endif /* MOE_IMPLEMENTATION */
