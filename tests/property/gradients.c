/* gradients.c - every backward pass against central differences of the forward pass, in double.

     cc -std=c99 -O2 -I. -DMOE_REAL=double tests/property/gradients.c -o gradients -lm
     ./gradients

   L = sum(y * dy) + all losses is differentiated for every number of every tensor and input; in the
   large grids along a random direction of each of them, and for some of their numbers. Error of a
   tensor: max |backward - difference| / (1e-8 + largest of both), bound 1e-6. The derivative is
   (L(h) - L(-h)) / 2h at h = 1e-5. What misses the bound there is measured again, extrapolated as
   (4 D(h/2) - D(h)) / 3, at smaller steps (L may be strongly curved) and larger ones (rounding
   drowns a flat function); a wrong derivative agrees at none. What is smaller than the rounding of
   L leaves of a difference, 1e-10 (1 + |L|), is 0. A step that changes a decision measures nothing:
   who is chosen, in which order, who is kept, on which side of a kink anything lies (relu, absolute
   values, smooth steps, the best head, rivals, ...). Decisions of both sides are compared exactly.
   A number that no step measures is skipped; a case with more than one such number in ten is drawn
   again. It is a failure when more than 1 % of the numbers, or one case in a thousand, are left out
   in the end.
   Checked are single functions, every module of a network, every kind of expert, every stage of a
   router with its options, the grid score x gate x select x weight, every pair of options, and some
   hundred random compositions of all stages. What moe_layer_check refuses is counted; a refused
   pair must name what clashes. What is a constant by design is held constant in L: the feature
   weights of adaptive clustering, the distances of the similarity loss, the teacher. A learned
   threshold has the slope of a surrogate, which is checked by its formula. "gradients quick" takes
   part of the grids, along random directions; -v prints every case. Exit status 1 if any failed. */

#ifndef MOE_REAL
#define MOE_REAL double
#endif
#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !MOE_REAL_IS_DOUBLE
#error "gradients.c needs -DMOE_REAL=double"
#endif

#define BOUND 1e-6

enum { NAME_ROOM = 1000, MAX_VARIABLES = 64 };

static int verbose, quick;
static double all_numbers, all_skipped; /* of the cases that are in */
static long all_cases, all_left_out;    /* with gradients; of them those that no draw could measure */
static long cases_with_drops;
static moe_rng rng;

static void report(const char *group, const char *name, int good, const char *why) {
    if (good) test_passed++;
    else test_failed++;
    if (!good || verbose) printf("%s: %s [%s] %s\n", good ? "ok" : "FAILED", group, name, why);
}

static double *normals(size_t count, double spread) {
    double *v = (double *)grab(count, sizeof *v);
    size_t i;
    for (i = 0; i < count; i++) v[i] = spread * moe_rng_normal(&rng);
    return v;
}

static int below(int n) { return (int)moe_rng_below(&rng, (uint64_t)n); }

static int chance(int percent) { return below(100) < percent; }

/* ---- decisions ---- */

/* All decisions of one evaluation, one after another. */
typedef struct notes {
    unsigned char *bytes;
    size_t count, room;
} notes;

static void note(notes *n, size_t what) {
    if (n->count + 2 > n->room) {
        n->room = 2 * n->room + 1000;
        n->bytes = (unsigned char *)realloc(n->bytes, n->room);
        if (n->bytes == NULL) exit(2);
    }
    n->bytes[n->count++] = (unsigned char)(what & 255u);
    n->bytes[n->count++] = (unsigned char)(what >> 8 & 255u);
}

static void note_sign(notes *n, double v) { note(n, v > 0.0 ? 1 : v < 0.0 ? 2 : 3); }

static void note_signs(notes *n, const double *v, size_t count) {
    size_t i;
    for (i = 0; i < count; i++) note_sign(n, v[i]);
}

static int same_notes(const notes *a, const notes *b) {
    return a->count == b->count && (a->count == 0 || memcmp(a->bytes, b->bytes, a->count) == 0);
}

static void copy_notes(notes *to, const notes *from) {
    size_t i;
    to->count = 0;
    for (i = 0; i + 1 < from->count; i += 2) note(to, (size_t)from->bytes[i] | (size_t)from->bytes[i + 1] << 8);
}

/* ---- the check itself ---- */

/* A tensor that L depends on, and the gradient that is to be checked. */
typedef struct variable {
    const char *name;
    double *value;
    const double *gradient;
    size_t count;
    int untouched; /* not trained: its gradient must stay 0, whatever L does */
} variable;

/* A function of variables. evaluate computes L and what it decided. */
typedef struct subject {
    double (*evaluate)(void *ctx);
    void *ctx;
    notes *decisions, first; /* of the last evaluation (NULL: it takes none); at the start */
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
    v->name = name;
    v->value = value;
    v->gradient = gradient;
    v->count = count;
    v->untouched = 0;
}

/* A way through the numbers of a variable: value = base + h direction. */
typedef struct line {
    double *value;
    const double *base, *direction;
    size_t count;
} line;

/* L at h; 0 when something is decided otherwise there. */
static int evaluate_at(subject *s, const line *way, double h, double *result) {
    size_t i;
    for (i = 0; i < way->count; i++) way->value[i] = way->base[i] + h * way->direction[i];
    *result = s->evaluate(s->ctx);
    memcpy(way->value, way->base, way->count * sizeof(double));
    return isfinite(*result) && (s->decisions == NULL || same_notes(s->decisions, &s->first));
}

static int central_difference(subject *s, const line *way, double h, double *result) {
    double f[2];
    if (!evaluate_at(s, way, h, &f[0]) || !evaluate_at(s, way, -h, &f[1])) return 0;
    *result = (f[0] - f[1]) / (2.0 * h);
    return 1;
}

static int extrapolated_difference(subject *s, const line *way, double h, double *result) {
    double wide, narrow;
    if (!central_difference(s, way, h, &wide) || !central_difference(s, way, h / 2.0, &narrow)) return 0;
    *result = (4.0 * narrow - wide) / 3.0;
    return 1;
}

/* Measures again what the first step did not find within reach of `expected`; keeps the nearest. 0
   when no step measures anything. */
static int nearest_difference(subject *s, const line *way, int found, double expected, double allowed, double *result) {
    static const double steps[] = {2e-4, 2e-5, 2e-6, 2e-3, 2e-7, 2e-2};
    double now;
    size_t k;
    for (k = 0; k < sizeof steps / sizeof steps[0]; k++) {
        if (found && fabs(*result - expected) <= allowed) return 1;
        if (!extrapolated_difference(s, way, steps[k], &now)) continue;
        if (!found || fabs(now - expected) < fabs(*result - expected)) *result = now;
        found = 1;
    }
    return found;
}

static line coordinate(const variable *v, size_t i, double *base) {
    static const double along = 1.0;
    line way;
    *base = v->value[i];
    way.value = v->value + i;
    way.base = base;
    way.direction = &along;
    way.count = 1;
    return way;
}

static void note_error(subject *s, const variable *v, double error, double scale) {
    error = fabs(error) <= s->rounding ? 0.0 : isfinite(error) ? fabs(error) / scale : HUGE_VAL;
    if (error > s->worst) {
        s->worst = error;
        s->worst_name = v->name;
    }
}

/* A gradient that must be 0, and not nearly. */
static void check_untouched(subject *s, const variable *v) {
    size_t i;
    for (i = 0; i < v->count; i++, s->numbers++)
        if (!(v->gradient[i] <= 0.0 && v->gradient[i] >= 0.0)) {
            s->worst = HUGE_VAL;
            s->worst_name = v->name;
        }
}

static double largest_gradient(const variable *v) {
    double largest = 0.0;
    size_t i;
    for (i = 0; i < v->count; i++)
        if (!(fabs(v->gradient[i]) <= largest)) largest = fabs(v->gradient[i]);
    return largest;
}

/* Every number. */
static void check_variable(subject *s, const variable *v) {
    double *measured = (double *)grab(v->count, sizeof *measured), scale = 1e-8 + largest_gradient(v), base;
    unsigned char *found = (unsigned char *)grab(v->count, 1);
    size_t i;
    for (i = 0; i < v->count; i++) {
        line way = coordinate(v, i, &base);
        found[i] = (unsigned char)central_difference(s, &way, 1e-5, &measured[i]);
        if (found[i] && 1e-8 + fabs(measured[i]) > scale) scale = 1e-8 + fabs(measured[i]);
    }
    for (i = 0; i < v->count; i++) {
        line way = coordinate(v, i, &base);
        s->numbers++;
        if (!nearest_difference(s, &way, found[i], v->gradient[i], 0.1 * BOUND * scale, &measured[i])) s->skipped++;
        else note_error(s, v, measured[i] - v->gradient[i], scale);
    }
    free(measured);
    free(found);
}

/* One step along a random direction of all numbers, and some numbers by themselves. */
static void check_along(subject *s, const variable *v) {
    double *base = normals(v->count, 0.0), *direction = normals(v->count, 0.0);
    double expected = 0.0, size = 0.0;
    double measured = 0.0, one;
    line way;
    size_t i, k, at;
    memcpy(base, v->value, v->count * sizeof *base);
    for (i = 0; i < v->count; i++) {
        direction[i] = 2.0 * moe_rng_uniform(&rng) - 1.0;
        expected += direction[i] * v->gradient[i];
        size += v->gradient[i] * v->gradient[i];
    }
    way.value = v->value;
    way.base = base;
    way.direction = direction;
    way.count = v->count;
    size = sqrt(size);
    for (k = 0; k < 3 && v->count > 0; k++) { /* the direction, then two numbers */
        double scale;
        int found;
        at = (size_t)moe_rng_below(&rng, v->count);
        if (k > 0) {
            way = coordinate(v, at, &one);
            expected = v->gradient[at];
            size = largest_gradient(v);
        }
        found = central_difference(s, &way, 1e-5, &measured);
        scale = 1e-8 + (found && fabs(measured) > size ? fabs(measured) : size);
        s->numbers++;
        if (!nearest_difference(s, &way, found, expected, 0.1 * BOUND * scale, &measured)) s->skipped++;
        else note_error(s, v, measured - expected, scale);
    }
    free(base);
    free(direction);
}

/* How thoroughly a case is checked. */
enum { EVERY_NUMBER, ALONG };

/* Returns 0, without a verdict, when too much was skipped and another draw is allowed. */
static int check_subject_or_redraw(subject *s, const char *group, const char *name, int how, int redraw) {
    char why[NAME_ROOM];
    int i, measured;
    double start = s->evaluate(s->ctx);
    s->worst_name = "L itself";
    s->worst = isfinite(start) ? -1.0 : HUGE_VAL;
    s->rounding = 1e-10 * (1.0 + fabs(start));
    if (s->decisions != NULL) copy_notes(&s->first, s->decisions);
    for (i = 0; i < s->n_variables; i++)
        if (s->variables[i].untouched) check_untouched(s, &s->variables[i]);
        else if (how == ALONG || quick) check_along(s, &s->variables[i]);
        else check_variable(s, &s->variables[i]);
    free(s->first.bytes);
    measured = s->skipped * 10 <= s->numbers;
    if (redraw && !measured && s->worst <= BOUND) return 0;
    all_cases++;
    if (!measured && s->worst <= BOUND) {
        all_left_out++;
        printf("note: left out, a step always changes a decision: %s [%s]\n", group, name);
        return 1;
    }
    all_numbers += (double)s->numbers;
    all_skipped += (double)s->skipped;
    sprintf(why, "%.1e at %.60s, %lu numbers, %lu skipped", s->worst, s->worst_name, (unsigned long)s->numbers,
            (unsigned long)s->skipped);
    report(group, name, s->worst <= BOUND, why);
    return 1;
}

static void check_subject(subject *s, const char *group, const char *name) {
    (void)check_subject_or_redraw(s, group, name, EVERY_NUMBER, 0);
}

/* ---- stages of our own ---- */

/* score = custom: z_te = sum_q W_i tanh(u_tq) + u_ta u_tb / 5 with a = e mod d, b = e + 1 mod d,
   i = e d + q mod n. W is router.custom [n] where custom_parameters = n, else the test's own
   [E,d]. */
typedef struct own_stage {
    double *weight, *gradient; /* [E,d] */
} own_stage;

static size_t own_count(const moe_router *router) {
    const moe_router_config *r = &router->config;
    return r->custom_parameters > 0 ? (size_t)r->custom_parameters : (size_t)r->n_experts * (size_t)r->d_model;
}

static const double *own_weight(const own_stage *own, const moe_router *router) {
    return router->config.custom_parameters > 0 ? router->tensors[MOE_ROUTER_CUSTOM] : own->weight;
}

static moe_status own_score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                            moe_real *logits) {
    const own_stage *own = (const own_stage *)ctx;
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts, t, e, q;
    const size_t n = own_count(router);
    const double *weight = own_weight(own, router);
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++) {
            const double *row = u + t * d;
            double z = row[e % d] * row[(e + 1) % d] / 5.0;
            for (q = 0; q < d; q++) z += weight[(e * d + q) % n] * tanh(row[q]);
            logits[t * experts + e] = z;
        }
    return MOE_OK;
}

static moe_status own_score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                     const moe_real *d_logits, moe_real *d_u, moe_real *d_parameters) {
    own_stage *own = (own_stage *)ctx;
    size_t d = (size_t)router->config.d_model, experts = (size_t)router->config.n_experts, t, e, q;
    const size_t n = own_count(router);
    const double *weight = own_weight(own, router);
    double *gradient = router->config.custom_parameters > 0 ? d_parameters : own->gradient;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < experts; e++) {
            const double *row = u + t * d;
            double dz = d_logits[t * experts + e];
            d_u[t * d + e % d] += dz * row[(e + 1) % d] / 5.0;
            d_u[t * d + (e + 1) % d] += dz * row[e % d] / 5.0;
            for (q = 0; q < d; q++) {
                double th = tanh(row[q]);
                d_u[t * d + q] += dz * weight[(e * d + q) % n] * (1.0 - th * th);
                if (gradient != NULL) gradient[(e * d + q) % n] += dz * th;
            }
        }
    return MOE_OK;
}

/* select = custom: the experts with at least the token's mean logit, and the one with the largest
   p. */
static moe_status own_select(void *ctx, const moe_router *router, const moe_call *call, const moe_real *logits,
                             const moe_real *probabilities, unsigned char *chosen) {
    size_t experts = (size_t)router->config.n_experts, t, e;
    (void)ctx;
    for (t = 0; t < call->n_tokens; t++) {
        const double *z = logits + t * experts, *p = probabilities + t * experts;
        double mean = 0.0;
        size_t best = 0;
        for (e = 0; e < experts; e++) {
            mean += z[e] / (double)experts;
            if (p[e] > p[best]) best = e;
        }
        for (e = 0; e < experts; e++) chosen[t * experts + e] = z[e] >= mean || e == best;
    }
    return MOE_OK;
}

/* ---- layers ---- */

/* What of a call beside its configuration is tried. */
enum { WITH_MASK = 1, WITH_ROUTER_X = 2, WITH_SEQUENCES = 4, WITH_GIVEN = 8 };

typedef struct layer_case {
    moe_layer layer;
    const moe_layer *measured; /* whose L is differentiated: the layer, or twin */
    moe_layer twin;            /* the layer with constants in place of what backward takes for constant */
    moe_layer_pass pass;
    moe_call call, measured_call;
    double *x, *router_x, *dy, *y, *dx, *d_router_x;
    /* router_residual: the logits before, their gradient, coefficients in L of those it makes */
    double *previous_logits, *d_previous_logits, *on_logits;
    double *noise, *jitter, *previous_input, *previous_weights, *distances, *teacher; /* constants */
    /* weights, outputs, the summed output */
    double *attention[3], *d_attention[3];
    size_t attention_count[3];
    double *logits;        /* those of the start: what a student learns from */
    double *u;             /* that of the start: what a predictor reads */
    /* a loss that reads the experts one by one: its coefficients of outputs and weights; NULL: L
       reads y */
    double *on_entries[2];
    unsigned char *mask;
    int32_t sequences[4], *given, *token_ids, *previous_experts, *home, *expert_machine;
    own_stage own;
    moe_rng rng, rng_start;
    void *work;
    size_t work_size;
    notes decisions;
    char tensor_names[MOE_LAYER_PARAMETER_COUNT][MOE_NAME_SIZE];
    moe_status status;
} layer_case;

static int is_real(const layer_case *c, size_t t) { return c->call.mask == NULL || c->call.mask[t]; }

/* The step of the optimizer that all schedules here stand at. */
enum { STEP = 1 };

static int is_frozen(const moe_router_config *r) { return r->freeze_at > 0 && STEP >= r->freeze_at; }

/* ---- a layer's decisions and kinks ---- */

/* Who was chosen, in which order, and kept. */
static void note_choices(notes *n, const moe_routing *r) {
    size_t t, i, e;
    for (t = 0; t < r->n_tokens; t++) {
        note(n, (size_t)r->n_choices[t]);
        for (i = 0; i < (size_t)r->n_choices[t]; i++)
            note(n, 2 * (size_t)r->choices[t * r->max_choices + i] + r->kept[t * r->max_choices + i]);
    }
    for (e = 0; e <= r->n_experts; e++) note(n, r->plan.offsets[e]);
}

/* The arrays of a pass that only the router itself sees. */
static moei_scratch scratch_of(const layer_case *c) {
    moei_scratch m;
    moei_scratch_of(&c->layer.router, &c->pass.call, &c->pass.routing, &m);
    return m;
}

/* Whether an activation, or its slope, jumps at 0. */
static int bends(int act) { return act == MOE_ACT_RELU || act == MOE_ACT_RELU2; }

static int takes_act(int expert) { return expert == MOE_EXPERT_MLP || expert == MOE_EXPERT_GLU; }

/* The kinks of the scores. */
static void note_score(layer_case *c, notes *n) {
    const moe_router_config *r = &c->layer.config.router;
    const moe_routing *o = &c->pass.routing;
    const moei_scratch m = scratch_of(c);
    size_t tokens = o->n_tokens, experts = o->n_experts;
    size_t width = c->pass.call.activation_width, i, k;
    if ((r->score == MOE_SCORE_MLP || r->score == MOE_SCORE_ATTENTIVE) && bends(r->router_act))
        note_signs(n, m.hidden, tokens * (size_t)r->router_hidden);
    if (r->score == MOE_SCORE_DSELECT) {
        size_t bits = 1;
        while ((size_t)1 << bits < experts) bits++;
        for (i = 0; i < tokens * (size_t)r->top_k * bits; i++)
            note(n, (size_t)(m.hidden[i] > -0.5) + (size_t)(m.hidden[i] > 0.5));
    }
    if (r->score != MOE_SCORE_NORM || r->norm_order == MOE_NORM_L2) return;
    for (i = 0; i < tokens * experts; i++) {
        const double *v = c->pass.call.activations + i * width;
        size_t largest = 0;
        for (k = 0; k < width; k++)
            if (fabs(v[k]) > fabs(v[largest])) largest = k;
        if (r->norm_order == MOE_NORM_LINF) {
            note(n, largest);
            note_sign(n, v[largest]);
        } else note_signs(n, v, width);
    }
}

/* On which side of its limits each number lies; below: there is a lower one too. */
static void note_limits(notes *n, const double *v, size_t count, double limit, int below_too) {
    size_t i;
    for (i = 0; v != NULL && i < count; i++) note(n, v[i] > limit ? 1 : below_too && v[i] < -limit ? 2 : 3);
}

/* Where relu of mlp and glu experts bends, and swiglu with a limit. */
static void note_experts(layer_case *c, notes *n) {
    const moe_layer_config *l = &c->layer.config;
    const moe_dispatch_plan *plan = &c->pass.routing.plan;
    size_t width = (size_t)l->d_ff;
    size_t rows = plan->rows > 0 ? plan->rows * plan->n_experts : plan->offsets[plan->n_experts];
    int node;
    for (node = MOE_NODE_GATE; node <= MOE_NODE_UP && l->swiglu_limit > 0.0; node++) {
        note_limits(n, c->pass.all[node], plan->n_experts * plan->n_tokens * width, l->swiglu_limit,
                    node == MOE_NODE_UP);
        if (c->pass.all[node] == NULL || l->router.apply_to == MOE_APPLY_INPUT)
            note_limits(n, c->pass.node[node], rows * width, l->swiglu_limit, node == MOE_NODE_UP);
    }
    if (!takes_act(l->expert) || !bends(l->act)) return;
    if (c->pass.all[MOE_NODE_GATE] != NULL)
        note_signs(n, c->pass.all[MOE_NODE_GATE], plan->n_experts * plan->n_tokens * width);
    if (c->pass.all[MOE_NODE_GATE] == NULL || l->router.apply_to == MOE_APPLY_INPUT)
        note_signs(n, c->pass.node[MOE_NODE_GATE], rows * width);
}

static double entropy_of(const double *p, size_t n) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < n; i++)
        if (p[i] > 0.0) sum -= p[i] * log(p[i]);
    return sum;
}

/* Which head is the best of each sequence, and which tokens are surer than which. */
static void note_refinement(layer_case *c, notes *n) {
    const moe_router_config *r = &c->layer.config.router;
    const moe_routing *o = &c->pass.routing;
    size_t tokens = o->n_tokens, i, t, u, h;
    for (t = 0; t < tokens && r->lower_entropy_only; t++)
        for (u = 0; u < tokens; u++)
            if (is_real(c, t) && is_real(c, u))
                note(n, entropy_of(o->gate + t * o->n_experts, o->n_experts) >=
                            entropy_of(o->gate + u * o->n_experts, o->n_experts));
    if (r->refine != MOE_REFINE_ATTENTION || r->attention_heads != MOE_HEADS_MIN_ENTROPY) return;
    for (i = 0; i < (c->call.sequences != NULL ? 3 : 1); i++) {
        size_t from = c->call.sequences != NULL ? (size_t)c->sequences[i] : 0,
               to = c->call.sequences != NULL ? (size_t)c->sequences[i + 1] : tokens;
        size_t best = 0;
        double least = HUGE_VAL;
        for (h = 0; h < (size_t)r->heads; h++) {
            double sum = 0.0;
            for (t = from; t < to; t++)
                if (is_real(c, t)) sum += entropy_of(c->attention[0] + (h * tokens + t) * tokens, tokens);
            if (sum < least) {
                least = sum;
                best = h;
            }
        }
        note(n, best);
    }
}

/* Gates and losses bend where a logit or a gate value crosses 0, and where a mean of gate values
   does. */
static void note_gates(layer_case *c, notes *n) {
    const moe_router_config *r = &c->layer.config.router;
    const moe_routing *o = &c->pass.routing;
    const moei_scratch m = scratch_of(c);
    size_t experts = o->n_experts, t, e, k;
    for (t = 0; t < o->n_tokens; t++) {
        if (!is_real(c, t)) continue;
        if (r->gate == MOE_GATE_RELU) note_signs(n, o->logits + t * experts, experts);
        if (r->gate == MOE_GATE_RELU && r->noise != MOE_NOISE_NONE)
            note_signs(n, m.clean_logits + t * experts, experts);
        if (r->gate == MOE_GATE_IDENTITY) note_signs(n, o->probabilities + t * experts, experts);
        if (r->loss_load > 0.0 && o->top_k < r->n_experts) {
            int32_t best[64];
            size_t found = moe_top_k(experts, o->logits + t * experts, (size_t)o->top_k + 1, best);
            for (k = 0; k < found; k++) note(n, (size_t)best[k]);
        }
    }
    for (e = 0; e < experts && r->gate == MOE_GATE_IDENTITY; e++) {
        double mean = 0.0, on_node[2] = {0.0, 0.0};
        for (t = 0; t < o->n_tokens; t++) {
            if (!is_real(c, t)) continue;
            mean += o->probabilities[t * experts + e];
            for (k = 0; k < experts && c->expert_machine != NULL; k++)
                if (c->expert_machine[k] == c->expert_machine[e])
                    on_node[c->home[t]] += o->probabilities[t * experts + k];
        }
        note_sign(n, mean);
        note_signs(n, on_node, 2);
    }
}

/* sparsemixer: who stands within 2 eps of each pick. */
static void note_rivals(layer_case *c, notes *n) {
    const moe_routing *o = &c->pass.routing;
    size_t t, i, e, j;
    for (t = 0; t < o->n_tokens; t++)
        for (i = 0; i < (size_t)o->n_choices[t]; i++) {
            const double *z = o->logits + t * o->n_experts;
            const int32_t *choice = o->choices + t * o->max_choices;
            double best = z[choice[i]];
            for (e = 0; e < o->n_experts; e++) {
                double size = fabs(z[e]) > best ? fabs(z[e]) : best;
                for (j = 0; j < i && (size_t)choice[j] != e;) j++;
                note(n, j == i && best - z[e] <= 2.0 * c->layer.config.router.sparsemixer_eps * size);
            }
        }
}

static void note_layer(layer_case *c) {
    notes *n = &c->decisions;
    n->count = 0;
    note_experts(c, n);
    if (c->layer.config.router.select == MOE_SELECT_SOFT) return;
    note_choices(n, &c->pass.routing);
    note_score(c, n);
    note_gates(c, n);
    note_refinement(c, n);
    if (c->layer.config.router.weight == MOE_WEIGHT_SPARSEMIXER) note_rivals(c, n);
}

/* ---- L of a layer ---- */

/* The logit of a student or predictor; what a predictor reads is a constant for it. */
static double student_logit(const layer_case *c, size_t t, size_t e) {
    const moe_router_config *r = &c->layer.config.router;
    const size_t width = (size_t)(r->student_dim > 0 ? r->student_dim : r->d_model);
    const double *in = (r->predictor ? c->u : c->pass.routing.u) + t * (size_t)r->d_model;
    const double *row = c->layer.tensors[r->predictor          ? MOE_ROUTER_PREDICTOR
                                         : r->compete_rate > 0 ? MOE_ROUTER_WEIGHT
                                                               : MOE_ROUTER_STUDENT];
    double v = r->compete_rate > 0 && r->router_bias ? c->layer.tensors[MOE_ROUTER_BIAS][e] : 0.0;
    size_t q;
    if (r->student_dim > 0) {
        in = c->layer.tensors[MOE_ROUTER_STUDENT_EMBEDDING] + (size_t)c->token_ids[t] * width;
        row = c->layer.tensors[MOE_ROUTER_STUDENT_WEIGHT];
    }
    for (q = 0; q < width; q++) v += row[e * width + q] * in[q];
    return v;
}

/* The predictor's cross-entropy to the choices. */
static double surprise_from_start(const layer_case *c) {
    const moe_routing *r = &c->pass.routing;
    double sum = 0.0;
    size_t t, e, i, real = 0;
    for (t = 0; t < c->call.n_tokens; t++) {
        if (!is_real(c, t)) continue;
        real++;
        for (e = 0; e < r->n_experts; e++) {
            double v = student_logit(c, t, e);
            int chosen = 0;
            for (i = 0; i < (size_t)r->n_choices[t]; i++) chosen |= r->choices[t * r->max_choices + i] == (int32_t)e;
            sum += log1p(exp(chosen ? -v : v));
        }
    }
    return real > 0 ? c->layer.config.router.loss_predictor * sum / (double)real : 0.0;
}

/* Whether the logits of this router teach another one, or its own linear score: experts that
   compete do. */
static int teaches(const layer_case *c) {
    const moe_router_config *r = &c->layer.config.router;
    return !is_frozen(r) && (r->student || (r->compete_rate > 0 && c->pass.call.activation_width > 0));
}

/* The distance of a student from the teacher at the start, which is a constant for it: L must not
   see it move. */
static double distance_from_start(const layer_case *c) {
    const moe_router_config *r = &c->layer.config.router;
    size_t experts = (size_t)r->n_experts, t, e;
    size_t real = 0, best;
    double sum = 0.0, v[64], own, theirs;
    for (t = 0; t < c->call.n_tokens; t++) {
        const double *teacher = c->logits + t * experts;
        double part = 0.0;
        if (!is_real(c, t)) continue;
        real++;
        for (e = 0, best = 0; e < experts; e++) {
            v[e] = student_logit(c, t, e);
            if (teacher[e] > teacher[best]) best = e;
        }
        own = moe_log_sum_exp(experts, v);
        theirs = moe_log_sum_exp(experts, teacher);
        for (e = 0; e < experts; e++) {
            double p = exp(teacher[e] - theirs), ln_q = v[e] - own;
            if (r->distill == MOE_DISTILL_MSE) part += (exp(ln_q) - p) * (exp(ln_q) - p) / (double)experts;
            else if (r->distill == MOE_DISTILL_CE_SOFT) part -= p * ln_q;
            else part -= e == best ? ln_q : 0.0;
        }
        sum += part;
    }
    return real > 0 ? r->loss_distill * sum / (double)real : 0.0;
}

/* sum over entries of w |o|^2 / 2 + w a . o + b w; d_outputs and d_weights (NULL: not wanted)
   receive its gradients. */
static double loss_of_entries(const layer_case *c, double *d_outputs, double *d_weights) {
    const moe_dispatch_plan *plan = &c->pass.routing.plan;
    const double *output = c->pass.expert_outputs, *a = c->on_entries[0];
    const double *b = c->on_entries[1];
    size_t o = (size_t)c->layer.config.d_out, i, k;
    double sum = 0.0;
    for (i = 0; i < plan->offsets[plan->n_experts]; i++) {
        double w = plan->assignments[i].weight_out, inner = b[i];
        for (k = 0; k < o; k++) {
            double v = output[i * o + k];
            inner += v * v / 2.0 + a[i * o + k] * v;
            if (d_outputs != NULL) d_outputs[i * o + k] = w * (v + a[i * o + k]);
        }
        if (d_weights != NULL) d_weights[i] = inner;
        sum += w * inner;
    }
    return sum;
}

static double evaluate_layer(void *ctx) {
    layer_case *c = (layer_case *)ctx;
    const moe_router_config *r = &c->layer.config.router;
    size_t i;
    int loss;
    double sum = 0.0;
    c->rng = c->rng_start; /* the same draws each time */
    c->status = moe_layer_forward(c->measured, &c->measured_call, c->y, c->work, c->work_size, &c->pass);
    if (c->status != MOE_OK) return HUGE_VAL;
    if (c->on_entries[0] != NULL) sum = loss_of_entries(c, NULL, NULL);
    else
        for (i = 0; i < c->call.n_tokens * (size_t)c->layer.config.d_out; i++) sum += c->y[i] * c->dy[i];
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++)
        sum += loss == MOE_LOSS_DISTILL && teaches(c) && c->logits != NULL ? distance_from_start(c)
               : loss == MOE_LOSS_PREDICTOR && !is_frozen(r) && c->u != NULL ? surprise_from_start(c)
                                                                           : c->pass.routing.loss[loss];
    for (i = 0; c->on_logits != NULL && i < c->call.n_tokens * (size_t)r->n_experts; i++)
        if (is_real(c, i / (size_t)r->n_experts)) sum += c->on_logits[i] * c->pass.routing.clean_logits[i];
    note_layer(c);
    return sum;
}

/* ---- a layer and its call ---- */

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
    for (i = 0; i < n * k; i++)
        if (i + 1 == n * k ? i > 0 : chance(15)) given[i] = -1;
    return given;
}

/* Biases and gains start at one value; random ones test more. State and tables have values of their
   own. */
static void draw_tensor(const moe_layer *layer, const moe_tensor *t) {
    const moe_router_config *r = &layer->config.router;
    size_t width = (size_t)r->top_k, k;
    for (k = 0; k < t->count; k++) {
        double *v = t->data + k;
        if (strcmp(t->name, "router.temperature") == 0) *v = 0.7;
        else if (strcmp(t->name, "router.table") == 0) *v = (double)((k / width + k % width) % (size_t)r->n_experts);
        else if (strcmp(t->name, "router.ac_running") == 0) *v = 0.5 + moe_rng_uniform(&rng);
        else if (strcmp(t->name, "router.step") == 0) *v = (double)STEP;
        else if (strcmp(t->name, "router.l1") == 0) *v = 0.3;
        else if (strcmp(t->name, "router.load") == 0) *v = (double)k;
        else if (strcmp(t->name, "router.capacity") == 0) *v = (double)below(4);
        /* far from p, where its surrogate is flat */
        else if (strcmp(t->name, "router.threshold") == 0) *v = k % 2 ? 30.0 : -30.0;
        else if (strcmp(t->name, "router.codes") == 0) *v = 0.12 * moe_rng_normal(&rng);
        else if (t->flags & (MOE_PARAM_NO_DECAY | MOE_PARAM_STATE) || t->n_dims == 1) *v += 0.4 * moe_rng_normal(&rng);
        else if (strcmp(t->name, "router.noise_weight") == 0 || strcmp(t->name, "router.similarity") == 0)
            *v += 0.3 * moe_rng_normal(&rng);
    }
}

/* |v| is small beside what it is the sum of: a denominator in which nothing is left. */
static int cancels(double v, double size) { return fabs(v) > 0.0 && fabs(v) < 0.1 * size; }

/* Whether two tokens score every expert alike, as those do for which a router's hidden units are
   all 0: rounding decides which of them goes where when all tokens are assigned together. */
static int has_twins(const layer_case *c) {
    const moe_routing *r = &c->pass.routing;
    size_t t, u;
    for (t = 0; t < r->n_tokens; t++)
        for (u = 0; u < t; u++)
            if (is_real(c, t) && is_real(c, u) &&
                memcmp(r->logits + t * r->n_experts, r->logits + u * r->n_experts,
                       r->n_experts * sizeof *r->logits) == 0)
                return 1;
    return 0;
}

/* Sums that stand in a denominator must not be nearly 0, or no finite step measures a slope. */
static int is_well_placed(layer_case *c) {
    const moe_routing *r = &c->pass.routing;
    const moe_router_config *config = &c->layer.config.router;
    const moei_scratch m = scratch_of(c);
    double importance = 0.0, importance_size = 0.0;
    size_t t, e, i;
    if (config->select == MOE_SELECT_BALANCED && has_twins(c)) return 0;
    if ((config->gate != MOE_GATE_IDENTITY && config->gate != MOE_GATE_RELU) || config->select == MOE_SELECT_SOFT)
        return 1;
    for (t = 0; t < r->n_tokens; t++) {
        double sum = 0.0, all = 0.0;
        double surviving = 0.0, sum_size = 0.0;
        double all_size = 0.0, surviving_size = 0.0;
        const double *p = r->probabilities + t * r->n_experts;
        if (!is_real(c, t)) continue;
        for (e = 0; e < r->n_experts; e++) {
            all += p[e];
            all_size += fabs(p[e]);
        }
        for (i = 0; i < (size_t)r->n_choices[t]; i++) {
            double w = r->choice_weights[t * r->max_choices + i];
            e = (size_t)r->choices[t * r->max_choices + i];
            sum += p[e];
            sum_size += fabs(p[e]);
            if (r->selected[t * r->n_experts + e]) {
                surviving += w;
                surviving_size += fabs(w);
            }
            if (config->importance_over == MOE_IMPORTANCE_WEIGHTS) {
                importance += w;
                importance_size += fabs(w);
            }
        }
        for (e = 0; e < r->n_experts && config->importance_over != MOE_IMPORTANCE_WEIGHTS; e++) {
            double v = config->importance_over == MOE_IMPORTANCE_PROBABILITIES ? p[e]
                       : config->noise != MOE_NOISE_NONE                       ? m.clean_gate[t * r->n_experts + e]
                                                                               : r->gate[t * r->n_experts + e];
            importance += v;
            importance_size += fabs(v);
        }
        if ((config->weight == MOE_WEIGHT_SUM || config->weight == MOE_WEIGHT_P_NORM) && cancels(sum, sum_size))
            return 0;
        if (config->renormalize == MOE_RENORMALIZE_AFTER && cancels(surviving, surviving_size)) return 0;
        if (config->loss_balance > 0.0 && cancels(all, all_size)) return 0;
    }
    return !(config->loss_importance > 0.0) || !cancels(importance, importance_size);
}

static int32_t *draw_integers(size_t n, int limit) {
    int32_t *v = (int32_t *)grab(n, sizeof *v);
    size_t i;
    for (i = 0; i < n; i++) v[i] = (int32_t)moe_rng_below(&rng, (uint64_t)limit);
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

static void supply_attention(layer_case *c) {
    const moe_router_config *r = &c->layer.config.router;
    size_t n = c->call.n_tokens, d = (size_t)r->d_model;
    size_t heads = (size_t)r->heads, i;
    c->attention_count[0] = heads * n * n;
    c->attention_count[1] = heads * n * d;
    c->attention_count[2] = n * d;
    c->attention[0] = draw_attention(&c->call, heads);
    c->attention[1] = normals(heads * n * d, 0.7);
    c->attention[2] = normals(n * d, 0.7);
    for (i = 0; i < 3; i++) c->d_attention[i] = normals(c->attention_count[i], 0.0);
    c->call.attention_weights = c->attention[0];
    c->call.attention_outputs = c->attention[1];
    c->call.attention_output = c->attention[2];
    c->call.d_attention_weights = c->d_attention[0];
    c->call.d_attention_outputs = c->d_attention[1];
    c->call.d_attention_output = c->d_attention[2];
}

/* What stages beyond x ask of a call. Noise and jitter are supplied or drawn, by turns. */
static void supply(layer_case *c, int with) {
    const moe_router_config *r = &c->layer.config.router;
    size_t n = c->call.n_tokens, d = (size_t)r->d_model;
    size_t experts = (size_t)r->n_experts, i;
    moe_rng_seed(&c->rng_start, moe_rng_next(&rng));
    c->call.rng = &c->rng;
    c->own.weight = normals(experts * d, 0.5);
    c->own.gradient = normals(experts * d, 0.0);
    c->layer.router.custom.ctx = &c->own;
    c->layer.router.custom.score = own_score;
    c->layer.router.custom.score_backward = own_score_backward;
    c->layer.router.custom.select = own_select;
    c->layer.router.custom.n_parameters = (size_t)r->custom_parameters;
    if (r->select == MOE_SELECT_GIVEN || (r->switch_at > 0 && r->switch_from == MOE_SELECT_GIVEN) || with & WITH_GIVEN)
        c->call.given = c->given = draw_given(n, most_choices(r), experts);
    if (r->table_size > 0) c->call.token_ids = c->token_ids = draw_integers(n, r->table_size);
    if (r->noise != MOE_NOISE_NONE && chance(50)) c->call.noise = c->noise = normals(n * experts, 0.5);
    if (r->input == MOE_INPUT_JITTER && chance(50)) {
        c->call.jitter = c->jitter = normals(n * d, 0.1);
        for (i = 0; i < n * d; i++) c->jitter[i] += 1.0;
    }
    if (r->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        c->call.n_previous = experts < 2 ? 1 : 2;
        c->call.previous_experts = c->previous_experts = draw_given(n, c->call.n_previous, experts);
        c->call.previous_input = c->previous_input = normals(n * d, 1.0);
        c->call.previous_weights = c->previous_weights = normals(n * 2, 1.0);
        for (i = 0; i < n * 2; i++) c->previous_weights[i] = 0.1 + fabs(c->previous_weights[i]);
    }
    if (r->router_residual) {
        c->call.previous_logits = c->previous_logits = normals(n * experts, 1.0);
        c->call.d_previous_logits = c->d_previous_logits = normals(n * experts, 0.0);
        c->call.d_clean_logits = c->on_logits = normals(n * experts, 0.5);
    }
    if (r->refine == MOE_REFINE_ATTENTION) supply_attention(c);
    if (r->loss_distill > 0.0 && !r->student && !(r->compete_rate > 0.0))
        c->call.teacher = c->teacher = normals(n * experts, 1.0);
    if (r->loss_similarity_same > 0.0 ||
        r->loss_similarity_diff > 0.0) { /* distances of x are constants too, but differences would see them change */
        c->call.distances = c->distances = normals(n * n, 1.0);
        for (i = 0; i < n * n; i++) c->distances[i] = fabs(c->distances[i]);
    }
    if (r->loss_locality > 0.0) {
        c->call.token_machine = c->home = draw_integers(n, r->nodes);
        c->call.expert_machine = c->expert_machine = draw_integers(experts, r->nodes);
        /* no node without experts, while there are enough */
        for (i = 0; i < (size_t)r->nodes && i < experts; i++) c->expert_machine[i] = (int32_t)i;
    }
}

static void supply_call(layer_case *c, size_t n, int with) {
    size_t d = (size_t)c->layer.config.router.d_model, i;
    c->call.n_tokens = n;
    c->call.training = 1;
    c->call.x = c->x = normals(n * d, 1.0);
    if (with & WITH_ROUTER_X) c->call.router_x = c->router_x = normals(n * d, 1.0);
    if (with & WITH_MASK) {
        c->call.mask = c->mask = (unsigned char *)grab(n, 1);
        for (i = 0; i < n; i++) c->mask[i] = i % 3 != 1;
    }
    if (with & WITH_SEQUENCES) {
        /* the second is empty */
        c->sequences[1] = (int32_t)(n / 4);
        c->sequences[2] = (int32_t)(n / 4);
        c->sequences[3] = (int32_t)n;
        c->call.sequences = c->sequences;
        c->call.n_sequences = 3;
    }
    supply(c, with);
}

static int start_layer(layer_case *c, const moe_layer_config *config, size_t n, int with, moe_error *error) {
    moe_layer_config fitted = *config;
    moe_tensor t;
    size_t d, o, i;
    int tries;
    memset(c, 0, sizeof *c);
    if (fitted.router.select == MOE_SELECT_SOFT) fitted.router.soft_sequences = 3;
    c->status = moe_layer_create(&c->layer, &fitted, 1, moe_rng_next(&rng), NULL, error);
    if (c->status != MOE_OK) return 0;
    for (i = 0; moe_layer_tensor(&c->layer, i, &t) == MOE_OK; i++) draw_tensor(&c->layer, &t);
    supply_call(c, n, with);
    c->measured = &c->layer;
    c->measured_call = c->call;
    d = (size_t)c->layer.config.router.d_model;
    o = (size_t)c->layer.config.d_out;
    c->dy = normals(n * o, 0.5);
    c->y = normals(n * o, 0.0);
    c->dx = normals(n * d, 0.0);
    c->d_router_x = normals(n * d, 0.0);
    c->status = moe_layer_work_size(&c->layer, n, 1, &c->work_size);
    if (c->status != MOE_OK) return 0;
    c->work = grab(c->work_size, 1);
    memset(c->work, 0x55, c->work_size); /* numbers of an earlier call */
    for (tries = 0; tries < 100; tries++) {
        evaluate_layer(c);
        if (c->status != MOE_OK) return 0;
        if (is_well_placed(c)) return 1;
        for (i = 0; i < n * d; i++) c->x[i] = moe_rng_normal(&rng);
        for (i = 0; i < n * d && c->router_x != NULL; i++) c->router_x[i] = moe_rng_normal(&rng);
    }
    c->status = MOE_ERR_STOPPED; /* these parameters leave no room: draw others */
    return 0;
}

static void end_layer(layer_case *c) {
    int i;
    free(c->x);
    free(c->router_x);
    free(c->dy);
    free(c->y);
    free(c->dx);
    free(c->d_router_x);
    free(c->decisions.bytes);
    free(c->given);
    free(c->noise);
    free(c->jitter);
    free(c->previous_input);
    free(c->previous_weights);
    free(c->previous_logits);
    free(c->d_previous_logits);
    free(c->on_logits);
    free(c->distances);
    free(c->token_ids);
    free(c->previous_experts);
    free(c->home);
    free(c->expert_machine);
    free(c->teacher);
    free(c->logits);
    free(c->u);
    free(c->mask);
    free(c->work);
    free(c->own.weight);
    free(c->own.gradient);
    free(c->on_entries[0]);
    free(c->on_entries[1]);
    for (i = 0; i < 3; i++) {
        free(c->attention[i]);
        free(c->d_attention[i]);
    }
    moe_layer_free(&c->layer);
}

static void shift(double *v, size_t count, double by) {
    size_t i;
    for (i = 0; i < count && v != NULL; i++) v[i] += by;
}

/* A backward pass adds to the gradients: they hold START before it, which is taken off again. */
#define START 0.25

static void shift_gradients(layer_case *c, double by) {
    size_t count = c->call.n_tokens * (size_t)c->layer.config.router.d_model, i;
    moe_tensor t;
    for (i = 0; moe_layer_tensor(&c->layer, i, &t) == MOE_OK; i++) shift(t.gradient, t.count, by);
    shift(c->dx, count, by);
    shift(c->d_router_x, count, by);
    shift(c->d_previous_logits, c->call.n_tokens * (size_t)c->layer.config.router.n_experts, by);
    for (i = 0; i < 3; i++) shift(c->d_attention[i], c->attention_count[i], by);
}

/* The pass of the start is there: its gradients, and what L holds constant from now on. */
static void layer_backward(layer_case *c) {
    const moe_router_config *r = &c->layer.config.router;
    size_t count = c->call.n_tokens * (size_t)r->n_experts, entries = c->pass.routing.plan.offsets[r->n_experts];
    double *d_router_x = c->router_x != NULL ? c->d_router_x : NULL;
    shift_gradients(c, START);
    if (c->on_entries[0] != NULL) {
        double *d_outputs = normals(entries * (size_t)c->layer.config.d_out, 0.0), *d_weights = normals(entries, 0.0);
        (void)loss_of_entries(c, d_outputs, d_weights);
        c->status = moe_layer_backward_experts(&c->layer, d_outputs, d_weights, c->dx, d_router_x, &c->pass);
        free(d_outputs);
        free(d_weights);
    } else c->status = moe_layer_backward(&c->layer, c->dy, c->dx, d_router_x, &c->pass);
    shift_gradients(c, -START);
    if (r->predictor) {
        free(c->u);
        c->u = normals(c->call.n_tokens * (size_t)r->d_model, 0.0);
        memcpy(c->u, c->pass.routing.u, c->call.n_tokens * (size_t)r->d_model * sizeof(double));
        if (!is_frozen(r) && !(fabs(surprise_from_start(c) - c->pass.routing.loss[MOE_LOSS_PREDICTOR]) < 1e-12))
            c->status = MOE_ERR_NONFINITE;
    }
    if (!teaches(c)) return;
    free(c->logits);
    c->logits = normals(count, 0.0);
    memcpy(c->logits, c->pass.routing.logits, count * sizeof(double));
    if (!(fabs(distance_from_start(c) - c->pass.routing.loss[MOE_LOSS_DISTILL]) < 1e-12))
        c->status = MOE_ERR_NONFINITE;
}

/* ac_mode = code makes m of this layer's x and takes it for a constant: twin has the factors of the
   start as jitter. */
static void hold_clusters(layer_case *c) {
    const double *x = c->router_x != NULL ? c->router_x : c->x;
    moe_layer_config config = c->layer.config;
    size_t count = c->call.n_tokens * (size_t)config.router.d_model, i;
    if (config.router.input != MOE_INPUT_ADAPTIVE_CLUSTERING || config.router.ac_mode != MOE_AC_CODE) return;
    c->jitter = normals(count, 0.0);
    for (i = 0; i < count; i++) c->jitter[i] = c->pass.routing.u[i] / x[i];
    config.router.input = MOE_INPUT_JITTER;
    config.router.ac_mode = config.router.ac_spread = config.router.ac_mix = 0;
    config.router.ac_lambda = 0.0;
    c->status = moe_layer_init(&c->twin, &config, NULL);
    memcpy(c->twin.tensors, c->layer.tensors, sizeof c->twin.tensors);
    c->twin.router.custom = c->layer.router.custom;
    c->measured = &c->twin;
    c->measured_call.jitter = c->jitter;
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
        if (plain[k] != NULL || strcmp(value, "0") == 0 ||
            (f->kind == MOE_FIELD_CHOICE && strcmp(value, f->choices[0]) == 0))
            continue;
        if (at + strlen(f->name) + strlen(value) + 2 >= NAME_ROOM - 100) break;
        at += (size_t)sprintf(text + at, "%s=%s ", f->name, value);
    }
    sprintf(text + at, "%s%s%s%s", with & WITH_MASK ? "mask " : "", with & WITH_ROUTER_X ? "router_x " : "",
            with & WITH_SEQUENCES ? "sequences " : "", with & WITH_GIVEN ? "given " : "");
}

/* Whether nothing may reach a tensor: it is frozen, or state, or the whole router is past
   freeze_at. */
static int is_untouched(const layer_case *c, const moe_tensor *t) {
    const moe_router_config *r = &c->layer.config.router;
    return (t->flags & (MOE_PARAM_FROZEN | MOE_PARAM_STATE)) != 0 ||
           (is_frozen(r) && !r->student && strncmp(t->name, "router.", 7) == 0);
}

static void add_layer_variables(layer_case *c, subject *s) {
    static const char *const attention_names[3] = {"attention weights", "attention outputs", "attention output"};
    const moe_router_config *r = &c->layer.config.router;
    size_t count = c->call.n_tokens * (size_t)r->d_model, i;
    moe_tensor t;
    for (i = 0; moe_layer_tensor(&c->layer, i, &t) == MOE_OK; i++) {
        memcpy(c->tensor_names[i], t.name, MOE_NAME_SIZE);
        add_variable(s, c->tensor_names[i], t.data, t.gradient, t.count);
        s->variables[s->n_variables - 1].untouched = is_untouched(c, &t);
    }
    add_variable(s, "x", c->x, c->dx, count);
    if (c->router_x != NULL) add_variable(s, "router_x", c->router_x, c->d_router_x, count);
    if (c->previous_logits != NULL)
        add_variable(s, "previous logits", c->previous_logits, c->d_previous_logits,
                     c->call.n_tokens * (size_t)r->n_experts);
    for (i = 0; i < 3 && c->attention[0] != NULL; i++)
        add_variable(s, attention_names[i], c->attention[i], c->d_attention[i], c->attention_count[i]);
    if (r->score == MOE_SCORE_CUSTOM && r->custom_parameters == 0)
        add_variable(s, "custom score", c->own.weight, c->own.gradient, (size_t)r->n_experts * (size_t)r->d_model);
}

/* What a case is beyond its configuration. */
typedef struct manner {
    const char *group;
    size_t n;
    int with, how, by_experts; /* by_experts: L reads the experts' outputs one by one */
} manner;

static int check_drawn_layer(const manner *m, const moe_layer_config *config, int redraw) {
    layer_case c;
    subject s;
    moe_error error;
    char name[NAME_ROOM];
    int tries, done = 1;
    describe(config, m->with, name);
    error.message[0] = '\0';
    for (tries = 0; !start_layer(&c, config, m->n, m->with, &error) && c.status == MOE_ERR_STOPPED && tries < 20;
         tries++)
        end_layer(&c);
    if (c.status == MOE_OK && m->by_experts) {
        size_t entries = m->n * (size_t)c.layer.config.router.n_experts;
        c.on_entries[0] = normals(entries * (size_t)c.layer.config.d_out, 0.5);
        c.on_entries[1] = normals(entries, 0.5);
    }
    memset(&s, 0, sizeof s);
    s.evaluate = evaluate_layer;
    s.ctx = &c;
    s.decisions = &c.decisions;
    if (c.status == MOE_OK) layer_backward(&c);
    if (c.status == MOE_OK) hold_clusters(&c);
    if (c.status == MOE_OK) {
        add_layer_variables(&c, &s);
        cases_with_drops += c.pass.routing.n_dropped > 0;
        done = check_subject_or_redraw(&s, m->group, name, m->how, redraw);
    } else report(m->group, name, 0, error.message[0] != '\0' ? error.message : moe_status_text(c.status));
    end_layer(&c);
    return done;
}

static void check_manner(const manner *m, const moe_layer_config *config) {
    int tries;
    for (tries = 0; !check_drawn_layer(m, config, tries < 5); tries++) {
    }
}

static void check_layer(const char *group, const moe_layer_config *config, size_t n, int with) {
    manner m;
    m.group = group;
    m.n = n;
    m.with = with;
    m.how = EVERY_NUMBER;
    m.by_experts = 0;
    check_manner(&m, config);
}

/* A small layer: 3 experts, 2 per token, linear experts so that the router stands out. */
static moe_layer_config small_layer(void) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.preset = MOEI_OF_A_FILE; /* what has no effect is reset */
    c.router.d_model = 6;
    c.router.n_experts = 3;
    c.router.top_k = 2;
    c.router.untrained = 1;
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

static int check_accepted_along(const char *group, const moe_layer_config *config, size_t n, int with) {
    manner m;
    if (moe_layer_check(config, NULL, NULL) != MOE_OK) return 0;
    m.group = group;
    m.n = n;
    m.with = with;
    m.how = ALONG;
    m.by_experts = 0;
    check_manner(&m, config);
    return 1;
}

static void check_experts(void) {
    moe_layer_config c;
    int expert, act, no_bias, apply, out, shared, sigmoid, accepted = 0;
    for (expert = 0; expert < MOE_EXPERT_COUNT; expert++)
        for (act = 0; act < MOE_ACT_COUNT; act++)
            for (no_bias = 0; no_bias < 2; no_bias++)
                for (apply = 0; apply < MOE_APPLY_COUNT; apply++)
                    for (out = 0; out < 2; out++) {
                        c = small_layer();
                        c.expert = expert;
                        c.act = act;
                        c.no_expert_bias = no_bias;
                        c.router.apply_to = apply;
                        c.d_out = out ? 3 : 0;
                        accepted += check_accepted("experts", &c, 6, 0);
                    }
    for (expert = 0; expert < MOE_EXPERT_COUNT; expert++)
        for (shared = 1; shared < 4; shared++)
            for (sigmoid = 0; sigmoid < 2; sigmoid++)
                for (out = 0; out < 2; out++) {
                    c = small_layer();
                    c.expert = expert;
                    c.n_shared = shared;
                    c.d_shared = shared == 3 ? 0 : 2;
                    c.shared_sigmoid = sigmoid;
                    c.d_out = out ? 7 : 0;
                    check_layer("shared", &c, 5, out ? WITH_MASK : 0);
                }
    report("experts", "many are accepted", accepted > 100, "");
}

/* Experts of a width of their own, plain, weighted on the input, soft, and read by scores. */
static void check_latent(void) {
    static const char *const rows[] = {"", "apply_to=input gate=sigmoid weight=raw", "select=soft slots=2",
                                       "score=norm norm_node=output weight=raw", "score=competition gate=identity",
                                       "n_shared=1 d_shared=2 add_input=1 weight=raw"};
    size_t row;
    int expert, width;
    for (row = 0; row < sizeof rows / sizeof rows[0]; row++)
        for (expert = 0; expert < MOE_EXPERT_COUNT; expert++)
            for (width = 1; width < 7; width += 2) {
                moe_layer_config c = small_layer();
                c.expert = expert;
                c.d_latent = width;
                if (width == 5) c.d_out = row == 5 ? 0 : 3;
                report("latent", "accepted",
                       moe_fields_apply(moe_layer_fields(), &c, rows[row], NULL) == MOE_OK &&
                           check_accepted("latent", &c, 5, width == 3 ? WITH_MASK : 0),
                       rows[row]);
            }
}

/* Swiglu experts with biases and shaped gates, also behind scores that read each of their
   activations. */
static void check_shaped(void) {
    int which, node, apply;
    for (which = 0; which < 16; which++)
        for (node = -1; node < MOE_NODE_COUNT; node++)
            for (apply = 0; apply < MOE_APPLY_COUNT; apply++) {
                moe_layer_config c = small_layer();
                c.expert = MOE_EXPERT_SWIGLU;
                c.router.apply_to = apply;
                c.expert_bias = which & 1;
                c.swiglu_alpha = which & 2 ? 1.702 : 0.0;
                c.swiglu_limit = which & 4 ? 0.5 : 0.0;
                c.swiglu_offset = which & 8 ? 1.0 : 0.0;
                if (node >= 0) {
                    c.router.score = MOE_SCORE_NORM;
                    c.router.norm_node = node;
                    c.router.weight = MOE_WEIGHT_RAW;
                }
                c.d_out = node == MOE_NODE_ACT ? 3 : 0;
                c.n_shared = node == MOE_NODE_UP;
                c.d_shared = c.n_shared * 2;
                if (which == 15) c.d_ff = 70; /* more columns than pass together */
                if (!check_accepted("shaped", &c, 5, which % 3 == 0 ? WITH_MASK : 0))
                    report("shaped", "accepted", node == MOE_NODE_LOW, "");
            }
}

static void check_norms(void) {
    int expert, node, order, apply, act, gate, refused = 0, accepted = 0;
    for (expert = 0; expert < MOE_EXPERT_COUNT; expert++)
        for (node = 0; node < MOE_NODE_COUNT; node++)
            for (order = 0; order < MOE_NORM_COUNT; order++)
                for (apply = 0; apply < MOE_APPLY_COUNT; apply++)
                    for (act = 0; act < (takes_act(expert) ? (int)MOE_ACT_COUNT : 1); act++)
                        for (gate = 0; gate < 2; gate++) {
                            moe_layer_config c = small_layer();
                            c.expert = expert;
                            c.act = act;
                            c.router.score = MOE_SCORE_NORM;
                            c.router.norm_node = node;
                            c.router.norm_order = order;
                            c.router.apply_to = apply;
                            c.router.gate = gate ? MOE_GATE_IDENTITY : MOE_GATE_SOFTMAX;
                            c.router.weight = MOE_WEIGHT_RAW;
                            if (check_accepted("norm", &c, 5, gate ? WITH_MASK : 0)) accepted++;
                            else refused++;
                        }
    printf("norm nodes of experts: %d accepted, %d refused\n", accepted, refused);
    report("norm", "most are accepted", accepted > 4 * refused, "");
}

/* What a value of score or select cannot do without. */
static void fit(moe_layer_config *c) {
    if (c->router.score == MOE_SCORE_NORM) {
        c->expert = MOE_EXPERT_FACTORISED;
        c->d_low = 2;
    }
    if (c->router.score == MOE_SCORE_ATTENTIVE) {
        c->expert = MOE_EXPERT_MLP;
        c->act = MOE_ACT_TANH;
        c->d_ff = 3;
    }
    if (c->router.score == MOE_SCORE_COSINE) {
        c->router.cosine_dim = 4;
        c->router.cosine_learn_tau = 1;
    }
    if (c->router.score == MOE_SCORE_MLP) {
        c->router.router_hidden = 3;
        c->router.router_act = MOE_ACT_TANH;
    }
    if (c->router.select == MOE_SELECT_HASH || c->router.student_dim > 0) c->router.table_size = 5;
    if (c->router.select == MOE_SELECT_GROUPED_TOP_K) {
        c->router.n_experts = 4;
        c->router.groups = 2;
        c->router.groups_kept = 1;
    }
    if (c->router.select == MOE_SELECT_THRESHOLD) c->router.threshold = 0.3;
    if (c->router.select == MOE_SELECT_AFFINITY) {
        c->router.affinity_mass = 0.7;
        c->router.capacity = 4;
    }
    if (c->router.select == MOE_SELECT_BALANCED) c->router.top_k = 1;
}

static void check_grid(void) {
    int score, gate, select, weight, accepted = 0, refused = 0;
    for (score = 0; score < MOE_SCORE_COUNT; score++)
        for (gate = 0; gate < MOE_GATE_COUNT; gate++)
            for (select = 0; select < MOE_SELECT_COUNT; select++)
                for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++) {
                    moe_layer_config c = small_layer();
                    if (quick && (score + 2 * gate + 3 * select + 5 * weight) % 16 != 0) continue;
                    c.router.score = score;
                    c.router.gate = gate;
                    c.router.select = select;
                    c.router.weight = weight;
                    c.router.gate_temperature = 0.7;
                    c.router.scale = 1.5;
                    c.router.weight_p = weight == MOE_WEIGHT_P_NORM ? 2.0 : 0.0;
                    c.router.sparsemixer_eps = 0.3;
                    fit(&c);
                    if (((score + gate + select + weight) % 2 ? check_accepted_along : check_accepted)("grid", &c, 5,
                                                                                                       0))
                        accepted++;
                    else refused++;
                }
    printf("grid score x gate x select x weight: %d accepted and checked, %d refused\n", accepted, refused);
    report("grid", "most are accepted", accepted > 4 * refused, "");
}

static void check_gates_and_weights(void) {
    moe_layer_config c;
    int weight, p, gate, k;
    for (gate = 0; gate < MOE_GATE_COUNT; gate++)
        for (k = 0; k < 8; k++) {
            c = small_layer();
            c.router.gate = gate;
            c.router.gate_temperature = 1.7;
            c.router.selection_bias = k & 1;
            c.router.expert_scale = (k & 2) != 0;
            c.router.apply_to = k & 4 ? MOE_APPLY_INPUT : MOE_APPLY_OUTPUT;
            c.router.scale = -0.8;
            c.router.weight = gate == MOE_GATE_IDENTITY ? MOE_WEIGHT_SOFTMAX : MOE_WEIGHT_SUM;
            c.router.loss_importance = 0.2;
            c.router.importance_over = MOE_IMPORTANCE_WEIGHTS;
            check_layer("bias, factors", &c, 6, 0);
        }
    for (p = 0; p < 5; p++)
        for (gate = 0; gate < MOE_GATE_COUNT; gate++) {
            static const double powers[] = {1.0, 0.5, 1.5, 3.0, 8.0};
            c = small_layer();
            c.router.gate = gate;
            c.router.weight = MOE_WEIGHT_P_NORM;
            c.router.weight_p = powers[p];
            check_layer("p_norm", &c, 6, 0);
        }
    for (k = 1; k <= 4; k++)
        for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++) {
            c = small_layer();
            c.router.n_experts = 4;
            c.router.top_k = k;
            c.router.weight = weight;
            c.router.sparsemixer_eps = k % 2 ? 0.2 : 0.0;
            check_layer("top_k", &c, 6, 0);
            c.router.n_experts = k; /* K = E, and E = 1 */
            check_layer("top_k = n_experts", &c, 6, 0);
        }
}

/* The options of single stages that the grid holds fixed. */
static void check_stages(void) {
    moe_layer_config c;
    int act, score, with, k;
    for (act = 0; act < MOE_ACT_COUNT; act++) {
        c = small_layer();
        c.router.score = MOE_SCORE_MLP;
        c.router.router_act = act;
        c.router.weight = MOE_WEIGHT_RAW;
        c.router.router_hidden = act % 2 ? 7 : 0;
        check_layer("mlp score", &c, 6, 0);
        c = small_layer();
        c.router.score = MOE_SCORE_ATTENTIVE;
        c.router.router_act = act;
        c.router.weight = MOE_WEIGHT_RAW;
        c.expert = MOE_EXPERT_SWIGLU + (act % 3 == 1) * MOE_EXPERT_MLP + (act % 3 == 2) * MOE_EXPERT_FACTORISED;
        check_layer("attentive score", &c, 6, act % 2 ? WITH_MASK | WITH_ROUTER_X : 0);
    }
    for (k = 0; k < 16; k++) {
        c = small_layer();
        c.router.score = MOE_SCORE_COSINE;
        c.router.weight = MOE_WEIGHT_RAW;
        c.router.cosine_dim = k & 1 ? 3 : 0;
        c.router.cosine_keep_length = (k & 2) != 0;
        c.router.cosine_learn_tau = (k & 4) != 0;
        c.router.cosine_tau = 0.3;
        check_layer("cosine score", &c, 6, k & 8 ? WITH_MASK | WITH_ROUTER_X : 0);
    }
    for (k = 0; k < 4; k++) {
        c = small_layer();
        c.router.score = MOE_SCORE_GRAP;
        c.router.grap_cosine = k & 1;
        c.router.weight = MOE_WEIGHT_RAW;
        check_layer("grap score", &c, 6, k & 2 ? WITH_MASK | WITH_ROUTER_X : 0);
    }
    for (k = 0; k < MOE_EXPERT_COUNT; k++) {
        c = small_layer();
        c.router.score = MOE_SCORE_COMPETITION;
        c.expert = k;
        c.router.weight = MOE_WEIGHT_RAW;
        c.router.gate = MOE_GATE_IDENTITY;
        c.router.apply_to = k % 2;
        check_layer("competition score", &c, 6, k & 2 ? WITH_MASK : 0);
    }
    for (score = 0; score < MOE_SCORE_COUNT; score++)
        for (with = 0; with < 8; with++) {
            c = small_layer();
            c.router.score = score;
            c.router.weight = MOE_WEIGHT_RAW;
            c.router.router_bias = score == MOE_SCORE_LINEAR || score == MOE_SCORE_RANDOM;
            c.router.loss_balance = 0.3;
            c.router.loss_z = 0.2;
            c.router.loss_importance = 0.4;
            c.router.loss_entropy = 0.1;
            c.router.balance_scope = MOE_SCOPE_SEQUENCES;
            fit(&c);
            c.n_shared = with & 1;
            check_layer("calls", &c, 9, with);
        }
    check_gates_and_weights();
}

static void check_inputs(void) {
    moe_layer_config c;
    int mode, spread, mix, lambda, with, noise, gate;
    for (with = 0; with < 8; with++) {
        c = small_layer();
        c.router.weight = MOE_WEIGHT_RAW;
        c.router.input = MOE_INPUT_SCALED_RMS;
        check_layer("scaled_rms", &c, 8, with);
        c.router.input = MOE_INPUT_JITTER;
        check_layer("jitter", &c, 8, with);
        for (noise = 1; noise < MOE_NOISE_COUNT; noise++)
            for (gate = 0; gate < MOE_GATE_COUNT; gate++) {
                c = small_layer();
                c.router.noise = noise;
                c.router.gate = gate;
                c.router.weight = MOE_WEIGHT_RAW;
                c.router.loss_z = 0.1;
                c.router.noise_floor = with & 1 ? 0.5 : 0.0;
                c.router.noise_sigma = with & 2 ? 0.8 : 0.0;
                check_layer("noise", &c, 8, with);
            }
    }
    for (mode = 0; mode < MOE_AC_COUNT; mode++)
        for (spread = 0; spread < MOE_SPREAD_COUNT; spread++)
            for (mix = 1; mix < 3; mix++)
                for (lambda = 0; lambda < 2; lambda++) {
                    c = small_layer();
                    c.router.weight = MOE_WEIGHT_RAW;
                    c.router.input = MOE_INPUT_ADAPTIVE_CLUSTERING;
                    c.router.ac_mode = mode;
                    c.router.ac_spread = spread;
                    c.router.ac_mix = mix;
                    c.router.ac_lambda = lambda ? 0.4 : 0.0;
                    check_layer("adaptive_clustering", &c, 9, mix == 2 ? WITH_MASK : WITH_ROUTER_X);
                }
}

static void check_refinement(void) {
    moe_layer_config c;
    int scale, k, heads, u, gate, n_heads;
    for (gate = 0; gate < MOE_GATE_COUNT; gate++)
        for (scale = 0; scale < MOE_SIMILARITY_COUNT; scale++)
            for (k = 0; k < 16; k++) {
                c = small_layer();
                c.router.gate = gate;
                c.router.weight = MOE_WEIGHT_RAW;
                c.router.refine = MOE_REFINE_SIMILARITY;
                c.router.similarity_scale = scale;
                c.router.similarity_learned = k & 1;
                c.router.lower_entropy_only = (k & 2) != 0;
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
                        c.router.gate = gate;
                        c.router.weight = MOE_WEIGHT_RAW;
                        c.router.refine = MOE_REFINE_ATTENTION;
                        c.router.attention_heads = heads;
                        c.router.attention_u = u;
                        c.router.heads = n_heads;
                        c.router.attention_head = n_heads - 1;
                        c.router.lower_entropy_only = k & 1;
                        c.router.causal = (k & 2) != 0;
                        c.router.attention_sigma = k & 1 ? 1.6 : 0.0;
                        check_layer("attention", &c, 6, k & 4 ? WITH_MASK | WITH_SEQUENCES : 0);
                    }
}

static void check_selections(void) {
    moe_layer_config c;
    int select, order, after, weight, rule, k, accepted = 0, refused = 0;
    for (select = 0; select < MOE_SELECT_COUNT; select++) {
        if (select == MOE_SELECT_SOFT) continue;
        for (k = 0; k < 16; k++) { /* the options of each selection; those of others are without effect */
            c = small_layer();
            c.router.select = select;
            fit(&c);
            c.router.selection_bias = k & 1 && select != MOE_SELECT_EXPERT_THRESHOLD;
            c.router.top_p = 0.3 + 0.04 * k;
            c.router.threshold = 0.25 + 0.03 * k;
            c.router.threshold_fallback = k % 3;
            c.router.expert_choice_score = k & 1;
            c.router.affinity_sum = k & 4 ? 0.7 : 0.0;
            c.router.capacity_min = k & 8 ? 2 : 0;
            if (select == MOE_SELECT_EXPERT_CHOICE) c.router.capacity_factor = 0.5 + 0.2 * k;
            if (select == MOE_SELECT_GROUPED_TOP_K) {
                c.router.group_score = k & 1;
                c.router.n_experts = 6;
                c.router.groups = k & 2 ? 3 : 2;
                c.router.groups_kept = k & 4 ? 2 : 1;
            }
            c.router.gate = k % 4; /* softmax to relu */
            c.router.loss_balance = 0.2;
            c.router.balance_over = k % 3;
            check_layer("selections", &c, 8, k & 2 ? WITH_MASK : 0);
        }
        for (order = 0; order < MOE_DROP_COUNT; order++)
            for (after = 0; after < 2; after++)
                for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++)
                    for (rule = 0; rule < MOE_DROP_RULE_COUNT; rule++) {
                        c = small_layer();
                        c.router.select = select;
                        c.router.weight = weight;
                        c.router.gate = weight % 3;
                        fit(&c);
                        c.router.drop_order = order;
                        c.router.renormalize = after;
                        c.router.drop_rule = rule;
                        c.router.drop_capacity = 2 + rule;
                        c.router.expert_scale = order & 1;
                        c.router.apply_to = (order & 2) != 0;
                        c.router.scale = 1.3;
                        if (check_accepted("capacity", &c, 7, weight & 1 ? WITH_MASK : 0)) accepted++;
                        else refused++;
                    }
    }
    report("capacity", "most are accepted", accepted > 4 * refused, "");
}

static void check_capacity_factors(void) {
    moe_layer_config c;
    int k, gate;
    for (k = 0; k < 8; k++)
        for (gate = 0; gate < 3; gate++) {
            c = small_layer();
            c.router.gate = gate;
            c.router.capacity_factor = 0.4 + 0.15 * k;
            c.router.capacity_factor_eval = 3.0;
            c.router.renormalize = k & 1;
            c.router.drop_order = k % 4;
            c.router.loss_importance = 0.3;
            c.router.importance_over = k % 3;
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
                c.router.select = MOE_SELECT_SOFT;
                c.router.slots = 1 + (k & 1);
                c.router.soft_normalise = (k & 2) != 0;
                c.router.input = input;
                c.expert = expert;
                c.n_shared = k % 3 == 0;
                c.d_out = k % 5 == 0 ? 4 : 0;
                check_layer("soft", &c, 7, with);
            }
}

/* Sets the factor of a loss; of those that only some stages have, that of the load: the pairs check
   them. */
static void set_loss(moe_router_config *r, int loss, double factor) {
    switch (loss) {
    case MOE_LOSS_BALANCE:
        r->loss_balance = factor;
        break;
    case MOE_LOSS_PREDICTOR:
        r->loss_predictor = factor;
        r->predictor = 1;
        r->select = MOE_SELECT_EXPERT_CHOICE;
        break;
    case MOE_LOSS_Z:
        r->loss_z = factor;
        break;
    case MOE_LOSS_IMPORTANCE:
        r->loss_importance = factor;
        break;
    case MOE_LOSS_ENTROPY:
        r->loss_entropy = factor;
        break;
    case MOE_LOSS_USAGE_ENTROPY:
        r->loss_usage_entropy = factor;
        break;
    case MOE_LOSS_SIMILARITY:
        r->loss_similarity_same = factor;
        r->loss_similarity_diff = 0.7 * factor;
        break;
    case MOE_LOSS_LOCALITY:
        r->loss_locality = factor;
        r->nodes = 2;
        break;
    case MOE_LOSS_L1:
        r->loss_l1 = factor;
        break;
    case MOE_LOSS_ORTHOGONAL:
        r->loss_orthogonal = factor;
        break;
    case MOE_LOSS_DISTILL:
        r->loss_distill = factor;
        break;
    default:
        r->loss_load = factor;
        r->noise = r->noise == MOE_NOISE_NOISY_TOPK ? (int)MOE_NOISE_NOISY_TOPK : (int)MOE_NOISE_GAUSSIAN;
    }
}

/* Logarithms and quotients of sums of p: a gate with negative values has none, unless its logits
   are norms. */
static int needs_positive(int loss) {
    return loss == MOE_LOSS_BALANCE || loss == MOE_LOSS_IMPORTANCE || loss == MOE_LOSS_USAGE_ENTROPY ||
           loss == MOE_LOSS_LOCALITY;
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
                            if ((over > 0 || option > 0) && loss != MOE_LOSS_BALANCE && loss != MOE_LOSS_IMPORTANCE)
                                continue;
                            c.router.gate = gate;
                            c.router.select = select;
                            c.router.weight = gate == MOE_GATE_IDENTITY ? MOE_WEIGHT_RAW : MOE_WEIGHT_SUM;
                            fit(&c);
                            set_loss(&c.router, loss, 0.5);
                            c.router.balance_over = c.router.importance_over = over;
                            c.router.balance_scope = c.router.unbiased = option;
                            if (gate == MOE_GATE_IDENTITY && needs_positive(loss)) {
                                c.router.score = MOE_SCORE_NORM;
                                c.router.norm_node = MOE_NODE_OUTPUT;
                            }
                            refused += !(with % 3 ? check_accepted_along : check_accepted)("losses", &c, 8, with);
                        }
    for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++) {
        moe_layer_config c = small_layer();
        c.router.weight = weight;
        c.router.loss_importance = 0.5;
        c.router.importance_over = MOE_IMPORTANCE_WEIGHTS;
        c.router.expert_scale = weight % 2;
        c.router.scale = 2.5;
        check_layer("importance of weights", &c, 8, WITH_MASK);
    }
    /* what reads the logits or the gate without noise, and what is refined */
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++)
        for (noise = 0; noise < MOE_NOISE_COUNT; noise++)
            for (option = 0; option < 6; option++) {
                moe_layer_config c = small_layer();
                c.router.noise = noise;
                c.router.gate = option % 3;
                c.router.top_k = 1 + option % 2;
                c.router.weight = MOE_WEIGHT_RAW;
                c.router.importance_over = MOE_IMPORTANCE_GATE;
                c.router.noise_sigma = 0.6;
                c.router.refine = option == 4 ? MOE_REFINE_SIMILARITY : MOE_REFINE_NONE;
                c.router.score = option == 5 ? MOE_SCORE_COSINE : MOE_SCORE_LINEAR;
                set_loss(&c.router, loss, 0.5);
                check_layer("losses and noise", &c, 7, option & 1 ? WITH_MASK : 0);
            }
    report("losses", "all are accepted", refused == 0, "");
}

/* ---- replay ---- */

/* Replay of the caller's own choices, for every selection: as any other call. */
static void check_given(void) {
    int select, with, gate;
    for (select = 0; select < MOE_SELECT_COUNT; select++)
        for (gate = 0; gate < MOE_GATE_COUNT; gate++)
            for (with = 0; with < 2 && select != MOE_SELECT_SOFT; with++) {
                moe_layer_config c = small_layer();
                c.router.select = select;
                c.router.gate = gate;
                c.router.weight = (gate + select) % MOE_WEIGHT_SPARSEMIXER;
                c.router.loss_balance = gate == MOE_GATE_IDENTITY ? 0.0 : 0.3;
                c.router.loss_l1 = 0.2;
                c.router.drop_capacity = with ? 3 : 0;
                fit(&c);
                check_layer("given", &c, 6, WITH_GIVEN | (with ? WITH_MASK : 0));
            }
}

/* All that a call gives back: y, the gradients of x and of all tensors, one after another. */
static double *results_of(const layer_case *c, size_t *count) {
    size_t n = c->call.n_tokens * (size_t)c->layer.config.d_out;
    size_t d = c->call.n_tokens * (size_t)c->layer.config.router.d_model, i, k, at;
    double *all;
    moe_tensor t;
    for (i = 0, at = n + d; moe_layer_tensor(&c->layer, i, &t) == MOE_OK; i++) at += t.count;
    all = normals(at, 0.0);
    memcpy(all, c->y, n * sizeof *all);
    memcpy(all + n, c->dx, d * sizeof *all);
    for (i = 0, at = n + d; moe_layer_tensor(&c->layer, i, &t) == MOE_OK; i++)
        for (k = 0; k < t.count; k++) all[at++] = t.gradient[k];
    *count = at;
    return all;
}

static void clear_gradients(layer_case *c) {
    moe_tensor t;
    size_t i;
    for (i = 0; moe_layer_tensor(&c->layer, i, &t) == MOE_OK; i++) memset(t.gradient, 0, t.count * sizeof(double));
    memset(c->dx, 0, c->call.n_tokens * (size_t)c->layer.config.router.d_model * sizeof(double));
}

/* A call and the replay of its recorded choices give the same y and gradients: bit for bit where
   the order of choices is the same. */
static void check_recorded(const moe_layer_config *config, size_t n, int with, int keep_dropped) {
    layer_case c;
    moe_error error;
    char name[NAME_ROOM], why[NAME_ROOM];
    double *first, *second, size = 1e-8, worst = 0.0;
    size_t count, i, pairs;
    int32_t *choices;
    int same_order, tries;
    describe(config, with, name);
    error.message[0] = '\0';
    for (tries = 0; !start_layer(&c, config, n, with, &error) && c.status == MOE_ERR_STOPPED && tries < 20; tries++)
        end_layer(&c);
    if (c.status == MOE_OK) layer_backward(&c);
    if (c.status != MOE_OK) {
        report("replay", name, 0, error.message[0] != '\0' ? error.message : moe_status_text(c.status));
        end_layer(&c);
        return;
    }
    first = results_of(&c, &count);
    pairs = n * c.pass.routing.max_choices;
    free(c.given);
    choices = (int32_t *)grab(pairs, sizeof *choices);
    c.given = (int32_t *)grab(pairs, sizeof *c.given);
    memcpy(choices, c.pass.routing.choices, pairs * sizeof *choices);
    report("replay", name, c.pass.routing.max_choices == most_choices(&c.layer.config.router),
           "max_choices is not as documented");
    c.status = moe_routing_choices(&c.pass.routing, c.pass.routing.max_choices, keep_dropped, c.given);
    c.measured_call.given = c.given;
    clear_gradients(&c);
    if (c.status == MOE_OK) (void)evaluate_layer(&c);
    if (c.status == MOE_OK) layer_backward(&c);
    second = results_of(&c, &count);
    for (same_order = keep_dropped, i = 0; i < pairs; i++)
        if (i % c.pass.routing.max_choices < (size_t)c.pass.routing.n_choices[i / c.pass.routing.max_choices])
            same_order &= choices[i] == c.pass.routing.choices[i];
    for (i = 0; i < count; i++) {
        if (fabs(first[i]) > size) size = fabs(first[i]);
        if (!(fabs(first[i] - second[i]) <= worst)) worst = fabs(first[i] - second[i]);
    }
    sprintf(why, "off by %.1e of %.1e, %s: %s", worst, size, same_order ? "in the same order" : "in another order",
            moe_status_text(c.status));
    report("replay", name, c.status == MOE_OK && worst <= (same_order ? 0.0 : 1e-12 * size), why);
    free(first);
    free(second);
    free(choices);
    end_layer(&c);
}

static void check_replay(void) {
    int select, gate, weight, k, accepted = 0;
    for (select = 0; select < MOE_SELECT_COUNT; select++)
        for (gate = 0; gate < MOE_GATE_COUNT && select != MOE_SELECT_SOFT; gate++)
            for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++)
                for (k = 0; k < 4; k++) {
                    moe_layer_config c = small_layer();
                    c.router.select = select;
                    c.router.gate = gate;
                    c.router.weight = weight;
                    c.router.sparsemixer_eps = 0.3;
                    fit(&c);
                    c.router.drop_capacity = k & 1 ? 2 : 0;
                    c.router.drop_order = k & 2 ? MOE_DROP_SCORE : MOE_DROP_POSITION;
                    c.router.noise = k == 2 ? MOE_NOISE_NOISY_TOPK : MOE_NOISE_NONE;
                    /* saturated, so that p has ties where z has none */
                    c.router.gate_temperature = k == 1 ? 0.004 : 0.0;
                    if (moe_layer_check(&c, NULL, NULL) != MOE_OK) continue;
                    accepted++;
                    check_recorded(&c, 7, k & 2 ? WITH_MASK : 0, 1);
                    if (weight == MOE_WEIGHT_RAW || weight == MOE_WEIGHT_ONE)
                        check_recorded(&c, 7, k & 2 ? WITH_MASK : 0, 0);
                    c.router.loss_balance = 0.3;
                    c.router.balance_over = k % 3;
                    c.router.loss_l1 = 0.1;
                    check_recorded(&c, 7, k & 2 ? WITH_MASK : 0, 1);
                    c.router.loss_distill = 0.5;
                    c.router.student = k & 1;
                    c.router.freeze_at = 1 + (k & 1) * (k & 2);
                    if (moe_layer_check(&c, NULL, NULL) == MOE_OK) check_recorded(&c, 7, 0, 1);
                    c.router.student = 0;
                    c.router.freeze_at = 0;
                    c.router.switch_at = 2;
                    c.router.switch_from = MOE_SELECT_DENSE;
                    if (moe_layer_check(&c, NULL, NULL) == MOE_OK) check_recorded(&c, 7, 0, 1);
                }
    report("replay", "many are accepted", accepted > 1600, "");
}

/* ---- experts one by one ---- */

static void check_by_experts(void) {
    manner m;
    int expert, select, k, accepted = 0;
    m.group = "experts one by one";
    m.n = 6;
    m.how = EVERY_NUMBER;
    m.by_experts = 1;
    for (expert = 0; expert < MOE_EXPERT_COUNT; expert++)
        for (select = 0; select < MOE_SELECT_COUNT; select++)
            for (k = 0; k < MOE_SCORE_COUNT && select != MOE_SELECT_SOFT; k++) {
                moe_layer_config c = small_layer();
                c.router.select = select;
                c.router.score = k;
                fit(&c);
                c.expert = expert;
                c.d_low = 0;
                c.act = 0;
                c.router.norm_node = expert == MOE_EXPERT_FACTORISED ? MOE_NODE_LOW
                                     : k + select < 12               ? MOE_NODE_OUTPUT
                                                                     : MOE_NODE_GATE;
                c.router.weight = (expert + select + k) % MOE_WEIGHT_SPARSEMIXER;
                c.router.loss_z = 0.1;
                c.router.loss_entropy = 0.2;
                c.router.drop_capacity = k % 4 == 3 ? 2 : 0;
                c.router.scale = 1.3;
                c.router.expert_scale = k & 1;
                c.router.renormalize = select & 1;
                m.with = (k & 1 ? WITH_MASK : 0) | (select & 1 ? WITH_ROUTER_X : 0);
                if (moe_layer_check(&c, NULL, NULL) != MOE_OK) continue;
                check_manner(&m, &c);
                accepted++;
            }
    report("experts one by one", "many are accepted", accepted > 400, "");
}

/* ---- the input itself ---- */

static void check_add_input(void) {
    int select, weight, k, accepted = 0;
    for (select = 0; select < MOE_SELECT_COUNT; select++)
        for (weight = 0; weight < MOE_WEIGHT_COUNT; weight++)
            for (k = 0; k < MOE_EXPERT_COUNT; k++) {
                moe_layer_config c = small_layer();
                c.router.select = select;
                c.router.weight = weight;
                c.router.gate = select % 3;
                fit(&c);
                c.add_input = 1;
                c.expert = k;
                c.d_low = 0;
                c.router.drop_capacity = k & 1 ? 2 : 0;
                c.router.renormalize = k & 2 ? MOE_RENORMALIZE_AFTER : MOE_RENORMALIZE_BEFORE;
                c.router.scale = k == 2 ? 0.7 : 0.0;
                c.router.expert_scale = k == 3;
                c.n_shared = k & 1;
                c.d_shared = k & 1 ? 2 : 0;
                accepted += check_accepted("add_input", &c, 6, weight % 8);
            }
    report("add_input", "many are accepted", accepted > 440, "");
}

/* ---- teachers and students ---- */

static void check_distill(void) {
    int kind, score, k;
    for (kind = 0; kind < MOE_DISTILL_COUNT; kind++)
        for (score = 0; score < MOE_SCORE_COUNT; score++)
            for (k = 0; k < 8; k++) {
                moe_layer_config c = small_layer();
                c.router.score = score;
                fit(&c);
                c.router.loss_distill = 0.8;
                c.router.distill = kind;
                c.router.noise = k == 6 ? MOE_NOISE_NOISY_TOPK : k == 7 ? MOE_NOISE_GUMBEL : MOE_NOISE_NONE;
                c.router.input = k == 5 ? MOE_INPUT_SCALED_RMS : MOE_INPUT_PLAIN;
                c.router.gate = k % 4;
                c.router.weight = k & 1 ? MOE_WEIGHT_RAW : MOE_WEIGHT_SUM;
                check_layer("teacher", &c, 6, k);
                c.router.student = 1;
                c.router.freeze_at = 1 + k % 3; /* at step 1: frozen for k = 0, 3, 6 */
                check_layer("student", &c, 6, k);
            }
    for (k = 0; k < MOE_SELECT_COUNT; k++) {
        moe_layer_config c = small_layer();
        c.router.select = k;
        c.router.loss_distill = 0.8;
        c.router.student = 1;
        c.router.freeze_at = 1 + k % 2;
        fit(&c);
        check_layer("student", &c, 6, 0);
    }
}

/* ---- dselect and the bound of capacity ---- */

static void check_dselect(void) {
    int experts, k, option;
    for (experts = 1; experts <= 9; experts++)
        for (k = 1; k <= 3 && k <= experts; k++)
            for (option = 0; option < 6; option++) {
                moe_layer_config c = small_layer();
                c.router.score = MOE_SCORE_DSELECT;
                c.router.n_experts = experts;
                c.router.top_k = k;
                c.router.gate = option < 4 ? MOE_GATE_IDENTITY : MOE_GATE_SOFTMAX;
                c.router.select = option < 4 ? MOE_SELECT_POSITIVE : option == 4 ? MOE_SELECT_TOP_K : MOE_SELECT_DENSE;
                c.router.weight = option & 1 ? MOE_WEIGHT_RAW : MOE_WEIGHT_SUM;
                c.router.loss_entropy = option & 2 ? 0.2 : 0.0;
                c.router.loss_z = option & 2 ? 0.1 : 0.0;
                c.router.noise = option == 5 ? MOE_NOISE_GAUSSIAN : MOE_NOISE_NONE;
                check_layer("dselect", &c, 6, option);
            }
}

/* Tokens of two features, so that the bound is below their number and pairs are dropped. The bound
   is a constant. */
static void check_bound(void) {
    static const int scores[] = {MOE_SCORE_LINEAR, MOE_SCORE_RANDOM, MOE_SCORE_COSINE, MOE_SCORE_COSINE,
                                 MOE_SCORE_GRAP};
    int score, bound, order, k, cases = 0;
    long before = cases_with_drops;
    char why[80];
    for (score = 0; score < 5; score++)
        for (bound = MOE_BOUND_FIRST; bound <= MOE_BOUND_EVERY; bound++)
            for (order = 0; order < MOE_DROP_COUNT; order++)
                for (k = 0; k < 4; k++) {
                    moe_layer_config c = small_layer();
                    c.router.d_model = score == 4 ? 4 : 2;
                    c.router.n_experts = 4;
                    c.router.top_k = 2;
                    c.router.score = scores[score];
                    c.router.cosine_dim = score == 3 ? 2 : 0;
                    c.router.capacity_bound = bound;
                    c.router.drop_order = order;
                    c.router.renormalize = k & 1;
                    c.router.capacity_rho = bound == MOE_BOUND_EVERY && k == 3 ? 0.5 : 0.0;
                    c.router.capacity_factor = k == 2 ? 0.1 : 0.0; /* the bound raises its capacity */
                    c.router.weight = k & 1 ? MOE_WEIGHT_RAW : MOE_WEIGHT_SUM;
                    c.router.loss_balance = 0.2;
                    check_layer("capacity_bound", &c, 9, k & 2 ? WITH_MASK : 0);
                    cases++;
                }
    sprintf(why, "%ld of %d", cases_with_drops - before, cases);
    report("capacity_bound", "it drops pairs", (cases_with_drops - before) * 2 > cases, why);
}

/* ---- a learned threshold ---- */

static void threshold_settings(int weight, int through, moe_layer_config *c) {
    c->router.n_experts = 4;
    c->router.gate = MOE_GATE_IDENTITY;
    c->router.select = MOE_SELECT_THRESHOLD;
    c->router.weight = weight;
    if (through) c->router.gate = MOE_GATE_SIGMOID; /* a sigmoid theta lies between 0 and 1, so p must */
    c->router.weight_p = 2.0;
    c->router.router_bias = 1;
    c->router.expert_scale = 1;
    c->router.scale = 1.2;
}

/* One token by gate identity, so that dL/dp_e is the gradient of the bias of e. The factor F_e = [p
   > theta] of a chosen pair has the slope of sigmoid((p - theta) / 0.01) by p and -theta. F_e
   dL/dF_e is p_e dL/dp_e where w reads p, and the gradient of the factor of e, times it, where w
   only counts. Both are measured by the same layer with a fixed theta that replays the choices. */
static void check_threshold_at(int weight, int fallback, int through, uint64_t seed) {
    layer_case learned, fixed;
    moe_layer_config c = small_layer();
    moe_real *theta = NULL;
    char name[80];
    int32_t given[4];
    double worst = 0.0, size = 1e-8, p[4];
    size_t e;
    sprintf(name, "weight %d, %s%s", weight, fallback ? "none above theta" : "some above theta",
            through ? ", a sigmoid" : "");
    threshold_settings(weight, through, &c);
    moe_rng_seed(&rng, seed);
    (void)start_layer(&fixed, &c, 1, 0, NULL);
    moe_rng_seed(&rng, seed); /* the same tensors */
    c.router.threshold_learned = 1;
    c.router.threshold_sigmoid = through;
    if (through) c.router.threshold = 0.3;
    (void)start_layer(&learned, &c, 1, 0, NULL);
    if (fixed.status != MOE_OK || learned.status != MOE_OK) {
        report("learned threshold", name, 0, moe_status_text(learned.status));
        end_layer(&fixed);
        end_layer(&learned);
        return;
    }
    memcpy(learned.x, fixed.x, 6 * sizeof(double));
    memcpy(p, fixed.pass.routing.probabilities, sizeof p);
    memcpy(&theta, &learned.layer.tensors[MOE_ROUTER_THRESHOLD], sizeof theta);
    for (e = 0; e < 4; e++)
        theta[e] = p[e] + (fallback || e == 3 ? 0.004 + 0.003 * (double)e : -0.002 - 0.006 * (double)e);
    for (e = 0; e < 4 && through; e++) theta[e] = log(theta[e] / (1.0 - theta[e]));
    (void)evaluate_layer(&learned);
    layer_backward(&learned);
    (void)moe_routing_choices(&learned.pass.routing, learned.pass.routing.max_choices, 1, given);
    fixed.measured_call.given = given;
    (void)evaluate_layer(&fixed);
    layer_backward(&fixed);
    for (e = 0; e < 4; e++) {
        double at = through ? 1.0 / (1.0 + exp(-theta[e])) : theta[e], inner = through ? at * (1.0 - at) : 1.0;
        double open = learned.pass.routing.selected[e] ? 1.0 / (1.0 + exp((at - p[e]) / 0.01)) : 0.0, slope, off;
        double by_p = through ? p[e] * (1.0 - p[e]) : 1.0;
        double d_bias = fixed.layer.gradients[MOE_ROUTER_BIAS][e], d_factor = d_bias / by_p * p[e];
        if (weight == MOE_WEIGHT_UNIFORM || weight == MOE_WEIGHT_ONE)
            d_factor =
                fixed.layer.gradients[MOE_ROUTER_EXPERT_SCALE][e] * fixed.layer.tensors[MOE_ROUTER_EXPERT_SCALE][e];
        slope = d_factor * open * (1.0 - open) / 0.01;
        off = fabs(learned.layer.gradients[MOE_ROUTER_THRESHOLD][e] + slope * inner) +
              fabs(learned.layer.gradients[MOE_ROUTER_BIAS][e] - d_bias - slope * by_p);
        if (fabs(slope) > size) size = fabs(slope);
        if (!(off <= worst)) worst = off;
    }
    report("learned threshold", name, worst <= 1e-9 * size && size > 1e-6, "the slope of its surrogate");
    report("learned threshold", name, learned.pass.routing.n_choices[0] == (fallback ? 1 : 3), "who is chosen");
    end_layer(&fixed);
    end_layer(&learned);
}

static void check_learned_threshold(void) {
    static const int weights[] = {MOE_WEIGHT_SUM, MOE_WEIGHT_RAW, MOE_WEIGHT_P_NORM, MOE_WEIGHT_UNIFORM,
                                  MOE_WEIGHT_ONE};
    int i, trial;
    for (i = 0; i < 5; i++)
        for (trial = 0; trial < 8; trial++) {
            /* a single choice weighs 1 with sum and p_norm, whatever its p */
            int through, fallback = trial & 1 && weights[i] != MOE_WEIGHT_SUM && weights[i] != MOE_WEIGHT_P_NORM;
            for (through = 0; through < 2; through++)
                check_threshold_at(weights[i], fallback, through, 100 + (uint64_t)(8 * i + trial));
        }
}

/* ---- every pair of options ---- */

/* Values of one field, and the settings without which they mean nothing. What a row sets wins over
   what any other row needs. */
typedef struct option_row {
    const char *field, *values, *needs;
    int with; /* of the call */
} option_row;

static const option_row option_rows[] = {
    {"top_k", "1 4", "", 0},
    {"n_zero", "1 3", "", 0},
    {"n_copy", "2", "", 0},
    {"n_constant", "1 2", "", 0},
    {"weight_over", "all nonzero real", "n_zero=1 n_copy=1", 0},
    {"zero_tau", "0.5 2", "n_copy=1 loss_balance=0.4", 0},
    {"zero_average", "1", "n_zero=2 loss_balance=0.4", 0},
    {"router_residual", "1", "", 0},
    {"input", "plain jitter scaled_rms adaptive_clustering", "", 0},
    {"raw_input", "1", "", 0},
    {"jitter_eps", "0.2", "input=jitter", 0},
    {"ac_mode", "paper code running random", "input=adaptive_clustering", 0},
    {"ac_spread", "mad variance pairwise", "input=adaptive_clustering", 0},
    {"ac_mix", "1 2", "input=adaptive_clustering", 0},
    {"ac_lambda", "0.4", "input=adaptive_clustering", 0},
    {"ac_rho", "0.5", "input=adaptive_clustering ac_mode=running", 0},
    {"score", "linear random mlp cosine grap competition dselect custom", "", 0},
    {"score", "norm", "expert=factorised", 0},
    {"score", "attentive", "expert=mlp", 0},
    {"router_bias", "1", "", 0},
    {"cosine_dim", "3", "score=cosine", 0},
    {"cosine_keep_length", "1", "score=cosine", 0},
    {"cosine_learn_tau", "1", "score=cosine", 0},
    {"cosine_tau", "0.4", "score=cosine", 0},
    {"norm_node", "down gate up act product output", "score=norm expert=factorised", 0},
    {"norm_order", "l2 l1 linf", "score=norm expert=factorised", 0},
    {"router_hidden", "3", "score=mlp", 0},
    {"router_act", "relu silu gelu tanh sigmoid identity gelu_tanh relu2", "score=mlp", 0},
    {"grap_cosine", "1", "score=grap", 0},
    {"logit_cap", "0.8", "", 0},
    {"noise", "none noisy_topk gaussian gumbel", "", 0},
    {"noise_floor", "0.3", "noise=noisy_topk", 0},
    {"noise_sigma", "0.6", "noise=gaussian", 0},
    {"gate", "softmax sigmoid sqrt_softplus relu identity", "", 0},
    {"gate_temperature", "0.7", "", 0},
    {"refine", "none similarity attention", "", 0},
    {"similarity_tau", "1.7", "refine=similarity", 0},
    {"similarity_scale", "none l2 rsqrt_d", "refine=similarity", 0},
    {"similarity_learned", "1", "refine=similarity", 0},
    {"lower_entropy_only", "1", "refine=similarity", 0},
    {"causal", "1", "refine=similarity", 0},
    {"heads", "3", "refine=attention", 0},
    {"attention_heads", "min_entropy all fixed", "refine=attention heads=2", 0},
    {"attention_head", "1", "refine=attention heads=2 attention_heads=fixed", 0},
    {"attention_sigma", "1.5", "refine=attention", 0},
    {"attention_u", "input output", "refine=attention", 0},
    {"select", "top_k dense given top_p positive expert_choice affinity soft sinkhorn sample custom", "", 0},
    {"select", "grouped_top_k", "groups=2 groups_kept=1", 0},
    {"select", "grouped_each", "groups=2 top_k=2", 0},
    {"select", "expert_threshold", "", 0},
    {"threshold_rho", "0.5", "select=expert_threshold", 0},
    {"select", "threshold", "threshold=0.2", 0},
    {"select", "hash", "table_size=5", 0},
    {"select", "balanced", "top_k=1", 0},
    {"selection_bias", "1", "", 0},
    {"groups_kept", "2", "select=grouped_top_k groups=2", 0},
    {"group_score", "max top2_sum", "select=grouped_top_k groups=2", 0},
    {"top_p", "0.4", "select=top_p", 0},
    {"threshold", "0.3", "select=threshold", 0},
    {"threshold_learned", "1", "select=threshold", 0},
    {"threshold_fallback", "always evaluation never", "select=threshold threshold=0.3", 0},
    {"custom_batch", "1", "select=custom", 0},
    {"custom_batch", "1", "score=custom", 0},
    {"custom_parameters", "1 5 24", "score=custom", 0},
    {"expert_choice_score", "p z", "select=expert_choice", 0},
    {"affinity_mass", "0.6", "select=affinity", 0},
    {"affinity_sum", "0.7", "select=affinity", 0},
    {"affinity_sum_auto", "0.6", "select=affinity", 0},
    {"sample_at", "training always", "select=sample", 0},
    {"sample_scope", "token sequence call", "select=sample", WITH_SEQUENCES},
    {"sample_seed", "7", "select=sample sample_at=always", 0},
    {"expert_dropout", "0.3", "", 0},
    {"expert_dropout_scope", "token call", "expert_dropout=0.3", 0},
    {"capacity", "1", "select=affinity", 0},
    {"slots", "2", "select=soft", 0},
    {"soft_normalise", "1", "select=soft", 0},
    {"soft_sequences", "3", "select=soft", 0},
    {"weight", "sum softmax raw p_norm uniform one sparsemixer", "", 0},
    {"weight_p", "1 2 0.5", "weight=p_norm", 0},
    {"sparsemixer_eps", "0.3", "weight=sparsemixer", 0},
    {"expert_scale", "1", "", 0},
    {"scale", "-1.3", "", 0},
    {"apply_to", "output input", "", 0},
    {"capacity_factor", "0.8", "", 0},
    {"capacity_factor_eval", "0.4", "capacity_factor=0.8", 0},
    {"drop_capacity", "2", "", 0},
    {"capacity_min", "3", "capacity_factor=0.3", 0},
    {"capacity_bound", "first every", "d_model=4", 0},
    {"capacity_rho", "0.5", "capacity_bound=every d_model=4", 0},
    {"drop_order", "position priority random score", "drop_capacity=2", 0},
    {"drop_rule", "gshard st_moe", "", 0},
    {"renormalize", "before after", "drop_capacity=2", 0},
    {"loss_balance", "0.4", "", 0},
    {"balance_over", "pairs tokens first", "loss_balance=0.4", 0},
    {"balance_scope", "batch sequences", "loss_balance=0.4", WITH_SEQUENCES},
    {"loss_z", "0.2", "", 0},
    {"loss_stable_balance", "0.3", "", 0},
    {"loss_selector_entropy", "0.4", "score=dselect", 0},
    {"loss_selector_reach", "0.2", "score=dselect n_experts=6", 0},
    {"loss_importance", "0.4", "", 0},
    {"importance_over", "probabilities gate weights", "loss_importance=0.4", 0},
    {"unbiased", "1", "loss_importance=0.4", 0},
    {"loss_entropy", "0.3", "", 0},
    {"loss_usage_entropy", "0.3", "", 0},
    {"loss_similarity_same", "0.5", "", 0},
    {"loss_similarity_diff", "0.5", "", 0},
    {"loss_locality", "0.4", "nodes=2", 0},
    {"loss_l1", "0.3", "", 0},
    {"loss_load", "0.3", "noise=gaussian", 0},
    {"loss_orthogonal", "0.2", "", 0},
    {"loss_diversity", "0.2", "", 0},
    {"loss_simplicity", "0.2", "", 0},
    {"loss_distill", "0.6", "", 0},
    {"distill", "ce_hard ce_soft mse", "loss_distill=0.6", 0},
    {"student", "1", "loss_distill=0.6 freeze_at=5", 0},
    {"student_dim", "3", "loss_distill=0.6 freeze_at=5 student=1 table_size=5", 0},
    {"compete_rate", "1", "loss_distill=0.6", 0},
    {"compete_rate", "1", "loss_distill=0.6 distill=mse router_bias=1", 0},
    {"compete_rate", "1", "", 0},
    {"compete_from", "1 2", "compete_rate=1 loss_distill=0.6", 0},
    {"compete", "softplus norm", "compete_rate=1 loss_distill=0.6", 0},
    {"predictor", "1", "select=expert_choice loss_predictor=0.4", 0},
    {"loss_predictor", "0.3", "select=expert_choice predictor=1", 0},
    {"expert_choice_scope", "batch sequences", "select=expert_choice", 0},
    {"expert_temperature", "2", "", 0},
    {"bias_rate", "0.1", "selection_bias=1", 0},
    {"bias_rule", "sign proportional smebu", "selection_bias=1 bias_rate=0.1", 0},
    {"bias_centre", "1", "selection_bias=1 bias_rate=0.1", 0},
    {"bias_real", "1", "selection_bias=1 bias_rate=0.1 n_copy=1", 0},
    {"bias_kappa", "3", "selection_bias=1 bias_rate=0.1 bias_rule=smebu", 0},
    {"bias_beta", "0.25", "selection_bias=1 bias_rate=0.1 bias_rule=smebu", 0},
    {"l1_controller", "none layer net", "select=positive gate=relu", 0},
    {"k_end", "4 -1", "schedule_steps=2", 0},
    {"tau_schedule", "gate_temperature", "schedule_steps=2 tau_end=0.5", 0},
    {"tau_schedule", "cosine_tau", "schedule_steps=2 tau_end=0.5 score=cosine", 0},
    {"tau_schedule", "similarity_tau", "schedule_steps=2 tau_end=2 refine=similarity", 0},
    {"tau_schedule", "attention_sigma", "schedule_steps=2 tau_end=2 refine=attention", 0},
    {"freeze_at", "1 2", "", 0},
    {"switch_at", "1", "switch_from=dense", 0},
    {"switch_at", "2", "select=dense", 0},
    {"switch_share", "0.5 1", "schedule_steps=2 switch_from=dense", 0},
    {"switch_from", "dense top_p threshold positive affinity sinkhorn sample custom", "switch_at=2", 0},
    {"switch_from", "balanced", "switch_at=2 top_k=1", 0},
    {"switch_from", "expert_choice expert_threshold", "switch_at=2", 0},
    {"switch_from", "grouped_top_k", "switch_at=2 groups=2 groups_kept=1", 0},
    {"switch_from", "grouped_each", "switch_at=2 groups=2", 0},
    {"switch_from", "hash", "switch_at=2 table_size=5", 0},
    {"switch_from", "given", "switch_at=2", WITH_GIVEN},
    {"d_out", "3", "", 0},
    {"expert", "swiglu mlp linear factorised glu", "", 0},
    {"d_low", "2", "expert=factorised", 0},
    {"act", "default relu silu gelu tanh sigmoid identity gelu_tanh relu2", "expert=glu", 0},
    {"no_expert_bias", "1", "", 0},
    {"swiglu_alpha", "1.7", "expert=swiglu", 0},
    {"swiglu_limit", "0.5", "expert=swiglu", 0},
    {"swiglu_offset", "1", "expert=swiglu", 0},
    {"expert_bias", "1", "expert=swiglu", 0},
    {"n_shared", "1", "", 0},
    {"d_shared", "3", "n_shared=2", 0},
    {"shared_act", "default relu silu gelu tanh sigmoid identity gelu_tanh relu2", "n_shared=1", 0},
    {"shared_sigmoid", "1", "n_shared=1", 0},
    {"add_input", "1", "", 0},
    {"d_latent", "3 -2", "", 0},
    {"mask", "", "", WITH_MASK},
    {"sequences", "", "", WITH_SEQUENCES},
    {"router_x", "", "", WITH_ROUTER_X},
};

enum { N_ROWS = sizeof option_rows / sizeof option_rows[0], FIELD_ROOM = 40, MAX_SETTINGS = 12, MAX_OPTIONS = 400 };

/* One value of one field. */
typedef struct option {
    char set[2 * FIELD_ROOM]; /* "field=value", or what of the call */
    const char *needs;
    int with;
} option;

/* The rows, value by value; returns how many options there are. */
static int list_options(option *options) {
    int n = 0, i;
    for (i = 0; i < N_ROWS; i++) {
        const char *value = option_rows[i].values;
        do {
            int length = (int)strcspn(value, " ");
            if (n >= MAX_OPTIONS) exit(2);
            sprintf(options[n].set, "%s%s%.*s", option_rows[i].field, length > 0 ? "=" : "", length, value);
            options[n].needs = option_rows[i].needs;
            options[n].with = option_rows[i].with;
            n++;
            value += length;
            value += strspn(value, " ");
        } while (*value != '\0');
    }
    return n;
}

/* The settings of a text, taken apart. */
typedef struct settings {
    char field[MAX_SETTINGS][FIELD_ROOM], value[MAX_SETTINGS][FIELD_ROOM];
    int n;
} settings;

static void add_settings(settings *s, const char *text) {
    while (*text != '\0') {
        size_t name = strcspn(text, "= "), all = strcspn(text, " ");
        size_t value = all > name ? all - name - 1 : 0;
        if (s->n >= MAX_SETTINGS || name >= FIELD_ROOM || value >= FIELD_ROOM) exit(2);
        memcpy(s->field[s->n], text, name);
        s->field[s->n][name] = '\0';
        memcpy(s->value[s->n], text + all - value, value);
        s->value[s->n][value] = '\0';
        s->n++;
        text += all + strspn(text + all, " ");
    }
}

/* The first setting is the option's own. */
static settings settings_of(const option *o) {
    settings s;
    s.n = 0;
    add_settings(&s, o->set);
    add_settings(&s, o->needs);
    return s;
}

static int is_of_call(const option *o) { return strchr(o->set, '=') == NULL; }

/* Whether two options need different values of one field. */
static int needs_clash(const settings *a, const settings *b) {
    int i, k;
    for (i = 1; i < a->n; i++)
        for (k = 1; k < b->n; k++)
            if (strcmp(a->field[i], b->field[k]) == 0 && strcmp(a->value[i], b->value[k]) != 0) return 1;
    return 0;
}

static int stands_alone(const char *text, const char *at, size_t n) {
    static const char *const letters = "abcdefghijklmnopqrstuvwxyz0123456789_";
    return (at == text || strchr(letters, at[-1]) == NULL) && (at[n] == '\0' || strchr(letters, at[n]) == NULL);
}

static int has_word(const char *text, const char *word) {
    const char *at;
    for (at = strstr(text, word); at != NULL; at = strstr(at + 1, word))
        if (stands_alone(text, at, strlen(word))) return 1;
    return 0;
}

/* Whether a message names two fields, one of each option: its own, or one without which that means
   nothing. */
static int names_both(const char *message, const settings *a, const settings *b) {
    int i, k;
    for (i = 0; i < a->n; i++)
        for (k = 0; k < b->n; k++)
            if (strcmp(a->field[i], b->field[k]) != 0 && has_word(message, a->field[i]) &&
                has_word(message, b->field[k]))
                return 1;
    return 0;
}

/* 4 experts, 2 per token, linear ones so that the router stands out; each other option is at its
   default. */
static moe_layer_config pair_layer(void) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.d_model = 8;
    c.router.n_experts = 4;
    c.router.top_k = 2;
    c.router.untrained = 1;
    c.expert = MOE_EXPERT_LINEAR;
    c.d_ff = 4;
    return c;
}

typedef struct pair_counts {
    long accepted, refused, again;
} pair_counts;

static void apply(moe_layer_config *c, const char *text) {
    moe_error error;
    if (moe_fields_apply(moe_layer_fields(), c, text, &error) != MOE_OK) report("pairs", text, 0, error.message);
}

/* What b needs wins over what a needs. */
static moe_status set_pair(moe_layer_config *c, const option *a, const option *b, moe_error *error) {
    error->message[0] = '\0';
    apply(c, a->needs);
    apply(c, b->needs);
    if (!is_of_call(a)) apply(c, a->set);
    if (!is_of_call(b)) apply(c, b->set);
    return moe_layer_check(c, NULL, error);
}

static void check_pair(const option *a, const option *b, pair_counts *counts) {
    moe_layer_config c = pair_layer();
    settings of_a = settings_of(a), of_b = settings_of(b);
    char name[NAME_ROOM];
    manner m;
    moe_error error;
    moe_status status = set_pair(&c, a, b, &error);
    m.group = "pairs";
    m.n = 6;
    m.with = a->with | b->with;
    m.how = ALONG;
    m.by_experts = 0;
    if (status != MOE_OK) {
        sprintf(name, "%.80s (%.80s) with %.80s (%.80s)", a->set, a->needs, b->set, b->needs);
        report("pairs", name, status == MOE_ERR_CONFIG && names_both(error.message, &of_a, &of_b), error.message);
        counts->refused++;
        return;
    }
    check_manner(&m, &c);
    counts->accepted++;
    c = pair_layer(); /* the same on other ground, where it is accepted there as well */
    apply(&c, "gate=sigmoid gate_temperature=1.4 weight=raw expert=swiglu loss_balance=0.3 scale=1.3");
    if (set_pair(&c, a, b, &error) != MOE_OK) return;
    check_manner(&m, &c);
    counts->again++;
}

/* Whether a field, or one of its values when it is there, stands in some row. */
static int stands_in_table(const char *field, const char *value) {
    int i, found = 0;
    for (i = 0; i < N_ROWS; i++)
        if (strcmp(option_rows[i].field, field) == 0) found |= value == NULL || has_word(option_rows[i].values, value);
        else found |= value == NULL && has_word(option_rows[i].needs, field);
    return found;
}

/* No field of a layer and no value of a choice is forgotten. */
static void check_table(void) {
    static const char *const sizes = "d_model n_experts d_ff table_size kernels untrained";
    /* the surrogate of the first is flat nowhere: check_learned_threshold measures it; the gradient
       of the other is an estimate: golden cases compare it */
    static const char *const elsewhere = "threshold_sigmoid sparsemixer_sample";
    /* what every other pair stands on, and what switch_at always refuses */
    static const char *const beside =
        "switch_from=top_k switch_from=soft capacity_bound=none drop_rule=none tau_schedule=none";
    const moe_field *f;
    char name[2 * FIELD_ROOM];
    int i;
    for (f = moe_layer_fields(); f->name != NULL; f++) {
        if (has_word(sizes, f->name) || has_word(elsewhere, f->name)) continue;
        report("pairs", f->name, stands_in_table(f->name, NULL), "the field stands in no row");
        for (i = 0; f->kind == MOE_FIELD_CHOICE && f->choices[i] != NULL; i++) {
            sprintf(name, "%s=%s", f->name, f->choices[i]);
            report("pairs", name, has_word(beside, name) || stands_in_table(f->name, f->choices[i]),
                   "the value stands in no row");
        }
    }
}

static void check_pairs(void) {
    static const option nothing = {"", "", 0};
    static option options[MAX_OPTIONS];
    pair_counts counts = {0, 0, 0}, alone = {0, 0, 0};
    int n = list_options(options), i, k;
    check_table();
    for (i = 0; i < n; i++) check_pair(&options[i], &nothing, &alone);
    report("pairs", "every option by itself", alone.refused == 0 && alone.accepted == n, "is accepted");
    for (i = 0; i < n; i++)
        for (k = 0; k < i; k++) {
            settings a = settings_of(&options[i]), b = settings_of(&options[k]);
            if (strcmp(a.field[0], b.field[0]) == 0 || (quick && (i + 3 * k) % 61 != 0)) continue;
            check_pair(&options[k], &options[i], &counts);
            if (needs_clash(&a, &b)) check_pair(&options[i], &options[k], &counts);
        }
    printf("note: %ld pairs of %d options accepted and checked, %ld refused; %ld checked on a second default as well\n",
           counts.accepted, n, counts.refused, counts.again);
}

/* ---- random compositions ---- */

/* Schedules, all at step 1, and the bound of capacity. */
static void draw_schedules(moe_router_config *r) {
    if (chance(10)) {
        r->capacity_bound = 1 + below(2);
        r->capacity_rho = r->capacity_bound == MOE_BOUND_EVERY && chance(50) ? 0.5 : 0.0;
    }
    if (chance(5)) r->freeze_at = 1 + below(2);
    if (chance(10)) {
        r->switch_at = 1 + below(3);
        r->switch_from = below(MOE_SELECT_COUNT);
    }
    if (chance(10)) {
        r->schedule_steps = 2;
        r->k_end = 1 + below(r->n_experts);
    }
    if (chance(10)) {
        r->schedule_steps = 2;
        r->tau_schedule = 1 + below(MOE_TAU_COUNT - 1);
        r->tau_end = 1.5;
    }
}

static void draw_selection(moe_router_config *r) {
    int loss, n;
    r->selection_bias = chance(20);
    r->expert_scale = chance(20);
    r->scale = chance(30) ? 1.5 : 0.0;
    r->apply_to = chance(30);
    if (r->select == MOE_SELECT_GROUPED_TOP_K) {
        r->groups = 1 + below(2);
        r->groups_kept = 1 + below(r->groups);
        r->group_score = below(2);
    }
    r->top_p = 0.4 + 0.1 * below(5);
    r->threshold = 0.2 + 0.1 * below(3);
    r->threshold_fallback = below(3);
    r->expert_choice_score = below(2);
    r->affinity_mass = 0.6;
    if (chance(20)) r->capacity_factor = 0.5 + 0.25 * below(4);
    r->weight = below(MOE_WEIGHT_COUNT);
    r->weight_p = 1.0 + below(2);
    r->sparsemixer_eps = 0.2;
    if (chance(40)) {
        r->drop_capacity = 1 + below(3);
        r->drop_order = below(MOE_DROP_COUNT);
        r->drop_rule = chance(30) ? below(MOE_DROP_RULE_COUNT) : 0;
        r->renormalize = below(2);
    }
    for (n = below(4); n > 0; n--) {
        loss = below(MOE_LOSS_COUNT);
        set_loss(r, loss, 0.3);
    }
    r->balance_over = below(3);
    r->balance_scope = below(2);
    r->importance_over = below(3);
    r->unbiased = below(2);
    if (r->loss_distill > 0.0) {
        r->distill = below(MOE_DISTILL_COUNT);
        r->student = below(2);
    }
    if (r->score == MOE_SCORE_LINEAR && r->select == MOE_SELECT_TOP_K && chance(20)) {
        r->compete_rate = 1.0;
        r->compete = below(MOE_COMPETE_COUNT);
        r->compete_from = below(3);
    }
    if (r->student) r->freeze_at = 1 + below(3);
    if (r->student && chance(40)) r->student_dim = 1 + below(4);
    draw_schedules(r);
    if (r->select == MOE_SELECT_HASH || r->switch_from == MOE_SELECT_HASH || r->student_dim > 0) r->table_size = 4;
    if (r->select == MOE_SELECT_EXPERT_CHOICE) {
        r->expert_choice_scope = below(2);
        r->predictor = chance(50);
    }
    r->loss_predictor = r->predictor ? 0.4 : 0.0;
}

static void draw_refinement(moe_router_config *r) {
    r->refine = chance(50) ? 0 : below(MOE_REFINE_COUNT);
    if (r->refine != MOE_REFINE_NONE) {
        r->lower_entropy_only = chance(30);
        r->causal = below(2);
    }
    if (r->refine == MOE_REFINE_SIMILARITY) {
        r->similarity_learned = below(2);
        r->similarity_scale = below(MOE_SIMILARITY_COUNT);
        r->similarity_tau = 1.0 + below(2);
    }
    if (r->refine == MOE_REFINE_ATTENTION) {
        r->heads = 1 + below(3);
        r->attention_heads = below(MOE_HEADS_COUNT);
        r->attention_head = below(r->heads);
        r->attention_u = below(2);
    }
}

static void draw_score(moe_router_config *r) {
    r->score = below(MOE_SCORE_COUNT);
    r->router_bias = r->score <= MOE_SCORE_RANDOM && chance(40);
    if (r->score == MOE_SCORE_COSINE) {
        r->cosine_dim = below(2) * 3;
        r->cosine_keep_length = below(2);
        r->cosine_learn_tau = below(2);
    }
    if (r->score == MOE_SCORE_GRAP) r->grap_cosine = below(2);
    r->norm_node = below(MOE_NODE_COUNT);
    r->norm_order = below(MOE_NORM_COUNT);
    r->router_act = 1 + below(MOE_ACT_COUNT - 1);
    if (r->score == MOE_SCORE_MLP) r->router_hidden = 3;
}

static void draw_config(moe_layer_config *c) {
    moe_router_config *r = &c->router;
    memset(c, 0, sizeof *c);
    c->router.preset = MOEI_OF_A_FILE;
    r->untrained = 1;
    r->d_model = 4 + 2 * below(2);
    r->n_experts = 1 + below(4);
    r->top_k = 1 + below(r->n_experts);
    c->expert = below(MOE_EXPERT_COUNT);
    c->d_ff = 3;
    if (takes_act(c->expert)) c->act = 1 + below(MOE_ACT_COUNT - 1);
    if (c->expert == MOE_EXPERT_SWIGLU && chance(50)) {
        c->expert_bias = below(2);
        c->swiglu_alpha = below(2) * 1.7;
        c->swiglu_limit = below(2) * 0.6;
        c->swiglu_offset = below(3) * 0.5 - 0.5;
    }
    if (chance(20)) c->d_out = 3;
    if (chance(20)) {
        c->n_shared = 1;
        c->d_shared = 2;
    }
    c->add_input = c->d_out == 0 && chance(15);
    r->input = chance(50) ? 0 : below(MOE_INPUT_COUNT);
    if (r->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        r->ac_mode = below(MOE_AC_COUNT);
        r->ac_spread = below(MOE_SPREAD_COUNT);
        r->ac_mix = 1 + below(2);
    }
    draw_score(r);
    r->noise = chance(70) ? 0 : below(MOE_NOISE_COUNT);
    r->gate = below(MOE_GATE_COUNT);
    r->gate_temperature = 0.5 + 0.5 * below(3);
    draw_refinement(r);
    r->select = below(MOE_SELECT_COUNT);
    if (r->select == MOE_SELECT_BALANCED) r->top_k = 1;
    if (r->select == MOE_SELECT_SOFT) { /* everything else at its default: now and then */
        int d = r->d_model, e = r->n_experts;
        int input = r->input, mode = r->ac_mode;
        memset(r, 0, sizeof *r);
        r->untrained = 1;
        r->select = MOE_SELECT_SOFT;
        r->d_model = d;
        r->n_experts = e;
        r->input = input;
        r->ac_mode = mode;
        r->slots = 1 + below(2);
        r->soft_normalise = below(2);
        return;
    }
    draw_selection(r);
    r->router_residual = chance(20);
    if (!chance(25)) return;
    r->n_zero = below(2);
    r->n_copy = below(2);
    r->n_constant = below(2);
    r->weight_over = below(MOE_WEIGHT_OVER_COUNT);
    if (r->loss_balance > 0.0) r->zero_average = below(2);
    if (r->loss_balance > 0.0) r->zero_tau = 0.5 + below(2);
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
        if (status != MOE_ERR_CONFIG || error.message[0] == '\0')
            report("random", error.message, 0, "refused without a good reason");
    }
    printf("random compositions: %d accepted and checked, %d refused\n", accepted, refused);
    report("random", "as many as wanted", accepted == wanted, "too many are refused");
}

/* ---- single functions ---- */

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
    double dx[ROW] = {0}, dgain[ROW] = {0};
    double dbias[ROW] = {0}, mean, rstd;
    size_t i;
    memset(&s, 0, sizeof s);
    c.what = what;
    c.act = act;
    c.temperature = 0.6;
    for (i = 0; i < ROW; i++) {
        c.x[i] = 2.0 * moe_rng_normal(&rng);
        c.gain[i] = moe_rng_normal(&rng);
        c.bias[i] = moe_rng_normal(&rng);
        c.dy[i] = moe_rng_normal(&rng);
    }
    s.evaluate = evaluate_row;
    s.ctx = &c;
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
    static const char *const acts[MOE_ACT_COUNT] = {"relu", "silu",     "gelu",      "tanh",
                                                    "sigmoid", "identity", "gelu_tanh", "relu2"};
    int act;
    for (act = 0; act < MOE_ACT_COUNT; act++) check_row(ROW_ACTIVATION, act, acts[act]);
    check_row(ROW_SOFTMAX, 0, "softmax");
    check_row(ROW_LAYER_NORM, 0, "layer_norm");
    check_row(ROW_RMS_NORM, 0, "rms_norm");
}

/* ---- criteria ---- */

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
        for (i = 0; i < SAMPLES * CLASSES; i++) {
            c.y[i] = 3.0 * moe_rng_normal(&rng);
            c.targets[i] = moe_rng_normal(&rng);
            dy[i] = 1e9;
        }
        for (i = 0; i < SAMPLES; i++) c.labels[i] = (int32_t)moe_rng_below(&rng, CLASSES);
        if (c.squared) moe_squared_error(SAMPLES, CLASSES, c.y, c.targets, dy);
        else moe_cross_entropy(SAMPLES, CLASSES, c.y, c.labels, dy);
        s.evaluate = evaluate_criterion;
        s.ctx = &c;
        add_variable(&s, "y", c.y, dy, SAMPLES * CLASSES);
        check_subject(&s, "criteria", c.squared ? "squared error" : "cross entropy");
    }
}

/* ---- networks ---- */

enum { NET_TOKENS = 6 };

typedef struct net_case {
    moe_net net;
    moe_net_pass pass;
    moe_call call;
    double *x, *dx, *dy;
    int32_t labels[NET_TOKENS];
    int criterion; /* -1: sum(y * dy) */
    void *work;
    size_t work_size;
    notes decisions;
    unsigned char mask[NET_TOKENS];
    moe_status status;
} net_case;

static double evaluate_net(void *ctx) {
    net_case *c = (net_case *)ctx;
    size_t i, k, count = NET_TOKENS * (size_t)c->net.d_out;
    double sum = 0.0;
    c->decisions.count = 0;
    c->status = moe_net_forward(&c->net, &c->call, c->work, c->work_size, &c->pass);
    if (c->status != MOE_OK) return HUGE_VAL;
    if (c->criterion < 0)
        for (i = 0; i < count; i++) sum += c->pass.y[i] * c->dy[i];
    else if (c->criterion == MOE_CRITERION_CROSS_ENTROPY)
        sum = moe_cross_entropy(NET_TOKENS, (size_t)c->net.d_out, c->pass.y, c->labels, NULL);
    else sum = moe_squared_error(NET_TOKENS, (size_t)c->net.d_out, c->pass.y, c->dy, NULL);
    for (i = 0; i < c->net.n_modules; i++) {
        const moe_routing *r = moe_net_routing(&c->net, &c->pass, i);
        const moe_module *m = &c->net.modules[i];
        if (m->kind == MOE_MODULE_ACTIVATION && bends(m->act))
            note_signs(&c->decisions, c->pass.modules[i].x, NET_TOKENS * (size_t)m->d_in);
        if (r == NULL) continue;
        for (k = 0; k < MOE_LOSS_COUNT; k++) sum += r->loss[k];
        note_choices(&c->decisions, r);
    }
    return sum;
}

static void shift_net_gradients(net_case *c, double by) {
    size_t i;
    for (i = 0; i < c->net.n_tensors; i++) shift(c->net.tensors[i].gradient, c->net.tensors[i].count, by);
    shift(c->dx, NET_TOKENS * (size_t)c->net.d_in, by);
}

static void net_backward(net_case *c, const double *dy) {
    net_zero_gradients(&c->net);
    shift_net_gradients(c, START);
    c->status = moe_net_backward(&c->net, dy, c->dx, &c->pass);
    shift_net_gradients(c, -START);
}

/* Everything of a network that build left ready; frees it. */
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
            if (c->net.tensors[i].flags & MOE_PARAM_STATE) c->net.tensors[i].data[k] = 0.5 + moe_rng_uniform(&rng);
            else if (c->net.tensors[i].flags & MOE_PARAM_NO_DECAY)
                c->net.tensors[i].data[k] += 0.3 * moe_rng_normal(&rng);
    count = NET_TOKENS * (size_t)c->net.d_out;
    c->x = normals(NET_TOKENS * (size_t)c->net.d_in, 1.0);
    c->dx = normals(NET_TOKENS * (size_t)c->net.d_in, 0.0);
    c->dy = normals(count, 0.5);
    dy = normals(count, 0.0);
    for (i = 0; i < NET_TOKENS; i++) c->labels[i] = (int32_t)moe_rng_below(&rng, (uint64_t)c->net.d_out);
    c->call.n_tokens = NET_TOKENS;
    c->call.x = c->x;
    c->call.training = 1;
    c->status = moe_net_work_size(&c->net, NET_TOKENS, 1, &c->work_size);
    c->work = memset(grab(c->work_size, 1), 0x55, c->work_size);
    if (c->status == MOE_OK) evaluate_net(c);
    if (c->status == MOE_OK) {
        if (c->criterion < 0) memcpy(dy, c->dy, count * sizeof *dy);
        else if (c->criterion == MOE_CRITERION_CROSS_ENTROPY)
            moe_cross_entropy(NET_TOKENS, (size_t)c->net.d_out, c->pass.y, c->labels, dy);
        else moe_squared_error(NET_TOKENS, (size_t)c->net.d_out, c->pass.y, c->dy, dy);
        net_backward(c, dy);
    }
    if (c->status == MOE_OK) {
        s.evaluate = evaluate_net;
        s.ctx = c;
        s.decisions = &c->decisions;
        for (i = 0; i < c->net.n_tensors; i++) {
            add_variable(&s, c->net.tensors[i].name, c->net.tensors[i].data, c->net.tensors[i].gradient,
                         c->net.tensors[i].count);
            s.variables[s.n_variables - 1].untouched =
                (c->net.tensors[i].flags & (MOE_PARAM_FROZEN | MOE_PARAM_STATE)) != 0;
        }
        add_variable(&s, "x", c->x, c->dx, NET_TOKENS * (size_t)c->net.d_in);
        check_subject(&s, "nets", name);
    } else report("nets", name, 0, moe_status_text(c->status));
    free(c->decisions.bytes);
    free(c->work);
    free(c->x);
    free(c->dx);
    free(c->dy);
    free(dy);
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
    m.router.loss_balance = 0.1;
    m.router.loss_z = 0.05;
    return m;
}

/* Logits that go from mixture to mixture: plain, through a mask, through noise. */
static void check_residual_nets(void) {
    int with, i;
    for (with = 0; with < 3; with++) {
        moe_layer_config m = net_mixture();
        net_case c;
        double *noise;
        m.router.router_residual = 1;
        m.router.n_copy = m.router.n_constant = with == 1;
        m.router.loss_z = 0.3;
        if (with == 2) m.router.noise = MOE_NOISE_GAUSSIAN;
        start_net(&c, 5);
        moe_net_mixture(&c.net, &m);
        moe_net_residual(&c.net, 1);
        m.router.noise = 0;
        if (with == 2) m.router.score = MOE_SCORE_COSINE;
        for (i = 0; i < 2; i++) {
            moe_net_mixture(&c.net, &m);
            moe_net_residual(&c.net, 1);
        }
        for (i = 0; i < NET_TOKENS; i++) c.mask[i] = i % 3 != 0;
        if (with == 1) c.call.mask = c.mask;
        c.call.noise = noise = normals((size_t)NET_TOKENS * (size_t)m.router.n_experts, 0.5);
        check_net("logits of the mixture before it", &c);
        free(noise);
    }
}

/* Nets of several mixtures, masks, tables and teachers. */
static void check_deep_nets(void) {
    net_case c;
    moe_layer_config m = net_mixture();
    double *teacher;
    int act, criterion;
    for (criterion = 0; criterion < MOE_CRITERION_COUNT; criterion++) {
        m = net_mixture();
        start_net(&c, 4);
        c.criterion = criterion;
        moe_net_linear(&c.net, 5);
        moe_net_activation(&c.net, MOE_ACT_GELU);
        moe_net_layer_norm(&c.net);
        moe_net_mixture(&c.net, &m);
        moe_net_residual(&c.net, 2);
        m.expert = MOE_EXPERT_MLP;
        m.act = MOE_ACT_TANH;
        m.router.score = MOE_SCORE_COSINE;
        m.router.cosine_dim = 3;
        m.router.cosine_learn_tau = 1;
        moe_net_layer_norm(&c.net);
        moe_net_mixture(&c.net, &m);
        moe_net_residual(&c.net, 2);
        moe_net_layer_norm(&c.net);
        moe_net_linear(&c.net, 3);
        check_net(criterion ? "two mixtures, squared error" : "two mixtures, cross entropy", &c);
    }
    m = net_mixture();
    start_net(&c, 5);
    moe_net_mixture(&c.net, &m);
    moe_net_residual(&c.net, 1);
    for (act = 0; act < NET_TOKENS; act++) c.mask[act] = act % 3 != 0;
    c.call.mask = c.mask;
    check_net("mask", &c);
    for (act = MOE_AC_RUNNING; act <= MOE_AC_RANDOM; act++) { /* tables that do not move with what is before them */
        m = net_mixture();
        start_net(&c, 5);
        moe_net_mixture(&c.net, &m);
        moe_net_residual(&c.net, 1);
        m.router.input = MOE_INPUT_ADAPTIVE_CLUSTERING;
        m.router.ac_mode = act;
        m.add_input = act == MOE_AC_RANDOM;
        moe_net_mixture(&c.net, &m);
        moe_net_residual(&c.net, 1);
        check_net("clusters of the mixture before it", &c);
    }
    m = net_mixture();
    m.router.loss_distill = 0.5;
    m.router.distill = MOE_DISTILL_CE_SOFT;
    start_net(&c, 5);
    moe_net_mixture(&c.net, &m);
    moe_net_residual(&c.net, 1);
    m.router.n_experts = 4;
    m.router.distill = MOE_DISTILL_MSE;
    moe_net_mixture(&c.net, &m);
    c.call.teacher = teacher = normals(NET_TOKENS * 7, 1.0);
    check_net("each mixture has a teacher", &c);
    free(teacher);
}

static void check_nets(void) {
    net_case c;
    moe_layer_config m = net_mixture();
    char name[64];
    int act;
    start_net(&c, 4);
    moe_net_linear(&c.net, 6);
    check_net("linear", &c);
    start_net(&c, 5);
    moe_net_layer_norm(&c.net);
    check_net("layer_norm", &c);
    for (act = 0; act < MOE_ACT_COUNT; act++) {
        sprintf(name, "linear, activation %d", act);
        start_net(&c, 4);
        moe_net_linear(&c.net, 6);
        moe_net_activation(&c.net, act);
        check_net(name, &c);
        sprintf(name, "activation %d first", act);
        start_net(&c, 4);
        moe_net_activation(&c.net, act);
        check_net(name, &c);
    }
    start_net(&c, 5);
    moe_net_mixture(&c.net, &m);
    check_net("mixture", &c);
    start_net(&c, 5);
    moe_net_mixture(&c.net, &m);
    moe_net_residual(&c.net, 1);
    check_net("mixture, residual around it", &c);
    start_net(&c, 5);
    moe_net_linear(&c.net, 5);
    moe_net_layer_norm(&c.net);
    moe_net_mixture(&c.net, &m);
    moe_net_residual(&c.net, 2);
    check_net("linear, norm, mixture, residual over two", &c);
    start_net(&c, 5);
    moe_net_layer_norm(&c.net);
    moe_net_residual(&c.net, 1);
    moe_net_residual(&c.net, 1);
    moe_net_residual(&c.net, 3);
    check_net("residuals over residuals", &c);
    m.d_out = 3;
    start_net(&c, 5);
    moe_net_mixture(&c.net, &m);
    moe_net_linear(&c.net, 4);
    check_net("mixture that changes the width", &c);
    m = net_mixture();
    m.expert = MOE_EXPERT_FACTORISED;
    m.router.score = MOE_SCORE_NORM;
    m.n_shared = 1;
    m.d_shared = 2;
    m.shared_sigmoid = 1;
    start_net(&c, 5);
    moe_net_layer_norm(&c.net);
    moe_net_mixture(&c.net, &m);
    moe_net_residual(&c.net, 2);
    check_net("experts choose themselves", &c);
    check_deep_nets();
    check_residual_nets();
}

int main(int argc, char **argv) {
    verbose = argc > 1 && strcmp(argv[1], "-v") == 0;
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    moe_rng_seed(&rng, 20240607);
    check_rows();
    check_experts();
    check_latent();
    check_norms();
    check_shaped();
    check_grid();
    check_stages();
    check_inputs();
    check_refinement();
    check_selections();
    check_capacity_factors();
    check_soft();
    check_losses();
    check_given();
    check_replay();
    check_by_experts();
    check_add_input();
    check_distill();
    check_dselect();
    check_bound();
    check_learned_threshold();
    check_pairs();
    check_random(quick ? 40 : 1500);
    check_criteria();
    check_nets();
    printf("note: %.0f numbers and directions of %ld cases, %.0f and %ld left out\n", all_numbers, all_cases,
           all_skipped, all_left_out);
    report("all", "left out", all_skipped <= 0.01 * all_numbers && (double)all_left_out <= 0.001 * (double)all_cases,
           "too much");
    return test_end();
}
