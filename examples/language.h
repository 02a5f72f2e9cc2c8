/* Shared by the examples that train language models: texts as token ids, a network from a few
   settings, batches, losses. Include it after moe.h.

   A text is a sequence of token ids: bytes, or words between white space. language_learn takes the
   vocabulary from the training text; other texts are read with it. The network is embedding, layers
   of [rms_norm, attention, residual, rms_norm, MoE layer, residual], rms_norm, linear. Functions
   that can fail return a moe_status and fill in error. */
#ifndef LANGUAGE_H
#define LANGUAGE_H

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline moe_status language_error(moe_error *error, moe_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (error != NULL) {
        error->code = status;
        vsnprintf(error->message, sizeof error->message, format, arguments);
    }
    va_end(arguments);
    return status;
}

static inline moe_status language_no_memory(moe_error *error) {
    return language_error(error, MOE_ERR_MEMORY, "out of memory");
}

/* ---- texts ---- */

typedef struct language_word {
    const char *text; /* points into the text of the vocabulary; not terminated */
    size_t length, count;
    int32_t id;
} language_word;

/* The vocabulary. {0} before language_learn. */
typedef struct language {
    int words;           /* 1: words, id 0 for all that are not in the vocabulary; 0: bytes, id = value */
    int size;            /* ids are 0..size-1 */
    language_word *word; /* [n_words] by spelling; owned */
    size_t n_words;
} language;

typedef struct language_text {
    int32_t *ids; /* [n] owned */
    size_t n;
} language_text;

/* Appends the contents of files to bytes. */
static inline moe_status language_read(const char *const *paths, size_t n, moe_buffer *bytes, moe_error *error) {
    moe_stream all = moe_buffer_stream(bytes);
    moe_status status = MOE_OK;
    for (size_t i = 0; i < n && status == MOE_OK; i++) {
        moe_buffer one = {0};
        if ((status = moe_file_read(paths[i], &one, error)) == MOE_OK &&
            (status = all.write(all.ctx, one.data, one.size)) != MOE_OK)
            language_no_memory(error);
        moe_buffer_free(&one);
    }
    return status;
}

/* Splits text into stretches, cut at white space: the last `share` of each of `parts` parts goes to
   held, the rest to train. */
static inline moe_status language_split(const moe_buffer *text, size_t parts, double share, moe_buffer *train,
                                        moe_buffer *held, moe_error *error) {
    moe_stream to[2] = {moe_buffer_stream(train), moe_buffer_stream(held)};
    size_t from = 0;
    for (size_t i = 0; i < 2 * parts && text->size > 0; i++) {
        double part = (double)text->size / (double)parts;
        size_t end =
            i + 1 == 2 * parts ? text->size : (size_t)(part * ((double)(i / 2) + (i % 2 == 0 ? 1 - share : 1)));
        while (end < text->size && !isspace(text->data[end])) end++;
        if (end < from) end = from;
        if (to[i % 2].write(to[i % 2].ctx, text->data + from, end - from) != MOE_OK) return language_no_memory(error);
        from = end;
    }
    return MOE_OK;
}

/* The next word at or after *at; 0 if there is none. */
static inline int language_next(const char *bytes, size_t size, size_t *at, language_word *word) {
    while (*at < size && isspace((unsigned char)bytes[*at])) ++*at;
    if (*at >= size) return 0; /* bytes may be NULL */
    word->text = bytes + *at;
    word->length = 0;
    while (*at < size && !isspace((unsigned char)bytes[*at])) {
        ++*at;
        ++word->length;
    }
    return 1;
}

static inline int language_by_spelling(const void *a, const void *b) {
    const language_word *x = (const language_word *)a, *y = (const language_word *)b;
    int order = memcmp(x->text, y->text, x->length < y->length ? x->length : y->length);
    return order != 0 ? order : (x->length > y->length) - (x->length < y->length);
}

static inline int language_by_count(const void *a, const void *b) {
    const language_word *x = (const language_word *)a, *y = (const language_word *)b;
    return x->count != y->count ? (x->count < y->count) - (x->count > y->count) : language_by_spelling(a, b);
}

/* Sorts the words of a text and merges equal ones with their counts, without the unknown word. */
static inline size_t language_count(language_word *word, size_t n) {
    size_t kept = 0;
    qsort(word, n, sizeof *word, language_by_spelling);
    for (size_t i = 0; i < n; i++) {
        if (word[i].length == 5 && memcmp(word[i].text, "<unk>", 5) == 0) continue;
        if (kept > 0 && language_by_spelling(&word[kept - 1], &word[i]) == 0) word[kept - 1].count++;
        else {
            word[kept] = word[i];
            word[kept++].count = 1;
        }
    }
    return kept;
}

/* Bytes, or the most frequent words, with at most `most` ids. text must outlive a vocabulary of
   words. */
static inline moe_status language_learn(language *l, const moe_buffer *text, int words, int most, moe_error *error) {
    const char *bytes = (const char *)text->data;
    language_word word;
    size_t at, n = 0;
    *l = (language){.words = words, .size = 256};
    if (!words) return MOE_OK;
    for (at = 0; language_next(bytes, text->size, &at, &word);) n++;
    if ((l->word = (language_word *)malloc((n + 1) * sizeof *l->word)) == NULL) return language_no_memory(error);
    for (at = n = 0; language_next(bytes, text->size, &at, &word);) l->word[n++] = word;
    l->n_words = language_count(l->word, n);
    qsort(l->word, l->n_words, sizeof *l->word, language_by_count);
    if (l->n_words > (size_t)most - 1) l->n_words = (size_t)most - 1;
    for (size_t i = 0; i < l->n_words; i++) l->word[i].id = (int32_t)i + 1;
    qsort(l->word, l->n_words, sizeof *l->word, language_by_spelling);
    l->size = (int)l->n_words + 1;
    return MOE_OK;
}

static inline moe_status language_encode(const language *l, const moe_buffer *text, language_text *out,
                                         moe_error *error) {
    const char *bytes = (const char *)text->data;
    language_word word, *known;
    if ((out->ids = (int32_t *)malloc((text->size + 1) * sizeof *out->ids)) == NULL) return language_no_memory(error);
    out->n = 0;
    for (size_t at = 0; !l->words && at < text->size; at++) out->ids[out->n++] = text->data[at];
    for (size_t at = 0; l->words && language_next(bytes, text->size, &at, &word);) {
        known = (language_word *)bsearch(&word, l->word, l->n_words, sizeof *l->word, language_by_spelling);
        out->ids[out->n++] = known != NULL ? known->id : 0;
    }
    return MOE_OK;
}

/* ---- batches: sequences of `context` ids, one after another, and the id that follows each ---- */

static inline void language_sequence(const language_text *text, size_t from, size_t context, int32_t *ids,
                                     int32_t *labels) {
    memcpy(ids, text->ids + from, context * sizeof *ids);
    memcpy(labels, text->ids + from + 1, context * sizeof *labels);
}

/* Sequences from random positions. text has more than context ids. */
static inline void language_draw(const language_text *text, size_t sequences, size_t context, moe_rng *rng,
                                 int32_t *ids, int32_t *labels) {
    for (size_t s = 0; s < sequences; s++)
        language_sequence(text, (size_t)moe_rng_below(rng, text->n - context), context, ids + s * context,
                          labels + s * context);
}

/* Sequences that do not overlap, evenly distributed over text: at most `most`; returns how many. */
static inline size_t language_spread(const language_text *text, size_t most, size_t context, int32_t *ids,
                                     int32_t *labels) {
    size_t there = text->n > 0 ? (text->n - 1) / context : 0, n = there < most ? there : most;
    for (size_t s = 0; s < n; s++)
        language_sequence(text, s * ((text->n - 1) / n), context, ids + s * context, labels + s * context);
    return n;
}

/* ---- networks ---- */

enum {
    LANGUAGE_MODULES = 6 /* of a layer */, LANGUAGE_MIXTURE = 5 /* module index in the first layer */
};

typedef struct language_shape {
    int vocabulary, width, layers;
} language_shape;

/* The module index of the MoE layer of layer l. */
static inline size_t language_module(size_t l) { return LANGUAGE_MIXTURE + l * LANGUAGE_MODULES; }

/* The experts of one layer: an MoE layer, or for n_experts = 1 a feed-forward module without a
   router. */
static inline moe_status language_experts(moe_net *net, const moe_layer_config *config) {
    moe_layer_config dense;
    if (config->router.n_experts != 1) return moe_net_mixture(net, config);
    memset(&dense, 0, sizeof dense);
    dense.expert = config->expert;
    dense.d_ff = config->d_ff;
    dense.d_low = config->d_low;
    dense.act = config->act;
    dense.no_expert_bias = config->no_expert_bias;
    return moe_net_feed_forward(net, &dense);
}

/* Creates and builds *net; layer l has the experts of experts[l]. */
static inline moe_status language_net(moe_net *net, const language_shape *shape, const moe_layer_config *experts,
                                      uint64_t seed, moe_error *error) {
    moe_attention_config attention;
    moe_status status;
    memset(&attention, 0, sizeof attention);
    attention.rotary = 1;
    moe_net_init(net, 0, MOE_KERNELS_AUTO, NULL);
    moe_net_embedding(net, shape->vocabulary, shape->width);
    for (int l = 0; l < shape->layers; l++) {
        moe_net_rms_norm(net);
        moe_net_attention(net, &attention);
        moe_net_residual(net, 2);
        moe_net_rms_norm(net);
        language_experts(net, &experts[l]);
        moe_net_residual(net, 2);
    }
    moe_net_rms_norm(net);
    moe_net_linear(net, shape->vocabulary);
    if ((status = moe_net_build(net, 1, seed, error)) != MOE_OK) moe_net_free(net);
    return status;
}

/* ---- running a network over sequences ---- */

/* -log softmax(logits)[label] */
static inline double language_loss(size_t vocabulary, const moe_real *logits, int32_t label) {
    moe_real most = logits[0];
    double sum = 0;
    for (size_t i = 1; i < vocabulary; i++) most = logits[i] > most ? logits[i] : most;
    for (size_t i = 0; i < vocabulary; i++) sum += exp((double)(logits[i] - most));
    return log(sum) + (double)(most - logits[label]);
}

/* Runs sequences of ids, `together` of them per call. Each call is followed by each(ctx, pass,
   first), first being its offset in ids. */
static inline moe_status language_run(const moe_net *net, const int32_t *ids, size_t sequences, size_t context,
                                      size_t together,
                                      moe_status (*each)(void *ctx, const moe_net_pass *pass, size_t first), void *ctx,
                                      moe_error *error) {
    int32_t *offsets = (int32_t *)malloc((together + 1) * sizeof *offsets);
    moe_call call;
    moe_net_pass pass;
    size_t bytes = 0;
    void *work = NULL;
    moe_status status = moe_net_work_size(net, together * context, 0, &bytes);
    memset(&call, 0, sizeof call);
    if (status == MOE_OK && (offsets == NULL || (work = malloc(bytes)) == NULL)) status = MOE_ERR_MEMORY;
    for (size_t s = 0; s <= together && offsets != NULL; s++) offsets[s] = (int32_t)(s * context);
    for (size_t s = 0; s < sequences && status == MOE_OK; s += call.n_sequences) {
        call.n_sequences = sequences - s < together ? sequences - s : together;
        call.sequences = offsets;
        call.n_tokens = call.n_sequences * context;
        call.token_ids = ids + s * context;
        if ((status = moe_net_forward(net, &call, work, bytes, &pass)) == MOE_OK)
            status = each(ctx, &pass, s * context);
    }
    if (status != MOE_OK) language_error(error, status, "running the network: %s", moe_status_text(status));
    free(work);
    free(offsets);
    return status;
}

#endif
