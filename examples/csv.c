/* Trains an MoE classifier on your own table (a CSV file), reports which expert gets which rows,
   saves the model and predicts with it.
     cc -std=c99 -O2 -I. examples/csv.c -o csv -lm && ./csv FILE.csv
     (or: sh examples/run csv FILE.csv) */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "c_names.h"
#include "csv.h"
#include "report.h"
#include <time.h>
#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

static const char help[] =
    "csv FILE.csv [options]   trains on four fifths of the lines, tests on the rest, and reports which expert gets "
    "which lines\n"
    "FILE.csv: one line per sample: columns of numbers or words that describe it, and one column with its label\n"
    "a column of words becomes one input per word (one-hot), up to 64\n"
    "  --label COLUMN      the column to predict: a name from the header, or a number from 1 (the last column)\n"
    "  --skip COLUMNS      columns to leave out: names or numbers, separated by commas\n"
    "  --header yes|no     whether the first line holds names (yes when none of its cells is a number)\n"
    "  --drop              leave out lines in which a value is missing, instead of stopping there\n"
    "  --experts N         (4)      --top-k N  experts per line (2)      --width N  hidden width of an expert (16)\n"
    "  --router NAME       a preset that routes the rows: sh examples/run routers lists them (mixtral)\n"
    "  --epochs N          passes over the lines (enough for 3000 steps, from 5 to 200)\n"
    "  --seed N            seed of all random choices: held-out lines, weights, order (1)\n"
    "  --kernels NAME      instruction set: auto, c, avx2, ... (auto)\n"
    "  --report FILE       the tables and figures as a page (.html), a picture (.svg) or text; -: on the screen\n"
    "  --save MODEL.safetensors   the classifier; and MODEL.calibration.csv, with which `sh examples/run export` "
    "quantizes it\n"
    "  --firmware FILE.c   a program for a microcontroller that includes the header that export writes for MODEL\n"
    "  --predict FILE.csv  prints label, probability and expert (-1: none) for every line of another table\n"
    "  --load MODEL.safetensors   predicts with a saved classifier, instead of training one\n"
    "Example: sh examples/run csv examples/data/digits.csv --save digits.safetensors\n";

enum {
    MOST_CLASSES = 100, MOST_COLUMNS = 4096, MOST_WORDS = 64, BATCH = 32, STEPS = 3000, DEVICE_ROWS = 10,
    PATH_SIZE = 1000
};

static const char *path, *label_wanted, *skipped, *header_wanted, *router, *save_path, *firmware_path, *predict_path,
    *load_path;
static long n_experts = 4, width = 16;
static long seed = 1, top_k, epochs, drop;
static int kernels;

static int fail(const char *what, const char *why) {
    fprintf(stderr, is_named(what, why) ? "csv: %.0s%s\n" : "csv: %s: %s\n", what, why);
    return 1;
}

/* Flushes the output; fails if it could not be written. */
static int finish(void) { return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0; }

/* ---- options ---- */

typedef struct option {
    const char *name;
    int trains; /* 1: not for a classifier that was saved */
    const char **text;
    long *number, least, most;
} option;

static const option options[] = {{"--label", 1, &label_wanted, NULL, 0, 0},
                                 {"--skip", 1, &skipped, NULL, 0, 0},
                                 {"--header", 0, &header_wanted, NULL, 0, 0},
                                 {"--router", 1, &router, NULL, 0, 0},
                                 {"--report", 1, &report_path, NULL, 0, 0},
                                 {"--save", 1, &save_path, NULL, 0, 0},
                                 {"--firmware", 1, &firmware_path, NULL, 0, 0},
                                 {"--predict", 0, &predict_path, NULL, 0, 0},
                                 {"--load", 0, &load_path, NULL, 0, 0},
                                 {"--experts", 1, NULL, &n_experts, 1, 256},
                                 {"--top-k", 1, NULL, &top_k, 1, 256},
                                 {"--width", 1, NULL, &width, 1, 4096},
                                 {"--epochs", 1, NULL, &epochs, 1, 100000},
                                 {"--seed", 1, NULL, &seed, 0, 2000000000},
                                 {NULL, 0, NULL, NULL, 0, 0}};
static const char *training_option; /* the last one that trains */

static int bad_value(const char *word, const char *value) {
    fprintf(stderr, "csv: %s %s: not a value of this option; see -h\n", word, value);
    return 1;
}

static int read_kernels(const char *value) {
    for (kernels = 0; moe_kernels_name(kernels) != NULL && strcmp(moe_kernels_name(kernels), value) != 0;) kernels++;
    return moe_kernels_name(kernels) == NULL ? bad_value("--kernels", value) : 0;
}

/* One option and its value. */
static int read_option(const char *word, const char *value) {
    const option *o = options;
    char *end;
    if (strcmp(word, "--kernels") == 0) return read_kernels(value);
    while (o->name != NULL && strcmp(o->name, word) != 0) o++;
    if (o->name == NULL || *value == '\0') return fail(word, "no such option, or its value is missing; see -h");
    if (o->trains) training_option = o->name;
    if (o->text != NULL) {
        *o->text = value;
        return 0;
    }
    *o->number = strtol(value, &end, 10);
    return end == value || *end != '\0' || *o->number < o->least || *o->number > o->most ? bad_value(word, value) : 0;
}

/* MODEL of MODEL.safetensors, with another extension. */
static const char *beside(const char *file, const char *ending, char out[PATH_SIZE]) {
    size_t n = strlen(file), cut = n > 12 && strcmp(file + n - 12, ".safetensors") == 0 ? n - 12 : n;
    sprintf(out, "%.*s%s", (int)cut, file, ending);
    return out;
}

/* The file that export writes for a model of this name: in the folder of the program that includes
   it. */
static const char *header_of(const char *name, char out[PATH_SIZE]) {
    const char *folder = firmware_path != NULL ? firmware_path : "", *slash = strrchr(folder, '/');
    sprintf(out, "%.*s%s.h", slash != NULL ? (int)(slash + 1 - folder) : 0, folder, name);
    return out;
}

/* NULL, or the first file that would be written over what is read or written too. A model brings
   its calibration, and a program the header that export writes for it. */
static const char *file_written_twice(void) {
    static char calibration[PATH_SIZE], header[PATH_SIZE]; /* what is returned may be one of them */
    char name[C_NAME_SIZE + 1];
    const char *const inputs[] = {path, predict_path, load_path};
    const char *outputs[5] = {save_path, NULL, NULL, firmware_path, report_path};
    if (save_path == NULL) return written_twice(outputs, 5, inputs, 3);
    outputs[1] = beside(save_path, ".calibration.csv", calibration);
    c_name_of_file(save_path, name);
    if (firmware_path != NULL) outputs[2] = header_of(name, header);
    return written_twice(outputs, 5, inputs, 3);
}

/* Whether the header and the program that are made of a model of this name do not compile: the
   header would take the place of one of moe's, or C or the program has the name for something
   else. */
static int is_name_taken(const char *file) {
    static const char *const taken[] = {"moe",    "moe_kernels", "moe_routers", "ROWS",     "classes", "means",
                                        "scales", "rows",        "labels",      "lines",    "quantize", "value",
                                        "mean",   "scale",       "v",           "scratch",  "input",   "output",
                                        "choice", "count",       "row",         "i",        "best",    "right"};
    const size_t n = firmware_path != NULL ? sizeof taken / sizeof *taken : 3;
    char name[C_NAME_SIZE + 1];
    c_name_of_file(file, name);
    for (size_t i = 0; i < n; i++)
        if (strcmp(name, taken[i]) == 0) return 1;
    return firmware_path != NULL && is_name_of_c(name);
}

/* Checks the names of the files before anything is read. */
static int check_files(void) {
    const char *twice;
    for (int i = 0; i < 2; i++) {
        const char *file = i == 0 ? save_path : firmware_path;
        if (file != NULL && strlen(file) > PATH_SIZE - 60) return fail(file, "the name is too long");
    }
    twice = file_written_twice();
    if (twice != NULL) return fail(twice, WRITTEN_TWICE);
    if (save_path != NULL && is_name_taken(save_path))
        return fail(save_path, "as C it would clash with names of C, of moe or of the program: save it as another");
    return 0;
}

static int read_options(int count, char **words) {
    while (--count > 0) {
        const char *word = *++words;
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) exit(fputs(help, stdout) < 0 || finish());
        if (strcmp(word, "--drop") == 0) drop = 1;
        else if (word[0] != '-' && path != NULL)
            return fail(word, "a second table; --predict names one to label after training");
        else if (word[0] != '-') path = word;
        else if (read_option(word, count > 1 ? words[1] : "")) return 1;
        else {
            words++;
            count--;
        }
    }
    if (header_wanted != NULL && strcmp(header_wanted, "yes") != 0 && strcmp(header_wanted, "no") != 0)
        return bad_value("--header", header_wanted);
    if (path == NULL && load_path == NULL)
        return fail("no table", "which file? sh examples/run csv FILE.csv; see -h");
    if (path != NULL && load_path != NULL)
        return fail(
            "--load",
            "a saved classifier is not trained again: leave out the table, and name the one to predict with --predict");
    if (load_path != NULL && predict_path == NULL)
        return fail("--load", "needs --predict FILE.csv, the table to label");
    if (load_path != NULL && training_option != NULL)
        return fail(training_option, "a saved classifier only predicts: leave this option out with --load");
    if (firmware_path != NULL && save_path == NULL)
        return fail("--firmware",
                    "it includes the header that export makes from the saved classifier: add --save MODEL.safetensors");
    if (router != NULL && moe_preset_find(router) == NULL)
        return fail(router, "there is no preset of this name; sh examples/run routers lists them");
    return check_files();
}

/* ---- from cells to numbers ---- */

/* One input of the network: a column of numbers, or, one-hot, a word of a column of words. */
typedef struct column {
    const char *name;
    /* NULL: the cell is a number; else the value is 1 if the cell is this word, else 0 */
    const char *word;
    size_t place;       /* in the table, from 0 */
    size_t source;      /* index among the columns that are read */
    double mean, scale; /* the network reads (value - mean) / scale */
} column;

/* The meaning of a row of numbers; the texts belong to the table that it was made from. */
typedef struct schema {
    column *features;
    char (*numbered)[24]; /* names of unnamed columns */
    size_t n_features, n_sources, n_columns, n_classes;
    const char *label;
    size_t label_place;
    const char *classes[MOST_CLASSES];
} schema;

/* Rows as inputs of the network. */
typedef struct samples {
    double *values;  /* [n,features], as in the table */
    moe_real *x;     /* [n,features], standardized */
    int32_t *labels; /* [n], -1: none */
    size_t *lines;   /* [n] */
    size_t n;
    size_t dropped; /* lines left out */
} samples;

static void free_samples(samples *s) {
    free(s->values);
    free(s->x);
    free(s->labels);
    free(s->lines);
    memset(s, 0, sizeof *s);
}

static void free_schema(schema *s) {
    free(s->features);
    free(s->numbered);
    memset(s, 0, sizeof *s);
}

/* Whether the first row is a header: none of its cells is a number, and there are more rows. */
static int has_header(const csv_table *t) {
    double value;
    if (header_wanted != NULL) return strcmp(header_wanted, "yes") == 0;
    for (size_t i = 0; i < t->columns; i++)
        if (csv_number(t->cells[i], &value) == CSV_NUMBER) return 0;
    return t->rows > 1;
}

/* The column named by a text of length n: by the header, else by its number from 1. Returns columns
   if there is none. */
static size_t find_column(const csv_table *t, int header, const char *text, size_t n) {
    char *end;
    long number = strtol(text, &end, 10);
    for (size_t i = 0; header && i < t->columns; i++)
        if (strlen(t->cells[i]) == n && memcmp(t->cells[i], text, n) == 0) return i;
    return end == text + n && n > 0 && number >= 1 && (unsigned long)number <= t->columns ? (size_t)number - 1
                                                                                          : t->columns;
}

static int no_column(const csv_table *t, int header, const char *word, const char *text, size_t n) {
    char shown[CSV_SHOWN_SIZE];
    fprintf(stderr, "csv: %s: there is no column %.*s in %s; it has %lu columns", word, (int)(n < 60 ? n : 60), text,
            path, (unsigned long)t->columns);
    for (size_t i = 0; header && i < t->columns && i < 12; i++)
        fprintf(stderr, "%s%s", i > 0 ? ", " : ": ", csv_shown(t->cells[i], shown));
    fprintf(stderr, "%s\n", header && t->columns > 12 ? ", ..." : header ? "" : ", and its first line holds no names");
    return 1;
}

/* A column holds words if most of its values are not numbers, so that a typing error does not turn
   numbers into words. */
static int holds_words(const csv_table *t, int header, size_t place) {
    size_t words = 0, numbers = 0;
    double value;
    for (size_t row = (size_t)header; row < t->rows; row++) {
        const int kind = csv_number(t->cells[row * t->columns + place], &value);
        words += kind == CSV_TEXT;
        numbers += kind == CSV_NUMBER || kind == CSV_INFINITE;
    }
    return words > numbers;
}

/* Adds a column: one feature if it holds numbers, one for each word if it holds words. */
static int add_features(const csv_table *t, int header, size_t place, schema *s) {
    const size_t first = s->n_features;
    const int words = holds_words(t, header, place);
    column c = {
        .name = header ? t->cells[place] : s->numbered[place], .place = place, .source = s->n_sources++, .scale = 1};
    double value;
    for (size_t row = (size_t)header; row < t->rows; row++) {
        size_t i = first;
        c.word = words ? t->cells[row * t->columns + place] : NULL;
        if (words && csv_number(c.word, &value) == CSV_MISSING) continue;
        while (i < s->n_features && (!words || strcmp(s->features[i].word, c.word) != 0)) i++;
        if (i < s->n_features) continue;
        if (s->n_features == MOST_COLUMNS)
            return fail(path, "more than 4096 columns, each word of a column of words counted as one");
        if (s->n_features - first == MOST_WORDS) {
            char shown[CSV_SHOWN_SIZE];
            fprintf(stderr,
                    "csv: %s: column %lu (%s) holds more than %d different words, too many for one input each: leave "
                    "it out with --skip %lu\n",
                    path, (unsigned long)place + 1, csv_shown(c.name, shown), MOST_WORDS, (unsigned long)place + 1);
            return 1;
        }
        s->features[s->n_features++] = c;
        if (!words) break;
    }
    return 0;
}

/* Label, skipped columns and features. */
static int choose_columns(const csv_table *t, int header, schema *s) {
    char *used = (char *)calloc(t->columns, 1);
    const char *p = skipped;
    s->features = (column *)calloc(MOST_COLUMNS, sizeof *s->features);
    s->numbered = (char(*)[24])calloc(t->columns, sizeof *s->numbered);
    if (used == NULL || s->features == NULL || s->numbered == NULL) {
        free(used);
        return fail(path, "out of memory");
    }
    s->n_columns = t->columns;
    s->label_place = label_wanted != NULL ? find_column(t, header, label_wanted, strlen(label_wanted)) : t->columns - 1;
    if (s->label_place == t->columns) {
        free(used);
        return no_column(t, header, "--label", label_wanted, strlen(label_wanted));
    }
    while (p != NULL && *p != '\0') {
        size_t n = strcspn(p, ","), place = find_column(t, header, p, n);
        if (place == t->columns) {
            free(used);
            return no_column(t, header, "--skip", p, n);
        }
        if (place == s->label_place) {
            free(used);
            return fail("--skip", "leaves out the column to predict; --label names another");
        }
        used[place] = 1;
        p += n + (p[n] == ',');
    }
    used[s->label_place] = 1;
    for (size_t i = 0; i < t->columns; i++) {
        sprintf(s->numbered[i], "column %lu", (unsigned long)i + 1);
        if (i == s->label_place) s->label = header ? t->cells[i] : s->numbered[i];
        if (used[i]) continue;
        if (add_features(t, header, i, s)) {
            free(used);
            return 1;
        }
    }
    free(used);
    if (s->n_features == 0)
        return fail(path, "no column is left to predict the label from; the table needs the label and one more");
    return 0;
}

/* Reports a cell that should be a number. */
static int bad_cell(const char *file, const csv_table *t, size_t row, const column *c, int kind) {
    char cell[CSV_SHOWN_SIZE], name[CSV_SHOWN_SIZE], skip[80] = ""; /* what is trained needs the column */
    const char *text = t->cells[row * t->columns + c->place];
    csv_shown(text, cell);
    csv_shown(c->name, name);
    if (file == path) sprintf(skip, ", or leave the column out with --skip %lu", (unsigned long)c->place + 1);
    fprintf(stderr, "csv: %s:%lu: column %lu (%s) ", file, (unsigned long)t->lines[row], (unsigned long)c->place + 1,
            name);
    if (kind == CSV_MISSING)
        fprintf(stderr, "has no value (\"%s\"): fill it in, or leave such lines out with --drop%s\n", cell, skip);
    else if (kind == CSV_INFINITE)
        fprintf(stderr, "is %s: numbers must be finite, at most 1e30 in magnitude; correct it%s\n", cell, skip);
    else if (strchr(text, ',') != NULL && t->separator != ',')
        fprintf(stderr, "is \"%s\": write numbers with a point, 3.5 and not 3,5\n", cell);
    else
        fprintf(stderr, "is \"%s\", which is not a number as %s: correct it%s%s\n", cell,
                file == path ? "most of this column are" : "those that the classifier was trained on", skip,
                row == 0 ? "; if this line holds the columns' names, add --header yes" : "");
    return 1;
}

/* The class of a label's text, or -1. growing: adds a new class if there is room. */
static int32_t class_of(schema *s, const char *text, int growing) {
    size_t c;
    for (c = 0; c < s->n_classes; c++)
        if (strcmp(s->classes[c], text) == 0) return (int32_t)c;
    if (!growing || s->n_classes == MOST_CLASSES) return -1;
    s->classes[s->n_classes++] = text;
    return (int32_t)c;
}

static int bad_label(const csv_table *t, const schema *s, size_t row, const char *text) {
    double value;
    char shown[CSV_SHOWN_SIZE];
    unsigned long line = (unsigned long)t->lines[row];
    if (csv_number(text, &value) == CSV_MISSING) {
        fprintf(stderr,
                "csv: %s:%lu: the label (column %lu) is missing (\"%s\"): fill it in, or leave such lines out with "
                "--drop\n",
                path, line, (unsigned long)s->label_place + 1, csv_shown(text, shown));
        return 1;
    }
    fprintf(stderr,
            "csv: %s:%lu: column %lu has more than %d different labels: is it the label? --label names another column; "
            "this program classifies; it does not do regression\n",
            path, line, (unsigned long)s->label_place + 1, MOST_CLASSES);
    return 1;
}

/* Reads one row of raw numbers; 0: used, 1: left out, -1: after an error message. */
static int read_row(const char *file, const csv_table *t, size_t row, schema *s, int growing, double *values,
                    int32_t *label) {
    char **cells = t->cells + row * t->columns;
    double value;
    for (size_t i = 0; i < s->n_features; i++) {
        const column *c = &s->features[i];
        int kind = csv_number(cells[c->place], &values[i]);
        if (c->word != NULL && kind != CSV_MISSING) {
            values[i] = strcmp(cells[c->place], c->word) == 0;
            continue;
        }
        if (kind == CSV_NUMBER && fabs(values[i]) > 1e30) kind = CSV_INFINITE;
        if (kind == CSV_MISSING && drop) return 1;
        if (kind != CSV_NUMBER) {
            bad_cell(file, t, row, &s->features[i], kind);
            return -1;
        }
    }
    *label = -1;
    if (s->label_place >= t->columns) return 0;
    if (growing && csv_number(cells[s->label_place], &value) == CSV_MISSING) {
        if (drop) return 1;
    } else {
        *label = class_of(s, cells[s->label_place], growing);
        if (!growing || *label >= 0) return 0;
    }
    bad_label(t, s, row, cells[s->label_place]);
    return -1;
}

/* Determines means and scales by the first n rows: by those that the network learns from. */
static void fit_scales(const samples *d, size_t n, schema *s) {
    for (size_t i = 0; i < s->n_features; i++) {
        column *c = &s->features[i];
        const double *values = d->values + i;
        double sum = 0, squares = 0;
        int varies = 0; /* the rounding errors of a constant column's mean are no deviation */
        for (size_t t = 0; t < n; t++) {
            sum += values[t * s->n_features] / (double)n;
            varies |= fabs(values[t * s->n_features] - values[0]) > 0;
        }
        if (!varies) sum = values[0];
        for (size_t t = 0; t < n; t++)
            squares += (values[t * s->n_features] - sum) / (double)n * (values[t * s->n_features] - sum);
        c->mean = sum;
        c->scale = squares > 0 ? sqrt(squares) : 1;
    }
}

/* Fails where a float would hold no number. */
static int standardize(const char *file, samples *d, const schema *s) {
    char name[CSV_SHOWN_SIZE];
    for (size_t i = 0; i < d->n * s->n_features; i++) {
        const column *c = &s->features[i % s->n_features];
        double x = (d->values[i] - c->mean) / c->scale;
        if (!(fabs(x) <= 1e30)) {
            fprintf(stderr, "csv: %s:%lu: column %lu (%s) is too far from the training lines: correct it\n", file,
                    (unsigned long)d->lines[i / s->n_features], (unsigned long)c->place + 1, csv_shown(c->name, name));
            return 1;
        }
        d->x[i] = (moe_real)x;
    }
    return 0;
}

/* Reads rows from `first` on as samples, not yet standardized. growing: determines the schema's
   classes. */
static int read_samples(const char *file, const csv_table *t, size_t first, schema *s, int growing, samples *d) {
    d->values = (double *)calloc(t->rows + 1, s->n_features * sizeof *d->values);
    d->x = (moe_real *)calloc(t->rows + 1, s->n_features * sizeof *d->x);
    d->labels = (int32_t *)calloc(t->rows + 1, sizeof *d->labels);
    d->lines = (size_t *)calloc(t->rows + 1, sizeof *d->lines);
    if (d->values == NULL || d->x == NULL || d->labels == NULL || d->lines == NULL) return fail(file, "out of memory");
    for (size_t row = first; row < t->rows; row++) {
        int left_out = read_row(file, t, row, s, growing, d->values + d->n * s->n_features, &d->labels[d->n]);
        if (left_out < 0) return 1;
        if (left_out) d->dropped++;
        else d->lines[d->n++] = t->lines[row];
    }
    return 0;
}

/* Reads the user's table: columns, then numbers, then checks whether it can be learned. */
static int read_table(csv_table *t, schema *s, samples *d) {
    int header;
    char why[200];
    if (csv_read(path, (size_t)-1, t)) return fail(path, t->why);
    if (t->columns < 2)
        return fail(path, "it has one column only; cells are separated by commas, semicolons, tabs or blanks");
    header = has_header(t);
    if (t->rows == (size_t)header) return fail(path, "there are no lines below the names");
    if (choose_columns(t, header, s) || read_samples(path, t, (size_t)header, s, 1, d)) return 1;
    if (d->n < 10) {
        sprintf(why, "%lu lines can be used%s; at least 10 are needed to learn from some and to be tested on others",
                (unsigned long)d->n, d->dropped > 0 ? " (--drop left out the others)" : "");
        return fail(path, why);
    }
    if (s->n_classes < 2) {
        sprintf(why, "all lines have the same label: is column %lu the label? --label names another",
                (unsigned long)s->label_place + 1);
        return fail(path, why);
    }
    if (2 * s->n_classes > d->n) {
        sprintf(why, "column %lu has %lu different labels in %lu lines: is it the label? --label names another",
                (unsigned long)s->label_place + 1, (unsigned long)s->n_classes, (unsigned long)d->n);
        return fail(path, why);
    }
    return 0;
}

/* ---- the classifier ---- */

/* Sets n_experts experts with matrices. Keeps the preset's ratio of experts without matrices to
   these, at least one of each kind, and lowers the number of groups until it fits. */
static void scale_experts(moe_router_config *c, int top_k_of_preset) {
    int *const without[] = {&c->n_zero, &c->n_copy, &c->n_constant};
    const int real = c->n_experts - c->n_zero - c->n_copy - c->n_constant;
    c->n_experts = (int)n_experts;
    for (int i = 0; i < 3; i++) {
        if (*without[i] > 0) *without[i] = 1 + (int)((*without[i] * n_experts - 1) / real);
        c->n_experts += *without[i];
    }
    if (top_k_of_preset > 0) c->bias_real = c->bias_real * (moe_real)c->top_k / (moe_real)top_k_of_preset;
    while (c->groups > 1 && (c->n_experts % c->groups != 0 || c->n_experts < 2 * c->groups ||
                             (c->select == MOE_SELECT_GROUPED_EACH && c->top_k % c->groups != 0)))
        c->groups--;
    if (c->groups_kept > c->groups) c->groups_kept = c->groups;
}

/* The network is one MoE layer, whose experts output the logits of the classes. If the layer adds
   its input to its output or has copy or constant experts, a linear layer follows. */
static moe_status build(moe_net *net, const schema *s, moe_error *error) {
    moe_layer_config config;
    moe_status status = moe_layer_preset(router != NULL ? router : "mixtral", &config, error);
    if (status != MOE_OK) return status;
    const int top_k_of_preset = config.router.top_k;
    config.router.top_k = (int)(top_k > 0                 ? top_k
                                : n_experts < 2           ? 1
                                : config.router.top_k < 2 ? config.router.top_k
                                                          : 2);
    scale_experts(&config.router, top_k_of_preset);
    const int copies = config.router.n_copy + config.router.n_constant > 0 || config.add_input;
    if (router == NULL) config.router.loss_balance = (moe_real)0.02; /* otherwise one expert would take everything */
    if (router == NULL && config.router.top_k == 1) config.router.weight = MOE_WEIGHT_RAW;
    /* a preset may need its own kind of experts */
    if (router == NULL) {
        config.expert = MOE_EXPERT_MLP;
        config.act = MOE_ACT_RELU;
    }
    config.d_ff = (int)width;
    config.d_out = (int)(copies ? s->n_features : s->n_classes);
    config.n_shared = config.shared_sigmoid = 0;
    moe_net_init(net, (int)s->n_features, kernels, NULL);
    moe_net_mixture(net, &config);
    if (copies) moe_net_linear(net, (int)s->n_classes);
    return moe_net_build(net, 1, (uint64_t)seed, error);
}

/* Shuffles the rows by the seed. */
static void shuffle(samples *d, size_t d_in, moe_rng rng) {
    for (size_t i = d->n; i > 1; i--) {
        size_t j = (size_t)moe_rng_below(&rng, i), line = d->lines[i - 1];
        int32_t label = d->labels[i - 1];
        for (size_t k = 0; k < d_in; k++) {
            double kept = d->values[(i - 1) * d_in + k];
            d->values[(i - 1) * d_in + k] = d->values[j * d_in + k];
            d->values[j * d_in + k] = kept;
        }
        d->lines[i - 1] = d->lines[j];
        d->labels[i - 1] = d->labels[j];
        d->lines[j] = line;
        d->labels[j] = label;
    }
}

static moe_history history;

static int show_progress(void *ctx, const moe_progress *p) {
    int terminal = isatty(1), last = p->epoch == p->epochs && p->epoch_ended;
    double point[3] = {(double)p->loss, (double)p->test.loss, (double)p->router_loss};
    *(moe_evaluation *)ctx = p->test; /* the last epoch's is kept */
    if (p->epoch_ended) (void)moe_history_add(&history, p->epoch, point, 3);
    if (!last && !(terminal ? p->step % 16 == 0 : p->epoch_ended && p->epoch % ((p->epochs + 5) / 6) == 0)) return 0;
    printf("%sepoch %d of %d: loss %.4f, router loss %.4f", terminal ? "\r" : "", p->epoch, p->epochs, (double)p->loss,
           (double)p->router_loss);
    if (p->test.n > 0) printf(", %.1f %% of the held-out lines right", 100.0 * (double)p->test.accuracy);
    printf("%*s%s", terminal && !last ? 40 : 0, "", terminal && !last ? "" : "\n");
    fflush(stdout);
    return 0;
}

/* The network's answers. */
typedef struct answers {
    moe_real *y;    /* [n,classes] */
    int32_t *first; /* [n] the expert with the largest weight; -1: no expert */
} answers;

static void free_answers(answers *a) {
    free(a->y);
    free(a->first);
    a->y = NULL;
    a->first = NULL;
}

/* Runs the network on n rows of x, 256 at a time. Adds routings to metrics unless it is NULL. */
static moe_status answer(const moe_net *net, size_t n, const moe_real *x, const int32_t *labels, answers *a,
                         moe_metrics *metrics) {
    enum { CALL = 256 };
    size_t d_in = (size_t)net->d_in, d_out = (size_t)net->d_out, bytes;
    moe_call call = {0};
    moe_net_pass pass;
    moe_status status = moe_net_work_size(net, CALL, 0, &bytes);
    void *work = status == MOE_OK ? malloc(bytes) : NULL;
    a->y = (moe_real *)calloc(n + 1, d_out * sizeof *a->y);
    a->first = (int32_t *)calloc(n + 1, sizeof *a->first);
    if (status == MOE_OK && (work == NULL || a->y == NULL || a->first == NULL)) status = MOE_ERR_MEMORY;
    for (size_t at = 0; at < n && status == MOE_OK; at += call.n_tokens) {
        const moe_routing *routing;
        call.n_tokens = n - at < CALL ? n - at : CALL;
        call.x = x + at * d_in;
        if ((status = moe_net_forward(net, &call, work, bytes, &pass)) != MOE_OK) break;
        routing = moe_net_routing(net, &pass, 0);
        memcpy(a->y + at * d_out, pass.y, call.n_tokens * d_out * sizeof *a->y);
        for (size_t t = 0; t < call.n_tokens; t++) {
            const moe_real *weights = routing->weights + t * routing->n_experts;
            int32_t best = -1;
            for (int32_t e = 0; e < (int32_t)routing->n_experts; e++)
                if ((weights[e] > 0 || weights[e] < 0) && (best < 0 || weights[e] > weights[best])) best = e;
            a->first[at + t] = best;
        }
        if (metrics != NULL) status = moe_metrics_add(metrics, routing, NULL, labels + at);
    }
    free(work);
    return status;
}

static size_t best_of(const moe_real *y, size_t n) {
    size_t best = 0;
    for (size_t c = 1; c < n; c++) best = y[c] > y[best] ? c : best;
    return best;
}

/* ---- which expert gets which rows ---- */

static void print_cut(const char *text, int columns) {
    char shown[CSV_SHOWN_SIZE];
    const int length = (int)strlen(csv_shown(text, shown));
    int n = columns < 0 ? -columns : columns;
    while (n < length && ((unsigned char)shown[n] & 0xc0) == 0x80) n--; /* not within a character */
    printf("%*.*s", columns, n, shown);
}

/* Prints which labels are confused. */
static void show_labels(const schema *s, const samples *d, const answers *a) {
    char shown[CSV_SHOWN_SIZE];
    printf("\n  label                lines   right   most often taken for\n");
    for (size_t c = 0; c < s->n_classes; c++) {
        size_t n = 0, right = 0;
        size_t most = s->n_classes, taken[MOST_CLASSES] = {0};
        for (size_t t = 0; t < d->n; t++) {
            size_t said = best_of(a->y + t * s->n_classes, s->n_classes);
            if (d->labels[t] != (int32_t)c) continue;
            n++;
            right += said == c;
            if (said == c) continue;
            taken[said]++;
            if (most == s->n_classes || taken[said] > taken[most]) most = said;
        }
        printf("  ");
        print_cut(s->classes[c], -16);
        printf("%10lu ", (unsigned long)n);
        if (n > 0) printf("%6.1f %%", 100.0 * (double)right / (double)n);
        if (most < s->n_classes) printf("   %s", csv_shown(s->classes[most], shown));
        printf("\n");
    }
}

static void print_feature(const column *c) {
    char shown[CSV_SHOWN_SIZE];
    printf("%s", csv_shown(c->name, shown));
    if (c->word != NULL) printf(" = %s", csv_shown(c->word, shown));
}

static void show_experts(const moe_report *r, const schema *s) {
    size_t shown = s->n_classes < 10 ? s->n_classes : 10, wide = 4;
    for (size_t c = 0; c < shown; c++) wide = strlen(s->classes[c]) > wide ? strlen(s->classes[c]) : wide;
    if (wide > 12) wide = 12;
    printf("\nHeld-out lines that went to each expert (a line goes to %.3g", r->experts_per_token);
    if (r->real_experts_per_token < r->experts_per_token)
        printf(", of which %.3g have matrices", r->real_experts_per_token);
    printf("):\n  expert");
    for (size_t c = 0; c < shown; c++) {
        printf(" ");
        print_cut(s->classes[c], (int)wide);
    }
    printf("%s      all  share\n", shown < s->n_classes ? " ..." : "");
    for (size_t e = 0; e < r->n_experts; e++) {
        printf("%8d", (int)e);
        for (size_t c = 0; c < shown; c++) printf(" %*.0f", (int)wide, r->classes[e * r->n_classes + c]);
        printf("%s %8.0f %5.1f%%\n", shown < s->n_classes ? "    " : "", r->load[e],
               r->n_assignments > 0 ? 100.0 * r->load[e] / r->n_assignments : 0.0);
    }
    printf("I(E;Y) = %.3f nats: information of the expert about the label (by chance: %.3f)\n", r->information,
           r->information_chance);
}

/* Statistics of the lines by first choice; the last of experts + 1: lines without an expert. */
typedef struct kinds {
    double *mean;  /* [experts + 1,features] in standard deviations */
    double *lines; /* [experts + 1] number of lines */
    size_t experts;
} kinds;

static int find_kinds(kinds *k, size_t experts, const schema *s, const samples *d, const answers *a) {
    k->experts = experts;
    k->mean = (double *)calloc(experts + 1, s->n_features * sizeof *k->mean);
    k->lines = (double *)calloc(experts + 1, sizeof *k->lines);
    if (k->mean == NULL || k->lines == NULL) return 1;
    for (size_t t = 0; t < d->n; t++) {
        const size_t e = a->first[t] < 0 ? experts : (size_t)a->first[t];
        double *mean = k->mean + e * s->n_features, n = ++k->lines[e];
        for (size_t i = 0; i < s->n_features; i++) mean[i] += ((double)d->x[t * s->n_features + i] - mean[i]) / n;
    }
    return 0;
}

static void free_kinds(kinds *k) {
    free(k->mean);
    free(k->lines);
    k->mean = k->lines = NULL;
}

/* The features by how far an expert's lines are from the mean of all, farthest first: the one after
   last; last = n: the first; n: there are no more. */
static size_t next_feature(const double *mean, size_t n, size_t last) {
    const double limit = last < n ? fabs(mean[last]) : HUGE_VAL;
    size_t best = n;
    for (size_t i = 0; i < n; i++)
        if ((fabs(mean[i]) < limit || (i > last && fabs(mean[i]) <= limit)) &&
            (best == n || fabs(mean[i]) > fabs(mean[best])))
            best = i;
    return best;
}

static void show_kinds(const kinds *k, const schema *s) {
    enum { SHOWN = 3 };
    printf("\nWhat the lines of each expert as first choice have in common (all lines; in standard deviations from the "
           "mean of the training lines):\n");
    for (size_t e = 0; e < k->experts + (k->lines[k->experts] > 0); e++) {
        const double *mean = k->mean + e * s->n_features;
        size_t best = s->n_features;
        if (e < k->experts) printf("%8d", (int)e);
        else printf("    none");
        printf(" %6.0f lines", k->lines[e]);
        for (int rank = 0; rank < SHOWN && k->lines[e] > 0; rank++) {
            best = next_feature(mean, s->n_features, best);
            if (best == s->n_features || !(fabs(mean[best]) >= 0.2)) break;
            printf("%s", rank > 0 ? "; " : ": ");
            print_feature(&s->features[best]);
            printf(" %+.1f", mean[best]);
        }
        printf("\n");
    }
}

/* ---- the report as figures ---- */

enum { SIDE = 60, MOST_FIGURES = 6 };

/* The map of first choices, for tables with two features. */
static int map_of(const moe_net *net, const schema *s, moe_figure *figure, int32_t *experts, double *axes) {
    moe_real *x = (moe_real *)malloc(SIDE * SIDE * 2 * sizeof *x);
    answers a = {0};
    int failed = x == NULL;
    for (size_t i = 0; i < SIDE * SIDE && !failed; i++) {
        x[2 * i] = (moe_real)(3 * (2 * ((double)(i % SIDE) + 0.5) / SIDE - 1));
        x[2 * i + 1] = (moe_real)(3 * (1 - 2 * ((double)(i / SIDE) + 0.5) / SIDE));
    }
    failed = failed || answer(net, SIDE * SIDE, x, NULL, &a, NULL) != MOE_OK;
    for (size_t i = 0; i < SIDE * SIDE && !failed; i++) experts[i] = a.first[i];
    for (size_t i = 0; i < SIDE && !failed; i++) {
        axes[i] = s->features[0].mean + s->features[0].scale * (double)x[2 * i];
        axes[SIDE + i] = s->features[1].mean + s->features[1].scale * (double)x[2 * i * SIDE + 1];
    }
    figure->kind = MOE_FIGURE_MAP;
    figure->title = "First choices in the plane of both columns";
    figure->rows = figure->columns = SIDE;
    figure->experts = experts;
    figure->x = axes;
    figure->y = axes + SIDE;
    figure->row_label = s->features[1].name;
    figure->column_label = s->features[0].name;
    free(x);
    free_answers(&a);
    return failed;
}

/* The number of lines and the accuracy of each label. */
static moe_figure labels_of(const schema *s, const samples *d, const answers *a, double *values) {
    static const char *const names[2] = {"held-out lines", "right (%)"};
    moe_figure figure = {0};
    for (size_t c = 0; c < 2 * s->n_classes; c++) values[c] = 0;
    for (size_t t = 0; t < d->n; t++) {
        double *row = values + 2 * d->labels[t];
        row[0]++;
        row[1] +=
            ((best_of(a->y + t * s->n_classes, s->n_classes) == (size_t)d->labels[t] ? 100 : 0) - row[1]) / row[0];
    }
    figure.kind = MOE_FIGURE_TABLE;
    figure.title = "Right answers by label";
    figure.rows = s->n_classes;
    figure.columns = 2;
    figure.values = values;
    figure.row_names = s->classes;
    figure.row_label = "label";
    figure.column_names = names;
    return figure;
}

static int save_report(const moe_net *net, const moe_report *r, const schema *s, const samples *held, const answers *a,
                       const kinds *k) {
    static const char *const curves[3] = {"training", "held out", "router"};
    static int32_t experts[SIDE * SIDE];
    static double axes[2 * SIDE], by_label[2 * MOST_CLASSES];
    moe_figure figures[MOST_FIGURES] = {{0}};
    const char **names = (const char **)calloc(s->n_features, sizeof *names);
    char title[200], shown[CSV_SHOWN_SIZE];
    moe_error error = {0};
    size_t n = 0;
    int failed = names == NULL ? fail(report_path, "out of memory") : 0;
    for (size_t i = 0; i < s->n_features && !failed; i++)
        names[i] = s->features[i].word != NULL ? s->features[i].word : s->features[i].name;
    figures[n] = moe_figure_classes(r);
    figures[n].title = "Experts and labels";
    figures[n].caption = "Held-out lines that the router sends to each expert, by their label.";
    figures[n].column_names = s->classes;
    figures[n].value_label = "lines";
    figures[n++].column_label = "label";
    figures[n] = moe_figure_load(r);
    figures[n++].value_label = "lines";
    figures[n].title = "What the lines of an expert have in common";
    figures[n].rows = k->experts;
    figures[n].columns = s->n_features;
    figures[n].caption = "Mean of each column over the lines that have the expert as their first choice, in standard "
                         "deviations from the mean of the training lines.";
    figures[n].values = k->mean;
    figures[n].column_names = names;
    figures[n].column_label = "column";
    figures[n].value_label = "st. dev.";
    figures[n++].decimals = 1;
    figures[n] = moe_figure_history(&history, 0, 3, curves);
    figures[n].title = "Loss over the epochs";
    figures[n].column_label = "epoch";
    figures[n++].value_label = "nats";
    if (s->n_features == 2 && !failed && map_of(net, s, &figures[n++], experts, axes))
        failed = fail(report_path, "out of memory");
    figures[n] = labels_of(s, held, a, by_label);
    n++;
    sprintf(title, "Experts of %s: which rows they get", csv_shown(path, shown));
    if (!failed && strcmp(report_path, "-") == 0) failed = report_write("csv", title, figures, n);
    else if (!failed && moe_report_save(report_path, title, figures, n, &error))
        failed = fail(report_path, error.message);
    else if (!failed) printf("\nreport     %s\n", report_path);
    free(names);
    return failed;
}

/* ---- files ---- */

static moe_status put(moe_stream *stream, const char *text) { return stream->write(stream->ctx, text, strlen(text)); }

/* A cell in quotes. */
static moe_status put_cell(moe_stream *stream, const char *text) {
    moe_status status = put(stream, "\"");
    for (; *text != '\0' && status == MOE_OK; text++)
        status = *text == '"' ? put(stream, "\"\"") : stream->write(stream->ctx, text, 1);
    return status == MOE_OK ? put(stream, "\"") : status;
}

static moe_status put_line(moe_stream *stream, const char *kind, const char *name, size_t number, double mean,
                           double scale) {
    char text[120];
    moe_status status = put(stream, kind);
    if (status == MOE_OK) status = put(stream, ",");
    if (status == MOE_OK) status = put_cell(stream, name);
    sprintf(text, ",%lu,%.17g,%.17g\n", (unsigned long)number, mean, scale);
    return status == MOE_OK ? put(stream, text) : status;
}

/* Writes the schema as a table, which is stored in the model's file under the metadata key
   "csv". */
static moe_status put_schema(moe_stream *stream, const schema *s) {
    moe_status status = put_line(stream, "label", s->label, s->label_place, (double)s->n_columns, 1);
    for (size_t c = 0; c < s->n_classes && status == MOE_OK; c++)
        status = put_line(stream, "class", s->classes[c], c, 0, 1);
    for (size_t i = 0; i < s->n_features && status == MOE_OK; i++) {
        const column *c = &s->features[i];
        if (c->word != NULL && (i == 0 || c[-1].place != c->place))
            status = put_line(stream, "words", c->name, c->place, 0, 1);
        if (status == MOE_OK)
            status = put_line(stream, c->word != NULL ? "word" : "feature", c->word != NULL ? c->word : c->name,
                              c->place, c->mean, c->scale);
    }
    return status == MOE_OK ? stream->write(stream->ctx, "", 1) : status;
}

typedef struct trained {
    const moe_net *net;
    const schema *s;
    const samples *d;
    size_t n_train;
    char name[C_NAME_SIZE + 1]; /* the model's C name, as examples/export.c derives it from the file's */
    moe_error *error;
} trained;

/* Writes the file of moe_net_write with an additional metadata entry. */
static moe_status write_model(void *ctx, moe_stream *stream) {
    const trained *k = (const trained *)ctx;
    moe_buffer plain = {0}, columns = {0};
    moe_stream plain_stream = moe_buffer_stream(&plain), columns_stream = moe_buffer_stream(&columns);
    moe_metadata entries[2] = {{"moe", NULL}, {"csv", NULL}};
    moe_file file;
    size_t length = 0;
    char *text = NULL;
    moe_status status = moe_net_write(k->net, &plain_stream, k->error);
    if (status == MOE_OK) status = moe_file_open(&file, plain.data, plain.size, k->error);
    if (status == MOE_OK && moe_file_metadata(&file, "moe", NULL, 0, &length) == MOE_ERR_SPACE &&
        (text = (char *)malloc(length + 1)) != NULL)
        status = moe_file_metadata(&file, "moe", text, length + 1, NULL);
    if (status == MOE_OK && text == NULL) status = MOE_ERR_MEMORY;
    if (status == MOE_OK) status = put_schema(&columns_stream, k->s);
    entries[0].value = text;
    entries[1].value = (const char *)columns.data;
    if (status == MOE_OK)
        status = moe_file_write(stream, k->net->tensors, k->net->n_tensors, entries, 2, NULL, k->error);
    moe_buffer_free(&plain);
    moe_buffer_free(&columns);
    free(text);
    return status;
}

/* Standardized rows of the training set, the label's number last: the --calibration of
   examples/export.c. */
static moe_status write_calibration(void *ctx, moe_stream *stream) {
    const trained *k = (const trained *)ctx;
    size_t n = k->n_train < 1000 ? k->n_train : 1000;
    moe_status status = MOE_OK;
    char text[60];
    for (size_t t = 0; t < n && status == MOE_OK; t++) {
        for (size_t i = 0; i < k->s->n_features && status == MOE_OK; i++) {
            sprintf(text, "%.6g,", (double)k->d->x[t * k->s->n_features + i]);
            status = put(stream, text);
        }
        sprintf(text, "%d\n", (int)k->d->labels[t]);
        if (status == MOE_OK) status = put(stream, text);
    }
    return status;
}

/* Writes a C string literal. */
static moe_status put_string(moe_stream *stream, const char *text) {
    char escaped[8];
    moe_status status = put(stream, "\"");
    for (; *text != '\0' && status == MOE_OK; text++) {
        sprintf(escaped, isalnum((unsigned char)*text) || *text == ' ' ? "%c" : "\\%03o", (unsigned char)*text);
        status = put(stream, escaped);
    }
    return status == MOE_OK ? put(stream, "\"") : status;
}

/* Writes {a, b, ...}: means, scales, or a held-out row with its original values. */
static moe_status put_numbers(moe_stream *stream, const schema *s, const moe_real *row, int scales) {
    moe_status status = put(stream, "{");
    char text[60];
    for (size_t i = 0; i < s->n_features && status == MOE_OK; i++) {
        const column *c = &s->features[i];
        double value = row != NULL ? (double)row[i] * c->scale + c->mean : scales ? c->scale : c->mean;
        sprintf(text, "%s(float)%.7g", i > 0 ? ", " : "", value);
        status = put(stream, text);
    }
    return status == MOE_OK ? put(stream, "}") : status;
}

/* The program; @ is replaced by the model's name, # by the name in capitals. */
static moe_status put_program(moe_stream *stream, const char *text, const char *name) {
    moe_status status = MOE_OK;
    for (; *text != '\0' && status == MOE_OK; text++) {
        if (*text == '@') status = put(stream, name);
        else if (*text != '#' || text[1] == 'i' || text[1] == 'd') status = stream->write(stream->ctx, text, 1);
        else
            for (const char *n = name; *n != '\0' && status == MOE_OK; n++) {
                char capital = (char)toupper((unsigned char)*n);
                status = stream->write(stream->ctx, &capital, 1);
            }
    }
    return status;
}

/* Classes, means, scales, rows, their labels and their lines, as C. */
static moe_status put_firmware_tables(moe_stream *stream, const trained *k) {
    const schema *s = k->s;
    const size_t n = k->d->n - k->n_train < DEVICE_ROWS ? k->d->n - k->n_train : DEVICE_ROWS;
    char text[120];
    moe_status status;
    sprintf(text, "enum { ROWS = %lu };\nstatic const char *const classes[] = {", (unsigned long)n);
    status = put(stream, text);
    for (size_t c = 0; c < s->n_classes && status == MOE_OK; c++) {
        status = c > 0 ? put(stream, ", ") : MOE_OK;
        if (status == MOE_OK) status = put_string(stream, s->classes[c]);
    }
    for (int scales = 0; scales < 2 && status == MOE_OK; scales++) {
        status = put(stream, scales ? ";\nstatic const float scales[] = " : "};\nstatic const float means[] = ");
        if (status == MOE_OK) status = put_numbers(stream, s, NULL, scales);
    }
    sprintf(text, ";\nstatic const float rows[ROWS][%lu] = {\n", (unsigned long)s->n_features);
    if (status == MOE_OK) status = put(stream, text);
    for (size_t t = k->n_train; t < k->n_train + n && status == MOE_OK; t++) {
        status = put(stream, "    ");
        if (status == MOE_OK) status = put_numbers(stream, s, k->d->x + t * s->n_features, 0);
        if (status == MOE_OK) status = put(stream, ",\n");
    }
    for (int lines = 0; lines < 2 && status == MOE_OK; lines++) {
        status =
            put(stream, lines ? "};\nstatic const unsigned lines[ROWS] = {" : "};\nstatic const int labels[ROWS] = {");
        for (size_t t = k->n_train; t < k->n_train + n && status == MOE_OK; t++) {
            sprintf(text, "%s%lu", t > k->n_train ? ", " : "",
                    lines ? (unsigned long)k->d->lines[t] : (unsigned long)k->d->labels[t]);
            status = put(stream, text);
        }
    }
    return status == MOE_OK ? put(stream, "};\n\n") : status;
}

static moe_status write_firmware(void *ctx, moe_stream *stream) {
    static const char begin[] =
        "/* Classifies held-out lines of a table with an integer MoE model. "
        "Written by examples/csv.c; @.h is what\n"
        "   examples/export.c writes. It prints with stdio, in an emulator by semihosting; "
        "replace that on your own board. */\n"
        "#define MOE_IMPLEMENTATION\n"
        "#define MOE_NO_FLOAT /* integers only */\n"
        "#include \"@.h\"\n"
        "#include <stdio.h>\n\n";
    static const char end[] =
        "/* The model's input: the number of standard deviations from the mean, quantized. */\n"
        "static int8_t quantize(float value, float mean, float scale) {\n"
        "    float v = (value - mean) / (scale * (float)#_INPUT_SCALE);\n"
        "    return (int8_t)(v > 127 ? 127 : v < -127 ? -127 : v < 0 ? v - 0.5f : v + 0.5f);\n"
        "}\n\n"
        "int main(void) {\n"
        "    static unsigned char scratch[#_SCRATCH];\n"
        "    int8_t input[#_INPUTS];\n"
        "    int16_t output[#_OUTPUTS];\n"
        "    moe_choice choice = {0, 0};\n"
        "    size_t count = 0;\n"
        "    int row, i, best, right = 0;\n"
        "    for (row = 0; row < ROWS; row++) {\n"
        "        for (i = 0; i < #_INPUTS; i++) input[i] = quantize(rows[row][i], means[i], scales[i]);\n"
        "        if (moe_infer(&@, NULL, input, output, scratch, sizeof scratch) != MOE_OK) return puts(\"the model "
        "cannot run\"), 1;\n"
        "        for (best = 0, i = 1; i < #_OUTPUTS; i++) best = output[i] > output[best] ? i : best;\n"
        "        if (moe_infer_choices(&@, 0, scratch, &choice, 1, &count) != MOE_OK) return 1;\n"
        "        printf(\"line %u: %s, it is %s; expert %d\\n\", lines[row], classes[best], classes[labels[row]], "
        "(int)choice.expert);\n"
        "        right += best == labels[row];\n"
        "    }\n"
        "    printf(\"%d of %d right\\n\", right, ROWS);\n"
        "    return 0;\n"
        "}\n";
    const trained *k = (const trained *)ctx;
    moe_status status = put_program(stream, begin, k->name);
    if (status == MOE_OK) status = put_firmware_tables(stream, k);
    return status == MOE_OK ? put_program(stream, end, k->name) : status;
}

static int save(trained *k) {
    char calibration[PATH_SIZE], header[PATH_SIZE];
    moe_error error = {0};
    if (save_path == NULL) return 0;
    k->error = &error;
    c_name_of_file(save_path, k->name);
    beside(save_path, ".calibration.csv", calibration);
    if (moe_file_replace(save_path, write_model, k, &error)) return fail(save_path, error.message);
    if (moe_file_replace(calibration, write_calibration, k, &error)) return fail(calibration, error.message);
    if (firmware_path != NULL && moe_file_replace(firmware_path, write_firmware, k, &error))
        return fail(firmware_path, error.message);
    printf("\nsaved as %s (with the columns' names, means and scales), calibration rows as %s\n", save_path,
           calibration);
    printf("predict:   sh examples/run csv --load '%s' --predict OTHER.csv\n", save_path);
    printf("as C:      sh examples/run export '%s' --calibration '%s' -o '%s'\n", save_path, calibration,
           header_of(k->name, header));
    if (firmware_path != NULL)
        printf("emulator:  sh examples/mcu/run cortex-m4 '%s' (it includes '%s')\n", firmware_path, header);
    return 0;
}

/* ---- prediction ---- */

/* Reads a number of the schema's table; 0 if it is not in [least, most]. */
static int schema_number(const csv_table *t, size_t row, size_t cell, double least, double most, double *value) {
    return csv_number(t->cells[row * t->columns + cell], value) == CSV_NUMBER && *value >= least && *value <= most;
}

/* Parses the table of put_schema; the file is untrusted. */
static int read_schema(const csv_table *t, schema *s) {
    const char *words = NULL; /* the column whose words follow */
    s->features = (column *)calloc(t->rows + 1, sizeof *s->features);
    if (s->features == NULL || t->columns != 5) return 1;
    for (size_t row = 0; row < t->rows; row++) {
        const char *kind = t->cells[row * 5];
        double number, mean, scale;
        if (!schema_number(t, row, 2, 0, 1e9, &number) || !schema_number(t, row, 3, -1e30, 1e30, &mean) ||
            !schema_number(t, row, 4, 0, 1e30, &scale))
            return 1;
        if (!(scale > 0)) return 1;
        if (strcmp(kind, "label") == 0) {
            s->label = t->cells[row * 5 + 1];
            s->label_place = (size_t)number;
            s->n_columns = mean >= 0 && mean <= 1e9 ? (size_t)mean : 0;
        } else if (strcmp(kind, "class") == 0 && s->n_classes < MOST_CLASSES)
            s->classes[s->n_classes++] = t->cells[row * 5 + 1];
        else if (strcmp(kind, "words") == 0) {
            words = t->cells[row * 5 + 1];
            s->n_sources++;
        } else if (strcmp(kind, "word") == 0 && words != NULL) {
            column c = {words, t->cells[row * 5 + 1], (size_t)number, s->n_sources - 1, mean, scale};
            s->features[s->n_features++] = c;
        } else if (strcmp(kind, "feature") == 0) {
            column c = {t->cells[row * 5 + 1], NULL, (size_t)number, s->n_sources++, mean, scale};
            s->features[s->n_features++] = c;
        } else return 1;
    }
    return s->label == NULL || s->n_classes < 1 || s->n_features < 1;
}

static int load(moe_net *net, csv_table *t, schema *s) {
    moe_buffer bytes = {0};
    moe_stream stream = moe_buffer_stream(&t->text);
    moe_error error = {0};
    moe_file file;
    size_t length = 0;
    char *text = NULL;
    int failed = 0;
    if (moe_file_read(load_path, &bytes, &error) || moe_file_open(&file, bytes.data, bytes.size, &error) ||
        moe_net_read(net, bytes.data, bytes.size, 0, kernels, NULL, &error)) {
        failed = fail(load_path, error.message);
        fprintf(stderr, "csv: --load takes what --save wrote\n");
    } else if (moe_file_metadata(&file, "csv", NULL, 0, &length) == MOE_ERR_NOT_FOUND)
        failed = fail(load_path,
                      "it does not describe a table's columns: was it saved by sh examples/run csv FILE.csv --save?");
    else if ((text = (char *)malloc(length + 1)) == NULL || moe_file_metadata(&file, "csv", text, length + 1, NULL) ||
             stream.write(stream.ctx, text, strlen(text) + 1))
        failed = fail(load_path, "out of memory");
    else if (csv_cut(t, (size_t)-1) || read_schema(t, s) || s->n_features != (size_t)net->d_in ||
             s->n_classes != (size_t)net->d_out || net->modules[0].kind != MOE_MODULE_MIXTURE ||
             (net->n_modules > 1 && (net->n_modules != 2 || net->modules[1].kind != MOE_MODULE_LINEAR)))
        failed = fail(load_path, "its description of the table's columns does not match its network");
    moe_buffer_free(&bytes);
    free(text);
    return failed;
}

/* A column by its name, even if that is a number; of several the one at its place in the training
   table. */
static size_t named_column(const csv_table *t, const char *name, size_t place) {
    if (place < t->columns && strcmp(t->cells[place], name) == 0) return place;
    for (place = 0; place < t->columns && strcmp(t->cells[place], name) != 0;) place++;
    return place;
}

static int is_repeated(const csv_table *t, const char *name) {
    size_t n = 0;
    for (size_t i = 0; i < t->columns; i++) n += strcmp(t->cells[i], name) == 0;
    return n > 1;
}

/* Finds the schema's columns in another table: by name if both have names, else by position. */
static int match_columns(const csv_table *t, int header, schema *s) {
    char unnamed[32];
    sprintf(unnamed, "column %lu", (unsigned long)s->label_place + 1);
    header = header && strcmp(s->label, unnamed) != 0;
    size_t label = header ? named_column(t, s->label, s->label_place) : t->columns;
    int by_order = !header && t->columns == s->n_sources; /* without the label and the skipped columns */
    char why[400], shown[CSV_SHOWN_SIZE];
    for (size_t i = 0; i < s->n_features; i++) {
        column *c = &s->features[i];
        size_t place = header ? named_column(t, c->name, c->place) : by_order ? c->source : c->place;
        if (place >= t->columns) {
            sprintf(why,
                    header ? "there is no column %s, which the classifier was trained on; it has %lu columns"
                           : "there is no %s; it has %lu columns, the training table had %lu",
                    csv_shown(c->name, shown), (unsigned long)t->columns, (unsigned long)s->n_columns);
            return fail(predict_path, why);
        }
        if (header && place != c->place && is_repeated(t, c->name)) {
            sprintf(why, "there are several columns %s, and column %lu, which the classifier was trained on, is none",
                    csv_shown(c->name, shown), (unsigned long)c->place + 1);
            return fail(predict_path, why);
        }
        c->place = place;
    }
    s->label_place = header ? label : by_order ? t->columns : s->label_place;
    return 0;
}

/* Prints a label as a cell: in quotes if it holds a separator or a quote. */
static void print_label(const char *text) {
    const int quoted = strpbrk(text, ",\"") != NULL;
    if (quoted) putchar('"');
    for (; *text != '\0'; text++) {
        if (*text == '"') putchar('"');
        putchar((unsigned char)*text < 0x20 || *text == 0x7f ? '?' : *text);
    }
    if (quoted) putchar('"');
}

static double probability(const moe_real *y, size_t n, size_t best) {
    double sum = 0;
    for (size_t c = 0; c < n; c++) sum += exp((double)y[c] - (double)y[best]);
    return 1 / sum;
}

static int predict(const moe_net *net, schema *s) {
    csv_table t = {.rows = 0};
    samples d = {0};
    answers a = {0};
    size_t right = 0, known = 0;
    int header = 0, failed = csv_read(predict_path, (size_t)-1, &t) ? fail(predict_path, t.why) : 0;
    if (!failed) header = has_header(&t);
    failed = failed || match_columns(&t, header, s) || read_samples(predict_path, &t, (size_t)header, s, 0, &d);
    failed = failed || standardize(predict_path, &d, s);
    if (!failed && answer(net, d.n, d.x, NULL, &a, NULL))
        failed = fail(predict_path, "out of memory, or a number is too far from the training data");
    if (!failed) printf("line,label,probability,expert\n");
    for (size_t i = 0; i < d.n && !failed; i++) {
        size_t best = best_of(a.y + i * s->n_classes, s->n_classes);
        printf("%lu,", (unsigned long)d.lines[i]);
        print_label(s->classes[best]);
        printf(",%.3f,%d\n", probability(a.y + i * s->n_classes, s->n_classes, best), (int)a.first[i]);
        known += d.labels[i] >= 0;
        right += d.labels[i] == (int32_t)best;
    }
    if (!failed && known > 0)
        fprintf(stderr, "%lu of the %lu lines with a known label are right\n", (unsigned long)right,
                (unsigned long)known);
    free_answers(&a);
    free_samples(&d);
    csv_free(&t);
    return failed;
}

/* ---- training ---- */

/* The share of the most frequent label: the accuracy of a constant classifier. */
static double most_frequent(const schema *s, const samples *d) {
    size_t best = 0;
    for (size_t c = 0; c < s->n_classes; c++) {
        size_t n = 0;
        for (size_t t = 0; t < d->n; t++) n += d->labels[t] == (int32_t)c;
        best = n > best ? n : best;
    }
    return (double)best / (double)d->n;
}

static void show_table(const csv_table *t, const schema *s, const samples *d) {
    char shown[CSV_SHOWN_SIZE];
    printf("read       %s: %lu lines", path, (unsigned long)d->n);
    if (d->dropped > 0) printf(" (%lu with missing values left out)", (unsigned long)d->dropped);
    printf(", %lu numbers each, %lu labels in column %lu (%s)\n", (unsigned long)s->n_features,
           (unsigned long)s->n_classes, (unsigned long)s->label_place + 1, csv_shown(s->label, shown));
    if (t->separator != ',')
        printf("           separated by %s\n", t->separator == ';'    ? "semicolons"
                                               : t->separator == '\t' ? "tabs"
                                                                      : "blanks");
}

static int train(moe_net *net, const schema *s, const samples *d, size_t n_train, moe_evaluation *result) {
    moe_train_config training = {0};
    moe_error error = {0};
    moe_data rows = {.n = n_train, .x = d->x, .labels = d->labels};
    moe_data held = {.n = d->n - n_train, .x = d->x + n_train * s->n_features, .labels = d->labels + n_train};
    long wanted = (long)(STEPS * BATCH / n_train);
    training.progress = show_progress;
    training.progress_ctx = result;
    training.epochs = (int)(epochs > 0 ? epochs : wanted < 5 ? 5 : wanted > 200 ? 200 : wanted);
    training.batch = BATCH;
    training.seed = (uint64_t)seed;
    training.rate = (moe_real)0.005;
    training.final_rate = (moe_real)0.05;
    training.decay = (moe_real)0.02;
    training.clip = 1;
    if (build(net, s, &error) || moe_fit(net, &rows, &held, &training, &error)) return fail("training", error.message);
    return 0;
}

static int show(const moe_net *net, const schema *s, const samples *d, size_t n_train, const moe_evaluation *result) {
    samples held = {.x = d->x + n_train * s->n_features, .labels = d->labels + n_train, .n = d->n - n_train};
    size_t experts = (size_t)net->modules[0].layer.config.router.n_experts, bytes = 0;
    moe_metrics metrics;
    moe_report report;
    answers of_held = {0}, of_all = {0};
    kinds k = {0};
    void *memory = moe_metrics_size(experts, s->n_classes, &bytes) == MOE_OK ? malloc(bytes) : NULL;
    int failed = memory == NULL || moe_metrics_init(&metrics, experts, s->n_classes, memory, bytes) ||
                 answer(net, held.n, held.x, held.labels, &of_held, &metrics) ||
                 moe_metrics_report(&metrics, &report) || answer(net, d->n, d->x, NULL, &of_all, NULL) ||
                 find_kinds(&k, experts, s, d, &of_all);
    if (failed) failed = fail("testing", "out of memory");
    else {
        printf("held-out accuracy %.1f %% of %lu lines; the most frequent label alone would reach %.1f %%\n",
               100.0 * (double)result->accuracy, (unsigned long)held.n, 100 * most_frequent(s, &held));
        show_labels(s, &held, &of_held);
        show_experts(&report, s);
        show_kinds(&k, s);
        if (report_path != NULL) failed = save_report(net, &report, s, &held, &of_held, &k);
    }
    free_answers(&of_held);
    free_answers(&of_all);
    free_kinds(&k);
    free(memory);
    return failed;
}

static int learn(moe_net *net, csv_table *t, schema *s) {
    samples d = {0};
    moe_evaluation result = {0};
    trained k = {.net = net, .s = s, .d = &d};
    moe_rng rng;
    int failed = read_table(t, s, &d);
    k.n_train = d.n - d.n / 5;
    moe_rng_seed(&rng, (uint64_t)seed);
    if (!failed) {
        show_table(t, s, &d);
        shuffle(&d, s->n_features, rng);
        fit_scales(&d, k.n_train, s);
        failed = standardize(path, &d, s);
    }
    failed = failed || train(net, s, &d, k.n_train, &result) || show(net, s, &d, k.n_train, &result) || save(&k);
    free_samples(&d);
    return failed;
}

/* Of routers that cannot route a line alone. */
static void warn_of_other_lines(const moe_net *net) {
    moe_error why;
    if (moe_net_decode_size(net, 1, 1, NULL, NULL, &why) != MOE_OK)
        fprintf(stderr, "note: the answer for a line depends on the lines before and after it: %s\n", why.message);
}

int main(int count, char **words) {
    csv_table table = {.rows = 0};
    schema s = {0};
    moe_net net = {0};
    int failed;
    if (read_options(count, words)) return EXIT_USAGE;
    if ((failed = report_checked("csv")) != 0) return failed;
    if (save_path != NULL && not_writable(save_path) != NULL) return fail(save_path, not_writable(save_path));
    if (firmware_path != NULL && not_writable(firmware_path) != NULL)
        return fail(firmware_path, not_writable(firmware_path));
    if (predict_path != NULL && !file_is_there(predict_path)) return fail(predict_path, "cannot be opened");
    failed = load_path != NULL ? load(&net, &table, &s) : learn(&net, &table, &s);
    if (!failed) warn_of_other_lines(&net);
    failed = failed || (predict_path != NULL && predict(&net, &s)) || finish();
    moe_net_free(&net);
    free_schema(&s);
    csv_free(&table);
    return failed;
}
