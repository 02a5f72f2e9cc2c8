/* Tests private functions that no public call shows by themselves.
       cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/internals.c -o internals -lm && ./internals
   All other programs may be linked with the library compiled elsewhere; this one has it inside. */

#define MOE_NO_SIMD
#define MOE_IMPLEMENTATION
#include "moe.h"

#include <math.h>
#include <stdio.h>

static long passed, failed;

#define CHECK(condition, what) check((condition) != 0, __LINE__, what)

static int check(int good, int line, const char *what) {
    if (good) passed++;
    else if (++failed <= 40) printf("internals.c:%d: %s\n", line, what);
    return good;
}

/* Names of tensors against patterns of groups. */
static void test_patterns(void) {
    static const struct {
        const char *pattern, *name;
        int fits;
    } cases[] = {{"0.weight", "0.weight", 1},   {"0.weight", "10.weight", 0}, {"*.weight", "10.weight", 1},   {"*", "x", 1},
                 {"*", "", 1},                  {"", "", 1},                  {"", "x", 0},                   {"**", "x", 1},
                 {"*.router.*", "2.router.weight", 1}, {"*.router.*", "2.routers", 0}, {"2.*", "2.", 1},      {"2.*", "12.bias", 0},
                 {"*ab*ab", "abxabab", 1},      {"*ab*ab", "ab", 0},          {"*a*b*c*", "xxaxxbxxcxx", 1},  {"*aab", "aaab", 1},
                 {"a*", "ba", 0},               {"a?b", "axb", 0}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) CHECK(moei_fits_pattern(cases[i].pattern, cases[i].name) == cases[i].fits, cases[i].pattern);
}

/* The points of the integer form of softplus, g(t) = sqrt(log2(1 + t) / t), as the formula has them. */
static void test_points(void) {
    int i;
    for (i = 0; i <= 64; i++) {
        double t = i / 64.0, g = i == 0 ? sqrt(1 / log(2.0)) : sqrt(log(1 + t) / log(2.0) / t);
        CHECK(moei_flash_16(moei_ir_softplus + 2 * i) == (int)floor(16384 * g + 0.5), "a point of g");
    }
}

/* What the fields of configurations may be, as messages say it: "name least most, ". Flags and choices have their own rules. */
static const struct {
    const char *table;
    const moe_field *fields;
    const char *before, *ranges; /* before: a field after which the row begins, NULL for the first */
} range_rows[] = {
    {"router", moei_router_fields, NULL,
     "d_model 1 16777216, n_experts 1 65536, top_k 1 65536, jitter_eps 1e-06 1, ac_mix 1 65536, ac_lambda 1e-09 "
     "1000000000, ac_rho 1e-09 1, cosine_dim 1 16777216, cosine_tau 1e-06 1000000, router_hidden 1 16777216, "
     "noise_floor 1e-09 1000000, noise_sigma 1e-09 1000000, gate_temperature 1e-06 1000000, similarity_tau 1e-06 "
     "1000000, heads 1 4096, attention_head 0 4095, attention_sigma 1e-06 1000000, groups 1 65536, groups_kept 1 "
     "65536, top_p 1e-06 1, threshold -1000000 1000000, affinity_mass 1e-06 1, affinity_sum 0 1000000000, capacity 1"
     " 16777216, table_size 1 16777216, slots 1 65536, soft_sequences 1 16777216, weight_p 0.125 64, sparsemixer_eps"
     " 1e-06 10, scale -1000000 1000000, capacity_factor 1e-06 1000000, capacity_factor_eval 1e-06 1000000, "
     "drop_capacity 1 16777216, capacity_min 1 16777216, capacity_rho 1e-09 1, loss_balance 0 1000000, loss_z 0 "
     "1000000, loss_importance 0 1000000, loss_entropy 0 1000000, loss_usage_entropy 0 1000000, loss_similarity_same"
     " 0 1000000, loss_similarity_diff 0 1000000, loss_locality 0 1000000, nodes 1 65536, loss_l1 0 1000000, "
     "loss_load 0 1000000, loss_orthogonal 0 1000000, loss_distill 0 1000000, expert_temperature 1 1000000, "
     "bias_rate 0 1000000, schedule_steps 1 16777216, k_end 1 65536, tau_end 1e-06 1000000, freeze_at 1 16777216, "
     "switch_at 1 16777216, "},
    {"layer", moei_layer_fields, "switch_from",
     "d_out 1 16777216, d_ff 1 16777216, d_low 1 16777216, swiglu_alpha 1e-06 1000000, swiglu_limit 1e-06 1000000, "
     "swiglu_offset -1000000 1000000, n_shared 1 4096, d_shared 1 16777216, "},
    {"net", moei_net_fields, NULL,
     "d_in 0 16777216, "},
    {"linear", moei_linear_fields, NULL,
     "d_out 1 16777216, "},
    {"residual", moei_residual_fields, NULL,
     "span 1 4096, "},
    {"embedding", moei_embedding_fields, NULL,
     "vocabulary 1 16777216, d 1 16777216, "},
    {"positions", moei_positions_fields, NULL,
     "most 1 16777216, "},
    {"attention", moei_attention_fields, NULL,
     "heads 1 4096, d_head 1 16777216, rotary_base 1 1000000000, "},
    {"dropout", moei_dropout_fields, NULL,
     "rate 0 1, "},
    {"feed_forward", moei_feed_forward_fields, NULL,
     "d_ff 1 16777216, d_low 1 16777216, swiglu_alpha 1e-06 1000000, swiglu_limit 1e-06 1000000, swiglu_offset -1000000 1000000, "},
    {"sampling", moei_sampling_fields, NULL,
     "temperature 1e-06 1000000, top_k 1 2147483647, top_p 0 1, "},
    {"train", moei_train_fields, NULL,
     "epochs 1 1000000, batch 1 1000000, rate 1e-12 1000000, final_rate 1e-12 1, momentum -1 0.999999, beta1 1e-06 "
     "0.999999, beta2 1e-06 0.999999, epsilon 1e-30 1, decay 0 1000, clip 1e-12 1e+12, accumulate 1 1000000, warmup "
     "1 2147483647, total_steps 1 2147483647, n_groups 1 4096, evaluate_every 1 2147483647, checkpoint_every 1 "
     "2147483647, "},
    {"group", moei_group_fields, NULL,
     "rate 0 1000000, decay -1000000 1000000, "},
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
                length += (size_t)snprintf(text + length, sizeof text - length, "%s %.10g %.10g, ", f->name, f->min, f->max);
        if (!CHECK(strcmp(text, range_rows[i].ranges) == 0, range_rows[i].table)) printf("    %s\n", text);
    }
}

/* Multipliers of int4 weights are as large as sums of k terms below 2^29 allow, and no larger. */
static void test_int4_most(void) {
    size_t k;
    for (k = 1; k < 100000; k += 1 + k / 3) {
        const double most = moei_int4_most(k), unit = 127.0 * 8.0 * (double)(k + 1);
        CHECK(most * unit <= 536870912.0 && (most == 4095 || (most + 1) * unit > 536870912.0), "the most that a multiplier may be");
    }
}

/* A row in Q8 has one scale, and one start for every MOEI_SUM_LIMIT numbers. */
static void test_row_sizes(void) {
    CHECK(moe_quant_row_size(MOE_TYPE_Q8, 4096) == 4096 + MOEI_LINE, "one line behind the numbers");
    CHECK(moe_quant_row_size(MOE_TYPE_Q8_BLOCK, 4096) >= 4096 + 128 * (sizeof(moe_real) + 4), "a scale and a start for every 32");
}

/* 1/|v| from the shortest vector that has a direction to the longest, though squares of such numbers are lost in float. */
static void test_inverse_length(void) {
    static const double lengths[] = {1e-30, 0.9e-12, 1.1e-12, 1e-11, 1e-10, 2e-10, 1e-3, 1, 1e14, 1e15, 2e15, 1e19, 1e30};
    size_t i;
    for (i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const moe_real v[3] = {(moe_real)(lengths[i] * -0.6), 0, (moe_real)(lengths[i] * 0.8)};
        const double got = (double)moei_inverse_length(&moei_kernels_c, v, 3) * lengths[i];
        CHECK(lengths[i] < 1e-12 ? got == 0 : fabs(got - 1) < 1e-6, "1/|v|");
    }
}

int main(void) {
    test_inverse_length();
    test_patterns();
    test_points();
    test_ranges();
    test_int4_most();
    test_row_sizes();
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}
