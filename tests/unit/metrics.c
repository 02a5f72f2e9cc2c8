/* Tests the metrics of moe_routers.h: cases computed by hand, the definitions written out again
   over random routings, cosine over all pairs, mutual information and its chance value over all
   permutations, masks, empty input, one expert, several calls, wrong arguments.
       cc -std=c99 -O2 -I. tests/unit/metrics.c -o metrics -lm
   Also meant to pass with -DMOE_REAL=double, -DMOE_STATIC, with the sanitizers on, and as C++11. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "moe_routers.h"
#include "../test.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SUM_BOUND 1e-12 /* for values of about 1 that are sums of some hundred doubles */

static const double LN2 = 0.69314718055994530942;

static moe_real not_a_number(void) {
    volatile moe_real zero = 0;
    return zero / zero;
}

static double uniform(moe_rng *rng) { return (double)moe_rng_uniform(rng); }

static int below(moe_rng *rng, int n) { return (int)moe_rng_below(rng, (uint64_t)n); }

/* ---- routings made by hand ---- */

enum { HAND_TOKENS = 64, HAND_EXPERTS = 8 };

typedef struct hand {
    moe_routing routing;
    moe_real p[HAND_TOKENS * HAND_EXPERTS], z[HAND_TOKENS * HAND_EXPERTS];
    int32_t choices[HAND_TOKENS * HAND_EXPERTS], n_choices[HAND_TOKENS];
    size_t offsets[HAND_EXPERTS + 1];
    unsigned char mask[HAND_TOKENS];
} hand;

/* n tokens, no choices, p = 0, z = 0, all real. */
static void hand_begin(hand *h, size_t n, size_t experts, size_t max_choices) {
    size_t t;
    memset(h, 0, sizeof *h);
    h->routing.n_tokens = h->routing.n_real = n;
    h->routing.n_experts = experts;
    h->routing.max_choices = max_choices;
    h->routing.probabilities = h->routing.gate = h->p;
    h->routing.logits = h->z;
    h->routing.choices = h->choices;
    h->routing.n_choices = h->n_choices;
    h->routing.plan.n_tokens = n;
    h->routing.plan.n_experts = experts;
    h->routing.plan.offsets = h->offsets;
    for (t = 0; t < HAND_TOKENS; t++) h->mask[t] = 1;
}

/* One more choice of token t; kept: capacity has room for it. */
static void hand_choose(hand *h, size_t t, int e, int kept) {
    size_t i;
    h->choices[t * h->routing.max_choices + (size_t)h->n_choices[t]++] = e;
    if (!kept) h->routing.n_dropped++;
    for (i = (size_t)e + 1; kept && i <= h->routing.n_experts; i++) h->offsets[i]++;
}

static void hand_gate(hand *h, size_t t, double p0, double p1, double p2) {
    const double p[3] = {p0, p1, p2};
    size_t e;
    for (e = 0; e < 3 && e < h->routing.n_experts; e++) h->p[t * h->routing.n_experts + e] = (moe_real)p[e];
}

static unsigned char memory[1 << 16];

static void begin(moe_metrics *m, size_t experts, size_t classes) {
    CHECK(moe_metrics_init(m, experts, classes, memory, sizeof memory) == MOE_OK);
}

static moe_report report_of(moe_metrics *m) {
    moe_report r;
    memset(&r, 0, sizeof r);
    CHECK(moe_metrics_report(m, &r) == MOE_OK);
    return r;
}

/* ---- reports agree ---- */

static void agree_arrays(size_t n, const double *a, const double *b, double bound, int line, const char *what) {
    size_t i;
    if (a == NULL || b == NULL) {
        CHECK_AT(line, a == b, what);
        return;
    }
    for (i = 0; i < n; i++) CHECK_NEAR_AT(line, a[i], b[i], bound, what);
}

#define AGREE(field) CHECK_NEAR_AT(line, a->field, b->field, SUM_BOUND * (1 + fabs(b->field)), #field)
#define AGREE_EXACTLY(field) CHECK_NEAR_AT(line, a->field, b->field, 0.0, #field)

static void agree(const moe_report *a, const moe_report *b, int line) {
    size_t cells = a->n_experts * a->n_classes;
    CHECK_AT(line, a->n_experts == b->n_experts && a->n_classes == b->n_classes, "sizes");
    AGREE_EXACTLY(n_calls);
    AGREE_EXACTLY(n_tokens);
    AGREE_EXACTLY(n_assignments);
    AGREE_EXACTLY(n_dropped);
    AGREE_EXACTLY(n_classified);
    AGREE(dropped_share);
    AGREE(experts_per_token);
    AGREE(gate_entropy);
    AGREE(usage_entropy);
    AGREE(usage_entropy_calls);
    AGREE(confidence_entropy);
    AGREE(importance_cv2);
    AGREE(load_entropy);
    CHECK_NEAR_AT(line, a->load_balance_score, b->load_balance_score, 1e-9, "load_balance_score"); /* percent */
    AGREE(load_cv2);
    AGREE(load_max_over_mean);
    AGREE(load_max_minus_min);
    AGREE(capacity_use);
    AGREE(first_share_max);
    CHECK_AT(line, a->trivial_gate == b->trivial_gate, "trivial_gate");
    AGREE(information);
    AGREE(information_chance);
    AGREE(information_first);
    AGREE(information_first_chance);
    agree_arrays(a->n_experts, a->load, b->load, 0.0, line, "load");
    agree_arrays(a->n_experts, a->first, b->first, 0.0, line, "first");
    agree_arrays(a->n_experts, a->kept, b->kept, 0.0, line, "kept");
    agree_arrays(a->n_experts, a->mean_gate, b->mean_gate, SUM_BOUND, line, "mean_gate");
    agree_arrays(a->n_experts, a->mean_logit, b->mean_logit, SUM_BOUND, line, "mean_logit");
    agree_arrays(cells, a->classes, b->classes, 0.0, line, "classes");
    agree_arrays(cells, a->first_classes, b->first_classes, 0.0, line, "first_classes");
}

#define AGREE_REPORTS(a, b) agree(a, b, __LINE__)

/* ---- memory ---- */

static void test_memory(void) {
    moe_metrics m;
    moe_report r;
    hand h;
    size_t bytes = 77, shift;
    CHECK(moe_metrics_size(0, 0, &bytes) == MOE_ERR_ARGUMENT);
    CHECK(moe_metrics_size(MOE_MAX_EXPERTS + 1, 0, &bytes) == MOE_ERR_ARGUMENT);
    CHECK(moe_metrics_size(4, (size_t)INT32_MAX + 1, &bytes) == MOE_ERR_ARGUMENT);
    CHECK(moe_metrics_size(4, 3, NULL) == MOE_ERR_ARGUMENT);
    CHECK(bytes == 77);
    CHECK(moe_metrics_size(MOE_MAX_EXPERTS, INT32_MAX, &bytes) == (sizeof(size_t) < 8 ? MOE_ERR_OVERFLOW : MOE_OK));
    CHECK(moe_metrics_size(4, 3, &bytes) == MOE_OK);
    CHECK(bytes >= (8 * 4 + 2 * 12) * sizeof(double) && bytes < 2048);
    memset(&m, 0x5a, sizeof m);
    CHECK(moe_metrics_init(&m, 4, 3, memory, bytes - 1) == MOE_ERR_SPACE);
    CHECK(moe_metrics_init(&m, 4, 3, NULL, bytes) == MOE_ERR_ARGUMENT);
    CHECK(moe_metrics_init(NULL, 4, 3, memory, bytes) == MOE_ERR_ARGUMENT);
    CHECK(moe_metrics_init(&m, 0, 3, memory, bytes) == MOE_ERR_ARGUMENT);
    CHECK(((unsigned char *)&m)[0] == 0x5a && ((unsigned char *)&m)[sizeof m - 1] == 0x5a);
    CHECK(moe_metrics_report(NULL, &r) == MOE_ERR_ARGUMENT);

    /* The exact size is enough at any alignment, and nothing is written behind it. */
    hand_begin(&h, 2, 4, 2);
    hand_choose(&h, 0, 3, 1);
    hand_choose(&h, 1, 0, 1);
    for (shift = 0; shift < 16; shift++) {
        unsigned char *block = (unsigned char *)malloc(bytes + 16);
        const int32_t classes[2] = {2, 0};
        if (!CHECK(block != NULL)) return;
        memset(block, 0xee, bytes + 16);
        CHECK(moe_metrics_init(&m, 4, 3, block + shift, bytes) == MOE_OK);
        CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
        CHECK(moe_metrics_report(&m, &r) == MOE_OK);
        CHECK(moe_metrics_report(&m, NULL) == MOE_ERR_ARGUMENT);
        CHECK_NEAR(r.classes[3 * 3 + 2], 1, 0.0);
        CHECK_NEAR(r.n_classified, 2, 0.0);
        if (shift > 0) CHECK(block[shift - 1] == 0xee);
        CHECK(block[bytes + shift] == 0xee);
        CHECK(moe_metrics_init(&m, 4, 3, block + shift, bytes) == MOE_OK); /* starts anew */
        CHECK(moe_metrics_report(&m, &r) == MOE_OK);
        CHECK_NEAR(r.n_tokens, 0, 0.0);
        CHECK_NEAR(r.classes[3 * 3 + 2], 0, 0.0);
        free(block);
    }
}

/* ---- nothing, one expert ---- */

static void all_zero(const moe_report *r, int line) {
    moe_report zero;
    double nothing[HAND_EXPERTS * 4];
    memset(nothing, 0, sizeof nothing);
    memset(&zero, 0, sizeof zero);
    zero.n_experts = r->n_experts;
    zero.n_classes = r->n_classes;
    zero.load = zero.first = zero.kept = zero.mean_gate = zero.mean_logit = nothing;
    if (r->n_classes > 0) zero.classes = zero.first_classes = nothing;
    agree(r, &zero, line);
}

static void test_empty(void) {
    moe_metrics m;
    moe_report r;
    hand h;
    const int32_t classes[3] = {0, 1, 2};
    begin(&m, 3, 4);
    r = report_of(&m);
    all_zero(&r, __LINE__);
    hand_begin(&h, 0, 3, 2);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, NULL) == MOE_OK);
    r = report_of(&m);
    all_zero(&r, __LINE__);
    hand_begin(&h, 3, 3, 2); /* padding only, with anything in its rows and classes */
    memset(h.mask, 0, 3);
    h.routing.n_real = 0;
    h.p[4] = h.z[4] = not_a_number();
    CHECK(moe_metrics_add(&m, &h.routing, h.mask, classes) == MOE_OK);
    r = report_of(&m);
    all_zero(&r, __LINE__);
    begin(&m, 3, 0); /* without classes the tables are NULL */
    r = report_of(&m);
    all_zero(&r, __LINE__);
    CHECK(r.classes == NULL && r.first_classes == NULL);

    hand_begin(&h, 2, 3, 2); /* real tokens that no expert takes */
    begin(&m, 3, 4);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
    r = report_of(&m);
    CHECK_NEAR(r.n_tokens, 2, 0.0);
    CHECK_NEAR(r.n_classified, 0, 0.0);
    r.n_tokens = r.n_calls = 0;
    all_zero(&r, __LINE__);
}

static void test_one_expert(void) {
    moe_metrics m;
    moe_report r;
    hand h;
    size_t t;
    int32_t classes[5] = {0, 1, 1, 2, 0};
    hand_begin(&h, 5, 1, 1);
    for (t = 0; t < 5; t++) {
        hand_gate(&h, t, 1, 0, 0);
        h.z[t] = (moe_real)t;
        hand_choose(&h, t, 0, 1);
    }
    begin(&m, 1, 3);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
    r = report_of(&m);
    CHECK_NEAR(r.gate_entropy, 0, 0.0);
    CHECK_NEAR(r.usage_entropy, 0, 0.0);
    CHECK_NEAR(r.usage_entropy_calls, 0, 0.0);
    CHECK_NEAR(r.confidence_entropy, 0, 0.0);
    CHECK_NEAR(r.importance_cv2, 0, 0.0);
    CHECK_NEAR(r.load_entropy, 0, 0.0);
    CHECK_NEAR(r.load_balance_score, 0, 0.0);
    CHECK_NEAR(r.load_cv2, 0, 0.0);
    CHECK_NEAR(r.load_max_over_mean, 1, 0.0);
    CHECK_NEAR(r.load_max_minus_min, 0, 0.0);
    CHECK_NEAR(r.capacity_use, 1, 0.0);
    CHECK_NEAR(r.first_share_max, 1, 0.0);
    CHECK(r.trivial_gate == 1);
    CHECK_NEAR(r.information, 0, SUM_BOUND);
    CHECK_NEAR(r.information_chance, 0, SUM_BOUND);
    CHECK_NEAR(r.information_first, 0, SUM_BOUND);
    CHECK_NEAR(r.information_first_chance, 0, SUM_BOUND);
    CHECK_NEAR(r.mean_logit[0], 2, 0.0);
    CHECK_NEAR(r.mean_gate[0], 1, 0.0);
    CHECK_NEAR(r.experts_per_token, 1, 0.0);
}

/* ---- by hand ---- */

/* Four tokens, two experts, top 1, class = expert but once. */
static void test_small(void) {
    moe_metrics m;
    moe_report r;
    hand h;
    const int32_t classes[4] = {0, 0, 1, 0};
    const double h_quarter = 0.56233514461880828870, information = 0.21576155433883570;
    hand_begin(&h, 4, 2, 1);
    hand_gate(&h, 0, 0.5, 0.5, 0);
    hand_gate(&h, 1, 1, 0, 0);
    hand_gate(&h, 2, 0.25, 0.75, 0);
    hand_gate(&h, 3, 0, 1, 0);
    hand_choose(&h, 0, 0, 1);
    hand_choose(&h, 1, 0, 1);
    hand_choose(&h, 2, 1, 1);
    hand_choose(&h, 3, 1, 1);
    h.z[0] = -1;
    h.z[2] = 3;
    h.z[5] = 8;
    begin(&m, 2, 2);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
    r = report_of(&m);
    CHECK_NEAR(r.n_calls, 1, 0.0);
    CHECK_NEAR(r.n_tokens, 4, 0.0);
    CHECK_NEAR(r.n_assignments, 4, 0.0);
    CHECK_NEAR(r.n_dropped, 0, 0.0);
    CHECK_NEAR(r.dropped_share, 0, 0.0);
    CHECK_NEAR(r.experts_per_token, 1, 0.0);
    CHECK_NEAR(r.gate_entropy, (LN2 + h_quarter) / 4, SUM_BOUND);
    CHECK_NEAR(r.confidence_entropy, (LN2 + h_quarter) / 4, SUM_BOUND);
    CHECK_NEAR(r.usage_entropy, -(0.4375 * log(0.4375) + 0.5625 * log(0.5625)), SUM_BOUND);
    CHECK_NEAR(r.usage_entropy_calls, r.usage_entropy, SUM_BOUND);
    CHECK_NEAR(r.importance_cv2, 0.015625, SUM_BOUND); /* I = 1.75, 2.25 */
    CHECK_NEAR(r.load_entropy, LN2, SUM_BOUND);
    CHECK_NEAR(r.load_balance_score, 0, 0.0);
    CHECK_NEAR(r.load_cv2, 0, 0.0);
    CHECK_NEAR(r.load_max_over_mean, 1, 0.0);
    CHECK_NEAR(r.load_max_minus_min, 0, 0.0);
    CHECK_NEAR(r.capacity_use, 1, 0.0);
    CHECK_NEAR(r.first_share_max, 0.5, 0.0);
    CHECK(r.trivial_gate == 0);
    CHECK_NEAR(r.mean_gate[0], 0.4375, 0.0);
    CHECK_NEAR(r.mean_gate[1], 0.5625, 0.0);
    CHECK_NEAR(r.mean_logit[0], 0.5, 0.0);
    CHECK_NEAR(r.mean_logit[1], 2, 0.0);
    CHECK_NEAR(r.classes[0], 2, 0.0);
    CHECK_NEAR(r.classes[1], 0, 0.0);
    CHECK_NEAR(r.classes[2], 1, 0.0);
    CHECK_NEAR(r.classes[3], 1, 0.0);
    /* H(E) = ln 2, H(Y) = H(1/4), H(E,Y) = H(1/2, 1/4, 1/4) = 1.5 ln 2. However the one token of
       class 1 falls, I is the same. */
    CHECK_NEAR(r.information, LN2 + h_quarter - 1.5 * LN2, SUM_BOUND);
    CHECK_NEAR(r.information, information, SUM_BOUND);
    CHECK_NEAR(r.information_chance, r.information, SUM_BOUND);
    CHECK_NEAR(r.information_first, r.information, SUM_BOUND);
    CHECK_NEAR(r.information_first_chance, r.information, SUM_BOUND);
}

static void check_dropped(moe_report *r) {
    moe_metrics m;
    hand h;
    const int32_t classes[5] = {1, 99, 0, -1, 1};
    hand_begin(&h, 5, 3, 2);
    h.mask[1] = 0;
    h.routing.n_real = 4;
    hand_gate(&h, 0, 0.5, 0.5, 0);
    hand_gate(&h, 2, 0.5, 0.25, 0.25);
    hand_gate(&h, 3, 0.5, 0, 0.5);
    hand_gate(&h, 4, 1, 0, 0);
    h.p[3] = h.p[4] = h.z[5] = not_a_number();
    hand_choose(&h, 0, 0, 1);
    hand_choose(&h, 0, 1, 1);
    hand_choose(&h, 2, 0, 1);
    hand_choose(&h, 2, 1, 1);
    hand_choose(&h, 3, 0, 0);
    hand_choose(&h, 3, 2, 1);
    hand_choose(&h, 4, 0, 0);
    begin(&m, 3, 2);
    CHECK(moe_metrics_add(&m, &h.routing, h.mask, classes) == MOE_OK);
    *r = report_of(&m);
    CHECK_NEAR(r->n_tokens, 4, 0.0);
    CHECK_NEAR(r->n_assignments, 7, 0.0);
    CHECK_NEAR(r->n_dropped, 2, 0.0);
    CHECK_NEAR(r->dropped_share, 2.0 / 7, SUM_BOUND);
    CHECK_NEAR(r->experts_per_token, 1.75, 0.0);
    CHECK_NEAR(r->load[0], 4, 0.0);
    CHECK_NEAR(r->load[1], 2, 0.0);
    CHECK_NEAR(r->load[2], 1, 0.0);
    CHECK_NEAR(r->first[0], 4, 0.0);
    CHECK_NEAR(r->first[1], 0, 0.0);
    CHECK_NEAR(r->kept[0], 2, 0.0);
}

/* Three experts, top 2, five tokens of which one is padding and one has a single choice; capacity
   drops two pairs. */
static void test_dropped(void) {
    moe_report r;
    check_dropped(&r);
    CHECK_NEAR(r.kept[1], 2, 0.0);
    CHECK_NEAR(r.kept[2], 1, 0.0);
    CHECK_NEAR(r.capacity_use, 5.0 / 6, SUM_BOUND); /* C = 2 */
    CHECK_NEAR(r.gate_entropy, (LN2 + 1.5 * LN2 + LN2 + 0) / 4, SUM_BOUND);
    CHECK_NEAR(r.mean_gate[0], 0.625, 0.0);
    CHECK_NEAR(r.mean_gate[1], 0.1875, 0.0);
    CHECK_NEAR(r.mean_gate[2], 0.1875, 0.0);
    /* Percentages 100, 50, 25: mean 58.333, variance (41.667^2 + 8.333^2 + 33.333^2) / 3 =
       972.22 */
    CHECK_NEAR(r.load_balance_score, 31.180478223116176, 1e-10);
    CHECK_NEAR(r.load_cv2, 972.2222222222222 / (58.333333333333336 * 58.333333333333336), 1e-12);
    CHECK_NEAR(r.load_max_over_mean, 4 / (7.0 / 3), SUM_BOUND);
    CHECK_NEAR(r.load_max_minus_min, 3.0 / 7, SUM_BOUND);
    CHECK_NEAR(r.load_entropy, -(4.0 / 7 * log(4.0 / 7) + 2.0 / 7 * log(2.0 / 7) + 1.0 / 7 * log(1.0 / 7)), SUM_BOUND);
    CHECK(r.trivial_gate == 1);
    CHECK_NEAR(r.first_share_max, 1, 0.0);
    CHECK_NEAR(r.n_classified, 3, 0.0);
    CHECK_NEAR(r.classes[0], 1, 0.0);
    CHECK_NEAR(r.classes[1], 2, 0.0);
    CHECK_NEAR(r.classes[2], 1, 0.0);
    CHECK_NEAR(r.classes[3], 1, 0.0);
    CHECK_NEAR(r.classes[4], 0, 0.0);
    CHECK_NEAR(r.classes[5], 0, 0.0);
    CHECK_NEAR(r.first_classes[0], 1, 0.0);
    CHECK_NEAR(r.first_classes[1], 2, 0.0);
    CHECK_NEAR(r.first_classes[2] + r.first_classes[3] + r.first_classes[4] + r.first_classes[5], 0, 0.0);
    CHECK_NEAR(r.information_first, 0, 0.0);
}

static void check_even_and_single(moe_metrics *m, hand *h) {
    moe_report r;
    size_t t;
    r = report_of(m);
    CHECK_NEAR(r.gate_entropy, 0, 0.0);
    CHECK_NEAR(r.usage_entropy, 0, 0.0);
    CHECK_NEAR(r.confidence_entropy, 0, 0.0);
    CHECK_NEAR(r.load_entropy, 0, 0.0);
    CHECK_NEAR(r.importance_cv2, 7, 0.0);
    CHECK_NEAR(r.load_cv2, 7, 0.0);
    CHECK_NEAR(r.load_balance_score, 33.07189138830738, 1e-12); /* 12.5 sqrt 7 */
    CHECK_NEAR(r.load_max_over_mean, 8, 0.0);
    CHECK_NEAR(r.load_max_minus_min, 1, 0.0);
    CHECK_NEAR(r.capacity_use, 0.125, 0.0);
    CHECK(r.trivial_gate == 1);
    CHECK_NEAR(r.information, 0, SUM_BOUND);
    CHECK_NEAR(r.information_chance, 0, SUM_BOUND);

    /* Decided gates that use all experts evenly: H_b = 0, H_e = ln 8; in calls of one token H_e per
       call is 0. */
    begin(m, 8, 0);
    for (t = 0; t < 64; t++) {
        hand_begin(h, 1, 8, 1);
        h->p[t % 8] = 1;
        hand_choose(h, 0, (int)(t % 8), 1);
        CHECK(moe_metrics_add(m, &h->routing, NULL, NULL) == MOE_OK);
    }
    r = report_of(m);
    CHECK_NEAR(r.n_calls, 64, 0.0);
    CHECK_NEAR(r.gate_entropy, 0, 0.0);
    CHECK_NEAR(r.usage_entropy, 3 * LN2, SUM_BOUND);
    CHECK_NEAR(r.usage_entropy_calls, 0, 0.0);

    /* H_e per call is the mean of the calls' entropies. */
    begin(m, 2, 0);
    for (t = 0; t < 2; t++) {
        hand_begin(h, 1, 2, 1);
        hand_gate(h, 0, t == 0 ? 0.5 : 0.25, t == 0 ? 0.5 : 0.75, 0);
        hand_choose(h, 0, 0, 1);
        CHECK(moe_metrics_add(m, &h->routing, NULL, NULL) == MOE_OK);
    }
    r = report_of(m);
    CHECK_NEAR(r.usage_entropy_calls, (LN2 + 0.56233514461880828870) / 2, SUM_BOUND);
}

static void test_extremes(void) {
    moe_metrics m;
    moe_report r;
    hand h;
    size_t t, e;
    int32_t classes[64];
    /* Uniform: every token a different one of 8 experts, even gates, the class is the expert. */
    hand_begin(&h, 64, 8, 1);
    for (t = 0; t < 64; t++) {
        for (e = 0; e < 8; e++) h.p[t * 8 + e] = (moe_real)0.125;
        hand_choose(&h, t, (int)(t % 8), 1);
        classes[t] = (int32_t)(7 - t % 8);
    }
    begin(&m, 8, 8);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
    r = report_of(&m);
    CHECK_NEAR(r.gate_entropy, 3 * LN2, SUM_BOUND);
    CHECK_NEAR(r.usage_entropy, 3 * LN2, SUM_BOUND);
    CHECK_NEAR(r.confidence_entropy, 3 * LN2, SUM_BOUND);
    CHECK_NEAR(r.load_entropy, 3 * LN2, SUM_BOUND);
    CHECK_NEAR(r.importance_cv2, 0, 0.0);
    CHECK_NEAR(r.load_cv2, 0, 0.0);
    CHECK_NEAR(r.load_balance_score, 0, 0.0);
    CHECK_NEAR(r.load_max_over_mean, 1, 0.0);
    CHECK_NEAR(r.load_max_minus_min, 0, 0.0);
    CHECK_NEAR(r.capacity_use, 1, 0.0);
    CHECK_NEAR(r.first_share_max, 0.125, 0.0);
    CHECK_NEAR(r.information, 3 * LN2, SUM_BOUND);
    CHECK(r.information_chance > 0.2 && r.information_chance < 0.6); /* 49 / 128 to first order */
    for (t = 0; t < 64; t++) classes[t] = (int32_t)(t / 8); /* the class says nothing about the expert */
    begin(&m, 8, 8);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
    r = report_of(&m);
    CHECK_NEAR(r.information, 0, SUM_BOUND);

    /* All to expert 2, decided gates. */
    hand_begin(&h, 64, 8, 1);
    for (t = 0; t < 64; t++) {
        h.p[t * 8 + 2] = 1;
        hand_choose(&h, t, 2, 1);
    }
    begin(&m, 8, 8);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
    check_even_and_single(&m, &h);
}

/* 95 % is not yet trivial, 96 % is; tokens without an expert do not count. */
static void test_trivial_gate(void) {
    int others;
    for (others = 0; others < 5; others++) {
        moe_metrics m;
        moe_report r;
        hand h;
        int call, t;
        begin(&m, 2, 0);
        for (call = 0; call < 5; call++) { /* 100 tokens with an expert, 5 without */
            hand_begin(&h, 21, 2, 1);
            for (t = 0; t < 20; t++) hand_choose(&h, (size_t)t, call < others && t == 0 ? 1 : 0, 1);
            CHECK(moe_metrics_add(&m, &h.routing, NULL, NULL) == MOE_OK);
        }
        r = report_of(&m);
        CHECK_NEAR(r.first_share_max, 1 - 0.01 * others, SUM_BOUND);
        CHECK(r.trivial_gate == 1);
        hand_begin(&h, 20, 2, 1);
        for (t = 0; t < 5 - others; t++) hand_choose(&h, (size_t)t, 1, 1);
        for (; t < 20; t++) hand_choose(&h, (size_t)t, 0, 1);
        CHECK(moe_metrics_add(&m, &h.routing, NULL, NULL) == MOE_OK); /* 5 of 120 at expert 1 */
        r = report_of(&m);
        CHECK_NEAR(r.first_share_max, 115.0 / 120, SUM_BOUND);
        CHECK(r.trivial_gate == 1);
        hand_begin(&h, 1, 2, 1);
        hand_choose(&h, 0, 1, 1);
        CHECK(moe_metrics_add(&m, &h.routing, NULL, NULL) == MOE_OK);
        CHECK(moe_metrics_add(&m, &h.routing, NULL, NULL) == MOE_OK); /* 7 of 122 */
        r = report_of(&m);
        CHECK_NEAR(r.first_share_max, 115.0 / 122, SUM_BOUND);
        CHECK(r.trivial_gate == 0);
    }
}

/* Gates whose rows do not sum to 1, and negative ones. */
static void test_other_gates(void) {
    moe_metrics m;
    moe_report r;
    hand h;
    hand_begin(&h, 2, 3, 1);
    hand_gate(&h, 0, 0.5, 0.5, 0.5);
    hand_gate(&h, 1, 0, 0, 0); /* relu may give nothing at all */
    hand_choose(&h, 0, 0, 1);
    begin(&m, 3, 0);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, NULL) == MOE_OK);
    r = report_of(&m);
    CHECK_NEAR(r.gate_entropy, 1.5 * LN2 / 2, SUM_BOUND);
    CHECK_NEAR(r.confidence_entropy, log(3.0) / 2, SUM_BOUND);
    CHECK_NEAR(r.usage_entropy, 0.75 * log(4.0), SUM_BOUND);
    CHECK_NEAR(r.mean_gate[2], 0.25, 0.0);
    CHECK_NEAR(r.experts_per_token, 0.5, 0.0);
    CHECK_NEAR(r.first_share_max, 1, 0.0);
    hand_gate(&h, 1, -2, 0.25, 0.25);
    begin(&m, 3, 0);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, NULL) == MOE_OK);
    r = report_of(&m);
    CHECK_NEAR(r.gate_entropy, (1.5 * LN2 + LN2) / 2, SUM_BOUND);
    CHECK_NEAR(r.confidence_entropy, (log(3.0) + LN2) / 2, SUM_BOUND);
    CHECK_NEAR(r.mean_gate[0], -0.75, 0.0);
    CHECK_NEAR(r.usage_entropy, -2 * 0.375 * log(0.375), SUM_BOUND);
}

/* Soft: p of an expert is the sum over its slots of combine weights, however many slots it has. */
static void test_soft(void) {
    enum { EXPERTS = 3, SLOTS = 3, TOKENS = 5, D = 4 };
    static unsigned char workspace[1 << 14];
    moe_real weight[EXPERTS * SLOTS * D], x[TOKENS * D];
    moe_router_config c;
    moe_router router;
    moe_routing routing;
    moe_metrics m;
    moe_report r;
    moe_call call;
    moe_rng rng = {3};
    int slots, e, i, t;
    for (i = 0; i < EXPERTS * SLOTS * D; i++) weight[i] = 3 * moe_rng_normal(&rng);
    for (i = 0; i < TOKENS * D; i++) x[i] = moe_rng_normal(&rng);
    memset(&call, 0, sizeof call);
    call.n_tokens = TOKENS;
    call.x = x;
    for (slots = 1; slots <= SLOTS; slots++) {
        memset(&c, 0, sizeof c);
        c.d_model = D;
        c.n_experts = EXPERTS;
        c.select = MOE_SELECT_SOFT;
        c.slots = slots;
        CHECK(moe_router_init(&router, &c, NULL, NULL) == MOE_OK);
        router.tensors[MOE_ROUTER_SLOT_VECTORS] = weight;
        CHECK(moe_route(&router, &call, workspace, sizeof workspace, &routing) == MOE_OK);
        begin(&m, EXPERTS, 0);
        CHECK(moe_metrics_add(&m, &routing, NULL, NULL) == MOE_OK);
        r = report_of(&m);
        for (e = 0; e < EXPERTS; e++) {
            double sum = 0;
            for (t = 0; t < TOKENS; t++)
                for (i = e * slots; i < (e + 1) * slots; i++)
                    sum += (double)routing.probabilities[t * EXPERTS * slots + i];
            CHECK_NEAR(r.mean_gate[e], sum / TOKENS, 1e-6);
            CHECK_NEAR(r.mean_logit[e], 0, 0.0);
        }
        CHECK_NEAR(r.gate_entropy, r.confidence_entropy, 1e-5);
        routing.weights = NULL;
        CHECK(moe_metrics_add(&m, &routing, NULL, NULL) == MOE_ERR_ARGUMENT);
    }
}

/* ---- a batch with global routing ---- */

/* Token `from` of a batch, which is padding if it is 4: token t of h. */
static void hand_token(hand *h, size_t t, int from) {
    size_t e;
    hand_gate(h, t, 0.1 * from, 0.9 - 0.1 * from, 0.1);
    for (e = 0; e < 3; e++) h->z[t * 3 + e] = (moe_real)(from - (int)e * 2);
    h->mask[t] = from != 4;
    if (from == 4) return;
    hand_choose(h, t, from % 3, 1);
    hand_choose(h, t, (from + 1) % 3, from % 2);
}

/* Of a batch, only the call's own tokens are added: as from a routing that holds nothing else. */
static void test_own_tokens(void) {
    enum { FIRST = 2, OWN = 4, ALL = 7 };
    static const int32_t classes[OWN] = {1, 0, -1, 1};
    static unsigned char second[sizeof memory];
    unsigned char kept[2 * ALL], selected[3 * ALL] = {0};
    moe_real weights[3 * ALL] = {0}, choice_weights[2 * ALL] = {0};
    moe_metrics m, m_batch;
    moe_report wanted, got;
    hand own, batch;
    size_t t;
    hand_begin(&own, OWN, 3, 2);
    hand_begin(&batch, ALL, 3, 2);
    for (t = 0; t < ALL; t++) {
        hand_token(&batch, t, (int)t);
        kept[2 * t] = 1;
        kept[2 * t + 1] = (unsigned char)(t % 2);
    }
    for (t = 0; t < OWN; t++) hand_token(&own, t, (int)t + FIRST);
    own.routing.n_real = OWN - 1;
    batch.routing.n_real = ALL - 1;
    batch.routing.first = FIRST;
    batch.routing.plan = own.routing.plan;
    batch.routing.kept = kept;
    batch.routing.selected = selected;
    batch.routing.weights = weights;
    batch.routing.choice_weights = choice_weights;
    begin(&m, 3, 2);
    CHECK(moe_metrics_init(&m_batch, 3, 2, second, sizeof second) == MOE_OK);
    CHECK(moe_metrics_add(&m, &own.routing, own.mask, classes) == MOE_OK);
    CHECK(moe_metrics_add(&m_batch, &batch.routing, own.mask, classes) == MOE_OK);
    wanted = report_of(&m);
    got = report_of(&m_batch);
    AGREE_REPORTS(&got, &wanted);
    CHECK(got.n_tokens > 2 && got.n_tokens < 4 && got.n_dropped > 0);
}

/* ---- wrong arguments ---- */

static void refuse_routings(moe_metrics *m, hand *h, const int32_t *classes) {
    int32_t bad[3] = {1, -1, 2};
    CHECK(moe_metrics_add(NULL, &h->routing, NULL, classes) == MOE_ERR_ARGUMENT);
    CHECK(moe_metrics_add(m, NULL, NULL, classes) == MOE_ERR_ARGUMENT);
    CHECK(moe_metrics_add(m, &h->routing, NULL, bad) == MOE_ERR_ARGUMENT);
    bad[2] = -2;
    CHECK(moe_metrics_add(m, &h->routing, NULL, bad) == MOE_ERR_ARGUMENT);
    h->mask[2] = 0; /* the routing has three real tokens */
    CHECK(moe_metrics_add(m, &h->routing, h->mask, classes) == MOE_ERR_ARGUMENT);
    h->mask[1] = 0;
    h->mask[2] = 1;
    h->routing.n_real = 2; /* padding that was routed */
    CHECK(moe_metrics_add(m, &h->routing, h->mask, classes) == MOE_ERR_ARGUMENT);
    h->routing.n_real = 3;
    h->choices[0] = 3;
    CHECK(moe_metrics_add(m, &h->routing, NULL, classes) == MOE_ERR_ARGUMENT);
    h->choices[0] = -1;
    CHECK(moe_metrics_add(m, &h->routing, NULL, classes) == MOE_ERR_ARGUMENT);
    h->choices[0] = 0;
    h->n_choices[0] = 3;
    CHECK(moe_metrics_add(m, &h->routing, NULL, classes) == MOE_ERR_ARGUMENT);
    h->n_choices[0] = -1;
    CHECK(moe_metrics_add(m, &h->routing, NULL, classes) == MOE_ERR_ARGUMENT);
    h->n_choices[0] = 2;
    h->routing.logits = NULL;
    CHECK(moe_metrics_add(m, &h->routing, NULL, classes) == MOE_ERR_ARGUMENT);
    h->routing.logits = h->z;
    h->routing.plan.offsets = NULL;
    CHECK(moe_metrics_add(m, &h->routing, NULL, classes) == MOE_ERR_ARGUMENT);
    h->routing.plan.offsets = h->offsets;
    h->routing.n_experts = 2;
    CHECK(moe_metrics_add(m, &h->routing, NULL, classes) == MOE_ERR_SHAPE);
}

static void test_arguments(void) {
    moe_metrics m;
    moe_report before, after;
    hand h;
    double load[3], gate[3], table[6];
    const int32_t classes[3] = {1, -1, 0};
    begin(&m, 3, 2);
    hand_begin(&h, 3, 3, 2);
    hand_gate(&h, 0, 0.5, 0.25, 0.25);
    hand_choose(&h, 0, 0, 1);
    hand_choose(&h, 0, 2, 1);
    hand_choose(&h, 1, 1, 1);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
    before = report_of(&m);
    memcpy(load, before.load, sizeof load);
    memcpy(gate, before.mean_gate, sizeof gate);
    memcpy(table, before.classes, sizeof table);

    refuse_routings(&m, &h, classes);
    h.routing.n_experts = 3;

    after = report_of(&m); /* nothing has changed */
    CHECK(memcmp(load, after.load, sizeof load) == 0);
    CHECK(memcmp(gate, after.mean_gate, sizeof gate) == 0);
    CHECK(memcmp(table, after.classes, sizeof table) == 0);
    AGREE_REPORTS(&before, &after);
    CHECK_NEAR(after.n_tokens, 3, 0.0);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, NULL) == MOE_OK); /* a call without classes among those with */
    after = report_of(&m);
    CHECK_NEAR(after.n_tokens, 6, 0.0);
    CHECK_NEAR(after.n_classified, 1, 0.0);
    begin(&m, 3, 0);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_ERR_ARGUMENT); /* there is no room for classes */
}

/* ---- mutual information ---- */

/* sum p(i,j) ln( p(i,j) / (p(i) p(j)) ) */
static double information_by_definition(size_t rows, size_t columns, const double *table) {
    double total = 0, value = 0;
    size_t i, j, k;
    for (i = 0; i < rows * columns; i++) total += table[i];
    for (i = 0; i < rows; i++)
        for (j = 0; j < columns; j++) {
            double row = 0, column = 0;
            double cell = table[i * columns + j];
            for (k = 0; k < columns; k++) row += table[i * columns + k];
            for (k = 0; k < rows; k++) column += table[k * columns + j];
            if (cell > 0) value += cell / total * log(cell * total / (row * column));
        }
    return value;
}

static void test_information(void) {
    const double diagonal[9] = {5, 0, 0, 0, 5, 0, 0, 0, 5}, product[6] = {2, 4, 6, 3, 6, 9};
    const double empty[4] = {0, 0, 0, 0};
    double table[48], value = -1;
    moe_rng rng;
    int trial;
    moe_rng_seed(&rng, 5);
    CHECK(moe_mutual_information(3, 3, diagonal, &value) == MOE_OK);
    CHECK_NEAR(value, log(3.0), SUM_BOUND);
    CHECK(moe_mutual_information(2, 3, product, &value) == MOE_OK);
    CHECK_NEAR(value, 0, SUM_BOUND);
    CHECK(value >= 0);
    CHECK(moe_mutual_information(2, 2, empty, &value) == MOE_OK);
    CHECK_NEAR(value, 0, 0.0);
    CHECK(moe_mutual_information(0, 5, NULL, &value) == MOE_OK);
    CHECK_NEAR(value, 0, 0.0);
    for (trial = 0; trial < 9; trial++) { /* n ln n of these is infinite */
        table[trial] = diagonal[trial] * 1e306;
        table[9 + trial] = product[trial % 6] * 4e306;
    }
    CHECK(moe_mutual_information(3, 3, table, &value) == MOE_OK);
    CHECK_NEAR(value, log(3.0), SUM_BOUND);
    CHECK(moe_mutual_information(2, 3, table + 9, &value) == MOE_OK);
    CHECK_NEAR(value, 0, SUM_BOUND);
    for (trial = 0; trial < 200; trial++) {
        size_t rows = 1 + (size_t)below(&rng, 8), columns = 1 + (size_t)below(&rng, 6), i;
        for (i = 0; i < rows * columns; i++)
            table[i] = below(&rng, 3) == 0 ? 0 : (double)below(&rng, trial % 2 ? 4 : 1000);
        table[0] += 1;
        CHECK(moe_mutual_information(rows, columns, table, &value) == MOE_OK);
        CHECK_NEAR(value, information_by_definition(rows, columns, table), SUM_BOUND);
    }
    value = 7;
    CHECK(moe_mutual_information(2, 2, NULL, &value) == MOE_ERR_ARGUMENT);
    CHECK(moe_mutual_information(2, 2, diagonal, NULL) == MOE_ERR_ARGUMENT);
    table[0] = -1;
    CHECK(moe_mutual_information(2, 2, table, &value) == MOE_ERR_ARGUMENT);
    table[0] = (double)not_a_number();
    CHECK(moe_mutual_information(1, 1, table, &value) == MOE_ERR_NONFINITE);
    table[0] = HUGE_VAL;
    CHECK(moe_mutual_information(1, 1, table, &value) == MOE_ERR_NONFINITE);
    table[0] = table[1] = 1e308;
    CHECK(moe_mutual_information(1, 2, table, &value) == MOE_ERR_NONFINITE);
    CHECK(moe_mutual_information((size_t)-1 / 2, 8, diagonal, &value) == MOE_ERR_OVERFLOW);
    CHECK_NEAR(value, 7, 0.0);
}

enum { SAMPLE_TOKENS = 7 };

/* A routing of SAMPLE_TOKENS tokens over 3 experts with its classes, and sums of I over orders of
   the classes. */
typedef struct sample {
    hand h;
    int32_t classes[SAMPLE_TOKENS];
    double sum, sum_first;
    long count;
} sample;

static void sample_add(sample *s) {
    moe_metrics m;
    double information = 0, first = 0;
    if (moe_metrics_init(&m, 3, 3, memory, sizeof memory) != MOE_OK ||
        moe_metrics_add(&m, &s->h.routing, NULL, s->classes) != MOE_OK)
        CHECK(0);
    if (moe_mutual_information(3, 3, m.classes, &information) != MOE_OK ||
        moe_mutual_information(3, 3, m.first_classes, &first) != MOE_OK)
        CHECK(0);
    s->sum += information;
    s->sum_first += first;
    s->count++;
}

/* All orders of the classes from place `at` on. */
static void sample_permute(sample *s, int at) {
    int i;
    if (at == SAMPLE_TOKENS) {
        sample_add(s);
        return;
    }
    for (i = at; i < SAMPLE_TOKENS; i++) {
        int32_t c = s->classes[at];
        s->classes[at] = s->classes[i];
        s->classes[i] = c;
        sample_permute(s, at + 1);
        c = s->classes[at];
        s->classes[at] = s->classes[i];
        s->classes[i] = c;
    }
}

static void sample_choose(sample *s, moe_rng *rng, size_t t, int k) {
    int order[3] = {0, 1, 2}, i;
    for (i = 0; i < k; i++) {
        int j = i + below(rng, 3 - i), e = order[j];
        order[j] = order[i];
        order[i] = e;
        hand_choose(&s->h, t, e, 1);
    }
}

/* The chance value is the mean over all 7! orders: exactly for 1, 2, 3 experts per token, nearly
   for different numbers. */
static void test_chance_by_permutations(void) {
    moe_rng rng;
    int trial;
    moe_rng_seed(&rng, 11);
    for (trial = 0; trial < 8; trial++) {
        sample s;
        moe_metrics m;
        moe_report r;
        int t, mixed = trial >= 6;
        memset(&s, 0, sizeof s);
        hand_begin(&s.h, SAMPLE_TOKENS, 3, 3);
        for (t = 0; t < SAMPLE_TOKENS; t++) {
            sample_choose(&s, &rng, (size_t)t, mixed ? 1 + below(&rng, 3) : 1 + trial % 3);
            s.classes[t] = below(&rng, 3);
        }
        begin(&m, 3, 3);
        CHECK(moe_metrics_add(&m, &s.h.routing, NULL, s.classes) == MOE_OK);
        r = report_of(&m);
        sample_permute(&s, 0);
        CHECK(s.count == 5040);
        CHECK_NEAR(r.information_first_chance, s.sum_first / (double)s.count, SUM_BOUND);
        CHECK_NEAR(r.information_chance, s.sum / (double)s.count, mixed ? 2e-3 : SUM_BOUND);
    }
}

/* A class that no token has changes nothing, not even where tokens have different numbers of
   experts. */
static void test_chance_of_an_empty_class(void) {
    static const int32_t classes[6] = {0, 0, 2, 2, 2, 0}, close[6] = {0, 0, 1, 1, 1, 0};
    moe_metrics m;
    moe_report r, without;
    hand h;
    size_t t;
    hand_begin(&h, 6, 3, 3);
    for (t = 0; t < 6; t++) {
        hand_choose(&h, t, (int)(t % 3), 1);
        if (t > 3) hand_choose(&h, t, (int)((t + 1) % 3), 1);
    }
    begin(&m, 3, 2);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, close) == MOE_OK);
    without = report_of(&m);
    begin(&m, 3, 3);
    CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
    r = report_of(&m);
    CHECK(without.information_chance > 0);
    CHECK_NEAR(r.information_chance, without.information_chance, SUM_BOUND);
    CHECK_NEAR(r.information_first_chance, without.information_first_chance, SUM_BOUND);
}

/* Many tokens: the chance value is near (E-1)(classes-1) / (2 N), and labels drawn without regard
   to the expert show about that much. */
static void test_chance_of_many(void) {
    moe_metrics m;
    moe_report r;
    moe_rng rng;
    hand h;
    size_t call, t;
    int32_t classes[64];
    moe_rng_seed(&rng, 12);
    begin(&m, 4, 5);
    for (call = 0; call < 1000; call++) {
        hand_begin(&h, 64, 4, 3);
        for (t = 0; t < 64; t++) {
            int e = below(&rng, 4), k = 1 + below(&rng, 3), i;
            for (i = 0; i < k; i++) hand_choose(&h, t, (e + i) % 4, 1);
            classes[t] = below(&rng, 5);
        }
        CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
    }
    r = report_of(&m);
    CHECK_NEAR(r.n_classified, 64000, 0.0);
    CHECK_NEAR(r.information_first_chance, 12.0 / (2 * 64000), 1e-8);
    CHECK_NEAR(r.information_first, r.information_first_chance, 8e-5);
    /* a token's experts differ: less scatter */
    CHECK(r.information_chance > 0 && r.information_chance < r.information_first_chance);
    CHECK_NEAR(r.information, r.information_chance, 8e-5);
    {   /* Shuffled labels, some hundred times: the mean is the chance value. */
        enum { SHUFFLES = 400, TOKENS = 60 };
        double sum = 0;
        size_t shuffle;
        hand_begin(&h, TOKENS, 4, 3);
        for (t = 0; t < TOKENS; t++) {
            int e = below(&rng, 4), k = 1 + below(&rng, 3), i;
            for (i = 0; i < k; i++) hand_choose(&h, t, (e + i) % 4, 1);
            classes[t] = below(&rng, 5);
        }
        for (shuffle = 0; shuffle < SHUFFLES; shuffle++) {
            begin(&m, 4, 5);
            for (t = TOKENS - 1; t > 0; t--) {
                size_t other = (size_t)below(&rng, (int)t + 1);
                int32_t c = classes[t];
                classes[t] = classes[other];
                classes[other] = c;
            }
            CHECK(moe_metrics_add(&m, &h.routing, NULL, classes) == MOE_OK);
            r = report_of(&m);
            sum += r.information;
        }
        CHECK_NEAR(sum / SHUFFLES, r.information_chance, 0.1 * r.information_chance);
    }
}

/* ---- random routings against the definitions, written out again ---- */

enum { MAX_N = 48, MAX_E = 8, D = 5, Y = 4, WIDTH = 3 };

typedef struct setting {
    const char *name, *fields;
} setting;

static const setting settings[] = {
    {"top 2", ""},
    {"top 1", "top_k=1"},
    {"sigmoid", "gate=sigmoid weight=sum top_k=3"},
    {"relu", "gate=relu weight=raw"},
    {"identity", "gate=identity weight=raw"},
    {"dense", "select=dense weight=raw"},
    {"given", "select=given top_k=2 weight=raw"},
    {"cosine", "score=cosine cosine_tau=0.3"},
    {"norm", "score=norm weight=raw"},
    {"one expert", "n_experts=1 weight=raw"},
};

typedef struct batch {
    moe_router router;
    moe_call call;
    moe_routing routing;
    moe_real x[MAX_N * D], weight[MAX_E * D], nodes[MAX_E * MAX_N * WIDTH];
    unsigned char mask[MAX_N];
    int32_t given[MAX_N * 2], classes[MAX_N];
    void *memory;
} batch;

static void random_reals(moe_rng *rng, size_t n, moe_real *v) {
    size_t i;
    for (i = 0; i < n; i++) v[i] = moe_rng_normal(rng);
}

static int batch_make(batch *b, const char *fields, size_t n, uint64_t seed) {
    moe_router_config config;
    moe_error error;
    moe_rng rng;
    size_t t, bytes = 0;
    moe_rng_seed(&rng, seed);
    memset(b, 0, sizeof *b);
    memset(&config, 0, sizeof config);
    config.d_model = D;
    if (moe_fields_apply(moe_router_fields(), &config, fields, &error) != MOE_OK ||
        moe_router_init(&b->router, &config, NULL, &error) != MOE_OK) {
        printf("    %s\n", error.message);
        return CHECK(0);
    }
    random_reals(&rng, n * D, b->x);
    random_reals(&rng, MAX_E * D, b->weight);
    random_reals(&rng, MAX_E * n * WIDTH, b->nodes);
    for (t = 0; t < n; t++) {
        size_t i;
        b->mask[t] = (unsigned char)(below(&rng, 4) != 0);
        b->classes[t] = below(&rng, Y + 1) - 1;
        b->given[2 * t] = below(&rng, MAX_E + 1) - 1; /* -1: none */
        b->given[2 * t + 1] = b->given[2 * t] < 4 ? 4 + below(&rng, 4) : -1;
        if (b->mask[t]) continue;
        b->classes[t] = 1000;
        for (i = 0; i < D; i++) b->x[t * D + i] = not_a_number();
    }
    if (b->router.config.score != MOE_SCORE_NORM) b->router.tensors[MOE_ROUTER_WEIGHT] = b->weight;
    b->call.n_tokens = n;
    b->call.x = b->x;
    b->call.mask = b->mask;
    if (b->router.config.select == MOE_SELECT_GIVEN) b->call.given = b->given;
    if (b->router.config.score == MOE_SCORE_NORM) {
        b->call.activations = b->nodes;
        b->call.activation_width = WIDTH;
    }
    CHECK(moe_route_size(&b->router, n, 0, &bytes) == MOE_OK);
    b->memory = malloc(bytes);
    if (!CHECK(b->memory != NULL)) return 0;
    return CHECK(moe_route(&b->router, &b->call, b->memory, bytes, &b->routing) == MOE_OK);
}

static double entropy_term(double p) { return p > 0 ? -p * log(p) : 0; }

/* What the report of one call must say, from the routing's arrays alone. Arrays of want lie in
   store. */
typedef struct store {
    double load[MAX_E], first[MAX_E], gate[MAX_E], logit[MAX_E], classes[MAX_E * Y], first_classes[MAX_E * Y];
} store;

static void expect_gates(const batch *b, moe_report *want, store *s) {
    const moe_routing *r = &b->routing;
    size_t t, e, experts = r->n_experts;
    double mean = 0, variance = 0;
    for (t = 0; t < r->n_tokens; t++) {
        double mass = 0;
        if (!b->mask[t]) continue;
        want->n_tokens += 1;
        for (e = 0; e < experts; e++) {
            double p = (double)r->probabilities[t * experts + e];
            want->gate_entropy += entropy_term(p);
            s->gate[e] += p;
            s->logit[e] += (double)r->logits[t * experts + e];
            mass += p > 0 ? p : 0;
        }
        for (e = 0; e < experts && mass > 0; e++)
            want->confidence_entropy += entropy_term((double)r->probabilities[t * experts + e] / mass);
    }
    want->gate_entropy /= want->n_tokens;
    want->confidence_entropy /= want->n_tokens;
    for (e = 0; e < experts; e++) {
        s->gate[e] /= want->n_tokens;
        s->logit[e] /= want->n_tokens;
        want->usage_entropy += entropy_term(s->gate[e]);
        mean += s->gate[e] / (double)experts;
    }
    for (e = 0; e < experts; e++) variance += (s->gate[e] - mean) * (s->gate[e] - mean) / (double)experts;
    want->importance_cv2 = variance / (mean * mean);
    want->usage_entropy_calls = want->usage_entropy;
}

static void expect_load(const batch *b, moe_report *want, store *s) {
    const moe_routing *r = &b->routing;
    size_t t, e, experts = r->n_experts, routed = 0;
    double most = 0, least = HUGE_VAL;
    double first = 0, squares = 0;
    for (t = 0; t < r->n_tokens; t++) {
        int any = 0;
        for (e = 0; e < experts; e++) {
            if (!r->selected[t * experts + e]) continue; /* dropless: what is chosen is selected */
            any = 1;
            s->load[e] += 1;
            want->n_assignments += 1;
            if (b->classes[t] >= 0) s->classes[e * Y + (size_t)b->classes[t]] += 1;
        }
        routed += (size_t)any;
        if (any && b->classes[t] >= 0) want->n_classified += 1;
    }
    for (e = 0; e < experts; e++) {
        size_t i;
        for (i = r->plan.offsets[e]; i < r->plan.offsets[e + 1]; i++) {
            const moe_assignment *entry = r->plan.assignments + i;
            if (entry->choice != 0) continue;
            s->first[e] += 1;
            if (b->classes[entry->token] >= 0) s->first_classes[e * Y + (size_t)b->classes[entry->token]] += 1;
        }
    }
    for (e = 0; e < experts; e++) {
        double percent = 100 * s->load[e] / want->n_tokens;
        double even = 100 * want->n_assignments / want->n_tokens / (double)experts;
        CHECK_NEAR(s->load[e], (double)r->counts[e], 0.0);
        CHECK_NEAR(s->first[e], (double)r->first_counts[e], 0.0);
        if (s->load[e] > most) most = s->load[e];
        if (s->load[e] < least) least = s->load[e];
        if (s->first[e] > first) first = s->first[e];
        want->load_entropy += entropy_term(s->load[e] / want->n_assignments);
        squares += (percent - even) * (percent - even) / (double)experts;
    }
    want->experts_per_token = want->n_assignments / want->n_tokens;
    want->load_balance_score = sqrt(squares);
    want->load_cv2 = squares * pow(want->n_tokens / 100 / want->n_assignments * (double)experts, 2);
    want->load_max_over_mean = most / want->n_assignments * (double)experts;
    want->load_max_minus_min = (most - least) / want->n_assignments;
    want->capacity_use = 1 / want->load_max_over_mean;
    want->first_share_max = first / (double)routed;
    want->trivial_gate = want->first_share_max > 0.95;
}

static void expect(const batch *b, moe_report *want, store *s) {
    memset(want, 0, sizeof *want);
    memset(s, 0, sizeof *s);
    want->n_experts = b->routing.n_experts;
    want->n_classes = Y;
    want->n_calls = 1;
    expect_gates(b, want, s);
    expect_load(b, want, s);
    want->load = want->kept = s->load;
    want->first = s->first;
    want->mean_gate = s->gate;
    want->mean_logit = s->logit;
    want->classes = s->classes;
    want->first_classes = s->first_classes;
    want->information = information_by_definition(want->n_experts, Y, s->classes);
    want->information_first = information_by_definition(want->n_experts, Y, s->first_classes);
}

/* z of the score norm is the norm: compare with the activation itself. */
static void check_norm(const batch *b, const moe_report *r) {
    size_t e, t, i;
    for (e = 0; e < r->n_experts; e++) {
        double sum = 0;
        for (t = 0; t < b->call.n_tokens; t++) {
            double squares = 0;
            for (i = 0; i < WIDTH; i++) squares += pow((double)b->nodes[(e * b->call.n_tokens + t) * WIDTH + i], 2);
            if (b->mask[t]) sum += sqrt(squares);
        }
        CHECK_NEAR(r->mean_logit[e], sum / r->n_tokens, MOE_REAL_IS_DOUBLE ? 1e-14 : 1e-6);
    }
}

static void test_random_routings(void) {
    static batch b;
    size_t i;
    uint64_t seed;
    for (i = 0; i < sizeof settings / sizeof settings[0]; i++)
        for (seed = 1; seed <= 3; seed++) {
            moe_metrics m;
            moe_report want, got;
            store s;
            long before = test_wrong;
            if (batch_make(&b, settings[i].fields, 20 + 14 * (size_t)(seed - 1), 100 * i + seed)) {
                begin(&m, b.routing.n_experts, Y);
                CHECK(moe_metrics_add(&m, &b.routing, b.mask, b.classes) == MOE_OK);
                got = report_of(&m);
                expect(&b, &want, &s);
                want.information_chance = got.information_chance; /* tested by themselves */
                want.information_first_chance = got.information_first_chance;
                AGREE_REPORTS(&got, &want);
                CHECK(got.information_chance >= 0 && got.information_first_chance >= 0);
                if (b.router.config.score == MOE_SCORE_NORM) check_norm(&b, &got);
            }
            free(b.memory);
            if (test_wrong > before && test_shown) printf("    in: %s, seed %d\n", settings[i].name, (int)seed);
        }
}

/* The tokens from..to of a routing as a routing of their own. */
static moe_routing part_of(const moe_routing *r, size_t from, size_t to, const unsigned char *mask, size_t *offsets) {
    moe_routing part = *r;
    size_t t, e, i;
    part.n_tokens = to - from;
    part.n_real = 0;
    part.logits += from * r->n_experts;
    part.probabilities += from * r->n_experts;
    part.choices += from * r->max_choices;
    part.n_choices += from;
    part.plan.offsets = offsets;
    for (t = from; t < to; t++) part.n_real += mask[t];
    for (e = 0, offsets[0] = 0; e < r->n_experts; e++) {
        offsets[e + 1] = offsets[e];
        for (i = r->plan.offsets[e]; i < r->plan.offsets[e + 1]; i++)
            if ((size_t)r->plan.assignments[i].token >= from && (size_t)r->plan.assignments[i].token < to)
                offsets[e + 1]++;
    }
    return part;
}

/* In several calls the same comes out as in one, but for what is a mean over calls. */
static void test_several_calls(void) {
    static batch b;
    static unsigned char other[sizeof memory];
    size_t i;
    for (i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        moe_metrics whole, parts;
        moe_report a, c;
        size_t from, to, offsets[MAX_E + 1];
        if (!batch_make(&b, settings[i].fields, MAX_N, 900 + i)) continue;
        begin(&whole, b.routing.n_experts, Y);
        CHECK(moe_metrics_init(&parts, b.routing.n_experts, Y, other, sizeof other) == MOE_OK);
        CHECK(moe_metrics_add(&whole, &b.routing, b.mask, b.classes) == MOE_OK);
        for (from = 0; from < MAX_N; from = to) {
            moe_routing part;
            to = from + 1 + from / 2;
            if (to > MAX_N) to = MAX_N;
            part = part_of(&b.routing, from, to, b.mask, offsets);
            CHECK(moe_metrics_add(&parts, &part, b.mask + from, b.classes + from) == MOE_OK);
            (void)report_of(&parts); /* in between, a report changes nothing */
        }
        a = report_of(&whole);
        c = report_of(&parts);
        CHECK(c.n_calls > 2);
        CHECK(c.usage_entropy_calls <= c.usage_entropy + SUM_BOUND || b.router.config.gate != MOE_GATE_SOFTMAX);
        c.n_calls = a.n_calls;
        c.usage_entropy_calls = a.usage_entropy_calls;
        AGREE_REPORTS(&a, &c);
        free(b.memory);
    }
}

/* ---- fluctuation ---- */

static void test_fluctuation(void) {
    static batch b;
    const int32_t before[6] = {0, 1, 2, -1, 3, 3}, after[6] = {0, 2, 2, 1, 3, 7};
    const unsigned char mask[6] = {1, 1, 1, 0, 1, 0}, none[6] = {0, 0, 0, 0, 0, 0};
    int32_t first[MAX_N];
    double share = -1;
    hand h;
    CHECK(moe_fluctuation(6, before, after, NULL, &share) == MOE_OK);
    CHECK_NEAR(share, 0.5, 0.0);
    CHECK(moe_fluctuation(6, before, after, mask, &share) == MOE_OK);
    CHECK_NEAR(share, 0.25, 0.0);
    CHECK(moe_fluctuation(6, before, before, mask, &share) == MOE_OK);
    CHECK_NEAR(share, 0, 0.0);
    share = -1;
    CHECK(moe_fluctuation(6, before, after, none, &share) == MOE_OK);
    CHECK_NEAR(share, 0, 0.0);
    share = -1;
    CHECK(moe_fluctuation(0, NULL, NULL, NULL, &share) == MOE_OK);
    CHECK_NEAR(share, 0, 0.0);
    share = 7;
    CHECK(moe_fluctuation(6, NULL, after, mask, &share) == MOE_ERR_ARGUMENT);
    CHECK(moe_fluctuation(1, NULL, after, mask, &share) == MOE_ERR_ARGUMENT);
    CHECK(moe_fluctuation(6, before, NULL, mask, &share) == MOE_ERR_ARGUMENT);
    CHECK(moe_fluctuation(6, before, after, mask, NULL) == MOE_ERR_ARGUMENT);
    CHECK_NEAR(share, 7, 0.0);

    hand_begin(&h, 3, 4, 2);
    hand_choose(&h, 0, 3, 1);
    hand_choose(&h, 0, 1, 1);
    hand_choose(&h, 2, 2, 1);
    CHECK(moe_routing_choices(&h.routing, 1, 1, first) == MOE_OK);
    CHECK(first[0] == 3 && first[1] == -1 && first[2] == 2);
    CHECK(moe_routing_choices(NULL, 1, 1, first) == MOE_ERR_ARGUMENT);
    CHECK(moe_routing_choices(&h.routing, 1, 1, NULL) == MOE_ERR_ARGUMENT);
    h.routing.n_tokens = 0;
    CHECK(moe_routing_choices(&h.routing, 1, 1, NULL) == MOE_OK);
    if (batch_make(&b, "", MAX_N, 77)) { /* the first choice is the largest p */
        size_t t, e;
        CHECK(moe_routing_choices(&b.routing, 1, 1, first) == MOE_OK);
        for (t = 0; t < MAX_N; t++) {
            if (!CHECK((first[t] >= 0) == (b.mask[t] != 0)) || first[t] < 0) continue;
            for (e = 0; e < MAX_E; e++)
                CHECK(b.routing.gate[t * MAX_E + e] <= b.routing.gate[t * MAX_E + (size_t)first[t]]);
        }
    }
    free(b.memory);
}

/* ---- cosine ---- */

static double cosine_by_pairs(size_t n, size_t d, const moe_real *x, const unsigned char *mask) {
    double sum = 0, pairs = 0;
    size_t s, t, i;
    for (s = 0; s < n; s++)
        for (t = 0; t < n; t++) {
            double st = 0, ss = 0;
            double tt = 0;
            if (s == t || (mask != NULL && (!mask[s] || !mask[t]))) continue;
            pairs += 1;
            for (i = 0; i < d; i++) {
                st += (double)x[s * d + i] * (double)x[t * d + i];
                ss += (double)x[s * d + i] * (double)x[s * d + i];
                tt += (double)x[t * d + i] * (double)x[t * d + i];
            }
            if (ss > 0 && tt > 0) sum += st / sqrt(ss * tt);
        }
    return pairs > 0 ? sum / pairs : 0;
}

static void cosine_of_some(moe_real *x, double *scratch, moe_rng *rng) {
    enum { MOST = 40, WIDE = 9 };
    unsigned char mask[MOST];
    double value;
    int trial;
    size_t i;
    for (trial = 0; trial < 100; trial++) {
        size_t n = (size_t)below(rng, MOST + 1), d = 1 + (size_t)below(rng, WIDE), t;
        random_reals(rng, n * d, x);
        for (t = 0; t < n; t++) mask[t] = (unsigned char)(trial % 3 == 0 || uniform(rng) < 0.7);
        for (t = 0; t < n; t++)
            for (i = 0; i < d; i++) {
                if (trial % 4 == 1 && t % 5 == 2) x[t * d + i] = 0;
                if (!mask[t]) x[t * d + i] = not_a_number();
            }
        CHECK(moe_token_cosine(n, d, x, trial % 3 == 0 ? NULL : mask, scratch, &value) == MOE_OK);
        CHECK_NEAR(value, cosine_by_pairs(n, d, x, mask), SUM_BOUND);
    }
    /* one direction, lengths far apart */
    for (i = 0; i < 12; i++) x[i] = (moe_real)(i % 3 + 1) * (moe_real)(i < 6 ? 1e30 : 1e-40);
    CHECK(moe_token_cosine(4, 3, x, NULL, scratch, &value) == MOE_OK);
    CHECK_NEAR(value, 1, 1e-4); /* 1e-40 is rounded to a grid of 1e-45 in float */
#if MOE_REAL_IS_DOUBLE
    for (i = 0; i < 12; i++) x[i] = (double)(i % 3 + 1) * (i < 6 ? 1e300 : 1e-300); /* squares of these do not fit */
    CHECK(moe_token_cosine(4, 3, x, NULL, scratch, &value) == MOE_OK);
    CHECK_NEAR(value, 1, SUM_BOUND);
#endif
    x[0] = 3;
    x[1] = 4;
    x[2] = -6;
    x[3] = -8;
}

static void test_cosine(void) {
    enum { MOST = 40, WIDE = 9 };
    moe_real x[MOST * WIDE];
    double scratch[WIDE], value = -9;
    moe_rng rng;
    moe_rng_seed(&rng, 21);
    cosine_of_some(x, scratch, &rng);
    CHECK(moe_token_cosine(2, 2, x, NULL, scratch, &value) == MOE_OK);
    CHECK_NEAR(value, -1, SUM_BOUND);
    CHECK(value >= -1);
    x[2] = 4;
    x[3] = -3;
    CHECK(moe_token_cosine(2, 2, x, NULL, scratch, &value) == MOE_OK);
    CHECK_NEAR(value, 0, SUM_BOUND);
    x[2] = 5;
    x[3] = 0;
    CHECK(moe_token_cosine(2, 2, x, NULL, scratch, &value) == MOE_OK);
    CHECK_NEAR(value, 0.6, SUM_BOUND);
    CHECK(moe_token_cosine(1, 2, x, NULL, scratch, &value) == MOE_OK);
    CHECK_NEAR(value, 0, 0.0);
    value = -9;
    CHECK(moe_token_cosine(0, 2, NULL, NULL, scratch, &value) == MOE_OK);
    CHECK_NEAR(value, 0, 0.0);
    value = -9;
    CHECK(moe_token_cosine(3, 0, NULL, NULL, NULL, &value) == MOE_OK);
    CHECK_NEAR(value, 0, 0.0);
    value = -9;
    x[3] = not_a_number();
    CHECK(moe_token_cosine(2, 2, x, NULL, scratch, &value) == MOE_ERR_NONFINITE);
    CHECK(moe_token_cosine(2, 2, NULL, NULL, scratch, &value) == MOE_ERR_ARGUMENT);
    CHECK(moe_token_cosine(2, 2, x, NULL, NULL, &value) == MOE_ERR_ARGUMENT);
    CHECK(moe_token_cosine(2, 2, x, NULL, scratch, NULL) == MOE_ERR_ARGUMENT);
    CHECK(moe_token_cosine((size_t)-1 / 2, 4, x, NULL, scratch, &value) == MOE_ERR_OVERFLOW);
    CHECK_NEAR(value, -9, 0.0);
}

/* ---- errors of gate and experts ---- */

static void test_errors(void) {
    /* right; gate error; all wrong; right though no expert is; experts without an answer; no label;
       gate error in padding */
    const int32_t predicted[14] = {1, 0, 2, 5, 3, 4, 4, 4, -1, -1, 1, 1, 9, 9};
    const int32_t answers[7] = {1, 5, 0, 2, 7, 1, 0}, labels[7] = {1, 2, 8, 2, 3, -1, 9};
    const unsigned char mask[7] = {1, 1, 1, 1, 1, 1, 0};
    moe_error_shares s;
    CHECK(moe_gate_errors(7, 2, predicted, answers, labels, mask, NULL, &s) == MOE_OK);
    CHECK(s.n_samples == 5);
    CHECK_NEAR(s.error, 0.6, SUM_BOUND);
    CHECK_NEAR(s.gate_error, 0.2, SUM_BOUND);
    CHECK_NEAR(s.expert_error, 0.6, SUM_BOUND);
    /* the last one is a gate error */
    CHECK(moe_gate_errors(7, 2, predicted, answers, labels, NULL, NULL, &s) == MOE_OK);
    CHECK(s.n_samples == 6);
    CHECK_NEAR(s.error, 4.0 / 6, SUM_BOUND);
    CHECK_NEAR(s.gate_error, 2.0 / 6, SUM_BOUND);
    CHECK_NEAR(s.expert_error, 0.5, SUM_BOUND);
    CHECK(moe_gate_errors(7, 0, NULL, answers, labels, mask, NULL, &s) == MOE_OK); /* without experts none is right */
    CHECK_NEAR(s.expert_error, 1, SUM_BOUND);
    CHECK_NEAR(s.gate_error, 0, 0.0);
    CHECK(moe_gate_errors(0, 2, NULL, NULL, NULL, NULL, NULL, &s) == MOE_OK);
    CHECK(s.n_samples == 0);
    CHECK_NEAR(s.error + s.gate_error + s.expert_error, 0, 0.0);
    s.n_samples = 77;
    CHECK(moe_gate_errors(7, 2, NULL, answers, labels, mask, NULL, &s) == MOE_ERR_ARGUMENT);
    CHECK(moe_gate_errors(7, 2, predicted, NULL, labels, mask, NULL, &s) == MOE_ERR_ARGUMENT);
    CHECK(moe_gate_errors(7, 2, predicted, answers, NULL, mask, NULL, &s) == MOE_ERR_ARGUMENT);
    CHECK(moe_gate_errors(7, 2, predicted, answers, labels, mask, NULL, NULL) == MOE_ERR_ARGUMENT);
    CHECK(moe_gate_errors((size_t)-1 / 2, 8, predicted, answers, labels, mask, NULL, &s) == MOE_ERR_OVERFLOW);
    CHECK(s.n_samples == 77);
}

static void test_trivial_experts(void) {
    const int32_t predicted[12] = {1, 0, -1, 2,
                                   1, 1, -1, -1,
                                   2, 2, 5, -1};
    const int32_t labels[3] = {-1, -1, -1}; /* they do not matter */
    const unsigned char mask[3] = {1, 1, 0};
    moe_error_shares s;
    unsigned char trivial[4];
    CHECK(moe_gate_errors(3, 4, predicted, labels, labels, NULL, trivial, &s) == MOE_OK);
    CHECK(s.n_trivial == 2);
    CHECK(trivial[0] == 0 && trivial[1] == 0 && trivial[2] == 1 && trivial[3] == 1);
    CHECK(moe_gate_errors(3, 4, predicted, labels, labels, mask, trivial, &s) == MOE_OK);
    CHECK(s.n_trivial == 2);
    CHECK(trivial[0] == 1 && trivial[1] == 0 && trivial[2] == 0 && trivial[3] == 1);
    CHECK(moe_gate_errors(3, 4, predicted, labels, labels, mask, NULL, &s) == MOE_OK);
    CHECK(s.n_trivial == 2);
    CHECK(moe_gate_errors(0, 4, NULL, NULL, NULL, NULL, trivial, &s) == MOE_OK);
    CHECK(s.n_trivial == 0);
    CHECK(trivial[0] == 0 && trivial[3] == 0);
}

int main(void) {
    CASE(test_memory());
    CASE(test_empty());
    CASE(test_one_expert());
    CASE(test_small());
    CASE(test_dropped());
    CASE(test_extremes());
    CASE(test_trivial_gate());
    CASE(test_other_gates());
    CASE(test_soft());
    CASE(test_own_tokens());
    CASE(test_arguments());
    CASE(test_information());
    CASE(test_chance_by_permutations());
    CASE(test_chance_of_an_empty_class());
    CASE(test_chance_of_many());
    CASE(test_random_routings());
    CASE(test_several_calls());
    CASE(test_fluctuation());
    CASE(test_cosine());
    CASE(test_errors());
    CASE(test_trivial_experts());
    return test_end();
}
