/* Lists the routers, explains one stage by stage, and follows a token through it with all numbers.
   cc -std=c99 -O2 -I. examples/routers.c -o routers -lm */
#define MOE_IMPLEMENTATION
#include "moe.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "report.h"

static const char *const help =
    "routers                 lists all presets\n"
    "routers --csv           the same for programs, with source and formula\n"
    "routers NAME            explains one: its stages with their formulas, traits, tensors and cost\n"
    "routers NAME --show     follows one token through it and prints the numbers after every stage\n"
    "          --token N     this token, from 0 (the first that lost a choice or did not get its best experts)\n"
    "          --tokens N    number of tokens, 1 to 64 (6)\n"
    "          --seed N      seed of tokens and tensors (1); each of these three implies --show\n" REPORT_HELP;

/* The first row has the sizes for explaining, the second for --show, where formulas start at column
   WHY. */
enum { D_MODEL = 512, D_FF = 1024, COLUMNS = 100, LONG = 1000,
       EXPERTS = 4, WIDTH = 4, HIDDEN = 6, HEADS = 2, IDS = 16, MAX_TOKENS = 64, WHY = 45 };
enum { TOKEN, N_TOKENS, SEED, N_OPTIONS }; /* the options that take a number */
#define CALL 512                           /* tokens of the call whose cost is printed */
#define ANY ((unsigned long)-1)

/* ---- the table of stages, which explaining and --show print ----
   A value of a field and its formula. {name} stands for a field's value or, if the field is a
   choice, for that choice's formula; {name?text} is text if the field differs from its default,
   {name!text} if it does not. Value "": a number, printed if it differs from its default. Rows
   without text are not printed. A row without a field begins a stage; its text is printed if no
   row of the stage is. "soft" and "trait" are not fields: soft selection and the traits. */
typedef struct row {
    const char *field, *value, *text;
} row;

static const row rows[] = {
    {"", "input", ""},
    {"input", "plain", "u = x"},
    {"input", "jitter", "u = x * v, v uniform in [1 - eps, 1 + eps] per feature, eps = {jitter_eps}, in training"},
    {"input", "scaled_rms", "u = x / sqrt(mean x^2 + 1e-6) * g / sqrt(d), g learned"},
    {"input", "adaptive_clustering",
     "u = m * x, m = mean M_k of the token's {ac_mix} best expert(s) k in the layer before, whose tokens are cluster "
     "k; {ac_mode}"},
    {"", "score", ""},
    {"score", "linear", "z_e = u . W_e{router_bias? + b_e}"},
    {"score", "random", "z_e = u . W_e{router_bias? + b_e}, W frozen at its random initial values"},
    {"score", "mlp", "z = W2 a(W1 u + b1) + b2, {router_hidden} hidden units, {router_act}"},
    {"score", "cosine",
     "z_e = {cosine_keep_length!cos(v, W_e)}{cosine_keep_length?v . W_e / |W_e|} / tau, v = "
     "{cosine_dim!u}{cosine_dim?P u of {cosine_dim} features}, tau = {cosine_tau}{cosine_learn_tau?, learned}"},
    {"score", "norm", "z_e = {norm_order}, c = {norm_node}, in expert e"},
    {"score", "grap",
     "z_e = {grap_cosine!mean}{grap_cosine?sum} of the e-th block of d/E features of u{grap_cosine? / (|u| "
     "sqrt(d/E))}"},
    {"score", "attentive",
     "z_e = (W_Q h) . (W_K h_e) / sqrt({router_hidden}), h = a(W1 u + b1), {router_act}, h_e expert e's hidden layer"},
    {"score", "competition", "z_e = mean over features of ln(1 + exp(f_e(x)))"},
    {"score", "dselect",
     "z_e = sum over {top_k} codes i of q_i * (product over the bits j of e of s_ij if it is 1, else 1 - s_ij), q = "
     "softmax(A u), s_ij = C_ij . u by a smooth step, 0 below -1/2 and 1 above 1/2"},
    {"score", "custom", "z is computed by the caller's function"},
    {"router_residual", "", "z += W_g z', z' the logits of the MoE layer before, W_g learned"},
    {"logit_cap", "", "z_e = c tanh(z_e / c), c = {logit_cap}"},
    {"soft", "L", "L_s = {soft_normalise!u . phi_s}{soft_normalise?g cos(u, phi_s), g and phi learned}"},
    {"", "noise", "no noise"},
    {"noise", "none", ""},
    {"noise", "noisy_topk", "z_e += n (ln(1 + exp(u . V_e)) + {noise_floor}), V learned, n ~ N(0,1), in training"},
    {"noise", "gaussian", "z_e += {noise_sigma} n, n ~ N(0,1), in training"},
    {"noise", "gumbel", "z_e += -ln(-ln v), v uniform in (0,1), in training"},
    {"", "gate", ""},
    {"gate", "softmax", "r_e = exp(z_e/T) / sum over experts, T = {gate_temperature}"},
    {"gate", "sigmoid", "r_e = 1/(1 + exp(-z_e/T)), T = {gate_temperature}"},
    {"gate", "sqrt_softplus", "r_e = sqrt(ln(1 + exp(z_e)))"},
    {"gate", "relu", "r_e = max(z_e, 0)"},
    {"gate", "identity", "r_e = z_e"},
    {"soft", "D", "D_ts = softmax over tokens t of L_ts: what slot s takes of each token"},
    {"", "refine", "no refinement: p = r"},
    {"refine", "none", ""},
    {"refine", "similarity",
     "p_t = sum over tokens j{causal? <= t} of S_tj r_j, S_t = softmax over j of {similarity_scale} / tau, tau = "
     "{similarity_tau}{similarity_learned?, u_j read as W_s u_j}{lower_entropy_only?, only j with H(r_j) <= H(r_t)}"},
    {"refine", "attention",
     "p_t = sum over tokens j{causal? <= t} of S_tj r_j, S_t = softmax over j of ln A_tj - |{attention_u} - o_j|^2 / "
     "(2 sigma^2), sigma = {attention_sigma}, A, o of {attention_heads}{lower_entropy_only?, only j with H(r_j) <= "
     "H(r_t)}"},
    {"", "select", ""},
    {"select", "top_k", "S = the {top_k} of {n_experts} experts with the largest p{selection_bias? + b}"},
    {"select", "dense", "S = all {n_experts} experts"},
    {"select", "given", "S = the caller's recorded choices"},
    {"select", "grouped_top_k",
     "of {groups} groups of experts the {groups_kept} with the largest {group_score} stay; S = the {top_k} experts in "
     "them with the largest p{selection_bias? + b}"},
    {"select", "grouped_each",
     "of each of {groups} groups of experts the same number, those with the largest p{selection_bias? + b}; S = these "
     "{top_k}"},
    {"select", "expert_threshold",
     "S = all with z_e >= c_e; may be empty. c_e = a_e / (1 - {threshold_rho}^steps), after each step a_e = "
     "{threshold_rho} a_e + (1 - {threshold_rho}) mean over calls of the C-th largest z_e, C = max(1, "
     "round({capacity_factor} N / E))"},
    {"select", "top_p", "S = the largest p until their sum exceeds P = {top_p}, the last one included"},
    {"select", "threshold",
     "S = all with p_e > theta{threshold_learned?_e}, theta = {threshold}{threshold_learned?, learned}; if none, "
     "{threshold_fallback}"},
    {"select", "positive", "S = all with p_e > 0; may be empty"},
    {"select", "expert_choice",
     "every expert takes the C tokens{expert_choice_scope} with its largest {expert_choice_score}, C = max(1, "
     "round({capacity_factor} N / E))"},
    {"predictor", "", "in decoding experts take a token if q_e > 1/2, q_e = sigmoid(V_e . u), V learned"},
    {"select", "affinity",
     "S = the expert with the largest z, if it keeps the token; it keeps its best tokens, up to "
     "{affinity_sum_auto?{affinity_sum_auto} of the first call's mean sum for}"
     "{affinity_sum_auto!{affinity_sum!{affinity_mass} of}{affinity_sum?{affinity_sum} for}} their summed z > 0, "
     "at least {capacity_min}{capacity?, at most {capacity}}"},
    {"select", "hash", "S = table[token id], {top_k} of {n_experts} experts for each of {table_size} token ids"},
    {"select", "soft", "S = all {n_experts} experts; each works on {slots} mixture(s) of the tokens, its slots s"},
    {"select", "sinkhorn",
     "S = in training the {top_k} largest of exp(z) with rows and columns scaled to even sums; else of z"},
    {"select", "sample", "S = in training {top_k} draw(s) from p, none twice{sample_scope}; else {sample_at}"},
    {"select", "balanced",
     "S = in training the even assignment of tokens to experts with the largest sum of z; else the largest z"},
    {"select", "custom", "S is marked by the caller's function"},
    {"expert_dropout", "",
     "in training an expert cannot be selected with probability {expert_dropout}{expert_dropout_scope}"},
    {"selection_bias", "", "b_e is a state; it is added for selection only, never in a weight"},
    {"", "weight", ""},
    {"weight", "sum", "w_e = p_e / sum over S of p"},
    {"weight", "softmax", "w_e = exp(z_e) / sum over S of exp(z)"},
    {"weight", "raw", "w_e = p_e"},
    {"weight", "uniform", "w_e = 1/|S|"},
    {"weight", "one", "w_e = 1"},
    {"weight", "p_norm", "w_e = p_e / (sum over S of p^P)^(1/P), P = {weight_p}"},
    {"weight", "sparsemixer",
     "pick by pick: w = softmax over those not yet picked and within 2 eps of the best z, eps = "
     "{sparsemixer_eps}{sparsemixer_sample?; in training each pick is drawn from it}"},
    {"weight_over", "all", ""},
    {"weight_over", "nonzero", "the sum is over experts of S that are not zero experts; zero experts have w_e = p_e"},
    {"weight_over", "real", "the sum is over experts of S with matrices; the others have w_e = p_e"},
    {"expert_scale", "", "w_e times s_e, learned"},
    {"soft", "C", "C_ts = softmax over all slots s of L_ts: what token t takes of each slot"},
    {"", "capacity", "dropless"},
    {"drop_rule", "none", ""},
    {"drop_rule", "gshard", "in training a second choice stays with probability min(1, 2 w)"},
    {"drop_rule", "st_moe", "in training later choices stay with probability min(1, w/0.2)"},
    {"capacity_factor", "",
     "at most C = ceil({capacity_factor} K N / E) tokens per expert, K = {top_k}{zero_tau?, for E tau R + Z for the Z "
     "experts without matrices and that over tau = {zero_tau} for the others}; {drop_order}{renormalize}"},
    {"drop_capacity", "", "at most C = {drop_capacity} tokens per expert; {drop_order}{renormalize}"},
    {"capacity_bound", "none", ""},
    {"capacity_bound", "first",
     "{capacity_factor?C >= }{capacity_factor!at most C tokens per expert, C = }exp(d a^2/(2 - a^2))/E, a the largest "
     "|cos(u, W_e)| of the first training call, kept as a state; {drop_order}{renormalize}"},
    {"capacity_bound", "every",
     "{capacity_factor?C >= }{capacity_factor!at most C tokens per expert, C = }exp(d a^2/(2 - a^2))/E, a the largest "
     "|cos(u, W_e)| of the call; {drop_order}{renormalize}"},
    {"scale", "", "w_e times {scale}, as the last step"},
    {"", "losses", "no losses"},
    {"loss_balance", "",
     "{loss_balance} E sum_e f_e P_e, P_e = mean p_e{balance_scope}, f_e = {balance_over}{zero_tau?; of an expert "
     "without matrices {zero_tau} times {zero_average!that}{zero_average?their mean}}"},
    {"loss_z", "", "{loss_z} mean over tokens of (ln sum_e exp z_e)^2"},
    {"loss_importance", "", "{loss_importance} CV^2 over experts of {importance_over}{unbiased?, unbiased}"},
    {"loss_load", "", "{loss_load} CV^2 over experts of sum_t P(e is chosen under new noise)"},
    {"loss_entropy", "", "{loss_entropy} mean over tokens of H(p)"},
    {"loss_usage_entropy", "", "-{loss_usage_entropy} H(mean p)"},
    {"loss_similarity_same", "", "{loss_similarity_same}/E mean over pairs of tokens of |x - x'| sum_e p_e p'_e"},
    {"loss_similarity_diff", "",
     "-{loss_similarity_diff}/(E^2 - E) mean over pairs of |x - x'| sum over e != e' of p_e p'_e'"},
    {"loss_locality", "", "{loss_locality} KL(machines that tokens go to || their machines), {nodes} machines"},
    {"loss_l1", "",
     "lambda E/(K N^2) sum_e n_e sum_t p_te, K = {top_k}, lambda = {loss_l1}{l1_controller? at the start}"},
    {"loss_orthogonal", "", "{loss_orthogonal} sum over e != e' of cos(W_e, W_e')^2"},
    {"loss_diversity", "", "{loss_diversity} sqrt(sum over e != e' of cos(W_e, W_e')^2)"},
    {"loss_simplicity", "", "{loss_simplicity} mean over experts of |W_e|"},
    {"loss_stable_balance", "",
     "{loss_stable_balance} sum_e (n_e - m)/m sum over tokens of e of sigmoid(z_te), m = mean n_e"},
    {"loss_selector_entropy", "", "{loss_selector_entropy} mean over tokens of the sum over codes of their H"},
    {"loss_selector_reach", "",
     "{loss_selector_reach} mean over tokens of the sum over codes of 1/(their mass on experts that exist)"},
    {"compete_rate", "",
     "in training with probability {compete_rate}{compete_from? from step {compete_from} on}: S = the {top_k} largest "
     "c_e = {compete}"},
    {"loss_distill", "",
     "{loss_distill} {distill}, q = softmax({student!z}{student?V }{student_dim!{student?u}}{student_dim?h}), teacher "
     "= {compete_rate?c}{compete_rate!{student!the caller's}}{student?z}"},
    {"loss_predictor", "", "{loss_predictor} mean over tokens of the cross-entropy of q to S; trains only V"},
    {"expert_temperature", "",
     "the experts learn from p at T = {expert_temperature}, the gate from p at T = {gate_temperature}"},
    {"", "state", "no schedule"},
    {"bias_rate", "",
     "after each step b_e += {bias_rule}{bias_centre?, less the mean of d}; n_e are the choices of expert e, t is "
     "their mean"},
    {"l1_controller", "none", ""},
    {"l1_controller", "layer",
     "after each step lambda times 1.2 if more than {top_k} of {n_experts} are open, else / 1.2"},
    {"l1_controller", "net",
     "after each step lambda, one for all layers of a network, times 1.2 if more than {top_k} of {n_experts} are "
     "open on average, else / 1.2"},
    {"k_end", "", "K goes from {top_k} to {k_end} in {schedule_steps} steps"},
    {"tau_schedule", "none", ""},
    {"tau_schedule", "gate_temperature", "T goes from {gate_temperature} to {tau_end} in {schedule_steps} steps"},
    {"tau_schedule", "cosine_tau", "tau goes from {cosine_tau} to {tau_end} in {schedule_steps} steps"},
    {"tau_schedule", "similarity_tau", "tau goes from {similarity_tau} to {tau_end} in {schedule_steps} steps"},
    {"tau_schedule", "attention_sigma", "sigma goes from {attention_sigma} to {tau_end} in {schedule_steps} steps"},
    {"switch_at", "", "before step {switch_at}: {switch_from}"},
    {"switch_share", "", "in the first {switch_share} of the steps: {switch_from}"},
    {"freeze_at", "",
     "from step {freeze_at} on the router is fixed{student?; its student V chooses: S = the {top_k} largest V }"
     "{student_dim!{student?u}}{student_dim?h, h one of {table_size} learned vectors of {student_dim} numbers, that of "
     "the token's id}"},
    {"capacity_rho", "", "C is averaged over calls: {capacity_rho} C + (1 - {capacity_rho}) C of the call"},
    {"", "experts", ""},
    {"expert", "swiglu",
     "f_e(x) = down (silu(gate x) * (up x)), hidden width {d_ff}{expert_bias?; each product adds a "
     "bias}{swiglu_limit?; gate x at most {swiglu_limit}, up x -{swiglu_limit} to {swiglu_limit}}{swiglu_offset?; "
     "{swiglu_offset} + up x}{swiglu_alpha?; silu(g) = g/(1 + exp(-{swiglu_alpha} g))}"},
    {"expert", "glu",
     "f_e(x) = down (a(gate x) * (up x)), hidden width {d_ff}{expert_bias?; each product adds a bias}, {act}"},
    {"expert", "linear", "f_e(x) = W_e x + b_e"},
    {"expert", "mlp", "f_e(x) = W2 a(W1 x + b1) + b2, hidden width {d_ff}, {act}"},
    {"expert", "factorised",
     "f_e(x) = down (silu(expand (reduce x)) * (up x)), hidden width {d_ff}, reduce to {d_low}"},
    {"n_zero", "", "{n_zero} of the {n_experts} experts are zero experts: f_e(x) = 0"},
    {"n_copy", "", "{n_copy} of the {n_experts} experts are copy experts: f_e(x) = x"},
    {"n_constant", "",
     "{n_constant} of the {n_experts} experts are constant: f_e(x) = a1 x + a2 v_e, [a1, a2] = softmax(W_e x)"},
    {"apply_to", "output", "y = sum over S of w_e f_e(x)"},
    {"apply_to", "input", "y = sum over S of f_e(w_e x)"},
    {"soft", "y", "y_t = sum over slots s of C_ts f_s(sum over tokens j of D_js x_j)"},
    {"d_latent", "", "experts read h = W_in x of width {d_latent} instead of x, and y = W_out times the sum"},
    {"add_input", "", "y += (1 - sum of w_e) x"},
    {"n_shared", "",
     "y += {shared_sigmoid?sigmoid(s . x) * }a shared swiglu of width {n_shared} x {d_shared}, for every token"},
    {"", "parts", ""},
    {"ac_mode", "paper",
     "M_kq = {ac_lambda!1/(s + 1e-6)}{ac_lambda?{ac_lambda}/(s + a_k)} scaled to mean 1, s = {ac_spread}, of that "
     "layer"},
    {"ac_mode", "code", "M_kq = 1/(s + 1e-4) over its mean of all k (with variance 1/(s + 0.1)), s = {ac_spread}"},
    {"ac_mode", "running",
     "M is a state, averaged over steps with rho = {ac_rho}: 1/(s + 1e-6) scaled to mean 1, s = {ac_spread}, of that "
     "layer"},
    {"ac_mode", "random", "M_kq = max(0, 1 + n/2), n ~ N(0,1), drawn once"},
    {"ac_spread", "mad", "mean |x_q - mean x_q| in cluster k"},
    {"ac_spread", "variance", "variance of x_q in cluster k"},
    {"ac_spread", "pairwise", "mean |x_q - x'_q| over pairs in cluster k"},
    {"norm_node", "down", "reduce x"},
    {"norm_node", "gate", "what enters the activation"},
    {"norm_node", "up", "up x"},
    {"norm_node", "act", "what leaves the activation"},
    {"norm_node", "product", "act * up"},
    {"norm_node", "output", "f_e(x), the output"},
    {"norm_order", "l2", "sqrt(sum c^2)"},
    {"norm_order", "l1", "sum |c|"},
    {"norm_order", "linf", "max |c|"},
    {"similarity_scale", "none", "u_t . u_j"},
    {"similarity_scale", "l2", "cos(u_t, u_j)"},
    {"similarity_scale", "rsqrt_d", "u_t . u_j / sqrt(d)"},
    {"attention_u", "input", "u_t"},
    {"attention_u", "output", "attention_t"},
    {"attention_heads", "min_entropy", "the head with the least mean entropy"},
    {"attention_heads", "all", "all heads by their posterior"},
    {"attention_heads", "fixed", "head {attention_head}"},
    {"group_score", "max", "best p{selection_bias? + b}"},
    {"group_score", "top2_sum", "sum of the two best p{selection_bias? + b}"},
    {"threshold_fallback", "always", "the best one"},
    {"threshold_fallback", "evaluation", "outside training the best one"},
    {"threshold_fallback", "never", "no expert"},
    {"expert_choice_score", "p", "p_e"},
    {"expert_choice_score", "z", "z_e"},
    {"sample_at", "training", "the {top_k} largest p"},
    {"sample_at", "always", "draws seeded by {sample_seed} and z"},
    {"expert_dropout_scope", "token", ", drawn for every token"},
    {"expert_dropout_scope", "call", ", drawn for all tokens of the call together"},
    {"sample_scope", "token", ""},
    {"sample_scope", "sequence", ", the same for all tokens of a sequence"},
    {"sample_scope", "call", ", the same for all tokens of a call"},
    {"drop_order", "position", "first choices, then first come first served"},
    {"drop_order", "priority", "first choices, then by max p"},
    {"drop_order", "random", "first choices, then in random order"},
    {"drop_order", "score", "the largest p stay"},
    {"renormalize", "before", ""},
    {"renormalize", "after", "; w over the sum of those that stay"},
    {"balance_over", "pairs", "share of choices"},
    {"balance_over", "tokens", "choices per token"},
    {"balance_over", "first", "share of first choices"},
    {"balance_scope", "batch", ""},
    {"balance_scope", "sequences", " per sequence"},
    {"importance_over", "probabilities", "sum_t p_te"},
    {"importance_over", "gate", "sum_t r_te without noise"},
    {"importance_over", "weights", "sum_t w_te"},
    {"bias_rule", "sign", "d_e = {bias_rate} sign(t - n_e)"},
    {"bias_rule", "proportional", "d_e = {bias_rate} (t - n_e) / sum n"},
    {"bias_rule", "smebu",
     "m_e, m_e = {bias_beta} m_e + (1 - {bias_beta}) d_e, d_e = {bias_rate} tanh({bias_kappa} (t - n_e) / t)"},
    {"compete", "softplus", "mean over features of ln(1 + exp(f_e(x))), w_e = c_e / sum over S of c"},
    {"compete", "norm", "|f_e(x)|, w = softmax over S of c"},
    {"distill", "ce_hard", "mean -ln q at the teacher's best expert"},
    {"distill", "ce_soft", "cross-entropy of q and softmax(teacher)"},
    {"distill", "mse", "mean squared difference of q and softmax(teacher)"},
    {"act", "relu", "a(v) = max(v, 0)"},
    {"act", "default", "a(v) = max(v, 0)"}, /* of mlp; the layer fills in that of glu */
    {"act", "silu", "a(v) = v/(1 + exp(-v))"},
    {"act", "gelu", "a(v) = v Phi(v)"},
    {"act", "tanh", "a(v) = tanh v"},
    {"act", "sigmoid", "a(v) = 1/(1 + exp(-v))"},
    {"act", "identity", "a(v) = v"},
    {"act", "gelu_tanh", "a(v) = v (1 + tanh(0.79788 (v + 0.044715 v^3)))/2"},
    {"act", "relu2", "a(v) = max(v, 0)^2"},
    {"trait", "causal", "later tokens of the call do not change a token's result"},
    {"trait", "needs_batch", "a token's result depends on other tokens of the call"},
    {"trait", "needs_token_ids", "reads token ids"},
    {"trait", "needs_attention", "reads the attention before it: its matrices and the outputs of its heads"},
    {"trait", "needs_previous_layer", "reads the choices of the previous MoE layer"},
    {"trait", "needs_all_experts", "the score runs every expert, or its first steps, for every token"},
    {"trait", "stochastic", "draws random numbers in training"},
    {"trait", "stateful", "keeps a state between steps, saved with the model"},
    {"trait", "needs_given", "replays recorded choices"},
    {NULL, NULL, NULL}};

static const moe_field *field_of(const char *name) { return moe_field_find(moe_layer_fields(), name); }

static const char *const *choices_of(const char *name) {
    return field_of(name) != NULL ? field_of(name)->choices : NULL;
}

/* The row of a value. Fields that share value names, such as act and router_act, share the rows. */
static const row *row_of(const char *name, const char *value) {
    const char *const *choices = choices_of(name);
    const row *r;
    if (strcmp(name, "router_act") == 0) name = "act"; /* the same functions in another table of choices */
    for (r = rows; r->field != NULL; r++)
        if (strcmp(r->value, value) == 0 &&
            (strcmp(r->field, name) == 0 || (choices != NULL && choices == choices_of(r->field))))
            return r;
    return NULL;
}

/* Reads the name after a brace; 0 if no field has it. */
static int read_name(const char *brace, char name[40]) {
    sprintf(name, "%.*s", (int)strcspn(brace + 1, "?!}") % 40, brace + 1);
    return field_of(name) != NULL;
}

/* Checks the table against the library: values of all choices (kernels is not a stage), traits,
   names. Returns an error message, or NULL. */
static const char *check_rows(void) {
    static char wrong[120];
    static moe_error error;
    char name[40];
    moe_layer_config c;
    const moe_field *f;
    const row *r;
    const char *s;
    unsigned i;
    for (f = moe_layer_fields(); f->name != NULL; f++)
        for (i = 0; f->choices != NULL && strcmp(f->name, "kernels") != 0 && f->choices[i] != NULL; i++)
            if (row_of(f->name, f->choices[i]) == NULL) {
                sprintf(wrong, "no row for %.40s = %.40s", f->name, f->choices[i]);
                return wrong;
            }
    for (i = 1; moe_trait_name(i) != NULL; i <<= 1)
        if (row_of("trait", moe_trait_name(i)) == NULL) {
            sprintf(wrong, "no row for the trait %.40s", moe_trait_name(i));
            return wrong;
        }
    for (r = rows; r->field != NULL; r++) {
        const char *value = *r->value != '\0' ? r->value : "1";
        int is_field = strstr("soft trait", r->field) == NULL;
        if (is_field && moe_field_set(moe_layer_fields(), &c, r->field, value, &error) != MOE_OK) return error.message;
        for (s = r->text; (s = strchr(s, '{')) != NULL; s++)
            if (!read_name(s, name)) {
                sprintf(wrong, "no field {%.40s}", name);
                return wrong;
            }
    }
    return NULL;
}

/* ---- formulas ---- */

/* Whether a field differs from its default. */
static int is_set(const moe_layer_config *c, const char *name) {
    moe_layer_config usual;
    char value[40], plain[40];
    memset(&usual, 0, sizeof usual);
    usual.router.d_model = c->router.d_model;
    usual.router.n_experts = c->router.n_experts;
    if (moe_layer_check(&usual, &usual, NULL) != MOE_OK) return 0;
    moe_field_text(field_of(name), c, value, sizeof value);
    moe_field_text(field_of(name), &usual, plain, sizeof plain);
    return strcmp(value, plain) != 0;
}

/* Appends the formula at [s, end), with the values of c, to out[LONG]; that of a stage takes less
   than half of it. */
static void fill_in(char *out, const moe_layer_config *c, const char *s, const char *end) {
    for (;;) {
        const char *open = s, *mark, *text;
        char name[40], value[40];
        int depth = 1;
        while (open < end && *open != '{') open++;
        strncat(out, s, (size_t)(open - s));
        if (open == end) return;
        for (s = open + 1; depth > 0; s++) depth += (*s == '{') - (*s == '}'); /* s: after the closing brace */
        mark = open + 1 + strcspn(open + 1, "?!}");
        read_name(open, name);
        moe_field_text(field_of(name), c, value, sizeof value);
        text = choices_of(name) != NULL ? row_of(name, value)->text : value;
        if (*mark == '}') fill_in(out, c, text, text + strlen(text));
        else if (is_set(c, name) == (*mark == '?')) fill_in(out, c, mark + 1, s - 1);
    }
}

static char *formula(char *out, const moe_layer_config *c, const row *r) {
    fill_in(out, c, r->text, r->text + strlen(r->text));
    return out;
}

/* Whether a row of a stage is printed. Soft selection replaces the stages after u; the factor of
   expert_choice and expert_threshold is not a capacity. */
static int told(const moe_layer_config *c, const row *r) {
    int soft = c->router.select == MOE_SELECT_SOFT;
    char value[40];
    if (strcmp(r->field, "soft") == 0 || *r->text == '\0') return soft && *r->text != '\0';
    if (soft && strstr(" score gate weight apply_to ", r->field) != NULL) return 0;
    if ((c->router.select == MOE_SELECT_EXPERT_CHOICE || c->router.select == MOE_SELECT_EXPERT_THRESHOLD) &&
        strcmp(r->field, "capacity_factor") == 0)
        return 0;
    moe_field_text(field_of(r->field), c, value, sizeof value);
    return choices_of(r->field) != NULL ? strcmp(value, r->value) == 0 : is_set(c, r->field);
}

static const char *label_of(const row *r) {
    return *r->value == '\0' || strcmp(r->field, "soft") == 0 ? r->field : r->value;
}

/* Prints text from column `at` on, further lines from column `indent`. */
static void wrap(const char *text, size_t at, size_t indent) {
    const char *gap = "";
    for (; *text != '\0'; text += *text == ' ') {
        size_t word = strcspn(text, " ");
        if (*gap != '\0' && at + 1 + word > COLUMNS) {
            printf("\n%*s", (int)indent, "");
            at = indent;
            gap = "";
        }
        printf("%s%.*s", gap, (int)word, text);
        at += strlen(gap) + word;
        gap = " ";
        text += word;
    }
    printf("\n");
}

/* 12345678 as 12,345,678; the last eight results stay valid. */
static const char *grouped(double number) {
    static char ring[8][40];
    static int turn;
    char *s = ring[turn = (turn + 1) % 8];
    int i = sprintf(s, "%.0f", number < 1e18 ? number : 1e18);
    while ((i -= 3) > 0) {
        memmove(s + i + 1, s + i, strlen(s + i) + 1);
        s[i] = ',';
    }
    return s;
}

static int complain(const char *what) {
    fprintf(stderr, "routers: %s\n", what);
    return EXIT_USAGE;
}

/* ---- the list ---- */

/* The configuration of a preset, in the size for explaining or for --show. */
static moe_status configure(const char *name, int shown, moe_layer_config *c, moe_error *error) {
    moe_status status = moe_layer_preset(name, c, error);
    moe_router_config *r = &c->router;
    if (status != MOE_OK) return status;
    r->d_model = shown ? WIDTH : D_MODEL;
    c->d_ff = shown ? HIDDEN : D_FF;
    if (r->select == MOE_SELECT_HASH || r->student_dim > 0) r->table_size = shown ? IDS : 32000;
    if (!shown) return moe_layer_check(c, c, error);
    r->n_experts = EXPERTS;
    r->n_zero = r->n_zero > 0;
    r->n_copy = r->n_copy > 0;
    r->n_constant = r->n_constant > 0;
    if (r->bias_real > 1) r->bias_real = 1;
    if (r->top_k > 2) r->top_k = 2;
    if (r->groups > 1) r->groups = 2;
    if (r->groups_kept > 1) r->groups_kept = 1;
    if (r->cosine_dim > 0) r->cosine_dim = 3;
    if (r->slots > 1) r->slots = 1;
    if (r->refine == MOE_REFINE_ATTENTION) r->heads = HEADS;
    if (c->n_shared > 1) c->n_shared = 1;
    return moe_layer_check(c, c, error);
}

/* The fewest and the most experts per token; returns 1 if both are the mean over tokens. */
static int experts_per_token(const moe_router_config *r, double *least, double *most) {
    double all = r->n_experts, factor = (double)r->capacity_factor;
    *least = *most = r->top_k;
    if (r->select == MOE_SELECT_EXPERT_CHOICE) *least = *most = factor < all ? factor : all;
    if (r->select == MOE_SELECT_DENSE || r->select == MOE_SELECT_SOFT) *least = *most = all;
    if (r->select == MOE_SELECT_TOP_P || r->select == MOE_SELECT_THRESHOLD || r->select == MOE_SELECT_CUSTOM) {
        *least = 1;
        *most = all;
    }
    if (r->select == MOE_SELECT_THRESHOLD && r->threshold_fallback != MOE_FALLBACK_ALWAYS) *least = 0;
    if (r->select == MOE_SELECT_AFFINITY) {
        *least = 0;
        *most = 1;
    }
    if (r->select == MOE_SELECT_EXPERT_THRESHOLD) {
        *least = 0;
        *most = all;
    }
    if (r->select == MOE_SELECT_POSITIVE && !r->l1_controller) {
        *least = 0;
        *most = r->score == MOE_SCORE_DSELECT ? r->top_k : all;
    }
    return r->select == MOE_SELECT_EXPERT_CHOICE || r->l1_controller;
}

static const char *traits_of(const moe_router_config *r) {
    static char text[LONG];
    unsigned bit;
    for (*text = '\0', bit = 1; moe_trait_name(bit) != NULL; bit <<= 1)
        if (moe_router_traits(r) & bit)
            sprintf(text + strlen(text), "%s%s", *text != '\0' ? " " : "", moe_trait_name(bit));
    return text;
}

static void print_quoted(const char *text, const char *end) {
    for (printf("\""); *text != '\0'; text++) printf(*text == '"' ? "\"\"" : "%c", *text);
    printf("\"%s", end);
}

static int list(int csv) {
    const moe_preset *p;
    moe_layer_config c;
    moe_error error;
    double least, most;
    printf(csv ? "name,aliases,least_experts,most_experts,n_experts,decodes,traits,source,formula\n"
               : "preset (other names)            experts  decodes  traits\n");
    for (p = moe_presets(); p->name != NULL; p++) {
        char text[80];
        int mean, decodes;
        if (configure(p->name, 0, &c, &error) != MOE_OK) return complain(error.message);
        mean = experts_per_token(&c.router, &least, &most);
        decodes = moe_router_check_decoding(&c.router, NULL) == MOE_OK;
        if (csv) {
            print_quoted(p->name, ",");
            print_quoted(p->aliases, ",");
            printf("%g,%g,%d,%d,", least, most, c.router.n_experts, decodes);
            print_quoted(traits_of(&c.router), ",");
            print_quoted(p->source, ",");
            print_quoted(p->formula, "\n");
            continue;
        }
        sprintf(text, "%.30s%s%.30s%s", p->name, *p->aliases != '\0' ? " (" : "", p->aliases,
                *p->aliases != '\0' ? ")" : "");
        printf("%-27s ", text);
        sprintf(text, "%s%g", mean ? "~" : "", least);
        if (most > least) sprintf(text + strlen(text), "-%g", most);
        printf("%5s of %-3d  %-7s  %s\n", text, c.router.n_experts, decodes ? "yes" : "no", traits_of(&c.router));
    }
    if (!csv) printf("\nexperts: of one token; ~ on average. decodes: token by token.\n"
                     "Next: routers NAME explains one, routers NAME --show follows a token through it.\n");
    return 0;
}

/* The list with formulas as a report. */
static int report_presets(void) {
    static const char *const heads[] = {"formula", "source", "traits"};
    const moe_preset *p;
    const char **names, **cells;
    moe_figure *f;
    moe_layer_config c;
    moe_error error;
    size_t n = 0, i;
    for (p = moe_presets(); p->name != NULL; p++) n++;
    f = report_add(MOE_FIGURE_TABLE, "Presets", n, 3);
    names = (const char **)report_grab(n, sizeof *names);
    cells = (const char **)report_grab(3 * n, sizeof *cells);
    for (p = moe_presets(), i = 0; i < n; p++, i++) {
        if (configure(p->name, 0, &c, &error) != MOE_OK) return complain(error.message);
        names[i] = p->name;
        cells[3 * i] = p->formula;
        cells[3 * i + 1] = p->source;
        cells[3 * i + 2] = report_text(traits_of(&c.router));
    }
    f->row_names = names;
    f->column_names = heads;
    f->cells = cells;
    f->row_label = "preset";
    return report_write_added("routers", "Routers");
}

/* ---- one preset explained ---- */

static void explain_stages(const moe_layer_config *c) {
    const row *stage, *r;
    char idle[LONG] = "";
    for (stage = rows; strcmp(stage->value, "parts") != 0; stage = r) {
        const char *name = stage->value, *label;
        for (r = stage + 1; *r->field != '\0'; r++) {
            char text[LONG] = "";
            if (!told(c, r)) continue;
            label = *name != '\0' || *r->value == '\0' ? label_of(r) : "";
            printf("  %-9s %-15s ", name, label);
            wrap(formula(text, c, r), strlen(label) > 15 ? strlen(label) + 13 : 28, 28);
            name = "";
        }
        if (*name != '\0' && *stage->text != '\0')
            sprintf(idle + strlen(idle), "%s%s", *idle != '\0' ? "; " : "", stage->text);
    }
    if (*idle != '\0') printf("%12s%s\n", "", idle);
}

static void explain_traits(const moe_router_config *r) {
    moe_error error;
    unsigned bit;
    int decodes = moe_router_check_decoding(r, &error) == MOE_OK;
    printf("\nTraits\n");
    for (bit = 1; moe_trait_name(bit) != NULL; bit <<= 1)
        if (moe_router_traits(r) & bit)
            printf("  %-25s %s\n", moe_trait_name(bit), row_of("trait", moe_trait_name(bit))->text);
    printf("  %-25s ", "decodes token by token");
    wrap(decodes ? "yes" : error.message, 28, 28);
}

static void explain_tensors(const moe_layer_config *c) {
    moe_parameter slot;
    int place, k, none = 1;
    printf("\nTensors of the router\n");
    for (place = 0; place < MOE_ROUTER_PARAMETER_COUNT; place++) {
        if (moe_layer_parameter(c, place, &slot) != MOE_OK) continue;
        printf("  %-25s %12s = ", slot.name, grouped((double)slot.count));
        for (k = none = 0; k < slot.n_dims; k++) printf("%s%lu", k > 0 ? " x " : "", (unsigned long)slot.shape[k]);
        printf("%s\n", slot.flags & MOE_PARAM_STATE ? ", state" : slot.flags & MOE_PARAM_FROZEN ? ", frozen" : "");
    }
    if (none) printf("  none\n");
}

/* Multiplications for one token. expert: in one expert; read: the part of these that the score runs
   in every expert; numbers: the parameters of one expert. */
typedef struct cost {
    double score, noise, refine, expert, read, numbers, shared;
} cost;

/* Whether the score multiplies by this matrix, "experts.NAME", of every expert, because the
   activation that it reads depends on it. */
static int is_read(const moe_router_config *r, const char *matrix) {
    static const char *const made_of[MOE_NODE_COUNT] = {"reduce",
                                                        "gate reduce expand fc1.weight",
                                                        "up fc1.weight",
                                                        "gate reduce expand fc1.weight",
                                                        "gate reduce expand up fc1.weight",
                                                        "gate reduce expand up down fc1.weight fc2.weight"};
    int node = r->score == MOE_SCORE_NORM        ? r->norm_node
               : r->score == MOE_SCORE_ATTENTIVE ? (int)MOE_NODE_PRODUCT
                                                 : (int)MOE_NODE_OUTPUT;
    return (moe_router_traits(r) & MOE_TRAIT_NEEDS_ALL_EXPERTS) != 0 &&
           strstr(made_of[node], matrix + strlen("experts.")) != NULL;
}

/* A token is multiplied by every matrix once; tables are only read. The cost of stages that mix
   tokens grows with the length of the call. */
static cost cost_of(const moe_layer_config *c) {
    const moe_router_config *r = &c->router;
    cost k = {0, 0, 0, 0, 0, 0, 0};
    double d = r->d_model, e = r->n_experts;
    moe_parameter slot;
    int place;
    for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++) {
        double count;
        if (moe_layer_parameter(c, place, &slot) != MOE_OK || slot.n_dims < 2) continue;
        count = (double)slot.count;
        if (place == MOE_ROUTER_TABLE || place == MOE_ROUTER_AC_RUNNING) continue;
        if (place == MOE_EXPERTS_CONSTANT || place == MOE_EXPERTS_CONSTANT_GATE) continue; /* only 2 d each */
        if (place == MOE_ROUTER_NOISE_WEIGHT) k.noise = count;
        else if (place == MOE_ROUTER_SIMILARITY) k.refine = count;
        else if (place < MOE_ROUTER_PARAMETER_COUNT) k.score += count;
        else if (place >= MOE_SHARED_GATE) k.shared += count;
        else k.numbers += count / (double)slot.shape[0];
        if (slot.n_dims == 3) {
            k.expert += count / (double)slot.shape[0];
            k.read += is_read(r, slot.name) ? count / (double)slot.shape[0] : 0;
        }
    }
    if (r->score == MOE_SCORE_ATTENTIVE) k.score += e * r->router_hidden;
    if (r->refine != MOE_REFINE_NONE) k.refine += CALL * (d + e) * (r->attention_heads == MOE_HEADS_ALL ? r->heads : 1);
    if (r->select == MOE_SELECT_SOFT) k.refine = 2 * e * r->slots * d;
    return k;
}

/* The largest number of comparisons of the selection outside training. */
static double comparisons(const moe_router_config *r) {
    double e = r->n_experts, k = r->top_k;
    int s = r->select;
    if (s == MOE_SELECT_THRESHOLD || s == MOE_SELECT_POSITIVE || s == MOE_SELECT_EXPERT_THRESHOLD) return e;
    if (s == MOE_SELECT_GROUPED_EACH) return e * k / r->groups;
    if (s == MOE_SELECT_TOP_P) return e * (e - 1) / 2;
    /* E experts each pick cf N / E of N tokens */
    if (s == MOE_SELECT_EXPERT_CHOICE) return (double)r->capacity_factor * CALL;
    if (s == MOE_SELECT_AFFINITY) return e + CALL;
    if (s == MOE_SELECT_GROUPED_TOP_K) return e * (r->group_score + 1) + (double)r->groups * r->groups_kept + e * k;
    return s == MOE_SELECT_TOP_K || s == MOE_SELECT_SINKHORN || s == MOE_SELECT_BALANCED || s == MOE_SELECT_SAMPLE
               ? e * k
               : 0;
}

static void print_cost(const char *what, double least, double most, const char *note) {
    printf("  %-25s %12s%s%s%s\n", what, grouped(least), most > least ? " to " : "", most > least ? grouped(most) : "",
           note);
}

static double percent(double part, double rest) { return part > 0 ? 100 * part / (part + rest) : 0; }

static void explain_cost(const moe_layer *layer) {
    const moe_router_config *r = &layer->config.router;
    const cost k = cost_of(&layer->config);
    double router = k.score + k.refine + k.read * r->n_experts, each = k.expert, least, most, few, many;
    double all = (double)moe_layer_parameter_count(layer, NULL), others = all - k.numbers * r->n_experts;
    int mean = experts_per_token(r, &least, &most);
    char note[120];
    if (r->apply_to == MOE_APPLY_OUTPUT) each -= k.read; /* already done for the score */
    printf("\nMultiplications for one token of a call of %d, outside training (d_model %d, d_ff %d)\n", CALL, D_MODEL,
           D_FF);
    if (k.score > 0) print_cost("score", k.score, 0, "");
    sprintf(note, ": %s in each of %d", grouped(k.read), r->n_experts);
    if (k.read > 0) print_cost("all experts, for scoring", k.read * r->n_experts, 0, note);
    if (k.refine > 0) print_cost(r->select == MOE_SELECT_SOFT ? "into slots and back" : "refine", k.refine, 0, "");
    few = least * each + k.shared;
    many = most * each + k.shared;
    /* all tokens of the call share the slots */
    if (r->select == MOE_SELECT_SOFT) few = many = r->n_experts * each * r->slots / CALL;
    sprintf(note, ", %.3g %% of all", percent(router, many));
    if (many > few && router > 0)
        sprintf(note, ", %.3g to %.3g %% of all", percent(router, many), percent(router, few));
    print_cost("the router in total", router, 0, note);
    sprintf(note, ": %s%.3g of %s", mean ? "on average " : many > few ? "up to " : "", most, grouped(each));
    if (r->select == MOE_SELECT_SOFT)
        sprintf(note, ": %d slots of %s for %d tokens", r->n_experts * r->slots, grouped(each), CALL);
    if (!(each > 0)) sprintf(note, ": %.3g, which the score has run already", most);
    if (k.shared > 0) sprintf(note + strlen(note), ", shared %s", grouped(k.shared));
    print_cost("the chosen experts", few, many, note);
    if (k.noise > 0) print_cost("noise, in training", k.noise, 0, "");
    if (comparisons(r) > 0) print_cost("comparisons to select", comparisons(r), 0, " at most");
    sprintf(note, " of %s", grouped(all));
    few = others + least * k.numbers + (r->n_experts - least) * k.read;
    many = others + most * k.numbers + (r->n_experts - most) * k.read;
    print_cost("parameters used", few, many, note);
}

static int explain(const char *name) {
    const moe_preset *preset = moe_preset_find(name);
    moe_layer_config c;
    moe_layer layer;
    moe_error error;
    if (configure(name, 0, &c, &error) != MOE_OK || moe_layer_init(&layer, &c, &error) != MOE_OK)
        return complain(error.message);
    printf("%s%s%s\n  ", preset->name, *preset->aliases != '\0' ? ", also " : "", preset->aliases);
    wrap(preset->source, 2, 2);
    printf("  ");
    wrap(preset->formula, 2, 2);
    printf("  set by: ");
    wrap(preset->router, 10, 10);
    if (*preset->layer != '\0') {
        printf("%10s", "");
        wrap(preset->layer, 10, 10);
    }
    printf("\nStages, E = %d: x token, u router's input, z logits, r gate, p refined, S chosen, w weights\n",
           c.router.n_experts);
    explain_stages(&c);
    explain_traits(&c.router);
    explain_tensors(&c);
    explain_cost(&layer);
    return 0;
}

/* ---- one token's journey ---- */

static moe_real y[MAX_TOKENS * WIDTH], clean[MAX_TOKENS * EXPERTS]; /* outputs, logits without noise */

static size_t taken; /* numbers of draw's pool in use */

/* Draws n normally distributed numbers into a static pool. */
static moe_real *draw(size_t n, moe_rng *rng) {
    static moe_real pool[MAX_TOKENS * (4 * WIDTH + EXPERTS + HEADS * (MAX_TOKENS + WIDTH))];
    size_t i;
    for (i = taken, taken += n; i < taken; i++) pool[i] = moe_rng_normal(rng);
    return pool + taken - n;
}

/* Makes a training call of n tokens, with all inputs that routers may need. */
static void make_up(moe_call *call, size_t n, moe_rng *rng) {
    static int32_t experts[MAX_TOKENS * 2], ids[MAX_TOKENS], homes[MAX_TOKENS];
    static moe_real weights[MAX_TOKENS * 2];
    moe_real *attention = draw(HEADS * n * n, rng);
    size_t i;
    for (i = 0; i < HEADS * n; i++) moe_softmax(NULL, n, attention + i * n, 1, attention + i * n);
    for (i = 0; i < n; i++) {
        ids[i] = (int32_t)moe_rng_below(rng, IDS);
        homes[i] = (int32_t)i % 2;
        experts[2 * i] = (int32_t)i % 2;
        experts[2 * i + 1] = 2 + (int32_t)i % 2;
        weights[2 * i] = (moe_real)0.75;
        weights[2 * i + 1] = (moe_real)0.25;
    }
    memset(call, 0, sizeof *call);
    call->n_tokens = n;
    call->training = 1;
    call->x = draw(n * WIDTH, rng);
    call->token_ids = ids;
    call->token_machine = homes;
    call->previous_input = draw(n * WIDTH, rng);
    call->previous_experts = experts;
    call->previous_weights = weights;
    call->n_previous = 2;
    call->attention_weights = attention;
    call->attention_outputs = draw(HEADS * n * WIDTH, rng);
    call->attention_output = draw(n * WIDTH, rng);
    call->teacher = draw(n * EXPERTS, rng);
}

/* Perturbs tensors that start at or near a constant, as training would, so that their effect is
   visible. */
static void enliven(const moe_layer *layer, moe_rng *rng) {
    static const char *const names[] = {"selection_bias", "bias", "expert_scale", "codes", "noise_weight"};
    moe_tensor tensor;
    char name[40];
    size_t i, k;
    for (k = 0; k < sizeof names / sizeof names[0]; k++) {
        sprintf(name, "router.%s", names[k]);
        for (i = 0; moe_layer_find(layer, name, &tensor) == MOE_OK && i < tensor.count; i++)
            tensor.data[i] += moe_rng_normal(rng) * (moe_real)(k == 0 ? 0.1 : 0.5);
    }
}

/* Runs the call without noise, for the clean logits, and then with it. Both draw the same numbers
   before the noise. */
static moe_status perform(const moe_layer *layer, moe_call *call, const moe_rng *start, void *work, size_t bytes,
                          moe_layer_pass *pass) {
    static moe_real none[MAX_TOKENS * EXPERTS];
    moe_rng rng = *start;
    moe_status status;
    call->rng = &rng;
    call->noise = none;
    status = moe_layer_forward(layer, call, y, work, bytes, pass);
    if (status != MOE_OK) return status;
    memcpy(clean, pass->routing.logits, call->n_tokens * EXPERTS * sizeof(moe_real));
    rng = *start;
    call->noise = NULL;
    return moe_layer_forward(layer, call, y, work, bytes, pass);
}

/* The choice index of expert e for token t; -1: not chosen. */
static int rank_of(const moe_routing *r, size_t t, int e) {
    int i;
    for (i = 0; i < r->n_choices[t]; i++)
        if (r->choices[t * r->max_choices + (size_t)i] == e) return i;
    return -1;
}

/* The first token with a dropped choice or without a choice, else the first whose experts are not
   those of its largest logits, else 0. */
static unsigned long interesting(const moe_routing *r, const char **why) {
    int32_t best[EXPERTS];
    size_t t, i;
    *why = "the first one";
    if (r->plan.rows > 0) return 0; /* soft: there are no choices */
    for (t = 0, *why = "it lost a choice"; t < r->n_tokens; t++)
        for (i = 0; i < (size_t)r->n_choices[t]; i++)
            if (!r->kept[t * r->max_choices + i]) return (unsigned long)t;
    for (t = 0, *why = "no expert takes it"; t < r->n_tokens; t++)
        if (r->n_choices[t] == 0) return (unsigned long)t;
    for (t = 0, *why = "its experts are not the best by z"; t < r->n_tokens; t++)
        for (i = moe_top_k(EXPERTS, clean + t * EXPERTS, (size_t)r->n_choices[t], best); i > 0; i--)
            if (rank_of(r, t, best[i - 1]) < 0) return (unsigned long)t;
    *why = "the first one";
    return 0;
}

typedef char cell[24]; /* right-aligned, the last character is a space or a star */

static void print_cells(const char *symbol, const char *stage, cell *cells, const char *why) {
    int e;
    printf("%-4s%-8s", symbol, stage);
    for (e = 0; e < EXPERTS; e++) {
        /* no space at the end of a line */
        int n = (int)strlen(cells[e]), blank = *why == '\0' && e == EXPERTS - 1 && cells[e][n - 1] == ' ';
        printf(" %*.*s", 7 - blank, n - blank, cells[e]);
    }
    if (*why != '\0') printf(" ");
    wrap(why, WHY, WHY);
}

static void print_numbers(const char *symbol, const char *stage, const moe_real *v, const char *why) {
    cell cells[EXPERTS];
    int e;
    for (e = 0; e < EXPERTS; e++)
        snprintf(cells[e], sizeof cells[e], "%.3f ", (double)v[e] > -5e-4 && v[e] < 0 ? 0 : (double)v[e]);
    print_cells(symbol, stage, cells, why);
}

/* Prints the choices of token t: 'S' their order, 'w' their weights, * if dropped, 'C' the weights
   after capacity and scale. */
static void print_choices(const moe_routing *r, size_t t, int what, const char *symbol, const char *stage,
                          const char *why) {
    cell cells[EXPERTS];
    int e;
    for (e = 0; e < EXPERTS; e++) {
        int rank = rank_of(r, t, e);
        size_t at = t * r->max_choices + (size_t)(rank > 0 ? rank : 0);
        double w = (double)(what == 'w' ? r->choice_weights[at] : r->weights[t * EXPERTS + (size_t)e]);
        if (rank < 0) sprintf(cells[e], ". ");
        else if (what == 'S') sprintf(cells[e], "%d ", rank + 1);
        else snprintf(cells[e], sizeof cells[e], "%.3f%s", w, r->kept[at] ? " " : "*");
    }
    print_cells(symbol, stage, cells, why);
}

/* The formulas of a stage. */
static const char *tell(const moe_layer_config *c, const char *stage) {
    static char text[LONG];
    const row *r;
    for (*text = '\0', r = row_of("", stage) + 1; *r->field != '\0'; r++) {
        if (!told(c, r)) continue;
        if (*text != '\0') strcat(text, "; ");
        else if (strncmp(stage, r->field, strlen(r->field)) == 0) sprintf(text, "%s: ", r->value);
        formula(text, c, r);
    }
    return text;
}

static void show_token(const moe_layer *layer, const moe_call *call, const moe_routing *r, size_t t) {
    const moe_layer_config *c = &layer->config;
    const moe_real *z = r->logits + t * EXPERTS, *p = r->probabilities + t * EXPERTS;
    const moe_real *before = clean + t * EXPERTS;
    const moe_real *bias = layer->tensors[MOE_ROUTER_SELECTION_BIAS];
    moe_real noise[EXPERTS], biased[EXPERTS];
    int e, soft = c->router.select == MOE_SELECT_SOFT;
    for (e = 0; e < EXPERTS; e++) {
        noise[e] = z[e] - before[e];
        biased[e] = p[e] + (bias != NULL ? bias[e] : 0);
    }
    if (c->router.input != MOE_INPUT_PLAIN) print_numbers("x", "", call->x + t * WIDTH, "the token");
    print_numbers("u", "input", r->u + t * WIDTH, tell(c, "input"));
    print_numbers(soft ? "L" : "z", "score", before, tell(c, "score"));
    if (*tell(c, "noise") != '\0') {
        print_numbers("", "noise", noise, tell(c, "noise"));
        print_numbers("z", "", z, "with noise");
    }
    print_numbers(soft ? "D" : "r", "gate", r->gate + t * EXPERTS, tell(c, "gate"));
    if (*tell(c, "refine") != '\0') print_numbers("p", "refine", p, tell(c, "refine"));
    if (bias != NULL) print_numbers("p+b", "", biased, "what select compares");
    if (soft) print_numbers("C", "weight", p, tell(c, "weight"));
    else {
        print_choices(r, t, 'S', "S", "select", tell(c, "select"));
        print_choices(r, t, 'w', "w", "weight", tell(c, "weight"));
    }
    if (*tell(c, "capacity") != '\0') print_choices(r, t, 'C', "", "capacity", tell(c, "capacity"));
    print_numbers("y", "experts", y + t * WIDTH, tell(c, "experts"));
}

static void show_others(const moe_layer_config *c, const moe_routing *r, size_t token) {
    int soft = c->router.select == MOE_SELECT_SOFT;
    const char *why = soft ? "C of the other tokens" : "w of the other tokens, * dropped";
    char name[32];
    size_t t;
    for (t = 0; t < r->n_tokens; t++) {
        sprintf(name, "token %d", (int)t);
        if (t == token) continue;
        if (soft) print_numbers("", name, r->probabilities + t * EXPERTS, why);
        else print_choices(r, t, 'w', "", name, why);
        why = "";
    }
}

static void show_load(const moe_routing *r) {
    cell bars[EXPERTS];
    char note[100];
    size_t most = 4, e;
    for (e = 0; e < EXPERTS; e++) most = r->counts[e] > most ? r->counts[e] : most;
    for (e = 0; e < EXPERTS; e++)
        sprintf(bars[e], "%.*s %d ", (int)((4 * r->counts[e] + most - 1) / most), "####", (int)r->counts[e]);
    sprintf(note, "choices of each expert; %d dropped (*)", (int)r->n_dropped);
    if (r->capacity > 0) sprintf(note + strlen(note), ", C = %d", (int)r->capacity);
    print_cells("", "load", bars, note);
}

/* Prints the active losses: the fields of loss NAME begin with loss_NAME. */
static void show_losses(const moe_layer_config *c, const moe_routing *r) {
    const row *told_by;
    const char *name;
    char field[40], value[60];
    int loss;
    for (loss = 0; (name = moe_loss_name(loss)) != NULL; loss++) {
        sprintf(field, "loss_%.30s", name);
        sprintf(value, "%.30s %10.3g", name, (double)r->loss[loss]);
        for (told_by = row_of("", "losses") + 1; *told_by->field != '\0'; told_by++) {
            char text[LONG] = "";
            if (strncmp(told_by->field, field, strlen(field)) != 0 || !told(c, told_by)) continue;
            printf("    %-8s%31s  ", "loss", value);
            wrap(formula(text, c, told_by), WHY, WHY);
            *value = '\0';
        }
    }
}

static void show_all(const char *name, const moe_layer *layer, const moe_call *call, const moe_routing *r,
                     unsigned long token) {
    const char *why = "as requested";
    if (token == ANY) token = interesting(r, &why);
    printf("%s: ", name);
    wrap(moe_preset_find(name)->formula, strlen(name) + 2, 2);
    printf("Token %lu of 0 to %d", token, (int)r->n_tokens - 1);
    if (layer->config.router.table_size > 0) printf(", id %d", (int)call->token_ids[token]);
    printf(": %s. A training call; width %d, %d experts.\n", why, WIDTH, EXPERTS);
    printf("Tokens, tensors, state, attention, the previous layer, token ids and the teacher are made up.\n\n");
    printf("%18d%8d%8d%8d   feature (x, u, y) or expert (all others)\n", 0, 1, 2, 3);
    show_token(layer, call, r, token);
    printf("\n");
    show_others(&layer->config, r, token);
    if (layer->config.router.select != MOE_SELECT_SOFT) show_load(r);
    show_losses(&layer->config, r);
}

/* Gate, weights and load of all tokens as figures. */
static void report_routing(const moe_routing *r) {
    double *p = (double *)report_grab(r->n_tokens * EXPERTS, sizeof *p);
    double *w = (double *)report_grab(r->n_tokens * EXPERTS, sizeof *w), load[EXPERTS];
    moe_figure *f;
    size_t i;
    for (i = 0; i < r->n_tokens * EXPERTS; i++) {
        p[i] = (double)r->probabilities[i];
        w[i] = (double)r->weights[i];
    }
    f = report_add(MOE_FIGURE_HEAT, "Gate", r->n_tokens, EXPERTS);
    f->values = p;
    f->row_label = "token";
    f->column_label = "expert";
    f->value_label = "p";
    f->caption = "The gate's value for each expert, after refinement.";
    f = report_add(MOE_FIGURE_HEAT, "Weights", r->n_tokens, EXPERTS);
    f->values = w;
    f->row_label = "token";
    f->column_label = "expert";
    f->value_label = "w";
    f->caption = "Each expert's weight for each token, after capacity; 0: not chosen.";
    if (r->plan.rows > 0) return; /* soft: no choices */
    for (i = 0; i < EXPERTS; i++) load[i] = (double)r->counts[i];
    f = report_add(MOE_FIGURE_BARS, "Load", EXPERTS, 1);
    f->values = report_numbers(load, EXPERTS);
    f->value_label = "choices";
}

static int show(const char *name, const unsigned long *number) {
    moe_layer_config c;
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    moe_error error;
    moe_rng rng;
    moe_status status = configure(name, 1, &c, &error);
    size_t bytes = 0;
    void *work = NULL;
    if (status == MOE_OK) status = moe_layer_create(&layer, &c, 0, number[SEED], NULL, &error);
    if (status != MOE_OK) return complain(error.message);
    moe_rng_seed(&rng, ~(uint64_t)number[SEED]); /* another stream than that of the tensors */
    make_up(&call, number[N_TOKENS], &rng);
    enliven(&layer, &rng);
    status = moe_layer_work_size(&layer, call.n_tokens, 1, &bytes);
    if (status == MOE_OK && (work = malloc(bytes)) == NULL) status = MOE_ERR_MEMORY;
    if (status == MOE_OK) status = perform(&layer, &call, &rng, work, bytes, &pass);
    if (status == MOE_OK) show_all(name, &layer, &call, &pass.routing, number[TOKEN]);
    if (status == MOE_OK && report_path != NULL) report_routing(&pass.routing);
    free(work);
    moe_layer_free(&layer);
    return status == MOE_OK ? 0 : complain(moe_status_text(status));
}

/* ---- the command line ---- */

/* The edit distance of a and b, limit + 1 if larger; all letters of b after the end of a count as
   one edit. */
static int distance(const char *a, const char *b, int limit) {
    int least, other;
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    if (*a == '\0' || limit == 0) return *a != *b;
    least = distance(a + 1, b, limit - 1);
    if (*b != '\0' && (other = distance(a + 1, b + 1, limit - 1)) < least) least = other;
    if (*b != '\0' && (other = distance(a, b + 1, limit - 1)) < least) least = other;
    return least + 1;
}

static int suggest(const char *name) {
    const moe_preset *p;
    int least = strlen(name) < 6 ? (int)strlen(name) / 2 : 3, far;
    for (p = moe_presets(); p->name != NULL; p++)
        if ((far = distance(name, p->name, 3)) < least) least = far;
    fprintf(stderr, "routers: there is no preset %s;", name);
    for (p = moe_presets(); p->name != NULL; p++)
        if (distance(name, p->name, 3) == least) fprintf(stderr, " %s?", p->name);
    fprintf(stderr, " routers lists them all\n");
    return EXIT_USAGE;
}

/* Reads an integer; 0 if text is not one or too large. */
static int read_number(const char *text, unsigned long *value) {
    errno = 0;
    *value = strtoul(text, NULL, 10);
    return *text != '\0' && strspn(text, "0123456789") == strlen(text) && errno == 0 && *value < ANY;
}

/* The exit status; nonzero also if the output could not be written. */
static int finish(int status) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return status;
    complain("the output could not be written");
    return 1;
}

int main(int argc, char **argv) {
    static const char *const options[N_OPTIONS] = {"--token", "--tokens", "--seed"};
    unsigned long number[N_OPTIONS] = {ANY, 6, 1};
    const char *name = NULL, *wrong = check_rows();
    int i, option, csv = 0, shown = 0;
    if (wrong != NULL) return complain(wrong);
    for (i = 1; i < argc; i++) {
        for (option = 0; option < N_OPTIONS && strcmp(argv[i], options[option]) != 0;) option++;
        if (option < N_OPTIONS) {
            if (!read_number(++i < argc ? argv[i] : "", &number[option])) {
                fprintf(stderr, "routers: %s %s: not a value of this option; see -h\n", options[option],
                        i < argc ? argv[i] : "");
                return EXIT_USAGE;
            }
            shown = 1;
        } else if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) return finish(fputs(help, stdout) < 0);
        else if (strcmp(argv[i], "--show") == 0) shown = 1;
        else if (strcmp(argv[i], "--csv") == 0) csv = 1;
        else if (strcmp(argv[i], "--report") == 0 && i + 1 < argc && *argv[i + 1] != '\0') report_path = argv[++i];
        else if (argv[i][0] != '-' && name == NULL) name = argv[i];
        else {
            fprintf(stderr, "routers: %s: no such option, its value is missing, or a second name; see -h\n", argv[i]);
            return EXIT_USAGE;
        }
    }
    if (csv && (name != NULL || shown || report_path != NULL))
        return complain("--csv lists all presets, without a name, --show or --report; see -h");
    if (shown && name == NULL) return complain("which preset? routers lists them, routers NAME --show shows one");
    if (number[N_TOKENS] < 1 || number[N_TOKENS] > MAX_TOKENS) return complain("--tokens must be from 1 to 64");
    if (number[TOKEN] != ANY && number[TOKEN] >= number[N_TOKENS])
        return complain("--token counts from 0 and must be less than --tokens");
    if ((i = report_checked("routers")) != 0) return i;
    if (name == NULL && list(csv)) return 1;
    if (name == NULL) return finish(report_path != NULL && report_presets());
    if (moe_preset_find(name) == NULL) return suggest(name);
    name = moe_preset_find(name)->name;
    if (shown || report_path != NULL) return finish(show(name, number) || report_write_added("routers", name));
    return finish(explain(name));
}
