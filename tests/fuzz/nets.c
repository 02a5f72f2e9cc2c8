/* nets.c - random networks against a second interpreter: tests/fuzz/nets.py writes networks' files,
   calls of them and what must come out; this program loads each with every table of kernels, runs
   it forward and backward, token by token and packed, saves and loads it, and makes inference
   models in integers, whose headers and answers it writes for nets.py to check.
     cc -std=c99 -O1 -I. tests/fuzz/nets.c -o nets -lm && ./nets FOLDER FIRST COUNT
   FOLDER holds net_SEED.safetensors and call_SEED.safetensors; seeds without files are skipped.

   Error of a tensor: max |got - want| / (1e-6 + max |want|), at most 5e-5, in double 1e-9. What
   float arithmetic cannot tell is named want64 and compared in double alone, and so are weights of
   8 and 4 bits: in float a code of an activation may be its neighbor, and a router behind it may
   then choose otherwise. */
#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../../moe.h"

#include "../../examples/extras/moe_export.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MOE_REAL_IS_DOUBLE
static const double bound = 1e-9;
#else
static const double bound = 5e-5;
#endif

enum { NAME_ROOM = 128, TEXT_ROOM = 300, POOL = 1 << 27 };

typedef struct net_case {
    const char *folder;
    long seed;
    moe_rng rng; /* of what the check draws */
    moe_buffer bytes;
    moe_file file; /* the call and what it wants */
    moe_net net;
    moe_call call;
    const moe_real *dy, *y; /* y of inference */
    moe_net_pass pass;
    moe_real *dx;
} net_case;

static unsigned char *pool; /* all memory of a case */
static size_t pool_used;
static long n_cases, n_tensors, n_decoded, n_models;

static void *take(size_t count, size_t size) {
    unsigned char *p = pool + pool_used;
    const size_t bytes = (count * size + 63) / 64 * 64 + 64;
    if (bytes > POOL - pool_used) {
        fprintf(stderr, "nets: out of memory\n");
        exit(2);
    }
    pool_used += bytes;
    memset(p, 0, bytes);
    return p;
}

static moe_real *take_reals(size_t count) { return (moe_real *)take(count, sizeof(moe_real)); }

static char *path_of(const net_case *c, const char *what, const char *ending) {
    char *path = (char *)take(strlen(c->folder) + 60, 1);
    sprintf(path, "%s/%s_%06ld%s", c->folder, what, c->seed, ending);
    return path;
}

/* ---- the call ---- */

static moe_real *read_reals(const net_case *c, const char *name, size_t *count) {
    moe_file_tensor t;
    moe_real *values;
    if (moe_file_find(&c->file, name, &t) != MOE_OK) return NULL;
    values = take_reals(t.count);
    *count = t.count;
    return moe_file_values(&t, 0, t.count, values, NULL) == MOE_OK ? values : NULL;
}

static int32_t *read_integers(const net_case *c, const char *name, size_t *count) {
    moe_file_tensor t;
    int64_t *values;
    int32_t *integers;
    size_t i;
    if (moe_file_find(&c->file, name, &t) != MOE_OK) return NULL;
    values = (int64_t *)take(t.count, sizeof *values);
    integers = (int32_t *)take(t.count, sizeof *integers);
    *count = t.count;
    if (moe_file_values(&t, 0, t.count, NULL, values) != MOE_OK) return NULL;
    for (i = 0; i < t.count; i++) integers[i] = (int32_t)values[i];
    return integers;
}

/* The teachers' logits of all MoE layers, one after another. */
static const moe_real *read_teachers(const net_case *c) {
    moe_real *all = take_reals(0), *one;
    size_t i, count, total = 0;
    char name[NAME_ROOM];
    for (i = 0; i < c->net.n_modules; i++) {
        sprintf(name, "teacher.%d", (int)i);
        if ((one = read_reals(c, name, &count)) == NULL) continue;
        all = (moe_real *)memcpy(take_reals(total + count), all, total * sizeof *all);
        memcpy(all + total, one, count * sizeof *all);
        total += count;
    }
    return total > 0 ? all : NULL;
}

static void read_call(net_case *c) {
    char value[40] = "";
    size_t count, i;
    int32_t *mask;
    unsigned char *bytes;
    CHECK(moe_file_metadata(&c->file, "n_tokens", value, sizeof value, NULL) == MOE_OK);
    c->call.n_tokens = (size_t)strtoul(value, NULL, 10);
    c->call.training = moe_file_metadata(&c->file, "evaluation", NULL, 0, NULL) == MOE_ERR_NOT_FOUND;
    c->call.x = read_reals(c, "x", &count);
    c->call.token_ids = read_integers(c, "token_ids", &count);
    c->dy = read_reals(c, "dy", &count);
    c->call.sequences = read_integers(c, "seq", &count);
    if (c->call.sequences != NULL) c->call.n_sequences = count - 1;
    c->call.teacher = read_teachers(c);
    if ((mask = read_integers(c, "mask", &count)) == NULL) return;
    bytes = (unsigned char *)take(count, 1);
    for (i = 0; i < count; i++) bytes[i] = mask[i] != 0;
    c->call.mask = bytes;
}

/* ---- comparing ---- */

static void compare(const net_case *c, const char *name, const moe_real *got, size_t count) {
    size_t n = 0, i;
    const moe_real *want = read_reals(c, name, &n);
    double largest = 0, difference = 0;
    n_tensors++;
    if (!CHECKF(want != NULL && n == count, "%s: %d numbers, not %d", name, (int)count, (int)n)) return;
    for (i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)want[i]));
        difference = fmax(difference, moe_is_finite(got[i]) ? fabs((double)got[i] - (double)want[i]) : HUGE_VAL);
    }
    CHECKF(difference <= bound * (1e-6 + largest), "%s: error %.1e of %.1e", name, difference, largest);
}

static const moe_routing *routing_of(const net_case *c, const char *number) {
    return moe_net_routing(&c->net, &c->pass, (size_t)strtoul(number, NULL, 10));
}

static void compare_selected(const net_case *c, const char *name, const moe_routing *r) {
    size_t count = 0, i;
    const int32_t *want = read_integers(c, name, &count);
    if (!CHECK(want != NULL && count == r->n_tokens * r->n_experts)) return;
    for (i = 0; i < count; i++)
        if (!CHECKF((want[i] != 0) == (r->selected[i] != 0), "%s of token %d, expert %d", name,
                    (int)(i / r->n_experts), (int)(i % r->n_experts)))
            return;
}

static void compare_loss(const net_case *c, const char *name, const char *loss) {
    const char *dot = strchr(loss, '.');
    const moe_routing *r = dot != NULL ? routing_of(c, dot + 1) : NULL;
    int i;
    for (i = 0; r != NULL && moe_loss_name(i) != NULL; i++) {
        const char *known = moe_loss_name(i);
        if (strlen(known) != (size_t)(dot - loss) || strncmp(known, loss, strlen(known)) != 0) continue;
        compare(c, name, &r->loss[i], 1);
        return;
    }
    CHECKF(0, "no such loss: %s", name);
}

static void compare_tensor(const net_case *c, const char *name, const char *tensor, int gradient) {
    moe_tensor t;
    if (gradient && strcmp(tensor, "x") == 0)
        compare(c, name, c->dx, c->call.n_tokens * (size_t)c->net.d_in);
    else if (CHECKF(moe_net_find(&c->net, tensor, &t) == MOE_OK, "no %s", tensor))
        compare(c, name, gradient ? t.gradient : t.data, t.count);
}

static void compare_weights(const net_case *c, const char *name, const moe_routing *r) {
    compare(c, name, r->weights, r->n_tokens * r->n_experts);
}

static void compare_y(const net_case *c, const char *name) {
    compare(c, name, c->pass.y, c->call.n_tokens * (size_t)c->net.d_out);
}

/* What stands behind a prefix, or NULL. */
static const char *behind(const char *prefix, const char *name) {
    const size_t n = strlen(prefix);
    return strncmp(name, prefix, n) == 0 ? name + n : NULL;
}

/* What is wanted of the call itself, or with `after` of the state after a step. */
static void compare_all(const net_case *c, int after) {
    moe_file file = c->file;
    moe_file_tensor t;
    char name[NAME_ROOM];
    file.at = 0;
    while (moe_file_next(&file, &t) == MOE_OK) {
        const char *what, *rest;
        if (!CHECK(t.name_length < sizeof name)) return;
        memcpy(name, t.name, t.name_length);
        name[t.name_length] = '\0';
        what = behind("want.", name);
        if (what == NULL && MOE_REAL_IS_DOUBLE) what = behind("want64.", name);
        if (what == NULL || behind("packed.", what) != NULL || (behind("after.", what) != NULL) != after) continue;
        if ((rest = behind("after.", what)) != NULL) compare_tensor(c, name, rest, 0);
        else if ((rest = behind("grad.", what)) != NULL) compare_tensor(c, name, rest, 1);
        else if ((rest = behind("selected.", what)) != NULL) compare_selected(c, name, routing_of(c, rest));
        else if ((rest = behind("weights.", what)) != NULL) compare_weights(c, name, routing_of(c, rest));
        else if ((rest = behind("loss.", what)) != NULL) compare_loss(c, name, rest);
        else if (CHECKF(strcmp(what, "y") == 0, "unknown: %s", name)) compare_y(c, name);
    }
}

/* ---- running ---- */

static int forward(const net_case *c, const moe_net *net, const moe_call *call, moe_net_pass *pass) {
    moe_call told = *call;
    moe_error error;
    size_t bytes = 0;
    void *work;
    told.error = &error;
    if (!CHECK_STATUS(moe_net_work_size(net, call->n_tokens, call->training, &bytes), MOE_OK)) return 0;
    work = take(bytes, 1);
    error.message[0] = '\0';
    (void)c;
    return CHECKF(moe_net_forward(net, &told, work, bytes, pass) == MOE_OK, "%s", error.message);
}

static int run_inference(const net_case *c, const moe_net *net, moe_net_pass *pass) {
    moe_call call = c->call;
    call.training = 0;
    return forward(c, net, &call, pass);
}

/* One sequence, in pieces of random lengths. */
static void decode_sequence(net_case *c, size_t first, size_t end) {
    const size_t d = (size_t)c->net.d_in, o = (size_t)c->net.d_out;
    size_t length = end - first, size = 0, bytes, at, n;
    void *work;
    moe_cache cache;
    moe_net_pass pass;
    moe_call call;
    if (!CHECK_STATUS(moe_net_decode_size(&c->net, length, length, &size, &bytes, NULL), MOE_OK)) return;
    work = take(bytes, 1);
    if (!CHECK_STATUS(moe_net_cache_init(&cache, &c->net, length, take(size, 1), size, NULL), MOE_OK)) return;
    for (at = first; at < end; at += n) {
        n = 1 + (size_t)moe_rng_below(&c->rng, moe_rng_below(&c->rng, 2) > 0 ? end - at : 1);
        memset(&call, 0, sizeof call);
        call.n_tokens = n;
        if (c->call.x != NULL) call.x = c->call.x + at * d;
        if (c->call.token_ids != NULL) call.token_ids = c->call.token_ids + at;
        if (!CHECK_STATUS(moe_net_decode(&c->net, &cache, &call, work, bytes, &pass), MOE_OK)) return;
        CHECKF(same_reals(pass.y, c->y + at * o, n * o), "tokens %d to %d", (int)at, (int)(at + n));
        n_decoded += (long)n;
    }
}

/* A predictor chooses otherwise than the experts, so decoding is not forward. */
static void decode(net_case *c) {
    size_t s;
    for (s = 0; s < c->net.n_modules; s++)
        if (c->net.modules[s].layer.config.router.predictor) return;
    if (c->call.mask != NULL || moe_net_decode_size(&c->net, 1, 1, NULL, NULL, NULL) != MOE_OK) return;
    if (c->call.sequences == NULL) decode_sequence(c, 0, c->call.n_tokens);
    for (s = 0; s < c->call.n_sequences; s++)
        decode_sequence(c, (size_t)c->call.sequences[s], (size_t)c->call.sequences[s + 1]);
}

static int pack(net_case *c, int type) {
    size_t i, bytes;
    moe_error error;
    for (i = 0; i < c->net.n_modules; i++) {
        moe_layer *layer = &c->net.modules[i].layer;
        const int kind = c->net.modules[i].kind;
        if (kind != MOE_MODULE_MIXTURE && kind != MOE_MODULE_FEED_FORWARD) continue;
        if (!CHECK_STATUS(moe_layer_pack_size(layer, type, 0, &bytes, NULL), MOE_OK)) return 0;
        if (!CHECKF(moe_layer_pack(layer, type, take(bytes, 1), bytes, &error) == MOE_OK, "%s", error.message))
            return 0;
    }
    return 1;
}

static void packed(net_case *c) {
    static const char *const names[MOE_TYPE_COUNT] = {"real", "f16", "bf16", "q8", "q8_block", "q4"};
    const size_t count = c->call.n_tokens * (size_t)c->net.d_out;
    char name[NAME_ROOM];
    moe_file_tensor t;
    moe_net_pass pass;
    int type;
    size_t i;
    for (type = 0; type < MOE_TYPE_COUNT; type++) {
        const int quantized = type >= MOE_TYPE_Q8;
        sprintf(name, "want.packed.%s", names[type]);
        if (quantized && !MOE_REAL_IS_DOUBLE) continue;
        if (!pack(c, type) || !run_inference(c, &c->net, &pass)) return;
        if (type == MOE_TYPE_REAL) CHECK(same_reals(pass.y, c->y, count));
        if (moe_file_find(&c->file, name, &t) == MOE_OK) compare(c, name, pass.y, count);
    }
    for (i = 0; i < c->net.n_modules; i++) c->net.modules[i].layer.is_packed = 0;
}

/* Saved and loaded again it gives the same bits. */
static void save(const net_case *c) {
    const char *path = path_of(c, "saved", ".safetensors");
    moe_net copy;
    moe_net_pass pass;
    moe_error error;
    if (!CHECKF(moe_net_save(&c->net, path, &error) == MOE_OK, "%s", error.message)) return;
    if (!CHECKF(moe_net_load(&copy, path, 0, c->net.kernels_wanted, NULL, &error) == MOE_OK, "%s", error.message))
        return;
    if (run_inference(c, &copy, &pass)) CHECK(same_reals(pass.y, c->y, c->call.n_tokens * (size_t)c->net.d_out));
    moe_net_free(&copy);
}

/* ---- inference models in integers ---- */

static void write_choices(FILE *out, const moe_model *model, const unsigned char *scratch) {
    const int16_t *vectors = (const int16_t *)(const void *)(scratch + model->state_size);
    size_t m;
    int i;
    for (m = 0; m < model->n_mixtures; m++) {
        const int16_t *made = vectors + model->mixtures[m].choices;
        const int16_t *weights = made + 1 + model->mixtures[m].router.most;
        fprintf(out, "chosen");
        for (i = 0; i < made[0]; i++) fprintf(out, " %d %d", made[1 + i], weights[i]);
        fprintf(out, "\n");
    }
}

static moe_status fetch_experts(void *ctx, size_t at, size_t size, void *to) {
    memcpy(to, ((const moe_buffer *)ctx)->data + at, size);
    return MOE_OK;
}

/* Runs a model on the tokens of the call as one sequence, and writes what goes in and comes out. */
static void write_answers(const net_case *c, const moe_model *model, moe_buffer *experts, FILE *out) {
    const size_t d = model->d_in;
    unsigned char *scratch = (unsigned char *)take(model->scratch_size, 1);
    int8_t *codes = (int8_t *)take(d + 1, 1);
    int16_t *y = (int16_t *)take(model->d_out, sizeof *y);
    moe_loader loader;
    size_t t, i;
    loader.ctx = experts;
    loader.fetch = fetch_experts;
    for (t = 0; t < c->call.n_tokens; t++) {
        const void *input = d > 0 ? (const void *)codes : (const void *)(c->call.token_ids + t);
        if (d > 0) moe_infer_levels(model, c->call.x + t * d, codes);
        if (!CHECK_STATUS(moe_infer(model, &loader, input, y, scratch, model->scratch_size), MOE_OK)) return;
        fprintf(out, "in");
        if (d == 0) fprintf(out, " %ld", (long)c->call.token_ids[t]);
        for (i = 0; i < d; i++) fprintf(out, " %d", codes[i]);
        fprintf(out, "\nout");
        for (i = 0; i < model->d_out; i++) fprintf(out, " %d", y[i]);
        fprintf(out, "\n");
        write_choices(out, model, scratch);
    }
}

static void write_file(const char *path, const moe_buffer *bytes) {
    FILE *out = fopen(path, "wb");
    if (!CHECK(out != NULL)) return;
    CHECK(fwrite(bytes->data, 1, bytes->size, out) == bytes->size);
    CHECK(fclose(out) == 0);
}

/* A model of 8 or 4 bits: its header, its answers, every other time its experts in a file. */
static void export_integers(const net_case *c, int weights, const char *name) {
    moe_model_config config;
    moe_built_model built;
    moe_buffer text, experts;
    moe_stream stream = moe_buffer_stream(&text), expert_stream = moe_buffer_stream(&experts);
    moe_data data;
    moe_error error;
    moe_status status;
    FILE *out;
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    memset(&text, 0, sizeof text);
    memset(&experts, 0, sizeof experts);
    data.n = data.length = c->call.n_tokens;
    data.x = c->call.x;
    data.token_ids = c->call.token_ids;
    config.weights = weights;
    config.calibration = &data;
    config.length = c->call.n_tokens;
    config.loader = c->seed % 2 != 0;
    status = moe_model_create(&built, &c->net, &config, &error);
    if (status == MOE_ERR_UNSUPPORTED || status == MOE_ERR_OVERFLOW) return;
    if (!CHECKF(status == MOE_OK, "%s", error.message)) return;
    n_models++;
    CHECK_STATUS(moe_export_c(&built, "drawn", &stream, NULL), MOE_OK);
    write_file(path_of(c, name, ".h"), &text);
    if (config.loader) {
        CHECK_STATUS(moe_export_experts(&built, &expert_stream, NULL), MOE_OK);
        write_file(path_of(c, name, ".experts"), &experts);
    }
    out = fopen(path_of(c, name, ".answers"), "w");
    if (CHECK(out != NULL)) {
        write_answers(c, &built.model, &experts, out);
        CHECK(fclose(out) == 0);
    }
    moe_buffer_free(&text);
    moe_buffer_free(&experts);
    moe_model_free(&built);
}

static void run_table(net_case *c, int kernels) {
    moe_error error;
    moe_net_pass inferred;
    if (!CHECKF(moe_net_load(&c->net, path_of(c, "net", ".safetensors"), 1, kernels, NULL, &error) == MOE_OK, "%s",
                error.message))
        return;
    read_call(c);
    if (forward(c, &c->net, &c->call, &c->pass)) {
        c->dx = take_reals(c->call.n_tokens * (size_t)c->net.d_in);
        if (c->call.training) CHECK_STATUS(moe_net_backward(&c->net, c->dy, c->dx, &c->pass), MOE_OK);
        compare_all(c, 0);
        if (run_inference(c, &c->net, &inferred)) {
            c->y = inferred.y;
            decode(c);
            packed(c);
            if (kernels == MOE_KERNELS_AUTO) {
                save(c);
                export_integers(c, MOE_WEIGHTS_INT8, "int8");
                export_integers(c, MOE_WEIGHTS_INT4, "int4");
            }
        }
        if (c->call.training) {
            CHECK_STATUS(moe_net_observe(&c->net, &c->pass), MOE_OK);
            CHECK_STATUS(moe_net_advance(&c->net), MOE_OK);
            compare_all(c, 1);
        }
    }
    moe_net_free(&c->net);
}

static void run_seed(const char *folder, long seed) {
    static char name[40];
    const moe_kernels *chosen = moe_kernels_select(MOE_KERNELS_AUTO);
    net_case c;
    moe_error error;
    FILE *file;
    int kernels;
    pool_used = 0;
    memset(&c, 0, sizeof c);
    c.folder = folder;
    c.seed = seed;
    moe_rng_seed(&c.rng, (uint64_t)seed);
    if ((file = fopen(path_of(&c, "call", ".safetensors"), "rb")) == NULL) return;
    fclose(file);
    sprintf(name, "seed %ld", seed);
    test_case(name);
    n_cases++;
    if (CHECKF(moe_file_read(path_of(&c, "call", ".safetensors"), &c.bytes, &error) == MOE_OK &&
                   moe_file_open(&c.file, c.bytes.data, c.bytes.size, &error) == MOE_OK,
               "%s", error.message)) {
        for (kernels = 0; kernels < MOE_KERNELS_COUNT; kernels++) {
            if (kernels > 0 && (moe_kernels_select(kernels) == NULL || moe_kernels_select(kernels) == chosen)) continue;
            test_about = moe_kernels_name(kernels);
            run_table(&c, kernels);
        }
    }
    moe_buffer_free(&c.bytes);
}

int main(int argc, char **argv) {
    long seed, end;
    if (argc != 4) {
        fprintf(stderr, "usage: nets FOLDER FIRST COUNT\n");
        return 2;
    }
    pool = (unsigned char *)malloc(POOL);
    if (pool == NULL) return 2;
    seed = strtol(argv[2], NULL, 10);
    for (end = seed + strtol(argv[3], NULL, 10); seed < end; seed++) run_seed(argv[1], seed);
    printf("%ld networks, %ld tensors compared, %ld tokens decoded, %ld inference models\n", n_cases, n_tensors,
           n_decoded, n_models);
    free(pool);
    return test_end();
}
