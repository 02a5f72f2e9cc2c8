/* Trains an MoE network to classify handwritten digits, shows which expert gets which digit, saves,
   loads and times it.
     cc -std=c99 -O2 -I. examples/quickstart.c -o quickstart -lm && ./quickstart
     (or: sh examples/run) */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif
#include "report.h"

enum {
    SIDE = 8, PIXELS = SIDE * SIDE, CLASSES = 10, EXPERTS = 8, MIXTURE = 2 /* module index */, MAX_ROWS = 5000,
    COPIES = 5
};

static const char help[] =
    "quickstart [options] [FILE]   trains on four fifths of the digits in FILE and tests on the rest\n"
    "FILE: a row per digit, 64 gray values 0..16 and the digit, separated by commas (examples/data/digits.csv)\n"
    "  -o FILE         file of the trained network (digits.safetensors)\n"
    "  --seed N        seed of all random choices: held-out rows, weights, order (1)\n"
    "  --epochs N      passes through the training digits (30)\n"
    "  --kernels NAME  instruction set: auto, c, avx2, ... (auto)\n" REPORT_HELP;
static const char *data_path, *output = "digits.safetensors";
static long epochs = 30, seed = 1;
static int kernels;
static double metrics_memory[1024];
static moe_real x[MAX_ROWS * PIXELS], train_x[COPIES * MAX_ROWS * PIXELS], y[MAX_ROWS * CLASSES],
    loaded_y[MAX_ROWS * CLASSES];
static int32_t digits[MAX_ROWS], train_digits[COPIES * MAX_ROWS];

static int fail(const char *what, const char *why) {
    fprintf(stderr, is_named(what, why) ? "quickstart: %.0s%s\n" : "quickstart: %s: %s\n", what, why);
    return 1;
}

/* Flushes the output; fails if it could not be written. */
static int finish(void) { return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0; }

static int read_options(int count, char **words) {
    while (--count > 0) {
        const char *word = *++words, *value = count > 1 ? words[1] : "";
        int option = word[0] == '-';
        char *end = NULL;
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) exit(fputs(help, stdout) < 0 || finish());
        if (!option && data_path != NULL) return fail(word, "a second file of digits; one at a time");
        if (!option) data_path = word;
        else if (strcmp(word, "-o") == 0 && *value != '\0') output = value;
        else if (strcmp(word, "--report") == 0 && *value != '\0') report_path = value;
        else if (strcmp(word, "--seed") == 0) seed = strtol(value, &end, 10);
        else if (strcmp(word, "--epochs") == 0) epochs = strtol(value, &end, 10);
        else if (strcmp(word, "--kernels") != 0)
            return fail(word, "no such option, or its value is missing; see -h");
        else
            for (kernels = 0; moe_kernels_name(kernels) != NULL && strcmp(moe_kernels_name(kernels), value) != 0;)
                kernels++;
        if ((end != NULL && (*end != '\0' || end == value)) || epochs < 1 || epochs > 9999 || seed < 0 ||
            seed > 999999999 || !moe_kernels_name(kernels)) {
            fprintf(stderr, "quickstart: %s %s: not a value of this option; see -h\n", word, value);
            return 1;
        }
        count -= option;
        words += option; /* the value of an option */
    }
    if (data_path == NULL) data_path = example_file("data/digits.csv");
    const char *const outputs[] = {output, report_path};
    const char *twice = written_twice(outputs, 2, &data_path, 1);
    return twice != NULL ? fail(twice, WRITTEN_TWICE) : 0;
}

/* Parses one line of the file: "0,0,5,...,0". Returns an error message, or NULL. */
static const char *read_row(char *line, moe_real *pixels, int32_t *digit) {
    static char why[100];
    char *end;
    for (int i = 0; i <= PIXELS; i++, line = end + (*end == ',')) {
        long value = strtol(line, &end, 10), most = i < PIXELS ? 16 : CLASSES - 1;
        int whole = end != line && strchr(",\r\n", *end) != NULL;
        if (!whole) {
            sprintf(why, "column %d is not an integer", i + 1);
            return why;
        }
        if (value < 0 || value > most) {
            sprintf(why, "column %d is %ld, not in 0..%ld", i + 1, value, most);
            return why;
        }
        if ((*end == ',') != (i < PIXELS)) return i < PIXELS ? "fewer than 65 columns" : "more than 65 columns";
        if (i < PIXELS) pixels[i] = (moe_real)value / 16;
        else *digit = (int32_t)value;
    }
    return NULL;
}

/* Fills x and digits in an order that depends on the seed; returns the number of rows, 0 after an
   error message. */
static size_t read_rows(const char *path, FILE *f, moe_rng rng) {
    char line[1024];
    const char *wrong = NULL;
    size_t n = 0;
    while (wrong == NULL && fgets(line, sizeof line, f) != NULL) {
        if (n == MAX_ROWS) {
            wrong = "there are more than 5000 rows";
            break;
        }
        size_t place = (size_t)moe_rng_below(&rng, n + 1); /* shuffles: a random row is moved to the end */
        memcpy(x + n * PIXELS, x + place * PIXELS, PIXELS * sizeof *x);
        digits[n++] = digits[place];
        const int mark = n == 1 && strncmp(line, "\xef\xbb\xbf", 3) == 0; /* a byte order mark */
        wrong = read_row(line + 3 * mark, x + place * PIXELS, &digits[place]);
    }
    if (wrong == NULL && ferror(f)) wrong = "cannot be read";
    if (wrong == NULL && n < 10) wrong = "the file ends here, at least 10 rows are needed";
    if (wrong != NULL) fprintf(stderr, "quickstart: %s:%d: %s\n", path, n > 0 ? (int)n : 1, wrong);
    return wrong == NULL ? n : 0;
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

static moe_status build(moe_net *net, moe_error *error) {
    moe_layer_config experts = {0};
    experts.router.n_experts = EXPERTS;
    experts.router.top_k = 2;
    experts.router.loss_balance = (moe_real)0.05; /* otherwise a few experts would take everything */
    experts.d_ff = 32;
    moe_net_init(net, PIXELS, kernels, NULL);
    moe_net_linear(net, 64);
    moe_net_layer_norm(net);
    moe_net_mixture(net, &experts);
    moe_net_residual(net, 2); /* adds the input of the layer norm to the output of the experts */
    moe_net_layer_norm(net);
    moe_net_linear(net, CLASSES);
    return moe_net_build(net, 1, (uint64_t)seed, error); /* reports the first failure of the calls above */
}

/* Series that are recorded during training for the report. */
enum { LOSS, ROUTER_LOSS, HELD_OUT_LOSS, RIGHT, H_B, H_E, CHANGED, SERIES };
typedef struct training_record {
    const moe_net *net;
    const moe_data *test;
    moe_evaluation result;         /* of the last epoch */
    moe_history steps;             /* LOSS and ROUTER_LOSS over steps */
    moe_history epochs;            /* all series over epochs */
    int32_t first[2][MAX_ROWS];    /* first choices of held-out digits, in this and the previous epoch */
} training_record;
static training_record record;

static moe_status predict(const moe_net *net, const moe_data *data, size_t batch, moe_real *out, moe_metrics *metrics,
                          int32_t *first);

/* Records entropy, balance and fluctuation of the router after an epoch; 1: failed. */
static int watch_router(training_record *r, const moe_progress *p) {
    moe_metrics metrics;
    moe_report report;
    double v[SERIES] = {
        (double)p->loss, (double)p->router_loss, (double)p->test.loss, 100 * (double)p->test.accuracy, 0, 0, NAN};
    int32_t *now = r->first[p->epoch % 2], *before = r->first[(p->epoch + 1) % 2];
    if (moe_metrics_init(&metrics, EXPERTS, CLASSES, metrics_memory, sizeof metrics_memory) ||
        predict(r->net, r->test, r->test->n, NULL, &metrics, now) || moe_metrics_report(&metrics, &report))
        return 1;
    v[H_B] = report.gate_entropy;
    v[H_E] = report.usage_entropy;
    if (p->epoch > 1 && moe_fluctuation(r->test->n, before, now, NULL, &v[CHANGED])) return 1;
    v[CHANGED] *= 100;
    return moe_history_add(&r->epochs, p->epoch, v, SERIES) != MOE_OK;
}

static int show_progress(void *ctx, const moe_progress *p) {
    int terminal = isatty(1), last = p->epoch == p->epochs && p->epoch_ended;
    training_record *r = (training_record *)ctx;
    double losses[] = {(double)p->loss, (double)p->router_loss};
    r->result = p->test;
    if (report_path != NULL &&
        (moe_history_add(&r->steps, (double)p->total_step, losses, 2) || (p->epoch_ended && watch_router(r, p))))
        return 1;
    if (!last && !(terminal ? p->step % 16 == 0 : p->epoch_ended && p->epoch % 5 == 0)) return 0;
    printf("%sepoch %d of %d: loss %.4f, router loss %.4f", terminal ? "\r" : "", p->epoch, p->epochs, (double)p->loss,
           (double)p->router_loss);
    if (p->test.n > 0) printf(", %.1f %% of the held-out digits right", 100.0 * (double)p->test.accuracy);
    printf("%*s%s", terminal && !last ? 40 : 0, "", terminal && !last ? "" : "\n");
    fflush(stdout);
    return 0;
}

/* Runs data through the network in calls of `batch` digits. Outputs go to out, routings to metrics
   and first choices to first, unless these are NULL. */
static moe_status predict(const moe_net *net, const moe_data *data, size_t batch, moe_real *out, moe_metrics *metrics,
                          int32_t *first) {
    moe_call call = {0};
    moe_net_pass pass;
    size_t bytes;
    moe_status status = moe_net_work_size(net, batch, 0, &bytes);
    void *work = status == MOE_OK ? malloc(bytes) : NULL; /* the only memory that inference needs */
    if (work == NULL) return MOE_ERR_MEMORY;
    for (size_t at = 0; at < data->n && status == MOE_OK; at += call.n_tokens) {
        call.n_tokens = data->n - at < batch ? data->n - at : batch;
        call.x = data->x + at * PIXELS;
        if ((status = moe_net_forward(net, &call, work, bytes, &pass)) != MOE_OK) break;
        if (out != NULL) memcpy(out + at * CLASSES, pass.y, call.n_tokens * CLASSES * sizeof *out);
        if (metrics != NULL)
            status = moe_metrics_add(metrics, moe_net_routing(net, &pass, MIXTURE), NULL, data->labels + at);
        if (first != NULL && status == MOE_OK)
            status = moe_routing_choices(moe_net_routing(net, &pass, MIXTURE), 1, 1, first + at);
    }
    free(work);
    return status;
}

static void show_experts(const moe_report *r) {
    printf("\nHeld-out digits that went to each expert (every one goes to 2):\n");
    printf("  expert    0    1    2    3    4    5    6    7    8    9    all  share\n");
    for (int e = 0; e < EXPERTS; e++) {
        printf("%8d", e);
        for (int c = 0; c < CLASSES; c++) printf("%5.0f", r->classes[e * CLASSES + c]);
        printf("  %5.0f %5.1f%%\n", r->load[e], 100.0 * r->load[e] / r->n_assignments);
    }
    printf("H_b    = %.3f nats: how undecided the router is about a digit (0 .. 2.079)\n", r->gate_entropy);
    printf("H_e    = %.3f nats: how evenly the experts are used (0 .. 2.079)\n", r->usage_entropy);
    printf("I(E;Y) = %.3f nats: information of the expert about the digit (by chance: %.3f)\n", r->information,
           r->information_chance);
}

/* Microseconds per digit: the best of 20 repetitions. */
static double microseconds(const moe_net *net, const moe_data *data, size_t batch) {
    double best = 1e30;
    for (int i = 0; i < 20; i++) {
        clock_t start = clock(), end = predict(net, data, batch, NULL, NULL, NULL) == MOE_OK ? clock() : start;
        double took = 1e6 * (double)(end - start) / CLOCKS_PER_SEC / (double)data->n;
        if (took < best) best = took;
    }
    return best;
}

/* Writes the figures of --report. */
static int write_report(const moe_report *r, size_t all, size_t used) {
    static const char *const losses[] = {"training", "router"};
    static const char *const entropies[] = {"H_b, per digit", "H_e, over all digits"};
    static const char *const numbers[] = {"held-out digits right (%)",
                                          "H_b: how undecided the router is (nats)",
                                          "H_e: how evenly experts are used (nats)",
                                          "I(E;Y): information about the digit (nats)",
                                          "I(E;Y) by chance (nats)",
                                          "parameters",
                                          "parameters that a digit uses"};
    static const char *const value[] = {"value"};
    double found[] = {100.0 * (double)record.result.accuracy,
                      r->gate_entropy,
                      r->usage_entropy,
                      r->information,
                      r->information_chance,
                      (double)all,
                      (double)used};
    char texts[7][24];
    const char *cells[7];
    moe_figure f[7] = {moe_figure_classes(r),
                       moe_figure_load(r),
                       moe_figure_history(&record.steps, LOSS, 2, losses),
                       moe_figure_history(&record.epochs, RIGHT, 1, NULL),
                       moe_figure_history(&record.epochs, H_B, 2, entropies),
                       moe_figure_history(&record.epochs, CHANGED, 1, NULL),
                       {0}};
    for (int i = 0; i < 7; i++) {
        sprintf(texts[i], i > 4 ? "%.0f" : "%.3f", found[i]);
        cells[i] = texts[i];
    }
    f[0].title = "Which expert gets which digit";
    f[0].caption = "Held-out digits that went to each expert; every one goes to 2.";
    f[0].column_label = "digit";
    f[0].value_label = "digits";
    f[1].caption = "How many held-out digits each expert reads.";
    f[1].value_label = "digits";
    f[2].title = "Losses";
    f[2].caption = "Mean of the epoch so far.";
    f[2].value_label = "loss (nats)";
    f[3].title = "Held-out accuracy";
    f[3].value_label = "%";
    f[3].column_label = "epoch";
    f[4].title = "Entropies of the router";
    f[4].value_label = "nats";
    f[4].column_label = "epoch";
    f[4].reference = 2.0794415416798357;
    f[4].reference_name = "ln 8, the maximum";
    f[4].caption = "Low H_b: the router is decided about each digit. High H_e: all experts are used.";
    f[5].title = "Digits whose expert changed";
    f[5].value_label = "% since the previous epoch";
    f[5].column_label = "epoch";
    f[6].kind = MOE_FIGURE_TABLE;
    f[6].title = "Summary";
    f[6].rows = 7;
    f[6].columns = 1;
    f[6].cells = cells;
    f[6].row_names = numbers;
    f[6].column_names = value;
    return report_write("quickstart", "Eight experts read digits", f, 7);
}

int main(int count, char **words) {
    moe_train_config training = {0};
    moe_net net = {0}, loaded = {0};
    moe_metrics metrics;
    moe_report report;
    moe_error error = {0};
    size_t n, used, all;
    int wrong;
    FILE *f;
    if (read_options(count, words)) return EXIT_USAGE;
    if ((wrong = report_checked("quickstart")) != 0) return wrong;
    if (not_writable(output) != NULL) return fail(output, not_writable(output));
    if ((f = fopen(data_path, "rb")) == NULL) return fail(data_path, "cannot be opened");
    n = read_rows(data_path, f, (moe_rng){(uint64_t)seed});
    fclose(f);
    if (n == 0) return 1;
    moe_data train = training_set(n - n / 5);
    moe_data test = {.n = n / 5, .x = x + (n - n / 5) * PIXELS, .labels = digits + (n - n / 5)};
    record.net = &net;
    record.test = &test;
    training.progress = show_progress;
    training.progress_ctx = &record;
    training.epochs = (int)epochs;
    training.batch = 64;
    training.seed = (uint64_t)seed;
    training.rate = (moe_real)0.004;
    training.final_rate = (moe_real)0.05;
    training.decay = (moe_real)0.3;
    training.clip = 1;
    if (build(&net, &error) || moe_fit(&net, &train, &test, &training, &error)) return fail("training", error.message);
    if (moe_metrics_init(&metrics, EXPERTS, CLASSES, metrics_memory, sizeof metrics_memory))
        return fail("metrics", "no room");
    if (predict(&net, &test, test.n, y, &metrics, NULL) || moe_metrics_report(&metrics, &report))
        return fail("testing", "out of memory");
    printf("test accuracy %.2f %% on %d digits that training has not seen\n", 100.0 * (double)record.result.accuracy,
           (int)test.n);
    show_experts(&report);
    all = moe_net_parameter_count(&net, &used);
    printf("\n%d parameters, of which a digit uses %d\n", (int)all, (int)used);
    if (moe_net_save(&net, output, &error) || moe_net_load(&loaded, output, 0, kernels, NULL, &error))
        return fail(output, error.message);
    if (predict(&loaded, &test, test.n, loaded_y, NULL, NULL) || memcmp(y, loaded_y, test.n * CLASSES * sizeof *y) != 0)
        return fail(output, "the outputs of the loaded network differ");
    printf("saved as %s, loaded into a new network: the same outputs, bit for bit\n", output);
    printf("kernels %s: %.1f us per digit in one call of %d, ", net.kernels->name, microseconds(&loaded, &test, test.n),
           (int)test.n);
    printf("%.1f us one by one\n", microseconds(&loaded, &test, 1));
    if (write_report(&report, all, used)) return 1;
    moe_net_free(&net);
    moe_net_free(&loaded);
    return finish();
}
