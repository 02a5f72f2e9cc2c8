/* attention.c - networks that read token ids and attend (embedding, positions, attention, rms_norm,
   dropout, feed_forward, tied), decoding with a cache, and the choice of the next token, against
   the definitions in moe.h written out as loops over double.

     cc -std=c99 -O2 -I. tests/unit/attention.c -o attention -lm && ./attention [-v]
     (also with -DMOE_REAL=double, and as C++)

   The double build checks gradients. -v prints what was measured. Exit status 1 if a check
   failed. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MOE_REAL_IS_DOUBLE
#define NEAR 1e-11
#else
#define NEAR 2e-5
#endif

enum { MOST_TOKENS = 160, MOST_WIDTH = 64, FEW_TOKENS = 40 };

static int verbose;
static moe_rng rng;
static char doing[300]; /* is test_about */

static void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(doing, sizeof doing, format, arguments);
    va_end(arguments);
}

/* Whether a message has all the words, which are separated by |. */
#define CHECK_WORDS(message, words) check_words(message, words, __LINE__)

static void check_words(const char *message, const char *words, int line) {
    char word[100];
    while (*words != '\0') {
        size_t n = strcspn(words, "|");
        sprintf(word, "%.*s", (int)n, words);
        if (!CHECK_AT(line, strstr(message, word) != NULL, "the message names it") && test_shown)
            printf("        '%s' is not in: %s\n", word, message);
        words += n + (words[n] == '|');
    }
}

/* ---- memory: what a test grabs lives until it tidies up ---- */

enum { MOST_BLOCKS = 20000 };

static void *blocks[MOST_BLOCKS];
static size_t n_blocks;

static void *pooled(size_t count, size_t size) {
    void *p = calloc(count > 0 ? count : 1, size);
    if (p == NULL || n_blocks == MOST_BLOCKS) {
        fprintf(stderr, "attention: out of memory\n");
        exit(2);
    }
    blocks[n_blocks++] = p;
    return p;
}

static void tidy(size_t mark) {
    while (n_blocks > mark) free(blocks[--n_blocks]);
}

static moe_real *pooled_reals(size_t count) { return (moe_real *)pooled(count, sizeof(moe_real)); }
static double *doubles(size_t count) { return (double *)pooled(count, sizeof(double)); }

static moe_real *normals(size_t count, double spread) {
    moe_real *v = pooled_reals(count);
    size_t i;
    for (i = 0; i < count; i++) v[i] = (moe_real)spread * moe_rng_normal(&rng);
    return v;
}

static double *widened(const moe_real *v, size_t count) {
    double *wide = doubles(count);
    size_t i;
    for (i = 0; i < count; i++) wide[i] = (double)v[i];
    return wide;
}

static moe_real *narrowed(const double *v, size_t count) {
    moe_real *narrow = pooled_reals(count);
    size_t i;
    for (i = 0; i < count; i++) narrow[i] = (moe_real)v[i];
    return narrow;
}

static moe_real *copied(const moe_real *v, size_t count) {
    moe_real *copy = pooled_reals(count);
    memcpy(copy, v, count * sizeof *copy);
    return copy;
}

static int below(int n) { return (int)moe_rng_below(&rng, (uint64_t)n); }
static int chance(int percent) { return below(100) < percent; }

/* The largest distance as a share of the largest number; infinite where something is not a
   number. */
static double distance(const moe_real *got, const double *wanted, size_t count) {
    double largest = 0.0, most = 0.0;
    size_t i;
    for (i = 0; i < count; i++) {
        double off = fabs((double)got[i] - wanted[i]);
        if (!(off < HUGE_VAL)) return HUGE_VAL;
        if (off > most) most = off;
        if (fabs(wanted[i]) > largest) largest = fabs(wanted[i]);
    }
    return most / (largest + 1e-3);
}

#define CHECK_CLOSE(got, wanted, count, what) check_close(got, wanted, count, what, __LINE__)

static void check_close(const moe_real *got, const double *wanted, size_t count, const char *what, int line) {
    double off = distance(got, wanted, count);
    if (!CHECK_AT(line, off <= NEAR, what) && test_shown) printf("        off by %.2g of the largest\n", off);
}

/* ---- tokens of a call ---- */

enum { WITH_MASK = 1, WITH_SEQUENCES = 2, WITH_NAN = 4 }; /* WITH_NAN: in the rows of padding */

typedef struct tokens {
    moe_call call;
    size_t n, d;
    moe_real x[MOST_TOKENS * MOST_WIDTH];
    int32_t ids[MOST_TOKENS];
    unsigned char mask[MOST_TOKENS];
    int32_t sequences[6];
} tokens;

/* One to five sequences; some may be empty. */
static void cut_sequences(tokens *t) {
    size_t parts = 1 + (size_t)below(5), i, k;
    for (i = 1; i <= parts; i++) {
        int32_t cut = (int32_t)(i < parts ? (size_t)below((int)t->n + 1) : t->n);
        for (k = i; t->sequences[k - 1] > cut; k--) t->sequences[k] = t->sequences[k - 1];
        t->sequences[k] = cut;
    }
    t->call.sequences = t->sequences;
    t->call.n_sequences = parts;
}

/* vocabulary 0: rows of width d instead of ids. */
static tokens *draw_tokens(size_t n, size_t d, int vocabulary, int with) {
    tokens *t = (tokens *)pooled(1, sizeof *t);
    size_t i, k;
    t->n = t->call.n_tokens = n;
    t->d = d;
    for (i = 0; i < n; i++) {
        for (k = 0; k < d && vocabulary == 0; k++) t->x[i * d + k] = moe_rng_normal(&rng);
        if (vocabulary > 0) t->ids[i] = (int32_t)below(vocabulary);
        t->mask[i] = (unsigned char)chance(70);
    }
    if (vocabulary == 0) t->call.x = t->x;
    else t->call.token_ids = t->ids;
    if (with & WITH_MASK) t->call.mask = t->mask;
    if (with & WITH_SEQUENCES) cut_sequences(t);
    for (i = 0; i < n * d && (with & WITH_NAN) && vocabulary == 0; i++)
        if (!t->mask[i / d]) t->x[i] = (moe_real)NAN;
    return t;
}

static size_t sequence_count(const moe_call *call) { return call->sequences != NULL ? call->n_sequences : 1; }
static size_t sequence_start(const moe_call *call, size_t s) {
    return call->sequences != NULL ? (size_t)call->sequences[s] : 0;
}
static size_t sequence_end(const moe_call *call, size_t s) {
    return call->sequences != NULL ? (size_t)call->sequences[s + 1] : call->n_tokens;
}
static int is_real(const moe_call *call, size_t t) { return call->mask == NULL || call->mask[t]; }

static size_t sequence_of(const moe_call *call, size_t t) {
    size_t s = 0;
    while (sequence_end(call, s) <= t) s++;
    return s;
}

/* ---- networks ---- */

/* Builds, and moves biases and gains away from 0 and 1. */
static int built(moe_net *net, int trainable) {
    moe_error error;
    size_t i, k;
    error.message[0] = '\0';
    if (!CHECK_STATUS(moe_net_build(net, trainable, moe_rng_next(&rng), &error), MOE_OK, "build")) {
        printf("        %s\n", error.message);
        return 0;
    }
    for (i = 0; i < net->n_tensors; i++) {
        const moe_tensor *t = &net->tensors[i];
        for (k = 0; k < t->count && (t->flags & MOE_PARAM_NO_DECAY) && !(t->flags & MOE_PARAM_STATE); k++)
            t->data[k] += (moe_real)0.3 * moe_rng_normal(&rng);
    }
    return 1;
}

/* Work memory of exactly the right size, at an odd address and full of NaN. Lives until the test
   tidies up. */
static moe_status forward(const moe_net *net, const moe_call *call, moe_net_pass *pass) {
    static size_t shift; /* not drawn: calls may use the same rng */
    size_t bytes = 0;
    unsigned char *work;
    moe_status status = moe_net_work_size(net, call->n_tokens, call->training || call->keep, &bytes);
    if (status != MOE_OK) return status;
    shift = (shift + 3) % 8;
    work = (unsigned char *)pooled(bytes + shift, 1);
    memset(work, 0xff, bytes + shift);
    return moe_net_forward(net, call, work + shift, bytes, pass);
}

static const moe_real *outputs(const moe_net *net, const moe_call *call) {
    moe_net_pass pass;
    return CHECK_STATUS(forward(net, call, &pass), MOE_OK, "forward")
               ? pass.y
               : pooled_reals(call->n_tokens * (size_t)net->d_out);
}

/* Tensor "i.name" in double. */
static double *weights(const moe_net *net, size_t i, const char *name) {
    char full[MOE_NAME_SIZE];
    const moe_tensor *t;
    sprintf(full, "%d.%.50s", (int)i, name);
    t = net_tensor(net, full);
    if (CHECK(t != NULL, full)) return widened(t->data, t->count);
    exit(1);
}

static int has_shape(const moe_net *net, const char *name, size_t n0, size_t n1, size_t n2) {
    const moe_tensor *t = net_tensor(net, name);
    if (t == NULL) return 0;
    if (n2 > 0) return t->n_dims == 3 && t->shape[0] == n0 && t->shape[1] == n1 && t->shape[2] == n2;
    if (n1 > 0) return t->n_dims == 2 && t->shape[0] == n0 && t->shape[1] == n1;
    return t->n_dims == 1 && t->shape[0] == n0;
}

/* ---- the definitions ---- */

/* y[rows,out] = x[rows,in] W^T + b; b may be NULL. */
static double *ref_affine(size_t rows, size_t out, size_t in, const double *x, const double *w, const double *b) {
    double *y = doubles(rows * out);
    size_t t, j, p;
    for (t = 0; t < rows; t++)
        for (j = 0; j < out; j++) {
            double sum = b != NULL ? b[j] : 0.0;
            for (p = 0; p < in; p++) sum += x[t * in + p] * w[j * in + p];
            y[t * out + j] = sum;
        }
    return y;
}

static double ref_act(int act, double v) {
    switch (act) {
    case MOE_ACT_RELU: return v > 0.0 ? v : 0.0;
    case MOE_ACT_SILU: return v / (1.0 + exp(-v));
    case MOE_ACT_GELU: return v * 0.5 * (1.0 + erf(v / sqrt(2.0)));
    case MOE_ACT_TANH: return tanh(v);
    case MOE_ACT_SIGMOID: return 1.0 / (1.0 + exp(-v));
    case MOE_ACT_GELU_TANH: return 0.5 * v * (1.0 + tanh(0.79788456080286535588 * (v + 0.044715 * v * v * v)));
    case MOE_ACT_RELU2: return v > 0.0 ? v * v : 0.0;
    default: return v;
    }
}

static double *ref_sum(const double *a, const double *b, size_t count) {
    double *y = doubles(count);
    size_t i;
    for (i = 0; i < count; i++) y[i] = a[i] + b[i];
    return y;
}

static double *ref_rms_norm(size_t rows, size_t d, const double *x, const double *gain) {
    double *y = doubles(rows * d);
    size_t t, i;
    for (t = 0; t < rows; t++) {
        double mean = 0.0;
        for (i = 0; i < d; i++) mean += x[t * d + i] * x[t * d + i] / (double)d;
        for (i = 0; i < d; i++) y[t * d + i] = x[t * d + i] / sqrt(mean + 1e-5) * gain[i];
    }
    return y;
}

static double *ref_layer_norm(size_t rows, size_t d, const double *x, const double *gain, const double *bias) {
    double *y = doubles(rows * d);
    size_t t, i;
    for (t = 0; t < rows; t++) {
        double mean = 0.0, variance = 0.0;
        for (i = 0; i < d; i++) mean += x[t * d + i] / (double)d;
        for (i = 0; i < d; i++) variance += (x[t * d + i] - mean) * (x[t * d + i] - mean) / (double)d;
        for (i = 0; i < d; i++) y[t * d + i] = (x[t * d + i] - mean) / sqrt(variance + 1e-5) * gain[i] + bias[i];
    }
    return y;
}

static double *ref_embedding(size_t n, size_t d, const int32_t *ids, const double *w) {
    double *y = doubles(n * d);
    size_t t;
    for (t = 0; t < n; t++) memcpy(y + t * d, w + (size_t)ids[t] * d, d * sizeof *y);
    return y;
}

static double *ref_positions(const moe_call *call, size_t d, const double *x, const double *p) {
    double *y = doubles(call->n_tokens * d);
    size_t t, i;
    for (t = 0; t < call->n_tokens; t++)
        for (i = 0; i < d; i++)
            y[t * d + i] = x[t * d + i] + p[(t - sequence_start(call, sequence_of(call, t))) * d + i];
    return y;
}

static int takes_act(int expert) { return expert == MOE_EXPERT_MLP || expert == MOE_EXPERT_GLU; }

/* An expert as module i of a network. c is filled in. */
static double *ref_expert(const moe_net *net, size_t i, const moe_layer_config *c, size_t rows, size_t d,
                          const double *x) {
    size_t f = (size_t)c->d_ff, o = (size_t)net->modules[i].d_out, k;
    double *gate, *up;
    if (c->expert == MOE_EXPERT_LINEAR)
        return ref_affine(rows, o, d, x, weights(net, i, "experts.weight"),
                          c->no_expert_bias ? NULL : weights(net, i, "experts.bias"));
    if (c->expert == MOE_EXPERT_MLP) {
        gate = ref_affine(rows, f, d, x, weights(net, i, "experts.fc1.weight"),
                          c->no_expert_bias ? NULL : weights(net, i, "experts.fc1.bias"));
        for (k = 0; k < rows * f; k++) gate[k] = ref_act(c->act, gate[k]);
        return ref_affine(rows, o, f, gate, weights(net, i, "experts.fc2.weight"),
                          c->no_expert_bias ? NULL : weights(net, i, "experts.fc2.bias"));
    }
    if (c->expert == MOE_EXPERT_FACTORISED) {
        size_t low = (size_t)c->d_low;
        gate = ref_affine(rows, f, low, ref_affine(rows, low, d, x, weights(net, i, "experts.reduce"), NULL),
                          weights(net, i, "experts.expand"), NULL);
    } else
        gate = ref_affine(rows, f, d, x, weights(net, i, "experts.gate"),
                          c->expert_bias ? weights(net, i, "experts.gate_bias") : NULL);
    up = ref_affine(rows, f, d, x, weights(net, i, "experts.up"),
                    c->expert_bias ? weights(net, i, "experts.up_bias") : NULL);
    for (k = 0; k < rows * f; k++) {
        const double limit = c->swiglu_limit > 0 ? (double)c->swiglu_limit : HUGE_VAL;
        const double alpha = c->swiglu_alpha > 0 ? (double)c->swiglu_alpha : 1.0;
        const double g = fmin(gate[k], limit), u = fmax(-limit, fmin(up[k], limit));
        if (c->expert == MOE_EXPERT_GLU) gate[k] = ref_act(c->act == 0 ? MOE_ACT_SILU : c->act, g) * u;
        else gate[k] = g / (1.0 + exp(-alpha * g)) * (u + (double)c->swiglu_offset);
    }
    return ref_affine(rows, o, f, gate, weights(net, i, "experts.down"),
                      c->expert_bias ? weights(net, i, "experts.down_bias") : NULL);
}

/* What attention computes on its way. */
typedef struct attention {
    double *weights; /* A [h,N,N] */
    double *heads;   /* o_hj [h,N,d] */
    double *y;       /* [N,d] */
} attention;

/* Turns the halves of every head of every token of q [N,h w] against each other. */
static void ref_rotate(const moe_call *call, const moe_attention_config *c, double *q) {
    size_t h = (size_t)c->heads, w = (size_t)c->d_head, t, head, i;
    for (t = 0; t < call->n_tokens; t++)
        for (head = 0; head < h; head++)
            for (i = 0; i < w / 2; i++) {
                double *a = q + (t * h + head) * w + i, *b = a + w / 2;
                double was = *a;
                double angle = (double)(t - sequence_start(call, sequence_of(call, t))) /
                               pow((double)c->rotary_base, 2.0 * (double)i / (double)w);
                *a = was * cos(angle) - *b * sin(angle);
                *b = *b * cos(angle) + was * sin(angle);
            }
}

/* One row of A: query i of a head over its sequence. */
static void ref_attention_row(const moe_call *call, const moe_attention_config *c, const double *q, const double *k,
                              size_t head, size_t i, double *row) {
    size_t s = sequence_of(call, i), h = (size_t)c->heads;
    size_t w = (size_t)c->d_head, j, e;
    size_t from = sequence_start(call, s), to = c->full ? sequence_end(call, s) : i + 1;
    double sum = 0.0, most = -HUGE_VAL;
    for (j = from; j < to; j++) {
        if (!is_real(call, j)) continue;
        for (e = 0; e < w; e++) row[j] += q[(i * h + head) * w + e] * k[(j * h + head) * w + e] / sqrt((double)w);
        if (row[j] > most) most = row[j];
    }
    for (j = from; j < to; j++)
        if (is_real(call, j)) sum += row[j] = exp(row[j] - most);
    for (j = from; j < to; j++) row[j] /= sum;
}

/* Attention with a filled-in configuration, as module i of a network, on x [N,d]. */
static attention ref_attention(const moe_net *net, size_t i, const moe_attention_config *c, const moe_call *call,
                               const double *x) {
    size_t n = call->n_tokens, d = (size_t)net->modules[i].d_in;
    size_t h = (size_t)c->heads, w = (size_t)c->d_head, t, j, e, k, head;
    double *q = ref_affine(n, h * w, d, x, weights(net, i, "query"), NULL);
    double *key = ref_affine(n, h * w, d, x, weights(net, i, "key"), NULL);
    double *v = ref_affine(n, h * w, d, x, weights(net, i, "value"), NULL), *output = weights(net, i, "output");
    attention a;
    a.weights = doubles(h * n * n);
    a.heads = doubles(h * n * d);
    a.y = doubles(n * d);
    if (c->rotary) {
        ref_rotate(call, c, q);
        ref_rotate(call, c, key);
    }
    for (head = 0; head < h; head++)
        for (t = 0; t < n; t++) {
            double *row = a.weights + (head * n + t) * n;
            if (!is_real(call, t)) continue;
            ref_attention_row(call, c, q, key, head, t, row);
            for (k = 0; k < d; k++)
                for (e = 0; e < w; e++)
                    a.heads[(head * n + t) * d + k] +=
                        (double)h * output[k * h * w + head * w + e] * v[(t * h + head) * w + e];
        }
    for (head = 0; head < h; head++) /* y is the mean over heads of sum_j A_hij o_hj */
        for (t = 0; t < n; t++)
            for (j = 0; j < n && is_real(call, t); j++)
                for (k = 0; k < d && is_real(call, j); k++)
                    a.y[t * d + k] += a.weights[(head * n + t) * n + j] * a.heads[(head * n + j) * d + k] / (double)h;
    return a;
}

/* ---- modules against the definitions ---- */

/* Now and then more than a block of queries. */
static size_t draw_length(void) { return (size_t)(chance(10) ? MOST_TOKENS - below(60) : 1 + below(FEW_TOKENS)); }

static int draw_with(void) { return (chance(60) ? WITH_MASK : 0) | (chance(60) ? WITH_SEQUENCES : 0); }

/* Inference, and training with other workspace, have the same bits. */
static const moe_real *checked_outputs(const moe_net *net, const moe_call *call) {
    moe_call training = *call;
    const moe_real *y = outputs(net, call), *trained;
    training.training = 1;
    trained = outputs(net, &training);
    CHECK(same_reals(y, trained, call->n_tokens * (size_t)net->d_out), "training gives the same y");
    return y;
}

static moe_attention_config draw_attention(void) {
    moe_attention_config c;
    memset(&c, 0, sizeof c);
    c.heads = 1 + below(5);
    c.d_head = 1 + below(9);
    c.full = chance(40);
    c.rotary = chance(50);
    if (c.rotary) {
        c.d_head = 2 * (1 + below(5));
        c.rotary_base = (moe_real)(chance(50) ? 0 : 50);
    }
    return c;
}

static void test_attention(int kernels, int trials) {
    int trial;
    for (trial = 0; trial < trials; trial++) {
        size_t n = draw_length(), d = 1 + (size_t)below(24), i, k;
        moe_attention_config c = draw_attention(), filled = c;
        int with = draw_with();
        tokens *t = draw_tokens(n, d, 0, with | (chance(30) ? with & WITH_MASK ? WITH_NAN : 0 : 0));
        const moe_real *y;
        moe_net net;
        say("attention, kernels %s, %d tokens, d %d, %d heads of %d, full %d, rotary %d, with %d",
            moe_kernels_name(kernels), (int)n, (int)d, c.heads, c.d_head, c.full, c.rotary, with);
        if (c.rotary && c.rotary_base <= (moe_real)0) filled.rotary_base = (moe_real)10000;
        moe_net_init(&net, (int)d, kernels, NULL);
        moe_net_attention(&net, &c);
        if (built(&net, 1)) {
            CHECK(has_shape(&net, "0.query", (size_t)(c.heads * c.d_head), d, 0) &&
                      has_shape(&net, "0.output", d, (size_t)(c.heads * c.d_head), 0),
                  "shapes");
            y = checked_outputs(&net, &t->call);
            CHECK_CLOSE(y, ref_attention(&net, 0, &filled, &t->call, widened(t->x, n * d)).y, n * d, "attention");
            for (i = 0; i < n; i++)
                for (k = 0; k < d && !is_real(&t->call, i); k++)
                    CHECK(y[i * d + k] <= 0 && y[i * d + k] >= 0, "padding gets 0");
        }
        moe_net_free(&net);
        tidy(0);
    }
}

/* What 0 means. */
static void test_attention_defaults(void) {
    static const int widths[][2] = {{1, 1}, {7, 1}, {31, 1}, {32, 1}, {63, 1}, {64, 2}, {33, 1}, {62, 1}};
    static const int large[][2] = {{96, 3}, {100, 2}, {128, 4}, {160, 5}, {224, 7}, {217, 1}, {768, 24}};
    moe_attention_config c;
    moe_net net;
    size_t i;
    for (i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        size_t d = (size_t)widths[i][0], n = 9;
        tokens *t = draw_tokens(n, d, 0, 0);
        say("attention by default, d %d", (int)d);
        memset(&c, 0, sizeof c);
        c.heads = widths[i][1];
        c.d_head = (int)d / c.heads;
        moe_net_init(&net, (int)d, 0, NULL);
        moe_net_attention(&net, NULL);
        if (built(&net, 0))
            CHECK_CLOSE(outputs(&net, &t->call), ref_attention(&net, 0, &c, &t->call, widened(t->x, n * d)).y, n * d,
                        "as many heads");
        moe_net_free(&net);
        tidy(0);
    }
    for (i = 0; i < sizeof large / sizeof large[0]; i++) {
        /* the same bits as with these heads; other heads give others */
        size_t d = (size_t)large[i][0], n = 5;
        moe_call call;
        const moe_real *y[2];
        int k;
        say("attention by default, d %d", (int)d);
        memset(&call, 0, sizeof call);
        memset(&c, 0, sizeof c);
        memset(y, 0, sizeof y);
        call.n_tokens = n;
        call.x = normals(n * d, 1.0);
        c.heads = large[i][1];
        for (k = 0; k < 2; k++) {
            moe_net_init(&net, (int)d, 0, NULL);
            moe_net_attention(&net, k ? &c : NULL);
            if (CHECK_STATUS(moe_net_build(&net, 0, 5, NULL), MOE_OK, "build"))
                y[k] = copied(outputs(&net, &call), n * d);
            moe_net_free(&net);
        }
        CHECK(y[0] != NULL && y[1] != NULL && same_reals(y[0], y[1], n * d), "as many heads");
        tidy(0);
    }
}

static void test_embedding_and_tied(int kernels) {
    int trial;
    for (trial = 0; trial < 20; trial++) {
        size_t n = draw_length(), d = 1 + (size_t)below(20);
        size_t v = 1 + (size_t)below(30);
        tokens *t = draw_tokens(n, d, (int)v, draw_with());
        double *table, *rows;
        moe_net net;
        say("embedding, positions, tied; kernels %s, %d tokens, d %d, %d ids", moe_kernels_name(kernels), (int)n,
            (int)d, (int)v);
        moe_net_init(&net, 0, kernels, NULL);
        moe_net_embedding(&net, (int)v, (int)d);
        if (built(&net, 1)) {
            CHECK(has_shape(&net, "0.weight", v, d, 0) && net.d_in == 0 && net.d_out == (int)d && net.n_tensors == 1,
                  "shape");
            CHECK_CLOSE(checked_outputs(&net, &t->call), ref_embedding(n, d, t->ids, weights(&net, 0, "weight")), n * d,
                        "embedding");
        }
        moe_net_free(&net);
        moe_net_init(&net, 0, kernels, NULL);
        moe_net_embedding(&net, (int)v, (int)d);
        moe_net_positions(&net, MOST_TOKENS);
        moe_net_tied(&net);
        if (built(&net, 1)) {
            CHECK(has_shape(&net, "1.weight", MOST_TOKENS, d, 0) && has_shape(&net, "2.bias", v, 0, 0) &&
                      net.n_tensors == 3,
                  "shapes");
            CHECK(net.d_out == (int)v, "a logit per id");
            table = weights(&net, 0, "weight");
            rows = ref_positions(&t->call, d, ref_embedding(n, d, t->ids, table), weights(&net, 1, "weight"));
            CHECK_CLOSE(checked_outputs(&net, &t->call), ref_affine(n, v, d, rows, table, weights(&net, 2, "bias")),
                        n * v, "tied");
        }
        moe_net_free(&net);
        tidy(0);
    }
}

static void test_rms_norm(int kernels) {
    size_t d, n = 7, i;
    for (d = 1; d <= 40; d += 3) {
        tokens *t = draw_tokens(n, d, 0, 0);
        moe_net net;
        say("rms_norm, kernels %s, d %d", moe_kernels_name(kernels), (int)d);
        for (i = 0; i < d; i++) { /* where 1e-5 counts */
            t->x[d + i] = 0;
            t->x[2 * d + i] *= (moe_real)1e-3;
        }
        moe_net_init(&net, (int)d, kernels, NULL);
        moe_net_rms_norm(&net);
        if (built(&net, 1)) {
            CHECK(has_shape(&net, "0.weight", d, 0, 0) && net.n_tensors == 1, "shape");
            CHECK_CLOSE(checked_outputs(&net, &t->call),
                        ref_rms_norm(n, d, widened(t->x, n * d), weights(&net, 0, "weight")), n * d, "rms_norm");
        }
        moe_net_free(&net);
        tidy(0);
    }
}

static void test_feed_forward(int kernels) {
    int expert, act, more;
    for (expert = 0; expert < MOE_EXPERT_COUNT; expert++)
        for (act = 0; act < (takes_act(expert) ? (int)MOE_ACT_COUNT : 1); act++)
            for (more = 0; more < 4; more++) {
                size_t d = 1 + (size_t)below(12), n = draw_length();
                moe_layer_config c, filled;
                tokens *t = draw_tokens(n, d, 0, draw_with());
                moe_net net;
                memset(&c, 0, sizeof c);
                c.expert = expert;
                c.act = act;
                if (more & 1) c.d_ff = 1 + below(12);
                if ((more & 1) && expert == MOE_EXPERT_FACTORISED) c.d_low = 1 + below(4);
                if ((more & 2) && (expert == MOE_EXPERT_MLP || expert == MOE_EXPERT_LINEAR)) c.no_expert_bias = 1;
                c.expert_bias = (more & 2) && (expert == MOE_EXPERT_SWIGLU || expert == MOE_EXPERT_GLU);
                if ((more & 2) && expert == MOE_EXPERT_SWIGLU) {
                    c.swiglu_alpha = (moe_real)1.702;
                    c.swiglu_limit = (moe_real)0.5;
                    c.swiglu_offset = 1;
                }
                filled = c;
                if (filled.d_low == 0) filled.d_low = ((int)d + 2) / 3;
                if (filled.d_ff == 0 && expert == MOE_EXPERT_FACTORISED)
                    filled.d_ff = (12 * (int)d - filled.d_low) * (int)d / (filled.d_low + 2 * (int)d);
                if (filled.d_ff == 0) filled.d_ff = 4 * (int)d;
                say("feed_forward, kernels %s, expert %d, act %d, d %d, d_ff %d, no_expert_bias %d",
                    moe_kernels_name(kernels), expert, act, (int)d, c.d_ff, c.no_expert_bias);
                moe_net_init(&net, (int)d, kernels, NULL);
                moe_net_feed_forward(&net, expert == 0 && more == 0 ? NULL : &c);
                if (built(&net, 1)) {
                    if (expert == MOE_EXPERT_SWIGLU || expert == MOE_EXPERT_GLU)
                        CHECK(has_shape(&net, "0.experts.gate", 1, (size_t)filled.d_ff, d) &&
                                  net.n_tensors == (more & 2 ? 6 : 3),
                              "shapes");
                    CHECK_CLOSE(checked_outputs(&net, &t->call),
                                ref_expert(&net, 0, &filled, n, d, widened(t->x, n * d)), n * d, "feed_forward");
                }
                moe_net_free(&net);
                tidy(0);
            }
}

/* A whole small language model, module by module; its two attentions turn by angles of their
   own. */
static void test_language_model(int kernels, int trials) {
    int trial, k;
    for (trial = 0; trial < trials; trial++) {
        size_t n = draw_length(), h = 1 + (size_t)below(3);
        size_t w = 2 * (1 + (size_t)below(3)), d = h * w;
        size_t v = 5 + (size_t)below(20);
        tokens *t = draw_tokens(n, d, (int)v, draw_with());
        moe_attention_config c[2];
        moe_layer_config f;
        double *x, *y;
        moe_net net;
        say("language model, kernels %s, %d tokens, d %d", moe_kernels_name(kernels), (int)n, (int)d);
        memset(c, 0, sizeof c);
        memset(&f, 0, sizeof f);
        f.d_ff = 7;
        moe_net_init(&net, 0, kernels, NULL);
        moe_net_embedding(&net, (int)v, (int)d);
        moe_net_positions(&net, MOST_TOKENS);
        for (k = 0; k < 2; k++) {
            c[k].heads = (int)h;
            c[k].full = chance(30);
            c[k].rotary = chance(70);
            c[k].rotary_base = (moe_real)(c[k].rotary ? 100 * (1 + below(2)) : 0);
            moe_net_rms_norm(&net);
            moe_net_attention(&net, &c[k]);
            moe_net_dropout(&net, (moe_real)0.5);
            moe_net_residual(&net, 3);
            c[k].d_head = (int)w;
        }
        moe_net_layer_norm(&net);
        moe_net_feed_forward(&net, &f);
        moe_net_residual(&net, 2);
        moe_net_rms_norm(&net);
        moe_net_tied(&net);
        if (built(&net, 0)) {
            x = ref_positions(&t->call, d, ref_embedding(n, d, t->ids, weights(&net, 0, "weight")),
                              weights(&net, 1, "weight"));
            for (k = 0; k < 2; k++) {
                size_t norm = 2 + 4 * (size_t)k;
                x = ref_sum(
                    x,
                    ref_attention(&net, norm + 1, &c[k], &t->call, ref_rms_norm(n, d, x, weights(&net, norm, "weight")))
                        .y,
                    n * d);
            }
            y = ref_expert(&net, 11, &f, n, d,
                           ref_layer_norm(n, d, x, weights(&net, 10, "weight"), weights(&net, 10, "bias")));
            x = ref_rms_norm(n, d, ref_sum(x, y, n * d), weights(&net, 13, "weight"));
            CHECK_CLOSE(outputs(&net, &t->call),
                        ref_affine(n, v, d, x, weights(&net, 0, "weight"), weights(&net, 14, "bias")), n * v, "logits");
        }
        moe_net_free(&net);
        tidy(0);
    }
}

static void test_modules(void) {
    int kernels;
    for (kernels = MOE_KERNELS_C; kernels < MOE_KERNELS_COUNT; kernels++) {
        if (moe_kernels_select(kernels) == NULL) continue;
        test_attention(kernels, 120);
        test_embedding_and_tied(kernels);
        test_rms_norm(kernels);
        test_feed_forward(kernels);
        test_language_model(kernels, 40);
    }
    test_attention_defaults();
}

/* ---- padding ---- */

/* Whatever stands in the rows of padding, attention passes none of it on, forward or backward. */
static void test_padding(void) {
    int trial, k;
    for (trial = 0; trial < 20; trial++) {
        size_t n = 1 + (size_t)below(FEW_TOKENS), d = 1 + (size_t)below(8), i, g;
        moe_attention_config c = draw_attention();
        tokens *t = draw_tokens(n, d, 0, WITH_MASK | (chance(50) ? WITH_SEQUENCES : 0));
        moe_real *dy = normals(n * d, 1.0), *dx[2], *gradients[2][4];
        moe_net net;
        say("padding, %d tokens, d %d, full %d, rotary %d", (int)n, (int)d, c.full, c.rotary);
        moe_net_init(&net, (int)d, 0, NULL);
        moe_net_attention(&net, &c);
        if (!built(&net, 1)) return;
        t->call.training = 1;
        for (k = 0; k < 2; k++) {
            moe_net_pass pass;
            for (i = 0; i < n * d; i++)
                if (!t->mask[i / d]) t->x[i] = k ? (moe_real)NAN : 0;
            dx[k] = pooled_reals(n * d);
            net_zero_gradients(&net);
            if (!CHECK_STATUS(forward(&net, &t->call, &pass), MOE_OK, "forward")) return;
            CHECK_STATUS(moe_net_backward(&net, dy, dx[k], &pass), MOE_OK, "backward");
            for (g = 0; g < 4; g++) gradients[k][g] = copied(net.tensors[g].gradient, net.tensors[g].count);
        }
        CHECK(same_reals(dx[0], dx[1], n * d), "dx");
        for (g = 0; g < 4; g++)
            CHECK(same_reals(gradients[0][g], gradients[1][g], net.tensors[g].count), net.tensors[g].name);
        moe_net_free(&net);
        tidy(0);
    }
}

/* ---- dropout ---- */

/* y is 0 or x / (1 - rate); returns how many are 0. */
static size_t count_dropped(const tokens *t, const moe_real *y, double rate) {
    size_t count = t->n * t->d, i, dropped = 0;
    double most = 0.0;
    for (i = 0; i < count; i++) {
        double wanted = (double)t->x[i] / (1.0 - rate);
        if (!(y[i] > 0) && !(y[i] < 0)) dropped++;
        else if (!(fabs((double)y[i] - wanted) <= most * (1e-6 + fabs(wanted))))
            most = fabs((double)y[i] - wanted) / (1e-6 + fabs(wanted));
    }
    CHECK(most <= NEAR, "what stays is scaled by 1 / (1 - rate)");
    return dropped;
}

static void test_dropout_rate(double rate) {
    enum { WIDE = 64, CALLS = 12 };
    const double count = (double)(FEW_TOKENS * WIDE * CALLS);
    size_t dropped = 0, i, k;
    double spread;
    moe_net net;
    say("dropout %.2f", rate);
    moe_net_init(&net, WIDE, 0, NULL);
    moe_net_dropout(&net, (moe_real)rate);
    if (!built(&net, 1)) return;
    CHECK(net.n_tensors == 0, "nothing to learn");
    for (i = 0; i < CALLS; i++) {
        tokens *t = draw_tokens(FEW_TOKENS, WIDE, 0, 0);
        moe_real *dy = normals(FEW_TOKENS * WIDE, 1.0), *dx = pooled_reals(FEW_TOKENS * WIDE);
        moe_rng before = rng, again = rng; /* both as rng is now */
        moe_net_pass pass;
        const moe_real *y, *plain;
        size_t wrong = 0;
        t->call.rng = &rng;
        plain = outputs(&net, &t->call);
        CHECK(same_reals(plain, t->x, FEW_TOKENS * WIDE), "inference changes nothing");
        t->call.training = 1;
        CHECK(before.state == rng.state, "nor does it draw");
        y = outputs(&net, &t->call);
        CHECK(before.state != rng.state, "it draws");
        t->call.rng = &again;
        if (!CHECK_STATUS(forward(&net, &t->call, &pass), MOE_OK, "forward")) break;
        CHECK(same_reals(y, pass.y, FEW_TOKENS * WIDE), "the same draws, the same y");
        dropped += count_dropped(t, y, rate);
        CHECK_STATUS(moe_net_backward(&net, dy, dx, &pass), MOE_OK, "backward");
        for (k = 0; k < FEW_TOKENS * WIDE; k++) {
            double wanted = y[k] > 0 || y[k] < 0 ? (double)dy[k] / (1.0 - rate) : 0.0;
            wrong += !(fabs((double)dx[k] - wanted) <= NEAR * (1.0 + fabs(wanted)));
        }
        CHECK(wrong == 0, "the gradient has the same mask");
    }
    spread = sqrt(rate * (1.0 - rate) * count);
    CHECK(fabs((double)dropped - rate * count) <= 5.0 * spread, "as many as the rate says");
    moe_net_free(&net);
    tidy(0);
}

static void test_dropout(void) {
    enum { WIDE = 16 };
    tokens *t;
    moe_net net;
    moe_net_pass pass;
    test_dropout_rate(0.1);
    test_dropout_rate(0.5);
    test_dropout_rate(0.99);
    t = draw_tokens(FEW_TOKENS, WIDE, 0, 0);
    say("dropout of nothing");
    t->call.training = 1;
    moe_net_init(&net, WIDE, 0, NULL);
    moe_net_dropout(&net, 0);
    if (built(&net, 1)) CHECK(same_reals(outputs(&net, &t->call), t->x, FEW_TOKENS * WIDE), "needs no rng");
    moe_net_free(&net);
    say("two dropouts");
    moe_net_init(&net, WIDE, 0, NULL);
    moe_net_dropout(&net, (moe_real)0.5);
    moe_net_dropout(&net, (moe_real)0.5);
    t->call.rng = &rng;
    if (built(&net, 1) && CHECK_STATUS(forward(&net, &t->call, &pass), MOE_OK, "forward")) {
        size_t i, left = 0;
        for (i = 0; i < FEW_TOKENS * WIDE; i++) left += pass.y[i] > 0 || pass.y[i] < 0;
        CHECK(left > 100 && left < 220, "each draws by itself"); /* a quarter of 640, 160 +- 11, and not half */
    }
    moe_net_free(&net);
    tidy(0);
}

/* ---- what forward refuses ---- */

static void check_forward(const moe_net *net, const moe_call *call, moe_status wanted, const char *what, int line) {
    moe_net_pass pass, untouched;
    memset(&untouched, 7, sizeof untouched);
    pass = untouched;
    if (!CHECK_AT(line, forward(net, call, &pass) == wanted, what))
        printf("        wanted %s\n", moe_status_text(wanted));
    if (wanted != MOE_OK) CHECK_AT(line, same_bits(&pass, &untouched, sizeof pass), "the pass is untouched");
}

#define FORWARD(net, call, wanted, what) check_forward(net, call, wanted, what, __LINE__)

/* Lengths, offsets, dropout and a past. */
static void refuse_sequences(moe_net *net) {
    enum { V = 5, MOST = 4 };
    int32_t offsets[3];
    tokens *t = draw_tokens(MOST, 6, V, 0);
    moe_call call = t->call;
    moe_net_pass pass;
    size_t bytes = 0;
    t = draw_tokens(MOST + 1, 6, V, 0);
    call = t->call;
    FORWARD(net, &call, MOE_ERR_ARGUMENT, "a sequence longer than positions");
    offsets[0] = 0;
    offsets[1] = 2;
    offsets[2] = MOST + 1;
    call.sequences = offsets;
    call.n_sequences = 2;
    FORWARD(net, &call, MOE_OK, "two that are short enough");
    offsets[1] = 0;
    FORWARD(net, &call, MOE_ERR_ARGUMENT, "all in the second");
    offsets[1] = MOST + 2;
    FORWARD(net, &call, MOE_ERR_ARGUMENT, "offsets that descend");
    offsets[0] = 1;
    offsets[1] = 2;
    FORWARD(net, &call, MOE_ERR_ARGUMENT, "offsets that begin late");
    offsets[0] = 0;
    offsets[2] = MOST;
    FORWARD(net, &call, MOE_ERR_ARGUMENT, "offsets that end early");
    offsets[0] = -1;
    FORWARD(net, &call, MOE_ERR_ARGUMENT, "a negative offset");
    offsets[0] = 0;
    offsets[2] = MOST + 1;
    call.n_sequences = 0;
    FORWARD(net, &call, MOE_ERR_ARGUMENT, "offsets, but no sequences");
    call.n_sequences = 2;
    call.training = 1;
    FORWARD(net, &call, MOE_ERR_ARGUMENT, "dropout without rng");
    call.rng = &rng;
    FORWARD(net, &call, MOE_OK, "dropout with rng");
    call.n_past = 1;
    FORWARD(net, &call, MOE_ERR_ARGUMENT, "a past belongs to moe_net_decode");
    call.n_past = 0;
    CHECK_STATUS(moe_net_work_size(net, call.n_tokens, 1, &bytes), MOE_OK, "size");
    CHECK_STATUS(moe_net_forward(net, &call, pooled(bytes, 1), bytes - 1, &pass), MOE_ERR_SPACE, "a byte less");
}

static void test_forward_errors(void) {
    enum { V = 5, MOST = 4 };
    static const int32_t wrong[] = {-1, V, INT32_MAX, INT32_MIN};
    int32_t offsets[3];
    tokens *t = draw_tokens(MOST, 6, V, 0);
    unsigned char work[64];
    moe_call call = t->call;
    moe_net_pass pass;
    moe_net net;
    size_t i;
    say("what forward refuses");
    moe_net_init(&net, 0, 0, NULL);
    moe_net_embedding(&net, V, 6);
    moe_net_positions(&net, MOST);
    moe_net_attention(&net, NULL);
    moe_net_dropout(&net, (moe_real)0.3);
    moe_net_linear(&net, 3);
    CHECK_STATUS(moe_net_forward(&net, &call, work, sizeof work, &pass), MOE_ERR_STATE, "before build");
    if (!built(&net, 1)) return;
    FORWARD(&net, &call, MOE_OK, "a good call");
    for (i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        int32_t was = t->ids[i];
        t->ids[i] = wrong[i];
        FORWARD(&net, &call, MOE_ERR_ARGUMENT, "an id that the vocabulary has not");
        t->ids[i] = was;
    }
    call.token_ids = NULL;
    FORWARD(&net, &call, MOE_ERR_ARGUMENT, "no ids");
    call.n_tokens = 0;
    FORWARD(&net, &call, MOE_OK, "no tokens");
    refuse_sequences(&net);
    moe_net_free(&net);
    moe_net_init(&net, 6, 0, NULL);
    moe_net_attention(&net, NULL);
    if (built(&net, 1)) {
        t = draw_tokens(MOST, 6, 0, 0);
        call = t->call;
        call.x = NULL;
        FORWARD(&net, &call, MOE_ERR_ARGUMENT, "no x");
        call.x = t->x;
        call.sequences = offsets;
        call.n_sequences = 2;
        offsets[1] = 7;
        FORWARD(&net, &call, MOE_ERR_ARGUMENT, "attention looks at the offsets by itself");
    }
    moe_net_free(&net);
    moe_net_init(&net, 6, 0, NULL);
    moe_net_positions(&net, MOST);
    if (built(&net, 1)) FORWARD(&net, &call, MOE_ERR_ARGUMENT, "so do positions");
    moe_net_free(&net);
    tidy(0);
}

/* ---- what building refuses ---- */

/* A module call that must fail: the list stays, build says the same, and the network can be freed
   and begun again. */
static void check_refused(moe_net *net, size_t modules, moe_status status, const char *words, int line) {
    moe_error error;
    sprintf(doing, "%.200s", words);
    CHECK_AT(line, status == MOE_ERR_CONFIG, "a module is refused");
    CHECK_AT(line, net->n_modules == modules, "the list is as it was");
    check_words(net->error.message, words, line);
    error.message[0] = '\0';
    CHECK_AT(line, moe_net_build(net, 1, 1, &error) == MOE_ERR_CONFIG && strcmp(error.message, net->error.message) == 0,
             "build says the same");
    moe_net_free(net);
    moe_net_init(net, 4, 0, NULL);
    moe_net_rms_norm(net);
    CHECK_AT(line, moe_net_build(net, 0, 1, NULL) == MOE_OK, "the net can be used");
    moe_net_free(net);
}

#define REFUSED(d_in, before, call, words) \
    do { \
        size_t modules_; \
        moe_net_init(&net, d_in, 0, NULL); \
        before; \
        modules_ = net.n_modules; \
        check_refused(&net, modules_, call, words, __LINE__); \
    } while (0)

static moe_attention_config attention_of(int heads, int d_head, int full, int rotary, double base) {
    moe_attention_config c;
    memset(&c, 0, sizeof c);
    c.heads = heads;
    c.d_head = d_head;
    c.full = full;
    c.rotary = rotary;
    c.rotary_base = (moe_real)base;
    return c;
}

static moe_status add_attention(moe_net *net, int heads, int d_head, int full, int rotary, double base) {
    moe_attention_config c = attention_of(heads, d_head, full, rotary, base);
    return moe_net_attention(net, &c);
}

static moe_status add_set(moe_net *net, moe_status (*add)(moe_net *, const moe_layer_config *), const char *settings) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    CHECK_STATUS(moe_fields_apply(moe_layer_fields(), &c, settings, NULL), MOE_OK, settings);
    return add(net, &c);
}

static void test_refused_modules(void) {
    moe_net net;
    REFUSED(0, (void)0, moe_net_linear(&net, 3), "module 0 (linear)|embedding");
    REFUSED(0, (void)0, moe_net_attention(&net, NULL), "module 0 (attention)|embedding");
    REFUSED(6, (void)0, moe_net_embedding(&net, 5, 6), "module 0 (embedding)|d_in = 6");
    REFUSED(0, moe_net_embedding(&net, 5, 6), moe_net_embedding(&net, 5, 6), "module 1 (embedding)");
    REFUSED(0, (void)0, moe_net_embedding(&net, 0, 6), "module 0 (embedding)|vocabulary = 0");
    REFUSED(0, (void)0, moe_net_embedding(&net, -5, 6), "vocabulary = -5");
    REFUSED(0, (void)0, moe_net_embedding(&net, 5, 0), "d = 0");
    REFUSED(0, (void)0, moe_net_embedding(&net, 5, MOE_MAX_WIDTH + 1), "d = 16777217");
    REFUSED(0, moe_net_embedding(&net, 5, 6), moe_net_residual(&net, 1), "module 1 (residual)");
    REFUSED(6, (void)0, moe_net_positions(&net, 0), "module 0 (positions)|most = 0");
    REFUSED(6, (void)0, moe_net_positions(&net, -1), "most = -1");
    REFUSED(8, (void)0, add_attention(&net, 3, 0, 0, 0, 0), "module 0 (attention)|heads = 3");
    REFUSED(8, (void)0, add_attention(&net, -1, 0, 0, 0, 0), "heads = -1");
    REFUSED(8, (void)0, add_attention(&net, 2, -4, 0, 0, 0), "d_head = -4");
    REFUSED(8, (void)0, add_attention(&net, 2, 4, 2, 0, 0), "full = 2");
    REFUSED(8, (void)0, add_attention(&net, 2, 4, 0, -1, 0), "rotary = -1");
    REFUSED(8, (void)0, add_attention(&net, 2, 3, 0, 1, 0), "d_head = 3|rotary");
    REFUSED(6, (void)0, add_attention(&net, 2, 0, 0, 1, 0), "d_head = 3|rotary");
    REFUSED(8, (void)0, add_attention(&net, 2, 4, 0, 1, -2), "rotary_base = -2");
    REFUSED(8, (void)0, add_attention(&net, 2, 4, 0, 1, HUGE_VAL), "rotary_base = inf");
    REFUSED(8, (void)0, add_attention(&net, MOE_MAX_WIDTH, MOE_MAX_WIDTH, 0, 0, 0), "module 0 (attention)");
    REFUSED(8, (void)0, moe_net_dropout(&net, 1), "module 0 (dropout)|rate = 1");
    REFUSED(8, (void)0, moe_net_dropout(&net, (moe_real)-0.5), "rate = -0.5");
    REFUSED(8, (void)0, moe_net_dropout(&net, (moe_real)NAN), "rate = ");
    REFUSED(8, (void)0, add_set(&net, moe_net_feed_forward, "n_experts=2"), "module 0 (feed_forward)|n_experts = 2");
    REFUSED(8, (void)0, add_set(&net, moe_net_feed_forward, "d_out=8"), "d_out = 8");
    REFUSED(8, (void)0, add_set(&net, moe_net_feed_forward, "n_shared=1"), "n_shared = 1");
    REFUSED(8, (void)0, add_set(&net, moe_net_feed_forward, "loss_balance=0.5"), "loss_balance = 0.5");
    REFUSED(8, (void)0, add_set(&net, moe_net_feed_forward, "d_ff=-1"), "d_ff = -1");
    REFUSED(6, (void)0, moe_net_tied(&net), "module 0 (tied)|embedding");
    REFUSED(0, (moe_net_embedding(&net, 5, 6), moe_net_linear(&net, 7)), moe_net_tied(&net), "module 2 (tied)|6|7");
    REFUSED(8, add_attention(&net, 2, 0, 0, 0, 0), add_set(&net, moe_net_mixture, "refine=attention heads=3"),
            "module 1 (mixture)|heads = 3");
    REFUSED(8, (add_attention(&net, 2, 0, 0, 0, 0), moe_net_linear(&net, 9)),
            add_set(&net, moe_net_mixture, "refine=attention"), "module 2 (mixture)|8|9");
    say("d_in");
    CHECK_STATUS(moe_net_init(&net, -1, 0, NULL), MOE_ERR_CONFIG, "a negative width");
    CHECK_STATUS(moe_net_init(&net, 0, 0, NULL), MOE_OK, "ids");
    CHECK_STATUS(moe_net_build(&net, 0, 1, NULL), MOE_ERR_CONFIG, "no modules");
    moe_net_free(&net);
}

/* After build the list is fixed. */
static void test_late_modules(void) {
    moe_net net;
    say("modules after build");
    moe_net_init(&net, 0, 0, NULL);
    moe_net_embedding(&net, 5, 6);
    if (!built(&net, 0)) return;
    CHECK_STATUS(moe_net_embedding(&net, 5, 6), MOE_ERR_STATE, "embedding");
    CHECK_STATUS(moe_net_positions(&net, 5), MOE_ERR_STATE, "positions");
    CHECK_STATUS(moe_net_attention(&net, NULL), MOE_ERR_STATE, "attention");
    CHECK_STATUS(moe_net_rms_norm(&net), MOE_ERR_STATE, "rms_norm");
    CHECK_STATUS(moe_net_dropout(&net, 0), MOE_ERR_STATE, "dropout");
    CHECK_STATUS(moe_net_feed_forward(&net, NULL), MOE_ERR_STATE, "feed_forward");
    CHECK_STATUS(moe_net_tied(&net), MOE_ERR_STATE, "tied");
    CHECK(net.n_modules == 1, "nothing was added");
    moe_net_free(&net);
}

/* ---- routers that refine by the network's attention ---- */

/* Attention as the first module serves routers behind it: the network takes samples that have no
   attention of their own, for the loss too. */
static void test_attention_first(void) {
    enum { D = 6 };
    tokens *t = draw_tokens(8, D, 0, 0);
    moe_data data;
    moe_evaluation result;
    moe_error error;
    moe_net net;
    say("attention as the first module");
    memset(&data, 0, sizeof data);
    data.n = data.length = 8;
    data.x = t->x;
    data.targets = t->x;
    moe_net_init(&net, D, 0, NULL);
    moe_net_attention(&net, NULL);
    add_set(&net, moe_net_mixture, "refine=attention d_ff=4");
    if (built(&net, 0))
        CHECK_STATUS(moe_evaluate(&net, &data, MOE_CRITERION_SQUARED_ERROR, &result, &error), MOE_OK, "evaluate");
    moe_net_free(&net);
    tidy(0);
}

/* A first module has nobody to give the gradient of x to, behind padding either. */
static void test_padding_first(void) {
    enum { D = 6, N = 12 };
    tokens *t = draw_tokens(N, D, 0, WITH_MASK);
    moe_attention_config c = attention_of(2, 3, 0, 0, 0);
    moe_net net;
    moe_net_pass pass;
    moe_call call = t->call;
    size_t bytes = 0, k;
    moe_real *dy = (moe_real *)pooled(N * D, sizeof *dy), *dx = pooled_reals(N * D), *gradients[4];
    void *work;
    int first, twice;
    for (first = 0; first < 2; first++) {
        say("padding before the first module, %d", first);
        for (k = 0; k < N; k++) t->mask[k] = k % 3 != 0;
        for (k = 0; k < N * D; k++) dy[k] = t->mask[k / D] ? moe_rng_normal(&rng) : 0;
        call.training = 1;
        moe_net_init(&net, D, 0, NULL);
        if (first == 0) moe_net_attention(&net, &c);
        else moe_net_linear(&net, D);
        if (!built(&net, 1)) return;
        CHECK_STATUS(moe_net_work_size(&net, N, 1, &bytes), MOE_OK, "size");
        work = pooled(bytes, 1);
        for (twice = 0; twice < 2; twice++) {
            net_zero_gradients(&net);
            if (CHECK_STATUS(moe_net_forward(&net, &call, work, bytes, &pass), MOE_OK, "forward"))
                CHECK_STATUS(moe_net_backward(&net, dy, twice ? NULL : dx, &pass), MOE_OK, "backward");
            for (k = 0; k < net.n_tensors && !twice; k++)
                gradients[k] = copied(net.tensors[k].gradient, net.tensors[k].count);
        }
        for (k = 0; k < net.n_tensors; k++)
            CHECK(same_reals(gradients[k], net.tensors[k].gradient, net.tensors[k].count), "the gradients without dx");
        moe_net_free(&net);
    }
    tidy(0);
}

/* norm, attention (of `heads` heads), residual, mixture: its probabilities, from a router with the
   definition's A and o at hand. */
static void check_refinement(const char *settings, int heads, int full, int with) {
    enum { D = 6 };
    size_t n = 2 + (size_t)below(20), experts, i, k, wrong = 0;
    tokens *t = draw_tokens(n, D, 0, with);
    moe_attention_config first = attention_of(1, D, 0, 0, 0), c = attention_of(heads, 3, full, 0, 0);
    moe_net net;
    moe_net_pass pass;
    moe_router router;
    moe_routing routing;
    moe_call call = t->call;
    attention a;
    double *x;
    const moe_real *p;
    size_t bytes = 0;
    say("%s behind %d heads, full %d, with %d", settings, heads, full, with);
    moe_net_init(&net, D, 0, NULL);
    moe_net_attention(&net, NULL); /* the nearest counts, not this one */
    moe_net_rms_norm(&net);
    moe_net_attention(&net, &c);
    moe_net_residual(&net, 2);
    add_set(&net, moe_net_mixture, settings);
    if (!built(&net, 0) || !CHECK_STATUS(forward(&net, &t->call, &pass), MOE_OK, "forward")) {
        moe_net_free(&net);
        return;
    }
    p = moe_net_routing(&net, &pass, 4)->probabilities;
    x = ref_attention(&net, 0, &first, &t->call, widened(t->x, n * D)).y;
    a = ref_attention(&net, 2, &c, &t->call, ref_rms_norm(n, D, x, weights(&net, 1, "weight")));
    CHECK(net.modules[4].layer.config.router.causal == !full, "refines causally where the attention is");
    CHECK_STATUS(moe_router_init(&router, &net.modules[4].layer.config.router, NULL, NULL), MOE_OK, "router");
    memcpy(router.tensors, net.modules[4].layer.tensors, sizeof router.tensors);
    call.x = narrowed(ref_sum(x, a.y, n * D), n * D);
    call.attention_weights = narrowed(a.weights, (size_t)heads * n * n);
    call.attention_outputs = narrowed(a.heads, (size_t)heads * n * D);
    call.attention_output = narrowed(a.y, n * D);
    CHECK_STATUS(moe_route_size(&router, n, 0, &bytes), MOE_OK, "size");
    if (CHECK_STATUS(moe_route(&router, &call, pooled(bytes, 1), bytes, &routing), MOE_OK, "route")) {
        experts = routing.n_experts;
        for (i = 0; i < n; i++)
            for (k = 0; k < experts && is_real(&call, i); k++)
                wrong +=
                    !(fabs((double)p[i * experts + k] - (double)routing.probabilities[i * experts + k]) <= 10 * NEAR);
        CHECK(wrong == 0, "the same probabilities");
    }
    moe_net_free(&net);
    tidy(0);
}

static void test_refinement(void) {
    int trial, full;
    for (trial = 0; trial < 40; trial++)
        for (full = 0; full < 2; full++) {
            int heads = 1 + below(4);
            check_refinement("refine=attention attention_heads=all d_ff=4", heads, full, draw_with());
            check_refinement("refine=attention attention_heads=all attention_u=output attention_sigma=2 d_ff=4", heads,
                             full, draw_with());
            check_refinement("refine=attention d_ff=4", heads, full, draw_with());
            if (heads == 3)
                check_refinement("refine=attention attention_heads=fixed attention_head=2 heads=3 d_ff=4", heads, full,
                                 draw_with());
            check_refinement("refine=similarity d_ff=4", heads, full, draw_with());
        }
}

/* ---- the next token ---- */

static const moe_real *sorted_logits;

/* The larger first, of equals the one that stands first. */
static int compare_tokens(const void *a, const void *b) {
    int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    if (sorted_logits[i] > sorted_logits[j]) return -1;
    if (sorted_logits[i] < sorted_logits[j]) return 1;
    return i < j ? -1 : 1;
}

/* The probabilities by definition; how is filled in. */
static double *ref_sample(const moe_sampling *how, size_t n, const moe_real *logits) {
    double *p = doubles(n), sum = 0.0;
    double reached = 0.0;
    int32_t *order = (int32_t *)pooled(n, sizeof *order);
    size_t i, stay = how->top_k > 0 && (size_t)how->top_k < n ? (size_t)how->top_k : n;
    for (i = 0; i < n; i++) order[i] = (int32_t)i;
    sorted_logits = logits;
    qsort(order, n, sizeof *order, compare_tokens);
    if (how->greedy) {
        p[order[0]] = 1.0;
        return p;
    }
    for (i = 0; i < stay; i++)
        sum += p[order[i]] = exp(((double)logits[order[i]] - (double)logits[order[0]]) / (double)how->temperature);
    for (i = 0; i < stay && (how->top_p >= 1 || reached < sum * (double)how->top_p); i++) reached += p[order[i]];
    for (stay = i; i < n; i++) p[order[i]] = 0.0;
    for (i = 0, sum = 0.0; i < stay; i++) sum += p[order[i]];
    for (i = 0; i < stay; i++) p[order[i]] /= sum;
    return p;
}

static void check_sample(const moe_sampling *how, size_t n, const moe_real *logits) {
    moe_sampling filled;
    moe_real *p = pooled_reals(n), *again = pooled_reals(n);
    int32_t *order = (int32_t *)pooled(n, sizeof *order), token = -1;
    int32_t second = -1;
    moe_rng start = rng, a = rng;
    moe_rng b = rng;
    double *wanted, sum = 0.0;
    size_t i, missing = 0;
    memset(&filled, 0, sizeof filled);
    if (how != NULL) filled = *how;
    say("sampling from %d: greedy %d, temperature %g, top_k %d, top_p %g", (int)n, filled.greedy,
        (double)filled.temperature, filled.top_k, (double)filled.top_p);
    if (!(filled.temperature > 0)) filled.temperature = 1;
    if (!(filled.top_p > 0)) filled.top_p = 1;
    if (!CHECK_STATUS(moe_sample(how, n, logits, &a, p, order, &token, NULL), MOE_OK, "sample")) return;
    wanted = ref_sample(&filled, n, logits);
    for (i = 0; i < n; i++) {
        sum += (double)p[i];
        missing += wanted[i] > 0 ? wanted[i] > 1e-37 && !(p[i] > 0) : p[i] > 0;
    }
    CHECK_CLOSE(p, wanted, n, "the probabilities");
    CHECK(missing == 0, "the same tokens stay");
    CHECK(fabs(sum - 1.0) <= NEAR, "they sum to 1");
    CHECK(token >= 0 && (size_t)token < n && p[token] > 0, "a token that stays");
    moe_rng_next(&start);
    CHECK(a.state == (filled.greedy ? b.state : start.state), "one draw, none if greedy");
    CHECK_STATUS(moe_sample(how, n, logits, &b, again, order, &second, NULL), MOE_OK, "sample");
    CHECK(second == token && same_reals(p, again, n), "the same seed, the same token");
    rng = start;
}

static moe_sampling sampling_of(int greedy, double temperature, int top_k, double top_p) {
    moe_sampling s;
    memset(&s, 0, sizeof s);
    s.greedy = greedy;
    s.temperature = (moe_real)temperature;
    s.top_k = top_k;
    s.top_p = (moe_real)top_p;
    return s;
}

static void test_sampling_choices(void) {
    static const double temperatures[] = {0, 1, 0.7, 2, 1e-6, 1e6}, shares[] = {0, 1, 0.9, 0.5, 0.01, 1e-9};
    static const size_t sizes[] = {1, 2, 7, 63, 64, 65, 1000, 50000};
    size_t i, a, b, k;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        size_t n = sizes[i];
        moe_real *logits = normals(n, 3.0);
        int ks[5];
        ks[0] = 0;
        ks[1] = 1;
        ks[2] = 3;
        ks[3] = (int)n;
        ks[4] = INT32_MAX;
        if (n == 1000)
            for (k = 0; k < n; k++) logits[k] = (moe_real)below(4); /* ties */
        check_sample(NULL, n, logits);
        for (a = 0; a < 6; a++)
            for (b = 0; b < 6; b++)
                for (k = 0; k < (n > 10000 ? 2u : 5u); k++) {
                    moe_sampling s = sampling_of(0, temperatures[a], ks[k], shares[b]);
                    size_t mark = n_blocks;
                    if (n > 10000 && a > 2) continue;
                    check_sample(&s, n, logits);
                    s.greedy = 1;
                    if (b == 0 && k == 0) check_sample(&s, n, logits);
                    tidy(mark);
                }
        tidy(0);
    }
}

/* Where it is known by hand. */
static void test_sampling_by_hand(void) {
    static const moe_real equal[4] = {2, 2, 2, 2}, far[3] = {(moe_real)-3e38, (moe_real)3e38, 0};
    static const moe_real two[4] = {1, 5, 5, 1};
    moe_sampling s = sampling_of(1, 0, 0, 0);
    moe_real p[4];
    int32_t order[4], token = -1;
    say("sampling by hand");
    CHECK(moe_sample(&s, 4, two, NULL, p, order, &token, NULL) == MOE_OK && token == 1 && p[1] >= 1 && p[2] <= 0,
          "greedy: the first of equals, without rng");
    s = sampling_of(0, 0, 0, 0.5);
    CHECK(moe_sample(&s, 4, equal, &rng, p, order, &token, NULL) == MOE_OK && p[1] > 0 && p[2] <= 0 && p[3] <= 0,
          "0.25 + 0.25 reach 0.5");
    s = sampling_of(0, 0, 0, 0.51);
    CHECK(moe_sample(&s, 4, equal, &rng, p, order, &token, NULL) == MOE_OK && p[2] > 0 && p[3] <= 0,
          "the crossing one stays");
    s = sampling_of(0, 0, 3, 0);
    CHECK(moe_sample(&s, 4, equal, &rng, p, order, &token, NULL) == MOE_OK && p[2] > 0 && p[3] <= 0,
          "the first of equals stay");
    s = sampling_of(0, 0, 2, 0.5);
    CHECK(moe_sample(&s, 4, equal, &rng, p, order, &token, NULL) == MOE_OK && p[0] >= 1 && p[1] <= 0,
          "top_p counts what top_k left as 1");
    s = sampling_of(0, 1e-6, 0, 0);
    CHECK(moe_sample(&s, 3, far, &rng, p, order, &token, NULL) == MOE_OK && token == 1 && p[1] >= 1 && p[0] <= 0,
          "logits at the ends of the range");
}

/* How often each token comes, against p: chi-square with 6 degrees of freedom is above 30 in one of
   25000 fair trials. */
static void check_frequencies(const moe_sampling *how) {
    enum { N = 7, DRAWS = 20000 };
    static const moe_real logits[N] = {(moe_real)0.3, -1, 2, (moe_real)1.5, 0, (moe_real)-0.5, 1};
    long counts[N];
    moe_real p[N];
    int32_t order[N], token = 0;
    double chi_square = 0.0;
    int i;
    say("frequencies at temperature %g, top_k %d, top_p %g", (double)how->temperature, how->top_k, (double)how->top_p);
    memset(counts, 0, sizeof counts);
    for (i = 0; i < DRAWS; i++) {
        if (!CHECK_STATUS(moe_sample(how, N, logits, &rng, p, order, &token, NULL), MOE_OK, "sample")) return;
        counts[token]++;
    }
    for (i = 0; i < N; i++) {
        double expected = (double)p[i] * DRAWS, off = (double)counts[i] - expected;
        if (p[i] > 0) chi_square += off * off / expected;
        else CHECK(counts[i] == 0, "what does not stay never comes");
    }
    CHECK(chi_square < 30.0, "as often as p says");
    if (verbose) printf("note: chi-square %.1f [%s]\n", chi_square, doing);
}

#define SAMPLE_FAILS(how, n, logits, rng, p, order, token, status, words) \
    check_sample_fails(moe_sample(how, n, logits, rng, p, order, token, &error), status, error.message, words, __LINE__)

static void check_sample_fails(moe_status status, moe_status wanted, const char *message, const char *words, int line) {
    CHECK_STATUS_AT(line, status, wanted, "sample fails");
    check_words(message, words, line);
}

static void test_sampling_errors(void) {
    moe_real logits[3] = {1, 2, 3}, p[3] = {7, 7, 7};
    int32_t order[3] = {7, 7, 7}, token = 7;
    const uint64_t state = rng.state;
    moe_error error;
    moe_sampling s;
    int i;
    say("sampling errors");
    SAMPLE_FAILS(NULL, 3, NULL, &rng, p, order, &token, MOE_ERR_ARGUMENT, "logits");
    SAMPLE_FAILS(NULL, 3, logits, &rng, NULL, order, &token, MOE_ERR_ARGUMENT, "p must not");
    SAMPLE_FAILS(NULL, 3, logits, &rng, p, NULL, &token, MOE_ERR_ARGUMENT, "order");
    SAMPLE_FAILS(NULL, 3, logits, &rng, p, order, NULL, MOE_ERR_ARGUMENT, "token");
    SAMPLE_FAILS(NULL, 0, logits, &rng, p, order, &token, MOE_ERR_ARGUMENT, "n = 0");
    SAMPLE_FAILS(NULL, 3, logits, NULL, p, order, &token, MOE_ERR_ARGUMENT, "rng");
    s = sampling_of(2, 0, 0, 0);
    SAMPLE_FAILS(&s, 3, logits, &rng, p, order, &token, MOE_ERR_CONFIG, "greedy = 2");
    s = sampling_of(0, -1, 0, 0);
    SAMPLE_FAILS(&s, 3, logits, &rng, p, order, &token, MOE_ERR_CONFIG, "temperature = -1");
    s = sampling_of(0, 1e-7, 0, 0);
    SAMPLE_FAILS(&s, 3, logits, &rng, p, order, &token, MOE_ERR_CONFIG, "temperature = 1e-7");
    s = sampling_of(0, 2e6, 0, 0);
    SAMPLE_FAILS(&s, 3, logits, &rng, p, order, &token, MOE_ERR_CONFIG, "temperature = 2000000");
    s = sampling_of(1, (double)NAN, 0, 0);
    SAMPLE_FAILS(&s, 3, logits, NULL, p, order, &token, MOE_ERR_CONFIG, "temperature = nan");
    s = sampling_of(0, 0, -1, 0);
    SAMPLE_FAILS(&s, 3, logits, &rng, p, order, &token, MOE_ERR_CONFIG, "top_k = -1");
    s = sampling_of(0, 0, 0, -0.5);
    SAMPLE_FAILS(&s, 3, logits, &rng, p, order, &token, MOE_ERR_CONFIG, "top_p = -0.5");
    s = sampling_of(0, 0, 0, 1.5);
    SAMPLE_FAILS(&s, 3, logits, &rng, p, order, &token, MOE_ERR_CONFIG, "top_p = 1.5");
    logits[1] = (moe_real)NAN;
    SAMPLE_FAILS(NULL, 3, logits, &rng, p, order, &token, MOE_ERR_NONFINITE, "logits[1] = nan");
    logits[1] = -(moe_real)HUGE_VAL;
    SAMPLE_FAILS(NULL, 3, logits, &rng, p, order, &token, MOE_ERR_NONFINITE, "logits[1] = -inf");
    for (i = 0; i < 3; i++) CHECK(p[i] >= 7 && p[i] <= 7 && order[i] == 7, "nothing has changed");
    CHECK(token == 7 && rng.state == state, "neither token nor rng");
}

static void test_sampling(void) {
    moe_sampling s;
    test_sampling_choices();
    test_sampling_by_hand();
    s = sampling_of(0, 0, 0, 0);
    check_frequencies(&s);
    s = sampling_of(0, 0.5, 0, 0.8);
    check_frequencies(&s);
    s = sampling_of(0, 3, 4, 0);
    check_frequencies(&s);
    test_sampling_errors();
}

/* ---- models: every preset in a language model of two blocks ---- */

enum { WORDS = 13, WIDTH = 8, HEADS = 2 };

typedef struct model {
    char name[120];
    moe_layer_config mixture[2];
    int clusters; /* 1: the second mixture's gradient takes for a constant what it makes of the modules before it */
    int estimate; /* 1: the routers' gradient is an estimate: of learned thresholds, of picks that are drawn */
} model;

/* Presets in other modes: by the fields, which come after the preset's own. */
static const char *const variants[][2] = {
    {"acmoe", "ac_mode=running"},
    {"acmoe", "ac_mode=random"},
    {"acmoe_mix2", "ac_mode=running"},
    {"acmoe_threshold", "ac_mode=random"},
    {"soft_acmoe", "ac_mode=random ac_mix=1"},
    {"dynmoe", "threshold_learned=0 threshold_sigmoid=0"},
    {"attention_smoe", "attention_heads=all"},
    {"attention_smoe", "attention_heads=fixed attention_head=1 heads=2"},
    {"attention_smoe", "attention_u=output"},
    {"attention_smoe", "attention_u=output attention_heads=all attention_sigma=2"},
    {"attention_xmoe", "attention_heads=all lower_entropy_only=1"},
    {"attention_glam", "attention_heads=fixed"},
    {"moe_pp", "capacity_factor=0"},
    {"longcat_flash", "router_residual=1 n_zero=1 n_constant=1"},
    {"similarity_smoe", "similarity_learned=1"},
    {"similarity_smoe", "similarity_scale=l2 lower_entropy_only=1"},
    {"gshard", "capacity_factor_eval=4"},
    {"vmoe", "capacity_factor_eval=8"},
    {"smoe", "input=jitter"},
    {"mixtral", "noise=gumbel"}};

/* Sizes that are quick. smooth: without the kinks of relu, where no difference is a gradient. */
static void reduce(moe_layer_config *c, int smooth) {
    moe_router_config *r = &c->router;
    c->d_ff = 6;
    c->d_low = c->expert == MOE_EXPERT_FACTORISED ? 3 : 0;
    if (r->n_experts > 8) r->n_experts = 8;
    TEST_FEWER_EXPERTS(*r);
    if (r->top_k > 3) r->top_k = 3;
    if (r->groups > 4) r->groups = 4;
    if (r->groups_kept > 2) r->groups_kept = 2;
    if (r->cosine_dim > 4) r->cosine_dim = 4;
    if (r->select == MOE_SELECT_HASH || r->student_dim > 0) r->table_size = WORDS;
    if (r->select == MOE_SELECT_SOFT) r->soft_sequences = 5;
    if (!smooth) return;
    if (takes_act(c->expert)) c->act = MOE_ACT_GELU;
    if (r->score == MOE_SCORE_MLP || r->score == MOE_SCORE_ATTENTIVE) r->router_act = MOE_ACT_TANH;
}

/* Model i; 0 past the last. A router that reads the mixture before it stands behind a plain one. */
static int get_model(size_t i, int smooth, model *m) {
    const moe_preset *presets = moe_presets();
    const char *name, *settings = "";
    moe_layer_config *c = &m->mixture[1];
    size_t count = 0;
    while (presets[count].name != NULL) count++;
    memset(m, 0, sizeof *m);
    if (i >= count + sizeof variants / sizeof variants[0]) return 0;
    name = i < count ? presets[i].name : variants[i - count][0];
    if (i >= count) settings = variants[i - count][1];
    sprintf(m->name, "%.40s %.70s", name, settings);
    CHECK_STATUS(moe_layer_preset(name, c, NULL), MOE_OK, name);
    CHECK_STATUS(moe_fields_apply(moe_layer_fields(), c, settings, NULL), MOE_OK, settings);
    reduce(c, smooth);
    m->mixture[0] = *c;
    if (moe_router_traits(&c->router) & (unsigned)MOE_TRAIT_NEEDS_PREVIOUS_LAYER) {
        CHECK_STATUS(moe_layer_preset("mixtral", &m->mixture[0], NULL), MOE_OK, "a plain one");
        reduce(&m->mixture[0], smooth);
        m->clusters = c->router.ac_mode == MOE_AC_PAPER || c->router.ac_mode == MOE_AC_CODE || c->router.ac_mix > 1;
    }
    /* its loss does not reach what it reads, but a difference would see that move */
    m->clusters |= c->router.predictor;
    m->estimate = c->router.threshold_learned || c->router.sparsemixer_sample;
    return 1;
}

/* Manners of building it. */
enum { ROTARY = 1, FULL = 2, TIED = 4, LAYER_NORM = 8, DROPOUT = 16 };

static moe_status add_norm(moe_net *net, int manner) {
    return manner & LAYER_NORM ? moe_net_layer_norm(net) : moe_net_rms_norm(net);
}

static moe_status add_model(moe_net *net, const model *m, int manner) {
    int k, rotary = (manner & ROTARY) != 0;
    moe_net_embedding(net, WORDS, WIDTH);
    if (!rotary) moe_net_positions(net, MOST_TOKENS);
    for (k = 0; k < 2; k++) {
        add_norm(net, manner);
        add_attention(net, HEADS, 0, (manner & FULL) != 0, rotary, rotary ? 30 : 0);
        if (manner & DROPOUT) moe_net_dropout(net, (moe_real)0.2);
        moe_net_residual(net, manner & DROPOUT ? 3 : 2);
        add_norm(net, manner);
        moe_net_mixture(net, &m->mixture[k]);
        moe_net_residual(net, 2);
    }
    add_norm(net, manner);
    return manner & TIED ? moe_net_tied(net) : moe_net_linear(net, WORDS);
}

static size_t last_mixture(const moe_net *net) {
    size_t i = net->n_modules;
    while (net->modules[--i].kind != MOE_MODULE_MIXTURE) continue;
    return i;
}

/* A built model, with state that matters. 0: it could not be made, which is a failure. */
static int made_model(moe_net *net, const model *m, int manner, int kernels, int trainable) {
    size_t i, k;
    moe_net_init(net, 0, kernels, NULL);
    add_model(net, m, manner);
    if (!built(net, trainable)) return 0;
    for (i = 0; i < net->n_tensors; i++) {
        moe_tensor *t = &net->tensors[i];
        for (k = 0; k < t->count && strstr(t->name, "selection_bias") != NULL; k++)
            t->data[k] = (moe_real)0.2 * moe_rng_normal(&rng);
        for (k = 0; k < t->count && strstr(t->name, "ac_running") != NULL; k++)
            t->data[k] = (moe_real)0.5 + moe_rng_uniform(&rng);
    }
    return 1;
}

/* ---- causality and independence ---- */

/* Tokens [from, to) of a call as a call of their own. */
static moe_call part_of(const moe_call *call, size_t from, size_t to) {
    moe_call part;
    memset(&part, 0, sizeof part);
    part.n_tokens = to - from;
    part.token_ids = call->token_ids + from;
    part.mask = call->mask != NULL ? call->mask + from : NULL;
    return part;
}

/* Later tokens, and other sequences, leave no trace in the bits. */
static void check_causal(const moe_net *net) {
    size_t n = draw_length(), from = (size_t)below((int)n), i, s;
    tokens *t = draw_tokens(n, 0, WORDS, draw_with());
    const moe_real *y = outputs(net, &t->call), *other;
    for (s = 0; s < sequence_count(&t->call); s++) {
        size_t begin = sequence_start(&t->call, s), end = sequence_end(&t->call, s);
        moe_call alone = part_of(&t->call, begin, end);
        CHECK(same_reals(y + begin * WORDS, outputs(net, &alone), (end - begin) * WORDS),
              "a sequence alone has the same bits");
    }
    for (i = from; i < n; i++) t->ids[i] = (int32_t)below(WORDS);
    other = outputs(net, &t->call);
    CHECK(same_reals(y, other, from * WORDS), "later tokens leave no trace");
    CHECK(n < 10 || from + 10 > n || !same_reals(y + from * WORDS, other + from * WORDS, (n - from) * WORDS),
          "but in their own rows");
}

/* ---- decoding ---- */

static moe_cache cache_of(const moe_net *net, size_t most) {
    moe_cache cache;
    size_t bytes = 0, shift = (size_t)below(8);
    unsigned char *memory;
    memset(&cache, 0, sizeof cache);
    CHECK_STATUS(moe_net_decode_size(net, most, 1, &bytes, NULL, NULL), MOE_OK, "the cache's size");
    memory = (unsigned char *)pooled(bytes + shift, 1);
    memset(memory, 0xff, bytes + shift);
    CHECK_STATUS(moe_net_cache_init(&cache, net, most, memory + shift, bytes, NULL), MOE_OK, "an empty cache");
    CHECK(cache.n_tokens == 0 && cache.most == most, "it is empty");
    return cache;
}

/* The call's tokens, in workspace of exactly the right size; y receives what comes out. */
static moe_status decode(const moe_net *net, moe_cache *cache, const moe_call *call, moe_real *y) {
    static size_t shift;
    size_t bytes = 0, mark = n_blocks;
    unsigned char *work;
    moe_net_pass pass;
    moe_status status = moe_net_decode_size(net, cache->most, call->n_tokens, NULL, &bytes, NULL);
    if (status != MOE_OK) return status;
    shift = (shift + 3) % 8;
    work = (unsigned char *)pooled(bytes + shift, 1);
    memset(work, 0xff, bytes + shift);
    status = moe_net_decode(net, cache, call, work + shift, bytes, &pass);
    if (status == MOE_OK && y != NULL) memcpy(y, pass.y, call->n_tokens * (size_t)net->d_out * sizeof *y);
    tidy(mark);
    return status;
}

enum { ONE_BY_ONE, IN_PIECES, AT_ONCE, WAYS };

/* Rows [from, to) of a sequence of tokens. */
static void decode_rows(const moe_net *net, moe_cache *cache, const tokens *t, size_t from, size_t to, int way,
                        moe_real *y) {
    size_t at = from, count;
    for (; at < to; at += count) {
        moe_call call;
        memset(&call, 0, sizeof call);
        count = way == AT_ONCE ? to - at : way == ONE_BY_ONE ? 1 : 1 + (size_t)below((int)(to - at));
        call.n_tokens = count;
        if (t->call.token_ids != NULL) call.token_ids = t->ids + at;
        else call.x = t->x + at * t->d;
        if (!CHECK_STATUS(decode(net, cache, &call, y + at * (size_t)net->d_out), MOE_OK, "decode")) return;
        CHECK(cache->n_tokens == at + count, "the tokens are counted");
    }
}

/* Each way of decoding has the bits of forward on the whole sequence. */
static void check_decoded(const moe_net *net, const tokens *t) {
    size_t count = t->n * (size_t)net->d_out;
    moe_call call = t->call;
    moe_real *y = pooled_reals(count);
    const moe_real *wanted;
    int way;
    call.decoding = 1;
    wanted = outputs(net, &call);
    for (way = 0; way < WAYS; way++) {
        moe_cache cache = cache_of(net, t->n + (size_t)below(4));
        decode_rows(net, &cache, t, 0, t->n, way, y);
        CHECK(same_reals(y, wanted, count),
              way == ONE_BY_ONE ? "one by one" : way == IN_PIECES ? "in pieces" : "at once");
    }
}

/* Back to an earlier place and on with other tokens; a new cache has the same bits. */
static void check_rewound(const moe_net *net, tokens *t) {
    size_t count = t->n * (size_t)net->d_out, at = (size_t)below((int)t->n), i;
    moe_real *y = pooled_reals(count), *again = pooled_reals(count);
    moe_cache cache = cache_of(net, t->n), fresh = cache_of(net, t->n);
    decode_rows(net, &cache, t, 0, t->n, AT_ONCE, y);
    for (i = at; i < t->n; i++) t->ids[i] = (int32_t)below(WORDS);
    cache.n_tokens = at;
    decode_rows(net, &cache, t, at, t->n, ONE_BY_ONE, y);
    decode_rows(net, &fresh, t, 0, at, AT_ONCE, again);
    decode_rows(net, &fresh, t, at, t->n, ONE_BY_ONE, again);
    CHECK(same_reals(y + at * (size_t)net->d_out, again + at * (size_t)net->d_out, (t->n - at) * (size_t)net->d_out),
          "rewound, the bits of a new cache");
    cache.n_tokens = 0;
    decode_rows(net, &cache, t, 0, at, AT_ONCE, y);
    CHECK(same_reals(y, again, at * (size_t)net->d_out), "begun again");
}

/* A network that cannot decode says which module forbids it, in both calls alike. */
static void check_not_decoding(const moe_net *net, const char *words) {
    moe_error first, second;
    moe_cache cache, untouched;
    size_t bytes = 0;
    memset(&untouched, 7, sizeof untouched);
    cache = untouched;
    first.message[0] = second.message[0] = '\0';
    CHECK_STATUS(moe_net_decode_size(net, 1, 1, NULL, NULL, &first), MOE_ERR_UNSUPPORTED, "no decoding");
    CHECK_WORDS(first.message, words);
    (void)moe_net_decode_size(net, 8, 1, &bytes, NULL, NULL);
    CHECK_STATUS(moe_net_cache_init(&cache, net, 8, pooled(bytes + 1, 1), bytes, &second), MOE_ERR_UNSUPPORTED,
                 "no cache");
    CHECK(strcmp(first.message, second.message) == 0, "for the same reason");
    CHECK(same_bits(&cache, &untouched, sizeof cache), "the cache is untouched");
}

/* keep = 1 changes no bits, and more tokens never take less memory. */
static void check_sizes(const moe_net *net) {
    tokens *t = draw_tokens(30, 0, WORDS, draw_with());
    const moe_real *y = outputs(net, &t->call);
    size_t n, last[3] = {0, 0, 0}, now[3] = {0, 0, 0}, k;
    size_t less = 0;
    t->call.keep = 1;
    CHECK(same_reals(y, outputs(net, &t->call), 30 * WORDS), "keep changes no bits");
    for (n = 0; n < 140; n++) {
        int good = moe_net_work_size(net, n, 0, &now[0]) == MOE_OK && moe_net_work_size(net, n, 1, &now[1]) == MOE_OK;
        if (moe_net_decode_size(net, 1, 1, NULL, NULL, NULL) == MOE_OK)
            good = good && moe_net_decode_size(net, 140, n, NULL, &now[2], NULL) == MOE_OK;
        for (k = 0; k < 3; k++) {
            less += !good || now[k] < last[k];
            last[k] = now[k];
        }
    }
    CHECK(less == 0, "more tokens, no less memory");
}

/* The pass of decoding tells who took the tokens, as that of forward does. */
static void check_decoded_routing(const moe_net *net, const tokens *t) {
    const size_t at = last_mixture(net), n = t->n;
    moe_net_pass pass, last;
    moe_cache cache = cache_of(net, n);
    moe_call call = part_of(&t->call, n - 1, n), whole = t->call;
    const moe_routing *all, *one;
    size_t bytes = 0;
    moe_real *y = pooled_reals(n * (size_t)net->d_out);
    decode_rows(net, &cache, t, 0, n - 1, AT_ONCE, y);
    CHECK_STATUS(moe_net_decode_size(net, n, 1, NULL, &bytes, NULL), MOE_OK, "work size");
    if (!CHECK_STATUS(moe_net_decode(net, &cache, &call, pooled(bytes, 1), bytes, &last), MOE_OK, "decode")) return;
    whole.decoding = 1;
    if (!CHECK_STATUS(forward(net, &whole, &pass), MOE_OK, "forward")) return;
    all = moe_net_routing(net, &pass, at);
    one = moe_net_routing(net, &last, at);
    CHECK(one->n_tokens == 1 && last.n_tokens == 1 && one->n_choices[0] == all->n_choices[n - 1],
          "one token's choices");
    CHECK(
        same_bits(one->choices, all->choices + (n - 1) * all->max_choices, (size_t)one->n_choices[0] * sizeof(int32_t)),
        "are those of forward");
    CHECK(moe_net_routing(net, &last, at - 1) == NULL, "only mixtures have a routing");
}

static void test_models(int kernels) {
    size_t i, accepted = 0, refused = 0;
    model m;
    for (i = 0; get_model(i, 0, &m); i++) {
        int manner = (int)(i & (ROTARY | TIED | LAYER_NORM)) | (i % 3 == 0 ? DROPOUT : 0), trial;
        moe_net net;
        say("a model of %s, manner %d, kernels %s", m.name, manner, moe_kernels_name(kernels));
        if (made_model(&net, &m, manner, kernels, 0)) {
            if (moe_net_decode_size(&net, 1, 1, NULL, NULL, NULL) == MOE_OK) {
                const int predicts = m.mixture[1].router.predictor;
                accepted++;
                for (trial = 0; trial < 3 && !predicts; trial++) check_causal(&net);
                check_decoded(&net, draw_tokens((size_t)(20 + below(20)), 0, WORDS, 0));
                check_decoded_routing(&net, draw_tokens((size_t)(1 + below(20)), 0, WORDS, 0));
                if (i % 4 == 0) check_decoded(&net, draw_tokens(MOST_TOKENS, 0, WORDS, 0));
                check_rewound(&net, draw_tokens((size_t)(1 + below(20)), 0, WORDS, 0));
            } else {
                refused++;
                check_not_decoding(&net, "module |(mixture)|cannot decode");
            }
            check_sizes(&net);
        }
        moe_net_free(&net);
        tidy(0);
    }
    say("all models");
    CHECK(accepted >= 40 && refused >= 10, "many decode, some do not");
    if (verbose)
        printf("note: kernels %s: %d models decode, %d do not\n", moe_kernels_name(kernels), (int)accepted,
               (int)refused);
}

static moe_buffer written(const moe_net *net) {
    moe_buffer b;
    moe_stream s;
    memset(&b, 0, sizeof b);
    s = moe_buffer_stream(&b);
    CHECK_STATUS(moe_net_write(net, &s, NULL), MOE_OK, "write");
    return b;
}

/* ---- threads, memory, counts ---- */

/* Tasks one after another, the last first. */
static void run_backwards(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    ++*(int *)ctx;
    while (count-- > 0) task(work, count);
}

static void test_threads(void) {
    int runs = 0;
    moe_parallel parallel;
    moe_net net;
    model m;
    tokens *t = draw_tokens(60, 0, WORDS, WITH_SEQUENCES);
    const moe_real *y;
    say("threads");
    parallel.ctx = &runs;
    parallel.threads = 3;
    parallel.always = 1;
    parallel.run = run_backwards;
    get_model(0, 0, &m);
    moe_net_init(&net, 0, 0, NULL);
    add_model(&net, &m, ROTARY);
    moe_net_feed_forward(&net, NULL);
    if (built(&net, 0)) {
        y = outputs(&net, &t->call);
        t->call.parallel = &parallel;
        CHECK(same_reals(y, outputs(&net, &t->call), 60 * WORDS), "any number of threads gives the same bits");
#ifndef _OPENMP
        CHECK(runs > 0, "they were asked");
#endif
    }
    moe_net_free(&net);
    tidy(0);
}

static void test_parameters(void) {
    moe_net net;
    size_t used = 0, all = 0, i;
    say("parameters");
    moe_net_init(&net, 0, 0, NULL);
    moe_net_embedding(&net, 10, 8);
    moe_net_positions(&net, 20);
    add_attention(&net, 2, 3, 0, 0, 0);
    moe_net_rms_norm(&net);
    add_set(&net, moe_net_feed_forward, "d_ff=5");
    moe_net_tied(&net);
    if (built(&net, 0)) {
        for (i = 0; i < net.n_tensors; i++) all += net.tensors[i].count;
        CHECK(all == 10 * 8 + 20 * 8 + 4 * 6 * 8 + 8 + 3 * 5 * 8 + 10, "all numbers");
        CHECK(moe_net_parameter_count(&net, &used) == all, "are counted");
        CHECK(used == 8 + 8 + 4 * 6 * 8 + 8 + 3 * 5 * 8 + 10 * 8 + 10,
              "a token uses a row of embedding and positions, and all rows for its logits");
    }
    moe_net_free(&net);
}

static moe_status add_all_kinds(moe_net *net) {
    moe_net_embedding(net, WORDS, 6);
    moe_net_positions(net, FEW_TOKENS);
    add_attention(net, 3, 0, 0, 1, 0);
    moe_net_rms_norm(net);
    moe_net_dropout(net, (moe_real)0.3);
    add_set(net, moe_net_feed_forward, "d_ff=5");
    moe_net_residual(net, 2);
    add_set(net, moe_net_mixture, "refine=attention attention_heads=all d_ff=4");
    return moe_net_tied(net);
}

/* Each allocation fails once, in building and in reading. */
static void test_no_memory(void) {
    moe_net net, back;
    moe_buffer file;
    moe_allocator allocator;
    test_heap h;
    long at, failures = 0;
    say("allocations that fail");
    allocator = test_allocator(&h, 0);
    for (at = 1; at < 100; at++) {
        moe_status status;
        h.calls = 0;
        h.fail_at = at;
        moe_net_init(&net, 0, 0, &allocator);
        add_all_kinds(&net);
        status = moe_net_build(&net, 1, 1, NULL);
        moe_net_free(&net);
        CHECK(h.blocks == 0, "nothing leaks");
        if (status == MOE_OK) break;
        CHECK_STATUS(status, MOE_ERR_MEMORY, "no memory to build");
        failures++;
    }
    CHECK(failures > 3 && at < 100, "allocations failed, then none");
    moe_net_init(&net, 0, 0, NULL);
    add_all_kinds(&net);
    if (!built(&net, 1)) return;
    file = written(&net);
    for (at = 1; at < 200; at++) {
        moe_status status;
        h.calls = 0;
        h.fail_at = at;
        status = moe_net_read(&back, file.data, file.size, 1, 0, &allocator, NULL);
        if (status == MOE_OK) moe_net_free(&back);
        CHECK(h.blocks == 0, "nothing leaks");
        if (status == MOE_OK) break;
        CHECK_STATUS(status, MOE_ERR_MEMORY, "no memory to read");
    }
    CHECK(at > 3 && at < 200, "allocations failed, then none");
    moe_buffer_free(&file);
    moe_net_free(&net);
}

/* ---- the edges of decoding ---- */

#define DECODE_FAILS(net, cache, call, work, bytes, status, what) \
    check_decode_fails(net, cache, call, work, bytes, status, what, __LINE__)

/* On failure the cache is as it was; its memory, too, if it has room for no token. */
static void check_decode_fails(const moe_net *net, moe_cache *cache, const moe_call *call, void *work, size_t bytes,
                               moe_status wanted, const char *what, int line) {
    moe_cache before = *cache;
    unsigned char *memory = (unsigned char *)pooled(cache->size, 1);
    moe_net_pass pass;
    memcpy(memory, cache->memory, cache->size);
    CHECK_STATUS_AT(line, moe_net_decode(net, cache, call, work, bytes, &pass), wanted, what);
    CHECK_AT(line, same_bits(&before, cache, sizeof before), "the cache is as it was");
    if (cache->n_tokens == cache->most)
        CHECK_AT(line, same_bits(memory, cache->memory, cache->size), "so is its memory");
}

/* Workspace, settings and ids of a call, after four tokens. */
static void refuse_decoding(tokens *t, moe_net *net, moe_cache *cache, moe_call *good, size_t *bytes, void **work) {
    enum { MOST = 9 };
    const moe_real numbers[1] = {0};
    moe_call call;
    size_t small = 0;
    size_t i;
    unsigned char mask[1] = {1};
    int32_t offsets[2] = {0, 1};
    CHECK_STATUS(moe_net_decode_size(net, MOST, MOST + 1, NULL, bytes, NULL), MOE_OK, "work size");
    CHECK_STATUS(moe_net_decode_size(net, MOST, 1, NULL, &small, NULL), MOE_OK, "work size");
    CHECK(small < *bytes, "less for fewer tokens");
    *work = pooled(*bytes, 1);
    DECODE_FAILS(net, cache, good, *work, small - 1, MOE_ERR_SPACE, "a byte of work less");
    DECODE_FAILS(net, cache, good, NULL, *bytes, MOE_ERR_ARGUMENT, "no work");
    DECODE_FAILS(net, cache, NULL, *work, *bytes, MOE_ERR_ARGUMENT, "no call");
    call = *good;
    call.token_ids = NULL;
    DECODE_FAILS(net, cache, &call, *work, *bytes, MOE_ERR_ARGUMENT, "no ids");
    call = *good;
    call.training = 1;
    DECODE_FAILS(net, cache, &call, *work, *bytes, MOE_ERR_ARGUMENT, "training");
    call = *good;
    call.keep = 1;
    DECODE_FAILS(net, cache, &call, *work, *bytes, MOE_ERR_ARGUMENT, "keep");
    call = *good;
    call.sequences = offsets;
    call.n_sequences = 1;
    DECODE_FAILS(net, cache, &call, *work, *bytes, MOE_ERR_ARGUMENT, "sequences");
    call = *good;
    call.mask = mask;
    DECODE_FAILS(net, cache, &call, *work, *bytes, MOE_ERR_ARGUMENT, "a mask");
    call = *good;
    call.n_past = 1;
    DECODE_FAILS(net, cache, &call, *work, *bytes, MOE_ERR_ARGUMENT, "n_past");
    call = *good;
    call.past_u = numbers;
    DECODE_FAILS(net, cache, &call, *work, *bytes, MOE_ERR_ARGUMENT, "past_u");
    call = *good;
    call.past_gate = numbers;
    DECODE_FAILS(net, cache, &call, *work, *bytes, MOE_ERR_ARGUMENT, "past_gate");
    for (i = 0; i < 2; i++) {
        int32_t was = t->ids[4];
        t->ids[4] = i ? -1 : WORDS;
        DECODE_FAILS(net, cache, good, *work, *bytes, MOE_ERR_ARGUMENT, "an id that the vocabulary has not");
        t->ids[4] = was;
    }
    call = *good;
    call.n_tokens = MOST - 3;
    DECODE_FAILS(net, cache, &call, *work, *bytes, MOE_ERR_SPACE, "more than there is room for");
}

static void test_decoding_errors(void) {
    enum { MOST = 9 };
    tokens *t = draw_tokens(MOST + 1, 0, WORDS, 0);
    model m;
    moe_net net;
    moe_cache cache;
    moe_call call, good;
    size_t bytes = 0;
    void *work;
    moe_real *y = pooled_reals((MOST + 1) * WORDS), *again = pooled_reals((MOST + 1) * WORDS);
    say("what decoding refuses");
    get_model(0, 0, &m);
    moe_net_init(&net, 0, 0, NULL);
    add_model(&net, &m, TIED);
    CHECK_STATUS(moe_net_decode_size(&net, MOST, 1, &bytes, NULL, NULL), MOE_ERR_STATE, "before build");
    CHECK_STATUS(moe_net_decode_size(&net, MOST, 1, NULL, &bytes, NULL), MOE_ERR_STATE, "before build");
    if (!built(&net, 0)) return;
    CHECK_STATUS(moe_net_decode_size(&net, (size_t)-1, 1, &bytes, NULL, NULL), MOE_ERR_OVERFLOW,
                 "more than there is memory");
    CHECK_STATUS(moe_net_decode_size(&net, MOST, 1, &bytes, NULL, NULL), MOE_OK, "size");
    CHECK_STATUS(moe_net_cache_init(&cache, &net, MOST, pooled(bytes, 1), bytes - 1, NULL), MOE_ERR_SPACE,
                 "a byte less");
    CHECK_STATUS(moe_net_cache_init(&cache, &net, MOST, NULL, bytes, NULL), MOE_ERR_ARGUMENT, "no memory");
    CHECK_STATUS(moe_net_cache_init(NULL, &net, MOST, pooled(bytes, 1), bytes, NULL), MOE_ERR_ARGUMENT, "no cache");
    cache = cache_of(&net, MOST);
    decode_rows(&net, &cache, t, 0, 4, AT_ONCE, y);
    memset(&good, 0, sizeof good);
    good.n_tokens = 1;
    good.token_ids = t->ids + 4;
    refuse_decoding(t, &net, &cache, &good, &bytes, &work);
    CHECK_STATUS(decode(&net, &cache, &good, y + 4 * WORDS), MOE_OK, "after all that");
    decode_rows(&net, &cache, t, 5, MOST, AT_ONCE, y);
    DECODE_FAILS(&net, &cache, &good, work, bytes, MOE_ERR_SPACE, "a full cache");
    CHECK(cache.n_tokens == MOST, "full");
    cache = cache_of(&net, MOST);
    decode_rows(&net, &cache, t, 0, 4, AT_ONCE, again);
    decode_rows(&net, &cache, t, 4, 5, AT_ONCE, again);
    decode_rows(&net, &cache, t, 5, MOST, AT_ONCE, again);
    CHECK(same_reals(y, again, MOST * WORDS), "failures left no trace");
    call = good;
    call.n_tokens = 0;
    CHECK(decode(&net, &cache, &call, NULL) == MOE_OK && cache.n_tokens == MOST, "no tokens");
    moe_net_free(&net);
    tidy(0);
}

/* Rows instead of ids; learned places that end; attention that sees later tokens. */
static void test_other_decoding(void) {
    moe_net net;
    moe_cache cache;
    moe_call call;
    tokens *t;
    say("decoding of rows");
    moe_net_init(&net, 6, 0, NULL);
    moe_net_linear(&net, 8);
    add_attention(&net, 3, 2, 0, 1, 0);
    moe_net_residual(&net, 1);
    moe_net_activation(&net, MOE_ACT_GELU);
    moe_net_feed_forward(&net, NULL);
    moe_net_dropout(&net, (moe_real)0.5);
    add_attention(&net, 2, 0, 0, 0, 0);
    moe_net_layer_norm(&net);
    if (built(&net, 0)) check_decoded(&net, draw_tokens(MOST_TOKENS, 6, 0, 0));
    moe_net_free(&net);
    say("decoding beyond the last place");
    moe_net_init(&net, 0, 0, NULL);
    moe_net_embedding(&net, WORDS, 4);
    moe_net_positions(&net, 5);
    if (built(&net, 0)) {
        moe_real *y = pooled_reals(8 * 4);
        t = draw_tokens(8, 0, WORDS, 0);
        cache = cache_of(&net, 8);
        decode_rows(&net, &cache, t, 0, 5, ONE_BY_ONE, y);
        memset(&call, 0, sizeof call);
        call.n_tokens = 1;
        call.token_ids = t->ids;
        CHECK_STATUS(decode(&net, &cache, &call, NULL), MOE_ERR_ARGUMENT, "a place that positions have not");
        CHECK(cache.n_tokens == 5, "the cache is as it was");
    }
    moe_net_free(&net);
    say("decoding with full attention");
    moe_net_init(&net, 6, 0, NULL);
    moe_net_linear(&net, 8);
    add_attention(&net, 2, 0, 1, 0, 0);
    if (built(&net, 0)) check_not_decoding(&net, "module 1 (attention)|full = 1");
    moe_net_free(&net);
    moe_net_init(&net, 6, 0, NULL);
    add_attention(&net, 2, 0, 1, 0, 0);
    moe_net_layer_norm(&net);
    if (built(&net, 0)) check_not_decoding(&net, "module 0 (attention)|full = 1");
    moe_net_free(&net);
    tidy(0);
}

/* A router fails on NaN, when the attention before it has run: the next token has its place. */
static void test_failed_decoding(void) {
    moe_layer_config c;
    moe_net net;
    moe_cache cache[2];
    moe_call call;
    moe_real x[6], y[2][6];
    int failing, t, q;
    say("decoding that fails half way");
    moe_net_init(&net, 6, 0, NULL);
    add_attention(&net, 3, 2, 0, 1, 0);
    memset(&c, 0, sizeof c);
    moe_net_mixture(&net, &c);
    if (!built(&net, 0)) return;
    memset(&call, 0, sizeof call);
    call.n_tokens = 1;
    call.x = x;
    for (failing = 0; failing < 2; failing++) {
        cache[failing] = cache_of(&net, 4);
        for (t = 0; t < 4; t++) {
            for (q = 0; q < 6; q++) x[q] = (moe_real)HUGE_VAL - (moe_real)HUGE_VAL;
            if (failing) CHECK_STATUS(decode(&net, &cache[1], &call, NULL), MOE_ERR_NONFINITE, "NaN");
            for (q = 0; q < 6; q++) x[q] = (moe_real)(t + 1) * (moe_real)(q - 2);
            CHECK_STATUS(decode(&net, &cache[failing], &call, y[failing]), MOE_OK, "numbers");
            CHECK(cache[failing].n_tokens == (size_t)t + 1, "counted once");
        }
    }
    CHECK(same_reals(y[0], y[1], 6), "failures left no trace");
    moe_net_free(&net);
    tidy(0);
}

static void test_decoding(void) {
    int kernels;
    for (kernels = MOE_KERNELS_C; kernels < MOE_KERNELS_COUNT; kernels++)
        if (moe_kernels_select(kernels) != NULL) test_models(kernels);
    test_decoding_errors();
    test_other_decoding();
    test_failed_decoding();
}

/* ---- files ---- */

/* What is read has the same tensors, the same settings and the same results, in training too. */
static void check_file(const moe_net *net, tokens *t) {
    moe_buffer first = written(net), second;
    moe_error error;
    moe_net back;
    size_t i;
    error.message[0] = '\0';
    if (CHECK_STATUS(moe_net_read(&back, first.data, first.size, 1, net->kernels->id, NULL, &error), MOE_OK, "read")) {
        second = written(&back);
        CHECK(first.size == second.size && same_bits(first.data, second.data, first.size), "the same bytes");
        CHECK(back.n_tensors == net->n_tensors && back.n_modules == net->n_modules, "as many tensors and modules");
        for (i = 0; i < net->n_tensors && i < back.n_tensors; i++)
            CHECK(strcmp(net->tensors[i].name, back.tensors[i].name) == 0 &&
                      same_reals(net->tensors[i].data, back.tensors[i].data, net->tensors[i].count),
                  net->tensors[i].name);
        for (i = 0; i < 2; i++) {
            moe_rng start = rng, again = rng;
            const moe_real *y;
            t->call.training = (int)i;
            t->call.rng = &start;
            y = outputs(net, &t->call);
            t->call.rng = &again;
            CHECK(same_reals(y, outputs(&back, &t->call), t->n * (size_t)net->d_out), "the same results");
        }
        moe_buffer_free(&second);
        moe_net_free(&back);
    } else printf("        %s\n", error.message);
    moe_buffer_free(&first);
}

static void test_files(void) {
    static const char *const experts[] = {"", "expert=mlp act=tanh d_ff=3", "expert=linear no_expert_bias=1",
                                          "expert=factorised d_low=2"};
    moe_net net;
    size_t i;
    model m;
    for (i = 0; i < 8; i++) {
        say("a file with every kind of module, %d", (int)i);
        moe_net_init(&net, 0, 0, NULL);
        moe_net_embedding(&net, WORDS, 6);
        moe_net_positions(&net, FEW_TOKENS);
        add_attention(&net, i & 1 ? 3 : 0, i & 2 ? 4 : 0, i & 4 ? 1 : 0, (int)(i & 1), i & 2 && i & 1 ? 123.25 : 0);
        moe_net_rms_norm(&net);
        moe_net_dropout(&net, (moe_real)(i & 1 ? 0.3 : 0));
        add_set(&net, moe_net_feed_forward, experts[i % 4]);
        moe_net_residual(&net, 2);
        moe_net_linear(&net, 6);
        moe_net_activation(&net, MOE_ACT_SILU);
        moe_net_layer_norm(&net);
        add_set(&net, moe_net_mixture,
                i & 2 ? "refine=attention attention_heads=all d_ff=4" : "refine=similarity d_ff=4 d_latent=3");
        moe_net_tied(&net);
        if (built(&net, 1)) check_file(&net, draw_tokens(20, 0, WORDS, draw_with()));
        moe_net_free(&net);
        tidy(0);
    }
    for (i = 0; get_model(i, 0, &m); i++) {
        say("a file of %s", m.name);
        if (made_model(&net, &m, (int)(i & 31u), 0, 1)) check_file(&net, draw_tokens(20, 0, WORDS, draw_with()));
        moe_net_free(&net);
        tidy(0);
    }
}

/* A file with this configuration and the network's tensors is refused, and what was to receive it
   is untouched. */
static void check_config(const moe_net *net, const char *config, moe_status wanted, const char *words, int line) {
    moe_buffer b;
    moe_stream s;
    moe_metadata m;
    moe_error error;
    moe_net back, untouched;
    moe_status status;
    memset(&b, 0, sizeof b);
    memset(&untouched, 7, sizeof untouched);
    s = moe_buffer_stream(&b);
    m.key = "moe";
    m.value = config;
    sprintf(doing, "%.250s", config);
    CHECK_STATUS_AT(line, moe_file_write(&s, net->tensors, net->n_tensors, &m, 1, NULL, NULL), MOE_OK,
                    "a file for a test");
    error.message[0] = '\0';
    back = untouched;
    status = moe_net_read(&back, b.data, b.size, 1, 0, NULL, &error);
    if (!CHECK_STATUS_AT(line, status, wanted, "a configuration")) printf("        %s\n", error.message);
    check_words(error.message, words, line);
    if (status == MOE_OK) moe_net_free(&back);
    else CHECK_AT(line, same_bits(&back, &untouched, sizeof back), "the target is untouched");
    moe_buffer_free(&b);
}

#define TAIL "," MODULE("dropout", ",\"rate\":0.5") "," TIED_ROWS
#define CONFIG(net, config, wanted, words) check_config(net, config, wanted, words, __LINE__)
#define MODULES(d_in, list) "{\"format\":1,\"net\":{\"d_in\":" d_in ",\"modules\":[" list "]}}"
#define MODULE(kind, more) "{\"module\":\"" kind "\"" more "}"
#define EMBEDDING MODULE("embedding", ",\"vocabulary\":5,\"d\":4")
#define ATTENTION(more) MODULE("attention", ",\"heads\":2" more)
#define TIED_ROWS MODULE("tied", "")

static void check_other_modules(moe_net *net) {
    CONFIG(net, MODULES("0", EMBEDDING "," MODULE("tied", ",\"bias\":0")), MOE_ERR_UNSUPPORTED, "unknown key 'bias'");
    CONFIG(net, MODULES("0", MODULE("embedding", ",\"vocabulary\":5")), MOE_ERR_CONFIG, "d = 0");
    CONFIG(net, MODULES("0", MODULE("embedding", ",\"d\":4")), MOE_ERR_CONFIG, "vocabulary = 0");
    CONFIG(net, MODULES("0", MODULE("embedding", ",\"vocabulary\":6,\"d\":4") "," ATTENTION("") TAIL), MOE_ERR_SHAPE,
           "0.weight");
    CONFIG(net, MODULES("0", MODULE("embedding", ",\"vocabulary\":16777216,\"d\":16777216") "," ATTENTION("") TAIL),
           MOE_ERR_SHAPE, "0.weight");
    CONFIG(net, MODULES("0", EMBEDDING "," MODULE("positions", "") TAIL), MOE_ERR_CONFIG,
           "module 1 (positions)|most = 0");
    CONFIG(net, MODULES("0", EMBEDDING "," ATTENTION("") "," MODULE("positions", ",\"most\":7") TAIL),
           MOE_ERR_UNSUPPORTED, "3.bias");
    CONFIG(net, MODULES("0", EMBEDDING "," MODULE("rms_norm", ",\"epsilon\":7") TAIL), MOE_ERR_UNSUPPORTED,
           "unknown key 'epsilon'");
    CONFIG(net, MODULES("0", EMBEDDING "," MODULE("feed_forward", ",\"n_experts\":2") TAIL), MOE_ERR_UNSUPPORTED,
           "module 1|unknown key 'n_experts'");
    CONFIG(net, MODULES("0", EMBEDDING "," MODULE("feed_forward", ",\"expert\":\"tree\"") TAIL), MOE_ERR_CONFIG,
           "expert = tree");
    CONFIG(net, MODULES("0", EMBEDDING "," MODULE("feed_forward", ",\"d_ff\":-3") TAIL), MOE_ERR_CONFIG, "d_ff = -3");
    CONFIG(net, MODULES("0", EMBEDDING "," MODULE("attend", "") TAIL), MOE_ERR_UNSUPPORTED,
           "module 1: unknown module 'attend'");
    CONFIG(
        net,
        MODULES("0", EMBEDDING "," ATTENTION("") "," MODULE("mixture", ",\"refine\":\"attention\",\"heads\":3") TAIL),
        MOE_ERR_CONFIG, "module 2 (mixture)|heads = 3|2");
}

static void test_configurations(void) {
    moe_net net;
    moe_net_init(&net, 0, 0, NULL);
    moe_net_embedding(&net, 5, 4);
    add_attention(&net, 2, 0, 0, 0, 0);
    moe_net_dropout(&net, (moe_real)0.5);
    moe_net_tied(&net);
    if (!built(&net, 0)) return;
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION("") TAIL), MOE_OK, "");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION(",\"d_head\":2,\"full\":1,\"rotary\":1,\"rotary_base\":50") TAIL),
           MOE_OK, "");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION(",\"heads\":2") TAIL), MOE_ERR_FORMAT, "'heads' occurs twice");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION(",\"breadth\":3") TAIL), MOE_ERR_UNSUPPORTED,
           "module 1|unknown key 'breadth'");
    CONFIG(&net, MODULES("0", EMBEDDING "," MODULE("attention", ",\"heads\":3") TAIL), MOE_ERR_CONFIG,
           "module 1 (attention)|heads = 3|4");
    CONFIG(&net, MODULES("0", EMBEDDING "," MODULE("attention", ",\"heads\":-2") TAIL), MOE_ERR_CONFIG, "heads = -2");
    CONFIG(&net, MODULES("0", EMBEDDING "," MODULE("attention", ",\"heads\":2.5") TAIL), MOE_ERR_CONFIG, "heads = 2.5");
    CONFIG(&net, MODULES("0", EMBEDDING "," MODULE("attention", ",\"heads\":\"2\"") TAIL), MOE_ERR_FORMAT,
           "heads must be a number");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION(",\"d_head\":-1") TAIL), MOE_ERR_CONFIG, "d_head = -1");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION(",\"d_head\":3") TAIL), MOE_ERR_SHAPE, "1.query");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION(",\"d_head\":3,\"rotary\":1") TAIL), MOE_ERR_CONFIG,
           "d_head = 3|rotary");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION(",\"d_head\":16777216") TAIL), MOE_ERR_CONFIG,
           "d_head = 16777216");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION(",\"d_head\":8388608") TAIL), MOE_ERR_SHAPE, "1.query");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION(",\"full\":2") TAIL), MOE_ERR_CONFIG, "full = 2");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION(",\"rotary\":1,\"rotary_base\":-1") TAIL), MOE_ERR_CONFIG,
           "rotary_base = -1");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION("") "," MODULE("dropout", ",\"rate\":1") "," TIED_ROWS),
           MOE_ERR_CONFIG, "module 2 (dropout)|rate = 1");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION("") "," MODULE("dropout", ",\"rate\":-0.25") "," TIED_ROWS),
           MOE_ERR_CONFIG, "rate = -0.25");
    CONFIG(&net, MODULES("0", EMBEDDING "," ATTENTION("") "," MODULE("dropout", ",\"p\":0.5") "," TIED_ROWS),
           MOE_ERR_UNSUPPORTED, "unknown key 'p'");
    CONFIG(&net, MODULES("0", ATTENTION("") TAIL), MOE_ERR_CONFIG, "module 0 (attention)|embedding");
    CONFIG(&net, MODULES("4", EMBEDDING "," ATTENTION("") TAIL), MOE_ERR_CONFIG, "module 0 (embedding)");
    CONFIG(&net, MODULES("4", ATTENTION("") TAIL), MOE_ERR_CONFIG, "module 2 (tied)|embedding");
    CONFIG(&net, MODULES("-1", EMBEDDING), MOE_ERR_CONFIG, "d_in = -1");
    CONFIG(&net, MODULES("0", EMBEDDING "," EMBEDDING TAIL), MOE_ERR_CONFIG, "module 1 (embedding)");
    CONFIG(&net, MODULES("0", EMBEDDING "," MODULE("linear", ",\"d_out\":3") TAIL), MOE_ERR_CONFIG,
           "module 3 (tied)|4|3");
    check_other_modules(&net);
    moe_net_free(&net);
}

#if MOE_REAL_IS_DOUBLE

/* ---- gradients: central differences ---- */

#define BOUND 1e-6

/* L = sum(y * dy) + the losses of all routers, as a function of tensors and x. */
typedef struct subject {
    moe_net *net;
    moe_call call;
    const double *dy;
    void *work;
    size_t bytes;
    moe_net_pass pass;
    moe_rng drawn;             /* as it is before each evaluation: the same draws each time */
    uint64_t decisions, first; /* who was chosen, in the last evaluation and at the start */
    size_t numbers, skipped;
    double worst, rounding; /* error so far; what L leaves in a difference */
    char worst_name[MOE_NAME_SIZE];
} subject;

static size_t all_numbers, all_skipped;
static double all_worst;

static void decide(subject *s, size_t what) { s->decisions = (s->decisions ^ what) * UINT64_C(0x100000001b3); }

static void note_choices(subject *s, const moe_routing *r) {
    size_t t, i, e;
    for (t = 0; t < r->n_tokens && r->plan.rows == 0; t++) {
        decide(s, (size_t)r->n_choices[t]);
        for (i = 0; i < (size_t)r->n_choices[t]; i++)
            decide(s, 2 * (size_t)r->choices[t * r->max_choices + i] + r->kept[t * r->max_choices + i]);
    }
    for (e = 0; e <= r->n_experts; e++) decide(s, r->plan.offsets[e]);
}

static double evaluate(subject *s) {
    size_t i, k;
    double sum = 0.0;
    moe_rng again = s->drawn;
    s->call.rng = &again;
    s->decisions = 1;
    if (moe_net_forward(s->net, &s->call, s->work, s->bytes, &s->pass) != MOE_OK) return HUGE_VAL;
    for (i = 0; i < s->call.n_tokens * (size_t)s->net->d_out; i++) sum += s->pass.y[i] * s->dy[i];
    for (i = 0; i < s->net->n_modules; i++) {
        const moe_routing *r = moe_net_routing(s->net, &s->pass, i);
        if (r == NULL) continue;
        for (k = 0; k < MOE_LOSS_COUNT; k++) sum += r->loss[k];
        note_choices(s, r);
    }
    return sum;
}

/* A way through numbers: value = base + h direction. */
typedef struct line {
    double *value;
    const double *base, *direction;
    size_t count;
} line;

static int evaluate_at(subject *s, const line *way, double h, double *result) {
    size_t i;
    for (i = 0; i < way->count; i++) way->value[i] = way->base[i] + h * way->direction[i];
    *result = evaluate(s);
    memcpy(way->value, way->base, way->count * sizeof(double));
    return *result < HUGE_VAL && s->decisions == s->first;
}

static int central(subject *s, const line *way, double h, double *slope) {
    double there, back;
    if (!evaluate_at(s, way, h, &there) || !evaluate_at(s, way, -h, &back)) return 0;
    *slope = (there - back) / (2.0 * h);
    return 1;
}

/* The slope nearest to what is expected, of several steps: kinks and rounding spoil some. 0 when
   each step changes a decision. */
static int slope_of(subject *s, const line *way, double expected, double allowed, double *slope) {
    static const double steps[] = {2e-4, 2e-5, 2e-3, 2e-6, 2e-7};
    double wide, narrow;
    size_t k;
    int found = 0;
    for (k = 0; k < sizeof steps / sizeof steps[0] && !(found && fabs(*slope - expected) <= allowed); k++) {
        if (!central(s, way, steps[k], &wide) || !central(s, way, steps[k] / 2.0, &narrow)) continue;
        narrow = (4.0 * narrow - wide) / 3.0;
        if (!found || fabs(narrow - expected) < fabs(*slope - expected)) *slope = narrow;
        found = 1;
    }
    return found;
}

static void check_slope(subject *s, const char *name, const line *way, double expected, double scale) {
    double slope = 0.0, error;
    s->numbers++;
    if (!slope_of(s, way, expected, 0.1 * BOUND * scale, &slope)) {
        s->skipped++;
        return;
    }
    if (fabs(slope) > scale) scale = fabs(slope);
    error = fabs(slope - expected) <= s->rounding ? 0.0 : fabs(slope - expected) / scale;
    if (!(error <= s->worst)) {
        s->worst = error < HUGE_VAL ? error : HUGE_VAL;
        sprintf(s->worst_name, "%.60s", name);
    }
}

/* every: each number by itself; else some of them, and a direction through all. */
static void check_variable(subject *s, const char *name, double *value, const double *gradient, size_t count,
                           int every) {
    double *base = widened(value, count), *direction = doubles(count);
    double size = 0.0, largest = 0.0;
    double expected = 0.0;
    size_t i;
    line way;
    static const double along = 1.0;
    for (i = 0; i < count; i++) {
        direction[i] = 2.0 * moe_rng_uniform(&rng) - 1.0;
        expected += direction[i] * gradient[i];
        size += gradient[i] * gradient[i];
        if (!(fabs(gradient[i]) <= largest)) largest = fabs(gradient[i]);
    }
    way.value = value;
    way.base = base;
    way.direction = direction;
    way.count = count;
    check_slope(s, name, &way, expected, 1e-8 + sqrt(size));
    for (i = 0; i < (every || count < 3 ? count : 3); i++) {
        size_t at = every || count < 3 ? i : (size_t)moe_rng_below(&rng, count);
        way.value = value + at;
        way.base = base + at;
        way.direction = &along;
        way.count = 1;
        check_slope(s, name, &way, gradient[at], 1e-8 + largest);
    }
}

static void check_tensor(subject *s, const moe_tensor *t, int every) {
    size_t i, off = 0;
    if ((t->flags & (MOE_PARAM_FROZEN | MOE_PARAM_STATE)) == 0) {
        check_variable(s, t->name, t->data, t->gradient, t->count, every);
        return;
    }
    for (i = 0; i < t->count && t->gradient != NULL; i++) off += !(t->gradient[i] <= 0.0 && t->gradient[i] >= 0.0);
    CHECK(off == 0, "nothing reaches what is not trained");
}

/* Checks the tensors of a trainable net's modules from `from` on, but those with `without` in their
   name, and x when from is 0. */
static void check_gradients(moe_net *net, tokens *t, size_t from, const char *without, int every) {
    subject s;
    size_t i, n = t->n;
    double *dx = doubles(n * (size_t)net->d_in + 1), start;
    memset(&s, 0, sizeof s);
    s.net = net;
    s.call = t->call;
    s.dy = normals(n * (size_t)net->d_out, 0.5);
    s.drawn = rng;
    s.call.training = 1;
    moe_rng_next(&rng);
    CHECK_STATUS(moe_net_work_size(net, n, 1, &s.bytes), MOE_OK, "work size");
    s.work = pooled(s.bytes, 1);
    memset(s.work, 0xff, s.bytes);
    start = evaluate(&s);
    if (!CHECK(start < HUGE_VAL, "forward")) return;
    s.first = s.decisions;
    s.rounding = 1e-10 * (1.0 + fabs(start));
    net_zero_gradients(net);
    if (!CHECK_STATUS(moe_net_backward(net, s.dy, net->d_in > 0 ? dx : NULL, &s.pass), MOE_OK, "backward")) return;
    for (i = 0; i < net->n_tensors; i++)
        if ((size_t)atoi(net->tensors[i].name) >= from &&
            (without == NULL || strstr(net->tensors[i].name, without) == NULL))
            check_tensor(&s, &net->tensors[i], every);
    if (from == 0 && net->d_in > 0) check_variable(&s, "x", t->x, dx, n * (size_t)net->d_in, every);
    if (!CHECK(s.worst <= BOUND, "gradient")) printf("        off by %.2g at %s\n", s.worst, s.worst_name);
    all_numbers += s.numbers;
    all_skipped += s.skipped;
    if (s.worst > all_worst) all_worst = s.worst;
    if (verbose && s.skipped > 0) printf("note: %d of %d skipped [%s]\n", (int)s.skipped, (int)s.numbers, doing);
}

/* Builds, checks every number, frees. */
static void check_module(moe_net *net, int vocabulary, int with) {
    size_t n = 1 + (size_t)below(9);
    if (built(net, 1)) check_gradients(net, draw_tokens(n, (size_t)net->d_in, vocabulary, with), 0, NULL, 1);
    moe_net_free(net);
    tidy(0);
}

static const char *choice_name(const char *field, int value) {
    return moe_field_find(moe_layer_fields(), field)->choices[value];
}

static void test_gradients_of_modules(void) {
    int trial, expert, act;
    moe_net net;
    for (trial = 0; trial < 60; trial++) {
        moe_attention_config c = draw_attention();
        int d = 1 + below(6), with = draw_with();
        say("gradients of attention, d %d, %d heads of %d, full %d, rotary %d, with %d", d, c.heads, c.d_head, c.full,
            c.rotary, with);
        moe_net_init(&net, d, 0, NULL);
        moe_net_attention(&net, &c);
        check_module(&net, 0, with);
    }
    for (trial = 0; trial < 8; trial++) {
        int d = 1 + below(6);
        say("gradients of a small module, d %d", d);
        moe_net_init(&net, d, 0, NULL);
        moe_net_rms_norm(&net);
        check_module(&net, 0, draw_with());
        moe_net_init(&net, d, 0, NULL);
        moe_net_dropout(&net, 0.4);
        check_module(&net, 0, draw_with());
        moe_net_init(&net, d, 0, NULL);
        moe_net_positions(&net, 9);
        check_module(&net, 0, draw_with());
        moe_net_init(&net, 0, 0, NULL);
        moe_net_embedding(&net, 4, d);
        check_module(&net, 4, draw_with());
        moe_net_init(&net, 0, 0, NULL);
        moe_net_embedding(&net, 4, d);
        moe_net_tied(&net);
        check_module(&net, 4, draw_with());
        moe_net_init(&net, 0, 0, NULL);
        moe_net_embedding(&net, 4, d);
        moe_net_rms_norm(&net);
        moe_net_residual(&net, 1);
        moe_net_tied(&net);
        check_module(&net, 4, draw_with());
    }
    for (expert = 0; expert < MOE_EXPERT_COUNT; expert++)
        for (act = 0; act < (takes_act(expert) ? (int)MOE_ACT_COUNT : 1); act++) {
            char settings[60];
            sprintf(settings, "expert=%s d_ff=4 %s%s", choice_name("expert", expert),
                    expert == MOE_EXPERT_FACTORISED ? "d_low=2" : "act=",
                    expert == MOE_EXPERT_FACTORISED ? "" : choice_name("act", act));
            say("gradients of feed_forward, %s", settings);
            moe_net_init(&net, 3, 0, NULL);
            add_set(&net, moe_net_feed_forward, settings);
            check_module(&net, 0, draw_with());
        }
    for (trial = 0; trial < 4; trial++) { /* more tokens than a block of queries */
        say("gradients of attention with many tokens, full %d, rotary %d", trial & 1, trial & 2);
        moe_net_init(&net, 2, 0, NULL);
        add_attention(&net, 2, 2, trial & 1, (trial & 2) != 0, 0);
        if (built(&net, 1))
            check_gradients(&net, draw_tokens(150, 2, 0, trial > 1 ? WITH_MASK | WITH_SEQUENCES : 0), 0, NULL, 0);
        moe_net_free(&net);
        tidy(0);
    }
}

/* Several routers read one attention, and another one behind it. */
static void test_gradients_of_readers(void) {
    static const char *const heads[] = {"attention_heads=all", "attention_heads=min_entropy",
                                        "attention_heads=fixed attention_head=1 heads=2"};
    int trial;
    for (trial = 0; trial < 12; trial++) {
        int full = trial & 1, with = draw_with();
        char first[120], second[120];
        moe_net net;
        sprintf(first, "refine=attention %s loss_balance=0.1 n_experts=5 d_ff=3", heads[trial % 3]);
        sprintf(second, "refine=attention attention_u=output %s loss_balance=0.1 n_experts=4 d_ff=3",
                heads[trial / 2 % 3]);
        say("gradients of mixtures that read one attention: %s, full %d, with %d", second, full, with);
        moe_net_init(&net, 6, 0, NULL);
        add_attention(&net, 2, 3 + (trial & 1), full, 0, 0);
        add_set(&net, moe_net_mixture, first);
        moe_net_residual(&net, 1);
        add_set(&net, moe_net_mixture, second);
        moe_net_residual(&net, 1);
        add_attention(&net, 2, 0, full, 0, 0);
        moe_net_residual(&net, 1);
        add_set(&net, moe_net_mixture, second);
        moe_net_residual(&net, 1);
        if (built(&net, 1)) check_gradients(&net, draw_tokens(9, 6, 0, with), 0, NULL, 0);
        moe_net_free(&net);
        tidy(0);
    }
}

static void test_gradients_of_models(void) {
    size_t i, n = 11;
    model m;
    for (i = 0; get_model(i, 1, &m); i++) {
        int manner = (int)(i & (ROTARY | FULL | TIED | LAYER_NORM)) | (i % 3 == 0 ? DROPOUT : 0), with = draw_with();
        tokens *t = draw_tokens(n, 0, WORDS, with);
        moe_net net;
        double *distances = doubles(n * n);
        size_t k;
        for (k = 0; k < n * n; k++) distances[k] = moe_rng_uniform(&rng);
        /* those of the inputs would be constants for the gradient, but not for a difference */
        t->call.distances = distances;
        say("gradients of a model: %s, manner %d, with %d", m.name, manner, with);
        if (made_model(&net, &m, manner, 0, 1))
            check_gradients(&net, t, m.clusters || m.estimate ? last_mixture(&net) : 0, m.estimate ? ".router." : NULL,
                            0);
        moe_net_free(&net);
        tidy(0);
    }
    say("all models");
    CHECK(all_skipped * 33 <= all_numbers, "few numbers are skipped");
    if (verbose)
        printf("note: gradients: %d numbers and directions, %d skipped, off by %.2g at most\n", (int)all_numbers,
               (int)all_skipped, all_worst);
}

#endif

int main(int count, char **words) {
    verbose = count > 1 && strcmp(words[1], "-v") == 0;
    test_about = doing;
    moe_rng_seed(&rng, 20261121);
    CASE(test_modules());
    CASE(test_padding());
    CASE(test_dropout());
    CASE(test_forward_errors());
    CASE(test_refused_modules());
    CASE(test_late_modules());
    CASE(test_attention_first());
    CASE(test_padding_first());
    CASE(test_refinement());
    CASE(test_threads());
    CASE(test_parameters());
    CASE(test_no_memory());
    CASE(test_files());
    CASE(test_configurations());
    CASE(test_decoding());
    CASE(test_sampling());
#if MOE_REAL_IS_DOUBLE
    CASE(test_gradients_of_modules());
    CASE(test_gradients_of_readers());
    CASE(test_gradients_of_models());
#endif
    return test_end();
}
