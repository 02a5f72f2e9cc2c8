// What tests/port/bindings.py does, in the same order, printing the same lines; as C++11 and, by
// -x c, as C99: the reference that tests/port/bindings.sh compares with. Only declarations are
// included, the library is a shared one.
//   c++ -std=c++11 -I. tests/port/bindings.cpp -o bindings -L. -lmoe && ./bindings FOLDER
#include "moe.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static moe_error error;

static void good(moe_status status, const char *what) {
    if (status == MOE_OK) return;
    printf("%s: %s: %s\n", what, moe_status_text(status), error.message);
    exit(1);
}

/* A checksum of the bits (FNV-1a) and the first number. */
static void bits(const char *what, const void *numbers, size_t n, size_t size, double first) {
    const unsigned char *byte = (const unsigned char *)numbers;
    uint64_t sum = 14695981039346656037u;
    size_t i;
    for (i = 0; i < n * size; i++) sum = (sum ^ byte[i]) * 1099511628211u;
    printf("%s %d %08lx%08lx %.6f\n", what, (int)n, (unsigned long)(sum >> 32), (unsigned long)(sum & 0xffffffffu),
           first);
}

static void reals(const char *what, const moe_real *x, size_t n) { bits(what, x, n, sizeof *x, (double)x[0]); }

static moe_real *normal(size_t n, uint64_t seed) {
    moe_real *x = (moe_real *)calloc(n, sizeof *x);
    moe_rng rng;
    size_t i;
    if (x == NULL) exit(1);
    moe_rng_seed(&rng, seed);
    for (i = 0; i < n; i++) x[i] = moe_rng_normal(&rng);
    return x;
}

static const char *in_folder(const char *folder, const char *name) {
    static char path[1000];
    sprintf(path, "%.900s/%s", folder, name);
    return path;
}

/* By the name of a preset, forward, backward, to a file and back. */
static void use_layer(const char *folder) {
    enum { N = 12, D = 16 };
    moe_real *x = normal(N * D, 1), *dy = normal(N * D, 2);
    moe_real *y = normal(N * D, 3), *back = normal(N * D, 3);
    moe_real *dx = (moe_real *)calloc(N * D, sizeof *dx);
    moe_layer_config config;
    moe_layer layer, again;
    moe_layer_pass pass;
    moe_tensor tensor;
    moe_call call;
    size_t size;
    void *work;
    int i;
    good(moe_layer_preset("mixtral", &config, &error), "preset");
    config.router.d_model = D;
    config.d_ff = 24;
    config.kernels = MOE_KERNELS_C;
    good(moe_layer_create(&layer, &config, 1, 7, NULL, &error), "create");
    good(moe_layer_work_size(&layer, N, 1, &size), "work size");
    work = malloc(size);
    memset(&call, 0, sizeof call);
    call.n_tokens = N;
    call.x = x;
    call.training = 1;
    good(moe_layer_forward(&layer, &call, y, work, size, &pass), "forward");
    reals("forward", y, N * D);
    good(moe_layer_backward(&layer, dy, dx, NULL, &pass), "backward");
    reals("backward", dx, N * D);
    good(moe_layer_find(&layer, "experts.up", &tensor), "find");
    printf("tensor %s", tensor.name);
    for (i = 0; i < tensor.n_dims; i++) printf(" %d", (int)tensor.shape[i]);
    printf("\n");
    reals("gradient", tensor.gradient, tensor.count);
    bits("counts", pass.routing.counts, 8, sizeof(size_t), (double)pass.routing.counts[0]);
    good(moe_layer_save(&layer, in_folder(folder, "layer.safetensors"), &error), "save");
    good(moe_layer_load(&again, in_folder(folder, "layer.safetensors"), 0, MOE_KERNELS_AUTO, NULL, &error), "load");
    call.training = 0;
    good(moe_layer_forward(&again, &call, back, work, size, &pass), "forward of the loaded layer");
    printf("loaded %s\n", memcmp(back, y, N * D * sizeof *y) == 0 ? "True" : "False");
    moe_layer_free(&layer);
    moe_layer_free(&again);
    free(work);
    free(x);
    free(dy);
    free(y);
    free(back);
    free(dx);
}

/* A network that learns, to a file and back. */
static void use_net(const char *folder) {
    enum { N = 256 };
    moe_real *x = normal(N * 4, 3);
    int32_t *labels = (int32_t *)calloc(N, sizeof *labels);
    moe_layer_config small;
    moe_train_config training;
    moe_evaluation seen;
    moe_net net, copy;
    moe_net_pass pass;
    moe_data data;
    moe_call call;
    size_t size, t;
    void *work;
    int i;
    memset(&small, 0, sizeof small);
    memset(&training, 0, sizeof training);
    memset(&data, 0, sizeof data);
    memset(&call, 0, sizeof call);
    for (i = 0; i < N; i++) labels[i] = (x[4 * i] > 0) + 2 * (x[4 * i + 1] * x[4 * i + 2] > 0);
    small.router.n_experts = 4;
    small.d_ff = 8;
    good(moe_net_init(&net, 4, MOE_KERNELS_C, NULL), "init");
    moe_net_linear(&net, 8);
    moe_net_activation(&net, MOE_ACT_RELU);
    moe_net_mixture(&net, &small);
    moe_net_linear(&net, 4);
    good(moe_net_build(&net, 1, 5, &error), "build");
    data.n = N;
    data.x = x;
    data.labels = labels;
    training.epochs = 20;
    training.rate = (moe_real)0.01;
    training.seed = 9;
    good(moe_fit(&net, &data, NULL, &training, &error), "fit");
    good(moe_evaluate(&net, &data, MOE_CRITERION_CROSS_ENTROPY, &seen, &error), "evaluate");
    printf("learned %.5f %.4f\n", (double)seen.loss, (double)seen.accuracy);
    good(moe_net_save(&net, in_folder(folder, "net.safetensors"), &error), "save");
    good(moe_net_load(&copy, in_folder(folder, "net.safetensors"), 0, MOE_KERNELS_C, NULL, &error), "load");
    good(moe_net_work_size(&copy, N, 0, &size), "work size");
    work = malloc(size);
    call.n_tokens = N;
    call.x = x;
    good(moe_net_forward(&copy, &call, work, size, &pass), "forward of the net");
    reals("answers", pass.y, N * 4);
    for (t = 0; t < copy.n_tensors; t++) reals(copy.tensors[t].name, copy.tensors[t].data, copy.tensors[t].count);
    small.router.d_model = 4;
    small.router.top_k = 9;
    i = moe_layer_check(&small, NULL, &error);
    printf("refused %d %s\n", i, error.message);
    printf("missing %d\n", moe_net_load(&copy, in_folder(folder, "none"), 0, 0, NULL, &error));
    moe_net_free(&net);
    moe_net_free(&copy);
    free(work);
    free(x);
    free(labels);
}

int main(int count, char **words) {
    if (count != 2) {
        puts("bindings FOLDER");
        return 2;
    }
    printf("version %s\n", moe_version());
    use_layer(words[1]);
    use_net(words[1]);
    return 0;
}
