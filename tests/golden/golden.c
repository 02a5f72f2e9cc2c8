/* golden.c - runs golden cases: whole routed layers whose results a program that shares nothing
   with this library computed in float64 (tests/golden/README.md describes the files). Each case is
   read with the library's own reader, set up through the library's own table of fields, run forward
   and backward with every kernel table of the machine, and every wanted tensor is compared.

     cc -std=c99 -O2 -I. tests/golden/golden.c -o golden -lm
     cc -std=c99 -O2 -I. -DMOE_REAL=double tests/golden/golden.c -o golden64 -lm
     ./golden tests/golden

   The bound on errors is 5e-5 in float (the first line), 1e-9 in double.

   Error of a tensor: max |got - want| / (1e-6 + max |want|). A case is skipped only when it names a
   stage, a loss, a value or an input tensor that the library does not have yet. Beside the
   comparison, for each case and table: inference gives the same y bit for bit as training; tokens
   of a causal router give it one by one, and decoding gives it where the router allows that; packed
   weights give what their values give, bit for bit but for quantized types; NaN in padding reaches
   nothing that is real. Files that end in .json are worked examples of the rules of state
   (state.h), with bounds of their own. Exit status: 0 all that ran passed, 1 one failed or none
   ran, 2 usage or an unreadable path. */

#if defined(__unix__) || defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#define GOLDEN_FOLDERS
#include <dirent.h>
#endif

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../../moe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MOE_REAL_IS_DOUBLE
#define BOUND 1e-9
#else
#define BOUND 5e-5
#endif
/* Of quantized weights: where a small layer's outputs cancel, 8 bits of an activation are few. */
#define QUANTIZED 0.5

enum { NAME_ROOM = 128, VALUE_ROOM = 64, TEXT_ROOM = 256, MAX_PATHS = 100000 };

/* ---- how files speak of the configuration ---- */

/* One key of a case's metadata. It takes part when the key `stage` has one of the words of `values`
   (values NULL: when it is there at all), or, with the stages BY_FACTOR and DROPS, when the case
   has a capacity by formula or any. A value equal to `harmless` asks for nothing, so the library
   need not know the field. */
#define BY_FACTOR "by factor"
#define DROPS "drops"

typedef struct rule {
    const char *key, *field, *stage, *values, *harmless;
} rule;

static const rule rules[] = {{"ac_lambda", "ac_lambda", NULL, NULL, NULL},
                             {"cosine_tau", "cosine_tau", NULL, NULL, NULL},
                             {"attention_u", "attention_u", NULL, NULL, NULL},
                             {"affinity_sum", "affinity_sum", NULL, NULL, NULL},
                             {"threshold_fallback", "threshold_fallback", NULL, NULL, NULL},
                             {"threshold_sigmoid", "threshold_sigmoid", NULL, NULL, NULL},
                             {"add_input", "add_input", NULL, NULL, NULL},
                             {"bias_rate", "bias_rate", NULL, NULL, NULL},
                             {"ac_rho", "ac_rho", NULL, NULL, NULL},
                             {"distill", "distill", NULL, NULL, NULL},
                             {"capacity_bound", "capacity_bound", NULL, NULL, NULL},
                             {"noise_sigma", "noise_sigma", NULL, NULL, NULL},
                             {"balance_scope", "balance_scope", NULL, NULL, NULL},
                             {"drop_factor", "capacity_factor", NULL, NULL, NULL},
                             {"drop_factor", "capacity_factor_eval", NULL, NULL, NULL},
                             {"drop_factor_eval", "capacity_factor_eval", NULL, NULL, NULL},
                             {"drop_min", "capacity_min", NULL, NULL, NULL},
                             {"d_model", "d_model", NULL, NULL, NULL},
                             {"n_zero", "n_zero", NULL, NULL, "0"},
                             {"n_copy", "n_copy", NULL, NULL, "0"},
                             {"n_constant", "n_constant", NULL, NULL, "0"},
                             {"weight_over", "weight_over", NULL, NULL, "all"},
                             {"zero_tau", "zero_tau", "loss.balance", NULL, "1"},
                             {"zero_tau", "zero_tau", BY_FACTOR, NULL, "1"},
                             {"zero_average", "zero_average", "loss.balance", NULL, "0"},
                             {"router_residual", "router_residual", NULL, NULL, "0"},
                             {"n_experts", "n_experts", NULL, NULL, NULL},
                             {"top_k", "top_k", NULL, NULL, NULL},
                             {"input", "input", NULL, NULL, "plain"},
                             {"ac_mode", "ac_mode", "input", "adaptive_clustering", NULL},
                             {"ac_spread", "ac_spread", "input", "adaptive_clustering", NULL},
                             {"ac_mix", "ac_mix", "input", "adaptive_clustering", NULL},
                             {"score", "score", NULL, NULL, NULL},
                             {"router_bias", "router_bias", "score", "linear random", "0"},
                             {"cosine_dim", "cosine_dim", "score", "cosine", "0"},
                             {"cosine_keep_length", "cosine_keep_length", "score", "cosine", "0"},
                             {"grap_cosine", "grap_cosine", "score", "grap", "0"},
                             {"norm_node", "norm_node", "score", "norm", NULL},
                             {"norm_order", "norm_order", "score", "norm", NULL},
                             {"router_hidden", "router_hidden", "score", "mlp attentive", NULL},
                             {"router_act", "router_act", "score", "mlp attentive", NULL},
                             {"noise", "noise", NULL, NULL, "none"},
                             {"heads", "heads", "refine", "attention", NULL},
                             {"noise_floor", "noise_floor", "noise", "noisy_topk", NULL},
                             {"gate", "gate", NULL, NULL, NULL},
                             {"gate_temperature", "gate_temperature", NULL, NULL, NULL},
                             {"refine", "refine", NULL, NULL, "none"},
                             {"similarity_tau", "similarity_tau", "refine", "similarity", NULL},
                             {"similarity_scale", "similarity_scale", "refine", "similarity", "none"},
                             {"similarity_learned", "similarity_learned", "refine", "similarity", "0"},
                             {"lower_entropy_only", "lower_entropy_only", "refine", "similarity attention", "0"},
                             {"causal", "causal", "refine", "similarity attention", "0"},
                             {"attention_heads", "attention_heads", "refine", "attention", NULL},
                             {"attention_head", "attention_head", "refine", "attention", NULL},
                             {"attention_sigma", "attention_sigma", "refine", "attention", NULL},
                             {"select", "select", NULL, NULL, NULL},
                             {"groups", "groups", "select", "grouped_top_k grouped_each", NULL},
                             {"groups_kept", "groups_kept", "select", "grouped_top_k", NULL},
                             {"group_score", "group_score", "select", "grouped_top_k", NULL},
                             {"top_p", "top_p", "select", "top_p", NULL},
                             {"threshold", "threshold", "select", "threshold", NULL},
                             {"threshold_learned", "threshold_learned", "select", "threshold", "0"},
                             {"capacity_factor", "capacity_factor", NULL, NULL, NULL},
                             {"expert_choice_score", "expert_choice_score", "select", "expert_choice", NULL},
                             {"affinity_mass", "affinity_mass", "select", "affinity", NULL},
                             {"capacity_min", "capacity_min", NULL, NULL, NULL},
                             {"capacity", "capacity", "select", "affinity", NULL},
                             {"slots", "slots", "select", "soft", NULL},
                             {"soft_normalise", "soft_normalise", "select", "soft", "0"},
                             {"weight", "weight", NULL, NULL, NULL},
                             {"weight_p", "weight_p", "weight", "p_norm", NULL},
                             {"sparsemixer_eps", "sparsemixer_eps", "weight", "sparsemixer", NULL},
                             {"sparsemixer_sample", "sparsemixer_sample", NULL, NULL, NULL},
                             {"logit_cap", "logit_cap", NULL, NULL, NULL},
                             {"threshold_rho", "threshold_rho", NULL, NULL, NULL},
                             {"scale", "scale", NULL, NULL, NULL},
                             {"apply_to", "apply_to", NULL, NULL, NULL},
                             {"drop_capacity", "drop_capacity", NULL, NULL, NULL},
                             {"drop_order", "drop_order", DROPS, NULL, NULL},
                             {"renormalize", "renormalize", DROPS, NULL, NULL},
                             {"expert", "expert", NULL, NULL, NULL},
                             {"d_ff", "d_ff", "expert", "swiglu mlp factorised glu", NULL},
                             {"d_low", "d_low", "expert", "factorised", NULL},
                             {"d_latent", "d_latent", NULL, NULL, NULL},
                             {"act", "act", "expert", "mlp glu", NULL},
                             {"shared", "d_shared", NULL, NULL, NULL},
                             {"shared_sigmoid", "shared_sigmoid", "shared", NULL, "0"},
                             {"loss.balance", "loss_balance", NULL, NULL, "0"},
                             {"loss.z", "loss_z", NULL, NULL, "0"},
                             {"loss.importance", "loss_importance", NULL, NULL, "0"},
                             {"loss.load", "loss_load", NULL, NULL, "0"},
                             {"loss.entropy", "loss_entropy", NULL, NULL, "0"},
                             {"loss.usage_entropy", "loss_usage_entropy", NULL, NULL, "0"},
                             {"loss.similarity_same", "loss_similarity_same", NULL, NULL, "0"},
                             {"loss.similarity_diff", "loss_similarity_diff", NULL, NULL, "0"},
                             {"loss.locality", "loss_locality", NULL, NULL, "0"},
                             {"loss.l1", "loss_l1", NULL, NULL, "0"},
                             {"loss.orthogonal", "loss_orthogonal", NULL, NULL, "0"},
                             {"loss.distill", "loss_distill", NULL, NULL, "0"},
                             {"loss.stable_balance", "loss_stable_balance", NULL, NULL, "0"},
                             {"loss.selector_entropy", "loss_selector_entropy", NULL, NULL, "0"},
                             {"loss.selector_reach", "loss_selector_reach", NULL, NULL, "0"},
                             {"loss.predictor", "loss_predictor", NULL, NULL, "0"},
                             {"expert_choice_scope", "expert_choice_scope", "select", "expert_choice", "batch"},
                             {"switch_from", "switch_from", NULL, NULL, NULL},
                             {"switch_at", "switch_at", NULL, NULL, NULL},
                             {"compete_rate", "compete_rate", NULL, NULL, NULL},
                             {"compete", "compete", NULL, NULL, NULL},
                             {"compete_from", "compete_from", NULL, NULL, NULL},
                             {"balance_over", "balance_over", "loss.balance", NULL, NULL},
                             {"importance_over", "importance_over", "loss.importance", NULL, NULL},
                             {"unbiased", "unbiased", NULL, NULL, "0"},
                             {"nodes", "nodes", "loss.locality", NULL, NULL}};

/* What a stage is when a file does not name it. */
static const char *const stage_defaults[][2] = {{"input", "plain"},  {"score", "linear"}, {"noise", "none"},
                                                {"gate", "softmax"}, {"refine", "none"},  {"select", "top_k"},
                                                {"weight", "sum"},   {"expert", "swiglu"}};

/* Optional tensors that switch a field on by being there. */
static const char *const tensor_switches[][2] = {{"router.bias", "router_bias"},
                                                 {"router.temperature", "cosine_learn_tau"},
                                                 {"router.selection_bias", "selection_bias"},
                                                 {"router.expert_scale", "expert_scale"},
                                                 {"router.predictor", "predictor"},
                                                 {"shared.sigmoid", "shared_sigmoid"}};

static const char *const inputs[] = {"x",
                                     "dy",
                                     "router_x",
                                     "seq",
                                     "mask",
                                     "given",
                                     "jitter",
                                     "token_ids",
                                     "home",
                                     "expert_node",
                                     "noise",
                                     "previous.input",
                                     "previous.experts",
                                     "previous.weights",
                                     "attention.weights",
                                     "attention.outputs", "attention.output", "distances", "teacher",
                                     "previous.logits", "gumbel", "uniform", "dropped"};

/* The parameters that the library has: one of these that a case holds but the layer lacks is an
   error, any other is not built yet. */
static const char *const parameters[] = {
    "router.weight",      "router.bias",       "router.projection",   "router.temperature",    "router.fc1.weight",
    "router.fc1.bias",    "router.fc2.weight", "router.fc2.bias",     "router.selection_bias", "router.expert_scale",
    "router.input_scale", "router.query",      "router.key",          "router.threshold",      "router.table",
    "router.slots",       "router.scale",      "router.noise_weight", "router.similarity",     "router.ac_running",
    "router.load",        "router.residual",   "router.codes",        "router.mix",            "router.cutoff",
    "router.cutoff_updates", "experts.constant", "experts.constant_gate",
    "experts.gate",       "experts.up",        "experts.down",        "experts.fc1.weight",    "experts.fc1.bias",
    "experts.fc2.weight", "experts.fc2.bias",  "experts.weight",      "experts.bias",          "experts.reduce",
    "experts.expand",     "shared.gate",       "shared.up",           "shared.down",           "shared.sigmoid",
    "latent.in",          "latent.out",        "router.predictor",    "router.step"};

/* ---- a case ---- */

typedef struct block {
    struct block *next;
    double align;
} block;

typedef enum { PASSED, FAILED, SKIPPED } verdict;

typedef struct golden {
    block *blocks; /* all memory of the case */
    moe_buffer bytes;
    moe_file file;
    moe_layer_config config;
    moe_call call; /* training = 1, over the whole batch */
    const moe_real *dy;
    const char *kernels; /* the table in use */
    double worst;
    char worst_name[NAME_ROOM + 16];
    char text[TEXT_ROOM]; /* why it failed or was skipped */
    verdict outcome;
} golden;

/* One run of a layer, forward and perhaps backward. */
typedef struct run {
    moe_layer_pass pass;
    moe_real *y, *dx, *d_router_x;
} run;

static int verbose;

static int is_one_of(const char *word, const char *list) {
    size_t n = strlen(word);
    while (*list != '\0') {
        size_t length = strcspn(list, " ");
        if (length == n && strncmp(list, word, n) == 0) return 1;
        list += length;
        list += *list == ' ';
    }
    return 0;
}

static int is_in(const char *word, const char *const *list, size_t n) {
    size_t i;
    for (i = 0; i < n; i++)
        if (strcmp(word, list[i]) == 0) return 1;
    return 0;
}

static int starts_with(const char *s, const char *prefix) { return strncmp(s, prefix, strlen(prefix)) == 0; }

/* Memory that lives as long as the case, all zero; exactly count * size bytes, so that tools see a
   step beyond. */
static void *grab(golden *g, size_t count, size_t size) {
    block *b = (block *)malloc(sizeof *b + (count > 0 ? count : 1) * size);
    if (b == NULL) {
        fprintf(stderr, "golden: out of memory\n");
        exit(2);
    }
    b->next = g->blocks;
    g->blocks = b;
    memset(b + 1, 0, (count > 0 ? count : 1) * size);
    return b + 1;
}

static moe_real *grab_reals(golden *g, size_t count) { return (moe_real *)grab(g, count, sizeof(moe_real)); }

static void end_case(golden *g) {
    while (g->blocks != NULL) {
        block *next = g->blocks->next;
        free(g->blocks);
        g->blocks = next;
    }
    moe_buffer_free(&g->bytes);
}

/* The first reason stays. Returns 0, so that a check reads: return stop(...). */
static int stop(golden *g, verdict v, const char *what, const char *more) {
    if (g->outcome != PASSED) return 0;
    g->outcome = v;
    sprintf(g->text, "%.110s%s%.110s", what, *more != '\0' ? ": " : "", more);
    return 0;
}

static int fail(golden *g, const char *what, const char *more) { return stop(g, FAILED, what, more); }

/* ---- reading ---- */

static int metadata(const golden *g, const char *key, char *value) {
    return moe_file_metadata(&g->file, key, value, VALUE_ROOM, NULL) == MOE_OK;
}

static int has_tensor(const golden *g, const char *name) {
    moe_file_tensor t;
    return moe_file_find(&g->file, name, &t) == MOE_OK;
}

/* Reads n_dims dimensions of shape rows x columns; a failure of the case when the tensor is not
   there in that shape. */
static moe_real *read_reals(golden *g, const char *name, size_t count) {
    moe_file_tensor t;
    moe_real *values;
    if (moe_file_find(&g->file, name, &t) != MOE_OK) {
        fail(g, "tensor not in the file", name);
        return (moe_real *)NULL;
    }
    if (t.count != count) {
        fail(g, "tensor has the wrong size", name);
        return (moe_real *)NULL;
    }
    values = grab_reals(g, count);
    if (moe_file_values(&t, 0, count, values, NULL) != MOE_OK) {
        fail(g, "tensor cannot be read as numbers", name);
        return (moe_real *)NULL;
    }
    return values;
}

static int64_t *read_integers(golden *g, const char *name, size_t *count) {
    moe_file_tensor t;
    int64_t *values;
    if (moe_file_find(&g->file, name, &t) != MOE_OK) return NULL;
    if (*count != 0 && t.count != *count) {
        fail(g, "tensor has the wrong size", name);
        return (int64_t *)NULL;
    }
    *count = t.count;
    values = (int64_t *)grab(g, t.count, sizeof *values);
    if (moe_file_values(&t, 0, t.count, NULL, values) != MOE_OK) {
        fail(g, "tensor cannot be read as integers", name);
        return (int64_t *)NULL;
    }
    return values;
}

static int32_t *narrow(golden *g, const int64_t *from, size_t n) {
    int32_t *to = (int32_t *)grab(g, n, sizeof *to);
    size_t i;
    for (i = 0; i < n; i++) to[i] = (int32_t)from[i];
    return to;
}

static const char *default_of(const char *stage) {
    size_t i;
    for (i = 0; i < sizeof stage_defaults / sizeof stage_defaults[0]; i++)
        if (strcmp(stage_defaults[i][0], stage) == 0) return stage_defaults[i][1];
    return NULL;
}

/* Whether a capacity follows from a factor, or there is any. */
static int has_capacity(const golden *g, int by_factor) {
    char value[VALUE_ROOM];
    if (metadata(g, "drop_capacity", value) && strtod(value, NULL) > 0) return !by_factor;
    if (metadata(g, "drop_factor", value)) return 1;
    return metadata(g, "capacity_factor", value) &&
           !(metadata(g, "select", value) && is_one_of(value, "expert_choice expert_threshold"));
}

static int takes_part(const golden *g, const rule *r) {
    char value[VALUE_ROOM];
    const char *now = value;
    if (r->stage == NULL) return 1;
    if (strcmp(r->stage, BY_FACTOR) == 0 || strcmp(r->stage, DROPS) == 0)
        return has_capacity(g, strcmp(r->stage, BY_FACTOR) == 0);
    if (!metadata(g, r->stage, value)) now = default_of(r->stage);
    if (now != NULL && (r->values == NULL || is_one_of(now, r->values))) return 1;
    return strcmp(r->stage, "select") == 0 && metadata(g, "switch_from", value) && is_one_of(value, r->values);
}

static int is_harmless(const rule *r, const char *value) {
    char *end;
    if (r->harmless == NULL) return 0;
    if (strcmp(value, r->harmless) == 0) return 1;
    return strcmp(r->harmless, "0") == 0 && !(strtod(value, &end) > 0.0) && !(strtod(value, &end) < 0.0) &&
           end != value && *end == '\0';
}

static int set_field(golden *g, const char *field, const char *value) {
    moe_error error;
    moe_status status = moe_field_set(moe_layer_fields(), &g->config, field, value, &error);
    const moe_field *row = moe_field_find(moe_layer_fields(), field);
    char text[NAME_ROOM + VALUE_ROOM];
    if (status == MOE_OK) return 1;
    sprintf(text, "%.60s = %.60s", field, value);
    if (status == MOE_ERR_NOT_FOUND || (row != NULL && row->kind == MOE_FIELD_CHOICE))
        return stop(g, SKIPPED, "not built yet", text);
    return fail(g, "configuration", error.message);
}

/* Whether a selection may be in use, at this step or another. */
static int may_select(const moe_router_config *c, int select) {
    return c->select == select || (c->switch_at > 0 && c->switch_from == select);
}

static int read_config(golden *g) {
    char value[VALUE_ROOM];
    moe_file_tensor table;
    size_t i;
    for (i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const rule *r = &rules[i];
        if (!metadata(g, r->key, value) || !takes_part(g, r)) continue;
        if (is_harmless(r, value) && moe_field_find(moe_layer_fields(), r->field) == NULL) continue;
        if (!set_field(g, r->field, value)) return 0;
    }
    for (i = 0; i < sizeof tensor_switches / sizeof tensor_switches[0]; i++)
        if (has_tensor(g, tensor_switches[i][0]) && !set_field(g, tensor_switches[i][1], "1")) return 0;
    if (metadata(g, "shared", value)) g->config.n_shared = 1;
    if (may_select(&g->config.router, MOE_SELECT_HASH) && moe_file_find(&g->file, "router.table", &table) == MOE_OK &&
        table.n_dims == 2)
        g->config.router.table_size = (int)table.shape[0];
    if ((g->config.expert == MOE_EXPERT_MLP && !has_tensor(g, "experts.fc1.bias")) ||
        (g->config.expert == MOE_EXPERT_LINEAR && !has_tensor(g, "experts.bias")))
        g->config.no_expert_bias = 1;
    g->config.router.untrained = 1;
    g->config.router.preset = MOEI_OF_A_FILE; /* keys of stages that take no part mean nothing */
    return 1;
}

/* Fields that a case names, but that are switched on otherwise: by a tensor, or not at all
   (expert_bias tells of mlp experts). */
static int is_switched(const char *field) {
    size_t i;
    for (i = 0; i < sizeof tensor_switches / sizeof tensor_switches[0]; i++)
        if (strcmp(tensor_switches[i][1], field) == 0) return 1;
    return strcmp(field, "expert_bias") == 0;
}

/* Fails when a key is a field of the library that no rule applies. Keys that tell how the case was
   drawn are no fields. */
static int check_keys(golden *g) {
    const moe_field *field;
    char key[NAME_ROOM], value[VALUE_ROOM];
    size_t i;
    for (field = moe_layer_fields(); field->name != NULL; field++) {
        sprintf(key, "%.100s", field->name);
        if (starts_with(key, "loss_")) key[4] = '.';
        if (!metadata(g, key, value) || is_switched(field->name)) continue;
        for (i = 0; i < sizeof rules / sizeof rules[0] && strcmp(rules[i].key, key) != 0;) i++;
        if (i == sizeof rules / sizeof rules[0]) return fail(g, "the runner does not apply the key", key);
    }
    return 1;
}

/* Inputs and parameters of stages that are not built. */
static int check_names(golden *g) {
    moe_file_tensor t;
    char name[NAME_ROOM];
    g->file.at = 0;
    while (moe_file_next(&g->file, &t) == MOE_OK) {
        if (t.name_length >= sizeof name) return fail(g, "a tensor's name is too long", "");
        memcpy(name, t.name, t.name_length);
        name[t.name_length] = '\0';
        if (starts_with(name, "want.") || is_in(name, inputs, sizeof inputs / sizeof inputs[0])) continue;
        if (!is_in(name, parameters, sizeof parameters / sizeof parameters[0]))
            return stop(g, SKIPPED, "not built yet", name);
    }
    return 1;
}

static void read_integer_inputs(golden *g, size_t n) {
    size_t count;
    int64_t *integers;
    count = n;
    if ((integers = read_integers(g, "token_ids", &count)) != NULL) g->call.token_ids = narrow(g, integers, count);
    count = n;
    if ((integers = read_integers(g, "home", &count)) != NULL) g->call.token_machine = narrow(g, integers, count);
    count = (size_t)g->config.router.n_experts;
    if ((integers = read_integers(g, "expert_node", &count)) != NULL)
        g->call.expert_machine = narrow(g, integers, count);
    count = n * (size_t)g->config.router.top_k;
    if ((integers = read_integers(g, "given", &count)) != NULL) g->call.given = narrow(g, integers, count);
}

/* dropped [N,E] or [E]; the probability is not used. */
static void read_dropped(golden *g, size_t cells) {
    moe_router_config *c = &g->config.router;
    moe_file_tensor t;
    unsigned char *dropped;
    int64_t *values;
    size_t count = cells, i;
    if (moe_file_find(&g->file, "dropped", &t) != MOE_OK) return;
    c->expert_dropout_scope = t.n_dims == 1 ? MOE_DROPOUT_SCOPE_CALL : MOE_DROPOUT_SCOPE_TOKEN;
    if (t.n_dims == 1) count = (size_t)c->n_experts;
    c->expert_dropout = (moe_real)0.5;
    values = read_integers(g, "dropped", &count);
    dropped = (unsigned char *)grab(g, count, 1);
    for (i = 0; i < count && values != NULL; i++) dropped[i] = values[i] != 0;
    g->call.dropped = dropped;
}

static void read_optional_inputs(golden *g, size_t n) {
    const size_t cells = n * (size_t)g->config.router.n_experts, k = (size_t)g->config.router.top_k;
    if (has_tensor(g, "previous.logits")) {
        g->call.previous_logits = read_reals(g, "previous.logits", cells);
        g->call.d_previous_logits = grab_reals(g, cells);
    }
    if (has_tensor(g, "gumbel")) g->call.gumbel = read_reals(g, "gumbel", cells * k);
    if (has_tensor(g, "uniform")) g->call.uniform = read_reals(g, "uniform", n * k);
    read_dropped(g, cells);
}

static int read_inputs(golden *g) {
    char value[VALUE_ROOM];
    size_t n, d = (size_t)g->config.router.d_model, count, i;
    int64_t *integers;
    if (!metadata(g, "n_tokens", value)) return fail(g, "key not in the metadata", "n_tokens");
    g->call.n_tokens = n = (size_t)strtoul(value, NULL, 10);
    if (n > 1u << 24) return fail(g, "too many tokens", value);
    if (!has_tensor(g, "want.y")) return fail(g, "nothing to compare, there is no", "want.y");
    g->call.training = !metadata(g, "evaluation", value);
    g->call.x = read_reals(g, "x", n * d);
    g->dy = read_reals(g, "dy", n * d);
    if (has_tensor(g, "router_x")) g->call.router_x = read_reals(g, "router_x", n * d);
    count = n;
    if ((integers = read_integers(g, "mask", &count)) != NULL) {
        unsigned char *mask = (unsigned char *)grab(g, n, 1);
        for (i = 0; i < n; i++) mask[i] = integers[i] != 0;
        g->call.mask = mask;
    }
    count = 0;
    if ((integers = read_integers(g, "seq", &count)) != NULL && count > 1) {
        g->call.sequences = narrow(g, integers, count);
        g->call.n_sequences = count - 1;
    }
    if (g->config.router.noise != MOE_NOISE_NONE)
        g->call.noise = read_reals(g, "noise", n * (size_t)g->config.router.n_experts);
    if (g->config.router.input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        count = 0;
        integers = read_integers(g, "previous.experts", &count);
        if (integers == NULL || n == 0 || count % n != 0)
            return fail(g, "tensor has the wrong size", "previous.experts");
        g->call.n_previous = count / n;
        g->call.previous_experts = narrow(g, integers, count);
        g->call.previous_input = read_reals(g, "previous.input", n * d);
        g->call.previous_weights = read_reals(g, "previous.weights", count);
    }
    if (g->config.router.refine == MOE_REFINE_ATTENTION) {
        size_t heads = (size_t)g->config.router.heads;
        g->call.attention_weights = read_reals(g, "attention.weights", heads * n * n);
        g->call.attention_outputs = read_reals(g, "attention.outputs", heads * n * d);
        g->call.d_attention_weights = grab_reals(g, heads * n * n);
        g->call.d_attention_outputs = grab_reals(g, heads * n * d);
        if (has_tensor(g, "attention.output")) {
            g->call.attention_output = read_reals(g, "attention.output", n * d);
            g->call.d_attention_output = grab_reals(g, n * d);
        }
    }
    if (g->config.router.select == MOE_SELECT_SOFT)
        g->config.router.soft_sequences = g->call.sequences != NULL ? (int)g->call.n_sequences : 1;
    read_optional_inputs(g, n);
    if (has_tensor(g, "distances")) g->call.distances = read_reals(g, "distances", n * n);
    if (has_tensor(g, "teacher"))
        g->call.teacher = read_reals(g, "teacher", n * (size_t)g->config.router.n_experts);
    if (has_tensor(g, "jitter")) g->call.jitter = read_reals(g, "jitter", n * d);
    read_integer_inputs(g, n);
    return g->outcome == PASSED;
}

/* ---- comparing ---- */

/* Compares rows of width numbers; rows of padding only when padded. */
static void compare(golden *g, const char *name, const moe_real *got, size_t rows, size_t width, int padded) {
    const moe_real *want = read_reals(g, name, rows * width);
    double largest = 0.0, difference = 0.0, error;
    size_t t, i;
    if (want == NULL) return;
    for (t = 0; t < rows; t++) {
        if (!padded && g->call.mask != NULL && !g->call.mask[t]) continue;
        for (i = t * width; i < (t + 1) * width; i++) {
            double size = fabs((double)want[i]), distance = fabs((double)got[i] - (double)want[i]);
            if (size > largest) largest = size;
            if (!moe_is_finite(got[i]) || !moe_is_finite(want[i])) difference = HUGE_VAL;
            else if (distance > difference) difference = distance;
        }
    }
    error = difference / (1e-6 + largest);
    if (verbose) printf("    %-7s %-36s %.1e\n", g->kernels, name, error);
    if (!(error > g->worst) && g->worst_name[0] != '\0') return;
    g->worst = error;
    sprintf(g->worst_name, "%.120s (%.8s)", name + 5, g->kernels);
    if (!(error <= BOUND)) fail(g, "beyond the bound", "");
}

static void compare_selected(golden *g, const moe_routing *r) {
    size_t count = r->n_tokens * r->n_experts, i;
    int64_t *want = read_integers(g, "want.selected", &count);
    char text[NAME_ROOM];
    if (want == NULL) return;
    for (i = 0; i < count; i++) {
        if ((want[i] != 0) == (r->selected[i] != 0)) continue;
        sprintf(text, "token %lu, expert %lu, kernels %s", (unsigned long)(i / r->n_experts),
                (unsigned long)(i % r->n_experts), g->kernels);
        fail(g, "another selection", text);
        return;
    }
}

static void compare_loss(golden *g, const char *name, const moe_routing *r) {
    int loss;
    for (loss = 0; moe_loss_name(loss) != NULL; loss++)
        if (strcmp(moe_loss_name(loss), name + strlen("want.loss.")) == 0) {
            compare(g, name, &r->loss[loss], 1, 1, 1);
            return;
        }
    fail(g, "the library has no such loss", name);
}

static void compare_gradient(golden *g, const char *name, const moe_layer *layer, const run *r) {
    const char *tensor = name + strlen("want.grad.");
    size_t n = g->call.n_tokens, d = (size_t)g->config.router.d_model;
    moe_tensor t;
    if (strcmp(tensor, "x") == 0) compare(g, name, r->dx, n, d, 1);
    else if (strcmp(tensor, "router_x") == 0 && r->d_router_x != NULL) compare(g, name, r->d_router_x, n, d, 1);
    else if (strcmp(tensor, "attention.weights") == 0)
        compare(g, name, g->call.d_attention_weights, 1, (size_t)g->config.router.heads * n * n, 1);
    else if (strcmp(tensor, "attention.output") == 0) compare(g, name, g->call.d_attention_output, n, d, 1);
    else if (strcmp(tensor, "attention.outputs") == 0)
        compare(g, name, g->call.d_attention_outputs, 1, (size_t)g->config.router.heads * n * d, 1);
    else if (strcmp(tensor, "previous.logits") == 0)
        compare(g, name, g->call.d_previous_logits, n, (size_t)g->config.router.n_experts, 1);
    else if (moe_layer_find(layer, tensor, &t) == MOE_OK && t.gradient != NULL)
        compare(g, name, t.gradient, 1, t.count, 1);
    else fail(g, "the layer has no such gradient", name);
}

static void compare_all(golden *g, const moe_layer *layer, const run *r) {
    const moe_routing *routing = &r->pass.routing;
    /* slots is 1 but for soft */
    size_t n = g->call.n_tokens, e = routing->n_experts * (size_t)layer->config.router.slots;
    moe_file_tensor t;
    char name[NAME_ROOM];
    g->file.at = 0;
    while (moe_file_next(&g->file, &t) == MOE_OK) {
        memcpy(name, t.name, t.name_length); /* check_names has seen that it fits */
        name[t.name_length] = '\0';
        if (!starts_with(name, "want.")) continue;
        if (strcmp(name, "want.logits") == 0) compare(g, name, routing->logits, n, e, 0);
        else if (strcmp(name, "want.gate") == 0) compare(g, name, routing->gate, n, e, 0);
        else if (strcmp(name, "want.probabilities") == 0) compare(g, name, routing->probabilities, n, e, 0);
        else if (strcmp(name, "want.selected") == 0) compare_selected(g, routing);
        else if (strcmp(name, "want.weights") == 0) compare(g, name, routing->weights, n, e, 1);
        else if (strcmp(name, "want.y") == 0) compare(g, name, r->y, n, (size_t)layer->config.d_out, 1);
        else if (!g->call.training || starts_with(name, "want.after.")) continue;
        else if (starts_with(name, "want.loss.")) compare_loss(g, name, routing);
        else if (starts_with(name, "want.grad.")) compare_gradient(g, name, layer, r);
        else fail(g, "unknown wanted tensor", name);
    }
}

/* ---- running ---- */

static int fail_status(golden *g, const char *what, moe_status status) {
    char text[TEXT_ROOM];
    sprintf(text, "%.100s (kernels %.8s)", moe_status_text(status), g->kernels);
    return fail(g, what, text);
}

static int forward(golden *g, const moe_layer *layer, const moe_call *call, run *r) {
    size_t bytes = 0;
    void *work;
    moe_status status = moe_layer_work_size(layer, call->n_past + call->n_tokens, call->training, &bytes);
    if (status != MOE_OK) return fail_status(g, "moe_layer_work_size", status);
    work = grab(g, bytes, 1);
    r->y = grab_reals(g, call->n_tokens * (size_t)layer->config.d_out);
    status = moe_layer_forward(layer, call, r->y, work, bytes, &r->pass);
    return status == MOE_OK ? 1 : fail_status(g, "moe_layer_forward", status);
}

static int backward(golden *g, const moe_layer *layer, run *r) {
    size_t count = g->call.n_tokens * (size_t)layer->config.router.d_model, i;
    moe_tensor t;
    moe_status status;
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++)
        if (t.gradient != NULL) memset(t.gradient, 0, t.count * sizeof(moe_real));
    if (g->call.d_attention_weights != NULL) {
        memset(g->call.d_attention_weights, 0,
               (size_t)layer->config.router.heads * g->call.n_tokens * g->call.n_tokens * sizeof(moe_real));
        if (g->call.d_attention_output != NULL) memset(g->call.d_attention_output, 0, count * sizeof(moe_real));
        memset(g->call.d_attention_outputs, 0, (size_t)layer->config.router.heads * count * sizeof(moe_real));
    }
    if (g->call.d_previous_logits != NULL)
        memset(g->call.d_previous_logits, 0,
               g->call.n_tokens * (size_t)layer->config.router.n_experts * sizeof(moe_real));
    r->dx = grab_reals(g, count);
    r->d_router_x = g->call.router_x != NULL ? grab_reals(g, count) : NULL;
    status = moe_layer_backward(layer, g->dy, r->dx, r->d_router_x, &r->pass);
    return status == MOE_OK ? 1 : fail_status(g, "moe_layer_backward", status);
}

static int same(const moe_real *a, const moe_real *b, size_t count) {
    return memcmp(a, b, count * sizeof(moe_real)) == 0;
}

/* Dimensions of 1 do not count: [1,d] is [d]. */
static int same_shape(const moe_file_tensor *a, const moe_tensor *b) {
    int i = 0, k = 0;
    for (;;) {
        while (i < a->n_dims && a->shape[i] == 1) i++;
        while (k < b->n_dims && b->shape[k] == 1) k++;
        if (i == a->n_dims || k == b->n_dims) return i == a->n_dims && k == b->n_dims;
        if (a->shape[i++] != b->shape[k++]) return 0;
    }
}

/* State that counts since the last step: 0 where a file has none. */
static const char *const sums[] = {"router.cutoff_sum", "router.cutoff_count"};

/* Puts the file's parameters into the layer. */
static int fill_layer(golden *g, const moe_layer *layer) {
    moe_tensor t;
    moe_file_tensor stored;
    size_t i;
    int k;
    for (i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++) {
        if (moe_file_find(&g->file, t.name, &stored) != MOE_OK) {
            if (!is_in(t.name, sums, sizeof sums / sizeof sums[0]))
                return fail(g, "the layer wants a tensor that the file lacks", t.name);
            memset(t.data, 0, t.count * sizeof(moe_real));
            continue;
        }
        if (!same_shape(&stored, &t)) return fail(g, "tensor has another shape than the layer's", t.name);
        if (moe_file_values(&stored, 0, t.count, t.data, NULL) != MOE_OK)
            return fail(g, "tensor cannot be read as numbers", t.name);
    }
    for (k = 0; k < (int)(sizeof parameters / sizeof parameters[0]); k++)
        if (has_tensor(g, parameters[k]) && moe_layer_find(layer, parameters[k], &t) != MOE_OK)
            return fail(g, "the layer lacks the file's tensor", parameters[k]);
    return 1;
}

/* What inference computes is what training computed, bit for bit, where both do the same. */
static void check_inference(golden *g, const moe_layer *layer, const run *trained, const run *inferred) {
    const moe_router_config *c = &layer->config.router;
    if (may_select(c, MOE_SELECT_SINKHORN) || may_select(c, MOE_SELECT_BALANCED) || c->compete_rate > 0) return;
    if (c->threshold_fallback == 1) return;
    if (c->capacity_factor_eval < c->capacity_factor || c->capacity_factor_eval > c->capacity_factor) return;
    if (moe_router_traits(c) & MOE_TRAIT_STOCHASTIC) return; /* noise is for training only */
    if (!same(inferred->y, trained->y, g->call.n_tokens * (size_t)layer->config.d_out))
        fail(g, "y of inference is not y of training bit for bit, kernels", g->kernels);
}

/* The call for one token, with all that the whole call has for it. */
static moe_call token_call(const golden *g, const moe_layer *layer, size_t t) {
    size_t d = (size_t)layer->config.router.d_model;
    moe_call one;
    memset(&one, 0, sizeof one);
    one.n_tokens = 1;
    one.x = g->call.x + t * d;
    one.training = g->call.training;
    if (g->call.router_x != NULL) one.router_x = g->call.router_x + t * d;
    if (g->call.jitter != NULL) one.jitter = g->call.jitter + t * d;
    if (g->call.token_ids != NULL) one.token_ids = g->call.token_ids + t;
    if (g->call.token_machine != NULL) one.token_machine = g->call.token_machine + t;
    one.expert_machine = g->call.expert_machine;
    if (g->call.noise != NULL) one.noise = g->call.noise + t * (size_t)layer->config.router.n_experts;
    one.n_previous = g->call.n_previous;
    if (g->call.previous_experts != NULL) one.previous_experts = g->call.previous_experts + t * one.n_previous;
    if (g->call.previous_weights != NULL) one.previous_weights = g->call.previous_weights + t * one.n_previous;
    if (g->call.previous_input != NULL) one.previous_input = g->call.previous_input + t * d;
    if (g->call.previous_logits != NULL)
        one.previous_logits = g->call.previous_logits + t * (size_t)layer->config.router.n_experts;
    if (g->call.gumbel != NULL)
        one.gumbel =
            g->call.gumbel + t * (size_t)layer->config.router.top_k * (size_t)layer->config.router.n_experts;
    if (g->call.uniform != NULL) one.uniform = g->call.uniform + t * (size_t)layer->config.router.top_k;
    if (g->call.dropped != NULL)
        one.dropped = g->call.dropped + (layer->config.router.expert_dropout_scope == MOE_DROPOUT_SCOPE_CALL
                                             ? 0
                                             : t * (size_t)layer->config.router.n_experts);
    if (g->call.mask != NULL) one.mask = g->call.mask + t;
    if (g->call.teacher != NULL) one.teacher = g->call.teacher + t * (size_t)layer->config.router.n_experts;
    if (g->call.given != NULL) one.given = g->call.given + t * (size_t)layer->config.router.top_k;
    return one;
}

static void check_single_tokens(golden *g, const moe_layer *layer, const run *whole) {
    size_t t, o = (size_t)layer->config.d_out;
    if ((moe_router_traits(&layer->config.router) & (MOE_TRAIT_CAUSAL | MOE_TRAIT_NEEDS_BATCH)) != MOE_TRAIT_CAUSAL)
        return;
    for (t = 0; t < g->call.n_tokens; t++) {
        moe_call one = token_call(g, layer, t);
        run r;
        if (!forward(g, layer, &one, &r)) return;
        if (!same(r.y, whole->y + t * o, o)) {
            fail(g, "y of a token alone is not its y in the batch bit for bit, kernels", g->kernels);
            return;
        }
    }
}

/* What a call for token t reads of the earlier ones of its sequence, which begins at `first`. */
static void set_past(golden *g, const moe_layer *layer, const run *whole, size_t first, size_t t, moe_call *one) {
    size_t d = (size_t)layer->config.router.d_model, e = whole->pass.routing.n_experts;
    size_t heads = (size_t)layer->config.router.heads, n = g->call.n_tokens;
    size_t length = t - first + 1, h;
    moe_real *weights, *outputs;
    one->n_past = t - first;
    one->past_u = whole->pass.routing.u + first * d;
    one->past_gate = whole->pass.routing.gate + first * e;
    if (g->call.attention_weights == NULL) return;
    one->attention_weights = weights = grab_reals(g, heads * length);
    one->attention_outputs = outputs = grab_reals(g, heads * length * d);
    if (g->call.attention_output != NULL) one->attention_output = g->call.attention_output + t * d;
    for (h = 0; h < heads; h++) {
        const moe_real *row = g->call.attention_weights + (h * n + t) * n + first;
        const moe_real *rows = g->call.attention_outputs + (h * n + first) * d;
        memcpy(weights + h * length, row, length * sizeof(moe_real));
        memcpy(outputs + h * length * d, rows, length * d * sizeof(moe_real));
    }
}

/* The largest difference relative to the largest size, which is at least `largest`. */
static double distance_beside(const moe_real *got, const moe_real *want, size_t count, double largest) {
    double difference = 0.0;
    size_t i;
    for (i = 0; i < count; i++) {
        if (!moe_is_finite(got[i])) return HUGE_VAL;
        largest = fmax(largest, fabs((double)want[i]));
        difference = fmax(difference, fabs((double)got[i] - (double)want[i]));
    }
    return difference / (1e-6 + largest);
}

static double distance(const moe_real *got, const moe_real *want, size_t count) {
    return distance_beside(got, want, count, 0.0);
}

/* Decoding, where the router can: tokens one by one, each reading those before it. A predictor
   chooses only in decoding: then what they are in one call of it. */
static void check_decoding(golden *g, const moe_layer *layer, const run *inferred) {
    const moe_router_config *c = &layer->config.router;
    size_t n = g->call.n_tokens, o = (size_t)layer->config.d_out, t;
    size_t first = 0, s = 0;
    moe_real *y = grab_reals(g, n * o);
    moe_call together = g->call;
    run r, chosen = *inferred;
    if (moe_router_check_decoding(c, NULL) != MOE_OK) return;
    together.training = 0;
    together.decoding = 1;
    if (c->predictor && !forward(g, layer, &together, &chosen)) return;
    if (c->refine != MOE_REFINE_NONE && g->call.mask != NULL) return; /* a past has no padding */
    for (t = 0; t < n; t++) {
        moe_call one = token_call(g, layer, t);
        while (g->call.sequences != NULL && (size_t)g->call.sequences[s] <= t) first = (size_t)g->call.sequences[s++];
        one.training = 0;
        one.decoding = 1;
        if (c->refine != MOE_REFINE_NONE) set_past(g, layer, inferred, first, t, &one);
        if (!forward(g, layer, &one, &r)) return;
        memcpy(y + t * o, r.y, o * sizeof(moe_real));
    }
    if (!(distance(y, chosen.y, n * o) <= BOUND))
        fail(g, "y of decoding is not y of the batch, kernels", g->kernels);
}

/* Puts packed values in the place of the tensors that they come from. */
static int unpack(golden *g, moe_layer *layer, int type) {
    int index;
    for (index = 0; index < MOE_LAYER_PARAMETER_COUNT; index++) {
        const unsigned char *at = (const unsigned char *)layer->packed[index];
        moe_parameter p;
        moe_tensor t;
        size_t blocks, n, k, panel, e;
        if (at == NULL) continue;
        if (moe_layer_parameter(&layer->config, index, &p) != MOE_OK || moe_layer_find(layer, p.name, &t) != MOE_OK)
            return fail(g, "packed weights without a tensor", "");
        blocks = p.n_dims == 3 ? p.shape[0] : 1;
        n = p.shape[p.n_dims - 2];
        k = p.shape[p.n_dims - 1];
        if (moe_panel_size(type, k, &panel) != MOE_OK) return fail(g, "moe_panel_size", p.name);
        for (e = 0; e < blocks; e++, at += (n + 15) / 16 * panel)
            if (moe_unpack(type, n, k, at, 1, t.data + e * n * k, k) != MOE_OK)
                return fail(g, "moe_unpack", p.name);
    }
    layer->is_packed = 0;
    return 1;
}

/* The largest number that experts add to their outputs: where sums cancel it, outputs are small. */
static double largest_bias(const golden *g, const moe_layer *layer) {
    moe_tensor bias;
    double largest = 0.0;
    size_t i;
    if (!has_tensor(g, "experts.fc2.bias") || moe_layer_find(layer, "experts.fc2.bias", &bias) != MOE_OK) return 0.0;
    for (i = 0; i < bias.count; i++) largest = fmax(largest, fabs((double)bias.data[i]));
    return largest;
}

/* How far outputs move when x does by up to a code of 8 bits: far where sums cancel. */
static double moved_by_codes(golden *g, const moe_layer *layer, const moe_call *call, const run *still) {
    const size_t d = (size_t)layer->config.router.d_model, count = call->n_tokens * d;
    moe_real *x = grab_reals(g, count);
    moe_call near_it = *call;
    moe_rng rng = {1};
    run moved;
    size_t t, i;
    for (t = 0; t < count; t += d) {
        moe_real most = 0;
        for (i = t; i < t + d; i++) most = call->x[i] > most ? call->x[i] : -call->x[i] > most ? -call->x[i] : most;
        for (i = t; i < t + d; i++) x[i] = call->x[i] + (2 * moe_rng_uniform(&rng) - 1) * most / 127;
    }
    near_it.x = x;
    if (!forward(g, layer, &near_it, &moved)) return 0.0;
    return distance(moved.y, still->y, call->n_tokens * (size_t)layer->config.d_out);
}

/* Packed weights of every type give what their values give as plain tensors: bit for bit, but for
   quantized types, whose activations are quantized too. */
static void check_packed(golden *g, moe_layer *layer) {
    size_t count = g->call.n_tokens * (size_t)layer->config.d_out, bytes;
    int type, score = layer->config.router.score;
    moe_call call = g->call;
    moe_error error;
    run got, want;
    call.training = 0;
    for (type = 0; type < MOE_TYPE_COUNT; type++) {
        int quantized = type != MOE_TYPE_REAL && type != MOE_TYPE_F16 && type != MOE_TYPE_BF16;
        void *memory;
        if (moe_layer_pack_size(layer, type, 0, &bytes, NULL) != MOE_OK) continue; /* left out of the build */
        memory = grab(g, bytes, 1);
        if (moe_layer_pack(layer, type, memory, bytes, &error) != MOE_OK) fail(g, "moe_layer_pack", error.message);
        if (!forward(g, layer, &call, &got) || !unpack(g, layer, type) || !forward(g, layer, &call, &want)) return;
        if (!quantized && !same(got.y, want.y, count)) fail(g, "packed weights change bits, kernels", g->kernels);
        if (quantized && score != MOE_SCORE_NORM && score != MOE_SCORE_ATTENTIVE && score != MOE_SCORE_COMPETITION) {
            double away = distance_beside(got.y, want.y, count, largest_bias(g, layer));
            if (!(away <= QUANTIZED) && !(away <= 4 * moved_by_codes(g, layer, &call, &want)))
                fail(g, "quantized weights are too far from their values, kernels", g->kernels);
        }
        if (!fill_layer(g, layer)) return;
    }
}

static moe_real *with_nan_padding(golden *g, const moe_real *x, size_t d) {
    moe_real *copy = grab_reals(g, g->call.n_tokens * d), zero = (moe_real)0;
    size_t t, i;
    for (t = 0; t < g->call.n_tokens; t++)
        for (i = t * d; i < (t + 1) * d; i++) copy[i] = g->call.mask[t] ? x[i] : zero / zero;
    return copy;
}

/* A shared expert sees padding too, so with one only the rows of y that are real are compared. */
static void check_padding(golden *g, const moe_layer *layer, const run *trained) {
    golden changed = *g;
    size_t d = (size_t)layer->config.router.d_model, o = (size_t)layer->config.d_out, t, i, at;
    moe_real *kept[MOE_LAYER_PARAMETER_COUNT];
    moe_tensor tensor;
    run r;
    int good;
    if (g->call.mask == NULL) return;
    for (i = 0; moe_layer_tensor(layer, i, &tensor) == MOE_OK; i++) {
        kept[i] = grab_reals(g, tensor.count);
        memcpy(kept[i], tensor.gradient, tensor.count * sizeof(moe_real));
    }
    changed.blocks = g->blocks;
    changed.call.x = with_nan_padding(&changed, g->call.x, d);
    if (g->call.router_x != NULL) changed.call.router_x = with_nan_padding(&changed, g->call.router_x, d);
    if (g->call.previous_logits != NULL)
        changed.call.previous_logits =
            with_nan_padding(&changed, g->call.previous_logits, (size_t)layer->config.router.n_experts);
    good = forward(&changed, layer, &changed.call, &r) && backward(&changed, layer, &r);
    g->blocks = changed.blocks; /* what it took is the case's */
    if (!good) {
        fail(g, "with NaN in padding", changed.text);
        return;
    }
    for (t = 0; t < g->call.n_tokens; t++)
        if (g->call.mask[t] && !same(r.y + t * o, trained->y + t * o, o))
            fail(g, "NaN in padding reaches y of a real token, kernels", g->kernels);
    if (layer->config.n_shared > 0) return;
    if (!same(r.y, trained->y, g->call.n_tokens * o))
        fail(g, "NaN in padding reaches y of padding, kernels", g->kernels);
    if (!same(r.dx, trained->dx, g->call.n_tokens * d))
        fail(g, "NaN in padding reaches the gradient of x, kernels", g->kernels);
    if (r.d_router_x != NULL && !same(r.d_router_x, trained->d_router_x, g->call.n_tokens * d))
        fail(g, "NaN in padding reaches the gradient of router_x, kernels", g->kernels);
    for (at = 0; at < i; at++)
        if (moe_layer_tensor(layer, at, &tensor) == MOE_OK && !same(kept[at], tensor.gradient, tensor.count))
            fail(g, "NaN in padding reaches the gradient", tensor.name);
}

/* The state after the call and a step of the optimizer: want.after.TENSOR. */
static void check_state(golden *g, moe_layer *layer) {
    moe_file_tensor wanted;
    moe_tensor t;
    char name[NAME_ROOM];
    run r;
    if (!forward(g, layer, &g->call, &r)) return;
    if (moe_layer_observe(layer, &r.pass) != MOE_OK || moe_layer_advance(layer) != MOE_OK) {
        fail(g, "moe_layer_observe or moe_layer_advance", "");
        return;
    }
    g->file.at = 0;
    while (moe_file_next(&g->file, &wanted) == MOE_OK) {
        memcpy(name, wanted.name, wanted.name_length);
        name[wanted.name_length] = '\0';
        if (!starts_with(name, "want.after.")) continue;
        if (moe_layer_find(layer, name + strlen("want.after."), &t) != MOE_OK) fail(g, "no such state", name);
        else compare(g, name, t.data, 1, t.count, 1);
    }
}

/* What else inference must give. */
static void check_use(golden *g, moe_layer *layer, const run *whole) {
    moe_call call = g->call;
    run inferred;
    call.training = 0;
    if (g->outcome != PASSED || !forward(g, layer, &call, &inferred)) return;
    if (g->call.training) check_inference(g, layer, whole, &inferred);
    check_decoding(g, layer, &inferred);
    check_packed(g, layer);
}

static void run_table(golden *g, int table) {
    moe_layer layer;
    moe_error error;
    run r;
    moe_status status;
    memset(&layer, 0, sizeof layer);
    memset(&r, 0, sizeof r);
    g->config.kernels = table;
    g->kernels = moe_kernels_select(table)->name;
    status = moe_layer_create(&layer, &g->config, 1, 1, NULL, &error);
    if (status != MOE_OK) {
        fail(g, "moe_layer_create", error.message);
        return;
    }
    if (fill_layer(g, &layer) && forward(g, &layer, &g->call, &r) &&
        (!g->call.training || backward(g, &layer, &r))) {
        compare_all(g, &layer, &r);
        check_single_tokens(g, &layer, &r);
        if (g->call.training) check_padding(g, &layer, &r);
        check_use(g, &layer, &r);
        if (g->call.training && g->outcome == PASSED) check_state(g, &layer);
    }
    moe_layer_free(&layer);
}

/* wanted: one table, or 0 for the automatic choice and all others that this machine has. */
static void run_tables(golden *g, int wanted) {
    const moe_kernels *chosen = moe_kernels_select(MOE_KERNELS_AUTO), *k;
    int table;
    if (wanted != 0) {
        run_table(g, wanted);
        return;
    }
    run_table(g, MOE_KERNELS_AUTO);
    for (table = 1; table < MOE_KERNELS_COUNT; table++)
        if ((k = moe_kernels_select(table)) != NULL && k != chosen) run_table(g, table);
}

static void run_case(golden *g, const char *path, int wanted) {
    moe_error error;
    moe_layer_config checked;
    if (moe_file_read(path, &g->bytes, &error) != MOE_OK ||
        moe_file_open(&g->file, g->bytes.data, g->bytes.size, &error) != MOE_OK) {
        fail(g, "not readable", error.message);
        return;
    }
    if (!read_config(g) || !check_keys(g) || !check_names(g)) return;
    if (moe_layer_check(&g->config, &checked, &error) != MOE_OK) {
        fail(g, "configuration", error.message);
        return;
    }
    g->config.router.top_k = checked.router.top_k;
    if (read_inputs(g)) run_tables(g, wanted);
}

/* ---- the program ---- */

static const char *const verdict_names[] = {"ok", "FAILED", "skipped"};

#include "state.h"

/* The name without its ending. */
static int name_length(const char *name) {
    const char *dot = strrchr(name, '.');
    return (int)(dot != NULL && dot != name ? (size_t)(dot - name) : strlen(name));
}

static verdict run_path(const char *path, int wanted) {
    golden g;
    const char *name = path, *p;
    verdict v;
    memset(&g, 0, sizeof g);
    for (p = path; *p != '\0'; p++)
        if ((*p == '/' || *p == '\\') && p[1] != '\0') name = p + 1;
    run_case(&g, path, wanted);
    printf("%-36.*s %-8s", name_length(name), name, verdict_names[g.outcome]);
    if (g.worst_name[0] != '\0') printf(" %.1e %s", g.worst, g.worst_name);
    printf("%s%s\n", g.text[0] != '\0' ? " " : "", g.text);
    v = g.outcome;
    end_case(&g);
    return v;
}

static char *copy_text(const char *a, const char *b, const char *c) {
    char *text = (char *)malloc(strlen(a) + strlen(b) + strlen(c) + 1);
    if (text == NULL) exit(2);
    strcpy(text, a);
    strcat(text, b);
    strcat(text, c);
    return text;
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static int ends_in(const char *name, const char *ending) {
    size_t n = strlen(name), m = strlen(ending);
    return n > m && strcmp(name + n - m, ending) == 0;
}

#ifdef GOLDEN_FOLDERS
static int is_case_name(const char *name) { return ends_in(name, ".safetensors") || ends_in(name, ".json"); }

/* Appends a folder's cases, sorted; -1 when path is not a folder. */
static int list_folder(const char *path, char **list, int room) {
    DIR *folder = opendir(path);
    struct dirent *entry;
    int n = 0;
    if (folder == NULL) return -1;
    while (n < room && (entry = readdir(folder)) != NULL)
        if (is_case_name(entry->d_name)) list[n++] = copy_text(path, "/", entry->d_name);
    closedir(folder);
    qsort(list, (size_t)n, sizeof list[0], by_name);
    return n;
}
#else
/* Standard C cannot list a folder: name the files. */
static int list_folder(const char *path, char **list, int room) {
    (void)path;
    (void)list;
    (void)room;
    (void)by_name;
    return -1;
}
#endif

static int list_path(const char *path, char **list, int room) {
    int n = list_folder(path, list, room);
    FILE *file;
    if (n >= 0) return n;
    file = fopen(path, "rb");
    if (file == NULL) {
        fprintf(stderr, "golden: cannot read %s\n", path);
        exit(2);
    }
    fclose(file);
    if (room > 0) list[0] = copy_text(path, "", "");
    return room > 0;
}

static int usage(void) {
    int table;
    fprintf(stderr, "usage: golden [-v] [--kernels NAME] FILE-OR-FOLDER...\n  -v: every compared tensor\n  --kernels: "
                    "one table only, of");
    for (table = 0; table < MOE_KERNELS_COUNT; table++)
        if (moe_kernels_select(table) != NULL && table > 0) fprintf(stderr, " %s", moe_kernels_name(table));
    fprintf(stderr, "\n");
    return 2;
}

static int table_of(const char *name) {
    int table;
    for (table = 1; table < MOE_KERNELS_COUNT; table++)
        if (strcmp(moe_kernels_name(table), name) == 0 && moe_kernels_select(table) != NULL) return table;
    return -1;
}

int main(int argc, char **argv) {
    static char *list[MAX_PATHS];
    int counts[3] = {0, 0, 0}, n = 0, i;
    int wanted = 0, paths = 0;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-v") == 0) verbose = 1;
        else if (strcmp(argv[i], "--kernels") == 0 && i + 1 < argc) wanted = table_of(argv[++i]);
        else if (argv[i][0] == '-') return usage();
        else {
            paths++;
            n += list_path(argv[i], list + n, MAX_PATHS - n);
        }
        if (wanted < 0) return usage();
    }
    if (paths == 0) return usage();
    for (i = 0; i < n; i++) {
        if (ends_in(list[i], ".json")) run_examples(list[i], counts);
        else counts[run_path(list[i], wanted)]++;
        free(list[i]);
    }
    printf("%d passed, %d failed, %d skipped\n", counts[PASSED], counts[FAILED], counts[SKIPPED]);
    return counts[FAILED] > 0 || counts[PASSED] == 0;
}
