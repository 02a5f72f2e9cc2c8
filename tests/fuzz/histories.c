/* histories.c - random histories of a network: training, saving, failed saves, kills, loading,
   damaged files, packing, decoding, inference models, publishing, and memory that runs out, against
   a model of what must hold.
     cc -std=c99 -O1 -I. tests/fuzz/histories.c -o histories -lm && ./histories
   "histories quick" runs few, "histories FIRST COUNT" the seeds from FIRST on, so that a long run
   goes on in pieces; "histories SEED 1" repeats one.

   The model: a seed gives a network, its data and the kinds of its changes (a step, a step of two
   batches, statistics of a pass), so everything there is to know is a function of the number of
   changes: the network's file, the checkpoint, outputs, evaluation, inference models. Each is
   recorded as a hash when it is first computed after so many changes; whatever else happened, it
   must be the same ever after: after a load that goes back to an earlier number, and in a network
   that is made anew at the end and changed as often without interruption. The file at the path is
   that of the last save that succeeded, whatever failed since. */
#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROWS = 48, WIDEST = 16, BATCH = 12, LENGTH = 4, IDS = 8, MOST_CHANGES = 100, MOST_MODULES = 8,
       MOST_NUMBERS = 20000, TEXT_ROOM = 400 };
enum { FACT_NET, FACT_CHECKPOINT, FACT_ANSWER, FACT_EVALUATION, FACT_STATUS, FACT_MODEL, FACTS = FACT_MODEL + 3 };
static const char *const fact_names[] = {"network file", "checkpoint", "outputs",    "evaluation",
                                         "status",       "float model", "int8 model", "int4 model"};
static const char path[] = "histories-test.safetensors", path_beside[] = "histories-test.safetensors.tmp0";

/* What is known after some number of changes. */
typedef struct known {
    int is[FACTS];
    uint64_t hash[FACTS];
} known;

typedef struct history {
    uint64_t seed, attempt; /* which together make the network */
    moe_rng rng;            /* of the operations */
    test_heap heap;
    moe_allocator allocator;
    int kernels;
    moe_net net;
    moe_trainer trainer;
    moe_train_config training;
    moe_param_group group;
    char frozen[MOE_NAME_SIZE]; /* the tensor of the group */
    uint64_t frozen_hash;
    size_t changes;
    known after[MOST_CHANGES + 1];
    moe_real x[ROWS * WIDEST], targets[ROWS * WIDEST];
    int32_t ids[ROWS], labels[ROWS], sequences[ROWS / LENGTH + 1];
    void *work, *packed;
    moe_buffer disk; /* what the file holds; size 0: there is none */
    size_t saved;    /* changes when it was saved */
    char text[TEXT_ROOM];
} history;

static long n_operations, n_changes, n_loads, n_models, n_published, n_decoded, n_refused;

static size_t below(history *h, size_t n) { return (size_t)moe_rng_below(&h->rng, n); }

static uint64_t hash_more(uint64_t hash, const void *bytes, size_t size) { /* FNV-1a */
    const unsigned char *p = (const unsigned char *)bytes;
    size_t i;
    for (i = 0; i < size; i++) hash = (hash ^ p[i]) * UINT64_C(1099511628211);
    return hash;
}

static uint64_t hash_of(const void *bytes, size_t size) {
    return hash_more(UINT64_C(14695981039346656037), bytes, size);
}

/* ---- the network: drawn until it can be built, trained and run ---- */

static void draw_field(moe_rng *rng, moe_layer_config *c) {
    static const double reals[] = {0.05, 0.3, 0.5, 0.9, 1.0, 1.5};
    const moe_field *fields = moe_layer_fields(), *field;
    const moe_layer_config before = *c;
    char value[40];
    size_t n = 0;
    while (fields[n].name != NULL) n++;
    field = &fields[moe_rng_below(rng, n)];
    if (strcmp(field->name, "d_model") == 0 || strcmp(field->name, "kernels") == 0) return;
    if (field->kind == MOE_FIELD_REAL) sprintf(value, "%g", reals[moe_rng_below(rng, 6)]);
    else if (field->kind == MOE_FIELD_CHOICE)
        sprintf(value, "%s", field->choices[moe_rng_below(rng, (uint64_t)field->max + 1)]);
    else sprintf(value, "%d", (int)field->min + (int)moe_rng_below(rng, field->max < 6 ? (uint64_t)field->max + 1 : 6));
    if (moe_field_set(fields, c, field->name, value, NULL) != MOE_OK || moe_layer_check(c, NULL, NULL) != MOE_OK)
        *c = before;
}

static void draw_mixture(moe_rng *rng, int width, moe_layer_config *c) {
    const moe_preset *presets = moe_presets();
    size_t n = 0, i;
    moe_layer_config smaller;
    while (presets[n].name != NULL) n++;
    memset(c, 0, sizeof *c);
    if (moe_rng_below(rng, 3) > 0) (void)moe_layer_preset(presets[moe_rng_below(rng, n)].name, c, NULL);
    c->router.d_model = width;
    c->d_ff = 1 + (int)moe_rng_below(rng, 12);
    if (c->router.select == MOE_SELECT_HASH || c->router.student_dim > 0) c->router.table_size = IDS;
    smaller = *c;
    smaller.router.n_experts = 2 + (int)moe_rng_below(rng, 6);
    if (moe_layer_check(&smaller, NULL, NULL) == MOE_OK) *c = smaller;
    for (i = (size_t)moe_rng_below(rng, 8); i > 0; i--) draw_field(rng, c);
}

static moe_status draw_module(moe_rng *rng, moe_net *net) {
    const int width = net->n_modules > 0 ? net->modules[net->n_modules - 1].d_out : net->d_in;
    moe_attention_config attention;
    moe_layer_config c;
    memset(&attention, 0, sizeof attention);
    attention.rotary = (int)moe_rng_below(rng, 2);
    attention.full = moe_rng_below(rng, 8) == 0;
    draw_mixture(rng, width, &c);
    switch (moe_rng_below(rng, 12)) {
    case 0: return moe_net_linear(net, 2 + (int)moe_rng_below(rng, 10));
    case 1: return moe_net_activation(net, (int)moe_rng_below(rng, MOE_ACT_COUNT));
    case 2: return moe_net_layer_norm(net);
    case 3: return moe_net_rms_norm(net);
    case 4: return moe_net_attention(net, &attention);
    case 5: return moe_net_feed_forward(net, NULL);
    case 6: return moe_net_dropout(net, (moe_real)0.25);
    case 7: return moe_net_residual(net, 1 + (int)moe_rng_below(rng, net->n_modules));
    case 8: return moe_net_positions(net, LENGTH);
    default: return moe_net_mixture(net, &c);
    }
}

/* The same network for the same seed and attempt. */
static moe_status make_net(const history *h, moe_net *net) {
    moe_rng rng;
    size_t n;
    int reads_ids;
    moe_rng_seed(&rng, h->seed * 1000 + h->attempt);
    n = 1 + (size_t)moe_rng_below(&rng, 5);
    reads_ids = moe_rng_below(&rng, 3) == 0;
    (void)moe_net_init(net, reads_ids ? 0 : 2 + (int)moe_rng_below(&rng, 12), h->kernels, &h->allocator);
    if (reads_ids) (void)moe_net_embedding(net, IDS, 2 + 2 * (int)moe_rng_below(&rng, 6));
    else if (moe_rng_below(&rng, 2)) (void)moe_net_linear(net, 2 + 2 * (int)moe_rng_below(&rng, 6));
    while (net->n_modules < n && draw_module(&rng, net) == MOE_OK) continue;
    return moe_net_build(net, 1, h->seed, NULL);
}

static moe_data data_at(const history *h, size_t first, size_t n) {
    moe_data data;
    memset(&data, 0, sizeof data);
    data.n = n;
    data.x = h->net.d_in > 0 ? h->x + first * (size_t)h->net.d_in : NULL;
    data.token_ids = h->ids + first;
    data.labels = h->labels + first;
    data.targets = h->targets + first * (size_t)h->net.d_out;
    data.length = LENGTH;
    return data;
}

/* Workspace is kept until the next call. */
static moe_status forward(history *h, const moe_net *net, size_t n, int training, moe_net_pass *pass) {
    moe_call call;
    moe_rng rng;
    size_t size = 0;
    moe_status status = moe_net_work_size(net, n, training, &size);
    if (status != MOE_OK) return status;
    free(h->work);
    h->work = grab(size, 1);
    moe_rng_seed(&rng, h->changes);
    memset(&call, 0, sizeof call);
    call.n_tokens = n;
    call.x = net->d_in > 0 ? h->x : NULL;
    call.token_ids = h->ids;
    call.sequences = h->sequences;
    call.n_sequences = n / LENGTH;
    call.training = training;
    call.rng = &rng;
    status = moe_net_forward(net, &call, h->work, size, pass);
    pass->call.rng = NULL;
    return status;
}

static uint64_t answer_of(history *h, const moe_net *net) {
    moe_net_pass pass;
    const moe_status status = forward(h, net, BATCH, 0, &pass);
    if (status != MOE_OK) return (uint64_t)status;
    return hash_of(pass.y, BATCH * (size_t)net->d_out * sizeof(moe_real));
}

static void draw_data(history *h) {
    size_t i;
    for (i = 0; i < ROWS * WIDEST; i++) {
        h->x[i] = moe_rng_normal(&h->rng);
        h->targets[i] = moe_rng_normal(&h->rng);
    }
    for (i = 0; i < ROWS; i++) {
        h->ids[i] = (int32_t)below(h, IDS);
        h->labels[i] = (int32_t)below(h, (size_t)h->net.d_out);
    }
    for (i = 0; i <= ROWS / LENGTH; i++) h->sequences[i] = (int32_t)(i * LENGTH);
}

static uint64_t tensor_hash(const moe_net *net, const char *name) {
    moe_tensor t;
    if (!CHECK(moe_net_find(net, name, &t) == MOE_OK)) return 0;
    return hash_of(t.data, t.count * sizeof *t.data);
}

static void draw_training(history *h) {
    moe_train_config *c = &h->training;
    const moe_tensor *t = h->net.n_tensors > 0 ? &h->net.tensors[below(h, h->net.n_tensors)] : NULL;
    memset(c, 0, sizeof *c);
    memset(&h->group, 0, sizeof h->group);
    c->criterion = (int)below(h, 2);
    c->optimizer = (int)below(h, MOE_OPTIMIZER_COUNT);
    c->batch = BATCH;
    c->rate = (moe_real)(below(h, 8) == 0 ? 1e6 : 0.02); /* now and then it diverges */
    c->decay = (moe_real)(0.1 * (double)below(h, 2));
    c->clip = (moe_real)below(h, 2);
    c->seed = h->seed;
    c->total_steps = (int)below(h, 2) * 20;
    c->warmup = c->total_steps / 5;
    c->final_rate = (moe_real)0.1;
    if (t == NULL || (t->flags & MOE_PARAM_STATE) || below(h, 2)) return;
    strcpy(h->frozen, t->name);
    h->frozen_hash = tensor_hash(&h->net, t->name);
    h->group.pattern = h->frozen;
    h->group.frozen = 1;
    c->groups = &h->group;
    c->n_groups = 1;
}

/* 0: this attempt is too large, or its routers want of a call what is not here. */
static int begin(history *h) {
    moe_net_pass pass;
    moe_status status = make_net(h, &h->net);
    if (status == MOE_OK && (h->net.d_out > WIDEST || moe_net_parameter_count(&h->net, NULL) > MOST_NUMBERS))
        status = MOE_ERR_SPACE;
    if (status == MOE_OK) {
        draw_data(h);
        status = forward(h, &h->net, BATCH, 1, &pass);
        if (status == MOE_OK) status = moe_net_backward(&h->net, h->targets, NULL, &pass);
        if (status == MOE_OK) status = forward(h, &h->net, BATCH, 0, &pass);
    }
    if (status == MOE_OK) {
        net_zero_gradients(&h->net);
        draw_training(h);
        status = moe_trainer_init(&h->trainer, &h->net, &h->training, NULL);
    }
    if (status == MOE_OK) return 1;
    moe_net_free(&h->net);
    return 0;
}

/* ---- the model ---- */

static void fact(history *h, int which, uint64_t hash) {
    known *k = &h->after[h->changes];
    if (k->is[which])
        CHECKF(k->hash[which] == hash, "%s after %u changes", fact_names[which], (unsigned)h->changes);
    k->is[which] = 1;
    k->hash[which] = hash;
}

static moe_buffer file_of(const history *h, int checkpoint) {
    moe_buffer file;
    moe_stream stream;
    memset(&file, 0, sizeof file);
    stream = moe_buffer_stream(&file);
    CHECK_STATUS(checkpoint ? moe_trainer_write(&h->trainer, &stream, NULL) : moe_net_write(&h->net, &stream, NULL),
                 MOE_OK);
    return file;
}

/* Everything is as it was after so many changes. */
static void check_here(history *h) {
    int checkpoint;
    for (checkpoint = 0; checkpoint < 2; checkpoint++) {
        moe_buffer file = file_of(h, checkpoint);
        fact(h, checkpoint ? FACT_CHECKPOINT : FACT_NET, hash_of(file.data, file.size));
        moe_buffer_free(&file);
    }
    fact(h, FACT_ANSWER, answer_of(h, &h->net));
    if (h->group.frozen) CHECK(tensor_hash(&h->net, h->frozen) == h->frozen_hash, "a frozen tensor");
}

/* The file at the path has these bytes, or is not there. */
static void check_disk(const history *h) {
    moe_buffer file;
    moe_status status;
    FILE *beside = fopen(path_beside, "rb");
    memset(&file, 0, sizeof file);
    status = moe_file_read(path, &file, NULL);
    if (h->disk.size == 0) CHECK_STATUS(status, MOE_ERR_IO);
    else CHECK(status == MOE_OK && file.size == h->disk.size && same_bits(file.data, h->disk.data, file.size));
    if (!CHECK(beside == NULL, "nothing is left beside the file")) fclose(beside);
    moe_buffer_free(&file);
}

/* ---- changes ---- */

static moe_status observe(history *h) {
    moe_net_pass pass;
    moe_status status = forward(h, &h->net, BATCH, 1, &pass);
    if (status != MOE_OK) return status;
    status = moe_net_observe(&h->net, &pass);
    return status == MOE_OK ? moe_net_advance(&h->net) : status;
}

/* The kind and the data of a change follow from its number. */
static void change(history *h) {
    const uint64_t kind = hash_more(h->seed, &h->changes, sizeof h->changes) >> 32;
    const moe_data data = data_at(h, h->changes % (ROWS / BATCH) * BATCH, BATCH), half = data_at(h, 0, LENGTH);
    moe_step step;
    moe_status status;
    memset(&step, 0, sizeof step);
    if (kind % 6 == 0) status = observe(h);
    else if (kind % 6 == 1) {
        status = moe_trainer_accumulate(&h->trainer, &data, &step, NULL);
        if (status == MOE_OK) status = moe_trainer_accumulate(&h->trainer, &half, &step, NULL);
        if (status == MOE_OK) status = moe_trainer_update(&h->trainer, &step, NULL);
    } else {
        status = moe_trainer_step(&h->trainer, &data, &step, NULL);
        if (status != MOE_OK) check_here(h); /* a failed step changes nothing */
    }
    CHECK(status == MOE_OK || status == MOE_ERR_NONFINITE, "a change");
    h->trainer.n_accumulated = 0;
    h->changes++;
    n_changes++;
    h->trainer.position[3] = h->changes + h->seed; /* the caller's, in checkpoints */
    fact(h, FACT_STATUS, hash_more((uint64_t)status, &step, sizeof step));
    check_here(h);
}

static void train(history *h) {
    size_t n = 1 + below(h, 4);
    for (; n > 0 && h->changes < MOST_CHANGES; n--) change(h);
}

/* ---- files ---- */

static void save(history *h) {
    moe_error error;
    if (!CHECK_STATUS(moe_trainer_save(&h->trainer, path, &error), MOE_OK)) return;
    moe_buffer_free(&h->disk);
    h->disk = file_of(h, 1);
    h->saved = h->changes;
    check_disk(h);
}

/* A stream that fails after some bytes. */
typedef struct cut {
    const history *h;
    moe_stream *to;
    size_t left;
} cut;

static moe_status cut_write(void *ctx, const void *from, size_t size) {
    cut *c = (cut *)ctx;
    const size_t n = size < c->left ? size : c->left;
    const moe_status status = c->to->write(c->to->ctx, from, n);
    c->left -= n;
    return status != MOE_OK ? status : n < size ? MOE_ERR_IO : MOE_OK;
}

static moe_status cut_contents(void *ctx, moe_stream *stream) {
    cut *c = (cut *)ctx;
    moe_stream cutting;
    memset(&cutting, 0, sizeof cutting);
    cutting.ctx = c;
    cutting.write = cut_write;
    c->to = stream;
    return moe_trainer_write(&c->h->trainer, &cutting, NULL);
}

static void save_cut(history *h) {
    moe_buffer whole = file_of(h, 1);
    cut c;
    c.h = h;
    c.to = NULL;
    c.left = below(h, whole.size);
    CHECK_STATUS(moe_file_replace(path, cut_contents, &c, NULL), MOE_ERR_IO);
    check_disk(h);
    moe_buffer_free(&whole);
}

/* The process ends; the next one has only the file. */
static void kill_and_load(history *h) {
    moe_error error;
    moe_trainer_free(&h->trainer);
    moe_net_free(&h->net);
    h->changes = h->disk.size > 0 ? h->saved : 0;
    if (h->disk.size > 0) CHECK_STATUS(moe_net_load(&h->net, path, 1, h->kernels, &h->allocator, &error), MOE_OK);
    else CHECK_STATUS(make_net(h, &h->net), MOE_OK);
    CHECK_STATUS(moe_trainer_init(&h->trainer, &h->net, &h->training, &error), MOE_OK);
    if (h->disk.size > 0) CHECK_STATUS(moe_trainer_load(&h->trainer, path, &error), MOE_OK);
    n_loads++;
}

static void load_same(history *h) {
    if (h->disk.size == 0) return;
    CHECK_STATUS(moe_trainer_load(&h->trainer, path, NULL), MOE_OK);
    h->changes = h->saved;
    n_loads++;
}

/* A damaged file is refused. In the header a bit may change a number that means nothing else. */
static void load_damaged(history *h) {
    moe_buffer file = file_of(h, 1);
    moe_file opened;
    moe_net net, kept;
    size_t data, bit;
    memset(&net, 0x5a, sizeof net);
    kept = net;
    if (!CHECK_STATUS(moe_file_open(&opened, file.data, file.size, NULL), MOE_OK)) return;
    data = 8 + opened.header_size;
    if (file.size > data && below(h, 2)) {
        bit = below(h, 8 * (file.size - data));
        file.data[data + bit / 8] ^= (unsigned char)(1u << bit % 8);
        CHECK_STATUS(moe_trainer_read(&h->trainer, file.data, file.size, NULL), MOE_ERR_FORMAT);
    } else if (below(h, 2)) {
        file.size = below(h, file.size);
        CHECK(moe_trainer_read(&h->trainer, file.data, file.size, NULL) != MOE_OK, "a file without its end");
        CHECK(moe_net_read(&net, file.data, file.size, 1, 0, NULL, NULL) != MOE_OK, "a file without its end");
        CHECK(same_bits(&net, &kept, sizeof net), "a failed load changes nothing");
    } else {
        bit = below(h, 8 * data);
        file.data[bit / 8] ^= (unsigned char)(1u << bit % 8);
        if (moe_net_read(&net, file.data, file.size, 1, h->kernels, &h->allocator, NULL) == MOE_OK) moe_net_free(&net);
        else CHECK(same_bits(&net, &kept, sizeof net), "a failed load changes nothing");
    }
    moe_buffer_free(&file);
}

/* A network for inference alone, read from the file's bytes. */
static void copy(history *h) {
    moe_buffer file = file_of(h, (int)below(h, 2)), again;
    moe_stream stream;
    moe_trainer trainer;
    moe_net net;
    memset(&again, 0, sizeof again);
    stream = moe_buffer_stream(&again);
    if (CHECK_STATUS(moe_net_read(&net, file.data, file.size, 0, h->kernels, &h->allocator, NULL), MOE_OK)) {
        fact(h, FACT_ANSWER, answer_of(h, &net));
        CHECK_STATUS(moe_net_write(&net, &stream, NULL), MOE_OK);
        fact(h, FACT_NET, hash_of(again.data, again.size));
        CHECK_STATUS(moe_trainer_init(&trainer, &net, &h->training, NULL), MOE_ERR_STATE);
        moe_net_free(&net);
    }
    moe_buffer_free(&again);
    moe_buffer_free(&file);
}

/* ---- use ---- */

static void evaluate(history *h) {
    moe_evaluation result;
    const moe_data data = data_at(h, 0, ROWS);
    moe_status status;
    memset(&result, 0, sizeof result);
    status = moe_evaluate(&h->net, &data, h->training.criterion, &result, NULL);
    CHECK(status == MOE_OK || status == MOE_ERR_NONFINITE, "evaluation");
    fact(h, FACT_EVALUATION, hash_more((uint64_t)status, &result, sizeof result));
}

static void unpack(history *h) {
    size_t i;
    for (i = 0; i < h->net.n_modules; i++) h->net.modules[i].layer.is_packed = 0;
    free(h->packed);
    h->packed = NULL;
}

/* Packed as they are the weights keep every bit, and may stay so, which a step ends; in another
   type the answers are the same twice; unpacked it is as before. */
static void pack(history *h) {
    const int type = below(h, 2) ? (int)MOE_TYPE_REAL : (int)below(h, MOE_TYPE_COUNT), stays = (int)below(h, 2);
    size_t size;
    uint64_t answer;
    moe_status status;
    unpack(h);
    if (!CHECK_STATUS(moe_net_pack_size(&h->net, type, 0, &size, NULL), MOE_OK)) return;
    h->packed = grab(size, 1);
    CHECK_STATUS(moe_net_pack(&h->net, type, h->packed, size - 1, NULL), MOE_ERR_SPACE);
    status = moe_net_pack(&h->net, type, h->packed, size, NULL);
    CHECK(status == MOE_OK || status == MOE_ERR_NONFINITE || status == MOE_ERR_OVERFLOW, "packing");
    answer = answer_of(h, &h->net);
    if (type == MOE_TYPE_REAL) fact(h, FACT_ANSWER, answer);
    else CHECK(answer_of(h, &h->net) == answer, "packed, the same answers again");
    if (type != MOE_TYPE_REAL || !stays) unpack(h);
}

/* Whether a router decides otherwise in decoding. */
static int predicts(const moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].layer.config.router.predictor) return 1;
    return 0;
}

/* Token by token the bits of the whole sequence. */
static void decode(history *h) {
    moe_net_pass whole, pass;
    moe_cache cache;
    moe_call call;
    size_t size, work_size, t;
    void *memory, *work;
    if (moe_net_decode_size(&h->net, LENGTH, 1, &size, &work_size, NULL) != MOE_OK) return;
    if (forward(h, &h->net, LENGTH, 0, &whole) != MOE_OK) return;
    memory = grab(size, 1);
    work = grab(work_size, 1);
    CHECK_STATUS(moe_net_cache_init(&cache, &h->net, LENGTH, memory, size, NULL), MOE_OK);
    memset(&call, 0, sizeof call);
    call.n_tokens = 1;
    for (t = 0; t < LENGTH; t++) {
        const size_t width = (size_t)h->net.d_out;
        call.x = h->net.d_in > 0 ? h->x + t * (size_t)h->net.d_in : NULL;
        call.token_ids = h->ids + t;
        if (!CHECK_STATUS(moe_net_decode(&h->net, &cache, &call, work, work_size, &pass), MOE_OK)) break;
        CHECK(predicts(&h->net) || same_reals(pass.y, whole.y + t * width, width), "decoding");
    }
    n_decoded++;
    free(memory);
    free(work);
}

/* The outputs of a model for the first sequence, and its text. With plain C kernels a
   float model computes the network's bits. */
static uint64_t use_model(history *h, const moe_built_model *built) {
    const moe_model *model = &built->model;
    const int exact =
        model->weights_are == MOE_WEIGHTS_FLOAT && h->kernels == MOE_KERNELS_C && !predicts(&h->net);
    const size_t width = model->d_out * (model->weights_are == MOE_WEIGHTS_FLOAT ? sizeof(moe_real) : sizeof(int16_t));
    unsigned char *scratch = (unsigned char *)grab(model->scratch_size, 1);
    unsigned char *output = (unsigned char *)grab(width, 1);
    int8_t *levels = (int8_t *)grab(model->d_in, 1);
    moe_net_pass pass;
    moe_buffer text;
    moe_stream stream;
    uint64_t hash = 1;
    size_t t;
    const int is_finite = forward(h, &h->net, LENGTH, 0, &pass) == MOE_OK;
    for (t = 0; t < LENGTH; t++) {
        const moe_real *x = h->x + t * (size_t)h->net.d_in;
        const void *input = x;
        moe_status status;
        if (model->d_in == 0) input = &h->ids[t];
        else if (model->weights_are != MOE_WEIGHTS_FLOAT) {
            moe_infer_levels(model, x, levels);
            input = levels;
        }
        status = moe_infer(model, NULL, input, output, scratch, model->scratch_size);
        hash = hash_more(hash + (uint64_t)status, output, status == MOE_OK ? width : 0);
        if (exact && is_finite)
            CHECK(status == MOE_OK && same_bits(output, pass.y + t * model->d_out, width), "a float model");
    }
    memset(&text, 0, sizeof text);
    stream = moe_buffer_stream(&text);
    CHECK_STATUS(moe_export_c(built, "net", &stream, NULL), MOE_OK);
    hash = hash_more(hash, text.data, text.size);
    moe_buffer_free(&text);
    free(scratch);
    free(output);
    free(levels);
    n_models++;
    return hash;
}

static moe_model_config model_config(const history *h, const moe_data *data, int weights) {
    moe_model_config c;
    memset(&c, 0, sizeof c);
    c.weights = weights;
    c.calibration = data;
    c.length = LENGTH;
    c.allocator = h->allocator;
    c.same_bits = h->kernels == MOE_KERNELS_C;
    return c;
}

static void infer(history *h) {
    const moe_data data = data_at(h, 0, ROWS);
    const moe_model_config c = model_config(h, &data, (int)below(h, MOE_WEIGHTS_COUNT));
    moe_built_model built;
    uint64_t hash = (uint64_t)moe_model_create(&built, &h->net, &c, NULL);
    if (hash == MOE_OK) {
        hash = use_model(h, &built);
        moe_model_free(&built);
    }
    fact(h, FACT_MODEL + c.weights, hash);
}

/* Written under another program's names, read and written again: the same bytes. */
static void publish_layer(history *h, const moe_layer *layer, const char *family) {
    moe_buffer file, again;
    moe_stream stream;
    moe_layer read;
    moe_import_source source;
    moe_status status;
    memset(&file, 0, sizeof file);
    memset(&again, 0, sizeof again);
    stream = moe_buffer_stream(&file);
    if (moe_import_write(layer, &stream, "model.layers.0.mlp", family, MOE_DTYPE_F64, NULL) == MOE_OK) {
        source = moe_import_memory("model.safetensors", file.data, file.size);
        status = moe_import_read(&read, &source, 1, "model.layers.0.mlp", family, &h->allocator, NULL);
        CHECK(status == MOE_OK || status == MOE_ERR_CONFIG, "a published layer"); /* fewer experts than K */
        stream = moe_buffer_stream(&again);
        if (status == MOE_OK) {
            CHECK_STATUS(moe_import_write(&read, &stream, "model.layers.0.mlp", family, MOE_DTYPE_F64, NULL), MOE_OK);
            CHECK(again.size == file.size && same_bits(again.data, file.data, file.size), family);
            moe_layer_free(&read);
            n_published++;
        }
    }
    moe_buffer_free(&again);
    moe_buffer_free(&file);
}

static void publish(history *h) {
    static const char *const families[] = {"mixtral",     "qwen2_moe",   "qwen3_moe", "deepseek_v2",
                                           "deepseek_v3", "minimax_m2", "llama4",    "gpt_oss", "granite_moe"};
    size_t i, k;
    for (i = 0; i < h->net.n_modules; i++)
        for (k = 0; k < sizeof families / sizeof families[0]; k++)
            if (h->net.modules[i].kind == MOE_MODULE_MIXTURE) publish_layer(h, &h->net.modules[i].layer, families[k]);
}

/* ---- what fails ---- */

static void refused(history *h) {
    moe_data data = data_at(h, 0, BATCH);
    const int32_t label = h->labels[1];
    moe_call call;
    moe_net_pass pass;
    unsigned char work[1];
    memset(&call, 0, sizeof call);
    call.n_tokens = 1;
    call.x = h->net.d_in > 0 ? h->x : NULL;
    call.token_ids = h->ids;
    CHECK_STATUS(moe_net_forward(&h->net, &call, work, 1, &pass), MOE_ERR_SPACE);
    data.n = BATCH + 1;
    CHECK_STATUS(moe_trainer_step(&h->trainer, &data, NULL, NULL), MOE_ERR_ARGUMENT);
    data.n = BATCH;
    h->labels[1] = (int32_t)h->net.d_out;
    if (h->training.criterion == MOE_CRITERION_CROSS_ENTROPY)
        CHECK_STATUS(moe_trainer_step(&h->trainer, &data, NULL, NULL), MOE_ERR_ARGUMENT);
    h->labels[1] = label;
    CHECK_STATUS(moe_trainer_update(&h->trainer, NULL, NULL), MOE_ERR_STATE);
}

static moe_status any_call(history *h, const moe_buffer *file, moe_stream *stream) {
    const moe_data data = data_at(h, 0, ROWS);
    moe_built_model built;
    moe_model_config c;
    moe_net net;
    moe_status status;
    switch (below(h, 4)) {
    case 0: return moe_trainer_write(&h->trainer, stream, NULL);
    case 1: return moe_trainer_read(&h->trainer, file->data, file->size, NULL);
    case 2:
        status = moe_net_read(&net, file->data, file->size, 1, h->kernels, &h->allocator, NULL);
        if (status == MOE_OK) moe_net_free(&net);
        return status;
    default:
        c = model_config(h, &data, (int)below(h, 2));
        status = moe_model_create(&built, &h->net, &c, NULL);
        if (status == MOE_OK) moe_model_free(&built);
        return status == MOE_ERR_MEMORY ? status : MOE_OK; /* what has no such model says so */
    }
}

/* One call for memory fails; what does not succeed changes nothing. */
static void short_of_memory(history *h) {
    moe_buffer file = file_of(h, 1), written;
    moe_stream stream;
    moe_status status;
    memset(&written, 0, sizeof written);
    written.allocator = h->allocator;
    stream = moe_buffer_stream(&written);
    h->heap.fail_at = h->heap.calls + 1 + (long)below(h, 8);
    h->heap.fail_on = (int)below(h, 2);
    status = any_call(h, &file, &stream);
    if (h->heap.fail_on || status != MOE_OK) /* what fails once may do with less */
        CHECK_STATUS(status, h->heap.calls >= h->heap.fail_at ? MOE_ERR_MEMORY : MOE_OK);
    n_refused += status != MOE_OK;
    h->heap.fail_at = h->heap.fail_on = 0;
    moe_buffer_free(&written);
    moe_buffer_free(&file);
}

/* ---- a history ---- */

static const struct {
    const char *name;
    void (*run)(history *h);
} operations[] = {{"train", train},           {"train", train},       {"train", train},      {"save", save},
                  {"save_cut", save_cut},     {"kill", kill_and_load}, {"load", load_same},   {"damaged", load_damaged},
                  {"copy", copy},             {"evaluate", evaluate}, {"pack", pack},        {"decode", decode},
                  {"model", infer},           {"model", infer},       {"publish", publish},  {"refused", refused},
                  {"memory", short_of_memory}};

/* The same number of changes to a new network, without anything between. */
static void check_uninterrupted(history *h) {
    const size_t n = h->changes;
    moe_buffer_free(&h->disk);
    kill_and_load(h);
    check_here(h);
    while (h->changes < n) change(h);
}

static void run_history(uint64_t seed) {
    static history h;
    size_t i, n;
    memset(&h, 0, sizeof h);
    h.seed = seed;
    h.allocator = test_allocator(&h.heap, 0);
    moe_rng_seed(&h.rng, seed);
    h.kernels = below(&h, 2) ? (int)MOE_KERNELS_AUTO : (int)MOE_KERNELS_C;
    (void)remove(path);
    while (!begin(&h)) h.attempt++;
    check_here(&h);
    n = 5 + below(&h, 26);
    for (i = 0; i < n; i++) {
        const size_t which = below(&h, sizeof operations / sizeof operations[0]);
        strcat(strcat(h.text, " "), operations[which].name);
        operations[which].run(&h);
        check_here(&h);
        n_operations++;
    }
    check_uninterrupted(&h);
    unpack(&h);
    moe_trainer_free(&h.trainer);
    moe_net_free(&h.net);
    CHECK(h.heap.blocks == 0 && h.heap.bytes == 0 && !h.heap.wrong_size, "memory is given back");
    if (test_wrong > 0) printf("    histories %lu 1:%s\n", (unsigned long)seed, h.text);
    free(h.work);
    (void)remove(path);
}

int main(int argc, char **argv) {
    const int quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    const uint64_t first = argc > 2 ? strtoul(argv[1], NULL, 10) : 1;
    const uint64_t count = argc > 2 ? strtoul(argv[2], NULL, 10) : quick ? 60 : 1000;
    char name[40];
    uint64_t i;
    for (i = 0; i < count; i++) {
        sprintf(name, "history %lu", (unsigned long)(first + i));
        test_case(name);
        run_history(first + i);
    }
    printf("note: %ld operations, %ld changes, %ld loads, %ld models, %ld published layers, %ld sequences decoded, "
           "%ld calls without memory; %.1f s of a processor\n",
           n_operations, n_changes, n_loads, n_models, n_published, n_decoded, n_refused,
           (double)clock() / (double)CLOCKS_PER_SEC);
    return test_end();
}
