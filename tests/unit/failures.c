/* What fails: every allocation, write, flush, close, rename, open, read and seek in turn, in every
   public function that does such a thing.
     cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/failures.c -o failures -lm && ./failures [FOLDER]
   FOLDER is where the headers lie (. or tests/..): their text is searched for public functions that
   can reach memory or files, and each must have a row here. Writes files named failures-test*
   into the current folder and removes them. */

/* Memory and files of the library come through the functions below, whatever the compiler, linker
   and system. They fail where the test says so. */
#if defined(__unix__) || defined(__APPLE__)
#define _XOPEN_SOURCE 700
#endif
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__unix__) || defined(__APPLE__)
#define HAS_POSIX 1
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#else
#define HAS_POSIX 0
#endif

static void *trap_realloc(void *block, size_t size);
static void trap_free(void *block);
static FILE *trap_open(const char *name, const char *mode);
static size_t trap_read(void *to, size_t size, size_t count, FILE *f);
static size_t trap_write(const void *from, size_t size, size_t count, FILE *f);
static int trap_flush(FILE *f);
static int trap_close(FILE *f);
static int trap_error(FILE *f);
static int trap_seek(FILE *f, long to, int from);
static long trap_tell(FILE *f);
static int trap_rename(const char *from, const char *to);
static int trap_remove(const char *name);
#if HAS_POSIX
static int trap_open_number(const char *name, int flags, ...);
static int trap_close_number(int file);
static int trap_dup(int file);
static FILE *trap_fdopen(int file, const char *mode);
static int trap_sync(int file);
#endif

#define realloc(block, size) trap_realloc(block, size)
#define free(block) trap_free(block)
#define fopen(name, mode) trap_open(name, mode)
#define fread(to, size, count, f) trap_read(to, size, count, f)
#define fwrite(from, size, count, f) trap_write(from, size, count, f)
#define fflush(f) trap_flush(f)
#define fclose(f) trap_close(f)
#undef ferror
#define ferror(f) trap_error(f)
#define fseek(f, to, from) trap_seek(f, to, from)
#define ftell(f) trap_tell(f)
#define rename(from, to) trap_rename(from, to)
#define remove(name) trap_remove(name)

#define MOEI_SEEK_MOST 1000 /* so that files of published layers need more than one seek */
#define MOE_IMPLEMENTATION
#if HAS_POSIX /* the core's: extras have members of such names */
#define open(...) trap_open_number(__VA_ARGS__)
#define close(file) trap_close_number(file)
#define dup(file) trap_dup(file)
#define fdopen(file, mode) trap_fdopen(file, mode)
#define fsync(file) trap_sync(file)
#include "moe.h"
#undef open
#undef close
#undef dup
#undef fdopen
#undef fsync
#endif
#include "../all.h"
#include "vocab.h"
#include "whole.h"

#undef realloc
#undef free
#undef fopen
#undef fread
#undef fwrite
#undef fflush
#undef fclose
#undef ferror
#undef fseek
#undef ftell
#undef rename
#undef remove

#include "../test.h"

#define CHECK_SAYS(condition, what, error) CHECKF(condition, "%s: %s", what, (error)->message)

/* ---- the trap: the number of a call that fails ---- */

enum {
    OP_MEMORY = 1,
    OP_STREAM = 2,
    OP_FETCH = 4,
    OP_OPEN = 8,
    OP_READ = 16,
    OP_WRITE = 32,
    OP_FLUSH = 64,
    OP_CLOSE = 128,
    OP_SEEK = 256,
    OP_TELL = 512,
    OP_RENAME = 1024,
    OP_REMOVE = 2048,
    /* remove is what tidies up after a failure: it fails in a test of its own */
    OP_CLOSE_READ = 4096 /* closing what was only read */,
    OP_SYNC = 8192,
    OP_SYNC_FOLDER = 16384, /* after the renaming: it fails in a test of its own */
    OP_LAST = OP_SYNC_FOLDER,
    /* what may be done without: a larger block, the first name for a new file, a file's size, the
       end of reading */
    FILES = OP_OPEN | OP_READ | OP_WRITE | OP_FLUSH | OP_CLOSE | OP_SEEK | OP_TELL | OP_RENAME | OP_CLOSE_READ |
            OP_SYNC,
    SPARED = OP_MEMORY | OP_OPEN | OP_SEEK | OP_TELL | OP_CLOSE_READ
};

static const char *const op_names[] = {"memory",
                                       "stream",
                                       "fetch",
                                       "open",
                                       "read",
                                       "write",
                                       "flush",
                                       "close",
                                       "seek",
                                       "tell",
                                       "rename",
                                       "remove",
                                       "close after reading",
                                       "sync",
                                       "sync of the folder"};
enum { N_OPS = (int)(sizeof op_names / sizeof op_names[0]) };

typedef struct trap_state {
    unsigned ops;        /* which are counted and may fail */
    long calls, at;      /* so far; the one that fails, from 1 (0: none) */
    int once;            /* 1: that one alone; 0: all later ones too */
    moe_status status;   /* what streams and loaders say */
    unsigned fired;      /* what has failed */
    long calls_after;    /* calls of any kind after the first failure */
    size_t most_read;    /* 0, or the most bytes that one read gives */
    const char *other;   /* a file that somebody writes anew when its second read begins: one half of it, or twice */
    int halves, reads;   /* how many halves */
} trap_state;

static trap_state trap;
static unsigned long fired_count[N_OPS];

static int reason_of(unsigned op) {
    switch (op) {
#ifdef EMFILE
    case OP_OPEN: return EMFILE;
#endif
#ifdef ENOSPC
    case OP_WRITE:
    case OP_FLUSH: return ENOSPC;
#endif
#ifdef EACCES
    case OP_RENAME: return EACCES;
#endif
#ifdef EIO
    case OP_READ:
    case OP_SYNC:
    case OP_SYNC_FOLDER:
    case OP_CLOSE:
    case OP_CLOSE_READ: return EIO;
#endif
    default: return ERANGE;
    }
}

static int trapped(unsigned op) {
    int i;
    if (!(trap.ops & op)) return 0;
    trap.calls++;
    if (trap.fired != 0) trap.calls_after++;
    if (trap.at == 0 || trap.calls < trap.at || (trap.once && trap.calls > trap.at)) return 0;
    trap.fired |= op;
    for (i = 0; i < N_OPS; i++) fired_count[i] += op == 1u << i;
    errno = reason_of(op);
    return 1;
}

static void disarm(void) { memset(&trap, 0, sizeof trap); }

static void arm(unsigned ops, long at, int once, moe_status status) {
    disarm();
    trap.ops = ops;
    trap.at = at;
    trap.once = once;
    trap.status = status;
}

/* ---- memory ---- */

/* Both heaps, that of an allocator and the standard one, know each block's size and what is out. */
typedef struct heap_state {
    size_t blocks, bytes;
    int confused; /* an allocator was told a wrong size */
} heap_state;

static heap_state heap;
enum { PREFIX = 32 };

static size_t size_of(const unsigned char *block) {
    size_t size;
    memcpy(&size, block - PREFIX, sizeof size);
    return size;
}

static void trap_free(void *block) {
    unsigned char *p = (unsigned char *)block;
    if (p == NULL) return;
    heap.blocks--;
    heap.bytes -= size_of(p);
    memset(p, 0xdd, size_of(p)); /* what is read after its end is not what it was */
    free(p - PREFIX);
}

/* Always moves, so that old addresses are wrong. */
static void *trap_realloc(void *block, size_t size) {
    unsigned char *old = (unsigned char *)block, *p;
    size_t keep = old != NULL ? size_of(old) : 0;
    if (trapped(OP_MEMORY)) return NULL;
    if (size > (size_t)1 << 30 || (p = (unsigned char *)malloc(PREFIX + size)) == NULL) return NULL;
    memcpy(p, &size, sizeof size);
    p += PREFIX;
    memset(p, 0xcc, size);
    if (old != NULL) memcpy(p, old, keep < size ? keep : size);
    heap.blocks++;
    heap.bytes += size;
    trap_free(block);
    return p;
}

static void *own_resize(void *ctx, void *block, size_t old_size, size_t new_size) {
    (void)ctx;
    if ((block != NULL ? size_of((unsigned char *)block) : 0) != old_size) heap.confused = 1;
    if (new_size > 0) return trap_realloc(block, new_size);
    trap_free(block);
    return NULL;
}

static moe_allocator own_allocator(void) {
    moe_allocator a;
    a.ctx = NULL;
    a.resize = own_resize;
    return a;
}

/* ---- files ---- */

static int open_files;
static FILE *broken;  /* its error indicator is set */
static FILE *written; /* the one that was opened for writing */

static FILE *trap_open(const char *name, const char *mode) {
    FILE *f;
    if (trapped(OP_OPEN)) return NULL;
    f = fopen(name, mode);
    open_files += f != NULL;
    if (f != NULL && mode[0] == 'w') written = f;
    return f;
}

#if HAS_POSIX
/* Opening for a look at what a killed process has left may fail: then it stays. */
static int trap_open_number(const char *name, int flags, ...) {
    int file, mode = 0;
    if (flags & O_CREAT) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, int);
        va_end(more);
    }
    if (!(flags & O_NONBLOCK) && trapped(OP_OPEN)) return -1;
    file = open(name, flags, mode);
    open_files += file >= 0;
    return file;
}

static int trap_close_number(int file) {
    open_files--;
    return close(file);
}

static int trap_dup(int file) {
    int made = trapped(OP_OPEN) ? -1 : dup(file);
    open_files += made >= 0;
    return made;
}

static FILE *trap_fdopen(int file, const char *mode) {
    return trapped(OP_OPEN) ? NULL : (written = fdopen(file, mode));
}

static int trap_sync(int file) {
    struct stat is;
    if (fstat(file, &is) != 0) return -1;
    return trapped(S_ISDIR(is.st_mode) ? OP_SYNC_FOLDER : OP_SYNC) ? -1 : 0;
}
#endif

static int trap_error(FILE *f) { return f == broken ? 1 : ferror(f); }

static int trap_close(FILE *f) {
    int bad = trapped(f == written ? OP_CLOSE : OP_CLOSE_READ), reason = errno;
    int result = fclose(f);
    open_files--;
    if (f == broken) broken = NULL;
    if (f == written) written = NULL;
    if (!bad) return result;
    errno = reason;
    return EOF;
}

static void put_file(const char *name, const void *bytes, size_t size) {
    FILE *f = fopen(name, "wb");
    if (f == NULL || fwrite(bytes, 1, size, f) != size || fclose(f) != 0) {
        printf("%s cannot be written\n", name);
        exit(2);
    }
}

/* Writes the first half of a file, or all of it, again. */
static void rewrite_file(const char *name, int halves) {
    static char text[1 << 18];
    FILE *f = fopen(name, "rb");
    size_t n;
    if (f == NULL) return;
    n = fread(text, 1, sizeof text / 2, f);
    fclose(f);
    memcpy(text + n, text, n);
    put_file(name, text, n * (size_t)halves / 2);
}

static size_t trap_read(void *to, size_t size, size_t count, FILE *f) {
    if (trapped(OP_READ)) {
        broken = f;
        return 0;
    }
    if (trap.other != NULL && ++trap.reads == 2) rewrite_file(trap.other, trap.halves);
    if (trap.most_read > 0 && size * count > trap.most_read) return fread(to, 1, trap.most_read, f) / size;
    return fread(to, size, count, f);
}

/* One that fails takes half of the bytes. */
static size_t trap_write(const void *from, size_t size, size_t count, FILE *f) {
    if (trapped(OP_WRITE)) {
        int reason = errno;
        count = fwrite(from, size, count / 2, f);
        broken = f;
        errno = reason;
        return count;
    }
    return fwrite(from, size, count, f);
}

static int trap_flush(FILE *f) {
    return trapped(OP_FLUSH) ? EOF : fflush(f);
}

static int trap_seek(FILE *f, long to, int from) { return trapped(OP_SEEK) ? -1 : fseek(f, to, from); }
static long trap_tell(FILE *f) { return trapped(OP_TELL) ? -1 : ftell(f); }
static int trap_rename(const char *from, const char *to) { return trapped(OP_RENAME) ? -1 : rename(from, to); }
static int trap_remove(const char *name) { return trapped(OP_REMOVE) ? -1 : remove(name); }

static int exists(const char *name) {
    FILE *f = fopen(name, "rb");
    if (f != NULL) fclose(f);
    return f != NULL;
}

static const char *const own_path = "failures-test.bin";
static const char *path = "failures-test.bin"; /* what rows read and write */

/* Name of the temporary file number i beside path. */
static const char *temporary(int i) {
    static char name[64];
    sprintf(name, "%s.tmp%d", own_path, i);
    return name;
}

static int no_temporary(void) {
    int i;
    for (i = 0; i < 3; i++)
        if (exists(temporary(i))) return 0;
    return 1;
}

static void no_temporaries(void) {
    int i;
    for (i = 0; i < 100; i++) remove(temporary(i));
}

/* How many of the names of temporary files are those of something. */
static int temporaries(void) {
    int i, n = 0;
    for (i = 0; i < 100; i++) n += exists(temporary(i));
    return n;
}

/* ---- what the rows work on ---- */

enum { D = 6, CLASSES = 3, SAMPLES = 8, VOCABULARY = 11, LENGTH = 4, FILL = 0x5a };

enum {
    NET = 1, TRAINER = 2, MODULAR = 4, LAYER = 8, HME = 16, BUFFER = 32, MODEL = 64,
    BEGUN = 128 /* a network that is not built */
};
enum { PLAIN = 0, MODULES, SEQUENCES, TINY, ATTENTIVE, NORMS /* + MOE_NORM_ */ }; /* which net */

typedef struct world {
    const moe_allocator *allocator; /* NULL: the standard heap */
    moe_allocator own;
    unsigned has;
    int parameter, disk, again; /* of the row; 1: this call goes on after a failure */
    moe_net net;
    moe_layer layer;
    moe_buffer buffer;
#ifndef MOE_NO_TRAIN
    moe_trainer trainer;
    moe_modular modular;
    moe_hme hme;
    moe_built_model built;
    moe_evaluation seen;
#endif
    int place;                /* tokens that a model has read */
    float answers[LENGTH][4]; /* what it said */
} world;

/* Outside of the world: scratch memory of models, and what a stream took; both may have taken half
   of something. */
static unsigned char scratch[1 << 16];
static uint64_t sunk;
static size_t sunk_bytes;

static moe_real xs[SAMPLES * D];
static int32_t labels[SAMPLES], tokens[SAMPLES];
static moe_real answers[SAMPLES * CLASSES];

static uint64_t hash_step(uint64_t h, uint64_t x) {
    h = (h ^ x) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ h >> 29;
}

static uint64_t hash_bytes(uint64_t h, const void *bytes, size_t size) {
    const unsigned char *p = (const unsigned char *)bytes;
    uint64_t x;
    for (; size >= sizeof x; size -= sizeof x, p += sizeof x) {
        memcpy(&x, p, sizeof x);
        h = hash_step(h, x);
    }
    while (size-- > 0) h = hash_step(h, *p++);
    return h;
}

static uint64_t hash_number(uint64_t h, uint64_t x) { return hash_bytes(h, &x, sizeof x); }

static uint64_t hash_file(uint64_t h, const char *name) {
    unsigned char part[4096];
    size_t n;
    FILE *f = fopen(name, "rb");
    if (f == NULL) return hash_number(h, 77);
    while ((n = fread(part, 1, sizeof part, f)) > 0) h = hash_bytes(h, part, n);
    fclose(f);
    return h;
}

static void make_samples(void) {
    moe_rng rng;
    int i;
    moe_rng_seed(&rng, 11);
    for (i = 0; i < SAMPLES * D; i++) xs[i] = moe_rng_normal(&rng);
    for (i = 0; i < SAMPLES * CLASSES; i++) answers[i] = moe_rng_normal(&rng);
    for (i = 0; i < SAMPLES; i++) {
        labels[i] = i % CLASSES;
        tokens[i] = i % VOCABULARY;
    }
}

static moe_layer_config small_mixture(void) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.d_model = 8;
    c.router.n_experts = 4;
    c.router.top_k = 2;
    c.d_ff = 24;
    return c;
}

static moe_layer_config rich_layer(void) {
    moe_layer_config c = small_mixture();
    c.router.score = MOE_SCORE_COSINE;
    c.router.cosine_dim = 3;
    c.router.selection_bias = 1;
    c.expert = MOE_EXPERT_MLP;
    c.act = MOE_ACT_GELU;
    c.d_ff = 40;
    c.d_out = 5;
    c.n_shared = 2;
    c.d_shared = 3;
    c.shared_sigmoid = 1;
    return c;
}

/* The modules of a network; nothing has failed yet, or build says what. */
static void add_modules(moe_net *net, int which) {
    moe_layer_config c = small_mixture();
    if (which == SEQUENCES) {
        moe_net_embedding(net, VOCABULARY, 8);
        moe_net_attention(net, NULL);
    } else moe_net_linear(net, which == TINY ? 2 : 8);
    if (which == TINY) c.router.d_model = c.router.n_experts = c.d_ff = 2;
    if (which == ATTENTIVE) c.router.score = MOE_SCORE_ATTENTIVE;
    if (which >= NORMS) {
        c.router.score = MOE_SCORE_NORM;
        c.router.norm_node = MOE_NODE_GATE;
        c.router.norm_order = which - NORMS;
    }
    moe_net_rms_norm(net);
#ifndef MOE_NO_TRAIN
    if (which == MODULES) {
        c.router.select = MOE_SELECT_SAMPLE;
        c.router.top_k = 1;
        c.router.loss_distill = MOEI_R(1.0);
        c.router.weight = MOE_WEIGHT_ONE;
    }
#endif
    moe_net_mixture(net, &c);
    moe_net_residual(net, 1);
    moe_net_linear(net, CLASSES);
}

static moe_status make_net(moe_net *net, int which, int trainable, const moe_allocator *a, moe_error *error) {
    moe_net_init(net, which == SEQUENCES ? 0 : D, MOE_KERNELS_AUTO, a);
    add_modules(net, which);
    return moe_net_build(net, trainable, 5, error);
}

/* ---- files of networks and layers, made by hand: builds without training read them too ---- */

typedef struct bytes_made {
    unsigned char *data;
    size_t size;
} bytes_made;

static bytes_made net_file, layer_file, trainer_file, midway_file, model_file, gguf_file, vocab_file, whole_file;
static moe_tokenizer tokenizer; /* of vocab_file */

static const char *const net_config =
    "{\\\"format\\\":1,\\\"net\\\":{\\\"d_in\\\":6,\\\"modules\\\":[{\\\"module\\\":\\\"linear\\\",\\\"d_out\\\":8},{"
    "\\\"module\\\":\\\"rms_norm\\\"},{\\\"module\\\":\\\"mixture\\\",\\\"d_model\\\":8,\\\"n_experts\\\":4,\\\"top_"
    "k\\\":2,\\\"d_ff\\\":24},{\\\"module\\\":\\\"residual\\\",\\\"span\\\":1},{\\\"module\\\":\\\"linear\\\",\\\"d_"
    "out\\\":3}]}}";
static const char *const layer_config =
    "{\\\"format\\\":1,\\\"layer\\\":{\\\"d_model\\\":8,\\\"n_experts\\\":4,\\\"top_k\\\":2,\\\"d_ff\\\":40}}";

/* All tensors filled with a pattern, as F32. */
static bytes_made compose(const char *config, const moe_tensor *tensors, size_t n) {
    bytes_made made;
    char *header = (char *)calloc(n + 10, 300);
    size_t i, at = 0, data = 0, k;
    int dim;
    if (header == NULL) exit(2);
    at += (size_t)sprintf(header, "{\"__metadata__\":{\"moe\":\"%s\"}", config);
    for (i = 0; i < n; i++) {
        at += (size_t)sprintf(header + at, ",\"%s\":{\"dtype\":\"F32\",\"shape\":[", tensors[i].name);
        for (dim = 0; dim < tensors[i].n_dims; dim++)
            at += (size_t)sprintf(header + at, "%s%lu", dim > 0 ? "," : "", (unsigned long)tensors[i].shape[dim]);
        at += (size_t)sprintf(header + at, "],\"data_offsets\":[%lu,%lu]}", (unsigned long)data,
                              (unsigned long)(data + 4 * tensors[i].count));
        data += 4 * tensors[i].count;
    }
    at += (size_t)sprintf(header + at, "}");
    made.size = 8 + at + data;
    made.data = (unsigned char *)malloc(made.size);
    if (made.data == NULL) exit(2);
    for (i = 0; i < 8; i++) made.data[i] = (unsigned char)((uint64_t)at >> 8 * i);
    memcpy(made.data + 8, header, at);
    for (i = 0; i < data / 4; i++) {
        /* 1/2 to 1 */
        const uint32_t bits = UINT32_C(0x3f000000) + (uint32_t)i * UINT32_C(123457) % UINT32_C(0x00800000);
        for (k = 0; k < 4; k++) made.data[8 + at + 4 * i + k] = (unsigned char)(bits >> 8 * k);
    }
    free(header);
    return made;
}

/* The same with the names and types of other programs: a mixture of the family mixtral, eight wide,
   and a tensor before it that nothing reads. */
static void make_published(void) {
    static const char *const names[] = {"w1", "w3", "w2"};
    static char header[4000];
    static unsigned char data[2600 + 4 * (16 + 3 * 2 * 40)];
    size_t at, size = 2600 + 2 * 8 * 4, e, i;
    at = (size_t)sprintf(header, "{\"other\":{\"dtype\":\"U8\",\"shape\":[2600],\"data_offsets\":[0,2600]},\"m.gate."
                                 "weight\":{\"dtype\":\"F32\",\"shape\":[2,8],\"data_offsets\":[2600,2664]}");
    for (e = 0; e < 2; e++)
        for (i = 0; i < 3; i++, size += 80)
            at += (size_t)sprintf(
                header + at,
                ",\"m.experts.%d.%s.weight\":{\"dtype\":\"BF16\",\"shape\":[%s],\"data_offsets\":[%lu,%lu]}", (int)e,
                names[i], i < 2 ? "5,8" : "8,5", (unsigned long)size, (unsigned long)(size + 80));
    at += (size_t)sprintf(header + at, "}");
    for (i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i % 2 == 0 ? i * 37 % 251 : 0x3e);
    model_file.size = 8 + at + size;
    model_file.data = (unsigned char *)malloc(model_file.size);
    gguf_file.data = (unsigned char *)calloc(4096, 1);
    if (model_file.data == NULL || gguf_file.data == NULL) exit(2);
    for (i = 0; i < 8; i++) model_file.data[i] = (unsigned char)((uint64_t)at >> 8 * i);
    memcpy(model_file.data + 8, header, at);
    memcpy(model_file.data + 8 + at, data, size);
    { /* blk.0: router [2,32], gate and up [2,1,32], down [2,32,1] */
        static const char *const tensors[] = {"blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_exps.weight",
                                              "blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight"};
        static const int shapes[4][4] = {{2, 32, 2, 0}, {3, 32, 1, 2}, {3, 32, 1, 2}, {3, 1, 32, 2}};
        static const int types[] = {0, 8, 8, 1}, places[] = {0, 256, 352, 448};
        unsigned char *p = gguf_file.data;
        memcpy(p, "GGUF\3\0\0\0\4\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0", 24);
        p += 24;
        *p = 20;
        p += 8;
        memcpy(p, "general.architecture", 20);
        p += 20;
        *p = 8;
        p += 4;
        *p = 5;
        p += 8;
        memcpy(p, "llama", 5);
        p += 5;
        for (e = 0; e < 4; e++) {
            *p = (unsigned char)strlen(tensors[e]);
            p += 8;
            memcpy(p, tensors[e], strlen(tensors[e]));
            p += strlen(tensors[e]);
            *p = (unsigned char)shapes[e][0];
            p += 4;
            for (i = 0; i < (size_t)shapes[e][0]; i++) {
                *p = (unsigned char)shapes[e][i + 1];
                p += 8;
            }
            *p = (unsigned char)types[e];
            p += 4;
            p[0] = (unsigned char)(places[e] & 255);
            p[1] = (unsigned char)(places[e] >> 8);
            p += 8;
        }
        while ((p - gguf_file.data) % 32 != 0) p++;
        for (i = 0; i < 640; i++) p[i] = (unsigned char)(i % 2 == 0 ? i * 37 % 251 : 0x2e);
        gguf_file.size = (size_t)(p - gguf_file.data) + 640;
    }
}

static void make_vocabulary(void) {
    static vocab v;
    static moe_buffer file;
    static moe_real memory[1 << 17];
    static moe_arena arena = {memory, sizeof memory, 0};
    moe_import_source source;
    moe_error error;
    moe_allocator a = moe_arena_allocator(&arena);
    file.allocator = a;
    vocab_bytes(&v);
    vocab_gguf(&v, &file);
    vocab_file.data = file.data;
    vocab_file.size = file.size;
    source = moe_import_memory("vocabulary.gguf", file.data, file.size);
    CHECK_SAYS(moe_import_read_tokenizer(&tokenizer, &source, 1, &a, &error) == MOE_OK, "vocabulary", &error);
}

static void make_whole(void) {
    static moe_buffer file;
    static moe_real memory[1 << 15];
    static moe_arena arena = {memory, sizeof memory, 0};
    file.allocator = moe_arena_allocator(&arena);
    whole_gguf(&file, 0.5f, 1e-5f);
    whole_file.data = file.data;
    whole_file.size = file.size;
}

static void make_files(void) {
    moe_net net;
    moe_layer layer;
    moe_layer_config c = small_mixture();
    moe_tensor tensors[MOE_LAYER_PARAMETER_COUNT];
    moe_error error;
    moe_allocator a = own_allocator();
    size_t n = 0;
    CHECK_SAYS(make_net(&net, PLAIN, 0, &a, &error) == MOE_OK, "build", &error);
    net_file = compose(net_config, net.tensors, net.n_tensors);
    moe_net_free(&net);
    c.d_ff = 40;
    CHECK_SAYS(moe_layer_create(&layer, &c, 0, 3, &a, &error) == MOE_OK, "create", &error);
    while (n < MOE_LAYER_PARAMETER_COUNT && moe_layer_tensor(&layer, n, &tensors[n]) == MOE_OK) n++;
    layer_file = compose(layer_config, tensors, n);
    make_published();
    make_vocabulary();
    make_whole();
    moe_layer_free(&layer);
    CHECK(net_file.size > 8192 && layer_file.size > 8192, "files of more than two blocks");
}

/* ---- training ---- */

#ifndef MOE_NO_TRAIN
static moe_data samples(void) {
    moe_data data;
    memset(&data, 0, sizeof data);
    data.n = SAMPLES;
    data.x = xs;
    data.labels = labels;
    return data;
}

static moe_train_config training(void) {
    moe_train_config c;
    memset(&c, 0, sizeof c);
    c.epochs = 2;
    c.batch = SAMPLES / 2;
    c.seed = 3;
    c.rate = MOEI_R(0.01);
    return c;
}

/* parameter: weights, + 10 for a loader, + 100 for a profile. */
static moe_status make_model(world *w, moe_error *error) {
    moe_model_config c;
    moe_profile profile;
    moe_status status;
    moe_data data = samples();
    memset(&c, 0, sizeof c);
    if (w->net.d_in == 0) {
        data.x = NULL;
        data.token_ids = tokens;
        data.length = LENGTH;
        c.length = LENGTH;
    }
    c.calibration = &data;
    c.weights = w->parameter % 10;
    c.loader = w->parameter / 10 % 10;
    if (w->allocator != NULL) c.allocator = *w->allocator;
    if (w->parameter < 100) return moe_model_create(&w->built, &w->net, &c, error);
    memset(&profile, 0, sizeof profile);
    status = moe_model_profile(&profile, &w->net, &c, NULL, error);
    moe_profile_free(&profile);
    return status;
}

/* Where a loader takes experts from. */
static moe_buffer experts;

static bytes_made taken(const moe_buffer *b) {
    bytes_made made;
    made.size = b->size;
    made.data = (unsigned char *)malloc(b->size);
    if (made.data == NULL) exit(2);
    memcpy(made.data, b->data, b->size);
    return made;
}

/* A trainer's file; and a checkpoint of the training of run_fit, written when it is stopped in the
   middle. */
static int stop(void *ctx, const moe_progress *p) {
    (void)ctx;
    return p->total_step == 3;
}

static void make_trained_files(void) {
    moe_net net;
    moe_trainer trainer;
    moe_train_config c = training();
    moe_data data = samples();
    moe_error error;
    moe_allocator a = own_allocator();
    moe_buffer buffer;
    moe_stream s = moe_buffer_stream(&buffer);
    memset(&buffer, 0, sizeof buffer);
    buffer.allocator = a;
    data.n = 2;
    CHECK_SAYS(make_net(&net, PLAIN, 1, &a, &error) == MOE_OK &&
                   moe_trainer_init(&trainer, &net, &c, &error) == MOE_OK &&
                   moe_trainer_step(&trainer, &data, NULL, &error) == MOE_OK &&
                   moe_trainer_write(&trainer, &s, &error) == MOE_OK,
               "a trainer's file", &error);
    trainer_file = taken(&buffer);
    moe_buffer_free(&buffer);
    moe_trainer_free(&trainer);
    moe_net_free(&net);
#ifndef MOE_NO_STDIO
    data.n = SAMPLES;
    c.checkpoint = path;
    c.progress = stop;
    CHECK_SAYS(make_net(&net, PLAIN, 1, &a, &error) == MOE_OK &&
                   moe_fit(&net, &data, NULL, &c, &error) == MOE_ERR_STOPPED &&
                   moe_file_read(path, &buffer, &error) == MOE_OK,
               "a checkpoint", &error);
    midway_file = taken(&buffer);
    moe_buffer_free(&buffer);
    moe_net_free(&net);
    remove(path);
#endif
}

static moe_status fetch(void *ctx, size_t at, size_t size, void *to) {
    (void)ctx;
    if (trapped(OP_FETCH)) return trap.status;
    if (at > experts.size || size > experts.size - at) return MOE_ERR_ARGUMENT;
    memcpy(to, experts.data + at, size);
    return MOE_OK;
}

/* The model's tokens, or its one answer, as far as they have not been made yet. */
static moe_status read_tokens(world *w) {
    const moe_model *m = &w->built.model;
    const int most = m->length > 0 ? LENGTH : 1;
    int8_t levels[D];
    int16_t out[CLASSES];
    float y[CLASSES];
    moe_loader loader;
    moe_status status = MOE_OK;
    int i;
    loader.ctx = NULL;
    loader.fetch = fetch;
    for (i = 0; i < D; i++) levels[i] = (int8_t)(30 * i - 70);
    for (; w->place < most && status == MOE_OK; w->place++) {
        const int32_t token = (int32_t)(w->place * 5 % VOCABULARY);
        const void *input = m->d_in == 0                          ? (const void *)&token
                            : m->weights_are == MOE_WEIGHTS_FLOAT ? (const void *)xs
                                                                  : (const void *)levels;
        status = moe_infer(m, &loader, input, m->weights_are == MOE_WEIGHTS_FLOAT ? (void *)y : (void *)out, scratch,
                           sizeof scratch);
        if (status != MOE_OK) break;
        for (i = 0; i < CLASSES; i++)
            w->answers[w->place][i] = m->weights_are == MOE_WEIGHTS_FLOAT ? y[i] : (float)out[i];
    }
    return status;
}
#endif

/* ---- fingerprints of a world ---- */

static uint64_t hash_tensor(uint64_t h, const moe_tensor *t, int trainable) {
    h = hash_bytes(h, t->name, strlen(t->name));
    h = hash_bytes(h, t->data, t->count * sizeof *t->data);
    return trainable && t->gradient != NULL ? hash_bytes(h, t->gradient, t->count * sizeof *t->data) : h;
}

/* All that has a meaning, without addresses: the same in every run. */
static uint64_t meaning(const world *w) {
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    size_t i;
    h = hash_number(h, w->has);
    h = hash_number(h, (uint64_t)w->place);
    h = hash_bytes(h, w->answers, sizeof w->answers);
    if (w->has & (NET | BEGUN)) {
        h = hash_number(h, w->net.n_modules);
        h = hash_number(h, (uint64_t)w->net.d_out);
        h = hash_number(h, (uint64_t)w->net.built);
        for (i = 0; i < w->net.n_modules; i++) {
            h = hash_number(h, (uint64_t)w->net.modules[i].kind);
            h = hash_number(h, (uint64_t)w->net.modules[i].d_out);
        }
        for (i = 0; i < w->net.n_tensors; i++) h = hash_tensor(h, &w->net.tensors[i], 1);
    }
    if (w->has & LAYER) {
        moe_tensor t;
        for (i = 0; moe_layer_tensor(&w->layer, i, &t) == MOE_OK; i++) h = hash_tensor(h, &t, 1);
    }
    if (w->has & BUFFER) {
        h = hash_number(h, w->buffer.size);
        h = hash_bytes(h, w->buffer.data, w->buffer.size);
    }
#ifndef MOE_NO_TRAIN
    if (w->has & TRAINER) {
        h = hash_number(h, w->trainer.steps);
        h = hash_number(h, w->trainer.rng.state);
        h = hash_bytes(h, &w->trainer.rate, sizeof w->trainer.rate);
        h = hash_bytes(h, w->trainer.position, sizeof w->trainer.position);
        h = hash_bytes(h, w->trainer.memory, w->trainer.memory_size);
    }
    if (w->has & MODULAR) {
        h = hash_number(h, w->modular.memory_size);
        h = hash_bytes(h, w->modular.memory, w->modular.memory_size);
    }
    if (w->has & HME) h = hash_bytes(h, w->hme.parameters, w->hme.n_parameters * sizeof(double));
    if (w->has & MODEL) {
        const moe_built_model *b = &w->built;
        h = hash_bytes(h, b->weights.data, b->weights.size);
        h = hash_bytes(h, b->experts.data, b->experts.size);
        h = hash_number(h, b->model.n_ops);
        h = hash_number(h, b->model.scratch_size);
        h = hash_number(h, b->model.n_mixtures);
    }
    h = hash_number(h, w->seen.n);
    h = hash_bytes(h, &w->seen.loss, sizeof w->seen.loss);
#endif
    return hash_file(h, path);
}

/* Addresses as well, and the bytes of what is not made yet. */
static uint64_t every_byte(const world *w) { return hash_bytes(meaning(w), w, sizeof *w); }

/* ---- streams ---- */

static FILE *sink_file; /* where streams write, if it is there */

static moe_status sink_write(void *ctx, const void *from, size_t size) {
    (void)ctx;
    if (trapped(OP_STREAM)) return trap.status;
    if (sink_file != NULL && fwrite(from, 1, size, sink_file) != size) return MOE_ERR_IO;
    sunk = hash_bytes(sunk, from, size);
    sunk_bytes += size;
    return MOE_OK;
}

static moe_stream sink(void) {
    moe_stream s;
    sunk = 1;
    sunk_bytes = 0;
    s.ctx = NULL;
    s.read = NULL;
    s.write = sink_write;
    s.sync = NULL;
    return s;
}

/* ---- the rows' calls ---- */

static const char piece[] = "and a piece of some more text than there is room for";

static moe_status run_buffer(world *w, moe_error *error) {
    moe_stream s = moe_buffer_stream(&w->buffer);
    (void)error;
    return s.write(s.ctx, piece, sizeof piece);
}

/* A module call; a failure is taken out of the network, where it would stay. */
typedef struct adder {
    const char *name;
    int first; /* what the network has: 0 nothing, 1 a linear module, 2 an embedding */
    moe_status (*add)(moe_net *net);
} adder;

static moe_status add_linear(moe_net *net) { return moe_net_linear(net, 8); }
static moe_status add_activation(moe_net *net) { return moe_net_activation(net, MOE_ACT_RELU); }
static moe_status add_mixture(moe_net *net) {
    moe_layer_config c = small_mixture();
    c.router.d_model = 0;
    return moe_net_mixture(net, &c);
}
static moe_status add_residual(moe_net *net) { return moe_net_residual(net, 1); }
static moe_status add_embedding(moe_net *net) { return moe_net_embedding(net, VOCABULARY, 8); }
static moe_status add_positions(moe_net *net) { return moe_net_positions(net, 5); }
static moe_status add_attention(moe_net *net) { return moe_net_attention(net, NULL); }
static moe_status add_dropout(moe_net *net) { return moe_net_dropout(net, MOEI_R(0.5)); }
static moe_status add_feed_forward(moe_net *net) { return moe_net_feed_forward(net, NULL); }
static moe_status add_scale(moe_net *net) {
    moe_module m;
    memset(&m, 0, sizeof m);
    m.kind = MOE_MODULE_SCALE;
    m.scale = MOEI_R(0.5);
    return moe_net_append(net, &m);
}

static const adder adders[] = {{"moe_net_linear", 1, add_linear},       {"moe_net_activation", 1, add_activation},
                               {"moe_net_layer_norm", 1, moe_net_layer_norm}, {"moe_net_mixture", 1, add_mixture},
                               {"moe_net_residual", 1, add_residual},   {"moe_net_embedding", 0, add_embedding},
                               {"moe_net_positions", 2, add_positions}, {"moe_net_attention", 1, add_attention},
                               {"moe_net_rms_norm", 1, moe_net_rms_norm}, {"moe_net_dropout", 1, add_dropout},
                               {"moe_net_feed_forward", 1, add_feed_forward}, {"moe_net_tied", 2, moe_net_tied},
                               {"moe_net_append", 1, add_scale}};
enum { N_ADDERS = (int)(sizeof adders / sizeof adders[0]) };

static moe_status run_adder(world *w, moe_error *error) {
    const moe_status status = adders[w->parameter].add(&w->net);
    if (status != w->net.error.code) return MOE_ERR_STATE; /* the network must remember it */
    if (status != MOE_OK && adders[w->parameter].add(&w->net) != status) return MOE_ERR_STATE; /* and say it again */
    if (error != NULL && status != MOE_OK) *error = w->net.error;
    memset(&w->net.error, 0, sizeof w->net.error);
    return status;
}

static moe_status run_build(world *w, moe_error *error) { return moe_net_build(&w->net, w->parameter, 5, error); }
static moe_status run_net_read(world *w, moe_error *error) {
    return moe_net_read(&w->net, net_file.data, net_file.size, w->parameter, MOE_KERNELS_AUTO, w->allocator, error);
}
static moe_status run_layer_create(world *w, moe_error *error) {
    moe_layer_config c = rich_layer();
    return moe_layer_create(&w->layer, &c, w->parameter, 5, w->allocator, error);
}
static moe_status counts_alone(void *ctx, size_t n, const uint64_t *send, uint64_t *receive) {
    (void)ctx;
    memcpy(receive, send, n * sizeof *send);
    return MOE_OK;
}
static moe_status rows_alone(void *ctx, int stage, const moe_exchange *exchange) {
    (void)ctx;
    (void)stage;
    (void)exchange;
    return MOE_ERR_TRANSPORT; /* nobody asks for it */
}
static moe_status sum_alone(void *ctx, size_t n, moe_real *values) {
    (void)ctx;
    (void)n;
    (void)values;
    return MOE_OK;
}
static moe_status begin_alone(moe_transport *transport, const world *w, moe_error *error) {
    memset(transport, 0, sizeof *transport);
    transport->n_ranks = 1;
    transport->allocator = w->allocator;
    transport->counts = counts_alone;
    transport->rows = rows_alone;
    transport->sum = sum_alone;
    return moe_transport_begin(transport, error);
}
static moe_status run_transport(world *w, moe_error *error) {
    moe_transport transport;
    moe_status status = begin_alone(&transport, w, error);
    moe_transport_end(&transport);
    return status;
}
static moe_status run_net_read_shared(world *w, moe_error *error) {
    moe_transport transport;
    moe_net net;
    moe_status status = begin_alone(&transport, w, error);
    memset(&net, 0, sizeof net);
    if (status == MOE_OK)
        status = moe_net_read_part(&net, net_file.data, net_file.size, w->parameter, MOE_KERNELS_AUTO, &transport,
                                   w->allocator, error);
    moe_net_free(&net);
    moe_transport_end(&transport);
    return status;
}
static moe_status run_layer_read_shared(world *w, moe_error *error) {
    moe_transport transport;
    moe_layer layer;
    moe_status status = begin_alone(&transport, w, error);
    memset(&layer, 0, sizeof layer);
    if (status == MOE_OK)
        status = moe_layer_read_part(&layer, layer_file.data, layer_file.size, w->parameter, MOE_KERNELS_AUTO,
                                     &transport, w->allocator, error);
    moe_layer_free(&layer);
    moe_transport_end(&transport);
    return status;
}
static moe_status run_published_read(world *w, moe_error *error) {
    const bytes_made *f = w->parameter ? &gguf_file : &model_file;
    moe_import_source source = moe_import_memory("some.file", f->data, f->size);
    return moe_import_read(&w->layer, &source, 1, w->parameter ? "blk.0" : "m", NULL, w->allocator, error);
}
static moe_status run_vocabulary_read(world *w, moe_error *error) {
    moe_import_source source = moe_import_memory("a.gguf", vocab_file.data, vocab_file.size);
    moe_tokenizer t;
    moe_status status;
    memset(&t, 0, sizeof t);
    status = moe_import_read_tokenizer(&t, &source, 1, w->allocator, error);
    moe_tokenizer_free(&t);
    return status;
}
static moe_status run_whole_read(world *w, moe_error *error) {
    moe_import_source source = moe_import_memory("a.gguf", whole_file.data, whole_file.size);
    moe_imported model;
    const moe_status status = moe_import_read_model(&model, &source, 1, NULL, w->allocator, error);
    moe_import_free(&model);
    return status;
}
static moe_status run_encode(world *w, moe_error *error) {
    static const char text[] = "hello world, a word of aaaaaaaa";
    moe_tokenizer t = tokenizer;
    int32_t ids[64];
    size_t n;
    (void)error;
    memset(&t.allocator, 0, sizeof t.allocator);
    if (w->allocator != NULL) t.allocator = *w->allocator;
    return moe_tokenizer_encode(&t, text, sizeof text - 1, 0, ids, 64, &n);
}
static moe_status run_chat(world *w, moe_error *error) {
    moe_tokenizer t = tokenizer;
    moe_buffer text;
    moe_status status;
    (void)error;
    memset(&text, 0, sizeof text);
    if (w->allocator != NULL) text.allocator = *w->allocator;
    status = moe_chat_put(moe_chat_find(&t), MOE_CHAT_USER, -1, "a question", &text);
    moe_buffer_free(&text);
    return status;
}
static moe_status run_layer_read(world *w, moe_error *error) {
    return moe_layer_read(&w->layer, layer_file.data, layer_file.size, w->parameter, MOE_KERNELS_AUTO, w->allocator,
                          error);
}

#ifndef MOE_NO_STDIO
static moe_status run_vocabulary_load(world *w, moe_error *error) {
    moe_tokenizer t;
    moe_status status;
    memset(&t, 0, sizeof t);
    status = moe_import_tokenizer(&t, path, w->allocator, error);
    moe_tokenizer_free(&t);
    return status;
}
static moe_status run_whole_load(world *w, moe_error *error) {
    moe_imported model;
    const moe_status status = moe_import_model(&model, path, NULL, w->allocator, error);
    moe_import_free(&model);
    return status;
}
static moe_status run_file_read(world *w, moe_error *error) { return moe_file_read(path, &w->buffer, error); }

/* What moe_file_replace writes; a careless one ignores the result of write. */
static moe_status contents(void *ctx, moe_stream *stream) {
    const int careless = *(const int *)ctx;
    int i;
    for (i = 0; i < 5; i++) {
        const moe_status status = stream->write(stream->ctx, piece, sizeof piece - (size_t)i);
        if (status != MOE_OK && !careless) return status;
    }
    return MOE_OK;
}

static moe_status run_replace(world *w, moe_error *error) {
    return moe_file_replace(path, contents, &w->parameter, error);
}
static moe_status run_net_load(world *w, moe_error *error) {
    return moe_net_load(&w->net, path, w->parameter, MOE_KERNELS_AUTO, w->allocator, error);
}
static moe_status run_load_shared(world *w, moe_error *error) {
    moe_transport transport;
    moe_net net;
    moe_layer layer;
    moe_status status = begin_alone(&transport, w, error);
    memset(&net, 0, sizeof net);
    memset(&layer, 0, sizeof layer);
    if (status == MOE_OK && w->parameter)
        status = moe_net_load_part(&net, path, 0, MOE_KERNELS_AUTO, &transport, w->allocator, error);
    else if (status == MOE_OK)
        status = moe_layer_load_part(&layer, path, 0, MOE_KERNELS_AUTO, &transport, w->allocator, error);
    moe_net_free(&net);
    moe_layer_free(&layer);
    moe_transport_end(&transport);
    return status;
}
static moe_status run_load_published(world *w, moe_error *error) {
    return moe_import_layer(&w->layer, path, w->parameter ? "blk.0" : "m", "mixtral", w->allocator, error);
}
static moe_status run_layer_load(world *w, moe_error *error) {
    return moe_layer_load(&w->layer, path, w->parameter, MOE_KERNELS_AUTO, w->allocator, error);
}
#endif

#ifndef MOE_NO_TRAIN
static moe_status run_file_write(world *w, moe_error *error) {
    static const moe_metadata metadata[] = {{"first", "a value of some length, so that the header grows"},
                                            {"second", "\"\\\n"}};
    moe_stream s = sink();
    return moe_file_write(&s, w->net.tensors, w->net.n_tensors, metadata, 2, w->allocator, error);
}
static moe_figure some_figure(void) {
    static const double values[] = {1, 2, 3, 4};
    moe_figure f;
    memset(&f, 0, sizeof f);
    f.rows = f.columns = 2;
    f.values = values;
    return f;
}
static moe_status run_report_svg(world *w, moe_error *error) {
    const moe_figure f = some_figure();
    moe_stream s = sink();
    (void)w;
    return moe_report_svg(&f, &s, error);
}
static moe_status run_report_html(world *w, moe_error *error) {
    const moe_figure f = some_figure();
    moe_stream s = sink();
    (void)w;
    return moe_report_html("Report", &f, 1, &s, error);
}
static moe_status run_report_text(world *w, moe_error *error) {
    const moe_figure f = some_figure();
    moe_stream s = sink();
    (void)w;
    return moe_report_text(&f, 0, 1, &s, error);
}
static moe_status run_net_write(world *w, moe_error *error) {
    moe_stream s = sink();
    return moe_net_write(&w->net, &s, error);
}
static moe_status run_layer_write(world *w, moe_error *error) {
    moe_stream s = sink();
    return moe_layer_write(&w->layer, &s, error);
}
/* The layer of a world is none of any family's: one that is goes through a layer of its own. */
static moe_status publish(world *w, moe_stream *s, moe_error *error) {
    moe_import_source source = moe_import_memory("some.file", model_file.data, model_file.size);
    moe_layer layer;
    const trap_state armed = trap;
    moe_status status;
    disarm();
    if (moe_import_read(&layer, &source, 1, "m", NULL, w->allocator, NULL) != MOE_OK) return MOE_ERR_STATE;
    trap = armed;
    if (s != NULL) {
        status = moe_import_write(&layer, s, "m", "mixtral", MOE_DTYPE_BF16, error);
    } else {
#ifdef MOE_NO_STDIO
        status = MOE_ERR_STATE;
#else
        status = moe_import_save(&layer, path, "m", "mixtral", MOE_DTYPE_F32, error);
#endif
    }
    moe_layer_free(&layer);
    return status;
}
static moe_status run_publish(world *w, moe_error *error) {
    moe_stream s = sink();
    return publish(w, &s, error);
}
static moe_status run_trainer_write(world *w, moe_error *error) {
    moe_stream s = sink();
    return moe_trainer_write(&w->trainer, &s, error);
}
static moe_status run_export_c(world *w, moe_error *error) {
    moe_stream s = sink();
    return moe_export_c(&w->built, "small", &s, error);
}
#ifndef MOE_NO_QUANT
static moe_status run_export_experts(world *w, moe_error *error) {
    moe_stream s = sink();
    return moe_export_experts(&w->built, &s, error);
}
#endif
static moe_status run_trainer_init(world *w, moe_error *error) {
    moe_train_config c = training();
    c.optimizer = w->parameter;
    return moe_trainer_init(&w->trainer, &w->net, &c, error);
}
static moe_status run_trainer_read(world *w, moe_error *error) {
    return moe_trainer_read(&w->trainer, trainer_file.data, trainer_file.size, error);
}
static moe_status run_modular(world *w, moe_error *error) { return moe_modular_init(&w->modular, &w->trainer, error); }
static moe_status run_hme(world *w, moe_error *error) {
    moe_hme_config c;
    memset(&c, 0, sizeof c);
    c.d_in = D;
    c.d_out = CLASSES;
    c.family = w->parameter;
    return moe_hme_create(&w->hme, &c, 5, w->allocator, error);
}
static moe_status run_evaluate(world *w, moe_error *error) {
    moe_data data = samples();
    return moe_evaluate(&w->net, &data, MOE_CRITERION_CROSS_ENTROPY, &w->seen, error);
}
static moe_status run_smooth(world *w, moe_error *error) {
    moe_data data = samples();
    return moe_smooth(&w->net, &data, NULL, NULL, error);
}
/* parameter: 1 with checkpoints; 2 resumes from the beginning; 3 is stopped, which alone writes
   one. After a failure all go on. */
static moe_status run_fit(world *w, moe_error *error) {
    moe_train_config c = training();
    moe_data data = samples(), test = samples();
    moe_status status;
    test.n = 5;
    if (w->parameter > 0) {
        c.checkpoint = path;
        c.checkpoint_every = 1;
        c.resume = w->again || w->parameter == 2;
    }
    if (w->parameter == 3) {
        c.progress = stop;
        c.checkpoint_every = 100;
    }
    status = moe_fit(&w->net, &data, &test, &c, error);
    if (w->parameter != 3 || status != MOE_ERR_STOPPED) return status;
    if (error != NULL) error->code = MOE_OK;
    return MOE_OK;
}
static moe_status run_tokens(world *w, moe_error *error) {
    (void)error;
    return read_tokens(w);
}
static moe_status run_check(world *w, moe_error *error) {
    moe_loader loader;
    loader.ctx = NULL;
    loader.fetch = fetch;
    return moe_model_check(&w->built.model, &loader, scratch, sizeof scratch, error);
}
/* Two blocks through a cache, of which the first stays. */
static moe_status run_blocks(world *w, moe_error *error) {
    static unsigned char memory[8192];
    const moei_int_mixture *m = &w->built.model.mixtures[0];
    moe_loader loader;
    moe_blocks cache;
    moe_status status;
    (void)error;
    loader.ctx = NULL;
    loader.fetch = fetch;
    status = moe_blocks_init(&cache, &loader, m->stride, memory, sizeof memory);
    if (status == MOE_OK) status = moe_blocks_pin(&cache, m->experts, m->stride, 1);
    loader = moe_blocks_loader(&cache);
    return status != MOE_OK ? status
                            : loader.fetch(loader.ctx, (size_t)m->experts + m->stride, m->stride, scratch);
}
#ifndef MOE_NO_STDIO
static moe_status run_report_save(world *w, moe_error *error) {
    const moe_figure f = some_figure();
    (void)w;
    return moe_report_save(path, NULL, &f, 1, error);
}
static moe_status run_net_save(world *w, moe_error *error) { return moe_net_save(&w->net, path, error); }
static moe_status run_save_published(world *w, moe_error *error) { return publish(w, NULL, error); }
static moe_status run_layer_save(world *w, moe_error *error) { return moe_layer_save(&w->layer, path, error); }
static moe_status run_trainer_save(world *w, moe_error *error) { return moe_trainer_save(&w->trainer, path, error); }
static moe_status run_trainer_load(world *w, moe_error *error) { return moe_trainer_load(&w->trainer, path, error); }
#endif
#endif

/* ---- the rows ---- */

enum {
    SILENT = 1,   /* the call takes no moe_error */
    LEARNS = 2,   /* a failure may leave part of the work done; the same call then goes on */
    AROUND = 4,   /* some failures are got around by doing with less */
    CONSTANT = 8, /* objects are only read: one world is enough for all failures */
    PIECES = 16   /* a file is read piece by piece, from what is there then */
};
enum {
    DISK_AS_IT_IS = -1, DISK_NOTHING, DISK_OLD, DISK_MODEL, DISK_GGUF, DISK_VOCABULARY, DISK_WHOLE, DISK_NET,
    DISK_LAYER, DISK_TRAINER, DISK_MIDWAY
};

typedef struct row {
    const char *functions; /* the public functions that it is for */
    unsigned ops;          /* what may fail in it */
    unsigned needs, makes; /* parts of the world */
    int net, disk, parameter, flags;
    moe_status (*run)(world *w, moe_error *error);
} row;

/* Builds without a part keep the names. */
#ifdef MOE_NO_TRAIN
#define TRAINING(run) NULL
#else
#define TRAINING(run) run
#endif
#ifdef MOE_NO_STDIO
#define STDIO(run) NULL
#else
#define STDIO(run) run
#endif
#if defined(MOE_NO_TRAIN) || defined(MOE_NO_STDIO)
#define BOTH(run) NULL
#else
#define BOTH(run) run
#endif
#if defined(MOE_NO_TRAIN) || defined(MOE_NO_QUANT)
#define INTEGERS(run) NULL
#else
#define INTEGERS(run) run
#endif
#if defined(MOE_NO_TRAIN) || MOE_REAL_IS_DOUBLE
#define FLOATS(run) NULL
#else
#define FLOATS(run) run
#endif

static const row rows[] = {
    {"moe_buffer_stream", OP_MEMORY, BUFFER, 0, 0, 0, 0, SILENT | AROUND, run_buffer},
    {"moe_net_build", OP_MEMORY, BEGUN, NET, PLAIN, 0, 0, 0, run_build},
    {"moe_net_build", OP_MEMORY, BEGUN, NET, SEQUENCES, 0, 1, 0, TRAINING(run_build)},
    {"moe_net_read", OP_MEMORY, 0, NET, 0, 0, 0, 0, run_net_read},
    {"moe_net_read", OP_MEMORY, 0, NET, 0, 0, 1, 0, TRAINING(run_net_read)},
    {"moe_layer_create", OP_MEMORY, 0, LAYER, 0, 0, 0, 0, run_layer_create},
    {"moe_layer_create", OP_MEMORY, 0, LAYER, 0, 0, 1, 0, TRAINING(run_layer_create)},
    {"moe_transport_begin", OP_MEMORY, 0, 0, 0, 0, 0, CONSTANT, run_transport},
    {"moe_net_read_part", OP_MEMORY, 0, 0, 0, 0, 0, CONSTANT, run_net_read_shared},
    {"moe_net_read_part", OP_MEMORY, 0, 0, 0, 0, 1, CONSTANT, TRAINING(run_net_read_shared)},
    {"moe_layer_read_part", OP_MEMORY, 0, 0, 0, 0, 0, CONSTANT, run_layer_read_shared},
    {"moe_net_load_part", OP_MEMORY, 0, 0, 0, DISK_NET, 1, AROUND | CONSTANT | PIECES, STDIO(run_load_shared)},
    {"moe_net_load_part", FILES, 0, 0, 0, DISK_NET, 1, AROUND | CONSTANT | PIECES, STDIO(run_load_shared)},
    {"moe_layer_load_part", OP_MEMORY, 0, 0, 0, DISK_LAYER, 0, AROUND | CONSTANT | PIECES, STDIO(run_load_shared)},
    {"moe_layer_load_part", FILES, 0, 0, 0, DISK_LAYER, 0, AROUND | CONSTANT | PIECES, STDIO(run_load_shared)},
    {"moe_layer_read", OP_MEMORY, 0, LAYER, 0, 0, 0, 0, run_layer_read},
    {"moe_layer_read", OP_MEMORY, 0, LAYER, 0, 0, 1, 0, TRAINING(run_layer_read)},
    {"moe_file_read", OP_MEMORY, 0, BUFFER, 0, DISK_NET, 0, AROUND, STDIO(run_file_read)},
    {"moe_file_read", FILES, 0, BUFFER, 0, DISK_NET, 0, AROUND, STDIO(run_file_read)},
    {"moe_file_replace", FILES, 0, 0, 0, DISK_OLD, 0, AROUND | CONSTANT, STDIO(run_replace)},
    {"moe_file_replace", FILES, 0, 0, 0, DISK_NOTHING, 1, AROUND | CONSTANT, STDIO(run_replace)},
    {"moe_net_load", OP_MEMORY, 0, NET, 0, DISK_NET, 0, AROUND, STDIO(run_net_load)},
    {"moe_net_load", FILES, 0, NET, 0, DISK_NET, 0, AROUND, STDIO(run_net_load)},
    {"moe_layer_load", OP_MEMORY, 0, LAYER, 0, DISK_LAYER, 0, AROUND, STDIO(run_layer_load)},
    {"moe_layer_load", FILES, 0, LAYER, 0, DISK_LAYER, 0, AROUND, STDIO(run_layer_load)},
    {"moe_import_read", OP_MEMORY, 0, LAYER, 0, 0, 0, AROUND, run_published_read},
    {"moe_import_read", OP_MEMORY, 0, LAYER, 0, 0, 1, AROUND, run_published_read},
    {"moe_import_layer", OP_MEMORY, 0, LAYER, 0, DISK_MODEL, 0, AROUND, STDIO(run_load_published)},
    {"moe_import_layer", FILES, 0, LAYER, 0, DISK_MODEL, 0, AROUND, STDIO(run_load_published)},
    {"moe_import_layer", FILES, 0, LAYER, 0, DISK_GGUF, 1, AROUND, STDIO(run_load_published)},
    {"moe_import_read_tokenizer", OP_MEMORY, 0, 0, 0, 0, 0, AROUND | CONSTANT, run_vocabulary_read},
    {"moe_tokenizer_encode", OP_MEMORY, 0, 0, 0, 0, 0, SILENT | AROUND | CONSTANT, run_encode},
    {"moe_chat_put", OP_MEMORY, 0, 0, 0, 0, 0, SILENT | AROUND | CONSTANT, run_chat},
    {"moe_import_tokenizer", OP_MEMORY, 0, 0, 0, DISK_VOCABULARY, 0, AROUND | CONSTANT, STDIO(run_vocabulary_load)},
    {"moe_import_tokenizer", FILES, 0, 0, 0, DISK_VOCABULARY, 0, AROUND | CONSTANT, STDIO(run_vocabulary_load)},
    {"moe_import_read_model", OP_MEMORY, 0, 0, 0, 0, 0, AROUND | CONSTANT, run_whole_read},
    {"moe_import_model", OP_MEMORY, 0, 0, 0, DISK_WHOLE, 0, AROUND | CONSTANT, STDIO(run_whole_load)},
    {"moe_import_model", FILES, 0, 0, 0, DISK_WHOLE, 0, AROUND | CONSTANT, STDIO(run_whole_load)},
    {"moe_import_write", OP_MEMORY, LAYER, 0, 0, 0, 0, AROUND | CONSTANT, TRAINING(run_publish)},
    {"moe_import_write", OP_STREAM, LAYER, 0, 0, 0, 0, CONSTANT, TRAINING(run_publish)},
    {"moe_import_save", OP_MEMORY, LAYER, 0, 0, DISK_OLD, 0, AROUND | CONSTANT, BOTH(run_save_published)},
    {"moe_import_save", FILES, LAYER, 0, 0, DISK_OLD, 0, AROUND | CONSTANT, BOTH(run_save_published)},
    {"moe_file_write", OP_MEMORY, NET, 0, PLAIN, 0, 0, CONSTANT, TRAINING(run_file_write)},
    {"moe_file_write", OP_STREAM, NET, 0, PLAIN, 0, 0, CONSTANT, TRAINING(run_file_write)},
    {"moe_net_write", OP_MEMORY, NET, 0, PLAIN, 0, 0, AROUND | CONSTANT, TRAINING(run_net_write)},
    {"moe_net_write", OP_STREAM, NET, 0, SEQUENCES, 0, 0, CONSTANT, TRAINING(run_net_write)},
    {"moe_layer_write", OP_MEMORY, LAYER, 0, 0, 0, 0, AROUND | CONSTANT, TRAINING(run_layer_write)},
    {"moe_layer_write", OP_STREAM, LAYER, 0, 0, 0, 0, CONSTANT, TRAINING(run_layer_write)},
    {"moe_trainer_write", OP_MEMORY, NET | TRAINER, 0, PLAIN, 0, 0, AROUND | CONSTANT, TRAINING(run_trainer_write)},
    {"moe_trainer_write", OP_STREAM, NET | TRAINER, 0, PLAIN, 0, 0, CONSTANT, TRAINING(run_trainer_write)},
    {"moe_net_save", OP_MEMORY, NET, 0, PLAIN, DISK_OLD, 0, AROUND | CONSTANT, BOTH(run_net_save)},
    {"moe_net_save", FILES, NET, 0, PLAIN, DISK_OLD, 0, AROUND | CONSTANT, BOTH(run_net_save)},
    {"moe_layer_save", OP_MEMORY, LAYER, 0, 0, DISK_OLD, 0, AROUND | CONSTANT, BOTH(run_layer_save)},
    {"moe_layer_save", FILES, LAYER, 0, 0, DISK_OLD, 0, AROUND | CONSTANT, BOTH(run_layer_save)},
    {"moe_trainer_save", OP_MEMORY, NET | TRAINER, 0, PLAIN, DISK_OLD, 0, AROUND | CONSTANT, BOTH(run_trainer_save)},
    {"moe_trainer_save", FILES, NET | TRAINER, 0, PLAIN, DISK_OLD, 0, AROUND | CONSTANT, BOTH(run_trainer_save)},
    {"moe_report_svg", OP_STREAM, 0, 0, 0, 0, 0, CONSTANT, TRAINING(run_report_svg)},
    {"moe_report_html", OP_STREAM, 0, 0, 0, 0, 0, CONSTANT, TRAINING(run_report_html)},
    {"moe_report_text", OP_STREAM, 0, 0, 0, 0, 0, CONSTANT, TRAINING(run_report_text)},
    {"moe_report_save", FILES, 0, 0, 0, DISK_OLD, 0, AROUND | CONSTANT, BOTH(run_report_save)},
    {"moe_trainer_init", OP_MEMORY, NET, TRAINER, PLAIN, 0, 0, 0, TRAINING(run_trainer_init)},
    {"moe_trainer_init", OP_MEMORY, NET, TRAINER, PLAIN, 0, 1, 0, TRAINING(run_trainer_init)},
    {"moe_trainer_read", OP_MEMORY, NET | TRAINER, 0, PLAIN, 0, 0, AROUND, TRAINING(run_trainer_read)},
    {"moe_trainer_load", OP_MEMORY, NET | TRAINER, 0, PLAIN, DISK_TRAINER, 0, AROUND, BOTH(run_trainer_load)},
    {"moe_trainer_load", FILES, NET | TRAINER, 0, PLAIN, DISK_TRAINER, 0, AROUND, BOTH(run_trainer_load)},
    {"moe_modular_init", OP_MEMORY, NET | TRAINER, MODULAR, MODULES, 0, 0, 0, TRAINING(run_modular)},
    {"moe_evaluate", OP_MEMORY, NET, 0, PLAIN, 0, 0, 0, TRAINING(run_evaluate)},
    {"moe_smooth", OP_MEMORY, NET, 0, PLAIN, 0, 0, 0, TRAINING(run_smooth)},
    {"moe_fit", OP_MEMORY, NET, 0, PLAIN, 0, 0, 0, TRAINING(run_fit)},
    {"moe_fit", OP_MEMORY, NET, 0, PLAIN, DISK_NOTHING, 1, AROUND | LEARNS, BOTH(run_fit)},
    {"moe_fit", FILES, NET, 0, PLAIN, DISK_NOTHING, 1, AROUND | LEARNS, BOTH(run_fit)},
    {"moe_fit", OP_MEMORY, NET, 0, PLAIN, DISK_MIDWAY, 2, AROUND | LEARNS, BOTH(run_fit)},
    {"moe_fit", FILES, NET, 0, PLAIN, DISK_MIDWAY, 2, AROUND | LEARNS, BOTH(run_fit)},
    {"moe_fit", OP_MEMORY, NET, 0, PLAIN, DISK_NOTHING, 3, AROUND | LEARNS, BOTH(run_fit)},
    {"moe_fit", FILES, NET, 0, PLAIN, DISK_NOTHING, 3, AROUND | LEARNS, BOTH(run_fit)},
    {"moe_hme_create", OP_MEMORY, 0, HME, 0, 0, 0, 0, TRAINING(run_hme)},
    {"moe_hme_create", OP_MEMORY, 0, HME, 0, 0, 1, 0, TRAINING(run_hme)},
    {"moe_model_create", OP_MEMORY, NET, MODEL, PLAIN, 0, MOE_WEIGHTS_FLOAT, AROUND, FLOATS(make_model)},
    {"moe_model_create", OP_MEMORY, NET, MODEL, PLAIN, 0, MOE_WEIGHTS_INT8, AROUND, INTEGERS(make_model)},
    {"moe_model_create", OP_MEMORY, NET, MODEL, PLAIN, 0, MOE_WEIGHTS_INT4, AROUND, INTEGERS(make_model)},
    {"moe_model_create", OP_MEMORY, NET, MODEL, SEQUENCES, 0, 10 + MOE_WEIGHTS_INT8, AROUND, INTEGERS(make_model)},
    {"moe_model_profile", OP_MEMORY, NET, 0, PLAIN, 0, 100 + MOE_WEIGHTS_INT8, AROUND, INTEGERS(make_model)},
    {"moe_export_c", OP_STREAM, NET | MODEL, 0, TINY, 0, MOE_WEIGHTS_FLOAT, CONSTANT, FLOATS(run_export_c)},
    {"moe_export_c", OP_STREAM, NET | MODEL, 0, TINY, 0, MOE_WEIGHTS_INT4, CONSTANT, INTEGERS(run_export_c)},
    {"moe_export_c", OP_STREAM, NET | MODEL, 0, SEQUENCES, 0, 10 + MOE_WEIGHTS_INT8, CONSTANT, INTEGERS(run_export_c)},
    {"moe_export_experts", OP_STREAM, NET | MODEL, 0, SEQUENCES, 0, 10 + MOE_WEIGHTS_INT8, CONSTANT,
     INTEGERS(run_export_experts)},
    {"moe_infer moei_int_model_run moei_int_op_mixture", OP_FETCH, NET | MODEL, 0, SEQUENCES, 0, 10 + MOE_WEIGHTS_INT8,
     SILENT | LEARNS, INTEGERS(run_tokens)},
    {"moe_infer moei_int_model_run moei_int_op_mixture", OP_FETCH, NET | MODEL, 0, PLAIN, 0, 10 + MOE_WEIGHTS_INT4,
     SILENT | LEARNS, INTEGERS(run_tokens)},
    {"moe_model_check", OP_FETCH, NET | MODEL, 0, SEQUENCES, 0, 10 + MOE_WEIGHTS_INT8, CONSTANT, INTEGERS(run_check)},
    {"moe_model_check", OP_FETCH, NET | MODEL, 0, ATTENTIVE, 0, 10 + MOE_WEIGHTS_INT8, CONSTANT, INTEGERS(run_check)},
    {"moe_blocks_pin moe_blocks_loader", OP_FETCH, NET | MODEL, 0, SEQUENCES, 0, 10 + MOE_WEIGHTS_INT8,
     SILENT | CONSTANT, INTEGERS(run_blocks)},
    {"moe_infer moei_int_model_run moei_int_op_match", OP_FETCH, NET | MODEL, 0, ATTENTIVE, 0, 10 + MOE_WEIGHTS_INT8,
     SILENT | LEARNS, INTEGERS(run_tokens)},
    {"moe_infer moei_int_model_run moei_int_op_norm_l1", OP_FETCH, NET | MODEL, 0, NORMS + MOE_NORM_L1, 0,
     10 + MOE_WEIGHTS_INT8, SILENT | LEARNS, INTEGERS(run_tokens)},
    {"moe_infer moei_int_model_run moei_int_op_norm_l2", OP_FETCH, NET | MODEL, 0, NORMS + MOE_NORM_L2, 0,
     10 + MOE_WEIGHTS_INT8, SILENT | LEARNS, INTEGERS(run_tokens)},
    {"moe_infer moei_int_model_run moei_int_op_norm_linf", OP_FETCH, NET | MODEL, 0, NORMS + MOE_NORM_LINF, 0,
     10 + MOE_WEIGHTS_INT8, SILENT | LEARNS, INTEGERS(run_tokens)},
};
enum { N_ROWS = (int)(sizeof rows / sizeof rows[0]) };

/* ---- worlds: made and taken away ---- */

static void put_disk(int disk) {
    static const char old[] = "what was there before";
    const bytes_made *const files[] = {NULL,      NULL,        &model_file,   &gguf_file,   &vocab_file, &whole_file,
                                       &net_file, &layer_file, &trainer_file, &midway_file};
    if (disk == DISK_AS_IT_IS) return;
    remove(path);
    if (disk == DISK_OLD) put_file(path, old, sizeof old);
    else if (disk != DISK_NOTHING) put_file(path, files[disk]->data, files[disk]->size);
}

static int begin_net(world *w, const row *r) {
    moe_error error;
    if (r->run == run_adder) {
        const int first = adders[r->parameter].first;
        moe_net_init(&w->net, first == 1 ? D : 0, MOE_KERNELS_AUTO, w->allocator);
        if (first == 1) moe_net_linear(&w->net, D);
        if (first == 2) moe_net_embedding(&w->net, VOCABULARY, 8);
        return w->net.error.code == MOE_OK;
    }
    if (r->needs & BEGUN) {
        moe_net_init(&w->net, r->net == SEQUENCES ? 0 : D, MOE_KERNELS_AUTO, w->allocator);
        add_modules(&w->net, r->net);
        return w->net.error.code == MOE_OK;
    }
#ifndef MOE_NO_TRAIN
    return CHECK_SAYS(make_net(&w->net, r->net, 1, w->allocator, &error) == MOE_OK, "a net", &error);
#else
    return CHECK_SAYS(make_net(&w->net, r->net, 0, w->allocator, &error) == MOE_OK, "a net", &error);
#endif
}

#ifndef MOE_NO_TRAIN
static int begin_trained(world *w, const row *r) {
    moe_error error;
    moe_data data = samples();
    int steps;
    data.n = SAMPLES / 2;
    if (r->needs & TRAINER) {
        moe_train_config c = training();
        if (!CHECK_SAYS(moe_trainer_init(&w->trainer, &w->net, &c, &error) == MOE_OK, "a trainer", &error)) return 0;
        for (steps = 0; steps < 2 && r->net == PLAIN; steps++)
            CHECK_SAYS(moe_trainer_step(&w->trainer, &data, NULL, &error) == MOE_OK, "a step", &error);
    }
    if ((r->needs & MODEL) && !CHECK_SAYS(make_model(w, &error) == MOE_OK, "a model", &error)) return 0;
    if (r->ops == OP_FETCH) {
        moe_stream s = moe_buffer_stream(&experts);
        moe_buffer_free(&experts);
        experts.allocator = own_allocator();
        memset(scratch, 0, sizeof scratch);
        if (!CHECK_SAYS(moe_export_experts(&w->built, &s, &error) == MOE_OK && experts.size > 0, "its experts", &error))
            return 0;
    }
    return 1;
}
#endif

static int world_begin(world *w, const row *r, int standard) {
    moe_layer_config c = rich_layer();
    moe_error error;
    memset(w, FILL, sizeof *w);
    memset(w->answers, 0, sizeof w->answers);
    w->own = own_allocator();
    w->allocator = standard ? NULL : &w->own;
    w->has = r->needs;
    w->parameter = r->parameter;
    w->disk = r->disk;
    w->again = 0;
    w->place = 0;
    if (r->makes & BUFFER) memset(&w->buffer, 0, sizeof w->buffer);
    if ((r->makes & BUFFER) && !standard) w->buffer.allocator = w->own;
    if (r->needs & BUFFER) {
        moe_stream s = moe_buffer_stream(&w->buffer);
        memset(&w->buffer, 0, sizeof w->buffer);
        if (!standard) w->buffer.allocator = w->own;
        if (!CHECK(s.write(s.ctx, "some", 40 > sizeof piece ? 4 : 5) == MOE_OK, "a buffer")) return 0;
    }
    put_disk(r->disk);
    if ((r->needs & (NET | BEGUN)) && !begin_net(w, r)) return 0;
    if ((r->needs & LAYER) &&
        !CHECK_SAYS(moe_layer_create(&w->layer, &c, 0, 5, w->allocator, &error) == MOE_OK, "a layer", &error))
        return 0;
#ifndef MOE_NO_TRAIN
    return begin_trained(w, r);
#else
    return 1;
#endif
}

static void world_end(world *w) {
#ifndef MOE_NO_TRAIN
    if (w->has & MODEL) moe_model_free(&w->built);
    if (w->has & MODULAR) moe_modular_free(&w->modular);
    if (w->has & TRAINER) moe_trainer_free(&w->trainer);
    if (w->has & HME) moe_hme_free(&w->hme);
    moe_buffer_free(&experts);
#endif
    if (w->has & BUFFER) moe_buffer_free(&w->buffer);
    if (w->has & LAYER) moe_layer_free(&w->layer);
    if (w->has & (NET | BEGUN)) moe_net_free(&w->net);
    if (w->disk != DISK_AS_IT_IS) remove(path);
    CHECK(heap.blocks == 0 && heap.bytes == 0 && !heap.confused, "all memory is given back, by its size");
    CHECK(open_files == 0, "all files are closed");
    memset(&heap, 0, sizeof heap);
    open_files = 0;
}

enum { MOST = 3000 }; /* failures of one row */

/* ---- one row: each of its calls fails in turn ---- */

/* A message of a file's failure names the file, and why: one of the reasons that calls had. */
static int says_why(const moe_error *error, unsigned fired) {
    unsigned op;
    if (strstr(error->message, path) == NULL) return 0;
    for (op = OP_OPEN; op <= OP_LAST; op *= 2)
        if ((fired & op) && strstr(error->message, strerror(reason_of(op))) != NULL) return 1;
    return 0;
}

/* After a checkpoint could not be written, what lies there is whole. */
static int whole_checkpoint(void) {
#ifndef MOE_NO_STDIO
    moe_net net;
    moe_error error;
    moe_allocator a = own_allocator();
    if (!exists(path)) return 1;
    if (moe_net_load(&net, path, 0, MOE_KERNELS_AUTO, &a, &error) != MOE_OK) return 0;
    moe_net_free(&net);
#endif
    return 1;
}

/* What a status must be by what has failed. */
static moe_status expected(unsigned fired, moe_status given) {
    if (fired & FILES) return MOE_ERR_IO;
    return fired & OP_MEMORY ? MOE_ERR_MEMORY : given;
}

/* The call of a row with failure number at; 0 when there was none any more. wanted, wanted_sunk:
   what an undisturbed run leaves. */
static int fail_once(const row *r, world *w, int once, long at, uint64_t wanted, uint64_t wanted_sunk) {
    static const moe_status given[] = {MOE_ERR_IO, MOE_ERR_STOPPED}; /* what a stream says comes back as it is */
    moe_error error;
    moe_status status;
    trap_state end;
    uint64_t before;
    size_t blocks, bytes;
    const int standard = w->allocator == NULL, no_error = standard && !once; /* a NULL error is allowed everywhere */
    if (r->flags & CONSTANT) put_disk(r->disk);
    before = every_byte(w);
    blocks = heap.blocks;
    bytes = heap.bytes;
    error.code = MOE_OK;
    error.message[0] = '\0';
    arm(r->ops, at, once, given[(at + once) % 2]);
    status = r->run(w, no_error ? NULL : &error);
    end = trap;
    disarm();
    if (status == MOE_OK) {
        CHECK(end.fired == 0 || ((r->flags & AROUND) && !(end.fired & ~(unsigned)SPARED)), "a failure is seen");
        CHECK_SAYS(error.code == MOE_OK, "no message of what was got around", &error);
    } else {
        CHECK_SAYS(status == expected(end.fired, end.status), "its status", &error);
        if (!no_error && !(r->flags & SILENT)) {
            CHECK_SAYS(error.code == status && error.message[0] != '\0', "its message", &error);
            CHECK_SAYS(!(end.fired & FILES) || says_why(&error, end.fired), "the message names the file and the reason",
                       &error);
        }
        CHECK(!(end.fired & (OP_STREAM | OP_FETCH)) || end.calls_after == 0, "nothing more is tried");
        CHECK(heap.blocks == blocks && heap.bytes == bytes && open_files == 0, "nothing leaks");
        CHECK(no_temporary(), "no temporary file stays");
        if (!(r->flags & LEARNS)) CHECK(every_byte(w) == before, "nothing has changed");
        else if (r->ops != OP_FETCH) {
            CHECK(whole_checkpoint(), "the checkpoint is whole");
            if (!exists(path)) { /* there is nothing to go on from */
                world_end(w);
                world_begin(w, r, standard);
            }
        }
        w->again = 1;
        /* long files have many writes, which are alike */
        if ((r->ops & OP_STREAM) && at > 20 && at % 16 != 0) return 1;
        CHECK_SAYS((status = r->run(w, &error)) == MOE_OK, "then it works", &error);
    }
    if (status == MOE_OK) w->has |= r->makes;
    CHECK(meaning(w) == wanted && (sunk == wanted_sunk || !(r->ops & OP_STREAM)), "and all is as without the failure");
    return end.fired != 0;
}

/* All failures of a row in turn; how many there were. */
static long fail_all(const row *r, int standard, int once, uint64_t wanted, uint64_t wanted_sunk) {
    static world w;
    long at = 0;
    int fired = 1, made = 0;
    while (fired && ++at < MOST) {
        if (!made && !world_begin(&w, r, standard)) return 0;
        made = 1;
        fired = fail_once(r, &w, once, at, wanted, wanted_sunk);
        if (!(r->flags & CONSTANT)) {
            world_end(&w);
            made = 0;
        }
    }
    if (made) world_end(&w);
    CHECK(at < MOST, "the failures have an end");
    return at - 1;
}

/* What an undisturbed run leaves, and how many calls it makes. */
static long undisturbed(const row *r, int standard, uint64_t *left) {
    static world w;
    moe_error error;
    moe_status status;
    long calls;
    if (!world_begin(&w, r, standard)) return 0;
    arm(r->ops, 0, 0, MOE_OK);
    status = r->run(&w, &error);
    calls = trap.calls;
    disarm();
    if (!CHECK_SAYS(status == MOE_OK, "undisturbed", &error)) calls = 0;
    if (status == MOE_OK) w.has |= r->makes;
    *left = meaning(&w);
    CHECK(no_temporary(), "no temporary file stays");
    world_end(&w);
    return calls;
}

#ifdef MOE_NO_MALLOC
/* Without a heap a call that needs one says so. */
static void refuse_heap(const row *r) {
    static world w;
    moe_error error;
    uint64_t before;
    if (r->needs != 0 || r->makes == 0 || !world_begin(&w, r, 1)) return;
    before = every_byte(&w);
    CHECK_SAYS(r->run(&w, &error) == MOE_ERR_ARGUMENT && error.code == MOE_ERR_ARGUMENT && every_byte(&w) == before,
               "there is no heap", &error);
    w.has = 0;
    world_end(&w);
}
#endif

static void fail_row(const row *r) {
    uint64_t left = 0, other = 0, taken;
    long calls;
    int once;
    if (r->run == NULL) return;
    test_case(r->functions);
    calls = undisturbed(r, 0, &left);
    taken = sunk;
    if (!CHECK(calls > 0, "something can fail")) return;
    /* of these none may come after a failure: it is enough that one fails */
    for (once = (r->ops & (OP_STREAM | OP_FETCH)) != 0; once < 2; once++)
        CHECK(fail_all(r, 0, once, left, taken) >= (once ? calls : 1), "every call has failed");
#ifndef MOE_NO_MALLOC
    CHECK(undisturbed(r, 1, &other) == calls && other == left, "the standard heap is as good");
    for (once = 0; once < 2 && (r->ops & (OP_MEMORY | FILES)); once++)
        CHECK(fail_all(r, 1, once, left, taken) >= (once ? calls : 1), "every call has failed");
#else
    (void)other;
    refuse_heap(r);
#endif
}

static void test_rows(void) {
    int i;
    for (i = 0; i < N_ROWS; i++) fail_row(&rows[i]);
    for (i = 0; i < N_ADDERS; i++) {
        row r;
        memset(&r, 0, sizeof r);
        r.functions = adders[i].name;
        r.ops = OP_MEMORY;
        r.needs = BEGUN;
        r.parameter = i;
        r.run = run_adder;
        fail_row(&r);
    }
}

/* ---- whole conditions instead of single calls ---- */

#ifndef MOE_NO_STDIO
static int is_loading(const row *r) { return r->disk >= DISK_MODEL; }
static int is_of_files(const row *r) { return r->run != NULL && r->ops == (unsigned)FILES; }

/* Of a long path a message has the end. */
static const char *end_of(const char *name) { return strlen(name) > 100 ? name + strlen(name) - 100 : name; }

/* Under a condition that does not go by itself a row fails as wanted says, with a message, and
   changes nothing but what trap.other does. */
static void fail_under(const row *r, world *w, moe_status wanted, int reason) {
    moe_error error;
    const uint64_t before = every_byte(w);
    const size_t blocks = heap.blocks, bytes = heap.bytes;
    moe_status status;
    error.code = MOE_OK;
    error.message[0] = '\0';
    status = r->run(w, &error);
    disarm();
    put_disk(r->disk);
    CHECK_SAYS(status == wanted && error.code == status && error.message[0] != '\0', "its status and message", &error);
    if (reason != 0)
        CHECK_SAYS(strstr(error.message, end_of(path)) != NULL && strstr(error.message, strerror(reason)) != NULL,
                   "the file and the reason", &error);
    CHECK(heap.blocks == blocks && heap.bytes == bytes && open_files == 0 && no_temporary(), "nothing leaks");
    if (!(r->flags & LEARNS)) CHECK(every_byte(w) == before, "nothing has changed");
}

/* Reads that give few bytes at a time; a file that shrinks, or grows, while it is read. */
static void test_reads(void) {
    static const size_t most[] = {1, 100, 4095};
    static world w;
    moe_error error;
    moe_status status;
    uint64_t left;
    size_t i;
    int k, halves;
    for (k = 0; k < N_ROWS; k++) {
        const row *r = &rows[k];
        if (!is_of_files(r) || !is_loading(r)) continue;
        test_about = r->functions;
        CHECK(undisturbed(r, 0, &left) > 0, "undisturbed");
        for (i = 0; i < sizeof most / sizeof most[0]; i++) {
            world_begin(&w, r, 0);
            arm(0, 0, 0, MOE_OK);
            trap.most_read = most[i];
            status = r->run(&w, &error);
            disarm();
            if (CHECK_SAYS(status == MOE_OK, "small reads", &error)) w.has |= r->makes;
            CHECK(meaning(&w) == left, "small reads give the same");
            world_end(&w);
        }
        for (halves = 0; halves < 5; halves++) { /* 2 would be what it was */
            /* so are published layers, and what has grown since does not matter */
            if (halves == 2 || r->disk < DISK_NET || (r->flags & PIECES && halves > 2)) continue;
            world_begin(&w, r, 0);
            arm(0, 0, 0, MOE_OK);
            trap.other = path;
            trap.halves = halves;
            if (!(r->makes & BUFFER)) {
                fail_under(r, &w, MOE_ERR_FORMAT, 0);
                w.again = 1;
            }
            status = r->run(&w, &error);
            disarm();
            if (CHECK_SAYS(status == MOE_OK, "a file that changes", &error)) w.has |= r->makes;
            world_end(&w);
        }
    }
}

#if HAS_POSIX
/* All names beside the path are those of something that nobody may remove, and then all but one. */
static void taken_names(const row *r, world *w, uint64_t left) {
    moe_error error;
    int files[100], i;
    uint64_t before;
    for (i = 0; i < 100; i++) {
        files[i] = -1;
        if (i % 10 == 0) {
            CHECK(mkdir(temporary(i), 0700) == 0, "a folder");
            continue;
        }
        files[i] = open(temporary(i), O_RDWR | O_CREAT, 0600);
        CHECK(files[i] >= 0 && flock(files[i], LOCK_EX | LOCK_NB) == 0, "a file that is being written");
    }
    before = every_byte(w);
    CHECK_SAYS(r->run(w, &error) == MOE_ERR_IO && strstr(error.message, path) != NULL && every_byte(w) == before,
               "all names are taken", &error);
    CHECK_SAYS(strstr(error.message, ".tmp0 to .tmp99") != NULL, "the message", &error);
    CHECK(temporaries() == 100 && open_files == 0, "all stay");
    close(files[57]);
    files[57] = -1;
    CHECK_SAYS(r->run(w, &error) == MOE_OK && meaning(w) == left && !exists(temporary(57)) && temporaries() == 99,
               "but one", &error);
    for (i = 0; i < 100; i++)
        if (files[i] >= 0) close(files[i]);
    no_temporaries();
}
#endif

/* The new file can neither be renamed nor removed: it stays, the old one too. The next save removes
   it, and all that a hundred killed processes have left, but nothing that is in use. */
static void test_left_behind(void) {
    static world w;
    moe_error error;
    uint64_t left, saved = 0;
    int k, i;
    (void)saved;
    for (k = 0; k < N_ROWS; k++) {
        const row *r = &rows[k];
        if (!is_of_files(r) || r->disk != DISK_OLD) continue;
        test_about = r->functions;
        CHECK(undisturbed(r, 0, &left) > 0 && world_begin(&w, r, 0), "undisturbed");
        {
            const uint64_t before = every_byte(&w);
            arm(OP_RENAME | OP_REMOVE, 1, 0, MOE_OK);
            CHECK_SAYS(r->run(&w, &error) == MOE_ERR_IO && says_why(&error, OP_RENAME),
                       "the message is of what failed first", &error);
            CHECK(trap.fired == (OP_RENAME | OP_REMOVE) && trap.calls == 2, "both have failed");
            disarm();
            CHECK(every_byte(&w) == before && exists(temporary(0)), "the old file stays, the new one too");
        }
        CHECK_SAYS(r->run(&w, &error) == MOE_OK && meaning(&w) == left && temporaries() == 0, "the next one works",
                   &error);
        for (i = 0; i < 100; i++) put_file(temporary(i), "half of a file", 14);
        CHECK_SAYS(r->run(&w, &error) == MOE_OK && meaning(&w) == left && temporaries() == 0, "stale ones are removed",
                   &error);
#if HAS_POSIX
        taken_names(r, &w, left);
        saved = hash_file(1, path);
        put_disk(DISK_OLD);
        arm(OP_SYNC_FOLDER, 1, 0, MOE_OK);
        CHECK_SAYS(r->run(&w, &error) == MOE_ERR_IO && says_why(&error, OP_SYNC_FOLDER) &&
                       strstr(error.message, "folder cannot be made durable") != NULL && temporaries() == 0,
                   "the folder", &error);
        disarm();
        CHECK(hash_file(1, path) == saved && open_files == 0, "the new file is there");
        CHECK_SAYS(r->run(&w, &error) == MOE_OK && meaning(&w) == left, "then it works", &error);
#endif
        world_end(&w);
    }
}

#endif

/* ---- real conditions of a system ---- */

#if HAS_POSIX && !defined(MOE_NO_STDIO)

/* A place where files cannot be. */
typedef struct bad_place {
    const char *path;
    int reason;     /* what the system says */
    int of_loading; /* 0: saving fails there; 1: loading; 2: both */
} bad_place;

static char long_name[400];

static const bad_place bad_places[] = {{"failures-test.none/file", ENOENT, 2},
                                       {"failures-test.plain/file", ENOTDIR, 2},
                                       {long_name, ENAMETOOLONG, 2},
                                       {"failures-test.folder", EISDIR, 2},
                                       {"failures-test.loop", ELOOP, 1},
#ifdef __linux__
                                       {"/proc/self/mem", EIO, 1},
#endif
                                       {"failures-test.closed/file", EACCES, 0},
                                       {"failures-test.secret", EACCES, 1}};

static void remove_places(void) {
    chmod("failures-test.closed", 0700);
    remove("failures-test.plain");
    remove("failures-test.folder");
    remove("failures-test.loop");
    remove("failures-test.secret");
    remove("failures-test.closed");
    remove("failures-test.fifo");
    remove("failures-test.link");
}

static int make_places(void) {
    remove_places();
    memset(long_name, 'n', sizeof long_name - 1);
    put_file("failures-test.plain", "x", 1);
    put_file("failures-test.secret", net_file.data, net_file.size);
    return mkdir("failures-test.folder", 0700) == 0 && symlink("failures-test.loop", "failures-test.loop") == 0 &&
           mkdir("failures-test.closed", 0500) == 0 && chmod("failures-test.secret", 0) == 0;
}

/* Root may do all: these rows are another user's. */
static int give_up_root(void) {
    if (geteuid() != 0) return 1;
    return seteuid(65534) == 0;
}

static void test_places(void) {
    static world w;
    size_t i;
    int k;
    test_about = "places";
    if (!CHECK(make_places(), "places are made")) return;
    for (i = 0; i < sizeof bad_places / sizeof bad_places[0]; i++)
        for (k = 0; k < N_ROWS; k++) {
            const bad_place *b = &bad_places[i];
            const int of_root = geteuid() == 0;
            row r = rows[k];
            if (!is_of_files(&r) || (b->of_loading != 2 && is_loading(&r) != b->of_loading)) continue;
            if (b->reason == ENOENT && r.parameter == 2) continue; /* nothing there to resume from is fine */
            test_about = r.functions;
            r.disk = DISK_AS_IT_IS;
            path = b->path;
            if (b->reason == EACCES && !give_up_root()) {
                printf("skip: %s for %s: root cannot become another user here\n", b->path, test_about);
                test_skipped++;
            } else {
                if (world_begin(&w, &r, 0)) fail_under(&r, &w, MOE_ERR_IO, b->reason);
                if (of_root) CHECK(seteuid(0) == 0, "root again");
                world_end(&w);
            }
            path = own_path;
        }
    remove_places();
}

static int is_link(const char *name) {
    struct stat s;
    return lstat(name, &s) == 0 && S_ISLNK(s.st_mode);
}

/* At the path is a link to a link in a folder, to a file that is there or not. */
static void through_links(const row *r, world *w, uint64_t left) {
    static const char folder[] = "failures-test.links", link[] = "failures-test.links/link";
    static const char aim[] = "failures-test.links/aim";
    moe_error error;
    int k;
    for (k = 0; k < 4; k++) {
        char absolute[2000];
        remove(aim);
        remove(link);
        remove(folder);
        CHECK(mkdir(folder, 0700) == 0, "a folder");
        if (k % 2 == 0) put_disk(DISK_OLD);
        if (k % 2 == 0) CHECK(rename(own_path, aim) == 0, "there is a file");
        else remove(own_path);
        if (k < 2) strcpy(absolute, "aim");
        else {
            CHECK(getcwd(absolute, sizeof absolute - 100) != NULL, "where we are");
            strcat(strcat(absolute, "/"), aim);
        }
        CHECK(symlink(absolute, link) == 0 && symlink(link, own_path) == 0, "links");
        CHECK_SAYS(r->run(w, &error) == MOE_OK && meaning(w) == left && is_link(own_path) && is_link(link) &&
                       !is_link(aim) && exists(aim),
                   "links stay, and the file behind them is replaced", &error);
    }
    remove(own_path);
    remove(aim);
    remove(link);
    remove(folder);
}

/* Permissions and owner of the file that is replaced. */
static void keeps_permissions(const row *r, world *w, uint64_t left) {
    static const mode_t modes[] = {0600, 0640, 0604, 0444, 0755};
    const mode_t mask = umask(022);
    moe_error error;
    struct stat s;
    size_t i;
    for (i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        put_disk(DISK_OLD);
        CHECK(chmod(own_path, modes[i]) == 0, "permissions");
        if (geteuid() == 0) CHECK(chown(own_path, 65533, 65532) == 0, "another's");
        CHECK_SAYS(r->run(w, &error) == MOE_OK && meaning(w) == left && stat(own_path, &s) == 0, "permissions", &error);
        CHECK((s.st_mode & 07777) == modes[i], "permissions are kept");
        if (geteuid() == 0) CHECK(s.st_uid == 65533 && s.st_gid == 65532, "the owner is kept");
        remove(own_path);
    }
    CHECK_SAYS(r->run(w, &error) == MOE_OK && stat(own_path, &s) == 0 && (s.st_mode & 07777) == 0644, "a new file",
               &error);
    remove(own_path);
    umask(mask);
}

/* Without the right to give the file its group, the group may do what all may. */
static void test_group(void) {
    static world w;
    const char *folder = "failures-test.open";
    moe_error error;
    struct stat s;
    int k;
    if (geteuid() != 0) {
        printf("skip: files of others: this is not root\n");
        test_skipped++;
        return;
    }
    CHECK(mkdir(folder, 0777) == 0 && chmod(folder, 0777) == 0, "a folder");
    path = "failures-test.open/file";
    for (k = 0; k < N_ROWS; k++) {
        row r = rows[k];
        if (!is_of_files(&r) || r.disk != DISK_OLD) continue;
        test_about = r.functions;
        r.disk = DISK_AS_IT_IS;
        put_file(path, net_file.data, net_file.size);
        CHECK(chmod(path, 0664) == 0 && world_begin(&w, &r, 0), "another's file");
        if (give_up_root()) {
            CHECK_SAYS(r.run(&w, &error) == MOE_OK, "in an open folder", &error);
            CHECK(seteuid(0) == 0 && stat(path, &s) == 0, "root again");
            CHECK(s.st_uid == 65534 && (s.st_gid == 0 ? (s.st_mode & 0777) == 0664 : (s.st_mode & 0777) == 0644),
                  "the group may not do more");
        }
        world_end(&w);
        remove(path);
    }
    path = own_path;
    remove(folder);
}

/* What is no regular file is neither replaced nor read. */
static void test_devices(void) {
    static world w;
    static const char *const names[] = {"failures-test.fifo", "/dev/null", "/dev/zero"};
    moe_error error;
    struct stat before, after;
    size_t i;
    int k;
    remove(names[0]);
    CHECK(mkfifo(names[0], 0600) == 0, "a pipe");
    alarm(600); /* to open a pipe waits until somebody opens its other end */
    for (i = 0; i < sizeof names / sizeof names[0]; i++)
        for (k = 0; k < N_ROWS; k++) {
            row r = rows[k];
            if (!is_of_files(&r) || stat(names[i], &before) != 0) continue;
            test_about = r.functions;
            r.disk = DISK_AS_IT_IS;
            path = names[i];
            if (world_begin(&w, &r, 0))
                CHECK_SAYS(r.run(&w, &error) == MOE_ERR_IO && strstr(error.message, names[i]) != NULL &&
                               strstr(error.message, "not a regular file") != NULL,
                           "refused", &error);
            CHECK(stat(names[i], &after) == 0 && after.st_ino == before.st_ino && after.st_mode == before.st_mode,
                  "it stays");
            world_end(&w);
        }
    alarm(0);
    path = own_path;
    remove(names[0]);
}

/* What may lie beside, or at, the path of a file that is saved. */
static void test_neighbors(void) {
    static world w;
    moe_error error;
    uint64_t left;
    int k;
    for (k = 0; k < N_ROWS; k++) {
        const row *r = &rows[k];
        if (!is_of_files(r) || r->disk != DISK_OLD) continue;
        test_about = r->functions;
        CHECK(undisturbed(r, 0, &left) > 0 && world_begin(&w, r, 0), "undisturbed");
        alarm(3600); /* to open a pipe for reading waits until somebody writes */
        CHECK(mkfifo(temporary(0), 0600) == 0 && mkdir(temporary(1), 0700) == 0 &&
                  symlink("failures-test.aim", temporary(2)) == 0,
              "neighbors");
        CHECK_SAYS(r->run(&w, &error) == MOE_OK && meaning(&w) == left && !exists("failures-test.aim"),
                   "a pipe, a folder and a link to nothing are left alone", &error);
        alarm(0);
        no_temporaries();
        through_links(r, &w, left);
        keeps_permissions(r, &w, left);
        world_end(&w);
    }
}

/* A disk that is full after so many bytes: the system's limit for the size of a file. */
static int limit_files(long bytes) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0) return 0;
    limit.rlim_cur = bytes < 0 ? limit.rlim_max : (rlim_t)bytes;
    return setrlimit(RLIMIT_FSIZE, &limit) == 0;
}

static long size_at(const char *name) {
    struct stat s;
    return stat(name, &s) == 0 ? (long)s.st_size : -1;
}

static void test_full(void) {
    static world w;
    moe_error error;
    uint64_t left;
    long size, part;
    int k;
    if (signal(SIGXFSZ, SIG_IGN) == SIG_ERR) return;
    for (k = 0; k < N_ROWS; k++) {
        const row *r = &rows[k];
        if (!is_of_files(r) || is_loading(r)) continue;
        test_about = r->functions;
        CHECK(undisturbed(r, 0, &left) > 0 && world_begin(&w, r, 0), "undisturbed");
        CHECK(r->run(&w, &error) == MOE_OK, "works");
        size = size_at(path);
        world_end(&w);
        for (part = 0; part < 4; part++) {
            const long limits[] = {0, 1, size / 2, size - 1};
            world_begin(&w, r, 0);
            fflush(stdout); /* which may be a file too */
            if (!limit_files(limits[part])) {
                printf("skip: %s: no limit for files\n", test_about);
                test_skipped++;
            } else {
                const long before = test_wrong;
                uint64_t was = every_byte(&w);
                moe_status status = r->run(&w, &error);
                limit_files(-1);
                CHECK_SAYS(status == MOE_ERR_IO && strstr(error.message, path) != NULL &&
                               strstr(error.message, strerror(EFBIG)) != NULL,
                           "a full disk", &error);
                CHECK(no_temporary() && (every_byte(&w) == was || (r->flags & LEARNS)) &&
                          (!(r->flags & LEARNS) || whole_checkpoint()),
                      "the old file stays");
                if ((r->flags & LEARNS) && !exists(path)) {
                    world_end(&w);
                    world_begin(&w, r, 0);
                }
                w.again = 1;
                CHECK_SAYS(r->run(&w, &error) == MOE_OK && meaning(&w) == left, "and with room it works", &error);
                if (test_wrong > before && test_shown) printf("    %ld of %ld bytes\n", limits[part], size);
            }
            world_end(&w);
        }
    }
}

/* Streams of the caller's over a device that is always full. */
static void test_full_device(void) {
    static world w;
    moe_error error;
    int k;
    FILE *f = fopen("/dev/full", "wb");
    if (f == NULL) {
        printf("skip: there is no /dev/full\n");
        test_skipped++;
        return;
    }
    setvbuf(f, NULL, _IONBF, 0);
    for (k = 0; k < N_ROWS; k++) {
        const row *r = &rows[k];
        if (r->run == NULL || r->ops != OP_STREAM || !world_begin(&w, r, 0)) continue;
        test_about = r->functions;
        sink_file = f;
        CHECK_SAYS(r->run(&w, &error) == MOE_ERR_IO && error.code == MOE_ERR_IO && sunk_bytes == 0, "a full device",
                   &error);
        sink_file = NULL;
        CHECK_SAYS(r->run(&w, &error) == MOE_OK && sunk_bytes > 0, "and another one", &error);
        world_end(&w);
    }
    fclose(f);
}

#endif

/* ---- every public function that can reach memory, streams or files has a row ---- */

/* The headers as words; what a word means is decided by the words beside it. */
typedef struct word {
    const char *p;
    size_t n;
    int column; /* 0: it begins a line */
} word;

static word *words;
static size_t n_words, word_room;

static void add_word(const char *p, size_t n, int column) {
    if (n_words == word_room) {
        word_room = 2 * word_room + 1000;
        words = (word *)realloc(words, word_room * sizeof *words);
        if (words == NULL) exit(2);
    }
    words[n_words].p = p;
    words[n_words].n = n;
    words[n_words].column = column;
    n_words++;
}

static int is_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static int is_word(size_t i, const char *text) {
    return i < n_words && words[i].n == strlen(text) && memcmp(words[i].p, text, words[i].n) == 0;
}
static int is_name(size_t i) { return i < n_words && is_letter(words[i].p[0]); }

/* Directives but definitions are left out; a definition becomes the words "#", its name, its text,
   "\n". Comments go, a string is one word. */
static void read_words(const char *p) {
    const char *line = p;
    int definition = 0;
    while (*p != '\0') {
        const char *from = p;
        if (*p == '\n') {
            if (definition && p[-1] != '\\') {
                add_word("\n", 1, 1);
                definition = 0;
            }
            line = ++p;
        } else if (*p == ' ' || *p == '\\' || *p == '\t' || *p == '\r') p++;
        else if (p[0] == '/' && p[1] == '*') {
            for (p += 2; p[0] != '*' || p[1] != '/'; p++) {}
            p += 2;
        } else if (p[0] == '/' && p[1] == '/') {
            while (*p != '\n') p++;
        } else if (*p == '#' && p == line) {
            for (p++; *p == ' '; p++) {}
            definition = strncmp(p, "define", 6) == 0;
            if (definition) {
                add_word("#", 1, 1);
                p += 6;
            } else
                while (*p != '\n' || p[-1] == '\\') p++;
        } else if (*p == '"' || *p == '\'') {
            for (p++; *p != *from; p++) p += *p == '\\';
            add_word("\"", 1, 1);
            p++;
        } else if (is_letter(*p)) {
            while (is_letter(*p)) p++;
            add_word(from, (size_t)(p - from), from == line ? 0 : 1);
        } else {
            p++;
            add_word(from, 1, from == line ? 0 : 1);
        }
    }
}

/* A function, a table or a macro, and what its text does: OP_ bits of its own, and of all that it
   mentions. */
typedef struct part {
    size_t name;        /* a word */
    size_t first, last; /* its words; a name may have several parts */
    unsigned does;
    int is_public;
} part;

enum { MOST_PARTS = 20000 };
static part parts[MOST_PARTS];
static size_t n_parts;

static part *add_part(size_t name, size_t first, size_t last) {
    part *m = &parts[n_parts];
    if (n_parts + 1 == MOST_PARTS) exit(2);
    m->name = name;
    m->first = first;
    m->last = last;
    m->does = 0;
    m->is_public = 0;
    n_parts++;
    return m;
}

/* The name of the function whose head ends before word `end`: what stands before the bracket that
   matches the last one. */
static size_t function_name(size_t from, size_t end) {
    size_t i = end;
    int depth = 0;
    if (end == 0 || !is_word(end - 1, ")")) return 0;
    while (i > from) {
        i--;
        depth += is_word(i, ")");
        depth -= is_word(i, "(");
        if (depth == 0) return i > from && is_name(i - 1) ? i - 1 : 0;
    }
    return 0;
}

/* The name of a variable with a value: before its brackets. */
static size_t variable_name(size_t from, size_t end) {
    size_t i;
    for (i = from; i < end; i++)
        if (is_word(i, "=") || is_word(i, "[")) return i > from && is_name(i - 1) ? i - 1 : 0;
    return 0;
}

static int has_word(size_t from, size_t end, const char *text) {
    for (; from < end; from++)
        if (is_word(from, text)) return 1;
    return 0;
}

static size_t skip_body(size_t i) { /* from its {; behind its } */
    int depth = 0;
    for (; i < n_words; i++) {
        depth += is_word(i, "{");
        depth -= is_word(i, "}");
        if (depth == 0 || (is_word(i, "}") && words[i].column == 0)) return i + 1;
    }
    return i;
}

static void find_parts(void) {
    size_t i = 0, from = 0, name;
    while (i < n_words) {
        if (is_word(i, "#")) {
            for (from = ++i; i < n_words && !is_word(i, "\n"); i++) {}
            if (is_name(from)) add_part(from, from + 1, i);
            from = ++i;
        } else if (is_word(i, "{")) {
            const size_t begin = i;
            if (has_word(from, i, "extern") && is_word(i - 1, "\"")) {
                from = ++i; /* extern "C": its end is a } alone */
                continue;
            }
            i = skip_body(i);
            name = has_word(from, begin, "=") ? variable_name(from, begin) : function_name(from, begin);
            if (name != 0) add_part(name, begin, i);
            if (!has_word(from, begin, "=") && !has_word(from, begin, "typedef")) from = i;
        } else if (is_word(i, ";") || is_word(i, "}")) {
            if (has_word(from, i, "MOE_API") && (name = function_name(from, i)) != 0)
                add_part(name, i, i)->is_public = 1;
            else if (has_word(from, i, "=") && (name = variable_name(from, i)) != 0) add_part(name, from, i);
            from = ++i;
        } else i++;
    }
}

/* What gives back only cannot fail. */
static const char *const gives_back[] = {"moei_free", "moei_array_free", "moe_buffer_free"};

static unsigned own_deeds(const part *m) {
    static const char *const heaps[] = {"resize", "malloc", "calloc", "realloc", "aligned_alloc"};
    static const char *const files[] = {"fopen", "fread",  "fwrite", "fflush",      "fclose",  "fseek",
                                        "ftell", "rename", "remove", "MoveFileExA", "tmpfile", "freopen"};
    unsigned does = 0;
    size_t i, k;
    for (i = m->first; i + 1 < m->last; i++) {
        if (!is_word(i + 1, "(")) continue;
        for (k = 0; k < sizeof heaps / sizeof heaps[0]; k++) does |= is_word(i, heaps[k]) ? OP_MEMORY : 0;
        for (k = 0; k < sizeof files / sizeof files[0]; k++) does |= is_word(i, files[k]) ? FILES : 0;
        if (i > 0 && (is_word(i - 1, ">") || is_word(i - 1, ".")))
            does |= is_word(i, "write") ? OP_STREAM : is_word(i, "fetch") ? OP_FETCH : 0;
    }
    for (k = 0; k < sizeof gives_back / sizeof gives_back[0]; k++)
        if (is_word(m->name, gives_back[k])) does = 0;
    return does;
}

static int compare_parts(const void *a, const void *b) {
    const word *x = &words[((const part *)a)->name], *y = &words[((const part *)b)->name];
    const int order = memcmp(x->p, y->p, x->n < y->n ? x->n : y->n);
    return order != 0 ? order : x->n < y->n ? -1 : x->n > y->n;
}

/* The first of the parts of a name; n_parts: there is none. */
static size_t part_of(size_t name) {
    part wanted;
    size_t low = 0, high = n_parts;
    wanted.name = name;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (compare_parts(&parts[middle], &wanted) < 0) low = middle + 1;
        else high = middle;
    }
    return low < n_parts && compare_parts(&parts[low], &wanted) == 0 ? low : n_parts;
}

/* Deeds go from what is mentioned to what mentions it, until nothing changes. */
static void spread_deeds(void) {
    size_t *named = (size_t *)malloc(n_words * sizeof *named), i, k;
    int changed = 1;
    if (named == NULL) exit(2);
    for (i = 0; i < n_words; i++) named[i] = is_name(i) ? part_of(i) : n_parts;
    for (i = 0; i < n_parts; i++) parts[part_of(parts[i].name)].does |= own_deeds(&parts[i]);
    while (changed) {
        changed = 0;
        for (i = 0; i < n_parts; i++) {
            part *to = &parts[part_of(parts[i].name)];
            for (k = 0; k < sizeof gives_back / sizeof gives_back[0]; k++)
                if (is_word(to->name, gives_back[k])) break;
            if (k < sizeof gives_back / sizeof gives_back[0]) continue;
            for (k = parts[i].first; k < parts[i].last; k++)
                if (named[k] < n_parts && (parts[named[k]].does & ~to->does)) {
                    to->does |= parts[named[k]].does;
                    changed = 1;
                }
        }
    }
    free(named);
}

/* Public functions that can reach such a thing and have no row, and why. */
typedef struct excuse {
    const char *function;
    unsigned ops;
    const char *reason;
} excuse;

static const excuse excuses[] = {{"moe_infer", OP_FETCH, "its loader is NULL"},
                                 {"moe_model_create", OP_FETCH, "names the functions that fetch, but runs none"},
                                 {"moe_model_profile", OP_FETCH, "fetches from memory, with a loader of its own"},
                                 {"moe_transport_begin", FILES, "names functions that read files, but runs none"}};

static int names(const char *list, const char *name) {
    const size_t n = strlen(name);
    const char *p = list;
    while ((p = strstr(p, name)) != NULL) {
        if ((p == list || p[-1] == ' ') && (p[n] == ' ' || p[n] == '\0')) return 1;
        p += n;
    }
    return 0;
}

static unsigned ops_of_rows(const char *name) {
    unsigned ops = 0;
    int i;
    for (i = 0; i < N_ROWS; i++) ops |= names(rows[i].functions, name) ? rows[i].ops : 0;
    for (i = 0; i < N_ADDERS; i++) ops |= names(adders[i].name, name) ? OP_MEMORY : 0;
    return ops;
}

static unsigned excused_ops(const char *name) {
    size_t i;
    for (i = 0; i < sizeof excuses / sizeof excuses[0]; i++)
        if (strcmp(excuses[i].function, name) == 0) return excuses[i].ops;
    return 0;
}

static void test_public(const char *folder) {
    static const char *const headers[] = {
        "moe_kernels.h", "moe_routers.h", "moe.h", "examples/extras/moe_blocks.h", "examples/extras/moe_check.h",
        "examples/extras/moe_classic.h", "examples/extras/moe_export.h", "examples/extras/moe_import.h",
        "examples/extras/moe_ranks.h", "examples/extras/moe_report.h", "examples/extras/moe_smooth.h",
        "examples/extras/moe_upcycle.h"};
    enum { HEADERS = sizeof headers / sizeof *headers };
    char *texts[HEADERS];
    unsigned reached = 0;
    size_t i, heaps = 0, found = 0;
    int k;
    test_about = "public functions";
    for (k = 0; k < HEADERS; k++) {
        char name[600];
        char *text;
        long size;
        FILE *f;
        sprintf(name, "%.500s/%s", folder, headers[k]);
        f = fopen(name, "rb");
        if (!CHECKF(f != NULL, "%s: %s", "cannot be read", name)) return;
        fseek(f, 0, SEEK_END);
        size = ftell(f);
        rewind(f);
        texts[k] = text = (char *)calloc((size_t)size + 2, 1); /* the words point there */
        if (text == NULL || fread(text, 1, (size_t)size, f) != (size_t)size) exit(2);
        fclose(f);
        read_words(text);
    }
    find_parts();
    qsort(parts, n_parts, sizeof parts[0], compare_parts);
    for (i = 0; i < n_parts; i++) heaps += own_deeds(&parts[i]) == OP_MEMORY;
    CHECK(heaps == 1, "memory is asked for in one place");
    spread_deeds();
    for (i = 0; i < n_parts; i++) {
        const part *all = &parts[part_of(parts[i].name)];
        unsigned does = all->does, done;
        char name[100];
        if (!parts[i].is_public || does == 0) continue;
        sprintf(name, "%.*s", (int)(words[parts[i].name].n < 90 ? words[parts[i].name].n : 90), words[parts[i].name].p);
        if (does & FILES) does &= ~(unsigned)OP_STREAM; /* its streams are its files */
        done = ops_of_rows(name);
        found++;
        reached |= does;
        CHECKF((does & ~done & ~excused_ops(name)) == 0, "%s: %s", "a public function can fail and has no row", name);
        CHECKF((excused_ops(name) & (done | ~does)) == 0, "%s: %s", "needs no excuse", name);
    }
    CHECK(found > 40 && (reached & (OP_MEMORY | OP_STREAM | OP_FETCH)) == (OP_MEMORY | OP_STREAM | OP_FETCH) &&
              (reached & FILES),
          "such functions are found");
    free(words);
    for (k = 0; k < HEADERS; k++) free(texts[k]);
}

int main(int count, char **arguments) {
    int i;
    (void)trap_open;
    (void)trap_read;
    (void)trap_write;
    (void)trap_flush;
    (void)trap_close;
    (void)trap_error;
    (void)trap_seek;
    (void)trap_tell;
    (void)trap_rename;
    (void)trap_remove;
    (void)trap_realloc;
    (void)sink;
    (void)scratch;
    (void)rewrite_file;
    (void)says_why;
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* an alarm may end this */
    make_samples();
    make_files();
#ifndef MOE_NO_TRAIN
    make_trained_files();
#endif
    no_temporaries();
    CASE(test_public(count > 1 ? arguments[1] : exists("moe.h") ? "." : "tests/.."));
    CASE(test_rows());
#ifndef MOE_NO_STDIO
    CASE(test_reads());
    CASE(test_left_behind());
#endif
#if HAS_POSIX && !defined(MOE_NO_STDIO)
    CASE(test_places());
    CASE(test_neighbors());
    CASE(test_group());
    CASE(test_devices());
    CASE(test_full());
    CASE(test_full_device());
#endif
    test_about = "all";
    for (i = 0; i < N_OPS; i++) {
#if defined(MOE_NO_TRAIN) || defined(MOE_NO_QUANT) /* nothing is exported, nothing is fetched */
        if (i == 1 || i == 2) continue;
#endif
#ifdef MOE_NO_STDIO
        if (i > 2) continue;
#endif
#ifdef _WIN32
        /* renamed by a function of the system's own */
        if (op_names[i][0] == 'r' && op_names[i][1] == 'e' && op_names[i][2] == 'n') continue;
#endif
        CHECKF(fired_count[i] > 0, "%s: %s", "has never failed", op_names[i]);
    }
    free(net_file.data);
    free(layer_file.data);
    free(trainer_file.data);
    free(midway_file.data);
    return test_end();
}
