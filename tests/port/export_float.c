/* Tests float models: networks that are printed as constants, compiled and run.
   tests/port/export_float.sh compiles this file twice:
       cc -std=c99 -I. tests/port/export_float.c -o print -lm && ./print > nets.h
       cc -std=c99 -I. -DNETS='"nets.h"' tests/port/export_float.c -o run -lm && ./run
   The second program makes the same networks again and compares every member and every bit of the
   results. "print quick" and -DFEW take the first rows only. */

#define MOE_IMPLEMENTATION
#include "../all.h"
#define TEST_PRINT(...) fprintf(stderr, __VA_ARGS__) /* what goes to standard output is C */
#include "../test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the networks: a word per module, its numbers or settings behind it; modules are separated by
   ';' ---- */

static const char *const rows[] = {
    "in 6; linear 5",
    "in 6; linear 8; activation 1; linear 8; activation 2; linear 8; activation 3; linear 3; activation 4; layer_norm; "
    "dropout",
    "in 6; layer_norm; linear 6; residual 2; rms_norm; mixture n_experts=5 top_k=2 d_ff=7; residual 2; dropout; "
    "activation 5; linear 4",
    "in 8; mixture expert=mlp act=gelu d_ff=5 n_experts=4; mixture expert=linear n_experts=3 d_out=5; mixture "
    "expert=factorised d_low=3 d_ff=6",
    "in 8; mixture expert=mlp no_expert_bias=1 act=tanh d_ff=5 n_experts=4 add_input=1; feed_forward expert=mlp "
    "d_ff=5; feed_forward d_ff=9",
    "in 8; mixture expert_bias=1 swiglu_alpha=1.702 swiglu_limit=7 swiglu_offset=1 d_ff=5 n_experts=4; feed_forward "
    "d_ff=9 expert_bias=1 swiglu_limit=0.5",
    "in 8; mixture n_shared=2 d_shared=3 shared_sigmoid=1 d_ff=6; feed_forward expert=factorised d_ff=9 d_low=2; "
    "residual 1",
    "in 8; mixture d_latent=5 n_shared=1 d_shared=3 d_ff=6 d_out=4; linear 6; mixture d_latent=-2 d_ff=5",
    "in 8; mixture n_experts=40 top_k=3 d_ff=4 d_out=11; layer_norm; linear 300; activation 1; linear 2",
    "ids; embedding 20 8; mixture select=hash table_size=20 d_ff=6; tied",
    "ids; embedding 20 8; positions 12; attention 2 4; residual 1; rms_norm; mixture d_ff=6; residual 2; tied",
    "ids; embedding 20 8; attention 2 4 rotary; residual 1; attention 1 6 rotary; mixture d_ff=6 n_experts=3; "
    "layer_norm; linear 7",
    "in 8; attention 4 2; mixture refine=attention attention_heads=all causal=1 d_ff=6; attention 2 4; mixture "
    "refine=attention attention_heads=fixed d_ff=6",
    "in 8; mixture refine=similarity causal=1 d_ff=6; mixture refine=similarity causal=1 similarity_learned=1 "
    "similarity_scale=l2 d_ff=6",
    "in 8; mixture d_ff=6; mixture input=adaptive_clustering ac_mode=running ac_mix=2 d_ff=6; mixture "
    "input=adaptive_clustering ac_mode=random d_ff=6",
    "in 8; mixture score=cosine cosine_dim=5 cosine_learn_tau=1 gate=sigmoid d_ff=6; mixture score=mlp router_hidden=7 "
    "router_act=tanh d_ff=6",
    "in 8; mixture score=attentive d_ff=6; mixture score=norm norm_order=l1 norm_node=gate d_ff=6; mixture score=norm "
    "norm_order=l1 expert=factorised d_low=3 d_ff=6; mixture score=competition d_ff=6",
    "in 8; mixture score=grap n_experts=4 d_ff=6; mixture score=dselect n_experts=6 d_ff=6; mixture score=random "
    "d_ff=6 router_bias=1",
    "in 8; mixture select=top_p top_p=0.7 d_ff=6; mixture select=threshold threshold=0.2 d_ff=6; mixture select=dense "
    "n_experts=3 d_ff=6",
    "in 8; mixture select=grouped_top_k groups=4 groups_kept=2 group_score=top2_sum d_ff=6 selection_bias=1 "
    "gate=sigmoid; mixture select=positive gate=relu d_ff=6",
    "in 8; mixture weight=softmax d_ff=6; mixture weight=raw d_ff=6; mixture weight=p_norm weight_p=2.5 d_ff=6; "
    "mixture weight=uniform d_ff=6; mixture weight=one d_ff=6",
    "in 8; mixture expert_scale=1 scale=2.5 weight=sparsemixer d_ff=6; mixture gate=sqrt_softplus input=scaled_rms "
    "d_ff=6; mixture apply_to=input d_ff=6",
    "in 8; mixture gate_temperature=0.7 schedule_steps=100 k_end=1 top_k=3 d_ff=6; mixture student=1 freeze_at=10 "
    "loss_distill=1 d_ff=6",
    "in 6; linear 6; convolution 3; residual 1; scale 2; convolution 1; linear 4",
};

enum { ROWS = sizeof rows / sizeof *rows, MAX_NETS = 400, TOKENS = 10 };

/* The word at *text, of at most 31 characters, and *text behind it. Returns 0 at the end of a
   module. */
static int word(const char **text, char *out) {
    int n = 0;
    while (**text == ' ') ++*text;
    for (; **text != '\0' && **text != ';' && **text != ' '; ++*text)
        if (n < 31) out[n++] = **text;
    out[n] = '\0';
    return n > 0;
}

static int number(const char **text) {
    char digits[32];
    return word(text, digits) ? atoi(digits) : 0;
}

/* The settings up to the end of the module. */
static void settings(const char **text, const moe_field *fields, moe_layer_config *c) {
    char all[400];
    int n = 0;
    moe_error error;
    while (**text != '\0' && **text != ';') all[n++] = *(*text)++;
    all[n] = '\0';
    if (moe_fields_apply(fields, c, all, &error) != MOE_OK) CHECK(0, "settings");
}

static void add_module(moe_net *net, const char **text) {
    char kind[32], extra[32];
    moe_layer_config c;
    moe_attention_config a;
    moe_module m;
    int i;
    memset(&c, 0, sizeof c);
    memset(&a, 0, sizeof a);
    memset(&m, 0, sizeof m);
    word(text, kind);
    for (i = 0; i < MOE_MODULE_COUNT && strcmp(moei_module_names[i], kind) != 0; i++) {}
    if (i == MOE_MODULE_LINEAR) moe_net_linear(net, number(text));
    else if (i == MOE_MODULE_ACTIVATION) moe_net_activation(net, number(text));
    else if (i == MOE_MODULE_LAYER_NORM) moe_net_layer_norm(net);
    else if (i == MOE_MODULE_RESIDUAL) moe_net_residual(net, number(text));
    else if (i == MOE_MODULE_POSITIONS) moe_net_positions(net, number(text));
    else if (i == MOE_MODULE_RMS_NORM) moe_net_rms_norm(net);
    else if (i == MOE_MODULE_DROPOUT) moe_net_dropout(net, (moe_real)0.25);
    else if (i == MOE_MODULE_TIED) moe_net_tied(net);
    else if (i == MOE_MODULE_MIXTURE || i == MOE_MODULE_FEED_FORWARD) {
        settings(text, moe_layer_fields(), &c);
        if (i == MOE_MODULE_MIXTURE) moe_net_mixture(net, &c);
        else moe_net_feed_forward(net, &c);
    } else if (i == MOE_MODULE_ATTENTION) {
        a.heads = number(text);
        a.d_head = number(text);
        a.rotary = word(text, extra);
        moe_net_attention(net, &a);
    } else if (i == MOE_MODULE_SCALE || i == MOE_MODULE_CONVOLUTION) {
        m.kind = i;
        m.length = number(text);
        m.scale = (moe_real)m.length + (moe_real)0.5;
        moe_net_append(net, &m);
    } else if (i == MOE_MODULE_EMBEDDING) {
        i = number(text);
        moe_net_embedding(net, i, number(text));
    } else CHECK(0, "unknown module");
}

/* Shakes what starts at round values, so that no tensor may be forgotten or taken for another; the
   first network gets the edges of floats too. */
static void shake(moe_net *net, uint64_t seed) {
    static const float edges[] = {-0.0f,           1e-45f,      -1e-45f, 3.40282347e38f, -3.40282347e38f,
                                  1.17549435e-38f, 1.00000012f, 0.1f,    16777217.0f,    1e-30f};
    moe_rng rng;
    size_t t, i;
    moe_rng_seed(&rng, seed + 77);
    for (t = 0; t < net->n_tensors; t++) {
        const moe_tensor *tensor = &net->tensors[t];
        int positive = strstr(tensor->name, "ac_running") != NULL || strstr(tensor->name, "temperature") != NULL ||
                       strstr(tensor->name, "threshold") != NULL;
        if (strstr(tensor->name, "router.table") != NULL || strstr(tensor->name, "router.load") != NULL) continue;
        for (i = 0; i < tensor->count; i++) {
            moe_real by = (moe_real)0.2 * moe_rng_normal(&rng);
            if (strstr(tensor->name, "router.step") != NULL) by = (moe_real)(seed % 3 * 20);
            tensor->data[i] += positive && by < 0 ? -by : by;
        }
    }
    for (i = 0; seed == 1 && i < sizeof edges / sizeof *edges; i++) net->tensors[0].data[i] = edges[i];
}

/* Net number i of the list: rows, then a network for each preset. Returns 0 past the last, -1 when
   it cannot be made. */
static int make(size_t i, moe_net *net, char *name, char *about) {
    const char *text = i < ROWS ? rows[i] : NULL;
    char first[32];
    moe_error error;
    sprintf(name, "net_%d", (int)i);
    if (i < ROWS) {
        strcpy(about, rows[i]);
        word(&text, first);
        moe_net_init(net, strcmp(first, "in") == 0 ? number(&text) : 0, MOE_KERNELS_C, NULL);
        while (*text == ';') {
            text++;
            add_module(net, &text);
        }
    } else {
        const moe_preset *preset = moe_presets();
        size_t left = i - ROWS;
        moe_layer_config c;
        for (; preset->name != NULL && left > 0; left--) preset++;
        if (preset->name == NULL) return 0;
        strcpy(about, preset->name);
        if (moe_layer_preset(preset->name, &c, &error) != MOE_OK) return 0;
        if (c.router.n_experts > 16) c.router.n_experts = 16;
        TEST_FEWER_EXPERTS(c.router);
        if (c.router.groups > 4) c.router.groups = 4;
        if (c.router.groups_kept > 2) c.router.groups_kept = 2;
        if (c.router.top_k > 6) c.router.top_k = 6;
        if (c.router.select == MOE_SELECT_HASH || c.router.student_dim > 0) c.router.table_size = 20;
        if (c.router.input == MOE_INPUT_ADAPTIVE_CLUSTERING) c.router.ac_mode = MOE_AC_RUNNING;
        if (c.router.refine == MOE_REFINE_ATTENTION && c.router.attention_heads == MOE_HEADS_MIN_ENTROPY)
            c.router.attention_heads = MOE_HEADS_ALL;
        if (c.router.select != MOE_SELECT_EXPERT_THRESHOLD && c.router.select != MOE_SELECT_EXPERT_CHOICE &&
            (c.router.capacity_factor > 0 || c.router.capacity_factor_eval > 0 ||
             c.router.capacity_bound != MOE_BOUND_NONE))
            c.router.capacity_factor_eval = 16;
        c.d_ff = 7;
        moe_net_init(net, 0, MOE_KERNELS_C, NULL);
        moe_net_embedding(net, 20, 16);
        moe_net_attention(net, NULL);
        moe_net_residual(net, 1);
        if (c.router.input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
            moe_layer_config before;
            memset(&before, 0, sizeof before);
            before.router.n_experts = c.router.n_experts;
            before.d_ff = 5;
            moe_net_mixture(net, &before);
        }
        moe_net_mixture(net, &c);
        moe_net_residual(net, 1);
        moe_net_linear(net, 5);
    }
    if (moe_net_build(net, 0, i + 1, &error) != MOE_OK) {
        fprintf(stderr, "%s: %s: %s\n", name, about, error.message);
        moe_net_free(net);
        return -1;
    }
    shake(net, i + 1);
    return 1;
}

#ifndef NETS

static moe_status print_bytes(void *ctx, const void *from, size_t size) {
    return fwrite(from, 1, size, (FILE *)ctx) == size ? MOE_OK : MOE_ERR_IO;
}

/* A number that is none, a tensor that is not there: refused before the first byte, and named. */
static void check_refusals(moe_net *net, const char *about) {
    moe_built_model built;
    moe_error error;
    moe_real keep = net->tensors[0].data[0];
    memset(&error, 0, sizeof error);
    net->tensors[0].data[0] = MOEI_INFINITY;
    CHECK(moe_model_create(&built, net, NULL, &error) == MOE_ERR_NONFINITE && strstr(error.message, "inf") != NULL,
          about);
    net->tensors[0].data[0] = keep;
}

/* Prints the networks that can be models, and tells which cannot. */
int main(int argc, char **argv) {
    const size_t most = argc > 1 && strcmp(argv[1], "quick") == 0 ? (size_t)ROWS : (size_t)MAX_NETS;
    moe_stream out = {NULL, NULL, print_bytes, NULL};
    char name[32], about[500];
    unsigned char printed[MAX_NETS] = {0};
    moe_model_config config;
    moe_built_model built;
    moe_error error;
    size_t i;
    int made;
    memset(&config, 0, sizeof config);
    memset(&built, 0, sizeof built);
    config.weights = MOE_WEIGHTS_FLOAT;
    config.same_bits = 1;
    config.length = TOKENS;
    out.ctx = stdout;
    for (i = argc > 2 ? (size_t)atoi(argv[2]) : 0; i < (argc > 2 ? (size_t)atoi(argv[2]) + 1 : most); i++) {
        /* "print one 7": net 7 alone */
        moe_net net;
        moe_status status;
        made = make(i, &net, name, about);
        if (made == 0) break;
        if (!CHECK(made == 1, about)) continue;
        status = moe_model_create(&built, &net, &config, &error);
        if (status == MOE_OK) status = moe_export_c(&built, name, &out, &error);
        if (status == MOE_OK) check_refusals(&net, about);
        if (status == MOE_ERR_UNSUPPORTED && i >= ROWS) fprintf(stderr, "%s is no model: %s\n", about, error.message);
        else if (status != MOE_OK) fprintf(stderr, "%s: %s\n", about, error.message);
        CHECK(status == MOE_OK || (status == MOE_ERR_UNSUPPORTED && i >= ROWS), about);
        printed[i] = status == MOE_OK;
        moe_model_free(&built);
        moe_net_free(&net);
    }
    if (argc > 2) return test_wrong > 0;
    printf("static const moe_model *const printed[] = {");
    for (made = 0; made < (int)i; made++) printf(printed[made] ? "&net_%d, " : "NULL, ", made);
    printf("NULL};\n");
    return test_wrong > 0;
}

#else
#include NETS

#ifdef QUICK
#define MOST ((size_t)ROWS)
#else
#define MOST ((size_t)MAX_NETS)
#endif

/* ---- members ---- */

static void compare_layer(const moe_layer *a, const moe_layer *b, const char *net) {
    int place;
    moe_parameter slot;
    CHECK(memcmp(&a->config, &b->config, sizeof a->config) == 0, net);
    CHECK(memcmp(&a->router.config, &b->router.config, sizeof a->router.config) == 0, net);
    CHECK(memcmp(&a->router.custom, &b->router.custom, sizeof a->router.custom) == 0, net);
    CHECK(a->router.kernels == NULL && a->kernels == NULL, net);
    CHECK(a->router.present == b->router.present && a->router.parts == b->router.parts, net);
    CHECK(a->present == b->present, net);
    CHECK(memcmp(a->router.tensors, b->router.tensors, sizeof a->router.tensors) == 0, net);
    CHECK(memcmp(a->packed, b->packed, sizeof a->packed) == 0 && a->packed_type == b->packed_type &&
              a->is_packed == b->is_packed,
          net);
    for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++) {
        CHECK(a->gradients[place] == NULL, net);
        CHECK((a->tensors[place] == NULL) == (b->tensors[place] == NULL), net);
        if (b->tensors[place] == NULL || a->tensors[place] == NULL ||
            moe_layer_parameter(&b->config, place, &slot) != MOE_OK)
            continue;
        CHECK(memcmp(a->tensors[place], b->tensors[place], slot.count * sizeof(moe_real)) == 0, net);
    }
    CHECK(a->memory == NULL && a->memory_size == 0 && a->allocator.resize == NULL && a->allocator.ctx == NULL, net);
}

static void compare_module(const moe_net *printed_net, const moe_net *built, size_t i, const char *net) {
    const moe_module *a = &printed_net->modules[i], *b = &built->modules[i];
    moe_parameter slot;
    int place;
    CHECK(a->kind == b->kind && a->d_in == b->d_in && a->d_out == b->d_out && a->act == b->act && a->span == b->span &&
              a->n_rows == b->n_rows,
          net);
    CHECK(memcmp(&a->rate, &b->rate, sizeof a->rate) == 0 &&
              memcmp(&a->attention, &b->attention, sizeof a->attention) == 0,
          net);
    compare_layer(&a->layer, &b->layer, net);
    for (place = 0; place < MOE_MODULE_SLOTS; place++) {
        CHECK(a->gradients[place] == NULL, net);
        CHECK((a->tensors[place] == NULL) == (b->tensors[place] == NULL), net);
        if (a->tensors[place] == NULL || b->tensors[place] == NULL) continue;
        if (b->kind == MOE_MODULE_TIED && place == MOE_MODULE_WEIGHT)
            CHECK(a->tensors[place] == printed_net->modules[0].tensors[place], net);
        else if (CHECK(moei_module_parameter(built, i, place, &slot) == MOE_OK, net))
            CHECK(memcmp(a->tensors[place], b->tensors[place], slot.count * sizeof(moe_real)) == 0, net);
    }
}

static void compare_nets(const moe_net *a, const moe_net *b, const char *net) {
    size_t i;
    CHECK(a->d_in == b->d_in && a->d_out == b->d_out && a->n_modules == b->n_modules && a->built == b->built &&
              a->trainable == b->trainable,
          net);
    CHECK(a->kernels == NULL && a->tensors == NULL && a->n_tensors == 0 && a->memory == NULL && a->memory_size == 0 &&
              a->error.code == MOE_OK,
          net);
    for (i = 0; i < b->n_modules; i++) compare_module(a, b, i, net);
}

/* ---- results ---- */

typedef struct place {
    void *work, *cache_memory, *scratch;
    size_t work_size, cache_size, scratch_size;
    moe_cache cache;
} place;

static void *take(size_t size) {
    void *memory = calloc(size > 0 ? size : 1, 1);
    if (memory == NULL) exit(1);
    return memory;
}

static void compare_choices(const moe_model *model, const moe_net *b, const moe_net_pass *pass, const void *scratch,
                            const char *net) {
    moe_choice choices[64];
    size_t i, j, mixture = 0, count;
    for (i = 0; i < b->n_modules; i++) {
        const moe_routing *r = moe_net_routing(b, pass, i);
        if (r == NULL) continue;
        if (!CHECK(moe_infer_choices(model, mixture++, scratch, choices, 64, &count) == MOE_OK &&
                       count == (size_t)r->n_choices[0],
                   net))
            return;
        for (j = 0; j < count; j++) {
            double off = (double)choices[j].weight / 32768.0 - (double)r->weights[r->choices[j]];
            CHECK(choices[j].expert == r->choices[j] && off < 2e-5 && off > -2e-5, net);
        }
    }
    CHECK(moe_infer_choices(model, mixture, scratch, choices, 64, &count) == MOE_ERR_NOT_FOUND, net);
}

/* TOKENS tokens through the printed model and the network b that it was made of. */
/* Whether what the network says to a token depends on the tokens before it. */
static int is_sequence(const moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_ATTENTION || net->modules[i].kind == MOE_MODULE_POSITIONS ||
            net->modules[i].kind == MOE_MODULE_CONVOLUTION || moei_refines(&net->modules[i]))
            return 1;
    return 0;
}

/* The sizes that were printed, and the memory of both ways to compute. */
static void prepare_place(const moe_model *model, const moe_net *b, const char *net, place *p) {
    const size_t length = model->length;
    size_t size = 0, state = 0;
    memset(p, 0, sizeof *p);
    CHECK((length > 0) == is_sequence(b) && (length == 0 || length == TOKENS), net);
    CHECK(moei_float_size(model->net, length, &size, &state) == MOE_OK && size <= model->scratch_size &&
              state <= model->state_size,
          net);
    /* printed where pointers have 8 bytes */
    CHECK((size == model->scratch_size && state == model->state_size) || sizeof(void *) < 8, net);
    CHECK(model->d_in == (size_t)b->d_in && model->d_out == (size_t)b->d_out && model->version == MOE_MODEL_VERSION,
          net);
    p->scratch_size = model->scratch_size;
    p->scratch = take(p->scratch_size);
    if (length > 0) {
        /* what stays from call to call */
        CHECK(moe_net_decode_size(b, length, 1, &p->cache_size, NULL, NULL) == MOE_OK &&
                  model->state_size >= sizeof(size_t) + p->cache_size,
              net);
        CHECK(moe_net_decode_size(b, length, 1, NULL, &p->work_size, NULL) == MOE_OK, net);
        p->cache_memory = take(p->cache_size);
        CHECK(moe_net_cache_init(&p->cache, b, length, p->cache_memory, p->cache_size, NULL) == MOE_OK, net);
    } else CHECK(moe_net_work_size(b, 1, 0, &p->work_size) == MOE_OK, net);
    p->work = take(p->work_size);
}

static void compare_results(const moe_model *model, const moe_net *b, const char *net) {
    const size_t length = model->length;
    const void *input;
    moe_real x[300], *y = (moe_real *)take((size_t)b->d_out * sizeof *y);
    moe_real *first = (moe_real *)take((size_t)b->d_out * sizeof *y);
    place p;
    moe_call call;
    moe_net_pass pass;
    moe_rng rng;
    size_t t, i;
    prepare_place(model, b, net, &p);
    memset(&call, 0, sizeof call);
    moe_rng_seed(&rng, 5);
    for (t = 0; t < TOKENS; t++) {
        int32_t id = (int32_t)(t * 7 % 20);
        for (i = 0; i < 300; i++) x[i] = moe_rng_normal(&rng);
        input = b->d_in > 0 ? (const void *)x : &id;
        call.n_tokens = 1;
        call.x = b->d_in > 0 ? x : NULL;
        call.token_ids = b->d_in > 0 ? NULL : &id;
        CHECK(moe_infer(model, NULL, input, y, p.scratch, p.scratch_size - 1) == MOE_ERR_SPACE, net);
        if (!CHECK(moe_infer(model, NULL, input, y, p.scratch, p.scratch_size) == MOE_OK, net)) break;
        if (length > 0) CHECK(moe_net_decode(b, &p.cache, &call, p.work, p.work_size, &pass) == MOE_OK, net);
        else CHECK(moe_net_forward(b, &call, p.work, p.work_size, &pass) == MOE_OK, net);
        CHECK(memcmp(y, pass.y, (size_t)b->d_out * sizeof *y) == 0, net);
        CHECK(b->n_modules == 1 || moe_is_finite(y[0]), net);
        compare_choices(model, b, &pass, p.scratch, net);
        if (t == 0) memcpy(first, y, (size_t)b->d_out * sizeof *y);
        /* the input reaches the output */
        if (t == 3 && b->n_modules > 1) CHECK(memcmp(first, y, (size_t)b->d_out * sizeof *y) != 0, net);
    }
    if (length > 0) { /* full; then a new sequence */
        int32_t id = 0;
        moe_rng_seed(&rng, 5);
        for (i = 0; i < 300; i++) x[i] = moe_rng_normal(&rng);
        input = b->d_in > 0 ? (const void *)x : &id;
        CHECK(moe_infer(model, NULL, input, y, p.scratch, p.scratch_size) == MOE_ERR_STATE, net);
        begin_sequence(p.scratch, p.scratch_size);
        CHECK(moe_infer(model, NULL, input, y, p.scratch, p.scratch_size) == MOE_OK, net);
        CHECK(memcmp(first, y, (size_t)b->d_out * sizeof *y) == 0, net);
    }
    free(y);
    free(first);
    free(p.work);
    free(p.cache_memory);
    free(p.scratch);
}

#ifndef MOE_NO_TRAIN
/* The model in memory, of a network with the best kernels, gives the bits of the printed one. */
static void compare_memory(const moe_model *model, const moe_net *b, const char *net) {
    moe_built_model built;
    moe_model_config config;
    const moe_real *x = (const moe_real *)take(300 * sizeof *x); /* a row of zeros, or the token 0 */
    moe_real *y = (moe_real *)take(2 * model->d_out * sizeof *y);
    void *scratch = take(model->scratch_size);
    memset(&config, 0, sizeof config);
    config.length = TOKENS;
    config.same_bits = 1;
    if (!CHECK(moe_model_create(&built, b, &config, NULL) == MOE_OK && built.model.scratch_size == model->scratch_size,
               net))
        return;
    CHECK(built.model.multiplications == model->multiplications && model->multiplications > 0, net);
    CHECK(moe_infer(&built.model, NULL, x, y, scratch, model->scratch_size) == MOE_OK, net);
    memset(scratch, 0, model->scratch_size);
    CHECK(moe_infer(model, NULL, x, y + model->d_out, scratch, model->scratch_size) == MOE_OK, net);
    CHECK(memcmp(y, y + model->d_out, model->d_out * sizeof *y) == 0, net);
    moe_model_free(&built);
    free((void *)x);
    free(y);
    free(scratch);
}
#endif

int main(void) {
    char name[32], about[500];
    size_t i, models = 0;
    for (i = 0; i < MOST; i++) {
        moe_net net;
        int made = make(i, &net, name, about);
        if (made == 0) break;
        if (made < 0) continue;
        if (printed[i] != NULL) {
            test_case(about);
            compare_nets(printed[i]->net, &net, about);
            compare_results(printed[i], &net, about);
#ifndef MOE_NO_TRAIN
            compare_memory(printed[i], &net, about);
#endif
            models++;
        }
        moe_net_free(&net);
    }
    test_case("all nets");
    CHECK(i + 1 == sizeof printed / sizeof *printed, "the list of nets");
    CHECK(models > (MOST > ROWS ? ROWS + 40 : ROWS - 1), "most presets");

    fprintf(stderr, "%d models of %d nets\n", (int)models, (int)i);
    return test_end();
}
#endif
