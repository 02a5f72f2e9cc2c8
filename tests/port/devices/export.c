/* Makes what the device targets run: the network of examples/microdigits.c, written as C headers
   with int8, int4 and float weights, beside a header with digits that training has not seen.
     cc -std=c99 -O1 -I. -Iexamples tests/port/devices/export.c -o export -lm
     ./export examples/data/digits.csv FOLDER
   It is trained for a part of a second: not its accuracy is looked at, but that all machines
   compute the same, and what that takes of them. */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "extras/moe_export.h"
#include "microdigits.h"

enum { HELD_OUT = 50, EPOCHS = 20 };

static int fail(const char *what, const char *why) {
    fprintf(stderr, "export: %s: %s\n", what, why);
    return 1;
}

static FILE *create(const char *folder, const char *name) {
    char path[1000];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "wb");
}

static int write_digits(const moe_data *digits, const char *folder) {
    FILE *f = create(folder, "device_digits.h");
    int i, k;
    if (f == NULL) return 0;
    fprintf(f, "static const uint8_t device_pixels[%d][%d] DEVICE_FLASH = {\n", (int)HELD_OUT, (int)PIXELS);
    for (i = 0; i < HELD_OUT; i++)
        for (k = 0; k < PIXELS; k++)
            fprintf(f, "%s%d%s", k == 0 ? "    {" : "", (int)(16 * digits->x[i * PIXELS + k] + (moe_real)0.5),
                    k + 1 < PIXELS ? "," : "},\n");
    fprintf(f, "};\nstatic const uint8_t device_labels[%d] DEVICE_FLASH = {", (int)HELD_OUT);
    for (i = 0; i < HELD_OUT; i++) fprintf(f, "%s%d", i > 0 ? "," : "", (int)digits->labels[i]);
    fprintf(f, "};\n");
    return fclose(f) == 0;
}

static moe_status write_model(const moe_net *net, const moe_data *calibration, const char *folder, const char *name,
                              int weights, moe_error *error) {
    const moe_model_config config = {.weights = weights, .calibration = calibration};
    moe_built_model built = {0};
    moe_buffer buffer = {0};
    moe_profile profile = {0};
    moe_stream stream = moe_buffer_stream(&buffer);
    moe_status status = moe_model_create(&built, net, &config, error);
    if (status == MOE_OK) status = moe_model_profile(&profile, net, &config, NULL, error);
    if (status == MOE_OK) printf("estimate %s %.0f\n", name, profile.instructions);
    if (status == MOE_OK) status = moe_export_c(&built, "digits", &stream, error);
    if (status == MOE_OK) {
        FILE *f = create(folder, name);
        if (f == NULL || fwrite(buffer.data, 1, buffer.size, f) != buffer.size || fclose(f) != 0) status = MOE_ERR_IO;
    }
    moe_buffer_free(&buffer);
    moe_profile_free(&profile);
    moe_model_free(&built);
    return status;
}

int main(int argc, char **argv) {
    static const struct {
        const char *file;
        int weights;
    } models[] = {
        {"model_int8.h", MOE_WEIGHTS_INT8}, {"model_int4.h", MOE_WEIGHTS_INT4}, {"model_float.h", MOE_WEIGHTS_FLOAT}};
    const moe_train_config training = microdigits_training(EPOCHS, 1);
    microdigits digits = {0};
    moe_net net = {0};
    moe_error error = {0};
    size_t i;
    if (argc != 3) return fail("arguments", "CSV FOLDER");
    if (!microdigits_read(&digits, argv[1], 1, 0)) return 1;
    if (!write_digits(&digits.test, argv[2])) return fail(argv[2], "cannot be written to");
    if (microdigits_build(&net, 0, 1, &error) || moe_fit(&net, &digits.calibration, NULL, &training, &error))
        return fail("training", error.message);
    for (i = 0; i < sizeof models / sizeof *models; i++)
        if (write_model(&net, &digits.calibration, argv[2], models[i].file, models[i].weights, &error))
            return fail(models[i].file, error.message);
    moe_net_free(&net);
    microdigits_free(&digits);
    return 0;
}
