/* ranks_nets.c - nets, training and files on several ranks, against the same in one process: every rank is a thread (tests/ranks.h).

     cc -std=c99 -O2 -I. tests/ranks_nets.c -o ranks_nets -pthread -lm && ./ranks_nets [FOLDER]      (also with -DMOE_REAL=double)

   What R ranks make of their samples must be what one process makes of all of them, within rounding: losses, norms, tensors, moments, files. What all ranks
   hold must have the same bits on all of them, and a file those of the ordinary one. FOLDER, by default the current one, takes small files that are
   removed again. Without POSIX threads all is skipped. Exit status 1 if a check failed. */

#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200112L
#endif
#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../moe.h"

#include <math.h>
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
#include "ranks.h"

#if MOE_REAL_IS_DOUBLE
#define NEAR 1e-11
#else
#define NEAR 2e-4
#endif

enum { D = 6, CLASSES = 5, IDS = 11, LENGTH = 4, BATCH = 24, SAMPLES = 80, STEPS = 20, MOST_RANKS = 4 };

static long passed, failed;
static char path[2][600]; /* files of this test */
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

#define CHECK(condition, what) check((condition) != 0, what, __LINE__)

static int check(int good, const char *what, int line) {
    pthread_mutex_lock(&counting);
    if (good) passed++;
    else {
        failed++;
        if (failed <= 60) printf("FAILED: ranks_nets.c:%d: %s\n", line, what);
    }
    pthread_mutex_unlock(&counting);
    return good;
}

/* Says what came instead. */
#define STATUS(status, wanted, what, error) check_status(status, wanted, what, error, __LINE__)

static int check_status(moe_status status, moe_status wanted, const char *what, const moe_error *error, int line) {
    if (!check(status == wanted, what, line) && failed <= 60)
        printf("        wanted %d, got %d: %s\n", wanted, status, error != NULL && status != MOE_OK ? error->message : moe_status_text(status));
    return status == wanted;
}

static void *grab(size_t count, size_t size) {
    void *p = calloc(count > 0 ? count : 1, size);
    if (p == NULL) {
        fprintf(stderr, "ranks_nets: out of memory\n");
        exit(2);
    }
    return p;
}

static int near_to(double a, double b) { return fabs(a - b) <= NEAR * (1.0 + fabs(b)); }

static int all_near(const moe_real *a, const moe_real *b, size_t n) {
    size_t i;
    for (i = 0; i < n; i++)
        if (!near_to((double)a[i], (double)b[i])) return 0;
    return 1;
}

static int same_bits(const void *a, const void *b, size_t n) { return n == 0 || memcmp(a, b, n) == 0; }

/* ---- memory that fails when it is told to -------------------------------------------------------------------------------------- */

typedef struct memory {
    long blocks;         /* handed out and not given back */
    long calls, fail_at; /* fail_at: number of the call that fails, 0: none */
} memory;

static void *memory_resize(void *ctx, void *block, size_t old_size, size_t new_size) {
    memory *m = (memory *)ctx;
    void *made;
    (void)old_size;
    if (new_size == 0) {
        if (block != NULL) m->blocks--;
        free(block);
        return NULL;
    }
    if (++m->calls == m->fail_at) return NULL;
    made = realloc(block, new_size);
    if (made != NULL && block == NULL) m->blocks++;
    return made;
}

static moe_allocator memory_allocator(memory *m) {
    moe_allocator a;
    memset(m, 0, sizeof *m);
    a.ctx = m;
    a.resize = memory_resize;
    return a;
}

/* ---- nets and samples ----------------------------------------------------------------------------------------------------------- */

/* Nets by name: with dropout everywhere, whose draws are those of one process. */
enum { DENSE = 0, CHOICE, CAPACITY, NOISY, TEXT, CLUSTERS, SOFT, KINDS };

static const char *const kind_names[KINDS] = {"dense", "choice", "capacity", "noisy", "text", "clusters", "soft"};

static const char *const kind_mixtures[KINDS] = {
    NULL,
    "n_experts=5 top_k=2 d_ff=7 loss_balance=0.01 loss_z=0.001 n_shared=1 d_shared=4",
    "n_experts=4 top_k=2 d_ff=6 capacity_factor=1.1 loss_balance=0.01 expert=mlp selection_bias=1 bias_rate=0.01",
    "n_experts=6 top_k=2 d_ff=5 noise=gaussian noise_sigma=0.3 loss_importance=0.02",
    "n_experts=4 top_k=1 d_ff=8 select=expert_choice capacity_factor=1.5",
    "n_experts=4 top_k=2 d_ff=6",
    "n_experts=4 select=soft soft_sequences=32 d_ff=6"};

static moe_layer_config layer_of(const char *settings) {
    moe_layer_config c;
    moe_error error;
    memset(&c, 0, sizeof c);
    if (!CHECK(moe_fields_apply(moe_layer_fields(), &c, settings, &error) == MOE_OK, settings)) printf("        %s\n", error.message);
    return c;
}

static int has_ids(int kind) { return kind == TEXT; }

static int has_sequences(int kind) { return kind == TEXT || kind == SOFT; }

/* The modules of a net. */
static void append(moe_net *net, int kind) {
    moe_layer_config config;
    if (kind_mixtures[kind] != NULL) config = layer_of(kind_mixtures[kind]);
    else memset(&config, 0, sizeof config);
    if (kind == TEXT) {
        moe_net_embedding(net, IDS, 8);
        moe_net_positions(net, LENGTH);
        moe_net_rms_norm(net);
        moe_net_attention(net, NULL);
        moe_net_residual(net, 2);
        moe_net_dropout(net, (moe_real)0.1);
        moe_net_rms_norm(net);
        moe_net_mixture(net, &config);
        moe_net_residual(net, 2);
        moe_net_rms_norm(net);
        moe_net_tied(net);
        return;
    }
    moe_net_linear(net, 8);
    moe_net_dropout(net, (moe_real)0.2);
    moe_net_layer_norm(net);
    if (kind == DENSE) {
        config.d_ff = 9;
        moe_net_feed_forward(net, &config);
        moe_net_residual(net, 2);
        moe_net_activation(net, MOE_ACT_GELU);
    } else {
        moe_net_mixture(net, &config);
        moe_net_residual(net, 2);
        if (kind == CLUSTERS) config = layer_of("n_experts=4 top_k=2 d_ff=5 input=adaptive_clustering ac_mode=paper");
        moe_net_dropout(net, (moe_real)0.1);
        if (kind == CLUSTERS || kind == CHOICE) moe_net_mixture(net, &config);
    }
    moe_net_linear(net, CLASSES);
}

static moe_status build(moe_net *net, int kind, const moe_transport *t, const moe_allocator *allocator, moe_error *error) {
    moe_net_init(net, has_ids(kind) ? 0 : D, MOE_KERNELS_C, allocator);
    net->transport = t;
    append(net, kind);
    return moe_net_build(net, 1, 17, error);
}

/* Samples, of every kind. */
typedef struct samples {
    moe_real x[SAMPLES * D];
    int32_t labels[SAMPLES], ids[SAMPLES];
} samples;

static samples the_samples;

static void samples_begin(void) {
    moe_rng rng;
    size_t i, j;
    moe_rng_seed(&rng, 5);
    for (i = 0; i < SAMPLES; i++) {
        the_samples.labels[i] = i % 7 == 3 ? -1 : (int32_t)(i % CLASSES);
        the_samples.ids[i] = (int32_t)moe_rng_below(&rng, IDS);
        for (j = 0; j < D; j++) the_samples.x[i * D + j] = (moe_real)(j == i % CLASSES) + (moe_real)0.5 * moe_rng_normal(&rng);
    }
}

static moe_data data_of(int kind, size_t from, size_t n) {
    moe_data data;
    memset(&data, 0, sizeof data);
    data.n = n;
    data.labels = the_samples.labels + from;
    if (has_ids(kind)) data.token_ids = the_samples.ids + from;
    else data.x = the_samples.x + from * D;
    if (has_sequences(kind)) data.length = LENGTH;
    return data;
}

/* ---- one training, in one process or on ranks ---------------------------------------------------------------------------------------- */

/* What a training is. */
typedef struct training {
    int kind, ranks;
    moe_train_config config;
    int accumulate; /* batches of a step, by moe_trainer_accumulate; 0: moe_trainer_step */
    int skew;       /* 1: in turn one rank has no samples, or all of them */
} training;

/* And what came of it. */
typedef struct outcome {
    moe_step steps[STEPS];
    uint64_t rng;
    moe_real rate;
    moe_net net;
    moe_trainer trainer;
    moe_transport transport;
    memory memory;
} outcome;

typedef struct job {
    const training *training;
    outcome outcomes[MOST_RANKS];
    moe_buffer file; /* of rank 0 */
} job;

/* The part of a rank in the batch of a step. */
static void part_of(const training *g, int rank, int step, size_t n, size_t *first, size_t *count) {
    size_t unit = has_sequences(g->kind) ? LENGTH : 1;
    int alone = g->skew && step % 3 != 0 ? step % g->ranks : -1;
    moe_rank_part(n / unit, rank, g->ranks, first, count);
    if (alone >= 0 && step % 3 == 1) *first = 0, *count = rank == alone ? n / unit : 0; /* one has all */
    if (alone >= 0 && step % 3 == 2) {                                                /* one has none */
        if (g->ranks > 1) moe_rank_part(n / unit, rank > alone ? rank - 1 : rank, g->ranks - 1, first, count);
        if (g->ranks > 1 && rank == alone) *count = 0;
    }
    *first *= unit, *count *= unit;
}

static size_t batch_of(int step) { return step % 4 == 3 ? 8 : BATCH; }

static void take_step(const training *g, outcome *o, int rank, int step) {
    int i, batches = g->accumulate > 0 ? g->accumulate : 1;
    moe_status status;
    moe_error error;
    moe_step seen;
    double loss = 0, router_loss = 0;
    memset(&seen, 0, sizeof seen);
    for (i = 0; i < batches; i++) {
        size_t n = batch_of(step + i), from = (size_t)(step * 8 + i * 12) % (SAMPLES - BATCH) / LENGTH * LENGTH, first = 0, count = n;
        moe_data data;
        if (g->ranks > 0) part_of(g, rank, step + i, n, &first, &count);
        data = data_of(g->kind, from + first, count);
        if (count == 0) data.x = NULL, data.labels = NULL, data.token_ids = NULL;
        status = g->accumulate > 0 ? moe_trainer_accumulate(&o->trainer, &data, &seen, &error) : moe_trainer_step(&o->trainer, &data, &seen, &error);
        if (!STATUS(status, MOE_OK, kind_names[g->kind], &error)) return;
        loss += (double)seen.loss, router_loss += (double)seen.router_loss;
    }
    if (g->accumulate > 0) STATUS(moe_trainer_update(&o->trainer, &seen, &error), MOE_OK, "update", &error);
    seen.loss = (moe_real)(loss / batches), seen.router_loss = (moe_real)(router_loss / batches);
    o->steps[step] = seen;
}

static void train(const training *g, outcome *o, int rank, const moe_transport *t) {
    moe_error error;
    moe_allocator allocator = memory_allocator(&o->memory);
    int step;
    if (!STATUS(build(&o->net, g->kind, t, &allocator, &error), MOE_OK, "build", &error)) return;
    if (!STATUS(moe_trainer_init(&o->trainer, &o->net, &g->config, &error), MOE_OK, "trainer", &error)) return;
    for (step = 0; step < STEPS; step++) take_step(g, o, rank, step);
    o->rng = o->trainer.rng.state, o->rate = o->trainer.rate;
}

static void outcome_free(outcome *o) {
    moe_trainer_free(&o->trainer);
    moe_net_free(&o->net);
    moe_transport_end(&o->transport);
    CHECK(o->memory.blocks == 0, "all memory is given back");
}

static moe_transport *begin(outcome *o, ranks_rank *self) {
    moe_error error;
    o->transport = ranks_transport(self);
    STATUS(moe_transport_begin(&o->transport, &error), MOE_OK, "transport", &error);
    return &o->transport;
}

static void train_task(ranks_rank *self, void *ctx) {
    job *j = (job *)ctx;
    outcome *o = &j->outcomes[self->rank];
    moe_stream stream = moe_buffer_stream(&j->file);
    moe_error error;
    train(j->training, o, self->rank, begin(o, self));
    STATUS(moe_trainer_write(&o->trainer, self->rank == 0 ? &stream : NULL, &error), MOE_OK, "checkpoint of ranks", &error);
}

/* Which part of a tensor of one process a rank has; 0: all of it. */
static int is_part(const moe_net *all, const moe_net *own, size_t i) { return own->tensors[i].count < all->tensors[i].count; }

/* Whether the ranks' nets and moments are those of one process: within rounding, and to the bit where they hold the same. */
static void compare_values(const outcome *one, const outcome *many, int ranks, const char *what) {
    size_t i, k, from, numbers = moe_net_parameters(&one->net, NULL), moments = one->trainer.config.optimizer == MOE_OPTIMIZER_ADAMW ? 2 : 1;
    int r, is_near = 1, same = 1, parts = 1, moved = 1;
    for (i = 0; i < one->net.n_tensors; i++) {
        const moe_tensor *t = &one->net.tensors[i];
        for (r = 0, from = 0; r < ranks; r++) {
            const moe_tensor *own = &many[r].net.tensors[i];
            const moe_real *base = many[r].net.memory, *first = many[0].net.tensors[i].data;
            if (!is_part(&one->net, &many[r].net, i)) from = 0, same = same && same_bits(own->data, first, own->count * sizeof(moe_real));
            is_near = is_near && all_near(own->data, t->data + from, own->count);
            for (k = 0; k < moments; k++)
                moved = moved && all_near(many[r].trainer.memory + k * moe_net_parameters(&many[r].net, NULL) + (own->data - base),
                                          one->trainer.memory + k * numbers + (t->data - one->net.memory) + from, own->count);
            from += own->count;
        }
        parts = parts && from == t->count;
    }
    CHECK(parts, what);
    CHECK(is_near, what);
    CHECK(moved, what);
    CHECK(same, what);
}

static void compare_steps(const outcome *one, const outcome *many, int ranks, const char *what) {
    int r, step, good = 1, same = 1, norms = 1, router = 1;
    for (r = 0; r < ranks; r++) {
        for (step = 0; step < STEPS; step++) {
            const moe_step *a = &one->steps[step], *b = &many[r].steps[step];
            good = good && near_to((double)b->loss, (double)a->loss);
            router = router && near_to((double)b->router_loss, (double)a->router_loss);
            norms = norms && near_to((double)b->gradient_norm, (double)a->gradient_norm);
            same = same && same_bits(&b->loss, &many[0].steps[step].loss, sizeof b->loss) &&
                   same_bits(&b->gradient_norm, &many[0].steps[step].gradient_norm, sizeof b->gradient_norm) &&
                   same_bits(&b->router_loss, &many[0].steps[step].router_loss, sizeof b->router_loss);
        }
        CHECK(many[r].rng == one->rng, what);
        CHECK(same_bits(&many[r].rate, &one->rate, sizeof one->rate), what);
    }
    CHECK(good, what);
    CHECK(router, what);
    CHECK(norms, what);
    CHECK(same, what);
}

/* ---- files ------------------------------------------------------------------------------------------------------------------------- */

static int same_buffers(const moe_buffer *a, const moe_buffer *b) { return a->size == b->size && same_bits(a->data, b->data, a->size); }

/* A checkpoint that is read by so many ranks and written again. */
typedef struct copying {
    const training *training;
    const moe_buffer *from;
    moe_buffer to, net_to, layer_to;
    outcome outcomes[MOST_RANKS];
} copying;

static void copy(const copying *c, outcome *o, const moe_transport *t, moe_buffer *to) {
    moe_stream stream = moe_buffer_stream(to);
    moe_error error;
    moe_allocator allocator = memory_allocator(&o->memory);
    moe_train_config config = c->training->config;
    int writes = t == NULL || t->rank == 0;
    config.seed = 99; /* what it starts with does not matter */
    moe_net_init(&o->net, has_ids(c->training->kind) ? 0 : D, MOE_KERNELS_C, &allocator);
    o->net.transport = t;
    append(&o->net, c->training->kind);
    if (!STATUS(moe_net_build(&o->net, 1, 4711, &error), MOE_OK, "build", &error)) return;
    if (!STATUS(moe_trainer_init(&o->trainer, &o->net, &config, &error), MOE_OK, "trainer", &error)) return;
    STATUS(moe_trainer_read(&o->trainer, c->from->data, c->from->size, &error), MOE_OK, "checkpoint on other ranks", &error);
    o->trainer.config.seed = c->training->config.seed;
    STATUS(moe_trainer_write(&o->trainer, writes ? &stream : NULL, &error), MOE_OK, "checkpoint again", &error);
}

static void copy_task(ranks_rank *self, void *ctx) {
    copying *c = (copying *)ctx;
    outcome *o = &c->outcomes[self->rank];
    moe_stream stream = moe_buffer_stream(&c->net_to);
    moe_error error;
    moe_net net;
    copy(c, o, begin(o, self), &c->to);
    memset(&net, 0, sizeof net);
    if (!STATUS(moe_net_read_shared(&net, c->from->data, c->from->size, 0, MOE_KERNELS_C, &o->transport, o->net.allocator.resize != NULL ? &o->net.allocator : NULL, &error),
                MOE_OK, "a net of a checkpoint", &error))
        return;
    STATUS(moe_net_write(&net, self->rank == 0 ? &stream : NULL, &error), MOE_OK, "a net's file", &error);
    moe_net_free(&net);
}

/* A file of ranks: the same bytes from any number of ranks that have read it, and from one process. */
static void compare_files(const training *g, const moe_buffer *file) {
    static copying c;
    moe_buffer plain, net_plain;
    moe_stream stream = moe_buffer_stream(&net_plain);
    moe_error error;
    moe_net net;
    int ranks;
    memset(&plain, 0, sizeof plain);
    memset(&net_plain, 0, sizeof net_plain);
    memset(&net, 0, sizeof net);
    memset(&c, 0, sizeof c);
    c.training = g, c.from = file;
    copy(&c, &c.outcomes[0], NULL, &plain);
    CHECK(same_buffers(&plain, file), "one process writes the bytes that ranks have written");
    outcome_free(&c.outcomes[0]);
    STATUS(moe_net_read(&net, file->data, file->size, 0, MOE_KERNELS_C, NULL, &error), MOE_OK, "a net of a checkpoint", &error);
    STATUS(moe_net_write(&net, &stream, &error), MOE_OK, "a net's file", &error);
    moe_net_free(&net);
    for (ranks = 1; ranks <= MOST_RANKS; ranks++) {
        ranks_world w;
        const char *fault;
        int r;
        memset(&c, 0, sizeof c);
        c.training = g, c.from = file;
        ranks_begin(&w, ranks, RANKS_AT_END);
        fault = ranks_run(&w, copy_task, &c);
        if (!CHECK(fault == NULL, "copying a checkpoint")) printf("        %s\n", fault);
        CHECK(same_buffers(&c.to, file), "another number of ranks writes the same bytes");
        CHECK(same_buffers(&c.net_to, &net_plain), "and the same bytes of a net");
        for (r = 0; r < ranks; r++) outcome_free(&c.outcomes[r]);
        ranks_end(&w);
        moe_buffer_free(&c.to), moe_buffer_free(&c.net_to);
    }
    moe_buffer_free(&plain), moe_buffer_free(&net_plain);
}

/* One training on 1 to 4 ranks against one process. */
static void test_training(const training *wanted, const char *what) {
    static outcome one;
    static job j;
    training g = *wanted;
    char name[120];
    int ranks, r;
    memset(&one, 0, sizeof one);
    g.ranks = 0;
    train(&g, &one, 0, NULL);
    for (ranks = 1; ranks <= MOST_RANKS; ranks++) {
        ranks_world w;
        const char *fault;
        sprintf(name, "%s, %s, %d ranks", kind_names[g.kind], what, ranks);
        memset(&j, 0, sizeof j);
        g.ranks = ranks;
        j.training = &g;
        ranks_begin(&w, ranks, ranks % RANKS_MOVING);
        fault = ranks_run(&w, train_task, &j);
        if (!CHECK(fault == NULL, name)) printf("        %s\n", fault);
        compare_steps(&one, j.outcomes, ranks, name);
        compare_values(&one, j.outcomes, ranks, name);
        if (ranks == 3 || (ranks == 2 && wanted->skew)) compare_files(&g, &j.file);
        for (r = 0; r < ranks; r++) outcome_free(&j.outcomes[r]);
        moe_buffer_free(&j.file);
        ranks_end(&w);
    }
    outcome_free(&one);
}

static training training_of(int kind) {
    training g;
    memset(&g, 0, sizeof g);
    g.kind = kind;
    g.config.batch = BATCH;
    g.config.rate = (moe_real)0.01;
    g.config.seed = 3;
    return g;
}

static void test_all_trainings(void) {
    static const moe_param_group groups[] = {{"*.router.*", (moe_real)0.1, 0, 0}, {"0.*", 0, 0, 1}, {"*.experts.*", 1, 2, 0}};
    training g;
    int kind;
    for (kind = 0; kind < KINDS; kind++) {
        g = training_of(kind);
        test_training(&g, "adamw");
        g.skew = 1;
        g.config.optimizer = MOE_OPTIMIZER_SGD;
        g.config.clip = (moe_real)0.5;
        g.config.decay = (moe_real)0.01;
        test_training(&g, "sgd, clipped, ranks without samples");
    }
    g = training_of(CAPACITY);
    g.accumulate = 3;
    g.skew = 1;
    g.config.clip = (moe_real)0.3;
    g.config.total_steps = STEPS, g.config.warmup = 4, g.config.final_rate = (moe_real)0.1;
    g.config.groups = groups, g.config.n_groups = 3;
    test_training(&g, "accumulated, scheduled, in groups");
    g.kind = DENSE;
    g.config.n_groups = 0;
    test_training(&g, "accumulated, scheduled");
}

int main(int argc, char **argv) {
    const char *folder = argc > 1 ? argv[1] : ".";
    int i;
    if (strlen(folder) > 500) return fprintf(stderr, "ranks_nets: the folder's name is too long\n"), 2;
    for (i = 0; i < 2; i++) sprintf(path[i], "%s/ranks_nets-%d.safetensors", folder, i);
    samples_begin();
    test_all_trainings();
    for (i = 0; i < 2; i++) (void)remove(path[i]);
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}
#endif
