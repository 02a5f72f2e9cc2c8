/* Random configurations, sizes and data for the whole library, as a stranger might choose them:
   what is accepted must run without a finding of a sanitizer, without a number that is not finite,
   within the time of a case, and twice with the same bits; what is refused must say why and change
   nothing.
       cc -std=c99 -O2 -I. tests/property/fuzz_config.c -o fuzz_config -lm
       ./fuzz_config [COUNT [SEED]]
   "fuzz_config 1 SEED" runs one case again; "quick" is a smaller COUNT, "show 1 SEED" prints the
   case, "KIND COUNT SEED" (router, layer, ...) has cases of one kind. The same source is a
   libFuzzer target, whose bytes are the choices:
       clang -std=c99 -g -O1 -I. -DFUZZ_TARGET -DMOE_NO_SIMD \
           -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
           tests/property/fuzz_config.c -o fuzz -lm
       ./fuzz -max_total_time=120 -max_len=600 -timeout=10
   What is promised for finite numbers: with inputs up to 1e4 in magnitude and weights as a layer
   begins, whatever the configuration, one layer's outputs, losses and gradients are finite, or a
   status says that they are not (MOE_ERR_NONFINITE). Beyond that range only memory safety, time and
   the status are. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"

#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- a case: its choices, what it has said of itself, what it has taken ---- */

enum { MOST_BLOCKS = 4096, TEXT_ROOM = 16384, MOST_NUMBERS = 400000 };

typedef struct fuzz {
    const uint8_t *bytes; /* the choices; behind their end all are 0 */
    size_t size, at;
    moe_rng rng;          /* data, seeded by a choice */
    char text[TEXT_ROOM]; /* the configurations so far */
    size_t length;
    void *blocks[MOST_BLOCKS];
    size_t n_blocks;
    long taken;           /* blocks of memory that the library has */
    size_t in_use;        /* their bytes */
    int wrong_size;       /* it gave back another size than it took */
    int keep_width;       /* d_model is given */
    int simple;           /* few fields are changed, as for models with an integer form */
    int wide;             /* sizes are larger, tokens more */
    int failed;
} fuzz;

static fuzz now;
static uint64_t now_seed;
static char now_kind[20]; /* "", or the kind asked for and a space */
static long passed, failed;
static int showing;

static void show_case(const char *what, int line) {
    printf("%s (line %d): fuzz_config %s1 %lu\n%s\n", what, line, now_kind, (unsigned long)now_seed, now.text);
    fflush(stdout);
}

static int check(fuzz *f, int good, int line, const char *what) {
    if (good) return 1;
    if (!f->failed) show_case(what, line);
    f->failed = 1;
#ifdef FUZZ_TARGET
    abort();
#endif
    return 0;
}

#define CHECK(f, condition, what) check(f, (condition) ? 1 : 0, __LINE__, what)

static void say(fuzz *f, const char *text) {
    size_t n = strlen(text), room = TEXT_ROOM - 1 - f->length;
    if (n > room) n = room;
    memcpy(f->text + f->length, text, n);
    f->length += n;
    f->text[f->length] = '\0';
}

static void say_number(fuzz *f, const char *name, double value) {
    char text[80];
    sprintf(text, " %.30s=%.9g", name, value);
    say(f, text);
}

/* Memory of exactly this size, so that a sanitizer sees the byte behind it; given back at the end
   of the case. */
static void *grab(fuzz *f, size_t count, size_t size) {
    void *p = malloc(count * size > 0 ? count * size : 1);
    if (p == NULL || f->n_blocks == MOST_BLOCKS) {
        fprintf(stderr, "fuzz_config: out of memory\n");
        exit(2);
    }
    memset(p, 0, count * size);
    return f->blocks[f->n_blocks++] = p;
}

/* The library's heap: counts, checks the sizes it is told, and has an end, so that a huge
   configuration is no huge allocation. */
static void *heap_resize(void *ctx, void *block, size_t old_size, size_t new_size) {
    fuzz *f = (fuzz *)ctx;
    unsigned char *base = block != NULL ? (unsigned char *)block - 16 : NULL, *made;
    size_t had = 0;
    if (base != NULL) memcpy(&had, base, sizeof had);
    if (had != old_size) f->wrong_size = 1;
    if (new_size > 0 && (new_size > (size_t)1 << 26 || f->in_use - had > ((size_t)1 << 27) - new_size)) return NULL;
    made = new_size > 0 ? (unsigned char *)malloc(new_size + 16) : NULL;
    if (new_size > 0 && made == NULL) return NULL;
    if (made != NULL) memcpy(made, &new_size, sizeof new_size);
    if (made != NULL && base != NULL) memcpy(made + 16, block, had < new_size ? had : new_size);
    f->taken += (made != NULL) - (base != NULL);
    f->in_use = f->in_use - had + new_size;
    free(base);
    return made != NULL ? made + 16 : NULL;
}

static moe_allocator heap(fuzz *f) {
    moe_allocator a;
    a.ctx = f;
    a.resize = heap_resize;
    return a;
}

/* A number below n, from the bytes. */
static unsigned draw(fuzz *f, unsigned n) {
    unsigned value = 0, limit = 1;
    while (limit < n && limit < 1u << 24) {
        value = value << 8 | (f->at < f->size ? f->bytes[f->at] : 0u);
        f->at++;
        limit <<= 8;
    }
    return n > 0 ? value % n : 0;
}

static int one_in(fuzz *f, unsigned n) { return draw(f, n) == n - 1; } /* no bytes: no */

static moe_real uniform(fuzz *f) { return moe_rng_uniform(&f->rng); }

/* ---- configurations ---- */

/* Sizes that keep a case small. Fields that are not here take up to 16. */
static const struct {
    const char *name;
    int most;
} small_sizes[] = {{"d_model", 24},  {"n_experts", 12},     {"top_k", 6},  {"router_hidden", 20}, {"cosine_dim", 12},
                   {"heads", 4},     {"attention_head", 3}, {"groups", 4}, {"groups_kept", 4},    {"table_size", 30},
                   {"slots", 4},     {"soft_sequences", 4}, {"nodes", 6},  {"ac_mix", 4},         {"k_end", 6},
                   {"freeze_at", 6}, {"switch_at", 6},      {"d_out", 24}, {"d_ff", 40},          {"n_shared", 3}};

/* The fields that decide most. */
static const char *const main_fields[] = {"score", "select",    "weight", "gate",   "refine",          "input",
                                          "noise", "n_experts", "top_k",  "expert", "capacity_factor", "act"};

static unsigned small_most(const moe_field *field) {
    size_t i;
    for (i = 0; i < sizeof small_sizes / sizeof small_sizes[0]; i++)
        if (strcmp(field->name, small_sizes[i].name) == 0) return (unsigned)small_sizes[i].most;
    return 16;
}

static void put_int(void *config, const moe_field *field, int value) {
    memcpy((char *)config + field->offset, &value, sizeof value);
}

static void put_real(void *config, const moe_field *field, double value) {
    moe_real real = (moe_real)value;
    memcpy((char *)config + field->offset, &real, sizeof real);
}

static int odd_int(fuzz *f, const moe_field *field) {
    const int odd[] = {-1, (int)field->max, (int)field->max + 1, (int)field->min - 1, INT_MIN, INT_MAX, 1 << 16, 255};
    return odd[draw(f, sizeof odd / sizeof odd[0])];
}

static int draw_int(fuzz *f, const moe_field *field) {
    unsigned most = small_most(field);
    if (one_in(f, 120)) return odd_int(f, field);
    if (field->kind != MOE_FIELD_INT) return (int)draw(f, (unsigned)field->max + 1);
    if (f->wide) most *= 16;
    if (field->max < (double)most) most = (unsigned)field->max;
    return (int)field->min + (int)draw(f, most);
}

/* Often the middle of the range, sometimes all of it and its ends. */
static double draw_real(fuzz *f, const moe_field *field) {
    const double odd[] = {HUGE_VAL, -HUGE_VAL, HUGE_VAL - HUGE_VAL, field->max * 2.0, field->min / 2.0, -1.0,
                          1e-40,    -0.0};
    const double low = field->min > 1e-9 ? field->min : 1e-9, sign = field->min < 0.0 && draw(f, 2) ? -1.0 : 1.0;
    const double share = (double)draw(f, 65536) / 65535.0;
    switch (draw(f, 10)) {
    case 1: return sign * low * pow(field->max / low, share);
    case 2: return field->min;
    case 3: return field->max;
    case 4: return one_in(f, 12) ? odd[draw(f, 8)] : 0.0;
    default: return sign * (field->max < 3.0 ? field->max * (share + 1e-3) / 1.001 : 0.02 * pow(150.0, share));
    }
}

static void draw_field(fuzz *f, const moe_field *field, void *config) {
    if (field->kind == MOE_FIELD_REAL) put_real(config, field, draw_real(f, field));
    else put_int(config, field, draw_int(f, field));
}

static size_t count_fields(const moe_field *fields) {
    size_t n = 0;
    while (fields[n].name != NULL) n++;
    return n;
}

/* Whether a text holds a word, not as a part of a longer one. */
static int holds_word(const char *text, const char *word) {
    const char *p = text;
    size_t n = strlen(word);
    for (; (p = strstr(p, word)) != NULL; p++) {
        const int before = p == text || strchr("abcdefghijklmnopqrstuvwxyz_", p[-1]) == NULL;
        const int after = strchr("abcdefghijklmnopqrstuvwxyz_", p[n]) == NULL;
        if (before && (after || p[n] == '\0')) return 1;
    }
    return 0;
}

/* Whether a field asks for its default; -0 does, too. */
static int is_zero(const moe_field *field, const void *config) {
    moe_real real = 0;
    int value = 0;
    if (field->kind == MOE_FIELD_REAL) memcpy(&real, (const char *)config + field->offset, sizeof real);
    else memcpy(&value, (const char *)config + field->offset, sizeof value);
    return value == 0 && !(real < 0) && !(real > 0) && moe_is_finite(real);
}

/* Whether a message has "name = " and a number that is this one, rounded to four digits or more. */
static int has_real(const char *message, const char *name, double value) {
    const char *p = message;
    for (; (p = strstr(p, name)) != NULL; p++) {
        double said;
        if (strncmp(p + strlen(name), " = ", 3) != 0) continue;
        said = strtod(p + strlen(name) + 3, NULL);
        if (said != said ? value != value : said == value || fabs(said - value) <= 1e-3 * fabs(value)) return 1;
    }
    return 0;
}

/* A message that names a field and the value that it has, or that defaults give it; "is set" stands
   for a value where any is too much. */
static int names_a_field(const char *message, const moe_field *fields, const void *config) {
    char value[64];
    moe_real real;
    for (; fields->name != NULL; fields++) {
        if (!holds_word(message, fields->name)) continue;
        moe_field_text(fields, config, value, sizeof value);
        if (is_zero(fields, config) || strstr(message, value) != NULL || strstr(message, "is set") != NULL) return 1;
        if (fields->kind != MOE_FIELD_REAL) continue;
        memcpy(&real, (const char *)config + fields->offset, sizeof real);
        if (has_real(message, fields->name, (double)real)) return 1;
    }
    return 0;
}

static void check_error(fuzz *f, moe_status status, const moe_error *error) {
    CHECK(f, status == error->code, "the status is that of the error");
    CHECK(f, error->message[0] != '\0' && memchr(error->message, '\0', sizeof error->message) != NULL,
          "an error has a text that ends");
}

/* One kind of configuration. */
typedef struct family {
    const moe_field *fields;
    size_t size;
    moe_status (*check)(const void *config, void *out, moe_error *error);
} family;

static moe_status check_router(const void *config, void *out, moe_error *error) {
    return moe_router_check((const moe_router_config *)config, (moe_router_config *)out, error);
}

static moe_status check_layer(const void *config, void *out, moe_error *error) {
    return moe_layer_check((const moe_layer_config *)config, (moe_layer_config *)out, error);
}

static family routers(void) {
    family a;
    a.fields = moe_router_fields();
    a.size = sizeof(moe_router_config);
    a.check = check_router;
    return a;
}

static family layers(void) {
    family a;
    a.fields = moe_layer_fields();
    a.size = sizeof(moe_layer_config);
    a.check = check_layer;
    return a;
}

/* A configuration that was refused: the message, and that nothing was written. */
static void check_refusal(fuzz *f, const family *a, const void *config, moe_status status, const moe_error *error) {
    unsigned char out[sizeof(moe_layer_config)], kept[sizeof out];
    check_error(f, status, error);
    if (!CHECK(f, status == MOE_ERR_CONFIG, "a configuration is refused with MOE_ERR_CONFIG")) return;
    if (!CHECK(f, names_a_field(error->message, a->fields, config), "a refusal names a field and its value"))
        printf("    %s\n", error->message);
    memset(out, 0x5a, sizeof out);
    memset(kept, 0x5a, sizeof kept);
    CHECK(f, a->check(config, out, NULL) == status && memcmp(out, kept, sizeof out) == 0,
          "a failed check changes nothing");
}

/* Gives new values to the fields that a refusal names, for they go together. */
static void repair(fuzz *f, const family *a, const moe_error *error, void *config) {
    const moe_field *field;
    for (field = a->fields; field->name != NULL; field++)
        if (strcmp(field->name, "d_model") != 0 && holds_word(error->message, field->name))
            draw_field(f, field, config);
}

/* Changes one field; keeps the change when the configuration is good afterwards, or can be
   repaired. */
static void change(fuzz *f, const family *a, const moe_field *field, void *config) {
    unsigned char before[sizeof(moe_layer_config)];
    moe_error error;
    moe_status status;
    int tries;
    memcpy(before, config, a->size);
    draw_field(f, field, config);
    for (tries = 0; (status = a->check(config, NULL, &error)) != MOE_OK && tries < 4; tries++) {
        check_refusal(f, a, config, status, &error);
        repair(f, a, &error, config);
    }
    if (status != MOE_OK) memcpy(config, before, a->size);
}

static const moe_field *draw_which(fuzz *f, const family *a) {
    const moe_field *field = NULL;
    if (draw(f, 2) == 0)
        field = moe_field_find(a->fields, main_fields[draw(f, sizeof main_fields / sizeof main_fields[0])]);
    if (field == NULL) field = a->fields + draw(f, (unsigned)count_fields(a->fields));
    return f->keep_width && strcmp(field->name, "d_model") == 0 ? a->fields + 1 : field;
}

static void say_config(fuzz *f, const family *a, const void *config) {
    const moe_field *field;
    char value[64];
    for (field = a->fields; field->name != NULL; field++) {
        unsigned char zero[sizeof(moe_layer_config)];
        size_t size = field->kind == MOE_FIELD_REAL ? sizeof(moe_real) : sizeof(int);
        memset(zero, 0, sizeof zero);
        if (memcmp((const char *)config + field->offset, zero, size) == 0) continue;
        moe_field_text(field, config, value, sizeof value);
        say(f, " ");
        say(f, field->name);
        say(f, "=");
        say(f, value);
    }
}

/* Files and presets hold a configuration as text: read back, it is the same. */
static void check_text(fuzz *f, const family *a, const void *config) {
    unsigned char again[sizeof(moe_layer_config)];
    const moe_field *field;
    char value[64];
    memset(again, 0, sizeof again);
    for (field = a->fields; field->name != NULL; field++) {
        size_t size = field->kind == MOE_FIELD_REAL ? sizeof(moe_real) : sizeof(int);
        moe_field_text(field, config, value, sizeof value);
        if (!CHECK(f, moe_field_set(a->fields, again, field->name, value, NULL) == MOE_OK,
                   "the text of a field is read back"))
            printf("    %s=%s\n", field->name, value);
        CHECK(f,
              (is_zero(field, config) && field->kind == MOE_FIELD_REAL) ||
                  memcmp((const char *)config + field->offset, again + field->offset, size) == 0,
              "the text of a field has all its bits");
    }
}

/* Checking fills in defaults, which are good and stay as they are. */
static void check_defaults(fuzz *f, const family *a, const void *config) {
    unsigned char once[sizeof(moe_layer_config)], twice[sizeof once];
    memset(once, 0, sizeof once);
    memset(twice, 0, sizeof twice);
    CHECK(f, a->check(config, once, NULL) == MOE_OK, "a good configuration is good again");
    CHECK(f, a->check(once, twice, NULL) == MOE_OK && memcmp(once, twice, a->size) == 0,
          "defaults that were filled in stay");
    check_text(f, a, once);
}

static void draw_config(fuzz *f, const family *a, void *config) {
    static const unsigned counts[] = {3, 8, 20, 60};
    unsigned n = f->simple ? draw(f, 5) : counts[draw(f, 4)], i;
    for (i = 0; i < n; i++) change(f, a, draw_which(f, a), config);
    say_config(f, a, config);
    check_defaults(f, a, config);
}

static const char *draw_preset(fuzz *f) {
    const moe_preset *presets = moe_presets();
    unsigned n = 0;
    while (presets[n].name != NULL) n++;
    return presets[draw(f, n)].name;
}

/* A width, and what a preset leaves open: token ids, a width that the experts divide. */
static void complete(fuzz *f, moe_router_config *c, int width) {
    c->d_model = width > 0 ? width : 1 + (int)draw(f, one_in(f, 10) ? 130 : 24);
    if (c->select == MOE_SELECT_HASH || c->student_dim > 0) c->table_size = 1 + (int)draw(f, 30);
    if (c->score == MOE_SCORE_GRAP && width > 0) c->n_experts = width;
    else if (c->score == MOE_SCORE_GRAP) c->d_model = (c->n_experts > 0 ? c->n_experts : 8) * (1 + (int)draw(f, 3));
}

/* {0} or a preset, then changes. */
static void draw_router(fuzz *f, moe_router_config *c) {
    const family a = routers();
    memset(c, 0, sizeof *c);
    say(f, "router");
    if (one_in(f, 3)) CHECK(f, moe_router_preset(draw_preset(f), c, NULL) == MOE_OK, "a preset");
    complete(f, c, 0);
    draw_config(f, &a, c);
}

/* width 0: any. */
static void draw_layer(fuzz *f, moe_layer_config *c, int width) {
    const family a = layers();
    f->keep_width = width > 0;
    memset(c, 0, sizeof *c);
    say(f, "layer");
    if (!f->simple && one_in(f, 3)) CHECK(f, moe_layer_preset(draw_preset(f), c, NULL) == MOE_OK, "a preset");
    complete(f, &c->router, width);
    /* a preset for another width */
    if (moe_layer_check(c, NULL, NULL) != MOE_OK) {
        memset(c, 0, sizeof *c);
        c->router.d_model = width > 0 ? width : 7;
    }
    draw_config(f, &a, c);
}

/* ---- data ---- */

enum {
    DATA_NORMAL = 0, DATA_ZERO, DATA_SAME, DATA_DENORMAL, DATA_BIG, DATA_SPARSE, DATA_TINY, DATA_MIXED, DATA_FINITE,
    DATA_WILD = DATA_FINITE, DATA_NAN, DATA_INFINITE, DATA_COUNT
};
static const char *const data_names[] = {"normal", "zero",  "same", "denormal", "big",     "sparse",
                                         "tiny",   "mixed", "wild", "nan",      "infinite"};

static moe_real one_number(fuzz *f, int kind) {
    const double sign = moe_rng_below(&f->rng, 2) ? -1.0 : 1.0, u = (double)uniform(f);
    switch (kind) {
    case DATA_ZERO: return (moe_real)(0.0 * sign);
    case DATA_DENORMAL: return (moe_real)(sign * u * (sizeof(moe_real) > 4 ? 1e-310 : 1e-39));
    case DATA_BIG: return (moe_real)(sign * u * 1e4);
    case DATA_SPARSE: return (moe_real)(u < 0.9 ? 0.0 : sign * 1e4);
    case DATA_TINY: return (moe_real)(sign * u * 1e-20);
    case DATA_MIXED: return (moe_real)(sign * pow(10.0, 10.0 * u - 6.0));
    case DATA_WILD: return (moe_real)(sign * pow(10.0, 38.0 * u));
    case DATA_NAN: return (moe_real)(u < 0.1 ? HUGE_VAL - HUGE_VAL : u);
    case DATA_INFINITE: return (moe_real)(u < 0.1 ? sign * HUGE_VAL : u);
    default: return moe_rng_normal(&f->rng);
    }
}

static moe_real *numbers(fuzz *f, size_t n, int kind) {
    moe_real *x = (moe_real *)grab(f, n, sizeof *x);
    size_t i;
    for (i = 0; i < n; i++) x[i] = kind == DATA_SAME && i > 0 ? x[0] : one_number(f, kind);
    return x;
}

static int32_t *integers(fuzz *f, size_t n, int low, int limit) {
    int32_t *v = (int32_t *)grab(f, n, sizeof *v);
    size_t i;
    for (i = 0; i < n; i++) v[i] = (int32_t)(low + (int)moe_rng_below(&f->rng, (uint64_t)(limit - low)));
    return v;
}

static int draw_data(fuzz *f) {
    return one_in(f, 12) ? DATA_FINITE + (int)draw(f, DATA_COUNT - DATA_FINITE)
           : draw(f, 3)  ? (int)draw(f, DATA_FINITE)
                         : DATA_NORMAL;
}

/* What runs through a router or layer. */
typedef struct matter {
    size_t n; /* tokens */
    int data; /* DATA_ */
    int training;
    int shaken; /* SHAKEN_: its tensors */
} matter;

/* As a layer begins; as training might leave them; as a file of a stranger might bring them. */
enum { SHAKEN_NOT = 0, SHAKEN_LITTLE, SHAKEN_MUCH, SHAKEN_WILD };

/* Tables and state keep to what they mean, unless all is wild. */
static void shake(fuzz *f, int how, unsigned flags, const char *name, size_t n, moe_real *x) {
    const double spread = how == SHAKEN_LITTLE ? 0.1 : 3.0;
    const int wild = DATA_FINITE + (int)draw(f, DATA_COUNT - DATA_FINITE);
    size_t i;
    if (how == SHAKEN_NOT || (how != SHAKEN_WILD && (flags & (unsigned)(MOE_PARAM_STATE | MOE_PARAM_FROZEN)) != 0))
        return;
    for (i = 0; i < n; i++) {
        if (how == SHAKEN_WILD) x[i] = one_number(f, wild);
        else x[i] += (moe_real)spread * moe_rng_normal(&f->rng);
        if (how != SHAKEN_WILD && strstr(name, "temperature") != NULL) x[i] = (moe_real)(0.05 + fabs((double)x[i]));
    }
}

static int is_tame(const matter *m) { return m->data < DATA_FINITE && m->shaken != SHAKEN_WILD; }

static int all_finite(const moe_real *x, size_t n) {
    size_t i;
    for (i = 0; i < n; i++)
        if (!moe_is_finite(x[i])) return 0;
    return 1;
}

/* Rows of probabilities, some with zeros, each causal or not. */
static moe_real *attention_rows(fuzz *f, size_t heads, size_t n, int causal) {
    moe_real *a = numbers(f, heads * n * n, DATA_ZERO);
    size_t i, j;
    for (i = 0; i < heads * n; i++) {
        size_t seen = causal ? i % n + 1 : n;
        moe_real sum = 0;
        for (j = 0; j < seen; j++) {
            a[i * n + j] = j % 3 == 2 ? 0 : uniform(f) + (moe_real)1e-3;
            sum += a[i * n + j];
        }
        for (j = 0; j < seen; j++) a[i * n + j] /= sum;
    }
    return a;
}

/* Offsets from 0 to n, empty sequences among them. */
static void draw_sequences(fuzz *f, moe_call *call, size_t most) {
    size_t count = 1 + draw(f, most < 5 ? (unsigned)most : 5), i;
    int32_t *offsets = (int32_t *)grab(f, count + 1, sizeof *offsets);
    for (i = 1; i < count; i++)
        offsets[i] = offsets[i - 1] + (int32_t)draw(f, (unsigned)(call->n_tokens - (size_t)offsets[i - 1]) + 1);
    offsets[count] = (int32_t)call->n_tokens;
    call->sequences = offsets;
    call->n_sequences = count;
}

/* Some padding, and in it what must reach nothing. */
static void draw_mask(fuzz *f, moe_call *call, size_t d, int poison) {
    unsigned char *mask = (unsigned char *)grab(f, call->n_tokens, 1);
    moe_real *x = (moe_real *)grab(f, call->n_tokens * d, sizeof *x);
    const int none = one_in(f, 10);
    size_t t, q;
    if (call->n_tokens * d > 0) memcpy(x, call->x, call->n_tokens * d * sizeof *x);
    for (t = 0; t < call->n_tokens; t++) {
        mask[t] = !none && moe_rng_below(&f->rng, 3) > 0;
        for (q = 0; q < d && !mask[t] && poison; q++) x[t * d + q] = (moe_real)(HUGE_VAL - HUGE_VAL);
    }
    call->mask = mask;
    call->x = x;
}

/* The most choices of a token, which is the length of a row of given. */
#define BIT_IF_BY_K(value, name, select, flags, traits) | (((flags) & MOEI_SELECT_AT_MOST_K) != 0) << value

static size_t most_choices(const moe_router_config *c) {
    const int by_k = 0 MOE_SELECTS(BIT_IF_BY_K), switches = c->switch_at > 0 || c->switch_share > 0;
    if (!(by_k >> c->select & 1) || (switches && !(by_k >> c->switch_from & 1))) return (size_t)c->n_experts;
    return (size_t)(c->k_end > c->top_k ? c->k_end : c->top_k);
}

/* whole: as many experts as a token may have. */
static int32_t *draw_given(fuzz *f, const moe_router_config *c, size_t n, int whole) {
    size_t k = most_choices(c), t, i;
    int32_t *given = (int32_t *)grab(f, n * k, sizeof *given);
    for (t = 0; t < n; t++) {
        size_t first = (size_t)moe_rng_below(&f->rng, (uint64_t)c->n_experts);
        size_t count = whole ? k : (size_t)moe_rng_below(&f->rng, k + 1);
        for (i = 0; i < k; i++) given[t * k + i] = i < count ? (int32_t)((first + i) % (size_t)c->n_experts) : -1;
    }
    return given;
}

/* All that routers may ask of a call beside x. */
static void supply(fuzz *f, const moe_router_config *c, int kind, moe_call *call) {
    size_t n = call->n_tokens, d = (size_t)c->d_model;
    size_t experts = (size_t)c->n_experts, heads = (size_t)c->heads;
    call->rng = (moe_rng *)grab(f, 1, sizeof(moe_rng));
    if (c->select == MOE_SELECT_GIVEN) call->given = draw_given(f, c, n, 0);
    if (c->loss_distill > 0 && !c->student) call->teacher = numbers(f, n * experts, DATA_NORMAL);
    if (c->table_size > 0) call->token_ids = integers(f, n, 0, c->table_size);
    if (c->loss_locality > 0 && draw(f, 2)) call->token_machine = integers(f, n, 0, c->nodes);
    if (c->loss_locality > 0 && draw(f, 2)) call->expert_machine = integers(f, experts, 0, c->nodes);
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        call->n_previous = 1 + draw(f, 3);
        call->previous_input = numbers(f, n * d, kind);
        call->previous_experts = integers(f, n * call->n_previous, one_in(f, 3) ? -1 : 0, c->n_experts);
        call->previous_weights = numbers(f, n * call->n_previous, draw(f, 2) ? DATA_NORMAL : DATA_ZERO);
    }
    if (c->refine == MOE_REFINE_ATTENTION) {
        call->attention_weights = attention_rows(f, heads, n, c->causal);
        call->attention_outputs = numbers(f, heads * n * d, kind);
        call->attention_output = numbers(f, n * d, kind);
        if (call->training && draw(f, 2)) {
            call->d_attention_weights = numbers(f, heads * n * n, DATA_ZERO);
            call->d_attention_outputs = numbers(f, heads * n * d, DATA_ZERO);
            call->d_attention_output = numbers(f, n * d, DATA_ZERO);
        }
    }
    if (c->loss_similarity_same > 0 && one_in(f, 3)) call->distances = numbers(f, n * n, DATA_NORMAL);
    if (one_in(f, 5)) call->router_x = numbers(f, n * d, kind);
}

static size_t draw_tokens(fuzz *f) {
    return f->wide ? draw(f, 500) : one_in(f, 12) ? draw(f, 2) : one_in(f, 20) ? draw(f, 200) : 1 + draw(f, 24);
}

static matter draw_matter(fuzz *f) {
    matter m;
    m.n = draw_tokens(f);
    m.data = draw_data(f);
    m.training = (int)draw(f, 2);
    m.shaken = draw(f, 2) ? SHAKEN_NOT : one_in(f, 6) ? SHAKEN_WILD : SHAKEN_LITTLE + (int)draw(f, 2);
    return m;
}

static void draw_call(fuzz *f, const moe_router_config *c, const matter *m, int poison, moe_call *call) {
    const int kind = m->data;
    memset(call, 0, sizeof *call);
    call->n_tokens = m->n;
    call->training = m->training;
    call->x = numbers(f, m->n * (size_t)c->d_model, kind);
    supply(f, c, kind, call);
    if (one_in(f, 3)) draw_mask(f, call, (size_t)c->d_model, poison && call->router_x == NULL);
    if (one_in(f, 3)) draw_sequences(f, call, c->select == MOE_SELECT_SOFT ? (size_t)c->soft_sequences : 5);
    say(f, "\ncall");
    say_number(f, "n", (double)call->n_tokens);
    say(f, " data=");
    say(f, data_names[kind]);
    say_number(f, "training", call->training);
    say_number(f, "shaken", m->shaken);
    say_number(f, "mask", call->mask != NULL);
    say_number(f, "sequences", (double)call->n_sequences);
    say_number(f, "router_x", call->router_x != NULL);
}

/* ---- stages of the test's own ---- */

static moe_real own_weight(size_t e, size_t q) {
    return (moe_real)(((double)((e * 31 + q * 17 + 7) % 23) - 11.0) / 11.0);
}

static moe_status own_score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                            moe_real *logits) {
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts, t, e, q;
    const size_t n = (size_t)router->config.custom_parameters;
    (void)ctx;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++) {
            moe_real sum = n > 0 ? router->tensors[MOE_ROUTER_CUSTOM][e % n] : 0;
            for (q = 0; q < d; q++) sum += u[t * d + q] * own_weight(e, q);
            logits[t * experts + e] = sum;
        }
    return MOE_OK;
}

static moe_status own_score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                     const moe_real *d_logits, moe_real *d_u, moe_real *d_parameters) {
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts, t, e, q;
    (void)ctx;
    (void)u;
    for (t = 0; t < call->n_tokens && d_parameters != NULL; t++)
        for (e = 0; e < experts; e++)
            d_parameters[e % (size_t)router->config.custom_parameters] += d_logits[t * experts + e];
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++)
            for (q = 0; q < d; q++) d_u[t * d + q] += d_logits[t * experts + e] * own_weight(e, q);
    return MOE_OK;
}

static moe_status own_select(void *ctx, const moe_router *router, const moe_call *call, const moe_real *logits,
                             const moe_real *probabilities, unsigned char *chosen) {
    size_t experts = (size_t)router->config.n_experts, t, e;
    (void)ctx;
    (void)probabilities;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++) chosen[t * experts + e] = logits[t * experts + e] > logits[t * experts];
    return MOE_OK;
}

static void set_custom(moe_router *router) {
    router->custom.score = own_score;
    router->custom.score_backward = own_score_backward;
    router->custom.select = own_select;
    router->custom.n_parameters = (size_t)router->config.custom_parameters;
}

/* ---- what every routing keeps to ---- */

static int is_real(const moe_call *call, size_t t) { return call->mask == NULL || call->mask[t] != 0; }

/* Choices are different experts, padding has none. */
static void check_choices(fuzz *f, const moe_call *call, const moe_routing *r) {
    size_t t, i, j, pairs = 0, counted = 0;
    for (t = 0; t < r->n_tokens; t++) {
        const int32_t *choice = r->choices + t * r->max_choices;
        const size_t n = (size_t)r->n_choices[t];
        if (!CHECK(f, r->n_choices[t] >= 0 && n <= r->max_choices, "choices of a token")) return;
        CHECK(f, n == 0 || is_real(call, t), "padding chooses nobody");
        for (i = 0; i < n; i++) {
            if (!CHECK(f, choice[i] >= 0 && (size_t)choice[i] < r->n_experts, "a choice is an expert")) return;
            for (j = 0; j < i; j++) CHECK(f, choice[i] != choice[j], "no expert twice");
        }
        pairs += n;
    }
    for (i = 0; i < r->n_experts; i++) counted += r->counts[i];
    CHECK(f, counted == pairs, "counts are those of the choices");
    CHECK(f, pairs == r->plan.offsets[r->n_experts] + r->n_dropped, "every pair is kept or dropped");
}

static void check_entry(fuzz *f, const moe_call *call, const moe_routing *r, size_t e, const moe_assignment *entry,
                        const moe_assignment *before) {
    const size_t at = (size_t)entry->token * r->n_experts + e;
    if (!CHECK(f, entry->token >= 0 && (size_t)entry->token < r->n_tokens, "an entry's token")) return;
    CHECK(f, is_real(call, (size_t)entry->token), "padding is in no plan");
    CHECK(f, before == NULL || before->token < entry->token, "entries of an expert ascend");
    CHECK(f, r->selected[at] == 1, "an entry is selected");
    CHECK(f,
          memcmp(&r->weights[at], &entry->weight_out, sizeof(moe_real)) == 0 ||
              memcmp(&r->weights[at], &entry->weight_in, sizeof(moe_real)) == 0,
          "a weight of the plan is that of the matrix");
}

static void check_plan(fuzz *f, const moe_call *call, const moe_routing *r) {
    const moe_dispatch_plan *p = &r->plan;
    size_t e, i, capacity, selected = 0;
    if (!CHECK(f, p->offsets[0] == 0 && p->n_experts == r->n_experts && p->n_tokens == r->n_tokens, "the plan's sizes"))
        return;
    for (e = 0; e < p->n_experts; e++) {
        if (!CHECK(f, p->offsets[e] <= p->offsets[e + 1], "offsets ascend")) return;
        capacity = e < r->real_experts ? r->capacity : r->capacity_zero;
        CHECK(f, capacity == 0 || p->offsets[e + 1] - p->offsets[e] <= capacity, "nobody above capacity");
        CHECK(f, p->offsets[e + 1] - p->offsets[e] <= r->n_real, "no more entries than tokens");
        for (i = p->offsets[e]; i < p->offsets[e + 1]; i++)
            check_entry(f, call, r, e, &p->assignments[i], i > p->offsets[e] ? &p->assignments[i - 1] : NULL);
    }
    for (i = 0; i < r->n_tokens * r->n_experts; i++) selected += r->selected[i] != 0;
    CHECK(f, selected == p->offsets[p->n_experts], "selected are the entries of the plan");
}

/* Weights that are shares of a sum sum to 1, unless all are 0. */
static void check_sums(fuzz *f, const moe_router_config *c, const moe_routing *r) {
    size_t t, i;
    if (c->weight != MOE_WEIGHT_SUM && c->weight != MOE_WEIGHT_SOFTMAX && c->weight != MOE_WEIGHT_UNIFORM) return;
    if (c->threshold_learned || c->gate == MOE_GATE_IDENTITY || c->expert_scale) return;
    if (c->weight_over != MOE_WEIGHT_OVER_ALL) return; /* the others keep p */
    for (t = 0; t < r->n_tokens; t++) {
        double sum = 0.0;
        for (i = 0; i < (size_t)r->n_choices[t]; i++) sum += (double)r->choice_weights[t * r->max_choices + i];
        CHECK(f, r->n_choices[t] == 0 || fabs(sum - 1.0) < 1e-3 || !(sum < 0.0 || sum > 0.0),
              "weights of a token sum to 1");
    }
}

static int routing_is_finite(const moe_call *call, const moe_routing *r, size_t columns) {
    size_t t, i;
    int good = moe_is_finite(r->capacity_bound);
    for (t = 0; t < r->n_tokens; t++) {
        if (!is_real(call, t)) continue;
        good = good && all_finite(r->logits + t * columns, columns) && all_finite(r->gate + t * columns, columns);
        good = good && all_finite(r->probabilities + t * columns, columns);
    }
    good = good && all_finite(r->weights, r->n_tokens * r->n_experts);
    for (i = 0; i < MOE_LOSS_COUNT; i++) good = good && moe_is_finite(r->loss[i]);
    return good;
}

static size_t columns_of(const moe_router_config *c) {
    return (size_t)c->n_experts * (c->select == MOE_SELECT_SOFT ? (size_t)c->slots : 1u);
}

static void check_routing(fuzz *f, const moe_router_config *c, const moe_call *call, const moe_routing *r, int finite) {
    if (finite) CHECK(f, routing_is_finite(call, r, columns_of(c)), "a routing of finite numbers is finite");
    if (c->select == MOE_SELECT_SOFT) return;
    check_choices(f, call, r);
    check_plan(f, call, r);
    if (finite) check_sums(f, c, r);
}

static int same_routing(const moe_call *call, const moe_routing *a, const moe_routing *b, size_t columns) {
    size_t t, e = a->n_experts;
    int same = a->n_dropped == b->n_dropped && memcmp(a->loss, b->loss, sizeof a->loss) == 0;
    same = same && memcmp(a->plan.offsets, b->plan.offsets, (e + 1) * sizeof *a->plan.offsets) == 0;
    same =
        same && memcmp(a->plan.assignments, b->plan.assignments, a->plan.offsets[e] * sizeof *a->plan.assignments) == 0;
    for (t = 0; t < a->n_tokens && same; t++) {
        if (!is_real(call, t)) continue;
        same = memcmp(a->logits + t * columns, b->logits + t * columns, columns * sizeof(moe_real)) == 0;
        same = same &&
               memcmp(a->probabilities + t * columns, b->probabilities + t * columns, columns * sizeof(moe_real)) == 0;
        same = same && memcmp(a->gate + t * columns, b->gate + t * columns, columns * sizeof(moe_real)) == 0;
        same = same && memcmp(a->weights + t * e, b->weights + t * e, e * sizeof(moe_real)) == 0;
    }
    return same;
}

/* ---- a router alone ---- */

typedef struct bench {
    moe_router router;
    moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT], *gradients[MOE_ROUTER_PARAMETER_COUNT];
    moe_call call;
    int kind, tame; /* of data; whether results must be finite */
} bench;

static void start_tensor(fuzz *f, int place, const moe_parameter *slot, int experts, moe_real *data) {
    size_t i;
    for (i = 0; i < slot->count; i++) {
        data[i] = slot->init_value +
                  (slot->init_std > 0 || slot->init_std < 0 ? slot->init_std * moe_rng_normal(&f->rng) : 0);
        if (place == MOE_ROUTER_TABLE)
            data[i] = (moe_real)((i / slot->shape[1] + i % slot->shape[1]) % (size_t)experts);
    }
    if (place == MOE_ROUTER_STEP) data[0] = (moe_real)draw(f, 9);
    if (place == MOE_ROUTER_CAPACITY) data[0] = (moe_real)draw(f, 3);
}

/* 0 when the configuration is too large to be run here. */
static int start_tensors(fuzz *f, bench *b) {
    moe_parameter slot;
    size_t total = 0;
    int place;
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++) {
        const moe_status status = moe_router_parameter(&b->router.config, place, &slot);
        if (status == MOE_ERR_NOT_FOUND) continue;
        CHECK(f, status == MOE_OK || status == MOE_ERR_OVERFLOW, "a slot of a good configuration");
        if (status != MOE_OK || slot.count > MOST_NUMBERS - total) return 0;
        total += slot.count;
        b->router.tensors[place] = b->tensors[place] = (moe_real *)grab(f, slot.count, sizeof(moe_real));
        b->gradients[place] = slot.flags & (MOE_PARAM_STATE | MOE_PARAM_FROZEN) || one_in(f, 6)
                                  ? NULL
                                  : (moe_real *)grab(f, slot.count, sizeof(moe_real));
        start_tensor(f, place, &slot, b->router.config.n_experts, b->tensors[place]);
    }
    return 1;
}

static void supply_nodes(fuzz *f, bench *b) {
    const moe_router_config *c = &b->router.config;
    if (!(moe_router_traits(c) & MOE_TRAIT_NEEDS_ALL_EXPERTS)) return;
    b->call.activation_width = 5;
    if (c->score == MOE_SCORE_ATTENTIVE)
        b->call.activation_width = (size_t)(c->router_hidden > 0 ? c->router_hidden : c->d_model);
    b->call.activations = numbers(f, (size_t)c->n_experts * b->call.n_tokens * b->call.activation_width, b->kind);
}

static moe_status route(fuzz *f, bench *b, moe_routing *r) {
    size_t size = 0;
    unsigned char *memory;
    const size_t shift = draw(f, 2) * 8;
    moe_status status = moe_route_size(&b->router, b->call.n_tokens, b->call.training, &size);
    if (status != MOE_OK) return status;
    memory = (unsigned char *)grab(f, size + shift, 1);
    moe_rng_seed(b->call.rng, 5);
    if (size > 0) {
        moe_routing kept;
        memset(r, 0x3c, sizeof *r);
        memset(&kept, 0x3c, sizeof kept);
        status = moe_route(&b->router, &b->call, memory + shift, size - 1, r);
        CHECK(f, status != MOE_OK && memcmp(r, &kept, sizeof kept) == 0,
              "a byte too few: refused, and nothing changed");
        moe_rng_seed(b->call.rng, 5);
    }
    memset(memory, 0xa5, size + shift);
    return moe_route(&b->router, &b->call, memory + shift, size, r);
}

/* Routing again with another filling of memory, and what was chosen given back. */
static void route_again(fuzz *f, bench *b, const moe_routing *first) {
    const moe_router_config *c = &b->router.config;
    moe_routing again, replayed;
    int32_t *given;
    if (!CHECK(f, route(f, b, &again) == MOE_OK, "the same call succeeds again")) return;
    CHECK(f, same_routing(&b->call, first, &again, columns_of(c)), "the same call has the same bits");
    if (c->select == MOE_SELECT_SOFT || b->call.given != NULL) return;
    given = (int32_t *)grab(f, first->n_tokens * first->max_choices, sizeof *given);
    CHECK(f, moe_routing_choices(first, first->max_choices, 1, given) == MOE_OK, "recorded choices");
    b->call.given = given;
    if (CHECK(f, route(f, b, &replayed) == MOE_OK, "what was chosen can be given")) {
        check_routing(f, c, &b->call, &replayed, b->tame);
        CHECK(f, memcmp(first->counts, replayed.counts, first->n_experts * sizeof *first->counts) == 0,
              "what was chosen is chosen again");
    }
    b->call.given = NULL;
}

static int is_share(double x) { return x >= 0.0 && x <= 1.0; }

/* Measures of who was chosen, against choices at random. */
static void check_measures(fuzz *f, const bench *b, const moe_routing *r) {
    const size_t n = r->n_tokens, e = r->n_experts;
    const size_t d = (size_t)b->router.config.d_model;
    int32_t *first = integers(f, n, 0, 1), *other = integers(f, n, -1, 5);
    int32_t *predicted = integers(f, n * e, -1, 3), *labels = integers(f, n, -1, 3);
    double share = -1.0, cosine = 2.0;
    moe_instability_report unstable;
    moe_error_shares errors;
    moe_status status;
    CHECK(f, moe_routing_choices(r, 1, 1, first) == MOE_OK, "first choices");
    CHECK(f, moe_fluctuation(n, first, other, b->call.mask, &share) == MOE_OK && is_share(share), "fluctuation");
    status =
        moe_instability(n, first, e, other, 5, b->call.mask, (double *)grab(f, (e + 1) * 6, sizeof(double)), &unstable);
    CHECK(f, status == MOE_OK && is_share(unstable.instability) && is_share(unstable.q1) && is_share(unstable.chance),
          "instability");
    CHECK(f,
          moe_gate_errors(n, e, predicted, labels, labels, b->call.mask, (unsigned char *)grab(f, e, 1), &errors) ==
                  MOE_OK &&
              !(errors.error > 0.0),
          "errors of the gate");
    CHECK(f, errors.n_trivial <= e, "trivial experts");
    status = moe_token_cosine(n, d, b->call.x, b->call.mask, (double *)grab(f, d, sizeof(double)), &cosine);
    CHECK(f, status == MOE_OK || (status == MOE_ERR_NONFINITE && b->kind >= DATA_FINITE), "cosine of tokens");
    CHECK(f, status != MOE_OK || (cosine >= -1.0 && cosine <= 1.0), "a cosine");
}

static void check_metrics(fuzz *f, const bench *b, const moe_routing *r) {
    moe_metrics m;
    moe_report report;
    size_t size = 0;
    void *memory;
    moe_status status;
    if (b->router.config.select == MOE_SELECT_SOFT) return;
    if (!CHECK(f, moe_metrics_size(r->n_experts, 3, &size) == MOE_OK, "metrics size")) return;
    memory = grab(f, size, 1);
    CHECK(f, moe_metrics_init(&m, r->n_experts, 3, memory, size) == MOE_OK, "metrics init");
    status = moe_metrics_add(&m, r, b->call.mask, integers(f, r->n_tokens, -1, 3));
    CHECK(f, status == MOE_OK || (status == MOE_ERR_NONFINITE && !b->tame), "metrics add");
    CHECK(f, moe_metrics_report(&m, &report) == MOE_OK, "metrics report");
    check_measures(f, b, r);
}

static void router_backward(fuzz *f, bench *b, moe_routing *r) {
    const size_t n = r->n_tokens, d = (size_t)b->router.config.d_model;
    const size_t entries = r->plan.offsets[r->n_experts];
    const size_t node_numbers = b->call.activations != NULL ? r->n_experts * n * b->call.activation_width : 0;
    moe_real *dx = draw(f, 4) ? numbers(f, n * d, DATA_ZERO) : NULL;
    moe_real *d_activations = b->call.activations != NULL && draw(f, 4) ? numbers(f, node_numbers, DATA_ZERO) : NULL;
    moe_parameter slot;
    size_t i, t;
    int place;
    for (i = 0; i < entries; i++) {
        r->d_weight_in[i] = moe_rng_normal(&f->rng);
        r->d_weight_out[i] = moe_rng_normal(&f->rng);
    }
    if (!CHECK(f, moe_route_backward(&b->router, &b->call, r, b->gradients, dx, d_activations) == MOE_OK,
               "the backward pass"))
        return;
    if (!b->tame) return;
    if (dx != NULL) CHECK(f, all_finite(dx, n * d), "gradient of x is finite");
    for (t = 0; t < n && dx != NULL; t++)
        for (i = 0; i < d && !is_real(&b->call, t); i++)
            CHECK(f, !(dx[t * d + i] < 0) && !(dx[t * d + i] > 0), "padding has no gradient");
    if (d_activations != NULL) CHECK(f, all_finite(d_activations, node_numbers), "gradient of the nodes is finite");
    if (b->call.d_attention_weights != NULL)
        CHECK(f, all_finite(b->call.d_attention_weights, (size_t)b->router.config.heads * n * n),
              "gradient of attention is finite");
    if (b->call.d_attention_outputs != NULL)
        CHECK(f, all_finite(b->call.d_attention_outputs, (size_t)b->router.config.heads * n * d),
              "gradient of heads is finite");
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++)
        if (b->gradients[place] != NULL && moe_router_parameter(&b->router.config, place, &slot) == MOE_OK)
            CHECK(f, all_finite(b->gradients[place], slot.count), slot.name);
}

static void router_state(fuzz *f, bench *b, const moe_routing *r) {
    moe_parameter slot;
    int place;
    CHECK(f, moe_router_observe(&b->router, &b->call, r, b->tensors) == MOE_OK, "observe");
    CHECK(f, moe_router_advance(&b->router, b->tensors) == MOE_OK, "advance");
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT && b->tame; place++)
        if (b->tensors[place] != NULL && moe_router_parameter(&b->router.config, place, &slot) == MOE_OK)
            CHECK(f, all_finite(b->tensors[place], slot.count), slot.name);
}

/* A token alone has the results that it has among others, where the traits say so. */
static void route_alone(fuzz *f, bench *b, const moe_routing *all) {
    const unsigned traits = moe_router_traits(&b->router.config);
    const size_t e = all->n_experts, d = (size_t)b->router.config.d_model;
    const size_t t = all->n_tokens > 0 ? draw(f, (unsigned)all->n_tokens) : 0;
    const unsigned alone = MOE_TRAIT_NEEDS_BATCH | MOE_TRAIT_NEEDS_ALL_EXPERTS | MOE_TRAIT_NEEDS_PREVIOUS_LAYER |
                           MOE_TRAIT_NEEDS_ATTENTION;
    moe_call whole = b->call;
    moe_routing one;
    if (!(traits & MOE_TRAIT_CAUSAL) || traits & alone || all->n_tokens == 0 || !is_real(&whole, t) ||
        (traits & MOE_TRAIT_STOCHASTIC && whole.training))
        return;
    b->call.n_tokens = 1;
    b->call.mask = NULL;
    b->call.sequences = NULL;
    b->call.n_sequences = 0;
    b->call.x = whole.x + t * d;
    if (whole.router_x != NULL) b->call.router_x = whole.router_x + t * d;
    if (whole.token_ids != NULL) b->call.token_ids = whole.token_ids + t;
    if (whole.given != NULL) b->call.given = whole.given + t * all->max_choices;
    if (whole.teacher != NULL) b->call.teacher = whole.teacher + t * e;
    if (whole.token_machine != NULL) b->call.token_machine = whole.token_machine + t;
    if (CHECK(f, route(f, b, &one) == MOE_OK, "a token alone")) {
        CHECK(f,
              memcmp(one.logits, all->logits + t * e, e * sizeof(moe_real)) == 0 &&
                  memcmp(one.gate, all->gate + t * e, e * sizeof(moe_real)) == 0,
              "logits and gate of a token alone");
        CHECK(f, memcmp(one.weights, all->weights + t * e, e * sizeof(moe_real)) == 0, "weights of a token alone");
        CHECK(f,
              one.n_choices[0] == all->n_choices[t] && memcmp(one.choices, all->choices + t * all->max_choices,
                                                              (size_t)one.n_choices[0] * sizeof *one.choices) == 0,
              "choices of a token alone");
    }
    b->call = whole;
}

/* The first tokens have the results that they have before others, where the traits say so. */
static void route_first(fuzz *f, bench *b, const moe_routing *all) {
    const unsigned traits = moe_router_traits(&b->router.config);
    const size_t e = all->n_experts, n = all->n_tokens > 0 ? draw(f, (unsigned)all->n_tokens) : 0;
    moe_call whole = b->call;
    moe_routing first;
    size_t t;
    if (!(traits & MOE_TRAIT_CAUSAL) || traits & (MOE_TRAIT_NEEDS_ALL_EXPERTS | MOE_TRAIT_NEEDS_ATTENTION) ||
        (traits & MOE_TRAIT_STOCHASTIC && whole.training) || whole.sequences != NULL)
        return;
    b->call.n_tokens = n;
    b->call.distances = NULL;
    if (CHECK(f, route(f, b, &first) == MOE_OK, "the first tokens"))
        for (t = 0; t < n; t++) {
            if (!is_real(&whole, t)) continue;
            CHECK(f,
                  memcmp(first.logits + t * e, all->logits + t * e, e * sizeof(moe_real)) == 0 &&
                      memcmp(first.weights + t * e, all->weights + t * e, e * sizeof(moe_real)) == 0,
                  "logits and weights of the first tokens");
        }
    b->call = whole;
}

/* Routes; a refused call changes nothing. */
static void route_refused(fuzz *f, bench *b, size_t n) {
    moe_routing r, kept;
    size_t size = 0;
    if (moe_route_size(&b->router, n + (b->call.n_past < 2000 ? b->call.n_past : 0), 1, &size) != MOE_OK ||
        size > (size_t)1 << 25)
        return;
    if (b->call.rng != NULL) moe_rng_seed(b->call.rng, 5);
    memset(&r, 0x3c, sizeof r);
    memset(&kept, 0x3c, sizeof kept);
    if (moe_route(&b->router, &b->call, grab(f, size, 1), size, &r) != MOE_OK)
        CHECK(f, memcmp(&r, &kept, sizeof r) == 0, "a refused call changes nothing");
}

/* Something that a call must not be. Whatever the answer, it is an answer, and a refusal changes
   nothing. */
static void route_spoilt(fuzz *f, const bench *good) {
    bench b = *good;
    const size_t n = b.call.n_tokens;
    int32_t *wrong = integers(f, n * 64 + 2, -3, b.router.config.n_experts + 3);
    switch (draw(f, 14)) {
    case 0:
        b.call.x = NULL;
        break;
    case 1:
        b.call.sequences = wrong;
        b.call.n_sequences = 1 + draw(f, 3);
        break;
    case 2:
        b.call.given = integers(f, n * (size_t)b.router.config.n_experts, -2, b.router.config.n_experts + 1);
        break;
    case 3:
        b.call.token_ids = integers(f, n, -2, b.router.config.table_size + 2);
        break;
    case 4:
        b.call.previous_experts = integers(f, n * (b.call.n_previous + 1), -2, b.router.config.n_experts + 1);
        break;
    case 5:
        b.call.activation_width = 0;
        break;
    case 6:
        b.call.activations = NULL;
        break;
    case 7:
        b.call.decoding = 1;
        break;
    case 8:
        b.call.n_past = 1 + draw(f, 1000);
        break;
    case 9:
        b.call.rng = NULL;
        break;
    case 10:
        b.call.teacher = NULL;
        b.call.token_ids = NULL;
        b.call.attention_weights = NULL;
        break;
    case 11:
        b.call.token_machine = integers(f, n, -1, b.router.config.nodes + 1);
        break;
    case 12:
        b.call.training = !b.call.training;
        break;
    default:
        b.router.tensors[draw(f, MOE_ROUTER_PARAMETER_COUNT)] = NULL;
        break;
    }
    route_refused(f, &b, n);
}

static void check_further(fuzz *f, const moe_router_config *c) {
    moe_error error;
    moe_status status = moe_router_check_training(c, &error);
    CHECK(f, status == MOE_OK || status == MOE_ERR_CONFIG, "check for training");
    if (status != MOE_OK) check_error(f, status, &error);
    status = moe_router_check_decoding(c, &error);
    CHECK(f, status == MOE_OK || status == MOE_ERR_UNSUPPORTED, "check for decoding");
    if (status != MOE_OK) check_error(f, status, &error);
}

static int route_fits(const bench *b, size_t limit) {
    size_t size = 0;
    return moe_route_size(&b->router, b->call.n_tokens, 1, &size) == MOE_OK && size <= limit;
}

static void run_router(fuzz *f, const moe_router_config *c, const matter *m) {
    bench b;
    moe_routing r;
    moe_status status;
    moe_parameter slot;
    int place;
    memset(&b, 0, sizeof b);
    check_further(f, c);
    if (!CHECK(f, moe_router_init(&b.router, c, draw(f, 2) ? moe_kernels_select(0) : NULL, NULL) == MOE_OK,
               "init of a good configuration"))
        return;
    set_custom(&b.router);
    if (!start_tensors(f, &b)) return;
    b.kind = m->data;
    b.tame = is_tame(m);
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++)
        if (b.tensors[place] != NULL && moe_router_parameter(&b.router.config, place, &slot) == MOE_OK)
            shake(f, m->shaken, slot.flags, slot.name, slot.count, b.tensors[place]);
    if ((double)b.router.config.heads * b.router.config.d_model * (double)(m->n + 1) * (double)(m->n + 1) > 5e7 ||
        b.router.config.n_experts > 5000)
        return;
    draw_call(f, &b.router.config, m, 1, &b.call);
    supply_nodes(f, &b);
    if (!route_fits(&b, (size_t)1 << 25)) return;
    if (one_in(f, 4)) route_spoilt(f, &b);
    status = route(f, &b, &r);
    if (!b.tame)
        CHECK(f,
              status == MOE_OK || status == MOE_ERR_NONFINITE ||
                  (m->shaken == SHAKEN_WILD && status == MOE_ERR_ARGUMENT),
              "routing of wild numbers");
    else if (!CHECK(f, status == MOE_OK, "routing")) printf("    %s\n", moe_status_text(status));
    if (status != MOE_OK) return;
    check_routing(f, &b.router.config, &b.call, &r, b.tame);
    check_metrics(f, &b, &r);
    route_alone(f, &b, &r);
    route_first(f, &b, &r);
    route_again(f, &b, &r);
    if (!b.call.training) return;
    router_backward(f, &b, &r);
    router_state(f, &b, &r);
}

static void fuzz_router(fuzz *f) {
    moe_router_config c;
    matter m;
    f->wide = one_in(f, 12);
    draw_router(f, &c);
    m = draw_matter(f);
    run_router(f, &c, &m);
}

/* Threads of a kind: tasks run one after another, the last first. */
static void run_backwards(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    (void)ctx;
    while (count-- > 0) task(work, count);
}

static const moe_parallel threads = {NULL, 3, 1, run_backwards};

/* ---- a layer ---- */

typedef struct layer_run {
    moe_layer layer;
    moe_call call;
    moe_layer_pass pass;
    moe_real *y;
    int tame;
} layer_run;

static moe_status layer_forward(fuzz *f, layer_run *l) {
    size_t size = 0;
    moe_status status = moe_layer_work_size(&l->layer, l->call.n_tokens, l->call.training || l->call.keep, &size);
    if (status != MOE_OK) return status;
    l->y = numbers(f, l->call.n_tokens * (size_t)l->layer.config.d_out, DATA_ZERO);
    moe_rng_seed(l->call.rng, 5);
    return moe_layer_forward(&l->layer, &l->call, l->y, grab(f, size, 1), size, &l->pass);
}

/* Products that are too many for a case are not what is looked for. */
static int layer_fits(const moe_layer *layer, size_t n) {
    size_t size = 0;
    if (moe_layer_parameter_count(layer, NULL) * n > 20000000) return 0;
    return moe_layer_work_size(layer, n, 1, &size) == MOE_OK && size <= (size_t)1 << 25;
}

static void layer_backward(fuzz *f, layer_run *l) {
    const size_t n = l->call.n_tokens, d = (size_t)l->layer.config.router.d_model;
    moe_real *dy = numbers(f, n * (size_t)l->layer.config.d_out, DATA_NORMAL);
    moe_real *dx = draw(f, 4) ? numbers(f, n * d, DATA_ZERO) : NULL;
    moe_real *d_router_x = l->call.router_x != NULL ? numbers(f, n * d, DATA_ZERO) : NULL;
    moe_tensor tensor;
    size_t i;
    if (!CHECK(f, moe_layer_backward(&l->layer, dy, dx, d_router_x, &l->pass) == MOE_OK, "a layer's backward pass"))
        return;
    if (l->tame && dx != NULL) CHECK(f, all_finite(dx, n * d), "gradient of a layer's x is finite");
    for (i = 0; moe_layer_tensor(&l->layer, i, &tensor) == MOE_OK; i++)
        if (tensor.gradient != NULL && l->tame) CHECK(f, all_finite(tensor.gradient, tensor.count), tensor.name);
    CHECK(f, moe_layer_observe(&l->layer, &l->pass) == MOE_OK && moe_layer_advance(&l->layer) == MOE_OK,
          "a layer's state");
    for (i = 0; moe_layer_tensor(&l->layer, i, &tensor) == MOE_OK; i++)
        if (l->tame) CHECK(f, all_finite(tensor.data, tensor.count), tensor.name);
}

/* The backward pass of losses that read the experts one by one. */
static void layer_experts(fuzz *f, layer_run *l) {
    const moe_real *outputs = l->pass.expert_outputs;
    const size_t entries = l->pass.routing.plan.offsets[l->pass.routing.n_experts];
    const size_t n = l->call.n_tokens * (size_t)l->layer.config.router.d_model;
    moe_real *dx = numbers(f, n, DATA_ZERO), *d_router_x = l->call.router_x != NULL ? numbers(f, n, DATA_ZERO) : NULL;
    moe_status status;
    if (outputs == NULL) return;
    if (l->tame)
        CHECK(f, all_finite(outputs, entries * (size_t)l->layer.config.d_out), "outputs of the experts are finite");
    if (!l->call.training) return;
    status = moe_layer_backward_experts(&l->layer, numbers(f, entries * (size_t)l->layer.config.d_out, DATA_NORMAL),
                                        numbers(f, entries, DATA_NORMAL), dx, d_router_x, &l->pass);
    CHECK(f, status == MOE_OK || status == MOE_ERR_UNSUPPORTED, "the backward pass of experts");
    if (l->tame && status == MOE_OK) CHECK(f, all_finite(dx, n), "gradient of x through experts is finite");
}

static int layer_is_finite(const layer_run *l) {
    const size_t o = (size_t)l->layer.config.d_out;
    size_t t;
    for (t = 0; t < l->call.n_tokens; t++)
        if (is_real(&l->call, t) && !all_finite(l->y + t * o, o)) return 0;
    return 1;
}

/* Written and read, a layer answers in the same bits. */
static void layer_file(fuzz *f, layer_run *l) {
    layer_run again = *l;
    moe_buffer buffer;
    moe_stream stream;
    moe_allocator a = heap(f);
    moe_error error;
    const size_t bytes = l->call.n_tokens * (size_t)l->layer.config.d_out * sizeof(moe_real);
    memset(&buffer, 0, sizeof buffer);
    buffer.allocator = a;
    stream = moe_buffer_stream(&buffer);
    if (!CHECK(f, moe_layer_write(&l->layer, &stream, &error) == MOE_OK, "a layer is written"))
        printf("    %s\n", error.message);
    else if (!CHECK(f,
                    moe_layer_read(&again.layer, buffer.data, buffer.size, 0, MOE_KERNELS_AUTO, &a, &error) == MOE_OK,
                    "a layer is read"))
        printf("    %s\n", error.message);
    else {
        set_custom(&again.layer.router);
        CHECK(f, layer_forward(f, &again) == MOE_OK && (bytes == 0 || memcmp(l->y, again.y, bytes) == 0),
              "a layer that was read has the same bits");
        moe_layer_free(&again.layer);
    }
    moe_buffer_free(&buffer);
}

/* Packed for inference. */
static void layer_pack(fuzz *f, layer_run *l) {
    const int type = (int)draw(f, MOE_TYPE_COUNT);
    const size_t experts = (size_t)l->layer.config.router.n_experts;
    size_t size = 0, work_size = 0;
    size_t bytes = l->call.n_tokens * (size_t)l->layer.config.d_out * sizeof(moe_real);
    const moe_real *before;
    moe_quant_error *errors = (moe_quant_error *)grab(f, experts, sizeof *errors);
    moe_error error;
    moe_status status = moe_layer_pack_size(&l->layer, type, 0, &size, NULL);
    say_number(f, "pack", type);
    l->call.training = 0;
    if (!CHECK(f, layer_forward(f, l) == MOE_OK, "a layer at inference")) return;
    before = l->y;
    if (status == MOE_ERR_UNSUPPORTED) return;
    if (!CHECK(f, status == MOE_OK, "pack size") || size > (size_t)1 << 25) return;
    CHECK(f, moe_layer_pack_size(&l->layer, type, l->call.n_tokens, NULL, &work_size) == MOE_OK, "quantize work size");
    if (l->call.n_tokens > 0 && draw(f, 2) && work_size <= (size_t)1 << 25)
        status = moe_layer_quantize(&l->layer, type, grab(f, size, 1), size, &l->call, grab(f, work_size, 1), work_size,
                                    errors, &error);
    else status = moe_layer_pack(&l->layer, type, grab(f, size, 1), size, &error);
    if (!CHECK(f, status == MOE_OK || !l->tame, "packing")) printf("    %s\n", error.message);
    if (status != MOE_OK) return;
    status = layer_forward(f, l);
    CHECK(f, status == MOE_OK || !l->tame, "a packed layer");
    if (status == MOE_OK && l->tame) CHECK(f, layer_is_finite(l), "a packed layer's output is finite");
    if (type == MOE_TYPE_REAL && bytes > 0 && l->tame)
        CHECK(f, memcmp(before, l->y, bytes) == 0, "packing as reals keeps every bit");
}

static void use_layer(fuzz *f, layer_run *l, const matter *m) {
    moe_status status;
    moe_tensor tensor;
    size_t i;
    const moe_real *first;
    size_t bytes;
    l->tame = is_tame(m);
    for (i = 0; moe_layer_tensor(&l->layer, i, &tensor) == MOE_OK; i++)
        shake(f, m->shaken, tensor.flags, tensor.name, tensor.count, tensor.data);
    draw_call(f, &l->layer.config.router, m, l->layer.config.n_shared == 0, &l->call);
    if (!layer_fits(&l->layer, l->call.n_tokens)) return;
    status = layer_forward(f, l);
    if (!l->tame)
        CHECK(f,
              status == MOE_OK || status == MOE_ERR_NONFINITE ||
                  (m->shaken == SHAKEN_WILD && status == MOE_ERR_ARGUMENT),
              "a layer with wild numbers");
    else if (!CHECK(f, status == MOE_OK, "a layer forward")) printf("    %s\n", moe_status_text(status));
    if (status != MOE_OK) return;
    check_routing(f, &l->layer.config.router, &l->call, &l->pass.routing, l->tame);
    if (l->tame) CHECK(f, layer_is_finite(l), "a layer's output is finite");
    first = l->y;
    bytes = l->call.n_tokens * (size_t)l->layer.config.d_out * sizeof(moe_real);
    l->call.parallel = &threads;
    CHECK(f, layer_forward(f, l) == MOE_OK && (!l->tame || bytes == 0 || memcmp(first, l->y, bytes) == 0),
          "a layer has the same bits again");
    if (one_in(f, 3) && l->layer.config.kernels == MOE_KERNELS_AUTO) layer_file(f, l); /* files do not keep kernels */
    if (one_in(f, 5)) {
        l->call.keep = 1;
        if (layer_forward(f, l) == MOE_OK) layer_experts(f, l);
        l->call.keep = 0;
        if (layer_forward(f, l) != MOE_OK) return;
    }
    if (l->call.training) layer_backward(f, l);
    if (l->tame && draw(f, 2)) layer_pack(f, l);
}

/* Kernels of another machine, and routers that cannot learn, are refused here and not before. */
static moe_status create_layer(fuzz *f, moe_layer *layer, moe_layer_config *c, uint64_t seed, const moe_allocator *a,
                               moe_error *error) {
    moe_status status = moe_layer_create(layer, c, 1, seed, a, error);
    if (status == MOE_ERR_UNSUPPORTED) {
        CHECK(f, c->kernels != 0 && strstr(error->message, "kernels = ") != NULL, "only kernels are not supported");
        c->kernels = 0;
        status = moe_layer_create(layer, c, 1, seed, a, error);
    }
    if (status == MOE_ERR_CONFIG) {
        CHECK(f, moe_router_check_training(&c->router, NULL) == status,
              "a layer to train is refused where its router is");
        c->router.untrained = 1;
        status = moe_layer_create(layer, c, 1, seed, a, error);
    }
    return status;
}

static void run_layer(fuzz *f, moe_layer_config c, const matter *m) {
    layer_run l;
    moe_allocator a = heap(f);
    moe_error error;
    moe_status status;
    memset(&l, 0, sizeof l);
    status = create_layer(f, &l.layer, &c, 1 + draw(f, 200), &a, &error);
    if (!CHECK(f, status == MOE_OK || status == MOE_ERR_MEMORY || status == MOE_ERR_OVERFLOW,
               "a layer of a good configuration"))
        printf("    %s\n", error.message);
    if (status != MOE_OK) {
        check_error(f, status, &error);
        return;
    }
    set_custom(&l.layer.router);
    if (c.router.heads < 1000 && moe_layer_parameter_count(&l.layer, NULL) < MOST_NUMBERS) use_layer(f, &l, m);
    moe_layer_free(&l.layer);
}

static void fuzz_layer(fuzz *f) {
    moe_layer_config c;
    matter m;
    f->wide = one_in(f, 12);
    draw_layer(f, &c, 0);
    m = draw_matter(f);
    run_layer(f, c, &m);
}

/* ---- a network ---- */

enum { MOST_MODULES = 8, MOST_TOKENS = 40 };

/* A module as it was asked for, so that a network can be made again. */
typedef struct part {
    int kind;
    int size, span; /* d_out, vocabulary or places; width of the embedding in span */
    moe_real rate;
    moe_attention_config attention;
    moe_layer_config layer;
    int has_config; /* attention, feed_forward: not NULL */
} part;

typedef struct plan {
    int d_in, kernels;
    size_t n;
    part parts[MOST_MODULES];
} plan;

static moe_status add_part(moe_net *net, const part *p) {
    switch (p->kind) {
    case MOE_MODULE_LINEAR: return moe_net_linear(net, p->size);
    case MOE_MODULE_ACTIVATION: return moe_net_activation(net, p->size);
    case MOE_MODULE_LAYER_NORM: return moe_net_layer_norm(net);
    case MOE_MODULE_MIXTURE: return moe_net_mixture(net, &p->layer);
    case MOE_MODULE_RESIDUAL: return moe_net_residual(net, p->span);
    case MOE_MODULE_EMBEDDING: return moe_net_embedding(net, p->size, p->span);
    case MOE_MODULE_POSITIONS: return moe_net_positions(net, p->size);
    case MOE_MODULE_ATTENTION: return moe_net_attention(net, p->has_config ? &p->attention : NULL);
    case MOE_MODULE_RMS_NORM: return moe_net_rms_norm(net);
    case MOE_MODULE_DROPOUT: return moe_net_dropout(net, p->rate);
    case MOE_MODULE_FEED_FORWARD: return moe_net_feed_forward(net, p->has_config ? &p->layer : NULL);
    default: return moe_net_tied(net);
    }
}

/* The network of the first n parts, not built. */
static moe_status make_net(fuzz *f, const plan *p, size_t n, moe_net *net) {
    const moe_allocator a = heap(f);
    size_t i;
    moe_status status = moe_net_init(net, p->d_in, p->kernels, &a);
    net->mixture_losses = moe_classic_losses();
    for (i = 0; i < n && status == MOE_OK; i++) status = add_part(net, &p->parts[i]);
    return status;
}

static int width_after(const moe_net *net) {
    return net->n_modules > 0 ? net->modules[net->n_modules - 1].d_out : net->d_in;
}

static void draw_feed_forward(fuzz *f, moe_layer_config *c) {
    memset(c, 0, sizeof *c);
    c->expert = (int)draw(f, MOE_EXPERT_COUNT);
    if (draw(f, 2)) c->d_ff = 1 + (int)draw(f, 30);
    if (draw(f, 2)) c->d_low = 1 + (int)draw(f, 9);
    if (draw(f, 2)) c->act = (int)draw(f, MOE_ACT_COUNT);
    c->no_expert_bias = (int)draw(f, 2);
    if (one_in(f, 3)) {
        c->expert_bias = (int)draw(f, 2);
        c->swiglu_alpha = (moe_real)draw(f, 3);
        c->swiglu_limit = (moe_real)draw(f, 3);
        c->swiglu_offset = (moe_real)draw(f, 3) - 1;
    }
}

static void draw_attention(fuzz *f, moe_attention_config *c) {
    static const int heads[] = {0, 1, 2, 3, 4, 5, 300, -1}, widths[] = {0, 1, 2, 4, 6, 7, 0, 100000};
    memset(c, 0, sizeof *c);
    c->heads = heads[one_in(f, 20) ? draw(f, 8) : draw(f, 6)];
    c->d_head = widths[one_in(f, 20) ? draw(f, 8) : draw(f, 6)];
    c->full = one_in(f, 4);
    c->rotary = (int)draw(f, 2);
    if (one_in(f, 3)) c->rotary_base = (moe_real)pow(10.0, (double)draw(f, 12) - 3.0);
}

static void draw_part(fuzz *f, const moe_net *net, part *p) {
    static const int sizes[] = {1, 2, 3, 5, 8, 12, 16, 17, 24, 33, 70, 0, -1, 1 << 24};
    const int width = width_after(net);
    memset(p, 0, sizeof *p);
    p->kind = one_in(f, 3) ? MOE_MODULE_MIXTURE : (int)draw(f, MOE_MODULE_COUNT);
    if (net->d_in == 0 && net->n_modules == 0) p->kind = MOE_MODULE_EMBEDDING;
    p->size = sizes[one_in(f, 20) ? draw(f, 14) : draw(f, 11)];
    p->span = 1 + (int)draw(f, (unsigned)net->n_modules + (one_in(f, 20) ? 2u : 0u));
    p->has_config = (int)draw(f, 2);
    if (p->kind == MOE_MODULE_ACTIVATION) p->size = (int)draw(f, one_in(f, 20) ? MOE_ACT_COUNT + 1 : MOE_ACT_COUNT);
    if (p->kind == MOE_MODULE_EMBEDDING) {
        p->span = 1 + (int)draw(f, 24);
        p->size += 3;
    }
    if (p->kind == MOE_MODULE_POSITIONS) p->size += 8;
    if (p->kind == MOE_MODULE_DROPOUT) p->rate = (moe_real)(draw(f, 11) / 10.0);
    if (p->kind == MOE_MODULE_ATTENTION) draw_attention(f, &p->attention);
    if (p->kind == MOE_MODULE_FEED_FORWARD) draw_feed_forward(f, &p->layer);
    if (p->kind == MOE_MODULE_MIXTURE) {
        draw_layer(f, &p->layer, width);
        if (draw(f, 2)) {
            p->layer.router.d_model = 0;
            p->layer.kernels = 0;
        }
    }
}

/* A part that does not fit is left out again: a failed call leaves its network unable to be
   built. */
static void draw_plan(fuzz *f, plan *p) {
    unsigned tries = 1 + draw(f, one_in(f, 3) ? MOST_MODULES : 4), i;
    moe_error error;
    moe_net net;
    memset(p, 0, sizeof *p);
    p->d_in = one_in(f, 3) ? 0 : 1 + (int)draw(f, 24);
    for (i = 0; i < tries && p->n < MOST_MODULES; i++) {
        moe_status status;
        say(f, "\n ");
        CHECK(f, make_net(f, p, p->n, &net) == MOE_OK, "parts that fitted fit again");
        draw_part(f, &net, &p->parts[p->n]);
        say_number(f, "module", p->parts[p->n].kind);
        say_number(f, "size", p->parts[p->n].size);
        say_number(f, "span", p->parts[p->n].span);
        status = add_part(&net, &p->parts[p->n]);
        if (status == MOE_OK) p->n++;
        else {
            say(f, " (refused)");
            check_error(f, status, &net.error);
            CHECK(f, status == MOE_ERR_CONFIG || status == MOE_ERR_UNSUPPORTED || status == MOE_ERR_OVERFLOW,
                  "a module is refused for its configuration");
            CHECK(f, moe_net_build(&net, 1, 1, &error) == status && strcmp(error.message, net.error.message) == 0,
                  "build tells the first failure");
        }
        moe_net_free(&net);
    }
}

static moe_layer_config *mixture_of(moe_net *net, size_t i) {
    return net->modules[i].kind == MOE_MODULE_MIXTURE ? &net->modules[i].layer.config : NULL;
}

static void set_customs(moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++)
        if (mixture_of(net, i) != NULL) set_custom(&net->modules[i].layer.router);
}

/* Built, or a status that says why not; routers that cannot learn learn nothing then. */
static moe_status build_net(fuzz *f, plan *p, moe_net *net) {
    const uint64_t seed = draw(f, 200);
    moe_error error;
    moe_status status;
    size_t i;
    if (!CHECK(f, make_net(f, p, p->n, net) == MOE_OK, "parts that fitted fit again")) return MOE_ERR_CONFIG;
    status = moe_net_build(net, 1, seed, &error);
    if (status == MOE_ERR_CONFIG && p->n > 0) {
        moe_net_free(net);
        for (i = 0; i < p->n; i++) p->parts[i].layer.router.untrained = p->parts[i].kind == MOE_MODULE_MIXTURE;
        if (make_net(f, p, p->n, net) == MOE_OK) status = moe_net_build(net, 1, seed, &error);
    }
    if (status != MOE_OK) check_error(f, status, &error);
    if (status != MOE_OK)
        CHECK(f, status == MOE_ERR_MEMORY || status == MOE_ERR_OVERFLOW || (status == MOE_ERR_CONFIG && p->n == 0),
              "a net of good modules is built");
    set_customs(net);
    return status;
}

typedef struct net_run {
    moe_net net;
    moe_call call;
    moe_net_pass pass;
    matter m;
    int classical; /* its loss reads all experts of the last module */
} net_run;

static int least_of(int a, int b) { return a < b ? a : b; }

/* Heads that a call would have to bring beyond what is drawn here. */
static int too_many_heads(const moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE && net->modules[i].layer.config.router.heads > 100) return 1;
    return 0;
}

/* Token ids that the embedding and all tables have. */
static int token_ids_of(const moe_net *net) {
    int ids = 1 << 20;
    size_t i;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        if (m->kind == MOE_MODULE_EMBEDDING) ids = least_of(ids, m->n_rows);
        if (m->kind == MOE_MODULE_MIXTURE && m->layer.config.router.table_size > 0)
            ids = least_of(ids, m->layer.config.router.table_size);
    }
    return ids;
}

/* What the routers of all mixtures ask for together. */
static void supply_net(fuzz *f, net_run *r) {
    size_t n = r->m.n, i, teachers = 0;
    size_t choices = 0, heads = 1;
    size_t width = 1, experts = 1;
    int nodes = 1 << 20, given = 0;
    int distill = 0, attention = 0;
    int own_attention = 0, locality = 0;
    for (i = 0; i < r->net.n_modules; i++) {
        const moe_layer_config *l = mixture_of(&r->net, i);
        const moe_router_config *c = l != NULL ? &l->router : NULL;
        own_attention |= r->net.modules[i].kind == MOE_MODULE_ATTENTION;
        if (c == NULL) continue;
        if (c->select != MOE_SELECT_SOFT) {
            teachers += n * (size_t)c->n_experts;
            choices += n * most_choices(c);
        }
        given |= c->select == MOE_SELECT_GIVEN;
        distill |= c->loss_distill > 0 && !c->student;
        attention |= c->refine == MOE_REFINE_ATTENTION && !own_attention;
        if (c->loss_locality > 0) {
            nodes = least_of(nodes, c->nodes);
            locality = 1;
        }
        if ((size_t)c->heads > heads) heads = (size_t)c->heads;
        if ((size_t)c->d_model > width) width = (size_t)c->d_model;
        if ((size_t)c->n_experts > experts) experts = (size_t)c->n_experts;
    }
    r->call.rng = (moe_rng *)grab(f, 1, sizeof(moe_rng));
    r->call.token_ids = integers(f, n, 0, token_ids_of(&r->net));
    if (distill) r->call.teacher = numbers(f, teachers, DATA_NORMAL);
    if (locality && draw(f, 2)) {
        r->call.token_machine = integers(f, n, 0, nodes);
        r->call.expert_machine = integers(f, experts, 0, nodes);
    }
    if (attention) {
        r->call.attention_weights = attention_rows(f, heads, n, 1);
        r->call.attention_outputs = numbers(f, heads * n * width, DATA_NORMAL);
        r->call.attention_output = numbers(f, n * width, DATA_NORMAL);
    }
    if (given) {
        int32_t *all = (int32_t *)grab(f, choices, sizeof *all), *at = all;
        for (i = 0; i < r->net.n_modules; i++) {
            const moe_layer_config *l = mixture_of(&r->net, i);
            size_t count = l != NULL && l->router.select != MOE_SELECT_SOFT ? n * most_choices(&l->router) : 0;
            if (count > 0) {
                memcpy(at, draw_given(f, &l->router, n, r->classical && i + 1 == r->net.n_modules), count * sizeof *at);
                at += count;
            }
        }
        r->call.given = all;
    }
}

static size_t most_sequences(const moe_net *net) {
    size_t i, most = 5;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE &&
            net->modules[i].layer.config.router.select == MOE_SELECT_SOFT &&
            (size_t)net->modules[i].layer.config.router.soft_sequences < most)
            most = (size_t)net->modules[i].layer.config.router.soft_sequences;
    return most;
}

static size_t most_places(const moe_net *net) {
    size_t i, most = MOST_TOKENS;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_POSITIONS && (size_t)net->modules[i].n_rows < most)
            most = (size_t)net->modules[i].n_rows;
    return most;
}

/* Numbers of a network stay small: its modules multiply them. */
static void net_call(fuzz *f, net_run *r, size_t most) {
    r->m = draw_matter(f);
    if (r->m.n > most) r->m.n = most;
    if (r->m.n > most_places(&r->net)) r->m.n = most_places(&r->net);
    if (r->m.data == DATA_BIG || r->m.data == DATA_SPARSE || r->m.data == DATA_MIXED) r->m.data = DATA_NORMAL;
    memset(&r->call, 0, sizeof r->call);
    r->call.n_tokens = r->m.n;
    r->call.training = r->m.training;
    if (r->net.d_in > 0) r->call.x = numbers(f, r->m.n * (size_t)r->net.d_in, r->m.data);
    supply_net(f, r);
    if (one_in(f, 3)) draw_mask(f, &r->call, r->net.d_in > 0 ? (size_t)r->net.d_in : 0, 0);
    if (r->net.d_in == 0) r->call.x = NULL;
    if (one_in(f, 3)) draw_sequences(f, &r->call, most_sequences(&r->net));
    say(f, "\ncall");
    say_number(f, "n", (double)r->m.n);
    say(f, " data=");
    say(f, data_names[r->m.data]);
    say_number(f, "training", r->m.training);
    say_number(f, "mask", r->call.mask != NULL);
    say_number(f, "sequences", (double)r->call.n_sequences);
}

static moe_status net_forward(fuzz *f, net_run *r) {
    size_t size = 0;
    moe_status status = moe_net_work_size(&r->net, r->m.n, r->call.training, &size);
    if (status != MOE_OK) return status;
    moe_rng_seed(r->call.rng, 5);
    return moe_net_forward(&r->net, &r->call, grab(f, size, 1), size, &r->pass);
}

static double largest(const moe_real *x, size_t n) {
    double most = 0.0;
    size_t i;
    for (i = 0; i < n; i++)
        if (moe_is_finite(x[i]) && fabs((double)x[i]) > most) most = fabs((double)x[i]);
    return most;
}

/* The largest number that the first modules make, of those that are finite: what follows large ones
   may be infinite. */
static double largest_inside(fuzz *f, const plan *p, const net_run *whole) {
    double most = 0.0;
    size_t n;
    for (n = 1; n < p->n && most < 1e30; n++) {
        net_run r = *whole;
        if (make_net(f, p, n, &r.net) == MOE_OK && moe_net_build(&r.net, 1, 1, NULL) == MOE_OK) {
            set_customs(&r.net);
            if (net_forward(f, &r) == MOE_OK && largest(r.pass.y, r.m.n * (size_t)r.net.d_out) > most)
                most = largest(r.pass.y, r.m.n * (size_t)r.net.d_out);
        }
        moe_net_free(&r.net);
    }
    return most;
}

enum { NET_FITS = 1 << 25 };

static int net_fits(const net_run *r) {
    size_t size = 0;
    return moe_net_work_size(&r->net, r->m.n, 1, &size) == MOE_OK && size <= (size_t)NET_FITS;
}

static size_t output_bytes(const net_run *r) { return r->m.n * (size_t)r->net.d_out * sizeof(moe_real); }

/* Which files do not keep. */
static int chooses_kernels(const moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE && net->modules[i].layer.config.kernels != MOE_KERNELS_AUTO)
            return 1;
    return 0;
}

/* Written and read, a network answers in the same bits. */
static void net_file(fuzz *f, net_run *r) {
    net_run again = *r;
    moe_buffer buffer;
    moe_stream stream;
    const moe_allocator a = heap(f);
    moe_error error;
    if (moe_net_parameter_count(&r->net, NULL) > MOST_NUMBERS) return; /* that memory would end here */
    memset(&buffer, 0, sizeof buffer);
    buffer.allocator = a;
    stream = moe_buffer_stream(&buffer);
    if (!CHECK(f, moe_net_write(&r->net, &stream, &error) == MOE_OK, "a net is written"))
        printf("    %s\n", error.message);
    else if (!CHECK(f, moe_net_read(&again.net, buffer.data, buffer.size, (int)draw(f, 2), 0, &a, &error) == MOE_OK,
                    "a net is read"))
        printf("    %s\n", error.message);
    else {
        set_customs(&again.net);
        CHECK(f,
              net_forward(f, &again) == MOE_OK &&
                  (output_bytes(r) == 0 || memcmp(r->pass.y, again.pass.y, output_bytes(r)) == 0),
              "a net that was read has the same bits");
        moe_net_free(&again.net);
    }
    moe_buffer_free(&buffer);
}

static void net_backward(fuzz *f, net_run *r, const plan *p) {
    const size_t n = r->m.n;
    moe_real *dy = numbers(f, n * (size_t)r->net.d_out, DATA_NORMAL);
    moe_real *dx = r->net.d_in > 0 ? numbers(f, n * (size_t)r->net.d_in, DATA_ZERO) : NULL;
    const int tame = r->m.data < DATA_FINITE;
    size_t i;
    net_zero_gradients(&r->net);
    if (!CHECK(f, moe_net_backward(&r->net, dy, dx, &r->pass) == MOE_OK, "a net's backward pass")) return;
    CHECK(f, moe_net_observe(&r->net, &r->pass) == MOE_OK && moe_net_advance(&r->net) == MOE_OK, "a net's state");
    for (i = 0; i < r->net.n_tensors && tame; i++) {
        const moe_tensor *t = &r->net.tensors[i];
        if (t->gradient == NULL || (all_finite(t->gradient, t->count) && all_finite(t->data, t->count))) continue;
        CHECK(f, largest_inside(f, p, r) > 1e6, t->name);
    }
}

/* Token by token the same bits as at once. */
static void net_decode(fuzz *f, net_run *r) {
    const size_t n = r->m.n, most = n + draw(f, 3);
    const size_t wide = (size_t)r->net.d_out * sizeof(moe_real);
    size_t size = 0, work_size = 0;
    size_t at = 0;
    moe_cache cache;
    moe_error error;
    void *work;
    moe_status status = moe_net_decode_size(&r->net, 1, 1, NULL, NULL, &error);
    CHECK(f, status == MOE_OK || status == MOE_ERR_UNSUPPORTED, "check for decoding");
    if (status != MOE_OK) check_error(f, status, &error);
    if (status != MOE_OK || n == 0 || r->call.given != NULL || r->call.attention_weights != NULL) return;
    r->call.training = 0;
    r->call.mask = NULL;
    r->call.sequences = NULL;
    r->call.n_sequences = 0;
    r->call.decoding = 1;
    status = net_forward(f, r);
    r->call.decoding = 0;
    if (status != MOE_OK) return;
    CHECK(f,
          moe_net_decode_size(&r->net, most, 1, &size, NULL, NULL) == MOE_OK &&
              moe_net_decode_size(&r->net, most, 3, NULL, &work_size, NULL) == MOE_OK,
          "sizes for decoding");
    if (size > NET_FITS || work_size > NET_FITS) return;
    CHECK(f, moe_net_cache_init(&cache, &r->net, most, grab(f, size, 1), size, &error) == MOE_OK, "a cache");
    work = grab(f, work_size, 1);
    while (at < n) {
        moe_net_pass pass;
        moe_call call = r->call;
        call.n_tokens = 1 + draw(f, 3);
        if (call.n_tokens > n - at) call.n_tokens = n - at;
        if (call.x != NULL) call.x += at * (size_t)r->net.d_in;
        call.token_ids += at;
        if (call.token_machine != NULL) call.token_machine += at;
        if (!CHECK(f, moe_net_decode(&r->net, &cache, &call, work, work_size, &pass) == MOE_OK, "decoding")) return;
        CHECK(f,
              r->m.data >= DATA_FINITE ||
                  memcmp(pass.y, r->pass.y + at * (size_t)r->net.d_out, call.n_tokens * wide) == 0,
              "decoding has the same bits");
        at += call.n_tokens;
    }
}

static void net_unpack(moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_modules; i++) net->modules[i].layer.is_packed = 0;
}

/* All modules packed: as they are the weights keep every bit, and decoding has those of a pass.
   Then they are unpacked. */
static void net_pack_whole(fuzz *f, net_run *r) {
    const int type = (int)draw(f, MOE_TYPE_COUNT);
    const moe_real *first;
    size_t size = 0;
    moe_status status;
    say_number(f, "pack all", type);
    r->call.training = 0;
    if (net_forward(f, r) != MOE_OK) return;
    first = r->pass.y;
    if (moe_net_pack_size(&r->net, type, 0, &size, NULL) != MOE_OK || size > NET_FITS) return;
    status = moe_net_pack(&r->net, type, grab(f, size, 1), size, NULL);
    CHECK(f, status == MOE_OK || status == MOE_ERR_OVERFLOW || status == MOE_ERR_NONFINITE, "packing a net");
    if (status == MOE_OK && net_forward(f, r) == MOE_OK && type == MOE_TYPE_REAL && r->m.data < DATA_FINITE)
        CHECK(f, output_bytes(r) == 0 || memcmp(first, r->pass.y, output_bytes(r)) == 0, "packed, the same bits");
    if (status == MOE_OK) net_decode(f, r);
    net_unpack(&r->net);
}

/* Some mixtures packed; then they are unpacked. */
static void net_pack(fuzz *f, net_run *r, const plan *p) {
    const int type = (int)draw(f, MOE_TYPE_COUNT);
    size_t i, size = 0;
    say_number(f, "pack", type);
    for (i = 0; i < r->net.n_modules; i++) {
        moe_layer *layer = &r->net.modules[i].layer;
        moe_status status;
        if ((r->net.modules[i].kind != MOE_MODULE_MIXTURE && r->net.modules[i].kind != MOE_MODULE_FEED_FORWARD) ||
            one_in(f, 3))
            continue;
        if (moe_layer_pack_size(layer, type, 0, &size, NULL) != MOE_OK || size > NET_FITS) return;
        status = moe_layer_pack(layer, type, grab(f, size, 1), size, NULL);
        CHECK(f, status == MOE_OK || status == MOE_ERR_OVERFLOW || status == MOE_ERR_NONFINITE, "packing in a net");
    }
    r->call.training = 0;
    if (r->m.data < DATA_FINITE && net_forward(f, r) == MOE_OK && !all_finite(r->pass.y, r->m.n * (size_t)r->net.d_out))
        CHECK(f, largest_inside(f, p, r) > 1e6, "a packed net's output is finite");
    net_unpack(&r->net);
}

static void run_net(fuzz *f, net_run *r, const plan *p) {
    moe_status status = net_forward(f, r);
    const moe_real *first;
    const int tame = r->m.data < DATA_FINITE;
    const size_t n = r->m.n * (size_t)r->net.d_out;
    CHECK(f, status == MOE_OK || status == MOE_ERR_NONFINITE, "a net forward");
    if (status != MOE_OK && tame && !CHECK(f, largest_inside(f, p, r) > 1e9, "a net of tame numbers"))
        printf("    %s\n", moe_status_text(status));
    if (status != MOE_OK) return;
    if (tame && !all_finite(r->pass.y, n)) CHECK(f, largest_inside(f, p, r) > 1e9, "a net's output is finite");
    first = r->pass.y;
    r->call.parallel = &threads;
    CHECK(f, net_forward(f, r) == MOE_OK && (!tame || n == 0 || memcmp(first, r->pass.y, n * sizeof *first) == 0),
          "a net has the same bits again");
    if (one_in(f, 3) && !chooses_kernels(&r->net)) net_file(f, r);
    if (r->call.training) net_backward(f, r, p);
    if (draw(f, 2)) net_decode(f, r);
    if (one_in(f, 3)) net_pack(f, r, p);
    if (one_in(f, 3)) net_pack_whole(f, r);
}

static void fuzz_net(fuzz *f) {
    plan p;
    net_run r;
    draw_plan(f, &p);
    memset(&r, 0, sizeof r);
    if (build_net(f, &p, &r.net) == MOE_OK && !too_many_heads(&r.net)) {
        net_call(f, &r, MOST_TOKENS);
        if (net_fits(&r)) run_net(f, &r, &p);
    }
    moe_net_free(&r.net);
}

/* ---- training ---- */

/* A number of a configuration that is no table of fields: mostly what people choose, now and then
   what nobody should. */
static moe_real draw_setting(fuzz *f, double low, double high) {
    const double odd[] = {-1.0, HUGE_VAL, HUGE_VAL - HUGE_VAL, 1e30, 1e-30, 0.0, -1e30, 2.0};
    if (draw(f, 3) == 0) return 0;
    if (one_in(f, 60)) return (moe_real)odd[draw(f, 8)];
    return (moe_real)(low + (high - low) * (double)draw(f, 256) / 255.0);
}

static void draw_groups(fuzz *f, moe_train_config *c) {
    static const char *const patterns[] = {"*", "*.router.*", "0.*", "*bias", "*weight", "", "nothing", "*.*.*",
                                           "experts.*[0]", "*[0:2]", "*[1"};
    moe_param_group *groups = (moe_param_group *)grab(f, 2, sizeof *groups);
    int i;
    c->n_groups = (int)draw(f, 3);
    c->groups = groups;
    for (i = 0; i < c->n_groups; i++) {
        groups[i].pattern = patterns[draw(f, one_in(f, 5) ? 11 : 1)];
        groups[i].rate = draw_setting(f, 0.0, 2.0);
        groups[i].decay = draw_setting(f, -1.0, 2.0);
        groups[i].frozen = one_in(f, 5);
    }
}

static void draw_training(fuzz *f, moe_train_config *c) {
    memset(c, 0, sizeof *c);
    c->criterion = one_in(f, 40) ? (int)draw(f, 12) - 2 : (int)draw(f, 2);
    c->optimizer = one_in(f, 60) ? 2 : (int)draw(f, MOE_OPTIMIZER_COUNT);
    c->epochs = 1 + (int)draw(f, 3);
    c->batch = one_in(f, 60) ? -1 : 1 + (int)draw(f, 20);
    c->rate = draw_setting(f, 1e-4, 0.5);
    c->final_rate = draw_setting(f, 0.0, 1.0);
    c->momentum = draw_setting(f, -1.0, 1.0);
    c->beta1 = draw_setting(f, 0.1, 1.0);
    c->beta2 = draw_setting(f, 0.1, 1.0);
    c->epsilon = draw_setting(f, 1e-8, 1e-3);
    c->decay = draw_setting(f, 0.0, 0.3);
    c->clip = draw_setting(f, 0.01, 2.0);
    c->seed = draw(f, 99);
    c->accumulate = (int)draw(f, 3);
    c->schedule = one_in(f, 60) ? 7 : (int)draw(f, 2);
    c->warmup = one_in(f, 5) ? (int)draw(f, 6) : 0;
    c->total_steps = c->warmup > 0 || one_in(f, 3) ? 1 + (int)draw(f, 12) : 0;
    c->evaluate_every = (int)draw(f, 3);
    if (one_in(f, 4)) draw_groups(f, c);
    say(f, "\ntraining");
    say_number(f, "criterion", c->criterion);
    say_number(f, "optimizer", c->optimizer);
    say_number(f, "batch", c->batch);
    say_number(f, "rate", (double)c->rate);
    say_number(f, "momentum", (double)c->momentum);
    say_number(f, "beta1", (double)c->beta1);
    say_number(f, "beta2", (double)c->beta2);
    say_number(f, "epsilon", (double)c->epsilon);
    say_number(f, "decay", (double)c->decay);
    say_number(f, "clip", (double)c->clip);
    say_number(f, "final_rate", (double)c->final_rate);
    say_number(f, "accumulate", c->accumulate);
    say_number(f, "warmup", c->warmup);
    say_number(f, "total_steps", c->total_steps);
    say_number(f, "groups", c->n_groups);
}

/* The classical mixture's criteria ask for a last module of their own. */
static void draw_classical(fuzz *f, plan *p, moe_train_config *c) {
    part *last = &p->parts[p->n < MOST_MODULES ? p->n : MOST_MODULES - 1];
    if (p->n < MOST_MODULES) p->n++;
    c->criterion = (int)draw(f, MOE_CRITERION_COUNT);
    memset(last, 0, sizeof *last);
    last->kind = MOE_MODULE_MIXTURE;
    last->layer.router.select = MOE_SELECT_DENSE;
    last->layer.router.weight = MOE_WEIGHT_RAW;
    last->layer.router.n_experts = 1 + (int)draw(f, 5);
    last->layer.router.expert_temperature = (moe_real)(draw(f, 3) ? 0.0 : 1.0 + draw(f, 4));
    last->layer.router.score = one_in(f, 3) ? MOE_SCORE_MLP : MOE_SCORE_LINEAR;
    last->layer.expert = one_in(f, 3) ? MOE_EXPERT_MLP : MOE_EXPERT_LINEAR;
    last->layer.d_out = 1 + (int)draw(f, 5);
    last->layer.d_ff = 3;
    say_number(f, "\nclassical mixture: experts", last->layer.router.n_experts);
    say_number(f, "temperature", (double)last->layer.router.expert_temperature);
}

/* Only the classical mixture wants a label for every row. */
static moe_data data_of(fuzz *f, const net_run *r, int all_labelled) {
    moe_data data;
    memset(&data, 0, sizeof data);
    data.n = r->m.n;
    data.x = r->call.x;
    data.call = &r->call;
    data.token_ids = r->call.token_ids;
    data.labels = integers(f, r->m.n, all_labelled || !one_in(f, 4) ? 0 : -1, r->net.d_out);
    data.targets = numbers(f, r->m.n * (size_t)r->net.d_out, DATA_NORMAL);
    return data;
}

/* All tensors as they are now. */
static moe_real *copy_of(fuzz *f, const moe_net *net) {
    size_t i, total = 0;
    moe_real *copy, *at;
    for (i = 0; i < net->n_tensors; i++) total += net->tensors[i].count;
    at = copy = (moe_real *)grab(f, total, sizeof *copy);
    for (i = 0; i < net->n_tensors; at += net->tensors[i++].count)
        memcpy(at, net->tensors[i].data, net->tensors[i].count * sizeof *at);
    return copy;
}

static int same_tensors(const moe_net *net, const moe_real *copy) {
    size_t i;
    for (i = 0; i < net->n_tensors; copy += net->tensors[i++].count)
        if (memcmp(net->tensors[i].data, copy, net->tensors[i].count * sizeof *copy) != 0) return 0;
    return 1;
}

static int tensors_are_finite(const moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_tensors; i++)
        if (!all_finite(net->tensors[i].data, net->tensors[i].count)) return 0;
    return 1;
}

/* A network on which training may have any effect that is finite, with rates below 1. */
static void check_step(fuzz *f, const moe_trainer *t, moe_status status, const moe_error *error, const moe_step *step,
                       const moe_real *before) {
    CHECK(f, status == MOE_OK || status == MOE_ERR_NONFINITE, "a step");
    if (status != MOE_OK) check_error(f, status, error);
    if (status != MOE_OK) CHECK(f, same_tensors(t->net, before), "a failed step leaves the tensors");
    if (status != MOE_OK) return;
    CHECK(f, moe_is_finite(step->loss) && moe_is_finite(step->router_loss) && moe_is_finite(step->gradient_norm),
          "what a step reports is finite");
    if (t->config.rate <= 1) CHECK(f, tensors_are_finite(t->net), "tensors are finite after a step");
}

/* A trainer of another network of the same modules that goes on from a checkpoint does the same. */
static void train_on(fuzz *f, const plan *p, const moe_train_config *c, moe_trainer *t, const moe_data *data) {
    moe_net other;
    moe_trainer second;
    moe_buffer buffer;
    moe_stream stream;
    moe_error error;
    moe_step one, two;
    moe_status status;
    memset(&buffer, 0, sizeof buffer);
    memset(&second, 0, sizeof second);
    memset(&one, 0, sizeof one);
    memset(&two, 0, sizeof two);
    buffer.allocator = heap(f);
    stream = moe_buffer_stream(&buffer);
    if (!CHECK(f, moe_trainer_write(t, &stream, &error) == MOE_OK, "a checkpoint is written"))
        printf("    %s\n", error.message);
    if (!CHECK(f, make_net(f, p, p->n, &other) == MOE_OK && moe_net_build(&other, 1, 77, &error) == MOE_OK,
               "the net again"))
        printf("    %s\n", error.message);
    set_customs(&other);
    CHECK(f, moe_trainer_init(&second, &other, c, &error) == MOE_OK, "a trainer again");
    if (!CHECK(f, moe_trainer_read(&second, buffer.data, buffer.size, &error) == MOE_OK, "a checkpoint is read"))
        printf("    %s\n", error.message);
    status = moe_trainer_step(t, data, &one, NULL);
    CHECK(f, moe_trainer_step(&second, data, &two, NULL) == status && memcmp(&one, &two, sizeof one) == 0,
          "training goes on with the same bits");
    CHECK(f, same_tensors(&other, copy_of(f, t->net)), "training goes on to the same tensors");
    moe_trainer_free(&second);
    moe_net_free(&other);
    moe_buffer_free(&buffer);
}

static void run_trainer(fuzz *f, const plan *p, net_run *r, const moe_train_config *c) {
    moe_trainer t;
    moe_data data;
    moe_error error;
    moe_status status;
    int i;
    memset(&t, 0, sizeof t);
    status = moe_trainer_init(&t, &r->net, c, &error);
    CHECK(f, status == MOE_OK || status == MOE_ERR_CONFIG || status == MOE_ERR_MEMORY || status == MOE_ERR_OVERFLOW,
          "a trainer");
    if (status != MOE_OK) {
        check_error(f, status, &error);
        return;
    }
    data = data_of(f, r, r->classical);
    for (i = 0; i < 3 && r->m.n > 0; i++) {
        const moe_real *before = copy_of(f, &r->net);
        moe_step step;
        memset(&step, 0, sizeof step);
        status = i < 2 ? moe_trainer_step(&t, &data, &step, &error) : moe_trainer_accumulate(&t, &data, &step, &error);
        if (i == 2 && status == MOE_OK) status = moe_trainer_update(&t, &step, &error);
        if (status == MOE_ERR_ARGUMENT && !CHECK(f, 0, "a step of good data")) printf("    %s\n", error.message);
        check_step(f, &t, status, &error, &step, before);
    }
    if (r->m.n > 0 && tensors_are_finite(&r->net)) train_on(f, p, c, &t, &data);
    moe_trainer_free(&t);
}

static int never_stop(void *ctx, const moe_progress *progress) {
    fuzz *f = (fuzz *)ctx;
    CHECK(f, moe_is_finite(progress->loss) && progress->step <= progress->steps && progress->epoch <= progress->epochs,
          "what training reports");
    return 0;
}

/* moe_fit brings routers only x, ids and sequences; a router that wants more is refused before the
   first step. */
static void run_fit(fuzz *f, net_run *r, moe_train_config *c) {
    moe_data train = data_of(f, r, 0), test = train;
    moe_error error;
    moe_evaluation result;
    moe_status status;
    const moe_real *before = copy_of(f, &r->net);
    train.call = NULL;
    train.length = one_in(f, 3) ? 0 : 1 + draw(f, (unsigned)r->m.n + 1);
    if (train.length > 0) train.n -= train.n % train.length;
    test = train;
    c->progress = never_stop;
    c->progress_ctx = f;
    status = moe_fit(&r->net, &train, one_in(f, 2) ? &test : NULL, c, &error);
    CHECK(f,
          status == MOE_OK || status == MOE_ERR_NONFINITE || status == MOE_ERR_ARGUMENT || status == MOE_ERR_CONFIG ||
              status == MOE_ERR_MEMORY,
          "moe_fit");
    if (status != MOE_OK) check_error(f, status, &error);
    if (status == MOE_ERR_ARGUMENT || status == MOE_ERR_CONFIG || status == MOE_ERR_MEMORY)
        CHECK(f, same_tensors(&r->net, before), "data that are refused change nothing");
    if (c->rate <= 1 && status == MOE_OK) CHECK(f, tensors_are_finite(&r->net), "tensors are finite after training");
    status = moe_evaluate(&r->net, &train, c->criterion, &result, &error);
    CHECK(f,
          status == MOE_OK || status == MOE_ERR_NONFINITE || status == MOE_ERR_ARGUMENT || status == MOE_ERR_CONFIG ||
              status == MOE_ERR_MEMORY,
          "moe_evaluate");
    if (status != MOE_OK) check_error(f, status, &error);
    else CHECK(f, moe_is_finite(result.loss) && result.accuracy >= 0 && result.accuracy <= 1, "an evaluation");
}

static void fuzz_train(fuzz *f) {
    plan p;
    net_run r;
    moe_train_config c;
    memset(&r, 0, sizeof r);
    draw_plan(f, &p);
    draw_training(f, &c);
    r.classical = one_in(f, 4) && p.n + (size_t)p.d_in > 0;
    if (r.classical) draw_classical(f, &p, &c);
    if (build_net(f, &p, &r.net) == MOE_OK && !too_many_heads(&r.net)) {
        if (r.net.n_modules > 0 && r.net.modules[r.net.n_modules - 1].layer.config.router.expert_temperature > 0)
            r.classical = 1;
        net_call(f, &r, c.batch > 0 ? (size_t)c.batch : 1);
        if (r.m.data >= DATA_FINITE) {
            r.m.data = DATA_NORMAL;
            r.call.x = r.net.d_in > 0 ? numbers(f, r.m.n * (size_t)r.net.d_in, DATA_NORMAL) : NULL;
        }
        if (r.classical) r.call.mask = NULL;
        if (!net_fits(&r) || moe_net_parameter_count(&r.net, NULL) > MOST_NUMBERS / 8) r.m.n = 0;
        else if (one_in(f, 3)) run_fit(f, &r, &c);
        else run_trainer(f, &p, &r, &c);
    }
    moe_net_free(&r.net);
}

static void draw_modular_layers(fuzz *f, plan *p, int mixtures) {
    int i;
    for (i = 0; i < mixtures; i++) {
        moe_layer_config *l = &p->parts[i].layer;
        p->parts[i].kind = MOE_MODULE_MIXTURE;
        l->router.n_experts = 1 + (int)draw(f, 5);
        l->router.top_k = 1;
        l->router.select = one_in(f, 20) ? MOE_SELECT_TOP_K : MOE_SELECT_SAMPLE;
        l->router.loss_distill = (moe_real)(one_in(f, 20) ? 0.0 : 1.0);
        l->router.weight = draw(f, 2) ? MOE_WEIGHT_ONE : MOE_WEIGHT_RAW;
        l->router.untrained = 1;
        l->router.score = one_in(f, 3) ? MOE_SCORE_MLP : MOE_SCORE_LINEAR;
        l->router.loss_balance = (moe_real)(0.1 * draw(f, 2));
        l->expert = (int)draw(f, MOE_EXPERT_COUNT);
        l->d_ff = 1 + (int)draw(f, 6);
        l->d_out = 1 + (int)draw(f, 5);
    }
}

/* Modular networks: choices are latent, EM finds them. */
static void fuzz_modular(fuzz *f) {
    plan p;
    net_run r;
    moe_train_config c;
    moe_trainer t;
    moe_modular m;
    moe_data data;
    moe_error error;
    moe_status status;
    int32_t *choices;
    int i, mixtures = 1 + (int)draw(f, 2);
    memset(&p, 0, sizeof p);
    memset(&r, 0, sizeof r);
    memset(&c, 0, sizeof c);
    memset(&t, 0, sizeof t);
    memset(&m, 0, sizeof m);
    p.d_in = 1 + (int)draw(f, 6);
    p.n = (size_t)mixtures;
    draw_modular_layers(f, &p, mixtures);
    c.criterion = (int)draw(f, 2);
    c.batch = 12;
    c.rate = draw_setting(f, 1e-4, 0.5);
    if (build_net(f, &p, &r.net) == MOE_OK) {
        net_call(f, &r, 12);
        r.call.mask = NULL;
        r.call.x = numbers(f, r.m.n * (size_t)r.net.d_in, DATA_NORMAL);
        r.call.teacher = NULL;
        data = data_of(f, &r, 0);
        data.call = NULL;
        choices = integers(f, (size_t)mixtures * r.m.n, -1, 0);
        status = moe_trainer_init(&t, &r.net, &c, &error);
        if (status == MOE_OK) status = moe_modular_init(&m, &t, &error);
        CHECK(f, status == MOE_OK || status == MOE_ERR_CONFIG, "a modular network");
        for (i = 0; i < 2 && status == MOE_OK && r.m.n > 0; i++) {
            moe_modular_step_result result;
            status = moe_modular_step(&m, &data, 1 + (int)draw(f, 3), (int)draw(f, 3), choices, &result, &error);
            CHECK(f, status == MOE_OK || status == MOE_ERR_NONFINITE, "a step of a modular network");
            if (status == MOE_OK &&
                !CHECK(f, result.log_likelihood - result.log_likelihood >= 0.0 && is_share(result.changed),
                       "what a step of EM reports"))
                printf("    %g, %g\n", result.log_likelihood, result.changed);
        }
        if (status != MOE_OK) check_error(f, status, &error);
        moe_modular_free(&m);
        moe_trainer_free(&t);
    }
    moe_net_free(&r.net);
}

/* ---- models ---- */

typedef struct shelf {
    const unsigned char *bytes;
    size_t size;
} shelf;

static moe_status shelf_fetch(void *ctx, size_t at, size_t size, void *to) {
    const shelf *s = (const shelf *)ctx;
    if (at > s->size || size > s->size - at) return MOE_ERR_IO;
    memcpy(to, s->bytes + at, size);
    return MOE_OK;
}

/* One input of a model: an id, levels, or numbers. */
static void *draw_input(fuzz *f, const moe_model *model, int vocabulary) {
    static const int ends[] = {127, -127, 0, 1, -1};
    const int kind = (int)draw(f, 7);
    signed char *levels;
    size_t i;
    if (model->d_in == 0) return integers(f, 1, 0, vocabulary);
    if (model->weights_are == MOE_WEIGHTS_FLOAT) return numbers(f, model->d_in, DATA_NORMAL);
    levels = (signed char *)grab(f, model->d_in, 1);
    for (i = 0; i < model->d_in; i++)
        levels[i] = (signed char)(kind < 5 ? ends[kind] : (int)moe_rng_below(&f->rng, 255) - 127);
    return levels;
}

static void check_choices_of(fuzz *f, const moe_model *model, const void *scratch) {
    moe_choice choices[16];
    size_t i, count = 0;
    for (i = 0; i < model->n_mixtures; i++)
        CHECK(f, moe_infer_choices(model, i, scratch, choices, 16, &count) == MOE_OK, "choices of a model");
    CHECK(f,
          model->weights_are == MOE_WEIGHTS_FLOAT ||
              moe_infer_choices(model, model->n_mixtures, scratch, choices, 16, &count) == MOE_ERR_NOT_FOUND,
          "no mixture behind the last");
}

/* Two runs over the same inputs: the same bits, and for floats no number that is not finite. */
static void run_model(fuzz *f, const moe_built_model *built, const moe_loader *loader, int vocabulary, double rough) {
    const moe_model *model = &built->model;
    const size_t width = model->weights_are == MOE_WEIGHTS_FLOAT ? sizeof(moe_real) : sizeof(int16_t);
    const size_t bytes = model->d_out * width;
    unsigned char *scratch[2], *output[2];
    int i, k;
    for (k = 0; k < 2; k++) {
        scratch[k] = (unsigned char *)grab(f, model->scratch_size, 1);
        output[k] = (unsigned char *)grab(f, bytes, 1);
    }
    for (i = 0; i < 6; i++) {
        const void *input = draw_input(f, model, vocabulary);
        moe_status status = MOE_OK;
        for (k = 0; k < 2; k++) {
            status = built->external ? moe_infer(model, loader, input, output[k], scratch[k], model->scratch_size)
                                     : moe_infer(model, NULL, input, output[k], scratch[k], model->scratch_size);
            if (model->length > 0 && (size_t)i >= model->length)
                CHECK(f, status == MOE_ERR_STATE, "no token behind a sequence's end");
            else CHECK(f, status == MOE_OK || (status == MOE_ERR_NONFINITE && rough > 1e9), "inference");
        }
        if (status != MOE_OK) continue;
        CHECK(f, memcmp(output[0], output[1], bytes) == 0, "inference has the same bits again");
        if (model->weights_are == MOE_WEIGHTS_FLOAT && rough <= 1e9)
            CHECK(f, all_finite((const moe_real *)(const void *)output[0], model->d_out), "a model's output is finite");
        check_choices_of(f, model, scratch[0]);
    }
    begin_sequence(scratch[0], model->scratch_size);
    CHECK(f, moe_infer(model, NULL, NULL, output[0], scratch[0], model->scratch_size) == MOE_ERR_ARGUMENT, "no input");
}

static void export_model(fuzz *f, const moe_built_model *built) {
    moe_buffer text;
    moe_stream stream;
    moe_error error;
    memset(&text, 0, sizeof text);
    text.allocator = heap(f);
    stream = moe_buffer_stream(&text);
    if (!CHECK(f, moe_export_c(built, "net", &stream, &error) == MOE_OK && text.size > 100, "a model is printed"))
        printf("    %s\n", error.message);
    moe_buffer_free(&text);
}

static void draw_model(fuzz *f, moe_model_config *c, moe_data *data) {
    c->weights = one_in(f, 60) ? 5 : (int)draw(f, MOE_WEIGHTS_COUNT);
    c->calibration = data;
    c->loader = one_in(f, 4);
    c->allocator = heap(f);
    c->length = draw(f, 3) ? 0 : 1 + draw(f, 9);
    say_number(f, "weights", c->weights);
    say_number(f, "loader", c->loader);
    say_number(f, "length", (double)c->length);
}

static void fuzz_model(fuzz *f) {
    plan p;
    net_run r;
    moe_model_config c;
    moe_built_model built;
    moe_data data;
    moe_buffer experts;
    moe_stream stream;
    moe_loader loader;
    shelf s;
    moe_error error;
    moe_status status;
    f->simple = one_in(f, 4) ? 0 : 1;
    draw_plan(f, &p);
    memset(&r, 0, sizeof r);
    memset(&c, 0, sizeof c);
    memset(&experts, 0, sizeof experts);
    memset(&data, 0, sizeof data);
    if (build_net(f, &p, &r.net) != MOE_OK || too_many_heads(&r.net) ||
        moe_net_parameter_count(&r.net, NULL) > MOST_NUMBERS / 8) {
        moe_net_free(&r.net);
        return;
    }
    net_call(f, &r, MOST_TOKENS);
    draw_model(f, &c, &data);
    data.n = r.m.n;
    data.x = r.call.x;
    data.token_ids = r.call.token_ids;
    if (one_in(f, 3)) data.length = data.n;
    status = moe_model_create(&built, &r.net, &c, &error);
    CHECK(f,
          status == MOE_OK || status == MOE_ERR_UNSUPPORTED || status == MOE_ERR_NONFINITE ||
              status == MOE_ERR_OVERFLOW || status == MOE_ERR_ARGUMENT || status == MOE_ERR_CONFIG ||
              status == MOE_ERR_MEMORY,
          "a model");
    if (status == MOE_ERR_NONFINITE && r.m.data < DATA_FINITE)
        CHECK(f, largest_inside(f, &p, &r) > 1e9, "a model of tame numbers");
    if (status != MOE_OK) check_error(f, status, &error);
    else {
        int vocabulary = token_ids_of(&r.net);
        experts.allocator = heap(f);
        stream = moe_buffer_stream(&experts);
        if (built.external) CHECK(f, moe_export_experts(&built, &stream, &error) == MOE_OK, "experts are written");
        s.bytes = experts.data;
        s.size = experts.size;
        loader.ctx = &s;
        loader.fetch = shelf_fetch;
        run_model(f, &built, &loader, vocabulary,
                  built.model.weights_are == MOE_WEIGHTS_FLOAT ? largest_inside(f, &p, &r) : 0.0);
        if (one_in(f, 4)) export_model(f, &built);
        moe_model_free(&built);
        moe_buffer_free(&experts);
    }
    moe_net_free(&r.net);
}

/* ---- the classical mixture over plain arrays, the hierarchical mixture, sampling ---- */

static void draw_hme(fuzz *f, moe_hme_config *c) {
    c->d_in = 1 + (int)draw(f, 8);
    c->d_out = 1 + (int)draw(f, 5);
    c->n_groups = (int)draw(f, 5);
    c->n_experts = (int)draw(f, 5);
    c->family = (int)draw(f, one_in(f, 30) ? 3 : 2);
    c->steps = (int)draw(f, 4);
    c->variance = draw_setting(f, 0.1, 2.0);
    c->min_variance = draw_setting(f, 1e-6, 0.1);
    if (one_in(f, 30)) {
        c->d_in = 1 << 30;
        c->n_groups = 1 << 30;
    }
    say(f, "hme");
    say_number(f, "d_in", c->d_in);
    say_number(f, "d_out", c->d_out);
    say_number(f, "groups", c->n_groups);
    say_number(f, "experts", c->n_experts);
    say_number(f, "family", c->family);
    say_number(f, "steps", c->steps);
    say_number(f, "variance", (double)c->variance);
    say_number(f, "min", (double)c->min_variance);
}

static void fuzz_hme(fuzz *f) {
    moe_hme_config c;
    moe_hme m;
    moe_data data;
    moe_error error;
    moe_status status;
    const moe_allocator a = heap(f);
    const size_t n = draw(f, 40);
    const int kind = draw_data(f);
    moe_real *answer;
    double *h, *more, before = 0.0, after = 0.0;
    size_t all;
    int i;
    memset(&c, 0, sizeof c);
    memset(&data, 0, sizeof data);
    draw_hme(f, &c);
    say_number(f, "n", (double)n);
    say(f, " data=");
    say(f, data_names[kind]);
    status = moe_hme_create(&m, &c, draw(f, 99), &a, &error);
    CHECK(f, status == MOE_OK || status == MOE_ERR_CONFIG || status == MOE_ERR_MEMORY || status == MOE_ERR_OVERFLOW,
          "a hierarchical mixture");
    if (status != MOE_OK) {
        check_error(f, status, &error);
        return;
    }
    all = (size_t)m.config.n_groups * (size_t)m.config.n_experts;
    h = (double *)grab(f, n * all, sizeof *h);
    more = (double *)grab(f, n * (size_t)m.config.n_groups, sizeof *more);
    answer = numbers(f, n * (size_t)c.d_out, DATA_ZERO);
    data.n = n;
    data.x = numbers(f, n * (size_t)c.d_in, kind);
    data.labels = integers(f, n, 0, c.d_out);
    data.targets = numbers(f, n * (size_t)c.d_out, kind < DATA_FINITE ? kind : DATA_NORMAL);
    status = moe_hme_log_likelihood(&m, &data, &before, &error);
    for (i = 0; i < 3 && status == MOE_OK; i++) {
        status = draw(f, 3) ? moe_hme_em(&m, &data, h, &after, &error)
                            : moe_hme_gradient(&m, &data, (moe_real)(0.001 * (1.0 + draw(f, 300))), h, NULL, &error);
        if (status != MOE_OK) break;
        CHECK(f, after - after >= 0.0, "a log-likelihood is finite");
        CHECK(f, moe_hme_posteriors(&m, &data, more, h, &error) == MOE_OK || kind >= DATA_BIG, "posteriors");
        status = moe_hme_predict(&m, n, data.x, answer, &error);
        CHECK(f, status != MOE_OK || all_finite(answer, n * (size_t)c.d_out), "an answer is finite");
    }
    CHECK(f, status == MOE_OK || status == MOE_ERR_NONFINITE || status == MOE_ERR_ARGUMENT,
          "what a hierarchical mixture answers");
    if (status != MOE_OK) check_error(f, status, &error);
    if (kind < DATA_BIG &&
        !CHECK(f, status == MOE_OK || status == MOE_ERR_ARGUMENT, "a hierarchical mixture of tame numbers"))
        printf("    %s\n", error.message);
    moe_hme_free(&m);
}

static void check_plain_losses(fuzz *f, moe_mixture *m, moe_real *answer, int kind, size_t cells) {
    moe_real loss;
    if (m->n > 0 && kind < DATA_FINITE) {
        moe_real *a = numbers(f, cells, kind), *b = numbers(f, cells, DATA_NORMAL);
        moe_real *da = numbers(f, cells, DATA_ZERO), *db = numbers(f, cells, DATA_ZERO);
        loss = moe_consistency_loss(m->n, cells / m->n, a, b, draw(f, 2) ? da : NULL, db);
        CHECK(f, moe_is_finite(loss) && all_finite(da, cells) && all_finite(db, cells),
              "the consistency loss and its gradients are finite");
        loss = moe_cross_entropy(m->n, m->width, m->targets, m->labels, answer);
        CHECK(f, moe_is_finite(loss) && all_finite(answer, m->n * m->width),
              "cross-entropy and its gradient are finite");
        loss = moe_squared_error(m->n, m->width, m->targets, m->outputs, answer);
        CHECK(f, moe_is_finite(loss) && all_finite(answer, m->n * m->width),
              "the squared error and its gradient are finite");
    }
}

static void fuzz_plain(fuzz *f) {
    moe_mixture m;
    moe_sampling how;
    moe_error error;
    moe_rng rng;
    moe_real loss = 0, *p, *d_p, *d_outputs, *answer;
    moe_status status;
    const int criterion = (int)draw(f, MOE_CRITERION_COUNT), kind = draw_data(f);
    size_t i, cells;
    int32_t token = 0;
    memset(&m, 0, sizeof m);
    memset(&how, 0, sizeof how);
    m.n = draw(f, 12);
    m.experts = 1 + draw(f, 6);
    m.width = 1 + draw(f, 6);
    cells = m.experts * m.n * m.width;
    m.p = p = numbers(f, m.n * m.experts, kind);
    m.outputs = numbers(f, cells, kind);
    m.targets = numbers(f, m.n * m.width, kind);
    m.labels = integers(f, m.n, 0, (int)m.width);
    for (i = 0; i < m.n * m.experts; i++) p[i] = p[i] < 0 ? -p[i] : p[i];
    if (one_in(f, 4)) m.expert_p = m.p;
    m.temperature = one_in(f, 4) ? draw_setting(f, 1e-6, 10.0) : 0;
    say(f, "plain");
    say_number(f, "criterion", criterion);
    say_number(f, "n", (double)m.n);
    say_number(f, "experts", (double)m.experts);
    say_number(f, "width", (double)m.width);
    say_number(f, "temperature", (double)m.temperature);
    say(f, " data=");
    say(f, data_names[kind]);
    d_p = numbers(f, m.n * m.experts, DATA_ZERO);
    d_outputs = numbers(f, cells, DATA_ZERO);
    answer = numbers(f, m.n * m.width, DATA_ZERO);
    status = moe_mixture_loss(criterion, &m, &loss, d_p, d_outputs, &error);
    CHECK(f, status == MOE_OK || status == MOE_ERR_ARGUMENT || status == MOE_ERR_NONFINITE, "a mixture's loss");
    if (status != MOE_OK) check_error(f, status, &error);
    else
        CHECK(f, moe_is_finite(loss) && all_finite(d_p, m.n * m.experts) && all_finite(d_outputs, cells),
              "a mixture's loss and gradients are finite");
    moe_rng_seed(&rng, 3);
    status = moe_mixture_answer(criterion, &m, draw(f, 2) ? &rng : NULL, answer, &error);
    CHECK(f, status == MOE_OK || status == MOE_ERR_ARGUMENT || status == MOE_ERR_NONFINITE, "a mixture's answer");
    if (status == MOE_OK) CHECK(f, all_finite(answer, m.n * m.width), "a mixture's answer is finite");
    check_plain_losses(f, &m, answer, kind, cells);
    how.greedy = one_in(f, 4);
    how.temperature = draw_setting(f, 1e-6, 3.0);
    how.top_k = (int)draw(f, 9);
    how.top_p = draw_setting(f, 0.0, 1.0);
    status = moe_sample(&how, cells, m.outputs, &rng, numbers(f, cells, DATA_ZERO), integers(f, cells, 0, 1), &token,
                        &error);
    CHECK(f, status == MOE_OK || status == MOE_ERR_ARGUMENT || status == MOE_ERR_NONFINITE || status == MOE_ERR_CONFIG,
          "a sample");
    if (status == MOE_OK) CHECK(f, token >= 0 && (size_t)token < cells, "a sample is a token");
    else check_error(f, status, &error);
}

/* ---- all kinds ---- */

static const struct {
    const char *name;
    void (*run)(fuzz *f);
} kinds[] = {{"router", fuzz_router},   {"layer", fuzz_layer}, {"net", fuzz_net}, {"train", fuzz_train},
             {"modular", fuzz_modular}, {"model", fuzz_model}, {"hme", fuzz_hme}, {"plain", fuzz_plain}};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

static clock_t begun;
static double slowest;
static uint64_t slowest_seed;

static void begin_case(const uint8_t *bytes, size_t size) {
    fuzz *f = &now;
    begun = clock();
    f->bytes = bytes;
    f->size = size;
    f->at = 0;
    f->length = 0;
    f->text[0] = '\0';
    f->n_blocks = 0;
    f->taken = 0;
    f->in_use = 0;
    f->wrong_size = 0;
    f->failed = 0;
    f->keep_width = f->simple = 0;
    f->wide = 0;
    moe_rng_seed(&f->rng, draw(f, 1u << 24));
}

static void end_case(void) {
    fuzz *f = &now;
    const double seconds = (double)(clock() - begun) / (double)CLOCKS_PER_SEC;
    size_t i;
    CHECK(f, f->taken == 0, "everything is given back");
    CHECK(f, !f->wrong_size, "the library knows the sizes of its blocks");
    if (seconds > slowest) {
        slowest = seconds;
        slowest_seed = now_seed;
    }
    for (i = 0; i < f->n_blocks; i++) free(f->blocks[i]);
    if (f->failed) failed++;
    else passed++;
    if (showing) printf("%s\n", f->text);
}

static void run_case(const uint8_t *bytes, size_t size, int kind) {
    begin_case(bytes, size);
    if (kind < 0) kind = (int)draw(&now, KINDS);
    kinds[kind].run(&now);
    end_case();
}

#ifdef FUZZ_TARGET
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    run_case(data, size, -1);
    return 0;
}
#else
#if defined __SANITIZE_ADDRESS__
/* A finding ends the program by a signal, which tells the case. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "abort_on_error=1"; }
#endif

/* ---- what these cases have found: configuration, tokens, data, training ---- */

static const struct {
    const char *settings;
    matter m;
} findings[] = {
    /* feature weights infinite: lambda small beside the spread */
    {"input=adaptive_clustering ac_lambda=1e-9", {18, DATA_BIG, 1, 0}},
    {"loss_locality=1 nodes=65536", {39, DATA_NORMAL, 1, 0}},           /* seconds: all pairs of nodes */
    /* gradients infinite: divided by a denormal sum of p */
    {"gate=identity", {9, DATA_DENORMAL, 1, 0}},
    /* so here scale by the surviving weights */
    {"gate=identity weight=raw capacity_factor=1 renormalize=after", {9, DATA_DENORMAL, 1, 0}},
};

static void run_finding(size_t i) {
    moe_layer_config c;
    begin_case(NULL, 0);
    now_seed = 0;
    memset(&c, 0, sizeof c);
    c.router.d_model = 8;
    c.router.n_experts = 4;
    c.d_ff = 5;
    say(&now, findings[i].settings);
    if (CHECK(&now, moe_fields_apply(moe_layer_fields(), &c, findings[i].settings, NULL) == MOE_OK,
              "settings of a finding")) {
        run_router(&now, &c.router, &findings[i].m);
        run_layer(&now, c, &findings[i].m);
    }
    end_case();
}

static void tell(int number) {
    show_case("the program was ended", number);
    signal(number, SIG_DFL);
    raise(number);
}

static void run_seed(uint64_t seed, int kind) {
    uint8_t bytes[1200];
    moe_rng rng;
    size_t i;
    now_seed = seed;
    moe_rng_seed(&rng, seed);
    for (i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(moe_rng_next(&rng) >> 56);
    run_case(bytes, sizeof bytes, kind);
}

int main(int argc, char **argv) {
    long count = 3000, i;
    uint64_t seed = 1;
    int kind = -1, at = 1, k;
    signal(SIGABRT, tell);
    signal(SIGFPE, tell);
    signal(SIGSEGV, tell);
    signal(SIGILL, tell);
    if (at < argc && strcmp(argv[at], "show") == 0) {
        showing = 1;
        at++;
    }
    for (k = 0; k < KINDS; k++)
        if (at < argc && strcmp(argv[at], kinds[k].name) == 0) kind = k;
    if (kind >= 0) {
        sprintf(now_kind, "%.16s ", kinds[kind].name);
        at++;
    }
    if (at < argc && strcmp(argv[at], "quick") == 0) count = 300;
    else if (at < argc) count = atol(argv[at]);
    if (at + 1 < argc) seed = strtoul(argv[at + 1], NULL, 10);
    for (i = 0; i < (long)(sizeof findings / sizeof findings[0]) && kind < 0; i++) run_finding((size_t)i);
    for (i = 0; i < count; i++) run_seed(seed + (uint64_t)i, kind);
    printf("note: slowest case %.2f s: fuzz_config %s1 %lu\n", slowest, now_kind, (unsigned long)slowest_seed);
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}
#endif
