/* A small program that touches everything, for the rows of tests/port/portability.sh: routers,
   layers forward and backward, networks, decoding, training, files, quantized weights, integer
   models, with every combination of options and as C++. What floating point computes is compared
   with sums that are stored below, what integers compute with one hash for all machines.
       cc -std=c99 -O1 -I. tests/port/portable.c -o portable -lm && ./portable
   "portable sums" (by a double build) prints the table of sums; "portable write FOLDER" (by a full
   build) writes models as headers and what they must answer, for builds with -DPORTABLE_MODELS
   -IFOLDER. Without a hosted C library it is linked with tests/port/devices/bare.c. */

#if !defined(TEST_LINKED) && !defined(MOE_STATIC) && !defined(MOE_IMPLEMENTATION)
#define MOE_IMPLEMENTATION
#endif
#include "moe.h"
#ifndef MOE_CLASSIC_H /* the amalgamated file has them inside */
#include "examples/extras/moe_classic.h"
#endif
#ifndef MOE_EXPORT_H
#include "examples/extras/moe_export.h"
#endif

#ifndef PORTABLE_MAIN
#define PORTABLE_MAIN main
#endif

/* What a build leaves out by masks; a unit without the implementation does not see them. */
#ifndef MOE_KEEP_ACTS
#define MOE_KEEP_ACTS 0xffffffff
#endif
#ifndef MOE_KEEP_SCORES
#define MOE_KEEP_SCORES 0xffffffff
#endif
#ifndef MOE_KEEP_GATES
#define MOE_KEEP_GATES 0xffffffff
#endif
#ifndef MOE_KEEP_SELECTS
#define MOE_KEEP_SELECTS 0xffffffff
#endif
#ifndef MOE_KEEP_WEIGHTS
#define MOE_KEEP_WEIGHTS 0xffffffff
#endif
#ifndef MOE_KEEP_INPUTS
#define MOE_KEEP_INPUTS 0xffffffff
#endif
#ifndef MOE_KEEP_REFINES
#define MOE_KEEP_REFINES 0xffffffff
#endif
#ifndef MOE_KEEP_MODULES
#define MOE_KEEP_MODULES 0xffffffff
#endif
#ifndef MOE_KEEP_EXTRAS
#define MOE_KEEP_EXTRAS 0xffffffff
#endif
#define ALL_KEPT \
    ((MOE_KEEP_ACTS & MOE_KEEP_SCORES & MOE_KEEP_GATES & MOE_KEEP_SELECTS & MOE_KEEP_WEIGHTS & MOE_KEEP_INPUTS & \
      MOE_KEEP_REFINES & MOE_KEEP_MODULES & MOE_KEEP_EXTRAS) == 0xffffffff)
#define KEPT(set, i) (((uint32_t)MOE_KEEP_##set >> (i)&1u) != 0)

#ifdef PORTABLE_MODELS
#include "portable_models.h" /* what "write" wrote: portable_dense, portable_text, PORTABLE_..._HASH, portable_file */
#if !defined(MOE_NO_FLOAT) && ALL_KEPT && !MOE_REAL_IS_DOUBLE
#include "portable_float.h"
#endif
#endif

#if __STDC_HOSTED__
#include <stdio.h>
#include <stdlib.h>

static void say(const char *text) { fputs(text, stdout); }
#ifndef MOE_NO_FLOAT
static void say_real(double value) { printf("%.9g", value); }
#endif
#else
void bare_say(const char *text);
static void say(const char *text) { bare_say(text); }
#ifndef MOE_NO_FLOAT
static void say_real(double value) { bare_say(value < 0 ? "negative" : "some number"); }
#endif
#endif

static void say_count(unsigned long value) {
    char text[24];
    size_t at = sizeof text - 1;
    text[at] = '\0';
    do text[--at] = (char)('0' + value % 10u);
    while ((value /= 10u) > 0);
    say(text + at);
}

/* ---- checks ---- */

static unsigned long passed, failed;
static const char *now_testing = ""; /* the case, for messages */

static int check(int good, int line, const char *what) {
    if (good) passed++;
    else {
        failed++;
        say("portable.c:");
        say_count((unsigned long)line);
        say(": ");
        say(what);
        say(" (");
        say(now_testing);
        say(")\n");
    }
    return good;
}

#define CHECK(condition) check((condition) ? 1 : 0, __LINE__, #condition)

static int check_status(moe_status got, moe_status want, int line, const char *call) {
    if (check(got == want, line, call)) return got == MOE_OK;
    say("    got \"");
    say(moe_status_text(got));
    say("\", not \"");
    say(moe_status_text(want));
    say("\"\n");
    return 0;
}

/* 1 when the call has succeeded, as it should. */
#define CHECK_STATUS(call, want) check_status(call, want, __LINE__, #call)
#define WORKS(call) CHECK_STATUS(call, MOE_OK)

/* ---- numbers: the same on every machine ---- */

static uint32_t lcg;

static uint32_t next_bits(void) { return (lcg = (lcg * 1664525u + 1013904223u) & 0xffffffffu) >> 8; }
static int next_level(int most) { return (int)(next_bits() % (uint32_t)(2 * most + 1)) - most; }

static uint32_t fnv(uint32_t hash, const void *bytes, size_t size) {
    const unsigned char *p = (const unsigned char *)bytes;
    for (; size > 0; size--) hash = ((hash ^ *p++) * 16777619u) & 0xffffffffu;
    return hash;
}

static uint32_t fnv_value(uint32_t hash, uint32_t value) {
    unsigned char bytes[4];
    int i;
    for (i = 0; i < 4; i++) bytes[i] = (unsigned char)(value >> 8 * i & 255u);
    return fnv(hash, bytes, sizeof bytes);
}

enum { HASH_BEGIN = 1811 };

#ifdef MOE_IMPLEMENTATION /* private functions, which a program that is linked with the library does not see */
static void test_integers(void) {
    uint32_t hash = HASH_BEGIN;
    int16_t z[20], index[20];
    int32_t key[20];
    uint16_t e[20];
    int i, round;
    now_testing = "integers";
    lcg = 1;
    for (round = 0; round < 40; round++) {
        for (i = 0; i < 20; i++) {
            z[i] = (int16_t)next_level(32767);
            key[i] = next_level(9);
        }
        hash = fnv_value(hash, moei_int_softmax(20, z, round % 13, e));
        for (i = 0; i < 20; i++) hash = fnv_value(hash, e[i]);
        CHECK(moei_int_top_k(20, key, 7, index) == 7);
        for (i = 0; i < 7; i++) hash = fnv_value(hash, (uint32_t)index[i]);
        hash = fnv_value(hash, moei_int_sqrt(next_bits() * 255u));
        hash = fnv_value(hash, moei_int_exp2(next_bits() >> round % 24, round % 32));
    }
    if (!CHECK(hash == 201648572u)) {
        say("    the hash is ");
        say_count(hash);
        say("\n");
    }
}
#endif

static void test_version(void) {
    now_testing = "version";
    CHECK(moe_version()[0] == '0' && moe_status_text(MOE_ERR_SPACE)[0] == 't');
}

/* ---- models that were written as headers: no floating point, the same bits everywhere ---- */

#if defined(PORTABLE_MODELS) || (!defined(MOE_NO_TRAIN) && !defined(MOE_NO_QUANT))
static unsigned char model_scratch[16384];

/* Outputs and choices of some inputs: levels, or the ids of a sequence. */
static uint32_t model_hash(const moe_model *model) {
    uint32_t hash = HASH_BEGIN;
    size_t i, j, count;
    lcg = 7;
    for (i = 0; i < 32; i++) model_scratch[i] = 0; /* begins a sequence */
    for (i = 0; i < 8; i++) {
        int8_t levels[16];
        int16_t output[32];
        int32_t id = (int32_t)(next_bits() % 11u);
        moe_choice choices[4];
        for (j = 0; j < 16; j++) levels[j] = (int8_t)next_level(127);
        if (!WORKS(moe_infer(model, NULL, model->d_in > 0 ? (const void *)levels : (const void *)&id, output,
                             model_scratch, sizeof model_scratch)))
            return 0;
        for (j = 0; j < model->d_out; j++) hash = fnv_value(hash, (uint32_t)output[j]);
        if (!WORKS(moe_infer_choices(model, 0, model_scratch, choices, 4, &count))) return 0;
        CHECK(count == 2);
        for (j = 0; j < count && j < 4; j++)
            hash = fnv_value(fnv_value(hash, (uint32_t)choices[j].expert), (uint32_t)choices[j].weight);
    }
    return hash;
}
#endif

#ifdef PORTABLE_MODELS
static void test_written_models(void) {
    now_testing = "written models";
    CHECK(model_hash(&portable_dense) == PORTABLE_DENSE_HASH);
    CHECK(model_hash(&portable_text) == PORTABLE_TEXT_HASH);
    CHECK_STATUS(moe_infer(&portable_dense, NULL, "", model_scratch, model_scratch, 1), MOE_ERR_SPACE);
}
#endif

#ifndef MOE_NO_FLOAT
/* ---- memory: everything works in one piece, so that builds without a heap do too ---- */

static union {
    double real;
    void *pointer;
    uint64_t integer;
    unsigned char bytes[6u << 20];
} memory;
static moe_arena arena;
static moe_allocator allocator;

static void memory_clear(void) {
    arena.base = memory.bytes;
    arena.size = sizeof memory.bytes;
    arena.used = 0;
    allocator = moe_arena_allocator(&arena);
}

static void zero(void *to, size_t size) {
    unsigned char *p = (unsigned char *)to;
    while (size-- > 0) *p++ = 0;
}

static void *grab(size_t size) {
    void *block = allocator.resize(allocator.ctx, NULL, 0, size > 0 ? size : 1);
    if (block == NULL) {
        check(0, __LINE__, "enough memory");
        block = memory.bytes; /* which spoils what follows, and the test has failed */
    }
    zero(block, size);
    return block;
}

static moe_real *reals(size_t count) { return (moe_real *)grab(count * sizeof(moe_real)); }

static int same_bytes(const void *a, const void *b, size_t size) {
    const unsigned char *p = (const unsigned char *)a, *q = (const unsigned char *)b;
    while (size > 0 && *p == *q) {
        p++;
        q++;
        size--;
    }
    return size == 0;
}

static int same_text(const char *a, const char *b) {
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

/* Multiples of 1/1024 within +-1: every machine and both number types have the same ones. */
static moe_real next_real(void) { return (moe_real)next_level(1024) / 1024; }

static moe_real *next_reals(size_t count) {
    moe_real *x = reals(count);
    size_t i;
    for (i = 0; i < count; i++) x[i] = next_real();
    return x;
}

/* ---- sums: many numbers at a glance, in double, with the size that tells how much of a difference
   matters ---- */

typedef struct sum {
    double value, size;
    unsigned count;
} sum;

/* Signs and factors change along the sum, so that an exchange of numbers is seen. */
static void sum_add(sum *s, double term) {
    term *= 1 + (s->count % 7u) * 0.25;
    if (s->count++ % 3u == 1) term = -term;
    s->value += term;
    s->size += term < 0 ? -term : term;
}

static void sum_reals(sum *s, size_t n, const moe_real *x) {
    size_t i;
    for (i = 0; i < n; i++) sum_add(s, (double)x[i]);
}

static sum sum_of(size_t n, const moe_real *x) {
    sum s;
    zero(&s, sizeof s);
    sum_reals(&s, n, x);
    return s;
}

typedef struct stored_sum {
    const char *about, *part;
    double value;
} stored_sum;

/* By "portable sums" of a double build. */
static const stored_sum stored[] = {
#include "portable_sums.h"
    {NULL, NULL, 0}};

static int printing;

static double distance(double a, double b) { return a < b ? b - a : a - b; }

/* slack: how many times the usual error. */
static void expect(const char *part, sum s, double slack) {
    const double unit = MOE_REAL_IS_DOUBLE ? 1e-14 : 1e-7;
    const stored_sum *row = stored;
#if __STDC_HOSTED__
    if (printing) printf("    {\"%s\", \"%s\", %.17g},\n", now_testing, part, s.value);
#endif
    if (printing) return;
    while (row->about != NULL && !(same_text(row->about, now_testing) && same_text(row->part, part))) row++;
    if (!check(row->about != NULL && s.size > 0 && distance(s.value, row->value) <= slack * unit * s.size, __LINE__,
               part)) {
        say("    got ");
        say_real(s.value);
        say(", not ");
        say_real(row->value);
        say("; the error may be ");
        say_real(slack * unit * s.size);
        say("\n");
    }
}

/* ---- what masks leave out: what needs it is refused ---- */

static int kept_router(const moe_router_config *c) {
    const int moves = c->k_end != 0 || c->tau_schedule != 0 || c->freeze_at > 0 || c->switch_at > 0 ||
                      c->switch_share > 0 || c->l1_controller;
    const int limits = c->capacity_factor > 0 || c->capacity_factor_eval > 0 || c->drop_capacity > 0 ||
                       c->capacity_bound != MOE_BOUND_NONE || c->drop_rule != MOE_DROP_RULE_NONE ||
                       c->select == MOE_SELECT_EXPERT_CHOICE;
    return KEPT(INPUTS, c->input) && KEPT(SCORES, c->score) && KEPT(GATES, c->gate) && KEPT(REFINES, c->refine) &&
           KEPT(SELECTS, c->select) && KEPT(WEIGHTS, c->weight) &&
           (c->gate != MOE_GATE_SIGMOID || KEPT(ACTS, MOE_ACT_SIGMOID)) &&
           (c->score != MOE_SCORE_MLP || KEPT(ACTS, c->router_act)) && (!moves || KEPT(EXTRAS, MOE_EXTRA_SCHEDULE)) &&
           (!limits || KEPT(EXTRAS, MOE_EXTRA_CAPACITY));
}

static int kept_layer(const moe_layer_config *c) {
    const int any = c->expert == MOE_EXPERT_MLP || c->expert == MOE_EXPERT_GLU, act = any ? c->act : (int)MOE_ACT_SILU;
    const int shaped = c->swiglu_alpha > 0 || c->swiglu_limit > 0 || c->swiglu_offset > 0;
    return kept_router(&c->router) && (c->expert == MOE_EXPERT_LINEAR || KEPT(ACTS, act)) &&
           (c->n_shared == 0 || KEPT(ACTS, MOE_ACT_SILU)) && (!shaped || KEPT(EXTRAS, MOE_EXTRA_SHAPED));
}

static int kept_net(const moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        if (!KEPT(MODULES, m->kind) || (m->kind == MOE_MODULE_ACTIVATION && !KEPT(ACTS, m->act))) return 0;
        if ((m->kind == MOE_MODULE_MIXTURE || m->kind == MOE_MODULE_FEED_FORWARD) && !kept_layer(&m->layer.config))
            return 0;
    }
    return 1;
}

static moe_status wanted(int kept) { return kept ? MOE_OK : MOE_ERR_UNSUPPORTED; }

/* ---- routers ---- */

/* One enumeration: C++20 does not want different ones in one product. */
enum { TOKENS = 12, WIDTH = 16, EXPERTS = 8, VOCABULARY = 11, INPUTS = 8, CLASSES = 4, ROWS = 48, STEPS = 20 };

static void router_tensors(moe_router *r) {
    int i;
    moe_parameter slot;
    for (i = 0; i < MOE_ROUTER_STEP; i++)
        if (moe_router_parameter(&r->config, i, &slot) == MOE_OK) {
            moe_real *t = next_reals(slot.count);
            size_t j;
            for (j = 0; j < slot.count; j++)
                t[j] = slot.init_value + t[j] * (slot.init_std > 0 ? 4 * slot.init_std : (moe_real)0.125);
            r->tensors[i] = t;
        }
    if (moe_router_parameter(&r->config, MOE_ROUTER_TABLE, &slot) == MOE_OK) {
        moe_real *t = reals(slot.count);
        size_t j;
        for (j = 0; j < slot.count; j++) t[j] = (moe_real)(j * 3 % EXPERTS);
        r->tensors[MOE_ROUTER_TABLE] = t;
    }
}

static sum sum_of_plan(const moe_dispatch_plan *plan) {
    sum s;
    size_t e, i;
    zero(&s, sizeof s);
    for (e = 0; e < plan->n_experts; e++)
        for (i = plan->offsets[e]; i < plan->offsets[e + 1]; i++)
            sum_add(&s, ((double)plan->assignments[i].weight_out + (double)plan->assignments[i].weight_in / 2) *
                            (double)(1 + (plan->assignments[i].token * 5 + (int)e) % 11));
    return s;
}

/* Errors have their code in every build, and a message unless it leaves messages out. */
static void test_errors(void) {
    moe_router_config c;
    moe_error error;
    now_testing = "errors";
    zero(&error, sizeof error);
    CHECK_STATUS(moe_router_preset("no preset", &c, &error), MOE_ERR_NOT_FOUND);
    CHECK(error.code == MOE_ERR_NOT_FOUND);
#ifdef MOE_NO_MESSAGES
    CHECK(error.message[0] == '\0');
#else
    CHECK(error.message[0] != '\0');
#endif
}

static void test_metrics(const moe_routing *routing) {
    moe_metrics metrics;
    moe_report report;
    size_t bytes = 0;
    sum s;
    if (!WORKS(moe_metrics_size(EXPERTS, 0, &bytes)) ||
        !WORKS(moe_metrics_init(&metrics, EXPERTS, 0, grab(bytes), bytes)))
        return;
    if (!WORKS(moe_metrics_add(&metrics, routing, NULL, NULL)) || !WORKS(moe_metrics_report(&metrics, &report))) return;
    zero(&s, sizeof s);
    sum_add(&s, report.gate_entropy);
    sum_add(&s, report.usage_entropy);
    sum_add(&s, report.load_cv2);
    sum_add(&s, report.load_entropy);
    expect("metrics", s, 1);
}

static void test_preset(const char *name) {
    moe_router_config c;
    moe_router r;
    moe_call call;
    moe_routing routing;
    moe_error error;
    int32_t ids[TOKENS];
    size_t bytes = 0;
    void *work;
    int i;
    now_testing = name;
    memory_clear();
    lcg = 3;
    if (!WORKS(moe_router_preset(name, &c, &error))) return;
    c.d_model = WIDTH;
    c.n_experts = EXPERTS;
    if (c.groups > 1) {
        c.groups = 4;
        c.groups_kept = 2;
        c.top_k = 3;
    }
    if (c.select == MOE_SELECT_HASH || c.student_dim > 0) c.table_size = 31;
    if (!CHECK_STATUS(moe_router_init(&r, &c, moe_kernels_select(MOE_KERNELS_AUTO), &error), wanted(kept_router(&c))))
        return;
    router_tensors(&r);
    zero(&call, sizeof call);
    for (i = 0; i < TOKENS; i++) ids[i] = i * 7 % 31;
    call.n_tokens = TOKENS;
    call.x = next_reals(TOKENS * WIDTH);
    call.token_ids = ids;
    if (!WORKS(moe_route_size(&r, TOKENS, 0, &bytes))) return;
    work = grab(bytes);
    CHECK_STATUS(moe_route(&r, &call, work, bytes - 1, &routing), MOE_ERR_SPACE);
    if (!WORKS(moe_route(&r, &call, work, bytes, &routing))) return;
    expect("plan", sum_of_plan(&routing.plan), 10);
    if (same_text(name, "smoe")) test_metrics(&routing);
}

/* Defaults that are filled in are defaults when they are checked again, also in 1 / E. */
static void test_checked_again(void) {
    moe_router_config c, checked;
    moe_error error;
    int experts;
    for (experts = 1; experts <= 12; experts++) {
        zero(&c, sizeof c);
        c.d_model = 4;
        c.n_experts = experts;
        if (!kept_router(&c)) continue;
        CHECK_STATUS(moe_router_check(&c, &checked, &error), MOE_OK);
        CHECK_STATUS(moe_router_check(&checked, NULL, &error), MOE_OK);
    }
}

static void test_routers(void) {
    static const char *const presets[] = {
        "smoe",     "switch",          "gshard",        "noisy_topk", "vmoe",    "xmoe",        "similarity_smoe",
        "locmoe",   "importance_gate", "expert_choice", "hash",       "base",    "dselect_k",   "sinkhorn",
        "soft_moe", "top_p",           "dynmoe",        "remoe",      "mixtral", "deepseek_v2", "llama4",
        "gemma4",   "phi35_moe"};
    moe_router_config c;
    moe_error error;
    size_t i;
    for (i = 0; i < sizeof presets / sizeof *presets; i++) test_preset(presets[i]);
    now_testing = "refused router";
    zero(&c, sizeof c);
    CHECK_STATUS(moe_router_check(&c, NULL, &error), MOE_ERR_CONFIG);
    CHECK_STATUS(moe_router_preset("nobody", &c, &error), MOE_ERR_NOT_FOUND);
}

/* ---- layers ---- */

typedef struct layer_row {
    const char *name, *settings;
} layer_row;

static const layer_row layers[] = {
    {"swiglu", "top_k=2 d_ff=24"},
    {"mlp", "expert=mlp act=gelu d_ff=20 select=top_p top_p=0.5 weight=raw"},
    {"linear", "expert=linear score=cosine cosine_dim=8 gate=sigmoid select=threshold threshold=0.5 weight=uniform"},
    {"factorised", "expert=factorised d_low=6 d_ff=16 score=norm norm_node=down"},
    {"shared", "d_ff=12 n_shared=1 d_shared=10 shared_sigmoid=1 add_input=1 weight=raw loss_balance=0.1 loss_z=0.01"},
    {"shaped", "d_ff=20 expert_bias=1 swiglu_alpha=1.702 swiglu_limit=2 swiglu_offset=1"},
    {"narrow", "expert=mlp act=tanh d_ff=12 d_out=5 select=expert_choice apply_to=input"},
    {"soft", "expert=mlp act=silu d_ff=12 select=soft slots=2"},
    {"dense", "expert=linear select=dense score=mlp router_hidden=10 router_act=relu gate=sqrt_softplus weight=sum"}};

static int layer_make(moe_layer *layer, const layer_row *row, int kernels, int trainable) {
    moe_layer_config c;
    moe_error error;
    zero(&c, sizeof c);
    c.router.d_model = WIDTH;
    c.kernels = kernels;
    return WORKS(moe_fields_apply(moe_layer_fields(), &c, row->settings, &error)) &&
           CHECK_STATUS(moe_layer_create(layer, &c, trainable, 11, &allocator, &error), wanted(kept_router(&c.router)));
}

/* y, or NULL where it was refused, as it should or not. */
static moe_real *layer_forward(const moe_layer *layer, moe_call *call, moe_layer_pass *pass) {
    moe_real *y = reals(call->n_tokens * (size_t)layer->config.d_out);
    size_t bytes = 0;
    const int kept = kept_layer(&layer->config) && (!call->training || KEPT(EXTRAS, MOE_EXTRA_TRAINING));
    if (!WORKS(moe_layer_work_size(layer, call->n_tokens, call->training, &bytes))) return NULL;
    return CHECK_STATUS(moe_layer_forward(layer, call, y, grab(bytes), bytes, pass), wanted(kept)) ? y : NULL;
}

static void backwards(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    (void)ctx;
    while (count-- > 0) task(work, count);
}

static void layer_in_pieces(const moe_layer *layer, moe_call *call, const moe_real *y) {
    moe_parallel parallel;
    const moe_real *again;
    zero(&parallel, sizeof parallel);
    parallel.threads = 3;
    parallel.always = 1;
    parallel.run = backwards;
    call->parallel = &parallel;
    again = layer_forward(layer, call, NULL);
    CHECK(again != NULL && same_bytes(again, y, call->n_tokens * (size_t)layer->config.d_out * sizeof *y));
    call->parallel = NULL;
}

#ifndef MOE_NO_TRAIN
static void layer_backward(const moe_layer *layer, moe_call *call, const moe_real *y) {
    const size_t n = call->n_tokens * (size_t)layer->config.d_out;
    moe_layer_pass pass;
    moe_real *dx = reals(TOKENS * WIDTH), *dy = next_reals(n);
    const moe_real *again;
    moe_tensor tensor;
    size_t i;
    sum s;
    call->training = 1;
    again = layer_forward(layer, call, &pass);
    if (again == NULL) return;
    CHECK(same_bytes(again, y, n * sizeof *y));
    if (!WORKS(moe_layer_backward(layer, dy, dx, NULL, &pass))) return;
    expect("dx", sum_of(TOKENS * WIDTH, dx), 20);
    zero(&s, sizeof s);
    for (i = 0; moe_layer_tensor(layer, i, &tensor) == MOE_OK; i++)
        if (tensor.gradient != NULL) sum_reals(&s, tensor.count, tensor.gradient);
    expect("gradients", s, 20);
    call->training = 0;
}

static int layer_same(const moe_layer *a, const moe_layer *b) {
    moe_tensor p, q;
    size_t i;
    for (i = 0; moe_layer_tensor(a, i, &p) == MOE_OK; i++)
        if (moe_layer_tensor(b, i, &q) != MOE_OK || p.count != q.count ||
            !same_bytes(p.data, q.data, p.count * sizeof *p.data))
            return 0;
    return i > 0;
}

static void layer_saved(const moe_layer *layer) {
    moe_buffer buffer;
    moe_stream stream;
    moe_layer copy;
    moe_error error;
    zero(&buffer, sizeof buffer);
    buffer.allocator = allocator;
    stream = moe_buffer_stream(&buffer);
    if (!WORKS(moe_layer_write(layer, &stream, &error))) return;
    if (WORKS(moe_layer_read(&copy, buffer.data, buffer.size, 0, MOE_KERNELS_AUTO, &allocator, &error)))
        CHECK(layer_same(layer, &copy));
    CHECK(moe_layer_read(&copy, buffer.data, buffer.size - 1, 0, MOE_KERNELS_AUTO, &allocator, &error) != MOE_OK);
}
#endif

static void test_layer(const layer_row *row, int kernels) {
    moe_layer layer;
    moe_call call;
    moe_real *y;
    now_testing = row->name;
    memory_clear();
    lcg = 5;
    zero(&call, sizeof call);
    call.n_tokens = TOKENS;
    call.x = next_reals(TOKENS * WIDTH);
#ifdef MOE_NO_TRAIN
    if (!layer_make(&layer, row, kernels, 0)) return;
#else
    if (!layer_make(&layer, row, kernels, 1)) return;
#endif
    y = layer_forward(&layer, &call, NULL);
    if (y == NULL) return;
    expect("y", sum_of(TOKENS * (size_t)layer.config.d_out, y), 10);
    layer_in_pieces(&layer, &call, y);
#ifndef MOE_NO_TRAIN
    layer_backward(&layer, &call, y);
    layer_saved(&layer);
#endif
}

/* All layers with the best kernels; some with each of the others. */
static void test_layers(void) {
    size_t i;
    int kernels;
    for (i = 0; i < sizeof layers / sizeof *layers; i++) test_layer(&layers[i], MOE_KERNELS_AUTO);
    if (printing) return;
    say("tables");
    for (kernels = 1; kernels < MOE_KERNELS_COUNT; kernels++)
        if (moe_kernels_select(kernels) != NULL) {
            say(" ");
            say(moe_kernels_select(kernels)->name);
#if defined(MOE_IMPLEMENTATION) && defined(MOEI_HAVE_AVX2)
            if (moe_kernels_select(kernels)->streamed == moei_panels_stream_avx2) say("-one-stream");
#endif
            for (i = 0; i < 3; i++) test_layer(&layers[i], kernels);
        }
    say("\n");
}

/* ---- packed and quantized weights ---- */

static double relative_error(size_t n, const moe_real *got, const moe_real *want) {
    double off = 0, all = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        off += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
        all += (double)want[i] * (double)want[i];
    }
    return all > 0 ? off / all : 1; /* squares: no sqrt where there is no libm */
}

static void test_type(moe_layer *layer, moe_call *call, const moe_real *y, int type) {
    static const double most[MOE_TYPE_COUNT] = {0, 1e-3, 1e-2, 0.03, 0.03, 0.25};
    const size_t n = TOKENS * WIDTH, mark = arena.used;
    size_t bytes = 0, work = 0;
    moe_quant_error errors[EXPERTS];
    moe_error error;
    const moe_real *packed;
    const void *room;
#ifdef MOE_NO_QUANT
    if (type >= MOE_TYPE_Q8) {
        CHECK_STATUS(moe_layer_pack_size(layer, type, 0, &bytes, NULL), MOE_ERR_UNSUPPORTED);
        return;
    }
#endif
    if (!WORKS(moe_layer_pack_size(layer, type, 0, &bytes, NULL)) ||
        !WORKS(moe_layer_pack_size(layer, type, TOKENS, NULL, &work)))
        return;
    room = grab(work);
    if (!WORKS(moe_layer_quantize(layer, type, grab(bytes), bytes, call, (void *)(size_t)room, work, errors, &error)))
        return;
    packed = layer_forward(layer, call, NULL);
    if (packed != NULL) {
        const double off = relative_error(n, packed, y);
        if (type == MOE_TYPE_REAL) CHECK(same_bytes(packed, y, n * sizeof *y));
        else CHECK(off > 0 && off <= most[type] * most[type]);
        CHECK((double)errors[0].output <= 2 * most[type]);
    }
    layer->is_packed = 0;
    arena.used = mark;
}

static void test_packed(void) {
    static const layer_row row = {"packed", "top_k=2 d_ff=40"};
    moe_layer layer;
    moe_call call;
    const moe_real *y;
    int type;
    now_testing = row.name;
    memory_clear();
    lcg = 6;
    zero(&call, sizeof call);
    call.n_tokens = TOKENS;
    call.x = next_reals(TOKENS * WIDTH);
    if (!layer_make(&layer, &row, MOE_KERNELS_AUTO, 0)) return;
    y = layer_forward(&layer, &call, NULL);
    if (y == NULL) return;
    for (type = 0; type < MOE_TYPE_COUNT; type++) test_type(&layer, &call, y, type);
}

/* ---- networks ---- */

/* Tensors of exact numbers: files and integer models are then the same everywhere. Biases and gains
   stay 0 and 1. */
static void net_fill(moe_net *net) {
    size_t i, j;
    lcg = 9;
    for (i = 0; i < net->n_tensors; i++)
        for (j = 0; net->tensors[i].n_dims > 1 && j < net->tensors[i].count; j++)
            net->tensors[i].data[j] = next_real() / 2;
}

/* A small language model. */
static int net_of_text(moe_net *net, int trainable) {
    moe_layer_config mixture;
    moe_attention_config attention;
    moe_error error;
    zero(&mixture, sizeof mixture);
    zero(&attention, sizeof attention);
    mixture.d_ff = 12;
    mixture.router.n_experts = 4;
    attention.heads = 2;
    attention.rotary = 1;
    moe_net_init(net, 0, MOE_KERNELS_AUTO, &allocator);
    moe_net_embedding(net, VOCABULARY, WIDTH);
    moe_net_positions(net, TOKENS);
    moe_net_rms_norm(net);
    moe_net_attention(net, &attention);
    moe_net_residual(net, 2);
    moe_net_rms_norm(net);
    moe_net_mixture(net, &mixture);
    moe_net_residual(net, 2);
    moe_net_layer_norm(net);
    moe_net_feed_forward(net, NULL);
    moe_net_tied(net);
    if (!WORKS(moe_net_build(net, trainable, 21, &error))) return 0;
    net_fill(net);
    return 1;
}

/* The output of all tokens at once, or NULL. */
static const moe_real *net_forward(const moe_net *net, const moe_call *call) {
    moe_net_pass pass;
    size_t bytes = 0;
    if (!WORKS(moe_net_work_size(net, call->n_tokens, 0, &bytes))) return NULL;
    return CHECK_STATUS(moe_net_forward(net, call, grab(bytes), bytes, &pass), wanted(kept_net(net))) ? pass.y : NULL;
}

static void ids_of_text(int32_t *ids) {
    int i;
    for (i = 0; i < TOKENS; i++) ids[i] = (i * i + 3 * i) % VOCABULARY;
}

/* Token by token: the same numbers, and the same bits where arithmetic has one precision. */
static void net_decodes(const moe_net *net, const int32_t *ids, const moe_real *y) {
    moe_cache cache;
    moe_call call;
    moe_net_pass pass;
    moe_error error;
    size_t bytes = 0, work = 0, i;
    double off = 0, most = 0;
    void *room;
    if (!WORKS(moe_net_decode_size(net, 1, 1, NULL, NULL, &error)) ||
        !WORKS(moe_net_decode_size(net, TOKENS, 1, &bytes, NULL, NULL)))
        return;
    if (!WORKS(moe_net_cache_init(&cache, net, TOKENS, grab(bytes), bytes, &error)) ||
        !WORKS(moe_net_decode_size(net, TOKENS, 1, NULL, &work, NULL)))
        return;
    room = grab(work);
    zero(&call, sizeof call);
    call.n_tokens = 1;
    for (i = 0; i < TOKENS; i++) {
        size_t j;
        call.token_ids = ids + i;
        if (!WORKS(moe_net_decode(net, &cache, &call, room, work, &pass))) return;
        for (j = 0; j < VOCABULARY; j++) {
            const double here = (double)y[i * VOCABULARY + j], difference = distance((double)pass.y[j], here);
            if (difference > off) off = difference;
            if (distance(here, 0) > most) most = distance(here, 0);
        }
    }
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ == 0
    CHECK(off <= 0);
#else
    CHECK(off <= most * (MOE_REAL_IS_DOUBLE ? 1e-11 : 1e-5));
#endif
    CHECK_STATUS(moe_net_decode(net, &cache, &call, room, work, &pass), MOE_ERR_SPACE);
}

static void net_samples(const moe_real *y) {
    moe_sampling how;
    moe_error error;
    moe_real p[VOCABULARY];
    int32_t order[VOCABULARY], token = -1, best = 0, i;
    for (i = 1; i < VOCABULARY; i++)
        if (y[i] > y[best]) best = i;
    zero(&how, sizeof how);
    how.greedy = 1;
    if (WORKS(moe_sample(&how, VOCABULARY, y, NULL, p, order, &token, &error)))
        CHECK(token == best && p[best] > (moe_real)0.99);
}

/* The whole network packed. */
static void net_packs(moe_net *net, const moe_call *call, const moe_real *y) {
    const size_t mark = arena.used;
    moe_error error;
    int type;
    for (type = 0; type < MOE_TYPE_COUNT; type++, arena.used = mark) {
        const moe_real *packed;
        size_t bytes = 0;
#ifdef MOE_NO_QUANT
        if (type >= MOE_TYPE_Q8) {
            CHECK_STATUS(moe_net_pack_size(net, type, 0, &bytes, NULL), MOE_ERR_UNSUPPORTED);
            continue;
        }
#endif
        if (!WORKS(moe_net_pack_size(net, type, 0, &bytes, NULL)) ||
            !WORKS(moe_net_pack(net, type, grab(bytes), bytes, &error)))
            return;
        packed = net_forward(net, call);
        if (packed == NULL) continue;
        if (type == MOE_TYPE_REAL) CHECK(same_bytes(packed, y, TOKENS * VOCABULARY * sizeof *y));
        else CHECK(relative_error(TOKENS * VOCABULARY, packed, y) <= (type < MOE_TYPE_Q8 ? 1e-4 : 0.1));
        net_decodes(net, call->token_ids, packed);
    }
}

static void test_text(void) {
    size_t i;
    moe_net net;
    moe_tensor found;
    moe_call call;
    int32_t ids[TOKENS];
    const moe_real *y;
    now_testing = "text";
    memory_clear();
    if (!net_of_text(&net, 0)) return;
    CHECK(moe_net_find(&net, "6.router.weight", &found) == MOE_OK &&
          moe_net_find(&net, "6.router.weigh", &found) == MOE_ERR_NOT_FOUND);
    ids_of_text(ids);
    zero(&call, sizeof call);
    call.n_tokens = TOKENS;
    call.token_ids = ids;
    y = net_forward(&net, &call);
    if (y == NULL) return;
    expect("y", sum_of(TOKENS * VOCABULARY, y), 20);
    net_decodes(&net, ids, y);
    net_samples(y);
    net_packs(&net, &call, y);
    for (i = 0; i < net.n_modules; i++) net.modules[i].layer.is_packed = 0;
}

#ifdef PORTABLE_MODELS
/* A file that another build has written. */
static void test_file(void) {
    moe_net net, again;
    moe_call call;
    moe_error error;
    int32_t ids[TOKENS];
    const moe_real *y;
    now_testing = "text"; /* the same sums */
    memory_clear();
    if (!WORKS(moe_net_read(&net, portable_file, sizeof portable_file, 0, MOE_KERNELS_AUTO, &allocator, &error)))
        return;
    CHECK_STATUS(moe_net_read(&again, portable_file, sizeof portable_file / 2, 0, MOE_KERNELS_AUTO, &allocator, &error),
                 MOE_ERR_FORMAT);
    ids_of_text(ids);
    zero(&call, sizeof call);
    call.n_tokens = TOKENS;
    call.token_ids = ids;
    y = net_forward(&net, &call);
    if (y != NULL) expect("y", sum_of(TOKENS * VOCABULARY, y), 20);
#ifndef MOE_NO_STDIO
    {
        FILE *f = fopen("portable.tmp", "wb");
        const int written = f != NULL && fwrite(portable_file, 1, sizeof portable_file, f) == sizeof portable_file;
        if (CHECK(f != NULL && fclose(f) == 0 && written) &&
            WORKS(moe_net_load(&again, "portable.tmp", 0, MOE_KERNELS_AUTO, &allocator, &error)))
            CHECK(again.n_tensors == net.n_tensors &&
                  same_bytes(again.tensors[0].data, net.tensors[0].data, net.tensors[0].count * sizeof(moe_real)));
        remove("portable.tmp");
        CHECK_STATUS(moe_net_load(&again, "portable.tmp", 0, MOE_KERNELS_AUTO, &allocator, &error), MOE_ERR_IO);
    }
#endif
}

#if ALL_KEPT && !MOE_REAL_IS_DOUBLE
static void test_written_float_model(void) {
    moe_real output[CLASSES];
    sum s;
    int i;
    now_testing = "written float model";
    memory_clear();
    lcg = 13;
    zero(&s, sizeof s);
    for (i = 0; i < 8; i++) {
        const moe_real *x = next_reals(INPUTS);
        if (!WORKS(moe_infer(&portable_float, NULL, x, output, model_scratch, sizeof model_scratch))) return;
        sum_reals(&s, CLASSES, output);
    }
    CHECK(distance(s.value, PORTABLE_FLOAT_SUM) <= 1e-6 * s.size);
}
#endif
#endif

/* Without an allocator objects live on the heap, where there is one. */
static void test_heap(void) {
    moe_layer_config c;
    moe_layer layer;
    moe_error error;
    now_testing = "heap";
    zero(&c, sizeof c);
    c.router.d_model = 4;
#ifdef MOE_NO_MALLOC
    CHECK_STATUS(moe_layer_create(&layer, &c, 0, 1, NULL, &error),
                 kept_router(&c.router) ? MOE_ERR_ARGUMENT : MOE_ERR_UNSUPPORTED);
#else
    if (CHECK_STATUS(moe_layer_create(&layer, &c, 0, 1, NULL, &error), wanted(kept_router(&c.router))))
        moe_layer_free(&layer);
#endif
}

#ifndef MOE_NO_TRAIN
/* ---- training ---- */

/* A small classifier. */
static int net_of_classes(moe_net *net, int trainable) {
    moe_layer_config mixture;
    moe_error error;
    zero(&mixture, sizeof mixture);
    mixture.expert = MOE_EXPERT_MLP;
    mixture.d_ff = 12;
    mixture.router.n_experts = 4;
    moe_net_init(net, INPUTS, MOE_KERNELS_AUTO, &allocator);
    moe_net_linear(net, WIDTH);
    moe_net_activation(net, MOE_ACT_GELU);
    moe_net_mixture(net, &mixture);
    moe_net_residual(net, 1);
    moe_net_linear(net, CLASSES);
    return WORKS(moe_net_build(net, trainable, 22, &error));
}

typedef struct samples {
    moe_data data;
    moe_real *x;
    int32_t *labels;
} samples;

static samples make_samples(void) {
    samples s;
    int i;
    zero(&s, sizeof s);
    lcg = 17;
    s.x = next_reals(ROWS * INPUTS);
    s.labels = (int32_t *)grab(ROWS * sizeof *s.labels);
    for (i = 0; i < ROWS; i++)
        s.labels[i] = (s.x[i * INPUTS] > s.x[i * INPUTS + 1] ? 1 : 0) + (s.x[i * INPUTS + 2] > 0 ? 2 : 0);
    s.data.n = ROWS;
    s.data.x = s.x;
    s.data.labels = s.labels;
    return s;
}

/* Trains a classifier and leaves it in *net; losses [STEPS]. */
static int train(moe_net *net, moe_trainer *trainer, const samples *all, moe_real *losses) {
    moe_train_config config;
    moe_error error;
    moe_step step;
    int i;
    zero(&config, sizeof config);
    zero(&step, sizeof step);
    config.batch = ROWS;
    config.rate = (moe_real)0.01;
    config.clip = 1;
    config.seed = 4;
    if (!net_of_classes(net, 1) || !WORKS(moe_trainer_init(trainer, net, &config, &error))) return 0;
    for (i = 0; i < STEPS; i++) {
        if (!CHECK_STATUS(moe_trainer_step(trainer, &all->data, &step, &error),
                          wanted(kept_net(net) && KEPT(EXTRAS, MOE_EXTRA_TRAINING))))
            return 0;
        losses[i] = step.loss;
    }
    return 1;
}

static int same_nets(const moe_net *a, const moe_net *b) {
    size_t i;
    for (i = 0; i < a->n_tensors; i++)
        if (!same_bytes(a->tensors[i].data, b->tensors[i].data, a->tensors[i].count * sizeof(moe_real))) return 0;
    return i == b->n_tensors && i > 0;
}

/* A checkpoint, read by another trainer of the same kind: both go on to the same bits. */
static void goes_on(moe_trainer *trainer, moe_trainer *other, const samples *all) {
    moe_buffer buffer;
    moe_stream stream;
    moe_error error;
    zero(&buffer, sizeof buffer);
    buffer.allocator = allocator;
    stream = moe_buffer_stream(&buffer);
    if (!WORKS(moe_trainer_write(trainer, &stream, &error)) ||
        !WORKS(moe_trainer_step(other, &all->data, NULL, &error)))
        return;
    CHECK(!same_nets(trainer->net, other->net));
    if (!WORKS(moe_trainer_read(other, buffer.data, buffer.size, &error))) return;
    CHECK(same_nets(trainer->net, other->net));
    if (WORKS(moe_trainer_step(trainer, &all->data, NULL, &error)) &&
        WORKS(moe_trainer_step(other, &all->data, NULL, &error)))
        CHECK(same_nets(trainer->net, other->net));
}

static void test_training(void) {
    moe_net net, again;
    moe_trainer trainer, other;
    samples all;
    moe_real losses[STEPS], second[STEPS];
    moe_evaluation before, after;
    moe_train_config config;
    moe_error error;
    now_testing = "training";
    memory_clear();
    all = make_samples();
    if (!train(&net, &trainer, &all, losses) || !train(&again, &other, &all, second)) return;
    expect("losses", sum_of(STEPS, losses), 2000); /* steps multiply what rounding does */
    CHECK(losses[STEPS - 1] < losses[0] * (moe_real)0.8);
    CHECK(same_bytes(losses, second, sizeof losses) && same_nets(&net, &again));
    goes_on(&trainer, &other, &all);
    zero(&config, sizeof config);
    config.epochs = 2;
    config.batch = 16;
    if (!WORKS(moe_evaluate(&net, &all.data, MOE_CRITERION_CROSS_ENTROPY, &before, &error)) ||
        !WORKS(moe_fit(&net, &all.data, NULL, &config, &error)) ||
        !WORKS(moe_evaluate(&net, &all.data, MOE_CRITERION_CROSS_ENTROPY, &after, &error)))
        return;
    CHECK(after.n == ROWS && after.loss < before.loss && after.accuracy > (moe_real)0.5);
    moe_trainer_free(&trainer);
    moe_trainer_free(&other);
    moe_net_free(&net);
    moe_net_free(&again);
}

/* Stochastic stages: the same seed, the same bits. */
static void test_random(void) {
    static const layer_row row = {
        "random", "noise=gaussian noise_sigma=0.5 input=jitter jitter_eps=0.1 d_ff=8 bias_rate=0.01 selection_bias=1"};
    moe_layer layer;
    moe_call call;
    const moe_real *y[3];
    int i;
    now_testing = row.name;
    memory_clear();
    lcg = 19;
    zero(&call, sizeof call);
    call.n_tokens = TOKENS;
    call.x = next_reals(TOKENS * WIDTH);
    call.training = 1;
    if (!layer_make(&layer, &row, MOE_KERNELS_AUTO, 1)) return;
    for (i = 0; i < 3; i++) {
        moe_rng rng;
        moe_layer_pass pass;
        moe_rng_seed(&rng, i < 2 ? 5 : 6);
        call.rng = &rng;
        y[i] = layer_forward(&layer, &call, &pass);
        if (y[i] == NULL) return;
        CHECK(rng.state != 5);
        if (i == 2 && WORKS(moe_layer_observe(&layer, &pass))) WORKS(moe_layer_advance(&layer));
    }
    CHECK(same_bytes(y[0], y[1], TOKENS * WIDTH * sizeof(moe_real)) &&
          !same_bytes(y[0], y[2], TOKENS * WIDTH * sizeof(moe_real)));
}

/* ---- files ---- */

static void test_saved(void) {
    moe_net net, copy;
    moe_buffer buffer;
    moe_stream stream;
    moe_error error;
    now_testing = "saved";
    zero(&copy, sizeof copy);
    memory_clear();
    zero(&buffer, sizeof buffer);
    buffer.allocator = allocator;
    stream = moe_buffer_stream(&buffer);
    if (!net_of_text(&net, 0) || !WORKS(moe_net_write(&net, &stream, &error))) return;
    if (WORKS(moe_net_read(&copy, buffer.data, buffer.size, 0, MOE_KERNELS_AUTO, &allocator, &error)))
        CHECK(same_nets(&net, &copy));
#if defined(PORTABLE_MODELS) && !MOE_REAL_IS_DOUBLE
    CHECK(buffer.size == sizeof portable_file && same_bytes(buffer.data, portable_file, buffer.size));
#endif
#ifndef MOE_NO_STDIO
    /* over the first */
    if (WORKS(moe_net_save(&copy, "portable.tmp", &error)) && WORKS(moe_net_save(&net, "portable.tmp", &error)) &&
        WORKS(moe_net_load(&copy, "portable.tmp", 0, MOE_KERNELS_AUTO, &allocator, &error)))
        CHECK(same_nets(&net, &copy));
    CHECK(remove("portable.tmp") == 0);
    CHECK_STATUS(moe_net_save(&net, "no such folder/portable.tmp", &error), MOE_ERR_IO);
#endif
}

/* ---- the classical mixture ---- */

static void test_classical(void) {
    moe_hme_config config;
    moe_hme hme;
    moe_data data;
    moe_error error;
    moe_real *targets;
    double *h, likelihood = 0, before = -1e30;
    sum s;
    int i;
    now_testing = "classical";
    memory_clear();
    lcg = 23;
    zero(&config, sizeof config);
    zero(&data, sizeof data);
    zero(&s, sizeof s);
    config.d_in = 3;
    config.d_out = 2;
    data.n = 24;
    data.x = next_reals(24 * 3);
    data.targets = targets = reals(24 * 2);
    for (i = 0; i < 24 * 2; i++)
        targets[i] = data.x[i / 2 * 3 + i % 2] > 0 ? data.x[i / 2 * 3 + 2] : (moe_real)0.5 - data.x[i / 2 * 3];
    h = (double *)grab(24 * 4 * sizeof *h);
    if (!WORKS(moe_hme_create(&hme, &config, 3, &allocator, &error))) return;
    for (i = 0; i < 3; i++) {
        if (!WORKS(moe_hme_em(&hme, &data, h, &likelihood, &error))) return;
        CHECK(likelihood >= before);
        sum_add(&s, before = likelihood);
    }
    expect("likelihood", s, 100);
    moe_hme_free(&hme);
}

/* ---- models for small machines ---- */

#ifdef MOE_NO_QUANT
enum { HAS_QUANT = 0 };
#else
enum { HAS_QUANT = 1 };
#endif

static moe_status make_model(moe_built_model *built, const moe_net *net, int weights, const moe_data *calibration) {
    moe_model_config config;
    moe_error error;
    moe_status status;
    zero(&config, sizeof config);
    zero(built, sizeof *built);
    config.weights = weights;
    config.calibration = calibration;
    config.allocator = allocator;
    config.length = TOKENS;
    status = moe_model_create(built, net, &config, &error);
    if (status != MOE_OK && status != MOE_ERR_UNSUPPORTED) {
        say(error.message);
        say("\n");
    }
    return status;
}

/* A classifier of exact numbers as a model, against the network. */
static void test_model(int weights, double most) {
    moe_net net;
    moe_built_model built;
    moe_call call;
    samples all;
    const moe_real *y;
    moe_real *got;
    int8_t levels[INPUTS];
    int16_t output[CLASSES];
    void *scratch;
    int i, j, other = 0;
    memory_clear();
    all = make_samples();
    if (!net_of_classes(&net, 0)) return;
    net_fill(&net);
    zero(&call, sizeof call);
    call.n_tokens = ROWS;
    call.x = all.x;
    y = net_forward(&net, &call);
    if (y == NULL) return;
    if (weights == MOE_WEIGHTS_FLOAT ? MOE_REAL_IS_DOUBLE : !HAS_QUANT) {
        CHECK_STATUS(make_model(&built, &net, weights, &all.data), MOE_ERR_UNSUPPORTED);
        return;
    }
    if (!WORKS(make_model(&built, &net, weights, &all.data))) return;
    got = reals(ROWS * CLASSES);
    scratch = grab(built.model.scratch_size);
    for (i = 0; i < ROWS; i++) {
        moe_infer_levels(&built.model, all.x + i * INPUTS, levels);
        if (!WORKS(moe_infer(&built.model, NULL,
                             weights == MOE_WEIGHTS_FLOAT ? (const void *)(all.x + i * INPUTS) : (const void *)levels,
                             weights == MOE_WEIGHTS_FLOAT ? (void *)(got + i * CLASSES) : (void *)output, scratch,
                             built.model.scratch_size)))
            return;
        for (j = 0; weights != MOE_WEIGHTS_FLOAT && j < CLASSES; j++)
            got[i * CLASSES + j] = (moe_real)output[j] * (moe_real)built.model.output_scale;
    }
    for (i = 0; i < ROWS; i++) other += relative_error(CLASSES, got + i * CLASSES, y + i * CLASSES) > most * most;
    CHECK(other <= ROWS / 12); /* near a tie of two experts another one may be chosen */
    moe_model_free(&built);
}

static void test_models(void) {
    now_testing = "float model";
    test_model(MOE_WEIGHTS_FLOAT, 1e-5);
    now_testing = "int8 model";
    test_model(MOE_WEIGHTS_INT8, 0.1);
    now_testing = "int4 model";
    test_model(MOE_WEIGHTS_INT4, 0.5);
}

/* ---- writing what other builds are compared with ---- */

#if __STDC_HOSTED__ && !defined(MOE_NO_QUANT)
static FILE *create(const char *folder, const char *name) {
    char path[1000];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return NULL;
    return fopen(path, "wb");
}

static int write_header(const char *folder, const char *file, const moe_built_model *built, const char *name) {
    FILE *f = create(folder, file);
    moe_buffer buffer;
    moe_stream stream;
    moe_error error;
    int written;
    zero(&buffer, sizeof buffer);
    buffer.allocator = allocator;
    stream = moe_buffer_stream(&buffer);
    if (!WORKS(moe_export_c(built, name, &stream, &error)) || !CHECK(f != NULL)) return 0;
    written = fwrite(buffer.data, 1, buffer.size, f) == buffer.size;
    return CHECK(fclose(f) == 0 && written);
}

/* The bytes of a network's file, as an array. */
static int write_bytes(FILE *f, const moe_net *net) {
    moe_buffer buffer;
    moe_stream stream;
    moe_error error;
    size_t i;
    zero(&buffer, sizeof buffer);
    buffer.allocator = allocator;
    stream = moe_buffer_stream(&buffer);
    if (!WORKS(moe_net_write(net, &stream, &error))) return 0;
    fprintf(f, "static const unsigned char portable_file[] = {");
    for (i = 0; i < buffer.size; i++) fprintf(f, "%s%d", i % 32 > 0 ? "," : i > 0 ? ",\n" : "\n", (int)buffer.data[i]);
    fprintf(f, "};\n");
    return 1;
}

static int write_all(const char *folder) {
    moe_net text, classes;
    moe_built_model dense, ids, plain;
    moe_data data;
    samples all;
    int32_t tokens[TOKENS];
    double total = 0;
    FILE *f = create(folder, "portable_models.h");
    sum s;
    int i;
    now_testing = "writing";
    memory_clear();
    all = make_samples();
    ids_of_text(tokens);
    zero(&data, sizeof data);
    zero(&s, sizeof s);
    data.n = data.length = TOKENS;
    data.token_ids = tokens;
    if (!CHECK(f != NULL) || !net_of_text(&text, 0) || !net_of_classes(&classes, 0)) return 1;
    net_fill(&classes);
    if (!WORKS(make_model(&dense, &classes, MOE_WEIGHTS_INT8, &all.data)) ||
        !WORKS(make_model(&ids, &text, MOE_WEIGHTS_INT4, &data)) ||
        !WORKS(make_model(&plain, &classes, MOE_WEIGHTS_FLOAT, NULL)))
        return 1;
    if (!write_header(folder, "portable_dense.h", &dense, "portable_dense") ||
        !write_header(folder, "portable_text.h", &ids, "portable_text") ||
        !write_header(folder, "portable_float.h", &plain, "portable_float"))
        return 1;
    lcg = 13;
    for (i = 0; i < 8; i++) {
        moe_real output[CLASSES];
        const moe_real *x = next_reals(INPUTS);
        if (!WORKS(moe_infer(&plain.model, NULL, x, output, model_scratch, sizeof model_scratch))) return 1;
        sum_reals(&s, CLASSES, output);
    }
    total = s.value;
    fprintf(f,
            "#include \"portable_dense.h\"\n#include \"portable_text.h\"\n#define PORTABLE_DENSE_HASH %luu\n#define "
            "PORTABLE_TEXT_HASH %luu\n#define PORTABLE_FLOAT_SUM %.9g\n",
            (unsigned long)model_hash(&dense.model), (unsigned long)model_hash(&ids.model), total);
    fprintf(f, "#ifndef MOE_NO_FLOAT\n");
    if (!write_bytes(f, &text)) return 1;
    fprintf(f, "#endif\n");
    return !CHECK(fclose(f) == 0) || failed > 0;
}
#endif
#endif /* MOE_NO_TRAIN */
#endif /* MOE_NO_FLOAT */

/* ---- all of it ---- */

static int test_all(void) {
#ifdef MOE_IMPLEMENTATION
    test_integers();
#endif
    test_version();
#ifdef PORTABLE_MODELS
    test_written_models();
#endif
#ifndef MOE_NO_FLOAT
    test_errors();
    test_routers();
    test_checked_again();
    test_layers();
    test_packed();
    test_text();
    test_heap();
#ifdef PORTABLE_MODELS
    test_file();
#if ALL_KEPT && !MOE_REAL_IS_DOUBLE
    test_written_float_model();
#endif
#endif
#ifndef MOE_NO_TRAIN
    test_training();
    test_random();
    test_saved();
    test_classical();
    test_models();
#endif
#endif
    if (!passed) failed++;
    say_count(passed);
    say(" passed, ");
    say_count(failed);
    say(" failed\n");
    return failed > 0;
}

#if __STDC_HOSTED__
int PORTABLE_MAIN(int argc, char **argv) {
#ifndef MOE_NO_FLOAT
    printing = argc == 2 && same_text(argv[1], "sums");
    if (printing) return test_all(); /* its last line is no row */
#if !defined(MOE_NO_TRAIN) && !defined(MOE_NO_QUANT)
    if (argc == 3 && same_text(argv[1], "write")) return write_all(argv[2]);
#endif
#endif
    if (argc > 1) {
        fprintf(stderr, "portable: %s: this build does not do that\n", argv[1]);
        return 2;
    }
    return test_all();
}
#else
int bare_main(void);
int bare_main(void) { return test_all(); }
#endif
