/* ranks.c - layers whose experts live on several ranks, against the same layer in one process:
   every rank is a thread (tests/unit/ranks.h).

     cc -std=c99 -O2 -I. tests/unit/ranks.c -o ranks -pthread -lm && ./ranks
     (also with -DMOE_REAL=double and with -DMOE_NO_SIMD)

   A scene is a layer and a batch that is spread over ranks. It is played twice, by one process with
   the whole batch and by the ranks with their parts (local routing: by one process with the parts
   one after another), and what comes out must be the same: to the bit with the plain C kernels,
   else within rounding. Other tests are about what goes wrong, on a rank or between ranks, and what
   is refused. Without POSIX threads all is skipped. `ranks NAME` plays the tests whose names begin
   so, `ranks quick` a part of all. Exit status 1 if a check failed. */

#if !defined(_POSIX_C_SOURCE) && !defined(__APPLE__)
#define _POSIX_C_SOURCE 200112L
#endif
#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__has_include)
#if __has_include(<pthread.h>)
#define HAVE_THREADS 1
#endif
#elif defined(__unix__)
#define HAVE_THREADS 1
#endif

#ifndef HAVE_THREADS
int main(void) {
    printf("skip: POSIX threads are not there\n0 passed, 0 failed, 1 skipped\n");
    return 0;
}
#else
#include "ranks.h"

#if MOE_REAL_IS_DOUBLE
#define EPSILON 2.3e-16
#else
#define EPSILON 1.2e-7
#endif

enum { MOST_STEPS = 4, MOST_TOKENS = 64, HEADS = 2, PREVIOUS = 2, IDS = 11, NAME_SIZE = 200 };

static int quick;             /* 1: one scene in six, for patient tools */
static moe_rng rng;

static int below(int n) { return (int)moe_rng_below(&rng, (uint64_t)n); }

static moe_real *zeros(size_t count) { return (moe_real *)grab(count, sizeof(moe_real)); }

static moe_real *normals(size_t count, double size) {
    moe_real *v = zeros(count);
    size_t i;
    for (i = 0; i < count; i++) v[i] = (moe_real)size * moe_rng_normal(&rng);
    return v;
}

static int32_t *integers(size_t count, int limit) {
    int32_t *v = (int32_t *)grab(count, sizeof *v);
    size_t i;
    for (i = 0; i < count; i++) v[i] = below(limit);
    return v;
}

static void *copy_of(const void *from, size_t count, size_t size) {
    void *p = grab(count, size);
    if (count > 0 && from != NULL) memcpy(p, from, count * size);
    return p;
}

/* Tasks one after the other, the last first. */
static void backwards(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    int i;
    (void)ctx;
    for (i = count - 1; i >= 0; i--) task(work, i);
}

/* ---- scenes ---- */

/* What a batch has beside what its router asks for. */
enum {
    WITH_MASK = 1,
    WITH_SEQUENCES = 2, /* several on a rank, one of them empty */
    WITH_ROUTER_X = 4,
    WITH_NOISE = 8, /* noise and jitter are supplied, not drawn */
    WITH_TEAM = 16,
    WITH_LATE = 32,   /* the step is beyond all schedules */
    WITH_CROWD = 64,  /* all tokens lean to one side, so that few experts are wanted */
    WITH_GIVEN = 128, /* replay */
    WITH_LAST = 256,  /* replay of choices that are all among the last two experts */
    WITH_PACKED = 512,
    WITH_HOME = 1024,
    WITH_DISTANCES = 2048,
    WITH_KEEP = 4096,
    WITH_ROOM = 8192,     /* workspace for more tokens than there are */
    WITH_PADDING = 16384, /* nothing else */
    WITH_NO_DX = 32768,   /* odd ranks want no gradient of x, and count no traffic */
    WITH_FILE = 65536,    /* the layer is written and read again */
    WITH_NULLS = 131072,  /* ranks without tokens have no arrays */
    WITH_FROZEN = 262144  /* some tensors want no gradient */
};

/* A layer, a batch on ranks, and how rows travel. */
typedef struct scene {
    const char *name;
    moe_layer_config config;
    int ranks, training, steps;
    int routes; /* 1: moe_route alone with a moe_batch of the test's own, no layer with a transport */
    size_t n_of[RANKS_MOST];
    unsigned with;
    int chunks, two_level, per_node, moving;
    int type;           /* MOE_TYPE_ that the weights are packed to */
    int local_routing;          /* 1: every rank routes its own tokens */
    int spoil, spoiler; /* the first step goes wrong in this way at this rank */
    int fail_rank, fail_late;
    unsigned long fail_at; /* of the transport's calls at that rank; 0: none */
    unsigned long lie_at;  /* this rank receives a wrong number there */
    size_t lie_word;
    uint64_t lie;
    uint64_t seed;
} scene;

/* What may go wrong at one rank. */
enum {
    SPOIL_NOT = 0,
    SPOIL_NAN,
    SPOIL_NO_X,
    SPOIL_WORK,
    SPOIL_SEQUENCES,
    SPOIL_SUPPLY,
    SPOIL_RNG,
    SPOIL_TENSOR,
    SPOIL_EXPERT,
    SPOIL_Y,
    SPOIL_DECODING,
    SPOIL_WORK_NULL,
    SPOIL_DY,
    SPOIL_STATE,
    SPOIL_PAST,
    SPOIL_BATCH,
    SPOIL_UNLIKE,
    SPOIL_SCORE, /* its score_backward fails */
    SPOIL_COUNT
};

/* The tokens of all ranks, or of one. The arrays are of the call's own size. */
typedef struct tokens {
    moe_call call;
    moe_real *x, *router_x, *dy, *noise, *jitter, *previous_input, *previous_weights, *attention, *outputs, *output,
        *teacher;
    moe_real *distances, *nodes_read; /* of the whole batch; [E,N,width] activations for a router alone */
    moe_real *d_attention, *d_outputs, *d_output;
    int32_t *sequences, *given, *ids, *previous, *home, *nodes;
    unsigned char *mask;
    moe_parallel team;
} tokens;

typedef struct batch {
    size_t n, most, first[RANKS_MOST + 1], first_sequence[RANKS_MOST];
    tokens whole, part[RANKS_MOST];
} batch;

static size_t given_width(const moe_router_config *c) {
    switch (c->select) {
    case MOE_SELECT_TOP_K:
    case MOE_SELECT_GIVEN:
    case MOE_SELECT_GROUPED_TOP_K:
    case MOE_SELECT_GROUPED_EACH:
    case MOE_SELECT_HASH:
    case MOE_SELECT_SINKHORN:
    case MOE_SELECT_SAMPLE:
    case MOE_SELECT_BALANCED: return (size_t)(c->k_end > c->top_k ? c->k_end : c->top_k);
    default: return (size_t)c->n_experts;
    }
}

/* Choices to replay: some tokens have fewer than the others. */
static int32_t *draw_given(const moe_router_config *c, size_t n, int last) {
    size_t width = given_width(c), most = width < 3 ? width : 3, t, k; /* also for selections that would take one */
    int32_t *given = (int32_t *)grab(n * width, sizeof *given);
    for (t = 0; t < n; t++) {
        const size_t first = last ? (size_t)c->n_experts - 1 : (size_t)below(c->n_experts);
        const size_t count = last ? 1 : (size_t)below((int)most + 1);
        for (k = 0; k < width; k++)
            given[t * width + k] = k < count ? (int32_t)((first + k) % (size_t)c->n_experts) : -1;
    }
    return given;
}

/* Some ranks have one sequence among others that have several; some have no mask among others that
   have one. */
static size_t sequences_of(const scene *s, int rank) {
    return s->with & WITH_SEQUENCES && (s->ranks == 1 || rank % 3 != 1) ? 3 : 1;
}

static int has_mask(const scene *s, int rank) {
    return s->with & WITH_PADDING || (s->with & WITH_MASK && rank % 3 != 2);
}

/* Offsets of the sequences of all ranks, those of a rank next to each other. *count of them. */
static int32_t *draw_sequences(const scene *s, batch *b, size_t *count) {
    int32_t *at = (int32_t *)grab(3 * RANKS_MOST + 1, sizeof *at);
    size_t n = 0;
    int r;
    for (r = 0; r < s->ranks; r++) {
        b->first_sequence[r] = n;
        if (sequences_of(s, r) > 1) {
            at[n++] = (int32_t)b->first[r];
            at[n++] = (int32_t)(b->first[r] + s->n_of[r] / 3);
        }
        at[n++] = (int32_t)(b->first[r] + (sequences_of(s, r) > 1 ? s->n_of[r] / 3 : 0)); /* the one before is empty */
    }
    at[n] = (int32_t)b->n;
    *count = n;
    return at;
}

/* Attention within sequences; 0 between them. */
static moe_real *draw_attention(const tokens *t) {
    size_t n = t->call.n_tokens, h, i, j, s;
    moe_real *a = zeros(HEADS * n * n);
    for (h = 0; h < HEADS; h++)
        for (s = 0; s < t->call.n_sequences; s++)
            for (i = (size_t)t->sequences[s]; i < (size_t)t->sequences[s + 1]; i++) {
                double sum = 0.0;
                for (j = (size_t)t->sequences[s]; j < (size_t)t->sequences[s + 1]; j++)
                    sum += (double)(a[(h * n + i) * n + j] = (moe_real)0.1 + moe_rng_uniform(&rng));
                for (j = (size_t)t->sequences[s]; j < (size_t)t->sequences[s + 1]; j++)
                    a[(h * n + i) * n + j] /= (moe_real)sum;
            }
    return a;
}

static void lean(const scene *s, moe_real *x, size_t n, size_t d) {
    moe_real *side = normals(d, s->with & WITH_CROWD ? 6.0 : 0.7);
    size_t i;
    for (i = 0; i < n * d; i++) x[i] += side[i % d];
    free(side);
}

/* Numbers per expert and token that a score reads. */
static size_t activation_width(const scene *s) {
    return s->config.router.score == MOE_SCORE_ATTENTIVE ? (size_t)s->config.d_ff : 4;
}

/* Points the call at what the router asks for. */
static void wire(const scene *s, tokens *t) {
    const moe_router_config *c = &s->config.router;
    moe_call *call = &t->call;
    call->x = t->x;
    call->mask = t->mask;
    call->training = s->training;
    call->router_x = t->router_x;
    call->given = t->given;
    call->token_ids = t->ids;
    call->noise = t->noise;
    call->jitter = t->jitter;
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        call->previous_input = t->previous_input;
        call->previous_experts = t->previous;
        call->previous_weights = t->previous_weights;
        call->n_previous = PREVIOUS;
    }
    if (c->refine == MOE_REFINE_ATTENTION) {
        call->attention_weights = t->attention;
        call->attention_outputs = t->outputs;
        call->attention_output = t->output;
        if (s->training) {
            call->d_attention_weights = t->d_attention;
            call->d_attention_outputs = t->d_outputs;
            call->d_attention_output = t->d_output;
        }
    }
    call->distances = t->distances;
    if (s->routes && moe_router_traits(c) & MOE_TRAIT_NEEDS_ALL_EXPERTS) {
        call->activations = t->nodes_read;
        call->activation_width = activation_width(s);
    }
    call->token_machine = t->home;
    call->expert_machine = t->nodes;
    call->teacher = t->teacher;
    call->keep = (s->with & WITH_KEEP) != 0;
    if (s->with & WITH_TEAM) {
        t->team.threads = 3;
        t->team.always = 1;
        t->team.run = backwards;
        call->parallel = &t->team;
    }
}

static void draw_whole(const scene *s, batch *b) {
    const moe_router_config *c = &s->config.router;
    tokens *t = &b->whole;
    size_t n = b->n, d = (size_t)c->d_model;
    size_t experts = (size_t)c->n_experts, i;
    int r;
    t->call.n_tokens = n;
    t->sequences = draw_sequences(s, b, &t->call.n_sequences);
    t->call.sequences = t->sequences;
    t->x = normals(n * d, 1.0);
    lean(s, t->x, n, d);
    t->dy = normals(n * (size_t)(s->config.d_out > 0 ? s->config.d_out : c->d_model), 1.0);
    if (s->with & WITH_ROUTER_X) {
        t->router_x = normals(n * d, 1.0);
        lean(s, t->router_x, n, d);
    }
    if (s->with & WITH_MASK) {
        t->mask = (unsigned char *)grab(n, 1);
        for (i = 0; i < n; i++) t->mask[i] = below(4) > 0;
        for (r = 0; r < s->ranks; r++)
            if (!has_mask(s, r) && s->n_of[r] > 0) memset(t->mask + b->first[r], 1, s->n_of[r]);
    }
    if (s->with & WITH_PADDING) t->mask = (unsigned char *)grab(n, 1);
    if (c->select == MOE_SELECT_GIVEN || s->with & (WITH_GIVEN | WITH_LAST))
        t->given = draw_given(c, n, (s->with & WITH_LAST) != 0);
    if (s->with & WITH_NOISE && c->noise != MOE_NOISE_NONE) t->noise = normals(n * experts, 0.5);
    if (s->with & WITH_NOISE && c->input == MOE_INPUT_JITTER) {
        t->jitter = normals(n * d, 0.05);
        for (i = 0; i < n * d; i++) t->jitter[i] += 1;
    }
    t->ids = integers(n, IDS);
    t->previous_input = normals(n * d, 1.0);
    t->previous = integers(n * PREVIOUS, c->n_experts);
    t->previous_weights = zeros(n * PREVIOUS);
    for (i = 0; i < n * PREVIOUS; i++) t->previous_weights[i] = (moe_real)0.1 + moe_rng_uniform(&rng);
    t->attention = draw_attention(t);
    t->outputs = normals(HEADS * n * d, 0.7);
    t->output = normals(n * d, 0.7);
    t->d_attention = zeros(HEADS * n * n);
    t->d_outputs = zeros(HEADS * n * d);
    t->d_output = zeros(n * d);
    if (c->loss_distill > 0 && !c->student) t->teacher = normals(n * experts, 1.0);
    if (s->with & WITH_DISTANCES) {
        t->distances = normals(n * n, 1.0);
        for (i = 0; i < n * n; i++) t->distances[i] = (moe_real)fabs((double)t->distances[i]);
    }
    if (s->routes) t->nodes_read = normals(experts * n * activation_width(s), 1.0);
    if (s->with & WITH_HOME && c->nodes > 1) {
        t->home = integers(n, c->nodes);
        t->nodes = integers(experts, c->nodes);
        for (i = 0; i < (size_t)c->nodes && i < experts; i++) t->nodes[i] = (int32_t)i;
    }
    wire(s, t);
}

/* n rows of `width` numbers from row `from` on. */
static moe_real *rows_of(const moe_real *all, size_t from, size_t n, size_t width) {
    return all != NULL ? (moe_real *)copy_of(all + from * width, n * width, sizeof *all) : NULL;
}

static int32_t *integers_of(const int32_t *all, size_t from, size_t n, size_t width) {
    return all != NULL ? (int32_t *)copy_of(all + from * width, n * width, sizeof *all) : NULL;
}

static void cut_part(const scene *s, batch *b, int r) {
    const moe_router_config *c = &s->config.router;
    const tokens *w = &b->whole;
    tokens *t = &b->part[r];
    size_t n = s->n_of[r], from = b->first[r];
    size_t d = (size_t)c->d_model, experts = (size_t)c->n_experts, h, i, k;
    t->call.n_tokens = n;
    if (sequences_of(s, r) > 1) {
        t->sequences = (int32_t *)grab(4, sizeof *t->sequences);
        for (i = 0; i < 4; i++)
            t->sequences[i] = i == 3 ? (int32_t)n : w->sequences[b->first_sequence[r] + i] - (int32_t)from;
        t->call.sequences = t->sequences;
        t->call.n_sequences = 3;
    }
    t->x = rows_of(w->x, from, n, d);
    t->router_x = rows_of(w->router_x, from, n, d);
    t->dy = rows_of(w->dy, from, n, (size_t)(s->config.d_out > 0 ? s->config.d_out : c->d_model));
    if (has_mask(s, r)) t->mask = (unsigned char *)copy_of(w->mask + from, n, 1);
    t->given = integers_of(w->given, from, n, given_width(c));
    t->noise = rows_of(w->noise, from, n, experts);
    t->jitter = rows_of(w->jitter, from, n, d);
    t->ids = integers_of(w->ids, from, n, 1);
    t->previous_input = rows_of(w->previous_input, from, n, d);
    t->previous = integers_of(w->previous, from, n, PREVIOUS);
    t->previous_weights = rows_of(w->previous_weights, from, n, PREVIOUS);
    t->attention = zeros(HEADS * n * n);
    t->outputs = zeros(HEADS * n * d);
    for (h = 0; h < HEADS; h++) {
        for (i = 0; i < n; i++)
            for (k = 0; k < n; k++)
                t->attention[(h * n + i) * n + k] = w->attention[(h * b->n + from + i) * b->n + from + k];
        if (n > 0) memcpy(t->outputs + h * n * d, w->outputs + (h * b->n + from) * d, n * d * sizeof(moe_real));
    }
    t->output = rows_of(w->output, from, n, d);
    t->d_attention = zeros(HEADS * n * n);
    t->d_outputs = zeros(HEADS * n * d);
    t->d_output = zeros(n * d);
    if (w->distances != NULL) t->distances = rows_of(w->distances, 0, b->n, b->n);
    if (s->routes) {
        t->nodes_read = zeros(experts * n * activation_width(s));
        for (i = 0; i < experts && n > 0; i++)
            memcpy(t->nodes_read + i * n * activation_width(s), w->nodes_read + (i * b->n + from) * activation_width(s),
                   n * activation_width(s) * sizeof(moe_real));
    }
    t->teacher = rows_of(w->teacher, from, n, experts);
    t->home = integers_of(w->home, from, n, 1);
    t->nodes = integers_of(w->nodes, 0, experts, 1);
    wire(s, t);
}

/* A call of no tokens may be {0}, but for what is said of the whole batch. */
static void leave_out(tokens *t) {
    moe_call bare;
    memset(&bare, 0, sizeof bare);
    bare.training = t->call.training;
    bare.keep = t->call.keep;
    bare.distances = t->call.distances;
    bare.expert_machine = t->call.expert_machine;
    t->call = bare;
}

static void batch_begin(const scene *s, batch *b) {
    int r;
    memset(b, 0, sizeof *b);
    for (r = 0; r < s->ranks; r++) {
        b->first[r + 1] = b->first[r] + s->n_of[r];
        if (s->n_of[r] > b->most) b->most = s->n_of[r];
    }
    b->n = b->first[s->ranks];
    moe_rng_seed(&rng, s->seed);
    draw_whole(s, b);
    for (r = 0; r < s->ranks; r++) {
        cut_part(s, b, r);
        if (s->n_of[r] == 0 && s->with & WITH_NULLS) leave_out(&b->part[r]);
    }
}

static void tokens_end(tokens *t) {
    free(t->x);
    free(t->router_x);
    free(t->dy);
    free(t->noise);
    free(t->jitter);
    free(t->previous_input);
    free(t->previous_weights);
    free(t->attention);
    free(t->outputs);
    free(t->output);
    free(t->teacher);
    free(t->d_attention);
    free(t->d_outputs);
    free(t->d_output);
    free(t->distances);
    free(t->nodes_read);
    free(t->sequences);
    free(t->given);
    free(t->ids);
    free(t->previous);
    free(t->home);
    free(t->nodes);
    free(t->mask);
}

static void batch_end(const scene *s, batch *b) {
    int r;
    tokens_end(&b->whole);
    for (r = 0; r < s->ranks; r++) tokens_end(&b->part[r]);
}

/* ---- one player: the single process, or a rank ---- */

/* What one step computes, in copies. */
typedef struct result {
    moe_status status, back, observed, advanced;
    moe_error error; /* of forward and backward */
    moe_real *y, *dx, *d_router_x;
    moe_real *gradients, *state; /* of all tensors, in their order */
    moe_real *d_attention, *d_outputs, *d_output;
    moe_real *d_activations;   /* of a router alone [E,n,width] */
    uint64_t draws;      /* where the random numbers are */
    moe_routing routing; /* its arrays are copies as well; u is NULL */
    moe_assignment *entries;
    size_t *offsets;
    moe_status owned; /* of the routing of the own tokens: */
    size_t own_real, own_dropped, own_tokens;
    moe_real *clean_logits; /* [own_tokens,E] routing.clean_logits */
    double pairs, dropped, tokens, logits; /* of its metrics */
    int32_t *recorded;                     /* its choices */
} result;

/* One that plays: its layer and what it computed. */
typedef struct player {
    int rank; /* -1: the single process */
    ranks_rank *self;
    size_t first, total;      /* tokens of ranks before this one, of all */
    unsigned long made_after; /* calls of the transport until the layer was made */
    moe_transport transport;
    moe_traffic traffic;
    uint64_t rows[RANKS_MOST], bytes[RANKS_MOST];
    moe_layer layer;
    moe_status begun, made, sized, packed;
    moe_error error;
    const moe_real *kept; /* a tensor that is taken away for a while, a number that is replaced */
    moe_real kept_x;
    moe_batch other;               /* {0} */
    moe_real *start;               /* the tensors as they were made */
    size_t count;                  /* parameter count */
    const moe_buffer *file_of_all; /* rank 0's */
    moe_buffer file;               /* the layer as it was written; on ranks that of rank 0 */
    moe_status written, reread;
    moe_real *again; /* the tensors of the layer that was read */
    size_t again_count;
    long blocks; /* that its allocator has given and not got back */
    result results[MOST_STEPS];
} player;

static void *counted_resize(void *ctx, void *block, size_t old_size, size_t new_size) {
    long *blocks = (long *)ctx;
    void *p;
    (void)old_size;
    if (new_size == 0) {
        if (block != NULL) --*blocks;
        free(block);
        return NULL;
    }
    p = realloc(block, new_size);
    if (p != NULL && block == NULL) ++*blocks;
    return p;
}

static size_t tensor_numbers(const moe_layer *layer) {
    moe_tensor t;
    size_t count = 0, i;
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++) count += t.count;
    return count;
}

/* All tensors, or all gradients, one behind the other; state: those of state alone, the others
   0. */
static moe_real *tensors_of(const moe_layer *layer, int gradients, int state) {
    moe_real *all = zeros(tensor_numbers(layer));
    moe_tensor t;
    size_t at = 0, i;
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; at += t.count, i++)
        if ((!state || t.flags & MOE_PARAM_STATE) && (!gradients || t.gradient != NULL))
            memcpy(all + at, gradients ? t.gradient : t.data, t.count * sizeof *all);
    return all;
}

static int is_of_experts(const scene *s, const char *name) { return !s->routes && strncmp(name, "experts.", 8) == 0; }

/* Where tensor i of a rank's layer lies in that of the whole. */
static size_t rows_before(const scene *s, int rank, const moe_tensor *t) {
    size_t first = 0, count = 0;
    if (rank < 0 || !is_of_experts(s, t->name)) return 0;
    moe_rank_part((size_t)s->config.router.n_experts, rank, s->ranks, &first, &count);
    return count > 0 ? first * (t->count / count) : 0;
}

static moe_real small_noise(uint64_t seed, size_t tensor, size_t i) {
    moe_rng own;
    moe_rng_seed(&own, seed * 1000003u + tensor * 7919u + i * UINT64_C(0x9E3779B97F4A7C15));
    return moe_rng_uniform(&own) - (moe_real)0.5;
}

/* Changes all that is learned, in the single process and on all ranks alike: what optimizers do,
   without their rounding. */
static void stir(const scene *s, player *p, int step) {
    moe_tensor t;
    size_t i, k;
    for (i = 0; moe_layer_tensor(&p->layer, i, &t) == MOE_OK; i++) {
        const size_t from = rows_before(s, p->rank, &t);
        const moe_real size = (moe_real)(t.flags & MOE_PARAM_NO_DECAY ? 0.3 : 0.05);
        if (t.flags & (MOE_PARAM_STATE | MOE_PARAM_FROZEN)) continue;
        for (k = 0; k < t.count; k++) t.data[k] += size * small_noise(s->seed + (uint64_t)step, i, from + k);
    }
    if (step == 0 && s->with & WITH_LATE && moe_layer_find(&p->layer, "router.step", &t) == MOE_OK) t.data[0] = 1000000;
    if (step == 0 && moe_layer_find(&p->layer, "router.selection_bias", &t) == MOE_OK)
        for (k = 0; k < t.count; k++) t.data[k] = (moe_real)0.1 * small_noise(s->seed, 99, k);
}

/* A stage of the test's own: z_te = u_t(e mod d) minus the mean of u_t; the experts with a positive
   logit, and number 0. ctx not NULL: its backward pass fails. */
static moe_status own_score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                            moe_real *logits) {
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts, t, e, q;
    (void)ctx;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++) {
            moe_real mean = 0;
            for (q = 0; q < d; q++) mean += u[t * d + q] / (moe_real)d;
            logits[t * experts + e] = u[t * d + e % d] - mean;
        }
    return MOE_OK;
}

static moe_status own_score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                     const moe_real *d_logits, moe_real *d_u, moe_real *d_parameters) {
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts, t, e, q;
    (void)u;
    (void)d_parameters;
    if (ctx != NULL) return MOE_ERR_MEMORY;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++) {
            d_u[t * d + e % d] += d_logits[t * experts + e];
            for (q = 0; q < d; q++) d_u[t * d + q] -= d_logits[t * experts + e] / (moe_real)d;
        }
    return MOE_OK;
}

static moe_status own_select(void *ctx, const moe_router *router, const moe_call *call, const moe_real *logits,
                             const moe_real *probabilities, unsigned char *chosen) {
    size_t experts = (size_t)router->config.n_experts, i;
    (void)ctx;
    (void)probabilities;
    for (i = 0; i < call->n_tokens * experts; i++) chosen[i] = i % experts == 0 || logits[i] > 0;
    return MOE_OK;
}

static void keep_routing(result *r, const moe_routing *from) {
    moe_routing *to = &r->routing;
    const size_t n = from->n_tokens, experts = from->n_experts;
    const size_t width = from->max_choices, pairs = from->plan.offsets[experts];
    const size_t columns = from->plan.rows > 0 ? width : experts;
    *to = *from;
    to->u = NULL;
    to->memory = NULL;
    to->d_weight_in = to->d_weight_out = NULL;
    to->logits = (moe_real *)copy_of(from->logits, n * columns, sizeof(moe_real));
    to->clean_logits = NULL;
    to->gate = NULL;
    to->probabilities = (moe_real *)copy_of(from->probabilities, n * columns, sizeof(moe_real));
    to->choices = (int32_t *)copy_of(from->choices, from->choices != NULL ? n * width : 0, sizeof(int32_t));
    to->n_choices = (int32_t *)copy_of(from->n_choices, from->n_choices != NULL ? n : 0, sizeof(int32_t));
    to->kept = (unsigned char *)copy_of(from->kept, from->kept != NULL ? n * width : 0, 1);
    to->choice_weights =
        (moe_real *)copy_of(from->choice_weights, from->choice_weights != NULL ? n * width : 0, sizeof(moe_real));
    to->weights = (moe_real *)copy_of(from->weights, n * experts, sizeof(moe_real));
    to->selected = (unsigned char *)copy_of(from->selected, n * experts, 1);
    to->counts = (size_t *)copy_of(from->counts, experts, sizeof(size_t));
    to->first_counts = (size_t *)copy_of(from->first_counts, experts, sizeof(size_t));
    to->plan.offsets = r->offsets = (size_t *)copy_of(from->plan.offsets, experts + 1, sizeof(size_t));
    to->plan.assignments = r->entries =
        (moe_assignment *)copy_of(from->plan.assignments, pairs, sizeof(moe_assignment));
}

/* What a rank's own routing says of its tokens. */
static void keep_own(result *r, const moe_routing *from, const moe_call *call) {
    const size_t experts = from->n_experts;
    const size_t first = from->first * from->max_choices, own_tokens = from->plan.n_tokens;
    int32_t *all;
    moe_metrics m;
    size_t bytes = 0, e;
    void *memory;
    r->owned = MOE_OK;
    if (from->plan.rows > 0) return;
    r->own_tokens = own_tokens;
    r->routing.clean_logits = r->clean_logits = (moe_real *)copy_of(
        from->clean_logits, from->clean_logits != NULL ? own_tokens * experts : 0, sizeof(moe_real));
    r->recorded = (int32_t *)grab(own_tokens * from->max_choices, sizeof(int32_t));
    all = (int32_t *)grab(from->n_tokens * from->max_choices, sizeof(int32_t));
    r->owned = moe_routing_choices(from, from->max_choices, 1, all);
    memcpy(r->recorded, all + first, own_tokens * from->max_choices * sizeof(int32_t));
    free(all);
    if (r->owned == MOE_OK) r->owned = moe_metrics_size(experts, 0, &bytes);
    memory = grab(bytes, 1);
    if (r->owned == MOE_OK) r->owned = moe_metrics_init(&m, experts, 0, memory, bytes);
    if (r->owned == MOE_OK) r->owned = moe_metrics_add(&m, from, call->mask, NULL);
    if (r->owned == MOE_OK) {
        r->pairs = m.n_assignments;
        r->dropped = m.n_dropped;
        r->tokens = m.n_tokens;
        r->own_real = (size_t)m.n_tokens;
        r->own_dropped = (size_t)m.n_dropped;
        for (e = 0; e < experts; e++) r->logits += m.logits[e];
    }
    free(memory);
}

static void result_end(result *r) {
    free(r->recorded);
    free(r->y);
    free(r->dx);
    free(r->d_router_x);
    free(r->gradients);
    free(r->state);
    free(r->d_attention);
    free(r->d_outputs);
    free(r->d_output);
    free(r->d_activations);
    free(r->clean_logits);
    free(r->routing.logits);
    free(r->routing.probabilities);
    free(r->routing.choices);
    free(r->routing.n_choices);
    free(r->routing.kept);
    free(r->routing.choice_weights);
    free(r->routing.weights);
    free(r->routing.selected);
    free(r->routing.counts);
    free(r->routing.first_counts);
    free(r->offsets);
    free(r->entries);
    memset(r, 0, sizeof *r);
}

static void player_end(player *p) {
    int i;
    for (i = 0; i < MOST_STEPS; i++) result_end(&p->results[i]);
    free(p->start);
    free(p->again);
    moe_buffer_free(&p->file);
    moe_layer_free(&p->layer);
    moe_transport_end(&p->transport);
}

static void zero_gradients(const moe_layer *layer) {
    moe_tensor t;
    size_t i;
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++)
        if (t.gradient != NULL) memset(t.gradient, 0, t.count * sizeof(moe_real));
}

static void clear(moe_real *v, size_t count) {
    if (v != NULL && count > 0) memset(v, 0, count * sizeof *v);
}

static int is_frugal(const scene *s, int rank) {
    return !s->routes && s->with & WITH_NO_DX && rank >= 0 && rank % 2 == 1;
}

/* Makes a call go wrong; restore: what it changed that is not the call's. */
static void spoil_call(int spoil, player *p, tokens *t, moe_call *call, size_t *bytes, const moe_real **dy,
                       int restore) {
    static const int32_t bad[] = {0, 3, 1};
    switch (spoil) {
    case SPOIL_NAN:
        if (!restore) p->kept_x = t->x[0];
        t->x[0] = restore ? p->kept_x : (moe_real)HUGE_VAL - (moe_real)HUGE_VAL;
        break;
    case SPOIL_NO_X:
        call->x = NULL;
        break;
    case SPOIL_WORK:
        *bytes -= *bytes > 0;
        break;
    case SPOIL_SEQUENCES:
        call->sequences = bad;
        call->n_sequences = 2;
        break;
    case SPOIL_SUPPLY:
        call->token_ids = call->given = NULL;
        call->attention_weights = NULL;
        call->previous_input = NULL;
        call->teacher = NULL;
        call->distances = NULL;
        break;
    case SPOIL_RNG:
        call->rng = NULL;
        break;
    case SPOIL_TENSOR:
        p->layer.tensors[MOE_ROUTER_WEIGHT] = restore ? p->kept : NULL;
        break;
    case SPOIL_EXPERT:
        p->layer.tensors[MOE_EXPERTS_DOWN] = restore ? p->kept : NULL;
        break;
    case SPOIL_DECODING:
        call->decoding = 1;
        break;
    case SPOIL_DY:
        *dy = NULL;
        break;
    case SPOIL_PAST:
        call->n_past = 1;
        call->past_u = call->past_gate = t->x;
        break;
    /* where the others have them */
    case SPOIL_UNLIKE:
        call->given = NULL;
        call->token_machine = NULL;
        call->noise = NULL;
        call->distances = NULL;
        break;
    case SPOIL_BATCH:
        call->batch = &p->other;
        break;
    case SPOIL_SCORE:
        p->layer.router.custom.ctx = restore ? NULL : p;
        break;
    default: break;
    }
}

/* Forward, and in training backward, observe, advance. */
static void play_step(const scene *s, player *p, tokens *t, void *work, size_t bytes, int step) {
    result *r = &p->results[step];
    const size_t n = t->call.n_tokens, d = (size_t)s->config.router.d_model;
    const size_t o = (size_t)p->layer.config.d_out;
    const int spoil = step == 0 && p->rank == s->spoiler ? s->spoil : SPOIL_NOT;
    const moe_real *dy = t->dy;
    moe_layer_pass pass;
    moe_call call = t->call;
    moe_rng own;
    moe_rng_seed(&own, s->seed * 31 + (uint64_t)step);
    call.rng = &own;
    call.error = &r->error;
    memset(&r->error, 'x', sizeof r->error);
    r->y = zeros(n * o);
    r->dx = zeros(n * d);
    r->d_router_x = zeros(n * d);
    p->kept = p->layer.tensors[spoil == SPOIL_TENSOR ? (int)MOE_ROUTER_WEIGHT : (int)MOE_EXPERTS_DOWN];
    spoil_call(spoil, p, t, &call, &bytes, &dy, 0);
    r->status = moe_layer_forward(&p->layer, &call, spoil == SPOIL_Y ? NULL : r->y,
                                  spoil == SPOIL_WORK_NULL ? NULL : work, bytes, &pass);
    if (spoil == SPOIL_NAN || spoil == SPOIL_TENSOR || spoil == SPOIL_EXPERT)
        spoil_call(spoil, p, t, &call, &bytes, &dy, 1);
    r->draws = own.state;
    if (r->status != MOE_OK) return;
    if (!s->training) {
        keep_routing(r, &pass.routing);
        keep_own(r, &pass.routing, &call);
        return;
    }
    zero_gradients(&p->layer);
    clear(t->d_attention, HEADS * n * n);
    clear(t->d_outputs, HEADS * n * d);
    clear(t->d_output, n * d);
    if (spoil == SPOIL_STATE) pass.call.training = 0;
    r->back = is_frugal(s, p->rank)
                  ? moe_layer_backward(&p->layer, dy, NULL, NULL, &pass)
                  : moe_layer_backward(&p->layer, dy, r->dx, call.router_x != NULL ? r->d_router_x : NULL, &pass);
    if (spoil == SPOIL_SCORE) spoil_call(spoil, p, t, &call, &bytes, &dy, 1);
    keep_routing(r, &pass.routing);
    keep_own(r, &pass.routing, &call);
    r->gradients = tensors_of(&p->layer, 1, 0);
    r->d_attention = (moe_real *)copy_of(t->d_attention, HEADS * n * n, sizeof(moe_real));
    r->d_outputs = (moe_real *)copy_of(t->d_outputs, HEADS * n * d, sizeof(moe_real));
    r->d_output = (moe_real *)copy_of(t->d_output, n * d, sizeof(moe_real));
    if (r->back != MOE_OK) return;
    r->observed = moe_layer_observe(&p->layer, &pass);
    r->advanced = moe_layer_advance(&p->layer);
    r->state = tensors_of(&p->layer, 0, 1);
}

static void freeze(const scene *s, moe_layer *layer) {
    moe_parameter slot;
    size_t i;
    for (i = 0; i < MOE_LAYER_PARAMETER_COUNT && s->with & WITH_FROZEN; i++)
        if ((i + s->seed) % 3 == 0 && moe_layer_parameter(&layer->config, (int)i, &slot) == MOE_OK &&
            !(slot.flags & MOE_PARAM_STATE))
            layer->gradients[i] = NULL;
}

/* ---- a router alone: moe_batch over the transport's functions ---- */

/* Every rank sends its rows to all others. */
static moe_status gather(void *ctx, moe_status status, size_t row_bytes, void *rows) {
    player *p = (player *)ctx;
    ranks_rank *self = p->self;
    const int n = self->world->n_ranks;
    uint64_t mine[3 * RANKS_MOST], theirs[3 * RANKS_MOST];
    size_t send_counts[RANKS_MOST], send_at[RANKS_MOST], receive_counts[RANKS_MOST], receive_at[RANKS_MOST];
    moe_exchange e;
    unsigned char *others;
    int r, bad = 0;
    for (r = 0; r < n; r++) {
        mine[3 * r] = status != MOE_OK;
        mine[3 * r + 1] = p->first;
        mine[3 * r + 2] = row_bytes;
    }
    if (ranks_counts(self, 3, mine, theirs) != MOE_OK) return MOE_ERR_TRANSPORT;
    for (r = 0; r < n; r++) bad |= theirs[3 * r] != 0;
    if (status != MOE_OK) return status;
    if (bad) return MOE_ERR_PEER;
    memset(&e, 0, sizeof e);
    others = (unsigned char *)grab(p->total, row_bytes);
    for (r = 0; r < n; r++) {
        const size_t end = r + 1 < n ? (size_t)theirs[3 * r + 4] : p->total;
        if (theirs[3 * r + 2] != row_bytes) (void)ranks_fault(self, "rows of another size are gathered elsewhere");
        receive_at[r] = (size_t)theirs[3 * r + 1];
        receive_counts[r] = end - receive_at[r];
        send_at[r] = 0;
    }
    for (r = 0; r < n; r++) send_counts[r] = receive_counts[self->rank];
    e.row_bytes = row_bytes;
    e.send = (unsigned char *)rows + p->first * row_bytes;
    e.receive = others;
    e.send_counts = send_counts;
    e.send_at = send_at;
    e.receive_counts = receive_counts;
    e.receive_at = receive_at;
    status = ranks_rows(self, MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END, &e);
    if (status == MOE_OK && p->total > 0) memcpy(rows, others, p->total * row_bytes);
    free(others);
    return status;
}

static moe_real entry_gradient(const scene *s, size_t token, size_t e, int input) {
    return small_noise(s->seed, 1000 + e, 2 * token + (size_t)input);
}

/* The gradients of the plan's weights, alike in all players. */
static void fill_entry_gradients(const scene *s, const player *p, moe_routing *r) {
    size_t e, i;
    for (e = 0; e < r->n_experts; e++)
        for (i = r->plan.offsets[e]; i < r->plan.offsets[e + 1]; i++) {
            const size_t token = p->first + (size_t)r->plan.assignments[i].token;
            r->d_weight_in[i] = s->config.router.apply_to == MOE_APPLY_INPUT ? entry_gradient(s, token, e, 1) : 0;
            r->d_weight_out[i] = s->config.router.apply_to == MOE_APPLY_INPUT ? 0 : entry_gradient(s, token, e, 0);
        }
}

static void play_route(const scene *s, player *p, tokens *t, void *work, size_t bytes, int step) {
    result *r = &p->results[step];
    const size_t n = t->call.n_tokens, d = (size_t)s->config.router.d_model;
    const size_t experts = (size_t)s->config.router.n_experts;
    moe_router router = p->layer.router;
    moe_routing routing;
    moe_batch together;
    moe_call call = t->call;
    moe_real *state[MOE_ROUTER_PARAMETER_COUNT];
    moe_rng own;
    size_t i;
    moe_rng_seed(&own, s->seed * 31 + (uint64_t)step);
    memset(&together, 0, sizeof together);
    together.first = p->first;
    together.total = p->total;
    together.lead = p->rank == s->ranks - 1;
    together.ctx = p;
    together.gather = gather;
    call.rng = &own;
    call.batch = p->rank >= 0 ? &together : NULL;
    memcpy(router.tensors, p->layer.tensors, sizeof router.tensors);
    memcpy(state, p->layer.tensors, sizeof state);
    r->y = zeros(n * d);
    r->dx = zeros(n * d);
    r->d_router_x = zeros(n * d);
    r->d_activations = zeros(experts * n * activation_width(s));
    r->status = moe_route(&router, &call, work, bytes, &routing);
    r->draws = own.state;
    if (r->status != MOE_OK) return;
    if (!s->training) {
        keep_routing(r, &routing);
        keep_own(r, &routing, &call);
        return;
    }
    zero_gradients(&p->layer);
    clear(t->d_attention, HEADS * n * n);
    clear(t->d_outputs, HEADS * n * d);
    clear(t->d_output, n * d);
    fill_entry_gradients(s, p, &routing);
    r->back = moe_route_backward(&router, &call, &routing, p->layer.gradients, r->dx,
                                 call.activations != NULL ? r->d_activations : NULL);
    keep_routing(r, &routing);
    keep_own(r, &routing, &call);
    r->gradients = tensors_of(&p->layer, 1, 0);
    r->d_attention = (moe_real *)copy_of(t->d_attention, HEADS * n * n, sizeof(moe_real));
    r->d_outputs = (moe_real *)copy_of(t->d_outputs, HEADS * n * d, sizeof(moe_real));
    r->d_output = (moe_real *)copy_of(t->d_output, n * d, sizeof(moe_real));
    for (i = 0; i < MOE_ROUTER_PARAMETER_COUNT; i++) {
        moe_parameter slot;
        if (moe_router_parameter(&router.config, (int)i, &slot) != MOE_OK || !(slot.flags & MOE_PARAM_STATE))
            state[i] = NULL;
    }
    r->observed = moe_router_observe(&router, &call, &routing, state);
    r->advanced = moe_router_advance(&router, state);
    r->state = tensors_of(&p->layer, 0, 1);
}

/* Writes the layer, all ranks one file, and reads it again: each rank its own part. */
static void play_file(player *p) {
    moe_stream stream = moe_buffer_stream(&p->file);
    moe_layer layer;
    memset(&layer, 0, sizeof layer);
    p->written = moe_layer_write(&p->layer, p->rank <= 0 ? &stream : NULL, &p->error);
    if (p->written != MOE_OK) return;
    if (p->rank < 0)
        p->reread = moe_layer_read(&layer, p->file.data, p->file.size, 0, MOE_KERNELS_AUTO, NULL, &p->error);
    else {
        /* rank 0 has written it when moe_layer_write returns */
        const moe_buffer *file = p->rank == 0 ? &p->file : p->file_of_all;
        p->reread =
            moe_layer_read_part(&layer, file->data, file->size, 0, MOE_KERNELS_AUTO, &p->transport, NULL, &p->error);
    }
    if (p->reread != MOE_OK) return;
    p->again_count = tensor_numbers(&layer);
    p->again = tensors_of(&layer, 0, 0);
    moe_layer_free(&layer);
}

static void forget_traffic(player *p) {
    if (p->self == NULL) return;
    memset(p->rows, 0, sizeof p->rows);
    memset(p->bytes, 0, sizeof p->bytes);
    memset(&p->traffic, 0, sizeof p->traffic);
    p->traffic.rows = p->rows;
    p->traffic.bytes = p->bytes;
    memset(p->self->bytes, 0, sizeof p->self->bytes);
    memset(p->self->messages, 0, sizeof p->self->messages);
    p->self->begins = 0;
}

static void play(const scene *s, player *p, tokens *t, size_t most) {
    moe_layer_config config = s->config;
    moe_allocator counted;
    unsigned char *work, *packed = NULL;
    size_t bytes = 0, i, packed_bytes = 0;
    int step;
    counted.ctx = &p->blocks;
    counted.resize = counted_resize;
    config.transport = p->rank >= 0 && !s->routes ? &p->transport : NULL;
    for (step = 0; step < MOST_STEPS; step++) p->results[step].status = MOE_ERR_STOPPED; /* until it is played */
    p->made = moe_layer_create(&p->layer, &config, s->training, s->seed, &counted, &p->error);
    if (p->made != MOE_OK) return;
    p->layer.router.custom.score = own_score;
    p->layer.router.custom.score_backward = own_score_backward;
    p->layer.router.custom.select = own_select;
    if (p->self != NULL) p->made_after = p->self->calls;
    freeze(s, &p->layer);
    p->count = tensor_numbers(&p->layer);
    p->start = tensors_of(&p->layer, 0, 0);
    if (s->with & WITH_FILE && !s->routes) {
        play_file(p);
        forget_traffic(p); /* files are no traffic of layers */
    }
    if (s->with & WITH_PACKED) {
        stir(s, p, 0);
        p->packed = moe_layer_pack_size(&p->layer, s->type, 0, &packed_bytes, NULL);
        packed = (unsigned char *)grab(packed_bytes, 1);
        if (p->packed == MOE_OK) p->packed = moe_layer_pack(&p->layer, s->type, packed, packed_bytes, &p->error);
        for (i = 0; i < MOE_LAYER_PARAMETER_COUNT; i++)
            if (p->layer.packed[i] != NULL) p->layer.tensors[i] = NULL;
    }
    if (s->routes)
        p->sized = p->rank < 0
                       ? moe_route_size(&p->layer.router, p->total, s->training, &bytes)
                       : moe_route_batch_size(&p->layer.router, t->call.n_tokens, p->total, s->training, &bytes);
    else
        p->sized = moe_layer_work_size(&p->layer, most + (s->with & WITH_ROOM ? 5 : 0),
                                       s->training || s->with & WITH_KEEP, &bytes);
    work = (unsigned char *)grab(bytes + 64, 1);
    for (step = 0; step < s->steps; step++) {
        memset(work, 0x55, bytes + 64);
        if (!(s->with & WITH_PACKED)) stir(s, p, step);
        if (p->rank < 0 && step == 0 && s->spoil != SPOIL_NOT) continue; /* the step that goes wrong changes nothing */
        if (s->routes) play_route(s, p, t, work, bytes, step);
        else play_step(s, p, t, work, bytes, step);
        for (i = 0; i < 64; i++)
            if (work[bytes + i] != 0x55) p->sized = MOE_ERR_SPACE; /* written behind the end */
        if (p->results[step].status == MOE_ERR_TRANSPORT || p->results[step].back == MOE_ERR_TRANSPORT ||
            p->results[step].observed == MOE_ERR_TRANSPORT)
            break;
    }
    free(work);
    free(packed);
}

/* ---- all players ---- */

typedef struct stage {
    const scene *plan;
    batch all;
    player whole, parts[RANKS_MOST];
    player alone[RANKS_MOST]; /* local routing: what one process makes of the tokens of each, one after another */
    ranks_world world;
    const char *fault;
} stage;

static void play_rank(ranks_rank *self, void *ctx) {
    stage *g = (stage *)ctx;
    const scene *s = g->plan;
    player *p = &g->parts[self->rank];
    p->file_of_all = &g->parts[0].file;
    p->rank = self->rank;
    p->self = self;
    p->first = g->all.first[self->rank];
    p->total = g->all.n;
    p->transport = ranks_transport(self);
    p->transport.chunks = s->chunks;
    p->transport.two_level = s->two_level;
    p->transport.ranks_per_machine = s->per_node;
    p->transport.local_routing = s->local_routing;
    p->traffic.rows = p->rows;
    p->traffic.bytes = p->bytes;
    if (!is_frugal(s, self->rank)) p->transport.traffic = &p->traffic;
    p->begun = s->routes ? MOE_OK : moe_transport_begin(&p->transport, &p->error);
    if (p->begun == MOE_OK) play(s, p, &g->all.part[self->rank], g->all.most);
}

/* Losses count by the share that a rank has of the tokens. */
static void weigh_losses(moe_layer *layer, const moe_router_config *c, moe_real share) {
    moe_router_config *to = &layer->router.config;
    to->loss_balance = c->loss_balance * share;
    to->loss_z = c->loss_z * share;
    to->loss_importance = c->loss_importance * share;
    to->loss_entropy = c->loss_entropy * share;
    to->loss_usage_entropy = c->loss_usage_entropy * share;
    to->loss_similarity_same = c->loss_similarity_same * share;
    to->loss_similarity_diff = c->loss_similarity_diff * share;
    to->loss_locality = c->loss_locality * share;
    to->loss_l1 = c->loss_l1 * share;
    to->loss_load = c->loss_load * share;
    to->loss_orthogonal = c->loss_orthogonal * share;
    to->loss_distill = c->loss_distill * share;
    to->loss_diversity = c->loss_diversity * share;
    to->loss_simplicity = c->loss_simplicity * share;
    to->loss_stable_balance = c->loss_stable_balance * share;
    to->loss_selector_entropy = c->loss_selector_entropy * share;
    to->loss_selector_reach = c->loss_selector_reach * share;
    to->loss_predictor = c->loss_predictor * share;
}

/* One rank's tokens in one process: forward, and in training backward. */
static void play_alone(const scene *s, moe_layer *layer, tokens *t, moe_rng draws, void *work, size_t bytes, result *r,
                       moe_layer_pass *pass) {
    const size_t n = t->call.n_tokens, d = (size_t)s->config.router.d_model;
    const size_t o = (size_t)layer->config.d_out;
    moe_call call = t->call;
    call.rng = &draws;
    r->y = zeros(n * o);
    r->dx = zeros(n * d);
    r->d_router_x = zeros(n * d);
    r->status = moe_layer_forward(layer, &call, r->y, work, bytes, pass);
    pass->call.rng = NULL; /* dead behind this call, and not needed */
    if (r->status != MOE_OK) return;
    zero_gradients(layer);
    clear(t->d_attention, HEADS * n * n);
    clear(t->d_outputs, HEADS * n * d);
    clear(t->d_output, n * d);
    if (s->training)
        r->back = moe_layer_backward(layer, t->dy, r->dx, call.router_x != NULL ? r->d_router_x : NULL, pass);
    keep_routing(r, &pass->routing);
    keep_own(r, &pass->routing, &call);
    if (!s->training) return;
    r->gradients = tensors_of(layer, 1, 0);
    r->d_attention = (moe_real *)copy_of(t->d_attention, HEADS * n * n, sizeof(moe_real));
    r->d_outputs = (moe_real *)copy_of(t->d_outputs, HEADS * n * d, sizeof(moe_real));
    r->d_output = (moe_real *)copy_of(t->d_output, n * d, sizeof(moe_real));
}

/* The state takes the largest C_min and the largest sum of affinity_sum_auto of all ranks. */
static void largest_of_ranks(stage *g, int step) {
    moe_real bound = 0, sum = 0;
    moe_tensor t;
    int r;
    for (r = 0; r < g->plan->ranks; r++) {
        const moe_routing *own = &g->alone[r].results[step].routing;
        if (own->bound_now > bound) bound = own->bound_now;
        if (own->affinity_now > sum) sum = own->affinity_now;
    }
    if (bound > 0 && moe_layer_find(&g->whole.layer, "router.capacity", &t) == MOE_OK) t.data[0] = bound;
    if (moe_layer_find(&g->whole.layer, "router.affinity_sum", &t) == MOE_OK) t.data[0] = sum;
}

/* Whether experts compete is drawn for all ranks together: one process takes it as given. */
static void compete_as_ranks(moe_layer *layer, const moe_router_config *c, int training, moe_rng *caller) {
    if (!training || !(c->compete_rate > 0) || c->compete_rate >= 1) return;
    layer->config.router.compete_rate = moe_rng_uniform(caller) < c->compete_rate ? 1 : 0;
}

/* One process called with the tokens of one rank after another. */
static void play_local_routing(stage *g) {
    const scene *s = g->plan;
    player *one = &g->whole;
    moe_layer_pass passes[RANKS_MOST];
    unsigned char *works[RANKS_MOST];
    size_t bytes = 0;
    int r, step;
    one->made = moe_layer_create(&one->layer, &s->config, s->training, s->seed, NULL, &one->error);
    if (one->made != MOE_OK) return;
    one->layer.router.custom.score = own_score;
    one->layer.router.custom.score_backward = own_score_backward;
    one->layer.router.custom.select = own_select;
    freeze(s, &one->layer);
    one->count = tensor_numbers(&one->layer);
    one->start = tensors_of(&one->layer, 0, 0);
    one->sized = moe_layer_work_size(&one->layer, g->all.most, s->training || s->with & WITH_KEEP, &bytes);
    for (r = 0; r < s->ranks; r++) works[r] = (unsigned char *)grab(bytes, 1);
    for (step = 0; step < s->steps; step++) {
        moe_rng caller, own;
        moe_status *worst = &one->results[step].status;
        uint64_t seed;
        moe_rng_seed(&caller, s->seed * 31 + (uint64_t)step);
        stir(s, one, step);
        if (step == 0 && s->spoil != SPOIL_NOT) continue;
        compete_as_ranks(&one->layer, &s->config.router, s->training, &caller);
        seed = s->training || s->config.router.drop_order == MOE_DROP_RANDOM ? moe_rng_next(&caller) : 0;
        one->results[step].draws = caller.state;
        for (r = 0; r < s->ranks; r++) {
            result *result_of = &g->alone[r].results[step];
            moe_rng_seed(&own, seed + (uint64_t)r);
            weigh_losses(&one->layer, &s->config.router, g->all.n > 0 ? (moe_real)s->n_of[r] / (moe_real)g->all.n : 0);
            memset(works[r], 0x55, bytes);
            play_alone(s, &one->layer, &g->all.part[r], own, works[r], bytes, result_of, &passes[r]);
            if (*worst == MOE_OK) *worst = result_of->status;
        }
        for (r = 0; r < s->ranks && s->training && *worst == MOE_OK; r++)
            one->results[step].observed = moe_layer_observe(&one->layer, &passes[r]);
        if (s->training && *worst == MOE_OK) largest_of_ranks(g, step);
        if (s->training && *worst == MOE_OK) one->results[step].advanced = moe_layer_advance(&one->layer);
        if (s->training) one->results[step].state = tensors_of(&one->layer, 0, 1);
    }
    for (r = 0; r < s->ranks; r++) free(works[r]);
}

static stage *stage_begin(const scene *s) {
    stage *g = (stage *)grab(1, sizeof *g);
    g->plan = s;
    batch_begin(s, &g->all);
    g->whole.rank = -1;
    g->whole.total = g->all.n;
    if (s->local_routing) play_local_routing(g);
    else play(s, &g->whole, &g->all.whole, g->all.n);
    ranks_begin(&g->world, s->ranks, s->moving);
    g->world.ranks[s->fail_rank].fail_at = s->fail_at;
    g->world.ranks[s->fail_rank].fail_late = s->fail_late;
    g->world.ranks[s->fail_rank].lie_at = s->lie_at;
    g->world.ranks[s->fail_rank].lie_word = s->lie_word;
    g->world.ranks[s->fail_rank].lie = s->lie;
    g->fault = ranks_run(&g->world, play_rank, g);
    return g;
}

static void stage_end(stage *g) {
    int r;
    batch_end(g->plan, &g->all);
    player_end(&g->whole);
    for (r = 0; r < g->plan->ranks; r++) {
        player_end(&g->parts[r]);
        player_end(&g->alone[r]);
    }
    ranks_end(&g->world);
    free(g);
}

/* ---- comparing ---- */

static const char *naming(const scene *s, const char *what) {
    static char text[NAME_SIZE + 100];
    sprintf(text, "%.120s, %d ranks, %s, with %u, seed %lu: %.80s", s->name, s->ranks,
            s->training ? "training" : "inference", s->with, (unsigned long)s->seed, what);
    return text;
}

/* The plain C kernels promise bits. */
static int is_exact(const scene *s) { return s->config.kernels == MOE_KERNELS_C; }

/* Every expert sees every token, to score it or to compete for it: sums over tokens are made of
   other parts, and other rows go to and fro. */
static int is_scored(const scene *s) {
    return moe_router_traits(&s->config.router) & MOE_TRAIT_NEEDS_ALL_EXPERTS ||
           (s->training && s->config.router.compete_rate > 0);
}

static double largest(const moe_real *v, size_t count) {
    double most = 0.0;
    size_t i;
    for (i = 0; i < count; i++)
        if (fabs((double)v[i]) > most) most = fabs((double)v[i]);
    return most;
}

/* Equal to the bit, or within rounding of sums whose terms are as large as `size`. */
static int near(const moe_real *a, const moe_real *b, size_t count, int exact, double size) {
    const double most = largest(b, count), limit = 100.0 * EPSILON * (most > size ? most : size);
    size_t i;
    if (exact) return count == 0 || memcmp(a, b, count * sizeof *a) == 0;
    for (i = 0; i < count; i++)
        if (!(fabs((double)a[i] - (double)b[i]) <= limit)) return 0;
    return 1;
}

static int same_sizes(const size_t *a, const size_t *b, size_t count) { return memcmp(a, b, count * sizeof *a) == 0; }

#define AGREES(condition, what) CHECK(condition, naming(s, what))

/* Rows of tokens that are real, from token `from` of the whole on. */
static int same_rows(const scene *s, const tokens *whole, const moe_real *part, const moe_real *all, size_t from,
                     size_t n, size_t width) {
    size_t t;
    int good = 1;
    if (width == 0) return 1;
    for (t = 0; t < n; t++)
        if (whole->mask == NULL || whole->mask[from + t])
            good &= near(part + t * width, all + (from + t) * width, width, is_exact(s), 1.0);
    return good;
}

/* The entries of the plan are those of the rank's own tokens. */
static int same_plan(const scene *s, const moe_dispatch_plan *own, const moe_dispatch_plan *whole, size_t first,
                     size_t n) {
    size_t e, i, at;
    if (own->n_experts != whole->n_experts) return 0;
    for (e = 0; e < whole->n_experts; e++) {
        at = own->offsets[e];
        for (i = whole->offsets[e]; i < whole->offsets[e + 1]; i++) {
            const moe_assignment *a = &whole->assignments[i], *b;
            if ((size_t)a->token < first || (size_t)a->token >= first + n) continue;
            if (at >= own->offsets[e + 1]) return 0;
            b = &own->assignments[at++];
            if ((size_t)b->token + first != (size_t)a->token || a->choice != b->choice ||
                !near(&b->weight_in, &a->weight_in, 1, is_exact(s), 1.0) ||
                !near(&b->weight_out, &a->weight_out, 1, is_exact(s), 1.0))
                return 0;
        }
        if (at != own->offsets[e + 1]) return 0;
    }
    return 1;
}

/* The routing of a rank, which is that of the whole batch or of its own tokens. */
static void compare_routing(const stage *g, const scene *s, const result *one, const result *r, int rank) {
    const moe_routing *a = &r->routing, *b = &one->routing;
    const tokens *whole = &g->all.whole;
    const size_t experts = b->n_experts, columns = b->plan.rows > 0 ? b->max_choices : experts;
    const size_t n = a->n_tokens;
    const int is_whole = n == g->all.n, is_own = n == s->n_of[rank];
    const size_t from = is_whole ? 0 : g->all.first[rank];
    size_t t, k;
    int good = 1;
    AGREES(s->training && s->config.router.select != MOE_SELECT_SOFT ? is_whole : is_whole || is_own,
           "the routing is that of the batch");
    if (!is_whole && !is_own) return;
    AGREES(a->n_experts == b->n_experts && a->max_choices == b->max_choices && a->top_k == b->top_k,
           "the sizes of the routing");
    AGREES(same_rows(s, whole, a->logits, b->logits, from, n, columns), "logits");
    AGREES(same_rows(s, whole, a->probabilities, b->probabilities, from, n, columns), "probabilities");
    AGREES(same_rows(s, whole, a->weights, b->weights, from, n, experts), "weights");
    if (b->plan.rows > 0) return;
    AGREES(same_rows(s, whole, a->clean_logits, b->clean_logits, g->all.first[rank], r->own_tokens, experts),
           "logits without noise");
    AGREES(same_rows(s, whole, a->choice_weights, b->choice_weights, from, n, b->max_choices) || b->max_choices == 0,
           "the weights of the stage");
    for (t = 0; t < n; t++) {
        good &= a->n_choices[t] == b->n_choices[from + t] &&
                memcmp(a->selected + t * experts, b->selected + (from + t) * experts, experts) == 0;
        for (k = 0; k < (size_t)b->n_choices[from + t] && good; k++)
            good &= a->choices[t * a->max_choices + k] == b->choices[(from + t) * a->max_choices + k] &&
                    a->kept[t * a->max_choices + k] == b->kept[(from + t) * a->max_choices + k];
    }
    AGREES(good, "choices");
    AGREES(same_plan(s, &a->plan, &b->plan, g->all.first[rank], s->n_of[rank]), "the plan");
    if (!is_whole) return;
    AGREES(a->n_real == b->n_real && same_sizes(a->counts, b->counts, experts) &&
               same_sizes(a->first_counts, b->first_counts, experts),
           "counts");
    AGREES(a->n_dropped == b->n_dropped && a->capacity == b->capacity && a->capacity_clamped == b->capacity_clamped,
           "capacity");
    AGREES(near(&a->capacity_bound, &b->capacity_bound, 1, is_exact(s), 1.0), "the bound of capacity");
    AGREES(near(a->loss, b->loss, MOE_LOSS_COUNT, is_exact(s), 0.0), "losses");
}

/* The routings of the own tokens: a rank's choices are those of its rows, and over all ranks the
   numbers add up to the whole's. */
static void compare_own(const stage *g, const scene *s, int step) {
    const result *one = &g->whole.results[step];
    const size_t width = one->routing.max_choices;
    double pairs = 0.0, dropped = 0.0;
    double real_tokens = 0.0, logits = 0.0;
    size_t real = 0;
    int r;
    AGREES(one->owned == MOE_OK, "the own routing of one process");
    if (one->routing.plan.rows > 0) return;
    for (r = 0; r < s->ranks; r++) {
        const result *p = &g->parts[r].results[step];
        AGREES(p->owned == MOE_OK && p->own_tokens == s->n_of[r], "the own routing");
        if (p->owned != MOE_OK || p->own_tokens != s->n_of[r]) return;
        AGREES(memcmp(p->recorded, one->recorded + g->all.first[r] * width, s->n_of[r] * width * sizeof(int32_t)) == 0,
               "the own choices");
        pairs += p->pairs;
        dropped += p->dropped;
        real_tokens += p->tokens;
        logits += p->logits;
        real += p->own_real;
    }
    AGREES(real == one->own_real && fabs(real_tokens - one->tokens) < 0.5 && fabs(pairs - one->pairs) < 0.5 &&
               fabs(dropped - one->dropped) < 0.5,
           "numbers of the own routings");
    AGREES(fabs(logits - one->logits) <= 1e-3 * (1.0 + fabs(one->logits)), "metrics of the own routings");
}

/* Gradients of the experts are complete on their rank; the others' must be added over the ranks. */
static void compare_gradients(const stage *g, const scene *s, int step) {
    const player *one = &g->whole;
    const int scored = is_scored(s);
    /* A cosine of one dimension is a sign: its gradient is what rounding leaves near 1. */
    const double noise = s->config.router.score == MOE_SCORE_COSINE && s->config.router.cosine_dim == 1 ? 1.0 : 0.0;
    size_t at[RANKS_MOST] = {0}, all = 0, i, k;
    moe_tensor t, own;
    int r;
    for (i = 0; moe_layer_tensor(&one->layer, i, &t) == MOE_OK; all += t.count, i++) {
        const moe_real *want = one->results[step].gradients + all;
        moe_real *sum = zeros(t.count);
        double size = noise;
        int good = 1;
        for (r = 0; r < s->ranks; r++) {
            const moe_real *part = g->parts[r].results[step].gradients + at[r];
            if (moe_layer_tensor(&g->parts[r].layer, i, &own) != MOE_OK || strcmp(own.name, t.name) != 0) {
                AGREES(0, "the same tensors");
                free(sum);
                return;
            }
            if (is_of_experts(s, t.name)) {
                const size_t from = rows_before(s, r, &own);
                good &= near(part, want + from, own.count, is_exact(s) && !scored, largest(want, t.count));
            } else {
                size = largest(part, t.count) > size ? largest(part, t.count) : size;
                for (k = 0; k < t.count; k++) sum[k] += part[k];
            }
            at[r] += own.count;
        }
        if (!is_of_experts(s, t.name)) good = near(sum, want, t.count, 0, size);
        if (!good) AGREES(0, t.name);
        free(sum);
    }
    AGREES(i > 0, "gradients");
}

static void compare_state(const stage *g, const scene *s, int step, int rank) {
    const player *one = &g->whole, *p = &g->parts[rank];
    size_t all = 0, at = 0, i;
    moe_tensor t, own;
    for (i = 0; moe_layer_tensor(&one->layer, i, &t) == MOE_OK && moe_layer_tensor(&p->layer, i, &own) == MOE_OK;
         all += t.count, at += own.count, i++)
        if (t.flags & MOE_PARAM_STATE)
            AGREES(near(p->results[step].state + at, one->results[step].state + all, t.count, is_exact(s), 1.0),
                   t.name);
}

/* The gradients of what attention supplied: a rank's block of the whole's. */
static int same_attention(const stage *g, const scene *s, const result *r, const result *one, int rank) {
    const size_t n = s->n_of[rank], from = g->all.first[rank];
    const size_t all = g->all.n, d = (size_t)s->config.router.d_model;
    size_t h, i;
    int good = 1;
    for (h = 0; h < HEADS; h++) {
        for (i = 0; i < n; i++)
            good &= near(r->d_attention + (h * n + i) * n, one->d_attention + (h * all + from + i) * all + from, n,
                         is_exact(s), 1.0);
        good &= near(r->d_outputs + h * n * d, one->d_outputs + (h * all + from) * d, n * d, is_exact(s), 1.0);
    }
    return good && near(r->d_output, one->d_output + from * d, n * d, is_exact(s), 1.0);
}

static int same_nodes(const stage *g, const scene *s, const result *r, const result *one, int rank) {
    const size_t row = s->n_of[rank] * activation_width(s);
    size_t e;
    int good = 1;
    for (e = 0; e < (size_t)s->config.router.n_experts; e++)
        good &=
            near(r->d_activations + e * row,
                 one->d_activations + (e * g->all.n + g->all.first[rank]) * activation_width(s), row, is_exact(s), 1.0);
    return good;
}

static void compare_step(const stage *g, int step) {
    const scene *s = g->plan;
    const result *one = &g->whole.results[step];
    const size_t d = (size_t)s->config.router.d_model, o = (size_t)g->whole.layer.config.d_out;
    const int scored = is_scored(s);
    const int exact = is_exact(s);
    int r, good = 1;
    if (!AGREES(one->status == MOE_OK, "one process runs")) return;
    for (r = 0; r < s->ranks; r++) {
        const result *p = &g->parts[r].results[step];
        if (p->status != MOE_OK || p->back != MOE_OK || p->observed != MOE_OK || p->advanced != MOE_OK) {
            char text[100];
            sprintf(text, "step %d of rank %d: forward %d, backward %d, observe %d, advance %d", step, r, p->status,
                    p->back, p->observed, p->advanced);
            AGREES(0, text);
            good = 0;
        }
    }
    if (!good) return;
    for (r = 0; r < s->ranks; r++) {
        const result *p = &g->parts[r].results[step];
        const size_t n = s->n_of[r], from = g->all.first[r];
        AGREES(near(p->y, one->y + from * o, n * o, exact, largest(one->y, g->all.n * o)), "y");
        AGREES(p->draws == one->draws, "random numbers drawn");
        compare_routing(g, s, one, p, r);
        if (!s->training) continue;
        AGREES(is_frugal(s, r) ||
                   near(p->dx, one->dx + from * d, n * d, exact && !scored, largest(one->dx, g->all.n * d)),
               "dx");
        AGREES(is_frugal(s, r) || near(p->d_router_x, one->d_router_x + from * d, n * d, exact && !scored,
                                       largest(one->d_router_x, g->all.n * d)),
               "d_router_x");
        AGREES(same_attention(g, s, p, one, r), "the gradients of attention");
        if (s->routes) AGREES(same_nodes(g, s, p, one, r), "d_nodes");
        compare_state(g, s, step, r);
    }
    if (s->training) compare_gradients(g, s, step);
    compare_own(g, s, step);
}

static void compare_local_gradients(const stage *g, int step, const scene *s, int scored, int exact) {
    size_t i, k;
    size_t at[RANKS_MOST] = {0};
    size_t all = 0;
    moe_tensor t, own;
    int r;
    for (i = 0; s->training && moe_layer_tensor(&g->whole.layer, i, &t) == MOE_OK; all += t.count, i++) {
        moe_real *sum = zeros(t.count);
        double size = 0.0;
        int good = 1, other;
        for (other = 0; other < s->ranks; other++)
            for (k = 0; k < t.count; k++) {
                const moe_real one = g->alone[other].results[step].gradients[all + k];
                sum[k] += one;
                size = fabs((double)one) > size ? fabs((double)one) : size;
            }
        for (r = 0; r < s->ranks; r++) {
            const moe_real *part = g->parts[r].results[step].gradients + at[r];
            if (moe_layer_tensor(&g->parts[r].layer, i, &own) != MOE_OK || strcmp(own.name, t.name) != 0) {
                good = 0;
                break;
            }
            if (is_of_experts(s, t.name)) good &= near(part, sum + rows_before(s, r, &own), own.count, 0, size);
            else good &= near(part, g->alone[r].results[step].gradients + all, t.count, exact && !scored, size);
            at[r] += own.count;
        }
        if (!good) AGREES(0, t.name);
        free(sum);
    }
    AGREES(!s->training || i > 0, "gradients, local routing");
}

/* With local routing a rank's call is that of one process with its tokens. Experts' gradients are
   those of all. */
static void compare_local_routing(const stage *g, int step) {
    const scene *s = g->plan;
    const size_t d = (size_t)s->config.router.d_model, o = (size_t)g->whole.layer.config.d_out;
    const int scored = is_scored(s);
    const int exact = is_exact(s);
    size_t k;
    int r;
    if (!AGREES(g->whole.results[step].status == MOE_OK, "one process runs")) return;
    for (r = 0; r < s->ranks; r++) {
        const result *p = &g->parts[r].results[step], *want = &g->alone[r].results[step];
        const moe_routing *a = &p->routing, *b = &want->routing;
        const size_t n = s->n_of[r], experts = b->n_experts;
        const size_t columns = b->plan.rows > 0 ? b->max_choices : experts;
        char text[100];
        sprintf(text, "local routing, step %d of rank %d: forward %d, backward %d, observe %d, advance %d", step, r,
                p->status, p->back, p->observed, p->advanced);
        if (!AGREES(p->status == MOE_OK && p->back == MOE_OK && p->observed == MOE_OK && p->advanced == MOE_OK, text))
            return;
        AGREES(near(p->y, want->y, n * o, exact, largest(want->y, n * o)), "y, local routing");
        AGREES(p->draws == g->whole.results[step].draws, "the caller's random numbers, local routing");
        AGREES(a->n_tokens == n && a->n_real == b->n_real && a->n_dropped == b->n_dropped &&
                   a->capacity == b->capacity && a->top_k == b->top_k,
               "the routing of the own tokens");
        if (a->n_tokens != n) return;
        AGREES(near(a->loss, b->loss, MOE_LOSS_COUNT, exact, 0.0), "losses, local routing");
        if (n > 0 && b->plan.rows == 0) {
            AGREES(same_sizes(a->counts, b->counts, experts) &&
                       same_sizes(a->plan.offsets, b->plan.offsets, experts + 1),
                   "counts, local routing");
            AGREES(memcmp(p->recorded, want->recorded, n * b->max_choices * sizeof(int32_t)) == 0,
                   "choices, local routing");
        }
        for (k = 0; k < n; k++)
            if (g->all.part[r].mask == NULL || g->all.part[r].mask[k])
                AGREES(near(a->logits + k * columns, b->logits + k * columns, columns, exact, 1.0),
                       "logits, local routing");
        if (!s->training) continue;
        AGREES(is_frugal(s, r) || near(p->dx, want->dx, n * d, exact && !scored, largest(want->dx, n * d)),
               "dx, local routing");
        AGREES(is_frugal(s, r) ||
                   near(p->d_router_x, want->d_router_x, n * d, exact && !scored, largest(want->d_router_x, n * d)),
               "d_router_x, local routing");
        AGREES(near(p->d_attention, want->d_attention, HEADS * n * n, exact, 1.0) &&
                   near(p->d_outputs, want->d_outputs, HEADS * n * d, exact, 1.0) &&
                   near(p->d_output, want->d_output, n * d, exact, 1.0),
               "the gradients of attention, local routing");
        compare_state(g, s, step, r);
    }
    compare_local_gradients(g, step, s, scored, exact);
}

/* The tensors of each rank start as its part of the whole's. */
static void compare_start(const stage *g, const scene *s) {
    const player *one = &g->whole;
    size_t at[RANKS_MOST] = {0}, all = 0, i;
    moe_tensor t, own;
    int r;
    for (i = 0; moe_layer_tensor(&one->layer, i, &t) == MOE_OK; all += t.count, i++) {
        size_t sum = 0;
        int good = 1;
        for (r = 0; r < s->ranks; r++) {
            if (moe_layer_tensor(&g->parts[r].layer, i, &own) != MOE_OK) good = 0;
            else {
                good &= strcmp(t.name, own.name) == 0 && t.n_dims == own.n_dims &&
                        own.shape[t.n_dims - 1] == t.shape[t.n_dims - 1];
                good &= own.count <= t.count &&
                        near(g->parts[r].start + at[r], one->start + all + rows_before(s, r, &own), own.count, 1, 0.0);
                sum += is_of_experts(s, t.name) ? own.count : t.count;
                at[r] += own.count;
            }
        }
        if (!good || sum != (is_of_experts(s, t.name) ? t.count : t.count * (size_t)s->ranks)) AGREES(0, t.name);
    }
    AGREES(all == one->count, "the tensors start alike");
}

/* A step that went wrong at one rank ended at all of them, and says so: to the others with the name
   of that rank. */
static void compare_spoilt(const stage *g, const scene *s) {
    static const moe_status want[SPOIL_COUNT] = {
        MOE_OK,           MOE_ERR_NONFINITE, MOE_ERR_ARGUMENT,    MOE_ERR_SPACE,
        MOE_ERR_ARGUMENT, MOE_ERR_ARGUMENT,  MOE_ERR_ARGUMENT,    MOE_ERR_ARGUMENT,
        MOE_ERR_ARGUMENT, MOE_ERR_ARGUMENT,  MOE_ERR_UNSUPPORTED, MOE_ERR_ARGUMENT,
        MOE_ERR_ARGUMENT, MOE_ERR_STATE,     MOE_ERR_UNSUPPORTED, MOE_ERR_UNSUPPORTED,
        MOE_ERR_ARGUMENT, MOE_ERR_MEMORY};
    const int on_the_way_back = s->spoil == SPOIL_DY || s->spoil == SPOIL_STATE || s->spoil == SPOIL_SCORE;
    int r;
    for (r = 0; r < s->ranks; r++) {
        const result *p = &g->parts[r].results[0];
        const moe_status found = on_the_way_back ? p->back : p->status;
        const moe_status expected = r == s->spoiler ? want[s->spoil] : MOE_ERR_PEER;
        char text[120];
        sprintf(text, "spoilt by %d at rank %d: rank %d answers %d, not %d", s->spoil, s->spoiler, r, found, expected);
        /* all see that they are not alike */
        AGREES(found == (s->spoil == SPOIL_UNLIKE ? MOE_ERR_ARGUMENT : expected), text);
        sprintf(text, "rank %d: ", s->spoiler);
        AGREES(s->routes || (p->error.code == found && p->error.message[0] != '\0' &&
                             (found != MOE_ERR_PEER || strncmp(p->error.message, text, strlen(text)) == 0)),
               "error says why");
        AGREES(!on_the_way_back || p->status == MOE_OK, "forward was good");
        AGREES(p->draws == g->parts[0].results[0].draws, "the next call draws the same numbers on all ranks");
    }
}

/* One file, with the bytes of the single process's, from which every rank has read its part. */
static void compare_files(const stage *g, const scene *s) {
    const player *one = &g->whole;
    int r;
    AGREES(one->written == MOE_OK && one->reread == MOE_OK, "a layer's file of one process");
    for (r = 0; r < s->ranks; r++) {
        const player *p = &g->parts[r];
        if (!AGREES(p->written == MOE_OK && p->reread == MOE_OK, p->error.message)) return;
        AGREES(p->again_count == p->count && near(p->again, p->start, p->count, 1, 0.0), "the part that was read");
        AGREES(r == 0 ? p->file.size == one->file.size && memcmp(p->file.data, one->file.data, one->file.size) == 0
                      : p->file.size == 0,
               "one file, the same as of one process");
    }
}

static int home_of(const scene *s, size_t expert) {
    size_t first = 0, count = 0;
    int r;
    for (r = 0; r < s->ranks; r++) {
        moe_rank_part((size_t)s->config.router.n_experts, r, s->ranks, &first, &count);
        if (expert >= first && expert < first + count) return r;
    }
    return -1;
}

static int rank_of(const stage *g, const scene *s, size_t token) {
    int r = 0;
    while (r + 1 < s->ranks && token >= g->all.first[r + 1]) r++;
    return r;
}

/* Rows of x from each rank's tokens to each rank's experts, from the plan of one process. */
static void count_pairs(const stage *g, const scene *s, uint64_t pairs[RANKS_MOST][RANKS_MOST]) {
    const size_t experts = (size_t)s->config.router.n_experts;
    size_t e, i;
    int step, r;
    for (step = 0; step < s->steps; step++) {
        const moe_dispatch_plan *plan = &g->whole.results[step].routing.plan;
        for (e = 0; e < experts && s->local_routing; e++)
            for (r = 0; r < s->ranks; r++) {
                const moe_dispatch_plan *own = &g->alone[r].results[step].routing.plan;
                pairs[r][home_of(s, e)] += own->rows > 0 ? own->rows : own->offsets[e + 1] - own->offsets[e];
            }
        for (e = 0; e < experts && !s->local_routing; e++) {
            const int home = home_of(s, e);
            if (s->config.router.select == MOE_SELECT_SOFT)
                for (r = 0; r < s->ranks; r++)
                    pairs[r][home] += s->n_of[r] > 0 ? (uint64_t)s->config.router.slots * sequences_of(s, r) : 0;
            else
                for (i = plan->offsets[e]; i < plan->offsets[e + 1]; i++)
                    pairs[rank_of(g, s, (size_t)plan->assignments[i].token)][home]++;
        }
    }
}

/* What the library counted is what the transport saw, and what the plan says. */
static void compare_traffic(const stage *g, const scene *s) {
    const int scored = is_scored(s), node = s->per_node > 0 ? s->per_node : s->ranks;
    uint64_t pairs[RANKS_MOST][RANKS_MOST];
    int r, to;
    size_t t;
    memset(pairs, 0, sizeof pairs);
    count_pairs(g, s, pairs);
    for (r = 0; r < s->ranks; r++) {
        const player *p = &g->parts[r];
        const ranks_rank *seen = &g->world.ranks[r];
        uint64_t all = 0, away = 0;
        uint64_t far_away = 0, routed = 0;
        uint64_t messages = 0, messages_far = 0;
        if (is_frugal(s, r)) continue;
        for (t = g->all.first[r]; t < g->all.first[r + 1]; t++)
            routed += g->all.whole.mask == NULL || g->all.whole.mask[t] ? (uint64_t)s->steps : 0;
        for (to = 0; to < s->ranks; to++) {
            all += pairs[r][to];
            away += to != r ? pairs[r][to] : 0;
            far_away += to / node != r / node ? pairs[r][to] : 0;
            AGREES(p->bytes[to] == seen->bytes[to], "bytes that were counted are those that went");
            messages += to != r ? seen->messages[to] : 0;
            messages_far += to / node != r / node ? seen->messages[to] : 0;
            if (!scored)
                AGREES(p->rows[to] == (pairs[r][to] + pairs[to][r]) * (s->training ? 2u : 1u), "rows there and back");
        }
        AGREES(p->traffic.exchanges == seen->begins && p->traffic.messages == messages &&
                   p->traffic.messages_off_machine == messages_far,
               "exchanges and messages");
        AGREES(p->traffic.tokens == routed && p->traffic.assignments == all && p->traffic.assignments_remote == away &&
                   p->traffic.assignments_off_machine == far_away,
               "tokens and pairs, and how far they went");
    }
}

static int has_zero_experts(const moe_router_config *c) { return c->n_zero + c->n_copy + c->n_constant > 0; }

/* What does not go with ranks: experts without matrices, and soft, which decides in each process
   for itself, with clusters of all tokens. */
static int is_refused(const scene *s) {
    const moe_router_config *c = &s->config.router;
    if (!s->routes && has_zero_experts(c)) return 1;
    if (s->local_routing) return c->l1_controller || c->ac_mode == MOE_AC_RUNNING;
    return c->select == MOE_SELECT_SOFT && c->input == MOE_INPUT_ADAPTIVE_CLUSTERING &&
           (c->ac_mode == MOE_AC_PAPER || c->ac_mode == MOE_AC_CODE);
}

static void compare_refused(const stage *g, const scene *s) {
    const moe_router_config *c = &s->config.router;
    int r;
    for (r = 0; r < s->ranks; r++) {
        const player *p = &g->parts[r];
        if (!s->routes && has_zero_experts(c))
            AGREES(p->made == MOE_ERR_CONFIG && strstr(p->error.message, "n_constant") != NULL &&
                       strstr(p->error.message, "transport") != NULL,
                   "experts without matrices and a transport");
        else if (s->routes)
            AGREES(p->results[0].status == MOE_ERR_UNSUPPORTED, "soft with adaptive clustering and a batch");
        else if (s->local_routing)
            AGREES(p->made == MOE_ERR_CONFIG &&
                       strstr(p->error.message, c->l1_controller ? "l1_controller" : "running") != NULL &&
                       strstr(p->error.message, "local_routing") != NULL,
                   "what does not go with local routing");
        else
            AGREES(p->made == MOE_ERR_CONFIG && strstr(p->error.message, "adaptive_clustering") != NULL &&
                       strstr(p->error.message, "transport") != NULL,
                   "soft with adaptive clustering and a transport");
    }
}

static int local_routing_now; /* 1: local routing in all scenes */

/* Plays a scene and compares. Returns how many messages went to other nodes. */
static uint64_t test_scene(scene *s) {
    static unsigned turn;
    uint64_t far_away = 0;
    stage *g;
    int r, step, rare, good = 1;
    turn++;
    /* few scenes have loss_load, which alone reads the noise of other ranks' tokens, cutoffs, or
       jitter that is drawn for each rank's tokens alone */
    rare = s->config.router.loss_load > 0 || s->config.router.select == MOE_SELECT_EXPERT_THRESHOLD ||
           (s->config.router.select == MOE_SELECT_SOFT && s->config.router.input == MOE_INPUT_JITTER);
    if (quick && turn % 6 != 0 && !rare) return 0;
    if (s->config.router.select == MOE_SELECT_SOFT) s->with &= ~(unsigned)(WITH_GIVEN | WITH_LAST);
    s->local_routing = local_routing_now;
    /* distances are those of a call */
    if (s->local_routing) s->with &= ~(unsigned)(WITH_DISTANCES | WITH_FILE | WITH_PACKED);
    g = stage_begin(s);
    if (!AGREES(g->fault == NULL, g->fault != NULL ? g->fault : "the ranks keep the rules") ||
        !AGREES(g->whole.made == MOE_OK, g->whole.error.message)) {
        stage_end(g);
        return 0;
    }
    AGREES(g->whole.sized == MOE_OK && g->whole.packed == MOE_OK, "workspace of one process");
    if (is_refused(s)) {
        compare_refused(g, s);
        stage_end(g);
        return 0;
    }
    for (r = 0; r < s->ranks; r++) {
        player *p = &g->parts[r];
        good &= AGREES(p->begun == MOE_OK, "moe_transport_begin") && AGREES(p->made == MOE_OK, p->error.message);
        good &= AGREES(p->sized == MOE_OK && p->packed == MOE_OK, "workspace, packed weights");
    }
    if (good && s->spoil != SPOIL_NOT) compare_spoilt(g, s);
    if (good) {
        compare_start(g, s);
        if (s->with & WITH_FILE && !s->routes) compare_files(g, s);
        for (step = s->spoil != SPOIL_NOT; step < s->steps; step++) {
            if (s->local_routing) compare_local_routing(g, step);
            else compare_step(g, step);
        }
        for (step = 0; step < s->steps; step++) good &= g->whole.results[step].status == MOE_OK;
        if (good && !s->routes && s->spoil == SPOIL_NOT) compare_traffic(g, s);
        for (r = 0; r < s->ranks; r++) {
            moe_layer_free(&g->parts[r].layer);
            AGREES(g->parts[r].blocks == 0, "no block is left");
        }
    }
    for (r = 0; r < s->ranks; r++) far_away += g->parts[r].traffic.messages_off_machine;
    stage_end(g);
    return far_away;
}

/* ---- what scenes are made of ---- */

/* How tokens lie on so many ranks, in turn. */
static void spread(scene *s, int turn) {
    static const size_t rows[][RANKS_MOST] = {
        {17},           {1},        {6},          {9, 6},       {0, 11},      {5, 8},          {7, 0, 6},
        {1, 5, 9},      {0, 0, 12}, {3, 8, 0, 5}, {5, 1, 4, 7}, {0, 9, 0, 2}, {2, 6, 0, 1, 5}, {3, 4, 5, 1, 2},
        {0, 0, 0, 8, 0}};
    memcpy(s->n_of, rows[3 * (s->ranks - 1) + turn % 3], sizeof s->n_of);
}

/* A small layer of a preset for so many ranks: 8 experts, or 7 on 5 ranks. */
static void shrink(moe_layer_config *c, int ranks) {
    const int experts = ranks == 5 ? 7 : 8;
    c->router.n_experts = experts;
    TEST_FEWER_EXPERTS(c->router);
    c->router.d_model = 3 * experts;
    c->d_ff = 5;
    c->d_low = c->expert == MOE_EXPERT_FACTORISED ? 4 : 0;
    if (c->router.top_k > 3) c->router.top_k = 3;
    if (c->router.select == MOE_SELECT_GROUPED_TOP_K) {
        c->router.groups = experts == 8 ? 4 : 7;
        c->router.groups_kept = experts == 8 ? 2 : 4;
    }
    if (c->router.select == MOE_SELECT_HASH || c->router.student_dim > 0) c->router.table_size = IDS;
    if (c->router.refine == MOE_REFINE_ATTENTION) c->router.heads = HEADS;
    if (c->router.select == MOE_SELECT_SOFT) c->router.soft_sequences = 3 * RANKS_MOST;
    c->router.untrained = 1;
}

/* Fills in what is left to defaults: the test's own arrays have sizes by it. */
static int complete(moe_layer_config *c, const char *name) {
    moe_error error;
    if (CHECK(moe_layer_check(c, c, &error) == MOE_OK, name)) return 1;
    printf("  %s\n", error.message);
    return 0;
}

/* What does not matter to results changes from scene to scene. */
static void vary(scene *s, int turn) {
    s->moving = turn % RANKS_MOVING;
    s->chunks = turn % 4;
    s->per_node = s->ranks % 2 == 0 ? (turn % 2 == 0 ? 2 : 0) : (turn % 3 == 0 ? 1 : 0);
    s->two_level = turn % 5 < 2;
    spread(s, turn);
}

/* What a scene has beside its router's needs: another mixture for every number. */
static unsigned draw_with(int turn) {
    static const struct {
        unsigned with;
        int one_in;
    } rows[] = {{WITH_MASK, 3},      {WITH_SEQUENCES, 3}, {WITH_ROUTER_X, 5}, {WITH_NOISE, 3},
                {WITH_TEAM, 9},      {WITH_LATE, 8},      {WITH_CROWD, 8},    {WITH_HOME, 2},
                {WITH_DISTANCES, 2}, {WITH_GIVEN, 12},    {WITH_KEEP, 8},     {WITH_ROOM, 8},
                {WITH_NO_DX, 7},     {WITH_FILE, 6},      {WITH_NULLS, 2},    {WITH_FROZEN, 8}};
    unsigned with = 0;
    size_t i;
    moe_rng own;
    moe_rng_seed(&own, (uint64_t)turn);
    for (i = 0; i < sizeof rows / sizeof *rows; i++)
        if (moe_rng_below(&own, (uint64_t)rows[i].one_in) == 0) with |= rows[i].with;
    return with;
}

static void with_presets(int routes) {
    const moe_preset *preset;
    int turn = 0;
    for (preset = moe_presets(); preset->name != NULL; preset++) {
        int ranks, training;
        for (ranks = 1; ranks <= 5; ranks++)
            for (training = 0; training < 2; training++) {
                scene s;
                memset(&s, 0, sizeof s);
                turn++;
                s.routes = routes;
                s.name = preset->name;
                s.ranks = ranks;
                s.training = training;
                s.steps = training ? 2 : 1;
                s.seed = (uint64_t)turn;
                if (!CHECK(moe_layer_preset(preset->name, &s.config, NULL) == MOE_OK, preset->name)) continue;
                shrink(&s.config, ranks);
                if (!complete(&s.config, preset->name)) continue;
                vary(&s, turn / 2);
                s.config.kernels = turn % 7 == 3 ? MOE_KERNELS_AUTO : MOE_KERNELS_C;
                s.with = draw_with(turn);
                if (s.config.router.score == MOE_SCORE_NORM) s.with &= ~(unsigned)WITH_ROUTER_X;
                (void)test_scene(&s);
            }
    }
}

/* Settings of a configuration as presets have them. */
static int apply(moe_layer_config *c, const char *settings) {
    moe_error error;
    if (CHECK(moe_fields_apply(moe_layer_fields(), c, settings, &error) == MOE_OK, settings)) return 1;
    printf("  %s\n", error.message);
    return 0;
}

/* A plain layer with some settings, for so many ranks. */
static int begin_scene(scene *s, const char *settings, int ranks, int training, int turn) {
    memset(s, 0, sizeof *s);
    s->name = settings;
    s->ranks = ranks;
    s->training = training;
    s->steps = training ? 2 : 1;
    s->seed = 5000 + (uint64_t)turn;
    if (!apply(&s->config, settings)) return 0;
    shrink(&s->config, ranks);
    if (!complete(&s->config, settings)) return 0;
    vary(s, turn);
    s->config.kernels = turn % 6 == 5 ? MOE_KERNELS_AUTO : MOE_KERNELS_C;
    s->with = draw_with(turn + 77);
    return 1;
}

/* Every rule of capacity with every other. */
static void with_capacity(int routes) {
    static const char *const limits[] = {"capacity_factor=0.6",
                                         "capacity_factor=1.3 capacity_factor_eval=0.5",
                                         "drop_capacity=2",
                                         "capacity_factor=0.2 capacity_min=2",
                                         "capacity_bound=first",
                                         "capacity_bound=every capacity_factor=0.4",
                                         "capacity_bound=every capacity_rho=0.7"};
    static const char *const orders[] = {"position", "priority", "random", "score"};
    static const char *const rules[] = {"none", "gshard", "st_moe"};
    static const char *const renormalize[] = {"before", "after"};
    int limit, order, rule, which, training, turn = 0;
    for (limit = 0; limit < 7; limit++)
        for (order = 0; order < 4; order++)
            for (rule = 0; rule < 3; rule++)
                for (which = 0; which < 2; which++)
                    for (training = 0; training < 2; training++) {
                        char text[NAME_SIZE];
                        scene s;
                        turn++;
                        sprintf(text,
                                "%s drop_order=%s drop_rule=%s renormalize=%s top_k=%d weight=%s loss_balance=0.1",
                                limits[limit], orders[order], rules[rule], renormalize[which],
                                rule > 0 && turn % 3 == 0 ? 2 : 1 + turn % 3, turn % 2 ? "sum" : "raw");
                        if (!begin_scene(&s, text, 1 + (turn / 2) % 5, training, turn)) continue;
                        s.routes = routes;
                        (void)test_scene(&s);
                    }
}

/* Selections among all tokens, replays, schedules, losses over sequences, and stages of the
   caller's own. */
static void with_rules(int routes) {
    static const char *const rows[] = {
        "select=given top_k=2 capacity_factor=0.5",
        "select=expert_choice capacity_factor=1.5 weight=raw",
        "select=expert_choice expert_choice_score=z capacity_factor=0.5 weight=raw",
        "select=affinity affinity_mass=0.4 weight=raw top_k=1",
        "select=affinity affinity_sum=1 capacity=2 capacity_min=2 weight=raw top_k=1",
        "select=affinity capacity=3 weight=raw top_k=1 switch_at=1",
        "select=sinkhorn top_k=2 weight=raw capacity_factor=1",
        "select=balanced top_k=1 weight=raw gate=sigmoid",
        "select=sample top_k=2 weight=raw",
        "select=sample top_k=1 weight=raw capacity_factor=0.7 drop_order=random",
        "select=top_p top_p=0.7 weight=raw drop_capacity=3",
        "select=threshold threshold=0.15 threshold_fallback=never weight=raw",
        "select=dense weight=raw loss_entropy=0.1 loss_usage_entropy=0.1",
        "select=positive gate=relu weight=raw loss_l1=0.1 l1_controller=1 capacity_factor=1",
        "top_k=3 k_end=1 schedule_steps=2 weight=raw",
        "gate_temperature=2 tau_schedule=gate_temperature tau_end=0.5 schedule_steps=3",
        "freeze_at=1 loss_balance=0.1 weight=raw",
        "loss_balance=0.1 balance_scope=sequences balance_over=first loss_z=0.1",
        "loss_balance=0.1 balance_over=tokens loss_importance=0.1 loss_orthogonal=0.1",
        "loss_importance=0.1 importance_over=weights noise=gaussian loss_load=0.1",
        "noise=noisy_topk loss_load=0.1 loss_importance=0.2 importance_over=gate drop_order=random capacity_factor=1",
        "noise=gumbel drop_rule=st_moe capacity_factor=1.2",
        "expert_dropout=0.3 selection_bias=1",
        "expert_dropout=0.3 expert_dropout_scope=call select=expert_choice weight=raw",
        "input=jitter jitter_eps=0.1 noise=gaussian drop_order=random capacity_factor=0.8 weight=raw",
        "input=jitter top_k=1 weight=raw",
        "input=jitter select=soft",
        "loss_similarity_same=0.1 loss_similarity_diff=0.2 weight=raw",
        "loss_locality=0.3 nodes=2 weight=raw",
        "loss_locality=0.3 nodes=3 weight=raw capacity_bound=first",
        "loss_distill=0.4 distill=ce_soft",
        "loss_distill=0.4 distill=mse",
        "student=1 loss_distill=0.5 freeze_at=1 weight=raw",
        "selection_bias=1 bias_rate=0.1 weight=raw",
        "selection_bias=1 bias_rate=0.1 select=grouped_top_k groups=1 groups_kept=1 gate=sigmoid weight=raw",
        "score=custom",
        "score=custom select=custom weight=raw",
        "score=mlp router_hidden=9 router_act=gelu loss_z=0.1",
        "score=cosine cosine_dim=5 cosine_learn_tau=1 tau_schedule=none",
        "score=dselect gate=identity select=positive top_k=2 loss_entropy=0.1 loss_selector_entropy=0.3",
        "select=grouped_each groups=1 top_k=2 selection_bias=1 bias_rate=0.1 bias_rule=smebu gate=sigmoid",
        "selection_bias=1 bias_rate=0.1 bias_rule=proportional bias_centre=1 loss_stable_balance=0.1 gate=sigmoid",
        "select=expert_threshold gate=sigmoid weight=raw threshold_rho=0.5",
        "select=expert_threshold capacity_factor=2 weight=raw switch_from=expert_choice switch_at=1",
        "switch_from=expert_choice switch_at=9 weight=raw",
        "logit_cap=1.5 weight=softmax loss_z=0.1 noise=gaussian loss_load=0.1",
        "weight=sparsemixer sparsemixer_sample=1 sparsemixer_eps=0.3 top_k=2",
        "input=scaled_rms expert_scale=1 scale=2.5",
        "input=adaptive_clustering ac_mode=running weight=raw",
        "input=adaptive_clustering ac_mode=running ac_rho=0.5 ac_spread=pairwise weight=raw",
        "input=adaptive_clustering ac_mode=code ac_spread=variance weight=raw",
        "input=adaptive_clustering ac_mode=code weight=raw",
        "input=adaptive_clustering ac_spread=pairwise ac_mix=2 weight=raw",
        "input=adaptive_clustering ac_mode=random weight=raw",
        "input=adaptive_clustering ac_lambda=0.5 weight=raw",
        "refine=similarity similarity_learned=1 lower_entropy_only=1",
        "refine=similarity causal=1 similarity_scale=l2 capacity_factor=1",
        "refine=attention attention_heads=all",
        "refine=attention attention_heads=fixed attention_head=1 attention_u=output causal=1",
        "refine=attention attention_heads=min_entropy drop_order=priority capacity_factor=0.9",
        "weight=sparsemixer top_k=2 capacity_factor=1",
        "weight=p_norm weight_p=2",
        "weight=softmax drop_capacity=1 renormalize=after",
        "score=random weight=raw",
        "score=grap weight=raw top_k=2 capacity_bound=every"};
    size_t i;
    int turn = 0, training, again;
    for (i = 0; i < sizeof rows / sizeof *rows; i++)
        for (training = 0; training < 2; training++)
            for (again = 0; again < 2; again++) {
                scene s;
                turn++;
                if (!begin_scene(&s, rows[i], 2 + (turn + turn / 4) % 4, training, turn)) continue;
                /* a router alone does not know of other processes' tokens */
                if (routes && s.config.router.select == MOE_SELECT_SOFT) continue;
                s.routes = routes;
                s.steps = training ? 3 : 1;
                /* a replay may name several experts */
                if (again && s.config.router.select == MOE_SELECT_AFFINITY) s.with |= WITH_GIVEN;
                if (strstr(rows[i], "heads=") != NULL || strstr(rows[i], "causal") != NULL)
                    s.with &= ~(unsigned)WITH_CROWD;
                (void)test_scene(&s);
            }
}

/* A preset with a few fields set at random. */
static int draw_config(moe_layer_config *c, int ranks, char *text) {
    const moe_field *fields = moe_layer_fields();
    const moe_preset *presets = moe_presets();
    size_t n_fields = 0, n_presets = 0;
    int changes = 1 + below(4);
    moe_error error;
    while (fields[n_fields].name != NULL) n_fields++;
    while (presets[n_presets].name != NULL) n_presets++;
    n_presets = (size_t)below((int)n_presets);
    if (moe_layer_preset(presets[n_presets].name, c, &error) != MOE_OK) return 0;
    shrink(c, ranks);
    sprintf(text, "%s", presets[n_presets].name);
    for (; changes > 0; changes--) {
        const moe_field *f = &fields[below((int)n_fields)];
        static const char *const ints[] = {"1", "2", "3", "5"}, *const reals[] = {"0.05", "0.3", "0.9", "1.5"};
        const char *value = f->kind == MOE_FIELD_FLAG   ? "1"
                            : f->kind == MOE_FIELD_REAL ? reals[below(4)]
                                                        : ints[below(4)];
        int n = 0;
        if (f->kind == MOE_FIELD_CHOICE) {
            while (f->choices[n] != NULL) n++;
            value = f->choices[below(n)];
        }
        if (strcmp(f->name, "n_experts") == 0 || strcmp(f->name, "d_model") == 0 || strcmp(f->name, "kernels") == 0)
            continue;
        if (moe_field_set(fields, c, f->name, value, &error) == MOE_OK)
            sprintf(text + strlen(text), " %s=%s", f->name, value);
    }
    if (c->router.refine == MOE_REFINE_ATTENTION) c->router.heads = HEADS;
    if (c->router.select == MOE_SELECT_HASH || c->router.student_dim > 0) c->router.table_size = IDS;
    return moe_layer_check(c, c, &error) == MOE_OK;
}

static void with_random(int routes) {
    int turn, drawn = 0;
    for (turn = 1; drawn < 250; turn++) {
        char text[2 * NAME_SIZE];
        scene s;
        memset(&s, 0, sizeof s);
        moe_rng_seed(&rng, 90000 + (uint64_t)turn);
        s.ranks = 1 + turn % 5;
        if (!draw_config(&s.config, s.ranks, text)) continue;
        s.name = text;
        s.routes = routes;
        s.training = below(3) > 0;
        s.steps = s.training ? 2 : 1;
        s.seed = 70000 + (uint64_t)turn;
        vary(&s, turn + turn / 5);
        s.config.kernels = turn % 6 == 5 ? MOE_KERNELS_AUTO : MOE_KERNELS_C;
        s.with = draw_with(turn + 177);
        if (s.config.router.score == MOE_SCORE_NORM) s.with &= ~(unsigned)WITH_ROUTER_X;
        (void)test_scene(&s);
        drawn++;
    }
}

/* ---- the transport itself ---- */

typedef struct drill {
    int kind, n;
    moe_status status[RANKS_MOST];
    int wrong[RANKS_MOST];
} drill;

/* What a rank may do against the rules. */
enum {
    DRILL_GOOD = 0,
    DRILL_OTHER_N,
    DRILL_OTHER_CALL,
    DRILL_COUNTS,
    DRILL_OVERLAP,
    DRILL_CHANGED,
    DRILL_WRITTEN,
    DRILL_NO_BEGIN,
    DRILL_NO_END,
    DRILL_TWICE,
    DRILL_ARRAYS,
    DRILL_LEAVES,
    DRILL_COUNT
};

static unsigned char drill_byte(int from, int to, size_t i) {
    return (unsigned char)(1 + from * 50 + to * 7 + (int)(i % 5));
}

static void drill_sums(drill *d, int n, int me, int odd, moe_transport *t, moe_status *status) {
    uint64_t to[RANKS_MOST * 2], from[RANKS_MOST * 2];
    moe_real sums[3];
    int i;
    for (i = 0; i < 2 * n; i++) to[i] = (uint64_t)(me * 100 + i);
    if (*status == MOE_OK) *status = t->counts(t->ctx, odd && d->kind == DRILL_OTHER_N ? 1 : 2, to, from);
    for (i = 0; i < 2 * n && *status == MOE_OK; i++)
        d->wrong[me] |= from[i] != (uint64_t)(i / 2 * 100 + 2 * me + i % 2);
    for (i = 0; i < 3; i++) sums[i] = (moe_real)(1 + me * (i + 1));
    if (*status == MOE_OK)
        *status = odd && d->kind == DRILL_OTHER_CALL ? t->counts(t->ctx, 2, to, from) : t->sum(t->ctx, 3, sums);
    for (i = 0; i < 3 && *status == MOE_OK; i++)
        d->wrong[me] |= fabs((double)sums[i] - (n + n * (n - 1) / 2 * (i + 1))) > 1e-6;
    d->status[me] = *status;
}

/* Ragged rows of 3 bytes to everybody, two exchanges at a time; then sums and counts. */
static void drill_task(ranks_rank *self, void *ctx) {
    drill *d = (drill *)ctx;
    const int n = d->n, me = self->rank;
    const int odd = me == n - 1 && n > 1;
    unsigned char send[2][200], receive[2][400];
    size_t send_counts[2][RANKS_MOST], send_at[2][RANKS_MOST], receive_counts[2][RANKS_MOST], receive_at[2][RANKS_MOST];
    moe_exchange e[2];
    moe_transport t = ranks_transport(self);
    moe_status status = MOE_OK;
    int i, k;
    size_t b;
    memset(e, 0, sizeof e);
    memset(receive, 0, sizeof receive);
    for (k = 0; k < 2; k++) {
        size_t at = 0, back = 0;
        for (i = 0; i < n; i++) {
            send_counts[k][i] = (size_t)((me + 2 * i + k) % 4);
            receive_counts[k][i] = (size_t)((i + 2 * me + k) % 4);
            send_at[k][i] = at;
            receive_at[k][i] = back;
            for (b = 0; b < 3 * send_counts[k][i]; b++) send[k][3 * at + b] = drill_byte(me, i, b);
            at += send_counts[k][i];
            back += receive_counts[k][i];
        }
        if (odd && k == 0 && d->kind == DRILL_COUNTS) send_counts[k][0]++;
        e[k].row_bytes = 3;
        e[k].send = send[k];
        e[k].receive = receive[k];
        e[k].channel = k;
        e[k].send_counts = send_counts[k];
        e[k].send_at = send_at[k];
        e[k].receive_counts = receive_counts[k];
        e[k].receive_at = receive_at[k];
    }
    if (odd && d->kind == DRILL_OVERLAP) {
        receive_at[0][0] = receive_at[0][me];
        receive_counts[0][0] = 1;
    }
    if (odd && d->kind == DRILL_LEAVES) return;
    if (!(odd && d->kind == DRILL_NO_BEGIN)) status = t.rows(t.ctx, MOE_EXCHANGE_BEGIN, &e[0]);
    if (status == MOE_OK) status = t.rows(t.ctx, MOE_EXCHANGE_BEGIN, &e[1]);
    if (odd && d->kind == DRILL_TWICE && status == MOE_OK) status = t.rows(t.ctx, MOE_EXCHANGE_BEGIN, &e[1]);
    if (d->kind == DRILL_CHANGED) memset(send[0], 77, sizeof send[0]);
    if (d->kind == DRILL_WRITTEN) memset(receive[1], 78, sizeof receive[1]);
    if (odd && d->kind == DRILL_ARRAYS) e[1].receive = receive[0];
    if (status == MOE_OK) status = t.rows(t.ctx, MOE_EXCHANGE_END, &e[1]);
    if (status == MOE_OK && d->kind != DRILL_NO_END) status = t.rows(t.ctx, MOE_EXCHANGE_END, &e[0]);
    for (k = 0; k < 2 && status == MOE_OK && d->kind == DRILL_GOOD; k++)
        for (i = 0; i < n; i++)
            for (b = 0; b < 3 * receive_counts[k][i]; b++)
                d->wrong[me] |= receive[k][3 * receive_at[k][i] + b] != drill_byte(i, me, b);
    drill_sums(d, n, me, odd, &t, &status);
}

static void test_transport(void) {
    int ranks, moving, kind, r;
    for (ranks = 1; ranks <= 5; ranks++)
        for (moving = 0; moving < RANKS_MOVING; moving++)
            for (kind = 0; kind < DRILL_COUNT; kind++) {
                ranks_world w;
                drill d;
                const char *fault;
                memset(&d, 0, sizeof d);
                d.kind = kind;
                d.n = ranks;
                if (ranks == 1 && kind != DRILL_GOOD) continue;
                ranks_begin(&w, ranks, moving);
                fault = ranks_run(&w, drill_task, &d);
                /* what has come may be read and changed */
                if (kind == DRILL_WRITTEN && moving == RANKS_AT_BEGIN) continue;
                if (!CHECK((fault == NULL) == (kind == DRILL_GOOD), "a transport that sees what is against its rules"))
                    printf("  %d: %s\n", kind, fault != NULL ? fault : "no fault");
                for (r = 0; r < ranks && kind == DRILL_GOOD; r++)
                    CHECK(d.status[r] == MOE_OK && !d.wrong[r], "what was sent has come");
                ranks_end(&w);
            }
    for (kind = 1; kind <= 7; kind++) /* of seven calls, the sixth is the last */
        for (moving = 0; moving < 2 * RANKS_MOVING; moving++) {
            ranks_world w;
            drill d;
            const char *fault;
            memset(&d, 0, sizeof d);
            d.n = 3;
            ranks_begin(&w, 3, moving / 2);
            w.ranks[1].fail_at = (unsigned long)kind;
            w.ranks[1].fail_late = moving % 2;
            fault = ranks_run(&w, drill_task, &d);
            CHECK(d.status[1] == (kind <= 6 ? MOE_ERR_TRANSPORT : MOE_OK) && w.fault[0] == '\0',
                  "a transport that fails when it is told to");
            CHECK(kind < 6 || moving % 2 || (fault != NULL) == (kind == 6), "the others learn of it");
            ranks_end(&w);
        }
}

/* ---- what is refused ---- */

static void test_parts(void) {
    size_t n;
    int ranks, r;
    for (n = 0; n < 30; n++)
        for (ranks = 1; ranks < 9; ranks++) {
            size_t at = 0, least = n;
            size_t most = 0;
            for (r = 0; r < ranks; r++) {
                size_t first = 99, count = 99;
                moe_rank_part(n, r, ranks, &first, &count);
                CHECK(first == at, "parts are consecutive");
                at += count;
                if (count < least) least = count;
                if (count > most) most = count;
            }
            CHECK(at == n && most - least <= 1, "parts are all, and even");
        }
}

/* Ranks that begin with transports that are not good, or not alike. */
typedef struct opening {
    int kind, odd; /* odd: the rank that is different, or -1: all are */
    moe_status status[RANKS_MOST];
    moe_error error[RANKS_MOST];
} opening;

enum {
    OPEN_RANK = 0,
    OPEN_RANK_HIGH,
    OPEN_NONE,
    OPEN_MANY,
    OPEN_NODE,
    OPEN_NODE_NEGATIVE,
    OPEN_LEVEL,
    OPEN_CHUNKS,
    OPEN_CHUNKS_MANY,
    OPEN_APART,
    OPEN_NO_COUNTS,
    OPEN_NO_ROWS,
    OPEN_NO_SUM,
    OPEN_OTHER_CHUNKS,
    OPEN_OTHER_NODE,
    OPEN_OTHER_LEVEL,
    OPEN_OTHER_APART,
    OPEN_GOOD,
    OPEN_COUNT
};

static void open_task(ranks_rank *self, void *ctx) {
    opening *o = (opening *)ctx;
    moe_transport t = ranks_transport(self);
    if (o->odd < 0 || o->odd == self->rank) {
        if (o->kind == OPEN_RANK) t.rank = -1;
        if (o->kind == OPEN_RANK_HIGH) t.rank = t.n_ranks;
        if (o->kind == OPEN_NONE) {
            t.n_ranks = 0;
            t.rank = 0;
        }
        if (o->kind == OPEN_MANY) {
            t.n_ranks = MOE_MAX_EXPERTS + 1;
            t.rank = 0;
        }
        if (o->kind == OPEN_NODE) t.ranks_per_machine = 3;
        if (o->kind == OPEN_NODE_NEGATIVE) t.ranks_per_machine = -2;
        if (o->kind == OPEN_LEVEL) t.two_level = 2;
        if (o->kind == OPEN_CHUNKS) t.chunks = -1;
        if (o->kind == OPEN_CHUNKS_MANY) t.chunks = MOE_MAX_EXPERTS + 1;
        if (o->kind == OPEN_APART) t.local_routing = 2;
        if (o->kind == OPEN_OTHER_APART) t.local_routing = 1;
        if (o->kind == OPEN_NO_COUNTS) t.counts = NULL;
        if (o->kind == OPEN_NO_ROWS) t.rows = NULL;
        if (o->kind == OPEN_NO_SUM) t.sum = NULL;
        if (o->kind == OPEN_OTHER_CHUNKS) t.chunks = 3;
        if (o->kind == OPEN_OTHER_NODE) t.ranks_per_machine = 2;
        if (o->kind == OPEN_OTHER_LEVEL) t.two_level = 1;
    }
    o->status[self->rank] = moe_transport_begin(&t, &o->error[self->rank]);
    if (o->kind == OPEN_GOOD && (t.ranks_per_machine != t.n_ranks || t.chunks != 1)) /* the defaults */
        o->status[self->rank] = MOE_ERR_FORMAT;
    moe_transport_end(&t);
    moe_transport_end(&t);
    if (moe_transport_status(&t, MOE_OK) != MOE_ERR_ARGUMENT) o->status[self->rank] = MOE_ERR_FORMAT;
}

static void test_begin(void) {
    static const char *const names[OPEN_COUNT] = {
        "rank",      "rank",   "n_ranks",       "n_ranks", "ranks_per_machine", "ranks_per_machine",
        "two_level", "chunks", "chunks",        "local_routing", "counts",      "rows",
        "sum",       "chunks", "ranks_per_machine", "two_level", "local_routing", ""};
    int kind, odd, r;
    for (kind = 0; kind < OPEN_COUNT; kind++)
        for (odd = -1; odd < 4; odd++) {
            ranks_world w;
            opening o;
            const char *fault;
            const int null = kind >= OPEN_NO_COUNTS && kind <= OPEN_NO_SUM;
            const int good = kind == OPEN_GOOD || (kind > OPEN_NO_SUM && odd < 0);
            memset(&o, 0, sizeof o);
            o.kind = kind;
            o.odd = odd;
            ranks_begin(&w, 4, RANKS_AT_END);
            fault = ranks_run(&w, open_task, &o);
            CHECK(w.fault[0] == '\0' && (fault == NULL || !good), "the ranks keep the rules");
            for (r = 0; r < 4; r++) {
                char text[200];
                const int own = odd < 0 || odd == r;
                moe_status want = good                 ? MOE_OK
                                  : kind > OPEN_NO_SUM ? MOE_ERR_CONFIG
                                  : null               ? MOE_ERR_ARGUMENT
                                                       : MOE_ERR_CONFIG;
                sprintf(text, "moe_transport_begin: %s, odd %d: rank %d answers %d, not %d: %.60s", names[kind], odd, r,
                        o.status[r], want, o.error[r].message);
                if (own || kind > OPEN_NO_SUM)
                    CHECK(o.status[r] == want && (good || strstr(o.error[r].message, names[kind]) != NULL), text);
                else
                    CHECK(o.status[r] == (kind >= OPEN_NODE && kind <= OPEN_APART ? MOE_ERR_PEER : MOE_ERR_TRANSPORT),
                          text); /* told, or left alone */
            }
            ranks_end(&w);
        }
    CHECK(moe_transport_begin(NULL, NULL) == MOE_ERR_ARGUMENT, "no transport");
}

/* Memory that is not there; what is taken is given back. */
typedef struct purse {
    long blocks;
    int empty;
} purse;

static void *purse_resize(void *ctx, void *block, size_t old_size, size_t new_size) {
    purse *p = (purse *)ctx;
    return p->empty && new_size > 0 ? NULL : counted_resize(&p->blocks, block, old_size, new_size);
}

typedef struct saying {
    purse purses[RANKS_MOST];
    moe_status begun[RANKS_MOST], said[RANKS_MOST], gathered[RANKS_MOST];
} saying;

static void say_task(ranks_rank *self, void *ctx) {
    saying *s = (saying *)ctx;
    moe_transport t = ranks_transport(self);
    moe_allocator allocator;
    allocator.ctx = &s->purses[self->rank];
    allocator.resize = purse_resize;
    t.allocator = &allocator;
    s->begun[self->rank] = moe_transport_begin(&t, NULL);
    if (s->begun[self->rank] == MOE_OK) s->gathered[self->rank] = moe_transport_status(&t, s->said[self->rank]);
    moe_transport_end(&t);
}

/* Which status comes back where some fail, and a transport without memory. */
static void test_status(void) {
    int who, empty, r;
    for (who = 0; who < 16; who++)
        for (empty = -1; empty < 4; empty++) {
            ranks_world w;
            saying s;
            const char *fault;
            memset(&s, 0, sizeof s);
            if (empty >= 0) s.purses[empty].empty = 1;
            for (r = 0; r < 4; r++) s.said[r] = who >> r & 1 ? (r % 2 ? MOE_ERR_IO : MOE_ERR_MEMORY) : MOE_OK;
            ranks_begin(&w, 4, RANKS_AT_END);
            fault = ranks_run(&w, say_task, &s);
            CHECK(w.fault[0] == '\0' && (fault == NULL || empty >= 0), "the ranks keep the rules");
            for (r = 0; r < 4; r++) {
                CHECK(s.purses[r].blocks == 0, "what a transport took it gives back");
                if (empty >= 0)
                    CHECK(s.begun[r] == (r == empty ? MOE_ERR_MEMORY : MOE_ERR_TRANSPORT) ||
                              (r != empty && s.begun[r] == MOE_ERR_PEER),
                          "a transport without memory");
                else
                    CHECK(s.begun[r] == MOE_OK && s.gathered[r] == (s.said[r] != MOE_OK ? s.said[r]
                                                                 : who != 0          ? MOE_ERR_PEER
                                                                                     : MOE_OK),
                          "each says its own, the others that somebody failed");
            }
            ranks_end(&w);
        }
    CHECK(moe_transport_status(NULL, MOE_OK) == MOE_ERR_ARGUMENT, "no transport");
    moe_transport_end(NULL);
}

typedef struct question {
    int odd, number, n;
    moe_status status[RANKS_MOST];
    int rank[RANKS_MOST];
    size_t i[RANKS_MOST];
} question;

static void agree_task(ranks_rank *self, void *ctx) {
    question *q = (question *)ctx;
    moe_transport t = ranks_transport(self);
    uint64_t values[40] = {3, 1, 4, 1, UINT64_MAX};
    int k;
    /* those behind n differ */
    for (k = 5; k < 40; k++) values[k] = (uint64_t)(k < q->n ? k * 7 : k * 100 + self->rank);
    if (self->rank == q->odd) values[q->number]++;
    q->rank[self->rank] = -7;
    q->i[self->rank] = 77;
    q->status[self->rank] = moe_transport_begin(&t, NULL);
    if (q->status[self->rank] == MOE_OK)
        q->status[self->rank] =
            moe_transport_agree(&t, (size_t)q->n, values, self->rank == 2 ? NULL : &q->rank[self->rank],
                                self->rank == 2 ? NULL : &q->i[self->rank]);
    moe_transport_end(&t);
}

static void test_agree(void) {
    static const int lengths[] = {5, 8, 9, 16, 17, 30};
    int odd, number, r, length;
    for (odd = -1; odd < 3; odd++)
        for (length = 0; length < 6; length++)
            for (number = 0; number < lengths[length]; number += 1 + number / 5) {
                ranks_world w;
                question q;
                memset(&q, 0, sizeof q);
                q.odd = odd;
                q.number = number;
                q.n = lengths[length];
                ranks_begin(&w, 3, RANKS_AT_END);
                CHECK(ranks_run(&w, agree_task, &q) == NULL, "the ranks keep the rules");
                for (r = 0; r < 3; r++) {
                    CHECK(q.status[r] == (odd < 0 ? MOE_OK : MOE_ERR_CONFIG), "whether all have the same numbers");
                    if (odd >= 0 && r < 2)
                        CHECK(q.rank[r] == (r == odd ? (r == 0 ? 1 : 0) : odd) && q.i[r] == (size_t)number,
                              "which rank and which number");
                }
                ranks_end(&w);
            }
}

/* What layers say of a transport. */
typedef struct layer_try {
    int experts, wrong;
    moe_status checked[RANKS_MOST], made[RANKS_MOST];
    moe_error error[RANKS_MOST];
} layer_try;

static void too_many_task(ranks_rank *self, void *ctx) {
    layer_try *l = (layer_try *)ctx;
    moe_transport t = ranks_transport(self);
    moe_layer_config c;
    moe_layer layer;
    const int r = self->rank;
    memset(&c, 0, sizeof c);
    memset(&layer, 0, sizeof layer);
    c.router.d_model = 6;
    c.router.n_experts = l->experts;
    c.d_ff = 4;
    c.transport = &t;
    if (moe_layer_check(&c, NULL, NULL) != MOE_ERR_CONFIG) l->wrong = 1; /* moe_transport_begin was not called */
    if (moe_transport_begin(&t, NULL) != MOE_OK) l->wrong = 1;
    l->error[r].message[0] = '\0';
    l->checked[r] = moe_layer_check(&c, NULL, &l->error[r]);
    l->made[r] = moe_layer_create(&layer, &c, 0, 1, NULL, &l->error[r]);
    moe_layer_free(&layer);
    moe_transport_end(&t);
}

/* More ranks than experts are refused, as many as experts are not. */
static void test_too_many(void) {
    int experts, r;
    for (experts = 1; experts <= 6; experts++) {
        const moe_status want = experts < 5 ? MOE_ERR_CONFIG : MOE_OK;
        ranks_world w;
        layer_try l;
        memset(&l, 0, sizeof l);
        l.experts = experts;
        ranks_begin(&w, 5, RANKS_AT_END);
        CHECK(ranks_run(&w, too_many_task, &l) == NULL && !l.wrong, "the ranks keep the rules");
        for (r = 0; r < 5; r++) {
            char text[30];
            sprintf(text, "n_experts = %d", experts);
            CHECK(l.checked[r] == want && l.made[r] == want, "one expert at least for every rank");
            CHECK(want == MOE_OK ||
                      (strstr(l.error[r].message, text) != NULL && strstr(l.error[r].message, "n_ranks = 5") != NULL),
                  l.error[r].message);
        }
        ranks_end(&w);
    }
}

/* One rank does something that fails: all end the call, and the next one is good. */
static void test_spoilt(void) {
    static const struct {
        int spoil;
        const char *settings;
        int training; /* 2: both */
    } rows[] = {{SPOIL_NAN, "top_k=2", 2},
                {SPOIL_NAN, "capacity_factor=1", 2},
                {SPOIL_NAN, "input=adaptive_clustering weight=raw", 2},
                {SPOIL_NAN, "score=cosine", 2},
                {SPOIL_NAN, "select=soft input=jitter", 1},
                {SPOIL_NO_X, "top_k=2", 2},
                {SPOIL_NO_X, "drop_capacity=2", 2},
                {SPOIL_WORK, "top_k=2", 2},
                {SPOIL_WORK, "select=expert_choice weight=raw", 2},
                {SPOIL_SEQUENCES, "top_k=2", 2},
                {SPOIL_SUPPLY, "select=hash table_size=11 top_k=1 weight=uniform", 2},
                {SPOIL_SUPPLY, "select=given top_k=1 weight=raw", 2},
                {SPOIL_SUPPLY, "refine=attention heads=2", 2},
                {SPOIL_SUPPLY, "input=adaptive_clustering weight=raw", 2},
                {SPOIL_SUPPLY, "loss_distill=0.4", 1},
                {SPOIL_SUPPLY, "loss_similarity_same=0.1 loss_similarity_diff=0.2 weight=raw", 1},
                {SPOIL_RNG, "noise=gaussian", 1},
                {SPOIL_RNG, "compete_rate=0.5", 1},
                {SPOIL_TENSOR, "top_k=2", 2},
                {SPOIL_EXPERT, "top_k=2", 2},
                {SPOIL_Y, "top_k=2", 2},
                {SPOIL_DECODING, "refine=similarity", 0},
                {SPOIL_WORK_NULL, "top_k=2", 2},
                {SPOIL_DY, "top_k=2", 1},
                {SPOIL_DY, "n_shared=1 capacity_factor=1", 1},
                {SPOIL_STATE, "top_k=2", 1},
                {SPOIL_PAST, "refine=similarity causal=1", 0},
                {SPOIL_BATCH, "top_k=2", 2},
                {SPOIL_UNLIKE, "top_k=1 weight=raw capacity_factor=1", 2},
                {SPOIL_UNLIKE, "loss_locality=0.1 nodes=2", 1},
                {SPOIL_UNLIKE, "noise=gaussian", 1},
                {SPOIL_UNLIKE, "loss_similarity_same=0.1 loss_similarity_diff=0.2 weight=raw", 1},
                {SPOIL_NAN, "score=norm norm_node=product", 2},
                {SPOIL_WORK, "score=competition gate=identity", 2},
                {SPOIL_NO_X, "select=soft", 2},
                {SPOIL_SCORE, "score=custom", 1}};
    size_t i;
    int turn = 0, training, ranks, spoiler;
    for (i = 0; i < sizeof rows / sizeof *rows; i++)
        for (training = rows[i].training == 1; training < (rows[i].training == 0 ? 1 : 2); training++)
            for (ranks = 1; ranks <= 4; ranks += 1 + (ranks == 2))
                for (spoiler = 0; spoiler < ranks; spoiler++) {
                    scene s;
                    size_t r;
                    turn++;
                    if (!begin_scene(&s, rows[i].settings, ranks, training, turn)) continue;
                    for (r = 0; r < (size_t)ranks; r++) s.n_of[r] = 3 + (r + (size_t)turn) % 3;
                    s.with &= WITH_MASK | WITH_SEQUENCES;
                    if (rows[i].spoil == SPOIL_UNLIKE && (ranks == 1 || local_routing_now)) continue;
                    if (s.config.router.loss_similarity_same > 0) {
                        if (ranks == 1 || local_routing_now) continue;
                        s.with |= WITH_DISTANCES;
                        /* without tokens it is unlike nobody, and still reads the distances of
                           all */
                        if (rows[i].spoil == SPOIL_SUPPLY) s.n_of[spoiler] = 0;
                    }
                    if (rows[i].spoil == SPOIL_UNLIKE)
                        s.with |= strstr(rows[i].settings, "noise") != NULL   ? WITH_NOISE
                                  : strstr(rows[i].settings, "nodes") != NULL ? WITH_HOME
                                  : strstr(rows[i].settings, "similarity")    ? WITH_DISTANCES
                                                                              : WITH_GIVEN;
                    if (rows[i].spoil == SPOIL_NAN) s.with &= ~(unsigned)WITH_MASK;
                    s.spoil = rows[i].spoil;
                    s.spoiler = spoiler;
                    s.steps = 2;
                    s.config.kernels = MOE_KERNELS_C;
                    (void)test_scene(&s);
                }
}

/* Plays a scene whose transport fails at call k. Returns whether there was such a call; *made: the
   calls until the layer was there. */
static int fails_at(scene *s, unsigned long k, unsigned long *made) {
    stage *g;
    int r, ended = 0, reached;
    s->fail_rank = (int)k % s->ranks;
    s->fail_at = k;
    g = stage_begin(s);
    reached = g->world.ranks[s->fail_rank].calls >= k;
    AGREES(g->world.ranks[s->fail_rank].calls <= k, "a transport that has failed is not called again");
    AGREES(g->world.fault[0] == '\0', g->world.fault);
    for (r = 0; r < s->ranks && reached; r++) {
        const player *p = &g->parts[r];
        const result *q = &p->results[0];
        const int failed_here = p->begun == MOE_ERR_TRANSPORT || p->made == MOE_ERR_TRANSPORT ||
                                q->status == MOE_ERR_TRANSPORT || q->back == MOE_ERR_TRANSPORT ||
                                q->observed == MOE_ERR_TRANSPORT;
        char text[120];
        ended += failed_here;
        sprintf(text, "call %lu fails at rank %d: rank %d: begin %d, create %d, forward %d, backward %d", k,
                s->fail_rank, r, p->begun, p->made, q->status, q->back);
        if (r == s->fail_rank) AGREES(failed_here, text);
        AGREES(failed_here || (p->begun == MOE_OK && p->made == MOE_OK && q->status == MOE_OK && q->back == MOE_OK &&
                               q->observed == MOE_OK),
               text);
    }
    *made = g->parts[0].made_after;
    AGREES(ended > 0 || !reached, "a failure is seen");
    stage_end(g);
    return reached;
}

/* The transport fails at one rank, at every call in turn. Nobody waits for ever, and whoever was
   left alone says so. */
static void test_failing(void) {
    static const char *const rows[] = {
        "top_k=2", "n_shared=1 capacity_factor=1 selection_bias=1 bias_rate=0.1", "score=norm norm_node=product",
        "n_shared=1 capacity_bound=every capacity_rho=0.5 selection_bias=1 bias_rate=0.1",
        "input=adaptive_clustering weight=raw"};
    size_t i;
    int ranks, late, training;
    for (i = 0; i < sizeof rows / sizeof *rows; i++)
        for (ranks = 2; ranks <= 4; ranks += 2)
            for (late = 0; late < 2; late++)
                for (training = 0; training < 2; training++) {
                    unsigned long k = 1, made = 0, whole;
                    scene s;
                    if (!begin_scene(&s, rows[i], ranks, training, (int)i)) break;
                    s.local_routing = i == 3;
                    s.steps = 1;
                    s.with = 0;
                    s.fail_late = late;
                    s.chunks = 2;
                    s.two_level = ranks == 4;
                    s.per_node = 2;
                    CHECK(!fails_at(&s, 1000000, &whole), "no failure");
                    while (fails_at(&s, k, &made))
                        /* agreeing on settings takes many calls that are alike */
                        k += k + 3 < whole ? 7 : quick ? 5 : 1;
                    CHECK(k > 8, "there were calls to fail");
                }
}

/* A number of another rank's comes out wrong, and far too large. No rank reads or writes beside its
   memory, none waits for ever, and somebody says that something is wrong. */
static void test_lies(void) {
    static const char *const rows[] = {"top_k=2", "capacity_factor=1", "score=norm norm_node=product", "select=soft"};
    static const uint64_t lies[] = {UINT64_MAX, (uint64_t)1 << 40, 1000000, INT32_MAX, 600000000, 9, 20};
    size_t i, word;
    unsigned long made = 0; /* calls until there is a layer, which are the same for all */
    int two_level, turn = 0;
    for (i = 0; i < sizeof rows / sizeof *rows; i++)
        for (two_level = 0; two_level < 2; two_level++)
            for (word = 0; word < 4; word++) {
                unsigned long k;
                int reached = 1;
                for (k = i > 0 ? made + 1 : 1; reached; k++) {
                    scene s;
                    stage *g;
                    int r, wrong = 0, lied;
                    turn++;
                    if (!begin_scene(&s, rows[i], 4, 1, turn)) return;
                    s.steps = 1;
                    s.with = 0;
                    s.chunks = 2;
                    s.two_level = two_level;
                    s.per_node = 2;
                    s.config.kernels = MOE_KERNELS_C;
                    for (r = 0; r < 4; r++) s.n_of[r] = (size_t)(3 + r % 2);
                    s.fail_rank = turn % 4;
                    s.lie_at = k;
                    s.lie_word = word;
                    s.lie = lies[turn % 7];
                    g = stage_begin(&s);
                    reached = g->world.ranks[s.fail_rank].calls >= k;
                    lied = g->world.ranks[s.fail_rank].lied;
                    for (r = 0; r < 4; r++) {
                        const player *p = &g->parts[r];
                        const result *q = &p->results[0];
                        wrong += p->begun != MOE_OK || p->made != MOE_OK || q->status != MOE_OK || q->back != MOE_OK ||
                                 q->observed != MOE_OK;
                    }
                    CHECK(!lied || two_level || wrong > 0 || s.lie < 100,
                          /* ranks do not heed what those of other nodes say of their own */
                          naming(&s, "a wrong number is seen"));
                    if (!lied && g->parts[0].made_after > 0) made = g->parts[0].made_after;
                    stage_end(g);
                    if (quick) k += 4;
                }
            }
}

/* A transport that moves all rows, but says that the first expert has those of both. */
static moe_status mixed_counts(void *ctx, size_t n, const uint64_t *send, uint64_t *receive) {
    moe_status status = ranks_counts(ctx, n, send, receive);
    if (n == 3) { /* a status, and the rows for two experts */
        receive[1] += receive[2];
        receive[2] = 0;
    }
    return status;
}

static void mixed_task(ranks_rank *self, void *ctx) {
    moe_transport t = ranks_transport(self);
    moe_layer_config c;
    moe_layer layer;
    moe_call call;
    moe_real x[4 * 6] = {0}, y[4 * 6];
    moe_status *status = (moe_status *)ctx;
    size_t bytes = 0;
    void *work;
    memset(&c, 0, sizeof c);
    memset(&layer, 0, sizeof layer);
    memset(&call, 0, sizeof call);
    c.router.d_model = 6;
    c.router.n_experts = 2;
    c.router.top_k = 2;
    c.d_ff = 5;
    c.transport = &t;
    t.counts = mixed_counts;
    call.n_tokens = 4;
    call.x = x;
    *status = moe_transport_begin(&t, NULL);
    if (*status == MOE_OK) *status = moe_layer_create(&layer, &c, 0, 3, NULL, NULL);
    if (*status == MOE_OK) *status = moe_layer_work_size(&layer, 4, 0, &bytes);
    work = grab(bytes, 1);
    if (*status == MOE_OK) *status = moe_layer_forward(&layer, &call, y, work, bytes, NULL);
    free(work);
    moe_layer_free(&layer);
    moe_transport_end(&t);
}

/* No expert has more rows than there are tokens. */
static void test_mixed(void) {
    ranks_world w;
    moe_status status = MOE_OK;
    ranks_begin(&w, 1, RANKS_BY_TURNS);
    (void)ranks_run(&w, mixed_task, &status);
    CHECK(status == MOE_ERR_TRANSPORT, "an expert with more rows than tokens is seen");
    ranks_end(&w);
}

/* A rank that claims jitter for more tokens than it has: nobody skips so many numbers. */
static void test_jitter(void) {
    scene s;
    stage *g;
    unsigned long made = 0;
    if (!begin_scene(&s, "select=soft input=jitter", 2, 1, 0)) return;
    s.steps = 1;
    s.with = 0;
    s.n_of[0] = s.n_of[1] = 3;
    CHECK(!fails_at(&s, 1000000, &made), "no failure");
    s.fail_at = 0;
    s.lie_at = made + 1;
    s.lie_word = 3;
    s.lie = 4 << 2 | 1; /* 4 tokens with jitter, no keep, training */
    g = stage_begin(&s);
    CHECK_STATUS(g->parts[s.fail_rank].results[0].status, MOE_ERR_TRANSPORT);
    stage_end(g);
}

/* The sum over as many ranks as there may be, all of which bring the same. */
static moe_status sum_of_many(void *ctx, size_t n, moe_real *values) {
    size_t i, r;
    (void)ctx;
    for (i = 0; i < n; i++) {
        const moe_real own = values[i];
        for (r = 1; r < MOE_MAX_EXPERTS; r++) values[i] += own;
    }
    return MOE_OK;
}

static void count_task(ranks_rank *self, void *ctx) {
    enum { TOKENS = 4095 };
    static const moe_real x[TOKENS] = {0};
    static moe_real y[TOKENS];
    moe_transport t = ranks_transport(self);
    moe_layer_config c;
    moe_layer layer;
    moe_layer_pass pass;
    moe_tensor load;
    moe_call call;
    moe_error error;
    size_t bytes = 0;
    void *work;
    (void)ctx;
    memset(&c, 0, sizeof c);
    memset(&call, 0, sizeof call);
    c.router.d_model = c.router.n_experts = c.router.top_k = c.d_ff = c.router.selection_bias = 1;
    c.router.bias_rate = (moe_real)0.1;
    c.router.untrained = 1;
    c.transport = &t;
    t.local_routing = 1;
    t.sum = sum_of_many;
    call.n_tokens = TOKENS;
    call.x = x;
    call.training = 1;
    CHECK_STATUS(moe_transport_begin(&t, NULL), MOE_OK);
    if (!CHECK(moe_layer_create(&layer, &c, 1, 3, NULL, &error) == MOE_OK, error.message)) return;
    CHECK_STATUS(moe_layer_work_size(&layer, TOKENS, 1, &bytes), MOE_OK);
    work = grab(bytes, 1);
    CHECK_STATUS(moe_layer_forward(&layer, &call, y, work, bytes, &pass), MOE_OK);
    CHECK_STATUS(moe_layer_observe(&layer, &pass), MOE_OK);
    if (CHECK_STATUS(moe_layer_find(&layer, "router.load", &load), MOE_OK))
        CHECK(load.data[0] == (moe_real)MOE_MAX_EXPERTS * TOKENS && load.data[1] == load.data[0],
              "the tokens of all ranks are counted to the last one");
    free(work);
    moe_layer_free(&layer);
    moe_transport_end(&t);
}

/* Local routing counts the tokens of any number of ranks by sums of floats. */
static void test_counts(void) {
    ranks_world w;
    ranks_begin(&w, 1, RANKS_BY_TURNS);
    (void)ranks_run(&w, count_task, NULL);
    ranks_end(&w);
}

/* Ranks whose layers, or whose calls, are not alike. */
typedef struct mismatch {
    const char *name;
    const char *settings;          /* of the odd rank */
    int odd, init, seed; /* init: the layers are not made by moe_layer_create */
    int training;        /* 2: keep instead */
    moe_status status[RANKS_MOST];
    moe_error error[RANKS_MOST];
} mismatch;

static void mismatch_task(ranks_rank *self, void *ctx) {
    mismatch *m = (mismatch *)ctx;
    const int r = self->rank, odd = m->odd == r;
    static const moe_real zero[64 * 64] = {0};
    moe_transport t = ranks_transport(self);
    moe_layer_config c;
    moe_layer layer;
    moe_call call;
    moe_real x[4 * 6] = {0}, y[4 * 6];
    size_t bytes = 0, i;
    void *work;
    memset(&c, 0, sizeof c);
    memset(&layer, 0, sizeof layer);
    memset(&call, 0, sizeof call);
    m->status[r] = moe_transport_begin(&t, &m->error[r]);
    c.router.d_model = 6;
    c.router.n_experts = 4;
    c.d_ff = 5;
    c.transport = &t;
    if (odd && moe_fields_apply(moe_layer_fields(), &c, m->settings, &m->error[r]) != MOE_OK)
        m->status[r] = MOE_ERR_FORMAT;
    if (m->status[r] == MOE_OK)
        m->status[r] = m->init ? moe_layer_init(&layer, &c, &m->error[r])
                               : moe_layer_create(&layer, &c, 1, 3 + (odd && m->seed ? 1u : 0u), NULL, &m->error[r]);
    if (m->status[r] == MOE_OK) {
        for (i = 0; i < MOE_LAYER_PARAMETER_COUNT; i++) {
            moe_parameter slot;
            if (m->init && moe_layer_parameter(&layer.config, (int)i, &slot) == MOE_OK) layer.tensors[i] = zero;
        }
        call.n_tokens = 4;
        call.x = x;
        call.training = odd && m->training == 1;
        call.keep = odd && m->training == 2;
        call.error = &m->error[r];
        m->status[r] = moe_layer_work_size(&layer, 4, 1, &bytes);
        work = grab(bytes, 1);
        if (m->status[r] == MOE_OK) m->status[r] = moe_layer_forward(&layer, &call, y, work, bytes, NULL);
        free(work);
    }
    moe_layer_free(&layer);
    moe_transport_end(&t);
}

/* Upcycled experts are the same, on whatever rank they live. */
typedef struct upcycling {
    moe_layer_config config;
    moe_layer whole, dense;
    moe_status status[RANKS_MOST];
    int same[RANKS_MOST];
} upcycling;

static void upcycle_task(ranks_rank *self, void *ctx) {
    upcycling *u = (upcycling *)ctx;
    const size_t size = (size_t)(u->config.d_ff * u->config.router.d_model);
    moe_transport t = ranks_transport(self);
    moe_layer_config c = u->config;
    moe_layer layer;
    moe_status status = moe_transport_begin(&t, NULL);
    size_t first, count;
    memset(&layer, 0, sizeof layer);
    c.transport = &t;
    moe_rank_part((size_t)c.router.n_experts, t.rank, t.n_ranks, &first, &count);
    if (status == MOE_OK) status = moe_layer_create(&layer, &c, 0, 2, NULL, NULL);
    if (status == MOE_OK) status = moe_layer_upcycle(&layer, &u->dense, (moe_real)0.5, (moe_real)0.1, 7, NULL);
    u->status[t.rank] = status;
    u->same[t.rank] = status == MOE_OK && memcmp(layer.tensors[MOE_EXPERTS_UP],
                                                 u->whole.tensors[MOE_EXPERTS_UP] + first * size,
                                                 count * size * sizeof(moe_real)) == 0;
    moe_layer_free(&layer);
    moe_transport_end(&t);
}

static void test_upcycling(void) {
    enum { RANKS = 3 };
    upcycling u;
    ranks_world world;
    moe_layer_config dense;
    int r;
    memset(&u, 0, sizeof u);
    u.config.router.d_model = 6;
    u.config.router.n_experts = 5;
    u.config.d_ff = 4;
    dense = u.config;
    dense.router.n_experts = dense.router.top_k = 1;
    CHECK_STATUS(moe_layer_create(&u.dense, &dense, 0, 3, NULL, NULL), MOE_OK);
    CHECK_STATUS(moe_layer_create(&u.whole, &u.config, 0, 2, NULL, NULL), MOE_OK);
    CHECK_STATUS(moe_layer_upcycle(&u.whole, &u.dense, (moe_real)0.5, (moe_real)0.1, 7, NULL), MOE_OK);
    ranks_begin(&world, RANKS, RANKS_AT_END);
    CHECK(ranks_run(&world, upcycle_task, &u) == NULL, "the ranks agree");
    ranks_end(&world);
    for (r = 0; r < RANKS; r++) CHECK(u.status[r] == MOE_OK && u.same[r], "experts of a rank");
    moe_layer_free(&u.whole);
    moe_layer_free(&u.dense);
}

static void test_mismatch(void) {
    static const struct {
        const char *name, *settings;
        int init, seed, training;
        moe_status want;
    } rows[] = {{"d_ff", "d_ff=6", 0, 0, 0, MOE_ERR_CONFIG},
                {"n_experts", "n_experts=5", 0, 0, 0, MOE_ERR_CONFIG},
                {"capacity_factor", "capacity_factor=1.25", 0, 0, 0, MOE_ERR_CONFIG},
                {"select", "select=expert_choice weight=raw", 0, 0, 0, MOE_ERR_CONFIG},
                {"loss_z", "loss_z=0.001", 0, 0, 0, MOE_ERR_CONFIG},
                {"n_shared", "n_shared=1", 0, 0, 0, MOE_ERR_CONFIG},
                {"seed", "", 0, 1, 0, MOE_ERR_CONFIG},
                {"", "kernels=c", 0, 0, 0, MOE_OK},
                {"", "", 0, 0, 0, MOE_OK},
                {"call.training", "", 0, 0, 1, MOE_ERR_STATE},
                {"keep", "", 0, 0, 2, MOE_ERR_STATE},
                {"", "loss_z=0.001", 1, 0, 0, MOE_ERR_CONFIG},
                {"", "top_k=3", 1, 0, 0, MOE_ERR_CONFIG},
                {"", "", 1, 0, 0, MOE_OK}};
    size_t i;
    int odd, r;
    for (i = 0; i < sizeof rows / sizeof *rows; i++)
        for (odd = 0; odd < 3; odd++) {
            ranks_world w;
            mismatch m;
            const char *fault;
            memset(&m, 0, sizeof m);
            m.settings = rows[i].settings;
            m.odd = odd;
            m.init = rows[i].init;
            m.seed = rows[i].seed;
            m.training = rows[i].training;
            ranks_begin(&w, 3, RANKS_BY_TURNS);
            fault = ranks_run(&w, mismatch_task, &m);
            CHECK(fault == NULL, fault != NULL ? fault : "the ranks keep the rules");
            for (r = 0; r < 3; r++) {
                char text[200];
                sprintf(text, "%s at rank %d: rank %d answers %d, not %d: %.80s", rows[i].settings, odd, r, m.status[r],
                        rows[i].want, m.error[r].message);
                CHECK(m.status[r] == rows[i].want, text);
                if (rows[i].name[0] != '\0') {
                    const char *value = strchr(rows[i].settings, '=');
                    char other[40];
                    sprintf(other, "rank %d", r != odd ? odd : odd == 0 ? 1 : 0);
                    if (r != odd && value != NULL)
                        sprintf(other + strlen(other), " has %.*s;", (int)strcspn(value + 1, " "), value + 1);
                    CHECK(strstr(m.error[r].message, rows[i].name) != NULL && strstr(m.error[r].message, other) != NULL,
                          text);
                }
            }
            ranks_end(&w);
        }
}

/* One rank's functions return MOE_ERR_TRANSPORT, or what it passes is not that of the others. */
enum {
    UNLIKE_NOT = 0,
    UNLIKE_SCORE,
    UNLIKE_STREAM,
    UNLIKE_TRAINABLE,
    UNLIKE_RNG,
    UNLIKE_RNG_READ, /* without training */
    UNLIKE_NO_RNG    /* the same, and the odd rank has none */
};

typedef struct unlike {
    const char *settings;
    int what, odd, local_routing;
    moe_status status[RANKS_MOST];
    moe_error error[RANKS_MOST];
} unlike;

static moe_status failing_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                   const moe_real *d_logits, moe_real *d_u, moe_real *d_parameters) {
    if (ctx != NULL) return MOE_ERR_TRANSPORT;
    return own_score_backward(NULL, router, call, u, d_logits, d_u, d_parameters);
}

static moe_status failing_write(void *ctx, const void *from, size_t size) {
    int *left = (int *)ctx;
    (void)from;
    (void)size;
    return (*left)-- > 0 ? MOE_OK : MOE_ERR_TRANSPORT;
}

static void unlike_task(ranks_rank *self, void *ctx) {
    unlike *u = (unlike *)ctx;
    const int r = self->rank, odd = u->odd == r;
    moe_transport t = ranks_transport(self);
    moe_layer_config c;
    moe_layer layer;
    moe_layer_pass pass;
    moe_stream stream;
    moe_call call;
    moe_rng draws;
    moe_real x[8 * 6], y[8 * 6], dx[8 * 6] = {0};
    size_t bytes = 0, i;
    int left = 1; /* the header is written, a tensor is not */
    void *work;
    memset(&c, 0, sizeof c);
    memset(&layer, 0, sizeof layer);
    memset(&call, 0, sizeof call);
    memset(&stream, 0, sizeof stream);
    t.local_routing = u->local_routing;
    c.router.d_model = 6;
    c.router.n_experts = 4;
    c.d_ff = 5;
    c.transport = &t;
    u->status[r] = moe_transport_begin(&t, &u->error[r]);
    if (u->status[r] == MOE_OK) u->status[r] = moe_fields_apply(moe_layer_fields(), &c, u->settings, &u->error[r]);
    if (u->status[r] == MOE_OK)
        u->status[r] = moe_layer_create(&layer, &c, !(odd && u->what == UNLIKE_TRAINABLE), 3, NULL, &u->error[r]);
    if (u->status[r] == MOE_OK && u->what == UNLIKE_STREAM) {
        stream.ctx = &left;
        stream.write = failing_write;
        u->status[r] = moe_layer_write(&layer, &stream, &u->error[r]);
    } else if (u->status[r] == MOE_OK) {
        layer.router.custom.score = own_score;
        layer.router.custom.score_backward = failing_backward;
        layer.router.custom.ctx = odd && u->what == UNLIKE_SCORE ? self : NULL;
        for (i = 0; i < 8 * 6; i++) x[i] = (moe_real)((i * 7 + (size_t)r * 5) % 11) / 5 - 1;
        moe_rng_seed(&draws, odd && u->what >= UNLIKE_RNG ? 8 : 7);
        call.n_tokens = 8;
        call.x = x;
        call.training = u->what < UNLIKE_RNG_READ;
        call.rng = odd && u->what == UNLIKE_NO_RNG ? NULL : &draws;
        call.error = &u->error[r];
        u->status[r] = moe_layer_work_size(&layer, 8, 1, &bytes);
        work = grab(bytes, 1);
        if (u->status[r] == MOE_OK) u->status[r] = moe_layer_forward(&layer, &call, y, work, bytes, &pass);
        if (u->status[r] == MOE_OK && call.training) u->status[r] = moe_layer_backward(&layer, x, dx, NULL, &pass);
        free(work);
    }
    moe_layer_free(&layer);
    moe_transport_end(&t);
}

static void test_unlike(void) {
    static const struct {
        const char *settings;
        int what, local_routing;
        moe_status odd, others;
    } rows[] = {{"score=custom", UNLIKE_SCORE, 0, MOE_ERR_PEER, MOE_ERR_PEER},
                {"score=custom", UNLIKE_SCORE, 1, MOE_ERR_PEER, MOE_ERR_PEER},
                {"", UNLIKE_STREAM, 0, MOE_ERR_IO, MOE_ERR_PEER}, /* rank 0 writes */
                {"", UNLIKE_TRAINABLE, 0, MOE_ERR_CONFIG, MOE_ERR_CONFIG},
                {"noise=gaussian", UNLIKE_RNG, 0, MOE_ERR_STATE, MOE_ERR_STATE},
                {"select=sample top_k=1 weight=raw", UNLIKE_RNG, 0, MOE_ERR_STATE, MOE_ERR_STATE},
                {"drop_order=random capacity_factor=1", UNLIKE_RNG, 0, MOE_ERR_STATE, MOE_ERR_STATE},
                {"drop_order=random capacity_factor=1", UNLIKE_RNG_READ, 0, MOE_ERR_STATE, MOE_ERR_STATE},
                {"drop_order=random capacity_factor=1", UNLIKE_NO_RNG, 0, MOE_ERR_STATE, MOE_ERR_STATE},
                {"noise=gaussian", UNLIKE_NO_RNG, 0, MOE_OK, MOE_OK}, /* nothing is drawn */
                {"compete_rate=0.5 gate=softmax weight=sum", UNLIKE_RNG, 0, MOE_ERR_STATE, MOE_ERR_STATE},
                {"compete_rate=0.5 gate=softmax weight=sum", UNLIKE_RNG, 1, MOE_ERR_STATE, MOE_ERR_STATE},
                {"noise=gaussian", UNLIKE_RNG, 1, MOE_OK, MOE_OK}, /* each rank draws for itself */
                {"", UNLIKE_RNG, 0, MOE_OK, MOE_OK},               /* nothing is drawn */
                {"noise=gaussian", UNLIKE_NOT, 0, MOE_OK, MOE_OK}};
    size_t i;
    int odd, r;
    for (i = 0; i < sizeof rows / sizeof *rows; i++)
        for (odd = 0; odd < (rows[i].what == UNLIKE_STREAM ? 1 : 3); odd++) {
            ranks_world w;
            unlike u;
            const char *fault;
            memset(&u, 0, sizeof u);
            u.settings = rows[i].settings;
            u.what = rows[i].what;
            u.odd = odd;
            u.local_routing = rows[i].local_routing;
            ranks_begin(&w, 3, RANKS_BY_TURNS);
            fault = ranks_run(&w, unlike_task, &u);
            CHECK(fault == NULL, fault != NULL ? fault : "the ranks keep the rules");
            for (r = 0; r < 3; r++) {
                const moe_status want = r == odd ? rows[i].odd : rows[i].others;
                CHECKF(u.status[r] == want && (want == MOE_OK || u.error[r].message[0] != '\0'),
                       "%s, %d at rank %d: rank %d answers %d, not %d: %s", rows[i].settings, rows[i].what, odd, r,
                       u.status[r], want, u.error[r].message);
            }
            ranks_end(&w);
        }
}

/* What reads the tensors of all experts does not go with a transport. */
typedef struct alone {
    moe_status quantized, packed, published, backward;
    int outputs, sized; /* 1: it gave some; sizes that are too large are refused */
} alone;

static void alone_task(ranks_rank *self, void *ctx) {
    alone *a = (alone *)ctx + self->rank;
    moe_transport t = ranks_transport(self);
    moe_layer_config c;
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    moe_quant_error errors[4];
    moe_real x[4 * 6] = {0}, y[4 * 6], d_weights[64] = {0};
    size_t bytes = 0, packed_bytes = 0;
    void *work, *packed;
    moe_buffer buffer;
    moe_stream stream;
    memset(&buffer, 0, sizeof buffer);
    memset(&c, 0, sizeof c);
    memset(&layer, 0, sizeof layer);
    memset(&call, 0, sizeof call);
    c.router.d_model = 6;
    c.router.n_experts = 4;
    c.d_ff = 5;
    c.transport = &t;
    if (moe_transport_begin(&t, NULL) != MOE_OK || moe_layer_create(&layer, &c, 1, 3, NULL, NULL) != MOE_OK) return;
    call.n_tokens = 4;
    call.x = x;
    (void)moe_layer_pack_size(&layer, MOE_TYPE_REAL, 0, &packed_bytes, NULL);
    (void)moe_layer_work_size(&layer, 40, 1, &bytes);
    work = grab(bytes, 1);
    packed = grab(packed_bytes, 1);
    a->quantized = moe_layer_quantize(&layer, MOE_TYPE_REAL, packed, packed_bytes, &call, work, bytes, errors, NULL);
    a->sized = moe_layer_work_size(&layer, (size_t)INT32_MAX, 1, &bytes) == MOE_ERR_OVERFLOW &&
               moe_layer_work_size(&layer, (size_t)INT32_MAX / 2 + 9, 1, &bytes) == MOE_ERR_OVERFLOW &&
               /* local rows */
               moe_layer_work_size(&layer, (size_t)INT32_MAX / 2 - 9, 1, &bytes) == MOE_ERR_OVERFLOW &&
               moe_layer_work_size(&layer, SIZE_MAX, 0, &bytes) == MOE_ERR_OVERFLOW;
    call.n_tokens = self->rank == 0 ? (size_t)INT32_MAX / 2 + 9 : 0;
    a->sized = moe_layer_forward(&layer, &call, y, work, bytes, &pass) == MOE_ERR_OVERFLOW && a->sized;
    call.n_tokens = 4;
    /* no report */
    a->packed = moe_layer_quantize(&layer, MOE_TYPE_REAL, packed, packed_bytes, NULL, NULL, 0, NULL, NULL);
    layer.is_packed = 0;
    stream = moe_buffer_stream(&buffer);
    a->published = moe_import_write(&layer, &stream, "m", "mixtral", MOE_DTYPE_F32, NULL);
    moe_buffer_free(&buffer);
    call.training = 1;
    if (moe_layer_forward(&layer, &call, y, work, bytes, &pass) == MOE_OK) {
        a->outputs = pass.expert_outputs != NULL;
        a->backward = moe_layer_backward_experts(&layer, y, d_weights, NULL, NULL, &pass);
    }
    free(work);
    free(packed);
    moe_layer_free(&layer);
    moe_transport_end(&t);
}

static void test_alone(void) {
    ranks_world w;
    alone a[RANKS_MOST];
    const char *fault;
    int r;
    memset(a, 0, sizeof a);
    ranks_begin(&w, 2, RANKS_AT_END);
    fault = ranks_run(&w, alone_task, a);
    CHECK(fault == NULL, fault != NULL ? fault : "the ranks keep the rules");
    for (r = 0; r < 2; r++) {
        CHECK(a[r].quantized == MOE_ERR_UNSUPPORTED, "a report on quantized weights with a transport");
        CHECK(a[r].sized, "more tokens than a batch may have");
        CHECK(a[r].packed == MOE_OK, "quantized weights with a transport");
        CHECK(a[r].published == MOE_ERR_UNSUPPORTED, "a published file of a rank's experts");
        CHECK(a[r].backward == MOE_ERR_UNSUPPORTED && !a[r].outputs, "experts one by one with a transport");
    }
    ranks_end(&w);
}

/* Exchanges of a call whose local experts are computed in parts: there and back for each. */
static void chunks_task(ranks_rank *self, void *ctx) {
    uint64_t *exchanges = (uint64_t *)ctx + 6 * self->rank;
    moe_real x[4 * 6] = {0}, y[4 * 6];
    int chunks;
    for (chunks = 0; chunks < 6; chunks++) {
        moe_transport t = ranks_transport(self);
        moe_traffic traffic;
        moe_layer_config c;
        moe_layer layer;
        moe_call call;
        size_t bytes = 0;
        void *work;
        memset(&traffic, 0, sizeof traffic);
        memset(&c, 0, sizeof c);
        memset(&call, 0, sizeof call);
        t.chunks = chunks;
        t.local_routing = 1;
        t.traffic = &traffic;
        c.router.d_model = 6;
        c.router.n_experts = 5;
        c.d_ff = 5;
        c.transport = &t;
        if (moe_transport_begin(&t, NULL) != MOE_OK || moe_layer_create(&layer, &c, 0, 3, NULL, NULL) != MOE_OK) return;
        call.n_tokens = 4;
        call.x = x;
        if (moe_layer_work_size(&layer, 4, 0, &bytes) != MOE_OK) return;
        work = grab(bytes, 1);
        if (moe_layer_forward(&layer, &call, y, work, bytes, NULL) == MOE_OK) exchanges[chunks] = traffic.exchanges;
        free(work);
        moe_layer_free(&layer);
        moe_transport_end(&t);
    }
}

static void test_chunks(void) {
    static const uint64_t want[6] = {2, 2, 4, 6, 6, 6}; /* a rank has at most three experts */
    ranks_world w;
    uint64_t exchanges[2 * 6] = {0};
    const char *fault;
    int i;
    ranks_begin(&w, 2, RANKS_AT_END);
    fault = ranks_run(&w, chunks_task, exchanges);
    CHECK(fault == NULL, fault != NULL ? fault : "the ranks keep the rules");
    for (i = 0; i < 2 * 6; i++) CHECK(exchanges[i] == want[i % 6], "at most one part for each expert");
    ranks_end(&w);
}

/* Every kind of expert with what a layer can have beside it. */
static void test_experts(void) {
    static const char *const kinds[] = {
        "expert=swiglu",       "expert=swiglu expert_bias=1 swiglu_alpha=1.702 swiglu_limit=0.5 swiglu_offset=1",
        "expert=mlp act=gelu", "expert=mlp act=relu no_expert_bias=1",
        "expert=linear",       "expert=linear no_expert_bias=1",
        "expert=factorised",   "expert=glu act=gelu_tanh"};
    static const char *const besides[] = {"",
                                          "n_shared=1",
                                          "n_shared=2 d_shared=3 shared_sigmoid=1",
                                          "add_input=1 weight=raw",
                                          "apply_to=input weight=raw",
                                          "apply_to=input n_shared=1 capacity_factor=0.7 weight=raw",
                                          "add_input=1 n_shared=1 capacity_factor=0.5 renormalize=after",
                                          "d_out=5",
                                          "d_out=31 apply_to=input",
                                          "d_latent=5",
                                          "d_latent=31 n_shared=1 add_input=1 weight=raw",
                                          "d_latent=3 d_out=9 apply_to=input",
                                          "select=soft d_latent=-3 slots=2",
                                          "score=competition gate=identity d_latent=6",
                                          "select=soft soft_normalise=1 slots=2",
                                          "select=soft n_shared=1 d_out=9",
                                          "score=norm norm_node=output n_shared=1 capacity_factor=0.9",
                                          "score=competition gate=identity apply_to=input"};
#ifndef MOE_NO_QUANT
    static const int types[6] = {MOE_TYPE_REAL, MOE_TYPE_F16,      MOE_TYPE_BF16,
                                 MOE_TYPE_Q8,   MOE_TYPE_Q8_BLOCK, MOE_TYPE_Q4};
#else
    static const int types[6] = {MOE_TYPE_REAL, MOE_TYPE_F16, MOE_TYPE_BF16,
                                 MOE_TYPE_REAL, MOE_TYPE_F16, MOE_TYPE_BF16};
#endif
    size_t kind, beside;
    int training, turn = 0, again;
    for (kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (beside = 0; beside < sizeof besides / sizeof *besides; beside++)
            for (training = 0; training < 2; training++)
                for (again = 0; again < 2; again++) {
                    char text[NAME_SIZE];
                    scene s;
                    turn++;
                    sprintf(text, "%s %s", kinds[kind], besides[beside]);
                    if (!begin_scene(&s, text, 1 + (turn + turn / 4) % 5, training, turn)) continue;
                    if (s.config.expert == MOE_EXPERT_LINEAR) s.config.d_ff = 0;
                    if (!training && turn % 5 != 0) {
                        s.with |= WITH_PACKED;
                        s.with &= ~(unsigned)WITH_KEEP;
                        s.type = types[(turn + turn / 6) % 6]; /* all of them, also of every sixth turn */
                    }
                    if (turn % 5 == 0 && s.config.router.select != MOE_SELECT_SOFT)
                        s.with |= WITH_LAST; /* only the last rank's experts have work */
                    (void)test_scene(&s);
                }
}

/* Layers of one expert for each rank, and of very many. */
static void test_sizes(void) {
    int experts, ranks, training, turn = 0;
    for (experts = 1; experts <= 37; experts += experts < 6 ? 1 : 31)
        for (ranks = 1; ranks <= 5 && ranks <= experts; ranks++)
            for (training = 0; training < 2; training++) {
                scene s;
                turn++;
                memset(&s, 0, sizeof s);
                s.name = "sizes";
                s.ranks = ranks;
                s.training = training;
                s.steps = 1;
                s.seed = 800 + (uint64_t)turn;
                s.config.router.d_model = 1 + turn % 7;
                s.config.router.n_experts = experts;
                s.config.router.top_k = experts < 3 ? experts : 3;
                s.config.d_ff = 1 + turn % 5;
                s.config.router.untrained = 1;
                if (!complete(&s.config, "sizes")) continue;
                vary(&s, turn);
                s.chunks = 1 + turn % 40; /* more than a rank has experts */
                s.config.kernels = turn % 2 ? MOE_KERNELS_C : MOE_KERNELS_AUTO;
                (void)test_scene(&s);
            }
}

#if SIZE_MAX > 0xFFFFFFFF
static size_t words_for; /* ranks of the transport below */

/* A transport on which all ranks say what this one says. */
static moe_status counts_echo(void *ctx, size_t n, const uint64_t *send, uint64_t *receive) {
    (void)ctx;
    memcpy(receive, send, words_for * n * sizeof *send);
    return MOE_OK;
}

/* A workspace that only the copies of the second level take beyond size_t: wide tokens, of which a
   rank keeps those of half of all ranks. */
static void test_level_sizes(void) {
    enum { RANKS = 32768 };
    int two_level;
    for (two_level = 0; two_level < 2; two_level++) {
        moe_transport t;
        moe_layer_config c;
        moe_layer layer;
        moe_error error;
        size_t bytes = 0;
        ranks_rank none;
        ranks_world world;
        memset(&none, 0, sizeof none);
        memset(&world, 0, sizeof world);
        none.world = &world;
        t = ranks_transport(&none);
        t.counts = counts_echo;
        t.n_ranks = RANKS;
        t.ranks_per_machine = RANKS / 2;
        t.two_level = two_level;
        words_for = RANKS;
        memset(&c, 0, sizeof c);
        c.router.d_model = MOE_MAX_WIDTH;
        c.router.n_experts = c.router.top_k = RANKS;
        c.d_ff = 1;
        c.transport = &t;
        if (!CHECK(moe_transport_begin(&t, &error) == MOE_OK, error.message)) return;
        if (CHECK(moe_layer_init(&layer, &c, &error) == MOE_OK, error.message))
            CHECK_STATUS(moe_layer_work_size(&layer, INT32_MAX / RANKS, 1, &bytes),
                         two_level ? MOE_ERR_OVERFLOW : MOE_OK);
        moe_transport_end(&t);
    }
}
#endif

/* Ranks on nodes: by one level or two, which changes no bit, and sends fewer messages to other
   nodes. */
static void test_nodes(void) {
    static const char *const rows[] = {"top_k=3", "capacity_factor=0.8 n_shared=1 apply_to=input weight=raw",
                                       "select=soft slots=2", "score=norm norm_node=output", "select=dense weight=raw"};
    static const int shapes[][2] = {{4, 1}, {4, 2}, {4, 4}, {6, 1}, {6, 2}, {6, 3}, {8, 2}, {8, 4}};
    size_t i, k;
    int training, two_level, turn = 0;
    for (i = 0; i < sizeof rows / sizeof *rows; i++)
        for (k = 0; k < sizeof shapes / sizeof *shapes; k++)
            for (training = 0; training < 2; training++) {
                uint64_t far_away[2] = {0, 0};
                turn++;
                for (two_level = 0; two_level < 2; two_level++) {
                    scene s;
                    int r;
                    if (!begin_scene(&s, rows[i], 4, training, turn)) continue;
                    s.ranks = shapes[k][0];
                    s.per_node = shapes[k][1];
                    s.two_level = two_level;
                    s.chunks = 1 + turn % 3;
                    s.moving = turn / 2 % RANKS_MOVING;
                    s.seed = 6000 + (uint64_t)turn;
                    s.config.kernels = MOE_KERNELS_C;
                    s.with = draw_with(turn);
                    for (r = 0; r < s.ranks; r++) s.n_of[r] = (size_t)((r * 5 + turn) % 4);
                    far_away[two_level] = test_scene(&s);
                }
                CHECK(quick || far_away[1] <= far_away[0], "two levels send no more messages to other nodes");
                if (!quick && i == 4 && shapes[k][1] > 1 && shapes[k][1] < shapes[k][0])
                    CHECK(far_away[1] < far_away[0], "two levels send fewer messages to other nodes");
            }
}

/* No rank has a token; all tokens are padding. */
static void test_nothing(void) {
    static const char *const rows[] = {"top_k=2",
                                       "capacity_factor=1 n_shared=1",
                                       "select=expert_choice weight=raw",
                                       "select=soft",
                                       "score=norm norm_node=product",
                                       "input=adaptive_clustering weight=raw",
                                       "select=balanced top_k=1 weight=raw",
                                       "loss_balance=0.1 loss_z=0.1 noise=gaussian loss_load=0.1 loss_orthogonal=0.1"};
    size_t i;
    int ranks, training, turn = 0, padding;
    for (i = 0; i < sizeof rows / sizeof *rows; i++)
        for (ranks = 1; ranks <= 4; ranks++)
            for (training = 0; training < 2; training++)
                for (padding = 0; padding < 2; padding++) {
                    scene s;
                    turn++;
                    if (!begin_scene(&s, rows[i], ranks, training, turn)) continue;
                    s.with &= ~(unsigned)(WITH_MASK | WITH_GIVEN);
                    if (padding) s.with |= WITH_PADDING;
                    else memset(s.n_of, 0, sizeof s.n_of);
                    (void)test_scene(&s);
                }
}

/* ---- networks with every preset ---- */

enum { NET_STEPS = 3, NET_LENGTH = 4, NET_SEQUENCES = 7, NET_HEADS = 3 };

/* A text model with two mixtures behind attention, trained by one process and by ranks. */
typedef struct net_player {
    moe_transport transport;
    moe_net net;
    moe_trainer trainer;
    moe_status status, file_status;
    moe_error error;
    moe_step steps[NET_STEPS];
    moe_evaluation evaluation;
    moe_buffer file;
} net_player;

typedef struct net_case {
    const char *name;
    const moe_layer_config *config;
    int ranks, chunks, local_routing;
    size_t sequences_of[RANKS_MOST];
    uint64_t seed;
    int32_t ids[NET_LENGTH * NET_SEQUENCES], labels[NET_LENGTH * NET_SEQUENCES];
    net_player one, parts[RANKS_MOST];
} net_case;

static moe_status net_build(net_player *p, const net_case *n, const moe_transport *t) {
    moe_attention_config attention;
    moe_layer_config first;
    memset(&attention, 0, sizeof attention);
    memset(&first, 0, sizeof first);
    attention.heads = NET_HEADS;
    /* what adaptive clustering reads; at most as many experts as the next one */
    first.router.n_experts = 5;
    first.d_ff = 4;
    (void)moe_net_init(&p->net, 0, MOE_KERNELS_C, NULL);
    p->net.transport = t;
    (void)moe_net_embedding(&p->net, IDS, n->config->router.d_model);
    (void)moe_net_positions(&p->net, NET_LENGTH);
    (void)moe_net_rms_norm(&p->net);
    (void)moe_net_mixture(&p->net, &first);
    (void)moe_net_residual(&p->net, 2);
    (void)moe_net_rms_norm(&p->net);
    (void)moe_net_attention(&p->net, &attention);
    (void)moe_net_residual(&p->net, 2);
    (void)moe_net_rms_norm(&p->net);
    (void)moe_net_mixture(&p->net, n->config);
    (void)moe_net_residual(&p->net, 2);
    (void)moe_net_rms_norm(&p->net);
    (void)moe_net_tied(&p->net);
    return moe_net_build(&p->net, 1, n->seed, &p->error);
}

/* Three steps, an evaluation, a file. first: the first sequence, count: how many. */
static void net_play(net_player *p, const net_case *n, const moe_transport *t, size_t first, size_t count) {
    moe_train_config config;
    moe_stream stream = moe_buffer_stream(&p->file);
    moe_data data;
    int step;
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    config.batch = NET_LENGTH * NET_SEQUENCES;
    config.seed = n->seed;
    config.optimizer = MOE_OPTIMIZER_SGD;
    config.rate = (moe_real)0.02;
    config.clip = 1;
    data.n = count * NET_LENGTH;
    data.length = NET_LENGTH;
    data.token_ids = n->ids + first * NET_LENGTH;
    data.labels = n->labels + first * NET_LENGTH;
    if (count == 0) data.token_ids = data.labels = NULL;
    p->status = net_build(p, n, t);
    if (p->status == MOE_OK) p->status = moe_trainer_init(&p->trainer, &p->net, &config, &p->error);
    for (step = 0; step < NET_STEPS && p->status == MOE_OK; step++)
        p->status = moe_trainer_step(&p->trainer, &data, &p->steps[step], &p->error);
    data.n = NET_LENGTH * NET_SEQUENCES;
    data.token_ids = n->ids;
    data.labels = n->labels; /* all samples on all ranks, which share them out */
    if (p->status == MOE_OK)
        p->status = moe_evaluate(&p->net, &data, MOE_CRITERION_CROSS_ENTROPY, &p->evaluation, &p->error);
    if (p->status == MOE_OK) p->status = moe_net_write(&p->net, t == NULL || t->rank == 0 ? &stream : NULL, &p->error);
}

static void net_task(ranks_rank *self, void *ctx) {
    net_case *n = (net_case *)ctx;
    net_player *p = &n->parts[self->rank];
    size_t first = 0;
    int r;
    for (r = 0; r < self->rank; r++) first += n->sequences_of[r];
    p->transport = ranks_transport(self);
    p->transport.chunks = n->chunks;
    p->transport.local_routing = n->local_routing;
    p->status = moe_transport_begin(&p->transport, &p->error);
    if (p->status == MOE_OK) net_play(p, n, &p->transport, first, n->sequences_of[self->rank]);
}

static int nets_local_routing; /* how many */

static int net_near(double a, double b) { return fabs(a - b) <= (EPSILON < 1e-10 ? 1e-9 : 3e-4) * (1.0 + fabs(b)); }

/* Numbers of the one process's file against those of the ranks'. */
static int same_files(const moe_buffer *a, const moe_buffer *b) {
    moe_file one, two;
    moe_file_tensor t, u;
    int good = 1;
    if (moe_file_open(&one, a->data, a->size, NULL) != MOE_OK ||
        moe_file_open(&two, b->data, b->size, NULL) != MOE_OK || one.n_tensors != two.n_tensors)
        return 0;
    while (moe_file_next(&one, &t) == MOE_OK && moe_file_next(&two, &u) == MOE_OK) {
        moe_real *v = zeros(t.count), *w = zeros(t.count);
        size_t i;
        good &= t.count == u.count && moe_file_values(&t, 0, t.count, v, NULL) == MOE_OK &&
                moe_file_values(&u, 0, t.count, w, NULL) == MOE_OK;
        for (i = 0; i < t.count && good; i++) good &= net_near((double)v[i], (double)w[i]);
        free(v);
        free(w);
    }
    return good;
}

static void net_end(net_player *p) {
    moe_trainer_free(&p->trainer);
    moe_net_free(&p->net);
    moe_transport_end(&p->transport);
    moe_buffer_free(&p->file);
}

/* Whether a token's part in everything is its own: then it does not matter who decides. */
static int is_each_its_own(const moe_router_config *c) {
    return (moe_router_traits(c) & (unsigned)(MOE_TRAIT_NEEDS_BATCH | MOE_TRAIT_STOCHASTIC)) == 0 &&
           c->input != MOE_INPUT_ADAPTIVE_CLUSTERING && !(c->capacity_factor > 0) && c->drop_capacity == 0 &&
           c->capacity_bound == MOE_BOUND_NONE &&
           !(c->loss_balance > 0 || c->loss_stable_balance > 0 || c->loss_importance > 0 ||
             c->loss_usage_entropy > 0 || c->loss_load > 0 || c->loss_similarity_same > 0 || c->loss_locality > 0) &&
           !c->l1_controller;
}

static void test_net(const char *name, const moe_layer_config *config, int ranks, int turn) {
    static const size_t lie[][RANKS_MOST] = {{7}, {3, 4}, {0, 3, 4}, {2, 0, 4, 1}, {1, 3, 0, 2, 1}};
    net_case *n = (net_case *)grab(1, sizeof *n);
    ranks_world w;
    const char *fault;
    char text[NAME_SIZE];
    size_t i;
    int r, step;
    moe_rng_seed(&rng, 400 + (uint64_t)turn);
    n->name = name;
    n->config = config;
    n->ranks = ranks;
    n->chunks = turn % 3;
    n->local_routing = turn % 4 < 2 && is_each_its_own(&config->router);
    n->seed = 20 + (uint64_t)turn;
    memcpy(n->sequences_of, lie[ranks - 1], sizeof n->sequences_of);
    for (i = 0; i < NET_LENGTH * NET_SEQUENCES; i++) {
        n->ids[i] = below(IDS);
        n->labels[i] = below(9) == 0 ? -1 : (n->ids[i] * 3 + 1) % IDS;
    }
    net_play(&n->one, n, NULL, 0, NET_SEQUENCES);
    ranks_begin(&w, ranks, turn % RANKS_MOVING);
    fault = ranks_run(&w, net_task, n);
    nets_local_routing += n->local_routing;
    sprintf(text, "net with %.80s on %d ranks%s: ", name, ranks, n->local_routing ? ", local routing" : "");
    if (CHECK(fault == NULL, strcat(text, fault != NULL ? fault : "the ranks keep the rules")) &&
        CHECK(n->one.status == MOE_OK, n->one.error.message)) {
        for (r = 0; r < ranks; r++) {
            const net_player *p = &n->parts[r];
            sprintf(text, "net with %.60s on %d ranks: %.80s", name, ranks,
                    p->status != MOE_OK ? p->error.message : "");
            if (!CHECK(p->status == MOE_OK, text)) continue;
            for (step = 0; step < NET_STEPS; step++) {
                const moe_step *a = &p->steps[step], *b = &n->one.steps[step];
                sprintf(
                    text,
                    "net with %.60s on %d ranks, step %d: loss %g and not %g, router %g and not %g, norm %g and not %g",
                    name, ranks, step, (double)a->loss, (double)b->loss, (double)a->router_loss, (double)b->router_loss,
                    (double)a->gradient_norm, (double)b->gradient_norm);
                CHECK(net_near((double)a->loss, (double)b->loss) &&
                          net_near((double)a->router_loss, (double)b->router_loss) &&
                          net_near((double)a->gradient_norm, (double)b->gradient_norm),
                      text);
            }
            /* draws outside training depend on every bit of the logits */
            CHECK(p->evaluation.n == n->one.evaluation.n &&
                      (config->router.sample_at == MOE_SAMPLE_ALWAYS ||
                       (net_near((double)p->evaluation.loss, (double)n->one.evaluation.loss) &&
                        net_near((double)p->evaluation.accuracy, (double)n->one.evaluation.accuracy))),
                  text);
        }
        if (n->parts[0].status == MOE_OK) CHECK(same_files(&n->one.file, &n->parts[0].file), text);
    }
    net_end(&n->one);
    for (r = 0; r < ranks; r++) net_end(&n->parts[r]);
    ranks_end(&w);
    free(n);
}

static void test_nets(void) {
    const moe_preset *preset;
    int turn = 0, ranks;
    for (preset = moe_presets(); preset->name != NULL; preset++)
        for (ranks = 1; ranks <= 5; ranks++) {
            moe_layer_config c;
            turn++;
            if ((turn * 7 + turn / 5) % (quick ? 12 : 2) != 0 ||
                !CHECK(moe_layer_preset(preset->name, &c, NULL) == MOE_OK, preset->name))
                continue;
            shrink(&c, ranks);
            if (c.router.refine == MOE_REFINE_ATTENTION) c.router.heads = NET_HEADS;
            if (c.router.select == MOE_SELECT_SOFT && c.router.input == MOE_INPUT_ADAPTIVE_CLUSTERING)
                continue; /* refused: see is_refused */
            if (has_zero_experts(&c.router)) continue;
            test_net(preset->name, &c, ranks, turn);
        }
    CHECK(nets_local_routing > (quick ? 2 : 20), "some of them with local routing");
}

static void test_routers(void) {
    with_presets(1);
    with_capacity(1);
    with_rules(1);
    with_random(1);
}

static void test_presets(void) { with_presets(0); }

static void test_capacity(void) { with_capacity(0); }

static void test_rules(void) { with_rules(0); }

static void test_random(void) { with_random(0); }

static void test_local_routing(void) {
    local_routing_now = 1;
    with_presets(0);
    with_capacity(0);
    with_rules(0);
    test_experts();
    test_nothing();
    test_spoilt();
    local_routing_now = 0;
}

int main(int argc, char **argv) {
    static const struct {
        void (*test)(void);
        const char *name;
    } tests[] = {{test_transport, "transport"}, {test_parts, "parts"},
                 {test_begin, "begin"},         {test_agree, "agree"},
                 {test_status, "status"},       {test_too_many, "too many"},
                 {test_mismatch, "mismatch"},   {test_upcycling, "upcycling"},
                 {test_alone, "alone"},
                 {test_unlike, "unlike"},       {test_chunks, "chunks"},
                 {test_spoilt, "spoilt"},       {test_failing, "failing"},
                 {test_lies, "lies"},           {test_mixed, "mixed"},
                 {test_jitter, "jitter"},       {test_counts, "counts"},
                 {test_routers, "routers"},
                 {test_presets, "presets"},     {test_local_routing, "local_routing"},
                 {test_capacity, "capacity"},   {test_rules, "rules"},
                 {test_random, "random"},       {test_experts, "experts"},
                 {test_sizes, "sizes"},         {test_nothing, "nothing"},
                 {test_nodes, "nodes"},         {test_nets, "nets"},
#if SIZE_MAX > 0xFFFFFFFF
                 {test_level_sizes, "level sizes"},
#endif
    };
    size_t i;
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    for (i = 0; i < sizeof tests / sizeof *tests; i++)
        if (argc < 2 || quick || strncmp(argv[1], tests[i].name, strlen(argv[1])) == 0) {
            test_case(tests[i].name);
            tests[i].test();
        }
    return test_end();
}
#endif
