/* Trains a language model with MoE layers on any text, reports its perplexity and which expert gets
   which tokens, and generates text.
     cc -std=c99 -O2 -I. examples/text.c -o text -lm && ./text
     (or: sh examples/run text) */

#ifndef _WIN32
#define _POSIX_C_SOURCE 200112L /* clock_gettime, isatty */
#endif
#define MOE_IMPLEMENTATION
#include "moe.h"
#include <errno.h>
#include <math.h>
#include <signal.h>
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

enum { LONGEST = 48 /* bytes of a token */, KINDS = 7, COLUMNS = 100, MAX_LAYERS = 64, PATH_SIZE = 1000 };

/* ---- options ---- */

static struct {
    const char *text, *test, *output, *checkpoint, *router, *kernels, *prompt, *route;
    double rate, temperature, top_p;
    long words, vocabulary, width, layers, heads, experts, top_k, d_ff, context, batch, steps, epochs, warmup, seed,
        resume, stop_after;
    long generate, sample_k, only_generate, check, quiet;
} set = {.output = "text.safetensors",
         .kernels = "auto",
         .prompt = "",
         .rate = 0.002,
         .temperature = 0.8,
         .top_p = 0.95,
         .vocabulary = 4096,
         .width = 64,
         .layers = 3,
         .experts = 16,
         .context = 128,
         .batch = 16,
         .steps = 1000,
         .warmup = 50,
         .seed = 1,
         .generate = 400};
static int kernels;

enum { FLAG, WHOLE, REAL, TEXT };
static const struct option {
    const char *name, *value;
    int kind;
    void *at;
    double least, most;
    const char *help;
} options[] = {
    {"--words", "", FLAG, &set.words, 0, 0, "tokens are words, numbers, punctuation and line breaks instead of bytes"},
    {"--vocabulary", "N", WHOLE, &set.vocabulary, 2, 1e6,
     "size of the vocabulary: the most frequent words; the others are <unk>"},
    {"--width", "N", WHOLE, &set.width, 2, 4096, "width of the model: numbers per token"},
    {"--layers", "N", WHOLE, &set.layers, 1, MAX_LAYERS, "number of layers, each attention and experts"},
    {"--heads", "N", WHOLE, &set.heads, 0, 256, "attention heads; 0: one per 32 of the width"},
    {"--experts", "N", WHOLE, &set.experts, 1, 1024, "experts in a layer"},
    {"--top-k", "N", WHOLE, &set.top_k, 0, 1024,
     "experts per token; 0: 2, or the preset's number if that is smaller"},
    {"--d-ff", "N", WHOLE, &set.d_ff, 0, 65536, "hidden width of an expert; 0: twice the width"},
    {"--router", "PRESET", TEXT, &set.router, 0, 0,
     "preset of the routers: a name that `sh examples/run routers` lists"},
    {"--context", "N", WHOLE, &set.context, 2, 65536, "tokens of a sequence"},
    {"--batch", "N", WHOLE, &set.batch, 1, 4096, "sequences per step"},
    {"--steps", "N", WHOLE, &set.steps, 1, 1e9, "training steps"},
    {"--epochs", "N", WHOLE, &set.epochs, 0, 1e4, "instead of steps: passes over the text"},
    {"--rate", "X", REAL, &set.rate, 1e-9, 10, "learning rate, with a cosine schedule"},
    {"--warmup", "N", WHOLE, &set.warmup, 0, 1e6, "warm-up steps of the learning rate"},
    {"--seed", "N", WHOLE, &set.seed, 0, 1e9, "seed of all random choices"},
    {"-o", "FILE", TEXT, &set.output, 0, 0, "the model; with --words also FILE.words, the vocabulary"},
    {"--checkpoint", "FILE", TEXT, &set.checkpoint, 0, 0,
     "checkpoint of unfinished training (the model's name with .checkpoint)"},
    {"--resume", "", FLAG, &set.resume, 0, 0, "continues stopped training; repeat the other options"},
    {"--stop-after", "N", WHOLE, &set.stop_after, 0, 1e9, "stops after N steps, as Ctrl-C does; 0: never"},
    {"--test", "FILE", TEXT, &set.test, 0, 0, "also measures the perplexity on this text"},
    {"--only-generate", "", FLAG, &set.only_generate, 0, 0, "no training: loads the model"},
    {"--generate", "N", WHOLE, &set.generate, 0, 1e6, "tokens to generate"},
    {"--prompt", "TEXT", TEXT, &set.prompt, 0, 0, "text to continue"},
    {"--temperature", "X", REAL, &set.temperature, 1e-6, 1e6, "lower: more probable tokens"},
    {"--top-p", "X", REAL, &set.top_p, 1e-6, 1, "samples from the most probable tokens with this total probability"},
    {"--top-k-sample", "N", WHOLE, &set.sample_k, 0, 1e6, "samples from the N most probable tokens; 0: all"},
    {"--route", "TEXT", TEXT, &set.route, 0, 0, "shows the first choice of each token of this text"},
    {"--report", "FILE", TEXT, &report_path, 0, 0,
     "report of the results: a page (FILE.html), a picture (.svg) or text; -: on the screen"},
    {"--kernels", "NAME", TEXT, &set.kernels, 0, 0, "instruction set: auto, c, avx2, ..."},
    {"--check", "", FLAG, &set.check, 0, 0, "tests this program on a small model"}};
enum { OPTIONS = sizeof options / sizeof *options };

static int fail(const char *what, const char *why) {
    if (!set.quiet) fprintf(stderr, is_named(what, why) ? "text: %.0s%s\n" : "text: %s: %s\n", what, why);
    return 1;
}

/* Flushes the output; fails if it could not be written. */
static int finish(void) { return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0; }

static int show_help(void) {
    printf("text [options] [FILE]   trains on nine tenths of FILE, tests on the rest; without FILE: moe.h, "
           "moe_routers.h, moe_kernels.h\n");
    for (const struct option *o = options; o < options + OPTIONS; o++) {
        printf("  %-14s %-6s  %s", o->name, o->value, o->help);
        if (o->kind == WHOLE) printf(" (%ld)", *(const long *)o->at);
        if (o->kind == REAL) printf(" (%g)", *(const double *)o->at);
        if (o->kind == TEXT && *(const char **)o->at != NULL && **(const char **)o->at != '\0')
            printf(" (%s)", *(const char **)o->at);
        printf("\n");
    }
    printf("Exit status: 0 done, 1 failed, 130 stopped by Ctrl-C, 143 by a TERM signal; --resume continues.\n");
    return finish();
}

static int set_option(const struct option *o, const char *value) {
    char *end = NULL;
    double number = o->kind == TEXT ? 0 : strtod(value, &end);
    if (o->kind == TEXT) {
        if (*value == '\0' && strcmp(o->value, "TEXT") != 0) return fail(o->name, "its value is missing; see -h");
        *(const char **)o->at = value;
        return 0;
    }
    if (end == value || *end != '\0' || !(number >= o->least && number <= o->most) ||
        (o->kind == WHOLE && floor(number) < number)) {
        fprintf(stderr, "text: %s %s: not a value from %g to %g; see -h\n", o->name, value, o->least, o->most);
        return 1;
    }
    if (o->kind == WHOLE) *(long *)o->at = (long)number;
    else *(double *)o->at = number;
    return 0;
}

/* Options without a meaning for a model that is only loaded. */
static int is_for_training(const char *name) {
    static const char *const names[] = {
        "--words", "--vocabulary", "--width", "--layers", "--heads", "--experts", "--top-k", "--d-ff", "--router",
        "--batch", "--steps", "--epochs", "--rate", "--warmup", "--checkpoint", "--resume", "--stop-after"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i], name) == 0) return 1;
    return 0;
}

/* Options that do not go together. trains: an option that is for training; NULL: none. */
static int check_options(const char *trains) {
    if (set.only_generate && (trains != NULL || set.text != NULL))
        return fail(trains != NULL ? trains : set.text, "is for training: leave it out with --only-generate");
    if (set.router != NULL && moe_preset_find(set.router) == NULL)
        return fail(set.router, "there is no preset of this name; sh examples/run routers lists them");
    if (set.checkpoint != NULL && strlen(set.checkpoint) > PATH_SIZE - 40)
        return fail("--checkpoint", "the name is too long");
    return strlen(set.output) > PATH_SIZE - 40 ? fail("-o", "the name is too long") : 0;
}

static int read_options(int count, char **words) {
    const char *trains = NULL;
    while (--count > 0) {
        const char *word = *++words;
        const struct option *o = options;
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) exit(show_help());
        while (o < options + OPTIONS && strcmp(word, o->name) != 0) o++;
        if (o < options + OPTIONS && is_for_training(word)) trains = word;
        if (*word != '-' && set.text == NULL) set.text = word;
        else if (o == options + OPTIONS) return fail(word, "no such option, or a second text; see -h");
        else if (o->kind == FLAG) *(long *)o->at = 1;
        else if (--count == 0) return fail(word, "its value is missing; see -h");
        else if (set_option(o, *++words)) return 1;
    }
    for (kernels = 0; moe_kernels_name(kernels) != NULL && strcmp(moe_kernels_name(kernels), set.kernels) != 0;)
        kernels++;
    if (moe_kernels_name(kernels) == NULL) return fail(set.kernels, "no such kernels");
    return check_options(trains);
}

/* ---- texts and tokens ---- */

typedef struct word {
    const unsigned char *p; /* n bytes */
    size_t n, count;
} word;

typedef union block {
    union block *next;
    char aligned[64];
} block;
static block *blocks;

/* A network and its vocabulary: the 256 bytes, or <unk> and then the words in ascending order. */
typedef struct model {
    moe_net net;
    word *words;
    size_t n_words;
    moe_buffer list; /* the contents of the word file; words point into it */
    int bytes;
} model;

/* Zeroed memory, valid until release is called. */
static void *grab(size_t count, size_t size) {
    block *b = count < SIZE_MAX / 2 / size ? (block *)calloc(1, sizeof *b + count * size) : NULL;
    if (b == NULL) exit(fail("memory", "not enough"));
    b->next = blocks;
    blocks = b;
    return b + 1;
}

static void release(void) {
    for (block *b; (b = blocks) != NULL; free(b)) blocks = b->next;
}

static void free_model(model *m) {
    moe_net_free(&m->net);
    moe_buffer_free(&m->list);
    memset(m, 0, sizeof *m);
}

/* path with an extension; the last four results stay valid. */
static const char *beside(const char *path, const char *extension) {
    static char ring[4][PATH_SIZE];
    static int turn;
    char *s = ring[turn = (turn + 1) % 4];
    snprintf(s, PATH_SIZE, "%s%s", path, extension);
    return s;
}

static int exists(const char *path) {
    FILE *f = fopen(path, "rb");
    if (f != NULL) fclose(f);
    return f != NULL || errno != ENOENT;
}

static int is_digit(int c) { return c >= '0' && c <= '9'; }
static int is_upper(int c) { return c >= 'A' && c <= 'Z'; }
static int is_letter(int c) { return is_upper(c) || (c >= 'a' && c <= 'z') || c == '_' || c >= 128; }
static int is_unknown(const word *w) { return w->n >= 5 && memcmp(w->p + w->n - 5, "<unk>", 5) == 0; }

/* Length of the first word of a text: a line break; spaces; or, after at most one space, letters, a
   number or any other byte. */
static size_t word_length(const unsigned char *s, size_t n) {
    size_t i = 0, first;
    if (n > LONGEST) n = LONGEST;
    while (i < n && s[i] == ' ') i++;
    if (i == n || (i > 0 && s[i] == '\n')) return i;
    if (i > 1) return i - 1; /* the last space belongs to the next word */
    if (n - i >= 5 && memcmp(s + i, "<unk>", 5) == 0) return i + 5;
    for (first = i++; i < n && (is_letter(s[first]) || is_digit(s[first])); i++) {
        int number = is_digit(s[first]), next = i + 1 < n ? s[i + 1] : ' '; /* 3.14 and 1,000 and don't are one word */
        int joins = number ? (s[i] == '.' || s[i] == ',') && is_digit(next) : s[i] == '\'' && is_letter(next);
        if (!is_letter(s[i]) && !is_digit(s[i]) && !joins) break;
    }
    return i;
}

static int compare_words(const void *a, const void *b) {
    const word *v = (const word *)a, *w = (const word *)b;
    int order = memcmp(v->p, w->p, v->n < w->n ? v->n : w->n);
    return order != 0 ? order : (v->n > w->n) - (v->n < w->n);
}

static int compare_counts(const void *a, const void *b) {
    const word *v = (const word *)a, *w = (const word *)b;
    return v->count != w->count ? (v->count < w->count) - (v->count > w->count) : compare_words(a, b);
}

/* The ids of all tokens of a text. */
static int32_t *encode(const model *m, const void *text, size_t n, size_t *count) {
    const unsigned char *p = (const unsigned char *)text, *end = p + n;
    int32_t *ids = (int32_t *)grab(n, sizeof *ids);
    for (*count = 0; p < end; ++*count) {
        word next = {p, m->bytes ? 1 : word_length(p, (size_t)(end - p)), 0};
        const word *found = m->bytes ? m->words + *p : is_unknown(&next) ? NULL :
                            (const word *)bsearch(&next, m->words + 1, m->n_words - 1, sizeof next, compare_words);
        ids[*count] = found != NULL ? (int32_t)(found - m->words) : 0;
        p += next.n;
    }
    return ids;
}

/* Writes the words to a file, one per line; an empty line is the line break. */
static moe_status write_words(void *ctx, moe_stream *stream) {
    const model *m = (const model *)ctx;
    moe_status status = MOE_OK;
    for (const word *w = m->words; w < m->words + m->n_words && status == MOE_OK; w++) {
        if (*w->p != '\n') status = stream->write(stream->ctx, w->p, w->n);
        if (status == MOE_OK) status = stream->write(stream->ctx, "\n", 1);
    }
    return status;
}

/* Splits m->list, the untrusted content of a file of this name, into words. */
static int read_words(model *m, const char *name) {
    const unsigned char *p = m->list.data, *end = m->list.size > 0 ? p + m->list.size : p;
    const char *wrong = NULL;
    m->words = (word *)grab(m->list.size, sizeof *m->words);
    for (m->n_words = 0; p < end && wrong == NULL; m->n_words++) {
        word *w = m->words + m->n_words;
        const unsigned char *line_end = (const unsigned char *)memchr(p, '\n', (size_t)(end - p));
        if (line_end == NULL) {
            wrong = "the line does not end";
            line_end = end;
        }
        w->p = p;
        w->n = line_end > p ? (size_t)(line_end - p) : 1;
        p = line_end + 1;
        if (w->n > LONGEST) wrong = "the word is longer than 48 bytes";
        if (w == m->words && (w->n != 5 || !is_unknown(w))) wrong = "the first word must be <unk>";
        if (wrong == NULL && w > m->words + 1 && compare_words(w - 1, w) >= 0)
            wrong = "the word must come after the one above";
    }
    if (wrong == NULL && m->n_words < 2) wrong = "there are no words";
    if (wrong == NULL) return 0;
    char line[PATH_SIZE];
    snprintf(line, sizeof line, "%s:%d", name, (int)m->n_words);
    return fail(line, wrong);
}

/* Loads the words of a model from the file beside it; bytes if there is none. path NULL: bytes. */
static int load_words(model *m, const char *path) {
    static unsigned char all[256];
    moe_error error;
    const char *name = beside(path != NULL ? path : "", ".words");
    if (path != NULL && exists(name))
        return moe_file_read(name, &m->list, &error) ? fail("words", error.message) : read_words(m, name);
    m->bytes = 1;
    m->n_words = 256;
    m->words = (word *)grab(256, sizeof *m->words);
    for (int i = 0; i < 256; i++) {
        all[i] = (unsigned char)i;
        m->words[i] = (word){all + i, 1, 0};
    }
    return 0;
}

/* Lists the most frequent words of a text. */
static int find_words(model *m, const unsigned char *text, size_t n) {
    model most = {.n_words = 0};
    moe_stream list = moe_buffer_stream(&m->list);
    size_t i, at, found = 0;
    for (i = at = 0; at < n; i++) at += word_length(text + at, n - at);
    word *all = most.words = (word *)grab(i + 1, sizeof *all);
    for (i = 1, at = 0; at < n; i += !is_unknown(all + i)) {
        all[i] = (word){text + at, word_length(text + at, n - at), 1};
        at += all[i].n;
    }
    qsort(all + 1, i - 1, sizeof *all, compare_words);
    for (at = 1; at < i; at++)
        if (found > 0 && compare_words(all + found, all + at) == 0) all[found].count++;
        else all[++found] = all[at];
    qsort(all + 1, found, sizeof *all, compare_counts);
    most.n_words = found < (size_t)set.vocabulary ? found + 1 : (size_t)set.vocabulary;
    qsort(all + 1, most.n_words - 1, sizeof *all, compare_words);
    all[0] = (word){(const unsigned char *)"<unk>", 5, 0};
    moe_status status = write_words(&most, &list);
    return status != MOE_OK ? fail("words", moe_status_text(status)) : read_words(m, "the text's words");
}

static int read_text(const char *path, moe_buffer *text) {
    const char *const *headers = example_headers();
    moe_stream all = moe_buffer_stream(text);
    moe_error error = {0};
    if (path != NULL) return moe_file_read(path, text, &error) ? fail(path, error.message) : 0;
    for (int i = 0; i < 3; i++) {
        moe_buffer one = {0};
        int failed =
            moe_file_read(headers[i], &one, &error) != MOE_OK || all.write(all.ctx, one.data, one.size) != MOE_OK;
        moe_buffer_free(&one);
        if (failed) return fail("without FILE, in the folder of the library", error.message);
    }
    return 0;
}

/* ---- the network ---- */

static moe_status configure(moe_layer_config *c, size_t vocabulary, moe_error *error) {
    moe_router_config *r = &c->router;
    memset(c, 0, sizeof *c);
    r->loss_balance = (moe_real)0.01; /* otherwise a few experts would take everything; presets have their own losses */
    if (set.router != NULL && moe_layer_preset(set.router, c, error)) return error->code;
    r->n_experts = (int)set.experts;
    if (set.top_k > 0) r->top_k = (int)set.top_k;
    else if (r->top_k > 2) r->top_k = 2;
    if (r->select == MOE_SELECT_HASH || r->student_dim > 0) r->table_size = (int)vocabulary;
    c->d_ff = (int)(set.d_ff > 0 ? set.d_ff : 2 * set.width);
    return MOE_OK;
}

static moe_status build(model *m, moe_error *error) {
    moe_attention_config attention = {.heads = (int)set.heads, .rotary = 1};
    moe_layer_config experts;
    moe_net *net = &m->net;
    moe_status status = configure(&experts, m->n_words, error);
    if (status != MOE_OK) return status;
    moe_net_init(net, 0, kernels, NULL);
    moe_net_embedding(net, (int)m->n_words, (int)set.width);
    for (long i = 0; i < set.layers; i++) {
        moe_net_rms_norm(net);
        moe_net_attention(net, &attention);
        moe_net_residual(net, 2); /* adds the input of the norm to the output of attention */
        moe_net_rms_norm(net);
        moe_net_mixture(net, &experts);
        moe_net_residual(net, 2);
    }
    moe_net_rms_norm(net);
    moe_net_tied(net); /* logits: products with the rows of the embedding */
    status = moe_net_build(net, 1, (uint64_t)set.seed, error);
    return status == MOE_OK ? moe_net_decode_size(net, 1, 1, NULL, NULL, error) : status;
}

/* Renames, replacing an existing file. If rename does not replace, removes the old file first. */
static int put(const char *from, const char *to) {
#ifdef _WIN32
    remove(to);
#endif
    return rename(from, to) != 0;
}

/* Saves network and words. Both are complete before either replaces an old file, so a full disk
   leaves the old files intact. */
static int save_model(const model *m, const char *path) {
    const char *part = beside(path, ".part"), *words = beside(path, ".words");
    const char *words_part = beside(path, ".words.part");
    moe_error error;
    moe_status status = moe_net_save(&m->net, part, &error);
    if (status == MOE_OK && !m->bytes) status = moe_file_replace(words_part, write_words, (void *)m, &error);
    if (status != MOE_OK) {
        remove(part);
        return fail("the model is not saved", error.message);
    }
    if (m->bytes) remove(words); /* of the replaced model */
    if (put(part, path)) {
        fail(path, strerror(errno));
        return fail(part, "holds the model");
    }
    if (!m->bytes && put(words_part, words)) return fail(words, strerror(errno));
    return 0;
}

static int load_model(model *m, const char *path) {
    moe_error error;
    moe_status status = moe_net_load(&m->net, path, 0, kernels, NULL, &error);
    if (status == MOE_OK) status = moe_net_decode_size(&m->net, 1, 1, NULL, NULL, &error);
    if (status != MOE_OK) return fail(path, error.message);
    moe_tensor embedding;
    if (m->net.d_in != 0 || moe_net_find(&m->net, "0.weight", &embedding) != MOE_OK)
        return fail(path, "is not a network that reads tokens");
    if (load_words(m, path)) return 1;
    if (m->n_words == (size_t)m->net.d_out && m->n_words == embedding.shape[0]) return 0;
    return fail(path, m->bytes ? "its tokens are not bytes, and the file of its words is missing"
                               : "the file of words beside it belongs to another model");
}

/* ---- training ---- */

static volatile sig_atomic_t stopped_by;

/* Stops training after the current step; a second signal ends the program at once. */
static void stop(int signal_number) {
    stopped_by = signal_number;
    signal(signal_number, SIG_DFL);
}

static double seconds(void) {
#ifdef _WIN32
    return (double)clock() / CLOCKS_PER_SEC;
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#endif
}

/* The state of the running training. */
typedef struct run {
    uint64_t step, steps, first; /* first: steps done before it started */
    double started, shown;       /* times */
    int epoch;
    double loss_sum, loss_steps; /* of the epoch, when the loss was last printed */
} run;

static void show_step(run *r, const moe_progress *p, int keep) {
    double sum = (double)p->loss * (double)p->step, now = seconds();
    double took = now - r->started + 1e-9;
    double loss =
        (double)p->step > r->loss_steps ? (sum - r->loss_sum) / ((double)p->step - r->loss_steps) : (double)p->loss;
    double left = took / (double)(r->step - r->first) * (double)(r->steps - r->step);
    printf("%sstep %5.0f of %.0f: loss %.3f, perplexity %8.2f, %6.0f tokens/s, %2d:%02d left%s", isatty(1) ? "\r" : "",
           (double)r->step, (double)r->steps, loss, exp(loss), (double)p->samples / took, (int)(left / 60),
           (int)left % 60, keep || !isatty(1) ? "\n" : "");
    fflush(stdout);
    r->shown = now;
    if (keep) {
        r->loss_sum = sum;
        r->loss_steps = (double)p->step;
    }
}

static moe_history history; /* for the report */

/* Called after every step. On a terminal the line is updated in place; twelve of them are kept. */
static int progress(void *ctx, const moe_progress *p) {
    run *r = (run *)ctx;
    uint64_t every = r->steps / 12 + 1;
    double losses[] = {(double)p->loss, (double)p->router_loss};
    if (report_path != NULL) (void)moe_history_add(&history, (double)p->total_step, losses, 2);
    /* a new epoch, or a resumed one, whose earlier steps are not counted */
    if (p->epoch != r->epoch) {
        r->epoch = p->epoch;
        r->loss_steps = p->step > 1 ? (double)p->step : 0;
        r->loss_sum = (double)p->loss * r->loss_steps;
    }
    r->step = p->total_step;
    int last = r->step >= r->steps || stopped_by != 0 || r->step == (uint64_t)set.stop_after;
    int keep = last || r->step % every == 0;
    if (!set.quiet && (keep || (isatty(1) && seconds() - r->shown > 0.25))) show_step(r, p, keep);
    return last;
}

/* Sequences of --context tokens, one after another; the label of a token is the next one. */
static moe_data data_of(const int32_t *ids, size_t n) {
    size_t length = (size_t)set.context;
    moe_data data = {
        .n = n > length ? (n - 1) / length * length : 0, .labels = ids + 1, .token_ids = ids, .length = length};
    return data;
}

/* Loads a checkpoint into the network and sets *done to its steps. */
static moe_status read_checkpoint(model *m, const moe_train_config *config, uint64_t *done, moe_error *error) {
    moe_trainer trainer;
    moe_status status = moe_trainer_init(&trainer, &m->net, config, error);
    if (status != MOE_OK) return status;
    status = moe_trainer_load(&trainer, config->checkpoint, error);
    *done = trainer.steps;
    moe_trainer_free(&trainer);
    return status;
}

enum { DONE, FAILED, STOPPED };

static int train(model *m, const moe_data *data) {
    run r = {.step = 0};
    moe_error error = {0};
    moe_train_config t = {
        .progress = progress, .progress_ctx = &r, .checkpoint = set.checkpoint, .resume = (int)set.resume};
    uint64_t per_epoch = (data->n / data->length + (uint64_t)set.batch - 1) / (uint64_t)set.batch;
    r.steps = set.epochs > 0 ? per_epoch * (uint64_t)set.epochs : (uint64_t)set.steps;
    if (r.steps > 1000000000) {
        fail("--epochs", "more than 1000000000 steps");
        return FAILED;
    }
    if (r.steps / per_epoch >= 1000000) {
        fail("--steps", "a million passes over this text, or more");
        return FAILED;
    }
    /* the callback stops within the last epoch */
    t.epochs = (int)((r.steps + per_epoch - 1) / per_epoch);
    t.total_steps = (int)r.steps;
    t.batch = (int)(set.batch * set.context);
    t.seed = (uint64_t)set.seed;
    t.checkpoint_every = 100;
    t.rate = (moe_real)set.rate;
    t.final_rate = (moe_real)0.1;
    t.warmup = (int)set.warmup;
    t.decay = (moe_real)0.1;
    t.clip = 1;
    if (set.resume && read_checkpoint(m, &t, &r.first, &error)) {
        fail("--resume", error.message);
        return FAILED;
    }
    if (r.first > 0 && !set.quiet)
        printf("%s: continues after step %.0f of %.0f\n", set.checkpoint, (double)r.first, (double)r.steps);
    r.step = r.first;
    r.started = seconds();
    signal(SIGINT, stop);
    signal(SIGTERM, stop);
    moe_status status = r.first < r.steps ? moe_fit(&m->net, data, NULL, &t, &error) : MOE_OK;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    if (r.step >= r.steps) return DONE;
    if (status == MOE_ERR_STOPPED && !set.quiet)
        printf("stopped; %s holds the training so far: the same command with --resume continues\n", set.checkpoint);
    else if (status != MOE_ERR_STOPPED) fail("training", error.message);
    if (status == MOE_ERR_IO && exists(set.checkpoint))
        fprintf(stderr, "text: %s holds an earlier step: the same command with --resume continues from it\n",
                set.checkpoint);
    return status == MOE_ERR_STOPPED ? STOPPED : FAILED;
}

/* ---- evaluation ---- */

static const char *const kinds[2][KINDS] = {{"word", "Capital", "number", "name", "punct", "blank", "<unk>"},
                                            {"lower", "upper", "digit", "space", "newline", "punct", "other"}};

static int32_t kind_of_byte(int c) {
    if (is_letter(c) && c != '_') return c >= 128 ? 6 : is_upper(c);
    return is_digit(c) ? 2 : c == ' ' || c == '\t' ? 3 : c == '\n' ? 4 : c > ' ' && c < 127 ? 5 : 6;
}

/* name: an identifier with _, a digit, or a capital after a small letter. */
static int32_t kind_of_word(const word *w) {
    size_t i = *w->p == ' ' && w->n > 1, first = i;
    int c = w->p[i];
    if (!is_letter(c)) return is_digit(c) ? 2 : c == '\n' || c == ' ' ? 5 : is_unknown(w) ? 6 : 4;
    for (; i < w->n; i++)
        if (w->p[i] == '_' || is_digit(w->p[i]) || (i > first && is_upper(w->p[i]) && !is_upper(w->p[i - 1]))) return 3;
    return is_upper(c);
}

/* A printable form of a word: _ for a leading space, \s4 for four spaces, \n for a line break, ?
   for unprintable bytes. */
static const char *shown(const word *w, char out[LONGEST + 1]) {
    if (*w->p == '\n') return "\\n";
    if (*w->p == ' ' && w->p[w->n - 1] == ' ') {
        sprintf(out, w->n > 1 ? "\\s%d" : "\\s", (int)w->n);
        return out;
    }
    for (size_t i = 0; i < w->n; i++)
        out[i] = (char)(w->p[i] < ' ' || w->p[i] == 127 || (w->p[i] >= 128 && w->n == 1) ? '?' : w->p[i]);
    if (*w->p == ' ') *out = '_';
    out[w->n] = '\0';
    return out;
}

/* Prints the perplexity on n held-out tokens. */
static int tell_perplexity(const model *m, const char *name, const int32_t *ids, size_t n) {
    moe_data data = data_of(ids, n);
    moe_evaluation result;
    moe_error error;
    size_t unknown = 0;
    if (data.n == 0) return fail(name, "is shorter than --context");
    if (moe_evaluate(&m->net, &data, MOE_CRITERION_CROSS_ENTROPY, &result, &error)) return fail(name, error.message);
    for (size_t i = 0; i < data.n; i++) unknown += data.labels[i] == 0;
    printf("%s: perplexity %.3f, loss %.9g", name, exp((double)result.loss), (double)result.loss);
    if (m->bytes) printf(", %.3f bits per byte", (double)result.loss / log(2.0));
    else printf(", %.1f %% <unk>", 100.0 * (double)unknown / (double)result.n);
    printf(", %.1f %% of %.0f tokens right\n", 100.0 * (double)result.accuracy, (double)result.n);
    return 0;
}

/* Counts of the experts of one layer. */
typedef struct census {
    moe_metrics kinds, words;
} census;

static moe_status start_metrics(moe_metrics *metrics, const moe_layer *layer, size_t classes) {
    size_t bytes, experts = (size_t)layer->config.router.n_experts;
    moe_status status = moe_metrics_size(experts, classes, &bytes);
    return status == MOE_OK ? moe_metrics_init(metrics, experts, classes, grab(bytes, 1), bytes) : status;
}

/* Runs data through the network, a sequence at a time, and adds the routings of every layer to its
   census. */
static moe_status take_census(const model *m, const moe_data *data, census *of) {
    moe_call call = {.n_tokens = data->length};
    moe_net_pass pass;
    int32_t *kind = (int32_t *)grab(m->n_words, sizeof *kind), *row = (int32_t *)grab(data->length, sizeof *row);
    size_t bytes, at, i;
    moe_status status = moe_net_work_size(&m->net, data->length, 0, &bytes);
    void *work = grab(status == MOE_OK ? bytes : 1, 1);
    for (i = 0; i < m->n_words; i++) kind[i] = m->bytes ? kind_of_byte((int)i) : kind_of_word(m->words + i);
    for (at = 0; at < data->n && status == MOE_OK; at += data->length) {
        census *c = of;
        call.token_ids = data->token_ids + at;
        for (i = 0; i < data->length; i++) row[i] = kind[call.token_ids[i]];
        status = moe_net_forward(&m->net, &call, work, bytes, &pass);
        for (i = 0; i < m->net.n_modules && status == MOE_OK; i++) {
            const moe_routing *r = moe_net_routing(&m->net, &pass, i);
            if (r == NULL) continue; /* not an MoE layer */
            status = moe_metrics_add(&c->kinds, r, NULL, row);
            if (status == MOE_OK) status = moe_metrics_add(&c++->words, r, NULL, call.token_ids);
        }
    }
    return status;
}

/* A row of the table: the shares of the kinds in count, then the most frequent words. */
static void show_row(const model *m, const char *name, const double *count, double total, const double *words,
                     moe_real *score) {
    char text[LONGEST + 1];
    int32_t best[12];
    double sum = 0;
    for (int k = 0; k < KINDS; k++) sum += count[k];
    int column = printf("%6s %6.1f%%", name, total > 0 ? 100.0 * sum / total : 0);
    for (int k = 0; k < KINDS; k++) column += printf("%8.1f", sum > 0 ? 100.0 * count[k] / sum : 0.0);
    for (size_t i = 0; i < m->n_words; i++) score[i] = (moe_real)words[i];
    size_t n = moe_top_k(m->n_words, score, 12, best);
    for (size_t i = 0; i < n && words[best[i]] > 0; i++) {
        const char *next = shown(m->words + best[i], text);
        if (column + 2 + (int)strlen(next) <= COLUMNS) column += printf("%*s%s", i > 0 ? 1 : 2, "", next);
    }
    printf("\n");
}

static void show_layer(const model *m, int layer, census *c) {
    double all[KINDS] = {0}, *words = (double *)grab(m->n_words, sizeof *words);
    moe_real *score = (moe_real *)grab(m->n_words, sizeof *score); /* workspace of show_row */
    char name[16];
    moe_report r;
    if (moe_metrics_report(&c->kinds, &r) != MOE_OK) return;
    printf("\nLayer %d: what each expert takes, in %% of its tokens\nexpert   share", layer);
    for (size_t k = 0; k < KINDS; k++) printf("%8s", kinds[m->bytes][k]);
    printf("  most frequent\n");
    for (size_t e = 0; e < r.n_experts; e++) {
        for (size_t k = 0; k < KINDS; k++) all[k] += r.classes[e * KINDS + k];
        for (size_t i = 0; i < m->n_words; i++) words[i] += c->words.classes[e * m->n_words + i];
        sprintf(name, "%d", (int)e);
        show_row(m, name, r.classes + e * KINDS, r.n_assignments, c->words.classes + e * m->n_words, score);
    }
    show_row(m, "all", all, r.n_assignments, words, score);
    printf("I(expert;kind) = %.3f nats: information of the expert about the kind (by chance %.3f)\n", r.information,
           r.information_chance);
}

/* The layer's tables as figures; they point into the census. */
static void report_layer(const model *m, int layer, const census *c) {
    char title[80];
    moe_metrics all = c->kinds;
    moe_report r;
    moe_figure *f;
    if (moe_metrics_report(&all, &r) != MOE_OK) return;
    sprintf(title, "Layer %d: what each expert takes", layer);
    f = report_take(moe_figure_classes(&r), title);
    f->column_names = kinds[m->bytes];
    f->column_label = "kind of token";
    sprintf(title, "Layer %d: load", layer);
    report_take(moe_figure_load(&r), title);
}

static int show_experts(const model *m, const moe_data *data) {
    census of[MAX_LAYERS];
    int layers = 0;
    moe_status status = MOE_OK;
    for (size_t i = 0; i < m->net.n_modules && status == MOE_OK; i++) {
        if (m->net.modules[i].kind != MOE_MODULE_MIXTURE) continue;
        status = start_metrics(&of[layers].kinds, &m->net.modules[i].layer, KINDS);
        if (status == MOE_OK) status = start_metrics(&of[layers++].words, &m->net.modules[i].layer, m->n_words);
    }
    if (status == MOE_OK) status = take_census(m, data, of);
    for (int i = 0; i < layers && status == MOE_OK; i++) show_layer(m, i + 1, &of[i]);
    for (int i = 0; i < layers && status == MOE_OK && report_path != NULL; i++) report_layer(m, i + 1, &of[i]);
    return status == MOE_OK ? 0 : fail("counting experts", moe_status_text(status));
}

/* Prints a text and, below each token, its first choice in each layer. */
static int show_route(const model *m, const char *text) {
    char cell[LONGEST + 1];
    moe_call call = {0};
    moe_net_pass pass;
    size_t bytes, i, t, from, to;
    int layer;
    int32_t *ids = encode(m, text, strlen(text), &call.n_tokens);
    moe_status status = moe_net_work_size(&m->net, call.n_tokens, 0, &bytes);
    void *work = grab(status == MOE_OK ? bytes : 1, 1);
    call.token_ids = ids;
    if (status == MOE_OK) status = moe_net_forward(&m->net, &call, work, bytes, &pass);
    if (status != MOE_OK) return fail("--route", moe_status_text(status));
    for (from = 0; from < call.n_tokens; from = to) {
        int column = printf("\n%-8s", "");
        for (to = from; to < call.n_tokens && column < COLUMNS - 12; to++)
            column += printf(" %3s", shown(m->words + ids[to], cell));
        for (i = 0, layer = 1; i < m->net.n_modules; i++) {
            const moe_routing *r = moe_net_routing(&m->net, &pass, i);
            if (r == NULL) continue; /* not an MoE layer */
            printf("\nlayer %-2d", layer++);
            for (t = from; t < to; t++) {
                int width = (int)strlen(shown(m->words + ids[t], cell));
                printf(" %*d", width > 3 ? width : 3, r->n_choices[t] > 0 ? r->choices[t * r->max_choices] : -1);
            }
        }
        printf("\n");
    }
    return 0;
}

/* The first tokens of a text, colored by their first choice, layer by layer. */
static int report_tokens(const model *m, const char *title, const int32_t *ids, size_t n) {
    moe_call call = {.n_tokens = n < (size_t)set.context ? n : (size_t)set.context, .token_ids = ids};
    moe_net_pass pass;
    size_t bytes, layers = 0;
    moe_status status = moe_net_work_size(&m->net, call.n_tokens, 0, &bytes);
    void *work = grab(status == MOE_OK ? bytes : 1, 1);
    int32_t *experts = (int32_t *)report_grab(call.n_tokens * MAX_LAYERS, sizeof *experts);
    double *weights = (double *)report_grab(call.n_tokens * MAX_LAYERS, sizeof *weights);
    const char **names = (const char **)report_grab(call.n_tokens, sizeof *names);
    const char **rows = (const char **)report_grab(MAX_LAYERS, sizeof *rows);
    char row[16];
    int most = 0;
    if (status == MOE_OK) status = moe_net_forward(&m->net, &call, work, bytes, &pass);
    if (status != MOE_OK) return fail("--report", moe_status_text(status));
    for (size_t t = 0; t < call.n_tokens; t++)
        names[t] = (const char *)memcpy(report_grab(LONGEST + 1, 1), m->words[ids[t]].p, m->words[ids[t]].n);
    for (size_t i = 0; i < m->net.n_modules && layers < MAX_LAYERS; i++) {
        const moe_routing *r = moe_net_routing(&m->net, &pass, i);
        /* not an MoE layer */
        if (r == NULL || moe_routing_choices(r, 1, 1, experts + layers * call.n_tokens) != MOE_OK) continue;
        if (most < (int)r->n_experts) most = (int)r->n_experts; /* of a loaded model, whatever --experts says */
        for (size_t t = 0; t < call.n_tokens; t++) {
            int32_t e = experts[layers * call.n_tokens + t];
            weights[layers * call.n_tokens + t] = e >= 0 ? (double)r->weights[t * r->n_experts + (size_t)e] : 0;
        }
        sprintf(row, "layer %d", (int)layers + 1);
        rows[layers++] = report_text(row);
    }
    moe_figure *f = report_add(MOE_FIGURE_TOKENS, title, layers, call.n_tokens);
    f->n_experts = most;
    f->experts = experts;
    f->values = weights;
    f->column_names = names;
    f->row_names = rows;
    f->caption = "Under each token, its first choice.";
    return 0;
}

/* ---- generation ---- */

static void write_out(const word *w) {
    if (is_unknown(w)) putchar(' ');
    for (size_t i = 0; i < w->n; i++)
        putchar((w->p[i] < ' ' && w->p[i] != '\n' && w->p[i] != '\t') || w->p[i] == 127 ? '?' : w->p[i]);
    fflush(stdout);
}

/* Generates n tokens after the `given` ones in ids, at least one. A full cache restarts with the
   later half of its tokens. */
static moe_status go_on(const model *m, int32_t *ids, size_t given, size_t n, moe_error *error) {
    moe_sampling how = {
        .temperature = (moe_real)set.temperature, .top_k = (int)set.sample_k, .top_p = (moe_real)set.top_p};
    size_t most = (size_t)set.context, bytes, work_bytes, read = 0 /* tokens in the cache */, total;
    moe_real *p = (moe_real *)grab(m->n_words, sizeof *p);
    size_t first = !m->bytes; /* <unk> is never written */
    int32_t *order = (int32_t *)grab(m->n_words, sizeof *order);
    moe_cache cache;
    moe_net_pass pass;
    moe_rng rng;
    moe_status status = moe_net_decode_size(&m->net, most, most, &bytes, &work_bytes, error);
    if (status != MOE_OK) return status;
    void *work = grab(work_bytes, 1);
    status = moe_net_cache_init(&cache, &m->net, most, grab(bytes, 1), bytes, error);
    moe_rng_seed(&rng, (uint64_t)set.seed);
    for (total = given; total < given + n && status == MOE_OK; total++) {
        if (total - read > most - cache.n_tokens) {
            cache.n_tokens = 0;
            read = total - most / 2;
        }
        moe_call call = {.n_tokens = total - read, .token_ids = ids + read, .error = error};
        status = moe_net_decode(&m->net, &cache, &call, work, work_bytes, &pass);
        if (status != MOE_OK) return status;
        read += call.n_tokens;
        const moe_real *logits = pass.y + (call.n_tokens - 1) * m->n_words;
        status = moe_sample(&how, m->n_words - first, logits + first, &rng, p, order, &ids[total], error);
        ids[total] += (int32_t)first;
        if (status == MOE_OK && !set.quiet) write_out(m->words + ids[total]);
    }
    return status;
}

/* The tokens of --prompt, by default a line break, followed by generated ones; NULL: failed. */
static int32_t *generate(const model *m, size_t *n) {
    moe_error error;
    const char *prompt = *set.prompt != '\0' ? set.prompt : "\n";
    size_t given;
    int32_t *start = encode(m, prompt, strlen(prompt), &given);
    int32_t *ids = (int32_t *)grab(given + (size_t)set.generate, sizeof *ids);
    memcpy(ids, start, given * sizeof *ids);
    for (size_t i = 0; i < given && !set.quiet && *set.prompt != '\0'; i++) write_out(m->words + ids[i]);
    moe_status status = go_on(m, ids, given, (size_t)set.generate, &error);
    if (!set.quiet) printf("\n");
    *n = given + (size_t)set.generate;
    if (status == MOE_OK) return ids;
    fail("generating", error.message);
    return NULL;
}

/* ---- the program ---- */

/* Text and tokens: nine tenths for training, the rest held out. */
typedef struct corpus {
    moe_buffer text;
    int32_t *ids, *held_out;
    size_t n, n_held_out;
} corpus;

static int prepare(model *m, corpus *c) {
    int failed = read_text(set.text, &c->text);
    if (!failed && set.words && !set.resume) failed = find_words(m, c->text.data, c->text.size - c->text.size / 10);
    else if (!failed) failed = load_words(m, set.resume ? set.checkpoint : NULL);
    if (failed) return 1;
    if (set.words && m->bytes) return fail("--words", "the checkpoint is of a model of bytes: leave this out");
    c->ids = encode(m, c->text.data, c->text.size, &c->n);
    c->n_held_out = c->n / 10;
    c->held_out = c->ids + (c->n - c->n_held_out);
    if (data_of(c->held_out, c->n_held_out).n > 0) return 0;
    return fail(set.text != NULL ? set.text : "the text",
                "is too short: a tenth of its tokens must be more than --context");
}

/* Whether files that are written, the words beside them included, are one, or the texts. */
static int check_names(void) {
    const char *const *headers = example_headers(); /* the text without FILE */
    const char *const inputs[] = {set.text, set.test, headers[0], headers[1], headers[2]};
    char names[4][PATH_SIZE];
    const char *const outputs[] = {names[0], names[1],   names[2],       names[3],
                                   set.output, set.checkpoint, report_path};
    snprintf(names[0], PATH_SIZE, "%s.words", set.output);
    snprintf(names[1], PATH_SIZE, "%s.part", set.output);
    snprintf(names[2], PATH_SIZE, "%s.words.part", set.output);
    snprintf(names[3], PATH_SIZE, "%s.words", set.checkpoint);
    const char *twice = written_twice(outputs, 7, inputs, 5);
    return twice != NULL ? fail(twice, WRITTEN_TWICE) : 0;
}

/* Checks the output files before training. */
static int check_files(void) {
    const char *part = beside(set.output, ".part");
    if (not_writable(part) != NULL) return fail(part, not_writable(part));
    if (set.resume && !exists(set.checkpoint)) return fail(set.checkpoint, "does not exist: nothing to resume");
    if (!set.resume && not_writable(set.checkpoint) != NULL) return fail(set.checkpoint, not_writable(set.checkpoint));
    if (!set.resume && exists(set.checkpoint))
        return fail(set.checkpoint, "holds training that was stopped: --resume continues it; remove it to start over");
    return 0;
}

/* Trains and saves; FAILED and STOPPED as returned by train. */
static int learn(model *m, corpus *c) {
    moe_error error = {0};
    size_t used, all;
    if (check_files() || prepare(m, c)) return FAILED;
    if (build(m, &error) != MOE_OK) {
        fail("this network", error.message);
        return FAILED;
    }
    if (!m->bytes && !set.resume && moe_file_replace(beside(set.checkpoint, ".words"), write_words, m, &error)) {
        fail("words", error.message);
        return FAILED;
    }
    /* left by a run that was killed before its first checkpoint */
    if (m->bytes && !set.resume) remove(beside(set.checkpoint, ".words"));
    all = moe_net_parameter_count(&m->net, &used);
    if (!set.quiet)
        printf("%.0f tokens, %.0f held out, vocabulary %d; %d parameters, of which a token uses %d; kernels %s\n",
               (double)c->n, (double)c->n_held_out, (int)m->n_words, (int)all, (int)used, m->net.kernels->name);
    moe_data data = data_of(c->ids, c->n - c->n_held_out);
    int result = train(m, &data);
    if (result != DONE) return result;
    if (save_model(m, set.output)) return FAILED;
    remove(set.checkpoint);
    remove(beside(set.checkpoint, ".words"));
    if (!set.quiet) printf("saved as %s%s\n", set.output, m->bytes ? "" : ", its words in a file beside it");
    return DONE;
}

static int test_on(const model *m, const char *path) {
    moe_buffer text = {0};
    size_t n;
    int failed = read_text(path, &text);
    int32_t *ids = failed ? NULL : encode(m, text.data, text.size, &n);
    moe_buffer_free(&text);
    return failed || tell_perplexity(m, path, ids, n);
}

static void report_training(void) {
    static const char *const names[] = {"training", "router"};
    moe_figure *f = report_take(moe_figure_history(&history, 0, 2, names), "Training losses");
    f->caption = "Mean of the epoch so far.";
    f->value_label = "loss (nats)";
}

static int run_all(void) {
    model m = {.n_words = 0};
    corpus c = {.n = 0};
    size_t n;
    int result = set.only_generate ? (load_model(&m, set.output) ? FAILED : DONE) : learn(&m, &c);
    int good = result == DONE;
    if (good && !set.only_generate) {
        moe_data held_out = data_of(c.held_out, c.n_held_out);
        if (report_path != NULL) report_training();
        good = !tell_perplexity(&m, "held out", c.held_out, c.n_held_out) && !show_experts(&m, &held_out);
    }
    if (good && set.test != NULL) good = !test_on(&m, set.test);
    if (good && set.route != NULL) good = !show_route(&m, set.route);
    if (good && report_path != NULL && set.route != NULL) {
        int32_t *ids = encode(&m, set.route, strlen(set.route), &n);
        good = !report_tokens(&m, "The text by expert", ids, n);
    } else if (good && report_path != NULL && c.held_out != NULL)
        good = !report_tokens(&m, "Held-out text by expert", c.held_out, c.n_held_out);
    if (good && set.generate > 0) {
        int32_t *written = printf("\n") > 0 ? generate(&m, &n) : NULL;
        good = written != NULL && (report_path == NULL || !report_tokens(&m, "Generated text", written, n));
    }
    if (good) good = !report_write_added("text", "A language model with experts");
    moe_buffer_free(&c.text);
    free_model(&m);
    release();
    return result == STOPPED ? (stopped_by != 0 ? 128 + (int)stopped_by : 0) : !good;
}

/* ---- --check ---- */

static long passed, failed;

static void check(int good, const char *what) {
    if (good) passed++;
    else {
        failed++;
        printf("FAILED: %s\n", what);
    }
}

/* Whether two files have the same bytes, at least one. */
static int same_files(const char *one, const char *other) {
    moe_buffer a = {0}, b = {0};
    int same = !moe_file_read(one, &a, NULL) && !moe_file_read(other, &b, NULL) && a.size > 0 && a.size == b.size;
    same = same && !memcmp(a.data, b.data, a.size);
    moe_buffer_free(&a);
    moe_buffer_free(&b);
    return same;
}

/* A fingerprint of a model: its loss on held-out text, and the tokens that it generates. */
typedef struct sample {
    moe_evaluation result;
    int32_t *ids;
    size_t n;
} sample;

/* Trains with the current settings and generates; returns as learn does. */
static int try_out(sample *s) {
    model m = {.n_words = 0};
    corpus c = {.n = 0};
    int result = learn(&m, &c);
    if (result == DONE) {
        moe_data held_out = data_of(c.held_out, c.n_held_out < 4001 ? c.n_held_out : 4001);
        s->ids = generate(&m, &s->n);
        if (s->ids == NULL || moe_evaluate(&m.net, &held_out, MOE_CRITERION_CROSS_ENTROPY, &s->result, NULL))
            result = FAILED;
    }
    moe_buffer_free(&c.text);
    free_model(&m);
    return result;
}

/* The word file that training leaves if it is killed before its first checkpoint. */
static moe_status write_killed(void *ctx, moe_stream *stream) {
    (void)ctx;
    return stream->write(stream->ctx, "<unk>\na\n", 8);
}

/* Compares uninterrupted training with stopped and resumed training: the same loss, files and
   text. */
static void check_training(double bound) {
    const char *second = set.output, *first = "text-check-1.safetensors";
    sample one = {.n = 0}, two = {.n = 0};
    model m = {.n_words = 0};
    size_t n;
    set.output = first;
    remove(set.checkpoint); /* of an interrupted check */
    check(try_out(&one) == DONE && (double)one.result.loss < bound, "the loss falls");
    set.output = second;
    set.stop_after = set.steps / 2;
    check(moe_file_replace(beside(set.checkpoint, ".words"), write_killed, NULL, NULL) == MOE_OK, "a file is written");
    check(try_out(&two) == STOPPED && exists(set.checkpoint) && !exists(second), "training stops");
    set.stop_after = 0;
    check(try_out(&two) == FAILED, "a checkpoint is not overwritten by new training");
    set.resume = 1;
    check(try_out(&two) == DONE && !memcmp(&one.result.loss, &two.result.loss, sizeof one.result.loss),
          "resumed training: the same loss");
    check(same_files(first, second), "resumed training: the same file");
    check(!set.words || same_files(beside(first, ".words"), beside(second, ".words")),
          "resumed training: the same words");
    check(try_out(&two) == FAILED, "finished training cannot be resumed");
    set.resume = 0;
    two.ids = load_model(&m, second) ? NULL : generate(&m, &n);
    check(one.ids != NULL && two.ids != NULL && !memcmp(one.ids, two.ids, n * sizeof *one.ids),
          "a loaded model writes the same text");
    remove(first);
    remove(beside(first, ".words"));
    remove(second);
    remove(beside(second, ".words"));
    free_model(&m);
}

static int read_lines(const char *lines, size_t n) {
    model m = {.n_words = 0};
    moe_stream stream = moe_buffer_stream(&m.list);
    int result = stream.write(stream.ctx, lines, n) != MOE_OK || read_words(&m, "list");
    free_model(&m);
    return result;
}

static void check_words(void) {
    static const char *const bad[] = {"",
                                      "<unk>\n",
                                      "a\nb\n",
                                      "<unk>\na",
                                      "<unk>\nb\na\n",
                                      "<unk>\na\na\n",
                                      "<unk>\na\n\n",
                                      "<unk>\n1234567890123456789012345678901234567890123456789\n"};
    model m = {.n_words = 0};
    moe_buffer text = {0};
    size_t n = 0, i, at = 0;
    size_t same = 0;
    for (i = 0; i < sizeof bad / sizeof *bad; i++)
        check(read_lines(bad[i], strlen(bad[i])), "a bad list of words is refused");
    check(!read_lines("<unk>\n\na\0b\n\xff\n", 13), "a list may have any bytes");
    set.vocabulary = 1000000;
    int read = !read_text(NULL, &text) && !find_words(&m, text.data, text.size);
    int32_t *ids = encode(&m, text.data, text.size, &n);
    for (i = 0; i < n; at += m.words[ids[i++]].n) same += !memcmp(m.words[ids[i]].p, text.data + at, m.words[ids[i]].n);
    check(read && same == n && at == text.size, "words make up the text");
    moe_buffer_free(&text);
    free_model(&m);
}

/* A figure has the experts of its model, which may be loaded, not those of --experts. */
static void check_report(model *m) {
    static const int32_t ids[] = {1, 2, 3};
    moe_error error = {0};
    const long experts = set.experts;
    check(load_words(m, NULL) == 0 && build(m, &error) == MOE_OK, "a network is built");
    set.experts = experts - 1;
    check(report_tokens(m, "Tokens", ids, 3) == 0 && report_figures[0].n_experts == (int)experts,
          "a figure has its model's experts");
    set.experts = experts;
    report_free();
    moe_net_free(&m->net);
}

static int check_all(void) {
    moe_buffer none = {0};
    model m = {.n_words = 256};
    moe_error error = {0};
    set.output = "text-check.safetensors";
    set.checkpoint = "text-check.checkpoint";
    set.width = 32;
    set.layers = 2;
    set.experts = 4;
    set.context = 32;
    set.generate = 100;
    set.quiet = 1;
    set.steps = 160;
    set.warmup = 5;
    set.rate = 0.005;
    check_training(3.2);
    const char *other = set.checkpoint;
    set.checkpoint = set.output;
    check(check_names() == 1, "a checkpoint in the place of the model is refused");
    set.checkpoint = beside(set.output, ".words");
    check(check_names() == 1, "a checkpoint in the place of the words is refused");
    set.checkpoint = other;
    set.text = set.output;
    check(check_names() == 1, "a model in the place of the text is refused");
    set.text = NULL;
    check(check_names() == 0, "files of different names are not");
    set.words = 1;
    set.vocabulary = 500;
    set.steps = 24;
    check_training(5.5);
    check_words();
    check(read_text("no/such/file", &none), "a file that is not there is an error");
    check_report(&m);
    set.router = "expert_choice";
    check(build(&m, &error) == MOE_ERR_UNSUPPORTED && *error.message != '\0',
          "a router that sees later tokens is refused");
    moe_net_free(&m.net);
    release();
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}

int main(int count, char **words) {
    char checkpoint[PATH_SIZE];
    int wrong;
    if (read_options(count, words)) return EXIT_USAGE;
    snprintf(checkpoint, sizeof checkpoint, "%s", beside(set.output, ".checkpoint"));
    if (set.checkpoint == NULL) set.checkpoint = checkpoint;
    if (set.check) return check_all();
    if (check_names()) return EXIT_USAGE;
    if ((wrong = report_checked("text")) != 0) return wrong;
    if (set.test != NULL && !file_is_there(set.test)) return fail(set.test, "cannot be opened");
    if (!set.only_generate && not_writable(set.output) != NULL) return fail(set.output, not_writable(set.output));
    int status = run_all();
    return status != 0 ? status : finish();
}
