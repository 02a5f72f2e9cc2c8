/* training.c - what moe.h promises of training: data, schedules, groups, accumulated steps,
   checkpoints, and training that is resumed.

     cc -std=c99 -O2 -I. tests/unit/training.c -o training -lm && ./training [FOLDER]
     (also with -DMOE_REAL=double, and as C++)

   FOLDER, by default the current one, takes small files that are removed again. Exit status 1 if a
   check failed. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/stat.h>
#define HAS_FOLDERS 1 /* the linked library's own macro is private */
#else
#define HAS_FOLDERS 0
#endif

#if MOE_REAL_IS_DOUBLE
#define NEAR 1e-10
#else
#define NEAR 1e-4
#endif

static char path[2][600]; /* files of this test */

/* FNV-1a */
static uint64_t hash_of(uint64_t hash, const void *bytes, size_t n) {
    const unsigned char *p = (const unsigned char *)bytes;
    while (n-- > 0) hash = (hash ^ *p++) * UINT64_C(0x100000001b3);
    return hash;
}

/* ---- networks and samples ---- */

enum { D = 5, CLASSES = 3, MOST = 64 };

/* Samples, and everything they may come with. */
typedef struct samples {
    moe_real x[MOST * D], targets[MOST * CLASSES];
    int32_t labels[MOST], token_ids[MOST];
    moe_data data;
} samples;

static samples samples_of(size_t n, uint64_t seed) {
    samples s;
    moe_rng rng;
    size_t i, j;
    memset(&s, 0, sizeof s);
    moe_rng_seed(&rng, seed);
    for (i = 0; i < n; i++) {
        s.labels[i] = (int32_t)(i % CLASSES);
        s.token_ids[i] = (int32_t)i;
        for (j = 0; j < D; j++) s.x[i * D + j] = (moe_real)(j == i % CLASSES) + (moe_real)0.5 * moe_rng_normal(&rng);
        for (j = 0; j < CLASSES; j++) s.targets[i * CLASSES + j] = moe_rng_normal(&rng);
    }
    s.data.n = n;
    return s;
}

/* Samples are moved as structs, so their pointers are set where they stay. */
static moe_data *place(samples *s) {
    s->data.x = s->x;
    s->data.labels = s->labels;
    s->data.targets = s->targets;
    return &s->data;
}

static moe_layer_config layer_of(const char *settings) {
    moe_layer_config c;
    moe_error error;
    memset(&c, 0, sizeof c);
    if (!CHECK(moe_fields_apply(moe_layer_fields(), &c, settings, &error) == MOE_OK, settings))
        printf("        %s\n", error.message);
    return c;
}

/* A network is the mixtures of a kind, each behind a layer norm and inside a residual, between two
   linear modules. */
typedef struct kind {
    const char *name;
    const char *mixtures[3];
} kind;

static const kind kinds[] = {
    {"smooth", {"n_experts=4 select=dense weight=raw d_ff=4", NULL, NULL}},
    {"sparse", {"n_experts=4 top_k=2 loss_balance=0.01 d_ff=4", NULL, NULL}},
    {"stochastic",
     {"n_experts=4 top_k=2 noise=noisy_topk loss_importance=0.1 d_ff=4",
      "n_experts=4 top_k=1 select=sample input=jitter weight=raw d_ff=3", NULL}},
    {"stateful",
     {"n_experts=4 top_k=1 k_end=3 schedule_steps=5 gate=sigmoid weight=raw selection_bias=1 bias_rate=0.05 d_ff=4",
      "n_experts=4 input=adaptive_clustering ac_mode=running ac_rho=0.75 tau_schedule=gate_temperature tau_end=2 "
      "schedule_steps=6 d_ff=4",
      "n_experts=4 gate=relu select=positive weight=raw router_bias=1 l1_controller=1 loss_l1=0.01 d_ff=4"}},
    {"shared", /* one factor of all layers: the memory of the others' is unused */
     {"n_experts=4 gate=relu select=positive weight=raw l1_controller=net loss_l1=0.01 d_ff=4",
      "n_experts=3 gate=relu select=positive weight=raw l1_controller=net loss_l1=0.01 d_ff=3",
      "n_experts=4 gate=relu select=positive weight=raw l1_controller=net loss_l1=0.01 d_ff=4"}}};

enum { KINDS = (int)(sizeof kinds / sizeof kinds[0]), SMOOTH = 0, SPARSE = 1 };

static moe_net net_of(int which, uint64_t seed, const moe_allocator *allocator) {
    moe_net net;
    moe_error error;
    int i;
    moe_net_init(&net, D, MOE_KERNELS_AUTO, allocator);
    moe_net_linear(&net, 6);
    for (i = 0; i < 3 && kinds[which].mixtures[i] != NULL; i++) {
        moe_layer_config c = layer_of(kinds[which].mixtures[i]);
        moe_net_layer_norm(&net);
        moe_net_mixture(&net, &c);
        moe_net_residual(&net, 2);
    }
    moe_net_linear(&net, CLASSES);
    if (!CHECK_STATUS(moe_net_build(&net, 1, seed, &error), MOE_OK, kinds[which].name)) {
        printf("        %s\n", error.message);
        exit(1);
    }
    return net;
}

static uint64_t net_print(const moe_net *net) {
    uint64_t hash = 1;
    size_t i;
    for (i = 0; i < net->n_tensors; i++)
        hash = hash_of(hash, net->tensors[i].data, net->tensors[i].count * sizeof(moe_real));
    return hash;
}

/* Everything that a checkpoint keeps, and what is accumulated. */
static uint64_t trainer_print(const moe_trainer *t) {
    size_t numbers = moe_net_parameter_count(t->net, NULL) * (t->config.optimizer == MOE_OPTIMIZER_ADAMW ? 2 : 1);
    uint64_t hash = hash_of(net_print(t->net), t->memory, numbers * sizeof(moe_real));
    hash = hash_of(hash, &t->steps, sizeof t->steps);
    hash = hash_of(hash, &t->rng.state, sizeof t->rng.state);
    hash = hash_of(hash, &t->rate, sizeof t->rate);
    hash = hash_of(hash, t->position, sizeof t->position);
    return hash_of(hash, &t->n_accumulated, sizeof t->n_accumulated);
}

static moe_train_config descent(int batch) {
    moe_train_config c;
    memset(&c, 0, sizeof c);
    c.optimizer = MOE_OPTIMIZER_SGD;
    c.momentum = -1;
    c.rate = (moe_real)0.125;
    c.batch = batch;
    return c;
}

static moe_trainer trainer_of(moe_net *net, const moe_train_config *config) {
    moe_trainer t;
    moe_error error;
    memset(&t, 0, sizeof t);
    if (!CHECK_STATUS(moe_trainer_init(&t, net, config, &error), MOE_OK, "trainer")) {
        printf("        %s\n", error.message);
        exit(1);
    }
    return t;
}

static void step(moe_trainer *t, const moe_data *data, moe_step *seen) {
    moe_error error;
    if (!CHECK_STATUS(moe_trainer_step(t, data, seen, &error), MOE_OK, "step")) printf("        %s\n", error.message);
}

/* What a step says of the routers' losses is the sum of all losses of all routers. */
static void test_router_losses(void) {
    samples s = samples_of(24, 3);
    const moe_data *data = place(&s);
    moe_train_config config = descent(24);
    moe_net net;
    moe_net_pass pass;
    moe_trainer trainer;
    moe_call call;
    moe_error error;
    moe_step seen, half;
    double sum = 0;
    size_t bytes = 0, i;
    void *work;
    int loss, several = 0;
    memset(&call, 0, sizeof call);
    call.n_tokens = data->n;
    call.x = data->x;
    call.training = 1;
    moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
    for (i = 0; i < 2; i++) {
        moe_layer_config c = layer_of("n_experts=4 top_k=2 loss_balance=0.5 loss_z=0.25 d_ff=4");
        moe_net_mixture(&net, &c);
    }
    moe_net_linear(&net, CLASSES);
    if (!CHECK_STATUS(moe_net_build(&net, 1, 4, &error), MOE_OK, "net")) return;
    CHECK_STATUS(moe_net_work_size(&net, data->n, 1, &bytes), MOE_OK, "size");
    work = grab(bytes, 1);
    if (CHECK_STATUS(moe_net_forward(&net, &call, work, bytes, &pass), MOE_OK, "forward"))
        for (i = 0; i < 2; i++)
            for (loss = 0; loss < MOE_LOSS_COUNT; loss++) {
                const double one = (double)moe_net_routing(&net, &pass, i)->loss[loss];
                sum += one;
                several += one > 0;
            }
    free(work);
    trainer = trainer_of(&net, &config);
    memset(&half, 0, sizeof half);
    CHECK_STATUS(moe_trainer_accumulate(&trainer, data, &half, &error), MOE_OK, "half a step");
    CHECK(near_to((double)half.router_loss, sum, NEAR), "the same of a batch that is accumulated");
    moe_trainer_free(&trainer);
    trainer = trainer_of(&net, &config);
    step(&trainer, data, &seen);
    CHECK(several == 4 && near_to((double)seen.router_loss, sum, NEAR), "all losses of all routers");
    CHECK(near_to((double)half.loss, (double)seen.loss, NEAR), "and its loss");
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

/* The largest difference between two networks' tensors. */
static double net_distance(const moe_net *a, const moe_net *b) {
    double most = 0.0;
    size_t i, j;
    for (i = 0; i < a->n_tensors; i++)
        for (j = 0; j < a->tensors[i].count; j++) {
            double d = fabs((double)a->tensors[i].data[j] - (double)b->tensors[i].data[j]);
            if (!(d <= most)) most = d;
        }
    return most;
}

/* ---- schedules ---- */

static double rate_wanted(const moe_train_config *c, double s, double total) {
    double w = c->warmup, f = (double)c->final_rate, a, g;
    if (s < w) return (double)c->rate * (s + 1) / (w + 1);
    a = s >= total ? 1.0 : total - 1 > w ? (s - w) / (total - 1 - w) : 0.0;
    g = c->schedule == MOE_SCHEDULE_LINEAR ? 1.0 - a : (1.0 + cos(3.14159265358979324 * a)) / 2.0;
    return (double)c->rate * (f + (1.0 - f) * g);
}

typedef struct rates {
    const moe_train_config *config;
    double total;
    int wrong, calls;
} rates;

static int watch_rates(void *ctx, const moe_progress *p) {
    rates *r = (rates *)ctx;
    r->wrong |= !near_to((double)p->rate, rate_wanted(r->config, r->calls, r->total), NEAR);
    r->calls++;
    r->wrong |= p->total_step != (uint64_t)r->calls || p->total_steps != 12 ||
                p->samples != (uint64_t)(r->calls / 4 * 20 + r->calls % 4 * 6);
    return 0;
}

/* The seed of a configuration is that of the trainer's stream: what it draws comes from there. */
static void test_seeds(void) {
    uint64_t seed;
    for (seed = 0; seed < 3; seed++) {
        moe_net net = net_of(SPARSE, 1, NULL);
        moe_train_config c = descent(20);
        moe_trainer t;
        moe_rng wanted;
        c.seed = seed * 1234567;
        t = trainer_of(&net, &c);
        moe_rng_seed(&wanted, c.seed);
        CHECK(t.rng.state == wanted.state, "the stream begins where its seed says");
        moe_trainer_free(&t);
        moe_net_free(&net);
    }
}

static void test_schedules(void) {
    static const int cases[][2] = {{10, 0}, {10, 4}, {1, 0}, {2, 1}, {3, 5}, {6, 5}, {0, 0}};
    samples s = samples_of(20, 1);
    moe_error error;
    size_t i;
    int schedule, at;
    place(&s);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (schedule = 0; schedule < MOE_SCHEDULE_COUNT; schedule++) {
            moe_net net = net_of(SPARSE, 1, NULL);
            moe_train_config c = descent(20);
            moe_trainer t;
            c.total_steps = cases[i][0];
            c.warmup = cases[i][1];
            c.schedule = schedule;
            c.final_rate = (moe_real)0.1;
            t = trainer_of(&net, &c);
            for (at = 0; at < 14; at++) {
                double wanted = c.total_steps > 0 ? rate_wanted(&c, at, c.total_steps) : (double)c.rate;
                CHECK(near_to((double)t.rate, wanted, NEAR), "the rate of the closed form");
                step(&t, &s.data, NULL);
            }
            if (c.total_steps > 0) CHECK(near_to((double)t.rate, 0.0125, NEAR), "beyond the end it stays");
            t.rate = (moe_real)0.5;
            step(&t, &s.data, NULL);
            CHECK((t.rate < (moe_real)0.5) == (c.total_steps > 0),
                  "a rate of the caller's own stays where there is no schedule");
            moe_trainer_free(&t);
            moe_net_free(&net);
        }
    for (schedule = 0; schedule < 2 * MOE_SCHEDULE_COUNT; schedule++) {
        /* moe_fit knows the total: 4 steps in each of 3 epochs */
        moe_net net = net_of(SPARSE, 1, NULL);
        moe_train_config c = descent(6);
        rates r;
        c.epochs = 3;
        c.warmup = 2;
        c.final_rate = (moe_real)0.2;
        c.schedule = schedule / 2;
        c.total_steps = schedule % 2 ? 7 : 0;
        r.config = &c;
        r.total = schedule % 2 ? 7 : 12;
        r.wrong = r.calls = 0;
        c.progress = watch_rates;
        c.progress_ctx = &r;
        CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_OK, "fit");
        CHECK(r.calls == 12 && !r.wrong, "rate, total and samples in progress");
        moe_net_free(&net);
    }
}

/* ---- steps of several batches ---- */

static void accumulate_repeatedly(samples *s, moe_net *one, moe_net *many, moe_trainer *a, moe_trainer *b) {
    moe_data part;
    moe_step seen, half;
    moe_error error;
    int round, k, i;
    CHECK_STATUS(moe_trainer_update(b, &half, &error), MOE_ERR_STATE, "an update without a batch");
    for (round = 0; round < 6; round++) { /* the same batch again and again: sums of floats, so within rounding */
        k = round % 3 + 1;
        step(a, &s->data, &seen);
        for (i = 1; i <= k; i++) {
            memset(&half, 0, sizeof half);
            half.gradient_norm = -1;
            CHECK_STATUS(moe_trainer_accumulate(b, &s->data, &half, &error), MOE_OK, "accumulate");
            CHECK(near_to((double)half.loss, (double)seen.loss, NEAR) && half.gradient_norm < 0 &&
                      b->n_accumulated == i,
                  "loss alone is of the batch");
        }
        half.loss = -2;
        CHECK_STATUS(moe_trainer_update(b, &half, &error), MOE_OK, "update");
        CHECK(near_to((double)half.gradient_norm, (double)seen.gradient_norm, NEAR) && half.loss < -1 &&
                  b->n_accumulated == 0,
              "the norm of the mean");
        CHECK(net_distance(one, many) < NEAR, "equal batches make the step of one of them");
    }
    for (round = 0; round < 4; round++) {
        step(a, &s->data, &seen);
        for (i = 0; i < 24; i += 8) {
            part = s->data;
            part.n = 8;
            part.x += i * D;
            part.labels += i;
            CHECK_STATUS(moe_trainer_accumulate(b, &part, NULL, &error), MOE_OK, "accumulate");
        }
        CHECK_STATUS(moe_trainer_update(b, &half, &error), MOE_OK, "update");
        CHECK(near_to((double)half.gradient_norm, (double)seen.gradient_norm, NEAR), "the same norm");
        CHECK(net_distance(one, many) < 10 * NEAR, "the parts of a batch make the step of the whole");
    }
}

static void test_accumulation(void) {
    samples s = samples_of(24, 2);
    moe_net one = net_of(SMOOTH, 3, NULL), many = net_of(SMOOTH, 3, NULL);
    moe_train_config c = descent(24);
    moe_trainer a, b;
    moe_data part;
    moe_error error;
    uint64_t before;
    place(&s);
    c.momentum = (moe_real)0.5;
    c.clip = (moe_real)0.3;
    c.decay = (moe_real)0.01;
    a = trainer_of(&one, &c);
    b = trainer_of(&many, &c);
    accumulate_repeatedly(&s, &one, &many, &a, &b);
    CHECK(a.steps == 10 && b.steps == 10, "an update is a step");

    part = s.data;
    part.n = 0;
    CHECK_STATUS(moe_trainer_accumulate(&b, &s.data, NULL, &error), MOE_OK, "accumulate");
    before = trainer_print(&b);
    CHECK_STATUS(moe_trainer_accumulate(&b, &part, NULL, &error), MOE_ERR_ARGUMENT, "no samples");
    s.labels[7] = CLASSES;
    CHECK_STATUS(moe_trainer_accumulate(&b, &s.data, NULL, &error), MOE_ERR_ARGUMENT, "a bad label");
    CHECK(strstr(error.message, "labels[7] = 3") != NULL && strstr(error.message, "0 to 2") != NULL, "row and value");
    s.labels[7] = 1;
    CHECK(trainer_print(&b) == before && b.n_accumulated == 1, "refused data change nothing");
    b.rate = (moe_real)HUGE_VAL;
    CHECK_STATUS(moe_trainer_update(&b, NULL, &error), MOE_ERR_ARGUMENT, "no such rate");
    b.rate = c.rate;
    CHECK(trainer_print(&b) == before, "a refused update changes nothing");
    CHECK_STATUS(moe_trainer_accumulate(&a, &s.data, NULL, &error), MOE_OK, "accumulate");
    one.tensors[0].data[0] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e300 : 1e38);
    one.tensors[0].data[1] = one.tensors[0].data[0];
    CHECK_STATUS(moe_trainer_accumulate(&a, &s.data, NULL, &error), MOE_ERR_NONFINITE, "no number");
    CHECK(a.n_accumulated == 0 && a.steps == 10, "the batches are lost");
    memcpy(one.memory, many.memory, moe_net_parameter_count(&many, NULL) * sizeof(moe_real));
    memcpy(a.memory, b.memory, moe_net_parameter_count(&many, NULL) * sizeof(moe_real));
    CHECK_STATUS(moe_trainer_update(&b, NULL, &error), MOE_OK, "update");
    step(&a, &s.data, NULL);
    CHECK(net_print(&one) == net_print(&many),
          "and the next step begins anew: bit for bit a step is accumulate and update");
    moe_trainer_free(&a);
    moe_trainer_free(&b);
    moe_net_free(&one);
    moe_net_free(&many);
}

/* The states of routers are advanced by an update, not by a batch. */
static void test_accumulated_state(void) {
    samples s = samples_of(24, 4);
    moe_net net;
    moe_layer_config c = layer_of(
        "n_experts=4 top_k=1 k_end=3 schedule_steps=9 gate=sigmoid weight=raw selection_bias=1 bias_rate=0.05 d_ff=4");
    moe_train_config config = descent(24);
    moe_trainer t;
    moe_error error;
    moe_tensor *steps, *load, *bias;
    place(&s);
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &c);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 5, &error), MOE_OK, "build");
    t = trainer_of(&net, &config);
    steps = net_tensor(&net, "0.router.step");
    load = net_tensor(&net, "0.router.load");
    bias = net_tensor(&net, "0.router.selection_bias");
    if (CHECK(steps != NULL && load != NULL && bias != NULL, "tensors of state")) {
        CHECK_STATUS(moe_trainer_accumulate(&t, &s.data, NULL, &error), MOE_OK, "accumulate");
        CHECK_STATUS(moe_trainer_accumulate(&t, &s.data, NULL, &error), MOE_OK, "accumulate");
        CHECK(near_to((double)load->data[4], 48, NEAR) && !(steps->data[0] > 0) && !(fabs((double)bias->data[0]) > 0),
              "two batches are counted, nothing moves");
        CHECK_STATUS(moe_trainer_update(&t, NULL, &error), MOE_OK, "update");
        CHECK(!(load->data[4] > 0) && near_to((double)steps->data[0], 1, NEAR), "one step");
        CHECK(fabs((double)bias->data[0]) + fabs((double)bias->data[1]) + fabs((double)bias->data[2]) +
                      fabs((double)bias->data[3]) >
                  0.04,
              "the bias moves");
    }
    moe_trainer_free(&t);
    moe_net_free(&net);
}

/* ---- groups ---- */

static void set_groups(moe_param_group *groups) {
    groups[0].pattern = "0.weight";
    groups[1].pattern = "*.bias";
    groups[1].rate = (moe_real)0.5;
    groups[1].decay = 3;
    groups[2].pattern = "*router*";
    groups[2].rate = 2;
    groups[2].decay = -1;
    groups[3].pattern = "*.experts.*";
    groups[3].frozen = 1;
}

/* AdamW: a group's factor is one on its rate. */
static void adamw_groups(samples *s) {
    moe_param_group groups[4];
    moe_train_config c = descent(24);
    moe_net net = net_of(SPARSE, 7, NULL), half = net_of(SPARSE, 7, NULL);
    moe_net before = net_of(SPARSE, 7, NULL);
    moe_trainer a, b;
    size_t i, j;
    memset(&c, 0, sizeof c);
    memset(groups, 0, sizeof groups);
    a = trainer_of(&net, &c);
    groups[0].pattern = "0.*";
    groups[0].rate = (moe_real)0.5;
    c.groups = groups;
    c.n_groups = 1;
    b = trainer_of(&half, &c);
    step(&a, &s->data, NULL);
    step(&b, &s->data, NULL);
    for (i = 0; i < net.n_tensors; i++)
        for (j = 0; j < net.tensors[i].count; j++) {
            double moved = (double)net.tensors[i].data[j] - (double)before.tensors[i].data[j];
            double less = (double)half.tensors[i].data[j] - (double)before.tensors[i].data[j];
            CHECK(fabs(less - (strncmp(net.tensors[i].name, "0.", 2) == 0 ? 0.5 : 1.0) * moved) < 1e-6,
                  "half of the way");
        }
    moe_trainer_free(&a);
    moe_trainer_free(&b);
    moe_net_free(&net);
    moe_net_free(&half);
    moe_net_free(&before);
}

/* Biases begin with 0, on which decay does not show. */
static void move_biases(const moe_net *net) {
    size_t i, j;
    for (i = 0; i < net->n_tensors; i++)
        for (j = 0; j < net->tensors[i].count && strstr(net->tensors[i].name, ".bias") != NULL; j++)
            net->tensors[i].data[j] = (moe_real)0.25 * (moe_real)(j + 1);
}

/* A step that fails when its router has drawn noise gives the numbers back. */
static void test_failed_step(void) {
    samples s = samples_of(12, 5);
    moe_layer_config layer = layer_of("n_experts=4 top_k=2 noise=gaussian d_ff=4");
    moe_train_config c = descent(12);
    moe_net net;
    moe_trainer t;
    moe_error error;
    moe_step seen, kept;
    moe_call call;
    moe_rng own = {5};
    uint64_t state;
    place(&s);
    moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
    moe_net_mixture(&net, &layer);
    moe_net_linear(&net, CLASSES);
    if (!CHECK_STATUS(moe_net_build(&net, 1, 4, &error), MOE_OK, "net")) return;
    t = trainer_of(&net, &c);
    step(&t, &s.data, NULL);
    state = t.rng.state;
    s.x[0] = MOE_REAL_IS_DOUBLE ? (moe_real)1e308 : (moe_real)3e38;
    net_tensor(&net, "0.router.weight")->data[0] = 1000;
    memset(&seen, 0x5a, sizeof seen);
    kept = seen;
    CHECK_STATUS(moe_trainer_step(&t, &s.data, &seen, &error), MOE_ERR_NONFINITE, "a logit");
    CHECK(t.rng.state == state && t.n_accumulated == 0, "nothing was drawn");
    CHECK(same_bits(&seen, &kept, sizeof seen), "nothing was written");
    s.x[0] = 0;
    memset(&call, 0, sizeof call);
    call.rng = &own;
    s.data.call = &call;
    step(&t, &s.data, NULL);
    CHECK(t.rng.state != state && own.state == 5, "a good step draws, from the trainer's generator");
    s.data.n = 13;
    CHECK_STATUS(moe_trainer_step(&t, &s.data, &seen, &error), MOE_ERR_ARGUMENT, "a sample more than batch");
    moe_trainer_free(&t);
    moe_net_free(&net);
}

/* SGD: no decay for rows of a matrix, while biases, which have none, keep none. */
static void decay_groups(samples *s) {
    moe_param_group groups[2];
    moe_train_config c = descent(24);
    moe_net net = net_of(SPARSE, 7, NULL), before = net_of(SPARSE, 7, NULL);
    moe_trainer t;
    size_t i, j;
    memset(groups, 0, sizeof groups);
    groups[0].pattern = "0.weight[1:3]";
    groups[0].decay = -1;
    groups[1].pattern = "*bias";
    groups[1].decay = -1;
    c.decay = (moe_real)0.25;
    c.groups = groups;
    c.n_groups = 2;
    move_biases(&net);
    move_biases(&before);
    t = trainer_of(&net, &c);
    step(&t, &s->data, NULL);
    for (i = 0; i < net.n_tensors; i++) {
        const moe_tensor *n = &net.tensors[i], *b = &before.tensors[i];
        for (j = 0; j < n->count; j++) {
            const size_t row = j / (n->count / n->shape[0]);
            const int none = (n->flags & MOE_PARAM_NO_DECAY) != 0 || (i == 0 && (row == 1 || row == 2));
            const double old = (double)b->data[j], decay = none ? 0.0 : 0.25;
            CHECK(near_to((double)n->data[j], old - 0.125 * ((double)n->gradient[j] + decay * old), NEAR), n->name);
        }
    }
    CHECK(strcmp(net.tensors[0].name, "0.weight") == 0 && net.tensors[0].shape[0] > 3);
    moe_trainer_free(&t);
    c.rate = 0; /* the default */
    t = trainer_of(&net, &c);
    CHECK(near_to((double)t.rate, 0.01, NEAR), "of sgd");
    moe_trainer_free(&t);
    moe_net_free(&net);
    moe_net_free(&before);
}

/* One step of each tensor against the formula, from the gradients that the step leaves. */
static void test_groups(void) {
    static const double rate_of[] = {1, 0.5, 2, 0}, decay_of[] = {1, 3, 0, 0}; /* by group; the last is frozen */
    moe_param_group groups[4];
    samples s = samples_of(24, 6);
    moe_train_config c = descent(24);
    int clipped;
    place(&s);
    memset(groups, 0, sizeof groups);
    set_groups(groups);
    c.groups = groups;
    c.n_groups = 4;
    c.decay = (moe_real)0.25;
    for (clipped = 0; clipped < 2; clipped++) {
        moe_net net = net_of(SPARSE, 7, NULL), before = net_of(SPARSE, 7, NULL);
        moe_trainer t;
        moe_step seen;
        double norm = 0.0, scale;
        size_t i, j;
        int n_of[5] = {0, 0, 0, 0, 0};
        c.clip = clipped ? (moe_real)0.125 : 0;
        move_biases(&net);
        move_biases(&before);
        t = trainer_of(&net, &c);
        memset(&groups[2], 0, sizeof groups[2]); /* read by init alone */
        step(&t, &s.data, &seen);
        groups[2].pattern = "*router*";
        groups[2].rate = 2;
        groups[2].decay = -1;
        for (i = 0; i < net.n_tensors; i++)
            for (j = 0; strstr(net.tensors[i].name, ".experts.") == NULL && j < net.tensors[i].count; j++)
                norm += (double)net.tensors[i].gradient[j] * (double)net.tensors[i].gradient[j];
        norm = sqrt(norm);
        CHECK(near_to((double)seen.gradient_norm, norm, NEAR) && norm > 0.125,
              "frozen tensors take no part in the norm");
        scale = clipped ? 0.125 / norm : 1.0;
        for (i = 0; i < net.n_tensors; i++) {
            const moe_tensor *n = &net.tensors[i], *b = &before.tensors[i];
            int g = strcmp(n->name, "0.weight") == 0       ? 0
                    : strstr(n->name, ".bias") != NULL     ? 1
                    : strstr(n->name, "router") != NULL    ? 2
                    : strstr(n->name, ".experts.") != NULL ? 3
                                                           : 4;
            double rate = 0.125 * (g < 4 ? rate_of[g] : 1.0);
            double decay = 0.25 * (g < 4 ? decay_of[g] : (n->flags & MOE_PARAM_NO_DECAY) != 0 ? 0.0 : 1.0);
            n_of[g]++;
            if (g == 3) CHECK(same_bits(n->data, b->data, n->count * sizeof(moe_real)), "frozen: bit for bit");
            for (j = 0; j < n->count; j++)
                CHECK(near_to((double)n->data[j],
                              (double)b->data[j] - rate * (scale * (double)n->gradient[j] + decay * (double)b->data[j]),
                              NEAR),
                      n->name);
        }
        CHECK(n_of[0] > 0 && n_of[1] > 1 && n_of[2] > 0 && n_of[3] > 1 && n_of[4] > 0, "every group has tensors");
        moe_trainer_free(&t);
        moe_net_free(&net);
        moe_net_free(&before);
    }
    adamw_groups(&s);
    decay_groups(&s);
}

/* The norm of gradients whose squares are too small for a float. */
static void test_small_gradients(void) {
    samples s = samples_of(24, 16);
    moe_param_group bias;
    moe_train_config c = descent(24);
    moe_net net;
    moe_trainer t;
    moe_step seen;
    double sum = 0.0;
    size_t i;
    place(&s);
    memset(&bias, 0, sizeof bias);
    bias.pattern = "*bias";
    bias.frozen = 1;
    c.groups = &bias;
    c.n_groups = 1;
    for (i = 0; i < 24 * D; i++) s.x[i] *= (moe_real)1e-25;
    moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 1, NULL), MOE_OK, "build");
    t = trainer_of(&net, &c);
    step(&t, &s.data, &seen);
    for (i = 0; i < net.tensors[0].count; i++)
        sum += (double)net.tensors[0].gradient[i] * (double)net.tensors[0].gradient[i];
    CHECK(seen.gradient_norm > 0 && near_to((double)seen.gradient_norm / sqrt(sum), 1, NEAR), "a small norm");
    moe_trainer_free(&t);
    moe_net_free(&net);
}

/* The group of a row under row_groups; 3: none. */
static int row_group(const moe_tensor *t, size_t row) {
    if (strstr(t->name, ".experts.") == NULL) return 3;
    return row == 1 ? 2 : row < 2 || strcmp(t->name, "2.experts.down") == 0 ? 1 : 0;
}

static const moe_param_group row_groups[] = {
    {"experts.*[1]", 5, 0, 0}, {"*.experts.*", 7, 1, 1}, {"experts.*", (moe_real)0.5, 0, 0},
    {"2.experts.down[0:4]", 2, -1, 0},
    {"*.experts.*[0:2]", 2, -1, 0}, {"experts.*[1]", 0, 0, 1}};

/* One step of every row against the formula. */
static void check_rows(const samples *s, int optimizer) {
    static const double rate_of[] = {0.5, 2, 0, 1};
    moe_train_config c = descent(24);
    moe_net net = net_of(SPARSE, 7, NULL), before = net_of(SPARSE, 7, NULL);
    moe_net plain = net_of(SPARSE, 7, NULL);
    moe_trainer t, whole;
    moe_step seen;
    double norm = 0.0;
    size_t n_of[4] = {0, 0, 0, 0}, i, j;
    c.optimizer = optimizer;
    c.decay = (moe_real)0.25;
    whole = trainer_of(&plain, &c);
    step(&whole, &s->data, NULL);
    c.groups = row_groups;
    c.n_groups = (int)(sizeof row_groups / sizeof row_groups[0]);
    t = trainer_of(&net, &c);
    step(&t, &s->data, &seen);
    for (i = 0; i < net.n_tensors; i++)
        for (j = 0; j < net.tensors[i].count; j++) {
            const moe_tensor *n = &net.tensors[i];
            double g = (double)n->gradient[j], was = (double)before.tensors[i].data[j];
            int group = row_group(n, j / (n->count / n->shape[0]));
            /* what decay moved is no part of a row of group 1 */
            double moved = (double)plain.tensors[i].data[j] - was, decayed = n->flags & MOE_PARAM_NO_DECAY ? 0 : was;
            if (group == 1) moved += 0.25 * (double)c.rate * decayed;
            n_of[group]++;
            if (group != 2) norm += g * g;
            CHECK(near_to((double)n->data[j] - was, rate_of[group] * moved, NEAR), n->name);
            CHECK(group != 2 || same_bits(&n->data[j], &before.tensors[i].data[j], sizeof n->data[j]), "frozen");
        }
    CHECK(n_of[0] > 0 && n_of[1] > 0 && n_of[2] > 0 && n_of[3] > 0, "every group has rows");
    CHECK(near_to((double)seen.gradient_norm, sqrt(norm), NEAR), "frozen rows take no part in the norm");
    moe_trainer_free(&t);
    moe_trainer_free(&whole);
    moe_net_free(&net);
    moe_net_free(&before);
    moe_net_free(&plain);
}

/* From step freeze_at on the optimizer's momentum and decay do not move a router, or of one with a
   student only the student. */
static void test_frozen_routers(void) {
    static const char *const settings[] = {"n_experts=4 loss_balance=0.1 freeze_at=2 router_bias=1 d_ff=4",
                                           "n_experts=4 loss_distill=0.5 student=1 freeze_at=2 d_ff=4"};
    samples s = samples_of(24, 36);
    moe_train_config c = descent(24);
    int i, at;
    size_t j;
    place(&s);
    c.momentum = 0;
    c.decay = (moe_real)0.25;
    for (i = 0; i < 4; i++) {
        moe_layer_config layer = layer_of(settings[i / 2]);
        moe_net net;
        moe_trainer t;
        c.optimizer = i % 2;
        moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
        moe_net_linear(&net, 6);
        moe_net_mixture(&net, &layer);
        moe_net_linear(&net, CLASSES);
        CHECK_STATUS(moe_net_build(&net, 1, 1, NULL), MOE_OK, "build");
        t = trainer_of(&net, &c);
        for (at = 0; at < 5; at++) {
            const size_t numbers = net.memory_size / sizeof(moe_real) / 2;
            moe_real *values = (moe_real *)grab(numbers, sizeof *values), *moments;
            moments = (moe_real *)grab(numbers, sizeof *moments);
            memcpy(values, net.memory, numbers * sizeof *values);
            memcpy(moments, t.memory, numbers * sizeof *moments);
            step(&t, &s.data, NULL);
            for (j = 0; j < net.n_tensors; j++) {
                const moe_tensor *n = &net.tensors[j];
                size_t first = (size_t)(n->data - net.memory), bytes = n->count * sizeof(moe_real);
                int rests = at >= 2 && strstr(n->name, i < 2 ? "1.router." : "1.router.student") != NULL;
                if (n->flags & MOE_PARAM_STATE) continue;
                CHECK(same_bits(n->data, values + first, bytes) == rests, n->name);
                CHECK(same_bits(t.memory + first, moments + first, bytes) == rests, n->name);
            }
            free(values);
            free(moments);
        }
        moe_trainer_free(&t);
        moe_net_free(&net);
    }
}

/* Frozen rows and their moments keep their bits over steps, and a training that is saved and
   continued ends as one that is not. */
static void check_rows_resumed(const samples *s, int optimizer) {
    moe_train_config c = descent(24);
    moe_net net = net_of(SPARSE, 7, NULL), start = net_of(SPARSE, 7, NULL);
    moe_net other = net_of(SPARSE, 8, NULL);
    moe_trainer t, first, resumed;
    moe_buffer file;
    moe_stream stream;
    size_t moments = optimizer == MOE_OPTIMIZER_ADAMW ? 2 : 1, numbers = moe_net_parameter_count(&net, NULL);
    size_t i, k;
    memset(&file, 0, sizeof file);
    stream = moe_buffer_stream(&file);
    c.optimizer = optimizer;
    c.momentum = (moe_real)0.5;
    c.rate = (moe_real)0.01;
    c.decay = (moe_real)0.25;
    c.clip = (moe_real)0.5;
    first = trainer_of(&start, &c);
    for (i = 0; i < 2; i++) step(&first, &s->data, NULL);
    CHECK_STATUS(moe_trainer_write(&first, &stream, NULL), MOE_OK, "a training without groups");
    c.groups = row_groups;
    c.n_groups = (int)(sizeof row_groups / sizeof row_groups[0]);
    t = trainer_of(&net, &c);
    CHECK_STATUS(moe_trainer_read(&t, file.data, file.size, NULL), MOE_OK, "continued with groups");
    moe_buffer_free(&file);
    stream = moe_buffer_stream(&file);
    for (i = 0; i < 2; i++) step(&t, &s->data, NULL);
    CHECK_STATUS(moe_trainer_write(&t, &stream, NULL), MOE_OK, "and saved");
    for (i = 0; i < 2; i++) step(&t, &s->data, NULL);
    for (i = 0; i < net.n_tensors; i++) {
        const moe_tensor *n = &net.tensors[i];
        size_t row = n->count / n->shape[0], at = (size_t)(n->data - net.memory) + row;
        if (n->shape[0] < 2 || row_group(n, 1) != 2) continue;
        CHECK(same_bits(n->data + row, start.tensors[i].data + row, row * sizeof(moe_real)), "a frozen row");
        for (k = 0; k < moments; k++)
            CHECK(same_bits(t.memory + k * numbers + at, first.memory + k * numbers + at, row * sizeof(moe_real)),
                  "its moments");
    }
    resumed = trainer_of(&other, &c);
    CHECK_STATUS(moe_trainer_read(&resumed, file.data, file.size, NULL), MOE_OK, "read");
    for (i = 0; i < 2; i++) step(&resumed, &s->data, NULL);
    CHECK(trainer_print(&resumed) == trainer_print(&t), "the same bits");
    moe_buffer_free(&file);
    moe_trainer_free(&t);
    moe_trainer_free(&first);
    moe_trainer_free(&resumed);
    moe_net_free(&net);
    moe_net_free(&start);
    moe_net_free(&other);
}

/* A number that is not finite is named by its place in the tensor, not in the rows that learn
   alike. */
static void bad_number_of_rows(const samples *s) {
    moe_net net = net_of(SPARSE, 7, NULL);
    moe_train_config c = descent(24);
    moe_tensor *down = net_tensor(&net, "2.experts.down");
    moe_trainer t;
    moe_error error;
    char words[80];
    c.groups = row_groups;
    c.n_groups = (int)(sizeof row_groups / sizeof row_groups[0]);
    t = trainer_of(&net, &c);
    if (CHECK(down != NULL, "a tensor with groups of rows")) {
        CHECK_STATUS(moe_trainer_accumulate(&t, &s->data, NULL, &error), MOE_OK, "a batch");
        down->gradient[down->count - 2] = (moe_real)NAN;
        CHECK_STATUS(moe_trainer_update(&t, NULL, &error), MOE_ERR_NONFINITE, "NaN in the last row");
        sprintf(words, "2.experts.down: number %lu of the gradient", (unsigned long)(down->count - 2));
        CHECK(strstr(error.message, words) != NULL, error.message);
    }
    moe_trainer_free(&t);
    moe_net_free(&net);
}

/* Learning rates of single experts. */
static void test_rows(void) {
    samples s = samples_of(24, 6);
    place(&s);
    bad_number_of_rows(&s);
    check_rows(&s, MOE_OPTIMIZER_SGD);
    check_rows(&s, MOE_OPTIMIZER_ADAMW);
    check_rows_resumed(&s, MOE_OPTIMIZER_SGD);
    check_rows_resumed(&s, MOE_OPTIMIZER_ADAMW);
}

/* ---- what progress says ---- */

enum { MOST_STEPS = 40 };

/* What a callback was told. */
typedef struct reports {
    moe_progress told[MOST_STEPS];
    int calls;
} reports;

static int write_report(void *ctx, const moe_progress *p) {
    reports *r = (reports *)ctx;
    if (r->calls >= MOST_STEPS) return 1;
    r->told[r->calls++] = *p;
    return 0;
}

/* An epoch of a network that hardly moves has the loss of an evaluation, whatever its batches
   count. */
static void test_means(void) {
    samples s = samples_of(22, 51), test = samples_of(10, 52);
    moe_net net = net_of(SMOOTH, 9, NULL);
    moe_train_config c = descent(6);
    moe_evaluation e, of_test;
    moe_error error;
    reports r;
    place(&s);
    place(&test);
    memset(&r, 0, sizeof r);
    s.labels[1] = s.labels[4] = s.labels[20] = -1;
    c.rate = (moe_real)1e-12;
    c.epochs = 2;
    c.accumulate = 3;
    c.progress = write_report;
    c.progress_ctx = &r;
    CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &e, &error), MOE_OK, "evaluate");
    CHECK_STATUS(moe_evaluate(&net, &test.data, 0, &of_test, &error), MOE_OK, "evaluate");
    CHECK_STATUS(moe_fit(&net, &s.data, &test.data, &c, &error), MOE_OK, "fit");
    CHECK(r.calls == 4 && near_to((double)r.told[1].loss, (double)e.loss, NEAR) &&
              near_to((double)r.told[3].loss, (double)e.loss, NEAR),
          "the mean of an epoch is that of all that count");
    CHECK(r.told[1].test.n == 10 && near_to((double)r.told[1].test.loss, (double)of_test.loss, NEAR) &&
              near_to((double)r.told[1].test.accuracy, (double)of_test.accuracy, NEAR),
          "the test is an evaluation");
    moe_net_free(&net);
}

/* A step of moe_fit uses the mean gradient of its batches: where all samples are equal, that of one
   of them, also in the last step, which has fewer batches. */
static void test_mean_gradients(void) {
    samples s = samples_of(18, 53);
    moe_net net = net_of(SMOOTH, 9, NULL), one = net_of(SMOOTH, 9, NULL);
    moe_train_config c = descent(6);
    moe_trainer t = trainer_of(&one, &c);
    moe_step seen;
    moe_error error;
    reports r;
    size_t i;
    place(&s);
    memset(&r, 0, sizeof r);
    for (i = 1; i < 18; i++) {
        s.labels[i] = s.labels[0];
        memcpy(s.x + i * D, s.x, D * sizeof(moe_real));
    }
    c.epochs = 1;
    c.accumulate = 2;
    c.progress = write_report;
    c.progress_ctx = &r;
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_OK, "fit");
    s.data.n = 1;
    for (i = 0; i < 2; i++) {
        step(&t, &s.data, &seen);
        CHECK_NEAR(r.told[i].gradient_norm, seen.gradient_norm, NEAR);
    }
    CHECK(r.calls == 2 && seen.gradient_norm > (moe_real)0.05, "two steps");
    CHECK_NEAR(net_distance(&net, &one), 0, NEAR);
    moe_trainer_free(&t);
    moe_net_free(&net);
    moe_net_free(&one);
}

/* ---- settings that are refused ---- */

static void expect_refused(const moe_train_config *c, moe_status wanted, const char *words, int line) {
    moe_net net = net_of(SPARSE, 1, NULL);
    moe_trainer t, untouched;
    moe_error error;
    memset(&t, 7, sizeof t);
    untouched = t;
    error.message[0] = '\0';
    CHECK_AT(line, moe_trainer_init(&t, &net, c, &error) == wanted, "refused");
    if (!CHECK_AT(line, strstr(error.message, words) != NULL, words)) printf("        %s\n", error.message);
    CHECK_AT(line, same_bits(&t, &untouched, sizeof t), "the trainer is untouched");
    moe_net_free(&net);
}

#define REFUSED(words) (expect_refused(&c, MOE_ERR_CONFIG, words, __LINE__), c = descent(8))

static void test_refused_settings(void) {
    moe_train_config c = descent(8);
    moe_param_group groups[2];
    memset(groups, 0, sizeof groups);
    groups[0].pattern = groups[1].pattern = "*.weight";
    c.accumulate = -1;
    REFUSED("accumulate = -1");
    c.schedule = MOE_SCHEDULE_COUNT;
    REFUSED("schedule = 2");
    c.warmup = -3;
    c.total_steps = 4;
    REFUSED("warmup = -3");
    c.warmup = 3;
    REFUSED("warmup = 3: a trainer needs total_steps");
    c.total_steps = -1;
    REFUSED("total_steps = -1");
    c.n_groups = 5000;
    c.groups = groups;
    REFUSED("n_groups = 5000");
    c.n_groups = 2;
    REFUSED("groups must not be NULL: n_groups = 2");
    c.evaluate_every = -1;
    REFUSED("evaluate_every = -1");
    c.checkpoint_every = -1;
    REFUSED("checkpoint_every = -1");
    c.resume = 2;
    REFUSED("resume = 2");
    groups[1].rate = -1;
    c.groups = groups;
    c.n_groups = 2;
    REFUSED("groups[1]: rate = -1");
    groups[1].rate = 0;
    groups[1].decay = (moe_real)HUGE_VAL;
    c.groups = groups;
    c.n_groups = 2;
    REFUSED("groups[1]: decay");
    groups[1].decay = 0;
    groups[1].frozen = 2;
    c.groups = groups;
    c.n_groups = 2;
    REFUSED("groups[1]: frozen = 2");
    groups[1].frozen = 0;
    groups[1].pattern = NULL;
    c.groups = groups;
    c.n_groups = 2;
    REFUSED("groups[1]: pattern must not be NULL");
    groups[1].pattern = "*.weigth";
    c.groups = groups;
    c.n_groups = 2;
    REFUSED("groups[1]: pattern = '*.weigth' fits the name of no tensor");
    groups[1].pattern = "0.weight*?";
    c.groups = groups;
    c.n_groups = 2;
    REFUSED("fits the name of no tensor");
}

/* A star in the pattern of a group stands for nothing, too. */
static void test_stars(void) {
    static const char *const rows[] = {"0.weight*", "*0.weight", "0*.**weight", "0.weight*[0:6]"};
    moe_train_config c = descent(8);
    moe_param_group group;
    moe_net net = net_of(SPARSE, 1, NULL);
    moe_trainer t;
    size_t i;
    memset(&group, 0, sizeof group);
    c.groups = &group;
    c.n_groups = 1;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        group.pattern = rows[i];
        if (CHECK_STATUS(moe_trainer_init(&t, &net, &c, NULL), MOE_OK, rows[i])) moe_trainer_free(&t);
    }
    moe_net_free(&net);
}

static void test_refused_rows(void) {
    static const char *const rows[] = {"experts.*[", "experts.*[3", "experts.*[-1]", "experts.*[2:2]",
                                       "experts.*[:2]", "experts.*[1:]", "experts.*[1]x", "experts.*[01]",
                                       "experts.*[18446744073709551615]", "experts.*[2:5]"};
    moe_train_config c = descent(8);
    moe_param_group group;
    size_t i, n = sizeof rows / sizeof rows[0];
    memset(&group, 0, sizeof group);
    for (i = 0; i < n; i++) {
        group.pattern = rows[i];
        c.groups = &group;
        c.n_groups = 1;
        REFUSED(i + 1 < n ? "[ begins rows, as [3] or" : "'experts.*[2:5]' fits the name of no tensor with these rows");
    }
}

/* ---- rows without a label ---- */

static void cross_entropy_of_some(void) {
    moe_real dy[4 * CLASSES], loss;
    moe_real y[4 * CLASSES] = {1, 2, 3, 0, 0, 0, 2, 1, 1, 0, 1, 0};
    int32_t labels[4] = {2, -1, 0, -7};
    size_t i;
    for (i = 0; i < 4 * CLASSES; i++) dy[i] = 9;
    loss = moe_cross_entropy(4, CLASSES, y, labels, dy);
    CHECK(near_to((double)loss, (log(exp(1.0) + exp(2.0) + exp(3.0)) - 3 + log(exp(2.0) + 2 * exp(1.0)) - 2) / 2, NEAR),
          "the mean of two rows");
    for (i = 0; i < CLASSES; i++)
        CHECK(!(fabs((double)dy[CLASSES + i]) > 0) && !(fabs((double)dy[3 * CLASSES + i]) > 0),
              "no gradient without a label");
    CHECK(near_to((double)dy[2], (exp(3.0) / (exp(1.0) + exp(2.0) + exp(3.0)) - 1) / 2, NEAR),
          "over the number of labels");
    labels[0] = labels[2] = -1;
    loss = moe_cross_entropy(4, CLASSES, y, labels, dy);
    CHECK(!(fabs((double)loss) > 0), "no label, no loss");
    for (i = 0; i < 4 * CLASSES; i++) CHECK(!(fabs((double)dy[i]) > 0), "and no gradient");
}

/* More classes than the blocks of 64 in which they are summed, the largest in every block. */
static void cross_entropy_of_many(void) {
    enum { MANY = 150 };
    moe_real y[MANY], dy[MANY];
    size_t best, j;
    for (best = 0; best < MANY; best += 37) {
        double sum = 0.0, loss;
        int32_t label = (int32_t)((best + 70) % MANY);
        for (j = 0; j < MANY; j++) y[j] = (moe_real)(j * 7 % 11) / 16;
        y[best] = 2;
        for (j = 0; j < MANY; j++) sum += exp((double)y[j]);
        loss = (double)moe_cross_entropy(1, MANY, y, &label, dy);
        CHECK(near_to(loss, log(sum) - (double)y[label], NEAR), "the loss of many classes");
        for (j = 0; j < MANY; j++)
            CHECK(near_to((double)dy[j], exp((double)y[j]) / sum - (j == (size_t)label), NEAR), "and its gradient");
    }
}

/* A classical mixture reads every row. */
static void classical_rows(samples *s, moe_net *all, moe_train_config *c) {
    moe_evaluation e;
    moe_error error;
    moe_layer_config config = layer_of("n_experts=3 select=dense weight=raw d_ff=4 d_out=3");
    moe_net_init(all, D, MOE_KERNELS_C, NULL);
    all->mixture_losses = moe_classic_losses();
    moe_net_mixture(all, &config);
    CHECK_STATUS(moe_net_build(all, 1, 1, &error), MOE_OK, "build");
    c->criterion = MOE_CRITERION_EXPECTATION;
    CHECK_STATUS(moe_fit(all, &s->data, NULL, c, &error), MOE_ERR_ARGUMENT, "a row without a label");
    CHECK(strstr(error.message, "labels[0] = -1: must be 0 to 2") != NULL, "by row");
    CHECK_STATUS(moe_evaluate(all, &s->data, MOE_CRITERION_EXPECTATION, &e, &error), MOE_ERR_ARGUMENT,
                 "in evaluation too");
    moe_net_free(all);
}

static int keep_progress(void *ctx, const moe_progress *p) {
    *(moe_progress *)ctx = *p;
    return 0;
}

/* Routers see all samples: the mean of their losses over an epoch counts those without a label. */
static void router_losses_of_some(const samples *of) {
    samples s = *of;
    moe_net one = net_of(SPARSE, 9, NULL), two = net_of(SPARSE, 9, NULL);
    moe_train_config c = descent(24);
    moe_trainer t = trainer_of(&one, &c);
    moe_progress last;
    moe_step seen;
    moe_error error;
    place(&s);
    step(&t, &s.data, &seen);
    memset(&last, 0, sizeof last);
    c.epochs = 1;
    c.progress = keep_progress;
    c.progress_ctx = &last;
    CHECK_STATUS(moe_fit(&two, &s.data, NULL, &c, &error), MOE_OK, "fit");
    CHECK(seen.router_loss > 0 && near_to((double)last.router_loss, (double)seen.router_loss, NEAR),
          "an epoch's mean counts all samples");
    moe_trainer_free(&t);
    moe_net_free(&one);
    moe_net_free(&two);
}

/* Of equal outputs the first is the answer, as of equal logits in moe_sample. */
static void equal_outputs(const samples *of) {
    samples s = *of;
    moe_net net = net_of(SMOOTH, 9, NULL);
    moe_evaluation e;
    size_t i, first = 0;
    place(&s);
    for (i = 0; i < net.n_tensors; i++) memset(net.tensors[i].data, 0, net.tensors[i].count * sizeof(moe_real));
    for (i = 0; i < s.data.n; i++) {
        s.labels[i] = i % 4 == 3;
        first += s.labels[i] == 0;
    }
    CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &e, NULL), MOE_OK, "evaluate");
    CHECK(near_to((double)e.accuracy, (double)first / (double)s.data.n, NEAR), "the first of equal outputs");
    moe_net_free(&net);
}

static void test_unlabelled(void) {
    samples s = samples_of(24, 8), few = samples_of(24, 8);
    moe_net all = net_of(SMOOTH, 9, NULL), part = net_of(SMOOTH, 9, NULL);
    moe_train_config c = descent(24);
    moe_trainer a, b;
    moe_step seen, wanted;
    moe_evaluation e, less;
    moe_error error;
    uint64_t before;
    size_t i, n = 0;
    place(&s);
    place(&few);
    cross_entropy_of_some();
    cross_entropy_of_many();
    equal_outputs(&s);

    for (i = 0; i < 24; i++) {
        if (i % 5 == 1 || i > 20) s.labels[i] = -1 - (int32_t)i;
        else {
            few.labels[n] = s.labels[i];
            memcpy(few.x + n * D, s.x + i * D, D * sizeof(moe_real));
            n++;
        }
    }
    few.data.n = n;
    router_losses_of_some(&s);
    a = trainer_of(&all, &c);
    b = trainer_of(&part, &c);
    step(&a, &s.data, &seen);
    step(&b, &few.data, &wanted);
    CHECK(near_to((double)seen.loss, (double)wanted.loss, NEAR) &&
              near_to((double)seen.gradient_norm, (double)wanted.gradient_norm, NEAR),
          "loss and norm");
    CHECK(net_distance(&all, &part) < NEAR, "the step is that of the labeled rows alone");
    CHECK_STATUS(moe_evaluate(&all, &s.data, 0, &e, &error), MOE_OK, "evaluate");
    CHECK_STATUS(moe_evaluate(&all, &few.data, 0, &less, &error), MOE_OK, "evaluate");
    CHECK(e.n == n && less.n == n && near_to((double)e.loss, (double)less.loss, NEAR) &&
              near_to((double)e.accuracy, (double)less.accuracy, NEAR),
          "evaluation counts labeled rows");
    for (i = 0; i < 24; i++) s.labels[i] = -1;
    before = net_print(&all);
    step(&a, &s.data, &seen);
    CHECK(!(seen.loss > 0) && !(seen.gradient_norm > 0) && net_print(&all) == before,
          "nothing to learn, nothing learned");
    CHECK_STATUS(moe_evaluate(&all, &s.data, 0, &e, &error), MOE_OK, "evaluate");
    CHECK(e.n == 0 && !(e.loss > 0) && !(e.accuracy > 0), "nothing to count");
    c.epochs = 1;
    CHECK_STATUS(moe_fit(&all, &s.data, &s.data, &c, &error), MOE_OK, "fit");
    CHECK(net_print(&all) == before, "nothing learned");
    moe_trainer_free(&a);
    moe_trainer_free(&b);
    moe_net_free(&all);
    moe_net_free(&part);

    classical_rows(&s, &all, &c);
}

/* ---- sequences ---- */

/* What a router saw: column 0 of x is the number of the sample. */
typedef struct probe {
    size_t length, calls, rows, largest, seen[1300];
    int wrong, ids;
    int32_t first[64]; /* the sequences in the order in which training passes met them */
    size_t n_first;
} probe;

static moe_status probe_score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                              moe_real *logits) {
    probe *p = (probe *)ctx;
    size_t t, i, d = (size_t)router->config.d_model, n = call->n_tokens;
    if (call->sequences == NULL || call->n_sequences != n / p->length) {
        p->wrong = 1;
        return MOE_OK;
    }
    p->calls++;
    p->rows += n;
    if (n > p->largest) p->largest = n;
    for (i = 0; i <= call->n_sequences; i++) p->wrong |= call->sequences[i] != (int32_t)(i * p->length);
    for (t = 0; t < n; t++) {
        size_t sample = (size_t)((double)u[t * d] + 0.5), before = t > 0 ? (size_t)((double)u[(t - 1) * d] + 0.5) : 0;
        p->seen[sample]++;
        p->wrong |= sample % p->length != t % p->length || (t % p->length > 0 && sample != before + 1);
        if (p->ids) p->wrong |= call->token_ids == NULL || call->token_ids[t] != (int32_t)sample;
        if (call->training && sample % p->length == 0 && p->n_first < 64) p->first[p->n_first++] = (int32_t)sample;
    }
    for (i = 0; i < n * (size_t)router->config.n_experts; i++) logits[i] = (moe_real)(i % 3);
    return MOE_OK;
}

static moe_net probe_net(probe *p) {
    moe_net net;
    moe_error error;
    moe_layer_config c = layer_of("n_experts=4 score=custom d_ff=4");
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &c);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    net.modules[0].layer.router.custom.score = probe_score;
    net.modules[0].layer.router.custom.ctx = p;
    return net;
}

/* p: the probe in the network. */
static void step_sequences(samples *s, moe_net *net, probe *p, moe_train_config *c, moe_evaluation *e, moe_call *call) {
    moe_error error;
    int32_t offsets[3] = {0, 2, 8};
    moe_trainer t;
    memset(p, 0, sizeof *p);
    p->length = 4;
    p->ids = 1;
    c->batch = 30;
    CHECK_STATUS(moe_fit(net, &s->data, NULL, c, &error), MOE_OK, "all sequences in one batch, whatever its size");
    CHECK(!p->wrong && p->calls == 2, "one batch in each epoch");
    c->batch = 6;
    CHECK_STATUS(moe_fit(net, &s->data, NULL, c, &error), MOE_ERR_ARGUMENT, "batch");
    CHECK(strstr(error.message, "batch = 6: must be a multiple of length = 4") != NULL, error.message);
    s->data.length = 3;
    CHECK_STATUS(moe_fit(net, &s->data, NULL, c, &error), MOE_ERR_ARGUMENT, "n");
    CHECK(strstr(error.message, "n = 20: must be a multiple of length = 3") != NULL, error.message);
    CHECK_STATUS(moe_evaluate(net, &s->data, 0, e, &error), MOE_ERR_ARGUMENT, "n in evaluation");
    s->data.length = 4;
    s->token_ids[3] = -2;
    CHECK_STATUS(moe_fit(net, &s->data, NULL, c, &error), MOE_ERR_ARGUMENT, "a token id below 0");
    CHECK(strstr(error.message, "token_ids[3] = -2") != NULL, error.message);
    s->token_ids[3] = 3;

    memset(call, 0, sizeof *call); /* sequences of the call's own count before */
    call->sequences = offsets;
    call->n_sequences = 2;
    t = trainer_of(net, c);
    s->data.n = 8;
    s->data.call = call;
    CHECK_STATUS(moe_trainer_step(&t, &s->data, NULL, &error), MOE_ERR_ARGUMENT, "a step takes its batch");
    moe_trainer_free(&t);
    c->batch = 8;
    t = trainer_of(net, c);
    p->wrong = 0;
    CHECK_STATUS(moe_trainer_step(&t, &s->data, NULL, &error), MOE_OK, "a step");
    CHECK(p->wrong, "the probe sees other sequences");
    p->wrong = 0;
    s->data.call = NULL;
    CHECK_STATUS(moe_trainer_step(&t, &s->data, NULL, &error), MOE_OK, "a step");
    CHECK(!p->wrong, "and those of length without them");
    moe_trainer_free(&t);
}

static void test_sequences(void) {
    static const struct {
        size_t n, length, calls, largest; /* of an evaluation */
    } cases[] = {{1000, 200, 3, 400}, {1200, 600, 2, 600}, {1200, 1, 3, 512}, {12, 4, 1, 12}, {1022, 511, 2, 511}};
    samples s = samples_of(20, 10);
    moe_net net;
    moe_train_config c = descent(8);
    moe_evaluation e;
    moe_error error;
    probe p;
    size_t i;
    moe_call call;
    place(&s);
    for (i = 0; i < 20; i++) s.x[i * D] = (moe_real)i;
    s.data.length = 4;
    s.data.token_ids = s.token_ids;
    memset(&p, 0, sizeof p);
    p.length = 4;
    p.ids = 1;
    net = probe_net(&p);
    c.epochs = 2;
    c.rate = (moe_real)1e-6;
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_OK, "fit");
    CHECK(!p.wrong && p.calls == 6 && p.rows == 40 && p.largest == 8,
          "batches of two whole sequences, the last of one");
    for (i = 0; i < 20; i++) CHECK(p.seen[i] == 2, "every sample once in an epoch");
    CHECK(p.n_first == 10 && !same_bits(p.first, p.first + 5, 5 * sizeof p.first[0]), "the sequences are shuffled");
    step_sequences(&s, &net, &p, &c, &e, &call);

    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        moe_real *x = (moe_real *)grab(cases[i].n * D, sizeof *x);
        int32_t *labels = (int32_t *)grab(cases[i].n, sizeof *labels);
        moe_data data;
        size_t k;
        memset(&data, 0, sizeof data);
        memset(&p, 0, sizeof p);
        for (k = 0; k < cases[i].n; k++) x[k * D] = (moe_real)k;
        data.n = cases[i].n;
        data.length = p.length = cases[i].length;
        data.x = x;
        data.labels = labels;
        CHECK_STATUS(moe_evaluate(&net, &data, 0, &e, &error), MOE_OK, "evaluate");
        CHECK(!p.wrong && p.calls == cases[i].calls && p.largest == cases[i].largest && p.rows == cases[i].n &&
                  e.n == cases[i].n,
              "as many as fit into 512");
        free(x);
        free(labels);
    }
    moe_net_free(&net);
}

/* Soft routers bound the sequences of a pass; those that hash read token ids. */
static void test_needs(void) {
    samples s = samples_of(24, 11);
    moe_net net;
    moe_layer_config soft = layer_of("n_experts=3 select=soft soft_sequences=2 d_ff=4");
    moe_layer_config hash = layer_of("n_experts=3 top_k=1 select=hash weight=uniform table_size=24 d_ff=4");
    moe_train_config c = descent(8);
    moe_evaluation e, alone;
    moe_error error;
    place(&s);
    c.epochs = 1;
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &soft);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    s.data.length = 4;
    CHECK_STATUS(moe_fit(&net, &s.data, &s.data, &c, &error), MOE_OK, "two sequences in a batch");
    CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &e, &error), MOE_OK, "evaluation takes two at a time");
    {
        double sum = 0.0;
        size_t i;
        for (i = 0; i < 24; i += 4) { /* each sequence for itself gives the same */
            moe_data part = s.data;
            part.n = 4;
            part.x += i * D;
            part.labels += i;
            CHECK_STATUS(moe_evaluate(&net, &part, 0, &alone, &error), MOE_OK, "evaluate");
            sum += (double)alone.loss / 6;
        }
        CHECK(near_to((double)e.loss, sum, NEAR), "sequences do not see each other");
    }
    s.data.length = 2;
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_ERR_ARGUMENT, "four sequences");
    CHECK(strstr(error.message, "a batch has 4 sequences, but a router's soft_sequences allows 2") != NULL,
          error.message);
    moe_net_free(&net);

    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &hash);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    s.data.length = 0;
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_ERR_ARGUMENT, "no token ids");
    CHECK(strstr(error.message, "needs_token_ids") != NULL, error.message);
    CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &e, &error), MOE_ERR_ARGUMENT, "no token ids");
    CHECK(strstr(error.message, "needs_token_ids") != NULL, error.message);
    s.data.token_ids = s.token_ids;
    CHECK_STATUS(moe_fit(&net, &s.data, &s.data, &c, &error), MOE_OK, "with token ids");
    CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &e, &error), MOE_OK, "with token ids");
    s.token_ids[9] = 24;
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_ERR_ARGUMENT, "beyond the table");
    CHECK(strstr(error.message, "token_ids[9] = 24: must be 0 to 23") != NULL, error.message);
    moe_net_free(&net);
}

/* Token ids are bounded by the embedding and by each table, wherever it is. */
static void test_token_ids(void) {
    static const int sizes[3][3] = {{9, 20, 30}, {20, 9, 30}, {30, 20, 9}}; /* rows, and of two tables */
    samples s = samples_of(24, 13);
    moe_evaluation e;
    moe_error error;
    size_t i;
    int k;
    place(&s);
    s.data.x = NULL;
    s.data.token_ids = s.token_ids;
    for (k = 0; k < 3; k++) {
        moe_net net;
        moe_layer_config hash = layer_of("n_experts=3 top_k=1 select=hash weight=uniform d_ff=4");
        moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
        moe_net_embedding(&net, sizes[k][0], 4);
        hash.router.table_size = sizes[k][1];
        moe_net_mixture(&net, &hash);
        hash.router.table_size = sizes[k][2];
        moe_net_mixture(&net, &hash);
        moe_net_linear(&net, CLASSES);
        CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK, "build");
        for (i = 0; i < 24; i++) s.token_ids[i] = (int32_t)(i % 9);
        CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &e, &error), MOE_OK, "the largest id");
        s.token_ids[9] = 9;
        CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &e, &error), MOE_ERR_ARGUMENT, "beyond the smallest table");
        CHECK(strstr(error.message, "token_ids[9] = 9: must be 0 to 8") != NULL, error.message);
        moe_net_free(&net);
    }
}

/* A router reads the attention before it, not one behind it. */
static void test_attention_before(void) {
    samples s = samples_of(24, 14);
    moe_layer_config c = layer_of("n_experts=3 top_k=1 weight=raw refine=attention heads=1 d_ff=4");
    moe_evaluation e;
    moe_error error;
    int before;
    place(&s)->length = 4;
    for (before = 0; before < 2; before++) {
        moe_net net;
        moe_net_init(&net, D, MOE_KERNELS_C, NULL);
        moe_net_linear(&net, 4);
        if (before) moe_net_attention(&net, NULL);
        moe_net_mixture(&net, &c);
        if (!before) moe_net_attention(&net, NULL);
        moe_net_linear(&net, CLASSES);
        CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK, error.message);
        CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &e, &error), before ? MOE_OK : MOE_ERR_ARGUMENT, error.message);
        if (!before)
            CHECK(strstr(error.message, "module 1 (mixture): its router has the trait needs_attention") != NULL,
                  error.message);
        moe_net_free(&net);
    }
}

/* A convolution mixes neighbors, so samples that are shuffled one by one are no sequence for it,
   nor for attention. */
static void test_convolution_needs(void) {
    samples s = samples_of(24, 12);
    moe_train_config c = descent(8);
    moe_evaluation e;
    moe_error error;
    moe_module m;
    moe_net net;
    place(&s);
    c.epochs = 1;
    memset(&m, 0, sizeof m);
    m.kind = MOE_MODULE_CONVOLUTION;
    m.length = 3;
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_append(&net, &m);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_ERR_ARGUMENT, "no length");
    CHECK(strstr(error.message, "length = 0: module 0") != NULL, error.message);
    CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &e, &error), MOE_ERR_ARGUMENT, "no length");
    s.data.length = 4;
    CHECK_STATUS(moe_fit(&net, &s.data, &s.data, &c, &error), MOE_OK, "with length");
    moe_net_free(&net);

    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_linear(&net, 4);
    moe_net_attention(&net, NULL);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    s.data.length = 0;
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_ERR_ARGUMENT, "no length");
    CHECK(strstr(error.message, "length = 0: module 1") != NULL, error.message);
    CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &e, &error), MOE_ERR_ARGUMENT, "no length");
    moe_net_free(&net);
}

/* Sequences longer than a network has places for are found before the first step, in the test set
   too. */
static void test_too_long(void) {
    samples s = samples_of(24, 81);
    moe_train_config c = descent(8);
    moe_evaluation e;
    moe_data longer;
    moe_trainer trainer;
    moe_call call;
    const int32_t offsets[] = {0, 2, 6};
    moe_net net;
    moe_error error;
    uint64_t print;
    c.epochs = 1;
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_positions(&net, 4);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    place(&s)->length = 4;
    longer = s.data;
    longer.length = 6;
    print = net_print(&net);
    CHECK_STATUS(moe_fit(&net, &s.data, &longer, &c, &error), MOE_ERR_ARGUMENT, "a test set of longer sequences");
    CHECK(strstr(error.message, "length = 6: module 0 (positions) has most = 4") != NULL, error.message);
    CHECK(net_print(&net) == print, "refused before the first step");
    CHECK_STATUS(moe_evaluate(&net, &longer, 0, &e, &error), MOE_ERR_ARGUMENT, "longer sequences");
    CHECK(strstr(error.message, "length = 6: ") != NULL, error.message);
    longer.n = longer.length = 5; /* by one */
    CHECK_STATUS(moe_evaluate(&net, &longer, 0, &e, &error), MOE_ERR_ARGUMENT, "longer by one");
    CHECK(strstr(error.message, "length = 5: module 0 (positions) has most = 4") != NULL, error.message);
    longer.n = 24;
    longer.length = 2;
    CHECK_STATUS(moe_fit(&net, &s.data, &longer, &c, &error), MOE_OK, "a test set of shorter ones");
    longer.n = longer.length = 6;
    memset(&call, 0, sizeof call);
    longer.call = &call;
    call.sequences = offsets;
    call.n_sequences = 2;
    if (CHECK_STATUS(moe_trainer_init(&trainer, &net, &c, &error), MOE_OK)) {
        CHECK_STATUS(moe_trainer_step(&trainer, &longer, NULL, &error), MOE_OK, "sequences of the call");
        call.sequences = NULL;
        CHECK_STATUS(moe_trainer_step(&trainer, &longer, NULL, &error), MOE_ERR_ARGUMENT, "the same without them");
        moe_trainer_free(&trainer);
    }
    moe_net_free(&net);
}

/* ---- checkpoints ---- */

static moe_buffer written(const moe_trainer *t) {
    moe_buffer b;
    moe_stream s;
    moe_error error;
    memset(&b, 0, sizeof b);
    s = moe_buffer_stream(&b);
    if (!CHECK_STATUS(moe_trainer_write(t, &s, &error), MOE_OK, "write")) printf("        %s\n", error.message);
    return b;
}

static moe_train_config usual(int optimizer) {
    moe_train_config c;
    memset(&c, 0, sizeof c);
    c.optimizer = optimizer;
    c.batch = 12;
    c.rate = (moe_real)0.01;
    c.decay = (moe_real)0.01;
    c.clip = 1;
    c.seed = 5;
    return c;
}

/* A trainer that reads a checkpoint goes on with the bits of the one that wrote it. */
static void test_checkpoints(void) {
    samples s = samples_of(12, 12);
    int optimizer, which, i;
    place(&s);
    for (optimizer = 0; optimizer < MOE_OPTIMIZER_COUNT; optimizer++)
        for (which = 0; which < KINDS; which++) {
            moe_net net = net_of(which, 13, NULL), other = net_of(which, 14, NULL), read;
            moe_train_config c = usual(optimizer);
            moe_trainer a = trainer_of(&net, &c), b = trainer_of(&other, &c);
            moe_buffer file, again, plain;
            moe_stream stream;
            moe_error error;
            memset(&plain, 0, sizeof plain);
            for (i = 0; i < 4; i++) {
                step(&a, &s.data, NULL);
                a.rate *= (moe_real)0.9;
            }
            for (i = 0; i < 4; i++) a.position[i] = UINT64_MAX - (uint64_t)i;
            file = written(&a);
            CHECK_STATUS(moe_trainer_accumulate(&a, &s.data, NULL, &error), MOE_OK, "accumulate");
            stream = moe_buffer_stream(&plain);
            CHECK_STATUS(moe_trainer_write(&a, &stream, &error), MOE_ERR_STATE, "not between steps");
            CHECK(plain.size == 0, "nothing is written");
            CHECK_STATUS(moe_trainer_save(&a, path[0], &error), MOE_ERR_STATE, "not between steps");
            CHECK_STATUS(moe_trainer_read(&a, file.data, file.size, &error), MOE_OK,
                         "read: back to before the accumulated batch");
            step(&b, &s.data, NULL);
            step(&b, &s.data, NULL);
            if (!CHECK_STATUS(moe_trainer_read(&b, file.data, file.size, &error), MOE_OK, "read"))
                printf("        %s\n", error.message);
            CHECK(trainer_print(&a) == trainer_print(&b) && b.steps == 4 && b.position[3] == UINT64_MAX - 3,
                  "all that it keeps");
            again = written(&b);
            CHECK(again.size == file.size && same_bits(again.data, file.data, file.size), "the same bytes");
            CHECK_STATUS(moe_net_read(&read, file.data, file.size, 0, 0, NULL, &error), MOE_OK, "a net reads it");
            CHECK(net_print(&read) == net_print(&net), "the same net");
            CHECK_STATUS(moe_net_write(&read, &stream, &error), MOE_OK, "write");
            CHECK_STATUS(moe_trainer_read(&b, plain.data, plain.size, &error), MOE_ERR_FORMAT,
                         "the file of a net is no checkpoint");
            CHECK(strstr(error.message, "moe.trainer") != NULL, error.message);
            for (i = 0; i < 3; i++) {
                step(&a, &s.data, NULL);
                step(&b, &s.data, NULL);
            }
            CHECK(trainer_print(&a) == trainer_print(&b), "the steps after it");
            CHECK_STATUS(moe_trainer_save(&a, path[0], &error), MOE_OK, "save");
            step(&a, &s.data, NULL);
            CHECK_STATUS(moe_trainer_load(&a, path[0], &error), MOE_OK, "load");
            CHECK(trainer_print(&a) == trainer_print(&b), "by a file");
            moe_buffer_free(&file);
            moe_buffer_free(&again);
            moe_buffer_free(&plain);
            moe_trainer_free(&a);
            moe_trainer_free(&b);
            moe_net_free(&net);
            moe_net_free(&other);
            moe_net_free(&read);
        }
    remove(path[0]);
}

/* A trainer's workspace is that of a batch, the gradient of its outputs and where its sequences
   begin. */
static void test_workspace(void) {
    moe_net net = net_of(SPARSE, 17, NULL);
    moe_train_config c = usual(MOE_OPTIMIZER_ADAMW);
    moe_trainer t = trainer_of(&net, &c);
    size_t bytes = 0;
    CHECK_STATUS(moe_net_work_size(&net, t.most, 1, &bytes), MOE_OK);
    bytes += t.most * ((size_t)net.d_out * sizeof(moe_real) + sizeof(int32_t));
    CHECKF(t.most > 0 && t.work_size >= bytes && t.work_size <= bytes + 64, "%lu bytes, at least %lu",
           (unsigned long)t.work_size, (unsigned long)bytes);
    moe_trainer_free(&t);
    moe_net_free(&net);
}

/* The text of a checkpoint's settings has fewer than 800 characters; more is not read in part. */
static void test_long_text(void) {
    samples s = samples_of(12, 16);
    moe_net net = net_of(SPARSE, 17, NULL);
    moe_train_config c = usual(MOE_OPTIMIZER_ADAMW);
    moe_trainer t = trainer_of(&net, &c);
    char text[801];
    moe_metadata entry;
    moe_buffer file;
    moe_stream stream;
    moe_error error;
    place(&s);
    memset(&file, 0, sizeof file);
    memset(text, 'x', sizeof text);
    text[800] = '\0';
    stream = moe_buffer_stream(&file);
    entry.key = "moe.trainer";
    entry.value = text;
    CHECK_STATUS(moe_file_write(&stream, net.tensors, net.n_tensors, &entry, 1, NULL, &error), MOE_OK, "write");
    CHECK_STATUS(moe_trainer_read(&t, file.data, file.size, &error), MOE_ERR_FORMAT, "read");
    CHECK(strstr(error.message, "the text is too long") != NULL, error.message);
    moe_buffer_free(&file);
    moe_trainer_free(&t);
    moe_net_free(&net);
}

/* A layer that was packed computes with the weights that a checkpoint brings, not with those that
   were packed. */
static void test_packed_checkpoint(void) {
    samples s = samples_of(12, 16);
    moe_net net = net_of(SPARSE, 17, NULL), read;
    moe_train_config c = usual(MOE_OPTIMIZER_ADAMW);
    moe_trainer t = trainer_of(&net, &c);
    moe_layer *layer = &net.modules[2].layer;
    moe_buffer file = written(&t);
    moe_evaluation packed, got, wanted;
    moe_error error;
    size_t bytes = 0;
    void *memory;
    int i;
    place(&s);
    for (i = 0; i < 3; i++) step(&t, &s.data, NULL);
    CHECK_STATUS(moe_layer_pack_size(layer, MOE_TYPE_REAL, 0, &bytes, NULL), MOE_OK, "size");
    memory = grab(1, bytes);
    CHECK_STATUS(moe_layer_pack(layer, MOE_TYPE_REAL, memory, bytes, &error), MOE_OK, "pack");
    CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &packed, &error), MOE_OK, "packed");
    CHECK_STATUS(moe_trainer_read(&t, file.data, file.size, &error), MOE_OK, "read");
    CHECK_STATUS(moe_evaluate(&net, &s.data, 0, &got, &error), MOE_OK, "with the weights of the checkpoint");
    CHECK_STATUS(moe_net_read(&read, file.data, file.size, 0, 0, NULL, &error), MOE_OK, "a net reads it");
    CHECK_STATUS(moe_evaluate(&read, &s.data, 0, &wanted, &error), MOE_OK, "the same weights");
    CHECK(same_reals(&got.loss, &wanted.loss, 1) && !same_reals(&packed.loss, &wanted.loss, 1), "the same loss");
    CHECK(!layer->is_packed, "no longer packed");
    free(memory);
    moe_buffer_free(&file);
    moe_trainer_free(&t);
    moe_net_free(&net);
    moe_net_free(&read);
}

/* Reading is refused by name, and leaves trainer and net as they were. */
static void expect_unread(moe_trainer *t, const moe_buffer *file, moe_status wanted, const char *words, int line) {
    uint64_t before = trainer_print(t);
    moe_error error;
    moe_status status;
    error.message[0] = '\0';
    status = moe_trainer_read(t, file->data, file->size, &error);
    CHECK_STATUS_AT(line, status, wanted, words);
    if (!CHECK_AT(line, strstr(error.message, words) != NULL, words)) printf("        %s\n", error.message);
    CHECK_AT(line, trainer_print(t) == before, "trainer and net are as they were");
}

/* A checkpoint of the trainer with another text, and n_moments of its moments, the last of them
   named `last` where that is not NULL. */
static moe_buffer forged(const moe_trainer *t, const char *text, size_t n_moments, const char *last, size_t shortened) {
    static const char *const names[] = {"trainer.first", "trainer.second", "trainer.third"};
    moe_buffer file = written(t), b;
    moe_file opened;
    moe_metadata metadata[2];
    moe_tensor tensors[40];
    moe_stream stream;
    moe_error error;
    char config[2000];
    size_t i;
    memset(&b, 0, sizeof b);
    memset(tensors, 0, sizeof tensors);
    CHECK_STATUS(moe_file_open(&opened, file.data, file.size, &error), MOE_OK, "open");
    CHECK_STATUS(moe_file_metadata(&opened, "moe", config, sizeof config, NULL), MOE_OK, "configuration");
    metadata[0].key = "moe";
    metadata[0].value = config;
    metadata[1].key = "moe.trainer";
    metadata[1].value = text;
    for (i = 0; i < t->net->n_tensors; i++) tensors[i] = t->net->tensors[i];
    for (i = 0; i < n_moments; i++) {
        moe_tensor *m = &tensors[t->net->n_tensors + i];
        strcpy(m->name, i + 1 == n_moments && last != NULL ? last : names[i]);
        m->n_dims = 1;
        m->shape[0] = m->count = moe_net_parameter_count(t->net, NULL) - (i + 1 == n_moments ? shortened : 0);
        m->data = t->memory;
    }
    stream = moe_buffer_stream(&b);
    CHECK_STATUS(moe_file_write(&stream, tensors, t->net->n_tensors + n_moments, metadata, 2, NULL, &error), MOE_OK,
                 "forge");
    moe_buffer_free(&file);
    return b;
}

static void refuse_forged(const char *good, moe_trainer *t) {
    moe_buffer file;
    moe_error error;
    file = forged(t, "", 2, NULL, 0);
    expect_unread(t, &file, MOE_ERR_FORMAT, "byte 0", __LINE__);
    moe_buffer_free(&file);
    file = forged(t, good, 1, NULL, 0);
    expect_unread(t, &file, MOE_ERR_NOT_FOUND, "trainer.second", __LINE__);
    moe_buffer_free(&file);
    file = forged(t, good, 0, NULL, 0);
    expect_unread(t, &file, MOE_ERR_NOT_FOUND, "trainer.first", __LINE__);
    moe_buffer_free(&file);
    file = forged(t, good, 2, NULL, 1);
    expect_unread(t, &file, MOE_ERR_SHAPE, "trainer.second", __LINE__);
    moe_buffer_free(&file);
    file = forged(t, good, 3, NULL, 0);
    expect_unread(t, &file, MOE_ERR_UNSUPPORTED, "3 tensors of a trainer", __LINE__);
    {
        moe_net read;
        CHECK_STATUS(moe_net_read(&read, file.data, file.size, 0, 0, NULL, &error), MOE_OK,
                     "a net passes over all of them");
        moe_net_free(&read);
        moe_buffer_free(&file);
        file = forged(t, good, 3, "trainers", 0);
        CHECK_STATUS(moe_net_read(&read, file.data, file.size, 0, 0, NULL, &error), MOE_ERR_UNSUPPORTED,
                     "but over nothing else");
        CHECK(strstr(error.message, "'trainers'") != NULL, error.message);
        moe_buffer_free(&file);
    }
    { /* the file of a layer has no such tensors */
        moe_layer_config config = layer_of("d_model=5 n_experts=2 d_ff=3");
        moe_layer layer, read;
        moe_tensor tensors[20];
        moe_metadata metadata;
        moe_stream stream;
        size_t n = 0;
        memset(&file, 0, sizeof file);
        memset(tensors, 0, sizeof tensors);
        stream = moe_buffer_stream(&file);
        CHECK_STATUS(moe_layer_create(&layer, &config, 0, 1, NULL, &error), MOE_OK, "layer");
        while (n < 19 && moe_layer_tensor(&layer, n, &tensors[n]) == MOE_OK) n++;
        tensors[n] = tensors[0];
        strcpy(tensors[n].name, "trainer.first");
        metadata.key = "moe";
        metadata.value = "{\"format\":1,\"layer\":{\"d_model\":5,\"n_experts\":2,\"d_ff\":3}}";
        CHECK_STATUS(moe_file_write(&stream, tensors, n, &metadata, 1, NULL, &error), MOE_OK, "write");
        CHECK_STATUS(moe_layer_read(&read, file.data, file.size, 0, MOE_KERNELS_AUTO, NULL, &error), MOE_OK, "read");
        moe_layer_free(&read);
        moe_buffer_free(&file);
        CHECK_STATUS(moe_file_write(&stream, tensors, n + 1, &metadata, 1, NULL, &error), MOE_OK, "write");
        CHECK_STATUS(moe_layer_read(&read, file.data, file.size, 0, MOE_KERNELS_AUTO, NULL, &error),
                     MOE_ERR_UNSUPPORTED, "a layer passes over nothing");
        moe_layer_free(&layer);
        moe_buffer_free(&file);
    }
    CHECK_STATUS(moe_trainer_read(NULL, good, 1, &error), MOE_ERR_ARGUMENT, "no trainer");
    CHECK_STATUS(moe_trainer_load(t, path[1], &error), MOE_ERR_IO, "no file");
}

static void test_refused_checkpoints(void) {
    static const char good[] = "format 1 optimizer 0 steps 4 rng 9 rate 4576918229304087675 position0 1 position1 2 "
                               "position2 0 position3 0 batch 12 accumulate 1 seed 5 n 0 length 0";
    static const struct {
        const char *from, *to, *words;
        moe_status wanted;
    } cases[] = {{"format 1", "format 2", "format 1", MOE_ERR_UNSUPPORTED},
                 {"format 1", "Format 1", "byte 0", MOE_ERR_FORMAT},
                 {"optimizer 0", "optimizer 1", "optimizer", MOE_ERR_CONFIG},
                 {"optimizer 0", "optimizer 18446744073709551615", "optimizer", MOE_ERR_CONFIG},
                 {"steps 4", "steps 04", "steps", MOE_ERR_FORMAT},
                 {"steps 4", "steps -4", "steps", MOE_ERR_FORMAT},
                 {"steps 4", "steps ", "steps", MOE_ERR_FORMAT},
                 {"steps 4", "steps  4", "steps", MOE_ERR_FORMAT},
                 {"steps 4", "steps 4 ", "rng", MOE_ERR_FORMAT},
                 {"steps 4", "steps 0x4", "rng", MOE_ERR_FORMAT},
                 {"steps 4", "steps 9007199254740992", "steps", MOE_ERR_FORMAT},
                 {"steps 4", "steps 18446744073709551616", "steps", MOE_ERR_FORMAT},
                 {"steps 4 ", "", "steps", MOE_ERR_FORMAT},
                 {"rate 4576918229304087675", "rate 9218868437227405312", "rate", MOE_ERR_FORMAT}, /* infinite */
                 {"rate 4576918229304087675", "rate 9221120237041090560", "rate", MOE_ERR_FORMAT}, /* no number */
                 {"length 0", "length 0 ", "the end", MOE_ERR_FORMAT},
                 {"length 0", "length", "length", MOE_ERR_FORMAT},
                 {"length 0", "length 0 more 1", "the end", MOE_ERR_FORMAT}};
    moe_net net = net_of(SPARSE, 15, NULL), other = net_of(SMOOTH, 15, NULL);
    moe_train_config c = usual(MOE_OPTIMIZER_ADAMW), sgd = usual(MOE_OPTIMIZER_SGD);
    moe_trainer t = trainer_of(&net, &c), second = trainer_of(&other, &c);
    moe_trainer third = trainer_of(&net, &sgd);
    moe_buffer file;
    moe_error error;
    char text[1200];
    size_t i;
    file = forged(&t, good, 2, NULL, 0);
    CHECK_STATUS(moe_trainer_read(&t, file.data, file.size, &error), MOE_OK, "a valid file");
    CHECK(t.steps == 4 && t.rng.state == 9 && near_to((double)t.rate, 0.01, NEAR) && t.position[1] == 2,
          "what it says");
    expect_unread(&second, &file, MOE_ERR_CONFIG, "other modules", __LINE__);
    expect_unread(&third, &file, MOE_ERR_CONFIG, "optimizer = sgd", __LINE__);
    moe_buffer_free(&file);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *at = strstr(good, cases[i].from);
        sprintf(text, "%.*s%s%s", (int)(at - good), good, cases[i].to, at + strlen(cases[i].from));
        file = forged(&t, text, 2, NULL, 0);
        expect_unread(&t, &file, cases[i].wanted, cases[i].words, __LINE__);
        moe_buffer_free(&file);
    }
    memset(text, '1', sizeof text);
    text[sizeof text - 1] = '\0';
    file = forged(&t, text, 2, NULL, 0);
    expect_unread(&t, &file, MOE_ERR_FORMAT, "too long", __LINE__);
    moe_buffer_free(&file);
    refuse_forged(good, &t);
    moe_trainer_free(&t);
    moe_trainer_free(&second);
    moe_trainer_free(&third);
    CHECK_STATUS(moe_trainer_read(&t, good, 1, &error), MOE_ERR_STATE, "a trainer that was freed");
    CHECK_STATUS(moe_trainer_write(&t, NULL, &error), MOE_ERR_STATE, "a trainer that was freed");
    moe_net_free(&net);
    moe_net_free(&other);
}

/* Bytes of a stranger: cut anywhere, or with a byte of the header changed. Whatever is not read
   leaves trainer and net as they were. */
static void test_damaged_checkpoints(void) {
    static const unsigned char flips[] = {0x01, 0x10, 0x80, 0xff};
    samples s = samples_of(12, 16);
    moe_net net;
    moe_error error;
    moe_train_config c = usual(MOE_OPTIMIZER_ADAMW);
    moe_trainer t;
    moe_buffer file;
    size_t i, k, header, refused = 0, read = 0;
    uint64_t before;
    place(&s);
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 17, &error), MOE_OK, "build");
    t = trainer_of(&net, &c);
    step(&t, &s.data, NULL);
    file = written(&t);
    header = 8 + (size_t)file.data[0] + 256 * (size_t)file.data[1];
    step(&t, &s.data, NULL);
    before = trainer_print(&t);
    for (i = 0; i < file.size; i++) {
        unsigned char *cut = (unsigned char *)grab(i, 1); /* of its own, so that a sanitizer sees a byte too far */
        memcpy(cut, file.data, i);
        CHECK(moe_trainer_read(&t, cut, i, &error) != MOE_OK && trainer_print(&t) == before, "cut");
        free(cut);
    }
    for (i = 0; i < header; i++)
        for (k = 0; k < sizeof flips; k++) {
            file.data[i] ^= flips[k];
            if (moe_trainer_read(&t, file.data, file.size, &error) != MOE_OK) {
                refused++;
                CHECK(trainer_print(&t) == before, "refused: as they were");
            } else { /* another number, or a name that nobody reads */
                read++;
                before = trainer_print(&t);
            }
            file.data[i] ^= flips[k];
        }
    CHECK(refused > 1000 && read > 0, "most are refused");
    moe_buffer_free(&file);
    moe_trainer_free(&t);
    moe_net_free(&net);
}

/* A stream that takes so many bytes and then fails. */
static moe_status short_write(void *ctx, const void *from, size_t size) {
    size_t *left = (size_t *)ctx;
    (void)from;
    if (size > *left) {
        *left = 0;
        return MOE_ERR_IO;
    }
    *left -= size;
    return MOE_OK;
}

static int exists(const char *name) {
    FILE *f = fopen(name, "rb");
    if (f != NULL) fclose(f);
    return f != NULL;
}

/* Takes all names of new files beside the path: by folders or, where there are none without POSIX,
   by files that stay open. */
static void block_writing(const char *name, int block) {
    static FILE *files[100];
    char beside[700];
    int i;
    for (i = 0; i < 100; i++) {
        sprintf(beside, "%s.tmp%d", name, i);
        if (block) {
#if HAS_FOLDERS
            CHECK(mkdir(beside, 0700) == 0);
#else
            CHECK((files[i] = fopen(beside, "wb")) != NULL);
#endif
        } else {
            if (files[i] != NULL) fclose(files[i]);
            remove(beside);
        }
    }
}

static void test_failed_writing(void) {
    samples s = samples_of(12, 18);
    moe_net net = net_of(SPARSE, 19, NULL);
    moe_train_config c = usual(MOE_OPTIMIZER_ADAMW);
    moe_trainer t = trainer_of(&net, &c);
    moe_buffer file, old, now;
    moe_stream stream;
    moe_error error;
    char folder[700];
    size_t room, left;
    uint64_t before;
    place(&s);
    memset(&old, 0, sizeof old);
    memset(&now, 0, sizeof now);
    memset(&stream, 0, sizeof stream);
    s.data.n = 8;
    step(&t, &s.data, NULL);
    CHECK_STATUS(moe_trainer_save(&t, path[0], &error), MOE_OK, "save");
    CHECK_STATUS(moe_file_read(path[0], &old, &error), MOE_OK, "read");
    step(&t, &s.data, NULL);
    file = written(&t);
    before = trainer_print(&t);
    stream.ctx = &left;
    stream.write = short_write;
    for (room = 0; room <= file.size; room++) {
        left = room;
        CHECK_STATUS(moe_trainer_write(&t, &stream, &error), room < file.size ? MOE_ERR_IO : MOE_OK, "a full disk");
        CHECK(trainer_print(&t) == before, "writing changes nothing");
    }
    t.rate = (moe_real)NAN;
    CHECK_STATUS(moe_trainer_write(&t, &stream, &error), MOE_ERR_ARGUMENT, "a rate that no trainer would read");
    t.rate = c.rate;
    block_writing(path[0], 1);
    CHECK_STATUS(moe_trainer_save(&t, path[0], &error), MOE_ERR_IO, "no file can be made beside it");
    c.epochs = 2;
    c.checkpoint = path[0];
    c.batch = 6;
    left = (size_t)net_print(&net);
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_ERR_IO, "nor by fit");
    CHECK(strstr(error.message, "cannot create a file beside") != NULL, error.message);
    CHECK((size_t)net_print(&net) != left, "the net has what it learned until then");
    block_writing(path[0], 0);
    CHECK_STATUS(moe_file_read(path[0], &now, &error), MOE_OK, "read");
    CHECK(now.size == old.size && same_bits(now.data, old.data, now.size), "the old file is as it was");
    strcpy(folder, path[0]);
    strcpy(strrchr(folder, '/') + 1, "."); /* a folder: it cannot be replaced by a file */
    CHECK_STATUS(moe_trainer_save(&t, folder, &error), MOE_ERR_IO, "no renaming");
    strcat(folder, ".tmp0");
    CHECK(!exists(folder), "the new file is removed");
    c.checkpoint = NULL;
    c.resume = 1;
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_ERR_CONFIG, "resume without a file's name");
    CHECK(strstr(error.message, "resume = 1") != NULL, error.message);
    moe_buffer_free(&file);
    moe_buffer_free(&old);
    moe_buffer_free(&now);
    moe_trainer_free(&t);
    moe_net_free(&net);
    remove(path[0]);
}

/* ---- training that is resumed ---- */

/* What a callback was told, and when it stops or copies the checkpoint. */
typedef struct log {
    moe_progress told[MOST_STEPS];
    int calls, stop_at;       /* stop_at: the call that stops training, 0: none */
    moe_buffer files[MOST_STEPS]; /* what a process killed in this call would leave; not filled where keep is NULL */
    const char *keep;
} log_book;

static int write_log(void *ctx, const moe_progress *p) {
    log_book *l = (log_book *)ctx;
    moe_error error;
    if (l->calls >= MOST_STEPS) return 1;
    l->told[l->calls] = *p;
    if (l->keep != NULL && exists(l->keep))
        CHECK_STATUS(moe_file_read(l->keep, &l->files[l->calls], &error), MOE_OK, "a copy of the checkpoint");
    return ++l->calls == l->stop_at;
}

#define SAME(field) same_bits(&a->field, &b->field, sizeof a->field)

/* All but the samples of this call. */
static int same_progress(const moe_progress *a, const moe_progress *b) {
    return SAME(epoch) && SAME(epochs) && SAME(step) && SAME(steps) && SAME(loss) && SAME(router_loss) &&
           SAME(gradient_norm) && SAME(epoch_ended) && SAME(test.n) && SAME(test.loss) && SAME(test.accuracy) &&
           SAME(rate) && SAME(total_step) && SAME(total_steps);
}

static moe_buffer contents(const char *name) {
    moe_buffer b;
    moe_error error;
    memset(&b, 0, sizeof b);
    CHECK_STATUS(moe_file_read(name, &b, &error), MOE_OK, "read");
    return b;
}

static void put_file(const char *name, const moe_buffer *b) {
    FILE *f = fopen(name, "wb");
    if (!CHECK(f != NULL, "a file")) return;
    CHECK(fwrite(b->data, 1, b->size, f) == b->size, "written");
    fclose(f);
}

/* One training on a fresh network of its own seed: what comes from the checkpoint does not come
   from there. */
static void fit_fresh(int which, uint64_t seed, const moe_data *train, const moe_data *test, moe_train_config *c,
                      log_book *l, moe_status wanted, uint64_t *print) {
    moe_net net = net_of(which, seed, NULL);
    moe_error error;
    error.message[0] = '\0';
    l->calls = 0;
    c->progress = write_log;
    c->progress_ctx = l;
    if (!CHECK_STATUS(moe_fit(&net, train, test, c, &error), wanted, "fit")) printf("        %s\n", error.message);
    *print = net_print(&net);
    moe_net_free(&net);
}

static void compare_resumed(log_book *whole, log_book *part, moe_buffer *wanted, int at) {
    moe_buffer got;
    uint64_t before;
    int i;
    for (i = 0, before = 0; i < part->calls; i++) {
        CHECK(same_progress(&part->told[i], &whole->told[at + i]), "the same progress");
        CHECK(part->told[i].samples > before &&
                  part->told[i].samples == whole->told[at + i].samples - whole->told[at - 1].samples,
              "samples of this call");
        before = part->told[i].samples;
    }
    got = contents(path[1]);
    CHECK(got.size == wanted->size && same_bits(got.data, wanted->data, got.size),
          "the same checkpoint: tensors, moments, random state, position");
    moe_buffer_free(&got);
}

/* Stops and kills a training at every step; all that follows must be what it would have been. */
static void resume_everywhere(int which, const moe_train_config *base, samples *s, const moe_data *test) {
    moe_train_config c = *base;
    log_book whole, part;
    moe_buffer wanted;
    uint64_t print, again;
    int total, at, i;
    memset(&whole, 0, sizeof whole);
    memset(&part, 0, sizeof part);
    c.checkpoint = whole.keep = path[0];
    remove(path[0]);
    fit_fresh(which, 20, &s->data, test, &c, &whole, MOE_OK, &print);
    wanted = contents(path[0]);
    total = whole.calls;
    CHECK(total >= 4 && (uint64_t)total == whole.told[0].total_steps, "steps");
    for (i = 0; i < total; i++)
        CHECK((whole.told[i].test.n > 0) ==
                  (test != NULL && (whole.told[i].epoch_ended || (i + 1) % c.evaluate_every == 0)),
              "evaluated when it is due");
    i = c.checkpoint_every > 0 ? c.checkpoint_every : (int)whole.told[0].steps; /* steps until the first one */
    for (at = 0; at < total; at++) CHECK((whole.files[at].data != NULL) == (at >= i), "kept when it is due");
    c.checkpoint = NULL;
    fit_fresh(which, 20, &s->data, test, &c, &part, MOE_OK, &again);
    CHECK(again == print, "checkpoints change nothing");

    c.checkpoint = path[1];
    for (at = 1; at <= total; at++) { /* stopped after step `at` */
        remove(path[1]);
        c.resume = 0;
        part.stop_at = at;
        fit_fresh(which, 20, &s->data, test, &c, &part, MOE_ERR_STOPPED, &again);
        c.resume = 1;
        part.stop_at = 0;
        fit_fresh(which, 21, &s->data, test, &c, &part, MOE_OK, &again);
        CHECK(part.calls == total - at && again == print, "the rest of the steps, the same net");
        compare_resumed(&whole, &part, &wanted, at);
    }
    fit_fresh(which, 22, &s->data, test, &c, &part, MOE_OK, &again);
    CHECK(part.calls == 0 && again == print, "a finished training: nothing more to do, the net is the checkpoint's");
    for (at = 0; at < total; at++) { /* killed in step `at`, when the last checkpoint may be some steps old */
        if (whole.files[at].data == NULL) continue;
        put_file(path[1], &whole.files[at]);
        fit_fresh(which, 23, &s->data, test, &c, &part, MOE_OK, &again);
        CHECK(again == print && part.calls >= total - at && part.calls <= total, "the same net");
        for (i = 0; i < part.calls; i++)
            CHECK(same_progress(&part.told[i], &whole.told[total - part.calls + i]), "the same progress");
        moe_buffer_free(&whole.files[at]);
    }
    remove(path[1]);
    for (at = 0; at < total; at++) { /* one step at a time */
        part.stop_at = 1;
        fit_fresh(which, at == 0 ? 20 : 24 + (uint64_t)at, &s->data, test, &c, &part, MOE_ERR_STOPPED, &again);
        CHECK(part.calls == 1 && same_progress(&part.told[0], &whole.told[at]), "one step");
    }
    part.stop_at = 0;
    CHECK(again == print, "step by step to the same net");
    moe_buffer_free(&wanted);
    remove(path[0]);
    remove(path[1]);
}

static void test_resuming(void) {
    static const struct {
        size_t n, length;
        int batch, accumulate, checkpoint_every, evaluate_every;
    } shapes[] = {
        {22, 0, 6, 1, 0, 0}, {22, 0, 6, 2, 1, 2}, {24, 4, 8, 1, 2, 3}, {24, 4, 4, 4, 3, 0}, {5, 0, 1, 1, 4, 4}};
    samples test = samples_of(10, 30);
    size_t shape;
    int which, optimizer;
    place(&test);
    for (shape = 0; shape < sizeof shapes / sizeof shapes[0]; shape++)
        for (which = SPARSE; which < KINDS; which++)
            for (optimizer = 0; optimizer < MOE_OPTIMIZER_COUNT; optimizer++) {
                samples s = samples_of(shapes[shape].n, 31);
                moe_train_config c = usual(optimizer);
                place(&s);
                s.labels[1] = s.labels[4] = -1;
                s.data.length = shapes[shape].length;
                c.epochs = 2;
                c.batch = shapes[shape].batch;
                c.accumulate = shapes[shape].accumulate;
                c.checkpoint_every = shapes[shape].checkpoint_every;
                c.evaluate_every = shapes[shape].evaluate_every;
                c.warmup = 2;
                c.final_rate = (moe_real)0.1;
                resume_everywhere(which, &c, &s, shapes[shape].evaluate_every > 0 ? &test.data : NULL);
            }
}

static void resume_with_fewer(moe_train_config *c) {
    moe_train_config other;
    moe_net net;
    moe_trainer t;
    moe_error error;
    samples few = samples_of(8, 32);
    place(&few);
    net = net_of(SPARSE, 1, NULL);
    other = *c;
    other.checkpoint = NULL;
    other.resume = 0;
    t = trainer_of(&net, &other);
    step(&t, &few.data, NULL);
    CHECK_STATUS(moe_trainer_save(&t, path[1], &error), MOE_OK, "save");
    CHECK_STATUS(moe_fit(&net, &few.data, NULL, c, &error), MOE_ERR_CONFIG, "a checkpoint of a trainer alone");
    CHECK(strstr(error.message, "n = 8: the training of the checkpoint has 0") != NULL, error.message);
    moe_trainer_free(&t);
    moe_net_free(&net);
}

/* Checkpoints whose position cannot be that of the training that is to go on. */
static void test_impossible_positions(void) {
    static const struct {
        int good;
        const char *position; /* 24 samples in batches of 12: two steps in an epoch */
    } rows[] = {{1, "steps 1 rng 9 rate 4576918229304087675 position0 0 position1 1 position2 0 position3 0"},
                {1, "steps 3 rng 9 rate 4576918229304087675 position0 1 position1 1 position2 0 position3 0"},
                {0, "steps 2 rng 9 rate 4576918229304087675 position0 0 position1 2 position2 0 position3 0"},
                {0, "steps 2 rng 9 rate 4576918229304087675 position0 0 position1 1 position2 0 position3 0"},
                {0, "steps 1 rng 9 rate 4576918229304087675 position0 0 position1 1 "
                    "position2 9218868437227405312 position3 0"},
                {0, "steps 1 rng 9 rate 4576918229304087675 position0 0 position1 1 "
                    "position2 0 position3 18442240474082181120"}};
    samples s = samples_of(24, 15);
    moe_train_config c = usual(MOE_OPTIMIZER_ADAMW);
    moe_error error;
    char text[400];
    size_t i;
    place(&s);
    c.epochs = 2;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe_net net = net_of(SPARSE, 15, NULL);
        moe_trainer t = trainer_of(&net, &c);
        moe_train_config on = c;
        moe_buffer file;
        sprintf(text, "format 1 optimizer 0 %s batch 12 accumulate 1 seed 5 n 24 length 0", rows[i].position);
        file = forged(&t, text, 2, NULL, 0);
        put_file(path[0], &file);
        on.checkpoint = path[0];
        on.resume = 1;
        error.message[0] = '\0';
        CHECK_STATUS(moe_fit(&net, &s.data, NULL, &on, &error), rows[i].good ? MOE_OK : MOE_ERR_FORMAT, text);
        CHECK(rows[i].good || strstr(error.message, "position does not occur in this training") != NULL,
              error.message);
        moe_buffer_free(&file);
        moe_trainer_free(&t);
        moe_net_free(&net);
        remove(path[0]);
    }
}

/* What a resumed training may change, and what not. */
static void test_resumed_otherwise(void) {
    samples s = samples_of(24, 32);
    moe_train_config c = usual(MOE_OPTIMIZER_SGD), other;
    log_book l;
    uint64_t print, more;
    moe_net net = net_of(SPARSE, 1, NULL);
    moe_error error;
    memset(&l, 0, sizeof l);
    place(&s);
    c.epochs = 2;
    c.batch = 8;
    c.checkpoint = path[0];
    c.resume = 1;
    c.final_rate = 0;
    c.rate = (moe_real)0.1;
    remove(path[0]);
    fit_fresh(SPARSE, 33, &s.data, NULL, &c, &l, MOE_OK, &print);
    CHECK(l.calls == 6, "no file: from the beginning");
#define DIFFERS(change, words) \
    do { \
        other = c; \
        other.epochs = 3; \
        change; \
        error.message[0] = '\0'; \
        more = net_print(&net); \
        CHECK_STATUS(moe_fit(&net, &s.data, NULL, &other, &error), MOE_ERR_CONFIG, words); \
        CHECK(strstr(error.message, words) != NULL && net_print(&net) == more, error.message); \
        s.data.n = 24; \
        s.data.length = 0; \
    } while (0)
    DIFFERS(other.batch = 4, "batch = 4: the training of the checkpoint has 8");
    DIFFERS(other.accumulate = 2, "accumulate = 2: ");
    DIFFERS(other.seed = 6, "seed = 6: ");
    DIFFERS(s.data.n = 23, "n = 23: ");
    DIFFERS(s.data.length = 4, "length = 4: ");
    DIFFERS(other.optimizer = MOE_OPTIMIZER_ADAMW, "optimizer = adamw");
    c.epochs = 3;
    fit_fresh(SPARSE, 34, &s.data, NULL, &c, &l, MOE_OK, &more);
    CHECK(l.calls == 3 && l.told[0].epoch == 3 && more != print, "more epochs: it goes on");
    remove(path[1]);
    c.checkpoint = path[1];
    fit_fresh(SPARSE, 33, &s.data, NULL, &c, &l, MOE_OK, &print);
    CHECK(l.calls == 9 && print == more, "as if they had been asked for at once, where the rate stays");
    moe_net_free(&net);
    resume_with_fewer(&c);
    {
        moe_buffer junk;
        junk.data = (unsigned char *)grab(20, 1);
        junk.size = 20;
        put_file(path[1], &junk);
        fit_fresh(SPARSE, 33, &s.data, NULL, &c, &l, MOE_ERR_FORMAT, &print);
        CHECK(l.calls == 0, "a file that is none is an error, not a beginning");
        free(junk.data);
    }
    remove(path[0]);
    remove(path[1]);
}

static moe_net scheduled_net(uint64_t seed) {
    moe_layer_config c = layer_of("n_experts=4 top_k=1 k_end=3 gate=sigmoid weight=raw d_ff=4");
    moe_net net;
    moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
    moe_net_mixture(&net, &c);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, seed, NULL), MOE_OK, "build");
    return net;
}

/* Routers whose schedule takes the trainer's steps: more epochs are no other network, and a failed
   call sets nothing. */
static void test_resumed_schedule(void) {
    samples s = samples_of(24, 35);
    moe_train_config c = descent(8);
    moe_net net = scheduled_net(1), other = scheduled_net(2);
    const int *steps = &other.modules[0].layer.config.router.schedule_steps;
    moe_trainer t, longer;
    moe_error error;
    place(&s);
    c.epochs = 2;
    c.checkpoint = path[0];
    c.resume = 1;
    remove(path[0]);
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_OK, "fit");
    CHECK(net.modules[0].layer.config.router.schedule_steps == 6, "the steps of the training");
    c.total_steps = 30;
    CHECK_STATUS(moe_fit(&other, NULL, NULL, &c, &error), MOE_ERR_ARGUMENT, "no data");
    CHECK(*steps == 0, "a failed call changes nothing");
    c.seed++;
    CHECK_STATUS(moe_fit(&other, &s.data, NULL, &c, &error), MOE_ERR_CONFIG, "another training");
    CHECK(*steps == 0, "a failed call changes nothing");
    c.seed--;
    c.total_steps = 0;
    c.epochs = 4;
    error.message[0] = '\0';
    CHECK(moe_fit(&other, &s.data, NULL, &c, &error) == MOE_OK, error.message);
    CHECK(*steps == 12 && (int)other.modules[0].layer.tensors[MOE_ROUTER_STEP][0] == 12, "more epochs");
    moe_net_free(&net);
    moe_net_free(&other);
    net = scheduled_net(1);
    other = scheduled_net(2);
    c.checkpoint = NULL;
    c.resume = 0;
    c.total_steps = 10;
    c.final_rate = (moe_real)0.5;
    t = trainer_of(&net, &c);
    c.total_steps = 20;
    longer = trainer_of(&other, &c);
    s.data.n = 8;
    step(&t, &s.data, NULL);
    CHECK_STATUS(moe_trainer_save(&t, path[0], &error), MOE_OK, "save");
    CHECK(moe_trainer_load(&longer, path[0], &error) == MOE_OK, error.message);
    CHECK(net_print(&other) == net_print(&net) && other.modules[0].layer.config.router.schedule_steps == 20 &&
              near_to((double)longer.rate, rate_wanted(&c, 1, 20), NEAR),
          "the trainer keeps its schedule");
    moe_trainer_free(&t);
    moe_trainer_free(&longer);
    moe_net_free(&net);
    moe_net_free(&other);
    remove(path[0]);
}

/* ---- memory of an arena ---- */

/* What a call takes for itself, it gives back in an order that an arena can use. */
static void test_arena(void) {
    static double memory[1 << 16];
    moe_arena arena;
    moe_allocator a;
    samples s = samples_of(24, 40);
    moe_train_config c = usual(MOE_OPTIMIZER_ADAMW);
    moe_evaluation result;
    moe_trainer t;
    moe_error error;
    moe_net net;
    size_t used;
    memset(&arena, 0, sizeof arena);
    arena.base = memory;
    arena.size = sizeof memory;
    a = moe_arena_allocator(&arena);
    net = net_of(SPARSE, 41, &a);
    place(&s);
    c.epochs = 2;
    c.checkpoint = path[0];
    used = arena.used + 64; /* what aligned the first block may stay */
    remove(path[0]);
    CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_OK, error.message);
    CHECK(arena.used < used, "fit");
    c.resume = 1;
    c.epochs = 3;
    CHECK_STATUS(moe_fit(&net, &s.data, &s.data, &c, &error), MOE_OK, error.message);
    CHECK(arena.used < used, "a resumed fit");
    t = trainer_of(&net, &c);
    CHECK(arena.used >= used, "a trainer takes memory");
    CHECK_STATUS(moe_trainer_save(&t, path[0], &error), MOE_OK, error.message);
    moe_trainer_free(&t);
    CHECK(arena.used < used, "a trainer");
    CHECK_STATUS(moe_evaluate(&net, &s.data, MOE_CRITERION_CROSS_ENTROPY, &result, &error), MOE_OK, error.message);
    CHECK_STATUS(moe_net_save(&net, path[0], &error), MOE_OK, error.message);
    CHECK(arena.used < used, "evaluate and save");
    moe_net_free(&net);
    CHECK(arena.used < 64, "the network");
    remove(path[0]);
}

/* ---- every allocation fails once ---- */

static void train_without_memory(samples *s, test_heap *m, moe_net *net, moe_train_config *c) {
    moe_trainer t;
    moe_error error;
    moe_status status;
    moe_buffer file;
    uint64_t before;
    long at, held, refused;
    place(s);
    t = trainer_of(net, c);
    s->data.n = 12;
    step(&t, &s->data, NULL);
    s->data.n = 24;
    file = written(&t);
    held = m->blocks;
    before = trainer_print(&t);
    for (at = 1, refused = 0; at < 200; at++) {
        m->calls = 0;
        m->fail_at = at;
        status = moe_trainer_save(&t, path[0], &error);
        CHECK((status == MOE_OK || status == MOE_ERR_MEMORY) && m->blocks == held && trainer_print(&t) == before,
              "save without memory");
        refused += status != MOE_OK;
        if (m->calls < at) break;
    }
    CHECK(refused > 1 && at < 200, "allocations failed");
    for (at = 1, refused = 0; at < 200; at++) {
        m->calls = 0;
        m->fail_at = 0;
        t.steps++;
        before = trainer_print(&t);
        m->calls = 0;
        m->fail_at = at;
        status = moe_trainer_read(&t, file.data, file.size, &error);
        CHECK((status == MOE_OK || status == MOE_ERR_MEMORY) && m->blocks == held &&
                  (status == MOE_OK || trainer_print(&t) == before),
              "read without memory");
        refused += status != MOE_OK;
        if (m->calls < at) break;
    }
    CHECK(refused > 1 && at < 200, "allocations failed");
    m->fail_at = 0;
    moe_trainer_free(&t);
    moe_buffer_free(&file);
    held = m->blocks;

    c->epochs = 2;
    c->checkpoint_every = 1;
    c->checkpoint = path[0];
    remove(path[0]);
}

static void test_without_memory(void) {
    samples s = samples_of(24, 40);
    test_heap m;
    moe_allocator a = test_allocator(&m, 0);
    moe_net net = net_of(SPARSE, 41, &a), kept = net_of(SPARSE, 41, NULL);
    moe_train_config c = usual(MOE_OPTIMIZER_ADAMW);
    moe_error error;
    moe_status status;
    moe_buffer wanted, now;
    uint64_t before, print;
    long at, held, refused, resumed = 0;
    train_without_memory(&s, &m, &net, &c);
    CHECK_STATUS(moe_fit(&kept, &s.data, NULL, &c, &error), MOE_OK, "fit");
    wanted = contents(path[0]);
    print = net_print(&kept);
    for (at = 1, refused = 0; at < 400; at++) { /* wherever it fails, it can be resumed */
        moe_net_free(&net);
        m.fail_at = 0;
        net = net_of(SPARSE, 41, &a);
        held = m.blocks;
        remove(path[0]);
        c.resume = 0;
        m.calls = 0;
        m.fail_at = at;
        status = moe_fit(&net, &s.data, NULL, &c, &error);
        CHECK((status == MOE_OK || status == MOE_ERR_MEMORY) && m.blocks == held, "fit without memory");
        refused += status != MOE_OK;
        if (m.calls < at) break;
        if (status == MOE_OK || !exists(path[0])) continue;
        resumed++;
        c.resume = 1;
        m.calls = 0;
        m.fail_at = 0;
        CHECK_STATUS(moe_fit(&net, &s.data, NULL, &c, &error), MOE_OK, "resumed");
        CHECK(net_print(&net) == print, "the same net");
        now = contents(path[0]);
        CHECK(now.size == wanted.size && same_bits(now.data, wanted.data, now.size), "the same checkpoint");
        moe_buffer_free(&now);
    }
    CHECK(refused > 4 && resumed > 4 && at < 400, "allocations failed, also after a checkpoint");
    for (at = 1, refused = 0; at < 100; at++) { /* resuming itself */
        put_file(path[0], &wanted);
        before = net_print(&net);
        c.resume = 1;
        m.calls = 0;
        m.fail_at = at;
        status = moe_fit(&net, &s.data, NULL, &c, &error);
        CHECK((status == MOE_OK && net_print(&net) == print) || (status == MOE_ERR_MEMORY && net_print(&net) == before),
              "resume without memory");
        CHECK(m.blocks == held, "nothing leaks");
        refused += status != MOE_OK;
        if (m.calls < at) break;
    }
    CHECK(refused > 4 && at < 100, "allocations failed");
    moe_buffer_free(&wanted);
    moe_net_free(&net);
    moe_net_free(&kept);
    CHECK(m.blocks == 0, "all given back");
    remove(path[0]);
}

int main(int count, char **words) {
    const char *folder = count > 1 ? words[1] : ".";
    if (strlen(folder) > 500) {
        fprintf(stderr, "training: the folder's name is too long\n");
        return 2;
    }
    sprintf(path[0], "%s/training_test_a.safetensors", folder);
    sprintf(path[1], "%s/training_test_b.safetensors", folder);
    CASE(test_router_losses());
    CASE(test_seeds());
    CASE(test_schedules());
    CASE(test_accumulation());
    CASE(test_accumulated_state());
    CASE(test_groups());
    CASE(test_rows());
    CASE(test_frozen_routers());
    CASE(test_failed_step());
    CASE(test_small_gradients());
    CASE(test_means());
    CASE(test_mean_gradients());
    CASE(test_refused_settings());
    CASE(test_stars());
    CASE(test_refused_rows());
    CASE(test_unlabelled());
    CASE(test_sequences());
    CASE(test_needs());
    CASE(test_token_ids());
    CASE(test_attention_before());
    CASE(test_convolution_needs());
    CASE(test_too_long());
    CASE(test_checkpoints());
    CASE(test_packed_checkpoint());
    CASE(test_long_text());
    CASE(test_workspace());
    CASE(test_refused_checkpoints());
    CASE(test_damaged_checkpoints());
    CASE(test_failed_writing());
    CASE(test_resuming());
    CASE(test_impossible_positions());
    CASE(test_resumed_otherwise());
    CASE(test_resumed_schedule());
    CASE(test_arena());
    CASE(test_without_memory());
    return test_end();
}
