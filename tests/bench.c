/* bench.c - what things cost: tables of times, each beside the bound that it must keep. A bench is a row of the table at the end.

     cc -std=c99 -O2 -I. tests/bench.c -o bench -lm && ./bench [-n ROUNDS] [NAME...]      (-h explains)

   Times are those of one thread's processor, so that other programs on the machine disturb little. What is compared runs in turn, round by
   round, and each round gives a ratio of its own: the clock may drift between rounds. Exit status 1 if a bound was missed. */

#if defined(__unix__) || defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#endif

#define MOE_IMPLEMENTATION
#include "../moe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static long passed, failed;
static int rounds = 21;

/* ---- tools -------------------------------------------------------------------------------------------------------------------- */

/* Processor time in seconds where the system tells it in nanoseconds, else what there is. */
static double seconds(void) {
#if defined(CLOCK_PROCESS_CPUTIME_ID)
    struct timespec now;
    if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now) == 0) return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
#elif defined(TIME_UTC)
    struct timespec now;
    if (timespec_get(&now, TIME_UTC) == TIME_UTC) return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
#endif
    return (double)clock() / (double)CLOCKS_PER_SEC;
}

static void *grab(size_t count, size_t size) {
    void *p = calloc(count > 0 ? count : 1, size);
    if (p == NULL) {
        fprintf(stderr, "bench: out of memory\n");
        exit(2);
    }
    return p;
}

static moe_real *normals(size_t count, moe_rng *rng) {
    moe_real *v = (moe_real *)grab(count, sizeof *v);
    size_t i;
    for (i = 0; i < count; i++) v[i] = moe_rng_normal(rng);
    return v;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Sorts v; the value below which that share of them lies. */
static double quantile(double *v, int n, double share) {
    qsort(v, (size_t)n, sizeof *v, ascending);
    return v[(int)(share * (n - 1) + 0.5)];
}

static double median(double *v, int n) { return quantile(v, n, 0.5); }

/* ---- the machine's peak: fused multiply-adds between registers, nothing else ----------------------------------------------------- */

#if defined(MOEI_HAVE_AVX2) && (defined(__GNUC__) || defined(__clang__))
#define PEAK_OF "AVX2"

/* Twelve sums hide the latency of two instructions in every clock. */
__attribute__((target("avx2,fma"))) static double peak_gflops(void) {
    enum { SUMS = 12, LANES = 8, STEPS = 100000 };
    const __m256 factor = _mm256_set1_ps(0.999f), term = _mm256_set1_ps(1e-3f);
    volatile float sink;
    float lanes[LANES];
    double start;
    __m256 s0 = _mm256_set1_ps(0.0f), s1 = _mm256_set1_ps(0.1f), s2 = _mm256_set1_ps(0.2f), s3 = _mm256_set1_ps(0.3f); /* no two alike */
    __m256 s4 = _mm256_set1_ps(0.4f), s5 = _mm256_set1_ps(0.5f), s6 = _mm256_set1_ps(0.6f), s7 = _mm256_set1_ps(0.7f);
    __m256 s8 = _mm256_set1_ps(0.8f), s9 = _mm256_set1_ps(0.9f), sa = _mm256_set1_ps(1.0f), sb = _mm256_set1_ps(1.1f);
    int i;
    if ((moe_cpu_features() & MOE_CPU_AVX2) == 0 || (moe_cpu_features() & MOE_CPU_FMA) == 0) return 0.0;
    start = seconds();
    for (i = 0; i < STEPS; i++) {
        s0 = _mm256_fmadd_ps(s0, factor, term), s1 = _mm256_fmadd_ps(s1, factor, term), s2 = _mm256_fmadd_ps(s2, factor, term);
        s3 = _mm256_fmadd_ps(s3, factor, term), s4 = _mm256_fmadd_ps(s4, factor, term), s5 = _mm256_fmadd_ps(s5, factor, term);
        s6 = _mm256_fmadd_ps(s6, factor, term), s7 = _mm256_fmadd_ps(s7, factor, term), s8 = _mm256_fmadd_ps(s8, factor, term);
        s9 = _mm256_fmadd_ps(s9, factor, term), sa = _mm256_fmadd_ps(sa, factor, term), sb = _mm256_fmadd_ps(sb, factor, term);
    }
    start = seconds() - start;
    s0 = _mm256_add_ps(_mm256_add_ps(s0, s1), _mm256_add_ps(s2, s3));
    s4 = _mm256_add_ps(_mm256_add_ps(s4, s5), _mm256_add_ps(s6, s7));
    s8 = _mm256_add_ps(_mm256_add_ps(s8, s9), _mm256_add_ps(sa, sb));
    _mm256_storeu_ps(lanes, _mm256_add_ps(s0, _mm256_add_ps(s4, s8)));
    sink = lanes[0];
    (void)sink;
    return 2e-9 * SUMS * LANES * STEPS / start;
}
#else
#define PEAK_OF ""
static double peak_gflops(void) { return 0.0; } /* not known */
#endif

/* ---- routers: a whole layer against the plain top-k layer --------------------------------------------------------------------------- */

typedef struct row {
    const char *name;
    const char *settings; /* on top of the table's own */
    double bound;         /* most time, as a multiple of the plain layer's; 0: for information */
    int times_arithmetic; /* 1: the bound is multiplied by the method's arithmetic */
    int more;             /* so many times the rounds, for a bound as near as the noise of one round; 0: 1 */
} row;

/* Bounds: 1.05 times the arithmetic where it is large, 1.01 in all where it is next to nothing. */
static const row small_rows[] = {
    {"plain, against itself", "", 0, 0, 9},
    {"similarity", "refine=similarity", 1.05, 1, 0},
    {"similarity, causal", "refine=similarity causal=1", 1.05, 1, 0},
    {"similarity, unit vectors", "refine=similarity similarity_scale=l2", 0, 0, 0},
    {"similarity, lower entropy", "refine=similarity lower_entropy_only=1", 0, 0, 0},
    {"attention, one head", "refine=attention heads=1 attention_heads=fixed", 1.05, 1, 0},
    {"attention, one head, causal", "refine=attention heads=1 attention_heads=fixed causal=1", 0, 0, 0},
    {"attention, surest of 8 heads", "refine=attention heads=8 attention_heads=min_entropy", 0, 0, 0},
    {"attention, all of 8 heads", "refine=attention heads=8 attention_heads=all", 0, 0, 0},
    {"adaptive clustering", "input=adaptive_clustering", 1.01, 0, 9},
    {"adaptive clustering, mix 2", "input=adaptive_clustering ac_mix=2", 0, 0, 0},
    {"adaptive clustering, as code", "input=adaptive_clustering ac_mode=code", 0, 0, 0},
    {"cosine", "score=cosine", 1.01, 0, 9},
    {"cosine, projected to 8", "score=cosine cosine_dim=8", 0, 0, 0},
    {"mlp", "score=mlp", 0, 0, 0},
    {"noisy top-k, in evaluation", "noise=noisy_topk", 0, 0, 0},
    {"sinkhorn, in evaluation", "select=sinkhorn", 0, 0, 0},
    {"expert choice", "select=expert_choice capacity_factor=2", 0, 0, 0},
    {"top-p", "select=top_p top_p=0.3", 0, 0, 0},
    {"grouped top-k", "select=grouped_top_k groups=4 groups_kept=2", 0, 0, 0},
    {"hash", "select=hash table_size=1024", 0, 0, 0},
    {"affinity", "select=affinity", 0, 0, 0},
    {"soft, one slot per token", "select=soft slots=32", 0, 0, 0},
    {NULL, NULL, 0, 0, 0},
};

/* Equal parameters: d_wide = (3 d d_ff - d_low d) / (d_low + 2 d) = 3840 for d 768, d_ff 3072, d_low 256. */
static const row large_rows[] = {
    {"plain, against itself", "", 0, 0, 0},
    {"autonomy of experts", "score=norm weight=softmax expert=factorised d_low=256 d_ff=3840", 1.12, 0, 0},
    {NULL, NULL, 0, 0, 0},
};

enum { TOKENS = 512, HEADS = 8, IDS = 1024 };

/* Everything that a call of some router asks for. */
typedef struct surroundings {
    moe_call call;
    moe_real *x, *previous, *previous_weights, *attention, *outputs, *y;
    int32_t *previous_experts, *ids;
} surroundings;

/* Every token pays attention to all, most to itself; head h is the surer the larger h is. */
static void surround_attention(surroundings *s, size_t d, moe_rng *rng) {
    size_t h, i, j;
    s->attention = normals((size_t)HEADS * TOKENS * TOKENS, rng);
    s->outputs = normals((size_t)HEADS * TOKENS * d, rng);
    for (h = 0; h < HEADS; h++)
        for (i = 0; i < TOKENS; i++) {
            moe_real *a = s->attention + (h * TOKENS + i) * TOKENS, *o = s->outputs + (h * TOKENS + i) * d;
            a[i] += (moe_real)(2 + h);
            moe_softmax(NULL, TOKENS, a, 1, a);
            for (j = 0; j < d; j++) o[j] = s->x[i * d + j] + (moe_real)0.2 * o[j];
        }
}

static void surround(surroundings *s, size_t d, moe_rng *rng) {
    size_t i;
    memset(s, 0, sizeof *s);
    s->x = normals(TOKENS * d, rng);
    s->y = (moe_real *)grab(TOKENS * d, sizeof *s->y);
    s->previous = normals(TOKENS * d, rng);
    s->previous_experts = (int32_t *)grab(TOKENS * 2, sizeof *s->previous_experts);
    s->previous_weights = (moe_real *)grab(TOKENS * 2, sizeof *s->previous_weights);
    s->ids = (int32_t *)grab(TOKENS, sizeof *s->ids);
    for (i = 0; i < TOKENS; i++) {
        s->ids[i] = (int32_t)moe_rng_below(rng, IDS);
        s->previous_experts[2 * i] = (int32_t)moe_rng_below(rng, 8), s->previous_experts[2 * i + 1] = (int32_t)(8 + moe_rng_below(rng, 8));
        s->previous_weights[2 * i] = moe_rng_uniform(rng), s->previous_weights[2 * i + 1] = moe_rng_uniform(rng);
    }
    surround_attention(s, d, rng);
    s->call.n_tokens = TOKENS, s->call.x = s->x, s->call.token_ids = s->ids;
    s->call.previous_input = s->previous, s->call.previous_experts = s->previous_experts, s->call.previous_weights = s->previous_weights;
    s->call.n_previous = 2, s->call.attention_weights = s->attention, s->call.attention_outputs = s->outputs;
}

static void surroundings_free(surroundings *s) {
    free(s->x), free(s->y), free(s->previous), free(s->previous_experts), free(s->previous_weights);
    free(s->ids), free(s->attention), free(s->outputs);
}

/* A layer with its tensors and work memory. */
typedef struct bed {
    moe_layer layer;
    moe_real *values[MOE_LAYER_SLOTS]; /* its own tensors; the rest it shares with the plain layer */
    void *work;
    size_t work_size;
    double pairs, load; /* pairs per token; the largest load of an expert over the mean */
} bed;

/* For hash: token id i goes to experts i, i + 1, ...; for all else random numbers. */
static moe_real *fill(const moe_slot *slot, int place, size_t experts, moe_rng *rng) {
    moe_real *v = normals(slot->count, rng);
    size_t i, columns = slot->shape[1];
    for (i = 0; i < slot->count; i++)
        v[i] = place == MOE_ROUTER_TABLE ? (moe_real)((i / columns + i % columns) % experts) : slot->init_value + slot->init_spread * v[i];
    return v;
}

/* The same experts at the same addresses as in the plain layer wherever the shapes allow: what differs is the router. Every layer's tensors
   start from the same seed, so a linear score is the plain layer's too. */
static moe_status bed_make(bed *b, const char *base, const char *settings, const bed *plain, moe_error *error) {
    moe_layer_config config;
    moe_status status;
    moe_slot slot;
    moe_rng rng = {7};
    int place;
    memset(b, 0, sizeof *b);
    memset(&config, 0, sizeof config);
    status = moe_fields_apply(moe_layer_fields(), &config, base, error);
    if (status == MOE_OK) status = moe_fields_apply(moe_layer_fields(), &config, settings, error);
    if (status == MOE_OK) status = moe_layer_init(&b->layer, &config, error);
    if (status != MOE_OK) return status;
    for (place = 0; place < MOE_LAYER_SLOTS; place++) {
        if (moe_layer_slot(&b->layer.config, place, &slot) != MOE_OK) continue;
        if (plain != NULL && place >= MOE_ROUTER_SLOTS && plain->layer.config.d_ff == b->layer.config.d_ff)
            b->layer.tensors[place] = plain->layer.tensors[place];
        if (b->layer.tensors[place] == NULL)
            b->layer.tensors[place] = b->values[place] = fill(&slot, place, (size_t)config.router.n_experts, &rng);
    }
    status = moe_layer_work_size(&b->layer, TOKENS, 0, &b->work_size);
    if (status == MOE_OK) b->work = grab(b->work_size, 1);
    return status;
}

static void bed_free(bed *b) {
    int place;
    for (place = 0; place < MOE_LAYER_SLOTS; place++) free(b->values[place]);
    free(b->work);
    memset(b, 0, sizeof *b);
}

static double forward_seconds(bed *b, surroundings *s) {
    const double start = seconds();
    const moe_status status = moe_layer_forward(&b->layer, &s->call, s->y, b->work, b->work_size, NULL);
    const double taken = seconds() - start;
    return status == MOE_OK ? taken : -1.0;
}

/* A first call: who went where. */
static moe_status bed_look(bed *b, surroundings *s) {
    moe_layer_pass pass;
    const moe_status status = moe_layer_forward(&b->layer, &s->call, s->y, b->work, b->work_size, &pass);
    const size_t experts = (size_t)b->layer.config.router.n_experts;
    size_t e, most = 0, all;
    if (status != MOE_OK) return status;
    all = pass.routing.plan.offsets[experts];
    for (e = 0; e < experts; e++) {
        const size_t load = pass.routing.plan.offsets[e + 1] - pass.routing.plan.offsets[e];
        if (load > most) most = load;
    }
    b->pairs = (double)(pass.routing.plan.rows > 0 ? pass.routing.plan.rows * experts : all) / TOKENS; /* soft: rows that experts work on */
    b->load = all > 0 ? (double)most * (double)experts / (double)all : 0.0;
    return status;
}

/* Multiplications per token that the method asks for: sums along d, d_ff and d_low, for the pairs that were made. The smaller rest
   (softmax, entropies, S r, selection) counts as overhead. */
static double multiplications(const bed *b) {
    const moe_layer_config *c = &b->layer.config;
    const double d = c->router.d_model, experts = c->router.n_experts, f = c->d_ff, low = c->d_low, r = c->router.cosine_dim;
    const double h = c->router.router_hidden > 0 ? c->router.router_hidden : d;
    const double slots = experts * c->router.slots, heads = c->router.attention_heads == MOE_HEADS_ALL ? c->router.heads : 1.0;
    const double seen = c->router.causal ? 0.5 * (TOKENS + 1) : 1.0 * TOKENS;
    double count = 0;
    switch (c->router.score) {
    case MOE_SCORE_MLP: count += h * (d + experts); break;
    case MOE_SCORE_COSINE: count += r > 0 ? d * r + r * (experts + 1) : d * (experts + 1); break;
    case MOE_SCORE_NORM: count += d * low * experts; break;
    default: count += d * experts; break;
    }
    if (c->router.select == MOE_SELECT_SOFT) count = 3 * d * slots;
    if (c->router.input == MOE_INPUT_ADAPTIVE_CLUSTERING) count += d * c->router.ac_mix;
    if (c->router.refine == MOE_REFINE_SIMILARITY) count += d * seen;
    if (c->router.refine == MOE_REFINE_ATTENTION) count += d * seen * heads;
    if (c->expert == MOE_EXPERT_FACTORISED) return count + b->pairs * f * (low + 2 * d); /* reduce x is the score's */
    return count + b->pairs * 3 * d * f;
}

/* The plain layer before and after each call, so that a clock that drifts weighs on both. Returns 0 when a call failed. */
static int race(bed *plain, bed *other, surroundings *s, int n, double *ratios, double *times) {
    double before = forward_seconds(plain, s), after;
    int i;
    for (i = 0; i < n; i++, before = after) {
        times[i] = forward_seconds(other, s);
        after = forward_seconds(plain, s);
        if (before <= 0.0 || after <= 0.0 || times[i] <= 0.0) return 0;
        ratios[i] = 2.0 * times[i] / (before + after);
    }
    return 1;
}

static void print_row(const row *r, const bed *b, double arithmetic, int n, double *ratios, double *times) {
    const double ratio = median(ratios, n), bound = r->times_arithmetic ? r->bound * arithmetic : r->bound;
    printf("%-28s %5.2f %5.2f %7.2f %6.3f %6.3f %6.3f %6.3f %6.3f", r->name, b->pairs, b->load, 1e3 * median(times, n), arithmetic, ratio,
           quantile(ratios, n, 0.1), quantile(ratios, n, 0.9), ratio / arithmetic);
    if (bound > 0) {
        printf(" %6.3f %s", bound, ratio <= bound ? "ok" : "MISSED");
        if (ratio <= bound) passed++;
        else failed++;
    }
    printf("\n");
    fflush(stdout);
}

static void print_failure(const char *what, moe_status status, const moe_error *error) {
    printf("%s: failed: %s%s%s\n", what, moe_status_text(status), error->message[0] != '\0' ? ": " : "", error->message);
    failed++;
}

static void route_row(const row *r, const char *base, bed *plain, surroundings *s) {
    const int n = r->more > 0 ? r->more * rounds : rounds;
    double *ratios = (double *)grab((size_t)n, sizeof *ratios), *times = (double *)grab((size_t)n, sizeof *times);
    moe_error error = {MOE_OK, ""};
    bed b;
    moe_status status = bed_make(&b, base, r->settings, plain, &error);
    if (status == MOE_OK) status = bed_look(&b, s);
    if (status == MOE_OK && !race(plain, &b, s, n, ratios, times)) status = MOE_ERR_STATE;
    if (status == MOE_OK) print_row(r, &b, multiplications(&b) / multiplications(plain), n, ratios, times);
    else print_failure(r->name, status, &error);
    bed_free(&b);
    free(ratios), free(times);
}

/* How near the plain layer comes to the machine's peak, both measured in turn. */
static void print_speed(bed *plain, surroundings *s) {
    double *speeds = (double *)grab((size_t)rounds, sizeof *speeds), *peaks = (double *)grab((size_t)rounds, sizeof *peaks), speed, peak;
    int i;
    for (i = 0; i < rounds; i++) {
        speeds[i] = 2e-9 * TOKENS * multiplications(plain) / forward_seconds(plain, s);
        peaks[i] = peak_gflops();
    }
    speed = median(speeds, rounds), peak = median(peaks, rounds);
    printf("\nplain layer: %.1f GFLOP/s", speed);
    if (peak > 0.0) printf(", %.0f %% of the %.1f that " PEAK_OF " multiply-adds reach here\n\n", 100.0 * speed / peak, peak);
    else printf("\nskip: the machine's peak is measured on x86 only, by gcc and clang\n\n");
    free(speeds), free(peaks);
}

/* All rows at one size. */
static void route_table(const char *base, const row *rows) {
    surroundings s;
    moe_error error = {MOE_OK, ""};
    moe_rng rng = {1};
    bed plain;
    moe_status status = bed_make(&plain, base, "", NULL, &error);
    memset(&s, 0, sizeof s);
    if (status == MOE_OK) {
        surround(&s, (size_t)plain.layer.config.router.d_model, &rng);
        status = bed_look(&plain, &s);
    }
    if (status == MOE_OK) {
        printf("%s: %d tokens, kernels %s, %d rounds or more\n\n", base, (int)TOKENS, plain.layer.kernels->name, rounds);
        printf("%-28s %5s %5s %7s %6s %6s %6s %6s %6s %6s\n", "router", "pairs", "load", "ms", "arith", "time", "p10", "p90", "/arith",
               "bound");
        for (; rows->name != NULL; rows++) route_row(rows, base, &plain, &s);
        print_speed(&plain, &s);
    } else
        print_failure(base, status, &error);
    surroundings_free(&s);
    bed_free(&plain);
}

static void bench_routers(void) {
    printf("Routers: a whole layer's forward pass, as a multiple of the plain top-k layer's.\n"
           "  pairs     experts per token            load     the largest load of an expert over the mean\n"
           "  ms        median                       arith    multiplications that the method asks for\n"
           "  time      median of the rounds, p10 and p90: the spread; bound is the most that time may be\n\n");
    route_table("d_model=352 d_ff=352 n_experts=16 top_k=2", small_rows);
    route_table("d_model=768 d_ff=3072 n_experts=8 top_k=2", large_rows);
}

/* ---- all benches ------------------------------------------------------------------------------------------------------------------- */

static const struct bench {
    const char *name;
    void (*run)(void);
    const char *about;
} benches[] = {
    {"routers", bench_routers, "what each router adds to the time of a layer"},
};

enum { BENCHES = sizeof benches / sizeof benches[0] };

static void help(void) {
    int i;
    printf("bench [-n ROUNDS] [NAME...]\n"
           "Measures; without a NAME everything. The last line is \"N passed, M failed\": the bounds that hold, and those that do not.\n"
           "-n ROUNDS: how often each comparison is made, 15 to 1000 (%d). A NAME is one of\n",
           rounds);
    for (i = 0; i < BENCHES; i++) printf("  %-12s %s\n", benches[i].name, benches[i].about);
}

int main(int argc, char **argv) {
    int wanted[BENCHES] = {0}, all = 1, i, b;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) return help(), 0;
        if (strcmp(argv[i], "-n") == 0) {
            rounds = i + 1 < argc ? atoi(argv[++i]) : 0;
            if (rounds < 15 || rounds > 1000) return fprintf(stderr, "bench: -n needs a number of rounds from 15 to 1000\n"), 2;
            continue;
        }
        for (b = 0; b < BENCHES && strcmp(argv[i], benches[b].name) != 0; b++) continue;
        if (b == BENCHES) return fprintf(stderr, "bench: there is no bench %s; bench -h lists them\n", argv[i]), 2;
        wanted[b] = 1, all = 0;
    }
    for (b = 0; b < BENCHES; b++)
        if (all || wanted[b]) benches[b].run();
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0 || passed == 0;
}
