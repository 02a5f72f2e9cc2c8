/* Writes a saved network as a C header for firmware, with int8, int4 or float weights, and prints
   size and loss of accuracy.
     cc -std=c99 -O2 -I. examples/export.c -o export -lm && ./export MODEL.safetensors
     (or: sh examples/run export) */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "extras/moe_export.h"
#include "c_names.h"
#include "csv.h"
#include "report.h"

static const char help[] =
    "export MODEL.safetensors [options]   writes a saved network as a C header for firmware; its first comment and "
    "--report list the cost, error and memory of each operation\n"
    "  -o FILE             the header (NAME.h)\n"
    "  --name NAME         the model's name in C (from MODEL)\n"
    "  --weights KIND      int8, int4: no floating point on the device; or float (int8)\n"
    "  --calibration FILE  typical inputs: one per line, numbers separated by commas; one more number is the label\n"
    "  --divide X          divides the file's numbers by X (1)\n"
    "  --tokens FILE       the same for a network that reads tokens: a text, whose bytes are the tokens\n"
    "  --rows N            at most N lines or tokens of that file (2000)\n"
    "  --length N          longest sequence, for networks with attention or positions (128)\n" REPORT_HELP
    "Example: sh examples/run microdigits\n"
    "         sh examples/run export digits.safetensors --calibration examples/data/digits.csv --divide 16\n";
enum { MOST_CHOSEN = 64 };
static const char *const kinds[MOE_WEIGHTS_COUNT] = {"float", "int8", "int4"};
static const char *path, *output, *rows_path, *text_path;
static char name[C_NAME_SIZE + 1], default_output[C_NAME_SIZE + 3];
static int weights = MOE_WEIGHTS_INT8;
static long most_rows = 2000, length = 128;
static double divisor = 1;

static int fail(const char *what, const char *why) {
    fprintf(stderr, is_named(what, why) ? "export: %.0s%s\n" : "export: %s: %s\n", what, why);
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
        if (option && *value == '\0') return fail(word, "no such option, or its value is missing; see -h");
        if (!option && path != NULL) return fail(word, "a second network; one at a time");
        if (!option) path = word;
        else if (strcmp(word, "-o") == 0) output = value;
        else if (strcmp(word, "--report") == 0) report_path = value;
        else if (strcmp(word, "--name") == 0 && strlen(value) > C_NAME_SIZE)
            return fail(value, "is too long for the name of a model: at most 40 characters");
        else if (strcmp(word, "--name") == 0) strcpy(name, value);
        else if (strcmp(word, "--calibration") == 0) rows_path = value;
        else if (strcmp(word, "--tokens") == 0) text_path = value;
        else if (strcmp(word, "--divide") == 0) divisor = strtod(value, &end);
        else if (strcmp(word, "--rows") == 0) most_rows = strtol(value, &end, 10);
        else if (strcmp(word, "--length") == 0) length = strtol(value, &end, 10);
        else if (strcmp(word, "--weights") != 0) return fail(word, "no such option; see -h");
        else for (weights = 0; weights < MOE_WEIGHTS_COUNT && strcmp(kinds[weights], value) != 0;) weights++;
        if ((end != NULL && (*end != '\0' || end == value)) || !(fabs(divisor) > 0 && fabs(divisor) < HUGE_VAL) ||
            most_rows < 1 || most_rows > 1000000 || length < 1 || length > 65535 || weights == MOE_WEIGHTS_COUNT) {
            fprintf(stderr, "export: %s %s: not a value of this option; see -h\n", word, value);
            return 1;
        }
        count -= option;
        words += option; /* the value of an option */
    }
    if (path == NULL)
        return fail("no network", "which file? A saved network, as `sh examples/run microdigits` writes one; see -h");
    if (*name == '\0') c_name_of_file(path, name);
    if (strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789") < strlen(name) ||
        !isalpha((unsigned char)*name))
        return fail(name, "cannot be the name of a model in C: letters, digits and _, a letter first");
    if (is_name_of_c(name)) return fail(name, "is a name of C, of its library or of moe.h; --name gives another");
    if (output == NULL) output = strcat(strcpy(default_output, name), ".h");
    const char *const outputs[] = {output, report_path}, *const inputs[] = {path, rows_path, text_path};
    const char *twice = written_twice(outputs, 2, inputs, 3);
    if (twice != NULL) return fail(twice, WRITTEN_TWICE);
    if (is_header_of_moe(output)) return fail(output, "is a header of the library; -o names another file");
    return 0;
}

/* ---- the calibration ---- */

typedef struct samples {
    moe_data data; /* the calibration data; points into the others */
    moe_real *x;
    int32_t *ids, *labels; /* labels: NULL, or the expected class of each row */
} samples;

/* Parses one row: width inputs, optionally a label. Returns an error message, or NULL. */
static const char *read_row(char *const *cells, size_t columns, size_t width, size_t classes, moe_real *x,
                            int32_t *label) {
    double value;
    for (size_t i = 0; i < columns; i++) {
        int kind = csv_number(cells[i], &value);
        if (kind != CSV_NUMBER)
            return kind == CSV_TEXT      ? "a column is not a number"
                   : kind == CSV_MISSING ? "a value is missing"
                                         : "a number is infinite";
        if (i < width) x[i] = (moe_real)(value / divisor);
        else if (i > width || !(value >= 0 && value < (double)classes) || floor(value) < value)
            return "more numbers than the network has inputs, and the last is not a label";
        else *label = (int32_t)value;
    }
    return columns < width ? "fewer numbers than the network has inputs" : NULL;
}

/* Reads the calibration file; skips a header line. */
static int read_rows(samples *s, const moe_net *net) {
    csv_table t = {.rows = 0};
    size_t width = (size_t)net->d_in, row;
    double value;
    int names = 1, failed = csv_read(rows_path, (size_t)most_rows + 1, &t);
    if (failed) {
        fail(rows_path, t.why);
        csv_free(&t);
        return 1;
    }
    for (size_t i = 0; i < t.columns; i++) names = names && csv_number(t.cells[i], &value) == CSV_TEXT;
    s->x = (moe_real *)calloc(t.rows, width * sizeof *s->x);
    s->labels = (int32_t *)calloc(t.rows, sizeof *s->labels);
    if (s->x == NULL || s->labels == NULL) {
        csv_free(&t);
        return fail(rows_path, "out of memory");
    }
    for (row = names && t.rows > 1; row < t.rows && s->data.n < (size_t)most_rows && !failed; row++) {
        const char *wrong = read_row(t.cells + row * t.columns, t.columns, width, (size_t)net->d_out,
                                     s->x + s->data.n * width, &s->labels[s->data.n]);
        if (wrong != NULL) {
            sprintf(t.why, "line %lu: %s: it reads %d, the line has %lu", (unsigned long)t.lines[row], wrong, net->d_in,
                    (unsigned long)t.columns);
            failed = fail(rows_path, t.why);
        }
        s->data.n++;
    }
    if (t.columns <= width) {
        free(s->labels);
        s->labels = NULL;
    }
    csv_free(&t);
    s->data.x = s->x;
    return failed;
}

/* Reads bytes as token ids; the label of a token is the next token. */
static int read_tokens(samples *s, const moe_net *net, const moe_buffer *text) {
    s->ids = (int32_t *)calloc((size_t)most_rows + 1, sizeof *s->ids);
    if (s->ids == NULL) return fail(text_path, "out of memory");
    for (; s->data.n < text->size && s->data.n <= (size_t)most_rows; s->data.n++)
        if ((s->ids[s->data.n] = text->data[s->data.n]) >= net->modules[0].n_rows)
            return fail(text_path, "its bytes are not tokens of this network: does it use words?");
    s->data.n -= s->data.n > 0; /* the last token has no label */
    if (net->d_out >= net->modules[0].n_rows &&
        (s->labels = (int32_t *)calloc(s->data.n + 1, sizeof *s->labels)) != NULL)
        memcpy(s->labels, s->ids + 1, s->data.n * sizeof *s->labels);
    s->data.token_ids = s->ids;
    return 0;
}

static int read_text(samples *s, const moe_net *net) {
    moe_buffer text = {0};
    moe_stream stream = moe_buffer_stream(&text);
    moe_error error = {0};
    int failed;
    if (moe_file_read(text_path, &text, &error)) return fail(text_path, error.message);
    if (stream.write(stream.ctx, "", 1) != MOE_OK) {
        moe_buffer_free(&text);
        return fail(text_path, "out of memory");
    }
    text.size--;
    failed = read_tokens(s, net, &text);
    moe_buffer_free(&text);
    return failed;
}

/* longest: the most tokens of a sequence, or 0 if the model processes none; s->data is then cut to
   complete ones. */
static int read_samples(samples *s, const moe_net *net, size_t longest) {
    const char *from = net->d_in > 0 ? rows_path : text_path;
    if (net->d_in > 0 && text_path != NULL)
        return fail("--tokens", "this network reads numbers: --calibration FILE.csv instead");
    if (net->d_in == 0 && rows_path != NULL)
        return fail("--calibration", "this network reads tokens: --tokens FILE instead");
    if (from == NULL && weights == MOE_WEIGHTS_FLOAT) return 0;
    if (from == NULL)
        return net->d_in > 0
                   ? fail(path, "integer weights need the ranges of sample inputs: add --calibration FILE.csv (or "
                                "--weights float); see -h")
                   : fail(path, "it reads tokens: add --tokens FILE, a text (or --weights float); see -h");
    if (net->d_in > 0 ? read_rows(s, net) : read_text(s, net)) return 1;
    s->data.length = s->data.n < longest ? s->data.n : longest;
    if (s->data.length > 0) s->data.n -= s->data.n % s->data.length;
    return s->data.n > 0 ? 0 : fail(from, "it is empty");
}

/* ---- float against integers ---- */

/* A model that is being run. */
typedef struct runner {
    const moe_model *model;
    void *scratch, *input, *output;
    double *y; /* the output as floats */
    size_t best;
    double right, loss;
} runner;

static int runner_begin(runner *r, const moe_model *model) {
    r->model = model;
    r->scratch = calloc(model->scratch_size, 1);
    r->input = calloc(model->d_in + 1, sizeof(moe_real));
    r->output = calloc(model->d_out, sizeof(moe_real));
    r->y = (double *)calloc(model->d_out, sizeof *r->y);
    return r->scratch == NULL || r->input == NULL || r->output == NULL || r->y == NULL;
}

static void runner_end(runner *r) {
    free(r->scratch);
    free(r->input);
    free(r->output);
    free(r->y);
}

static moe_status runner_step(runner *r, const samples *s, size_t row) {
    const moe_model *model = r->model;
    double sum = 0;
    moe_status status;
    if (s->data.length > 0 && row % s->data.length == 0) memset(r->scratch, 0, 32);
    if (model->weights_are != MOE_WEIGHTS_FLOAT) moe_infer_levels(model, s->x + row * model->d_in, (int8_t *)r->input);
    else if (model->d_in > 0) memcpy(r->input, s->x + row * model->d_in, model->d_in * sizeof(moe_real));
    status =
        moe_infer(model, NULL, model->d_in > 0 ? r->input : s->ids + row, r->output, r->scratch, model->scratch_size);
    for (size_t i = 0; i < model->d_out; i++) {
        r->y[i] = model->weights_are == MOE_WEIGHTS_FLOAT ? (double)((moe_real *)r->output)[i]
                                                          : ((int16_t *)r->output)[i] * (double)model->output_scale;
        if (i == 0 || r->y[i] > r->y[r->best]) r->best = i;
    }
    for (size_t i = 0; i < model->d_out; i++) sum += exp(r->y[i] - r->y[r->best]);
    if (s->labels != NULL) {
        r->right += r->best == (size_t)s->labels[row];
        r->loss += log(sum) + r->y[r->best] - r->y[s->labels[row]];
    }
    return status;
}

/* Errors for the inputs with one first choice. */
typedef struct expert {
    double rows, wrong, size; /* wrong, size: sums of squares */
} expert;

/* Errors of the integer model, over a whole comparison. */
typedef struct comparison {
    double same, chose_same, wrong, size;
    size_t n_experts;
    expert *experts; /* [n_experts + 1]; the last: inputs without an expert */
} comparison;

static moe_status compare_row(const samples *s, size_t row, runner *a, runner *b, comparison *c) {
    const moe_model *floats = a->model, *integers = b->model;
    moe_choice chosen[2][MOST_CHOSEN] = {{{0, 0}}};
    size_t count[2] = {0, 0};
    double d = 0, y = 0;
    expert *first = c->experts;
    moe_status status = runner_step(a, s, row);
    if (status == MOE_OK) status = runner_step(b, s, row);
    if (status != MOE_OK) return status;
    for (size_t i = 0; i < floats->d_out; i++) {
        d += (a->y[i] - b->y[i]) * (a->y[i] - b->y[i]);
        y += a->y[i] * a->y[i];
    }
    if (integers->n_mixtures > 0 &&
        moe_infer_choices(floats, 0, a->scratch, chosen[0], MOST_CHOSEN, &count[0]) == MOE_OK &&
        moe_infer_choices(integers, 0, b->scratch, chosen[1], MOST_CHOSEN, &count[1]) == MOE_OK) {
        first += count[0] > 0 ? (size_t)chosen[0]->expert : c->n_experts;
        c->chose_same += (count[0] > 0) == (count[1] > 0) && chosen[0]->expert == chosen[1]->expert;
    }
    c->wrong += d;
    c->size += y;
    c->same += a->best == b->best;
    first->rows++;
    first->wrong += d;
    first->size += y;
    return MOE_OK;
}

/* Root mean square error in percent of the output. */
static double percent_off(double wrong, double size) { return 100 * sqrt(wrong / (size > 0 ? size : 1)); }

static void report_comparison(const comparison *c) {
    double *off = (double *)report_grab(c->n_experts, sizeof *off);
    double *rows = (double *)report_grab(c->n_experts, sizeof *rows);
    moe_figure *f;
    for (size_t e = 0; e < c->n_experts; e++) {
        const expert *one = c->experts + e;
        rows[e] = one->rows;
        off[e] = one->rows > 0 ? percent_off(one->wrong, one->size) : HUGE_VAL;
    }
    f = report_add(MOE_FIGURE_BARS, "Error of the integer model", c->n_experts, 1);
    f->values = off;
    f->value_label = "% of the output";
    f->caption = "Error of the outputs (root mean square), by the expert that is chosen first.";
    f = report_add(MOE_FIGURE_BARS, "Inputs by first expert", c->n_experts, 1);
    f->values = rows;
    f->value_label = "inputs";
}

static void print_comparison(const samples *s, const runner *a, const runner *b, const comparison *c) {
    const double n = (double)s->data.n;
    const int has_mixtures = b->model->n_mixtures > 0;
    printf("compared     with the float network on these %.0f %s: outputs differ by %.2f %% (root mean square), "
           "%.2f %% of the answers are the same\n",
           n, a->model->d_in > 0 ? "rows" : "tokens", percent_off(c->wrong, c->size), 100 * c->same / n);
    if (has_mixtures)
        printf("             the first MoE layer's first choice is the same for %.2f %%\n", 100 * c->chose_same / n);
    for (size_t e = 0; has_mixtures && e <= c->n_experts; e++) {
        const expert *one = c->experts + e;
        if (!(one->rows > 0)) continue;
        if (e < c->n_experts) printf("             expert %2d first: ", (int)e);
        else printf("             no expert: ");
        printf("%5.1f %% of them, outputs differ by %.2f %%\n", 100 * one->rows / n,
               percent_off(one->wrong, one->size));
    }
    if (s->labels != NULL)
        printf("accuracy     %.2f %% in float, %.2f %% in %s; loss %.4f, %.4f (not meaningful on rows that it "
               "was trained on)\n",
               100 * a->right / n, 100 * b->right / n, kinds[weights], a->loss / n, b->loss / n);
}

static int compare(const samples *s, const moe_model *floats, const moe_model *integers) {
    runner a = {0}, b = {0};
    comparison c = {0};
    moe_status status;
    c.n_experts = integers->n_mixtures > 0 ? integers->mixtures[0].router.n_experts : 1;
    c.experts = (expert *)calloc(c.n_experts + 1, sizeof *c.experts);
    status = c.experts == NULL || runner_begin(&a, floats) || runner_begin(&b, integers) ? MOE_ERR_MEMORY : MOE_OK;
    for (size_t row = 0; row < s->data.n && status == MOE_OK; row++) status = compare_row(s, row, &a, &b, &c);
    if (status == MOE_OK && report_path != NULL && integers->n_mixtures > 0) report_comparison(&c);
    if (status == MOE_OK) print_comparison(s, &a, &b, &c);
    runner_end(&a);
    runner_end(&b);
    free(c.experts);
    return status == MOE_OK ? 0 : fail("comparing", moe_status_text(status));
}

/* ---- the model ---- */

typedef struct header {
    const moe_built_model *built;
    moe_error *error;
} header;

static moe_status write_header(void *ctx, moe_stream *stream) {
    const header *h = (const header *)ctx;
    return moe_export_c(h->built, name, stream, h->error);
}

static void show_model(const moe_model *model) {
    printf("wrote        %s: the model `%s`, weights in %s\n", output, name, kinds[weights]);
    printf("flash        %.0f bytes of weights", (double)(model->weights_size + model->experts_size));
    if (model->experts_size > 0) printf(", %.0f of them for experts", (double)model->experts_size);
    printf("\nscratch      %.0f bytes of RAM", (double)model->scratch_size);
    if (model->length > 0)
        printf(", %.0f of them kept from token to token, %.0f tokens at most", (double)model->state_size,
               (double)model->length);
    printf("\nwork         %.0f multiplications per %s at most\n", (double)model->multiplications,
           model->d_in > 0 ? "input" : "token");
}

static void report_model(const moe_model *model) {
    static const char *const heads[] = {"value"};
    static const char *const names[] = {"bytes of weights (flash)", "of these for experts", "bytes of scratch (RAM)",
                                        "multiplications per input, at most"};
    moe_figure *f = report_add(MOE_FIGURE_TABLE, "The model", 4, 1);
    double found[] = {(double)(model->weights_size + model->experts_size), (double)model->experts_size,
                      (double)model->scratch_size, (double)model->multiplications};
    f->values = report_numbers(found, 4);
    f->row_names = names;
    f->column_names = heads;
}

/* ---- the profile ---- */

static const char *operation_name(const moe_profile_row *row, size_t number) {
    char text[64];
    sprintf(text, "%d %s", (int)number, row->name);
    return report_text(text);
}

/* Adds a bar chart with one number per operation; HUGE_VAL: no bar. */
static void report_operations(const moe_profile *p, const char *const *names, const char *title, const char *label,
                              const char *caption, int decimals, double (*value)(const moe_profile_row *row)) {
    moe_figure *f = report_add(MOE_FIGURE_BARS, title, p->n_rows, 1);
    double *values = (double *)report_grab(p->n_rows, sizeof *values);
    for (size_t i = 0; i < p->n_rows; i++) values[i] = value(&p->rows[i]);
    f->values = values;
    f->row_names = names;
    f->row_label = "operation";
    f->value_label = label;
    f->caption = caption;
    f->decimals = decimals;
}

static double snr_of(const moe_profile_row *row) { return row->compared > 0 ? row->snr : HUGE_VAL; }
static double instructions_of(const moe_profile_row *row) {
    return row->calls > 0 ? floor(row->instructions + 0.5) : HUGE_VAL;
}

static void report_rows(const moe_profile *p, const char *const *names) {
    static const char *const heads[] = {"module",      "outputs", "inputs",  "calls",        "MACs",
                                        "bytes",       "SNR, dB", "net, dB", "clamped, %", "codes used, %",
                                        "instructions"};
    enum { COLUMNS = sizeof heads / sizeof *heads };
    moe_figure *f = report_add(MOE_FIGURE_TABLE, "Operations", p->n_rows, COLUMNS);
    double *values = (double *)report_grab(p->n_rows * COLUMNS, sizeof *values);
    for (size_t i = 0; i < p->n_rows; i++) {
        const moe_profile_row *row = &p->rows[i];
        double *v = values + i * COLUMNS;
        const int compared = row->compared > 0;
        v[0] = (double)row->module;
        v[1] = (double)row->outputs;
        v[2] = (double)row->inputs;
        v[3] = (double)row->calls;
        v[4] = (double)row->multiplications;
        v[5] = (double)row->weight_bytes;
        v[6] = compared ? floor(row->snr * 10 + 0.5) / 10 : HUGE_VAL;
        v[7] = row->net_compared > 0 ? floor(row->net_snr * 10 + 0.5) / 10 : HUGE_VAL;
        v[8] = row->used > 0 ? floor(row->saturated * 1e4 + 0.5) / 100 : HUGE_VAL;
        v[9] = row->used > 0 ? floor(row->used * 1e3 + 0.5) / 10 : HUGE_VAL;
        v[10] = row->instructions > 0 ? floor(row->instructions + 0.5) : HUGE_VAL;
    }
    f->values = values;
    f->row_names = names;
    f->column_names = heads;
    f->caption = "MACs are an upper bound for all calls of one inference; instructions of a Cortex-M4 are estimated. "
                 "SNR compares the operation with float on the same inputs, net the output of its module, or the "
                 "routing weights, with the network's.";
}

/* The lifetimes of the vectors in scratch memory. */
static void report_map(const moe_profile *p, const char *const *names) {
    moe_figure *f = report_add(MOE_FIGURE_HEAT, "Scratch memory by lifetime", p->n_vectors, p->n_rows);
    double *values = (double *)report_grab(p->n_vectors * p->n_rows, sizeof *values);
    const char **rows = (const char **)report_grab(p->n_vectors, sizeof *rows);
    for (size_t i = 0; i < p->n_vectors; i++) {
        const moe_profile_vector *v = &p->vectors[i];
        char text[64];
        sprintf(text, "%d-%d", (int)v->at, (int)(v->at + v->size - 1));
        rows[i] = report_text(text);
        for (size_t r = 0; r < p->n_rows; r++)
            values[i * p->n_rows + r] = r >= v->first && r <= v->last ? (double)v->size : HUGE_VAL;
    }
    f->values = values;
    f->row_names = rows;
    f->row_label = "bytes";
    f->column_names = names;
    f->column_label = "operation";
    f->value_label = "bytes";
    f->decimals = -1;
    f->caption = "A row is a piece of scratch memory, a column an operation: colored while the piece is needed.";
}

static void report_profile(const moe_profile *p) {
    const char **names = (const char **)report_grab(p->n_rows, sizeof *names);
    for (size_t i = 0; i < p->n_rows; i++) names[i] = operation_name(&p->rows[i], i);
    report_rows(p, names);
    report_operations(p, names, "Accuracy of each operation", "SNR (dB)",
                      "6 dB halve the error. No bar: exact, or not compared.", 1, snr_of);
    if (p->instructions > 0)
        report_operations(p, names, "Instructions of each operation", "instructions",
                          "Estimated for all calls of one inference on a Cortex-M4.", -1, instructions_of);
    report_map(p, names);
}

static int export_net(moe_net *net, samples *s, moe_built_model *floats, moe_built_model *made, moe_profile *profile) {
    moe_model_config config = {.length = (size_t)length};
    moe_error error = {0};
    header whole = {made, &error};
    size_t all, used;
    if (moe_net_load(net, path, 0, MOE_KERNELS_C, NULL, &error)) return fail(path, error.message);
    all = moe_net_parameter_count(net, &used);
    printf("read         %s: %d module%s, %.0f parameters, of which one input uses %.0f\n", path, (int)net->n_modules,
           net->n_modules == 1 ? "" : "s", (double)all, (double)used);
    if (moe_model_create(floats, net, &config, &error)) return fail(path, error.message);
    if (read_samples(s, net, floats->model.length)) return 1;
    config.weights = weights;
    config.calibration = &s->data;
    if (moe_model_create(made, net, &config, &error)) return fail(path, error.message);
    if (moe_model_profile(profile, net, &config, NULL, &error) == MOE_OK) made->profile = profile;
    else if (error.code != MOE_ERR_UNSUPPORTED) return fail(path, error.message);
    if (moe_file_replace(output, write_header, &whole, &error)) return fail(output, error.message);
    show_model(&made->model);
    if (profile->instructions > 0)
        printf("             about %.0f instructions of a Cortex-M4\n", profile->instructions);
    if (s->data.n > 0 && weights != MOE_WEIGHTS_FLOAT && compare(s, &floats->model, &made->model)) return 1;
    report_model(&made->model);
    if (made->profile != NULL) report_profile(made->profile);
    if (report_write_added("export", "A model for firmware")) return 1;
    printf("next         include it in the firmware; %s begins with instructions. To test that it compiles:\n", output);
    printf("             cc -std=c99 -Os -I'%s' -DMOE_IMPLEMENTATION %s-x c -c '%s' -o /dev/null\n", example_file(".."),
           weights == MOE_WEIGHTS_FLOAT ? "-DMOE_NO_TRAIN " : "-DMOE_NO_FLOAT ", output);
    return finish();
}

int main(int count, char **words) {
    moe_net net = {0};
    samples s = {0};
    moe_built_model floats = {0}, made = {0};
    moe_profile profile = {0};
    int failed;
    if (read_options(count, words)) return EXIT_USAGE;
    if ((failed = report_checked("export")) != 0) return failed;
    failed = export_net(&net, &s, &floats, &made, &profile);
    moe_profile_free(&profile);
    moe_model_free(&made);
    moe_model_free(&floats);
    moe_net_free(&net);
    free(s.x);
    free(s.ids);
    free(s.labels);
    return failed;
}
