/* parallel.c - packed weights and threads change no bit: forward and backward of layers of every
   kind, against the plain call of one thread.

     cc -std=c99 -O2 -I. tests/unit/parallel.c -o parallel -lm && ./parallel
     (also with -DMOE_REAL=double, and with -fopenmp)

   Exit status 1 if a check failed. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static moe_rng rng;

static moe_real *normals(size_t count) {
    moe_real *v = (moe_real *)grab(count, sizeof *v);
    size_t i;
    for (i = 0; i < count; i++) v[i] = moe_rng_normal(&rng);
    return v;
}

static int below(int n) { return (int)moe_rng_below(&rng, (uint64_t)n); }

/* Tasks one after the other, the last first: what one leaves behind must not matter to another.
   Counts the calls. */
static void backwards(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    int i;
    *(int *)ctx += 1;
    for (i = count - 1; i >= 0; i--) task(work, i);
}

/* ---- one layer and one batch ---- */

typedef struct scene {
    moe_layer layer;
    moe_call call;
    moe_rng call_rng;
    moe_real *x, *dy;
    unsigned char *mask;
    int32_t *ids, *previous;
    moe_real *previous_weights, *attention;
    size_t n, d, o;
} scene;

/* What a call computes. */
typedef struct result {
    moe_status status, back;
    moe_real *y, *dx, *gradients;
    size_t count; /* numbers in gradients */
    int has_work; /* an expert has a token */
} result;

static size_t gradient_count(const moe_layer *layer) {
    moe_tensor t;
    size_t count = 0, i;
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++) count += t.count;
    return count;
}

static result run(scene *s, int training, const moe_parallel *team) {
    result r;
    moe_layer_pass pass;
    moe_tensor t;
    moe_call call = s->call;
    moe_rng own = s->call_rng;
    size_t bytes = 0, i, at = 0;
    void *work;
    memset(&r, 0, sizeof r);
    r.count = gradient_count(&s->layer);
    r.y = (moe_real *)grab(s->n * s->o, sizeof *r.y);
    r.dx = (moe_real *)grab(s->n * s->d, sizeof *r.dx);
    r.gradients = (moe_real *)grab(r.count, sizeof *r.gradients);
    call.training = training;
    call.parallel = team;
    call.rng = &own;
    CHECK(moe_layer_work_size(&s->layer, s->n, training, &bytes) == MOE_OK, "work size");
    work = malloc(bytes > 0 ? bytes : 1);
    if (work == NULL) exit(2);
    memset(work, 0x55, bytes); /* large numbers where something is read that was not written */
    r.status = moe_layer_forward(&s->layer, &call, r.y, work, bytes, &pass);
    r.has_work = r.status == MOE_OK &&
                 (pass.routing.plan.rows > 0 || pass.routing.plan.offsets[s->layer.config.router.n_experts] > 0);
    if (r.status == MOE_OK && training) {
        for (i = 0; moe_layer_tensor(&s->layer, i, &t) == MOE_OK; i++)
            memset(t.gradient, 0, t.count * sizeof(moe_real));
        r.back = moe_layer_backward(&s->layer, s->dy, r.dx, NULL, &pass);
        for (i = 0; moe_layer_tensor(&s->layer, i, &t) == MOE_OK; at += t.count, i++)
            memcpy(r.gradients + at, t.gradient, t.count * sizeof(moe_real));
    }
    free(work);
    return r;
}

static void drop(result *r) {
    free(r->y);
    free(r->dx);
    free(r->gradients);
}

static int same(const scene *s, const result *a, const result *b) {
    return a->status == b->status && a->back == b->back && memcmp(a->y, b->y, s->n * s->o * sizeof(moe_real)) == 0 &&
           memcmp(a->dx, b->dx, s->n * s->d * sizeof(moe_real)) == 0 &&
           memcmp(a->gradients, b->gradients, a->count * sizeof(moe_real)) == 0;
}

/* Everything that some router asks for, at random. */
static int begin(scene *s, const moe_layer_config *config, size_t n) {
    size_t i, d = (size_t)config->router.d_model;
    moe_error error;
    memset(s, 0, sizeof *s);
    if (moe_layer_create(&s->layer, config, 1, 5, NULL, &error) != MOE_OK) {
        printf("note: %s\n", error.message);
        return 0;
    }
    s->n = n;
    s->d = d;
    s->o = (size_t)s->layer.config.d_out;
    s->x = normals(n * d);
    s->dy = normals(n * s->o);
    s->previous_weights = normals(n);
    s->mask = (unsigned char *)grab(n, 1);
    s->ids = (int32_t *)grab(n, sizeof *s->ids);
    s->previous = (int32_t *)grab(n, sizeof *s->previous);
    s->attention = (moe_real *)grab(n * n, sizeof *s->attention);
    for (i = 0; i < n; i++) {
        s->mask[i] = (unsigned char)(below(9) > 0);
        s->ids[i] = below(8);
        s->previous[i] = below(config->router.n_experts);
    }
    for (i = 0; i < n * n; i++) s->attention[i] = (moe_real)1 / (moe_real)n;
    s->call.n_tokens = n;
    s->call.x = s->x;
    s->call.mask = s->mask;
    s->call.token_ids = s->ids;
    s->call.previous_input = s->x;
    s->call.previous_experts = s->previous;
    s->call.previous_weights = s->previous_weights;
    s->call.n_previous = 1;
    s->call.attention_weights = s->attention;
    s->call.attention_outputs = s->x;
    moe_rng_seed(&s->call_rng, 99);
    return 1;
}

static void end(scene *s) {
    free(s->x);
    free(s->dy);
    free(s->mask);
    free(s->ids);
    free(s->previous);
    free(s->previous_weights);
    free(s->attention);
    moe_layer_free(&s->layer);
}

static void test_threads(scene *s, const char *name) {
    int calls, threads, training;
    moe_parallel team;
    memset(&team, 0, sizeof team);
    team.ctx = &calls;
    team.run = backwards;
    team.always = 1;
    for (training = 0; training < 2; training++) {
        moe_parallel one;
        result plain;
        memset(&one, 0, sizeof one);
        plain = run(s, training, &one);
        for (threads = 2; threads < 7; threads++) {
            result shared;
            calls = 0;
            team.threads = threads;
            shared = run(s, training, &team);
            CHECK(same(s, &plain, &shared), name);
            CHECK(!plain.has_work || calls > 0, "the tasks went through the caller's function");
            drop(&shared);
        }
        team.threads = 0; /* nothing to share with */
        {
            moe_parallel idle = team;
            result alone = run(s, training, &team), of_the_build = run(s, training, NULL), idle_run;
            idle.threads = 3;
            idle.run = NULL;
            idle_run = run(s, training, &idle);
            CHECK(same(s, &plain, &alone) && same(s, &plain, &idle_run), name);
            drop(&idle_run);
            CHECK(same(s, &plain, &of_the_build), name);
            drop(&alone);
            drop(&of_the_build);
        }
        drop(&plain);
    }
}

/* Packed weights give the bits of the tensors, with the tensors gone; training does not read
   them. */
static void test_packed(scene *s, const char *name) {
    const moe_real *kept[MOE_LAYER_PARAMETER_COUNT];
    result plain = run(s, 0, NULL), packed, trained;
    unsigned char *memory;
    size_t bytes = 0, i;
    moe_error error;
    int place;
    CHECK(moe_layer_pack_size(&s->layer, MOE_TYPE_REAL, 0, &bytes, NULL) == MOE_OK, "size");
    memory = (unsigned char *)grab(bytes + 64, 1);
    memset(memory + bytes, 0xA5, 64);
    CHECK(moe_layer_pack(&s->layer, MOE_TYPE_REAL, memory, bytes - 1, &error) == MOE_ERR_SPACE && !s->layer.is_packed,
          "too small");
    CHECK(moe_layer_pack(&s->layer, MOE_TYPE_REAL, memory, bytes, &error) == MOE_OK, "packs");
    for (i = 0; i < 64; i++) CHECK(memory[bytes + i] == 0xA5, "nothing behind the memory is written");
    trained = run(s, 1, NULL);
    memcpy(kept, s->layer.tensors, sizeof kept);
    for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++)
        if (s->layer.packed[place] != NULL) s->layer.tensors[place] = NULL;
    packed = run(s, 0, NULL);
    CHECK(same(s, &plain, &packed), name);
    CHECK(packed.status == MOE_OK, name);
    drop(&packed);
    packed = run(s, 1, NULL);
    CHECK(packed.status == MOE_ERR_ARGUMENT, "training needs the tensors");
    memcpy(s->layer.tensors, kept, sizeof kept);
    drop(&packed);
    s->layer.is_packed = 0;
    packed = run(s, 1, NULL);
    CHECK(same(s, &trained, &packed), "training reads the tensors");
    drop(&plain);
    drop(&packed);
    drop(&trained);
    free(memory);
}

static void test_config(const moe_layer_config *config, size_t n, const char *name) {
    scene s;
    if (!CHECK(begin(&s, config, n), name)) return;
    test_threads(&s, name);
    test_packed(&s, name);
    end(&s);
}

/* More packed weights than caches hold: they are read in another order. */
static void test_large(void) {
    scene s;
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.d_model = 700;
    c.router.n_experts = 8;
    c.router.top_k = 2;
    c.d_ff = 504;
    if (!CHECK(begin(&s, &c, 5), "33.9 MB of weights")) return;
    test_packed(&s, "33.9 MB of weights");
    end(&s);
}

/* Shapes at random, with every kind of expert and every table of kernels. */
static void test_shapes(void) {
    static const int widths[] = {1, 3, 8, 15, 16, 17, 31, 33, 48, 64, 70, 130, 300};
    int i, kernels;
    for (i = 0; i < 60; i++) {
        moe_layer_config c;
        memset(&c, 0, sizeof c);
        c.router.d_model = widths[below(13)];
        c.router.n_experts = 1 + below(6);
        c.router.top_k = 1 + below(c.router.n_experts);
        c.router.weight = c.router.top_k == 1 ? MOE_WEIGHT_RAW : MOE_WEIGHT_SUM;
        c.expert = below(MOE_EXPERT_COUNT);
        if (c.expert != MOE_EXPERT_LINEAR) c.d_ff = widths[below(13)];
        if (c.expert == MOE_EXPERT_FACTORISED) c.d_low = 1 + below(20);
        if (c.expert == MOE_EXPERT_MLP || c.expert == MOE_EXPERT_GLU) c.act = below(MOE_ACT_COUNT);
        if (c.expert == MOE_EXPERT_MLP || c.expert == MOE_EXPERT_LINEAR) c.no_expert_bias = below(2);
        if (c.expert == MOE_EXPERT_SWIGLU || c.expert == MOE_EXPERT_GLU) c.expert_bias = below(2);
        if (c.expert == MOE_EXPERT_SWIGLU && below(2)) {
            c.swiglu_alpha = (moe_real)(below(2) ? 1.702 : 0);
            c.swiglu_limit = (moe_real)below(2) / 2;
            c.swiglu_offset = (moe_real)below(3) - 1;
        }
        if (below(2)) {
            c.n_shared = 1;
            c.d_shared = widths[below(10)];
            c.shared_sigmoid = below(2);
        }
        if (below(2)) c.d_out = widths[below(13)];
        if (below(3) == 0) c.d_latent = widths[below(13)];
        c.router.apply_to = below(4) == 0 ? MOE_APPLY_INPUT : MOE_APPLY_OUTPUT;
        for (kernels = MOE_KERNELS_C; kernels < MOE_KERNELS_COUNT; kernels++) {
            c.kernels = kernels;
            if (moe_kernels_select(kernels) != NULL) test_config(&c, (size_t)(1 + below(40)), "a layer at random");
        }
    }
}

static void test_presets(void) {
    const moe_preset *preset;
    moe_layer_config c;
    int all = 0, tested = 0;
    for (preset = moe_presets(); preset->name != NULL; preset++, all++) {
        if (!CHECK(moe_layer_preset(preset->name, &c, NULL) == MOE_OK, preset->name)) continue;
        c.router.d_model = 24;
        c.d_ff = 20;
        if (c.router.n_experts == 0 || c.router.n_experts > 8) c.router.n_experts = 8;
        TEST_FEWER_EXPERTS(c.router);
        if (c.router.top_k > 8) c.router.top_k = 8;
        if (c.router.select == MOE_SELECT_HASH || c.router.student_dim > 0) c.router.table_size = 8;
        if (c.router.heads > 1) c.router.heads = 1;
        if (moe_router_check(&c.router, NULL, NULL) != MOE_OK || moe_router_check_training(&c.router, NULL) != MOE_OK)
            continue;
        test_config(&c, 12, preset->name);
        tested++;
    }
    CHECKF(tested + 4 >= all, "%d presets of %d", tested, all);
}

/* Scores that read each activation of the experts. */
static void test_scored(void) {
    moe_layer_config c;
    int node;
    for (node = 0; node < MOE_NODE_COUNT; node++) {
        memset(&c, 0, sizeof c);
        c.router.d_model = 20;
        c.d_ff = 18;
        c.router.n_experts = 3;
        c.router.top_k = 2;
        c.router.score = MOE_SCORE_NORM;
        c.router.norm_node = node;
        c.expert = node == MOE_NODE_LOW ? MOE_EXPERT_FACTORISED : MOE_EXPERT_SWIGLU;
        if (moe_layer_check(&c, NULL, NULL) == MOE_OK) test_config(&c, 11, "a norm as score");
        if (c.expert != MOE_EXPERT_SWIGLU) continue;
        c.expert_bias = 1;
        c.swiglu_alpha = (moe_real)1.702;
        c.swiglu_limit = (moe_real)0.5;
        c.swiglu_offset = 1;
        CHECK(moe_layer_check(&c, NULL, NULL) == MOE_OK, "shaped experts");
        test_config(&c, 11, "a norm of shaped experts as score");
    }
}

/* ---- weights of less precision ---- */

static double distance(const moe_real *a, const moe_real *b, size_t n) {
    double off = 0.0, all = 0.0;
    size_t i;
    for (i = 0; i < n; i++) {
        off += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        all += (double)b[i] * (double)b[i];
    }
    return all > 0.0 ? off / all : 0.0;
}

/* The relative error of a layer's output, squared, on normal weights and inputs; threads change
   nothing; the report agrees. */
static void check_type(scene *s, int type, double limit, const char *name) {
    moe_quant_error *errors = (moe_quant_error *)grab((size_t)s->layer.config.router.n_experts, sizeof *errors);
    moe_parallel team;
    moe_error error;
    result plain, packed, shared;
    size_t bytes = 0, work_bytes = 0, e;
    size_t rows = 0;
    int calls = 0, kept = s->layer.is_packed;
    void *memory, *work;
    memset(&team, 0, sizeof team);
    team.ctx = &calls;
    team.run = backwards;
    team.always = 1;
    team.threads = 3;
    s->layer.is_packed = 0;
    plain = run(s, 0, NULL);
    CHECK(moe_layer_pack_size(&s->layer, type, 0, &bytes, NULL) == MOE_OK, name);
    CHECK(moe_layer_pack_size(&s->layer, type, s->n, NULL, &work_bytes) == MOE_OK, name);
    memory = grab(bytes, 1);
    work = grab(work_bytes, 1);
    CHECK(moe_layer_quantize(&s->layer, type, memory, bytes, &s->call, work, work_bytes - 1, errors, &error) ==
                  MOE_ERR_SPACE &&
              !s->layer.is_packed,
          "a byte short");
    CHECK(moe_layer_quantize(&s->layer, type, memory, bytes, NULL, work, work_bytes, errors, &error) ==
              MOE_ERR_ARGUMENT,
          "no batch");
    CHECK(moe_layer_quantize(&s->layer, type, memory, bytes, &s->call, work, work_bytes, errors, &error) == MOE_OK,
          name);
    packed = run(s, 0, NULL);
    shared = run(s, 0, &team);
    CHECK(packed.status == plain.status && distance(packed.y, plain.y, s->n * s->o) < limit * limit, name);
    CHECK(type == MOE_TYPE_REAL || distance(packed.y, plain.y, s->n * s->o) > 0.0, "and it is another layer");
    CHECK(same(s, &packed, &shared) && calls > 0, "threads");
    for (e = 0; e < (size_t)s->layer.config.router.n_experts; e++) {
        rows += errors[e].rows;
        CHECK((double)errors[e].output < 2.0 * limit + 1e-9 && (type == MOE_TYPE_REAL || errors[e].output > 0),
              "the error of an expert");
    }
    CHECK(rows > 0, "the tokens are counted");
    s->layer.is_packed = kept;
    drop(&plain);
    drop(&packed);
    drop(&shared);
    free(memory);
    free(work);
    free(errors);
}

static void test_types(void) {
    static const struct {
        int type;
        double swiglu;
        const char *name;
    } types[] = {{MOE_TYPE_REAL, 1e-6, "as they are"},
                 {MOE_TYPE_F16, 1e-3, "binary16"},
                 {MOE_TYPE_BF16, 8e-3, "bfloat16"},
#ifndef MOE_NO_QUANT
                 {MOE_TYPE_Q8, 0.03, "int8"},
                 {MOE_TYPE_Q8_BLOCK, 0.018, "int8 in blocks"},
                 {MOE_TYPE_Q4, 0.17, "int4"},
#endif
    };
    static const int shapes[][2] = {{64, 256}, {352, 352}, {40, 70}, {130, 33}, {96, 72}, {96, 72}, {40, 72}};
    size_t i, k;
    int kernels;
    for (kernels = MOE_KERNELS_C; kernels < MOE_KERNELS_COUNT; kernels++)
        for (k = 0; k < sizeof shapes / sizeof shapes[0] && moe_kernels_select(kernels) != NULL; k++) {
            moe_layer_config c;
            scene s;
            memset(&c, 0, sizeof c);
            c.router.d_model = shapes[k][0];
            c.d_ff = shapes[k][1];
            c.router.n_experts = 8;
            c.router.top_k = 2;
            c.kernels = kernels;
            if (k == 2) c.expert = MOE_EXPERT_FACTORISED;
            if (k == 3) {
                c.expert = MOE_EXPERT_MLP;
                c.n_shared = 1;
            }
            if (k == 4) {
                c.expert_bias = 1;
                c.swiglu_alpha = (moe_real)1.702;
                c.swiglu_limit = 2;
                c.swiglu_offset = 1;
            }
            if (k > 4) c.d_latent = k == 5 ? 40 : 150; /* two products more */
            if (!CHECK(begin(&s, &c, k == 2 ? 5 : 40), "begin")) continue; /* five tokens leave experts without any */
            for (i = 0; i < sizeof types / sizeof types[0]; i++)
                check_type(&s, types[i].type, types[i].swiglu * (k < 2 ? 1.0 : k < 5 ? 1.3 : 1.6), types[i].name);
            end(&s);
        }
}

/* A score that reads all experts reads the packed weights as well. */
static void test_scored_types(void) {
    moe_layer_config c;
    scene s;
    int type;
    memset(&c, 0, sizeof c);
    c.router.d_model = 48;
    c.d_ff = 64;
    c.router.n_experts = 4;
    c.router.top_k = 2;
    c.router.score = MOE_SCORE_NORM;
    c.router.norm_node = MOE_NODE_PRODUCT;
    if (!CHECK(begin(&s, &c, 20), "begin")) return;
    for (type = MOE_TYPE_REAL; type <= MOE_TYPE_F16; type++) check_type(&s, type, 1e-3, "a norm as score");
#ifndef MOE_NO_QUANT
    check_type(&s, MOE_TYPE_Q8_BLOCK, 0.5, "a norm as score, in int8");
#endif
    end(&s);
#ifndef MOE_NO_QUANT
    c.router.score = MOE_SCORE_COMPETITION;
    c.router.norm_node = 0;
    c.router.gate = MOE_GATE_IDENTITY;
    c.router.weight = MOE_WEIGHT_RAW;
    if (!CHECK(begin(&s, &c, 60), "begin")) return;
    /* each expert's second product reads rows of its own */
    check_type(&s, MOE_TYPE_Q8, 0.3, "outputs as scores, in int8");
    end(&s);
#endif
}

/* A soft layer's experts are measured on tokens, all of them. */
static void test_soft_types(void) {
    moe_quant_error errors[4];
    moe_layer_config c;
    moe_error error;
    size_t bytes = 0, work_bytes = 0, e;
    void *memory, *work;
    scene s;
    memset(&c, 0, sizeof c);
    c.router.d_model = 32;
    c.router.n_experts = 4;
    c.router.select = MOE_SELECT_SOFT;
    c.router.slots = 2;
    c.d_ff = 24;
    if (!CHECK(begin(&s, &c, 20), "begin")) return;
    s.call.mask = NULL;
    CHECK(moe_layer_pack_size(&s.layer, MOE_TYPE_F16, s.n, &bytes, &work_bytes) == MOE_OK, "sizes");
    memory = grab(bytes, 1);
    work = grab(work_bytes, 1);
    CHECK(moe_layer_quantize(&s.layer, MOE_TYPE_F16, memory, bytes, &s.call, work, work_bytes, errors, &error) ==
              MOE_OK,
          error.message);
    for (e = 0; e < 4; e++)
        CHECK(errors[e].rows == s.n && errors[e].output > 0 && errors[e].output < (moe_real)0.01, "an expert");
    end(&s);
    free(memory);
    free(work);
}

/* The error of one expert that has all of the weight is that of y, as a share of its length. */
static void test_report_is_relative(void) {
    moe_quant_error found;
    moe_layer_config c;
    moe_error error;
    scene s;
    result plain, packed;
    size_t bytes = 0, work_bytes = 0, i;
    double off = 0, all = 0;
    void *memory, *work;
    memset(&c, 0, sizeof c);
    c.router.d_model = c.d_ff = 32;
    c.router.n_experts = c.router.top_k = 1;
    c.router.weight = MOE_WEIGHT_ONE;
    if (!CHECK(begin(&s, &c, 9), "begin")) return;
    s.call.mask = NULL;
    plain = run(&s, 0, NULL);
    CHECK(moe_layer_pack_size(&s.layer, MOE_TYPE_F16, 9, &bytes, &work_bytes) == MOE_OK, "sizes");
    memory = grab(bytes, 1);
    work = grab(work_bytes, 1);
    CHECK(moe_layer_quantize(&s.layer, MOE_TYPE_F16, memory, bytes, &s.call, work, work_bytes, &found, &error) ==
              MOE_OK,
          "packs");
    packed = run(&s, 0, NULL);
    for (i = 0; i < 9 * s.o; i++) {
        off += pow((double)packed.y[i] - (double)plain.y[i], 2);
        all += pow((double)plain.y[i], 2);
    }
    CHECK(off > 0 && found.rows == 9 && near_to((double)found.output / sqrt(off / all), 1.0, 1e-3), "the report");
    drop(&plain);
    drop(&packed);
    free(memory);
    free(work);
    end(&s);
}

/* ---- what may go wrong ---- */

/* A report on a layer of which something is not finite, of which only padding comes first, and a
   failure half way. */
static void test_mishaps(void) {
    moe_quant_error errors[4];
    moe_layer_config c;
    moe_error error;
    scene s;
    size_t bytes = 0, more = 0;
    size_t work_bytes = 0, e, i;
    void *memory, *work;
    moe_real kept, *down;
    memset(&c, 0, sizeof c);
    c.router.d_model = 32;
    c.d_ff = 32;
    c.router.n_experts = 4;
    c.router.top_k = 1;
    c.router.weight = MOE_WEIGHT_RAW;
    if (!CHECK(begin(&s, &c, 80), "begin")) return;
    for (i = 0; i < 80; i++) s.mask[i] = i >= 78; /* two real tokens, the last */
    memset(s.x, 0, 78 * s.d * sizeof *s.x);
    CHECK(moe_layer_pack_size(&s.layer, MOE_TYPE_REAL, 0, &bytes, NULL) == MOE_OK &&
              moe_layer_pack_size(&s.layer, MOE_TYPE_F16, 0, &more, NULL) == MOE_OK,
          "sizes");
    CHECK(moe_layer_pack_size(&s.layer, MOE_TYPE_F16, 80, NULL, &work_bytes) == MOE_OK, "sizes");
    memory = grab(bytes, 1);
    work = grab(work_bytes, 1);
    CHECK(moe_layer_quantize(&s.layer, MOE_TYPE_F16, memory, bytes, &s.call, work, work_bytes, errors, &error) ==
              MOE_OK,
          "packs");
    for (e = 0; e < 4; e++) CHECK(errors[e].output > 0, "padding is no probe");
    memcpy(&down, &s.layer.tensors[MOE_EXPERTS_DOWN], sizeof down);
    kept = down[3];
    down[3] = (moe_real)HUGE_VAL - (moe_real)HUGE_VAL;
    CHECK(moe_layer_quantize(&s.layer, MOE_TYPE_F16, memory, bytes, &s.call, work, work_bytes, errors, &error) ==
              MOE_OK,
          "packs");
    CHECK(!moe_is_finite(errors[0].output) && moe_is_finite(errors[1].output), "a weight that is no number shows");
#ifndef MOE_NO_QUANT
    CHECK(moe_layer_pack(&s.layer, MOE_TYPE_REAL, memory, bytes, &error) == MOE_OK, "packs");
    CHECK(moe_layer_pack(&s.layer, MOE_TYPE_Q4, memory, bytes, &error) == MOE_ERR_NONFINITE, "int4 of no number");
    CHECK(!s.layer.is_packed, "what was overwritten is not read again");
#endif
    down[3] = kept;
    free(memory);
    free(work);
    end(&s);
}

/* A step of a trainer whose net was packed after it was made: the workspace suffices, and the
   weights that it changes are no longer packed. */
static void test_trainer(void) {
    moe_layer_config c;
    moe_train_config config;
    moe_trainer trainer;
    moe_net net;
    moe_data data;
    moe_error error;
    moe_real *x = normals(32 * 24), *target = normals(32 * 24);
    size_t bytes = 0;
    void *memory;
    memset(&c, 0, sizeof c);
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    memset(&net, 0, sizeof net);
    memset(&trainer, 0, sizeof trainer);
    c.d_ff = 40;
    c.router.n_experts = 4;
    c.router.top_k = 2;
    config.batch = 32;
    config.criterion = MOE_CRITERION_SQUARED_ERROR;
    data.n = 32;
    data.x = x;
    data.targets = target;
    CHECK(moe_net_init(&net, 24, MOE_KERNELS_AUTO, NULL) == MOE_OK && moe_net_mixture(&net, &c) == MOE_OK &&
              moe_net_build(&net, 1, 3, &error) == MOE_OK,
          "a net");
    CHECK(moe_trainer_init(&trainer, &net, &config, &error) == MOE_OK, "a trainer");
#ifndef MOE_NO_QUANT
    CHECK(moe_layer_pack_size(&net.modules[0].layer, MOE_TYPE_Q4, 0, &bytes, NULL) == MOE_OK, "size");
    memory = grab(bytes, 1);
    CHECK(moe_layer_pack(&net.modules[0].layer, MOE_TYPE_Q4, memory, bytes, &error) == MOE_OK, "packs");
#else
    (void)bytes;
    memory = NULL;
#endif
    CHECK(moe_trainer_step(&trainer, &data, NULL, &error) == MOE_OK, "a step");
    CHECK(!net.modules[0].layer.is_packed, "unpacked by the step");
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    free(memory);
    free(x);
    free(target);
}

/* A module without a router shares its work as well, and the order of the tasks changes no bit. */
static void test_feed_forward(void) {
    moe_net net;
    moe_call call;
    moe_net_pass pass;
    moe_parallel team;
    moe_real *x = normals(40 * 24), *first = NULL;
    size_t bytes = 0;
    void *work;
    int calls = 0, turn;
    memset(&call, 0, sizeof call);
    memset(&team, 0, sizeof team);
    team.ctx = &calls;
    team.run = backwards;
    team.always = 1;
    team.threads = 3;
    CHECK(moe_net_init(&net, 24, MOE_KERNELS_AUTO, NULL) == MOE_OK && moe_net_feed_forward(&net, NULL) == MOE_OK &&
          moe_net_build(&net, 0, 3, NULL) == MOE_OK && moe_net_work_size(&net, 40, 0, &bytes) == MOE_OK);
    work = grab(1, bytes);
    call.n_tokens = 40;
    call.x = x;
    for (turn = 0; turn < 2; turn++) {
        call.parallel = turn == 0 ? NULL : &team;
        CHECK_STATUS(moe_net_forward(&net, &call, work, bytes, &pass), MOE_OK);
        CHECK((calls > 0) == turn);
        if (turn == 0) memcpy(first = reals(40 * 24), pass.y, 40 * 24 * sizeof *first);
        else CHECK(same_reals(first, pass.y, 40 * 24));
    }
    free(first);
    free(work);
    free(x);
    moe_net_free(&net);
}

/* Threads are started where they gain more than they cost: for many rows or a large matrix. */
static void test_short_products(void) {
    static const struct {
        int d, rows, always, shares;
    } rows[] = {{256, 64, 0, 1}, {256, 8, 0, 0}, {256, 8, 1, 1}, {24, 64, 0, 0}, {700, 1, 0, 1}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        const size_t n = (size_t)rows[i].rows;
        moe_net net;
        moe_call call;
        moe_net_pass pass;
        moe_parallel team;
        moe_real *x = normals(n * (size_t)rows[i].d);
        size_t bytes = 0;
        void *work;
        int calls = 0;
        memset(&call, 0, sizeof call);
        memset(&team, 0, sizeof team);
        team.ctx = &calls;
        team.run = backwards;
        team.always = rows[i].always;
        team.threads = 2;
        CHECK(moe_net_init(&net, rows[i].d, MOE_KERNELS_AUTO, NULL) == MOE_OK &&
              moe_net_linear(&net, rows[i].d) == MOE_OK && moe_net_build(&net, 0, 3, NULL) == MOE_OK &&
              moe_net_work_size(&net, n, 0, &bytes) == MOE_OK);
        work = grab(1, bytes);
        call.n_tokens = n;
        call.x = x;
        call.parallel = &team;
        CHECK_STATUS(moe_net_forward(&net, &call, work, bytes, &pass), MOE_OK);
        CHECKF((calls > 0) == rows[i].shares, "%d rows, width %d", rows[i].rows, rows[i].d);
        free(work);
        free(x);
        moe_net_free(&net);
    }
}

/* ---- networks ---- */

/* Attention of every form, and what else multiplies all rows by a matrix. */
static void draw_attention(moe_attention_config *c, int d) {
    static const int groups[] = {1, 2, 4};
    memset(c, 0, sizeof *c);
    c->heads = 4;
    c->d_head = d / 4;
    c->rotary = below(2);
    c->sinks = below(2);
    c->bias = below(2);
    c->cap = below(3) == 0 ? (moe_real)5 : 0;
    c->full = below(4) == 0;
    if (!c->full && below(2)) c->window = 1 + below(90);
    else if (!c->full && below(3) == 0) c->chunk = 1 + below(70);
    c->kv_heads = groups[below(3)];
    if (below(4) > 0) return;
    c->rotary = 1;
    c->rotary_dims = 4;
    c->kv_heads = c->bias = 0;
    c->kv_lora = 12;
    c->q_lora = below(2) * 20;
}

/* The outputs of a call, forward and (training) backward, one after the other. */
static moe_real *net_results(moe_net *net, moe_call *call, const moe_parallel *team, size_t *count) {
    const size_t n = call->n_tokens;
    const size_t in = (size_t)net->d_in, out = (size_t)net->d_out;
    size_t bytes = 0, i, at;
    moe_real *all, *dy = call->training ? normals(n * out) : NULL;
    moe_net_pass pass;
    void *work;
    *count = n * (in + out) + moe_net_parameter_count(net, NULL);
    all = (moe_real *)grab(*count, sizeof *all);
    memset(all, 0, *count * sizeof *all);
    call->parallel = team;
    CHECK(moe_net_work_size(net, n, call->training, &bytes) == MOE_OK);
    work = grab(1, bytes);
    CHECK_STATUS(moe_net_forward(net, call, work, bytes, &pass), MOE_OK);
    memcpy(all, pass.y, n * out * sizeof *all);
    at = n * out;
    if (call->training) {
        for (i = 0; i < n * out; i++) dy[i] = pass.y[i] + (moe_real)0.5;
        for (i = 0; i < net->n_tensors; i++)
            if (net->tensors[i].gradient != NULL)
                memset(net->tensors[i].gradient, 0, net->tensors[i].count * sizeof *all);
        CHECK_STATUS(moe_net_backward(net, dy, all + at, &pass), MOE_OK);
        at += n * in;
        for (i = 0; i < net->n_tensors; at += net->tensors[i++].count)
            if (net->tensors[i].gradient != NULL)
                memcpy(all + at, net->tensors[i].gradient, net->tensors[i].count * sizeof *all);
    }
    free(dy);
    free(work);
    return all;
}

/* The tokens of a call one after the other, and then the last ones at once. */
static moe_real *decoded(const moe_net *net, const moe_call *call, const moe_parallel *team, size_t *count) {
    const size_t n = call->n_tokens;
    const size_t in = (size_t)net->d_in, out = (size_t)net->d_out;
    size_t bytes = 0, work_size = 0, t, step;
    moe_real *all = (moe_real *)grab(n * out, sizeof *all);
    moe_cache cache;
    moe_net_pass pass;
    moe_call part = *call;
    void *memory, *work;
    memset(&cache, 0, sizeof cache);
    part.parallel = team;
    CHECK_STATUS(moe_net_decode_size(net, n, n, &bytes, &work_size, NULL), MOE_OK);
    memory = grab(1, bytes);
    work = grab(1, work_size);
    CHECK_STATUS(moe_net_cache_init(&cache, net, n, memory, bytes, NULL), MOE_OK);
    for (t = 0; t < n; t += step) {
        step = t < 70 ? 1 : n - t;
        part.n_tokens = step;
        part.x = call->x + t * in;
        CHECK_STATUS(moe_net_decode(net, &cache, &part, work, work_size, &pass), MOE_OK);
        memcpy(all + t * out, pass.y, step * out * sizeof *all);
    }
    free(memory);
    free(work);
    *count = n * out;
    return all;
}

/* The numbers that tasks of one call write by products and unpacking, and which task did. */
enum { WRITTEN = 1 << 15 };
static struct {
    const moe_kernels *plain;
    moe_kernels kernels; /* the same, watched */
    const moe_real *at[WRITTEN];
    int by[WRITTEN];
    int task; /* the one that runs, from 1 */
    long met; /* numbers that two tasks have written */
} watch;

static void watched(const moe_real *at, size_t n) {
    for (; n > 0 && watch.task > 0; n--, at++) {
        size_t i = (uintptr_t)at / sizeof *at % WRITTEN;
        while (watch.at[i] != NULL && watch.at[i] != at) i = (i + 1) % WRITTEN;
        watch.met += watch.at[i] == at && watch.by[i] != watch.task;
        watch.at[i] = at;
        watch.by[i] = watch.task;
    }
}

#define WATCHED(name, op) \
    static void name(size_t m, size_t n, size_t k, const moe_real *a, size_t lda, const void *b, size_t ldb, \
                     moe_real *c, size_t ldc, int accumulate) { \
        size_t i; \
        for (i = 0; i < m; i++) watched(c + i * ldc, n); \
        watch.plain->matmul[op][MOE_TYPE_REAL](m, n, k, a, lda, b, ldb, c, ldc, accumulate); \
    }
WATCHED(watched_nn, MOE_MATMUL_NN)
WATCHED(watched_nt, MOE_MATMUL_NT)
WATCHED(watched_tn, MOE_MATMUL_TN)

static void watched_widen(int type, size_t count, const void *packed, moe_real *out) {
    watched(out, count * 16);
    watch.plain->widen(type, count, packed, out);
}

static void watching(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    *(int *)ctx += 1;
    memset(watch.at, 0, sizeof watch.at);
    for (watch.task = 1; watch.task <= count; watch.task++) task(work, watch.task - 1);
    watch.task = 0;
}

/* Tasks one after the other hide that they share room: in attention no two of them write to one
   place. */
static void test_tasks_write_apart(void) {
    enum { N = 20, D = 32 };
    moe_real *x = normals(N * D);
    int way, calls = 0;
    watch.plain = moe_kernels_select(MOE_KERNELS_C);
    watch.kernels = *watch.plain;
    watch.kernels.matmul[MOE_MATMUL_NN][MOE_TYPE_REAL] = watched_nn;
    watch.kernels.matmul[MOE_MATMUL_NT][MOE_TYPE_REAL] = watched_nt;
    watch.kernels.matmul[MOE_MATMUL_TN][MOE_TYPE_REAL] = watched_tn;
    watch.kernels.widen = watched_widen;
    for (way = 0; way < 4; way++) { /* training, forward, decoding, decoding with a smaller cache */
        moe_attention_config attention;
        moe_parallel team;
        moe_net net;
        moe_call call;
        size_t count;
        memset(&attention, 0, sizeof attention);
        memset(&team, 0, sizeof team);
        memset(&call, 0, sizeof call);
        attention.heads = 4;
        attention.kv_heads = 2;
        attention.cap = 5;
        team.ctx = &calls;
        team.run = watching;
        team.always = 1;
        team.threads = 4;
        call.n_tokens = N;
        call.x = x;
        call.training = way == 0;
        CHECK_STATUS(moe_net_init(&net, D, MOE_KERNELS_C, NULL), MOE_OK);
        CHECK(moe_net_attention(&net, &attention) == MOE_OK && moe_net_build(&net, way == 0, 5, NULL) == MOE_OK);
        net.kernels = &watch.kernels;
        if (way == 3) net.cache_type = MOE_TYPE_F16;
        calls = 0;
        free(way < 2 ? net_results(&net, &call, &team, &count) : decoded(&net, &call, &team, &count));
        CHECKF(calls > 3 && watch.met == 0, "way %d: %d calls, %ld numbers", way, calls, watch.met);
        moe_net_free(&net);
    }
    free(x);
}

/* Threads change no bit of what nets compute; packed or not, decoding included. */
static void test_nets(void) {
    static const int types[] = {-1, MOE_TYPE_REAL, MOE_TYPE_BF16, MOE_TYPE_Q8};
    int calls = 0, i, way, full;
    size_t k;
    for (i = 0; i < 24; i++) {
        moe_attention_config attention;
        moe_net net;
        moe_call call;
        moe_parallel team, alone;
        int d = 16 * (2 + below(3));
        size_t n = (size_t)(1 + below(180)), count, again, bytes = 0;
        moe_real *one, *several, *plain = NULL, *x = normals(n * (size_t)d);
        void *memory = NULL;
        memset(&call, 0, sizeof call);
        memset(&team, 0, sizeof team);
        memset(&alone, 0, sizeof alone);
        draw_attention(&attention, d);
        full = attention.full;
        CHECK_STATUS(moe_net_init(&net, d, MOE_KERNELS_AUTO, NULL), MOE_OK);
        CHECK(moe_net_attention(&net, &attention) == MOE_OK && moe_net_residual(&net, 1) == MOE_OK &&
              moe_net_linear(&net, 3 + below(60)) == MOE_OK);
        CHECK_STATUS(moe_net_build(&net, 1, (uint64_t)i, NULL), MOE_OK);
        for (k = 0; k < net.n_tensors; k++) /* biases begin at 0 */
            if (net.tensors[k].n_dims == 1) net.tensors[k].data[net.tensors[k].count - 1] = (moe_real)0.5;
        call.n_tokens = n;
        call.x = x;
        team.ctx = &calls;
        team.run = backwards;
        team.always = 1;
        team.threads = 2 + below(9);
        for (way = 0; way < 6; way++) {
            call.training = way == 0;
            if (way == 5 && full) continue;
            if (way > 1 && way < 5 && types[way - 1] >= 0) {
                free(memory);
                CHECK_STATUS(moe_net_pack_size(&net, types[way - 1], n, &bytes, NULL), MOE_OK);
                memory = grab(1, bytes);
                CHECK_STATUS(moe_net_pack(&net, types[way - 1], memory, bytes, NULL), MOE_OK);
            }
            one = way < 5 ? net_results(&net, &call, &alone, &count) : decoded(&net, &call, &alone, &count);
            calls = 0;
            several = way < 5 ? net_results(&net, &call, &team, &again) : decoded(&net, &call, &team, &again);
            CHECKF(calls > 0 && count == again && same_reals(one, several, count), "net %d, way %d, %d threads", i, way,
                   team.threads);
            if (way == 2) CHECK(same_reals(plain, one, n * (size_t)net.d_out), "packed as they are");
            if (way == 2) free(plain);
            if (way == 1) plain = one;
            else free(one);
            free(several);
        }
        free(memory);
        free(x);
        moe_net_free(&net);
    }
}

int main(void) {
    moe_rng_seed(&rng, 31);
    CASE(test_nets());
    CASE(test_tasks_write_apart());
    CASE(test_feed_forward());
    CASE(test_short_products());
    CASE(test_report_is_relative());
    CASE(test_mishaps());
    CASE(test_trainer());
    CASE(test_types());
    CASE(test_scored_types());
    CASE(test_soft_types());
    CASE(test_large());
    CASE(test_shapes());
    CASE(test_presets());
    CASE(test_scored());
    return test_end();
}
