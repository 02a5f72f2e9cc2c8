/* models.c - runs whole models of other programs whose logits those programs computed: pairs of
   NAME.gguf and NAME.json (of a split file its part 1), and folders of Hugging Face's form with
   gold.json. tests/golden/README.md describes the files.

     cc -std=c99 -O2 -I. tests/golden/models.c -o models -lm
     ./models tests/golden/models tests/golden/shapes.py

   shapes.py stands for models that it makes (with python3, in a folder models-made here, which is
   removed afterwards) and computes itself.

   Of every model: the logits of the prompt at once against the file's tolerance; the same bits by
   decoding the prompt at once and token by token; the greedy tokens, and the logits after the last.
   All this with exact = 1, activations in float. Then the default, which may quantize activations:
   its error is at most the file's loose bound, the largest error that llama.cpp's own quantized
   activations made.
   Exit status: 0 all that ran passed, 1 one failed or none ran, 2 usage or an unreadable path. */

#if defined(__unix__) || defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#define MODELS_FOLDERS
#include <dirent.h>
#endif

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../../moe.h"
#include "../../examples/extras/moe_import.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_ROOM = 1024, MAX_MODELS = 4096, MOST = 4096 };

/* Found cases: the model's path and that of its JSON file. */
typedef struct pair {
    char model[PATH_ROOM], gold[PATH_ROOM];
} pair;

static pair *pairs;
static int n_pairs;
static int n_skipped;

static void *grab(size_t count, size_t size) {
    void *memory = calloc(count > 0 ? count : 1, size);
    if (memory == NULL) {
        fprintf(stderr, "models: no memory\n");
        exit(2);
    }
    return memory;
}

/* ---- JSON: the few values that the files have ---- */

static char *read_text(const char *path) {
    FILE *file = fopen(path, "rb");
    char *text;
    long size;
    size_t got;
    if (file == NULL) return NULL;
    if (fseek(file, 0, SEEK_END) != 0 || (size = ftell(file)) < 0 || fseek(file, 0, SEEK_SET) != 0) {
        fclose(file);
        return NULL;
    }
    text = (char *)grab((size_t)size + 1, 1);
    got = fread(text, 1, (size_t)size, file);
    text[got] = '\0';
    fclose(file);
    return text;
}

/* Behind the colon of a key at any depth, from `text` on; NULL: there is none. */
static const char *value_of(const char *text, const char *key) {
    const size_t n = strlen(key);
    const char *p = text;
    while ((p = strchr(p, '"')) != NULL) {
        const char *end = strchr(++p, '"');
        if (end == NULL) return NULL;
        if ((size_t)(end - p) == n && memcmp(p, key, n) == 0) {
            for (p = end + 1; isspace((unsigned char)*p);) p++;
            if (*p == ':') return p + 1;
        }
        p = end + 1;
    }
    return NULL;
}

static double number_of(const char *text, const char *key, double otherwise) {
    const char *value = text != NULL ? value_of(text, key) : NULL;
    return value != NULL ? strtod(value, NULL) : otherwise;
}

/* All numbers of a list, of lists in it too; *count receives how many. */
static double *numbers_of(const char *text, const char *key, size_t *count) {
    const char *p = value_of(text, key);
    double *numbers = NULL;
    size_t room = 0, n = 0;
    int depth = 0;
    *count = 0;
    while (p != NULL && isspace((unsigned char)*p)) p++;
    if (p == NULL || *p != '[') return NULL;
    do {
        char *end = NULL;
        if (*p == '[') depth++;
        if (*p == ']') depth--;
        if (*p == '-' || isdigit((unsigned char)*p)) {
            if (n == room) {
                room = 2 * room + 64;
                numbers = (double *)realloc(numbers, room * sizeof *numbers);
                if (numbers == NULL) exit(2);
            }
            numbers[n++] = strtod(p, &end);
        }
        p = end != NULL ? end : p + 1;
    } while (depth > 0 && *p != '\0');
    *count = n;
    return numbers;
}

/* ---- what a file expects ---- */

typedef struct gold {
    size_t n_prompt, n_positions, vocabulary, n_greedy, n_after;
    double *prompt, *positions, *logits, *greedy, *after;
    double tolerance, bound; /* bound: of quantized activations; 0: none */
    int context;
} gold;

static void gold_free(gold *g) {
    free(g->prompt);
    free(g->positions);
    free(g->logits);
    free(g->greedy);
    free(g->after);
}

/* Whether the text is that of a model, and whole. */
static int gold_read(gold *g, const char *text) {
    const char *loose = value_of(text, "llama_cpp_with_its_quantised_activations");
    size_t i, n_logits;
    memset(g, 0, sizeof *g);
    g->prompt = numbers_of(text, "prompt", &g->n_prompt);
    g->positions = numbers_of(text, "positions", &g->n_positions);
    g->logits = numbers_of(text, "logits", &n_logits);
    g->greedy = numbers_of(text, "greedy", &g->n_greedy);
    g->after = numbers_of(text, "logits_after_greedy", &g->n_after);
    g->tolerance = number_of(text, "tolerance", 0.0);
    g->bound = loose != NULL ? number_of(loose, "max_abs_difference", 0.0) : 0.0;
    g->context = (int)number_of(text, "n_ctx", (double)(g->n_prompt + g->n_greedy));
    g->vocabulary = g->n_positions > 0 ? n_logits / g->n_positions : 0;
    if (g->n_prompt == 0 || g->n_prompt + g->n_greedy > MOST || g->vocabulary == 0 || !(g->tolerance > 0.0) ||
        (g->n_after != 0 && g->n_after != g->vocabulary) || g->context < 0)
        return 0;
    for (i = 0; i < g->n_positions; i++)
        if (!(g->positions[i] >= 0.0 && g->positions[i] < (double)g->n_prompt)) return 0;
    return 1;
}

/* ---- running a model ---- */

/* A model at work. */
typedef struct run {
    moe_imported model;
    moe_error error;
    void *work, *cache_memory;
    size_t work_size, cache_size;
    moe_cache cache;
    moe_net_pass pass;
} run;

static void run_end(run *r) {
    moe_import_free(&r->model);
    free(r->work);
    free(r->cache_memory);
}

/* Loads a model and makes room for `most` tokens. */
static moe_status run_begin(run *r, const char *path, int context, int exact, size_t most) {
    moe_import_options options;
    size_t decode_size = 0;
    moe_status status;
    memset(r, 0, sizeof *r);
    memset(&options, 0, sizeof options);
    options.exact = exact;
    options.context = context;
    status = moe_import_model(&r->model, path, &options, NULL, &r->error);
    if (status != MOE_OK) return status;
    status = moe_net_work_size(&r->model.net, most, 0, &r->work_size);
    if (status == MOE_OK)
        status = moe_net_decode_size(&r->model.net, most, most, &r->cache_size, &decode_size, &r->error);
    if (status != MOE_OK) return status;
    if (decode_size > r->work_size) r->work_size = decode_size;
    r->work = grab(r->work_size, 1);
    r->cache_memory = grab(r->cache_size, 1);
    return moe_net_cache_init(&r->cache, &r->model.net, most, r->cache_memory, r->cache_size, &r->error);
}

/* n tokens: a whole sequence, or the next ones of the cache. */
static moe_status run_tokens(run *r, const int32_t *ids, size_t n, int decode) {
    moe_call call;
    memset(&call, 0, sizeof call);
    call.n_tokens = n;
    call.token_ids = ids;
    call.error = &r->error;
    return decode ? moe_net_decode(&r->model.net, &r->cache, &call, r->work, r->work_size, &r->pass)
                  : moe_net_forward(&r->model.net, &call, r->work, r->work_size, &r->pass);
}

/* What went wrong with a model: the first thing. */
typedef struct verdict {
    char why[256];
    double worst, loose; /* error over tolerance; that of the default over its bound, below 0: none */
} verdict;

static void complain(verdict *v, const char *what, const char *more) {
    if (v->why[0] == '\0') sprintf(v->why, "%.80s: %.160s", what, more);
}

static double distance(const moe_real *got, const double *want, size_t n) {
    double most = 0.0;
    size_t i;
    for (i = 0; i < n; i++) {
        const double d = fabs((double)got[i] - want[i]);
        if (!(d <= most)) most = d == d ? d : HUGE_VAL;
    }
    return most;
}

/* The largest error of the prompt's logits. */
static double prompt_error(const gold *g, const moe_real *y) {
    double most = 0.0;
    size_t i;
    for (i = 0; i < g->n_positions; i++) {
        const double d = distance(y + (size_t)g->positions[i] * g->vocabulary, g->logits + i * g->vocabulary,
                                  g->vocabulary);
        if (d > most) most = d;
    }
    return most;
}

/* Decodes the prompt in pieces of `step` tokens and compares with the bits of the whole. */
static void same_bits(run *r, const gold *g, const int32_t *ids, const moe_real *whole, size_t step, verdict *v) {
    size_t at, n;
    char text[96];
    r->cache.n_tokens = 0;
    for (at = 0; at < g->n_prompt; at += n) {
        n = g->n_prompt - at < step ? g->n_prompt - at : step;
        if (run_tokens(r, ids + at, n, 1) != MOE_OK) {
            complain(v, "decoding", r->error.message);
            return;
        }
        if (memcmp(r->pass.y, whole + at * g->vocabulary, n * g->vocabulary * sizeof *whole) == 0) continue;
        sprintf(text, "other bits than the whole sequence from token %lu on", (unsigned long)at);
        complain(v, step == 1 ? "token by token" : "the prompt at once from a cache", text);
        return;
    }
}

static size_t largest(const moe_real *y, size_t n) {
    size_t i, best = 0;
    for (i = 1; i < n; i++)
        if (y[i] > y[best]) best = i;
    return best;
}

/* The greedy tokens, decoded from the cache of the prompt. */
static void greedy_tokens(run *r, const gold *g, verdict *v) {
    const moe_real *y = r->pass.y;
    char text[96];
    size_t k;
    double error;
    for (k = 0; k < g->n_greedy; k++) {
        const int32_t id = (int32_t)largest(y, g->vocabulary);
        if (id != (int32_t)g->greedy[k]) {
            sprintf(text, "number %lu is %ld, not %ld", (unsigned long)k, (long)id, (long)g->greedy[k]);
            complain(v, "greedy tokens", text);
            return;
        }
        if (run_tokens(r, &id, 1, 1) != MOE_OK) {
            complain(v, "greedy tokens", r->error.message);
            return;
        }
        y = r->pass.y;
    }
    if (g->n_after == 0) return;
    error = distance(y, g->after, g->vocabulary) / g->tolerance;
    if (!(error <= v->worst)) v->worst = error;
}

/* The default mode, which has a bound of its own. */
static void default_mode(const char *path, const gold *g, const int32_t *ids, verdict *v) {
    const double bound = g->bound > g->tolerance ? g->bound : g->tolerance;
    run r;
    moe_status status = run_begin(&r, path, g->context, 0, g->n_prompt);
    if (status == MOE_OK) status = run_tokens(&r, ids, g->n_prompt, 0);
    if (status != MOE_OK) complain(v, "by default", r.error.message);
    else v->loose = prompt_error(g, r.pass.y) / bound;
    run_end(&r);
}

/* Runs one model. */
static void run_model(const char *path, const gold *g, verdict *v) {
    int32_t *ids = (int32_t *)grab(g->n_prompt, sizeof *ids);
    moe_real *whole = NULL;
    size_t i;
    run r;
    moe_status status;
    for (i = 0; i < g->n_prompt; i++) ids[i] = (int32_t)g->prompt[i];
    status = run_begin(&r, path, g->context, 1, g->n_prompt + g->n_greedy);
    if (status == MOE_OK && (size_t)r.model.vocabulary != g->vocabulary) complain(v, "vocabulary", "another size");
    else if (status == MOE_OK) status = run_tokens(&r, ids, g->n_prompt, 0);
    if (status != MOE_OK) complain(v, moe_status_text(status), r.error.message);
    if (v->why[0] == '\0') {
        whole = (moe_real *)grab(g->n_prompt * g->vocabulary, sizeof *whole);
        memcpy(whole, r.pass.y, g->n_prompt * g->vocabulary * sizeof *whole);
        v->worst = prompt_error(g, whole) / g->tolerance;
        same_bits(&r, g, ids, whole, g->n_prompt, v);
        same_bits(&r, g, ids, whole, 1, v);
        if (v->why[0] == '\0') greedy_tokens(&r, g, v);
        if (!(v->worst <= 1.0)) complain(v, "logits", "beyond the tolerance");
    }
    run_end(&r);
    if (v->why[0] == '\0') default_mode(path, g, ids, v);
    if (g->bound > 0.0 && !(v->loose <= 1.0)) complain(v, "by default", "beyond the loose bound");
    free(whole);
    free(ids);
}

/* ---- finding models ---- */

static int ends_in(const char *text, const char *with) {
    const size_t n = strlen(text), m = strlen(with);
    return n >= m && strcmp(text + n - m, with) == 0;
}

static int exists(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) return 0;
    fclose(file);
    return 1;
}

static void add_pair(const char *model, const char *gold_path) {
    int i;
    if (n_pairs == MAX_MODELS || strlen(model) >= PATH_ROOM || strlen(gold_path) >= PATH_ROOM) return;
    for (i = 0; i < n_pairs; i++)
        if (strcmp(pairs[i].gold, gold_path) == 0) return;
    strcpy(pairs[n_pairs].model, model);
    strcpy(pairs[n_pairs].gold, gold_path);
    n_pairs++;
}

/* The model beside a JSON file: NAME.gguf, part 1 of NAME, or for gold.json its folder. */
static void add_json(const char *path) {
    char model[PATH_ROOM + 32];
    const size_t stem = strlen(path) - 5;
    int parts;
    if (stem >= PATH_ROOM - 32) return;
    memcpy(model, path, stem + 1);
    if (ends_in(path, "gold.json")) {
        model[stem > 4 ? stem - 4 : 0] = '\0';
        add_pair(model[0] != '\0' ? model : ".", path);
        return;
    }
    strcpy(model + stem, ".gguf");
    for (parts = 2; !exists(model) && parts < 100; parts++) sprintf(model + stem, "-00001-of-%05d.gguf", parts);
    if (exists(model)) add_pair(model, path);
    else n_skipped++;
}

/* The JSON file beside a GGUF file. */
static void add_gguf(const char *path) {
    char json[PATH_ROOM + 8];
    size_t stem = strlen(path) - 5;
    if (stem >= PATH_ROOM) return;
    memcpy(json, path, stem);
    strcpy(json + stem, ".json");
    if (!exists(json) && stem > 15) strcpy(json + stem - 15, ".json"); /* -00001-of-00003 */
    if (exists(json)) add_pair(path, json);
    else {
        printf("skipped: %s: there is no %s\n", path, json);
        n_skipped++;
    }
}

#ifdef MODELS_FOLDERS
static int by_name(const void *a, const void *b) { return strcmp((const char *)a, (const char *)b); }

/* Models of a folder and of those in it; 0: path is no folder. */
static int add_folder(const char *path, int depth) {
    static const char *const apart = "/";
    DIR *folder = opendir(path);
    struct dirent *entry;
    char(*names)[256];
    char inner[PATH_ROOM + 300];
    int n = 0, i;
    if (folder == NULL) return 0;
    names = (char(*)[256])grab(MAX_MODELS, sizeof *names);
    while (n < MAX_MODELS && (entry = readdir(folder)) != NULL)
        if (entry->d_name[0] != '.' && strlen(entry->d_name) < sizeof names[0]) strcpy(names[n++], entry->d_name);
    closedir(folder);
    qsort(names, (size_t)n, sizeof names[0], by_name);
    for (i = 0; i < n && strlen(path) < PATH_ROOM; i++) {
        sprintf(inner, "%s%s%s", path, ends_in(path, "/") ? "" : apart, names[i]);
        if (ends_in(inner, "gold.json") || (ends_in(inner, ".json") && !ends_in(inner, "config.json") &&
                                            !ends_in(inner, ".index.json")))
            add_json(inner);
        else if (depth < 3 && strchr(names[i], '.') == NULL) (void)add_folder(inner, depth + 1);
    }
    free(names);
    return 1;
}
#else
static int add_folder(const char *path, int depth) {
    (void)path;
    (void)depth;
    return 0;
}
#endif

/* Models of a program in Python, which makes them in a folder; of none it removes it. */
static int run_maker(const char *path, int count) {
    char command[PATH_ROOM + 64];
    sprintf(command, "python3 %s models-made %d", path, count);
    return system(command) == 0;
}

static int add_made(const char *path) {
    if (system("python3 -c 0") == 0) return run_maker(path, 3) && add_folder("models-made", 0);
    printf("skipped: %s: python3 is not there\n", path);
    n_skipped++;
    return 1;
}

static int add_path(const char *path) {
    char gold_path[PATH_ROOM + 16];
    if (strlen(path) >= PATH_ROOM) return 0;
    if (ends_in(path, ".py")) return add_made(path);
    sprintf(gold_path, "%s/gold.json", path);
    if (exists(gold_path)) add_pair(path, gold_path);
    else if (add_folder(path, 0)) return 1;
    else if (!exists(path)) return 0;
    else if (ends_in(path, ".json")) add_json(path);
    else add_gguf(path);
    return 1;
}

/* Runs a pair: 1 passed, 0 failed, -1 skipped. */
static int run_pair(const pair *p) {
    char *text = read_text(p->gold);
    const char *name = p->model;
    gold g;
    verdict v;
    int result = -1;
    memset(&v, 0, sizeof v);
    v.loose = -1.0;
    if (text == NULL || value_of(text, "logits") == NULL) {
        free(text);
        return -1;
    }
    if (!gold_read(&g, text)) complain(&v, p->gold, "not a file of expected logits");
    else run_model(p->model, &g, &v);
    result = v.why[0] == '\0';
    printf("%s %s: %.3f of the tolerance %.2g", result ? "ok    " : "FAILED", name, v.worst, g.tolerance);
    if (v.loose >= 0.0) printf(", by default %.3f of %s", v.loose, g.bound > 0.0 ? "the loose bound" : "the tolerance");
    printf("%s%s\n", result ? "" : ": ", v.why);
    gold_free(&g);
    free(text);
    return result;
}

int main(int argc, char **argv) {
    int i, passed = 0, failed = 0;
    if (argc < 2) {
        fprintf(stderr, "usage: models FILE-OR-FOLDER...\n");
        return 2;
    }
    pairs = (pair *)grab(MAX_MODELS, sizeof *pairs);
    for (i = 1; i < argc; i++)
        if (!add_path(argv[i])) {
            fprintf(stderr, "models: cannot read %s\n", argv[i]);
            return 2;
        }
    for (i = 0; i < n_pairs; i++) {
        const int result = run_pair(&pairs[i]);
        if (result > 0) passed++;
        else if (result == 0) failed++;
        else n_skipped++;
    }
    free(pairs);
    for (i = 1; i < argc; i++)
        if (ends_in(argv[i], ".py")) (void)run_maker(argv[i], 0);
    printf("%d passed, %d failed, %d skipped\n", passed, failed, n_skipped);
    return failed > 0 || passed == 0;
}
