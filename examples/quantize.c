/* Packs the experts of a network for handwritten digits as 16-bit, int8 and int4 values, and
   measures size and accuracy.
     cc -std=c99 -O2 -I. examples/quantize.c -o quantize -lm && ./quantize
     (or: sh examples/run quantize) */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "extras/moe_smooth.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "report.h"

enum {
    SIDE = 8, PIXELS = SIDE * SIDE, CLASSES = 10, EXPERTS = 8, WIDTH = 64, D_FF = 32,
    MIXTURE = 2 /* module index */
};
enum {
    MAX_ROWS = 5000, COPIES = 5, CALIBRATION = 512 /* digits for measuring errors */, SEEDS = 3 /* of a check */,
    UNPACKED = -1
};

static const char help[] =
    "quantize [options]   trains on four fifths of examples/data/digits.csv, packs the experts, tests on the rest\n"
    "  --seed N     seed of all random choices: held-out rows, weights, order (1)\n"
    "  --epochs N   passes through the training digits (30)\n"
    "  --smooth     also moves outliers of activations into weights (moe_smooth.h) and measures int8 and int4 again\n"
    "  --check      seeds N to N + 2; exit status 1 if accuracy falls on average by 0.5 points or more in int8, "
    "2 in int4\n" REPORT_HELP;
static const char *data_path;
static long epochs = 30, first_seed = 1;
static int checks, smooths;
static const char *doing; /* the current step, for error messages */
static moe_real x[MAX_ROWS * PIXELS], train_x[COPIES * MAX_ROWS * PIXELS], calibration_x[CALIBRATION * WIDTH];
static int32_t digits[MAX_ROWS], train_digits[COPIES * MAX_ROWS];

/* The rows of the table. limit: of --check in percentage points, 0: none. lost: percentage points,
   summed over the seeds. */
static struct {
    int type;
    const char *name;
    double limit, lost;
} rows[] = {{UNPACKED, "not packed", 0, 0},    {MOE_TYPE_REAL, MOE_REAL_IS_DOUBLE ? "double" : "float", 0, 0},
            {MOE_TYPE_F16, "float16", 0, 0},   {MOE_TYPE_BF16, "bfloat16", 0, 0},
            {MOE_TYPE_Q8, "int8", 0.5, 0},     {MOE_TYPE_Q8_BLOCK, "int8 blocks", 0.5, 0},
            {MOE_TYPE_Q4, "int4 blocks", 2, 0},
            /* of --smooth */
            {UNPACKED, "smoothed", 0, 0},      {MOE_TYPE_Q8, "int8", 0, 0},
            {MOE_TYPE_Q8_BLOCK, "int8 blocks", 0, 0}, {MOE_TYPE_Q4, "int4 blocks", 0, 0}};
enum { ROWS = sizeof rows / sizeof *rows, SMOOTHED = 7 /* the first row of --smooth */ };

static int row_count(void) { return smooths ? (int)ROWS : (int)SMOOTHED; }

static int fail(const char *what, const char *why) {
    fprintf(stderr, "quantize: %s: %s\n", what, why);
    return 1;
}

/* Flushes the output; fails if it could not be written. */
static int finish(void) { return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0; }

static int read_options(int count, char **words) {
    while (--count > 0) {
        const char *word = *++words, *value = count > 1 ? words[1] : "";
        char *end = NULL;
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) exit(fputs(help, stdout) < 0 || finish());
        if (strcmp(word, "--check") == 0) checks = 1;
        else if (strcmp(word, "--smooth") == 0) smooths = 1;
        else if (strcmp(word, "--report") == 0 && *value != '\0') {
            report_path = value;
            count--;
            words++;
            continue;
        } else if (strcmp(word, "--seed") == 0) first_seed = strtol(value, &end, 10);
        else if (strcmp(word, "--epochs") == 0) epochs = strtol(value, &end, 10);
        else return fail(word, "no such option, or its value is missing; see -h");
        if (end == NULL) continue;
        if (*end != '\0' || end == value || epochs < 1 || epochs > 9999 || first_seed < 0 || first_seed > 999999999) {
            fprintf(stderr, "quantize: %s %s: not a value of this option; see -h\n", word, value);
            return 1;
        }
        count--;
        words++; /* the value of an option */
    }
    return 0;
}

/* Parses one line of the file: "0,0,5,...,0". Returns 1 if it is a digit. Data, network and
   training are those of examples/quickstart.c. */
static int read_row(char *line, moe_real *pixels, int32_t *digit) {
    char *end;
    for (int i = 0; i <= PIXELS; i++, line = end + (*end == ',')) {
        long value = strtol(line, &end, 10), most = i < PIXELS ? 16 : CLASSES - 1;
        if (end == line || strchr(i < PIXELS ? "," : "\r\n", *end) == NULL || value < 0 || value > most) return 0;
        if (i < PIXELS) pixels[i] = (moe_real)value / 16;
        else *digit = (int32_t)value;
    }
    return 1;
}

/* Fills x and digits in an order that depends on the seed; returns the number of rows, 0 after an
   error message. */
static size_t read_rows(moe_rng rng) {
    char line[1024];
    size_t n = 0;
    int good = 1, unread;
    FILE *f = fopen(data_path, "rb");
    if (f == NULL) {
        fail(data_path, "cannot be opened");
        return (size_t)0;
    }
    while (n < MAX_ROWS && good && fgets(line, sizeof line, f) != NULL) {
        size_t place = (size_t)moe_rng_below(&rng, n + 1); /* shuffles: a random row is moved to the end */
        memcpy(x + n * PIXELS, x + place * PIXELS, PIXELS * sizeof *x);
        digits[n++] = digits[place];
        good = read_row(line, x + place * PIXELS, &digits[place]);
    }
    unread = ferror(f);
    fclose(f);
    if (!good) {
        fprintf(stderr, "quantize: %s:%d: not 64 gray values 0..16 and a digit\n", data_path, (int)n);
        return (size_t)0;
    }
    if (unread || n < 10 || n == MAX_ROWS) {
        fail(data_path, unread ? "cannot be read" : "not between 10 and 4999 rows");
        return (size_t)0;
    }
    return n;
}

/* Training digits: each one unchanged, and shifted by one pixel right, left, down and up. */
static moe_data training_set(size_t n) {
    static const int down[COPIES] = {0, 0, 0, 1, -1}, right[COPIES] = {0, 1, -1, 0, 0};
    moe_data data = {.x = train_x, .labels = train_digits};
    for (; data.n < COPIES * n; data.n++) {
        size_t from = data.n % n, copy = data.n / n;
        for (int p = 0; p < PIXELS; p++) {
            int r = p / SIDE - down[copy], c = p % SIDE - right[copy];
            int inside = r >= 0 && r < SIDE && c >= 0 && c < SIDE;
            train_x[data.n * PIXELS + (size_t)p] = inside ? x[from * PIXELS + (size_t)(r * SIDE + c)] : 0;
        }
        train_digits[data.n] = digits[from];
    }
    return data;
}

/* Adds the modules before the MoE layer. */
static void build_front(moe_net *net) {
    moe_net_init(net, PIXELS, 0, NULL);
    moe_net_linear(net, WIDTH);
    moe_net_layer_norm(net);
}

static moe_status train(moe_net *net, const moe_data *data, uint64_t seed, moe_error *error) {
    moe_layer_config experts = {0};
    moe_train_config training = {0};
    experts.router.n_experts = EXPERTS;
    experts.router.top_k = 2;
    experts.router.loss_balance = (moe_real)0.05; /* otherwise a few experts would take everything */
    experts.d_ff = D_FF;
    build_front(net);
    moe_net_mixture(net, &experts);
    moe_net_residual(net, 2); /* adds the input of the layer norm to the output of the experts */
    moe_net_layer_norm(net);
    moe_net_linear(net, CLASSES);
    training.epochs = (int)epochs;
    training.batch = 64;
    training.seed = seed;
    training.rate = (moe_real)0.004;
    training.final_rate = (moe_real)0.05;
    training.decay = (moe_real)0.3;
    training.clip = 1;
    moe_status status = moe_net_build(net, 1, seed, error);
    return status == MOE_OK ? moe_fit(net, data, NULL, &training, error) : status;
}

/* Computes the input of the MoE layer for the first training digits, with a network of the modules
   before it that has copies of their tensors. */
static moe_status calibrate(const moe_net *net, const moe_data *data, moe_call *calibration, moe_error *error) {
    moe_call call = {.n_tokens = data->n < CALIBRATION ? data->n : CALIBRATION, .x = data->x};
    moe_net front;
    moe_net_pass pass;
    size_t bytes = 0;
    void *work = NULL;
    doing = "calibration";
    build_front(&front);
    moe_tensor trained;
    moe_status status = moe_net_build(&front, 0, 1, error);
    for (size_t i = 0; status == MOE_OK && i < front.n_tensors; i++)
        if ((status = moe_net_find(net, front.tensors[i].name, &trained)) == MOE_OK)
            memcpy(front.tensors[i].data, trained.data, trained.count * sizeof(moe_real));
    if (status == MOE_OK) status = moe_net_work_size(&front, call.n_tokens, 0, &bytes);
    if (status == MOE_OK && (work = malloc(bytes)) == NULL) status = MOE_ERR_MEMORY;
    if (status == MOE_OK) status = moe_net_forward(&front, &call, work, bytes, &pass);
    if (status == MOE_OK) memcpy(calibration_x, pass.y, call.n_tokens * WIDTH * sizeof *pass.y);
    *calibration = (moe_call){.n_tokens = call.n_tokens, .x = calibration_x};
    free(work);
    moe_net_free(&front);
    return status;
}

/* Packs the layer into new memory, which inference then reads, and measures each expert's error;
   frees the old memory. */
static moe_status pack(moe_layer *layer, int type, const moe_call *calibration, void **memory, size_t *bytes,
                       moe_quant_error *errors, moe_error *error) {
    size_t work_bytes;
    moe_status status = moe_layer_pack_size(layer, type, 0, bytes, NULL);
    if (status == MOE_OK) status = moe_layer_pack_size(layer, type, calibration->n_tokens, NULL, &work_bytes);
    if (status != MOE_OK) return status;
    void *packed = malloc(*bytes), *work = malloc(work_bytes);
    void *unused = packed;
    if (packed == NULL || work == NULL) status = MOE_ERR_MEMORY;
    else status = moe_layer_quantize(layer, type, packed, *bytes, calibration, work, work_bytes, errors, error);
    if (status == MOE_OK) {
        unused = *memory;
        *memory = packed;
    }
    free(unused);
    free(work);
    return status;
}

/* Microseconds per digit, one digit in a call: the best of 20 repetitions. */
static moe_status measure_time(const moe_net *net, const moe_data *data, double *best) {
    moe_call call = {.n_tokens = 1};
    moe_net_pass pass;
    size_t bytes;
    moe_status status = moe_net_work_size(net, 1, 0, &bytes); /* depends on the type of the packed weights */
    void *work = status == MOE_OK ? malloc(bytes) : NULL;
    if (work == NULL) return MOE_ERR_MEMORY;
    *best = 1e30;
    for (int i = 0; i < 20 && status == MOE_OK; i++) {
        clock_t start = clock();
        for (size_t at = 0; at < data->n && status == MOE_OK; at++) {
            call.x = data->x + at * PIXELS;
            status = moe_net_forward(net, &call, work, bytes, &pass);
        }
        double took = 1e6 * (double)(clock() - start) / CLOCKS_PER_SEC / (double)data->n;
        if (took < *best) *best = took;
    }
    free(work);
    return status;
}

enum { BYTES, RIGHT, LOST, MEAN_ERROR, LARGEST_ERROR, MICROSECONDS, MEASURED };
static double measured[ROWS][MEASURED]; /* of the first seed, for the report */

static void show_errors(const moe_quant_error *errors, double *row) {
    double least = 1e30, largest = 0;
    double sum = 0;
    int unvisited = 0;
    for (int e = 0; e < EXPERTS; e++) {
        double is = 100.0 * (double)errors[e].output;
        least = is < least ? is : least;
        largest = is > largest ? is : largest;
        sum += is;
        unvisited += errors[e].rows == 0;
    }
    printf("%10.4f%10.4f%10.4f%11d", least, sum / EXPERTS, largest, unvisited);
    row[MEAN_ERROR] = sum / EXPERTS;
    row[LARGEST_ERROR] = largest;
}

/* Smooths the network on the first training digits and recomputes the inputs of its MoE layer. */
static moe_status smooth(moe_net *net, const moe_data *data, moe_call *calibration, moe_error *error) {
    moe_data first = {.n = calibration->n_tokens, .x = data->x};
    moe_smooth_result found;
    net->modules[MIXTURE].layer.is_packed = 0;
    moe_status status = moe_smooth(net, &first, NULL, &found, error);
    if (status == MOE_OK) status = calibrate(net, data, calibration, error);
    if (status == MOE_OK)
        printf("smoothed: %d channels of %d modules, by 2^%d to 2^%d\n", (int)found.channels, (int)found.modules,
               found.least, found.most);
    return status;
}

/* Packs the network in every type and prints the table. */
static moe_status show_table(moe_net *net, const moe_data *data, const moe_data *test, moe_call *calibration,
                             moe_error *error) {
    moe_layer *layer = &net->modules[MIXTURE].layer;
    moe_quant_error errors[EXPERTS];
    moe_evaluation found = {0};
    moe_status status = MOE_OK;
    void *memory = NULL;
    double time = 0, before = 0;
    printf("                           points   error of an expert in %%        experts    us per\n");
    printf("weights      bytes  right %%   lost     least      mean   largest  unvisited     digit\n");
    for (int r = 0; r < row_count() && status == MOE_OK; r++) {
        size_t bytes = (size_t)(EXPERTS * 3 * D_FF * WIDTH) * sizeof(moe_real); /* gate, up and down of all experts */
        if (r == SMOOTHED) status = smooth(net, data, calibration, error);
        doing = rows[r].name;
        if (status == MOE_OK && rows[r].type != UNPACKED)
            status = pack(layer, rows[r].type, calibration, &memory, &bytes, errors, error);
        if (status == MOE_OK) status = moe_evaluate(net, test, MOE_CRITERION_CROSS_ENTROPY, &found, error);
        if (status == MOE_OK) status = measure_time(net, test, &time);
        if (status != MOE_OK) break;
        double right = 100.0 * (double)found.accuracy;
        if (r == 0) before = right;
        rows[r].lost += before - right;
        printf("%-11s%7d%9.2f%7.2f", rows[r].name, (int)bytes, right, before - right);
        if (rows[r].type == UNPACKED) printf("%10s%10s%10s%11s", "-", "-", "-", "-");
        else show_errors(errors, measured[r]);
        printf("%10.2f\n", time);
        measured[r][BYTES] = (double)bytes;
        measured[r][RIGHT] = right;
        measured[r][LOST] = before - right;
        measured[r][MICROSECONDS] = time;
    }
    printf("\n");
    free(memory);
    return status;
}

/* Reads, trains and packs for one seed. */
static int run(uint64_t seed) {
    size_t n = read_rows((moe_rng){seed});
    moe_net net = {0};
    moe_call calibration;
    moe_error error = {0};
    if (n == 0) return 1;
    moe_data data = training_set(n - n / 5);
    moe_data test = {.n = n / 5, .x = x + (n - n / 5) * PIXELS, .labels = digits + (n - n / 5)};
    doing = "training";
    moe_status status = train(&net, &data, seed, &error);
    if (status == MOE_OK) status = calibrate(&net, &data, &calibration, &error);
    if (status == MOE_OK) {
        printf("seed %d: %d experts, %d held-out digits, errors on %d training digits, kernels %s\n", (int)seed,
               EXPERTS, (int)test.n, (int)calibration.n_tokens, net.kernels->name);
        status = show_table(&net, &data, &test, &calibration, &error);
    }
    moe_net_free(&net);
    return status == MOE_OK ? 0 : fail(doing, error.message[0] != '\0' ? error.message : moe_status_text(status));
}

/* Compares the means over the seeds with the limits. */
static int judge(void) {
    int failed = 0;
    printf("points lost, mean of %d seeds:\n", SEEDS);
    for (int r = 0; r < SMOOTHED; r++) {
        double lost = rows[r].lost / SEEDS;
        int good = rows[r].limit <= 0 || lost < rows[r].limit;
        if (rows[r].limit > 0)
            printf("%-11s%7.2f, less than %.1f: %s\n", rows[r].name, lost, rows[r].limit, good ? "yes" : "NO");
        failed += !good;
    }
    return failed > 0 ? fail("check", "too much accuracy is lost") : 0;
}

/* The table, and two of its columns as bars. */
static int write_report(void) {
    static const char *const heads[] = {"bytes",        "right %",         "points lost",
                                        "mean error %", "largest error %", "us per digit"};
    const char *names[ROWS];
    char smoothed[ROWS][32];
    moe_figure f[3];
    memset(f, 0, sizeof f);
    for (int r = 0; r < row_count(); r++) {
        snprintf(smoothed[r], sizeof smoothed[r], "%s, smoothed", rows[r].name);
        names[r] = r > SMOOTHED ? smoothed[r] : rows[r].name;
        if (rows[r].type == UNPACKED) measured[r][MEAN_ERROR] = measured[r][LARGEST_ERROR] = HUGE_VAL; /* none */
    }
    for (int i = 0; i < 3; i++) {
        f[i].row_names = names;
        f[i].rows = (size_t)row_count();
        f[i].columns = 1;
        f[i].stride = MEASURED;
        f[i].kind = MOE_FIGURE_BARS;
    }
    f[0].title = "Memory of the experts";
    f[0].values = measured[0];
    f[0].value_label = "bytes";
    f[1].title = "Error of the experts";
    f[1].values = &measured[0][MEAN_ERROR];
    f[1].value_label = "% of their output";
    f[1].caption = "Mean over the experts of the error of their outputs on training digits.";
    f[2].kind = MOE_FIGURE_TABLE;
    f[2].columns = MEASURED;
    f[2].values = measured[0];
    f[2].column_names = heads;
    f[2].row_label = "weights";
    f[2].title = "Summary";
    f[2].caption = "On held-out digits.";
    return report_write("quantize", "Smaller weights for experts", f, 3);
}

int main(int count, char **words) {
    int wrong;
    if (read_options(count, words)) return EXIT_USAGE;
    if (data_path == NULL) data_path = example_file("data/digits.csv");
    if ((wrong = report_checked("quantize")) != 0) return wrong;
    for (int i = 0; i < (checks ? SEEDS : 1); i++)
        if (run((uint64_t)(first_seed + i)) || (i == 0 && write_report())) return 1;
    return checks && judge() ? 1 : finish();
}
