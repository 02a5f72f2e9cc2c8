/* moe_routers.h - 0.1.0 - the routers of mixtures of experts, as one pipeline - MIT or public domain, at your choice (see LICENSE)

   Recipe
     1. Copy moe_kernels.h and moe_routers.h into your project (moe.h includes this file: with moe.h there is nothing to do).
     2. In ONE source file:   #define MOE_IMPLEMENTATION   and then   #include "moe_routers.h"
     3. Everywhere else:      #include "moe_routers.h"       Link with the mathematics library (-lm).

   First program: eight experts, the best two of each token, and who goes where.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe_routers.h"
 * #include <stdio.h>
 *
 * static const moe_real weight[8 * 2] = {1, 0, 0, 1, -1, 0, 0, -1, 1, 1, -1, 1, -1, -1, 1, -1}; // [E,d]: directions in the plane
 * static const moe_real x[3 * 2] = {2, 0.1f, -1, 1.2f, 0.3f, -3};                                // [N,d]: three tokens
 * static unsigned char memory[8192];
 *
 * int main(void) {
 *     moe_router_config config = {0};
 *     moe_router router;
 *     moe_call call = {0};
 *     moe_routing routing;
 *     moe_error error;
 *     size_t e, i;
 *     config.d_model = 2; // all else: 8 experts, top 2, softmax, weights p / sum p
 *     if (moe_router_init(&router, &config, NULL, &error) != MOE_OK) return puts(error.message), 1;
 *     router.tensors[MOE_ROUTER_WEIGHT] = weight;
 *     call.n_tokens = 3, call.x = x;
 *     if (moe_route(&router, &call, memory, sizeof memory, &routing) != MOE_OK) return 1;
 *     for (e = 0; e < 8; e++)
 *         for (i = routing.plan.offsets[e]; i < routing.plan.offsets[e + 1]; i++)
 *             printf("expert %d takes token %d with weight %.3f\n", (int)e, (int)routing.plan.entries[i].token,
 *                    (double)routing.plan.entries[i].weight_out);
 *     return 0;
 * }
 * --- end ---

   Options: those of moe_kernels.h, where a table says what they cost. MOE_NO_TRAIN drops the backward pass and the losses.

   Glossary
     token        one row of x, d_model numbers. A sample that is not part of a text is a token as well.
     expert       one of E functions; the router knows only its number.
     logits z     one number per token and expert, before any normalisation.
     gate r       what the gate function (softmax, sigmoid, ...) makes of z. p is r after refinement; without a refining stage p = r.
     S_t          the set of experts chosen for token t; top_k is how many.
     weight w     the factor on a chosen expert's output (or input): the combine weight.
     pair         one token at one expert, an entry of the plan.
     plan         all pairs, sorted by expert: what dispatch and combine need to know.
     capacity     the largest number of pairs that an expert takes; without one (the default) routing is dropless.
     replay       routing with recorded choices (select = given): the weights are computed anew, so gradients flow.
     trait        what a router needs or does: causal, needs_all_experts, stateful, ...

   Manual
     A router is a short pipeline of independent stages, and a named router is a setting of them:

       x --input--> u --score--> z --noise--> z --gate--> r --refine--> p --select--> S --weight--> w --capacity--> plan
                                 `--------------------------- losses ---------------------------'

     Each stage is one table of rows, one row per value of a configuration field: a function forward, a function backward, and facts about
     it. Read the file in that order: fields, schedules, input, score, noise, gate, refine, select, weight, losses, the configuration as a whole,
     presets, tensors, one call forward (capacity and the plan stand there), one call backward, state, metrics. A new router is a row in one of these tables, or no code at all: a preset is a line of text.

     Configuration. {0} with d_model is a good router. Every field is described by a row of moe_router_fields(): its name, kind, range and
     the names of its values. moe_router_check fills in defaults and refuses what makes no sense, naming the field or the two fields.
     Memory. moe_route_size gives the exact bytes for n tokens; moe_route works in that memory and allocates nothing.
     Arithmetic is in moe_real, whatever the experts use. The score's products use the kernels given to moe_router_init.
     Ties. Of equal scores the lower expert index wins. A NaN is never chosen.
     Numbers that are not finite. A call ends with MOE_ERR_NONFINITE when a logit of a real token, a p behind refine, or a weight of the plan is infinite
     or NaN; so after MOE_OK the plan is finite, whatever the inputs were. Inputs up to 1e4 in size give finite results, losses and gradients with
     weights of ordinary size (as they are initialised). An expert whose selection bias or learned threshold is NaN is never chosen by it. Losses are
     not looked at: the trainer does that.
     Selection is a constant in the backward pass. Gradients flow through weights, gates, scores and losses.
     Masks. A padded token is routed nowhere, is counted nowhere, and whatever stands in its row, NaN included, cannot reach a result or a gradient.
     Losses are computed in a training call, with their factors included: routing.loss[MOE_LOSS_BALANCE] and so on. Their gradients are added by
     moe_route_backward without being asked for. With a perfectly even load and even gates, the balance loss is its factor alpha.
     k = 1 with weight sum or softmax makes every weight 1: moe_router_check_training refuses to train such a router in vain.
     Determinism. Bitwise, for the same kernels: a token's logits, gate, choices and weights do not depend on the other tokens of the call when
     moe_router_traits says MOE_TRAIT_CAUSAL without MOE_TRAIT_NEEDS_BATCH.
     State. What a router remembers (selection bias, running clusters, step, L1 factor, capacity bound) lies in tensors with the flag
     MOE_PARAM_STATE. moe_route reads them; moe_router_observe and moe_router_advance change them by the rules that the configuration turns on.
     Schedules of K, of a temperature and of the selection follow the tensor router.step, in training and outside.
     Replay. moe_recorded_choices keeps what a call chose; call.given chooses it again. Custom. moe_router.custom takes part as a stage.
     Decoding. A router that needs other tokens at inference refuses a call with decoding = 1; moe_router_check_decoding says which mode would do.
     Causal refining reads earlier tokens from past_u and past_gate. What needs a batch in training alone (sinkhorn, balanced, drop rules) decodes.
     Soft selection goes another way after u: every expert works on mixtures of tokens; score, gate, weight and losses take no part.
     Metrics. moe_metrics_add after each moe_route, moe_metrics_report when wanted: entropies, load, capacity, expert and class, in double.
     Integers. moe_int_route routes one token without floating point; moe_int_router_plan_make says how, from a configuration.
     Pointers. Every moe_error may be NULL, and a table of kernels (plain C); what else may be NULL is said with the function or field. Where another
     pointer is NULL, a call that returns moe_status answers MOE_ERR_ARGUMENT; moe_router_slot, moe_int_route, and calls that return something else,
     do not look.
     Threads. No function keeps anything to itself. Calls with different memory may run at the same time; a moe_rng belongs to one call at a time.
*/
#include "moe_kernels.h"

#ifndef MOE_ROUTERS_H
#define MOE_ROUTERS_H

#if MOE_VERSION_MAJOR != 0 || MOE_VERSION_MINOR != 1 || MOE_VERSION_PATCH != 0
#error "moe: this is moe_routers.h of version 0.1.0, and moe_kernels.h is of another: copy all headers of one version"
#endif

#if MOE_REAL_IS_DOUBLE
#define moe_field_find moe_field_find_f64
#define moe_field_set moe_field_set_f64
#define moe_field_text moe_field_text_f64
#define moe_fields_apply moe_fields_apply_f64
#define moe_router_fields moe_router_fields_f64
#define moe_router_check moe_router_check_f64
#define moe_router_check_training moe_router_check_training_f64
#define moe_router_check_decoding moe_router_check_decoding_f64
#define moe_router_observe moe_router_observe_f64
#define moe_router_advance moe_router_advance_f64
#define moe_recorded_choices moe_recorded_choices_f64
#define moe_router_traits moe_router_traits_f64
#define moe_trait_name moe_trait_name_f64
#define moe_loss_name moe_loss_name_f64
#define moe_presets moe_presets_f64
#define moe_preset_find moe_preset_find_f64
#define moe_router_preset moe_router_preset_f64
#define moe_router_slot moe_router_slot_f64
#define moe_router_init moe_router_init_f64
#define moe_route_size moe_route_size_f64
#define moe_route_batch_size moe_route_batch_size_f64
#define moe_routing_own moe_routing_own_f64
#define moe_route moe_route_f64
#define moe_route_backward moe_route_backward_f64
#define moe_int_route moe_int_route_f64
#define moe_int_gate_logits moe_int_gate_logits_f64
#define moe_int_gate_relu moe_int_gate_relu_f64
#define moe_int_gate_softmax moe_int_gate_softmax_f64
#define moe_int_gate_sigmoid moe_int_gate_sigmoid_f64
#define moe_int_gate_sqrt_softplus moe_int_gate_sqrt_softplus_f64
#define moe_int_share_softmax moe_int_share_softmax_f64
#define moe_int_share_sigmoid moe_int_share_sigmoid_f64
#define moe_int_share_sqrt_softplus moe_int_share_sqrt_softplus_f64
#define moe_int_select_logits moe_int_select_logits_f64
#define moe_int_select_top_k moe_int_select_top_k_f64
#define moe_int_select_grouped moe_int_select_grouped_f64
#define moe_int_select_top_p moe_int_select_top_p_f64
#define moe_int_select_threshold moe_int_select_threshold_f64
#define moe_int_select_hash moe_int_select_hash_f64
#define moe_int_weight_raw moe_int_weight_raw_f64
#define moe_int_weight_sum moe_int_weight_sum_f64
#define moe_int_weight_norm moe_int_weight_norm_f64
#define moe_int_weight_softmax moe_int_weight_softmax_f64
#define moe_int_weight_uniform moe_int_weight_uniform_f64
#define moe_int_weight_one moe_int_weight_one_f64
#define moe_int_weight_sparsemixer moe_int_weight_sparsemixer_f64
#define moe_int_scale moe_int_scale_f64
#define moe_int_router_plan_make moe_int_router_plan_make_f64
#define moe_int_router_move moe_int_router_move_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

#ifndef MOE_NO_FLOAT
/* ---- configuration as data --------------------------------------------------------------------------------------------
   Every field of a configuration is one row of a table. The rows make the checks, the messages, the text in files and the
   settings of presets, so that no field can be forgotten in one of them. */

/* Kinds of fields: an int, an int that is 0 or 1, an int that indexes choices, a moe_real. */
enum { MOE_FIELD_INT = 0, MOE_FIELD_FLAG = 1, MOE_FIELD_CHOICE = 2, MOE_FIELD_REAL = 3 };

/* One field: a row of moe_router_fields or moe_layer_fields. */
typedef struct moe_field {
    const char *name;           /* in files, presets and messages */
    int kind;                   /* MOE_FIELD_ */
    size_t offset;              /* in the configuration struct */
    double min, max;            /* allowed values; 0 is always allowed and means the default */
    const char *const *choices; /* names of the values 0, 1, ...; NULL at the end; NULL unless MOE_FIELD_CHOICE */
    const char *about;          /* one line */
} moe_field;

/* The row called name in a table that ends with a row whose name is NULL; NULL if there is none. Thread-safe. */
MOE_API const moe_field *moe_field_find(const moe_field *fields, const char *name);
/* Sets one field of config from text ("2", "0.01", "cosine"). MOE_ERR_NOT_FOUND: no such field; MOE_ERR_CONFIG: the text is not a value of it.
   error (may be NULL) names both. On failure config is unchanged. */
MOE_API moe_status moe_field_set(const moe_field *fields, void *config, const char *name, const char *value, moe_error *error);
/* The value of a field as the text that moe_field_set reads back to the same value; terminated, cut off at room. */
MOE_API void moe_field_text(const moe_field *field, const void *config, char *text, size_t room);
/* Applies "name=value name=value ..." in order; stops at the first error, what stands before it stays set. settings NULL or empty does nothing. Errors
   as moe_field_set; MOE_ERR_CONFIG too where a name has no "=". */
MOE_API moe_status moe_fields_apply(const moe_field *fields, void *config, const char *settings, moe_error *error);

/* ---- stages: 0 is the default everywhere ------------------------------------------------------------------------------- */

/* u, the router's input [N,d].
     plain       u = x
     jitter      u = x * xi, xi uniform in [1-eps, 1+eps] per element, in training only (Fedus et al. 2022, Switch transformers)
     scaled_rms  u = x / sqrt(mean x^2 + 1e-6) * g * d^-1/2, g learned (Gemma 4)
     adaptive_clustering  u_t = m_t * x_t, m_t large where the cluster of tokens that took the same expert in the previous mixture layer is
                 tight (Nielsen et al. 2025, Tight clusters make specialized experts) */
enum { MOE_INPUT_PLAIN = 0, MOE_INPUT_JITTER, MOE_INPUT_SCALED_RMS, MOE_INPUT_ADAPTIVE_CLUSTERING, MOE_INPUT_COUNT };
/* paper: M_kq = 1/(s_kq + 1e-6) over the previous layer's x, mean over q scaled to 1. code: as the authors' program, over this layer's x.
   running: M is the state tensor router.ac_running. random: M is fixed at max(0, 1 + n/2), the papers' control. */
enum { MOE_AC_PAPER = 0, MOE_AC_CODE, MOE_AC_RUNNING, MOE_AC_RANDOM, MOE_AC_COUNT };
/* s_kq of a cluster: mean |h - mean|, mean (h - mean)^2, mean over all pairs of |h - h'|. */
enum { MOE_SPREAD_MAD = 0, MOE_SPREAD_VARIANCE, MOE_SPREAD_PAIRWISE, MOE_SPREAD_COUNT };

/* What is added to z in training: n (softplus(u W_n^T) + noise_floor) (Shazeer et al. 2017); sigma n (V-MoE); Gumbel noise. */
enum { MOE_NOISE_NONE = 0, MOE_NOISE_NOISY_TOPK, MOE_NOISE_GAUSSIAN, MOE_NOISE_GUMBEL, MOE_NOISE_COUNT };

/* p from r, within one sequence.
     similarity  p_i = sum_j S_ij r_j, S = softmax_j(u_i . W_s u_j / tau) (Similarity-Aware MoE, Nguyen et al. 2025, Improving routing in
                 sparse mixture of experts with graph of tokens)
     attention   p_i = sum_j A'_ij r_j, A' the posterior of an attention head: softmax_j(log A_ij - |u_i - o_j|^2 / (2 sigma^2)) (Attention-Aware MoE) */
enum { MOE_REFINE_NONE = 0, MOE_REFINE_SIMILARITY, MOE_REFINE_ATTENTION, MOE_REFINE_COUNT };
/* u as it is; unit vectors; the product divided by sqrt(d). */
enum { MOE_SIMILARITY_NONE = 0, MOE_SIMILARITY_L2, MOE_SIMILARITY_RSQRT_D, MOE_SIMILARITY_COUNT };
/* The head with the least mean entropy over the sequence; all heads, each by its posterior weight; the head attention_head. */
enum { MOE_HEADS_MIN_ENTROPY = 0, MOE_HEADS_ALL, MOE_HEADS_FIXED, MOE_HEADS_COUNT };
/* What attention compares with the heads' outputs: u of this pipeline, or the attention output supplied with the call. */
enum { MOE_ATTENTION_U_INPUT = 0, MOE_ATTENTION_U_OUTPUT, MOE_ATTENTION_U_COUNT };

/* z, the logits [N,E].
     linear  z_te = u_t . W_e + b_e
     random  the same, W and b frozen at their random start (Chen et al. 2023, Sparse MoE as the new dropout)
     mlp     z_t = W2 act(W1 u_t + b1) + b2
     cosine  z_te = cos(P u_t, W_e) / tau (Chi et al. 2022, On the representation collapse of sparse mixture of experts);
             cosine_keep_length: (P u_t) . W_e / |W_e| / tau
     norm    z_te = norm of an activation inside expert e (Lv et al. 2025, Autonomy-of-experts models); the caller supplies the activation
     grap    z_te = mean of the e-th block of d/E features (LocMoE, Li et al. 2024); grap_cosine: block sum / (|u_t| sqrt(d/E)) (LocMoE+)
     attentive    z_te = (W_Q h_g) . (W_K h_e) / sqrt(h), h_g = act(W1 u_t + b1) the gate's hidden layer, h_e that of expert e (supplied)
     competition  z_te = mean over features of softplus(f_e(x_t)) (Pham et al. 2024, CompeteSMoE); the caller supplies f_e(x_t)
     dselect z_te = sum over i < K of softmax(A u_t)_i prod_j (bit j of e is 1 ? S(c_ij) : 1 - S(c_ij)), c_ij = C_ij . u_t, j < m = ceil(log2 E): K learned
             binary codes; S(v) = 0 below -1/2, 1 above 1/2, -2 v^3 + 3/2 v + 1/2 between (Hazimeh et al. 2021, DSelect-k). z is itself a gate:
             gate = identity, select = positive
     custom  moe_router.custom.score fills in z */
enum { MOE_SCORE_LINEAR = 0, MOE_SCORE_RANDOM, MOE_SCORE_MLP, MOE_SCORE_COSINE, MOE_SCORE_NORM, MOE_SCORE_GRAP, MOE_SCORE_ATTENTIVE, MOE_SCORE_COMPETITION,
       MOE_SCORE_DSELECT, MOE_SCORE_CUSTOM, MOE_SCORE_COUNT };

/* Which activation the score norm reads. low is reduce x of a factorised expert ("down" in files, after the paper's W_down); gate is what enters the
   expert's activation function, act what leaves it, up the linear branch, product act times up; an mlp expert has gate (= up) and act (= product).
   A swiglu expert's limit and offset come after gate and up, before act and product. */
enum { MOE_NODE_LOW = 0, MOE_NODE_GATE, MOE_NODE_UP, MOE_NODE_ACT, MOE_NODE_PRODUCT, MOE_NODE_OUTPUT, MOE_NODE_COUNT };
enum { MOE_NORM_L2 = 0, MOE_NORM_L1, MOE_NORM_LINF, MOE_NORM_COUNT };

/* r, the gate values [N,E]: softmax(z/T), sigmoid(z/T), sqrt(softplus(z)), max(z,0), z. */
enum { MOE_GATE_SOFTMAX = 0, MOE_GATE_SIGMOID, MOE_GATE_SQRT_SOFTPLUS, MOE_GATE_RELU, MOE_GATE_IDENTITY, MOE_GATE_COUNT };

/* S_t, the chosen experts. b is the selection bias, 0 if there is none.
     top_k          the K largest of the selection score: z where p rises with it and nothing is added, else p + b
     dense          all experts
     given          the caller's recorded indices (replay)
     grouped_top_k  top_k of p + b inside the groups_kept best of `groups` groups of experts (DeepSeek-V2: max; V3: top2_sum)
     top_p          the best experts until their p sums to more than top_p, the crossing one included (Huang et al. 2024, Harder tasks need more experts)
     threshold      all with p > theta, theta fixed or learned (Guo et al. 2024, DynMoE); threshold_fallback: the best one when there is none
     positive       all with p > 0 (Wang et al. 2024, ReMoE); may be empty
     expert_choice  each expert takes its C = max(1, round(capacity_factor N / E)) best tokens by p, or by z (Zhou et al. 2022)
     affinity       each token goes to its best expert by z; the expert keeps the shortest prefix of its tokens that holds affinity_mass of their summed
                    positive z (or affinity_sum of it), at least capacity_min, at most capacity (LocMoE+, Li et al. 2024)
     hash           router.table[token id], K experts per token id (Roller et al. 2021, Hash layers)
     sinkhorn       in training the K largest of d0 Q d1, Q = exp(z) scaled to even rows and columns (Clark et al. 2022, Unified scaling laws for
                    routed language models); outside training top_k
     sample         in training K draws without replacement from p; outside training the K largest p
     balanced       in training the assignment of one expert per token with the largest sum of z under which all experts take equally many
                    tokens, within 1 (Lewis et al. 2021, BASE layers); outside training top_k
     custom         moe_router.custom.select marks the experts
     soft           every expert works on `slots` mixtures of the sequence's tokens instead: L = u . phi, dispatch = softmax over tokens, combine = softmax
                    over slots (Puigcerver et al. 2024, From sparse to soft mixtures of experts); soft_normalise: L = unit(u) . (scale unit(phi)).
                    Score, gate, weight and losses take no part */
enum {
    MOE_SELECT_TOP_K = 0, MOE_SELECT_DENSE, MOE_SELECT_GIVEN, MOE_SELECT_GROUPED_TOP_K, MOE_SELECT_TOP_P, MOE_SELECT_THRESHOLD, MOE_SELECT_POSITIVE,
    MOE_SELECT_EXPERT_CHOICE, MOE_SELECT_AFFINITY, MOE_SELECT_HASH, MOE_SELECT_SOFT, MOE_SELECT_SINKHORN, MOE_SELECT_SAMPLE,
    MOE_SELECT_BALANCED, MOE_SELECT_CUSTOM, MOE_SELECT_COUNT
};
enum { MOE_GROUP_MAX = 0, MOE_GROUP_TOP2_SUM, MOE_GROUP_COUNT };
/* When threshold finds no expert, the best one is taken: always, in evaluation only, never. */
enum { MOE_FALLBACK_ALWAYS = 0, MOE_FALLBACK_EVALUATION, MOE_FALLBACK_NEVER, MOE_FALLBACK_COUNT };
enum { MOE_EXPERT_CHOICE_P = 0, MOE_EXPERT_CHOICE_Z, MOE_EXPERT_CHOICE_COUNT };

/* w, the combine weights over S_t.
     sum          p_te / sum_S p           softmax  exp(z_te) / sum_S exp(z)      raw  p_te
     p_norm       p_te / (sum_S p^P)^(1/P)  uniform  1 / |S_t|                     one  1
     sparsemixer  one after another: the pick's softmax among experts not yet picked and within 2 eps of the best
                  (Liu et al. 2023, Sparse backpropagation for MoE training)
   A denominator of 0 gives 0. One below 1e-30 (1e-290 in the double build), as where a token's chosen experts all lie far behind others, passes no
   gradient: the slope would not be finite. */
enum { MOE_WEIGHT_SUM = 0, MOE_WEIGHT_SOFTMAX, MOE_WEIGHT_RAW, MOE_WEIGHT_P_NORM, MOE_WEIGHT_UNIFORM, MOE_WEIGHT_ONE, MOE_WEIGHT_SPARSEMIXER, MOE_WEIGHT_COUNT };

/* capacity: who stays when an expert has more than C pairs. Pairs are placed by rank of choice first, then
     position  first come first served        priority  tokens in descending max p (Riquelme et al. 2021, V-MoE)
     random    tokens in random order         score     ignores rank: the largest p of that expert stay */
enum { MOE_DROP_POSITION = 0, MOE_DROP_PRIORITY, MOE_DROP_RANDOM, MOE_DROP_SCORE, MOE_DROP_COUNT };
/* Before capacity, in training: the second choice stays with probability min(1, 2 w_2) (Lepikhin et al. 2020, GShard), the n-th with
   min(1, w_n / 0.2) (Zoph et al. 2022, ST-MoE). */
enum { MOE_DROP_RULE_NONE = 0, MOE_DROP_RULE_GSHARD, MOE_DROP_RULE_ST_MOE, MOE_DROP_RULE_COUNT };
/* Weights of the surviving pairs: as before dropping, or divided by the sum of the surviving ones. */
enum { MOE_RENORMALIZE_BEFORE = 0, MOE_RENORMALIZE_AFTER, MOE_RENORMALIZE_COUNT };

/* Where the weight is applied: on the expert's output, or on its input (Llama 4). */
enum { MOE_APPLY_OUTPUT = 0, MOE_APPLY_INPUT, MOE_APPLY_COUNT };

/* The least capacity of LocMoE (Li et al. 2024): C_min = exp(d delta^2 / (2 - delta^2)) / E, delta the largest |cos| between a token and an
   expert's gating vector. first: of the first training call, kept as state (LocMoE); every: of each call (LocMoE+). */
enum { MOE_BOUND_NONE = 0, MOE_BOUND_FIRST, MOE_BOUND_EVERY, MOE_BOUND_COUNT };

/* What tau_schedule moves from its own value to tau_end. */
enum { MOE_TAU_NONE = 0, MOE_TAU_GATE_TEMPERATURE, MOE_TAU_COSINE_TAU, MOE_TAU_SIMILARITY_TAU, MOE_TAU_ATTENTION_SIGMA, MOE_TAU_COUNT };

/* Losses, each with its own factor in the configuration, 0 = off. */
enum {
    MOE_LOSS_BALANCE = 0, MOE_LOSS_Z, MOE_LOSS_IMPORTANCE, MOE_LOSS_ENTROPY, MOE_LOSS_USAGE_ENTROPY, MOE_LOSS_SIMILARITY, MOE_LOSS_LOCALITY, MOE_LOSS_L1,
    MOE_LOSS_ORTHOGONAL, MOE_LOSS_LOAD, MOE_LOSS_DISTILL, MOE_LOSS_COUNT
};
/* The distance from a teacher, which gets no gradient: -ln softmax(z) at its best expert; the cross-entropy of the two softmaxes; their mean
   squared difference. */
enum { MOE_DISTILL_CE_HARD = 0, MOE_DISTILL_CE_SOFT, MOE_DISTILL_MSE, MOE_DISTILL_COUNT };
/* n_e / sum n, n_e / N, first choices only. */
enum { MOE_BALANCE_PAIRS = 0, MOE_BALANCE_TOKENS, MOE_BALANCE_FIRST, MOE_BALANCE_COUNT };
/* Over the call, or the mean over its sequences. */
enum { MOE_SCOPE_BATCH = 0, MOE_SCOPE_SEQUENCES, MOE_SCOPE_COUNT };
/* CV^2 of sum p, of sum r (the gate of the logits without noise), of sum w before capacity and scale. */
enum { MOE_IMPORTANCE_PROBABILITIES = 0, MOE_IMPORTANCE_GATE, MOE_IMPORTANCE_WEIGHTS, MOE_IMPORTANCE_COUNT };

/* What a router needs or does. CAUSAL: a token's result does not depend on later tokens of the call. NEEDS_BATCH: it depends on other tokens; a
   router with CAUSAL and without NEEDS_BATCH gives a token alone the same result as in a batch. */
enum {
    MOE_TRAIT_CAUSAL = 1,
    MOE_TRAIT_NEEDS_BATCH = 2,
    MOE_TRAIT_NEEDS_TOKEN_IDS = 4,
    MOE_TRAIT_NEEDS_ATTENTION = 8,
    MOE_TRAIT_NEEDS_PREVIOUS_LAYER = 16,
    MOE_TRAIT_NEEDS_ALL_EXPERTS = 32,
    MOE_TRAIT_STOCHASTIC = 64,
    MOE_TRAIT_STATEFUL = 128,
    MOE_TRAIT_NEEDS_GIVEN = 256
};

/* ---- the router's configuration ---------------------------------------------------------------------------------------- */

/* What small builds may leave out beside stages (MOE_KEEP_EXTRAS, see moe_kernels.h): limits on the tokens of an expert; what changes with steps; calls with
   training = 1; swiglu experts with swiglu_alpha, swiglu_limit or swiglu_offset; calls with a batch. */
enum { MOE_EXTRA_CAPACITY = 0, MOE_EXTRA_SCHEDULE, MOE_EXTRA_TRAINING, MOE_EXTRA_SHAPED, MOE_EXTRA_BATCH, MOE_EXTRA_COUNT };

/* 65536 and 2^24; less where an int has 16 bits. */
enum { MOE_MAX_EXPERTS = sizeof(int) > 2 ? 65536 : 32767, MOE_MAX_WIDTH = sizeof(int) > 2 ? 16777216 : 32767 };

/* {0} with d_model set is a good router: 8 experts, the 2 best of a linear score, softmax over all, weights p / sum p. A 0 in
   any field means its default, given here in brackets. */
typedef struct moe_router_config {
    int d_model;             /* width of a token, 1..MOE_MAX_WIDTH; required */
    int n_experts;           /* E, 1..MOE_MAX_EXPERTS [8] */
    int top_k;               /* K, 1..E [2, or 1 when E = 1] */
    int input;               /* MOE_INPUT_ [plain] */
    moe_real jitter_eps;     /* eps of jitter [0.01] */
    int ac_mode;             /* MOE_AC_ of adaptive_clustering [paper] */
    int ac_spread;           /* MOE_SPREAD_ [mad] */
    int ac_mix;              /* J: how many of the previous layer's experts are mixed [1] */
    moe_real ac_lambda;      /* > 0: the theorem's exact weights lambda / (s + alpha_k) [0] */
    moe_real ac_rho;         /* rho of mode running: table <- rho table + (1 - rho) M [0.9] */
    int score;               /* MOE_SCORE_ [linear] */
    int router_bias;         /* 1: linear and random have a bias [0] */
    int cosine_dim;          /* r, rows of the projection P [0: no projection] */
    int cosine_keep_length;  /* 1: only the expert's vector is normalised [0] */
    int cosine_learn_tau;    /* 1: tau is the tensor router.temperature [0] */
    moe_real cosine_tau;     /* tau, or its start when learned [1] */
    int norm_node;           /* MOE_NODE_ [low] */
    int norm_order;          /* MOE_NORM_ [l2] */
    int router_hidden;       /* hidden width of the scores mlp [d_model] and attentive [the width of the experts' hidden layer] */
    int router_act;          /* MOE_ACT_ of the scores mlp and attentive [relu] */
    int grap_cosine;         /* 1: grap divides by the token's length [0] */
    int noise;               /* MOE_NOISE_ [none] */
    moe_real noise_floor;    /* of noisy_topk [0.01] */
    moe_real noise_sigma;    /* of gaussian [1/E] */
    int gate;                /* MOE_GATE_ [softmax] */
    moe_real gate_temperature; /* T of softmax and sigmoid [1] */
    int refine;              /* MOE_REFINE_ [none] */
    moe_real similarity_tau; /* [1] */
    int similarity_scale;    /* MOE_SIMILARITY_ [none] */
    int similarity_learned;  /* 1: W_s is the tensor router.similarity [0: identity] */
    int lower_entropy_only;  /* 1: only tokens j with H(r_j) <= H(r_i) take part [0] */
    int causal;              /* 1: only tokens j <= i take part [0] */
    int heads;               /* heads supplied for attention [1] */
    int attention_heads;     /* MOE_HEADS_ [min_entropy] */
    int attention_head;      /* the head of fixed [0] */
    moe_real attention_sigma; /* [1] */
    int attention_u;         /* MOE_ATTENTION_U_ [input] */
    int select;              /* MOE_SELECT_ [top_k] */
    int selection_bias;      /* 1: the state tensor router.selection_bias is added to p for selection only [0] */
    int groups;              /* groups of grouped_top_k [1] */
    int groups_kept;         /* [1] */
    int group_score;         /* MOE_GROUP_ [max] */
    moe_real top_p;          /* P of top_p [0.6] */
    moe_real threshold;      /* theta, or its start when learned [0.05] */
    int threshold_learned;   /* 1: theta is the tensor router.threshold [0] */
    int threshold_sigmoid;   /* 1: theta is the sigmoid of that tensor (DynMoE) [0] */
    int threshold_fallback;  /* MOE_FALLBACK_ [always] */
    int custom_batch;        /* 1: the custom score or selection reads other tokens as well: not causal [0] */
    int expert_choice_score; /* MOE_EXPERT_CHOICE_ [p] */
    moe_real affinity_mass;  /* share of an expert's affinity that it keeps [1] */
    moe_real affinity_sum;   /* or the sum itself [0: use affinity_mass] */
    int capacity;            /* most tokens per expert in affinity [0: no limit] */
    int table_size;          /* hash: number of token ids [0: must be set] */
    int slots;               /* soft: slots per expert and sequence [1] */
    int soft_normalise;      /* soft: 1: unit vectors and a learned scale [0] */
    int soft_sequences;      /* soft: most sequences in one call [1] */
    int weight;              /* MOE_WEIGHT_ [sum] */
    moe_real weight_p;       /* P of p_norm [1] */
    moe_real sparsemixer_eps; /* eps of sparsemixer [0.01] */
    int expert_scale;        /* 1: weights are multiplied by the tensor router.expert_scale (Gemma 4) [0] */
    moe_real scale;          /* weights are multiplied by this last of all [1] */
    int apply_to;            /* MOE_APPLY_ [output] */
    moe_real capacity_factor; /* cf: expert_choice's own [1]; elsewhere C = max(capacity_min, ceil(cf K N / E)) pairs per expert [0: dropless] */
    moe_real capacity_factor_eval; /* cf outside training [capacity_factor] */
    int drop_capacity;       /* C itself, instead of a factor [0] */
    int capacity_min;        /* [1] */
    int capacity_bound;      /* MOE_BOUND_: raises capacity_min to C_min; without capacity_factor and drop_capacity C_min is the capacity [none] */
    moe_real capacity_rho;   /* bound every: C_min is averaged over calls, mean <- rho mean + (1 - rho) C_min [0: not averaged] */
    int drop_order;          /* MOE_DROP_ [position] */
    int drop_rule;           /* MOE_DROP_RULE_ [none] */
    int renormalize;         /* MOE_RENORMALIZE_ [before] */
    moe_real loss_balance;   /* alpha [0] */
    int balance_over;        /* MOE_BALANCE_ [pairs] */
    int balance_scope;       /* MOE_SCOPE_ [batch] */
    moe_real loss_z;         /* beta [0] */
    moe_real loss_importance; /* w [0] */
    int importance_over;     /* MOE_IMPORTANCE_ [probabilities] */
    int unbiased;            /* 1: the variance in CV^2 divides by E - 1 [0] */
    moe_real loss_entropy;   /* gamma [0] */
    moe_real loss_usage_entropy; /* gamma of -gamma H(mean p) [0] */
    moe_real loss_similarity_same; /* lambda_same: pulls unlike inputs to different experts [0] */
    moe_real loss_similarity_diff; /* lambda_diff: rewards unlike inputs at different experts [0] */
    moe_real loss_locality;  /* mu: keeps tokens on the node where they live (LocMoE) [0] */
    int nodes;               /* number of nodes for loss_locality [1] */
    moe_real loss_l1;        /* lambda of the L1 loss (ReMoE) [0] */
    moe_real loss_load;      /* w of CV^2 of the smooth load (Shazeer); needs noise [0] */
    moe_real loss_orthogonal; /* w of sum over pairs of cos(W_e, W_e')^2 [0] */
    moe_real loss_distill;   /* factor of the distance from a teacher: call.teacher, or with student = 1 this router is the teacher [0] */
    int distill;             /* MOE_DISTILL_ [ce_hard] */
    int student;             /* 1: a linear router "router.student" learns by loss_distill to choose as this one does, and chooses from freeze_at
                                on (Dai et al. 2022, StableMoE) [0] */
    moe_real expert_temperature; /* T > 1 of the experts' own loss in a classical mixture: dual temperature [0: the gate's] */
    /* State and schedules; steps are those of the optimiser, counted by moe_router_advance from 0. */
    moe_real bias_rate;      /* gamma: b_e += gamma sign(mean n - n_e) per step (Wang et al. 2024, Auxiliary-loss-free load balancing) [0] */
    int l1_controller;       /* 1: the factor of loss_l1 begins there [1e-8] and is multiplied by 1.2 in each step with fewer than 1 - K/E unchosen
                                pairs, else divided by it (ReMoE) [0] */
    int schedule_steps;      /* over how many steps k_end and tau_end are reached [0: no schedule] */
    int k_end;               /* K at the end: round(K0 + (K1 - K0) step / schedule_steps) (SMoE-dropout) [0: top_k] */
    int tau_schedule;        /* MOE_TAU_ [none] */
    moe_real tau_end;        /* its value at the end; in between on the straight line */
    int freeze_at;           /* from this step on the router learns nothing, has no losses, and its student chooses (StableMoE) [0: never] */
    int switch_at;           /* until this step switch_from selects, then select (LocMoE: token choice first) [0: select from the start] */
    int switch_from;         /* MOE_SELECT_ [top_k] */
    int untrained;           /* 1: accept for training a router that no gradient reaches (K = 1 with sum or softmax) [0] */
} moe_router_config;

/* The rows of moe_router_config; the last has name NULL. Constant, thread-safe. */
MOE_API const moe_field *moe_router_fields(void);

/* Checks a configuration and writes it to *out (may be NULL; may be config itself) with every default filled in. Errors:
   MOE_ERR_CONFIG, error names the field, or the two fields that clash, and the value. On failure *out is untouched. */
MOE_API moe_status moe_router_check(const moe_router_config *config, moe_router_config *out, moe_error *error);

#ifndef MOE_NO_TRAIN
/* The further check for training: with K = 1 the weights sum and softmax are always 1, so no gradient would ever reach the
   router's own parameters; refused (MOE_ERR_CONFIG) unless a loss reaches them, the score has none, or untrained says that this is wanted. */
MOE_API moe_status moe_router_check_training(const moe_router_config *config, moe_error *error);
#endif

/* Whether a router can decode: route the next tokens of a sequence in a call that does not hold the earlier ones. MOE_ERR_UNSUPPORTED: error names
   the trait that forbids it, the field it comes from, and the mode that would work. A call with decoding = 1 is refused likewise. */
MOE_API moe_status moe_router_check_decoding(const moe_router_config *config, moe_error *error);

/* MOE_TRAIT_ bits of a configuration. */
MOE_API unsigned moe_router_traits(const moe_router_config *config);
/* "causal", "needs_batch", ... for one MOE_TRAIT_ bit; NULL for anything else. */
MOE_API const char *moe_trait_name(unsigned trait);
/* "balance", "z", ...; NULL for anything else. */
MOE_API const char *moe_loss_name(int loss);

/* ---- presets: one row of data each -------------------------------------------------------------------------------------- */

/* A named method as settings. */
typedef struct moe_preset {
    const char *name;
    const char *aliases; /* other names, separated by a space, or "" */
    const char *source;  /* authors, year, title */
    const char *formula; /* one line */
    const char *router;  /* settings of moe_router_config, as moe_fields_apply reads them */
    const char *layer;   /* settings of moe_layer_config that belong to the method (expert kind, shared expert), or "" */
} moe_preset;

/* All presets; the last row has name NULL. Constant, thread-safe. */
MOE_API const moe_preset *moe_presets(void);
/* The preset of a name or alias; NULL if there is none. */
MOE_API const moe_preset *moe_preset_find(const char *name);
/* Sets *config to {0} plus the preset's settings; d_model is left 0 for the caller, sizes may be changed afterwards.
   MOE_ERR_NOT_FOUND: no such preset (*config untouched). */
MOE_API moe_status moe_router_preset(const char *name, moe_router_config *config, moe_error *error);

/* ---- the router's tensors ------------------------------------------------------------------------------------------------ */

/* The most dimensions of a tensor of ours. */
enum { MOE_MAX_DIMS = 4 };

/* What a parameter is for: bits of moe_slot.flags and moe_tensor.flags. */
enum {
    MOE_PARAM_TRAINED = 0,  /* an optimiser changes it */
    MOE_PARAM_FROZEN = 1,   /* fixed at its initial value */
    MOE_PARAM_STATE = 2,    /* changed by rules of its own, saved with the model */
    MOE_PARAM_NO_DECAY = 4  /* biases and gains: weight decay passes them by */
};

/* The router's tensors by place; which of them exist depends on the configuration. */
enum {
    MOE_ROUTER_WEIGHT = 0,     /* "router.weight" [E,d]; cosine: [E, r or d] */
    MOE_ROUTER_BIAS,           /* "router.bias" [E] */
    MOE_ROUTER_PROJECTION,     /* "router.projection" [r,d] */
    MOE_ROUTER_TEMPERATURE,    /* "router.temperature" [1] */
    MOE_ROUTER_FC1_WEIGHT,     /* "router.fc1.weight" [h,d] */
    MOE_ROUTER_FC1_BIAS,       /* "router.fc1.bias" [h] */
    MOE_ROUTER_FC2_WEIGHT,     /* "router.fc2.weight" [E,h] */
    MOE_ROUTER_FC2_BIAS,       /* "router.fc2.bias" [E] */
    MOE_ROUTER_SELECTION_BIAS, /* "router.selection_bias" [E], state */
    MOE_ROUTER_EXPERT_SCALE,   /* "router.expert_scale" [E] */
    MOE_ROUTER_INPUT_SCALE,    /* "router.input_scale" [d] */
    MOE_ROUTER_QUERY,          /* "router.query" [h,h] */
    MOE_ROUTER_KEY,            /* "router.key" [h,h] */
    MOE_ROUTER_THRESHOLD,      /* "router.threshold" [E] */
    MOE_ROUTER_NOISE_WEIGHT,   /* "router.noise_weight" [E,d] */
    MOE_ROUTER_SIMILARITY,     /* "router.similarity" [d,d] */
    MOE_ROUTER_AC_RUNNING,     /* "router.ac_running" [E,d]: state in mode running, frozen in mode random */
    MOE_ROUTER_SLOT_VECTORS,   /* "router.slots" [E slots,d] */
    MOE_ROUTER_SLOT_SCALE,     /* "router.scale" [1] */
    MOE_ROUTER_CODES,          /* "router.codes" [K m,d] */
    MOE_ROUTER_MIX,            /* "router.mix" [K,d] */
    MOE_ROUTER_STUDENT,        /* "router.student" [E,d] */
    MOE_ROUTER_STEP,           /* this and the next three may be NULL in moe_route: as at the start. "router.step" [1], state: steps of the optimiser, for schedules; stays at 2^24 when it gets there */
    MOE_ROUTER_LOAD,           /* "router.load" [E+1], state: pairs per expert since the last step, then tokens */
    MOE_ROUTER_L1,             /* "router.l1" [1], state: the factor of loss_l1 */
    MOE_ROUTER_CAPACITY,       /* "router.capacity" [1], state: C_min, 0 until there is one */
    MOE_ROUTER_TABLE,          /* "router.table" [table_size,K], frozen: expert indices as numbers; starts random, every expert equally often */
    MOE_ROUTER_SLOTS
};

/* One place for a tensor: its name, shape, purpose, and how it starts: init_value + init_spread * standard normal. */
typedef struct moe_slot {
    const char *name;
    int n_dims;
    size_t shape[MOE_MAX_DIMS]; /* unused dimensions are 1 */
    size_t count;               /* product of shape */
    unsigned flags;             /* MOE_PARAM_ bits */
    moe_real init_value, init_spread;
} moe_slot;

/* Describes tensor `slot` of a checked configuration. MOE_ERR_NOT_FOUND when this configuration has none there. */
MOE_API moe_status moe_router_slot(const moe_router_config *config, int slot, moe_slot *out);

/* ---- one call -------------------------------------------------------------------------------------------------------------- */

/* A batch whose tokens are spread over several processes, each of which calls moe_route with its own: they decide together, as one call of all tokens
   would, the tokens of one process behind those of another. Configuration, state, random numbers and what is supplied (given, home, noise, jitter)
   are alike in all of them that have tokens, else MOE_ERR_ARGUMENT; a sequence lies in one process; distances, where given, are those of the batch, in all of them. Where no token depends on other sequences
   (outside training: no capacity, no selection among tokens, no adaptive clustering of the call) and for select = soft every process decides for itself,
   and nothing is gathered; soft with adaptive clustering of the call is MOE_ERR_UNSUPPORTED. n_past must be 0. */
typedef struct moe_batch {
    size_t first; /* tokens of the processes before this one */
    size_t total; /* tokens of all processes */
    int lead;     /* 1 in exactly one process: it adds the gradients that belong to no token (loss_orthogonal) */
    void *ctx;    /* the caller's, handed to gather */
    /* rows holds `total` rows of row_bytes, those of this process's tokens in their place; gather fills in the others'. All processes call it alike, also
       with a status that is not MOE_OK: then all of them return an error (here that status, elsewhere MOE_ERR_PEER) and rows is unspecified. */
    moe_status (*gather)(void *ctx, moe_status status, size_t row_bytes, void *rows);
} moe_batch;

/* The tokens of one call. {0} plus n_tokens and x is enough for most routers. Everything is the caller's and only read, but rng. */
typedef struct moe_call {
    size_t n_tokens;            /* N, padding included; 0 is allowed */
    const moe_real *x;          /* [N,d] */
    const moe_parallel *parallel; /* threads for the experts, or NULL: OpenMP's where the compiler has it on, else one */
    const moe_real *router_x;   /* [N,d], the router's own input, or NULL: x */
    const unsigned char *mask;  /* [N], 1 real, 0 padding, or NULL: all real. Padding is routed nowhere and takes part in no statistic */
    const int32_t *sequences;   /* [n_sequences+1] ascending offsets from 0 to N, or NULL: one sequence */
    size_t n_sequences;
    const int32_t *given;       /* replay: [N,max_choices] expert indices, -1 = none, no expert twice for one token: chosen instead of what
                                   select would choose; NULL: select chooses. max_choices is K, or E where a token may take more than K */
    const int32_t *token_ids;   /* [N], select hash: rows of router.table */
    const moe_real *noise;      /* [N,E] n of noisy_topk, else the whole additive noise; NULL: drawn from rng */
    const moe_real *previous_input;     /* [N,d] adaptive_clustering: x of the previous mixture layer (mode paper) */
    const int32_t *previous_experts;    /* [N,n_previous] its chosen experts, -1 = none */
    const moe_real *previous_weights;   /* [N,n_previous] their weights */
    size_t n_previous;
    const moe_real *attention_weights;  /* [heads,N,n_past+N] A of the attention before this layer; what is not above 0 takes no part */
    const moe_real *attention_outputs;  /* [heads,n_past+N,d] o_hj: value and output projection of head h at token j */
    const moe_real *attention_output;   /* [N,d] for attention_u = output */
    moe_real *d_attention_weights, *d_attention_outputs, *d_attention_output; /* where backward adds their gradients, or NULL */
    const moe_real *jitter;     /* [N,d] the factors of input jitter, or NULL: drawn from rng */
    const int32_t *home;        /* [N] loss_locality: the node where each token lives, or NULL: all on node 0 */
    const int32_t *expert_node; /* [E] loss_locality: the node of each expert, or NULL: E/nodes consecutive ones each */
    const moe_real *teacher;    /* [N,E] loss_distill without student: the teacher's logits */
    const moe_real *distances;  /* [N,N] loss_similarity: D, or NULL: euclidean distances of x */
    const moe_real *nodes;      /* scores norm, attentive, competition: [E,N,node_width], the activation that is read (moe.h fills it in) */
    size_t node_width;
    size_t n_past;              /* causal refine outside training: earlier tokens of the one sequence, whose memory the caller keeps; the sizes of
                                   memory are then those of n_past + n_tokens */
    const moe_real *past_u;     /* [n_past,d] their routing.u */
    const moe_real *past_gate;  /* [n_past,E] their routing.gate */
    int decoding;               /* 1: the tokens continue sequences whose earlier tokens are not in this call: see moe_router_check_decoding */
    int training;               /* 1: losses are computed and what the backward pass needs is kept */
    int keep;                   /* 1: a layer keeps the outputs of all experts as in training (moe_layer_expert_outputs); memory as for training */
    moe_rng *rng;               /* for stochastic stages; NULL where there are none */
    const moe_batch *batch;     /* other processes' tokens are routed together with these, or NULL */
} moe_call;

/* One token at one expert. */
typedef struct moe_entry {
    int32_t token;       /* row of x */
    int32_t rank;        /* 0: the token's first choice. Soft: the expert's row that the token takes part in */
    moe_real weight_in;  /* on the expert's input */
    moe_real weight_out; /* on the expert's output */
} moe_entry;

/* The plan, all that experts need to know: compressed rows, one per expert. Entries of a row ascend by token. It is plain data: it can
   be kept, printed, replayed (select given) or sent. */
typedef struct moe_plan {
    size_t n_tokens, n_experts; /* tokens of the call */
    size_t *offsets;    /* [E+1]; expert e has entries offsets[e] .. offsets[e+1]-1 */
    moe_entry *entries; /* [offsets[E]] */
    size_t rows;        /* 0: every entry is a row of its expert's input. Soft: rows per expert, each a mixture of entries */
} moe_plan;

/* All that one call decided, stage by stage. The arrays lie in the memory given to moe_route; rows of padding in logits, gate and
   probabilities are unspecified. */
typedef struct moe_routing {
    size_t n_tokens, n_experts; /* N: tokens of the call, or of the batch (moe_call.batch) where that decided together */
    size_t first;            /* row of the call's first token in the arrays; 0 without a batch */
    size_t n_real;           /* tokens that are not padding */
    const moe_real *u;       /* [n,d] the router's input after the input stage, of the call's tokens */
    moe_real *logits;        /* z [N,E]; soft: L [N,E slots] */
    moe_real *gate;          /* r [N,E]; soft: dispatch D [N,E slots] */
    moe_real *probabilities; /* p [N,E]; soft: combine C [N,E slots] */
    int32_t *choices;        /* [N,max_choices] experts in order of rank */
    int32_t *n_choices;      /* [N] */
    unsigned char *kept;     /* [N,max_choices] 1: capacity kept this choice */
    size_t max_choices;      /* K, or E for selections without a fixed number */
    moe_real *section_weights; /* [N,max_choices] w of the weight stage, before capacity and scale */
    moe_real *weights;       /* [N,E] the dense gate matrix: final weights, 0 where not selected; soft: sum of C over the expert's slots */
    unsigned char *selected; /* [N,E] 1 where an entry of the plan exists */
    size_t *counts;          /* [E] n_e, pairs per expert before capacity */
    size_t *first_counts;    /* [E] first choices per expert */
    size_t n_dropped;        /* pairs that capacity dropped */
    size_t capacity;         /* C, the most pairs per expert; 0: no limit, or a selection with limits of its own */
    moe_real capacity_bound; /* ln C_min of capacity_bound before rounding and limits; 0 without one */
    int capacity_clamped;    /* 1: C_min was above N and is N */
    int top_k;               /* K of this call, which a schedule may have changed */
    moe_plan plan;
    moe_real loss[MOE_LOSS_COUNT]; /* value of each loss, its factor included; 0 when off or not training */
    moe_real bound_now; /* private: C_min of this call */
    /* Training only, else NULL. The caller of moe_route_backward fills the gradients of the entries' weights. */
    moe_real *d_weight_in, *d_weight_out; /* [entries of the plan] */
    void *memory; /* private: what moe_route was given */
} moe_routing;

struct moe_router;

/* A stage of the caller's own, for score = custom and select = custom; it takes part in the pipeline with every other stage, loss and metric. A
   result other than MOE_OK ends the call with it. Unless custom_batch = 1, row t of a result must depend on row t of what is read alone. */
typedef struct moe_custom {
    void *ctx; /* the caller's, handed to every function */
    /* Fills logits [N,E] from u [N,d], the router's input; rows of padding are 0 in u and not used. */
    moe_status (*score)(void *ctx, const struct moe_router *router, const moe_call *call, const moe_real *u, moe_real *logits);
    /* Adds to d_u [N,d] what d_logits [N,E] means for it, and keeps the gradients of parameters of its own. NULL: the score passes none. */
    moe_status (*score_backward)(void *ctx, const struct moe_router *router, const moe_call *call, const moe_real *u, const moe_real *d_logits, moe_real *d_u);
    /* Sets chosen[t E + e] to 1, all are 0 before, from z and p [N,E]. Rows of padding are unspecified and what they choose is dropped. */
    moe_status (*select)(void *ctx, const struct moe_router *router, const moe_call *call, const moe_real *logits, const moe_real *probabilities,
                         unsigned char *chosen);
} moe_custom;

/* A checked configuration with its tensors. Plain data: copy it freely. Read-only use is thread-safe. */
typedef struct moe_router {
    moe_router_config config; /* with defaults filled in */
    moe_custom custom;        /* set by the caller where score or select is custom */
    const moe_kernels *kernels;
    uint64_t places;          /* private: bit i is set when the configuration has tensor i */
    unsigned parts;           /* private: what calls of this configuration need beyond the common ones (MOEI_PART_) */
    const moe_real *tensors[MOE_ROUTER_SLOTS]; /* the caller's, by place; NULL where moe_router_slot finds none */
} moe_router;

/* Checks config and makes a router without tensors; set router->tensors before routing. kernels NULL: plain C. Errors as moe_router_check. On failure
   *router is untouched. */
MOE_API moe_status moe_router_init(moe_router *router, const moe_router_config *config, const moe_kernels *kernels, moe_error *error);

/* Exact bytes that moe_route needs for n_tokens (n_past + n_tokens). MOE_ERR_OVERFLOW when they do not fit. training as in moe_call. */
MOE_API moe_status moe_route_size(const moe_router *router, size_t n_tokens, int training, size_t *bytes);
/* The same for a call with a batch: n_tokens of its own, total of all processes. MOE_ERR_ARGUMENT too where total is less than n_tokens. */
MOE_API moe_status moe_route_batch_size(const moe_router *router, size_t n_tokens, size_t total, int training, size_t *bytes);

/* x -> z -> r -> p -> S -> w -> plan, in memory[size] (any alignment). Allocates nothing. Errors: MOE_ERR_ARGUMENT (missing tensor or array, bad
   offsets, bad given indices), MOE_ERR_SPACE, MOE_ERR_NONFINITE (a logit of a real token, a p behind refine or a weight of the plan). On failure
   *routing is untouched; memory's content is unspecified, and rng may have moved. Thread-safe for different memory. Bitwise: a token's result does not depend on the other tokens of the call when the traits
   say causal. */
MOE_API moe_status moe_route(const moe_router *router, const moe_call *call, void *memory, size_t size, moe_routing *routing);

#ifndef MOE_NO_TRAIN
/* The way back from routing->d_weight_in and d_weight_out and all losses: adds to d_tensors[slot] (NULL entries are skipped), to
   dx [N,d], the gradient of x or of router_x when that was given (NULL: not wanted), and to d_nodes [E,N,node_width] (NULL unless
   the score reads nodes). call is the one of moe_route, with training = 1. Selection is a constant. MOE_ERR_STATE: it was not a call of training. */
MOE_API moe_status moe_route_backward(const moe_router *router, const moe_call *call, moe_routing *routing, moe_real *const *d_tensors,
                                      moe_real *dx, moe_real *d_nodes);
#endif

#ifndef MOE_NO_TRAIN
/* State: what a router remembers between calls lies in tensors of the flag MOE_PARAM_STATE and is saved with the model. moe_route only reads it; it
   is changed by these two, in the memory that state[slot] points to (tensors without state may be NULL there; the same memory as router->tensors).
   observe, after each training call: counts the load, moves the running tables, sets C_min. routing and call are those of moe_route.
   advance, once per step of the optimiser: selection bias, L1 factor, step number; then counts anew. MOE_ERR_ARGUMENT: NULL, or a state tensor is
   missing; MOE_ERR_STATE: call->training is 0. A router without the trait stateful is left as it is. */
MOE_API moe_status moe_router_observe(const moe_router *router, const moe_call *call, const moe_routing *routing, moe_real *const *state);
MOE_API moe_status moe_router_advance(const moe_router *router, moe_real *const *state);
#endif

/* *own = the routing of the call's own tokens alone, whose rows it shares, where a batch decided together; else a copy: for metrics and reports of one
   process's part. counts, first_counts, capacity and losses stay those of the batch. It is for reading only. mask as in the call. MOE_ERR_ARGUMENT: NULL. */
MOE_API moe_status moe_routing_own(const moe_routing *routing, const unsigned char *mask, moe_routing *own);
/* given[N,max_choices] receives the choices of a call in order of rank, -1 behind the last: what call.given replays. keep_dropped 0 leaves out
   those that capacity dropped. MOE_ERR_ARGUMENT: NULL (given may be NULL for N = 0), or a soft routing, which has no choices. */
MOE_API moe_status moe_recorded_choices(const moe_routing *routing, int keep_dropped, int32_t *given);

/* ---- metrics -------------------------------------------------------------------------------------------------------------
   What routers do, in numbers: over one call or any number of them. All sums and results are double, logarithms are natural,
   0 ln 0 = 0. H(v) = -sum_i v_i ln v_i; terms with v_i <= 0 count 0. What moe_route gives with MOE_OK is finite, and so are the metrics
   of it, for numbers up to 1e30. A mask is [N], 1 real, 0 padding, NULL: all real; padding
   counts nowhere and whatever stands in its rows is not read. Counts are exact up to 2^53. Nothing allocates. A failed call changes
   nothing. Functions are thread-safe as long as no two threads write to the same memory. */

#if MOE_REAL_IS_DOUBLE
#define moe_metrics_size moe_metrics_size_f64
#define moe_metrics_init moe_metrics_init_f64
#define moe_metrics_add moe_metrics_add_f64
#define moe_metrics_report moe_metrics_report_f64
#define moe_first_choices moe_first_choices_f64
#define moe_fluctuation moe_fluctuation_f64
#define moe_instability_scratch moe_instability_scratch_f64
#define moe_instability moe_instability_f64
#define moe_mutual_information moe_mutual_information_f64
#define moe_token_cosine moe_token_cosine_f64
#define moe_gate_errors moe_gate_errors_f64
#define moe_trivial_experts moe_trivial_experts_f64
#endif

/* Sums over the calls added so far. Its arrays lie in the memory given to moe_metrics_init, which must outlive it; a copy of the
   struct shares them. Read freely, change only through the functions below. */
typedef struct moe_metrics {
    size_t n_experts, n_classes;
    double n_calls;            /* calls that had a real token */
    double n_tokens;           /* real tokens */
    double n_routed;           /* real tokens with at least one expert */
    double n_pairs;            /* sum of |S_t|, before capacity */
    double n_dropped;          /* pairs that capacity dropped */
    double entropy;            /* sum_t H(p_t) */
    double entropy_normalised; /* sum_t H(p_t / sum p_t) */
    double entropy_calls;      /* sum over calls of H(mean p of the call) */
    double n_classified;       /* tokens with a class and at least one expert */
    double choices, choices_squared; /* their sums of |S_t| and |S_t|^2 */
    double *load, *first, *kept;     /* [E] pairs, first choices, pairs that capacity kept */
    double *importance;        /* [E] sum_t p_te */
    double *logits;            /* [E] sum_t z_te */
    double *classes;           /* [E,n_classes] pairs of classified tokens; NULL for n_classes = 0 */
    double *first_classes;     /* [E,n_classes] first choices of classified tokens; NULL for n_classes = 0 */
    double *mean_gate, *mean_logit; /* [E] written by moe_metrics_report */
    double *row;               /* [E] private */
} moe_metrics;

/* What moe_metrics_report finds. A number is 0 when nothing that it speaks of was added. A share is a number in 0..1. n_e is the load
   of expert e: pairs before capacity. The pointers point into the memory of the metrics, whose next call may change what they show. */
typedef struct moe_report {
    size_t n_experts, n_classes;
    double n_calls;          /* calls that had a real token */
    double n_tokens;         /* N, real tokens */
    double n_pairs;          /* sum_e n_e */
    double n_dropped;        /* pairs that capacity dropped */
    double dropped_share;    /* n_dropped / n_pairs */
    double experts_per_token; /* mean |S_t|, before capacity; 0..E */

    /* The gate values p, as they are: rows of sigmoid, relu and others need not sum to 1, and then the ranges do not hold. */
    double gate_entropy;     /* H_b = mean_t H(p_t); 0 (decided) .. ln E (even) */
    double usage_entropy;    /* H_e = H(mean_t p_t) over all tokens added; 0 (one expert) .. ln E (all alike) */
    double usage_entropy_calls; /* mean over calls of H(mean p of the call) */
    double confidence_entropy; /* Ent_conf = mean_t H(p_t / sum p_t), negative p as 0; H_b for gates that sum to 1; 0 .. ln E always */
    double importance_cv2;   /* CV^2 of I_e = sum_t p_te: variance over experts (population) / mean^2; 0 .. E-1 for p >= 0 */

    /* The load n_e. */
    double load_entropy;     /* Ent_load = H(n_e / sum n); 0 .. ln E */
    double load_balance_score; /* standard deviation (population) over experts of 100 n_e / N, in percent of the tokens; 0 is even */
    double load_cv2;         /* CV^2 of n_e; 0 .. E-1 */
    double load_max_over_mean; /* max n_e / mean n_e; 1 .. E */
    double load_max_minus_min; /* (max n_e - min n_e) / sum n: difference of the shares of pairs; 0 .. 1 */
    double capacity_use;     /* mean / max over experts of the pairs that capacity kept: how full the experts' places are when each has as
                                many as the fullest. Where one expert is full in every call this is kept pairs / all places;
                                dropless: mean n_e / max n_e, the part of the largest load that the mean uses; 0 .. 1 */
    double first_share_max;  /* the largest expert's share of first choices, of the tokens that have one */
    int trivial_gate;        /* 1: first_share_max > 0.95 (always for E = 1) */

    /* Expert and class; 0 and NULL without classes. I(E;Y) = H(E) + H(Y) - H(E,Y) of a table of counts divided by their sum;
       0 .. min(ln E, ln n_classes). Y is what the caller gave as classes: the model's output or the label. The chance value is the mean
       of I over all ways to shuffle the classes among the classified tokens: the small-sample bias, which a table like this one shows
       when expert and class have nothing to do with each other. */
    double n_classified;     /* tokens with a class and at least one expert */
    double information;      /* of the table classes: every pair of a classified token counts once */
    double information_chance; /* exact when those tokens have equally many experts each, else H(Y)'s mean is taken to second order */
    double information_first; /* of the table first_classes: every classified token counts once */
    double information_first_chance; /* exact */
    const double *classes;       /* [E,n_classes] the pairs */
    const double *first_classes; /* [E,n_classes] the first choices */

    /* Per expert [E]. */
    const double *load;      /* n_e */
    const double *first;     /* first choices */
    const double *kept;      /* pairs that capacity kept */
    const double *mean_gate; /* mean_t p_te */
    const double *mean_logit; /* mean_t z_te. For the score norm z is the norm itself: the mean norm of the scoring node */
} moe_report;

/* Exact bytes of memory for E = n_experts (1..MOE_MAX_EXPERTS) and n_classes (0: none; at most INT32_MAX). MOE_ERR_ARGUMENT: out of
   range or bytes NULL; MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_metrics_size(size_t n_experts, size_t n_classes, size_t *bytes);

/* Starts metrics at zero in memory[size] (any alignment; the caller's). Calling it again starts anew. MOE_ERR_SPACE: size is below
   moe_metrics_size; MOE_ERR_ARGUMENT: metrics or memory NULL, and the errors of moe_metrics_size. */
MOE_API moe_status moe_metrics_init(moe_metrics *metrics, size_t n_experts, size_t n_classes, void *memory, size_t size);

/* Adds one routed call. mask: the call's. classes: [N] class of each token, 0 .. n_classes-1, or -1: none; padding's are not read;
   NULL: none. Reads routing's sizes, logits, probabilities, choices, n_choices, n_real, n_dropped and plan.offsets.
   Of a batch that decided together (moe_batch) it takes what moe_routing_own gives, with the mask of the own tokens.
   MOE_ERR_ARGUMENT: NULL, a class or a choice out of range, or a mask that does not fit the routing (n_real; padding has no choices);
   MOE_ERR_SHAPE: not as many experts as at the start. */
MOE_API moe_status moe_metrics_add(moe_metrics *metrics, const moe_routing *routing, const unsigned char *mask, const int32_t *classes);

/* Fills *report (the caller's) from all calls added; more can be added afterwards. Writes metrics->mean_gate and mean_logit. With
   classes its time is in proportion to E n_classes times the standard deviation of a cell's count. MOE_ERR_ARGUMENT: NULL. */
MOE_API moe_status moe_metrics_report(moe_metrics *metrics, moe_report *report);

/* first[N] receives each token's first choice, -1 for padding and for a token without an expert: what moe_fluctuation compares.
   MOE_ERR_ARGUMENT: NULL (first may be NULL for N = 0). */
MOE_API moe_status moe_first_choices(const moe_routing *routing, int32_t *first);

/* *share = share of the real tokens whose first expert differs between two recorded routings, before and after [n], as from
   moe_first_choices; 0 for no real token. MOE_ERR_ARGUMENT: NULL (the arrays may be NULL for n = 0). */
MOE_API moe_status moe_fluctuation(size_t n, const int32_t *before, const int32_t *after, const unsigned char *mask, double *share);

/* How differently two mixture layers group the same tokens. */
typedef struct moe_instability_report {
    double instability;  /* mean over pairs of real tokens of | [same expert at the first layer] - [same expert at the second] |; 0 .. 1 */
    double chance;       /* what independent layers would have: q1 (1 - q2) + q2 (1 - q1) */
    double q1, q2;       /* share of the pairs that share an expert, at the first and at the second layer */
} moe_instability_report;

/* Numbers of scratch that moe_instability needs for layers of e1 and e2 experts: (e1 + 1) (e2 + 1); 0 when that does not fit. */
MOE_API size_t moe_instability_scratch(size_t e1, size_t e2);
/* Fills *report from first[n] and second[n], the tokens' experts at two layers of e1 and e2 experts, as from moe_first_choices (-1: none, shared with
   nobody). scratch [moe_instability_scratch] is the caller's. All are 0 for fewer than two tokens. MOE_ERR_ARGUMENT: NULL, an expert out of range. */
MOE_API moe_status moe_instability(size_t n, const int32_t *first, size_t e1, const int32_t *second, size_t e2, const unsigned char *mask, double *scratch,
                                   moe_instability_report *report);

/* *information = I(row;column) = H(row) + H(column) - H(row,column) of a table of counts [rows,columns] divided by their sum; never
   below 0, 0 for an empty table. MOE_ERR_ARGUMENT: NULL (table may be NULL when it has no cell), or a count is below 0;
   MOE_ERR_NONFINITE: a count or their sum is not finite; MOE_ERR_OVERFLOW: the table cannot exist. */
MOE_API moe_status moe_mutual_information(size_t rows, size_t columns, const double *table, double *information);

/* *cosine = mean over the pairs s != t of real tokens of cos(x_s, x_t), x [n,d], in O(n d): with unit vectors v_t = x_t / |x_t| and M
   real tokens, sum over s != t of v_s . v_t = |sum_t v_t|^2 - sum_t |v_t|^2, divided by M (M - 1): an identity, not an estimate.
   -1/(M-1) .. 1; 0 for M < 2. A token that is all 0 has cosine 0 with every other. scratch: [d] doubles of the caller's, whose
   content is unspecified afterwards. MOE_ERR_ARGUMENT: NULL (x may be NULL for n d = 0, scratch for d = 0); MOE_ERR_NONFINITE: a
   real token is not finite. */
MOE_API moe_status moe_token_cosine(size_t n, size_t d, const moe_real *x, const unsigned char *mask, double *scratch, double *cosine);

/* Whose fault errors are, as shares of the samples. */
typedef struct moe_error_shares {
    size_t n_samples;    /* those that are real and have a label */
    double error;        /* the model is wrong */
    double gate_error;   /* the model is wrong although some expert is right: the gate chose badly */
    double expert_error; /* no expert is right; the model may be right even so, so error <= gate_error + expert_error */
} moe_error_shares;

/* Fills *shares from predicted [n,n_experts], the class that each expert alone would answer (-1: none, never right), answers [n], the
   model's own, and labels [n] (negative: the sample counts nowhere). All are 0 without samples. MOE_ERR_ARGUMENT: NULL (arrays may
   be NULL for n = 0, predicted for n_experts = 0); MOE_ERR_OVERFLOW: predicted cannot exist. */
MOE_API moe_status moe_gate_errors(size_t n, size_t n_experts, const int32_t *predicted, const int32_t *answers, const int32_t *labels,
                                   const unsigned char *mask, moe_error_shares *shares);

/* trivial[n_experts] (may be NULL) receives 1 for an expert that answers one class only, else 0; *count how many there are. predicted
   [n,n_experts] as above; -1 leaves a sample out for that expert, and an expert without any answer is not trivial. MOE_ERR_ARGUMENT:
   NULL (predicted may be NULL when it has no element); MOE_ERR_OVERFLOW: predicted cannot exist. */
MOE_API moe_status moe_trivial_experts(size_t n, size_t n_experts, const int32_t *predicted, const unsigned char *mask,
                                       unsigned char *trivial, size_t *count);

#endif /* MOE_NO_FLOAT */

/* ---- routing in integers --------------------------------------------------------------------------------------------------
   One token's logits -> experts and weights, without floating point: the same numbers on every machine. A moe_int_router is a const struct that
   names the functions of its stages, so that the linker drops all others:

     z --gate--> p --select--> experts, z of the chosen --values--> p --weight--> weights --scale--> weights

   z [E] are logits as integers within +-32767. Where a softmax, sigmoid or sqrt_softplus reads them, z * 2^-z_bits is the logit in octaves: the real
   one, divided by the temperature, times log2(e). p is in each gate's own unit:
     moe_int_gate_softmax, moe_int_gate_sigmoid   2^-20
     moe_int_gate_sqrt_softplus                   2^-(8 + z_bits/2) sqrt(ln 2), z_bits even and at most 14
     moe_int_gate_logits, moe_int_gate_relu       1/256 of that of z: a bias may be finer than z
   Selection is by z, or by p + bias; the lower index wins ties. Weights are int16 in units of 2^-15 (1 is stored as 32767), times a power of two that
   the plan gives. Against real arithmetic on the same z a weight is off by less than 2^-13 (sqrt_softplus: while z_bits is 8 or more). Choices by z are
   exact; by p they differ only where two keys (a sum, a threshold) lie within 2^-13 (sqrt_softplus: 4 units of p, logits and relu: 2 units) of each other. */

/* A router in integers, and the functions of its stages: logits z [n] -> p [n]; z, p + bias -> experts, how many; what weights the chosen ones get. */
typedef struct moe_int_router moe_int_router;
typedef void moe_int_gate(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p);
typedef size_t moe_int_select(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts);
typedef void moe_int_weight(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights);
/* Initialised in this order; base is where the offsets count from. */
struct moe_int_router {
    moe_int_gate *gate;     /* p of all experts for select. NULL: select reads no p */
    moe_int_select *select; /* fills experts in order of choice, returns how many */
    moe_int_gate *values;   /* p of the chosen for weight, in order of choice. NULL: weight reads no such p */
    moe_int_weight *weight;
    void (*scale)(const moe_int_router *r, const unsigned char *base, size_t count, const int16_t *experts, int16_t *weights); /* NULL: none */
    uint16_t n_experts;   /* E, 1..MOE_INT_EXPERTS */
    uint16_t top_k;       /* K; with K = E the selections logits and top_k are dense */
    uint16_t most;        /* room for experts and weights that a call needs, 1..E */
    uint16_t scratch;     /* room for p that a call needs */
    uint16_t groups, groups_kept; /* of moe_int_select_grouped */
    int16_t factor;       /* of moe_int_scale without a table, in units of 2^-15 */
    uint8_t z_bits;       /* 0..27 */
    uint8_t weight_shift; /* of moe_int_weight_raw: weight = p >> this, rounded */
    uint8_t flags;        /* MOE_INT_ bits */
    int32_t threshold;    /* threshold: p must be above it; top_p: the sum of p that ends it; sparsemixer: 2 eps in units of 2^-16 */
    int32_t tokens;       /* hash: number of token ids; 0: token is not read */
    uint32_t bias;        /* int32[E] added to p for selection only. This and the next: offsets of tables from base, or MOE_INT_NONE */
    uint32_t thresholds;  /* int32[E] instead of threshold */
    uint32_t scales;      /* int16[E] instead of factor */
    uint32_t table;       /* hash: bytes [tokens,K], the experts of each token id */
};

/* The most experts of a router in integers; the offset of a table that is not there. */
enum { MOE_INT_EXPERTS = 256 };
#define MOE_INT_NONE 0xffffffffu
/* flags: where no expert passes a threshold the best one is taken; a group is worth its two best experts together, not its best one. */
enum { MOE_INT_FALLBACK = 1, MOE_INT_TOP2_SUM = 2 };

/* Routes one token: z [E] (NULL where no stage reads it: hash with equal weights), token its id where tokens > 0, p [scratch] memory to work in (NULL
   where scratch is 0), experts [most] and weights [most] in order of choice, *count how many there are, 0 possible. Pointers are not checked.
   MOE_ERR_ARGUMENT: token outside of 0..tokens-1, nothing is written. Thread-safe for different memory. */
MOE_API moe_status moe_int_route(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts,
                                 int16_t *weights, size_t *count);

/* For gate and values: n logits z -> p. softmax is over these n alone. Shares are for values of which weight makes quotients: the gate in a finer unit and
   without a factor that all n have in common, p < 2^24. */
MOE_API void moe_int_gate_logits(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p);
MOE_API void moe_int_gate_relu(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p);
MOE_API void moe_int_gate_softmax(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p);
MOE_API void moe_int_gate_sigmoid(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p);
MOE_API void moe_int_gate_sqrt_softplus(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p);
MOE_API void moe_int_share_softmax(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p);
MOE_API void moe_int_share_sigmoid(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p);
MOE_API void moe_int_share_sqrt_softplus(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p);
/* For select: the K largest z (no gate, no bias); the K largest p + bias; the rest as in MOE_SELECT_. They may write over p. */
MOE_API size_t moe_int_select_logits(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts);
MOE_API size_t moe_int_select_top_k(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts);
MOE_API size_t moe_int_select_grouped(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts);
MOE_API size_t moe_int_select_top_p(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts);
MOE_API size_t moe_int_select_threshold(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts);
MOE_API size_t moe_int_select_hash(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts);
/* For weight: p; p / sum p; p / sqrt(sum p^2); the softmax over all experts; 1 / count; 1; sparsemixer. The first three read values. */
MOE_API void moe_int_weight_raw(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights);
MOE_API void moe_int_weight_sum(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights);
MOE_API void moe_int_weight_norm(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights);
MOE_API void moe_int_weight_softmax(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights);
MOE_API void moe_int_weight_uniform(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights);
MOE_API void moe_int_weight_one(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights);
MOE_API void moe_int_weight_sparsemixer(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights);
/* For scale: weights * factor, or each expert's own factor of the table scales. */
MOE_API void moe_int_scale(const moe_int_router *r, const unsigned char *base, size_t count, const int16_t *experts, int16_t *weights);

#ifndef MOE_NO_TRAIN
/* What an exporter prints. The functions' names stand beside the router as text, "NULL" for none; all else in router is numbers. */
typedef struct moe_int_router_plan {
    moe_int_router router;  /* its offsets count from the start of the table: see moe_int_router_move */
    const char *gate, *select, *values, *weight, *scale;
    moe_real z_scale;       /* logit = z * z_scale, rounded and held within +-32767. Temperature and log2(e) are in it where a stage wants octaves, else it is a power of two */
    moe_real weight_scale;  /* weight = level / 32768 * weight_scale, a power of two; the configuration's scale is in it */
    size_t table_size;      /* bytes of the table, a multiple of 4; 0: none */
    int needs_logits;       /* 0: no stage reads z */
} moe_int_router_plan;

/* Plans the integer form of a router at the step of its state: K, temperature and selection of schedules are those of router.step, noise and jitter are
   none. Scores, the experts and where weights apply (apply_to) are not its matter: logits arrive as z.
     tensors     [MOE_ROUTER_SLOTS] by place, as in moe_router; only selection_bias, expert_scale, threshold, table and the state are read
     logit_most  the largest |logit| seen in calibration, finite; z has room for 5/4 of it, larger ones saturate. 0: 1
     table       receives the constants, little-endian; room bytes, aligned to 4. NULL: *plan is made and nothing is written, to ask for table_size
   sinkhorn, balanced and sample choose as they do outside training; their order of choice is by the logits, hash with equal weights keeps its table's.
   MOE_ERR_UNSUPPORTED: a setting that has no form in integers or that looks at other tokens, error names it; MOE_ERR_CONFIG as moe_router_check;
   MOE_ERR_ARGUMENT: NULL, a tensor is missing or holds what it may not; MOE_ERR_SPACE: room is below table_size. On failure *plan is untouched and
   table's content is unspecified. */
MOE_API moe_status moe_int_router_plan_make(const moe_router_config *config, const moe_real *const *tensors, moe_real logit_most, unsigned char *table,
                                            size_t room, moe_int_router_plan *plan, moe_error *error);
/* Adds by to all offsets: the table is now that far behind base. */
MOE_API void moe_int_router_move(moe_int_router *router, uint32_t by);
#endif

#ifdef __cplusplus
}
#endif
#endif /* MOE_ROUTERS_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_ROUTERS_IMPLEMENTED)
#define MOEI_ROUTERS_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

#ifndef MOE_NO_FLOAT
enum { MOEI_FIELD_NAME = 32 };

/* ==== configuration as data ============================================================================================= */

const moe_field *moe_field_find(const moe_field *fields, const char *name) {
    if (fields == NULL || name == NULL) return NULL;
    for (; fields->name != NULL; fields++)
        if (moei_strcmp(fields->name, name) == 0) return fields;
    return NULL;
}

static int *moei_field_int(const moe_field *field, void *config) {
    return (int *)(void *)((unsigned char *)config + field->offset);
}

static moe_real *moei_field_real(const moe_field *field, void *config) {
    return (moe_real *)(void *)((unsigned char *)config + field->offset);
}

static int moei_field_get_int(const moe_field *field, const void *config) {
    int value;
    memcpy(&value, (const unsigned char *)config + field->offset, sizeof value);
    return value;
}

static moe_real moei_field_get_real(const moe_field *field, const void *config) {
    moe_real value;
    memcpy(&value, (const unsigned char *)config + field->offset, sizeof value);
    return value;
}

/* The place of value[n] among the names; -1 if it is none of them. */
static int moei_choice_find(const char *const *choices, const char *value, size_t n) {
    int i;
    for (i = 0; choices[i] != NULL; i++)
        if (moei_strlen(choices[i]) == n && moei_memcmp(choices[i], value, n) == 0) return i;
    return -1;
}

/* "linear, random, mlp", for messages. */
static const char *moei_choices_text(const moe_field *field, char *out, size_t room) {
    moei_text t;
    int i;
    t.out = out, t.room = room, t.length = 0;
    out[0] = '\0';
    for (i = 0; field->choices[i] != NULL; i++) {
        if (i > 0) moei_put(&t, ", ", 2);
        moei_put(&t, field->choices[i], moei_strlen(field->choices[i]));
    }
    return out;
}

static moe_status moei_field_bad(const moe_field *field, const char *value, size_t n, moe_error *error) {
    char copy[40], names[160];
    moei_text t;
    t.out = copy, t.room = sizeof copy, t.length = 0;
    copy[0] = '\0';
    moei_put(&t, value, n);
    if (field->kind == MOE_FIELD_CHOICE)
        return moei_error(error, MOE_ERR_CONFIG, "%s = %s: must be one of %s", field->name, copy, moei_choices_text(field, names, sizeof names));
    return moei_error(error, MOE_ERR_CONFIG, "%s = %s: must be %s", field->name, copy,
                      field->kind == MOE_FIELD_REAL ? "a number" : field->kind == MOE_FIELD_FLAG ? "0 or 1" : "a whole number");
}

/* Sets a field from the n characters at value. */
static moe_status moei_field_set_n(const moe_field *field, void *config, const char *value, size_t n, moe_error *error) {
    moe_real number;
    if (field->kind == MOE_FIELD_CHOICE) {
        int choice = moei_choice_find(field->choices, value, n);
        if (choice < 0) return moei_field_bad(field, value, n, error);
        *moei_field_int(field, config) = choice;
        return MOE_OK;
    }
    if (!moei_parse_real(value, n, &number)) return moei_field_bad(field, value, n, error);
    if ((moei_real_bits(number) & ~MOEI_SIGN_BIT) == 0) number = MOEI_R(0.0); /* -0 is the default too, whose text is 0 */
    if (field->kind == MOE_FIELD_REAL) {
        *moei_field_real(field, config) = number;
        return MOE_OK;
    }
    /* whole numbers of a configuration are below 2^24, which every real type holds exactly */
    if (number < MOEI_R(-16777216.0) || number > MOEI_R(16777216.0)) return moei_field_bad(field, value, n, error);
    if (number < (moe_real)(int)number || number > (moe_real)(int)number) return moei_field_bad(field, value, n, error);
    if (field->kind == MOE_FIELD_FLAG && number < MOEI_R(0.0)) return moei_field_bad(field, value, n, error);
    if (field->kind == MOE_FIELD_FLAG && number > MOEI_R(1.0)) return moei_field_bad(field, value, n, error);
    *moei_field_int(field, config) = (int)number;
    return MOE_OK;
}

moe_status moe_field_set(const moe_field *fields, void *config, const char *name, const char *value, moe_error *error) {
    const moe_field *field = moe_field_find(fields, name);
    if (config == NULL || value == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "config and value must not be NULL");
    if (field == NULL) return moei_error(error, MOE_ERR_NOT_FOUND, "%s: there is no such field", name);
    return moei_field_set_n(field, config, value, moei_strlen(value), error);
}

void moe_field_text(const moe_field *field, const void *config, char *text, size_t room) {
    moei_text t;
    int value;
    t.out = text, t.room = room, t.length = 0;
    if (room > 0) text[0] = '\0';
    if (field->kind == MOE_FIELD_REAL) {
        moei_put_real(&t, moei_field_get_real(field, config));
        return;
    }
    value = moei_field_get_int(field, config);
    if (field->kind == MOE_FIELD_CHOICE && value >= 0 && value <= (int)field->max)
        moei_put(&t, field->choices[value], moei_strlen(field->choices[value]));
    else
        moei_put_integer(&t, value);
}

/* Whether a field holds its default, 0. */
MOEI_TOOL int moei_field_is_zero(const moe_field *field, const void *config) {
    moe_real value;
    if (field->kind != MOE_FIELD_REAL) return moei_field_get_int(field, config) == 0;
    value = moei_field_get_real(field, config);
    return (moei_real_bits(value) & ~MOEI_SIGN_BIT) == 0; /* by its bits: a NaN is no default, under -ffast-math either */
}

moe_status moe_fields_apply(const moe_field *fields, void *config, const char *settings, moe_error *error) {
    const char *p = settings;
    if (p == NULL) return MOE_OK;
    if (config == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "config must not be NULL");
    while (*p != '\0') {
        char name[MOEI_FIELD_NAME];
        const moe_field *field;
        const char *value;
        size_t n = 0;
        moe_status status;
        while (*p == ' ') p++;
        if (*p == '\0') break;
        while (p[n] != '\0' && p[n] != '=' && p[n] != ' ') n++;
        if (p[n] != '=' || n >= sizeof name) return moei_error(error, MOE_ERR_CONFIG, "settings: expected name=value at \"%s\"", p);
        memcpy(name, p, n);
        name[n] = '\0';
        field = moe_field_find(fields, name);
        if (field == NULL) return moei_error(error, MOE_ERR_NOT_FOUND, "%s: there is no such field", name);
        for (value = p + n + 1, p = value; *p != '\0' && *p != ' ';) p++;
        status = moei_field_set_n(field, config, value, (size_t)(p - value), error);
        if (status != MOE_OK) return status;
    }
    return MOE_OK;
}

/* Each field on its own: inside its range. */
MOEI_TOOL moe_status moei_fields_check(const moe_field *fields, const void *config, moe_error *error) {
    char names[160];
    for (; fields->name != NULL; fields++) {
        double value;
        if (fields->kind == MOE_FIELD_REAL) {
            moe_real real = moei_field_get_real(fields, config);
            value = moe_is_finite(real) ? (double)real : fields->max * 2.0 + 1.0;
            if (moei_field_is_zero(fields, config) || (value >= (double)(moe_real)fields->min && value <= (double)(moe_real)fields->max)) continue;
            return moei_error(error, MOE_ERR_CONFIG, "%s = %g: must be %g to %g", fields->name, (double)real, fields->min, fields->max);
        }
        value = (double)moei_field_get_int(fields, config);
        if (moei_field_is_zero(fields, config) || (value >= fields->min && value <= fields->max)) continue;
        if (fields->kind == MOE_FIELD_CHOICE)
            return moei_error(error, MOE_ERR_CONFIG, "%s = %d: must be a constant for one of %s", fields->name,
                              moei_field_get_int(fields, config), moei_choices_text(fields, names, sizeof names));
        return moei_error(error, MOE_ERR_CONFIG, "%s = %d: must be %d to %d", fields->name, moei_field_get_int(fields, config),
                          (int)fields->min, (int)fields->max);
    }
    return MOE_OK;
}

/* ==== the fields of a router ============================================================================================= */

static const char *const moei_score_names[] = {"linear", "random", "mlp", "cosine", "norm", "grap", "attentive", "competition", "dselect", "custom", NULL};
static const char *const moei_node_names[] = {"down", "gate", "up", "act", "product", "output", NULL};
static const char *const moei_norm_names[] = {"l2", "l1", "linf", NULL};
MOEI_TOOL const char *const moei_act_names[] = {"relu", "silu", "gelu", "tanh", "sigmoid", "identity", NULL};
static const char *const moei_gate_names[] = {"softmax", "sigmoid", "sqrt_softplus", "relu", "identity", NULL};
static const char *const moei_input_names[] = {"plain", "jitter", "scaled_rms", "adaptive_clustering", NULL};
static const char *const moei_ac_names[] = {"paper", "code", "running", "random", NULL};
static const char *const moei_spread_names[] = {"mad", "variance", "pairwise", NULL};
static const char *const moei_noise_names[] = {"none", "noisy_topk", "gaussian", "gumbel", NULL};
static const char *const moei_refine_names[] = {"none", "similarity", "attention", NULL};
static const char *const moei_similarity_names[] = {"none", "l2", "rsqrt_d", NULL};
static const char *const moei_heads_names[] = {"min_entropy", "all", "fixed", NULL};
static const char *const moei_attention_u_names[] = {"input", "output", NULL};
static const char *const moei_select_names[] = {"top_k", "dense", "given", "grouped_top_k", "top_p", "threshold", "positive", "expert_choice", "affinity", "hash", "soft", "sinkhorn", "sample", "balanced", "custom", NULL};
static const char *const moei_group_names[] = {"max", "top2_sum", NULL};
static const char *const moei_fallback_names[] = {"always", "evaluation", "never", NULL};
static const char *const moei_expert_choice_names[] = {"p", "z", NULL};
static const char *const moei_drop_names[] = {"position", "priority", "random", "score", NULL};
static const char *const moei_drop_rule_names[] = {"none", "gshard", "st_moe", NULL};
static const char *const moei_renormalize_names[] = {"before", "after", NULL};
static const char *const moei_weight_names[] = {"sum", "softmax", "raw", "p_norm", "uniform", "one", "sparsemixer", NULL};
static const char *const moei_apply_names[] = {"output", "input", NULL};
static const char *const moei_balance_names[] = {"pairs", "tokens", "first", NULL};
static const char *const moei_scope_names[] = {"batch", "sequences", NULL};
static const char *const moei_importance_names[] = {"probabilities", "gate", "weights", NULL};
static const char *const moei_bound_names[] = {"none", "first", "every", NULL};
static const char *const moei_distill_names[] = {"ce_hard", "ce_soft", "mse", NULL};
static const char *const moei_tau_names[] = {"none", "gate_temperature", "cosine_tau", "similarity_tau", "attention_sigma", NULL};

#define MOEI_INT(type, name, least, most, about) {#name, MOE_FIELD_INT, offsetof(type, name), least, most, NULL, about}
#define MOEI_FLAG(type, name, about) {#name, MOE_FIELD_FLAG, offsetof(type, name), 0, 1, NULL, about}
#define MOEI_CHOICE(type, name, count, names, about) {#name, MOE_FIELD_CHOICE, offsetof(type, name), 0, (count)-1, names, about}
#define MOEI_REAL(type, name, least, most, about) {#name, MOE_FIELD_REAL, offsetof(type, name), least, most, NULL, about}
#define MOEI_FIELDS_END {NULL, 0, 0, 0, 0, NULL, NULL}
#define MOEI_C moe_router_config

/* The rows stand in a macro because a layer's table begins with them; its configuration begins with the router's. */
#define MOEI_ROUTER_FIELDS \
    MOEI_INT(MOEI_C, d_model, 1, MOE_MAX_WIDTH, "width of a token"), \
    MOEI_INT(MOEI_C, n_experts, 1, MOE_MAX_EXPERTS, "number of experts E"), \
    MOEI_INT(MOEI_C, top_k, 1, MOE_MAX_EXPERTS, "experts per token K"), \
    MOEI_CHOICE(MOEI_C, input, MOE_INPUT_COUNT, moei_input_names, "what the router sees"), \
    MOEI_REAL(MOEI_C, jitter_eps, 1e-6, 1, "eps of the input jitter"), \
    MOEI_CHOICE(MOEI_C, ac_mode, MOE_AC_COUNT, moei_ac_names, "how adaptive clustering weighs features"), \
    MOEI_CHOICE(MOEI_C, ac_spread, MOE_SPREAD_COUNT, moei_spread_names, "spread of a cluster"), \
    MOEI_INT(MOEI_C, ac_mix, 1, MOE_MAX_EXPERTS, "experts mixed by adaptive clustering"), \
    MOEI_REAL(MOEI_C, ac_lambda, 1e-9, 1e9, "lambda of the exact feature weights"), \
    MOEI_REAL(MOEI_C, ac_rho, 1e-9, 1, "how slowly the running feature weights move"), \
    MOEI_CHOICE(MOEI_C, score, MOE_SCORE_COUNT, moei_score_names, "how logits are made"), \
    MOEI_FLAG(MOEI_C, router_bias, "the linear score has a bias"), \
    MOEI_INT(MOEI_C, cosine_dim, 1, MOE_MAX_WIDTH, "rows of the cosine score's projection"), \
    MOEI_FLAG(MOEI_C, cosine_keep_length, "the token's length stays in the cosine score"), \
    MOEI_FLAG(MOEI_C, cosine_learn_tau, "the cosine score's temperature is learned"), \
    MOEI_REAL(MOEI_C, cosine_tau, 1e-6, 1e6, "the cosine score's temperature"), \
    MOEI_CHOICE(MOEI_C, norm_node, MOE_NODE_COUNT, moei_node_names, "the activation that the norm score reads"), \
    MOEI_CHOICE(MOEI_C, norm_order, MOE_NORM_COUNT, moei_norm_names, "the norm of the norm score"), \
    MOEI_INT(MOEI_C, router_hidden, 1, MOE_MAX_WIDTH, "hidden width of the mlp score"), \
    MOEI_CHOICE(MOEI_C, router_act, MOE_ACT_COUNT, moei_act_names, "activation of the mlp score"), \
    MOEI_FLAG(MOEI_C, grap_cosine, "the grap score divides by the token's length"), \
    MOEI_CHOICE(MOEI_C, noise, MOE_NOISE_COUNT, moei_noise_names, "noise on the logits in training"), \
    MOEI_REAL(MOEI_C, noise_floor, 1e-9, 1e6, "least scale of noisy_topk"), \
    MOEI_REAL(MOEI_C, noise_sigma, 1e-9, 1e6, "scale of gaussian noise"), \
    MOEI_CHOICE(MOEI_C, gate, MOE_GATE_COUNT, moei_gate_names, "logits to gate values"), \
    MOEI_REAL(MOEI_C, gate_temperature, 1e-6, 1e6, "temperature of the gates softmax and sigmoid"), \
    MOEI_CHOICE(MOEI_C, refine, MOE_REFINE_COUNT, moei_refine_names, "mixing gate values between tokens"), \
    MOEI_REAL(MOEI_C, similarity_tau, 1e-6, 1e6, "temperature of similarity"), \
    MOEI_CHOICE(MOEI_C, similarity_scale, MOE_SIMILARITY_COUNT, moei_similarity_names, "scaling of similarity"), \
    MOEI_FLAG(MOEI_C, similarity_learned, "similarity has a learned matrix"), \
    MOEI_FLAG(MOEI_C, lower_entropy_only, "only tokens that are at least as sure take part"), \
    MOEI_FLAG(MOEI_C, causal, "only earlier tokens take part"), \
    MOEI_INT(MOEI_C, heads, 1, 4096, "attention heads supplied"), \
    MOEI_CHOICE(MOEI_C, attention_heads, MOE_HEADS_COUNT, moei_heads_names, "which heads refine"), \
    MOEI_INT(MOEI_C, attention_head, 0, 4095, "the fixed head"), \
    MOEI_REAL(MOEI_C, attention_sigma, 1e-6, 1e6, "sigma of attention-aware routing"), \
    MOEI_CHOICE(MOEI_C, attention_u, MOE_ATTENTION_U_COUNT, moei_attention_u_names, "what attention compares"), \
    MOEI_CHOICE(MOEI_C, select, MOE_SELECT_COUNT, moei_select_names, "which experts a token takes"), \
    MOEI_FLAG(MOEI_C, selection_bias, "a state tensor is added for selection only"), \
    MOEI_INT(MOEI_C, groups, 1, MOE_MAX_EXPERTS, "groups of grouped_top_k"), \
    MOEI_INT(MOEI_C, groups_kept, 1, MOE_MAX_EXPERTS, "groups that grouped_top_k keeps"), \
    MOEI_CHOICE(MOEI_C, group_score, MOE_GROUP_COUNT, moei_group_names, "how grouped_top_k scores a group"), \
    MOEI_FLAG(MOEI_C, custom_batch, "the custom stages read other tokens"), \
    MOEI_REAL(MOEI_C, top_p, 1e-6, 1, "P of the selection top_p"), \
    MOEI_REAL(MOEI_C, threshold, -1e6, 1e6, "theta of the selection threshold"), \
    MOEI_FLAG(MOEI_C, threshold_learned, "theta is learned per expert"), \
    MOEI_FLAG(MOEI_C, threshold_sigmoid, "theta is a sigmoid of what is learned"), \
    MOEI_CHOICE(MOEI_C, threshold_fallback, MOE_FALLBACK_COUNT, moei_fallback_names, "when no expert is above theta"), \
    MOEI_CHOICE(MOEI_C, expert_choice_score, MOE_EXPERT_CHOICE_COUNT, moei_expert_choice_names, "what experts choose by"), \
    MOEI_REAL(MOEI_C, affinity_mass, 1e-6, 1, "share of an expert's affinity that it keeps"), \
    MOEI_REAL(MOEI_C, affinity_sum, 0, 1e9, "sum of affinity that an expert keeps"), \
    MOEI_INT(MOEI_C, capacity, 1, MOE_MAX_WIDTH, "most tokens per expert in affinity"), \
    MOEI_INT(MOEI_C, table_size, 1, MOE_MAX_WIDTH, "token ids of the selection hash"), \
    MOEI_INT(MOEI_C, slots, 1, MOE_MAX_EXPERTS, "slots per expert of soft"), \
    MOEI_FLAG(MOEI_C, soft_normalise, "soft compares unit vectors"), \
    MOEI_INT(MOEI_C, soft_sequences, 1, MOE_MAX_WIDTH, "most sequences in one soft call"), \
    MOEI_CHOICE(MOEI_C, weight, MOE_WEIGHT_COUNT, moei_weight_names, "combine weights"), \
    MOEI_REAL(MOEI_C, weight_p, 0.125, 64, "P of the weight p_norm"), \
    MOEI_REAL(MOEI_C, sparsemixer_eps, 1e-6, 10, "eps of the weight sparsemixer"), \
    MOEI_FLAG(MOEI_C, expert_scale, "a learned factor per expert on the weights"), \
    MOEI_REAL(MOEI_C, scale, -1e6, 1e6, "a constant factor on the weights, last of all"), \
    MOEI_CHOICE(MOEI_C, apply_to, MOE_APPLY_COUNT, moei_apply_names, "where the weight is applied"), \
    MOEI_REAL(MOEI_C, capacity_factor, 1e-6, 1e6, "capacity as a multiple of the even load"), \
    MOEI_REAL(MOEI_C, capacity_factor_eval, 1e-6, 1e6, "the same outside training"), \
    MOEI_INT(MOEI_C, drop_capacity, 1, MOE_MAX_WIDTH, "capacity as a number of pairs"), \
    MOEI_INT(MOEI_C, capacity_min, 1, MOE_MAX_WIDTH, "least capacity"), \
    MOEI_CHOICE(MOEI_C, capacity_bound, MOE_BOUND_COUNT, moei_bound_names, "least capacity by the angles of tokens"), \
    MOEI_REAL(MOEI_C, capacity_rho, 1e-9, 1, "how slowly the averaged bound moves"), \
    MOEI_CHOICE(MOEI_C, drop_order, MOE_DROP_COUNT, moei_drop_names, "who is placed first"), \
    MOEI_CHOICE(MOEI_C, drop_rule, MOE_DROP_RULE_COUNT, moei_drop_rule_names, "random dropping of weak choices"), \
    MOEI_CHOICE(MOEI_C, renormalize, MOE_RENORMALIZE_COUNT, moei_renormalize_names, "weights after dropping"), \
    MOEI_REAL(MOEI_C, loss_balance, 0, 1e6, "factor of the balance loss"), \
    MOEI_CHOICE(MOEI_C, balance_over, MOE_BALANCE_COUNT, moei_balance_names, "what the balance loss counts"), \
    MOEI_CHOICE(MOEI_C, balance_scope, MOE_SCOPE_COUNT, moei_scope_names, "balance over the batch or per sequence"), \
    MOEI_REAL(MOEI_C, loss_z, 0, 1e6, "factor of the z loss"), \
    MOEI_REAL(MOEI_C, loss_importance, 0, 1e6, "factor of the importance loss"), \
    MOEI_CHOICE(MOEI_C, importance_over, MOE_IMPORTANCE_COUNT, moei_importance_names, "what the importance loss sums"), \
    MOEI_FLAG(MOEI_C, unbiased, "unbiased variance in the importance loss"), \
    MOEI_REAL(MOEI_C, loss_entropy, 0, 1e6, "factor of the entropy loss"), \
    MOEI_REAL(MOEI_C, loss_usage_entropy, 0, 1e6, "factor of the usage entropy"), \
    MOEI_REAL(MOEI_C, loss_similarity_same, 0, 1e6, "factor of the similarity loss, same expert"), \
    MOEI_REAL(MOEI_C, loss_similarity_diff, 0, 1e6, "factor of the similarity loss, different experts"), \
    MOEI_REAL(MOEI_C, loss_locality, 0, 1e6, "factor of the locality loss"), \
    MOEI_INT(MOEI_C, nodes, 1, MOE_MAX_EXPERTS, "nodes of the locality loss"), \
    MOEI_REAL(MOEI_C, loss_l1, 0, 1e6, "factor of the L1 loss"), \
    MOEI_REAL(MOEI_C, loss_load, 0, 1e6, "factor of the load loss"), \
    MOEI_REAL(MOEI_C, loss_orthogonal, 0, 1e6, "factor of the orthogonality loss"), \
    MOEI_REAL(MOEI_C, loss_distill, 0, 1e6, "factor of the distance from a teacher"), \
    MOEI_CHOICE(MOEI_C, distill, MOE_DISTILL_COUNT, moei_distill_names, "distance from a teacher"), \
    MOEI_FLAG(MOEI_C, student, "a linear router learns to choose as this one"), \
    MOEI_REAL(MOEI_C, expert_temperature, 1, 1e6, "temperature of the experts' own loss"), \
    MOEI_REAL(MOEI_C, bias_rate, 0, 1e6, "step of the selection bias"), \
    MOEI_FLAG(MOEI_C, l1_controller, "the L1 factor follows the share of unchosen pairs"), \
    MOEI_INT(MOEI_C, schedule_steps, 1, MOE_MAX_WIDTH, "steps until the end of the schedules"), \
    MOEI_INT(MOEI_C, k_end, 1, MOE_MAX_EXPERTS, "K at the end of its schedule"), \
    MOEI_CHOICE(MOEI_C, tau_schedule, MOE_TAU_COUNT, moei_tau_names, "the temperature that has a schedule"), \
    MOEI_REAL(MOEI_C, tau_end, 1e-6, 1e6, "its value at the end"), \
    MOEI_INT(MOEI_C, freeze_at, 1, MOE_MAX_WIDTH, "step from which on the router is fixed"), \
    MOEI_INT(MOEI_C, switch_at, 1, MOE_MAX_WIDTH, "step until which switch_from selects"), \
    MOEI_CHOICE(MOEI_C, switch_from, MOE_SELECT_COUNT, moei_select_names, "selection before switch_at"), \
    MOEI_FLAG(MOEI_C, untrained, "accept a router that no gradient reaches")

static const moe_field moei_router_fields[] = {MOEI_ROUTER_FIELDS, MOEI_FIELDS_END};

const moe_field *moe_router_fields(void) { return moei_router_fields; }

/* ==== stages: one table row per value of a field ========================================================================== */

/* What a router's configuration asks of every call, known once and for all: moe_router_init sets the bits, and calls pass by what is not
   asked. */
enum {
    MOEI_PART_MEMORY = 1,    /* arrays beyond those that every call has */
    MOEI_PART_MOVES = 2,     /* schedules, state or a capacity bound change the configuration from call to call */
    MOEI_PART_SUPPLIES = 4,  /* the call must bring more than x */
    MOEI_PART_NO_DECODING = 8,
    MOEI_PART_BATCH = 16     /* tokens of different sequences are decided together */
};

enum { MOEI_COLUMNS = 16 }; /* of a matrix that are turned into rows at a time: a cache line of floats */

/* The arrays that a call keeps to itself, laid out behind those that it shows. Every call has the first five; of the others those that its
   configuration needs. */
typedef struct moei_scratch {
    moe_real *column;       /* [N] */
    moe_real *row;          /* [3, max(E, nodes)] */
    int32_t *order;         /* [max(N, E + 1)] */
    moe_real *base_weights; /* [N,max_choices] section_weights without the expert's own factor */
    moe_real *input;        /* [N,d] */
    moe_real *input_factor, *columns, *clusters, *clean_logits, *clean_gate, *noise_raw, *noise_value, *unit, *keys, *key_terms, *block;
    moe_real *entropy, *hidden, *hidden_act, *query, *keyed, *lengths, *student_logits, *past_u, *past_gate;
    double *flow_cost;
    unsigned char *flow_extra;
    int32_t *flow_mover;
    unsigned char *batch_mask;  /* [N] of a batch that decides together, first with MOEI_BEGINS */
    int32_t *batch_sequences, *batch_ids, *batch_given, *batch_home, *clusters_of;
    moe_real *batch_teacher, *batch_h, *batch_x;
    moe_real *d_student, *d_logits, *d_gate, *d_probabilities, *d_weights, *d_final, *d_unused, *d_clean, *d_clean_gate, *d_noise, *d_unit;
    moe_real *d_keys, *d_block, *d_input, *d_hidden, *d_query, *d_keyed;
} moei_scratch;

/* All that the stages of one call share. The gradients are there in the backward pass only. */
typedef struct moei_pass {
    const moe_router *router;
    const moe_router_config *c; /* of the router, or effective */
    const moe_call *call;
    moe_routing *r;
    size_t n, experts, d;
    moe_status status; /* of a custom stage */
    int frozen;        /* past freeze_at */
    unsigned supplied;    /* MOEI_HAS_ bits of the call, or of the batch */
    int is_part;          /* the call's tokens of a batch that decides together, of which these are those of other processes: */
    size_t before, after;
    size_t past, span; /* refine: tokens before the call's, and with them; u and gate of all of these */
    const moe_real *all_u, *all_gate;
    moe_real *const *d_tensors;
    moe_real *d_nodes;
    moei_scratch m;
    moe_router_config effective; /* the configuration with what schedules make of it at this step, where it moves */
} moei_pass;

static int moei_is_real(const moe_call *call, size_t t) { return call->mask == NULL || call->mask[t] != 0; }

/* x/y, where a zero denominator gives 0. */
static moe_real moei_ratio(moe_real x, moe_real y) { return y < MOEI_R(0.0) || y > MOEI_R(0.0) ? x / y : MOEI_R(0.0); }

/* The same in a way back, where a denominator so small that the slope would not be finite counts as zero too. */
MOEI_TOOL moe_real moei_slope(moe_real x, moe_real y) {
    const moe_real least = MOE_REAL_IS_DOUBLE ? (moe_real)1e-290 : MOEI_R(1e-30);
    return y < -least || y > least ? x / y : MOEI_R(0.0);
}

static const moe_real *moei_tensor(const moei_pass *s, int slot) { return s->router->tensors[slot]; }

/* Where the gradient of a tensor is added; NULL: nowhere. A frozen router with a student goes on learning: it is the student that is frozen. */
MOEI_TOOL moe_real *moei_gradient(const moei_pass *s, int slot) {
    return s->d_tensors != NULL && (!s->frozen || s->c->student) ? s->d_tensors[slot] : NULL;
}

static int moei_is_noisy(const moei_pass *s) { return MOEI_KEPT(EXTRAS, MOE_EXTRA_TRAINING) && s->c->noise != MOE_NOISE_NONE && s->call->training; }

/* ---- schedules: the configuration at the present step ------------------------------------------------------------------------ */

static moe_real *moei_scheduled_tau(moe_router_config *c) {
    switch (c->tau_schedule) {
    case MOE_TAU_GATE_TEMPERATURE: return &c->gate_temperature;
    case MOE_TAU_COSINE_TAU: return &c->cosine_tau;
    case MOE_TAU_SIMILARITY_TAU: return &c->similarity_tau;
    default: return &c->attention_sigma;
    }
}

/* Past freeze_at: no losses, and the student, if there is one, chooses. */
static void moei_freeze(moei_pass *s) {
    moe_router_config *c = &s->effective;
    s->frozen = 1;
    c->loss_balance = c->loss_z = c->loss_importance = c->loss_entropy = c->loss_usage_entropy = MOEI_R(0.0);
    c->loss_similarity_same = c->loss_similarity_diff = c->loss_locality = c->loss_l1 = MOEI_R(0.0);
    c->loss_orthogonal = c->loss_load = c->loss_distill = MOEI_R(0.0);
    if (c->student) c->select = MOE_SELECT_TOP_K;
}

/* effective: router->config with K, temperature, selection and L1 factor of the step that the state tells. */
static void moei_schedule(moei_pass *s) {
    moe_router_config *c = &s->effective;
    const moe_real *state = moei_tensor(s, MOE_ROUTER_STEP), *l1 = moei_tensor(s, MOE_ROUTER_L1);
    moe_real step = state != NULL && state[0] > MOEI_R(0.0) ? state[0] : MOEI_R(0.0), way = MOEI_R(0.0), *tau;
    int64_t steps, at;
    *c = s->router->config;
    s->c = c;
    tau = moei_scheduled_tau(c);
    steps = c->schedule_steps, at = step < (moe_real)c->schedule_steps ? (int64_t)step : steps;
    if (steps > 0) way = (moe_real)at / (moe_real)steps;
    if (c->k_end > 0) c->top_k = (int)((2 * c->top_k * steps + 2 * (c->k_end - c->top_k) * at + steps) / (2 * steps)); /* rounded */
    if (c->tau_schedule != MOE_TAU_NONE) *tau = *tau * (MOEI_R(1.0) - way) + c->tau_end * way;
    if (c->switch_at > 0 && step < (moe_real)c->switch_at) c->select = c->switch_from;
    if (l1 != NULL) c->loss_l1 = l1[0];
    if (c->freeze_at > 0 && step >= (moe_real)c->freeze_at) moei_freeze(s);
}

/* ---- a batch of several processes ---------------------------------------------------------------------------------------------
   The stages up to refine work on the call's own tokens, those from select on, on all tokens of the batch, in every process alike: two passes
   over the same arrays, the second (`batch`) with all of their rows. Between them the rows are gathered. Without a batch both are one. */

/* What a process tells of each of its tokens: is it real, does a sequence begin there; and which arrays that a call may leave out its call has, so that one
   without tokens does as the others. */
enum {
    MOEI_REAL_TOKEN = 1, MOEI_BEGINS = 2, MOEI_HAS_GIVEN = 4, MOEI_HAS_HOME = 8, MOEI_HAS_NOISE = 16, MOEI_HAS_JITTER = 32, MOEI_HAS_DISTANCES = 64,
    MOEI_HAS = MOEI_HAS_GIVEN | MOEI_HAS_HOME | MOEI_HAS_NOISE | MOEI_HAS_JITTER | MOEI_HAS_DISTANCES
};

static unsigned moei_supplied(const moe_call *call) {
    return (call->given != NULL ? (unsigned)MOEI_HAS_GIVEN : 0) | (call->home != NULL ? (unsigned)MOEI_HAS_HOME : 0) | (call->noise != NULL ? (unsigned)MOEI_HAS_NOISE : 0) |
           (call->jitter != NULL ? (unsigned)MOEI_HAS_JITTER : 0) | (call->distances != NULL ? (unsigned)MOEI_HAS_DISTANCES : 0);
}

/* Fills in the rows of other processes' tokens. */
static moe_status moei_gather_rows(const moei_pass *s, size_t row_bytes, void *rows) {
    return s->call->batch->gather(s->call->batch->ctx, MOE_OK, row_bytes, rows);
}

/* ---- input: x -> u, one token -------------------------------------------------------------------------------------------- */

/* xi, drawn once per call and kept for the way back; those of other processes' tokens are drawn too. */
static void moei_input_jitter(const moei_pass *s, size_t t, const moe_real *x, moe_real *u) {
    moe_real *xi = s->m.input_factor + t * s->d, eps = s->c->jitter_eps;
    size_t q;
    for (q = 0; q < s->d; q++) {
        if (s->call->jitter != NULL) xi[q] = s->call->jitter[t * s->d + q];
        else xi[q] = MOEI_R(1.0) + eps * (MOEI_R(2.0) * moe_rng_uniform(s->call->rng) - MOEI_R(1.0));
        u[q] = x[q] * xi[q];
    }
}

static void moei_input_scaled_rms(const moei_pass *s, size_t t, const moe_real *x, moe_real *u) {
    moe_real shrink = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)s->d);
    size_t q;
    moe_rms_norm(s->d, x, moei_tensor(s, MOE_ROUTER_INPUT_SCALE), MOEI_R(1e-6), u, s->m.input_factor + t);
    for (q = 0; q < s->d; q++) u[q] *= shrink;
}

/* The cluster of a token: the previous layer's expert with the largest weight, the first listed of equal ones; -1: none. */
static int32_t moei_cluster(const moei_pass *s, size_t t) {
    const int32_t *experts = s->call->previous_experts + t * s->call->n_previous;
    const moe_real *weights = s->call->previous_weights + t * s->call->n_previous;
    int32_t best = -1;
    size_t j, at = 0;
    for (j = 0; j < s->call->n_previous; j++)
        if (experts[j] >= 0 && (best < 0 || weights[j] > weights[at])) best = experts[j], at = j;
    return best;
}

/* Until there are choices, their counts hold the cluster of each token. A batch that decides together keeps them. */
static int32_t *moei_clusters_of(const moei_pass *s) { return s->m.clusters_of != NULL ? s->m.clusters_of : s->r->n_choices; }

/* The tokens whose spread makes M: of this layer in mode code, else of the previous one. */
static const moe_real *moei_cluster_tokens(const moei_pass *s) {
    if (s->m.batch_h != NULL && !s->is_part) return s->m.batch_h;
    if (s->c->ac_mode != MOE_AC_CODE) return s->call->previous_input;
    return s->call->router_x != NULL ? s->call->router_x : s->call->x;
}

/* The tokens of cluster k: order[starts[k]] .. order[starts[k + 1] - 1], ascending. */
static void moei_input_sort(const moei_pass *s, int32_t *order, size_t *starts) {
    const int32_t *clusters = moei_clusters_of(s);
    size_t k, t;
    memset(starts, 0, (s->experts + 1) * sizeof *starts);
    for (t = 0; t < s->n; t++)
        if (clusters[t] >= 0) starts[clusters[t]]++;
    for (k = 1; k <= s->experts; k++) starts[k] += starts[k - 1]; /* ends */
    for (t = s->n; t-- > 0;)
        if (clusters[t] >= 0) order[--starts[clusters[t]]] = (int32_t)t;
}

/* The sum of the tokens of each cluster into M [E,d]: in the order of tokens, so that h is fetched as one stream. */
static void moei_cluster_sums(const moei_pass *s, const moe_real *h) {
    const int32_t *clusters = moei_clusters_of(s);
    size_t t;
    memset(s->m.clusters, 0, s->experts * s->d * sizeof(moe_real));
    for (t = 0; t < s->n; t++)
        if (clusters[t] >= 0) moe_axpy(s->router->kernels, s->d, MOEI_R(1.0), h + t * s->d, s->m.clusters + (size_t)clusters[t] * s->d);
}

/* s_kq of one cluster of at least two tokens in place of their sum. */
static void moei_cluster_spread(const moei_pass *s, const moe_real *h, const int32_t *tokens, size_t count, moe_real *m) {
    moe_real over = (moe_real)count, share = MOEI_R(2.0) / (over * over); /* of a pair, in both its orders */
    size_t i, j, q;
    if (s->c->ac_spread != MOE_SPREAD_PAIRWISE) {
        for (q = 0; q < s->d; q++) m[q] /= over;
        moe_spread(s->router->kernels, s->c->ac_spread == MOE_SPREAD_VARIANCE, count, tokens, s->d, h, s->d, m, m);
        return;
    }
    memset(m, 0, s->d * sizeof *m);
    for (i = 0; i < count; i++)
        for (j = 0; j < i; j++)
            for (q = 0; q < s->d; q++) m[q] += share * MOEI_F(fabs)(h[(size_t)tokens[i] * s->d + q] - h[(size_t)tokens[j] * s->d + q]);
}

/* The theorem's weights: lambda / (s + alpha), alpha > -min s so that their mean is 1, by bisection of beta = alpha + min s: beside a large s, alpha itself
   could not tell a small lambda from 0. */
static void moei_exact_weights(moe_real *m, size_t d, moe_real lambda) {
    moe_real least = m[0], low, high, beta, mean;
    size_t q;
    int step;
    for (q = 1; q < d; q++)
        if (m[q] < least) least = m[q];
    for (q = 0; q < d; q++) m[q] -= least;
    low = lambda / (moe_real)d, high = lambda; /* at low one weight is d, at high none is above 1 */
    for (step = 0; step < 200; step++) {
        beta = (low + high) / MOEI_R(2.0), mean = MOEI_R(0.0);
        for (q = 0; q < d; q++) mean += lambda / (m[q] + beta);
        if (mean > (moe_real)d) low = beta;
        else high = beta;
    }
    for (q = 0; q < d; q++) m[q] = lambda / (m[q] + high);
}

/* Mode paper: 1/(s + 1e-6), scaled to mean 1. */
static void moei_paper_weights(moe_real *m, size_t d) {
    moe_real sum = MOEI_R(0.0);
    size_t q;
    for (q = 0; q < d; q++) m[q] = MOEI_R(1.0) / (m[q] + MOEI_R(1e-6)), sum += m[q];
    for (q = 0; q < d; q++) m[q] *= (moe_real)d / sum;
}

/* Mode code with mad: clamped to 10 times the mean of all, then divided by the mean over clusters, small clusters left out of both. */
static void moei_code_weights(const moei_pass *s, const size_t *starts) {
    moe_real *m = s->m.clusters, mean = MOEI_R(0.0), column;
    size_t k, q, used = 0;
    for (k = 0; k < s->experts; k++)
        for (q = 0; q < s->d && starts[k + 1] - starts[k] > 1; q++) mean += m[k * s->d + q];
    for (k = 0; k < s->experts; k++) used += starts[k + 1] - starts[k] > 1;
    if (used == 0) return; /* every row is 1 already */
    mean /= (moe_real)(used * s->d);
    for (q = 0; q < s->d; q++) {
        column = MOEI_R(0.0);
        for (k = 0; k < s->experts; k++) {
            if (starts[k + 1] - starts[k] < 2) continue;
            if (m[k * s->d + q] > MOEI_R(10.0) * mean) m[k * s->d + q] = MOEI_R(10.0) * mean;
            column += m[k * s->d + q] / (moe_real)used;
        }
        for (k = 0; k < s->experts; k++)
            if (starts[k + 1] - starts[k] > 1) m[k * s->d + q] /= column;
    }
}

/* M of one cluster from its spread, in place. */
static void moei_cluster_weights(const moei_pass *s, moe_real *m) {
    moe_real least = s->c->ac_spread == MOE_SPREAD_VARIANCE ? MOEI_R(0.1) : MOEI_R(1e-4);
    size_t q;
    if (s->c->ac_lambda > MOEI_R(0.0)) moei_exact_weights(m, s->d, s->c->ac_lambda);
    else if (s->c->ac_mode == MOE_AC_PAPER) moei_paper_weights(m, s->d);
    else
        for (q = 0; q < s->d; q++) m[q] = MOEI_R(1.0) / (m[q] + least);
}

static void moei_fill(moe_real *v, size_t n, moe_real value) {
    size_t i;
    for (i = 0; i < n; i++) v[i] = value;
}

/* The cluster of every token, and of a batch that decides together also what the clusters' spread is measured on. */
static moe_status moei_input_find(const moei_pass *s, const moei_pass *batch) {
    const moe_real *h = moei_cluster_tokens(s);
    int32_t *clusters = moei_clusters_of(s);
    moe_status status;
    size_t t;
    for (t = 0; t < s->n; t++) clusters[t] = moei_is_real(s->call, t) ? moei_cluster(s, t) : -1;
    if (s == batch) return MOE_OK;
    status = moei_gather_rows(batch, sizeof(int32_t), batch->m.clusters_of);
    if (status != MOE_OK || batch->m.batch_h == NULL) return status;
    if (s->n > 0) memcpy(batch->m.batch_h + s->before * s->d, h, s->n * s->d * sizeof(moe_real));
    return moei_gather_rows(batch, s->d * sizeof(moe_real), batch->m.batch_h);
}

/* M [E,d] of this call, and a last row of 1 for tokens that are in no cluster. */
static moe_status moei_input_clusters(const moei_pass *own, const moei_pass *s) {
    const moe_real *h, *state = moei_tensor(s, MOE_ROUTER_AC_RUNNING);
    size_t *starts = s->r->plan.offsets, k; /* before there is a plan, its offsets are free */
    moe_status status = moei_input_find(own, s);
    if (status != MOE_OK) return status;
    moei_fill(s->m.clusters + s->experts * s->d, s->d, MOEI_R(1.0));
    if (state != NULL) {
        memcpy(s->m.clusters, state, s->experts * s->d * sizeof(moe_real));
        return MOE_OK;
    }
    h = moei_cluster_tokens(s);
    moei_input_sort(s, s->m.order, starts);
    moei_cluster_sums(s, h);
    for (k = 0; k < s->experts; k++) {
        moe_real *m = s->m.clusters + k * s->d;
        size_t count = starts[k + 1] - starts[k];
        if (count < 2) {
            moei_fill(m, s->d, MOEI_R(1.0));
            continue;
        }
        moei_cluster_spread(s, h, s->m.order + starts[k], count, m);
        moei_cluster_weights(s, m);
    }
    if (s->c->ac_mode == MOE_AC_CODE && s->c->ac_spread != MOE_SPREAD_VARIANCE && !(s->c->ac_lambda > MOEI_R(0.0))) moei_code_weights(s, starts);
    return MOE_OK;
}

/* sum_j a_j M_j over the J best of the previous layer's experts, their weights a renormalised; 1 without any. */
static void moei_input_mix(const moei_pass *s, size_t t, moe_real *m) {
    const int32_t *experts = s->call->previous_experts + t * s->call->n_previous;
    const moe_real *weights = s->call->previous_weights + t * s->call->n_previous;
    moe_real last = MOEI_INFINITY, sum = MOEI_R(0.0);
    size_t j, q, taken, last_at = 0;
    moei_fill(m, s->d, MOEI_R(0.0));
    for (taken = 0; taken < (size_t)s->c->ac_mix; taken++) { /* the next best after the last one taken */
        size_t best = s->call->n_previous;
        for (j = 0; j < s->call->n_previous; j++) {
            if (experts[j] < 0 || weights[j] > last || (taken > 0 && !(weights[j] < last) && j <= last_at)) continue;
            if (best == s->call->n_previous || weights[j] > weights[best]) best = j;
        }
        if (best == s->call->n_previous) break;
        last = weights[best], last_at = best;
        moe_axpy(s->router->kernels, s->d, weights[best], s->m.clusters + (size_t)experts[best] * s->d, m);
        sum += weights[best];
    }
    for (q = 0; q < s->d; q++) m[q] = sum > MOEI_R(0.0) ? m[q] / sum : MOEI_R(1.0);
}

/* u_t = m_t * x_t. Training keeps m_t for the way back. */
static void moei_input_clustered(const moei_pass *s, size_t t, const moe_real *x, moe_real *u) {
    moe_real *kept = s->m.input_factor + t * s->d;
    const moe_real *m = kept;
    if (s->c->ac_mix > 1) moei_input_mix(s, t, kept);
    else {
        int32_t cluster = moei_clusters_of(s)[t];
        m = s->m.clusters + (cluster < 0 ? s->experts : (size_t)cluster) * s->d;
        if (s->call->training) memcpy(kept, m, s->d * sizeof *m);
    }
    moe_multiply(s->router->kernels, s->d, x, m, u);
}

#ifndef MOE_NO_TRAIN
static void moei_input_factor_backward(const moei_pass *s, size_t t, const moe_real *x, moe_real *du, moe_real *dx) {
    const moe_real *xi = s->m.input_factor + t * s->d;
    size_t q;
    (void)x;
    for (q = 0; q < s->d; q++) dx[q] += xi[q] * du[q];
}

static void moei_input_scaled_rms_backward(const moei_pass *s, size_t t, const moe_real *x, moe_real *du, moe_real *dx) {
    moe_real shrink = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)s->d);
    size_t q;
    for (q = 0; q < s->d; q++) du[q] *= shrink;
    moe_rms_norm_backward(s->d, x, moei_tensor(s, MOE_ROUTER_INPUT_SCALE), s->m.input_factor[t], du, dx, moei_gradient(s, MOE_ROUTER_INPUT_SCALE));
}
#define MOEI_BACKWARD(f) f
#else
#define MOEI_BACKWARD(f) NULL
#endif

typedef struct moei_input {
    moe_status (*prepare)(const moei_pass *own, const moei_pass *batch); /* once per call, or NULL; without a batch both are the call */
    void (*forward)(const moei_pass *s, size_t t, const moe_real *x, moe_real *u);
    void (*backward)(const moei_pass *s, size_t t, const moe_real *x, moe_real *du, moe_real *dx); /* dx may be a scratch row */
    int training_only; /* plain outside training */
} moei_input;

static const moei_input moei_inputs[MOE_INPUT_COUNT] = {
    /* plain      */ {NULL, NULL, NULL, 0},
    /* jitter     */ {NULL, MOEI_KEEP(INPUTS, MOE_INPUT_JITTER, moei_input_jitter), MOEI_BACKWARD(moei_input_factor_backward), 1},
    /* scaled_rms */ {NULL, MOEI_KEEP(INPUTS, MOE_INPUT_SCALED_RMS, moei_input_scaled_rms), MOEI_BACKWARD(moei_input_scaled_rms_backward), 0},
    /* adaptive_clustering */ {MOEI_KEEP(INPUTS, MOE_INPUT_ADAPTIVE_CLUSTERING, moei_input_clusters), MOEI_KEEP(INPUTS, MOE_INPUT_ADAPTIVE_CLUSTERING, moei_input_clustered), MOEI_BACKWARD(moei_input_factor_backward), 0}};

/* The input stage of this call; NULL functions when u is x. */
static const moei_input *moei_input_stage(const moei_pass *s) {
    const moei_input *stage = &moei_inputs[s->c->input];
    return stage->training_only && !s->call->training ? &moei_inputs[MOE_INPUT_PLAIN] : stage;
}

/* ---- score: u -> z -------------------------------------------------------------------------------------------------------- */

static size_t moei_router_hidden(const moe_router_config *c) { return (size_t)(c->router_hidden > 0 ? c->router_hidden : c->d_model); }

/* out[n,m] = in[n,k] W[m,k]^T + bias */
static void moei_affine(const moe_kernels *k, size_t n, size_t m, size_t inner, const moe_real *in, const moe_real *w, const moe_real *bias,
                        moe_real *out) {
    size_t t;
    moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, n, m, inner, in, inner, w, inner, out, m, 0);
    if (bias == NULL) return;
    for (t = 0; t < n; t++) moe_axpy(k, m, MOEI_R(1.0), bias, out + t * m);
}

static void moei_score_linear(moei_pass *s) {
    moei_affine(s->router->kernels, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_WEIGHT), moei_tensor(s, MOE_ROUTER_BIAS),
                s->r->logits);
}

static void moei_score_mlp(moei_pass *s) {
    const moe_kernels *k = s->router->kernels;
    size_t h = moei_router_hidden(s->c);
    moei_affine(k, s->n, h, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_FC1_WEIGHT), moei_tensor(s, MOE_ROUTER_FC1_BIAS), s->m.hidden);
    moe_activate(k, s->c->router_act, s->n * h, s->m.hidden, s->m.hidden_act);
    moei_affine(k, s->n, s->experts, h, s->m.hidden_act, moei_tensor(s, MOE_ROUTER_FC2_WEIGHT), moei_tensor(s, MOE_ROUTER_FC2_BIAS),
                s->r->logits);
}

/* The width in which the cosine score compares, and the projected tokens. */
static size_t moei_cosine_width(const moei_pass *s) { return s->c->cosine_dim > 0 ? (size_t)s->c->cosine_dim : s->d; }

static const moe_real *moei_cosine_tokens(const moei_pass *s) { return s->c->cosine_dim > 0 ? s->m.hidden : s->r->u; }

/* 1/|v|, or 0 for a vector shorter than 1e-12: it then has cosine 0 and passes no gradient. */
static moe_real moei_inverse_length(const moe_kernels *k, const moe_real *v, size_t n) {
    moe_real largest = MOEI_R(0.0), sum = moe_dot(k, n, v, v), length;
    size_t i;
    if (sum > MOEI_R(1e-20) && sum < MOEI_R(1e30)) return MOEI_R(1.0) / MOEI_F(sqrt)(sum);
    for (i = 0; i < n; i++) {
        moe_real a = MOEI_F(fabs)(v[i]);
        if (a > largest) largest = a;
    }
    if (!(largest > MOEI_R(0.0))) return MOEI_R(0.0);
    /* scaled, so that short vectors do not underflow when squared, nor long ones overflow */
    for (i = 0, sum = MOEI_R(0.0); i < n; i++) sum += (v[i] / largest) * (v[i] / largest);
    length = largest * MOEI_F(sqrt)(sum);
    return length < MOEI_R(1e-12) ? MOEI_R(0.0) : MOEI_R(1.0) / length;
}

static moe_real moei_tau(const moei_pass *s) {
    return s->c->cosine_learn_tau ? moei_tensor(s, MOE_ROUTER_TEMPERATURE)[0] : s->c->cosine_tau;
}

static void moei_score_cosine(moei_pass *s) {
    const moe_kernels *k = s->router->kernels;
    size_t width = moei_cosine_width(s), t, e;
    const moe_real *v = moei_cosine_tokens(s), *w = moei_tensor(s, MOE_ROUTER_WEIGHT);
    moe_real *token_inverse = s->m.lengths, *expert_inverse = s->m.lengths + s->n, over_tau = MOEI_R(1.0) / moei_tau(s);
    if (s->c->cosine_dim > 0) moei_affine(k, s->n, width, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_PROJECTION), NULL, s->m.hidden);
    for (t = 0; t < s->n; t++) token_inverse[t] = s->c->cosine_keep_length ? MOEI_R(1.0) : moei_inverse_length(k, v + t * width, width);
    for (e = 0; e < s->experts; e++) expert_inverse[e] = moei_inverse_length(k, w + e * width, width);
    moei_affine(k, s->n, s->experts, width, v, w, NULL, s->r->logits);
    for (t = 0; t < s->n; t++)
        for (e = 0; e < s->experts; e++) s->r->logits[t * s->experts + e] *= token_inverse[t] * expert_inverse[e] * over_tau;
}

/* The norm of one activation; for linf, *at is the first place that reaches it. */
static moe_real moei_vector_norm(int order, const moe_real *v, size_t n, size_t *at) {
    moe_real largest = MOEI_R(0.0), sum = MOEI_R(0.0);
    size_t i;
    *at = 0;
    for (i = 0; i < n; i++) {
        moe_real a = MOEI_F(fabs)(v[i]);
        if (a > largest) largest = a, *at = i;
        sum += a;
    }
    if (!moe_is_finite(sum)) return sum;
    if (order == MOE_NORM_LINF) return largest;
    if (order == MOE_NORM_L1 || !(largest > MOEI_R(0.0))) return sum;
    for (i = 0, sum = MOEI_R(0.0); i < n; i++) sum += (v[i] / largest) * (v[i] / largest);
    return largest * MOEI_F(sqrt)(sum);
}

static void moei_score_norm(moei_pass *s) {
    size_t width = s->call->node_width, t, e, at;
    for (e = 0; e < s->experts; e++)
        for (t = 0; t < s->n; t++)
            s->r->logits[t * s->experts + e] = moei_vector_norm(s->c->norm_order, s->call->nodes + (e * s->n + t) * width, width, &at);
}

static void moei_score_grap(moei_pass *s) {
    size_t block = s->d / s->experts, t, e, q;
    moe_real over = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)block);
    for (t = 0; t < s->n; t++) {
        const moe_real *u = s->r->u + t * s->d;
        moe_real share = s->c->grap_cosine ? moei_inverse_length(s->router->kernels, u, s->d) * over : MOEI_R(1.0) / (moe_real)block;
        for (e = 0; e < s->experts; e++) {
            moe_real sum = MOEI_R(0.0);
            for (q = 0; q < block; q++) sum += u[e * block + q];
            s->r->logits[t * s->experts + e] = sum * share;
        }
    }
}

/* query = W_Q act(W1 u + b1); keyed = query W_K, so that each expert costs one product of length h. */
static void moei_score_attentive(moei_pass *s) {
    const moe_kernels *k = s->router->kernels;
    size_t h = s->call->node_width, t, e;
    moe_real scale = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)h);
    moei_affine(k, s->n, h, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_FC1_WEIGHT), moei_tensor(s, MOE_ROUTER_FC1_BIAS), s->m.hidden);
    moe_activate(k, s->c->router_act, s->n * h, s->m.hidden, s->m.hidden_act);
    moei_affine(k, s->n, h, h, s->m.hidden_act, moei_tensor(s, MOE_ROUTER_QUERY), NULL, s->m.query);
    moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, s->n, h, h, s->m.query, h, moei_tensor(s, MOE_ROUTER_KEY), h, s->m.keyed, h, 0);
    for (t = 0; t < s->n; t++)
        for (e = 0; e < s->experts; e++)
            s->r->logits[t * s->experts + e] = scale * moe_dot(k, h, s->m.keyed + t * h, s->call->nodes + (e * s->n + t) * h);
}

static void moei_score_competition(moei_pass *s) {
    size_t width = s->call->node_width, t, e, q;
    for (e = 0; e < s->experts; e++)
        for (t = 0; t < s->n; t++) {
            const moe_real *output = s->call->nodes + (e * s->n + t) * width;
            moe_real sum = MOEI_R(0.0);
            for (q = 0; q < width; q++) sum += moe_softplus(output[q]);
            s->r->logits[t * s->experts + e] = sum / (moe_real)width;
        }
}

/* m = ceil(log2 E), at least 1. */
static size_t moei_code_bits(size_t experts) {
    size_t bits = 1;
    while (experts > 1 && (experts - 1) >> bits != 0) bits++;
    return bits;
}

/* The smooth step. */
static moe_real moei_smooth_step(moe_real v) {
    if (v <= MOEI_R(-0.5)) return MOEI_R(0.0);
    if (v >= MOEI_R(0.5)) return MOEI_R(1.0);
    return MOEI_R(0.5) + v * (MOEI_R(1.5) - MOEI_R(2.0) * v * v);
}

/* prod_j of one code at expert e, from its steps [m], without bit `but` (m: none left out). */
static moe_real moei_code_product(const moe_real *step, size_t bits, size_t e, size_t but) {
    moe_real product = MOEI_R(1.0);
    size_t j;
    for (j = 0; j < bits; j++)
        if (j != but) product *= e >> j & 1u ? step[j] : MOEI_R(1.0) - step[j];
    return product;
}

/* hidden: the codes [N,K m], then the mixing logits [N,K]; hidden_act: their steps and softmax. */
static void moei_score_dselect(moei_pass *s) {
    size_t k = (size_t)s->router->config.top_k, bits = moei_code_bits(s->experts), all = s->n * k * bits, t, e, i;
    moe_real *mix = s->m.hidden_act + all;
    moei_affine(s->router->kernels, s->n, k * bits, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_CODES), NULL, s->m.hidden);
    moei_affine(s->router->kernels, s->n, k, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_MIX), NULL, s->m.hidden + all);
    for (i = 0; i < all; i++) s->m.hidden_act[i] = moei_smooth_step(s->m.hidden[i]);
    for (t = 0; t < s->n; t++) {
        moe_softmax(s->router->kernels, k, s->m.hidden + all + t * k, MOEI_R(1.0), mix + t * k);
        for (e = 0; e < s->experts; e++) {
            moe_real sum = MOEI_R(0.0);
            for (i = 0; i < k; i++) sum += mix[t * k + i] * moei_code_product(s->m.hidden_act + (t * k + i) * bits, bits, e, bits);
            s->r->logits[t * s->experts + e] = sum;
        }
    }
}

static void moei_score_custom(moei_pass *s) {
    s->status = s->router->custom.score == NULL ? MOE_ERR_ARGUMENT
                                                : s->router->custom.score(s->router->custom.ctx, s->router, s->call, s->r->u, s->r->logits);
}

#ifndef MOE_NO_TRAIN

/* What the score made, before noise. */
static const moe_real *moei_score_logits(const moei_pass *s) { return moei_is_noisy(s) ? s->m.clean_logits : s->r->logits; }

/* The backward pass of moei_affine: d_in += d_out W (d_in may be NULL), dW += d_out^T in, d_bias += column sums. */
static void moei_affine_backward(const moe_kernels *k, size_t n, size_t m, size_t inner, const moe_real *in, const moe_real *w,
                                 const moe_real *d_out, moe_real *d_in, moe_real *d_w, moe_real *d_bias) {
    size_t t;
    if (d_in != NULL) moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, n, inner, m, d_out, m, w, inner, d_in, inner, 1);
    if (d_w != NULL) moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, m, inner, n, d_out, m, in, inner, d_w, inner, 1);
    if (d_bias == NULL) return;
    for (t = 0; t < n; t++) moe_axpy(k, m, MOEI_R(1.0), d_out + t * m, d_bias);
}

static void moei_score_linear_backward(moei_pass *s) {
    moei_affine_backward(s->router->kernels, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_WEIGHT), s->m.d_logits, s->m.d_input,
                         moei_gradient(s, MOE_ROUTER_WEIGHT), moei_gradient(s, MOE_ROUTER_BIAS));
}

/* Frozen: the gradient passes through to the input and stops at the weights. */
static void moei_score_random_backward(moei_pass *s) {
    moei_affine_backward(s->router->kernels, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_WEIGHT), s->m.d_logits, s->m.d_input,
                         NULL, NULL);
}

static void moei_score_mlp_backward(moei_pass *s) {
    const moe_kernels *k = s->router->kernels;
    size_t h = moei_router_hidden(s->c);
    memset(s->m.d_hidden, 0, s->n * h * sizeof(moe_real));
    moei_affine_backward(k, s->n, s->experts, h, s->m.hidden_act, moei_tensor(s, MOE_ROUTER_FC2_WEIGHT), s->m.d_logits, s->m.d_hidden,
                         moei_gradient(s, MOE_ROUTER_FC2_WEIGHT), moei_gradient(s, MOE_ROUTER_FC2_BIAS));
    moe_activate_backward(k, s->c->router_act, s->n * h, s->m.hidden, s->m.d_hidden, s->m.d_hidden);
    moei_affine_backward(k, s->n, h, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_FC1_WEIGHT), s->m.d_hidden, s->m.d_input,
                         moei_gradient(s, MOE_ROUTER_FC1_WEIGHT), moei_gradient(s, MOE_ROUTER_FC1_BIAS));
}

/* With a = 1/|v_t|, b = 1/|W_e|, z = a b (v . W) / tau:
     dv_t = sum_e dz (a b W_e / tau - a^2 z v_t)    dW_e = sum_t dz (a b v_t / tau - b^2 z W_e)    dtau = - sum dz z / tau
   (cosine_keep_length: a = 1 and the term in a^2 is absent). */
static void moei_score_cosine_backward(moei_pass *s) {
    const moe_kernels *k = s->router->kernels;
    size_t width = moei_cosine_width(s), t, e;
    const moe_real *v = moei_cosine_tokens(s), *w = moei_tensor(s, MOE_ROUTER_WEIGHT);
    const moe_real *a = s->m.lengths, *b = s->m.lengths + s->n;
    moe_real tau = moei_tau(s), d_tau = MOEI_R(0.0), *d_v = s->c->cosine_dim > 0 ? s->m.d_hidden : s->m.d_input;
    moe_real *d_w = moei_gradient(s, MOE_ROUTER_WEIGHT);
    const moe_real *clean = moei_score_logits(s);
    if (s->c->cosine_dim > 0) memset(d_v, 0, s->n * width * sizeof(moe_real));
    for (t = 0; t < s->n; t++) {
        moe_real along = MOEI_R(0.0);
        for (e = 0; e < s->experts; e++) {
            moe_real *dz = s->m.d_logits + t * s->experts + e, dz_z = *dz * clean[t * s->experts + e];
            if (d_w != NULL) moe_axpy(k, width, -(dz_z * b[e] * b[e]), w + e * width, d_w + e * width);
            along += dz_z;
            *dz *= a[t] * b[e] / tau;
        }
        d_tau -= along / tau;
        if (!s->c->cosine_keep_length) moe_axpy(k, width, -(along * a[t] * a[t]), v + t * width, d_v + t * width);
    }
    moei_affine_backward(k, s->n, s->experts, width, v, w, s->m.d_logits, d_v, d_w, NULL);
    if (s->c->cosine_learn_tau && moei_gradient(s, MOE_ROUTER_TEMPERATURE) != NULL) moei_gradient(s, MOE_ROUTER_TEMPERATURE)[0] += d_tau;
    if (s->c->cosine_dim > 0)
        moei_affine_backward(k, s->n, width, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_PROJECTION), d_v, s->m.d_input,
                             moei_gradient(s, MOE_ROUTER_PROJECTION), NULL);
}

/* d|c| is c/|c| (l2, 0 at 0), sign c (l1), sign of the first largest entry (linf). */
static void moei_score_norm_slope(int order, const moe_real *v, size_t n, moe_real dz, moe_real *d_v) {
    size_t i, at;
    moe_real norm = moei_vector_norm(order, v, n, &at);
    if (!(norm > MOEI_R(0.0))) return;
    if (order == MOE_NORM_L2)
        for (i = 0; i < n; i++) d_v[i] += dz * (v[i] / norm);
    else if (order == MOE_NORM_L1)
        for (i = 0; i < n; i++) d_v[i] += v[i] > MOEI_R(0.0) ? dz : v[i] < MOEI_R(0.0) ? -dz : MOEI_R(0.0);
    else
        d_v[at] += v[at] > MOEI_R(0.0) ? dz : -dz;
}

static void moei_score_norm_backward(moei_pass *s) {
    size_t width = s->call->node_width, t, e, row;
    if (s->d_nodes == NULL) return;
    for (e = 0; e < s->experts; e++)
        for (t = 0; t < s->n; t++) {
            if (!moei_is_real(s->call, t)) continue;
            row = (e * s->n + t) * width;
            moei_score_norm_slope(s->c->norm_order, s->call->nodes + row, width, s->m.d_logits[t * s->experts + e], s->d_nodes + row);
        }
}

/* grap: the blocks' means pass their gradient to each of their features; with the length, z = sum / (|u| sqrt(d/E)). */
static void moei_score_grap_backward(moei_pass *s) {
    size_t block = s->d / s->experts, t, e, q;
    moe_real over = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)block);
    for (t = 0; t < s->n; t++) {
        const moe_real *u = s->r->u + t * s->d, *dz = s->m.d_logits + t * s->experts, *z = moei_score_logits(s) + t * s->experts;
        moe_real *du = s->m.d_input + t * s->d, inverse = s->c->grap_cosine ? moei_inverse_length(s->router->kernels, u, s->d) : MOEI_R(0.0), along = MOEI_R(0.0);
        moe_real share = s->c->grap_cosine ? inverse * over : MOEI_R(1.0) / (moe_real)block;
        for (e = 0; e < s->experts; e++) {
            along += dz[e] * z[e];
            for (q = 0; q < block; q++) du[e * block + q] += dz[e] * share;
        }
        if (s->c->grap_cosine) moe_axpy(s->router->kernels, s->d, -(along * inverse * inverse), u, du);
    }
}

/* With a = q W_K / sqrt(h): z_e = a . h_e, so dh_e = dz_e a and da = sum_e dz_e h_e. */
static void moei_score_attentive_backward(moei_pass *s) {
    const moe_kernels *k = s->router->kernels;
    size_t h = s->call->node_width, t, e;
    moe_real scale = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)h), *d_key = moei_gradient(s, MOE_ROUTER_KEY);
    memset(s->m.d_keyed, 0, s->n * h * sizeof(moe_real));
    for (t = 0; t < s->n; t++)
        for (e = 0; e < s->experts; e++) {
            size_t node = (e * s->n + t) * h;
            moe_real dz = s->m.d_logits[t * s->experts + e] * scale;
            if (!moei_is_real(s->call, t)) continue;
            moe_axpy(k, h, dz, s->call->nodes + node, s->m.d_keyed + t * h);
            if (s->d_nodes != NULL) moe_axpy(k, h, dz, s->m.keyed + t * h, s->d_nodes + node);
        }
    /* keyed = query W_K */
    if (d_key != NULL) moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, h, h, s->n, s->m.query, h, s->m.d_keyed, h, d_key, h, 1);
    moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, s->n, h, h, s->m.d_keyed, h, moei_tensor(s, MOE_ROUTER_KEY), h, s->m.d_query, h, 0);
    memset(s->m.d_hidden, 0, s->n * h * sizeof(moe_real));
    moei_affine_backward(k, s->n, h, h, s->m.hidden_act, moei_tensor(s, MOE_ROUTER_QUERY), s->m.d_query, s->m.d_hidden,
                         moei_gradient(s, MOE_ROUTER_QUERY), NULL);
    moe_activate_backward(k, s->c->router_act, s->n * h, s->m.hidden, s->m.d_hidden, s->m.d_hidden);
    moei_affine_backward(k, s->n, h, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_FC1_WEIGHT), s->m.d_hidden, s->m.d_input,
                         moei_gradient(s, MOE_ROUTER_FC1_WEIGHT), moei_gradient(s, MOE_ROUTER_FC1_BIAS));
}

static void moei_score_competition_backward(moei_pass *s) {
    size_t width = s->call->node_width, t, e, q;
    if (s->d_nodes == NULL) return;
    for (e = 0; e < s->experts; e++)
        for (t = 0; t < s->n; t++) {
            size_t row = (e * s->n + t) * width;
            moe_real dz = s->m.d_logits[t * s->experts + e] / (moe_real)width;
            if (!moei_is_real(s->call, t)) continue;
            for (q = 0; q < width; q++) s->d_nodes[row + q] += dz * moe_sigmoid(s->call->nodes[row + q]);
        }
}

static void moei_score_dselect_backward(moei_pass *s) {
    const moe_kernels *kernels = s->router->kernels;
    size_t k = (size_t)s->router->config.top_k, bits = moei_code_bits(s->experts), all = s->n * k * bits, t, e, i, j;
    for (i = 0; i < all + s->n * k; i++) s->m.d_hidden[i] = MOEI_R(0.0);
    for (t = 0; t < s->n; t++) {
        const moe_real *mix = s->m.hidden_act + all + t * k, *dz = s->m.d_logits + t * s->experts;
        for (i = 0; i < k; i++) {
            const moe_real *step = s->m.hidden_act + (t * k + i) * bits, *code = s->m.hidden + (t * k + i) * bits;
            moe_real *d_code = s->m.d_hidden + (t * k + i) * bits, *d_mix = s->m.query + t * k + i; /* d softmax */
            for (e = 0, *d_mix = MOEI_R(0.0); e < s->experts; e++) {
                *d_mix += dz[e] * moei_code_product(step, bits, e, bits);
                for (j = 0; j < bits; j++) d_code[j] += (e >> j & 1u ? dz[e] : -dz[e]) * mix[i] * moei_code_product(step, bits, e, j);
            }
            for (j = 0; j < bits; j++) d_code[j] *= MOEI_F(fabs)(code[j]) < MOEI_R(0.5) ? MOEI_R(1.5) - MOEI_R(6.0) * code[j] * code[j] : MOEI_R(0.0);
        }
        moe_softmax_backward(k, mix, s->m.query + t * k, MOEI_R(1.0), s->m.d_hidden + all + t * k);
    }
    moei_affine_backward(kernels, s->n, k * bits, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_CODES), s->m.d_hidden, s->m.d_input, moei_gradient(s, MOE_ROUTER_CODES), NULL);
    moei_affine_backward(kernels, s->n, k, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_MIX), s->m.d_hidden + all, s->m.d_input, moei_gradient(s, MOE_ROUTER_MIX), NULL);
}

static void moei_score_custom_backward(moei_pass *s) {
    if (s->router->custom.score_backward != NULL)
        s->status = s->router->custom.score_backward(s->router->custom.ctx, s->router, s->call, s->r->u, s->m.d_logits, s->m.d_input);
}

#endif

typedef struct moei_score {
    void (*forward)(moei_pass *s);
    void (*backward)(moei_pass *s);
    unsigned traits;    /* beyond causal */
    int has_parameters; /* of its own, that training changes */
} moei_score;

static const moei_score moei_scores[MOE_SCORE_COUNT] = {
    /* linear */ {MOEI_KEEP(SCORES, MOE_SCORE_LINEAR, moei_score_linear), MOEI_BACKWARD(moei_score_linear_backward), 0, 1},
    /* random */ {MOEI_KEEP(SCORES, MOE_SCORE_RANDOM, moei_score_linear), MOEI_BACKWARD(moei_score_random_backward), 0, 0},
    /* mlp    */ {MOEI_KEEP(SCORES, MOE_SCORE_MLP, moei_score_mlp), MOEI_BACKWARD(moei_score_mlp_backward), 0, 1},
    /* cosine */ {MOEI_KEEP(SCORES, MOE_SCORE_COSINE, moei_score_cosine), MOEI_BACKWARD(moei_score_cosine_backward), 0, 1},
    /* norm   */ {MOEI_KEEP(SCORES, MOE_SCORE_NORM, moei_score_norm), MOEI_BACKWARD(moei_score_norm_backward), MOE_TRAIT_NEEDS_ALL_EXPERTS, 0},
    /* grap   */ {MOEI_KEEP(SCORES, MOE_SCORE_GRAP, moei_score_grap), MOEI_BACKWARD(moei_score_grap_backward), 0, 0},
    /* attentive   */ {MOEI_KEEP(SCORES, MOE_SCORE_ATTENTIVE, moei_score_attentive), MOEI_BACKWARD(moei_score_attentive_backward), MOE_TRAIT_NEEDS_ALL_EXPERTS, 1},
    /* competition */ {MOEI_KEEP(SCORES, MOE_SCORE_COMPETITION, moei_score_competition), MOEI_BACKWARD(moei_score_competition_backward), MOE_TRAIT_NEEDS_ALL_EXPERTS, 0},
    /* dselect */ {MOEI_KEEP(SCORES, MOE_SCORE_DSELECT, moei_score_dselect), MOEI_BACKWARD(moei_score_dselect_backward), 0, 1},
    /* custom */ {MOEI_KEEP(SCORES, MOE_SCORE_CUSTOM, moei_score_custom), MOEI_BACKWARD(moei_score_custom_backward), 0, 0}};

/* ---- noise: z -> z + noise, in training ------------------------------------------------------------------------------------------ */

/* The scale of the noise at cell i of [N,E]. */
static moe_real moei_noise_scale(const moei_pass *s, size_t i) {
    if (s->c->noise == MOE_NOISE_NOISY_TOPK) return moe_softplus(s->m.noise_raw[i]) + s->c->noise_floor;
    return s->c->noise == MOE_NOISE_GAUSSIAN ? s->c->noise_sigma : MOEI_R(1.0);
}

static moe_real moei_noise_draw(const moei_pass *s) {
    moe_real u;
    if (s->c->noise != MOE_NOISE_GUMBEL) return moe_rng_normal(s->call->rng);
    do u = moe_rng_uniform(s->call->rng);
    while (!(u > MOEI_R(0.0)));
    return -MOEI_F(log)(-MOEI_F(log)(u));
}

/* Keeps the clean logits for the losses that read them. A supplied noise is n for noisy_topk, else the whole of what is added. */
static void moei_route_noise(moei_pass *s) {
    size_t cells = s->n * s->experts, i;
    if (!moei_is_noisy(s)) return;
    for (i = 0; i < s->before * s->experts && !(s->supplied & MOEI_HAS_NOISE); i++) (void)moei_noise_draw(s); /* of the other processes' tokens */
    if (s->c->noise == MOE_NOISE_NOISY_TOPK)
        moei_affine(s->router->kernels, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_NOISE_WEIGHT), NULL, s->m.noise_raw);
    memcpy(s->m.clean_logits, s->r->logits, cells * sizeof(moe_real));
    for (i = 0; i < cells; i++) {
        moe_real n = s->call->noise != NULL ? s->call->noise[i] : moei_noise_draw(s);
        if (!moei_is_real(s->call, i / s->experts)) n = MOEI_R(0.0);
        s->m.noise_value[i] = n;
        s->r->logits[i] += s->call->noise != NULL && s->c->noise != MOE_NOISE_NOISY_TOPK ? n : n * moei_noise_scale(s, i);
    }
    for (i = 0; i < s->after * s->experts && !(s->supplied & MOEI_HAS_NOISE); i++) (void)moei_noise_draw(s);
}

#ifndef MOE_NO_TRAIN
/* d_noise holds what the load loss wants of the scale; d_clean what losses want of the clean logits. */
static void moei_noise_backward(moei_pass *s) {
    size_t cells = s->n * s->experts, i;
    if (!moei_is_noisy(s)) return;
    for (i = 0; i < cells; i++) {
        moe_real d = s->m.d_logits[i];
        s->m.d_logits[i] += s->m.d_clean[i];
        s->m.d_noise[i] = (s->m.d_noise[i] + d * s->m.noise_value[i]) * (s->c->noise == MOE_NOISE_NOISY_TOPK ? moe_sigmoid(s->m.noise_raw[i]) : MOEI_R(0.0));
        if (!moei_is_real(s->call, i / s->experts)) s->m.d_noise[i] = MOEI_R(0.0);
    }
    if (s->c->noise == MOE_NOISE_NOISY_TOPK)
        moei_affine_backward(s->router->kernels, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_NOISE_WEIGHT), s->m.d_noise,
                             s->m.d_input, moei_gradient(s, MOE_ROUTER_NOISE_WEIGHT), NULL);
}
#endif

/* ---- gate: z -> r, forward for rows of E values, backward for one ------------------------------------------------------------- */

static void moei_gate_softmax(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r) {
    void (*softmax)(size_t n, const moe_real *x, moe_real temperature, moe_real *y) = moei_table(s->router->kernels)->softmax;
    size_t t, columns = s->experts;
    for (t = 0; t < rows; t++) softmax(columns, z + t * columns, s->c->gate_temperature, r + t * columns);
}

static void moei_gate_sigmoid(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r) {
    size_t i, n = rows * s->experts;
    for (i = 0; i < n; i++) r[i] = z[i] / s->c->gate_temperature;
    moe_activate(s->router->kernels, MOE_ACT_SIGMOID, n, r, r);
}

static void moei_gate_sqrt_softplus(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r) {
    size_t i;
    for (i = 0; i < rows * s->experts; i++) r[i] = MOEI_F(sqrt)(moe_softplus(z[i]));
}

static void moei_gate_relu(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r) {
    size_t i;
    for (i = 0; i < rows * s->experts; i++) r[i] = z[i] > MOEI_R(0.0) ? z[i] : MOEI_R(0.0);
}

static void moei_gate_identity(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r) {
    memcpy(r, z, rows * s->experts * sizeof(moe_real));
}

#ifndef MOE_NO_TRAIN

static void moei_gate_softmax_backward(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr, moe_real *dz) {
    (void)z;
    moe_softmax_backward(s->experts, r, dr, s->c->gate_temperature, dz);
}

static void moei_gate_sigmoid_backward(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr, moe_real *dz) {
    size_t e;
    (void)z;
    for (e = 0; e < s->experts; e++) dz[e] += dr[e] * r[e] * (MOEI_R(1.0) - r[e]) / s->c->gate_temperature;
}

static void moei_gate_sqrt_softplus_backward(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr, moe_real *dz) {
    size_t e;
    for (e = 0; e < s->experts; e++)
        if (r[e] > MOEI_R(0.0)) dz[e] += dr[e] * moe_sigmoid(z[e]) / (MOEI_R(2.0) * r[e]);
}

static void moei_gate_relu_backward(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr, moe_real *dz) {
    size_t e;
    (void)r;
    for (e = 0; e < s->experts; e++)
        if (z[e] > MOEI_R(0.0)) dz[e] += dr[e];
}

static void moei_gate_identity_backward(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr, moe_real *dz) {
    (void)z, (void)r;
    moe_axpy(s->router->kernels, s->experts, MOEI_R(1.0), dr, dz);
}

#endif

typedef struct moei_gate {
    void (*forward)(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r);
    void (*backward)(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr, moe_real *dz);
    int sums_to_one;
    int select_by_logits; /* r rises with z but may saturate: the logits decide, and there are no ties */
} moei_gate;

static const moei_gate moei_gates[MOE_GATE_COUNT] = {
    /* softmax       */ {MOEI_KEEP(GATES, MOE_GATE_SOFTMAX, moei_gate_softmax), MOEI_BACKWARD(moei_gate_softmax_backward), 1, 1},
    /* sigmoid       */ {MOEI_KEEP(GATES, MOE_GATE_SIGMOID, moei_gate_sigmoid), MOEI_BACKWARD(moei_gate_sigmoid_backward), 0, 1},
    /* sqrt_softplus */ {MOEI_KEEP(GATES, MOE_GATE_SQRT_SOFTPLUS, moei_gate_sqrt_softplus), MOEI_BACKWARD(moei_gate_sqrt_softplus_backward), 0, 1},
    /* relu          */ {MOEI_KEEP(GATES, MOE_GATE_RELU, moei_gate_relu), MOEI_BACKWARD(moei_gate_relu_backward), 0, 0},
    /* identity      */ {MOEI_KEEP(GATES, MOE_GATE_IDENTITY, moei_gate_identity), MOEI_BACKWARD(moei_gate_identity_backward), 0, 0}};

/* ---- refine: r -> p, p_i = sum over (h, j) of softmax(a_ihj) r_j within a sequence ----------------------------------------------------
   similarity: one head, a_ij = u_i . W_s u_j / tau.   attention: a_ihj = log A_hij - |u_i - o_hj|^2 / (2 sigma^2), where |u_i|^2 falls out.
   Both are a product of queries and keys, worked off in blocks of rows, and done again in the backward pass instead of kept. A block holds
   E_ij = exp(a_ij - max); its rows' sums Z_i divide p_i = sum E_ij r_j / Z_i at the end, E numbers per token instead of N. */

enum {
    MOEI_REFINE_ROWS = 96, /* of a block: the keys are packed once for so many rows */
    MOEI_REFINE_STEP = 24  /* rows of the steps in which causal works off the square where some keys are later than some rows */
};

/* Tokens of refine are counted from the first past one. */
static int moei_refine_is_real(const moei_pass *s, size_t t) { return t < s->past || moei_is_real(s->call, t - s->past); }

/* The row of A of head h and token i, its columns from `from` on. */
static const moe_real *moei_attention_row(const moei_pass *s, size_t h, size_t i, size_t from) {
    return s->call->attention_weights + (h * s->n + i - s->past) * s->span + from;
}

/* H(A_h[i,:]) over what token i may see of its sequence [from, to). */
static moe_real moei_attention_entropy(const moei_pass *s, size_t h, size_t i, size_t from, size_t to) {
    const moe_real *row = moei_attention_row(s, h, i, from);
    size_t seen = (s->c->causal ? i + 1 : to) - from, j;
    if (s->call->mask == NULL) return moe_entropy(s->router->kernels, seen, row);
    for (j = 0; j < seen; j++) s->m.column[j] = moei_refine_is_real(s, from + j) ? row[j] : MOEI_R(0.0);
    return moe_entropy(s->router->kernels, seen, s->m.column);
}

/* The heads [first, end) that refine the sequence of tokens [from, to). */
static void moei_refine_heads(const moei_pass *s, size_t from, size_t to, size_t *first, size_t *end) {
    size_t h, t, heads = (size_t)s->c->heads;
    moe_real best = MOEI_INFINITY;
    *first = 0, *end = 1;
    if (s->c->refine != MOE_REFINE_ATTENTION) return;
    if (s->c->attention_heads == MOE_HEADS_ALL) *end = heads;
    if (s->c->attention_heads == MOE_HEADS_FIXED) *first = (size_t)s->c->attention_head, *end = *first + 1;
    for (h = 0; h < heads && s->c->attention_heads == MOE_HEADS_MIN_ENTROPY; h++) {
        moe_real sum = MOEI_R(0.0);
        for (t = from; t < to; t++)
            if (moei_refine_is_real(s, t)) sum += moei_attention_entropy(s, h, t, from, to);
        if (sum < best) best = sum, *first = h, *end = h + 1;
    }
}

static const moe_real *moei_refine_queries(const moei_pass *s) {
    return s->c->refine == MOE_REFINE_SIMILARITY && s->c->similarity_scale == MOE_SIMILARITY_L2 ? s->m.unit : s->all_u;
}

static const moe_real *moei_refine_keys(const moei_pass *s, size_t head) {
    if (s->c->refine == MOE_REFINE_ATTENTION) return s->call->attention_outputs + head * s->span * s->d;
    return s->c->similarity_learned ? s->m.keys : moei_refine_queries(s);
}

/* What the product of query and key is multiplied by. */
static moe_real moei_refine_scale(const moei_pass *s) {
    if (s->c->refine == MOE_REFINE_ATTENTION) return MOEI_R(1.0) / (s->c->attention_sigma * s->c->attention_sigma);
    if (s->c->similarity_scale == MOE_SIMILARITY_RSQRT_D) return MOEI_R(1.0) / (s->c->similarity_tau * MOEI_F(sqrt)((moe_real)s->d));
    return MOEI_R(1.0) / s->c->similarity_tau;
}

/* u and gate of the past tokens and the call's, one after another. */
static void moei_refine_gather(moei_pass *s) {
    const moe_real *u = s->c->refine == MOE_REFINE_ATTENTION && s->c->attention_u == MOE_ATTENTION_U_OUTPUT ? s->call->attention_output : s->r->u;
    s->past = s->call->n_past, s->span = s->past + s->n;
    s->all_u = u, s->all_gate = s->r->gate;
    if (s->past == 0) return;
    memcpy(s->m.past_u, s->call->past_u, s->past * s->d * sizeof(moe_real));
    memcpy(s->m.past_u + s->past * s->d, u, s->n * s->d * sizeof(moe_real));
    memcpy(s->m.past_gate, s->call->past_gate, s->past * s->experts * sizeof(moe_real));
    memcpy(s->m.past_gate + s->past * s->experts, s->r->gate, s->n * s->experts * sizeof(moe_real));
    s->all_u = s->m.past_u, s->all_gate = s->m.past_gate;
}

/* Unit vectors, keys and entropies: once per call. */
static void moei_refine_prepare(const moei_pass *s) {
    const moe_kernels *k = s->router->kernels;
    size_t t, q;
    for (t = 0; t < s->span && s->m.entropy != NULL; t++) s->m.entropy[t] = moe_entropy(k, s->experts, s->all_gate + t * s->experts);
    for (t = 0; t < s->span && s->m.unit != NULL; t++) {
        moe_real inverse = moei_inverse_length(k, s->all_u + t * s->d, s->d);
        for (q = 0; q < s->d; q++) s->m.unit[t * s->d + q] = s->all_u[t * s->d + q] * inverse;
    }
    if (s->m.keys != NULL)
        moei_affine(k, s->span, s->d, s->d, moei_refine_queries(s), moei_tensor(s, MOE_ROUTER_SIMILARITY), NULL, s->m.keys);
}

/* |o|^2 / 2 of the keys of one head in the sequence [from, to). */
static void moei_refine_key_terms(const moei_pass *s, size_t head, size_t from, size_t to) {
    size_t t;
    for (t = from; t < to && s->m.key_terms != NULL; t++) {
        const moe_real *o = s->call->attention_outputs + (head * s->span + t) * s->d;
        s->m.key_terms[head * s->span + t] = moei_refine_is_real(s, t) ? moe_dot(s->router->kernels, s->d, o, o) / MOEI_R(2.0) : MOEI_R(0.0);
    }
}

/* How many keys of the sequence from `from` to `to` the rows [at, at + rows) may see. */
static size_t moei_refine_span(const moei_pass *s, size_t at, size_t rows, size_t from, size_t to) {
    return (s->c->causal ? at + rows : to) - from;
}

/* out[rows,span] = queries . keys of the tokens from `from` on. Causal leaves cells that are not wanted as they are, all of them later than their row. */
static void moei_refine_products(const moei_pass *s, size_t at, size_t rows, size_t from, size_t span, const moe_real *keys, moe_real *out, size_t width) {
    const moe_real *queries = moei_refine_queries(s) + at * s->d;
    size_t common = s->c->causal ? span - rows : span, i, step;
    moe_matmul(s->router->kernels, MOE_MATMUL_NT, MOE_TYPE_REAL, rows, common, s->d, queries, s->d, keys + from * s->d, s->d, out, width, 0);
    for (i = 0; i < rows && s->c->causal; i += step) {
        step = rows - i < MOEI_REFINE_STEP ? rows - i : (size_t)MOEI_REFINE_STEP;
        moe_matmul(s->router->kernels, MOE_MATMUL_NT, MOE_TYPE_REAL, step, i + step, s->d, queries + i * s->d, s->d, keys + at * s->d, s->d,
                   out + i * width + common, width, 0);
    }
}

/* -inf for tokens that take no part in refining token i. */
static void moei_refine_hide(const moei_pass *s, size_t i, size_t from, size_t seen, moe_real *row) {
    size_t j;
    if (s->call->mask == NULL && !s->c->lower_entropy_only) return;
    for (j = 0; j < seen; j++)
        if (!moei_refine_is_real(s, from + j) || (s->c->lower_entropy_only && s->m.entropy[from + j] > s->m.entropy[i])) row[j] = -MOEI_INFINITY;
}

/* E of one row, (end - first) stretches of span numbers; returns Z, 0 when nobody takes part. */
static moe_real moei_refine_row(const moei_pass *s, size_t i, size_t from, size_t span, size_t first, size_t end, moe_real *row) {
    const moe_kernels *k = s->router->kernels;
    size_t seen = s->c->causal ? i + 1 - from : span, h, j;
    moe_real scale = moei_refine_scale(s), max = -MOEI_INFINITY, top, sum = MOEI_R(0.0);
    for (h = first; h < end; h++) {
        moe_real *a = row + (h - first) * span;
        moei_refine_hide(s, i, from, seen, a);
        if (s->c->refine == MOE_REFINE_SIMILARITY) top = moe_log_posterior(k, seen, scale, NULL, NULL, a);
        else top = moe_log_posterior(k, seen, scale, s->m.key_terms + h * s->span + from, moei_attention_row(s, h, i, from), a);
        if (top > max) max = top;
    }
    max = moei_softmax_shift(max);
    for (h = first; h < end; h++) {
        moe_real *a = row + (h - first) * span;
        sum += moe_exp_sum(k, seen, max, a);
        for (j = seen; j < span; j++) a[j] = MOEI_R(0.0);
    }
    return sum;
}

/* E of the rows [at, at + rows) of a sequence that starts at `from` into block, and their Z into sums. */
static void moei_refine_block(const moei_pass *s, size_t at, size_t rows, size_t from, size_t span, size_t first, size_t end, moe_real *sums) {
    size_t width = (end - first) * span, h, i;
    for (h = first; h < end; h++)
        moei_refine_products(s, at, rows, from, span, moei_refine_keys(s, h), s->m.block + (h - first) * span, width);
    for (i = 0; i < rows; i++) {
        sums[i] = MOEI_R(0.0);
        if (moei_refine_is_real(s, at + i)) sums[i] = moei_refine_row(s, at + i, from, span, first, end, s->m.block + i * width);
        else memset(s->m.block + i * width, 0, width * sizeof(moe_real));
    }
}

static void moei_refine_sequence(const moei_pass *s, size_t from, size_t to) {
    size_t first, end, at, rows, span, h, i, e, experts = s->experts;
    moe_real sums[MOEI_REFINE_ROWS];
    moei_refine_heads(s, from, to, &first, &end);
    for (h = first; h < end; h++) moei_refine_key_terms(s, h, from, to);
    for (at = from + s->past; at < to; at += rows) {
        moe_real *p = s->r->probabilities + (at - s->past) * experts;
        rows = to - at < MOEI_REFINE_ROWS ? to - at : (size_t)MOEI_REFINE_ROWS;
        span = moei_refine_span(s, at, rows, from, to);
        moei_refine_block(s, at, rows, from, span, first, end, sums);
        for (h = first; h < end; h++)
            moe_matmul(s->router->kernels, MOE_MATMUL_NN, MOE_TYPE_REAL, rows, experts, span, s->m.block + (h - first) * span, (end - first) * span,
                       s->all_gate + from * experts, experts, p, experts, h > first);
        for (i = 0; i < rows; i++, p += experts) {
            if (sums[i] <= MOEI_R(0.0)) memcpy(p, s->all_gate + (at + i) * experts, experts * sizeof(moe_real));
            for (e = 0; e < experts && !(sums[i] <= MOEI_R(0.0)); e++) p[e] /= sums[i]; /* a NaN stays and is found */
        }
    }
}

static size_t moei_sequence_count(const moe_call *call) { return call->sequences != NULL ? call->n_sequences : 1; }

static void moei_sequence(const moe_call *call, size_t i, size_t *from, size_t *to) {
    *from = call->sequences != NULL ? (size_t)call->sequences[i] : 0;
    *to = call->sequences != NULL ? (size_t)call->sequences[i + 1] : call->n_tokens;
}

static void moei_route_refine(moei_pass *s) {
    size_t i, from, to, t;
    if (s->c->refine == MOE_REFINE_NONE || (!MOEI_KEPT(REFINES, MOE_REFINE_SIMILARITY) && !MOEI_KEPT(REFINES, MOE_REFINE_ATTENTION))) return;
    for (t = 0; t < s->n; t++) /* padding is nobody's neighbour, but 0 times what stands there must be 0 */
        if (!moei_is_real(s->call, t)) memset(s->r->gate + t * s->experts, 0, s->experts * sizeof(moe_real));
    moei_refine_gather(s);
    moei_refine_prepare(s);
    for (i = 0; i < moei_sequence_count(s->call); i++) {
        moei_sequence(s->call, i, &from, &to);
        moei_refine_sequence(s, from, to + s->past);
    }
}

#ifndef MOE_NO_TRAIN

/* The next run of real tokens at or after *start and before to; 0 when there is none. Padding is left out of sums, for 0 times what stands there need
   not be 0. */
static size_t moei_real_run(const moei_pass *s, size_t *start, size_t to) {
    size_t length = 0;
    while (*start < to && !moei_is_real(s->call, *start)) ++*start;
    while (*start + length < to && (s->call->mask == NULL || moei_is_real(s->call, *start + length))) length++;
    return length;
}

/* d_queries += da keys and d_keys += da^T queries (NULL: not wanted), da of the rows [at, at + rows) and the keys [from, from + span). */
static void moei_refine_products_backward(const moei_pass *s, size_t at, size_t rows, size_t from, size_t span, const moe_real *d_a, size_t width,
                                          const moe_real *keys, moe_real *d_keys) {
    const moe_kernels *k = s->router->kernels;
    size_t run, length, d = s->d;
    for (run = from; (length = moei_real_run(s, &run, from + span)) > 0; run += length)
        moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, rows, d, length, d_a + (run - from), width, keys + run * d, d, s->m.d_unit + at * d, d, 1);
    for (run = at; d_keys != NULL && (length = moei_real_run(s, &run, at + rows)) > 0; run += length)
        moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, span, d, length, d_a + (run - at) * width, width, moei_refine_queries(s) + run * d, d, d_keys + from * d, d, 1);
}

/* With S = E / Z and d_block = dS / Z: da = S (dS - sum S dS) = E (d_block - sum E d_block / Z), in place. */
static void moei_refine_block_backward(const moei_pass *s, size_t rows, size_t width, const moe_real *sums) {
    size_t i, j;
    for (i = 0; i < rows; i++) {
        const moe_real *row = s->m.block + i * width;
        moe_real *d_row = s->m.d_block + i * width, along, most;
        for (j = 0; j + 1 < width && row[j] < MOEI_R(1.0);) j++; /* where S is largest */
        for (most = d_row[j], j = 0; j < width; j++) d_row[j] -= most; /* changes nothing but the rounding: a sure row cancels almost all of dS */
        along = moe_dot(s->router->kernels, width, row, d_row) / sums[i];
        for (j = 0; j < width; j++) d_row[j] = row[j] > MOEI_R(0.0) ? row[j] * (d_row[j] - along) : MOEI_R(0.0);
    }
}

/* What da of one head, rows of width apart, means for A and for |o|^2 / 2. */
static void moei_refine_attention_backward(const moei_pass *s, size_t head, size_t at, size_t rows, size_t from, size_t span, const moe_real *d_a,
                                           size_t width) {
    moe_real *columns = s->m.column, *d_o = s->call->d_attention_outputs; /* columns: sum over rows of da */
    size_t i, j;
    memset(columns, 0, span * sizeof(moe_real));
    for (i = 0; i < rows; i++, d_a += width) {
        size_t cell = (head * s->n + at + i) * s->n + from;
        moe_axpy(s->router->kernels, span, MOEI_R(1.0), d_a, columns);
        for (j = 0; j < span && s->call->d_attention_weights != NULL; j++)
            if (d_a[j] < MOEI_R(0.0) || d_a[j] > MOEI_R(0.0)) s->call->d_attention_weights[cell + j] += d_a[j] / s->call->attention_weights[cell + j];
    }
    for (j = 0; j < span && d_o != NULL; j++) {
        size_t key = (head * s->n + from + j) * s->d;
        if (moei_is_real(s->call, from + j))
            moe_axpy(s->router->kernels, s->d, -(columns[j] * moei_refine_scale(s)), s->call->attention_outputs + key, d_o + key);
    }
}

/* d_p -> d_gate, and through S to queries and keys. d_p is divided by Z on the way. */
static void moei_refine_sequence_backward(const moei_pass *s, size_t from, size_t to) {
    const moe_kernels *k = s->router->kernels;
    size_t first, end, at, rows, span, h, i, e, experts = s->experts, width, d = s->d;
    moe_real sums[MOEI_REFINE_ROWS], scale = moei_refine_scale(s);
    moei_refine_heads(s, from, to, &first, &end);
    for (at = from; at < to; at += rows) {
        moe_real *d_p = s->m.d_probabilities + at * experts;
        rows = to - at < MOEI_REFINE_ROWS ? to - at : (size_t)MOEI_REFINE_ROWS;
        span = moei_refine_span(s, at, rows, from, to);
        width = (end - first) * span;
        moei_refine_block(s, at, rows, from, span, first, end, sums);
        for (i = 0; i < rows; i++) {
            if (!(sums[i] > MOEI_R(0.0))) moe_axpy(k, experts, MOEI_R(1.0), d_p + i * experts, s->m.d_gate + (at + i) * experts);
            for (e = 0; e < experts && sums[i] > MOEI_R(0.0); e++) d_p[i * experts + e] /= sums[i];
        }
        for (h = 0; h < end - first; h++) {
            moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, rows, span, experts, d_p, experts, s->r->gate + from * experts, experts,
                       s->m.d_block + h * span, width, 0);
            moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, span, experts, rows, s->m.block + h * span, width, d_p, experts,
                       s->m.d_gate + from * experts, experts, 1);
        }
        moei_refine_block_backward(s, rows, width, sums);
        for (h = first; h < end && s->c->refine == MOE_REFINE_ATTENTION; h++)
            moei_refine_attention_backward(s, h, at, rows, from, span, s->m.d_block + (h - first) * span, width);
        for (i = 0; i < rows * width; i++) s->m.d_block[i] *= scale;
        for (h = first; h < end; h++) {
            const moe_real *d_a = s->m.d_block + (h - first) * span;
            moe_real *d_keys = s->c->refine == MOE_REFINE_SIMILARITY ? s->m.d_keys
                               : s->call->d_attention_outputs != NULL ? s->call->d_attention_outputs + h * s->n * d : NULL;
            moei_refine_products_backward(s, at, rows, from, span, d_a, width, moei_refine_keys(s, h), d_keys);
        }
    }
}

/* Through unit vectors: d v += (d - v (v . d)) / |v|, for rows of width d. */
static void moei_unit_backward(const moei_pass *s, size_t rows, const moe_real *vector, const moe_real *unit, moe_real *d_unit, moe_real *d_vector) {
    size_t i;
    for (i = 0; i < rows; i++) {
        size_t at = i * s->d;
        moe_axpy(s->router->kernels, s->d, -moe_dot(NULL, s->d, unit + at, d_unit + at), unit + at, d_unit + at);
        moe_axpy(s->router->kernels, s->d, moei_inverse_length(s->router->kernels, vector + at, s->d), d_unit + at, d_vector + at);
    }
}

/* d_unit holds the gradient of the queries, d_keys that of the keys. */
static void moei_refine_backward(moei_pass *s) {
    const moe_kernels *k = s->router->kernels;
    size_t i, from, to, t, d = s->d;
    if (s->c->refine == MOE_REFINE_NONE) return;
    for (t = 0; t < s->n; t++)
        if (!moei_is_real(s->call, t)) memset(s->m.d_probabilities + t * s->experts, 0, s->experts * sizeof(moe_real));
    moei_refine_gather(s);
    memset(s->m.d_unit, 0, s->n * d * sizeof(moe_real));
    memset(s->m.d_keys, 0, s->n * d * sizeof(moe_real));
    for (i = 0; i < moei_sequence_count(s->call); i++) {
        moei_sequence(s->call, i, &from, &to);
        moei_refine_sequence_backward(s, from, to);
    }
    if (s->c->similarity_learned)
        moei_affine_backward(k, s->n, d, d, moei_refine_queries(s), moei_tensor(s, MOE_ROUTER_SIMILARITY), s->m.d_keys, s->m.d_unit,
                             moei_gradient(s, MOE_ROUTER_SIMILARITY), NULL);
    else
        moe_axpy(k, s->n * d, MOEI_R(1.0), s->m.d_keys, s->m.d_unit);
    if (s->c->refine == MOE_REFINE_ATTENTION && s->c->attention_u == MOE_ATTENTION_U_OUTPUT) {
        if (s->call->d_attention_output != NULL) moe_axpy(k, s->n * d, MOEI_R(1.0), s->m.d_unit, s->call->d_attention_output);
        return;
    }
    if (s->m.unit != NULL) moei_unit_backward(s, s->n, s->r->u, s->m.unit, s->m.d_unit, s->m.d_input);
    else moe_axpy(k, s->n * d, MOEI_R(1.0), s->m.d_unit, s->m.d_input);
}

#endif

/* ---- select: p, z -> S --------------------------------------------------------------------------------------------------------- */

/* What top_k compares, and what every rank of choice follows: the student's logits where it chooses; z where p rises with it and nothing is added,
   and where sparsemixer reads it; else p + b. */
static const moe_real *moei_selection_score(const moei_pass *s, size_t t) {
    const moe_real *bias = moei_tensor(s, MOE_ROUTER_SELECTION_BIAS), *p = s->r->probabilities + t * s->experts, *z = s->r->logits + t * s->experts;
    size_t e;
    if (s->frozen && s->c->student) return s->m.student_logits + t * s->experts;
    if (s->c->weight == MOE_WEIGHT_SPARSEMIXER) return z;
    if (bias == NULL) return moei_gates[s->c->gate].select_by_logits && s->c->refine == MOE_REFINE_NONE ? z : p;
    for (e = 0; e < s->experts; e++) s->m.row[e] = p[e] + bias[e];
    return s->m.row;
}

static size_t moei_top_k(const moei_pass *s, size_t n, const moe_real *score, size_t k, int32_t *index) {
    return moei_table(s->router->kernels)->top_k(n, score, k, index);
}

static moe_status moei_select_top_k(moei_pass *s) {
    size_t (*top_k)(size_t n, const moe_real *score, size_t k, int32_t *index) = moei_table(s->router->kernels)->top_k;
    const moe_real *score = moei_selection_score(s, 0);
    size_t t, stride = score == s->m.row ? 0 : s->experts; /* row: p + b is made anew for each token */
    for (t = 0; t < s->n; t++, score += stride) {
        if (!moei_is_real(s->call, t)) continue;
        if (stride == 0) score = moei_selection_score(s, t);
        s->r->n_choices[t] = (int32_t)top_k(s->experts, score, (size_t)s->c->top_k, s->r->choices + t * s->r->max_choices);
    }
    return MOE_OK;
}

/* p + b of one token into out. */
static void moei_biased(const moei_pass *s, size_t t, moe_real *out) {
    const moe_real *bias = moei_tensor(s, MOE_ROUTER_SELECTION_BIAS);
    size_t e;
    for (e = 0; e < s->experts; e++) out[e] = s->r->probabilities[t * s->experts + e] + (bias != NULL ? bias[e] : MOEI_R(0.0));
}

/* The marked experts of a token become its choices, in the order of the selection score. */
static void moei_rank_marked(moei_pass *s, size_t t) {
    const unsigned char *marked = s->r->selected + t * s->experts;
    const moe_real *score = moei_selection_score(s, t);
    moe_real *masked = s->m.row + s->experts;
    size_t e, count = 0;
    for (e = 0; e < s->experts; e++) {
        count += marked[e];
        masked[e] = marked[e] ? score[e] : -MOEI_INFINITY;
    }
    s->r->n_choices[t] = (int32_t)moei_top_k(s, s->experts, masked, count, s->r->choices + t * s->r->max_choices);
}

/* Marks the K largest of a row of scores. */
static void moei_mark_largest(moei_pass *s, size_t t, const moe_real *score) {
    int32_t *index = s->r->choices + t * s->r->max_choices;
    size_t found = moei_top_k(s, s->experts, score, (size_t)s->c->top_k, index), i;
    for (i = 0; i < found; i++) s->r->selected[t * s->experts + (size_t)index[i]] = 1;
}

static moe_status moei_select_dense(moei_pass *s) {
    memset(s->r->selected, 1, s->n * s->experts);
    return MOE_OK;
}

/* Replay: the caller's indices; -1 leaves a place empty. */
static moe_status moei_select_given(moei_pass *s) {
    size_t t, i, k = s->r->max_choices;
    for (t = 0; t < s->n; t++)
        for (i = 0; i < k; i++) {
            int32_t e = s->call->given[t * k + i];
            if (!moei_is_real(s->call, t) || e == -1) continue;
            if (e < 0 || (size_t)e >= s->experts || s->r->selected[t * s->experts + (size_t)e]) return MOE_ERR_ARGUMENT;
            s->r->selected[t * s->experts + (size_t)e] = 1;
        }
    return MOE_OK;
}

/* What a group of experts is worth: its best p + b, or its two best together. */
static moe_real moei_group_value(const moei_pass *s, const moe_real *score, size_t size) {
    int32_t best[2];
    size_t found = moei_top_k(s, size, score, s->c->group_score == MOE_GROUP_TOP2_SUM ? 2 : 1, best), i;
    moe_real sum = found > 0 ? MOEI_R(0.0) : -MOEI_INFINITY;
    for (i = 0; i < found; i++) sum += score[best[i]];
    return sum;
}

static moe_status moei_select_grouped_top_k(moei_pass *s) {
    size_t groups = (size_t)s->c->groups, size = s->experts / groups, t, g, i, found;
    moe_real *score = s->m.row, *value = score + s->experts, *masked = value + s->experts;
    for (t = 0; t < s->n; t++) {
        int32_t *index = s->r->choices + t * s->r->max_choices;
        if (!moei_is_real(s->call, t)) continue;
        moei_biased(s, t, score);
        for (g = 0; g < groups; g++) value[g] = moei_group_value(s, score + g * size, size);
        for (i = 0; i < s->experts; i++) masked[i] = -MOEI_INFINITY;
        found = moei_top_k(s, groups, value, (size_t)s->c->groups_kept, s->m.order);
        for (i = 0; i < found; i++) memcpy(masked + (size_t)s->m.order[i] * size, score + (size_t)s->m.order[i] * size, size * sizeof(moe_real));
        found = moei_top_k(s, s->experts, masked, (size_t)s->c->top_k, index);
        for (i = 0; i < found; i++) s->r->selected[t * s->experts + (size_t)index[i]] = 1;
    }
    return MOE_OK;
}

static moe_status moei_select_top_p(moei_pass *s) {
    size_t t, i;
    for (t = 0; t < s->n; t++) {
        const moe_real *p = s->r->probabilities + t * s->experts;
        int32_t *index = s->r->choices + t * s->r->max_choices;
        moe_real sum = MOEI_R(0.0);
        size_t found;
        if (!moei_is_real(s->call, t)) continue;
        found = moei_top_k(s, s->experts, p, s->experts, index);
        for (i = 0; i < found && !(sum > s->c->top_p); i++) {
            sum += p[index[i]];
            s->r->selected[t * s->experts + (size_t)index[i]] = 1;
        }
    }
    return MOE_OK;
}

static moe_real moei_threshold(const moei_pass *s, size_t e) {
    const moe_real *learned = moei_tensor(s, MOE_ROUTER_THRESHOLD);
    if (learned == NULL) return s->c->threshold;
    return s->c->threshold_sigmoid ? moe_sigmoid(learned[e]) : learned[e];
}

static moe_status moei_select_threshold(moei_pass *s) {
    int fallback = s->c->threshold_fallback == MOE_FALLBACK_ALWAYS || (s->c->threshold_fallback == MOE_FALLBACK_EVALUATION && !s->call->training);
    size_t t, e;
    int32_t best;
    for (t = 0; t < s->n; t++) {
        const moe_real *p = s->r->probabilities + t * s->experts;
        int any = 0;
        if (!moei_is_real(s->call, t)) continue;
        for (e = 0; e < s->experts; e++)
            if (p[e] > moei_threshold(s, e)) s->r->selected[t * s->experts + e] = 1, any = 1;
        if (!any && fallback && moei_top_k(s, s->experts, p, 1, &best) == 1) s->r->selected[t * s->experts + (size_t)best] = 1;
    }
    return MOE_OK;
}

static moe_status moei_select_positive(moei_pass *s) {
    size_t i;
    for (i = 0; i < s->n * s->experts; i++) s->r->selected[i] = moei_is_real(s->call, i / s->experts) && s->r->probabilities[i] > MOEI_R(0.0);
    return MOE_OK;
}

/* round(factor N / E), N the real tokens, at least 1, at most N. */
static size_t moei_expert_choice_capacity(const moei_pass *s) {
    moe_real even = s->c->capacity_factor * (moe_real)s->r->n_real / (moe_real)s->experts + MOEI_R(0.5);
    size_t capacity = even >= (moe_real)s->r->n_real ? s->r->n_real : (size_t)even;
    return capacity < 1 ? 1 : capacity;
}

/* One of the rows that moei_turn_columns makes. N + 16 apart: rows a power of two apart would crowd the same places of the cache. */
static moe_real *moei_turned(const moei_pass *s, size_t i) { return s->m.columns + i * (s->n + MOEI_COLUMNS); }

/* Up to MOEI_COLUMNS columns of z [N,width] from `first` on, for the tokens [from, to), turned into rows, because columns are slow to walk. The rows
   hold the real tokens one after another, or with all = 1 every token, padding as -inf. Returns the length of the rows. */
static size_t moei_turn_columns(const moei_pass *s, const moe_real *z, size_t width, size_t first, size_t columns, size_t from, size_t to,
                                int all) {
    size_t t, i, at = 0;
    for (t = from; t < to; t++) {
        const moe_real *row = z + t * width + first;
        int real = moei_is_real(s->call, t);
        if (!real && !all) continue;
        for (i = 0; i < columns; i++) moei_turned(s, i)[at] = real ? row[i] : -MOEI_INFINITY;
        at++;
    }
    return at;
}

static moe_status moei_select_expert_choice(moei_pass *s) {
    const moe_real *score = s->c->expert_choice_score == MOE_EXPERT_CHOICE_Z ? s->r->logits : s->r->probabilities;
    size_t capacity = moei_expert_choice_capacity(s), first, columns, c, i, found;
    for (first = 0; first < s->experts; first += columns) {
        columns = s->experts - first < MOEI_COLUMNS ? s->experts - first : (size_t)MOEI_COLUMNS;
        (void)moei_turn_columns(s, score, s->experts, first, columns, 0, s->n, 1);
        for (c = 0; c < columns; c++) {
            found = moei_top_k(s, s->n, moei_turned(s, c), capacity, s->m.order);
            for (i = 0; i < found; i++) s->r->selected[(size_t)s->m.order[i] * s->experts + first + c] = 1;
        }
    }
    return MOE_OK;
}

/* How many of an expert's tokens, sorted by affinity, it keeps. */
static size_t moei_affinity_keep(const moei_pass *s, size_t found) {
    moe_real total = MOEI_R(0.0), sum = MOEI_R(0.0), wanted;
    size_t keep = 0, least = (size_t)s->c->capacity_min;
    for (keep = 0; keep < found; keep++) total += s->m.column[s->m.order[keep]] > MOEI_R(0.0) ? s->m.column[s->m.order[keep]] : MOEI_R(0.0);
    wanted = s->c->affinity_sum > MOEI_R(0.0) ? s->c->affinity_sum : s->c->affinity_mass * total;
    for (keep = 0; keep < found && sum < wanted; keep++) sum += s->m.column[s->m.order[keep]] > MOEI_R(0.0) ? s->m.column[s->m.order[keep]] : MOEI_R(0.0);
    if (keep < least) keep = least;
    if (s->c->capacity > 0 && keep > (size_t)s->c->capacity) keep = (size_t)s->c->capacity;
    return keep < found ? keep : found;
}

static moe_status moei_select_affinity(moei_pass *s) {
    int32_t *tokens = s->r->choices; /* by expert; there are no choices yet, nor a plan */
    size_t *starts = s->r->plan.offsets, t, e, i, found;
    for (t = 0; t < s->n; t++) s->r->n_choices[t] = -1; /* here: the token's best expert */
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t)) (void)moei_top_k(s, s->experts, s->r->logits + t * s->experts, 1, &s->r->n_choices[t]);
    moei_input_sort(s, tokens, starts);
    for (e = 0; e < s->experts; e++) {
        const int32_t *own = tokens + starts[e];
        found = starts[e + 1] - starts[e];
        for (i = 0; i < found; i++) s->m.column[i] = s->r->logits[(size_t)own[i] * s->experts + e];
        found = moei_top_k(s, found, s->m.column, found, s->m.order);
        found = moei_affinity_keep(s, found);
        for (i = 0; i < found; i++) s->r->selected[(size_t)own[s->m.order[i]] * s->experts + e] = 1;
    }
    return MOE_OK;
}

static moe_status moei_select_hash(moei_pass *s) {
    const moe_real *table = moei_tensor(s, MOE_ROUTER_TABLE);
    size_t t, i, k = (size_t)s->c->top_k;
    for (t = 0; t < s->n; t++) {
        if (!moei_is_real(s->call, t)) continue;
        if (s->call->token_ids[t] < 0 || s->call->token_ids[t] >= s->c->table_size) return MOE_ERR_ARGUMENT;
        for (i = 0; i < k; i++) {
            moe_real e = table[(size_t)s->call->token_ids[t] * k + i];
            if (!(e >= MOEI_R(0.0)) || !(e < (moe_real)s->experts) || e > (moe_real)(size_t)e) return MOE_ERR_ARGUMENT;
            if (s->r->selected[t * s->experts + (size_t)e]) return MOE_ERR_ARGUMENT; /* as for given: no expert twice */
            s->r->selected[t * s->experts + (size_t)e] = 1;
        }
    }
    return MOE_OK;
}

/* The K largest logits: what selections that need a whole batch do outside training. */
static moe_status moei_select_by_logits(moei_pass *s) {
    size_t t;
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t)) moei_mark_largest(s, t, s->r->logits + t * s->experts);
    return MOE_OK;
}

/* One half of Sinkhorn's iteration, d0 = (1/N) / (Q d1) and d1 = (1/E) / (Q^T d0); returns the mean change of d1. */
static moe_real moei_sinkhorn_step(moei_pass *s, const moe_real *q, moe_real *d0, moe_real *d1, moe_real *next) {
    moe_real change = MOEI_R(0.0), sum;
    size_t t, e;
    for (e = 0; e < s->experts; e++) next[e] = MOEI_R(0.0);
    for (t = 0; t < s->n; t++) {
        if (!moei_is_real(s->call, t)) continue;
        for (e = 0, sum = MOEI_R(0.0); e < s->experts; e++) sum += q[t * s->experts + e] * d1[e];
        d0[t] = moei_ratio(MOEI_R(1.0) / (moe_real)s->r->n_real, sum);
        for (e = 0; e < s->experts; e++) next[e] += q[t * s->experts + e] * d0[t];
    }
    for (e = 0; e < s->experts; e++) {
        next[e] = moei_ratio(MOEI_R(1.0) / (moe_real)s->experts, next[e]);
        change += MOEI_F(fabs)(next[e] - d1[e]);
        d1[e] = next[e];
    }
    return change / (moe_real)s->experts;
}

/* q d0 d1, of which two may be beyond the type's range in opposite directions: then they say nothing. */
static moe_real moei_sinkhorn_share(moe_real q, moe_real d0, moe_real d1) {
    const moe_real share = q * d0 * d1;
    const int is_large = q > MOEI_R(0.0) && d0 > MOEI_R(0.0) && d1 > MOEI_R(0.0);
    return moe_is_finite(share) ? share : is_large ? MOEI_INFINITY : MOEI_R(0.0);
}

static moe_status moei_select_sinkhorn(moei_pass *s) {
    moe_real *q = s->r->weights, *d0 = s->m.column, *d1 = s->m.row, *next = d1 + s->experts; /* weights are filled in later */
    size_t t, e, step;
    if (!s->call->training) return moei_select_by_logits(s);
    for (t = 0; t < s->n; t++) {
        const moe_real *z = s->r->logits + t * s->experts;
        moe_real largest = z[0];
        for (e = 1; e < s->experts; e++)
            if (z[e] > largest) largest = z[e];
        for (e = 0; e < s->experts && moei_is_real(s->call, t); e++) q[t * s->experts + e] = MOEI_F(exp)(z[e] - largest);
    }
    for (e = 0; e < s->experts; e++) d1[e] = MOEI_R(1.0);
    for (step = 0; step < 100 && moei_sinkhorn_step(s, q, d0, d1, next) >= MOEI_R(1e-4);) step++;
    for (t = 0; t < s->n; t++) {
        for (e = 0; e < s->experts && moei_is_real(s->call, t); e++) q[t * s->experts + e] = moei_sinkhorn_share(q[t * s->experts + e], d0[t], d1[e]);
        if (moei_is_real(s->call, t)) moei_mark_largest(s, t, q + t * s->experts);
    }
    return MOE_OK;
}

static moe_status moei_select_sample(moei_pass *s) {
    size_t t, e, i;
    for (t = 0; t < s->n; t++) {
        const moe_real *p = s->r->probabilities + t * s->experts;
        if (!moei_is_real(s->call, t)) continue;
        if (!s->call->training) {
            moei_mark_largest(s, t, p);
            continue;
        }
        for (i = 0; i < (size_t)s->c->top_k; i++) {
            unsigned char *taken = s->r->selected + t * s->experts;
            moe_real left = MOEI_R(0.0), draw = moe_rng_uniform(s->call->rng); /* K in any case: the stream of later tokens is theirs */
            size_t last = s->experts;
            for (e = 0; e < s->experts; e++)
                if (!taken[e] && p[e] > MOEI_R(0.0)) left += p[e], last = e;
            if (last == s->experts) continue;
            draw *= left;
            for (e = 0; e < last; e++) {
                if (taken[e] || !(p[e] > MOEI_R(0.0))) continue;
                if (draw < p[e]) break;
                draw -= p[e];
            }
            taken[e] = 1;
        }
    }
    return MOE_OK;
}

/* balanced: a flow of least cost. Every token begins at its best expert: optimal, but uneven. Then one surplus token after another is pushed along
   the cheapest chain of moves a -> b -> c (a token of a goes to b, one of b to c) to a free place. Cheapest chains keep the assignment optimal
   for the loads reached (successive shortest paths). floor(N/E) places are each expert's own; N mod E more are in a pool, one per expert at
   most; node E of the graph is that pool, entered by an expert that needs a place and left through one that gives its place up. */
typedef struct moei_flow {
    moei_pass *s;
    size_t experts, own, pool; /* own: places of each expert; pool: places left in the pool */
    double *cost;              /* [E+1] of the cheapest chain to this node; MOEI_HUGE: none */
    int32_t *before;           /* [E+1] the node before it; -1: the chain begins here */
    int32_t *mover;            /* [E,E] the token of a that is cheapest to move to b; -1: a is empty */
    int32_t *at;               /* [N] the expert of a token; -1: padding */
    size_t *load;              /* [E] */
    size_t *stale;             /* [E] scratch of moei_flow_movers */
    unsigned char *extra;      /* [E] 1: holds a place of the pool */
} moei_flow;

static double moei_flow_price(const moei_flow *f, int32_t token, size_t from, size_t to) {
    const moe_real *z = f->s->r->logits + (size_t)token * f->experts;
    return (double)z[from] - (double)z[to];
}

/* Finds the cheapest mover of expert a wherever it was `gone`, which has left a (-1: there was none yet). Writes over cost. */
static void moei_flow_movers(const moei_flow *f, size_t a, int32_t gone) {
    int32_t *mover = f->mover + a * f->experts;
    size_t t, e, i, count = 0;
    for (e = 0; e < f->experts; e++)
        if (mover[e] == gone) mover[e] = -1, f->cost[e] = MOEI_HUGE, f->stale[count++] = e;
    for (t = 0; t < f->s->n && count > 0; t++) {
        if (f->at[t] != (int32_t)a) continue;
        for (i = 0; i < count; i++) {
            double price = moei_flow_price(f, (int32_t)t, a, f->stale[i]);
            if (price < f->cost[f->stale[i]]) f->cost[f->stale[i]] = price, mover[f->stale[i]] = (int32_t)t;
        }
    }
}

/* A token that has come to its expert may be the cheapest to move on; of equal ones the lower token is. */
static void moei_flow_offer(const moei_flow *f, int32_t token) {
    size_t a = (size_t)f->at[token], e;
    int32_t *mover = f->mover + a * f->experts;
    for (e = 0; e < f->experts; e++) {
        double gain = mover[e] < 0 ? MOEI_HUGE : moei_flow_price(f, mover[e], a, e) - moei_flow_price(f, token, a, e);
        if (gain > 0.0 || (!(gain < 0.0) && token < mover[e])) mover[e] = token;
    }
}

/* Whether one unit can go from node a to node b, and for how much. */
static int moei_flow_arc(const moei_flow *f, size_t a, size_t b, double *price) {
    *price = 0.0;
    if (a == b) return 0;
    if (a == f->experts) return f->extra[b] != 0;
    if (b == f->experts) return !f->extra[a] && f->load[a] >= f->own;
    if (f->mover[a * f->experts + b] < 0) return 0;
    *price = moei_flow_price(f, f->mover[a * f->experts + b], a, b);
    return 1;
}

static size_t moei_flow_surplus(const moei_flow *f, size_t e) { return f->load[e] > f->own + f->extra[e] ? f->load[e] - f->own - f->extra[e] : 0; }

/* Bellman and Ford from all experts with a surplus. Returns the free node that is cheapest to reach. Gains below `least` are rounding. */
static size_t moei_flow_path(const moei_flow *f, double least) {
    size_t a, b, best = f->experts + 1, round;
    double price;
    int changed = 1;
    for (a = 0; a <= f->experts; a++) {
        f->before[a] = -1;
        f->cost[a] = a < f->experts && moei_flow_surplus(f, a) > 0 ? 0.0 : MOEI_HUGE;
    }
    for (round = 0; changed && round <= f->experts; round++)
        for (changed = 0, a = 0; a <= f->experts; a++)
            for (b = 0; b <= f->experts && f->cost[a] < MOEI_HUGE; b++)
                if (moei_flow_arc(f, a, b, &price) && f->cost[a] + price < f->cost[b] - least) f->cost[b] = f->cost[a] + price, f->before[b] = (int32_t)a, changed = 1;
    for (a = 0; a <= f->experts; a++)
        if ((a < f->experts ? f->load[a] < f->own : f->pool > 0) && f->cost[a] < MOEI_HUGE && (best > f->experts || f->cost[a] < f->cost[best])) best = a;
    return best;
}

/* Moves one token along each arc of the chain that ends at node `to`. */
static void moei_flow_push(moei_flow *f, size_t to) {
    if (to == f->experts) f->pool--;
    while (f->before[to] >= 0) {
        size_t from = (size_t)f->before[to];
        if (from == f->experts) f->extra[to] = 0;
        else if (to == f->experts) f->extra[from] = 1;
        else {
            int32_t token = f->mover[from * f->experts + to];
            f->at[token] = (int32_t)to;
            f->load[from]--, f->load[to]++;
            moei_flow_movers(f, from, token);
            moei_flow_offer(f, token);
        }
        to = from;
    }
}

static moe_status moei_select_balanced(moei_pass *s) {
    moei_flow f;
    size_t t, e, surplus = 0, to;
    double largest = 0.0;
    if (!s->call->training) return moei_select_by_logits(s);
    f.s = s, f.experts = s->experts, f.own = s->r->n_real / s->experts, f.pool = s->r->n_real % s->experts;
    f.cost = s->m.flow_cost, f.before = s->m.order, f.mover = s->m.flow_mover, f.at = s->r->n_choices, f.load = s->r->counts;
    f.stale = s->r->first_counts, f.extra = s->m.flow_extra; /* counts are filled in later */
    for (e = 0; e < s->experts; e++) f.load[e] = 0, f.extra[e] = 0;
    for (t = 0; t < s->n; t++) {
        f.at[t] = -1;
        if (!moei_is_real(s->call, t)) continue;
        (void)moei_top_k(s, s->experts, s->r->logits + t * s->experts, 1, &f.at[t]);
        f.load[f.at[t]]++;
        for (e = 0; e < s->experts; e++)
            if (MOEI_D(fabs)((double)s->r->logits[t * s->experts + e]) > largest) largest = MOEI_D(fabs)((double)s->r->logits[t * s->experts + e]);
    }
    for (e = 0; e < s->experts * s->experts; e++) f.mover[e] = -1;
    for (e = 0; e < s->experts; e++) moei_flow_movers(&f, e, -1), surplus += moei_flow_surplus(&f, e);
    for (; surplus > 0; surplus--) {
        to = moei_flow_path(&f, largest * 1e-13);
        if (to > s->experts) break; /* cannot be: there are as many places as tokens */
        moei_flow_push(&f, to);
    }
    for (t = 0; t < s->n; t++)
        if (f.at[t] >= 0) s->r->selected[t * s->experts + (size_t)f.at[t]] = 1;
    return MOE_OK;
}

static moe_status moei_select_custom(moei_pass *s) {
    const moe_custom *custom = &s->router->custom;
    moe_status status;
    size_t i;
    if (custom->select == NULL) return MOE_ERR_ARGUMENT;
    status = custom->select(custom->ctx, s->router, s->call, s->r->logits, s->r->probabilities, s->r->selected);
    for (i = 0; i < s->n * s->experts; i++) s->r->selected[i] = s->r->selected[i] != 0 && moei_is_real(s->call, i / s->experts);
    return status;
}

typedef struct moei_select {
    moe_status (*choose)(moei_pass *s);
    int ranked;      /* choose fills in choices in order of rank; else it marks them in selected */
    int k_per_token; /* at most K choices per token; else up to E */
    unsigned traits;
    int batch_in_training_only; /* outside training every token by itself */
} moei_select;

static const moei_select moei_selects[MOE_SELECT_COUNT] = {
    /* top_k         */ {MOEI_KEEP(SELECTS, MOE_SELECT_TOP_K, moei_select_top_k), 1, 1, 0, 0},
    /* dense         */ {MOEI_KEEP(SELECTS, MOE_SELECT_DENSE, moei_select_dense), 0, 0, 0, 0},
    /* given         */ {MOEI_KEEP(SELECTS, MOE_SELECT_GIVEN, moei_select_given), 0, 1, MOE_TRAIT_NEEDS_GIVEN, 0},
    /* grouped_top_k */ {MOEI_KEEP(SELECTS, MOE_SELECT_GROUPED_TOP_K, moei_select_grouped_top_k), 0, 1, 0, 0},
    /* top_p         */ {MOEI_KEEP(SELECTS, MOE_SELECT_TOP_P, moei_select_top_p), 0, 0, 0, 0},
    /* threshold     */ {MOEI_KEEP(SELECTS, MOE_SELECT_THRESHOLD, moei_select_threshold), 0, 0, 0, 0},
    /* positive      */ {MOEI_KEEP(SELECTS, MOE_SELECT_POSITIVE, moei_select_positive), 0, 0, 0, 0},
    /* expert_choice */ {MOEI_KEEP(SELECTS, MOE_SELECT_EXPERT_CHOICE, moei_select_expert_choice), 0, 0, MOE_TRAIT_NEEDS_BATCH, 0},
    /* affinity      */ {MOEI_KEEP(SELECTS, MOE_SELECT_AFFINITY, moei_select_affinity), 0, 0, MOE_TRAIT_NEEDS_BATCH, 0},
    /* hash          */ {MOEI_KEEP(SELECTS, MOE_SELECT_HASH, moei_select_hash), 0, 1, MOE_TRAIT_NEEDS_TOKEN_IDS, 0},
    /* soft          */ {MOEI_KEEP(SELECTS, MOE_SELECT_SOFT, moei_select_dense), 0, 0, MOE_TRAIT_NEEDS_BATCH, 0},
    /* sinkhorn      */ {MOEI_KEEP(SELECTS, MOE_SELECT_SINKHORN, moei_select_sinkhorn), 0, 1, MOE_TRAIT_NEEDS_BATCH, 1},
    /* sample        */ {MOEI_KEEP(SELECTS, MOE_SELECT_SAMPLE, moei_select_sample), 0, 1, MOE_TRAIT_STOCHASTIC, 0},
    /* balanced      */ {MOEI_KEEP(SELECTS, MOE_SELECT_BALANCED, moei_select_balanced), 0, 1, MOE_TRAIT_NEEDS_BATCH, 1},
    /* custom        */ {MOEI_KEEP(SELECTS, MOE_SELECT_CUSTOM, moei_select_custom), 0, 0, 0, 0}};

static int moei_is_soft(const moe_router_config *c) { return MOEI_KEPT(SELECTS, MOE_SELECT_SOFT) && c->select == MOE_SELECT_SOFT; }

/* All slots of one sequence. */
static size_t moei_slot_total(const moe_router_config *c) { return (size_t)c->n_experts * (size_t)c->slots; }

/* L [N,M] = u . phi, or unit(u) . unit(phi) times the learned scale. */
static void moei_soft_logits(moei_pass *s) {
    const moe_real *phi = moei_tensor(s, MOE_ROUTER_SLOT_VECTORS), *u = s->r->u;
    size_t total = moei_slot_total(s->c), i, q, cells = s->n * total;
    if (s->c->soft_normalise) {
        for (i = 0; i < s->n + total; i++) {
            const moe_real *from = i < s->n ? s->r->u + i * s->d : phi + (i - s->n) * s->d;
            moe_real *to = i < s->n ? s->m.unit + i * s->d : s->m.keys + (i - s->n) * s->d, inverse = moei_inverse_length(s->router->kernels, from, s->d);
            for (q = 0; q < s->d; q++) to[q] = from[q] * inverse;
        }
        u = s->m.unit, phi = s->m.keys;
    }
    moei_affine(s->router->kernels, s->n, total, s->d, u, phi, NULL, s->r->logits);
    for (i = 0; i < cells && s->c->soft_normalise; i++) s->r->logits[i] *= moei_tensor(s, MOE_ROUTER_SLOT_SCALE)[0];
}

/* D: for each slot the softmax of L over the real tokens of [from, to). */
static void moei_soft_dispatch(const moei_pass *s, size_t from, size_t to) {
    size_t total = moei_slot_total(s->c), first, columns, i, t, count;
    for (first = 0; first < total; first += columns) {
        columns = total - first < MOEI_COLUMNS ? total - first : (size_t)MOEI_COLUMNS;
        count = moei_turn_columns(s, s->r->logits, total, first, columns, from, to, 0);
        for (i = 0; i < columns; i++) moe_softmax(s->router->kernels, count, moei_turned(s, i), MOEI_R(1.0), moei_turned(s, i));
        for (t = from, count = 0; t < to; t++) {
            int real = moei_is_real(s->call, t);
            for (i = 0; i < columns; i++) s->r->gate[t * total + first + i] = real ? moei_turned(s, i)[count] : MOEI_R(0.0);
            count += (size_t)real;
        }
    }
}

/* ---- weight: one token's choices -> w -------------------------------------------------------------------------------------------- */

/* One token: n choices at choice, z and p its rows of E values, w and dw indexed like choice. */
typedef struct moei_token {
    const moe_router_config *c;
    const moe_kernels *kernels;
    size_t experts, n;
    const int32_t *choice;
    const moe_real *z, *p;
} moei_token;

static moe_real moei_chosen_sum(const moei_token *k) {
    moe_real sum = MOEI_R(0.0);
    size_t i;
    for (i = 0; i < k->n; i++) sum += k->p[k->choice[i]];
    return sum;
}

static void moei_weight_sum(const moei_token *k, moe_real *w) {
    moe_real sum = moei_chosen_sum(k);
    size_t i;
    for (i = 0; i < k->n; i++) w[i] = moei_ratio(k->p[k->choice[i]], sum);
}

static void moei_weight_softmax(const moei_token *k, moe_real *w) {
    size_t i;
    for (i = 0; i < k->n; i++) w[i] = k->z[k->choice[i]];
    moe_softmax(k->kernels, k->n, w, MOEI_R(1.0), w);
}

static void moei_weight_raw(const moei_token *k, moe_real *w) {
    size_t i;
    for (i = 0; i < k->n; i++) w[i] = k->p[k->choice[i]];
}

/* (sum p^P)^(1/P); P = 1 is the plain sum, so that gates with negative values keep their signs. */
static moe_real moei_p_norm(const moei_token *k) {
    moe_real sum = MOEI_R(0.0), power = k->c->weight_p;
    size_t i;
    if (!(power < MOEI_R(1.0)) && !(power > MOEI_R(1.0))) return moei_chosen_sum(k);
    for (i = 0; i < k->n; i++) sum += MOEI_F(pow)(MOEI_F(fabs)(k->p[k->choice[i]]), power);
    return MOEI_F(pow)(sum, MOEI_R(1.0) / power);
}

static void moei_weight_p_norm(const moei_token *k, moe_real *w) {
    moe_real norm = moei_p_norm(k);
    size_t i;
    for (i = 0; i < k->n; i++) w[i] = moei_ratio(k->p[k->choice[i]], norm);
}

static void moei_weight_uniform(const moei_token *k, moe_real *w) {
    size_t i;
    for (i = 0; i < k->n; i++) w[i] = MOEI_R(1.0) / (moe_real)k->n;
}

static void moei_weight_one(const moei_token *k, moe_real *w) {
    size_t i;
    for (i = 0; i < k->n; i++) w[i] = MOEI_R(1.0);
}

/* Whether expert e still stands when choice number pick is made: not picked before and within 2 eps of the best. */
static int moei_sparsemixer_stays(const moei_token *k, size_t pick, size_t e) {
    moe_real best = k->z[k->choice[pick]], z = k->z[e], size = MOEI_F(fabs)(z) > best ? MOEI_F(fabs)(z) : best;
    size_t i;
    for (i = 0; i < pick; i++)
        if ((size_t)k->choice[i] == e) return 0;
    return moei_ratio(best - z, size) <= MOEI_R(2.0) * k->c->sparsemixer_eps;
}

static void moei_weight_sparsemixer(const moei_token *k, moe_real *w) {
    size_t i, e;
    for (i = 0; i < k->n; i++) {
        moe_real sum = MOEI_R(0.0), best = k->z[k->choice[i]];
        for (e = 0; e < k->experts; e++)
            if (moei_sparsemixer_stays(k, i, e)) sum += MOEI_F(exp)(k->z[e] - best);
        w[i] = MOEI_R(1.0) / sum;
    }
}

#ifndef MOE_NO_TRAIN

static void moei_weight_sum_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz, moe_real *dp) {
    moe_real sum = moei_chosen_sum(k), dot = moe_dot(NULL, k->n, w, dw);
    size_t i;
    (void)dz;
    for (i = 0; i < k->n; i++) dp[k->choice[i]] += moei_slope(dw[i] - dot, sum);
}

static void moei_weight_softmax_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz, moe_real *dp) {
    moe_real dot = moe_dot(NULL, k->n, w, dw);
    size_t i;
    (void)dp;
    for (i = 0; i < k->n; i++) dz[k->choice[i]] += w[i] * (dw[i] - dot);
}

static void moei_weight_raw_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz, moe_real *dp) {
    size_t i;
    (void)w, (void)dz;
    for (i = 0; i < k->n; i++) dp[k->choice[i]] += dw[i];
}

/* dp_i = dw_i / m - (sum_j dw_j w_j) dm/dp_i / m with dm/dp_i = |w_i|^(P-1) sign p_i (1 for P = 1) */
static void moei_weight_p_norm_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz, moe_real *dp) {
    moe_real norm = moei_p_norm(k), dot = moe_dot(NULL, k->n, w, dw), power = k->c->weight_p;
    size_t i;
    (void)dz;
    for (i = 0; i < k->n; i++) {
        moe_real slope = MOEI_R(1.0);
        if (power > MOEI_R(1.0) || power < MOEI_R(1.0)) {
            slope = w[i] < MOEI_R(0.0) || w[i] > MOEI_R(0.0) ? MOEI_F(pow)(MOEI_F(fabs)(w[i]), power - MOEI_R(1.0)) : MOEI_R(0.0);
            if (w[i] < MOEI_R(0.0)) slope = -slope;
        }
        dp[k->choice[i]] += moei_slope(dw[i] - dot * slope, norm);
    }
}

static void moei_weight_constant_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz, moe_real *dp) {
    (void)k, (void)w, (void)dw, (void)dz, (void)dp;
}

static void moei_weight_sparsemixer_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz, moe_real *dp) {
    size_t i, e;
    (void)dp;
    for (i = 0; i < k->n; i++) {
        moe_real best = k->z[k->choice[i]];
        for (e = 0; e < k->experts; e++)
            if (moei_sparsemixer_stays(k, i, e)) dz[e] -= dw[i] * w[i] * w[i] * MOEI_F(exp)(k->z[e] - best);
        dz[k->choice[i]] += dw[i] * w[i];
    }
}

#endif

typedef struct moei_weight {
    void (*forward)(const moei_token *k, moe_real *w);
    void (*backward)(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz, moe_real *dp);
    int constant_for_one; /* with one choice the weight is 1 whatever the logits */
    int counts_choices;   /* 1: w does not read p: under a learned threshold its factor is [p > theta] / |S| or [p > theta]; -1: takes no factor */
} moei_weight;

static const moei_weight moei_weights[MOE_WEIGHT_COUNT] = {
    /* sum         */ {MOEI_KEEP(WEIGHTS, MOE_WEIGHT_SUM, moei_weight_sum), MOEI_BACKWARD(moei_weight_sum_backward), 1, 0},
    /* softmax     */ {MOEI_KEEP(WEIGHTS, MOE_WEIGHT_SOFTMAX, moei_weight_softmax), MOEI_BACKWARD(moei_weight_softmax_backward), 1, -1},
    /* raw         */ {MOEI_KEEP(WEIGHTS, MOE_WEIGHT_RAW, moei_weight_raw), MOEI_BACKWARD(moei_weight_raw_backward), 0, 0},
    /* p_norm      */ {MOEI_KEEP(WEIGHTS, MOE_WEIGHT_P_NORM, moei_weight_p_norm), MOEI_BACKWARD(moei_weight_p_norm_backward), 1, 0},
    /* uniform     */ {MOEI_KEEP(WEIGHTS, MOE_WEIGHT_UNIFORM, moei_weight_uniform), MOEI_BACKWARD(moei_weight_constant_backward), 0, 1},
    /* one         */ {MOEI_KEEP(WEIGHTS, MOE_WEIGHT_ONE, moei_weight_one), MOEI_BACKWARD(moei_weight_constant_backward), 0, 1},
    /* sparsemixer */ {MOEI_KEEP(WEIGHTS, MOE_WEIGHT_SPARSEMIXER, moei_weight_sparsemixer), MOEI_BACKWARD(moei_weight_sparsemixer_backward), 0, -1}};

/* ---- losses: value and gradient; counts and f are constants -------------------------------------------------------------------------- */

#ifndef MOE_NO_TRAIN

/* sum of the row when the balance loss must normalise it first, else 1; 0 means that the row counts nothing. */
static moe_real moei_row_mass(const moei_pass *s, const moe_real *p) {
    moe_real sum = MOEI_R(0.0);
    size_t e;
    if (moei_gates[s->c->gate].sums_to_one) return MOEI_R(1.0);
    for (e = 0; e < s->experts; e++) sum += p[e];
    return sum;
}

/* f_e of the tokens [from, to) into f; returns how many of them are real. */
static size_t moei_balance_shares(const moei_pass *s, size_t from, size_t to, moe_real *f) {
    size_t t, e, i, real = 0;
    moe_real total = MOEI_R(0.0);
    for (e = 0; e < s->experts; e++) f[e] = MOEI_R(0.0);
    for (t = from; t < to; t++) {
        size_t n = (size_t)s->r->n_choices[t];
        if (!moei_is_real(s->call, t)) continue;
        real++;
        if (s->c->balance_over == MOE_BALANCE_FIRST && n > 1) n = 1;
        for (i = 0; i < n; i++) f[s->r->choices[t * s->r->max_choices + i]] += MOEI_R(1.0);
        total += (moe_real)n;
    }
    if (s->c->balance_over == MOE_BALANCE_TOKENS) total = (moe_real)real;
    for (e = 0; e < s->experts; e++) f[e] = moei_ratio(f[e], total);
    return real;
}

/* The balance loss of the tokens [from, to), without its factor; adds factor times its gradient when d_p is there. */
static moe_real moei_balance_part(const moei_pass *s, size_t from, size_t to, moe_real factor, moe_real *d_p) {
    moe_real *f = s->m.row, sum = MOEI_R(0.0), scale;
    size_t t, e, real = moei_balance_shares(s, from, to, f);
    if (real == 0) return MOEI_R(0.0);
    scale = (moe_real)s->experts / (moe_real)real;
    for (t = from; t < to; t++) {
        const moe_real *p = s->r->probabilities + t * s->experts;
        moe_real mass, inner = MOEI_R(0.0);
        if (!moei_is_real(s->call, t)) continue;
        mass = moei_row_mass(s, p);
        for (e = 0; e < s->experts; e++) inner += f[e] * p[e];
        inner = moei_ratio(inner, mass);
        sum += inner;
        if (d_p == NULL) continue;
        for (e = 0; e < s->experts; e++) /* d(p_e / sum p) */
            d_p[t * s->experts + e] += factor * scale * moei_slope(f[e] - (moei_gates[s->c->gate].sums_to_one ? MOEI_R(0.0) : inner), mass);
    }
    return scale * sum;
}

static moe_real moei_loss_balance(moei_pass *s, moe_real factor, int backward) {
    moe_real *d_p = backward ? s->m.d_probabilities : NULL, sum = MOEI_R(0.0);
    size_t i, from, to, parts = 0, n = moei_sequence_count(s->call), t;
    if (s->c->balance_scope == MOE_SCOPE_BATCH) return factor * moei_balance_part(s, 0, s->n, factor, d_p);
    for (i = 0; i < n; i++) { /* sequences of padding alone do not count */
        moei_sequence(s->call, i, &from, &to);
        for (t = from; t < to && !moei_is_real(s->call, t);) t++;
        parts += t < to;
    }
    if (parts == 0) return MOEI_R(0.0);
    for (i = 0; i < n; i++) {
        moei_sequence(s->call, i, &from, &to);
        sum += moei_balance_part(s, from, to, factor / (moe_real)parts, d_p);
    }
    return factor * sum / (moe_real)parts;
}

static moe_real moei_loss_z(moei_pass *s, moe_real factor, int backward) {
    moe_real sum = MOEI_R(0.0), over_n = MOEI_R(1.0) / (moe_real)s->r->n_real;
    size_t t, e;
    for (t = 0; t < s->n; t++) {
        const moe_real *z = s->r->logits + t * s->experts;
        moe_real lse;
        if (!moei_is_real(s->call, t)) continue;
        lse = moe_log_sum_exp(s->experts, z);
        sum += lse * lse;
        if (!backward) continue;
        for (e = 0; e < s->experts; e++) s->m.d_logits[t * s->experts + e] += factor * over_n * MOEI_R(2.0) * lse * MOEI_F(exp)(z[e] - lse);
    }
    return factor * sum * over_n;
}

/* What the importance loss sums: p, the gate or the weights of one token, and where its gradient goes. */
static moe_real *moei_importance_row(const moei_pass *s, size_t t, moe_real *values) {
    const moe_routing *r = s->r;
    size_t e, i;
    if (s->c->importance_over != MOE_IMPORTANCE_WEIGHTS) {
        int gate = s->c->importance_over == MOE_IMPORTANCE_GATE;
        int clean = gate && moei_is_noisy(s);
        memcpy(values, (clean ? s->m.clean_gate : gate ? r->gate : r->probabilities) + t * s->experts, s->experts * sizeof(moe_real));
        return clean ? s->m.d_clean_gate : gate ? s->m.d_gate : s->m.d_probabilities;
    }
    for (e = 0; e < s->experts; e++) values[e] = MOEI_R(0.0);
    for (i = 0; i < (size_t)r->n_choices[t]; i++)
        values[r->choices[t * r->max_choices + i]] = r->section_weights[t * r->max_choices + i];
    return s->m.d_weights;
}

/* CV^2 of the sums I[E]; factor times its slopes take their place. Deviations are taken from I_0 first, so that they are exactly 0 at balance; 0 where the
   mean is. */
static moe_real moei_squared_variation(const moei_pass *s, moe_real factor, moe_real *sums) {
    moe_real base = sums[0], mean = MOEI_R(0.0), variance = MOEI_R(0.0), count = (moe_real)s->experts, freedom = s->c->unbiased ? count - MOEI_R(1.0) : count;
    size_t e;
    for (e = 0; e < s->experts; e++) sums[e] -= base, mean += sums[e];
    mean /= count;
    for (e = 0; e < s->experts; e++) sums[e] -= mean, variance += sums[e] * sums[e];
    mean += base;
    variance /= freedom;
    for (e = 0; e < s->experts; e++)
        sums[e] = factor * MOEI_R(2.0) * moei_slope(sums[e] / freedom - moei_slope(variance, mean * count), mean * mean);
    return moei_ratio(variance, mean * mean);
}

/* w CV^2 of I_e = sum_t v_te. */
static moe_real moei_loss_importance(moei_pass *s, moe_real factor, int backward) {
    moe_real *sums = s->m.row, *values = sums + s->experts, *target = NULL, value;
    size_t t, e;
    if (s->experts < 2) return MOEI_R(0.0);
    for (e = 0; e < s->experts; e++) sums[e] = MOEI_R(0.0);
    for (t = 0; t < s->n; t++) {
        if (!moei_is_real(s->call, t)) continue;
        target = moei_importance_row(s, t, values);
        for (e = 0; e < s->experts; e++) sums[e] += values[e];
    }
    value = moei_squared_variation(s, factor, sums);
    for (t = 0; t < s->n && backward; t++)
        if (moei_is_real(s->call, t)) moe_axpy(s->router->kernels, s->experts, MOEI_R(1.0), sums, target + t * s->experts);
    return factor * value;
}

/* gamma mean_t H(p_t); 0 ln 0 = 0 with derivative 0. */
static moe_real moei_loss_entropy(moei_pass *s, moe_real factor, int backward) {
    moe_real sum = MOEI_R(0.0), over_n = MOEI_R(1.0) / (moe_real)s->r->n_real;
    size_t t, e;
    for (t = 0; t < s->n; t++) {
        if (!moei_is_real(s->call, t)) continue;
        for (e = 0; e < s->experts; e++) {
            moe_real p = s->r->probabilities[t * s->experts + e], log_p;
            if (!(p > MOEI_R(0.0))) continue;
            log_p = MOEI_F(log)(p);
            sum -= p * log_p;
            if (backward) s->m.d_probabilities[t * s->experts + e] -= factor * over_n * (log_p + MOEI_R(1.0));
        }
    }
    return factor * sum * over_n;
}

/* -gamma H(mean_t p_t). */
static moe_real moei_loss_usage_entropy(moei_pass *s, moe_real factor, int backward) {
    moe_real *mean = s->m.row, over_n = MOEI_R(1.0) / (moe_real)s->r->n_real, sum = MOEI_R(0.0);
    size_t t, e;
    for (e = 0; e < s->experts; e++) mean[e] = MOEI_R(0.0);
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t)) moe_axpy(s->router->kernels, s->experts, over_n, s->r->probabilities + t * s->experts, mean);
    for (e = 0; e < s->experts; e++) {
        moe_real log_m = mean[e] > MOEI_R(0.0) ? MOEI_F(log)(mean[e]) : MOEI_R(0.0);
        sum += mean[e] * log_m;
        mean[e] = mean[e] > MOEI_R(0.0) ? factor * over_n * (log_m + MOEI_R(1.0)) : MOEI_R(0.0);
    }
    for (t = 0; t < s->n && backward; t++)
        if (moei_is_real(s->call, t)) moe_axpy(s->router->kernels, s->experts, MOEI_R(1.0), mean, s->m.d_probabilities + t * s->experts);
    return factor * sum;
}

static moe_real moei_distance(const moe_real *a, const moe_real *b, size_t n) {
    moe_real sum = MOEI_R(0.0);
    size_t i;
    for (i = 0; i < n; i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return MOEI_F(sqrt)(sum);
}

/* Over ordered pairs of tokens: D (same/E sum_e p_e p'_e - diff/(E^2-E) sum_{e != e'} p_e p'_e'), divided by B^2 - B. */
static moe_real moei_loss_similarity(moei_pass *s, moe_real factor, int backward) {
    const moe_real *x = s->m.batch_x != NULL ? s->m.batch_x : s->call->x;
    size_t t, o, e, count = s->experts;
    moe_real pairs = (moe_real)s->r->n_real * ((moe_real)s->r->n_real - MOEI_R(1.0)), value = MOEI_R(0.0);
    moe_real same = s->c->loss_similarity_same / (moe_real)count;
    moe_real diff = count > 1 ? s->c->loss_similarity_diff / ((moe_real)count * ((moe_real)count - MOEI_R(1.0))) : MOEI_R(0.0);
    (void)factor;
    if (s->r->n_real < 2) return MOEI_R(0.0);
    for (t = 0; t < s->n; t++)
        for (o = 0; o < s->n; o++) {
            const moe_real *p = s->r->probabilities + t * count, *other = s->r->probabilities + o * count;
            moe_real distance, together = MOEI_R(0.0), mass = MOEI_R(0.0), other_mass = MOEI_R(0.0);
            if (t == o || !moei_is_real(s->call, t) || !moei_is_real(s->call, o)) continue;
            distance = s->call->distances != NULL ? s->call->distances[t * s->n + o] : moei_distance(x + t * s->d, x + o * s->d, s->d);
            distance /= pairs;
            for (e = 0; e < count; e++) together += p[e] * other[e], mass += p[e], other_mass += other[e];
            value += distance * (same * together - diff * (mass * other_mass - together));
            for (e = 0; e < count && backward; e++) { /* the pair in this order; the other order adds its own half */
                s->m.d_probabilities[t * count + e] += distance * (same * other[e] - diff * (other_mass - other[e]));
                s->m.d_probabilities[o * count + e] += distance * (same * p[e] - diff * (mass - p[e]));
            }
        }
    return value;
}

static size_t moei_home(const moei_pass *s, size_t t) { return s->call->home != NULL ? (size_t)s->call->home[t] : 0; }

static size_t moei_expert_node(const moei_pass *s, size_t e) {
    return s->call->expert_node != NULL ? (size_t)s->call->expert_node[e] : e * (size_t)s->c->nodes / s->experts;
}

/* mu sum_o pi_o KL(q_o || l_o): l_o has 1 - eps on node o and eps / (M - 1) on each other node. */
static moe_real moei_loss_locality(moei_pass *s, moe_real factor, int backward) {
    moe_real *q = s->m.row, value = MOEI_R(0.0), eps = MOEI_R(0.01);
    size_t nodes = (size_t)s->c->nodes, home, j, t, e;
    for (home = 0; home < nodes; home++) {
        size_t count = 0;
        for (t = 0; t < s->n; t++) {
            if (!moei_is_real(s->call, t) || moei_home(s, t) != home) continue;
            if (count++ == 0) memset(q, 0, nodes * sizeof *q); /* for homes of nobody there may be too many to do even this */
            for (e = 0; e < s->experts; e++) q[moei_expert_node(s, e)] += s->r->probabilities[t * s->experts + e];
        }
        if (count == 0) continue;
        for (j = 0; j < nodes; j++) { /* q becomes the slope ln(q/l) + 1 */
            moe_real wanted = j == home ? MOEI_R(1.0) - eps : eps / (moe_real)(nodes - 1), log_ratio;
            q[j] /= (moe_real)count;
            if (!(q[j] > MOEI_R(0.0))) {
                q[j] = MOEI_R(0.0);
                continue;
            }
            log_ratio = MOEI_F(log)(q[j] / wanted);
            value += (moe_real)count * q[j] * log_ratio;
            q[j] = log_ratio + MOEI_R(1.0);
        }
        for (t = 0; t < s->n && backward; t++)
            for (e = 0; e < s->experts; e++)
                if (moei_is_real(s->call, t) && moei_home(s, t) == home)
                    s->m.d_probabilities[t * s->experts + e] += factor / (moe_real)s->r->n_real * q[moei_expert_node(s, e)];
    }
    return factor * value / (moe_real)s->r->n_real;
}

/* lambda E / (K N^2) sum_e n_e sum_t p_te. */
static moe_real moei_loss_l1(moei_pass *s, moe_real factor, int backward) {
    moe_real scale = (moe_real)s->experts / ((moe_real)s->c->top_k * (moe_real)s->r->n_real * (moe_real)s->r->n_real), sum = MOEI_R(0.0);
    size_t t, e;
    for (t = 0; t < s->n; t++)
        for (e = 0; e < s->experts; e++) {
            if (!moei_is_real(s->call, t)) continue;
            sum += (moe_real)s->r->counts[e] * s->r->probabilities[t * s->experts + e];
            if (backward) s->m.d_probabilities[t * s->experts + e] += factor * scale * (moe_real)s->r->counts[e];
        }
    return factor * scale * sum;
}

/* The K-th largest noisy logit of a token among the experts other than e. */
static size_t moei_rival(const moei_pass *s, const int32_t *best, size_t e) {
    size_t i, k = (size_t)s->c->top_k;
    for (i = 0; i < k; i++)
        if ((size_t)best[i] == e) return (size_t)best[k];
    return (size_t)best[k - 1];
}

/* w CV^2 of load_e = sum_t Phi((clean z_te - the rival's noisy logit) / noise scale). */
static moe_real moei_loss_load(moei_pass *s, moe_real factor, int backward) {
    moe_real *load = s->m.row, value = MOEI_R(0.0);
    size_t t, e, count = s->experts, k = (size_t)s->c->top_k;
    int round;
    if (k >= count || !moei_is_noisy(s)) return MOEI_R(0.0);
    for (e = 0; e < count; e++) load[e] = MOEI_R(0.0);
    for (round = 0; round <= backward; round++) { /* first the loads, then, with dL/dload in load, the gradients */
        for (t = 0; t < s->n; t++) {
            if (!moei_is_real(s->call, t)) continue;
            (void)moe_top_k(count, s->r->logits + t * count, k + 1, s->m.order);
            for (e = 0; e < count; e++) {
                size_t cell = t * count + e, rival = t * count + moei_rival(s, s->m.order, e);
                moe_real scale = moei_noise_scale(s, cell), a = (s->m.clean_logits[cell] - s->r->logits[rival]) / scale, slope;
                if (round == 0) {
                    load[e] += MOEI_F(erfc)(-a * MOEI_R(0.70710678118654752440)) / MOEI_R(2.0);
                    continue;
                }
                slope = load[e] * MOEI_R(0.39894228040143267794) * MOEI_F(exp)(-a * a / MOEI_R(2.0)) / scale;
                s->m.d_clean[cell] += slope;
                s->m.d_logits[rival] -= slope;
                s->m.d_noise[cell] -= slope * a;
            }
        }
        if (round == 0) value = moei_squared_variation(s, factor, load);
    }
    return factor * value;
}

/* w sum over e != e' of cos(W_e, W_e')^2. */
static moe_real moei_loss_orthogonal(moei_pass *s, moe_real factor, int backward) {
    const moe_real *w = moei_tensor(s, MOE_ROUTER_WEIGHT);
    moe_real *d_w = backward && moei_scores[s->c->score].has_parameters ? moei_gradient(s, MOE_ROUTER_WEIGHT) : NULL, sum = MOEI_R(0.0);
    size_t width = s->c->score == MOE_SCORE_COSINE && s->c->cosine_dim > 0 ? (size_t)s->c->cosine_dim : s->d, a, b;
    const moe_kernels *k = s->router->kernels;
    for (a = 0; a < s->experts; a++)
        for (b = 0; b < a; b++) {
            const moe_real *wa = w + a * width, *wb = w + b * width;
            moe_real ia = moei_inverse_length(k, wa, width), ib = moei_inverse_length(k, wb, width), cosine = moe_dot(k, width, wa, wb) * ia * ib;
            moe_real slope = MOEI_R(4.0) * factor * cosine;
            sum += MOEI_R(2.0) * cosine * cosine;
            if (d_w == NULL) continue;
            moe_axpy(k, width, slope * ia * ib, wb, d_w + a * width);
            moe_axpy(k, width, -(slope * cosine * ia * ia), wa, d_w + a * width);
            moe_axpy(k, width, slope * ia * ib, wa, d_w + b * width);
            moe_axpy(k, width, -(slope * cosine * ib * ib), wb, d_w + b * width);
        }
    return factor * sum;
}

/* The distance of softmax(v) from the teacher's, of one token: ce_hard -ln q_best, ce_soft - sum p ln q, mse sum (q - p)^2 / E. q and p [E] are scratch;
   adds slope times its gradient to d_v when that is there. */
static moe_real moei_distill(const moei_pass *s, const moe_real *v, const moe_real *teacher, moe_real *q, moe_real *p, moe_real slope, moe_real *d_v) {
    size_t e, best = 0, count = s->experts;
    moe_real lse = moe_log_sum_exp(count, v), value = MOEI_R(0.0);
    int mse = s->c->distill == MOE_DISTILL_MSE;
    moe_softmax(s->router->kernels, count, v, MOEI_R(1.0), q);
    moe_softmax(s->router->kernels, count, teacher, MOEI_R(1.0), p);
    for (e = 1; e < count; e++)
        if (teacher[e] > teacher[best]) best = e;
    for (e = 0; e < count; e++) {
        if (s->c->distill == MOE_DISTILL_CE_HARD) p[e] = e == best ? MOEI_R(1.0) : MOEI_R(0.0);
        value += mse ? (q[e] - p[e]) * (q[e] - p[e]) / (moe_real)count : p[e] * (lse - v[e]);
        p[e] = mse ? MOEI_R(2.0) / (moe_real)count * (q[e] - p[e]) : q[e] - p[e]; /* d/dq, or d/dv at once */
    }
    if (d_v == NULL) return value;
    for (e = 0; e < count; e++) p[e] *= slope;
    if (mse) moe_softmax_backward(count, q, p, MOEI_R(1.0), d_v);
    else moe_axpy(s->router->kernels, count, MOEI_R(1.0), p, d_v);
    return value;
}

/* factor mean_t of that: between the student and this router, or this router and the caller's teacher. */
static moe_real moei_loss_distill(moei_pass *s, moe_real factor, int backward) {
    const moe_real *v = s->c->student ? s->m.student_logits : s->r->logits, *teacher = s->c->student ? s->r->logits : s->call->teacher;
    moe_real *d_v = s->c->student ? s->m.d_student : s->m.d_logits, sum = MOEI_R(0.0), share = factor / (moe_real)s->r->n_real;
    size_t t;
    for (t = 0; t < s->n; t++) {
        size_t row = t * s->experts;
        if (!moei_is_real(s->call, t)) continue;
        sum += moei_distill(s, v + row, teacher + row, s->m.row, s->m.row + s->experts, share, backward ? d_v + row : NULL);
    }
    return share * sum;
}

#endif

typedef struct moei_loss {
    const char *name;
    size_t factor; /* place of the factor in the configuration */
    moe_real (*value)(moei_pass *s, moe_real factor, int backward);
} moei_loss;

static const moei_loss moei_losses[MOE_LOSS_COUNT] = {
    {"balance", offsetof(moe_router_config, loss_balance), MOEI_BACKWARD(moei_loss_balance)},
    {"z", offsetof(moe_router_config, loss_z), MOEI_BACKWARD(moei_loss_z)},
    {"importance", offsetof(moe_router_config, loss_importance), MOEI_BACKWARD(moei_loss_importance)},
    {"entropy", offsetof(moe_router_config, loss_entropy), MOEI_BACKWARD(moei_loss_entropy)},
    {"usage_entropy", offsetof(moe_router_config, loss_usage_entropy), MOEI_BACKWARD(moei_loss_usage_entropy)},
    {"similarity", offsetof(moe_router_config, loss_similarity_same), MOEI_BACKWARD(moei_loss_similarity)},
    {"locality", offsetof(moe_router_config, loss_locality), MOEI_BACKWARD(moei_loss_locality)},
    {"l1", offsetof(moe_router_config, loss_l1), MOEI_BACKWARD(moei_loss_l1)},
    {"orthogonal", offsetof(moe_router_config, loss_orthogonal), MOEI_BACKWARD(moei_loss_orthogonal)},
    {"load", offsetof(moe_router_config, loss_load), MOEI_BACKWARD(moei_loss_load)},
    {"distill", offsetof(moe_router_config, loss_distill), MOEI_BACKWARD(moei_loss_distill)}};

const char *moe_loss_name(int loss) { return loss >= 0 && loss < MOE_LOSS_COUNT ? moei_losses[loss].name : NULL; }

MOEI_TOOL moe_real moei_loss_factor(const moe_router_config *c, int loss) {
    moe_real factor;
    memcpy(&factor, (const unsigned char *)c + moei_losses[loss].factor, sizeof factor);
    if (loss == MOE_LOSS_SIMILARITY && c->loss_similarity_diff > factor) return c->loss_similarity_diff; /* it has two factors; either turns it on */
    return factor;
}

/* ==== the configuration as a whole ======================================================================================================= */

static void moei_default(int *field, int value) {
    if (*field == 0) *field = value;
}

static void moei_default_real(moe_real *field, moe_real value) {
    if (!(*field < MOEI_R(0.0)) && !(*field > MOEI_R(0.0))) *field = value;
}

static void moei_router_defaults(moe_router_config *c) {
    moei_default(&c->n_experts, 8);
    moei_default(&c->top_k, c->n_experts < 2 ? 1 : 2);
    moei_default_real(&c->jitter_eps, MOEI_R(0.01));
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) moei_default(&c->ac_mix, 1);
    moei_default_real(&c->noise_floor, MOEI_R(0.01));
    moei_default_real(&c->noise_sigma, MOEI_R(1.0) / (moe_real)c->n_experts);
    moei_default_real(&c->similarity_tau, MOEI_R(1.0));
    moei_default_real(&c->attention_sigma, MOEI_R(1.0));
    moei_default(&c->heads, 1);
    moei_default(&c->slots, 1);
    moei_default(&c->soft_sequences, 1);
    moei_default(&c->groups, 1);
    moei_default(&c->groups_kept, 1);
    moei_default_real(&c->top_p, MOEI_R(0.6));
    moei_default_real(&c->threshold, MOEI_R(0.05));
    moei_default_real(&c->affinity_mass, MOEI_R(1.0));
    if (c->select == MOE_SELECT_EXPERT_CHOICE) moei_default_real(&c->capacity_factor, MOEI_R(1.0));
    moei_default_real(&c->capacity_factor_eval, c->capacity_factor);
    moei_default(&c->capacity_min, 1);
    moei_default(&c->nodes, 1);
    moei_default_real(&c->cosine_tau, MOEI_R(1.0));
    if (c->score == MOE_SCORE_MLP) moei_default(&c->router_hidden, c->d_model);
    moei_default_real(&c->gate_temperature, MOEI_R(1.0));
    moei_default_real(&c->weight_p, MOEI_R(1.0));
    moei_default_real(&c->sparsemixer_eps, MOEI_R(0.01));
    moei_default_real(&c->scale, MOEI_R(1.0));
    if (c->ac_mode == MOE_AC_RUNNING) moei_default_real(&c->ac_rho, MOEI_R(0.9));
    if (c->l1_controller) moei_default_real(&c->loss_l1, MOEI_R(1e-8));
}

/* Of fields that belong together, the one that is set without the one it needs. */
static moe_status moei_needs(const moe_router_config *c, const char *name, const char *needed, moe_error *error) {
    const moe_field *field = moe_field_find(moei_router_fields, name);
    char value[40];
    moe_field_text(field, c, value, sizeof value);
    return moei_error(error, MOE_ERR_CONFIG, "%s = %s needs %s", name, value, needed);
}

/* Whether a score has gating vectors that a token can be compared with. */
static int moei_has_vectors(int score) {
    return score == MOE_SCORE_LINEAR || score == MOE_SCORE_RANDOM || score == MOE_SCORE_COSINE || score == MOE_SCORE_GRAP;
}

/* State, schedules and what has to do with them. */
static moe_status moei_state_clashes(const moe_router_config *c, moe_error *error) {
    int steps = c->schedule_steps > 0, from = c->switch_from, tau = c->tau_schedule;
    if (c->bias_rate > MOEI_R(0.0) && !c->selection_bias) return moei_needs(c, "bias_rate", "selection_bias = 1", error);
    if (c->ac_rho > MOEI_R(0.0) && c->ac_mode != MOE_AC_RUNNING) return moei_needs(c, "ac_rho", "ac_mode = running", error);
    if (c->k_end > 0 && !steps) return moei_needs(c, "k_end", "schedule_steps", error);
    if (tau != MOE_TAU_NONE && !steps) return moei_needs(c, "tau_schedule", "schedule_steps", error);
    if (tau != MOE_TAU_NONE && !(c->tau_end > MOEI_R(0.0))) return moei_needs(c, "tau_schedule", "tau_end", error);
    if (tau == MOE_TAU_NONE && c->tau_end > MOEI_R(0.0)) return moei_needs(c, "tau_end", "tau_schedule", error);
    if (steps && c->k_end == 0 && tau == MOE_TAU_NONE) return moei_needs(c, "schedule_steps", "k_end or tau_schedule", error);
    if (tau == MOE_TAU_COSINE_TAU && (c->score != MOE_SCORE_COSINE || c->cosine_learn_tau))
        return moei_needs(c, "tau_schedule", "score = cosine with cosine_learn_tau = 0", error);
    if (tau == MOE_TAU_SIMILARITY_TAU && c->refine != MOE_REFINE_SIMILARITY)
        return moei_needs(c, "tau_schedule", "refine = similarity", error);
    if (tau == MOE_TAU_ATTENTION_SIGMA && c->refine != MOE_REFINE_ATTENTION)
        return moei_needs(c, "tau_schedule", "refine = attention", error);
    if (c->k_end > c->n_experts) return moei_error(error, MOE_ERR_CONFIG, "k_end = %d: must be at most n_experts = %d", c->k_end, c->n_experts);
    if (c->k_end > 0 && c->score == MOE_SCORE_DSELECT)
        return moei_error(error, MOE_ERR_CONFIG, "k_end = %d does not go with score = dselect: K is the number of its codes", c->k_end);
    if (c->k_end > 0 && !(c->select == MOE_SELECT_TOP_K || c->select == MOE_SELECT_SINKHORN || c->select == MOE_SELECT_SAMPLE))
        return moei_error(error, MOE_ERR_CONFIG, "k_end = %d does not go with select = %s: only top_k, sinkhorn and sample take another K", c->k_end,
                          moei_select_names[c->select]);
    if (from != 0 && c->switch_at == 0) return moei_needs(c, "switch_from", "switch_at", error);
    if (from == MOE_SELECT_BALANCED && c->top_k != 1)
        return moei_error(error, MOE_ERR_CONFIG, "switch_from = balanced needs top_k = 1, not top_k = %d: it gives each token one expert", c->top_k);
    if (c->switch_at > 0 && (from == MOE_SELECT_SOFT || from == MOE_SELECT_GIVEN || from == MOE_SELECT_HASH || from == MOE_SELECT_EXPERT_CHOICE ||
                             from == MOE_SELECT_GROUPED_TOP_K))
        return moei_error(error, MOE_ERR_CONFIG, "switch_from = %s does not go with switch_at = %d: it needs settings of its own", moei_select_names[from], c->switch_at);
    if (c->switch_at > 0 && (c->select == MOE_SELECT_SOFT || c->weight == MOE_WEIGHT_SPARSEMIXER))
        return moei_error(error, MOE_ERR_CONFIG, "switch_at = %d does not go with %s", c->switch_at,
                          c->select == MOE_SELECT_SOFT ? "select = soft" : "weight = sparsemixer");
    if (c->l1_controller && c->select != MOE_SELECT_POSITIVE) return moei_needs(c, "l1_controller", "select = positive", error);
    if (c->capacity_bound != MOE_BOUND_NONE && !moei_has_vectors(c->score))
        return moei_error(error, MOE_ERR_CONFIG, "capacity_bound = %s does not go with score = %s: it has no gating vectors", moei_bound_names[c->capacity_bound],
                          moei_score_names[c->score]);
    if (c->capacity_bound != MOE_BOUND_NONE && (c->select == MOE_SELECT_SOFT || c->select == MOE_SELECT_EXPERT_CHOICE))
        return moei_error(error, MOE_ERR_CONFIG, "capacity_bound = %s does not go with select = %s", moei_bound_names[c->capacity_bound], moei_select_names[c->select]);
    if (c->capacity_rho > MOEI_R(0.0) && c->capacity_bound != MOE_BOUND_EVERY)
        return moei_needs(c, "capacity_rho", "capacity_bound = every", error);
    if (c->student && c->freeze_at == 0) return moei_needs(c, "student", "freeze_at", error);
    if (c->student && !(c->loss_distill > MOEI_R(0.0))) return moei_needs(c, "student", "loss_distill", error);
    if (c->student && (c->select == MOE_SELECT_SOFT || c->weight == MOE_WEIGHT_SPARSEMIXER))
        return moei_error(error, MOE_ERR_CONFIG, "student = 1 does not go with %s", c->select == MOE_SELECT_SOFT ? "select = soft" : "weight = sparsemixer");
    if (c->distill != 0 && !(c->loss_distill > MOEI_R(0.0))) return moei_needs(c, "distill", "loss_distill", error);
    if (c->custom_batch && c->score != MOE_SCORE_CUSTOM && c->select != MOE_SELECT_CUSTOM && from != MOE_SELECT_CUSTOM)
        return moei_needs(c, "custom_batch", "score or select = custom", error);
    return MOE_OK;
}

/* Fields that clash: when the left one has its value, the right one must be 0 (or of the one value that works). */
static moe_status moei_router_clashes(const moe_router_config *c, moe_error *error) {
    moe_status status = moei_state_clashes(c, error);
    if (status != MOE_OK) return status;
    if (c->top_k > c->n_experts)
        return moei_error(error, MOE_ERR_CONFIG, "top_k = %d: must be at most n_experts = %d", c->top_k, c->n_experts);
    if (c->select == MOE_SELECT_BALANCED && c->top_k != 1)
        return moei_error(error, MOE_ERR_CONFIG, "select = balanced needs top_k = 1, not top_k = %d: it gives each token one expert", c->top_k);
    if (c->weight == MOE_WEIGHT_SPARSEMIXER && c->select != MOE_SELECT_TOP_K)
        return moei_error(error, MOE_ERR_CONFIG, "weight = sparsemixer goes only with select = top_k, not with select = %s", moei_select_names[c->select]);
    if (c->weight == MOE_WEIGHT_SPARSEMIXER && c->selection_bias)
        return moei_error(error, MOE_ERR_CONFIG, "weight = sparsemixer does not go with selection_bias = 1: its picks are made by the logits alone");
    if (moei_is_soft(c)) {
        const moe_field *field;
        static const char *const alone[] = {"score", "router_bias", "noise", "gate", "refine", "selection_bias", "weight", "expert_scale", "apply_to", "loss_balance",
                                            "loss_z", "loss_importance", "loss_entropy", "loss_usage_entropy", "loss_similarity_same",
                                            "loss_similarity_diff", "loss_locality", "loss_l1", "loss_load", "loss_orthogonal", "loss_distill", "drop_capacity",
                                            "capacity_factor", "expert_temperature"};
        size_t i;
        for (i = 0; i < sizeof alone / sizeof alone[0]; i++) {
            char value[40];
            field = moe_field_find(moei_router_fields, alone[i]);
            if (moei_field_is_zero(field, c)) continue;
            moe_field_text(field, c, value, sizeof value);
            return moei_error(error, MOE_ERR_CONFIG, "%s = %s does not go with select = soft: it takes no part there", field->name, value);
        }
        if (c->scale < MOEI_R(1.0) || c->scale > MOEI_R(1.0))
            return moei_error(error, MOE_ERR_CONFIG, "scale = %g does not go with select = soft: it takes no part there", (double)c->scale);
    } else if (c->slots > 1 || c->soft_normalise || c->soft_sequences > 1)
        return moei_error(error, MOE_ERR_CONFIG, "%s is set but select = %s: it belongs to select = soft",
                          c->slots > 1 ? "slots" : c->soft_normalise ? "soft_normalise" : "soft_sequences", moei_select_names[c->select]);
    if (c->refine != MOE_REFINE_NONE && (c->weight == MOE_WEIGHT_SOFTMAX || c->weight == MOE_WEIGHT_SPARSEMIXER))
        return moei_error(error, MOE_ERR_CONFIG, "weight = %s does not go with refine = %s: it reads the logits, not what refining made of them",
                          moei_weight_names[c->weight], moei_refine_names[c->refine]);
    if (c->similarity_learned && c->refine != MOE_REFINE_SIMILARITY)
        return moei_error(error, MOE_ERR_CONFIG, "similarity_learned = 1 does not go with refine = %s", moei_refine_names[c->refine]);
    if ((c->lower_entropy_only || c->causal) && c->refine == MOE_REFINE_NONE)
        return moei_error(error, MOE_ERR_CONFIG, "%s = 1 does not go with refine = none", c->causal ? "causal" : "lower_entropy_only");
    if (c->attention_head >= c->heads)
        return moei_error(error, MOE_ERR_CONFIG, "attention_head = %d: must be below heads = %d", c->attention_head, c->heads);
    if (c->loss_load > MOEI_R(0.0) && c->noise != MOE_NOISE_NOISY_TOPK && c->noise != MOE_NOISE_GAUSSIAN)
        return moei_error(error, MOE_ERR_CONFIG, "loss_load = %g does not go with noise = %s: the load is smooth only under normal noise",
                          (double)c->loss_load, moei_noise_names[c->noise]);
    if (c->score == MOE_SCORE_GRAP && c->d_model % c->n_experts != 0)
        return moei_error(error, MOE_ERR_CONFIG, "score = grap: n_experts = %d must divide d_model = %d", c->n_experts, c->d_model);
    if (c->grap_cosine && c->score != MOE_SCORE_GRAP)
        return moei_error(error, MOE_ERR_CONFIG, "grap_cosine = 1 does not go with score = %s", moei_score_names[c->score]);
    if (c->n_experts % c->groups != 0)
        return moei_error(error, MOE_ERR_CONFIG, "groups = %d: must divide n_experts = %d", c->groups, c->n_experts);
    if (c->groups_kept > c->groups)
        return moei_error(error, MOE_ERR_CONFIG, "groups_kept = %d: must be at most groups = %d", c->groups_kept, c->groups);
    if (c->select == MOE_SELECT_GROUPED_TOP_K && c->top_k > c->groups_kept * (c->n_experts / c->groups))
        return moei_error(error, MOE_ERR_CONFIG, "top_k = %d: groups_kept = %d groups hold only %d experts", c->top_k, c->groups_kept, c->groups_kept * (c->n_experts / c->groups));
    if (c->groups > 1 && c->select != MOE_SELECT_GROUPED_TOP_K)
        return moei_error(error, MOE_ERR_CONFIG, "groups = %d does not go with select = %s: it belongs to select = grouped_top_k", c->groups, moei_select_names[c->select]);
    if (c->threshold_learned && c->select != MOE_SELECT_THRESHOLD)
        return moei_error(error, MOE_ERR_CONFIG, "threshold_learned = 1 does not go with select = %s: it belongs to select = threshold", moei_select_names[c->select]);
    if (c->threshold_learned && moei_weights[c->weight].counts_choices < 0)
        return moei_error(error, MOE_ERR_CONFIG, "threshold_learned = 1 does not go with weight = %s: theta would get no gradient", moei_weight_names[c->weight]);
    if (c->threshold_sigmoid && !c->threshold_learned) return moei_needs(c, "threshold_sigmoid", "threshold_learned = 1", error);
    if (c->threshold_sigmoid && !(c->threshold > MOEI_R(0.0) && c->threshold < MOEI_R(1.0)))
        return moei_error(error, MOE_ERR_CONFIG, "threshold = %g does not go with threshold_sigmoid = 1: it must lie between 0 and 1", (double)c->threshold);
    if (c->select == MOE_SELECT_HASH && c->table_size == 0)
        return moei_error(error, MOE_ERR_CONFIG, "table_size = 0: select = hash needs the number of token ids");
    if (c->select != MOE_SELECT_HASH && c->table_size != 0)
        return moei_error(error, MOE_ERR_CONFIG, "table_size = %d does not go with select = %s: it belongs to select = hash", c->table_size, moei_select_names[c->select]);
    if (c->loss_orthogonal > MOEI_R(0.0) && c->score != MOE_SCORE_LINEAR && c->score != MOE_SCORE_RANDOM && c->score != MOE_SCORE_COSINE)
        return moei_error(error, MOE_ERR_CONFIG, "loss_orthogonal = %g does not go with score = %s: it has no router.weight", (double)c->loss_orthogonal, moei_score_names[c->score]);
    if (c->loss_locality > MOEI_R(0.0) && c->nodes < 2)
        return moei_error(error, MOE_ERR_CONFIG, "loss_locality = %g needs nodes of at least 2", (double)c->loss_locality);
    if (c->router_bias && c->score != MOE_SCORE_LINEAR && c->score != MOE_SCORE_RANDOM)
        return moei_error(error, MOE_ERR_CONFIG, "router_bias = 1 does not go with score = %s: only linear and random have one", moei_score_names[c->score]);
    if ((c->cosine_dim > 0 || c->cosine_keep_length || c->cosine_learn_tau) && c->score != MOE_SCORE_COSINE)
        return moei_error(error, MOE_ERR_CONFIG, "%s is set but score = %s: it belongs to score = cosine",
                          c->cosine_dim > 0 ? "cosine_dim" : c->cosine_keep_length ? "cosine_keep_length" : "cosine_learn_tau", moei_score_names[c->score]);
    return MOE_OK;
}

/* The field of a configuration whose value MOE_KEEP_ masks have left out of this build; NULL: none. */
static const char *moei_left_out(const moe_router_config *c) {
    if (!MOEI_KEPT(INPUTS, c->input)) return "input";
    if (!MOEI_KEPT(SCORES, c->score)) return "score";
    if (!MOEI_KEPT(GATES, c->gate)) return "gate";
    if (!MOEI_KEPT(REFINES, c->refine)) return "refine";
    if (!MOEI_KEPT(SELECTS, c->select)) return "select";
    if (c->switch_at > 0 && !MOEI_KEPT(SELECTS, c->switch_from)) return "switch_from";
    if (c->student && !MOEI_KEPT(SELECTS, MOE_SELECT_TOP_K)) return "student";
    if (!MOEI_KEPT(WEIGHTS, c->weight)) return "weight";
    if ((c->score == MOE_SCORE_MLP || c->score == MOE_SCORE_ATTENTIVE) && !MOEI_KEPT(ACTS, c->router_act)) return "router_act";
    if (c->gate == MOE_GATE_SIGMOID && !MOEI_KEPT(ACTS, MOE_ACT_SIGMOID)) return "gate";
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_SCHEDULE)) {
        if (c->schedule_steps > 0 || c->freeze_at > 0) return c->schedule_steps > 0 ? "schedule_steps" : "freeze_at";
        if (c->switch_at > 0 || c->l1_controller) return c->switch_at > 0 ? "switch_at" : "l1_controller";
    }
    if (MOEI_KEPT(EXTRAS, MOE_EXTRA_CAPACITY)) return NULL;
    if (c->capacity_factor > MOEI_R(0.0) || c->capacity_factor_eval > MOEI_R(0.0)) return "capacity_factor";
    if (c->drop_capacity > 0 || c->capacity_bound != MOE_BOUND_NONE) return c->drop_capacity > 0 ? "drop_capacity" : "capacity_bound";
    return c->drop_rule != MOE_DROP_RULE_NONE ? "drop_rule" : NULL;
}

moe_status moe_router_check(const moe_router_config *config, moe_router_config *out, moe_error *error) {
    moe_router_config c;
    moe_status status;
    char text[40];
    const char *left_out;
    if (config == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "config must not be NULL");
    c = *config;
    if (c.d_model == 0) return moei_error(error, MOE_ERR_CONFIG, "d_model = 0: the width of a token must be set, 1 to %d", (int)MOE_MAX_WIDTH);
    status = moei_fields_check(moei_router_fields, &c, error);
    if (status != MOE_OK) return status;
    moei_router_defaults(&c);
    status = moei_router_clashes(&c, error);
    if (status != MOE_OK) return status;
    if ((left_out = moei_left_out(&c)) != NULL) {
        moe_field_text(moe_field_find(moei_router_fields, left_out), &c, text, sizeof text);
        return moei_error(error, MOE_ERR_UNSUPPORTED, "%s = %s: a MOE_KEEP_ macro has left it out of this build", left_out, text);
    }
    if (out != NULL) *out = c;
    return MOE_OK;
}

#ifndef MOE_NO_TRAIN
moe_status moe_router_check_training(const moe_router_config *config, moe_error *error) {
    moe_router_config c;
    int loss, reached = 0;
    moe_status status = moe_router_check(config, &c, error);
    if (status != MOE_OK) return status;
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++)
        if (loss != MOE_LOSS_DISTILL || !c.student) reached |= moei_loss_factor(&c, loss) > MOEI_R(0.0);
    if (c.untrained || reached || !moei_scores[c.score].has_parameters) return MOE_OK;
    if (c.top_k == 1 && c.k_end < 2 && moei_selects[c.select].k_per_token && moei_weights[c.weight].constant_for_one)
        return moei_error(error, MOE_ERR_CONFIG,
                          "top_k = 1 with weight = %s: the weight is always 1, so the router would never learn; use weight = raw, a loss, or untrained = 1",
                          moei_weight_names[c.weight]);
    return MOE_OK;
}
#endif

unsigned moe_router_traits(const moe_router_config *config) {
    unsigned traits = 0;
    int later = 0; /* whether later tokens are seen */
    if (config->score >= 0 && config->score < MOE_SCORE_COUNT) traits |= moei_scores[config->score].traits;
    if (config->select >= 0 && config->select < MOE_SELECT_COUNT) traits |= moei_selects[config->select].traits;
    if (config->switch_at > 0 && config->switch_from >= 0 && config->switch_from < MOE_SELECT_COUNT) traits |= moei_selects[config->switch_from].traits;
    if (config->selection_bias || config->schedule_steps > 0 || config->freeze_at > 0 || config->switch_at > 0 || config->l1_controller ||
        config->capacity_bound == MOE_BOUND_FIRST || config->capacity_rho > MOEI_R(0.0))
        traits |= MOE_TRAIT_STATEFUL;
    /* selections over all tokens see later ones, and so does a capacity */
    if ((traits & MOE_TRAIT_NEEDS_BATCH) || config->custom_batch || config->capacity_factor > MOEI_R(0.0) ||
        config->capacity_factor_eval > MOEI_R(0.0) || config->drop_capacity > 0 || config->capacity_bound != MOE_BOUND_NONE)
        later = 1;
    if (config->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        traits |= MOE_TRAIT_NEEDS_PREVIOUS_LAYER;
        if (config->ac_mode == MOE_AC_PAPER || config->ac_mode == MOE_AC_CODE) later = 1;
        if (config->ac_mode == MOE_AC_RUNNING) traits |= MOE_TRAIT_STATEFUL;
    }
    if (config->refine != MOE_REFINE_NONE) {
        traits |= MOE_TRAIT_NEEDS_BATCH;
        if (!config->causal || (config->refine == MOE_REFINE_ATTENTION && config->attention_heads == MOE_HEADS_MIN_ENTROPY)) later = 1;
    }
    if (config->refine == MOE_REFINE_ATTENTION) traits |= MOE_TRAIT_NEEDS_ATTENTION;
    if (config->noise != MOE_NOISE_NONE) traits |= MOE_TRAIT_STOCHASTIC;
    if (config->input == MOE_INPUT_JITTER || config->drop_order == MOE_DROP_RANDOM || config->drop_rule != 0) traits |= MOE_TRAIT_STOCHASTIC;
    if (later) traits |= MOE_TRAIT_NEEDS_BATCH;
    else traits |= MOE_TRAIT_CAUSAL;
    return traits;
}

/* What keeps a router from decoding: a field's setting, and what to do; NULL, NULL when nothing does. The trait behind all of them is needs_batch. */
typedef struct moei_obstacle {
    const char *field, *remedy;
} moei_obstacle;

/* Outside training a capacity as large as the batch drops nothing; a quotient that was rounded down counts as whole. */
static int moei_may_drop(const moe_router_config *c, int k) {
    if (c->drop_capacity > 0) return 1;
    if (c->capacity_factor_eval > MOEI_R(0.0)) return c->capacity_factor_eval * (moe_real)k < (moe_real)c->n_experts * MOEI_R(0.999999);
    return c->capacity_bound != MOE_BOUND_NONE;
}

/* Whether a selection reads other tokens outside training. */
static int moei_needs_others(int select) {
    return (moei_selects[select].traits & MOE_TRAIT_NEEDS_BATCH) != 0 && !moei_selects[select].batch_in_training_only;
}

static moei_obstacle moei_decoding_obstacle(const moe_router_config *c) {
    static const moei_obstacle select = {"select", "select = top_k, or another choice by tokens, decodes"},
                               from = {"switch_from", "switch_from = top_k, or another choice by tokens, decodes"},
                               custom = {"custom_batch", "custom stages that read only their own token (custom_batch = 0) decode"},
                               clustering = {"ac_mode", "ac_mode = running decodes"},
                               heads = {"attention_heads", "attention_heads = fixed with causal = 1 decodes"},
                               refine = {"refine", "causal = 1 decodes"},
                               count = {"drop_capacity", "capacity_factor_eval = n_experts / top_k instead, which drops nothing, decodes"},
                               factor = {"capacity_factor_eval", "capacity_factor_eval = n_experts / top_k, which drops nothing, decodes"},
                               least = {"k_end", "capacity_factor_eval = n_experts / k_end, which drops nothing, decodes"},
                               bound = {"capacity_bound", "capacity_factor_eval = n_experts / top_k, which drops nothing, decodes"}, none = {NULL, NULL};
    if (moei_needs_others(c->select)) return select;
    if (c->switch_at > 0 && moei_needs_others(c->switch_from)) return from;
    if (c->custom_batch) return custom;
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING && (c->ac_mode == MOE_AC_PAPER || c->ac_mode == MOE_AC_CODE)) return clustering;
    if (c->refine == MOE_REFINE_ATTENTION && c->attention_heads == MOE_HEADS_MIN_ENTROPY) return heads;
    if (c->refine != MOE_REFINE_NONE && !c->causal) return refine;
    if (!moei_may_drop(c, c->top_k)) return c->k_end > 0 && moei_may_drop(c, c->k_end) ? least : none;
    return c->drop_capacity > 0 ? count : c->capacity_factor_eval > MOEI_R(0.0) ? factor : bound;
}

moe_status moe_router_check_decoding(const moe_router_config *config, moe_error *error) {
    moe_router_config c;
    moei_obstacle o;
    char value[40];
    moe_status status = moe_router_check(config, &c, error);
    if (status != MOE_OK) return status;
    o = moei_decoding_obstacle(&c);
    if (o.field == NULL) return MOE_OK;
    moe_field_text(moe_field_find(moei_router_fields, o.field), &c, value, sizeof value);
    return moei_error(error, MOE_ERR_UNSUPPORTED, "%s = %s has the trait %s: this router is not causal and cannot decode token by token; %s", o.field, value,
                      moe_trait_name(MOE_TRAIT_NEEDS_BATCH), o.remedy);
}

const char *moe_trait_name(unsigned trait) {
    static const char *const names[] = {"causal",         "needs_batch", "needs_token_ids", "needs_attention", "needs_previous_layer", "needs_all_experts",
                                        "stochastic", "stateful",    "needs_given"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0]; i++)
        if (trait == 1u << i) return names[i];
    return NULL;
}

/* ==== presets ============================================================================================================================== */

static const moe_preset moei_presets[] = {
    {"smoe", "sparse_moe",
     "Shazeer et al. 2017, Outrageously large neural networks: the sparsely-gated mixture-of-experts layer",
     "w = softmax over the top K logits",
     "n_experts=16 top_k=2 weight=softmax router_bias=1", ""},
    {"similarity_smoe", "",
     "Nguyen et al. 2025, Improving routing in sparse mixture of experts with graph of tokens",
     "smoe with p_i = sum_j softmax_j(u_i . u_j / tau) r_j",
     "n_experts=16 top_k=2 router_bias=1 refine=similarity", ""},
    {"attention_smoe", "",
     "Nguyen et al. 2025, Improving routing in sparse mixture of experts with graph of tokens",
     "smoe with p_i = sum_j A'_ij r_j, A' the posterior of the attention head with the least entropy",
     "n_experts=16 top_k=2 router_bias=1 refine=attention", ""},
    {"similarity_glam", "",
     "Nguyen et al. 2025, Improving routing in sparse mixture of experts with graph of tokens",
     "glam with p_i = sum_j softmax_j(u_i . u_j / tau) r_j",
     "n_experts=16 top_k=2 refine=similarity", ""},
    {"attention_glam", "",
     "Nguyen et al. 2025, Improving routing in sparse mixture of experts with graph of tokens",
     "glam with p_i = sum_j A'_ij r_j, A' the posterior of the attention head with the least entropy",
     "n_experts=16 top_k=2 refine=attention", ""},
    {"similarity_xmoe", "",
     "Nguyen et al. 2025, Improving routing in sparse mixture of experts with graph of tokens",
     "xmoe with p_i = sum_j softmax_j(u_i . u_j / tau) r_j",
     "n_experts=16 top_k=2 score=cosine cosine_dim=8 cosine_learn_tau=1 refine=similarity", ""},
    {"attention_xmoe", "",
     "Nguyen et al. 2025, Improving routing in sparse mixture of experts with graph of tokens",
     "xmoe with p_i = sum_j A'_ij r_j, A' the posterior of the attention head with the least entropy",
     "n_experts=16 top_k=2 score=cosine cosine_dim=8 cosine_learn_tau=1 refine=attention", ""},
    {"similarity_smoe_dropout", "",
     "Nguyen et al. 2025, Improving routing in sparse mixture of experts with graph of tokens",
     "smoe_dropout with p_i = sum_j softmax_j(u_i . u_j / tau) r_j",
     "n_experts=16 top_k=2 score=random refine=similarity", ""},
    {"attention_smoe_dropout", "",
     "Nguyen et al. 2025, Improving routing in sparse mixture of experts with graph of tokens",
     "smoe_dropout with p_i = sum_j A'_ij r_j, A' the posterior of the attention head with the least entropy",
     "n_experts=16 top_k=2 score=random refine=attention", ""},
    {"glam", "",
     "Du et al. 2022, GLaM: efficient scaling of language models with mixture-of-experts",
     "smoe without bias, on every other layer of a net",
     "n_experts=16 top_k=2 weight=softmax", ""},
    {"switch", "switch_transformer",
     "Fedus, Zoph, Shazeer 2022, Switch transformers",
     "w = p of the best expert; balance over first choices",
     "n_experts=16 top_k=1 weight=raw loss_balance=0.01 balance_over=first", "expert=mlp act=relu"},
    {"gshard", "",
     "Lepikhin et al. 2020, GShard: scaling giant models with conditional computation and automatic sharding",
     "w = p / sum p over the top 2; the second kept with probability 2 w_2; capacity",
     "n_experts=16 top_k=2 weight=sum loss_balance=0.01 balance_over=first capacity_factor=2 drop_rule=gshard", "expert=mlp act=relu"},
    {"noisy_topk", "shazeer",
     "Shazeer et al. 2017, Outrageously large neural networks: the sparsely-gated mixture-of-experts layer",
     "w = softmax over the top K of z + n softplus(W_n u); importance and load",
     "n_experts=16 top_k=2 noise=noisy_topk weight=softmax loss_importance=0.1 importance_over=weights unbiased=1 loss_load=0.1", "expert=mlp act=relu"},
    {"vmoe", "",
     "Riquelme et al. 2021, Scaling vision with sparse mixture of experts",
     "w = p of the top 2, noise 1/E, importance over the clean gate, load",
     "n_experts=16 top_k=2 noise=gaussian weight=raw loss_importance=0.005 importance_over=gate loss_load=0.005 capacity_factor=1.05 drop_order=priority", "expert=mlp act=gelu"},
    {"xmoe", "",
     "Chi et al. 2022, On the representation collapse of sparse mixture of experts",
     "z = cos(P u, W_e) / tau, tau learned",
     "n_experts=16 top_k=2 score=cosine cosine_dim=8 cosine_learn_tau=1", ""},
    {"xmoe_code", "",
     "the public program of Chi et al. 2022",
     "z = (P u) . W_e / |W_e| / tau: the length of the token stays in",
     "n_experts=16 top_k=2 score=cosine cosine_dim=8 cosine_keep_length=1 weight=softmax", ""},
    {"smoe_dropout", "",
     "Chen et al. 2023, Sparse MoE as the new dropout",
     "smoe with a router that stays at its random start",
     "n_experts=16 top_k=2 score=random weight=softmax", ""},
    {"acmoe", "",
     "Nielsen et al. 2025, Tight clusters make specialized experts",
     "u = m * x, m_q large where the cluster of the token is tight",
     "n_experts=16 top_k=2 input=adaptive_clustering weight=softmax", ""},
    {"acmoe_code", "",
     "the public program of Nielsen et al. 2025",
     "as acmoe over the present x, with the cosine score that keeps the length",
     "n_experts=16 top_k=2 input=adaptive_clustering ac_mode=code score=cosine cosine_keep_length=1 weight=softmax", ""},
    {"acmoe_mix2", "",
     "Nielsen et al. 2025, Tight clusters make specialized experts",
     "as acmoe, m mixed over the two best previous experts",
     "n_experts=16 top_k=2 input=adaptive_clustering ac_mix=2 weight=softmax", ""},
    {"acmoe_threshold", "",
     "Nielsen et al. 2025, Tight clusters make specialized experts",
     "as acmoe, all experts with p > theta",
     "n_experts=16 input=adaptive_clustering select=threshold weight=sum", ""},
    {"soft_acmoe", "",
     "Nielsen et al. 2025, Tight clusters make specialized experts",
     "soft_moe with u = m * x",
     "n_experts=16 input=adaptive_clustering ac_mix=2 select=soft soft_normalise=1", ""},
    {"aoe", "autonomy_of_experts",
     "Lv et al. 2025, Autonomy-of-experts models",
     "z_e = |reduce_e x|, w = softmax over the top K",
     "n_experts=8 top_k=2 score=norm norm_node=down weight=softmax loss_balance=0.01 balance_over=tokens", "expert=factorised"},
    {"aoe_code", "",
     "the public program of Lv et al. 2025",
     "as aoe, w = softmax over all experts, not renormalised",
     "n_experts=8 top_k=2 score=norm norm_node=down weight=raw loss_balance=0.01", "expert=factorised"},
    {"aoe_top_p", "",
     "Lv et al. 2025, Autonomy-of-experts models",
     "as aoe_code, the best experts until their p exceeds 0.6",
     "n_experts=8 score=norm norm_node=down select=top_p top_p=0.6 weight=raw loss_entropy=0.0001", "expert=factorised"},
    {"aoe_expert_choice", "",
     "Lv et al. 2025, Autonomy-of-experts models",
     "as aoe_code, each expert takes the tokens with the largest norm",
     "n_experts=8 score=norm norm_node=down select=expert_choice expert_choice_score=z capacity_factor=2 weight=raw", "expert=factorised"},
    {"norm_routing", "",
     "Lv et al. 2025, Autonomy-of-experts models, preliminary study",
     "z_e = |f_e(x)| of existing experts",
     "n_experts=8 top_k=2 score=norm norm_node=output weight=softmax", ""},
    {"locmoe", "",
     "Li et al. 2024, LocMoE: a low-overhead MoE for large language model training",
     "z_e = mean of the e-th block of features; capacity exp(d delta^2/(2 - delta^2))/E of the first batch; locality loss",
     "n_experts=8 top_k=1 score=grap weight=raw capacity_bound=first loss_balance=0.01 loss_locality=0.1 nodes=2", ""},
    {"locmoe_plus", "",
     "Li et al. 2024, LocMoE+: enhanced router with token feature awareness for efficient LLM pre-training",
     "each expert keeps its closest tokens, up to a share of its affinity",
     "n_experts=8 top_k=1 score=grap grap_cosine=1 gate_temperature=0.2 select=affinity affinity_mass=0.6 weight=raw loss_balance=0.01", ""},
    {"importance_gate", "",
     "Krishnamurthy, Watkins, Gaertner 2023, Improving expert specialization in mixture of experts",
     "y = sum over all experts of p_e f_e(x), p from a small network, importance loss",
     "n_experts=8 score=mlp select=dense weight=raw loss_importance=0.4 unbiased=1", "expert=mlp act=relu"},
    {"dual_temperature", "",
     "Krishnamurthy, Watkins, Gaertner 2023, Improving expert specialization in mixture of experts",
     "importance_gate whose experts learn from p_e at temperature T, the gate from p_e at 1",
     "n_experts=8 score=mlp select=dense weight=raw loss_importance=0.4 unbiased=1 expert_temperature=3", "expert=mlp act=relu"},
    {"attentive_gate", "",
     "Krishnamurthy, Watkins, Gaertner 2023, Improving expert specialization in mixture of experts",
     "z_e = (W_Q h_g) . (W_K h_e) / sqrt(h), h_e the hidden layer of expert e",
     "n_experts=8 score=attentive select=dense weight=raw loss_importance=0.2", "expert=mlp act=relu"},
    {"similarity_gate", "",
     "Krishnamurthy, Watkins, Gaertner 2023, Improving expert specialization in mixture of experts",
     "importance_gate with the similarity loss instead",
     "n_experts=8 score=mlp select=dense weight=raw loss_similarity_same=0.01 loss_similarity_diff=0.1", "expert=mlp act=relu"},
    {"expert_choice", "",
     "Zhou et al. 2022, Mixture-of-experts with expert choice routing",
     "each expert takes its best tokens, two per token on average",
     "n_experts=16 select=expert_choice capacity_factor=2 weight=raw", ""},
    {"hash", "hash_layers",
     "Roller et al. 2021, Hash layers for large sparse models",
     "experts by a table of token ids; set table_size and router.table",
     "n_experts=16 top_k=1 select=hash weight=uniform", "expert=mlp act=relu"},
    {"base", "base_layers",
     "Lewis et al. 2021, BASE layers: simplifying training of large, sparse models",
     "y = a f_e(x) + (1 - a) x, a = sigmoid(x . W_e), e by the best even assignment in training",
     "n_experts=16 top_k=1 gate=sigmoid select=balanced weight=raw", "expert=mlp act=relu add_input=1"},
    {"stablemoe", "",
     "Dai et al. 2022, StableMoE: stable routing strategy for mixture of experts",
     "as base by the largest x . W_e; a linear student learns the choices and makes them from step freeze_at on",
     "n_experts=16 top_k=1 gate=sigmoid weight=raw loss_balance=0.01 loss_distill=1 student=1 freeze_at=6000", "expert=mlp act=relu add_input=1"},
    {"dselect_k", "",
     "Hazimeh et al. 2021, DSelect-k: differentiable selection in the mixture of experts",
     "K learned binary codes with smooth steps pick at most K experts, mixed by a softmax",
     "n_experts=16 top_k=2 score=dselect gate=identity select=positive weight=sum loss_entropy=0.001", ""},
    {"thor", "",
     "Zuo et al. 2022, Taming sparsely activated transformer with stochastic experts",
     "an expert drawn at random, p = 1/E; train on two draws with moe_consistency_loss between them",
     "n_experts=16 top_k=1 score=random gate_temperature=1e6 select=sample weight=one", "expert=mlp act=relu"},
    {"sinkhorn", "",
     "Clark et al. 2022, Unified scaling laws for routed language models",
     "choices by a doubly normalised exp(z) in training, w = p of the best",
     "n_experts=16 top_k=1 select=sinkhorn weight=raw", ""},
    {"soft_moe", "",
     "Puigcerver et al. 2024, From sparse to soft mixtures of experts",
     "every slot is a softmax mixture of tokens, every output a softmax mixture of slots",
     "n_experts=16 select=soft soft_normalise=1", "expert=mlp act=gelu"},
    {"top_p", "",
     "Huang et al. 2024, Harder tasks need more experts: dynamic routing in MoE models",
     "the best experts until their p exceeds P; entropy loss",
     "n_experts=16 select=top_p top_p=0.4 weight=raw loss_entropy=0.0001 loss_balance=0.01", ""},
    {"dynmoe", "",
     "Guo et al. 2024, Dynamic mixture of experts: an auto-tuning approach for efficient transformer models",
     "sigmoid(cos(u, W_e)) > sigmoid(G_e), equal weights",
     "n_experts=16 score=cosine gate=sigmoid select=threshold threshold=0.5 threshold_learned=1 threshold_sigmoid=1 threshold_fallback=evaluation weight=uniform", ""},
    {"competesmoe", "",
     "Pham et al. 2024, CompeteSMoE: effective training of sparse mixture of experts via competition",
     "z_e = mean softplus(f_e(x)), w = z / sum z over the top 2",
     "n_experts=16 top_k=2 score=competition gate=identity weight=sum", ""},
    {"remoe", "",
     "Wang, Chen, Zhu 2024, ReMoE: fully differentiable mixture-of-experts with ReLU routing",
     "all experts with relu(z) > 0; an L1 loss whose factor keeps K of E open",
     "n_experts=16 top_k=2 gate=relu select=positive weight=raw l1_controller=1", ""},
    {"mixtral", "",
     "Jiang et al. 2024, Mixtral of experts",
     "w = softmax over the top 2 logits of 8",
     "n_experts=8 top_k=2 weight=softmax", ""},
    {"qwen2_moe", "",
     "Yang et al. 2024, Qwen2 technical report",
     "w = p of the top 8 of 64; a shared expert times sigmoid(s . x)",
     "n_experts=64 top_k=8 weight=raw", "n_shared=1 shared_sigmoid=1"},
    {"qwen3_moe", "",
     "Yang et al. 2025, Qwen3 technical report",
     "w = p / sum p over the top 8 of 128",
     "n_experts=128 top_k=8 weight=sum", ""},
    {"olmoe", "",
     "Muennighoff et al. 2024, OLMoE: open mixture-of-experts language models",
     "w = p of the top 8 of 64; z loss, balance loss",
     "n_experts=64 top_k=8 weight=raw loss_z=0.001 loss_balance=0.01", ""},
    {"deepseek_v2", "",
     "DeepSeek-AI 2024, DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language model",
     "w = 16 p of the top 6 of 160 in the 3 best of 8 groups by their best expert",
     "n_experts=160 top_k=6 select=grouped_top_k groups=8 groups_kept=3 group_score=max weight=raw scale=16", "n_shared=2"},
    {"deepseek_v3", "",
     "DeepSeek-AI 2024, DeepSeek-V3 technical report",
     "sigmoid, bias in selection only, w = 2.5 p / sum p of 8 of 256 in the 4 best of 8 groups by their two best experts",
     "n_experts=256 top_k=8 gate=sigmoid select=grouped_top_k groups=8 groups_kept=4 group_score=top2_sum selection_bias=1 bias_rate=0.001 weight=sum scale=2.5", "n_shared=1"},
    {"deepseek_v4", "",
     "DeepSeek-V4 as shipped, after its first three layers",
     "r = sqrt(softplus(z)), bias in selection only, w = 1.5 p / sum p over 6 of 256",
     "n_experts=256 top_k=6 gate=sqrt_softplus selection_bias=1 bias_rate=0.001 weight=sum scale=1.5", "n_shared=1"},
    {"llama4", "",
     "Llama 4 as shipped",
     "top 1, sigmoid(z) on the expert's input; a shared expert",
     "n_experts=16 top_k=1 gate=sigmoid weight=raw apply_to=input", "n_shared=1"},
    {"gpt_oss", "",
     "OpenAI 2025, gpt-oss model card",
     "w = softmax over the top 4 logits of 128, router bias",
     "n_experts=128 top_k=4 router_bias=1 weight=softmax", "expert_bias=1 swiglu_alpha=1.702 swiglu_limit=7 swiglu_offset=1"},
    {"dbrx", "",
     "DBRX as shipped",
     "w = p / sum p over the top 4 of 16",
     "n_experts=16 top_k=4 weight=p_norm weight_p=1", ""},
    {"grok1", "",
     "Grok-1 as shipped",
     "w = p of the top 2 of 8",
     "n_experts=8 top_k=2 weight=raw", ""},
    {"phi35_moe", "",
     "Abdin et al. 2024, Phi-3 technical report; Liu et al. 2023, Sparse backpropagation for MoE training",
     "two picks one after another, each with its softmax among near rivals",
     "n_experts=16 top_k=2 weight=sparsemixer", ""},
    {"granite_moe", "",
     "Granite MoE as shipped",
     "w = softmax over the top 8 logits of 40",
     "n_experts=40 top_k=8 weight=softmax", ""},
    {"gemma4", "",
     "Gemma 4 as shipped",
     "the router sees the raw residual (router_x), rms-scaled; w = s_e p / sum p over the top 8 of 128",
     "n_experts=128 top_k=8 input=scaled_rms weight=sum expert_scale=1", ""},
    {"minimax_m2", "",
     "MiniMax-M2 as shipped",
     "r = sigmoid(z), bias in selection only, w = p / sum p over 8 of 256",
     "n_experts=256 top_k=8 gate=sigmoid selection_bias=1 bias_rate=0.001 weight=sum", ""},
    {NULL, NULL, NULL, NULL, NULL, NULL}};

const moe_preset *moe_presets(void) { return moei_presets; }

/* Whether name is one of the words of a list separated by spaces. */
static int moei_is_word_of(const char *name, const char *list) {
    size_t n = moei_strlen(name);
    while (*list != '\0') {
        size_t length = 0;
        while (list[length] != '\0' && list[length] != ' ') length++;
        if (length == n && n > 0 && moei_memcmp(list, name, n) == 0) return 1;
        list += length + (list[length] == ' ');
    }
    return 0;
}

const moe_preset *moe_preset_find(const char *name) {
    const moe_preset *preset;
    if (name == NULL) return NULL;
    for (preset = moei_presets; preset->name != NULL; preset++)
        if (moei_strcmp(preset->name, name) == 0 || moei_is_word_of(name, preset->aliases)) return preset;
    return NULL;
}

moe_status moe_router_preset(const char *name, moe_router_config *config, moe_error *error) {
    const moe_preset *preset = moe_preset_find(name);
    moe_router_config made;
    moe_status status;
    if (config == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "config must not be NULL");
    if (preset == NULL) return moei_error(error, MOE_ERR_NOT_FOUND, "%s: there is no preset of this name; moe_presets lists them", name);
    memset(&made, 0, sizeof made);
    status = moe_fields_apply(moei_router_fields, &made, preset->router, error);
    if (status == MOE_OK) *config = made;
    return status;
}

/* ==== the router's tensors ================================================================================================================== */

/* Fills in a slot of the given dimensions; 0 when its size does not fit size_t. */
static int moei_slot_set(moe_slot *slot, int n_dims, size_t n0, size_t n1, size_t n2, unsigned flags, moe_real value, moe_real spread) {
    slot->n_dims = n_dims;
    slot->shape[0] = n0;
    slot->shape[1] = n_dims > 1 ? n1 : 1;
    slot->shape[2] = n_dims > 2 ? n2 : 1;
    slot->shape[3] = 1;
    slot->flags = flags;
    slot->init_value = value;
    slot->init_spread = spread;
    return moei_mul(slot->shape[0], slot->shape[1], &slot->count) && moei_mul(slot->count, slot->shape[2], &slot->count);
}

/* A bias or gain: starts at one value, is not decayed. */
static int moei_slot_vector(moe_slot *slot, size_t n, unsigned flags, moe_real value) {
    return moei_slot_set(slot, 1, n, 1, 1, flags | (unsigned)MOE_PARAM_NO_DECAY, value, MOEI_R(0.0));
}

/* A matrix starts with the spread that keeps the size of what passes through it. */
static int moei_slot_matrix(moe_slot *slot, size_t rows, size_t columns, unsigned flags) {
    return moei_slot_set(slot, 2, rows, columns, 1, flags, MOEI_R(0.0), MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)columns));
}

moe_status moe_router_slot(const moe_router_config *c, int slot, moe_slot *out) {
    static const char *const names[MOE_ROUTER_SLOTS] = {"router.weight",     "router.bias",       "router.projection", "router.temperature",
                                                        "router.fc1.weight", "router.fc1.bias",   "router.fc2.weight", "router.fc2.bias",
                                                        "router.selection_bias", "router.expert_scale", "router.input_scale", "router.query", "router.key", "router.threshold", "router.noise_weight", "router.similarity",
                                                        "router.ac_running", "router.slots", "router.scale", "router.codes", "router.mix", "router.student", "router.step", "router.load", "router.l1", "router.capacity", "router.table"};
    size_t d = (size_t)c->d_model, experts = (size_t)c->n_experts, hidden = moei_router_hidden(c);
    int soft = moei_is_soft(c), linear = !soft && (c->score == MOE_SCORE_LINEAR || c->score == MOE_SCORE_RANDOM), cosine = c->score == MOE_SCORE_COSINE, mlp = c->score == MOE_SCORE_MLP;
    int attentive = c->score == MOE_SCORE_ATTENTIVE;
    unsigned flags = c->score == MOE_SCORE_RANDOM ? (unsigned)MOE_PARAM_FROZEN : (unsigned)MOE_PARAM_TRAINED;
    moe_slot made;
    int fits = -1; /* -1: not there */
    memset(&made, 0, sizeof made);
    switch (slot) {
    case MOE_ROUTER_WEIGHT:
        if (linear || cosine) fits = moei_slot_matrix(&made, experts, cosine && c->cosine_dim > 0 ? (size_t)c->cosine_dim : d, flags);
        break;
    case MOE_ROUTER_BIAS:
        if (linear && c->router_bias) fits = moei_slot_vector(&made, experts, flags, MOEI_R(0.0));
        break;
    case MOE_ROUTER_PROJECTION:
        if (cosine && c->cosine_dim > 0) fits = moei_slot_matrix(&made, (size_t)c->cosine_dim, d, MOE_PARAM_TRAINED);
        break;
    case MOE_ROUTER_TEMPERATURE:
        if (cosine && c->cosine_learn_tau) fits = moei_slot_vector(&made, 1, MOE_PARAM_TRAINED, c->cosine_tau);
        break;
    case MOE_ROUTER_FC1_WEIGHT:
        if (mlp || attentive) fits = moei_slot_matrix(&made, hidden, d, MOE_PARAM_TRAINED);
        break;
    case MOE_ROUTER_FC1_BIAS:
        if (mlp || attentive) fits = moei_slot_vector(&made, hidden, MOE_PARAM_TRAINED, MOEI_R(0.0));
        break;
    case MOE_ROUTER_FC2_WEIGHT:
        if (mlp) fits = moei_slot_matrix(&made, experts, hidden, MOE_PARAM_TRAINED);
        break;
    case MOE_ROUTER_FC2_BIAS:
        if (mlp) fits = moei_slot_vector(&made, experts, MOE_PARAM_TRAINED, MOEI_R(0.0));
        break;
    case MOE_ROUTER_SELECTION_BIAS:
        if (c->selection_bias) fits = moei_slot_vector(&made, experts, MOE_PARAM_STATE, MOEI_R(0.0));
        break;
    case MOE_ROUTER_EXPERT_SCALE:
        if (c->expert_scale) fits = moei_slot_vector(&made, experts, MOE_PARAM_TRAINED, MOEI_R(1.0));
        break;
    case MOE_ROUTER_INPUT_SCALE:
        if (c->input == MOE_INPUT_SCALED_RMS) fits = moei_slot_vector(&made, d, MOE_PARAM_TRAINED, MOEI_R(1.0));
        break;
    case MOE_ROUTER_QUERY:
    case MOE_ROUTER_KEY:
        if (attentive) fits = moei_slot_matrix(&made, hidden, hidden, MOE_PARAM_TRAINED);
        break;
    case MOE_ROUTER_THRESHOLD:
        if (c->threshold_learned)
            fits = moei_slot_vector(&made, experts, MOE_PARAM_TRAINED,
                                    c->threshold_sigmoid ? MOEI_F(log)(c->threshold / (MOEI_R(1.0) - c->threshold)) : c->threshold);
        break;
    case MOE_ROUTER_NOISE_WEIGHT:
        if (c->noise == MOE_NOISE_NOISY_TOPK) fits = moei_slot_set(&made, 2, experts, d, 1, MOE_PARAM_TRAINED, MOEI_R(0.0), MOEI_R(0.0));
        break;
    case MOE_ROUTER_SIMILARITY:
        if (c->similarity_learned) fits = moei_slot_matrix(&made, d, d, MOE_PARAM_TRAINED);
        break;
    case MOE_ROUTER_AC_RUNNING:
        if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING && c->ac_mode == MOE_AC_RUNNING)
            fits = moei_slot_set(&made, 2, experts, d, 1, MOE_PARAM_STATE, MOEI_R(1.0), MOEI_R(0.0));
        if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING && c->ac_mode == MOE_AC_RANDOM)
            fits = moei_slot_set(&made, 2, experts, d, 1, MOE_PARAM_FROZEN, MOEI_R(1.0), MOEI_R(0.5));
        break;
    case MOE_ROUTER_SLOT_VECTORS:
        if (soft && moei_mul(experts, (size_t)c->slots, &experts)) fits = moei_slot_matrix(&made, experts, d, MOE_PARAM_TRAINED);
        else if (soft) fits = 0;
        break;
    case MOE_ROUTER_SLOT_SCALE:
        if (soft && c->soft_normalise) fits = moei_slot_vector(&made, 1, MOE_PARAM_TRAINED, MOEI_R(1.0));
        break;
    case MOE_ROUTER_CODES:
        if (c->score == MOE_SCORE_DSELECT && moei_mul((size_t)c->top_k, moei_code_bits(experts), &hidden)) /* near 0, where S has a slope */
            fits = moei_slot_set(&made, 2, hidden, d, 1, MOE_PARAM_TRAINED, MOEI_R(0.0), MOEI_R(0.01) / MOEI_F(sqrt)((moe_real)d));
        break;
    case MOE_ROUTER_MIX:
        if (c->score == MOE_SCORE_DSELECT) fits = moei_slot_matrix(&made, (size_t)c->top_k, d, MOE_PARAM_TRAINED);
        break;
    case MOE_ROUTER_STUDENT:
        if (c->student) fits = moei_slot_matrix(&made, experts, d, MOE_PARAM_TRAINED);
        break;
    case MOE_ROUTER_STEP:
        if (c->schedule_steps > 0 || c->freeze_at > 0 || c->switch_at > 0) fits = moei_slot_vector(&made, 1, MOE_PARAM_STATE, MOEI_R(0.0));
        break;
    case MOE_ROUTER_LOAD:
        if (c->bias_rate > MOEI_R(0.0) || c->l1_controller) fits = moei_slot_vector(&made, experts + 1, MOE_PARAM_STATE, MOEI_R(0.0));
        break;
    case MOE_ROUTER_L1:
        if (c->l1_controller) fits = moei_slot_vector(&made, 1, MOE_PARAM_STATE, c->loss_l1);
        break;
    case MOE_ROUTER_CAPACITY:
        if (c->capacity_bound == MOE_BOUND_FIRST || c->capacity_rho > MOEI_R(0.0)) fits = moei_slot_vector(&made, 1, MOE_PARAM_STATE, MOEI_R(0.0));
        break;
    case MOE_ROUTER_TABLE:
        if (c->select == MOE_SELECT_HASH) fits = moei_slot_set(&made, 2, (size_t)c->table_size, (size_t)c->top_k, 1, MOE_PARAM_FROZEN, MOEI_R(0.0), MOEI_R(0.0));
        break;
    default:
        break;
    }
    if (fits < 0) return MOE_ERR_NOT_FOUND;
    if (!fits) return MOE_ERR_OVERFLOW;
    made.name = names[slot];
    *out = made;
    return MOE_OK;
}

/* ==== one call: forward ======================================================================================================================= */

static size_t moei_max_choices(const moe_router_config *c) {
    int all = !moei_selects[c->select].k_per_token || (c->switch_at > 0 && !moei_selects[c->switch_from].k_per_token);
    if (moei_is_soft(c)) return moei_slot_total(c);
    return (size_t)(all ? c->n_experts : c->top_k > c->k_end ? c->top_k : c->k_end);
}

/* The width of what the score keeps per token: hidden units of mlp, projected tokens of cosine. */
static size_t moei_score_width(const moe_router_config *c) {
    if (c->score == MOE_SCORE_MLP || c->score == MOE_SCORE_ATTENTIVE) return moei_router_hidden(c);
    if (c->score == MOE_SCORE_DSELECT) return (size_t)c->top_k * (moei_code_bits((size_t)c->n_experts) + 1);
    return c->score == MOE_SCORE_COSINE ? (size_t)c->cosine_dim : 0;
}

/* The arrays that every call has, as one block: whole numbers, then reals, then bytes, so that only two places are filled up to an
   alignment. */
static void moei_common_layout(const moe_router_config *c, size_t n, moei_layout *l, moe_routing *r, moei_scratch *m) {
    size_t experts = (size_t)c->n_experts, choices = moei_max_choices(c), columns = moei_is_soft(c) ? choices : experts; /* of logits */
    size_t wide = (size_t)c->nodes > experts ? (size_t)c->nodes : experts, order = n > experts ? n : experts + 1, bytes = 0;
    size_t cells, pairs, index, whole;
    uint64_t reals = 2 * (uint64_t)columns + experts + choices + 1; /* per token */
    uint64_t token = reals * sizeof(moe_real) + choices * (sizeof(moe_entry) + sizeof(int32_t) + 1) + sizeof(int32_t) + experts;
    index = (3 * experts + 1 + 7) / 8 * 8;
    if (token > (size_t)-1 || !moei_mul(n, (size_t)token, &bytes) || !moei_add(bytes, order * sizeof(int32_t), &bytes) ||
        !moei_add(bytes, index * sizeof(size_t) + 3 * wide * sizeof(moe_real) + 16, &bytes))
        l->overflow = 1;
    r->max_choices = choices;
    r->plan.offsets = (size_t *)moei_take(l, bytes, 1);
    if (r->plan.offsets == NULL) return;
    cells = n * experts, pairs = n * choices, whole = (pairs + n + order + 3) / 4 * 4;
    r->counts = r->plan.offsets + experts + 1;
    r->first_counts = r->counts + experts;
    r->choices = (int32_t *)(void *)(r->plan.offsets + index);
    r->n_choices = r->choices + pairs;
    m->order = r->n_choices + n;
    r->logits = (moe_real *)(void *)(r->choices + whole);
    r->probabilities = r->gate = r->logits + n * columns; /* without a refining stage p is r */
    r->plan.entries = (moe_entry *)(void *)(r->gate + n * columns);
    m->base_weights = r->section_weights = (moe_real *)(void *)(r->plan.entries + pairs);
    m->column = r->section_weights + pairs;
    m->row = m->column + n;
    r->weights = m->row + 3 * wide;
    r->selected = (unsigned char *)(void *)(r->weights + cells);
    r->kept = r->selected + cells;
}

/* Memory of the refining stage: a block of rows of S, and what its queries and keys are made of. */
static void moei_refine_layout(const moe_router_config *c, size_t n, int training, moei_layout *l, moei_scratch *m) {
    size_t d = (size_t)c->d_model, heads = (size_t)c->heads, rows = n < MOEI_REFINE_ROWS ? n : (size_t)MOEI_REFINE_ROWS, width = 0;
    int attention = c->refine == MOE_REFINE_ATTENTION;
    if (c->refine == MOE_REFINE_NONE) return;
    if (!moei_mul(n, attention && c->attention_heads == MOE_HEADS_ALL ? heads : 1, &width)) l->overflow = 1;
    m->block = moei_take_reals(l, rows, width);
    m->entropy = c->lower_entropy_only ? moei_take_reals(l, n, 1) : NULL;
    m->unit = !attention && c->similarity_scale == MOE_SIMILARITY_L2 ? moei_take_reals(l, n, d) : NULL;
    m->keys = c->similarity_learned ? moei_take_reals(l, n, d) : NULL;
    m->key_terms = attention ? moei_take_reals(l, n, heads) : NULL;
    m->past_u = c->causal && !training ? moei_take_reals(l, n, d) : NULL;
    m->past_gate = c->causal && !training ? moei_take_reals(l, n, (size_t)c->n_experts) : NULL;
    if (!training) return;
    m->d_block = moei_take_reals(l, rows, width);
    m->d_unit = moei_take_reals(l, n, d);
    m->d_keys = moei_take_reals(l, n, d);
}

/* Whether calls of this configuration may select so. */
static int moei_has_selection(const moe_router_config *c, int select) {
    return c->select == select || (c->switch_at > 0 && c->switch_from == select);
}

/* The arrays of the stages that only some configurations have, and of training: for `all` tokens of a batch what stages share or hand on, for the
   call's own n what stays with the stage. */
static void moei_special_layout(const moe_router_config *c, size_t all, size_t n, int training, moei_layout *l, moe_routing *r, moei_scratch *m) {
    size_t experts = (size_t)c->n_experts, d = (size_t)c->d_model, width = moei_score_width(c), choices = moei_max_choices(c), row = 0;
    int soft = moei_is_soft(c), own = soft || c->refine != MOE_REFINE_NONE; /* probabilities of their own */
    size_t columns = soft ? choices : experts;
    if (own) r->probabilities = moei_take_reals(l, all, columns);
    if (soft || moei_has_selection(c, MOE_SELECT_EXPERT_CHOICE)) m->columns = moei_take_reals(l, MOEI_COLUMNS, all + MOEI_COLUMNS);
    if (soft && c->soft_normalise) {
        m->unit = moei_take_reals(l, n, d);
        m->keys = moei_take_reals(l, choices, d);
    }
    moei_refine_layout(c, n, training, l, m);
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) m->clusters = moei_take_reals(l, experts + 1, d);
    if (c->expert_scale) m->base_weights = moei_take_reals(l, all, choices);
    if (c->student) m->student_logits = moei_take_reals(l, all, experts);
    if (width > 0) m->hidden = moei_take_reals(l, n, width);
    if (width > 0 && c->score != MOE_SCORE_COSINE) m->hidden_act = moei_take_reals(l, n, width);
    if (c->score == MOE_SCORE_ATTENTIVE || c->score == MOE_SCORE_DSELECT) m->query = moei_take_reals(l, n, width);
    if (c->score == MOE_SCORE_ATTENTIVE) m->keyed = moei_take_reals(l, n, width);
    if (c->score == MOE_SCORE_COSINE) m->lengths = moei_take_reals(l, n + experts, 1);
    if (c->input == MOE_INPUT_JITTER || c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) m->input_factor = moei_take_reals(l, n, d);
    if (c->input == MOE_INPUT_SCALED_RMS) m->input_factor = moei_take_reals(l, n, 1);
    if (!training) return;
    if (c->noise != MOE_NOISE_NONE) {
        m->clean_logits = moei_take_reals(l, all, experts);
        m->clean_gate = moei_take_reals(l, all, experts);
        m->noise_raw = moei_take_reals(l, all, experts);
        m->noise_value = moei_take_reals(l, all, experts);
        m->d_clean = moei_take_reals(l, all, experts);
        m->d_clean_gate = moei_take_reals(l, all, experts);
        m->d_noise = moei_take_reals(l, all, experts);
    }
    if (moei_has_selection(c, MOE_SELECT_BALANCED)) {
        m->flow_cost = (double *)moei_take(l, experts + 1, sizeof(double));
        m->flow_extra = (unsigned char *)moei_take(l, experts, 1);
        if (!moei_mul(experts, sizeof(int32_t), &row)) l->overflow = 1;
        m->flow_mover = (int32_t *)moei_take(l, experts, row);
    }
    r->d_weight_in = moei_take_reals(l, n, choices);
    r->d_weight_out = moei_take_reals(l, n, choices);
    m->d_student = c->student ? moei_take_reals(l, all, experts) : NULL;
    m->d_logits = moei_take_reals(l, all, columns);
    m->d_gate = moei_take_reals(l, all, columns);
    if (soft && c->soft_normalise) {
        m->d_unit = moei_take_reals(l, n, d);
        m->d_keys = moei_take_reals(l, choices, d);
    }
    m->d_probabilities = own ? moei_take_reals(l, all, columns) : m->d_gate;
    m->d_weights = moei_take_reals(l, all, experts);
    m->d_final = moei_take_reals(l, all, experts);
    m->d_input = moei_take_reals(l, n, d);
    m->d_unused = moei_take_reals(l, d, 1);
    m->d_hidden = width > 0 ? moei_take_reals(l, n, width) : NULL;
    m->d_query = c->score == MOE_SCORE_ATTENTIVE ? moei_take_reals(l, n, width) : NULL;
    m->d_keyed = c->score == MOE_SCORE_ATTENTIVE ? moei_take_reals(l, n, width) : NULL;
}

/* Whether a token's experts depend on tokens of other sequences, outside training too. */
static int moei_crosses_sequences(const moe_router_config *c) {
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING && (c->ac_mode == MOE_AC_PAPER || c->ac_mode == MOE_AC_CODE)) return 1;
    if (moei_is_soft(c)) return 0;
    if (moei_needs_others(c->select) || (c->switch_at > 0 && moei_needs_others(c->switch_from)) || c->custom_batch) return 1;
    return c->capacity_factor > MOEI_R(0.0) || c->capacity_factor_eval > MOEI_R(0.0) || c->drop_capacity > 0 || c->capacity_bound != MOE_BOUND_NONE;
}

/* What a batch that decides together gathers. */
static void moei_together_layout(const moe_router_config *c, size_t all, int training, moei_layout *l, moei_scratch *m) {
    size_t d = (size_t)c->d_model, choices = 0;
    int clusters = c->input == MOE_INPUT_ADAPTIVE_CLUSTERING, spread = c->ac_mode == MOE_AC_PAPER || c->ac_mode == MOE_AC_CODE;
    m->batch_mask = (unsigned char *)moei_take(l, all, 1);
    m->batch_sequences = (int32_t *)moei_take(l, all, sizeof(int32_t));
    (void)moei_take(l, 3, sizeof(int32_t)); /* behind them the end, their number, and what is supplied */
    if (moei_has_selection(c, MOE_SELECT_HASH)) m->batch_ids = (int32_t *)moei_take(l, all, sizeof(int32_t));
    if (!moei_mul(moei_max_choices(c), sizeof(int32_t), &choices)) l->overflow = 1;
    m->batch_given = (int32_t *)moei_take(l, all, choices);
    if (training && c->loss_locality > MOEI_R(0.0)) m->batch_home = (int32_t *)moei_take(l, all, sizeof(int32_t));
    if (clusters) m->clusters_of = (int32_t *)moei_take(l, all, sizeof(int32_t));
    if (clusters && (spread || (training && c->ac_mode == MOE_AC_RUNNING))) m->batch_h = moei_take_reals(l, all, d);
    if (training && c->loss_distill > MOEI_R(0.0) && !c->student) m->batch_teacher = moei_take_reals(l, all, (size_t)c->n_experts);
    if (training && (c->loss_similarity_same > MOEI_R(0.0) || c->loss_similarity_diff > MOEI_R(0.0))) m->batch_x = moei_take_reals(l, all, d);
}

/* MOEI_PART_ bits of a checked configuration. */
static unsigned moei_router_parts(const moe_router_config *c) {
    const unsigned supplied = MOE_TRAIT_NEEDS_TOKEN_IDS | MOE_TRAIT_NEEDS_ATTENTION | MOE_TRAIT_NEEDS_PREVIOUS_LAYER |
                              MOE_TRAIT_NEEDS_ALL_EXPERTS | MOE_TRAIT_NEEDS_GIVEN;
    unsigned parts = 0;
    moei_layout l = moei_layout_begin(NULL);
    size_t none = l.used;
    moe_routing r;
    moei_scratch m;
    moei_special_layout(c, 1, 1, 0, &l, &r, &m);
    if (l.used > none || l.overflow) parts |= MOEI_PART_MEMORY;
    if (c->k_end > 0 || c->tau_schedule != MOE_TAU_NONE || c->switch_at > 0 || c->freeze_at > 0 || c->l1_controller ||
        c->capacity_bound != MOE_BOUND_NONE)
        parts |= MOEI_PART_MOVES;
    if ((moe_router_traits(c) & supplied) || moei_is_soft(c) || c->loss_locality > MOEI_R(0.0)) parts |= MOEI_PART_SUPPLIES;
    if (moei_decoding_obstacle(c).field != NULL) parts |= MOEI_PART_NO_DECODING;
    if (moei_crosses_sequences(c)) parts |= MOEI_PART_BATCH;
    return parts;
}

moe_status moe_router_init(moe_router *router, const moe_router_config *config, const moe_kernels *kernels, moe_error *error) {
    moe_router made;
    moe_slot slot;
    moe_status status;
    int place;
    if (router == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "router must not be NULL");
    memset(&made, 0, sizeof made);
    status = moe_router_check(config, &made.config, error);
    if (status != MOE_OK) return status;
    for (place = 0; place < MOE_ROUTER_SLOTS; place++)
        if (moe_router_slot(&made.config, place, &slot) != MOE_ERR_NOT_FOUND) made.places |= (uint64_t)1 << place;
    made.parts = moei_router_parts(&made.config);
    made.kernels = kernels != NULL ? kernels : moe_kernels_select(MOE_KERNELS_C);
    *router = made;
    return MOE_OK;
}

/* A routing of nothing yet, but for the arrays that every call has. Field by field: most of them are set anyway. */
static void moei_routing_clear(moe_routing *r) {
    r->n_real = r->n_dropped = r->capacity = r->plan.rows = 0;
    r->capacity_bound = r->bound_now = MOEI_R(0.0);
    r->capacity_clamped = 0;
    r->u = NULL;
    r->d_weight_in = r->d_weight_out = NULL;
    memset(r->loss, 0, sizeof r->loss);
}

/* Lays a routing of n own tokens among `all` out in memory; the same function with an empty base counts the bytes. */
static void moei_route_layout(const moe_router *router, size_t n, size_t all, int together, int training, moei_layout *l, moe_routing *r, moei_scratch *m) {
    moei_routing_clear(r);
    moei_common_layout(&router->config, all, l, r, m);
    m->input = moei_take_reals(l, n, (size_t)router->config.d_model);
    m->clusters_of = NULL, m->batch_h = NULL, m->batch_x = NULL; /* what stages look at that every call has */
    if (!training && !together && !(router->parts & MOEI_PART_MEMORY)) return;
    memset(&m->input_factor, 0, sizeof *m - offsetof(moei_scratch, input_factor));
    moei_special_layout(&router->config, all, n, training, l, r, m);
    if (together) moei_together_layout(&router->config, all, training, l, m);
}

/* Whether the processes of a batch decide together. */
static int moei_is_together(const moe_router *router, const moe_call *call) {
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_BATCH) || call->batch == NULL || moei_is_soft(&router->config)) return 0;
    return call->training || (router->parts & MOEI_PART_BATCH) != 0;
}

/* The layout of a call. */
static void moei_call_layout(const moe_router *router, const moe_call *call, moei_layout *l, moe_routing *r, moei_scratch *m) {
    size_t n = call->n_past + call->n_tokens;
    int together = moei_is_together(router, call);
    moei_route_layout(router, n, together ? call->batch->total : n, together, call->training, l, r, m);
}

/* The private arrays of a routing that moe_route has made. */
MOEI_TOOL void moei_scratch_again(const moe_router *router, const moe_call *call, const moe_routing *routing, moei_scratch *m) {
    moei_layout l = moei_layout_begin(routing->memory);
    moe_routing r;
    moei_call_layout(router, call, &l, &r, m);
}

static moe_status moei_route_bytes(const moe_router *router, size_t n, size_t all, int together, int training, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_routing r;
    moei_scratch m;
    if (!MOEI_FITS_INT32(all)) return MOE_ERR_OVERFLOW;
    moei_route_layout(router, n, all, together, training, &l, &r, &m);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    *bytes = l.used;
    return MOE_OK;
}

moe_status moe_route_size(const moe_router *router, size_t n_tokens, int training, size_t *bytes) {
    if (router == NULL || bytes == NULL) return MOE_ERR_ARGUMENT;
    return moei_route_bytes(router, n_tokens, n_tokens, 0, training, bytes);
}

moe_status moe_route_batch_size(const moe_router *router, size_t n_tokens, size_t total, int training, size_t *bytes) {
    moe_batch batch;
    moe_call call;
    if (router == NULL || bytes == NULL || total < n_tokens) return MOE_ERR_ARGUMENT;
    memset(&batch, 0, sizeof batch);
    memset(&call, 0, sizeof call);
    call.batch = &batch, call.training = training;
    if (!moei_is_together(router, &call)) return moei_route_bytes(router, n_tokens, n_tokens, 0, training, bytes);
    return moei_route_bytes(router, n_tokens, total, 1, training, bytes);
}

/* Whether a training call of this router draws random numbers. */
static int moei_needs_rng(const moe_router_config *c, const moe_call *call) {
    int samples = c->select == MOE_SELECT_SAMPLE || (c->switch_at > 0 && c->switch_from == MOE_SELECT_SAMPLE);
    return (c->input == MOE_INPUT_JITTER && call->jitter == NULL) || (c->noise != MOE_NOISE_NONE && call->noise == NULL) ||
           c->drop_rule != MOE_DROP_RULE_NONE || (samples && call->given == NULL) || c->drop_order == MOE_DROP_RANDOM;
}

/* Whether what adaptive clustering reads of the previous layer is there and in range. */
static int moei_previous_fits(const moe_router_config *c, const moe_call *call) {
    size_t i;
    if (call->previous_experts == NULL || call->previous_weights == NULL || call->n_previous == 0) return 0;
    if (c->ac_mode == MOE_AC_PAPER && call->previous_input == NULL) return 0;
    for (i = 0; i < call->n_tokens * call->n_previous; i++)
        if (call->previous_experts[i] < -1 || call->previous_experts[i] >= c->n_experts) return 0;
    return 1;
}

/* Whether the nodes that the locality loss reads are all there. */
static int moei_nodes_fit(const moe_router_config *c, const moe_call *call) {
    size_t i;
    for (i = 0; i < call->n_tokens && call->home != NULL; i++)
        if (call->home[i] < 0 || call->home[i] >= c->nodes) return 0;
    for (i = 0; i < (size_t)c->n_experts && call->expert_node != NULL; i++)
        if (call->expert_node[i] < 0 || call->expert_node[i] >= c->nodes) return 0;
    return 1;
}

/* Whether a tensor is there exactly when the configuration has it. Routing can do without what the state rules count and schedules have reached. */
MOEI_TOOL int moei_place_is_set(int place, uint64_t places, const moe_real *tensor) {
    if (!(places >> place & 1u)) return tensor == NULL;
    return tensor != NULL || (place >= MOE_ROUTER_STEP && place <= MOE_ROUTER_CAPACITY);
}

/* moei_place_is_set of all tensors: the wanted ones are there, and there are no more than those. Three counts, which need not wait for
   each other. */
static int moei_tensors_fit(const moe_router *router) {
    const moe_real *const *tensors = router->tensors;
    uint64_t left;
    int place, wanted = 0, there[3] = {0, 0, 0};
    for (place = 0; place + 3 <= MOE_ROUTER_SLOTS; place += 3)
        there[0] += tensors[place] != NULL, there[1] += tensors[place + 1] != NULL, there[2] += tensors[place + 2] != NULL;
    for (; place < MOE_ROUTER_SLOTS; place++) there[0] += tensors[place] != NULL;
    for (left = router->places, place = 0; left != 0; left >>= 1, place++) {
        if (!moei_place_is_set(place, router->places, tensors[place])) return 0;
        wanted += tensors[place] != NULL;
    }
    return there[0] + there[1] + there[2] == wanted;
}

/* What some configurations ask of a call. */
static moe_status moei_supplies_check(const moe_router_config *c, const moe_call *call) {
    if (c->select == MOE_SELECT_GIVEN && call->given == NULL) return MOE_ERR_ARGUMENT;
    if (c->select == MOE_SELECT_HASH && call->given == NULL && call->token_ids == NULL) return MOE_ERR_ARGUMENT;
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING && !moei_previous_fits(c, call)) return MOE_ERR_ARGUMENT;
    if (c->refine == MOE_REFINE_ATTENTION &&
        (call->attention_weights == NULL || call->attention_outputs == NULL ||
         (c->attention_u == MOE_ATTENTION_U_OUTPUT && call->attention_output == NULL)))
        return MOE_ERR_ARGUMENT;
    if (c->score == MOE_SCORE_ATTENTIVE && call->node_width != moei_router_hidden(c)) return MOE_ERR_SHAPE;
    if ((moe_router_traits(c) & MOE_TRAIT_NEEDS_ALL_EXPERTS) && (call->nodes == NULL || call->node_width == 0)) return MOE_ERR_ARGUMENT;
    return MOE_OK;
}

/* Everything that a call can get wrong, before anything is computed. */
static moe_status moei_call_check(const moe_router *router, const moe_call *call) {
    const moe_router_config *c = &router->config;
    size_t i;
    if (moei_left_out(c) != NULL || (!MOEI_KEPT(SELECTS, MOE_SELECT_GIVEN) && call->given != NULL)) return MOE_ERR_UNSUPPORTED;
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_TRAINING) && call->training) return MOE_ERR_UNSUPPORTED;
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_BATCH) && call->batch != NULL) return MOE_ERR_UNSUPPORTED;
    if (!MOEI_FITS_INT32(call->n_tokens)) return MOE_ERR_OVERFLOW;
    if (call->n_tokens > 0 && call->x == NULL) return MOE_ERR_ARGUMENT;
    if (!moei_tensors_fit(router)) return MOE_ERR_ARGUMENT;
    if (call->sequences != NULL) {
        if (call->n_sequences < 1 || call->sequences[0] != 0) return MOE_ERR_ARGUMENT;
        for (i = 0; i < call->n_sequences; i++)
            if (call->sequences[i + 1] < call->sequences[i]) return MOE_ERR_ARGUMENT;
        if ((size_t)call->sequences[call->n_sequences] != call->n_tokens) return MOE_ERR_ARGUMENT;
    }
    if (call->batch != NULL && moei_is_soft(c) && moei_crosses_sequences(c)) return MOE_ERR_UNSUPPORTED;
    if (call->n_past > 0 && (call->batch != NULL || !moei_fit_int32(call->n_past, call->n_tokens) || c->refine == MOE_REFINE_NONE || !c->causal || call->training ||
                             moei_sequence_count(call) != 1 || call->past_u == NULL || call->past_gate == NULL))
        return MOE_ERR_ARGUMENT;
    if (call->decoding && (call->training || (router->parts & MOEI_PART_NO_DECODING))) return MOE_ERR_UNSUPPORTED;
    if (call->training && call->rng == NULL && moei_needs_rng(c, call)) return MOE_ERR_ARGUMENT;
    if (call->training && c->loss_distill > MOEI_R(0.0) && !c->student && call->n_tokens > 0 && call->teacher == NULL)
        return MOE_ERR_ARGUMENT;
    if (!(router->parts & MOEI_PART_SUPPLIES)) return MOE_OK;
    if (moei_is_soft(c) && (call->given != NULL || moei_sequence_count(call) > (size_t)c->soft_sequences)) return MOE_ERR_ARGUMENT;
    if (c->loss_locality > MOEI_R(0.0) && !moei_nodes_fit(c, call)) return MOE_ERR_ARGUMENT;
    return call->n_tokens > 0 ? moei_supplies_check(c, call) : MOE_OK;
}

/* How many of the tokens [from, to) are no padding. */
static size_t moei_real_tokens(const moe_call *call, size_t from, size_t to) {
    size_t t, real = to - from;
    for (t = from; t < to && call->mask != NULL; t++) real -= call->mask[t] == 0;
    return real;
}

/* The factors of so many tokens of other processes. */
static void moei_skip_jitter(const moei_pass *s, size_t tokens) {
    size_t i;
    for (i = 0; i < tokens * s->d && s->c->input == MOE_INPUT_JITTER && s->call->training && !(s->supplied & MOEI_HAS_JITTER); i++)
        (void)moe_rng_uniform(s->call->rng);
}

/* input: u. Padding is replaced by zeros, so that whatever stands there cannot reach a gradient. */
static moe_status moei_route_input(moei_pass *s, const moei_pass *batch) {
    const moe_real *x = s->call->router_x != NULL ? s->call->router_x : s->call->x;
    const moei_input *stage = moei_input_stage(s);
    moe_status status;
    size_t t;
    s->r->n_real = moei_real_tokens(s->call, 0, s->n);
    s->r->u = x;
    if (s->call->mask == NULL && stage->forward == NULL) return MOE_OK;
    status = stage->prepare != NULL ? stage->prepare(s, batch) : MOE_OK;
    if (status != MOE_OK) return status;
    moei_skip_jitter(s, moei_real_tokens(batch->call, 0, s->before));
    for (t = 0; t < s->n; t++) {
        moe_real *u = s->m.input + t * s->d;
        if (!moei_is_real(s->call, t)) memset(u, 0, s->d * sizeof(moe_real));
        else if (stage->forward != NULL) stage->forward(s, t, x + t * s->d, u);
        else memcpy(u, x + t * s->d, s->d * sizeof(moe_real));
    }
    moei_skip_jitter(s, moei_real_tokens(batch->call, s->before + s->n, s->before + s->n + s->after));
    s->r->u = s->m.input;
    return MOE_OK;
}

/* Whether n numbers are finite, eight bytes at a time: 1 added to an exponent of all ones carries into the place of the sign. */
static int moei_all_finite(size_t n, const moe_real *x) {
#if MOE_REAL_IS_DOUBLE
    const uint64_t exponents = MOEI_INFINITY_BITS, one = (uint64_t)1 << 52, signs = MOEI_SIGN_BIT;
#else
    const uint64_t exponents = UINT64_C(0x7f8000007f800000), one = UINT64_C(0x0080000000800000), signs = UINT64_C(0x8000000080000000);
#endif
    const size_t step = sizeof(uint64_t) / sizeof(moe_real);
    uint64_t carried = 0, word;
    size_t i;
    for (i = 0; i + step <= n; i += step) {
        memcpy(&word, x + i, sizeof word);
        carried |= (word & exponents) + one;
    }
    return (carried & signs) == 0 && (i == n || moe_is_finite(x[i]));
}

/* Whether the numbers of all real tokens are finite. */
static int moei_finite_rows(const moei_pass *s, const moe_real *rows, size_t columns) {
    size_t t;
    if (s->call->mask == NULL) return moei_all_finite(s->n * columns, rows);
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t) && !moei_all_finite(columns, rows + t * columns)) return 0;
    return 1;
}

static moe_status moei_route_score(moei_pass *s) {
    moei_scores[s->c->score].forward(s);
    if (s->status != MOE_OK) return s->status;
    moei_route_noise(s);
    if (!moei_finite_rows(s, s->r->logits, s->experts)) return MOE_ERR_NONFINITE;
    if (!s->c->student) return MOE_OK;
    moei_affine(s->router->kernels, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_STUDENT), NULL, s->m.student_logits);
    return moei_finite_rows(s, s->m.student_logits, s->experts) ? MOE_OK : MOE_ERR_NONFINITE;
}

/* The gate of all real tokens. */
static void moei_gate_tokens(const moei_pass *s, const moe_real *z, moe_real *r) {
    const moei_gate *gate = &moei_gates[s->c->gate];
    size_t t;
    if (s->call->mask == NULL) gate->forward(s, s->n, z, r);
    for (t = 0; t < s->n && s->call->mask != NULL; t++)
        if (moei_is_real(s->call, t)) gate->forward(s, 1, z + t * s->experts, r + t * s->experts);
}

static void moei_route_gate(moei_pass *s) {
    moei_gate_tokens(s, s->r->logits, s->r->gate);
    if (moei_is_noisy(s)) moei_gate_tokens(s, s->m.clean_logits, s->m.clean_gate);
}

static moe_status moei_route_select(moei_pass *s) {
    const moei_select *select = &moei_selects[s->call->given != NULL ? (int)MOE_SELECT_GIVEN : s->c->select];
    moe_status status;
    size_t t, i;
    if (!select->ranked || s->call->mask != NULL) memset(s->r->n_choices, 0, s->n * sizeof(int32_t));
    if (!select->ranked) memset(s->r->selected, 0, s->n * s->experts);
    status = select->choose(s);
    if (status != MOE_OK) return status;
    for (t = 0; t < s->n && !select->ranked; t++) {
        s->r->n_choices[t] = 0;
        if (moei_is_real(s->call, t)) moei_rank_marked(s, t);
    }
    memset(s->r->counts, 0, 2 * s->experts * sizeof(size_t)); /* and first_counts, behind them */
    for (t = 0; t < s->n; t++) {
        const int32_t *choice = s->r->choices + t * s->r->max_choices;
        size_t n = (size_t)s->r->n_choices[t];
        if (n > 0) s->r->first_counts[choice[0]]++;
        for (i = 0; i < n; i++) s->r->counts[choice[i]]++;
    }
    return MOE_OK;
}

static moei_token moei_token_of(const moei_pass *s, size_t t) {
    moei_token k;
    k.c = s->c;
    k.kernels = s->router->kernels;
    k.experts = s->experts;
    k.n = (size_t)s->r->n_choices[t];
    k.choice = s->r->choices + t * s->r->max_choices;
    k.z = s->r->logits + t * s->experts;
    k.p = s->r->probabilities + t * s->experts;
    return k;
}

/* section_weights: w of the chosen, times the learned factor of the expert. */
static void moei_route_weight(moei_pass *s) {
    const moe_real *factor = moei_tensor(s, MOE_ROUTER_EXPERT_SCALE);
    const moei_weight *weight = &moei_weights[s->c->weight];
    moei_token k = moei_token_of(s, 0);
    size_t t, i, choices = s->r->max_choices;
    for (t = 0; t < s->n; t++, k.choice += choices, k.z += s->experts, k.p += s->experts) {
        k.n = (size_t)s->r->n_choices[t];
        if (k.n > 0) weight->forward(&k, s->m.base_weights + t * choices);
        for (i = 0; i < k.n && factor != NULL; i++)
            s->r->section_weights[t * choices + i] = s->m.base_weights[t * choices + i] * factor[k.choice[i]];
    }
}

/* The largest |cos| between a real token and a gating vector: the tokens [n,width] that the score compares, times W. */
static moe_real moei_largest_cosine(const moei_pass *s, size_t width) {
    const moe_real *v = s->c->score == MOE_SCORE_COSINE ? moei_cosine_tokens(s) : s->r->u, *w = moei_tensor(s, MOE_ROUTER_WEIGHT);
    moe_real largest = MOEI_R(0.0), *product = s->r->weights, over_block = MOEI_F(sqrt)((moe_real)s->experts / (moe_real)s->d); /* weights come later */
    size_t t, e, q, block = s->d / s->experts;
    if (w != NULL) moei_affine(s->router->kernels, s->n, s->experts, width, v, w, NULL, product);
    for (t = 0; t < s->n; t++) {
        moe_real inverse = moei_is_real(s->call, t) ? moei_inverse_length(s->router->kernels, v + t * width, width) : MOEI_R(0.0), cosine;
        for (e = 0; e < s->experts; e++) {
            if (w != NULL) cosine = product[t * s->experts + e] * moei_inverse_length(s->router->kernels, w + e * width, width) * inverse;
            else /* grap: a gating vector is 1 on its block of features */
                for (cosine = MOEI_R(0.0), q = 0; q < block; q++) cosine += v[t * width + e * block + q] * inverse * over_block;
            if (MOEI_F(fabs)(cosine) > largest) largest = MOEI_F(fabs)(cosine);
        }
    }
    return largest < MOEI_R(1.0) ? largest : MOEI_R(1.0);
}

/* C_min of earlier calls, 0 when there is none. */
static moe_real moei_bound_before(const moei_pass *s) {
    const moe_real *state = moei_tensor(s, MOE_ROUTER_CAPACITY);
    return state != NULL ? state[0] : MOEI_R(0.0);
}

/* Whether C_min of this call is wanted. */
static int moei_makes_bound(const moei_pass *s) {
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_CAPACITY) || s->c->capacity_bound == MOE_BOUND_NONE) return 0;
    return s->c->capacity_bound == MOE_BOUND_EVERY || !(moei_bound_before(s) > MOEI_R(0.0));
}

static size_t moei_bound_width(const moei_pass *s) { return s->c->score == MOE_SCORE_COSINE ? moei_cosine_width(s) : s->d; }

/* Raises capacity_min to C_min = exp(d delta^2 / (2 - delta^2)) / E, in logarithms so that it cannot overflow; the state keeps at most 2^24. */
static void moei_route_bound(moei_pass *s, moe_real delta) {
    size_t width = moei_bound_width(s), least;
    moe_real log_bound, bound = moei_bound_before(s);
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_CAPACITY) || s->c->capacity_bound == MOE_BOUND_NONE) return;
    if (moei_makes_bound(s)) {
        log_bound = (moe_real)width * delta * delta / (MOEI_R(2.0) - delta * delta) - MOEI_F(log)((moe_real)s->experts);
        if (log_bound > MOEI_F(log)(MOEI_R(16777216.0))) s->r->bound_now = MOEI_R(16777216.0);
        else s->r->bound_now = MOEI_F(exp)(log_bound);
        s->r->capacity_bound = log_bound;
        if (bound > MOEI_R(0.0)) bound = s->c->capacity_rho * bound + (MOEI_R(1.0) - s->c->capacity_rho) * s->r->bound_now;
        else bound = s->r->bound_now;
        s->r->bound_now = bound;
    } else s->r->capacity_bound = MOEI_F(log)(bound);
    s->r->capacity_clamped = bound > (moe_real)s->r->n_real;
    least = s->r->capacity_clamped ? s->r->n_real : (size_t)MOEI_F(ceil)(bound);
    if (least > (size_t)s->effective.capacity_min) s->effective.capacity_min = least < MOE_MAX_WIDTH ? (int)least : (int)MOE_MAX_WIDTH;
}

/* C, the most pairs that an expert takes; 0 means no limit. expert_choice and affinity have limits of their own. */
static size_t moei_capacity(const moei_pass *s) {
    moe_real factor = s->call->training ? s->c->capacity_factor : s->c->capacity_factor_eval, even;
    size_t capacity = (size_t)s->c->drop_capacity, least = (size_t)s->c->capacity_min, most = s->r->n_real;
    if (capacity == 0) {
        if (s->c->select == MOE_SELECT_EXPERT_CHOICE || s->c->select == MOE_SELECT_AFFINITY) return 0;
        if (!(factor > MOEI_R(0.0)) && s->c->capacity_bound == MOE_BOUND_NONE) return 0;
        even = MOEI_F(ceil)(factor * (moe_real)s->c->top_k * (moe_real)most / (moe_real)s->experts);
        capacity = even >= (moe_real)most ? most : (size_t)even;
        if (capacity < least) capacity = least;
    }
    if (capacity > most) capacity = most;
    return capacity > 0 ? capacity : 1;
}

static size_t moei_pair_expert(const moei_pass *s, size_t t, size_t i) { return (size_t)s->r->choices[t * s->r->max_choices + i]; }

/* Random dropping of weak choices, in training only: GShard's second choice, every later one of ST-MoE. */
static void moei_drop_by_rule(moei_pass *s) {
    size_t t, i;
    if (s->c->drop_rule == MOE_DROP_RULE_NONE || !s->call->training) return;
    for (t = 0; t < s->n; t++)
        for (i = 1; i < (size_t)s->r->n_choices[t]; i++) {
            moe_real w = s->r->section_weights[t * s->r->max_choices + i];
            moe_real keep = s->c->drop_rule == MOE_DROP_RULE_GSHARD ? MOEI_R(2.0) * w : w / MOEI_R(0.2);
            if (s->c->drop_rule == MOE_DROP_RULE_GSHARD && i > 1) continue;
            if (moe_rng_uniform(s->call->rng) >= keep) s->r->kept[t * s->r->max_choices + i] = 0;
        }
}

/* The order in which tokens are placed. */
static void moei_drop_order(moei_pass *s) {
    size_t t, e, other;
    for (t = 0; t < s->n; t++) s->m.order[t] = (int32_t)t;
    if (s->c->drop_order == MOE_DROP_RANDOM && s->call->rng != NULL)
        for (t = s->n; t > 1; t--) {
            int32_t swap = s->m.order[t - 1];
            other = (size_t)moe_rng_below(s->call->rng, t);
            s->m.order[t - 1] = s->m.order[other];
            s->m.order[other] = swap;
        }
    if (s->c->drop_order != MOE_DROP_PRIORITY) return;
    for (t = 0; t < s->n; t++) {
        const moe_real *p = s->r->probabilities + t * s->experts;
        s->m.column[t] = moei_is_real(s->call, t) ? p[0] : -MOEI_INFINITY;
        for (e = 1; e < s->experts && moei_is_real(s->call, t); e++)
            if (p[e] > s->m.column[t]) s->m.column[t] = p[e];
    }
    t = moei_top_k(s, s->n, s->m.column, s->n, s->m.order);
    for (; t < s->n; t++) s->m.order[t] = -1; /* padding has no place in the order */
}

/* Places all first choices, then all second ones, in the order of tokens, while there is room. */
static void moei_drop_by_rank(moei_pass *s, size_t capacity) {
    size_t rank, i, e;
    moei_drop_order(s);
    for (e = 0; e < s->experts; e++) s->r->plan.offsets[e] = 0; /* here: how many pairs are placed */
    for (rank = 0; rank < s->r->max_choices; rank++)
        for (i = 0; i < s->n; i++) {
            size_t t = (size_t)s->m.order[i], at = t * s->r->max_choices + rank;
            if (s->m.order[i] < 0 || rank >= (size_t)s->r->n_choices[t] || !s->r->kept[at]) continue;
            e = moei_pair_expert(s, t, rank);
            s->r->kept[at] = s->r->plan.offsets[e] < capacity;
            s->r->plan.offsets[e] += s->r->kept[at];
        }
}

/* Each expert keeps the pairs with its largest p; of equal ones the lower token stays. */
static void moei_drop_by_score(moei_pass *s, size_t capacity) {
    size_t e, t, i, found;
    for (e = 0; e < s->experts; e++) {
        for (t = 0; t < s->n; t++) s->m.column[t] = -MOEI_INFINITY;
        for (t = 0; t < s->n; t++)
            for (i = 0; i < (size_t)s->r->n_choices[t]; i++)
                if (moei_pair_expert(s, t, i) == e && s->r->kept[t * s->r->max_choices + i]) s->m.column[t] = s->r->probabilities[t * s->experts + e];
        found = moei_top_k(s, s->n, s->m.column, capacity, s->m.order);
        for (i = 0; i < found; i++) s->m.column[s->m.order[i]] = MOEI_INFINITY;
        for (t = 0; t < s->n; t++)
            for (i = 0; i < (size_t)s->r->n_choices[t]; i++)
                if (moei_pair_expert(s, t, i) == e && s->m.column[t] < MOEI_INFINITY) s->r->kept[t * s->r->max_choices + i] = 0;
    }
}

/* Sum of a token's surviving weights, by which renormalize = after divides. */
static moe_real moei_surviving(const moei_pass *s, size_t t) {
    moe_real sum = MOEI_R(0.0);
    size_t i;
    for (i = 0; i < (size_t)s->r->n_choices[t]; i++)
        if (s->r->kept[t * s->r->max_choices + i]) sum += s->r->section_weights[t * s->r->max_choices + i];
    return sum;
}

/* capacity: which pairs stay, and the dense matrix of their final weights. Returns 0 when one of these is not finite. */
static int moei_route_capacity(moei_pass *s) {
    int finite = 1;
    moe_routing *r = s->r;
    size_t capacity = MOEI_KEPT(EXTRAS, MOE_EXTRA_CAPACITY) ? moei_capacity(s) : 0, choices = r->max_choices, dropped = 0, t, i;
    memset(r->kept, 1, s->n * r->max_choices);
    r->capacity = capacity;
    if (MOEI_KEPT(EXTRAS, MOE_EXTRA_CAPACITY)) moei_drop_by_rule(s);
    if (capacity > 0 && s->c->drop_order == MOE_DROP_SCORE) moei_drop_by_score(s, capacity);
    else if (capacity > 0) moei_drop_by_rank(s, capacity);
    memset(r->weights, 0, s->n * s->experts * (sizeof(moe_real) + 1)); /* and selected, behind them */
    for (t = 0; t < s->n; t++) {
        const int32_t *choice = r->choices + t * choices;
        const moe_real *w = r->section_weights + t * choices;
        const unsigned char *kept = r->kept + t * choices;
        size_t n = (size_t)r->n_choices[t], row = t * s->experts;
        const int after = s->c->renormalize == MOE_RENORMALIZE_AFTER;
        const moe_real sum = after ? moei_surviving(s, t) : MOEI_R(0.0);
        for (i = 0; i < n; i++) {
            const moe_real weight = kept[i] ? (after ? moei_ratio(w[i], sum) : w[i]) * s->c->scale : MOEI_R(0.0);
            finite &= moe_is_finite(weight);
            r->weights[row + (size_t)choice[i]] = weight;
            r->selected[row + (size_t)choice[i]] = kept[i];
            dropped += !kept[i];
        }
    }
    r->n_dropped = dropped;
    return finite;
}

/* offsets[e + 1] = where the row of expert e starts: filling the row moves it to its end. */
static void moei_plan_rows(const moei_pass *s) {
    const moe_routing *r = s->r;
    size_t *start = r->plan.offsets + 1, t, i, e, sum = 0, count;
    const size_t *counts = r->counts;
    if (r->n_dropped > 0) {
        memset(start, 0, s->experts * sizeof(size_t));
        for (t = 0; t < s->n; t++)
            for (i = 0; i < (size_t)r->n_choices[t]; i++) start[moei_pair_expert(s, t, i)] += r->kept[t * r->max_choices + i];
        counts = start;
    }
    r->plan.offsets[0] = 0;
    for (e = 0; e < s->experts; e++) count = counts[e], start[e] = sum, sum += count;
}

/* The plan: the surviving pairs sorted by expert, then by token. */
static void moei_route_plan(moei_pass *s) {
    const moe_routing *r = s->r;
    size_t *at = r->plan.offsets + 1, t, i, choices = r->max_choices;
    int on_input = s->c->apply_to == MOE_APPLY_INPUT;
    moei_plan_rows(s);
    for (t = 0; t < s->n; t++) {
        const int32_t *choice = r->choices + t * choices;
        const moe_real *w = r->weights + t * s->experts;
        size_t n = (size_t)r->n_choices[t];
        for (i = 0; i < n; i++) {
            moe_entry *entry;
            if (!r->kept[t * choices + i]) continue;
            entry = r->plan.entries + at[choice[i]]++;
            entry->token = (int32_t)t;
            entry->rank = (int32_t)i;
            entry->weight_in = on_input ? w[choice[i]] : MOEI_R(1.0);
            entry->weight_out = on_input ? MOEI_R(1.0) : w[choice[i]];
        }
    }
}

/* The soft plan: every real token of a sequence takes part in every slot of it; row = sequence * slots + slot. The entries of an expert stand
   slot after slot; they are made token after token, as D and C lie. */
static void moei_soft_plan(moei_pass *s) {
    size_t total = moei_slot_total(s->c), slots = (size_t)s->c->slots, sequences = moei_sequence_count(s->call);
    size_t e, i, slot, t, from, to, real;
    moe_entry *entries = s->r->plan.entries;
    s->r->plan.rows = slots * sequences;
    for (e = 0; e < s->experts; e++) {
        s->r->plan.offsets[e] = (size_t)(entries - s->r->plan.entries);
        for (i = 0; i < sequences; i++) {
            moe_entry *entry = entries;
            moei_sequence(s->call, i, &from, &to);
            for (t = from, real = 0; t < to; t++) real += (size_t)moei_is_real(s->call, t);
            for (t = from; t < to; t++) {
                const moe_real *d = s->r->gate + t * total + e * slots, *c = s->r->probabilities + t * total + e * slots;
                moe_real sum = MOEI_R(0.0);
                if (!moei_is_real(s->call, t)) continue;
                for (slot = 0; slot < slots; slot++) {
                    moe_entry *to_slot = entry + slot * real;
                    to_slot->token = (int32_t)t;
                    to_slot->rank = (int32_t)(i * slots + slot);
                    to_slot->weight_in = d[slot];
                    to_slot->weight_out = c[slot];
                    sum += c[slot];
                }
                s->r->weights[t * s->experts + e] = sum;
                entry++;
            }
            entries += slots * real;
        }
    }
    s->r->plan.offsets[s->experts] = (size_t)(entries - s->r->plan.entries);
}

static void moei_route_soft(moei_pass *s) {
    size_t total = moei_slot_total(s->c), i, t, from, to;
    moei_soft_logits(s);
    for (i = 0; i < s->n * s->experts; i++) s->r->weights[i] = MOEI_R(0.0), s->r->selected[i] = moei_is_real(s->call, i / s->experts) != 0;
    for (i = 0; i < s->experts; i++) s->r->counts[i] = s->r->first_counts[i] = 0;
    for (i = 0; i < moei_sequence_count(s->call); i++) {
        moei_sequence(s->call, i, &from, &to);
        moei_soft_dispatch(s, from, to);
    }
    for (t = 0; t < s->n; t++) {
        s->r->n_choices[t] = 0;
        moe_softmax(s->router->kernels, total, s->r->logits + t * total, MOEI_R(1.0), s->r->probabilities + t * total);
    }
    moei_soft_plan(s);
}

#ifndef MOE_NO_TRAIN
static void moei_route_losses(moei_pass *s) {
    int loss;
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++) {
        moe_real factor = moei_loss_factor(s->c, loss);
        s->r->loss[loss] = factor > MOEI_R(0.0) && s->r->n_real > 0 ? moei_losses[loss].value(s, factor, 0) : MOEI_R(0.0);
    }
}
#endif

/* Everything but the scratch arrays. */
static void moei_pass_begin(moei_pass *s, const moe_router *router, const moe_call *call, moe_routing *r) {
    memset(s, 0, offsetof(moei_pass, m));
    s->router = router;
    s->c = &router->config;
    s->call = call;
    s->r = r;
    s->n = call->n_tokens;
    s->experts = (size_t)router->config.n_experts;
    s->d = (size_t)router->config.d_model;
    s->supplied = moei_supplied(call);
    if (MOEI_KEPT(EXTRAS, MOE_EXTRA_SCHEDULE) && (router->parts & MOEI_PART_MOVES)) moei_schedule(s);
}

/* A call without tokens: an empty plan. */
static void moei_route_nothing(moe_routing *r) {
    memset(r->counts, 0, r->n_experts * sizeof(size_t));
    memset(r->first_counts, 0, r->n_experts * sizeof(size_t));
    memset(r->plan.offsets, 0, (r->n_experts + 1) * sizeof(size_t));
}

/* What is decided for each token by itself and its sequence: z, r, p. */
static moe_status moei_route_tokens(moei_pass *s, const moei_pass *batch, moe_real *delta) {
    moe_status status = moei_route_input(s, batch);
    if (status == MOE_OK && s->n == 0) moei_route_noise(s); /* a part without tokens draws as the others do */
    else if (status == MOE_OK) status = moei_route_score(s);
    if (status != MOE_OK || s->n == 0) return status;
    if (moei_makes_bound(s)) *delta = moei_largest_cosine(s, moei_bound_width(s));
    moei_route_gate(s);
    moei_route_refine(s);
    return s->c->refine == MOE_REFINE_NONE || moei_finite_rows(s, s->r->probabilities, s->experts) ? MOE_OK : MOE_ERR_NONFINITE;
}

/* What is decided among the tokens: S, w and who stays. own: the pass whose tokens the plan is for. */
static moe_status moei_route_among(moei_pass *s, moei_pass *own, moe_real delta) {
    moe_status status;
    moei_route_bound(s, delta);
    status = moei_route_select(s);
    if (status != MOE_OK) return status;
    moei_route_weight(s);
    if (!moei_route_capacity(s)) return MOE_ERR_NONFINITE;
    own->r->n_dropped = own == s ? s->r->n_dropped : 1; /* of a part of the tokens the pairs are counted anew */
    moei_route_plan(own);
#ifndef MOE_NO_TRAIN
    if (s->call->training) moei_route_losses(s);
#endif
    return MOE_OK;
}

/* The stages of the pipeline, in their order. */
static moe_status moei_route_stages(moei_pass *s) {
    moe_real delta = MOEI_R(0.0);
    moe_status status;
    if (moei_is_soft(s->c)) {
        (void)moei_route_input(s, s);
        moei_route_soft(s);
        return moei_finite_rows(s, s->r->logits, moei_slot_total(s->c)) ? MOE_OK : MOE_ERR_NONFINITE;
    }
    status = moei_route_tokens(s, s, &delta);
    return status == MOE_OK ? moei_route_among(s, s, delta) : status;
}

/* ---- one call among several processes ------------------------------------------------------------------------------------------- */

/* The call of all tokens of a batch, of what moei_tell_call has gathered. */
static moe_call moei_batch_call(const moe_call *call, const moei_scratch *m) {
    moe_call all = *call;
    size_t total = call->batch->total;
    all.n_tokens = total;
    all.x = all.router_x = all.noise = all.jitter = all.previous_input = NULL;
    all.mask = m->batch_mask;
    all.sequences = m->batch_sequences;
    all.n_sequences = (size_t)m->batch_sequences[total + 1];
    all.token_ids = m->batch_ids;
    all.given = m->batch_sequences[total + 2] & MOEI_HAS_GIVEN ? m->batch_given : NULL;
    all.home = m->batch_sequences[total + 2] & MOEI_HAS_HOME ? m->batch_home : NULL;
    all.teacher = m->batch_teacher;
    return all;
}

/* A copy of n own rows in their place among those of all, and then these. */
static moe_status moei_tell(const moe_call *call, moe_status status, size_t row_bytes, const void *own, void *rows) {
    unsigned char *to = (unsigned char *)rows;
    if (status == MOE_OK && call->n_tokens > 0 && own != NULL) memcpy(to + call->batch->first * row_bytes, own, call->n_tokens * row_bytes);
    return call->batch->gather(call->batch->ctx, status, row_bytes, rows);
}

/* Where sequences begin, as offsets; behind them their number and what is supplied. Empty ones are left out. Returns 0 where tokens differ in that. */
static int moei_tell_sequences(size_t total, unsigned char *flags, int32_t *sequences) {
    size_t t, n = 0;
    int has = total > 0 ? flags[0] & MOEI_HAS : 0, alike = 1;
    for (t = 0; t < total; t++) {
        alike &= (flags[t] & MOEI_HAS) == has;
        if (flags[t] & MOEI_BEGINS) sequences[n++] = (int32_t)t;
        flags[t] &= MOEI_REAL_TOKEN;
    }
    sequences[n] = (int32_t)total;
    sequences[total + 1] = (int32_t)n;
    sequences[total + 2] = has;
    return alike;
}

/* Tells the other processes what every stage may need to know of the own tokens. status: whether the call is good here. */
static moe_status moei_tell_call(const moe_call *call, moe_status status, size_t choices, const moei_scratch *m) {
    const moe_batch *batch = call->batch;
    unsigned has = moei_supplied(call);
    size_t t, i;
    for (t = 0; t < call->n_tokens && status == MOE_OK; t++) m->batch_mask[batch->first + t] = (unsigned char)(has | (moei_is_real(call, t) ? MOEI_REAL_TOKEN : 0));
    for (i = 0; i < moei_sequence_count(call) && status == MOE_OK; i++) {
        size_t from, to;
        moei_sequence(call, i, &from, &to);
        if (to > from) m->batch_mask[batch->first + from] |= MOEI_BEGINS;
    }
    status = moei_tell(call, status, 1, NULL, m->batch_mask);
    if (status != MOE_OK) return status;
    if (!moei_tell_sequences(batch->total, m->batch_mask, m->batch_sequences)) return MOE_ERR_ARGUMENT;
    has = (unsigned)m->batch_sequences[batch->total + 2];
    if (m->batch_ids != NULL && !(has & MOEI_HAS_GIVEN)) status = moei_tell(call, status, sizeof(int32_t), call->token_ids, m->batch_ids);
    if (status == MOE_OK && (has & MOEI_HAS_GIVEN)) status = moei_tell(call, status, choices * sizeof(int32_t), call->given, m->batch_given);
    if (status == MOE_OK && (has & MOEI_HAS_HOME) && m->batch_home != NULL) status = moei_tell(call, status, sizeof(int32_t), call->home, m->batch_home);
    return status;
}

/* The rows of a batch's array from the own tokens on. */
static moe_real *moei_from_row(moe_real *rows, size_t row) { return rows != NULL ? rows + row : NULL; }

/* The pass of the own tokens from that of the batch: the same arrays, from their own rows on. own_r takes its routing. */
static void moei_own_pass(const moei_pass *s, const moe_call *call, moe_routing *own_r, moei_pass *own) {
    size_t first = call->batch->first, cell = first * s->experts, pair = first * s->r->max_choices;
    moei_scratch *m = &own->m;
    *own = *s;
    if (s->c == &s->effective) own->c = &own->effective;
    own->call = call, own->r = own_r, own->n = call->n_tokens;
    own->is_part = 1, own->before = first, own->after = call->batch->total - first - call->n_tokens;
    *own_r = *s->r;
    own_r->logits += cell, own_r->gate += cell, own_r->probabilities += cell;
    own_r->choices += pair, own_r->n_choices += first, own_r->kept += pair, own_r->section_weights += pair;
    own_r->weights += cell, own_r->selected += cell;
    m->base_weights += pair, m->column += first;
    m->clean_logits = moei_from_row(m->clean_logits, cell), m->clean_gate = moei_from_row(m->clean_gate, cell);
    m->noise_raw = moei_from_row(m->noise_raw, cell), m->noise_value = moei_from_row(m->noise_value, cell);
    m->student_logits = moei_from_row(m->student_logits, cell), m->d_student = moei_from_row(m->d_student, cell);
    m->d_logits = moei_from_row(m->d_logits, cell), m->d_gate = moei_from_row(m->d_gate, cell);
    m->d_probabilities = moei_from_row(m->d_probabilities, cell), m->d_weights = moei_from_row(m->d_weights, cell);
    m->d_final = moei_from_row(m->d_final, cell), m->d_clean = moei_from_row(m->d_clean, cell);
    m->d_clean_gate = moei_from_row(m->d_clean_gate, cell), m->d_noise = moei_from_row(m->d_noise, cell);
    if (m->clusters_of != NULL) m->clusters_of += first;
}

/* Tells the others what the own tokens came to: all that the stages behind read. */
static moe_status moei_tell_tokens(const moei_pass *s, const moei_pass *own, moe_status status, moe_real *delta) {
    const moe_call *call = own->call;
    size_t row = s->experts * sizeof(moe_real), t;
    status = moei_tell(call, status, row, NULL, s->r->logits);
    if (status == MOE_OK && s->c->refine != MOE_REFINE_NONE) status = moei_tell(call, status, row, NULL, s->r->probabilities);
    if (status == MOE_OK && moei_is_noisy(s)) status = moei_tell(call, status, row, NULL, s->m.clean_logits);
    if (status == MOE_OK && moei_is_noisy(s) && s->c->noise == MOE_NOISE_NOISY_TOPK) status = moei_tell(call, status, row, NULL, s->m.noise_raw);
    if (status == MOE_OK && s->c->student) status = moei_tell(call, status, row, NULL, s->m.student_logits);
    if (status == MOE_OK && s->m.batch_teacher != NULL) status = moei_tell(call, status, row, call->teacher, s->m.batch_teacher);
    if (status == MOE_OK && s->m.batch_x != NULL && !(s->supplied & MOEI_HAS_DISTANCES)) status = moei_tell(call, status, s->d * sizeof(moe_real), call->x, s->m.batch_x);
    if (status != MOE_OK || !moei_makes_bound(s)) return status;
    for (t = 0; t < own->n; t++) own->m.column[t] = *delta;
    status = moei_tell(call, status, sizeof(moe_real), NULL, s->m.column);
    for (t = 0; t < s->n && status == MOE_OK; t++)
        if (s->m.column[t] > *delta) *delta = s->m.column[t];
    return status;
}

/* A call whose batch decides together. status: whether the call is good here; the other processes hear of it. */
static moe_status moei_route_together(const moei_pass *own_call, moe_status status) {
    const moe_call *call = own_call->call;
    moe_call all;
    moei_pass batch, *s = &batch;
    moe_routing own_r;
    moei_pass own;
    moe_real delta = MOEI_R(0.0);
    status = moei_tell_call(call, status, own_call->r->max_choices, &own_call->m);
    if (status != MOE_OK) return status;
    all = moei_batch_call(call, &own_call->m);
    batch = *own_call;
    if (own_call->c == &own_call->effective) batch.c = &batch.effective;
    s->call = &all, s->n = all.n_tokens;
    s->supplied = (unsigned)s->m.batch_sequences[s->n + 2];
    moei_own_pass(s, call, &own_r, &own);
    if (s->n == 0) {
        moei_route_nothing(s->r);
        return MOE_OK;
    }
    s->r->n_real = moei_real_tokens(&all, 0, s->n);
    status = moei_route_tokens(&own, s, &delta);
    if (status == MOE_OK && (s->supplied & MOEI_HAS_DISTANCES) && call->distances == NULL) status = MOE_ERR_ARGUMENT; /* they are those of the batch */
    s->r->u = own_r.u;
    status = moei_tell_tokens(s, &own, status, &delta);
    if (status != MOE_OK) return status;
    moei_route_gate(s);
    return moei_route_among(s, &own, delta);
}

moe_status moe_routing_own(const moe_routing *routing, const unsigned char *mask, moe_routing *own) {
    const moe_routing *r = routing;
    moe_routing made;
    size_t n, t, i, cell, pair;
    if (routing == NULL || own == NULL) return MOE_ERR_ARGUMENT;
    made = *routing;
    n = r->plan.n_tokens;
    if (n < r->n_tokens) {
        cell = r->first * r->n_experts, pair = r->first * r->max_choices;
        made.n_tokens = n, made.first = made.n_real = made.n_dropped = 0;
        made.logits += cell, made.gate += cell, made.probabilities += cell, made.weights += cell, made.selected += cell;
        made.choices += pair, made.n_choices += r->first, made.kept += pair, made.section_weights += pair;
        for (t = 0; t < n; t++) {
            made.n_real += mask == NULL || mask[t] != 0;
            for (i = 0; i < (size_t)made.n_choices[t]; i++) made.n_dropped += !made.kept[t * r->max_choices + i];
        }
    }
    *own = made;
    return MOE_OK;
}

/* Whether the call's tokens have their place in its batch. */
static int moei_batch_fits(const moe_call *call) {
    const moe_batch *b = call->batch;
    return b == NULL || (b->gather != NULL && b->first <= b->total && call->n_tokens <= b->total - b->first && MOEI_FITS_INT32(b->total));
}

moe_status moe_route(const moe_router *router, const moe_call *call, void *memory, size_t size, moe_routing *routing) {
    moei_layout l = moei_layout_begin(memory);
    moe_routing r;
    moei_pass s;
    moe_status status;
    int together;
    if (router == NULL || call == NULL || memory == NULL || routing == NULL || !moei_batch_fits(call)) return MOE_ERR_ARGUMENT;
    status = moei_call_check(router, call);
    together = moei_is_together(router, call);
    if (status != MOE_OK && !together) return status;
    moei_call_layout(router, call, &l, &r, &s.m);
    if (l.overflow && status == MOE_OK) status = MOE_ERR_OVERFLOW;
    if (l.used > size && status == MOE_OK) status = MOE_ERR_SPACE;
    moei_pass_begin(&s, router, call, &r);
    r.n_tokens = together ? call->batch->total : s.n;
    r.first = together ? call->batch->first : 0;
    r.plan.n_tokens = s.n;
    r.n_experts = r.plan.n_experts = s.experts;
    r.top_k = s.c->top_k;
    r.memory = memory;
    if (together) status = moei_route_together(&s, status);
    else if (status != MOE_OK) return status;
    else if (s.n == 0) moei_route_nothing(&r);
    else status = moei_route_stages(&s);
    if (status == MOE_OK) { /* in two parts: a copy of this size as a whole is a slow instruction with some compilers */
        memcpy(routing, &r, offsetof(moe_routing, counts));
        memcpy(&routing->counts, &r.counts, sizeof r - offsetof(moe_routing, counts));
    }
    return status;
}

/* ==== one call: backward ======================================================================================================================== */

#ifndef MOE_NO_TRAIN

/* Gradient of the final weights from the plan's entries, through scale and renormalisation to the section's weights. */
static void moei_backward_plan(moei_pass *s) {
    moe_routing *r = s->r;
    const moe_real *d_final;
    size_t e, i, t;
    for (e = 0; e < s->experts; e++)
        for (i = r->plan.offsets[e]; i < r->plan.offsets[e + 1]; i++)
            s->m.d_final[(size_t)r->plan.entries[i].token * s->experts + e] = s->c->apply_to == MOE_APPLY_INPUT ? r->d_weight_in[i] : r->d_weight_out[i];
    for (t = 0; t < s->n; t++) {
        moe_real scale = s->c->scale, along = MOEI_R(0.0);
        if (s->c->renormalize == MOE_RENORMALIZE_AFTER) {
            scale = moei_slope(scale, moei_surviving(s, t));
            for (e = 0; e < s->experts; e++) /* w' = s w / sum w: dw = s / sum (d - sum d w' / s) */
                if (r->selected[t * s->experts + e]) along += s->m.d_final[t * s->experts + e] * moei_ratio(r->weights[t * s->experts + e], s->c->scale);
        }
        d_final = s->m.d_final + t * s->experts;
        for (e = 0; e < s->experts; e++)
            if (r->selected[t * s->experts + e]) s->m.d_weights[t * s->experts + e] += scale * (d_final[e] - along);
    }
}

/* A learned threshold: the factor [p > theta] of a chosen pair has the slope of sigmoid((p - theta) / kappa). */
static void moei_backward_threshold(moei_pass *s, const moei_token *k, size_t t, const moe_real *dw, const moe_real *d_through) {
    moe_real *d_theta = moei_gradient(s, MOE_ROUTER_THRESHOLD), kappa = MOEI_R(0.01);
    size_t i;
    for (i = 0; i < k->n; i++) {
        size_t e = (size_t)k->choice[i];
        moe_real theta = moei_threshold(s, e), above = (k->p[e] - theta) / kappa, d_factor = d_through[e] * k->p[e];
        if (moei_weights[s->c->weight].counts_choices > 0) d_factor = dw[i] / (s->c->weight == MOE_WEIGHT_UNIFORM ? (moe_real)k->n : MOEI_R(1.0));
        d_factor *= moe_sigmoid(above) * moe_sigmoid(-above) / kappa; /* not s (1 - s), which cancels */
        s->m.d_probabilities[t * s->experts + e] += d_factor;
        if (d_theta != NULL) d_theta[e] -= s->c->threshold_sigmoid ? d_factor * theta * (MOEI_R(1.0) - theta) : d_factor;
    }
}

static void moei_backward_weight(moei_pass *s) {
    const moe_real *factor = moei_tensor(s, MOE_ROUTER_EXPERT_SCALE);
    moe_real *d_factor = moei_gradient(s, MOE_ROUTER_EXPERT_SCALE), *dw = s->m.row, *d_p = dw + s->experts;
    size_t t, i, e;
    for (t = 0; t < s->n; t++) {
        moei_token k = moei_token_of(s, t);
        const moe_real *base = s->m.base_weights + t * s->r->max_choices;
        if (k.n == 0) continue;
        for (i = 0; i < k.n; i++) {
            e = (size_t)k.choice[i];
            dw[i] = s->m.d_weights[t * s->experts + e];
            if (factor == NULL) continue;
            if (d_factor != NULL) d_factor[e] += dw[i] * base[i];
            dw[i] *= factor[e];
        }
        for (i = 0; i < k.n; i++) d_p[k.choice[i]] = MOEI_R(0.0);
        moei_weights[s->c->weight].backward(&k, base, dw, s->m.d_logits + t * s->experts, d_p);
        if (s->c->threshold_learned) moei_backward_threshold(s, &k, t, dw, d_p);
        for (i = 0; i < k.n; i++) s->m.d_probabilities[t * s->experts + (size_t)k.choice[i]] += d_p[k.choice[i]];
    }
}

static void moei_backward_gate(moei_pass *s) {
    size_t t, row;
    for (t = 0; t < s->n; t++) {
        row = t * s->experts;
        if (moei_is_real(s->call, t)) {
            moei_gates[s->c->gate].backward(s, s->r->logits + row, s->r->gate + row, s->m.d_gate + row, s->m.d_logits + row);
            if (moei_is_noisy(s))
                moei_gates[s->c->gate].backward(s, s->m.clean_logits + row, s->m.clean_gate + row, s->m.d_clean_gate + row, s->m.d_clean + row);
        } else
            memset(s->m.d_logits + row, 0, s->experts * sizeof(moe_real));
    }
}

static void moei_backward_input(moei_pass *s, moe_real *dx) {
    const moe_real *x = s->call->router_x != NULL ? s->call->router_x : s->call->x;
    const moei_input *stage = moei_input_stage(s);
    size_t t;
    for (t = 0; t < s->n; t++) {
        moe_real *to = dx != NULL ? dx + t * s->d : s->m.d_unused;
        if (!moei_is_real(s->call, t)) continue;
        if (stage->backward != NULL) stage->backward(s, t, x + t * s->d, s->m.d_input + t * s->d, to);
        else moe_axpy(s->router->kernels, s->d, MOEI_R(1.0), s->m.d_input + t * s->d, to);
    }
}

/* Gradients of D and C from the plan's entries, back through both softmaxes into d_logits. */
static void moei_soft_backward_plan(moei_pass *s) {
    moe_routing *r = s->r;
    size_t total = moei_slot_total(s->c), slots = (size_t)s->c->slots, e, i, t, slot, from, to;
    for (e = 0; e < s->experts; e++)
        for (i = r->plan.offsets[e]; i < r->plan.offsets[e + 1]; i++) {
            size_t cell = (size_t)r->plan.entries[i].token * total + e * slots + (size_t)r->plan.entries[i].rank % slots;
            s->m.d_gate[cell] = r->d_weight_in[i];
            s->m.d_probabilities[cell] = r->d_weight_out[i];
        }
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t)) moe_softmax_backward(total, r->probabilities + t * total, s->m.d_probabilities + t * total, MOEI_R(1.0), s->m.d_logits + t * total);
    for (i = 0; i < moei_sequence_count(s->call); i++)
        for (slot = 0, moei_sequence(s->call, i, &from, &to); slot < total; slot++) {
            moe_real along = MOEI_R(0.0);
            for (t = from; t < to; t++) along += r->gate[t * total + slot] * s->m.d_gate[t * total + slot];
            for (t = from; t < to; t++) s->m.d_logits[t * total + slot] += r->gate[t * total + slot] * (s->m.d_gate[t * total + slot] - along);
        }
}

static void moei_soft_backward(moei_pass *s) {
    moe_routing *r = s->r;
    const moe_real *phi = moei_tensor(s, MOE_ROUTER_SLOT_VECTORS);
    moe_real *d_phi = moei_gradient(s, MOE_ROUTER_SLOT_VECTORS), *d_scale = moei_gradient(s, MOE_ROUTER_SLOT_SCALE), scale, sum = MOEI_R(0.0);
    size_t total = moei_slot_total(s->c), i, cells = s->n * total;
    moei_soft_backward_plan(s);
    if (!s->c->soft_normalise) {
        moei_affine_backward(s->router->kernels, s->n, total, s->d, r->u, phi, s->m.d_logits, s->m.d_input, d_phi, NULL);
        return;
    }
    scale = moei_tensor(s, MOE_ROUTER_SLOT_SCALE)[0];
    for (i = 0; i < cells; i++) sum += s->m.d_logits[i] * r->logits[i], s->m.d_logits[i] *= scale;
    if (d_scale != NULL) d_scale[0] += moei_ratio(sum, scale);
    memset(s->m.d_unit, 0, s->n * s->d * sizeof(moe_real));
    memset(s->m.d_keys, 0, total * s->d * sizeof(moe_real));
    moei_affine_backward(s->router->kernels, s->n, total, s->d, s->m.unit, s->m.keys, s->m.d_logits, s->m.d_unit, s->m.d_keys, NULL);
    moei_unit_backward(s, s->n, r->u, s->m.unit, s->m.d_unit, s->m.d_input);
    if (d_phi != NULL) moei_unit_backward(s, total, phi, s->m.keys, s->m.d_keys, d_phi);
}

/* Back from the plan's entries and what the losses have left, for the call's own tokens. */
static moe_status moei_backward_tokens(moei_pass *s, moe_real *dx) {
    moei_backward_plan(s);
    moei_backward_weight(s);
    moei_refine_backward(s);
    moei_backward_gate(s);
    moei_noise_backward(s);
    moei_scores[s->c->score].backward(s);
    if (s->m.d_student != NULL && !s->frozen)
        moei_affine_backward(s->router->kernels, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_STUDENT), s->m.d_student, s->m.d_input,
                             moei_gradient(s, MOE_ROUTER_STUDENT), NULL);
    moei_backward_input(s, dx);
    return s->status;
}

moe_status moe_route_backward(const moe_router *router, const moe_call *call, moe_routing *routing, moe_real *const *d_tensors, moe_real *dx,
                              moe_real *d_nodes) {
    moei_pass s, own;
    moe_call all;
    moe_routing own_r;
    size_t cells;
    int loss, together;
    if (router == NULL || call == NULL || routing == NULL) return MOE_ERR_ARGUMENT;
    if (routing->d_weight_out == NULL || !call->training) return MOE_ERR_STATE;
    if (routing->n_tokens == 0) return MOE_OK;
    together = moei_is_together(router, call);
    moei_pass_begin(&s, router, call, routing);
    moei_scratch_again(router, call, routing, &s.m);
    if (together) {
        all = moei_batch_call(call, &s.m);
        s.call = &all, s.n = all.n_tokens;
    }
    s.d_tensors = d_tensors;
    s.d_nodes = d_nodes;
    cells = s.n * (moei_is_soft(s.c) ? moei_slot_total(s.c) : s.experts) * sizeof(moe_real);
    memset(s.m.d_logits, 0, cells);
    memset(s.m.d_gate, 0, cells);
    memset(s.m.d_probabilities, 0, cells);
    memset(s.m.d_input, 0, call->n_tokens * s.d * sizeof(moe_real));
    if (moei_is_soft(s.c)) {
        moei_soft_backward(&s);
        moei_backward_input(&s, dx);
        return MOE_OK;
    }
    memset(s.m.d_weights, 0, cells);
    if (s.m.d_clean != NULL) {
        memset(s.m.d_clean, 0, cells);
        memset(s.m.d_clean_gate, 0, cells);
        memset(s.m.d_noise, 0, cells);
    }
    if (s.m.d_student != NULL) memset(s.m.d_student, 0, cells);
    if (together && !call->batch->lead) s.d_tensors = NULL;
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++) {
        moe_real factor = moei_loss_factor(s.c, loss);
        if (factor > MOEI_R(0.0) && routing->n_real > 0) (void)moei_losses[loss].value(&s, factor, 1);
    }
    s.d_tensors = d_tensors;
    if (!together) return moei_backward_tokens(&s, dx);
    moei_own_pass(&s, call, &own_r, &own);
    return own.n > 0 ? moei_backward_tokens(&own, dx) : MOE_OK;
}

/* ==== state =============================================================================================================================== */

/* Whether every state tensor of the router has memory in state. */
static int moei_state_fits(const moe_router *router, moe_real *const *state) {
    moe_slot slot;
    int place;
    for (place = 0; place < MOE_ROUTER_SLOTS; place++)
        if (moe_router_slot(&router->config, place, &slot) == MOE_OK && (slot.flags & (unsigned)MOE_PARAM_STATE) != 0 && state[place] == NULL) return 0;
    return 1;
}

/* table <- rho table + (1 - rho) M for the clusters of at least two tokens, M as in mode paper. */
static void moei_observe_clusters(const moei_pass *s, moe_real *table) {
    moe_real *m = s->m.clusters, rho = s->c->ac_rho; /* its first row is free after the call */
    const moe_real *h = moei_cluster_tokens(s);
    size_t k, q, t, count;
    for (k = 0; k < s->experts; k++) {
        moei_fill(m, s->d, MOEI_R(0.0));
        for (t = 0, count = 0; t < s->n; t++) {
            if (!moei_is_real(s->call, t) || (s->m.clusters_of != NULL ? s->m.clusters_of[t] : moei_cluster(s, t)) != (int32_t)k) continue;
            s->m.order[count++] = (int32_t)t;
            moe_axpy(s->router->kernels, s->d, MOEI_R(1.0), h + t * s->d, m);
        }
        if (count < 2) continue;
        moei_cluster_spread(s, h, s->m.order, count, m);
        if (s->c->ac_lambda > MOEI_R(0.0)) moei_exact_weights(m, s->d, s->c->ac_lambda);
        else moei_paper_weights(m, s->d);
        for (q = 0; q < s->d; q++) table[k * s->d + q] = rho * table[k * s->d + q] + (MOEI_R(1.0) - rho) * m[q];
    }
}

moe_status moe_router_observe(const moe_router *router, const moe_call *call, const moe_routing *routing, moe_real *const *state) {
    moei_pass s;
    moe_call all;
    moe_routing r;
    size_t e;
    moe_real *load;
    if (router == NULL || call == NULL || routing == NULL || state == NULL || !moei_state_fits(router, state)) return MOE_ERR_ARGUMENT;
    if (!call->training) return MOE_ERR_STATE;
    if (routing->n_tokens == 0 || routing->n_real == 0) return MOE_OK;
    r = *routing;
    moei_pass_begin(&s, router, call, &r);
    moei_scratch_again(router, call, routing, &s.m);
    if (moei_is_together(router, call)) {
        all = moei_batch_call(call, &s.m);
        s.call = &all, s.n = all.n_tokens;
    }
    load = state[MOE_ROUTER_LOAD];
    if (router->config.input == MOE_INPUT_ADAPTIVE_CLUSTERING && router->config.ac_mode == MOE_AC_RUNNING) {
        if (call->n_tokens > 0 && call->previous_input == NULL) return MOE_ERR_ARGUMENT;
        if (!s.frozen) moei_observe_clusters(&s, state[MOE_ROUTER_AC_RUNNING]);
    }
    for (e = 0; e < s.experts && load != NULL; e++) load[e] += (moe_real)r.counts[e];
    if (load != NULL) load[s.experts] += (moe_real)r.n_real;
    if (state[MOE_ROUTER_CAPACITY] != NULL && r.bound_now > MOEI_R(0.0)) state[MOE_ROUTER_CAPACITY][0] = r.bound_now;
    return MOE_OK;
}

/* b_e += gamma sign(mean n - n_e). E times that is a difference of whole numbers: a mean could be rounded. */
static void moei_advance_bias(const moe_router_config *c, const moe_real *load, moe_real *bias) {
    double sum = 0.0, gap;
    int e;
    for (e = 0; e < c->n_experts; e++) sum += (double)load[e];
    for (e = 0; e < c->n_experts; e++) {
        gap = sum - (double)load[e] * (double)c->n_experts;
        if (gap > 0.0) bias[e] += c->bias_rate;
        if (gap < 0.0) bias[e] -= c->bias_rate;
    }
}

/* The factor grows while fewer than 1 - K/E of the pairs are zero. */
static void moei_advance_l1(const moe_router_config *c, const moe_real *load, moe_real *factor) {
    moe_real pairs = MOEI_R(0.0), all = load[c->n_experts] * (moe_real)c->n_experts, wanted = MOEI_R(1.0) - (moe_real)c->top_k / (moe_real)c->n_experts, next;
    int e;
    for (e = 0; e < c->n_experts; e++) pairs += load[e];
    next = MOEI_R(1.0) - pairs / all < wanted ? *factor * MOEI_R(1.2) : *factor / MOEI_R(1.2);
    if (next > MOEI_R(1e-30) && next < MOEI_R(1e30)) *factor = next;
}

moe_status moe_router_advance(const moe_router *router, moe_real *const *state) {
    const moe_router_config *c;
    moe_real *step, *load;
    int e, frozen;
    if (router == NULL || state == NULL || !moei_state_fits(router, state)) return MOE_ERR_ARGUMENT;
    c = &router->config, step = state[MOE_ROUTER_STEP], load = state[MOE_ROUTER_LOAD];
    frozen = c->freeze_at > 0 && step[0] >= (moe_real)c->freeze_at;
    if (load != NULL && load[c->n_experts] > MOEI_R(0.0)) {
        if (c->bias_rate > MOEI_R(0.0) && !frozen) moei_advance_bias(c, load, state[MOE_ROUTER_SELECTION_BIAS]);
        if (c->l1_controller && !frozen) moei_advance_l1(c, load, state[MOE_ROUTER_L1]);
        for (e = 0; e <= c->n_experts; e++) load[e] = MOEI_R(0.0);
    }
    if (step != NULL && step[0] < MOEI_R(16777216.0)) step[0] += MOEI_R(1.0);
    return MOE_OK;
}

#endif

moe_status moe_recorded_choices(const moe_routing *routing, int keep_dropped, int32_t *given) {
    size_t t, i;
    if (routing == NULL || (routing->n_tokens > 0 && given == NULL) || routing->plan.rows > 0) return MOE_ERR_ARGUMENT;
    for (t = 0; t < routing->n_tokens; t++)
        for (i = 0; i < routing->max_choices; i++) {
            size_t at = t * routing->max_choices + i;
            given[at] = i < (size_t)routing->n_choices[t] && (keep_dropped || routing->kept[at]) ? routing->choices[at] : -1;
        }
    return MOE_OK;
}

/* ==== metrics =========================================================================================================== */

static int moei_unmasked(const unsigned char *mask, size_t t) { return mask == NULL || mask[t] != 0; }

static double moei_share(double part, double whole) { return whole > 0.0 ? part / whole : 0.0; }

/* x ln x, continued by 0. */
static double moei_x_ln_x(double x) { return x > 0.0 ? x * MOEI_D(log)(x) : 0.0; }

/* H(v / over). */
static double moei_entropy(size_t n, const double *v, double over) {
    double sum = 0.0;
    size_t i;
    if (!(over > 0.0)) return 0.0;
    for (i = 0; i < n; i++) sum -= moei_x_ln_x(v[i] / over);
    return sum;
}

/* What the numbers v of all experts look like. */
typedef struct moei_spread {
    double sum, mean, max, min, variance; /* of the population */
} moei_spread;

static moei_spread moei_spread_of(size_t n, const double *v) {
    moei_spread s;
    size_t i;
    s.sum = 0.0, s.variance = 0.0, s.max = v[0], s.min = v[0];
    for (i = 0; i < n; i++) {
        s.sum += v[i];
        if (v[i] > s.max) s.max = v[i];
        if (v[i] < s.min) s.min = v[i];
    }
    s.mean = s.sum / (double)n;
    for (i = 0; i < n; i++) s.variance += (v[i] - s.mean) * (v[i] - s.mean) / (double)n;
    return s;
}

static double moei_cv2(const moei_spread *s) { return moei_share(s->variance, s->mean * s->mean); }

/* ---- one accumulator --------------------------------------------------------------------------------------------------- */

static void moei_metrics_layout(size_t experts, size_t classes, moei_layout *l, moe_metrics *m) {
    size_t cells = 0;
    memset(m, 0, sizeof *m);
    m->n_experts = experts, m->n_classes = classes;
    if (!moei_mul(experts, classes, &cells)) l->overflow = 1;
    m->load = (double *)moei_take(l, experts, sizeof(double));
    m->first = (double *)moei_take(l, experts, sizeof(double));
    m->kept = (double *)moei_take(l, experts, sizeof(double));
    m->importance = (double *)moei_take(l, experts, sizeof(double));
    m->logits = (double *)moei_take(l, experts, sizeof(double));
    m->mean_gate = (double *)moei_take(l, experts, sizeof(double));
    m->mean_logit = (double *)moei_take(l, experts, sizeof(double));
    m->row = (double *)moei_take(l, experts, sizeof(double));
    if (classes == 0) return;
    m->classes = (double *)moei_take(l, cells, sizeof(double));
    m->first_classes = (double *)moei_take(l, cells, sizeof(double));
}

static void moei_zeros(size_t n, double *v) {
    size_t i;
    for (i = 0; i < n; i++) v[i] = 0.0;
}

moe_status moe_metrics_size(size_t n_experts, size_t n_classes, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_metrics m;
    if (bytes == NULL || n_experts < 1 || n_experts > MOE_MAX_EXPERTS || !MOEI_FITS_INT32(n_classes)) return MOE_ERR_ARGUMENT;
    moei_metrics_layout(n_experts, n_classes, &l, &m);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    *bytes = l.used;
    return MOE_OK;
}

moe_status moe_metrics_init(moe_metrics *metrics, size_t n_experts, size_t n_classes, void *memory, size_t size) {
    moei_layout l;
    moe_status status;
    size_t bytes, e;
    if (metrics == NULL || memory == NULL) return MOE_ERR_ARGUMENT;
    status = moe_metrics_size(n_experts, n_classes, &bytes);
    if (status != MOE_OK) return status;
    if (size < bytes) return MOE_ERR_SPACE;
    l = moei_layout_begin(memory);
    moei_metrics_layout(n_experts, n_classes, &l, metrics);
    moei_zeros(n_experts, metrics->load);
    moei_zeros(n_experts, metrics->first);
    moei_zeros(n_experts, metrics->kept);
    moei_zeros(n_experts, metrics->importance);
    moei_zeros(n_experts, metrics->logits);
    moei_zeros(n_experts, metrics->mean_gate);
    moei_zeros(n_experts, metrics->mean_logit);
    if (n_classes == 0) return MOE_OK;
    for (e = 0; e < n_experts; e++) {
        moei_zeros(n_classes, metrics->classes + e * n_classes);
        moei_zeros(n_classes, metrics->first_classes + e * n_classes);
    }
    return MOE_OK;
}

/* ---- adding a call: everything is checked first, so that a failed call adds nothing ------------------------------------ */

static moe_status moei_metrics_check(const moe_metrics *m, const moe_routing *r, const unsigned char *mask, const int32_t *classes) {
    size_t t, i, real = 0;
    if (m == NULL || r == NULL || (classes != NULL && m->n_classes == 0)) return MOE_ERR_ARGUMENT;
    if (r->n_experts != m->n_experts) return MOE_ERR_SHAPE;
    if (r->plan.offsets == NULL || r->logits == NULL || r->probabilities == NULL || r->choices == NULL || r->n_choices == NULL)
        return MOE_ERR_ARGUMENT;
    for (t = 0; t < r->n_tokens; t++) {
        int32_t count = r->n_choices[t];
        if (count < 0 || (size_t)count > r->max_choices) return MOE_ERR_ARGUMENT;
        if (!moei_unmasked(mask, t)) {
            if (count > 0) return MOE_ERR_ARGUMENT;
            continue;
        }
        real++;
        if (classes != NULL && (classes[t] < -1 || (classes[t] >= 0 && (size_t)classes[t] >= m->n_classes))) return MOE_ERR_ARGUMENT;
        for (i = 0; i < (size_t)count; i++) {
            int32_t e = r->choices[t * r->max_choices + i];
            if (e < 0 || (size_t)e >= m->n_experts) return MOE_ERR_ARGUMENT;
        }
    }
    return real == r->n_real ? MOE_OK : MOE_ERR_ARGUMENT;
}

/* One token's gate values and logits; m->row gathers the call's gate values. */
static void moei_metrics_add_gate(moe_metrics *m, const moe_real *z, const moe_real *p) {
    double x_ln_x = 0.0, mass = 0.0;
    size_t e;
    for (e = 0; e < m->n_experts; e++) {
        double v = (double)p[e];
        m->row[e] += v;
        m->logits[e] += (double)z[e];
        if (!(v > 0.0)) continue;
        x_ln_x += moei_x_ln_x(v);
        mass += v;
    }
    m->entropy -= x_ln_x;
    if (mass > 0.0) m->entropy_normalised += MOEI_D(log)(mass) - x_ln_x / mass; /* H(p / mass) */
}

/* One token's choices; label -1: it has no class. */
static void moei_metrics_add_choices(moe_metrics *m, const int32_t *choices, size_t count, int32_t label) {
    size_t i;
    if (count == 0) return;
    m->n_routed += 1.0;
    m->n_pairs += (double)count;
    m->first[choices[0]] += 1.0;
    for (i = 0; i < count; i++) m->load[choices[i]] += 1.0;
    if (label < 0) return;
    m->n_classified += 1.0;
    m->choices += (double)count;
    m->choices_squared += (double)count * (double)count;
    m->first_classes[(size_t)choices[0] * m->n_classes + (size_t)label] += 1.0;
    for (i = 0; i < count; i++) m->classes[(size_t)choices[i] * m->n_classes + (size_t)label] += 1.0;
}

moe_status moe_metrics_add(moe_metrics *metrics, const moe_routing *routing, const unsigned char *mask, const int32_t *classes) {
    moe_metrics *m = metrics;
    const moe_routing *r = routing;
    moe_status status = moei_metrics_check(m, r, mask, classes);
    size_t t, e;
    if (status != MOE_OK || r->n_real == 0) return status;
    moei_zeros(m->n_experts, m->row);
    for (t = 0; t < r->n_tokens; t++) {
        if (!moei_unmasked(mask, t)) continue;
        moei_metrics_add_gate(m, r->logits + t * m->n_experts, r->probabilities + t * m->n_experts);
        moei_metrics_add_choices(m, r->choices + t * r->max_choices, (size_t)r->n_choices[t], classes != NULL ? classes[t] : -1);
    }
    for (e = 0; e < m->n_experts; e++) {
        m->importance[e] += m->row[e];
        m->kept[e] += (double)(r->plan.offsets[e + 1] - r->plan.offsets[e]);
    }
    m->entropy_calls += moei_entropy(m->n_experts, m->row, (double)r->n_real);
    m->n_calls += 1.0;
    m->n_tokens += (double)r->n_real;
    m->n_dropped += (double)r->n_dropped;
    return MOE_OK;
}

/* ---- expert and class ---------------------------------------------------------------------------------------------------- */

static double moei_column_sum(size_t rows, size_t columns, const double *table, size_t column) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < rows; i++) sum += table[i * columns + column];
    return sum;
}

static double moei_row_sum(size_t columns, const double *row) {
    double sum = 0.0;
    size_t j;
    for (j = 0; j < columns; j++) sum += row[j];
    return sum;
}

/* With counts n of sum P every entropy is ln P - (sum n ln n) / P, so I = ln P + (cells - rows - columns) / P, each a sum of n ln n. */
static double moei_information(double total, double rows, double columns, double cells) {
    double value;
    if (!(total > 0.0)) return 0.0;
    value = MOEI_D(log)(total) + (cells - rows - columns) / total;
    return value > 0.0 ? value : 0.0;
}

moe_status moe_mutual_information(size_t rows, size_t columns, const double *table, double *information) {
    double total = 0.0, of_rows = 0.0, of_columns = 0.0, of_cells = 0.0;
    size_t cells, i, j;
    if (!moei_mul(rows, columns, &cells) || !moei_mul(cells, sizeof(double), &i)) return MOE_ERR_OVERFLOW;
    if (information == NULL || (cells > 0 && table == NULL)) return MOE_ERR_ARGUMENT;
    for (i = 0; i < cells; i++) {
        if (table[i] < 0.0) return MOE_ERR_ARGUMENT;
        if (!(table[i] < MOEI_HUGE)) return MOE_ERR_NONFINITE;
        total += table[i];
        of_cells += moei_x_ln_x(table[i]);
    }
    if (!(moei_x_ln_x(total) < MOEI_HUGE)) return MOE_ERR_NONFINITE;
    if (cells > 0) {
        for (i = 0; i < rows; i++) of_rows += moei_x_ln_x(moei_row_sum(columns, table + i * columns));
        for (j = 0; j < columns; j++) of_columns += moei_x_ln_x(moei_column_sum(rows, columns, table, j));
    }
    *information = moei_information(total, of_rows, of_columns, of_cells);
    return MOE_OK;
}

/* Mean of n ln n where n, hypergeometric, is how many of `drawn` out of `all` are among the `marked`: in the terms around the most
   likely n by the ratio of neighbours, without factorials, until they are below rounding. */
static double moei_chance_x_ln_x(double all, double marked, double drawn) {
    double low = marked + drawn > all ? marked + drawn - all : 0.0, high = marked < drawn ? marked : drawn;
    double start = MOEI_D(floor)((marked + 1.0) * ((drawn + 1.0) / (all + 2.0))), n, weight, weights = 1.0, sum;
    if (start < low) start = low;
    if (start > high) start = high;
    sum = moei_x_ln_x(start);
    for (n = start, weight = 1.0; n < high && weight > 1e-18; n += 1.0) {
        weight *= (marked - n) / (n + 1.0) * ((drawn - n) / (all - marked - drawn + n + 1.0));
        weights += weight;
        sum += weight * moei_x_ln_x(n + 1.0);
    }
    for (n = start, weight = 1.0; n > low && weight > 1e-18; n -= 1.0) {
        weight *= n / (marked - n + 1.0) * ((all - marked - drawn + n) / (drawn - n + 1.0));
        weights += weight;
        sum += weight * moei_x_ln_x(n - 1.0);
    }
    return sum / weights;
}

/* The mean of I of table over all ways to deal the classes to the classified tokens. An expert's tokens stay, each once, so a cell is
   hypergeometric. A class's pairs are the sum of |S_t| over the tokens it is dealt: mean `pairs` and variance are known, the rest of
   their distribution is left out (there is none when every |S_t| is the same). */
static double moei_information_chance(moe_metrics *m, const double *table, double choices, double choices_squared) {
    double all = m->n_classified, mean, variance, of_rows = 0.0, of_columns = 0.0, of_cells = 0.0;
    size_t e, y;
    if (!(all > 0.0)) return 0.0;
    mean = choices / all;
    variance = choices_squared / all - mean * mean;
    for (e = 0; e < m->n_experts; e++) {
        m->row[e] = moei_row_sum(m->n_classes, table + e * m->n_classes);
        of_rows += moei_x_ln_x(m->row[e]);
    }
    for (y = 0; y < m->n_classes; y++) {
        double tokens = moei_column_sum(m->n_experts, m->n_classes, m->first_classes, y), pairs = tokens * mean;
        if (!(tokens > 0.0)) continue;
        of_columns += moei_x_ln_x(pairs);
        if (all > 1.0 && variance > 0.0) of_columns += variance * tokens * (all - tokens) / (all - 1.0) / (2.0 * pairs);
        for (e = 0; e < m->n_experts; e++)
            if (m->row[e] > 0.0) of_cells += moei_chance_x_ln_x(all, m->row[e], tokens);
    }
    return moei_information(choices, of_rows, of_columns, of_cells);
}

/* ---- the report ------------------------------------------------------------------------------------------------------------ */

static void moei_report_gate(moe_metrics *m, moe_report *r) {
    moei_spread importance = moei_spread_of(m->n_experts, m->importance);
    size_t e;
    for (e = 0; e < m->n_experts; e++) {
        m->mean_gate[e] = m->n_tokens > 0.0 ? m->importance[e] / m->n_tokens : 0.0;
        m->mean_logit[e] = m->n_tokens > 0.0 ? m->logits[e] / m->n_tokens : 0.0;
    }
    r->gate_entropy = moei_share(m->entropy, m->n_tokens);
    r->usage_entropy = moei_entropy(m->n_experts, m->mean_gate, 1.0);
    r->usage_entropy_calls = moei_share(m->entropy_calls, m->n_calls);
    r->confidence_entropy = moei_share(m->entropy_normalised, m->n_tokens);
    r->importance_cv2 = moei_cv2(&importance);
    r->mean_gate = m->mean_gate;
    r->mean_logit = m->mean_logit;
}

static void moei_report_load(const moe_metrics *m, moe_report *r) {
    moei_spread load = moei_spread_of(m->n_experts, m->load), first = moei_spread_of(m->n_experts, m->first);
    moei_spread kept = moei_spread_of(m->n_experts, m->kept);
    r->load_entropy = moei_entropy(m->n_experts, m->load, load.sum);
    r->load_balance_score = moei_share(100.0 * MOEI_D(sqrt)(load.variance), m->n_tokens);
    r->load_cv2 = moei_cv2(&load);
    r->load_max_over_mean = moei_share(load.max, load.mean);
    r->load_max_minus_min = moei_share(load.max - load.min, load.sum);
    r->capacity_use = moei_share(kept.mean, kept.max);
    r->first_share_max = moei_share(first.max, m->n_routed);
    r->trivial_gate = r->first_share_max > 0.95;
    r->load = m->load;
    r->first = m->first;
    r->kept = m->kept;
}

static void moei_report_classes(moe_metrics *m, moe_report *r) {
    if (m->n_classes == 0) return;
    r->n_classified = m->n_classified;
    r->classes = m->classes;
    r->first_classes = m->first_classes;
    (void)moe_mutual_information(m->n_experts, m->n_classes, m->classes, &r->information); /* cannot fail: the table is ours */
    (void)moe_mutual_information(m->n_experts, m->n_classes, m->first_classes, &r->information_first);
    r->information_chance = moei_information_chance(m, m->classes, m->choices, m->choices_squared);
    r->information_first_chance = moei_information_chance(m, m->first_classes, m->n_classified, m->n_classified);
}

moe_status moe_metrics_report(moe_metrics *metrics, moe_report *report) {
    if (metrics == NULL || report == NULL) return MOE_ERR_ARGUMENT;
    memset(report, 0, sizeof *report);
    report->n_experts = metrics->n_experts;
    report->n_classes = metrics->n_classes;
    report->n_calls = metrics->n_calls;
    report->n_tokens = metrics->n_tokens;
    report->n_pairs = metrics->n_pairs;
    report->n_dropped = metrics->n_dropped;
    report->dropped_share = moei_share(metrics->n_dropped, metrics->n_pairs);
    report->experts_per_token = moei_share(metrics->n_pairs, metrics->n_tokens);
    moei_report_gate(metrics, report);
    moei_report_load(metrics, report);
    moei_report_classes(metrics, report);
    return MOE_OK;
}

/* ---- metrics that stand on their own ------------------------------------------------------------------------------------- */

moe_status moe_first_choices(const moe_routing *routing, int32_t *first) {
    size_t t;
    if (routing == NULL || (routing->n_tokens > 0 && first == NULL)) return MOE_ERR_ARGUMENT;
    for (t = 0; t < routing->n_tokens; t++) first[t] = routing->n_choices[t] > 0 ? routing->choices[t * routing->max_choices] : -1;
    return MOE_OK;
}

moe_status moe_fluctuation(size_t n, const int32_t *before, const int32_t *after, const unsigned char *mask, double *share) {
    size_t t, real = 0, changed = 0;
    if (share == NULL || (n > 0 && (before == NULL || after == NULL))) return MOE_ERR_ARGUMENT;
    for (t = 0; t < n; t++) {
        if (!moei_unmasked(mask, t)) continue;
        real++;
        if (before[t] != after[t]) changed++;
    }
    *share = moei_share((double)changed, (double)real);
    return MOE_OK;
}

size_t moe_instability_scratch(size_t e1, size_t e2) {
    size_t cells, bytes;
    if (e1 >= (size_t)-1 || e2 >= (size_t)-1 || !moei_mul(e1 + 1, e2 + 1, &cells) || !moei_mul(cells, sizeof(double), &bytes)) return 0;
    return cells;
}

/* Pairs among n. */
static double moei_pairs(double n) { return n * (n - 1.0) / 2.0; }

/* With the table of tokens per pair of experts: pairs together at both layers come from its cells, at one layer from its sums. */
moe_status moe_instability(size_t n, const int32_t *first, size_t e1, const int32_t *second, size_t e2, const unsigned char *mask, double *scratch,
                           moe_instability_report *report) {
    size_t cells = moe_instability_scratch(e1, e2), t, a, b, width = e2 + 1;
    double real = 0.0, both = 0.0, one = 0.0, two = 0.0, all;
    if (report == NULL || scratch == NULL || cells == 0 || (n > 0 && (first == NULL || second == NULL))) return MOE_ERR_ARGUMENT;
    for (t = 0; t < n; t++)
        if (moei_unmasked(mask, t) && (first[t] < -1 || second[t] < -1 || (first[t] >= 0 && (size_t)first[t] >= e1) || (second[t] >= 0 && (size_t)second[t] >= e2)))
            return MOE_ERR_ARGUMENT;
    moei_zeros(cells, scratch); /* row and column 0: without an expert */
    for (t = 0; t < n; t++)
        if (moei_unmasked(mask, t)) scratch[(size_t)(first[t] + 1) * width + (size_t)(second[t] + 1)] += 1.0, real += 1.0;
    for (a = 1; a <= e1; a++) {
        one += moei_pairs(moei_row_sum(width, scratch + a * width));
        for (b = 1; b <= e2; b++) both += moei_pairs(scratch[a * width + b]);
    }
    for (b = 1; b <= e2; b++) two += moei_pairs(moei_column_sum(e1 + 1, width, scratch, b));
    all = moei_pairs(real);
    report->q1 = moei_share(one, all);
    report->q2 = moei_share(two, all);
    report->instability = moei_share(one + two - 2.0 * both, all);
    report->chance = report->q1 * (1.0 - report->q2) + report->q2 * (1.0 - report->q1);
    return MOE_OK;
}

/* Adds v = x / |x| to sum and returns |v|^2 as rounded: 1, or 0 for x = 0. Dividing by the largest element first keeps squares in range. */
static double moei_add_unit(size_t d, const moe_real *x, double *sum) {
    double largest = 0.0, squares = 0.0, length, own = 0.0;
    size_t i;
    for (i = 0; i < d; i++)
        if (MOEI_D(fabs)((double)x[i]) > largest) largest = MOEI_D(fabs)((double)x[i]);
    if (!(largest > 0.0)) return 0.0;
    for (i = 0; i < d; i++) squares += (double)x[i] / largest * ((double)x[i] / largest);
    length = MOEI_D(sqrt)(squares);
    for (i = 0; i < d; i++) {
        double v = (double)x[i] / largest / length;
        sum[i] += v;
        own += v * v;
    }
    return own;
}

moe_status moe_token_cosine(size_t n, size_t d, const moe_real *x, const unsigned char *mask, double *scratch, double *cosine) {
    double real = 0.0, own = 0.0, whole = 0.0, value;
    size_t cells, t, i;
    if (!moei_mul(n, d, &cells) || !moei_mul(cells, sizeof(moe_real), &i)) return MOE_ERR_OVERFLOW;
    if (cosine == NULL || (cells > 0 && x == NULL) || (d > 0 && scratch == NULL)) return MOE_ERR_ARGUMENT;
    for (t = 0; t < n; t++)
        for (i = 0; i < d && moei_unmasked(mask, t); i++)
            if (!moe_is_finite(x[t * d + i])) return MOE_ERR_NONFINITE;
    moei_zeros(d, scratch);
    for (t = 0; t < n; t++) {
        if (!moei_unmasked(mask, t)) continue;
        real += 1.0;
        if (d > 0) own += moei_add_unit(d, x + t * d, scratch);
    }
    for (i = 0; i < d; i++) whole += scratch[i] * scratch[i];
    *cosine = 0.0;
    if (real < 2.0) return MOE_OK;
    value = (whole - own) / (real * (real - 1.0));
    if (value > 1.0) value = 1.0; /* by rounding */
    if (value < -1.0 / (real - 1.0)) value = -1.0 / (real - 1.0);
    *cosine = value;
    return MOE_OK;
}

/* An array [n,n_experts] of predictions that can exist. */
static moe_status moei_predictions_check(size_t n, size_t n_experts, const int32_t *predicted) {
    size_t cells, bytes;
    if (!moei_mul(n, n_experts, &cells) || !moei_mul(cells, sizeof(int32_t), &bytes)) return MOE_ERR_OVERFLOW;
    return cells > 0 && predicted == NULL ? MOE_ERR_ARGUMENT : MOE_OK;
}

moe_status moe_gate_errors(size_t n, size_t n_experts, const int32_t *predicted, const int32_t *answers, const int32_t *labels,
                           const unsigned char *mask, moe_error_shares *shares) {
    size_t t, e, samples = 0, wrong = 0, gate = 0, expert = 0;
    moe_status status = moei_predictions_check(n, n_experts, predicted);
    if (status != MOE_OK) return status;
    if (shares == NULL || (n > 0 && (answers == NULL || labels == NULL))) return MOE_ERR_ARGUMENT;
    for (t = 0; t < n; t++) {
        int right = 0;
        if (!moei_unmasked(mask, t) || labels[t] < 0) continue;
        for (e = 0; e < n_experts && !right; e++) right = predicted[t * n_experts + e] == labels[t];
        samples++;
        if (answers[t] != labels[t]) wrong++;
        if (answers[t] != labels[t] && right) gate++;
        if (!right) expert++;
    }
    shares->n_samples = samples;
    shares->error = moei_share((double)wrong, (double)samples);
    shares->gate_error = moei_share((double)gate, (double)samples);
    shares->expert_error = moei_share((double)expert, (double)samples);
    return MOE_OK;
}

static int moei_is_trivial(size_t n, size_t n_experts, const int32_t *predicted, const unsigned char *mask, size_t e) {
    int32_t only = -1;
    size_t t;
    for (t = 0; t < n; t++) {
        int32_t answer = predicted[t * n_experts + e];
        if (!moei_unmasked(mask, t) || answer < 0) continue;
        if (only >= 0 && answer != only) return 0;
        only = answer;
    }
    return only >= 0;
}

moe_status moe_trivial_experts(size_t n, size_t n_experts, const int32_t *predicted, const unsigned char *mask, unsigned char *trivial,
                               size_t *count) {
    size_t e, found = 0;
    moe_status status = moei_predictions_check(n, n_experts, predicted);
    if (status != MOE_OK) return status;
    if (count == NULL) return MOE_ERR_ARGUMENT;
    for (e = 0; e < n_experts; e++) {
        int is = moei_is_trivial(n, n_experts, predicted, mask, e);
        if (trivial != NULL) trivial[e] = (unsigned char)is;
        found += (size_t)is;
    }
    *count = found;
    return MOE_OK;
}

#endif /* MOE_NO_FLOAT */

/* ==== routing in integers ================================================================================================ */

void moe_int_gate_logits(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    size_t i;
    (void)r;
    for (i = 0; i < n; i++) p[i] = (int32_t)z[i] * 256;
}

void moe_int_gate_relu(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    size_t i;
    (void)r;
    for (i = 0; i < n; i++) p[i] = z[i] > 0 ? (int32_t)z[i] * 256 : 0;
}

static int32_t moei_ir_largest(size_t n, const int16_t *z) {
    int32_t largest = z[0];
    size_t i;
    for (i = 1; i < n; i++)
        if (z[i] > largest) largest = z[i];
    return largest;
}

/* factor * 2^-(d / 2^bits) >> 8, factor in units of 2^-16, the result in units of 2^-23: as exact for small powers as for large ones, because a hundred
   small ones may stand against a large one. */
static uint32_t moei_ir_power(uint32_t d, int bits, uint32_t factor) {
    const uint32_t whole = d >> bits;
    if (d == 0) return factor << 7; /* the largest of all, every time */
    return whole < 24 ? (moe_int_exp2(d - (whole << bits), bits) * factor >> 8) >> whole : 0;
}

void moe_int_share_softmax(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    const int32_t largest = moei_ir_largest(n, z);
    size_t i;
    for (i = 0; i < n; i++) p[i] = (int32_t)moei_ir_power((uint32_t)(largest - z[i]), r->z_bits, 65536u);
}

/* 2^31 / sum p, for a sum moved down to 16 bits, or 0; p moved likewise times this is p / sum in units of 2^-31, and rounds to less than 1 in 2^-15. */
static uint32_t moei_ir_one_over(size_t n, const int32_t *p, int *down) {
    uint32_t sum = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += (uint32_t)p[i];
    for (*down = 0; sum >> 23 != 0; sum >>= 8) *down += 8;
    for (; sum >> 16 != 0; sum >>= 1) ++*down;
    return sum != 0 ? 0x7fff7fffu / sum : 0;
}

void moe_int_gate_softmax(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    int down;
    uint32_t share;
    size_t i;
    moe_int_share_softmax(r, n, z, p);
    share = moei_ir_one_over(n, p, &down);
    for (i = 0; i < n; i++) p[i] = (int32_t)(((uint32_t)p[i] >> 8) * share >> (down + 3));
}

/* What a share leaves out of every p: 2^largest where that is below 1. */
static int32_t moei_ir_common(size_t n, const int16_t *z) {
    const int32_t largest = moei_ir_largest(n, z);
    return largest < 0 ? largest : 0;
}

/* z <= 0: 2^z / (1 + 2^z), else 1 / (1 + 2^-z), z in octaves; in units of 2^-23, moved down */
static void moei_ir_sigmoid(const moe_int_router *r, int32_t common, int down, size_t n, const int16_t *z, int32_t *p) {
    size_t i;
    for (i = 0; i < n; i++) {
        const int32_t v = z[i];
        const uint32_t factor = 0x80000000u / (32768u + moe_int_exp2((uint32_t)(v < 0 ? -v : v), r->z_bits));
        p[i] = (int32_t)(moei_ir_power(v > 0 ? 0 : (uint32_t)(common - v), r->z_bits, factor) >> down);
    }
}

void moe_int_gate_sigmoid(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p) { moei_ir_sigmoid(r, 0, 3, n, z, p); }
void moe_int_share_sigmoid(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p) { moei_ir_sigmoid(r, moei_ir_common(n, z), 0, n, z, p); }

/* g(t) = sqrt(log2(1 + t) / t) in 1/16384 at t = i/64: smooth and near 1, where the softplus itself spans all magnitudes. */
static const unsigned char moei_ir_softplus[130] MOE_FLASH = {
    223, 76, 147, 76, 72, 76, 254, 75, 182, 75, 110, 75, 40, 75, 227, 74, 159, 74, 92, 74, 25, 74, 216, 73, 152, 73, 89, 73, 26, 73, 221,
    72, 160, 72, 100, 72, 41, 72, 239, 71, 182, 71, 125, 71, 69, 71, 13, 71, 215, 70, 161, 70, 108, 70, 55, 70, 3, 70, 208, 69, 157, 69,
    107, 69, 57, 69, 8, 69, 216, 68, 168, 68, 121, 68, 74, 68, 28, 68, 238, 67, 193, 67, 148, 67, 103, 67, 60, 67, 16, 67, 229, 66, 187,
    66, 145, 66, 103, 66, 62, 66, 21, 66, 236, 65, 196, 65, 157, 65, 117, 65, 78, 65, 40, 65, 2, 65, 220, 64, 182, 64, 145, 64, 108, 64,
    72, 64, 36, 64, 0, 64};

static uint32_t moei_ir_g(uint32_t t) {
    const moe_int_shape one = {1, 0, -32767, 32767, 0};
    int16_t x[4] = {0, 0, 0, 0};
    x[0] = (int16_t)(t < 32768u ? (int32_t)(2 * t) - 32768 : 32767);
    moe_int_curve(&one, moei_ir_softplus, x, x);
    return (uint32_t)x[0];
}

/* The square root of softplus / ln 2 = log2(1 + 2^z): with t = 2^-|z| it is 2^(z/2) g(t) for z <= 0, else sqrt(z + t g(t)^2); up: places finer than the
   gate's unit. Of shares that are all below 1 the unit is no matter. */
static void moei_ir_sqrt_softplus(const moe_int_router *r, int32_t common, int up, size_t n, const int16_t *z, int32_t *p) {
    const int down = common < 0 ? 0 : 15 - up - r->z_bits / 2;
    size_t i;
    for (i = 0; i < n; i++) {
        const int32_t v = z[i];
        const uint32_t t = moe_int_exp2((uint32_t)(v < 0 ? -v : v), r->z_bits), g = moei_ir_g(t);
        if (v > 0) {
            const uint32_t square = ((uint32_t)v << 16) + ((t * (g * g >> 13) >> 15) << (r->z_bits + 1)), root = moe_int_sqrt(square);
            p[i] = (int32_t)((root + (square - root * root > root)) << up);
        } else p[i] = (int32_t)(moei_ir_power((uint32_t)(common - v), r->z_bits + 1, 4 * g) >> down);
    }
}

void moe_int_gate_sqrt_softplus(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p) { moei_ir_sqrt_softplus(r, 0, 0, n, z, p); }
void moe_int_share_sqrt_softplus(const moe_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    moei_ir_sqrt_softplus(r, moei_ir_common(n, z), 7, n, z, p);
}

/* ---- select ---- */

/* moe_int_top_k of z, without a copy: what does not pass the last of K is out at once. */
size_t moe_int_select_logits(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts) {
    const size_t k = r->top_k, n = r->n_experts;
    size_t i, at, count = 0;
    int32_t last = INT32_MIN;
    (void)base, (void)token, (void)p;
    for (i = 0; i < n; i++) {
        const int32_t v = z[i];
        if (v <= last) continue;
        for (at = count < k ? count++ : k - 1; at > 0 && v > z[experts[at - 1]]; at--) experts[at] = experts[at - 1];
        experts[at] = (int16_t)i;
        if (count == k) last = z[experts[k - 1]];
    }
    return count;
}

/* p of what is not chosen: below every p + bias, with and without a bias. */
#define MOEI_IR_OUT (INT32_MIN / 2)

/* The k best by p + bias, which stays in p. */
static size_t moei_ir_best(const moe_int_router *r, const unsigned char *base, size_t k, int32_t *p, int16_t *experts) {
    size_t e;
    for (e = 0; e < r->n_experts && r->bias != MOE_INT_NONE; e++) p[e] += moei_flash_32(base + r->bias + 4 * e);
    return moe_int_top_k(r->n_experts, p, k, experts);
}

size_t moe_int_select_top_k(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts) {
    (void)token, (void)z;
    return moei_ir_best(r, base, r->top_k, p, experts);
}

/* The value of each group stands behind p + bias; then those of the groups kept become INT32_MAX. */
size_t moe_int_select_grouped(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts) {
    const size_t n = r->n_experts, size = n / r->groups, wanted = (r->flags & MOE_INT_TOP2_SUM) != 0 ? 2 : 1;
    int32_t *value = p + n;
    size_t g, i, found;
    (void)token, (void)z;
    (void)moei_ir_best(r, base, 0, p, experts);
    for (g = 0; g < r->groups; g++) {
        const int32_t *own = p + g * size;
        int16_t best[2];
        found = moe_int_top_k(size, own, wanted, best);
        value[g] = own[best[0]];
        if (found > 1) value[g] += own[best[1]];
    }
    found = moe_int_top_k(r->groups, value, r->groups_kept, experts);
    for (i = 0; i < found; i++) value[experts[i]] = INT32_MAX;
    for (g = 0; g < r->groups; g++)
        for (i = g * size; i < (g + 1) * size && value[g] != INT32_MAX; i++) p[i] = MOEI_IR_OUT;
    return moe_int_top_k(n, p, r->top_k, experts);
}

size_t moe_int_select_top_p(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts) {
    const size_t n = moe_int_top_k(r->n_experts, p, r->n_experts, experts);
    size_t count = 0, i;
    int32_t sum = 0;
    (void)token, (void)z;
    while (count < n && sum <= r->threshold) sum += p[experts[count++]];
    if (r->bias == MOE_INT_NONE) return count;
    for (i = count; i < n; i++) p[experts[i]] = MOEI_IR_OUT;
    return moei_ir_best(r, base, count, p, experts);
}

size_t moe_int_select_threshold(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts) {
    size_t count = 0, e;
    int32_t best;
    (void)token, (void)z;
    (void)moe_int_top_k(r->n_experts, p, 1, experts);
    best = p[experts[0]];
    for (e = 0; e < r->n_experts; e++) {
        const int32_t least = r->thresholds != MOE_INT_NONE ? moei_flash_32(base + r->thresholds + 4 * e) : r->threshold;
        if (p[e] > least) count++;
        else p[e] = MOEI_IR_OUT;
    }
    if (count > 0) return moei_ir_best(r, base, count, p, experts);
    p[experts[0]] = best;
    return (r->flags & MOE_INT_FALLBACK) != 0;
}

/* In the order of the table where there is no p; else the listed experts move past those with a smaller p + bias. */
size_t moe_int_select_hash(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts) {
    const unsigned char *row = base + r->table + (uint32_t)token * r->top_k;
    size_t i, at;
    (void)z;
    if (r->gate != NULL) (void)moei_ir_best(r, base, 0, p, experts);
    for (i = 0; i < r->top_k; i++) {
        const int16_t e = (int16_t)moei_flash_8(row + i);
        for (at = i; at > 0 && r->gate != NULL; at--) {
            const int16_t other = experts[at - 1];
            if (p[e] < p[other] || (p[e] == p[other] && e > other)) break;
            experts[at] = other;
        }
        experts[at] = e;
    }
    return i;
}

/* ---- weight ---- */

static int16_t moei_ir_clip(int32_t w) { return (int16_t)(w > 32767 ? 32767 : w < -32767 ? -32767 : w); }

void moe_int_weight_raw(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights) {
    const int32_t round = ((int32_t)1 << r->weight_shift) >> 1;
    size_t i;
    (void)z, (void)experts;
    for (i = 0; i < count; i++) weights[i] = moei_ir_clip((p[i] + round) >> r->weight_shift);
}

/* Only the fallback of a threshold has a negative p, and it stands alone: its quotient is 1. */
void moe_int_weight_sum(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights) {
    uint32_t share;
    int down;
    size_t i;
    (void)r, (void)z, (void)experts;
    if (p[0] < 0) p[0] = 1;
    share = moei_ir_one_over(count, p, &down);
    for (i = 0; i < count; i++) weights[i] = (int16_t)((((uint32_t)p[i] >> down) * share + 32768u) >> 16);
}

/* p is moved to 16 bits, so that the sum of squares / 256 fits; that is moved up to 32 bits, so that its root has 16. */
void moe_int_weight_norm(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights) {
    uint32_t largest = 0, sum = 0;
    int up = 0, down = 0, more = 11;
    size_t i;
    (void)r, (void)z, (void)experts;
    for (i = 0; i < count; i++) largest |= (uint32_t)(p[i] < 0 ? -p[i] : p[i]);
    for (; largest >> 16 != 0; largest >>= 1) down++;
    for (; largest != 0 && largest >> 15 == 0; largest <<= 1) up++;
    for (i = 0; i < count; i++) {
        const uint32_t v = (uint32_t)(p[i] < 0 ? -p[i] : p[i]) << up >> down;
        sum += v * v >> 8;
    }
    for (; sum != 0 && sum >> 30 == 0; sum <<= 2) more++;
    sum = moe_int_sqrt(sum);
    for (i = 0; i < count; i++) {
        const uint32_t v = (uint32_t)(p[i] < 0 ? -p[i] : p[i]) << up >> down;
        const int32_t w = sum != 0 ? (int32_t)(((v << more) + sum / 2) / sum) : 0;
        weights[i] = moei_ir_clip(p[i] < 0 ? -w : w);
    }
}

/* A gate that is this softmax left it in p; with a bias p is another by now. */
void moe_int_weight_softmax(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights) {
    size_t i;
    if (r->gate != moe_int_gate_softmax || r->bias != MOE_INT_NONE) moe_int_gate_softmax(r, r->n_experts, z, p);
    for (i = 0; i < count; i++) weights[i] = moei_ir_clip((p[experts[i]] + 16) >> 5);
}

void moe_int_weight_one(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights) {
    size_t i;
    (void)r, (void)z, (void)p, (void)experts;
    for (i = 0; i < count; i++) weights[i] = 32767;
}

void moe_int_weight_uniform(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights) {
    const int16_t w = moei_ir_clip((int32_t)((32768u + (uint32_t)count / 2) / (uint32_t)count));
    size_t i;
    (void)r, (void)z, (void)p, (void)experts;
    for (i = 0; i < count; i++) weights[i] = w;
}

/* 1 / sum of 2^(z - best) over those that were not picked before and are within 2 eps of the best, measured by the larger of |z| and best. */
void moe_int_weight_sparsemixer(const moe_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights) {
    size_t i, e, picked;
    (void)p;
    for (i = 0; i < count; i++) {
        const int32_t best = z[experts[i]];
        uint32_t sum = 0;
        for (e = 0; e < r->n_experts; e++) {
            const int32_t v = z[e], size = v > best ? v : -v > best ? -v : best;
            for (picked = 0; picked < i && (size_t)experts[picked] != e; picked++) {}
            if (picked < i || (uint32_t)(best - v) > (uint32_t)size * (uint32_t)r->threshold >> 16) continue;
            sum += moe_int_exp2((uint32_t)(best - v), r->z_bits);
        }
        weights[i] = moei_ir_clip((int32_t)((((uint32_t)1 << 30) + sum / 2) / sum));
    }
}

void moe_int_scale(const moe_int_router *r, const unsigned char *base, size_t count, const int16_t *experts, int16_t *weights) {
    size_t i;
    for (i = 0; i < count; i++) {
        const int32_t factor = r->scales != MOE_INT_NONE ? moei_flash_16(base + r->scales + 2 * (uint32_t)experts[i]) : r->factor;
        weights[i] = (int16_t)((weights[i] * factor + 16384) >> 15);
    }
}

/* ---- one token ---- */

moe_status moe_int_route(const moe_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts,
                         int16_t *weights, size_t *count) {
    size_t n, i;
    if (r->tokens > 0 && (uint32_t)token >= (uint32_t)r->tokens) return MOE_ERR_ARGUMENT;
    if (r->gate != NULL) r->gate(r, r->n_experts, z, p);
    *count = n = r->select(r, base, token, z, p, experts);
    if (n == 0) return MOE_OK;
    for (i = 0; i < n && r->values != NULL; i++) weights[i] = z[experts[i]]; /* a place for z of the chosen */
    if (r->values != NULL) r->values(r, n, weights, p);
    r->weight(r, z, p, n, experts, weights);
    if (r->scale != NULL) r->scale(r, base, n, experts, weights);
    return MOE_OK;
}

#ifndef MOE_NO_TRAIN
/* ---- the plan of a router, made where floating point is at hand ---- */

typedef struct moei_ir_gate_row {
    moe_int_gate *gate, *share; /* share: for quotients */
    const char *gate_name, *share_name;
} moei_ir_gate_row;
typedef struct moei_ir_select_row {
    moe_int_select *select;
    const char *name;
    int to_most; /* 1: up to E experts, else K */
} moei_ir_select_row;
typedef struct moei_ir_weight_row {
    moe_int_weight *weight;
    const char *name;
    int reads; /* 0 nothing, 1 z alone, 2 values of the gate, 3 quotients of them */
} moei_ir_weight_row;

#define MOEI_IR_GATE(gate, share) {gate, share, #gate, #share}
#define MOEI_IR_SELECT(select, to_most) {select, #select, to_most}
#define MOEI_IR_WEIGHT(weight, reads) {weight, #weight, reads}
#define MOEI_IR_NO_SELECT {NULL, NULL, 0}

static const moei_ir_gate_row moei_ir_gates[MOE_GATE_COUNT] = {
    /* softmax       */ MOEI_IR_GATE(moe_int_gate_softmax, moe_int_share_softmax),
    /* sigmoid       */ MOEI_IR_GATE(moe_int_gate_sigmoid, moe_int_share_sigmoid),
    /* sqrt_softplus */ MOEI_IR_GATE(moe_int_gate_sqrt_softplus, moe_int_share_sqrt_softplus),
    /* relu          */ MOEI_IR_GATE(moe_int_gate_relu, moe_int_gate_relu),
    /* identity      */ MOEI_IR_GATE(moe_int_gate_logits, moe_int_gate_logits)};

/* What a selection does with one token outside training. */
static const moei_ir_select_row moei_ir_selects[MOE_SELECT_COUNT] = {
    /* top_k         */ MOEI_IR_SELECT(moe_int_select_top_k, 0),
    /* dense         */ MOEI_IR_SELECT(moe_int_select_top_k, 1),
    /* given         */ MOEI_IR_NO_SELECT,
    /* grouped_top_k */ MOEI_IR_SELECT(moe_int_select_grouped, 0),
    /* top_p         */ MOEI_IR_SELECT(moe_int_select_top_p, 1),
    /* threshold     */ MOEI_IR_SELECT(moe_int_select_threshold, 1),
    /* positive      */ MOEI_IR_SELECT(moe_int_select_threshold, 1),
    /* expert_choice */ MOEI_IR_NO_SELECT,
    /* affinity      */ MOEI_IR_NO_SELECT,
    /* hash          */ MOEI_IR_SELECT(moe_int_select_hash, 0),
    /* soft          */ MOEI_IR_NO_SELECT,
    /* sinkhorn      */ MOEI_IR_SELECT(moe_int_select_top_k, 0),
    /* sample        */ MOEI_IR_SELECT(moe_int_select_top_k, 0),
    /* balanced      */ MOEI_IR_SELECT(moe_int_select_top_k, 0),
    /* custom        */ MOEI_IR_NO_SELECT};

static const moei_ir_weight_row moei_ir_weights[MOE_WEIGHT_COUNT] = {
    /* sum         */ MOEI_IR_WEIGHT(moe_int_weight_sum, 3),
    /* softmax     */ MOEI_IR_WEIGHT(moe_int_weight_sum, 1),
    /* raw         */ MOEI_IR_WEIGHT(moe_int_weight_raw, 2),
    /* p_norm      */ MOEI_IR_WEIGHT(moe_int_weight_norm, 3),
    /* uniform     */ MOEI_IR_WEIGHT(moe_int_weight_uniform, 0),
    /* one         */ MOEI_IR_WEIGHT(moe_int_weight_one, 0),
    /* sparsemixer */ MOEI_IR_WEIGHT(moe_int_weight_sparsemixer, 1)};

/* One plan in the making. */
typedef struct moei_ir_planner {
    const moe_router_config *c; /* at the present step */
    const moe_real *const *tensors;
    moe_error *error;
    moe_int_router_plan made;
    unsigned char *table; /* NULL: only counted */
    int weight;           /* MOE_WEIGHT_ of a single token */
    int by_logits;        /* selection reads z */
    int biased;
    int most;             /* experts that a token may take */
    double z_unit, p_unit; /* real value of a unit of z, and of what selection reads */
} moei_ir_planner;

static moe_status moei_ir_refuse(const moei_ir_planner *s, const char *name, const char *why) {
    char value[40];
    moe_field_text(moe_field_find(moei_router_fields, name), s->c, value, sizeof value);
    return moei_error(s->error, MOE_ERR_UNSUPPORTED, "%s = %s has no form in integers%s; weights = float takes it", name, value, why);
}

static int moei_ir_is(moe_real a, double b) { return !((double)a < b) && !((double)a > b); }

static moe_status moei_ir_supported(const moei_ir_planner *s, int frozen) {
    const moe_router_config *c = s->c;
    if (c->n_experts > MOE_INT_EXPERTS) return moei_ir_refuse(s, "n_experts", ": at most 256");
    if (moei_ir_selects[c->select].select == NULL) return moei_ir_refuse(s, "select", "");
    if (c->refine != MOE_REFINE_NONE) return moei_ir_refuse(s, "refine", "");
    if (c->student && frozen) return moei_ir_refuse(s, "student", "");
    if (c->weight == MOE_WEIGHT_P_NORM && !moei_ir_is(c->weight_p, 1.0) && !moei_ir_is(c->weight_p, 2.0)) return moei_ir_refuse(s, "weight_p", ": only 1 and 2 have");
    if (c->renormalize == MOE_RENORMALIZE_AFTER && (c->expert_scale || c->weight == MOE_WEIGHT_SPARSEMIXER)) return moei_ir_refuse(s, "renormalize", " with these weights");
    return MOE_OK;
}

/* A single token loses nothing to a capacity, so renormalize = after divides by the sum of all its weights. */
static int moei_ir_weight_of(const moe_router_config *c) {
    int after = c->renormalize == MOE_RENORMALIZE_AFTER;
    if (c->weight == MOE_WEIGHT_P_NORM && (after || moei_ir_is(c->weight_p, 1.0))) return MOE_WEIGHT_SUM;
    if (c->weight == MOE_WEIGHT_RAW && after) return MOE_WEIGHT_SUM;
    if (c->weight == MOE_WEIGHT_ONE && after) return MOE_WEIGHT_UNIFORM;
    return c->weight;
}

/* z orders the experts as p does, and finer; where p is z that is no matter. Sums of p, the softmax against a threshold, and a bias need p. */
static int moei_ir_selects_by_logits(const moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    if (c->weight == MOE_WEIGHT_SPARSEMIXER || c->select == MOE_SELECT_SINKHORN || c->select == MOE_SELECT_BALANCED) return 1;
    if (s->biased) return 0;
    if (c->gate == MOE_GATE_IDENTITY) return 1;
    if (!moei_gates[c->gate].select_by_logits || c->select == MOE_SELECT_TOP_P) return 0;
    if (c->select == MOE_SELECT_GROUPED_TOP_K) return c->group_score == MOE_GROUP_MAX;
    return c->select != MOE_SELECT_THRESHOLD || c->gate != MOE_GATE_SOFTMAX;
}

/* Temperature of the octaves that a stage with this gate wants; 0: none, any scale will do. */
static double moei_ir_temperature(const moe_router_config *c, int gate) {
    if (gate == MOE_GATE_SQRT_SOFTPLUS) return 1.0;
    return gate == MOE_GATE_SOFTMAX || gate == MOE_GATE_SIGMOID ? (double)c->gate_temperature : 0.0;
}

/* z_unit and z_bits: as fine as 5/4 of the largest logit allow. */
static moe_status moei_ir_scale_z(moei_ir_planner *s, double logit_most) {
    const moe_router_config *c = s->c;
    const int reads = moei_ir_weights[s->weight].reads;
    double keys = s->by_logits || s->made.router.gate == NULL ? 0.0 : moei_ir_temperature(c, c->gate), octaves;
    double weights = reads == 0 ? 0.0 : reads == 1 ? 1.0 : moei_ir_temperature(c, c->gate), room = 32767.0 / (1.25 * (logit_most > 0.0 ? logit_most : 1.0));
    int bits = 0, most = c->gate == MOE_GATE_SQRT_SOFTPLUS ? 14 : 27;
    if (keys > 0.0 && weights > 0.0 && (keys < weights || keys > weights)) return moei_ir_refuse(s, "gate_temperature", " where the weights take logits without it: z would need two scales");
    octaves = (keys > 0.0 ? keys : weights) * 0.69314718055994531;
    if (octaves > 0.0) {
        if (room * octaves < 1.0)
            return moei_error(s->error, MOE_ERR_UNSUPPORTED, "gate_temperature = %g: logits up to %g have no form in integers; weights = float takes it",
                              (double)c->gate_temperature, logit_most);
        while (bits < most && ldexp(1.0, bits + 1) <= room * octaves) bits++;
        if (c->gate == MOE_GATE_SQRT_SOFTPLUS) bits -= bits % 2;
        s->made.router.z_bits = (uint8_t)bits;
        s->z_unit = ldexp(octaves, -bits);
        return MOE_OK;
    }
    for (bits = -100; bits < 100 && ldexp(1.0, bits + 1) <= room; bits++) {}
    s->z_unit = ldexp(1.0, -bits);
    return MOE_OK;
}

/* Real value of a unit of p. */
static double moei_ir_unit(const moei_ir_planner *s, int gate) {
    switch (gate) {
    case MOE_GATE_SOFTMAX:
    case MOE_GATE_SIGMOID: return ldexp(1.0, -20);
    case MOE_GATE_SQRT_SOFTPLUS: return ldexp(0.83255461115769776, -(8 + s->made.router.z_bits / 2)); /* sqrt(ln 2) */
    default: return s->z_unit / 256.0;
    }
}

/* The logit at which a gate has the value p: what p is compared with, seen from z. */
static double moei_ir_inverse(const moe_router_config *c, double p) {
    switch (c->gate) {
    case MOE_GATE_SIGMOID: return p <= 0.0 ? -1e300 : p >= 1.0 ? 1e300 : log(p / (1.0 - p)) * (double)c->gate_temperature;
    case MOE_GATE_SQRT_SOFTPLUS: return p < 0.0 ? -1e300 : p > 6.0 ? p * p : log(exp(p * p) - 1.0);
    default: return p;
    }
}

static int32_t moei_ir_floor(double v) {
    const double most = 1073741823.0;
    return (int32_t)(v > most ? most : v > -most ? floor(v) : -most);
}

/* A new piece of the table; NULL where nothing is written. */
static unsigned char *moei_ir_piece(moei_ir_planner *s, size_t bytes, uint32_t *offset) {
    *offset = (uint32_t)s->made.table_size;
    s->made.table_size += (bytes + 3) & ~(size_t)3;
    return s->table != NULL ? s->table + *offset : NULL;
}

static moe_status moei_ir_missing(const moei_ir_planner *s, const char *name) {
    return moei_error(s->error, MOE_ERR_ARGUMENT, "%s is missing or not finite", name);
}

static int moei_ir_has(const moei_ir_planner *s, int slot, size_t count) {
    size_t i;
    for (i = 0; i < count && s->tensors[slot] != NULL; i++)
        if (!moe_is_finite(s->tensors[slot][i])) return 0;
    return s->tensors[slot] != NULL;
}

static moe_status moei_ir_put_bias(moei_ir_planner *s) {
    const size_t n = (size_t)s->c->n_experts;
    const moe_real *bias = s->tensors[MOE_ROUTER_SELECTION_BIAS];
    unsigned char *to;
    size_t e;
    if (!s->biased) return MOE_OK;
    if (!moei_ir_has(s, MOE_ROUTER_SELECTION_BIAS, n)) return moei_ir_missing(s, "router.selection_bias");
    to = moei_ir_piece(s, 4 * n, &s->made.router.bias);
    for (e = 0; e < n; e++) {
        const double v = floor((double)bias[e] / s->p_unit + 0.5);
        if (fabs(v) > 268435456.0) /* 2^28: sums stay within 32 bits, and above what is not chosen */
            return moei_error(s->error, MOE_ERR_UNSUPPORTED, "selection_bias = 1: router.selection_bias[%d] = %g is too large for integers; weights = float takes it",
                              (int)e, (double)bias[e]);
        if (to != NULL) (void)moei_int_put(to + 4 * e, (uint32_t)(int32_t)v, 4);
    }
    return MOE_OK;
}

/* theta of expert e in units of what selection reads. */
static int32_t moei_ir_theta(const moei_ir_planner *s, size_t e) {
    const moe_router_config *c = s->c;
    const double raw = c->threshold_learned ? (double)s->tensors[MOE_ROUTER_THRESHOLD][e] : (double)c->threshold;
    if (s->by_logits && c->threshold_sigmoid && c->gate == MOE_GATE_SIGMOID) return moei_ir_floor(raw * (double)c->gate_temperature / s->p_unit);
    if (s->by_logits) return moei_ir_floor(moei_ir_inverse(c, c->threshold_sigmoid ? 1.0 / (1.0 + exp(-raw)) : raw) / s->p_unit);
    return moei_ir_floor((c->threshold_sigmoid ? 1.0 / (1.0 + exp(-raw)) : raw) / s->p_unit);
}

static moe_status moei_ir_put_thresholds(moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    moe_int_router *r = &s->made.router;
    const size_t n = (size_t)c->n_experts;
    unsigned char *to;
    size_t e;
    if (c->select == MOE_SELECT_TOP_P) r->threshold = moei_ir_floor((double)c->top_p / s->p_unit);
    if (s->weight == MOE_WEIGHT_SPARSEMIXER) r->threshold = moei_ir_floor((double)c->sparsemixer_eps < 1.0 ? (double)c->sparsemixer_eps * 131072.0 + 0.5 : 131072.0);
    if (c->select != MOE_SELECT_THRESHOLD) return MOE_OK;
    if (c->threshold_fallback != MOE_FALLBACK_NEVER) r->flags |= (uint8_t)MOE_INT_FALLBACK;
    if (!c->threshold_learned) {
        r->threshold = moei_ir_theta(s, 0);
        return MOE_OK;
    }
    if (!moei_ir_has(s, MOE_ROUTER_THRESHOLD, n)) return moei_ir_missing(s, "router.threshold");
    to = moei_ir_piece(s, 4 * n, &r->thresholds);
    for (e = 0; e < n && to != NULL; e++) (void)moei_int_put(to + 4 * e, (uint32_t)moei_ir_theta(s, e), 4);
    return MOE_OK;
}

/* weight_scale and what is left for moe_int_scale: a weight of 32768 means unit, which with the configuration's factors is unit * scale * expert_scale. */
static moe_status moei_ir_put_scales(moei_ir_planner *s, double unit) {
    const moe_router_config *c = s->c;
    moe_int_router *r = &s->made.router;
    const size_t n = c->expert_scale ? (size_t)c->n_experts : 1;
    const moe_real *own = s->tensors[MOE_ROUTER_EXPERT_SCALE];
    unsigned char *to = NULL;
    double most = 0.0, factor;
    int power;
    size_t e;
    if (c->expert_scale && !moei_ir_has(s, MOE_ROUTER_EXPERT_SCALE, n)) return moei_ir_missing(s, "router.expert_scale");
    unit *= (double)c->scale;
    for (e = 0; e < n; e++) {
        factor = fabs(c->expert_scale ? unit * (double)own[e] : unit);
        if (factor > most) most = factor;
    }
    factor = frexp(most, &power); /* in [1/2, 1), or 0 */
    if (factor <= 0.5) power--;
    if (power > 126) return moei_error(s->error, MOE_ERR_ARGUMENT, "scale and router.expert_scale: weights up to %g are too large for integers", most);
    if (power < -126) power = -126; /* so small that all of them may be 0 */
    s->made.weight_scale = (moe_real)ldexp(1.0, most > 0.0 ? power : 0);
    if (!c->expert_scale && unit > 0.0 && factor <= 0.5) return MOE_OK;
    r->scale = moe_int_scale, s->made.scale = "moe_int_scale";
    if (c->expert_scale) to = moei_ir_piece(s, 2 * n, &r->scales);
    for (e = 0; e < n; e++) {
        const double v = floor((c->expert_scale ? unit * (double)own[e] : unit) / (double)s->made.weight_scale * 32768.0 + 0.5);
        const int32_t level = (int32_t)(v > 32767.0 ? 32767.0 : v < -32767.0 ? -32767.0 : v);
        if (!c->expert_scale) r->factor = (int16_t)level;
        else if (to != NULL) (void)moei_int_put(to + 2 * e, (uint32_t)level, 2);
    }
    return MOE_OK;
}

static moe_status moei_ir_put_hash(moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    const moe_real *table = s->tensors[MOE_ROUTER_TABLE];
    const size_t k = (size_t)c->top_k;
    unsigned char *to;
    size_t i, other, count = 0;
    if (c->select != MOE_SELECT_HASH) return MOE_OK;
    if (!moei_mul((size_t)c->table_size, k, &count) || count > INT32_MAX / 2)
        return moei_error(s->error, MOE_ERR_OVERFLOW, "table_size = %d: a table of %d experts for each token id is too large", c->table_size, c->top_k);
    if (!moei_ir_has(s, MOE_ROUTER_TABLE, count)) return moei_ir_missing(s, "router.table");
    s->made.router.tokens = c->table_size;
    to = moei_ir_piece(s, count, &s->made.router.table);
    for (i = 0; i < count; i++) {
        int good = table[i] >= MOEI_R(0.0) && table[i] < (moe_real)c->n_experts && moei_ir_is(table[i], floor((double)table[i]));
        for (other = i - i % k; other < i && good; other++) good = !moei_ir_is(table[i], (double)table[other]);
        if (!good) return moei_error(s->error, MOE_ERR_ARGUMENT, "router.table[%z] = %g: not an expert, or one twice", i, (double)table[i]);
        if (to != NULL) (void)moei_int_put(to + i, (uint32_t)table[i], 1);
    }
    return MOE_OK;
}

static void moei_ir_plan_select(moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    const moei_ir_select_row *row = &moei_ir_selects[c->select];
    const moei_ir_gate_row *gate = &moei_ir_gates[s->by_logits ? (int)MOE_GATE_IDENTITY : c->gate];
    const int monotone = moei_gates[c->gate].select_by_logits;
    moe_int_router *r = &s->made.router;
    if (c->select == MOE_SELECT_POSITIVE && monotone) row = &moei_ir_selects[MOE_SELECT_DENSE]; /* these gates are positive everywhere */
    r->gate = gate->gate, s->made.gate = gate->gate_name;
    r->select = row->select, s->made.select = row->name;
    s->most = row->to_most ? c->n_experts : c->top_k;
    r->top_k = (uint16_t)s->most;
    if (r->select == moe_int_select_top_k && s->by_logits) {
        r->select = moe_int_select_logits, s->made.select = "moe_int_select_logits";
        r->gate = NULL, s->made.gate = "NULL";
    }
    if (c->select == MOE_SELECT_HASH && moei_ir_weights[s->weight].reads == 0) r->gate = NULL, s->made.gate = "NULL"; /* the order is no matter */
    if (c->select == MOE_SELECT_GROUPED_TOP_K) {
        r->groups = (uint16_t)c->groups;
        r->groups_kept = (uint16_t)c->groups_kept;
        if (c->group_score == MOE_GROUP_TOP2_SUM) r->flags |= (uint8_t)MOE_INT_TOP2_SUM;
        if (c->groups_kept > s->most) s->most = c->groups_kept;
    }
}

/* Returns what a weight of 32768 means. */
static double moei_ir_plan_weight(moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    const moei_ir_weight_row *row = &moei_ir_weights[s->weight];
    const moei_ir_gate_row *gate = &moei_ir_gates[s->weight == MOE_WEIGHT_SOFTMAX ? (int)MOE_GATE_SOFTMAX : c->gate];
    moe_int_router *r = &s->made.router;
    r->weight = row->weight, s->made.weight = row->name;
    if (s->weight == MOE_WEIGHT_RAW && c->gate == MOE_GATE_SOFTMAX) {
        r->weight = moe_int_weight_softmax, s->made.weight = "moe_int_weight_softmax";
        return 1.0;
    }
    if (s->weight == MOE_WEIGHT_SPARSEMIXER || row->reads == 0) return 1.0;
    r->values = row->reads == 2 ? gate->gate : gate->share;
    s->made.values = row->reads == 2 ? gate->gate_name : gate->share_name;
    if (row->reads != 2) return 1.0;
    if (c->gate == MOE_GATE_SIGMOID) r->weight_shift = 5;
    if (c->gate == MOE_GATE_SQRT_SOFTPLUS) r->weight_shift = 1;
    if (c->gate == MOE_GATE_RELU || c->gate == MOE_GATE_IDENTITY) r->weight_shift = 8;
    return ldexp(moei_ir_unit(s, c->gate), 15 + r->weight_shift);
}

/* A sum of p with both signs can be 0 or nearly so, and weights without a bound have no levels. */
static int moei_ir_signs_mix(const moei_ir_planner *s) {
    const moe_router_config *c = s->c;
    size_t e;
    if (c->gate != MOE_GATE_IDENTITY || s->weight != MOE_WEIGHT_SUM || c->select == MOE_SELECT_POSITIVE) return 0;
    if (c->score == MOE_SCORE_NORM || c->score == MOE_SCORE_COMPETITION || c->score == MOE_SCORE_DSELECT) return 0;
    if (c->select != MOE_SELECT_THRESHOLD) return s->made.router.top_k > 1;
    for (e = 0; e < (size_t)c->n_experts && c->threshold_learned && !c->threshold_sigmoid && s->tensors[MOE_ROUTER_THRESHOLD] != NULL; e++)
        if (s->tensors[MOE_ROUTER_THRESHOLD][e] < MOEI_R(0.0)) return 1;
    return !c->threshold_learned && c->threshold < MOEI_R(0.0);
}

static void moei_ir_plan_room(moei_ir_planner *s) {
    moe_int_router *r = &s->made.router;
    int all = r->gate != NULL || r->weight == moe_int_weight_softmax;
    r->most = (uint16_t)s->most;
    r->scratch = (uint16_t)(all ? s->c->n_experts + r->groups : r->values != NULL ? s->most : 0);
    s->made.needs_logits = all || r->values != NULL || r->weight == moe_int_weight_sparsemixer || r->select == moe_int_select_logits;
}

static moe_status moei_ir_plan_stages(moei_ir_planner *s, double logit_most) {
    const int select = s->c->select;
    double unit;
    moe_status status;
    s->weight = moei_ir_weight_of(s->c);
    s->biased = s->c->selection_bias && select != MOE_SELECT_SINKHORN && select != MOE_SELECT_BALANCED && select != MOE_SELECT_SAMPLE;
    s->by_logits = moei_ir_selects_by_logits(s);
    moei_ir_plan_select(s);
    if (s->made.router.gate == NULL) s->biased = 0;
    if (moei_ir_signs_mix(s)) return moei_ir_refuse(s, "gate", " with weights that are divided by a sum of both signs");
    status = moei_ir_scale_z(s, logit_most);
    if (status != MOE_OK) return status;
    unit = moei_ir_plan_weight(s);
    s->p_unit = moei_ir_unit(s, s->by_logits ? (int)MOE_GATE_IDENTITY : s->c->gate);
    moei_ir_plan_room(s);
    status = moei_ir_put_bias(s);
    if (status == MOE_OK) status = moei_ir_put_thresholds(s);
    if (status == MOE_OK) status = moei_ir_put_scales(s, unit);
    if (status == MOE_OK) status = moei_ir_put_hash(s);
    s->made.z_scale = (moe_real)s->z_unit;
    return status;
}

/* The plan from its beginning; with s->table the second time, when the size is known. */
static moe_status moei_ir_plan(moei_ir_planner *s, double logit_most) {
    memset(&s->made, 0, sizeof s->made);
    s->made.gate = s->made.select = s->made.values = s->made.weight = s->made.scale = "NULL";
    s->made.router.n_experts = (uint16_t)s->c->n_experts;
    s->made.router.bias = s->made.router.thresholds = s->made.router.scales = s->made.router.table = MOE_INT_NONE;
    return moei_ir_plan_stages(s, logit_most);
}

moe_status moe_int_router_plan_make(const moe_router_config *config, const moe_real *const *tensors, moe_real logit_most, unsigned char *table,
                                    size_t room, moe_int_router_plan *plan, moe_error *error) {
    moei_ir_planner s;
    moe_router router;
    moei_pass pass;
    moe_status status = moe_router_check_decoding(config, error);
    if (status != MOE_OK) return status;
    if (tensors == NULL || plan == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "tensors and plan must not be NULL");
    if (!moe_is_finite(logit_most) || logit_most < MOEI_R(0.0))
        return moei_error(error, MOE_ERR_ARGUMENT, "logit_most = %g: must be finite and not negative", (double)logit_most);
    memset(&router, 0, sizeof router);
    memset(&pass, 0, sizeof pass);
    memset(&s, 0, sizeof s);
    (void)moe_router_check(config, &router.config, NULL);
    memcpy(router.tensors, tensors, sizeof router.tensors);
    pass.router = &router;
    moei_schedule(&pass);
    s.c = &pass.effective, s.tensors = tensors, s.error = error;
    status = moei_ir_supported(&s, pass.frozen);
    if (status == MOE_OK) status = moei_ir_plan(&s, (double)logit_most);
    if (status == MOE_OK && table != NULL) {
        if (room < s.made.table_size)
            return moei_error(error, MOE_ERR_SPACE, "room = %z: the table needs %z bytes", room, s.made.table_size);
        s.table = table;
        memset(table, 0, s.made.table_size);
        status = moei_ir_plan(&s, (double)logit_most);
    }
    if (status == MOE_OK) *plan = s.made;
    return status;
}

void moe_int_router_move(moe_int_router *router, uint32_t by) {
    uint32_t *offset[4];
    int i;
    offset[0] = &router->bias, offset[1] = &router->thresholds, offset[2] = &router->scales, offset[3] = &router->table;
    for (i = 0; i < 4; i++)
        if (*offset[i] != MOE_INT_NONE) *offset[i] += by;
}
#endif

#ifdef __cplusplus
}
#endif

#endif /* MOE_IMPLEMENTATION */
