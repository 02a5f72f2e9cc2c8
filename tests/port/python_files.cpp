// Writes files of all kinds and prints what is in them, for tests/port/python_files.py, which reads
// them with numpy; as C++11 and, by -x c, as C99.
//   cc -std=c99 -x c -I. tests/port/python_files.cpp -o python_files -L. -lmoe
//   ./python_files FOLDER
// Lines: "file NAME", then "tensor HEX-OF-ITS-NAME rank dimensions... HEX-OF-ITS-BYTES" and
// "metadata HEX-OF-KEY HEX-OF-VALUE" in the order of the file, "field NAME VALUE" of a layer's
// configuration, "module NAME" of a network. The bytes are those of the numbers in memory,
// little-endian.
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

static const char *in_folder(const char *folder, const char *name) {
    static char path[1000];
    sprintf(path, "%.900s/%s", folder, name);
    printf("file %s\n", name);
    return path;
}

/* "-" stands for nothing. */
static void print_hex(const char *text) {
    printf(text[0] == '\0' ? " -" : " ");
    for (; *text != '\0'; text++) printf("%02x", (unsigned)(unsigned char)*text);
}

static void print_tensor(const moe_tensor *tensor) {
    size_t i, b;
    int d, little = 1;
    little = *(const char *)&little;
    printf("tensor");
    print_hex(tensor->name);
    printf(" %d", tensor->n_dims);
    for (d = 0; d < tensor->n_dims; d++) printf(" %d", (int)tensor->shape[d]);
    printf(tensor->count == 0 ? " -" : " ");
    for (i = 0; i < tensor->count; i++) {
        const unsigned char *byte = (const unsigned char *)&tensor->data[i];
        for (b = 0; b < sizeof(moe_real); b++) printf("%02x", (unsigned)byte[little ? b : sizeof(moe_real) - 1 - b]);
    }
    printf("\n");
}

static void print_metadata(const char *key, const char *value) {
    printf("metadata");
    print_hex(key);
    print_hex(value);
    printf("\n");
}

/* The fields that files hold: those that are not 0, the machine's kernels left out. */
static void print_fields(const moe_layer_config *config) {
    const moe_field *field;
    char text[100];
    for (field = moe_layer_fields(); field->name != NULL; field++) {
        int number = 0;
        moe_real real = 0;
        if (strcmp(field->name, "kernels") == 0) continue;
        if (field->kind == MOE_FIELD_REAL) memcpy(&real, (const char *)config + field->offset, sizeof real);
        else memcpy(&number, (const char *)config + field->offset, sizeof number);
        if (number == 0 && !(real < 0) && !(real > 0)) continue;
        moe_field_text(field, config, text, sizeof text);
        printf("field %s %s\n", field->name, text);
    }
}

static void layer_of(const char *folder, const char *name, const char *preset, int d_model, int d_ff,
                     const char *more) {
    moe_layer_config config;
    moe_layer layer;
    moe_tensor tensor;
    size_t i;
    good(moe_layer_preset(preset, &config, &error), preset);
    if (more != NULL) good(moe_fields_apply(moe_layer_fields(), &config, more, &error), more);
    config.router.d_model = d_model;
    config.d_ff = d_ff;
    config.router.n_experts = 6;
    config.kernels = MOE_KERNELS_C;
    good(moe_layer_create(&layer, &config, 0, 3, NULL, &error), "create");
    good(moe_layer_save(&layer, in_folder(folder, name), &error), "save");
    for (i = 0; moe_layer_tensor(&layer, i, &tensor) == MOE_OK; i++) print_tensor(&tensor);
    print_fields(&layer.config);
    moe_layer_free(&layer);
}

/* A network after some steps, by itself and as a checkpoint, whose further tensors and metadata are
   the trainer's. */
static void net_of(const char *folder) {
    enum { N = 16 };
    moe_real x[N * 3], targets[N * 2];
    moe_layer_config small;
    moe_train_config training;
    moe_trainer trainer;
    moe_tensor moments;
    moe_data data;
    moe_net net;
    moe_rng rng;
    size_t i, numbers = 0;
    memset(&small, 0, sizeof small);
    memset(&training, 0, sizeof training);
    memset(&data, 0, sizeof data);
    moe_rng_seed(&rng, 4);
    for (i = 0; i < N * 3; i++) x[i] = moe_rng_normal(&rng);
    for (i = 0; i < N * 2; i++) targets[i] = moe_rng_normal(&rng);
    small.router.n_experts = 3;
    small.d_ff = 5;
    good(moe_net_init(&net, 3, MOE_KERNELS_C, NULL), "init");
    moe_net_linear(&net, 7);
    moe_net_layer_norm(&net);
    moe_net_activation(&net, MOE_ACT_GELU);
    moe_net_mixture(&net, &small);
    moe_net_residual(&net, 1);
    moe_net_linear(&net, 2);
    good(moe_net_build(&net, 1, 8, &error), "build");
    data.n = N;
    data.x = x;
    data.targets = targets;
    training.criterion = MOE_CRITERION_SQUARED_ERROR;
    training.batch = N;
    good(moe_trainer_init(&trainer, &net, &training, &error), "trainer");
    for (i = 0; i < 5; i++) good(moe_trainer_step(&trainer, &data, NULL, &error), "step");
    good(moe_net_save(&net, in_folder(folder, "net.safetensors"), &error), "save");
    for (i = 0; i < net.n_tensors; i++) print_tensor(&net.tensors[i]);
    printf("module linear\nmodule layer_norm\nmodule activation\nmodule mixture\nmodule residual\nmodule linear\n");
    good(moe_trainer_save(&trainer, in_folder(folder, "checkpoint.safetensors"), &error), "checkpoint");
    for (i = 0; i < net.n_tensors; i++) {
        print_tensor(&net.tensors[i]);
        numbers += net.tensors[i].count;
    }
    for (i = 0; i < 2; i++) {
        memset(&moments, 0, sizeof moments);
        strcpy(moments.name, i == 0 ? "trainer.first" : "trainer.second");
        moments.n_dims = 1;
        moments.shape[0] = moments.count = numbers;
        moments.data = trainer.memory + i * numbers;
        print_tensor(&moments);
    }
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

/* Names, sizes and numbers that trip readers. */
static void odd(const char *folder) {
    static const char *const names[] = {"plain",
                                        "a \"quoted\" \\ name",
                                        "line\nbreak\ttab\001",
                                        "h\303\251h\303\251",
                                        "\360\237\246\211",
                                        "\342\200\250",
                                        "",
                                        "{}[],:",
                                        "data_offsets",
                                        "123456789012345678901234567890123456789012345678901234567890123"};
    static const moe_metadata metadata[] = {
        {"", "empty key"}, {"empty", ""}, {"\"", "\\\"\n\001\037\177"}, {"\316\273", "\360\237\246\211 {\"a\":1}"}};
    enum { COUNT = sizeof names / sizeof *names };
    static const size_t shapes[COUNT][MOE_MAX_DIMS] = {{0}, {1},          {0}, {3, 0, 2}, {2, 3, 1, 2},
                                                       {5}, {1, 1, 1, 1}, {7}, {2, 2},    {13}};
    static const int ranks[COUNT] = {0, 1, 1, 3, 4, 1, 4, 1, 2, 1};
    moe_tensor tensors[COUNT];
    moe_buffer buffer;
    moe_stream stream;
    moe_real values[64];
    const char *path;
    FILE *file;
    size_t i, d;
    moe_real zero = 0, huge = (moe_real)1e30;
    memset(tensors, 0, sizeof tensors);
    memset(&buffer, 0, sizeof buffer);
    for (i = 0; i < 64; i++) values[i] = (moe_real)i / 3 - 9;
    values[0] = -zero;
    values[1] = huge * huge;
    values[2] = -values[1];
    values[3] = values[1] - values[1];
    values[4] = (moe_real)1e-42;
    for (i = 0; i < 8; i++) { /* infinite in double, too */
        values[1] *= huge;
        values[2] *= huge;
    }
    values[3] = values[1] - values[1];
    for (i = 0; i < COUNT; i++) {
        strcpy(tensors[i].name, names[i]);
        tensors[i].n_dims = ranks[i];
        tensors[i].count = 1;
        for (d = 0; d < MOE_MAX_DIMS; d++) tensors[i].shape[d] = d < (size_t)ranks[i] ? shapes[i][d] : 1;
        for (d = 0; d < (size_t)ranks[i]; d++) tensors[i].count *= shapes[i][d];
        tensors[i].data = values + i;
    }
    stream = moe_buffer_stream(&buffer);
    good(moe_file_write(&stream, tensors, COUNT, metadata, 4, NULL, &error), "write");
    path = in_folder(folder, "odd.safetensors");
    file = fopen(path, "wb");
    if (file == NULL || fwrite(buffer.data, 1, buffer.size, file) != buffer.size || fclose(file) != 0) exit(1);
    for (i = 0; i < COUNT; i++) print_tensor(&tensors[i]);
    for (i = 0; i < 4; i++) print_metadata(metadata[i].key, metadata[i].value);
    moe_buffer_free(&buffer);
}

int main(int count, char **words) {
    if (count != 2) {
        puts("python_files FOLDER");
        return 2;
    }
    layer_of(words[1], "mixtral.safetensors", "mixtral", 5, 3, NULL);
    layer_of(words[1], "deepseek.safetensors", "deepseek_v3", 8, 7, "groups=2 groups_kept=1 top_k=2");
    layer_of(words[1], "mlp.safetensors", "switch", 1, 1, "expert=mlp act=gelu jitter_eps=0.125");
    net_of(words[1]);
    odd(words[1]);
    return 0;
}
