/* Float models that are lists of operations against moe_net_forward and moe_net_decode: random
   networks of every module and setting that has a list, tokens, choices and their weights, errors;
   and what has none says why and gives the network's bits.
       cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/float_lists.c -o float_lists -lm
   "float_lists seed N" takes other networks. */

#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NETS = 400, TOKENS = 6, WIDEST = 64, VOCABULARY = 20 };

static moe_rng rng;

static size_t pick(size_t n) { return (size_t)(moe_rng_uniform(&rng) * (moe_real)n) % n; }

/* ---- random configurations, as text ---- */

typedef struct text {
    char all[4000];
    size_t begin; /* of the last configuration */
} text;

static void put(text *t, const char *words) {
    strcat(t->all, words);
    strcat(t->all, " ");
}

static const char *one_of(const char *const *list) {
    size_t n = 0;
    while (list[n] != NULL) n++;
    return list[pick(n)];
}

static const char *const experts[] = {"",
                                      "expert=mlp act=gelu",
                                      "expert=mlp act=relu no_expert_bias=1",
                                      "expert=mlp act=tanh",
                                      "expert=linear",
                                      "expert=factorised d_low=3",
                                      "expert=glu act=gelu_tanh",
                                      "expert_bias=1",
                                      NULL};
static const char *const scores[] = {"", "", "router_bias=1", "score=random",
                                     "score=mlp router_hidden=5 router_act=tanh", "input=scaled_rms", NULL};
static const char *const gates[] = {"", "gate=sigmoid", "gate=sigmoid gate_temperature=0.7", "gate=sqrt_softplus",
                                    "gate=relu", "gate=identity", "gate_temperature=2.5", NULL};
static const char *const selects[] = {"", "top_k=1", "top_k=3", "selection_bias=1", "select=dense", "select=sinkhorn",
                                      "select=balanced", "select=sample", "select=threshold threshold=0.2",
                                      "select=threshold threshold=0.9 threshold_fallback=always",
                                      "select=threshold threshold_learned=1", "select=positive",
                                      "select=top_p top_p=0.6", NULL};
static const char *const weights[] = {"", "weight=softmax", "weight=raw", "weight=uniform", "weight=one",
                                      "weight=p_norm weight_p=1", "weight=raw renormalize=after", "expert_scale=1",
                                      "scale=2.5", NULL};
static const char *const extras[] = {"", "", "n_shared=1 d_shared=3", "n_shared=2 d_shared=3 shared_sigmoid=1",
                                     "add_input=1", "apply_to=input", "schedule_steps=100 k_end=1 top_k=3", NULL};

static void random_mixture(text *t, int hash) {
    char sizes[64];
    t->all[t->begin] = '\0';
    sprintf(sizes, "n_experts=%d d_ff=%d", (int)(3 + pick(6)), (int)(1 + pick(9)));
    put(t, sizes);
    put(t, one_of(experts));
    put(t, one_of(scores));
    put(t, one_of(gates));
    put(t, hash ? "select=hash table_size=20" : one_of(selects));
    put(t, one_of(weights));
    put(t, one_of(extras));
}

/* ---- random networks ---- */

/* What does not fit is left out. */
static void add_mixture(moe_net *net, int hash, int dense, text *t) {
    moe_layer_config c;
    moe_error error;
    int tries;
    t->begin = strlen(t->all);
    for (tries = 0; tries < 50; tries++) {
        memset(&c, 0, sizeof c);
        random_mixture(t, hash);
        if (dense) {
            t->all[t->begin] = '\0';
            put(t, "d_ff=7");
            put(t, one_of(experts));
        }
        if (moe_fields_apply(moe_layer_fields(), &c, t->all + t->begin, &error) != MOE_OK) continue;
        if ((dense ? moe_net_feed_forward(net, &c) : moe_net_mixture(net, &c)) == MOE_OK) return;
        net->error.code = MOE_OK;
    }
}

static void add_module(moe_net *net, int ids, text *t) {
    const size_t kind = pick(9);
    const moe_module *last = net->n_modules > 0 ? &net->modules[net->n_modules - 1] : NULL;
    if (kind == 0) moe_net_linear(net, 1 + (int)pick(20));
    else if (kind == 1) moe_net_activation(net, (int)pick(MOE_ACT_COUNT));
    else if (kind == 2) moe_net_layer_norm(net);
    else if (kind == 3) moe_net_rms_norm(net);
    else if (kind == 4) moe_net_dropout(net, (moe_real)0.25);
    else if (kind == 5) add_mixture(net, 0, 1, t);
    else if (kind > 6) add_mixture(net, ids && pick(3) == 0, 0, t);
    else if (last != NULL && last->d_in == last->d_out && last->kind != MOE_MODULE_EMBEDDING) moe_net_residual(net, 1);
}

static moe_status random_net(moe_net *net, uint64_t seed, text *t, moe_error *error) {
    const int ids = pick(3) == 0;
    size_t count = 1 + pick(5), i;
    moe_status status;
    moe_net_init(net, ids ? 0 : 1 + (int)pick(20), MOE_KERNELS_C, NULL);
    if (ids) moe_net_embedding(net, VOCABULARY, 8);
    if (ids && pick(2) == 0) moe_net_positions(net, TOKENS + 1);
    for (i = 0; i < count; i++) add_module(net, ids, t);
    if (ids && net->modules[net->n_modules - 1].d_out == 8) moe_net_tied(net);
    if (net->n_modules == 0) moe_net_linear(net, 4);
    status = moe_net_build(net, 0, seed, error);
    for (i = 0; status == MOE_OK && i < net->n_tensors; i++) {
        const moe_tensor *tensor = &net->tensors[i];
        size_t j;
        if (strstr(tensor->name, "router.table") != NULL || strstr(tensor->name, "router.step") != NULL) continue;
        for (j = 0; j < tensor->count; j++) tensor->data[j] += (moe_real)0.3 * moe_rng_normal(&rng);
    }
    return status;
}

/* ---- both ways ---- */

typedef struct both {
    void *scratch, *work, *cache_memory;
    moe_cache cache;
    size_t work_size;
} both;

static void begin(both *b, const moe_net *net, const moe_model *m) {
    size_t cache_size = 0;
    memset(b, 0, sizeof *b);
    b->scratch = calloc(m->scratch_size, 1);
    if (m->length > 0) {
        CHECK(moe_net_decode_size(net, m->length, 1, &cache_size, NULL, NULL) == MOE_OK);
        CHECK(moe_net_decode_size(net, m->length, 1, NULL, &b->work_size, NULL) == MOE_OK);
        b->cache_memory = calloc(cache_size, 1);
        CHECK(moe_net_cache_init(&b->cache, net, m->length, b->cache_memory, cache_size, NULL) == MOE_OK);
    } else CHECK(moe_net_work_size(net, 1, 0, &b->work_size) == MOE_OK);
    b->work = calloc(b->work_size, 1);
}

static void end(both *b) {
    free(b->scratch);
    free(b->work);
    free(b->cache_memory);
}

static void same_choices(const moe_net *net, const moe_net_pass *pass, const moe_model *m, const void *scratch) {
    moe_choice choices[64];
    size_t i, j, at = 0, count;
    for (i = 0; i < net->n_modules; i++) {
        const moe_routing *r = moe_net_routing(net, pass, i);
        if (r == NULL) continue;
        if (!CHECK(moe_infer_choices(m, at++, scratch, choices, 64, &count) == MOE_OK) ||
            !CHECK(count == (size_t)r->n_choices[0]))
            continue;
        for (j = 0; j < count; j++) {
            const double w = (double)r->weights[r->choices[j]];
            CHECK(choices[j].expert == r->choices[j] &&
                  fabs((double)choices[j].weight / 32768.0 - w) < 4e-5 + 1e-4 * fabs(w));
        }
    }
    CHECK(moe_infer_choices(m, at, scratch, choices, 64, &count) == MOE_ERR_NOT_FOUND);
}

/* How far each output moves when the inputs do by a millionth of themselves: what rounding may. */
static void condition(const moe_net *net, both *b, const moe_call *call, moe_real *moved) {
    moe_real x[WIDEST];
    moe_call near = *call;
    moe_net_pass pass;
    size_t i;
    near.x = x;
    for (i = 0; i < (size_t)net->d_in; i++) x[i] = call->x[i] * (moe_real)1.000001;
    CHECK(moe_net_forward(net, &near, b->work, b->work_size, &pass) == MOE_OK);
    for (i = 0; i < (size_t)net->d_out; i++) moved[i] = pass.y[i];
    CHECK(moe_net_forward(net, call, b->work, b->work_size, &pass) == MOE_OK);
    for (i = 0; i < (size_t)net->d_out; i++) moved[i] = MOEI_F(fabs)(moved[i] - pass.y[i]);
}

static void compare(const moe_net *net, const moe_model *m) {
    moe_real x[WIDEST], y[WIDEST], moved[WIDEST] = {0}, most;
    moe_call call;
    moe_net_pass pass;
    both b;
    size_t t, i;
    begin(&b, net, m);
    memset(&call, 0, sizeof call);
    call.n_tokens = 1;
    call.decoding = 1; /* predictors decide */
    for (t = 0; t < TOKENS; t++) {
        const int32_t id = (int32_t)(t * 7 % VOCABULARY);
        const void *input = net->d_in > 0 ? (const void *)x : (const void *)&id;
        for (i = 0; i < (size_t)net->d_in; i++) x[i] = moe_rng_normal(&rng);
        call.x = net->d_in > 0 ? x : NULL;
        call.token_ids = net->d_in > 0 ? NULL : &id;
        if (!CHECK(moe_infer(m, NULL, input, y, b.scratch, m->scratch_size) == MOE_OK)) break;
        if (m->length == 0 && net->d_in > 0) condition(net, &b, &call, moved);
        if (m->length > 0) CHECK(moe_net_decode(net, &b.cache, &call, b.work, b.work_size, &pass) == MOE_OK);
        else CHECK(moe_net_forward(net, &call, b.work, b.work_size, &pass) == MOE_OK);
        for (i = 0, most = 1; i < (size_t)net->d_out; i++)
            if (MOEI_F(fabs)(pass.y[i]) > most) most = MOEI_F(fabs)(pass.y[i]);
        for (i = 0; i < (size_t)net->d_out; i++)
            if (!CHECKF(MOEI_F(fabs)(pass.y[i] - y[i]) <= MOEI_F(fmax)((moe_real)2e-5 * most, 8 * moved[i]),
                        "%g is not %g", (double)y[i], (double)pass.y[i]))
                break;
        same_choices(net, &pass, m, b.scratch);
    }
    end(&b);
}

static void describe(const moe_net *net, const text *t, char *about) {
    size_t i;
    about[0] = '\0';
    for (i = 0; i < net->n_modules; i++)
        sprintf(about + strlen(about), "%s; ", moei_module_names[net->modules[i].kind]);
    strcat(about, t->all);
}

static void test_random(uint64_t first) {
    size_t i, lists = 0, mixtures = 0;
    for (i = 0; i < NETS; i++) {
        static char about[5000];
        text t = {"", 0};
        moe_net net;
        moe_built_model built;
        moe_error error;
        moe_rng_seed(&rng, first + i);
        test_about = about;
        if (random_net(&net, first + i, &t, &error) == MOE_OK) {
            describe(&net, &t, about);
            if (CHECKF(moe_model_create(&built, &net, NULL, &error) == MOE_OK, "%s", error.message)) {
                lists += built.model.net == NULL;
                mixtures += built.model.n_mixtures;
                CHECKF(built.model.net == NULL || strcmp(built.obstacle, "there is nothing to compute") == 0 ||
                           strcmp(built.obstacle, "the selection with this gate") == 0,
                       "no list: %s", built.obstacle);
                compare(&net, &built.model);
                moe_model_free(&built);
            }
        }
        moe_net_free(&net);
    }
    test_about = "";
    CHECKF(lists > NETS / 2 && mixtures > NETS / 2, "%d lists, %d mixtures", (int)lists, (int)mixtures);
    printf("%d lists with %d mixtures\n", (int)lists, (int)mixtures);
}

/* ---- latent experts ---- */

/* Alone, and behind and before other modules. */
static void test_latent(void) {
    static const char *const latents[] = {"d_latent=1", "d_latent=3 n_shared=1 d_shared=4", "d_latent=9 apply_to=input",
                                          "d_latent=4 n_shared=2 d_shared=3 shared_sigmoid=1 add_input=1"};
    size_t latent, expert, score;
    for (latent = 0; latent < 4; latent++)
        for (expert = 0; experts[expert] != NULL; expert++)
            for (score = 0; scores[score] != NULL; score++) {
                text t;
                moe_layer_config c;
                moe_net net;
                moe_built_model built;
                moe_error error;
                int i;
                memset(&t, 0, sizeof t);
                memset(&c, 0, sizeof c);
                put(&t, "n_experts=5 d_ff=4");
                put(&t, latents[latent]);
                put(&t, experts[expert]);
                put(&t, scores[score]);
                test_about = t.all;
                CHECK(moe_fields_apply(moe_layer_fields(), &c, t.all, &error) == MOE_OK);
                moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
                for (i = 0; i < 1 + (int)(score % 2); i++) CHECK(moe_net_mixture(&net, &c) == MOE_OK);
                if (score % 3 == 0) CHECK(moe_net_residual(&net, 1) == MOE_OK && moe_net_linear(&net, 3) == MOE_OK);
                if (CHECKF(moe_net_build(&net, 0, 9, &error) == MOE_OK, "%s", error.message) &&
                    CHECKF(moe_model_create(&built, &net, NULL, &error) == MOE_OK, "%s", error.message)) {
                    CHECKF(built.model.net == NULL, "no list: %s", built.obstacle);
                    compare(&net, &built.model);
                    moe_model_free(&built);
                }
                moe_net_free(&net);
            }
    test_about = "";
}

/* ---- what has no list, and errors ---- */

static const char *const unlisted[][2] = {{"score=cosine", "score"},
                                          {"select=grouped_top_k groups=2 groups_kept=1 n_experts=4", "select"},
                                          {"weight=sparsemixer", "weight = sparsemixer"},
                                          {"weight=p_norm weight_p=2.5", "weight_p"},
                                          {"logit_cap=30", "logit_cap"},
                                          {"swiglu_limit=7", "a shaped gate"},
                                          {"select=sinkhorn gate=relu", "the selection with this gate"},
                                          {"n_copy=1", "experts without matrices"},
                                          {"renormalize=after expert_scale=1", "renormalize with expert_scale"},
                                          {"select=sample sample_at=always", "sample_at = always"},
                                          {"refine=similarity causal=1", "refine"},
                                          {"select=sample selection_bias=1", "selection_bias with this selection"},
                                          {"select=expert_choice predictor=1", "select"},
                                          {"weight_over=nonzero n_zero=1", "experts without matrices"},
                                          {"input=adaptive_clustering ac_mode=running", "input"},
                                          {"router_residual=1", "router_residual"}};

static void test_unlisted(void) {
    size_t i;
    for (i = 0; i < sizeof unlisted / sizeof *unlisted; i++) {
        moe_layer_config c;
        moe_net net;
        moe_built_model built;
        moe_error error;
        moe_buffer header;
        moe_stream stream;
        memset(&c, 0, sizeof c);
        memset(&header, 0, sizeof header);
        stream = moe_buffer_stream(&header);
        test_about = unlisted[i][0];
        moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
        if (i + 2 >= sizeof unlisted / sizeof *unlisted) moe_net_mixture(&net, &c); /* they read the layer before */
        if (CHECKF(moe_fields_apply(moe_layer_fields(), &c, unlisted[i][0], &error) == MOE_OK, "%s", error.message) &&
            CHECK(moe_net_mixture(&net, &c) == MOE_OK) &&
            CHECKF(moe_net_build(&net, 0, 3, &error) == MOE_OK, "%s", error.message) &&
            CHECKF(moe_model_create(&built, &net, NULL, &error) == MOE_OK, "%s", error.message)) {
            CHECKF(built.model.net != NULL && strcmp(built.obstacle, unlisted[i][1]) == 0, "%s",
                   built.obstacle != NULL ? built.obstacle : "a list");
            compare(&net, &built.model);
            CHECK(moe_export_c(&built, "unlisted", &stream, &error) == MOE_OK &&
                  stream.write(stream.ctx, "", 1) == MOE_OK && strstr((char *)header.data, unlisted[i][1]) != NULL);
            moe_model_free(&built);
        }
        moe_buffer_free(&header);
        moe_net_free(&net);
    }
    test_about = "";
}

/* ---- modules with settings ---- */

/* Each allocation fails once. */
static void fail_each(const moe_net *net) {
    moe_model_config config;
    moe_built_model built;
    moe_error error;
    moe_status status = MOE_ERR_MEMORY;
    test_heap heap;
    long at;
    memset(&config, 0, sizeof config);
    for (at = 1; status != MOE_OK && at < 100; at++) {
        config.allocator = test_allocator(&heap, at);
        status = moe_model_create(&built, net, &config, &error);
        if (status == MOE_OK) moe_model_free(&built);
        else CHECK(status == MOE_ERR_MEMORY && error.code == MOE_ERR_MEMORY && error.message[0] != '\0');
        CHECK(heap.blocks == 0 && !heap.wrong_size);
    }
    CHECK(status == MOE_OK && at > 2);
}

/* What a network of a linear module and one of these is: a list, or the network's code. */
static const struct module_row {
    int kind, no_bias, bias;
    const char *obstacle, *refused; /* in lists, in integers */
    const char *attention;
} module_rows[] = {{MOE_MODULE_LINEAR, 1, 0, NULL, NULL, ""},
                   {MOE_MODULE_LAYER_NORM, 1, 0, NULL, "no_bias", ""},
                   {MOE_MODULE_RMS_NORM, 0, 1, NULL, "bias", ""},
                   {MOE_MODULE_SCALE, 0, 0, "scale", "scale", ""},
                   {MOE_MODULE_CONVOLUTION, 0, 0, "convolution", "convolution", ""},
                   {MOE_MODULE_ATTENTION, 0, 0, "attention", NULL, "heads=2"},
                   {MOE_MODULE_ATTENTION, 0, 0, "attention", "kv_heads", "heads=2 kv_heads=1"},
                   {MOE_MODULE_ATTENTION, 0, 0, "attention", "qk_norm", "heads=2 qk_norm=head"},
                   {MOE_MODULE_ATTENTION, 0, 0, "attention", "window", "heads=2 window=2"}};

static void test_modules(void) {
    size_t i, j, k;
    for (i = 0; i < sizeof module_rows / sizeof *module_rows; i++) {
        const struct module_row *row = &module_rows[i];
        static moe_real rows[8 * 6];
        char wanted[200];
        moe_module m;
        moe_net net;
        moe_data data;
        moe_model_config config;
        moe_built_model built;
        moe_error error;
        memset(&m, 0, sizeof m);
        memset(&data, 0, sizeof data);
        memset(&config, 0, sizeof config);
        test_about = moei_module_names[row->kind];
        m.kind = row->kind;
        m.no_bias = row->no_bias;
        m.bias = row->bias;
        m.d_out = row->kind == MOE_MODULE_LINEAR ? 5 : 0;
        m.length = row->kind == MOE_MODULE_CONVOLUTION ? 3 : 0;
        m.scale = row->kind == MOE_MODULE_SCALE ? (moe_real)2.5 : 0;
        CHECK(moe_fields_apply(moei_attention_fields, &m.attention, row->attention, NULL) == MOE_OK);
        moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
        moe_net_linear(&net, 6);
        CHECKF(moe_net_append(&net, &m) == MOE_OK && moe_net_build(&net, 0, 3, &error) == MOE_OK, "%s",
               error.message);
        for (j = 0; j < net.n_tensors; j++)
            for (k = 0; k < net.tensors[j].count; k++) net.tensors[j].data[k] += (moe_real)0.3 * moe_rng_normal(&rng);
        if (CHECKF(moe_model_create(&built, &net, NULL, &error) == MOE_OK, "%s", error.message)) {
            CHECK(row->obstacle == NULL ? built.model.net == NULL
                                        : built.model.net != NULL && strcmp(built.obstacle, row->obstacle) == 0);
            CHECK((built.model.length > 0) ==
                  (row->kind == MOE_MODULE_CONVOLUTION || row->kind == MOE_MODULE_ATTENTION));
            compare(&net, &built.model);
            fail_each(&net);
        }
        moe_model_free(&built);
        for (j = 0; j < 8 * 6; j++) rows[j] = moe_rng_normal(&rng);
        data.n = 8;
        data.x = rows;
        config.calibration = &data;
        config.weights = MOE_WEIGHTS_INT8;
        sprintf(wanted, "module 1: %s has no integer form", row->refused != NULL ? row->refused : "");
        CHECK(moe_model_create(&built, &net, &config, &error) ==
              (row->refused != NULL ? MOE_ERR_UNSUPPORTED : MOE_OK));
        if (row->refused == NULL) moe_model_free(&built);
        else CHECK(strstr(error.message, wanted) == error.message, error.message);
        moe_net_free(&net);
    }
    test_about = "";
}

/* The largest counts that an operation has room for, and one more. */
static void test_counts(void) {
    static const int counts[][4] = {{65535, 1, 0, 0}, {65536, 1, 0, 0}, {1, 65536, 0, 0}, {0, 1, 65535, 65535},
                                    {0, 1, 65536, 0}, {0, 1, 70000, 65536}};
    static const char *const obstacles[] = {NULL, "a width above 65535", "a width above 65535", NULL,
                                            "a width above 65535", "the length"};
    size_t i;
    for (i = 0; i < sizeof counts / sizeof *counts; i++) {
        const int *count = counts[i];
        moe_model_config config;
        moe_net net;
        moe_built_model built;
        moe_error error;
        memset(&config, 0, sizeof config);
        config.length = (size_t)count[3];
        moe_net_init(&net, count[0], MOE_KERNELS_C, NULL);
        if (count[0] == 0) moe_net_embedding(&net, count[2], count[1]);
        else moe_net_linear(&net, count[1]);
        if (count[3] > 0) moe_net_positions(&net, count[2]);
        if (CHECKF(moe_net_build(&net, 0, 3, &error) == MOE_OK &&
                       moe_model_create(&built, &net, &config, &error) == MOE_OK, "%s", error.message)) {
            CHECKF(obstacles[i] == NULL ? built.model.net == NULL
                                        : built.model.net != NULL && strcmp(built.obstacle, obstacles[i]) == 0,
                   "row %d: %s", (int)i, built.obstacle != NULL ? built.obstacle : "a list");
            moe_model_free(&built);
        }
        moe_net_free(&net);
    }
}

/* The same inside a layer: hidden, shared and latent widths, and the router's. */
static void test_widths(void) {
    static const char *const names[] = {"expert=mlp d_ff", "d_ff=2 d_latent", "d_ff=2 n_shared=1 d_shared",
                                        "d_ff=2 score=mlp router_hidden"};
    size_t i;
    for (i = 0; i < 10; i++) {
        const int width = i % 2 == 0 ? 65535 : 65536;
        moe_layer_config c;
        moe_net net;
        moe_built_model built;
        moe_error error;
        char settings[80];
        memset(&c, 0, sizeof c);
        sprintf(settings, "%s=%d", names[i / 2 % 4], width);
        CHECK(moe_fields_apply(moe_layer_fields(), &c, settings, &error) == MOE_OK);
        if (i < 8) c.router.n_experts = 1;
        moe_net_init(&net, 1, MOE_KERNELS_C, NULL);
        if (i < 8) moe_net_mixture(&net, &c);
        else moe_net_feed_forward(&net, &c);
        if (CHECKF(moe_net_build(&net, 0, 3, &error) == MOE_OK &&
                       moe_model_create(&built, &net, NULL, &error) == MOE_OK, "%s: %s", settings, error.message)) {
            CHECKF(width == 65535 ? built.model.net == NULL
                                  : built.model.net != NULL && strcmp(built.obstacle, "a width above 65535") == 0,
                   "%s: %s", settings, built.obstacle != NULL ? built.obstacle : "a list");
            compare(&net, &built.model);
            moe_model_free(&built);
        }
        moe_net_free(&net);
    }
}

/* Only the first tied module has the embedding's rows in place. */
static void test_tied_twice(void) {
    moe_net net;
    moe_built_model built;
    moe_error error;
    size_t i, j;
    moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
    moe_net_embedding(&net, VOCABULARY, 6);
    moe_net_tied(&net);
    moe_net_linear(&net, 6);
    moe_net_tied(&net);
    CHECKF(moe_net_build(&net, 0, 3, &error) == MOE_OK, "%s", error.message);
    for (i = 0; i < net.n_tensors; i++)
        for (j = 0; j < net.tensors[i].count; j++) net.tensors[i].data[j] += (moe_real)0.3 * moe_rng_normal(&rng);
    if (CHECKF(moe_model_create(&built, &net, NULL, &error) == MOE_OK, "%s", error.message)) {
        CHECK(built.model.net == NULL);
        compare(&net, &built.model);
        moe_model_free(&built);
    }
    moe_net_free(&net);
}

/* An operation has 16 bits for an id. */
static void test_long_table(void) {
    int size;
    for (size = 65535; size <= 65536; size++) {
        moe_layer_config c;
        moe_net net;
        moe_built_model built;
        memset(&c, 0, sizeof c);
        c.router.select = MOE_SELECT_HASH;
        c.router.table_size = size;
        moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
        moe_net_embedding(&net, VOCABULARY, 6);
        moe_net_mixture(&net, &c);
        if (CHECK(moe_net_build(&net, 0, 3, NULL) == MOE_OK && moe_model_create(&built, &net, NULL, NULL) == MOE_OK))
            CHECK(size == 65535 ? built.model.net == NULL
                                : built.obstacle != NULL && strcmp(built.obstacle, "table_size") == 0);
        moe_model_free(&built);
        moe_net_free(&net);
    }
}

static void test_errors(void) {
    moe_layer_config c;
    moe_model_config config;
    moe_net net;
    moe_built_model built;
    moe_error error;
    moe_real y[4];
    int32_t id = VOCABULARY;
    moe_choice choices[8];
    unsigned char scratch[4096];
    size_t i, count;
    memset(&c, 0, sizeof c);
    memset(&config, 0, sizeof config);
    memset(scratch, 0, sizeof scratch);
    CHECK(moe_fields_apply(moe_layer_fields(), &c, "select=hash table_size=15 d_out=4", &error) == MOE_OK);
    moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
    moe_net_embedding(&net, VOCABULARY, 6);
    moe_net_positions(&net, 2);
    moe_net_mixture(&net, &c);
    CHECKF(moe_net_build(&net, 0, 3, &error) == MOE_OK, "%s", error.message);
    config.same_bits = 2;
    CHECK(moe_model_create(&built, &net, &config, &error) == MOE_ERR_CONFIG);
    config.same_bits = 1;
    if (CHECK(moe_model_create(&built, &net, &config, &error) == MOE_OK))
        CHECK(built.model.net != NULL && strcmp(built.obstacle, "same_bits = 1") == 0);
    moe_model_free(&built);
    if (CHECK(moe_model_create(&built, &net, NULL, &error) == MOE_OK) && CHECK(built.model.net == NULL)) {
        const moe_model *m = &built.model;
        CHECK(moe_infer(m, NULL, &id, y, scratch, m->scratch_size) == MOE_ERR_ARGUMENT); /* beyond the rows */
        id = 15;
        CHECK(moe_infer(m, NULL, &id, y, scratch, m->scratch_size) == MOE_ERR_ARGUMENT); /* beyond the table */
        id = 14;
        for (i = 0; i < 2; i++) CHECK(moe_infer(m, NULL, &id, y, scratch, m->scratch_size) == MOE_OK);
        CHECK(moe_infer(m, NULL, &id, y, scratch, m->scratch_size) == MOE_ERR_STATE);
    }
    moe_model_free(&built);
    for (i = 0; i < 4; i++) {
        moe_real *entry = (moe_real *)(uintptr_t)net.modules[2].layer.tensors[MOE_ROUTER_TABLE] + 14;
        const moe_real was = *entry, wrong[] = {2147483648.0f, -1, 8, 0.5f};
        *entry = wrong[i];
        CHECK(moe_model_create(&built, &net, NULL, &error) == MOE_ERR_ARGUMENT &&
              strstr(error.message, "router.table[14]") != NULL);
        *entry = was;
    }
    moe_net_free(&net);
    /* a logit that is not finite */
    memset(&c, 0, sizeof c);
    moe_net_init(&net, 4, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &c);
    CHECK(moe_net_build(&net, 0, 3, &error) == MOE_OK && moe_model_create(&built, &net, NULL, &error) == MOE_OK);
    for (i = 0; i < 4; i++) y[i] = 1;
    CHECK(moe_infer(&built.model, NULL, y, y, scratch, built.model.scratch_size) == MOE_OK);
    y[2] = MOEI_INFINITY;
    CHECK(moe_infer(&built.model, NULL, y, y, scratch, built.model.scratch_size) == MOE_ERR_NONFINITE);
    CHECK(moe_infer_choices(&built.model, 0, scratch, choices, 8, &count) == MOE_OK && count == 0); /* no weights */
    moe_model_free(&built);
    moe_net_free(&net);
}

int main(int n, char **words) {
    const uint64_t seed = n > 2 ? (uint64_t)atoi(words[2]) : 1;
    CASE(test_random(1000 * seed));
    CASE(test_latent());
    CASE(test_unlisted());
    CASE(test_errors());
    CASE(test_modules());
    CASE(test_counts());
    CASE(test_widths());
    CASE(test_tied_twice());
    CASE(test_long_table());
    return test_end();
}
