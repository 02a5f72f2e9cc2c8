/* Files from strangers: safetensors, configurations, networks, layers and checkpoints, read from
   memory. What was read is then used in every way there is, written and read again. As an ordinary
   program (fuzz.h):
     cc -std=c99 -O1 -I. tests/fuzz/fuzz_file.c -o fuzz_file -lm && ./fuzz_file
   With libFuzzer, as sh tests/fuzz/fuzz.sh does it:
     clang -std=c99 -DFUZZ_ENGINE -g -O1 -DMOE_NO_SIMD -I. \
         -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all tests/fuzz/fuzz_file.c \
         -o fuzz_file -lm
     ./fuzz_file -max_total_time=120 -max_len=8192 -len_control=0 new-inputs tests/fuzz/corpus/files
   Promises that are checked: no sanitizer finds anything, an input takes less than a second,
   reading n bytes takes no more memory than bound_of(n) below, a failed read changes nothing and
   keeps nothing, error holds a message; a network that was read can be written, and reading that
   gives the same network; two runs give the same bits, and so does decoding token by token. The
   mutator takes the configuration of a file (or a preset), changes it, and makes the tensors that
   it asks for, so that most inputs get past all checks; others it spoils in one place. Of other
   programs' layers it makes every family in every form, with tensors too few, too many, of another
   shape and of another family. Whole models, which have an empty prefix and of which the corpus has
   some of every architecture, it spoils in one place. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MOE_IMPLEMENTATION
#include "../all.h"

#define FUZZ_CORPUS "tests/fuzz/corpus/files"
static const char *fuzz_outcome(const unsigned char *data, size_t size);
#include "fuzz.h"

#include <unistd.h>

enum { TOKENS = 6, WIDEST = 2048, MOST_WORK = 1 << 25, MOST_CHOICES = 1 << 18 };

/* ---- memory: counted, bounded, always moved ---- */

typedef struct heap {
    size_t now, most;
} heap;

typedef union heap_head {
    size_t size;
    double aligned[4];
} heap_head;

static void *heap_resize(void *ctx, void *block, size_t old_size, size_t new_size) {
    heap *h = (heap *)ctx;
    heap_head *from = block != NULL ? (heap_head *)block - 1 : NULL, *to = NULL;
    want(old_size == (from != NULL ? from->size : 0) && h->now >= old_size);
    if (new_size > 0 && (h->now - old_size > h->most || new_size > h->most - (h->now - old_size))) return NULL;
    if (new_size > 0) {
        to = (heap_head *)malloc(sizeof *to + new_size);
        want(to != NULL);
        to->size = new_size;
        if (from != NULL) memcpy(to + 1, from + 1, old_size < new_size ? old_size : new_size);
    }
    h->now += new_size - old_size;
    free(from);
    return to != NULL ? to + 1 : NULL;
}

static moe_allocator allocator_of(heap *h) {
    moe_allocator a;
    a.ctx = h;
    a.resize = heap_resize;
    return a;
}

/* The memory that reading a file of so many bytes may take, as moe.h says: values and gradients of
   a number for each byte, the text of the configuration, and modules, each of which takes at least
   22 bytes there: {\"module\":\"tied\"}, */
static size_t bound_of(size_t size) {
    size_t modules = size / 22 < MOE_NET_MAX_MODULES ? size / 22 : (size_t)MOE_NET_MAX_MODULES;
    return (1 + 2 * sizeof(moe_real)) * size + (modules + 8) * 12288;
}

static void *grab(size_t bytes) {
    void *p = malloc(bytes > 0 ? bytes : 1);
    want(p != NULL);
    return p;
}

/* ---- the file itself ---- */

static void use_tensor(const moe_file *file, const moe_file_tensor *t) {
    moe_real values[8];
    int64_t integers[8];
    char name[64];
    moe_file_tensor found;
    size_t n = t->count < 8 ? t->count : 8;
    want(t->data >= file->bytes && t->bytes <= (size_t)(file->bytes + file->size - t->data));
    want(moe_file_values(t, 0, n, values, NULL) == MOE_OK &&
         moe_file_values(t, t->count - n, n, values, NULL) == MOE_OK);
    want(moe_file_values(t, t->count, 1, values, NULL) == MOE_ERR_SHAPE);
    (void)moe_file_values(t, t->count - n, n, NULL, integers);
    if (t->name_length < sizeof name && memchr(t->name, '\\', t->name_length) == NULL) {
        memcpy(name, t->name, t->name_length);
        name[t->name_length] = '\0';
        want(moe_file_find(file, name, &found) == MOE_OK && found.name == t->name && found.data == t->data);
    }
}

static void use_metadata(const moe_file *file, const char *key) {
    char *value;
    size_t length, again;
    moe_status status = moe_file_metadata(file, key, NULL, 0, &length);
    if (status == MOE_ERR_NOT_FOUND) return;
    want(status == MOE_ERR_SPACE);
    value = (char *)grab(length + 1);
    want(moe_file_metadata(file, key, value, length, &again) == MOE_ERR_SPACE && again == length);
    want(moe_file_metadata(file, key, value, length + 1, &again) == MOE_OK && again == length &&
         strlen(value) == length);
    free(value);
}

/* Every byte of the data belongs to one tensor, checked the slow way. */
static void check_tiling(moe_file *file) {
    size_t start = 8 + file->header_size, size = file->size - start, i;
    unsigned char *owned = (unsigned char *)calloc(size + 1, 1);
    moe_file_tensor t;
    want(owned != NULL);
    file->at = 0;
    while (moe_file_next(file, &t) == MOE_OK)
        for (i = 0; i < t.bytes; i++) want(owned[(size_t)(t.data - file->bytes) - start + i]++ == 0);
    for (i = 0; i < size; i++) want(owned[i] == 1);
    free(owned);
}

/* ---- calls: all that any router may want ---- */

typedef struct inputs {
    uint64_t random;
    size_t n_given, n_teacher;
    moe_rng rng;
    moe_call call;
    moe_real x[TOKENS * WIDEST], dy[TOKENS * WIDEST], dx[TOKENS * WIDEST], y[TOKENS * WIDEST];
    int32_t ids[TOKENS], sequences[3], labels[TOKENS];
    unsigned char mask[TOKENS];
    int32_t given[MOST_CHOICES], previous[2 * TOKENS];
    moe_real teacher[MOST_CHOICES], previous_weights[2 * TOKENS], attention[MOST_CHOICES], outputs[4 * MOST_CHOICES];
} inputs;

static inputs in;

static moe_real small_number(void) { return (moe_real)((double)fuzz_below(&in.random, 2001) / 1000 - 1); }

static void fill(moe_real *p, size_t n) {
    while (n > 0) p[--n] = small_number();
}

/* Data for networks and layers of these widths; ids below vocabulary. 0: too wide. */
static int inputs_begin(uint64_t seed, size_t d_in, size_t d_out, size_t vocabulary) {
    size_t i;
    if (d_in > WIDEST || d_out > WIDEST) return 0;
    memset(&in.call, 0, sizeof in.call);
    in.random = seed;
    in.n_given = in.n_teacher = 0;
    fill(in.x, TOKENS * d_in);
    fill(in.dy, TOKENS * d_out);
    memset(in.dx, 0, TOKENS * d_in * sizeof *in.dx);
    for (i = 0; i < TOKENS; i++) {
        in.ids[i] = (int32_t)fuzz_below(&in.random, vocabulary);
        in.labels[i] = (int32_t)fuzz_below(&in.random, d_out);
        in.mask[i] = fuzz_below(&in.random, 3) > 0;
    }
    in.sequences[0] = 0;
    in.sequences[1] = 2;
    in.sequences[2] = TOKENS;
    in.call.n_tokens = TOKENS;
    in.call.token_ids = in.ids;
    if (d_in > 0) in.call.x = in.x;
    return 1;
}

/* Adds what a mixture's router reads beside x: choices and a teacher. */
static void inputs_router(const moe_router_config *c) {
    size_t choices = moei_max_choices(c), experts = (size_t)c->n_experts, t, i;
    if (moei_is_soft(c) || in.n_given + TOKENS * choices > MOST_CHOICES ||
        in.n_teacher + TOKENS * experts > MOST_CHOICES)
        return;
    for (t = 0; t < TOKENS; t++)
        for (i = 0; i < choices; i++) in.given[in.n_given++] = i < 3 && i < experts ? (int32_t)((t + i) % experts) : -1;
    fill(in.teacher + in.n_teacher, TOKENS * experts);
    in.n_teacher += TOKENS * experts;
    if (c->select == MOE_SELECT_GIVEN) in.call.given = in.given;
    if (c->loss_distill > 0 && !c->student) in.call.teacher = in.teacher;
}

/* And what a layer alone gets from others. */
static void inputs_layer(const moe_router_config *c) {
    size_t heads = (size_t)c->heads, d = (size_t)c->d_model, i;
    inputs_router(c);
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        for (i = 0; i < 2 * TOKENS; i++) {
            in.previous[i] = (int32_t)((i + i / 4) % (size_t)c->n_experts);
            in.previous_weights[i] = (moe_real)0.5;
        }
        in.call.previous_input = in.x;
        in.call.n_previous = c->n_experts > 1 ? 2 : 1;
        in.call.previous_experts = in.previous;
        in.call.previous_weights = in.previous_weights;
    }
    if (c->refine != MOE_REFINE_ATTENTION || heads * TOKENS * TOKENS > MOST_CHOICES ||
        heads * TOKENS * d > 4 * MOST_CHOICES)
        return;
    for (i = 0; i < heads * TOKENS * TOKENS; i++) in.attention[i] = (moe_real)1 / TOKENS;
    fill(in.outputs, heads * TOKENS * d);
    in.call.attention_weights = in.attention;
    in.call.attention_outputs = in.outputs;
    in.call.attention_output = in.x;
}

/* What a call whose memory is as large as asked for may say. */
static void want_documented(moe_status status) {
    want(status == MOE_OK || status == MOE_ERR_ARGUMENT || status == MOE_ERR_NONFINITE ||
         status == MOE_ERR_UNSUPPORTED || status == MOE_ERR_STATE || status == MOE_ERR_CONFIG);
}

static moe_rng *fresh_rng(void) {
    moe_rng_seed(&in.rng, 5);
    return &in.rng;
}

static int all_finite(const moe_real *p, size_t n) {
    while (n > 0)
        if (!moe_is_finite(p[--n])) return 0;
    return 1;
}

/* The same bits, where they are numbers: nobody promises anything about the bits of a NaN. */
static void want_same(const moe_real *a, const moe_real *b, size_t n) {
    want(!all_finite(a, n) || memcmp(a, b, n * sizeof *a) == 0);
}

/* ---- a network at work ---- */

static int net_inputs(const moe_net *net, uint64_t seed) {
    size_t i;
    if (!inputs_begin(seed, (size_t)net->d_in, (size_t)net->d_out, net->d_in == 0 ? (size_t)net->modules[0].n_rows : 4))
        return 0;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE) inputs_router(&net->modules[i].layer.config.router);
    return 1;
}

/* Work memory of exactly what is asked for; NULL: too much for here. */
static void *net_work(const moe_net *net, int training, size_t *bytes) {
    moe_status status = moe_net_work_size(net, TOKENS, training, bytes);
    want(status == MOE_OK || status == MOE_ERR_OVERFLOW);
    return status == MOE_OK && *bytes <= MOST_WORK ? grab(*bytes) : NULL;
}

/* Whether a router decides otherwise in decoding. */
static int predicts(const moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].layer.config.router.predictor) return 1;
    return 0;
}

/* One token after another says what all at once did, which is in in.y. */
static void use_decode(const moe_net *net) {
    moe_cache cache;
    moe_call call;
    moe_net_pass pass;
    size_t size, work_size, t, width = (size_t)net->d_out;
    void *memory, *work;
    if (moe_net_decode_size(net, 1, 1, NULL, NULL, NULL) != MOE_OK ||
        moe_net_decode_size(net, TOKENS, 1, &size, NULL, NULL) != MOE_OK || size > MOST_WORK)
        return;
    if (moe_net_decode_size(net, TOKENS, 1, NULL, &work_size, NULL) != MOE_OK || work_size > MOST_WORK) return;
    memory = grab(size);
    work = grab(work_size);
    want(moe_net_cache_init(&cache, net, TOKENS, memory, size, NULL) == MOE_OK);
    memset(&call, 0, sizeof call);
    for (t = 0; t < TOKENS; t++) {
        moe_status status;
        call.n_tokens = 1;
        call.token_ids = in.ids + t;
        call.given = NULL;
        if (net->d_in > 0) call.x = in.x + t * (size_t)net->d_in;
        status = moe_net_decode(net, &cache, &call, work, work_size, &pass);
        want_documented(status);
        want(cache.n_tokens == t + (status == MOE_OK));
        if (status != MOE_OK) break;
        if (all_finite(in.y, TOKENS * width) && !predicts(net)) want_same(pass.y, in.y + t * width, width);
    }
    free(memory);
    free(work);
}

/* All tokens as one sequence, then as two with padding; twice each. */
static void use_forward(const moe_net *net, int packed) {
    moe_net_pass pass;
    size_t bytes, n = TOKENS * (size_t)net->d_out;
    void *work = net_work(net, 0, &bytes);
    int k;
    for (k = 0; work != NULL && k < 2; k++) {
        moe_status status;
        in.call.rng = fresh_rng();
        status = moe_net_forward(net, &in.call, work, bytes, &pass);
        want_documented(status);
        if (status == MOE_OK) {
            memcpy(in.y, pass.y, n * sizeof *in.y);
            in.call.rng = fresh_rng();
            want(moe_net_forward(net, &in.call, work, bytes, &pass) == MOE_OK);
            want_same(pass.y, in.y, n);
            if (k == 0 && !packed && in.call.given == NULL) use_decode(net);
        }
        in.call.mask = in.mask;
        in.call.sequences = in.sequences;
        in.call.n_sequences = 2;
    }
    in.call.mask = NULL;
    in.call.sequences = NULL;
    in.call.n_sequences = 0;
    free(work);
}

static void use_backward(moe_net *net) {
    moe_net_pass pass;
    size_t bytes;
    void *work = net->trainable ? net_work(net, 1, &bytes) : NULL;
    moe_status status;
    if (work == NULL) return;
    in.call.training = 1;
    in.call.rng = fresh_rng();
    status = moe_net_forward(net, &in.call, work, bytes, &pass);
    want_documented(status);
    if (status == MOE_OK) {
        want_documented(moe_net_backward(net, in.dy, net->d_in > 0 ? in.dx : NULL, &pass));
        want_documented(moe_net_observe(net, &pass));
        want_documented(moe_net_advance(net));
    }
    in.call.training = 0;
    free(work);
}

static moe_data net_data(const moe_net *net, int by_sequences) {
    moe_data data;
    memset(&data, 0, sizeof data);
    data.n = TOKENS;
    data.labels = in.labels;
    data.targets = in.dy;
    if (net->d_in > 0) data.x = in.x;
    data.token_ids = in.ids;
    data.length = by_sequences ? 2 : 0;
    return data;
}

/* One layer packed, in the type that chance says. */
static void use_packed(moe_net *net) {
    size_t i = fuzz_below(&in.random, net->n_modules), bytes;
    moe_layer *layer = &net->modules[i].layer;
    int type = (int)fuzz_below(&in.random, MOE_TYPE_COUNT);
    void *memory;
    moe_error error;
    if (!moei_is_layer(&net->modules[i]) || moe_layer_pack_size(layer, type, 0, &bytes, NULL) != MOE_OK ||
        bytes > MOST_WORK)
        return;
    memory = grab(bytes);
    if (moe_layer_pack(layer, type, memory, bytes, &error) == MOE_OK) use_forward(net, 1);
    layer->is_packed = 0;
    free(memory);
}

static moe_status count_bytes(void *ctx, const void *from, size_t size) {
    (void)from;
    *(size_t *)ctx += size;
    return MOE_OK;
}

static void use_model(heap *h, const moe_net *net, int weights) {
    moe_built_model built;
    moe_model_config config;
    moe_data data = net_data(net, fuzz_below(&in.random, 2) > 0);
    moe_error error;
    moe_stream stream;
    moe_status status;
    size_t written = 0, t;
    int8_t levels[WIDEST];
    void *scratch;
    memset(&config, 0, sizeof config);
    memset(&stream, 0, sizeof stream);
    config.weights = weights;
    config.calibration = &data;
    config.length = TOKENS - 1;
    config.allocator = allocator_of(h);
    config.loader = 0;
    status = moe_model_create(&built, net, &config, &error);
    want(status == MOE_OK || error.message[0] != '\0');
    if (status != MOE_OK) return;
    stream.ctx = &written;
    stream.write = count_bytes;
    if (built.model.scratch_size <= MOST_WORK) {
        scratch = calloc(built.model.scratch_size + 1, 1);
        want(scratch != NULL);
        for (t = 0; t < TOKENS; t++) {
            const moe_real *x = in.x + t * (size_t)net->d_in;
            const void *input = x;
            if (weights != MOE_WEIGHTS_FLOAT) {
                moe_infer_levels(&built.model, x, levels);
                input = levels;
            }
            if (net->d_in == 0) input = &in.ids[t];
            want_documented(moe_infer(&built.model, NULL, input, in.y, scratch, built.model.scratch_size));
        }
        free(scratch);
    }
    if (net->memory_size < 4096) want(moe_export_c(&built, "m", &stream, &error) == MOE_OK && written > 0);
    moe_model_free(&built);
}

/* Writes a network; what is read from that is written alike. Gives what was written; free(). */
static unsigned char *use_again(heap *h, const moe_net *net, size_t *size) {
    moe_allocator a = allocator_of(h);
    moe_buffer first, second;
    moe_stream to_first, to_second;
    moe_net again;
    moe_error error;
    unsigned char *bytes;
    memset(&first, 0, sizeof first);
    memset(&second, 0, sizeof second);
    first.allocator = second.allocator = a;
    to_first = moe_buffer_stream(&first);
    to_second = moe_buffer_stream(&second);
    want(moe_net_write(net, &to_first, &error) == MOE_OK);
    want(moe_net_read(&again, first.data, first.size, net->trainable, MOE_KERNELS_AUTO, &a, &error) == MOE_OK);
    want(moe_net_write(&again, &to_second, &error) == MOE_OK);
    want(first.size == second.size && memcmp(first.data, second.data, first.size) == 0);
    bytes = (unsigned char *)grab(*size = first.size);
    memcpy(bytes, first.data, first.size);
    moe_net_free(&again);
    moe_buffer_free(&first);
    moe_buffer_free(&second);
    return bytes;
}

/* ---- checkpoints ---- */

static unsigned char *written_trainer(heap *h, const moe_trainer *trainer, size_t *size) {
    moe_buffer buffer;
    moe_stream stream;
    moe_error error;
    unsigned char *bytes;
    memset(&buffer, 0, sizeof buffer);
    buffer.allocator = allocator_of(h);
    stream = moe_buffer_stream(&buffer);
    want(moe_trainer_write(trainer, &stream, &error) == MOE_OK);
    bytes = (unsigned char *)grab(*size = buffer.size);
    memcpy(bytes, buffer.data, buffer.size);
    moe_buffer_free(&buffer);
    return bytes;
}

/* Goes on from the bytes as moe_fit does from a file. */
static void use_fit(moe_net *net, const moe_train_config *trainer, const uint8_t *data, size_t size) {
    moe_data samples = net_data(net, fuzz_below(&in.random, 2) > 0);
    moe_train_config config = *trainer;
    moe_error error;
    moe_status status;
    char path[64];
    FILE *f;
    sprintf(path, "fuzz_file_%ld.tmp0", (long)getpid());
    if ((f = fopen(path, "wb")) == NULL) return;
    want(fwrite(data, 1, size, f) == size && fclose(f) == 0);
    config.epochs = 2;
    config.batch = 2;
    config.resume = 1;
    config.checkpoint = path;
    config.checkpoint_every = 2;
    error.message[0] = '\0';
    status = moe_fit(net, &samples, NULL, &config, &error);
    want(status == MOE_OK || error.message[0] != '\0');
    remove(path);
}

/* Whether the file is a checkpoint of this network's training: then a step, writing, and reading
   that. */
static int use_trainer(heap *h, moe_net *net, const uint8_t *data, size_t size) {
    moe_trainer trainer;
    moe_train_config config;
    moe_error error;
    unsigned char *before, *after;
    size_t before_size, after_size;
    moe_status status = MOE_ERR_CONFIG;
    int optimizer, read = 0;
    for (optimizer = 0; optimizer < MOE_OPTIMIZER_COUNT && net->trainable && !read; optimizer++) {
        moe_data batch = net_data(net, 0);
        memset(&config, 0, sizeof config);
        config.optimizer = optimizer;
        config.batch = TOKENS;
        config.seed = 1;
        config.criterion = fuzz_below(&in.random, 2) > 0 ? MOE_CRITERION_SQUARED_ERROR : MOE_CRITERION_CROSS_ENTROPY;
        if (moe_trainer_init(&trainer, net, &config, &error) != MOE_OK) continue;
        before = written_trainer(h, &trainer, &before_size);
        status = moe_trainer_read(&trainer, data, size, &error);
        after = written_trainer(h, &trainer, &after_size);
        want(status == MOE_OK ||
             (error.message[0] != '\0' && before_size == after_size && memcmp(before, after, after_size) == 0));
        free(before);
        read = status == MOE_OK;
        if (read) {
            want(moe_trainer_read(&trainer, after, after_size, &error) == MOE_OK);
            before = written_trainer(h, &trainer, &before_size);
            want(before_size == after_size && memcmp(before, after, after_size) == 0);
            free(before);
            (void)moe_trainer_step(&trainer, &batch, NULL, &error);
        }
        free(after);
        moe_trainer_free(&trainer);
        if (read) use_fit(net, &config, data, size);
    }
    return read;
}

/* ---- reading ---- */

/* A failed read leaves object, memory and heap alone. */
static void want_refused(moe_status status, const heap *h, const void *object, size_t size, const moe_error *error) {
    const unsigned char *p = (const unsigned char *)object;
    size_t i;
    want(status != MOE_ERR_MEMORY && status == error->code && h->now == 0);
    want(error->message[0] != '\0' && memchr(error->message, '\0', sizeof error->message) != NULL);
    for (i = 0; i < size; i++) want(p[i] == 0x5a);
}

static moe_status read_net(heap *h, moe_net *net, const uint8_t *data, size_t size, int trainable) {
    moe_allocator a = allocator_of(h);
    moe_error error;
    moe_status status;
    memset(net, 0x5a, sizeof *net);
    h->now = 0;
    h->most = bound_of(size);
    status = moe_net_read(net, data, size, trainable, MOE_KERNELS_AUTO, &a, &error);
    if (status != MOE_OK) want_refused(status, h, net, sizeof *net, &error);
    h->most = MOST_WORK;
    return status;
}

static moe_status read_layer(heap *h, moe_layer *layer, const uint8_t *data, size_t size, int trainable) {
    moe_allocator a = allocator_of(h);
    moe_error error;
    moe_status status;
    memset(layer, 0x5a, sizeof *layer);
    h->now = 0;
    h->most = bound_of(size);
    status = moe_layer_read(layer, data, size, trainable, MOE_KERNELS_AUTO, &a, &error);
    if (status != MOE_OK) want_refused(status, h, layer, sizeof *layer, &error);
    h->most = MOST_WORK;
    return status;
}

/* A number that stands for the bytes. */
static uint64_t hash_of(const uint8_t *data, size_t size) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    size_t i;
    for (i = 0; i < size; i++) hash = (hash ^ data[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* 1: a network; 2: a checkpoint too; 0: neither. */
static int use_net(const uint8_t *data, size_t size) {
    heap h;
    moe_net net;
    unsigned char *bytes;
    size_t n;
    int weights, checkpoint;
    if (read_net(&h, &net, data, size, 0) != MOE_OK) return 0;
    moe_net_free(&net);
    want(h.now == 0);
    /* a router that cannot learn */
    if (read_net(&h, &net, data, size, 1) != MOE_OK) want(read_net(&h, &net, data, size, 0) == MOE_OK);
    free(use_again(&h, &net, &n));
    if (!net_inputs(&net, hash_of(data, size))) {
        moe_net_free(&net);
        return 1;
    }
    use_forward(&net, 0);
    use_packed(&net);
    for (weights = 0; weights < MOE_WEIGHTS_COUNT; weights++) use_model(&h, &net, weights);
    use_backward(&net);
    checkpoint = use_trainer(&h, &net, data, size);
    bytes = use_again(&h, &net, &n);
    free(bytes);
    moe_net_free(&net);
    want(h.now == 0);
    return 1 + checkpoint;
}

static void use_layer_passes(moe_layer *layer, int trainable) {
    moe_layer_pass pass;
    size_t bytes, n = TOKENS * (size_t)layer->config.d_out;
    void *work;
    int training;
    for (training = 0; training <= trainable; training++) {
        moe_status status = moe_layer_work_size(layer, TOKENS, training, &bytes);
        want(status == MOE_OK || status == MOE_ERR_OVERFLOW);
        if (status != MOE_OK || bytes > MOST_WORK) return;
        work = grab(bytes);
        in.call.training = training;
        in.call.rng = fresh_rng();
        status = moe_layer_forward(layer, &in.call, in.y, work, bytes, &pass);
        want_documented(status);
        if (status == MOE_OK && training) {
            want_documented(moe_layer_backward(layer, in.dy, in.dx, NULL, &pass));
            want_documented(moe_layer_observe(layer, &pass));
            want_documented(moe_layer_advance(layer));
        } else if (status == MOE_OK) {
            memcpy(in.dx, in.y, n * sizeof *in.y);
            in.call.rng = fresh_rng();
            want(moe_layer_forward(layer, &in.call, in.dx, work, bytes, NULL) == MOE_OK);
            want_same(in.dx, in.y, n);
        }
        free(work);
    }
}

static int use_layer(const uint8_t *data, size_t size) {
    heap h;
    moe_layer layer, again;
    moe_buffer first, second;
    moe_stream to_first, to_second;
    moe_error error;
    const int trainable = read_layer(&h, &layer, data, size, 1) == MOE_OK;
    if (!trainable && read_layer(&h, &layer, data, size, 0) != MOE_OK) return 0;
    if (inputs_begin(hash_of(data, size), (size_t)layer.config.router.d_model, (size_t)layer.config.d_out, 4)) {
        inputs_layer(&layer.config.router);
        use_layer_passes(&layer, trainable);
    }
    memset(&first, 0, sizeof first);
    memset(&second, 0, sizeof second);
    first.allocator = layer.allocator;
    to_first = moe_buffer_stream(&first);
    to_second = moe_buffer_stream(&second);
    want(moe_layer_write(&layer, &to_first, &error) == MOE_OK);
    want(moe_layer_read(&again, first.data, first.size, 0, MOE_KERNELS_AUTO, NULL, &error) == MOE_OK);
    want(moe_layer_write(&again, &to_second, &error) == MOE_OK);
    want(first.size == second.size && memcmp(first.data, second.data, first.size) == 0);
    moe_layer_free(&again);
    moe_layer_free(&layer);
    moe_buffer_free(&first);
    moe_buffer_free(&second);
    want(h.now == 0);
    return 1;
}

static int use_file(const uint8_t *data, size_t size) {
    moe_file file;
    moe_file_tensor t;
    moe_error error;
    size_t n = 0;
    moe_status status = moe_file_open(&file, data, size, &error);
    want(moe_file_open(&file, data, size, NULL) == status);
    if (status != MOE_OK) {
        want(status == error.code && error.message[0] != '\0' &&
             memchr(error.message, '\0', sizeof error.message) != NULL);
        return 0;
    }
    while ((status = moe_file_next(&file, &t)) == MOE_OK) {
        use_tensor(&file, &t);
        n++;
    }
    want(status == MOE_ERR_NOT_FOUND && n == file.n_tensors);
    want(moe_file_find(&file, "no such \"tensor\"", &t) == MOE_ERR_NOT_FOUND);
    use_metadata(&file, "");
    use_metadata(&file, "a");
    use_metadata(&file, "moe");
    check_tiling(&file);
    return 1;
}

/* ---- published layers ---- */

/* An input for these begins with MOEP; then pieces follow, each behind its length in two bytes:
   prefix, preset, the model (safetensors, an index, GGUF), config.json, and two files that an index
   may name. Pieces at the end may be missing. */
enum { PIECES = 6 };

static int is_published(const uint8_t *data, size_t size) { return size >= 4 && memcmp(data, "MOEP", 4) == 0; }

/* Without a prefix it is a whole model. */
static int is_whole(const uint8_t *data, size_t size) { return size > 5 && data[4] == 0 && data[5] == 0; }

typedef struct pieces {
    const uint8_t *p[PIECES];
    size_t n[PIECES];
} pieces;

static void take_pieces(const uint8_t *data, size_t size, pieces *out) {
    size_t at = 4, k;
    for (k = 0; k < PIECES; k++) {
        size_t n = at + 2 <= size ? (size_t)data[at] | (size_t)data[at + 1] << 8 : 0;
        at = at + 2 <= size ? at + 2 : size;
        if (n > size - at) n = size - at;
        out->p[k] = data + at;
        out->n[k] = n;
        at += n;
    }
}

/* A piece as a text of its own. */
static char *text_of_piece(const pieces *of, int k) {
    char *text = (char *)grab(of->n[k] + 1);
    memcpy(text, of->p[k], of->n[k]);
    text[of->n[k]] = '\0';
    return text;
}

/* A layer that was read computes, is written in the form of whatever family has its names, and
   comes back with the same bits. */
static void use_published_layer(const moe_layer *layer, const moe_allocator *a) {
    static const char *const families[] = {"mixtral",     "minimax_m2", "qwen2_moe", "qwen3_moe",  "deepseek_v2",
                                           "deepseek_v3", "llama4",     "gpt_oss",   "granite_moe"};
    const size_t n = 2, d = (size_t)layer->config.router.d_model;
    size_t i, bytes, at;
    moe_call call;
    if (d <= WIDEST && moe_layer_work_size(layer, n, 0, &bytes) == MOE_OK && bytes <= MOST_WORK) {
        void *work = grab(bytes);
        memset(&call, 0, sizeof call);
        in.random = 7;
        fill(in.x, n * d);
        call.n_tokens = n;
        call.x = in.x;
        (void)moe_layer_forward(layer, &call, in.y, work, bytes, NULL);
        free(work);
    }
    for (i = 0; i < sizeof families / sizeof families[0]; i++) {
        moe_buffer buffer;
        moe_stream stream;
        moe_import_source source;
        moe_layer back;
        memset(&buffer, 0, sizeof buffer);
        stream = moe_buffer_stream(&buffer);
        if (moe_import_write(layer, &stream, "m", families[i], MOE_REAL_IS_DOUBLE ? MOE_DTYPE_F64 : MOE_DTYPE_F32,
                             NULL) == MOE_OK) {
            source = moe_import_memory("m", buffer.data, buffer.size);
            if (moe_import_read(&back, &source, 1, "m", families[i], a, NULL) == MOE_OK) {
                /* a preset may want more experts */
                for (at = 0; at < MOE_LAYER_PARAMETER_COUNT; at++) {
                    moe_parameter slot;
                    if (!back.tensors[at] || moe_layer_parameter(&back.config, (int)at, &slot) != MOE_OK ||
                        (at >= MOE_ROUTER_STEP && at <= MOE_ROUTER_CAPACITY))
                        continue;
                    want(layer->tensors[at] != NULL &&
                         memcmp(back.tensors[at], layer->tensors[at], slot.count * sizeof(moe_real)) == 0);
                }
                moe_layer_free(&back);
            }
        }
        moe_buffer_free(&buffer);
    }
}

/* A message is UTF-8 without control characters, whatever the file is; it may be cut off. */
static int is_shown(const char *text) {
    const char *begin = text;
    uint32_t code;
    while (*text != '\0')
        if (!moei_next_utf8(&text, NULL, &code)) return (size_t)(text - begin) + 4 >= sizeof ((moe_error *)0)->message;
        else if (code < 0x20u) return 0;
    return 1;
}

/* A whole model computes, and decoding gives the same bits. */
static void use_whole(const moe_net *net) {
    static const int32_t ids[3] = {1, 0, 2};
    const size_t n = 3;
    size_t bytes, decode_bytes, cache_bytes, i;
    moe_net_pass pass;
    moe_cache cache;
    moe_call call;
    void *work, *kept;
    moe_real *whole;
    memset(&call, 0, sizeof call);
    call.n_tokens = n;
    call.token_ids = ids;
    if (moe_net_work_size(net, n, 0, &bytes) != MOE_OK || bytes > MOST_WORK ||
        moe_net_decode_size(net, n, 1, &cache_bytes, &decode_bytes, NULL) != MOE_OK || cache_bytes > MOST_WORK)
        return;
    work = grab(bytes > decode_bytes ? bytes : decode_bytes);
    kept = grab(cache_bytes);
    if (moe_net_forward(net, &call, work, bytes, &pass) == MOE_OK) {
        const size_t width = (size_t)net->modules[net->n_modules - 1].d_out;
        whole = (moe_real *)grab(n * width * sizeof *whole);
        memcpy(whole, pass.y, n * width * sizeof *whole);
        want(moe_net_cache_init(&cache, net, n, kept, cache_bytes, NULL) == MOE_OK);
        for (i = 0; i < n; i++) {
            call.n_tokens = 1;
            call.token_ids = ids + i;
            want(moe_net_decode(net, &cache, &call, work, decode_bytes, &pass) == MOE_OK);
            want_same(pass.y, whole + i * width, width);
        }
        free(whole);
    }
    free(work);
    free(kept);
}

/* Records of modules and matrices are some kilobytes for each tensor. */
static int use_whole_model(const moe_import_source *sources, size_t n, size_t size) {
    heap h;
    moe_allocator a = allocator_of(&h);
    moe_import_options options;
    moe_imported model;
    moe_error error;
    moe_status status;
    h.now = 0;
    h.most = 1000 * size + 1000000;
    memset(&options, 0, sizeof options);
    options.exact = (int)(size & 1u);
    error.message[0] = '\0';
    status = moe_import_read_model(&model, sources, n, &options, &a, &error);
    want(status != MOE_ERR_MEMORY);
    if (status == MOE_OK) use_whole(&model.net);
    else
        want(error.code == status && error.message[0] != '\0' &&
             memchr(error.message, '\0', sizeof error.message) != NULL && is_shown(error.message));
    moe_import_free(&model);
    want(h.now == 0);
    return status == MOE_OK;
}

static int use_published(const uint8_t *data, size_t size) {
    static const char *const names[4] = {"model", "config.json", "a.safetensors", "b.safetensors"};
    heap h;
    moe_allocator a = allocator_of(&h);
    moe_import_source sources[4];
    moe_layer layer, before;
    moe_error error;
    moe_status status;
    pieces of;
    char *prefix, *preset;
    size_t n = 1, k;
    take_pieces(data, size, &of);
    prefix = text_of_piece(&of, 0);
    preset = text_of_piece(&of, 1);
    for (k = 0; k < 4; k++)
        if (k == 0 || of.n[k + 2] > 0)
            sources[k == 0 ? 0 : n++] = moe_import_memory(names[k], of.p[k + 2], of.n[k + 2]);
    if (prefix[0] == '\0') {
        free(prefix);
        free(preset);
        return use_whole_model(sources, n, size);
    }
    h.now = 0;
    h.most = (sizeof(moe_real) * 2 + 40) * size + 65536;
    memset(&layer, 0x5a, sizeof layer);
    before = layer;
    error.message[0] = '\0';
    status = moe_import_read(&layer, sources, n, prefix, preset[0] != '\0' ? preset : NULL, &a, &error);
    want(status != MOE_ERR_MEMORY);
    if (status != MOE_OK) {
        want(h.now == 0 && memcmp(&before, &layer, sizeof layer) == 0);
        want(error.code == status && error.message[0] != '\0' &&
             memchr(error.message, '\0', sizeof error.message) != NULL && is_shown(error.message));
    } else {
        h.most = SIZE_MAX / 2;
        use_published_layer(&layer, &a);
        moe_layer_free(&layer);
        want(h.now == 0);
    }
    free(prefix);
    free(preset);
    return status == MOE_OK;
}

/* ---- tokenizers ---- */

/* An input for these begins with MOET; then pieces follow as above: a text, nothing, the vocabulary
   (GGUF, tokenizer.json), config.json, tokenizer_config.json. */
static int is_vocabulary(const uint8_t *data, size_t size) { return size >= 4 && memcmp(data, "MOET", 4) == 0; }

/* Encodes a text and decodes it: whole characters, and no byte that a token does not have. */
static void use_tokenizer(const moe_tokenizer *t, const pieces *of) {
    const char *text = (const char *)of->p[0];
    const size_t size = of->n[0], room = 4 * size + 8;
    int32_t *ids = (int32_t *)grab(room * sizeof *ids);
    char *out = (char *)grab(moe_tokenizer_room(t));
    moe_decoder d;
    moe_buffer chat;
    size_t n, i;
    memset(&d, 0, sizeof d);
    memset(&chat, 0, sizeof chat);
    d.tokenizer = t;
    d.flags = MOE_TOKENIZER_SPECIAL;
    want(moe_tokenizer_encode(t, text, size, MOE_TOKENIZER_SPECIAL | MOE_TOKENIZER_BOUNDS, ids, room, &n) == MOE_OK);
    for (i = 0; i <= n; i++) {
        want(i == n || (ids[i] >= 0 && ids[i] < t->n_tokens));
        want(moe_tokenizer_decode(&d, i < n ? ids[i] : -1, out, moe_tokenizer_room(t)) <= moe_tokenizer_room(t));
        if (i < n) (void)moe_tokenizer_is_end(t, ids[i]);
    }
    if (moe_chat_find(t) != NULL) want(moe_chat_put(moe_chat_find(t), MOE_CHAT_USER, -1, "x", &chat) == MOE_OK);
    moe_buffer_free(&chat);
    free(ids);
    free(out);
}

static int use_vocabulary(const uint8_t *data, size_t size) {
    static const char *const names[3] = {"vocabulary", "config.json", "tokenizer_config.json"};
    heap h;
    moe_allocator a = allocator_of(&h);
    moe_import_source sources[3];
    moe_tokenizer t, before;
    moe_error error;
    moe_status status;
    pieces of;
    size_t n = 1, k;
    take_pieces(data, size, &of);
    for (k = 0; k < 3; k++)
        if (k == 0 || of.n[k + 2] > 0)
            sources[k == 0 ? 0 : n++] = moe_import_memory(names[k], of.p[k + 2], of.n[k + 2]);
    h.now = 0;
    h.most = 160 * size + ((size_t)1 << 22); /* ids may be as large as twice their number and 65536 */
    memset(&t, 0x5a, sizeof t);
    before = t;
    error.message[0] = '\0';
    status = moe_import_read_tokenizer(&t, sources, n, &a, &error);
    want(status != MOE_ERR_MEMORY);
    if (status != MOE_OK) {
        want(h.now == 0 && memcmp(&before, &t, sizeof t) == 0);
        want(error.code == status && error.message[0] != '\0' && is_shown(error.message));
        return 0;
    }
    h.most = SIZE_MAX / 2;
    use_tokenizer(&t, &of);
    moe_tokenizer_free(&t);
    want(h.now == 0);
    return 1;
}

static const char *fuzz_outcome(const uint8_t *data, size_t size) {
    int net;
    if (is_vocabulary(data, size)) return use_vocabulary(data, size) ? "words" : "nowords";
    if (is_published(data, size) && is_whole(data, size)) return use_published(data, size) ? "whole" : "unwhole";
    if (is_published(data, size)) return use_published(data, size) ? "published" : "unpublished";
    if (!use_file(data, size)) return "refused";
    if ((net = use_net(data, size)) > 0) return net > 1 ? "checkpoint" : "net";
    return use_layer(data, size) ? "layer" : "tensors";
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    double begin = fuzz_seconds();
    (void)fuzz_outcome(data, size);
    want(fuzz_seconds() - begin < FUZZ_SECONDS_MOST);
    return 0;
}

/* ---- the mutator: texts ---- */

typedef struct maker {
    uint8_t *out;
    size_t room, size;
    uint64_t random;
} maker;

static unsigned below(maker *m, size_t n) { return fuzz_below(&m->random, n); }

static void put_bytes(maker *m, const char *s, size_t n) {
    if (n > m->room - m->size) n = m->room - m->size;
    memcpy(m->out + m->size, s, n);
    m->size += n;
}

static void put(maker *m, const char *s) { put_bytes(m, s, strlen(s)); }

static void put_number(maker *m, size_t n) {
    char digits[32];
    sprintf(digits, "%lu", (unsigned long)n);
    put(m, digits);
}

/* Numbers at the ends of ranges, and those that are none. */
static const char *odd_number(maker *m) {
    static const char *const odd[] = {"0",
                                      "1",
                                      "2",
                                      "3",
                                      "4",
                                      "5",
                                      "7",
                                      "8",
                                      "16",
                                      "63",
                                      "64",
                                      "65",
                                      "100",
                                      "1000",
                                      "4096",
                                      "4097",
                                      "32767",
                                      "65535",
                                      "65536",
                                      "65537",
                                      "16777215",
                                      "16777216",
                                      "16777217",
                                      "2147483647",
                                      "2147483648",
                                      "4294967296",
                                      "9007199254740993",
                                      "18446744073709551615",
                                      "18446744073709551616",
                                      "99999999999999999999999",
                                      "-1",
                                      "-0",
                                      "0.5",
                                      "0.1",
                                      "1.5",
                                      "-0.5",
                                      "0.99999999",
                                      "1e-6",
                                      "1e-45",
                                      "1e-400",
                                      "1e6",
                                      "1e9",
                                      "1e38",
                                      "3.5e38",
                                      "1e39",
                                      "1e308",
                                      "1e309",
                                      "1e400",
                                      "1e99999999999",
                                      "0.000000000000000000000000000000000000000001",
                                      "1E+2",
                                      "1e",
                                      "1.",
                                      ".5",
                                      "01",
                                      "+1",
                                      "nan",
                                      "inf",
                                      "0x10",
                                      "true",
                                      "null",
                                      "\"1\"",
                                      "[1]",
                                      "{}",
                                      ""};
    return odd[below(m, sizeof odd / sizeof odd[0])];
}

/* Mostly what belongs here, seldom something else. */
static void put_rarely_odd(maker *m, const char *usual) {
    static const char *const odd[] = {"",
                                      ",",
                                      "}",
                                      "{",
                                      "[",
                                      "]",
                                      "\"",
                                      ":",
                                      "null",
                                      "\\",
                                      "\\u0061",
                                      "\"\\ud83d\\ude00\"",
                                      "\"\\ud83d\"",
                                      "\"a\"",
                                      "{\"a\":1}",
                                      "\n",
                                      "\x01",
                                      "0",
                                      "00"};
    if (below(m, 64) > 0) put(m, usual);
    else put(m, below(m, 2) > 0 ? odd_number(m) : odd[below(m, sizeof odd / sizeof odd[0])]);
    if (below(m, 32) == 0) put(m, " ");
}

/* ---- the mutator: plausible headers of tensors that nobody asked for ---- */

static void put_name(maker *m) {
    static const char *const names[] = {"\"a\"", "\"b\"", "\"c\"", "\"\\u0061\"", "\"\\/\"", "\"/\"", "\"\"",
                                        "\"layer.0.weight\"", "\"layer.1.weight\"",
                                        "\"\xc3\xa4\"", "\"\\u00e4\"", "\"\\ud83d\\ude00\"",
                                        "\"__metadata__\"", "\"moe\"", "\"dtype\"", "\"}\""};
    char numbered[32];
    if (below(m, 2) == 0) {
        sprintf(numbered, "\"t%u\"", below(m, 1000));
        put_rarely_odd(m, numbered);
    } else
        put_rarely_odd(m, names[below(m, sizeof names / sizeof names[0])]);
}

/* One tensor at [*end, ...) of the data; now and then the numbers do not fit. Moves *end. */
static void put_tensor(maker *m, size_t *end) {
    unsigned type = below(m, MOE_DTYPE_COUNT), dims = below(m, 4);
    unsigned order = below(m, 6), i;
    size_t count = 1, begin = *end, shape[4];
    char quoted[16];
    for (i = 0; i < dims; i++) {
        shape[i] = below(m, 5);
        count *= shape[i];
    }
    *end += count * moei_dtypes[type].size;
    put_rarely_odd(m, "{");
    for (i = 0; i < 3; i++) {
        unsigned part = (order + i * (order < 3 ? 1 : 2)) % 3, d;
        if (i > 0) put_rarely_odd(m, ",");
        if (part == 0) {
            sprintf(quoted, "\"%s\"", moei_dtypes[type].name);
            put_rarely_odd(m, "\"dtype\"");
            put_rarely_odd(m, ":");
            put_rarely_odd(m, quoted);
        } else if (part == 1) {
            put_rarely_odd(m, "\"shape\":[");
            for (d = 0; d < dims; d++) {
                if (d > 0) put_rarely_odd(m, ",");
                put_number(m, shape[d]);
            }
            put_rarely_odd(m, "]");
        } else {
            put_rarely_odd(m, "\"data_offsets\":[");
            put_number(m, begin + (below(m, 64) == 0 ? 1u : 0u));
            put_rarely_odd(m, ",");
            put_number(m, *end + (below(m, 64) == 0 ? 1u : 0u));
            put_rarely_odd(m, "]");
        }
    }
    put_rarely_odd(m, "}");
}

static void put_metadata(maker *m) {
    unsigned n = below(m, 4);
    put(m, "\"__metadata__\":{");
    for (; n > 0; n--) {
        put_name(m);
        put_rarely_odd(m, ":");
        put_name(m);
        if (n > 1) put_rarely_odd(m, ",");
    }
    put_rarely_odd(m, "}");
}

static void put_length(maker *m, size_t length) {
    int i;
    for (i = 0; i < 8; i++) m->out[i] = (uint8_t)((uint64_t)length >> 8 * i);
}

static void make_plain(maker *m) {
    unsigned n = below(m, 6), i;
    size_t end = 0, header;
    put(m, "        {");
    for (i = 0; i < n; i++) {
        if (i > 0) put_rarely_odd(m, ",");
        if (below(m, 8) == 0) put_metadata(m);
        else {
            put_name(m);
            put_rarely_odd(m, ":");
            put_tensor(m, &end);
        }
    }
    put_rarely_odd(m, "}");
    while (below(m, 3) == 0) put(m, " ");
    header = m->size;
    for (; end > 0 && m->size < m->room; end--) m->out[m->size++] = (uint8_t)below(m, 256);
    if (below(m, 32) == 0 && m->size < m->room) m->out[m->size++] = 0;
    put_length(m, header - 8);
}

/* ---- the mutator: configurations ---- */

enum { TEXT = 6000 };

/* The configuration and the numbers of a trainer (empty: none), terminated. */
typedef struct texts {
    char config[TEXT], trainer[TEXT];
} texts;

/* Puts s in place of `length` characters of text, where there is room. */
static void replace(char *text, size_t at, size_t length, const char *s) {
    size_t n = strlen(s), all = strlen(text);
    if (all - length + n >= TEXT) return;
    memmove(text + at + n, text + at + length, all - at - length + 1);
    memcpy(text + at, s, n);
}

/* The place of a random one among the characters of `set` in text; -1: there is none. */
static long some(maker *m, const char *text, const char *set) {
    size_t n = 0, i, at;
    for (i = 0; text[i] != '\0'; i++) n += strchr(set, text[i]) != NULL;
    if (n == 0) return -1;
    for (i = 0, at = below(m, n) + 1; at > 0; i++) at -= strchr(set, text[i]) != NULL;
    return (long)i - 1;
}

/* A value for a row of a configuration: mostly one that is allowed. */
static void random_value(maker *m, const moe_field *f, char value[64]) {
    int n = 0;
    while (f->choices != NULL && f->choices[n] != NULL) n++;
    if (below(m, 16) == 0) sprintf(value, "%s", below(m, 2) > 0 ? "9" : "-1");
    else if (f->kind == MOE_FIELD_CHOICE) sprintf(value, "%s", f->choices[below(m, (size_t)n)]);
    else if (f->kind == MOE_FIELD_FLAG) sprintf(value, "%u", below(m, 2));
    else if (below(m, 8) == 0) sprintf(value, "%.17g", below(m, 2) > 0 ? f->max : f->min);
    else if (f->kind == MOE_FIELD_REAL)
        sprintf(value, "%g", below(m, 2) > 0 ? 0.01 * below(m, 100) : 1.0 + below(m, 3));
    else sprintf(value, "%u", below(m, 10));
}

static const moe_field *random_field(maker *m) {
    const moe_field *f = moe_layer_fields();
    size_t n = 0;
    while (f[n].name != NULL) n++;
    return &f[below(m, n)];
}

/* A preset with small widths and a few other fields; tries to make one that is accepted. */
static moe_layer_config random_layer(maker *m, int d) {
    moe_layer_config config, good;
    size_t presets = 0;
    int k;
    while (moe_presets()[presets].name != NULL) presets++;
    (void)moe_layer_preset(below(m, 16) == 0 ? "hash" : moe_presets()[below(m, presets)].name, &config, NULL);
    config.router.d_model = d;
    config.d_ff = 1 + (int)below(m, 5);
    if (config.router.student_dim > 0 || config.router.select == MOE_SELECT_HASH) config.router.table_size = 3;
    if (config.router.n_experts > 8) config.router.n_experts = 8;
    for (good = config, k = (int)below(m, 12); k > 0; k--) {
        const moe_field *f = random_field(m);
        char value[64];
        random_value(m, f, value);
        if (moe_field_set(f, &config, f->name, value, NULL) == MOE_OK &&
            (below(m, 32) == 0 || moe_layer_check(&config, NULL, NULL) == MOE_OK))
            good = config;
        config = good;
    }
    return good;
}

static void random_module(maker *m, moe_net *net) {
    moe_module c;
    int kind = (int)below(m, MOE_MODULE_COUNT + 6);
    if (kind >= MOE_MODULE_COUNT) kind = kind % 2 ? MOE_MODULE_MIXTURE : MOE_MODULE_ATTENTION;
    memset(&c, 0, sizeof c);
    c.d_out = 1 + (int)below(m, 8);
    c.act = (int)below(m, MOE_ACT_COUNT);
    c.span = 1 + (int)below(m, 3);
    if (kind == MOE_MODULE_EMBEDDING) c.d_out = 2 + 2 * (int)below(m, 4);
    c.n_rows = 2 + (int)below(m, 7);
    c.rate = (moe_real)0.25 * (moe_real)below(m, 4);
    c.attention.heads = (int)below(m, 3);
    c.attention.rotary = (int)below(m, 2);
    c.attention.full = below(m, 4) == 0;
    if (kind == MOE_MODULE_MIXTURE) c.layer.config = random_layer(m, net->d_out);
    else {
        c.layer.config.expert = (int)below(m, MOE_EXPERT_COUNT);
        c.layer.config.d_ff = 1 + (int)below(m, 5);
    }
    c.kind = kind;
    if (moe_net_append(net, &c) != MOE_OK) net->error.code = MOE_OK;
}

static void take_text(moei_config_text *c, char out[TEXT]) {
    size_t n = c->status == MOE_OK && c->buffer.size < TEXT ? c->buffer.size : 0;
    if (n > 0) memcpy(out, c->buffer.data, n);
    out[n] = '\0';
    moe_buffer_free(&c->buffer);
}

static void random_config(maker *m, char out[TEXT]) {
    moei_config_text c;
    moe_net net;
    unsigned n;
    memset(&c, 0, sizeof c);
    if (below(m, 3) == 0) {
        moe_layer_config config = random_layer(m, 1 + (int)below(m, 8));
        moei_config_put_layer(&c, &config);
    } else {
        (void)moe_net_init(&net, below(m, 2) > 0 ? 1 + (int)below(m, 8) : 0, MOE_KERNELS_AUTO, NULL);
        if (net.d_in == 0) (void)moe_net_embedding(&net, 5, 2 + 2 * (int)below(m, 3));
        for (n = 1 + below(m, 6); n > 0; n--) random_module(m, &net);
        moei_config_put_net(&c, &net);
        moe_net_free(&net);
    }
    take_text(&c, out);
}

/* From some '{' up to its '}', the text of an object without others inside; 0: none. */
static size_t some_object(maker *m, const char *text, size_t *at) {
    long from = some(m, text, "{");
    const char *to;
    if (from < 0) return 0;
    *at = (size_t)from;
    to = strchr(text + from, '}');
    return to != NULL && memchr(text + from + 1, '{', (size_t)(to - text - from) - 1) == NULL
               ? (size_t)(to + 1 - text - from)
               : 0;
}

static void put_field(maker *m, char *text) {
    static char made[200], value[64];
    const moe_field *f = random_field(m);
    long at = some(m, text, "{");
    if (at < 0) return;
    random_value(m, f, value);
    sprintf(made, f->kind == MOE_FIELD_CHOICE ? "\"%s\":\"%s\"%s" : "\"%s\":%s%s", f->name, value,
            text[at + 1] == '}' ? "" : ",");
    replace(text, (size_t)at + 1, 0, made);
}

/* One change that mostly leaves JSON. */
static void change_config(maker *m, char *text) {
    char copy[TEXT];
    size_t at, length;
    long p;
    switch (below(m, 10)) {
    case 0:
    case 1: /* a number */
        if ((p = some(m, text, "0123456789")) >= 0) {
            while (p > 0 && strchr("0123456789.e-", text[p - 1]) != NULL) p--;
            replace(text, (size_t)p, strspn(text + p, "0123456789.e-"), odd_number(m));
        }
        break;
    case 2: /* a name or a choice */
        if ((p = some(m, text, ":")) >= 0 && text[p + 1] == '"') {
            const moe_field *f = random_field(m);
            const char *name = below(m, 2) > 0 ? moei_module_names[below(m, MOE_MODULE_COUNT)] : f->name;
            if (f->kind == MOE_FIELD_CHOICE) name = f->choices[0];
            replace(text, (size_t)p + 2, strcspn(text + p + 2, "\""), name);
        }
        break;
    case 3:
    case 4:
        put_field(m, text);
        break;
    case 5: /* a member goes */
        if ((p = some(m, text, ",")) >= 0) replace(text, (size_t)p, 1 + strcspn(text + p + 1, ",}]"), "");
        break;
    case 6: /* an object twice */
        if ((length = some_object(m, text, &at)) > 0) {
            memcpy(copy, text + at, length);
            copy[length] = ',';
            copy[length + 1] = '\0';
            replace(text, at, 0, copy);
        }
        break;
    case 7: /* an object goes, with the comma behind it */
        if ((length = some_object(m, text, &at)) > 0) replace(text, at, length + (text[at + length] == ','), "");
        break;
    case 8:
        if (below(m, 4) == 0 && strlen(text) < TEXT / 2) {
            length = LLVMFuzzerMutate((uint8_t *)text, strlen(text), TEXT - 1);
            text[length] = '\0';
        }
        break;
    default: /* an object from elsewhere */
        random_config(m, copy);
        if ((length = some_object(m, copy, &at)) > 0 && (p = some(m, text, "[,")) >= 0) {
            copy[at + length] = '\0';
            memmove(copy, copy + at, length + 1);
            strcat(copy, ",");
            replace(text, (size_t)p + 1, 0, copy);
        }
    }
}

/* ---- the mutator: the tensors that a configuration asks for ---- */

/* A network as the text describes it, with its list of tensors; a layer becomes a list in `own`. 0:
   the text is refused. */
static int tensors_of(const char *text, moe_net *net, moe_tensor own[MOE_LAYER_PARAMETER_COUNT]) {
    static moe_module module; /* of a layer */
    moei_net_options options = {0, NULL};
    moei_json j;
    moe_error why;
    moe_layer_config config;
    moe_layer layer;
    memset(net, 0, sizeof *net);
    memset(&j, 0, sizeof j);
    j.bytes = (const unsigned char *)text;
    j.end = strlen(text);
    j.error = &why;
    if (moei_config_net(&j, net, &options) == MOE_OK && moei_net_register(net, NULL) == MOE_OK) return 1;
    moe_net_free(net);
    j.at = 0;
    if (moei_config_layer(&j, &config) != MOE_OK || moe_layer_init(&layer, &config, NULL) != MOE_OK) return 0;
    *net = moei_layer_list(&layer, own, &module);
    return 1;
}

static void free_tensors(moe_net *net) {
    if (net->n_modules > 0) moe_net_free(net);
}

static void put_escaped(maker *m, const char *text) {
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\') put(m, "\\");
        put_bytes(m, text, 1);
    }
}

static float odd_float(maker *m) {
    static const double odd[] = {0,    -0.0,  1,    -1,    2,        3,            4,            7,    0.5, 1e-40,
                                 1e-30, 1e30, -1e30, 3e38, 65536, 16777216, 2147483648.0, 4294967296.0, 1e10, -5};
    unsigned k = below(m, sizeof odd / sizeof odd[0] + 3);
    if (k < sizeof odd / sizeof odd[0]) return (float)odd[k];
    return k % 3 == 0 ? (float)INFINITY : k % 3 == 1 ? -(float)INFINITY : (float)NAN;
}

/* Not always what a state may be: rows, counts and steps that are negative, too large, or no whole
   numbers. */
static float whole_float(maker *m) {
    return below(m, 12) > 0 ? (float)below(m, 4) : below(m, 2) > 0 ? (float)below(m, 12) - 2 : odd_float(m);
}

/* The bytes of one number; kind 0: small numbers, 1: small whole ones, 2: what is odd. */
static void put_value(maker *m, int type, int kind) {
    float f = kind == 0 ? (float)below(m, 2001) / 1000 - 1 : kind == 1 ? whole_float(m) : odd_float(m);
    double d = (double)f;
    unsigned char bytes[8];
    uint64_t bits = 0;
    uint32_t small;
    size_t i, size = moei_dtypes[type].size;
    memcpy(&small, &f, sizeof small);
    if (type == MOE_DTYPE_F64) memcpy(&bits, &d, sizeof bits);
    else if (type == MOE_DTYPE_F32) bits = small;
    else if (type == MOE_DTYPE_BF16) bits = small >> 16;
    else
        bits = kind == 2               ? fuzz_next(&m->random)
               : type == MOE_DTYPE_F16 ? 0x3000 + below(m, 0xc00)
                                       : below(m, type == MOE_DTYPE_BOOL ? 2 : 8);
    for (i = 0; i < size; i++) bytes[i] = (unsigned char)(bits >> 8 * i);
    put_bytes(m, (const char *)bytes, size);
}

static void put_entry(maker *m, const char *name, const size_t *shape, int n_dims, int type, size_t *end,
                      size_t count) {
    int i;
    put(m, ",\"");
    put(m, name);
    put(m, "\":{\"dtype\":\"");
    put(m, moei_dtypes[type].name);
    put(m, "\",\"shape\":[");
    for (i = 0; i < n_dims; i++) {
        if (i > 0) put(m, ",");
        put_number(m, shape[i]);
    }
    put(m, "],\"data_offsets\":[");
    put_number(m, *end);
    put(m, ",");
    put_number(m, *end += count * moei_dtypes[type].size);
    put(m, "]}");
}

static int random_type(maker *m) {
    static const unsigned char usual[] = {MOE_DTYPE_F32,  MOE_DTYPE_F32, MOE_DTYPE_F32,
                                          MOE_DTYPE_BF16, MOE_DTYPE_F16, MOE_DTYPE_I8};
    return below(m, 16) == 0 ? (int)below(m, MOE_DTYPE_COUNT) : usual[below(m, sizeof usual)];
}

/* Tensors that hold integers: counts, rows, steps. */
static int is_state(const char *name) {
    return strstr(name, "table") != NULL || strstr(name, "step") != NULL || strstr(name, "capacity") != NULL;
}

/* The file of the texts; its tensors lack where they would not fit. */
static void make_file(maker *m, const texts *t) {
    moe_tensor own[MOE_LAYER_PARAMETER_COUNT];
    moe_net net;
    size_t i, end = 0, count = 0, header;
    size_t numbers = 0;
    unsigned char types[512];
    int good = tensors_of(t->config, &net, own);
    int moments = t->trainer[0] != '\0' ? strstr(t->trainer, "optimizer 0") != NULL ? 2 : 1 : 0, k;
    for (i = 0; good && i < net.n_tensors; i++)
        good = moei_add(numbers, net.tensors[i].count, &numbers) && numbers < m->room;
    if (good) count = net.n_tensors < sizeof types ? net.n_tensors : 0;
    put(m, "        {\"__metadata__\":{\"moe\":\"");
    put_escaped(m, t->config);
    if (moments > 0) {
        put(m, "\",\"moe.trainer\":\"");
        put_escaped(m, t->trainer);
    }
    put(m, "\"}");
    for (i = 0; i < count; i++) {
        types[i] = (unsigned char)random_type(m);
        put_entry(m, net.tensors[i].name, net.tensors[i].shape, net.tensors[i].n_dims, types[i], &end,
                  net.tensors[i].count);
    }
    if (moments > 0 && below(m, 16) == 0) moments--;
    for (k = 0; k < moments; k++) put_entry(m, moei_moment_names[k], &numbers, 1, MOE_DTYPE_BF16, &end, numbers);
    put(m, "}");
    header = m->size;
    for (i = 0; i < count; i++) {
        size_t left = net.tensors[i].count;
        int kind = below(m, 8) == 0 ? 2 : is_state(net.tensors[i].name) ? 1 : 0;
        for (; left > 0 && m->size < m->room; left--) put_value(m, types[i], kind == 2 && below(m, 4) > 0 ? 0 : kind);
    }
    for (numbers *= (size_t)moments; numbers > 0 && m->size < m->room; numbers--)
        put_value(m, MOE_DTYPE_BF16, below(m, 64) == 0 ? 2 : 0);
    put_length(m, header - 8);
    if (good || net.n_modules > 0) free_tensors(&net);
}

/* What a row of a trainer's numbers usually is: those of a training of TOKENS samples, 2 at a
   time. */
static unsigned trainer_number(maker *m, const char *name, unsigned epochs, unsigned steps) {
    if (strcmp(name, "format") == 0 || strcmp(name, "accumulate") == 0 || strcmp(name, "seed") == 0) return 1;
    if (strcmp(name, "batch") == 0) return 2;
    if (strcmp(name, "n") == 0) return TOKENS;
    if (strcmp(name, "position0") == 0) return epochs;
    if (strcmp(name, "position1") == 0) return steps;
    if (strcmp(name, "steps") == 0) return epochs * (TOKENS / 2) + steps;
    if (strcmp(name, "optimizer") == 0) return below(m, 2);
    return strcmp(name, "length") == 0 ? 2 * below(m, 2) : 0;
}

static void random_trainer(maker *m, char out[TEXT]) {
    char number[24];
    size_t i;
    unsigned epochs = below(m, 3), steps = below(m, 8) > 0 ? below(m, 4) : below(m, 1000);
    out[0] = '\0';
    for (i = 0; i < (size_t)MOEI_CHECKPOINT_ROWS; i++) {
        const char *name = moei_checkpoint_rows[i].name;
        sprintf(number, "%u", trainer_number(m, name, epochs, steps));
        strcat(out, i > 0 ? " " : "");
        strcat(out, name);
        strcat(out, " ");
        strcat(out, below(m, 24) == 0 ? odd_number(m) : number);
    }
}

/* The text as the library writes it, which is what a checkpoint must have. */
static void canonical(char text[TEXT]) {
    moe_tensor own[MOE_LAYER_PARAMETER_COUNT];
    moei_config_text c;
    moe_net net;
    if (!tensors_of(text, &net, own)) return;
    memset(&c, 0, sizeof c);
    if (net.n_modules > 0) {
        moei_config_put_net(&c, &net);
        take_text(&c, text);
    }
    free_tensors(&net);
}

/* ---- the mutator ---- */

static int take_texts(const uint8_t *data, size_t size, texts *t) {
    moe_file file;
    t->trainer[0] = '\0';
    if (moe_file_open(&file, data, size, NULL) != MOE_OK ||
        moe_file_metadata(&file, "moe", t->config, TEXT, NULL) != MOE_OK)
        return 0;
    if (moe_file_metadata(&file, "moe.trainer", t->trainer, TEXT, NULL) != MOE_OK) t->trainer[0] = '\0';
    return 1;
}

/* Other bytes in the header's text, whose length is set again. */
static size_t change_header(maker *m, size_t size, size_t max_size) {
    size_t header = size > 10 ? m->out[0] | (size_t)m->out[1] << 8 : 0, rest, changed;
    uint8_t *text;
    if (header < 2 || header > size - 8) return LLVMFuzzerMutate(m->out, size, max_size);
    text = (uint8_t *)grab(max_size);
    rest = size - 8 - header;
    memcpy(text, m->out + 8, header);
    changed = LLVMFuzzerMutate(text, header, max_size - 8 - rest);
    memmove(m->out + 8 + changed, m->out + 8 + header, rest);
    memcpy(m->out + 8, text, changed);
    free(text);
    put_length(m, changed);
    return 8 + changed + rest;
}

/* Some numbers in the data become odd. */
static void change_data(maker *m, const uint8_t *data, size_t size) {
    size_t header = size > 10 ? data[0] | (size_t)data[1] << 8 : 0, from = header + 8;
    unsigned n = 1 + below(m, 4);
    m->size = size;
    if (from + 8 > size) return;
    for (; n > 0; n--) {
        maker at = *m;
        at.size = from + 4 * below(m, (size - from) / 4);
        put_value(&at, MOE_DTYPE_F32, 2 - (int)below(m, 2));
        m->random = at.random;
    }
}

/* ---- the mutator: layers of other programs ---- */

enum { MOST_PARTS = 64 };

/* One tensor of a layer to be written. */
typedef struct part {
    const moei_tensor_name *row;
    size_t expert, shape[6];
    int n_dims, shard;
} part;

typedef struct parts {
    const moei_family *family;
    int gguf, n;
    size_t sizes[4];
    part of[MOST_PARTS];
} parts;

static void add_part(parts *p, const moei_tensor_name *row, size_t expert) {
    part *t = &p->of[p->n];
    if (p->n == MOST_PARTS) return;
    p->n++;
    t->row = row;
    t->expert = expert;
    t->shard = p->n % 2;
    for (t->n_dims = 0; row->shape[t->n_dims] != '\0'; t->n_dims++)
        t->shape[t->n_dims] = moei_shape_size(p->sizes, row->shape[t->n_dims]);
}

/* Whether a row belongs to the form: experts fused or each alone, gate and up in one or two. */
static int is_of_form(const moei_tensor_name *row, int form) {
    const int each = moei_is_per_expert(row), is_expert = moei_is_expert_param(row->param);
    if (!is_expert || (row->set & (MOEI_SET_TRANSPOSED | MOEI_SET_INTERLEAVED | MOEI_SET_LINEAR)) != 0) return 1;
    if ((row->set & MOEI_SETS_GGUF) == 0) return each == (form == 0);
    if (row->param == MOE_EXPERTS_DOWN || (row->set & MOEI_SET_G_BIASES) != 0)
        return row->param == MOE_EXPERTS_DOWN ? each == (form == 2) : 1;
    return each ? form == 2 : form != 2 && (row->second >= 0) == (form == 1);
}

/* All tensors of a family, and then some that are too few, too many, of another shape, of another
   family. */
static void random_parts(maker *m, parts *p) {
    const moei_tensor_name *row;
    const int form = (int)below(m, 3);
    const size_t n_rows = sizeof moei_tensor_names / sizeof *moei_tensor_names - 1;
    size_t e, last = 0;
    unsigned k;
    long sets;
    memset(p, 0, sizeof *p);
    while (moei_families[last].name != NULL) last++;
    p->family = &moei_families[below(m, last)];
    p->gguf = below(m, 3) == 0;
    p->sizes[MOEI_SIZE_E] = 2 + below(m, 3);
    p->sizes[MOEI_SIZE_H] = p->gguf && below(m, 3) == 0 ? 32 : 1 + below(m, 6);
    if (p->sizes[MOEI_SIZE_H] == 32 && below(m, 3) == 0) p->sizes[MOEI_SIZE_H] = 256;
    p->sizes[MOEI_SIZE_I] = 1 + below(m, 6);
    p->sizes[MOEI_SIZE_S] = 1 + below(m, 6);
    sets = p->gguf ? p->family->gguf_sets : p->family->sets;
    for (row = moei_tensor_names; row->name != NULL; row++) {
        if ((row->set & sets) == 0 || !is_of_form(row, p->gguf ? form : form % 2)) continue;
        /* of a bias of gate and up in one */
        if ((row->set & MOEI_SET_G_BIASES) != 0 && row->param != MOE_EXPERTS_DOWN_BIAS &&
            (row->second >= 0) != (form == 1))
            continue;
        for (e = 0; e < (moei_is_per_expert(row) ? p->sizes[MOEI_SIZE_E] : 1); e++) add_part(p, row, e);
    }
    for (k = below(m, 4); k > 0 && p->n > 1; k--) {
        part *t = &p->of[below(m, (size_t)p->n)];
        size_t *size = &t->shape[t->n_dims > 0 ? below(m, (size_t)t->n_dims) : 0];
        const moei_tensor_name *other = &moei_tensor_names[below(m, n_rows)];
        switch (below(m, 7)) {
        case 0:
            *t = p->of[--p->n];
            break;
        case 1:
            add_part(p, t->row, t->expert);
            break;
        case 2:
            add_part(p, other, below(m, 5));
            break;
        case 3:
            *size = below(m, 3) > 0 ? *size + below(m, 3) - 1 : *size * 2;
            break;
        case 4:
            t->n_dims = (int)below(m, 5);
            break;
        case 5:
            t->expert = below(m, 6);
            break;
        default:
            t->row = other;
        }
    }
}

static size_t elements_of(const part *t) {
    size_t count = 1;
    int i;
    for (i = 0; i < t->n_dims; i++) count *= t->shape[i];
    return count;
}

static void put_part_name(maker *m, const parts *p, const part *t) {
    char name[80];
    moei_text text = moei_import_text(name, sizeof name);
    put(m, p->gguf ? "blk.3." : "m.");
    moei_tensor_name_put(&text, t->row, t->expert);
    put(m, name);
}

static void put_little(maker *m, uint64_t value, int bytes) {
    char b[8];
    int i;
    for (i = 0; i < bytes; i++) b[i] = (char)(unsigned char)(value >> 8 * i & 0xffu);
    put_bytes(m, b, (size_t)bytes);
}

/* A file of the parts of a shard, or (-1) of all. */
static void put_part_file(maker *m, const parts *p, int shard) {
    const size_t start = m->size;
    size_t at = 0, header;
    int i, k, first = 1, type = (int)below(m, 4);
    put(m, "        {");
    for (i = 0; i < p->n; i++) {
        const part *t = &p->of[i];
        const size_t bytes = elements_of(t) * moei_dtypes[type].size;
        if (shard >= 0 && t->shard != shard) continue;
        put(m, first ? "\"" : ",\"");
        put_part_name(m, p, t);
        put(m, "\":{\"dtype\":\"");
        put(m, moei_dtypes[type].name);
        put(m, "\",\"shape\":[");
        for (k = 0; k < t->n_dims; k++) {
            if (k > 0) put(m, ",");
            put_number(m, t->shape[k]);
        }
        put(m, "],\"data_offsets\":[");
        put_number(m, at);
        put(m, ",");
        put_number(m, at += bytes);
        put(m, "]}");
        first = 0;
    }
    put(m, "}");
    header = m->size - start - 8;
    for (i = 0; i < 8; i++) m->out[start + (size_t)i] = (uint8_t)((uint64_t)header >> 8 * i);
    for (at /= moei_dtypes[type].size; at > 0 && m->size < m->room; at--) put_value(m, type, below(m, 99) == 0 ? 2 : 0);
}

static void put_part_gguf(maker *m, const parts *p) {
    const size_t start = m->size;
    const char *arch = p->family->archs;
    size_t length = strcspn(arch, " "), at = 0;
    const size_t n_types = sizeof moei_gguf_types / sizeof moei_gguf_types[0] - 1;
    const moei_block_type *q = &moei_gguf_types[below(m, 2) == 0 ? below(m, (int)n_types) : 0];
    int i, k;
    put(m, "GGUF");
    put_little(m, 3, 4);
    put_little(m, (uint64_t)p->n, 8);
    put_little(m, 2, 8);
    put_little(m, 20, 8);
    put(m, "general.architecture");
    put_little(m, 8, 4);
    put_little(m, length, 8);
    put_bytes(m, arch, length);
    put_little(m, length + 18, 8);
    put_bytes(m, arch, length);
    put(m, ".expert_used_count");
    put_little(m, 4, 4);
    put_little(m, 1 + below(m, 3), 4);
    for (i = 0; i < p->n; i++) {
        const part *t = &p->of[i];
        const size_t count = elements_of(t);
        const size_t block = (size_t)q->external.block;
        const int blocks = q->external.bytes > 0 && t->n_dims > 0 && t->shape[t->n_dims - 1] % block == 0;
        const moei_block_type *type = blocks ? q : &moei_gguf_types[0];
        maker name = *m;
        put_little(m, 0, 8);
        put_part_name(m, p, t);
        put_little(&name, m->size - name.size - 8, 8);
        put_little(m, (uint64_t)t->n_dims, 4);
        for (k = t->n_dims; k > 0; k--) put_little(m, t->shape[k - 1], 8);
        put_little(m, (uint64_t)type->code, 4);
        put_little(m, at, 8);
        at += (count / (size_t)type->external.block * (size_t)type->external.bytes + 31) / 32 * 32;
    }
    while ((m->size - start) % 32 != 0 && m->size < m->room) put_little(m, 0, 1);
    for (at /= 4; at > 0 && m->size < m->room; at--) put_value(m, MOE_DTYPE_F32, 0);
}

/* The piece from `start` on ends here. */
static void end_piece(maker *m, size_t start) {
    const size_t n = m->size >= start ? m->size - start : 0;
    m->out[start - 2] = (uint8_t)(n & 255);
    m->out[start - 1] = (uint8_t)(n >> 8 & 255);
}

static size_t begin_piece(maker *m) {
    put_little(m, 0, 2);
    return m->size;
}

/* A layer as its authors would publish it, but for something. */
static size_t make_published(maker *m) {
    static parts p;
    size_t at, presets = 0;
    int i, sharded, k;
    random_parts(m, &p);
    sharded = !p.gguf && below(m, 2) == 0;
    m->size = 0;
    put(m, "MOEP");
    for (k = 0; k < PIECES && m->room - m->size > 64; k++) {
        at = begin_piece(m);
        if (k == 0) put(m, p.gguf ? "blk.3" : "m");
        else if (k == 1 && below(m, 2) == 0) {
            while (moe_presets()[presets].name != NULL) presets++;
            put(m, below(m, 2) == 0 ? p.family->preset : moe_presets()[below(m, presets)].name);
        } else if (k == 2 && sharded) {
            put(m, "{\"weight_map\":{");
            for (i = 0; i < p.n; i++) {
                put(m, i > 0 ? ",\"" : "\"");
                put_part_name(m, &p, &p.of[i]);
                put(m, below(m, 40) > 0 && p.of[i].shard == 0 ? "\":\"a.safetensors\"" : "\":\"b.safetensors\"");
            }
            put(m, "}}");
        } else if (k == 2 && p.gguf) put_part_gguf(m, &p);
        else if (k == 2) put_part_file(m, &p, -1);
        else if (k == 3 && below(m, 4) > 0) {
            put(m, "{\"model_type\":\"");
            put_bytes(m, p.family->types, strcspn(p.family->types, " "));
            put(m, "\",\"num_experts_per_tok\":2,\"n_group\":1,\"topk_group\":1");
            if (below(m, 3) == 0) {
                const moei_setting *s = &moei_settings[below(m, sizeof moei_settings / sizeof *moei_settings - 1)];
                put(m, ",\"");
                put(m, s->key);
                put(m, "\":");
                put(m, s->value == NULL ? odd_number(m) : "\"");
                if (s->value != NULL) {
                    put(m, s->value);
                    put(m, "\"");
                }
            }
            put(m, "}");
        } else if (k > 3 && sharded) put_part_file(m, &p, k - 4);
        end_piece(m, at);
    }
    return m->size;
}

/* One piece of an input for published layers changes: of a safetensors file mostly the header,
   whose length is set again. */
static size_t change_piece(maker *m, uint8_t *data, size_t size, size_t max_size) {
    uint8_t *all = (uint8_t *)grab(max_size), *piece = (uint8_t *)grab(max_size);
    size_t at = 4, k, n, which = below(m, 8);
    pieces of;
    take_pieces(data, size, &of);
    if (which >= PIECES || of.n[which] == 0) which = 2; /* the model most of all */
    memcpy(all, "MOEP", 4);
    for (k = 0; k < PIECES && at + 2 < max_size; k++) {
        size_t room = max_size - at - 2 < 0xffff ? max_size - at - 2 : 0xffff;
        n = of.n[k] < room ? of.n[k] : room;
        memcpy(piece, of.p[k], n);
        if (k == which && n > 16 && piece[8] == '{' && below(m, 3) > 0) {
            maker inner = *m;
            inner.out = piece;
            inner.room = room;
            n = change_header(&inner, n, room);
        } else if (k == which) n = LLVMFuzzerMutate(piece, n, room);
        all[at] = (uint8_t)(n & 255);
        all[at + 1] = (uint8_t)(n >> 8);
        memcpy(all + at + 2, piece, n);
        at += 2 + n;
    }
    memcpy(data, all, at);
    free(all);
    free(piece);
    return at;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed) {
    static texts t;
    maker m;
    unsigned way, k;
    memset(&m, 0, sizeof m);
    m.out = data;
    m.room = max_size;
    m.random = seed;
    way = below(&m, 100);
    if (max_size >= 1024 && (is_published(data, size) ? way < 60 && !is_whole(data, size) : way >= 95))
        return make_published(&m);
    if (max_size >= 16 && is_published(data, size) && way < 97) return change_piece(&m, data, size, max_size);
    if (max_size < 16 || way < 4) return LLVMFuzzerMutate(data, size, max_size);
    if (is_vocabulary(data, size) && way < 97) {
        for (k = 1 + below(&m, 3); k > 0; k--) size = LLVMFuzzerMutate(data, size, max_size);
        return size;
    }
    if (way < 10) return change_header(&m, size, max_size);
    if (way < 18) {
        make_plain(&m);
        return m.size;
    }
    if (way < 34 && size > 100) {
        change_data(&m, data, size);
        return m.size;
    }
    t.trainer[0] = '\0';
    if (way < 50 || !take_texts(data, size, &t)) random_config(&m, t.config);
    for (k = way < 50 ? below(&m, 3) : 1 + below(&m, 3); k > 0; k--) change_config(&m, t.config);
    if (way < 50 && below(&m, 3) == 0) random_trainer(&m, t.trainer);
    else if (t.trainer[0] != '\0' && below(&m, 4) == 0) random_trainer(&m, t.trainer);
    if (t.trainer[0] != '\0' && below(&m, 8) > 0) canonical(t.config);
    make_file(&m, &t);
    return below(&m, 8) == 0 ? change_header(&m, m.size, max_size) : m.size;
}
