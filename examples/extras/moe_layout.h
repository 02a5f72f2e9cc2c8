/* moe_layout.h - layouts of moe's structs, for programs in other languages

   An extra of moe.h. A program that cannot include C headers asks the library for the sizes of
   structs and the offsets of their members. It needs no copy of them, which would be wrong for
   another version, compiler or machine. MIT or public domain, as moe.h.

   Contents (search for the tag)
     >>calls       names of structs and members, their offsets and sizes
     >>private     the list of structs, and the implementation

   Recipe
     1. Copy moe_layout.h into your project, beside moe.h.
     2. Include it where MOE_IMPLEMENTATION is defined, after moe.h and all other extras: it
        describes the structs of the headers before it, but that of moe_mpi.h. It needs no option
        and no other extra.
     3. Compile that file as a shared library.

   First program: what a binding asks before it calls moe_layer_check with a configuration.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "moe_layout.h"
 * #include <stdio.h>
 *
 * int main(void) {
 *     size_t size, at;
 *     printf("%s\n", moe_struct_names(0));
 *     if (moe_struct_place("moe_layer_config", NULL, NULL, &size)) return 1;
 *     if (moe_struct_place("moe_layer_config", "d_ff", &at, NULL)) return 1;
 *     printf("moe_layer_config has %d bytes, d_ff is at %d\n", (int)size, (int)at);
 *     return 0;
 * }
 * --- end ---

   Options: those of moe.h. MOE_NO_TRAIN and MOE_NO_FLOAT leave out everything.

   Manual
     Allocate zeroed memory of the struct's size, aligned for any type, and write members at their
     offsets. Zeroed configurations are valid. Functions have their C names; in the double build
     they end in _f64. tests/port/bindings.py does this in Python, bindings.rs in Rust.
     Errors and NULL are as in moe.h. Threads: there are no globals, calls may run at the same time.
*/
#ifndef MOE_H
#error "moe_layout.h: include moe.h before it"
#endif

#ifndef MOE_LAYOUT_H
#define MOE_LAYOUT_H

#ifndef MOE_NO_TRAIN
#if MOE_REAL_IS_DOUBLE
#define moe_struct_names moe_struct_names_f64
#define moe_struct_place moe_struct_place_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>calls ================================================================================= */

/* The names of struct i = 0, 1, ... and of its members in order, with spaces between them, such as
   "moe_error code message"; NULL after the last struct. A constant. Thread-safe. */
MOE_API const char *moe_struct_names(size_t i);

/* Stores offset and size of a member in bytes, or those of the struct itself (0 and its size) when
   member is NULL. Either pointer may be NULL. A member of a member takes two calls: add the
   offsets. MOE_ERR_NOT_FOUND: there is no such struct or member; MOE_ERR_ARGUMENT: name is NULL. An
   error stores nothing. Thread-safe. */
MOE_API moe_status moe_struct_place(const char *name, const char *member, size_t *offset, size_t *size);

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_TRAIN */
#endif /* MOE_LAYOUT_H */

/* ==== >>private =============================================================================== */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_LAYOUT_IMPLEMENTED)
#define MOEI_LAYOUT_IMPLEMENTED
#ifndef MOE_NO_TRAIN

#include <stddef.h>

/* The members of each struct in order, and the structs of each included header. */
/* layouts: begin (written by sh tests/port/bindings.sh --write) */
#define MOEI_OF_moe_error(M, s) M(s, code) M(s, message)
#define MOEI_OF_moe_parallel(M, s) M(s, ctx) M(s, threads) M(s, always) M(s, run)
#define MOEI_OF_moe_adamw_step(M, s) M(s, scale) M(s, lr) M(s, beta1) M(s, beta2) M(s, epsilon) M(s, weight_decay) \
    M(s, correction1) M(s, correction2)
#define MOEI_OF_moe_kernels(M, s) M(s, name) M(s, id) M(s, matmul) M(s, dot) M(s, axpy) M(s, axpy_rows) M(s, activate) \
    M(s, activate_backward) M(s, softmax) M(s, top_k) M(s, multiply) M(s, dispersion) M(s, log_posterior) \
    M(s, exp_sum) M(s, entropy) M(s, panels) M(s, gated) M(s, gated_backward) M(s, adamw) M(s, streamed) \
    M(s, quantized) M(s, quantize) M(s, widen) M(s, half) M(s, unpacked)
#define MOEI_OF_moe_external_type(M, s) M(s, name) M(s, block) M(s, bytes) M(s, unpack) M(s, group) M(s, minima) \
    M(s, fill) M(s, direct)
#define MOEI_OF_moe_external(M, s) M(s, type) M(s, data) M(s, row) M(s, column) M(s, scales) M(s, scale_row) \
    M(s, scale_rows) M(s, scale_columns) M(s, exact)
#define MOEI_OF_moe_rng(M, s) M(s, state)
#define MOEI_OF_moe_field(M, s) M(s, name) M(s, kind) M(s, offset) M(s, min) M(s, max) M(s, default_value) \
    M(s, choices) M(s, about)
#define MOEI_OF_moe_router_config(M, s) M(s, d_model) M(s, n_experts) M(s, top_k) M(s, n_zero) M(s, n_copy) \
    M(s, n_constant) M(s, input) M(s, raw_input) M(s, jitter_eps) M(s, ac_mode) M(s, ac_spread) M(s, ac_mix) \
    M(s, ac_lambda) M(s, ac_rho) M(s, score) M(s, router_bias) M(s, cosine_dim) M(s, cosine_keep_length) \
    M(s, cosine_learn_tau) M(s, cosine_tau) M(s, norm_node) M(s, norm_order) M(s, router_hidden) M(s, router_act) \
    M(s, grap_cosine) M(s, router_residual) M(s, logit_cap) M(s, noise) M(s, noise_floor) M(s, noise_sigma) M(s, gate) \
    M(s, gate_temperature) M(s, refine) M(s, similarity_tau) M(s, similarity_scale) M(s, similarity_learned) \
    M(s, lower_entropy_only) M(s, causal) M(s, heads) M(s, attention_heads) M(s, attention_head) M(s, attention_sigma) \
    M(s, attention_u) M(s, select) M(s, selection_bias) M(s, groups) M(s, groups_kept) M(s, group_score) \
    M(s, custom_batch) M(s, custom_parameters) M(s, top_p) M(s, threshold) M(s, threshold_learned) \
    M(s, threshold_sigmoid) M(s, threshold_fallback) M(s, expert_choice_score) M(s, expert_choice_scope) \
    M(s, predictor) M(s, threshold_rho) M(s, affinity_mass) M(s, affinity_sum) M(s, affinity_sum_auto) M(s, capacity) \
    M(s, table_size) M(s, sample_at) M(s, sample_scope) M(s, sample_seed) M(s, expert_dropout) \
    M(s, expert_dropout_scope) M(s, slots) M(s, soft_normalise) M(s, soft_sequences) M(s, weight) M(s, weight_p) \
    M(s, weight_over) M(s, sparsemixer_eps) M(s, sparsemixer_sample) M(s, expert_scale) M(s, scale) M(s, apply_to) \
    M(s, capacity_factor) M(s, capacity_factor_eval) M(s, drop_capacity) M(s, capacity_min) M(s, capacity_bound) \
    M(s, capacity_rho) M(s, drop_order) M(s, drop_rule) M(s, renormalize) M(s, loss_balance) M(s, balance_over) \
    M(s, balance_scope) M(s, zero_tau) M(s, zero_average) M(s, loss_z) M(s, loss_importance) M(s, importance_over) \
    M(s, unbiased) M(s, loss_entropy) M(s, loss_usage_entropy) M(s, loss_similarity_same) M(s, loss_similarity_diff) \
    M(s, loss_locality) M(s, nodes) M(s, loss_l1) M(s, loss_load) M(s, loss_orthogonal) M(s, loss_diversity) \
    M(s, loss_simplicity) M(s, loss_stable_balance) M(s, loss_selector_entropy) M(s, loss_selector_reach) \
    M(s, loss_distill) M(s, distill) M(s, student) M(s, student_dim) M(s, loss_predictor) M(s, compete_rate) \
    M(s, compete_from) M(s, compete) M(s, expert_temperature) M(s, bias_rate) M(s, bias_rule) M(s, bias_real) \
    M(s, bias_centre) M(s, bias_kappa) M(s, bias_beta) M(s, l1_controller) M(s, schedule_steps) M(s, k_end) \
    M(s, tau_schedule) M(s, tau_end) M(s, freeze_at) M(s, switch_at) M(s, switch_share) M(s, switch_from) \
    M(s, untrained) M(s, preset)
#define MOEI_OF_moe_preset(M, s) M(s, name) M(s, aliases) M(s, source) M(s, formula) M(s, router) M(s, layer)
#define MOEI_OF_moe_parameter(M, s) M(s, name) M(s, n_dims) M(s, shape) M(s, count) M(s, flags) M(s, init_value) \
    M(s, init_std)
#define MOEI_OF_moe_batch(M, s) M(s, first) M(s, total) M(s, lead) M(s, ctx) M(s, gather) M(s, hooks)
#define MOEI_OF_moe_call(M, s) M(s, n_tokens) M(s, x) M(s, parallel) M(s, router_x) M(s, mask) M(s, sequences) \
    M(s, n_sequences) M(s, given) M(s, token_ids) M(s, noise) M(s, previous_input) M(s, previous_experts) \
    M(s, previous_weights) M(s, n_previous) M(s, previous_logits) M(s, d_previous_logits) M(s, d_clean_logits) \
    M(s, attention_weights) M(s, attention_outputs) M(s, attention_output) M(s, d_attention_weights) \
    M(s, d_attention_outputs) M(s, d_attention_output) M(s, jitter) M(s, gumbel) M(s, uniform) M(s, dropped) \
    M(s, token_machine) M(s, expert_machine) M(s, teacher) M(s, distances) M(s, activations) M(s, activation_width) \
    M(s, n_past) M(s, past_u) M(s, past_gate) M(s, decoding) M(s, training) M(s, keep) M(s, rng) M(s, batch) \
    M(s, error)
#define MOEI_OF_moe_assignment(M, s) M(s, token) M(s, choice) M(s, weight_in) M(s, weight_out)
#define MOEI_OF_moe_dispatch_plan(M, s) M(s, n_tokens) M(s, n_experts) M(s, offsets) M(s, assignments) M(s, rows)
#define MOEI_OF_moe_routing(M, s) M(s, n_tokens) M(s, n_experts) M(s, first) M(s, n_real) M(s, real_experts) M(s, u) \
    M(s, clean_logits) M(s, predicted) M(s, logits) M(s, gate) M(s, probabilities) M(s, choices) M(s, n_choices) \
    M(s, kept) M(s, max_choices) M(s, choice_weights) M(s, weights) M(s, selected) M(s, counts) M(s, first_counts) \
    M(s, n_dropped) M(s, capacity) M(s, capacity_zero) M(s, capacity_bound) M(s, capacity_clamped) M(s, top_k) \
    M(s, plan) M(s, loss) M(s, bound_now) M(s, affinity_now) M(s, d_weight_in) M(s, d_weight_out) M(s, memory)
#define MOEI_OF_moe_custom(M, s) M(s, ctx) M(s, score) M(s, score_backward) M(s, select) M(s, n_parameters)
#define MOEI_OF_moe_router(M, s) M(s, config) M(s, custom) M(s, kernels) M(s, present) M(s, parts) M(s, external) \
    M(s, tensors)
#define MOEI_OF_moe_metrics(M, s) M(s, n_experts) M(s, n_classes) M(s, n_calls) M(s, n_tokens) M(s, n_routed) \
    M(s, n_assignments) M(s, n_real_assignments) M(s, n_predicted) M(s, n_agreed) M(s, n_dropped) M(s, entropy) \
    M(s, entropy_normalized) M(s, entropy_calls) M(s, n_classified) M(s, choices) M(s, choices_squared) M(s, load) \
    M(s, first) M(s, kept) M(s, importance) M(s, logits) M(s, mean_gate) M(s, mean_logit) M(s, row) M(s, classes) \
    M(s, first_classes)
#define MOEI_OF_moe_report(M, s) M(s, n_experts) M(s, n_classes) M(s, n_calls) M(s, n_tokens) M(s, n_assignments) \
    M(s, n_dropped) M(s, dropped_share) M(s, experts_per_token) M(s, real_experts_per_token) M(s, predictor_agreement) \
    M(s, gate_entropy) M(s, usage_entropy) M(s, usage_entropy_calls) M(s, confidence_entropy) M(s, importance_cv2) \
    M(s, load_entropy) M(s, load_balance_score) M(s, load_cv2) M(s, load_max_over_mean) M(s, load_max_minus_min) \
    M(s, capacity_use) M(s, first_share_max) M(s, trivial_gate) M(s, n_classified) M(s, information) \
    M(s, information_chance) M(s, information_first) M(s, information_first_chance) M(s, classes) M(s, first_classes) \
    M(s, load) M(s, first) M(s, kept) M(s, mean_gate) M(s, mean_logit)
#define MOEI_OF_moe_instability_report(M, s) M(s, instability) M(s, chance) M(s, q1) M(s, q2)
#define MOEI_OF_moe_error_shares(M, s) M(s, n_samples) M(s, error) M(s, gate_error) M(s, expert_error) M(s, n_trivial)
#define MOEI_OF_moe_allocator(M, s) M(s, ctx) M(s, resize)
#define MOEI_OF_moe_arena(M, s) M(s, base) M(s, size) M(s, used)
#define MOEI_OF_moe_stream(M, s) M(s, ctx) M(s, read) M(s, write) M(s, sync)
#define MOEI_OF_moe_buffer(M, s) M(s, allocator) M(s, data) M(s, size) M(s, capacity) M(s, most)
#define MOEI_OF_moe_tensor(M, s) M(s, name) M(s, n_dims) M(s, shape) M(s, count) M(s, flags) M(s, data) M(s, gradient)
#define MOEI_OF_moe_file_tensor(M, s) M(s, name) M(s, name_length) M(s, dtype) M(s, n_dims) M(s, shape) M(s, count) \
    M(s, data) M(s, bytes)
#define MOEI_OF_moe_file(M, s) M(s, bytes) M(s, size) M(s, header_size) M(s, n_tensors) M(s, n_metadata) M(s, at) \
    M(s, metadata_at) M(s, metadata_end) M(s, of_header)
#define MOEI_OF_moe_limits(M, s) M(s, size) M(s, tensors) M(s, metadata) M(s, modules)
#define MOEI_OF_moe_metadata(M, s) M(s, key) M(s, value)
#define MOEI_OF_moe_layer_config(M, s) M(s, router) M(s, d_out) M(s, expert) M(s, d_ff) M(s, d_low) M(s, d_latent) \
    M(s, act) M(s, no_expert_bias) M(s, swiglu_alpha) M(s, swiglu_limit) M(s, swiglu_offset) M(s, expert_bias) \
    M(s, n_shared) M(s, d_shared) M(s, shared_act) M(s, add_input) M(s, shared_sigmoid) M(s, kernels) M(s, transport)
#define MOEI_OF_moe_layer(M, s) M(s, config) M(s, router) M(s, kernels) M(s, present) M(s, tensors) M(s, gradients) \
    M(s, packed) M(s, packed_type) M(s, external) M(s, is_packed) M(s, memory) M(s, memory_size) M(s, allocator)
#define MOEI_OF_moe_quant_error(M, s) M(s, rows) M(s, output)
#define MOEI_OF_moe_layer_pass(M, s) M(s, routing) M(s, expert_outputs) M(s, call) M(s, x) M(s, inputs) M(s, latent) \
    M(s, d_latent) M(s, node) M(s, all) M(s, quantized) M(s, quantized_size) M(s, rows) M(s, d_rows) M(s, clean) \
    M(s, d_node) M(s, d_all) M(s, shared) M(s, d_shared) M(s, shared_factor) M(s, route_memory) M(s, route_size) \
    M(s, ranks)
#define MOEI_OF_moe_attention_config(M, s) M(s, heads) M(s, d_head) M(s, full) M(s, rotary) M(s, rotary_base) \
    M(s, kv_heads) M(s, d_value) M(s, bias) M(s, output_bias) M(s, qk_norm) M(s, norm_after) M(s, eps) M(s, scale) \
    M(s, cap) M(s, clamp) M(s, sinks) M(s, window) M(s, chunk) M(s, query_floor) M(s, query_growth) M(s, rotary_dims) \
    M(s, rotary_neighbours) M(s, rotary_scaling) M(s, rotary_factor) M(s, rotary_length) M(s, beta_fast) \
    M(s, beta_slow) M(s, no_truncation) M(s, low_factor) M(s, high_factor) M(s, rotary_magnitude) M(s, kv_lora) \
    M(s, q_lora)
#define MOEI_OF_moe_module(M, s) M(s, kind) M(s, d_in) M(s, d_out) M(s, act) M(s, span) M(s, n_rows) M(s, length) \
    M(s, no_bias) M(s, bias) M(s, eps) M(s, scale) M(s, cap) M(s, rate) M(s, attention) M(s, layer) M(s, tensors) \
    M(s, gradients) M(s, external) M(s, first_tensor)
#define MOEI_OF_moe_net(M, s) M(s, d_in) M(s, d_out) M(s, n_modules) M(s, modules) M(s, n_tensors) M(s, tensors) \
    M(s, kernels_wanted) M(s, kernels) M(s, transport) M(s, mixture_losses) M(s, external) M(s, cache_type) \
    M(s, last_only) M(s, allocator) M(s, memory) M(s, memory_size) M(s, built) M(s, trainable) M(s, error)
#define MOEI_OF_moe_net_pass(M, s) M(s, n_tokens) M(s, training) M(s, y) M(s, call) M(s, past) M(s, most) M(s, first) \
    M(s, total) M(s, modules) M(s, scratch) M(s, d_x)
#define MOEI_OF_moe_cache(M, s) M(s, net) M(s, n_tokens) M(s, most) M(s, memory) M(s, size)
#define MOEI_OF_moe_sampling(M, s) M(s, greedy) M(s, temperature) M(s, top_k) M(s, top_p)
#define MOEI_OF_moe_mixture(M, s) M(s, n) M(s, experts) M(s, width) M(s, p) M(s, expert_p) M(s, outputs) M(s, labels) \
    M(s, targets) M(s, temperature)
#define MOEI_OF_moe_mixture_losses(M, s) M(s, loss) M(s, answer)
#define MOEI_OF_moe_data(M, s) M(s, n) M(s, x) M(s, labels) M(s, targets) M(s, call) M(s, token_ids) M(s, length)
#define MOEI_OF_moe_evaluation(M, s) M(s, n) M(s, loss) M(s, accuracy)
#define MOEI_OF_moe_progress(M, s) M(s, epoch) M(s, epochs) M(s, step) M(s, steps) M(s, loss) M(s, router_loss) \
    M(s, gradient_norm) M(s, epoch_ended) M(s, test) M(s, rate) M(s, total_step) M(s, total_steps) M(s, samples)
#define MOEI_OF_moe_param_group(M, s) M(s, pattern) M(s, rate) M(s, decay) M(s, frozen)
#define MOEI_OF_moe_train_config(M, s) M(s, criterion) M(s, optimizer) M(s, epochs) M(s, batch) M(s, rate) \
    M(s, final_rate) M(s, momentum) M(s, beta1) M(s, beta2) M(s, epsilon) M(s, decay) M(s, clip) M(s, seed) \
    M(s, progress) M(s, progress_ctx) M(s, accumulate) M(s, schedule) M(s, warmup) M(s, total_steps) M(s, groups) \
    M(s, n_groups) M(s, evaluate_every) M(s, checkpoint) M(s, checkpoint_every) M(s, resume)
#define MOEI_OF_moe_trainer(M, s) M(s, net) M(s, config) M(s, steps) M(s, rng) M(s, rate) M(s, total_steps) \
    M(s, n_accumulated) M(s, position) M(s, memory) M(s, memory_size) M(s, factors) M(s, work) M(s, work_size) \
    M(s, most)
#define MOEI_OF_moe_step(M, s) M(s, loss) M(s, router_loss) M(s, gradient_norm)
#define MOEI_OF_moe_loader(M, s) M(s, ctx) M(s, fetch)
#define MOEI_OF_moe_model(M, s) M(s, version) M(s, weights_are) M(s, run) M(s, choices) M(s, d_in) M(s, d_out) \
    M(s, length) M(s, scratch_size) M(s, state_size) M(s, input_scale) M(s, output_scale) M(s, weights) \
    M(s, weights_size) M(s, experts) M(s, experts_size) M(s, ops) M(s, n_ops) M(s, n_main) M(s, mixtures) \
    M(s, n_mixtures) M(s, attentions) M(s, n_attentions) M(s, net) M(s, multiplications)
#define MOEI_OF_moe_choice(M, s) M(s, expert) M(s, weight)
#define MOEI_OF_moe_blocks_slot(M, s) M(s, at) M(s, size) M(s, used) M(s, pinned)
#define MOEI_OF_moe_blocks(M, s) M(s, loader) M(s, block_size) M(s, slots) M(s, memory) M(s, n) M(s, requests) \
    M(s, reads) M(s, bytes) M(s, hits) M(s, hit_bytes)
#define MOEI_OF_moe_hme_config(M, s) M(s, d_in) M(s, d_out) M(s, n_groups) M(s, n_experts) M(s, family) M(s, steps) \
    M(s, variance) M(s, min_variance)
#define MOEI_OF_moe_hme(M, s) M(s, config) M(s, gate) M(s, gates) M(s, experts) M(s, variances) M(s, parameters) \
    M(s, n_parameters) M(s, kept) M(s, best) M(s, gradient) M(s, normal) M(s, outputs) M(s, groups) M(s, row) \
    M(s, width) M(s, in_group) M(s, all) M(s, memory) M(s, memory_size) M(s, allocator)
#define MOEI_OF_moe_modular(M, s) M(s, trainer) M(s, memory) M(s, memory_size) M(s, teacher) M(s, n_teacher) \
    M(s, n_mixtures) M(s, candidate) M(s, best) M(s, drawn) M(s, changed) M(s, sequences) M(s, net_work) \
    M(s, net_size)
#define MOEI_OF_moe_modular_step_result(M, s) M(s, log_likelihood) M(s, changed) M(s, last)
#define MOEI_OF_moe_model_config(M, s) M(s, weights) M(s, calibration) M(s, length) M(s, loader) M(s, allocator) \
    M(s, same_bits)
#define MOEI_OF_moe_built_model(M, s) M(s, model) M(s, weights) M(s, experts) M(s, ops) M(s, mixtures) \
    M(s, attentions) M(s, external) M(s, net) M(s, obstacle) M(s, allocator) M(s, profile)
#define MOEI_OF_moe_profile_row(M, s) M(s, name) M(s, op) M(s, module) M(s, outputs) M(s, inputs) M(s, calls) \
    M(s, multiplications) M(s, weight_bytes) M(s, instructions) M(s, compared) M(s, snr) M(s, net_compared) \
    M(s, net_snr) M(s, saturated) M(s, used) M(s, same)
#define MOEI_OF_moe_profile_vector(M, s) M(s, at) M(s, size) M(s, first) M(s, last)
#define MOEI_OF_moe_profile(M, s) M(s, rows) M(s, n_rows) M(s, vectors) M(s, n_vectors) M(s, instructions) \
    M(s, allocator)
#define MOEI_OF_moe_import_source(M, s) M(s, name) M(s, size) M(s, ctx) M(s, read_at)
#define MOEI_OF_moe_import_options(M, s) M(s, exact) M(s, context) M(s, top_k) M(s, kernels) M(s, cache_type) \
    M(s, memory)
#define MOEI_OF_moe_imported(M, s) M(s, net) M(s, architecture) M(s, vocabulary) M(s, context) M(s, n_blocks) \
    M(s, file_bytes) M(s, owned)
#define MOEI_OF_moe_tokenizer(M, s) M(s, n_tokens) M(s, bos) M(s, eos) M(s, eot) M(s, unknown) M(s, padding) \
    M(s, kind) M(s, add_bos) M(s, add_eos) M(s, wants_nfc) M(s, chat_template) M(s, architecture) M(s, space) \
    M(s, strip) M(s, whole) M(s, fuse) M(s, n_passes) M(s, passes) M(s, n_symbols) M(s, longest) M(s, lowest) \
    M(s, n_special) M(s, bytes) M(s, allocator) M(s, texts) M(s, symbols) M(s, lookup) M(s, merges) M(s, pairs) \
    M(s, special) M(s, chat)
#define MOEI_OF_moe_decoder(M, s) M(s, tokenizer) M(s, flags) M(s, begun) M(s, n_held) M(s, held)
#define MOEI_OF_moe_chat(M, s) M(s, name) M(s, marks) M(s, architectures) M(s, begin) M(s, before) M(s, after) \
    M(s, reply) M(s, joined)
#define MOEI_OF_moe_exchange(M, s) M(s, row_bytes) M(s, send) M(s, send_counts) M(s, send_at) M(s, receive) \
    M(s, receive_counts) M(s, receive_at) M(s, channel)
#define MOEI_OF_moe_traffic(M, s) M(s, rows) M(s, bytes) M(s, tokens) M(s, assignments) M(s, assignments_remote) \
    M(s, assignments_off_machine) M(s, exchanges) M(s, messages) M(s, messages_off_machine)
#define MOEI_OF_moe_transport(M, s) M(s, batch) M(s, ctx) M(s, rank) M(s, n_ranks) M(s, ranks_per_machine) \
    M(s, two_level) M(s, local_routing) M(s, chunks) M(s, counts) M(s, rows) M(s, sum) M(s, traffic) M(s, allocator) \
    M(s, memory) M(s, memory_size)
#define MOEI_OF_moe_figure(M, s) M(s, kind) M(s, title) M(s, caption) M(s, rows) M(s, columns) M(s, stride) \
    M(s, values) M(s, half_widths) M(s, experts) M(s, cells) M(s, row_names) M(s, column_names) M(s, row_label) \
    M(s, column_label) M(s, value_label) M(s, x) M(s, y) M(s, n_experts) M(s, decimals) M(s, reference) \
    M(s, reference_name)
#define MOEI_OF_moe_history(M, s) M(s, n) M(s, at) M(s, values) M(s, seen) M(s, every)
#define MOEI_OF_moe_smooth_config(M, s) M(s, alpha)
#define MOEI_OF_moe_smooth_result(M, s) M(s, modules) M(s, channels) M(s, least) M(s, most)
#define MOEI_STRUCTS_CORE(S) S(moe_error) S(moe_parallel) S(moe_adamw_step) S(moe_kernels) S(moe_external_type) \
    S(moe_external) S(moe_rng) S(moe_field) S(moe_router_config) S(moe_preset) S(moe_parameter) S(moe_batch) \
    S(moe_call) S(moe_assignment) S(moe_dispatch_plan) S(moe_routing) S(moe_custom) S(moe_router) S(moe_metrics) \
    S(moe_report) S(moe_instability_report) S(moe_error_shares) S(moe_allocator) S(moe_arena) S(moe_stream) \
    S(moe_buffer) S(moe_tensor) S(moe_file_tensor) S(moe_file) S(moe_limits) S(moe_metadata) S(moe_layer_config) \
    S(moe_layer) S(moe_quant_error) S(moe_layer_pass) S(moe_attention_config) S(moe_module) S(moe_net) S(moe_net_pass) \
    S(moe_cache) S(moe_sampling) S(moe_mixture) S(moe_mixture_losses) S(moe_data) S(moe_evaluation) S(moe_progress) \
    S(moe_param_group) S(moe_train_config) S(moe_trainer) S(moe_step) S(moe_loader) S(moe_model) S(moe_choice)
#ifdef MOE_BLOCKS_H
#define MOEI_STRUCTS_BLOCKS(S) S(moe_blocks_slot) S(moe_blocks)
#else
#define MOEI_STRUCTS_BLOCKS(S)
#endif
#ifdef MOE_CLASSIC_H
#define MOEI_STRUCTS_CLASSIC(S) S(moe_hme_config) S(moe_hme) S(moe_modular) S(moe_modular_step_result)
#else
#define MOEI_STRUCTS_CLASSIC(S)
#endif
#ifdef MOE_EXPORT_H
#define MOEI_STRUCTS_EXPORT(S) S(moe_model_config) S(moe_built_model) S(moe_profile_row) S(moe_profile_vector) \
    S(moe_profile)
#else
#define MOEI_STRUCTS_EXPORT(S)
#endif
#ifdef MOE_IMPORT_H
#define MOEI_STRUCTS_IMPORT(S) S(moe_import_source) S(moe_import_options) S(moe_imported) S(moe_tokenizer) \
    S(moe_decoder) S(moe_chat)
#else
#define MOEI_STRUCTS_IMPORT(S)
#endif
#ifdef MOE_RANKS_H
#define MOEI_STRUCTS_RANKS(S) S(moe_exchange) S(moe_traffic) S(moe_transport)
#else
#define MOEI_STRUCTS_RANKS(S)
#endif
#ifdef MOE_REPORT_H
#define MOEI_STRUCTS_REPORT(S) S(moe_figure) S(moe_history)
#else
#define MOEI_STRUCTS_REPORT(S)
#endif
#ifdef MOE_SMOOTH_H
#define MOEI_STRUCTS_SMOOTH(S) S(moe_smooth_config) S(moe_smooth_result)
#else
#define MOEI_STRUCTS_SMOOTH(S)
#endif
#define MOEI_STRUCTS(S) MOEI_STRUCTS_CORE(S) MOEI_STRUCTS_BLOCKS(S) MOEI_STRUCTS_CLASSIC(S) MOEI_STRUCTS_EXPORT(S) \
    MOEI_STRUCTS_IMPORT(S) MOEI_STRUCTS_RANKS(S) MOEI_STRUCTS_REPORT(S) MOEI_STRUCTS_SMOOTH(S)
/* layouts: end */

#define MOEI_LAYOUT_WORD(s, member) " " #member
#define MOEI_LAYOUT_WORDS(s) #s MOEI_JOIN(MOEI_OF_, s)(MOEI_LAYOUT_WORD, s),
#define MOEI_LAYOUT_MEMBER(s, member) {(uint16_t)offsetof(s, member), (uint16_t)sizeof(((s *)NULL)->member)},
#define MOEI_LAYOUT_STRUCT(s) {0, (uint16_t)sizeof(s)}, MOEI_JOIN(MOEI_OF_, s)(MOEI_LAYOUT_MEMBER, s)

static const char *const moei_layout_names[] = {MOEI_STRUCTS(MOEI_LAYOUT_WORDS)};

/* One entry for each word of the names. */
static const struct {
    uint16_t offset, size;
} moei_layout_rows[] = {MOEI_STRUCTS(MOEI_LAYOUT_STRUCT)};

const char *moe_struct_names(size_t i) {
    return i < sizeof moei_layout_names / sizeof *moei_layout_names ? moei_layout_names[i] : NULL;
}

/* Whether the word, which a space or the end of the text terminates, is name; stores its length. */
static int moei_is_word(const char *word, const char *name, size_t *length) {
    size_t n = 0;
    while (word[n] != ' ' && word[n] != '\0') n++;
    *length = n;
    return moei_strlen(name) == n && moei_memcmp(word, name, n) == 0;
}

moe_status moe_struct_place(const char *name, const char *member, size_t *offset, size_t *size) {
    const char *word;
    size_t i, length, at = 0;
    if (name == NULL) return MOE_ERR_ARGUMENT;
    for (i = 0; (word = moe_struct_names(i)) != NULL; i++, at++) {
        int here = moei_is_word(word, name, &length), found = here && member == NULL;
        while (!found && word[length] != '\0') {
            word += length + 1;
            at++;
            found = moei_is_word(word, member != NULL ? member : "", &length) && here;
        }
        if (!found) continue;
        if (offset != NULL) *offset = moei_layout_rows[at].offset;
        if (size != NULL) *size = moei_layout_rows[at].size;
        return MOE_OK;
    }
    return MOE_ERR_NOT_FOUND;
}

#endif /* MOE_NO_TRAIN */
#endif /* MOE_IMPLEMENTATION */
