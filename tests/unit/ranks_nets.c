/* ranks_nets.c - networks, training and files on several ranks, against the same in one process:
   every rank is a thread (tests/unit/ranks.h).

     cc -std=c99 -O2 -I. tests/unit/ranks_nets.c -o ranks_nets -pthread -lm
     ./ranks_nets [quick] [FOLDER]
     (also with -DMOE_REAL=double)

   What R ranks make of their samples must be what one process makes of all of them, within
   rounding: losses, norms, tensors, moments, files. What all ranks hold must have the same bits on
   all of them, and a file those of the ordinary one. FOLDER, by default the current one, takes
   small files that are removed again. quick: of the calls that fail in turn in a net with experts
   one in five, for patient tools. Without POSIX threads all is skipped. Exit status 1 if a check
   failed. */

#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200112L
#endif
#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#define MOEI_PIECE \
    100 /* numbers of a file that travel at once, and gradients that are summed at once: several pieces here */
#define MOEI_SUM_MOST 150
#endif
#include "../all.h"

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

static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;
#define TEST_LOCK pthread_mutex_lock(&counting)
#define TEST_UNLOCK pthread_mutex_unlock(&counting)
#include "../test.h"

#if MOE_REAL_IS_DOUBLE
#define NEAR 1e-11
#else
#define NEAR 2e-4
#endif

enum { D = 6, CLASSES = 5, IDS = 11, LENGTH = 4, BATCH = 24, SAMPLES = 80, STEPS = 20, MOST_RANKS = 4 };

static char path[2][600]; /* files of this test */

/* Says what came instead. */
#define STATUS(status, wanted, what, error) check_status(status, wanted, what, error, __LINE__)

static int check_status(moe_status status, moe_status wanted, const char *what, const moe_error *error, int line) {
    if (!CHECK_AT(line, status == wanted, what) && test_shown)
        printf("        wanted %d, got %d: %s\n", wanted, status,
               error != NULL && status != MOE_OK ? error->message : moe_status_text(status));
    return status == wanted;
}

static int all_near(const moe_real *a, const moe_real *b, size_t n) {
    size_t i;
    for (i = 0; i < n; i++)
        if (!near_to((double)a[i], (double)b[i], NEAR)) return 0;
    return 1;
}

/* ---- networks and samples ---- */

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
    if (!CHECK(moe_fields_apply(moe_layer_fields(), &c, settings, &error) == MOE_OK, settings))
        printf("        %s\n", error.message);
    return c;
}

static int has_ids(int kind) { return kind == TEXT; }

static int has_sequences(int kind) { return kind == TEXT || kind == SOFT; }

/* The modules of a network. */
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
    if (kind == DENSE) moe_net_dropout(net, 0); /* draws nothing, and skips nothing of other ranks' */
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

static moe_status build(moe_net *net, int kind, const moe_transport *t, const moe_allocator *allocator,
                        moe_error *error) {
    moe_net_init(net, has_ids(kind) ? 0 : D, MOE_KERNELS_C, allocator);
    net->transport = t;
    append(net, kind);
    return moe_net_build(net, 1, 17, error);
}

/* Samples, of every kind. */
typedef struct samples {
    moe_real x[SAMPLES * D], targets[SAMPLES * CLASSES];
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
        for (j = 0; j < CLASSES; j++) the_samples.targets[i * CLASSES + j] = moe_rng_normal(&rng);
        for (j = 0; j < D; j++)
            the_samples.x[i * D + j] = (moe_real)(j == i % CLASSES) + (moe_real)0.5 * moe_rng_normal(&rng);
    }
}

static moe_data data_of(int kind, size_t from, size_t n) {
    moe_data data;
    memset(&data, 0, sizeof data);
    data.n = n;
    data.labels = the_samples.labels + from;
    data.targets = the_samples.targets + from * CLASSES;
    if (has_ids(kind)) data.token_ids = the_samples.ids + from;
    else data.x = the_samples.x + from * D;
    if (has_sequences(kind)) data.length = LENGTH;
    return data;
}

/* ---- one training, in one process or on ranks ---- */

/* What a training is. */
typedef struct course {
    int kind, ranks;
    moe_train_config config;
    int accumulate; /* batches of a step, by moe_trainer_accumulate; 0: moe_trainer_step */
    int skew;       /* 1: in turn one rank has no samples, or all of them */
} course;

/* And what came of it. */
typedef struct outcome {
    moe_step steps[STEPS];
    uint64_t rng;
    moe_real rate;
    moe_net net;
    moe_trainer trainer;
    moe_transport transport;
    moe_traffic traffic;
    uint64_t bytes[MOST_RANKS];
    test_heap memory;
} outcome;

typedef struct job {
    const course *training;
    outcome outcomes[MOST_RANKS];
    moe_buffer file; /* of rank 0 */
} job;

/* The part of a rank in the batch of a step. */
static void part_of(const course *g, int rank, int step, size_t n, size_t *first, size_t *count) {
    size_t unit = has_sequences(g->kind) ? LENGTH : 1;
    int alone = g->skew && step % 3 != 0 ? step % g->ranks : -1;
    moe_rank_part(n / unit, rank, g->ranks, first, count);
    if (alone >= 0 && step % 3 == 1) { /* one has all */
        *first = 0;
        *count = rank == alone ? n / unit : 0;
    }
    if (alone >= 0 && step % 3 == 2) {                                                /* one has none */
        if (g->ranks > 1) moe_rank_part(n / unit, rank > alone ? rank - 1 : rank, g->ranks - 1, first, count);
        if (g->ranks > 1 && rank == alone) *count = 0;
    }
    *first *= unit;
    *count *= unit;
}

static size_t batch_of(int step) { return step % 4 == 3 ? 8 : BATCH; }

static void take_step(const course *g, outcome *o, int rank, int step) {
    int i, batches = g->accumulate > 0 ? g->accumulate : 1;
    moe_status status;
    moe_error error;
    moe_step seen;
    double loss = 0, router_loss = 0;
    memset(&seen, 0, sizeof seen);
    for (i = 0; i < batches; i++) {
        size_t n = batch_of(step + i);
        size_t from = (size_t)(step * 8 + i * 12) % (SAMPLES - BATCH) / LENGTH * LENGTH, first = 0;
        size_t count = n;
        moe_data data;
        if (g->ranks > 0) part_of(g, rank, step + i, n, &first, &count);
        data = data_of(g->kind, from + first, count);
        if (count == 0) {
            data.x = NULL;
            data.labels = NULL;
            data.token_ids = NULL;
        }
        status = g->accumulate > 0 ? moe_trainer_accumulate(&o->trainer, &data, &seen, &error)
                                   : moe_trainer_step(&o->trainer, &data, &seen, &error);
        if (!STATUS(status, MOE_OK, kind_names[g->kind], &error)) return;
        loss += (double)seen.loss;
        router_loss += (double)seen.router_loss;
    }
    if (g->accumulate > 0) STATUS(moe_trainer_update(&o->trainer, &seen, &error), MOE_OK, "update", &error);
    seen.loss = (moe_real)(loss / batches);
    seen.router_loss = (moe_real)(router_loss / batches);
    o->steps[step] = seen;
}

static void train(const course *g, outcome *o, int rank, const moe_transport *t) {
    moe_error error;
    moe_allocator allocator = test_allocator(&o->memory, 0);
    int step;
    if (!STATUS(build(&o->net, g->kind, t, &allocator, &error), MOE_OK, "build", &error)) return;
    if (!STATUS(moe_trainer_init(&o->trainer, &o->net, &g->config, &error), MOE_OK, "trainer", &error)) return;
    for (step = 0; step < STEPS; step++) take_step(g, o, rank, step);
    o->rng = o->trainer.rng.state;
    o->rate = o->trainer.rate;
}

static void outcome_free(outcome *o) {
    moe_trainer_free(&o->trainer);
    moe_net_free(&o->net);
    moe_transport_end(&o->transport);
    CHECK(o->memory.blocks == 0, "all memory is given back");
}

static int local_routing;

/* Two ranks of four share a machine; some compute their experts in two parts. */
static moe_transport *begin(outcome *o, ranks_rank *self) {
    moe_error error;
    o->transport = ranks_transport(self);
    o->transport.local_routing = local_routing;
    o->traffic.bytes = o->bytes;
    o->transport.traffic = &o->traffic;
    o->transport.chunks = 1 + o->transport.n_ranks % 2;
    if (o->transport.n_ranks == 4) {
        o->transport.ranks_per_machine = 2;
        o->transport.two_level = 1;
    }
    STATUS(moe_transport_begin(&o->transport, &error), MOE_OK, "transport", &error);
    return &o->transport;
}

static void train_task(ranks_rank *self, void *ctx) {
    job *j = (job *)ctx;
    outcome *o = &j->outcomes[self->rank];
    moe_stream stream = moe_buffer_stream(&j->file);
    moe_error error;
    uint64_t before, experts = 0;
    size_t i;
    train(j->training, o, self->rank, begin(o, self));
    before = o->bytes[0];
    STATUS(moe_trainer_write(&o->trainer, self->rank == 0 ? &stream : NULL, &error), MOE_OK, "checkpoint of ranks",
           &error);
    for (i = 0; i < o->net.n_tensors; i++)
        if (kind_mixtures[j->training->kind] != NULL && strstr(o->net.tensors[i].name, ".experts.") != NULL)
            experts += o->net.tensors[i].count;
    /* values and moments travel twice: into their checksums, and into the file */
    experts *= 2 * sizeof(moe_real) * (j->training->config.optimizer == MOE_OPTIMIZER_ADAMW ? 3 : 2);
    CHECK(self->rank == 0 || (o->bytes[0] - before >= experts && o->bytes[0] - before < experts + 1000),
          "a file's traffic is counted");
}

/* Which part of a tensor of one process a rank has; 0: all of it. */
static int is_part(const moe_net *all, const moe_net *own, size_t i) {
    return own->tensors[i].count < all->tensors[i].count;
}

/* Whether the ranks' networks and moments are those of one process: within rounding, and to the bit
   where they hold the same. */
static void compare_values(const outcome *one, const outcome *many, int ranks, const char *what) {
    size_t i, k, from, numbers = moe_net_parameter_count(&one->net, NULL);
    size_t moments = one->trainer.config.optimizer == MOE_OPTIMIZER_ADAMW ? 2 : 1;
    int r, is_near = 1, same = 1;
    int parts = 1, moved = 1;
    for (i = 0; i < one->net.n_tensors; i++) {
        const moe_tensor *t = &one->net.tensors[i];
        for (r = 0, from = 0; r < ranks; r++) {
            const moe_tensor *own = &many[r].net.tensors[i];
            const moe_real *base = many[r].net.memory, *first = many[0].net.tensors[i].data;
            if (!is_part(&one->net, &many[r].net, i)) {
                from = 0;
                same = same && same_bits(own->data, first, own->count * sizeof(moe_real));
            }
            is_near = is_near && all_near(own->data, t->data + from, own->count);
            for (k = 0; k < moments; k++)
                moved = moved &&
                        all_near(many[r].trainer.memory + k * moe_net_parameter_count(&many[r].net, NULL) +
                                     (own->data - base),
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
    int r, step, good = 1, same = 1;
    int norms = 1, router = 1;
    for (r = 0; r < ranks; r++) {
        for (step = 0; step < STEPS; step++) {
            const moe_step *a = &one->steps[step], *b = &many[r].steps[step];
            good = good && near_to((double)b->loss, (double)a->loss, NEAR);
            router = router && near_to((double)b->router_loss, (double)a->router_loss, NEAR);
            norms = norms && near_to((double)b->gradient_norm, (double)a->gradient_norm, NEAR);
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

/* ---- files ---- */

static int same_buffers(const moe_buffer *a, const moe_buffer *b) {
    return a->size == b->size && same_bits(a->data, b->data, a->size);
}

/* A checkpoint that is read by so many ranks and written again. */
typedef struct copying {
    const course *training;
    const moe_buffer *from;
    moe_buffer to, net_to, layer_to;
    outcome outcomes[MOST_RANKS];
} copying;

static void copy(const copying *c, outcome *o, const moe_transport *t, moe_buffer *to) {
    moe_stream stream = moe_buffer_stream(to);
    moe_error error;
    moe_allocator allocator = test_allocator(&o->memory, 0);
    moe_train_config config = c->training->config;
    int writes = t == NULL || t->rank == 0;
    config.seed = 99; /* what it starts with does not matter */
    moe_net_init(&o->net, has_ids(c->training->kind) ? 0 : D, MOE_KERNELS_C, &allocator);
    o->net.transport = t;
    append(&o->net, c->training->kind);
    if (!STATUS(moe_net_build(&o->net, 1, 4711, &error), MOE_OK, "build", &error)) return;
    if (!STATUS(moe_trainer_init(&o->trainer, &o->net, &config, &error), MOE_OK, "trainer", &error)) return;
    STATUS(moe_trainer_read(&o->trainer, c->from->data, c->from->size, &error), MOE_OK, "checkpoint on other ranks",
           &error);
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
    if (!STATUS(moe_net_read_part(&net, c->from->data, c->from->size, 0, MOE_KERNELS_C, &o->transport,
                                  o->net.allocator.resize != NULL ? &o->net.allocator : NULL, &error),
                MOE_OK, "a net of a checkpoint", &error))
        return;
    STATUS(moe_net_write(&net, self->rank == 0 ? &stream : NULL, &error), MOE_OK, "a net's file", &error);
    moe_net_free(&net);
}

/* A file of ranks: the same bytes from any number of ranks that have read it, and from one
   process. */
static void compare_files(const course *g, const moe_buffer *file) {
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
    c.training = g;
    c.from = file;
    copy(&c, &c.outcomes[0], NULL, &plain);
    CHECK(same_buffers(&plain, file), "one process writes the bytes that ranks have written");
    outcome_free(&c.outcomes[0]);
    STATUS(moe_net_read(&net, file->data, file->size, 0, MOE_KERNELS_C, NULL, &error), MOE_OK, "a net of a checkpoint",
           &error);
    STATUS(moe_net_write(&net, &stream, &error), MOE_OK, "a net's file", &error);
    moe_net_free(&net);
    for (ranks = 1; ranks <= MOST_RANKS; ranks++) {
        ranks_world w;
        const char *fault;
        int r;
        memset(&c, 0, sizeof c);
        c.training = g;
        c.from = file;
        ranks_begin(&w, ranks, RANKS_AT_END);
        fault = ranks_run(&w, copy_task, &c);
        if (!CHECK(fault == NULL, "copying a checkpoint")) printf("        %s\n", fault);
        CHECK(same_buffers(&c.to, file), "another number of ranks writes the same bytes");
        CHECK(same_buffers(&c.net_to, &net_plain), "and the same bytes of a net");
        for (r = 0; r < ranks; r++) outcome_free(&c.outcomes[r]);
        ranks_end(&w);
        moe_buffer_free(&c.to);
        moe_buffer_free(&c.net_to);
    }
    moe_buffer_free(&plain);
    moe_buffer_free(&net_plain);
}

/* One training on 1 to 4 ranks against one process. */
static void test_training(const course *wanted, const char *what) {
    static outcome one;
    static job j;
    course g = *wanted;
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

/* Local routing: no one process does the same, but they stay together, learn, and have one file. */
static void test_local_routing(const course *wanted) {
    static job j;
    course g = *wanted;
    ranks_world w;
    const char *fault;
    int r, step, same = 1;
    double early, late;
    memset(&j, 0, sizeof j);
    g.ranks = 3;
    j.training = &g;
    local_routing = 1;
    ranks_begin(&w, g.ranks, RANKS_BY_TURNS);
    fault = ranks_run(&w, train_task, &j);
    if (!CHECK(fault == NULL, "local routing")) printf("        %s\n", fault);
    for (r = 0; r < g.ranks; r++) {
        const outcome *o = &j.outcomes[r], *first = &j.outcomes[0];
        size_t i;
        for (step = 0; step < STEPS; step++) {
            const moe_step *a = &first->steps[step], *b = &o->steps[step];
            same = same && same_bits(&a->loss, &b->loss, sizeof a->loss) &&
                   same_bits(&a->router_loss, &b->router_loss, sizeof a->router_loss) &&
                   same_bits(&a->gradient_norm, &b->gradient_norm, sizeof a->gradient_norm);
        }
        for (i = 0; i < o->net.n_tensors; i++)
            same = same && (strstr(o->net.tensors[i].name, ".experts.") != NULL ||
                            same_bits(o->net.tensors[i].data, first->net.tensors[i].data,
                                      o->net.tensors[i].count * sizeof(moe_real)));
        CHECK(o->rng == first->rng, "local routing: the random state");
        for (step = 0, early = late = 0; step < 5; step++) {
            early += (double)o->steps[step].loss;
            late += (double)o->steps[STEPS - 5 + step].loss;
        }
        CHECK(late < 0.97 * early, "local routing: they learn");
    }
    CHECK(same, "local routing: what all ranks hold is the same");
    local_routing = 0;
    compare_files(&g, &j.file);
    for (r = 0; r < g.ranks; r++) outcome_free(&j.outcomes[r]);
    moe_buffer_free(&j.file);
    ranks_end(&w);
}

static course course_of(int kind) {
    course g;
    memset(&g, 0, sizeof g);
    g.kind = kind;
    g.config.batch = BATCH;
    g.config.rate = (moe_real)0.01;
    g.config.seed = 3;
    return g;
}

static void test_all_trainings(void) {
    static const moe_param_group groups[] = {
        {"*.router.*", (moe_real)0.1, 0, 0}, {"0.*", 0, 0, 1}, {"*.experts.*", 1, 2, 0},
        {"experts.*[2:4]", (moe_real)0.5, 0, 0}, {"experts.*[3]", 0, 0, 1}};
    course g;
    int kind;
    for (kind = 0; kind < KINDS; kind++) {
        g = course_of(kind);
        test_training(&g, "adamw");
        g.skew = 1;
        g.config.optimizer = MOE_OPTIMIZER_SGD;
        g.config.clip = (moe_real)0.5;
        g.config.decay = (moe_real)0.01;
        test_training(&g, "sgd, clipped, ranks without samples");
        if (kind == CAPACITY || kind == CLUSTERS) {
            g = course_of(kind);
            test_local_routing(&g);
        }
    }
    g = course_of(CAPACITY);
    g.accumulate = 3;
    g.skew = 1;
    g.config.clip = (moe_real)0.3;
    g.config.total_steps = STEPS;
    g.config.warmup = 4;
    g.config.final_rate = (moe_real)0.1;
    g.config.groups = groups;
    g.config.n_groups = 5;
    test_training(&g, "accumulated, scheduled, in groups");
    g.kind = DENSE;
    g.config.n_groups = 0;
    test_training(&g, "accumulated, scheduled");
}

/* ---- moe_fit and moe_evaluate ---- */

enum { MOST_PROGRESS = 80 };

/* What progress told, and when it stops training. */
typedef struct watching {
    moe_progress seen[MOST_PROGRESS];
    size_t n;
    uint64_t stop_at; /* total_step; 0: never */
} watching;

typedef struct fitted {
    outcome o;
    watching w;
    moe_evaluation evaluation;
    moe_buffer file;
    moe_status status;
} fitted;

typedef struct fitting {
    int kind, ranks, stop_rank;
    uint64_t stop_at;
    size_t n;
    moe_train_config config;
    fitted results[MOST_RANKS];
} fitting;

static int watch(void *ctx, const moe_progress *p) {
    watching *w = (watching *)ctx;
    if (w->n < MOST_PROGRESS) w->seen[w->n++] = *p;
    return w->stop_at > 0 && p->total_step == w->stop_at;
}

static void fit(const fitting *f, fitted *r, int rank, const moe_transport *t) {
    moe_train_config config = f->config;
    moe_data train = data_of(f->kind, 0, f->n), test = data_of(f->kind, 8, SAMPLES - 12);
    moe_allocator allocator = test_allocator(&r->o.memory, 0);
    moe_stream stream = moe_buffer_stream(&r->file);
    moe_error error;
    r->w.stop_at = rank == f->stop_rank ? f->stop_at : 0;
    if (f->kind == NOISY) config.criterion = MOE_CRITERION_SQUARED_ERROR;
    config.progress = watch;
    config.progress_ctx = &r->w;
    if (!STATUS(build(&r->o.net, f->kind, t, &allocator, &error), MOE_OK, "build", &error)) return;
    r->status = moe_fit(&r->o.net, &train, &test, &config, &error);
    STATUS(r->status, f->stop_at > 0 ? MOE_ERR_STOPPED : MOE_OK, "fit", &error);
    STATUS(moe_evaluate(&r->o.net, &test, config.criterion, &r->evaluation, &error), MOE_OK, "evaluate", &error);
    STATUS(moe_net_write(&r->o.net, rank == 0 ? &stream : NULL, &error), MOE_OK, "write", &error);
}

static void fit_task(ranks_rank *self, void *ctx) {
    fitting *f = (fitting *)ctx;
    fitted *r = &f->results[self->rank];
    fit(f, r, self->rank, begin(&r->o, self));
}

static void fitted_free(fitted *r) {
    outcome_free(&r->o);
    moe_buffer_free(&r->file);
}

/* Runs it on f->ranks ranks, 0: in one process. */
static void run_fit(fitting *f, const char *what) {
    ranks_world w;
    const char *fault;
    memset(f->results, 0, sizeof f->results);
    if (f->ranks == 0) {
        fit(f, &f->results[0], 0, NULL);
        return;
    }
    ranks_begin(&w, f->ranks, RANKS_BY_TURNS);
    fault = ranks_run(&w, fit_task, f);
    if (!CHECK(fault == NULL, what)) printf("        %s\n", fault);
    ranks_end(&w);
}

static void free_fit(fitting *f) {
    int r;
    for (r = 0; r < (f->ranks > 0 ? f->ranks : 1); r++) fitted_free(&f->results[r]);
}

static int same_progress(const moe_progress *a, const moe_progress *b) {
    return a->epoch == b->epoch && a->epochs == b->epochs && a->step == b->step && a->steps == b->steps &&
           near_to((double)a->loss, (double)b->loss, NEAR) &&
           near_to((double)a->router_loss, (double)b->router_loss, NEAR) &&
           near_to((double)a->gradient_norm, (double)b->gradient_norm, NEAR) && a->epoch_ended == b->epoch_ended &&
           a->test.n == b->test.n && near_to((double)a->test.loss, (double)b->test.loss, NEAR) &&
           fabs((double)a->test.accuracy - (double)b->test.accuracy) < 0.03 &&
           same_bits(&a->rate, &b->rate, sizeof a->rate) && a->total_step == b->total_step &&
           a->total_steps == b->total_steps && a->samples == b->samples;
}

static void compare_fits(const fitting *one, const fitting *many, const char *what) {
    size_t i;
    int r, good = 1, same = 1;
    for (r = 0; r < many->ranks; r++) {
        const fitted *a = &one->results[0], *b = &many->results[r];
        good = good && a->w.n == b->w.n && a->w.n > 4;
        for (i = 0; i < a->w.n && i < b->w.n; i++) good = good && same_progress(&a->w.seen[i], &b->w.seen[i]);
        same = same && same_bits(&b->evaluation, &many->results[0].evaluation, sizeof b->evaluation);
        CHECK(b->evaluation.n == a->evaluation.n &&
                  near_to((double)b->evaluation.loss, (double)a->evaluation.loss, NEAR),
              what);
    }
    CHECK(good, what);
    CHECK(same, what);
}

/* Whether two networks' files have the same names and nearly the same values. */
static void compare_near(const moe_buffer *a, const moe_buffer *b, const char *what) {
    moe_file one, other;
    moe_file_tensor t, u;
    moe_real x[64], y[64];
    size_t at, n;
    int good = moe_file_open(&one, a->data, a->size, NULL) == MOE_OK &&
               moe_file_open(&other, b->data, b->size, NULL) == MOE_OK;
    if (!CHECK(good, what)) return;
    while (moe_file_next(&one, &t) == MOE_OK) {
        good = good && moe_file_next(&other, &u) == MOE_OK && t.count == u.count;
        for (at = 0; at < t.count && good; at += n) {
            n = t.count - at < 64 ? t.count - at : 64;
            good = moe_file_values(&t, at, n, x, NULL) == MOE_OK && moe_file_values(&u, at, n, y, NULL) == MOE_OK &&
                   all_near(y, x, n);
        }
    }
    CHECK(good, what);
}

static fitting fitting_of(int kind) {
    fitting f;
    memset(&f, 0, sizeof f);
    f.kind = kind;
    f.n = has_sequences(kind) ? 76 : 77;
    f.stop_rank = -1;
    f.config.batch = 12;
    f.config.epochs = 3;
    f.config.rate = (moe_real)0.01;
    f.config.accumulate = 2;
    f.config.clip = 1;
    f.config.final_rate = (moe_real)0.2;
    f.config.warmup = 3;
    f.config.seed = 8;
    f.config.evaluate_every = 3;
    return f;
}

static void test_fit(int kind) {
    static fitting one, many, rest;
    int ranks;
    one = fitting_of(kind);
    run_fit(&one, kind_names[kind]);
    for (ranks = 1; ranks <= MOST_RANKS; ranks++) {
        many = fitting_of(kind);
        many.ranks = ranks;
        run_fit(&many, kind_names[kind]);
        compare_fits(&one, &many, kind_names[kind]);
        compare_near(&one.results[0].file, &many.results[0].file, kind_names[kind]);
        rest = fitting_of(kind); /* stopped by its last rank, then resumed by as many */
        rest.ranks = ranks;
        rest.config.checkpoint = path[0];
        rest.config.checkpoint_every = 2;
        rest.config.resume = 1;
        rest.stop_rank = ranks - 1;
        rest.stop_at = 5;
        (void)remove(path[0]);
        run_fit(&rest, "stopped");
        free_fit(&rest);
        rest.stop_at = 0;
        run_fit(&rest, "resumed");
        CHECK(same_buffers(&rest.results[0].file, &many.results[0].file),
              "resumed training has the bits of training that was not stopped");
        free_fit(&rest);
        rest.ranks = ranks % MOST_RANKS + 1; /* stopped, and resumed by others */
        rest.stop_rank = 0;
        rest.stop_at = 7;
        (void)remove(path[0]);
        run_fit(&rest, "stopped");
        free_fit(&rest);
        rest.ranks = ranks == 3 ? 0 : ranks;
        rest.stop_at = 0;
        run_fit(&rest, "resumed by others");
        compare_near(&rest.results[0].file, &one.results[0].file, "resumed by another number of ranks");
        free_fit(&rest);
        free_fit(&many);
    }
    free_fit(&one);
}

/* ---- what goes wrong on one rank ---- */

/* A scene that all ranks play; on rank `bad` (-1: none) something is wrong. */
typedef struct scene {
    int kind, bad, which, ranks;
    long fail_at;        /* allocation that fails there */
    unsigned long break_at; /* call of the transport that fails there */
    int done;            /* 1: it came to its end, on rank 0 */
    long calls;          /* allocations of the bad rank */
    const char *file;
} scene;

typedef struct actor {
    scene *s;
    ranks_rank *self;
    outcome o;
    moe_error error;
    int bad;
} actor;

/* The status of the bad rank, and that of the others: MOE_ERR_PEER with an error that names the
   rank. */
#define ONE_FAILS(a, call, wanted) one_fails(a, call, wanted, #call, __LINE__)

static int names_rank(const actor *a) {
    char text[20];
    sprintf(text, "rank %d: ", a->s->bad);
    return strstr(a->error.message, text) != NULL;
}

static void one_fails(actor *a, moe_status status, moe_status wanted, const char *what, int line) {
    moe_status other = a->s->bad < 0 ? MOE_OK : MOE_ERR_PEER;
    check_status(status, a->bad ? wanted : other, what, &a->error, line);
    if (status == MOE_ERR_PEER && !CHECK_AT(line, names_rank(a), what)) printf("        %s\n", a->error.message);
}

/* The same on all ranks: error says `part`. */
#define ALL_FAIL(a, call, wanted, part) all_fail(a, call, wanted, part, #call, __LINE__)

static void all_fail(actor *a, moe_status status, moe_status wanted, const char *part, const char *what, int line) {
    check_status(status, wanted, what, &a->error, line);
    if (status != MOE_OK && !CHECK_AT(line, strstr(a->error.message, part) != NULL, part))
        printf("        %s\n", a->error.message);
}

typedef void (*play_fn)(actor *a);

static play_fn the_play;

static void play_task(ranks_rank *self, void *ctx) {
    static actor actors[MOST_RANKS];
    actor *a = &actors[self->rank];
    memset(a, 0, sizeof *a);
    a->s = (scene *)ctx;
    a->self = self;
    a->bad = self->rank == a->s->bad;
    a->error.message[0] = '\0';
    the_play(a);
    outcome_free(&a->o);
}

static void play(play_fn what, scene *s, const char *name) {
    ranks_world w;
    const char *fault;
    if (s->ranks == 0) s->ranks = 3;
    ranks_begin(&w, s->ranks, RANKS_AT_END);
    if (s->break_at > 0) w.ranks[s->bad].fail_at = s->break_at;
    the_play = what;
    fault = ranks_run(&w, play_task, s);
    if (s->break_at == 0 && !CHECK(fault == NULL, name)) printf("        %s: %s\n", name, fault);
    ranks_end(&w);
}

static scene scene_of(int kind, int bad, int which) {
    scene s;
    memset(&s, 0, sizeof s);
    s.kind = kind;
    s.bad = bad;
    s.which = which;
    return s;
}

/* Makes the rank's net and trainer, with memory that can be told to fail later on. */
static int act_begin(actor *a, int with_trainer) {
    moe_allocator allocator = test_allocator(&a->o.memory, 0);
    moe_train_config config = course_of(a->s->kind).config;
    if (!STATUS(build(&a->o.net, a->s->kind, begin(&a->o, a->self), &allocator, &a->error), MOE_OK, "build", &a->error))
        return 0;
    return !with_trainer ||
           STATUS(moe_trainer_init(&a->o.trainer, &a->o.net, &config, &a->error), MOE_OK, "trainer", &a->error);
}

/* The own samples of a batch of 12. */
static moe_data act_data(const actor *a) {
    size_t first, count;
    moe_rank_part(12 / LENGTH, a->self->rank, a->s->ranks, &first, &count);
    return data_of(a->s->kind, first * LENGTH, count * LENGTH);
}

/* All ranks take a good step; their losses are alike. */
static void act_go_on(actor *a) {
    moe_data data = act_data(a);
    STATUS(moe_trainer_step(&a->o.trainer, &data, NULL, &a->error), MOE_OK, "the ranks go on", &a->error);
}

/* -- building */

static void act_build(actor *a) {
    static const struct {
        const char *setting, *part;
    } other[] = {{"n_experts=6 top_k=2 d_ff=7", "n_experts = "},
                 {"n_experts=5 top_k=2 d_ff=7 loss_z=0.5", "loss_z = "},
                 {"n_experts=5 top_k=2 d_ff=8", "d_ff = "}};
    moe_layer_config config = layer_of("n_experts=5 top_k=2 d_ff=7");
    moe_net *net = &a->o.net;
    moe_transport *t = begin(&a->o, a->self);
    char rank[20];
    int i, which, bad = a->bad;
    for (i = 0; i < 3; i++) {
        moe_layer_config mine = bad ? layer_of(other[i].setting) : config;
        moe_net_init(net, D, MOE_KERNELS_C, NULL);
        net->transport = t;
        moe_net_linear(net, 8);
        moe_net_mixture(net, &mine);
        ALL_FAIL(a, moe_net_build(net, 1, 1, &a->error), MOE_ERR_CONFIG, other[i].part);
        CHECK(strstr(a->error.message, "module 1 (mixture): ") == a->error.message, "the error names the module");
        sprintf(rank, "rank %d", !bad ? a->s->bad : a->s->bad == 0 ? 1 : 0);
        CHECK(strstr(a->error.message, rank) != NULL, "the error names the rank");
        CHECK(!net->built && net->tensors == NULL && net->memory == NULL, "nothing was built");
        moe_net_free(net);
    }
    for (which = 0; which < 7; which++) {
        static const char *const parts[] = {
            "d_in: ", "the number of modules: ", "seed: ", "trainable: ", "the kind of module: ", "the width: ",
            "span = "};
        moe_net_init(net, bad && which == 0 ? D + 1 : D, MOE_KERNELS_C, NULL);
        net->transport = t;
        moe_net_linear(net, 8);
        moe_net_linear(net, bad && which == 5 ? 7 : 8);
        if (bad && which == 4) moe_net_rms_norm(net);
        else moe_net_layer_norm(net);
        if (which == 6) moe_net_residual(net, bad ? 2 : 1);
        if (bad && which == 1) moe_net_linear(net, 8);
        ALL_FAIL(a, moe_net_build(net, !(bad && which == 3), bad && which == 2 ? 2 : 1, &a->error), MOE_ERR_CONFIG,
                 parts[which]);
        moe_net_free(net);
    }
    for (which = 0; which < 2; which++) { /* a call before build failed; it is built already */
        moe_net_init(net, D, MOE_KERNELS_C, NULL);
        net->transport = t;
        moe_net_linear(net, bad && which == 0 ? 0 : 8);
        moe_net_mixture(net, &config);
        if (which == 0) ONE_FAILS(a, moe_net_build(net, 1, 1, &a->error), MOE_ERR_CONFIG);
        if (which == 0) moe_net_free(net);
    }
    STATUS(moe_net_build(net, 1, 1, &a->error), MOE_OK, "build", &a->error);
    ALL_FAIL(a, moe_net_build(net, 1, 1, &a->error), MOE_ERR_STATE, "already built");
}

static void act_build_alone(actor *a) { /* no word is said to others */
    moe_layer_config config = layer_of("n_experts=5 top_k=2 d_ff=7");
    moe_transport fresh = ranks_transport(a->self), *t = begin(&a->o, a->self);
    moe_net *net = &a->o.net;
    moe_net_init(net, D, MOE_KERNELS_C, NULL);
    config.transport = t;
    ALL_FAIL(a, (moe_net_mixture(net, &config), moe_net_build(net, 0, 1, &a->error)), MOE_ERR_CONFIG,
             "transport is not the network's");
    moe_net_free(net);
    moe_net_init(net, D, MOE_KERNELS_C, NULL);
    config.transport = NULL;
    moe_net_mixture(net, &config);
    net->transport = t;
    ALL_FAIL(a, moe_net_build(net, 0, 1, &a->error), MOE_ERR_CONFIG,
             "module 0 (mixture): its transport is not the network's");
    moe_net_free(net);
    moe_net_init(net, D, MOE_KERNELS_C, NULL);
    net->transport = &fresh;
    moe_net_linear(net, 8);
    ALL_FAIL(a, moe_net_build(net, 0, 1, &a->error), MOE_ERR_CONFIG, "moe_transport_begin");
}

/* Fails the n-th allocation of one rank, for all n, until all goes well. */
static long between = 1; /* from one call that fails to the next */

static void fail_memory(play_fn what, scene s, const char *name) {
    long n;
    for (n = 1; n < 200; n += between) {
        s.fail_at = n;
        s.done = 0;
        (void)remove(path[0]);
        play(what, &s, name);
        if (s.done) break;
    }
    CHECK(s.done && n > 1, name);
}

/* Whether a call has succeeded; if not its status is what a failed allocation of the bad rank
   gives. (A buffer that cannot double may still grow.) */
static int memory_failed(actor *a, moe_status status, const char *what) {
    int hit = a->o.memory.fail_at > 0 && a->o.memory.calls >= a->o.memory.fail_at;
    if (status == MOE_OK) return 1;
    check_status(status, hit ? MOE_ERR_MEMORY : MOE_ERR_PEER, what, &a->error, __LINE__);
    return 0;
}

/* The last call has succeeded, and nothing was left that could fail. */
static void memory_done(actor *a) {
    if (a->bad && a->o.memory.calls < a->o.memory.fail_at) a->s->done = 1;
}

static void act_build_memory(actor *a) {
    moe_allocator allocator = test_allocator(&a->o.memory, 0);
    moe_transport *t = begin(&a->o, a->self);
    moe_status status;
    moe_net_init(&a->o.net, has_ids(a->s->kind) ? 0 : D, MOE_KERNELS_C, &allocator);
    a->o.net.transport = t;
    append(&a->o.net, a->s->kind);
    a->o.memory.calls = 0;
    a->o.memory.fail_at = a->bad ? a->s->fail_at : 0;
    status = moe_net_build(&a->o.net, 1, 17, &a->error);
    if (memory_failed(a, status, "build")) memory_done(a);
    if (status == MOE_OK) return;
    CHECK(!a->o.net.built && a->o.net.memory == NULL, "a failed build leaves nothing");
    a->o.memory.fail_at = 0;
    STATUS(moe_net_build(&a->o.net, 1, 17, &a->error), MOE_OK, "build after a failure", &a->error);
}

static void act_trainer_memory(actor *a) {
    moe_train_config config = course_of(a->s->kind).config;
    moe_status status;
    if (!act_begin(a, 0)) return;
    a->o.memory.calls = 0;
    a->o.memory.fail_at = a->bad ? a->s->fail_at : 0;
    status = moe_trainer_init(&a->o.trainer, &a->o.net, &config, &a->error);
    if (memory_failed(a, status, "trainer")) memory_done(a);
    CHECK((status == MOE_OK) == (a->o.trainer.net != NULL), "a failed init leaves the trainer");
}

static void act_fit_memory(actor *a) {
    moe_train_config config = course_of(a->s->kind).config;
    moe_data data = data_of(a->s->kind, 0, 24);
    moe_evaluation evaluation;
    moe_status status;
    if (!act_begin(a, 0)) return;
    config.epochs = 1;
    config.batch = 12;
    config.checkpoint = path[0];
    config.resume = 1;
    STATUS(moe_fit(&a->o.net, &data, &data, &config, &a->error), MOE_OK, "fit", &a->error);
    config.epochs = 2;
    a->o.memory.calls = 0;
    a->o.memory.fail_at = a->bad ? a->s->fail_at : 0;
    status = moe_fit(&a->o.net, &data, &data, &config, &a->error);
    if (!memory_failed(a, status, "fit")) return;
    status = moe_evaluate(&a->o.net, &data, MOE_CRITERION_CROSS_ENTROPY, &evaluation, &a->error);
    if (memory_failed(a, status, "evaluate")) memory_done(a);
}

static void act_file_memory(actor *a) {
    moe_buffer file;
    moe_stream stream = moe_buffer_stream(&file);
    moe_allocator allocator;
    moe_net net;
    moe_status status;
    memset(&file, 0, sizeof file);
    memset(&net, 0, sizeof net);
    if (!act_begin(a, 1)) return;
    allocator = a->o.net.allocator;
    file.allocator = allocator;
    a->o.memory.calls = 0;
    a->o.memory.fail_at = a->bad ? a->s->fail_at : 0;
    status = moe_trainer_save(&a->o.trainer, path[0], &a->error);
    if (memory_failed(a, status, "save")) {
        status = moe_trainer_load(&a->o.trainer, path[0], &a->error);
        if (memory_failed(a, status, "load")) {
            status = moe_net_load_part(&net, path[0], 1, MOE_KERNELS_C, &a->o.transport, &allocator, &a->error);
            if (memory_failed(a, status, "net")) {
                status = moe_net_write(&net, a->self->rank == 0 ? &stream : NULL, &a->error);
                if (memory_failed(a, status, "write")) memory_done(a);
            }
        }
    }
    moe_net_free(&net);
    moe_buffer_free(&file);
}

/* -- course */

static void act_broken_steps(actor *a, moe_step *step, int bad) {
    moe_data data;
    size_t i;
    int which;
    data = data_of(a->s->kind, 0, 0);
    ALL_FAIL(a, moe_trainer_step(&a->o.trainer, &data, step, &a->error), MOE_ERR_ARGUMENT, "at least one rank");
    act_go_on(a);
    for (which = 0; which < 4; which++) { /* a rank that is out of step */
        moe_trainer before = a->o.trainer;
        unsigned flags = a->o.net.tensors[0].flags;
        if (bad && which == 0) a->o.trainer.rate *= 2;
        if (bad && which == 1) a->o.trainer.steps++;
        if (bad && which == 2) a->o.trainer.rng.state++;
        if (bad && which == 3) a->o.net.tensors[0].flags |= MOE_PARAM_FROZEN;
        data = act_data(a);
        ALL_FAIL(a, moe_trainer_step(&a->o.trainer, &data, step, &a->error), MOE_ERR_STATE, "out of step");
        a->o.trainer = before;
        a->o.net.tensors[0].flags = flags;
    }
    act_go_on(a);
    data = act_data(a);
    ALL_FAIL(a, moe_trainer_update(&a->o.trainer, step, &a->error), MOE_ERR_STATE, "no batch");
    STATUS(moe_trainer_accumulate(&a->o.trainer, &data, step, &a->error), MOE_OK, "accumulate", &a->error);
    if (bad) a->o.trainer.rate = (moe_real)NAN;
    ONE_FAILS(a, moe_trainer_update(&a->o.trainer, step, &a->error), MOE_ERR_ARGUMENT);
    CHECK(a->o.trainer.n_accumulated == 1, "a refused update keeps the batch");
    a->o.trainer.rate = a->o.trainer.config.rate;
    {
        moe_stream none;
        memset(&none, 0, sizeof none);
        ALL_FAIL(a, moe_trainer_write(&a->o.trainer, &none, &a->error), MOE_ERR_STATE, "accumulated");
        ALL_FAIL(a, moe_trainer_save(&a->o.trainer, path[0], &a->error), MOE_ERR_STATE, "accumulated");
    }
    if (bad) a->o.trainer.rate *= 2;
    ALL_FAIL(a, moe_trainer_update(&a->o.trainer, step, &a->error), MOE_ERR_STATE, "out of step");
    a->o.trainer.rate = a->o.trainer.config.rate;
    STATUS(moe_trainer_update(&a->o.trainer, step, &a->error), MOE_OK, "update", &a->error);
    /* a gradient that is not finite on one rank: the batches are lost on all */
    STATUS(moe_trainer_accumulate(&a->o.trainer, &data, step, &a->error), MOE_OK, "accumulate", &a->error);
    if (bad) a->o.net.tensors[0].gradient[0] = (moe_real)INFINITY;
    ONE_FAILS(a, moe_trainer_accumulate(&a->o.trainer, &data, step, &a->error), MOE_ERR_NONFINITE);
    CHECK(a->o.trainer.n_accumulated == 0, "the batches are lost");
    STATUS(moe_trainer_accumulate(&a->o.trainer, &data, step, &a->error), MOE_OK, "accumulate", &a->error);
    if (bad) a->o.net.tensors[0].gradient[0] = (moe_real)INFINITY;
    ALL_FAIL(a, moe_trainer_update(&a->o.trainer, step, &a->error), MOE_ERR_NONFINITE, "not finite");
    CHECK(a->o.trainer.n_accumulated == 0, "the batches are lost");
    /* a broken weight that only one rank has */
    for (i = 0; i < a->o.net.n_tensors; i++)
        if (strstr(a->o.net.tensors[i].name, ".experts.") != NULL && bad) a->o.net.tensors[i].data[0] = (moe_real)NAN;
    if (kind_mixtures[a->s->kind] != NULL)
        CHECK(moe_trainer_step(&a->o.trainer, &data, step, &a->error) != MOE_OK, "a broken expert stops all ranks");
}

static void act_trainer(actor *a) {
    static const moe_param_group groups[] = {{"*.weight", 2, 0, 0}, {"*.bias", 2, 0, 0}, {"*.weight", 3, 0, 0}};
    static const char *const parts[] = {
        "rate = ",   "training: seed: ", "checkpoint", "groups[0]: the pattern: ", "groups[0]: rate = ",
        "epochs = ", "n_groups = "};
    moe_train_config config;
    moe_data data;
    moe_step step;
    int which, bad = a->bad;
    if (!act_begin(a, 0)) return;
    for (which = 0; which < 7; which++) {
        memset(&config, 0, sizeof config);
        config.groups = groups + (bad && which == 3 ? 1 : bad && which == 4 ? 2 : 0);
        config.n_groups = bad && which == 6 ? 2 : 1;
        if (bad && which == 0) config.rate = (moe_real)0.5;
        if (bad && which == 1) config.seed = 9;
        if (bad && which == 2) config.checkpoint = "x";
        if (bad && which == 5) config.epochs = 3;
        ALL_FAIL(a, moe_trainer_init(&a->o.trainer, &a->o.net, &config, &a->error), MOE_ERR_CONFIG, parts[which]);
        CHECK(a->o.trainer.net == NULL, "a failed init leaves the trainer");
    }
    memset(&config, 0, sizeof config);
    config.rate = bad ? -1 : 1;
    ONE_FAILS(a, moe_trainer_init(&a->o.trainer, &a->o.net, &config, &a->error), MOE_ERR_CONFIG);
    ONE_FAILS(a, moe_trainer_init(bad ? NULL : &a->o.trainer, &a->o.net, NULL, &a->error), MOE_ERR_ARGUMENT);
    memset(&config, 0, sizeof config);
    config.batch = 12;
    STATUS(moe_trainer_init(&a->o.trainer, &a->o.net, &config, &a->error), MOE_OK, "trainer", &a->error);
    for (which = 0; which < 6; which++) { /* samples that are refused change nothing */
        moe_real x[12 * D];
        int32_t labels[12];
        uint64_t rng = a->o.trainer.rng.state;
        data = act_data(a);
        memcpy(x, data.x, data.n * D * sizeof *x);
        memcpy(labels, data.labels, data.n * sizeof *labels);
        data.x = x;
        data.labels = labels;
        if (bad && which == 0) labels[0] = CLASSES;
        if (bad && which == 1) x[1] = (moe_real)INFINITY;
        if (bad && which == 2) data.n = 13;
        if (bad && which == 3) data.x = NULL;
        if (bad && which == 4) a->o.trainer.rate = (moe_real)NAN;
        if (bad && which == 5) ONE_FAILS(a, moe_trainer_step(&a->o.trainer, NULL, &step, &a->error), MOE_ERR_ARGUMENT);
        else
            ONE_FAILS(a, moe_trainer_step(&a->o.trainer, &data, &step, &a->error),
                      which == 1 ? MOE_ERR_NONFINITE : MOE_ERR_ARGUMENT);
        CHECK(a->o.trainer.rng.state == rng && a->o.trainer.steps == 0 && a->o.trainer.n_accumulated == 0,
              "nothing has changed");
        a->o.trainer.rate = a->o.trainer.config.rate;
    }
    if (a->s->kind == CHOICE) { /* its router meets infinity on one rank */
        moe_real kept = a->o.net.tensors[0].data[0];
        data = act_data(a);
        if (bad) a->o.net.tensors[0].data[0] = (moe_real)INFINITY;
        ONE_FAILS(a, moe_trainer_step(&a->o.trainer, &data, &step, &a->error), MOE_ERR_NONFINITE);
        a->o.net.tensors[0].data[0] = kept;
    }
    act_broken_steps(a, &step, bad);
}

static void act_fit(actor *a) {
    static const char *const parts[] = {"the samples to train on: n: ", "the samples to train on: x: ",
                                        "the samples to train on: labels: ", "samples to test on",
                                        "is missing on 2 of 3"};
    moe_train_config config = course_of(a->s->kind).config;
    moe_data data, other;
    moe_evaluation evaluation;
    moe_real x[24 * D];
    int32_t labels[24];
    int which, bad = a->bad;
    if (!act_begin(a, 0)) return;
    config.epochs = 1;
    config.batch = 12;
    for (which = 0; which < 5; which++) {
        data = other = data_of(a->s->kind, 0, 24);
        memcpy(x, data.x, sizeof x);
        memcpy(labels, data.labels, sizeof labels);
        data.x = x;
        data.labels = labels;
        if (bad && which == 0) data.n = 20;
        if (bad && which == 1) x[3] += 1;
        if (bad && which == 2) labels[3] = (labels[3] + 1) % CLASSES;
        if (which == 4) {
            config.checkpoint = bad ? a->s->file : "/nowhere/at/all";
            config.resume = 1;
        }
        ALL_FAIL(a, moe_fit(&a->o.net, &data, which == 3 && bad ? &other : NULL, &config, &a->error), MOE_ERR_CONFIG,
                 parts[which]);
        if (which < 3)
            ALL_FAIL(a, moe_evaluate(&a->o.net, &data, MOE_CRITERION_CROSS_ENTROPY, &evaluation, &a->error),
                     MOE_ERR_CONFIG, "the samples: ");
    }
    config.checkpoint = NULL;
    config.resume = 0;
    data = data_of(a->s->kind, 0, 24);
    ONE_FAILS(a, moe_fit(&a->o.net, bad ? NULL : &data, NULL, &config, &a->error), MOE_ERR_ARGUMENT);
    ONE_FAILS(a, moe_evaluate(&a->o.net, &data, MOE_CRITERION_CROSS_ENTROPY, bad ? NULL : &evaluation, &a->error),
              MOE_ERR_ARGUMENT);
    ONE_FAILS(a, moe_evaluate(&a->o.net, bad ? NULL : &data, MOE_CRITERION_CROSS_ENTROPY, &evaluation, &a->error),
              MOE_ERR_ARGUMENT);
    ALL_FAIL(a, moe_fit(&a->o.net, &data, NULL, (config.criterion = MOE_CRITERION_EXPECTATION, &config), &a->error),
             MOE_ERR_UNSUPPORTED, "net.transport");
    data.n = 3; /* without a label is none of these */
    ALL_FAIL(a, moe_evaluate(&a->o.net, &data, MOE_CRITERION_JACOBS, &evaluation, &a->error), MOE_ERR_UNSUPPORTED,
             "net.transport");
    config.criterion = MOE_CRITERION_CROSS_ENTROPY;
    data.n = 0;
    STATUS(moe_evaluate(&a->o.net, &data, MOE_CRITERION_CROSS_ENTROPY, &evaluation, &a->error), MOE_OK, "no samples",
           &a->error);
    CHECK(evaluation.n == 0, "no samples");
    data = data_of(a->s->kind, 0, 24);
    /* the last bias: this rank's outputs alone */
    if (bad) a->o.net.tensors[a->o.net.n_tensors - 1].data[0] = (moe_real)INFINITY;
    ONE_FAILS(a, moe_evaluate(&a->o.net, &data, MOE_CRITERION_CROSS_ENTROPY, &evaluation, &a->error),
              MOE_ERR_NONFINITE);
}

/* -- forward passes */

#define FORWARD(c, w, s, p) moe_net_forward(&a->o.net, c, w, s, p)
#define FAILS(call, wanted) (forget_error(a), ONE_FAILS(a, call, wanted))

/* What an error holds before the call that fills it in. */
static void forget_error(actor *a) {
    memset(&a->error, 'x', sizeof a->error);
    a->error.message[sizeof a->error.message - 1] = '\0';
}

static void act_other_calls(actor *a, moe_data *data, moe_call *call, moe_net_pass *pass, moe_rng *rng, void *work,
                            size_t size, int bad) {
    moe_call other;
    moe_batch batch;
    moe_rng ahead = {4};
    memset(&batch, 0, sizeof batch);
    other = *call;
    other.batch = &batch;
    batch.total = data->n;
    FAILS(FORWARD(bad ? &other : call, work, size, pass), MOE_ERR_ARGUMENT);
    other = *call;
    other.rng = bad ? NULL : rng;
    FAILS(FORWARD(&other, work, size, pass), MOE_ERR_ARGUMENT);
    other = *call;
    other.rng = bad ? &ahead : rng;
    ALL_FAIL(a, FORWARD(&other, work, size, pass), MOE_ERR_STATE, "call.rng");
    other = *call;
    other.training = !bad;
    ALL_FAIL(a, FORWARD(&other, work, size, pass), MOE_ERR_STATE, "call.training");
    CHECK(rng->state == 3 && ahead.state == 4, "nothing was drawn");
}

static void act_forward(actor *a) {
    moe_data data;
    moe_call call, other;
    moe_net_pass pass;
    moe_rng rng = {3};
    moe_real dy[24 * CLASSES], x[12 * D];
    void *work;
    size_t size, most = 4;
    int bad = a->bad;
    if (!act_begin(a, 0)) return;
    memset(dy, 0, sizeof dy);
    memset(&call, 0, sizeof call);
    data = act_data(a);
    STATUS(moe_net_work_size(&a->o.net, most, 1, &size), MOE_OK, "size", NULL);
    work = grab(size, 1);
    call.n_tokens = data.n;
    call.x = data.x;
    call.training = 1;
    call.rng = &rng;
    call.error = &a->error;
    FAILS(FORWARD(bad ? NULL : &call, work, size, &pass), MOE_ERR_ARGUMENT);
    FAILS(FORWARD(&call, bad ? NULL : work, size, &pass), MOE_ERR_ARGUMENT);
    FAILS(FORWARD(&call, work, size, bad ? NULL : &pass), MOE_ERR_ARGUMENT);
    FAILS(FORWARD(&call, work, bad ? 3 : size, &pass), MOE_ERR_SPACE);
    FAILS(FORWARD(&call, work, bad ? size - 1 : size, &pass), MOE_ERR_SPACE);
    act_other_calls(a, &data, &call, &pass, &rng, work, size, bad);
    other = call;
    other.n_tokens = INT32_MAX;
    ALL_FAIL(a, FORWARD(&other, work, size, &pass), MOE_ERR_OVERFLOW, "n_tokens of all ranks");
    memcpy(x, data.x, data.n * D * sizeof *x);
    if (bad) x[0] = (moe_real)INFINITY;
    other = call;
    other.x = x;
    FAILS(FORWARD(&other, work, size, &pass), MOE_ERR_NONFINITE);
    CHECK(rng.state == 3, "nothing was drawn");
    STATUS(FORWARD(&call, work, size, &pass), MOE_OK, "forward", NULL);
    FAILS(moe_net_backward(&a->o.net, bad ? NULL : dy, NULL, &pass), MOE_ERR_ARGUMENT);
    STATUS(moe_net_backward(&a->o.net, dy, NULL, &pass), MOE_OK, "backward", NULL);
    other = call;
    other.training = 0;
    other.n_tokens = a->self->rank == 0 ? 4 : 0;
    other.x = other.n_tokens > 0 ? data.x : NULL;
    STATUS(FORWARD(&other, work, size, &pass), MOE_OK, "one rank has tokens", NULL);
    other.n_tokens = 0;
    STATUS(FORWARD(&other, work, size, &pass), MOE_OK, "no rank has tokens", NULL);
    other = call;
    other.n_tokens = 0;
    other.x = NULL;
    STATUS(FORWARD(&other, work, size, &pass), MOE_OK, "no rank has tokens", NULL);
    STATUS(moe_net_backward(&a->o.net, NULL, NULL, &pass), MOE_OK, "and none comes back", NULL);
    free(work);
}

/* A feed_forward that fails on one rank ends the call everywhere before the next mixture, and the
   numbers that the other ranks drew until then are drawn again. */
static void act_feed_forward(actor *a) {
    moe_layer_config dense = layer_of("d_ff=9"), mixture = layer_of("n_experts=5 top_k=2 d_ff=7");
    moe_data data = act_data(a);
    moe_net *net = &a->o.net;
    moe_call call;
    moe_net_pass pass;
    moe_rng rng = {3};
    moe_real x[12 * D];
    void *work;
    size_t size = 0;
    moe_net_init(net, D, MOE_KERNELS_C, NULL);
    net->transport = begin(&a->o, a->self);
    moe_net_feed_forward(net, &dense);
    moe_net_dropout(net, (moe_real)0.2);
    moe_net_mixture(net, &mixture);
    moe_net_linear(net, CLASSES);
    if (!STATUS(moe_net_build(net, 1, 17, &a->error), MOE_OK, "build", &a->error)) return;
    STATUS(moe_net_work_size(net, 4, 1, &size), MOE_OK, "size", NULL);
    work = grab(size, 1);
    memcpy(x, data.x, data.n * D * sizeof *x);
    memset(&call, 0, sizeof call);
    call.n_tokens = data.n;
    call.x = x;
    call.training = 1;
    call.rng = &rng;
    call.error = &a->error;
    if (a->bad) x[0] = (moe_real)INFINITY;
    STATUS(moe_net_forward(net, &call, work, size, &pass), a->bad ? MOE_ERR_NONFINITE : MOE_ERR_PEER, "one fails",
           NULL);
    if (!a->bad) CHECK(names_rank(a), "the error names the rank");
    else CHECK(strstr(a->error.message, "module 0 (feed_forward)") != NULL, "the error names the module");
    x[0] = data.x[0];
    STATUS(moe_net_forward(net, &call, work, size, &pass), MOE_OK, "the ranks go on", &a->error);
    free(work);
}

/* -- what does not go with a transport */

/* A single module is a network all the same: its file has the experts of every rank. */
static void act_single(actor *a) {
    moe_layer_config config = layer_of("n_experts=5 top_k=2 d_ff=7");
    moe_net *net = &a->o.net, loaded;
    size_t i;
    memset(&loaded, 0, sizeof loaded);
    moe_net_init(net, D, MOE_KERNELS_C, NULL);
    net->transport = begin(&a->o, a->self);
    moe_net_mixture(net, &config);
    if (!STATUS(moe_net_build(net, 0, 17, &a->error), MOE_OK, "build", &a->error)) return;
    STATUS(moe_net_save(net, path[0], &a->error), MOE_OK, "save", &a->error);
    if (!STATUS(moe_net_load_part(&loaded, path[0], 0, MOE_KERNELS_C, net->transport, NULL, &a->error), MOE_OK, "load",
                &a->error))
        return;
    CHECK(loaded.n_tensors == net->n_tensors, "the same tensors");
    for (i = 0; i < net->n_tensors && i < loaded.n_tensors; i++)
        CHECK(loaded.tensors[i].count == net->tensors[i].count &&
                  memcmp(loaded.tensors[i].data, net->tensors[i].data, net->tensors[i].count * sizeof(moe_real)) == 0,
              net->tensors[i].name);
    moe_net_free(&loaded);
}

/* What a caller may forget: the network on one rank, a transport, that it has not begun, the
   values. */
static void act_null(actor *a) {
    const uint64_t value = 3;
    moe_transport fresh = ranks_transport(a->self);
    moe_buffer file;
    moe_net net;
    memset(&file, 0, sizeof file);
    memset(&net, 0, sizeof net);
    if (!act_begin(a, 0)) return;
    STATUS(moe_transport_status(NULL, MOE_OK), MOE_ERR_ARGUMENT, "status without a transport", NULL);
    STATUS(moe_transport_status(&fresh, MOE_OK), MOE_ERR_ARGUMENT, "status before the beginning", NULL);
    STATUS(moe_transport_agree(NULL, 1, &value, NULL, NULL), MOE_ERR_ARGUMENT, "agree without a transport", NULL);
    STATUS(moe_transport_agree(&fresh, 1, &value, NULL, NULL), MOE_ERR_ARGUMENT, "agree before the beginning", NULL);
    STATUS(moe_net_load_part(&net, "none", 0, MOE_KERNELS_C, &fresh, NULL, &a->error), MOE_ERR_CONFIG,
           "load before the beginning", NULL);
    STATUS(moe_transport_agree(a->o.net.transport, 1, NULL, NULL, NULL), MOE_ERR_ARGUMENT, "agree on NULL", NULL);
    STATUS(moe_transport_agree(a->o.net.transport, 0, NULL, NULL, NULL), MOE_OK, "agree on nothing", NULL);
    STATUS(moe_net_save(&a->o.net, path[0], &a->error), MOE_OK, "save", &a->error);
    STATUS(moe_file_read(path[0], &file, &a->error), MOE_OK, "read", &a->error);
    ONE_FAILS(a,
              moe_net_read_part(a->bad ? NULL : &net, file.data, file.size, 0, MOE_KERNELS_C, a->o.net.transport, NULL,
                                &a->error),
              MOE_ERR_ARGUMENT);
    if (a->bad) CHECK(strcmp(a->error.message, "net must not be NULL") == 0, a->error.message);
    CHECK(net.modules == NULL, "a failed read leaves the net");
    moe_buffer_free(&file);
}

static void act_refused(actor *a) {
    moe_model_config config;
    moe_built_model built;
    moe_modular modular;
    moe_cache cache;
    unsigned char room[64];
    memset(&config, 0, sizeof config);
    memset(&cache, 0, sizeof cache);
    if (!act_begin(a, 1)) return;
    ALL_FAIL(a, moe_net_decode_size(&a->o.net, 1, 1, NULL, NULL, &a->error), MOE_ERR_UNSUPPORTED, "several ranks");
    ALL_FAIL(a, moe_net_cache_init(&cache, &a->o.net, 0, room, sizeof room, &a->error), MOE_ERR_UNSUPPORTED,
             "several ranks");
    ALL_FAIL(a, moe_model_create(&built, &a->o.net, &config, &a->error), MOE_ERR_UNSUPPORTED, "net.transport");
    ALL_FAIL(a, moe_modular_init(&modular, &a->o.trainer, &a->error), MOE_ERR_UNSUPPORTED, "net.transport");
    {
        moe_call call;
        moe_net_pass pass;
        memset(&call, 0, sizeof call);
        cache.net = &a->o.net;
        STATUS(moe_net_decode(&a->o.net, &cache, &call, room, sizeof room, &pass), MOE_ERR_UNSUPPORTED, "decode", NULL);
    }
}

/* -- files */

/* A stream that takes so many bytes. */
typedef struct narrow {
    size_t left;
} narrow;

static moe_status narrow_write(void *ctx, const void *from, size_t size) {
    narrow *n = (narrow *)ctx;
    (void)from;
    if (size > n->left) return MOE_ERR_IO;
    n->left -= size;
    return MOE_OK;
}

static void act_write(actor *a) {
    narrow n;
    moe_stream stream;
    moe_buffer file;
    size_t at, step;
    memset(&file, 0, sizeof file);
    memset(&stream, 0, sizeof stream);
    if (!act_begin(a, 1)) return;
    stream.ctx = &n;
    stream.write = narrow_write;
    n.left = (size_t)1 << 30;
    STATUS(moe_trainer_write(&a->o.trainer, a->self->rank == 0 ? &stream : NULL, &a->error), MOE_OK, "write",
           &a->error);
    at = ((size_t)1 << 30) - n.left;
    for (step = 0; step <= 40; step++) { /* the disk is full */
        n.left = step == 40 ? at - 1 : at / 40 * step;
        ONE_FAILS(a, moe_trainer_write(&a->o.trainer, a->self->rank == 0 ? &stream : NULL, &a->error), MOE_ERR_IO);
        n.left = step == 40 ? at - 1 : at / 40 * step;
        if (step < 10)
            ONE_FAILS(a, moe_net_write(&a->o.net, a->self->rank == 0 ? &stream : NULL, &a->error), MOE_ERR_IO);
    }
    ONE_FAILS(a, moe_net_write(&a->o.net, NULL, &a->error), MOE_ERR_ARGUMENT);
    ONE_FAILS(a, moe_trainer_write(&a->o.trainer, NULL, &a->error), MOE_ERR_ARGUMENT);
    stream.write = NULL;
    ONE_FAILS(a, moe_net_write(&a->o.net, &stream, &a->error), MOE_ERR_ARGUMENT);
    ONE_FAILS(a, moe_net_save(&a->o.net, "/nowhere/at/all", &a->error), MOE_ERR_IO);
    ONE_FAILS(a, moe_net_save(&a->o.net, NULL, &a->error), MOE_ERR_ARGUMENT);
    ONE_FAILS(a, moe_trainer_save(&a->o.trainer, "/nowhere/at/all", &a->error), MOE_ERR_IO);
    act_go_on(a);
}

static void act_load(actor *a) {
    moe_net net, *of = &a->o.net;
    const char *mine = a->bad ? "/nowhere/at/all" : path[0], *other = a->bad ? path[1] : path[0];
    memset(&net, 0, sizeof net);
    if (!act_begin(a, 1)) return;
    STATUS(moe_trainer_save(&a->o.trainer, path[0], &a->error), MOE_OK, "save", &a->error);
    act_go_on(a);
    STATUS(moe_trainer_save(&a->o.trainer, path[1], &a->error), MOE_OK, "save", &a->error);
    ONE_FAILS(a, moe_trainer_load(&a->o.trainer, mine, &a->error), MOE_ERR_IO);
    ONE_FAILS(a, moe_net_load_part(&net, mine, 0, MOE_KERNELS_C, of->transport, NULL, &a->error), MOE_ERR_IO);
    ONE_FAILS(a, moe_net_load_part(a->bad ? NULL : &net, path[0], 0, MOE_KERNELS_C, of->transport, NULL, &a->error),
              MOE_ERR_ARGUMENT);
    ALL_FAIL(a, moe_trainer_load(&a->o.trainer, other, &a->error), MOE_ERR_CONFIG, "the file: its ");
    ALL_FAIL(a, moe_net_load_part(&net, other, 0, MOE_KERNELS_C, of->transport, NULL, &a->error), MOE_ERR_CONFIG,
             "the file: its ");
    ALL_FAIL(a, moe_net_load_part(&net, path[0], a->bad, MOE_KERNELS_C, of->transport, NULL, &a->error), MOE_ERR_CONFIG,
             "the file: trainable: ");
    CHECK(net.modules == NULL, "a failed load leaves the net");
    ALL_FAIL(a, moe_trainer_read(&a->o.trainer, "x", 1, &a->error), MOE_ERR_FORMAT, "byte 0");
    STATUS(moe_trainer_load(&a->o.trainer, path[0], &a->error), MOE_OK, "load", &a->error);
    CHECK(a->o.trainer.steps == 0, "back to the first step");
    act_go_on(a);
}

/* Rank 0 writes the first n bytes of a file; then all go on. */
static void act_put(actor *a, const char *name, const moe_buffer *bytes, size_t n) {
    if (a->self->rank == 0) {
        FILE *f = fopen(name, "wb");
        CHECK(f != NULL && fwrite(bytes->data, 1, n, f) == n, "a file");
        if (f != NULL) CHECK(fclose(f) == 0, "a file");
    }
    STATUS(moe_transport_status(&a->o.transport, MOE_OK), MOE_OK, "all are here", NULL);
}

enum { DAMAGES = 40 };

/* Whether a byte of a file is that of a trainer's tensor. */
static int is_of_trainer(const moe_buffer *bytes, const unsigned char *at) {
    moe_file file;
    moe_file_tensor t;
    if (moe_file_open(&file, bytes->data, bytes->size, NULL) != MOE_OK) return -1;
    while (moe_file_next(&file, &t) == MOE_OK)
        if (at >= t.data && at < t.data + t.bytes) return memcmp(t.name, "trainer.", 8) == 0;
    return -1;
}

/* One bit of the data, in many places: all ranks find it, whichever of them reads it. */
static void act_damages(actor *a, const moe_buffer *bytes, size_t header) {
    moe_net net;
    moe_status status;
    size_t i;
    memset(&net, 0, sizeof net);
    for (i = 0; i < DAMAGES; i++) {
        unsigned char *at = bytes->data + header + (bytes->size - header) / DAMAGES * i;
        const int of_trainer = is_of_trainer(bytes, at);
        STATUS(moe_transport_status(&a->o.transport, MOE_OK), MOE_OK, "all have looked", NULL);
        if (a->self->rank == 0) *at = (unsigned char)(*at ^ 4);
        act_put(a, path[0], bytes, bytes->size);
        status = moe_net_load_part(&net, path[0], 0, MOE_KERNELS_C, &a->o.transport, NULL, &a->error);
        CHECK(status == (of_trainer ? MOE_OK : MOE_ERR_FORMAT), "a checksum");
        CHECK(status == MOE_OK || strstr(a->error.message, "damaged") != NULL, "that it is damaged");
        if (status == MOE_OK) moe_net_free(&net);
        memset(&net, 0, sizeof net);
        status = moe_trainer_load(&a->o.trainer, path[0], &a->error);
        CHECK(status == MOE_ERR_FORMAT, "a checksum, to a trainer");
        CHECK(strstr(a->error.message, "damaged") != NULL, "that it is damaged");
        STATUS(moe_transport_status(&a->o.transport, MOE_OK), MOE_OK, "all have read", NULL);
        if (a->self->rank == 0) *at = (unsigned char)(*at ^ 4);
        STATUS(moe_transport_status(&a->o.transport, MOE_OK), MOE_OK, "it is whole again", NULL);
    }
}

/* The same bit in two tensors of experts, at the same place: their sums do not make up for each
   other. */
static void act_double_damage(actor *a, const moe_buffer *bytes) {
    static const char *const names[] = {"3.experts.up", "3.experts.down"};
    moe_file file;
    moe_file_tensor t;
    moe_net net;
    moe_status status;
    int again;
    for (again = 0; again < 2; again++) { /* the second time it is undone */
        if (a->self->rank == 0) {
            size_t i, bytes_of[2];
            (void)moe_file_open(&file, bytes->data, bytes->size, NULL);
            for (i = 0; i < 2; i++) {
                if (!CHECK(moe_file_find(&file, names[i], &t) == MOE_OK, names[i])) return;
                bytes_of[i] = t.bytes;
                bytes->data[(size_t)(t.data - bytes->data) + t.bytes - 9] ^= 4;
            }
            CHECK(bytes_of[0] == bytes_of[1], "two tensors of the same size");
        }
        act_put(a, path[0], bytes, bytes->size);
        status = moe_net_load_part(&net, path[0], 0, MOE_KERNELS_C, &a->o.transport, NULL, &a->error);
        CHECK(status == (again ? MOE_OK : MOE_ERR_FORMAT), "damage in two tensors");
        if (status == MOE_OK) moe_net_free(&net);
        STATUS(moe_transport_status(&a->o.transport, MOE_OK), MOE_OK, "all have read", NULL);
    }
}

/* Files on the disk that are none, or damaged, on all ranks. */
static void act_files(actor *a) {
    static moe_buffer good; /* of rank 0 */
    moe_buffer *bytes = &good;
    moe_stream stream = moe_buffer_stream(bytes);
    moe_net net;
    size_t n, i, header, kinds = 0;
    moe_status status;
    memset(&net, 0, sizeof net);
    if (!act_begin(a, 1)) return;
    STATUS(moe_trainer_write(&a->o.trainer, a->self->rank == 0 ? &stream : NULL, &a->error), MOE_OK, "write",
           &a->error);
    STATUS(moe_transport_status(&a->o.transport, MOE_OK), MOE_OK, "all are here", NULL);
    header = 8 + (size_t)bytes->data[0] + 256 * (size_t)bytes->data[1];
    for (i = 0; i < 14; i++) {
        n = i < 12 ? i * header / 10 : i == 12 ? bytes->size - 1 : 7;
        act_put(a, path[0], bytes, n);
        status = moe_trainer_load(&a->o.trainer, path[0], &a->error);
        CHECK(status == MOE_ERR_FORMAT || (n == 0 && status == MOE_ERR_IO), "a file that ends too early");
        CHECK(moe_net_load_part(&net, path[0], 0, MOE_KERNELS_C, &a->o.transport, NULL, &a->error) == status,
              "a file that ends too early");
    }
    for (i = 8; i + 5 < header; i++) { /* a type of elements that is none: of each tensor in turn */
        unsigned char kept = bytes->data[i + 1];
        int of_trainer = 0;
        if (memcmp(bytes->data + i, "\"F32\"", 5) != 0 && memcmp(bytes->data + i, "\"F64\"", 5) != 0) continue;
        for (n = i - 40 > 8 ? i - 40 : 8; n < i; n++) of_trainer |= memcmp(bytes->data + n, "trainer.", 8) == 0;
        STATUS(moe_transport_status(&a->o.transport, MOE_OK), MOE_OK, "all have looked", NULL);
        if (a->self->rank == 0) bytes->data[i + 1] = 'X';
        act_put(a, path[0], bytes, bytes->size);
        ALL_FAIL(a, moe_trainer_load(&a->o.trainer, path[0], &a->error), MOE_ERR_UNSUPPORTED, "an element type");
        status = moe_net_load_part(&net, path[0], 0, MOE_KERNELS_C, &a->o.transport, NULL, &a->error);
        CHECK(status == (of_trainer ? MOE_OK : MOE_ERR_UNSUPPORTED), "an element type");
        if (status == MOE_OK) moe_net_free(&net);
        memset(&net, 0, sizeof net);
        STATUS(moe_transport_status(&a->o.transport, MOE_OK), MOE_OK, "all have read", NULL);
        if (a->self->rank == 0) bytes->data[i + 1] = kept;
        STATUS(moe_transport_status(&a->o.transport, MOE_OK), MOE_OK, "it is whole again", NULL);
        kinds++;
    }
    CHECK(kinds == a->o.net.n_tensors + 2, "all tensors");
    act_damages(a, bytes, header);
    act_double_damage(a, bytes);
    ALL_FAIL(a, moe_trainer_load(&a->o.trainer, NULL, &a->error), MOE_ERR_ARGUMENT, "path");
    ALL_FAIL(a, moe_trainer_load(&a->o.trainer, "/", &a->error), MOE_ERR_IO, "/");
    act_put(a, path[0], bytes, bytes->size);
    STATUS(moe_trainer_load(&a->o.trainer, path[0], &a->error), MOE_OK, "the whole file", &a->error);
    STATUS(moe_transport_status(&a->o.transport, MOE_OK), MOE_OK, "all have read", NULL);
    if (a->self->rank == 0) {
        moe_buffer_free(bytes);
        memset(bytes, 0, sizeof *bytes);
    }
}

/* A layer that one rank cannot make. */
static void act_layer_create(actor *a, moe_layer_config config) {
    moe_allocator allocator = test_allocator(&a->o.memory, a->bad);
    moe_layer layer;
    ONE_FAILS(a, moe_layer_create(&layer, &config, 1, 9, &allocator, &a->error), MOE_ERR_MEMORY);
    CHECK(a->o.memory.blocks == 0, "nothing is left of a layer that was not made");
    if (a->bad) config.router.top_k = config.router.n_experts + 1;
    ONE_FAILS(a, moe_layer_create(&layer, &config, 1, 9, NULL, &a->error), MOE_ERR_CONFIG);
}

/* Layers alone: the file of one process, read by all. */
static void act_layers(actor *a) {
    moe_layer_config config = layer_of("d_model=6 n_experts=5 top_k=2 d_ff=7 n_shared=1 expert=mlp");
    moe_layer layer, all, copy;
    moe_buffer one, many;
    moe_stream to_one = moe_buffer_stream(&one), to_many = moe_buffer_stream(&many);
    const char *mine = a->bad ? "/nowhere/at/all" : path[0];
    moe_tensor own, whole;
    size_t i;
    memset(&one, 0, sizeof one);
    memset(&many, 0, sizeof many);
    memset(&copy, 0, sizeof copy);
    STATUS(moe_layer_create(&all, &config, 0, 9, NULL, &a->error), MOE_OK, "a layer of one process", &a->error);
    STATUS(moe_layer_write(&all, &to_one, &a->error), MOE_OK, "its file", &a->error);
    config.transport = begin(&a->o, a->self);
    act_layer_create(a, config);
    STATUS(moe_layer_create(&layer, &config, 1, 9, NULL, &a->error), MOE_OK, "a layer of ranks", &a->error);
    STATUS(moe_layer_write(&layer, a->self->rank == 0 ? &to_many : NULL, &a->error), MOE_OK, "its file", &a->error);
    if (a->self->rank == 0) CHECK(same_buffers(&one, &many), "the file of a layer on ranks is that of one process");
    if (a->s->bad == 0) ONE_FAILS(a, moe_layer_write(&layer, NULL, &a->error), MOE_ERR_ARGUMENT);
    STATUS(moe_layer_save(&layer, a->self->rank == 0 ? path[0] : NULL, &a->error), MOE_OK, "save", &a->error);
    ONE_FAILS(a, moe_layer_load_part(&copy, mine, 0, MOE_KERNELS_AUTO, config.transport, NULL, &a->error), MOE_ERR_IO);
    ONE_FAILS(
        a, moe_layer_load_part(a->bad ? NULL : &copy, path[0], 0, MOE_KERNELS_AUTO, config.transport, NULL, &a->error),
        MOE_ERR_ARGUMENT);
    ONE_FAILS(a,
              moe_layer_read_part(a->bad ? NULL : &copy, one.data, one.size, 0, MOE_KERNELS_AUTO, config.transport,
                                  NULL, &a->error),
              MOE_ERR_ARGUMENT);
    ALL_FAIL(a, moe_layer_load_part(&copy, path[0], a->bad, MOE_KERNELS_AUTO, config.transport, NULL, &a->error),
             MOE_ERR_CONFIG, "trainable");
    for (i = 0; i < 2; i++) {
        if (i == 0)
            STATUS(moe_layer_load_part(&copy, path[0], 1, MOE_KERNELS_AUTO, config.transport, NULL, &a->error), MOE_OK,
                   "load", &a->error);
        else
            STATUS(
                moe_layer_read_part(&copy, one.data, one.size, 0, MOE_KERNELS_AUTO, config.transport, NULL, &a->error),
                MOE_OK, "read", &a->error);
        {
            size_t k, first, count, row;
            moe_rank_part(5, a->self->rank, a->s->ranks, &first, &count);
            for (k = 0; moe_layer_tensor(&copy, k, &own) == MOE_OK && moe_layer_tensor(&all, k, &whole) == MOE_OK;
                 k++) {
                row = own.count == whole.count ? 0 : whole.count / 5;
                CHECK(own.count == (row > 0 ? row * count : whole.count), "its part");
                CHECK(same_bits(own.data, whole.data + row * first, own.count * sizeof(moe_real)),
                      "with the values of one process");
            }
            CHECK(k > 5, "all tensors");
        }
        moe_layer_free(&copy);
    }
    moe_layer_free(&layer);
    moe_layer_free(&all);
    moe_buffer_free(&one);
    moe_buffer_free(&many);
}

/* Whole work, of which one call of the transport fails on one rank: every rank gets an error, none
   waits for ever, none leaks. */
static void act_broken(actor *a) {
    moe_train_config config = course_of(a->s->kind).config;
    moe_allocator allocator = test_allocator(&a->o.memory, 0);
    moe_data data = data_of(a->s->kind, 0, 24), part = act_data(a);
    moe_evaluation evaluation;
    moe_net net;
    moe_status status = MOE_OK;
    memset(&net, 0, sizeof net);
    a->o.transport = ranks_transport(a->self);
    status = moe_transport_begin(&a->o.transport, &a->error);
    if (status == MOE_OK) status = build(&a->o.net, a->s->kind, &a->o.transport, &allocator, &a->error);
    if (status == MOE_OK) status = moe_trainer_init(&a->o.trainer, &a->o.net, &config, &a->error);
    if (status == MOE_OK) status = moe_trainer_accumulate(&a->o.trainer, &part, NULL, &a->error);
    if (status == MOE_OK) status = moe_trainer_update(&a->o.trainer, NULL, &a->error);
    if (status == MOE_OK) status = moe_trainer_step(&a->o.trainer, &part, NULL, &a->error);
    if (status == MOE_OK) status = moe_trainer_save(&a->o.trainer, path[0], &a->error);
    if (status == MOE_OK) status = moe_trainer_load(&a->o.trainer, path[0], &a->error);
    if (status == MOE_OK)
        status = moe_net_load_part(&net, path[0], 1, MOE_KERNELS_C, &a->o.transport, &allocator, &a->error);
    config.epochs = 1;
    config.batch = 24;
    config.checkpoint = path[0];
    config.resume = 0;
    if (status == MOE_OK) status = moe_fit(&net, &data, &data, &config, &a->error);
    if (status == MOE_OK) status = moe_evaluate(&net, &data, MOE_CRITERION_CROSS_ENTROPY, &evaluation, &a->error);
    CHECK(status == MOE_OK || status == MOE_ERR_TRANSPORT, "a broken transport is said to be one");
    CHECK(status == MOE_OK || a->error.message[0] != '\0', "with a message");
    if (status == MOE_OK && a->self->rank == 0) a->s->done = 1;
    if (status == MOE_OK && a->self->rank == 1) a->s->calls = (long)a->self->calls;
    moe_net_free(&net);
}

static void test_broken(int kind, long step) {
    scene s = scene_of(kind, 1, 0);
    unsigned long at, last;
    s.ranks = 2;
    play(act_broken, &s, "nothing is broken");
    last = (unsigned long)s.calls;
    CHECK(s.done && last > 50, "nothing is broken");
    for (at = 1; at <= last; at += (unsigned long)step) {
        s.break_at = at;
        s.done = 0;
        play(act_broken, &s, "broken");
        CHECK(!s.done, "a broken transport is noticed");
    }
}

static void test_failures(void) {
    scene s;
    FILE *file = fopen(path[1], "wb");
    int bad, kind;
    if (!CHECK(file != NULL && fclose(file) == 0, "a file that is no checkpoint")) return;
    for (bad = 0; bad < 3; bad++) {
        s = scene_of(CHOICE, bad, 0);
        play(act_build, &s, "build");
        s = scene_of(CHOICE, bad, 0);
        play(act_trainer, &s, "trainer");
        s = scene_of(DENSE, bad, 0);
        play(act_trainer, &s, "trainer of a dense net");
        s = scene_of(CAPACITY, bad, 0);
        s.file = path[1];
        play(act_fit, &s, "fit");
        s = scene_of(CHOICE, bad, 0);
        play(act_forward, &s, "forward");
        s = scene_of(DENSE, bad, 0);
        play(act_forward, &s, "forward of a dense net");
        for (kind = DENSE; kind <= TEXT; kind += TEXT) {
            fail_memory(act_build_memory, scene_of(kind, bad, 0), "memory to build");
            fail_memory(act_trainer_memory, scene_of(kind, bad, 0), "memory to train");
            fail_memory(act_fit_memory, scene_of(kind, bad, 0), "memory to fit");
            fail_memory(act_file_memory, scene_of(kind, bad, 0), "memory for files");
        }
    }
    for (bad = 0; bad < 3; bad++) {
        s = scene_of(NOISY, bad, 0);
        play(act_load, &s, "load");
    }
    for (bad = 0; bad < 3; bad++) {
        s = scene_of(CHOICE, bad, 0);
        play(act_layers, &s, "layers");
        s = scene_of(CHOICE, bad, 0);
        play(act_feed_forward, &s, "a feed_forward before a mixture");
        s = scene_of(CHOICE, bad, 0);
        play(act_null, &s, "what a caller may forget");
    }
    s = scene_of(NOISY, -1, 0);
    play(act_files, &s, "files");
    s = scene_of(CHOICE, -1, 0);
    play(act_build_alone, &s, "transports that do not fit");
    s = scene_of(CHOICE, -1, 0);
    play(act_single, &s, "a network of one module");
    s = scene_of(CHOICE, -1, 0);
    play(act_refused, &s, "what is refused");
    s = scene_of(CHOICE, 0, 0);
    play(act_write, &s, "write");
    s = scene_of(DENSE, 0, 0);
    play(act_write, &s, "write a dense net");
    test_broken(CHOICE, between);
    test_broken(DENSE, 1); /* few calls: each of them in the quick form too */
}

int main(int argc, char **argv) {
    const char *folder = ".";
    int i;
    for (i = 1; i < argc; i++)
        if (strcmp(argv[i], "quick") == 0) between = 5;
        else folder = argv[i];
    if (strlen(folder) > 500) {
        fprintf(stderr, "ranks_nets: the folder's name is too long\n");
        return 2;
    }
    for (i = 0; i < 2; i++) sprintf(path[i], "%s/ranks_nets-%d.safetensors", folder, i);
    samples_begin();
    CASE(test_all_trainings());
    for (i = 0; i < KINDS; i++) CASE(test_fit(i));
    CASE(test_failures());
    for (i = 0; i < 2; i++) (void)remove(path[i]);
    return test_end();
}
#endif
