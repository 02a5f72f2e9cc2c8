/* Makes what the device targets run: trains a mixture of experts on handwritten digits, and writes it as C headers with int8, int4 and float
   weights, beside a header with digits that training has not seen.
     cc -std=c99 -O1 -I. tests/devices/export.c -o export -lm && ./export examples/data/digits.csv FOLDER
   A few seconds of training are enough: it is not the accuracy of this net that is looked at, but that all machines compute the same. */

#define MOE_IMPLEMENTATION
#include "moe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIXELS = 64, CLASSES = 10, ROWS = 1797, HELD_OUT = 50, TRAINED = ROWS - HELD_OUT, CALIBRATION = 400 };

static moe_real x[ROWS * PIXELS];
static int32_t labels[ROWS];
static int grey[ROWS][PIXELS];

static int fail(const char *what, const char *why) {
    fprintf(stderr, "export: %s: %s\n", what, why);
    return 1;
}

static int read_rows(const char *path) {
    FILE *f = fopen(path, "r");
    int i, k, label;
    if (f == NULL) return 0;
    for (i = 0; i < ROWS; i++) {
        for (k = 0; k < PIXELS; k++) {
            if (fscanf(f, "%d,", &grey[i][k]) != 1) return 0;
            x[i * PIXELS + k] = (moe_real)grey[i][k] / 16;
        }
        if (fscanf(f, "%d", &label) != 1) return 0;
        labels[i] = label;
    }
    fclose(f);
    return 1;
}

static FILE *create(const char *folder, const char *name) {
    char path[1000];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "wb");
}

static int write_digits(const char *folder) {
    FILE *f = create(folder, "digits.h");
    int i, k;
    if (f == NULL) return 0;
    fprintf(f, "static const uint8_t device_pixels[%d][%d] DEVICE_FLASH = {\n", HELD_OUT, PIXELS);
    for (i = TRAINED; i < ROWS; i++)
        for (k = 0; k < PIXELS; k++) fprintf(f, "%s%d%s", k == 0 ? "    {" : "", grey[i][k], k + 1 < PIXELS ? "," : "},\n");
    fprintf(f, "};\nstatic const uint8_t device_labels[%d] DEVICE_FLASH = {", HELD_OUT);
    for (i = TRAINED; i < ROWS; i++) fprintf(f, "%s%d", i > TRAINED ? "," : "", (int)labels[i]);
    fprintf(f, "};\n");
    return fclose(f) == 0;
}

static moe_status train(moe_net *net, moe_error *error) {
    const moe_data data = {.n = TRAINED, .x = x, .labels = labels};
    moe_train_config training = {.epochs = 20, .batch = 32, .rate = (moe_real)0.006, .final_rate = (moe_real)0.05, .seed = 1};
    moe_layer_config experts = {.d_ff = 20};
    moe_status status;
    experts.router.n_experts = 8, experts.router.top_k = 2;
    experts.router.loss_balance = (moe_real)0.05;
    moe_net_init(net, PIXELS, MOE_KERNELS_C, NULL);
    moe_net_linear(net, 32);
    moe_net_activation(net, MOE_ACT_RELU);
    moe_net_mixture(net, &experts);
    moe_net_residual(net, 1);
    moe_net_linear(net, CLASSES);
    status = moe_net_build(net, 1, 1, error);
    return status == MOE_OK ? moe_fit(net, &data, NULL, &training, error) : status;
}

static moe_status write_model(const moe_net *net, const char *folder, const char *name, int weights, moe_error *error) {
    const moe_data calibration = {.n = CALIBRATION, .x = x};
    const moe_model_config config = {.weights = weights, .calibration = &calibration};
    moe_built_model built = {0};
    moe_buffer buffer = {0};
    moe_stream stream = moe_buffer_stream(&buffer);
    moe_status status = moe_model_create(&built, net, &config, error);
    if (status == MOE_OK) status = moe_export_c(&built, "digits", &stream, error);
    if (status == MOE_OK) {
        FILE *f = create(folder, name);
        if (f == NULL || fwrite(buffer.data, 1, buffer.size, f) != buffer.size || fclose(f) != 0) status = MOE_ERR_IO;
    }
    moe_buffer_free(&buffer);
    moe_model_free(&built);
    return status;
}

int main(int argc, char **argv) {
    moe_net net = {0};
    moe_error error = {0};
    if (argc != 3) return fail("arguments", "CSV FOLDER");
    if (!read_rows(argv[1]) || !write_digits(argv[2])) return fail(argv[1], "cannot be read, or the folder cannot be written to");
    if (train(&net, &error) != MOE_OK) return fail("training", error.message);
    if (write_model(&net, argv[2], "model_int8.h", MOE_WEIGHTS_INT8, &error) != MOE_OK) return fail("int8", error.message);
    if (write_model(&net, argv[2], "model_int4.h", MOE_WEIGHTS_INT4, &error) != MOE_OK) return fail("int4", error.message);
    if (write_model(&net, argv[2], "model_float.h", MOE_WEIGHTS_FLOAT, &error) != MOE_OK) return fail("float", error.message);
    moe_net_free(&net);
    return 0;
}
