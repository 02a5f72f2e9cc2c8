/* gradients.c - every backward pass against central differences of the forward pass, in double.

     cc -std=c99 -O2 -I. -DMOE_REAL=double tests/gradients.c -o gradients -lm && ./gradients

   L = sum(y * dy) + all losses is differentiated for every number of every tensor and input. The derivative comes from central
   differences at h and h/2, extrapolated: (4 D(h/2) - D(h)) / 3. Error of a tensor: max |backward - difference| / (1e-8 + largest of
   both), bound 1e-6. A number that misses the bound at the first step is measured again at others, smaller ones (a kink of relu, an
   absolute value or sparsemixer's edge may lie within the first) and larger ones (rounding drowns a flat function); a wrong derivative
   agrees at none. What is smaller than the rounding of L leaves of a difference, 1e-10 (1 + |L|), is 0. A step that changes a decision
   (who is chosen, in which order, who is dropped) measures nothing; a number without any other step is skipped, and a case with more
   than one such number in ten is drawn again. Checked are single functions, every module of a net, every kind of expert, every stage of
   a router with its options, the grid score x gate x select x weight, and some hundred random compositions of all stages. Compositions
   that moe_layer_check refuses are counted. A learned threshold is not here: its derivative is one of a surrogate by design, and the
   golden cases check it. -v prints every case. Exit status 1 if any failed. */

#ifndef MOE_REAL
#define MOE_REAL double
#endif
#define MOE_IMPLEMENTATION
#include "../moe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !MOE_REAL_IS_DOUBLE
#error "gradients.c needs -DMOE_REAL=double"
#endif

#define BOUND 1e-6

enum { NAME_ROOM = 1000, MAX_VARIABLES = 64 };

static int passed, failed, verbose;
static moe_rng rng;

static void report(const char *group, const char *name, int good, const char *why) {
    if (good) passed++;
    else failed++;
    if (!good || verbose) printf("%s: %s [%s] %s\n", good ? "ok" : "FAILED", group, name, why);
}

/* Zeroed memory; a test without memory is no test. */
static void *grab(size_t count, size_t size) {
    void *p = calloc(count > 0 ? count : 1, size);
    if (p == NULL) {
        fprintf(stderr, "gradients: out of memory\n");
        exit(2);
    }
    return p;
}

static double *normals(size_t count, double spread) {
    double *v = (double *)grab(count, sizeof *v);
    size_t i;
    for (i = 0; i < count; i++) v[i] = spread * moe_rng_normal(&rng);
    return v;
}

/* ---- the check itself -------------------------------------------------------------------------------------------------- */

/* A tensor that L depends on, and the gradient that is to be checked. */
typedef struct variable {
    const char *name;
    double *value;
    const double *gradient;
    size_t count;
    int untouched; /* not trained: its gradient must stay 0, whatever L does */
} variable;

/* A function of variables. evaluate computes L; when it takes decisions, it also writes them to decisions[n_decisions]. */
typedef struct subject {
    double (*evaluate)(void *ctx);
    void *ctx;
    unsigned char *decisions, *kept; /* now; at the start */
    size_t n_decisions;
    variable variables[MAX_VARIABLES];
    int n_variables;
    size_t numbers, skipped;
    double rounding; /* that L leaves in a difference */
    double worst;    /* error so far */
    const char *worst_name;
} subject;

static void add_variable(subject *s, const char *name, double *value, const double *gradient, size_t count) {
    variable *v = &s->variables[s->n_variables++];
    if (s->n_variables >= MAX_VARIABLES) exit(2);
    v->name = name, v->value = value, v->gradient = gradient, v->count = count, v->untouched = 0;
}

static int evaluate_at(subject *s, double *at, double value, double *result) {
    double old = *at;
    *at = value;
    *result = s->evaluate(s->ctx);
    *at = old;
    return s->n_decisions == 0 || memcmp(s->decisions, s->kept, s->n_decisions) == 0;
}

/* (4 D(h/2) - D(h)) / 3; 0 when a point decides otherwise. */
static int difference(subject *s, double *at, double h, double *result) {
    double x = *at, f[4];
    if (!evaluate_at(s, at, x + h, &f[0]) || !evaluate_at(s, at, x - h, &f[1]) || !evaluate_at(s, at, x + h / 2, &f[2]) ||
        !evaluate_at(s, at, x - h / 2, &f[3]))
        return 0;
    *result = (4.0 * (f[2] - f[3]) / h - (f[0] - f[1]) / (2.0 * h)) / 3.0;
    return isfinite(*result);
}

/* Measures number i again until it comes within reach; keeps the nearest. Returns 0 when no step measures anything. */
static int nearest_difference(subject *s, const variable *v, size_t i, double allowed, double *result) {
    static const double steps[] = {2e-5, 2e-6, 2e-7, 2e-3, 2e-2};
    double now;
    int found = isfinite(*result) != 0;
    size_t k;
    for (k = 0; k < sizeof steps / sizeof steps[0]; k++) {
        if (found && fabs(*result - v->gradient[i]) <= allowed) return 1;
        if (!difference(s, v->value + i, steps[k], &now)) continue;
        if (!found || fabs(now - v->gradient[i]) < fabs(*result - v->gradient[i])) *result = now;
        found = 1;
    }
    return found;
}

static void check_variable(subject *s, const variable *v) {
    double *measured = (double *)grab(v->count, sizeof *measured), scale = 1e-8, worst = 0.0;
    size_t i;
    for (i = 0; i < v->count; i++) {
        double size = fabs(v->gradient[i]);
        if (v->untouched) measured[i] = 0.0;
        else if (!difference(s, v->value + i, 2e-4, &measured[i])) measured[i] = HUGE_VAL;
        if (isfinite(measured[i]) && fabs(measured[i]) > size) size = fabs(measured[i]);
        if (1e-8 + size > scale) scale = 1e-8 + size;
    }
    for (i = 0; i < v->count; i++) {
        double error;
        s->numbers++;
        if (!v->untouched && !nearest_difference(s, v, i, 0.1 * BOUND * scale, &measured[i])) {
            s->skipped++;
            continue;
        }
        error = fabs(measured[i] - v->gradient[i]);
        error = error <= s->rounding ? 0.0 : error / scale;
        if (!(error <= worst)) worst = error;
    }
    if (!(worst <= s->worst)) s->worst = worst, s->worst_name = v->name;
    free(measured);
}

/* Returns 0, without a verdict, when too much was skipped and another draw is allowed. */
static int check_subject_or_redraw(subject *s, const char *group, const char *name, int redraw) {
    char why[NAME_ROOM];
    int i, measured;
    s->worst_name = "nothing";
    s->worst = -1.0;
    s->rounding = 1e-10 * (1.0 + fabs(s->evaluate(s->ctx)));
    if (s->n_decisions > 0) memcpy(s->kept, s->decisions, s->n_decisions);
    for (i = 0; i < s->n_variables; i++) check_variable(s, &s->variables[i]);
    measured = s->skipped * 10 <= s->numbers;
    if (redraw && !measured && s->worst <= BOUND) return 0;
    sprintf(why, "%.1e at %.60s, %lu numbers, %lu skipped", s->worst, s->worst_name, (unsigned long)s->numbers, (unsigned long)s->skipped);
    report(group, name, measured && s->worst <= BOUND, why);
    return 1;
}

static void check_subject(subject *s, const char *group, const char *name) { (void)check_subject_or_redraw(s, group, name, 0); }

/* ---- layers -------------------------------------------------------------------------------------------------------------- */

/* What of a call beside its configuration is tried. */
enum { WITH_MASK = 1, WITH_ROUTER_X = 2, WITH_SEQUENCES = 4 };

enum { MAX_TOKENS = 16 };

typedef struct layer_case {
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    double *x, *router_x, *dy, *y, *dx, *d_router_x;
    double *noise, *jitter, *previous_input, *previous_weights, *distances; /* constants */
    double *attention[3], *d_attention[3];                                  /* weights, outputs, the summed output */
    size_t attention_count[3];
    unsigned char mask[MAX_TOKENS], *decisions;
    int32_t sequences[4], *given, *token_ids, *previous_experts, *home, *expert_node;
    moe_rng rng, rng_start;
    void *work;
    size_t work_size, n_decisions;
    char tensor_names[MOE_LAYER_SLOTS][MOE_NAME_SIZE];
    moe_status status;
} layer_case;

/* Who was chosen, in which order, and kept. */
static size_t count_decisions(const moe_routing *r) { return r->n_tokens * (r->n_experts + r->max_choices); }

static void note_decisions(const moe_routing *r, unsigned char *decisions) {
    size_t t, i;
    memcpy(decisions, r->selected, r->n_tokens * r->n_experts);
    decisions += r->n_tokens * r->n_experts;
    for (t = 0; t < r->n_tokens; t++)
        for (i = 0; i < r->max_choices; i++)
            *decisions++ = (unsigned char)(i < (size_t)r->n_choices[t] ? r->choices[t * r->max_choices + i] : -1);
}

static double evaluate_layer(void *ctx) {
    layer_case *c = (layer_case *)ctx;
    size_t i;
    int loss;
    double sum = 0.0;
    c->rng = c->rng_start; /* the same draws each time */
    c->status = moe_layer_forward(&c->layer, &c->call, c->y, c->work, c->work_size, &c->pass);
    if (c->status != MOE_OK) return HUGE_VAL;
    for (i = 0; i < c->call.n_tokens * (size_t)c->layer.config.d_out; i++) sum += c->y[i] * c->dy[i];
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++) sum += c->pass.routing.loss[loss];
    note_decisions(&c->pass.routing, c->decisions);
    return sum;
}

/* Random replay: distinct experts, now and then none. */
static int32_t *draw_given(size_t n, size_t k, size_t experts) {
    int32_t *given = (int32_t *)grab(n * k, sizeof *given);
    size_t t, i, j;
    for (t = 0; t < n; t++)
        for (i = 0; i < k; i++) {
            int32_t e;
            do {
                e = (int32_t)moe_rng_below(&rng, experts);
                for (j = 0; j < i && given[t * k + j] != e; j++) {
                }
            } while (j < i);
            given[t * k + i] = e;
        }
    if (n * k > 1) given[n * k - 1] = -1;
    return given;
}

static void draw_tensors(const moe_layer *layer) {
    moe_tensor t;
    size_t i, k;
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++) {
        size_t width = (size_t)layer->config.router.top_k, experts = (size_t)layer->config.router.n_experts;
        for (k = 0; k < t.count; k++) {
            if (strcmp(t.name, "router.temperature") == 0) t.data[k] = 0.7;
            else if (strcmp(t.name, "router.table") == 0) t.data[k] = (double)((k / width + k % width) % experts);
            else if (strcmp(t.name, "router.ac_running") == 0) t.data[k] = 0.5 + moe_rng_uniform(&rng);
            else if (t.flags & (MOE_PARAM_NO_DECAY | MOE_PARAM_STATE) || t.n_dims == 1) t.data[k] += 0.4 * moe_rng_normal(&rng);
            else if (strcmp(t.name, "router.noise_weight") == 0 || strcmp(t.name, "router.similarity") == 0)
                t.data[k] += 0.3 * moe_rng_normal(&rng);
        }
    }
}

static int is_small(double v, double bound) { return fabs(v) > 0.0 && fabs(v) < bound; }

/* Sums that stand in a denominator must not be nearly 0, or no finite step measures a slope. */
static int is_well_placed(layer_case *c) {
    const moe_routing *r = &c->pass.routing;
    const moe_router_config *config = &c->layer.config.router;
    size_t t, e, i;
    if ((config->gate != MOE_GATE_IDENTITY && config->gate != MOE_GATE_RELU) || config->select == MOE_SELECT_SOFT) return 1;
    for (t = 0; t < r->n_tokens; t++) {
        double sum = 0.0, all = 0.0, surviving = 0.0;
        if (c->call.mask != NULL && !c->call.mask[t]) continue;
        for (e = 0; e < r->n_experts; e++) all += r->probabilities[t * r->n_experts + e];
        for (i = 0; i < (size_t)r->n_choices[t]; i++) {
            e = (size_t)r->choices[t * r->max_choices + i];
            sum += r->probabilities[t * r->n_experts + e];
            if (r->selected[t * r->n_experts + e]) surviving += r->section_weights[t * r->max_choices + i];
        }
        if ((config->weight == MOE_WEIGHT_SUM || config->weight == MOE_WEIGHT_P_NORM) && is_small(sum, 0.2)) return 0;
        if (config->renormalize == MOE_RENORMALIZE_AFTER && is_small(surviving, 0.2)) return 0;
        if (config->loss_balance > 0.0 && is_small(all, 0.2)) return 0;
    }
    return 1;
}

static int32_t *draw_integers(size_t n, int below) {
    int32_t *v = (int32_t *)grab(n, sizeof *v);
    size_t i;
    for (i = 0; i < n; i++) v[i] = (int32_t)moe_rng_below(&rng, (uint64_t)below);
    return v;
}

/* Positive rows that sum to 1 over the row's sequence. */
static double *draw_attention(const moe_call *call, size_t heads) {
    size_t n = call->n_tokens, h, i, j;
    double *a = (double *)grab(heads * n * n, sizeof *a);
    for (h = 0; h < heads; h++)
        for (i = 0; i < n; i++) {
            double *row = a + (h * n + i) * n, sum = 0.0;
            for (j = 0; j < n; j++) sum += row[j] = exp(moe_rng_normal(&rng));
            for (j = 0; j < n; j++) row[j] /= sum;
        }
    return a;
}

/* What stages beyond x ask of a call. */
static void supply(layer_case *c) {
    const moe_router_config *r = &c->layer.config.router;
    size_t n = c->call.n_tokens, d = (size_t)r->d_model, experts = (size_t)r->n_experts, i;
    moe_rng_seed(&c->rng_start, moe_rng_next(&rng));
    c->call.rng = &c->rng;
    if (r->select == MOE_SELECT_GIVEN) c->call.given = c->given = draw_given(n, (size_t)r->top_k, experts);
    if (r->select == MOE_SELECT_HASH) c->call.token_ids = c->token_ids = draw_integers(n, r->table_size);
    if (r->noise != MOE_NOISE_NONE) c->call.noise = c->noise = normals(n * experts, 0.5);
    if (r->input == MOE_INPUT_JITTER) {
        c->call.jitter = c->jitter = normals(n * d, 0.1);
        for (i = 0; i < n * d; i++) c->jitter[i] += 1.0;
    }
    if (r->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        c->call.n_previous = 2;
        c->call.previous_experts = c->previous_experts = draw_given(n, experts < 2 ? 1 : 2, experts);
        if (experts < 2) c->call.n_previous = 1;
        c->call.previous_input = c->previous_input = normals(n * d, 1.0);
        c->call.previous_weights = c->previous_weights = normals(n * 2, 1.0);
        for (i = 0; i < n * 2; i++) c->previous_weights[i] = 0.1 + fabs(c->previous_weights[i]);
    }
    if (r->refine == MOE_REFINE_ATTENTION) {
        size_t heads = (size_t)r->heads;
        c->attention_count[0] = heads * n * n, c->attention_count[1] = heads * n * d, c->attention_count[2] = n * d;
        c->attention[0] = draw_attention(&c->call, heads);
        c->attention[1] = normals(heads * n * d, 0.7), c->attention[2] = normals(n * d, 0.7);
        for (i = 0; i < 3; i++) c->d_attention[i] = normals(c->attention_count[i], 0.0);
        c->call.attention_weights = c->attention[0], c->call.attention_outputs = c->attention[1],
        c->call.attention_output = c->attention[2];
        c->call.d_attention_weights = c->d_attention[0], c->call.d_attention_outputs = c->d_attention[1],
        c->call.d_attention_output = c->d_attention[2];
    }
    if (r->loss_similarity_same > 0.0) { /* distances of x are constants too, but differences would see them change */
        c->call.distances = c->distances = normals(n * n, 1.0);
        for (i = 0; i < n * n; i++) c->distances[i] = fabs(c->distances[i]);
    }
    if (r->loss_locality > 0.0) {
        c->call.home = c->home = draw_integers(n, r->nodes);
        c->call.expert_node = c->expert_node = draw_integers(experts, r->nodes);
        for (i = 0; i < (size_t)r->nodes; i++) c->expert_node[i] = (int32_t)i; /* no node without experts */
    }
}

static int start_layer(layer_case *c, const moe_layer_config *config, size_t n, int with, moe_error *error) {
    moe_layer_config fitted = *config;
    size_t d, i;
    int tries;
    memset(c, 0, sizeof *c);
    if (fitted.router.select == MOE_SELECT_SOFT) fitted.router.soft_sequences = 3;
    c->status = moe_layer_create(&c->layer, &fitted, 1, moe_rng_next(&rng), NULL, error);
    if (c->status != MOE_OK) return 0;
    draw_tensors(&c->layer);
    d = (size_t)c->layer.config.router.d_model;
    c->call.n_tokens = n;
    c->call.training = 1;
    c->call.x = c->x = normals(n * d, 1.0);
    if (with & WITH_ROUTER_X) c->call.router_x = c->router_x = normals(n * d, 1.0);
    if (with & WITH_MASK) {
        for (i = 0; i < n; i++) c->mask[i] = i % 3 != 1;
        c->call.mask = c->mask;
    }
    if (with & WITH_SEQUENCES) {
        c->sequences[1] = (int32_t)(n / 4), c->sequences[2] = (int32_t)(n / 4), c->sequences[3] = (int32_t)n; /* the second is empty */
        c->call.sequences = c->sequences;
        c->call.n_sequences = 3;
    }
    supply(c);
    c->dy = normals(n * (size_t)c->layer.config.d_out, 0.5);
    c->y = normals(n * (size_t)c->layer.config.d_out, 0.0);
    c->dx = normals(n * d, 0.0);
    c->d_router_x = normals(n * d, 0.0);
    c->decisions = (unsigned char *)grab(n * 64 * 64, 1);
    c->status = moe_layer_work_size(&c->layer, n, 1, &c->work_size);
    if (c->status != MOE_OK) return 0;
    c->work = grab(c->work_size, 1);
    for (tries = 0; tries < 500; tries++) {
        evaluate_layer(c);
        if (c->status != MOE_OK) return 0;
        c->n_decisions = count_decisions(&c->pass.routing);
        if (is_well_placed(c)) return 1;
        for (i = 0; i < n * d; i++) c->x[i] = moe_rng_normal(&rng);
    }
    c->status = MOE_ERR_STOPPED; /* these parameters leave no room: draw others */
    return 0;
}

static void end_layer(layer_case *c) {
    int i;
    free(c->x), free(c->router_x), free(c->dy), free(c->y), free(c->dx), free(c->d_router_x), free(c->decisions), free(c->given),
        free(c->work);
    free(c->noise), free(c->jitter), free(c->previous_input), free(c->previous_weights), free(c->distances), free(c->token_ids),
        free(c->previous_experts);
    free(c->home), free(c->expert_node);
    for (i = 0; i < 3; i++) free(c->attention[i]), free(c->d_attention[i]);
    moe_layer_free(&c->layer);
}

/* The fields that are set, as text. */
static void describe(const moe_layer_config *config, int with, char *text) {
    static const char *const plain[] = {"d_model", "n_experts", "top_k", "d_ff", "untrained", NULL};
    const moe_field *f;
    size_t at = 0, k;
    text[0] = '\0';
    for (f = moe_layer_fields(); f->name != NULL; f++) {
        char value[40];
        moe_field_text(f, config, value, sizeof value);
        for (k = 0; plain[k] != NULL && strcmp(plain[k], f->name) != 0; k++) {
        }
        if (plain[k] != NULL || strcmp(value, "0") == 0 || (f->kind == MOE_FIELD_CHOICE && strcmp(value, f->choices[0]) == 0)) continue;
        if (at + strlen(f->name) + strlen(value) + 2 >= NAME_ROOM - 100) break;
        at += (size_t)sprintf(text + at, "%s=%s ", f->name, value);
    }
    sprintf(text + at, "%s%s%s", with & WITH_MASK ? "mask " : "", with & WITH_ROUTER_X ? "router_x " : "",
            with & WITH_SEQUENCES ? "sequences " : "");
}

static int check_drawn_layer(const char *group, const moe_layer_config *config, size_t n, int with, int redraw) {
    layer_case c;
    subject s;
    moe_error error;
    static const char *const attention_names[3] = {"attention weights", "attention outputs", "attention output"};
    char name[NAME_ROOM];
    moe_tensor t;
    size_t i, d;
    int tries, done = 1;
    describe(config, with, name);
    error.message[0] = '\0';
    for (tries = 0; !start_layer(&c, config, n, with, &error) && c.status == MOE_ERR_STOPPED && tries < 20; tries++) end_layer(&c);
    if (c.status != MOE_OK) {
        report(group, name, 0, error.message[0] != '\0' ? error.message : moe_status_text(c.status));
        end_layer(&c);
        return 1;
    }
    d = (size_t)c.layer.config.router.d_model;
    memset(&s, 0, sizeof s);
    s.evaluate = evaluate_layer, s.ctx = &c;
    s.decisions = c.decisions, s.n_decisions = c.n_decisions;
    s.kept = (unsigned char *)grab(c.n_decisions, 1);
    c.status = moe_layer_backward(&c.layer, c.dy, c.dx, c.router_x != NULL ? c.d_router_x : NULL, &c.pass);
    for (i = 0; moe_layer_tensor(&c.layer, i, &t) == MOE_OK; i++) {
        memcpy(c.tensor_names[i], t.name, MOE_NAME_SIZE);
        add_variable(&s, c.tensor_names[i], t.data, t.gradient, t.count);
        s.variables[s.n_variables - 1].untouched = (t.flags & (MOE_PARAM_FROZEN | MOE_PARAM_STATE)) != 0;
    }
    add_variable(&s, "x", c.x, c.dx, n * d);
    if (c.router_x != NULL) add_variable(&s, "router_x", c.router_x, c.d_router_x, n * d);
    for (i = 0; i < 3 && c.attention[0] != NULL; i++)
        add_variable(&s, attention_names[i], c.attention[i], c.d_attention[i], c.attention_count[i]);
    if (c.status == MOE_OK) done = check_subject_or_redraw(&s, group, name, redraw);
    else report(group, name, 0, moe_status_text(c.status));
    free(s.kept);
    end_layer(&c);
    return done;
}

static void check_layer(const char *group, const moe_layer_config *config, size_t n, int with) {
    int tries;
    for (tries = 0; !check_drawn_layer(group, config, n, with, tries < 5); tries++) {
    }
}

/* A small layer: 3 experts, 2 per token, linear experts so that the router stands out. */
static moe_layer_config small_layer(void) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.d_model = 6, c.router.n_experts = 3, c.router.top_k = 2, c.router.untrained = 1;
    c.expert = MOE_EXPERT_LINEAR;
    c.d_ff = 4;
    return c;
}

/* Checks what moe_layer_check accepts; the rest only counts. */
static int check_accepted(const char *group, const moe_layer_config *config, size_t n, int with) {
    if (moe_layer_check(config, NULL, NULL) != MOE_OK) return 0;
    check_layer(group, config, n, with);
    return 1;
}

static void check_experts(void) {
    moe_layer_config c;
    int expert, act, no_bias, apply, out, shared, sigmoid;
    for (expert = 0; expert < MOE_EXPERT_COUNT; expert++)
        for (act = 0; act < MOE_ACT_COUNT; act++)
            for (no_bias = 0; no_bias < 2; no_bias++)
                for (apply = 0; apply < MOE_APPLY_COUNT; apply++)
                    for (out = 0; out < 2; out++) {
                        c = small_layer();
                        c.expert = expert, c.act = act, c.no_expert_bias = no_bias;
                        c.router.apply_to = apply;
                        c.d_out = out ? 3 : 0;
                        check_accepted("experts", &c, 6, 0);
                    }
    for (expert = 0; expert < MOE_EXPERT_COUNT; expert++)
        for (shared = 1; shared < 4; shared++)
            for (sigmoid = 0; sigmoid < 2; sigmoid++)
                for (out = 0; out < 2; out++) {
                    c = small_layer();
                    c.expert = expert;
                    c.n_shared = shared, c.d_shared = shared == 3 ? 0 : 2, c.shared_sigmoid = sigmoid;
                    c.d_out = out ? 7 : 0;
                    check_layer("shared", &c, 5, out ? WITH_MASK : 0);
                }
}

static void check_norms(void) {
    int expert, node, order, apply, act, gate, refused = 0, accepted = 0;
    for (expert = 0; expert < MOE_EXPERT_COUNT; expert++)
        for (node = 0; node < MOE_NODE_COUNT; node++)
            for (order = 0; order < MOE_NORM_COUNT; order++)
                for (apply = 0; apply < MOE_APPLY_COUNT; apply++)
                    for (act = 0; act < (expert == MOE_EXPERT_MLP ? (int)MOE_ACT_COUNT : 1); act++)
                        for (gate = 0; gate < 2; gate++) {
                            moe_layer_config c = small_layer();
                            c.expert = expert, c.act = act;
                            c.router.score = MOE_SCORE_NORM, c.router.norm_node = node, c.router.norm_order = order;
                            c.router.apply_to = apply;
                            c.router.gate = gate ? MOE_GATE_IDENTITY : MOE_GATE_SOFTMAX, c.router.weight = MOE_WEIGHT_RAW;
                            if (check_accepted("norm", &c, 5, gate ? WITH_MASK : 0)) accepted++;
                            else refused++;
                        }
    printf("norm nodes of experts: %d accepted, %d refused\n", accepted, refused);
}

/* What a value of score or select cannot do without. */
static void fit(moe_layer_config *c) {
    if (c->router.score == MOE_SCORE_NORM) c->expert = MOE_EXPERT_FACTORISED, c->d_low = 2;
    if (c->router.score == MOE_SCORE_ATTENTIVE) c->expert = MOE_EXPERT_MLP, c->act = MOE_ACT_TANH, c->d_ff = 3;
    if (c->router.score == MOE_SCORE_COSINE) c->router.cosine_dim = 4, c->router.cosine_learn_tau = 1;
    if (c->router.score == MOE_SCORE_MLP) c->router.router_hidden = 3, c->router.router_act = MOE_ACT_TANH;
    if (c->router.select == MOE_SELECT_HASH) c->router.table_size = 5;
    if (c->router.select == MOE_SELECT_GROUPED_TOP_K) c->router.n_experts = 4, c->router.groups = 2, c->router.groups_kept = 1;
    if (c->router.select == MOE_SELECT_THRESHOLD) c->router.threshold = 0.3;
    if (c->router.select == MOE_SELECT_AFFINITY) c->router.affinity_mass = 0.7, c->router.capacity = 4;
}

static void check_grid(void) {
    int score, gate, select, weight, accepted = 0, refused = 0;
    for (score = 0; score < MOE_SCORE_COUNT; score++)
        for (gate = 0; gate < MOE_GATE_COUNT; gate++)
            for (select = 0; select < MOE_SELECT_COUNT; select++)
                for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++) {
                    moe_layer_config c = small_layer();
                    c.router.score = score, c.router.gate = gate, c.router.select = select, c.router.weight = weight;
                    c.router.gate_temperature = 0.7;
                    c.router.scale = 1.5;
                    c.router.weight_p = weight == MOE_WEIGHT_P_NORM ? 2.0 : 0.0;
                    c.router.sparsemixer_eps = 0.3;
                    fit(&c);
                    if (check_accepted("grid", &c, 5, 0)) accepted++;
                    else refused++;
                }
    printf("grid score x gate x select x weight: %d accepted and checked, %d refused\n", accepted, refused);
}

/* The options of single stages that the grid holds fixed. */
static void check_stages(void) {
    moe_layer_config c;
    int act, score, with, weight, p, gate, k;
    for (act = 0; act < MOE_ACT_COUNT; act++) {
        c = small_layer();
        c.router.score = MOE_SCORE_MLP, c.router.router_act = act, c.router.weight = MOE_WEIGHT_RAW;
        c.router.router_hidden = act % 2 ? 7 : 0;
        check_layer("mlp score", &c, 6, 0);
        c = small_layer();
        c.router.score = MOE_SCORE_ATTENTIVE, c.router.router_act = act, c.router.weight = MOE_WEIGHT_RAW;
        c.expert = MOE_EXPERT_SWIGLU + (act % 3 == 1) * MOE_EXPERT_MLP + (act % 3 == 2) * MOE_EXPERT_FACTORISED;
        check_layer("attentive score", &c, 6, act % 2 ? WITH_MASK | WITH_ROUTER_X : 0);
    }
    for (k = 0; k < 16; k++) {
        c = small_layer();
        c.router.score = MOE_SCORE_COSINE, c.router.weight = MOE_WEIGHT_RAW;
        c.router.cosine_dim = k & 1 ? 3 : 0, c.router.cosine_keep_length = (k & 2) != 0, c.router.cosine_learn_tau = (k & 4) != 0;
        c.router.cosine_tau = 0.3;
        check_layer("cosine score", &c, 6, k & 8 ? WITH_MASK | WITH_ROUTER_X : 0);
    }
    for (k = 0; k < 4; k++) {
        c = small_layer();
        c.router.score = MOE_SCORE_GRAP, c.router.grap_cosine = k & 1, c.router.weight = MOE_WEIGHT_RAW;
        check_layer("grap score", &c, 6, k & 2 ? WITH_MASK | WITH_ROUTER_X : 0);
    }
    for (k = 0; k < MOE_EXPERT_COUNT; k++) {
        c = small_layer();
        c.router.score = MOE_SCORE_COMPETITION, c.expert = k, c.router.weight = MOE_WEIGHT_RAW, c.router.gate = MOE_GATE_IDENTITY;
        c.router.apply_to = k % 2;
        check_layer("competition score", &c, 6, k & 2 ? WITH_MASK : 0);
    }
    for (score = 0; score < MOE_SCORE_COUNT; score++)
        for (with = 0; with < 8; with++) {
            c = small_layer();
            c.router.score = score, c.router.weight = MOE_WEIGHT_RAW;
            c.router.router_bias = score == MOE_SCORE_LINEAR || score == MOE_SCORE_RANDOM;
            c.router.loss_balance = 0.3, c.router.loss_z = 0.2, c.router.loss_importance = 0.4, c.router.loss_entropy = 0.1;
            c.router.balance_scope = MOE_SCOPE_SEQUENCES;
            fit(&c);
            c.n_shared = with & 1;
            check_layer("calls", &c, 9, with);
        }
    for (gate = 0; gate < MOE_GATE_COUNT; gate++)
        for (k = 0; k < 8; k++) {
            c = small_layer();
            c.router.gate = gate, c.router.gate_temperature = 1.7;
            c.router.selection_bias = k & 1, c.router.expert_scale = (k & 2) != 0;
            c.router.apply_to = k & 4 ? MOE_APPLY_INPUT : MOE_APPLY_OUTPUT;
            c.router.scale = -0.8;
            c.router.weight = gate == MOE_GATE_IDENTITY ? MOE_WEIGHT_SOFTMAX : MOE_WEIGHT_SUM;
            c.router.loss_importance = 0.2, c.router.importance_over = MOE_IMPORTANCE_WEIGHTS;
            check_layer("bias, factors", &c, 6, 0);
        }
    for (p = 0; p < 5; p++)
        for (gate = 0; gate < MOE_GATE_COUNT; gate++) {
            static const double powers[] = {1.0, 0.5, 1.5, 3.0, 8.0};
            c = small_layer();
            c.router.gate = gate, c.router.weight = MOE_WEIGHT_P_NORM, c.router.weight_p = powers[p];
            check_layer("p_norm", &c, 6, 0);
        }
    for (k = 1; k <= 4; k++)
        for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++) {
            c = small_layer();
            c.router.n_experts = 4, c.router.top_k = k, c.router.weight = weight;
            c.router.sparsemixer_eps = k % 2 ? 0.2 : 0.0;
            check_layer("top_k", &c, 6, 0);
            c.router.n_experts = k; /* K = E, and E = 1 */
            check_layer("top_k = n_experts", &c, 6, 0);
        }
}

static void check_inputs(void) {
    moe_layer_config c;
    int mode, spread, mix, lambda, with, noise, gate;
    for (with = 0; with < 8; with++) {
        c = small_layer();
        c.router.weight = MOE_WEIGHT_RAW, c.router.input = MOE_INPUT_SCALED_RMS;
        check_layer("scaled_rms", &c, 8, with);
        c.router.input = MOE_INPUT_JITTER;
        check_layer("jitter", &c, 8, with);
        for (noise = 1; noise < MOE_NOISE_COUNT; noise++)
            for (gate = 0; gate < MOE_GATE_COUNT; gate++) {
                c = small_layer();
                c.router.noise = noise, c.router.gate = gate, c.router.weight = MOE_WEIGHT_RAW, c.router.loss_z = 0.1;
                c.router.noise_floor = with & 1 ? 0.5 : 0.0, c.router.noise_sigma = with & 2 ? 0.8 : 0.0;
                check_layer("noise", &c, 8, with);
            }
    }
    for (mode = 0; mode < MOE_AC_COUNT; mode++)
        for (spread = 0; spread < MOE_SPREAD_COUNT; spread++)
            for (mix = 1; mix < 3; mix++)
                for (lambda = 0; lambda < 2; lambda++) {
                    c = small_layer();
                    c.router.weight = MOE_WEIGHT_RAW, c.router.input = MOE_INPUT_ADAPTIVE_CLUSTERING;
                    c.router.ac_mode = mode, c.router.ac_spread = spread, c.router.ac_mix = mix, c.router.ac_lambda = lambda ? 0.4 : 0.0;
                    if (mode == MOE_AC_CODE) continue; /* M is made of x and is a constant: differences would see it change */
                    check_accepted("adaptive_clustering", &c, 9, mix == 2 ? WITH_MASK : WITH_ROUTER_X);
                }
}

static void check_refinement(void) {
    moe_layer_config c;
    int scale, k, heads, u, gate, n_heads;
    for (gate = 0; gate < MOE_GATE_COUNT; gate++)
        for (scale = 0; scale < MOE_SIMILARITY_COUNT; scale++)
            for (k = 0; k < 16; k++) {
                c = small_layer();
                c.router.gate = gate, c.router.weight = MOE_WEIGHT_RAW, c.router.refine = MOE_REFINE_SIMILARITY;
                c.router.similarity_scale = scale, c.router.similarity_learned = k & 1, c.router.lower_entropy_only = (k & 2) != 0,
                c.router.causal = (k & 4) != 0;
                c.router.similarity_tau = k & 1 ? 2.5 : 0.0;
                check_layer("similarity", &c, 7, k & 8 ? WITH_MASK | WITH_SEQUENCES : scale == 1 ? WITH_ROUTER_X : 0);
            }
    for (gate = 0; gate < MOE_GATE_COUNT; gate++)
        for (heads = 0; heads < MOE_HEADS_COUNT; heads++)
            for (u = 0; u < MOE_ATTENTION_U_COUNT; u++)
                for (n_heads = 1; n_heads < 4; n_heads += 2)
                    for (k = 0; k < 8; k++) {
                        c = small_layer();
                        c.router.gate = gate, c.router.weight = MOE_WEIGHT_RAW, c.router.refine = MOE_REFINE_ATTENTION;
                        c.router.attention_heads = heads, c.router.attention_u = u, c.router.heads = n_heads,
                        c.router.attention_head = n_heads - 1;
                        c.router.lower_entropy_only = k & 1, c.router.causal = (k & 2) != 0, c.router.attention_sigma = k & 1 ? 1.6 : 0.0;
                        check_layer("attention", &c, 6, k & 4 ? WITH_MASK | WITH_SEQUENCES : 0);
                    }
}

static void check_selections(void) {
    moe_layer_config c;
    int select, order, after, weight, rule, k, gate;
    for (select = 0; select < MOE_SELECT_COUNT; select++) {
        if (select == MOE_SELECT_SOFT) continue;
        for (k = 0; k < 16; k++) { /* the options of each selection; those of others are without effect */
            c = small_layer();
            c.router.select = select;
            fit(&c);
            c.router.selection_bias = k & 1, c.router.top_p = 0.3 + 0.04 * k;
            c.router.threshold = 0.25 + 0.03 * k, c.router.threshold_fallback = k % 3;
            c.router.expert_choice_score = k & 1, c.router.affinity_sum = k & 4 ? 0.7 : 0.0, c.router.capacity_min = k & 8 ? 2 : 0;
            if (select == MOE_SELECT_EXPERT_CHOICE) c.router.capacity_factor = 0.5 + 0.2 * k;
            if (select == MOE_SELECT_GROUPED_TOP_K)
                c.router.group_score = k & 1, c.router.n_experts = 6, c.router.groups = k & 2 ? 3 : 2, c.router.groups_kept = k & 4 ? 2 : 1;
            c.router.gate = k % 4; /* softmax to relu */
            c.router.loss_balance = 0.2, c.router.balance_over = k % 3;
            check_layer("selections", &c, 8, k & 2 ? WITH_MASK : 0);
        }
        for (order = 0; order < MOE_DROP_COUNT; order++)
            for (after = 0; after < 2; after++)
                for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++)
                    for (rule = 0; rule < MOE_DROP_RULE_COUNT; rule++) {
                        c = small_layer();
                        c.router.select = select, c.router.weight = weight, c.router.gate = weight % 3;
                        fit(&c);
                        c.router.drop_order = order, c.router.renormalize = after, c.router.drop_rule = rule;
                        c.router.drop_capacity = 2 + rule;
                        c.router.expert_scale = order & 1, c.router.apply_to = (order & 2) != 0, c.router.scale = 1.3;
                        check_accepted("capacity", &c, 7, weight & 1 ? WITH_MASK : 0);
                    }
    }
    for (k = 0; k < 8; k++)
        for (gate = 0; gate < 3; gate++) { /* capacity by a factor */
            c = small_layer();
            c.router.gate = gate, c.router.capacity_factor = 0.4 + 0.15 * k, c.router.capacity_factor_eval = 3.0,
            c.router.renormalize = k & 1, c.router.drop_order = k % 4;
            c.router.loss_importance = 0.3, c.router.importance_over = k % 3;
            check_layer("capacity factor", &c, 7, 0);
        }
}

/* Soft goes alone: slots, unit vectors, sequences, padding, inputs and kinds of experts. */
static void check_soft(void) {
    int k, input, expert;
    for (k = 0; k < 32; k++)
        for (input = 0; input < MOE_INPUT_COUNT; input++)
            for (expert = 0; expert < MOE_EXPERT_COUNT; expert++) {
                moe_layer_config c = small_layer();
                int with = (k & 4 ? WITH_SEQUENCES : 0) | (k & 8 ? WITH_MASK : 0) | (k & 16 ? WITH_ROUTER_X : 0);
                c.router.select = MOE_SELECT_SOFT, c.router.slots = 1 + (k & 1), c.router.soft_normalise = (k & 2) != 0,
                c.router.input = input;
                c.expert = expert, c.n_shared = k % 3 == 0, c.d_out = k % 5 == 0 ? 4 : 0;
                check_layer("soft", &c, 7, with);
            }
}

/* Sets the factor of a loss; 0 when there is none for this one alone. */
static void set_loss(moe_router_config *r, int loss, double factor) {
    switch (loss) {
    case MOE_LOSS_BALANCE: r->loss_balance = factor; break;
    case MOE_LOSS_Z: r->loss_z = factor; break;
    case MOE_LOSS_IMPORTANCE: r->loss_importance = factor; break;
    case MOE_LOSS_ENTROPY: r->loss_entropy = factor; break;
    case MOE_LOSS_USAGE_ENTROPY: r->loss_usage_entropy = factor; break;
    case MOE_LOSS_SIMILARITY: r->loss_similarity_same = factor, r->loss_similarity_diff = 0.7 * factor; break;
    case MOE_LOSS_LOCALITY: r->loss_locality = factor, r->nodes = 2; break;
    case MOE_LOSS_L1: r->loss_l1 = factor; break;
    case MOE_LOSS_ORTHOGONAL: r->loss_orthogonal = factor; break;
    default: r->loss_load = factor, r->noise = r->noise == MOE_NOISE_NOISY_TOPK ? (int)MOE_NOISE_NOISY_TOPK : (int)MOE_NOISE_GAUSSIAN;
    }
}

/* Logarithms and quotients of sums of p: a gate with negative values has none, unless its logits are norms. */
static int needs_positive(int loss) {
    return loss == MOE_LOSS_BALANCE || loss == MOE_LOSS_IMPORTANCE || loss == MOE_LOSS_USAGE_ENTROPY || loss == MOE_LOSS_LOCALITY;
}

static void check_losses(void) {
    int loss, gate, select, over, option, with, weight, noise, refused = 0;
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++)
        for (gate = 0; gate < MOE_GATE_COUNT; gate++)
            for (select = 0; select < MOE_SELECT_COUNT; select++)
                for (over = 0; over < 3; over++)
                    for (option = 0; option < 2; option++)
                        for (with = 0; with < 8; with += loss == MOE_LOSS_BALANCE ? 1 : 5) {
                            moe_layer_config c = small_layer();
                            if ((over > 0 || option > 0) && loss != MOE_LOSS_BALANCE && loss != MOE_LOSS_IMPORTANCE) continue;
                            c.router.gate = gate, c.router.select = select;
                            c.router.weight = gate == MOE_GATE_IDENTITY ? MOE_WEIGHT_RAW : MOE_WEIGHT_SUM;
                            fit(&c);
                            set_loss(&c.router, loss, 0.5);
                            c.router.balance_over = c.router.importance_over = over, c.router.balance_scope = c.router.unbiased = option;
                            if (gate == MOE_GATE_IDENTITY && needs_positive(loss))
                                c.router.score = MOE_SCORE_NORM, c.router.norm_node = MOE_NODE_OUTPUT;
                            if (!check_accepted("losses", &c, 8, with)) refused++;
                        }
    for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++) {
        moe_layer_config c = small_layer();
        c.router.weight = weight, c.router.loss_importance = 0.5, c.router.importance_over = MOE_IMPORTANCE_WEIGHTS;
        c.router.expert_scale = weight % 2, c.router.scale = 2.5;
        check_layer("importance of weights", &c, 8, WITH_MASK);
    }
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++) /* what reads the logits or the gate without noise, and what is refined */
        for (noise = 0; noise < MOE_NOISE_COUNT; noise++)
            for (option = 0; option < 6; option++) {
                moe_layer_config c = small_layer();
                c.router.noise = noise, c.router.gate = option % 3, c.router.top_k = 1 + option % 2, c.router.weight = MOE_WEIGHT_RAW;
                c.router.importance_over = MOE_IMPORTANCE_GATE, c.router.noise_sigma = 0.6;
                c.router.refine = option == 4 ? MOE_REFINE_SIMILARITY : MOE_REFINE_NONE;
                c.router.score = option == 5 ? MOE_SCORE_COSINE : MOE_SCORE_LINEAR;
                set_loss(&c.router, loss, 0.5);
                if (!check_accepted("losses and noise", &c, 7, option & 1 ? WITH_MASK : 0)) refused++;
            }
    printf("losses: %d compositions refused\n", refused);
}

/* ---- random compositions ------------------------------------------------------------------------------------------------- */

static int below(int n) { return (int)moe_rng_below(&rng, (uint64_t)n); }

static int chance(int percent) { return below(100) < percent; }

static void draw_config(moe_layer_config *c) {
    moe_router_config *r = &c->router;
    int loss, n;
    memset(c, 0, sizeof *c);
    r->untrained = 1;
    r->d_model = 4 + 2 * below(2), r->n_experts = 1 + below(4), r->top_k = 1 + below(r->n_experts);
    c->expert = below(MOE_EXPERT_COUNT), c->d_ff = 3;
    if (c->expert == MOE_EXPERT_MLP) c->act = 1 + below(MOE_ACT_COUNT - 1);
    if (chance(20)) c->d_out = 3;
    if (chance(20)) c->n_shared = 1, c->d_shared = 2;
    r->input = chance(50) ? 0 : below(MOE_INPUT_COUNT);
    if (r->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        r->ac_mode = below(MOE_AC_COUNT), r->ac_spread = below(MOE_SPREAD_COUNT), r->ac_mix = 1 + below(2);
        if (r->ac_mode == MOE_AC_CODE) r->ac_mode = MOE_AC_PAPER;
    }
    r->score = below(MOE_SCORE_COUNT);
    r->router_bias = r->score <= MOE_SCORE_RANDOM && chance(40);
    if (r->score == MOE_SCORE_COSINE) r->cosine_dim = below(2) * 3, r->cosine_keep_length = below(2), r->cosine_learn_tau = below(2);
    if (r->score == MOE_SCORE_GRAP) r->grap_cosine = below(2);
    r->norm_node = below(MOE_NODE_COUNT), r->norm_order = below(MOE_NORM_COUNT), r->router_act = 1 + below(MOE_ACT_COUNT - 1);
    if (r->score == MOE_SCORE_MLP) r->router_hidden = 3;
    r->noise = chance(70) ? 0 : below(MOE_NOISE_COUNT);
    r->gate = below(MOE_GATE_COUNT), r->gate_temperature = 0.5 + 0.5 * below(3);
    r->refine = chance(50) ? 0 : below(MOE_REFINE_COUNT);
    if (r->refine != MOE_REFINE_NONE) r->lower_entropy_only = chance(30), r->causal = below(2);
    if (r->refine == MOE_REFINE_SIMILARITY)
        r->similarity_learned = below(2), r->similarity_scale = below(MOE_SIMILARITY_COUNT), r->similarity_tau = 1.0 + below(2);
    if (r->refine == MOE_REFINE_ATTENTION)
        r->heads = 1 + below(3), r->attention_heads = below(MOE_HEADS_COUNT), r->attention_head = below(r->heads),
        r->attention_u = below(2);
    r->select = below(MOE_SELECT_COUNT);
    if (r->select == MOE_SELECT_SOFT) { /* everything else at its default: now and then */
        int d = r->d_model, e = r->n_experts, input = r->input, mode = r->ac_mode;
        memset(r, 0, sizeof *r);
        r->untrained = 1, r->select = MOE_SELECT_SOFT, r->d_model = d, r->n_experts = e, r->input = input, r->ac_mode = mode;
        r->slots = 1 + below(2), r->soft_normalise = below(2);
        return;
    }
    r->selection_bias = chance(20), r->expert_scale = chance(20), r->scale = chance(30) ? 1.5 : 0.0, r->apply_to = chance(30);
    if (r->select == MOE_SELECT_GROUPED_TOP_K) r->groups = 1 + below(2), r->groups_kept = 1 + below(r->groups), r->group_score = below(2);
    if (r->select == MOE_SELECT_HASH) r->table_size = 4;
    r->top_p = 0.4 + 0.1 * below(5), r->threshold = 0.2 + 0.1 * below(3), r->threshold_fallback = below(3),
    r->expert_choice_score = below(2), r->affinity_mass = 0.6;
    if (chance(20)) r->capacity_factor = 0.5 + 0.25 * below(4);
    r->weight = below(MOE_WEIGHT_COUNT), r->weight_p = 1.0 + below(2), r->sparsemixer_eps = 0.2;
    if (chance(40))
        r->drop_capacity = 1 + below(3), r->drop_order = below(MOE_DROP_COUNT), r->drop_rule = chance(30) ? below(MOE_DROP_RULE_COUNT) : 0,
        r->renormalize = below(2);
    for (n = below(4); n > 0; n--) {
        loss = below(MOE_LOSS_COUNT);
        if (r->gate != MOE_GATE_IDENTITY || !needs_positive(loss)) set_loss(r, loss, 0.3);
    }
    r->balance_over = below(3), r->balance_scope = below(2), r->importance_over = below(3), r->unbiased = below(2);
    if (r->gate == MOE_GATE_IDENTITY && r->loss_importance > 0.0) r->loss_importance = 0.0;
}

static void check_random(int wanted) {
    int accepted = 0, refused = 0;
    while (accepted < wanted && refused < 20 * wanted) {
        moe_layer_config c;
        moe_error error;
        moe_status status;
        draw_config(&c);
        error.message[0] = '\0';
        status = moe_layer_check(&c, NULL, &error);
        if (status == MOE_OK) {
            check_layer("random", &c, 3 + (size_t)below(6), below(8));
            accepted++;
            continue;
        }
        refused++;
        if (status != MOE_ERR_CONFIG || error.message[0] == '\0') report("random", error.message, 0, "refused without a good reason");
    }
    printf("random compositions: %d accepted and checked, %d refused\n", accepted, refused);
}

/* ---- single functions ------------------------------------------------------------------------------------------------------ */

enum { ROW = 7 };

typedef struct row_case {
    int what, act;
    double x[ROW], gain[ROW], bias[ROW], dy[ROW], y[ROW], temperature;
} row_case;

enum { ROW_ACTIVATION, ROW_SOFTMAX, ROW_LAYER_NORM, ROW_RMS_NORM };

static double evaluate_row(void *ctx) {
    row_case *c = (row_case *)ctx;
    double sum = 0.0;
    size_t i;
    if (c->what == ROW_ACTIVATION) moe_activate(NULL, c->act, ROW, c->x, c->y);
    if (c->what == ROW_SOFTMAX) moe_softmax(NULL, ROW, c->x, c->temperature, c->y);
    if (c->what == ROW_LAYER_NORM) moe_layer_norm(ROW, c->x, c->gain, c->bias, 1e-5, c->y, NULL, NULL);
    if (c->what == ROW_RMS_NORM) moe_rms_norm(ROW, c->x, c->gain, 1e-6, c->y, NULL);
    for (i = 0; i < ROW; i++) sum += c->y[i] * c->dy[i];
    return sum;
}

static void check_row(int what, int act, const char *name) {
    row_case c;
    subject s;
    double dx[ROW] = {0}, dgain[ROW] = {0}, dbias[ROW] = {0}, mean, rstd;
    size_t i;
    memset(&s, 0, sizeof s);
    c.what = what, c.act = act, c.temperature = 0.6;
    for (i = 0; i < ROW; i++) {
        c.x[i] = 2.0 * moe_rng_normal(&rng), c.gain[i] = moe_rng_normal(&rng), c.bias[i] = moe_rng_normal(&rng),
        c.dy[i] = moe_rng_normal(&rng);
    }
    s.evaluate = evaluate_row, s.ctx = &c;
    add_variable(&s, "x", c.x, dx, ROW);
    if (what >= ROW_LAYER_NORM) add_variable(&s, "gain", c.gain, dgain, ROW);
    if (what == ROW_LAYER_NORM) add_variable(&s, "bias", c.bias, dbias, ROW);
    evaluate_row(&c);
    if (what == ROW_ACTIVATION) moe_activate_backward(NULL, act, ROW, c.x, c.dy, dx);
    if (what == ROW_SOFTMAX) moe_softmax_backward(ROW, c.y, c.dy, c.temperature, dx);
    if (what == ROW_LAYER_NORM) {
        moe_layer_norm(ROW, c.x, c.gain, c.bias, 1e-5, c.y, &mean, &rstd);
        moe_layer_norm_backward(ROW, c.x, c.gain, mean, rstd, c.dy, dx, dgain, dbias);
    }
    if (what == ROW_RMS_NORM) {
        moe_rms_norm(ROW, c.x, c.gain, 1e-6, c.y, &rstd);
        moe_rms_norm_backward(ROW, c.x, c.gain, rstd, c.dy, dx, dgain);
    }
    check_subject(&s, "functions", name);
}

static void check_rows(void) {
    static const char *const acts[MOE_ACT_COUNT] = {"relu", "silu", "gelu", "tanh", "sigmoid", "identity"};
    int act;
    for (act = 0; act < MOE_ACT_COUNT; act++) check_row(ROW_ACTIVATION, act, acts[act]);
    check_row(ROW_SOFTMAX, 0, "softmax");
    check_row(ROW_LAYER_NORM, 0, "layer_norm");
    check_row(ROW_RMS_NORM, 0, "rms_norm");
}

/* ---- criteria ------------------------------------------------------------------------------------------------------------- */

enum { SAMPLES = 5, CLASSES = 4 };

typedef struct criterion_case {
    int squared;
    double y[SAMPLES * CLASSES], targets[SAMPLES * CLASSES];
    int32_t labels[SAMPLES];
} criterion_case;

static double evaluate_criterion(void *ctx) {
    criterion_case *c = (criterion_case *)ctx;
    return c->squared ? moe_squared_error(SAMPLES, CLASSES, c->y, c->targets, NULL)
                      : moe_cross_entropy(SAMPLES, CLASSES, c->y, c->labels, NULL);
}

static void check_criteria(void) {
    criterion_case c;
    double dy[SAMPLES * CLASSES];
    size_t i;
    for (c.squared = 0; c.squared < 2; c.squared++) {
        subject s;
        memset(&s, 0, sizeof s);
        for (i = 0; i < SAMPLES * CLASSES; i++) c.y[i] = 3.0 * moe_rng_normal(&rng), c.targets[i] = moe_rng_normal(&rng), dy[i] = 1e9;
        for (i = 0; i < SAMPLES; i++) c.labels[i] = (int32_t)moe_rng_below(&rng, CLASSES);
        if (c.squared) moe_squared_error(SAMPLES, CLASSES, c.y, c.targets, dy);
        else moe_cross_entropy(SAMPLES, CLASSES, c.y, c.labels, dy);
        s.evaluate = evaluate_criterion, s.ctx = &c;
        add_variable(&s, "y", c.y, dy, SAMPLES * CLASSES);
        check_subject(&s, "criteria", c.squared ? "squared error" : "cross entropy");
    }
}

/* ---- nets ------------------------------------------------------------------------------------------------------------------ */

enum { NET_TOKENS = 6 };

typedef struct net_case {
    moe_net net;
    moe_net_pass pass;
    moe_call call;
    double *x, *dx, *dy;
    int32_t labels[NET_TOKENS];
    int criterion; /* -1: sum(y * dy) */
    void *work;
    size_t work_size, n_decisions;
    unsigned char *decisions;
    unsigned char mask[NET_TOKENS];
    moe_status status;
} net_case;

static double evaluate_net(void *ctx) {
    net_case *c = (net_case *)ctx;
    size_t i, k, at = 0, count = NET_TOKENS * (size_t)c->net.d_out;
    double sum = 0.0;
    c->status = moe_net_forward(&c->net, &c->call, c->work, c->work_size, &c->pass);
    if (c->status != MOE_OK) return HUGE_VAL;
    if (c->criterion < 0)
        for (i = 0; i < count; i++) sum += c->pass.y[i] * c->dy[i];
    else if (c->criterion == MOE_CRITERION_CROSS_ENTROPY)
        sum = moe_cross_entropy(NET_TOKENS, (size_t)c->net.d_out, c->pass.y, c->labels, NULL);
    else sum = moe_squared_error(NET_TOKENS, (size_t)c->net.d_out, c->pass.y, c->dy, NULL);
    for (i = 0; i < c->net.n_modules; i++) {
        const moe_routing *r = moe_net_routing(&c->net, &c->pass, i);
        if (r == NULL) continue;
        for (k = 0; k < MOE_LOSS_COUNT; k++) sum += r->loss[k];
        if (c->decisions != NULL) memcpy(c->decisions + at, r->selected, r->n_tokens * r->n_experts);
        at += r->n_tokens * r->n_experts;
    }
    c->n_decisions = at;
    return sum;
}

/* Everything of a net that build left ready; frees it. */
static void check_net(const char *name, net_case *c) {
    subject s;
    moe_error error;
    double *dy;
    size_t i, k, count;
    memset(&s, 0, sizeof s);
    error.message[0] = '\0';
    c->status = moe_net_build(&c->net, 1, moe_rng_next(&rng), &error);
    if (c->status != MOE_OK) {
        report("nets", name, 0, error.message);
        moe_net_free(&c->net);
        return;
    }
    for (i = 0; i < c->net.n_tensors; i++)
        for (k = 0; k < c->net.tensors[i].count; k++)
            if (c->net.tensors[i].flags & MOE_PARAM_NO_DECAY) c->net.tensors[i].data[k] += 0.3 * moe_rng_normal(&rng);
    count = NET_TOKENS * (size_t)c->net.d_out;
    c->x = normals(NET_TOKENS * (size_t)c->net.d_in, 1.0);
    c->dx = normals(NET_TOKENS * (size_t)c->net.d_in, 0.0);
    c->dy = normals(count, 0.5);
    dy = normals(count, 0.0);
    for (i = 0; i < NET_TOKENS; i++) c->labels[i] = (int32_t)moe_rng_below(&rng, (uint64_t)c->net.d_out);
    c->call.n_tokens = NET_TOKENS, c->call.x = c->x, c->call.training = 1;
    c->status = moe_net_work_size(&c->net, NET_TOKENS, 1, &c->work_size);
    c->work = grab(c->work_size, 1);
    if (c->status == MOE_OK) evaluate_net(c);
    if (c->status == MOE_OK) {
        if (c->criterion < 0) memcpy(dy, c->dy, count * sizeof *dy);
        else if (c->criterion == MOE_CRITERION_CROSS_ENTROPY) moe_cross_entropy(NET_TOKENS, (size_t)c->net.d_out, c->pass.y, c->labels, dy);
        else moe_squared_error(NET_TOKENS, (size_t)c->net.d_out, c->pass.y, c->dy, dy);
        moe_net_zero_gradients(&c->net);
        c->status = moe_net_backward(&c->net, &c->pass, dy, c->dx);
    }
    if (c->status == MOE_OK) {
        s.evaluate = evaluate_net, s.ctx = c;
        s.n_decisions = c->n_decisions;
        s.decisions = c->decisions = (unsigned char *)grab(c->n_decisions, 1);
        s.kept = (unsigned char *)grab(c->n_decisions, 1);
        for (i = 0; i < c->net.n_tensors; i++) {
            add_variable(&s, c->net.tensors[i].name, c->net.tensors[i].data, c->net.tensors[i].gradient, c->net.tensors[i].count);
            s.variables[s.n_variables - 1].untouched = (c->net.tensors[i].flags & (MOE_PARAM_FROZEN | MOE_PARAM_STATE)) != 0;
        }
        add_variable(&s, "x", c->x, c->dx, NET_TOKENS * (size_t)c->net.d_in);
        check_subject(&s, "nets", name);
    } else report("nets", name, 0, moe_status_text(c->status));
    free(s.kept), free(c->decisions), free(c->work), free(c->x), free(c->dx), free(c->dy), free(dy);
    moe_net_free(&c->net);
}

static void start_net(net_case *c, int d_in) {
    memset(c, 0, sizeof *c);
    c->criterion = -1;
    moe_net_init(&c->net, d_in, 0, NULL);
}

static moe_layer_config net_mixture(void) {
    moe_layer_config m = small_layer();
    m.router.d_model = 0; /* the width that arrives */
    m.expert = MOE_EXPERT_SWIGLU;
    m.router.loss_balance = 0.1, m.router.loss_z = 0.05;
    return m;
}

static void check_nets(void) {
    net_case c;
    moe_layer_config m = net_mixture();
    char name[64];
    int act, criterion;
    start_net(&c, 4), moe_net_linear(&c.net, 6), check_net("linear", &c);
    start_net(&c, 5), moe_net_layer_norm(&c.net), check_net("layer_norm", &c);
    for (act = 0; act < MOE_ACT_COUNT; act++) {
        sprintf(name, "linear, activation %d", act);
        start_net(&c, 4), moe_net_linear(&c.net, 6), moe_net_activation(&c.net, act), check_net(name, &c);
        sprintf(name, "activation %d first", act);
        start_net(&c, 4), moe_net_activation(&c.net, act), check_net(name, &c);
    }
    start_net(&c, 5), moe_net_mixture(&c.net, &m), check_net("mixture", &c);
    start_net(&c, 5), moe_net_mixture(&c.net, &m), moe_net_residual(&c.net, 1), check_net("mixture, residual around it", &c);
    start_net(&c, 5), moe_net_linear(&c.net, 5), moe_net_layer_norm(&c.net), moe_net_mixture(&c.net, &m), moe_net_residual(&c.net, 2);
    check_net("linear, norm, mixture, residual over two", &c);
    start_net(&c, 5), moe_net_layer_norm(&c.net), moe_net_residual(&c.net, 1), moe_net_residual(&c.net, 1), moe_net_residual(&c.net, 3);
    check_net("residuals over residuals", &c);
    m.d_out = 3;
    start_net(&c, 5), moe_net_mixture(&c.net, &m), moe_net_linear(&c.net, 4), check_net("mixture that changes the width", &c);
    m = net_mixture();
    m.expert = MOE_EXPERT_FACTORISED, m.router.score = MOE_SCORE_NORM, m.n_shared = 1, m.d_shared = 2, m.shared_sigmoid = 1;
    start_net(&c, 5), moe_net_layer_norm(&c.net), moe_net_mixture(&c.net, &m), moe_net_residual(&c.net, 2),
        check_net("experts choose themselves", &c);
    for (criterion = 0; criterion < MOE_CRITERION_COUNT; criterion++) {
        m = net_mixture();
        start_net(&c, 4);
        c.criterion = criterion;
        moe_net_linear(&c.net, 5), moe_net_activation(&c.net, MOE_ACT_GELU);
        moe_net_layer_norm(&c.net), moe_net_mixture(&c.net, &m), moe_net_residual(&c.net, 2);
        m.expert = MOE_EXPERT_MLP, m.act = MOE_ACT_TANH, m.router.score = MOE_SCORE_COSINE, m.router.cosine_dim = 3,
        m.router.cosine_learn_tau = 1;
        moe_net_layer_norm(&c.net), moe_net_mixture(&c.net, &m), moe_net_residual(&c.net, 2);
        moe_net_layer_norm(&c.net), moe_net_linear(&c.net, 3);
        check_net(criterion ? "two mixtures, squared error" : "two mixtures, cross entropy", &c);
    }
    m = net_mixture();
    start_net(&c, 5), moe_net_mixture(&c.net, &m), moe_net_residual(&c.net, 1);
    for (act = 0; act < NET_TOKENS; act++) c.mask[act] = act % 3 != 0;
    c.call.mask = c.mask;
    check_net("mask", &c);
}

int main(int argc, char **argv) {
    verbose = argc > 1 && strcmp(argv[1], "-v") == 0;
    moe_rng_seed(&rng, 20240607);
    check_rows();
    check_experts();
    check_norms();
    check_grid();
    check_stages();
    check_inputs();
    check_refinement();
    check_selections();
    check_soft();
    check_losses();
    check_random(1500);
    check_criteria();
    check_nets();
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
