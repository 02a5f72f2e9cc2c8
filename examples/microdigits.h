/* The digits for microcontrollers: data, networks and training shared by examples/microdigits.c and
   tests/port/devices/rivals.c. Include it after moe.h.

   Training digits are used in COPIES variants: unchanged, and slightly rotated, slanted, shifted
   and stretched, which gains 2 points of accuracy. The task "turned" has every digit in each of
   four orientations, as from a device that may be held any way round. */
#ifndef MICRODIGITS_H
#define MICRODIGITS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIDE = 8, PIXELS = SIDE * SIDE, CLASSES = 10, MAX_ROWS = 5000, COPIES = 40, TURNS = 4 };
enum { EXPERTS = 8, TOP_K = 2, WIDTH = 20 /* of an expert's output */ };

typedef struct microdigits {
    moe_data train, test, calibration; /* calibration: the unchanged training digits; all point into memory */
    moe_real *memory;
    int32_t *labels;
} microdigits;

static inline void microdigits_free(microdigits *d) {
    free(d->memory);
    free(d->labels);
}

/* Parses one line of the file: "0,0,5,...,0". Returns an error message, or NULL. */
static inline const char *microdigits_row(char *line, moe_real *pixels, int32_t *digit) {
    char *end;
    for (int i = 0; i <= PIXELS; i++, line = end + (*end == ',')) {
        long value = strtol(line, &end, 10);
        if (end == line || strchr(i < PIXELS ? "," : "\r\n", *end) == NULL)
            return "not 64 gray values and a digit, separated by commas";
        if (value < 0 || value > (i < PIXELS ? 16 : CLASSES - 1))
            return "a gray value is not in 0..16, or the digit not in 0..9";
        if (i < PIXELS) pixels[i] = (moe_real)value / 16;
        else *digit = (int32_t)value;
    }
    return NULL;
}

/* Fills x and labels in an order that depends on the seed. Returns the number of rows, 0 after an
   error message. */
static inline size_t microdigits_rows(const char *path, moe_real *x, int32_t *labels, moe_rng rng) {
    char line[1024];
    const char *wrong = NULL;
    size_t n = 0;
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        fprintf(stderr, "microdigits: %s: cannot be opened; digits.csv is in examples/data\n", path);
        return (size_t)0;
    }
    while (wrong == NULL && fgets(line, sizeof line, f) != NULL) {
        if (n == MAX_ROWS) {
            wrong = "there are more than 5000 rows";
            break;
        }
        size_t place = (size_t)moe_rng_below(&rng, n + 1); /* shuffles: a random row is moved to the end */
        memcpy(x + n * PIXELS, x + place * PIXELS, PIXELS * sizeof *x);
        labels[n++] = labels[place];
        const int mark = n == 1 && strncmp(line, "\xef\xbb\xbf", 3) == 0; /* a byte order mark */
        wrong = microdigits_row(line + 3 * mark, x + place * PIXELS, &labels[place]);
    }
    if (wrong == NULL && ferror(f)) wrong = "cannot be read";
    if (wrong == NULL && n < 10) wrong = "the file ends here, at least 10 rows are needed";
    fclose(f);
    if (wrong != NULL) fprintf(stderr, "microdigits: %s:%d: %s\n", path, n > 0 ? (int)n : 1, wrong);
    return wrong == NULL ? n : 0;
}

static inline double microdigits_pixel(const moe_real *image, int row, int column) {
    return row >= 0 && row < SIDE && column >= 0 && column < SIDE ? (double)image[row * SIDE + column] : 0;
}

/* to = from, rotated and slanted by up to 0.1, shifted by up to 0.7 pixels, stretched by up to a
   tenth; values between pixels are interpolated. */
static inline void microdigits_warp(const moe_real *from, moe_real *to, moe_rng *rng) {
    double u[5], middle = (SIDE - 1) / 2.0, cosine, sine;
    for (int i = 0; i < 5; i++) u[i] = 2 * ((double)moe_rng_below(rng, 1u << 24) / (1u << 24)) - 1;
    cosine = cos(0.1 * u[0]) / (1 + 0.1 * u[1]);
    sine = sin(0.1 * u[0]) / (1 + 0.1 * u[1]);
    for (int p = 0; p < PIXELS; p++) {
        double down = p / SIDE - middle - 0.7 * u[2], right = p % SIDE - middle - 0.7 * u[3] + 0.1 * u[4] * down;
        double row = cosine * down - sine * right + middle, column = cosine * right + sine * down + middle;
        int r = (int)floor(row), c = (int)floor(column);
        double below = row - r, beside = column - c;
        to[p] = (moe_real)((1 - below) * ((1 - beside) * microdigits_pixel(from, r, c) +
                                          beside * microdigits_pixel(from, r, c + 1)) +
                           below * ((1 - beside) * microdigits_pixel(from, r + 1, c) +
                                    beside * microdigits_pixel(from, r + 1, c + 1)));
    }
}

/* Rotates a digit by `quarters` quarter turns, in place. */
static inline void microdigits_turn(moe_real *image, size_t quarters) {
    moe_real old[PIXELS];
    for (quarters %= TURNS; quarters > 0; quarters--) {
        memcpy(old, image, sizeof old);
        for (int p = 0; p < PIXELS; p++) image[p] = old[p % SIDE * SIDE + SIDE - 1 - p / SIDE];
    }
}

/* Splits the file's digits by the seed: four fifths for training, the others held out. turned: 1
   for the task of that name. Returns 0 after an error message. d must be freed either way. */
static inline int microdigits_read(microdigits *d, const char *path, uint64_t seed, int turned) {
    size_t room = (size_t)MAX_ROWS * (1 + COPIES + TURNS), n, n_train, at;
    moe_rng rng = {seed};
    moe_real *x = d->memory = (moe_real *)malloc(room * PIXELS * sizeof *x), *copy;
    int32_t *labels = d->labels = (int32_t *)malloc(room * sizeof *labels);
    if (x == NULL || labels == NULL) {
        fprintf(stderr, "out of memory\n");
        return 0;
    }
    if ((n = microdigits_rows(path, x, labels, rng)) == 0) return 0;
    n_train = n - n / 5;
    for (at = 0; at < (COPIES + TURNS) * n; at++) {
        /* after the file's rows: variants for training, then held-out digits in all orientations */
        size_t trained = at < COPIES * n_train, held_out = at - COPIES * n_train;
        size_t from = trained ? at % n_train : n_train + held_out % (n - n_train);
        if (!trained && held_out / (n - n_train) >= (turned ? TURNS : 1)) break;
        copy = x + (n + at) * PIXELS;
        labels[n + at] = labels[from];
        if (trained && at >= n_train) microdigits_warp(x + from * PIXELS, copy, &rng);
        else memcpy(copy, x + from * PIXELS, PIXELS * sizeof *x);
        if (turned) microdigits_turn(copy, trained ? at / n_train + at : held_out / (n - n_train));
    }
    d->train = (moe_data){.n = COPIES * n_train, .x = x + n * PIXELS, .labels = labels + n};
    d->calibration = (moe_data){.n = n_train, .x = d->train.x, .labels = d->train.labels};
    d->test =
        (moe_data){.n = at - d->train.n, .x = d->train.x + d->train.n * PIXELS, .labels = d->train.labels + d->train.n};
    return 1;
}

/* An MoE layer of linear experts, relu, and a linear layer. For comparisons: hidden > 0: a dense
   network with that many hidden units; hidden < 0: a linear classifier. */
static inline moe_status microdigits_build(moe_net *net, int hidden, uint64_t seed, moe_error *error) {
    moe_layer_config experts = {0};
    experts.router.n_experts = EXPERTS;
    experts.router.top_k = TOP_K;
    experts.router.router_bias = 1;
    experts.router.loss_balance = (moe_real)0.05; /* otherwise a few experts would take everything */
    experts.expert = MOE_EXPERT_LINEAR;
    experts.d_out = WIDTH;
    moe_net_init(net, PIXELS, 0, NULL);
    if (hidden == 0) moe_net_mixture(net, &experts);
    if (hidden > 0) moe_net_linear(net, hidden);
    if (hidden >= 0) moe_net_activation(net, MOE_ACT_RELU);
    moe_net_linear(net, CLASSES);
    return moe_net_build(net, 1, seed, error); /* reports the first failure of the calls above */
}

/* The training settings of all networks. */
static inline moe_train_config microdigits_training(int epochs, uint64_t seed) {
    moe_train_config training = {0};
    training.epochs = epochs;
    training.batch = 64;
    training.seed = seed;
    training.rate = (moe_real)0.01;
    training.final_rate = (moe_real)0.05;
    training.decay = (moe_real)0.02;
    training.clip = 1;
    return training;
}

/* The class that an integer model predicts for a digit, or -1 if it fails. */
static inline int microdigits_answer(const moe_model *model, const moe_real *pixels, void *scratch) {
    int8_t input[PIXELS];
    int16_t output[CLASSES];
    int best = 0;
    moe_infer_levels(model, pixels, input);
    if (moe_infer(model, NULL, input, output, scratch, model->scratch_size) != MOE_OK) return -1;
    for (int c = 1; c < CLASSES; c++) best = output[c] > output[best] ? c : best;
    return best;
}

/* Accuracy of the model in percent; negative: failed. */
static inline double microdigits_accuracy(const moe_model *model, const moe_data *data) {
    void *scratch = malloc(model->scratch_size);
    double right = 0;
    for (size_t i = 0; i < data->n; i++) {
        int answer = scratch == NULL ? -1 : microdigits_answer(model, data->x + i * PIXELS, scratch);
        right += answer < 0 ? -1e9 : answer == data->labels[i];
    }
    free(scratch);
    return 100 * right / (double)data->n;
}

#endif /* MICRODIGITS_H */
