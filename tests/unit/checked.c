/* Tests moe_check.h: every inference model that moe_model_create makes is accepted, with every
   operation and router; of each model every field of every operation, MoE layer, attention and of
   the model itself is changed to bad values, alone and several at once, and so are its constants.
   The check refuses the change and says where, or moe_infer runs with it and stays inside its
   memory. The sanitizers see whether a sum or shift leaves its type.
       cc -std=c99 -O1 -I. tests/unit/checked.c -o checked -lm && ./checked
   "checked quick" takes fewer changes. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static int quick;

/* ---- models of every kind ---- */

enum { WIDTH = 6, EXPERTS = 4, ROWS = 24, LENGTH = 19, VOCABULARY = 11 };

/* What the MoE layer has beyond the default, and the network around it. */
static const struct recipe {
    const char *settings;
    int ids, attention, act; /* act: an activation before it; -1: none */
} recipes[] = {
    {"", 0, 0, MOE_ACT_RELU},
    {"expert=mlp act=gelu n_shared=1 d_shared=4 shared_sigmoid=1", 0, 0, MOE_ACT_TANH},
    {"expert=mlp act=relu expert_scale=1 scale=2.5", 0, 0, -1},
    {"expert=linear gate=sigmoid weight=raw select=dense", 0, 0, -1},
    {"expert=linear n_experts=12 select=dense", 0, 0, -1},
    {"expert=factorised d_low=3 add_input=1", 0, 0, -1},
    {"score=mlp router_hidden=5 router_act=tanh gate=sqrt_softplus", 0, 0, -1},
    {"score=cosine cosine_dim=3 gate=sqrt_softplus weight=raw", 0, 0, -1},
    {"score=cosine input=scaled_rms expert_scale=1", 0, 0, -1},
    {"score=norm norm_node=gate", 0, 0, -1},
    {"score=norm norm_node=output norm_order=l1 expert=mlp act=gelu", 0, 0, -1},
    {"score=norm norm_node=product norm_order=linf", 0, 0, -1},
    {"score=grap grap_cosine=1 n_experts=3", 0, 0, -1},
    {"score=attentive router_act=tanh", 0, 0, -1},
    {"score=competition gate=identity weight=softmax", 0, 0, -1},
    {"input=adaptive_clustering ac_mode=running ac_mix=2", 0, 0, -1},
    {"gate=sigmoid select=threshold threshold_learned=1 weight=raw", 0, 0, -1},
    {"gate=relu select=positive weight=p_norm", 0, 0, -1},
    {"select=top_p top_p=0.7 weight=uniform", 0, 0, -1},
    {"select=top_p top_p=0.7", 0, 0, -1},
    {"select=grouped_top_k groups=2 groups_kept=1 group_score=top2_sum selection_bias=1 gate=sigmoid", 0, 0, -1},
    {"weight=sparsemixer", 0, 0, -1},
    {"weight=one scale=2 apply_to=input", 0, 0, -1},
    {"select=hash table_size=11 weight=one", 1, 0, -1},
    {"select=hash table_size=11 gate=sigmoid", 1, 0, -1},
    {"top_k=3 n_zero=1 n_copy=1 weight_over=nonzero", 0, 0, -1},
    {"top_k=3 n_copy=1 n_constant=1 weight_over=real gate=sigmoid weight=p_norm weight_p=2 apply_to=input", 0, 0, -1},
    {"router_residual=1 logit_cap=2 n_constant=2", 0, 0, -1},
    {"d_latent=3 expert=mlp act=gelu", 0, 0, -1},
    {"d_latent=5 n_shared=1 d_shared=4 shared_sigmoid=1 apply_to=input", 0, 0, MOE_ACT_RELU},
    {"d_latent=9 score=competition gate=identity weight=softmax n_shared=1 d_shared=3", 0, 0, -1},
    {"", 1, 1, -1},
    {"n_shared=1 d_shared=3", 1, 2, -1},
    {"expert=mlp", 0, 3, -1},
};
enum { RECIPES = sizeof recipes / sizeof *recipes };

static void attention_modules(moe_net *net, int which) {
    moe_attention_config a;
    memset(&a, 0, sizeof a);
    a.heads = which;
    a.d_head = which == 3 ? 3 : 4;
    a.rotary = which == 1;
    if (which == 2) moe_net_positions(net, LENGTH);
    if (which == 2) moe_net_layer_norm(net);
    else moe_net_rms_norm(net);
    moe_net_attention(net, &a);
    moe_net_residual(net, 2);
}

/* 0: the network cannot be. */
static int recipe_net(moe_rng *rng, const struct recipe *r, moe_net *net) {
    moe_layer_config c;
    moe_error error;
    size_t i, j;
    memset(&c, 0, sizeof c);
    c.router.n_experts = EXPERTS;
    c.router.top_k = 2;
    c.d_ff = 5;
    moe_net_init(net, r->ids ? 0 : WIDTH, MOE_KERNELS_C, NULL);
    if (r->ids) moe_net_embedding(net, VOCABULARY, WIDTH);
    if (r->attention > 0) attention_modules(net, r->attention);
    if (r->act >= 0) moe_net_activation(net, r->act);
    if (strstr(r->settings, "clustering") != NULL || strstr(r->settings, "residual") != NULL) moe_net_mixture(net, &c);
    CHECK_STATUS(moe_fields_apply(moe_layer_fields(), &c, r->settings, &error), MOE_OK, r->settings);
    moe_net_mixture(net, &c);
    moe_net_residual(net, 1);
    if (r->ids) moe_net_tied(net);
    else moe_net_linear(net, 3);
    if (!CHECK_STATUS(moe_net_build(net, 0, moe_rng_next(rng), &error), MOE_OK, r->settings)) {
        printf("    %s\n", error.message);
        return 0;
    }
    for (i = 0; i < net->n_tensors; i++)
        for (j = 0; j < net->tensors[i].count && strstr(net->tensors[i].name, "table") == NULL; j++)
            net->tensors[i].data[j] += (moe_real)0.1 * moe_rng_normal(rng);
    return 1;
}

/* A network and the model of it. */
typedef struct made {
    moe_net net;
    moe_built_model built;
} made;

static int made_begin(made *m, size_t recipe, int weights, int loader) {
    const struct recipe *r = &recipes[recipe];
    moe_model_config config;
    moe_data data;
    moe_rng rng;
    moe_error error;
    moe_real *x;
    int32_t ids[ROWS];
    moe_status status;
    int i;
    moe_rng_seed(&rng, 7 + recipe);
    if (!recipe_net(&rng, r, &m->net)) return 0;
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    x = normals_of(&rng, ROWS * WIDTH, 1);
    for (i = 0; i < ROWS; i++) ids[i] = (int32_t)moe_rng_below(&rng, VOCABULARY);
    data.n = ROWS;
    if (r->ids) data.token_ids = ids;
    else data.x = x;
    if (r->attention > 0) data.length = 12;
    config.weights = weights;
    config.same_bits = weights == MOE_WEIGHTS_FLOAT;
    config.loader = loader;
    config.length = LENGTH;
    config.calibration = &data;
    status = moe_model_create(&m->built, &m->net, &config, &error);
    free(x);
    if (CHECK_STATUS(status, MOE_OK, r->settings)) return 1;
    printf("    %s\n", error.message);
    moe_net_free(&m->net);
    return 0;
}

static void made_end(made *m) {
    moe_model_free(&m->built);
    moe_net_free(&m->net);
}

/* ---- a copy that may be changed, in memory of exactly its size ---- */

enum { GUARD = 32, FILL = 0xa5, MOST_CHOICES = 300, INPUT = 70000 };

typedef struct copy {
    moe_model model;
    moei_int_op *ops;
    moei_int_mixture *mixtures;
    moei_int_attention *attentions;
    unsigned char *weights, *experts;
    size_t experts_size;
    unsigned char *block; /* scratch, between two guards */
    size_t scratch_size;
    const moe_model *original;
} copy;

static void *doubled(const void *from, size_t size) {
    void *p = grab(size, 1);
    if (size > 0) memcpy(p, from, size);
    return p;
}

static void copy_pull(copy *c) {
    const moe_model *m = c->original;
    c->model = *m;
    memcpy(c->ops, m->ops, m->n_ops * sizeof *c->ops);
    if (m->n_mixtures > 0) memcpy(c->mixtures, m->mixtures, m->n_mixtures * sizeof *c->mixtures);
    if (m->n_attentions > 0) memcpy(c->attentions, m->attentions, m->n_attentions * sizeof *c->attentions);
    c->model.ops = c->ops;
    c->model.mixtures = c->mixtures;
    c->model.attentions = c->attentions;
    c->model.weights = c->weights;
    c->model.experts = m->experts != NULL ? c->experts : NULL;
}

static void copy_begin(copy *c, const moe_built_model *built) {
    const moe_model *m = &built->model;
    memset(c, 0, sizeof *c);
    c->original = m;
    c->ops = (moei_int_op *)grab(m->n_ops, sizeof *c->ops);
    c->mixtures = (moei_int_mixture *)grab(m->n_mixtures, sizeof *c->mixtures);
    c->attentions = (moei_int_attention *)grab(m->n_attentions, sizeof *c->attentions);
    c->weights = (unsigned char *)doubled(m->weights, m->weights_size);
    c->experts = (unsigned char *)doubled(built->experts.data, built->experts.size);
    c->experts_size = built->experts.size;
    c->scratch_size = m->scratch_size;
    c->block = (unsigned char *)grab(m->scratch_size + 2 * GUARD, 1);
    copy_pull(c);
}

static void copy_end(copy *c) {
    free(c->ops);
    free(c->mixtures);
    free(c->attentions);
    free(c->weights);
    free(c->experts);
    free(c->block);
}

static moe_status copy_fetch(void *ctx, size_t at, size_t size, void *to) {
    const copy *c = (const copy *)ctx;
    if (!CHECK(at <= c->experts_size && size <= c->experts_size - at, "a loader is asked for bytes that are there"))
        return MOE_ERR_IO;
    memcpy(to, c->experts + at, size);
    return MOE_OK;
}

static long accepted, refused;

/* Inputs of one kind; ids of any kind too. */
static void fill_input(moe_rng *rng, const moe_model *m, size_t kind, int8_t *input) {
    const int32_t id = kind % 3 == 0 ? (int32_t)(uint32_t)moe_rng_next(rng) : (int32_t)moe_rng_below(rng, VOCABULARY);
    size_t i;
    for (i = 0; i < m->d_in && i < INPUT; i++)
        input[i] = (int8_t)(kind == 0 ? 127 : kind == 1 ? -127 : (int)moe_rng_below(rng, 255) - 127);
    if (m->d_in == 0) memcpy(input, &id, sizeof id);
}

static void run_accepted(copy *c, moe_rng *rng, const moe_loader *loader, unsigned char *scratch) {
    static union {
        int8_t input[INPUT];
        int32_t id;
    } in;
    static int16_t output[INPUT];
    const size_t calls = c->model.length > 0 ? c->model.length + 1 : 4;
    moe_choice choices[MOST_CHOICES];
    size_t i, j, count;
    if (c->model.length == 0) memset(scratch, (int)moe_rng_below(rng, 256), c->scratch_size);
    for (i = 0; i < calls && i < 24; i++) {
        moe_status status;
        fill_input(rng, &c->model, i, in.input);
        status = moe_infer(&c->model, loader, in.input, output, scratch, c->scratch_size);
        CHECK(status == MOE_OK || status == MOE_ERR_ARGUMENT || status == MOE_ERR_STATE, "what moe_infer answers");
        for (j = 0; j < c->model.n_mixtures && status == MOE_OK; j++) {
            CHECK_STATUS(moe_infer_choices(&c->model, j, scratch, choices, MOST_CHOICES, &count), MOE_OK, "choices");
            CHECK(count <= c->model.mixtures[j].router.n_experts, "no more choices than experts");
        }
    }
}

/* Whether a message has been written, with its end, into memory that was filled with FILL. */
static int is_message(const moe_error *error) {
    const char *end = (const char *)memchr(error->message, '\0', sizeof error->message);
    return end != NULL && end > error->message && memchr(error->message, FILL, (size_t)(end - error->message)) == NULL;
}

/* Checks the copy, and runs it if it is accepted. */
static moe_status copy_try(copy *c, moe_rng *rng, const char *what) {
    unsigned char *scratch = c->block + GUARD;
    moe_loader loader;
    moe_error error;
    moe_status status;
    size_t i, wrong = 0;
    loader.ctx = c;
    loader.fetch = copy_fetch;
    memset(c->block, FILL, c->scratch_size + 2 * GUARD);
    memset(&error, FILL, sizeof error);
    status =
        moe_model_check(&c->model, c->original->experts == NULL ? &loader : NULL, scratch, c->scratch_size, &error);
    CHECK(status == MOE_OK || (error.code == status && is_message(&error)), what);
    for (i = 0; i < c->scratch_size; i++) wrong += scratch[i] != 0;
    CHECK(wrong == 0, "scratch memory is zeros after a check");
    if (status == MOE_OK) run_accepted(c, rng, c->original->experts == NULL ? &loader : NULL, scratch);
    for (i = 0; i < GUARD; i++) wrong += c->block[i] != FILL || scratch[c->scratch_size + i] != FILL;
    CHECK(wrong == 0, what);
    if (status == MOE_OK) accepted++;
    else refused++;
    return status;
}

/* ---- fields ---- */

typedef struct field {
    const char *name;
    size_t at, size;
} field;

#define FIELD(type, name) {#name, offsetof(type, name), sizeof(((type *)0)->name)}
static const field op_fields[] = {
    FIELD(moei_int_op, shape.n), FIELD(moei_int_op, shape.k), FIELD(moei_int_op, shape.low),
    FIELD(moei_int_op, shape.high), FIELD(moei_int_op, shape.shift), FIELD(moei_int_op, at), FIELD(moei_int_op, in),
    FIELD(moei_int_op, other), FIELD(moei_int_op, out), FIELD(moei_int_op, factor), FIELD(moei_int_op, factor2),
    FIELD(moei_int_op, index)};
#define ROUTER(name) FIELD(moei_int_mixture, router.name)
#define MIXTURE(name) FIELD(moei_int_mixture, name)
static const field mixture_fields[] = {
    ROUTER(n_experts), ROUTER(top_k), ROUTER(most), ROUTER(scratch), ROUTER(groups), ROUTER(groups_kept),
    ROUTER(factor), ROUTER(z_bits), ROUTER(weight_shift), ROUTER(flags), ROUTER(threshold), ROUTER(tokens),
    ROUTER(bias), ROUTER(thresholds), ROUTER(scales), ROUTER(table), MIXTURE(score), MIXTURE(n_score), MIXTURE(expert),
    MIXTURE(n_expert), MIXTURE(shared), MIXTURE(n_shared), MIXTURE(experts), MIXTURE(stride), MIXTURE(z), MIXTURE(p),
    MIXTURE(sum), MIXTURE(choices), MIXTURE(block), MIXTURE(weight_bits), ROUTER(kept_from), ROUTER(kept_end),
    MIXTURE(zeros), MIXTURE(copies), MIXTURE(constants), MIXTURE(copy), MIXTURE(n_copy), MIXTURE(constant),
    MIXTURE(n_constant)};
#define ATTENTION(name) FIELD(moei_int_attention, name)
static const field attention_fields[] = {ATTENTION(heads), ATTENTION(d_head), ATTENTION(keys), ATTENTION(values),
                                         ATTENTION(value), ATTENTION(room), ATTENTION(bits)};
#define MODEL(name) FIELD(moe_model, name)
/* Those with which a model states the length of what it points to only become smaller. */
static const field model_fields[] = {MODEL(version), MODEL(weights_are), MODEL(d_in), MODEL(d_out), MODEL(length),
                                     MODEL(scratch_size), MODEL(state_size), MODEL(n_main)};
static const field lengths[] = {MODEL(weights_size), MODEL(experts_size), MODEL(n_ops), MODEL(n_mixtures),
                                MODEL(n_attentions)};
#define COUNT(array) (sizeof(array) / sizeof *(array))

static uint64_t field_get(const void *object, const field *f) {
    const unsigned char *at = (const unsigned char *)object + f->at;
    uint64_t wide;
    uint32_t word;
    uint16_t half;
    if (f->size == 1) return *at;
    if (f->size == 2) {
        memcpy(&half, at, sizeof half);
        return half;
    }
    if (f->size == 4) {
        memcpy(&word, at, sizeof word);
        return word;
    }
    memcpy(&wide, at, sizeof wide);
    return wide;
}

static void field_set(void *object, const field *f, uint64_t value) {
    unsigned char *at = (unsigned char *)object + f->at;
    const uint32_t word = (uint32_t)value;
    const uint16_t half = (uint16_t)value;
    if (f->size == 1) *at = (unsigned char)value;
    else if (f->size == 2) memcpy(at, &half, sizeof half);
    else if (f->size == 4) memcpy(at, &word, sizeof word);
    else memcpy(at, &value, sizeof value);
}

/* Value number i of a field that has `old`: near it, at the ends of types and of what is allowed,
   and any. */
enum { NEAR = 13 };
static const uint64_t ends[] = {
    0, 1, 2, 3, 4, 7, 8, 9, 14, 15, 16, 27, 28, 29, 30, 31, 32, 63, 127, 128, 255, 256, 257, 32767, 32768, 65532, 65533,
    65535, (uint64_t)1 << 28, (uint64_t)1 << 30, 0x7fffffff, 0x80000000, 0xfffffffc, 0xfffffffe, 0xffffffff};
enum { VALUES = NEAR + sizeof ends / sizeof *ends + 4 };

static uint64_t value_of(moe_rng *rng, size_t i, uint64_t old) {
    if (i < NEAR) return old + i - NEAR / 2;
    if (i < NEAR + COUNT(ends)) return ends[i - NEAR];
    if (i == VALUES - 1) return 2 * old;
    return i == VALUES - 2 ? moe_rng_next(rng) : moe_rng_below(rng, 300);
}

/* Every field of one object, one at a time, with every value. */
static void each_field(copy *c, moe_rng *rng, void *object, const field *fields, size_t n) {
    size_t i, j;
    for (i = 0; i < n; i++) {
        const uint64_t old = field_get(object, &fields[i]);
        for (j = 0; j < VALUES; j += quick ? 3 : 1) {
            field_set(object, &fields[i], value_of(rng, j, old));
            (void)copy_try(c, rng, fields[i].name);
        }
        copy_pull(c);
    }
}

static void fewer(copy *c, moe_rng *rng) {
    size_t i, j;
    for (i = 0; i < COUNT(lengths); i++) {
        const uint64_t old = field_get(&c->model, &lengths[i]);
        for (j = 1; j < 40 && old > 0; j++) {
            field_set(&c->model, &lengths[i], j < 20 ? old - (old < j ? old : j) : moe_rng_below(rng, old));
            (void)copy_try(c, rng, lengths[i].name);
        }
        copy_pull(c);
    }
}

/* ---- functions ---- */

typedef void op_function(const moei_int_op *op, moei_int_run *run);
static op_function *const ops_known[] = {
#define OP_FUNCTION(name) moei_int_op_##name,
    MOEI_INT_OPS(OP_FUNCTION)
#undef OP_FUNCTION
};
static moei_int_gate *const gates[] = {NULL, moei_int_gate_logits, moei_int_gate_relu, moei_int_gate_softmax,
                                       moei_int_gate_sigmoid, moei_int_gate_sqrt_softplus, moei_int_share_softmax,
                                       moei_int_share_sigmoid, moei_int_share_sqrt_softplus};
static moei_int_select *const selects[] = {NULL, moei_int_select_logits, moei_int_select_top_k,
                                           moei_int_select_grouped, moei_int_select_top_p, moei_int_select_threshold,
                                           moei_int_select_hash, moei_int_select_each};
static moei_int_weight *const weighs[] = {NULL, moei_int_weight_raw, moei_int_weight_sum, moei_int_weight_norm,
                                          moei_int_weight_softmax, moei_int_weight_uniform, moei_int_weight_one,
                                          moei_int_weight_sparsemixer};

static void no_gate(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    (void)r;
    (void)n;
    (void)z;
    (void)p;
}

static void no_op(const moei_int_op *op, moei_int_run *run) {
    (void)op;
    (void)run;
}

static void other_functions(copy *c, moe_rng *rng) {
    size_t i, j, k;
    for (i = 0; i < c->model.n_ops; i++) {
        for (j = 0; j < COUNT(ops_known); j++) {
            c->ops[i].run = ops_known[j];
            (void)copy_try(c, rng, "op.run");
        }
        c->ops[i].run = NULL;
        (void)copy_try(c, rng, "op.run");
        c->ops[i].run = no_op;
        (void)copy_try(c, rng, "op.run");
        copy_pull(c);
    }
    for (i = 0; i < c->model.n_mixtures; i++) {
        moei_int_router *r = &c->mixtures[i].router;
        for (j = 0; j < COUNT(gates) * COUNT(selects); j++)
            for (k = 0; k < COUNT(gates) * COUNT(weighs); k += 1 + moe_rng_below(rng, quick ? 50 : 8)) {
                r->gate = gates[j % COUNT(gates)];
                r->select = selects[j / COUNT(gates)];
                r->values = gates[k % COUNT(gates)];
                r->weight = weighs[k / COUNT(gates)];
                if (k % 3 == 0) r->scale = k % 2 ? moei_int_scale_weights : NULL;
                (void)copy_try(c, rng, "router's functions");
            }
        copy_pull(c);
        r->gate = no_gate;
        CHECK(copy_try(c, rng, "router.gate") != MOE_OK, "a gate that is none");
        copy_pull(c);
    }
}

static void other_pointers(copy *c, moe_rng *rng) {
    const moe_model *m = &c->model;
    moe_error error;
    c->model.ops = NULL;
    CHECK_STATUS(copy_try(c, rng, "ops"), MOE_ERR_FORMAT, "no operations");
    copy_pull(c);
    c->model.weights = NULL;
    CHECK(m->weights_size == 0 || copy_try(c, rng, "weights") != MOE_OK, "no weights");
    copy_pull(c);
    c->model.mixtures = NULL;
    CHECK(m->n_mixtures == 0 || copy_try(c, rng, "mixtures") != MOE_OK, "no MoE layers");
    copy_pull(c);
    c->model.attentions = NULL;
    CHECK(m->n_attentions == 0 || copy_try(c, rng, "attentions") != MOE_OK, "no attention");
    copy_pull(c);
    c->model.run = NULL;
    CHECK_STATUS(copy_try(c, rng, "run"), MOE_ERR_FORMAT, "no function");
    copy_pull(c);
    c->model.choices = NULL;
    CHECK_STATUS(copy_try(c, rng, "choices"), MOE_ERR_FORMAT, "no function");
    copy_pull(c);
    CHECK_STATUS(moe_model_check(m, NULL, c->block, m->scratch_size - 1, &error), MOE_ERR_SPACE, "scratch");
    CHECK_STATUS(moe_model_check(NULL, NULL, c->block, m->scratch_size, &error), MOE_ERR_ARGUMENT, "model");
    CHECK_STATUS(moe_model_check(m, NULL, NULL, m->scratch_size, NULL), MOE_ERR_ARGUMENT, "scratch");
    if (m->experts == NULL && m->n_mixtures > 0)
        CHECK_STATUS(moe_model_check(m, NULL, c->block, m->scratch_size, &error), MOE_ERR_UNSUPPORTED, "loader");
}

/* ---- tests ---- */

static void fields_of(copy *c, moe_rng *rng) {
    size_t i;
    for (i = 0; i < c->model.n_ops; i++) each_field(c, rng, &c->ops[i], op_fields, COUNT(op_fields));
    for (i = 0; i < c->model.n_mixtures; i++)
        each_field(c, rng, &c->mixtures[i], mixture_fields, COUNT(mixture_fields));
    for (i = 0; i < c->model.n_attentions; i++)
        each_field(c, rng, &c->attentions[i], attention_fields, COUNT(attention_fields));
    each_field(c, rng, &c->model, model_fields, COUNT(model_fields));
    fewer(c, rng);
}

/* Two to four fields of any objects at once. */
static void several(copy *c, moe_rng *rng, size_t times) {
    size_t i, j;
    for (i = 0; i < times; i++) {
        for (j = 2 + moe_rng_below(rng, 3); j > 0; j--) {
            const field *f = &op_fields[moe_rng_below(rng, COUNT(op_fields))];
            void *object = &c->ops[moe_rng_below(rng, c->model.n_ops)];
            if (c->model.n_mixtures > 0 && moe_rng_below(rng, 3) == 0) {
                f = &mixture_fields[moe_rng_below(rng, COUNT(mixture_fields))];
                object = &c->mixtures[moe_rng_below(rng, c->model.n_mixtures)];
            }
            field_set(object, f, value_of(rng, (size_t)moe_rng_below(rng, VALUES), field_get(object, f)));
        }
        (void)copy_try(c, rng, "several fields");
        copy_pull(c);
    }
}

/* Constants: all of one value, a stretch of one value, any. */
static void constants(copy *c, moe_rng *rng, unsigned char *bytes, const unsigned char *original, size_t size,
                      size_t times) {
    static const unsigned char values[] = {0, 1, 127, 128, 129, 255};
    size_t i, j;
    for (i = 0; i < times && size > 0; i++) {
        const size_t from = i % 8 == 0 ? 0 : (size_t)moe_rng_below(rng, size);
        const size_t n = i % 8 == 0 ? size : 1 + (size_t)moe_rng_below(rng, size - from < 9 ? size - from : 9);
        const int any = moe_rng_below(rng, 2) == 0;
        const unsigned char value = values[moe_rng_below(rng, sizeof values)];
        for (j = 0; j < n; j++) bytes[from + j] = any ? (unsigned char)moe_rng_below(rng, 256) : value;
        (void)copy_try(c, rng, "constants");
        memcpy(bytes, original, size);
    }
}

static unsigned op_seen[COUNT(ops_known)];

static void test_model(size_t recipe, int weights, int loader) {
    made m;
    copy c;
    moe_rng rng;
    size_t i, j;
    test_about = recipes[recipe].settings;
    if (!made_begin(&m, recipe, weights, loader)) return;
    moe_rng_seed(&rng, recipe);
    copy_begin(&c, &m.built);
    for (i = 0; i < c.model.n_ops; i++)
        for (j = 0; j < COUNT(ops_known); j++) op_seen[j] += c.ops[i].run == ops_known[j];
    if (CHECK_STATUS(copy_try(&c, &rng, "the model"), MOE_OK, "a model that was made is accepted")) {
        fields_of(&c, &rng);
        other_functions(&c, &rng);
        other_pointers(&c, &rng);
        several(&c, &rng, quick ? 200 : 3000);
        constants(&c, &rng, c.weights, m.built.weights.data, m.built.weights.size, quick ? 100 : 1000);
        constants(&c, &rng, c.experts, m.built.experts.data, m.built.experts.size, quick ? 100 : 1000);
    }
    copy_end(&c);
    made_end(&m);
    test_about = "";
}

static void test_models(void) {
    size_t i;
    for (i = 0; i < RECIPES; i++) {
        test_model(i, i % 2 ? MOE_WEIGHTS_INT4 : MOE_WEIGHTS_INT8, i % 5 == 1);
        if (!quick) test_model(i, i % 2 ? MOE_WEIGHTS_INT8 : MOE_WEIGHTS_INT4, i % 5 != 1);
    }
    for (i = 0; i < COUNT(ops_known); i++) CHECKF(op_seen[i] > 0, "operation %d is in no model", (int)i);
    printf("note: %ld models accepted, which ran, %ld refused\n", accepted, refused);
}

/* ---- one operation by hand: what no small model has ---- */

enum { CELLS = 80000 };

typedef struct single {
    moe_model model;
    moei_int_op op;
    moei_int_attention attention;
    uint32_t constants[50000];
} single;

static single one;
static uint32_t cells[CELLS / 2 + 64];

/* An operation of n numbers, whose input is unknown, in the middle of scratch memory. */
static void single_begin(op_function *run, unsigned n, unsigned k) {
    memset(&one, 0, sizeof one);
    one.op.run = run;
    one.op.shape.n = (uint16_t)n;
    one.op.shape.k = (uint16_t)k;
    one.op.shape.low = -32767;
    one.op.shape.high = 32767;
    one.op.in = 8;
    one.op.out = CELLS / 2;
    one.model.version = MOE_MODEL_VERSION;
    one.model.weights_are = MOE_WEIGHTS_INT8;
    one.model.run = moei_int_model_run;
    one.model.choices = moei_int_model_choices;
    one.model.d_in = 4;
    one.model.d_out = n;
    one.model.length = 3;
    one.model.state_size = 44;
    one.model.scratch_size = 3 + 44 + 2 * CELLS;
    one.model.weights = (const unsigned char *)one.constants;
    one.model.weights_size = sizeof one.constants;
    one.model.ops = &one.op;
    one.model.n_ops = one.model.n_main = 1;
    one.model.attentions = &one.attention;
    one.model.n_attentions = 1;
}

/* What the check says; an accepted operation runs. */
static moe_status single_check(void) {
    static int16_t output[CELLS];
    static const int8_t input[4] = {127, -127, 127, -127};
    moe_error error;
    const moe_status status = moe_model_check(&one.model, NULL, cells, sizeof cells, &error);
    size_t i;
    for (i = 0; i < sizeof cells / sizeof *cells && status == MOE_OK; i++)
        cells[i] = i < 12 ? 0 : i % 2 ? 0x80008000u : 0x7fff7fffu;
    if (status == MOE_OK) CHECK_STATUS(moe_infer(&one.model, NULL, input, output, cells, sizeof cells), MOE_OK, "runs");
    return status;
}

/* The message names the operation by its number, of two digits too. */
static void test_number(void) {
    moei_int_op ops[11];
    moe_error error;
    size_t i;
    single_begin(moei_int_op_norm, 8, 0);
    for (i = 0; i < COUNT(ops); i++) ops[i] = one.op;
    ops[10].factor = -1;
    one.model.ops = ops;
    one.model.n_ops = one.model.n_main = 11;
    CHECK_STATUS(moe_model_check(&one.model, NULL, cells, sizeof cells, &error), MOE_ERR_FORMAT, "the last of 11");
    CHECK(strncmp(error.message, "op 10", 5) == 0, error.message);
}

static void test_single_norms(void) {
    single_begin(moei_int_op_norm, 32767, 0);
    CHECK_STATUS(single_check(), MOE_OK, "the widest norm");
    one.op.factor = 1;
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "its squares with two bits more");
    single_begin(moei_int_op_norm, 32768, 0);
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "a wider one");
    single_begin(moei_int_op_norm, 8, 0);
    one.op.factor = 8;
    one.constants[1] = 0x1fffffff;
    CHECK_STATUS(single_check(), MOE_OK, "the largest eps");
    one.constants[1]++;
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "a larger one");
    one.constants[1] = 0;
    one.op.index = 1;
    one.op.shape.shift = 30;
    one.constants[6] = 0x3fffffff;
    CHECK_STATUS(single_check(), MOE_OK, "the largest bias");
    one.constants[6]++;
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "a larger one");
}

static void test_single_sums(void) {
    size_t i;
    single_begin(moei_int_op_add, 8, 0);
    one.op.other = 16;
    one.op.factor = one.op.factor2 = 16383;
    one.op.shape.shift = 30;
    CHECK_STATUS(single_check(), MOE_OK, "factors up to 16383");
    one.op.factor = one.op.factor2 = -32768;
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "larger ones");
    one.op.factor = one.op.factor2 = 24574;
    CHECK_STATUS(single_check(), MOE_OK, "a sum that fits with what rounding adds");
    one.op.factor = one.op.factor2 = 24577;
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "one that fits only without");
    one.op.factor = one.op.factor2 = 1;
    one.op.other = 17;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "an input that begins in the middle of a word");
    single_begin(moei_int_op_rotate, 8, 8);
    for (i = 0; i < 17 * 4; i++) one.constants[i] = 0x7fff;
    CHECK_STATUS(single_check(), MOE_OK, "cosines of 1");
    for (i = 0; i < 17 * 4; i++) one.constants[i] = 0x7fff7fff;
    CHECK_STATUS(single_check(), MOE_OK, "sines of 1, too");
    one.op.shape.shift = 19;
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "and rounded");
    for (i = 0; i < 16 * 4; i++) one.constants[i] = 0x7fff;
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "sines of multiples of 16 places alone");
    for (i = 0; i < 17 * 4; i++) one.constants[i] = 0x8000;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "cosines below -1");
    single_begin(moei_int_op_unit, 65532, 0);
    one.op.in = 4;
    one.op.out = 4;
    one.op.factor = 32767;
    one.op.shape.shift = 9;
    CHECK_STATUS(single_check(), MOE_OK, "the widest vector of length 1");
    one.op.shape.shift = 10;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "a shift of 32");
}

/* A word of the constants that a product reads, little-endian as in flash. */
static void constant_is(size_t at, uint32_t value) {
    unsigned char *p = (unsigned char *)one.constants + 4 * at;
    int i;
    for (i = 0; i < 4; i++) p[i] = (unsigned char)(value >> 8 * i & 255u);
}

/* Sets the codes of an int4 product's first four inputs to 0, but for one of 1, and the factor of
   their block. */
static void int4_code_is(int side, uint32_t factor) {
    constant_is(4, 0x08880888u ^ 1u << 4 * side);
    constant_is(5, 0x08880888u);
    constant_is(6 + (size_t)side / 2, factor << side % 2 * 16);
}

/* A product of one output in int4: the rows beside it are read, too, by what computes four at once.
   In int8 of two outputs. */
static void test_single_products(void) {
    int int4, side;
    for (int4 = 0; int4 < 2; int4++)
        for (side = 0; side < (int4 ? 4 : 2); side++) {
            const size_t factors = int4 ? 8 + (size_t)side / 2 : 2;
            single_begin(int4 ? moei_int_op_int4 : moei_int_op_int8, int4 ? 1 : 2, 4);
            one.op.in = 0;
            one.op.other = 8;
            CHECK_STATUS(single_check(), MOE_OK, "zeros");
            constant_is(factors, side % 2 == 0 ? 0x7fff : 0x7fff0000u);
            constant_is((size_t)side, 0x3fffffff);
            CHECK_STATUS(single_check(), MOE_OK, "the largest bias and factor");
            constant_is((size_t)side, 0x40000000);
            CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "a larger bias");
            constant_is((size_t)side, 0xc0000001);
            CHECK_STATUS(single_check(), MOE_OK, "the lowest bias");
            constant_is((size_t)side, 0x3fffffff);
            if (int4) int4_code_is(side, 1);
            else constant_is(3, side == 0 ? 1 : 0x100);
            CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "the largest bias and more");
            constant_is((size_t)side, 0x3fffffff - 127);
            CHECK_STATUS(single_check(), MOE_OK, "as much less");
            constant_is(factors, side % 2 == 0 ? 0x8000 : 0x80000000u);
            CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "a negative factor");
            if (int4) continue;
            constant_is(2, 0);
            constant_is((size_t)side, 0);
            constant_is(3, side == 0 ? 0x81 : 0x8100);
            CHECK_STATUS(single_check(), MOE_OK, "a weight of -127");
            constant_is(3, side == 0 ? 0x80 : 0x8000);
            CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "a weight of -128");
        }
}

/* An int8 product of one output: bias, factor and 0, weights. */
static void test_single_alone(void) {
    single_begin(moei_int_op_int8, 1, 4);
    one.op.in = 0;
    one.op.other = 8;
    constant_is(0, 0x3fffffff);
    constant_is(1, 0x7fff);
    CHECK_STATUS(single_check(), MOE_OK, "the largest bias and factor");
    constant_is(2, 0x01000000);
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "and more");
    constant_is(0, 0xc0000001 + 127);
    CHECK_STATUS(single_check(), MOE_OK, "the lowest bias");
    constant_is(0, 0);
    constant_is(2, 0x81000000);
    CHECK_STATUS(single_check(), MOE_OK, "a weight of -127");
    constant_is(2, 0x00800000);
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "a weight of -128");
    constant_is(2, 0);
    constant_is(1, 0x8000);
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "a negative factor");
    constant_is(1, 0x00010001);
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "a factor of an output that is not there");
}

/* Tables that end with the constants. */
static void test_single_tables(void) {
    single_begin(moei_int_op_rotate, 8, 8);
    one.model.weights_size = 17 * 4 * 4;
    CHECK_STATUS(single_check(), MOE_OK, "angles of 16 positions near, and of one far");
    one.model.weights_size -= 4;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "less than that");
    one.model.weights_size = 17 * 4 * 4;
    one.model.length = 17;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "a second one far");
    single_begin(moei_int_op_curve, 8, 0);
    one.model.weights_size = 132;
    CHECK_STATUS(single_check(), MOE_OK, "a curve");
    one.model.weights_size = 129;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "a shorter one");
    single_begin(moei_int_op_int8, 1, 4);
    one.op.in = 0;
    one.model.weights_size = 12;
    CHECK_STATUS(single_check(), MOE_OK, "a product");
    one.model.weights_size = 11;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "a shorter one");
    single_begin(moei_int_op_norm, 8, 0);
    one.op.index = 1;
    one.model.weights_size = 8 + 16 + 32;
    CHECK_STATUS(single_check(), MOE_OK, "eps, gains and biases");
    one.model.weights_size -= 4;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "one bias less");
    single_begin(moei_int_op_int16, 2, 4);
    one.op.other = 16;
    one.model.weights_size = 20 + 8;
    CHECK_STATUS(single_check(), MOE_OK, "weights and the biases of 16-bit inputs");
    one.constants[6] = 0x30000000;
    CHECK_STATUS(single_check(), MOE_OK, "a large bias");
    one.constants[6] = 0x3fffffff;
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "a larger one");
    one.constants[6] = 0;
    one.model.weights_size -= 4;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "one bias less");
    single_begin(moei_int_op_set_weight, 1, 3);
    one.op.in = CELLS - 4;
    CHECK_STATUS(single_check(), MOE_OK, "a weight at the end of the memory");
    one.op.shape.k++;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "one behind it");
}

/* The sums of its input that an int4 product writes, or finds in memory: those may be anything. */
static void test_single_kept_sums(void) {
    single_begin(moei_int_op_int4, 1, 4);
    one.op.in = 0;
    one.op.other = 8;
    int4_code_is(0, 0x7fff);
    CHECK_STATUS(single_check(), MOE_OK, "a code of 1");
    one.op.index = 1;
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "sums up to 32767");
    one.op.index = 0;
    one.op.other = one.op.in;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "sums in the place of the input");
    one.op.other = one.op.out;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "sums in the place of the result");
}

/* The key and the value are the input, which is narrow. */
static void test_single_attention(void) {
    single_begin(moei_int_op_attention, 4, 4);
    one.op.shape.shift = 7;
    one.op.factor2 = 32766;
    one.op.factor = 32767;
    one.attention.heads = 1;
    one.attention.d_head = 4;
    one.attention.keys = 4;
    one.attention.values = 20;
    one.attention.room = 1000;
    CHECK_STATUS(single_check(), MOE_OK, "a small head");
    one.attention.room = one.op.out;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "room for scores where the result lies");
    one.attention.room = one.op.out + 4;
    CHECK_STATUS(single_check(), MOE_OK, "behind it");
    one.attention.room = one.op.in;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "where the query lies");
    one.attention.room = CELLS - 12;
    CHECK_STATUS(single_check(), MOE_OK, "at the end of the memory");
    one.attention.room = CELLS - 10;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "less room than 3 positions take");
    one.attention.room = 1000;
    one.attention.values = 33;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "values behind the state");
    one.attention.values = 32;
    CHECK_STATUS(single_check(), MOE_OK, "the last that fit");
    one.attention.values = 2;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "values over the position");
    one.op.shape.n = 259;
    one.attention.d_head = 259;
    one.model.d_out = 259;
    CHECK_STATUS(single_check(), MOE_ERR_OVERFLOW, "scores of a wide head");
    one.model.weights = NULL;
    CHECK_STATUS(single_check(), MOE_ERR_FORMAT, "no weights");
}

/* Shares of weights that can be negative. */
static void test_shares(void) {
    made m;
    copy c;
    moe_rng rng;
    moei_int_router *r;
    size_t recipe = 0;
    while (strstr(recipes[recipe].settings, "ac_mix=2") == NULL) recipe++;
    moe_rng_seed(&rng, 3);
    if (!made_begin(&m, recipe, MOE_WEIGHTS_INT8, 0)) return;
    copy_begin(&c, &m.built);
    r = &c.mixtures[0].router;
    r->scale = moei_int_scale_weights;
    r->factor = 32767;
    CHECK_STATUS(copy_try(&c, &rng, "factor"), MOE_OK, "a positive factor");
    r->factor = -1;
    CHECK_STATUS(copy_try(&c, &rng, "factor"), MOE_ERR_FORMAT, "a negative factor");
    r->scales = 0;
    memset(c.weights, 0, 8);
    CHECK_STATUS(copy_try(&c, &rng, "scales"), MOE_OK, "factors of 0");
    c.weights[0] = c.weights[1] = 255;
    CHECK_STATUS(copy_try(&c, &rng, "scales"), MOE_ERR_FORMAT, "a negative factor of an expert");
    copy_pull(&c);
    memcpy(c.weights, m.built.weights.data, 8);
    r->values = moei_int_gate_logits;
    r->weight = moei_int_weight_sum;
    CHECK_STATUS(copy_try(&c, &rng, "values"), MOE_ERR_FORMAT, "logits as weights");
    copy_pull(&c);
    r->gate = moei_int_gate_softmax;
    r->select = moei_int_select_grouped;
    r->values = NULL;
    r->weight = moei_int_weight_softmax;
    r->groups = 2;
    r->groups_kept = 1;
    r->scratch = EXPERTS + 2;
    CHECK_STATUS(copy_try(&c, &rng, "top_k"), MOE_OK, "both experts of a group");
    r->top_k = r->most = 3;
    CHECK_STATUS(copy_try(&c, &rng, "top_k"), MOE_ERR_FORMAT, "one of a group that is left out, of weight -1");
    copy_end(&c);
    made_end(&m);
}

static moe_status no_fetch(void *ctx, size_t at, size_t size, void *to) {
    (void)ctx;
    (void)at;
    (void)size;
    (void)to;
    return MOE_ERR_IO;
}

/* Constants at odd addresses, which the builds that read words cannot read, and a loader that
   fails. */
static void test_places(void) {
    made m;
    copy c;
    moe_loader loader;
    moe_error error;
    size_t which;
    for (which = 0; which < 4; which++) {
        if (!made_begin(&m, which < 3 ? 0 : 8, MOE_WEIGHTS_INT8, which >= 2)) return;
        copy_begin(&c, &m.built);
        loader.ctx = NULL;
        loader.fetch = which >= 2 ? no_fetch : NULL;
        if (which == 0) c.model.weights++;
        if (which == 1) c.model.experts++;
        CHECK(moe_model_check(&c.model, &loader, c.block, c.scratch_size, &error) != MOE_OK || which < 2, "refused");
        if (which >= 2)
            CHECK(error.code == MOE_ERR_IO && strstr(error.message, "experts: the loader failed") != NULL,
                  error.message);
        loader.fetch = NULL;
        if (which >= 2)
            CHECK_STATUS(moe_model_check(&c.model, &loader, c.block, c.scratch_size, &error), MOE_ERR_UNSUPPORTED);
        copy_end(&c);
        made_end(&m);
    }
}

/* What an operation runs for each expert may read the numbers that it wrote for earlier ones, but
   not replace them. */
static void test_overlap(void) {
    made m;
    copy c;
    moe_rng rng;
    size_t i, recipe = 0, found = 0;
    while (strstr(recipes[recipe].settings, "score=attentive") == NULL) recipe++;
    if (!made_begin(&m, recipe, MOE_WEIGHTS_INT8, 0)) return;
    moe_rng_seed(&rng, recipe);
    copy_begin(&c, &m.built);
    for (i = 0; i < c.model.n_ops; i++) {
        if (c.ops[i].run != moei_int_op_match) continue;
        c.ops[i].out = c.ops[i].other; /* where small numbers lie before the first expert */
        c.mixtures[c.ops[i].index].z = c.ops[i].out;
        c.ops[i].factor2 = 14;
        CHECK_STATUS(copy_try(&c, &rng, "match"), MOE_ERR_OVERFLOW, "products of numbers of any size do not fit");
        copy_pull(&c);
        c.ops[i].out = c.mixtures[c.ops[i].index].z = c.ops[i].in;
        CHECK_STATUS(copy_try(&c, &rng, "match"), MOE_ERR_FORMAT, "numbers that the next expert's operations replace");
        found++;
    }
    CHECK(found == 1, "the score has one operation for the experts");
    copy_end(&c);
    made_end(&m);
}

/* Whether a copy with a result somewhere else is refused because it overlaps the input. */
static int overlaps_input(copy *c, size_t op, uint32_t out) {
    moe_error error;
    memset(&error, 0, sizeof error);
    c->ops[op].out = out;
    (void)moe_model_check(&c->model, NULL, c->block, c->scratch_size, &error);
    copy_pull(c);
    return strstr(error.message, "overlaps the input") != NULL;
}

/* The products of clusters read whole words of their input while they write: their results begin
   behind its last word, or end before its first. */
static void test_apart(void) {
    made m;
    copy c;
    moe_error error;
    size_t recipe = 0, op, found = 0;
    while (strstr(recipes[recipe].settings, "clustering") == NULL) recipe++;
    if (!made_begin(&m, recipe, MOE_WEIGHTS_INT8, 0)) return;
    copy_begin(&c, &m.built);
    for (op = 0; op < c.model.n_ops; op++) {
        const moei_int_op o = c.ops[op];
        const uint32_t words = (o.shape.n + 3u) / 4 * 4;
        if (o.run != moei_int_op_cluster) continue;
        CHECK(overlaps_input(&c, op, o.in) && overlaps_input(&c, op, o.in + words - 2), "the input's last word");
        CHECK(!overlaps_input(&c, op, o.in + words), "behind the input");
        if (o.in >= words) CHECK(overlaps_input(&c, op, o.in - words + 2), "the result's last word");
        if (o.in >= words) CHECK(!overlaps_input(&c, op, o.in - words), "before the input");
        found++;
    }
    CHECK_STATUS(moe_model_check(NULL, NULL, c.block, c.scratch_size, &error), MOE_ERR_ARGUMENT);
    CHECK(strcmp(error.message, "model 0: model or scratch: must not be NULL") == 0, error.message);
    copy_end(&c);
    made_end(&m);
    CHECK(found > 0, "a model with clusters");
}

/* Choices of a layer that has not run: the layer's own, in its score, and those of a later layer in
   the experts of an earlier one. */
static void test_later_choices(void) {
    made m;
    copy c;
    moei_int_op before;
    moe_error error;
    size_t recipe = 0, op = 0;
    while (strstr(recipes[recipe].settings, "clustering") == NULL) recipe++;
    if (!made_begin(&m, recipe, MOE_WEIGHTS_INT8, 0)) return;
    copy_begin(&c, &m.built);
    while (c.ops[op].run != moei_int_op_cluster) op++;
    before = c.ops[op];
    c.ops[op].index = 1;
    c.ops[op].other = c.mixtures[1].choices;
    CHECK_STATUS(moe_model_check(&c.model, NULL, c.block, c.scratch_size, &error), MOE_ERR_FORMAT);
    CHECK(strstr(error.message, "that MoE layer has not run yet") != NULL, error.message);
    c.ops[c.mixtures[0].expert] = c.ops[op];
    c.ops[op] = before;
    CHECK_STATUS(moe_model_check(&c.model, NULL, c.block, c.scratch_size, &error), MOE_ERR_FORMAT);
    CHECK(strstr(error.message, "that MoE layer has not run yet") != NULL, error.message);
    copy_end(&c);
    made_end(&m);
}

/* What the shared expert adds to a layer's sum counts; the layer's result lies apart from it. */
static void test_shared_sum(void) {
    made m;
    copy c;
    moe_error error;
    moei_int_mixture *x;
    size_t recipe = 0, i;
    while (strstr(recipes[recipe].settings, "n_shared") == NULL) recipe++;
    if (!made_begin(&m, recipe, MOE_WEIGHTS_INT8, 0)) return;
    copy_begin(&c, &m.built);
    x = &c.mixtures[0];
    for (i = 0; i < 2 && CHECK(x->n_shared >= 2); i++) { /* 2^15 times a logit, twice */
        moei_int_op *op = &c.ops[x->shared + i];
        memset(op, 0, sizeof *op);
        op->run = moei_int_op_accumulate;
        op->shape.n = WIDTH;
        op->in = op->other = x->z;
        op->out = x->sum;
    }
    x->n_shared = 1;
    CHECK_STATUS(moe_model_check(&c.model, NULL, c.block, c.scratch_size, &error), MOE_OK);
    x->n_shared = 2;
    CHECK_STATUS(moe_model_check(&c.model, NULL, c.block, c.scratch_size, &error), MOE_ERR_OVERFLOW);
    copy_pull(&c);
    for (i = 0; c.ops[i].run != moei_int_op_mixture;) i++;
    c.ops[i].out = x->sum; /* which the layer's result is read from */
    CHECK_STATUS(moe_model_check(&c.model, NULL, c.block, c.scratch_size, &error), MOE_ERR_FORMAT);
    CHECK(strstr(error.message, "out: overwrites") != NULL, error.message);
    copy_end(&c);
    made_end(&m);
}

/* The bias of each expert is held within its range, the first and the last one too. */
static void test_biases(void) {
    made m;
    copy c;
    moe_rng rng;
    size_t recipe = 0, e;
    while (strstr(recipes[recipe].settings, "selection_bias") == NULL) recipe++;
    if (!made_begin(&m, recipe, MOE_WEIGHTS_INT8, 0)) return;
    moe_rng_seed(&rng, recipe);
    copy_begin(&c, &m.built);
    for (e = 0; e < EXPERTS; e++) {
        unsigned char *bias = c.weights + c.mixtures[0].router.bias + 4 * e, before[4];
        memcpy(before, bias, sizeof before);
        bias[3] = 0x10; /* 2^28 and above */
        bias[0] |= 1;
        CHECK_STATUS(copy_try(&c, &rng, "bias"), MOE_ERR_OVERFLOW);
        memcpy(bias, before, sizeof before);
        CHECK_STATUS(copy_try(&c, &rng, "bias"), MOE_OK);
    }
    copy_end(&c);
    made_end(&m);
}

/* A recipe by its settings. */
static int recipe_begin(made *m, copy *c, moe_rng *rng, const char *settings) {
    size_t recipe = 0;
    while (strcmp(recipes[recipe].settings, settings) != 0) recipe++;
    if (!made_begin(m, recipe, MOE_WEIGHTS_INT8, 0)) return 0;
    moe_rng_seed(rng, recipe);
    copy_begin(c, &m->built);
    return 1;
}

/* Tokens whose experts are told by a table, which names each once; groups that need more room than
   the choices. */
static void test_selections(void) {
    made m;
    copy c;
    moe_rng rng;
    moei_int_router *r;
    if (!recipe_begin(&m, &c, &rng, "select=hash table_size=11 gate=sigmoid")) return;
    r = &c.mixtures[0].router;
    CHECK(r->top_k == 2 && r->tokens == 11);
    c.weights[r->table + 20] = c.weights[r->table + 21];
    CHECK_STATUS(copy_try(&c, &rng, "table"), MOE_ERR_FORMAT, "an expert twice");
    c.weights[r->table + 20] = (unsigned char)((c.weights[r->table + 21] + 1) % EXPERTS);
    CHECK_STATUS(copy_try(&c, &rng, "table"), MOE_OK, "another one");
    c.weights[r->table + 20] = EXPERTS;
    CHECK_STATUS(copy_try(&c, &rng, "table"), MOE_ERR_FORMAT, "one that does not exist");
    copy_end(&c);
    made_end(&m);
    if (!recipe_begin(&m, &c, &rng, "select=grouped_top_k groups=2 groups_kept=1 group_score=top2_sum "
                                    "selection_bias=1 gate=sigmoid")) return;
    r = &c.mixtures[0].router;
    r->groups_kept = 2;
    CHECK_STATUS(copy_try(&c, &rng, "groups_kept"), MOE_OK, "as many groups as choices");
    r->top_k = r->most = 1;
    CHECK_STATUS(copy_try(&c, &rng, "groups_kept"), MOE_ERR_FORMAT, "more groups than room for choices");
    r->groups_kept = 1;
    CHECK_STATUS(copy_try(&c, &rng, "groups_kept"), MOE_OK, "one group");
    r->scratch--;
    CHECK_STATUS(copy_try(&c, &rng, "scratch"), MOE_ERR_FORMAT, "no room for a group's score");
    r->scratch++;
    r->select = moei_int_select_each;
    r->top_k = r->most = 3;
    CHECK_STATUS(copy_try(&c, &rng, "top_k"), MOE_ERR_FORMAT, "three of two groups");
    r->top_k = r->most = 2;
    CHECK_STATUS(copy_try(&c, &rng, "top_k"), MOE_OK, "one of each");
    copy_end(&c);
    made_end(&m);
}

/* Thresholds behind the constants, and numbers of bits that a gate cannot use. */
static void test_router_limits(void) {
    made m;
    copy c;
    moe_rng rng;
    moei_int_router *r;
    if (!recipe_begin(&m, &c, &rng, "gate=sigmoid select=threshold threshold_learned=1 weight=raw")) return;
    c.mixtures[0].router.thresholds = (uint32_t)(c.model.weights_size / 4 * 4) - 4;
    CHECK_STATUS(copy_try(&c, &rng, "thresholds"), MOE_ERR_FORMAT, "thresholds behind the constants");
    copy_end(&c);
    made_end(&m);
    if (!recipe_begin(&m, &c, &rng, "score=mlp router_hidden=5 router_act=tanh gate=sqrt_softplus")) return;
    r = &c.mixtures[0].router;
    r->z_bits = (uint8_t)(r->z_bits - 1);
    CHECK_STATUS(copy_try(&c, &rng, "z_bits"), MOE_ERR_FORMAT, "an odd number of bits");
    r->z_bits = (uint8_t)(r->z_bits - 1);
    CHECK_STATUS(copy_try(&c, &rng, "z_bits"), MOE_OK, "an even one");
    copy_end(&c);
    made_end(&m);
}

/* What one expert adds fits, and what twelve add does not. */
static void test_many_experts(void) {
    made m;
    copy c;
    moe_rng rng;
    size_t i, found = 0;
    if (!recipe_begin(&m, &c, &rng, "expert=linear n_experts=12 select=dense")) return;
    for (i = c.mixtures[0].expert; i < c.mixtures[0].expert + (size_t)c.mixtures[0].n_expert; i++) {
        if (c.ops[i].run != moei_int_op_accumulate) continue;
        c.ops[i].shape.shift = 2;
        CHECK_STATUS(copy_try(&c, &rng, "sum"), MOE_ERR_OVERFLOW, "twelve times 2^28");
        c.ops[i].shape.shift = 3;
        CHECK_STATUS(copy_try(&c, &rng, "sum"), MOE_OK, "half of it");
        found++;
    }
    CHECK(found == 1, "an operation that adds to the sum");
    copy_end(&c);
    made_end(&m);
}

/* ---- float models ---- */

typedef struct floating {
    made m;
    moe_model model;
    moe_net net;
    moe_module modules[8];
} floating;

static void floating_pull(floating *f) {
    f->model = f->m.built.model;
    f->net = f->m.built.net;
    memcpy(f->modules, f->net.modules, f->net.n_modules * sizeof *f->modules);
    f->net.modules = f->modules;
    f->model.net = &f->net;
}

static moe_status floating_check(floating *f) {
    void *scratch = grab(f->m.built.model.scratch_size, 1);
    moe_error error;
    moe_status status = moe_model_check(&f->model, NULL, scratch, f->m.built.model.scratch_size, &error);
    CHECK(status == MOE_OK || error.message[0] != '\0', "an error says why");
    free(scratch);
    floating_pull(f);
    return status;
}

#define REFUSED(status, change) \
    do { \
        change; \
        CHECK_STATUS(floating_check(&f), status, #change); \
    } while (0)

static void test_float_modules(void) {
    floating f;
    moe_module *m = f.modules;
    static moe_transport transport;
    static moe_real late[VOCABULARY * WIDTH];
    moe_real infinite = (moe_real)HUGE_VAL;
    const moe_kernels foreign = *moe_kernels_select(MOE_KERNELS_C);
    if (!made_begin(&f.m, RECIPES - 3, MOE_WEIGHTS_FLOAT, 0)) return;
    floating_pull(&f); /* embedding, norm, attention, residual, mixture, residual, tied */
    CHECK_STATUS(floating_check(&f), MOE_OK, "a model that was made is accepted");
    REFUSED(MOE_ERR_FORMAT, f.model.net = NULL);
    REFUSED(MOE_ERR_FORMAT, f.net.modules = NULL);
    REFUSED(MOE_ERR_FORMAT, f.net.built = 0);
    REFUSED(MOE_ERR_FORMAT, f.net.n_modules = 0);
    REFUSED(MOE_ERR_FORMAT, f.net.n_modules = 6);
    REFUSED(MOE_ERR_FORMAT, f.net.n_modules = MOE_NET_MAX_MODULES + 1);
    REFUSED(MOE_ERR_FORMAT, f.net.transport = &transport);
    REFUSED(MOE_ERR_FORMAT, f.net.kernels = &foreign);
    REFUSED(MOE_OK, f.net.kernels = moe_kernels_select(MOE_KERNELS_AUTO));
    REFUSED(MOE_ERR_FORMAT, f.net.d_in = 1);
    REFUSED(MOE_ERR_FORMAT, f.net.d_in = -1);
    REFUSED(MOE_ERR_FORMAT, f.net.d_out = -1);
    REFUSED(MOE_ERR_FORMAT, f.model.d_in = 1);
    REFUSED(MOE_ERR_FORMAT, f.model.d_out = 1);
    REFUSED(MOE_ERR_FORMAT, f.model.run = moei_int_model_run);
    REFUSED(MOE_ERR_FORMAT, f.model.choices = moei_int_model_choices);
    REFUSED(MOE_ERR_FORMAT, f.model.scratch_size = 8);
    REFUSED(MOE_ERR_FORMAT, f.model.weights_are = MOE_WEIGHTS_COUNT);
    REFUSED(MOE_ERR_UNSUPPORTED, f.model.version = 1);
    REFUSED(MOE_ERR_FORMAT, f.model.length = 1 << 20);
    REFUSED(MOE_ERR_FORMAT, m[0].kind = MOE_MODULE_LINEAR);
    REFUSED(MOE_ERR_FORMAT, m[0].n_rows = 0);
    REFUSED(MOE_ERR_FORMAT, m[0].n_rows = MOE_MAX_WIDTH + 1);
    REFUSED(MOE_ERR_FORMAT, m[1].n_rows = 1);
    REFUSED(MOE_ERR_FORMAT, m[1].kind = MOE_MODULE_EMBEDDING);
    REFUSED(MOE_ERR_FORMAT, m[1].kind = -1);
    REFUSED(MOE_ERR_FORMAT, m[1].kind = MOE_MODULE_COUNT);
    REFUSED(MOE_ERR_FORMAT, m[1].d_in = 5);
    REFUSED(MOE_ERR_FORMAT, m[1].d_out = 5);
    REFUSED(MOE_ERR_FORMAT, m[1].d_out = 0);
    REFUSED(MOE_ERR_FORMAT, m[1].d_out = MOE_MAX_WIDTH + 1);
    REFUSED(MOE_ERR_FORMAT, m[1].tensors[MOE_MODULE_WEIGHT] = NULL);
    REFUSED(MOE_ERR_NONFINITE, m[1].tensors[MOE_MODULE_WEIGHT] = &infinite);
    late[VOCABULARY * WIDTH - 1] = infinite;
    REFUSED(MOE_ERR_NONFINITE, m[0].tensors[MOE_MODULE_WEIGHT] = late); /* the last number of a matrix */
    REFUSED(MOE_ERR_CONFIG, m[2].attention.heads = -1);
    REFUSED(MOE_ERR_FORMAT, m[2].attention.heads = 0);
    REFUSED(MOE_ERR_FORMAT, m[2].attention.d_head = 0);
    REFUSED(MOE_ERR_FORMAT, m[3].span = 0);
    REFUSED(MOE_ERR_FORMAT, m[3].span = 3);
    REFUSED(MOE_ERR_FORMAT, m[3].span = 4);
    REFUSED(MOE_ERR_FORMAT, m[6].tensors[MOE_MODULE_WEIGHT] = m[1].tensors[MOE_MODULE_WEIGHT]);
    made_end(&f.m);
}

static void test_float_layers(void) {
    floating f;
    static moe_transport transport;
    static moe_external external;
    moe_layer *l = &f.modules[1].layer;
    moe_module *m = f.modules;
    const moe_kernels foreign = *moe_kernels_select(MOE_KERNELS_C);
    if (!made_begin(&f.m, 0, MOE_WEIGHTS_FLOAT, 0)) return;
    floating_pull(&f); /* relu, mixture, residual, linear */
    CHECK_STATUS(floating_check(&f), MOE_OK, "a model that was made is accepted");
    REFUSED(MOE_ERR_FORMAT, m[0].act = -1);
    REFUSED(MOE_ERR_FORMAT, m[0].act = MOE_ACT_COUNT);
    REFUSED(MOE_ERR_FORMAT, m[3].kind = MOE_MODULE_TIED);
    REFUSED(MOE_ERR_CONFIG, l->config.router.gate = MOE_GATE_COUNT);
    REFUSED(MOE_ERR_FORMAT, l->config.router.d_model = 5);
    REFUSED(MOE_ERR_FORMAT, l->config.d_out = 5);
    REFUSED(MOE_ERR_FORMAT, l->config.d_ff = 0);
    REFUSED(MOE_ERR_FORMAT, l->config.router.router_bias = 1);
    REFUSED(MOE_ERR_FORMAT, l->router.config.n_experts = 1);
    REFUSED(MOE_ERR_FORMAT, l->present ^= 1);
    REFUSED(MOE_ERR_FORMAT, l->router.present ^= 1);
    REFUSED(MOE_ERR_FORMAT, l->router.parts ^= 1);
    REFUSED(MOE_ERR_FORMAT, l->external[MOE_ROUTER_WEIGHT] = &external);
    REFUSED(MOE_ERR_FORMAT, l->is_packed = 1);
    REFUSED(MOE_ERR_FORMAT, l->kernels = &foreign);
    REFUSED(MOE_ERR_FORMAT, l->router.kernels = &foreign);
    REFUSED(MOE_ERR_FORMAT, l->config.transport = &transport);
    REFUSED(MOE_ERR_FORMAT, l->tensors[MOE_ROUTER_WEIGHT] = NULL);
    REFUSED(MOE_ERR_CONFIG,
            l->router.config.input = l->config.router.input = MOE_INPUT_ADAPTIVE_CLUSTERING;
            l->router.config.ac_mode = l->config.router.ac_mode = MOE_AC_RUNNING);
    REFUSED(MOE_ERR_FORMAT, l->router.config.select = l->config.router.select = MOE_SELECT_GIVEN);
    REFUSED(MOE_ERR_FORMAT, m[1].kind = MOE_MODULE_FEED_FORWARD;
            l->router.config.select = l->config.router.select = MOE_SELECT_GIVEN);
    made_end(&f.m);
}

static void test_floats(void) {
    size_t i;
    for (i = 0; i < RECIPES; i++) {
        floating f;
        test_about = recipes[i].settings;
        if (!made_begin(&f.m, i, MOE_WEIGHTS_FLOAT, 0)) continue;
        floating_pull(&f);
        CHECK_STATUS(floating_check(&f), MOE_OK, "a model that was made is accepted");
        made_end(&f.m);
    }
    test_about = "";
}

/* The largest network. */
static void test_float_length(void) {
    moe_model_config config;
    moe_built_model built;
    moe_error error;
    moe_net net;
    void *scratch;
    size_t i;
    memset(&config, 0, sizeof config);
    config.weights = MOE_WEIGHTS_FLOAT;
    config.same_bits = 1;
    moe_net_init(&net, 1, MOE_KERNELS_C, NULL);
    for (i = 0; i < MOE_NET_MAX_MODULES; i++) moe_net_activation(&net, MOE_ACT_RELU);
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK);
    if (!CHECK_STATUS(moe_model_create(&built, &net, &config, &error), MOE_OK)) return;
    scratch = grab(built.model.scratch_size, 1);
    CHECK_STATUS(moe_model_check(&built.model, NULL, scratch, built.model.scratch_size, &error), MOE_OK);
    free(scratch);
    moe_model_free(&built);
    moe_net_free(&net);
}

int main(int argc, char **argv) {
    CASE(test_apart());
    CASE(test_later_choices());
    CASE(test_shared_sum());
    CASE(test_biases());
    CASE(test_places());
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    CASE(test_models());
    CASE(test_number());
    CASE(test_single_norms());
    CASE(test_single_sums());
    CASE(test_single_attention());
    CASE(test_single_products());
    CASE(test_single_alone());
    CASE(test_single_tables());
    CASE(test_single_kept_sums());
    CASE(test_selections());
    CASE(test_router_limits());
    CASE(test_many_experts());
    CASE(test_shares());
    CASE(test_overlap());
    if (!MOE_REAL_IS_DOUBLE) {
        CASE(test_floats());
        CASE(test_float_modules());
        CASE(test_float_layers());
        CASE(test_float_length());
    }
    return test_end();
}
