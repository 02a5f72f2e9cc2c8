/* moe_routers.h - v0.2.0 - routers of MoE layers, as one pipeline - MIT or public domain, see
   LICENSE

   A router decides which experts process which token, and with which weights. About 60 published
   routers are presets of one pipeline here: score, gate, selection, weights, capacity and losses,
   with forward and backward passes and metrics, and in integers for machines without an FPU.

   Contents (search for the tag)
     >>options      what can be set at compile time
     >>glossary     words and symbols
     >>manual       how the parts work together
     >>fields       configuration as data
     >>stages       every value of every stage, one row each
     >>config       the configuration of a router
     >>presets      published routers by name
     >>parameters   the tensors of a router
     >>routing      one call: tokens in, decisions out
     >>state        what training keeps
     >>metrics      load, entropy, information
     >>integers     routing without floating point
     >>code         the implementation, with contents of its own

   Recipe
     1. Copy moe_kernels.h and moe_routers.h into your project. moe.h includes both: with moe.h
        there is nothing more to do.
     2. In ONE source file:   #define MOE_IMPLEMENTATION   and then   #include "moe_routers.h"
     3. Everywhere else:      #include "moe_routers.h"       Link with the math library (-lm).

   First program: eight experts, two per token, and which expert gets which token.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe_routers.h"
 * #include <stdio.h>
 *
 * static const moe_real weight[8 * 2] = {1, 0,  0, 1,  -1, 0,  0, -1, // [E,d]
 *                                        1, 1,  -1, 1,  -1, -1,  1, -1};
 * static const moe_real x[3 * 2] = {2, 0.1f,  -1, 1.2f,  0.3f, -3}; // [N,d]
 * static unsigned char workspace[8192];
 *
 * int main(void) {
 *     moe_router_config config = {0}; // 8 experts, top 2, softmax, weights p / sum p; C++: = {}
 *     moe_call call = {0};
 *     moe_router router;
 *     moe_routing routing;
 *     moe_error error;
 *     size_t e, i;
 *     config.d_model = 2;
 *     if (moe_router_init(&router, &config, NULL, &error) != MOE_OK) {
 *         puts(error.message);
 *         return 1;
 *     }
 *     router.tensors[MOE_ROUTER_WEIGHT] = weight;
 *     call.n_tokens = 3;
 *     call.x = x;
 *     if (moe_route(&router, &call, workspace, sizeof workspace, &routing) != MOE_OK) return 1;
 *     for (e = 0; e < 8; e++)
 *         for (i = routing.plan.offsets[e]; i < routing.plan.offsets[e + 1]; i++)
 *             printf("expert %d takes token %d with weight %.3f\n", (int)e,
 *                    (int)routing.plan.assignments[i].token,
 *                    (double)routing.plan.assignments[i].weight_out);
 *     return 0;
 * }
 * --- end ---

   >>options  All options are those of moe_kernels.h, where a table says what each costs. Two matter
   most here: MOE_NO_TRAIN leaves out the backward pass, the losses and the state, and the masks
   MOE_KEEP_SCORES, MOE_KEEP_SELECTS, ... leave out single values of a stage.
*/
#include "moe_kernels.h"

/* Names of the double build (MOE_REAL=double), so that both builds link into one program. Skip to
   >>glossary. */
#if MOE_REAL_IS_DOUBLE && !defined(moe_route)
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
#define moe_routing_choices moe_routing_choices_f64
#define moe_router_traits moe_router_traits_f64
#define moe_trait_name moe_trait_name_f64
#define moe_loss_name moe_loss_name_f64
#define moe_presets moe_presets_f64
#define moe_preset_find moe_preset_find_f64
#define moe_router_preset moe_router_preset_f64
#define moe_router_parameter moe_router_parameter_f64
#define moe_router_init moe_router_init_f64
#define moe_route_size moe_route_size_f64
#define moe_route_batch_size moe_route_batch_size_f64
#define moe_route moe_route_f64
#define moe_route_backward moe_route_backward_f64
#define moei_int_gate_logits moei_int_gate_logits_f64
#define moei_int_gate_relu moei_int_gate_relu_f64
#define moei_int_gate_predicted moei_int_gate_predicted_f64
#define moei_int_gate_softmax moei_int_gate_softmax_f64
#define moei_int_gate_sigmoid moei_int_gate_sigmoid_f64
#define moei_int_gate_sqrt_softplus moei_int_gate_sqrt_softplus_f64
#define moei_int_share_softmax moei_int_share_softmax_f64
#define moei_int_share_sigmoid moei_int_share_sigmoid_f64
#define moei_int_share_sqrt_softplus moei_int_share_sqrt_softplus_f64
#define moei_int_select_logits moei_int_select_logits_f64
#define moei_int_select_top_k moei_int_select_top_k_f64
#define moei_int_select_grouped moei_int_select_grouped_f64
#define moei_int_select_each moei_int_select_each_f64
#define moei_int_select_top_p moei_int_select_top_p_f64
#define moei_int_select_threshold moei_int_select_threshold_f64
#define moei_int_select_hash moei_int_select_hash_f64
#define moei_int_weight_raw moei_int_weight_raw_f64
#define moei_int_weight_sum moei_int_weight_sum_f64
#define moei_int_weight_norm moei_int_weight_norm_f64
#define moei_int_weight_over moei_int_weight_over_f64
#define moei_int_weight_softmax moei_int_weight_softmax_f64
#define moei_int_weight_uniform moei_int_weight_uniform_f64
#define moei_int_weight_one moei_int_weight_one_f64
#define moei_int_weight_sparsemixer moei_int_weight_sparsemixer_f64
#define moei_int_scale_weights moei_int_scale_weights_f64
#define moe_metrics_size moe_metrics_size_f64
#define moe_metrics_init moe_metrics_init_f64
#define moe_metrics_add moe_metrics_add_f64
#define moe_metrics_report moe_metrics_report_f64
#define moe_fluctuation moe_fluctuation_f64
#define moe_instability moe_instability_f64
#define moe_mutual_information moe_mutual_information_f64
#define moe_token_cosine moe_token_cosine_f64
#define moe_gate_errors moe_gate_errors_f64
#endif

/* >>glossary

     token        one row of x, d_model numbers. A sample that is not text is a token, too.
     expert       one of E functions. The router knows only its index.
     real expert  an expert with matrices. The last n_zero + n_copy + n_constant of the E experts
                  have none: 0, the token itself, a mixture of the token and a learned vector. R is
                  the number of the others.
     logits z     one number per token and expert, before normalization.
     gate r       the logits after the gate function (softmax, sigmoid, ...). p is r after the
                  refine stage; without one p = r.
     S_t          the set of experts chosen for token t. top_k is its size.
     choice       one expert of S_t. Choice 0 is the token's best expert.
     weight w     the factor on a chosen expert's output (or input): the combine weight.
     assignment   one token at one expert, with its weight.
     dispatch plan  all assignments, sorted by expert: what dispatch and combine need to know.
     capacity     the largest number of assignments per expert. Without one (the default) routing is
                  dropless.
     workspace    the caller's memory in which a call computes and to which its results point.
     forced routing  the caller supplies the choices (call.given). Routing replay is forced routing
                  with the recorded choices of an earlier call.

   >>manual

   A router is a pipeline of independent stages:

     x --input--> u --score--> z --noise--> z --gate--> r --refine--> p
       --select--> S --weight--> w --capacity--> dispatch plan

   Losses read z, r, p, S and w.

   Each stage is a table with one row per value of a configuration field: its name, its forward and
   backward functions, and facts about it. A new router is a new row, or no code at all: a preset is
   one line of text.

   Adding a score or a selection. Write the functions next to their neighbors in >>code and add a
   row to MOE_SCORES or MOE_SELECTS. Enumerator, name in files, functions, traits and checks follow
   from the row. A parameter or a configuration field of its own is one more row in
   MOE_ROUTER_PARAMETERS or MOE_ROUTER_FIELDS. Add rows at the end: files and masks carry their
   numbers. A program adds either without changing this header: see moe_custom.

   Configuration. {0} with d_model set is a valid default. moe_router_fields describes every field:
   name, kind, range, default, names of its values. moe_router_check fills in the defaults and
   refuses what cannot work; the message names the field, or both fields that clash.

   Arithmetic is in moe_real, whatever the experts use.

   Ties. Of equal scores the lower expert index wins. A NaN is never chosen.

   Non-finite numbers. A call returns MOE_ERR_NONFINITE if a logit of a real token, a refined p or a
   weight of the plan is infinite or NaN; after MOE_OK the plan is finite, whatever the inputs.
   Inputs up to 1e4 in magnitude give finite results, losses and gradients with weights of ordinary
   magnitude (as initialized). An expert whose selection bias or learned threshold is NaN is never
   chosen by it. Losses are not checked here; the trainer of moe.h checks them.

   Gradients flow through weights, gates, scores and losses. Selection is a constant.

   Padding (mask 0) is neither routed nor counted. Its row may hold anything, NaN included: it
   reaches no result and no gradient.

   Losses are computed in training calls, factors included: routing.loss[MOE_LOSS_BALANCE], ...
   moe_route_backward adds their gradients. With even load and even gates the balance loss equals
   its factor alpha. With K = 1 the weights sum and softmax are always 1: moe_router_check_training
   refuses to train such a router.

   Determinism is bitwise for the same kernels. If moe_router_traits says MOE_TRAIT_CAUSAL without
   MOE_TRAIT_NEEDS_BATCH, a token's logits, gate, choices and weights do not depend on the other
   tokens of the call.

   State. What a router remembers (selection bias, running clusters, step, L1 factor, capacity
   bound) is in parameters with the flag MOE_PARAM_STATE. moe_route reads them; moe_router_observe
   and moe_router_advance update them. Schedules of K, of a temperature and of the selection follow
   the parameter router.step, in training and outside.

   Decoding. A router that needs other tokens at inference refuses a call with decoding = 1;
   moe_router_check_decoding says which mode would work. The causal refine stage reads earlier
   tokens from past_u and past_gate. What needs a batch only in training (sinkhorn, balanced, drop
   rules) decodes.

   Pointers. Every moe_error and every table of kernels (plain C) may be NULL; the comments of
   functions and fields say what else may be NULL. Other NULL pointers give MOE_ERR_ARGUMENT where a
   function returns moe_status, but moe_router_parameter and functions that return something else do
   not check.

   Threads. Functions keep no state. Calls with different workspaces may run at the same time; a
   moe_rng belongs to one call at a time.
*/
#ifndef MOE_ROUTERS_H
#define MOE_ROUTERS_H

#if MOE_VERSION_MAJOR != 0 || MOE_VERSION_MINOR != 2 || MOE_VERSION_PATCH != 0
#error "moe: this is moe_routers.h of version 0.2.0, and moe_kernels.h is of another: copy all headers of one version"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#ifndef MOE_NO_FLOAT
/* ==== >>fields: configuration as data ============================================================
   Every field of a configuration is one row of a table. Checks, messages, text in files and presets
   all read the rows. */

/* Kinds of fields: an int, an int that is 0 or 1, an int that indexes choices, a moe_real. */
enum { MOE_FIELD_INT = 0, MOE_FIELD_FLAG = 1, MOE_FIELD_CHOICE = 2, MOE_FIELD_REAL = 3 };

/* One field: a row of moe_router_fields or moe_layer_fields. */
typedef struct moe_field {
    const char *name;           /* in files, presets and messages */
    int kind;                   /* MOE_FIELD_ */
    size_t offset;              /* in the configuration struct */
    double min, max;            /* range; 0 is always allowed and means the default */
    /* what 0 means; 0 if that depends on other fields, or is 0 itself */
    double default_value;
    /* names of the values 0, 1, ..., then NULL; NULL unless MOE_FIELD_CHOICE */
    const char *const *choices;
    const char *about;          /* one line */
} moe_field;

/* The row called name in a table that ends with a row whose name is NULL; NULL if there is none.
   Thread-safe. */
MOE_API const moe_field *moe_field_find(const moe_field *fields, const char *name);
/* Sets one field of config from text ("2", "0.01", "cosine"). MOE_ERR_NOT_FOUND: no such field, the
   message suggests the nearest name; MOE_ERR_CONFIG: not a value of the field; MOE_ERR_ARGUMENT:
   config or value is NULL. On failure config is unchanged. */
MOE_API moe_status moe_field_set(const moe_field *fields, void *config, const char *name, const char *value,
                                 moe_error *error);
/* The value of a field as text that moe_field_set reads back to the same value; terminated,
   truncated to room. */
MOE_API void moe_field_text(const moe_field *field, const void *config, char *text, size_t room);
/* Sets fields from "name=value name=value ..." in order, stops at the first error and keeps what it
   has set so far. settings NULL or "" sets nothing. Errors as moe_field_set; MOE_ERR_CONFIG also
   for a name without "=". */
MOE_API moe_status moe_fields_apply(const moe_field *fields, void *config, const char *settings, moe_error *error);

/* ==== >>stages: every value of every stage =======================================================
   One X-macro per concept, one row per value; value 0 is the default. A row holds the enumerator,
   the name in files and messages, and for stages the functions (section >>code), traits and flags.
   Symbols: u [N,d], z, r, p [N,E], see >>glossary. MOE_x_COUNT is the number of values. */

/* What a router needs or does; bits. CAUSAL: a token's result does not depend on later tokens of
   the call. NEEDS_BATCH: it depends on other tokens. A router with CAUSAL and without NEEDS_BATCH
   gives a token alone the same result as in a batch. */
#define MOE_TRAITS(X) \
    X(MOE_TRAIT_CAUSAL, 1, "causal") \
    X(MOE_TRAIT_NEEDS_BATCH, 2, "needs_batch") \
    X(MOE_TRAIT_NEEDS_TOKEN_IDS, 4, "needs_token_ids") \
    X(MOE_TRAIT_NEEDS_ATTENTION, 8, "needs_attention") \
    X(MOE_TRAIT_NEEDS_PREVIOUS_LAYER, 16, "needs_previous_layer") \
    X(MOE_TRAIT_NEEDS_ALL_EXPERTS, 32, "needs_all_experts") \
    X(MOE_TRAIT_STOCHASTIC, 64, "stochastic") \
    X(MOE_TRAIT_STATEFUL, 128, "stateful") \
    X(MOE_TRAIT_NEEDS_GIVEN, 256, "needs_given")

/* Private flags of the rows below. */
enum {
    MOEI_INPUT_TRAINING_ONLY = 512, /* inputs: plain outside training */

    MOEI_SCORE_TRAINED = 512,   /* scores: has parameters that training changes */
    MOEI_SCORE_WEIGHT = 1024,   /* router.weight holds a vector per expert */
    /* has a vector per expert that tokens can be compared with, router.weight or not */
    MOEI_SCORE_VECTORS = 4096,
    MOEI_SCORE_POSITIVE = 8192, /* logits are never negative */

    MOEI_GATE_SUMS_TO_ONE = 512, /* gates */
    /* r rises with z but may saturate: selection compares logits, so there are no ties */
    MOEI_GATE_RISES = 1024,

    /* selections: fills in choices in order, best first; else marks them in selected */
    MOEI_SELECT_IN_ORDER = 512,
    MOEI_SELECT_AT_MOST_K = 1024,         /* at most K choices per token; else up to E */
    MOEI_SELECT_BATCH_IN_TRAINING = 2048, /* needs the batch only in training */
    MOEI_SELECT_ANY_K = 4096,             /* a schedule may change K */
    MOEI_SELECT_LIMITS_LOAD = 16384,      /* limits the load of experts itself */
    MOEI_SELECT_OWN_FACTOR = 32768,       /* capacity_factor is its own: it drops nothing */
    MOEI_SELECT_LEAVES_OUT = 65536,       /* works without the experts that expert_dropout excludes */

    /* weights: for one choice the weight is 1, whatever the logits */
    MOEI_WEIGHT_ONE_IS_CONSTANT = 512,
    /* w does not read p; under a learned threshold it counts the chosen */
    MOEI_WEIGHT_COUNTS = 1024,
    /* w reads z: neither refine nor a learned threshold reaches it */
    MOEI_WEIGHT_READS_LOGITS = 2048
};

/* Input: u, what the router sees. Functions: one token forward, backward. */
#define MOE_INPUTS(X) \
    /* u = x */ \
    X(MOE_INPUT_PLAIN, "plain", moei_input_plain, moei_input_plain_backward, 0) \
    /* u = x * xi, xi uniform in [1-eps, 1+eps] per element, in training only. Fedus et al. 2022, \
       Switch transformers */ \
    X(MOE_INPUT_JITTER, "jitter", moei_input_jitter, moei_input_factor_backward, MOEI_INPUT_TRAINING_ONLY) \
    /* u = x / sqrt(mean x^2 + 1e-6) * g * d^-1/2, g learned. Gemma 4 */ \
    X(MOE_INPUT_SCALED_RMS, "scaled_rms", moei_input_scaled_rms, moei_input_scaled_rms_backward, 0) \
    /* u_t = m_t * x_t, m_t large where the cluster of tokens that took the same expert in the \
       previous MoE layer is tight. Nielsen et al. 2025, Tight clusters make specialized \
       experts */ \
    X(MOE_INPUT_ADAPTIVE_CLUSTERING, "adaptive_clustering", moei_input_clustered, moei_input_factor_backward, 0)

/* Where M, the feature weights of a cluster, comes from. */
#define MOE_AC_MODES(X) \
    /* M_kq = 1/(s_kq + 1e-6) over the previous layer's x, mean over q scaled to 1 */ \
    X(MOE_AC_PAPER, "paper") \
    X(MOE_AC_CODE, "code")       /* as in the authors' program, over this layer's x */ \
    X(MOE_AC_RUNNING, "running") /* the state router.ac_running */ \
    X(MOE_AC_RANDOM, "random")   /* fixed at max(0, 1 + n/2), n normal: the papers' control */

/* s_kq, the dispersion of feature q in cluster k. */
#define MOE_SPREADS(X) \
    X(MOE_SPREAD_MAD, "mad")           /* mean |h - mean| */ \
    X(MOE_SPREAD_VARIANCE, "variance") /* mean (h - mean)^2 */ \
    X(MOE_SPREAD_PAIRWISE, "pairwise") /* mean over all pairs of |h - h'| */

/* Score: z, the logits. Functions: all tokens forward, backward. */
#define MOE_SCORES(X) \
    /* z_te = u_t . W_e + b_e */ \
    X(MOE_SCORE_LINEAR, "linear", moei_score_linear, moei_score_linear_backward, \
      MOEI_SCORE_TRAINED | MOEI_SCORE_WEIGHT | MOEI_SCORE_VECTORS) \
    /* The same, W and b frozen at their random start. Chen et al. 2023, Sparse MoE as the new \
       dropout */ \
    X(MOE_SCORE_RANDOM, "random", moei_score_linear, moei_score_random_backward, \
        MOEI_SCORE_WEIGHT | MOEI_SCORE_VECTORS) \
    /* z_t = W2 act(W1 u_t + b1) + b2 */ \
    X(MOE_SCORE_MLP, "mlp", moei_score_mlp, moei_score_mlp_backward, MOEI_SCORE_TRAINED) \
    /* z_te = cos(P u_t, W_e) / tau; with cosine_keep_length (P u_t) . W_e / |W_e| / tau. \
       Chi et al. 2022, On the representation collapse of sparse mixture of experts */ \
    X(MOE_SCORE_COSINE, "cosine", moei_score_cosine, moei_score_cosine_backward, \
        MOEI_SCORE_TRAINED | MOEI_SCORE_WEIGHT | MOEI_SCORE_VECTORS) \
    /* z_te = norm of an activation inside expert e, which the caller supplies. Lv et al. 2025, \
       Autonomy-of-experts models */ \
    X(MOE_SCORE_NORM, "norm", moei_score_norm, moei_score_norm_backward, \
        (unsigned)MOE_TRAIT_NEEDS_ALL_EXPERTS | MOEI_SCORE_POSITIVE) \
    /* z_te = mean of the e-th block of d/E features (LocMoE, Li et al. 2024); grap_cosine: block \
       sum / (|u_t| sqrt(d/E)) (LocMoE+) */ \
    X(MOE_SCORE_GRAP, "grap", moei_score_grap, moei_score_grap_backward, MOEI_SCORE_VECTORS) \
    /* z_te = (W_Q h_g) . (W_K h_e) / sqrt(h), h_g = act(W1 u_t + b1) the gate's hidden layer, h_e \
       that of expert e, which the caller supplies. Krishnamurthy et al. 2023, Improving expert \
       specialization in mixture of experts */ \
    X(MOE_SCORE_ATTENTIVE, "attentive", moei_score_attentive, moei_score_attentive_backward, \
      (unsigned)MOE_TRAIT_NEEDS_ALL_EXPERTS | MOEI_SCORE_TRAINED) \
    /* z_te = mean over features of softplus(f_e(x_t)); the caller supplies f_e(x_t). Pham et al. \
       2024, CompeteSMoE */ \
    X(MOE_SCORE_COMPETITION, "competition", moei_score_competition, moei_score_competition_backward, \
      (unsigned)MOE_TRAIT_NEEDS_ALL_EXPERTS | MOEI_SCORE_POSITIVE) \
    /* z_te = sum over i < K of softmax(A u_t)_i prod_j (bit j of e is 1 ? S(c_ij) : 1 - S(c_ij)), \
       c_ij = C_ij . u_t, j < m = ceil(log2 E), at least 1: K learned binary codes; S(v) = 0 below \
       -1/2, 1 above 1/2, -2 v^3 + 3/2 v + 1/2 between. z is itself a gate: use gate = identity, \
       select = positive. Hazimeh et al. 2021, DSelect-k */ \
    X(MOE_SCORE_DSELECT, "dselect", moei_score_dselect, moei_score_dselect_backward, \
        MOEI_SCORE_TRAINED | MOEI_SCORE_POSITIVE) \
    /* moe_router.custom.score fills in z */ \
    X(MOE_SCORE_CUSTOM, "custom", moei_score_custom, moei_score_custom_backward, 0)

/* Which activation of an expert the score norm reads. An mlp expert has gate (= up) and act (=
   product). A swiglu expert's limit and offset come after gate and up, before act and product. */
#define MOE_NODES(X) \
    /* reduce x of a factorised expert; the paper calls its matrix W_down */ \
    X(MOE_NODE_LOW, "down") \
    X(MOE_NODE_GATE, "gate")       /* what enters the expert's activation function */ \
    X(MOE_NODE_UP, "up")           /* the linear branch */ \
    X(MOE_NODE_ACT, "act")         /* what leaves the activation function */ \
    X(MOE_NODE_PRODUCT, "product") /* act times up */ \
    X(MOE_NODE_OUTPUT, "output")
/* The norm of the score norm. */
#define MOE_NORMS(X) X(MOE_NORM_L2, "l2") X(MOE_NORM_L1, "l1") X(MOE_NORM_LINF, "linf")

/* Noise on z, in training. */
#define MOE_NOISES(X) \
    X(MOE_NOISE_NONE, "none") \
    /* n (softplus(u W_n^T) + noise_floor), n normal (Shazeer et al. 2017) */ \
    X(MOE_NOISE_NOISY_TOPK, "noisy_topk") \
    X(MOE_NOISE_GAUSSIAN, "gaussian")     /* noise_sigma n (V-MoE) */ \
    X(MOE_NOISE_GUMBEL, "gumbel")

/* Gate: r, the gate values. Functions: rows of E values forward, one row backward. */
#define MOE_GATES(X) \
    /* softmax(z/T) */ \
    X(MOE_GATE_SOFTMAX, "softmax", moei_gate_softmax, moei_gate_softmax_backward, \
        MOEI_GATE_SUMS_TO_ONE | MOEI_GATE_RISES) \
    /* sigmoid(z/T) */ \
    X(MOE_GATE_SIGMOID, "sigmoid", moei_gate_sigmoid, moei_gate_sigmoid_backward, MOEI_GATE_RISES) \
    /* sqrt(softplus(z)) */ \
    X(MOE_GATE_SQRT_SOFTPLUS, "sqrt_softplus", moei_gate_sqrt_softplus, moei_gate_sqrt_softplus_backward, \
        MOEI_GATE_RISES) \
    /* max(z,0) */ \
    X(MOE_GATE_RELU, "relu", moei_gate_relu, moei_gate_relu_backward, 0) \
    /* z */ \
    X(MOE_GATE_IDENTITY, "identity", moei_gate_identity, moei_gate_identity_backward, 0)

/* Refine: p from r, within one sequence. Nguyen et al. 2025, Improving routing in sparse mixture of
   experts with graph of tokens. */
#define MOE_REFINES(X) \
    X(MOE_REFINE_NONE, "none") \
    /* Similarity-Aware MoE: p_i = sum_j S_ij r_j, S = softmax_j(u_i . W_s u_j / tau) */ \
    X(MOE_REFINE_SIMILARITY, "similarity") \
    /* Attention-Aware MoE: p_i = sum_j A'_ij r_j, A' the posterior of an attention head: \
       softmax_j(log A_ij - |u_i - o_j|^2 / (2 sigma^2)) */ \
    X(MOE_REFINE_ATTENTION, "attention")
/* How similarity scales its products. */
#define MOE_SIMILARITIES(X) \
    X(MOE_SIMILARITY_NONE, "none") \
    X(MOE_SIMILARITY_L2, "l2")           /* of unit vectors */ \
    X(MOE_SIMILARITY_RSQRT_D, "rsqrt_d") /* divided by sqrt(d) */
/* Which heads refine by attention. */
#define MOE_HEADS(X) \
    /* the one with the least mean entropy over the sequence */ \
    X(MOE_HEADS_MIN_ENTROPY, "min_entropy") \
    X(MOE_HEADS_ALL, "all")                 /* each by its posterior weight */ \
    X(MOE_HEADS_FIXED, "fixed")             /* attention_head */
/* What attention compares with the heads' outputs. */
#define MOE_ATTENTION_US(X) \
    X(MOE_ATTENTION_U_INPUT, "input")   /* u of this pipeline */ \
    X(MOE_ATTENTION_U_OUTPUT, "output") /* the attention output supplied with the call */

/* Select: S_t, the chosen experts. b is the selection bias, 0 if there is none. Columns: function,
   flags, traits. */
#define MOE_SELECTS(X) \
    /* The K largest of the selection score: z where sparsemixer reads it, or p rises with it and \
       nothing is added; else p + b */ \
    X(MOE_SELECT_TOP_K, "top_k", moei_select_top_k, \
      MOEI_SELECT_IN_ORDER | MOEI_SELECT_AT_MOST_K | MOEI_SELECT_ANY_K | MOEI_SELECT_LEAVES_OUT, 0) \
    /* All experts */ \
    X(MOE_SELECT_DENSE, "dense", moei_select_dense, MOEI_SELECT_LEAVES_OUT, 0) \
    /* Forced routing: the caller's indices, call.given */ \
    X(MOE_SELECT_GIVEN, "given", moei_select_given, MOEI_SELECT_AT_MOST_K, MOE_TRAIT_NEEDS_GIVEN) \
    /* top_k of p + b inside the groups_kept best of `groups` groups of experts. DeepSeek-V2 \
       (max), V3 (top2_sum) */ \
    X(MOE_SELECT_GROUPED_TOP_K, "grouped_top_k", moei_select_grouped_top_k, MOEI_SELECT_AT_MOST_K, 0) \
    /* The best experts until their p sums to more than top_p, the crossing one included. \
       Huang et al. 2024, Harder tasks need more experts */ \
    X(MOE_SELECT_TOP_P, "top_p", moei_select_top_p, 0, 0) \
    /* All with p > theta, theta fixed or learned; threshold_fallback: the best one if there is \
       none. Guo et al. 2024, DynMoE */ \
    X(MOE_SELECT_THRESHOLD, "threshold", moei_select_threshold, MOEI_SELECT_LEAVES_OUT, 0) \
    /* All with p > 0; may be empty. Wang et al. 2024, ReMoE */ \
    X(MOE_SELECT_POSITIVE, "positive", moei_select_threshold, MOEI_SELECT_LEAVES_OUT, 0) \
    /* Each expert takes its C = max(1, round(capacity_factor N / E)) best tokens by p, or by z. \
       Zhou et al. 2022 */ \
    X(MOE_SELECT_EXPERT_CHOICE, "expert_choice", moei_select_expert_choice, \
        MOEI_SELECT_LIMITS_LOAD | MOEI_SELECT_LEAVES_OUT, MOE_TRAIT_NEEDS_BATCH) \
    /* Each token goes to its best expert by z. The expert keeps the shortest prefix of its tokens \
       that holds affinity_mass of their summed positive z (or affinity_sum of it), at least \
       capacity_min, at most capacity. LocMoE+, Li et al. 2024 */ \
    X(MOE_SELECT_AFFINITY, "affinity", moei_select_affinity, MOEI_SELECT_LIMITS_LOAD, MOE_TRAIT_NEEDS_BATCH) \
    /* router.table[token id], K experts per token id. Roller et al. 2021, Hash layers */ \
    X(MOE_SELECT_HASH, "hash", moei_select_hash, MOEI_SELECT_AT_MOST_K, MOE_TRAIT_NEEDS_TOKEN_IDS) \
    /* Soft MoE: every expert works on `slots` mixtures of the sequence's tokens: L = u . phi, \
       dispatch = softmax over tokens, combine = softmax over slots; soft_normalise: L = unit(u) . \
       (scale unit(phi)). Score, gate, weight and losses do not apply. \
       Puigcerver et al. 2024, From sparse to soft mixtures of experts */ \
    X(MOE_SELECT_SOFT, "soft", moei_select_dense, 0, MOE_TRAIT_NEEDS_BATCH) \
    /* In training the K largest of d0 Q d1, Q = exp(z) scaled to even rows and columns; outside \
       training top_k. Clark et al. 2022, Unified scaling laws for routed language models */ \
    X(MOE_SELECT_SINKHORN, "sinkhorn", moei_select_sinkhorn, \
      MOEI_SELECT_AT_MOST_K | MOEI_SELECT_BATCH_IN_TRAINING | MOEI_SELECT_ANY_K, MOE_TRAIT_NEEDS_BATCH) \
    /* In training K draws without replacement from p; outside training the K largest p, or with \
       sample_at = always draws as well */ \
    X(MOE_SELECT_SAMPLE, "sample", moei_select_sample, \
        MOEI_SELECT_AT_MOST_K | MOEI_SELECT_ANY_K, MOE_TRAIT_STOCHASTIC) \
    /* In training the assignment of one expert per token with the largest sum of z (cut off to \
       about 2^-46 of the largest) under which all experts take equally many tokens, within 1; \
       one of equal sums, the same everywhere; outside training top_k. Lewis et al. 2021, \
       BASE layers */ \
    X(MOE_SELECT_BALANCED, "balanced", moei_select_balanced, \
      MOEI_SELECT_AT_MOST_K | MOEI_SELECT_BATCH_IN_TRAINING, MOE_TRAIT_NEEDS_BATCH) \
    /* moe_router.custom.select marks the experts */ \
    X(MOE_SELECT_CUSTOM, "custom", moei_select_custom, 0, 0) \
    /* The K/G best of each of G = `groups` groups of experts, by the score of top_k. \
       Tang et al. 2025, Pangu Pro MoE: mixture of grouped experts for efficient sparsity */ \
    X(MOE_SELECT_GROUPED_EACH, "grouped_each", moei_select_grouped_each, \
        MOEI_SELECT_AT_MOST_K | MOEI_SELECT_LEAVES_OUT, 0) \
    /* All with z >= c, c the running mean of the C-th largest z of training calls, C as in \
       expert_choice; may be empty. From the first step on outside training, whatever switch_at \
       says. 2026, Expert threshold routing for autoregressive language modeling with dynamic \
       computation allocation and load balancing */ \
    X(MOE_SELECT_EXPERT_THRESHOLD, "expert_threshold", moei_select_expert_threshold, MOEI_SELECT_OWN_FACTOR, \
        MOE_TRAIT_STATEFUL)

/* When sample draws. Outside training the random numbers follow from sample_seed and the bits of
   the token's logits: no generator is needed, and a token alone draws as in its sequence. */
#define MOE_SAMPLE_ATS(X) X(MOE_SAMPLE_TRAINING, "training") X(MOE_SAMPLE_ALWAYS, "always")
/* Which tokens share draws, those of the first real one of the sequence or call. */
#define MOE_SAMPLE_SCOPES(X) \
    X(MOE_SAMPLE_TOKEN, "token") \
    X(MOE_SAMPLE_SEQUENCE, "sequence") \
    X(MOE_SAMPLE_CALL, "call") /* of a training call; outside training as token */
/* What expert_dropout draws for: every token, or all tokens of the call together. */
#define MOE_DROPOUT_SCOPES(X) X(MOE_DROPOUT_SCOPE_TOKEN, "token") X(MOE_DROPOUT_SCOPE_CALL, "call")
/* How a group of experts is scored: by its best p + b, or the sum of its two best. */
#define MOE_GROUPS(X) X(MOE_GROUP_MAX, "max") X(MOE_GROUP_TOP2_SUM, "top2_sum")
/* Over which of the chosen experts the weights sum, softmax and p_norm normalize; the others keep
   w = p. */
#define MOE_WEIGHT_OVERS(X) \
    X(MOE_WEIGHT_OVER_ALL, "all") \
    X(MOE_WEIGHT_OVER_NONZERO, "nonzero") /* all but zero experts */ \
    X(MOE_WEIGHT_OVER_REAL, "real")       /* real experts */
/* When threshold finds no expert, the best one is taken: always, in evaluation only, never. */
#define MOE_FALLBACKS(X) \
    X(MOE_FALLBACK_ALWAYS, "always") \
    X(MOE_FALLBACK_EVALUATION, "evaluation") \
    X(MOE_FALLBACK_NEVER, "never")
/* What experts choose by. */
#define MOE_EXPERT_CHOICES(X) X(MOE_EXPERT_CHOICE_P, "p") X(MOE_EXPERT_CHOICE_Z, "z")

/* Weight: w, the combine weights over S_t. A denominator of 0 gives 0. One below 1e-30 (1e-290 in
   the double build), as where all chosen experts lie far behind others, passes no gradient: the
   slope would not be finite. Functions: one token forward, backward. */
#define MOE_WEIGHTS(X) \
    /* p_te / sum_S p */ \
    X(MOE_WEIGHT_SUM, "sum", moei_weight_p_norm, moei_weight_p_norm_backward, MOEI_WEIGHT_ONE_IS_CONSTANT) \
    /* exp(z_te) / sum_S exp(z) */ \
    X(MOE_WEIGHT_SOFTMAX, "softmax", moei_weight_softmax, moei_weight_softmax_backward, \
        MOEI_WEIGHT_ONE_IS_CONSTANT | MOEI_WEIGHT_READS_LOGITS) \
    /* p_te */ \
    X(MOE_WEIGHT_RAW, "raw", moei_weight_raw, moei_weight_raw_backward, 0) \
    /* p_te / (sum_S p^P)^(1/P) */ \
    X(MOE_WEIGHT_P_NORM, "p_norm", moei_weight_p_norm, moei_weight_p_norm_backward, MOEI_WEIGHT_ONE_IS_CONSTANT) \
    /* 1 / |S_t| */ \
    X(MOE_WEIGHT_UNIFORM, "uniform", moei_weight_uniform, moei_weight_constant_backward, MOEI_WEIGHT_COUNTS) \
    /* 1 */ \
    X(MOE_WEIGHT_ONE, "one", moei_weight_one, moei_weight_constant_backward, MOEI_WEIGHT_COUNTS) \
    /* One choice after another: its softmax among the experts not yet picked and within 2 eps of \
       the best. Liu et al. 2023, Sparse backpropagation for MoE training. A drawn choice that is \
       not the best may weigh 1/3 of that; a forced one never does, as it is not drawn */ \
    X(MOE_WEIGHT_SPARSEMIXER, "sparsemixer", moei_weight_sparsemixer, moei_weight_sparsemixer_backward, \
        MOEI_WEIGHT_READS_LOGITS)

/* Capacity: which assignments are kept when an expert has more than C. First choices are placed
   first, then second ones, ...; the order of tokens within a choice is: */
#define MOE_DROPS(X) \
    X(MOE_DROP_POSITION, "position") /* first come, first served */ \
    /* descending max p (Riquelme et al. 2021, V-MoE) */ \
    X(MOE_DROP_PRIORITY, "priority") \
    X(MOE_DROP_RANDOM, "random") /* drawn from call.rng; outside training without one as position */ \
    X(MOE_DROP_SCORE, "score")   /* the expert's largest p are kept, whichever choice they are */
/* Random dropping before capacity, in training. */
#define MOE_DROP_RULES(X) \
    X(MOE_DROP_RULE_NONE, "none") \
    /* the second choice stays with probability min(1, 2 w_2) (Lepikhin et al. 2020) */ \
    X(MOE_DROP_RULE_GSHARD, "gshard") \
    /* the n-th choice stays with min(1, w_n / 0.2) (Zoph et al. 2022) */ \
    X(MOE_DROP_RULE_ST_MOE, "st_moe")
/* Weights after dropping: as before, or divided by the sum of those that stay. */
#define MOE_RENORMALIZES(X) X(MOE_RENORMALIZE_BEFORE, "before") X(MOE_RENORMALIZE_AFTER, "after")
/* Where the weight is applied: on the expert's output, or on its input (Llama 4). */
#define MOE_APPLIES(X) X(MOE_APPLY_OUTPUT, "output") X(MOE_APPLY_INPUT, "input")
/* The least capacity of LocMoE (Li et al. 2024): C_min = exp(d delta^2 / (2 - delta^2)) / E, delta
   the largest |cos| between a token and an expert's gating vector. */
#define MOE_BOUNDS(X) \
    X(MOE_BOUND_NONE, "none") \
    X(MOE_BOUND_FIRST, "first") /* of the first training call, kept as state (LocMoE) */ \
    X(MOE_BOUND_EVERY, "every") /* of each call (LocMoE+) */

/* Losses, in training. Columns: function, field with the factor (0: off). */
#define MOE_LOSSES(X) \
    /* alpha E sum_e f_e P_e, f the share of assignments, P the mean of p / sum p (Fedus et al. \
       2022) */ \
    X(MOE_LOSS_BALANCE, "balance", moei_loss_balance, loss_balance) \
    /* beta mean_t (ln sum_e exp z_te)^2 (Zoph et al. 2022) */ \
    X(MOE_LOSS_Z, "z", moei_loss_z, loss_z) \
    /* w CV^2 of sum_t p_te over experts (Shazeer et al. 2017) */ \
    X(MOE_LOSS_IMPORTANCE, "importance", moei_loss_importance, loss_importance) \
    /* gamma mean_t H(p_t) */ \
    X(MOE_LOSS_ENTROPY, "entropy", moei_loss_entropy, loss_entropy) \
    /* -gamma H(mean_t p_t) */ \
    X(MOE_LOSS_USAGE_ENTROPY, "usage_entropy", moei_loss_usage_entropy, loss_usage_entropy) \
    /* pulls unlike inputs to different experts (Krishnamurthy et al. 2023); a second factor is \
       loss_similarity_diff */ \
    X(MOE_LOSS_SIMILARITY, "similarity", moei_loss_similarity, loss_similarity_same) \
    /* mu sum over machines of the divergence of their tokens' p from staying local (LocMoE) */ \
    X(MOE_LOSS_LOCALITY, "locality", moei_loss_locality, loss_locality) \
    /* lambda E / (K N^2) sum_e n_e sum_t p_te (ReMoE) */ \
    X(MOE_LOSS_L1, "l1", moei_loss_l1, loss_l1) \
    /* w sum over pairs of experts of cos(W_e, W_e')^2 */ \
    X(MOE_LOSS_ORTHOGONAL, "orthogonal", moei_loss_orthogonal, loss_orthogonal) \
    /* w CV^2 of the smooth load (Shazeer et al. 2017) */ \
    X(MOE_LOSS_LOAD, "load", moei_loss_load, loss_load) \
    /* the distance from a teacher */ \
    X(MOE_LOSS_DISTILL, "distill", moei_loss_distill, loss_distill) \
    /* w sqrt(sum over pairs of experts of cos(W_e, W_e')^2) (Guo et al. 2024, DynMoE) */ \
    X(MOE_LOSS_DIVERSITY, "diversity", moei_loss_diversity, loss_diversity) \
    /* w mean_e |W_e| (DynMoE) */ \
    X(MOE_LOSS_SIMPLICITY, "simplicity", moei_loss_simplicity, loss_simplicity) \
    /* alpha sum_e (n_e - m) / m sum over the tokens of e of sigmoid(z_te), m the mean of n_e; a \
       sum, not a mean (Dai et al. 2022, StableMoE) */ \
    X(MOE_LOSS_STABLE_BALANCE, "stable_balance", moei_loss_stable_balance, loss_stable_balance) \
    /* lambda mean_t sum_i H(q_ti), q_ti the code i of dselect over the experts (Hazimeh et al. \
       2021) */ \
    X(MOE_LOSS_SELECTOR_ENTROPY, "selector_entropy", moei_loss_selector_entropy, loss_selector_entropy) \
    /* omega mean_t sum_i 1 / max(sum_e q_tie, 1e-6): codes stay at experts that exist, where E is \
       not a power of 2 (Hazimeh et al. 2021) */ \
    X(MOE_LOSS_SELECTOR_REACH, "selector_reach", moei_loss_selector_reach, loss_selector_reach) \
    /* w mean_t sum_e of the cross-entropy of sigmoid(predictor u) to the choice (Raposo et al. \
       2024) */ \
    X(MOE_LOSS_PREDICTOR, "predictor", moei_loss_predictor, loss_predictor)
/* The distance from a teacher, which gets no gradient. */
#define MOE_DISTILLS(X) \
    X(MOE_DISTILL_CE_HARD, "ce_hard") /* -ln softmax(z) at the teacher's best expert */ \
    X(MOE_DISTILL_CE_SOFT, "ce_soft") /* the cross-entropy of the two softmaxes */ \
    X(MOE_DISTILL_MSE, "mse")         /* their mean squared difference */
/* c, the response of an expert with compete_rate, and the weights of the K largest. */
#define MOE_COMPETES(X) \
    /* mean over features of softplus(f_e(x_t)); c / sum_S c (Nguyen et al. 2025, CompeteSMoE) */ \
    X(MOE_COMPETE_SOFTPLUS, "softplus") \
    X(MOE_COMPETE_NORM, "norm") /* |f_e(x_t)|; softmax over S of c (Pham et al. 2024) */
/* f_e of the balance loss. */
#define MOE_BALANCES(X) \
    X(MOE_BALANCE_PAIRS, "pairs")   /* n_e / sum n */ \
    X(MOE_BALANCE_TOKENS, "tokens") /* n_e / N */ \
    X(MOE_BALANCE_FIRST, "first")   /* first choices only */
/* The balance loss over the call, or its mean over the sequences. */
#define MOE_SCOPES(X) X(MOE_SCOPE_BATCH, "batch") X(MOE_SCOPE_SEQUENCES, "sequences")
/* What the importance loss sums. */
#define MOE_IMPORTANCES(X) \
    X(MOE_IMPORTANCE_PROBABILITIES, "probabilities") /* p */ \
    X(MOE_IMPORTANCE_GATE, "gate")                   /* r of the logits without noise */ \
    X(MOE_IMPORTANCE_WEIGHTS, "weights")             /* w before capacity and scale */

/* Whose sparsity moves the factor of the L1 loss. */
#define MOE_L1S(X) \
    X(MOE_L1_NONE, "none")   /* nothing does */ \
    X(MOE_L1_LAYER, "layer") /* the layer's own */ \
    X(MOE_L1_NET, "net")     /* the mean of all such layers of the network, which share one factor */

/* How a step changes the selection bias: b_e += D_e, with S = sum n and the even load t = S / E;
   with bias_real K_e, t = K_e S / (K R) for the real experts. */
#define MOE_BIAS_RULES(X) \
    /* D_e = gamma sign(t - n_e) (Wang et al. 2024, auxiliary-loss-free) */ \
    X(MOE_BIAS_SIGN, "sign") \
    X(MOE_BIAS_PROPORTIONAL, "proportional") /* D_e = gamma (t - n_e) / S (LongCat-Flash) */ \
    /* D_e = gamma tanh(kappa (t - n_e) / t), less its mean; m_e = beta m_e + (1 - beta) D_e; then \
       b_e += m_e (Singh et al. 2026, Arcee Trinity Large technical report) */ \
    X(MOE_BIAS_SMEBU, "smebu")

/* The field that tau_schedule moves to tau_end; the names are those of the fields. */
#define MOE_TAUS(X) \
    X(MOE_TAU_NONE, "none") \
    X(MOE_TAU_GATE_TEMPERATURE, "gate_temperature") \
    X(MOE_TAU_COSINE_TAU, "cosine_tau") \
    X(MOE_TAU_SIMILARITY_TAU, "similarity_tau") \
    X(MOE_TAU_ATTENTION_SIGMA, "attention_sigma")

/* From rows to enumerators: of rows (value, name), (value, name, function, field) and (value, name,
   function, function, flags). */
#define MOEI_VALUE2(value, name) value,
#define MOEI_VALUE5(value, name, f, g, flags) value,
#define MOEI_VALUE_BIT(value, bit, name) value = (bit),
/* The values of the tables above. */
enum { MOE_TRAITS(MOEI_VALUE_BIT) MOEI_TRAITS_END };
/* Every table above: X(table, x, y, number of the MOEI_VALUE and MOEI_NAME for its rows) makes
   MOE_x_COUNT and moei_y_names; S(x, y, number) the same of the table MOE_xS. */
#define MOEI_TABLES(S, X) \
    S(INPUT, input, 5) S(SPREAD, spread, 2) S(SCORE, score, 5) S(NODE, node, 2) S(NORM, norm, 2) S(NOISE, noise, 2) \
    S(GATE, gate, 5) S(REFINE, refine, 2) S(ATTENTION_U, attention_u, 2) S(SELECT, select, 5) S(GROUP, group, 2) \
    S(FALLBACK, fallback, 2) S(EXPERT_CHOICE, expert_choice, 2) S(WEIGHT, weight, 5) S(WEIGHT_OVER, weight_over, 2) \
    S(DROP, drop, 2) S(DROP_RULE, drop_rule, 2) S(RENORMALIZE, renormalize, 2) S(BOUND, bound, 2) \
    S(DISTILL, distill, 2) S(COMPETE, compete, 2) S(BALANCE, balance, 2) S(SCOPE, scope, 2) \
    S(IMPORTANCE, importance, 2) S(BIAS_RULE, bias_rule, 2) S(TAU, tau, 2) S(SAMPLE_AT, sample_at, 2) \
    S(SAMPLE_SCOPE, sample_scope, 2) S(DROPOUT_SCOPE, dropout_scope, 2) S(L1, l1, 2) X(MOE_AC_MODES, AC, ac, 2) \
    X(MOE_SIMILARITIES, SIMILARITY, similarity, 2) X(MOE_HEADS, HEADS, heads, 2) X(MOE_APPLIES, APPLY, apply, 2) \
    X(MOE_LOSSES, LOSS, loss, 4)
#define MOEI_TABLE_VALUES(rows, x, y, n) enum { rows(MOEI_VALUE##n) MOE_##x##_COUNT };
#define MOEI_TABLE_VALUES_S(x, y, n) MOEI_TABLE_VALUES(MOE_##x##S, x, y, n)
MOEI_TABLES(MOEI_TABLE_VALUES_S, MOEI_TABLE_VALUES)
/* Besides stages, what a mask of >>options may leave out (MOE_KEEP_EXTRAS): limits on the tokens of
   an expert; what changes with steps; calls with training = 1; swiglu experts with swiglu_alpha,
   swiglu_limit or swiglu_offset; calls with a batch. */
enum {
    MOE_EXTRA_CAPACITY = 0,
    MOE_EXTRA_SCHEDULE,
    MOE_EXTRA_TRAINING,
    MOE_EXTRA_SHAPED,
    MOE_EXTRA_BATCH,
    MOE_EXTRA_COUNT
};

/* ==== >>config: the configuration of a router ================================================= */

/* Limits of sizes: 65536 and 2^24; less where an int has 16 bits. */
enum { MOE_MAX_EXPERTS = sizeof(int) > 2 ? 65536 : 32767, MOE_MAX_WIDTH = sizeof(int) > 2 ? 16777216 : 32767 };

/* All fields: rows INT or REAL (name, default, least, greatest, about), FLAG (name, about): 0 or 1,
   default 0, and CHOICE (name, x of MOE_x_COUNT, y of moei_y_names, about), default 0. A field that
   is 0 has its default. A default of 0 here depends on other fields and is given in brackets, or 0
   is a value. */
#define MOE_ROUTER_FIELDS(INT, FLAG, CHOICE, REAL) \
    INT(d_model, 0, 1, MOE_MAX_WIDTH, "d, width of a token; required") \
    INT(n_experts, 8, 1, MOE_MAX_EXPERTS, "E, number of experts") \
    INT(top_k, 0, 1, MOE_MAX_EXPERTS, "K, experts per token, at most E [2, or 1 when E = 1]") \
    /* experts without matrices: the last n_zero + n_copy + n_constant of E, in this order */ \
    INT(n_zero, 0, 0, MOE_MAX_EXPERTS, "zero experts: f = 0 (Zeng et al. 2024, AdaMoE)") \
    INT(n_copy, 0, 0, MOE_MAX_EXPERTS, "copy experts: f = x (Jin et al. 2024, MoE++)") \
    INT(n_constant, 0, 0, MOE_MAX_EXPERTS, \
        "constant experts: f = a1 x + a2 v, v learned, [a1, a2] = softmax(W x) (Jin et al. 2024, MoE++)") \
    /* input */ \
    CHOICE(input, INPUT, input, "what the router sees") \
    FLAG(raw_input, "in a network the router reads the input of the norms directly before the layer (router_x)") \
    REAL(jitter_eps, 0.01, 1e-6, 1, "eps of jitter") \
    CHOICE(ac_mode, AC, ac, "source of the feature weights of adaptive clustering") \
    CHOICE(ac_spread, SPREAD, spread, "dispersion of a cluster") \
    INT(ac_mix, 0, 1, MOE_MAX_EXPERTS, "J, number of the previous layer's experts that are mixed [1]") \
    REAL(ac_lambda, 0, 1e-9, 1e9, "> 0: the theorem's exact feature weights lambda / (s + alpha_k)") \
    REAL(ac_rho, 0, 1e-9, 1, "rho of mode running: table <- rho table + (1 - rho) M [0.9]") \
    /* score */ \
    CHOICE(score, SCORE, score, "how logits are computed") \
    FLAG(router_bias, "linear and random scores have a bias") \
    INT(cosine_dim, 0, 1, MOE_MAX_WIDTH, "r, rows of the projection P; 0: no projection") \
    FLAG(cosine_keep_length, "only the expert's vector is normalized") \
    FLAG(cosine_learn_tau, "tau is the parameter router.temperature") \
    REAL(cosine_tau, 1, 1e-6, 1e6, "tau; its initial value when learned") \
    CHOICE(norm_node, NODE, node, "the activation whose norm is the score") \
    CHOICE(norm_order, NORM, norm, "which norm") \
    INT(router_hidden, 0, 1, MOE_MAX_WIDTH, \
        "h, hidden width of the scores mlp [d] and attentive [d_ff of the experts]") \
    CHOICE(router_act, ACT, act, "activation function of the scores mlp and attentive") \
    FLAG(grap_cosine, "grap divides by the token's length") \
    FLAG(router_residual, \
        "z += W_g z', z' the previous MoE layer's logits; none in the first (Jin et al. 2024, MoE++)") \
    /* noise, gate */ \
    REAL(logit_cap, 0, 1e-6, 1e6, "c > 0: z = c tanh(z / c), before noise (Grok-2: 30)") \
    CHOICE(noise, NOISE, noise, "noise on the logits in training") \
    REAL(noise_floor, 0.01, 1e-9, 1e6, "lower bound of noisy_topk's scale") \
    REAL(noise_sigma, 0, 1e-9, 1e6, "standard deviation of gaussian [1/E]") \
    CHOICE(gate, GATE, gate, "maps logits to gate values") \
    REAL(gate_temperature, 1, 1e-6, 1e6, "T of softmax and sigmoid") \
    /* refine */ \
    CHOICE(refine, REFINE, refine, "mixes gate values between tokens") \
    REAL(similarity_tau, 1, 1e-6, 1e6, "tau of similarity") \
    CHOICE(similarity_scale, SIMILARITY, similarity, "how similarity scales its products") \
    FLAG(similarity_learned, "W_s is the parameter router.similarity, not the identity") \
    FLAG(lower_entropy_only, "only tokens j with H(r_j) <= H(r_i) take part") \
    FLAG(causal, "only tokens j <= i take part") \
    INT(heads, 1, 1, 4096, "attention heads supplied with the call") \
    CHOICE(attention_heads, HEADS, heads, "which of these heads refine") \
    INT(attention_head, 0, 0, 4095, "index of the head when fixed") \
    REAL(attention_sigma, 1, 1e-6, 1e6, "sigma of attention") \
    CHOICE(attention_u, ATTENTION_U, attention_u, "what attention compares") \
    /* select */ \
    CHOICE(select, SELECT, select, "how a token's experts are chosen") \
    FLAG(selection_bias, "the state router.selection_bias is added to p for selection only") \
    INT(groups, 1, 1, MOE_MAX_EXPERTS, "groups of grouped_top_k and grouped_each, a divisor of E") \
    INT(groups_kept, 1, 1, MOE_MAX_EXPERTS, "number of groups kept") \
    CHOICE(group_score, GROUP, group, "score of a group") \
    FLAG(custom_batch, "the custom score or selection reads other tokens as well: not causal") \
    INT(custom_parameters, 0, 1, MOE_MAX_WIDTH, "length of router.custom, the custom score's own parameters; 0: none") \
    REAL(top_p, 0.6, 1e-6, 1, "P of top_p") \
    REAL(threshold, 0.05, -1e6, 1e6, "theta; its initial value when learned") \
    FLAG(threshold_learned, "theta is the parameter router.threshold") \
    FLAG(threshold_sigmoid, "theta is the sigmoid of that parameter (DynMoE)") \
    CHOICE(threshold_fallback, FALLBACK, fallback, "the choice when no expert exceeds theta") \
    CHOICE(expert_choice_score, EXPERT_CHOICE, expert_choice, "score by which experts choose") \
    CHOICE(expert_choice_scope, SCOPE, scope, "tokens of the batch or of each sequence") \
    /* Raposo et al. 2024, Mixture-of-depths: dynamically allocating compute in transformer-based \
       language models */ \
    FLAG(predictor, \
        "a linear router.predictor learns the experts' choices and makes them in decoding") \
    REAL(threshold_rho, 0, 1e-6, 0.999999, "rho of expert_threshold's cutoffs, which are running means [0.99]") \
    REAL(affinity_mass, 1, 1e-6, 1, "fraction of its total affinity that an expert keeps") \
    REAL(affinity_sum, 0, 0, 1e9, "> 0: that affinity itself, not a fraction") \
    REAL(affinity_sum_auto, 0, 1e-6, 1e6, \
        "> 0: affinity_sum is this times the mean sum of the first training call (LocMoE+)") \
    INT(capacity, 0, 1, MOE_MAX_WIDTH, "maximum tokens per expert of affinity; 0: no limit") \
    INT(table_size, 0, 1, MOE_MAX_WIDTH, "number of token ids; hash and student_dim require it") \
    CHOICE(sample_at, SAMPLE_AT, sample_at, "when sample draws (THOR: always)") \
    CHOICE(sample_scope, SAMPLE_SCOPE, sample_scope, "which tokens share a draw") \
    INT(sample_seed, 0, 1, MOE_MAX_WIDTH, "seed of the draws outside training") \
    /* Csordas, Irie, Schmidhuber 2023, Approximating two-layer feedforward networks for efficient \
       transformers. p, weights and losses ignore it; fewer than K experts or none may be \
       left */ \
    REAL(expert_dropout, 0, 1e-6, 0.999999, "probability in training that an expert cannot be selected") \
    CHOICE(expert_dropout_scope, DROPOUT_SCOPE, dropout_scope, "what expert_dropout draws for") \
    INT(slots, 1, 1, MOE_MAX_EXPERTS, "slots per expert and sequence of soft") \
    FLAG(soft_normalise, "soft compares unit vectors times a learned scale") \
    INT(soft_sequences, 1, 1, MOE_MAX_WIDTH, "maximum sequences in one call of soft") \
    /* weight */ \
    CHOICE(weight, WEIGHT, weight, "combine weights") \
    REAL(weight_p, 1, 0.125, 64, "P of p_norm") \
    CHOICE(weight_over, WEIGHT_OVER, weight_over, "chosen experts over which weights are normalized") \
    REAL(sparsemixer_eps, 0.01, 1e-6, 10, "eps of sparsemixer") \
    FLAG(sparsemixer_sample, "sparsemixer samples its experts in training") \
    FLAG(expert_scale, "weights are multiplied by the parameter router.expert_scale (Gemma 4)") \
    REAL(scale, 1, -1e6, 1e6, "factor applied to the final weights") \
    CHOICE(apply_to, APPLY, apply, "where the weight is applied") \
    /* capacity: C = max(capacity_min, ceil(capacity_factor K N / E)) assignments per expert */ \
    REAL(capacity_factor, 0, 1e-6, 1e6, \
        "capacity as a multiple of the even load; 0: dropless [expert_choice and expert_threshold: 1]") \
    REAL(capacity_factor_eval, 0, 1e-6, 1e6, "capacity factor outside training [capacity_factor]") \
    INT(drop_capacity, 0, 1, MOE_MAX_WIDTH, "> 0: C itself, instead of a factor") \
    INT(capacity_min, 1, 1, MOE_MAX_WIDTH, "minimum capacity") \
    CHOICE(capacity_bound, BOUND, bound, "raises capacity_min to C_min; alone C_min is the capacity") \
    REAL(capacity_rho, 0, 1e-9, 1, \
        "> 0: C_min of every, at most N, is averaged: mean <- rho mean + (1 - rho) min(C_min, N)") \
    CHOICE(drop_order, DROP, drop, "order in which assignments are placed") \
    CHOICE(drop_rule, DROP_RULE, drop_rule, "random dropping of weak choices") \
    CHOICE(renormalize, RENORMALIZE, renormalize, "weights after dropping") \
    /* losses: a factor of 0 turns one off */ \
    REAL(loss_balance, 0, 0, 1e6, "alpha of the balance loss") \
    CHOICE(balance_over, BALANCE, balance, "what the balance loss counts") \
    CHOICE(balance_scope, SCOPE, scope, "balance over the batch or per sequence") \
    REAL(zero_tau, 0, 1e-6, 1e6, \
        "tau: weight of experts without matrices in the balance loss; factor of the others' capacity [1]") \
    FLAG(zero_average, "the balance loss counts the mean load of the experts without matrices for each of them") \
    REAL(loss_z, 0, 0, 1e6, "beta of the z loss") \
    REAL(loss_importance, 0, 0, 1e6, "w of the importance loss") \
    CHOICE(importance_over, IMPORTANCE, importance, "what the importance loss sums") \
    FLAG(unbiased, "the variance in CV^2 divides by E - 1") \
    REAL(loss_entropy, 0, 0, 1e6, "gamma of the entropy loss") \
    REAL(loss_usage_entropy, 0, 0, 1e6, "gamma of the usage entropy") \
    REAL(loss_similarity_same, 0, 0, 1e6, "lambda: penalty for unlike inputs at the same expert") \
    REAL(loss_similarity_diff, 0, 0, 1e6, "lambda: reward for unlike inputs at different experts") \
    REAL(loss_locality, 0, 0, 1e6, "mu of the locality loss, which keeps tokens on their machine") \
    INT(nodes, 1, 1, MOE_MAX_EXPERTS, "number of machines for loss_locality") \
    REAL(loss_l1, 0, 0, 1e6, "lambda of the L1 loss") \
    REAL(loss_load, 0, 0, 1e6, "w of the load loss; needs noise") \
    REAL(loss_orthogonal, 0, 0, 1e6, "w of the orthogonality loss") \
    REAL(loss_diversity, 0, 0, 1e6, "w of the diversity loss") \
    REAL(loss_simplicity, 0, 0, 1e6, "w of the simplicity loss") \
    REAL(loss_stable_balance, 0, 0, 1e6, "alpha of StableMoE's balance loss") \
    REAL(loss_selector_entropy, 0, 0, 1e6, "lambda of the entropy of each code of dselect") \
    REAL(loss_selector_reach, 0, 0, 1e6, "omega: penalty on dselect's codes beyond E, for E not a power of 2") \
    REAL(loss_distill, 0, 0, 1e6, "factor of the distance to call.teacher, or of the student to this router") \
    CHOICE(distill, DISTILL, distill, "distance of loss_distill") \
    FLAG(student, \
        "a linear router.student learns the choices and makes them from freeze_at on (StableMoE)") \
    INT(student_dim, 0, 1, MOE_MAX_WIDTH, \
        "> 0: width of the token id's embedding that it reads instead of the router's input") \
    REAL(loss_predictor, 0, 0, 1e6, "w of the predictor's cross-entropy, which trains only the predictor") \
    REAL(compete_rate, 0, 1e-6, 1, \
        "probability that all experts compete for a training call's tokens; loss_distill teaches the router") \
    INT(compete_from, 0, 1, MOE_MAX_WIDTH, "first step with competition, at a constant rate as in the authors' code") \
    CHOICE(compete, COMPETE, compete, "what experts compete by") \
    REAL(expert_temperature, 0, 1, 1e6, \
        "T > 1 of the experts' own loss in a classical mixture (dual temperature) [gate_temperature]") \
    /* state and schedules; steps are those of the optimizer, counted by moe_router_advance from \
       0 */ \
    REAL(bias_rate, 0, 0, 1e6, "gamma, step size of bias_rule; 0: the selection bias is constant") \
    CHOICE(bias_rule, BIAS_RULE, bias_rule, "how the loads of a step change the selection bias") \
    REAL(bias_real, 0, 1e-6, MOE_MAX_EXPERTS, \
        "K_e > 0: target of real experts per token; biases of the others are constant (LongCat-Flash)") \
    FLAG(bias_centre, "the biases' mean change is subtracted [smebu: 1]") \
    REAL(bias_kappa, 0, 1e-6, 1e6, "kappa of smebu [2]") \
    REAL(bias_beta, 0, 1e-6, 0.999999, "beta of smebu [0.5]") \
    CHOICE(l1_controller, L1, l1, \
        "each step loss_l1 [1e-8] times 1.2 if fewer than 1 - K/E are unchosen, else divided by it (ReMoE)") \
    INT(schedule_steps, 0, 1, MOE_MAX_WIDTH, \
        "steps of the schedules below [the trainer's total steps; until it sets them nothing changes]") \
    INT(k_end, 0, -1, MOE_MAX_EXPERTS, \
        "final K1 of round(K0 + (K1 - K0) step / schedule_steps); -1: E (SMoE-dropout)") \
    CHOICE(tau_schedule, TAU, tau, "the field that changes linearly to tau_end") \
    REAL(tau_end, 0, 1e-6, 1e6, "its final value") \
    INT(freeze_at, 0, 1, MOE_MAX_WIDTH, \
        "from this step on the router is frozen, or only its student, which then chooses (StableMoE); 0: never") \
    INT(switch_at, 0, 1, MOE_MAX_WIDTH, "until this step switch_from selects, then select (LocMoE)") \
    REAL(switch_share, 0, 1e-6, 1, "> 0: switch_at is this share of schedule_steps") \
    CHOICE(switch_from, SELECT, select, "selection before switch_at") \
    FLAG(untrained, "accept for training a router that no gradient reaches")

#define MOEI_MEMBER_INT(name, value, least, most, about) int name;
#define MOEI_MEMBER_FLAG(name, about) int name;
#define MOEI_MEMBER_CHOICE(name, x, y, about) int name;
#define MOEI_MEMBER_REAL(name, value, least, most, about) moe_real name;
/* {0} with d_model set is a valid default: 8 experts, the 2 best of a linear score, softmax over
   all, weights p / sum p. */
typedef struct moe_router_config {
    MOE_ROUTER_FIELDS(MOEI_MEMBER_INT, MOEI_MEMBER_FLAG, MOEI_MEMBER_CHOICE, MOEI_MEMBER_REAL)
    /* private: 1 + the index of the preset that it began as; MOEI_OF_A_FILE: read from one. A
       setting of either that a later one made ineffective is reset, not refused */
    int preset;
} moe_router_config;
enum { MOEI_OF_A_FILE = -1 };

/* The rows of moe_router_config; the last has name NULL. Constant, thread-safe. */
MOE_API const moe_field *moe_router_fields(void);

/* Checks a configuration and writes it to *out (may be NULL; may be config itself) with every
   default filled in. MOE_ERR_CONFIG: error names the field, or the two fields that clash, and the
   value; a field that another one leaves without effect clashes with it (values that only K = 1 or
   K = E makes alike do not). MOE_ERR_UNSUPPORTED: a MOE_KEEP_ mask has left it out. On failure *out
   is untouched. */
MOE_API moe_status moe_router_check(const moe_router_config *config, moe_router_config *out, moe_error *error);

#ifndef MOE_NO_TRAIN
/* The further check for training. With K = 1 the weights sum and softmax are always 1, so no
   gradient would ever reach the router's own parameters: MOE_ERR_CONFIG unless a loss reaches them,
   the score has none, or untrained = 1. Else as moe_router_check. */
MOE_API moe_status moe_router_check_training(const moe_router_config *config, moe_error *error);
#endif

/* Whether a router can decode: route the next tokens of a sequence in a call without the earlier
   ones. MOE_ERR_UNSUPPORTED: error names the trait that forbids it, the field behind it, and the
   mode that would work; such a router refuses calls with decoding = 1. Else as moe_router_check. */
MOE_API moe_status moe_router_check_decoding(const moe_router_config *config, moe_error *error);

/* MOE_TRAIT_ bits of a configuration. */
MOE_API unsigned moe_router_traits(const moe_router_config *config);
/* "causal", "needs_batch", ... for one MOE_TRAIT_ bit; NULL for anything else. */
MOE_API const char *moe_trait_name(unsigned trait);
/* "balance", "z", ... for MOE_LOSS_ values; NULL for anything else. */
MOE_API const char *moe_loss_name(int loss);

/* ==== >>presets: published routers by name ==================================================== */

/* A published method as settings. */
typedef struct moe_preset {
    const char *name;
    const char *aliases; /* other names, separated by a space, or "" */
    const char *source;  /* authors, year, title */
    const char *formula; /* one line */
    const char *router;  /* settings of moe_router_config, as moe_fields_apply reads them */
    /* settings of moe_layer_config that belong to the method (kind of experts, shared experts), or
       "" */
    const char *layer;
} moe_preset;

/* All presets; the last row has name NULL. Constant, thread-safe. */
MOE_API const moe_preset *moe_presets(void);
/* The preset of a name or alias; NULL if there is none. */
MOE_API const moe_preset *moe_preset_find(const char *name);
/* Sets *config to {0} plus the preset's settings. d_model stays 0 for the caller to set; sizes may
   be changed afterwards. MOE_ERR_NOT_FOUND: no such preset; *config is untouched. */
MOE_API moe_status moe_router_preset(const char *name, moe_router_config *config, moe_error *error);

/* ==== >>parameters: the tensors of a router =================================================== */

/* The most dimensions of a parameter. */
enum { MOE_MAX_DIMS = 4 };

/* What a parameter is for: bits of moe_parameter.flags and moe_tensor.flags. */
enum {
    MOE_PARAM_TRAINED = 0,  /* an optimizer changes it */
    MOE_PARAM_FROZEN = 1,   /* fixed at its initial value */
    MOE_PARAM_STATE = 2,    /* changed by rules of its own, saved with the model */
    MOE_PARAM_NO_DECAY = 4  /* biases and gains: weight decay skips them */
};

/* All parameters: rows (index, name in files, condition, shape and initialization). A configuration
   c has those whose condition holds. E = n_experts, d = d_model, K = top_k, h = router_hidden, m =
   ceil(log2 E). MATRIX(rows, columns, kind) is initialized normal with standard deviation
   1/sqrt(columns); VECTOR(n, kind, value) starts at value and is not decayed; TABLE(rows, columns,
   kind, value, init_std) starts normal around value; ARRAY(n, kind, columns) starts as a MATRIX of
   that many columns. */
#define MOE_ROUTER_PARAMETERS(X, MATRIX, VECTOR, TABLE, ARRAY) \
    /* width: cosine_dim or d; kind: frozen for the score random */ \
    X(MOE_ROUTER_WEIGHT, "router.weight", has_weight, MATRIX(E, width, kind)) \
    X(MOE_ROUTER_BIAS, "router.bias", has_weight && c->router_bias, VECTOR(E, kind, 0)) \
    X(MOE_ROUTER_PROJECTION, "router.projection", cosine && c->cosine_dim > 0, MATRIX(width, d, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_TEMPERATURE, "router.temperature", cosine && c->cosine_learn_tau, \
        VECTOR(1, MOE_PARAM_TRAINED, c->cosine_tau)) \
    X(MOE_ROUTER_FC1_WEIGHT, "router.fc1.weight", mlp || attentive, MATRIX(h, d, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_FC1_BIAS, "router.fc1.bias", mlp || attentive, VECTOR(h, MOE_PARAM_TRAINED, 0)) \
    X(MOE_ROUTER_FC2_WEIGHT, "router.fc2.weight", mlp, MATRIX(E, h, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_FC2_BIAS, "router.fc2.bias", mlp, VECTOR(E, MOE_PARAM_TRAINED, 0)) \
    X(MOE_ROUTER_SELECTION_BIAS, "router.selection_bias", c->selection_bias, VECTOR(E, MOE_PARAM_STATE, 0)) \
    X(MOE_ROUTER_EXPERT_SCALE, "router.expert_scale", c->expert_scale, VECTOR(E, MOE_PARAM_TRAINED, 1)) \
    X(MOE_ROUTER_INPUT_SCALE, "router.input_scale", c->input == MOE_INPUT_SCALED_RMS, VECTOR(d, MOE_PARAM_TRAINED, 1)) \
    X(MOE_ROUTER_QUERY, "router.query", attentive, MATRIX(h, h, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_KEY, "router.key", attentive, MATRIX(h, h, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_THRESHOLD, "router.threshold", c->threshold_learned, \
        VECTOR(E, MOE_PARAM_TRAINED, moei_threshold_start(c))) \
    X(MOE_ROUTER_NOISE_WEIGHT, "router.noise_weight", c->noise == MOE_NOISE_NOISY_TOPK, \
        TABLE(E, d, MOE_PARAM_TRAINED, 0, 0)) \
    X(MOE_ROUTER_SIMILARITY, "router.similarity", c->similarity_learned, MATRIX(d, d, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_AC_RUNNING, "router.ac_running", \
        clusters && (c->ac_mode == MOE_AC_RUNNING || c->ac_mode == MOE_AC_RANDOM), \
      c->ac_mode == MOE_AC_RUNNING ? TABLE(E, d, MOE_PARAM_STATE, 1, 0) : TABLE(E, d, MOE_PARAM_FROZEN, 1, 0.5)) \
    /* E slots rows */ \
    X(MOE_ROUTER_SLOT_VECTORS, "router.slots", soft, MATRIX(soft_slots, d, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_SLOT_SCALE, "router.scale", soft && c->soft_normalise, VECTOR(1, MOE_PARAM_TRAINED, 1)) \
    /* near 0, where S has a slope */ \
    X(MOE_ROUTER_CODES, "router.codes", dselect, TABLE(K * m, d, MOE_PARAM_TRAINED, 0, \
        MOEI_R(0.01) / MOEI_F(sqrt)((moe_real)d))) \
    X(MOE_ROUTER_MIX, "router.mix", dselect, MATRIX(K, d, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_STUDENT, "router.student", c->student && c->student_dim == 0, MATRIX(E, d, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_STUDENT_EMBEDDING, "router.student.embedding", c->student_dim > 0, \
        MATRIX((size_t)c->table_size, (size_t)c->student_dim, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_STUDENT_WEIGHT, "router.student.weight", c->student_dim > 0, \
        MATRIX(E, (size_t)c->student_dim, MOE_PARAM_TRAINED)) \
    X(MOE_ROUTER_PREDICTOR, "router.predictor", c->predictor, MATRIX(E, d, MOE_PARAM_TRAINED)) \
    /* Steps of the optimizer, at most 2^24. This and the next three may be NULL in moe_route: \
       then they are as at the start */ \
    X(MOE_ROUTER_STEP, "router.step", \
        moei_has_schedule(c) || c->freeze_at > 0 || c->switch_at > 0 || c->compete_from > 0, \
        VECTOR(1, MOE_PARAM_STATE, 0)) \
    /* assignments per expert since the last step, then tokens */ \
    X(MOE_ROUTER_LOAD, "router.load", c->bias_rate > 0 || c->l1_controller, VECTOR(E + 1, MOE_PARAM_STATE, 0)) \
    /* the factor of loss_l1 */ \
    X(MOE_ROUTER_L1, "router.l1", c->l1_controller, VECTOR(1, MOE_PARAM_STATE, c->loss_l1)) \
    /* C_min, 0 until there is one */ \
    X(MOE_ROUTER_CAPACITY, "router.capacity", c->capacity_bound == MOE_BOUND_FIRST || c->capacity_rho > 0, \
        VECTOR(1, MOE_PARAM_STATE, 0)) \
    /* expert indices as numbers; moe.h starts it random, every expert equally often */ \
    X(MOE_ROUTER_TABLE, "router.table", moei_has_selection(c, MOE_SELECT_HASH), \
        TABLE((size_t)c->table_size, K, MOE_PARAM_FROZEN, 0, 0)) \
    /* what moe_custom.score reads and score_backward trains */ \
    X(MOE_ROUTER_CUSTOM, "router.custom", c->custom_parameters > 0, \
        ARRAY((size_t)c->custom_parameters, MOE_PARAM_TRAINED, d)) \
    /* W_g */ \
    X(MOE_ROUTER_RESIDUAL, "router.residual", c->router_residual, MATRIX(E, E, MOE_PARAM_TRAINED)) \
    /* 0 until there is one; may be NULL as the four above */ \
    X(MOE_ROUTER_AFFINITY_SUM, "router.affinity_sum", c->affinity_sum_auto > 0, VECTOR(1, MOE_PARAM_STATE, 0)) \
    /* a and u of expert_threshold: the cutoffs are a / (1 - rho^u), 0 for u = 0 */ \
    X(MOE_ROUTER_CUTOFF, "router.cutoff", cutoff, VECTOR(E, MOE_PARAM_STATE, 0)) \
    X(MOE_ROUTER_CUTOFF_UPDATES, "router.cutoff_updates", cutoff, VECTOR(1, MOE_PARAM_STATE, 0)) \
    /* C-th largest logits of the training calls since the last step, and how many calls. This and \
       the next two may be NULL in moe_route */ \
    X(MOE_ROUTER_CUTOFF_SUM, "router.cutoff_sum", cutoff, VECTOR(E, MOE_PARAM_STATE, 0)) \
    X(MOE_ROUTER_CUTOFF_COUNT, "router.cutoff_count", cutoff, VECTOR(1, MOE_PARAM_STATE, 0)) \
    /* m of smebu */ \
    X(MOE_ROUTER_BIAS_MOMENTUM, "router.bias_momentum", c->bias_rule == MOE_BIAS_SMEBU, VECTOR(E, MOE_PARAM_STATE, 0))

#define MOEI_ROUTER_PARAMETER(value, name, condition, shape) value,
/* The router's parameters by index, and how many there can be. */
enum { MOE_ROUTER_PARAMETERS(MOEI_ROUTER_PARAMETER, , , , ) MOE_ROUTER_PARAMETER_COUNT };

/* One parameter: its name, shape, purpose, and how it starts: init_value + init_std * standard
   normal (router.ac_running: at least 0). */
typedef struct moe_parameter {
    const char *name;
    int n_dims;
    size_t shape[MOE_MAX_DIMS]; /* unused dimensions are 1 */
    size_t count;               /* product of shape */
    unsigned flags;             /* MOE_PARAM_ bits */
    moe_real init_value, init_std;
} moe_parameter;

/* Describes parameter `index` of a checked configuration. MOE_ERR_NOT_FOUND: the configuration has
   no such parameter; MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_router_parameter(const moe_router_config *config, int index, moe_parameter *out);

/* ==== >>routing: one call: tokens, decisions ================================================== */

/* A batch whose tokens are distributed over several processes, each of which calls moe_route with
   its own tokens. They are routed globally, as in one call of all tokens, in the order of
   processes. Configuration, state, random numbers and supplied arrays (given, token_machine, noise,
   jitter) must be the same in all processes that have tokens, else MOE_ERR_ARGUMENT; a sequence
   belongs to one process; distances, if supplied, are those of the whole batch, in every process.
   If no token depends on other sequences (outside training: no capacity, no selection among tokens,
   no adaptive clustering of the call) and for select = soft, every process routes locally and
   nothing is gathered; soft with adaptive clustering of the call is MOE_ERR_UNSUPPORTED. n_past
   must be 0. */
typedef struct moe_batch {
    size_t first; /* tokens of the processes before this one */
    size_t total; /* tokens of all processes */
    /* 1 in exactly one process: it adds the gradients that belong to no token (loss_orthogonal) */
    int lead;
    void *ctx;    /* the caller's, passed to gather */
    /* All-gather: rows holds `total` rows of row_bytes, with this process's rows at its tokens'
       index; gather fills in the others'. Every process calls it the same number of times, also
       with a status other than MOE_OK: then all of them return an error (here that status,
       elsewhere MOE_ERR_PEER) and rows is unspecified. */
    moe_status (*gather)(void *ctx, moe_status status, size_t row_bytes, void *rows);
    /* private: the calls of layers and networks to processes that share experts
       (examples/extras/moe_ranks.h); otherwise not read */
    const struct moei_hooks *hooks;
} moe_batch;

/* The tokens of one call. {0} plus n_tokens and x is enough for most routers. All arrays are the
   caller's and only read, except rng, error and the gradients. */
typedef struct moe_call {
    size_t n_tokens;            /* N, padding included; 0 is allowed */
    const moe_real *x;          /* [N,d] */
    /* threads, or NULL: OpenMP's if the compiler has it on, else one */
    const moe_parallel *parallel;
    const moe_real *router_x;   /* [N,d], the router's own input, or NULL: x */
    /* [N], 1 real, 0 padding, or NULL: all real. Padding is routed nowhere and enters no
       statistic */
    const unsigned char *mask;
    /* [n_sequences+1] ascending offsets from 0 to N, or NULL: one sequence */
    const int32_t *sequences;
    size_t n_sequences;
    /* forced routing: [N,max_choices] expert indices, -1 = none, no expert twice for one token,
       instead of what select would choose; NULL: select chooses. max_choices as in moe_routing */
    const int32_t *given;
    const int32_t *token_ids;   /* [N], select hash and student_dim: less than table_size */
    /* [N,E] n of noisy_topk, else the whole additive noise; NULL: drawn from rng */
    const moe_real *noise;
    /* [N,d] adaptive_clustering: x of the previous MoE layer (mode paper; running: for observe) */
    const moe_real *previous_input;
    const int32_t *previous_experts;    /* [N,n_previous] its chosen experts, -1 = none */
    const moe_real *previous_weights;   /* [N,n_previous] their weights */
    size_t n_previous;
    /* [N,E] router_residual: z', routing.clean_logits of the previous MoE layer, or NULL: this is
       the first one. Backward adds its gradient to d_previous_logits (NULL: not wanted) */
    const moe_real *previous_logits;
    moe_real *d_previous_logits;
    /* [N,E] backward reads the gradient of routing.clean_logits that came from a later layer; NULL:
       none did */
    const moe_real *d_clean_logits;
    /* [heads,N,n_past+N] A of the attention before this layer; entries not above 0 take no part */
    const moe_real *attention_weights;
    /* [heads,n_past+N,d] o_hj: value and output projection of head h at token j */
    const moe_real *attention_outputs;
    const moe_real *attention_output;   /* [N,d] for attention_u = output */
    /* backward adds their gradients here; or NULL */
    moe_real *d_attention_weights, *d_attention_outputs, *d_attention_output;
    const moe_real *jitter;     /* [N,d] the factors of input jitter, or NULL: drawn from rng */
    /* sparsemixer_sample: [N,max_choices,E] what is added to z, [N,max_choices] what decides about
       the weight of a pick that is not the best; not with a batch. NULL: drawn from rng */
    const moe_real *gumbel, *uniform;
    /* expert_dropout in training: [N,E], or [E] with expert_dropout_scope = call; not 0: this pair
       cannot be selected; not with a batch. NULL: drawn from rng */
    const unsigned char *dropped;
    /* [N] loss_locality: the machine where each token is, or NULL: all on machine 0 */
    const int32_t *token_machine;
    /* [E] loss_locality: the machine of each expert, or NULL: E/nodes consecutive ones each */
    const int32_t *expert_machine;
    const moe_real *teacher;    /* [N,E] loss_distill without student: the teacher's logits */
    const moe_real *distances;  /* [N,N] loss_similarity: D, or NULL: Euclidean distances of x */
    /* scores norm, attentive, competition: [E,N,activation_width], the activation that is read
       (moe.h fills it in). compete_rate: a training call competes if activation_width > 0, by these
       outputs of all experts (layers draw; moe_route leaves it to its caller) */
    const moe_real *activations;
    size_t activation_width;
    /* causal refine outside training, not with attention_heads = min_entropy: earlier tokens of the
       one sequence, which the caller keeps; the workspace is then that of n_past + n_tokens */
    size_t n_past;
    const moe_real *past_u;     /* [n_past,d] their routing.u */
    const moe_real *past_gate;  /* [n_past,E] their routing.gate */
    /* 1: the tokens continue sequences whose earlier tokens are not in this call: see
       moe_router_check_decoding */
    int decoding;
    /* 1: losses are computed and what the backward pass needs is kept */
    int training;
    /* 1: a layer keeps the outputs of all experts as in training (moe_layer_pass.expert_outputs);
       workspace as for training */
    int keep;
    moe_rng *rng;               /* for stochastic stages; NULL where there are none */
    /* other processes' tokens are routed together with these, or NULL */
    const moe_batch *batch;
    moe_error *error;           /* receives why a call failed, or NULL */
} moe_call;

/* One assignment: a token at an expert. */
typedef struct moe_assignment {
    int32_t token;       /* row of x */
    /* which choice of the token this is, 0: its first. Soft: the row of the expert's input to which
       the token contributes */
    int32_t choice;
    moe_real weight_in;  /* on the expert's input */
    moe_real weight_out; /* on the expert's output */
} moe_assignment;

/* The dispatch plan, all that experts need to know: compressed rows, one per expert, ascending by
   token. Plain data: keep, print or send it. */
typedef struct moe_dispatch_plan {
    size_t n_tokens, n_experts; /* tokens of the call */
    size_t *offsets;    /* [E+1]; expert e has assignments offsets[e] .. offsets[e+1]-1 */
    moe_assignment *assignments; /* [offsets[E]] */
    /* 0: every assignment is a row of its expert's input. Soft: rows per expert, each a mixture of
       assignments */
    size_t rows;
} moe_dispatch_plan;

/* All decisions of one call, stage by stage. The arrays are in the workspace given to moe_route;
   rows of padding in logits, gate and probabilities are unspecified. */
typedef struct moe_routing {
    /* N: tokens of the call or, with global routing, of the batch (moe_call.batch) */
    size_t n_tokens, n_experts;
    size_t first;            /* row of the call's first token in the arrays; 0 without a batch */
    size_t n_real;           /* tokens that are not padding */
    size_t real_experts;     /* R, experts with matrices, the first of E */
    const moe_real *u;       /* [n,d] what the input stage made of the call's tokens */
    /* [n,E] z without noise of the call's tokens, for router_residual of the next layer; soft:
       NULL */
    const moe_real *clean_logits;
    const moe_real *predicted; /* [N,E] logits of the predictor, which takes those above 0; or NULL */
    moe_real *logits;        /* z [N,E]; soft: L [N,E slots] */
    moe_real *gate;          /* r [N,E]; soft: dispatch D [N,E slots] */
    moe_real *probabilities; /* p [N,E]; soft: combine C [N,E slots] */
    int32_t *choices;        /* [N,max_choices] experts, best first */
    int32_t *n_choices;      /* [N] */
    unsigned char *kept;     /* [N,max_choices] 1: capacity kept this choice */
    size_t max_choices;      /* K, or k_end if larger; E for selections without a fixed number */
    moe_real *choice_weights; /* [N,max_choices] w, before capacity and scale */
    /* [N,E] the dense gate matrix: final weights, 0 where not selected; soft: sum of C over the
       expert's slots */
    moe_real *weights;
    unsigned char *selected; /* [N,E] 1 where the plan has an assignment */
    size_t *counts;          /* [E] n_e, assignments per expert before capacity */
    size_t *first_counts;    /* [E] first choices per expert */
    size_t n_dropped;        /* assignments that capacity dropped */
    /* C, the most assignments per expert; 0: no limit, or a selection with limits of its own */
    size_t capacity;
    size_t capacity_zero;    /* that of experts without matrices; differs from C with zero_tau */
    /* ln C_min of capacity_bound before rounding and limits; 0 without one */
    moe_real capacity_bound;
    int capacity_clamped;    /* 1: C_min was above N and is N */
    int top_k;               /* K of this call, which a schedule may have changed */
    moe_dispatch_plan plan;
    /* value of each loss, its factor included; 0 if off or not training */
    moe_real loss[MOE_LOSS_COUNT];
    moe_real bound_now;      /* private: C_min of this call, averaged */
    moe_real affinity_now;   /* private: affinity_sum by affinity_sum_auto */
    /* [assignments of the plan] training only, else NULL: the caller of moe_route_backward fills in
       the gradients */
    moe_real *d_weight_in, *d_weight_out;
    void *memory;            /* private: the workspace */
} moe_routing;

struct moe_router;

/* Stages of the caller's own, for score = custom and select = custom; they work with every other
   stage, loss and metric, except a few that moe_router_check refuses by name: those that read
   gating vectors or need a score or selection of the library. Set them in moe_router.custom, which
   is layer.router.custom in a layer and net.modules[i].layer.router.custom in a network, before the
   first call. A file holds no functions: set them again after moe_layer_load or moe_net_load. A
   call without a function that it needs is MOE_ERR_ARGUMENT, and the error names the field (and the
   module). A call ends with any status other than MOE_OK that a function returns (MOE_ERR_PEER
   for MOE_ERR_TRANSPORT, which is that of moe_transport's functions alone). Unless
   custom_batch = 1, row t of a result must depend on row t of the inputs alone. With global routing
   (moe_batch) select gets the tokens of all processes (and call->x is NULL), but score only those
   of its own process: if it reads other tokens, results are not those of one call of all tokens.
   A score with trained parameters sets custom_parameters = n in the configuration. The router then
   has the parameter "router.custom" [n], which layers and networks treat like any other: they
   allocate it, start it normal with standard deviation 1/sqrt(d), count, train, decay and save it.
   moe_layer_find and moe_net_find give access to its values. */
typedef struct moe_custom {
    void *ctx; /* the caller's, handed to every function */
    /* Fills logits [N,E] from u [N,d], N = call->n_tokens; rows of padding are 0 in u and ignored
       in logits. Its parameters are router->tensors[MOE_ROUTER_CUSTOM]. */
    moe_status (*score)(void *ctx, const struct moe_router *router, const moe_call *call, const moe_real *u,
                        moe_real *logits);
    /* From d_logits [N,E]: adds the gradient of u to d_u [N,d], and that of the parameters to
       d_parameters [n] unless that is NULL (nothing is wanted, or n = 0). NULL: the score passes no
       gradient; with parameters, a training call is then MOE_ERR_ARGUMENT. */
    moe_status (*score_backward)(void *ctx, const struct moe_router *router, const moe_call *call, const moe_real *u,
                                 const moe_real *d_logits, moe_real *d_u, moe_real *d_parameters);
    /* Sets chosen[t E + e] to 1 from z and p [N,E]; all are 0 before. Rows of padding are
       unspecified and their choices are ignored. */
    moe_status (*select)(void *ctx, const struct moe_router *router, const moe_call *call, const moe_real *logits,
                         const moe_real *probabilities, unsigned char *chosen);
    /* n, how many parameters score reads: other than custom_parameters is MOE_ERR_SHAPE, so that
       functions and file agree */
    size_t n_parameters;
} moe_custom;

/* A checked configuration with its parameters. Plain data: copy it freely. Read-only use is
   thread-safe. */
typedef struct moe_router {
    moe_router_config config; /* with defaults filled in */
    moe_custom custom;        /* set by the caller where score or select is custom */
    const moe_kernels *kernels;
    uint64_t present;          /* private: bit i is set if the configuration has parameter i */
    unsigned parts;           /* private: what calls need beyond the common case (MOEI_PART_) */
    /* the caller's: router.weight in another program's file, exact, instead of the tensor. For
       inference with score = linear. NULL: the tensor */
    const moe_external *external;
    /* the caller's, by index; NULL where moe_router_parameter finds none */
    const moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT];
} moe_router;

/* Checks config and makes a router without tensors; set router->tensors before routing. kernels
   NULL: plain C. Errors as moe_router_check. On failure *router is untouched. */
MOE_API moe_status moe_router_init(moe_router *router, const moe_router_config *config, const moe_kernels *kernels,
                                   moe_error *error);

/* Exact bytes of workspace that moe_route needs for n_tokens (n_past + n_tokens). training as in
   moe_call. MOE_ERR_OVERFLOW; MOE_ERR_ARGUMENT: NULL. */
MOE_API moe_status moe_route_size(const moe_router *router, size_t n_tokens, int training, size_t *bytes);
/* The same for a call with a batch: n_tokens of its own, total of all processes. MOE_ERR_ARGUMENT
   also if total is less than n_tokens. */
MOE_API moe_status moe_route_batch_size(const moe_router *router, size_t n_tokens, size_t total, int training,
                                        size_t *bytes);

/* x -> z -> r -> p -> S -> w -> plan, in workspace[size] (any alignment). Allocates nothing.
   MOE_ERR_ARGUMENT: a missing tensor or array, bad offsets, bad given indices; MOE_ERR_SPACE;
   MOE_ERR_NONFINITE: a logit of a real token, a refined p or a weight of the plan;
   MOE_ERR_UNSUPPORTED: the router cannot decode, or a mask has left out what the call needs;
   MOE_ERR_SHAPE: activation_width; MOE_ERR_OVERFLOW: n_tokens, n_sequences. call->error says which.
   On failure *routing is untouched, the workspace is unspecified, and rng may have advanced.
   Thread-safe for different workspaces. */
MOE_API moe_status moe_route(const moe_router *router, const moe_call *call, void *workspace, size_t size,
                             moe_routing *routing);

#ifndef MOE_NO_TRAIN
/* The backward pass from routing->d_weight_in and d_weight_out and all losses. Adds to d_tensors[i]
   (NULL entries are skipped), to dx [N,d], the gradient of x or of router_x if that was given
   (NULL: not wanted), and to d_activations [E,N,activation_width] (NULL unless the score reads
   activations). call is that of moe_route, with training = 1. MOE_ERR_STATE: it was not a training
   call; MOE_ERR_ARGUMENT: NULL; or what a custom score returns. */
MOE_API moe_status moe_route_backward(const moe_router *router, const moe_call *call, moe_routing *routing,
                                      moe_real *const *d_tensors, moe_real *dx, moe_real *d_activations);
#endif

/* choices[N,k] receives the first k choices of each token, best first, -1 after the last and for
   padding; keep_dropped 0 gives -1 also for those that capacity dropped. k = routing->max_choices:
   what call.given replays. k = 1: the first choices, which moe_fluctuation compares. A soft routing
   has no choices. MOE_ERR_ARGUMENT: NULL (choices may be NULL for N k = 0). */
MOE_API moe_status moe_routing_choices(const moe_routing *routing, size_t k, int keep_dropped, int32_t *choices);

/* ==== >>state: what training keeps ============================================================ */

#ifndef MOE_NO_TRAIN
/* What a router remembers between calls is in parameters with the flag MOE_PARAM_STATE and is saved
   with the model. moe_route only reads it; these two change it, in the memory that state[i] points
   to (the same as router->tensors[i]; others may be NULL). A router without the trait stateful is
   left as it is.
     observe  after each training call: counts the load, adds the cutoffs of expert_threshold, moves
              the running tables, sets C_min; routing and call are those of moe_route.
     advance  once per step of the optimizer: selection bias, cutoffs, L1 factor, step number; then
              the counts start anew.
   MOE_ERR_ARGUMENT: NULL, or a state tensor is missing; MOE_ERR_STATE: call->training is 0. */
MOE_API moe_status moe_router_observe(const moe_router *router, const moe_call *call, const moe_routing *routing,
                                      moe_real *const *state);
MOE_API moe_status moe_router_advance(const moe_router *router, moe_real *const *state);
#endif

/* ==== >>metrics: load, entropy, information ======================================================
   What routers do, in numbers, over any number of calls. All sums and results are double,
   logarithms are natural. H(v) = -sum_i v_i ln v_i, terms with v_i <= 0 count 0. What moe_route
   returns with MOE_OK is finite, and so are its metrics, for numbers up to 1e30. A mask is [N], 1
   real, 0 padding, NULL: all real; rows of padding are not read. Counts are exact up to 2^53.
   Nothing allocates. A failed call changes nothing. Thread-safe as long as no two threads write to
   the same memory. */

/* Sums over the calls added so far. The arrays are in the memory given to moe_metrics_init, which
   must outlive it; a copy of the struct shares them. Read freely, change only through the functions
   below. */
typedef struct moe_metrics {
    size_t n_experts, n_classes;
    double n_calls;            /* calls that had a real token */
    double n_tokens;           /* real tokens */
    double n_routed;           /* real tokens with at least one expert */
    double n_assignments;            /* assignments: sum of |S_t|, before capacity */
    double n_real_assignments;       /* those of real experts */
    double n_predicted, n_agreed; /* pairs that a predictor judged; those where it agrees with the choice */
    double n_dropped;          /* assignments that capacity dropped */
    double entropy;            /* sum_t H(p_t) */
    double entropy_normalized; /* sum_t H(p_t / sum p_t) */
    double entropy_calls;      /* sum over calls of H(mean p of the call) */
    double n_classified;       /* tokens with a class and at least one expert */
    double choices, choices_squared; /* their sums of |S_t| and |S_t|^2 */
    /* [E] assignments, first choices, assignments that capacity kept */
    double *load, *first, *kept;
    double *importance;        /* [E] sum_t p_te */
    double *logits;            /* [E] sum_t z_te */
    double *mean_gate, *mean_logit; /* [E] written by moe_metrics_report */
    double *row;               /* [E] private */
    /* [E,n_classes] assignments of classified tokens; NULL for n_classes = 0 */
    double *classes;
    /* [E,n_classes] first choices of classified tokens; NULL for n_classes = 0 */
    double *first_classes;
} moe_metrics;

/* Results of moe_metrics_report. A number is 0 if nothing it describes was added. A share is a
   fraction, 0..1. n_e is the load of expert e: assignments before capacity. The pointers point into
   the memory of the metrics, whose next call may change them. */
typedef struct moe_report {
    size_t n_experts, n_classes;
    double n_calls;          /* calls that had a real token */
    double n_tokens;         /* N, real tokens */
    double n_assignments;          /* sum_e n_e */
    double n_dropped;        /* assignments that capacity dropped */
    double dropped_share;    /* n_dropped / n_assignments */
    double experts_per_token; /* mean |S_t|, before capacity; 0..E */
    double real_experts_per_token; /* the same of real experts; 0..R */
    /* share of pairs of token and expert where the predictor agrees with the choice */
    double predictor_agreement;

    /* The gate values p as they are: rows of sigmoid, relu and others need not sum to 1, and then
       the ranges do not hold. */
    double gate_entropy;     /* H_b = mean_t H(p_t); 0 (decided) .. ln E (even) */
    /* H_e = H(mean_t p_t) over all tokens added; 0 (one expert) .. ln E (even) */
    double usage_entropy;
    double usage_entropy_calls; /* mean over calls of H(mean p of the call) */
    /* Ent_conf = mean_t H(p_t / sum p_t), negative p as 0; H_b for gates that sum to 1; 0 .. ln E
       always */
    double confidence_entropy;
    /* CV^2 of I_e = sum_t p_te: variance over experts (population) / mean^2; 0 .. E-1 for p >= 0 */
    double importance_cv2;

    /* The load n_e. */
    double load_entropy;     /* Ent_load = H(n_e / sum n); 0 .. ln E */
    /* standard deviation (population) over experts of 100 n_e / N, in percent of the tokens; 0 is
       even */
    double load_balance_score;
    double load_cv2;         /* CV^2 of n_e; 0 .. E-1 */
    double load_max_over_mean; /* max n_e / mean n_e; 1 .. E */
    double load_max_minus_min; /* (max n_e - min n_e) / sum n; 0 .. 1 */
    /* mean / max over experts of the assignments that capacity kept; 0 .. 1. If one expert is full
       in every call this is the fraction of all capacity that is used; dropless: mean n_e / max
       n_e */
    double capacity_use;
    /* the largest expert's share of first choices, of the tokens that have one */
    double first_share_max;
    int trivial_gate;        /* 1: first_share_max > 0.95 (always for E = 1) */

    /* Expert and class; 0 and NULL without classes. I(E;Y) = H(E) + H(Y) - H(E,Y) of a table of
       counts divided by their sum; 0 .. min(ln E, ln n_classes). Y is what the caller gave as
       classes: the model's answer or the label. The chance value is the mean of I over all ways to
       shuffle the classes among the classified tokens: the small-sample bias, which a table of this
       size shows if expert and class are independent. */
    double n_classified;     /* tokens with a class and at least one expert */
    /* of the table classes: every assignment of a classified token counts once */
    double information;
    /* exact if those tokens have equally many experts each, else the mean of H(Y) is a second-order
       approximation */
    double information_chance;
    double information_first; /* of the table first_classes: every classified token counts once */
    double information_first_chance; /* exact */
    const double *classes;       /* [E,n_classes] the assignments */
    const double *first_classes; /* [E,n_classes] the first choices */

    /* Per expert [E]. */
    const double *load;      /* n_e */
    const double *first;     /* first choices */
    const double *kept;      /* assignments that capacity kept */
    const double *mean_gate; /* mean_t p_te */
    const double *mean_logit; /* mean_t z_te; of the score norm the mean norm; of soft 0 */
} moe_report;

/* Exact bytes of memory for E = n_experts (1..MOE_MAX_EXPERTS) and n_classes (0: none; at most
   INT32_MAX). MOE_ERR_ARGUMENT: out of range or bytes NULL; MOE_ERR_OVERFLOW. */
MOE_API moe_status moe_metrics_size(size_t n_experts, size_t n_classes, size_t *bytes);

/* Starts metrics at zero in memory[size] (any alignment; the caller's). Calling it again starts
   over. MOE_ERR_SPACE: size is below moe_metrics_size; MOE_ERR_ARGUMENT: metrics or memory NULL,
   and the errors of moe_metrics_size. */
MOE_API moe_status moe_metrics_init(moe_metrics *metrics, size_t n_experts, size_t n_classes, void *memory,
                                    size_t size);

/* Adds one routed call. mask: the call's. classes: [N] class of each token, 0 .. n_classes-1, or
   -1: none; those of padding are not read; NULL: none. Of a batch with global routing
   (moe_batch) it adds the call's own tokens; mask and classes are theirs. Reads routing's sizes,
   real_experts, logits, probabilities (soft: weights as p), predicted, choices, n_choices, kept,
   n_real, n_dropped and plan. MOE_ERR_ARGUMENT: NULL, a class or choice out of range, or a mask
   that does not fit the routing (n_real; padding has no choices); MOE_ERR_SHAPE: not as many
   experts as at the start. */
MOE_API moe_status moe_metrics_add(moe_metrics *metrics, const moe_routing *routing, const unsigned char *mask,
                                   const int32_t *classes);

/* Fills *report (the caller's) from all calls added; more can be added afterwards. Writes
   metrics->mean_gate and mean_logit. With classes its time is proportional to E n_classes times the
   standard deviation of a cell's count. MOE_ERR_ARGUMENT: NULL. */
MOE_API moe_status moe_metrics_report(moe_metrics *metrics, moe_report *report);

/* *share = share of the real tokens whose first expert differs between two recorded routings,
   before and after [n], as from moe_routing_choices; 0 without real tokens. MOE_ERR_ARGUMENT: NULL
   (the arrays may be NULL for n = 0). */
MOE_API moe_status moe_fluctuation(size_t n, const int32_t *before, const int32_t *after, const unsigned char *mask,
                                   double *share);

/* How differently two MoE layers group the same tokens. */
typedef struct moe_instability_report {
    /* mean over pairs of real tokens of | [same expert at the first layer] - [same expert at the
       second] |; 0 .. 1 */
    double instability;
    double chance;       /* what independent layers would have: q1 (1 - q2) + q2 (1 - q1) */
    /* share of the pairs that share an expert, at the first and at the second layer */
    double q1, q2;
} moe_instability_report;

/* Fills *report from first[n] and second[n], the tokens' experts at two layers of e1 and e2
   experts, as from moe_routing_choices (-1: none, never shared). scratch: (e1 + 1) (e2 + 1) doubles
   of the caller's. All are 0 for fewer than two tokens. MOE_ERR_ARGUMENT: NULL, an expert out of
   range, or a scratch size that overflows. */
MOE_API moe_status moe_instability(size_t n, const int32_t *first, size_t e1, const int32_t *second, size_t e2,
                                   const unsigned char *mask, double *scratch, moe_instability_report *report);

/* *information = I(row;column) = H(row) + H(column) - H(row,column) of a table of counts
   [rows,columns] divided by their sum; never below 0, 0 for an empty table. MOE_ERR_ARGUMENT: NULL
   (table may be NULL if it has no cell), or a count is below 0; MOE_ERR_NONFINITE: a count or their
   sum is not finite; MOE_ERR_OVERFLOW: the table's size. */
MOE_API moe_status moe_mutual_information(size_t rows, size_t columns, const double *table, double *information);

/* *cosine = mean over the pairs s != t of real tokens of cos(x_s, x_t), x [n,d], in O(n d): with
   unit vectors v_t = x_t / |x_t| and M real tokens, sum over s != t of v_s . v_t = |sum_t v_t|^2 -
   sum_t |v_t|^2, divided by M (M - 1): an identity, not an estimate. -1/(M-1) .. 1; 0 for M < 2. A
   token that is all 0 has cosine 0 with every other. scratch: [d] doubles of the caller's.
   MOE_ERR_ARGUMENT: NULL (x may be NULL for n d = 0, scratch for d = 0); MOE_ERR_NONFINITE: a real
   token is not finite; MOE_ERR_OVERFLOW: the size of x. */
MOE_API moe_status moe_token_cosine(size_t n, size_t d, const moe_real *x, const unsigned char *mask, double *scratch,
                                    double *cosine);

/* What causes errors, as fractions of the samples, and how many experts are trivial. */
typedef struct moe_error_shares {
    size_t n_samples;    /* those that are real and have a label */
    double error;        /* the model is wrong */
    /* the model is wrong although some expert is right: the gate chose badly */
    double gate_error;
    /* no expert is right; the model may still be right, so error <= gate_error + expert_error */
    double expert_error;
    /* experts that answer one class only, over the real samples with or without label */
    size_t n_trivial;
} moe_error_shares;

/* Fills *shares from predicted [n,n_experts], the class that each expert alone would answer (-1:
   none, never right), answers [n], the model's own, and labels [n] (negative: the sample is not
   counted). trivial[n_experts] (may be NULL) receives 1 for a trivial expert, else 0; -1 leaves a
   sample out for that expert, and an expert without any answer is not trivial. All are 0 without
   samples. MOE_ERR_ARGUMENT: NULL (arrays may be NULL for n = 0, predicted for n_experts = 0);
   MOE_ERR_OVERFLOW: the size of predicted. */
MOE_API moe_status moe_gate_errors(size_t n, size_t n_experts, const int32_t *predicted, const int32_t *answers,
                                   const int32_t *labels, const unsigned char *mask, unsigned char *trivial,
                                   moe_error_shares *shares);

#endif /* MOE_NO_FLOAT */

/* ==== >>integers: routing without floating point =================================================
   Routes one token from its logits in integers, with the same numbers on every machine. A
   moei_int_router is a constant that names the functions of its stages, so that the linker drops
   all others; moe_export.h writes such constants. These names are private (moei_), but exported
   headers contain them.

     z --gate--> p --select--> experts, their z --values--> p --weight--> weights --scale--> weights

   z [E] are logits as integers within +-32767. Where a softmax, sigmoid or sqrt_softplus reads
   them, z * 2^-z_bits is the logit in octaves: the float logit, divided by the temperature, times
   log2(e). p is in each gate's own unit:
     moei_int_gate_softmax, moei_int_gate_sigmoid   2^-20
     moei_int_gate_sqrt_softplus                   2^-(8 + z_bits/2) sqrt(ln 2), z_bits even and at
                                                   most 14
     moei_int_gate_logits, moei_int_gate_relu       1/256 of that of z: a bias may be finer than z
     moei_int_gate_predicted                       the same, of the predictor's z [E] after z
   Selection is by z, or by p + bias; the lower index wins ties. Weights are int16 in units of 2^-15
   (1 is stored as 32767), times a power of two that the exporter sets. Against float arithmetic on
   the same z a weight is off by less than 2^-13 (sqrt_softplus: while z_bits is 8 or more). Choices
   by z are exact; by p they differ only where two keys (a sum, a threshold) lie within 2^-13
   (sqrt_softplus: 4 units of p, logits and relu: 2 units) of each other. */

/* An integer router and the functions of its stages: logits z [n] -> p [n]; z, p + bias -> experts,
   returns how many; weights of the chosen. */
typedef struct moei_int_router moei_int_router;
typedef void moei_int_gate(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p);
#define MOEI_INT_SELECT_ARGUMENTS \
    const moei_int_router *r, const unsigned char *base, int32_t token, const int16_t *z, int32_t *p, int16_t *experts
#define MOEI_INT_WEIGHT_ARGUMENTS \
    const moei_int_router *r, const int16_t *z, int32_t *p, size_t count, const int16_t *experts, int16_t *weights
typedef size_t moei_int_select(MOEI_INT_SELECT_ARGUMENTS);
typedef void moei_int_weight(MOEI_INT_WEIGHT_ARGUMENTS);
/* Initialized in this order. base: the address that offsets are relative to. */
struct moei_int_router {
    moei_int_gate *gate;     /* p of all experts for select. NULL: select reads no p */
    moei_int_select *select; /* fills experts in order of choice, returns how many */
    /* p of the chosen for weight, in order of choice. NULL: weight reads no such p */
    moei_int_gate *values;
    moei_int_weight *weight;
    /* NULL: none */
    void (*scale)(const moei_int_router *r, const unsigned char *base, size_t count, const int16_t *experts,
                  int16_t *weights);
    uint16_t n_experts;   /* E, 1..MOEI_INT_EXPERTS */
    uint16_t top_k;       /* K; with K = E the selections logits and top_k are dense */
    uint16_t most;        /* room for experts and weights that a call needs, 1..E */
    uint16_t scratch;     /* room for p that a call needs */
    uint16_t groups, groups_kept; /* of moei_int_select_grouped; groups: also of _each */
    int16_t factor;       /* of moei_int_scale_weights without a table, in units of 2^-15 */
    uint8_t z_bits;       /* 0..27 */
    uint8_t weight_shift; /* of moei_int_weight_raw: weight = p >> this, rounded */
    uint8_t flags;        /* MOEI_INT_ bits */
    /* threshold: p must be above it; top_p: the sum of p that ends it; sparsemixer: 2 eps in units
       of 2^-16 */
    int32_t threshold;
    int32_t tokens;       /* hash: number of token ids; 0: token is not read */
    /* int32[E] added to p for selection only. This and the next: offsets of tables from base, or
       MOEI_INT_NONE */
    uint32_t bias;
    uint32_t thresholds;  /* int32[E] instead of threshold */
    uint32_t scales;      /* int16[E] instead of factor */
    uint32_t table;       /* hash: bytes [tokens,K], the experts of each token id */
    /* of moei_int_weight_over: the weight of the choices that are normalized, the gate of the
       others, kept_from <= e < kept_end */
    moei_int_weight *over;
    moei_int_gate *kept;
    uint16_t kept_from, kept_end;
};

/* The most experts of an integer router, and the offset of a table that does not exist. */
enum { MOEI_INT_EXPERTS = 256 };
#define MOEI_INT_NONE 0xffffffffu
/* flags: the best expert is taken if none passes a threshold; a group is worth the sum of its two
   best experts. */
enum { MOEI_INT_FALLBACK = 1, MOEI_INT_TOP2_SUM = 2 };

/* For gate and values: n logits z -> p; softmax is over these n. Shares are for quotients: the gate
   in a finer unit and without a factor common to all n, p < 2^24. */
MOEI_API moei_int_gate moei_int_gate_logits, moei_int_gate_relu, moei_int_gate_softmax, moei_int_gate_sigmoid,
    moei_int_gate_sqrt_softplus, moei_int_gate_predicted, moei_int_share_softmax, moei_int_share_sigmoid,
    moei_int_share_sqrt_softplus;
/* For select: the K largest z (no gate, no bias); the K largest p + bias; the others as in
   MOE_SELECTS. They may overwrite p. */
MOEI_API moei_int_select moei_int_select_logits, moei_int_select_top_k, moei_int_select_grouped, moei_int_select_each,
    moei_int_select_top_p, moei_int_select_threshold, moei_int_select_hash;
/* For weight: p; p / sum p; p / sqrt(sum p^2); one of these two over some choices, where the others
   keep p; the softmax over all experts; 1 / count; 1; sparsemixer. The first four read values. */
MOEI_API moei_int_weight moei_int_weight_raw, moei_int_weight_sum, moei_int_weight_norm, moei_int_weight_over,
    moei_int_weight_softmax, moei_int_weight_uniform, moei_int_weight_one, moei_int_weight_sparsemixer;
/* For scale: weights times factor, or times each expert's own factor. */
MOEI_API void moei_int_scale_weights(const moei_int_router *r, const unsigned char *base, size_t count,
                                     const int16_t *experts, int16_t *weights);

#ifdef __cplusplus
}
#endif
#endif /* MOE_ROUTERS_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_ROUTERS_IMPLEMENTED)
#define MOEI_ROUTERS_IMPLEMENTED

#if defined(_OPENMP) && !defined(MOE_NO_FLOAT)
#include <omp.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define MOEI_ADD(k, n, x, y) moe_axpy(k, n, MOEI_R(1.0), x, y)
#define MOEI_REFUSE(error, ...) moei_error(error, MOE_ERR_ARGUMENT, __VA_ARGS__)

/* ==== >>code: the implementation =================================================================
     >>code_fields      text of fields, the rows of a router
     >>code_config      defaults, checks, traits
     >>code_presets     the table of presets
     >>code_parameters  shapes and initial values
     >>code_workspace   the arrays of a call, moe_router_init
     >>code_call        what stages share, checks of a call
     >>code_input       x -> u
     >>code_score       u -> z
     >>code_noise       z -> z
     >>code_gate        z -> r
     >>code_refine      r -> p
     >>code_select      p, z -> S
     >>code_weight      p, z -> w
     >>code_capacity    which assignments stay
     >>code_plan        the dispatch plan
     >>code_soft        Soft MoE
     >>code_losses      values and gradients
     >>code_route       the stages, one after the other
     >>code_batch       moe_route; one call of several processes
     >>code_backward    moe_route_backward
     >>code_state       observe, advance
     >>code_metrics     metrics
     >>code_integers    routing in integers */

#ifndef MOE_NO_FLOAT
/* ==== >>code_fields =========================================================================== */

enum { MOEI_NAME_ROOM = 32 }; /* for the longest field name and its terminator */

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

/* The index of value[n] among the names, or -1. */
static int moei_choice_find(const char *const *choices, const char *value, size_t n) {
    int i;
    for (i = 0; choices[i] != NULL; i++)
        if (moei_strlen(choices[i]) == n && moei_memcmp(choices[i], value, n) == 0) return i;
    return -1;
}

static moei_text moei_text_begin(char *out, size_t room) {
    moei_text t;
    t.out = out;
    t.room = room;
    t.length = 0;
    if (room > 0) out[0] = '\0';
    return t;
}

static void moei_put_text(moei_text *t, const char *s) { moei_put(t, s, moei_strlen(s)); }

/* The choices whose bits are in mask, for messages: "linear, random, mlp". */
static const char *moei_choices_text(const moe_field *field, uint32_t mask, const char *between, char *out,
                                     size_t room) {
    moei_text t = moei_text_begin(out, room);
    int i;
    for (i = 0; field->choices[i] != NULL; i++) {
        if (!(mask >> i & 1u)) continue;
        if (t.length > 0) moei_put_text(&t, between);
        moei_put_text(&t, field->choices[i]);
    }
    return out;
}

static moe_status moei_field_bad(const moe_field *field, const char *value, size_t n, moe_error *error) {
    const char *wanted = field->kind == MOE_FIELD_REAL   ? "a number"
                         : field->kind == MOE_FIELD_FLAG ? "0 or 1"
                                                         : "an integer";
    char copy[40], names[160];
    moei_text t = moei_text_begin(copy, sizeof copy);
    moei_put(&t, value, n);
    if (field->kind == MOE_FIELD_CHOICE)
        return moei_error(error, MOE_ERR_CONFIG, "%s = %s: must be one of %s", field->name, copy,
                          moei_choices_text(field, 0xffffffffu, ", ", names, sizeof names));
    return moei_error(error, MOE_ERR_CONFIG, "%s = %s: must be %s", field->name, copy, wanted);
}

/* Sets a field from the n characters at value. */
static moe_status moei_field_set_n(const moe_field *field, void *config, const char *value, size_t n,
                                   moe_error *error) {
    double number;
    if (field->kind == MOE_FIELD_CHOICE) {
        int choice = moei_choice_find(field->choices, value, n);
        /* it was a flag in 0.1 */
        if (n == 1 && (*value == '0' || *value == '1') && moei_strcmp(field->name, "l1_controller") == 0)
            choice = *value - '0';
        if (choice < 0) return moei_field_bad(field, value, n, error);
        *moei_field_int(field, config) = choice;
        return MOE_OK;
    }
    if (!moei_parse_number(value, n, &number)) return moei_field_bad(field, value, n, error);
    if (field->kind == MOE_FIELD_REAL) {
        moe_real real = (moe_real)number;
        /* -0 is the default, too, and its text is 0 */
        if ((moei_real_bits(real) & ~MOEI_SIGN_BIT) == 0) real = 0;
        *moei_field_real(field, config) = real;
        return MOE_OK;
    }
    /* integers of a configuration are at most 2^24 */
    if (number < -16777216.0 || number > 16777216.0) return moei_field_bad(field, value, n, error);
    if (number < (double)(int)number || number > (double)(int)number) return moei_field_bad(field, value, n, error);
    if (field->kind == MOE_FIELD_FLAG && number < 0) return moei_field_bad(field, value, n, error);
    if (field->kind == MOE_FIELD_FLAG && number > 1.0) return moei_field_bad(field, value, n, error);
    *moei_field_int(field, config) = (int)number;
    return MOE_OK;
}

void moe_field_text(const moe_field *field, const void *config, char *text, size_t room) {
    moei_text t = moei_text_begin(text, room);
    int value;
    if (field->kind == MOE_FIELD_REAL) {
        moei_put_real(&t, moei_field_get_real(field, config));
        return;
    }
    value = moei_field_get_int(field, config);
    if (field->kind == MOE_FIELD_CHOICE && value >= 0 && value <= (int)field->max)
        moei_put_text(&t, field->choices[value]);
    else moei_put_integer(&t, value);
}

/* Whether a field is 0, which means its default. */
MOEI_TOOL int moei_field_is_zero(const moe_field *field, const void *config) {
    moe_real value;
    if (field->kind != MOE_FIELD_REAL) return moei_field_get_int(field, config) == 0;
    value = moei_field_get_real(field, config);
    /* bits, because under -ffast-math a NaN may compare equal */
    return (moei_real_bits(value) & ~MOEI_SIGN_BIT) == 0;
}

static size_t moei_least_of_three(size_t a, size_t b, size_t c) { return a < b ? (a < c ? a : c) : b < c ? b : c; }

/* The Levenshtein distance of a and b, both shorter than MOEI_NAME_ROOM. */
static size_t moei_edit_distance(const char *a, const char *b) {
    size_t row[MOEI_NAME_ROOM], i, j, n = moei_strlen(b), diagonal, above;
    for (j = 0; j <= n; j++) row[j] = j;
    for (i = 0; a[i] != '\0'; i++) {
        diagonal = row[0];
        row[0] = i + 1;
        for (j = 0; j < n; j++) {
            above = row[j + 1];
            row[j + 1] = moei_least_of_three(diagonal + (a[i] != b[j]), above + 1, row[j] + 1);
            diagonal = above;
        }
    }
    return row[n];
}

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

/* The error for an unknown field name; suggests the nearest name if one is close. */
MOEI_TOOL moe_status moei_unknown_field(const moe_field *fields, const char *name, moe_error *error) {
    const char *nearest = NULL;
    size_t length = name != NULL ? moei_strlen(name) : 0, least = length / 3 + 2, distance;
    if (fields == NULL || name == NULL)
        return moei_error(error, MOE_ERR_NOT_FOUND, "name and fields must not be NULL");
    for (; fields->name != NULL && length < MOEI_NAME_ROOM; fields++) {
        distance = moei_edit_distance(name, fields->name);
        if (distance >= least) continue;
        least = distance;
        nearest = fields->name;
    }
    if (nearest == NULL) return moei_error(error, MOE_ERR_NOT_FOUND, "%s: unknown field", name);
    return moei_error(error, MOE_ERR_NOT_FOUND, "%s: unknown field; did you mean %s?", name, nearest);
}

moe_status moe_field_set(const moe_field *fields, void *config, const char *name, const char *value, moe_error *error) {
    const moe_field *field = moe_field_find(fields, name);
    if (config == NULL || value == NULL) return MOEI_REFUSE(error, "config and value must not be NULL");
    if (field == NULL) return moei_unknown_field(fields, name, error);
    return moei_field_set_n(field, config, value, moei_strlen(value), error);
}

moe_status moe_fields_apply(const moe_field *fields, void *config, const char *settings, moe_error *error) {
    const char *p = settings;
    if (p == NULL) return MOE_OK;
    if (config == NULL) return MOEI_REFUSE(error, "config must not be NULL");
    while (*p != '\0') {
        char name[MOEI_NAME_ROOM];
        const moe_field *field;
        const char *value;
        size_t n = 0, length;
        moe_status status;
        while (*p == ' ') p++;
        if (*p == '\0') break;
        while (p[n] != '\0' && p[n] != '=' && p[n] != ' ') n++;
        if (p[n] != '=') return moei_error(error, MOE_ERR_CONFIG, "settings: expected name=value at \"%s\"", p);
        /* one that does not fit is cut and still no field's name */
        length = moei_smaller(n, sizeof name - 1);
        memcpy(name, p, length);
        name[length] = '\0';
        field = moe_field_find(fields, name);
        if (field == NULL) return moei_unknown_field(fields, name, error);
        value = p + n + 1;
        for (p = value; *p != '\0' && *p != ' ';) p++;
        status = moei_field_set_n(field, config, value, (size_t)(p - value), error);
        if (status != MOE_OK) return status;
    }
    return MOE_OK;
}

/* Whether each field is inside its range. */
MOEI_TOOL moe_status moei_fields_check(const moe_field *fields, const void *config, moe_error *error) {
    char names[160];
    for (; fields->name != NULL; fields++) {
        double value;
        if (moei_field_is_zero(fields, config)) continue;
        if (fields->kind == MOE_FIELD_REAL) {
            moe_real real = moei_field_get_real(fields, config);
            value = moe_is_finite(real) ? (double)real : fields->max * 2.0 + 1.0;
            if (value >= (double)(moe_real)fields->min && value <= (double)(moe_real)fields->max) continue;
            return moei_error(error, MOE_ERR_CONFIG, "%s = %g: must be %g to %g", fields->name, (double)real,
                              fields->min, fields->max);
        }
        value = (double)moei_field_get_int(fields, config);
        if (value >= fields->min && value <= fields->max) continue;
        if (fields->kind == MOE_FIELD_CHOICE)
            return moei_error(error, MOE_ERR_CONFIG, "%s = %d: must be a constant for one of %s", fields->name,
                              moei_field_get_int(fields, config),
                              moei_choices_text(fields, 0xffffffffu, ", ", names, sizeof names));
        return moei_error(error, MOE_ERR_CONFIG, "%s = %d: must be %d to %d", fields->name,
                          moei_field_get_int(fields, config), (int)fields->min, (int)fields->max);
    }
    return MOE_OK;
}

/* Names and flags of the rows of >>stages. */
#define MOEI_NAME2(value, name) name,
#define MOEI_NAME4(value, name, f, field) name,
#define MOEI_NAME5(value, name, f, g, flags) name,
#define MOEI_FLAGS5(value, name, f, g, flags) flags,
#define MOEI_SELECT_FLAGS(value, name, f, flags, traits) (unsigned)(flags) | (unsigned)(traits),
#define MOEI_TABLE_NAMES(rows, x, y, n) static const char *const moei_##y##_names[] = {rows(MOEI_NAME##n) NULL};
#define MOEI_TABLE_NAMES_S(x, y, n) MOEI_TABLE_NAMES(MOE_##x##S, x, y, n)
MOEI_TABLES(MOEI_TABLE_NAMES_S, MOEI_TABLE_NAMES)
MOEI_TOOL const char *const moei_act_names[] = {MOE_ACTS(MOEI_NAME4) NULL};
static const unsigned moei_input_flags[] = {MOE_INPUTS(MOEI_FLAGS5)};
static const unsigned moei_score_flags[] = {MOE_SCORES(MOEI_FLAGS5)};
static const unsigned moei_gate_flags[] = {MOE_GATES(MOEI_FLAGS5)};
static const unsigned moei_select_flags[] = {MOE_SELECTS(MOEI_SELECT_FLAGS)};
static const unsigned moei_weight_flags[] = {MOE_WEIGHTS(MOEI_FLAGS5)};

/* Rows of moe_field; moe.h uses them, too. */
#define MOEI_INT(type, name, least, most, about) \
    { #name, MOE_FIELD_INT, offsetof(type, name), least, most, 0, NULL, about }
#define MOEI_FLAG(type, name, about) {#name, MOE_FIELD_FLAG, offsetof(type, name), 0, 1, 0, NULL, about}
#define MOEI_CHOICE(type, name, count, names, about) \
    { #name, MOE_FIELD_CHOICE, offsetof(type, name), 0, (count)-1, 0, names, about }
#define MOEI_REAL(type, name, least, most, about) \
    { #name, MOE_FIELD_REAL, offsetof(type, name), least, most, 0, NULL, about }
#define MOEI_FIELDS_END {NULL, 0, 0, 0, 0, 0, NULL, NULL}

#define MOEI_ROW_INT(name, value, least, most, about) \
    {#name, MOE_FIELD_INT, offsetof(moe_router_config, name), least, most, value, NULL, about},
#define MOEI_ROW_FLAG(name, about) {#name, MOE_FIELD_FLAG, offsetof(moe_router_config, name), 0, 1, 0, NULL, about},
#define MOEI_ROW_CHOICE(name, x, y, about) \
    {#name, MOE_FIELD_CHOICE, offsetof(moe_router_config, name), 0, MOE_##x##_COUNT - 1, 0, moei_##y##_names, about},
#define MOEI_ROW_REAL(name, value, least, most, about) \
    {#name, MOE_FIELD_REAL, offsetof(moe_router_config, name), least, most, value, NULL, about},
/* A layer's table begins with these rows: its configuration begins with the router's. */
#define MOEI_ROUTER_ROWS MOE_ROUTER_FIELDS(MOEI_ROW_INT, MOEI_ROW_FLAG, MOEI_ROW_CHOICE, MOEI_ROW_REAL)

static const moe_field moei_router_fields[] = {MOEI_ROUTER_ROWS MOEI_FIELDS_END};

const moe_field *moe_router_fields(void) { return moei_router_fields; }

/* The index of each row: moei_router_fields[MOEI_FIELD_score]. */
#define MOEI_INDEX_NUMBER(name, value, least, most, about) MOEI_FIELD_##name,
#define MOEI_INDEX_FLAG(name, about) MOEI_FIELD_##name,
#define MOEI_INDEX_CHOICE(name, x, y, about) MOEI_FIELD_##name,
enum { MOE_ROUTER_FIELDS(MOEI_INDEX_NUMBER, MOEI_INDEX_FLAG, MOEI_INDEX_CHOICE, MOEI_INDEX_NUMBER) MOEI_FIELDS };

/* ==== >>code_config =========================================================================== */

static void moei_default(int *field, int value) {
    if (*field == 0) *field = value;
}

static void moei_default_real(moe_real *field, moe_real value) {
    if (!(*field < 0) && !(*field > 0)) *field = value;
}

/* Whether switch_from selects before select does. */
MOEI_TOOL int moei_switches(const moe_router_config *c) {
    return c->switch_at > 0 || c->switch_share > 0;
}

/* Whether calls of this configuration may use this selection. */
static int moei_has_selection(const moe_router_config *c, int select) {
    return c->select == select || (moei_switches(c) && c->switch_from == select);
}

/* Defaults of the rows, then those that depend on other fields. */
static void moei_router_defaults(moe_router_config *c) {
    const moe_field *field;
    for (field = moei_router_fields; field->name != NULL; field++) {
        if (!(field->default_value > 0.0)) continue;
        if (field->kind == MOE_FIELD_REAL) moei_default_real(moei_field_real(field, c), (moe_real)field->default_value);
        else moei_default(moei_field_int(field, c), (int)field->default_value);
    }
    moei_default(&c->top_k, c->n_experts < 2 ? 1 : 2);
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) moei_default(&c->ac_mix, 1);
    if (c->ac_mode == MOE_AC_RUNNING) moei_default_real(&c->ac_rho, MOEI_R(0.9));
    if (c->score == MOE_SCORE_MLP) moei_default(&c->router_hidden, c->d_model);
    if (c->n_zero > 0 || c->n_copy > 0 || c->n_constant > 0) moei_default_real(&c->zero_tau, MOEI_R(1.0));
    moei_default_real(&c->noise_sigma, MOEI_R(1.0) / (moe_real)c->n_experts);
    if (c->select == MOE_SELECT_EXPERT_CHOICE || c->select == MOE_SELECT_EXPERT_THRESHOLD)
        moei_default_real(&c->capacity_factor, MOEI_R(1.0));
    moei_default_real(&c->capacity_factor_eval, c->capacity_factor);
    if (c->l1_controller) moei_default_real(&c->loss_l1, MOEI_R(1e-8));
    if (moei_has_selection(c, MOE_SELECT_EXPERT_THRESHOLD)) moei_default_real(&c->threshold_rho, MOEI_R(0.99));
    if (c->bias_rule == MOE_BIAS_SMEBU) {
        moei_default(&c->bias_centre, 1);
        moei_default_real(&c->bias_kappa, MOEI_R(2.0));
        moei_default_real(&c->bias_beta, MOEI_R(0.5));
    }
    if (c->k_end < 0) c->k_end = c->n_experts;
}

/* Whether anything depends on schedule_steps. */
MOEI_TOOL int moei_has_schedule(const moe_router_config *c) {
    return c->k_end != 0 || c->tau_schedule != MOE_TAU_NONE || c->switch_share > 0;
}

/* Whether switch_from may select in a call: outside training expert_threshold selects from the
   first step on. */
static int moei_switches_in(const moe_router_config *c, int training) {
    return moei_switches(c) && (training || c->select != MOE_SELECT_EXPERT_THRESHOLD);
}

/* The step from which select applies. */
static moe_real moei_switch_step(const moe_router_config *c) {
    if (c->switch_at > 0) return (moe_real)c->switch_at;
    if (c->schedule_steps == 0) return MOEI_INFINITY;
    return (moe_real)(uint32_t)(c->switch_share * (moe_real)c->schedule_steps + MOEI_R(0.5));
}

static const moe_field *moei_router_field(int field) { return &moei_router_fields[field]; }

/* R, the number of experts with matrices. */
#define MOEI_REAL_EXPERTS(c) ((c)->n_experts - (c)->n_zero - (c)->n_copy - (c)->n_constant)

/* The default of a field; that of three is not in their rows. */
static moe_real moei_default_of(const moe_router_config *c, const moe_field *field) {
    if (field == moei_router_field(MOEI_FIELD_noise_sigma)) return MOEI_R(1.0) / (moe_real)c->n_experts;
    if (field == moei_router_field(MOEI_FIELD_ac_mix)) return MOEI_R(1.0);
    if (field == moei_router_field(MOEI_FIELD_zero_tau)) return MOEI_REAL_EXPERTS(c) < c->n_experts ? MOEI_R(1.0) : 0;
    return (moe_real)field->default_value;
}

/* Whether a field differs from its default, in its bits: x87 may keep more digits of one. */
static int moei_is_changed(const moe_router_config *c, const moe_field *field) {
    const moe_real standard = moei_default_of(c, field);
    moe_real value;
    if (moei_field_is_zero(field, c)) return 0;
    value = field->kind == MOE_FIELD_REAL ? moei_field_get_real(field, c) : (moe_real)moei_field_get_int(field, c);
    return moei_real_bits(value) != moei_real_bits(standard);
}

/* A dependency between fields: if field differs from its default (when = 0) or has one of the
   values in the bits of when, then the field needs must differ from its default (values = 0) or
   have one of values. */
typedef struct moei_rule {
    int field;
    uint32_t when;
    int needs;
    uint32_t values;
    const char *why; /* or NULL */
} moei_rule;

#define MOEI_BIT(value) ((uint32_t)1 << (value))
#define MOEI_BUT(value) (0xffffffffu - MOEI_BIT(value))

/* A mask of the rows whose flags contain `flag`. */
static uint32_t moei_rows_with(const unsigned *flags, int count, unsigned flag) {
    uint32_t rows = 0;
    int i;
    for (i = 0; i < count; i++)
        if (flags[i] & flag) rows |= MOEI_BIT(i);
    return rows;
}

static int moei_is_among(const moe_router_config *c, const moe_field *field, uint32_t values) {
    int value;
    if (values == 0) return moei_is_changed(c, field);
    if (field->kind == MOE_FIELD_REAL) return !moei_is_changed(c, field); /* values is MOEI_BIT(0) */
    value = moei_field_get_int(field, c);
    return value < 32 && (values >> value & 1u) != 0;
}

/* The error of a violated rule: "field = value needs other = a, b, not other = c", or "field =
   value is incompatible with other = c" if many values are possible. */
static moe_status moei_rule_broken(const moe_router_config *c, const moei_rule *rule, moe_error *error) {
    const moe_field *field = moei_router_field(rule->field), *needs = moei_router_field(rule->needs);
    const char *colon = rule->why != NULL ? ": " : "", *why = rule->why != NULL ? rule->why : "";
    char value[40], other[40], names[120];
    int i, wanted = 0;
    moe_field_text(field, c, value, sizeof value);
    moe_field_text(needs, c, other, sizeof other);
    for (i = 0; i < 32; i++) wanted += (int)(rule->values >> i & 1u);
    if (rule->values == 0)
        return moei_error(error, MOE_ERR_CONFIG, "%s = %s needs %s, which is %s%s%s", field->name, value, needs->name,
                          other, colon, why);
    if (wanted > 4)
        return moei_error(error, MOE_ERR_CONFIG, "%s = %s is incompatible with %s = %s%s%s", field->name, value,
                          needs->name, other, colon, why);
    if (needs->kind == MOE_FIELD_CHOICE) (void)moei_choices_text(needs, rule->values, " or ", names, sizeof names);
    else {
        moei_text t = moei_text_begin(names, sizeof names);
        for (i = 0; (rule->values >> i & 1u) == 0;) i++;
        moei_put_integer(&t, i);
    }
    return moei_error(error, MOE_ERR_CONFIG, "%s = %s needs %s = %s, not %s = %s%s%s", field->name, value, needs->name,
                      names, needs->name, other, colon, why);
}

static moe_status moei_rules_check(const moe_router_config *c, const moei_rule *rules, size_t n, moe_error *error) {
    size_t i;
    for (i = 0; i < n; i++)
        if (moei_is_among(c, moei_router_field(rules[i].field), rules[i].when) &&
            !moei_is_among(c, moei_router_field(rules[i].needs), rules[i].values))
            return moei_rule_broken(c, &rules[i], error);
    return MOE_OK;
}

/* Rules, given the names of their fields: in full; field needs one of values; field needs needs. */
#define MOEI_RULE(field, when, needs, values, why) {MOEI_FIELD_##field, when, MOEI_FIELD_##needs, values, why}
#define MOEI_FOR(field, needs, values) MOEI_RULE(field, 0, needs, values, NULL)
#define MOEI_FOR2(a, b, needs, values) MOEI_FOR(a, needs, values), MOEI_FOR(b, needs, values)
#define MOEI_FOR3(a, b, c, needs, values) MOEI_FOR2(a, b, needs, values), MOEI_FOR(c, needs, values)
#define MOEI_FOR4(a, b, c, d, needs, values) MOEI_FOR2(a, b, needs, values), MOEI_FOR2(c, d, needs, values)
#define MOEI_ONLY(field, needs, value) MOEI_FOR(field, needs, MOEI_BIT(MOE_##value))
#define MOEI_NOT(field, needs, value) MOEI_FOR(field, needs, MOEI_BUT(MOE_##value))
#define MOEI_NEEDS(field, needs) MOEI_RULE(field, 0, needs, 0, NULL)

#define MOEI_CLUSTERS MOEI_BIT(MOE_INPUT_ADAPTIVE_CLUSTERING)
#define MOEI_NORM MOEI_BIT(MOE_SCORE_NORM)
#define MOEI_READS_U (MOEI_BUT(MOE_SCORE_NORM) - MOEI_BIT(MOE_SCORE_COMPETITION))
#define MOEI_TEMPERED (MOEI_BIT(MOE_GATE_SOFTMAX) | MOEI_BIT(MOE_GATE_SIGMOID))
#define MOEI_GROUPED MOEI_BIT(MOE_SELECT_GROUPED_TOP_K)
#define MOEI_AFFINITY MOEI_BIT(MOE_SELECT_AFFINITY)
#define MOEI_NORMALIZES (MOEI_BIT(MOE_WEIGHT_SUM) | MOEI_BIT(MOE_WEIGHT_SOFTMAX) | MOEI_BIT(MOE_WEIGHT_P_NORM))
#define MOEI_BIASED                                                                                                    \
    (MOEI_BIT(MOE_SELECT_TOP_K) | MOEI_GROUPED | MOEI_BIT(MOE_SELECT_GROUPED_EACH) | MOEI_BIT(MOE_SELECT_CUSTOM) |     \
     MOEI_BIT(MOE_SELECT_GIVEN) | MOEI_BIT(MOE_SELECT_HASH) | MOEI_BIT(MOE_SELECT_SAMPLE) |                            \
     MOEI_BIT(MOE_SELECT_BALANCED) | MOEI_AFFINITY)

/* Rules of state and schedules. */
static moe_status moei_state_clashes(const moe_router_config *c, moe_error *error) {
    const uint32_t any_k = moei_rows_with(moei_select_flags, MOE_SELECT_COUNT, MOEI_SELECT_ANY_K);
    const uint32_t fixed_k = MOEI_BIT(MOE_SELECT_HASH) | MOEI_BIT(MOE_SELECT_GIVEN) | MOEI_BIT(MOE_SELECT_BALANCED) |
                             MOEI_BIT(MOE_SELECT_GROUPED_TOP_K) | MOEI_BIT(MOE_SELECT_GROUPED_EACH);
    const int how = c->switch_at > 0 ? MOEI_FIELD_switch_at : MOEI_FIELD_switch_share;
    const moei_rule rules[] = {
        MOEI_RULE(k_end, 0, score, MOEI_BUT(MOE_SCORE_DSELECT), "K is the number of its codes"),
        MOEI_FOR(k_end, select, any_k),
        MOEI_FOR(k_end, switch_from, 0xffffffffu - fixed_k),
        MOEI_RULE(tau_schedule, MOEI_BIT(MOE_TAU_COSINE_TAU), cosine_learn_tau, MOEI_BIT(0), NULL),
        MOEI_RULE(switch_share, 0, switch_at, MOEI_BIT(0), "each says when select begins"),
        MOEI_RULE(switch_from, MOEI_BIT(MOE_SELECT_BALANCED), top_k, MOEI_BIT(1), "it gives each token one expert"),
        {how, 0, MOEI_FIELD_switch_from, MOEI_BUT(MOE_SELECT_SOFT), "it leaves the pipeline"},
        {how, 0, MOEI_FIELD_select, MOEI_BUT(MOE_SELECT_SOFT), NULL},
        {how, 0, MOEI_FIELD_weight, MOEI_BUT(MOE_WEIGHT_SPARSEMIXER), NULL},
        MOEI_NEEDS(tau_schedule, tau_end),
        MOEI_ONLY(l1_controller, select, SELECT_POSITIVE),
        MOEI_ONLY(custom_parameters, score, SCORE_CUSTOM),
        MOEI_ONLY(predictor, select, SELECT_EXPERT_CHOICE),
        MOEI_RULE(predictor, 0, student, MOEI_BIT(0), "one router learns from this one"),
        MOEI_ONLY(compete_rate, score, SCORE_LINEAR),
        MOEI_ONLY(compete_rate, select, SELECT_TOP_K),
        MOEI_ONLY(compete_rate, refine, REFINE_NONE),
        MOEI_ONLY(compete_rate, noise, NOISE_NONE),
        MOEI_NOT(compete_rate, weight, WEIGHT_SPARSEMIXER),
        MOEI_FOR4(student, selection_bias, router_residual, logit_cap, compete_rate, MOEI_BIT(0)),
        MOEI_RULE(student_dim, 0, table_size, 0, "the number of token ids"),
        MOEI_NEEDS(student, freeze_at),
        MOEI_NEEDS(student, loss_distill),
        MOEI_NOT(student, weight, WEIGHT_SPARSEMIXER)};
    if (c->custom_batch && c->score != MOE_SCORE_CUSTOM && c->select != MOE_SELECT_CUSTOM &&
        c->switch_from != MOE_SELECT_CUSTOM)
        return moei_error(error, MOE_ERR_CONFIG, "custom_batch = 1 needs score or select = custom");
    return moei_rules_check(c, rules, sizeof rules / sizeof rules[0], error);
}

/* Soft MoE leaves the pipeline after u: later stages must keep their defaults. The first field from
   `at` on that does not, or the number of fields. */
static int moei_soft_ignores(const moe_router_config *c, int at) {
    static const char alone[] =
        "score router_bias noise gate refine selection_bias logit_cap n_zero n_copy n_constant"
        " router_residual weight expert_scale scale apply_to drop_capacity capacity_factor capacity_bound"
        " expert_temperature";
    for (; moei_router_fields[at].name != NULL; at++)
        if (c->select == MOE_SELECT_SOFT && moei_is_changed(c, moei_router_field(at)) &&
            (moei_is_word_of(moei_router_fields[at].name, alone) ||
             moei_memcmp(moei_router_fields[at].name, "loss_", 5) == 0))
            break;
    return at;
}

static moe_status moei_soft_clashes(const moe_router_config *c, moe_error *error) {
    moei_rule rule = MOEI_RULE(score, 0, select, MOEI_BUT(MOE_SELECT_SOFT), "it has no effect there");
    rule.field = moei_soft_ignores(c, 0);
    return moei_router_fields[rule.field].name == NULL ? MOE_OK : moei_rule_broken(c, &rule, error);
}

/* Rules of the stages. */
static moe_status moei_stage_clashes(const moe_router_config *c, moe_error *error) {
    const uint32_t weight = moei_rows_with(moei_score_flags, MOE_SCORE_COUNT, MOEI_SCORE_WEIGHT);
    const uint32_t vectors = moei_rows_with(moei_score_flags, MOE_SCORE_COUNT, MOEI_SCORE_VECTORS);
    const uint32_t by_p = 0xffffffffu - moei_rows_with(moei_weight_flags, MOE_WEIGHT_COUNT, MOEI_WEIGHT_READS_LOGITS);
    const uint32_t leave_out = moei_rows_with(moei_select_flags, MOE_SELECT_COUNT, MOEI_SELECT_LEAVES_OUT);
    const moei_rule rules[] = {
        MOEI_RULE(refine, 0, weight, by_p, "it reads the logits, not the refined gate values"),
        MOEI_RULE(weight, MOEI_BIT(MOE_WEIGHT_SPARSEMIXER), select, MOEI_BIT(MOE_SELECT_TOP_K), NULL),
        MOEI_RULE(weight, MOEI_BIT(MOE_WEIGHT_SPARSEMIXER), selection_bias, MOEI_BIT(0),
                  "it selects by the logits alone"),
        MOEI_RULE(select, MOEI_BIT(MOE_SELECT_BALANCED), top_k, MOEI_BIT(1), "it gives each token one expert"),
        MOEI_RULE(logit_cap, 0, score, MOEI_BUT(MOE_SCORE_DSELECT), "its logits are a gate"),
        MOEI_RULE(threshold_learned, 0, weight, by_p, "theta would get no gradient"),
        MOEI_FOR(expert_dropout, select, leave_out),
        MOEI_FOR(expert_dropout, switch_from, leave_out),
        MOEI_RULE(expert_dropout, 0, weight, MOEI_BUT(MOE_WEIGHT_SPARSEMIXER), "it picks by the logits alone"),
        MOEI_RULE(capacity_bound, 0, score, vectors, "it has no gating vectors"),
        MOEI_NOT(capacity_bound, select, SELECT_EXPERT_CHOICE),
        MOEI_RULE(loss_locality, 0, nodes, 0, "at least 2"),
        MOEI_FOR3(loss_orthogonal, loss_diversity, loss_simplicity, score, weight)};
    return moei_rules_check(c, rules, sizeof rules / sizeof rules[0], error);
}

/* The first field that sets a number of experts without matrices. */
static int moei_first_without(const moe_router_config *c) {
    return c->n_zero > 0 ? MOEI_FIELD_n_zero : c->n_copy > 0 ? MOEI_FIELD_n_copy : MOEI_FIELD_n_constant;
}

/* Rules of experts without matrices. */
static moe_status moei_zero_clashes(const moe_router_config *c, moe_error *error) {
    const uint32_t by_token =
        0xffffffffu - moei_rows_with(moei_score_flags, MOE_SCORE_COUNT, MOE_TRAIT_NEEDS_ALL_EXPERTS);
    const char *const why = "experts without matrices have no activations";
    const int which = moei_first_without(c);
    const moei_rule rules[] = {
        {which, 0, MOEI_FIELD_score, by_token, why},
        {MOEI_FIELD_compete_rate, 0, which, MOEI_BIT(0), why},
        MOEI_RULE(router_residual, 0, score, MOEI_BUT(MOE_SCORE_DSELECT), "its logits are a gate")};
    if (c->n_zero >= c->n_experts || c->n_copy >= c->n_experts - c->n_zero ||
        c->n_constant >= c->n_experts - c->n_zero - c->n_copy)
        return moei_error(error, MOE_ERR_CONFIG,
                          "n_zero = %d, n_copy = %d, n_constant = %d: together they must be below n_experts = %d",
                          c->n_zero, c->n_copy, c->n_constant, c->n_experts);
    if (c->bias_real > (moe_real)c->top_k)
        return moei_error(error, MOE_ERR_CONFIG, "bias_real = %g: must be at most top_k = %d", (double)c->bias_real,
                          c->top_k);
    return moei_rules_check(c, rules, sizeof rules / sizeof rules[0], error);
}

/* Whether a field has the value, its own or the default, of the preset that the configuration began
   as; 1 if that is a file. */
static int moei_is_of_preset(const moe_router_config *c, const moe_field *field) {
    moe_router_config made;
    const moe_preset *preset = c->preset > 0 ? &moe_presets()[c->preset - 1] : NULL;
    if (c->preset == MOEI_OF_A_FILE) return 1;
    if (preset == NULL || moe_router_preset(preset->name, &made, NULL) != MOE_OK) return 0;
    made.d_model = c->d_model;
    made.n_experts = c->n_experts;
    moei_router_defaults(&made);
    if (field->kind != MOE_FIELD_REAL) return moei_field_get_int(field, c) == moei_field_get_int(field, &made);
    return moei_real_bits(moei_field_get_real(field, c)) == moei_real_bits(moei_field_get_real(field, &made));
}

static void moei_field_reset(const moe_field *field, moe_router_config *c) {
    const moe_real standard = field == moei_router_field(MOEI_FIELD_ac_mix)                 ? 0
                              : field == moei_router_field(MOEI_FIELD_capacity_factor_eval) ? c->capacity_factor
                                                                                            : moei_default_of(c, field);
    /* its default was the reset value */
    if (field == moei_router_field(MOEI_FIELD_capacity_factor)) c->capacity_factor_eval = 0;
    if (field->kind == MOE_FIELD_REAL) *moei_field_real(field, c) = standard;
    else *moei_field_int(field, c) = (int)standard;
}

/* Whether what the rule needs is set; switch_from counts, too. */
static int moei_is_used(const moe_router_config *c, const moei_rule *rule) {
    if (moei_is_among(c, moei_router_field(rule->needs), rule->values)) return 1;
    return rule->needs == MOEI_FIELD_select && moei_switches(c) && (rule->values >> c->switch_from & 1u) != 0;
}

/* What was reset because it has no effect. */
typedef struct moei_reset {
    moei_text names;
    int origin; /* the next value of config.preset */
} moei_reset;

/* A field without effect breaks a rule, unless a preset or a file has set it: then it is reset. */
static moe_status moei_reset_idle(moe_router_config *c, const moei_rule *rule, moei_reset *reset, moe_error *error) {
    const moe_field *field = moei_router_field(rule->field);
    static const char in_files[] = "selection_bias input switch_at switch_share switch_from tau_schedule";
    if (!moei_is_of_preset(c, field)) return moei_rule_broken(c, rule, error);
    if (c->preset == MOEI_OF_A_FILE && moei_is_word_of(field->name, in_files)) {
        reset->origin = MOEI_OF_A_FILE; /* stays, because its tensor is in the file */
        return MOE_OK;
    }
    moei_field_reset(field, c);
    if (reset->names.length > 0) moei_put_text(&reset->names, ", ");
    moei_put_text(&reset->names, field->name);
    return MOE_OK;
}

/* What a preset has set for stages that soft MoE leaves out; moei_soft_clashes refuses the rest. */
static void moei_idle_soft(moe_router_config *c, moei_reset *reset) {
    moei_rule rule = MOEI_RULE(score, 0, select, MOEI_BUT(MOE_SELECT_SOFT), NULL);
    for (;; rule.field++) {
        rule.field = moei_soft_ignores(c, rule.field);
        if (moei_router_fields[rule.field].name == NULL) return;
        if (moei_is_of_preset(c, moei_router_field(rule.field))) (void)moei_reset_idle(c, &rule, reset, NULL);
    }
}

/* Fields that need another one to have an effect. */
static moe_status moei_rules_use(moe_router_config *c, const moei_rule *rules, size_t n, moei_reset *reset,
                                 moe_error *error) {
    moe_status status = MOE_OK;
    size_t i;
    for (i = 0; i < n && status == MOE_OK; i++)
        if (moei_is_among(c, moei_router_field(rules[i].field), rules[i].when) && !moei_is_used(c, &rules[i]))
            status = moei_reset_idle(c, &rules[i], reset, error);
    return status;
}

/* Whether anything reads the logits once there is noise on them: selection, weight or a loss. */
#define MOEI_ANY_LOSS(value, name, f, field) || c->field > 0
static int moei_noise_is_read(const moe_router_config *c) {
    const uint32_t blind = MOEI_BIT(MOE_SELECT_HASH) | MOEI_BIT(MOE_SELECT_GIVEN) | MOEI_BIT(MOE_SELECT_DENSE);
    const int counts = (moei_weight_flags[c->weight] & MOEI_WEIGHT_COUNTS) != 0;
    return !(blind >> c->select & 1u) || !counts || moei_switches(c) MOE_LOSSES(MOEI_ANY_LOSS);
}

/* Whether there is a capacity factor that is not the selection's own. */
static int moei_factor_drops(const moe_router_config *c) {
    return (c->capacity_factor > 0 || c->capacity_factor_eval > 0) &&
           !(moei_select_flags[c->select] & MOEI_SELECT_OWN_FACTOR);
}

/* Which fields of capacity the selections of a configuration read, whether anything limits the
   load, and whether a token may have a second expert. */
typedef struct moei_limits {
    int factor, eval, least, any, two;
} moei_limits;

static moei_limits moei_limits_of(const moe_router_config *c) {
    const int by_factor = moei_factor_drops(c), set = c->drop_capacity > 0;
    moei_limits l = {0, 0, 0, 0, 0};
    int i;
    for (i = 0; i < 1 + moei_switches(c); i++) {
        const int select = i == 0 ? c->select : c->switch_from;
        const unsigned flags = moei_select_flags[select];
        const int own = select == MOE_SELECT_EXPERT_CHOICE || (flags & MOEI_SELECT_OWN_FACTOR) != 0;
        const int bound = !(flags & MOEI_SELECT_LIMITS_LOAD) && c->capacity_bound != MOE_BOUND_NONE;
        const int any = bound || (!own && by_factor);
        l.factor |= own || !set;
        l.eval |= !own && !set && by_factor && select != MOE_SELECT_SOFT;
        l.least |= select == MOE_SELECT_AFFINITY || (any && !set);
        l.any |= any || set;
        l.two |= c->n_experts > 1 && select != MOE_SELECT_AFFINITY &&
                 (c->top_k > 1 || c->k_end > 1 || !(flags & MOEI_SELECT_AT_MOST_K));
    }
    return l;
}

/* Whether a drop rule may drop anything: not if every weight that it reads keeps its choice. */
static int moei_rule_drops(const moe_router_config *c) {
    const int most = c->drop_rule == MOE_DROP_RULE_GSHARD ? 2 : 5, k = c->top_k > c->k_end ? c->top_k : c->k_end;
    const int first = moei_switches(c) ? c->switch_from : c->select;
    const unsigned by_k = moei_select_flags[c->select] & moei_select_flags[first];
    if (c->expert_scale) return 1;
    return c->weight != MOE_WEIGHT_ONE &&
           !(c->weight == MOE_WEIGHT_UNIFORM && (by_k & MOEI_SELECT_AT_MOST_K) && k <= most);
}

/* Whether the weights of a token sum to 1, so that dividing by the sum changes nothing. */
static int moei_sums_to_one(const moe_router_config *c) {
    const uint32_t sums = MOEI_BIT(MOE_WEIGHT_SUM) | MOEI_BIT(MOE_WEIGHT_SOFTMAX) | MOEI_BIT(MOE_WEIGHT_UNIFORM);
    const int plain = c->weight == MOE_WEIGHT_P_NORM && !moei_is_changed(c, moei_router_field(MOEI_FIELD_weight_p));
    return ((sums >> c->weight & 1u) || plain) && !c->expert_scale && c->weight_over == MOE_WEIGHT_OVER_ALL;
}

/* Whether all weights are 1 and have no gradient. */
static int moei_all_one(const moe_router_config *c) {
    return c->weight == MOE_WEIGHT_ONE && !c->expert_scale && c->renormalize == MOE_RENORMALIZE_BEFORE &&
           !moei_is_changed(c, moei_router_field(MOEI_FIELD_scale)) && !c->threshold_learned &&
           !(c->compete_rate > 0);
}

/* Checks fields of dropping, and others whose effect depends on several fields. */
static moe_status moei_idle_limits(moe_router_config *c, moei_reset *reset, moe_error *error) {
    const moei_limits l = moei_limits_of(c);
    const int plain = c->select != MOE_SELECT_EXPERT_CHOICE && c->select != MOE_SELECT_EXPERT_THRESHOLD;
    const int limit = plain ? MOEI_FIELD_capacity_factor : MOEI_FIELD_drop_capacity, set = c->drop_capacity > 0;
    const int differs = c->capacity_factor_eval < c->capacity_factor || c->capacity_factor_eval > c->capacity_factor;
    const int same = moei_switches(c) && c->switch_from == c->select;
    const uint32_t neither = MOEI_BUT(c->select) & MOEI_BUT(moei_switches(c) ? c->switch_from : c->select);
    const uint32_t others = 0xffffffffu - MOEI_AFFINITY;
    const uint32_t uneven = MOEI_BUT(MOE_SELECT_DENSE) - MOEI_BIT(MOE_SELECT_EXPERT_CHOICE);
    const int none = MOEI_REAL_EXPERTS(c) == c->n_experts, by_factor = plain && !set && c->capacity_factor_eval > 0;
    const char *const all = "all experts have matrices";
    const struct {
        int idle;
        moei_rule rule;
    } rows[] = {
        {!l.factor, MOEI_FOR(capacity_factor, drop_capacity, MOEI_BIT(0))},
        {set && differs && !l.eval, MOEI_FOR(capacity_factor_eval, drop_capacity, MOEI_BIT(0))},
        {differs && !l.eval, MOEI_FOR(capacity_factor_eval, select, neither)},
        {set && !l.least, MOEI_FOR(capacity_min, drop_capacity, MOEI_BIT(0))},
        {!l.least, MOEI_NEEDS(capacity_min, capacity_factor)},
        {!l.any, {MOEI_FIELD_drop_order, 0, limit, 0, "nothing is dropped"}},
        {!l.two && c->top_k == 1, MOEI_FOR(drop_rule, top_k, MOEI_BUT(1))},
        {!l.two, MOEI_FOR(drop_rule, select, others)},
        {!moei_rule_drops(c), MOEI_RULE(drop_rule, 0, weight, MOEI_BUT(c->weight), "it keeps all choices")},
        {!l.any && c->drop_rule == MOE_DROP_RULE_NONE && moei_sums_to_one(c),
         {MOEI_FIELD_renormalize, 0, limit, 0, "nothing is dropped"}},
        {1, MOEI_FOR(affinity_mass, affinity_sum, MOEI_BIT(0))},
        {1, MOEI_FOR(affinity_mass, affinity_sum_auto, MOEI_BIT(0))},
        {!l.least && !plain, MOEI_FOR(capacity_min, select, neither)},
        {none, MOEI_RULE(weight_over, MOEI_BIT(MOE_WEIGHT_OVER_REAL), n_zero, 0, all)},
        {none, MOEI_RULE(zero_average, 0, n_zero, 0, all)},
        {none, MOEI_RULE(zero_tau, 0, n_zero, 0, all)},
        {none, MOEI_RULE(bias_real, 0, n_zero, 0, all)},
        {!by_factor, MOEI_RULE(zero_tau, 0, loss_balance, 0, "capacity_factor limits nothing either")},
        {!moei_switches(c), MOEI_RULE(switch_from, 0, switch_share, 0, "switch_at is 0, too")},
        {!moei_has_schedule(c), MOEI_RULE(schedule_steps, 0, k_end, 0, "no other schedule is set")},
        {!moei_has_selection(c, MOE_SELECT_HASH) && c->student_dim == 0, MOEI_ONLY(table_size, select, SELECT_HASH)},
        {same, MOEI_FOR(switch_from, select, MOEI_BUT(c->select))},
        {same, MOEI_FOR(switch_at, select, MOEI_BUT(c->select))},
        {same, MOEI_FOR(switch_share, select, MOEI_BUT(c->select))},
        {MOEI_REAL_EXPERTS(c) == c->n_experts - 1,
         {MOEI_FIELD_zero_average, 0, moei_first_without(c), MOEI_BUT(1), "it is the mean of one"}},
        {!(c->expert_dropout > 0), MOEI_RULE(loss_stable_balance, 0, select, uneven, "all loads are equal")},
        {moei_all_one(c), MOEI_NOT(apply_to, weight, WEIGHT_ONE)},
        {!(c->loss_load > 0), MOEI_NEEDS(unbiased, loss_importance)}};
    moe_status status = MOE_OK;
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0] && status == MOE_OK; i++)
        if (rows[i].idle) status = moei_rules_use(c, &rows[i].rule, 1, reset, error);
    return status;
}

/* Refuses or resets settings without effect. */
static moe_status moei_idle_fields(moe_router_config *c, moe_error *error) {
    static const moei_rule rules[] = {
        MOEI_FOR2(sparsemixer_sample, sparsemixer_eps, weight, MOEI_BIT(MOE_WEIGHT_SPARSEMIXER)),
        MOEI_ONLY(jitter_eps, input, INPUT_JITTER),
        MOEI_FOR4(ac_mode, ac_spread, ac_mix, ac_lambda, input, MOEI_CLUSTERS),
        MOEI_FOR2(ac_spread, ac_lambda, ac_mode, MOEI_BUT(MOE_AC_RANDOM)),
        MOEI_FOR4(cosine_tau, cosine_dim, cosine_keep_length, cosine_learn_tau, score, MOEI_BIT(MOE_SCORE_COSINE)),
        MOEI_FOR2(norm_node, norm_order, score, MOEI_NORM),
        MOEI_FOR2(router_hidden, router_act, score, MOEI_BIT(MOE_SCORE_MLP) | MOEI_BIT(MOE_SCORE_ATTENTIVE)),
        MOEI_ONLY(noise_floor, noise, NOISE_NOISY_TOPK),
        MOEI_ONLY(noise_sigma, noise, NOISE_GAUSSIAN),
        MOEI_FOR2(gate_temperature, expert_temperature, gate, MOEI_TEMPERED),
        MOEI_FOR3(similarity_tau, similarity_scale, similarity_learned, refine, MOEI_BIT(MOE_REFINE_SIMILARITY)),
        MOEI_FOR4(heads, attention_heads, attention_sigma, attention_u, refine, MOEI_BIT(MOE_REFINE_ATTENTION)),
        MOEI_ONLY(attention_head, attention_heads, HEADS_FIXED),
        MOEI_FOR2(groups_kept, group_score, select, MOEI_GROUPED),
        MOEI_ONLY(top_p, select, SELECT_TOP_P),
        MOEI_FOR3(threshold, threshold_fallback, threshold_learned, select, MOEI_BIT(MOE_SELECT_THRESHOLD)),
        MOEI_FOR2(expert_choice_score, expert_choice_scope, select, MOEI_BIT(MOE_SELECT_EXPERT_CHOICE)),
        MOEI_FOR4(affinity_mass, affinity_sum, affinity_sum_auto, capacity, select, MOEI_AFFINITY),
        MOEI_FOR2(sample_at, sample_scope, select, MOEI_BIT(MOE_SELECT_SAMPLE)),
        MOEI_ONLY(sample_seed, sample_at, SAMPLE_ALWAYS),
        MOEI_ONLY(weight_p, weight, WEIGHT_P_NORM),
        MOEI_FOR2(balance_over, balance_scope, loss_balance, 0),
        MOEI_NEEDS(importance_over, loss_importance),
        MOEI_NEEDS(nodes, loss_locality),
        MOEI_FOR(router_bias, score, MOEI_BIT(MOE_SCORE_LINEAR) | MOEI_BIT(MOE_SCORE_RANDOM)),
        MOEI_ONLY(grap_cosine, score, SCORE_GRAP),
        MOEI_FOR2(causal, lower_entropy_only, refine, MOEI_BUT(MOE_REFINE_NONE)),
        MOEI_FOR(groups, select, MOEI_GROUPED | MOEI_BIT(MOE_SELECT_GROUPED_EACH)),
        MOEI_NEEDS(threshold_sigmoid, threshold_learned),
        MOEI_NEEDS(expert_dropout_scope, expert_dropout),
        MOEI_ONLY(capacity_rho, capacity_bound, BOUND_EVERY),
        MOEI_NEEDS(distill, loss_distill),
        MOEI_ONLY(threshold_rho, select, SELECT_EXPERT_THRESHOLD),
        MOEI_ONLY(ac_rho, ac_mode, AC_RUNNING),
        MOEI_FOR3(slots, soft_normalise, soft_sequences, select, MOEI_BIT(MOE_SELECT_SOFT)),
        MOEI_FOR3(gate_temperature, tau_schedule, drop_rule, select, MOEI_BUT(MOE_SELECT_SOFT)),
        MOEI_RULE(tau_schedule, MOEI_BIT(MOE_TAU_GATE_TEMPERATURE), gate, MOEI_TEMPERED, NULL),
        MOEI_RULE(selection_bias, 0, select, MOEI_BIASED, "it ignores the bias"),
        MOEI_NEEDS(bias_rate, selection_bias),
        MOEI_FOR3(bias_rule, bias_centre, bias_real, bias_rate, 0),
        MOEI_FOR2(bias_kappa, bias_beta, bias_rule, MOEI_BIT(MOE_BIAS_SMEBU)),
        MOEI_RULE(tau_schedule, MOEI_BIT(MOE_TAU_COSINE_TAU), score, MOEI_BIT(MOE_SCORE_COSINE), NULL),
        MOEI_RULE(tau_schedule, MOEI_BIT(MOE_TAU_SIMILARITY_TAU), refine, MOEI_BIT(MOE_REFINE_SIMILARITY), NULL),
        MOEI_RULE(tau_schedule, MOEI_BIT(MOE_TAU_ATTENTION_SIGMA), refine, MOEI_BIT(MOE_REFINE_ATTENTION), NULL),
        MOEI_NEEDS(tau_end, tau_schedule),
        MOEI_ONLY(l1_controller, select, SELECT_POSITIVE),
        MOEI_ONLY(predictor, select, SELECT_EXPERT_CHOICE),
        MOEI_NEEDS(loss_predictor, predictor),
        MOEI_FOR2(compete_from, compete, compete_rate, 0),
        MOEI_NOT(student, select, SELECT_SOFT),
        MOEI_NEEDS(student_dim, student),
        MOEI_FOR2(loss_selector_entropy, loss_selector_reach, score, MOEI_BIT(MOE_SCORE_DSELECT)),
        MOEI_RULE(loss_load, 0, noise, MOEI_BIT(MOE_NOISE_NOISY_TOPK) | MOEI_BIT(MOE_NOISE_GAUSSIAN),
                  "the load is smooth only under normal noise"),
        MOEI_RULE(weight_over, 0, weight, MOEI_NORMALIZES, "only these normalize"),
        MOEI_RULE(weight_over, MOEI_BIT(MOE_WEIGHT_OVER_NONZERO), n_zero, 0, NULL),
        MOEI_NEEDS(zero_average, loss_balance)};
    static const moei_rule unread[] = {MOEI_FOR2(input, raw_input, score, MOEI_READS_U)};
    char names[400];
    moei_reset reset;
    moe_status status;
    size_t length;
    reset.names = moei_text_begin(names, sizeof names);
    reset.origin = 0;
    do { /* what is reset may have been all that read another field */
        const int seen = c->refine != MOE_REFINE_NONE || c->noise == MOE_NOISE_NOISY_TOPK || c->predictor || c->student;
        length = reset.names.length;
        moei_idle_soft(c, &reset);
        status = seen ? MOE_OK : moei_rules_use(c, unread, 2, &reset, error);
        if (status == MOE_OK) status = moei_rules_use(c, rules, sizeof rules / sizeof rules[0], &reset, error);
        if (status == MOE_OK) status = moei_idle_limits(c, &reset, error);
    } while (status == MOE_OK && reset.names.length > length);
    if (status != MOE_OK) return status;
    if (reset.names.length > 0 && c->preset == MOEI_OF_A_FILE)
        (void)moei_error(error, MOE_OK, "reset because they have no effect here: %s", names);
    c->preset = reset.origin;
    return MOE_OK;
}

/* Sizes that contradict each other, then the rules. */
static moe_status moei_router_clashes(const moe_router_config *c, moe_error *error) {
    enum { AT_MOST, BELOW, DIVIDES };
    static const char *const must[] = {"be at most", "be below", "divide"};
    static const int sizes[][3] = {{MOEI_FIELD_top_k, AT_MOST, MOEI_FIELD_n_experts},
                                   {MOEI_FIELD_attention_head, BELOW, MOEI_FIELD_heads},
                                   {MOEI_FIELD_groups, DIVIDES, MOEI_FIELD_n_experts},
                                   {MOEI_FIELD_groups_kept, AT_MOST, MOEI_FIELD_groups},
                                   {MOEI_FIELD_k_end, AT_MOST, MOEI_FIELD_n_experts}};
    moe_status status;
    size_t i;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const moe_field *field = moei_router_field(sizes[i][0]), *other = moei_router_field(sizes[i][2]);
        const int value = moei_field_get_int(field, c), is = moei_field_get_int(other, c);
        const int how = sizes[i][1];
        if (how == DIVIDES ? is % value != 0 : value > is - (how == BELOW))
            return moei_error(error, MOE_ERR_CONFIG, "%s = %d: must %s %s = %d", field->name, value, must[how],
                              other->name, is);
    }
    if (c->score == MOE_SCORE_GRAP && c->d_model % c->n_experts != 0)
        return moei_error(error, MOE_ERR_CONFIG, "score = grap: n_experts = %d must divide d_model = %d", c->n_experts,
                          c->d_model);
    if (moei_has_selection(c, MOE_SELECT_GROUPED_TOP_K) && c->top_k > c->groups_kept * (c->n_experts / c->groups))
        return moei_error(error, MOE_ERR_CONFIG, "top_k = %d: groups_kept = %d groups hold only %d experts", c->top_k,
                          c->groups_kept, c->groups_kept * (c->n_experts / c->groups));
    if (moei_has_selection(c, MOE_SELECT_GROUPED_EACH) && c->top_k % c->groups != 0)
        return moei_error(error, MOE_ERR_CONFIG, "top_k = %d: groups = %d must divide it for %s = grouped_each",
                          c->top_k, c->groups, c->select == MOE_SELECT_GROUPED_EACH ? "select" : "switch_from");
    if (c->loss_selector_reach > 0 && (c->n_experts & (c->n_experts - 1)) == 0)
        return moei_error(error, MOE_ERR_CONFIG,
                          "loss_selector_reach = %g has no effect with n_experts = %d, a power of 2: every code is an "
                          "expert", (double)c->loss_selector_reach, c->n_experts);
    if (c->threshold_sigmoid && c->threshold_learned && !(c->threshold > 0 && c->threshold < MOEI_R(1.0)))
        return moei_error(error, MOE_ERR_CONFIG,
                          "threshold = %g is incompatible with threshold_sigmoid = 1: it must be between 0 and 1",
                          (double)c->threshold);
    if (c->affinity_sum_auto > 0 && c->affinity_sum > 0)
        return moei_error(error, MOE_ERR_CONFIG, "affinity_sum_auto = %g is incompatible with affinity_sum = %g",
                          (double)c->affinity_sum_auto, (double)c->affinity_sum);
    if (moei_has_selection(c, MOE_SELECT_HASH) && c->table_size == 0)
        return moei_error(error, MOE_ERR_CONFIG, "table_size = 0: %s = hash needs the number of token ids",
                          c->select == MOE_SELECT_HASH ? "select" : "switch_from");
    if (c->noise != MOE_NOISE_NONE && !moei_noise_is_read(c))
        return moei_error(error, MOE_ERR_CONFIG, "noise = %s has no effect with select = %s and weight = %s",
                          moei_noise_names[c->noise], moei_select_names[c->select], moei_weight_names[c->weight]);
    status = moei_state_clashes(c, error);
    if (status == MOE_OK) status = moei_soft_clashes(c, error);
    if (status == MOE_OK) status = moei_zero_clashes(c, error);
    return status == MOE_OK ? moei_stage_clashes(c, error) : status;
}

/* A field whose value the MOE_KEEP_ masks exclude from this build, or NULL. */
static const char *moei_left_out(const moe_router_config *c) {
    if (!MOEI_KEPT(INPUTS, c->input)) return "input";
    if (!MOEI_KEPT(SCORES, c->score)) return "score";
    if (!MOEI_KEPT(GATES, c->gate)) return "gate";
    if (!MOEI_KEPT(REFINES, c->refine)) return "refine";
    if (!MOEI_KEPT(SELECTS, c->select)) return "select";
    if (moei_switches(c) && !MOEI_KEPT(SELECTS, c->switch_from)) return "switch_from";
    if (c->student && !MOEI_KEPT(SELECTS, MOE_SELECT_TOP_K)) return "student";
    if (c->compete_rate > 0 && MOEI_KEPT(EXTRAS, MOE_EXTRA_TRAINING) &&
        !(MOEI_KEPT(EXTRAS, MOE_EXTRA_SCHEDULE) && MOEI_KEPT(SCORES, MOE_SCORE_COMPETITION) &&
          MOEI_KEPT(SCORES, MOE_SCORE_NORM) && MOEI_KEPT(GATES, MOE_GATE_SOFTMAX) &&
          MOEI_KEPT(WEIGHTS, MOE_WEIGHT_SUM) && MOEI_KEPT(WEIGHTS, MOE_WEIGHT_SOFTMAX)))
        return "compete_rate";
    if (!MOEI_KEPT(WEIGHTS, c->weight)) return "weight";
    if ((c->score == MOE_SCORE_MLP || c->score == MOE_SCORE_ATTENTIVE) && !MOEI_KEPT(ACTS, c->router_act))
        return "router_act";
    if (c->gate == MOE_GATE_SIGMOID && !MOEI_KEPT(ACTS, MOE_ACT_SIGMOID)) return "gate";
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_SCHEDULE)) {
        if (c->k_end != 0 || c->tau_schedule != MOE_TAU_NONE) return c->k_end != 0 ? "k_end" : "tau_schedule";
        if (c->freeze_at > 0 || c->switch_share > 0) return c->freeze_at > 0 ? "freeze_at" : "switch_share";
        if (c->switch_at > 0 || c->l1_controller) return c->switch_at > 0 ? "switch_at" : "l1_controller";
    }
    if (MOEI_KEPT(EXTRAS, MOE_EXTRA_CAPACITY)) return NULL;
    if (moei_factor_drops(c)) return "capacity_factor";
    if (c->drop_capacity > 0 || c->capacity_bound != MOE_BOUND_NONE)
        return c->drop_capacity > 0 ? "drop_capacity" : "capacity_bound";
    return c->drop_rule != MOE_DROP_RULE_NONE ? "drop_rule" : NULL;
}

moe_status moe_router_check(const moe_router_config *config, moe_router_config *out, moe_error *error) {
    moe_router_config c;
    moe_status status;
    char text[40];
    const char *left_out;
    if (config == NULL) return MOEI_REFUSE(error, "config must not be NULL");
    c = *config;
    if (c.d_model == 0)
        return moei_error(error, MOE_ERR_CONFIG, "d_model = 0: the width of a token must be set, 1 to %d",
                          (int)MOE_MAX_WIDTH);
    status = moei_fields_check(moei_router_fields, &c, error);
    if (status != MOE_OK) return status;
    moei_router_defaults(&c);
    status = moei_idle_fields(&c, error);
    if (status == MOE_OK) status = moei_router_clashes(&c, error);
    if (status != MOE_OK) return status;
    left_out = moei_left_out(&c);
    if (left_out != NULL) {
        moe_field_text(moe_field_find(moei_router_fields, left_out), &c, text, sizeof text);
        return moei_error(error, MOE_ERR_UNSUPPORTED, "%s = %s: a MOE_KEEP_ macro has left it out of this build",
                          left_out, text);
    }
    if (out != NULL) *out = c;
    return MOE_OK;
}

/* Offsets of the fields that hold the factors of the losses. */
#define MOEI_LOSS_FIELD(value, name, f, field) offsetof(moe_router_config, field),
static const size_t moei_loss_fields[] = {MOE_LOSSES(MOEI_LOSS_FIELD)};

const char *moe_loss_name(int loss) { return loss >= 0 && loss < MOE_LOSS_COUNT ? moei_loss_names[loss] : NULL; }

MOEI_TOOL moe_real moei_loss_factor(const moe_router_config *c, int loss) {
    moe_real factor;
    memcpy(&factor, (const unsigned char *)c + moei_loss_fields[loss], sizeof factor);
    /* either factor turns it on */
    if (loss == MOE_LOSS_SIMILARITY && c->loss_similarity_diff > factor) return c->loss_similarity_diff;
    return factor;
}

#ifndef MOE_NO_TRAIN
moe_status moe_router_check_training(const moe_router_config *config, moe_error *error) {
    moe_router_config c;
    int loss, reached = 0;
    moe_status status = moe_router_check(config, &c, error);
    if (status != MOE_OK) return status;
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++)
        if (loss != MOE_LOSS_PREDICTOR && (loss != MOE_LOSS_DISTILL || !c.student))
            reached |= moei_loss_factor(&c, loss) > 0;
    if (c.untrained || reached) return MOE_OK;
    if (!(moei_score_flags[c.score] & MOEI_SCORE_TRAINED) && c.custom_parameters == 0) return MOE_OK;
    if (c.top_k == 1 && c.k_end < 2 && (moei_select_flags[c.select] & MOEI_SELECT_AT_MOST_K) &&
        (moei_weight_flags[c.weight] & MOEI_WEIGHT_ONE_IS_CONSTANT))
        return moei_error(error, MOE_ERR_CONFIG,
                          "top_k = 1 with weight = %s: the weight is always 1, so the router would never learn; use "
                          "weight = raw, a loss, or untrained = 1",
                          moei_weight_names[c.weight]);
    return MOE_OK;
}
#endif

static int moei_is_soft(const moe_router_config *c) {
    return MOEI_KEPT(SELECTS, MOE_SELECT_SOFT) && c->select == MOE_SELECT_SOFT;
}

/* Whether the clusters are formed from all tokens of the call. */
static int moei_clusters_call(const moe_router_config *c) {
    return c->input == MOE_INPUT_ADAPTIVE_CLUSTERING && (c->ac_mode == MOE_AC_PAPER || c->ac_mode == MOE_AC_CODE);
}

static int moei_has_capacity(const moe_router_config *c) {
    return moei_factor_drops(c) || c->drop_capacity > 0 || c->capacity_bound != MOE_BOUND_NONE;
}

/* Whether tokens outside training draw with the first one of their sequence. */
static int moei_shares_draws(const moe_router_config *c) {
    return c->sample_at == MOE_SAMPLE_ALWAYS && c->sample_scope == MOE_SAMPLE_SEQUENCE;
}

/* Whether the head that refines depends on all tokens of the sequence. */
static int moei_compares_heads(const moe_router_config *c) {
    return c->refine == MOE_REFINE_ATTENTION && c->attention_heads == MOE_HEADS_MIN_ENTROPY;
}

unsigned moe_router_traits(const moe_router_config *c) {
    unsigned traits = 0;
    int later; /* whether later tokens matter */
    if (c->score >= 0 && c->score < MOE_SCORE_COUNT) traits |= moei_score_flags[c->score];
    if (c->select >= 0 && c->select < MOE_SELECT_COUNT) traits |= moei_select_flags[c->select];
    if (moei_switches(c) && c->switch_from >= 0 && c->switch_from < MOE_SELECT_COUNT)
        traits |= moei_select_flags[c->switch_from];
    traits &= MOE_TRAIT_NEEDS_GIVEN * 2 - 1;
    if (c->student_dim > 0) traits |= MOE_TRAIT_NEEDS_TOKEN_IDS;
    if (c->selection_bias || moei_has_schedule(c) || c->freeze_at > 0 || c->switch_at > 0 || c->compete_from > 0 ||
        c->l1_controller ||
        c->capacity_bound == MOE_BOUND_FIRST || c->capacity_rho > 0 || c->affinity_sum_auto > 0)
        traits |= MOE_TRAIT_STATEFUL;
    /* selections over all tokens, and capacity, depend on later tokens */
    later = (traits & MOE_TRAIT_NEEDS_BATCH) || c->custom_batch || moei_has_capacity(c) || moei_clusters_call(c);
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        traits |= MOE_TRAIT_NEEDS_PREVIOUS_LAYER;
        if (c->ac_mode == MOE_AC_RUNNING) traits |= MOE_TRAIT_STATEFUL;
    }
    if (c->refine != MOE_REFINE_NONE) {
        traits |= MOE_TRAIT_NEEDS_BATCH;
        if (!c->causal || moei_compares_heads(c)) later = 1;
    }
    if (c->refine == MOE_REFINE_ATTENTION) traits |= MOE_TRAIT_NEEDS_ATTENTION;
    if (c->noise != MOE_NOISE_NONE || c->sparsemixer_sample || c->expert_dropout > 0 ||
        (c->compete_rate > 0 && c->compete_rate < MOEI_R(1.0)))
        traits |= MOE_TRAIT_STOCHASTIC;
    if (c->input == MOE_INPUT_JITTER || c->drop_order == MOE_DROP_RANDOM || c->drop_rule != 0)
        traits |= MOE_TRAIT_STOCHASTIC;
    if (later || c->sample_scope != 0) traits |= MOE_TRAIT_NEEDS_BATCH;
    if (!later) traits |= MOE_TRAIT_CAUSAL;
    return traits;
}

#define MOEI_TRAIT_CASE(value, bit, name) \
    case value: return name;
const char *moe_trait_name(unsigned trait) {
    switch (trait) {
        MOE_TRAITS(MOEI_TRAIT_CASE)
    default: return NULL;
    }
}

/* What prevents a router from decoding: a field, and what would work; NULL, NULL: nothing does. The
   trait is always needs_batch. */
typedef struct moei_obstacle {
    const char *field, *remedy;
} moei_obstacle;

/* capacity_factor K N / C before rounding: E, or with tau (tau R + Z) / tau for a real expert, tau
   R + Z for others. */
static moe_real moei_even_share(const moe_router_config *c, int real) {
    const int n = MOEI_REAL_EXPERTS(c);
    const moe_real all = c->zero_tau * (moe_real)n + (moe_real)(c->n_experts - n);
    if (n == c->n_experts) return (moe_real)n;
    return real ? all / c->zero_tau : all;
}

/* Whether capacity may drop assignments of a single token outside training. A factor n_experts / k
   that was rounded down still suffices. */
static int moei_may_drop(const moe_router_config *c, int k) {
    if (c->drop_capacity > 0) return 1;
    if (c->predictor && !moei_switches(c)) return 0; /* the factor is that of expert_choice */
    if (moei_factor_drops(c) && c->capacity_factor_eval > 0) {
        const moe_real most = moei_even_share(c, c->zero_tau < MOEI_R(1.0)); /* the larger share's */
        return c->capacity_factor_eval * (moe_real)k < most * MOEI_R(0.999999);
    }
    return c->capacity_bound != MOE_BOUND_NONE;
}

/* Whether a selection reads other tokens outside training. */
static int moei_needs_others(int select) {
    return (moei_select_flags[select] & ((unsigned)MOE_TRAIT_NEEDS_BATCH | MOEI_SELECT_BATCH_IN_TRAINING)) ==
           MOE_TRAIT_NEEDS_BATCH;
}

static moei_obstacle moei_blocks(const char *field, const char *remedy) {
    moei_obstacle o;
    o.field = field;
    o.remedy = remedy;
    return o;
}

static moei_obstacle moei_decoding_obstacle(const moe_router_config *c) {
    if (moei_needs_others(c->select) && !c->predictor)
        return moei_blocks("select", "select = top_k or another token choice");
    if (moei_switches_in(c, 0) && moei_needs_others(c->switch_from))
        return moei_blocks("switch_from", "switch_from = top_k or another token choice");
    if (moei_shares_draws(c)) return moei_blocks("sample_scope", "sample_scope = token");
    if (c->custom_batch)
        return moei_blocks("custom_batch", "a custom stage that reads only its own token (custom_batch = 0)");
    if (moei_clusters_call(c)) return moei_blocks("ac_mode", "ac_mode = running");
    if (moei_compares_heads(c))
        return moei_blocks("attention_heads", "attention_heads = fixed with causal = 1");
    if (c->refine != MOE_REFINE_NONE && !c->causal) return moei_blocks("refine", "causal = 1");
    if (!moei_may_drop(c, c->top_k) && c->k_end > 0 && moei_may_drop(c, c->k_end))
        return moei_blocks("k_end", "capacity_factor_eval = n_experts / k_end, which drops nothing,");
    if (!moei_may_drop(c, c->top_k)) return moei_blocks(NULL, NULL);
    if (c->drop_capacity > 0)
        return moei_blocks("drop_capacity", "capacity_factor_eval = n_experts / top_k instead, which drops nothing,");
    if (moei_factor_drops(c) && (c->zero_tau > MOEI_R(1.0) || (c->zero_tau > 0 && c->zero_tau < MOEI_R(1.0))))
        return moei_blocks("capacity_factor_eval", "capacity_factor_eval = (zero_tau R + Z) / (top_k min(1, "
                                                   "zero_tau)), which drops nothing,");
    return moei_blocks(moei_factor_drops(c) ? "capacity_factor_eval" : "capacity_bound",
                       "capacity_factor_eval = n_experts / top_k, which drops nothing,");
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
    return moei_error(error, MOE_ERR_UNSUPPORTED,
                      "%s = %s has the trait %s: this router cannot decode token by token; %s decodes", o.field,
                      value, moe_trait_name(MOE_TRAIT_NEEDS_BATCH), o.remedy);
}

/* ==== >>code_presets ========================================================================== */

/* Sources of several presets. No public source has these values: the bias_rate of longcat_flash,
   affinity_sum_auto, loss_locality and every switch_share. */
#define MOEI_NGUYEN "Nguyen et al. 2025, Improving routing in sparse mixture of experts with graph of tokens"
#define MOEI_NIELSEN "Nielsen et al. 2025, Tight clusters make specialized experts"
#define MOEI_KRISHNAMURTHY \
    "Krishnamurthy, Watkins, Gaertner 2023, Improving expert specialization in mixture of experts"
#define MOEI_LV "Lv et al. 2025, Autonomy-of-experts models"
#define MOEI_SHAZEER \
    "Shazeer et al. 2017, Outrageously large neural networks: the sparsely-gated mixture-of-experts layer"
/* A router with its gate values mixed between tokens, by similarity and by attention. */
#define MOEI_REFINED(of, settings) \
    {"similarity_" of, "", MOEI_NGUYEN, of " with p_i = sum_j softmax_j(u_i . u_j / tau) r_j", \
     "n_experts=16 top_k=2 refine=similarity " settings, ""}, \
    {"attention_" of, "", MOEI_NGUYEN, \
     of " with p_i = sum_j A'_ij r_j, A' the posterior of the attention head with the least entropy", \
     "n_experts=16 top_k=2 refine=attention " settings, ""},
static const moe_preset moei_presets[] = {
    {"smoe", "sparse_moe", MOEI_SHAZEER,
     "w = softmax over the top K logits",
     "n_experts=16 top_k=2 weight=softmax router_bias=1", ""},
    MOEI_REFINED("smoe", "router_bias=1")
    MOEI_REFINED("glam", "score=linear")
    MOEI_REFINED("xmoe", "score=cosine cosine_dim=8 cosine_learn_tau=1")
    MOEI_REFINED("smoe_dropout", "score=random")
    {"glam", "",
     "Du et al. 2022, GLaM: efficient scaling of language models with mixture-of-experts",
     "smoe without bias, on every other layer of a model",
     "n_experts=16 top_k=2 weight=softmax", ""},
    {"switch", "switch_transformer",
     "Fedus, Zoph, Shazeer 2022, Switch transformers",
     "w = p of the best expert; jitter on u; balance over first choices; capacity",
     "n_experts=16 top_k=1 input=jitter weight=raw loss_balance=0.01 balance_over=first capacity_factor=1.25 "
         "capacity_factor_eval=2", "expert=mlp act=relu"},
    {"gshard", "",
     "Lepikhin et al. 2020, GShard: scaling giant models with conditional computation and automatic sharding",
     "w = p / sum p over the top 2; the second kept with probability 2 w_2; capacity 2 N / E",
     "n_experts=16 top_k=2 weight=sum loss_balance=0.01 balance_over=first capacity_factor=1 drop_rule=gshard",
         "expert=mlp act=relu"},
    {"noisy_topk", "shazeer", MOEI_SHAZEER,
     "w = softmax over the top K of z + n softplus(W_n u); importance and load",
     "n_experts=16 top_k=2 noise=noisy_topk weight=softmax loss_importance=0.1 importance_over=weights unbiased=1 "
         "loss_load=0.1", "expert=mlp act=relu"},
    {"vmoe", "",
     "Riquelme et al. 2021, Scaling vision with sparse mixture of experts",
     "w = p of the top 2, noise 1/E, importance over the clean gate, load",
     "n_experts=16 top_k=2 noise=gaussian weight=raw loss_importance=0.005 importance_over=gate loss_load=0.005 "
         "capacity_factor=1.05 drop_order=priority", "expert=mlp act=gelu"},
    {"xmoe", "",
     "Chi et al. 2022, On the representation collapse of sparse mixture of experts",
     "z = cos(P u, W_e) / tau, tau learned",
     "n_experts=16 top_k=2 score=cosine cosine_dim=8 cosine_learn_tau=1", ""},
    {"xmoe_code", "",
     "published code of Chi et al. 2022",
     "z = (P u) . W_e / |W_e| / tau: the token's length is kept",
     "n_experts=16 top_k=2 score=cosine cosine_dim=8 cosine_keep_length=1 weight=softmax", ""},
    {"smoe_dropout", "",
     "Chen et al. 2023, Sparse MoE as the new dropout",
     "smoe with a frozen random router; K grows to E during training",
     "n_experts=16 top_k=2 score=random weight=softmax k_end=-1", ""},
    {"sigma_moe", "",
     "Csordas, Irie, Schmidhuber 2023, Approximating two-layer feedforward networks for efficient transformers",
     "w = sigmoid(z) of the top K, experts dropped at random in training, entropy of the mean p",
     "n_experts=16 top_k=4 gate=sigmoid weight=raw expert_dropout=0.05 loss_usage_entropy=0.0001",
     "expert=mlp act=relu no_expert_bias=1"},
    {"acmoe", "", MOEI_NIELSEN,
     "u = m * x, m_q large where the cluster of the token is tight",
     "n_experts=16 top_k=2 input=adaptive_clustering weight=softmax", ""},
    {"acmoe_code", "",
     "published code of Nielsen et al. 2025",
     "as acmoe over the current x, with the cosine score that keeps the length",
     "n_experts=16 top_k=2 input=adaptive_clustering ac_mode=code score=cosine cosine_keep_length=1 weight=softmax",
         ""},
    {"acmoe_mix2", "", MOEI_NIELSEN,
     "as acmoe, m mixed over the two best previous experts",
     "n_experts=16 top_k=2 input=adaptive_clustering ac_mix=2 weight=softmax", ""},
    {"acmoe_threshold", "", MOEI_NIELSEN,
     "as acmoe, all experts with p > theta",
     "n_experts=16 input=adaptive_clustering select=threshold weight=sum", ""},
    {"soft_acmoe", "", MOEI_NIELSEN,
     "soft_moe with u = m * x, m mixed over the 8 best previous experts",
     "n_experts=16 input=adaptive_clustering ac_mix=8 select=soft soft_normalise=1", ""},
    {"aoe", "autonomy_of_experts", MOEI_LV,
     "z_e = |reduce_e x|, w = softmax over the top K; balance over tokens, K times smoe's",
     "n_experts=8 top_k=2 score=norm norm_node=down weight=softmax loss_balance=0.01 balance_over=tokens",
         "expert=factorised"},
    {"aoe_code", "",
     "published code of Lv et al. 2025",
     "as aoe, w = softmax over all experts, not renormalized",
     "n_experts=8 top_k=2 score=norm norm_node=down weight=raw loss_balance=0.01", "expert=factorised"},
    {"aoe_top_p", "", MOEI_LV,
     "as aoe_code, the best experts until their p exceeds 0.6; entropy loss",
     "n_experts=8 score=norm norm_node=down select=top_p top_p=0.6 weight=raw loss_entropy=0.0001 loss_balance=0.01",
         "expert=factorised"},
    {"aoe_expert_choice", "", MOEI_LV,
     "as aoe_code, each expert takes the tokens with the largest norm",
     "n_experts=8 score=norm norm_node=down select=expert_choice expert_choice_score=z capacity_factor=2 weight=raw",
         "expert=factorised"},
    {"norm_routing", "",
     "Lv et al. 2025, Autonomy-of-experts models, preliminary study",
     "z_e = |f_e(x)| of existing experts",
     "n_experts=8 top_k=2 score=norm norm_node=output weight=softmax", ""},
    {"locmoe", "",
     "Li et al. 2024, LocMoE: a low-overhead MoE for large language model training",
     "z_e = mean of the e-th block of features; capacity exp(d delta^2/(2 - delta^2))/E of the first batch; locality "
         "loss",
     "n_experts=8 top_k=1 score=grap weight=raw capacity_bound=first loss_balance=0.01 loss_locality=0.1 nodes=2", ""},
    {"locmoe_plus", "",
     "Li et al. 2024, LocMoE+: enhanced router with token feature awareness for efficient LLM pre-training",
     "each expert keeps its closest tokens, up to a fixed sum of their affinity; locality loss; choice by tokens "
         "until 10 % of the steps",
     "n_experts=8 top_k=1 score=grap grap_cosine=1 gate_temperature=0.2 select=affinity affinity_sum_auto=0.6 "
         "weight=raw loss_balance=0.01 loss_locality=0.01 nodes=2 switch_share=0.1", ""},
    {"importance_gate", "", MOEI_KRISHNAMURTHY,
     "y = sum over all experts of p_e f_e(x), p from a small network, importance loss",
     "n_experts=8 score=mlp select=dense weight=raw loss_importance=0.4 unbiased=1", "expert=mlp act=relu"},
    {"dual_temperature", "", MOEI_KRISHNAMURTHY,
     "importance_gate whose experts learn from p_e at temperature T, the gate from p_e at 1",
     "n_experts=8 score=mlp select=dense weight=raw loss_importance=0.4 unbiased=1 expert_temperature=3",
         "expert=mlp act=relu"},
    {"attentive_gate", "", MOEI_KRISHNAMURTHY,
     "z_e = (W_Q h_g) . (W_K h_e) / sqrt(h), h_e the hidden layer of expert e",
     "n_experts=8 score=attentive select=dense weight=raw loss_importance=0.2", "expert=mlp act=relu"},
    {"similarity_gate", "", MOEI_KRISHNAMURTHY,
     "importance_gate with the similarity loss instead",
     "n_experts=8 score=mlp select=dense weight=raw loss_similarity_same=1e-5 loss_similarity_diff=1e-4",
         "expert=mlp act=relu"},
    {"expert_choice", "",
     "Zhou et al. 2022, Mixture-of-experts with expert choice routing",
     "each expert takes its best tokens, two per token on average",
     "n_experts=16 select=expert_choice capacity_factor=2 weight=raw", ""},
    {"mixture_of_depths", "mod",
     "Raposo et al. 2024, Mixture-of-depths: dynamically allocating compute in transformer-based language models",
     "an expert that takes an eighth of each sequence, its best tokens by z; w = p; a linear predictor of its choice "
         "decides in decoding",
     "n_experts=1 top_k=1 gate=sigmoid select=expert_choice expert_choice_scope=sequences capacity_factor=0.125 "
         "weight=raw predictor=1 loss_predictor=1", ""},
    {"hash", "hash_layers",
     "Roller et al. 2021, Hash layers for large sparse models",
     "experts from a table of token ids; set table_size and router.table",
     "n_experts=16 top_k=1 select=hash weight=uniform", "expert=mlp act=relu"},
    {"base", "base_layers",
     "Lewis et al. 2021, BASE layers: simplifying training of large, sparse models",
     "y = a f_e(x) + (1 - a) x, a = sigmoid(x . W_e), e by the best even assignment in training",
     "n_experts=16 top_k=1 gate=sigmoid select=balanced weight=raw", "expert=mlp act=relu add_input=1"},
    {"stablemoe", "",
     "Dai et al. 2022, StableMoE: stable routing strategy for mixture of experts",
     "as base by the largest x . W_e; a student, which sees the token id alone, learns the choices and makes them from "
         "step freeze_at on; set table_size",
     "n_experts=16 top_k=1 gate=sigmoid weight=raw loss_stable_balance=0.3 loss_distill=1 student=1 student_dim=50 "
         "freeze_at=6000",
         "expert=mlp act=relu add_input=1"},
    {"dselect_k", "",
     "Hazimeh et al. 2021, DSelect-k: differentiable selection in the mixture of experts",
     "K learned binary codes with smooth steps pick at most K experts, mixed by a softmax; each code's entropy",
     "n_experts=16 top_k=2 score=dselect gate=identity select=positive weight=sum loss_selector_entropy=0.001", ""},
    {"thor", "",
     "Zuo et al. 2022, Taming sparsely activated transformer with stochastic experts",
     "an expert drawn at random, p = 1/E: one per training call, then one per token; train on two draws with "
         "moe_consistency_loss between them",
     "n_experts=16 top_k=1 score=random gate_temperature=1e6 select=sample sample_at=always sample_scope=call "
         "weight=one", "expert=mlp act=relu"},
    {"sinkhorn", "",
     "Clark et al. 2022, Unified scaling laws for routed language models",
     "choices by a doubly normalized exp(z) in training, w = p of the best",
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
     "sigmoid(cos(u, W_e)) > sigmoid(G_e), equal weights; W orthogonal and short by losses",
     "n_experts=16 score=cosine gate=sigmoid select=threshold threshold=0.5 threshold_learned=1 threshold_sigmoid=1 "
         "threshold_fallback=evaluation weight=uniform loss_diversity=0.01 loss_simplicity=0.01", ""},
    {"competesmoe", "",
     "Nguyen et al. 2025, CompeteSMoE: statistically guaranteed mixture of experts training via competition",
     "smoe; in 7 % of the training calls the largest c_e = mean softplus(f_e(x)) choose, w = c / sum c, and the "
         "router learns softmax(c)",
     "n_experts=16 top_k=2 weight=softmax compete_rate=0.07 loss_distill=0.001 distill=mse loss_balance=0.01", ""},
    {"remoe", "",
     "Wang, Chen, Zhu 2024, ReMoE: fully differentiable mixture-of-experts with ReLU routing",
     "all experts with relu(z) > 0; an L1 loss whose factor, one for the network, keeps K of E open",
     "n_experts=16 top_k=2 gate=relu select=positive weight=raw l1_controller=net", ""},
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
     "w = 16 p of the top 6 of 160 in the 3 best of 8 groups by their best expert; balance per sequence, without the "
         "paper's losses over devices",
     "n_experts=160 top_k=6 select=grouped_top_k groups=8 groups_kept=3 group_score=max weight=raw scale=16 "
         "loss_balance=0.003 balance_scope=sequences",
         "n_shared=2"},
    {"deepseek_v3", "",
     "DeepSeek-AI 2024, DeepSeek-V3 technical report",
     "sigmoid, bias in selection only, w = 2.5 p / sum p of 8 of 256 in the 4 best of 8 groups by their two best "
         "experts",
     "n_experts=256 top_k=8 gate=sigmoid select=grouped_top_k groups=8 groups_kept=4 group_score=top2_sum "
         "selection_bias=1 bias_rate=0.001 weight=sum scale=2.5 loss_balance=0.0001 balance_scope=sequences",
         "n_shared=1"},
    {"deepseek_v4", "",
     "DeepSeek-V4 as shipped, after its first three layers",
     "r = sqrt(softplus(z)), bias in selection only, w = 1.5 p / sum p over 6 of 256",
     "n_experts=256 top_k=6 gate=sqrt_softplus selection_bias=1 bias_rate=0.001 weight=sum scale=1.5",
         "n_shared=1 swiglu_limit=10"},
    {"llama4", "",
     "Llama 4 as shipped",
     "top 1, sigmoid(z) on the expert's input; a shared expert",
     "n_experts=16 top_k=1 gate=sigmoid weight=raw apply_to=input", "n_shared=1"},
    {"gpt_oss", "",
     "OpenAI 2025, gpt-oss model card",
     "w = softmax over the top 4 logits of 128, router bias",
     "n_experts=128 top_k=4 router_bias=1 weight=softmax",
         "expert_bias=1 swiglu_alpha=1.702 swiglu_limit=7 swiglu_offset=1"},
    {"dbrx", "",
     "DBRX as shipped",
     "w = p / sum p over the top 4 of 16",
     "n_experts=16 top_k=4 weight=p_norm weight_p=1", ""},
    {"grok1", "",
     "Grok-1 as shipped",
     "w = p of the top 2 of 8",
     "n_experts=8 top_k=2 weight=raw", "expert=glu act=gelu_tanh"},
    {"phi35_moe", "",
     "Abdin et al. 2024, Phi-3 technical report; Liu et al. 2023, Sparse backpropagation for MoE training",
     "two picks in turn, each with a softmax over its near rivals",
     "n_experts=16 top_k=2 weight=sparsemixer sparsemixer_sample=1", ""},
    {"granite_moe", "",
     "Granite MoE as shipped",
     "w = softmax over the top 8 logits of 40",
     "n_experts=40 top_k=8 weight=softmax", ""},
    {"gemma4", "",
     "Gemma 4 as shipped",
     "the router sees the raw residual (router_x), rms-scaled; w = s_e p / sum p over the top 8 of 128",
     "n_experts=128 top_k=8 input=scaled_rms raw_input=1 weight=sum expert_scale=1", "expert=glu act=gelu_tanh"},
    {"minimax_m2", "",
     "MiniMax-M2 as shipped",
     "r = sigmoid(z), bias in selection only, w = p / sum p over 8 of 256",
     "n_experts=256 top_k=8 gate=sigmoid selection_bias=1 bias_rate=0.001 weight=sum", ""},
    {"nemotron3", "",
     "Nemotron 3 Super as shipped; NVIDIA 2026, LatentMoE: toward optimal accuracy per FLOP and parameter in mixture "
         "of experts",
     "experts of a quarter of the width; r = sigmoid(z), bias in selection only, w = 5 p / sum p over 22 of 512; one "
         "shared expert, here a swiglu",
     "n_experts=512 top_k=22 gate=sigmoid selection_bias=1 bias_rate=0.001 weight=sum scale=5 "
         "loss_balance=0.0001",
         "expert=mlp act=relu2 no_expert_bias=1 d_latent=-4 n_shared=1"},
    {"moe_pp", "",
     "Jin et al. 2024, MoE++: accelerating mixture-of-experts methods with zero-computation experts",
     "8 experts with matrices, a zero, a copy and two constant ones, top 2; z += W_g times the previous layer's z",
     "n_experts=12 top_k=2 n_zero=1 n_copy=1 n_constant=2 router_residual=1 weight=sum weight_over=nonzero "
         "capacity_factor=0.55 loss_balance=0.000833333 balance_over=tokens zero_tau=0.75", ""},
    {"adamoe", "",
     "Zeng et al. 2024, AdaMoE: token-adaptive routing with null experts for mixture-of-experts language models",
     "top 4 of 8 experts and 16 that give 0; w = p / sum p over those with matrices",
     "n_experts=24 top_k=4 n_zero=16 weight=sum weight_over=real loss_balance=0.0001 balance_over=tokens "
         "zero_average=1",
         ""},
    {"longcat_flash", "longcat",
     "Meituan LongCat team 2025, LongCat-Flash technical report",
     "w = 6 p of the top 12 of 512 experts and 256 that give x; a bias in selection only keeps 8 of the 512 per token",
     "n_experts=768 top_k=12 n_copy=256 selection_bias=1 bias_rate=0.05 bias_rule=proportional bias_real=8 weight=raw "
         "scale=6", ""},
    {"expert_threshold", "",
     "2026, Expert threshold routing for autoregressive language modeling with dynamic computation allocation and load "
         "balancing",
     "all experts with z >= c_e, c_e the running mean of the expert's C-th largest z, one expert per token on average; "
         "expert_choice in the first tenth of the training",
     "n_experts=16 gate=sigmoid select=expert_threshold capacity_factor=1 weight=raw switch_from=expert_choice "
         "switch_share=0.1", ""},
    {"moge", "pangu",
     "Tang et al. 2025, Pangu Pro MoE: mixture of grouped experts for efficient sparsity",
     "w = s_e p of the best expert in each of 8 groups of 8, so that devices with a group each do the same work; four "
         "shared experts",
     "n_experts=64 top_k=8 select=grouped_each groups=8 weight=raw expert_scale=1", "n_shared=4"},
    {"grok2", "",
     "Grok-2 as shipped",
     "w = p of the top 2 of 8, z = 30 tanh(z / 30)",
     "n_experts=8 top_k=2 logit_cap=30 weight=raw", "expert=glu act=gelu_tanh"},
    {"trinity", "",
     "Singh et al. 2026, Arcee Trinity Large technical report",
     "sigmoid, bias in selection only, moved by a momentum of soft-clamped steps; w = p / sum p over 4 of 256",
     "n_experts=256 top_k=4 gate=sigmoid selection_bias=1 bias_rate=0.0005 bias_rule=smebu weight=sum", "n_shared=1"},
    {NULL, NULL, NULL, NULL, NULL, NULL}};

const moe_preset *moe_presets(void) { return moei_presets; }

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
    if (config == NULL) return MOEI_REFUSE(error, "config must not be NULL");
    if (preset == NULL)
        return moei_error(error, MOE_ERR_NOT_FOUND, "%s: unknown preset; moe_presets lists all",
                          name);
    memset(&made, 0, sizeof made);
    status = moe_fields_apply(moei_router_fields, &made, preset->router, error);
    made.preset = 1 + (int)(preset - moei_presets);
    if (status == MOE_OK) *config = made;
    return status;
}

/* ==== >>code_parameters ======================================================================= */

/* Fills in a parameter of the given dimensions; 0 if its size does not fit size_t. */
static int moei_parameter_set(moe_parameter *out, int n_dims, size_t n0, size_t n1, size_t n2, unsigned flags,
                              moe_real value, moe_real init_std) {
    out->n_dims = n_dims;
    out->shape[0] = n0;
    out->shape[1] = n_dims > 1 ? n1 : 1;
    out->shape[2] = n_dims > 2 ? n2 : 1;
    out->shape[3] = 1;
    out->flags = flags;
    out->init_value = value;
    out->init_std = init_std;
    return n0 < (size_t)-1 && moei_mul(out->shape[0], out->shape[1], &out->count) &&
           moei_mul(out->count, out->shape[2], &out->count);
}

/* A bias or gain: starts at one value, is not decayed. */
static int moei_parameter_vector(moe_parameter *out, size_t n, unsigned flags, moe_real value) {
    return moei_parameter_set(out, 1, n, 1, 1, flags | (unsigned)MOE_PARAM_NO_DECAY, value, 0);
}

/* A matrix; its initial standard deviation preserves the magnitude of activations. */
static int moei_parameter_matrix(moe_parameter *out, size_t rows, size_t columns, unsigned flags) {
    return moei_parameter_set(out, 2, rows, columns, 1, flags, 0,
                              MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)columns));
}

static size_t moei_router_hidden(const moe_router_config *c) {
    return (size_t)(c->router_hidden > 0 ? c->router_hidden : c->d_model);
}

/* m = ceil(log2 E), at least 1. */
static size_t moei_code_bits(size_t experts) {
    size_t bits = 1;
    while (experts > 1 && (experts - 1) >> bits != 0) bits++;
    return bits;
}

static moe_real moei_threshold_start(const moe_router_config *c) {
    return c->threshold_sigmoid ? MOEI_F(log)(c->threshold / (MOEI_R(1.0) - c->threshold)) : c->threshold;
}

#define MOEI_MATRIX(rows, columns, kind) moei_parameter_matrix(&made, rows, columns, kind)
#define MOEI_VECTOR(n, kind, value) moei_parameter_vector(&made, n, kind, value)
#define MOEI_TABLE(rows, columns, kind, value, init_std) \
    moei_parameter_set(&made, 2, rows, columns, 1, kind, value, init_std)
#define MOEI_ARRAY(n, kind, columns) \
    moei_parameter_set(&made, 1, n, 1, 1, kind, 0, MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)(columns)))
#define MOEI_PARAMETER_FOUND(value, name, condition, shape) \
    if (index == (value) && (condition)) fits = (shape);
#define MOEI_PARAMETER_NAME(value, name, condition, shape) name,

MOEI_TOOL const char *moei_router_parameter_name(int index) {
    static const char *const names[] = {MOE_ROUTER_PARAMETERS(MOEI_PARAMETER_NAME, , , , )};
    return names[index];
}

moe_status moe_router_parameter(const moe_router_config *c, int index, moe_parameter *out) {
    const int soft = moei_is_soft(c), cosine = c->score == MOE_SCORE_COSINE;
    const int has_weight = !soft && (moei_score_flags[c->score] & MOEI_SCORE_WEIGHT) != 0,
              mlp = c->score == MOE_SCORE_MLP;
    const int attentive = c->score == MOE_SCORE_ATTENTIVE, dselect = c->score == MOE_SCORE_DSELECT;
    const int clusters = c->input == MOE_INPUT_ADAPTIVE_CLUSTERING;
    const int cutoff = moei_has_selection(c, MOE_SELECT_EXPERT_THRESHOLD);
    const unsigned kind =
        moei_score_flags[c->score] & MOEI_SCORE_TRAINED ? (unsigned)MOE_PARAM_TRAINED : (unsigned)MOE_PARAM_FROZEN;
    const size_t E = (size_t)c->n_experts, d = (size_t)c->d_model;
    const size_t K = (size_t)c->top_k;
    const size_t h = moei_router_hidden(c), m = moei_code_bits(E);
    const size_t width = cosine && c->cosine_dim > 0 ? (size_t)c->cosine_dim : d;
    size_t soft_slots;
    moe_parameter made;
    int fits = -1; /* -1: no such parameter */
    /* moei_parameter_set then fails */
    if (!moei_mul(E, (size_t)c->slots, &soft_slots)) soft_slots = (size_t)-1;
    memset(&made, 0, sizeof made);
    MOE_ROUTER_PARAMETERS(MOEI_PARAMETER_FOUND, MOEI_MATRIX, MOEI_VECTOR, MOEI_TABLE, MOEI_ARRAY)
    if (fits < 0) return MOE_ERR_NOT_FOUND;
    if (!fits) return MOE_ERR_OVERFLOW;
    made.name = moei_router_parameter_name(index);
    *out = made;
    return MOE_OK;
}

/* ==== >>code_workspace ======================================================================== */

/* What calls of a configuration need beyond the common case; found once by moe_router_init, so that
   calls skip the rest. */
enum {
    MOEI_PART_MEMORY = 1,    /* arrays beyond those of every call */
    MOEI_PART_MOVES = 2,     /* schedules, state or competition change the configuration from call to call */
    MOEI_PART_SUPPLIES = 4,  /* the call must supply more than x */
    MOEI_PART_NO_DECODING = 8,
    MOEI_PART_BATCH = 16     /* tokens of different sequences are routed together */
};

enum {
    MOEI_COLUMNS = 16,     /* columns transposed at a time: a cache line of floats */
    MOEI_REFINE_ROWS = 96, /* rows of a block: the keys are packed once per block */
    /* rows per step if causal, because some keys are later than some rows */
    MOEI_REFINE_STEP = 24
};

/* Whether loss_distill reads the caller's teacher: a student's teacher is this router, and
   competing experts are the teacher. */
MOEI_TOOL int moei_wants_teacher(const moe_router_config *c) {
    return c->loss_distill > 0 && !c->student && !(c->compete_rate > 0);
}

/* Whether a linear router learns from this one: a student or a predictor. */
#define MOEI_TEACHES(c) ((c)->student || (c)->predictor)

/* Arrays that only some configurations need: rows (type, name, when, rows, columns, elements per
   token). Elements per token 0: the array is for the call's own tokens or independent of tokens.
   Else it has rows for all tokens of a batch, and the own tokens start at their row. The names in
   rows are variables of moei_arrays_layout. */
#define MOEI_ARRAYS(X) \
    /* of one stage */ \
    X(moe_real, input_factor, jitter || clusters || rms, n, rms ? 1 : d, 0) \
    X(moe_real, clusters, clusters, experts + 1, d, 0) \
    X(moe_real, hidden, width > 0, n, width, 0) \
    X(moe_real, hidden_act, width > 0 && !cosine, n, width, 0) \
    X(moe_real, query, attentive || c->score == MOE_SCORE_DSELECT, n, width, 0) \
    X(moe_real, keyed, attentive, n, width, 0) \
    X(moe_real, lengths, cosine, n + experts, 1, 0) \
    X(moe_real, columns, soft || cutoffs || moei_has_selection(c, MOE_SELECT_EXPERT_CHOICE), MOEI_COLUMNS, \
        all + MOEI_COLUMNS, 0) \
    X(moe_real, unit, c->soft_normalise || (similarity && c->similarity_scale == MOE_SIMILARITY_L2), n, d, 0) \
    X(moe_real, keys, c->soft_normalise || c->similarity_learned, soft ? choices : n, d, 0) \
    X(moe_real, block, refine, block, block_width, 0) \
    X(moe_real, entropy, c->lower_entropy_only, n, 1, 0) \
    X(moe_real, key_terms, attention, n, (size_t)c->heads, 0) \
    X(moe_real, past_u, past, n, d, 0) \
    X(moe_real, past_gate, past, n, experts, 0) \
    X(uint64_t, flow_steps, balanced, 1, 1, 0) \
    X(int64_t, flow_mean, balanced, experts, 1, 0) \
    X(int64_t, flow_price, balanced, experts + 1, 1, 0) \
    X(int64_t, flow_cost, balanced, experts + 1, 1, 0) \
    X(int64_t, flow_loss, balanced, experts, experts, 0) \
    X(int32_t, flow_mover, balanced, experts, experts, 0) \
    X(int32_t, flow_before, balanced, experts + 1, 1, 0) \
    X(int32_t, flow_first, balanced, experts, 1, 0) \
    X(unsigned char, flow_extra, balanced, experts, 1, 0) \
    X(unsigned char, flow_done, balanced, experts + 1, 1, 0) \
    X(int32_t, picks, training && c->sparsemixer_sample, all, choices, choices) \
    X(moe_real, pick_factors, training && c->sparsemixer_sample, all, choices, choices) \
    X(unsigned char, excluded, training && c->expert_dropout > 0, all, experts, 0) \
    X(moe_real, selectable, training && c->expert_dropout > 0, all, experts, 0) \
    X(moe_real, scored_logits, training && (c->router_residual || c->logit_cap > 0), n, experts, 0) \
    /* read by later stages */ \
    X(moe_real, selectors, training && (c->loss_selector_entropy > 0 || c->loss_selector_reach > 0), all, 2, 2) \
    X(moe_real, cutoffs, cutoffs, experts + 1, 1, 0) \
    X(moe_real, student_logits, teaches, all, experts, experts) \
    X(moe_real, student_input, c->student_dim > 0, n, (size_t)c->student_dim, 0) \
    X(moe_real, clean_logits, noisy, all, experts, experts) \
    X(moe_real, clean_gate, noisy, all, experts, experts) \
    X(moe_real, noise_raw, noisy, all, experts, experts) \
    X(moe_real, noise_value, noisy, all, experts, experts) \
    /* gradients */ \
    X(moe_real, d_student, training && teaches, all, experts, experts) \
    X(moe_real, d_student_input, training && c->student_dim > 0, n, (size_t)c->student_dim, 0) \
    X(moe_real, d_clean, noisy, all, experts, experts) \
    X(moe_real, d_clean_gate, noisy, all, experts, experts) \
    X(moe_real, d_noise, noisy, all, experts, experts) \
    X(moe_real, d_logits, training, all, columns, experts) \
    X(moe_real, d_gate, training, all, columns, experts) \
    X(moe_real, d_refined, training && (soft || refine), all, columns, 0) \
    X(moe_real, d_weights, training, all, experts, experts) \
    X(moe_real, d_final, training, all, experts, experts) \
    X(moe_real, d_input, training, n, d, 0) \
    X(moe_real, d_unused, training, d, 1, 0) \
    X(moe_real, d_hidden, training && width > 0, n, width, 0) \
    X(moe_real, d_query, training && attentive, n, width, 0) \
    X(moe_real, d_keyed, training && attentive, n, width, 0) \
    X(moe_real, d_block, training && refine, block, block_width, 0) \
    X(moe_real, d_unit, training && (c->soft_normalise || refine), n, d, 0) \
    X(moe_real, d_keys, training && (c->soft_normalise || refine), soft ? choices : n, d, 0) \
    /* gathered by a batch with global routing; after the sequences their end, their number, and \
       the mask of supplied arrays */ \
    X(unsigned char, batch_mask, global, all, 1, 0) \
    X(int32_t, batch_sequences, global, all + 3, 1, 0) \
    X(int32_t, batch_ids, global && moei_has_selection(c, MOE_SELECT_HASH), all, 1, 0) \
    X(int32_t, batch_given, global, all, choices, 0) \
    X(int32_t, batch_home, global && training && c->loss_locality > 0, all, 1, 0) \
    X(int32_t, clusters_of, global && clusters, all, 1, 1) \
    X(moe_real, batch_h, \
        global && clusters && (moei_clusters_call(c) || (training && c->ac_mode == MOE_AC_RUNNING)), all, d, \
       0) X(moe_real, batch_teacher, global && training && moei_wants_teacher(c), all, experts, \
       0) X(moe_real, batch_x, global && training && moei_loss_factor(c, MOE_LOSS_SIMILARITY) > 0, all, d, 0)

/* The private arrays of a call, in the workspace after the public ones. Every call has the first
   five. */
#define MOEI_ARRAY_MEMBER(type, name, when, rows, columns, per_token) type *name;
typedef struct moei_scratch {
    moe_real *column;          /* [N] */
    moe_real *row;             /* [3, max(E, nodes)] */
    int32_t *order;            /* [max(N, E + 1)] */
    moe_real *base_weights;    /* [N,max_choices] choice_weights without the expert's own factor */
    moe_real *input;           /* [N,d] */
    moe_real *d_probabilities; /* d_refined, or d_gate where p is r */
    MOEI_ARRAYS(MOEI_ARRAY_MEMBER)
} moei_scratch;

/* The slots of all experts, per sequence. */
static size_t moei_slot_total(const moe_router_config *c) { return (size_t)c->n_experts * (size_t)c->slots; }

static size_t moei_max_choices(const moe_router_config *c) {
    int all = !(moei_select_flags[c->select] & MOEI_SELECT_AT_MOST_K) ||
              (!(moei_select_flags[c->switch_from] & MOEI_SELECT_AT_MOST_K) && moei_switches(c));
    if (moei_is_soft(c)) return moei_slot_total(c);
    return (size_t)(all ? c->n_experts : c->top_k > c->k_end ? c->top_k : c->k_end);
}

/* The elements that the score stores per token: hidden units of mlp, projected tokens of cosine. */
static size_t moei_score_width(const moe_router_config *c) {
    if (c->score == MOE_SCORE_MLP || c->score == MOE_SCORE_ATTENTIVE) return moei_router_hidden(c);
    if (c->score == MOE_SCORE_DSELECT) return (size_t)c->top_k * (moei_code_bits((size_t)c->n_experts) + 1);
    return c->score == MOE_SCORE_COSINE ? (size_t)c->cosine_dim : 0;
}

/* The arrays of every call, as one block: integers, then moe_real, then bytes, so that only two
   positions need padding. */
static void moei_common_layout(const moe_router_config *c, size_t n, moei_layout *l, moe_routing *r, moei_scratch *m) {
    size_t experts = (size_t)c->n_experts, choices = moei_max_choices(c);
    size_t columns = moei_is_soft(c) ? choices : experts; /* columns of the logits */
    size_t wide = (size_t)c->nodes > experts ? (size_t)c->nodes : experts, order = n > experts ? n : experts + 1;
    size_t bytes = 0;
    size_t cells, pairs, index, integers;
    uint64_t reals = 2 * (uint64_t)columns + experts + choices + 1; /* per token */
    uint64_t token =
        reals * sizeof(moe_real) + choices * (sizeof(moe_assignment) + sizeof(int32_t) + 1) + sizeof(int32_t) + experts;
    index = (3 * experts + 1 + 7) / 8 * 8;
    if (token > (size_t)-1 || !moei_mul(n, (size_t)token, &bytes) ||
        !moei_add(bytes, order * sizeof(int32_t), &bytes) ||
        !moei_add(bytes, index * sizeof(size_t) + 3 * wide * sizeof(moe_real) + 16, &bytes))
        l->overflow = 1;
    r->max_choices = choices;
    r->plan.offsets = (size_t *)moei_take(l, bytes, 1);
    if (r->plan.offsets == NULL) return;
    cells = n * experts;
    pairs = n * choices;
    integers = (pairs + n + order + 3) / 4 * 4;
    r->counts = r->plan.offsets + experts + 1;
    r->first_counts = r->counts + experts;
    r->choices = (int32_t *)(void *)(r->plan.offsets + index);
    r->n_choices = r->choices + pairs;
    m->order = r->n_choices + n;
    r->logits = (moe_real *)(void *)(r->choices + integers);
    r->probabilities = r->gate = r->logits + n * columns; /* without a refine stage p is r */
    r->plan.assignments = (moe_assignment *)(void *)(r->gate + n * columns);
    m->base_weights = r->choice_weights = (moe_real *)(void *)(r->plan.assignments + pairs);
    m->column = r->choice_weights + pairs;
    m->row = m->column + n;
    r->weights = m->row + 3 * wide;
    r->selected = (unsigned char *)(void *)(r->weights + cells);
    r->kept = r->selected + cells;
}

static void *moei_take_cells(moei_layout *l, size_t rows, size_t columns, size_t size) {
    size_t bytes = 0;
    if (!moei_mul(columns, size, &bytes)) l->overflow = 1;
    return moei_take(l, rows, bytes);
}

/* The other arrays, for n own tokens among `all`. */
#define MOEI_ARRAY_LAYOUT(type, name, when, rows, columns, per_token) \
    m->name = (when) ? (type *)moei_take_cells(l, rows, columns, sizeof(type)) : NULL;
static void moei_arrays_layout(const moe_router_config *c, size_t n, size_t all, int global, int training,
                               moei_layout *l, moe_routing *r, moei_scratch *m) {
    const size_t experts = (size_t)c->n_experts, d = (size_t)c->d_model;
    const size_t width = moei_score_width(c), choices = moei_max_choices(c);
    const int soft = moei_is_soft(c), jitter = MOEI_IS(INPUTS, c->input, MOE_INPUT_JITTER);
    const int rms = MOEI_IS(INPUTS, c->input, MOE_INPUT_SCALED_RMS);
    const int clusters = MOEI_IS(INPUTS, c->input, MOE_INPUT_ADAPTIVE_CLUSTERING);
    const int cosine = MOEI_IS(SCORES, c->score, MOE_SCORE_COSINE);
    const int attentive = MOEI_IS(SCORES, c->score, MOE_SCORE_ATTENTIVE);
    const int similarity = MOEI_IS(REFINES, c->refine, MOE_REFINE_SIMILARITY);
    const int attention = MOEI_IS(REFINES, c->refine, MOE_REFINE_ATTENTION);
    const int refine = similarity || attention, past = refine && c->causal && !training;
    const int noisy = training && c->noise != MOE_NOISE_NONE,
              balanced = training && moei_has_selection(c, MOE_SELECT_BALANCED);
    const int teaches = MOEI_TEACHES(c) || (training && c->compete_rate > 0);
    const int cutoffs = training && moei_has_selection(c, MOE_SELECT_EXPERT_THRESHOLD);
    const size_t columns = soft ? choices : experts, block = moei_smaller(n, MOEI_REFINE_ROWS);
    size_t block_width = 0;
    if (!moei_mul(n, attention && c->attention_heads == MOE_HEADS_ALL ? (size_t)c->heads : 1, &block_width))
        l->overflow = 1;
    MOEI_ARRAYS(MOEI_ARRAY_LAYOUT)
    m->d_probabilities = m->d_refined != NULL ? m->d_refined : m->d_gate;
    if (soft || refine) r->probabilities = moei_take_reals(l, all, columns);
    if (c->expert_scale) m->base_weights = moei_take_reals(l, all, choices);
    if (training) r->d_weight_in = moei_take_reals(l, n, choices);
    if (training) r->d_weight_out = moei_take_reals(l, n, choices);
}

/* Whether a token's experts depend on tokens of other sequences, also outside training. */
static int moei_crosses_sequences(const moe_router_config *c) {
    if (moei_clusters_call(c)) return 1;
    if (moei_is_soft(c)) return 0;
    if (moei_needs_others(c->select) || c->custom_batch) return 1;
    if (moei_switches_in(c, 0) && moei_needs_others(c->switch_from)) return 1;
    return moei_has_capacity(c);
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
    moei_arrays_layout(c, 1, 1, 0, 0, &l, &r, &m);
    if (l.used > none || l.overflow) parts |= MOEI_PART_MEMORY;
    if (moei_has_schedule(c) || c->switch_at > 0 || c->freeze_at > 0 || c->l1_controller || c->compete_rate > 0)
        parts |= MOEI_PART_MOVES;
    if ((moe_router_traits(c) & supplied) || moei_is_soft(c) || c->loss_locality > 0 ||
        c->score == MOE_SCORE_CUSTOM || c->compete_rate > 0)
        parts |= MOEI_PART_SUPPLIES;
    if (moei_decoding_obstacle(c).field != NULL) parts |= MOEI_PART_NO_DECODING;
    if (moei_crosses_sequences(c)) parts |= MOEI_PART_BATCH;
    return parts;
}

moe_status moe_router_init(moe_router *router, const moe_router_config *config, const moe_kernels *kernels,
                           moe_error *error) {
    moe_router made;
    moe_parameter parameter;
    moe_status status;
    int index;
    if (router == NULL) return MOEI_REFUSE(error, "router must not be NULL");
    memset(&made, 0, sizeof made);
    status = moe_router_check(config, &made.config, error);
    if (status != MOE_OK) return status;
    for (index = 0; index < MOE_ROUTER_PARAMETER_COUNT; index++)
        if (moe_router_parameter(&made.config, index, &parameter) != MOE_ERR_NOT_FOUND)
            made.present |= (uint64_t)1 << index;
    made.parts = moei_router_parts(&made.config);
    made.kernels = kernels != NULL ? kernels : moe_kernels_select(MOE_KERNELS_C);
    *router = made;
    return MOE_OK;
}

/* Lays out a routing of n own tokens among `all`; with a NULL workspace it counts the bytes. */
static void moei_route_layout(const moe_router *router, size_t n, size_t all, int global, int training,
                              moei_layout *l, moe_routing *r, moei_scratch *m) {
    /* field by field, because moe_route sets most others */
    r->n_real = r->n_dropped = r->capacity = r->capacity_zero = r->plan.rows = 0;
    r->capacity_bound = r->bound_now = r->affinity_now = 0;
    r->capacity_clamped = 0;
    r->u = r->clean_logits = r->predicted = NULL;
    r->d_weight_in = r->d_weight_out = NULL;
    memset(r->loss, 0, sizeof r->loss);
    moei_common_layout(&router->config, all, l, r, m);
    m->clusters_of = NULL; /* read even if the other private arrays do not exist */
    m->cutoffs = NULL;
    m->batch_h = NULL;
    m->batch_x = NULL;
    if (training || global || (router->parts & MOEI_PART_MEMORY))
        moei_arrays_layout(&router->config, n, all, MOEI_KEPT(EXTRAS, MOE_EXTRA_BATCH) && global,
                           MOEI_KEPT(EXTRAS, MOE_EXTRA_TRAINING) && training, l, r, m);
    m->input = moei_take_reals(l, n, (size_t)router->config.d_model); /* last: decoding reuses it */
}

/* Whether a call routes globally: the tokens of all processes of its batch are routed as in one
   call. */
static int moei_is_global(const moe_router *router, const moe_call *call) {
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_BATCH) || call->batch == NULL || moei_is_soft(&router->config)) return 0;
    return call->training || (router->parts & MOEI_PART_BATCH) != 0;
}

/* The private arrays of a routing that moe_route has filled in. */
MOEI_TOOL void moei_scratch_of(const moe_router *router, const moe_call *call, const moe_routing *routing,
                                  moei_scratch *m) {
    moei_layout l = moei_layout_begin(routing->memory);
    size_t n = call->n_past + call->n_tokens;
    int global = moei_is_global(router, call);
    moe_routing r;
    moei_route_layout(router, n, global ? call->batch->total : n, global, call->training, &l, &r, m);
}

static moe_status moei_route_bytes(const moe_router *router, size_t n, size_t all, int global, int training,
                                   size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_routing r;
    moei_scratch m;
    if (!MOEI_FITS_INT32(all)) return MOE_ERR_OVERFLOW;
    moei_route_layout(router, n, all, global, training, &l, &r, &m);
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
    call.batch = &batch;
    call.training = training;
    if (!moei_is_global(router, &call)) return moei_route_bytes(router, n_tokens, n_tokens, 0, training, bytes);
    return moei_route_bytes(router, n_tokens, total, 1, training, bytes);
}

/* ==== threads ================================================================================= */

#ifdef _OPENMP
MOEI_TOOL void moei_openmp_run(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    int i;
    (void)ctx;
#pragma omp parallel for schedule(static, 1) num_threads(count)
    for (i = 0; i < count; i++) task(work, i);
}
#endif

/* The threads of a call: the caller's, or OpenMP's where the compiler has it on, or one. */
MOEI_TOOL moe_parallel moei_team(const moe_call *call) {
    moe_parallel team;
    memset(&team, 0, sizeof team);
    team.threads = 1;
    if (call->parallel != NULL) {
        team = *call->parallel;
        if (team.threads < 1 || team.run == NULL) team.threads = 1;
        return team;
    }
#ifdef _OPENMP
    if (!omp_in_parallel()) {
        team.threads = omp_get_max_threads();
        team.run = moei_openmp_run;
    }
#endif
    return team;
}

/* Whether to multiply `rows` rows by matrices of so many weights each takes less than to start
   threads, a few microseconds. The time of one is estimated in nanoseconds: one for 50
   multiplications or 20 bytes beyond the second-level cache. */
MOEI_TOOL int moei_is_short(double weights, size_t rows, size_t matrices) {
    double bytes = weights * (double)matrices * (double)sizeof(moe_real) - 1e6;
    return weights * (double)rows / 50.0 + (bytes > 0.0 ? bytes / 20.0 : 0.0) < 4e4;
}

/* The threads for such a product. */
MOEI_TOOL moe_parallel moei_team_for(const moe_call *call, double weights, size_t rows, size_t matrices) {
    moe_parallel team;
    if ((call->parallel != NULL && call->parallel->always) || !moei_is_short(weights, rows, matrices))
        return moei_team(call);
    memset(&team, 0, sizeof team);
    team.threads = 1;
    return team;
}

/* ==== >>code_call ============================================================================= */

/* The state that the stages of one call share. Gradients are set in the backward pass only. */
typedef struct moei_pass {
    const moe_router *router;
    const moe_kernels *k;
    const moe_router_config *c; /* the router's, or effective */
    const moe_call *call;
    moe_routing *r;
    size_t n, experts, d;
    size_t least;      /* capacity_min or C_min, the larger one */
    moe_status status; /* of a custom stage */
    int frozen;        /* past freeze_at */
    int competes;      /* the experts compete in this call */
    int noisy;         /* noise is added to the logits */
    unsigned supplied; /* MOEI_HAS_ bits of the batch in global routing, else 0 */
    /* 1: the call's own tokens of a batch with global routing; other processes' tokens come before
       and after them */
    int is_part;
    size_t before, after;
    /* refine: number of past tokens, and that plus the call's; u and gate of all of them */
    size_t past, span;
    const moe_real *all_u, *all_gate;
    moe_real *const *d_tensors;
    moe_real *d_activations;
    moei_scratch m;
    /* the scheduled configuration of this step, if there is a schedule */
    moe_router_config effective;
} moei_pass;

/* Whether noise is added to the logits; a constant 0 in builds without training. */
#define MOEI_IS_NOISY(s) (MOEI_KEPT(EXTRAS, MOE_EXTRA_TRAINING) && (s)->noisy)

/* Flags that processes exchange per token: it is real, a sequence begins here, and the optional
   arrays of the call, so that a process without tokens behaves like the others. Rows (bit, value,
   member of moe_call). */
#define MOEI_SUPPLIED(X) \
    X(MOEI_HAS_GIVEN, 4, given) X(MOEI_HAS_HOME, 8, token_machine) X(MOEI_HAS_NOISE, 16, noise) \
        X(MOEI_HAS_JITTER, 32, jitter) \
        X(MOEI_HAS_DISTANCES, 64, distances)
#define MOEI_SUPPLIED_ANY(bit, value, member) (value) +
enum {
    MOEI_REAL_TOKEN = 1,
    MOEI_BEGINS = 2,
    MOEI_SUPPLIED(MOEI_VALUE_BIT) MOEI_HAS = MOEI_SUPPLIED(MOEI_SUPPLIED_ANY) 0
};

#define MOEI_SUPPLIED_BIT(bit, value, member) \
    if (call->member != NULL) bits |= (value);
static unsigned moei_supplied(const moe_call *call) {
    unsigned bits = 0;
    MOEI_SUPPLIED(MOEI_SUPPLIED_BIT)
    return bits;
}

static int moei_is_real(const moe_call *call, size_t t) { return call->mask == NULL || call->mask[t] != 0; }

static size_t moei_sequence_count(const moe_call *call) { return call->sequences != NULL ? call->n_sequences : 1; }

/* The tokens of sequence i; 0: there are fewer. */
static int moei_sequence(const moe_call *call, size_t i, size_t *from, size_t *to) {
    if (i >= moei_sequence_count(call)) return 0;
    *from = call->sequences != NULL ? (size_t)call->sequences[i] : 0;
    *to = call->sequences != NULL ? (size_t)call->sequences[i + 1] : call->n_tokens;
    return 1;
}

/* How many of the tokens [from, to) are not padding. */
static size_t moei_real_tokens(const moe_call *call, size_t from, size_t to) {
    size_t t, real = to - from;
    for (t = from; t < to && call->mask != NULL; t++) real -= call->mask[t] == 0;
    return real;
}

/* x/y; 0 if y is 0. */
static moe_real moei_ratio(moe_real x, moe_real y) { return y < 0 || y > 0 ? x / y : 0; }

/* The same in a backward pass; 0 also if y is so small that the slope would not be finite. */
MOEI_TOOL moe_real moei_slope(moe_real x, moe_real y) {
    const moe_real least = MOE_REAL_IS_DOUBLE ? (moe_real)1e-290 : MOEI_R(1e-30);
    return y < -least || y > least ? x / y : 0;
}

static void moei_fill(moe_real *v, size_t n, moe_real value) {
    size_t i;
    for (i = 0; i < n; i++) v[i] = value;
}

static const moe_real *moei_tensor(const moei_pass *s, int index) { return s->router->tensors[index]; }

/* The array that receives the gradient of a parameter, or NULL. Past freeze_at a router with a
   student still learns: only its student is frozen. */
MOEI_TOOL moe_real *moei_gradient(const moei_pass *s, int index) {
    return s->d_tensors != NULL && (!s->frozen || s->c->student) ? s->d_tensors[index] : NULL;
}

/* 1/|v|, or 0 if |v| < 1e-12: such a vector has cosine 0 and passes no gradient. */
static moe_real moei_inverse_length(const moe_kernels *k, const moe_real *v, size_t n) {
    moe_real largest = 0, sum = moe_dot(k, n, v, v), length;
    size_t i;
    if (sum > MOEI_R(1e-20) && sum < MOEI_R(1e30)) return MOEI_R(1.0) / MOEI_F(sqrt)(sum);
    for (i = 0; i < n; i++) {
        moe_real a = MOEI_F(fabs)(v[i]);
        if (a > largest) largest = a;
    }
    if (!(largest > 0)) return 0;
    /* scaled, so that squares neither underflow nor overflow */
    sum = 0;
    for (i = 0; i < n; i++) sum += (v[i] / largest) * (v[i] / largest);
    length = largest * MOEI_F(sqrt)(sum);
    return length < MOEI_R(1e-12) ? 0 : MOEI_R(1.0) / length;
}

/* out[n,m] = in[n,k] W[m,k]^T + bias; w NULL: out has the product */
static void moei_affine(const moe_kernels *k, size_t n, size_t m, size_t inner, const moe_real *in, const moe_real *w,
                        const moe_real *bias, moe_real *out) {
    size_t t;
    if (w != NULL) moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, n, m, inner, in, inner, w, inner, out, m, 0);
    for (t = 0; t < n && bias != NULL; t++) MOEI_ADD(k, m, bias, out + t * m);
}

/* An array of a batch from a row on, or NULL. */
static moe_real *moei_from_row(moe_real *rows, size_t row) { return rows != NULL ? rows + row : NULL; }

/* The length of the next run of real tokens at or after *start and before to; 0: there is none.
   Padding is left out of sums and products, because 0 times its content may be NaN. */
MOEI_TOOL size_t moei_real_run(const moe_call *call, size_t *start, size_t to) {
    size_t length = 0;
    while (*start < to && !moei_is_real(call, *start)) ++*start;
    if (call->mask == NULL) return to - *start;
    while (*start + length < to && moei_is_real(call, *start + length)) length++;
    return length;
}

#ifndef MOE_NO_TRAIN
#define MOEI_BACKWARD(f) f

/* The backward pass of moei_affine: d_in += d_out W (d_in may be NULL), dW += d_out^T in, d_bias +=
   column sums. */
static void moei_affine_backward(const moe_kernels *k, size_t n, size_t m, size_t inner, const moe_real *in,
                                 const moe_real *w, const moe_real *d_out, moe_real *d_in, moe_real *d_w,
                                 moe_real *d_bias) {
    size_t t;
    if (d_in != NULL) moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, n, inner, m, d_out, m, w, inner, d_in, inner, 1);
    if (d_w != NULL) moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, m, inner, n, d_out, m, in, inner, d_w, inner, 1);
    if (d_bias == NULL) return;
    for (t = 0; t < n; t++) MOEI_ADD(k, m, d_out + t * m, d_bias);
}
#else
#define MOEI_BACKWARD(f) NULL
#endif

/* Whether n numbers are finite, tested eight bytes at a time: adding 1 to an exponent of all ones
   carries into the sign bit. */
static int moei_all_finite(size_t n, const moe_real *x) {
#if MOE_REAL_IS_DOUBLE
    const uint64_t exponents = MOEI_INFINITY_BITS, one = (uint64_t)1 << 52;
    const uint64_t signs = MOEI_SIGN_BIT;
#else
    const uint64_t exponents = UINT64_C(0x7f8000007f800000), one = UINT64_C(0x0080000000800000);
    const uint64_t signs = UINT64_C(0x8000000080000000);
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

/* MOE_OK if the rows of all real tokens are finite, else MOE_ERR_NONFINITE with a message. */
static moe_status moei_expect_finite(const moei_pass *s, const moe_real *rows, size_t columns, const char *what) {
    int finite = s->call->mask != NULL || moei_all_finite(s->n * columns, rows);
    size_t t;
    for (t = 0; t < s->n && s->call->mask != NULL && finite; t++)
        finite = s->call->mask[t] == 0 || moei_all_finite(columns, rows + t * columns);
    if (finite) return MOE_OK;
    return moei_error(s->call->error, MOE_ERR_NONFINITE, "%s of a token is infinite or NaN", what);
}

/* ---- the configuration of the current step ---- */

/* The field that tau_schedule names. */
static moe_real *moei_scheduled_tau(moe_router_config *c) {
    switch (c->tau_schedule) {
    case MOE_TAU_GATE_TEMPERATURE: return &c->gate_temperature;
    case MOE_TAU_COSINE_TAU: return &c->cosine_tau;
    case MOE_TAU_SIMILARITY_TAU: return &c->similarity_tau;
    default: return &c->attention_sigma;
    }
}

/* Past freeze_at there are no losses, and the student, if there is one, chooses. */
#define MOEI_NO_LOSS(value, name, f, field) c->field = 0;
static void moei_freeze(moei_pass *s) {
    moe_router_config *c = &s->effective;
    s->frozen = 1;
    MOE_LOSSES(MOEI_NO_LOSS)
    c->loss_similarity_diff = 0;
    if (c->student) c->select = MOE_SELECT_TOP_K;
}

/* Lets the experts compete: the score is theirs, and the linear router is the student. */
static void moei_compete(moei_pass *s) {
    moe_router_config *c = &s->effective;
    const int softplus = c->compete == MOE_COMPETE_SOFTPLUS;
    s->competes = c->student = 1;
    c->score = softplus ? MOE_SCORE_COMPETITION : MOE_SCORE_NORM;
    c->norm_order = MOE_NORM_L2;
    c->gate = MOE_GATE_SOFTMAX;
    c->gate_temperature = MOEI_R(1.0);
    c->select = MOE_SELECT_TOP_K;
    c->weight = softplus ? MOE_WEIGHT_SUM : MOE_WEIGHT_SOFTMAX; /* of c */
    c->weight_p = MOEI_R(1.0);
}

/* The selection of the current step. */
static int moei_select_now(const moe_router *router, int training) {
    const moe_router_config *c = &router->config;
    const moe_real *step = router->tensors[MOE_ROUTER_STEP];
    const int switched = (step != NULL ? step[0] : 0) >= moei_switch_step(c);
    return moei_switches_in(c, training) && !switched ? c->switch_from : c->select;
}

/* K of a step, rounded. */
static int moei_scheduled_k(const moe_router_config *c, moe_real step) {
    const int64_t steps = c->schedule_steps, at = step < (moe_real)steps ? (int64_t)step : steps;
    if (c->k_end <= 0 || steps == 0) return c->top_k;
    return (int)((2 * steps * c->top_k + 2 * at * (c->k_end - c->top_k) + steps) / (2 * steps));
}

/* effective = router->config with K, temperature, selection and L1 factor of the current step. */
static void moei_schedule(moei_pass *s) {
    moe_router_config *c = &s->effective;
    const moe_real *state = moei_tensor(s, MOE_ROUTER_STEP), *l1 = moei_tensor(s, MOE_ROUTER_L1);
    moe_real step = state != NULL && state[0] > 0 ? state[0] : 0, way = 0, *tau;
    int64_t steps, at;
    *c = s->router->config;
    s->c = c;
    tau = moei_scheduled_tau(c);
    steps = c->schedule_steps;
    at = step < (moe_real)c->schedule_steps ? (int64_t)step : steps;
    if (steps > 0) way = (moe_real)at / (moe_real)steps;
    if (c->k_end > 0) c->top_k = moei_scheduled_k(c, step);
    if (c->tau_schedule != MOE_TAU_NONE) *tau = *tau * (MOEI_R(1.0) - way) + c->tau_end * way;
    c->select = moei_select_now(s->router, s->call != NULL && s->call->training);
    if (l1 != NULL) c->loss_l1 = l1[0];
    if (c->freeze_at > 0 && step >= (moe_real)c->freeze_at) moei_freeze(s);
    if (!(c->compete_rate > 0) || s->call == NULL || !s->call->training) return;
    if (s->call->activation_width > 0 && !s->frozen) moei_compete(s);
    else c->loss_distill = 0;
}

/* ---- checks of a call, before anything is computed ---- */

/* Whether a training call of this router draws random numbers. */
static int moei_needs_rng(const moe_router_config *c, const moe_call *call) {
    return (c->input == MOE_INPUT_JITTER && call->jitter == NULL) ||
           (c->noise != MOE_NOISE_NONE && call->noise == NULL) || c->drop_rule != MOE_DROP_RULE_NONE ||
           (moei_has_selection(c, MOE_SELECT_SAMPLE) && call->given == NULL) || c->drop_order == MOE_DROP_RANDOM ||
           (c->expert_dropout > 0 && call->given == NULL && call->dropped == NULL) ||
           (c->sparsemixer_sample && call->given == NULL && (call->gumbel == NULL || call->uniform == NULL));
}

/* The error of an array that a setting needs. */
static moe_status moei_missing(const moe_call *call, const char *array, const char *needed_by) {
    return MOEI_REFUSE(call->error, "call.%s is NULL: %s needs it", array, needed_by);
}

static moe_status moei_custom_missing(const moe_call *call, const char *function, const char *needed_by) {
    return MOEI_REFUSE(call->error,
                       "router.custom.%s is NULL: %s needs it; files hold no functions, so set it after loading, too",
                       function, needed_by);
}

/* Whether indices[n], so many per token (0: of no tokens), are in [least, end). Padding may hold
   anything. */
static moe_status moei_check_indices(const moe_call *call, const char *array, const int32_t *indices, size_t n,
                                     size_t per_token, int32_t least, int end) {
    size_t i;
    for (i = 0; i < n && indices != NULL; i++)
        if ((indices[i] < least || indices[i] >= end) && (per_token == 0 || moei_is_real(call, i / per_token)))
            return MOEI_REFUSE(call->error, "call.%s[%z] = %d: must be %d to %d", array, i, (int)indices[i], (int)least,
                               end - 1);
    return MOE_OK;
}

/* What adaptive clustering reads. */
static moe_status moei_clustering_check(const moe_router_config *c, const moe_call *call) {
    const char *needed_by = "input = adaptive_clustering";
    if (call->previous_experts == NULL) return moei_missing(call, "previous_experts", needed_by);
    if (call->previous_weights == NULL) return moei_missing(call, "previous_weights", needed_by);
    if (call->n_previous == 0) return MOEI_REFUSE(call->error, "call.n_previous = 0: %s needs at least 1", needed_by);
    if (c->ac_mode == MOE_AC_PAPER && call->previous_input == NULL)
        return moei_missing(call, "previous_input", "ac_mode = paper");
    return moei_check_indices(call, "previous_experts", call->previous_experts, call->n_tokens * call->n_previous,
                              call->n_previous, -1, c->n_experts);
}

/* The state of rules and schedules, which only training needs. */
MOEI_TOOL int moei_is_training_state(int index) {
    return (index >= MOE_ROUTER_STEP && index <= MOE_ROUTER_CAPACITY) || index == MOE_ROUTER_AFFINITY_SUM ||
           (index >= MOE_ROUTER_CUTOFF_SUM && index <= MOE_ROUTER_BIAS_MOMENTUM);
}

/* Whether a parameter is set if and only if the configuration has it. The state of rules and
   schedules is optional. */
MOEI_TOOL int moei_parameter_is_set(int index, uint64_t present, const moe_real *tensor) {
    if (!(present >> index & 1u)) return tensor == NULL;
    return tensor != NULL || moei_is_training_state(index);
}

/* Whether exactly the parameters of the configuration are set, the optional ones aside. */
static moe_status moei_tensors_check(const moe_router *router, const moe_call *call) {
    const moe_external *w = router->external;
    const int there = w != NULL && !moei_external_quantizes(w) && !call->training &&
                      router->config.score == MOE_SCORE_LINEAR && router->config.capacity_bound == MOE_BOUND_NONE;
    const uint64_t present = router->present & ~((uint64_t)there << MOE_ROUTER_WEIGHT);
    uint64_t set = 0;
    int i;
    for (i = MOE_ROUTER_PARAMETER_COUNT; i-- > 0;) set = set << 1 | (router->tensors[i] != NULL);
    if (set == present) return MOE_OK; /* the common case */
    for (i = 0; i < MOE_ROUTER_PARAMETER_COUNT; i++) {
        if (moei_parameter_is_set(i, present, router->tensors[i])) continue;
        if (present >> i & 1u)
            return MOEI_REFUSE(call->error, "parameter %s is not set", moei_router_parameter_name(i));
        return MOEI_REFUSE(call->error, "a parameter is set that the configuration does not have");
    }
    return MOE_OK;
}

/* Checks the functions of a custom score. */
static moe_status moei_custom_check(const moe_router *router, const moe_call *call) {
    const moe_custom *custom = &router->custom;
    if (custom->score == NULL) return moei_custom_missing(call, "score", "score = custom");
    if (custom->n_parameters != (size_t)router->config.custom_parameters)
        return moei_error(call->error, MOE_ERR_SHAPE,
                          "router.custom.n_parameters = %z: must be that of the configuration, custom_parameters = %d",
                          custom->n_parameters, router->config.custom_parameters);
    if (call->training && custom->n_parameters > 0 && custom->score_backward == NULL)
        return moei_custom_missing(call, "score_backward", "training with custom_parameters");
    return MOE_OK;
}

/* Checks what some configurations require of a call with tokens. select: that of the step. */
static moe_status moei_supplies_check(const moe_router *router, const moe_call *call, int select) {
    const moe_router_config *c = &router->config;
    char selects[40];
    moei_text t = moei_text_begin(selects, sizeof selects);
    moei_put_text(&t, select == c->select ? "select = " : "switch_from = ");
    moei_put_text(&t, moei_select_names[select]);
    if (c->score == MOE_SCORE_CUSTOM) {
        const moe_status status = moei_custom_check(router, call);
        if (status != MOE_OK) return status;
    }
    if (select == MOE_SELECT_GIVEN && call->given == NULL) return moei_missing(call, "given", selects);
    if (select == MOE_SELECT_HASH && call->given == NULL && call->token_ids == NULL)
        return moei_missing(call, "token_ids", selects);
    if (c->student_dim > 0 && call->token_ids == NULL) return moei_missing(call, "token_ids", "student_dim");
    if (c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        moe_status status = moei_clustering_check(c, call);
        if (status != MOE_OK) return status;
    }
    if (c->refine == MOE_REFINE_ATTENTION) {
        if (call->attention_weights == NULL) return moei_missing(call, "attention_weights", "refine = attention");
        if (call->attention_outputs == NULL) return moei_missing(call, "attention_outputs", "refine = attention");
        if (c->attention_u == MOE_ATTENTION_U_OUTPUT && call->attention_output == NULL)
            return moei_missing(call, "attention_output", "attention_u = output");
    }
    if (c->score == MOE_SCORE_ATTENTIVE && call->activation_width != moei_router_hidden(c))
        return moei_error(call->error, MOE_ERR_SHAPE,
                          "call.activation_width = %z: score = attentive needs router_hidden = %z",
                          call->activation_width, moei_router_hidden(c));
    if ((moei_score_flags[c->score] & MOE_TRAIT_NEEDS_ALL_EXPERTS) &&
        (call->activations == NULL || call->activation_width == 0))
        return MOEI_REFUSE(call->error, "call.activations or activation_width is not set: score = %s needs them",
                           moei_score_names[c->score]);
    if (c->compete_rate > 0 && call->training && call->activation_width > 0 && call->activations == NULL)
        return moei_missing(call, "activations", "compete_rate with activation_width");
    return MOE_OK;
}

static moe_status moei_offsets_check(const moe_call *call) {
    size_t i;
    if (call->sequences == NULL) return MOE_OK;
    if (call->n_sequences < 1 || call->sequences[0] != 0)
        return MOEI_REFUSE(call->error, "call.sequences must begin with 0");
    for (i = 1; i <= call->n_sequences; i++)
        if (call->sequences[i] < call->sequences[i - 1])
            return MOEI_REFUSE(call->error, "call.sequences[%z] = %d: below the offset before it", i,
                               (int)call->sequences[i]);
    if ((size_t)call->sequences[i - 1] != call->n_tokens)
        return MOEI_REFUSE(call->error, "call.sequences must end with n_tokens = %z, not %d", call->n_tokens,
                           (int)call->sequences[i - 1]);
    return MOE_OK;
}

static moe_status moei_sequences_check(const moe_router_config *c, const moe_call *call) {
    const moe_status status = moei_offsets_check(call);
    if (status != MOE_OK || call->n_past == 0) return status;
    if (c->refine == MOE_REFINE_NONE || !c->causal || moei_compares_heads(c) || call->training ||
        call->batch != NULL || moei_sequence_count(call) != 1)
        return MOEI_REFUSE(call->error,
                           "call.n_past = %z: only a causal refine stage (not attention_heads = min_entropy) outside "
                           "training, with one sequence and no batch, reads the past",
                           call->n_past);
    if (call->past_u == NULL) return moei_missing(call, "past_u", "n_past");
    if (call->past_gate == NULL) return moei_missing(call, "past_gate", "n_past");
    if (!moei_fit_int32(call->n_past, call->n_tokens))
        return MOEI_REFUSE(call->error, "call.n_past = %z: too many", call->n_past);
    return MOE_OK;
}

/* Whether the masks leave out what the call needs. */
static moe_status moei_left_out_check(const moe_router *router, const moe_call *call) {
    const char *left_out = moei_left_out(&router->config);
    if (left_out == NULL && !MOEI_KEPT(SELECTS, MOE_SELECT_GIVEN) && call->given != NULL) left_out = "given";
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_TRAINING) && call->training) left_out = "training";
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_BATCH) && call->batch != NULL) left_out = "batch";
    if (left_out == NULL) return MOE_OK;
    return moei_error(call->error, MOE_ERR_UNSUPPORTED, "%s: a MOE_KEEP_ macro has left it out of this build",
                      left_out);
}

static moe_status moei_training_check(const moe_router_config *c, const moe_call *call) {
    if (call->rng == NULL && moei_needs_rng(c, call)) return moei_missing(call, "rng", "a random stage in training");
    if (c->sparsemixer_sample && call->batch != NULL && (call->gumbel != NULL || call->uniform != NULL))
        return moei_error(call->error, MOE_ERR_UNSUPPORTED, "call.%s is incompatible with call.batch",
                          call->gumbel != NULL ? "gumbel" : "uniform");
    if (c->expert_dropout > 0 && call->batch != NULL && call->dropped != NULL)
        return moei_error(call->error, MOE_ERR_UNSUPPORTED, "call.dropped is incompatible with call.batch");
    if (moei_wants_teacher(c) && call->n_tokens > 0 && call->teacher == NULL)
        return moei_missing(call, "teacher", "loss_distill");
    return MOE_OK;
}

static moe_status moei_call_check(const moe_router *router, const moe_call *call) {
    const moe_router_config *c = &router->config;
    moe_status status = MOEI_KEEPS_ALL ? MOE_OK : moei_left_out_check(router, call);
    if (status != MOE_OK) return status;
    if (!MOEI_FITS_INT32(call->n_tokens))
        return moei_error(call->error, MOE_ERR_OVERFLOW, "call.n_tokens = %z: too many", call->n_tokens);
    if (call->n_tokens > 0 && call->x == NULL) return MOEI_REFUSE(call->error, "call.x is NULL");
    status = moei_tensors_check(router, call);
    if (status == MOE_OK && (call->sequences != NULL || call->n_past > 0)) status = moei_sequences_check(c, call);
    if (status != MOE_OK) return status;
    if (call->batch != NULL && moei_is_soft(c) && moei_crosses_sequences(c))
        return moei_error(call->error, MOE_ERR_UNSUPPORTED,
                          "select = soft with clusters of the call is incompatible with call.batch");
    if (call->decoding && (call->training || (router->parts & MOEI_PART_NO_DECODING)))
        return moei_error(call->error, MOE_ERR_UNSUPPORTED,
                          "call.decoding = 1 with training = 1, or see moe_router_check_decoding");
    if (call->training) status = moei_training_check(c, call);
    if (status != MOE_OK || !(router->parts & MOEI_PART_SUPPLIES)) return status;
    if (moei_is_soft(c) && (call->given != NULL || moei_sequence_count(call) > (size_t)c->soft_sequences))
        return MOEI_REFUSE(call->error, "select = soft takes no call.given and at most soft_sequences = %d, here %z",
                           c->soft_sequences, moei_sequence_count(call));
    if (moei_is_soft(c) && moei_sequence_count(call) > (size_t)INT32_MAX / (size_t)c->slots)
        return moei_error(call->error, MOE_ERR_OVERFLOW, "call.n_sequences = %z: too many for slots = %d",
                          call->n_sequences, c->slots);
    if (c->loss_locality > 0)
        status = moei_check_indices(call, "token_machine", call->token_machine, call->n_tokens, 1, 0, c->nodes);
    if (c->loss_locality > 0 && status == MOE_OK)
        status = moei_check_indices(call, "expert_machine", call->expert_machine, (size_t)c->n_experts, 0, 0, c->nodes);
    if (status != MOE_OK || call->n_tokens == 0) return status;
    return moei_supplies_check(router, call, moei_select_now(router, call->training));
}

/* ==== >>code_input: x -> u ==================================================================== */

static void moei_input_plain(const moei_pass *s, size_t t, const moe_real *x, moe_real *u) {
    (void)t;
    memcpy(u, x, s->d * sizeof(moe_real));
}

/* Copies this process's n rows (NULL: already there) to their position in rows, and gathers those
   of the other processes. */
static moe_status moei_gather_from(const moe_call *call, moe_status status, size_t row_bytes, const void *own,
                                   void *rows) {
    unsigned char *to = (unsigned char *)rows;
    if (status == MOE_OK && call->n_tokens > 0 && own != NULL)
        memcpy(to + call->batch->first * row_bytes, own, call->n_tokens * row_bytes);
    return call->batch->gather(call->batch->ctx, status, row_bytes, rows);
}

/* xi, drawn once per call and kept for the backward pass. */
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

/* The cluster of a token: the previous layer's expert with the largest weight, the first one of
   equal weights; -1: none. */
static int32_t moei_cluster(const moei_pass *s, size_t t) {
    const int32_t *experts = s->call->previous_experts + t * s->call->n_previous;
    const moe_real *weights = s->call->previous_weights + t * s->call->n_previous;
    int32_t best = -1;
    size_t j, at = 0;
    for (j = 0; j < s->call->n_previous; j++)
        if (experts[j] >= 0 && (best < 0 || weights[j] > weights[at])) {
            best = experts[j];
            at = j;
        }
    return best;
}

/* The cluster of each token: stored in n_choices until the selection; a batch with global routing
   has an array of its own. */
static int32_t *moei_clusters_of(const moei_pass *s) {
    return s->m.clusters_of != NULL ? s->m.clusters_of : s->r->n_choices;
}

/* The tokens whose dispersion determines M: of this layer in mode code, else of the previous
   one. */
static const moe_real *moei_cluster_tokens(const moei_pass *s) {
    if (s->m.batch_h != NULL && !s->is_part) return s->m.batch_h;
    if (s->c->ac_mode != MOE_AC_CODE) return s->call->previous_input;
    return s->call->router_x != NULL ? s->call->router_x : s->call->x;
}

/* The tokens of cluster k: order[starts[k]] .. order[starts[k + 1] - 1], ascending. */
static void moei_input_sort(const moei_pass *s, const int32_t *clusters, int32_t *order, size_t *starts) {
    size_t k, t;
    memset(starts, 0, (s->experts + 1) * sizeof *starts);
    for (t = 0; t < s->n; t++)
        if (clusters[t] >= 0) starts[clusters[t]]++;
    for (k = 1; k <= s->experts; k++) starts[k] += starts[k - 1]; /* now the ends of the clusters */
    for (t = s->n; t-- > 0;)
        if (clusters[t] >= 0) order[--starts[clusters[t]]] = (int32_t)t;
}

/* Sums the tokens of each cluster into M [E,d], in the order of tokens, so that h is read
   sequentially. */
static void moei_cluster_sums(const moei_pass *s, const moe_real *h) {
    const int32_t *clusters = moei_clusters_of(s);
    size_t t;
    memset(s->m.clusters, 0, s->experts * s->d * sizeof(moe_real));
    for (t = 0; t < s->n; t++)
        if (clusters[t] >= 0) MOEI_ADD(s->k, s->d, h + t * s->d, s->m.clusters + (size_t)clusters[t] * s->d);
}

/* Replaces the sum of a cluster's tokens, two or more, by their dispersion s_kq. */
static void moei_cluster_dispersion(const moei_pass *s, const moe_real *h, const int32_t *tokens, size_t count,
                                    moe_real *m) {
    /* the weight of a pair of tokens, in both orders */
    moe_real over = (moe_real)count, share = MOEI_R(2.0) / (over * over);
    size_t i, j, q;
    if (s->c->ac_spread != MOE_SPREAD_PAIRWISE) {
        for (q = 0; q < s->d; q++) m[q] /= over;
        moei_dispersion(s->k, s->c->ac_spread == MOE_SPREAD_VARIANCE, count, tokens, s->d, h, s->d, m, m);
        return;
    }
    memset(m, 0, s->d * sizeof *m);
    for (i = 0; i < count; i++)
        for (j = 0; j < i; j++)
            for (q = 0; q < s->d; q++)
                m[q] += share * MOEI_F(fabs)(h[(size_t)tokens[i] * s->d + q] - h[(size_t)tokens[j] * s->d + q]);
}

/* The theorem's weights: lambda / (s + alpha), alpha > -min s such that their mean is 1, by
   bisection of beta = alpha + min s; alpha itself would lose a small lambda next to a large s. */
static void moei_exact_weights(moe_real *m, size_t d, moe_real lambda) {
    moe_real least = m[0], low, high, beta, mean;
    size_t q;
    int step;
    for (q = 1; q < d; q++)
        if (m[q] < least) least = m[q];
    for (q = 0; q < d; q++) m[q] -= least;
    low = lambda / (moe_real)d; /* one weight is d: the mean is at least 1 */
    high = lambda;              /* no weight is above 1 */
    for (step = 0; step < 200; step++) {
        beta = (low + high) / MOEI_R(2.0);
        mean = 0;
        for (q = 0; q < d; q++) mean += lambda / (m[q] + beta);
        if (mean > (moe_real)d) low = beta;
        else high = beta;
    }
    for (q = 0; q < d; q++) m[q] = lambda / (m[q] + high);
}

/* Mode paper: 1/(s + 1e-6), scaled to mean 1. */
static void moei_paper_weights(moe_real *m, size_t d) {
    moe_real sum = 0;
    size_t q;
    for (q = 0; q < d; q++) {
        m[q] = MOEI_R(1.0) / (m[q] + MOEI_R(1e-6));
        sum += m[q];
    }
    for (q = 0; q < d; q++) m[q] *= (moe_real)d / sum;
}

/* Mode code, except with variance: clamped to 10 times the mean of all, then divided by the mean
   over clusters. Clusters of fewer than two tokens enter neither mean. */
static void moei_code_weights(const moei_pass *s, const size_t *starts) {
    moe_real *m = s->m.clusters, mean = 0, column;
    size_t k, q, used = 0;
    for (k = 0; k < s->experts; k++)
        for (q = 0; q < s->d && starts[k + 1] - starts[k] > 1; q++) mean += m[k * s->d + q];
    for (k = 0; k < s->experts; k++) used += starts[k + 1] - starts[k] > 1;
    if (used == 0) return; /* every row is 1 already */
    mean /= (moe_real)(used * s->d);
    for (q = 0; q < s->d; q++) {
        column = 0;
        for (k = 0; k < s->experts; k++) {
            if (starts[k + 1] - starts[k] < 2) continue;
            if (m[k * s->d + q] > MOEI_R(10.0) * mean) m[k * s->d + q] = MOEI_R(10.0) * mean;
            column += m[k * s->d + q] / (moe_real)used;
        }
        for (k = 0; k < s->experts; k++)
            if (starts[k + 1] - starts[k] > 1) m[k * s->d + q] /= column;
    }
}

/* M of one cluster from its dispersion, in place. */
static void moei_cluster_weights(const moei_pass *s, moe_real *m) {
    moe_real least = s->c->ac_spread == MOE_SPREAD_VARIANCE ? MOEI_R(0.1) : MOEI_R(1e-4);
    size_t q;
    if (s->c->ac_lambda > 0) moei_exact_weights(m, s->d, s->c->ac_lambda);
    else if (s->c->ac_mode == MOE_AC_PAPER) moei_paper_weights(m, s->d);
    else
        for (q = 0; q < s->d; q++) m[q] = MOEI_R(1.0) / (m[q] + least);
}
/* Finds the cluster of every token; in a batch with global routing also gathers the tokens whose
   dispersion is measured. */
static moe_status moei_find_clusters(const moei_pass *s, const moei_pass *batch) {
    const moe_real *h = moei_cluster_tokens(s);
    int32_t *clusters = moei_clusters_of(s);
    moe_status status;
    size_t t;
    for (t = 0; t < s->n; t++) clusters[t] = moei_is_real(s->call, t) ? moei_cluster(s, t) : -1;
    if (s == batch) return MOE_OK;
    status = moei_gather_from(batch->call, MOE_OK, sizeof(int32_t), NULL, batch->m.clusters_of);
    if (status != MOE_OK || batch->m.batch_h == NULL) return status;
    return moei_gather_from(s->call, MOE_OK, s->d * sizeof(moe_real), h, batch->m.batch_h);
}

/* Computes M [E,d] of this call, with a last row of 1 for tokens without a cluster. own: the pass
   of the call's own tokens, or s itself. */
static moe_status moei_input_clusters(const moei_pass *own, const moei_pass *s) {
    const moe_real *h, *state = moei_tensor(s, MOE_ROUTER_AC_RUNNING);
    size_t *starts = s->r->plan.offsets, k; /* unused until there is a plan */
    moe_status status = moei_find_clusters(own, s);
    if (status != MOE_OK) return status;
    moei_fill(s->m.clusters + s->experts * s->d, s->d, MOEI_R(1.0));
    if (state != NULL) {
        memcpy(s->m.clusters, state, s->experts * s->d * sizeof(moe_real));
        return MOE_OK;
    }
    h = moei_cluster_tokens(s);
    moei_input_sort(s, moei_clusters_of(s), s->m.order, starts);
    moei_cluster_sums(s, h);
    for (k = 0; k < s->experts; k++) {
        moe_real *m = s->m.clusters + k * s->d;
        size_t count = starts[k + 1] - starts[k];
        if (count < 2) {
            moei_fill(m, s->d, MOEI_R(1.0));
            continue;
        }
        moei_cluster_dispersion(s, h, s->m.order + starts[k], count, m);
        moei_cluster_weights(s, m);
    }
    if (s->c->ac_mode == MOE_AC_CODE && s->c->ac_spread != MOE_SPREAD_VARIANCE && !(s->c->ac_lambda > 0))
        moei_code_weights(s, starts);
    return MOE_OK;
}

/* m = sum_j a_j M_j over the J best of the previous layer's experts, a_j their weights
   renormalized; 1 if there are none. */
static void moei_input_mix(const moei_pass *s, size_t t, moe_real *m) {
    const int32_t *experts = s->call->previous_experts + t * s->call->n_previous;
    const moe_real *weights = s->call->previous_weights + t * s->call->n_previous;
    moe_real last = MOEI_INFINITY, sum = 0;
    size_t j, q, taken, last_at = 0;
    moei_fill(m, s->d, 0);
    /* the best remaining one */
    for (taken = 0; taken < (size_t)s->c->ac_mix; taken++) {
        size_t best = s->call->n_previous;
        for (j = 0; j < s->call->n_previous; j++) {
            if (experts[j] < 0 || weights[j] > last || (taken > 0 && !(weights[j] < last) && j <= last_at)) continue;
            if (best == s->call->n_previous || weights[j] > weights[best]) best = j;
        }
        if (best == s->call->n_previous) break;
        last = weights[best];
        last_at = best;
        moe_axpy(s->k, s->d, weights[best], s->m.clusters + (size_t)experts[best] * s->d, m);
        sum += weights[best];
    }
    for (q = 0; q < s->d; q++) m[q] = sum < 0 || sum > 0 ? m[q] / sum : MOEI_R(1.0);
}

/* u_t = m_t * x_t. Training keeps m_t for the backward pass. */
static void moei_input_clustered(const moei_pass *s, size_t t, const moe_real *x, moe_real *u) {
    moe_real *kept = s->m.input_factor + t * s->d;
    const moe_real *m = kept;
    if (s->c->ac_mix > 1) moei_input_mix(s, t, kept);
    else {
        int32_t cluster = moei_clusters_of(s)[t];
        m = s->m.clusters + (cluster < 0 ? s->experts : (size_t)cluster) * s->d;
        if (s->call->training) memcpy(kept, m, s->d * sizeof *m);
    }
    moei_multiply(s->k, s->d, x, m, u);
}

#ifndef MOE_NO_TRAIN
static void moei_input_plain_backward(const moei_pass *s, size_t t, const moe_real *x, moe_real *du, moe_real *dx) {
    (void)t;
    (void)x;
    MOEI_ADD(s->k, s->d, du, dx);
}

static void moei_input_factor_backward(const moei_pass *s, size_t t, const moe_real *x, moe_real *du, moe_real *dx) {
    const moe_real *xi = s->m.input_factor + t * s->d;
    size_t q;
    (void)x;
    for (q = 0; q < s->d; q++) dx[q] += xi[q] * du[q];
}

static void moei_input_scaled_rms_backward(const moei_pass *s, size_t t, const moe_real *x, moe_real *du,
                                           moe_real *dx) {
    moe_real shrink = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)s->d);
    size_t q;
    for (q = 0; q < s->d; q++) du[q] *= shrink;
    moe_rms_norm_backward(s->d, x, moei_tensor(s, MOE_ROUTER_INPUT_SCALE), s->m.input_factor[t], du, dx,
                          moei_gradient(s, MOE_ROUTER_INPUT_SCALE));
}
#endif

typedef struct moei_input {
    void (*forward)(const moei_pass *s, size_t t, const moe_real *x, moe_real *u);
    /* dx may be a scratch row */
    void (*backward)(const moei_pass *s, size_t t, const moe_real *x, moe_real *du, moe_real *dx);
} moei_input;

/* The plain stage is always compiled in: it replaces training-only stages outside training. */
#define MOEI_INPUT_ROW(value, name, forward, backward, flags) \
    {(value) == MOE_INPUT_PLAIN || MOEI_KEPT(INPUTS, value) ? (forward) : NULL, MOEI_BACKWARD(backward)},
static const moei_input moei_inputs[] = {MOE_INPUTS(MOEI_INPUT_ROW)};

/* The input stage of this call. */
static const moei_input *moei_input_stage(const moei_pass *s) {
    const int skipped = (moei_input_flags[s->c->input] & MOEI_INPUT_TRAINING_ONLY) && !s->call->training;
    return &moei_inputs[skipped ? (int)MOE_INPUT_PLAIN : s->c->input];
}

/* Skips the factors of other processes' tokens, so that all processes draw the same random
   numbers. */
static void moei_skip_jitter(const moei_pass *s, size_t tokens) {
    size_t i;
    if (s->c->input != MOE_INPUT_JITTER || !s->call->training || (s->supplied & MOEI_HAS_JITTER)) return;
    for (i = 0; i < tokens * s->d; i++) (void)moe_rng_uniform(s->call->rng);
}

/* Sets padding to zero, so that its content cannot reach a gradient. batch: the pass of all tokens,
   or s itself. */
static moe_status moei_route_input(moei_pass *s, const moei_pass *batch) {
    const moe_real *x = s->call->router_x != NULL ? s->call->router_x : s->call->x;
    const moei_input *stage;
    moe_status status;
    size_t t;
    s->r->n_real = s->n;
    s->r->u = x;
    if (s->call->mask == NULL && s->c->input == MOE_INPUT_PLAIN) return MOE_OK;
    s->r->n_real = moei_real_tokens(s->call, 0, s->n);
    stage = moei_input_stage(s);
    if (s->call->mask == NULL && stage == &moei_inputs[MOE_INPUT_PLAIN]) return MOE_OK;
    if (MOEI_KEPT(INPUTS, MOE_INPUT_ADAPTIVE_CLUSTERING) && s->c->input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        status = moei_input_clusters(s, batch);
        if (status != MOE_OK) return status;
    }
    moei_skip_jitter(s, moei_real_tokens(batch->call, 0, s->before));
    for (t = 0; t < s->n; t++) {
        moe_real *u = s->m.input + t * s->d;
        if (moei_is_real(s->call, t)) stage->forward(s, t, x + t * s->d, u);
        else memset(u, 0, s->d * sizeof(moe_real));
    }
    moei_skip_jitter(s, moei_real_tokens(batch->call, s->before + s->n, s->before + s->n + s->after));
    s->r->u = s->m.input;
    return MOE_OK;
}

#ifndef MOE_NO_TRAIN
static void moei_route_input_backward(moei_pass *s, moe_real *dx) {
    const moe_real *x = s->call->router_x != NULL ? s->call->router_x : s->call->x;
    const moei_input *stage = moei_input_stage(s);
    size_t t;
    for (t = 0; t < s->n; t++) {
        moe_real *to = dx != NULL ? dx + t * s->d : s->m.d_unused;
        if (moei_is_real(s->call, t)) stage->backward(s, t, x + t * s->d, s->m.d_input + t * s->d, to);
    }
}
#endif

/* ==== >>code_score: u -> z ==================================================================== */

static void moei_score_linear(moei_pass *s) {
    if (moei_tensor(s, MOE_ROUTER_WEIGHT) == NULL)
        moe_matmul_external(s->k, s->router->external, 0, s->n, s->experts, s->d, s->r->u, s->d, NULL, s->r->logits,
                            s->experts);
    moei_affine(s->k, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_WEIGHT),
                moei_tensor(s, MOE_ROUTER_BIAS), s->r->logits);
}

static void moei_score_mlp(moei_pass *s) {
    const moe_kernels *k = s->k;
    size_t h = moei_router_hidden(s->c);
    moei_affine(k, s->n, h, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_FC1_WEIGHT), moei_tensor(s, MOE_ROUTER_FC1_BIAS),
                s->m.hidden);
    moe_activate(k, s->c->router_act, s->n * h, s->m.hidden, s->m.hidden_act);
    moei_affine(k, s->n, s->experts, h, s->m.hidden_act, moei_tensor(s, MOE_ROUTER_FC2_WEIGHT),
                moei_tensor(s, MOE_ROUTER_FC2_BIAS), s->r->logits);
}

/* The width of the vectors that scores compare, and what the cosine score compares. */
static size_t moei_vector_width(const moei_pass *s) { return s->c->cosine_dim > 0 ? (size_t)s->c->cosine_dim : s->d; }

static const moe_real *moei_cosine_tokens(const moei_pass *s) { return s->c->cosine_dim > 0 ? s->m.hidden : s->r->u; }

static moe_real moei_tau(const moei_pass *s) {
    return s->c->cosine_learn_tau ? moei_tensor(s, MOE_ROUTER_TEMPERATURE)[0] : s->c->cosine_tau;
}

static void moei_score_cosine(moei_pass *s) {
    const moe_kernels *k = s->k;
    size_t width = moei_vector_width(s), t, e;
    const moe_real *v = moei_cosine_tokens(s), *w = moei_tensor(s, MOE_ROUTER_WEIGHT);
    moe_real *token_inverse = s->m.lengths, *expert_inverse = s->m.lengths + s->n;
    moe_real over_tau = MOEI_R(1.0) / moei_tau(s);
    if (s->c->cosine_dim > 0)
        moei_affine(k, s->n, width, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_PROJECTION), NULL, s->m.hidden);
    for (t = 0; t < s->n; t++)
        token_inverse[t] = s->c->cosine_keep_length ? MOEI_R(1.0) : moei_inverse_length(k, v + t * width, width);
    for (e = 0; e < s->experts; e++) expert_inverse[e] = moei_inverse_length(k, w + e * width, width);
    moei_affine(k, s->n, s->experts, width, v, w, NULL, s->r->logits);
    for (t = 0; t < s->n; t++)
        for (e = 0; e < s->experts; e++)
            s->r->logits[t * s->experts + e] *= token_inverse[t] * expert_inverse[e] * over_tau;
}

/* The norm of one activation; for linf *at is the first index of the maximum. */
static moe_real moei_vector_norm(int order, const moe_real *v, size_t n, size_t *at) {
    moe_real largest = 0, sum = 0;
    size_t i;
    *at = 0;
    for (i = 0; i < n; i++) {
        moe_real a = MOEI_F(fabs)(v[i]);
        if (a > largest) {
            largest = a;
            *at = i;
        }
        sum += a;
    }
    if (!moe_is_finite(sum)) return sum;
    if (order == MOE_NORM_LINF) return largest;
    if (order == MOE_NORM_L1 || !(largest > 0)) return sum;
    sum = 0;
    for (i = 0; i < n; i++) sum += (v[i] / largest) * (v[i] / largest);
    return largest * MOEI_F(sqrt)(sum);
}

static void moei_score_norm(moei_pass *s) {
    size_t width = s->call->activation_width, t, e, at;
    for (e = 0; e < s->experts; e++)
        for (t = 0; t < s->n; t++)
            s->r->logits[t * s->experts + e] =
                moei_vector_norm(s->c->norm_order, s->call->activations + (e * s->n + t) * width, width, &at);
}

static void moei_score_grap(moei_pass *s) {
    size_t block = s->d / s->experts, t, e, q;
    moe_real over = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)block);
    for (t = 0; t < s->n; t++) {
        const moe_real *u = s->r->u + t * s->d;
        moe_real share = s->c->grap_cosine ? moei_inverse_length(s->k, u, s->d) * over : MOEI_R(1.0) / (moe_real)block;
        for (e = 0; e < s->experts; e++) {
            moe_real sum = 0;
            for (q = 0; q < block; q++) sum += u[e * block + q];
            s->r->logits[t * s->experts + e] = sum * share;
        }
    }
}

/* query = W_Q act(W1 u + b1); keyed = query W_K, so that each expert costs one product of length
   h. */
static void moei_score_attentive(moei_pass *s) {
    const moe_kernels *k = s->k;
    size_t h = s->call->activation_width, t, e;
    moe_real scale = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)h);
    moei_affine(k, s->n, h, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_FC1_WEIGHT), moei_tensor(s, MOE_ROUTER_FC1_BIAS),
                s->m.hidden);
    moe_activate(k, s->c->router_act, s->n * h, s->m.hidden, s->m.hidden_act);
    moei_affine(k, s->n, h, h, s->m.hidden_act, moei_tensor(s, MOE_ROUTER_QUERY), NULL, s->m.query);
    moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, s->n, h, h, s->m.query, h, moei_tensor(s, MOE_ROUTER_KEY), h,
               s->m.keyed, h, 0);
    for (t = 0; t < s->n; t++)
        for (e = 0; e < s->experts; e++)
            s->r->logits[t * s->experts + e] =
                scale * moe_dot(k, h, s->m.keyed + t * h, s->call->activations + (e * s->n + t) * h);
}

static void moei_score_competition(moei_pass *s) {
    size_t width = s->call->activation_width, t, e, q;
    for (e = 0; e < s->experts; e++)
        for (t = 0; t < s->n; t++) {
            const moe_real *output = s->call->activations + (e * s->n + t) * width;
            moe_real sum = 0;
            for (q = 0; q < width; q++) sum += moei_softplus(output[q]);
            s->r->logits[t * s->experts + e] = sum / (moe_real)width;
        }
}

static moe_real moei_smooth_step(moe_real v) {
    if (v <= MOEI_R(-0.5)) return 0;
    if (v >= MOEI_R(0.5)) return MOEI_R(1.0);
    return MOEI_R(0.5) + v * (MOEI_R(1.5) - MOEI_R(2.0) * v * v);
}

/* The product over the bits j of one code at expert e, from its steps [m], without bit `but` (m:
   with all bits). */
static moe_real moei_code_product(const moe_real *step, size_t bits, size_t e, size_t but) {
    moe_real product = MOEI_R(1.0);
    size_t j;
    for (j = 0; j < bits; j++)
        if (j != but) product *= e >> j & 1u ? step[j] : MOEI_R(1.0) - step[j];
    return product;
}

/* What the losses of the codes read: terms[0] = sum_i H(q_ti), terms[1] = sum_i 1 / max(m_i, 1e-6)
   with m_i = sum_e q_tie. step: the K codes of one token. */
static void moei_selector_terms(const moei_pass *s, size_t k, size_t bits, const moe_real *step, moe_real *terms) {
    size_t i, e;
    terms[0] = terms[1] = 0;
    for (i = 0; i < k; i++, step += bits) {
        moe_real mass = 0;
        for (e = 0; e < s->experts; e++) {
            const moe_real q = moei_code_product(step, bits, e, bits);
            mass += q;
            if (q > 0) terms[0] -= q * MOEI_F(log)(q);
        }
        terms[1] += MOEI_R(1.0) / (mass > MOEI_R(1e-6) ? mass : MOEI_R(1e-6));
    }
}

/* hidden: the codes [N,K m], then the mixing logits [N,K]; hidden_act: their steps and softmax. */
static void moei_score_dselect(moei_pass *s) {
    size_t k = (size_t)s->router->config.top_k, bits = moei_code_bits(s->experts);
    size_t all = s->n * k * bits, t, e, i;
    moe_real *mix = s->m.hidden_act + all;
    moei_affine(s->k, s->n, k * bits, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_CODES), NULL, s->m.hidden);
    moei_affine(s->k, s->n, k, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_MIX), NULL, s->m.hidden + all);
    for (i = 0; i < all; i++) s->m.hidden_act[i] = moei_smooth_step(s->m.hidden[i]);
    for (t = 0; t < s->n; t++) {
        if (s->m.selectors != NULL)
            moei_selector_terms(s, k, bits, s->m.hidden_act + t * k * bits, s->m.selectors + 2 * t);
        moe_softmax(s->k, k, s->m.hidden + all + t * k, MOEI_R(1.0), mix + t * k);
        for (e = 0; e < s->experts; e++) {
            moe_real sum = 0;
            for (i = 0; i < k; i++)
                sum += mix[t * k + i] * moei_code_product(s->m.hidden_act + (t * k + i) * bits, bits, e, bits);
            s->r->logits[t * s->experts + e] = sum;
        }
    }
}

/* The status of a caller's function, with a message. MOE_ERR_TRANSPORT would end the exchanges in
   this process alone. */
static moe_status moei_custom_status(const moei_pass *s, const char *name, moe_status status) {
    if (status == MOE_OK) return MOE_OK;
    return moei_error(s->call->error, status != MOE_ERR_TRANSPORT ? status : MOE_ERR_PEER, "router.custom.%s: %s", name,
                      moe_status_text(status));
}

static void moei_score_custom(moei_pass *s) {
    const moe_custom *custom = &s->router->custom;
    s->status = custom->score(custom->ctx, s->router, s->call, s->r->u, s->r->logits);
    s->status = moei_custom_status(s, "score", s->status);
}

#ifndef MOE_NO_TRAIN

/* What the score computed, without residual, cap and noise. */
static const moe_real *moei_score_logits(const moei_pass *s) {
    if (s->m.scored_logits != NULL) return s->m.scored_logits;
    return MOEI_IS_NOISY(s) ? s->m.clean_logits : s->r->logits;
}

static void moei_score_linear_backward(moei_pass *s) {
    moei_affine_backward(s->k, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_WEIGHT), s->m.d_logits,
                         s->m.d_input, moei_gradient(s, MOE_ROUTER_WEIGHT), moei_gradient(s, MOE_ROUTER_BIAS));
}

/* Frozen: the gradient reaches the input but not the weights. */
static void moei_score_random_backward(moei_pass *s) {
    moei_affine_backward(s->k, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_WEIGHT), s->m.d_logits,
                         s->m.d_input, NULL, NULL);
}

static void moei_score_mlp_backward(moei_pass *s) {
    const moe_kernels *k = s->k;
    size_t h = moei_router_hidden(s->c);
    memset(s->m.d_hidden, 0, s->n * h * sizeof(moe_real));
    moei_affine_backward(k, s->n, s->experts, h, s->m.hidden_act, moei_tensor(s, MOE_ROUTER_FC2_WEIGHT), s->m.d_logits,
                         s->m.d_hidden, moei_gradient(s, MOE_ROUTER_FC2_WEIGHT), moei_gradient(s, MOE_ROUTER_FC2_BIAS));
    moe_activate_backward(k, s->c->router_act, s->n * h, s->m.hidden, s->m.d_hidden, s->m.d_hidden);
    moei_affine_backward(k, s->n, h, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_FC1_WEIGHT), s->m.d_hidden, s->m.d_input,
                         moei_gradient(s, MOE_ROUTER_FC1_WEIGHT), moei_gradient(s, MOE_ROUTER_FC1_BIAS));
}

/* With a = 1/|v_t|, b = 1/|W_e|, z = a b (v . W) / tau:
     dv_t = sum_e dz (a b W_e / tau - a^2 z v_t)    dW_e = sum_t dz (a b v_t / tau - b^2 z W_e)
                                                    dtau = - sum dz z / tau
   (cosine_keep_length: a = 1 and the term in a^2 is absent). */
static void moei_score_cosine_backward(moei_pass *s) {
    const moe_kernels *k = s->k;
    size_t width = moei_vector_width(s), t, e;
    const moe_real *v = moei_cosine_tokens(s), *w = moei_tensor(s, MOE_ROUTER_WEIGHT);
    const moe_real *a = s->m.lengths, *b = s->m.lengths + s->n;
    moe_real tau = moei_tau(s), d_tau = 0;
    moe_real *d_v = s->c->cosine_dim > 0 ? s->m.d_hidden : s->m.d_input;
    moe_real *d_w = moei_gradient(s, MOE_ROUTER_WEIGHT);
    const moe_real *clean = moei_score_logits(s);
    if (s->c->cosine_dim > 0) memset(d_v, 0, s->n * width * sizeof(moe_real));
    for (t = 0; t < s->n; t++) {
        moe_real along = 0;
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
    if (s->c->cosine_learn_tau && moei_gradient(s, MOE_ROUTER_TEMPERATURE) != NULL)
        moei_gradient(s, MOE_ROUTER_TEMPERATURE)[0] += d_tau;
    if (s->c->cosine_dim > 0)
        moei_affine_backward(k, s->n, width, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_PROJECTION), d_v, s->m.d_input,
                             moei_gradient(s, MOE_ROUTER_PROJECTION), NULL);
}

/* d|c| is c/|c| (l2, 0 at 0), sign c (l1), sign of the first largest entry (linf). */
static void moei_score_norm_slope(int order, const moe_real *v, size_t n, moe_real dz, moe_real *d_v) {
    size_t i, at;
    moe_real norm = moei_vector_norm(order, v, n, &at);
    if (!(norm > 0)) return;
    if (order == MOE_NORM_L2)
        for (i = 0; i < n; i++) d_v[i] += dz * (v[i] / norm);
    else if (order == MOE_NORM_L1)
        for (i = 0; i < n; i++) d_v[i] += v[i] > 0 ? dz : v[i] < 0 ? -dz : 0;
    else
        d_v[at] += v[at] > 0 ? dz : -dz;
}

static void moei_score_norm_backward(moei_pass *s) {
    size_t width = s->call->activation_width, t, e, row;
    if (s->d_activations == NULL) return;
    for (e = 0; e < s->experts; e++)
        for (t = 0; t < s->n; t++) {
            if (!moei_is_real(s->call, t)) continue;
            row = (e * s->n + t) * width;
            moei_score_norm_slope(s->c->norm_order, s->call->activations + row, width,
                                  s->m.d_logits[t * s->experts + e], s->d_activations + row);
        }
}

/* A block's mean passes its gradient to each of its features; grap_cosine: z = sum / (|u|
   sqrt(d/E)). */
static void moei_score_grap_backward(moei_pass *s) {
    size_t block = s->d / s->experts, t, e, q;
    moe_real over = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)block);
    for (t = 0; t < s->n; t++) {
        const moe_real *u = s->r->u + t * s->d, *dz = s->m.d_logits + t * s->experts;
        const moe_real *z = moei_score_logits(s) + t * s->experts;
        moe_real *du = s->m.d_input + t * s->d, inverse = s->c->grap_cosine ? moei_inverse_length(s->k, u, s->d) : 0;
        moe_real along = 0;
        moe_real share = s->c->grap_cosine ? inverse * over : MOEI_R(1.0) / (moe_real)block;
        for (e = 0; e < s->experts; e++) {
            along += dz[e] * z[e];
            for (q = 0; q < block; q++) du[e * block + q] += dz[e] * share;
        }
        if (s->c->grap_cosine) moe_axpy(s->k, s->d, -(along * inverse * inverse), u, du);
    }
}

/* With a = q W_K / sqrt(h): z_e = a . h_e, so dh_e = dz_e a and da = sum_e dz_e h_e. */
static void moei_score_attentive_backward(moei_pass *s) {
    const moe_kernels *k = s->k;
    size_t h = s->call->activation_width, t, e;
    moe_real scale = MOEI_R(1.0) / MOEI_F(sqrt)((moe_real)h), *d_key = moei_gradient(s, MOE_ROUTER_KEY);
    memset(s->m.d_keyed, 0, s->n * h * sizeof(moe_real));
    for (t = 0; t < s->n; t++)
        for (e = 0; e < s->experts; e++) {
            size_t from = (e * s->n + t) * h;
            moe_real dz = s->m.d_logits[t * s->experts + e] * scale;
            if (!moei_is_real(s->call, t)) continue;
            moe_axpy(k, h, dz, s->call->activations + from, s->m.d_keyed + t * h);
            if (s->d_activations != NULL) moe_axpy(k, h, dz, s->m.keyed + t * h, s->d_activations + from);
        }
    /* keyed = query W_K */
    if (d_key != NULL)
        moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, h, h, s->n, s->m.query, h, s->m.d_keyed, h, d_key, h, 1);
    moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, s->n, h, h, s->m.d_keyed, h, moei_tensor(s, MOE_ROUTER_KEY), h,
               s->m.d_query, h, 0);
    memset(s->m.d_hidden, 0, s->n * h * sizeof(moe_real));
    moei_affine_backward(k, s->n, h, h, s->m.hidden_act, moei_tensor(s, MOE_ROUTER_QUERY), s->m.d_query, s->m.d_hidden,
                         moei_gradient(s, MOE_ROUTER_QUERY), NULL);
    moe_activate_backward(k, s->c->router_act, s->n * h, s->m.hidden, s->m.d_hidden, s->m.d_hidden);
    moei_affine_backward(k, s->n, h, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_FC1_WEIGHT), s->m.d_hidden, s->m.d_input,
                         moei_gradient(s, MOE_ROUTER_FC1_WEIGHT), moei_gradient(s, MOE_ROUTER_FC1_BIAS));
}

static void moei_score_competition_backward(moei_pass *s) {
    size_t width = s->call->activation_width, t, e, q;
    if (s->d_activations == NULL) return;
    for (e = 0; e < s->experts; e++)
        for (t = 0; t < s->n; t++) {
            size_t row = (e * s->n + t) * width;
            moe_real dz = s->m.d_logits[t * s->experts + e] / (moe_real)width;
            if (!moei_is_real(s->call, t)) continue;
            for (q = 0; q < width; q++) s->d_activations[row + q] += dz * moe_sigmoid(s->call->activations[row + q]);
        }
}

/* Slopes of the losses of the codes, of one token: they add -entropy (ln q_e + 1) - reach to that
   of q_e. */
typedef struct moei_selector_slope {
    moe_real entropy, reach;
} moei_selector_slope;

static moei_selector_slope moei_selector_slope_of(const moei_pass *s, size_t t, const moe_real *step, size_t bits) {
    moei_selector_slope slope = {0, 0};
    moe_real mass = 0;
    size_t e;
    if (s->m.selectors == NULL || !moei_is_real(s->call, t)) return slope;
    for (e = 0; e < s->experts; e++) mass += moei_code_product(step, bits, e, bits);
    slope.entropy = s->c->loss_selector_entropy / (moe_real)s->r->n_real;
    if (mass > MOEI_R(1e-6)) slope.reach = s->c->loss_selector_reach / ((moe_real)s->r->n_real * mass * mass);
    return slope;
}

static void moei_score_dselect_backward(moei_pass *s) {
    const moe_kernels *kernels = s->k;
    size_t k = (size_t)s->router->config.top_k, bits = moei_code_bits(s->experts);
    size_t all = s->n * k * bits, t, e, i, j;
    for (i = 0; i < all + s->n * k; i++) s->m.d_hidden[i] = 0;
    for (t = 0; t < s->n; t++) {
        const moe_real *mix = s->m.hidden_act + all + t * k, *dz = s->m.d_logits + t * s->experts;
        for (i = 0; i < k; i++) {
            const moe_real *step = s->m.hidden_act + (t * k + i) * bits, *code = s->m.hidden + (t * k + i) * bits;
            /* d softmax */
            moe_real *d_code = s->m.d_hidden + (t * k + i) * bits, *d_mix = s->m.query + t * k + i;
            const moei_selector_slope slope = moei_selector_slope_of(s, t, step, bits);
            for (e = 0, *d_mix = 0; e < s->experts; e++) {
                const moe_real q = moei_code_product(step, bits, e, bits);
                moe_real dq = dz[e] * mix[i] - slope.reach;
                *d_mix += dz[e] * q;
                if (q > 0) dq -= slope.entropy * (MOEI_F(log)(q) + MOEI_R(1.0));
                for (j = 0; j < bits; j++) d_code[j] += (e >> j & 1u ? dq : -dq) * moei_code_product(step, bits, e, j);
            }
            for (j = 0; j < bits; j++)
                d_code[j] *=
                    MOEI_F(fabs)(code[j]) < MOEI_R(0.5) ? MOEI_R(1.5) - MOEI_R(6.0) * code[j] * code[j] : 0;
        }
        moe_softmax_backward(k, mix, s->m.query + t * k, MOEI_R(1.0), s->m.d_hidden + all + t * k);
    }
    moei_affine_backward(kernels, s->n, k * bits, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_CODES), s->m.d_hidden,
                         s->m.d_input, moei_gradient(s, MOE_ROUTER_CODES), NULL);
    moei_affine_backward(kernels, s->n, k, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_MIX), s->m.d_hidden + all,
                         s->m.d_input, moei_gradient(s, MOE_ROUTER_MIX), NULL);
}

static void moei_score_custom_backward(moei_pass *s) {
    const moe_custom *custom = &s->router->custom;
    if (custom->score_backward == NULL) return;
    s->status = custom->score_backward(custom->ctx, s->router, s->call, s->r->u, s->m.d_logits, s->m.d_input,
                                       moei_gradient(s, MOE_ROUTER_CUSTOM));
    s->status = moei_custom_status(s, "score_backward", s->status);
}

#endif

typedef struct moei_score {
    void (*forward)(moei_pass *s);
    void (*backward)(moei_pass *s);
} moei_score;

#define MOEI_SCORE_ROW(value, name, forward, backward, flags) \
    {MOEI_KEEP(SCORES, value, forward), MOEI_BACKWARD(backward)},
static const moei_score moei_scores[] = {MOE_SCORES(MOEI_SCORE_ROW)};

/* ==== >>code_noise: z -> z + noise, in training =============================================== */

/* The scale of the noise at element i of [N,E]. */
static moe_real moei_noise_scale(const moei_pass *s, size_t i) {
    if (s->c->noise == MOE_NOISE_NOISY_TOPK) return moei_softplus(s->m.noise_raw[i]) + s->c->noise_floor;
    return s->c->noise == MOE_NOISE_GAUSSIAN ? s->c->noise_sigma : MOEI_R(1.0);
}

/* -ln(-ln u), u uniform in (0,1). */
static moe_real moei_draw_gumbel(moe_rng *rng) {
    moe_real u;
    do u = moe_rng_uniform(rng);
    while (!(u > 0));
    return -MOEI_F(log)(-MOEI_F(log)(u));
}

static moe_real moei_noise_draw(const moei_pass *s) {
    return s->c->noise == MOE_NOISE_GUMBEL ? moei_draw_gumbel(s->call->rng) : moe_rng_normal(s->call->rng);
}

/* Skips the noise of other processes' tokens, so that all processes draw the same random
   numbers. */
static void moei_skip_noise(const moei_pass *s, size_t tokens) {
    size_t i;
    if (s->supplied & MOEI_HAS_NOISE) return;
    for (i = 0; i < tokens * s->experts; i++) (void)moei_noise_draw(s);
}

/* Adds noise to the logits and keeps the clean ones for the losses that read them. A supplied noise
   is n for noisy_topk, else all that is added. */
static void moei_route_noise(moei_pass *s) {
    size_t cells = s->n * s->experts, i;
    moei_skip_noise(s, s->before);
    if (s->c->noise == MOE_NOISE_NOISY_TOPK)
        moei_affine(s->k, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_NOISE_WEIGHT), NULL,
                    s->m.noise_raw);
    memcpy(s->m.clean_logits, s->r->logits, cells * sizeof(moe_real));
    for (i = 0; i < cells; i++) {
        moe_real n = s->call->noise != NULL ? s->call->noise[i] : moei_noise_draw(s);
        if (!moei_is_real(s->call, i / s->experts)) n = 0;
        s->m.noise_value[i] = n;
        s->r->logits[i] +=
            s->call->noise != NULL && s->c->noise != MOE_NOISE_NOISY_TOPK ? n : n * moei_noise_scale(s, i);
    }
    moei_skip_noise(s, s->after);
}

/* z += W_g z' */
static void moei_route_residual(const moei_pass *s) {
    if (s->call->previous_logits != NULL)
        moe_matmul(s->k, MOE_MATMUL_NT, MOE_TYPE_REAL, s->n, s->experts, s->experts, s->call->previous_logits,
                   s->experts, moei_tensor(s, MOE_ROUTER_RESIDUAL), s->experts, s->r->logits, s->experts, 1);
}

/* z = c tanh(z / c). Numbers that are not finite stay: they are errors. */
static void moei_route_cap(const moei_pass *s) {
    const moe_real cap = s->c->logit_cap;
    moe_real *z = s->r->logits;
    size_t i;
    for (i = 0; i < s->n * s->experts; i++)
        if (moe_is_finite(z[i])) z[i] = cap * MOEI_F(tanh)(z[i] / cap);
}

#ifndef MOE_NO_TRAIN
static void moei_route_cap_backward(moei_pass *s) {
    const moe_real *z = MOEI_IS_NOISY(s) ? s->m.clean_logits : s->r->logits;
    size_t i;
    for (i = 0; i < s->n * s->experts; i++) {
        const moe_real part = z[i] / s->c->logit_cap;
        if (moei_is_real(s->call, i / s->experts)) s->m.d_logits[i] *= (MOEI_R(1.0) - part) * (MOEI_R(1.0) + part);
    }
}

/* Of the logits without noise: through the cap, then dz' += W_g^T dz, dW_g += dz z'^T, over runs of
   real tokens. */
static void moei_route_residual_backward(moei_pass *s) {
    const moe_call *call = s->call;
    const size_t e = s->experts;
    size_t run, length;
    for (run = 0; call->d_clean_logits != NULL && (length = moei_real_run(s->call, &run, s->n)) > 0; run += length)
        MOEI_ADD(s->k, length * e, call->d_clean_logits + run * e, s->m.d_logits + run * e);
    if (s->c->logit_cap > 0) moei_route_cap_backward(s);
    if (!s->c->router_residual || call->previous_logits == NULL) return;
    for (run = 0; (length = moei_real_run(s->call, &run, s->n)) > 0; run += length)
        moei_affine_backward(s->k, length, e, e, call->previous_logits + run * e, moei_tensor(s, MOE_ROUTER_RESIDUAL),
                             s->m.d_logits + run * e, moei_from_row(call->d_previous_logits, run * e),
                             moei_gradient(s, MOE_ROUTER_RESIDUAL), NULL);
}

/* On entry d_noise is the load loss's gradient of the scale, d_clean that of the clean logits. */
static void moei_route_noise_backward(moei_pass *s) {
    size_t cells = s->n * s->experts, i;
    if (!MOEI_IS_NOISY(s)) return;
    for (i = 0; i < cells; i++) {
        moe_real d = s->m.d_logits[i];
        s->m.d_logits[i] += s->m.d_clean[i];
        s->m.d_noise[i] = (s->m.d_noise[i] + d * s->m.noise_value[i]) *
                          (s->c->noise == MOE_NOISE_NOISY_TOPK ? moe_sigmoid(s->m.noise_raw[i]) : 0);
        if (!moei_is_real(s->call, i / s->experts)) s->m.d_noise[i] = 0;
    }
    if (s->c->noise == MOE_NOISE_NOISY_TOPK)
        moei_affine_backward(s->k, s->n, s->experts, s->d, s->r->u, moei_tensor(s, MOE_ROUTER_NOISE_WEIGHT),
                             s->m.d_noise, s->m.d_input, moei_gradient(s, MOE_ROUTER_NOISE_WEIGHT), NULL);
}
#endif

static moe_status moei_check_token_id(const moei_pass *s, size_t t) {
    const int32_t id = s->call->token_ids[t];
    if (id >= 0 && id < s->c->table_size) return MOE_OK;
    return MOEI_REFUSE(s->call->error, "call.token_ids[%z] = %d: must be 0 to %d", t, (int)id, s->c->table_size - 1);
}

/* The weight of the student or predictor, and what it reads. */
static int moei_student_weight(const moei_pass *s, const moe_real **in, size_t *width) {
    *in = s->c->student_dim > 0 ? s->m.student_input : s->r->u;
    *width = s->c->student_dim > 0 ? (size_t)s->c->student_dim : s->d;
    if (s->c->predictor) return MOE_ROUTER_PREDICTOR;
    if (s->competes) return MOE_ROUTER_WEIGHT;
    return s->c->student_dim > 0 ? MOE_ROUTER_STUDENT_WEIGHT : MOE_ROUTER_STUDENT;
}

static moe_status moei_route_student(moei_pass *s) {
    const moe_real *table = moei_tensor(s, MOE_ROUTER_STUDENT_EMBEDDING), *in;
    size_t t, width;
    const int weight = moei_student_weight(s, &in, &width);
    for (t = 0; t < s->n && table != NULL; t++) {
        moe_real *row = s->m.student_input + t * width;
        moe_status status = MOE_OK;
        memset(row, 0, width * sizeof *row);
        if (!moei_is_real(s->call, t)) continue;
        status = moei_check_token_id(s, t);
        if (status != MOE_OK) return status;
        memcpy(row, table + (size_t)s->call->token_ids[t] * width, width * sizeof *row);
    }
    moei_affine(s->k, s->n, s->experts, width, in, moei_tensor(s, weight),
                s->competes ? moei_tensor(s, MOE_ROUTER_BIAS) : NULL, s->m.student_logits);
    if (s->c->predictor) s->r->predicted = s->m.student_logits;
    return moei_expect_finite(s, s->m.student_logits, s->experts,
                              s->c->student ? "a logit of the student" : "a logit of the predictor");
}

static moe_status moei_route_score(moei_pass *s) {
    moe_status status;
    moei_scores[s->c->score].forward(s);
    if (s->status != MOE_OK) return s->status;
    if (MOEI_KEPT(EXTRAS, MOE_EXTRA_TRAINING) && s->call->training &&
        (s->c->router_residual || s->c->logit_cap > 0))
        memcpy(s->m.scored_logits, s->r->logits, s->n * s->experts * sizeof(moe_real));
    if (s->c->router_residual) moei_route_residual(s);
    if (s->c->logit_cap > 0) moei_route_cap(s);
    if (MOEI_IS_NOISY(s)) moei_route_noise(s);
    s->r->clean_logits = MOEI_IS_NOISY(s) ? s->m.clean_logits : s->r->logits;
    status = moei_expect_finite(s, s->r->logits, s->experts, "a logit");
    return status == MOE_OK && MOEI_TEACHES(s->c) ? moei_route_student(s) : status;
}

/* ==== >>code_gate: z -> r ===================================================================== */

static void moei_gate_softmax(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r) {
    void (*softmax)(size_t n, const moe_real *x, moe_real temperature, moe_real *y) = moei_table(s->k)->softmax;
    size_t t, columns = s->experts;
    for (t = 0; t < rows; t++) softmax(columns, z + t * columns, s->c->gate_temperature, r + t * columns);
}

static void moei_gate_sigmoid(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r) {
    size_t i, n = rows * s->experts;
    for (i = 0; i < n; i++) r[i] = z[i] / s->c->gate_temperature;
    moe_activate(s->k, MOE_ACT_SIGMOID, n, r, r);
}

static void moei_gate_sqrt_softplus(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r) {
    size_t i;
    for (i = 0; i < rows * s->experts; i++) r[i] = MOEI_F(sqrt)(moei_softplus(z[i]));
}

static void moei_gate_relu(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r) {
    size_t i;
    for (i = 0; i < rows * s->experts; i++) r[i] = z[i] > 0 ? z[i] : 0;
}

static void moei_gate_identity(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r) {
    memcpy(r, z, rows * s->experts * sizeof(moe_real));
}

#ifndef MOE_NO_TRAIN

static void moei_gate_softmax_backward(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr,
                                       moe_real *dz) {
    (void)z;
    moe_softmax_backward(s->experts, r, dr, s->c->gate_temperature, dz);
}

static void moei_gate_sigmoid_backward(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr,
                                       moe_real *dz) {
    size_t e;
    (void)z;
    for (e = 0; e < s->experts; e++) dz[e] += dr[e] * r[e] * (MOEI_R(1.0) - r[e]) / s->c->gate_temperature;
}

static void moei_gate_sqrt_softplus_backward(const moei_pass *s, const moe_real *z, const moe_real *r,
                                             const moe_real *dr, moe_real *dz) {
    size_t e;
    for (e = 0; e < s->experts; e++)
        if (r[e] > 0) dz[e] += dr[e] * moe_sigmoid(z[e]) / (MOEI_R(2.0) * r[e]);
}

static void moei_gate_relu_backward(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr,
                                    moe_real *dz) {
    size_t e;
    (void)r;
    for (e = 0; e < s->experts; e++)
        if (z[e] > 0) dz[e] += dr[e];
}

static void moei_gate_identity_backward(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr,
                                        moe_real *dz) {
    (void)z;
    (void)r;
    MOEI_ADD(s->k, s->experts, dr, dz);
}

#endif

typedef struct moei_gate {
    void (*forward)(const moei_pass *s, size_t rows, const moe_real *z, moe_real *r);
    void (*backward)(const moei_pass *s, const moe_real *z, const moe_real *r, const moe_real *dr, moe_real *dz);
} moei_gate;

#define MOEI_GATE_ROW(value, name, forward, backward, flags) \
    {MOEI_KEEP(GATES, value, forward), MOEI_BACKWARD(backward)},
static const moei_gate moei_gates[] = {MOE_GATES(MOEI_GATE_ROW)};

/* r = gate(z) of all real tokens. */
static void moei_route_gate(const moei_pass *s, const moe_real *z, moe_real *r) {
    const moei_gate *gate = &moei_gates[s->c->gate];
    size_t t;
    if (s->call->mask == NULL) {
        gate->forward(s, s->n, z, r);
        return;
    }
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t)) gate->forward(s, 1, z + t * s->experts, r + t * s->experts);
}

#ifndef MOE_NO_TRAIN
static void moei_route_gate_backward(moei_pass *s) {
    const moei_gate *gate = &moei_gates[s->c->gate];
    size_t t, row;
    for (t = 0; t < s->n; t++) {
        row = t * s->experts;
        if (!moei_is_real(s->call, t)) {
            memset(s->m.d_logits + row, 0, s->experts * sizeof(moe_real));
            continue;
        }
        gate->backward(s, s->r->logits + row, s->r->gate + row, s->m.d_gate + row, s->m.d_logits + row);
        if (MOEI_IS_NOISY(s))
            gate->backward(s, s->m.clean_logits + row, s->m.clean_gate + row, s->m.d_clean_gate + row,
                           s->m.d_clean + row);
    }
}
#endif

/* ==== >>code_refine: r -> p ======================================================================
   p_i = sum over (h, j) of softmax(a_ihj) r_j within a sequence.
     similarity  one head, a_ij = u_i . W_s u_j / tau
     attention   a_ihj = log A_hij - |u_i - o_hj|^2 / (2 sigma^2); |u_i|^2 cancels
   Both are products of queries and keys, in blocks of rows, computed again in the backward pass.
   A block holds E_ij = exp(a_ij - max). Its rows' sums Z_i divide p_i = sum E_ij r_j at the end: E
   divisions per token instead of N. */

/* Token indices start at the first past token. */
static int moei_refine_is_real(const moei_pass *s, size_t t) {
    return t < s->past || moei_is_real(s->call, t - s->past);
}

/* The row of A of head h and token i, its columns from `from` on. */
static const moe_real *moei_attention_row(const moei_pass *s, size_t h, size_t i, size_t from) {
    return s->call->attention_weights + (h * s->n + i - s->past) * s->span + from;
}

/* H(A_h[i,:]) over the tokens of its sequence [from, to) that token i may attend to. */
static moe_real moei_attention_entropy(const moei_pass *s, size_t h, size_t i, size_t from, size_t to) {
    const moe_real *row = moei_attention_row(s, h, i, from);
    size_t seen = (s->c->causal ? i + 1 : to) - from, j;
    if (s->call->mask == NULL) return moei_row_entropy(s->k, seen, row);
    for (j = 0; j < seen; j++) s->m.column[j] = moei_refine_is_real(s, from + j) ? row[j] : 0;
    return moei_row_entropy(s->k, seen, s->m.column);
}

/* The heads [first, end) that refine the sequence of tokens [from, to). */
static void moei_refine_heads(const moei_pass *s, size_t from, size_t to, size_t *first, size_t *end) {
    size_t h, t, heads = (size_t)s->c->heads;
    moe_real best = MOEI_INFINITY;
    *first = 0;
    *end = 1;
    if (s->c->refine != MOE_REFINE_ATTENTION) return;
    if (s->c->attention_heads == MOE_HEADS_ALL) *end = heads;
    if (s->c->attention_heads == MOE_HEADS_FIXED) {
        *first = (size_t)s->c->attention_head;
        *end = *first + 1;
    }
    if (s->c->attention_heads != MOE_HEADS_MIN_ENTROPY) return;
    for (h = 0; h < heads; h++) {
        moe_real sum = 0;
        for (t = from; t < to; t++)
            if (moei_refine_is_real(s, t)) sum += moei_attention_entropy(s, h, t, from, to);
        if (sum < best) {
            best = sum;
            *first = h;
            *end = h + 1;
        }
    }
}

static const moe_real *moei_refine_queries(const moei_pass *s) {
    return s->c->refine == MOE_REFINE_SIMILARITY && s->c->similarity_scale == MOE_SIMILARITY_L2 ? s->m.unit : s->all_u;
}

static const moe_real *moei_refine_keys(const moei_pass *s, size_t head) {
    if (s->c->refine == MOE_REFINE_ATTENTION) return s->call->attention_outputs + head * s->span * s->d;
    return s->c->similarity_learned ? s->m.keys : moei_refine_queries(s);
}

/* The factor on the products of queries and keys. */
static moe_real moei_refine_scale(const moei_pass *s) {
    if (s->c->refine == MOE_REFINE_ATTENTION) return MOEI_R(1.0) / (s->c->attention_sigma * s->c->attention_sigma);
    if (s->c->similarity_scale == MOE_SIMILARITY_RSQRT_D)
        return MOEI_R(1.0) / (s->c->similarity_tau * MOEI_F(sqrt)((moe_real)s->d));
    return MOEI_R(1.0) / s->c->similarity_tau;
}

/* Concatenates u and gate of the past tokens and of the call's tokens. */
static void moei_refine_gather(moei_pass *s) {
    const moe_real *u = s->c->refine == MOE_REFINE_ATTENTION && s->c->attention_u == MOE_ATTENTION_U_OUTPUT
                            ? s->call->attention_output
                            : s->r->u;
    s->past = s->call->n_past;
    s->span = s->past + s->n;
    s->all_u = u;
    s->all_gate = s->r->gate;
    if (s->past == 0) return;
    memcpy(s->m.past_u, s->call->past_u, s->past * s->d * sizeof(moe_real));
    memcpy(s->m.past_u + s->past * s->d, u, s->n * s->d * sizeof(moe_real));
    memcpy(s->m.past_gate, s->call->past_gate, s->past * s->experts * sizeof(moe_real));
    memcpy(s->m.past_gate + s->past * s->experts, s->r->gate, s->n * s->experts * sizeof(moe_real));
    s->all_u = s->m.past_u;
    s->all_gate = s->m.past_gate;
}

/* Computes unit vectors, keys and entropies once per call. */
static void moei_refine_prepare(const moei_pass *s) {
    const moe_kernels *k = s->k;
    size_t t, q;
    for (t = 0; t < s->span && s->m.entropy != NULL; t++)
        s->m.entropy[t] = moei_row_entropy(k, s->experts, s->all_gate + t * s->experts);
    for (t = 0; t < s->span && s->m.unit != NULL; t++) {
        moe_real inverse = moei_inverse_length(k, s->all_u + t * s->d, s->d);
        for (q = 0; q < s->d; q++) s->m.unit[t * s->d + q] = s->all_u[t * s->d + q] * inverse;
    }
    if (s->m.keys != NULL)
        moei_affine(k, s->span, s->d, s->d, moei_refine_queries(s), moei_tensor(s, MOE_ROUTER_SIMILARITY), NULL,
                    s->m.keys);
}

/* |o|^2 / 2 of the keys of one head in the sequence [from, to). */
static void moei_refine_key_terms(const moei_pass *s, size_t head, size_t from, size_t to) {
    size_t t;
    for (t = from; t < to && s->m.key_terms != NULL; t++) {
        const moe_real *o = s->call->attention_outputs + (head * s->span + t) * s->d;
        s->m.key_terms[head * s->span + t] = moei_refine_is_real(s, t) ? moe_dot(s->k, s->d, o, o) / MOEI_R(2.0) : 0;
    }
}

/* How many keys of the sequence [from, to) the rows [at, at + rows) may attend to. */
static size_t moei_refine_span(const moei_pass *s, size_t at, size_t rows, size_t from, size_t to) {
    return (s->c->causal ? at + rows : to) - from;
}

/* out[rows,span] = queries . keys of the tokens from `from` on. With causal some keys later than
   their row are left unset. */
static void moei_refine_products(const moei_pass *s, size_t at, size_t rows, size_t from, size_t span,
                                 const moe_real *keys, moe_real *out, size_t width) {
    const moe_real *queries = moei_refine_queries(s) + at * s->d;
    size_t common = s->c->causal ? span - rows : span, i, step;
    moe_matmul(s->k, MOE_MATMUL_NT, MOE_TYPE_REAL, rows, common, s->d, queries, s->d, keys + from * s->d, s->d, out,
               width, 0);
    for (i = 0; i < rows && s->c->causal; i += step) {
        step = moei_smaller(rows - i, MOEI_REFINE_STEP);
        moe_matmul(s->k, MOE_MATMUL_NT, MOE_TYPE_REAL, step, i + step, s->d, queries + i * s->d, s->d, keys + at * s->d,
                   s->d, out + i * width + common, width, 0);
    }
}

/* Sets the entries of tokens that are excluded from refining token i to -inf. */
static void moei_refine_hide(const moei_pass *s, size_t i, size_t from, size_t seen, moe_real *row) {
    size_t j;
    if (s->call->mask == NULL && !s->c->lower_entropy_only) return;
    for (j = 0; j < seen; j++)
        if (!moei_refine_is_real(s, from + j) || (s->c->lower_entropy_only && s->m.entropy[from + j] > s->m.entropy[i]))
            row[j] = -MOEI_INFINITY;
}

/* E of one row, span elements per head; returns Z, 0 if all tokens are excluded. */
static moe_real moei_refine_row(const moei_pass *s, size_t i, size_t from, size_t span, size_t first, size_t end,
                                moe_real *row) {
    const moe_kernels *k = s->k;
    size_t seen = s->c->causal ? i + 1 - from : span, h, j;
    moe_real scale = moei_refine_scale(s), max = -MOEI_INFINITY, top;
    moe_real sum = 0;
    for (h = first; h < end; h++) {
        moe_real *a = row + (h - first) * span;
        moei_refine_hide(s, i, from, seen, a);
        if (s->c->refine == MOE_REFINE_SIMILARITY) top = moei_log_posterior(k, seen, scale, NULL, NULL, a);
        else
            top = moei_log_posterior(k, seen, scale, s->m.key_terms + h * s->span + from,
                                     moei_attention_row(s, h, i, from), a);
        if (top > max) max = top;
    }
    max = moei_softmax_shift(max);
    for (h = first; h < end; h++) {
        moe_real *a = row + (h - first) * span;
        sum += moei_exp_sum(k, seen, max, a);
        for (j = seen; j < span; j++) a[j] = 0;
    }
    return sum;
}

/* E of the rows [at, at + rows) of a sequence that starts at `from` into block, and their Z into
   sums. */
static void moei_refine_block(const moei_pass *s, size_t at, size_t rows, size_t from, size_t span, size_t first,
                              size_t end, moe_real *sums) {
    size_t width = (end - first) * span, h, i;
    for (h = first; h < end; h++)
        moei_refine_products(s, at, rows, from, span, moei_refine_keys(s, h), s->m.block + (h - first) * span, width);
    for (i = 0; i < rows; i++) {
        sums[i] = 0;
        if (moei_refine_is_real(s, at + i))
            sums[i] = moei_refine_row(s, at + i, from, span, first, end, s->m.block + i * width);
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
        rows = moei_smaller(to - at, MOEI_REFINE_ROWS);
        span = moei_refine_span(s, at, rows, from, to);
        moei_refine_block(s, at, rows, from, span, first, end, sums);
        for (h = first; h < end; h++)
            moe_matmul(s->k, MOE_MATMUL_NN, MOE_TYPE_REAL, rows, experts, span, s->m.block + (h - first) * span,
                       (end - first) * span, s->all_gate + from * experts, experts, p, experts, h > first);
        for (i = 0; i < rows; i++, p += experts) {
            if (sums[i] <= 0) memcpy(p, s->all_gate + (at + i) * experts, experts * sizeof(moe_real));
            else
                for (e = 0; e < experts; e++) p[e] /= sums[i]; /* NaN is kept and found later */
        }
    }
}

static moe_status moei_route_refine(moei_pass *s) {
    size_t i, from, to, t;
    if (!MOEI_KEPT(REFINES, MOE_REFINE_SIMILARITY) && !MOEI_KEPT(REFINES, MOE_REFINE_ATTENTION)) return MOE_OK;
    for (t = 0; t < s->n; t++) /* padding has weight 0, but 0 times its content may be NaN */
        if (!moei_is_real(s->call, t)) memset(s->r->gate + t * s->experts, 0, s->experts * sizeof(moe_real));
    moei_refine_gather(s);
    moei_refine_prepare(s);
    for (i = 0; moei_sequence(s->call, i, &from, &to); i++)
        moei_refine_sequence(s, from, to + s->past);
    return moei_expect_finite(s, s->r->probabilities, s->experts, "a refined gate value");
}

#ifndef MOE_NO_TRAIN

/* d_queries += da keys and d_keys += da^T queries (NULL: not wanted), for the rows [at, at + rows)
   and the keys [from, from + span). */
static void moei_refine_products_backward(const moei_pass *s, size_t at, size_t rows, size_t from, size_t span,
                                          const moe_real *d_a, size_t width, const moe_real *keys, moe_real *d_keys) {
    const moe_kernels *k = s->k;
    size_t run, length, d = s->d;
    for (run = from; (length = moei_real_run(s->call, &run, from + span)) > 0; run += length)
        moe_matmul(k, MOE_MATMUL_NN, MOE_TYPE_REAL, rows, d, length, d_a + (run - from), width, keys + run * d, d,
                   s->m.d_unit + at * d, d, 1);
    for (run = at; d_keys != NULL && (length = moei_real_run(s->call, &run, at + rows)) > 0; run += length)
        moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, span, d, length, d_a + (run - at) * width, width,
                   moei_refine_queries(s) + run * d, d, d_keys + from * d, d, 1);
}

/* With S = E / Z and d_block = dS / Z: da = S (dS - sum S dS) = E (d_block - sum E d_block / Z), in
   place. */
static void moei_refine_block_backward(const moei_pass *s, size_t rows, size_t width, const moe_real *sums) {
    size_t i, j;
    for (i = 0; i < rows; i++) {
        const moe_real *row = s->m.block + i * width;
        moe_real *d_row = s->m.d_block + i * width, along, most;
        for (j = 0; j + 1 < width && row[j] < MOEI_R(1.0);) j++; /* S is largest here */
        most = d_row[j];
        /* only reduces rounding: in a row that is nearly one-hot dS nearly cancels */
        for (j = 0; j < width; j++) d_row[j] -= most;
        along = moe_dot(s->k, width, row, d_row) / sums[i];
        for (j = 0; j < width; j++) d_row[j] = row[j] > 0 ? row[j] * (d_row[j] - along) : 0;
    }
}

/* From da of one head, with rows width apart, the gradients of A and of |o|^2 / 2. */
static void moei_refine_attention_backward(const moei_pass *s, size_t head, size_t at, size_t rows, size_t from,
                                           size_t span, const moe_real *d_a, size_t width) {
    /* columns: sum over rows of da; dA stays finite, as the softmax before it multiplies it by A */
    moe_real *columns = s->m.column;
    moe_real *d_o = s->call->d_attention_outputs, *d_w = s->call->d_attention_weights;
    const moe_real most = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e300 : 1e38);
    size_t i, j;
    memset(columns, 0, span * sizeof(moe_real));
    for (i = 0; i < rows; i++, d_a += width) {
        size_t cell = (head * s->n + at + i) * s->n + from;
        MOEI_ADD(s->k, span, d_a, columns);
        for (j = 0; j < span && d_w != NULL; j++) {
            const moe_real d = d_a[j] < 0 || d_a[j] > 0 ? d_a[j] / s->call->attention_weights[cell + j] : 0;
            d_w[cell + j] += d > most ? most : d < -most ? -most : d;
        }
    }
    for (j = 0; j < span && d_o != NULL; j++) {
        size_t key = (head * s->n + from + j) * s->d;
        if (moei_is_real(s->call, from + j))
            moe_axpy(s->k, s->d, -(columns[j] * moei_refine_scale(s)), s->call->attention_outputs + key, d_o + key);
    }
}

/* d_p -> d_gate, and through S to queries and keys. d_p is divided by Z. */
static void moei_refine_sequence_backward(const moei_pass *s, size_t from, size_t to) {
    const moe_kernels *k = s->k;
    size_t first, end, at, rows, span, h, i, e, experts = s->experts, width, d = s->d;
    moe_real sums[MOEI_REFINE_ROWS], scale = moei_refine_scale(s);
    moei_refine_heads(s, from, to, &first, &end);
    for (at = from; at < to; at += rows) {
        moe_real *d_p = s->m.d_probabilities + at * experts;
        rows = moei_smaller(to - at, MOEI_REFINE_ROWS);
        span = moei_refine_span(s, at, rows, from, to);
        width = (end - first) * span;
        moei_refine_block(s, at, rows, from, span, first, end, sums);
        for (i = 0; i < rows; i++) {
            if (sums[i] > 0)
                for (e = 0; e < experts; e++) d_p[i * experts + e] /= sums[i];
            else MOEI_ADD(k, experts, d_p + i * experts, s->m.d_gate + (at + i) * experts);
        }
        for (h = 0; h < end - first; h++) {
            moe_matmul(k, MOE_MATMUL_NT, MOE_TYPE_REAL, rows, span, experts, d_p, experts, s->r->gate + from * experts,
                       experts, s->m.d_block + h * span, width, 0);
            moe_matmul(k, MOE_MATMUL_TN, MOE_TYPE_REAL, span, experts, rows, s->m.block + h * span, width, d_p, experts,
                       s->m.d_gate + from * experts, experts, 1);
        }
        moei_refine_block_backward(s, rows, width, sums);
        for (h = first; h < end && s->c->refine == MOE_REFINE_ATTENTION; h++)
            moei_refine_attention_backward(s, h, at, rows, from, span, s->m.d_block + (h - first) * span, width);
        for (i = 0; i < rows * width; i++) s->m.d_block[i] *= scale;
        for (h = first; h < end; h++) {
            const moe_real *d_a = s->m.d_block + (h - first) * span;
            moe_real *d_keys = s->c->refine == MOE_REFINE_SIMILARITY  ? s->m.d_keys
                               : s->call->d_attention_outputs != NULL ? s->call->d_attention_outputs + h * s->n * d
                                                                      : NULL;
            moei_refine_products_backward(s, at, rows, from, span, d_a, width, moei_refine_keys(s, h), d_keys);
        }
    }
}

/* Through unit vectors: d v += (d - v (v . d)) / |v|, for rows of width d. */
static void moei_unit_backward(const moei_pass *s, size_t rows, const moe_real *vector, const moe_real *unit,
                               moe_real *d_unit, moe_real *d_vector) {
    size_t i;
    for (i = 0; i < rows; i++) {
        size_t at = i * s->d;
        moe_axpy(s->k, s->d, -moe_dot(NULL, s->d, unit + at, d_unit + at), unit + at, d_unit + at);
        moe_axpy(s->k, s->d, moei_inverse_length(s->k, vector + at, s->d), d_unit + at, d_vector + at);
    }
}

/* d_unit is the gradient of the queries, d_keys that of the keys. */
static void moei_route_refine_backward(moei_pass *s) {
    const moe_kernels *k = s->k;
    size_t i, from, to, t, d = s->d;
    if (s->c->refine == MOE_REFINE_NONE) return;
    for (t = 0; t < s->n; t++)
        if (!moei_is_real(s->call, t)) memset(s->m.d_probabilities + t * s->experts, 0, s->experts * sizeof(moe_real));
    moei_refine_gather(s);
    memset(s->m.d_unit, 0, s->n * d * sizeof(moe_real));
    memset(s->m.d_keys, 0, s->n * d * sizeof(moe_real));
    for (i = 0; moei_sequence(s->call, i, &from, &to); i++)
        moei_refine_sequence_backward(s, from, to);
    if (s->c->similarity_learned)
        moei_affine_backward(k, s->n, d, d, moei_refine_queries(s), moei_tensor(s, MOE_ROUTER_SIMILARITY), s->m.d_keys,
                             s->m.d_unit, moei_gradient(s, MOE_ROUTER_SIMILARITY), NULL);
    else MOEI_ADD(k, s->n * d, s->m.d_keys, s->m.d_unit);
    if (s->c->refine == MOE_REFINE_ATTENTION && s->c->attention_u == MOE_ATTENTION_U_OUTPUT) {
        if (s->call->d_attention_output != NULL) MOEI_ADD(k, s->n * d, s->m.d_unit, s->call->d_attention_output);
        return;
    }
    if (s->m.unit != NULL) moei_unit_backward(s, s->n, s->r->u, s->m.unit, s->m.d_unit, s->m.d_input);
    else MOEI_ADD(k, s->n * d, s->m.d_unit, s->m.d_input);
}

#endif

/* ==== >>code_select: p, z -> S ================================================================ */

/* Whether expert_dropout works in this call: else `excluded` is not set. */
#define MOEI_EXCLUDES(s) \
    (MOEI_KEPT(EXTRAS, MOE_EXTRA_TRAINING) && (s)->call->training && (s)->c->expert_dropout > 0)

/* expert_dropout: marks what cannot be selected; not in a replay. */
static void moei_exclude(const moei_pass *s) {
    const int by_call = s->c->expert_dropout_scope == MOE_DROPOUT_SCOPE_CALL;
    unsigned char *excluded = s->m.excluded;
    size_t i, of;
    for (i = 0; i < s->n * s->experts; i++) {
        of = by_call ? i % s->experts : i;
        if (s->call->given != NULL) excluded[i] = 0;
        else if (s->call->dropped != NULL) excluded[i] = s->call->dropped[of] != 0;
        else excluded[i] = of < i ? excluded[of] : moe_rng_uniform(s->call->rng) < s->c->expert_dropout;
    }
}

/* score [N,E] with -inf for what is excluded; score itself if nothing is. */
static const moe_real *moei_selectable(const moei_pass *s, const moe_real *score) {
    size_t i;
    if (!MOEI_EXCLUDES(s)) return score;
    for (i = 0; i < s->n * s->experts; i++) s->m.selectable[i] = s->m.excluded[i] ? -MOEI_INFINITY : score[i];
    return s->m.selectable;
}

/* The scores that top_k compares and that order all choices: the student's logits if it chooses; z
   if p rises with it and nothing is added, and if sparsemixer reads it; else p + b. Excluded
   experts have -inf. */
static const moe_real *moei_selection_score(const moei_pass *s, size_t t) {
    const moe_real *bias = moei_tensor(s, MOE_ROUTER_SELECTION_BIAS), *p = s->r->probabilities + t * s->experts;
    const moe_real *score = s->r->logits + t * s->experts;
    const int rises = (moei_gate_flags[s->c->gate] & MOEI_GATE_RISES) && s->c->refine == MOE_REFINE_NONE;
    size_t e;
    if (s->frozen && s->c->student) score = s->m.student_logits + t * s->experts;
    else if (s->c->weight != MOE_WEIGHT_SPARSEMIXER && bias == NULL && !rises) score = p;
    else if (s->c->weight != MOE_WEIGHT_SPARSEMIXER && bias != NULL) {
        for (e = 0; e < s->experts; e++) s->m.row[e] = p[e] + bias[e];
        score = s->m.row;
    }
    if (!MOEI_EXCLUDES(s)) return score;
    for (e = 0; e < s->experts; e++) s->m.row[e] = s->m.excluded[t * s->experts + e] ? -MOEI_INFINITY : score[e];
    return s->m.row;
}

static size_t moei_top_k(const moei_pass *s, size_t n, const moe_real *score, size_t k, int32_t *index) {
    return moei_table(s->k)->top_k(n, score, k, index);
}

/* Whether expert e is a candidate for choice number pick of sparsemixer: not picked before and
   within 2 eps of the best. */
static int moei_sparsemixer_stays(const moe_router_config *c, const moe_real *logits, const int32_t *picks, size_t pick,
                                  moe_real best, size_t e) {
    moe_real z = logits[e], size = MOEI_F(fabs)(z) > best ? MOEI_F(fabs)(z) : best;
    size_t i;
    for (i = 0; i < pick; i++)
        if ((size_t)picks[i] == e) return 0;
    return moei_ratio(best - z, size) <= MOEI_R(2.0) * c->sparsemixer_eps;
}

/* The largest logit that is not among the picks, and its expert. */
static moe_real moei_sparsemixer_best(size_t experts, const moe_real *z, const int32_t *picks, size_t pick,
                                      int32_t *at) {
    size_t e, i;
    *at = -1;
    for (e = 0; e < experts; e++) {
        for (i = 0; i < pick && (size_t)picks[i] != e;) i++;
        if (i == pick && (*at < 0 || z[e] > z[*at])) *at = (int32_t)e;
    }
    return z[*at];
}

/* Lists the marked experts of a token as its choices, in the order of the selection score. */
static void moei_order_marked(moei_pass *s, size_t t) {
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

/* Whether this call draws the picks of sparsemixer. */
#define MOEI_IS_SAMPLED(s) ((s)->c->sparsemixer_sample && (s)->call->training && (s)->call->given == NULL)

/* Each pick is the largest z + Gumbel noise of its candidates. pick_factors receives the factor of
   its weight: 1 if it is the best one, else 1 with probability 1/4 and 1/3 otherwise. The order of
   picks is that of weights alone: choices are in the order of scores. */
static moe_status moei_select_sampled(moei_pass *s) {
    const size_t k = (size_t)s->c->top_k, most = s->r->max_choices;
    size_t t, j, e;
    for (t = 0; t < s->n; t++) {
        const moe_real *z = s->r->logits + t * s->experts;
        int32_t *picks = s->m.picks + t * most, top;
        if (!moei_is_real(s->call, t)) continue;
        for (j = 0; j < k; j++) {
            const moe_real best = moei_sparsemixer_best(s->experts, z, picks, j, &top);
            moe_real largest = -MOEI_INFINITY, sure;
            picks[j] = top;
            for (e = 0; e < s->experts; e++) {
                const moe_real noise = s->call->gumbel != NULL ? s->call->gumbel[((t * most) + j) * s->experts + e]
                                                               : moei_draw_gumbel(s->call->rng);
                if (!moei_sparsemixer_stays(s->c, z, picks, j, best, e) || !(z[e] + noise > largest)) continue;
                largest = z[e] + noise;
                picks[j] = (int32_t)e;
            }
            sure = s->call->uniform != NULL ? s->call->uniform[t * most + j] : moe_rng_uniform(s->call->rng);
            s->m.pick_factors[t * most + j] =
                picks[j] == top || sure > MOEI_R(0.75) ? MOEI_R(1.0) : MOEI_R(1.0) / MOEI_R(3.0);
        }
        memset(s->r->selected + t * s->experts, 0, s->experts);
        for (j = 0; j < k; j++) s->r->selected[t * s->experts + (size_t)picks[j]] = 1;
        moei_order_marked(s, t);
    }
    return MOE_OK;
}

static moe_status moei_select_top_k(moei_pass *s) {
    size_t (*top_k)(size_t n, const moe_real *score, size_t k, int32_t *index) = moei_table(s->k)->top_k;
    const moe_real *score = moei_selection_score(s, 0);
    /* row: p + b is computed for each token */
    size_t t, stride = score == s->m.row ? 0 : s->experts;
    if (MOEI_IS_SAMPLED(s)) return moei_select_sampled(s);
    for (t = 0; t < s->n; t++, score += stride) {
        if (!moei_is_real(s->call, t)) continue;
        if (stride == 0) score = moei_selection_score(s, t);
        s->r->n_choices[t] =
            (int32_t)top_k(s->experts, score, (size_t)s->c->top_k, s->r->choices + t * s->r->max_choices);
    }
    return MOE_OK;
}

/* p + b of one token into out. */
static void moei_biased(const moei_pass *s, size_t t, moe_real *out) {
    const moe_real *bias = moei_tensor(s, MOE_ROUTER_SELECTION_BIAS);
    size_t e;
    for (e = 0; e < s->experts; e++)
        out[e] = s->r->probabilities[t * s->experts + e] + (bias != NULL ? bias[e] : 0);
}

/* Marks the K largest of a row of scores. */
static void moei_mark_largest(moei_pass *s, size_t t, const moe_real *score) {
    int32_t *index = s->r->choices + t * s->r->max_choices;
    size_t found = moei_top_k(s, s->experts, score, (size_t)s->c->top_k, index), i;
    for (i = 0; i < found; i++) s->r->selected[t * s->experts + (size_t)index[i]] = 1;
}

static moe_status moei_select_dense(moei_pass *s) {
    size_t i;
    memset(s->r->selected, 1, s->n * s->experts);
    for (i = 0; i < s->n * s->experts && MOEI_EXCLUDES(s); i++) s->r->selected[i] = !s->m.excluded[i];
    return MOE_OK;
}

/* Forced routing: the caller's indices; -1 is no choice. */
static moe_status moei_select_given(moei_pass *s) {
    size_t t, i, k = s->r->max_choices;
    for (t = 0; t < s->n; t++)
        for (i = 0; i < k; i++) {
            int32_t e = s->call->given[t * k + i];
            if (!moei_is_real(s->call, t) || e == -1) continue;
            if (e < 0 || (size_t)e >= s->experts || s->r->selected[t * s->experts + (size_t)e])
                return MOEI_REFUSE(s->call->error, "call.given[%z] = %d: no expert, or a duplicate", t * k + i, (int)e);
            s->r->selected[t * s->experts + (size_t)e] = 1;
        }
    return MOE_OK;
}

/* The score of a group of experts, as MOE_GROUPS has it. */
static moe_real moei_group_value(const moei_pass *s, const moe_real *score, size_t size) {
    int32_t best[2];
    size_t found = moei_top_k(s, size, score, s->c->group_score == MOE_GROUP_TOP2_SUM ? 2 : 1, best), i;
    moe_real sum = found > 0 ? 0 : -MOEI_INFINITY;
    for (i = 0; i < found; i++) sum += score[best[i]];
    return sum;
}

static moe_status moei_select_grouped_top_k(moei_pass *s) {
    size_t groups = (size_t)s->c->groups, size = s->experts / groups, t, g, i, found;
    moe_real *score = s->m.row, *value = score + s->experts;
    moe_real *masked = value + s->experts;
    for (t = 0; t < s->n; t++) {
        if (!moei_is_real(s->call, t)) continue;
        moei_biased(s, t, score);
        for (g = 0; g < groups; g++) value[g] = moei_group_value(s, score + g * size, size);
        for (i = 0; i < s->experts; i++) masked[i] = -MOEI_INFINITY;
        found = moei_top_k(s, groups, value, (size_t)s->c->groups_kept, s->m.order);
        for (i = 0; i < found; i++)
            memcpy(masked + (size_t)s->m.order[i] * size, score + (size_t)s->m.order[i] * size,
                   size * sizeof(moe_real));
        moei_mark_largest(s, t, masked);
    }
    return MOE_OK;
}

static moe_status moei_select_grouped_each(moei_pass *s) {
    const size_t groups = (size_t)s->c->groups, size = s->experts / groups;
    const size_t each = (size_t)s->c->top_k / groups;
    size_t t, g, i, found;
    for (t = 0; t < s->n; t++) {
        const moe_real *score;
        if (!moei_is_real(s->call, t)) continue;
        score = moei_selection_score(s, t);
        for (g = 0; g < s->experts; g += size) {
            found = moei_top_k(s, size, score + g, each, s->m.order);
            for (i = 0; i < found; i++) s->r->selected[t * s->experts + g + (size_t)s->m.order[i]] = 1;
        }
    }
    return MOE_OK;
}

static moe_status moei_select_top_p(moei_pass *s) {
    size_t t, i;
    for (t = 0; t < s->n; t++) {
        const moe_real *p = s->r->probabilities + t * s->experts;
        int32_t *index = s->r->choices + t * s->r->max_choices;
        moe_real sum = 0;
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

/* theta; 0 for positive, which has no fallback. */
static moe_real moei_threshold(const moei_pass *s, size_t e) {
    const moe_real *learned = moei_tensor(s, MOE_ROUTER_THRESHOLD);
    if (s->c->select == MOE_SELECT_POSITIVE) return 0;
    if (learned == NULL) return s->c->threshold;
    return s->c->threshold_sigmoid ? moe_sigmoid(learned[e]) : learned[e];
}

static moe_status moei_select_threshold(moei_pass *s) {
    const int at = s->c->threshold_fallback;
    const int fallback = s->c->select == MOE_SELECT_THRESHOLD &&
                         (at == MOE_FALLBACK_ALWAYS || (at == MOE_FALLBACK_EVALUATION && !s->call->training));
    const moe_real *p = moei_selectable(s, s->r->probabilities);
    size_t t, e;
    int32_t best;
    for (t = 0; t < s->n; t++, p += s->experts) {
        int any = 0;
        if (!moei_is_real(s->call, t)) continue;
        for (e = 0; e < s->experts; e++)
            if (p[e] > moei_threshold(s, e)) {
                s->r->selected[t * s->experts + e] = 1;
                any = 1;
            }
        if (!any && fallback && moei_top_k(s, s->experts, p, 1, &best) == 1)
            s->r->selected[t * s->experts + (size_t)best] = 1;
    }
    return MOE_OK;
}

/* round(factor n / E), n the number of real tokens, at least 1, at most n. */
static size_t moei_expert_choice_capacity(const moei_pass *s, size_t n) {
    const moe_real factor = s->c->capacity_factor > 0 ? s->c->capacity_factor : MOEI_R(1.0);
    double even = (double)factor * (double)n / (double)s->experts;
    size_t capacity;
    /* 0.53 in float and 0.29 in double are below them: a product of 26.5 must become 27 */
    if (even < 1e6) even += even * (MOE_REAL_IS_DOUBLE ? 4.5e-16 : 6e-8);
    capacity = even + 0.5 >= (double)n ? n : (size_t)(even + 0.5);
    return capacity < 1 ? 1 : capacity;
}

/* Row i of moei_transpose_columns. Rows are N + 16 apart, because rows a power of two apart would
   share cache sets. */
static moe_real *moei_transposed(const moei_pass *s, size_t i) { return s->m.columns + i * (s->n + MOEI_COLUMNS); }

/* Transposes up to MOEI_COLUMNS columns of z [N,width] from `first` on, for the tokens [from, to),
   because strided columns are slow to read. The rows hold the real tokens contiguously, or with all
   = 1 every token, padding as -inf. Returns the length of the rows. */
static size_t moei_transpose_columns(const moei_pass *s, const moe_real *z, size_t width, size_t first, size_t columns,
                                     size_t from, size_t to, int all) {
    size_t t, i, at = 0;
    for (t = from; t < to; t++) {
        const moe_real *row = z + t * width + first;
        int real = moei_is_real(s->call, t);
        if (!real && !all) continue;
        for (i = 0; i < columns; i++) moei_transposed(s, i)[at] = real ? row[i] : -MOEI_INFINITY;
        at++;
    }
    return at;
}

/* The choices of all experts among the tokens [from, to). */
static void moei_choose_tokens(moei_pass *s, const moe_real *score, size_t from, size_t to) {
    const size_t capacity = moei_expert_choice_capacity(s, moei_real_tokens(s->call, from, to));
    size_t first, columns, c, i, found;
    for (first = 0; first < s->experts; first += columns) {
        columns = moei_smaller(s->experts - first, MOEI_COLUMNS);
        (void)moei_transpose_columns(s, score, s->experts, first, columns, from, to, 1);
        for (c = 0; c < columns; c++) {
            found = moei_top_k(s, to - from, moei_transposed(s, c), capacity, s->m.order);
            for (i = 0; i < found; i++) s->r->selected[(from + (size_t)s->m.order[i]) * s->experts + first + c] = 1;
        }
    }
}

static moe_status moei_select_expert_choice(moei_pass *s) {
    const moe_real *score =
        moei_selectable(s, s->c->expert_choice_score == MOE_EXPERT_CHOICE_Z ? s->r->logits : s->r->probabilities);
    const size_t sequences = s->c->expert_choice_scope == MOE_SCOPE_SEQUENCES ? moei_sequence_count(s->call) : 0;
    size_t i, from, to;
    if (s->call->decoding) /* only with a predictor */
        for (i = 0; i < s->n * s->experts; i++)
            s->r->selected[i] = moei_is_real(s->call, i / s->experts) && s->m.student_logits[i] > 0;
    else if (sequences == 0) moei_choose_tokens(s, score, 0, s->n);
    for (i = 0; i < sequences && !s->call->decoding && moei_sequence(s->call, i, &from, &to); i++)
        if (from < to) moei_choose_tokens(s, score, from, to);
    return MOE_OK;
}

/* The cutoff of a mean a after u updates, whose weights sum to 1 - rho^u. */
MOEI_TOOL moe_real moei_cutoff(const moe_router_config *c, moe_real a, moe_real updates) {
    if (!(updates > 0)) return a;
    return (moe_real)((double)a / (1.0 - MOEI_D(pow)((double)c->threshold_rho, (double)updates)));
}

static moe_status moei_select_expert_threshold(moei_pass *s) {
    const moe_real *a = moei_tensor(s, MOE_ROUTER_CUTOFF), *updates = moei_tensor(s, MOE_ROUTER_CUTOFF_UPDATES);
    size_t t, e;
    for (e = 0; e < s->experts; e++) s->m.row[e] = moei_cutoff(s->c, a[e], updates[0]);
    for (t = 0; t < s->n; t++)
        for (e = 0; e < s->experts && moei_is_real(s->call, t); e++)
            s->r->selected[t * s->experts + e] = s->r->logits[t * s->experts + e] >= s->m.row[e];
    return MOE_OK;
}

#ifndef MOE_NO_TRAIN
/* What observe adds to the state: the C-th largest logit of each expert, and 1 call. */
static void moei_route_cutoffs(const moei_pass *s) {
    moe_real *cutoff = s->m.cutoffs;
    size_t capacity = moei_expert_choice_capacity(s, s->r->n_real), first, columns, c, n, found;
    moei_fill(cutoff, s->experts + 1, 0);
    if (s->r->n_real == 0) return;
    cutoff[s->experts] = MOEI_R(1.0);
    for (first = 0; first < s->experts; first += columns) {
        columns = moei_smaller(s->experts - first, MOEI_COLUMNS);
        n = moei_transpose_columns(s, s->r->logits, s->experts, first, columns, 0, s->n, 0);
        for (c = 0; c < columns; c++) {
            found = moei_top_k(s, n, moei_transposed(s, c), capacity, s->m.order);
            cutoff[first + c] = moei_transposed(s, c)[s->m.order[found - 1]];
        }
    }
}
#endif

/* max(delta, 0) of token number i in the order of affinity. */
static moe_real moei_affinity(const moei_pass *s, size_t i) {
    const moe_real delta = s->m.column[s->m.order[i]];
    return delta > 0 ? delta : 0;
}

/* affinity_sum_auto times the mean over experts of the summed affinity of their tokens. */
static moe_real moei_affinity_rule(const moei_pass *s) {
    moe_real sum = 0;
    size_t t;
    for (t = 0; t < s->n; t++) {
        const moe_real *z = s->r->logits + t * s->experts;
        const moe_real largest = moei_is_real(s->call, t) ? z[moei_max_index(s->experts, z)] : 0;
        if (largest > 0) sum += largest;
    }
    return s->c->affinity_sum_auto * sum / (moe_real)s->experts;
}

/* How many of an expert's tokens, sorted by affinity, it keeps. */
static size_t moei_affinity_keep(const moei_pass *s, size_t found) {
    const moe_real fixed = s->r->affinity_now > 0 ? s->r->affinity_now : s->c->affinity_sum;
    moe_real total = 0, sum = 0, wanted;
    size_t keep = 0;
    for (keep = 0; keep < found; keep++) total += moei_affinity(s, keep);
    wanted = fixed > 0 ? fixed : s->c->affinity_mass * total;
    for (keep = 0; keep < found && sum < wanted; keep++) sum += moei_affinity(s, keep);
    if (keep < s->least) keep = s->least;
    if (s->c->capacity > 0 && keep > (size_t)s->c->capacity) keep = (size_t)s->c->capacity;
    return keep < found ? keep : found;
}

static moe_status moei_select_affinity(moei_pass *s) {
    /* by expert; unused until there are choices, as are the plan's offsets */
    int32_t *tokens = s->r->choices;
    size_t *starts = s->r->plan.offsets, t, e, i, found;
    for (t = 0; t < s->n; t++) s->r->n_choices[t] = -1; /* for now: the token's best expert */
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t))
            (void)moei_top_k(s, s->experts, s->r->logits + t * s->experts, 1, &s->r->n_choices[t]);
    moei_input_sort(s, s->r->n_choices, tokens, starts);
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
    moe_status status;
    for (t = 0; t < s->n; t++) {
        if (!moei_is_real(s->call, t)) continue;
        status = moei_check_token_id(s, t);
        if (status != MOE_OK) return status;
        for (i = 0; i < k; i++) {
            moe_real e = table[(size_t)s->call->token_ids[t] * k + i];
            if (!(e >= 0) || !(e < (moe_real)s->experts) || e > (moe_real)(size_t)e ||
                s->r->selected[t * s->experts + (size_t)e])
                return MOEI_REFUSE(s->call->error, "router.table: %g for token id %d is not an expert, or a duplicate",
                                   (double)e, (int)s->call->token_ids[t]);
            s->r->selected[t * s->experts + (size_t)e] = 1;
        }
    }
    return MOE_OK;
}

/* Selects the K largest logits: selections that need a batch in training do this outside
   training. */
static moe_status moei_select_by_logits(moei_pass *s) {
    size_t t;
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t)) moei_mark_largest(s, t, s->r->logits + t * s->experts);
    return MOE_OK;
}

/* One step of Sinkhorn's iteration, d0 = (1/N) / (Q d1) and d1 = (1/E) / (Q^T d0); returns the mean
   change of d1. Where Q has zeros, factors may grow without end: they are limited, as 0 times
   infinity would reach every token. */
static moe_real moei_sinkhorn_step(moei_pass *s, const moe_real *q, moe_real *d0, moe_real *d1, moe_real *next) {
    const moe_real most = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e280 : 1e25);
    moe_real change = 0, sum;
    size_t t, e;
    for (e = 0; e < s->experts; e++) next[e] = 0;
    for (t = 0; t < s->n; t++) {
        if (!moei_is_real(s->call, t)) continue;
        sum = 0;
        for (e = 0; e < s->experts; e++) sum += q[t * s->experts + e] * d1[e];
        d0[t] = moei_ratio(MOEI_R(1.0) / (moe_real)s->r->n_real, sum);
        if (d0[t] > most) d0[t] = most;
        for (e = 0; e < s->experts; e++) next[e] += q[t * s->experts + e] * d0[t];
    }
    for (e = 0; e < s->experts; e++) {
        next[e] = moei_ratio(MOEI_R(1.0) / (moe_real)s->experts, next[e]);
        if (next[e] > most) next[e] = most;
        change += MOEI_F(fabs)(next[e] - d1[e]);
        d1[e] = next[e];
    }
    return change / (moe_real)s->experts;
}

static moe_status moei_select_sinkhorn(moei_pass *s) {
    moe_real *q = s->r->weights, *d0 = s->m.column;
    moe_real *d1 = s->m.row, *next = d1 + s->experts; /* unused until the capacity stage */
    size_t t, e, step;
    if (!s->call->training) return moei_select_by_logits(s);
    for (t = 0; t < s->n; t++) {
        const moe_real *z = s->r->logits + t * s->experts;
        moe_real largest = z[0];
        if (!moei_is_real(s->call, t)) continue;
        for (e = 1; e < s->experts; e++)
            if (z[e] > largest) largest = z[e];
        for (e = 0; e < s->experts; e++) q[t * s->experts + e] = MOEI_F(exp)(z[e] - largest);
    }
    for (e = 0; e < s->experts; e++) d1[e] = MOEI_R(1.0);
    for (step = 0; step < 100 && moei_sinkhorn_step(s, q, d0, d1, next) >= MOEI_R(1e-4);) step++;
    for (t = 0; t < s->n; t++) {
        if (!moei_is_real(s->call, t)) continue;
        for (e = 0; e < s->experts; e++) q[t * s->experts + e] = q[t * s->experts + e] * d0[t] * d1[e];
        moei_mark_largest(s, t, q + t * s->experts);
    }
    return MOE_OK;
}

/* One draw from p among the experts not taken. */
static void moei_sample_expert(moe_rng *rng, size_t experts, const moe_real *p, unsigned char *taken) {
    /* drawn even if no expert is left, so that later tokens keep their draws */
    moe_real left = 0, draw = moe_rng_uniform(rng);
    size_t last = experts, e;
    for (e = 0; e < experts; e++)
        if (!taken[e] && p[e] > 0) {
            left += p[e];
            last = e;
        }
    if (last == experts) return;
    draw *= left;
    for (e = 0; e < last; e++) {
        if (taken[e] || !(p[e] > 0)) continue;
        if (draw < p[e]) break;
        draw -= p[e];
    }
    taken[e] = 1;
}

/* The generator of a token outside training. */
static moe_rng moei_sample_rng(const moei_pass *s, size_t t) {
    uint64_t hash = UINT64_C(14695981039346656037) ^ (uint64_t)s->c->sample_seed;
    moe_rng rng;
    size_t e;
    for (e = 0; e < s->experts; e++)
        hash = (hash ^ (uint64_t)moei_real_bits(s->r->logits[t * s->experts + e])) * UINT64_C(1099511628211);
    moe_rng_seed(&rng, hash);
    return rng;
}

/* K draws of token t into its row. */
static void moei_sample_token(const moei_pass *s, size_t t) {
    moe_rng own = moei_sample_rng(s, t);
    int i;
    for (i = 0; i < s->c->top_k; i++)
        moei_sample_expert(s->call->training ? s->call->rng : &own, s->experts, s->r->probabilities + t * s->experts,
                           s->r->selected + t * s->experts);
}

static moe_status moei_select_sample(moei_pass *s) {
    const int draws = s->call->training || s->c->sample_at == MOE_SAMPLE_ALWAYS, scope = s->c->sample_scope;
    const int by_call = scope == MOE_SAMPLE_CALL && s->call->training, shares = by_call || scope == MOE_SAMPLE_SEQUENCE;
    size_t first = s->n, i, t, from, to; /* first: the token that has drawn for others; n: none */
    for (i = 0; moei_sequence(s->call, i, &from, &to); i++) {
        if (!by_call) first = s->n;
        for (t = from; t < to; t++) {
            if (!moei_is_real(s->call, t)) continue;
            if (!draws) moei_mark_largest(s, t, s->r->probabilities + t * s->experts);
            else if (shares && first < s->n)
                memcpy(s->r->selected + t * s->experts, s->r->selected + first * s->experts, s->experts);
            else moei_sample_token(s, first = t);
        }
    }
    return MOE_OK;
}

/* balanced: a minimum-cost flow. Tokens are inserted one at a time by the cheapest path of moves
   a -> b -> c (the token enters a, a token of a moves to b, one of b to c) to a free seat. Each
   expert owns floor(N/E) seats. N mod E more are in a pool, at most one per expert; vertex E of the
   graph is that pool, entered by an expert that needs a seat and left through one that returns its
   seat. Experts have prices: each token is where z minus the price is largest, so the assignment is
   the best for its loads. Paths are found by Dijkstra's algorithm among the E + 1 vertices.
   Two things make rows that are nearly equal as fast as random ones: the mean of each column is
   subtracted, and prices are found for z rounded to 5, 10 and 15 bits before those of the whole z.
   All arithmetic is on integers: z is cut off to multiples of 2^-b of the power of 2 above the
   largest |z|, b = 55 - ceil(log2(E + 2)). So the sum is the largest there is within 2 N units,
   ties are exact, and every platform makes the same choice. A call takes at most
   4 N (E + 1) (4 N + 5 E + 5) steps; random rows take 10 to 100 N E, the worst rows known 10 times
   as many. */
enum { MOEI_FLOW_BITS = 55, MOEI_FLOW_STEP = 5, MOEI_FLOW_COARSE = 15 };
#define MOEI_FLOW_NONE ((int64_t)1 << 62)

typedef struct moei_flow {
    moei_pass *s;
    size_t experts, own, pool; /* own: seats of each expert; pool: seats left in the pool */
    double unit[2];            /* the product of both: units per 1 of z */
    int64_t offset;            /* makes scores positive */
    int shift;                 /* bits of the score that are left out */
    int64_t *mean;             /* [E] of the scores of an expert */
    int64_t *price;            /* [E+1] */
    int64_t *cost;             /* [E+1] of the cheapest path to this vertex, prices included */
    int64_t *loss;             /* [E,E] what the cheapest move from a to b costs, MOEI_FLOW_NONE: no move */
    int32_t *mover;            /* [E,E] the token of it, -1: none */
    int32_t *before;           /* [E+1] the vertex before it; -1: the path begins here */
    int32_t *first, *next;     /* [E], [N] the tokens of an expert: first, then next of each until -1 */
    int32_t *at;               /* [N] the expert of a token; -1: padding */
    size_t *load;              /* [E] own seats taken */
    size_t *stale;             /* [E] scratch of moei_flow_leave */
    unsigned char *extra;      /* [E] 1: has a seat of the pool */
    unsigned char *done;       /* [E+1] 1: no cheaper path exists */
    uint64_t *steps;           /* basic steps so far, for tests */
} moei_flow;

/* Below 2^(b+2). */
static int64_t moei_flow_score(const moei_flow *f, size_t token, size_t e) {
    double z = (double)f->s->r->logits[token * f->experts + e];
    return ((int64_t)(z * f->unit[0] * f->unit[1]) - f->mean[e] + f->offset) >> f->shift;
}

/* Compares the tokens from `token` on in expert a's list with the cheapest moves to the `count`
   stale targets. */
static void moei_flow_compare(const moei_flow *f, size_t a, int32_t token, size_t count) {
    int64_t *loss = f->loss + a * f->experts;
    int32_t *mover = f->mover + a * f->experts;
    size_t i;
    for (; token >= 0; token = f->next[token]) {
        int64_t score = moei_flow_score(f, (size_t)token, a);
        for (i = 0; i < count; i++) {
            size_t e = f->stale[i];
            int64_t price = score - moei_flow_score(f, (size_t)token, e);
            if (price >= loss[e]) continue;
            loss[e] = price;
            mover[e] = token;
        }
        *f->steps += count + 1;
    }
}

/* Takes a token out of expert a's list, and finds the next cheapest tokens for the moves that it
   was the cheapest for. */
static void moei_flow_leave(const moei_flow *f, size_t a, int32_t token) {
    int32_t *mover = f->mover + a * f->experts;
    int32_t *link = f->first + a;
    size_t e, count = 0;
    while (*link != token) {
        link = f->next + *link;
        ++*f->steps;
    }
    *link = f->next[token];
    for (e = 0; e < f->experts; e++) {
        if (mover[e] != token) continue;
        mover[e] = -1;
        f->loss[a * f->experts + e] = MOEI_FLOW_NONE;
        f->stale[count++] = e;
    }
    *f->steps += f->experts;
    if (count > 0) moei_flow_compare(f, a, f->first[a], count);
}

/* Puts a token into expert a's list; it may be the cheapest to move. */
static void moei_flow_enter(const moei_flow *f, size_t a, int32_t token) {
    int64_t *loss = f->loss + a * f->experts;
    int64_t score = moei_flow_score(f, (size_t)token, a);
    size_t e;
    f->at[token] = (int32_t)a;
    f->next[token] = f->first[a];
    f->first[a] = token;
    for (e = 0; e < f->experts; e++) {
        int64_t price = score - moei_flow_score(f, (size_t)token, e);
        if (price >= loss[e]) continue;
        loss[e] = price;
        f->mover[a * f->experts + e] = token;
    }
    *f->steps += f->experts;
}

static int moei_flow_has_seat(const moei_flow *f, size_t a) {
    return a < f->experts ? f->load[a] < f->own : f->pool > 0;
}

/* The open vertex of least cost; of equal ones one with a free seat, then one that may ask the pool
   for a seat, then the first. */
static size_t moei_flow_nearest(const moei_flow *f) {
    int64_t least = MOEI_FLOW_NONE;
    size_t a, best = f->experts;
    int rank = 0;
    for (a = 0; a <= f->experts; a++) {
        int own;
        if (f->done[a] || f->cost[a] > least) continue;
        own = moei_flow_has_seat(f, a) ? 3 : a < f->experts && !f->extra[a] ? 2 : 1;
        if (f->cost[a] == least && own <= rank) continue;
        least = f->cost[a];
        best = a;
        rank = own;
    }
    *f->steps += f->experts + 1;
    return best;
}

static void moei_flow_lower(const moei_flow *f, size_t a, size_t b, int64_t cost) {
    if (f->done[b] || cost >= f->cost[b]) return;
    f->cost[b] = cost;
    f->before[b] = (int32_t)a;
}

/* Finds the cheapest path of a token to a free seat, updates the prices and returns the vertex that
   has the seat. There are as many seats as tokens, and each vertex is reached. */
static size_t moei_flow_path(const moei_flow *f, size_t token) {
    const size_t pool = f->experts;
    int64_t most = -MOEI_FLOW_NONE;
    size_t a, b;
    for (b = 0; b < pool; b++) {
        f->cost[b] = f->price[b] - moei_flow_score(f, token, b);
        if (-f->cost[b] > most) most = -f->cost[b];
    }
    f->cost[pool] = MOEI_FLOW_NONE;
    for (b = 0; b <= pool; b++) {
        if (b < pool) f->cost[b] += most;
        f->before[b] = -1;
        f->done[b] = 0;
    }
    for (a = moei_flow_nearest(f); !moei_flow_has_seat(f, a); a = moei_flow_nearest(f)) {
        int64_t base = f->cost[a] - f->price[a];
        f->done[a] = 1;
        for (b = 0; b < pool; b++)
            if (a < pool) moei_flow_lower(f, a, b, base + f->loss[a * pool + b] + f->price[b]);
            else if (f->extra[b]) moei_flow_lower(f, a, b, base + f->price[b]);
        if (a < pool && !f->extra[a]) moei_flow_lower(f, a, pool, base + f->price[pool]);
        *f->steps += pool + 1;
    }
    for (b = 0; b <= pool; b++)
        if (f->done[b]) f->price[b] += f->cost[a] - f->cost[b];
    return a;
}

/* Inserts a token: one token moves along each arc of the path. */
static void moei_flow_insert(moei_flow *f, size_t token) {
    size_t to = moei_flow_path(f, token);
    if (to == f->experts) f->pool--;
    else f->load[to]++;
    while (f->before[to] >= 0) {
        size_t from = (size_t)f->before[to];
        if (from == f->experts) f->extra[to] = 0;
        else if (to == f->experts) f->extra[from] = 1;
        else {
            int32_t mover = f->mover[from * f->experts + to];
            moei_flow_leave(f, from, mover);
            moei_flow_enter(f, to, mover);
        }
        to = from;
    }
    moei_flow_enter(f, to, (int32_t)token);
}

/* Inserts all tokens, with `shift` bits of scores left out, from the prices of the last scale. */
static void moei_flow_scale(moei_flow *f, int shift) {
    int64_t *highest = f->price + f->experts;
    size_t t, e;
    f->own = f->s->r->n_real / f->experts;
    f->pool = f->s->r->n_real % f->experts;
    for (e = 0; e < f->experts; e++) {
        f->price[e] *= (int64_t)1 << (f->shift - shift);
        if (shift == 0) { /* means count as well, as the pool lets loads differ */
            f->price[e] += f->mean[e];
            f->mean[e] = 0;
        }
        if (e == 0 || f->price[e] > *highest) *highest = f->price[e];
        f->first[e] = -1;
        f->load[e] = 0;
        f->extra[e] = 0;
    }
    for (e = 0; e < f->experts * f->experts; e++) {
        f->loss[e] = MOEI_FLOW_NONE;
        f->mover[e] = -1;
    }
    f->shift = shift;
    for (t = 0; t < f->s->n; t++)
        if (moei_is_real(f->s->call, t)) moei_flow_insert(f, t);
}

/* Sets the unit and returns b. */
static int moei_flow_unit(moei_flow *f) {
    double largest = 0.0, scaled;
    size_t t, e;
    int i, bits = MOEI_FLOW_BITS;
    for (e = 1; e < f->experts + 2; e *= 2) bits--;
    for (t = 0; t < f->s->n; t++)
        for (e = 0; e < f->experts && moei_is_real(f->s->call, t); e++) {
            double z = MOEI_D(fabs)((double)f->s->r->logits[t * f->experts + e]);
            if (z > largest) largest = z;
        }
    f->unit[0] = largest < 1.0 ? 2.0 : 0.5; /* to the power of 512 */
    f->unit[1] = 1.0;
    for (i = 0; i < 9; i++) f->unit[0] *= f->unit[0];
    scaled = largest * f->unit[0];
    while (scaled * f->unit[1] >= (double)((int64_t)1 << bits)) f->unit[1] *= 0.5;
    while (scaled > 0.0 && scaled * f->unit[1] < (double)((int64_t)1 << (bits - 1))) f->unit[1] *= 2.0;
    return bits;
}

/* Sets the mean of each column, and returns how many bits the largest distance from one has. */
static int moei_flow_center(moei_flow *f, int bits) {
    int64_t most = 0;
    size_t t, e;
    f->offset = (int64_t)2 << bits;
    for (e = 0; e < f->experts; e++) f->price[e] = f->mean[e] = 0;
    for (f->shift = 0; f->s->r->n_real >> f->shift > 0;) f->shift++;
    for (t = 0; t < f->s->n; t++)
        for (e = 0; e < f->experts && moei_is_real(f->s->call, t); e++) f->price[e] += moei_flow_score(f, t, e);
    for (e = 0; e < f->experts && f->s->r->n_real > 0; e++)
        f->mean[e] = f->price[e] / (int64_t)f->s->r->n_real * ((int64_t)1 << f->shift) - f->offset;
    f->shift = 0;
    for (t = 0; t < f->s->n; t++)
        for (e = 0; e < f->experts && moei_is_real(f->s->call, t); e++) {
            int64_t distance = moei_flow_score(f, t, e) - f->offset;
            if (distance < 0) distance = -distance;
            if (distance > most) most = distance;
        }
    for (bits = 0; most >> bits > 0;) bits++;
    return bits;
}

static moe_status moei_select_balanced(moei_pass *s) {
    moei_flow f;
    size_t t, e;
    int bits, kept;
    if (!s->call->training) return moei_select_by_logits(s);
    f.s = s;
    f.experts = s->experts;
    f.mean = s->m.flow_mean;
    f.price = s->m.flow_price;
    f.cost = s->m.flow_cost;
    f.loss = s->m.flow_loss;
    f.mover = s->m.flow_mover;
    f.before = s->m.flow_before;
    f.first = s->m.flow_first;
    f.next = s->m.order;
    f.at = s->r->n_choices; /* unused, with the next two, until choices are counted */
    f.load = s->r->counts;
    f.stale = s->r->first_counts;
    f.extra = s->m.flow_extra;
    f.done = s->m.flow_done;
    f.steps = s->m.flow_steps;
    *f.steps = 0;
    for (t = 0; t < s->n; t++) f.at[t] = -1;
    bits = moei_flow_center(&f, moei_flow_unit(&f));
    for (e = 0; e < s->experts; e++) f.price[e] = 0;
    f.shift = bits;
    for (kept = MOEI_FLOW_STEP; s->r->n_real >= s->experts && kept <= MOEI_FLOW_COARSE && kept < bits;
         kept += MOEI_FLOW_STEP)
        moei_flow_scale(&f, bits - kept);
    moei_flow_scale(&f, 0);
    for (t = 0; t < s->n; t++)
        if (f.at[t] >= 0) s->r->selected[t * s->experts + (size_t)f.at[t]] = 1;
    return MOE_OK;
}

static moe_status moei_select_custom(moei_pass *s) {
    const moe_custom *custom = &s->router->custom;
    moe_status status;
    size_t i;
    if (custom->select == NULL) return moei_custom_missing(s->call, "select", "select = custom");
    status = custom->select(custom->ctx, s->router, s->call, s->r->logits, s->r->probabilities, s->r->selected);
    for (i = 0; i < s->n * s->experts; i++)
        s->r->selected[i] = s->r->selected[i] != 0 && moei_is_real(s->call, i / s->experts);
    return moei_custom_status(s, "select", status);
}

#define MOEI_SELECT_ROW(value, name, choose, flags, traits) MOEI_KEEP(SELECTS, value, choose),
static moe_status (*const moei_selects[])(moei_pass *s) = {MOE_SELECTS(MOEI_SELECT_ROW)};

/* Selects, orders the choices and counts them per expert. */
static moe_status moei_route_select(moei_pass *s) {
    const int how = s->call->given != NULL ? (int)MOE_SELECT_GIVEN : s->c->select;
    const int in_order = (moei_select_flags[how] & MOEI_SELECT_IN_ORDER) != 0;
    moe_status status;
    size_t t, i;
    if (!in_order || s->call->mask != NULL) memset(s->r->n_choices, 0, s->n * sizeof(int32_t));
    if (!in_order) memset(s->r->selected, 0, s->n * s->experts);
    if (MOEI_EXCLUDES(s)) moei_exclude(s);
    status = moei_selects[how](s);
    if (status != MOE_OK) return status;
    for (t = 0; t < s->n && !in_order; t++) {
        s->r->n_choices[t] = 0;
        if (moei_is_real(s->call, t)) moei_order_marked(s, t);
    }
    memset(s->r->counts, 0, 2 * s->experts * sizeof(size_t)); /* and first_counts, which follow */
    for (t = 0; t < s->n; t++) {
        const int32_t *choice = s->r->choices + t * s->r->max_choices;
        size_t n = (size_t)s->r->n_choices[t];
        if (n > 0) s->r->first_counts[choice[0]]++;
        for (i = 0; i < n; i++) s->r->counts[choice[i]]++;
    }
    return MOE_OK;
}

/* ==== >>code_weight: one token's choices -> w ================================================= */

/* One token: n choices at choice, z and p its rows of E values, w and dw indexed like choice. */
typedef struct moei_token {
    const moe_router_config *c;
    const moe_kernels *kernels;
    size_t experts, n;
    const int32_t *choice;
    const moe_real *z, *p;
    int sampled; /* sparsemixer: the picks were drawn, and w holds their factors */
} moei_token;

static void moei_weight_softmax(const moei_token *k, moe_real *w) {
    size_t i;
    for (i = 0; i < k->n; i++) w[i] = k->z[k->choice[i]];
    moe_softmax(k->kernels, k->n, w, MOEI_R(1.0), w);
}

static void moei_weight_raw(const moei_token *k, moe_real *w) {
    size_t i;
    for (i = 0; i < k->n; i++) w[i] = k->p[k->choice[i]];
}

/* (sum p^P)^(1/P), divided by the largest |p| before the powers, so that none leaves the range. P =
   1, as always in the weight sum, is the plain sum, so that gates with negative values keep their
   signs. */
static moe_real moei_p_norm(const moei_token *k) {
    moe_real sum = 0, largest = 0;
    const moe_real power = k->c->weight_p;
    const int plain = !MOEI_KEPT(WEIGHTS, MOE_WEIGHT_P_NORM) || (!(power < MOEI_R(1.0)) && !(power > MOEI_R(1.0)));
    size_t i;
    for (i = 0; i < k->n; i++) {
        const moe_real p = k->p[k->choice[i]], size = MOEI_F(fabs)(p);
        sum += p;
        if (size > largest) largest = size;
    }
    if (plain || !(largest > 0)) return sum;
    for (sum = 0, i = 0; i < k->n; i++) sum += MOEI_F(pow)(MOEI_F(fabs)(k->p[k->choice[i]]) / largest, power);
    return largest * MOEI_F(pow)(sum, MOEI_R(1.0) / power);
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

/* The softmax of choice number pick over its candidates is exp(z - top) times this. A forced choice
   may be far below top. */
static moe_real moei_sparsemixer_share(const moei_token *k, size_t pick, moe_real *best, moe_real *top) {
    moe_real sum = 0;
    size_t e;
    int32_t at;
    *top = moei_sparsemixer_best(k->experts, k->z, k->choice, pick, &at);
    *best = k->sampled ? *top : k->z[k->choice[pick]];
    for (e = 0; e < k->experts; e++)
        if (moei_sparsemixer_stays(k->c, k->z, k->choice, pick, *best, e)) sum += MOEI_F(exp)(k->z[e] - *top);
    return MOEI_R(1.0) / sum;
}

static void moei_weight_sparsemixer(const moei_token *k, moe_real *w) {
    size_t i;
    for (i = 0; i < k->n; i++) {
        moe_real best, top, share = moei_sparsemixer_share(k, i, &best, &top);
        w[i] = (k->sampled ? w[i] * share : share) * MOEI_F(exp)(k->z[k->choice[i]] - top);
    }
}

#ifndef MOE_NO_TRAIN

static void moei_weight_softmax_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz,
                                         moe_real *dp) {
    moe_real dot = moe_dot(NULL, k->n, w, dw);
    size_t i;
    (void)dp;
    for (i = 0; i < k->n; i++) dz[k->choice[i]] += w[i] * (dw[i] - dot);
}

static void moei_weight_raw_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz,
                                     moe_real *dp) {
    size_t i;
    (void)w;
    (void)dz;
    for (i = 0; i < k->n; i++) dp[k->choice[i]] += dw[i];
}

/* dp_i = dw_i / m - (sum_j dw_j w_j) dm/dp_i / m with dm/dp_i = |w_i|^(P-1) sign p_i (1 for P =
   1) */
static void moei_weight_p_norm_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz,
                                        moe_real *dp) {
    moe_real norm = moei_p_norm(k), dot = moe_dot(NULL, k->n, w, dw);
    moe_real power = k->c->weight_p;
    size_t i;
    (void)dz;
    for (i = 0; i < k->n; i++) {
        moe_real slope = MOEI_R(1.0);
        if (power > MOEI_R(1.0) || power < MOEI_R(1.0)) {
            slope = w[i] < 0 || w[i] > 0 ? MOEI_F(pow)(MOEI_F(fabs)(w[i]), power - MOEI_R(1.0))
                                                             : 0;
            if (w[i] < 0) slope = -slope;
        }
        dp[k->choice[i]] += moei_slope(dw[i] - dot * slope, norm);
    }
}

static void moei_weight_constant_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz,
                                          moe_real *dp) {
    (void)k;
    (void)w;
    (void)dw;
    (void)dz;
    (void)dp;
}

/* Of drawn picks the slope is that of the softmax, without the factor: an estimator. */
static void moei_weight_sparsemixer_backward(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz,
                                             moe_real *dp) {
    size_t i, e;
    (void)w;
    (void)dp;
    for (i = 0; i < k->n; i++) {
        moe_real best, top, share = moei_sparsemixer_share(k, i, &best, &top);
        moe_real chosen = share * MOEI_F(exp)(k->z[k->choice[i]] - top);
        for (e = 0; e < k->experts; e++)
            if (moei_sparsemixer_stays(k->c, k->z, k->choice, i, best, e))
                dz[e] -= dw[i] * chosen * share * MOEI_F(exp)(k->z[e] - top);
        dz[k->choice[i]] += dw[i] * chosen;
    }
}

#endif

typedef struct moei_weight {
    void (*forward)(const moei_token *k, moe_real *w);
    void (*backward)(const moei_token *k, const moe_real *w, const moe_real *dw, moe_real *dz, moe_real *dp);
} moei_weight;

#define MOEI_WEIGHT_ROW(value, name, forward, backward, flags) \
    {MOEI_KEEP(WEIGHTS, value, forward), MOEI_BACKWARD(backward)},
static const moei_weight moei_weights[] = {MOE_WEIGHTS(MOEI_WEIGHT_ROW)};

static moei_token moei_token_of(const moei_pass *s, size_t t) {
    moei_token k;
    k.c = s->c;
    k.kernels = s->k;
    k.experts = s->experts;
    k.n = (size_t)s->r->n_choices[t];
    k.sampled = MOEI_IS_SAMPLED(s);
    k.choice = (k.sampled ? s->m.picks : s->r->choices) + t * s->r->max_choices;
    k.z = s->r->logits + t * s->experts;
    k.p = s->competes ? k.z : s->r->probabilities + t * s->experts;
    return k;
}

/* Moves one number per choice of a token to or from the order of its picks, in place. */
static void moei_reorder(const moei_pass *s, size_t t, const int32_t *from, const int32_t *to, moe_real *values) {
    moe_real *by_expert = s->m.row + s->experts;
    size_t i, n = (size_t)s->r->n_choices[t];
    for (i = 0; i < n; i++) by_expert[from[i]] = values[i];
    for (i = 0; i < n; i++) values[i] = by_expert[to[i]];
}

/* Whether the weight of expert e is normalized. */
static int moei_is_normalized(const moe_router_config *c, size_t e) {
    const size_t real = (size_t)MOEI_REAL_EXPERTS(c);
    if (c->weight_over == MOE_WEIGHT_OVER_ALL || e < real) return 1;
    return c->weight_over == MOE_WEIGHT_OVER_NONZERO && e >= real + (size_t)c->n_zero;
}

/* The normalized choices of a token. */
static moei_token moei_normalized(const moei_pass *s, const moei_token *k) {
    moei_token some = *k;
    size_t i;
    some.choice = s->m.order;
    for (i = some.n = 0; i < k->n; i++)
        if (moei_is_normalized(s->c, (size_t)k->choice[i])) s->m.order[some.n++] = k->choice[i];
    return some;
}

/* w of one token where weight_over leaves choices out: they keep p. */
static void moei_weight_over(const moei_pass *s, const moei_token *k, moe_real *w) {
    const moei_token some = moei_normalized(s, k);
    moe_real *normalized = s->m.row;
    size_t i;
    if (some.n > 0) moei_weights[s->c->weight].forward(&some, normalized);
    for (i = 0; i < k->n; i++)
        w[i] = moei_is_normalized(s->c, (size_t)k->choice[i]) ? *normalized++ : k->p[k->choice[i]];
}

/* w of the chosen experts, times the learned factor of each expert. */
static void moei_route_weight(moei_pass *s) {
    const moe_real *factor = moei_tensor(s, MOE_ROUTER_EXPERT_SCALE);
    const moei_weight *weight = &moei_weights[s->c->weight];
    moei_token k = moei_token_of(s, 0);
    size_t t, i, choices = s->r->max_choices;
    for (t = 0; t < s->n; t++, k.choice += choices, k.z += s->experts, k.p += s->experts) {
        const int32_t *choice = s->r->choices + t * choices;
        moe_real *w = s->m.base_weights + t * choices;
        k.n = (size_t)s->r->n_choices[t];
        if (k.sampled && k.n > 0) memcpy(w, s->m.pick_factors + t * choices, k.n * sizeof *w);
        if (s->c->weight_over != MOE_WEIGHT_OVER_ALL) moei_weight_over(s, &k, w);
        else if (k.n > 0) weight->forward(&k, w);
        if (k.sampled) moei_reorder(s, t, k.choice, choice, w);
        for (i = 0; i < k.n && factor != NULL; i++)
            s->r->choice_weights[t * choices + i] = w[i] * factor[choice[i]];
    }
}

#ifndef MOE_NO_TRAIN
/* The backward pass of moei_weight_over: base and dw by choice, d_p by expert. Overwrites dw. */
static void moei_weight_over_backward(const moei_pass *s, const moei_token *k, const moe_real *base, moe_real *dw,
                                      moe_real *dz, moe_real *d_p) {
    const moei_token some = moei_normalized(s, k);
    moe_real *w = s->m.row + 2 * s->experts;
    size_t i, n = 0;
    for (i = 0; i < k->n; i++) {
        if (!moei_is_normalized(s->c, (size_t)k->choice[i])) {
            d_p[k->choice[i]] = dw[i];
            continue;
        }
        w[n] = base[i];
        dw[n++] = dw[i];
    }
    if (n > 0) moei_weights[s->c->weight].backward(&some, w, dw, dz, d_p);
}

/* A learned threshold: the factor [p > theta] of a chosen expert has the slope of sigmoid((p -
   theta) / kappa). */
static void moei_threshold_backward(moei_pass *s, const moei_token *k, size_t t, const moe_real *dw,
                                    const moe_real *d_through) {
    moe_real *d_theta = moei_gradient(s, MOE_ROUTER_THRESHOLD), kappa = MOEI_R(0.01);
    size_t i;
    for (i = 0; i < k->n; i++) {
        size_t e = (size_t)k->choice[i];
        moe_real theta = moei_threshold(s, e), above = (k->p[e] - theta) / kappa;
        moe_real d_factor = d_through[e] * k->p[e];
        if (moei_weight_flags[s->c->weight] & MOEI_WEIGHT_COUNTS)
            d_factor = dw[i] / (s->c->weight == MOE_WEIGHT_UNIFORM ? (moe_real)k->n : MOEI_R(1.0));
        /* s (1 - s) would cancel */
        d_factor *= moe_sigmoid(above) * moe_sigmoid(-above) / kappa;
        s->m.d_probabilities[t * s->experts + e] += d_factor;
        if (d_theta != NULL)
            d_theta[e] -= s->c->threshold_sigmoid ? d_factor * theta * (MOEI_R(1.0) - theta) : d_factor;
    }
}

static void moei_route_weight_backward(moei_pass *s) {
    const moe_real *factor = moei_tensor(s, MOE_ROUTER_EXPERT_SCALE);
    moe_real *d_factor = moei_gradient(s, MOE_ROUTER_EXPERT_SCALE), *dw = s->m.row;
    moe_real *d_p = dw + s->experts;
    size_t t, i, e;
    for (t = 0; t < s->n; t++) {
        moei_token k = moei_token_of(s, t);
        const int32_t *choice = s->r->choices + t * s->r->max_choices;
        const moe_real *base = s->m.base_weights + t * s->r->max_choices;
        if (k.n == 0) continue;
        for (i = 0; i < k.n; i++) {
            e = (size_t)choice[i];
            dw[i] = s->m.d_weights[t * s->experts + e];
            if (factor == NULL) continue;
            if (d_factor != NULL) d_factor[e] += dw[i] * base[i];
            dw[i] *= factor[e];
        }
        if (k.sampled) moei_reorder(s, t, choice, k.choice, dw);
        for (i = 0; i < k.n; i++) d_p[k.choice[i]] = 0;
        if (s->c->weight_over == MOE_WEIGHT_OVER_ALL)
            moei_weights[s->c->weight].backward(&k, base, dw, s->m.d_logits + t * s->experts, d_p);
        else moei_weight_over_backward(s, &k, base, dw, s->m.d_logits + t * s->experts, d_p);
        if (s->c->threshold_learned && s->c->select == MOE_SELECT_THRESHOLD) moei_threshold_backward(s, &k, t, dw, d_p);
        for (i = 0; i < k.n; i++)
            (s->competes ? s->m.d_logits : s->m.d_probabilities)[t * s->experts + (size_t)k.choice[i]] +=
                d_p[k.choice[i]];
    }
}
#endif

/* ==== >>code_capacity: which assignments stay ================================================= */

/* delta: the largest |cos| between a real token [width] as the score compares it and an expert's
   gating vector. */
static moe_real moei_largest_cosine(const moei_pass *s, size_t width) {
    const moe_real *v = s->c->score == MOE_SCORE_COSINE ? moei_cosine_tokens(s) : s->r->u,
                   *w = moei_tensor(s, MOE_ROUTER_WEIGHT);
    moe_real largest = 0, *product = s->r->weights; /* unused until there are weights */
    moe_real over_block = MOEI_F(sqrt)((moe_real)s->experts / (moe_real)s->d);
    size_t t, e, q, block = s->d / s->experts;
    if (w != NULL) moei_affine(s->k, s->n, s->experts, width, v, w, NULL, product);
    for (t = 0; t < s->n; t++) {
        moe_real inverse = moei_inverse_length(s->k, v + t * width, width); /* 0 of padding, which is 0 */
        moe_real cosine;
        for (e = 0; e < s->experts; e++) {
            if (w != NULL)
                cosine = product[t * s->experts + e] * moei_inverse_length(s->k, w + e * width, width) * inverse;
            else { /* grap: a gating vector is 1 on its block of features */
                cosine = 0;
                for (q = 0; q < block; q++) cosine += v[t * width + e * block + q] * inverse * over_block;
            }
            if (MOEI_F(fabs)(cosine) > largest) largest = MOEI_F(fabs)(cosine);
        }
    }
    return largest < MOEI_R(1.0) ? largest : MOEI_R(1.0);
}

/* C_min of earlier calls; 0 if there were none. */
static moe_real moei_bound_before(const moei_pass *s) {
    const moe_real *state = moei_tensor(s, MOE_ROUTER_CAPACITY);
    return state != NULL ? state[0] : 0;
}

/* Whether this call computes C_min. */
static int moei_computes_bound(const moei_pass *s) {
    if (!MOEI_KEPT(EXTRAS, MOE_EXTRA_CAPACITY) || s->c->capacity_bound == MOE_BOUND_NONE) return 0;
    return s->c->capacity_bound == MOE_BOUND_EVERY || !(moei_bound_before(s) > 0);
}

/* C_min = exp(d delta^2 / (2 - delta^2)) / E of this call, computed in logarithms so that it cannot
   overflow; at most 2^24. */
static moe_real moei_bound_of(moei_pass *s, moe_real delta) {
    moe_real d = (moe_real)moei_vector_width(s), square = delta * delta;
    s->r->capacity_bound = d * square / (MOEI_R(2.0) - square) - MOEI_F(log)((moe_real)s->experts);
    if (s->r->capacity_bound > MOEI_F(log)(MOEI_R(16777216.0))) return MOEI_R(16777216.0);
    return MOEI_F(exp)(s->r->capacity_bound);
}

/* Raises the least capacity to C_min. What is averaged is limited to [1, N] first, so that one call
   cannot hold later ones at N. */
static void moei_route_bound(moei_pass *s, moe_real delta) {
    const moe_real most = (moe_real)s->r->n_real, rho = s->c->capacity_rho;
    moe_real bound = moei_bound_before(s), now = bound;
    size_t least;
    if (moei_computes_bound(s)) {
        now = moei_bound_of(s, delta);
        if (rho > 0) {
            const moe_real limited = now > most ? most : now < MOEI_R(1.0) ? MOEI_R(1.0) : now;
            bound = bound > 0 ? rho * bound + (MOEI_R(1.0) - rho) * limited : limited;
        } else bound = now;
        s->r->bound_now = bound;
    } else {
        s->r->capacity_bound = MOEI_F(log)(bound);
    }
    s->r->capacity_clamped = now > most;
    least = bound > most ? s->r->n_real : (size_t)MOEI_F(ceil)(bound);
    if (least > s->least) s->least = least;
}

/* C, the most assignments per expert, a real one or one without matrices; 0: no limit. */
static size_t moei_capacity(const moei_pass *s, moe_real factor, int real) {
    moe_real even;
    size_t capacity = (size_t)s->c->drop_capacity;
    size_t most = s->r->n_real;
    if (capacity == 0) {
        if (s->c->select == MOE_SELECT_EXPERT_CHOICE) return 0;
        if (s->c->select == MOE_SELECT_AFFINITY && !(factor > 0)) return 0;
        even = factor * (moe_real)s->c->top_k * (moe_real)most / moei_even_share(s->c, real);
        /* 1.2 in float and 0.4 in double are above 1.2 and 0.4: a product of 30 must not become
           31 */
        if (even < MOEI_R(1e6)) even -= even * (MOE_REAL_IS_DOUBLE ? MOEI_R(4.5e-16) : MOEI_R(2e-7));
        even = MOEI_F(ceil)(even);
        capacity = even >= (moe_real)most ? most : (size_t)even;
        if (capacity < s->least) capacity = s->least;
    }
    if (capacity > most) capacity = most;
    return capacity > 0 ? capacity : 1;
}

/* The expert of choice number i of token t. */
static size_t moei_chosen(const moei_pass *s, size_t t, size_t i) {
    return (size_t)s->r->choices[t * s->r->max_choices + i];
}

/* Random dropping of weak choices, in training only: GShard's second choice, all choices but the
   first of ST-MoE. */
static void moei_drop_by_rule(moei_pass *s) {
    size_t t, i;
    for (t = 0; t < s->n; t++)
        for (i = 1; i < (size_t)s->r->n_choices[t]; i++) {
            moe_real w = s->r->choice_weights[t * s->r->max_choices + i];
            moe_real keep = s->c->drop_rule == MOE_DROP_RULE_GSHARD ? MOEI_R(2.0) * w : w / MOEI_R(0.2);
            if (s->c->drop_rule == MOE_DROP_RULE_GSHARD && i > 1) continue;
            if (moe_rng_uniform(s->call->rng) >= keep) s->r->kept[t * s->r->max_choices + i] = 0;
        }
}

/* The order in which tokens are placed; -1: none. */
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
    /* padding */
    for (t = moei_top_k(s, s->n, s->m.column, s->n, s->m.order); t < s->n; t++) s->m.order[t] = -1;
}

static size_t moei_capacity_of(const moei_pass *s, size_t e) {
    return e < s->r->real_experts ? s->r->capacity : s->r->capacity_zero;
}

/* Places all first choices, then all second ones, ..., in the order of tokens, until an expert is
   full. */
static void moei_drop_by_choice(moei_pass *s) {
    size_t choice, i, e;
    moei_drop_order(s);
    for (e = 0; e < s->experts; e++) s->r->plan.offsets[e] = 0; /* for now: how many are placed */
    for (choice = 0; choice < s->r->max_choices; choice++)
        for (i = 0; i < s->n; i++) {
            size_t t = (size_t)s->m.order[i], at = t * s->r->max_choices + choice;
            if (s->m.order[i] < 0 || choice >= (size_t)s->r->n_choices[t] || !s->r->kept[at]) continue;
            e = moei_chosen(s, t, choice);
            s->r->kept[at] = s->r->plan.offsets[e] < moei_capacity_of(s, e);
            s->r->plan.offsets[e] += s->r->kept[at];
        }
}

/* Each expert keeps its largest p; the lower token wins ties. */
static void moei_drop_by_score(moei_pass *s) {
    size_t e, t, i, found;
    for (e = 0; e < s->experts; e++) {
        for (t = 0; t < s->n; t++) s->m.column[t] = -MOEI_INFINITY;
        for (t = 0; t < s->n; t++)
            for (i = 0; i < (size_t)s->r->n_choices[t]; i++)
                if (moei_chosen(s, t, i) == e && s->r->kept[t * s->r->max_choices + i])
                    s->m.column[t] = s->r->probabilities[t * s->experts + e];
        found = moei_top_k(s, s->n, s->m.column, moei_capacity_of(s, e), s->m.order);
        for (i = 0; i < found; i++) s->m.column[s->m.order[i]] = MOEI_INFINITY;
        for (t = 0; t < s->n; t++)
            for (i = 0; i < (size_t)s->r->n_choices[t]; i++)
                if (moei_chosen(s, t, i) == e && s->m.column[t] < MOEI_INFINITY)
                    s->r->kept[t * s->r->max_choices + i] = 0;
    }
}

/* Sum of a token's surviving weights, by which renormalize = after divides. */
static moe_real moei_surviving(const moei_pass *s, size_t t) {
    moe_real sum = 0;
    size_t i;
    for (i = 0; i < (size_t)s->r->n_choices[t]; i++)
        if (s->r->kept[t * s->r->max_choices + i]) sum += s->r->choice_weights[t * s->r->max_choices + i];
    return sum;
}

/* Decides which assignments are kept and fills in the dense matrix of their final weights. Returns
   0 if a weight is not finite. */
static int moei_route_capacity(moei_pass *s) {
    int finite = 1;
    moe_routing *r = s->r;
    const moe_real given = s->call->training ? s->c->capacity_factor : s->c->capacity_factor_eval;
    /* of the selection in force, and of the configured one */
    const int drops = given > 0 && moei_factor_drops(s->c) && moei_factor_drops(&s->router->config);
    const moe_real factor = drops ? given : 0;
    const int limits = factor > 0 || s->c->drop_capacity > 0 || s->c->capacity_bound != MOE_BOUND_NONE;
    size_t choices = r->max_choices, dropped = 0, t, i;
    memset(r->kept, 1, s->n * r->max_choices);
    if (MOEI_KEPT(EXTRAS, MOE_EXTRA_CAPACITY) && limits) {
        r->capacity = moei_capacity(s, factor, 1);
        r->capacity_zero = moei_capacity(s, factor, 0);
    }
    if (MOEI_KEPT(EXTRAS, MOE_EXTRA_CAPACITY) && s->call->training && s->c->drop_rule != MOE_DROP_RULE_NONE)
        moei_drop_by_rule(s);
    if (r->capacity > 0 && s->c->drop_order == MOE_DROP_SCORE) moei_drop_by_score(s);
    else if (r->capacity > 0) moei_drop_by_choice(s);
    /* and selected, which follows */
    memset(r->weights, 0, s->n * s->experts * (sizeof(moe_real) + 1));
    for (t = 0; t < s->n; t++) {
        const int32_t *choice = r->choices + t * choices;
        const moe_real *w = r->choice_weights + t * choices;
        const unsigned char *kept = r->kept + t * choices;
        size_t n = (size_t)r->n_choices[t], row = t * s->experts;
        const int after = s->c->renormalize == MOE_RENORMALIZE_AFTER;
        const moe_real sum = after ? moei_surviving(s, t) : 0;
        for (i = 0; i < n; i++) {
            const moe_real weight = kept[i] ? (after ? moei_ratio(w[i], sum) : w[i]) * s->c->scale : 0;
            finite &= moe_is_finite(weight);
            r->weights[row + (size_t)choice[i]] = weight;
            r->selected[row + (size_t)choice[i]] = kept[i];
            dropped += !kept[i];
        }
    }
    r->n_dropped = dropped;
    return finite;
}

/* ==== >>code_plan: the dispatch plan ========================================================== */

/* offsets[e + 1] = the start of the row of expert e; filling the row advances it to the end. */
static void moei_plan_rows(const moei_pass *s) {
    const moe_routing *r = s->r;
    size_t *start = r->plan.offsets + 1, t, i, e, sum = 0, count;
    const size_t *counts = r->counts;
    if (r->n_dropped > 0) {
        memset(start, 0, s->experts * sizeof(size_t));
        for (t = 0; t < s->n; t++)
            for (i = 0; i < (size_t)r->n_choices[t]; i++)
                start[moei_chosen(s, t, i)] += r->kept[t * r->max_choices + i];
        counts = start;
    }
    r->plan.offsets[0] = 0;
    for (e = 0; e < s->experts; e++) {
        count = counts[e];
        start[e] = sum;
        sum += count;
    }
}

/* The surviving assignments sorted by expert, then by token. */
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
            moe_assignment *entry;
            if (!r->kept[t * choices + i]) continue;
            entry = r->plan.assignments + at[choice[i]]++;
            entry->token = (int32_t)t;
            entry->choice = (int32_t)i;
            entry->weight_in = on_input ? w[choice[i]] : MOEI_R(1.0);
            entry->weight_out = on_input ? MOEI_R(1.0) : w[choice[i]];
        }
    }
}

#ifndef MOE_NO_TRAIN
/* From the gradients of the plan's assignments, through scale and renormalization, to those of the
   weight stage. */
static void moei_route_plan_backward(moei_pass *s) {
    moe_routing *r = s->r;
    const moe_real *d_final;
    size_t e, i, t;
    for (e = 0; e < s->experts; e++)
        for (i = r->plan.offsets[e]; i < r->plan.offsets[e + 1]; i++)
            s->m.d_final[(size_t)r->plan.assignments[i].token * s->experts + e] =
                s->c->apply_to == MOE_APPLY_INPUT ? r->d_weight_in[i] : r->d_weight_out[i];
    for (t = 0; t < s->n; t++) {
        moe_real scale = s->c->scale, along = 0;
        if (s->c->renormalize == MOE_RENORMALIZE_AFTER) {
            scale = moei_slope(scale, moei_surviving(s, t));
            for (e = 0; e < s->experts; e++) /* w' = s w / sum w: dw = s / sum (d - sum d w' / s) */
                if (r->selected[t * s->experts + e])
                    along += s->m.d_final[t * s->experts + e] * moei_ratio(r->weights[t * s->experts + e], s->c->scale);
        }
        d_final = s->m.d_final + t * s->experts;
        for (e = 0; e < s->experts; e++)
            if (r->selected[t * s->experts + e]) s->m.d_weights[t * s->experts + e] += scale * (d_final[e] - along);
    }
}
#endif

/* ==== >>code_soft: Soft MoE =================================================================== */

/* L [N,M] = u . phi, or unit(u) . unit(phi) times the learned scale. */
static void moei_soft_logits(moei_pass *s) {
    const moe_real *phi = moei_tensor(s, MOE_ROUTER_SLOT_VECTORS), *u = s->r->u;
    size_t total = moei_slot_total(s->c), i, q, cells = s->n * total;
    if (s->c->soft_normalise) {
        for (i = 0; i < s->n + total; i++) {
            const moe_real *from = i < s->n ? u + i * s->d : phi + (i - s->n) * s->d;
            moe_real *to = i < s->n ? s->m.unit + i * s->d : s->m.keys + (i - s->n) * s->d,
                     inverse = moei_inverse_length(s->k, from, s->d);
            for (q = 0; q < s->d; q++) to[q] = from[q] * inverse;
        }
        u = s->m.unit;
        phi = s->m.keys;
    }
    moei_affine(s->k, s->n, total, s->d, u, phi, NULL, s->r->logits);
    if (!s->c->soft_normalise) return;
    for (i = 0; i < cells; i++) s->r->logits[i] *= moei_tensor(s, MOE_ROUTER_SLOT_SCALE)[0];
}

/* D: for each slot the softmax of L over the real tokens of [from, to). */
static void moei_soft_dispatch(const moei_pass *s, size_t from, size_t to) {
    size_t total = moei_slot_total(s->c), first, columns, i, t, count;
    for (first = 0; first < total; first += columns) {
        columns = moei_smaller(total - first, MOEI_COLUMNS);
        count = moei_transpose_columns(s, s->r->logits, total, first, columns, from, to, 0);
        for (i = 0; i < columns; i++)
            moe_softmax(s->k, count, moei_transposed(s, i), MOEI_R(1.0), moei_transposed(s, i));
        count = 0;
        for (t = from; t < to; t++) {
            int real = moei_is_real(s->call, t);
            for (i = 0; i < columns; i++)
                s->r->gate[t * total + first + i] = real ? moei_transposed(s, i)[count] : 0;
            count += (size_t)real;
        }
    }
}

/* Every real token of a sequence contributes to every slot of it; row = sequence * slots + slot.
   The assignments of an expert are sorted by token, then by slot. */
static void moei_soft_plan(moei_pass *s) {
    size_t total = moei_slot_total(s->c), slots = (size_t)s->c->slots;
    size_t sequences = moei_sequence_count(s->call);
    size_t e, i, slot, t, from, to;
    moe_assignment *rows = s->r->plan.assignments;
    s->r->plan.rows = slots * sequences;
    for (e = 0; e < s->experts; e++) {
        s->r->plan.offsets[e] = (size_t)(rows - s->r->plan.assignments);
        for (i = 0; moei_sequence(s->call, i, &from, &to); i++)
            for (t = from; t < to; t++)
                for (slot = 0; slot < slots && moei_is_real(s->call, t); slot++) {
                    const size_t cell = t * total + e * slots + slot;
                    rows->token = (int32_t)t;
                    rows->choice = (int32_t)(i * slots + slot);
                    rows->weight_in = s->r->gate[cell];
                    rows->weight_out = s->r->probabilities[cell];
                    s->r->weights[t * s->experts + e] += rows->weight_out;
                    rows++;
                }
    }
    s->r->plan.offsets[s->experts] = (size_t)(rows - s->r->plan.assignments);
}

static moe_status moei_route_soft(moei_pass *s) {
    size_t total = moei_slot_total(s->c), i, t, from, to;
    moei_soft_logits(s);
    for (i = 0; i < s->n * s->experts; i++) {
        s->r->weights[i] = 0;
        s->r->selected[i] = moei_is_real(s->call, i / s->experts) != 0;
    }
    memset(s->r->counts, 0, 2 * s->experts * sizeof(size_t)); /* and first_counts, which follow */
    for (i = 0; moei_sequence(s->call, i, &from, &to); i++)
        moei_soft_dispatch(s, from, to);
    for (t = 0; t < s->n; t++) {
        s->r->n_choices[t] = 0;
        moe_softmax(s->k, total, s->r->logits + t * total, MOEI_R(1.0), s->r->probabilities + t * total);
    }
    moei_soft_plan(s);
    return moei_expect_finite(s, s->r->logits, total, "a logit");
}

#ifndef MOE_NO_TRAIN
/* From the gradients of the plan's assignments, those of D and C, through both softmaxes to
   d_logits. */
static void moei_soft_plan_backward(moei_pass *s) {
    moe_routing *r = s->r;
    size_t total = moei_slot_total(s->c), slots = (size_t)s->c->slots, e, i, t, slot, from, to;
    for (e = 0; e < s->experts; e++)
        for (i = r->plan.offsets[e]; i < r->plan.offsets[e + 1]; i++) {
            size_t cell = (size_t)r->plan.assignments[i].token * total + e * slots +
                          (size_t)r->plan.assignments[i].choice % slots;
            s->m.d_gate[cell] = r->d_weight_in[i];
            s->m.d_probabilities[cell] = r->d_weight_out[i];
        }
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t))
            moe_softmax_backward(total, r->probabilities + t * total, s->m.d_probabilities + t * total, MOEI_R(1.0),
                                 s->m.d_logits + t * total);
    for (i = 0; moei_sequence(s->call, i, &from, &to); i++)
        for (slot = 0; slot < total; slot++) {
            moe_real along = 0;
            for (t = from; t < to; t++) along += r->gate[t * total + slot] * s->m.d_gate[t * total + slot];
            for (t = from; t < to; t++)
                s->m.d_logits[t * total + slot] += r->gate[t * total + slot] * (s->m.d_gate[t * total + slot] - along);
        }
}

static void moei_route_soft_backward(moei_pass *s) {
    const moe_kernels *k = s->k;
    const moe_real *phi = moei_tensor(s, MOE_ROUTER_SLOT_VECTORS), *u = s->r->u;
    moe_real *d_phi = moei_gradient(s, MOE_ROUTER_SLOT_VECTORS), *d_scale = moei_gradient(s, MOE_ROUTER_SLOT_SCALE);
    const size_t total = moei_slot_total(s->c), cells = s->n * total;
    moe_real scale, sum = 0;
    size_t i;
    int flat;
    moei_soft_plan_backward(s);
    if (!s->c->soft_normalise) {
        moei_affine_backward(k, s->n, total, s->d, u, phi, s->m.d_logits, s->m.d_input, d_phi, NULL);
        return;
    }
    scale = moei_tensor(s, MOE_ROUTER_SLOT_SCALE)[0];
    flat = scale >= 0 && scale <= 0; /* only the scale has a gradient */
    for (i = 0; i < cells; i++) {
        sum += s->m.d_logits[i] * s->r->logits[i];
        if (!flat) s->m.d_logits[i] *= scale;
    }
    memset(s->m.d_unit, 0, s->n * s->d * sizeof(moe_real));
    memset(s->m.d_keys, 0, total * s->d * sizeof(moe_real));
    moei_affine_backward(k, s->n, total, s->d, s->m.unit, s->m.keys, s->m.d_logits, s->m.d_unit, s->m.d_keys, NULL);
    if (d_scale != NULL) d_scale[0] += flat ? moe_dot(k, total * s->d, s->m.keys, s->m.d_keys) : sum / scale;
    if (flat) return;
    moei_unit_backward(s, s->n, u, s->m.unit, s->m.d_unit, s->m.d_input);
    if (d_phi != NULL) moei_unit_backward(s, total, phi, s->m.keys, s->m.d_keys, d_phi);
}
#endif

/* ==== >>code_losses: value and gradient; counts and f are constants =========================== */

#ifndef MOE_NO_TRAIN

/* The sum of a row if the balance loss must normalize it, else 1; 0: the row is skipped. */
static moe_real moei_row_mass(const moei_pass *s, const moe_real *p) {
    moe_real sum = 0;
    size_t e;
    if (moei_gate_flags[s->c->gate] & MOEI_GATE_SUMS_TO_ONE) return MOEI_R(1.0);
    for (e = 0; e < s->experts; e++) sum += p[e];
    return sum;
}

/* f_e of the experts without matrices: their mean with zero_average; then times tau. */
static void moei_balance_zero(const moe_router_config *c, moe_real *f) {
    const int real = MOEI_REAL_EXPERTS(c), zero = c->n_experts - real;
    moe_real sum = 0;
    int e;
    for (e = real; e < c->n_experts; e++) sum += f[e];
    for (e = real; e < c->n_experts; e++) f[e] = (c->zero_average ? sum / (moe_real)zero : f[e]) * c->zero_tau;
}

/* f_e of the tokens [from, to) into f; returns how many of them are real. */
static size_t moei_balance_shares(const moei_pass *s, size_t from, size_t to, moe_real *f) {
    size_t t, e, i, real = 0;
    moe_real total = 0;
    for (e = 0; e < s->experts; e++) f[e] = 0;
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
    moei_balance_zero(s->c, f);
    return real;
}

/* The balance loss of the tokens [from, to), without its factor; adds factor times its gradient to
   d_p (NULL: not wanted). */
static moe_real moei_balance_part(const moei_pass *s, size_t from, size_t to, moe_real factor, moe_real *d_p) {
    moe_real *f = s->m.row, sum = 0, scale;
    const int normalized = (moei_gate_flags[s->c->gate] & MOEI_GATE_SUMS_TO_ONE) != 0;
    size_t t, e, real = moei_balance_shares(s, from, to, f);
    if (real == 0) return 0;
    scale = (moe_real)s->experts / (moe_real)real;
    for (t = from; t < to; t++) {
        const moe_real *p = s->r->probabilities + t * s->experts;
        moe_real mass, inner = 0;
        if (!moei_is_real(s->call, t)) continue;
        mass = moei_row_mass(s, p);
        for (e = 0; e < s->experts; e++) inner += f[e] * p[e];
        inner = moei_ratio(inner, mass);
        sum += inner;
        if (d_p == NULL) continue;
        for (e = 0; e < s->experts; e++) /* d(p_e / sum p) */
            d_p[t * s->experts + e] += factor * scale * moei_slope(f[e] - (normalized ? 0 : inner), mass);
    }
    return scale * sum;
}

static moe_real moei_loss_balance(moei_pass *s, moe_real factor, int backward) {
    moe_real *d_p = backward ? s->m.d_probabilities : NULL, sum = 0;
    size_t i, from, to, parts = 0, t;
    if (s->c->balance_scope == MOE_SCOPE_BATCH) return factor * moei_balance_part(s, 0, s->n, factor, d_p);
    for (i = 0; moei_sequence(s->call, i, &from, &to); i++) { /* skips sequences of padding only */
        for (t = from; t < to && !moei_is_real(s->call, t);) t++;
        parts += t < to;
    }
    if (parts == 0) return 0;
    for (i = 0; moei_sequence(s->call, i, &from, &to); i++)
        sum += moei_balance_part(s, from, to, factor / (moe_real)parts, d_p);
    return factor * sum / (moe_real)parts;
}

static moe_real moei_loss_z(moei_pass *s, moe_real factor, int backward) {
    moe_real sum = 0, over_n = MOEI_R(1.0) / (moe_real)s->r->n_real;
    size_t t, e;
    for (t = 0; t < s->n; t++) {
        const moe_real *z = s->r->logits + t * s->experts;
        moe_real lse;
        if (!moei_is_real(s->call, t)) continue;
        lse = moe_log_sum_exp(s->experts, z);
        sum += lse * lse;
        if (!backward) continue;
        for (e = 0; e < s->experts; e++)
            s->m.d_logits[t * s->experts + e] += factor * over_n * MOEI_R(2.0) * lse * MOEI_F(exp)(z[e] - lse);
    }
    return factor * sum * over_n;
}

/* The values that the importance loss sums: p, the gate or the weights of one token. Returns the
   array that receives their gradient. */
static moe_real *moei_importance_row(const moei_pass *s, size_t t, moe_real *values) {
    const moe_routing *r = s->r;
    size_t e, i;
    if (s->c->importance_over != MOE_IMPORTANCE_WEIGHTS) {
        const int gate = s->c->importance_over == MOE_IMPORTANCE_GATE, clean = gate && MOEI_IS_NOISY(s);
        const moe_real *v = clean ? s->m.clean_gate : gate ? r->gate : r->probabilities;
        memcpy(values, v + t * s->experts, s->experts * sizeof(moe_real));
        return clean ? s->m.d_clean_gate : gate ? s->m.d_gate : s->m.d_probabilities;
    }
    for (e = 0; e < s->experts; e++) values[e] = 0;
    for (i = 0; i < (size_t)r->n_choices[t]; i++)
        values[r->choices[t * r->max_choices + i]] = r->choice_weights[t * r->max_choices + i];
    return s->m.d_weights;
}

/* CV^2 of sums [E], 0 if the mean is 0; replaces the sums by factor times the slopes. First
   subtracts the smallest, so that deviations are exactly 0 at balance and the mean keeps its digits
   when one sum exceeds all others. */
static moe_real moei_squared_variation(const moei_pass *s, moe_real factor, moe_real *sums) {
    moe_real base = sums[0], mean = 0;
    moe_real variance = 0, count = (moe_real)s->experts;
    moe_real freedom = s->c->unbiased ? count - MOEI_R(1.0) : count;
    size_t e;
    for (e = 1; e < s->experts; e++)
        if (sums[e] < base) base = sums[e];
    for (e = 0; e < s->experts; e++) {
        sums[e] -= base;
        mean += sums[e];
    }
    mean /= count;
    for (e = 0; e < s->experts; e++) {
        sums[e] -= mean;
        variance += sums[e] * sums[e];
    }
    mean += base;
    variance /= freedom;
    for (e = 0; e < s->experts; e++)
        sums[e] =
            factor * MOEI_R(2.0) * moei_slope(sums[e] / freedom - moei_slope(variance, mean * count), mean * mean);
    return moei_ratio(variance, mean * mean);
}

/* w CV^2 of I_e = sum_t v_te. */
static moe_real moei_loss_importance(moei_pass *s, moe_real factor, int backward) {
    moe_real *sums = s->m.row, *values = sums + s->experts;
    moe_real *target = NULL, value;
    size_t t, e;
    if (s->experts < 2) return 0;
    for (e = 0; e < s->experts; e++) sums[e] = 0;
    for (t = 0; t < s->n; t++) {
        if (!moei_is_real(s->call, t)) continue;
        target = moei_importance_row(s, t, values);
        for (e = 0; e < s->experts; e++) sums[e] += values[e];
    }
    value = moei_squared_variation(s, factor, sums);
    for (t = 0; t < s->n && backward; t++)
        if (moei_is_real(s->call, t)) MOEI_ADD(s->k, s->experts, sums, target + t * s->experts);
    return factor * value;
}

/* gamma mean_t H(p_t); 0 ln 0 = 0 with derivative 0. */
static moe_real moei_loss_entropy(moei_pass *s, moe_real factor, int backward) {
    moe_real sum = 0, over_n = MOEI_R(1.0) / (moe_real)s->r->n_real;
    size_t t, e;
    for (t = 0; t < s->n; t++) {
        if (!moei_is_real(s->call, t)) continue;
        for (e = 0; e < s->experts; e++) {
            moe_real p = s->r->probabilities[t * s->experts + e], log_p;
            if (!(p > 0)) continue;
            log_p = MOEI_F(log)(p);
            sum -= p * log_p;
            if (backward) s->m.d_probabilities[t * s->experts + e] -= factor * over_n * (log_p + MOEI_R(1.0));
        }
    }
    return factor * sum * over_n;
}

/* -gamma H(mean_t p_t). */
static moe_real moei_loss_usage_entropy(moei_pass *s, moe_real factor, int backward) {
    moe_real *mean = s->m.row, over_n = MOEI_R(1.0) / (moe_real)s->r->n_real;
    moe_real sum = 0;
    size_t t, e;
    for (e = 0; e < s->experts; e++) mean[e] = 0;
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t)) moe_axpy(s->k, s->experts, over_n, s->r->probabilities + t * s->experts, mean);
    for (e = 0; e < s->experts; e++) {
        moe_real log_m = mean[e] > 0 ? MOEI_F(log)(mean[e]) : 0;
        sum += mean[e] * log_m;
        mean[e] = mean[e] > 0 ? factor * over_n * (log_m + MOEI_R(1.0)) : 0;
    }
    for (t = 0; t < s->n && backward; t++)
        if (moei_is_real(s->call, t)) MOEI_ADD(s->k, s->experts, mean, s->m.d_probabilities + t * s->experts);
    return factor * sum;
}

static moe_real moei_distance(const moe_real *a, const moe_real *b, size_t n) {
    moe_real sum = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return MOEI_F(sqrt)(sum);
}

/* Over ordered pairs of tokens: D (same/E sum_e p_e p'_e - diff/(E^2-E) sum_{e != e'} p_e p'_e'),
   divided by B^2 - B. */
static moe_real moei_loss_similarity(moei_pass *s, moe_real factor, int backward) {
    const moe_real *x = s->m.batch_x != NULL ? s->m.batch_x : s->call->x;
    size_t t, o, e, count = s->experts;
    moe_real pairs = (moe_real)s->r->n_real * ((moe_real)s->r->n_real - MOEI_R(1.0)), value = 0;
    moe_real same = s->c->loss_similarity_same / (moe_real)count;
    moe_real diff =
        count > 1 ? s->c->loss_similarity_diff / ((moe_real)count * ((moe_real)count - MOEI_R(1.0))) : 0;
    (void)factor;
    if (s->r->n_real < 2) return 0;
    for (t = 0; t < s->n; t++)
        for (o = 0; o < s->n; o++) {
            const moe_real *p = s->r->probabilities + t * count, *other = s->r->probabilities + o * count;
            moe_real distance, global = 0, mass = 0;
            moe_real other_mass = 0;
            if (t == o || !moei_is_real(s->call, t) || !moei_is_real(s->call, o)) continue;
            distance = s->call->distances != NULL ? s->call->distances[t * s->n + o]
                                                  : moei_distance(x + t * s->d, x + o * s->d, s->d);
            distance /= pairs;
            for (e = 0; e < count; e++) {
                global += p[e] * other[e];
                mass += p[e];
                other_mass += other[e];
            }
            value += distance * (same * global - diff * (mass * other_mass - global));
            /* the pair in this order; the other order adds the other half */
            for (e = 0; e < count && backward; e++) {
                s->m.d_probabilities[t * count + e] += distance * (same * other[e] - diff * (other_mass - other[e]));
                s->m.d_probabilities[o * count + e] += distance * (same * p[e] - diff * (mass - p[e]));
            }
        }
    return value;
}

static size_t moei_token_machine(const moei_pass *s, size_t t) {
    return s->call->token_machine != NULL ? (size_t)s->call->token_machine[t] : 0;
}

static size_t moei_expert_machine(const moei_pass *s, size_t e) {
    return s->call->expert_machine != NULL ? (size_t)s->call->expert_machine[e] : e * (size_t)s->c->nodes / s->experts;
}

/* mu sum_o pi_o KL(q_o || l_o): l_o is 1 - eps at machine o and eps / (M - 1) at each other
   machine. */
static moe_real moei_loss_locality(moei_pass *s, moe_real factor, int backward) {
    moe_real *q = s->m.row, value = 0;
    moe_real eps = MOEI_R(0.01);
    size_t machines = (size_t)s->c->nodes, local, j, t, e;
    for (local = 0; local < machines; local++) {
        size_t count = 0;
        for (t = 0; t < s->n; t++) {
            if (!moei_is_real(s->call, t) || moei_token_machine(s, t) != local) continue;
            /* not without tokens: there may be many machines */
            if (count++ == 0) memset(q, 0, machines * sizeof *q);
            for (e = 0; e < s->experts; e++) q[moei_expert_machine(s, e)] += s->r->probabilities[t * s->experts + e];
        }
        if (count == 0) continue;
        for (j = 0; j < machines; j++) { /* q becomes the slope ln(q/l) + 1 */
            moe_real wanted = j == local ? MOEI_R(1.0) - eps : eps / (moe_real)(machines - 1), log_ratio;
            q[j] /= (moe_real)count;
            if (!(q[j] > 0)) {
                q[j] = 0;
                continue;
            }
            log_ratio = MOEI_F(log)(q[j] / wanted);
            value += (moe_real)count * q[j] * log_ratio;
            q[j] = log_ratio + MOEI_R(1.0);
        }
        for (t = 0; t < s->n && backward; t++)
            for (e = 0; e < s->experts; e++)
                if (moei_is_real(s->call, t) && moei_token_machine(s, t) == local)
                    s->m.d_probabilities[t * s->experts + e] +=
                        factor / (moe_real)s->r->n_real * q[moei_expert_machine(s, e)];
    }
    return factor * value / (moe_real)s->r->n_real;
}

/* lambda E / (K N^2) sum_e n_e sum_t p_te. */
static moe_real moei_loss_l1(moei_pass *s, moe_real factor, int backward) {
    moe_real scale = (moe_real)s->experts / ((moe_real)s->c->top_k * (moe_real)s->r->n_real * (moe_real)s->r->n_real),
             sum = 0;
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
    moe_real *load = s->m.row, value = 0;
    size_t t, e, count = s->experts, k = (size_t)s->c->top_k;
    int round;
    if (k >= count || !MOEI_IS_NOISY(s)) return 0;
    for (e = 0; e < count; e++) load[e] = 0;
    /* first the loads, then, with dL/dload in load, the gradients */
    for (round = 0; round <= backward; round++) {
        for (t = 0; t < s->n; t++) {
            if (!moei_is_real(s->call, t)) continue;
            (void)moe_top_k(count, s->r->logits + t * count, k + 1, s->m.order);
            for (e = 0; e < count; e++) {
                size_t cell = t * count + e, rival = t * count + moei_rival(s, s->m.order, e);
                moe_real scale = moei_noise_scale(s, cell), a = (s->m.clean_logits[cell] - s->r->logits[rival]) / scale,
                         slope;
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

/* The gradient of router.weight, or NULL where it is not wanted. */
static moe_real *moei_trained_weight(const moei_pass *s, int backward) {
    const int trained = backward && (moei_score_flags[s->router->config.score] & MOEI_SCORE_TRAINED);
    return trained ? moei_gradient(s, MOE_ROUTER_WEIGHT) : NULL;
}

/* w sum over e != e' of cos(W_e, W_e')^2. */
static moe_real moei_loss_orthogonal(moei_pass *s, moe_real factor, int backward) {
    const moe_real *w = moei_tensor(s, MOE_ROUTER_WEIGHT);
    moe_real *d_w = moei_trained_weight(s, backward), sum = 0;
    size_t width = moei_vector_width(s), a, b;
    const moe_kernels *k = s->k;
    for (a = 0; a < s->experts; a++)
        for (b = 0; b < a; b++) {
            const moe_real *wa = w + a * width, *wb = w + b * width;
            moe_real ia = moei_inverse_length(k, wa, width), ib = moei_inverse_length(k, wb, width);
            moe_real cosine = moe_dot(k, width, wa, wb) * ia * ib;
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

/* w sqrt(sum over e != e' of cos(W_e, W_e')^2). */
static moe_real moei_loss_diversity(moei_pass *s, moe_real factor, int backward) {
    const moe_real norm = MOEI_F(sqrt)(moei_loss_orthogonal(s, MOEI_R(1.0), 0));
    if (backward && norm > 0) (void)moei_loss_orthogonal(s, factor / (MOEI_R(2.0) * norm), 1);
    return factor * norm;
}

/* w mean_e |W_e|. */
static moe_real moei_loss_simplicity(moei_pass *s, moe_real factor, int backward) {
    const moe_kernels *k = s->k;
    const moe_real *w = moei_tensor(s, MOE_ROUTER_WEIGHT);
    moe_real *d_w = moei_trained_weight(s, backward), sum = 0;
    const size_t width = moei_vector_width(s);
    size_t e;
    for (e = 0; e < s->experts; e++) {
        const moe_real inverse = moei_inverse_length(k, w + e * width, width);
        if (!(inverse > 0)) continue;
        sum += MOEI_R(1.0) / inverse;
        if (d_w != NULL) moe_axpy(k, width, factor / (moe_real)s->experts * inverse, w + e * width, d_w + e * width);
    }
    return factor * sum / (moe_real)s->experts;
}

/* The distance of softmax(v) from the teacher's, of one token: ce_hard -ln q_best, ce_soft - sum p
   ln q, mse sum (q - p)^2 / E. q and p [E] are scratch; adds slope times its gradient to d_v (NULL:
   not wanted). */
static moe_real moei_distill(const moei_pass *s, const moe_real *v, const moe_real *teacher, moe_real *q, moe_real *p,
                             moe_real slope, moe_real *d_v) {
    size_t e, best = 0, count = s->experts;
    moe_real lse = moe_log_sum_exp(count, v), value = 0;
    int mse = s->c->distill == MOE_DISTILL_MSE;
    moe_softmax(s->k, count, v, MOEI_R(1.0), q);
    moe_softmax(s->k, count, teacher, MOEI_R(1.0), p);
    for (e = 1; e < count; e++)
        if (teacher[e] > teacher[best]) best = e;
    for (e = 0; e < count; e++) {
        if (s->c->distill == MOE_DISTILL_CE_HARD) p[e] = e == best ? MOEI_R(1.0) : 0;
        value += mse ? (q[e] - p[e]) * (q[e] - p[e]) / (moe_real)count : p[e] * (lse - v[e]);
        /* d/dq, or directly d/dv */
        p[e] = mse ? MOEI_R(2.0) / (moe_real)count * (q[e] - p[e]) : q[e] - p[e];
    }
    if (d_v == NULL) return value;
    for (e = 0; e < count; e++) p[e] *= slope;
    if (mse) moe_softmax_backward(count, q, p, MOEI_R(1.0), d_v);
    else MOEI_ADD(s->k, count, p, d_v);
    return value;
}

/* factor mean_t of the distance between the student and this router, or this router and the
   caller's teacher. */
static moe_real moei_loss_distill(moei_pass *s, moe_real factor, int backward) {
    const moe_real *v = s->c->student ? s->m.student_logits : s->r->logits,
                   *teacher = s->c->student ? s->r->logits : s->call->teacher;
    moe_real *d_v = s->c->student ? s->m.d_student : s->m.d_logits, sum = 0;
    moe_real share = factor / (moe_real)s->r->n_real;
    size_t t;
    for (t = 0; t < s->n; t++) {
        size_t row = t * s->experts;
        if (!moei_is_real(s->call, t)) continue;
        sum += moei_distill(s, v + row, teacher + row, s->m.row, s->m.row + s->experts, share,
                            backward ? d_v + row : NULL);
    }
    return share * sum;
}

/* alpha sum_e (n_e - nbar) / nbar sum over the tokens of e of sigmoid(z_te). */
static moe_real moei_loss_stable_balance(moei_pass *s, moe_real factor, int backward) {
    moe_real mean = 0, sum = 0;
    size_t t, i, e;
    for (e = 0; e < s->experts; e++) mean += (moe_real)s->r->counts[e];
    mean /= (moe_real)s->experts;
    for (t = 0; t < s->n; t++)
        for (i = 0; i < (size_t)s->r->n_choices[t]; i++) {
            const size_t cell = t * s->experts + moei_chosen(s, t, i);
            const moe_real excess = ((moe_real)s->r->counts[moei_chosen(s, t, i)] - mean) / mean;
            const moe_real z = s->r->logits[cell], open = moe_sigmoid(z);
            sum += excess * open;
            if (backward) s->m.d_logits[cell] += factor * excess * open * moe_sigmoid(-z);
        }
    return factor * sum;
}

/* factor mean_t of a term of moei_selector_terms; the backward pass of the score adds the
   gradient. */
static moe_real moei_selector_loss(const moei_pass *s, moe_real factor, size_t term) {
    moe_real sum = 0;
    size_t t;
    for (t = 0; t < s->n; t++)
        if (moei_is_real(s->call, t)) sum += s->m.selectors[2 * t + term];
    return factor * sum / (moe_real)s->r->n_real;
}

static moe_real moei_loss_selector_entropy(moei_pass *s, moe_real factor, int backward) {
    (void)backward;
    return moei_selector_loss(s, factor, 0);
}

static moe_real moei_loss_selector_reach(moei_pass *s, moe_real factor, int backward) {
    (void)backward;
    return moei_selector_loss(s, factor, 1);
}

/* Per pair: ln(1 + e^v), less v if it was chosen. */
static moe_real moei_loss_predictor(moei_pass *s, moe_real factor, int backward) {
    const moe_real share = factor / (moe_real)s->r->n_real;
    moe_real sum = 0;
    size_t t, e, i, cell;
    for (t = 0; t < s->n; t++) {
        for (e = 0; e < s->experts && moei_is_real(s->call, t); e++) {
            cell = t * s->experts + e;
            sum += moei_softplus(s->r->predicted[cell]);
            if (backward) s->m.d_student[cell] += share * moe_sigmoid(s->r->predicted[cell]);
        }
        for (i = 0; i < (size_t)s->r->n_choices[t]; i++) {
            cell = t * s->experts + moei_chosen(s, t, i);
            sum -= s->r->predicted[cell];
            if (backward) s->m.d_student[cell] -= share;
        }
    }
    return share * sum;
}

#define MOEI_LOSS_ROW(value, name, f, field) f,
static moe_real (*const moei_losses[])(moei_pass *s, moe_real factor, int backward) = {MOE_LOSSES(MOEI_LOSS_ROW)};

/* The values of all losses; backward 1: their gradients. */
static void moei_route_losses(moei_pass *s, int backward) {
    moe_real factor, value;
    int loss;
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++) {
        factor = moei_loss_factor(s->c, loss);
        value = factor > 0 && s->r->n_real > 0 ? moei_losses[loss](s, factor, backward) : 0;
        if (!backward) s->r->loss[loss] = value;
    }
}
#endif

/* ==== >>code_route: the stages ================================================================ */

/* Makes the empty plan of a call without tokens. */
static void moei_route_nothing(const moei_pass *s) {
    moe_routing *r = s->r;
    memset(r->plan.offsets, 0, (3 * r->n_experts + 1) * sizeof(size_t)); /* and both counts, which follow */
    if (s->m.cutoffs != NULL) moei_fill(s->m.cutoffs, s->experts + 1, 0);
}

/* Fills in a pass, except its private arrays. */
static void moei_pass_begin(moei_pass *s, const moe_router *router, const moe_call *call, moe_routing *r) {
    memset(s, 0, offsetof(moei_pass, m));
    s->router = router;
    s->k = router->kernels;
    s->c = &router->config;
    s->call = call;
    s->r = r;
    s->n = call->n_tokens;
    s->experts = (size_t)router->config.n_experts;
    s->d = (size_t)router->config.d_model;
    s->least = (size_t)router->config.capacity_min;
    s->noisy = call->training && router->config.noise != MOE_NOISE_NONE;
    if (MOEI_KEPT(EXTRAS, MOE_EXTRA_SCHEDULE) && (router->parts & MOEI_PART_MOVES)) moei_schedule(s);
}

/* The stages that depend on one token and its sequence: z, r, p. */
static moe_status moei_route_tokens(moei_pass *s, const moei_pass *batch, moe_real *delta) {
    moe_status status = moei_route_input(s, batch);
    /* a process without tokens draws the same random numbers */
    if (status == MOE_OK && s->n == 0 && MOEI_IS_NOISY(s)) moei_route_noise(s);
    if (status != MOE_OK || s->n == 0) return status;
    status = moei_route_score(s);
    if (status != MOE_OK) return status;
    if (s->c->capacity_bound != MOE_BOUND_NONE && moei_computes_bound(s))
        *delta = moei_largest_cosine(s, moei_vector_width(s));
    moei_route_gate(s, s->r->logits, s->r->gate);
    if (MOEI_IS_NOISY(s)) moei_route_gate(s, s->m.clean_logits, s->m.clean_gate);
    return s->c->refine != MOE_REFINE_NONE ? moei_route_refine(s) : MOE_OK;
}

/* The stages that compare tokens: S, w and the assignments that are kept. own: the pass of the
   tokens that the plan is for. */
static moe_status moei_route_assignments(moei_pass *s, moei_pass *own, moe_real delta) {
    moe_status status;
    if (MOEI_KEPT(EXTRAS, MOE_EXTRA_CAPACITY) && s->c->capacity_bound != MOE_BOUND_NONE) moei_route_bound(s, delta);
    if (s->c->affinity_sum_auto > 0) {
        const moe_real *first = moei_tensor(s, MOE_ROUTER_AFFINITY_SUM);
        s->r->affinity_now = first != NULL && first[0] > 0 ? first[0] : moei_affinity_rule(s);
    }
    status = moei_route_select(s);
    if (status != MOE_OK) return status;
    moei_route_weight(s);
    if (!moei_route_capacity(s))
        return moei_error(s->call->error, MOE_ERR_NONFINITE, "a weight of the dispatch plan is infinite or NaN");
    /* nonzero, because the counts cover the batch */
    own->r->n_dropped = own == s ? s->r->n_dropped : 1;
    moei_route_plan(own);
#ifndef MOE_NO_TRAIN
    if (s->m.cutoffs != NULL) moei_route_cutoffs(s);
    if (s->call->training) moei_route_losses(s, 0);
#endif
    return MOE_OK;
}

static moe_status moei_route_stages(moei_pass *s) {
    moe_real delta = 0;
    moe_status status;
    if (moei_is_soft(s->c)) {
        (void)moei_route_input(s, s);
        return moei_route_soft(s);
    }
    status = moei_route_tokens(s, s, &delta);
    return status == MOE_OK ? moei_route_assignments(s, s, delta) : status;
}

/* ==== >>code_batch: moe_route; one call of several processes =====================================
   The stages up to refine work on the call's own tokens. Those from select on work on all tokens of
   the batch, in every process alike: a second pass over the same arrays with all of their rows.
   Between the two the rows are gathered. */

/* The call of all tokens of a batch, from the result of moei_gather_call. */
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
    all.token_machine = m->batch_sequences[total + 2] & MOEI_HAS_HOME ? m->batch_home : NULL;
    all.teacher = m->batch_teacher;
    return all;
}

/* Converts the flags of all tokens to offsets of non-empty sequences; after them their number and
   the mask of supplied arrays. Returns 0 if processes supply different arrays. */
static int moei_sequences_of_flags(size_t total, unsigned char *flags, int32_t *sequences) {
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

/* Gathers the data of all tokens that any stage may need. status: whether the call is valid in this
   process. */
static moe_status moei_gather_call(const moe_call *call, moe_status status, size_t choices, const moei_scratch *m) {
    const moe_batch *batch = call->batch;
    unsigned has = moei_supplied(call);
    size_t t, i, from, to;
    if (status != MOE_OK) return moei_gather_from(call, status, 1, NULL, m->batch_mask);
    for (t = 0; t < call->n_tokens; t++)
        m->batch_mask[batch->first + t] = (unsigned char)(has | (moei_is_real(call, t) ? MOEI_REAL_TOKEN : 0));
    for (i = 0; moei_sequence(call, i, &from, &to); i++)
        if (to > from) m->batch_mask[batch->first + from] |= MOEI_BEGINS;
    status = moei_gather_from(call, status, 1, NULL, m->batch_mask);
    if (status != MOE_OK) return status;
    if (!moei_sequences_of_flags(batch->total, m->batch_mask, m->batch_sequences))
        return MOEI_REFUSE(call->error, "the processes of the batch differ in the arrays that they supply");
    has = (unsigned)m->batch_sequences[batch->total + 2];
    if (m->batch_ids != NULL && !(has & MOEI_HAS_GIVEN))
        status = moei_gather_from(call, status, sizeof(int32_t), call->token_ids, m->batch_ids);
    if (status == MOE_OK && (has & MOEI_HAS_GIVEN))
        status = moei_gather_from(call, status, choices * sizeof(int32_t), call->given, m->batch_given);
    if (status == MOE_OK && (has & MOEI_HAS_HOME) && m->batch_home != NULL)
        status = moei_gather_from(call, status, sizeof(int32_t), call->token_machine, m->batch_home);
    return status;
}

/* Moves the arrays of a routing to the row of token `first`. */
static void moei_routing_advance(moe_routing *r, size_t first) {
    const size_t cell = first * r->n_experts, choice = first * r->max_choices;
    r->logits += cell;
    r->gate += cell;
    r->probabilities += cell;
    r->weights += cell;
    r->selected += cell;
    if (r->predicted != NULL) r->predicted += cell;
    r->choices += choice;
    r->n_choices += first;
    r->kept += choice;
    r->choice_weights += choice;
}

#define MOEI_ARRAY_ADVANCE(type, name, when, rows, columns, per_token) \
    if ((per_token) > 0 && m->name != NULL) m->name += first * (per_token);
/* Makes the pass of the process's own tokens from that of the batch: the same arrays, starting at
   their rows. own_r becomes its routing. */
static void moei_own_pass(const moei_pass *s, const moe_call *call, moe_routing *own_r, moei_pass *own) {
    const size_t experts = s->experts, first = call->batch->first;
    const size_t choices = s->r->max_choices;
    const size_t cell = first * experts, pair = first * choices;
    moei_scratch *m = &own->m;
    *own = *s;
    if (s->c == &s->effective) own->c = &own->effective;
    own->call = call;
    own->r = own_r;
    own->n = call->n_tokens;
    own->is_part = 1;
    own->before = first;
    own->after = call->batch->total - first - call->n_tokens;
    *own_r = *s->r;
    moei_routing_advance(own_r, first);
    m->base_weights += pair;
    m->column += first;
    m->d_probabilities = moei_from_row(m->d_probabilities, cell);
    MOEI_ARRAYS(MOEI_ARRAY_ADVANCE)
}

/* Gathers the arrays that the stages from select on read. */
static moe_status moei_gather_tokens(const moei_pass *s, const moei_pass *own, moe_status status, moe_real *delta) {
    const moe_call *call = own->call;
    size_t row = s->experts * sizeof(moe_real), t;
    status = moei_gather_from(call, status, row, NULL, s->r->logits);
    if (status == MOE_OK && s->c->refine != MOE_REFINE_NONE)
        status = moei_gather_from(call, status, row, NULL, s->r->probabilities);
    if (status == MOE_OK && MOEI_IS_NOISY(s)) status = moei_gather_from(call, status, row, NULL, s->m.clean_logits);
    if (status == MOE_OK && MOEI_IS_NOISY(s) && s->c->noise == MOE_NOISE_NOISY_TOPK)
        status = moei_gather_from(call, status, row, NULL, s->m.noise_raw);
    if (status == MOE_OK && MOEI_TEACHES(s->c))
        status = moei_gather_from(call, status, row, NULL, s->m.student_logits);
    if (status == MOE_OK && s->m.selectors != NULL)
        status = moei_gather_from(call, status, 2 * sizeof(moe_real), NULL, s->m.selectors);
    if (status == MOE_OK && s->m.batch_teacher != NULL)
        status = moei_gather_from(call, status, row, call->teacher, s->m.batch_teacher);
    if (status == MOE_OK && s->m.batch_x != NULL && !(s->supplied & MOEI_HAS_DISTANCES))
        status = moei_gather_from(call, status, s->d * sizeof(moe_real), call->x, s->m.batch_x);
    if (status != MOE_OK || !moei_computes_bound(s)) return status;
    for (t = 0; t < own->n; t++) own->m.column[t] = *delta;
    status = moei_gather_from(call, status, sizeof(moe_real), NULL, s->m.column);
    if (status != MOE_OK) return status;
    for (t = 0; t < s->n; t++)
        if (s->m.column[t] > *delta) *delta = s->m.column[t];
    return MOE_OK;
}

/* Routes a batch globally. status: whether the call is valid in this process; it is sent to the
   other processes. */
static moe_status moei_route_globally(const moei_pass *own_call, moe_status status) {
    const moe_call *call = own_call->call;
    moe_call all;
    moei_pass batch, *s = &batch;
    moe_routing own_r;
    moei_pass own;
    moe_real delta = 0;
    status = moei_gather_call(call, status, own_call->r->max_choices, &own_call->m);
    if (status != MOE_OK) return status;
    all = moei_batch_call(call, &own_call->m);
    batch = *own_call;
    if (own_call->c == &own_call->effective) batch.c = &batch.effective;
    s->call = &all;
    s->n = all.n_tokens;
    s->supplied = (unsigned)s->m.batch_sequences[s->n + 2];
    moei_own_pass(s, call, &own_r, &own);
    if (s->n == 0) {
        moei_route_nothing(s);
        return MOE_OK;
    }
    s->r->n_real = moei_real_tokens(&all, 0, s->n);
    status = moei_route_tokens(&own, s, &delta);
    if (status == MOE_OK && (s->supplied & MOEI_HAS_DISTANCES) && call->distances == NULL)
        status = moei_missing(call, "distances", "the call of another process");
    s->r->u = own_r.u;
    s->r->clean_logits = own_r.clean_logits;
    if (s->c->predictor) s->r->predicted = s->m.student_logits;
    status = moei_gather_tokens(s, &own, status, &delta);
    if (status != MOE_OK) return status;
    moei_route_gate(s, s->r->logits, s->r->gate);
    if (MOEI_IS_NOISY(s)) moei_route_gate(s, s->m.clean_logits, s->m.clean_gate);
    return moei_route_assignments(s, &own, delta);
}

/* The routing of the call's own tokens in a batch with global routing, else a copy. counts,
   first_counts, capacity and losses remain those of the batch. mask as in the call. */
static moe_routing moei_routing_own(const moe_routing *routing, const unsigned char *mask) {
    moe_routing own = *routing;
    size_t t, i;
    if (own.plan.n_tokens >= own.n_tokens) return own;
    moei_routing_advance(&own, own.first);
    own.n_tokens = own.plan.n_tokens;
    own.first = own.n_real = own.n_dropped = 0;
    for (t = 0; t < own.n_tokens; t++) {
        own.n_real += mask == NULL || mask[t] != 0;
        for (i = 0; i < (size_t)own.n_choices[t]; i++) own.n_dropped += !own.kept[t * own.max_choices + i];
    }
    return own;
}

/* Whether the call's tokens fit into its batch. */
static int moei_batch_fits(const moe_call *call) {
    const moe_batch *b = call->batch;
    return b->gather != NULL && b->first <= b->total && call->n_tokens <= b->total - b->first &&
           MOEI_FITS_INT32(b->total);
}

moe_status moe_route(const moe_router *router, const moe_call *call, void *workspace, size_t size,
                     moe_routing *routing) {
    moei_layout l = moei_layout_begin(workspace);
    moe_routing r;
    moei_pass s;
    moe_status status;
    size_t n;
    int global;
    if (router == NULL || call == NULL) return MOE_ERR_ARGUMENT;
    if (workspace == NULL || routing == NULL) return MOEI_REFUSE(call->error, "workspace and routing must not be NULL");
    if (call->batch != NULL && !moei_batch_fits(call))
        return MOEI_REFUSE(call->error, "call.batch: first, total or gather is invalid");
    status = moei_call_check(router, call);
    global = call->batch != NULL && moei_is_global(router, call);
    if (status != MOE_OK && !global) return status;
    n = call->n_past + call->n_tokens;
    moei_route_layout(router, n, global ? call->batch->total : n, global, call->training, &l, &r, &s.m);
    if (l.overflow && status == MOE_OK)
        status = moei_error(call->error, MOE_ERR_OVERFLOW, "n_tokens = %z: too many", call->n_tokens);
    if (l.used > size && status == MOE_OK)
        status =
            moei_error(call->error, MOE_ERR_SPACE, "the workspace has %z bytes, but the call needs %z", size, l.used);
    moei_pass_begin(&s, router, call, &r);
    r.n_tokens = global ? call->batch->total : s.n;
    r.first = global ? call->batch->first : 0;
    r.plan.n_tokens = s.n;
    r.n_experts = r.plan.n_experts = s.experts;
    r.real_experts = (size_t)MOEI_REAL_EXPERTS(s.c);
    r.top_k = s.c->top_k;
    r.memory = workspace;
    if (global) status = moei_route_globally(&s, status);
    else if (status != MOE_OK) return status;
    else if (s.n == 0) moei_route_nothing(&s);
    else status = moei_route_stages(&s);
    /* in two parts, because some compilers copy a struct of this size by a slow instruction */
    if (status == MOE_OK) {
        memcpy(routing, &r, offsetof(moe_routing, counts));
        memcpy(&routing->counts, &r.counts, sizeof r - offsetof(moe_routing, counts));
    }
    return status;
}

/* ==== >>code_backward: moe_route_backward ===================================================== */

#ifndef MOE_NO_TRAIN
/* A predictor's loss does not reach what it reads. */
static void moei_route_student_backward(moei_pass *s) {
    moe_real *d_in = s->c->student_dim > 0 ? s->m.d_student_input : s->m.d_input;
    moe_real *d_table = moei_gradient(s, MOE_ROUTER_STUDENT_EMBEDDING);
    const moe_real *in;
    size_t t, width;
    const int weight = moei_student_weight(s, &in, &width);
    if (s->c->student_dim > 0) memset(d_in, 0, s->n * width * sizeof *d_in);
    moei_affine_backward(s->k, s->n, s->experts, width, in, moei_tensor(s, weight), s->m.d_student,
                         s->c->predictor ? NULL : d_in, moei_gradient(s, weight),
                         s->competes ? moei_gradient(s, MOE_ROUTER_BIAS) : NULL);
    for (t = 0; t < s->n && s->c->student_dim > 0 && d_table != NULL; t++)
        if (moei_is_real(s->call, t))
            MOEI_ADD(s->k, width, d_in + t * width, d_table + (size_t)s->call->token_ids[t] * width);
}

/* The backward pass of the call's own tokens, from the gradients of the plan's assignments and of
   the losses. */
static moe_status moei_route_tokens_backward(moei_pass *s, moe_real *dx) {
    moei_route_plan_backward(s);
    moei_route_weight_backward(s);
    moei_route_refine_backward(s);
    moei_route_gate_backward(s);
    moei_route_noise_backward(s);
    moei_route_residual_backward(s);
    moei_scores[s->c->score].backward(s);
    if (MOEI_TEACHES(s->c) && !s->frozen) moei_route_student_backward(s);
    moei_route_input_backward(s, dx);
    return s->status;
}

static void moei_backward_begin(moei_pass *s, size_t own_tokens) {
    const size_t bytes = s->n * (moei_is_soft(s->c) ? moei_slot_total(s->c) : s->experts) * sizeof(moe_real);
    memset(s->m.d_logits, 0, bytes);
    memset(s->m.d_gate, 0, bytes);
    memset(s->m.d_probabilities, 0, bytes);
    memset(s->m.d_input, 0, own_tokens * s->d * sizeof(moe_real));
    if (moei_is_soft(s->c)) return;
    memset(s->m.d_weights, 0, bytes);
    if (s->m.d_student != NULL) memset(s->m.d_student, 0, bytes);
    if (s->m.d_clean == NULL) return;
    memset(s->m.d_clean, 0, bytes);
    memset(s->m.d_clean_gate, 0, bytes);
    memset(s->m.d_noise, 0, bytes);
}

moe_status moe_route_backward(const moe_router *router, const moe_call *call, moe_routing *routing,
                              moe_real *const *d_tensors, moe_real *dx, moe_real *d_activations) {
    moei_pass s, own;
    moe_call all;
    moe_routing own_r;
    int global;
    if (router == NULL || call == NULL || routing == NULL) return MOE_ERR_ARGUMENT;
    if (routing->d_weight_out == NULL || !call->training)
        return moei_error(call->error, MOE_ERR_STATE, "the backward pass needs a routing with call.training = 1");
    if (routing->n_tokens == 0) return MOE_OK;
    global = moei_is_global(router, call);
    moei_pass_begin(&s, router, call, routing);
    moei_scratch_of(router, call, routing, &s.m);
    if (global) {
        all = moei_batch_call(call, &s.m);
        s.call = &all;
        s.n = all.n_tokens;
    }
    s.d_tensors = d_tensors;
    s.d_activations = d_activations;
    moei_backward_begin(&s, call->n_tokens);
    if (moei_is_soft(s.c)) {
        moei_route_soft_backward(&s);
        moei_route_input_backward(&s, dx);
        return MOE_OK;
    }
    /* only one process adds the gradients that belong to no token */
    if (global && !call->batch->lead) s.d_tensors = NULL;
    moei_route_losses(&s, 1);
    s.d_tensors = d_tensors;
    if (!global) return moei_route_tokens_backward(&s, dx);
    moei_own_pass(&s, call, &own_r, &own);
    return own.n > 0 ? moei_route_tokens_backward(&own, dx) : MOE_OK;
}
#endif

/* ==== >>code_state: observe, advance ========================================================== */

#ifndef MOE_NO_TRAIN
/* Whether state has memory for every state parameter. */
static int moei_state_fits(const moe_router *router, moe_real *const *state) {
    moe_parameter parameter;
    int index;
    for (index = 0; index < MOE_ROUTER_PARAMETER_COUNT; index++)
        if (moe_router_parameter(&router->config, index, &parameter) == MOE_OK &&
            (parameter.flags & (unsigned)MOE_PARAM_STATE) != 0 && state[index] == NULL)
            return 0;
    return 1;
}

/* table <- rho table + (1 - rho) M for the clusters of at least two tokens, M as in mode paper. */
static void moei_observe_clusters(const moei_pass *s, moe_real *table) {
    moe_real *m = s->m.clusters, rho = s->c->ac_rho; /* the first row is unused after the call */
    const moe_real *h = moei_cluster_tokens(s);
    size_t k, q, t, count;
    for (k = 0; k < s->experts; k++) {
        moei_fill(m, s->d, 0);
        count = 0;
        for (t = 0; t < s->n; t++) {
            if (!moei_is_real(s->call, t) ||
                (s->m.clusters_of != NULL ? s->m.clusters_of[t] : moei_cluster(s, t)) != (int32_t)k)
                continue;
            s->m.order[count++] = (int32_t)t;
            MOEI_ADD(s->k, s->d, h + t * s->d, m);
        }
        if (count < 2) continue;
        moei_cluster_dispersion(s, h, s->m.order, count, m);
        if (s->c->ac_lambda > 0) moei_exact_weights(m, s->d, s->c->ac_lambda);
        else moei_paper_weights(m, s->d);
        for (q = 0; q < s->d; q++) table[k * s->d + q] = rho * table[k * s->d + q] + (MOEI_R(1.0) - rho) * m[q];
    }
}

moe_status moe_router_observe(const moe_router *router, const moe_call *call, const moe_routing *routing,
                              moe_real *const *state) {
    moei_pass s;
    moe_call all;
    moe_routing r;
    size_t e;
    moe_real *load;
    if (router == NULL || call == NULL || routing == NULL || state == NULL || !moei_state_fits(router, state))
        return MOE_ERR_ARGUMENT;
    if (!call->training) return MOE_ERR_STATE;
    if (routing->n_tokens == 0 || routing->n_real == 0) return MOE_OK;
    r = *routing;
    moei_pass_begin(&s, router, call, &r);
    moei_scratch_of(router, call, routing, &s.m);
    if (moei_is_global(router, call)) {
        all = moei_batch_call(call, &s.m);
        s.call = &all;
        s.n = all.n_tokens;
    }
    load = state[MOE_ROUTER_LOAD];
    if (router->config.input == MOE_INPUT_ADAPTIVE_CLUSTERING && router->config.ac_mode == MOE_AC_RUNNING) {
        if (call->n_tokens > 0 && call->previous_input == NULL)
            return moei_missing(call, "previous_input", "ac_mode = running");
        if (!s.frozen) moei_observe_clusters(&s, state[MOE_ROUTER_AC_RUNNING]);
    }
    if (load != NULL) {
        for (e = 0; e < s.experts; e++) load[e] += (moe_real)r.counts[e];
        load[s.experts] += (moe_real)r.n_real;
    }
    if (s.m.cutoffs != NULL) {
        for (e = 0; e < s.experts; e++) state[MOE_ROUTER_CUTOFF_SUM][e] += s.m.cutoffs[e];
        state[MOE_ROUTER_CUTOFF_COUNT][0] += s.m.cutoffs[s.experts];
    }
    if (state[MOE_ROUTER_CAPACITY] != NULL && r.bound_now > 0 && !s.frozen)
        state[MOE_ROUTER_CAPACITY][0] = r.bound_now;
    if (state[MOE_ROUTER_AFFINITY_SUM] != NULL) state[MOE_ROUTER_AFFINITY_SUM][0] = r.affinity_now;
    return MOE_OK;
}

/* D_e of bias_rule. t = share S / parts is not computed, because it could be rounded: gap is parts
   (t - n_e). */
static double moei_bias_change(const moe_router_config *c, const moe_real *load, double sum, int e) {
    const int has_real = c->bias_real > 0;
    const double share = has_real ? (double)c->bias_real : 1.0, rate = (double)c->bias_rate;
    const double parts = has_real ? (double)c->top_k * (double)MOEI_REAL_EXPERTS(c) : (double)c->n_experts;
    const double gap = share * sum - (double)load[e] * parts;
    if (c->bias_rule == MOE_BIAS_PROPORTIONAL) return rate * gap / (parts * sum);
    if (c->bias_rule == MOE_BIAS_SMEBU)
        return rate * (double)MOEI_F(tanh)(c->bias_kappa * (moe_real)(gap / (share * sum)));
    return gap > 0.0 ? rate : gap < 0.0 ? -rate : 0.0;
}

static void moei_advance_bias(const moe_router_config *c, const moe_real *load, moe_real *bias, moe_real *momentum) {
    const int moving = c->bias_real > 0 ? MOEI_REAL_EXPERTS(c) : c->n_experts;
    double sum = 0.0, mean = 0.0;
    int e;
    for (e = 0; e < c->n_experts; e++) sum += (double)load[e];
    if (!(sum > 0.0)) return;
    for (e = 0; e < moving && c->bias_centre; e++) mean += moei_bias_change(c, load, sum, e) / (double)moving;
    for (e = 0; e < moving; e++) {
        moe_real change = (moe_real)(moei_bias_change(c, load, sum, e) - mean);
        if (momentum != NULL)
            change = momentum[e] = c->bias_beta * momentum[e] + (MOEI_R(1.0) - c->bias_beta) * change;
        bias[e] += change;
    }
}

/* a <- rho a + (1 - rho) mean of the calls' C-th largest logits, unless learning is frozen; then
   the sums start over. */
static void moei_advance_cutoffs(const moe_router_config *c, int frozen, moe_real *const *state) {
    moe_real *sum = state[MOE_ROUTER_CUTOFF_SUM], *count = state[MOE_ROUTER_CUTOFF_COUNT];
    moe_real *cutoff = state[MOE_ROUTER_CUTOFF], *updates = state[MOE_ROUTER_CUTOFF_UPDATES];
    int e;
    if (sum == NULL || !(count[0] > 0)) return;
    for (e = 0; e < c->n_experts; e++) {
        if (!frozen)
            cutoff[e] = c->threshold_rho * cutoff[e] + (MOEI_R(1.0) - c->threshold_rho) * (sum[e] / count[0]);
        sum[e] = 0;
    }
    if (!frozen && updates[0] < MOEI_R(16777216.0)) updates[0] += MOEI_R(1.0);
    count[0] = 0;
}

/* The share of token-expert pairs that are not assigned, less what it should be: 1 - K/E. The calls
   of a step count by their tokens, so that it does not matter how a batch is cut; equal ones, as
   ReMoE's, give the mean. Rounded once, so that gaps of two layers may cancel. */
MOEI_TOOL moe_real moei_l1_gap(const moe_router_config *c, const moe_real *load) {
    const moe_real n = load[c->n_experts];
    moe_real gap = n * (moe_real)c->top_k;
    int e;
    for (e = 0; e < c->n_experts; e++) gap -= load[e];
    return gap / (n * (moe_real)c->n_experts);
}

/* The factor grows while the gap is below 0. */
MOEI_TOOL void moei_advance_l1(moe_real gap, moe_real *factor) {
    const moe_real next = gap < 0 ? *factor * MOEI_R(1.2) : *factor / MOEI_R(1.2);
    if (next > MOEI_R(1e-30) && next < MOEI_R(1e30)) *factor = next;
}

moe_status moe_router_advance(const moe_router *router, moe_real *const *state) {
    const moe_router_config *c;
    moe_real *step, *load;
    int e, frozen;
    if (router == NULL || state == NULL || !moei_state_fits(router, state)) return MOE_ERR_ARGUMENT;
    c = &router->config;
    step = state[MOE_ROUTER_STEP];
    load = state[MOE_ROUTER_LOAD];
    frozen = c->freeze_at > 0 && step[0] >= (moe_real)c->freeze_at;
    if (load != NULL && load[c->n_experts] > 0) {
        if (c->bias_rate > 0 && !frozen) {
            moe_router_config now = *c;
            if (step != NULL && step[0] > 0) now.top_k = moei_scheduled_k(c, step[0]);
            moei_advance_bias(&now, load, state[MOE_ROUTER_SELECTION_BIAS], state[MOE_ROUTER_BIAS_MOMENTUM]);
        }
        if (c->l1_controller && !frozen) moei_advance_l1(moei_l1_gap(c, load), state[MOE_ROUTER_L1]);
        for (e = 0; e <= c->n_experts; e++) load[e] = 0;
    }
    moei_advance_cutoffs(c, frozen, state);
    if (step != NULL && step[0] < MOEI_R(16777216.0)) step[0] += MOEI_R(1.0);
    return MOE_OK;
}
#endif

/* ==== >>code_metrics: recorded choices, load, entropy, information ============================ */

moe_status moe_routing_choices(const moe_routing *routing, size_t k, int keep_dropped, int32_t *choices) {
    size_t t, i, at, n;
    if (routing == NULL || (routing->n_tokens > 0 && k > 0 && choices == NULL)) return MOE_ERR_ARGUMENT;
    for (t = 0; t < routing->n_tokens; t++) {
        n = (size_t)routing->n_choices[t];
        for (i = 0; i < k; i++) {
            at = t * routing->max_choices + i;
            choices[t * k + i] = i < n && (keep_dropped || routing->kept[at]) ? routing->choices[at] : -1;
        }
    }
    return MOE_OK;
}

static int moei_unmasked(const unsigned char *mask, size_t t) { return mask == NULL || mask[t] != 0; }

static double moei_share(double part, double whole) { return whole > 0.0 ? part / whole : 0.0; }

/* x ln x, 0 for x <= 0. */
static double moei_x_ln_x(double x) { return x > 0.0 ? x * MOEI_D(log)(x) : 0.0; }

/* H(v / over). */
static double moei_entropy(size_t n, const double *v, double over) {
    double sum = 0.0;
    size_t i;
    if (!(over > 0.0)) return 0.0;
    for (i = 0; i < n; i++) sum -= moei_x_ln_x(v[i] / over);
    return sum;
}

/* Statistics of one number per expert. */
typedef struct moei_summary {
    double sum, mean, max, min, variance; /* of the population */
} moei_summary;

static moei_summary moei_summarize(size_t n, const double *v) {
    moei_summary s;
    size_t i;
    s.sum = s.variance = 0.0;
    s.max = s.min = v[0];
    for (i = 0; i < n; i++) {
        s.sum += v[i];
        if (v[i] > s.max) s.max = v[i];
        if (v[i] < s.min) s.min = v[i];
    }
    s.mean = s.sum / (double)n;
    for (i = 0; i < n; i++) s.variance += (v[i] - s.mean) * (v[i] - s.mean) / (double)n;
    return s;
}

static double moei_cv2(const moei_summary *s) { return moei_share(s->variance, s->mean * s->mean); }

/* The arrays [E] in the order of moe_metrics, from load to row; then two of [E,n_classes]. */
enum { MOEI_METRICS = 8 };
static void moei_metrics_layout(size_t experts, size_t classes, moei_layout *l, moe_metrics *m) {
    size_t cells = 0, numbers = 0;
    double *v;
    memset(m, 0, sizeof *m);
    m->n_experts = experts;
    m->n_classes = classes;
    if (!moei_mul(experts, classes, &cells) || !moei_mul(2, cells, &numbers) ||
        !moei_add(numbers, MOEI_METRICS * experts, &numbers))
        l->overflow = 1;
    v = (double *)moei_take(l, numbers, sizeof(double));
    if (v == NULL) return;
    m->load = v;
    m->first = v + experts;
    m->kept = v + 2 * experts;
    m->importance = v + 3 * experts;
    m->logits = v + 4 * experts;
    m->mean_gate = v + 5 * experts;
    m->mean_logit = v + 6 * experts;
    m->row = v + 7 * experts;
    if (classes == 0) return;
    m->classes = v + MOEI_METRICS * experts;
    m->first_classes = m->classes + cells;
}

static void moei_zeros(size_t n, double *v) {
    size_t i;
    for (i = 0; i < n; i++) v[i] = 0.0;
}

moe_status moe_metrics_size(size_t n_experts, size_t n_classes, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_metrics m;
    if (bytes == NULL || n_experts < 1 || n_experts > MOE_MAX_EXPERTS || !MOEI_FITS_INT32(n_classes))
        return MOE_ERR_ARGUMENT;
    moei_metrics_layout(n_experts, n_classes, &l, &m);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    *bytes = l.used;
    return MOE_OK;
}

moe_status moe_metrics_init(moe_metrics *metrics, size_t n_experts, size_t n_classes, void *memory, size_t size) {
    moei_layout l;
    moe_status status;
    size_t bytes;
    if (metrics == NULL || memory == NULL) return MOE_ERR_ARGUMENT;
    status = moe_metrics_size(n_experts, n_classes, &bytes);
    if (status != MOE_OK) return status;
    if (size < bytes) return MOE_ERR_SPACE;
    l = moei_layout_begin(memory);
    moei_metrics_layout(n_experts, n_classes, &l, metrics);
    /* and all arrays that follow */
    moei_zeros((MOEI_METRICS + 2 * n_classes) * n_experts, metrics->load);
    return MOE_OK;
}

/* ---- adding a call: all is checked first, so that a failed one adds nothing ---- */

static moe_status moei_metrics_check(const moe_metrics *m, const moe_routing *r, const unsigned char *mask,
                                     const int32_t *classes) {
    size_t t, i, real = 0;
    if (classes != NULL && m->n_classes == 0) return MOE_ERR_ARGUMENT;
    if (r->n_experts != m->n_experts) return MOE_ERR_SHAPE;
    if (r->plan.offsets == NULL || r->logits == NULL || r->probabilities == NULL || r->choices == NULL ||
        r->n_choices == NULL || (r->plan.rows > 0 && r->weights == NULL))
        return MOE_ERR_ARGUMENT;
    for (t = 0; t < r->n_tokens; t++) {
        int32_t count = r->n_choices[t];
        if (count < 0 || (size_t)count > r->max_choices) return MOE_ERR_ARGUMENT;
        if (!moei_unmasked(mask, t)) {
            if (count > 0) return MOE_ERR_ARGUMENT;
            continue;
        }
        real++;
        if (classes != NULL && (classes[t] < -1 || (classes[t] >= 0 && (size_t)classes[t] >= m->n_classes)))
            return MOE_ERR_ARGUMENT;
        for (i = 0; i < (size_t)count; i++) {
            int32_t e = r->choices[t * r->max_choices + i];
            if (e < 0 || (size_t)e >= m->n_experts) return MOE_ERR_ARGUMENT;
        }
    }
    return real == r->n_real ? MOE_OK : MOE_ERR_ARGUMENT;
}

/* Adds one token's gate values and logits (soft: NULL); m->row sums the call's. */
static void moei_metrics_add_gate(moe_metrics *m, const moe_real *z, const moe_real *p) {
    double x_ln_x = 0.0, mass = 0.0;
    size_t e;
    for (e = 0; e < m->n_experts; e++) {
        double v = (double)p[e];
        m->row[e] += v;
        if (z != NULL) m->logits[e] += (double)z[e];
        if (!(v > 0.0)) continue;
        x_ln_x += moei_x_ln_x(v);
        mass += v;
    }
    m->entropy -= x_ln_x;
    if (mass > 0.0) m->entropy_normalized += MOEI_D(log)(mass) - x_ln_x / mass; /* H(p / mass) */
}

/* Adds one token's choices; label -1: it has no class. */
static void moei_metrics_add_choices(moe_metrics *m, size_t real_experts, const int32_t *choices, size_t count,
                                     int32_t label) {
    size_t i;
    if (count == 0) return;
    m->n_routed += 1.0;
    m->n_assignments += (double)count;
    m->first[choices[0]] += 1.0;
    for (i = 0; i < count; i++) {
        m->load[choices[i]] += 1.0;
        m->n_real_assignments += (size_t)choices[i] < real_experts ? 1.0 : 0.0;
    }
    if (label < 0) return;
    m->n_classified += 1.0;
    m->choices += (double)count;
    m->choices_squared += (double)count * (double)count;
    m->first_classes[(size_t)choices[0] * m->n_classes + (size_t)label] += 1.0;
    for (i = 0; i < count; i++) m->classes[(size_t)choices[i] * m->n_classes + (size_t)label] += 1.0;
}

/* Counts a token's pairs that are both chosen and predicted, or neither. */
static void moei_metrics_add_predicted(moe_metrics *m, const moe_routing *r, size_t t) {
    const moe_real *v = r->predicted + t * m->n_experts;
    const int32_t *choices = r->choices + t * r->max_choices;
    size_t i;
    for (i = 0; i < m->n_experts; i++) m->n_agreed += v[i] > 0 ? 0.0 : 1.0;
    for (i = 0; i < (size_t)r->n_choices[t]; i++) m->n_agreed += v[choices[i]] > 0 ? 1.0 : -1.0;
    m->n_predicted += (double)m->n_experts;
}

moe_status moe_metrics_add(moe_metrics *metrics, const moe_routing *routing, const unsigned char *mask,
                           const int32_t *classes) {
    moe_metrics *m = metrics;
    moe_routing own;
    const moe_routing *r = &own;
    moe_status status;
    size_t t, e;
    if (metrics == NULL || routing == NULL) return MOE_ERR_ARGUMENT;
    own = moei_routing_own(routing, mask);
    status = moei_metrics_check(m, r, mask, classes);
    if (status != MOE_OK || r->n_real == 0) return status;
    moei_zeros(m->n_experts, m->row);
    for (t = 0; t < r->n_tokens; t++) {
        if (!moei_unmasked(mask, t)) continue;
        if (r->plan.rows > 0) moei_metrics_add_gate(m, NULL, r->weights + t * m->n_experts);
        else moei_metrics_add_gate(m, r->logits + t * m->n_experts, r->probabilities + t * m->n_experts);
        moei_metrics_add_choices(m, r->real_experts, r->choices + t * r->max_choices, (size_t)r->n_choices[t],
                                 classes != NULL ? classes[t] : -1);
        if (r->predicted != NULL) moei_metrics_add_predicted(m, r, t);
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

/* ---- expert and class ---- */

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

/* With counts n of sum P every entropy is ln P - (sum n ln n) / P, so I = ln P + (cells - rows -
   columns) / P, each a sum of n ln n. */
static double moei_information(double total, double rows, double columns, double cells) {
    double value;
    if (!(total > 0.0)) return 0.0;
    value = MOEI_D(log)(total) + (cells - rows - columns) / total;
    return value > 0.0 ? value : 0.0;
}

moe_status moe_mutual_information(size_t rows, size_t columns, const double *table, double *information) {
    double total = 0.0, of_rows = 0.0, scale;
    double of_columns = 0.0, of_cells = 0.0;
    size_t cells, i, j;
    if (!moei_mul(rows, columns, &cells) || !moei_mul(cells, sizeof(double), &i)) return MOE_ERR_OVERFLOW;
    if (information == NULL || (cells > 0 && table == NULL)) return MOE_ERR_ARGUMENT;
    for (i = 0; i < cells; i++) {
        if (table[i] < 0.0) return MOE_ERR_ARGUMENT;
        if (!(table[i] < MOEI_HUGE)) return MOE_ERR_NONFINITE;
        total += table[i];
    }
    if (!(total < MOEI_HUGE)) return MOE_ERR_NONFINITE;
    scale = total > DBL_MAX / 1e8 ? 1.0 / 18446744073709551616.0 : 1.0; /* n ln n stays finite */
    for (i = 0; i < cells; i++) of_cells += moei_x_ln_x(table[i] * scale);
    if (cells > 0) {
        for (i = 0; i < rows; i++) of_rows += moei_x_ln_x(moei_row_sum(columns, table + i * columns) * scale);
        for (j = 0; j < columns; j++) of_columns += moei_x_ln_x(moei_column_sum(rows, columns, table, j) * scale);
    }
    *information = moei_information(total * scale, of_rows, of_columns, of_cells);
    return MOE_OK;
}

/* Mean of n ln n for hypergeometric n: how many of `drawn` out of `all` are among the `marked`.
   Sums terms around the mode by the ratio of neighbors, without factorials, until they are below
   rounding. */
static double moei_chance_x_ln_x(double all, double marked, double drawn) {
    double low = marked + drawn > all ? marked + drawn - all : 0.0, high = marked < drawn ? marked : drawn;
    double start = MOEI_D(floor)((marked + 1.0) * ((drawn + 1.0) / (all + 2.0))), n, weight, weights = 1.0, sum;
    if (start < low) start = low;
    if (start > high) start = high;
    sum = moei_x_ln_x(start);
    weight = 1.0;
    for (n = start; n < high && weight > 1e-18; n += 1.0) {
        weight *= (marked - n) / (n + 1.0) * ((drawn - n) / (all - marked - drawn + n + 1.0));
        weights += weight;
        sum += weight * moei_x_ln_x(n + 1.0);
    }
    weight = 1.0;
    for (n = start; n > low && weight > 1e-18; n -= 1.0) {
        weight *= n / (marked - n + 1.0) * ((all - marked - drawn + n) / (drawn - n + 1.0));
        weights += weight;
        sum += weight * moei_x_ln_x(n - 1.0);
    }
    return sum / weights;
}

/* The mean of I of table over all ways to assign the classes to the classified tokens. An expert
   keeps its tokens, each once, so a cell is hypergeometric. The assignments of a class are the sum
   of |S_t| over its tokens: their mean and variance are known, higher moments are neglected (exact
   if every |S_t| is the same). */
static double moei_information_chance(moe_metrics *m, const double *table, double choices, double choices_squared) {
    double all = m->n_classified, mean, variance, of_rows = 0.0;
    double of_columns = 0.0, of_cells = 0.0;
    size_t e, y;
    if (!(all > 0.0)) return 0.0;
    mean = choices / all;
    variance = choices_squared / all - mean * mean;
    for (e = 0; e < m->n_experts; e++) {
        m->row[e] = moei_row_sum(m->n_classes, table + e * m->n_classes);
        of_rows += moei_x_ln_x(m->row[e]);
    }
    for (y = 0; y < m->n_classes; y++) {
        double tokens = moei_column_sum(m->n_experts, m->n_classes, m->first_classes, y), assigned = tokens * mean;
        if (!(tokens > 0.0)) continue;
        of_columns += moei_x_ln_x(assigned);
        if (all > 1.0 && variance > 0.0)
            of_columns += variance * tokens * (all - tokens) / (all - 1.0) / (2.0 * assigned);
        for (e = 0; e < m->n_experts; e++)
            if (m->row[e] > 0.0) of_cells += moei_chance_x_ln_x(all, m->row[e], tokens);
    }
    return moei_information(choices, of_rows, of_columns, of_cells);
}

/* ---- the report ---- */

static void moei_report_gate(moe_metrics *m, moe_report *r) {
    moei_summary importance = moei_summarize(m->n_experts, m->importance);
    size_t e;
    for (e = 0; e < m->n_experts; e++) {
        m->mean_gate[e] = m->n_tokens > 0.0 ? m->importance[e] / m->n_tokens : 0.0;
        m->mean_logit[e] = m->n_tokens > 0.0 ? m->logits[e] / m->n_tokens : 0.0;
    }
    r->gate_entropy = moei_share(m->entropy, m->n_tokens);
    r->usage_entropy = moei_entropy(m->n_experts, m->mean_gate, 1.0);
    r->usage_entropy_calls = moei_share(m->entropy_calls, m->n_calls);
    r->confidence_entropy = moei_share(m->entropy_normalized, m->n_tokens);
    r->importance_cv2 = moei_cv2(&importance);
    r->mean_gate = m->mean_gate;
    r->mean_logit = m->mean_logit;
}

static void moei_report_load(const moe_metrics *m, moe_report *r) {
    moei_summary load = moei_summarize(m->n_experts, m->load), first = moei_summarize(m->n_experts, m->first);
    moei_summary kept = moei_summarize(m->n_experts, m->kept);
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
    /* cannot fail: the table is ours */
    (void)moe_mutual_information(m->n_experts, m->n_classes, m->classes, &r->information);
    (void)moe_mutual_information(m->n_experts, m->n_classes, m->first_classes, &r->information_first);
    r->information_chance = moei_information_chance(m, m->classes, m->choices, m->choices_squared);
    r->information_first_chance = moei_information_chance(m, m->first_classes, m->n_classified, m->n_classified);
}

moe_status moe_metrics_report(moe_metrics *m, moe_report *report) {
    if (m == NULL || report == NULL) return MOE_ERR_ARGUMENT;
    memset(report, 0, sizeof *report);
    report->n_experts = m->n_experts;
    report->n_classes = m->n_classes;
    report->n_calls = m->n_calls;
    report->n_tokens = m->n_tokens;
    report->n_assignments = m->n_assignments;
    report->n_dropped = m->n_dropped;
    report->dropped_share = moei_share(m->n_dropped, m->n_assignments);
    report->experts_per_token = moei_share(m->n_assignments, m->n_tokens);
    report->real_experts_per_token = moei_share(m->n_real_assignments, m->n_tokens);
    report->predictor_agreement = moei_share(m->n_agreed, m->n_predicted);
    moei_report_gate(m, report);
    moei_report_load(m, report);
    moei_report_classes(m, report);
    return MOE_OK;
}

/* ---- metrics that need no accumulator ---- */

moe_status moe_fluctuation(size_t n, const int32_t *before, const int32_t *after, const unsigned char *mask,
                           double *share) {
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

/* The size of a table of pairs of experts; 0 on overflow. */
static size_t moei_instability_cells(size_t e1, size_t e2) {
    size_t cells, bytes;
    if (e1 >= (size_t)-1 || e2 >= (size_t)-1 || !moei_mul(e1 + 1, e2 + 1, &cells) ||
        !moei_mul(cells, sizeof(double), &bytes))
        return 0;
    return cells;
}

/* An expert's index, or -1: none. */
static int moei_is_expert(int32_t e, size_t n) { return e == -1 || (e >= 0 && (size_t)e < n); }

/* The number of pairs among n. */
static double moei_pairs(double n) { return n * (n - 1.0) / 2.0; }

/* Counts pairs of tokens in the table of tokens per pair of experts: those that share an expert at
   both layers from its cells, at one layer from its sums. */
moe_status moe_instability(size_t n, const int32_t *first, size_t e1, const int32_t *second, size_t e2,
                           const unsigned char *mask, double *scratch, moe_instability_report *report) {
    size_t cells = moei_instability_cells(e1, e2), t, a, b, width = e2 + 1;
    double real = 0.0, both = 0.0;
    double one = 0.0, two = 0.0, all;
    if (report == NULL || scratch == NULL || cells == 0 || (n > 0 && (first == NULL || second == NULL)))
        return MOE_ERR_ARGUMENT;
    for (t = 0; t < n; t++)
        if (moei_unmasked(mask, t) && (!moei_is_expert(first[t], e1) || !moei_is_expert(second[t], e2)))
            return MOE_ERR_ARGUMENT;
    moei_zeros(cells, scratch); /* row and column 0: tokens without an expert */
    for (t = 0; t < n; t++)
        if (moei_unmasked(mask, t)) {
            scratch[(size_t)(first[t] + 1) * width + (size_t)(second[t] + 1)] += 1.0;
            real += 1.0;
        }
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

/* Adds v = x / |x| to sum and returns |v|^2 as rounded: 1, or 0 for x = 0. Dividing by the largest
   element keeps squares in range. */
static double moei_add_unit(size_t d, const moe_real *x, double *sum) {
    double largest = 0.0, squares = 0.0, length;
    double own = 0.0;
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

moe_status moe_token_cosine(size_t n, size_t d, const moe_real *x, const unsigned char *mask, double *scratch,
                            double *cosine) {
    double real = 0.0, own = 0.0;
    double whole = 0.0, value;
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
    if (value > 1.0) value = 1.0; /* exceeded by rounding only */
    if (value < -1.0 / (real - 1.0)) value = -1.0 / (real - 1.0);
    *cosine = value;
    return MOE_OK;
}

/* Checks the size of an array [n,n_experts] and that it is not NULL. */
static moe_status moei_predictions_check(size_t n, size_t n_experts, const int32_t *predicted) {
    size_t cells, bytes;
    if (!moei_mul(n, n_experts, &cells) || !moei_mul(cells, sizeof(int32_t), &bytes)) return MOE_ERR_OVERFLOW;
    return cells > 0 && predicted == NULL ? MOE_ERR_ARGUMENT : MOE_OK;
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

moe_status moe_gate_errors(size_t n, size_t n_experts, const int32_t *predicted, const int32_t *answers,
                           const int32_t *labels, const unsigned char *mask, unsigned char *trivial,
                           moe_error_shares *shares) {
    size_t t, e, samples = 0, wrong = 0;
    size_t gate = 0, expert = 0;
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
    shares->n_trivial = 0;
    for (e = 0; e < n_experts; e++) {
        int is = moei_is_trivial(n, n_experts, predicted, mask, e);
        if (trivial != NULL) trivial[e] = (unsigned char)is;
        shares->n_trivial += (size_t)is;
    }
    return MOE_OK;
}

#endif /* MOE_NO_FLOAT */

/* ==== >>code_integers: routing in integers ==================================================== */

void moei_int_gate_logits(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    size_t i;
    (void)r;
    for (i = 0; i < n; i++) p[i] = (int32_t)z[i] * 256;
}

void moei_int_gate_predicted(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    moei_int_gate_logits(r, n, z + n, p);
}

void moei_int_gate_relu(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p) {
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

/* factor * 2^-(d / 2^bits) >> 8, factor in units of 2^-16, the result in units of 2^-23. Small
   powers need the same absolute accuracy as large ones, because many of them may add up to a large
   one. */
static uint32_t moei_ir_power(uint32_t d, int bits, uint32_t factor) {
    const uint32_t whole = d >> bits;
    if (d == 0) return factor << 7; /* the largest logit: once in every call */
    return whole < 24 ? (moei_int_exp2(d - (whole << bits), bits) * factor >> 8) >> whole : 0;
}

void moei_int_share_softmax(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    const int32_t largest = moei_ir_largest(n, z);
    size_t i;
    for (i = 0; i < n; i++) p[i] = (int32_t)moei_ir_power((uint32_t)(largest - z[i]), r->z_bits, 65536u);
}

/* 2^31 / sum p with the sum shifted down to 16 bits, or 0. A p shifted likewise, times this, is p /
   sum in units of 2^-31, within 2^-15. */
static uint32_t moei_ir_one_over(size_t n, const int32_t *p, int *down) {
    uint32_t sum = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += (uint32_t)p[i];
    for (*down = 0; sum >> 23 != 0; sum >>= 8) *down += 8;
    for (; sum >> 16 != 0; sum >>= 1) ++*down;
    return sum != 0 ? 0x7fff7fffu / sum : 0;
}

void moei_int_gate_softmax(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    int down;
    uint32_t share;
    size_t i;
    moei_int_share_softmax(r, n, z, p);
    share = moei_ir_one_over(n, p, &down);
    for (i = 0; i < n; i++) p[i] = (int32_t)(((uint32_t)p[i] >> 8) * share >> (down + 3));
}

/* The exponent of the factor 2^largest that all shares omit; 0 if that factor is at least 1. */
static int32_t moei_ir_common(size_t n, const int16_t *z) {
    const int32_t largest = moei_ir_largest(n, z);
    return largest < 0 ? largest : 0;
}

/* z <= 0: 2^z / (1 + 2^z), else 1 / (1 + 2^-z), z in octaves; in units of 2^-23, shifted down */
static void moei_ir_sigmoid(const moei_int_router *r, int32_t common, int down, size_t n, const int16_t *z,
                            int32_t *p) {
    size_t i;
    for (i = 0; i < n; i++) {
        const int32_t v = z[i];
        const uint32_t factor = 0x80000000u / (32768u + moei_int_exp2((uint32_t)(v < 0 ? -v : v), r->z_bits));
        p[i] = (int32_t)(moei_ir_power(v > 0 ? 0 : (uint32_t)(common - v), r->z_bits, factor) >> down);
    }
}

void moei_int_gate_sigmoid(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    moei_ir_sigmoid(r, 0, 3, n, z, p);
}
void moei_int_share_sigmoid(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    moei_ir_sigmoid(r, moei_ir_common(n, z), 0, n, z, p);
}

/* g(t) = sqrt(log2(1 + t) / t) in units of 1/16384 at t = i/64: smooth and near 1, while the
   softplus spans many magnitudes. */
static const unsigned char moei_ir_softplus[130] MOE_FLASH = {
    223, 76, 147, 76, 72, 76, 254, 75, 182, 75, 110, 75, 40, 75, 227, 74, 159, 74, 92, 74, 25, 74, 216, 73, 152, 73, 89,
        73, 26, 73, 221,
    72, 160, 72, 100, 72, 41, 72, 239, 71, 182, 71, 125, 71, 69, 71, 13, 71, 215, 70, 161, 70, 108, 70, 55, 70, 3, 70,
        208, 69, 157, 69,
    107, 69, 57, 69, 8, 69, 216, 68, 168, 68, 121, 68, 74, 68, 28, 68, 238, 67, 193, 67, 148, 67, 103, 67, 60, 67, 16,
        67, 229, 66, 187,
    66, 145, 66, 103, 66, 62, 66, 21, 66, 236, 65, 196, 65, 157, 65, 117, 65, 78, 65, 40, 65, 2, 65, 220, 64, 182, 64,
        145, 64, 108, 64,
    72, 64, 36, 64, 0, 64};

static uint32_t moei_ir_g(uint32_t t) {
    const moei_int_shape one = {1, 0, -32767, 32767, 0};
    int16_t x[4] = {0, 0, 0, 0};
    x[0] = (int16_t)(t < 32768u ? (int32_t)(2 * t) - 32768 : 32767);
    moei_int_curve(&one, moei_ir_softplus, x, x);
    return (uint32_t)x[0];
}

/* The square root of softplus / ln 2 = log2(1 + 2^z): with t = 2^-|z| it is 2^(z/2) g(t) for z <=
   0, else sqrt(z + t g(t)^2). up: bits finer than the unit of the gate. The unit of shares that are
   all below 1 does not matter. */
static void moei_ir_sqrt_softplus(const moei_int_router *r, int32_t common, int up, size_t n, const int16_t *z,
                                  int32_t *p) {
    const int down = common < 0 ? 0 : 15 - up - r->z_bits / 2;
    size_t i;
    for (i = 0; i < n; i++) {
        const int32_t v = z[i];
        const uint32_t t = moei_int_exp2((uint32_t)(v < 0 ? -v : v), r->z_bits), g = moei_ir_g(t);
        if (v > 0) {
            const uint32_t square = ((uint32_t)v << 16) + ((t * (g * g >> 13) >> 15) << (r->z_bits + 1)),
                           root = moei_int_sqrt(square);
            p[i] = (int32_t)((root + (square - root * root > root)) << up);
        } else p[i] = (int32_t)(moei_ir_power((uint32_t)(common - v), r->z_bits + 1, 4 * g) >> down);
    }
}

void moei_int_gate_sqrt_softplus(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    moei_ir_sqrt_softplus(r, 0, 0, n, z, p);
}
void moei_int_share_sqrt_softplus(const moei_int_router *r, size_t n, const int16_t *z, int32_t *p) {
    moei_ir_sqrt_softplus(r, moei_ir_common(n, z), 7, n, z, p);
}

/* ---- select ---- */

/* moei_int_top_k of z without a copy. Skips a logit at once if it is not above the last of the
   K. */
size_t moei_int_select_logits(MOEI_INT_SELECT_ARGUMENTS) {
    const size_t k = r->top_k, n = r->n_experts;
    size_t i = 0, at, count = 0;
    int32_t last = INT32_MIN;
    (void)base;
    (void)token;
    (void)p;
    do {
        const int32_t v = z[i];
        if (v <= last) continue;
        for (at = count < k ? count++ : k - 1; at > 0 && v > z[experts[at - 1]]; at--) experts[at] = experts[at - 1];
        experts[at] = (int16_t)i;
        if (count == k) last = z[experts[k - 1]];
    } while (++i < n);
    return count;
}

/* p of an excluded expert: below every p + bias. */
#define MOEI_IR_OUT (INT32_MIN / 2)

/* The k best by p + bias, which stays in p. */
static size_t moei_ir_best(const moei_int_router *r, const unsigned char *base, size_t k, int32_t *p,
                           int16_t *experts) {
    size_t e;
    for (e = 0; e < r->n_experts && r->bias != MOEI_INT_NONE; e++) p[e] += moei_flash_32(base + r->bias + 4 * e);
    return moei_int_top_k(r->n_experts, p, k, experts);
}

size_t moei_int_select_top_k(MOEI_INT_SELECT_ARGUMENTS) {
    (void)token;
    (void)z;
    return moei_ir_best(r, base, r->top_k, p, experts);
}

/* value, stored after p + bias: the score of each group, then INT32_MAX for the groups that are
   kept. */
size_t moei_int_select_grouped(MOEI_INT_SELECT_ARGUMENTS) {
    const size_t n = r->n_experts, size = n / r->groups;
    const size_t wanted = (r->flags & MOEI_INT_TOP2_SUM) != 0 ? 2 : 1;
    int32_t *value = p + n;
    size_t g, i, found;
    (void)token;
    (void)z;
    (void)moei_ir_best(r, base, 0, p, experts);
    for (g = 0; g < r->groups; g++) {
        const int32_t *own = p + g * size;
        int16_t best[2];
        found = moei_int_top_k(size, own, wanted, best);
        value[g] = own[best[0]];
        if (found > 1) value[g] += own[best[1]];
    }
    found = moei_int_top_k(r->groups, value, r->groups_kept, experts);
    for (i = 0; i < found; i++) value[experts[i]] = INT32_MAX;
    for (g = 0; g < r->groups; g++)
        for (i = g * size; i < (g + 1) * size && value[g] != INT32_MAX; i++) p[i] = MOEI_IR_OUT;
    return moei_int_top_k(n, p, r->top_k, experts);
}

/* Excludes what is not among the best of its group, then sorts the others. */
size_t moei_int_select_each(MOEI_INT_SELECT_ARGUMENTS) {
    const size_t n = r->n_experts, size = n / r->groups;
    const size_t each = r->top_k / r->groups;
    size_t g, i;
    (void)token;
    (void)z;
    (void)moei_ir_best(r, base, 0, p, experts);
    for (g = 0; g < n; g += size) {
        const size_t last = (size_t)experts[moei_int_top_k(size, p + g, each, experts) - 1];
        const int32_t least = p[g + last];
        for (i = 0; i < size; i++)
            if (p[g + i] < least || (p[g + i] == least && i > last)) p[g + i] = MOEI_IR_OUT;
    }
    return moei_int_top_k(n, p, r->top_k, experts);
}

size_t moei_int_select_top_p(MOEI_INT_SELECT_ARGUMENTS) {
    const size_t n = moei_int_top_k(r->n_experts, p, r->n_experts, experts);
    size_t count = 0, i;
    int32_t sum = 0;
    (void)token;
    (void)z;
    while (count < n && sum <= r->threshold) sum += p[experts[count++]];
    if (r->bias == MOEI_INT_NONE) return count;
    for (i = count; i < n; i++) p[experts[i]] = MOEI_IR_OUT;
    return moei_ir_best(r, base, count, p, experts);
}

size_t moei_int_select_threshold(MOEI_INT_SELECT_ARGUMENTS) {
    size_t count = 0, e;
    int32_t best;
    (void)token;
    (void)z;
    (void)moei_int_top_k(r->n_experts, p, 1, experts);
    best = p[experts[0]];
    for (e = 0; e < r->n_experts; e++) {
        const int32_t least =
            r->thresholds != MOEI_INT_NONE ? moei_flash_32(base + r->thresholds + 4 * e) : r->threshold;
        if (p[e] > least) count++;
        else p[e] = MOEI_IR_OUT;
    }
    if (count > 0) return moei_ir_best(r, base, count, p, experts);
    p[experts[0]] = best;
    return (r->flags & MOEI_INT_FALLBACK) != 0;
}

/* In the order of the table if there is no p, else sorted by p + bias. */
size_t moei_int_select_hash(MOEI_INT_SELECT_ARGUMENTS) {
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

void moei_int_weight_raw(MOEI_INT_WEIGHT_ARGUMENTS) {
    const int32_t round = ((int32_t)1 << r->weight_shift) >> 1;
    size_t i;
    (void)z;
    (void)experts;
    for (i = 0; i < count; i++) weights[i] = moei_ir_clip((p[i] + round) >> r->weight_shift);
}

/* Only the fallback of a threshold can be negative, and it is alone: its quotient is 1. */
void moei_int_weight_sum(MOEI_INT_WEIGHT_ARGUMENTS) {
    uint32_t share;
    int down;
    size_t i;
    (void)r;
    (void)z;
    (void)experts;
    if (p[0] < 0) p[0] = 1;
    share = moei_ir_one_over(count, p, &down);
    for (i = 0; i < count; i++) weights[i] = (int16_t)((((uint32_t)p[i] >> down) * share + 32768u) >> 16);
}

/* p is shifted to 16 bits so that the sum of squares / 256 fits; the sum is shifted up to 32 bits
   so that its root has 16. */
void moei_int_weight_norm(MOEI_INT_WEIGHT_ARGUMENTS) {
    uint32_t largest = 0, sum = 0;
    int up = 0, down = 0;
    int more = 11;
    size_t i;
    (void)r;
    (void)z;
    (void)experts;
    for (i = 0; i < count; i++) largest |= (uint32_t)(p[i] < 0 ? -p[i] : p[i]);
    for (; largest >> 16 != 0; largest >>= 1) down++;
    for (; largest != 0 && largest >> 15 == 0; largest <<= 1) up++;
    for (i = 0; i < count; i++) {
        const uint32_t v = (uint32_t)(p[i] < 0 ? -p[i] : p[i]) << up >> down;
        sum += v * v >> 8;
    }
    for (; sum != 0 && sum >> 30 == 0; sum <<= 2) more++;
    sum = moei_int_sqrt(sum);
    for (i = 0; i < count; i++) {
        const uint32_t v = (uint32_t)(p[i] < 0 ? -p[i] : p[i]) << up >> down;
        const int32_t w = sum != 0 ? (int32_t)(((v << more) + sum / 2) / sum) : 0;
        weights[i] = moei_ir_clip(p[i] < 0 ? -w : w);
    }
}

static int moei_ir_keeps(const moei_int_router *r, int16_t e) {
    return (uint16_t)e >= r->kept_from && (uint16_t)e < r->kept_end;
}

void moei_int_weight_over(MOEI_INT_WEIGHT_ARGUMENTS) {
    size_t n = 0, i;
    for (i = 0; i < count; i++)
        if (!moei_ir_keeps(r, experts[i])) weights[n++] = z[experts[i]];
    if (n > 0) {
        r->values(r, n, weights, p);
        r->over(r, z, p, n, experts, weights);
    }
    if (n < count) r->kept(r, r->n_experts, z, p);
    for (i = count; i-- > 0;) {
        if (moei_ir_keeps(r, experts[i])) weights[i] = moei_ir_clip((p[experts[i]] + 16) >> 5);
        else weights[i] = weights[--n];
    }
}

/* If the gate is the same softmax, p already holds it, unless a bias was added. */
void moei_int_weight_softmax(MOEI_INT_WEIGHT_ARGUMENTS) {
    size_t i;
    if (r->gate != moei_int_gate_softmax || r->bias != MOEI_INT_NONE) moei_int_gate_softmax(r, r->n_experts, z, p);
    for (i = 0; i < count; i++) weights[i] = moei_ir_clip((p[experts[i]] + 16) >> 5);
}

void moei_int_weight_one(MOEI_INT_WEIGHT_ARGUMENTS) {
    size_t i;
    (void)r;
    (void)z;
    (void)p;
    (void)experts;
    for (i = 0; i < count; i++) weights[i] = 32767;
}

void moei_int_weight_uniform(MOEI_INT_WEIGHT_ARGUMENTS) {
    const int16_t w = moei_ir_clip((int32_t)((32768u + (uint32_t)count / 2) / (uint32_t)count));
    size_t i;
    (void)r;
    (void)z;
    (void)p;
    (void)experts;
    for (i = 0; i < count; i++) weights[i] = w;
}

/* 1 / sum of 2^(z - best) over those that were not picked before and are within 2 eps of the best,
   measured by the larger of |z| and best. */
void moei_int_weight_sparsemixer(MOEI_INT_WEIGHT_ARGUMENTS) {
    size_t i, e, picked;
    (void)p;
    for (i = 0; i < count; i++) {
        const int32_t best = z[experts[i]];
        uint32_t sum = 32768; /* of expert i itself */
        for (e = 0; e < r->n_experts; e++) {
            const int32_t v = z[e], size = v > best ? v : -v > best ? -v : best;
            for (picked = 0; picked <= i && (size_t)experts[picked] != e; picked++) {}
            if (picked <= i || (uint32_t)(best - v) > (uint32_t)size * (uint32_t)r->threshold >> 16) continue;
            sum += moei_int_exp2((uint32_t)(best - v), r->z_bits);
        }
        weights[i] = moei_ir_clip((int32_t)((((uint32_t)1 << 30) + sum / 2) / sum));
    }
}

void moei_int_scale_weights(const moei_int_router *r, const unsigned char *base, size_t count, const int16_t *experts,
                            int16_t *weights) {
    size_t i;
    for (i = 0; i < count; i++) {
        const int32_t factor =
            r->scales != MOEI_INT_NONE ? moei_flash_16(base + r->scales + 2 * (uint32_t)experts[i]) : r->factor;
        weights[i] = (int16_t)((weights[i] * factor + 16384) >> 15);
    }
}

/* ---- one token ---- */

/* Routes one token: z [E] (NULL where no stage reads it: hash of one expert), token its id
   where tokens > 0, p [scratch] workspace (NULL where scratch is 0), experts [most] and weights
   [most] in order of choice, *count their number, which may be 0. Pointers are not checked.
   MOE_ERR_ARGUMENT: token outside of 0..tokens-1, nothing is written. Thread-safe for different
   memory. */
MOEI_TOOL MOEI_INT_CALLED moe_status moei_int_route(const moei_int_router *r, const unsigned char *base,
                                                    int32_t token, const int16_t *z, int32_t *p, int16_t *experts,
                                                    int16_t *weights, size_t *count) {
    size_t n, i;
    if (r->tokens > 0 && (uint32_t)token >= (uint32_t)r->tokens) return MOE_ERR_ARGUMENT;
    if (r->gate != NULL) r->gate(r, r->n_experts, z, p);
    *count = n = r->select(r, base, token, z, p, experts);
    if (n == 0) return MOE_OK;
    /* unused so far: holds z of the chosen */
    for (i = 0; i < n && r->values != NULL; i++) weights[i] = z[experts[i]];
    if (r->values != NULL) r->values(r, n, weights, p);
    r->weight(r, z, p, n, experts, weights);
    if (r->scale != NULL) r->scale(r, base, n, experts, weights);
    return MOE_OK;
}

#ifdef __cplusplus
}
#endif

#endif /* MOE_IMPLEMENTATION */
