/* Chats with a published mixture-of-experts model: a GGUF file or a Hugging Face folder.
     cc -std=c99 -O2 -I. examples/chat.c -o chat -lm -pthread && ./chat MODEL
     (or: sh examples/run chat MODEL) */

#ifndef _WIN32
#define _POSIX_C_SOURCE 200809L /* clock_gettime, sigaction, sysconf */
#endif
#define MOE_IMPLEMENTATION
#include "moe.h"
#include "extras/moe_import.h"
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifndef _WIN32
#include <pthread.h>
#include <unistd.h>
#endif
#include "report.h"

/* Tokens of a prompt per call; fewer for large models, so that the workspace is about 16 MB. */
enum { BATCH = 128, WORK = 16000000, LINE_MOST = 1 << 16, SHOWN_MOST = 1000, CONTEXT = 4096 };

/* ---- options ---- */

static struct {
    const char *model, *prompt, *system, *kernels;
    double temperature, top_p;
    long seed, top_k, greedy, tokens, threads, experts, context, exact, plain, from_disk;
    int instructions; /* kernels as a number */
} set = {.kernels = "auto", .temperature = 0.7, .top_p = 0.95, .seed = 1, .top_k = 40, .tokens = 512};

enum { FLAG, WHOLE, REAL, TEXT };
static const struct option {
    const char *name, *value;
    int kind;
    void *at;
    double least, most;
    const char *help;
} options[] = {
    {"--prompt", "TEXT", TEXT, &set.prompt, 0, 0, "answers this and exits; token ids if the model has no vocabulary"},
    {"--system", "TEXT", TEXT, &set.system, 0, 0, "a system message before the first message"},
    {"--plain", "", FLAG, &set.plain, 0, 0, "continues the text as it is, without a chat template"},
    {"--tokens", "N", WHOLE, &set.tokens, 1, 1e9, "the largest number of tokens in a reply"},
    {"--seed", "N", WHOLE, &set.seed, 0, 1e9, "seed of all random choices"},
    {"--temperature", "X", REAL, &set.temperature, 1e-6, 1e6, "lower: more probable tokens"},
    {"--top-k", "N", WHOLE, &set.top_k, 0, 1e6, "samples from the N most probable tokens; 0: all"},
    {"--top-p", "X", REAL, &set.top_p, 1e-6, 1, "and only from the most probable ones with this total probability"},
    {"--greedy", "", FLAG, &set.greedy, 0, 0, "always takes the most probable token"},
    {"--experts", "N", WHOLE, &set.experts, 0, 1024, "at most N experts per token; 0: the model's number"},
    {"--context", "N", WHOLE, &set.context, 0, 1e7, "tokens of a conversation; 0: the model's, at most 4096"},
    {"--exact", "", FLAG, &set.exact, 0, 0, "does not quantize activations: slower, closer to the model's own program"},
    {"--threads", "N", WHOLE, &set.threads, 0, 256, "threads; 0: one per processor"},
    {"--kernels", "NAME", TEXT, &set.kernels, 0, 0, "instruction set: auto, c, avx2, ..."},
    {"--from-disk", "", FLAG, &set.from_disk, 0, 0, "also runs a model that is larger than the memory"},
    {"--report", "FILE", TEXT, &report_path, 0, 0,
     "what the experts did: a page (FILE.html), a picture (.svg) or text; -: on the screen"}};
enum { OPTIONS = sizeof options / sizeof *options };

static int fail(const char *what, const char *why) {
    fflush(stdout);
    fprintf(stderr, "chat: %s%s%s\n", what, why[0] != '\0' ? ": " : "", why);
    return 1;
}

/* Flushes the output; fails if it could not be written. */
static int finish(void) { return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0; }

static int show_help(void) {
    printf("chat [options] MODEL   chats with a model: a .gguf file (any part of a split one) or a folder with\n"
           "                       config.json, safetensors and tokenizer.json\n");
    for (const struct option *o = options; o < options + OPTIONS; o++) {
        printf("  %-14s %-5s  %s", o->name, o->value, o->help);
        if (o->kind == WHOLE) printf(" (%ld)", *(const long *)o->at);
        if (o->kind == REAL) printf(" (%g)", *(const double *)o->at);
        printf("\n");
    }
    printf("Ctrl-C ends a reply, Ctrl-D the program. Exit status: 0 done, 1 failed, 2 wrong options.\n");
    return finish();
}

static int set_option(const struct option *o, const char *value) {
    char *end;
    double number;
    if (o->kind == TEXT) {
        *(const char **)o->at = value;
        return 0;
    }
    number = strtod(value, &end);
    if (*value == '\0' || *end != '\0' || !(number >= o->least && number <= o->most) ||
        (o->kind == WHOLE && number != (double)(long)number)) {
        fprintf(stderr, "chat: %s %s: must be %s from %g to %g\n", o->name, value,
                o->kind == WHOLE ? "an integer" : "a number", o->least, o->most);
        return EXIT_USAGE;
    }
    if (o->kind == WHOLE) *(long *)o->at = (long)number;
    else *(double *)o->at = number;
    return 0;
}

/* Checks the options together. */
static int check_options(void) {
    const char *slash = set.model != NULL ? strrchr(set.model, '/') : NULL, *file = slash != NULL ? slash : set.model;
    const char *name;
    while ((name = moe_kernels_name(set.instructions)) != NULL && strcmp(name, set.kernels) != 0) set.instructions++;
    if (set.model == NULL) fail("which model? chat [options] MODEL", "see -h");
    else if (strstr(file, ".safetensors") != NULL) fail(set.model, "name its folder, where the vocabulary is too");
    else if (name == NULL)
        fail(set.kernels, "--kernels takes auto, c, avx2, avx512, neon, wasm");
    else if (set.plain && set.system != NULL) fail("--plain", "has no system message: leave out --system");
    else return report_checked("chat");
    return EXIT_USAGE;
}

static int read_options(int count, char **words) {
    for (int i = 1; i < count; i++) {
        const struct option *o = options;
        if (strcmp(words[i], "-h") == 0 || strcmp(words[i], "--help") == 0) exit(show_help());
        while (o < options + OPTIONS && strcmp(o->name, words[i]) != 0) o++;
        if (o < options + OPTIONS && o->kind == FLAG) *(long *)o->at = 1;
        else if (o < options + OPTIONS && i + 1 < count) {
            const int wrong = set_option(o, words[++i]);
            if (wrong) return wrong;
        } else if (o < options + OPTIONS) {
            fail(o->name, "needs a value; see -h");
            return EXIT_USAGE;
        } else if (words[i][0] == '-' || set.model != NULL) {
            fail(words[i], words[i][0] == '-' ? "is not an option; -h lists them" : "a second model; one at a time");
            return EXIT_USAGE;
        } else set.model = words[i];
    }
    return check_options();
}

/* ---- the machine ---- */

static volatile sig_atomic_t interrupted;

static void interrupt(int signal_number) {
    interrupted = signal_number;
#ifdef _WIN32
    signal(signal_number, interrupt);
#endif
}

static void catch_interrupts(void) {
#ifdef _WIN32
    signal(SIGINT, interrupt);
#else
    struct sigaction action;
    memset(&action, 0, sizeof action); /* no SA_RESTART: Ctrl-C interrupts reading */
    action.sa_handler = interrupt;
    sigaction(SIGINT, &action, NULL);
#endif
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

/* Bytes of the machine's memory; 0: unknown. */
static uint64_t machine_memory(void) {
#if defined(_SC_PHYS_PAGES) && defined(_SC_PAGESIZE)
    const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size : 0;
#else
    return 0;
#endif
}

/* Bytes of the program's own memory, and of mapped files in memory; 0: unknown. */
static double memory_used(double *mapped) {
    char line[200];
    double own = 0;
    FILE *f = fopen("/proc/self/status", "r");
    *mapped = 0;
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, "RssAnon:", 8) == 0) own = 1024 * strtod(line + 8, NULL);
        if (strncmp(line, "RssFile:", 8) == 0) *mapped = 1024 * strtod(line + 8, NULL);
    }
    if (f != NULL) fclose(f);
    return own;
}

#ifndef _WIN32
/* Threads that wait for work. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t come, gone;
    void (*task)(void *work, int index);
    void *work;
    int next, count, running;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .come = PTHREAD_COND_INITIALIZER, .gone = PTHREAD_COND_INITIALIZER};

/* Runs tasks until none is left; the lock is held before and after. */
static void work_off(void) {
    while (pool.next < pool.count) {
        const int index = pool.next++;
        pool.running++;
        pthread_mutex_unlock(&pool.lock);
        pool.task(pool.work, index);
        pthread_mutex_lock(&pool.lock);
        pool.running--;
    }
}

static void *serve(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        work_off();
        if (pool.running == 0) pthread_cond_signal(&pool.gone);
        pthread_cond_wait(&pool.come, &pool.lock);
    }
    return NULL;
}

static void run_tasks(void *unused, void (*task)(void *work, int index), void *work, int count) {
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    pool.task = task;
    pool.work = work;
    pool.next = 0;
    pool.count = count;
    pthread_cond_broadcast(&pool.come);
    work_off();
    while (pool.running > 0) pthread_cond_wait(&pool.gone, &pool.lock);
    pool.count = pool.next = 0;
    pthread_mutex_unlock(&pool.lock);
}
#endif

/* Starts the threads, or as many as the system allows. */
static moe_parallel start_threads(void) {
    moe_parallel parallel;
    memset(&parallel, 0, sizeof parallel);
#ifndef _WIN32
    long wanted = set.threads > 0 ? set.threads : sysconf(_SC_NPROCESSORS_ONLN);
    parallel.threads = 1;
    for (; wanted > 1; wanted--) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, NULL) != 0) break;
        pthread_detach(thread);
        parallel.threads++;
    }
    parallel.run = run_tasks;
#endif
    return parallel;
}

/* ---- what the experts do, for the report ---- */

typedef struct layer_record {
    size_t module;
    moe_metrics metrics;
    int32_t first[SHOWN_MOST]; /* the first choice of each token */
    float weight[SHOWN_MOST];  /* its weight */
} layer_record;

static struct {
    layer_record *layers;
    size_t n_layers;
    int32_t ids[SHOWN_MOST]; /* the first tokens */
    size_t n;
} record;

static void *grab(size_t count, size_t size) {
    void *p = size == 0 || count < SIZE_MAX / size ? calloc(count > 0 ? count : 1, size > 0 ? size : 1) : NULL;
    if (p == NULL) exit(fail("out of memory", ""));
    return p;
}

static void record_begin(const moe_net *net) {
    size_t i, bytes;
    record.layers = (layer_record *)grab(net->n_modules, sizeof *record.layers);
    for (i = 0; i < net->n_modules; i++) {
        layer_record *r = record.layers + record.n_layers;
        const size_t n_experts = (size_t)net->modules[i].layer.config.router.n_experts;
        if (net->modules[i].kind != MOE_MODULE_MIXTURE || moe_metrics_size(n_experts, 0, &bytes) != MOE_OK) continue;
        r->module = i;
        if (moe_metrics_init(&r->metrics, n_experts, 0, grab(bytes, 1), bytes) == MOE_OK) record.n_layers++;
    }
}

static void record_pass(const moe_net *net, const moe_net_pass *pass, const int32_t *ids) {
    for (size_t i = 0; i < record.n_layers; i++) {
        layer_record *r = record.layers + i;
        const moe_routing *routing = moe_net_routing(net, pass, r->module);
        if (routing == NULL) continue;
        (void)moe_metrics_add(&r->metrics, routing, NULL, NULL);
        for (size_t t = 0; t < routing->n_tokens && record.n + t < SHOWN_MOST; t++) {
            const int32_t e = routing->n_choices[t] > 0 ? routing->choices[t * routing->max_choices] : -1;
            r->first[record.n + t] = e;
            r->weight[record.n + t] = e >= 0 ? (float)routing->weights[t * routing->n_experts + (size_t)e] : 0;
        }
    }
    for (size_t t = 0; t < pass->n_tokens && record.n < SHOWN_MOST; t++) record.ids[record.n++] = ids[t];
}

/* ---- a conversation ---- */

typedef struct session {
    moe_imported model;
    moe_tokenizer tokenizer;
    int has_words;            /* 0: there is no vocabulary */
    const moe_chat *chat;     /* NULL: text is continued */
    moe_cache cache;
    moe_parallel parallel;
    void *work;
    size_t work_size, batch;
    const moe_real *logits;   /* after the last token */
    moe_real *p;
    int32_t *order;
    moe_rng rng;
    moe_buffer text;          /* of a turn */
} session;

/* Runs the model on tokens; 0: stopped by Ctrl-C, or by an error that has been reported. */
static int feed(session *s, const int32_t *ids, size_t n) {
    moe_net_pass pass;
    moe_status status = MOE_OK;
    for (size_t at = 0; at < n && status == MOE_OK && !interrupted; at += s->batch) {
        moe_call call;
        memset(&call, 0, sizeof call);
        call.n_tokens = n - at < s->batch ? n - at : s->batch;
        call.token_ids = ids + at;
        call.parallel = &s->parallel;
        status = moe_net_decode(&s->model.net, &s->cache, &call, s->work, s->work_size, &pass);
        if (status != MOE_OK) break;
        s->logits = pass.y; /* of the last token */
        if (report_path != NULL) record_pass(&s->model.net, &pass, ids + at);
    }
    if (status == MOE_ERR_SPACE) fail("the context is full", "--context N makes it larger");
    else if (status != MOE_OK) fail("the model", moe_status_text(status));
    return status == MOE_OK && !interrupted;
}

/* The token ids of the next turn: of its text or, without a vocabulary, the numbers in it. */
static int32_t *read_tokens(session *s, const char *text, size_t size, int flags, size_t *n) {
    const size_t room = 4 * size + 8;
    int32_t *ids = (int32_t *)grab(room, sizeof *ids);
    *n = 0;
    if (s->has_words) {
        const moe_status status = moe_tokenizer_encode(&s->tokenizer, text, size, flags, ids, room, n);
        size_t i = 0;
        while (status == MOE_OK && i < *n && ids[i] < s->model.vocabulary) i++;
        if (status != MOE_OK || i < *n || *n == 0) {
            fail("the message", status != MOE_OK ? moe_status_text(status)
                                : i < *n         ? "has tokens that the model lacks"
                                                 : "has no tokens");
            *n = 0;
        }
        return ids;
    }
    for (text += strspn(text, " \t,"); *text != '\0'; text += strspn(text, " \t,")) {
        char *end;
        const long id = strtol(text, &end, 10);
        if (end == text || id < 0 || id >= s->model.vocabulary) {
            fprintf(stderr, "chat: this model has no vocabulary: write token ids, 0 to %d\n", s->model.vocabulary - 1);
            *n = 0;
            return ids;
        }
        ids[(*n)++] = (int32_t)id;
        text = end;
    }
    if (*n == 0) fail("the message", "has no token ids");
    return ids;
}

static void show_numbers(const session *s, size_t read, double reading, size_t wrote, double writing) {
    double mapped, own = memory_used(&mapped);
    printf("[");
    if (read > 0) printf("read %d tokens at %.1f per second, ", (int)read, (double)read / (reading + 1e-9));
    printf("wrote %d at %.1f per second", (int)wrote, (double)wrote / (writing + 1e-9));
    if (own <= 0) own = (double)(s->cache.size + s->work_size);
    printf("; memory %.1f MB", own / 1e6);
    if (mapped > 0) printf(" and %.1f MB of files of %.1f MB", mapped / 1e6, (double)s->model.file_bytes / 1e6);
    printf("; context %d of %d]\n", (int)s->cache.n_tokens, (int)s->cache.most);
}

/* Writes text; control characters, which could change the terminal, show as ?. Those from U+0080 to
   U+009F are C2 and a byte below A0. */
static void write_text(const char *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)text[i];
        const int high = c == 0xC2 && i + 1 < n && ((unsigned char)text[i + 1] & 0xE0) == 0x80;
        putchar((c < ' ' && c != '\n' && c != '\t') || c == 127 || high ? '?' : c);
        i += (size_t)high;
    }
    fflush(stdout);
}

/* Generates a reply; 0 after an error message. */
static int reply(session *s, size_t n_read, double reading) {
    const moe_sampling how = {(int)set.greedy, (moe_real)set.temperature, (int)set.top_k, (moe_real)set.top_p};
    const size_t room = s->has_words ? moe_tokenizer_room(&s->tokenizer) : 1;
    char *text = (char *)grab(room, 1);
    moe_decoder decoder;
    double began = seconds();
    size_t n = 0;
    int good = 1;
    memset(&decoder, 0, sizeof decoder);
    decoder.tokenizer = &s->tokenizer;
    decoder.begun = s->chat == NULL; /* continued text keeps its leading space */
    while (good && n < (size_t)set.tokens && !interrupted) {
        int32_t id;
        moe_error error;
        if (moe_sample(&how, (size_t)s->model.net.d_out, s->logits, &s->rng, s->p, s->order, &id, &error) != MOE_OK) {
            good = !fail("the next token", error.message);
            break;
        }
        if (s->has_words && moe_tokenizer_is_end(&s->tokenizer, id)) break;
        n++;
        if (s->has_words) write_text(text, moe_tokenizer_decode(&decoder, id, text, room));
        else printf("%s%d", n > 1 ? " " : "", (int)id);
        fflush(stdout);
        if (s->cache.n_tokens == s->cache.most) break;
        good = feed(s, &id, 1) || interrupted;
    }
    if (s->has_words) write_text(text, moe_tokenizer_decode(&decoder, -1, text, room));
    printf("\n");
    show_numbers(s, n_read, reading, n, seconds() - began);
    free(text);
    return good;
}

/* Makes the text of a turn: what closes the reply before, the message, the opening of the reply.
   first: the conversation begins, with the system message if there is one. */
static moe_status put_message(session *s, const char *message, int first) {
    moe_stream stream = moe_buffer_stream(&s->text);
    const char *after = s->chat->after[MOE_CHAT_ASSISTANT];
    int previous = first ? -1 : MOE_CHAT_ASSISTANT;
    moe_status status = MOE_OK;
    s->text.size = 0;
    if (!first) status = stream.write(stream.ctx, after, strlen(after));
    if (first && set.system != NULL) {
        status = moe_chat_put(s->chat, MOE_CHAT_SYSTEM, previous, set.system, &s->text);
        previous = MOE_CHAT_SYSTEM;
    }
    if (status == MOE_OK) status = moe_chat_put(s->chat, MOE_CHAT_USER, previous, message, &s->text);
    return status == MOE_OK ? moe_chat_put(s->chat, MOE_CHAT_ASSISTANT, MOE_CHAT_USER, NULL, &s->text) : status;
}

/* The tokens of a message; n = 0 after an error message. */
static int32_t *message_tokens(session *s, const char *message, int first, size_t *n) {
    const int flags = first ? MOE_TOKENIZER_BOUNDS : 0;
    moe_status status;
    if (s->chat == NULL) return read_tokens(s, message, strlen(message), flags, n);
    status = put_message(s, message, first);
    if (status == MOE_OK)
        return read_tokens(s, (const char *)s->text.data, s->text.size, flags | MOE_TOKENIZER_SPECIAL, n);
    fail("the message", moe_status_text(status));
    *n = 0;
    return NULL;
}

/* One message and its reply; 0 after an error message. A message that cannot be read changes
   nothing. */
static int turn(session *s, const char *message) {
    const int first = s->cache.n_tokens == 0;
    size_t n;
    int32_t *ids = message_tokens(s, message, first, &n);
    const double began = seconds();
    int good;
    interrupted = 0;
    if (n > s->cache.most - s->cache.n_tokens && !first) {
        free(ids);
        ids = message_tokens(s, message, 1, &n);
        if (n > 0 && n <= s->cache.most) {
            printf("(the context is full: the conversation starts over)\n");
            s->cache.n_tokens = 0;
        }
    }
    if (n > s->cache.most) {
        fail("the context is full", "--context N makes it larger");
        n = 0;
    }
    good = n > 0 && feed(s, ids, n);
    free(ids);
    if (n == 0) return 0;
    if (good) return reply(s, n, seconds() - began);
    return interrupted != 0;
}

/* Reads a line; NULL: the input ended. Ctrl-C gives an empty line. */
static char *read_line(char *line) {
    size_t n;
    interrupted = 0;
    if (isatty(0)) printf("> ");
    fflush(stdout);
    if (fgets(line, LINE_MOST, stdin) == NULL) {
        if (!interrupted) return NULL;
        clearerr(stdin);
        printf("\n(Ctrl-D ends the program)\n");
        line[0] = '\0';
        return line;
    }
    n = strlen(line);
    if (n + 1 == LINE_MOST && line[n - 1] != '\n') {
        int next = getchar();
        if (next != EOF && next != '\n') {
            while ((next = getchar()) != EOF && next != '\n') continue;
            fail("the message", "is longer than 65535 bytes; --prompt takes a longer one");
            n = 0;
            line[0] = '\0';
        }
    }
    while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) line[--n] = '\0';
    return line;
}

static int talk(session *s) {
    static char line[LINE_MOST];
    if (set.prompt != NULL) {
        const int good = turn(s, set.prompt);
        return !good;
    }
    while (read_line(line) != NULL)
        if (line[0] != '\0') (void)turn(s, line);
    printf("\n");
    return 0;
}

/* ---- the report ---- */

static const char **layer_names(void) {
    const char **names = (const char **)report_grab(record.n_layers + 1, sizeof *names);
    for (size_t i = 0; i < record.n_layers; i++) {
        char name[32];
        sprintf(name, "layer %d", (int)i + 1);
        names[i] = report_text(name);
    }
    return names;
}

/* The text of a single token. */
static const char *token_text(const session *s, int32_t id) {
    const size_t room = s->has_words ? moe_tokenizer_room(&s->tokenizer) + 1 : 16;
    char *text = (char *)report_grab(room, 1);
    moe_decoder decoder;
    size_t n;
    if (!s->has_words) {
        sprintf(text, "%d ", (int)id);
        return text;
    }
    memset(&decoder, 0, sizeof decoder);
    decoder.tokenizer = &s->tokenizer;
    decoder.flags = MOE_TOKENIZER_SPECIAL;
    decoder.begun = 1;
    n = moe_tokenizer_decode(&decoder, id, text, room - 1);
    (void)moe_tokenizer_decode(&decoder, -1, text + n, room - 1 - n);
    return text;
}

static void report_text_by_expert(const session *s) {
    moe_figure *f = report_add(MOE_FIGURE_TOKENS, "The text by expert", record.n_layers, record.n);
    int32_t *experts = (int32_t *)report_grab(record.n_layers * record.n + 1, sizeof *experts);
    double *weights = (double *)report_grab(record.n_layers * record.n + 1, sizeof *weights);
    const char **names = (const char **)report_grab(record.n + 1, sizeof *names);
    for (size_t i = 0; i < record.n_layers; i++)
        for (size_t t = 0; t < record.n; t++) {
            experts[i * record.n + t] = record.layers[i].first[t];
            weights[i * record.n + t] = (double)record.layers[i].weight[t];
        }
    for (size_t t = 0; t < record.n; t++) names[t] = token_text(s, record.ids[t]);
    f->experts = experts;
    f->values = weights;
    f->column_names = names;
    f->row_names = layer_names();
    f->caption = "Under each token, its first choice in every layer.";
}

/* Entropies and balance of every layer. */
static void report_entropies(void) {
    static const char *const columns[] = {"experts",  "per token", "H_b (nats)", "H_e (nats)", "H_load (nats)",
                                          "most (nats)", "max load / mean"};
    enum { COLUMNS = sizeof columns / sizeof *columns };
    double *values = (double *)report_grab(record.n_layers * COLUMNS + 1, sizeof *values), *v = values;
    moe_figure *f = report_add(MOE_FIGURE_TABLE, "Entropies of every layer", record.n_layers, COLUMNS);
    for (size_t i = 0; i < record.n_layers; i++, v += COLUMNS) {
        moe_report r;
        if (moe_metrics_report(&record.layers[i].metrics, &r) != MOE_OK) continue;
        v[0] = (double)r.n_experts;
        v[1] = r.experts_per_token;
        v[2] = r.confidence_entropy;
        v[3] = r.usage_entropy;
        v[4] = r.load_entropy;
        v[5] = log((double)r.n_experts);
        v[6] = r.load_max_over_mean;
    }
    f->values = values;
    f->column_names = columns;
    f->row_names = layer_names();
    f->decimals = 3;
    f->caption = "H_b: how undecided the router is about a token; H_e and H_load: how evenly gate and load use the "
                 "experts; most: the entropy of an even load.";
}

static void report_load(void) {
    size_t widest = 0;
    double *shares;
    moe_figure *f;
    for (size_t i = 0; i < record.n_layers; i++)
        if (record.layers[i].metrics.n_experts > widest) widest = record.layers[i].metrics.n_experts;
    shares = (double *)report_grab(record.n_layers * widest + 1, sizeof *shares);
    f = report_add(MOE_FIGURE_HEAT, "Load by layer and expert", record.n_layers, widest);
    for (size_t i = 0; i < record.n_layers; i++) {
        const moe_metrics *m = &record.layers[i].metrics;
        for (size_t e = 0; e < m->n_experts && m->n_tokens > 0; e++)
            shares[i * widest + e] = 100 * m->load[e] / m->n_tokens;
    }
    f->values = shares;
    f->row_names = layer_names();
    f->row_label = "layer";
    f->column_label = "expert";
    f->value_label = "% of tokens";
    for (size_t i = 0; i < record.n_layers && report_n < REPORT_MOST; i++) {
        moe_report r;
        char title[64];
        if (moe_metrics_report(&record.layers[i].metrics, &r) != MOE_OK) continue;
        sprintf(title, "Layer %d: load", (int)i + 1);
        (void)report_take(moe_figure_load(&r), title);
    }
}

static int write_report(const session *s) {
    if (report_path == NULL) return 0;
    if (record.n == 0) return fail("--report", "no token was read");
    report_text_by_expert(s);
    report_entropies();
    report_load();
    return report_write_added("chat", "What the experts of a model did");
}

/* ---- opening a model ---- */

/* Whether the model is a folder without tokenizer.json. */
static int lacks_words(void) {
    char path[1100];
    FILE *f;
    if (strlen(set.model) > 1000) return 0;
    sprintf(path, "%s/config.json", set.model);
    f = fopen(path, "rb");
    if (f == NULL) return 0;
    fclose(f);
    sprintf(path, "%s/tokenizer.json", set.model);
    f = fopen(path, "rb");
    if (f != NULL) fclose(f);
    return f == NULL;
}

static int open_words(session *s) {
    moe_error error;
    const moe_status status = moe_import_tokenizer(&s->tokenizer, set.model, NULL, &error);
    s->has_words = status == MOE_OK;
    if (status == MOE_ERR_NOT_FOUND || (status != MOE_OK && lacks_words())) {
        printf("(the model has no vocabulary: token ids are read and written)\n");
        return set.system != NULL ? fail("--system", "needs a model with a vocabulary") : 0;
    }
    if (status != MOE_OK) return fail("the vocabulary", error.message);
    s->chat = set.plain ? NULL : moe_chat_find(&s->tokenizer);
    if (s->chat == NULL && !set.plain)
        printf("(the model has %s: text is continued as it is)\n",
               s->tokenizer.chat_template != NULL ? "an unknown chat template" : "no chat template");
    if (s->chat == NULL && set.system != NULL) return fail("--system", "needs a model with a known chat template");
    return 0;
}

static int open_model(session *s) {
    moe_import_options o;
    moe_error error;
    size_t bytes;
    void *memory;
    size_t context;
    memset(&o, 0, sizeof o);
    o.exact = (int)set.exact;
    o.context = (int)set.context;
    o.top_k = (int)set.experts;
    o.kernels = set.instructions;
    if (!set.from_disk) o.memory = machine_memory();
    if (moe_import_model(&s->model, set.model, &o, NULL, &error) != MOE_OK) {
        fail(error.message, error.code == MOE_ERR_MEMORY && o.memory > 0 ? "--from-disk runs it anyway" : "");
        return 1;
    }
    if (set.context == 0 && s->model.context > CONTEXT) { /* RoPE factors may depend on it */
        moe_import_free(&s->model);
        o.context = CONTEXT;
        if (moe_import_model(&s->model, set.model, &o, NULL, &error) != MOE_OK) return fail(error.message, "");
    }
    if (open_words(s)) return 1;
    context = s->model.context > 0 ? (size_t)s->model.context : (size_t)CONTEXT;
    s->model.net.last_only = 1;
    s->batch = 2 * BATCH;
    do {
        s->batch /= 2;
        if (moe_net_decode_size(&s->model.net, context, s->batch, &bytes, &s->work_size, &error) != MOE_OK)
            return fail(set.model, error.message);
    } while (s->batch > 1 && s->work_size > WORK);
    memory = malloc(bytes);
    s->work = malloc(s->work_size);
    if (memory == NULL || s->work == NULL) return fail("out of memory", "--context N needs less");
    if (moe_net_cache_init(&s->cache, &s->model.net, context, memory, bytes, &error) != MOE_OK)
        return fail(set.model, error.message);
    s->p = (moe_real *)grab((size_t)s->model.net.d_out, sizeof *s->p);
    s->order = (int32_t *)grab((size_t)s->model.net.d_out, sizeof *s->order);
    if (report_path != NULL) record_begin(&s->model.net);
    return 0;
}

static void close_model(session *s) {
    for (size_t i = 0; i < record.n_layers; i++) free(record.layers[i].metrics.load);
    free(record.layers);
    free(s->cache.memory);
    free(s->work);
    free(s->p);
    free(s->order);
    moe_buffer_free(&s->text);
    moe_tokenizer_free(&s->tokenizer);
    moe_import_free(&s->model);
}

int main(int count, char **words) {
    static session s;
    int failed;
    failed = read_options(count, words);
    if (failed) return failed;
    moe_rng_seed(&s.rng, (uint64_t)set.seed);
    s.parallel = start_threads();
    failed = open_model(&s);
    if (!failed) {
        printf("%s: %s, %d blocks, %d tokens of vocabulary, %.1f MB\n", set.model, s.model.architecture,
               s.model.n_blocks, s.model.vocabulary, (double)s.model.file_bytes / 1e6);
        catch_interrupts();
        failed = talk(&s);
        if (!failed) failed = write_report(&s);
        if (!failed) failed = finish();
    }
    close_model(&s);
    return failed;
}
