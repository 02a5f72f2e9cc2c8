/* worlds.h - one run of the bench: a world, an arm, a seed, a rate and a balance weight. Planted
   worlds are drawn from generators in which the best routing is known; every batch is new, so a run
   does not measure memorization. Include it after moe.h and claims.h.

   x is a token, c its planted cluster, y the target. A_c are random matrices, e normal noise.
     MEANS       x = mu_c + e, y = A_c x; mu normal with deviation `strength`
     SUBSPACES   x = B_c z + e / 10, z normal in `strength` dimensions, y = A_c x
     TOY         classes with means +1 and -1; after half of the steps also one with mean 0
     ANISOTROPY  each cluster has 4 features of its own, near 2.5 with deviation 1; others have
                 mean 0 and deviation `strength`; y = A_c times its own features. A first MoE layer
                 lets adaptive clustering know clusters
     TOPICS      x = strength m_c + e, y = A_c x; the 16 tokens of a sequence have one c, or with
                 control 1 each its own; control 2 is no control: an attention layer comes first
     CLASS_TOKENS  a token in four: x = strength b_c + e, y = A_c x; the others: x = e, y = 0. b_c
                 is a block of features, or with control 1 a random direction. Tokens of the first
                 half of a batch are on machine 0 and carry the first half of the classes (control
                 1: any)
     MODULES     x = 2 m_c + e, the label is the index of the largest of A_c x
     DIFFICULTY  x = e + 1.5 m or e - 1.5 m; y = x for one half, a random network of x for the
                 other (control 1: for both) */
#ifndef BENCH_WORLDS_H
#define BENCH_WORLDS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    WORLD_WIDTH = 64,
    WORLD_OUTPUTS = 32,
    WORLD_TOKENS = 64,
    WORLD_TESTS = 16,
    WORLD_CLUSTERS = 8,
    WORLD_LENGTH = 16,
    WORLD_EXPERTS = 16,
    WORLD_TIMES = 10,
    TEXT_ROOM = 600,
    LIST_ROOM = 2048
};
#define MISSING ((double)NAN)
#define FLIP_NOISE 0.1

/* What is run, and what was found. */
typedef struct job {
    const world *w;
    const arm *a;
    int tuning, seed;
    int steps; /* 0: the world's */
    double rate, balance;
} job;

typedef struct found {
    double value[N_OUTCOMES];
    char lists[LIST_ROOM]; /* "curve=1.2:1.1:1.0 blocks=..." */
} found;

static int bench_short; /* 1: a tenth of the steps */
static int job_steps(const job *j) {
    int steps = j->steps > 0 ? j->steps : j->tuning ? j->w->tuning_steps : j->w->steps;
    return steps / (bench_short ? 10 : 1);
}
static uint64_t job_checksum(const job *j); /* of the data that the world reads; bench.c */
static volatile int bench_stopped;

struct run_state;
struct tokens;
/* NULL, or called before training and after each tenth of it with the test batches (pictures.h). */
static moe_status (*world_watch)(struct run_state *s, struct tokens *test, int time, moe_error *error);

static double world_seconds(clock_t start) { return (double)(clock() - start) / CLOCKS_PER_SEC; }

/* Appends a number to the list that found.lists ends with. */
static void found_add(found *f, const char *name, double value) {
    size_t n = strlen(f->lists);
    const char *last = strrchr(f->lists, ' ');
    last = last != NULL ? last + 1 : f->lists;
    if (n + 60 >= LIST_ROOM) return;
    if (strncmp(last, name, strlen(name)) != 0)
        snprintf(f->lists + n, LIST_ROOM - n, "%s%s=%.5f", n > 0 ? " " : "", name, value);
    else snprintf(f->lists + n, LIST_ROOM - n, ":%.5f", value);
}

/* ---- routers ---- */

/* text with @balance and @sqrt_d replaced. */
static void arm_text(const job *j, const char *text, char *out) {
    size_t n = 0;
    while (*text != '\0' && n + 40 < TEXT_ROOM) {
        int is_balance = strncmp(text, "@balance", 8) == 0, is_sqrt = strncmp(text, "@sqrt_d", 7) == 0;
        if (is_balance || is_sqrt) n += (size_t)sprintf(out + n, "%.9g", is_balance ? j->balance : sqrt(j->w->d));
        else out[n++] = *text;
        text += is_balance ? 8 : is_sqrt ? 7 : 1;
    }
    out[n] = '\0';
}

/* The router as text: preset, changes, and what replaces refinement after training. */
static void arm_router(const job *j, char *out) {
    char changes[TEXT_ROOM], after[TEXT_ROOM];
    arm_text(j, j->a->settings, changes);
    arm_text(j, j->a->after, after);
    snprintf(out, 2 * TEXT_ROOM + 40, "%s %s%s%s where=%s%s",
             *j->a->preset != '\0' ? j->a->preset : "feed_forward", changes,
             *after != '\0' ? " then " : "", after, j->a->where, j->a->forced ? " forced" : "");
    if (j->a->fast > 0) snprintf(out + strlen(out), 40, " fast=%g", j->a->fast);
}

/* The hidden width at which an expert of any kind has as many parameters as a swiglu of width f;
   for factorised ones by the parity formula of Lv et al. 2025. */
static int fair_width(const moe_layer_config *c, int d, int f) {
    int low = c->d_low > 0 ? c->d_low : (d + 2) / 3;
    if (c->expert == MOE_EXPERT_MLP) return (3 * f + 1) / 2;
    if (c->expert == MOE_EXPERT_FACTORISED) return (3 * d * f - low * d + (low + 2 * d) / 2) / (low + 2 * d);
    return f;
}

static moe_status arm_configure(const job *j, int swapped, moe_layer_config *c, moe_error *error) {
    char text[TEXT_ROOM];
    moe_status status;
    memset(c, 0, sizeof *c);
    if (*j->a->preset == '\0') {
        c->router.n_experts = 1;
        c->d_ff = j->w->top_k * j->w->d_ff;
        return MOE_OK;
    }
    if ((status = moe_layer_preset(j->a->preset, c, error)) != MOE_OK) return status;
    c->router.n_experts = j->w->experts;
    if (c->router.top_k > 1) c->router.top_k = j->w->top_k;
    arm_text(j, j->a->settings, text);
    if ((status = moe_fields_apply(moe_layer_fields(), c, text, error)) != MOE_OK) return status;
    arm_text(j, j->a->after, text);
    if (swapped && *text != '\0') {
        c->router.weight = MOE_WEIGHT_SUM; /* the softmax of the top K logits, the same without refinement */
        if ((status = moe_fields_apply(moe_layer_fields(), c, text, error)) != MOE_OK) return status;
    }
    /* with one choice, softmax and sum are 1 and a linear router would not learn */
    if (c->router.top_k == 1 && c->router.score == MOE_SCORE_LINEAR && c->router.weight != MOE_WEIGHT_RAW)
        c->router.weight = MOE_WEIGHT_RAW;
    if (c->d_ff == 0) c->d_ff = fair_width(c, j->w->d, j->a->forced ? j->w->top_k * j->w->d_ff : j->w->d_ff);
    return MOE_OK;
}

/* Copies tensors by name; those that `from` lacks keep their values. */
static void take_tensors(moe_net *net, const moe_net *from) {
    for (size_t i = 0; i < net->n_tensors; i++) {
        moe_tensor t;
        if (moe_net_find(from, net->tensors[i].name, &t) != MOE_OK || t.count != net->tensors[i].count) continue;
        memcpy(net->tensors[i].data, t.data, t.count * sizeof *t.data);
    }
}

/* ---- generators ---- */

typedef struct planted {
    const world *w;
    int outputs;
    moe_real mean[WORLD_CLUSTERS][WORLD_WIDTH], basis[WORLD_CLUSTERS][WORLD_WIDTH][WORLD_WIDTH];
    moe_real map[WORLD_CLUSTERS][WORLD_OUTPUTS][WORLD_WIDTH], hidden[WORLD_WIDTH][WORLD_WIDTH];
} planted;

typedef struct tokens {
    size_t n;
    moe_real x[WORLD_TOKENS * WORLD_WIDTH], y[WORLD_TOKENS * WORLD_WIDTH];
    int32_t cluster[WORLD_TOKENS], label[WORLD_TOKENS], machine[WORLD_TOKENS];
    int32_t given[WORLD_TOKENS * WORLD_EXPERTS];
} tokens;

static void normals(moe_rng *rng, moe_real scale, size_t n, moe_real *out) {
    for (size_t i = 0; i < n; i++) out[i] = scale * moe_rng_normal(rng);
}

static int world_outputs(const world *w) {
    return w->kind == DIFFICULTY ? w->d : w->kind == TOY ? 3 : w->kind == MODULES ? 4 : 8;
}

static void planted_create(planted *p, const world *w, moe_rng *rng) {
    size_t d = (size_t)w->d, block = d / (size_t)(w->clusters > 0 ? w->clusters : 1);
    memset(p, 0, sizeof *p);
    p->w = w;
    p->outputs = world_outputs(w);
    for (size_t c = 0; c < (size_t)w->clusters; c++) {
        moe_real length = 0;
        normals(rng, w->kind == MEANS ? (moe_real)w->strength : 1, d, p->mean[c]);
        for (size_t i = 0; i < d; i++) normals(rng, (moe_real)sqrt(1 / w->strength), d, p->basis[c][i]);
        for (size_t o = 0; o < (size_t)p->outputs; o++) normals(rng, 1 / (moe_real)sqrt((double)d), d, p->map[c][o]);
        for (size_t i = 0; i < d; i++) {
            if (w->kind == CLASS_TOKENS && !w->control) p->mean[c][i] = i / block == c;
            if (w->kind == ANISOTROPY) p->mean[c][i] = i / block == c ? (moe_real)2.5 : 0;
            length += p->mean[c][i] * p->mean[c][i];
        }
        for (size_t i = 0; i < d && (w->kind == CLASS_TOKENS || w->kind == DIFFICULTY); i++)
            p->mean[c][i] /= (moe_real)sqrt((double)length);
    }
    for (size_t i = 0; i < d; i++) normals(rng, 2 / (moe_real)sqrt((double)d), d, p->hidden[i]);
}

/* The cluster of token t of n; -1: none. */
static int planted_cluster(const planted *p, moe_rng *rng, size_t t, size_t n, int before, int stage) {
    const world *w = p->w;
    int half = w->clusters / 2, any = (int)moe_rng_below(rng, (uint64_t)w->clusters);
    if (w->kind == TOY) return (int)moe_rng_below(rng, stage == 1 ? 2 : 3);
    if (w->kind == TOPICS && w->control != 1 && t % WORLD_LENGTH != 0) return before;
    if (w->kind != CLASS_TOKENS) return any;
    if (moe_rng_below(rng, 4) != 0) return -1;
    return w->control ? any : any % half + (t < n / 2 ? 0 : half);
}

static void planted_token(const planted *p, moe_rng *rng, int c, moe_real *x) {
    const world *w = p->w;
    size_t d = (size_t)w->d;
    const moe_real *mean = c >= 0 ? p->mean[c] : NULL;
    moe_real z[WORLD_WIDTH], scale = 1;
    normals(rng, w->kind == TOY ? (moe_real)w->strength : 1, d, x);
    if (w->kind == TOY)
        for (size_t i = 0; i < d; i++) x[i] += (moe_real)(c == 0 ? 1 : c == 1 ? -1 : 0);
    else if (w->kind == SUBSPACES) {
        normals(rng, 1, (size_t)w->strength, z);
        for (size_t i = 0; i < d; i++) {
            x[i] *= (moe_real)0.1;
            for (size_t k = 0; k < (size_t)w->strength; k++) x[i] += p->basis[c][i][k] * z[k];
        }
    } else if (w->kind == ANISOTROPY) {
        size_t own = d / (size_t)w->clusters;
        scale = (moe_real)sqrt((double)d / ((double)own + w->strength * w->strength * (double)(d - own)));
        for (size_t i = 0; i < d; i++)
            x[i] = scale * (i / own == (size_t)c ? x[i] + mean[i] : (moe_real)w->strength * x[i]);
    } else if (mean != NULL) {
        scale = w->kind == MEANS ? 1 : w->kind == MODULES ? 2 : (moe_real)w->strength;
        if (w->kind == DIFFICULTY) scale = (moe_real)(c == 0 ? 1.5 : -1.5);
        for (size_t i = 0; i < d; i++) x[i] += scale * p->mean[w->kind == DIFFICULTY ? 0 : c][i];
    }
}

static void planted_target(const planted *p, int c, const moe_real *x, moe_real *y) {
    const world *w = p->w;
    size_t d = (size_t)w->d, own = d / (size_t)w->clusters;
    moe_real scale = w->kind == ANISOTROPY
                         ? (moe_real)sqrt(((double)own + w->strength * w->strength * (double)(d - own)) / (double)own)
                         : 1;
    for (size_t o = 0; o < (size_t)p->outputs; o++) {
        y[o] = 0;
        for (size_t i = 0; i < d && w->kind != DIFFICULTY && c >= 0; i++)
            if (w->kind != ANISOTROPY || i / own == (size_t)c) y[o] += scale * p->map[c][o][i] * x[i];
        if (w->kind == DIFFICULTY && c == 0 && !w->control) y[o] = x[o];
        for (size_t i = 0; i < d && w->kind == DIFFICULTY && (c == 1 || w->control); i++) {
            moe_real sum = 0;
            for (size_t k = 0; k < d; k++) sum += p->hidden[i][k] * x[k];
            y[o] += 2 * p->map[c][o][i] * (moe_real)tanh((double)sum);
        }
    }
}

static void planted_draw(const planted *p, moe_rng *rng, size_t n, int stage, tokens *b) {
    size_t d = (size_t)p->w->d, outputs = (size_t)p->outputs;
    int c = 0;
    b->n = n;
    memset(b->given, 0xff, sizeof b->given);
    for (size_t t = 0; t < n; t++) {
        moe_real *x = b->x + t * d, *y = b->y + t * outputs;
        c = planted_cluster(p, rng, t, n, c, stage);
        b->cluster[t] = c;
        b->machine[t] = t >= n / 2;
        planted_token(p, rng, c, x);
        planted_target(p, c, x, y);
        b->label[t] = p->w->kind == TOY ? c : 0;
        for (size_t o = 1; o < outputs && p->w->kind == MODULES; o++)
            if (y[o] > y[b->label[t]]) b->label[t] = (int32_t)o;
    }
}

/* ---- networks ---- */

typedef struct run_state {
    const job *j;
    moe_net net;
    size_t module; /* of the arm's layer */
    int criterion;
    void *work;
    size_t bytes;
} run_state;

static moe_status run_build(run_state *s, const job *j, int swapped, int outputs, moe_error *error) {
    const world *w = j->w;
    moe_layer_config c, first;
    moe_attention_config attention = {0};
    moe_status status = arm_configure(j, swapped, &c, error);
    if (status == MOE_OK) status = moe_layer_preset("smoe", &first, error);
    if (status != MOE_OK) return status;
    s->j = j;
    s->criterion = w->kind == TOY                            ? MOE_CRITERION_CROSS_ENTROPY
                   : w->kind == MODULES || w->kind == DIGITS ? MOE_CRITERION_EXPECTATION
                                                             : MOE_CRITERION_SQUARED_ERROR;
    attention.full = 1;
    c.d_out = outputs;
    moe_net_init(&s->net, w->d, MOE_KERNELS_AUTO, NULL);
    if (s->criterion == MOE_CRITERION_EXPECTATION) s->net.mixture_losses = moe_classic_losses();
    if (w->kind == CLASS_TOKENS) moe_net_linear(&s->net, w->d);
    if (w->kind == TOPICS && w->control == 2) {
        moe_net_rms_norm(&s->net);
        moe_net_attention(&s->net, &attention);
        moe_net_residual(&s->net, 2);
    }
    if (w->kind == ANISOTROPY && !j->a->forced) {
        first.router.n_experts = w->experts;
        first.router.loss_balance = (moe_real)j->balance;
        first.d_ff = w->d_ff;
        moe_net_mixture(&s->net, &first);
        moe_net_residual(&s->net, 1);
    }
    s->module = s->net.n_modules;
    moe_net_mixture(&s->net, &c);
    status = moe_net_build(&s->net, 1, (uint64_t)j->seed, error);
    if (status == MOE_OK) status = moe_net_work_size(&s->net, (size_t)w->batch, 0, &s->bytes);
    if (status == MOE_OK && (s->work = malloc(s->bytes)) == NULL) status = MOE_ERR_MEMORY;
    return status;
}

static void run_free(run_state *s) {
    free(s->work);
    moe_net_free(&s->net);
}

/* The call of a batch: sequences, machines, forced routing. Fills in offsets [n / 16 + 1]. */
static moe_call run_call(const run_state *s, tokens *b, int32_t *offsets) {
    const moe_router_config *c = &s->net.modules[s->module].layer.config.router;
    moe_call call = {0};
    size_t most = c->top_k > 0 ? (size_t)c->top_k : (size_t)c->n_experts;
    if (s->j->w->kind == TOPICS) {
        call.n_sequences = b->n / WORLD_LENGTH;
        for (size_t i = 0; i <= call.n_sequences; i++) offsets[i] = (int32_t)(i * WORLD_LENGTH);
        call.sequences = offsets;
    }
    if (c->loss_locality > 0) call.token_machine = b->machine;
    for (size_t t = 0; t < b->n && s->j->a->forced; t++) b->given[t * most] = b->cluster[t] >= 0 ? b->cluster[t] : 0;
    if (s->j->a->forced) call.given = b->given;
    return call;
}

static moe_data run_data(const tokens *b, const moe_call *call) {
    moe_data data = {0};
    data.n = b->n;
    data.x = b->x;
    data.labels = b->label;
    data.targets = b->y;
    data.call = call;
    return data;
}

static moe_status run_forward(run_state *s, tokens *b, moe_net_pass *pass, moe_error *error) {
    int32_t offsets[WORLD_TOKENS / WORLD_LENGTH + 1];
    static moe_rng rng; /* nothing is stochastic outside training */
    moe_call call = run_call(s, b, offsets);
    call.n_tokens = b->n;
    call.x = b->x;
    call.rng = &rng;
    call.error = error;
    return moe_net_forward(&s->net, &call, s->work, s->bytes, pass);
}

/* ---- measures ---- */

/* The largest share of tokens at the expert of their cluster, over all ways to give each cluster an
   expert of its own. Dynamic programming: best is indexed by the set of clusters that have one. */
static double recovery(const double *counts, int experts, int clusters) {
    double best[1 << WORLD_CLUSTERS], all = 0;
    int sets = 1 << clusters;
    for (int s = 0; s < sets; s++) best[s] = s == 0 ? 0 : -1;
    for (int e = 0; e < experts; e++)
        for (int s = sets - 1; s >= 0; s--) /* downwards, so that expert e is given once */
            for (int c = 0; c < clusters; c++) {
                double before = (s >> c & 1) ? best[s & ~(1 << c)] : -1;
                if (before >= 0 && before + counts[e * clusters + c] > best[s])
                    best[s] = before + counts[e * clusters + c];
            }
    for (int i = 0; i < experts * clusters; i++) all += counts[i];
    for (int s = 0; s < sets; s++) best[0] = best[s] > best[0] ? best[s] : best[0];
    return all > 0 ? best[0] / all : MISSING;
}

static double entropy(const moe_real *p, size_t n) {
    double sum = 0, h = 0;
    for (size_t i = 0; i < n; i++) sum += p[i] > 0 ? (double)p[i] : 0;
    for (size_t i = 0; i < n; i++)
        if (p[i] > 0) h -= (double)p[i] / sum * log((double)p[i] / sum);
    return h;
}

/* Mean squared error; *classes += that of the class tokens, *n_classes += their number. */
static double run_loss(const run_state *s, const tokens *b, const moe_net_pass *pass, double *classes,
                       double *n_classes) {
    double sum = 0;
    size_t n = (size_t)s->net.d_out;
    for (size_t t = 0; t < b->n; t++) {
        double one = 0;
        for (size_t o = 0; o < n; o++) {
            double error = (double)(pass->y[t * n + o] - b->y[t * n + o]);
            one += error * error / (double)n;
        }
        sum += one / (double)b->n;
        *classes += b->cluster[t] >= 0 ? one : 0;
        *n_classes += b->cluster[t] >= 0;
    }
    return sum;
}

/* The loss on all test batches: squared error, or the criterion's. */
static moe_status run_losses(run_state *s, tokens *test, found *f, moe_error *error) {
    double sum = 0, wrong = 0;
    double classes = 0, n_classes = 0;
    moe_status status = MOE_OK;
    for (int k = 0; k < WORLD_TESTS && status == MOE_OK; k++) {
        moe_net_pass pass;
        moe_data data = {0};
        moe_evaluation answer;
        data.n = test[k].n;
        data.x = test[k].x;
        data.labels = test[k].label;
        if (s->criterion == MOE_CRITERION_SQUARED_ERROR) {
            if ((status = run_forward(s, &test[k], &pass, error)) == MOE_OK)
                sum += run_loss(s, &test[k], &pass, &classes, &n_classes) / WORLD_TESTS;
        } else if ((status = moe_evaluate(&s->net, &data, s->criterion, &answer, error)) == MOE_OK) {
            sum += (double)answer.loss / WORLD_TESTS;
            wrong += (1 - (double)answer.accuracy) / WORLD_TESTS;
        }
    }
    f->value[LOSS] = sum;
    if (s->criterion == MOE_CRITERION_SQUARED_ERROR) f->value[LOG_LOSS] = log(sum);
    else f->value[ERROR] = wrong;
    if (s->j->w->kind == CLASS_TOKENS) f->value[CLASS_LOSS] = log(classes / n_classes);
    return status;
}

/* Sums over the routing of the test batches. */
typedef struct sums {
    double counts[WORLD_EXPERTS * WORLD_CLUSTERS], share[WORLD_EXPERTS], real[2], n[2];
    double remote, rows, change, changed, tokens;
} sums;

static void run_count(const run_state *s, const tokens *b, const moe_routing *r, const int32_t *first, sums *m) {
    size_t n = r->n_experts, clusters = (size_t)s->j->w->clusters;
    for (size_t t = 0; t < b->n; t++) {
        int hard = b->cluster[t] == 1;
        if (first[t] >= 0) m->share[first[t]]++;
        if (first[t] >= 0 && b->cluster[t] >= 0) m->counts[(size_t)first[t] * clusters + (size_t)b->cluster[t]]++;
        m->change += entropy(r->probabilities + t * n, n) - entropy(r->gate + t * n, n);
        m->n[hard]++;
        for (size_t e = 0; e < n; e++) {
            if (!r->selected[t * n + e]) continue;
            m->real[hard] += e < r->real_experts;
            m->remote += (int)(2 * e / n) != b->machine[t];
        }
    }
    m->rows += (double)r->plan.offsets[n];
    m->tokens += (double)b->n;
}

static void run_report(const run_state *s, const sums *m, const moe_report *report, size_t n_experts, found *f) {
    int kind = s->j->w->kind;
    size_t used;
    f->value[INFORMATION] = report->information_first - report->information_first_chance;
    f->value[RECOVERY] = recovery(m->counts, (int)n_experts, s->j->w->clusters);
    f->value[ENTROPY] = report->confidence_entropy;
    f->value[ENTROPY_CHANGE] = m->change / m->tokens;
    f->value[ROWS] = m->rows / m->tokens;
    f->value[WORK] = (m->real[0] + m->real[1]) / m->tokens;
    f->value[EXTRA] = kind == DIFFICULTY ? m->real[1] / m->n[1] - m->real[0] / m->n[0] : MISSING;
    f->value[REMOTE] = kind == CLASS_TOKENS ? m->remote / m->rows : MISSING;
    f->value[FLIP] = m->changed / m->tokens;
    f->value[FAST_SHARE] = m->share[0] / m->tokens;
    f->value[LOAD_MAX] = f->value[LOAD_ENTROPY] = 0;
    for (size_t e = 0; e < n_experts; e++) {
        double share = m->share[e] / m->tokens;
        if (share > f->value[LOAD_MAX]) f->value[LOAD_MAX] = share;
        if (share > 0) f->value[LOAD_ENTROPY] -= share * log(share);
    }
    (void)moe_net_parameter_count(&s->net, &used);
    f->value[ACTIVE] = (double)used;
}

/* Measures loss and routing on the test batches, then choices under noise. Test batches are as
   large as those of training because some routers depend on the number of tokens in a call. */
static moe_status run_test(run_state *s, tokens *test, moe_rng *rng, found *f, moe_error *error) {
    size_t n_experts = (size_t)s->net.modules[s->module].layer.config.router.n_experts, bytes;
    int32_t first[WORLD_TOKENS], again[WORLD_TOKENS];
    sums m = {0};
    moe_metrics metrics;
    moe_report report;
    void *memory = NULL;
    moe_status status = run_losses(s, test, f, error);
    if (status == MOE_OK) status = moe_metrics_size(n_experts, (size_t)s->j->w->clusters, &bytes);
    if (status != MOE_OK || (memory = malloc(bytes)) == NULL) return status != MOE_OK ? status : MOE_ERR_MEMORY;
    status = moe_metrics_init(&metrics, n_experts, (size_t)s->j->w->clusters, memory, bytes);
    for (int k = 0; k < WORLD_TESTS && status == MOE_OK; k++) {
        tokens *b = &test[k];
        moe_net_pass pass;
        const moe_routing *r;
        if ((status = run_forward(s, b, &pass, error)) != MOE_OK) break;
        r = moe_net_routing(&s->net, &pass, s->module);
        status = moe_routing_choices(r, 1, 0, first);
        if (status == MOE_OK) status = moe_metrics_add(&metrics, r, NULL, b->cluster);
        if (status == MOE_OK) run_count(s, b, r, first, &m);
        for (size_t i = 0; i < b->n * (size_t)s->j->w->d; i++) b->x[i] += (moe_real)FLIP_NOISE * moe_rng_normal(rng);
        if (status == MOE_OK) status = run_forward(s, b, &pass, error);
        if (status == MOE_OK) status = moe_routing_choices(moe_net_routing(&s->net, &pass, s->module), 1, 0, again);
        for (size_t t = 0; t < b->n; t++) m.changed += first[t] != again[t];
    }
    if (status == MOE_OK) status = moe_metrics_report(&metrics, &report);
    if (status == MOE_OK) run_report(s, &m, &report, n_experts, f);
    free(memory);
    return status;
}

/* Appendix B of Lv et al. 2025: which expert takes classes one and two after the first stage, and
   class three after the second. *busy: the expert that took most tokens in the first. */
static moe_status toy_look(run_state *s, tokens *test, int stage, int *busy, found *f, moe_error *error) {
    int32_t first[WORLD_TOKENS];
    double n[2] = {0, 0}, third[2] = {0, 0};
    moe_status status = MOE_OK;
    for (int k = 0; k < WORLD_TESTS && status == MOE_OK; k++) {
        moe_net_pass pass;
        status = run_forward(s, &test[k], &pass, error);
        if (status == MOE_OK) status = moe_routing_choices(moe_net_routing(&s->net, &pass, s->module), 1, 1, first);
        for (size_t t = 0; t < test[k].n && status == MOE_OK; t++)
            (test[k].cluster[t] < 2 ? n : third)[first[t] == 1]++;
    }
    if (stage == 1) {
        *busy = n[1] > n[0];
        f->value[TOGETHER] = n[*busy] / (n[0] + n[1]);
    } else f->value[THIRD] = third[!*busy] / (third[0] + third[1]);
    return status;
}

/* ---- one run ---- */

static moe_train_config run_training(const job *j, int criterion, const moe_param_group *groups) {
    moe_train_config t = {0};
    t.criterion = criterion;
    t.batch = j->w->batch;
    t.rate = (moe_real)j->rate;
    t.seed = (uint64_t)j->seed;
    t.total_steps = job_steps(j);
    t.warmup = job_steps(j) / 20;
    t.final_rate = (moe_real)0.1;
    t.clip = 1;
    t.groups = groups;
    t.n_groups = j->a->fast > 0;
    return t;
}

static moe_status run_steps(run_state *s, const planted *p, moe_rng *rng, tokens *test, found *f, moe_error *error) {
    static tokens batch;
    const world *w = s->j->w;
    moe_param_group group = {"*experts.*[0]", (moe_real)s->j->a->fast, 0, 0};
    moe_train_config training = run_training(s->j, s->criterion, &group);
    int32_t offsets[WORLD_TOKENS / WORLD_LENGTH + 1];
    moe_trainer trainer = {0};
    double seconds = 0, sum = 0;
    int steps = job_steps(s->j), busy = 0;
    moe_status status = moe_trainer_init(&trainer, &s->net, &training, error);
    if (status == MOE_OK && world_watch != NULL) status = world_watch(s, test, 0, error);
    for (int i = 1; i <= steps && status == MOE_OK; i++) {
        moe_data data;
        moe_call call;
        clock_t start;
        planted_draw(p, rng, (size_t)w->batch, 2 * i <= steps ? 1 : 2, &batch);
        call = run_call(s, &batch, offsets);
        data = run_data(&batch, &call);
        start = clock();
        status = moe_trainer_step(&trainer, &data, NULL, error);
        seconds += world_seconds(start);
        if (status == MOE_OK && w->kind == TOY && (2 * i == steps || i == steps))
            status = toy_look(s, test, i == steps ? 2 : 1, &busy, f, error);
        if (status != MOE_OK || i * WORLD_TIMES / steps == (i - 1) * WORLD_TIMES / steps ||
            s->criterion != MOE_CRITERION_SQUARED_ERROR)
            continue;
        if ((status = run_losses(s, test, f, error)) != MOE_OK) break;
        found_add(f, "curve", f->value[LOG_LOSS]);
        sum += f->value[LOG_LOSS] / WORLD_TIMES;
        if (world_watch != NULL) status = world_watch(s, test, i * WORLD_TIMES / steps, error);
        if (bench_stopped) status = MOE_ERR_STOPPED;
    }
    moe_trainer_free(&trainer);
    if (s->criterion == MOE_CRITERION_SQUARED_ERROR) f->value[CURVE] = sum;
    f->value[MS] = 1000 * seconds / steps;
    return status;
}

/* Builds and trains the network of a job, and draws the test batches. */
static moe_status run_trained(const job *j, run_state *s, moe_rng *rng, tokens *test, found *f, moe_error *error) {
    static planted p;
    moe_status status;
    moe_rng_seed(rng, ~(uint64_t)j->seed); /* another stream than that of the weights */
    planted_create(&p, j->w, rng);
    for (int k = 0; k < WORLD_TESTS; k++) planted_draw(&p, rng, (size_t)j->w->batch, 2, &test[k]);
    status = run_build(s, j, 0, p.outputs, error);
    return status == MOE_OK ? run_steps(s, &p, rng, test, f, error) : status;
}

static moe_status run_planted(const job *j, found *f, moe_error *error) {
    static tokens test[WORLD_TESTS];
    run_state s = {0}, swapped = {0};
    moe_rng rng;
    moe_status status = run_trained(j, &s, &rng, test, f, error);
    if (status == MOE_OK && *j->a->after != '\0') {
        if ((status = run_build(&swapped, j, 1, world_outputs(j->w), error)) == MOE_OK) {
            take_tensors(&swapped.net, &s.net);
            status = run_test(&swapped, test, &rng, f, error);
        }
    } else if (status == MOE_OK) status = run_test(&s, test, &rng, f, error);
    run_free(&s);
    run_free(&swapped);
    return status;
}

#endif
