/* Tests private functions that no public call shows by themselves.
       cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/internals.c -o internals -lm && ./internals
   All other programs may be linked with the library compiled elsewhere; this one has it inside. */

#define MOE_NO_SIMD
#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

/* Names of tensors against patterns of groups. */
static void test_patterns(void) {
    static const struct {
        const char *pattern, *name;
        int fits;
    } cases[] = {{"0.weight", "0.weight", 1},
                 {"0.weight", "10.weight", 0},
                 {"*.weight", "10.weight", 1},
                 {"*", "x", 1},
                 {"*", "", 1},
                 {"", "", 1},
                 {"", "x", 0},
                 {"**", "x", 1},
                 {"*.router.*", "2.router.weight", 1},
                 {"*.router.*", "2.routers", 0},
                 {"2.*", "2.", 1},
                 {"2.*", "12.bias", 0},
                 {"*ab*ab", "abxabab", 1},
                 {"*ab*ab", "ab", 0},
                 {"*a*b*c*", "xxaxxbxxcxx", 1},
                 {"*aab", "aaab", 1},
                 {"a*", "ba", 0},
                 {"a?b", "axb", 0}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK(moei_fits_pattern(cases[i].pattern, cases[i].name) == cases[i].fits, cases[i].pattern);
}

/* The bound on a product is what the worst codes give, or 4 times the largest bias. */
static void test_matrix_bound(void) {
    static const moe_real w[6] = {1, -2, (moe_real)0.5, 0, (moe_real)-0.25, 3}, bias[2] = {-4, 1};
    double scale;
    int with, signs;
    size_t i, p;
    for (scale = 1e-4; scale < 0.5; scale *= 10)
        for (with = 0; with < 2; with++) {
            const moei_matrix x = moei_matrix_of(w, with ? bias : NULL, 1, 2, 3);
            double most = with ? 4 * fabs((double)bias[0]) : 0;
            for (signs = 0; signs < 8; signs++)
                for (i = 0; i < 2; i++) {
                    double y = with ? (double)bias[i] : 0;
                    for (p = 0; p < 3; p++) y += (signs >> p & 1 ? 127 : -127) * scale * (double)w[3 * i + p];
                    if (fabs(y) > most) most = fabs(y);
                }
            CHECK_NEAR(moei_matrix_bound(&x, scale), most, 1e-9);
        }
}

/* The points of the integer form of softplus, g(t) = sqrt(log2(1 + t) / t), as the formula has
   them. */
static void test_points(void) {
    int i;
    for (i = 0; i <= 64; i++) {
        double t = i / 64.0, g = i == 0 ? sqrt(1 / log(2.0)) : sqrt(log(1 + t) / log(2.0) / t);
        CHECK(moei_flash_16(moei_ir_softplus + 2 * i) == (int)floor(16384 * g + 0.5), "a point of g");
    }
}

/* What the fields of configurations may be, as messages say it: "name least most, ". Flags and
   choices have their own rules. */
static const struct {
    const char *table;
    const moe_field *fields;
    const char *before, *ranges; /* before: a field after which the row begins, NULL for the first */
} range_rows[] = {
    {"router", moei_router_fields, NULL,
     "d_model 1 16777216, n_experts 1 65536, top_k 1 65536, n_zero 0 65536, n_copy 0 65536, n_constant 0 65536, "
     "jitter_eps 1e-06 1, ac_mix 1 65536, ac_lambda 1e-09 "
     "1000000000, ac_rho 1e-09 1, cosine_dim 1 16777216, cosine_tau 1e-06 1000000, router_hidden 1 16777216, "
     "logit_cap 1e-06 1000000, noise_floor 1e-09 1000000, noise_sigma 1e-09 1000000, gate_temperature 1e-06 "
     "1000000, similarity_tau 1e-06 1000000, heads 1 4096, attention_head 0 4095, attention_sigma 1e-06 "
     "1000000, groups 1 65536, groups_kept 1 65536, custom_parameters 1 16777216, top_p 1e-06 1, threshold "
     "-1000000 1000000, threshold_rho 1e-06 0.999999, "
     "affinity_mass 1e-06 1, affinity_sum 0 1000000000, affinity_sum_auto 1e-06 1000000, capacity 1"
     " 16777216, table_size 1 16777216, sample_seed 1 16777216, expert_dropout 1e-06 0.999999, "
     "slots 1 65536, soft_sequences 1 16777216, "
     "weight_p 0.125 64, sparsemixer_eps"
     " 1e-06 10, scale -1000000 1000000, capacity_factor 1e-06 1000000, capacity_factor_eval 1e-06 1000000, "
     "drop_capacity 1 16777216, capacity_min 1 16777216, capacity_rho 1e-09 1, loss_balance 0 1000000, zero_tau "
     "1e-06 1000000, loss_z 0 "
     "1000000, loss_importance 0 1000000, loss_entropy 0 1000000, loss_usage_entropy 0 1000000, loss_similarity_same"
     " 0 1000000, loss_similarity_diff 0 1000000, loss_locality 0 1000000, nodes 1 65536, loss_l1 0 1000000, "
     "loss_load 0 1000000, loss_orthogonal 0 1000000, loss_diversity 0 1000000, loss_simplicity 0 1000000, "
     "loss_stable_balance 0 1000000, loss_selector_entropy 0 1000000, loss_selector_reach 0 1000000, "
     "loss_distill 0 1000000, student_dim 1 16777216, loss_predictor 0 1000000, compete_rate 1e-06 1, "
     "compete_from 1 16777216, expert_temperature 1 1000000, "
     "bias_rate 0 1000000, bias_real 1e-06 65536, bias_kappa 1e-06 1000000, bias_beta 1e-06 0.999999, "
     "schedule_steps 1 16777216, k_end -1 65536, tau_end 1e-06 1000000, freeze_at 1 16777216, "
     "switch_at 1 16777216, switch_share 1e-06 1, "},
    {"layer", moei_layer_fields, "switch_from",
     "d_out 1 16777216, d_ff 1 16777216, d_low 1 16777216, swiglu_alpha 1e-06 1000000, swiglu_limit 1e-06 1000000, "
     "swiglu_offset -1000000 1000000, n_shared 1 4096, d_shared 1 16777216, d_latent -16777216 16777216, "},
    {"net", moei_net_fields, NULL, "d_in 0 16777216, "},
    {"linear", moei_linear_fields, NULL, "d_out 1 16777216, "},
    {"residual", moei_residual_fields, NULL, "span 1 4096, "},
    {"embedding", moei_embedding_fields, NULL, "vocabulary 1 16777216, d 1 16777216, "},
    {"positions", moei_positions_fields, NULL, "most 1 16777216, "},
    {"layer_norm", moei_layer_norm_fields, NULL, "eps 1e-12 1, "},
    {"rms_norm", moei_rms_norm_fields, NULL, "eps 1e-12 1, "},
    {"scale", moei_scale_fields, NULL, "scale -1000000000 1000000000, cap 1e-06 1000000000, "},
    {"convolution", moei_convolution_fields, NULL, "length 1 64, "},
    {"attention", moei_attention_fields, NULL,
     "heads 1 4096, d_head 1 16777216, rotary_base 1 1000000000, kv_heads 1 4096, d_value 1 16777216, eps 1e-12 1, "
     "scale 1e-06 1000000, cap 1e-06 1000000000, clamp 1e-06 1000000000, window 1 16777216, chunk 1 16777216, "
     "query_floor 1 16777216, query_growth 1e-06 1000000, rotary_dims 2 16777216, rotary_factor 1e-06 1000000, "
     "rotary_length 1 16777216, beta_fast 1e-06 1000000, beta_slow 1e-06 1000000, low_factor 1e-06 1000000, "
     "high_factor 1e-06 1000000, rotary_magnitude 1e-06 1000000, kv_lora 1 16777216, q_lora 1 16777216, "},
    {"dropout", moei_dropout_fields, NULL, "rate 0 1, "},
    {"feed_forward", moei_feed_forward_fields, NULL,
     "d_ff 1 16777216, d_low 1 16777216, swiglu_alpha 1e-06 1000000, swiglu_limit 1e-06 1000000, swiglu_offset "
     "-1000000 1000000, "},
    {"sampling", moei_sampling_fields, NULL, "temperature 1e-06 1000000, top_k 1 2147483647, top_p 0 1, "},
    {"train", moei_train_fields, NULL,
     "epochs 1 1000000, batch 1 1000000, rate 1e-12 1000000, final_rate 1e-12 1, momentum -1 0.999999, beta1 1e-06 "
     "0.999999, beta2 1e-06 0.999999, epsilon 1e-30 1, decay 0 1000, clip 1e-12 1e+12, accumulate 1 1000000, warmup "
     "1 2147483647, total_steps 1 2147483647, n_groups 1 4096, evaluate_every 1 2147483647, checkpoint_every 1 "
     "2147483647, "},
    {"group", moei_group_fields, NULL, "rate 0 1000000, decay -1000000 1000000, "},
    {"hme", moei_hme_fields, NULL,
     "d_in 1 16777216, d_out 1 16777216, n_groups 1 65536, n_experts 1 65536, steps 1 100, variance 1e-12 1e+12, "
     "min_variance 1e-12 1e+12, "}};

static void test_ranges(void) {
    char text[8000];
    size_t i;
    for (i = 0; i < sizeof range_rows / sizeof range_rows[0]; i++) {
        const moe_field *f = range_rows[i].fields;
        size_t length = 0;
        text[0] = '\0';
        while (range_rows[i].before != NULL && strcmp(f++->name, range_rows[i].before) != 0) continue;
        for (; f->name != NULL; f++)
            if (f->kind == MOE_FIELD_INT || f->kind == MOE_FIELD_REAL)
                length +=
                    (size_t)snprintf(text + length, sizeof text - length, "%s %.10g %.10g, ", f->name, f->min, f->max);
        if (!CHECK(strcmp(text, range_rows[i].ranges) == 0, range_rows[i].table)) printf("    %s\n", text);
    }
}

/* Multipliers of int4 weights are as large as sums of k terms below 2^29 allow, and no larger. */
static void test_int4_most(void) {
    size_t k;
    for (k = 1; k < 100000; k += 1 + k / 3) {
        const double most = moei_int4_max_factor(k), unit = 127.0 * 8.0 * (double)(k + 1);
        CHECK(most * unit <= 536870912.0 && (most == 4095 || (most + 1) * unit > 536870912.0),
              "the most that a multiplier may be");
    }
}

/* Each candidate for the scale of an int4 block is the best one for some block: its largest weight
   is the candidate's number of levels, all others are levels from -7 to 7. */
static void test_int4_scale(void) {
    int step, i;
    for (step = 0; step <= 6; step++) {
        moe_real w[32];
        w[0] = (moe_real)(-7.0 - 0.25 * step);
        for (i = 1; i < 32; i++) w[i] = (moe_real)(i % 2 != 0 ? 4 + i % 4 : -7 + i % 3);
        CHECK(moei_int4_scale(32, w) == 1.0, "the scale of which the levels are multiples");
    }
}

/* Constants of integer models are the nearest integers, the larger one of two that are as near. */
static void test_nearest(void) {
    static const double ties[] = {-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5};
    int i;
    for (i = 0; i < 8; i++) {
        CHECK(moei_nearest(ties[i], 9) == i - 3, "a tie");
        CHECK(moei_nearest(ties[i] + 1e-9, 9) == i - 3 && moei_nearest(ties[i] - 1e-9, 9) == i - 4, "beside a tie");
    }
    CHECK(moei_nearest(8.5, 9) == 9 && moei_nearest(9.5, 9) == 9 && moei_nearest(1e300, 9) == 9, "the largest");
    CHECK(moei_nearest(-9.5, 9) == -9 && moei_nearest(-1e300, 9) == -9, "the smallest");
}

/* A row in Q8 has one scale, and one start for every MOEI_SUM_LIMIT numbers. */
static void test_row_sizes(void) {
    CHECK(moe_quantized_row_size(MOE_TYPE_Q8, 4096) == 4096 + MOEI_LINE, "one line behind the numbers");
    CHECK(moe_quantized_row_size(MOE_TYPE_Q8_BLOCK, 4096) >= 4096 + 128 * (sizeof(moe_real) + 4),
          "a scale and a start for every 32");
}

/* 1/|v| from the shortest vector that has a direction to the longest, though squares of such
   numbers are lost in float. */
static void test_inverse_length(void) {
    static const double lengths[] = {1e-30, 0.9e-12, 1.1e-12, 1e-11, 1e-10, 2e-10, 1e-3,
                                     1,     1e14,    1e15,    2e15,  1e19,  1e30};
    size_t i;
    for (i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const moe_real v[3] = {(moe_real)(lengths[i] * -0.6), 0, (moe_real)(lengths[i] * 0.8)};
        const double got = (double)moei_inverse_length(&moei_kernels_c, v, 3) * lengths[i];
        CHECK(lengths[i] < 1e-12 ? got == 0 : fabs(got - 1) < 1e-6, "1/|v|");
    }
}

/* How many steps `balanced` takes, counted by itself: rows that are nearly equal, or of few kinds,
   or multiples of one row take at most 10 times those of random rows (with fewer tokens than
   experts: of E random rows). The bound of moe_routers.h holds as well. */
static const char *const row_kinds[] = {"random",        "nearly equal", "equal",        "8 rows",
                                        "nearly 8 rows", "multiples",    "near multiples", "one favorite",
                                        "a slope",       "few integers", "on a line"};
enum { ROW_KINDS = sizeof row_kinds / sizeof *row_kinds };

static moe_real logit_of_kind(size_t kind, size_t t, size_t e, size_t experts, moe_real factor, const moe_real *rows,
                              moe_rng *rng) {
    const moe_real noise = moe_rng_normal(rng);
    switch (kind) {
    case 0: return noise;
    case 1: return rows[e] + MOEI_R(1e-6) * noise;
    case 2: return rows[e];
    case 3: return rows[t % 8 * experts + e];
    case 4: return rows[t % 8 * experts + e] + MOEI_R(1e-6) * noise;
    case 5: return rows[e] * factor;
    case 6: return rows[e] * factor + MOEI_R(1e-3) * noise;
    case 7: return noise + (moe_real)(e == 0 ? 8 : 0);
    case 8: return noise + MOEI_R(0.2) * (moe_real)e;
    case 9: return (moe_real)(moe_rng_next(rng) % 3);
    default: return factor < rows[e] ? factor - rows[e] : rows[e] - factor;
    }
}

static moe_status copied_logits(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                moe_real *logits) {
    (void)u;
    memcpy(logits, ctx, call->n_tokens * (size_t)router->config.n_experts * sizeof *logits);
    return MOE_OK;
}

static double balanced_steps(size_t kind, size_t n, size_t experts) {
    moe_router_config c = {0};
    moe_router router;
    moe_routing routing;
    moei_scratch scratch;
    moe_call call = {0};
    moe_rng rng;
    moe_real *rows = reals(8 * experts);
    moe_real *logits = reals(n * experts);
    moe_real *x = reals(n);
    void *work;
    size_t bytes = 0, t, e;
    double steps = 0.0;
    c.d_model = c.top_k = 1;
    c.n_experts = (int)experts;
    c.score = MOE_SCORE_CUSTOM;
    c.select = MOE_SELECT_BALANCED;
    c.weight = MOE_WEIGHT_RAW;
    CHECK(moe_router_init(&router, &c, NULL, NULL) == MOE_OK && moe_route_size(&router, n, 1, &bytes) == MOE_OK);
    moe_rng_seed(&rng, 7);
    for (t = 0; t < 8 * experts; t++) rows[t] = moe_rng_normal(&rng);
    for (t = 0; t < n; t++) {
        const moe_real factor = moe_rng_normal(&rng);
        for (e = 0; e < experts; e++) logits[t * experts + e] = logit_of_kind(kind, t, e, experts, factor, rows, &rng);
    }
    router.custom.ctx = logits;
    router.custom.score = copied_logits;
    call.x = x;
    call.n_tokens = n;
    call.training = 1;
    work = malloc(bytes);
    if (CHECK(moe_route(&router, &call, work, bytes, &routing) == MOE_OK)) {
        for (e = 0; e < experts; e++)
            CHECK(routing.counts[e] == n / experts || routing.counts[e] == n / experts + (n % experts > 0));
        moei_scratch_of(&router, &call, &routing, &scratch);
        steps = (double)*scratch.flow_steps;
    }
    free(work);
    free(x);
    free(logits);
    free(rows);
    return steps;
}

static void test_balanced_steps(void) {
    static const size_t sizes[][2] = {{512, 16},  {600, 64}, {1024, 64}, {300, 256},
                                      {2048, 32}, {100, 64}, {40, 64},   {7, 1}};
    size_t i, kind;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const size_t n = sizes[i][0], experts = sizes[i][1];
        const double cells = (double)n * (double)(experts + 1);
        const double random = balanced_steps(0, n < experts ? experts : n, experts);
        for (kind = 0; kind < ROW_KINDS; kind++) {
            const double steps = balanced_steps(kind, n, experts);
            CHECKF(steps <= 10 * random, "%s, %d tokens, %d experts: %g times the steps of random rows",
                   row_kinds[kind], (int)n, (int)experts, steps / random);
            CHECK(steps >= cells && steps <= 4 * cells * (double)(4 * n + 5 * experts + 5),
                  "the bound that moe_routers.h states");
        }
    }
}

/* Other programs' names: which of them hold two parameters, which are transposed, and which make a
   file a layer's, follows from the parameter and the shape. */
static void test_tensor_names(void) {
    const moei_tensor_name *row;
    for (row = moei_tensor_names; row->name != NULL; row++) {
        const char *shape = row->shape + (row->shape[0] == 'E' && row->shape[1] != '\0');
        const int fused = strpbrk(shape, "JP") != NULL, p = row->param;
        const int down = p == MOE_EXPERTS_DOWN || p == MOE_SHARED_DOWN;
        const int matrix = down || p == MOE_EXPERTS_GATE || p == MOE_EXPERTS_UP || p == MOE_SHARED_GATE ||
                           p == MOE_SHARED_UP;
        test_about = row->name;
        CHECK(((row->flags & MOEI_TENSOR_ROUTER) != 0) == (p == MOE_ROUTER_WEIGHT), "the router's weights");
        CHECK(row->second == (!fused                     ? -1
                              : p == MOE_EXPERTS_GATE    ? (int)MOE_EXPERTS_UP
                              : p == MOE_EXPERTS_GATE_BIAS ? (int)MOE_EXPERTS_UP_BIAS
                              : p == MOE_SHARED_GATE     ? (int)MOE_SHARED_UP
                                                         : -2),
              "gate and up in one tensor");
        if (matrix)
            CHECK(((row->flags & MOEI_TENSOR_TRANSPOSED) != 0) == ((shape[0] == 'H') != down), "rows are outputs");
        if (!matrix && !fused) CHECK((row->flags & MOEI_TENSOR_TRANSPOSED) == 0, "vectors");
        CHECK(fused || (row->flags & MOEI_TENSOR_INTERLEAVED) == 0, "rows of gate and up in turns");
    }
    test_about = "";
}

/* 17 digits give every double back, the smallest and the largest too. */
static void test_digits(void) {
    static const double ends[] = {5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 9.9999999999999995e22, 0.1};
    char text[64];
    moei_text t;
    double back;
    int e;
    for (e = -1070; e < 1024 + 5; e++) {
        const double value = e < 1024 ? ldexp(1.2345678901234567, e) : ends[e - 1024];
        memset(text, 0, sizeof text);
        t.out = text;
        t.room = sizeof text;
        t.length = 0;
        moei_put_digits(&t, value, 17);
        back = strtod(text, NULL);
        CHECK(t.length == strlen(text) && same_bits(&value, &back, sizeof back),
              text);
    }
    for (e = 0; e < 2; e++) {
        t.length = 0;
        if (e == 0) moei_put_real(&t, 0);
        else moei_put_digits(&t, 0, 9);
        CHECK(t.length == 1 && text[0] == '0', "zero");
    }
}

/* A key in 8 bits, of scale 1, is rounded to the nearest code, ties away from 0. */
static void test_kept_codes(void) {
    moe_real x[32] = {127}, back[32];
    unsigned char cell[34];
    int from, i;
    for (from = -508; from < 478; from += 31) {
        for (i = 1; i < 32; i++) x[i] = (moe_real)(from + i - 1) / 4;
        moei_kept_store(MOE_TYPE_Q8_BLOCK, 32, x, cell);
        moei_kept_load(NULL, MOE_TYPE_Q8_BLOCK, 32, 1, cell, back);
        for (i = 0; i < 32; i++)
            CHECK((double)back[i] == (x[i] < 0 ? ceil((double)x[i] - 0.5) : floor((double)x[i] + 0.5)),
                  "the nearest code");
    }
    for (from = 0; from < 32; from++) { /* a NaN anywhere makes its block NaN */
        for (i = 0; i < 32; i++) x[i] = (moe_real)(i - 16);
        x[from] = (moe_real)(HUGE_VAL - HUGE_VAL);
        moei_kept_store(MOE_TYPE_Q8_BLOCK, 32, x, cell);
        moei_kept_load(NULL, MOE_TYPE_Q8_BLOCK, 32, 1, cell, back);
        for (i = 0; i < 32; i++) CHECK(moei_is_nan(back[i]), "NaN");
    }
}

/* What is laid out in memory is aligned, wherever that begins. */
static void test_alignment(void) {
    static unsigned char memory[4 * MOEI_ALIGN];
    size_t shift;
    for (shift = 0; shift < MOEI_ALIGN; shift++) {
        moei_layout l = moei_layout_begin(memory + shift);
        const unsigned char *first = (const unsigned char *)moei_take(&l, 3, 1);
        const unsigned char *second = (const unsigned char *)moei_take(&l, 1, 8);
        CHECK((uintptr_t)first % MOEI_ALIGN == 0 && (uintptr_t)second % MOEI_ALIGN == 0 && second > first);
        CHECK(first >= memory + shift && second + 8 <= memory + shift + l.used, "what it counts is enough");
    }
    CHECK_NEAR(moe_field_find(moei_net_fields, "d_in")->default_value, 0, 0); /* 0 is token ids, no default */
}

/* ---- operations of integer models, by the formulas at their functions ---- */

enum { IN = 0, OTHER = 8, OUT = 16, SUM = 24, CHOICES = 40, VECTORS = 64, MOST = 3 };

/* A run of one MoE layer of one expert, with numbers in its vectors. */
typedef struct machine {
    moe_model model;
    moei_int_mixture mixture;
    moei_int_run run;
    union {
        int16_t v[VECTORS];
        int32_t aligned;
    } vectors;
    unsigned char constants[256];
} machine;

static void put_16(unsigned char *to, int value) {
    to[0] = (unsigned char)((unsigned)value & 255u);
    to[1] = (unsigned char)((unsigned)value >> 8 & 255u);
}

static void machine_begin(machine *m) {
    static const int16_t in[4] = {3, -5, 7, -100}, other[4] = {2, 4, -6, 1};
    static const int16_t choices[1 + 2 * MOST] = {2, 2, 0, 0, 4000, 8000, 0}; /* experts 2 and 0, their weights */
    memset(m, 0, sizeof *m);
    m->model.mixtures = &m->mixture;
    m->model.weights = m->model.experts = m->constants;
    m->mixture.router.n_experts = 1;
    m->mixture.router.most = MOST;
    m->mixture.block = MOEI_INT_NONE;
    m->run.model = &m->model;
    m->run.base = m->constants;
    m->run.vectors = m->vectors.v;
    m->run.weight = 16384;
    memcpy(m->vectors.v + IN, in, sizeof in);
    memcpy(m->vectors.v + OTHER, other, sizeof other);
    memcpy(m->vectors.v + CHOICES, choices, sizeof choices);
}

static moei_int_op operation(unsigned n, unsigned k, unsigned shift, int factor, int factor2) {
    moei_int_op op;
    memset(&op, 0, sizeof op);
    op.shape.n = (uint16_t)n;
    op.shape.k = (uint16_t)k;
    op.shape.low = -32767;
    op.shape.high = 32767;
    op.shape.shift = (uint8_t)shift;
    op.in = IN;
    op.other = OTHER;
    op.out = OUT;
    op.factor = (int16_t)factor;
    op.factor2 = (int16_t)factor2;
    return op;
}

/* The codes that an operation makes. */
static void check_codes(const machine *m, const char *what, int a, int b, int c, int d) {
    const int16_t *y = m->vectors.v + OUT;
    CHECKF(y[0] == a && y[1] == b && y[2] == c && y[3] == d, "%s: %d %d %d %d", what, y[0], y[1], y[2], y[3]);
}

static void check_sums(machine *m, void (*run)(const moei_int_op *op, moei_int_run *run), moei_int_op op,
                       const char *what, int a, int b, int c, int d) {
    int32_t sum[4] = {10, 20, 30, 40};
    memcpy(m->vectors.v + SUM, sum, sizeof sum);
    op.out = SUM;
    run(&op, &m->run);
    memcpy(sum, m->vectors.v + SUM, sizeof sum);
    CHECKF(sum[0] == 10 + a && sum[1] == 20 + b && sum[2] == 30 + c && sum[3] == 40 + d, "%s: %ld %ld %ld %ld", what,
           (long)sum[0], (long)sum[1], (long)sum[2], (long)sum[3]);
}

/* One number per expert, here of one, without operations that make its activation: in 1/16 codes,
   times 1/4, and 1/4 again with rounding. */
static void test_measures(void) {
    machine m;
    moei_int_op op = operation(4, 0, 2, 16384, 4);
    machine_begin(&m);
    m.model.ops = &op;
    moei_int_op_norm_l1(&op, &m.run);
    check_codes(&m, "sum of 3, 5, 7, 100", 115, 0, 0, 0);
    moei_int_op_norm_linf(&op, &m.run);
    check_codes(&m, "largest", 100, 0, 0, 0);
    moei_int_op_norm_l2(&op, &m.run);
    check_codes(&m, "root of 9 + 25 + 49 + 10000", 100, 0, 0, 0);
    moei_int_op_match(&op, &m.run);
    check_codes(&m, "6 - 20 - 42 - 100, a quarter of which rounds up", -156, 0, 0, 0);
}

static void test_weights(void) {
    machine m;
    moei_int_op op = operation(4, 0, 4, 1000, 0);
    machine_begin(&m);
    moei_int_op_apply_weight(&op, &m.run);
    check_codes(&m, "in * 500 / 16", 94, -156, 219, -3125);
    CHECK(m.run.weight == 32767, "the weight is used");
    moei_int_op_set_weight(&op, &m.run);
    CHECK(m.run.weight == 3, "the first number of in");
    m.run.weight = 16384;
    check_sums(&m, moei_int_op_accumulate, operation(4, 0, 15, 0, 0), "in * 1/2, halves up", 2, -2, 4, -50);
    op = operation(4, 0, 2, 16384, 1);
    op.other = CHOICES;
    op.at = 30000; /* - (4000 + 8000) / 2 = 24000 */
    check_sums(&m, moei_int_op_add_rest, op, "in * 4096 * 24000 / 65536", 4500, -7500, 10500, -150000);
    op.at = 100000; /* rest: 32767 */
    check_sums(&m, moei_int_op_add_rest, op, "in * 4096 * 32767 / 65536", 6143, -10240, 14335, -204794);
}

/* Rows of factors for experts 0, 1 and 2; 2 and 0 are chosen, with weights 4000 and 8000. */
static void test_clusters(void) {
    static const int rows[3][4] = {{16, 32, -16, 64}, {1, 1, 1, 1}, {160, 320, -160, 640}};
    machine m;
    moei_int_op op = operation(4, 0, 4, 48, 1);
    int e, q;
    machine_begin(&m);
    for (e = 0; e < 3; e++)
        for (q = 0; q < 4; q++) put_16(m.constants + 8 * e + 2 * q, rows[e][q]);
    op.other = CHOICES;
    moei_int_op_cluster(&op, &m.run);
    check_codes(&m, "in times the row of expert 0, the heavier", 3, -10, -7, -400);
    op.factor2 = 2; /* 2/3 of expert 0, 1/3 of expert 2: four times the row of expert 0 */
    moei_int_op_cluster(&op, &m.run);
    check_codes(&m, "in times two rows", 12, -40, -28, -1600);
    m.vectors.v[CHOICES] = 0;
    moei_int_op_cluster(&op, &m.run);
    check_codes(&m, "nobody is chosen: in * 48 / 16", 9, -15, 21, -300);
}

static int code(double angle, double (*f)(double)) { return (int)floor(32767 * f(angle) + 0.5); }

/* Place 37 is 2 * 16 + 5: the angles of rows 5 and 16 + 2 add up to 3.7. */
static void test_rotation(void) {
    machine m;
    moei_int_op op = operation(2, 2, 15, 0, 0);
    int i, c, d;
    machine_begin(&m);
    for (i = 0; i < 16 + 3; i++) {
        const double angle = i < 16 ? 0.1 * i : 1.6 * (i - 16);
        put_16(m.constants + 4 * i, code(angle, cos));
        put_16(m.constants + 4 * i + 2, code(angle, sin));
    }
    m.run.place = 37;
    m.vectors.v[IN] = 10000;
    m.vectors.v[IN + 1] = -5000;
    moei_int_op_rotate(&op, &m.run);
    CHECK_NEAR(m.vectors.v[OUT], 10000 * cos(3.7) + 5000 * sin(3.7), 2);
    CHECK_NEAR(m.vectors.v[OUT + 1], 10000 * sin(3.7) - 5000 * cos(3.7), 2);
    c = (code(0.5, cos) * code(3.2, cos) - code(0.5, sin) * code(3.2, sin)) >> 15;
    d = (code(0.5, sin) * code(3.2, cos) + code(0.5, cos) * code(3.2, sin)) >> 15;
    check_codes(&m, "to the nearest", (10000 * c + 5000 * d + 16384) >> 15, (10000 * d - 5000 * c + 16384) >> 15, 0, 0);
}

/* A row that the table does not have. */
static void test_row_beyond(void) {
    machine m;
    moei_int_op op = operation(4, 3, 15, 0, 0);
    machine_begin(&m);
    m.run.token = 3;
    moei_int_op_row(&op, &m.run);
    CHECK(m.run.status == MOE_ERR_ARGUMENT, "token 3 of 3");
    check_codes(&m, "nothing is written", 0, 0, 0, 0);
    m.run.status = MOE_OK;
    m.run.token = 2;
    moei_int_op_row(&op, &m.run);
    CHECK(m.run.status == MOE_OK, "token 2 of 3");
}

/* Operations name vectors, and mixtures operations, by 16 bits, of which 65535 says none. */
static void test_most_of_a_list(void) {
    moei_maker m;
    int32_t *list = NULL;
    uint32_t i, good = 0;
    memset(&m, 0, sizeof m);
    for (i = 0; i < 65535; i++) good += moei_maker_push(&m, &list, &i, sizeof i) == i;
    CHECK(good == 65535 && m.status == MOE_OK);
    CHECK(moei_maker_push(&m, &list, &i, sizeof i) == 0 && m.status == MOE_ERR_OVERFLOW);
    CHECK(moei_array_length(list) == 65535 && list[65534] == 65534);
    moei_array_free(NULL, &list, sizeof *list);
}

/* A range of a module that is infinite is seen, whichever it is. */
static void test_infinite_ranges(void) {
    enum { RANGES = offsetof(moei_ranges, rotation_table) / sizeof(moei_range) };
    size_t i;
    for (i = 0; i <= RANGES; i++) {
        moei_ranges r;
        moei_range all[RANGES + 1];
        memset(&r, 0, sizeof r);
        memset(all, 0, sizeof all);
        all[i].most = HUGE_VAL;
        memcpy(&r, all, RANGES * sizeof *all);
        CHECK(moei_ranges_are_finite(&r) == (i == RANGES), "an infinite range");
    }
}

/* The weighted inputs of experts are the tokens' own, in whichever order the plan has them. */
static void test_weighted_inputs(void) {
    enum { N = 6, D = 3, E = 4 };
    moe_layer_config config;
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    moei_ranges range;
    moe_real x[N * D], y[N * D];
    void *work = NULL;
    double most = 0, squares = 0;
    size_t i, e, bytes = 0;
    memset(&config, 0, sizeof config);
    config.router.d_model = D;
    config.router.n_experts = E;
    config.router.top_k = 2;
    config.router.apply_to = MOE_APPLY_INPUT;
    config.d_ff = 2;
    for (i = 0; i < N * D; i++) x[i] = (moe_real)((double)(i / D + 1) * cos((double)(i * i)));
    memset(&call, 0, sizeof call);
    call.n_tokens = N;
    call.x = x;
    call.keep = 1;
    if (!CHECK(moe_layer_create(&layer, &config, 0, 1, NULL, NULL) == MOE_OK, "a layer")) return;
    if (CHECK(moe_layer_work_size(&layer, N, 1, &bytes) == MOE_OK && (work = malloc(bytes)) != NULL, "memory") &&
        CHECK(moe_layer_forward(&layer, &call, y, work, bytes, &pass) == MOE_OK, "a pass")) {
        memset(&range, 0, sizeof range);
        moei_ranges_weights(&layer, &pass, &range);
        for (i = 0; i < N * D; i++)
            for (e = 0; e < E; e++) {
                const double weighted = (double)pass.routing.weights[i / D * E + e] * (double)x[i];
                most = fmax(most, fabs(weighted));
                squares += weighted * weighted;
            }
        CHECK_NEAR(range.weighted_input.most, most, 1e-5);
        CHECK_NEAR(range.weighted_input.squares, squares, 1e-4);
    }
    free(work);
    moe_layer_free(&layer);
}

/* The scale of a row leaves its bias, in units of the sums, below 2^28; one that fits changes
   nothing. */
static void test_row_scales(void) {
    static const moe_real w[4] = {(moe_real)0.5, -1, (moe_real)0.25, 0}, zeros[4] = {0, 0, 0, 0};
    static const double biases[] = {-3, 1e5, -1e9};
    moei_maker m;
    size_t i;
    memset(&m, 0, sizeof m);
    for (i = 0; i < 6; i++) {
        const double bias = biases[i / 2];
        double without, scale;
        m.weights = i % 2 == 0 ? MOE_WEIGHTS_INT8 : MOE_WEIGHTS_INT4;
        without = moei_codes_row_scale(&m, w, 4, 0, 1e-3);
        scale = moei_codes_row_scale(&m, w, 4, bias, 1e-3);
        CHECK((scale > without) == (i >= 2) && fabs(bias) <= scale * 1e-3 * 268435457.0, "the bias fits");
        scale = moei_codes_row_scale(&m, zeros, 4, bias, 1e-3);
        CHECK(fabs(bias) <= scale * 1e-3 * 65537.0, "beside no weights");
    }
}

int main(void) {
    CASE(test_measures());
    CASE(test_weights());
    CASE(test_clusters());
    CASE(test_rotation());
    CASE(test_row_beyond());
    CASE(test_most_of_a_list());
    CASE(test_tensor_names());
    CASE(test_digits());
    CASE(test_kept_codes());
    CASE(test_alignment());
    CASE(test_inverse_length());
    CASE(test_patterns());
    CASE(test_points());
    CASE(test_matrix_bound());
    CASE(test_ranges());
    CASE(test_int4_most());
    CASE(test_int4_scale());
    CASE(test_nearest());
    CASE(test_infinite_ranges());
    CASE(test_weighted_inputs());
    CASE(test_row_scales());
    CASE(test_row_sizes());
    CASE(test_balanced_steps());
    return test_end();
}
