/* threads.c - several threads use the library at once: they share what may be shared, and have
   objects of their own for all else.

     cc -std=c99 -O2 -I. tests/unit/threads.c -o threads -pthread -lm && ./threads
     (also with -DMOE_REAL=double)

   Every thread must compute, to the bit, what one thread computes alone. Made for the thread
   sanitizer (-fsanitize=thread), which sees races that change no bit: tests/quality/static.sh.
   `threads race` breaks the rules on purpose, two threads with the same workspace, and must be
   caught there. Without POSIX threads all is skipped. Exit status 1 if a check failed. */

#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200112L
#endif
#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__has_include)
#if __has_include(<pthread.h>)
#define HAVE_THREADS 1
#endif
#elif defined(__unix__)
#define HAVE_THREADS 1
#endif

#ifndef HAVE_THREADS
int main(void) {
    printf("skip: POSIX threads are not there\n0 passed, 0 failed, 1 skipped\n");
    return 0;
}
#else
#include <pthread.h>

enum { THREADS = 4, ROUNDS = 3, TOKENS = 40, WIDTH = 16, WORDS = 24, STEPS = 12 };

/* ---- threads ---- */

/* What one thread is to do, and what it says: a hash of the bytes that it computed. */
typedef struct job {
    void (*task)(struct job *job);
    const struct shared *shared;
    int number;         /* what is its own depends on it */
    uint64_t hash;      /* of all results */
    const char *fault;  /* the first thing that went wrong, or NULL */
} job;

static void *job_main(void *p) {
    job *j = (job *)p;
    j->task(j);
    return NULL;
}

static void fault(job *j, const char *what) {
    if (j->fault == NULL) j->fault = what;
}

static void result(job *j, const void *bytes, size_t size) {
    const unsigned char *p = (const unsigned char *)bytes;
    size_t i;
    for (i = 0; i < size; i++) j->hash = (j->hash ^ p[i]) * UINT64_C(0x100000001b3);
}

static void start(pthread_t *thread, void *(*what)(void *), void *with) {
    if (pthread_create(thread, NULL, what, with) != 0) {
        fprintf(stderr, "threads: a thread cannot be started\n");
        exit(2);
    }
}

/* ---- moe_parallel: a thread for every task ---- */

typedef struct share {
    void (*task)(void *work, int index);
    void *work;
    int index;
} share;

static void *share_main(void *p) {
    share *s = (share *)p;
    s->task(s->work, s->index);
    return NULL;
}

static void team_run(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    pthread_t threads[THREADS];
    share shares[THREADS];
    int i;
    (void)ctx;
    for (i = 0; i < count; i++) {
        shares[i].task = task;
        shares[i].work = work;
        shares[i].index = i;
        if (i > 0) start(&threads[i], share_main, &shares[i]);
    }
    (void)share_main(&shares[0]);
    for (i = 1; i < count; i++) pthread_join(threads[i], NULL);
}

static moe_parallel team(void) {
    moe_parallel p;
    memset(&p, 0, sizeof p);
    p.threads = THREADS;
    p.always = 1;
    p.run = team_run;
    return p;
}

/* ---- what all threads share ---- */

typedef struct shared {
    moe_layer layers[3]; /* plain, packed to int8 where there is such, stochastic */
    void *packed;
    moe_net text;        /* reads token ids: attention and a mixture */
    moe_net dense;       /* reads numbers */
    moe_built_model model;
    moe_buffer bytes;    /* the text net, written */
    moe_file file;
    moe_real x[TOKENS * WIDTH];
    int32_t ids[TOKENS];
} shared;

static void must(moe_status status, const moe_error *error, const char *what) {
    if (status == MOE_OK) return;
    printf("FAILED: %s: %s\n0 passed, 1 failed\n", what, error != NULL ? error->message : moe_status_text(status));
    exit(1);
}

static moe_layer_config mixture(const char *preset) {
    moe_layer_config config;
    moe_error error;
    memset(&config, 0, sizeof config);
    if (preset != NULL) must(moe_layer_preset(preset, &config, &error), &error, preset);
    config.router.d_model = WIDTH;
    config.router.n_experts = 6;
    config.d_ff = 20;
    return config;
}

static void make_text(moe_net *net, uint64_t seed, int trainable) {
    const moe_layer_config config = mixture(NULL);
    moe_attention_config attention;
    moe_error error;
    memset(&attention, 0, sizeof attention);
    attention.heads = 2;
    (void)moe_net_init(net, 0, MOE_KERNELS_AUTO, NULL);
    (void)moe_net_embedding(net, WORDS, WIDTH);
    (void)moe_net_positions(net, TOKENS);
    (void)moe_net_rms_norm(net);
    (void)moe_net_attention(net, &attention);
    (void)moe_net_residual(net, 2);
    (void)moe_net_rms_norm(net);
    (void)moe_net_mixture(net, &config);
    (void)moe_net_residual(net, 2);
    (void)moe_net_rms_norm(net);
    (void)moe_net_tied(net);
    must(moe_net_build(net, trainable, seed, &error), &error, "text net");
}

static void make_dense(moe_net *net, uint64_t seed, int trainable) {
    const moe_layer_config config = mixture(NULL);
    moe_error error;
    (void)moe_net_init(net, WIDTH, MOE_KERNELS_AUTO, NULL);
    (void)moe_net_linear(net, WIDTH);
    (void)moe_net_mixture(net, &config);
    (void)moe_net_residual(net, 1);
    (void)moe_net_linear(net, 3);
    must(moe_net_build(net, trainable, seed, &error), &error, "dense net");
}

static void make_layers(shared *s) {
    static const char *const presets[3] = {"mixtral", NULL, "noisy_topk"};
    moe_error error;
    int i;
    for (i = 0; i < 3; i++) {
        moe_layer_config config = mixture(presets[i]);
        must(moe_layer_create(&s->layers[i], &config, 0, 3, NULL, &error), &error, "layer");
    }
#ifndef MOE_NO_QUANT
    {
        size_t bytes = 0;
        must(moe_layer_pack_size(&s->layers[1], MOE_TYPE_Q8, 0, &bytes, NULL), NULL, "pack size");
        s->packed = grab(1, bytes);
        must(moe_layer_pack(&s->layers[1], MOE_TYPE_Q8, s->packed, bytes, &error), &error, "pack");
    }
#endif
}

static void shared_begin(shared *s) {
    moe_rng rng;
    moe_error error;
    moe_data rows;
    moe_model_config config;
    moe_stream stream;
    size_t i;
    memset(s, 0, sizeof *s);
    moe_rng_seed(&rng, 7);
    for (i = 0; i < TOKENS * WIDTH; i++) s->x[i] = moe_rng_normal(&rng);
    for (i = 0; i < TOKENS; i++) s->ids[i] = (int32_t)moe_rng_below(&rng, WORDS);
    make_layers(s);
    make_text(&s->text, 1, 0);
    make_dense(&s->dense, 2, 0);
    memset(&rows, 0, sizeof rows);
    memset(&config, 0, sizeof config);
    rows.n = TOKENS;
    rows.x = s->x;
    config.weights = MOE_WEIGHTS_INT8;
    config.calibration = &rows;
    must(moe_model_create(&s->model, &s->dense, &config, &error), &error, "model");
    stream = moe_buffer_stream(&s->bytes);
    must(moe_net_write(&s->text, &stream, &error), &error, "writing the net");
    must(moe_file_open(&s->file, s->bytes.data, s->bytes.size, &error), &error, "opening the file");
}

static void shared_end(shared *s) {
    int i;
    for (i = 0; i < 3; i++) moe_layer_free(&s->layers[i]);
    free(s->packed);
    moe_net_free(&s->text);
    moe_net_free(&s->dense);
    moe_model_free(&s->model);
    moe_buffer_free(&s->bytes);
}

/* ---- tasks: each is done by all threads at once ---- */

static void layer_with(job *j, const moe_layer *layer, const moe_parallel *parallel, void *work, size_t size) {
    moe_real y[TOKENS * WIDTH];
    moe_layer_pass pass;
    moe_rng rng;
    moe_call call;
    memset(&call, 0, sizeof call);
    moe_rng_seed(&rng, 100 + (uint64_t)j->number);
    call.n_tokens = TOKENS;
    call.x = j->shared->x;
    call.rng = &rng;
    call.parallel = parallel;
    if (moe_layer_forward(layer, &call, y, work, size, &pass) != MOE_OK) fault(j, "moe_layer_forward");
    else result(j, y, sizeof y);
}

static void layers_once(job *j, const moe_parallel *parallel) {
    int i;
    for (i = 0; i < 3; i++) {
        size_t size = 0;
        void *work;
        if (moe_layer_work_size(&j->shared->layers[i], TOKENS, 0, &size) != MOE_OK) fault(j, "moe_layer_work_size");
        work = grab(1, size);
        layer_with(j, &j->shared->layers[i], parallel, work, size);
        free(work);
    }
}

static void shared_layers(job *j) { layers_once(j, NULL); }

static void shared_layers_with_teams(job *j) {
    const moe_parallel own = team();
    layers_once(j, &own);
}

static void shared_net(job *j) {
    const moe_parallel own = team();
    moe_call call;
    moe_net_pass pass;
    size_t size = 0;
    void *work;
    memset(&call, 0, sizeof call);
    call.parallel = j->number % 2 == 1 ? &own : NULL;
    call.n_tokens = TOKENS;
    call.token_ids = j->shared->ids;
    if (moe_net_work_size(&j->shared->text, TOKENS, 0, &size) != MOE_OK) fault(j, "moe_net_work_size");
    work = grab(1, size);
    if (moe_net_forward(&j->shared->text, &call, work, size, &pass) != MOE_OK) fault(j, "moe_net_forward");
    else result(j, pass.y, TOKENS * WORDS * sizeof *pass.y);
    free(work);
}

/* A cache, a sequence and random numbers of its own. */
static void shared_net_decoding(job *j) {
    const moe_parallel own = team();
    const moe_net *net = &j->shared->text;
    moe_cache cache;
    moe_rng rng;
    moe_error error;
    size_t size = 0, work_size = 0, at;
    int32_t token = j->number % WORDS;
    void *memory, *work;
    if (moe_net_decode_size(net, TOKENS, 1, &size, NULL, NULL) != MOE_OK ||
        moe_net_decode_size(net, TOKENS, 1, NULL, &work_size, NULL) != MOE_OK)
        fault(j, "sizes");
    memory = grab(1, size);
    work = grab(1, work_size);
    moe_rng_seed(&rng, (uint64_t)j->number);
    if (moe_net_cache_init(&cache, net, TOKENS, memory, size, &error) != MOE_OK) fault(j, error.message);
    for (at = 0; at < STEPS && j->fault == NULL; at++) {
        moe_real p[WORDS];
        int32_t order[WORDS];
        moe_call call;
        moe_net_pass pass;
        memset(&call, 0, sizeof call);
        call.n_tokens = 1;
        call.token_ids = &token;
        call.parallel = j->number % 2 == 1 ? &own : NULL;
        if (moe_net_decode(net, &cache, &call, work, work_size, &pass) != MOE_OK) fault(j, "moe_net_decode");
        else if (moe_sample(NULL, WORDS, pass.y, &rng, p, order, &token, &error) != MOE_OK) fault(j, "moe_sample");
        result(j, &token, sizeof token);
    }
    free(memory);
    free(work);
}

static void shared_model(job *j) {
    const moe_model *model = &j->shared->model.model;
    void *scratch = grab(1, model->scratch_size);
    size_t i;
    for (i = 0; i < TOKENS; i++) {
        int8_t levels[WIDTH];
        int16_t y[3];
        moe_infer_levels(model, j->shared->x + i * WIDTH, levels);
        if (moe_infer(model, NULL, levels, y, scratch, model->scratch_size) != MOE_OK) fault(j, "moe_infer");
        else result(j, y, sizeof y);
    }
    free(scratch);
}

static void shared_file(job *j) {
    static const char *const names[] = {"1.table", "3.query", "6.router.weight", "no such"};
    const moe_file *file = &j->shared->file;
    moe_file own = *file; /* only next moves anything */
    moe_file_tensor t;
    moe_real values[8];
    size_t n = 0, i, length = 0;
    char text[4096];
    while (moe_file_next(&own, &t) == MOE_OK) {
        const size_t count = t.count < 8 ? t.count : 8;
        n++;
        if (moe_file_values(&t, t.count - count, count, values, NULL) != MOE_OK) fault(j, "moe_file_values");
        else result(j, values, count * sizeof *values);
    }
    if (n != file->n_tensors) fault(j, "moe_file_next");
    for (i = 0; i < sizeof names / sizeof *names; i++) {
        const moe_status status = moe_file_find(file, names[i], &t);
        result(j, &status, sizeof status);
    }
    if (moe_file_metadata(file, "moe", text, sizeof text, &length) == MOE_OK) result(j, text, length);
}

/* Tables that belong to nobody: presets, fields, kernels, texts of errors. */
static void shared_tables(job *j) {
    size_t i;
    for (i = 0; moe_presets()[i].name != NULL; i++) {
        moe_layer_config config;
        moe_error error;
        const moe_status status = moe_layer_preset(moe_presets()[i].name, &config, &error);
        result(j, &status, sizeof status);
        config.router.n_experts = -1 - j->number;
        if (moe_layer_check(&config, &config, &error) == MOE_OK) fault(j, "a negative number of experts is accepted");
        else result(j, error.message, strlen(error.message));
    }
    if (moe_kernels_select(MOE_KERNELS_AUTO) == NULL || moe_field_find(moe_layer_fields(), "d_ff") == NULL)
        fault(j, "tables");
}

/* Makes, trains, writes, reads and frees a network of its own. */
static void train(job *j, moe_net *net, const moe_data *data, const moe_train_config *config) {
    moe_net copy;
    moe_buffer bytes;
    moe_stream stream;
    moe_error error;
    memset(&copy, 0, sizeof copy);
    memset(&bytes, 0, sizeof bytes);
    stream = moe_buffer_stream(&bytes);
    if (moe_fit(net, data, NULL, config, &error) != MOE_OK || moe_net_write(net, &stream, &error) != MOE_OK ||
        moe_net_read(&copy, bytes.data, bytes.size, 0, MOE_KERNELS_AUTO, NULL, &error) != MOE_OK)
        fault(j, "moe_fit, moe_net_write, moe_net_read");
    else result(j, bytes.data, bytes.size);
    moe_net_free(&copy);
    moe_net_free(net);
    moe_buffer_free(&bytes);
}

static void own_training(job *j) {
    int32_t labels[TOKENS];
    moe_net net;
    moe_data data;
    moe_train_config config;
    int i;
    for (i = 0; i < TOKENS; i++) labels[i] = (i + j->number) % 3;
    memset(&data, 0, sizeof data);
    memset(&config, 0, sizeof config);
    data.n = TOKENS;
    data.x = j->shared->x;
    data.labels = labels;
    config.epochs = 2;
    config.batch = 10;
    config.seed = 1 + (uint64_t)j->number;
    make_dense(&net, 10 + (uint64_t)j->number, 1);
    train(j, &net, &data, &config);
}

/* Forward and backward of a layer of its own, half of them with threads of their own. */
static void own_gradients(job *j) {
    const moe_parallel own = team();
    moe_layer_config config = mixture(NULL);
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    moe_tensor t;
    moe_error error;
    moe_real y[TOKENS * WIDTH], dx[TOKENS * WIDTH];
    size_t size = 0, i;
    void *work;
    memset(&call, 0, sizeof call);
    memset(dx, 0, sizeof dx);
    call.n_tokens = TOKENS;
    call.x = j->shared->x;
    call.training = 1;
    call.parallel = j->number % 2 == 1 ? &own : NULL;
    if (moe_layer_create(&layer, &config, 1, 5, NULL, &error) != MOE_OK ||
        moe_layer_work_size(&layer, TOKENS, 1, &size) != MOE_OK)
        fault(j, "moe_layer_create");
    work = grab(1, size);
    if (moe_layer_forward(&layer, &call, y, work, size, &pass) != MOE_OK ||
        moe_layer_backward(&layer, y, dx, NULL, &pass) != MOE_OK)
        fault(j, "forward and backward");
    result(j, y, sizeof y);
    result(j, dx, sizeof dx);
    for (i = 0; moe_layer_tensor(&layer, i, &t) == MOE_OK; i++) result(j, t.gradient, t.count * sizeof *t.gradient);
    free(work);
    moe_layer_free(&layer);
}

/* The same of a net with attention. */
static void own_net_gradients(job *j) {
    const moe_parallel own = team();
    moe_net net;
    moe_net_pass pass;
    moe_call call;
    moe_real dy[TOKENS * WORDS];
    size_t size = 0, i;
    void *work;
    memset(&call, 0, sizeof call);
    call.n_tokens = TOKENS;
    call.token_ids = j->shared->ids;
    call.training = 1;
    call.parallel = j->number % 2 == 1 ? &own : NULL;
    make_text(&net, 9, 1);
    if (moe_net_work_size(&net, TOKENS, 1, &size) != MOE_OK) fault(j, "moe_net_work_size");
    work = grab(1, size);
    for (i = 0; i < TOKENS * WORDS; i++) dy[i] = (moe_real)(i % 7) - 3;
    if (moe_net_forward(&net, &call, work, size, &pass) != MOE_OK || moe_net_backward(&net, dy, NULL, &pass) != MOE_OK)
        fault(j, "forward and backward");
    else result(j, pass.y, sizeof dy);
    for (i = 0; i < net.n_tensors; i++)
        result(j, net.tensors[i].gradient, net.tensors[i].count * sizeof *net.tensors[i].gradient);
    free(work);
    moe_net_free(&net);
}

static void own_model(job *j) {
    moe_net net;
    moe_built_model built;
    moe_data rows;
    moe_model_config config;
    moe_buffer text;
    moe_stream stream;
    moe_error error;
    memset(&rows, 0, sizeof rows);
    memset(&config, 0, sizeof config);
    memset(&text, 0, sizeof text);
    rows.n = TOKENS;
    rows.x = j->shared->x;
    config.weights = j->number % 2 ? MOE_WEIGHTS_INT4 : MOE_WEIGHTS_INT8;
    config.calibration = &rows;
    make_dense(&net, 20 + (uint64_t)j->number, 0);
    stream = moe_buffer_stream(&text);
    if (moe_model_create(&built, &net, &config, &error) != MOE_OK) fault(j, "moe_model_create");
    else {
        if (moe_export_c(&built, "own", &stream, &error) != MOE_OK) fault(j, "moe_export_c");
        else result(j, text.data, text.size);
        moe_model_free(&built);
    }
    moe_buffer_free(&text);
    moe_net_free(&net);
}

/* ---- one thread, then all of them ---- */

static void all_at_once(const shared *s, void (*task)(job *), const char *name) {
    job alone[THREADS], together[THREADS];
    pthread_t threads[THREADS];
    int i, round;
    test_case(name);
    for (i = 0; i < THREADS; i++) {
        memset(&alone[i], 0, sizeof alone[i]);
        alone[i].task = task;
        alone[i].shared = s;
        alone[i].number = i;
        task(&alone[i]);
        CHECK(alone[i].fault == NULL && alone[i].hash != 0, alone[i].fault != NULL ? alone[i].fault : "works alone");
    }
    for (round = 0; round < ROUNDS; round++) {
        for (i = 0; i < THREADS; i++) {
            together[i] = alone[i];
            together[i].hash = 0;
            together[i].fault = NULL;
            start(&threads[i], job_main, &together[i]);
        }
        for (i = 0; i < THREADS; i++) {
            pthread_join(threads[i], NULL);
            CHECK(together[i].fault == NULL && together[i].hash == alone[i].hash, "the same bits beside other threads");
        }
    }
}

/* ---- against the rules ---- */

static void *race_work;
static size_t race_size;

static void race(job *j) { layer_with(j, &j->shared->layers[0], NULL, race_work, race_size); }

static int broken_rules(shared *s) {
    if (moe_layer_work_size(&s->layers[0], TOKENS, 0, &race_size) != MOE_OK) return 2;
    race_work = grab(1, race_size);
    all_at_once(s, race, "race");
    free(race_work);
    return 0;
}

int main(int argc, char **argv) {
    static const struct {
        void (*task)(job *);
        const char *name;
    } tasks[] = {{shared_layers, "layers"},
                 {shared_layers_with_teams, "layers with teams"},
                 {shared_net, "net"},
                 {shared_net_decoding, "decoding"},
                 {shared_model, "integer model"},
                 {shared_file, "file"},
                 {shared_tables, "tables"},
                 {own_training, "training"},
                 {own_gradients, "gradients"},
                 {own_net_gradients, "gradients of a net"},
                 {own_model, "own models"}};
    static shared s;
    size_t i;
    shared_begin(&s);
    if (argc > 1 && strcmp(argv[1], "race") == 0) return broken_rules(&s);
    for (i = 0; i < sizeof tasks / sizeof *tasks; i++) all_at_once(&s, tasks[i].task, tasks[i].name);
    shared_end(&s);
    return test_end();
}
#endif
