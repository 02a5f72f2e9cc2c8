/* left_out.c - a build that keeps a few stages (MOE_KEEP_ macros) and has no heap: what it has
   works, what was left out is refused by name.
     cc -std=c99 -O1 -I. tests/unit/left_out.c -o left_out -lm && ./left_out */

#define MOE_NO_SIMD
#define MOE_NO_MALLOC
#define MOE_KEEP_ACTS 1 /* relu */
#define MOE_KEEP_SCORES 5 /* linear, mlp */
#define MOE_KEEP_GATES 3 /* softmax, sigmoid */
#define MOE_KEEP_SELECTS 0x1042 /* dense, positive, sample */
#define MOE_KEEP_WEIGHTS 5 /* sum, raw */
#define MOE_KEEP_INPUTS 1 /* plain */
#define MOE_KEEP_REFINES 1 /* none */
#define MOE_KEEP_MODULES 11 /* linear, activation, mixture */
#define MOE_KEEP_EXTRAS 4 /* training */
#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

#include <stdio.h>

enum { WIDTH = 8, TOKENS = 3 };

static union {
    moe_real align;
    void *pointer;
    unsigned char bytes[1 << 18];
} memory, work;

static moe_real x[TOKENS * WIDTH], y[TOKENS * WIDTH];
static moe_error error;

/* A router's settings, and the field that a build without them names; NULL: it has all. */
static const struct {
    const char *settings, *field;
} routers[] = {{"select=dense", NULL},
               {"select=sample top_k=1 weight=raw", NULL},
               {"select=dense gate=softmax score=mlp router_act=relu", NULL},
               {"select=dense input=scaled_rms", "input = scaled_rms"},
               {"select=dense score=cosine", "score = cosine"},
               {"select=positive gate=relu weight=raw", "gate = relu"},
               {"select=dense gate=sigmoid", "gate = sigmoid"}, /* its function is an activation */
               {"select=dense refine=similarity", "refine = similarity"},
               {"top_k=2", "select = top_k"},
               {"select=sample top_k=1 weight=raw switch_at=3", "switch_from = top_k"},
               {"select=sample top_k=1 weight=raw student=1 freeze_at=2 loss_distill=1", "student = 1"},
               {"select=dense weight=softmax", "weight = softmax"},
               {"select=dense score=mlp router_act=tanh", "router_act = tanh"},
               {"select=sample weight=raw top_k=2 k_end=1 schedule_steps=5", "k_end = 1"},
               {"select=dense tau_schedule=gate_temperature tau_end=2", "tau_schedule = gate_temperature"},
               {"select=dense student=1 freeze_at=2 loss_distill=1", "student = 1"},
               {"select=dense freeze_at=2", "freeze_at = 2"},
               {"select=sample top_k=1 weight=raw switch_at=3 switch_from=dense", "switch_at = 3"},
               {"select=positive gate=softmax weight=raw l1_controller=1", "l1_controller = layer"},
               {"select=dense capacity_factor=1", "capacity_factor = 1"},
               {"select=dense capacity_factor_eval=1", "capacity_factor"},
               {"select=sample top_k=1 weight=raw drop_capacity=1", "drop_capacity = 1"},
               {"select=dense capacity_bound=first", "capacity_bound"},
               {"select=sample top_k=2 weight=raw drop_rule=gshard", "drop_rule = gshard"}};

static void test_routers(void) {
    size_t i;
    for (i = 0; i < sizeof routers / sizeof *routers; i++) {
        moe_router_config c;
        moe_status status;
        memset(&c, 0, sizeof c);
        c.d_model = WIDTH;
        c.n_experts = 4;
        CHECK(moe_fields_apply(moe_router_fields(), &c, routers[i].settings, &error) == MOE_OK);
        status = moe_router_check(&c, NULL, &error);
        if (!CHECK(routers[i].field == NULL ? status == MOE_OK
                                            : status == MOE_ERR_UNSUPPORTED && strstr(error.message, "MOE_KEEP_") &&
                                                  strstr(error.message, routers[i].field) == error.message))
            printf("    %s: %s: %s\n", routers[i].settings, moe_status_text(status),
                   status == MOE_OK ? "" : error.message);
    }
}

static moe_layer layer_of(const char *settings) {
    moe_layer_config c;
    moe_layer layer;
    moe_arena arena = {memory.bytes, sizeof memory.bytes, 0};
    const moe_allocator allocator = moe_arena_allocator(&arena);
    memset(&c, 0, sizeof c);
    memset(&layer, 0, sizeof layer);
    c.router.d_model = WIDTH;
    c.router.n_experts = 4;
    c.d_ff = 6;
    if (!CHECK(moe_fields_apply(moe_layer_fields(), &c, settings, &error) == MOE_OK)) printf("    %s\n", error.message);
    if (!CHECK(moe_layer_create(&layer, &c, 0, 1, &allocator, &error) == MOE_OK))
        printf("    %s: %s\n", settings, error.message);
    return layer;
}

static moe_status forward(const char *settings) {
    const moe_layer layer = layer_of(settings);
    moe_call call;
    memset(&call, 0, sizeof call);
    call.n_tokens = TOKENS;
    call.x = x;
    return moe_layer_forward(&layer, &call, y, work.bytes, sizeof work.bytes, NULL);
}

static void test_layers(void) {
    moe_real sum = 0;
    size_t i;
    for (i = 0; i < TOKENS * WIDTH; i++) x[i] = (moe_real)((int)i % 5 - 2);
    CHECK(forward("select=dense expert=mlp act=relu") == MOE_OK);
    for (i = 0; i < TOKENS * WIDTH; i++) sum += y[i] * y[i];
    CHECK(sum > 0 && moe_is_finite(sum));
    CHECK(forward("select=dense expert=linear d_ff=0") == MOE_OK);
    CHECK(forward("select=dense expert=mlp act=gelu") == MOE_ERR_UNSUPPORTED);
    CHECK(forward("select=dense") == MOE_ERR_UNSUPPORTED); /* swiglu has silu */
    CHECK(forward("select=dense expert=mlp act=relu n_shared=1 d_shared=3") == MOE_ERR_UNSUPPORTED);
    CHECK(forward("select=dense expert=linear d_ff=0 n_shared=1 d_shared=3") == MOE_ERR_UNSUPPORTED);
}

static moe_status net_forward(moe_status add(moe_net *net, int value), int value) {
    moe_arena arena = {memory.bytes, sizeof memory.bytes, 0};
    const moe_allocator allocator = moe_arena_allocator(&arena);
    moe_net net;
    moe_net_pass pass;
    moe_call call;
    memset(&call, 0, sizeof call);
    call.n_tokens = TOKENS;
    call.x = x;
    CHECK(moe_net_init(&net, WIDTH, 0, &allocator) == MOE_OK && moe_net_linear(&net, WIDTH) == MOE_OK &&
          add(&net, value) == MOE_OK);
    CHECK(moe_net_build(&net, 0, 1, &error) == MOE_OK);
    return moe_net_forward(&net, &call, work.bytes, sizeof work.bytes, &pass);
}

static moe_status add_norm(moe_net *net, int value) {
    (void)value;
    return moe_net_layer_norm(net);
}

static void test_nets(void) {
    CHECK(net_forward(moe_net_activation, MOE_ACT_RELU) == MOE_OK);
    CHECK(net_forward(moe_net_activation, MOE_ACT_TANH) == MOE_ERR_UNSUPPORTED);
    CHECK(net_forward(add_norm, 0) == MOE_ERR_UNSUPPORTED);
    CHECK(net_forward(moe_net_residual, 1) == MOE_ERR_UNSUPPORTED);
}

static moe_status no_bytes(void *ctx, const void *bytes, size_t n) {
    (void)ctx;
    (void)bytes;
    (void)n;
    return MOE_OK;
}

/* What takes memory wants an allocator. */
static void test_no_heap(void) {
    moe_layer layer;
    moe_layer_config c;
    moe_net net, other;
    moe_hme hme;
    moe_hme_config tree;
    moe_buffer buffer;
    moe_stream stream;
    moe_built_model built;
    const moe_model_config model = {MOE_WEIGHTS_FLOAT, NULL, 0, 0, {NULL, NULL}, 0};
    moe_arena arena = {memory.bytes, sizeof memory.bytes, 0};
    const moe_allocator allocator = moe_arena_allocator(&arena);
    memset(&c, 0, sizeof c);
    memset(&tree, 0, sizeof tree);
    memset(&buffer, 0, sizeof buffer);
    memset(&built, 0, sizeof built);
    c.router.d_model = WIDTH;
    c.router.select = MOE_SELECT_DENSE;
    tree.d_in = tree.d_out = 2;
    CHECK(moe_layer_create(&layer, &c, 0, 1, NULL, &error) == MOE_ERR_ARGUMENT &&
          strstr(error.message, "allocator") != NULL);
    CHECK(moe_net_init(&net, WIDTH, 0, NULL) == MOE_ERR_ARGUMENT && strstr(net.error.message, "allocator") != NULL &&
          net.modules == NULL);
    CHECK(moe_net_linear(&net, 2) == MOE_ERR_ARGUMENT); /* remembers it */
    CHECK(moe_hme_create(&hme, &tree, 1, NULL, &error) == MOE_ERR_ARGUMENT &&
          strstr(error.message, "allocator") != NULL);
    stream = moe_buffer_stream(&buffer);
    CHECK(stream.write(stream.ctx, "a", 1) == MOE_ERR_ARGUMENT && buffer.size == 0);
    stream.write = no_bytes;
    CHECK(moe_file_write(&stream, NULL, 0, NULL, 0, NULL, &error) == MOE_ERR_ARGUMENT &&
          strstr(error.message, "allocator") != NULL);
    CHECK(moe_file_write(&stream, NULL, 0, NULL, 0, &allocator, &error) == MOE_OK);
    stream = moe_buffer_stream(&buffer);
    CHECK(moe_net_init(&net, WIDTH, 0, &allocator) == MOE_OK && moe_net_linear(&net, 2) == MOE_OK &&
          moe_net_build(&net, 0, 1, &error) == MOE_OK);
    buffer.allocator = allocator;
    CHECK(moe_net_write(&net, &stream, &error) == MOE_OK);
    CHECK(moe_net_read(&other, buffer.data, buffer.size, 0, 0, NULL, &error) == MOE_ERR_ARGUMENT &&
          strstr(error.message, "allocator") != NULL);
    CHECK(moe_net_read(&other, buffer.data, buffer.size, 0, 0, &allocator, &error) == MOE_OK);
    CHECK(moe_model_create(&built, &net, &model, &error) == MOE_ERR_ARGUMENT &&
          strstr(error.message, "allocator") != NULL);
}

static moe_status no_rows(void *ctx, moe_status status, size_t row_bytes, void *rows) {
    (void)ctx;
    (void)row_bytes;
    (void)rows;
    return status;
}

/* The only rank of a transport. */
static moe_status counts_alone(void *ctx, size_t n, const uint64_t *send, uint64_t *receive) {
    (void)ctx;
    memcpy(receive, send, n * sizeof *send);
    return MOE_OK;
}

static moe_status rows_alone(void *ctx, int stage, const moe_exchange *exchange) {
    (void)ctx;
    (void)stage;
    (void)exchange;
    return MOE_ERR_TRANSPORT; /* nothing asks for it */
}

static moe_status sum_alone(void *ctx, size_t n, moe_real *values) {
    (void)ctx;
    (void)n;
    (void)values;
    return MOE_OK;
}

/* A router that is called alone refuses what its build has not. */
static void test_router_calls(void) {
    const moe_layer layer = layer_of("select=dense expert=mlp act=relu");
    moe_routing routing;
    moe_batch batch;
    moe_call call;
    memset(&batch, 0, sizeof batch);
    memset(&call, 0, sizeof call);
    call.n_tokens = TOKENS;
    call.x = x;
    call.error = &error;
    batch.total = TOKENS;
    batch.gather = no_rows;
    call.batch = &batch;
    CHECK(moe_route(&layer.router, &call, work.bytes, sizeof work.bytes, &routing) == MOE_ERR_UNSUPPORTED);
    CHECK(strcmp(error.message, "batch: a MOE_KEEP_ macro has left it out of this build") == 0);
}

static void no_allocator(moe_status status) {
    CHECK(status == MOE_ERR_ARGUMENT && strstr(error.message, "allocator") != NULL);
}

/* Extras want one as well. */
static void test_extras_without_heap(void) {
    const moe_import_source source = moe_import_memory("x", "", 0);
    moe_layer layer = layer_of("select=dense"), other;
    moe_tokenizer tokenizer;
    moe_imported model;
    moe_transport transport;
    moe_stream stream;
    memset(&stream, 0, sizeof stream);
    memset(&transport, 0, sizeof transport);
    stream.write = no_bytes;
    no_allocator(moe_import_read(&other, &source, 1, "m", NULL, NULL, &error));
    no_allocator(moe_import_layer(&other, "x", "m", NULL, NULL, &error));
    no_allocator(moe_import_read_model(&model, &source, 1, NULL, NULL, &error));
    no_allocator(moe_import_model(&model, "x", NULL, NULL, &error));
    no_allocator(moe_import_read_tokenizer(&tokenizer, &source, 1, NULL, &error));
    no_allocator(moe_import_tokenizer(&tokenizer, "x", NULL, &error));
    memset(&layer.allocator, 0, sizeof layer.allocator);
    no_allocator(moe_import_write(&layer, &stream, "m", "mixtral", MOE_DTYPE_F32, &error));
    transport.n_ranks = 1;
    transport.counts = counts_alone;
    transport.rows = rows_alone;
    transport.sum = sum_alone;
    no_allocator(moe_transport_begin(&transport, &error));
}

/* A transport with memory does not give it to the layers and networks that ranks load. */
static void test_ranks_without_heap(void) {
    moe_arena arena = {memory.bytes, sizeof memory.bytes, 0};
    const moe_allocator allocator = moe_arena_allocator(&arena);
    moe_transport transport;
    moe_layer layer;
    memset(&transport, 0, sizeof transport);
    transport.n_ranks = 1;
    transport.allocator = &allocator;
    transport.counts = counts_alone;
    transport.rows = rows_alone;
    transport.sum = sum_alone;
    CHECK(moe_transport_begin(&transport, &error) == MOE_OK);
    no_allocator(moe_layer_load_part(&layer, "x", 0, MOE_KERNELS_C, &transport, NULL, &error));
    moe_transport_end(&transport);
    CHECK(transport.memory == NULL && transport.memory_size == 0 && transport.batch.hooks == NULL);
}

int main(void) {
    CASE(test_routers());
    CASE(test_layers());
    CASE(test_nets());
    CASE(test_no_heap());
    CASE(test_router_calls());
    CASE(test_extras_without_heap());
    CASE(test_ranks_without_heap());
    return test_end();
}
