/* Texts from strangers: the tables, words, options and settings that the library and its examples
   read. An input is a line that names the reader, a line of options with spaces between them, and
   what the file holds. This file is compiled once for each example, which it includes with a
   function around its readers, and once for the program (sh tests/fuzz/fuzz.sh does it):
     for e in QUICKSTART QUANTIZE MICRODIGITS DIGITS EXPORT CSV COMPARE TEXT \
         LANGUAGE ROUTERS STUDIES; do
         cc -std=c99 -O1 -I. -DREAD_$e -c tests/fuzz/fuzz_text.c -o $e.o
     done
     cc -std=c99 -O1 -I. tests/fuzz/fuzz_text.c *.o -o fuzz_text -lm
   With libFuzzer: clang -fsanitize=fuzzer-no-link,address,undefined, and for the program
   -DFUZZ_ENGINE -fsanitize=fuzzer,address,undefined. An example's fopen opens the input, what it
   prints goes nowhere, and its exit comes back. */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* as examples/bench/bench.c */
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An example's readers at work on options[1..count-1] and the file; 0: taken, 1: refused. */
#define READERS(X) \
    X(quickstart) X(quantize) X(microdigits) X(export) X(csv) \
    X(bench) X(text) X(language) X(routers)
#define READER(name) int take_##name(int count, char **argv, const char *contents, size_t size);
READERS(READER)

extern FILE *fuzz_nowhere;
FILE *fuzz_fopen(const char *path, const char *mode);
void fuzz_exit(int status);
int fuzz_remove(const char *path);

#if defined(READ_QUICKSTART) || defined(READ_QUANTIZE) || defined(READ_MICRODIGITS) || defined(READ_EXPORT) || \
    defined(READ_CSV) || defined(READ_BENCH) || defined(READ_TEXT) || defined(READ_LANGUAGE) || defined(READ_ROUTERS)

/* ---- an example ---- */

/* The examples bring the library with them; here the program has it. */
#define MOEI_KERNELS_IMPLEMENTED
#define MOEI_ROUTERS_IMPLEMENTED
#define MOEI_MOE_IMPLEMENTED
#define MOEI_REPORT_IMPLEMENTED
#define MOEI_EXPORT_IMPLEMENTED
#define MOEI_CLASSIC_IMPLEMENTED
#define MOEI_IMPORT_IMPLEMENTED
#define MOEI_RANKS_IMPLEMENTED
#define MOEI_LAYOUT_IMPLEMENTED
#define MOEI_BLOCKS_IMPLEMENTED
#define MOEI_CHECK_IMPLEMENTED
#define MOEI_UPCYCLE_IMPLEMENTED
#define MOEI_SMOOTH_IMPLEMENTED

#undef stdout
#undef stderr
#define stdout fuzz_nowhere
#define stderr fuzz_nowhere
#define printf(...) fprintf(fuzz_nowhere, __VA_ARGS__)
#define fopen fuzz_fopen
#define exit fuzz_exit
#define remove fuzz_remove
#define moe_file_replace fuzz_replace /* which the examples' copy of moe.h declares by this name */

/* What an input before this one has set. */
#define UNSAID "file"

#ifdef READ_QUICKSTART
#define main quickstart_main
#include "examples/quickstart.c"

int take_quickstart(int count, char **argv, const char *contents, size_t size) {
    moe_rng rng;
    FILE *f;
    int refused;
    (void)contents;
    (void)size;
    epochs = 30;
    seed = 1;
    kernels = 0;
    data_path = report_path = NULL;
    output = "digits.safetensors";
    if (read_options(count, argv)) return 1;
    data_path = UNSAID;
    moe_rng_seed(&rng, (uint64_t)seed);
    if ((f = fopen(data_path, "rb")) == NULL) return 1;
    refused = read_rows(data_path, f, rng) == 0;
    fclose(f);
    return refused;
}
#endif

#ifdef READ_QUANTIZE
#define main quantize_main
#include "examples/quantize.c"

int take_quantize(int count, char **argv, const char *contents, size_t size) {
    moe_rng rng;
    (void)contents;
    (void)size;
    epochs = 30;
    first_seed = 1;
    data_path = UNSAID;
    if (read_options(count, argv)) return 1;
    moe_rng_seed(&rng, (uint64_t)first_seed);
    return read_rows(rng) == 0;
}
#endif

#ifdef READ_MICRODIGITS
#define main microdigits_main
#include "examples/microdigits.c"

int take_microdigits(int count, char **argv, const char *contents, size_t size) {
    static moe_real numbers[MAX_ROWS * PIXELS];
    static int32_t classes[MAX_ROWS];
    moe_rng rng;
    (void)contents;
    (void)size;
    epochs = 30;
    seed = 1;
    data_path = report_path = NULL;
    header = "digits.h";
    saved = "digits.safetensors";
    if (read_options(count, argv)) return 1;
    moe_rng_seed(&rng, (uint64_t)seed);
    return microdigits_rows(UNSAID, numbers, classes, rng) == 0;
}
#endif

#ifdef READ_EXPORT
#define main export_main
#include "examples/export.c"

/* Rows for a network of 3 inputs and 2 outputs, or with --tokens for one of 200 bytes. */
int take_export(int count, char **argv, const char *contents, size_t size) {
    moe_net net = {0};
    samples s = {0};
    int refused;
    (void)contents;
    (void)size;
    path = output = rows_path = text_path = report_path = NULL;
    *name = '\0';
    weights = MOE_WEIGHTS_INT8;
    most_rows = 2000;
    length = 128;
    divisor = 1;
    if (read_options(count, argv)) return 1;
    if (strlen(name) > C_NAME_SIZE) abort();
    if (most_rows > 2000) most_rows = 2000; /* memory for a million is the user's wish */
    if (moe_net_init(&net, text_path != NULL ? 0 : 3, MOE_KERNELS_C, NULL) != MOE_OK ||
        (text_path != NULL && moe_net_embedding(&net, 200, 2) != MOE_OK) ||
        moe_net_linear(&net, text_path != NULL ? 200 : 2) != MOE_OK)
        abort();
    refused = read_samples(&s, &net, text_path != NULL);
    moe_net_free(&net);
    free(s.x);
    free(s.ids);
    free(s.labels);
    return refused;
}
#endif

#ifdef READ_CSV
#define main csv_main
#include "examples/csv.c"

/* A table as the program reads it before it learns; with --load a saved description of one, which
   --predict then matches with itself as a table. */
int take_csv(int count, char **argv, const char *contents, size_t size) {
    csv_table t = {.rows = 0};
    schema s = {0};
    samples d = {0};
    int refused;
    (void)contents;
    (void)size;
    path = label_wanted = skipped = header_wanted = router = report_path = save_path = firmware_path = predict_path =
        load_path = training_option = NULL;
    n_experts = 4;
    top_k = 0;
    width = 16;
    epochs = 0;
    seed = 1;
    drop = 0;
    kernels = 0;
    if (read_options(count, argv)) return 1;
    if (load_path == NULL) {
        refused = read_table(&t, &s, &d);
        if (!refused && (d.n < 10 || s.n_classes < 2 || s.n_features == 0)) abort();
        for (size_t i = 0; i < d.n && !refused; i++)
            if (d.labels[i] < 0 || (size_t)d.labels[i] >= s.n_classes || d.lines[i] == 0) abort();
    } else {
        refused = csv_read(UNSAID, (size_t)-1, &t) || read_schema(&t, &s) || match_columns(&t, has_header(&t), &s);
        for (size_t i = 0; i < s.n_features && !refused; i++)
            if (s.features[i].place >= t.columns) abort();
    }
    free_samples(&d);
    free_schema(&s);
    csv_free(&t);
    return refused;
}
#endif

#ifdef READ_BENCH
#define main bench_main
#include "examples/bench/bench.c"

/* Rows of runs: what was read is written and read again. */
int take_bench(int count, char **argv, const char *contents, size_t size) {
    static char line[2 * LINE];
    static row again;
    int refused;
    (void)contents;
    (void)size;
    memset(&options, 0, sizeof options);
    report_path = NULL;
    if (read_options(count, argv)) return 1;
    forget_rows();
    refused = read_part(UNSAID, 0);
    for (size_t i = 0; i < n_rows; i++) {
        row_line(&rows[i], line);
        if (!read_row(line, &again) || again.seed != rows[i].seed) abort();
        if (strcmp(again.f.lists, rows[i].f.lists) != 0) abort();
    }
    return refused;
}
#endif

#ifdef READ_TEXT
#define main text_main
#include "examples/text.c"

/* A list of words, which is then looked up in itself; with --words instead a text, from which the
   list is made. */
int take_text(int count, char **argv, const char *contents, size_t size) {
    static unsigned char usual[sizeof set];
    static int known;
    model m = {.n_words = 0};
    moe_stream stream = moe_buffer_stream(&m.list);
    size_t n = 0, at = 0;
    int refused;
    if (!known) {
        memcpy(usual, &set, sizeof set);
        known = 1;
    }
    memcpy(&set, usual, sizeof set);
    set.quiet = 1;
    report_path = NULL;
    if (read_options(count, argv)) return 1;
    if (set.words) refused = find_words(&m, (const unsigned char *)contents, size);
    else refused = stream.write(stream.ctx, contents, size) != MOE_OK || read_words(&m, UNSAID);
    if (!refused) {
        int32_t *ids = encode(&m, contents, size, &n);
        for (size_t i = 0; i < n; i++) {
            if (ids[i] < 0 || (size_t)ids[i] >= m.n_words) abort();
            at += m.words[ids[i]].n;
        }
        if (set.words && set.vocabulary > (long)size && strstr(contents, "<unk>") == NULL && at != size) abort();
    }
    free_model(&m);
    release();
    return refused;
}
#endif

#ifdef READ_LANGUAGE
#include "moe.h"
#include "examples/language.h"

/* Bytes and words of the text, learned from its first part. */
int take_language(int count, char **argv, const char *contents, size_t size) {
    moe_buffer bytes = {0}, train = {0};
    moe_buffer held = {0};
    moe_error error;
    const char *path = UNSAID;
    int words, refused = language_read(&path, 1, &bytes, &error) != MOE_OK, most = count > 1 ? atoi(argv[1]) : 9;
    (void)contents;
    (void)size;
    if (most < 2 || most > 100000) most = 2;
    refused = refused || language_split(&bytes, 3, 0.25, &train, &held, &error) != MOE_OK;
    if (!refused && (train.size + held.size != bytes.size)) abort();
    for (words = 0; words < 2 && !refused; words++) {
        language l;
        language_text text = {0};
        int32_t ids[12], labels[12];
        refused = language_learn(&l, &train, words, most, &error) != MOE_OK ||
                  language_encode(&l, &held, &text, &error) != MOE_OK;
        for (size_t i = 0; i < text.n; i++)
            if (text.ids[i] < 0 || text.ids[i] >= l.size) abort();
        if (!refused) (void)language_spread(&text, 4, 3, ids, labels);
        free(text.ids);
        free(l.word);
    }
    moe_buffer_free(&bytes);
    moe_buffer_free(&train);
    moe_buffer_free(&held);
    return refused;
}
#endif

#ifdef READ_ROUTERS
#define main routers_main
#include "examples/routers.c"

int take_routers(int count, char **argv, const char *contents, size_t size) {
    (void)contents;
    (void)size;
    taken = 0;
    report_path = NULL;
    report_free(); /* main runs more than once here */
    return routers_main(count, argv) != 0;
}
#endif

#else

/* ---- the program ---- */

#include <setjmp.h>

static int fuzz_rename(const char *from, const char *to) {
    (void)from;
    (void)to;
    return 0;
}
int fuzz_remove(const char *path) {
    (void)path;
    return 0;
}

#define fopen fuzz_fopen
#define rename fuzz_rename
#define remove fuzz_remove
#define MOE_IMPLEMENTATION
#include "tests/all.h"
#undef fopen
#undef rename
#undef remove

#define FUZZ_CORPUS "tests/fuzz/corpus/texts"
static const char *fuzz_outcome(const unsigned char *contents, size_t size);
#include "fuzz.h"

enum { MOST_OPTIONS = 40 };

FILE *fuzz_nowhere;
static const char *file_data;
static size_t file_size;
static jmp_buf on_exit_of_example;

void fuzz_exit(int status) { longjmp(on_exit_of_example, status + 1); }

/* Reading gives the input, writing and appending a file that is soon gone. Nothing lies beside the
   file. */
FILE *fuzz_fopen(const char *path, const char *mode) {
    const char *end = strrchr(path, '.');
    FILE *f;
    if (mode[0] == 'r' && end != NULL && strncmp(end, ".tmp", 4) == 0) return NULL;
    if ((f = tmpfile()) == NULL) return NULL;
    if (mode[0] != 'w') want(fwrite(file_data, 1, file_size, f) == file_size);
    rewind(f);
    return f;
}

/* What an example saves goes into memory: the library would make a file. */
moe_status fuzz_replace(const char *path, moe_status (*write_contents)(void *ctx, moe_stream *stream), void *ctx,
                        moe_error *error) {
    moe_buffer saved = {0};
    moe_stream stream = moe_buffer_stream(&saved);
    moe_status status = write_contents(ctx, &stream);
    (void)path;
    if (status != MOE_OK && error != NULL) strcpy(error->message, "it could not be written");
    moe_buffer_free(&saved);
    return status;
}

/* ---- settings and names, as the library reads them ---- */

/* Settings of a layer; what was taken is written field by field and read again. */
static int take_settings(int count, char **argv, const char *contents, size_t size) {
    moe_layer_config config, again;
    moe_error error;
    const moe_field *f;
    char text[64];
    moe_status status;
    (void)size;
    memset(&config, 0, sizeof config);
    memset(&again, 0, sizeof again);
    if (count > 1 && moe_layer_preset(argv[1], &config, &error) != MOE_OK) {
        want(error.message[0] != '\0');
        return 1;
    }
    if (count > 1) want(moe_preset_find(argv[1]) != NULL);
    status = moe_fields_apply(moe_layer_fields(), &config, contents, &error);
    want(status == MOE_OK || error.message[0] != '\0');
    for (f = moe_layer_fields(); f->name != NULL; f++) {
        moe_field_text(f, &config, text, sizeof text);
        want(moe_field_set(f, &again, f->name, text, &error) == MOE_OK);
    }
    again.router.preset = config.router.preset; /* where settings came from, which texts do not tell */
    want(memcmp(&config, &again, sizeof config) == 0);
    if (status == MOE_OK) status = moe_layer_check(&config, &again, &error);
    want(status == MOE_OK || error.message[0] != '\0');
    if (status == MOE_OK)
        want(moe_layer_check(&again, &config, &error) == MOE_OK && memcmp(&config, &again, sizeof config) == 0);
    return status != MOE_OK;
}

static moe_status write_nowhere(void *ctx, const void *from, size_t size) {
    (void)ctx;
    (void)from;
    (void)size;
    return MOE_OK;
}

/* The name of a model in C, and which tensors a pattern fits. */
static int take_names(int count, char **argv, const char *contents, size_t size) {
    moe_net net;
    moe_built_model built;
    moe_trainer trainer;
    moe_train_config config;
    moe_param_group group;
    moe_error error;
    moe_stream stream;
    moe_status status, fits;
    (void)size;
    memset(&stream, 0, sizeof stream);
    memset(&config, 0, sizeof config);
    memset(&group, 0, sizeof group);
    stream.write = write_nowhere;
    moe_net_init(&net, 2, MOE_KERNELS_C, NULL);
    moe_net_linear(&net, 2);
    want(moe_net_build(&net, 1, 1, &error) == MOE_OK && moe_model_create(&built, &net, NULL, &error) == MOE_OK);
    status = moe_export_c(&built, contents, &stream, &error);
    want(status == MOE_OK || error.message[0] != '\0');
    group.pattern = count > 1 ? argv[1] : contents;
    config.groups = &group;
    config.n_groups = 1;
    fits = moe_trainer_init(&trainer, &net, &config, &error);
    want(fits == MOE_OK || error.message[0] != '\0');
    if (fits == MOE_OK) moe_trainer_free(&trainer);
    moe_model_free(&built);
    moe_net_free(&net);
    return status != MOE_OK && fits != MOE_OK;
}

/* ---- the target ---- */

typedef struct reader {
    const char *name;
    int (*take)(int count, char **options, const char *data, size_t size);
} reader;

#define READER_ROW(name) {#name, take_##name},
static const reader readers[] = {READERS(READER_ROW){"settings", take_settings}, {"names", take_names}, {NULL, NULL}};

/* The next line of *p as a text of its own. */
static char *take_line(char **p) {
    char *line = *p;
    *p += strcspn(*p, "\n");
    if (**p != '\0') *(*p)++ = '\0';
    return line;
}

static int run_reader(const reader *r, char *line, char *end) {
    static char *options[MOST_OPTIONS + 1];
    char program[] = "program";
    int count = 1;
    options[0] = program;
    while (count < MOST_OPTIONS && *line != '\0') {
        options[count++] = line;
        line += strcspn(line, " ");
        if (*line != '\0') *line++ = '\0';
    }
    options[count] = NULL;
    file_size = strlen(end);
    file_data = end;
    return setjmp(on_exit_of_example) != 0 || r->take(count, options, end, file_size);
}

static const char *fuzz_outcome(const uint8_t *data, size_t size) {
    static char outcome[40];
    char *copy = (char *)malloc(size + 1), *p = copy, *name, *options;
    const reader *r = readers;
    want(copy != NULL);
    if (fuzz_nowhere == NULL) fuzz_nowhere = fopen("/dev/null", "w");
    want(fuzz_nowhere != NULL);
    memcpy(copy, data, size);
    copy[size] = '\0';
    name = take_line(&p);
    options = take_line(&p);
    while (r->name != NULL && strcmp(r->name, name) != 0) r++;
    if (r->name == NULL) strcpy(outcome, "nobody");
    else sprintf(outcome, "%s-%s", r->name, run_reader(r, options, p) ? "refused" : "taken");
    free(copy);
    return outcome;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    double begin = fuzz_seconds();
    (void)fuzz_outcome(data, size);
    want(fuzz_seconds() - begin < FUZZ_SECONDS_MOST);
    return 0;
}

/* ---- the mutator: lines, cells and words ---- */

static const char *const words[] = {"0",
                                    "1",
                                    "2",
                                    "10",
                                    "16",
                                    "17",
                                    "-1",
                                    "9",
                                    "99999999999999999999",
                                    "2147483648",
                                    "-2147483649",
                                    "1e300",
                                    "-1e300",
                                    "1e-320",
                                    "nan",
                                    "inf",
                                    "0x1p5",
                                    "1.5",
                                    "0.5",
                                    "",
                                    " ",
                                    "+3",
                                    "00",
                                    "1e",
                                    ",",
                                    ",,",
                                    ";",
                                    "=",
                                    "\n",
                                    "\n\n",
                                    "\r\n",
                                    "<unk>",
                                    "<unk>\n",
                                    "1:2 3:4",
                                    "5:1e308",
                                    "--seed",
                                    "--seeds",
                                    "1,2,3",
                                    "--epochs",
                                    "--first",
                                    "--csv",
                                    "x.csv",
                                    "--data",
                                    "--check",
                                    "--methods",
                                    "pairs",
                                    "--only",
                                    "--experts",
                                    "--tasks",
                                    "--temperature",
                                    "--importance",
                                    "--attack",
                                    "--tables",
                                    "--claims",
                                    "--list",
                                    "-h",
                                    "--help",
                                    "-o",
                                    "--name",
                                    "--calibration",
                                    "--divide",
                                    "--tokens",
                                    "--rows",
                                    "--length",
                                    "--weights",
                                    "int4",
                                    "float",
                                    "--markdown",
                                    "--sweep",
                                    "--routers",
                                    "--claim",
                                    "--ablate",
                                    "--valid",
                                    "--test",
                                    "--words",
                                    "--vocabulary",
                                    "--kernels",
                                    "auto",
                                    "c",
                                    "--top-k-sample",
                                    "--generate",
                                    "--prompt",
                                    "--route",
                                    "--resume",
                                    "--stop-after",
                                    "--show",
                                    "--token",
                                    "switch",
                                    "mixtral",
                                    "deepseek_v3",
                                    "hash",
                                    "soft",
                                    "*.weight",
                                    "0.*",
                                    "**",
                                    "int",
                                    "model",
                                    "d_model=8",
                                    "n_experts=",
                                    "top_k=2",
                                    "select=",
                                    "score=cosine",
                                    "loss_balance=0.01",
                                    "gate_temperature=",
                                    "steps=",
                                    "width=",
                                    "layers=",
                                    "context="};

/* A cell from `from` on: what stands between commas, blanks and line ends. */
static size_t cell_length(const uint8_t *data, size_t from, size_t size) {
    size_t n = 0;
    while (from + n < size && strchr(", \n=:", data[from + n]) == NULL) n++;
    return n;
}

/* Puts s in place of `length` bytes; the new size. */
static size_t put_text(uint8_t *data, size_t size, size_t max_size, size_t at, size_t length, const char *s, size_t n) {
    if (size - length + n > max_size) return size;
    memmove(data + at + n, data + at + length, size - at - length);
    memcpy(data + at, s, n);
    return size - length + n;
}

static size_t change(uint8_t *data, size_t size, size_t max_size, uint64_t *random) {
    const char *word = words[fuzz_below(random, sizeof words / sizeof words[0])];
    size_t at = size > 0 ? fuzz_below(random, size) : 0, end = at, n;
    static char line[2000];
    while (end < size && data[end] != '\n') end++;
    n = end - at < sizeof line ? end - at : 0;
    switch (fuzz_below(random, 8)) {
    case 0: return LLVMFuzzerMutate(data, size, max_size);
    case 1:
    case 2: return put_text(data, size, max_size, at, cell_length(data, at, size), word, strlen(word));
    case 3: return put_text(data, size, max_size, at, 0, word, strlen(word));
    case 4: return put_text(data, size, max_size, at, n, "", 0);
    case 5: /* the rest of a line again */
        memcpy(line, data + at, n);
        return put_text(data, size, max_size, at, 0, line, n);
    case 6: /* a word behind the options */
        for (at = 0, n = 0; at < size && n < 2; at++) n += data[at] == '\n';
        if (n < 2) return size;
        sprintf(line, " %s", word);
        return put_text(data, size, max_size, at - 1, 0, line, strlen(line));
    default: return size > 0 ? put_text(data, size, max_size, at, cell_length(data, at, size), "", 0) : 0;
    }
}

/* The first line stays, so that an input stays with its reader; sometimes another reader gets
   it. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed) {
    uint64_t random = seed;
    const char *name = readers[fuzz_below(&random, sizeof readers / sizeof readers[0] - 1)].name;
    size_t first = 0;
    unsigned n = 1 + fuzz_below(&random, 3);
    while (first < size && data[first] != '\n') first++;
    if (max_size < 40) return LLVMFuzzerMutate(data, size, max_size);
    if (first == size) {
        size = put_text(data, 0, max_size, 0, 0, "settings\n\n", 10);
        first = 8;
    }
    if (fuzz_below(&random, 24) == 0) {
        size = put_text(data, size, max_size, 0, first, name, strlen(name));
        for (first = 0; first < size && data[first] != '\n';) first++;
    }
    for (first++; n > 0 && first <= size; n--)
        size = first + change(data + first, size - first, max_size - first, &random);
    return size;
}

#endif
