/* The mixture of examples/microdigits.c against a linear classifier and dense networks on the same
   digits with the same training: accuracy in float and in int8 over several seeds, and the int8
   models as headers. tests/bench/rivals.sh counts their instructions on devices in emulators.
     cc -std=c99 -O2 -I. tests/port/devices/rivals.c -o rivals -lm
     ./rivals CSV size FILE HIDDEN                a header of a network that has learned nothing, to
                                                  measure what it takes
     ./rivals CSV table FOLDER SEEDS HIDDEN...    trains; headers FOLDER/net_HIDDEN.h
   HIDDEN: hidden units of a dense network; 0: the mixture, which must come first; -1: the linear
   classifier. */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "examples/extras/moe_export.h"

#include "examples/microdigits.h"
#include "examples/statistics.h"

enum { EPOCHS = 40, MOST_SEEDS = 100 };

typedef struct result {
    double floats[MOST_SEEDS], integers[MOST_SEEDS]; /* percent right */
    double products, bytes;
} result;

static int fail(const char *what, const char *why) {
    fprintf(stderr, "rivals: %s: %s\n", what, why);
    return 1;
}

static moe_status write_model(void *built, moe_stream *stream) {
    return moe_export_c((const moe_built_model *)built, "digits", stream, NULL);
}

/* header NULL: none. epochs 0: no training. */
static int net_of(const microdigits *d, int hidden, int epochs, int seed, const char *header, result *r) {
    moe_train_config training = microdigits_training(epochs, (uint64_t)seed);
    moe_model_config config = {.weights = MOE_WEIGHTS_INT8, .calibration = &d->calibration};
    moe_net net = {0};
    moe_built_model built = {0};
    moe_evaluation floats = {0};
    moe_error error = {0};
    int failed = microdigits_build(&net, hidden, (uint64_t)seed, &error) ||
                 (epochs > 0 && moe_fit(&net, &d->train, NULL, &training, &error)) ||
                 moe_model_create(&built, &net, &config, &error) ||
                 moe_evaluate(&net, &d->test, MOE_CRITERION_CROSS_ENTROPY, &floats, &error) ||
                 (header != NULL && moe_file_replace(header, write_model, &built, &error));
    if (!failed) {
        r->floats[seed - 1] = 100 * (double)floats.accuracy;
        r->integers[seed - 1] = microdigits_accuracy(&built.model, &d->test);
        r->products = (double)built.model.multiplications;
        r->bytes = (double)(built.model.weights_size + built.model.experts_size);
        if (r->integers[seed - 1] < 0) failed = fail("inference", "failed");
    } else fail("a net", error.message);
    moe_model_free(&built);
    moe_net_free(&net);
    return failed;
}

static double worst(const double *x, int n) {
    double least = x[0];
    for (int i = 1; i < n; i++) least = x[i] < least ? x[i] : least;
    return least;
}

/* One line for tests/bench/rivals.sh: task, HIDDEN, products, bytes, mean in float and in int8,
   worst in int8, what it has more than the mixture in int8 and the 95 % interval of that. */
static void show(const char *task, int hidden, int seeds, const result *r, const result *mixture) {
    statistics_result difference = statistics_paired((size_t)seeds, r->integers, mixture->integers);
    printf("%s %d %.0f %.0f %.2f %.2f %.2f %+.2f %+.2f %+.2f\n", task, hidden, r->products, r->bytes,
           statistics_paired((size_t)seeds, r->floats, NULL).mean,
           statistics_paired((size_t)seeds, r->integers, NULL).mean, worst(r->integers, seeds), difference.mean,
           difference.low, difference.high);
    fflush(stdout);
}

static int table(const char *csv, const char *folder, int seeds, int nets, char **hidden) {
    static result results[40];
    char header[1000];
    for (int turned = 0; turned <= 1; turned++) {
        for (int seed = 1; seed <= seeds; seed++) {
            microdigits digits = {0};
            int failed = !microdigits_read(&digits, csv, (uint64_t)seed, turned);
            for (int i = 0; i < nets && !failed; i++) {
                snprintf(header, sizeof header, "%s/net_%s.h", folder, hidden[i]);
                failed =
                    net_of(&digits, atoi(hidden[i]), EPOCHS, seed, seed == 1 && !turned ? header : NULL, &results[i]);
            }
            microdigits_free(&digits);
            if (failed) return 1;
        }
        for (int i = 0; i < nets; i++)
            show(turned ? "rotated" : "upright", atoi(hidden[i]), seeds, &results[i], &results[0]);
    }
    return 0;
}

static int size(const char *csv, const char *header, int hidden) {
    static result ignored;
    microdigits digits = {0};
    int failed = !microdigits_read(&digits, csv, 1, 0) || net_of(&digits, hidden, 0, 1, header, &ignored);
    microdigits_free(&digits);
    return failed;
}

int main(int count, char **words) {
    int seeds = count > 5 ? atoi(words[4]) : 0;
    if (count == 5 && strcmp(words[2], "size") == 0) return size(words[1], words[3], atoi(words[4]));
    if (count > 5 && count < 45 && strcmp(words[2], "table") == 0 && seeds > 1 && seeds <= MOST_SEEDS &&
        strcmp(words[5], "0") == 0)
        return table(words[1], words[3], seeds, count - 5, words + 5);
    return fail("arguments", "CSV size FILE HIDDEN, or CSV table FOLDER SEEDS 0 HIDDEN...");
}
