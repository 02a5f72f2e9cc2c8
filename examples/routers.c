/* Lists the routers, explains one, and shows what it does to a few tokens, number by number.
   cc -std=c99 -O2 -I. examples/routers.c -o routers -lm */
#define MOE_IMPLEMENTATION
#include "moe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 6, WIDTH = 4, HIDDEN = 6, SHOWN_EXPERTS = 4, IDS = 16, HEADS = 2 };

static const char *const help =
    "routers                 lists all presets\n"
    "routers NAME            explains one: where it comes from, its formula, stages, traits, tensors and cost\n"
    "routers NAME --show     sends six small tokens through it and prints the numbers after every stage\n"
    "routers NAME --seed N   with --show: other tokens and tensors\n";

static int fail(const moe_error *error) {
    fprintf(stderr, "routers: %s\n", error->message);
    return 1;
}

static void print_traits(unsigned traits) {
    unsigned bit;
    for (bit = 1; moe_trait_name(bit) != NULL; bit <<= 1)
        if (traits & bit) printf(" %s", moe_trait_name(bit));
}

static int list(void) {
    const moe_preset *preset;
    moe_layer_config config;
    moe_error error;
    printf("%-24s %8s  %s\n", "preset", "K of E", "traits");
    for (preset = moe_presets(); preset->name != NULL; preset++) {
        char choice[32];
        if (moe_layer_preset(preset->name, &config, &error) != MOE_OK) return fail(&error);
        if (config.router.top_k > 0) sprintf(choice, "%d of %d", config.router.top_k, config.router.n_experts);
        else sprintf(choice, "of %d", config.router.n_experts);
        printf("%-24s %8s ", preset->name, choice);
        print_traits(moe_router_traits(&config.router));
        printf("\n");
    }
    printf("\nrouters NAME explains one, routers NAME --show shows it at work.\n");
    return 0;
}

/* The configuration of a preset, at the size at which it is explained or shown. */
static moe_status configure(const char *name, int shown, moe_layer_config *config, moe_error *error) {
    moe_status status = moe_layer_preset(name, config, error);
    moe_router_config *r = &config->router;
    if (status != MOE_OK) return status;
    r->d_model = shown ? WIDTH : 512;
    config->d_ff = shown ? HIDDEN : 1024;
    if (r->select == MOE_SELECT_HASH) r->table_size = shown ? IDS : 32000;
    if (!shown) return moe_layer_check(config, config, error);
    r->n_experts = SHOWN_EXPERTS;
    if (r->top_k > 2) r->top_k = 2;
    if (r->groups > 1) r->groups = 2, r->groups_kept = 1;
    if (r->cosine_dim > 0) r->cosine_dim = 3;
    if (r->refine == MOE_REFINE_ATTENTION) r->heads = HEADS;
    if (config->n_shared > 1) config->n_shared = 1;
    return moe_layer_check(config, config, error);
}

static int explain(const char *name) {
    const moe_preset *preset = moe_preset_find(name);
    const moe_field *field;
    moe_layer_config config;
    moe_layer layer;
    moe_tensor tensor;
    moe_error error;
    size_t i, used, all;
    char text[40];
    int k;
    if (configure(name, 0, &config, &error) != MOE_OK || moe_layer_init(&layer, &config, &error) != MOE_OK) return fail(&error);
    printf("%s%s%s\n\n  %s\n  %s\n\nSettings (all else is the default):\n", preset->name, preset->aliases[0] != '\0' ? ", also " : "", preset->aliases,
           preset->formula, preset->source);
    if (moe_layer_preset(name, &config, &error) != MOE_OK) return fail(&error);
    for (field = moe_layer_fields(); field->name != NULL; field++) {
        moe_field_text(field, &config, text, sizeof text);
        if (strcmp(text, "0") != 0 && !(field->kind == MOE_FIELD_CHOICE && strcmp(text, field->choices[0]) == 0))
            printf("  %-22s %-14s %s\n", field->name, text, field->about);
    }
    printf("\nTraits:");
    print_traits(moe_router_traits(&config.router));
    printf("\n\nThe router's tensors at d_model 512:\n");
    for (i = 0, all = 0; moe_layer_tensor(&layer, i, &tensor) == MOE_OK && strncmp(tensor.name, "router.", 7) == 0; i++) {
        printf("  %-24s [", tensor.name);
        for (k = 0; k < tensor.n_dims; k++) printf("%s%lu", k > 0 ? "," : "", (unsigned long)tensor.shape[k]);
        printf("]%s\n", tensor.flags & MOE_PARAM_STATE ? "  state" : tensor.flags & MOE_PARAM_FROZEN ? "  frozen" : "");
        if (tensor.n_dims > 1 && !(tensor.flags & MOE_PARAM_FROZEN)) all += tensor.count;
    }
    if (i == 0) printf("  none\n");
    printf("\nCost per token: %lu multiplications in the router's matrices", (unsigned long)all);
    all = moe_layer_parameters(&layer, &used);
    printf("; the layer uses %lu of its %lu parameters\n", (unsigned long)used, (unsigned long)all);
    return 0;
}

/* One line per token of a table of numbers. */
static void print_rows(const char *stage, const char *formula, const moe_real *values, size_t columns) {
    size_t t, i;
    printf("%-4s %s\n", stage, formula);
    for (t = 0; t < TOKENS; t++) {
        printf("     token %d ", (int)t);
        for (i = 0; i < columns && i < 8; i++) printf(" %7.3f", (double)values[t * columns + i]);
        printf("\n");
    }
}

/* What routers ask for beside the tokens: a previous layer, attention, token ids; all made up. */
typedef struct surroundings {
    moe_real previous[TOKENS * WIDTH], previous_weights[TOKENS * 2], attention[HEADS * TOKENS * TOKENS], outputs[HEADS * TOKENS * WIDTH];
    int32_t previous_experts[TOKENS * 2], ids[TOKENS];
} surroundings;

static void surround(surroundings *s, moe_call *call, moe_rng *rng) {
    size_t i, row;
    for (i = 0; i < TOKENS * WIDTH; i++) s->previous[i] = moe_rng_normal(rng);
    for (i = 0; i < TOKENS; i++) {
        s->ids[i] = (int32_t)moe_rng_below(rng, IDS);
        s->previous_experts[2 * i] = (int32_t)(i % 2), s->previous_experts[2 * i + 1] = (int32_t)(2 + i % 2);
        s->previous_weights[2 * i] = (moe_real)0.75, s->previous_weights[2 * i + 1] = (moe_real)0.25;
    }
    for (row = 0; row < HEADS * TOKENS; row++) {
        for (i = 0; i < TOKENS; i++) s->attention[row * TOKENS + i] = moe_rng_normal(rng);
        moe_softmax(NULL, TOKENS, s->attention + row * TOKENS, 1, s->attention + row * TOKENS);
    }
    for (i = 0; i < HEADS * TOKENS * WIDTH; i++) s->outputs[i] = moe_rng_normal(rng);
    call->previous_input = s->previous, call->previous_experts = s->previous_experts, call->previous_weights = s->previous_weights, call->n_previous = 2;
    call->attention_weights = s->attention, call->attention_outputs = s->outputs;
    call->token_ids = s->ids;
}

static void print_choices(const moe_routing *r) {
    size_t t, i;
    printf("S, w chosen experts with weight, * dropped by capacity; %lu dropped\n", (unsigned long)r->n_dropped);
    for (t = 0; t < TOKENS; t++) {
        printf("     token %d ", (int)t);
        for (i = 0; i < (size_t)r->n_choices[t]; i++) {
            size_t at = t * r->max_choices + i;
            printf("  %d: %.3f%s", (int)r->choices[at], (double)r->section_weights[at], r->kept[at] ? "" : "*");
        }
        printf("\n");
    }
}

static int show(const char *name, uint64_t seed) {
    static surroundings around;
    moe_real x[TOKENS * WIDTH], y[TOKENS * WIDTH];
    moe_layer_config config;
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    moe_error error;
    moe_rng rng;
    moe_status status;
    size_t bytes, i;
    void *work;
    int loss, soft;
    if (configure(name, 1, &config, &error) != MOE_OK || moe_layer_create(&layer, &config, 0, seed, NULL, &error) != MOE_OK) return fail(&error);
    moe_rng_seed(&rng, seed);
    memset(&call, 0, sizeof call);
    for (i = 0; i < TOKENS * WIDTH; i++) x[i] = moe_rng_normal(&rng);
    surround(&around, &call, &rng);
    call.n_tokens = TOKENS, call.x = x, call.training = 1, call.rng = &rng;
    status = moe_layer_work_size(&layer, TOKENS, 1, &bytes);
    work = status == MOE_OK ? malloc(bytes) : NULL;
    if (work != NULL) status = moe_layer_forward(&layer, &call, y, work, bytes, &pass);
    if (work == NULL || status != MOE_OK) {
        fprintf(stderr, "routers: %s\n", moe_status_text(work == NULL ? MOE_ERR_MEMORY : status));
        free(work);
        moe_layer_free(&layer);
        return 1;
    }
    soft = config.router.select == MOE_SELECT_SOFT;
    printf("%s: %s\n%d tokens of width %d, %d experts, a training call\n\n", name, moe_preset_find(name)->formula, TOKENS, WIDTH, SHOWN_EXPERTS);
    print_rows("u", "what the router sees", pass.routing.u, WIDTH);
    print_rows(soft ? "L" : "z", soft ? "token . slot" : "logits", pass.routing.logits, SHOWN_EXPERTS);
    print_rows(soft ? "D" : "r", soft ? "dispatch: softmax over tokens" : "gate values", pass.routing.gate, SHOWN_EXPERTS);
    if (soft || config.router.refine != MOE_REFINE_NONE)
        print_rows(soft ? "C" : "p", soft ? "combine: softmax over slots" : "gate values, refined", pass.routing.probabilities, SHOWN_EXPERTS);
    if (!soft) print_choices(&pass.routing);
    print_rows("y", "weighted sum of the chosen experts' outputs", y, WIDTH);
    for (loss = 0; moe_loss_name(loss) != NULL; loss++)
        if (pass.routing.loss[loss] > 0 || pass.routing.loss[loss] < 0) printf("loss %-14s %.5f\n", moe_loss_name(loss), (double)pass.routing.loss[loss]);
    free(work);
    moe_layer_free(&layer);
    return 0;
}

int main(int argc, char **argv) {
    uint64_t seed = 1;
    int i, shown = 0;
    const char *name = NULL;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) return fputs(help, stdout) < 0;
        if (strcmp(argv[i], "--show") == 0) shown = 1;
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) seed = (uint64_t)strtoul(argv[++i], NULL, 10);
        else if (argv[i][0] != '-' && name == NULL) name = argv[i];
        else return fprintf(stderr, "routers: %s is not an option; routers -h explains\n", argv[i]), 1;
    }
    if (name == NULL) return list();
    if (moe_preset_find(name) == NULL) return fprintf(stderr, "routers: there is no preset %s; routers lists them all\n", name), 1;
    return shown ? show(name, seed) : explain(name);
}
