/* net.c - what moe.h promises of networks: modules, gradients, training, files, hostile
   configurations, failures of memory.

     cc -std=c99 -O2 -I. tests/unit/net.c -o net -lm && ./net [FOLDER]
     (also with -DMOE_REAL=double, and as C++)

   FOLDER, by default the current one, takes two small files that are removed again. Exit status 1
   if a check failed. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MOE_REAL_IS_DOUBLE
#define NEAR 1e-10
#else
#define NEAR 1e-4
#endif

static moe_real *normals(size_t count, double spread, uint64_t seed) {
    moe_real *v = (moe_real *)grab(count, sizeof *v);
    moe_rng rng;
    size_t i;
    moe_rng_seed(&rng, seed);
    for (i = 0; i < count; i++) v[i] = (moe_real)spread * moe_rng_normal(&rng);
    return v;
}

/* ---- networks ---- */

enum { D = 6, CLASSES = 3, N = 96 };

static moe_layer_config small_layer(void) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 4;
    c.router.top_k = 2;
    c.router.loss_balance = (moe_real)0.01;
    c.d_ff = 5;
    return c;
}

/* All kinds of modules, residuals that overlap, and two mixtures. */
static moe_status add_modules(moe_net *net, const moe_layer_config *config) {
    moe_layer_config wide = *config;
    wide.d_out = 9;
    moe_net_linear(net, 8);
    moe_net_activation(net, MOE_ACT_GELU);
    moe_net_layer_norm(net);
    moe_net_mixture(net, config);
    moe_net_residual(net, 2);
    moe_net_residual(net, 3);
    moe_net_mixture(net, &wide);
    moe_net_activation(net, MOE_ACT_TANH);
    moe_net_residual(net, 1);
    return moe_net_linear(net, CLASSES);
}

static moe_status make_net(moe_net *net, int trainable, uint64_t seed, const moe_allocator *allocator,
                           moe_error *error) {
    moe_layer_config c = small_layer();
    moe_net_init(net, D, MOE_KERNELS_C, allocator);
    add_modules(net, &c);
    return moe_net_build(net, trainable, seed, error);
}

/* y of all rows at once, to be freed. */
static moe_real *outputs(const moe_net *net, const moe_real *x, size_t n) {
    moe_call call;
    moe_net_pass pass;
    size_t size = 0;
    void *work;
    moe_real *y = (moe_real *)grab(n * (size_t)net->d_out, sizeof *y);
    memset(&call, 0, sizeof call);
    call.n_tokens = n;
    call.x = x;
    CHECK_STATUS(moe_net_work_size(net, n, 0, &size), MOE_OK, "work size");
    work = grab(size, 1);
    if (CHECK_STATUS(moe_net_forward(net, &call, work, size, &pass), MOE_OK, "forward"))
        memcpy(y, pass.y, n * (size_t)net->d_out * sizeof *y);
    free(work);
    return y;
}

static moe_real *copy_of(const moe_real *v, size_t count) {
    moe_real *copy = (moe_real *)grab(count, sizeof *copy);
    memcpy(copy, v, count * sizeof *copy);
    return copy;
}

/* Three noisy clusters, far enough apart. */
static moe_data toy_data(size_t n, uint64_t seed) {
    moe_data data;
    moe_real *x = normals(n * D, 0.6, seed), *targets = (moe_real *)grab(n * CLASSES, sizeof *targets);
    int32_t *labels = (int32_t *)grab(n, sizeof *labels);
    size_t i;
    memset(&data, 0, sizeof data);
    for (i = 0; i < n; i++) {
        labels[i] = (int32_t)(i % CLASSES);
        x[i * D + i % CLASSES] += (moe_real)2.0;
        x[i * D + 3] += i % 2 ? (moe_real)1.5 : (moe_real)-1.5;
        targets[i * CLASSES + i % CLASSES] = 1;
    }
    data.n = n;
    data.x = x;
    data.labels = labels;
    data.targets = targets;
    return data;
}

static void drop_data(moe_data *data) {
    moe_real *reals;
    int32_t *labels;
    memcpy(&reals, &data->x, sizeof reals);
    free(reals);
    memcpy(&reals, &data->targets, sizeof reals);
    free(reals);
    memcpy(&labels, &data->labels, sizeof labels);
    free(labels);
}

static moe_train_config quick_training(void) {
    moe_train_config c;
    memset(&c, 0, sizeof c);
    c.epochs = 2;
    c.batch = 16;
    c.seed = 3;
    return c;
}

/* The bits of all tensors; a failed call must leave them alone. */
static uint64_t fingerprint(const moe_net *net) {
    uint64_t hash = 1;
    size_t i, j;
    const unsigned char *p;
    for (i = 0; i < net->n_tensors; i++)
        for (p = (const unsigned char *)net->tensors[i].data, j = 0; j < net->tensors[i].count * sizeof(moe_real); j++)
            hash = (hash ^ p[j]) * UINT64_C(0x100000001b3);
    return hash;
}

static moe_buffer written(const moe_net *net) {
    moe_buffer b;
    moe_stream s;
    moe_error error;
    memset(&b, 0, sizeof b);
    s = moe_buffer_stream(&b);
    CHECK_STATUS(moe_net_write(net, &s, &error), MOE_OK, "write");
    return b;
}

/* ---- modules ---- */

/* One linear module against its formula; and the activation, norm and residual on top of it. */
static void test_modules(void) {
    static const char *const names[] = {"0.weight", "0.bias", "2.weight", "2.bias"};
    moe_net net;
    moe_error error;
    moe_real *x = normals(5 * D, 1, 1), *y;
    size_t t, j, i;
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_linear(&net, 4);
    moe_net_activation(&net, MOE_ACT_RELU);
    moe_net_layer_norm(&net);
    moe_net_residual(&net, 2);
    if (!CHECK_STATUS(moe_net_build(&net, 0, 7, &error), MOE_OK, "build")) return;
    CHECK(net.d_in == D && net.d_out == 4 && net.n_modules == 4 && net.n_tensors == 4, "sizes of a net");
    for (i = 0; i < 4; i++)
        CHECK(strcmp(net.tensors[i].name, names[i]) == 0 && net_tensor(&net, names[i]) == &net.tensors[i],
              "names in order");
    for (i = 0; i < 4; i++) {
        net.modules[0].tensors[MOE_MODULE_BIAS][i] = (moe_real)i;
        net.modules[2].tensors[MOE_MODULE_WEIGHT][i] = (moe_real)(1 + i);
        net.modules[2].tensors[MOE_MODULE_BIAS][i] = (moe_real)0.5;
    }
    y = outputs(&net, x, 5);
    for (t = 0; t < 5; t++) {
        double h[4], r[4], mean = 0, var = 0;
        for (j = 0; j < 4; j++) {
            for (h[j] = (double)j, i = 0; i < D; i++)
                h[j] += (double)net.modules[0].tensors[MOE_MODULE_WEIGHT][j * D + i] * (double)x[t * D + i];
            r[j] = h[j] > 0 ? h[j] : 0;
            mean += r[j] / 4;
        }
        for (j = 0; j < 4; j++) var += (r[j] - mean) * (r[j] - mean) / 4;
        for (j = 0; j < 4; j++)
            CHECK(near_to((double)y[t * 4 + j], (r[j] - mean) / sqrt(var + 1e-5) * (double)(1 + j) + 0.5 + h[j], NEAR),
                  "linear, relu, norm, residual");
    }
    free(x);
    free(y);
    moe_net_free(&net);
    moe_net_free(&net);
    CHECK(net.modules == NULL && net.n_modules == 0, "freed twice");
}

/* A mixture in a network gives what the layer alone gives with the same tensors. */
static void test_mixture(void) {
    moe_net net;
    moe_layer layer;
    moe_layer_config c = small_layer();
    moe_error error;
    moe_call call;
    moe_net_pass pass;
    moe_layer_pass layer_pass;
    moe_tensor t;
    moe_real *x = normals(N * D, 1, 2), *y = (moe_real *)grab(N * D, sizeof *y);
    size_t size, layer_size, i, used = 0, layer_used = 0;
    void *work, *layer_work;
    char name[80];
    memset(&call, 0, sizeof call);
    call.n_tokens = N;
    call.x = x;
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &c);
    CHECK_STATUS(moe_net_build(&net, 0, 5, &error), MOE_OK, "build");
    c.router.d_model = D;
    c.kernels = MOE_KERNELS_C;
    CHECK_STATUS(moe_layer_create(&layer, &c, 0, 5, NULL, &error), MOE_OK, "create");
    for (i = 0; moe_layer_tensor(&layer, i, &t) == MOE_OK; i++) {
        moe_tensor *of_net;
        sprintf(name, "0.%s", t.name);
        of_net = net_tensor(&net, name);
        if (CHECK(of_net != NULL && of_net->count == t.count, "the layer's tensors are in the net"))
            CHECK(same_bits(of_net->data, t.data, t.count * sizeof *t.data),
                  "the same seed starts net and layer alike");
    }
    CHECK(i == net.n_tensors, "no other tensors");
    CHECK(moe_net_parameter_count(&net, &used) == moe_layer_parameter_count(&layer, &layer_used) && used == layer_used,
          "parameters");
    moe_net_work_size(&net, N, 0, &size);
    moe_layer_work_size(&layer, N, 0, &layer_size);
    work = grab(size, 1);
    layer_work = grab(layer_size, 1);
    CHECK_STATUS(moe_net_forward(&net, &call, work, size, &pass), MOE_OK, "forward");
    CHECK_STATUS(moe_layer_forward(&layer, &call, y, layer_work, layer_size, &layer_pass), MOE_OK, "layer forward");
    CHECK(same_bits(pass.y, y, N * D * sizeof *y), "the same output, bit for bit");
    CHECK(moe_net_routing(&net, &pass, 0) != NULL && moe_net_routing(&net, &pass, 0)->n_tokens == N, "routing");
    CHECK(moe_net_routing(&net, &pass, 1) == NULL && moe_net_routing(NULL, &pass, 0) == NULL, "no routing");
    free(work);
    free(layer_work);
    free(x);
    free(y);
    moe_net_free(&net);
    moe_layer_free(&layer);
}

/* Sizes, states and arguments that are refused. */
static void test_calls(void) {
    moe_net net;
    moe_error error;
    moe_call call;
    moe_net_pass pass, before;
    moe_real *x = normals(N * D, 1, 2), *y, *one;
    unsigned char *work;
    size_t size, small, i;
    CHECK_STATUS(make_net(&net, 1, 1, NULL, &error), MOE_OK, "build");
    CHECK_STATUS(moe_net_work_size(&net, N, 0, &size), MOE_OK, "size");
    CHECK(moe_net_work_size(&net, N - 1, 0, &small) == MOE_OK && small <= size, "never less for more tokens");
    CHECK(moe_net_work_size(&net, N, 1, &small) == MOE_OK && small > size, "training takes more");
    CHECK_STATUS(moe_net_work_size(&net, (size_t)INT32_MAX + 1, 0, &small), MOE_ERR_OVERFLOW, "too many tokens");
    work = (unsigned char *)grab(size + 1, 1);
    memset(&call, 0, sizeof call);
    memset(&pass, 7, sizeof pass);
    before = pass;
    call.n_tokens = N;
    call.x = x;
    CHECK_STATUS(moe_net_forward(&net, &call, work, size - 1, &pass), MOE_ERR_SPACE, "one byte too few");
    call.router_x = x;
    CHECK_STATUS(moe_net_forward(&net, &call, work, size, &pass), MOE_ERR_ARGUMENT, "router_x");
    call.router_x = NULL;
    call.x = NULL;
    CHECK_STATUS(moe_net_forward(&net, &call, work, size, &pass), MOE_ERR_ARGUMENT, "no x");
    CHECK_STATUS(moe_net_forward(&net, &call, NULL, size, &pass), MOE_ERR_ARGUMENT, "no work");
    CHECK(same_bits(&before, &pass, sizeof pass), "a failed forward leaves the pass alone");
    call.n_tokens = 0;
    CHECK_STATUS(moe_net_forward(&net, &call, work, size, &pass), MOE_OK, "no tokens");
    call.n_tokens = N;
    call.x = x;
    CHECK_STATUS(moe_net_forward(&net, &call, work + 1, size, &pass), MOE_OK, "odd address");
    CHECK_STATUS(moe_net_backward(&net, x, NULL, &pass), MOE_ERR_STATE, "backward after an inference call");
    y = outputs(&net, x, N);
    CHECK(same_bits(y, pass.y, N * CLASSES * sizeof *y), "alignment does not change the result");
    for (i = 0; i < N; i++) {
        one = outputs(&net, x + i * D, 1);
        CHECK(same_bits(one, y + i * CLASSES, CLASSES * sizeof *y),
              "a row's result does not depend on the batch, bit for bit");
        free(one);
    }
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_ERR_STATE, "built twice");
    CHECK_STATUS(moe_net_linear(&net, 3), MOE_ERR_STATE, "a module after build");
    CHECK(net.error.code == MOE_OK && net.n_modules == 10, "the net is as it was");
    CHECK(net_tensor(&net, "3.router.weight") != NULL && net_tensor(&net, "6.experts.down") != NULL, "find");
    CHECK(net_tensor(&net, "1.weight") == NULL && net_tensor(&net, "00.weight") == NULL &&
              net_tensor(&net, "10.weight") == NULL && net_tensor(&net, "") == NULL && net_tensor(&net, "0") == NULL &&
              net_tensor(&net, ".weight") == NULL && net_tensor(&net, "99999999999999999999999.weight") == NULL &&
              net_tensor(&net, "weight") == NULL && net_tensor(&net, NULL) == NULL,
          "nothing of that name");
    free(work);
    free(x);
    free(y);
    moe_net_free(&net);
}

/* A chain of calls: the first failure is what build reports, and the calls after it change
   nothing. */
static void test_chain(void) {
    moe_net net;
    moe_error error;
    moe_layer_config c = small_layer();
    moe_net_init(&net, D, 0, NULL);
    CHECK_STATUS(moe_net_linear(&net, 8), MOE_OK, "linear");
    CHECK_STATUS(moe_net_residual(&net, 1), MOE_ERR_CONFIG, "residual between different widths");
    CHECK_STATUS(moe_net_linear(&net, 0), MOE_ERR_CONFIG, "later calls return the first failure");
    CHECK_STATUS(moe_net_layer_norm(&net), MOE_ERR_CONFIG, "later good calls too");
    CHECK(net.n_modules == 1 && net.d_out == 8, "nothing was added");
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_ERR_CONFIG, "build reports it");
    CHECK(strstr(error.message, "module 1 (residual)") != NULL && strstr(error.message, "width 6") != NULL &&
              strstr(error.message, "width 8") != NULL,
          "the message names module and widths");
    moe_net_free(&net);

    moe_net_init(&net, D, 0, NULL);
    CHECK_STATUS(moe_net_residual(&net, 1), MOE_ERR_CONFIG, "residual around nothing");
    moe_net_free(&net);
    moe_net_init(&net, D, 0, NULL);
    CHECK_STATUS(moe_net_activation(&net, MOE_ACT_COUNT), MOE_ERR_CONFIG, "no such activation");
    moe_net_free(&net);
    moe_net_init(&net, D, 0, NULL);
    CHECK_STATUS(moe_net_linear(&net, MOE_MAX_WIDTH + 1), MOE_ERR_CONFIG, "too wide");
    moe_net_free(&net);
    moe_net_init(&net, D, 0, NULL);
    c.router.d_model = 5;
    CHECK_STATUS(moe_net_mixture(&net, &c), MOE_ERR_CONFIG, "another width than arrives");
    CHECK_STATUS(moe_net_mixture(&net, NULL), MOE_ERR_CONFIG, "the first failure again");
    moe_net_free(&net);
    moe_net_init(&net, D, 0, NULL);
    c.router.d_model = 0;
    c.router.top_k = 5;
    CHECK_STATUS(moe_net_mixture(&net, &c), MOE_ERR_CONFIG, "5 of 4 experts");
    CHECK(strstr(net.error.message, "top_k = 5") != NULL && strstr(net.error.message, "module 0") != NULL,
          "the field is named");
    moe_net_free(&net);

    CHECK_STATUS(moe_net_init(&net, -1, 0, NULL), MOE_ERR_CONFIG, "d_in = -1");
    CHECK_STATUS(moe_net_linear(&net, 3), MOE_ERR_CONFIG, "a chain that init began badly");
    CHECK_STATUS(moe_net_build(&net, 0, 1, &net.error), MOE_ERR_CONFIG, "build reports init's failure");
    CHECK(strstr(net.error.message, "d_in = -1") != NULL, "by name, and forgets nothing");
    moe_net_free(&net);
    CHECK_STATUS(moe_net_init(&net, 0, 0, NULL), MOE_OK, "d_in = 0: token ids");
    CHECK_STATUS(moe_net_linear(&net, 3), MOE_ERR_CONFIG, "but no embedding");
    CHECK(strstr(net.error.message, "module 0 (linear)") != NULL, "by name");
    moe_net_free(&net);
    CHECK_STATUS(moe_net_init(&net, 3, MOE_KERNELS_COUNT, NULL), MOE_ERR_CONFIG, "no such kernels");
    CHECK_STATUS(
        moe_net_init(&net, 3, moe_kernels_select(MOE_KERNELS_WASM) == NULL ? MOE_KERNELS_WASM : MOE_KERNELS_NEON, NULL),
        MOE_ERR_UNSUPPORTED, "kernels of another machine");
    CHECK_STATUS(moe_net_init(NULL, 3, 0, NULL), MOE_ERR_ARGUMENT, "no net");
    moe_net_init(&net, D, 0, NULL);
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_ERR_CONFIG, "no modules");
    CHECK(moe_net_parameter_count(&net, NULL) == 0 && net_tensor(&net, "0.weight") == NULL, "nothing before build");
    moe_net_free(&net);
    memset(&net, 0, sizeof net);
    CHECK_STATUS(moe_net_linear(&net, 3), MOE_ERR_STATE, "a net without init");
    moe_net_free(&net);
}

/* K = 1 with the weight sum: no gradient would ever reach the router. */
static void test_untrainable(void) {
    moe_net net;
    moe_error error;
    moe_layer_config c = small_layer();
    moe_train_config t = quick_training();
    moe_trainer trainer;
    moe_tensor tensor;
    c.router.top_k = 1;
    c.router.loss_balance = 0;
    moe_net_init(&net, D, 0, NULL);
    moe_net_mixture(&net, &c);
    moe_net_linear(&net, 3);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_ERR_CONFIG, "top_k = 1 with weight = sum cannot learn");
    CHECK_STATUS(moe_net_find(&net, "0.router.weight", &tensor), MOE_ERR_NOT_FOUND, "nothing after a failed build");
    CHECK(strstr(error.message, "module 0") != NULL && strstr(error.message, "top_k = 1") != NULL &&
              strstr(error.message, "weight = sum") != NULL,
          "and says why");
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK, "but it can infer");
    CHECK_STATUS(moe_net_find(&net, "0.router.weight", &tensor), MOE_OK, "after build");
    CHECK_STATUS(moe_net_mixture(&net, NULL), MOE_ERR_STATE, "after build nothing is added");
    CHECK(net.error.code == MOE_OK && net.n_modules == 2, "nor remembered");
    CHECK_STATUS(moe_trainer_init(&trainer, &net, &t, &error), MOE_ERR_STATE, "not built for training");
    moe_net_free(&net);
    c.router.untrained = 1;
    moe_net_init(&net, D, 0, NULL);
    moe_net_mixture(&net, &c);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "unless that is wanted");
    moe_net_free(&net);
}

/* ---- gradients ---- */

typedef struct probe {
    moe_net *net;
    moe_call call;
    void *work;
    size_t size;
    const moe_real *dy;
} probe;

/* sum(y dy) plus all router losses. */
static double probe_value(const probe *p) {
    moe_net_pass pass;
    double sum = 0;
    size_t i, loss;
    if (moe_net_forward(p->net, &p->call, p->work, p->size, &pass) != MOE_OK) return -1e9;
    for (i = 0; i < p->call.n_tokens * CLASSES; i++) sum += (double)pass.y[i] * (double)p->dy[i];
    for (i = 0; i < p->net->n_modules; i++) {
        const moe_routing *r = moe_net_routing(p->net, &pass, i);
        for (loss = 0; r != NULL && loss < MOE_LOSS_COUNT; loss++) sum += (double)r->loss[loss];
    }
    return sum;
}

static double difference(const probe *p, moe_real *at) {
    moe_real kept = *at, step = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e-5 : 4e-3);
    double up, down;
    *at = kept + step;
    up = probe_value(p);
    *at = kept - step;
    down = probe_value(p);
    *at = kept;
    return (up - down) / (2.0 * (double)step);
}

/* A residual around dropout adds to the gradient of x, and dropout does too. */
static void test_dropout_adds(void) {
    moe_net net;
    moe_call call;
    moe_net_pass pass;
    moe_real x[2 * D], dy[2 * D], dx[2 * D] = {0};
    moe_rng rng;
    size_t size = 0, i;
    void *work;
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_dropout(&net, (moe_real)0.5);
    moe_net_residual(&net, 1);
    CHECK_STATUS(moe_net_build(&net, 1, 1, NULL), MOE_OK, "build");
    memset(&call, 0, sizeof call);
    call.n_tokens = 2;
    call.x = x;
    call.training = 1;
    call.rng = &rng;
    moe_rng_seed(&rng, 8);
    for (i = 0; i < 2 * D; i++) x[i] = dy[i] = 1;
    CHECK_STATUS(moe_net_work_size(&net, 2, 1, &size), MOE_OK, "size");
    work = memset(grab(size, 1), 0x55, size);
    CHECK_STATUS(moe_net_forward(&net, &call, work, size, &pass), MOE_OK, "forward");
    CHECK_STATUS(moe_net_backward(&net, dy, dx, &pass), MOE_OK, "backward");
    for (i = 0; i < 2 * D; i++) CHECK_NEAR(dx[i], pass.y[i], 1e-6); /* 1, or 1 + 1 / (1 - rate) */
    free(work);
    moe_net_free(&net);
}

static void test_gradients(void) {
    double tolerance = MOE_REAL_IS_DOUBLE ? 1e-6 : 0.02;
    moe_net net;
    moe_error error;
    moe_layer_config c = small_layer();
    moe_net_pass pass;
    probe p;
    moe_real *x = normals(7 * D, 1, 4), *dy = normals(7 * CLASSES, 1, 5);
    moe_real *dx = (moe_real *)grab(7 * D, sizeof *dx);
    size_t i, j;
    c.router.select = MOE_SELECT_DENSE; /* no choice that a small step could change */
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    add_modules(&net, &c);
    CHECK_STATUS(moe_net_build(&net, 1, 11, &error), MOE_OK, "build");
    memset(&p, 0, sizeof p);
    p.net = &net;
    p.dy = dy;
    p.call.n_tokens = 7;
    p.call.x = x;
    p.call.training = 1;
    moe_net_work_size(&net, 7, 1, &p.size);
    p.work = grab(p.size, 1);
    memset(p.work, 0x55, p.size); /* numbers of an earlier call */
    for (i = 0; i < 7 * D; i++) dx[i] = 1; /* what is there is added to */
    CHECK_STATUS(moe_net_forward(&net, &p.call, p.work, p.size, &pass), MOE_OK, "forward");
    CHECK_STATUS(moe_net_backward(&net, dy, dx, &pass), MOE_OK, "backward");
    for (i = 0; i < 7 * D; i++) CHECK(near_to((double)dx[i] - 1.0, difference(&p, &x[i]), tolerance), "gradient of x");
    for (i = 0; i < net.n_tensors; i++)
        for (j = 0; j < net.tensors[i].count; j += 1 + j % 3) {
            double wanted = difference(&p, &net.tensors[i].data[j]), got = (double)net.tensors[i].gradient[j];
            if (!CHECK(near_to(got, wanted, tolerance), "gradient of a tensor"))
                printf("        %s[%d]: %g, by differences %g\n", net.tensors[i].name, (int)j, got, wanted);
        }
    net_zero_gradients(&net);
    for (i = 0; i < net.n_tensors; i++)
        for (j = 0; j < net.tensors[i].count; j++) CHECK(!(fabs((double)net.tensors[i].gradient[j]) > 0), "zeroed");
    CHECK_STATUS(moe_net_forward(&net, &p.call, p.work, p.size, &pass), MOE_OK, "forward again");
    CHECK_STATUS(moe_net_backward(&net, NULL, NULL, &pass), MOE_ERR_ARGUMENT, "no dy");
    CHECK_STATUS(moe_net_backward(&net, dy, NULL, &pass), MOE_OK, "dx is not wanted");
    free(x);
    free(dy);
    free(dx);
    free(p.work);
    moe_net_free(&net);
}

static void test_losses(void) {
    moe_real y[6] = {1, 2, 3, 1000, 0, -1000}, dy[6], targets[6] = {1, 0, 0, 1000, 1, -1000};
    int32_t labels[2] = {2, 1};
    double e1 = exp(-1.0), e2 = exp(-2.0);
    double lse = log(1 + e1 + e2);
    CHECK(near_to((double)moe_cross_entropy(1, 3, y, labels, dy), lse, NEAR), "cross-entropy");
    CHECK(near_to((double)dy[0], exp(-2 - lse), NEAR) && near_to((double)dy[2], exp(-lse) - 1, NEAR), "its gradient");
    CHECK(near_to((double)moe_cross_entropy(2, 3, y, labels, dy), (lse + 1000) / 2, NEAR),
          "mean over rows, and no overflow");
    CHECK(near_to((double)dy[3], 0.5, NEAR) && near_to((double)dy[4], -0.5, NEAR), "the gradient is that of the mean");
    CHECK(near_to((double)moe_squared_error(2, 3, y, targets, dy), (4 + 9 + 1) / 4.0, NEAR), "squared error");
    CHECK(near_to((double)dy[1], 1, NEAR) && near_to((double)dy[4], -0.5, NEAR), "its gradient");
    CHECK(near_to((double)moe_cross_entropy(0, 3, y, labels, dy), 0, NEAR) &&
              near_to((double)moe_squared_error(0, 3, y, targets, dy), 0, NEAR),
          "no rows");
    moe_squared_error(2, 3, y, targets, y);
    CHECK(near_to((double)y[1], 1, NEAR), "in place");
    y[3] = (moe_real)INFINITY;
    dy[3] = dy[4] = dy[5] = 0;
    moe_cross_entropy(1, 3, y + 3, labels, dy + 3);
    CHECK(!moe_is_finite(dy[3]) && !moe_is_finite(dy[4]) && !moe_is_finite(dy[5]), "no gradient at infinity");
}

/* ---- training ---- */

/* Every optimizer and criterion learns; the same seed gives the same bits. */
static void test_learning(void) {
    moe_data train = toy_data(240, 21), test = toy_data(90, 22);
    int run, again;
    for (run = 0; run < 4; run++) {
        uint64_t print[2] = {0, 1};
        for (again = 0; again < 2; again++) {
            moe_net net;
            moe_error error;
            moe_evaluation before, after;
            moe_train_config c = quick_training();
            c.epochs = 12;
            c.optimizer = run % 2 == 0 ? MOE_OPTIMIZER_ADAMW : MOE_OPTIMIZER_SGD;
            c.criterion = run < 2 ? MOE_CRITERION_CROSS_ENTROPY : MOE_CRITERION_SQUARED_ERROR;
            c.rate = (moe_real)(run % 2 == 0 ? 0.01 : run < 2 ? 0.05 : 0.02);
            c.final_rate = (moe_real)0.1;
            c.decay = (moe_real)0.001;
            c.clip = 1;
            CHECK_STATUS(make_net(&net, 1, 8, NULL, &error), MOE_OK, "build");
            CHECK_STATUS(moe_evaluate(&net, &test, c.criterion, &before, &error), MOE_OK, "evaluate");
            if (!CHECK_STATUS(moe_fit(&net, &train, &test, &c, &error), MOE_OK, "fit"))
                printf("        %s\n", error.message);
            CHECK_STATUS(moe_evaluate(&net, &test, c.criterion, &after, &error), MOE_OK, "evaluate");
            CHECK(after.n == 90 && after.loss < before.loss * (moe_real)0.5, "the loss falls");
            if (run < 2) CHECK(after.accuracy > (moe_real)0.9, "nine of ten are right");
            else CHECK(after.loss < (moe_real)0.12 && !(after.accuracy > 0), "squared error");
            print[again] = fingerprint(&net);
            moe_net_free(&net);
        }
        CHECK(print[0] == print[1], "the same seed gives the same bits");
    }
    drop_data(&train);
    drop_data(&test);
}

static void follow_updates(int optimizer, moe_net *net, moe_trainer *trainer, moe_data *data, moe_step *seen) {
    int step, i;
    moe_error error;
    double w[3];
    double v[3] = {0, 0, 0};
    double m[3] = {0, 0, 0};
    w[0] = (double)net->tensors[0].data[0];
    w[1] = (double)net->tensors[0].data[1];
    w[2] = (double)net->tensors[1].data[0];
    for (step = 1; step <= 3; step++) {
        double e = w[0] * 1.5 - w[1] + w[2] - 2.0, g[3], norm, scale;
        g[0] = 1.5 * e;
        g[1] = -e;
        g[2] = e;
        norm = sqrt(g[0] * g[0] + g[1] * g[1] + g[2] * g[2]);
        scale = norm > 0.7 ? 0.7 / norm : 1.0;
        for (i = 0; i < 3; i++) {
            double decay = i < 2 ? 0.2 : 0.0; /* the bias is not decayed */
            g[i] *= scale;
            if (optimizer == MOE_OPTIMIZER_SGD) {
                v[i] = 0.9 * v[i] + g[i] + decay * w[i];
                w[i] -= 0.1 * v[i];
                continue;
            }
            m[i] = 0.9 * m[i] + 0.1 * g[i];
            v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
            w[i] -=
                0.1 * (m[i] / (1 - pow(0.9, step)) / (sqrt(v[i] / (1 - pow(0.999, step))) + 1e-8) + decay * w[i]);
        }
        CHECK_STATUS(moe_trainer_step(trainer, data, seen, &error), MOE_OK, "step");
        CHECK(near_to((double)seen->loss, e * e / 2, 10 * NEAR) &&
                  near_to((double)seen->gradient_norm, norm, 10 * NEAR),
              "loss and norm of the step");
        CHECK(near_to((double)net->tensors[0].data[0], w[0], 10 * NEAR) &&
                  near_to((double)net->tensors[0].data[1], w[1], 10 * NEAR) &&
                  near_to((double)net->tensors[1].data[0], w[2], 10 * NEAR),
              "the step is that of the formula");
    }
}

/* Loss and accuracy of an evaluation, which takes several batches that count differently. */
static void test_evaluation(void) {
    enum { MANY = 150 };
    moe_data data = toy_data(MANY, 9), some;
    int32_t labels[MANY];
    moe_evaluation e;
    moe_error error;
    moe_net net;
    moe_real *y;
    size_t i, j, n = 0, right = 0;
    double loss = 0;
    CHECK_STATUS(make_net(&net, 0, 8, NULL, &error), MOE_OK, "build");
    y = outputs(&net, data.x, MANY);
    for (i = 0; i < MANY; i++) {
        double sum = 0;
        size_t best = 0;
        labels[i] = i % 4 > 0 && i < 128 ? -1 : data.labels[i];
        if (labels[i] < 0) continue;
        for (j = 0; j < CLASSES; j++) {
            sum += exp((double)y[i * CLASSES + j]);
            if (y[i * CLASSES + j] > y[i * CLASSES + best]) best = j;
        }
        loss += log(sum) - (double)y[i * CLASSES + (size_t)labels[i]];
        right += best == (size_t)labels[i];
        n++;
    }
    some = data;
    some.labels = labels;
    CHECK_STATUS(moe_evaluate(&net, &some, 0, &e, &error), MOE_OK, "evaluate");
    CHECK(e.n == n && right > 0 && right < n, "the labeled samples");
    CHECK_NEAR(e.loss, loss / (double)n, NEAR);
    CHECK_NEAR(e.accuracy, (double)right / (double)n, 1e-6);
    free(y);
    drop_data(&data);
    moe_net_free(&net);
}

/* The optimizers against their formulas, on one linear module and one sample. */
static void test_updates(void) {
    int optimizer;
    for (optimizer = 0; optimizer < MOE_OPTIMIZER_COUNT; optimizer++) {
        moe_net net;
        moe_error error;
        moe_trainer trainer;
        moe_train_config c = quick_training();
        moe_real x[2] = {(moe_real)1.5, -1}, target[1] = {2};
        moe_data data;
        moe_step seen;
        memset(&data, 0, sizeof data);
        data.n = 1;
        data.x = x;
        data.targets = target;
        c.criterion = MOE_CRITERION_SQUARED_ERROR;
        c.optimizer = optimizer;
        c.rate = (moe_real)0.1;
        c.decay = (moe_real)0.2;
        c.clip = (moe_real)0.7;
        moe_net_init(&net, 2, MOE_KERNELS_C, NULL);
        moe_net_linear(&net, 1);
        CHECK_STATUS(moe_net_build(&net, 1, 3, &error), MOE_OK, "build");
        CHECK_STATUS(moe_trainer_init(&trainer, &net, &c, &error), MOE_OK, "trainer");
        follow_updates(optimizer, &net, &trainer, &data, &seen);
        CHECK(trainer.steps == 3, "steps are counted");
        moe_trainer_free(&trainer);
        moe_trainer_free(&trainer);
        moe_net_free(&net);
    }
}

/* Frozen tensors and state do not move, not even by decay. */
static void test_frozen(void) {
    moe_net net;
    moe_error error;
    moe_layer_config c = small_layer();
    moe_train_config t = quick_training();
    moe_data data = toy_data(64, 5);
    moe_tensor *weight, *bias, *down;
    moe_real kept[4 * D], moved;
    t.decay = (moe_real)0.1;
    c.router.score = MOE_SCORE_RANDOM;
    c.router.selection_bias = 1;
    moe_net_init(&net, D, 0, NULL);
    moe_net_mixture(&net, &c);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    weight = net_tensor(&net, "0.router.weight");
    bias = net_tensor(&net, "0.router.selection_bias");
    down = net_tensor(&net, "0.experts.down");
    if (CHECK(weight != NULL && bias != NULL && down != NULL, "tensors") && CHECK(weight->count == 4 * D, "shape")) {
        CHECK((weight->flags & MOE_PARAM_FROZEN) != 0 && (bias->flags & MOE_PARAM_STATE) != 0, "flags");
        memcpy(kept, weight->data, sizeof kept);
        bias->data[1] = (moe_real)0.25;
        moved = down->data[0];
        CHECK_STATUS(moe_fit(&net, &data, NULL, &t, &error), MOE_OK, "fit");
        CHECK(same_bits(kept, weight->data, sizeof kept), "frozen");
        CHECK(!(bias->data[1] < (moe_real)0.25) && !(bias->data[1] > (moe_real)0.25) &&
                  !(fabs((double)bias->data[0]) > 0),
              "state");
        CHECK(down->data[0] < moved || down->data[0] > moved, "trained");
    }
    drop_data(&data);
    moe_net_free(&net);
}

typedef struct watch {
    int epoch, ends, tests, order, stop_at, calls;
    moe_real loss;
} watch;

static int watch_progress(void *ctx, const moe_progress *p) {
    watch *w = (watch *)ctx;
    w->calls++;
    if (p->epoch < w->epoch || p->step < 1 || p->step > p->steps || p->epochs != 2 || p->steps != 7) w->order = 1;
    if (p->epoch_ended != (p->step == p->steps)) w->order = 1;
    w->epoch = p->epoch;
    w->ends += p->epoch_ended;
    w->tests += p->test.n == 30;
    w->loss = p->loss;
    return w->calls == w->stop_at;
}

static void test_progress(void) {
    moe_data train = toy_data(100, 1), test = toy_data(30, 2);
    moe_train_config c = quick_training();
    moe_error error;
    moe_net net;
    watch w;
    int stop;
    c.progress = watch_progress;
    c.progress_ctx = &w;
    for (stop = 0; stop <= 9; stop += 9) {
        memset(&w, 0, sizeof w);
        w.stop_at = stop;
        CHECK_STATUS(make_net(&net, 1, 1, NULL, &error), MOE_OK, "build");
        CHECK_STATUS(moe_fit(&net, &train, &test, &c, &error), stop ? MOE_ERR_STOPPED : MOE_OK, "fit");
        CHECK(w.calls == (stop ? 9 : 14) && !w.order && w.ends == (stop ? 1 : 2) && w.tests == w.ends,
              "the callback sees every step");
        CHECK(w.loss > 0, "a loss");
        if (stop) CHECK(strstr(error.message, "epoch 2, step 2") != NULL, "where it stopped");
        moe_net_free(&net);
    }
    drop_data(&train);
    drop_data(&test);
}

static void refuse_batches(moe_net *net, moe_train_config *c, moe_data *data, moe_data *wrong, moe_evaluation *e,
                           moe_real *x, int32_t *labels) {
    moe_error error;
    moe_train_config bad;
    moe_data part;
    moe_trainer trainer, untouched;
    moe_step step;
    moe_real kept;
    uint64_t before;
    CHECK_STATUS(moe_fit(net, wrong, NULL, c, &error), MOE_ERR_ARGUMENT, "no labels");
    wrong->x = NULL;
    CHECK_STATUS(moe_fit(net, wrong, NULL, c, &error), MOE_ERR_ARGUMENT, "no x");
    wrong->n = 0;
    CHECK_STATUS(moe_fit(net, wrong, NULL, c, &error), MOE_ERR_ARGUMENT, "no samples");
    CHECK_STATUS(moe_fit(net, NULL, NULL, c, &error), MOE_ERR_ARGUMENT, "no data");
    CHECK_STATUS(moe_evaluate(net, wrong, 0, e, &error), MOE_OK, "evaluating nothing is allowed");
    CHECK(e->n == 0, "and finds nothing");
    CHECK_STATUS(moe_evaluate(net, data, MOE_CRITERION_COUNT, e, &error), MOE_ERR_ARGUMENT, "no such criterion");

    memset(&trainer, 7, sizeof trainer);
    untouched = trainer;
    bad = *c;
    bad.rate = (moe_real)-1;
    CHECK_STATUS(moe_trainer_init(&trainer, net, &bad, &error), MOE_ERR_CONFIG, "rate");
    CHECK(strstr(error.message, "rate = -1") != NULL, "by name");
    bad = *c;
    bad.batch = -1;
    CHECK_STATUS(moe_trainer_init(&trainer, net, &bad, &error), MOE_ERR_CONFIG, "batch");
    bad = *c;
    bad.beta1 = 1;
    CHECK_STATUS(moe_trainer_init(&trainer, net, &bad, &error), MOE_ERR_CONFIG, "beta1");
    bad = *c;
    bad.optimizer = MOE_OPTIMIZER_COUNT;
    CHECK_STATUS(moe_trainer_init(&trainer, net, &bad, &error), MOE_ERR_CONFIG, "optimizer");
    CHECK(same_bits(&trainer, &untouched, sizeof trainer), "a failed init leaves the trainer alone");
    CHECK_STATUS(moe_trainer_init(&trainer, net, NULL, &error), MOE_OK, "no settings are good settings");
    CHECK(trainer.config.batch == 32 && trainer.config.epochs == 10 && near_to((double)trainer.rate, 0.001, NEAR),
          "the defaults");
    moe_trainer_free(&trainer);

    CHECK_STATUS(moe_trainer_init(&trainer, net, c, &error), MOE_OK, "trainer");
    part = *data;
    part.n = 17;
    CHECK_STATUS(moe_trainer_step(&trainer, &part, &step, &error), MOE_ERR_ARGUMENT, "more than a batch");
    part.n = 0;
    CHECK_STATUS(moe_trainer_step(&trainer, &part, &step, &error), MOE_ERR_ARGUMENT, "nothing");
    part.n = 16;
    net->modules[9].tensors[MOE_MODULE_WEIGHT][0] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e200 : 1e30);
    before = fingerprint(net);
    memcpy(x, part.x, 16 * D * sizeof *x);
    part.x = x;
    for (labels[0] = 0; labels[0] < 16 * D; labels[0]++) x[labels[0]] *= (moe_real)1e3;
    kept = trainer.memory[0];
    CHECK_STATUS(moe_trainer_step(&trainer, &part, &step, &error), MOE_ERR_NONFINITE,
                 "a gradient that is not finite or too large");
    CHECK(fingerprint(net) == before && trainer.steps == 0 && same_bits(&kept, trainer.memory, sizeof kept),
          "no tensor, moment or count changed");
    moe_trainer_free(&trainer);
    CHECK(fingerprint(net) == before, "nothing here has changed the net");
}

/* Bad data, bad settings: an error that says what, and no tensor changed. */
static void test_refused_training(void) {
    moe_net net;
    moe_error error;
    moe_train_config c = quick_training(), bad;
    moe_data data = toy_data(40, 3), wrong;
    moe_evaluation e;
    moe_real *x = normals(40 * D, 1, 1), *targets = normals(40 * CLASSES, 1, 1), kept;
    int32_t labels[40];
    uint64_t before;
    CHECK_STATUS(make_net(&net, 1, 1, NULL, &error), MOE_OK, "build");
    before = fingerprint(&net);
    memset(labels, 0, sizeof labels);
    wrong = data;
    wrong.x = x;
    wrong.labels = labels;
    wrong.targets = targets;

    labels[17] = CLASSES;
    CHECK_STATUS(moe_fit(&net, &wrong, NULL, &c, &error), MOE_ERR_ARGUMENT, "label too large");
    CHECK(strstr(error.message, "labels[17] = 3") != NULL && strstr(error.message, "0 to 2") != NULL, "row and value");
    CHECK_STATUS(moe_evaluate(&net, &wrong, 0, &e, &error), MOE_ERR_ARGUMENT, "in evaluation too");
    CHECK_STATUS(moe_fit(&net, &data, &wrong, &c, &error), MOE_ERR_ARGUMENT, "and in the test set");
    labels[17] = -1;
    bad = c;
    bad.criterion = MOE_CRITERION_STOCHASTIC;
    CHECK(moe_fit(&net, &wrong, NULL, &bad, &error) != MOE_OK && fingerprint(&net) == before,
          "no label, where experts are read one by one");
    labels[17] = 0;
    kept = x[5 * D + 2];
    x[5 * D + 2] = (moe_real)HUGE_VAL;
    CHECK_STATUS(moe_fit(&net, &wrong, NULL, &c, &error), MOE_ERR_NONFINITE, "infinite x");
    CHECK(strstr(error.message, "x[5][2]") != NULL, "row and column");
    x[5 * D + 2] = kept;
    bad = c;
    bad.criterion = MOE_CRITERION_SQUARED_ERROR;
    kept = targets[4];
    targets[4] = (moe_real)(HUGE_VAL - HUGE_VAL);
    CHECK_STATUS(moe_fit(&net, &wrong, NULL, &bad, &error), MOE_ERR_NONFINITE, "a target that is no number");
    CHECK(strstr(error.message, "targets[1][1]") != NULL, "row and column");
    targets[4] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e200 : 1e30);
    e.n = 99;
    CHECK_STATUS(moe_evaluate(&net, &wrong, MOE_CRITERION_SQUARED_ERROR, &e, &error), MOE_ERR_NONFINITE,
                 "a target whose square is infinite");
    CHECK(strstr(error.message, "loss") != NULL && e.n == 99, "the loss is named, the result is untouched");
    targets[4] = kept;
    wrong.targets = NULL;
    CHECK_STATUS(moe_fit(&net, &wrong, NULL, &bad, &error), MOE_ERR_ARGUMENT, "no targets");
    wrong.labels = NULL;
    refuse_batches(&net, &c, &data, &wrong, &e, x, labels);
    free(x);
    free(targets);
    drop_data(&data);
    moe_net_free(&net);
}

/* ---- mask and sequences through a network ---- */

static void test_mask(void) {
    enum { REAL = 20, ALL = 30 };
    moe_net net;
    moe_error error;
    moe_call call;
    moe_net_pass pass;
    moe_layer_config c = small_layer();
    moe_real *x = normals(ALL * D, 1, 9), *packed = (moe_real *)grab(REAL * D, sizeof *packed), *y, loss, whole;
    unsigned char mask[ALL];
    int32_t halves[3] = {0, 12, ALL};
    size_t i, n = 0, size;
    void *work;
    c.router.balance_scope = MOE_SCOPE_SEQUENCES;
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    add_modules(&net, &c);
    CHECK_STATUS(moe_net_build(&net, 1, 2, &error), MOE_OK, "build");
    for (i = 0; i < ALL; i++) {
        mask[i] = i % 3 != 1;
        if (mask[i]) memcpy(packed + n++ * D, x + i * D, D * sizeof *x);
        else x[i * D] = (moe_real)1e6; /* whatever stands in padding */
    }
    CHECK(n == REAL, "two of three are real");
    y = outputs(&net, packed, REAL);
    moe_net_work_size(&net, ALL, 1, &size);
    work = grab(size, 1);
    memset(&call, 0, sizeof call);
    call.n_tokens = ALL;
    call.x = x;
    call.mask = mask;
    call.training = 1;
    CHECK_STATUS(moe_net_forward(&net, &call, work, size, &pass), MOE_OK, "forward with padding");
    for (i = n = 0; i < ALL; i++)
        if (mask[i])
            CHECK(same_bits(pass.y + i * CLASSES, y + n++ * CLASSES, CLASSES * sizeof *y),
                  "padding changes no real row");
    CHECK(moe_net_routing(&net, &pass, 3)->n_real == REAL && moe_net_routing(&net, &pass, 6)->n_real == REAL,
          "the mask reaches every mixture");
    whole = moe_net_routing(&net, &pass, 3)->loss[MOE_LOSS_BALANCE];
    call.sequences = halves;
    call.n_sequences = 2;
    CHECK_STATUS(moe_net_forward(&net, &call, work, size, &pass), MOE_OK, "forward with sequences");
    loss = moe_net_routing(&net, &pass, 3)->loss[MOE_LOSS_BALANCE];
    CHECK(loss > whole || loss < whole, "the balance loss is taken per sequence");
    halves[2] = ALL + 1;
    CHECK_STATUS(moe_net_forward(&net, &call, work, size, &pass), MOE_ERR_ARGUMENT,
                 "sequences that do not end with the tokens");
    free(x);
    free(packed);
    free(y);
    free(work);
    moe_net_free(&net);
}

/* ---- files ---- */

static char path[2][600];

static void test_files(void) {
    moe_net net, back, deep;
    moe_error error;
    moe_data data = toy_data(N, 6);
    moe_train_config c = quick_training();
    moe_buffer first, second;
    moe_real *y, *z;
    CHECK_STATUS(make_net(&net, 1, 4, NULL, &error), MOE_OK, "build");
    CHECK_STATUS(moe_fit(&net, &data, NULL, &c, &error), MOE_OK, "fit");
    first = written(&net);
    CHECK_STATUS(moe_net_read(&back, first.data, first.size, 0, MOE_KERNELS_C, NULL, &error), MOE_OK, "read");
    second = written(&back);
    CHECK(first.size == second.size && same_bits(first.data, second.data, first.size),
          "write, read, write: the same bytes");
    y = outputs(&net, data.x, N);
    z = outputs(&back, data.x, N);
    CHECK(same_bits(y, z, N * CLASSES * sizeof *y), "the net that was read gives the same outputs, bit for bit");
    CHECK(!back.trainable && back.memory_size * 2 == net.memory_size, "no gradients");
    moe_net_free(&back);
    free(z);

    CHECK_STATUS(moe_net_save(&net, path[0], &error), MOE_OK, "save");
    CHECK_STATUS(moe_net_save(&net, path[0], &error), MOE_OK, "save over it");
    CHECK_STATUS(moe_net_load(&back, path[0], 1, MOE_KERNELS_C, NULL, &error), MOE_OK, "load");
    CHECK_STATUS(moe_net_save(&back, path[1], &error), MOE_OK, "save again");
    moe_buffer_free(&second);
    CHECK_STATUS(moe_file_read(path[1], &second, &error), MOE_OK, "read the file");
    CHECK(first.size == second.size && same_bits(first.data, second.data, first.size),
          "save, load, save: the same bytes");
    CHECK_STATUS(moe_fit(&back, &data, NULL, &c, &error), MOE_OK, "a net that was loaded can be trained");
    moe_net_free(&back);
    memset(&back, 7, sizeof back);
    memset(&deep, 7, sizeof deep);
    CHECK_STATUS(moe_net_load(&back, "no/such/file", 0, 0, NULL, &error), MOE_ERR_IO, "no file");
    CHECK(strstr(error.message, "no/such/file") != NULL && same_bits(&back, &deep, sizeof back),
          "named, and the net is untouched");
    CHECK_STATUS(moe_net_save(&net, "no/such/folder/file", &error), MOE_ERR_IO, "no folder");
    moe_net_init(&back, 3, 0, NULL);
    moe_net_linear(&back, 3);
    CHECK_STATUS(moe_net_save(&back, path[0], &error), MOE_ERR_STATE, "not built");
    moe_buffer_free(&second);
    CHECK_STATUS(moe_file_read(path[0], &second, &error), MOE_OK, "read the file");
    CHECK(first.size == second.size && same_bits(first.data, second.data, first.size),
          "a failed save leaves the old file");
    moe_net_free(&back);
    remove(path[0]);
    remove(path[1]);
    moe_buffer_free(&first);
    moe_buffer_free(&second);
    free(y);
    drop_data(&data);
    moe_net_free(&net);
}

/* Files cut at every byte, and with one byte changed: never a crash, and the target stays as it was
   unless all is well. */
static void test_damaged_files(void) {
    moe_net net, back, untouched;
    moe_error error;
    moe_buffer b;
    unsigned char *copy;
    size_t i, cut, header;
    long wrong = 0, touched = 0;
    long silent = 0;
    memset(&untouched, 7, sizeof untouched);
    moe_net_init(&net, 3, 0, NULL);
    moe_net_linear(&net, 4);
    moe_net_activation(&net, MOE_ACT_SILU);
    moe_net_residual(&net, 1);
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK, "build");
    b = written(&net);
    header = b.size - 16 * sizeof(moe_real);
    for (cut = 0; cut < b.size; cut++) {
        copy = (unsigned char *)grab(cut, 1); /* so that tools see every read beyond it */
        if (cut > 0) memcpy(copy, b.data, cut);
        back = untouched;
        error.message[0] = '\0';
        wrong += moe_net_read(&back, copy, cut, 1, 0, NULL, &error) == MOE_OK;
        silent += error.message[0] == '\0';
        touched += !same_bits(&back, &untouched, sizeof back);
        free(copy);
    }
    CHECK(wrong == 0 && touched == 0 && silent == 0, "a file cut anywhere is refused with a message");
    copy = (unsigned char *)grab(b.size, 1);
    for (cut = 0; cut < header; cut++)
        for (i = 1; i < 256; i += 1 + i / 2) {
            memcpy(copy, b.data, b.size);
            copy[cut] ^= (unsigned char)i;
            back = untouched;
            if (moe_net_read(&back, copy, b.size, 0, 0, NULL, &error) == MOE_OK) moe_net_free(&back);
            else touched += !same_bits(&back, &untouched, sizeof back);
        }
    CHECK(touched == 0, "a changed byte is refused, or gives another net");
    free(copy);
    moe_buffer_free(&b);
    moe_net_free(&net);
}

/* The bytes of a file with this configuration and these tensors. */
static moe_buffer file_of(const char *config, const moe_tensor *tensors, size_t n) {
    moe_buffer b;
    moe_stream s;
    moe_error error;
    moe_metadata m;
    memset(&b, 0, sizeof b);
    s = moe_buffer_stream(&b);
    m.key = "moe";
    m.value = config;
    CHECK_STATUS(moe_file_write(&s, tensors, n, &m, config != NULL, NULL, &error), MOE_OK, "a file for a test");
    return b;
}

static void check_config(const char *config, const moe_tensor *tensors, size_t n, moe_status wanted, const char *words,
                         int line) {
    moe_buffer b = file_of(config, tensors, n);
    moe_net net, untouched;
    test_heap m;
    moe_allocator a = test_allocator(&m, 0);
    moe_error error;
    moe_status status;
    error.message[0] = '\0';
    memset(&untouched, 7, sizeof untouched);
    net = untouched;
    status = moe_net_read(&net, b.data, b.size, 1, 0, &a, &error);
    if (!CHECK_AT(line, status == wanted, "a configuration") && test_shown)
        printf("        wanted %d, got %d: %s\n        %s\n", wanted, status, error.message,
               config != NULL ? config : "(none)");
    if (status == MOE_OK) moe_net_free(&net);
    else CHECK_AT(line, same_bits(&net, &untouched, sizeof net), "the target is untouched");
    if (!CHECK_AT(line, words == NULL || strstr(error.message, words) != NULL, "the message names it") && test_shown)
        printf("        '%s' is not in: %s\n", words, error.message);
    CHECK_AT(line, m.blocks == 0 && !m.wrong_size, "nothing leaks");
    moe_buffer_free(&b);
}

#define CONFIG(config, wanted, words) {config, wanted, words, __LINE__}
#define MODULES(list) "{\"format\":1,\"net\":{\"d_in\":3,\"modules\":[" list "]}}"
#define LINEAR "{\"module\":\"linear\",\"d_out\":4}"
#define MIXTURE(more) "{\"module\":\"mixture\",\"n_experts\":2,\"d_ff\":3" more "}"
#define L1 ",\"select\":\"positive\",\"gate\":\"relu\",\"weight\":\"raw\",\"l1_controller\""

/* Configurations for the tensors of MODULES(LINEAR "," MIXTURE("")): what reading them says, and a
   part of the message. */
typedef struct config_row {
    const char *config;
    moe_status wanted;
    const char *words;
    int line;
} config_row;

static const config_row config_rows[] = {
    CONFIG(MODULES(LINEAR "," MIXTURE("")), MOE_OK, NULL),
    CONFIG(" { \"net\" : { \"modules\" : [ {\"d_out\":4,\"module\":\"\\u006cinear\"} , "
           "{\"d_ff\":3,\"n_experts\":2e0,\"module\":\"mixture\"} ] ,"
           " \"d_in\" : 3 } , \"format\" : 1 } ",
           MOE_OK, NULL),
    CONFIG("{\"_by\":\"me\",\"format\":1,\"_list\":[1,[true,{\"a\":null}],-2.5e-3,{}],\"net\":{\"_\":{},\"d_in\":3,"
           "\"modules\":[{\"_note\":[],\"module\":\"linear\",\"d_out\":4}," MIXTURE(",\"_x\":\"y\"") "]}}",
           MOE_OK, NULL),
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"top_k\":0,\"score\":\"linear\",\"loss_z\":1e-3")), MOE_OK, NULL),

    CONFIG(NULL, MOE_ERR_FORMAT, "'moe'"),
    CONFIG("", MOE_ERR_FORMAT, "too early"),
    CONFIG("[]", MOE_ERR_FORMAT, "{ is expected"),
    CONFIG("{}", MOE_ERR_FORMAT, "'format'"),
    CONFIG("{\"format\":1}", MOE_ERR_FORMAT, "'net' is missing"),
    CONFIG("{\"format\":1,\"layer\":{\"d_model\":3}}", MOE_ERR_FORMAT, "'net' is missing, 'layer' is there"),
    CONFIG("{\"format\":3,\"net\":{}}", MOE_ERR_UNSUPPORTED, "format = 3: this version reads formats 1 to 2"),
    CONFIG("{\"format\":1.5,\"net\":{}}", MOE_ERR_UNSUPPORTED, "format = 1.5"),
    CONFIG("{\"format\":0,\"net\":{}}", MOE_ERR_UNSUPPORTED, "format = 0"),
    CONFIG("{\"format\":2,\"net\":{\"d_in\":3,\"modules\":[" LINEAR "," MIXTURE("") "]}}", MOE_OK, NULL),
    /* of format 1, that of 0.1, it is reset */
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"jitter_eps\":0.5")), MOE_OK, NULL),
    CONFIG("{\"format\":2,\"net\":{\"d_in\":3,\"modules\":[" LINEAR "," MIXTURE(",\"jitter_eps\":0.5") "]}}",
           MOE_ERR_CONFIG, "jitter_eps = 0.5 needs input = jitter"),
    /* act beside swiglu counts for nothing in a file */
    CONFIG("{\"format\":2,\"net\":{\"d_in\":3,\"modules\":[" LINEAR "," MIXTURE(",\"act\":\"tanh\"") "]}}", MOE_OK,
           NULL),
    CONFIG("{\"format\":\"1\",\"net\":{}}", MOE_ERR_FORMAT, "format must be a number"),
    CONFIG("{\"format\":1,\"net\":{}} x", MOE_ERR_FORMAT, "follow"),
    CONFIG("{\"format\":1,\"format\":1,\"net\":{}}", MOE_ERR_FORMAT, "'format' occurs twice"),
    CONFIG("{\"format\":1,\"net\":{},\"color\":3}", MOE_ERR_UNSUPPORTED, "unknown key 'color'"),
    CONFIG("{\"format\":1,\"net\":{\"d_in\":3}}", MOE_ERR_FORMAT, "'modules' is missing"),
    CONFIG("{\"format\":1,\"net\":{\"modules\":[" LINEAR "]}}", MOE_ERR_FORMAT, "'d_in' is missing"),
    CONFIG("{\"format\":1,\"net\":{\"d_in\":0,\"modules\":[" LINEAR "]}}", MOE_ERR_CONFIG, "d_in = 0"),
    CONFIG("{\"format\":1,\"net\":{\"d_in\":3,\"modules\":[" LINEAR "],\"depth\":1}}", MOE_ERR_UNSUPPORTED,
           "net: unknown key 'depth'"),
    CONFIG("{\"format\":1,\"net\":{\"d_in\":3,\"d_in\":3,\"modules\":[" LINEAR "]}}", MOE_ERR_FORMAT,
           "'d_in' occurs twice"),
    CONFIG(MODULES(""), MOE_ERR_FORMAT, NULL),
    CONFIG(MODULES(LINEAR ","), MOE_ERR_FORMAT, NULL),
    CONFIG(MODULES("3"), MOE_ERR_FORMAT, "{ is expected"),
    CONFIG(MODULES("{}"), MOE_ERR_FORMAT, "module 0: the key 'module' is missing"),
    CONFIG(MODULES("{\"module\":\"pooling\"}"), MOE_ERR_UNSUPPORTED, "module 0: unknown module 'pooling'"),
    CONFIG(MODULES("{\"module\":\"linear\",\"module\":\"linear\",\"d_out\":4}"), MOE_ERR_FORMAT,
           "'module' occurs twice"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":4,\"d_out\":4}"), MOE_ERR_FORMAT, "'d_out' occurs twice"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":4,\"d_\\u006fut\":4}"), MOE_ERR_FORMAT, "occurs twice"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":4,\"bias\":0}"), MOE_ERR_UNSUPPORTED,
           "module 0: unknown key 'bias'"),
    CONFIG(MODULES("{\"module\":\"linear\"}"), MOE_ERR_CONFIG, "d_out = 0"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":\"4\"}"), MOE_ERR_FORMAT, "d_out must be a number"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":04}"), MOE_ERR_FORMAT, "a value is expected"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":+4}"), MOE_ERR_FORMAT, "a value is expected"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":4.5}"), MOE_ERR_CONFIG, "d_out = 4.5"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":-4}"), MOE_ERR_CONFIG, "d_out = -4"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":1e99}"), MOE_ERR_CONFIG, "d_out = 1e99"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":4 \"act\":1}"), MOE_ERR_FORMAT, ", is expected"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":4,}"), MOE_ERR_FORMAT, "\" is expected"),
    CONFIG(MODULES(LINEAR LINEAR), MOE_ERR_FORMAT, ", is expected"),
    CONFIG(MODULES("{\"module\":\"activation\",\"act\":\"cube\"}"), MOE_ERR_CONFIG, "act = cube"),
    CONFIG(MODULES("{\"module\":\"activation\",\"act\":0}"), MOE_ERR_CONFIG, "act = 0: must be one of relu"),
    CONFIG(MODULES("{\"module\":\"activation\",\"act\":true}"), MOE_ERR_FORMAT, "\" is expected"),
    CONFIG(MODULES("{\"module\":\"residual\",\"span\":1}"), MOE_ERR_CONFIG, "module 0 (residual)"),
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"kernels\":\"c\"")), MOE_ERR_UNSUPPORTED, "module 1: unknown key 'kernels'"),
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"sparkle\":1")), MOE_ERR_UNSUPPORTED, "unknown key 'sparkle'"),
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"top_k\":3")), MOE_ERR_CONFIG, "top_k = 3"),
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"router_bias\":true")), MOE_ERR_FORMAT, "router_bias must be a number"),
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"router_bias\":2")), MOE_ERR_CONFIG, "router_bias = 2"),
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"d_model\":5")), MOE_ERR_CONFIG, "d_model = 5"),
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"loss_z\":nan")), MOE_ERR_FORMAT, "a value is expected"),
    /* read for training */
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"top_k\":1")), MOE_ERR_CONFIG, "module 1 (mixture): top_k = 1"),

    /* the modules of language models */
    CONFIG(MODULES("{\"module\":\"attention\",\"heads\":2}"), MOE_ERR_CONFIG, "module 0 (attention): heads = 2"),
    CONFIG(MODULES("{\"module\":\"attention\",\"heads\":-1}"), MOE_ERR_CONFIG, "heads = -1"),
    CONFIG(MODULES("{\"module\":\"attention\",\"rotary\":1}"), MOE_ERR_CONFIG, "d_head = 3"),
    CONFIG(MODULES("{\"module\":\"attention\",\"d_out\":3}"), MOE_ERR_UNSUPPORTED, "unknown key 'd_out'"),
    CONFIG(MODULES("{\"module\":\"dropout\",\"rate\":1}"), MOE_ERR_CONFIG, "rate = 1"),
    CONFIG(MODULES("{\"module\":\"positions\"}"), MOE_ERR_CONFIG, "most = 0"),
    CONFIG(MODULES("{\"module\":\"tied\"}"), MOE_ERR_CONFIG, "module 0 (tied)"),
    CONFIG(MODULES("{\"module\":\"embedding\",\"vocabulary\":4,\"d\":3}"), MOE_ERR_CONFIG, "module 0 (embedding)"),
    CONFIG(MODULES("{\"module\":\"feed_forward\",\"n_experts\":2}"), MOE_ERR_UNSUPPORTED, "unknown key 'n_experts'"),
    CONFIG(
        "{\"format\":1,\"net\":{\"d_in\":0,\"modules\":[{\"module\":\"embedding\",\"vocabulary\":16777216,\"d\":4}]}}",
        MOE_ERR_SHAPE, "[16777216,4]"),
    CONFIG("{\"format\":1,\"net\":{\"d_in\":0,\"modules\":[{\"module\":\"embedding\",\"vocabulary\":0,\"d\":4}]}}",
           MOE_ERR_CONFIG, "vocabulary = 0"),

    /* sizes that no file could fill: refused before memory is asked for */
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":16777216}," LINEAR), MOE_ERR_SHAPE, "[16777216,3]"),
    CONFIG(MODULES(LINEAR ",{\"module\":\"mixture\",\"n_experts\":65536,\"d_ff\":16777216}"), MOE_ERR_SHAPE, NULL),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":16777216},{\"module\":\"mixture\",\"n_experts\":65536,\"d_ff\":"
                   "16777216}"),
           MOE_ERR_OVERFLOW, NULL),

    /* tensors that do not fit the configuration */
    CONFIG(MODULES(LINEAR), MOE_ERR_UNSUPPORTED, "tensor '1.router.weight'"),
    CONFIG(MODULES("{\"module\":\"linear\",\"d_out\":5}," MIXTURE("")), MOE_ERR_SHAPE,
           "tensor '0.weight': the shape must be [5,3], the file has [4,3]"),
    CONFIG(MODULES(LINEAR "," MIXTURE(",\"router_bias\":1")), MOE_ERR_NOT_FOUND, "tensor '1.router.bias'"),
    /* a choice that was a flag in 0.1 */
    CONFIG(MODULES(LINEAR "," MIXTURE(L1 ":1")), MOE_ERR_NOT_FOUND, "tensor '1.router.load'"),
    CONFIG(MODULES(LINEAR "," MIXTURE(L1 ":2")), MOE_ERR_CONFIG, "l1_controller = 2: must be one of none"),
    CONFIG(MODULES(LINEAR "," LINEAR), MOE_ERR_UNSUPPORTED, "tensor '1.router.weight'")};

/* The message shows other shapes of tensor 5, also with the largest size, where it is empty. */
static void check_shapes(moe_tensor *t, size_t n) {
    t[5].n_dims = 3;
    t[5].shape[0] = 4;
    t[5].shape[1] = 3;
    t[5].shape[2] = 1;
    check_config(MODULES(LINEAR "," MIXTURE("")), t, n, MOE_ERR_SHAPE, "the file has [4,3,1]", __LINE__);
    t[5].n_dims = 2;
    t[5].shape[0] = t[5].count = 0;
    t[5].shape[1] = SIZE_MAX;
    check_config(MODULES(LINEAR "," MIXTURE("")), t, n, MOE_ERR_SHAPE,
                 SIZE_MAX > 0xffffffffu ? "the file has [0,18446744073709551615]" : "the file has [0,4294967295]",
                 __LINE__);
}

static void test_configurations(void) {
    moe_net net;
    moe_error error;
    moe_layer_config c;
    moe_tensor t[12];
    size_t i;
    char deep[400], *p;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 2;
    c.d_ff = 3;
    moe_net_init(&net, 3, 0, NULL);
    moe_net_linear(&net, 4);
    moe_net_mixture(&net, &c);
    if (!CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK, "build") || !CHECK(net.n_tensors == 6, "six tensors"))
        return;

    for (i = 0; i < sizeof config_rows / sizeof *config_rows; i++)
        check_config(config_rows[i].config, net.tensors, net.n_tensors, config_rows[i].wanted, config_rows[i].words,
                     config_rows[i].line);
    for (i = 0; i < net.n_tensors; i++) t[i] = net.tensors[i];
    check_config(MODULES(LINEAR "," MIXTURE("")), t, net.n_tensors - 1, MOE_ERR_NOT_FOUND, "tensor '1.experts.down'",
                 __LINE__);
    check_config(MODULES(LINEAR "," MIXTURE("")), t + 1, net.n_tensors - 1, MOE_ERR_NOT_FOUND, "tensor '0.weight'",
                 __LINE__);
    check_config(MODULES(LINEAR "," MIXTURE("")), t, 0, MOE_ERR_NOT_FOUND, "tensor '0.weight'", __LINE__);
    t[0] = net.tensors[5];
    t[5] = t[6] = net.tensors[0];
    check_config(MODULES(LINEAR "," MIXTURE("")), t, net.n_tensors, MOE_OK, NULL, __LINE__); /* in another order */
    memcpy(t[6].name, "2.weight", 9);
    check_config(MODULES(LINEAR "," MIXTURE("")), t, 7, MOE_ERR_UNSUPPORTED, "tensor '2.weight'", __LINE__);
    memset(t[6].name, 'n', 62);
    t[6].name[62] = '\0';
    check_config(MODULES(LINEAR "," MIXTURE("")), t, 7, MOE_ERR_UNSUPPORTED, "tensor 'nnn", __LINE__);
    t[5].n_dims = 1;
    t[5].shape[0] = 12;
    check_config(MODULES(LINEAR "," MIXTURE("")), t, net.n_tensors, MOE_ERR_SHAPE, "[4,3], the file has [12]",
                 __LINE__);
    check_shapes(t, net.n_tensors);

    /* nesting of notes is bounded, and every beginning of a configuration is refused */
    for (i = 15; i <= 16; i++) {
        strcpy(deep, "{\"format\":1,\"_\":");
        memset(deep + strlen("{\"format\":1,\"_\":"), '[', i + 1);
        p = deep + strlen("{\"format\":1,\"_\":") + i + 1;
        memset(p, ']', i + 1);
        strcpy(p + i + 1, "}");
        check_config(deep, net.tensors, net.n_tensors, i == 15 ? MOE_ERR_FORMAT : MOE_ERR_UNSUPPORTED,
                     i == 15 ? "'net' is missing" : "16 levels", __LINE__);
    }
    strcpy(deep, MODULES(LINEAR "," MIXTURE(",\"_\":[1,{\"a\":\"b\"}]")));
    for (i = strlen(deep); i-- > 0;) {
        deep[i] = '\0';
        check_config(deep, net.tensors, net.n_tensors, MOE_ERR_FORMAT, NULL, __LINE__);
    }
    moe_net_free(&net);
}

/* More modules than a network may have: the list stays within its bound. */
static void test_many_modules(void) {
    size_t n = MOE_NET_MAX_MODULES + 1, i, at;
    char *config = (char *)grab(n * 24 + 64, 1);
    static const char begin[] = "{\"format\":1,\"net\":{\"d_in\":3,\"modules\":[";
    static const char one[] = "{\"module\":\"activation\"},";
    moe_net net;
    moe_buffer b;
    moe_error error;
    memcpy(config, begin, sizeof begin - 1);
    for (i = 0, at = sizeof begin - 1; i < n; i++, at += sizeof one - 1) memcpy(config + at, one, sizeof one - 1);
    strcpy(config + at - 1, "]}}");
    b = file_of(config, NULL, 0);
    CHECK_STATUS(moe_net_read(&net, b.data, b.size, 0, 0, NULL, &error), MOE_ERR_CONFIG, "4097 modules");
    CHECK(strstr(error.message, "4096") != NULL, "the bound is named");
    moe_buffer_free(&b);
    strcpy(config + at - sizeof one, "]}}");
    b = file_of(config, NULL, 0);
    if (CHECK_STATUS(moe_net_read(&net, b.data, b.size, 0, 0, NULL, &error), MOE_OK, "4096 modules, no tensors")) {
        CHECK(net.n_modules == MOE_NET_MAX_MODULES && net.n_tensors == 0, "all there");
        moe_net_free(&net);
    }
    moe_buffer_free(&b);
    free(config);
}

/* ---- a layer alone in a file ---- */

static void test_layer_files(void) {
    static const char *const bad[][2] = {
        {"{\"format\":1,\"net\":{}}", "'layer' is missing"},
        {"{\"format\":1,\"layer\":{\"d_model\":4,\"module\":\"mixture\"}}", "layer: unknown key 'module'"},
        {"{\"format\":1,\"layer\":{\"d_model\":4,\"d_model\":4}}", "'d_model' occurs twice"},
        {"{\"format\":7,\"layer\":{\"d_model\":4}}", "format = 7"},
        {"{\"format\":1,\"layer\":{}}", "d_model = 0"},
        {"{\"format\":1,\"layer\":{\"d_model\":16777216,\"n_experts\":65536}}", "memory"},
        {"{\"format\":1,\"layer\":{\"d_model\":4}}", "tensor 'router.weight'"}};
    moe_layer layer, back, untouched;
    moe_layer_config c = small_layer();
    moe_error error;
    moe_buffer first, second;
    moe_stream s;
    test_heap m;
    moe_allocator a = test_allocator(&m, 0);
    moe_tensor t, u;
    size_t i;
    long at;
    c.router.d_model = D;
    c.router.score = MOE_SCORE_COSINE;
    c.router.cosine_tau = (moe_real)0.07;
    memset(&first, 0, sizeof first);
    memset(&second, 0, sizeof second);
    memset(&untouched, 7, sizeof untouched);
    CHECK_STATUS(moe_layer_create(&layer, &c, 0, 3, NULL, &error), MOE_OK, "create");
    s = moe_buffer_stream(&first);
    CHECK_STATUS(moe_layer_write(&layer, &s, &error), MOE_OK, "write");
    for (at = 1;; at++) { /* every allocation fails once */
        moe_status status;
        a = test_allocator(&m, 0);
        m.fail_at = at;
        back = untouched;
        status = moe_layer_read(&back, first.data, first.size, 1, MOE_KERNELS_AUTO, &a, &error);
        if (status == MOE_OK) break;
        CHECK_STATUS(status, MOE_ERR_MEMORY, "read without memory");
        if (!CHECK(m.blocks == 0 && same_bits(&back, &untouched, sizeof back),
                   "nothing leaks, the target is untouched") ||
            at > 50)
            break;
    }
    m.fail_at = 0;
    CHECK(at > 2, "more than one allocation was made to fail");
    CHECK(back.gradients[MOE_ROUTER_WEIGHT] != NULL, "gradients");
    for (i = 0; moe_layer_tensor(&layer, i, &t) == MOE_OK; i++)
        CHECK(moe_layer_tensor(&back, i, &u) == MOE_OK && same_bits(t.data, u.data, t.count * sizeof *t.data),
              "the same tensors");
    s = moe_buffer_stream(&second);
    CHECK_STATUS(moe_layer_write(&back, &s, &error), MOE_OK, "write again");
    CHECK(first.size == second.size && same_bits(first.data, second.data, first.size), "the same bytes");
    moe_layer_free(&back);
    CHECK(m.blocks == 0 && !m.wrong_size, "all given back");
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        moe_buffer b = file_of(bad[i][0], NULL, 0);
        back = untouched;
        CHECK(moe_layer_read(&back, b.data, b.size, 0, MOE_KERNELS_AUTO, NULL, &error) != MOE_OK, "a bad layer");
        if (!CHECK(strstr(error.message, bad[i][1]) != NULL, "the message names it"))
            printf("        %s\n", error.message);
        CHECK(same_bits(&back, &untouched, sizeof back), "the target is untouched");
        moe_buffer_free(&b);
    }
    moe_buffer_free(&first);
    moe_buffer_free(&second);
    moe_layer_free(&layer);
}

/* ---- every allocation fails once ---- */

static void test_build_without_memory(void) {
    test_heap m;
    moe_allocator a;
    long at;
    for (at = 1; at < 200; at++) {
        moe_net net;
        moe_error error;
        moe_status status;
        a = test_allocator(&m, 0);
        m.fail_at = at;
        status = make_net(&net, 1, 1, &a, &error);
        if (status == MOE_OK) {
            moe_net_free(&net);
            CHECK(m.blocks == 0 && !m.wrong_size, "all given back");
            break;
        }
        CHECK_STATUS(status, MOE_ERR_MEMORY, "build without memory");
        CHECK(!net.built && net.memory == NULL && net.tensors == NULL && net.n_tensors == 0, "not built");
        if (net.error.code == MOE_OK) { /* it was build itself that failed */
            CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build may be tried again");
            CHECK(net_tensor(&net, "9.bias") != NULL, "and is complete");
        }
        moe_net_free(&net);
        CHECK(m.blocks == 0 && m.bytes == 0 && !m.wrong_size, "nothing leaks");
    }
    CHECK(at > 3 && at < 200, "several allocations were made to fail");
}

static void test_training_without_memory(void) {
    test_heap m;
    moe_allocator a = test_allocator(&m, 0);
    moe_net net;
    moe_error error;
    moe_data train = toy_data(40, 1), test = toy_data(20, 2);
    moe_train_config c = quick_training();
    moe_trainer trainer, untouched;
    moe_evaluation e;
    moe_status status;
    uint64_t before;
    long at, held;
    CHECK_STATUS(make_net(&net, 1, 1, &a, &error), MOE_OK, "build");
    before = fingerprint(&net);
    held = m.blocks;
    memset(&untouched, 7, sizeof untouched);
    for (at = 1; at < 50; at++) {
        m.calls = 0;
        m.fail_at = at;
        trainer = untouched;
        status = moe_trainer_init(&trainer, &net, &c, &error);
        if (status == MOE_OK) {
            moe_trainer_free(&trainer);
            break;
        }
        CHECK_STATUS(status, MOE_ERR_MEMORY, "trainer without memory");
        CHECK(same_bits(&trainer, &untouched, sizeof trainer) && m.blocks == held, "untouched, nothing leaks");
    }
    CHECK(at > 2, "allocations failed");
    m.calls = 0;
    m.fail_at = 1;
    CHECK_STATUS(moe_evaluate(&net, &test, 0, &e, &error), MOE_ERR_MEMORY, "evaluation without memory");
    for (at = 1; at < 50; at++) {
        m.calls = 0;
        m.fail_at = at;
        status = moe_fit(&net, &train, &test, &c, &error);
        if (status == MOE_OK) break;
        CHECK_STATUS(status, MOE_ERR_MEMORY, "fit without memory");
        CHECK(fingerprint(&net) == before && m.blocks == held, "the net is as it was, nothing leaks");
    }
    CHECK(at > 3 && at < 50, "allocations failed");
    CHECK(fingerprint(&net) != before && m.blocks == held && !m.wrong_size,
          "then it is trained, and all is given back");
    moe_net_free(&net);
    CHECK(m.blocks == 0 && m.bytes == 0, "all given back");
    drop_data(&train);
    drop_data(&test);
}

/* A failed allocation may also be got around; the file or the network must then be complete. */
static void test_files_without_memory(void) {
    test_heap m;
    moe_allocator a = test_allocator(&m, 0);
    moe_net old_net, net, back, untouched;
    moe_error error;
    moe_buffer old, wanted, now;
    moe_status status;
    long at, held, refused = 0;
    CHECK_STATUS(make_net(&old_net, 0, 1, NULL, &error), MOE_OK, "build");
    CHECK_STATUS(make_net(&net, 0, 2, &a, &error), MOE_OK, "build");
    memset(&untouched, 7, sizeof untouched);
    memset(&now, 0, sizeof now);
    old = written(&old_net);
    wanted = written(&net);
    held = m.blocks;
    for (at = 1; at < 200; at++) {
        CHECK_STATUS(moe_net_save(&old_net, path[0], &error), MOE_OK, "save");
        m.calls = 0;
        m.fail_at = at;
        status = moe_net_save(&net, path[0], &error);
        CHECK(status == MOE_OK || status == MOE_ERR_MEMORY, "save without memory");
        CHECK_STATUS(moe_file_read(path[0], &now, &error), MOE_OK, "read");
        if (status == MOE_OK) CHECK(now.size == wanted.size && same_bits(now.data, wanted.data, now.size), "saved");
        else CHECK(now.size == old.size && same_bits(now.data, old.data, now.size), "the old file stays");
        CHECK(m.blocks == held, "nothing leaks");
        moe_buffer_free(&now);
        refused += status != MOE_OK;
        if (m.calls < at) break;
    }
    CHECK(refused > 1 && at < 200, "allocations failed");
    for (at = 1, refused = 0; at < 200; at++) {
        m.calls = 0;
        m.fail_at = at;
        back = untouched;
        status = moe_net_load(&back, path[0], 1, 0, &a, &error);
        CHECK(status == MOE_OK || status == MOE_ERR_MEMORY, "load without memory");
        if (status == MOE_OK) {
            CHECK(fingerprint(&back) == fingerprint(&net), "the same net");
            moe_net_free(&back);
        } else CHECK(same_bits(&back, &untouched, sizeof back), "the target is untouched");
        CHECK(m.blocks == held, "nothing leaks");
        refused += status != MOE_OK;
        if (m.calls < at) break;
    }
    CHECK(refused > 4 && at < 200, "allocations failed");
    moe_net_free(&old_net);
    moe_net_free(&net);
    CHECK(m.blocks == 0 && m.bytes == 0 && !m.wrong_size, "all given back");
    moe_buffer_free(&old);
    moe_buffer_free(&wanted);
    remove(path[0]);
}

static const char *kind_of(const moe_net *net, size_t module) {
    static const char *const kinds[MOE_MODULE_COUNT] = {
        "linear",    "activation", "layer_norm", "mixture", "residual",     "embedding",
        "positions", "attention",  "rms_norm",   "dropout", "feed_forward", "tied",
        "scale",     "convolution"};
    return kinds[net->modules[module].kind];
}

/* Whether the message of a call that returned MOE_ERR_NONFINITE names module and tensor. */
static int names_source(const moe_net *net, moe_status status, size_t module, const char *tensor,
                        const moe_error *error) {
    char wanted[120];
    sprintf(wanted, "; it arose in module %lu (%s), %s", (unsigned long)module, kind_of(net, module), tensor);
    return CHECK(status == MOE_ERR_NONFINITE && strlen(error->message) > strlen(wanted) &&
                     strcmp(error->message + strlen(error->message) - strlen(wanted), wanted) == 0,
                 status != MOE_OK ? error->message : wanted);
}

/* NaN in every tensor in turn, whatever module finds it; and in a gradient. */
static void name_tensors(moe_net *net, const moe_data *data) {
    moe_train_config c = quick_training();
    moe_trainer trainer;
    moe_evaluation e;
    moe_error error;
    size_t i, m, j;
    if (!CHECK_STATUS(moe_trainer_init(&trainer, net, &c, &error), MOE_OK, "trainer")) return;
    for (i = 0; i < net->n_tensors; i++) {
        const moe_tensor *t = &net->tensors[i];
        moe_real *kept = copy_of(t->data, t->count);
        char tensor[80], wanted[160];
        m = (size_t)strtoul(t->name, NULL, 10);
        sprintf(tensor, "tensor %s", t->name);
        for (j = 0; j < t->count; j++) t->data[j] = (moe_real)NAN;
        names_source(net, moe_trainer_step(&trainer, data, NULL, &error), m, tensor, &error);
        names_source(net, moe_evaluate(net, data, 0, &e, &error), m, tensor, &error);
        memcpy(t->data, kept, t->count * sizeof *kept);
        CHECK_STATUS(moe_trainer_accumulate(&trainer, data, NULL, &error), MOE_OK, "a batch");
        if (i + 1 < net->n_tensors) t->gradient[0] = t[1].gradient[0] = (moe_real)NAN; /* the last counts */
        else t->gradient[t->count - 1] = (moe_real)HUGE_VAL;
        t += i + 1 < net->n_tensors;
        m = (size_t)strtoul(t->name, NULL, 10);
        sprintf(wanted, "module %lu (%s), tensor %s: number %lu of the gradient is not finite", (unsigned long)m,
                kind_of(net, m), t->name, (unsigned long)(i + 1 < net->n_tensors ? 0 : t->count - 1));
        CHECK(moe_trainer_update(&trainer, NULL, &error) == MOE_ERR_NONFINITE &&
                  strcmp(error.message, wanted) == 0, error.message);
        trainer.n_accumulated = 0;
        free(kept);
    }
    moe_trainer_free(&trainer);
}

/* A feed_forward computes padding too, so that a NaN there is the input's. */
static void name_padding(void) {
    const moe_real x[2 * D] = {1, 2};
    const unsigned char mask[2] = {1, 0};
    moe_real *rows = copy_of(x, 2 * D);
    moe_call call;
    moe_error error;
    moe_net net;
    moe_net_pass pass;
    size_t size = 0;
    void *work;
    memset(&call, 0, sizeof call);
    call.n_tokens = 2;
    call.x = rows;
    call.mask = mask;
    call.error = &error;
    rows[D] = (moe_real)NAN;
    moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
    moe_net_feed_forward(&net, NULL);
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK, "build");
    CHECK_STATUS(moe_net_work_size(&net, 2, 0, &size), MOE_OK, "work size");
    work = grab(size, 1);
    CHECK(moe_net_forward(&net, &call, work, size, &pass) == MOE_ERR_NONFINITE &&
              strstr(error.message, "; call.x has it") != NULL, error.message);
    moe_net_free(&net);
    free(rows);
    free(work);
}

/* What is too large in finite tensors, in the losses of a router, in the input and in padding. */
static void name_other_sources(void) {
    moe_layer_config layer = small_layer();
    moe_train_config c = quick_training();
    const double large = MOE_REAL_IS_DOUBLE ? 1e300 : 1e37;
    moe_data data = toy_data(8, 5), huge = data;
    moe_real *x = copy_of(data.x, 8 * D);
    moe_trainer trainer;
    moe_evaluation e;
    moe_error error;
    moe_net net;
    moe_tensor t;
    size_t i;
    moe_call call;
    moe_net_pass pass;
    unsigned char mask[8] = {1, 0, 1, 1, 1, 1, 1, 1};
    size_t size = 0;
    void *work;
    layer.router.loss_z = (moe_real)0.1;
    moe_net_init(&net, D, MOE_KERNELS_C, NULL);
    moe_net_mixture(&net, &layer);
    moe_net_linear(&net, CLASSES);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    CHECK_STATUS(moe_trainer_init(&trainer, &net, &c, &error), MOE_OK, "trainer");
    /* the square of a finite logit is infinite, and all outputs are finite */
    CHECK(moe_net_find(&net, "0.router.weight", &t) == MOE_OK);
    for (i = 0; i < t.count; i++) t.data[i] *= (moe_real)(large / 1e4);
    names_source(&net, moe_trainer_step(&trainer, &data, NULL, &error), 0, "whose tensors are finite", &error);
    for (i = 0; i < t.count; i++) t.data[i] /= (moe_real)(large / 1e4);
    /* a gated expert squares its input */
    for (i = 0; i < 8 * D; i++) x[i] *= (moe_real)(large / 1e10);
    huge.x = x;
    names_source(&net, moe_evaluate(&net, &huge, 0, &e, &error), 0, "whose tensors are finite", &error);
    for (i = 0; i < 8 * D; i++) x[i] = data.x[i];
    /* input and padding */
    memset(&call, 0, sizeof call);
    call.n_tokens = 8;
    call.x = x;
    call.error = &error;
    call.mask = mask;
    x[D] = (moe_real)NAN;
    CHECK_STATUS(moe_net_work_size(&net, 8, 0, &size), MOE_OK, "work size");
    work = grab(size, 1);
    CHECK_STATUS(moe_net_forward(&net, &call, work, size, &pass), MOE_OK, "NaN in padding");
    CHECK(moe_net_find(&net, "0.router.weight", &t) == MOE_OK);
    t.data[3] = (moe_real)NAN;
    names_source(&net, moe_net_forward(&net, &call, work, size, &pass), 0, "tensor 0.router.weight", &error);
    x[2 * D + 1] = (moe_real)HUGE_VAL;
    CHECK(moe_net_forward(&net, &call, work, size, &pass) == MOE_ERR_NONFINITE &&
              strstr(error.message, "; call.x has it") != NULL, error.message);
    call.error = NULL;
    CHECK(moe_net_forward(&net, &call, work, size, &pass) == MOE_ERR_NONFINITE);
    free(work);
    free(x);
    drop_data(&data);
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

/* Where infinity or NaN arose is in the message: its module and tensor. */
static void test_nonfinite_source(void) {
    static const int32_t ids[8] = {0, 1, 2, 0, 1, 2, 0, 1};
    moe_layer_config layer = small_layer();
    moe_data data = toy_data(8, 5), words = data;
    moe_error error;
    moe_net net;
    CHECK_STATUS(make_net(&net, 1, 1, NULL, &error), MOE_OK, "build");
    name_tensors(&net, &data);
    moe_net_free(&net);
    moe_net_init(&net, 0, MOE_KERNELS_C, NULL); /* a language model with words that are not used */
    moe_net_embedding(&net, 5, D);
    moe_net_positions(&net, 4);
    moe_net_attention(&net, NULL);
    moe_net_rms_norm(&net);
    moe_net_feed_forward(&net, NULL);
    moe_net_mixture(&net, &layer);
    moe_net_tied(&net);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    words.x = NULL;
    words.token_ids = ids;
    words.length = 4;
    name_tensors(&net, &words);
    {
        moe_evaluation e;
        net.tensors[0].data[4 * D] = (moe_real)NAN; /* of a word that is only read as an answer */
        names_source(&net, moe_evaluate(&net, &words, 0, &e, &error), 6, "tensor 0.weight", &error);
    }
    { /* decoding: modules share memory, so only where it was found is known */
        size_t size = 0, bytes = 0;
        moe_cache cache;
        moe_call call;
        moe_net_pass pass;
        void *memory, *work;
        memset(&call, 0, sizeof call);
        call.n_tokens = 1;
        call.token_ids = ids + 1;
        call.error = &error;
        net.tensors[0].data[D] = (moe_real)NAN;
        CHECK_STATUS(moe_net_decode_size(&net, 4, 1, &size, &bytes, &error), MOE_OK, error.message);
        memory = grab(size, 1);
        work = grab(bytes, 1);
        CHECK_STATUS(moe_net_cache_init(&cache, &net, 4, memory, size, &error), MOE_OK, "cache");
        CHECK_STATUS(moe_net_decode(&net, &cache, &call, work, bytes, &pass), MOE_ERR_NONFINITE, "decode");
        CHECK(strstr(error.message, "; it was found in module 4 (feed_forward), whose tensors are finite") != NULL,
              error.message);
        free(memory);
        free(work);
    }
    moe_net_free(&net);
    name_other_sources();
    name_padding();
    drop_data(&data);
}

/* A router that needs more than x cannot be trained by moe_fit, and says so. */
static void test_needs(void) {
    moe_net net;
    moe_error error;
    moe_layer_config c = small_layer();
    moe_data data = toy_data(8, 1);
    c.router.select = MOE_SELECT_GIVEN;
    moe_net_init(&net, D, 0, NULL);
    moe_net_mixture(&net, &c);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    CHECK_STATUS(moe_fit(&net, &data, NULL, NULL, &error), MOE_ERR_ARGUMENT, "given indices");
    CHECK(strstr(error.message, "module 0") != NULL && strstr(error.message, "needs_given") != NULL,
          "the trait is named");
    moe_net_free(&net);
    c = small_layer();
    moe_net_init(&net, D, 0, NULL);
    moe_net_mixture(&net, &c);
    c.router.loss_distill = 1;
    moe_net_mixture(&net, &c);
    CHECK_STATUS(moe_net_build(&net, 1, 1, &error), MOE_OK, "build");
    CHECK_STATUS(moe_fit(&net, &data, NULL, NULL, &error), MOE_ERR_ARGUMENT, "a teacher");
    CHECK(strstr(error.message, "module 1") != NULL && strstr(error.message, "loss_distill") != NULL,
          "the loss is named");
    moe_net_free(&net);
    c.router.input = MOE_INPUT_ADAPTIVE_CLUSTERING;
    c.router.loss_distill = 0;
    moe_net_init(&net, D, 0, NULL);
    moe_net_linear(&net, D);
    CHECK_STATUS(moe_net_mixture(&net, &c), MOE_ERR_CONFIG, "a mixture before it");
    CHECK(strstr(net.error.message, "module 1 (mixture)") != NULL &&
              strstr(net.error.message, "needs_previous_layer") != NULL &&
              strstr(net.error.message, "first MoE layer") != NULL,
          "module and trait are named");
    CHECK(net.n_modules == 1, "nothing was added");
    moe_net_free(&net);
    drop_data(&data);
}

/* What samples cannot give to a router. */
static int needs_more_than_x(const moe_layer_config *c) {
    return (moe_router_traits(&c->router) &
            (unsigned)(MOE_TRAIT_NEEDS_TOKEN_IDS | MOE_TRAIT_NEEDS_ATTENTION | MOE_TRAIT_NEEDS_GIVEN)) != 0;
}

/* Adaptive clustering is refused as the first mixture of a network, and taken behind another
   one. */
static moe_status add_preset(moe_net *net, int width, const moe_layer_config *c) {
    moe_layer_config before = small_layer();
    moe_net_init(net, width, MOE_KERNELS_C, NULL);
    if ((moe_router_traits(&c->router) & MOE_TRAIT_NEEDS_PREVIOUS_LAYER) != 0) {
        CHECK_STATUS(moe_net_mixture(net, c), MOE_ERR_CONFIG, "no mixture before it");
        CHECK(strstr(net->error.message, "module 0 (mixture)") != NULL &&
                  strstr(net->error.message, "first MoE layer") != NULL,
              "by name");
        moe_net_free(net);
        moe_net_init(net, width, MOE_KERNELS_C, NULL);
        moe_net_mixture(net, &before);
    }
    moe_net_mixture(net, c);
    return moe_net_residual(net, 1);
}

/* Every preset in a network: its configuration survives a file, and it trains where samples are
   enough for it. */
static void test_presets(void) {
    enum { WIDTH = 16, ROWS = 24 };
    const moe_preset *preset;
    moe_real *x = normals(ROWS * WIDTH, 1, 1), *targets = normals(ROWS * WIDTH, 1, 2);
    int built = 0, trained = 0;
    for (preset = moe_presets(); preset->name != NULL; preset++) {
        moe_net net, back;
        moe_error error;
        moe_layer_config c;
        moe_train_config t = quick_training();
        moe_data data;
        moe_buffer first, second;
        moe_evaluation here, there;
        moe_status status;
        uint64_t before;
        memset(&data, 0, sizeof data);
        data.n = ROWS;
        data.x = x;
        data.targets = targets;
        t.criterion = MOE_CRITERION_SQUARED_ERROR;
        t.epochs = 1;
        CHECK_STATUS(moe_layer_preset(preset->name, &c, &error), MOE_OK, "preset");
        c.router.d_model = WIDTH;
        c.d_ff = 8;
        if (c.router.select == MOE_SELECT_HASH || c.router.student_dim > 0) c.router.table_size = 10;
        CHECK_STATUS(add_preset(&net, WIDTH, &c), MOE_OK, "a preset's modules");
        status = moe_net_build(&net, 1, 1, &error);
        if (!CHECK_STATUS(status, MOE_OK, "a preset's net")) printf("        %s: %s\n", preset->name, error.message);
        if (status != MOE_OK) {
            moe_net_free(&net);
            continue;
        }
        built++;
        before = fingerprint(&net);
        status = moe_fit(&net, &data, NULL, &t, &error);
        if (!CHECK_STATUS(status, needs_more_than_x(&c) ? MOE_ERR_ARGUMENT : MOE_OK,
                          "fit, or a router that needs more than x"))
            printf("        %s: %s\n", preset->name, error.message);
        CHECK((status == MOE_OK) == (fingerprint(&net) != before), "trained or untouched");
        trained += status == MOE_OK;
        first = written(&net);
        if (CHECK_STATUS(moe_net_read(&back, first.data, first.size, 1, MOE_KERNELS_C, NULL, &error), MOE_OK, "read")) {
            second = written(&back);
            CHECK(first.size == second.size && same_bits(first.data, second.data, first.size), "the same bytes");
            if (status == MOE_OK) {
                CHECK_STATUS(moe_evaluate(&net, &data, t.criterion, &here, &error), MOE_OK, "evaluate");
                CHECK_STATUS(moe_evaluate(&back, &data, t.criterion, &there, &error), MOE_OK, "evaluate");
                CHECK(same_bits(&here.loss, &there.loss, sizeof here.loss), "the same results");
            }
            moe_buffer_free(&second);
            moe_net_free(&back);
        } else printf("        %s: %s\n", preset->name, error.message);
        moe_buffer_free(&first);
        moe_net_free(&net);
    }
    CHECK(built > 10 && trained > 5, "most presets");
    free(x);
    free(targets);
}

/* ---- a language model: every module of one comes back from a file ---- */

static void build_language_model(moe_net *net) {
    moe_attention_config a;
    moe_layer_config c;
    moe_error error;
    memset(&a, 0, sizeof a);
    memset(&c, 0, sizeof c);
    moe_net_init(net, 0, MOE_KERNELS_C, NULL);
    moe_net_embedding(net, 11, 8);
    moe_net_positions(net, 9);
    moe_net_dropout(net, (moe_real)0.25);
    moe_net_rms_norm(net);
    a.heads = 2;
    a.d_head = 6;
    a.rotary = 1;
    a.rotary_base = 500;
    moe_net_attention(net, &a);
    c.router.n_experts = 4;
    c.router.top_k = 2;
    c.router.refine = MOE_REFINE_ATTENTION;
    c.d_ff = 6;
    moe_net_mixture(net, &c);
    memset(&c, 0, sizeof c);
    c.expert = MOE_EXPERT_MLP;
    c.act = MOE_ACT_GELU;
    c.d_ff = 5;
    c.no_expert_bias = 1;
    moe_net_feed_forward(net, &c);
    memset(&a, 0, sizeof a);
    a.full = 1;
    moe_net_attention(net, &a);
    moe_net_tied(net);
    if (moe_net_build(net, 1, 5, &error) != MOE_OK) printf("        %s\n", error.message);
}

static void test_language_model_files(void) {
    static const char *const names[] = {"0.weight",
                                        "1.weight",
                                        "3.weight",
                                        "4.query",
                                        "4.key",
                                        "4.value",
                                        "4.output",
                                        "5.router.weight",
                                        "5.experts.gate",
                                        "5.experts.up",
                                        "5.experts.down",
                                        "6.experts.fc1.weight",
                                        "6.experts.fc2.weight",
                                        "7.query",
                                        "7.key",
                                        "7.value",
                                        "7.output",
                                        "8.bias"};
    static const int32_t ids[7] = {3, 1, 4, 1, 10, 0, 2};
    moe_net net, back;
    moe_buffer first, second;
    moe_net_pass pass[2];
    moe_call call;
    moe_error error;
    void *work[2];
    size_t i, size, used;
    build_language_model(&net);
    if (!CHECK(net.built && net.n_tensors == sizeof names / sizeof names[0], "built")) return;
    for (i = 0; i < net.n_tensors; i++) CHECK(strcmp(net.tensors[i].name, names[i]) == 0, names[i]);
    CHECK(moe_net_parameter_count(&net, &used) ==
              11 * 8 + 9 * 8 + 8 + 4 * 12 * 8 + 4 * 8 + 3 * 4 * 6 * 8 + 2 * 5 * 8 + 4 * 8 * 8 + 11,
          "numbers");
    CHECK(used == 8 + 8 + 8 + 4 * 12 * 8 + 4 * 8 + 3 * 2 * 6 * 8 + 2 * 5 * 8 + 4 * 8 * 8 + 11 + 11 * 8,
          "those of one token");
    memset(&call, 0, sizeof call);
    call.n_tokens = 7;
    call.token_ids = ids;
    CHECK_STATUS(moe_net_work_size(&net, 7, 0, &size), MOE_OK, "size");
    work[0] = grab(size, 1);
    work[1] = grab(size, 1);
    CHECK_STATUS(moe_net_forward(&net, &call, work[0], size, &pass[0]), MOE_OK, "forward");
    first = written(&net);
    if (CHECK_STATUS(moe_net_read(&back, first.data, first.size, 0, MOE_KERNELS_C, NULL, &error), MOE_OK, "read")) {
        second = written(&back);
        CHECK(first.size == second.size && same_bits(first.data, second.data, first.size), "the same bytes");
        CHECK_STATUS(moe_net_forward(&back, &call, work[1], size, &pass[1]), MOE_OK, "forward");
        CHECK(same_bits(pass[0].y, pass[1].y, 7 * 11 * sizeof(moe_real)), "the same logits");
        moe_buffer_free(&second);
        moe_net_free(&back);
    } else printf("        %s\n", error.message);
    moe_buffer_free(&first);
    moe_net_free(&net);
    free(work[0]);
    free(work[1]);
}

/* ---- swiglu experts with biases and shaped gates come back from a file ---- */

static void test_shaped_files(void) {
    moe_net net, back;
    moe_layer_config c;
    moe_buffer bytes;
    moe_error error;
    moe_real x[5 * 8], *y, *z;
    size_t i, k;
    moe_net_init(&net, 8, MOE_KERNELS_C, NULL);
    CHECK_STATUS(moe_layer_preset("gpt_oss", &c, &error), MOE_OK, "preset");
    CHECK(c.expert_bias && fabs((double)c.swiglu_alpha - 1.702) < 1e-6 && fabs((double)c.swiglu_limit - 7) < 1e-6 &&
              fabs((double)c.swiglu_offset - 1) < 1e-6,
          "gpt_oss");
    c.router.n_experts = 6;
    c.d_ff = 5;
    moe_net_mixture(&net, &c);
    memset(&c, 0, sizeof c);
    c.d_ff = 7;
    c.expert_bias = 1;
    c.swiglu_limit = (moe_real)0.25;
    c.swiglu_offset = (moe_real)-0.5;
    moe_net_feed_forward(&net, &c);
    if (!CHECK_STATUS(moe_net_build(&net, 1, 3, &error), MOE_OK, "build")) return;
    for (i = 0; i < net.n_tensors; i++)
        for (k = 0; k < net.tensors[i].count; k++) net.tensors[i].data[k] += (moe_real)(0.01 * (double)(k % 17));
    CHECK(net_tensor(&net, "0.experts.gate_bias") != NULL && net_tensor(&net, "0.experts.up_bias") != NULL &&
              net_tensor(&net, "0.experts.down_bias") != NULL && net_tensor(&net, "1.experts.down_bias") != NULL,
          "names");
    for (i = 0; i < 5 * 8; i++) x[i] = (moe_real)(0.3 * (double)(i % 11) - 1.5);
    bytes = written(&net);
    if (CHECK_STATUS(moe_net_read(&back, bytes.data, bytes.size, 0, MOE_KERNELS_C, NULL, &error), MOE_OK, "read")) {
        CHECK(same_bits(&back.modules[0].layer.config, &net.modules[0].layer.config, sizeof c) &&
                  same_bits(&back.modules[1].layer.config, &net.modules[1].layer.config, sizeof c),
              "the configurations");
        y = outputs(&net, x, 5);
        z = outputs(&back, x, 5);
        CHECK(same_bits(y, z, 5 * 8 * sizeof *y), "the same outputs");
        free(y);
        free(z);
        moe_net_free(&back);
    } else printf("        %s\n", error.message);
    moe_buffer_free(&bytes);
    moe_net_free(&net);
    moe_net_init(&net, 8, MOE_KERNELS_C, NULL);
    c.n_shared = 1;
    CHECK_STATUS(moe_net_feed_forward(&net, &c), MOE_ERR_CONFIG, "a feed_forward has no shared expert");
    CHECK(strstr(net.error.message, "n_shared = 1") != NULL && strstr(net.error.message, "swiglu_...") != NULL,
          "the message says what it has");
    c.n_shared = 0;
    c.expert = MOE_EXPERT_MLP;
    moe_net_free(&net);
    moe_net_init(&net, 8, MOE_KERNELS_C, NULL);
    CHECK_STATUS(moe_net_feed_forward(&net, &c), MOE_ERR_CONFIG, "an mlp has no limit");
    CHECK(strstr(net.error.message, "swiglu_limit = 0.25") != NULL, "named");
    moe_net_free(&net);
}

/* Modules of one network describe those of another; what a feed_forward does not read is refused
   there, too. */
static void test_copied_modules(void) {
    moe_layer_config c;
    moe_net net, copy;
    moe_module changed;
    moe_error error;
    size_t i;
    memset(&c, 0, sizeof c);
    moe_net_init(&net, 8, MOE_KERNELS_C, NULL);
    moe_net_attention(&net, NULL);
    moe_net_mixture(&net, &c);
    c.d_ff = 12;
    c.swiglu_limit = (moe_real)0.25;
    moe_net_feed_forward(&net, &c);
    moe_net_rms_norm(&net);
    moe_net_linear(&net, 3);
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK, "build");
    moe_net_init(&copy, 8, MOE_KERNELS_AUTO, NULL);
    for (i = 0; i < net.n_modules; i++)
        CHECK_STATUS(moe_net_append(&copy, &net.modules[i]), MOE_OK, copy.error.message);
    CHECK_STATUS(moe_net_build(&copy, 0, 1, &error), MOE_OK, "build");
    CHECK(fingerprint(&copy) == fingerprint(&net) && copy.modules[2].layer.config.d_ff == 12 &&
              copy.modules[2].layer.config.swiglu_limit > 0, "the same network");
    moe_net_free(&copy);
    for (i = 0; i < 4; i++) {
        changed = net.modules[2];
        if (i == 0) changed.layer.config.router.top_k = 2;
        if (i == 1) changed.layer.config.router.loss_z = (moe_real)0.1;
        if (i == 2) changed.layer.config.n_shared = 1;
        moe_net_init(&copy, i == 3 ? 7 : 8, MOE_KERNELS_C, NULL);
        CHECK_STATUS(moe_net_append(&copy, &changed), MOE_ERR_CONFIG, "not one of a feed_forward");
        CHECK(strstr(copy.error.message, i == 0   ? "top_k = 2"
                                         : i == 1 ? "loss_z = 0.1"
                                         : i == 2 ? "n_shared = 1"
                                                  : "d_model = 8") != NULL, copy.error.message);
        moe_net_free(&copy);
    }
    moe_net_free(&net);
}

/* The weights of attention are kept for routers that read them alone: without one the workspace
   grows as the tokens do, not as their square. */
static void test_attention_room(void) {
    moe_layer_config c;
    moe_attention_config a;
    size_t size[2][2];
    int reads, i;
    memset(&a, 0, sizeof a);
    a.heads = 2;
    for (reads = 0; reads < 2; reads++) {
        moe_net net;
        memset(&c, 0, sizeof c);
        c.router.n_experts = 4;
        c.router.refine = reads ? MOE_REFINE_ATTENTION : MOE_REFINE_NONE;
        c.router.causal = reads;
        c.d_ff = 4;
        CHECK(moe_net_init(&net, 8, MOE_KERNELS_C, NULL) == MOE_OK && moe_net_attention(&net, &a) == MOE_OK);
        CHECK(moe_net_mixture(&net, &c) == MOE_OK && moe_net_build(&net, 0, 1, NULL) == MOE_OK);
        for (i = 0; i < 2; i++) CHECK(moe_net_work_size(&net, (size_t)1024 << i, 0, &size[reads][i]) == MOE_OK);
        moe_net_free(&net);
    }
    CHECK(size[0][1] < 2 * size[0][0] + 4096, "nothing reads the weights");
    CHECK(size[1][1] > 3 * size[1][0], "a router reads the weights");
}

static moe_real *tensor_of(moe_net *net, const char *name) {
    size_t i;
    for (i = 0; i < net->n_tensors; i++)
        if (strcmp(net->tensors[i].name, name) == 0) return net->tensors[i].data;
    return NULL;
}

/* router_residual: the logits of the MoE layer before, times a matrix, are added. Here that is
   twice the identity and the layer's own weights are 0, so that its logits are twice the others. */
static void test_residual_logits(void) {
    enum { WIDE = 6, E = 4, TOKENS = 5 };
    moe_layer_config c;
    moe_net net;
    moe_net_pass pass;
    moe_call call;
    moe_rng rng;
    moe_real x[TOKENS * WIDE], *weight, *residual;
    size_t size = 0, i;
    void *work;
    memset(&c, 0, sizeof c);
    memset(&call, 0, sizeof call);
    c.router.n_experts = E;
    c.d_ff = 3;
    CHECK(moe_net_init(&net, WIDE, MOE_KERNELS_C, NULL) == MOE_OK && moe_net_mixture(&net, &c) == MOE_OK);
    c.router.router_residual = 1;
    CHECK(moe_net_mixture(&net, &c) == MOE_OK && moe_net_build(&net, 0, 3, NULL) == MOE_OK);
    weight = tensor_of(&net, "1.router.weight");
    residual = tensor_of(&net, "1.router.residual");
    if (!CHECK(weight != NULL && residual != NULL)) return;
    memset(weight, 0, E * WIDE * sizeof *weight);
    for (i = 0; i < E * E; i++) residual[i] = (moe_real)(i % (E + 1) == 0 ? 2 : 0);
    moe_rng_seed(&rng, 8);
    for (i = 0; i < TOKENS * WIDE; i++) x[i] = moe_rng_normal(&rng);
    call.n_tokens = TOKENS;
    call.x = x;
    CHECK(moe_net_work_size(&net, TOKENS, 0, &size) == MOE_OK);
    work = grab(size, 1);
    if (CHECK(moe_net_forward(&net, &call, work, size, &pass) == MOE_OK)) {
        const moe_routing *first = moe_net_routing(&net, &pass, 0), *second = moe_net_routing(&net, &pass, 1);
        for (i = 0; i < TOKENS * E; i++) CHECK_NEAR(second->logits[i], 2 * first->logits[i], 1e-5);
    }
    free(work);
    moe_net_free(&net);
}

/* ---- packed weights of all modules ---- */

enum { PACKED_TOKENS = 9, PACKED_ROOM = 1 << 20 };

/* Attention of each form, a convolution, layers, and a head: linear or tied. */
static void build_packed(moe_net *net, int tied, int trainable) {
    moe_attention_config a;
    moe_layer_config c = small_layer();
    moe_module m;
    moe_error error;
    memset(&a, 0, sizeof a);
    moe_net_init(net, 0, MOE_KERNELS_AUTO, NULL);
    moe_net_embedding(net, 37, 20);
    a.heads = 2;
    a.kv_heads = 1;
    a.bias = 1;
    moe_net_attention(net, &a);
    moe_net_residual(net, 1);
    memset(&a, 0, sizeof a);
    a.heads = 3;
    a.kv_lora = 11;
    a.q_lora = 7;
    a.d_head = 10;
    a.rotary = 1;
    a.rotary_dims = 4;
    moe_net_attention(net, &a);
    c.n_shared = 1;
    moe_net_mixture(net, &c);
    memset(&c, 0, sizeof c);
    c.expert = MOE_EXPERT_MLP;
    c.d_ff = 5;
    moe_net_feed_forward(net, &c);
    moe_net_residual(net, 3);
    memset(&m, 0, sizeof m);
    m.kind = MOE_MODULE_CONVOLUTION;
    m.length = 3;
    moe_net_append(net, &m);
    if (tied) moe_net_tied(net);
    else moe_net_linear(net, 37);
    if (moe_net_build(net, trainable, 5, &error) != MOE_OK) printf("        %s\n", error.message);
}

/* The logits of some tokens: at once, or (step) decoded one by one. */
static void packed_logits(const moe_net *net, int step, int keep, moe_real *y, void *work) {
    static const int32_t ids[PACKED_TOKENS] = {3, 1, 4, 1, 10, 0, 36, 5, 9};
    static unsigned char cached[1 << 16];
    moe_call call;
    moe_net_pass pass;
    moe_cache cache;
    size_t bytes = 0, size = 0, t;
    memset(&call, 0, sizeof call);
    call.keep = keep;
    call.token_ids = ids;
    if (!step) {
        call.n_tokens = PACKED_TOKENS;
        CHECK_STATUS(moe_net_work_size(net, PACKED_TOKENS, keep, &bytes), MOE_OK);
        if (CHECK(bytes <= PACKED_ROOM) && CHECK_STATUS(moe_net_forward(net, &call, work, bytes, &pass), MOE_OK))
            memcpy(y, pass.y, PACKED_TOKENS * 37 * sizeof *y);
        return;
    }
    call.n_tokens = 1;
    CHECK_STATUS(moe_net_decode_size(net, PACKED_TOKENS, 1, &size, &bytes, NULL), MOE_OK);
    CHECK_STATUS(moe_net_cache_init(&cache, net, PACKED_TOKENS, cached, sizeof cached, NULL), MOE_OK);
    for (t = 0; t < PACKED_TOKENS; t++, call.token_ids++)
        if (CHECK_STATUS(moe_net_decode(net, &cache, &call, work, bytes, &pass), MOE_OK))
            memcpy(y + t * 37, pass.y, 37 * sizeof *y);
}

/* Whether all modules with matrices read packed weights, or none. */
static int all_packed(const moe_net *net, int packed) {
    size_t i;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        if (m->kind == MOE_MODULE_EMBEDDING || m->kind == MOE_MODULE_RESIDUAL) continue;
        if (m->layer.is_packed != packed) return 0;
    }
    return 1;
}

/* MOE_TYPE_REAL keeps all bits, decoding gives those of forward, keep reads the tensors, and the
   report's last error is that of the logits: 1.2 times what was measured is allowed. */
static void test_packed_types(void) {
    static moe_real exact[PACKED_TOKENS * 37], y[PACKED_TOKENS * 37], stepped[PACKED_TOKENS * 37];
    static const int32_t ids[PACKED_TOKENS] = {3, 1, 4, 1, 10, 0, 36, 5, 9};
    static const unsigned char mask[PACKED_TOKENS] = {1, 1, 1, 0, 1, 1, 1, 1, 0};
    static const double most[MOE_TYPE_COUNT] = {0, 0.0012, 0.007, 0.04, 0.04, 0.35};
    void *work = grab(PACKED_ROOM, 1), *memory = grab(PACKED_ROOM, 1);
    moe_quant_error errors[9];
    moe_error error;
    moe_call call;
    int tied, type;
    size_t i;
    memset(&call, 0, sizeof call);
    call.n_tokens = PACKED_TOKENS;
    call.token_ids = ids;
    for (tied = 0; tied < 2; tied++)
        for (type = 0; type < MOE_TYPE_COUNT; type++) {
            double sums[2] = {0.0, 0.0};
            size_t bytes = 0, report = 0;
            moe_net net;
            build_packed(&net, tied, 0);
            packed_logits(&net, 0, 0, exact, work);
            CHECK_STATUS(moe_net_pack_size(&net, type, PACKED_TOKENS, &bytes, &report), MOE_OK);
            if (!CHECK(bytes <= PACKED_ROOM && report <= PACKED_ROOM)) return;
            CHECK_STATUS(moe_net_quantize(&net, type, memory, bytes, &call, work, report - 1, errors, &error),
                         MOE_ERR_SPACE);
            CHECK_STATUS(moe_net_pack(&net, type, memory, bytes - 1, &error), MOE_ERR_SPACE);
            CHECK(all_packed(&net, 0));
            if (!CHECK_STATUS(moe_net_quantize(&net, type, memory, bytes, &call, work, report, errors, &error), MOE_OK))
                printf("        %s\n", error.message);
            CHECK(all_packed(&net, 1));
            packed_logits(&net, 0, 0, y, work);
            packed_logits(&net, 1, 0, stepped, work);
            CHECK(same_bits(y, stepped, sizeof y));
            CHECK(type != MOE_TYPE_REAL || same_bits(y, exact, sizeof y));
            for (i = 0; i < PACKED_TOKENS * 37; i++) {
                sums[0] += pow((double)y[i] - (double)exact[i], 2);
                sums[1] += pow((double)exact[i], 2);
            }
            CHECK_NEAR(errors[net.n_modules - 1].output, sqrt(sums[0] / sums[1]), 1e-6);
            CHECK(errors[0].rows == PACKED_TOKENS && (double)errors[net.n_modules - 1].output <= most[type]);
            CHECK((type == MOE_TYPE_REAL) == !(sums[0] > 0.0));
            packed_logits(&net, 0, 1, y, work);
            CHECK(same_bits(y, exact, sizeof y));
            call.mask = mask;
            CHECK_STATUS(moe_net_quantize(&net, type, memory, bytes, &call, work, report, errors, &error), MOE_OK);
            CHECK(errors[0].rows == PACKED_TOKENS - 2 && errors[net.n_modules - 1].rows == PACKED_TOKENS - 2);
            call.mask = NULL;
            moe_net_free(&net);
        }
    free(work);
    free(memory);
}

/* Both passes of a report draw the same order of drops; the caller's rng ends as after one. */
static void test_packed_draws(void) {
    static moe_real x[40 * 6];
    void *work = grab(PACKED_ROOM, 1), *memory = grab(PACKED_ROOM, 1);
    moe_layer_config c = small_layer();
    moe_quant_error errors[1];
    moe_rng rng = {7}, once = {7};
    moe_net_pass pass;
    moe_error error;
    moe_call call;
    moe_net net;
    size_t i;
    for (i = 0; i < 40 * 6; i++) x[i] = moe_rng_normal(&once);
    once = rng;
    c.router.drop_capacity = 5;
    c.router.drop_order = MOE_DROP_RANDOM;
    memset(&call, 0, sizeof call);
    call.n_tokens = 40;
    call.x = x;
    call.rng = &rng;
    moe_net_init(&net, 6, MOE_KERNELS_AUTO, NULL);
    moe_net_mixture(&net, &c);
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_OK, error.message);
    CHECK_STATUS(moe_net_quantize(&net, MOE_TYPE_REAL, memory, PACKED_ROOM, &call, work, PACKED_ROOM, errors, &error),
                 MOE_OK, error.message);
    CHECK(!(errors[0].output > 0));
    call.rng = &once;
    CHECK_STATUS(moe_net_forward(&net, &call, work, PACKED_ROOM, &pass), MOE_OK);
    CHECK(moe_rng_next(&rng) == moe_rng_next(&once));
    moe_net_free(&net);
    free(work);
    free(memory);
}

/* What is refused, what fails, and what unpacks. */
static void test_packed_failures(void) {
    static const int32_t ids[4] = {3, 1, 4, 1};
    void *work = grab(PACKED_ROOM, 1), *memory = grab(PACKED_ROOM, 1);
    void *other = grab(PACKED_ROOM, 1);
    moe_quant_error errors[9];
    moe_error error;
    moe_call call;
    moe_net net;
    size_t bytes = 0;
    moe_real *weight, kept;
    memset(&call, 0, sizeof call);
    moe_net_init(&net, 4, MOE_KERNELS_C, NULL);
    CHECK_STATUS(moe_net_pack(&net, MOE_TYPE_REAL, memory, PACKED_ROOM, &error), MOE_ERR_STATE);
    CHECK_STATUS(moe_net_pack_size(&net, MOE_TYPE_REAL, 0, &bytes, NULL), MOE_ERR_STATE);
    moe_net_free(&net);
    CHECK_STATUS(moe_net_pack(NULL, MOE_TYPE_REAL, memory, PACKED_ROOM, &error), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_net_pack_size(NULL, MOE_TYPE_REAL, 0, &bytes, NULL), MOE_ERR_ARGUMENT);
    build_packed(&net, 1, 1);
    CHECK_STATUS(moe_net_pack_size(&net, MOE_TYPE_REAL, 0, NULL, NULL), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_net_pack(&net, MOE_TYPE_REAL, NULL, PACKED_ROOM, &error), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_net_pack_size(&net, MOE_TYPE_COUNT, 0, &bytes, NULL), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_net_pack(&net, MOE_TYPE_COUNT, memory, PACKED_ROOM, &error), MOE_ERR_ARGUMENT);
    CHECK(strstr(error.message, "module 1 (attention)") != NULL, error.message);
    CHECK_STATUS(moe_net_quantize(&net, MOE_TYPE_Q8, memory, PACKED_ROOM, NULL, NULL, 0, errors, &error),
                 MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_net_pack_size(&net, MOE_TYPE_REAL, SIZE_MAX / 2, NULL, &bytes), MOE_ERR_OVERFLOW);
    net.transport = (const struct moe_transport *)memory; /* is not read */
    CHECK_STATUS(moe_net_quantize(&net, MOE_TYPE_REAL, memory, PACKED_ROOM, &call, work, PACKED_ROOM, errors, &error),
                 MOE_ERR_UNSUPPORTED);
    net.transport = NULL;
    CHECK_STATUS(moe_net_quantize(&net, MOE_TYPE_Q8, memory, PACKED_ROOM, NULL, NULL, 0, NULL, &error), MOE_OK);
    CHECK(all_packed(&net, 1));
    /* packed weights stay in use when packing anew fails elsewhere, but not in their own memory */
    weight = tensor_of(&net, "4.shared.down");
    if (!CHECK(weight != NULL)) return;
    kept = weight[0];
    weight[0] = (moe_real)INFINITY;
    CHECK_STATUS(moe_net_pack(&net, MOE_TYPE_Q8, other, PACKED_ROOM, &error), MOE_ERR_NONFINITE);
    CHECK(strstr(error.message, "module 4") != NULL && all_packed(&net, 1), error.message);
    CHECK_STATUS(moe_net_pack(&net, MOE_TYPE_Q8, memory, PACKED_ROOM, &error), MOE_ERR_NONFINITE);
    CHECK(all_packed(&net, 0));
    weight[0] = kept;
    /* a pass that fails on packed weights: as a 16-bit float, the weight is infinite */
    call.n_tokens = 4;
    call.token_ids = ids;
    weight = tensor_of(&net, "1.value");
    kept = weight[0];
    weight[0] = (moe_real)1e6;
    CHECK_STATUS(moe_net_quantize(&net, MOE_TYPE_F16, memory, PACKED_ROOM, &call, work, PACKED_ROOM, errors, &error),
                 MOE_ERR_NONFINITE);
    CHECK(all_packed(&net, 0));
    weight[0] = kept;
    moe_net_free(&net);
    free(work);
    free(memory);
    free(other);
}

/* Training reads the tensors and a step changes them; a file has the tensors alone. */
static void test_packed_training(void) {
    static moe_real y[2][PACKED_TOKENS * 37], dy[PACKED_TOKENS * 37];
    static const int32_t ids[PACKED_TOKENS] = {3, 1, 4, 1, 10, 0, 36, 5, 9};
    void *memory = grab(PACKED_ROOM, 1), *work = grab(PACKED_ROOM, 1);
    moe_train_config config = quick_training();
    moe_trainer trainer;
    moe_data data;
    moe_error error;
    moe_net nets[3]; /* packed, plain, loaded */
    moe_buffer files[2];
    moe_net_pass pass;
    moe_call call;
    size_t i, bytes = 0;
    memset(&data, 0, sizeof data);
    memset(&call, 0, sizeof call);
    memset(files, 0, sizeof files);
    for (i = 0; i < PACKED_TOKENS * 37; i++) dy[i] = (moe_real)(i % 7) - 3;
    call.n_tokens = PACKED_TOKENS;
    call.token_ids = ids;
    call.training = 1;
    for (i = 0; i < 2; i++) {
        moe_stream stream = moe_buffer_stream(&files[i]);
        build_packed(&nets[i], 1, 1);
        if (i == 0) CHECK_STATUS(moe_net_pack(&nets[0], MOE_TYPE_Q8, memory, PACKED_ROOM, &error), MOE_OK);
        CHECK_STATUS(moe_net_work_size(&nets[i], PACKED_TOKENS, 1, &bytes), MOE_OK);
        if (!CHECK(bytes <= PACKED_ROOM) || !CHECK_STATUS(moe_net_forward(&nets[i], &call, work, bytes, &pass), MOE_OK))
            return;
        memcpy(y[i], pass.y, sizeof y[i]);
        CHECK_STATUS(moe_net_backward(&nets[i], dy, NULL, &pass), MOE_OK);
        CHECK_STATUS(moe_net_write(&nets[i], &stream, &error), MOE_OK);
    }
    CHECK(all_packed(&nets[0], 1) && same_bits(y[0], y[1], sizeof y[0]));
    for (i = 0; i < nets[0].n_tensors; i++)
        CHECK(same_bits(nets[0].tensors[i].gradient, nets[1].tensors[i].gradient,
                        nets[0].tensors[i].count * sizeof(moe_real)));
    CHECK(files[0].size == files[1].size && same_bits(files[0].data, files[1].data, files[0].size));
    CHECK_STATUS(moe_net_read(&nets[2], files[0].data, files[0].size, 0, MOE_KERNELS_AUTO, NULL, &error), MOE_OK);
    CHECK(all_packed(&nets[2], 0));
    data.n = 4;
    data.token_ids = ids;
    data.labels = ids;
    data.length = 2;
    config.criterion = MOE_CRITERION_CROSS_ENTROPY;
    config.batch = 4;
    if (CHECK_STATUS(moe_trainer_init(&trainer, &nets[0], &config, &error), MOE_OK)) {
        CHECK_STATUS(moe_trainer_step(&trainer, &data, NULL, &error), MOE_OK);
        CHECK(all_packed(&nets[0], 0));
        moe_trainer_free(&trainer);
    }
    for (i = 0; i < 3; i++) moe_net_free(&nets[i]);
    for (i = 0; i < 2; i++) moe_buffer_free(&files[i]);
    free(memory);
    free(work);
}

/* A layer that asks for kernels of its own keeps them. The network's are another table here, in
   builds that have but one, too. */
static void test_kernels_of_a_layer(void) {
    moe_kernels other = *moe_kernels_select(MOE_KERNELS_C);
    moe_layer_config c;
    moe_net net;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 2;
    c.kernels = MOE_KERNELS_C;
    other.id = MOE_KERNELS_AVX2;
    moe_net_init(&net, 8, MOE_KERNELS_C, NULL);
    net.kernels = &other;
    if (CHECK_STATUS(moe_net_mixture(&net, &c), MOE_OK))
        CHECK(net.modules[0].layer.config.kernels == MOE_KERNELS_C);
    moe_net_free(&net);
}

int main(int count, char **words) {
    const char *folder = count > 1 ? words[1] : ".";
    if (strlen(folder) > 500) {
        fprintf(stderr, "net: the folder's name is too long\n");
        return 2;
    }
    sprintf(path[0], "%s/net_test_a.safetensors", folder);
    sprintf(path[1], "%s/net_test_b.safetensors", folder);
    CASE(test_packed_types());
    CASE(test_packed_draws());
    CASE(test_packed_failures());
    CASE(test_packed_training());
    CASE(test_attention_room());
    CASE(test_residual_logits());
    CASE(test_modules());
    CASE(test_mixture());
    CASE(test_kernels_of_a_layer());
    CASE(test_calls());
    CASE(test_copied_modules());
    CASE(test_chain());
    CASE(test_untrainable());
    CASE(test_dropout_adds());
    CASE(test_gradients());
    CASE(test_losses());
    CASE(test_learning());
    CASE(test_evaluation());
    CASE(test_updates());
    CASE(test_frozen());
    CASE(test_progress());
    CASE(test_refused_training());
    CASE(test_nonfinite_source());
    CASE(test_needs());
    CASE(test_mask());
    CASE(test_files());
    CASE(test_damaged_files());
    CASE(test_configurations());
    CASE(test_many_modules());
    CASE(test_layer_files());
    CASE(test_presets());
    CASE(test_language_model_files());
    CASE(test_shaped_files());
    CASE(test_build_without_memory());
    CASE(test_training_without_memory());
    CASE(test_files_without_memory());
    return test_end();
}
