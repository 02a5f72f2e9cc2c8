/* edges.c - calls at the edge of what is allowed, which no other program makes: pointers that are
   NULL one after another, objects that are not made or not ready, sizes beyond memory, options that
   are rarely used.

     cc -std=c99 -O2 -I. tests/unit/edges.c -o edges -lm && ./edges
     (also with -DMOE_REAL=double, and as C++)

   Every refused call must say so by its status and, where it has an error, by a message with the
   words given here, and must change nothing. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static moe_error error;

static int refusal(moe_status got, moe_status want, const char *words, int line, const char *call) {
    int good = got == want && strstr(error.message, words) != NULL && error.code == want;
    if (!good && test_shown) printf("    %s: \"%s\" instead of \"%s\"\n", moe_status_text(got), error.message, words);
    memset(&error, 0, sizeof error);
    return CHECK_AT(line, good, call);
}

/* A call with &error that must fail with a status and a message that holds words. */
#define REFUSED(status, words, call) refusal((call), (status), (words), __LINE__, #call)
/* A call whose error, if it has one, is not looked at; a call that succeeds leaves it as it was. */
static int outcome(moe_status got, moe_status want, int line, const char *call) {
    const int kept = error.code != MOE_OK || error.message[0] == '\0';
    if (!kept && test_shown) printf("    \"%s\" after success\n", error.message);
    if (!kept) memset(&error, 0, sizeof error);
    return CHECK_AT(line, got == want && kept, call);
}

#define IS(status, call) outcome((call), (status), __LINE__, #call)

static moe_real real(double x) { return (moe_real)x; }

enum { TOKENS = 6, WIDTH = 8, EXPERTS = 4, CLASSES = 3 };

static moe_real x[TOKENS * WIDTH], y[TOKENS * 16];
static const int32_t labels[TOKENS] = {0, 1, 2, 0, 1, 2};

static void fill(void) {
    moe_rng rng;
    size_t i;
    moe_rng_seed(&rng, 7);
    for (i = 0; i < TOKENS * WIDTH; i++) x[i] = moe_rng_normal(&rng);
}

static moe_layer_config layer_config(const char *settings) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.d_model = WIDTH;
    c.router.n_experts = EXPERTS;
    c.d_ff = 6;
    if (!CHECK(moe_fields_apply(moe_layer_fields(), &c, settings, &error) == MOE_OK)) printf("    %s\n", error.message);
    return c;
}

static moe_layer make_layer(const char *settings, int trainable) {
    moe_layer_config c = layer_config(settings);
    moe_layer layer;
    memset(&layer, 0, sizeof layer);
    if (!CHECK(moe_layer_create(&layer, &c, trainable, 3, NULL, &error) == MOE_OK))
        printf("    %s: %s\n", settings, error.message);
    return layer;
}

/* in 8 -> linear 8, a mixture by its settings, linear 3; settings NULL: without a mixture. */
static moe_net unbuilt(const char *settings) {
    moe_net net;
    memset(&net, 0, sizeof net);
    CHECK(moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL) == MOE_OK);
    CHECK(moe_net_linear(&net, WIDTH) == MOE_OK);
    if (settings != NULL) {
        moe_layer_config c = layer_config(settings);
        CHECK(moe_net_mixture(&net, &c) == MOE_OK);
    }
    CHECK(moe_net_linear(&net, CLASSES) == MOE_OK);
    return net;
}

static moe_net make_net(const char *settings, int trainable) {
    moe_net net = unbuilt(settings);
    if (!CHECK(moe_net_build(&net, trainable, 5, &error) == MOE_OK)) printf("    %s\n", error.message);
    return net;
}

static moe_data samples(void) {
    moe_data data;
    memset(&data, 0, sizeof data);
    data.n = TOKENS;
    data.x = x;
    data.labels = labels;
    return data;
}

static moe_call call_of(size_t n, int training) {
    moe_call call;
    memset(&call, 0, sizeof call);
    call.n_tokens = n;
    call.x = x;
    call.training = training;
    return call;
}

/* ---- layers ---- */

static void refuse_passes(void) {
    moe_layer layer = make_layer("top_k=2", 1);
    moe_layer frozen = make_layer("selection_bias=1 gate=sigmoid top_k=2", 0);
    moe_layer soft = make_layer("select=soft", 1);
    moe_call call = call_of(TOKENS, 0);
    moe_layer_pass pass;
    size_t size;
    void *work;
    IS(MOE_OK, moe_layer_work_size(&layer, TOKENS, 1, &size));
    work = grab(1, size);
    IS(MOE_ERR_ARGUMENT, moe_layer_forward(NULL, &call, y, work, size, &pass));
    IS(MOE_ERR_ARGUMENT, moe_layer_forward(&layer, NULL, y, work, size, &pass));
    IS(MOE_ERR_ARGUMENT, moe_layer_forward(&layer, &call, NULL, work, size, &pass));
    IS(MOE_ERR_ARGUMENT, moe_layer_forward(&layer, &call, y, NULL, size, &pass));
    IS(MOE_ERR_SPACE, moe_layer_forward(&layer, &call, y, work, 1, &pass));
    IS(MOE_OK, moe_layer_forward(&layer, &call, y, work, size, &pass));
    CHECK(pass.expert_outputs == NULL);
    IS(MOE_ERR_STATE, moe_layer_backward(&layer, y, NULL, NULL, &pass)); /* after a forward without training */
    IS(MOE_ERR_STATE, moe_layer_backward_experts(&layer, y, y, NULL, NULL, &pass));
    call.keep = 1; /* has the rows of training, but was none */
    IS(MOE_OK, moe_layer_forward(&layer, &call, y, work, size, &pass));
    IS(MOE_ERR_STATE, moe_layer_backward(&layer, y, NULL, NULL, &pass));
    IS(MOE_ERR_STATE, moe_layer_backward_experts(&layer, y, y, NULL, NULL, &pass));
    call.keep = 0;
    call.training = 1;
    IS(MOE_OK, moe_layer_forward(&layer, &call, y, work, size, &pass));
    IS(MOE_ERR_ARGUMENT, moe_layer_backward(NULL, y, NULL, NULL, &pass));
    IS(MOE_ERR_ARGUMENT, moe_layer_backward(&layer, NULL, NULL, NULL, &pass));
    IS(MOE_ERR_ARGUMENT, moe_layer_backward(&layer, y, NULL, NULL, NULL));
    IS(MOE_ERR_ARGUMENT, moe_layer_backward_experts(&layer, NULL, y, NULL, NULL, &pass));
    IS(MOE_ERR_ARGUMENT, moe_layer_backward_experts(&layer, y, NULL, NULL, NULL, &pass));
    IS(MOE_ERR_STATE, moe_layer_observe(&frozen, &pass));
    IS(MOE_ERR_STATE, moe_layer_advance(&frozen));
    IS(MOE_ERR_ARGUMENT, moe_layer_observe(NULL, &pass));
    IS(MOE_ERR_ARGUMENT, moe_layer_observe(&layer, NULL));
    IS(MOE_ERR_ARGUMENT, moe_layer_advance(NULL));
    free(work);
    IS(MOE_OK, moe_layer_work_size(&soft, TOKENS, 1, &size));
    work = grab(1, size);
    IS(MOE_OK, moe_layer_forward(&soft, &call, y, work, size, &pass));
    CHECK(pass.expert_outputs == NULL);
    IS(MOE_ERR_STATE, moe_layer_backward_experts(&soft, y, y, NULL, NULL, &pass));
    free(work);
    moe_layer_free(&layer);
    moe_layer_free(&frozen);
    moe_layer_free(&soft);
}

static void keep_packed(moe_layer *layer, moe_call *call, moe_quant_error *errors, size_t size, size_t packed,
                        void *work, void *memory) {
    int i;
    IS(MOE_OK, moe_layer_quantize(layer, MOE_TYPE_REAL, memory, packed, NULL, NULL, 0, NULL, &error));
    CHECK(layer->is_packed);
    /* A failure that has overwritten what is in use: no longer packed. In other memory: packed as
       before. */
    call->x = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "the calibration batch",
            moe_layer_quantize(layer, MOE_TYPE_REAL, memory, packed, call, work, size, errors, &error));
    CHECK(!layer->is_packed);
    call->x = x;
    IS(MOE_OK, moe_layer_quantize(layer, MOE_TYPE_REAL, memory, packed, call, work, size, errors, &error));
    CHECK(layer->is_packed);
    for (i = 0; i < EXPERTS; i++) CHECK(!(errors[i].output > real(0)) && errors[i].rows <= TOKENS);
    {
        void *second = grab(1, packed);
        call->x = NULL;
        REFUSED(MOE_ERR_ARGUMENT, "the calibration batch",
                moe_layer_quantize(layer, MOE_TYPE_REAL, second, packed, call, work, size, errors, &error));
        CHECK(layer->is_packed);
        call->x = x;
        free(second);
    }
    layer->is_packed = 0;
}

/* Packed weights that a failing call overwrites in part are not read again; those beside it are. */
static void keep_what_is_beside(moe_layer *layer, moe_net *net, moe_real *weight, size_t packed) {
    unsigned char *memory = (unsigned char *)grab(5, packed);
    const size_t at[] = {0, 64, packed - 128, packed};
    size_t i;
    for (i = 0; i < sizeof at / sizeof at[0]; i++) {
        *weight = 1;
        IS(MOE_OK, net != NULL ? moe_net_pack(net, MOE_TYPE_REAL, memory, packed, &error)
                               : moe_layer_pack(layer, MOE_TYPE_REAL, memory, packed, &error));
        *weight = (moe_real)HUGE_VAL;
        IS(MOE_ERR_NONFINITE, net != NULL ? moe_net_pack(net, MOE_TYPE_Q8, memory + at[i], 4 * packed, &error)
                                          : moe_layer_pack(layer, MOE_TYPE_Q8, memory + at[i], 4 * packed, &error));
        CHECK(layer->is_packed == (at[i] == packed));
    }
    *weight = 1;
    layer->is_packed = 0;
    free(memory);
}

static void keep_packed_modules(void) {
    moe_net net;
    moe_tensor weight;
    size_t packed;
    moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL);
    moe_net_linear(&net, 40);
    IS(MOE_OK, moe_net_build(&net, 0, 1, &error));
    IS(MOE_OK, moe_net_pack_size(&net, MOE_TYPE_REAL, 0, &packed, NULL));
    IS(MOE_OK, moe_net_find(&net, "0.weight", &weight));
    keep_what_is_beside(&net.modules[0].layer, &net, weight.data, packed);
    moe_net_free(&net);
}

static void refuse_packing(void) {
    moe_layer layer = make_layer("top_k=2", 1), other = layer;
    moe_call call = call_of(TOKENS, 0);
    moe_quant_error errors[EXPERTS];
    size_t size, packed;
    void *work, *memory;
    const moe_real *saved;
    moe_tensor down;
    IS(MOE_OK, moe_layer_pack_size(&layer, MOE_TYPE_REAL, 0, &packed, NULL));
    IS(MOE_OK, moe_layer_pack_size(&layer, MOE_TYPE_REAL, TOKENS, NULL, &size));
    memory = grab(2, packed);
    IS(MOE_ERR_ARGUMENT, moe_layer_pack_size(&layer, MOE_TYPE_COUNT, 0, &packed, NULL));
    work = grab(1, size);
    REFUSED(MOE_ERR_ARGUMENT, "layer must not be NULL", moe_layer_pack(NULL, MOE_TYPE_REAL, memory, packed, &error));
    REFUSED(MOE_ERR_ARGUMENT, "memory must not be NULL", moe_layer_pack(&layer, MOE_TYPE_REAL, NULL, packed, &error));
    REFUSED(MOE_ERR_ARGUMENT, "cannot be packed", moe_layer_pack(&layer, MOE_TYPE_COUNT, memory, packed, &error));
    REFUSED(MOE_ERR_SPACE, "", moe_layer_pack(&layer, MOE_TYPE_REAL, memory, packed - 1, &error));
    saved = layer.tensors[MOE_EXPERTS_DOWN];
    layer.tensors[MOE_EXPERTS_DOWN] = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "experts.down is not set", moe_layer_pack(&layer, MOE_TYPE_REAL, memory, packed, &error));
    layer.tensors[MOE_EXPERTS_DOWN] = saved;
    IS(MOE_OK, moe_layer_find(&layer, "experts.down", &down));
    down.data[0] = (moe_real)HUGE_VAL;
    REFUSED(MOE_ERR_NONFINITE, "experts.down cannot be packed",
            moe_layer_pack(&layer, MOE_TYPE_Q8, memory, 2 * packed, &error));
    CHECK(!layer.is_packed);
    keep_what_is_beside(&layer, NULL, down.data, packed);
    memset(layer.packed, 0, sizeof layer.packed);
    REFUSED(MOE_ERR_ARGUMENT, "layer must not be NULL",
            moe_layer_quantize(NULL, MOE_TYPE_REAL, memory, packed, &call, work, size, errors, &error));
    REFUSED(MOE_ERR_ARGUMENT, "calibration",
            moe_layer_quantize(&layer, MOE_TYPE_REAL, memory, packed, NULL, work, size, errors, &error));
    REFUSED(MOE_ERR_ARGUMENT, "calibration",
            moe_layer_quantize(&layer, MOE_TYPE_REAL, memory, packed, &call, NULL, size, errors, &error));
    call.n_tokens = 0;
    REFUSED(MOE_ERR_ARGUMENT, "calibration",
            moe_layer_quantize(&layer, MOE_TYPE_REAL, memory, packed, &call, work, size, errors, &error));
    call.n_tokens = (size_t)INT32_MAX + 1;
    REFUSED(MOE_ERR_OVERFLOW, "for this batch",
            moe_layer_quantize(&layer, MOE_TYPE_REAL, memory, packed, &call, work, size, errors, &error));
    call.n_tokens = TOKENS;
    REFUSED(MOE_ERR_SPACE, "",
            moe_layer_quantize(&layer, MOE_TYPE_REAL, memory, packed, &call, work, size - 1, errors, &error));
    call.x = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "the calibration batch",
            moe_layer_quantize(&layer, MOE_TYPE_REAL, memory, packed, &call, work, size, errors, &error));
    CHECK(!layer.is_packed && layer.packed[MOE_EXPERTS_DOWN] == NULL &&
          memcmp(&layer.config, &other.config, sizeof other.config) == 0);
    call.x = x;
    keep_packed(&layer, &call, errors, size, packed, work, memory);
    free(memory);
    free(work);
    moe_layer_free(&layer);
}

/* Experts that answer zero. */
static void lose_nothing(void) {
    moe_layer silent = make_layer("top_k=2", 1);
    const moe_call call = call_of(TOKENS, 0);
    moe_tensor tensor;
    moe_quant_error errors[EXPERTS];
    size_t size, packed;
    void *work, *memory;
    int i;
    IS(MOE_OK, moe_layer_find(&silent, "experts.down", &tensor));
    memset(tensor.data, 0, tensor.count * sizeof(moe_real));
    IS(MOE_OK, moe_layer_pack_size(&silent, MOE_WEIGHTS_INT8, 0, &packed, NULL));
    IS(MOE_OK, moe_layer_pack_size(&silent, MOE_WEIGHTS_INT8, TOKENS, NULL, &size));
    memory = grab(1, packed);
    work = grab(1, size);
    IS(MOE_OK, moe_layer_quantize(&silent, MOE_WEIGHTS_INT8, memory, packed, &call, work, size, errors, &error));
    for (i = 0; i < EXPERTS; i++)
        CHECK(!(errors[i].output < real(0)) && !(errors[i].output > real(0)) && moe_is_finite(errors[i].output));
    free(memory);
    free(work);
    moe_layer_free(&silent);
}

/* Experts in 8 bits: the report has every assignment, and an error that is small but not 0 unless
   all is padding, whatever that holds. */
static void lose_little(const char *settings, size_t wanted, const unsigned char *mask) {
    moe_layer layer = make_layer(settings, 0);
    moe_real own[TOKENS * WIDTH];
    moe_call call = call_of(TOKENS, 0);
    moe_quant_error errors[EXPERTS];
    size_t size, packed, rows = 0;
    void *work, *memory;
    int i;
    memcpy(own, x, sizeof own);
    for (i = 0; i < TOKENS; i++)
        if (mask != NULL && !mask[i]) own[i * WIDTH] = real(HUGE_VAL);
    call.x = own;
    call.mask = mask;
    IS(MOE_OK, moe_layer_pack_size(&layer, MOE_TYPE_Q8, 0, &packed, NULL));
    IS(MOE_OK, moe_layer_pack_size(&layer, MOE_TYPE_Q8, TOKENS, NULL, &size));
    memory = grab(1, packed);
    work = grab(1, size);
    IS(MOE_OK, moe_layer_quantize(&layer, MOE_TYPE_Q8, memory, packed, &call, work, size, errors, &error));
    for (i = 0; i < EXPERTS; i++) {
        CHECK((errors[i].output > real(0)) == (wanted > 0) && errors[i].output < real(0.1));
        rows += errors[i].rows;
    }
    CHECK(rows == wanted);
    free(memory);
    free(work);
    moe_layer_free(&layer);
}

static void test_layers(void) {
    static const unsigned char padded[][TOKENS] = {{0, 1, 1, 1, 1, 1}, {0, 1, 0}, {0}};
    moe_layer layer = make_layer("top_k=2", 1);
    moe_layer_config config = layer_config("top_k=2"), before = config;
    moe_tensor tensor;
    moe_parameter slot;
    size_t bytes = 77;

    REFUSED(MOE_ERR_ARGUMENT, "config must not be NULL", moe_layer_check(NULL, &config, &error));
    REFUSED(MOE_ERR_ARGUMENT, "config must not be NULL", moe_layer_preset("moe", NULL, &error));
    REFUSED(MOE_ERR_NOT_FOUND, "nothing", moe_layer_preset("nothing", &config, &error));
    CHECK(memcmp(&config, &before, sizeof config) == 0);
    REFUSED(MOE_ERR_ARGUMENT, "layer must not be NULL", moe_layer_init(NULL, &config, &error));
    REFUSED(MOE_ERR_ARGUMENT, "layer must not be NULL", moe_layer_create(NULL, &config, 0, 1, NULL, &error));
    IS(MOE_ERR_NOT_FOUND, moe_layer_parameter(&layer.config, -1, &slot));
    IS(MOE_ERR_NOT_FOUND, moe_layer_parameter(&layer.config, MOE_LAYER_PARAMETER_COUNT, &slot));
    IS(MOE_ERR_ARGUMENT, moe_layer_tensor(NULL, 0, &tensor));
    IS(MOE_ERR_ARGUMENT, moe_layer_tensor(&layer, 0, NULL));
    IS(MOE_ERR_NOT_FOUND, moe_layer_tensor(&layer, 1000, &tensor));
    IS(MOE_ERR_ARGUMENT, moe_layer_find(NULL, "router.weight", &tensor));
    IS(MOE_ERR_ARGUMENT, moe_layer_find(&layer, NULL, &tensor));
    IS(MOE_ERR_ARGUMENT, moe_layer_find(&layer, "router.weight", NULL));
    IS(MOE_ERR_NOT_FOUND, moe_layer_find(&layer, "router.weigh", &tensor));
    IS(MOE_OK, moe_layer_find(&layer, "router.weight", &tensor));
    CHECK(tensor.count == WIDTH * EXPERTS && tensor.data == layer.tensors[MOE_ROUTER_WEIGHT]);
    moe_layer_free(NULL);

    IS(MOE_ERR_ARGUMENT, moe_layer_work_size(NULL, 1, 0, &bytes));
    IS(MOE_ERR_ARGUMENT, moe_layer_work_size(&layer, 1, 0, NULL));
    IS(MOE_ERR_OVERFLOW, moe_layer_work_size(&layer, SIZE_MAX, 0, &bytes));
    IS(MOE_ERR_OVERFLOW, moe_layer_work_size(&layer, (size_t)INT32_MAX + 1, 1, &bytes));
    IS(MOE_ERR_ARGUMENT, moe_layer_pack_size(NULL, MOE_TYPE_REAL, 0, &bytes, NULL));
    IS(MOE_ERR_ARGUMENT, moe_layer_pack_size(&layer, MOE_TYPE_REAL, 0, NULL, NULL));
    IS(MOE_ERR_ARGUMENT, moe_layer_pack_size(&layer, MOE_TYPE_COUNT, 0, &bytes, NULL));
    IS(MOE_ERR_ARGUMENT, moe_layer_pack_size(&layer, -1, 0, &bytes, NULL));
    IS(MOE_ERR_ARGUMENT, moe_layer_pack_size(NULL, MOE_TYPE_REAL, 1, NULL, &bytes));
    IS(MOE_ERR_ARGUMENT, moe_layer_pack_size(&layer, MOE_TYPE_REAL, 1, NULL, NULL));
    IS(MOE_ERR_ARGUMENT, moe_layer_pack_size(&layer, MOE_TYPE_COUNT, 1, NULL, &bytes));
    IS(MOE_ERR_OVERFLOW, moe_layer_pack_size(&layer, MOE_TYPE_REAL, (size_t)INT32_MAX + 1, NULL, &bytes));
    CHECK(bytes == 77);
    moe_layer_free(&layer);
    refuse_packing();
    keep_packed_modules();
    lose_nothing();
    lose_little("top_k=2", 2 * TOKENS, NULL);
    lose_little("select=soft slots=2", EXPERTS * TOKENS, padded[0]);
    lose_little("top_k=1", 1, padded[1]);
    lose_little("top_k=2", 0, padded[2]);
    refuse_passes();
}

/* ---- networks ---- */

static void refuse_decoding(void) {
    moe_net net = make_net("top_k=2", 1);
    moe_net raw = unbuilt("top_k=2");
    moe_net plain = make_net(NULL, 0);
    moe_call call = call_of(TOKENS, 0);
    moe_net_pass pass;
    moe_cache cache, other_cache;
    size_t bytes = 77;
    size_t decode_size;
    void *work, *memory;
    IS(MOE_OK, moe_net_decode_size(&net, 4, 1, &bytes, NULL, NULL));
    IS(MOE_OK, moe_net_decode_size(&net, 4, 4, NULL, &decode_size, NULL));
    memory = grab(1, bytes + 8);
    work = grab(1, decode_size);
    memset(&cache, 0, sizeof cache);
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_net_cache_init(NULL, &net, 4, memory, bytes, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_net_cache_init(&cache, NULL, 4, memory, bytes, &error));
    REFUSED(MOE_ERR_STATE, "not built", moe_net_cache_init(&cache, &raw, 4, memory, bytes, &error));
    if (bytes > 0) {
        REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_net_cache_init(&cache, &net, 4, NULL, bytes, &error));
        REFUSED(MOE_ERR_SPACE, "", moe_net_cache_init(&cache, &net, 4, memory, bytes - 1, &error));
    }
    IS(MOE_OK, moe_net_cache_init(&cache, &net, 4, memory, bytes, &error));
    call.n_tokens = 2;
    IS(MOE_ERR_ARGUMENT, moe_net_decode(NULL, &cache, &call, work, decode_size, &pass));
    IS(MOE_ERR_ARGUMENT, moe_net_decode(&net, NULL, &call, work, decode_size, &pass));
    IS(MOE_ERR_ARGUMENT, moe_net_decode(&net, &cache, NULL, work, decode_size, &pass));
    IS(MOE_ERR_ARGUMENT, moe_net_decode(&net, &cache, &call, NULL, decode_size, &pass));
    IS(MOE_ERR_ARGUMENT, moe_net_decode(&net, &cache, &call, work, decode_size, NULL));
    IS(MOE_ERR_STATE, moe_net_decode(&raw, &cache, &call, work, decode_size, &pass));
    other_cache = cache;
    other_cache.net = &plain;
    IS(MOE_ERR_ARGUMENT, moe_net_decode(&net, &other_cache, &call, work, decode_size, &pass));
    other_cache = cache;
    other_cache.n_tokens = 5; /* more than there is room for */
    IS(MOE_ERR_ARGUMENT, moe_net_decode(&net, &other_cache, &call, work, decode_size, &pass));
    call.n_tokens = 5;
    IS(MOE_ERR_SPACE, moe_net_decode(&net, &cache, &call, work, decode_size, &pass));
    call.n_tokens = 2;
    call.training = 1;
    IS(MOE_ERR_ARGUMENT, moe_net_decode(&net, &cache, &call, work, decode_size, &pass));
    call.training = 0;
    call.keep = 1;
    IS(MOE_ERR_ARGUMENT, moe_net_decode(&net, &cache, &call, work, decode_size, &pass));
    call.keep = 0;
    IS(MOE_ERR_SPACE, moe_net_decode(&net, &cache, &call, work, 1, &pass));
    CHECK(cache.n_tokens == 0);
    IS(MOE_OK, moe_net_decode(&net, &cache, &call, work, decode_size, &pass));
    CHECK(cache.n_tokens == 2);
    free(work);
    free(memory);
    moe_net_free(&net);
    moe_net_free(&raw);
    moe_net_free(&plain);
}

static void refuse_backward(moe_net *net, moe_net *raw, moe_net *plain, moe_call *call, size_t size, void *work) {
    moe_net_pass pass;
    moe_real dy[TOKENS * CLASSES];
    memset(dy, 0, sizeof dy);
    IS(MOE_OK, moe_net_forward(net, call, work, size, &pass));
    CHECK(moe_net_routing(net, &pass, 1) != NULL && moe_net_routing(net, &pass, 0) == NULL &&
          moe_net_routing(net, &pass, 9) == NULL && moe_net_routing(NULL, &pass, 1) == NULL &&
          moe_net_routing(net, NULL, 1) == NULL);
    IS(MOE_ERR_STATE, moe_net_backward(net, dy, NULL, &pass));
    IS(MOE_ERR_STATE, moe_net_observe(net, &pass));
    IS(MOE_ERR_ARGUMENT, moe_net_backward(NULL, dy, NULL, &pass));
    IS(MOE_ERR_ARGUMENT, moe_net_backward(net, dy, NULL, NULL));
    IS(MOE_ERR_ARGUMENT, moe_net_observe(NULL, &pass));
    IS(MOE_ERR_ARGUMENT, moe_net_observe(net, NULL));
    IS(MOE_ERR_ARGUMENT, moe_net_advance(NULL));
    IS(MOE_ERR_STATE, moe_net_advance(plain));
    IS(MOE_ERR_STATE, moe_net_advance(raw));
    call->training = 1;
    IS(MOE_OK, moe_net_forward(net, call, work, size, &pass));
    IS(MOE_ERR_ARGUMENT, moe_net_backward(net, NULL, NULL, &pass));
    IS(MOE_ERR_STATE, moe_net_backward(raw, dy, NULL, &pass));
    IS(MOE_ERR_STATE, moe_net_backward(plain, dy, NULL, &pass));
    IS(MOE_ERR_STATE, moe_net_observe(plain, &pass));
    call->n_tokens = 0;
    IS(MOE_OK, moe_net_forward(net, call, work, size, &pass));
    IS(MOE_OK, moe_net_backward(net, dy, NULL, &pass)); /* no token, no gradient */
    call->n_tokens = TOKENS;
    call->training = 0;
}

static void refuse_forward(moe_net *net, moe_net *raw, moe_call *call, size_t *size, void **work) {
    moe_net_pass untouched;
    IS(MOE_OK, moe_net_work_size(net, TOKENS, 1, size));
    *work = grab(1, *size);
    memset(&untouched, 1, sizeof untouched);
    IS(MOE_ERR_ARGUMENT, moe_net_forward(NULL, call, *work, *size, &untouched));
    IS(MOE_ERR_ARGUMENT, moe_net_forward(net, NULL, *work, *size, &untouched));
    IS(MOE_ERR_ARGUMENT, moe_net_forward(net, call, NULL, *size, &untouched));
    IS(MOE_ERR_ARGUMENT, moe_net_forward(net, call, *work, *size, NULL));
    IS(MOE_ERR_STATE, moe_net_forward(raw, call, *work, *size, &untouched));
    IS(MOE_ERR_SPACE, moe_net_forward(net, call, *work, 8, &untouched));
    call->x = NULL;
    IS(MOE_ERR_ARGUMENT, moe_net_forward(net, call, *work, *size, &untouched));
    call->x = x;
    call->router_x = x;
    IS(MOE_ERR_ARGUMENT, moe_net_forward(net, call, *work, *size, &untouched));
    call->router_x = NULL;
    call->activations = x;
    IS(MOE_ERR_ARGUMENT, moe_net_forward(net, call, *work, *size, &untouched));
    call->activations = NULL;
    call->n_past = 1;
    IS(MOE_ERR_ARGUMENT, moe_net_forward(net, call, *work, *size, &untouched));
    call->n_past = 0;
    call->n_tokens = (size_t)INT32_MAX + 1;
    IS(MOE_ERR_OVERFLOW, moe_net_forward(net, call, *work, *size, &untouched));
    call->n_tokens = TOKENS;
    CHECK(untouched.n_tokens == (size_t)0x0101010101010101ull);
}

static void test_nets(void) {
    moe_net net = make_net("top_k=2", 1), raw = unbuilt("top_k=2");
    moe_net plain = make_net(NULL, 0), broken;
    moe_call call = call_of(TOKENS, 0);
    moe_tensor entry;
    size_t bytes = 77, size;
    void *work;
    IS(MOE_ERR_ARGUMENT, moe_net_init(NULL, 1, 0, NULL));
    IS(MOE_ERR_ARGUMENT, moe_net_linear(NULL, 1));
    IS(MOE_ERR_ARGUMENT, moe_net_residual(NULL, 1));
    REFUSED(MOE_ERR_ARGUMENT, "net must not be NULL", moe_net_build(NULL, 0, 1, &error));
    moe_net_free(NULL);
    IS(MOE_ERR_ARGUMENT, moe_net_find(NULL, "0.weight", &entry));
    IS(MOE_ERR_ARGUMENT, moe_net_find(&net, NULL, &entry));
    IS(MOE_ERR_ARGUMENT, moe_net_find(&net, "0.weight", NULL));
    IS(MOE_ERR_NOT_FOUND, moe_net_find(&net, "9.weight", &entry));
    IS(MOE_OK, moe_net_find(&net, "0.weight", &entry));
    CHECK(entry.data == net.tensors[0].data && strcmp(entry.name, "0.weight") == 0);
    CHECK(moe_net_parameter_count(&raw, &bytes) == 0 && bytes == 0 && moe_net_parameter_count(NULL, NULL) == 0);
    bytes = 77;
    IS(MOE_OK, moe_net_init(&broken, WIDTH, MOE_KERNELS_AUTO, NULL));
    IS(MOE_ERR_ARGUMENT, moe_net_mixture(&broken, NULL));
    REFUSED(MOE_ERR_ARGUMENT, "config must not be NULL", moe_net_build(&broken, 0, 1, &error));
    moe_net_free(&broken);
    IS(MOE_OK, moe_net_init(&broken, WIDTH, MOE_KERNELS_AUTO, NULL));
    IS(MOE_OK, moe_net_feed_forward(&broken, NULL)); /* a swiglu of width 4 d */
    CHECK(broken.modules[0].layer.config.d_ff == 4 * WIDTH);
    moe_net_free(&broken);

    IS(MOE_ERR_ARGUMENT, moe_net_work_size(NULL, 1, 0, &bytes));
    IS(MOE_ERR_ARGUMENT, moe_net_work_size(&net, 1, 0, NULL));
    IS(MOE_ERR_STATE, moe_net_work_size(&raw, 1, 0, &bytes));
    IS(MOE_ERR_OVERFLOW, moe_net_work_size(&net, SIZE_MAX / 2, 0, &bytes));
    IS(MOE_ERR_OVERFLOW, moe_net_work_size(&plain, SIZE_MAX / 16, 0, &bytes));
    IS(MOE_ERR_ARGUMENT, moe_net_decode_size(NULL, 1, 1, &bytes, NULL, NULL));
    IS(MOE_OK, moe_net_decode_size(&net, 1, 1, NULL, NULL, NULL));
    IS(MOE_ERR_STATE, moe_net_decode_size(&raw, 1, 1, &bytes, NULL, NULL));
    IS(MOE_ERR_ARGUMENT, moe_net_decode_size(NULL, 1, 1, NULL, &bytes, NULL));
    IS(MOE_ERR_STATE, moe_net_decode_size(&raw, 1, 1, NULL, &bytes, NULL));
    CHECK(bytes == 77);
    REFUSED(MOE_ERR_ARGUMENT, "net must not be NULL", moe_net_decode_size(NULL, 1, 1, NULL, NULL, &error));
    refuse_forward(&net, &raw, &call, &size, &work);
    refuse_backward(&net, &raw, &plain, &call, size, work);
    free(work);
    moe_net_free(&net);
    moe_net_free(&raw);
    moe_net_free(&plain);
    refuse_decoding();
}

/* ---- training ---- */

/* A network of ids without ids, in the call or beside it; attention without a length. */
static void train_without_ids(void) {
    moe_net ids;
    moe_trainer trainer;
    moe_train_config config;
    moe_data data = samples();
    moe_data bad;
    moe_call call;
    moe_step step;
    moe_evaluation result;
    memset(&config, 0, sizeof config);
    memset(&call, 0, sizeof call);
    config.batch = TOKENS;
    IS(MOE_OK, moe_net_init(&ids, 0, MOE_KERNELS_AUTO, NULL));
    IS(MOE_OK, moe_net_embedding(&ids, 5, WIDTH));
    IS(MOE_OK, moe_net_attention(&ids, NULL));
    IS(MOE_OK, moe_net_linear(&ids, CLASSES));
    IS(MOE_OK, moe_net_build(&ids, 1, 1, &error));
    IS(MOE_OK, moe_trainer_init(&trainer, &ids, &config, &error));
    REFUSED(MOE_ERR_ARGUMENT, "token_ids must not be NULL", moe_trainer_step(&trainer, &data, NULL, &error));
    bad = data;
    bad.call = &call;
    REFUSED(MOE_ERR_ARGUMENT, "token_ids must not be NULL", moe_trainer_step(&trainer, &bad, NULL, &error));
    call.token_ids = labels;
    IS(MOE_OK, moe_trainer_step(&trainer, &bad, &step, &error));
    bad = data;
    bad.token_ids = labels;
    IS(MOE_OK, moe_trainer_step(&trainer, &bad, &step, &error));
    REFUSED(MOE_ERR_ARGUMENT, "length = 0", moe_evaluate(&ids, &bad, MOE_CRITERION_CROSS_ENTROPY, &result, &error));
    bad.length = 3;
    IS(MOE_OK, moe_evaluate(&ids, &bad, MOE_CRITERION_CROSS_ENTROPY, &result, &error));
    CHECK(result.n == TOKENS && result.loss > real(0));
    moe_trainer_free(&trainer);
    moe_net_free(&ids);
}

static void refuse_steps(moe_net *net, moe_trainer *trainer, moe_trainer *none, moe_data *data) {
    moe_data bad;
    moe_step step;
    moe_real *first;
    moe_buffer file;
    moe_stream stream;
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_trainer_step(NULL, data, &step, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_trainer_step(trainer, NULL, &step, &error));
    REFUSED(MOE_ERR_STATE, "not made", moe_trainer_step(none, data, &step, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_trainer_accumulate(NULL, data, &step, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_trainer_update(NULL, &step, &error));
    REFUSED(MOE_ERR_STATE, "no batch", moe_trainer_update(trainer, &step, &error));
    REFUSED(MOE_ERR_STATE, "no batch", moe_trainer_update(none, &step, &error));
    trainer->n_accumulated = INT32_MAX;
    REFUSED(MOE_ERR_STATE, "2147483647 batches", moe_trainer_accumulate(trainer, data, &step, &error));
    trainer->n_accumulated = 0;
    first = net->tensors[0].data;
    step.loss = trainer->rate;
    trainer->rate = real(HUGE_VAL);
    REFUSED(MOE_ERR_ARGUMENT, "finite", moe_trainer_step(trainer, data, NULL, &error));
    memset(&file, 0, sizeof file);
    stream = moe_buffer_stream(&file);
    REFUSED(MOE_ERR_ARGUMENT, "finite", moe_trainer_write(trainer, &stream, &error));
    CHECK(file.size == 0);
    trainer->rate = step.loss;
    bad = *data;
    bad.labels = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "labels", moe_trainer_step(trainer, &bad, &step, &error));
    bad = *data;
    bad.x = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "x must not be NULL", moe_trainer_step(trainer, &bad, &step, &error));
    bad = *data;
    bad.n = TOKENS + 1;
    REFUSED(MOE_ERR_ARGUMENT, "7", moe_trainer_step(trainer, &bad, &step, &error));
    bad = *data;
    bad.length = 4;
    REFUSED(MOE_ERR_ARGUMENT, "length", moe_trainer_step(trainer, &bad, &step, &error));
    CHECK(trainer->steps == 0 && trainer->n_accumulated == 0 && net->tensors[0].data == first);
}

static void test_training(void) {
    moe_net net = make_net("top_k=2", 1), raw = unbuilt("top_k=2");
    moe_net still = make_net("top_k=2", 0);
    moe_trainer trainer, none;
    moe_train_config config;
    moe_data data = samples(), bad;
    moe_call call;
    moe_evaluation result;
    memset(&trainer, 0, sizeof trainer);
    memset(&none, 0, sizeof none);
    memset(&config, 0, sizeof config);
    memset(&call, 0, sizeof call);
    config.batch = TOKENS;

    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_trainer_init(NULL, &net, &config, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_trainer_init(&trainer, NULL, &config, &error));
    REFUSED(MOE_ERR_STATE, "trainable", moe_trainer_init(&trainer, &raw, &config, &error));
    REFUSED(MOE_ERR_STATE, "trainable", moe_trainer_init(&trainer, &still, &config, &error));
    config.batch = INT32_MAX;
    CHECK(moe_trainer_init(&trainer, &net, &config, &error) != MOE_OK && trainer.net == NULL &&
          error.message[0] != '\0');
    memset(&error, 0, sizeof error);
    config.batch = TOKENS;
    IS(MOE_OK, moe_trainer_init(&trainer, &net, NULL, &error));
    moe_trainer_free(&trainer);
    IS(MOE_OK, moe_trainer_init(&trainer, &net, &config, &error));
    moe_trainer_free(NULL);
    moe_trainer_free(&none);
    refuse_steps(&net, &trainer, &none, &data);

    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL",
            moe_evaluate(NULL, &data, MOE_CRITERION_CROSS_ENTROPY, &result, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_evaluate(&net, &data, MOE_CRITERION_CROSS_ENTROPY, NULL, &error));
    REFUSED(MOE_ERR_ARGUMENT, "data must not be NULL",
            moe_evaluate(&net, NULL, MOE_CRITERION_CROSS_ENTROPY, &result, &error));
    REFUSED(MOE_ERR_STATE, "not built", moe_evaluate(&raw, &data, MOE_CRITERION_CROSS_ENTROPY, &result, &error));
    bad = data;
    bad.call = &call;
    REFUSED(MOE_ERR_ARGUMENT, "call must be NULL",
            moe_evaluate(&net, &bad, MOE_CRITERION_CROSS_ENTROPY, &result, &error));
    REFUSED(MOE_ERR_ARGUMENT, "call must be NULL", moe_fit(&net, &bad, NULL, &config, &error));
    REFUSED(MOE_ERR_ARGUMENT, "data must not be NULL", moe_fit(&net, NULL, NULL, &config, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_fit(NULL, &data, NULL, &config, &error));
    moe_trainer_free(&trainer);

    train_without_ids();
    moe_net_free(&net);
    moe_net_free(&raw);
    moe_net_free(&still);
}

/* ---- modular networks ---- */

static void refuse_modular_steps(moe_trainer *trainer, moe_modular *modular, moe_modular *empty) {
    moe_data data = samples();
    moe_data bad;
    int32_t choices[TOKENS] = {-1, -1, -1, -1, -1, -1};
    moe_modular_step_result result;
    size_t i;
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_modular_step(NULL, &data, 1, 1, choices, &result, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_modular_step(empty, &data, 1, 1, choices, &result, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_modular_step(modular, NULL, 1, 1, choices, &result, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_modular_step(modular, &data, 1, 1, NULL, &result, &error));
    REFUSED(MOE_ERR_ARGUMENT, "not negative", moe_modular_step(modular, &data, -1, 1, choices, &result, &error));
    REFUSED(MOE_ERR_ARGUMENT, "not negative", moe_modular_step(modular, &data, 1, -1, choices, &result, &error));
    bad = data;
    bad.n = 0;
    CHECK(moe_modular_step(modular, &bad, 1, 1, choices, &result, &error) == MOE_ERR_ARGUMENT);
    bad.n = TOKENS + 1;
    CHECK(moe_modular_step(modular, &bad, 1, 1, choices, &result, &error) == MOE_ERR_ARGUMENT);
    CHECK(choices[0] == -1 && trainer->steps == 0);
    IS(MOE_OK, moe_modular_step(modular, &data, 2, 1, choices, NULL, &error));
    for (i = 0; i < TOKENS; i++) CHECK(choices[i] >= 0 && choices[i] < EXPERTS);
    CHECK(trainer->steps == 1);
    moe_modular_free(NULL);
    moe_modular_free(empty);
}

static void test_modular(void) {
    static const char *const wrong[] = {"top_k=1 loss_distill=1", "select=sample top_k=2 loss_distill=1",
                                        "select=sample top_k=1 weight=raw",
                                        "select=sample top_k=1 k_end=2 schedule_steps=10 loss_distill=1"};
    moe_net net = make_net("select=sample top_k=1 loss_distill=1", 1), plain = make_net(NULL, 1);
    moe_train_config config;
    moe_trainer trainer, none;
    moe_modular modular, empty;
    const moe_allocator usual = net.allocator;
    test_heap heap;
    size_t i;
    memset(&config, 0, sizeof config);
    memset(&none, 0, sizeof none);
    memset(&modular, 0, sizeof modular);
    memset(&empty, 0, sizeof empty);
    config.batch = TOKENS;
    for (i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        moe_net other = make_net(wrong[i], 1);
        IS(MOE_OK, moe_trainer_init(&trainer, &other, &config, &error));
        if (!REFUSED(MOE_ERR_CONFIG, "module 1", moe_modular_init(&modular, &trainer, &error)))
            printf("    %s\n", wrong[i]);
        moe_trainer_free(&trainer);
        moe_net_free(&other);
    }
    IS(MOE_OK, moe_trainer_init(&trainer, &plain, &config, &error));
    REFUSED(MOE_ERR_CONFIG, "no MoE layer", moe_modular_init(&modular, &trainer, &error));
    moe_trainer_free(&trainer);
    IS(MOE_OK, moe_trainer_init(&trainer, &net, &config, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_modular_init(NULL, &trainer, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_modular_init(&modular, NULL, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_modular_init(&modular, &none, &error));
    CHECK(modular.memory == NULL);
    net.allocator = test_allocator(&heap, 1);
    REFUSED(MOE_ERR_MEMORY, "no memory for a workspace", moe_modular_init(&modular, &trainer, &error));
    net.allocator = usual;
    CHECK(modular.memory == NULL);
    IS(MOE_OK, moe_modular_init(&modular, &trainer, &error));
    refuse_modular_steps(&trainer, &modular, &empty);
    moe_modular_free(&modular);
    moe_trainer_free(&trainer);
    /* Criteria of the classical mixture are none of it. */
    config.criterion = MOE_CRITERION_EXPECTATION;
    {
        moe_net classical;
        moe_layer_config c = layer_config("select=dense weight=raw expert=linear d_ff=0 d_out=3");
        IS(MOE_OK, moe_net_init(&classical, WIDTH, MOE_KERNELS_AUTO, NULL));
        classical.mixture_losses = moe_classic_losses();
        c.router.select = MOE_SELECT_SAMPLE;
        c.router.top_k = 1;
        c.router.loss_distill = real(1);
        c.router.weight = MOE_WEIGHT_RAW;
        (void)moe_net_mixture(&classical, &c);
        IS(MOE_OK, moe_net_build(&classical, 1, 1, &error));
        REFUSED(MOE_ERR_CONFIG, "criterion", moe_trainer_init(&trainer, &classical, &config, &error));
        moe_net_free(&classical);
    }
    memset(&error, 0, sizeof error);
    moe_net_free(&net);
    moe_net_free(&plain);
}

/* ---- the hierarchical mixture ---- */

static void test_hme(void) {
    moe_hme hme;
    moe_hme_config config;
    moe_data data = samples();
    moe_real targets[TOKENS * 2], huge[TOKENS * WIDTH], answer[TOKENS * 2];
    double h[TOKENS * 4], likelihood = 77, *kept;
    size_t i;
    memset(&hme, 0, sizeof hme);
    memset(&config, 0, sizeof config);
    for (i = 0; i < TOKENS * 2; i++) targets[i] = real((double)i / 10);
    for (i = 0; i < TOKENS * WIDTH; i++) huge[i] = sizeof(moe_real) == 4 ? real(3e38) : real(1e140);
    data.targets = targets;
    config.d_in = WIDTH;
    config.d_out = 2;
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_hme_create(NULL, &config, 1, NULL, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_hme_create(&hme, NULL, 1, NULL, &error));
    IS(MOE_ERR_STATE, moe_hme_predict(&hme, TOKENS, x, answer, &error));
    IS(MOE_ERR_STATE, moe_hme_em(&hme, &data, h, &likelihood, &error));
    IS(MOE_ERR_STATE, moe_hme_gradient(&hme, &data, real(0.1), h, &likelihood, &error));
    IS(MOE_ERR_STATE, moe_hme_log_likelihood(&hme, &data, &likelihood, &error));
    memset(&error, 0, sizeof error);
    moe_hme_free(NULL);
    moe_hme_free(&hme);
    IS(MOE_OK, moe_hme_create(&hme, &config, 1, NULL, &error));
    kept = (double *)grab(1, hme.n_parameters * sizeof *kept);
    memcpy(kept, hme.parameters, hme.n_parameters * sizeof *kept);
    CHECK(moe_hme_gradient(&hme, &data, real(HUGE_VAL), h, &likelihood, &error) != MOE_OK);
    CHECK(moe_hme_gradient(&hme, NULL, real(0.1), h, &likelihood, &error) == MOE_ERR_ARGUMENT);
    CHECK(moe_hme_gradient(&hme, &data, real(0.1), NULL, &likelihood, &error) == MOE_ERR_ARGUMENT);
    CHECK(moe_hme_em(&hme, &data, NULL, &likelihood, &error) == MOE_ERR_ARGUMENT);
    CHECK(moe_hme_log_likelihood(&hme, &data, NULL, &error) == MOE_ERR_ARGUMENT);
    CHECK(moe_hme_predict(&hme, TOKENS, NULL, answer, &error) == MOE_ERR_ARGUMENT);
    CHECK(moe_hme_predict(&hme, TOKENS, x, NULL, &error) == MOE_ERR_ARGUMENT);
    memset(&error, 0, sizeof error);
    data.x = huge;
    for (i = 0; i < hme.all; i++) hme.variances[i] = 1e-300; /* a gradient that no double holds */
    REFUSED(MOE_ERR_NONFINITE, "rate", moe_hme_gradient(&hme, &data, real(0.1), h, &likelihood, &error));
    for (i = 0; i < hme.n_parameters; i++) hme.parameters[i] = i % 2 ? 1e300 : -1e300; /* sums that are none */
    REFUSED(MOE_ERR_NONFINITE, "x[0] is too large", moe_hme_predict(&hme, TOKENS, huge, answer, &error));
    REFUSED(MOE_ERR_NONFINITE, "log-likelihood", moe_hme_log_likelihood(&hme, &data, &likelihood, &error));
    CHECK(likelihood >= 77 && likelihood <= 77);
    memcpy(hme.parameters, kept, hme.n_parameters * sizeof *kept);
    data.n = 0;
    IS(MOE_OK, moe_hme_log_likelihood(&hme, &data, &likelihood, &error));
    CHECK(likelihood >= 0 && likelihood <= 0);
    free(kept);
    moe_hme_free(&hme);
    moe_hme_free(&hme);
}

/* ---- files ---- */

static moe_status no_bytes(void *ctx, const void *bytes, size_t n) {
    (void)ctx;
    (void)bytes;
    (void)n;
    return MOE_ERR_IO;
}

static void refuse_metadata(moe_stream *full) {
    moe_metadata entry;
    char *text;
    size_t length;
    /* A header that is longer than the format allows: a value of 100 million bytes. */
    length = 100000000;
    text = (char *)malloc(length + 1);
    if (text != NULL) {
        memset(text, 'a', length);
        text[length] = '\0';
        entry.key = "k";
        entry.value = text;
        REFUSED(MOE_ERR_ARGUMENT, "allowed are 100000000", moe_file_write(full, NULL, 0, &entry, 1, NULL, &error));
        free(text);
    }
    entry.key = NULL;
    entry.value = "v";
    REFUSED(MOE_ERR_ARGUMENT, "", moe_file_write(full, NULL, 0, &entry, 1, NULL, &error));
    entry.key = "k";
    entry.value = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "", moe_file_write(full, NULL, 0, &entry, 1, NULL, &error));
    entry.key = "\xff";
    entry.value = "v";
    REFUSED(MOE_ERR_ARGUMENT, "", moe_file_write(full, NULL, 0, &entry, 1, NULL, &error));
    entry.key = "k";
    entry.value = "\xc3";
    REFUSED(MOE_ERR_ARGUMENT, "", moe_file_write(full, NULL, 0, &entry, 1, NULL, &error));
}

static void read_values(moe_buffer *buffer) {
    moe_file file;
    moe_file_tensor tensor, odd;
    moe_real values[4];
    int64_t whole[4];
    char room[8];
    size_t length;
    IS(MOE_OK, moe_file_open(&file, buffer->data, buffer->size, &error));
    REFUSED(MOE_ERR_ARGUMENT, "is NULL", moe_file_open(NULL, buffer->data, buffer->size, &error));
    IS(MOE_ERR_ARGUMENT, moe_file_next(NULL, &tensor));
    IS(MOE_ERR_ARGUMENT, moe_file_next(&file, NULL));
    IS(MOE_ERR_ARGUMENT, moe_file_find(NULL, "0.weight", &tensor));
    IS(MOE_ERR_ARGUMENT, moe_file_find(&file, NULL, &tensor));
    IS(MOE_ERR_ARGUMENT, moe_file_find(&file, "0.weight", NULL));
    IS(MOE_ERR_NOT_FOUND, moe_file_find(&file, "__metadata__", &tensor));
    IS(MOE_OK, moe_file_find(&file, "0.weight", &tensor));
    IS(MOE_ERR_ARGUMENT, moe_file_metadata(NULL, "moe", room, sizeof room, &length));
    IS(MOE_ERR_ARGUMENT, moe_file_metadata(&file, NULL, room, sizeof room, &length));
    IS(MOE_ERR_NOT_FOUND, moe_file_metadata(&file, "none", room, sizeof room, &length));
    IS(MOE_ERR_ARGUMENT, moe_file_values(NULL, 0, 1, values, NULL));
    IS(MOE_ERR_ARGUMENT, moe_file_values(&tensor, 0, 1, NULL, NULL));
    CHECK(moe_file_values(&tensor, tensor.count, 1, values, NULL) != MOE_OK);
    CHECK(moe_file_values(&tensor, 0, 1, NULL, whole) != MOE_OK); /* floats are no integers */
    IS(MOE_ERR_ARGUMENT, moe_file_values(NULL, 0, 1, NULL, whole));
    odd = tensor;
    odd.dtype = MOE_DTYPE_COUNT;
    IS(MOE_ERR_ARGUMENT, moe_file_values(&odd, 0, 1, values, NULL));
    odd.dtype = -1;
    IS(MOE_ERR_ARGUMENT, moe_file_values(&odd, 0, 1, values, NULL));
    odd = tensor;
    odd.data = NULL;
    IS(MOE_ERR_ARGUMENT, moe_file_values(&odd, 0, 1, values, NULL));
    odd = tensor;
    odd.bytes = 1; /* fewer bytes than numbers need */
    IS(MOE_ERR_ARGUMENT, moe_file_values(&odd, 0, 1, values, NULL));
}

/* Soft routing selects every expert for every token that is no padding. */
static void test_soft_selected(void) {
    static const unsigned char mask[TOKENS] = {1, 1, 0, 1, 0, 1};
    moe_layer layer = make_layer("select=soft slots=2", 0);
    moe_call call = call_of(TOKENS, 0);
    moe_layer_pass pass;
    size_t size = 0, i;
    void *work;
    call.mask = mask;
    IS(MOE_OK, moe_layer_work_size(&layer, TOKENS, 0, &size));
    work = grab(1, size);
    IS(MOE_OK, moe_layer_forward(&layer, &call, y, work, size, &pass));
    for (i = 0; i < TOKENS * EXPERTS; i++) CHECK(pass.routing.selected[i] == mask[i / EXPERTS]);
    free(work);
    moe_layer_free(&layer);
}

#ifndef MOE_NO_STDIO
/* A layer's kernels are those that it is read with; the bytes of its file lie in the allocator's
   memory too. */
static void test_layer_files(void) {
    moe_layer layer = make_layer("top_k=2", 0), loaded;
    moe_buffer buffer;
    test_heap heap;
    long calls[2];
    int turn;
    memset(&buffer, 0, sizeof buffer);
    IS(MOE_OK, moe_layer_save(&layer, "edges-test", &error));
    IS(MOE_OK, moe_file_read("edges-test", &buffer, &error));
    for (turn = 0; turn < 2; turn++) {
        const moe_allocator a = test_allocator(&heap, 0);
        if (turn == 0) IS(MOE_OK, moe_layer_load(&loaded, "edges-test", 0, MOE_KERNELS_C, &a, &error));
        else IS(MOE_OK, moe_layer_read(&loaded, buffer.data, buffer.size, 0, MOE_KERNELS_C, &a, &error));
        calls[turn] = heap.calls;
        CHECK(loaded.config.kernels == MOE_KERNELS_C && loaded.config.transport == NULL);
        moe_layer_free(&loaded);
        CHECK(heap.blocks == 0);
    }
    CHECK(calls[0] > calls[1] && remove("edges-test") == 0);
    moe_buffer_free(&buffer);
    moe_layer_free(&layer);
}
#endif

static void test_files(void) {
    moe_layer layer = make_layer("top_k=2", 0), read_layer;
    moe_net net = make_net("top_k=2", 1), raw = unbuilt("top_k=2"), read_net;
    moe_trainer none;
    moe_buffer buffer;
    moe_stream stream, full;
    memset(&none, 0, sizeof none);
    memset(&buffer, 0, sizeof buffer);
    memset(&full, 0, sizeof full);
    stream = moe_buffer_stream(&buffer);
    full.write = no_bytes;

    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_layer_write(NULL, &stream, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_layer_write(&layer, NULL, &error));
    REFUSED(MOE_ERR_IO, "", moe_layer_write(&layer, &full, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_net_write(NULL, &stream, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_net_write(&net, NULL, &error));
    REFUSED(MOE_ERR_STATE, "built", moe_net_write(&raw, &stream, &error));
    REFUSED(MOE_ERR_ARGUMENT, "trainer must not", moe_trainer_write(NULL, &stream, &error));
    REFUSED(MOE_ERR_STATE, "not made", moe_trainer_write(&none, &stream, &error));
    CHECK(buffer.size == 0);
#ifndef MOE_NO_STDIO
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_layer_save(NULL, "edges-test", &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_net_save(NULL, "edges-test", &error));
    REFUSED(MOE_ERR_STATE, "not made", moe_trainer_save(&none, "edges-test", &error));
    REFUSED(MOE_ERR_ARGUMENT, "trainer must", moe_trainer_load(NULL, "edges-test", &error));
    buffer.size = 1; /* one that is in use */
    REFUSED(MOE_ERR_ARGUMENT, "", moe_file_read("edges-test", &buffer, &error));
    buffer.size = 0;
    buffer.capacity = 1;
    REFUSED(MOE_ERR_ARGUMENT, "", moe_file_read("edges-test", &buffer, &error));
    buffer.capacity = 0;
    REFUSED(MOE_ERR_IO, "edges-test", moe_file_read("edges-test/none", &buffer, &error));
#endif
    IS(MOE_OK, moe_net_write(&net, &stream, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_net_read(NULL, buffer.data, buffer.size, 0, 0, NULL, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL",
            moe_layer_read(NULL, buffer.data, buffer.size, 0, MOE_KERNELS_AUTO, NULL, &error));
    REFUSED(MOE_ERR_STATE, "not made", moe_trainer_read(&none, buffer.data, buffer.size, &error));
    /* a network is no layer */
    CHECK(moe_layer_read(&read_layer, buffer.data, buffer.size, 0, MOE_KERNELS_AUTO, NULL, &error) != MOE_OK);
    CHECK(moe_net_read(&read_net, buffer.data, buffer.size / 2, 0, 0, NULL, &error) != MOE_OK);
    memset(&error, 0, sizeof error);
    read_values(&buffer);
    moe_buffer_free(&buffer);
    moe_buffer_free(NULL);

    refuse_metadata(&full);
    moe_layer_free(&layer);
    moe_net_free(&net);
    moe_net_free(&raw);
}

/* ---- models ---- */

/* The word that a network must be refused with as a model of weights, and the status. */
typedef struct refused_net {
    const char *settings;
    int weights;
    moe_status status;
    const char *words;
} refused_net;

static const refused_net refused_nets[] = {
    {"select=given top_k=2", MOE_WEIGHTS_FLOAT, MOE_ERR_UNSUPPORTED, "select = given"},
    {"select=hash table_size=9 top_k=2", MOE_WEIGHTS_FLOAT, MOE_ERR_UNSUPPORTED, "select = hash"},
    {"select=expert_choice", MOE_WEIGHTS_FLOAT, MOE_ERR_UNSUPPORTED, "module 1"},
    {"select=hash table_size=9 top_k=2", MOE_WEIGHTS_INT8, MOE_ERR_UNSUPPORTED, "select = hash"},
    {"score=dselect top_k=2", MOE_WEIGHTS_INT8, MOE_ERR_UNSUPPORTED, "score = dselect"},
    {"d_latent=3 add_input=1 top_k=2", MOE_WEIGHTS_INT8, MOE_ERR_UNSUPPORTED, "add_input = 1 with d_latent = 3"},
    {"score=competition logit_cap=3 top_k=2", MOE_WEIGHTS_INT8, MOE_ERR_UNSUPPORTED, "logit_cap with score = comp"},
    {"refine=similarity causal=1 top_k=2", MOE_WEIGHTS_INT8, MOE_ERR_UNSUPPORTED, "refine = similarity"},
};

static moe_net custom_net(int select) {
    moe_net net = unbuilt(NULL);
    moe_layer_config c = layer_config("top_k=2");
    if (select == 1) c.router.select = MOE_SELECT_CUSTOM;
    if (select == 0) c.router.score = MOE_SCORE_CUSTOM;
    if (select == 2) {
        c.router.switch_at = 5;
        c.router.switch_from = MOE_SELECT_CUSTOM;
    }
    moe_net_free(&net);
    CHECK(moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL) == MOE_OK);
    CHECK(moe_net_mixture(&net, &c) == MOE_OK);
    CHECK(moe_net_build(&net, 0, 1, &error) == MOE_OK);
    return net;
}

static void refuse_nets(moe_net *net, moe_built_model *built, moe_model_config *config) {
    size_t i;
    config->weights = MOE_WEIGHTS_FLOAT;
    if (MOE_REAL_IS_DOUBLE)
        REFUSED(MOE_ERR_UNSUPPORTED, "MOE_REAL is double", moe_model_create(built, net, config, &error));
    for (i = 0; i < 2; i++) { /* a weight that is none, for both kinds; as the network's tensor and as the mixture's */
        const moe_tensor *tensor = &net->tensors[i == 0 ? 0 : 2];
        moe_real saved = tensor->data[0];
        tensor->data[0] = real(HUGE_VAL);
        config->weights = MOE_WEIGHTS_INT8;
        REFUSED(MOE_ERR_NONFINITE, tensor->name, moe_model_create(built, net, config, &error));
        config->weights = MOE_WEIGHTS_FLOAT;
        if (!MOE_REAL_IS_DOUBLE)
            REFUSED(MOE_ERR_NONFINITE, tensor->name, moe_model_create(built, net, config, &error));
        tensor->data[0] = saved;
    }
    for (i = 0; i < sizeof refused_nets / sizeof *refused_nets; i++) {
        moe_net other = make_net(refused_nets[i].settings, 0);
        config->weights = refused_nets[i].weights;
        if (config->weights != MOE_WEIGHTS_FLOAT || !MOE_REAL_IS_DOUBLE)
            if (!REFUSED(refused_nets[i].status, refused_nets[i].words,
                         moe_model_create(built, &other, config, &error)))
                printf("    %s\n", refused_nets[i].settings);
        moe_net_free(&other);
    }
    config->weights = MOE_WEIGHTS_FLOAT;
    for (i = 0; i < 3 && !MOE_REAL_IS_DOUBLE; i++) {
        moe_net other = custom_net((int)i);
        CHECK(moe_model_create(built, &other, config, &error) == MOE_ERR_UNSUPPORTED);
        moe_net_free(&other);
    }
    memset(&error, 0, sizeof error);
}

static void test_models_refused(void) {
    moe_net net = make_net("top_k=2", 0), raw = unbuilt("top_k=2");
    moe_built_model built, before;
    moe_model_config config;
    moe_data data = samples(), bad;
    memset(&built, 0, sizeof built);
    memset(&config, 0, sizeof config);
    before = built;
    config.calibration = &data;
    REFUSED(MOE_ERR_ARGUMENT, "built must not be NULL", moe_model_create(NULL, &net, &config, &error));
    REFUSED(MOE_ERR_ARGUMENT, "net:", moe_model_create(&built, NULL, &config, &error));
    REFUSED(MOE_ERR_STATE, "net:", moe_model_create(&built, &raw, &config, &error));
    config.weights = MOE_WEIGHTS_COUNT;
    REFUSED(MOE_ERR_CONFIG, "weights", moe_model_create(&built, &net, &config, &error));
    config.weights = -1;
    REFUSED(MOE_ERR_CONFIG, "weights", moe_model_create(&built, &net, &config, &error));
    config.weights = MOE_WEIGHTS_FLOAT;
    config.loader = 1;
    REFUSED(MOE_ERR_UNSUPPORTED, "loader = 1", moe_model_create(&built, &net, &config, &error));
    config.loader = 2;
    REFUSED(MOE_ERR_CONFIG, "loader = 2", moe_model_create(&built, &net, &config, &error));
    config.loader = 0;
    config.weights = MOE_WEIGHTS_INT8;
    config.calibration = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "calibration", moe_model_create(&built, &net, &config, &error));
    config.calibration = &bad;
    bad = data;
    bad.n = 0;
    REFUSED(MOE_ERR_ARGUMENT, "calibration", moe_model_create(&built, &net, &config, &error));
    bad = data;
    bad.length = 4;
    REFUSED(MOE_ERR_ARGUMENT, "multiple of length", moe_model_create(&built, &net, &config, &error));
    bad = data;
    bad.x = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "x must not be NULL", moe_model_create(&built, &net, &config, &error));
    config.calibration = &data;
    refuse_nets(&net, &built, &config);
    CHECK(memcmp(&built, &before, sizeof built) == 0);
    moe_model_free(NULL);
    moe_model_free(&built);
    moe_net_free(&net);
    moe_net_free(&raw);
}

static void refuse_names(moe_built_model *built, moe_buffer *text, moe_stream *stream, moe_stream *full) {
    size_t i;
    static const char * const wrong[] = {
        "",  "1a", "a-b", "a b", "int", "class",    "a{", "explicit", "typename", "export", "xor", "_Bool",
        "@", "[",  "`",   "a/",  "a:",  "\xc3\xa4", "a_name_that_is_longer_than_all_names_of_tensors_can_be",
        "typeof", "typeof_unqual", "__asm__", "moe", "mOE", "moe_model", "Moe_model", "moei_x"};
    static const char * const right[] = {"a", "_", "Zz_09aAyY", "intern", "clas", "s", "moein", "my_moe"};
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_export_c(NULL, "model", stream, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_export_c(built, NULL, stream, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_export_c(built, "model", NULL, &error));
    REFUSED(MOE_ERR_IO, "", moe_export_c(built, "model", full, &error));
    full->write = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_export_c(built, "model", full, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_export_experts(NULL, stream, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_export_experts(built, NULL, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_export_experts(built, full, &error));
    REFUSED(MOE_ERR_STATE, "loader = 1", moe_export_experts(built, stream, &error));
    for (i = 0; i < sizeof wrong / sizeof *wrong; i++)
        if (!REFUSED(MOE_ERR_ARGUMENT, "identifier", moe_export_c(built, wrong[i], stream, &error)))
            printf("    %s\n", wrong[i]);
    CHECK(text->size == 0);
    for (i = 0; i < sizeof right / sizeof *right; i++) {
        text->size = 0;
        IS(MOE_OK, moe_export_c(built, right[i], stream, &error));
        if (i == 2) CHECK(text->size > 1000 && strstr((const char *)text->data, "ZZ_09AAYY_SCRATCH") != NULL);
    }
}

static void check_choices(moe_built_model *built, unsigned char *scratch) {
    moe_choice choices[EXPERTS], unset[EXPERTS];
    size_t count = 77;
    begin_sequence(scratch, built->model.scratch_size);
    IS(MOE_ERR_ARGUMENT, moe_infer_choices(NULL, 0, scratch, choices, EXPERTS, &count));
    IS(MOE_ERR_ARGUMENT, moe_infer_choices(&built->model, 0, NULL, choices, EXPERTS, &count));
    IS(MOE_ERR_ARGUMENT, moe_infer_choices(&built->model, 0, scratch, NULL, EXPERTS, &count));
    IS(MOE_ERR_ARGUMENT, moe_infer_choices(&built->model, 0, scratch, choices, EXPERTS, NULL));
    IS(MOE_ERR_NOT_FOUND, moe_infer_choices(&built->model, 1, scratch, choices, EXPERTS, &count));
    count = 0;
    IS(MOE_OK, moe_infer_choices(&built->model, 0, scratch, NULL, 0, &count));
    CHECK(count == 2);
    memset(unset, 5, sizeof unset);
    memcpy(choices, unset, sizeof unset);
    IS(MOE_OK, moe_infer_choices(&built->model, 0, scratch, choices, 1, &count));
    CHECK(count == 2 && choices[0].expert >= 0 && choices[0].expert < EXPERTS &&
          memcmp(&choices[1], &unset[1], sizeof choices[1]) == 0);
    IS(MOE_OK, moe_infer_choices(&built->model, 0, scratch, choices, EXPERTS, &count));
    CHECK(choices[0].weight == INT32_MAX && choices[1].expert != choices[0].expert); /* 1000000 p is beyond its range */
}

static void refuse_inference(int weights, moe_built_model *built, unsigned char *scratch, const void *input,
                             void *output) {
    IS(MOE_ERR_ARGUMENT, moe_infer(NULL, NULL, input, output, scratch, built->model.scratch_size));
    IS(MOE_ERR_ARGUMENT, moe_infer(&built->model, NULL, NULL, output, scratch, built->model.scratch_size));
    IS(MOE_ERR_ARGUMENT, moe_infer(&built->model, NULL, input, NULL, scratch, built->model.scratch_size));
    IS(MOE_ERR_ARGUMENT, moe_infer(&built->model, NULL, input, output, NULL, built->model.scratch_size));
    IS(MOE_ERR_SPACE, moe_infer(&built->model, NULL, input, output, scratch, built->model.scratch_size - 1));
    IS(MOE_OK, moe_infer(&built->model, NULL, input, output, scratch, built->model.scratch_size));
    if (weights != MOE_WEIGHTS_FLOAT) { /* weights that are elsewhere need a loader that fetches them */
        moe_model lacks = built->model;
        moe_loader loader;
        memset(&loader, 0, sizeof loader);
        lacks.experts = NULL;
        IS(MOE_ERR_UNSUPPORTED, moe_infer(&lacks, NULL, input, output, scratch, lacks.scratch_size));
        IS(MOE_ERR_UNSUPPORTED, moe_infer(&lacks, &loader, input, output, scratch, lacks.scratch_size));
    }
    if (built->model.net != NULL) { /* a model that asks for less than its network needs */
        moe_model small = built->model;
        small.scratch_size /= 2;
        IS(MOE_ERR_SPACE, moe_infer(&small, NULL, input, output, scratch, small.scratch_size));
    }
}

/* What a model says of itself, and that it answers as its network. */
static void test_model_calls(int weights) {
    moe_net net = make_net("top_k=2 weight=raw scale=1000000 capacity_factor_eval=4 n_shared=1 d_shared=3", 0);
    moe_built_model built;
    moe_model_config config;
    moe_data data = samples();
    moe_buffer text;
    moe_stream stream, full;
    moe_choice choices[EXPERTS];
    unsigned char *scratch;
    int8_t levels[WIDTH];
    int16_t whole[CLASSES];
    moe_real answer[CLASSES];
    size_t count = 77;
    const void *input = weights == MOE_WEIGHTS_FLOAT ? (const void *)x : (const void *)levels;
    void *output = weights == MOE_WEIGHTS_FLOAT ? (void *)answer : (void *)whole;
    memset(&built, 0, sizeof built);
    memset(&config, 0, sizeof config);
    memset(&text, 0, sizeof text);
    memset(&full, 0, sizeof full);
    stream = moe_buffer_stream(&text);
    full.write = no_bytes;
    config.weights = weights;
    config.calibration = &data;
    config.same_bits = 1; /* a float model of a network asks for its memory */
    if (!CHECK(moe_model_create(&built, &net, &config, &error) == MOE_OK)) {
        printf("    %s\n", error.message);
        moe_net_free(&net);
        return;
    }
    moe_infer_levels(NULL, x, levels);
    moe_infer_levels(&built.model, NULL, levels);
    moe_infer_levels(&built.model, x, NULL);
    moe_infer_levels(&built.model, x, levels);
    scratch = (unsigned char *)grab(1, built.model.scratch_size);
    if (weights == MOE_WEIGHTS_FLOAT) { /* zeroed memory: nobody was chosen */
        IS(MOE_OK, moe_infer_choices(&built.model, 0, scratch, choices, EXPERTS, &count));
        CHECK(count == 0);
    }
    refuse_inference(weights, &built, scratch, input, output);
    check_choices(&built, scratch);
    built.model.version++;
    IS(MOE_ERR_UNSUPPORTED, moe_infer(&built.model, NULL, input, output, scratch, built.model.scratch_size));
    IS(MOE_ERR_UNSUPPORTED, moe_infer_choices(&built.model, 0, scratch, choices, EXPERTS, &count));
    REFUSED(MOE_ERR_ARGUMENT, "built", moe_export_c(&built, "model", &stream, &error));
    built.model.version--;

    refuse_names(&built, &text, &stream, &full);
    moe_buffer_free(&text);
    free(scratch);
    moe_model_free(&built);
    moe_model_free(&built);
    moe_net_free(&net);
}

/* The masks that a float model's header sets have what its network uses, and nothing else. */
static void test_masks(void) {
#define BIT(name) (1u << MOE_##name)
    static const struct {
        const char *settings, *mask;
        unsigned wanted;
    } rows[] = {
        {"top_k=2", "ACTS", BIT(ACT_SILU)},
        {"top_k=2", "EXTRAS", 0},
        {"top_k=2", "MODULES", BIT(MODULE_LINEAR) | BIT(MODULE_MIXTURE)},
        {"expert=mlp act=gelu", "ACTS", BIT(ACT_GELU)},
        {"expert=linear d_ff=0", "ACTS", 0},
        {"expert=mlp act=tanh n_shared=1 d_shared=3", "ACTS", BIT(ACT_TANH) | BIT(ACT_SILU)},
        {"gate=sigmoid expert=mlp act=relu", "ACTS", BIT(ACT_SIGMOID) | BIT(ACT_RELU)},
        {"gate=sigmoid", "GATES", BIT(GATE_SIGMOID)},
        {"score=mlp router_hidden=3 router_act=tanh expert=mlp act=relu", "ACTS", BIT(ACT_TANH) | BIT(ACT_RELU)},
        {"score=mlp router_hidden=3 router_act=tanh", "SCORES", BIT(SCORE_MLP)},
        {"drop_rule=gshard top_k=2", "EXTRAS", BIT(EXTRA_CAPACITY)},
        {"capacity_factor_eval=4", "EXTRAS", BIT(EXTRA_CAPACITY)},
        {"swiglu_limit=2", "EXTRAS", BIT(EXTRA_SHAPED)},
        {"schedule_steps=9 k_end=1 top_k=3", "EXTRAS", BIT(EXTRA_SCHEDULE)},
        {"switch_from=dense switch_at=3", "SELECTS", BIT(SELECT_DENSE) | BIT(SELECT_TOP_K)},
        {"select=top_p", "SELECTS", BIT(SELECT_TOP_P)},
        {"weight=raw", "WEIGHTS", BIT(WEIGHT_RAW)},
        {"weight=raw", "REFINES", BIT(REFINE_NONE)}};
#undef BIT
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows && !MOE_REAL_IS_DOUBLE; i++) {
        moe_net net = make_net(rows[i].settings, 0);
        moe_built_model built;
        moe_model_config config;
        moe_buffer text;
        moe_stream stream;
        char line[60];
        memset(&built, 0, sizeof built);
        memset(&config, 0, sizeof config);
        memset(&text, 0, sizeof text);
        stream = moe_buffer_stream(&text);
        config.weights = MOE_WEIGHTS_FLOAT;
        config.same_bits = 1;
        if (!CHECK(moe_model_create(&built, &net, &config, &error) == MOE_OK))
            printf("    %s: %s\n", rows[i].settings, error.message);
        else {
            CHECK(built.model.weights_size == moe_net_parameter_count(&net, NULL) * sizeof(moe_real));
            IS(MOE_OK, moe_export_c(&built, "model", &stream, &error));
            IS(MOE_OK, stream.write(stream.ctx, "", 1));
            sprintf(line, "#define MOE_KEEP_%s %u\n", rows[i].mask, rows[i].wanted);
            if (!CHECK(strstr((const char *)text.data, line) != NULL)) printf("    %s: %s", rows[i].settings, line);
        }
        moe_buffer_free(&text);
        moe_model_free(&built);
        moe_net_free(&net);
    }
}

/* Nets of which nothing is left but the inputs, or whose last numbers are an earlier module's. */
static void test_small_models(void) {
    moe_net net;
    moe_built_model built;
    moe_model_config config;
    moe_data data = samples();
    int8_t levels[WIDTH];
    int16_t whole[WIDTH];
    unsigned char *scratch;
    size_t i;
    memset(&built, 0, sizeof built);
    memset(&config, 0, sizeof config);
    config.weights = MOE_WEIGHTS_INT8;
    config.calibration = &data;
    CHECK(moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL) == MOE_OK);
    CHECK(moe_net_dropout(&net, real(0.5)) == MOE_OK);
    CHECK(moe_net_build(&net, 0, 1, &error) == MOE_OK);
    if (CHECK(moe_model_create(&built, &net, &config, &error) == MOE_OK)) {
        scratch = (unsigned char *)grab(1, built.model.scratch_size);
        moe_infer_levels(&built.model, x, levels);
        IS(MOE_OK, moe_infer(&built.model, NULL, levels, whole, scratch, built.model.scratch_size));
        for (i = 0; i < WIDTH; i++)
            CHECK(fabs(whole[i] * (double)built.model.output_scale - (double)x[i]) <=
                  (double)built.model.input_scale * 0.51);
        free(scratch);
        moe_model_free(&built);
    } else printf("    %s\n", error.message);
    moe_net_free(&net);
}

/* The integer model of a net of one attention; 1 if there is one. */
static int attention_model(const moe_attention_config *attention, moe_buffer *weights) {
    moe_net net;
    moe_built_model built;
    moe_model_config config;
    moe_data data = samples();
    moe_stream stream = moe_buffer_stream(weights);
    int made;
    memset(&config, 0, sizeof config);
    config.weights = MOE_WEIGHTS_INT8;
    config.calibration = &data;
    config.length = data.length = TOKENS;
    CHECK(moe_net_init(&net, WIDTH, MOE_KERNELS_AUTO, NULL) == MOE_OK);
    CHECK(moe_net_attention(&net, attention) == MOE_OK);
    CHECK(moe_net_build(&net, 0, 1, &error) == MOE_OK);
    made = moe_model_create(&built, &net, &config, &error) == MOE_OK;
    if (made) CHECK(moe_export_c(&built, "attention", &stream, &error) == MOE_OK);
    if (made) moe_model_free(&built);
    moe_net_free(&net);
    return made;
}

/* Attention whose settings say what 0 means has the integer model of 0; others have none. */
static void test_attention_models(void) {
    moe_attention_config attention;
    moe_buffer plain, same, none;
    memset(&attention, 0, sizeof attention);
    memset(&plain, 0, sizeof plain);
    same = none = plain;
    attention.heads = 2;
    attention.rotary = 1;
    CHECK(attention_model(&attention, &plain));
    attention.kv_heads = 2;
    attention.d_value = attention.rotary_dims = WIDTH / 2;
    attention.eps = real(1e-3);
    if (CHECK(attention_model(&attention, &same)))
        CHECK(plain.size == same.size && memcmp(plain.data, same.data, same.size) == 0);
    else printf("    %s\n", error.message);
    attention.kv_heads = 1;
    CHECK(!attention_model(&attention, &none) && strstr(error.message, "kv_heads has no integer form") != NULL);
    attention.kv_heads = 0;
    attention.d_value--;
    CHECK(!attention_model(&attention, &none) && strstr(error.message, "d_value has no integer form") != NULL);
    attention.d_value = 0;
    attention.rotary_dims = 2;
    CHECK(!attention_model(&attention, &none) && strstr(error.message, "rotary_dims has no integer form") != NULL);
    memset(&error, 0, sizeof error);
    moe_buffer_free(&plain);
    moe_buffer_free(&same);
    moe_buffer_free(&none);
}

/* ---- sizes ---- */

static int power(moe_rng *rng, int most) {
    /* 1 to 2^most, most often a power of 2, every other time one of the largest */
    const int value =
        1 << (moe_rng_below(rng, 2) ? moe_rng_below(rng, (uint64_t)most + 1) : (uint64_t)most - moe_rng_below(rng, 2));
    return moe_rng_below(rng, 4) == 0 ? 1 + (int)moe_rng_below(rng, (uint64_t)value) : value;
}

/* A size is exact or MOE_ERR_OVERFLOW; what holds numbers is at least as large as they. */
static void sized(moe_status status, const size_t *size, double least, const char *what) {
    const double bytes = (double)*size;
    if (!CHECK(status == MOE_ERR_OVERFLOW || (status == MOE_OK && bytes >= least), what))
        printf("    %s, %.0f bytes, at least %.0f\n", moe_status_text(status), bytes, least);
}

/* Layers without tensors, up to widths and numbers of experts whose tensors no machine holds. */
static void test_layer_sizes(void) {
    static const char *const kinds[] = {"expert=swiglu", "expert=mlp act=relu", "expert=factorised", "expert=linear",
                                        "n_shared=3 d_shared=1000000"};
    static const char *const routers[] = {"top_k=2",
                                          "select=soft slots=3",
                                          "refine=similarity",
                                          "refine=attention attention_heads=all heads=64",
                                          "score=competition",
                                          "score=cosine cosine_dim=5",
                                          "select=hash table_size=9",
                                          "capacity_factor=1",
                                          "loss_orthogonal=1 top_k=2",
                                          "score=mlp router_hidden=7"};
    moe_rng rng;
    int i, overflows = 0, fits = 0;
    moe_rng_seed(&rng, 11);
    for (i = 0; i < 6000; i++) {
        moe_layer_config c;
        moe_layer layer;
        const size_t n = (size_t)power(&rng, 30);
        const int type = (int)moe_rng_below(&rng, MOE_TYPE_COUNT), training = (int)moe_rng_below(&rng, 2);
        size_t bytes = 0;
        moe_status status;
        memset(&c, 0, sizeof c);
        memset(&layer, 0, sizeof layer);
        CHECK(moe_fields_apply(moe_layer_fields(), &c, kinds[i % 5], &error) == MOE_OK);
        CHECK(moe_fields_apply(moe_layer_fields(), &c, routers[moe_rng_below(&rng, 10)], &error) == MOE_OK);
        c.router.d_model = power(&rng, 24);
        c.router.n_experts = power(&rng, 16);
        if (c.expert != MOE_EXPERT_LINEAR) c.d_ff = power(&rng, 24);
        if (c.expert == MOE_EXPERT_FACTORISED) c.d_low = power(&rng, 24);
        if (c.router.top_k > c.router.n_experts) c.router.n_experts = c.router.top_k;
        status = moe_layer_init(&layer, &c, &error);
        if (status == MOE_ERR_OVERFLOW) overflows++;
        if (!CHECK(status == MOE_OK || status == MOE_ERR_OVERFLOW || status == MOE_ERR_CONFIG, "moe_layer_init"))
            printf("    %s\n", error.message);
        if (status != MOE_OK) continue;
        fits++;
        status = moe_layer_work_size(&layer, n, training, &bytes);
        sized(status, &bytes, (double)n * sizeof(moe_real), "moe_layer_work_size");
        overflows += status == MOE_ERR_OVERFLOW;
        sized(moe_route_size(&layer.router, n, training, &bytes), &bytes, (double)n * 4, "moe_route_size");
        status = moe_layer_pack_size(&layer, type, 0, &bytes, NULL);
        if (status != MOE_ERR_UNSUPPORTED)
            sized(status, &bytes, (double)c.router.n_experts * c.router.d_model / 2, "moe_layer_pack_size");
        status = moe_layer_pack_size(&layer, type, n, NULL, &bytes);
        if (status != MOE_ERR_UNSUPPORTED) sized(status, &bytes, 0, "moe_layer_pack_size: work");
        if (moe_layer_parameter_count(&layer, NULL) > 10000000) {
            /* more than is tried to take here: without the end of memory it would be taken */
            moe_arena arena = {NULL, 0, 0};
            const moe_allocator none = moe_arena_allocator(&arena);
            moe_layer kept = layer;
            status = moe_layer_create(&layer, &c, training, 1, &none, &error);
            if (!CHECK((status == MOE_ERR_MEMORY || status == MOE_ERR_OVERFLOW ||
                        (training && status == MOE_ERR_CONFIG)) &&
                       memcmp(&kept, &layer, sizeof kept) == 0))
                printf("    %s: %s\n", moe_status_text(status), error.message);
            overflows += status == MOE_ERR_OVERFLOW;
        }
    }
    if (!CHECK(overflows > 20 && fits > 1000)) printf("    %d overflows, %d layers\n", overflows, fits);
}

static void test_net_sizes(void) {
    moe_rng rng;
    int i, overflows = 0, fits = 0;
    moe_rng_seed(&rng, 12);
    for (i = 0; i < 400; i++) {
        moe_net net;
        moe_arena arena = {NULL, 0, 0};
        moe_layer_config c;
        moe_attention_config a;
        unsigned char memory[40000];
        moe_allocator little;
        const int kind = i % 4;
        moe_status status;
        memset(&c, 0, sizeof c);
        memset(&a, 0, sizeof a);
        c.d_ff = power(&rng, 24);
        c.router.n_experts = power(&rng, 16);
        c.router.top_k = 1;
        c.router.weight = MOE_WEIGHT_RAW;
        a.heads = power(&rng, 12);
        a.d_head = power(&rng, 24);
        arena.base = memory;
        arena.size = sizeof memory; /* room for the list of modules, not for tensors */
        little = moe_arena_allocator(&arena);
        CHECK(moe_net_init(&net, power(&rng, 24), MOE_KERNELS_C, &little) == MOE_OK);
        status = kind == 0   ? moe_net_linear(&net, power(&rng, 24))
                 : kind == 1 ? moe_net_attention(&net, &a)
                 : kind == 2 ? moe_net_mixture(&net, &c)
                             : moe_net_feed_forward(&net, NULL);
        if (status == MOE_OK) status = moe_net_linear(&net, power(&rng, 24));
        if (status == MOE_OK) status = moe_net_build(&net, i / 4 % 2, 1, &error);
        if (!CHECK(status == MOE_OK || status == MOE_ERR_OVERFLOW || status == MOE_ERR_MEMORY ||
                       status == MOE_ERR_CONFIG,
                   "moe_net_build"))
            printf("    %s\n", error.message);
        overflows += status == MOE_ERR_OVERFLOW;
        fits += status == MOE_OK;
        if (status != MOE_OK) CHECK(net.memory == NULL && !net.built);
        if (status == MOE_OK) {
            size_t bytes = 0, n = (size_t)power(&rng, 30);
            sized(moe_net_work_size(&net, n, 1, &bytes), &bytes, (double)n * sizeof(moe_real), "moe_net_work_size");
            sized(moe_net_decode_size(&net, n, 1, &bytes, NULL, NULL), &bytes, 0, "moe_net_decode_size");
            sized(moe_net_decode_size(&net, n, n, NULL, &bytes, NULL), &bytes, 0, "moe_net_decode_size: work");
        }
        moe_net_free(&net);
    }
    if (!CHECK(overflows > 3 && fits > 3)) printf("    %d overflows, %d nets\n", overflows, fits);
}

/* ---- allocations of models ---- */

/* Nets whose making takes other ways than those of tests/unit/inference.c. */
static const char *const model_rows[] = {"score=attentive top_k=2",
                                         "score=competition top_k=2",
                                         "score=norm norm_order=linf norm_node=output top_k=2",
                                         "score=norm norm_order=l1 norm_node=gate top_k=2",
                                         "score=norm norm_node=down expert=factorised d_low=3 top_k=2",
                                         "score=grap top_k=2",
                                         "score=grap grap_cosine=1 top_k=2",
                                         "score=cosine cosine_dim=5 top_k=2",
                                         "score=cosine top_k=2",
                                         "score=mlp router_hidden=5 router_act=tanh top_k=2",
                                         "input=scaled_rms top_k=2",
                                         "apply_to=input top_k=2",
                                         "expert_scale=1 weight=raw top_k=2",
                                         "select=threshold threshold=0.2 threshold_learned=1 weight=raw",
                                         "select=grouped_top_k groups=2 groups_kept=1 top_k=1 weight=raw",
                                         "n_shared=1 d_shared=3 shared_sigmoid=1 top_k=2",
                                         "add_input=1 top_k=2 d_out=8",
                                         "expert=mlp act=gelu top_k=2",
                                         "expert=linear d_ff=0 top_k=2",
                                         "expert_bias=1 swiglu_alpha=1.702 swiglu_limit=7 swiglu_offset=1 top_k=2",
                                         "gate=sigmoid selection_bias=1 top_k=2",
                                         "gate=sqrt_softplus top_k=2",
                                         "weight=p_norm weight_p=2 top_k=2",
                                         "weight=sparsemixer top_k=2",
                                         "select=top_p top_p=0.7",
                                         "input=adaptive_clustering ac_mode=running top_k=2"};

static void test_model_memory(void) {
    moe_data data = samples();
    size_t row, made_models = 0;
    for (row = 0; row < sizeof model_rows / sizeof *model_rows; row++) {
        moe_net net;
        moe_layer_config first = layer_config("top_k=2"), c = layer_config(model_rows[row]);
        moe_model_config config;
        moe_built_model built;
        moe_attention_config a;
        test_heap heap;
        const size_t length = row % 3 == 0 ? 3 : 0;
        memset(&config, 0, sizeof config);
        memset(&built, 0, sizeof built);
        memset(&a, 0, sizeof a);
        CHECK(moe_net_init(&net, WIDTH, MOE_KERNELS_C, NULL) == MOE_OK);
        a.heads = 2;
        a.rotary = row % 2 == 0;
        if (length > 0) CHECK(moe_net_attention(&net, &a) == MOE_OK && moe_net_layer_norm(&net) == MOE_OK);
        CHECK(moe_net_mixture(&net, &first) == MOE_OK);
        CHECK(moe_net_residual(&net, 1) == MOE_OK);
        if (!CHECK(moe_net_mixture(&net, &c) == MOE_OK && moe_net_linear(&net, CLASSES) == MOE_OK &&
                   moe_net_build(&net, 0, 9, &error) == MOE_OK))
            printf("    %s: %s\n", model_rows[row], net.error.message);
        data.length = config.length = length;
        config.calibration = &data;
        config.weights = row % 2 ? MOE_WEIGHTS_INT8 : MOE_WEIGHTS_INT4;
        config.loader = row % 4 == 1;
        config.allocator = test_allocator(&heap, 0);
        for (heap.fail_at = 1; net.built && heap.fail_at < 400; heap.fail_at++) {
            moe_status status;
            heap.calls = 0;
            status = moe_model_create(&built, &net, &config, &error);
            if (status == MOE_OK) {
                moe_model_free(&built);
                memset(&built, 0, sizeof built);
                CHECK(heap.blocks == 0);
                if (heap.calls < heap.fail_at) break;
                continue; /* a buffer that cannot double tries less */
            }
            CHECK(heap.blocks == 0 && built.ops == NULL);
            if (heap.calls < heap.fail_at) {
                printf("    %s: %s\n", model_rows[row], error.message);
                break;
            }
            CHECK(status == MOE_ERR_MEMORY);
        }
        made_models += heap.calls < heap.fail_at && heap.fail_at > 10;
        moe_net_free(&net);
    }
    CHECK(made_models >= sizeof model_rows / sizeof *model_rows);
}

/* ---- rarely used options ---- */

/* Settings that clash, and the words of the refusal. */
static void test_clashes(void) {
    static const char *const rows[][2] = {{"score=attentive router_hidden=5 top_k=2", "router_hidden = 5"},
                                          {"n_zero=1 selection_bias=1 bias_rate=0.1 bias_real=3 top_k=2",
                                           "bias_real = 3: must be at most top_k = 2"},
                                          {"select=soft scale=2", "scale = 2"}};
    moe_net net;
    moe_attention_config a;
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        const moe_layer_config c = layer_config(rows[i][0]);
        REFUSED(MOE_ERR_CONFIG, rows[i][1], moe_layer_check(&c, NULL, &error));
    }
    {
        const moe_layer_config c = layer_config("top_k=5");
        REFUSED(MOE_ERR_CONFIG, "top_k = 5", moe_router_check_training(&c.router, &error));
    }
    memset(&a, 0, sizeof a);
    a.rotary_base = real(100);
    CHECK(moe_net_init(&net, WIDTH, MOE_KERNELS_C, NULL) == MOE_OK && moe_net_attention(&net, &a) == MOE_ERR_CONFIG);
    REFUSED(MOE_ERR_CONFIG, "rotary_base = 100", moe_net_build(&net, 0, 1, &error));
    moe_net_free(&net);
}

static void refuse_modular_nets(void) {
    static const char *const rows[] = {"scale=2",
                                       "scale=0.5",
                                       "expert_scale=1",
                                       "capacity_factor=1",
                                       "capacity_factor_eval=1",
                                       "drop_capacity=1",
                                       "capacity_bound=first",
                                       "drop_rule=gshard",
                                       "apply_to=input",
                                       "n_shared=1 d_shared=3",
                                       "expert_temperature=2 gate=sigmoid",
                                       "expert_temperature=2 refine=similarity",
                                       ""};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe_net net;
        moe_trainer trainer;
        moe_train_config config;
        moe_layer_config c = layer_config("select=dense weight=raw expert=linear d_out=3");
        moe_status status;
        memset(&config, 0, sizeof config);
        c.d_ff = 0;
        config.criterion = MOE_CRITERION_EXPECTATION;
        CHECK(moe_fields_apply(moe_layer_fields(), &c, rows[i], &error) == MOE_OK);
        CHECK(moe_net_init(&net, WIDTH, MOE_KERNELS_C, NULL) == MOE_OK);
        net.mixture_losses = moe_classic_losses();
        status = moe_net_mixture(&net, &c);
        if (status == MOE_OK) status = moe_net_build(&net, 1, 1, &error);
        if (status == MOE_OK) status = moe_trainer_init(&trainer, &net, &config, &error);
        if (!CHECK(status == (rows[i][0] == '\0' ? MOE_OK : MOE_ERR_CONFIG), rows[i]))
            printf("    %s\n", error.message);
        if (status == MOE_OK) { /* padding is no sample */
            moe_data data = samples();
            moe_call call;
            const unsigned char mask[TOKENS] = {1, 0, 1, 1, 1, 1};
            memset(&call, 0, sizeof call);
            call.mask = mask;
            data.call = &call;
            REFUSED(MOE_ERR_ARGUMENT, "padding", moe_trainer_step(&trainer, &data, NULL, &error));
            moe_trainer_free(&trainer);
        }
        moe_net_free(&net);
    }
}

/* A last mixture that is none of the classical kind. */
static void test_classical(void) {
    moe_mixture m;
    moe_real p[4], outputs[12], targets[6], loss[3], d_p[2][4], d_outputs[2][12];
    int32_t classes[2] = {0, 2};
    int criterion;
    size_t i;
    refuse_modular_nets();
    /* Either gradient alone is the same as both together. */
    for (i = 0; i < 12; i++) {
        outputs[i] = real((double)i / 7 - 0.6);
        targets[i % 6] = real(0.3 * (double)i);
    }
    p[0] = real(0.25);
    p[1] = real(0.75);
    p[2] = real(0);
    p[3] = real(1);
    memset(&m, 0, sizeof m);
    m.n = 2;
    m.experts = 2;
    m.width = 3;
    m.p = p;
    m.outputs = outputs;
    m.labels = classes;
    m.targets = targets;
    for (criterion = 0; criterion < MOE_CRITERION_COUNT; criterion++) {
        memset(d_p, 0, sizeof d_p);
        memset(d_outputs, 0, sizeof d_outputs);
        IS(MOE_OK, moe_mixture_loss(criterion, &m, &loss[0], d_p[0], d_outputs[0], &error));
        IS(MOE_OK, moe_mixture_loss(criterion, &m, &loss[1], d_p[1], NULL, &error));
        IS(MOE_OK, moe_mixture_loss(criterion, &m, &loss[2], NULL, d_outputs[1], &error));
        CHECK(memcmp(d_p[0], d_p[1], sizeof *d_p) == 0 && memcmp(d_outputs[0], d_outputs[1], sizeof *d_outputs) == 0);
        CHECK(memcmp(&loss[0], &loss[1], sizeof *loss) == 0 && memcmp(&loss[0], &loss[2], sizeof *loss) == 0);
    }
}

/* What a step says when a router lacks something. */
static void test_supplies(void) {
    static const char *const rows[][2] = {{"refine=attention heads=2 attention_heads=all top_k=2", "attention"},
                                          {"select=hash table_size=9 top_k=2", "token_ids"},
                                          {"top_k=2 loss_distill=1", "teacher"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe_net net = make_net(rows[i][0], 1);
        moe_trainer trainer;
        moe_data data = samples();
        moe_call call;
        moe_real square[2 * TOKENS * TOKENS], outputs[2 * TOKENS * WIDTH], teacher[TOKENS * EXPERTS];
        size_t j;
        memset(&call, 0, sizeof call);
        for (j = 0; j < 2 * TOKENS * TOKENS; j++) square[j] = real(1.0 / TOKENS);
        for (j = 0; j < 2 * TOKENS * WIDTH; j++) outputs[j] = real((double)(j % 5));
        for (j = 0; j < TOKENS * EXPERTS; j++) teacher[j] = real((double)(j % 3));
        IS(MOE_OK, moe_trainer_init(&trainer, &net, NULL, &error));
        REFUSED(MOE_ERR_ARGUMENT, rows[i][1], moe_trainer_step(&trainer, &data, NULL, &error));
        data.call = &call;
        REFUSED(MOE_ERR_ARGUMENT, rows[i][1], moe_trainer_step(&trainer, &data, NULL, &error));
        call.attention_weights = square;
        REFUSED(MOE_ERR_ARGUMENT, rows[i][1], moe_trainer_step(&trainer, &data, NULL, &error));
        call.attention_outputs = outputs;
        call.token_ids = labels;
        call.teacher = teacher;
        if (!IS(MOE_OK, moe_trainer_step(&trainer, &data, NULL, &error)))
            printf("    %s: %s\n", rows[i][0], error.message);
        CHECK(trainer.steps == 1);
        memset(&error, 0, sizeof error);
        moe_trainer_free(&trainer);
        moe_net_free(&net);
    }
}

static moe_net first_module(int kind, int trainable) {
    moe_net net;
    moe_attention_config a;
    memset(&a, 0, sizeof a);
    a.heads = 2;
    CHECK(moe_net_init(&net, WIDTH, MOE_KERNELS_C, NULL) == MOE_OK);
    CHECK((kind == 0   ? moe_net_activation(&net, MOE_ACT_TANH)
           : kind == 1 ? moe_net_layer_norm(&net)
           : kind == 2 ? moe_net_attention(&net, &a)
           : kind == 3 ? moe_net_dropout(&net, real(0))
           : kind == 4 ? moe_net_positions(&net, TOKENS)
           : kind == 5 ? moe_net_rms_norm(&net)
                       : moe_net_feed_forward(&net, NULL)) == MOE_OK);
    if (kind == 2) {
        const moe_layer_config c = layer_config("refine=attention heads=2 attention_heads=all causal=1 top_k=2");
        CHECK(moe_net_mixture(&net, &c) == MOE_OK);
    }
    CHECK(moe_net_residual(&net, 1) == MOE_OK && moe_net_linear(&net, CLASSES) == MOE_OK &&
          moe_net_build(&net, trainable, 2, &error) == MOE_OK);
    return net;
}

/* Nobody wants the inputs' gradient: those of the tensors are the same bits. What a network has is
   not brought by the call. */
static void test_first_modules(void) {
    int kind;
    for (kind = 0; kind < 7; kind++) {
        moe_net net = first_module(kind, 1);
        moe_call call = call_of(TOKENS, 1);
        moe_net_pass pass, none;
        moe_real dy[TOKENS * CLASSES], dx[TOKENS * WIDTH];
        size_t size, i, numbers = 0;
        void *work;
        moe_real *gradients, *values;
        for (i = 0; i < TOKENS * CLASSES; i++) dy[i] = real((double)(i % 4) - 1.3);
        memset(dx, 0, sizeof dx);
        memset(&none, 0, sizeof none);
        IS(MOE_OK, moe_net_work_size(&net, TOKENS, 1, &size));
        work = grab(1, size);
        for (i = 0; i < net.n_tensors; i++) numbers += net.tensors[i].count;
        gradients = (moe_real *)grab(1, numbers * sizeof(moe_real));
        values = net.tensors[0].gradient; /* all gradients lie behind it */
        IS(MOE_OK, moe_net_forward(&net, &call, work, size, &pass));
        IS(MOE_OK, moe_net_backward(&net, dy, dx, &pass));
        memcpy(gradients, values, net.tensors[0].count * sizeof(moe_real));
        net_zero_gradients(&net);
        IS(MOE_OK, moe_net_forward(&net, &call, work, size, &pass));
        IS(MOE_OK, moe_net_backward(&net, dy, NULL, &pass));
        CHECK(memcmp(gradients, values, net.tensors[0].count * sizeof(moe_real)) == 0);
        for (i = 0; i < TOKENS * WIDTH && !(fabs((double)dx[i]) > 0); i++) {}
        CHECK(i < TOKENS * WIDTH);
        none.training = 1;
        none.n_tokens = TOKENS; /* no pass has filled it */
        IS(MOE_ERR_STATE, moe_net_backward(&net, dy, NULL, &none));
        IS(MOE_ERR_STATE, moe_net_observe(&net, &none));
        CHECK(moe_net_routing(&net, &none, 0) == NULL && moe_net_routing(&net, &none, 1) == NULL);
        call.attention_weights = x;
        CHECK((moe_net_forward(&net, &call, work, size, &pass) == MOE_ERR_ARGUMENT) == (kind == 2));
        call.attention_weights = NULL;
        call.attention_outputs = x;
        CHECK((moe_net_forward(&net, &call, work, size, &pass) == MOE_ERR_ARGUMENT) == (kind == 2));
        call.attention_outputs = NULL;
        call.attention_output = x;
        CHECK((moe_net_forward(&net, &call, work, size, &pass) == MOE_ERR_ARGUMENT) == (kind == 2));
        free(work);
        free(gradients);
        moe_net_free(&net);
    }
}

static void test_odd_calls(void) {
    moe_layer layer = make_layer("top_k=2", 1);
    moe_net net = make_net("select=sample top_k=1 loss_distill=1", 1);
    moe_trainer trainer, none;
    moe_train_config config;
    moe_modular modular;
    moe_data data = samples(), empty = samples();
    moe_call call = call_of(TOKENS, 1), extra;
    moe_parallel team;
    moe_layer_pass pass;
    moe_arena arena = {x, 10, 20};
    moe_allocator allocator = moe_arena_allocator(&arena);
    int32_t choices[TOKENS] = {0, 1, 2, 3, 0, 1};
    moe_real again[TOKENS * WIDTH];
    size_t size;
    void *work;
    CHECK(allocator.resize(allocator.ctx, NULL, 0, 1) == NULL); /* more used than there is */
    memset(&team, 0, sizeof team);
    memset(&config, 0, sizeof config);
    memset(&modular, 0, sizeof modular);
    memset(&extra, 0, sizeof extra);
    memset(&none, 0, sizeof none);
    IS(MOE_OK, moe_layer_work_size(&layer, TOKENS, 1, &size));
    work = grab(1, size);
    IS(MOE_OK, moe_layer_forward(&layer, &call, y, work, size, &pass));
    team.threads = 3;
    call.parallel = &team; /* nobody runs them: one thread */
    IS(MOE_OK, moe_layer_forward(&layer, &call, again, work, size, &pass));
    CHECK(memcmp(again, y, sizeof again) == 0);
    pass.call.training = 0; /* a pass that says so was none for training */
    IS(MOE_ERR_STATE, moe_layer_backward(&layer, y, NULL, NULL, &pass));
    IS(MOE_ERR_STATE, moe_layer_backward_experts(&layer, y, y, NULL, NULL, &pass));
    IS(MOE_ERR_STATE, moe_layer_observe(&layer, &pass));
    free(work);
    moe_layer_free(&layer);

    config.batch = TOKENS;
    config.epochs = 1;
    empty.n = 0;
    IS(MOE_OK, moe_trainer_init(&trainer, &net, &config, &error));
    IS(MOE_OK, moe_modular_init(&modular, &trainer, &error));
    data.call = &extra;
    IS(MOE_OK, moe_modular_step(&modular, &data, 0, 1, choices, NULL, &error));
    CHECK(trainer.steps == 1 && choices[0] == 0);
    data.call = NULL;
    moe_modular_free(&modular);
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    net = make_net("top_k=2", 1);
    IS(MOE_OK, moe_fit(&net, &data, &empty, &config, &error));
    data.x = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "x must not be NULL", moe_fit(&net, &data, &empty, &config, &error));
    REFUSED(MOE_ERR_ARGUMENT, "x must not be NULL", moe_fit(&net, &data, &data, &config, &error));
    moe_net_free(&net);
#ifndef MOE_NO_STDIO
    CHECK(moe_trainer_load(&none, "edges-test", &error) != MOE_OK);
    memset(&error, 0, sizeof error);
#endif
}

static void refuse_exports(moe_model_config *config, moe_built_model *built, moe_buffer *text, moe_stream *stream) {
    static const char *const exported[] = {"select=dense switch_at=3 switch_from=top_k",
                                           "select=positive gate=relu weight=raw l1_controller=1",
                                           "capacity_factor=1 top_k=2",
                                           "drop_capacity=1 top_k=2",
                                           "capacity_bound=first top_k=2",
                                           "drop_rule=gshard top_k=2",
                                           "expert=linear d_ff=0 n_shared=1 d_shared=3 top_k=2",
                                           "expert=factorised d_low=3 top_k=2",
                                           "d_latent=3 n_shared=1 d_shared=3 top_k=2"};
    size_t i;
    size_t n_exported = 0;
    config->calibration = NULL;
    for (i = 0; i < sizeof refused_nets / sizeof *refused_nets; i++) {
        moe_net net = make_net(refused_nets[i].settings, 0);
        config->weights = MOE_WEIGHTS_INT8;
        /* the first refusal counts */
        if (refused_nets[i].weights != MOE_WEIGHTS_FLOAT)
            REFUSED(MOE_ERR_ARGUMENT, "calibration", moe_model_create(built, &net, config, &error));
        moe_net_free(&net);
    }
    config->weights = MOE_WEIGHTS_FLOAT;
    for (i = 0; i < sizeof exported / sizeof *exported && !MOE_REAL_IS_DOUBLE; i++) {
        moe_net net = make_net(exported[i], 0);
        moe_status status = moe_model_create(built, &net, config, &error);
        if (!CHECK(status == MOE_OK || status == MOE_ERR_UNSUPPORTED, exported[i])) printf("    %s\n", error.message);
        if (status == MOE_OK) {
            text->size = 0;
            n_exported++;
            IS(MOE_OK, moe_export_c(built, "model", stream, &error));
        }
        moe_model_free(built);
        memset(built, 0, sizeof *built);
        moe_net_free(&net);
    }
    CHECK(n_exported >= 4 || MOE_REAL_IS_DOUBLE);
    if (!MOE_REAL_IS_DOUBLE) {
        moe_net net = make_net("top_k=2", 0);
        net.modules[0].tensors[MOE_MODULE_WEIGHT] = NULL;
        REFUSED(MOE_ERR_ARGUMENT, "tensor weight is not set", moe_model_create(built, &net, config, &error));
        moe_net_free(&net);
    }
    memset(&error, 0, sizeof error);
    moe_buffer_free(text);
}

/* Weights of choices beyond 32 bits, of both signs; refusals behind another; tensors that are not
   set. */
static void test_model_choices(void) {
    moe_data data = samples();
    moe_model_config config;
    moe_built_model built;
    moe_buffer text;
    moe_stream stream;
    int weights, huge;
    size_t i;
    memset(&config, 0, sizeof config);
    memset(&built, 0, sizeof built);
    memset(&text, 0, sizeof text);
    stream = moe_buffer_stream(&text);
    config.calibration = &data;
    for (weights = MOE_REAL_IS_DOUBLE ? 1 : 0; weights < MOE_WEIGHTS_COUNT; weights++)
        for (huge = 0; huge < 2; huge++) {
            moe_net net = make_net(huge ? "gate=identity select=dense weight=raw scale=1000000"
                                        : "gate=identity select=dense weight=raw",
                                   0);
            moe_choice choices[EXPERTS];
            moe_real answer[CLASSES];
            int16_t whole[CLASSES];
            int8_t levels[WIDTH];
            unsigned char *scratch;
            size_t count = 0, above = 0;
            size_t below = 0;
            config.weights = weights;
            if (!CHECK(moe_model_create(&built, &net, &config, &error) == MOE_OK)) printf("    %s\n", error.message);
            else {
                scratch = (unsigned char *)grab(1, built.model.scratch_size);
                moe_infer_levels(&built.model, x, levels);
                IS(MOE_OK,
                   moe_infer(&built.model, NULL, weights == MOE_WEIGHTS_FLOAT ? (const void *)x : (const void *)levels,
                             weights == MOE_WEIGHTS_FLOAT ? (void *)answer : (void *)whole, scratch,
                             built.model.scratch_size));
                IS(MOE_OK, moe_infer_choices(&built.model, 0, scratch, choices, EXPERTS, &count));
                CHECK(count == EXPERTS);
                for (i = 0; i < count; i++) {
                    above += choices[i].weight > 0;
                    below += choices[i].weight < 0;
                }
                CHECK(above > 0 && below > 0);
                for (i = 0; i < count && huge; i++)
                    CHECK(choices[i].weight == INT32_MAX || choices[i].weight == -INT32_MAX ||
                          abs(choices[i].weight) < 1000);
                free(scratch);
            }
            moe_model_free(&built);
            memset(&built, 0, sizeof built);
            moe_net_free(&net);
        }
    refuse_exports(&config, &built, &text, &stream);
}

/* Tensors whose sizes lie far apart: a model that runs, or a refusal. */
static void test_model_ranges(void) {
    moe_data data = samples();
    moe_rng rng;
    size_t row, turn, good = 0, refused = 0;
    moe_rng_seed(&rng, 21);
    for (row = 0; row < sizeof model_rows / sizeof *model_rows; row++)
        for (turn = 0; turn < 10; turn++) {
            moe_layer_config c = layer_config(model_rows[row]);
            moe_layer_config other = layer_config("n_shared=1 d_shared=3 shared_sigmoid=1 top_k=2");
            moe_net net;
            moe_model_config config;
            moe_built_model built;
            moe_attention_config a;
            moe_status status;
            size_t i, j;
            memset(&config, 0, sizeof config);
            memset(&built, 0, sizeof built);
            memset(&a, 0, sizeof a);
            CHECK(moe_net_init(&net, WIDTH, MOE_KERNELS_C, NULL) == MOE_OK);
            a.heads = 2;
            a.rotary = turn % 2 == 0;
            if (turn % 3 == 0) CHECK(moe_net_attention(&net, &a) == MOE_OK && moe_net_residual(&net, 1) == MOE_OK);
            CHECK(moe_net_mixture(&net, &other) == MOE_OK && moe_net_mixture(&net, &c) == MOE_OK &&
                  moe_net_linear(&net, CLASSES) == MOE_OK);
            CHECK(moe_net_build(&net, 0, 9, &error) == MOE_OK);
            for (i = 0; i < net.n_tensors; i++) {
                const double factor =
                    pow(10.0, (double)moe_rng_below(&rng, 13) - 6) * (moe_rng_below(&rng, 9) > 0 ? 1 : 0);
                for (j = 0; j < net.tensors[i].count; j++)
                    net.tensors[i].data[j] = (moe_real)((double)net.tensors[i].data[j] * factor);
            }
            data.length = config.length = 3;
            config.calibration = &data;
            config.weights = turn % 2 ? MOE_WEIGHTS_INT8 : MOE_WEIGHTS_INT4;
            status = moe_model_create(&built, &net, &config, &error);
            if (!CHECK(status == MOE_OK || status == MOE_ERR_OVERFLOW || status == MOE_ERR_NONFINITE ||
                           status == MOE_ERR_UNSUPPORTED || status == MOE_ERR_CONFIG,
                       model_rows[row]))
                printf("    %s: %s\n", moe_status_text(status), error.message);
            if (status == MOE_OK) {
                unsigned char *scratch = (unsigned char *)grab(1, built.model.scratch_size);
                int8_t levels[WIDTH];
                int16_t whole[CLASSES];
                moe_infer_levels(&built.model, x, levels);
                for (i = 0; i < 3; i++)
                    IS(MOE_OK, moe_infer(&built.model, NULL, levels, whole, scratch, built.model.scratch_size));
                free(scratch);
                good++;
            } else refused++;
            moe_model_free(&built);
            moe_net_free(&net);
        }
    CHECK(good > 20 && good + refused == 10 * row);
}

/* ---- texts of numbers ---- */

/* Every size of number: its text names it, and reading gives it back. */
static void test_texts(void) {
    const moe_field *field = moe_field_find(moe_router_fields(), "scale");
    moe_router_config c, back;
    char text[64];
    int k;
    memset(&c, 0, sizeof c);
    memset(&back, 0, sizeof back);
    if (!CHECK(field != NULL)) return;
    REFUSED(MOE_ERR_ARGUMENT, "config", moe_fields_apply(moe_router_fields(), NULL, "top_k=1", &error));
    IS(MOE_OK, moe_fields_apply(moe_router_fields(), NULL, NULL, NULL));
    /* a message stays one line */
    REFUSED(MOE_ERR_CONFIG, "top_k = 2?x: must", moe_fields_apply(moe_router_fields(), &c, "top_k=2\nx", &error));
    REFUSED(MOE_ERR_CONFIG, "score = none: must be one of linear, random, ",
            moe_fields_apply(moe_router_fields(), &c, "score=none", &error));
    for (k = -330; k <= 309; k++) {
        const double v = k == 309 ? (double)real(1.7976931348623157e308)
                                  : (double)real((k % 2 ? -1.2345678901234567 : 9.8765432109876543) * pow(10.0, k));
        if (!(fabs(v) < HUGE_VAL) || !moe_is_finite((moe_real)v)) continue;
        c.scale = (moe_real)v;
        moe_field_text(field, &c, text, sizeof text);
        if (!CHECK(!((moe_real)strtod(text, NULL) < c.scale) && !((moe_real)strtod(text, NULL) > c.scale)))
            printf("    %.17g: %s\n", v, text);
        CHECK(moe_field_set(moe_router_fields(), &back, "scale", text, NULL) == MOE_OK);
        CHECK(!(back.scale < c.scale) && !(back.scale > c.scale));
    }
    CHECK(moe_field_set(moe_router_fields(), &back, "scale",
                        "0.00000000000000000000000000000000000000000000000000000000000000000000001e-400",
                        NULL) == MOE_OK &&
          !(back.scale > 0));
    CHECK(moe_field_set(moe_router_fields(), &back, "scale", "1e400", NULL) != MOE_OK);
    CHECK(moe_field_set(moe_router_fields(), &back, "scale", "0.0000000001e11", NULL) == MOE_OK &&
          !(back.scale < real(10)) && !(back.scale > real(10)));
}

/* Where members lie, by name; what is no name of a struct or of a member of it is refused.
   tests/port/bindings.sh compares all of them. */
static void test_struct_places(void) {
    static const char *const none[][2] = {
        {"moe_nothing", NULL},    {"moe_cal", NULL},        {"moe_calls", NULL},      {"", NULL},
        {"moe_call", ""},         {"moe_call", "nothing"},  {"moe_call", "moe_call"}, {"moe_call", "n_tokens x"},
        {"moe_error code", NULL}, {"moe_error", "n_tokens"}};
    size_t i, offset = 7, size = 7;
    CHECK(moe_struct_names(0) != NULL && strcmp(moe_struct_names(0), "moe_error code message") == 0);
    for (i = 0; moe_struct_names(i) != NULL; i++) CHECK(strncmp(moe_struct_names(i), "moe_", 4) == 0);
    CHECK(i > 50 && moe_struct_names(i + 1) == NULL && moe_struct_names((size_t)-1) == NULL);
    for (i = 0; i < sizeof none / sizeof *none; i++)
        IS(MOE_ERR_NOT_FOUND, moe_struct_place(none[i][0], none[i][1], &offset, &size));
    IS(MOE_ERR_ARGUMENT, moe_struct_place(NULL, "x", &offset, &size));
    CHECK(offset == 7 && size == 7);
    IS(MOE_OK, moe_struct_place("moe_call", "x", &offset, &size));
    CHECK(offset == offsetof(moe_call, x) && size == sizeof(const moe_real *));
    IS(MOE_OK, moe_struct_place("moe_error", "message", &offset, NULL));
    CHECK(offset == offsetof(moe_error, message));
    IS(MOE_OK, moe_struct_place("moe_net", NULL, &offset, &size));
    CHECK(offset == 0 && size == sizeof(moe_net));
    IS(MOE_OK, moe_struct_place("moe_built_model", "allocator", &offset, &size));
    CHECK(offset == offsetof(moe_built_model, allocator) && size == sizeof(moe_allocator));
}

/* ---- why forward, backward and decode failed: call.error names the field ---- */

/* A call for n tokens that tells why it fails. */
static moe_call told_call(size_t n, int training) {
    moe_call call = call_of(n, training);
    call.error = &error;
    return call;
}

static void test_layer_call_errors(void) {
    moe_layer layer = make_layer("top_k=2", 1), soft = make_layer("select=soft", 1);
    moe_layer shared = make_layer("n_shared=1", 1);
    moe_call call = told_call(TOKENS, 1);
    moe_layer_pass pass;
    moe_batch batch;
    const moe_real *saved;
    size_t size;
    void *work;
    moe_real dy[TOKENS * 16];
    memset(dy, 0, sizeof dy);
    memset(&pass, 0, sizeof pass);
    memset(&batch, 0, sizeof batch);
    IS(MOE_OK, moe_layer_work_size(&shared, TOKENS, 1, &size));
    work = grab(1, size);
    REFUSED(MOE_ERR_ARGUMENT, "layer is NULL", moe_layer_forward(NULL, &call, y, work, size, &pass));
    REFUSED(MOE_ERR_ARGUMENT, "y is NULL", moe_layer_forward(&layer, &call, NULL, work, size, &pass));
    REFUSED(MOE_ERR_ARGUMENT, "work is NULL", moe_layer_forward(&layer, &call, y, NULL, size, &pass));
    REFUSED(MOE_ERR_SPACE, "work_size = 1: the call takes", moe_layer_forward(&layer, &call, y, work, 1, &pass));
    saved = layer.tensors[MOE_EXPERTS_DOWN];
    layer.tensors[MOE_EXPERTS_DOWN] = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "experts.down is not set", moe_layer_forward(&layer, &call, y, work, size, &pass));
    layer.tensors[MOE_EXPERTS_DOWN] = saved;
    call.batch = &batch;
    REFUSED(MOE_ERR_ARGUMENT, "call.batch", moe_layer_forward(&layer, &call, y, work, size, &pass));
    call.batch = NULL;
    call.x = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "call.x is NULL", moe_layer_forward(&layer, &call, y, work, size, &pass));
    call.x = x;
    call.n_tokens = (size_t)INT32_MAX + 1;
    REFUSED(MOE_ERR_OVERFLOW, "call.n_tokens = 2147483648", moe_layer_forward(&layer, &call, y, work, size, &pass));
    call.n_tokens = TOKENS;
    call.training = 0;
    IS(MOE_OK, moe_layer_forward(&layer, &call, y, work, size, &pass));
    REFUSED(MOE_ERR_STATE, "call.training = 1", moe_layer_backward(&layer, dy, NULL, NULL, &pass));
    REFUSED(MOE_ERR_STATE, "call.training = 1", moe_layer_backward_experts(&layer, dy, dy, NULL, NULL, &pass));
    call.training = 1;
    IS(MOE_OK, moe_layer_forward(&layer, &call, y, work, size, &pass));
    REFUSED(MOE_ERR_ARGUMENT, "dy is NULL", moe_layer_backward(&layer, NULL, NULL, NULL, &pass));
    REFUSED(MOE_ERR_ARGUMENT, "d_outputs is NULL", moe_layer_backward_experts(&layer, NULL, dy, NULL, NULL, &pass));
    REFUSED(MOE_ERR_ARGUMENT, "d_weights is NULL", moe_layer_backward_experts(&layer, dy, NULL, NULL, NULL, &pass));
    IS(MOE_OK, moe_layer_forward(&shared, &call, y, work, size, &pass));
    REFUSED(MOE_ERR_UNSUPPORTED, "n_shared > 0", moe_layer_backward_experts(&shared, dy, dy, NULL, NULL, &pass));
    free(work);
    IS(MOE_OK, moe_layer_work_size(&soft, TOKENS, 1, &size));
    work = grab(1, size);
    IS(MOE_OK, moe_layer_forward(&soft, &call, y, work, size, &pass));
    REFUSED(MOE_ERR_STATE, "select = soft", moe_layer_backward_experts(&soft, dy, dy, NULL, NULL, &pass));
    free(work);
    moe_layer_free(&layer);
    moe_layer_free(&soft);
    moe_layer_free(&shared);
}

static void test_net_call_errors(void) {
    moe_net net = make_net("top_k=2", 1), raw = unbuilt("top_k=2");
    moe_net frozen = make_net("top_k=2", 0), plain = make_net(NULL, 1);
    moe_call call = told_call(TOKENS, 1);
    int32_t sequences[2] = {0, TOKENS - 1};
    moe_net_pass pass;
    moe_real dy[TOKENS * CLASSES], *weight, kept;
    size_t size;
    void *work;
    memset(dy, 0, sizeof dy);
    memset(&pass, 0, sizeof pass);
    IS(MOE_OK, moe_net_work_size(&net, TOKENS, 1, &size));
    work = grab(1, size);
    REFUSED(MOE_ERR_ARGUMENT, "net is NULL", moe_net_forward(NULL, &call, work, size, &pass));
    REFUSED(MOE_ERR_ARGUMENT, "work is NULL", moe_net_forward(&net, &call, NULL, size, &pass));
    REFUSED(MOE_ERR_ARGUMENT, "pass is NULL", moe_net_forward(&net, &call, work, size, NULL));
    REFUSED(MOE_ERR_STATE, "not built", moe_net_forward(&raw, &call, work, size, &pass));
    REFUSED(MOE_ERR_SPACE, "work_size = 1: the call takes", moe_net_forward(&net, &call, work, 1, &pass));
    call.x = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "call.x is NULL", moe_net_forward(&net, &call, work, size, &pass));
    call.x = x;
    call.n_past = 1;
    REFUSED(MOE_ERR_ARGUMENT, "call.n_past is set", moe_net_forward(&net, &call, work, size, &pass));
    call.n_past = 0;
    call.router_x = x;
    REFUSED(MOE_ERR_ARGUMENT, "call.router_x is set", moe_net_forward(&net, &call, work, size, &pass));
    call.router_x = NULL;
    call.activations = x;
    REFUSED(MOE_ERR_ARGUMENT, "call.activations is set", moe_net_forward(&net, &call, work, size, &pass));
    call.activations = NULL;
    call.sequences = sequences;
    call.n_sequences = 1;
    REFUSED(MOE_ERR_ARGUMENT, "end with n_tokens = 6, not 5", moe_net_forward(&net, &call, work, size, &pass));
    call.sequences = NULL;
    call.n_sequences = 0;
    call.n_tokens = (size_t)INT32_MAX + 1;
    REFUSED(MOE_ERR_OVERFLOW, "call.n_tokens = 2147483648", moe_net_forward(&net, &call, work, size, &pass));
    call.n_tokens = TOKENS;
    weight = net_tensor(&net, "0.weight")->data;
    kept = weight[0];
    weight[0] = (moe_real)INFINITY;
    REFUSED(MOE_ERR_NONFINITE, "module 1 (mixture): ", moe_net_forward(&net, &call, work, size, &pass));
    weight[0] = kept;
    call.training = 0;
    IS(MOE_OK, moe_net_forward(&net, &call, work, size, &pass));
    REFUSED(MOE_ERR_STATE, "call.training = 1", moe_net_backward(&net, dy, NULL, &pass));
    IS(MOE_OK, moe_net_forward(&plain, &call, work, size, &pass));
    REFUSED(MOE_ERR_STATE, "call.training = 1", moe_net_backward(&plain, dy, NULL, &pass));
    moe_net_free(&plain);
    call.training = 1;
    IS(MOE_OK, moe_net_forward(&frozen, &call, work, size, &pass));
    REFUSED(MOE_ERR_STATE, "trainable = 1", moe_net_backward(&frozen, dy, NULL, &pass));
    IS(MOE_OK, moe_net_forward(&net, &call, work, size, &pass));
    REFUSED(MOE_ERR_ARGUMENT, "dy is NULL", moe_net_backward(&net, NULL, NULL, &pass));
    IS(MOE_OK, moe_net_backward(&net, dy, NULL, &pass));
    free(work);
    moe_net_free(&net);
    moe_net_free(&raw);
    moe_net_free(&frozen);
}

/* A batch of several calls is a router's: networks refuse it, with or without mixtures, and so does
   training. */
static void test_net_batches(void) {
    moe_net nets[2];
    size_t i;
    nets[0] = make_net("top_k=2", 1);
    nets[1] = make_net(NULL, 1);
    for (i = 0; i < 2; i++) {
        moe_call call = told_call(TOKENS, 0);
        moe_train_config config;
        moe_trainer trainer;
        moe_net_pass pass;
        moe_batch batch;
        moe_data data = samples();
        moe_step step;
        size_t size = 0;
        void *work;
        memset(&config, 0, sizeof config);
        memset(&batch, 0, sizeof batch);
        memset(&pass, 0, sizeof pass);
        batch.total = TOKENS;
        IS(MOE_OK, moe_net_work_size(&nets[i], TOKENS, 0, &size));
        work = grab(1, size);
        IS(MOE_OK, moe_net_forward(&nets[i], &call, work, size, &pass));
        call.batch = &batch;
        REFUSED(MOE_ERR_ARGUMENT, "call.batch is set: a net decides over several calls with net.transport only",
                moe_net_forward(&nets[i], &call, work, size, &pass));
        free(work);
        if (!CHECK(moe_trainer_init(&trainer, &nets[i], &config, &error) == MOE_OK)) continue;
        data.call = &call;
        REFUSED(MOE_ERR_ARGUMENT, "call.batch is set", moe_trainer_step(&trainer, &data, &step, &error));
        call.batch = NULL;
        IS(MOE_OK, moe_trainer_step(&trainer, &data, &step, &error));
        moe_trainer_free(&trainer);
        moe_net_free(&nets[i]);
    }
}

/* What the modules of sequences and decoding ask of a call. */
static void test_sequence_call_errors(void) {
    static const int32_t ids[TOKENS] = {0, 1, 2, 3, 4, 9}, falls[3] = {0, 4, 2};
    moe_call call = told_call(TOKENS, 1);
    moe_net_pass pass;
    moe_cache cache;
    moe_net net;
    size_t size, cache_size;
    void *work, *memory;
    memset(&net, 0, sizeof net);
    IS(MOE_OK, moe_net_init(&net, 0, MOE_KERNELS_AUTO, NULL));
    IS(MOE_OK, moe_net_embedding(&net, 9, WIDTH));
    IS(MOE_OK, moe_net_positions(&net, 4));
    IS(MOE_OK, moe_net_dropout(&net, real(0.5)));
    IS(MOE_OK, moe_net_build(&net, 1, 1, &error));
    IS(MOE_OK, moe_net_work_size(&net, TOKENS, 1, &size));
    work = grab(1, size);
    REFUSED(MOE_ERR_ARGUMENT, "call.token_ids is NULL: module 0 (embedding)",
            moe_net_forward(&net, &call, work, size, &pass));
    call.token_ids = ids;
    REFUSED(MOE_ERR_ARGUMENT, "call.token_ids[5] = 9: must be 0 to 8", moe_net_forward(&net, &call, work, size, &pass));
    call.sequences = falls;
    call.n_sequences = 2;
    REFUSED(MOE_ERR_ARGUMENT, "call.sequences[2] = 2", moe_net_forward(&net, &call, work, size, &pass));
    call.sequences = NULL;
    call.n_tokens = 5;
    REFUSED(MOE_ERR_ARGUMENT, "module 1 (positions): a sequence has more than 4 tokens",
            moe_net_forward(&net, &call, work, size, &pass));
    call.n_tokens = 4;
    REFUSED(MOE_ERR_ARGUMENT, "module 2 (dropout): call.rng is NULL", moe_net_forward(&net, &call, work, size, &pass));
    call.training = 0;
    IS(MOE_OK, moe_net_forward(&net, &call, work, size, &pass));
    free(work);

    IS(MOE_OK, moe_net_decode_size(&net, 3, 3, &cache_size, &size, &error));
    work = grab(1, size);
    memory = grab(1, cache_size + 1);
    IS(MOE_OK, moe_net_cache_init(&cache, &net, 3, memory, cache_size, &error));
    REFUSED(MOE_ERR_ARGUMENT, "must not be NULL", moe_net_decode(&net, NULL, &call, work, size, &pass));
    REFUSED(MOE_ERR_SPACE, "call.n_tokens = 4: the cache has room for 3 more",
            moe_net_decode(&net, &cache, &call, work, size, &pass));
    call.n_tokens = 2;
    REFUSED(MOE_ERR_SPACE, "work_size = 1: ", moe_net_decode(&net, &cache, &call, work, 1, &pass));
    call.keep = 1;
    REFUSED(MOE_ERR_ARGUMENT, "call.keep is set", moe_net_decode(&net, &cache, &call, work, size, &pass));
    call.keep = 0;
    call.training = 1;
    REFUSED(MOE_ERR_ARGUMENT, "call.training is set", moe_net_decode(&net, &cache, &call, work, size, &pass));
    call.training = 0;
    cache.n_tokens = 4;
    REFUSED(MOE_ERR_ARGUMENT, "cache.n_tokens is above most", moe_net_decode(&net, &cache, &call, work, size, &pass));
    cache.n_tokens = 0;
    IS(MOE_OK, moe_net_decode(&net, &cache, &call, work, size, &pass));
    free(work);
    free(memory);
    moe_net_free(&net);
}

/* 2^32 rows of slots in the sequences that a call may have: beyond a size_t of 32 bits. */
static void test_many_slots(void) {
    moe_layer_config c = layer_config("expert=linear d_ff=0 select=soft n_experts=1 slots=65536 soft_sequences=65536");
    moe_layer layer;
    size_t bytes = 0;
    IS(MOE_OK, moe_layer_init(&layer, &c, &error));
    IS(SIZE_MAX > 0xFFFFFFFF ? MOE_OK : MOE_ERR_OVERFLOW, moe_layer_work_size(&layer, 1, 0, &bytes));
    CHECK(SIZE_MAX == 0xFFFFFFFF || bytes > 0xFFFFFFFF);
}

/* The plan has rows as int32: 2^15 sequences of 2^16 slots are too many, empty ones included. */
static void test_many_sequences(void) {
    enum { SEQUENCES = 32768 };
    static int32_t offsets[SEQUENCES + 1];
    static moe_real vectors[65536];
    moe_layer_config c = layer_config("d_model=1 select=soft n_experts=1 slots=65536 soft_sequences=65536");
    moe_router router;
    moe_routing routing;
    moe_call call = told_call(1, 0);
    size_t bytes;
    void *work;
    IS(MOE_OK, moe_router_init(&router, &c.router, NULL, &error));
    router.tensors[MOE_ROUTER_SLOT_VECTORS] = vectors;
    IS(MOE_OK, moe_route_size(&router, 1, 0, &bytes));
    work = grab(1, bytes);
    call.x = x;
    call.sequences = offsets;
    call.n_sequences = SEQUENCES;
    offsets[SEQUENCES - 1] = offsets[SEQUENCES] = 1;
    REFUSED(MOE_ERR_OVERFLOW, "n_sequences = 32768", moe_route(&router, &call, work, bytes, &routing));
    free(work);
}

#if SIZE_MAX > 0xFFFFFFFF
/* Layers whose workspace is beyond size_t, though their settings and the number of tokens are good:
   the rows of all experts, or what a soft router keeps. */
static void test_beyond_size(void) {
    static const char *const settings[] = {"expert=linear d_ff=0 d_model=16777216 n_experts=4096 top_k=4096",
                                           "expert=linear d_ff=0 select=soft n_experts=65536 slots=65536"};
    static const int kernels[] = {MOE_KERNELS_AUTO, MOE_KERNELS_C};
    size_t i, place;
    for (i = 0; i < 4; i++) {
        moe_layer_config c = layer_config(settings[i / 2]);
        moe_layer layer;
        moe_parameter slot;
        moe_call call = told_call(INT32_MAX, 0);
        moe_layer_pass pass;
        size_t bytes = 77;
        memset(&layer, 0, sizeof layer);
        memset(&pass, 0, sizeof pass);
        call.keep = 1; /* the rows of all choices */
        c.kernels = kernels[i % 2];
        if (!CHECK(moe_layer_init(&layer, &c, &error) == MOE_OK, settings[i / 2])) continue;
        for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++)
            if (moe_layer_parameter(&layer.config, (int)place, &slot) == MOE_OK)
                layer.tensors[place] = x; /* not read */
        IS(MOE_ERR_OVERFLOW, moe_layer_work_size(&layer, INT32_MAX, 1, &bytes));
        CHECK(bytes == 77);
        REFUSED(MOE_ERR_OVERFLOW, "call.n_tokens = 2147483647: the workspace exceeds size_t",
                moe_layer_forward(&layer, &call, y, x, sizeof x, &pass));
    }
}

/* In decoding, layers lie one after another: their sum may be beyond size_t though each is not. */
static void test_sum_beyond_size(void) {
    moe_layer_config c = layer_config("n_experts=4096 d_ff=1048576");
    size_t low = 0, high = INT32_MAX, middle, bytes;
    moe_net net;
    IS(MOE_OK, moe_net_init(&net, WIDTH, MOE_KERNELS_C, NULL));
    net.external = 1;
    IS(MOE_OK, moe_net_mixture(&net, &c));
    c.router.score = MOE_SCORE_NORM;
    c.router.norm_node = MOE_NODE_UP;
    IS(MOE_OK, moe_net_mixture(&net, &c));
    IS(MOE_OK, moe_net_build(&net, 0, 1, &error));
    while (high - low > 1) {
        middle = low + (high - low) / 2;
        if (moe_layer_work_size(&net.modules[1].layer, middle, 0, &bytes) == MOE_OK) low = middle;
        else high = middle;
    }
    bytes = 77;
    REFUSED(MOE_ERR_OVERFLOW, "size_t", moe_net_decode_size(&net, low, low, NULL, &bytes, &error));
    CHECK(bytes == 77);
    moe_net_free(&net);
}
#endif

/* A loss of the classical mixture reads the experts' own outputs: whatever else has a part in the
   layer's output is refused. */
static void test_experts_alone(void) {
    static const char *const beside[] = {
        "", "scale=0.5", "scale=2", "expert_scale=1", "capacity_factor=0.5", "capacity_factor_eval=0.5",
        "drop_capacity=1", "apply_to=input", "n_shared=1 d_shared=3", "add_input=1 d_out=8", "weight=sum",
        "select=top_k top_k=2", "d_latent=3", "expert_dropout=0.5", "switch_from=top_k switch_at=3 top_k=2",
        "student=1 freeze_at=2 loss_distill=0.1"};
    moe_train_config config;
    moe_trainer trainer;
    size_t i;
    memset(&config, 0, sizeof config);
    config.criterion = MOE_CRITERION_EXPECTATION;
    for (i = 0; i < sizeof beside / sizeof *beside; i++) {
        moe_layer_config c = layer_config("select=dense weight=raw expert=linear d_out=3");
        moe_net net;
        CHECK(moe_fields_apply(moe_layer_fields(), &c, beside[i], &error) == MOE_OK, beside[i]);
        IS(MOE_OK, moe_net_init(&net, WIDTH, MOE_KERNELS_C, NULL));
        net.mixture_losses = moe_classic_losses();
        IS(MOE_OK, moe_net_mixture(&net, &c));
        if (!CHECK(moe_net_build(&net, 1, 1, &error) == MOE_OK, beside[i])) printf("    %s\n", error.message);
        if (i == 0) {
            static moe_transport transport;
            IS(MOE_OK, moe_trainer_init(&trainer, &net, &config, &error));
            moe_trainer_free(&trainer);
            net.transport = &transport;
            REFUSED(MOE_ERR_UNSUPPORTED, "reads all experts, and net.transport distributes them over ranks",
                    moe_trainer_init(&trainer, &net, &config, &error));
            net.transport = NULL;
        } else {
            test_about = beside[i];
            REFUSED(MOE_ERR_CONFIG, "needs select = dense and weight = raw, and nothing beside it",
                    moe_trainer_init(&trainer, &net, &config, &error));
        }
        moe_net_free(&net);
    }
    test_about = "";
}

/* A step of training with x as inputs and the labels. */
static void train_step(moe_net *net) {
    moe_train_config config;
    moe_trainer trainer;
    moe_data data = samples();
    moe_step step;
    memset(&config, 0, sizeof config);
    config.batch = TOKENS;
    IS(MOE_OK, moe_trainer_init(&trainer, net, &config, &error));
    IS(MOE_OK, moe_trainer_step(&trainer, &data, &step, &error));
    moe_trainer_free(&trainer);
}

/* A batch of one sample is checked as larger ones are: a router that reads token ids gets none. */
static void test_one_sample(void) {
    moe_net net = make_net("select=hash table_size=4 top_k=2", 1);
    moe_train_config config;
    moe_trainer trainer;
    moe_data data = samples();
    moe_step step;
    memset(&config, 0, sizeof config);
    config.batch = TOKENS;
    IS(MOE_OK, moe_trainer_init(&trainer, &net, &config, &error));
    for (data.n = 1; data.n <= 2; data.n++)
        REFUSED(MOE_ERR_ARGUMENT, "but the samples have only x", moe_trainer_step(&trainer, &data, &step, &error));
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

static void test_not_ready(void) {
    moe_net net = unbuilt("top_k=2");
    moe_layer layer = make_layer("top_k=2", 0);
    moe_call call = call_of(TOKENS, 0);
    moe_net_pass pass;
    moe_tensor tensor;
    unsigned char work[64];
    call.error = &error;
    REFUSED(MOE_ERR_STATE, "the network is not built", moe_net_forward(&net, &call, work, sizeof work, &pass));
    IS(MOE_ERR_ARGUMENT, moe_layer_tensor(NULL, 0, &tensor));
    IS(MOE_ERR_ARGUMENT, moe_layer_tensor(&layer, 0, NULL));
    moe_layer_free(&layer);
    moe_net_free(&net);
}

/* Where infinity arose is named in a network without tensors, too. */
static void test_no_tensors(void) {
    moe_module scale;
    moe_net net;
    moe_data data = samples();
    moe_evaluation result;
    memset(&scale, 0, sizeof scale);
    scale.kind = MOE_MODULE_SCALE;
    scale.scale = real(1e9);
    IS(MOE_OK, moe_net_init(&net, WIDTH, MOE_KERNELS_C, NULL));
    while (net.n_modules < 40) IS(MOE_OK, moe_net_append(&net, &scale));
    IS(MOE_OK, moe_net_build(&net, 0, 1, &error));
    REFUSED(MOE_ERR_NONFINITE, "(scale), whose tensors are finite",
            moe_evaluate(&net, &data, MOE_CRITERION_CROSS_ENTROPY, &result, &error));
    moe_net_free(&net);
}

/* What two residuals read stays until the second has read it, also where modules share memory. */
static void check_residuals(void) {
    moe_net net = unbuilt("top_k=2");
    moe_call call = call_of(TOKENS, 0);
    moe_cache cache;
    moe_net_pass pass;
    moe_real all[TOKENS * 16];
    size_t bytes, size, i;
    void *memory, *work;
    IS(MOE_OK, moe_net_linear(&net, 8));
    for (i = 0; i < 6; i++) IS(MOE_OK, i == 1 ? moe_net_residual(&net, 1) : moe_net_linear(&net, 8));
    IS(MOE_OK, moe_net_residual(&net, 6));
    IS(MOE_OK, moe_net_build(&net, 0, 5, &error));
    IS(MOE_OK, moe_net_work_size(&net, TOKENS, 0, &size));
    work = grab(1, size);
    IS(MOE_OK, moe_net_forward(&net, &call, work, size, &pass));
    memcpy(all, pass.y, TOKENS * 8 * sizeof *all);
    free(work);
    IS(MOE_OK, moe_net_decode_size(&net, TOKENS, TOKENS, &bytes, &size, &error));
    memory = grab(1, bytes);
    work = grab(1, size);
    IS(MOE_OK, moe_net_cache_init(&cache, &net, TOKENS, memory, bytes, &error));
    IS(MOE_OK, moe_net_decode(&net, &cache, &call, work, size, &pass));
    CHECK(same_reals(pass.y, all, TOKENS * 8));
    free(memory);
    free(work);
    moe_net_free(&net);
}

/* With last_only a call's output is the last token's row, also of a network whose last module
   computes every token. */
static void check_last_row(int attention) {
    moe_net net = unbuilt("top_k=2");
    moe_call call = call_of(TOKENS, 0);
    moe_cache cache;
    moe_net_pass pass;
    moe_real all[TOKENS * 16];
    size_t bytes, size, width = (size_t)net.d_out;
    void *memory, *work;
    IS(MOE_OK, attention ? moe_net_attention(&net, NULL) : moe_net_feed_forward(&net, NULL));
    IS(MOE_OK, moe_net_build(&net, 0, 5, &error));
    for (net.last_only = 0; net.last_only < 2; net.last_only++) {
        IS(MOE_OK, moe_net_decode_size(&net, TOKENS, TOKENS, &bytes, &size, &error));
        memory = grab(1, bytes);
        work = grab(1, size);
        memset(&cache, 0xff, sizeof cache);
        IS(MOE_OK, moe_net_cache_init(&cache, &net, TOKENS, memory, bytes, &error));
        CHECK(cache.n_tokens == 0);
        IS(MOE_OK, moe_net_decode(&net, &cache, &call, work, size, &pass));
        CHECK(moe_net_routing(&net, &pass, 1) != NULL && moe_net_routing(&net, &pass, 3) == NULL);
        if (!net.last_only) memcpy(all, pass.y, TOKENS * width * sizeof *all);
        else CHECK(same_reals(pass.y, all + (TOKENS - 1) * width, width));
        free(memory);
        free(work);
    }
    moe_net_free(&net);
}

static void test_last_row(void) {
    check_last_row(0);
    check_last_row(1);
    check_residuals();
}

/* A batch with more sequences than a router's soft_sequences. */
static void test_two_sequences(void) {
    moe_net net = make_net("select=soft soft_sequences=1 slots=1", 1);
    moe_train_config config;
    moe_trainer trainer;
    moe_data data = samples();
    moe_step step;
    memset(&config, 0, sizeof config);
    config.batch = TOKENS;
    IS(MOE_OK, moe_trainer_init(&trainer, &net, &config, &error));
    data.length = TOKENS / 2;
    REFUSED(MOE_ERR_ARGUMENT, "a batch has 2 sequences, but a router's soft_sequences allows 1",
            moe_trainer_step(&trainer, &data, &step, &error));
    data.length = TOKENS;
    IS(MOE_OK, moe_trainer_step(&trainer, &data, &step, &error));
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

/* Groups are compared by their probabilities however small these are. */
static void test_small_groups(void) {
    moe_layer layer = make_layer("select=grouped_top_k groups=2 groups_kept=1 top_k=1 gate=sigmoid", 0);
    moe_real input[WIDTH] = {0}, output[WIDTH];
    moe_call call = call_of(1, 0);
    moe_tensor weight;
    moe_layer_pass pass;
    size_t size, e;
    void *work;
    IS(MOE_OK, moe_layer_find(&layer, "router.weight", &weight));
    memset(weight.data, 0, weight.count * sizeof(moe_real));
    for (e = 0; e < EXPERTS; e++) weight.data[e * WIDTH + e] = 1;
    for (e = 0; e < EXPERTS; e++) input[e] = real(e < EXPERTS / 2 ? -45 : -40);
    call.x = input;
    IS(MOE_OK, moe_layer_work_size(&layer, 1, 0, &size));
    work = grab(1, size);
    IS(MOE_OK, moe_layer_forward(&layer, &call, output, work, size, &pass));
    CHECK(pass.routing.choices[0] == EXPERTS / 2);
    free(work);
    moe_layer_free(&layer);
}

/* freeze_at = 1: the factor that layers share moves in the first step and never again. */
static void test_frozen_factor(void) {
    moe_net net = make_net("select=positive gate=relu weight=raw loss_l1=0.1 l1_controller=net freeze_at=1", 1);
    const moe_real *factor = net.modules[1].layer.tensors[MOE_ROUTER_L1];
    moe_real first;
    train_step(&net);
    first = *factor;
    CHECK(first < real(0.1) || first > real(0.1), "the first step moves it");
    train_step(&net);
    train_step(&net);
    CHECK(same_reals(&first, factor, 1), "freeze_at");
    moe_net_free(&net);
}

/* freeze_at = 1: the mean of the least capacities is that of the first step. */
static void test_frozen_capacity(void) {
    moe_net net = make_net("capacity_bound=every capacity_rho=0.5 freeze_at=1", 1);
    moe_data data = samples();
    moe_trainer trainer;
    moe_tensor mean;
    moe_real first;
    int i;
    IS(MOE_OK, moe_trainer_init(&trainer, &net, NULL, &error));
    IS(MOE_OK, moe_net_find(&net, "1.router.capacity", &mean));
    IS(MOE_OK, moe_trainer_step(&trainer, &data, NULL, &error));
    first = mean.data[0];
    CHECK(first > real(0));
    for (i = 1; i < 4; i++) {
        data.n = (size_t)i; /* other tokens, another bound */
        IS(MOE_OK, moe_trainer_step(&trainer, &data, NULL, &error));
    }
    CHECK(same_reals(&first, mean.data, 1), "freeze_at");
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

/* Half of both divergences of (1/4, 3/4) and (1/2, 1/2); none of equal logits. */
static void test_consistency(void) {
    moe_real a[4], b[4] = {0, 0, 0, 0};
    const double wanted = 0.5 * (0.25 * log(0.5) + 0.75 * log(1.5) + 0.5 * log(2.0) + 0.5 * log(2.0 / 3));
    a[0] = a[2] = 0;
    a[1] = a[3] = real(log(3.0));
    CHECK_NEAR(moe_consistency_loss(2, 2, a, b, NULL, NULL), wanted, 1e-6);
    CHECK_NEAR(moe_consistency_loss(2, 2, a, a, NULL, NULL), 0, 1e-6);
}

/* Two losses by their formulas, from the logits and choices of a call. */
static void test_losses(void) {
    moe_layer layer = make_layer("top_k=1 loss_stable_balance=0.5 loss_distill=2 distill=ce_hard", 1);
    moe_call call = call_of(TOKENS, 1);
    moe_real teacher[TOKENS * EXPERTS];
    moe_layer_pass pass;
    const moe_routing *r = &pass.routing;
    double balance = 0, distance = 0;
    size_t size, t, e;
    void *work;
    for (t = 0; t < TOKENS * EXPERTS; t++) teacher[t] = real((double)(t * 7 % 11));
    call.teacher = teacher;
    IS(MOE_OK, moe_layer_work_size(&layer, TOKENS, 1, &size));
    work = grab(1, size);
    IS(MOE_OK, moe_layer_forward(&layer, &call, y, work, size, &pass));
    for (t = 0; t < TOKENS; t++) {
        const moe_real *z = r->logits + t * EXPERTS;
        const double mean = (double)TOKENS / EXPERTS;
        const int32_t chosen = r->choices[t * r->max_choices];
        double sum = 0;
        size_t best = 0;
        for (e = 0; e < EXPERTS; e++) {
            sum += exp((double)z[e]);
            if (teacher[t * EXPERTS + e] > teacher[t * EXPERTS + best]) best = e;
        }
        balance += ((double)r->counts[chosen] - mean) / mean / (1 + exp(-(double)z[chosen]));
        distance += log(sum) - (double)z[best];
    }
    CHECK_NEAR(r->loss[MOE_LOSS_STABLE_BALANCE], 0.5 * balance, 1e-5);
    CHECK_NEAR(r->loss[MOE_LOSS_DISTILL], 2 * distance / TOKENS, 1e-5);
    free(work);
    moe_layer_free(&layer);
}

/* A router that decodes says that training is in the way. */
static void test_training_decodes(void) {
    moe_layer layer = make_layer("top_k=2", 1);
    moe_call call = call_of(TOKENS, 1);
    moe_layer_pass pass;
    size_t size;
    void *work;
    call.decoding = 1;
    call.error = &error;
    IS(MOE_OK, moe_router_check_decoding(&layer.config.router, &error));
    IS(MOE_OK, moe_layer_work_size(&layer, TOKENS, 1, &size));
    work = grab(1, size);
    REFUSED(MOE_ERR_UNSUPPORTED, "call.decoding = 1 with training = 1",
            moe_layer_forward(&layer, &call, y, work, size, &pass));
    free(work);
    moe_layer_free(&layer);
}

/* A hash router names the token whose id its table does not have. */
static void test_token_beyond(void) {
    moe_layer layer = make_layer("select=hash table_size=4 top_k=2", 0);
    static const int32_t ids[TOKENS] = {0, 1, 2, 3, 4, 0};
    moe_call call = call_of(TOKENS, 0);
    moe_layer_pass pass;
    size_t size;
    void *work;
    call.token_ids = ids;
    call.error = &error;
    IS(MOE_OK, moe_layer_work_size(&layer, TOKENS, 0, &size));
    work = grab(1, size);
    REFUSED(MOE_ERR_ARGUMENT, "call.token_ids[4] = 4: must be 0 to 3",
            moe_layer_forward(&layer, &call, y, work, size, &pass));
    free(work);
    moe_layer_free(&layer);
}

/* Picks of sparsemixer by noise that the caller gives: of equal logits the largest noise wins. */
static void test_given_noise(void) {
    moe_layer layer = make_layer("weight=sparsemixer sparsemixer_sample=1 top_k=2", 1);
    moe_call call = call_of(TOKENS, 1);
    moe_real gumbel[TOKENS * 2 * EXPERTS] = {0}, uniform[TOKENS * 2] = {0};
    moe_layer_pass pass;
    moe_tensor weight;
    size_t size, t, j;
    void *work;
    IS(MOE_OK, moe_layer_find(&layer, "router.weight", &weight));
    memset(weight.data, 0, weight.count * sizeof(moe_real));
    for (t = 0; t < TOKENS; t++)
        for (j = 0; j < 2; j++) gumbel[(t * 2 + j) * EXPERTS + (3 * t + j) % EXPERTS] = 1;
    call.gumbel = gumbel;
    call.uniform = uniform;
    IS(MOE_OK, moe_layer_work_size(&layer, TOKENS, 1, &size));
    work = grab(1, size);
    IS(MOE_OK, moe_layer_forward(&layer, &call, y, work, size, &pass));
    for (t = 0; t < TOKENS; t++) {
        const int32_t *choices = pass.routing.choices + t * pass.routing.max_choices;
        const int32_t a = (int32_t)(3 * t % EXPERTS), b = (int32_t)((3 * t + 1) % EXPERTS);
        CHECK((choices[0] == a && choices[1] == b) || (choices[0] == b && choices[1] == a));
    }
    free(work);
    moe_layer_free(&layer);
}

/* A name that is longer than any field's is not read as a field. */
static void test_long_names(void) {
    char settings[200];
    moe_layer_config c = layer_config("");
    size_t n;
    for (n = 30; n < 40; n++) {
        memset(settings, 'a', n);
        strcpy(settings + n, "=1");
        REFUSED(MOE_ERR_NOT_FOUND, "unknown field", moe_fields_apply(moe_layer_fields(), &c, settings, &error));
    }
    strcpy(settings, "loss_selector_entropyxxxxxxxxxx");
    REFUSED(MOE_ERR_NOT_FOUND, "did you mean loss_selector_entropy?",
            moe_field_set(moe_router_fields(), &c.router, settings, "1", &error));
    strcat(settings, "x");
    CHECK(moe_field_set(moe_router_fields(), &c.router, settings, "1", &error) == MOE_ERR_NOT_FOUND);
    CHECK(strstr(error.message, "did you mean") == NULL, error.message);
}

int main(void) {
    fill();
    CASE(test_experts_alone());
    CASE(test_one_sample());
    CASE(test_two_sequences());
    CASE(test_no_tensors());
    CASE(test_last_row());
    CASE(test_small_groups());
    CASE(test_not_ready());
    CASE(test_frozen_factor());
    CASE(test_frozen_capacity());
    CASE(test_long_names());
    CASE(test_losses());
    CASE(test_given_noise());
    CASE(test_token_beyond());
    CASE(test_training_decodes());
    CASE(test_consistency());
    CASE(test_layers());
    CASE(test_clashes());
    CASE(test_struct_places());
    CASE(test_nets());
    CASE(test_training());
    CASE(test_modular());
    CASE(test_hme());
    CASE(test_soft_selected());
    CASE(test_files());
#ifndef MOE_NO_STDIO
    CASE(test_layer_files());
#endif
    CASE(test_models_refused());
    if (!MOE_REAL_IS_DOUBLE) CASE(test_model_calls(MOE_WEIGHTS_FLOAT));
    CASE(test_model_calls(MOE_WEIGHTS_INT8));
    CASE(test_small_models());
    CASE(test_attention_models());
    CASE(test_masks());
    CASE(test_layer_sizes());
    CASE(test_net_sizes());
    CASE(test_many_slots());
    CASE(test_many_sequences());
#if SIZE_MAX > 0xFFFFFFFF
    CASE(test_beyond_size());
    CASE(test_sum_beyond_size());
#endif
    CASE(test_model_memory());
    CASE(test_classical());
    CASE(test_supplies());
    CASE(test_first_modules());
    CASE(test_odd_calls());
    CASE(test_model_choices());
    CASE(test_model_ranges());
    CASE(test_texts());
    CASE(test_layer_call_errors());
    CASE(test_net_call_errors());
    CASE(test_net_batches());
    CASE(test_sequence_call_errors());
    return test_end();
}
