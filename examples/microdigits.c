/* Trains an MoE network for handwritten digits on a microcontroller, and writes it as a C header
   with int8 or int4 weights.
     cc -std=c99 -O2 -I. examples/microdigits.c -o microdigits -lm && ./microdigits
     (or: sh examples/run microdigits) */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "extras/moe_blocks.h"
#include "extras/moe_export.h"
#include "microdigits.h"
#include "report.h"
#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

static const char help[] =
    "microdigits [options] [FILE]   trains on four fifths of the digits in FILE, tests on the rest, writes a C header\n"
    "FILE: a row per digit, 64 gray values 0..16 and the digit, separated by commas (examples/data/digits.csv)\n"
    "  -o FILE      the header with the model `digits` (digits.h)\n"
    "  --save FILE  the trained network; examples/export.c writes it as other headers (digits.safetensors)\n"
    "  --seed N     seed of all random choices: held-out rows, weights, order (1)\n"
    "  --epochs N   passes through the training digits (40)\n"
    "  --int4       weights of 4 bits instead of 8\n"
    "  --turned     the digits come in any of four orientations, as on a device that may be held in any of "
    "them\n" REPORT_HELP;
static const char *data_path, *header = "digits.h", *saved = "digits.safetensors";
static long epochs = 40, seed = 1;
static int turned, weights = MOE_WEIGHTS_INT8;

static int fail(const char *what, const char *why) {
    fprintf(stderr, is_named(what, why) ? "microdigits: %.0s%s\n" : "microdigits: %s: %s\n", what, why);
    return 1;
}

/* Flushes the output; fails if it could not be written. */
static int finish(void) { return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0; }

static int read_options(int count, char **words) {
    while (--count > 0) {
        const char *word = *++words, *value = count > 1 ? words[1] : "";
        int option = word[0] == '-' && strcmp(word, "--turned") != 0 && strcmp(word, "--int4") != 0;
        char *end = NULL;
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) exit(fputs(help, stdout) < 0 || finish());
        if (strcmp(word, "--turned") == 0) turned = 1;
        else if (strcmp(word, "--int4") == 0) weights = MOE_WEIGHTS_INT4;
        else if (!option && data_path != NULL) return fail(word, "a second file of digits; one at a time");
        else if (!option) data_path = word;
        else if (strcmp(word, "-o") == 0 && *value != '\0') header = value;
        else if (strcmp(word, "--report") == 0 && *value != '\0') report_path = value;
        else if (strcmp(word, "--save") == 0 && *value != '\0') saved = value;
        else if (strcmp(word, "--seed") == 0) seed = strtol(value, &end, 10);
        else if (strcmp(word, "--epochs") == 0) epochs = strtol(value, &end, 10);
        else return fail(word, "no such option, or its value is missing; see -h");
        if ((end != NULL && (*end != '\0' || end == value)) || epochs < 1 || epochs > 9999 || seed < 0 ||
            seed > 999999999) {
            fprintf(stderr, "microdigits: %s %s: not a value of this option; see -h\n", word, value);
            return 1;
        }
        count -= option;
        words += option; /* the value of an option */
    }
    if (data_path == NULL) data_path = example_file("data/digits.csv");
    const char *const outputs[] = {header, saved, report_path};
    const char *twice = written_twice(outputs, 3, &data_path, 1);
    if (is_header_of_moe(header)) return fail(header, "is a header of the library; -o names another file");
    return twice != NULL ? fail(twice, WRITTEN_TWICE) : 0;
}

static moe_history history; /* recorded for the report: loss, router loss, held-out accuracy in percent */
static double counts[EXPERTS * CLASSES];

static int show_progress(void *ctx, const moe_progress *p) {
    double v[] = {(double)p->loss, (double)p->router_loss, 100 * (double)p->test.accuracy};
    int terminal = isatty(1), last = p->epoch == p->epochs && p->epoch_ended;
    *(moe_evaluation *)ctx = p->test; /* the last epoch's is kept */
    if (p->epoch_ended && moe_history_add(&history, p->epoch, v, 3) != MOE_OK) return 1;
    if (!last && !(terminal ? p->step % 32 == 0 : p->epoch_ended && p->epoch % 10 == 0)) return 0;
    printf("%sepoch %d of %d: loss %.4f", terminal ? "\r" : "", p->epoch, p->epochs, (double)p->loss);
    if (p->test.n > 0) printf(", %.1f %% of the held-out digits right", 100.0 * (double)p->test.accuracy);
    printf("%*s%s", terminal && !last ? 40 : 0, "", terminal && !last ? "" : "\n");
    fflush(stdout);
    return 0;
}

static moe_status write_header(void *ctx, moe_stream *stream) {
    return moe_export_c((const moe_built_model *)ctx, "digits", stream, NULL);
}

/* Prints which expert gets which digit, as routed by the integer model. */
static int show_experts(const moe_model *model, const moe_data *test) {
    int count[EXPERTS][CLASSES] = {{0}};
    void *scratch = malloc(model->scratch_size);
    for (size_t i = 0; i < test->n; i++) {
        moe_choice chosen[TOP_K];
        size_t n = 0;
        if (scratch == NULL || microdigits_answer(model, test->x + i * PIXELS, scratch) < 0 ||
            moe_infer_choices(model, 0, scratch, chosen, TOP_K, &n) != MOE_OK) {
            free(scratch);
            return fail("inference", "failed");
        }
        while (n-- > 0) {
            count[chosen[n].expert][test->labels[i]]++;
            counts[chosen[n].expert * CLASSES + test->labels[i]]++;
        }
    }
    free(scratch);
    printf("\nHeld-out digits that went to each expert (every one goes to %d):\n  expert    0    1    2    3    4    5 "
           "   6    7    8    9\n",
           TOP_K);
    for (int e = 0; e < EXPERTS; e++) {
        printf("%8d", e);
        for (int c = 0; c < CLASSES; c++) printf("%5d", count[e][c]);
        printf("\n");
    }
    return 0;
}

/* External flash, simulated by the experts' bytes in memory. */
static moe_status read_flash(void *ctx, size_t at, size_t size, void *to) {
    const moe_buffer *flash = (const moe_buffer *)ctx;
    if (at > flash->size || size > flash->size - at) return MOE_ERR_IO;
    memcpy(to, flash->data + at, size);
    return MOE_OK;
}

/* Mean bytes that a digit of data reads from external flash, with a cache of n experts in memory;
   negative: failed. */
static double flash_bytes(moe_built_model *built, const moe_data *data, size_t n, void *memory, void *scratch) {
    const moe_loader flash = {&built->experts, read_flash};
    const size_t block = built->model.mixtures[0].stride;
    int8_t input[PIXELS];
    int16_t output[CLASSES];
    moe_blocks cache;
    moe_loader cached;
    if (moe_blocks_init(&cache, &flash, block, memory, MOE_BLOCKS_MEMORY(n, block))) return -1;
    cached = moe_blocks_loader(&cache);
    for (size_t i = 0; i < data->n; i++) {
        moe_infer_levels(&built->model, data->x + i * PIXELS, input);
        if (moe_infer(&built->model, &cached, input, output, scratch, built->model.scratch_size)) return -1;
    }
    return (double)cache.bytes / (double)data->n;
}

/* Prints what a cache of experts saves if they are in external flash. */
static int show_flash(const moe_net *net, moe_model_config config, const moe_data *test) {
    moe_built_model built;
    moe_error error = {0};
    double bytes[EXPERTS] = {0};
    void *memory, *scratch;
    int failed;
    config.loader = 1;
    if (moe_model_create(&built, net, &config, &error)) return fail("experts in external flash", error.message);
    memory = malloc(MOE_BLOCKS_MEMORY(EXPERTS, built.model.mixtures[0].stride));
    scratch = malloc(built.model.scratch_size);
    failed = memory == NULL || scratch == NULL;
    for (size_t n = 1; n < EXPERTS && !failed; n *= 2)
        failed = (bytes[n] = flash_bytes(&built, test, n, memory, scratch)) < 0;
    if (!failed)
        printf("experts in external flash: %d bytes read per digit; through moe_blocks.h with 1 block %.0f, 2 %.0f, 4 "
               "%.0f\n",
               TOP_K * (int)built.model.mixtures[0].stride, bytes[1], bytes[2], bytes[4]);
    free(memory);
    free(scratch);
    moe_model_free(&built);
    return failed ? fail("experts in external flash", "inference failed") : 0;
}

static int write_report(const moe_model *model, double in_float, double in_integers) {
    static const char *const losses[] = {"training", "router"}, *const heads[] = {"value"};
    static const char *const names[] = {"held-out digits right in float (%)", "the same in integers (%)",
                                        "bytes of weights", "bytes of scratch memory",
                                        "multiplications per digit, at most"};
    double found[] = {in_float, in_integers, (double)(model->weights_size + model->experts_size),
                      (double)model->scratch_size, (double)model->multiplications};
    moe_figure f[4];
    char texts[5][24];
    const char *cells[5];
    for (int i = 0; i < 5; i++) {
        sprintf(texts[i], i < 2 ? "%.2f" : "%.0f", found[i]);
        cells[i] = texts[i];
    }
    memset(f, 0, sizeof f);
    f[0].kind = MOE_FIGURE_HEAT;
    f[0].title = "Which expert gets which digit";
    f[0].rows = EXPERTS;
    f[0].columns = CLASSES;
    f[0].values = counts;
    f[0].column_label = "digit";
    f[0].caption = "Held-out digits that went to each expert, as routed by the integer model.";
    f[0].value_label = "digits";
    f[1] = moe_figure_history(&history, 0, 2, losses);
    f[1].title = "Losses";
    f[1].value_label = "loss (nats)";
    f[1].column_label = "epoch";
    f[2] = moe_figure_history(&history, 2, 1, NULL);
    f[2].title = "Held-out accuracy";
    f[2].value_label = "%";
    f[2].column_label = "epoch";
    f[3].kind = MOE_FIGURE_TABLE;
    f[3].title = "The model";
    f[3].rows = 5;
    f[3].columns = 1;
    f[3].cells = cells;
    f[3].row_names = names;
    f[3].column_names = heads;
    return report_write("microdigits", "Digits on a microcontroller", f, 4);
}

static int run(const microdigits *digits, moe_net *net, moe_built_model *built) {
    moe_train_config training = microdigits_training((int)epochs, (uint64_t)seed);
    moe_model_config config = {.weights = weights, .calibration = &digits->calibration};
    const moe_model *model = &built->model;
    moe_evaluation result;
    moe_error error = {0};
    double accuracy;
    printf("training on %d digits%s, each in %d slightly changed variants\n", (int)digits->calibration.n,
           turned ? ", rotated by quarter turns" : "", COPIES);
    training.progress = show_progress;
    training.progress_ctx = &result;
    if (microdigits_build(net, 0, (uint64_t)seed, &error) ||
        moe_fit(net, &digits->train, &digits->test, &training, &error))
        return fail("training", error.message);
    if (moe_model_create(built, net, &config, &error)) return fail("quantizing", error.message);
    if ((accuracy = microdigits_accuracy(model, &digits->test)) < 0) return fail("inference", "failed");
    if (show_experts(model, &digits->test)) return 1;
    printf("\nheld-out accuracy: %.2f %% in float, %.2f %% in %s (of %d)\n", 100.0 * (double)result.accuracy,
           accuracy, weights == MOE_WEIGHTS_INT8 ? "int8" : "int4", (int)digits->test.n);
    printf("weights %d bytes, scratch memory %d bytes, %d multiplications per digit at most\n",
           (int)(model->weights_size + model->experts_size), (int)model->scratch_size, (int)model->multiplications);
    if (show_flash(net, config, &digits->test)) return 1;
    if (moe_net_save(net, saved, &error)) return fail(saved, error.message);
    if (moe_file_replace(header, write_header, built, &error)) return fail(header, error.message);
    printf("saved as %s; exported for firmware as %s, which begins with instructions\n", saved, header);
    if (write_report(model, 100.0 * (double)result.accuracy, accuracy)) return 1;
    printf("next         firmware with it in an emulator:    sh examples/mcu/run\n");
    printf("             other weights, or your own network: sh examples/run export '%s' --weights float --calibration "
           "'%s' --divide 16\n",
           saved, data_path);
    return finish();
}

int main(int count, char **words) {
    microdigits digits = {0};
    moe_net net = {0};
    moe_built_model built = {0};
    int failed;
    if (read_options(count, words)) return EXIT_USAGE;
    if ((failed = report_checked("microdigits")) != 0) return failed;
    if (not_writable(header) != NULL) return fail(header, not_writable(header));
    if (not_writable(saved) != NULL) return fail(saved, not_writable(saved));
    failed = !microdigits_read(&digits, data_path, (uint64_t)seed, turned) || run(&digits, &net, &built);
    moe_model_free(&built);
    moe_net_free(&net);
    microdigits_free(&digits);
    return failed;
}
