/* baseline.c - results that no change of form may change: hashes of the bits that 0.1.0 computed
   with the plain C kernels.

     cc -std=c99 -O1 -I. tests/golden/baseline.c -o baseline -lm && ./baseline
     ./baseline print      prints the table of hashes instead of comparing

   Every preset of 0.1.0 as a layer, with its settings of then: forward and backward in training
   with all the router's inputs, then its state after a step, then inference. A small language
   model: its parameters after training, its evaluation. An integer and a float inference model:
   their answers. The hashes were computed at revision b43e510 by gcc 12 on x86-64 (those of
   the integer models anew, when 0.2.0 fitted their curves to the data and gave 16 bits to inputs of
   products that lose more than 1 % in 8); elsewhere the math library or a fused multiply-add may
   round otherwise, so other targets only run the program. Exit status 1 if a hash differs. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 24, D = 16, EXPERTS = 8, PREVIOUS = 2 };

/* was: settings that undo what the preset has corrected since; NULL: nothing */
typedef struct row {
    const char *name;
    uint64_t hash;
    const char *was;
} row;

static const row rows[] = {
    {"preset smoe", UINT64_C(0x98f9b4c6fadebbf1), NULL},
    {"preset similarity_smoe", UINT64_C(0xb8d4bdc8bca9a67e), NULL},
    {"preset attention_smoe", UINT64_C(0xcebe8dd850a80166), NULL},
    {"preset similarity_glam", UINT64_C(0x9d2bc170b71616f3), NULL},
    {"preset attention_glam", UINT64_C(0x8b51be175e64b718), NULL},
    {"preset similarity_xmoe", UINT64_C(0xf6230f10a59d1995), NULL},
    {"preset attention_xmoe", UINT64_C(0x1bdb26a0d3c5a1a2), NULL},
    {"preset similarity_smoe_dropout", UINT64_C(0x434c3c76a5707804), NULL},
    {"preset attention_smoe_dropout", UINT64_C(0x783d91bc4eb378e3), NULL},
    {"preset glam", UINT64_C(0x55f7e4487fa9339b), NULL},
    {"preset switch", UINT64_C(0xf3e5f87b1fe2fb4b), "input=plain capacity_factor=0 capacity_factor_eval=0"},
    {"preset gshard", UINT64_C(0xa6f3aef9614383c5), "capacity_factor=2"},
    {"preset noisy_topk", UINT64_C(0xf29a5d8f6f09f506), NULL},
    {"preset vmoe", UINT64_C(0x060abca6ba617fab), NULL},
    {"preset xmoe", UINT64_C(0xa2ebe74bf006528d), NULL},
    {"preset xmoe_code", UINT64_C(0x7f071ba583196636), NULL},
    {"preset smoe_dropout", UINT64_C(0x953e452d533159a3), "k_end=0"},
    {"preset acmoe", UINT64_C(0xad7d200533668523), NULL},
    {"preset acmoe_code", UINT64_C(0x9c43838dbbae5b65), NULL},
    {"preset acmoe_mix2", UINT64_C(0x5e4f87f6b14433a3), NULL},
    {"preset acmoe_threshold", UINT64_C(0x5af93467d6d94759), NULL},
    {"preset soft_acmoe", UINT64_C(0xea1064f62eff4219), "ac_mix=2"},
    {"preset aoe", UINT64_C(0x8f303e23135e4e16), NULL},
    {"preset aoe_code", UINT64_C(0xf26ae569d6ddf0c2), NULL},
    {"preset aoe_top_p", UINT64_C(0x76815852e44e265b), "loss_balance=0"},
    {"preset aoe_expert_choice", UINT64_C(0xeb4ea68a45ea6af5), NULL},
    {"preset norm_routing", UINT64_C(0xde4a060aa5671561), NULL},
    {"preset locmoe", UINT64_C(0x5668c5a84b0e3a00), NULL},
    {"preset locmoe_plus", UINT64_C(0x1867de5ebea1519d),
     "affinity_sum_auto=0 affinity_mass=0.6 loss_locality=0 nodes=1 switch_share=0"},
    {"preset importance_gate", UINT64_C(0x735d3159ca2e47c6), NULL},
    {"preset dual_temperature", UINT64_C(0x735d3159ca2e47c6), NULL},
    {"preset attentive_gate", UINT64_C(0x231240735accc154), NULL},
    {"preset similarity_gate", UINT64_C(0xd8d8a8e2dc39b34b),
     "loss_similarity_same=0.01 loss_similarity_diff=0.1"},
    {"preset expert_choice", UINT64_C(0xfb4842b6d3b4a3d7), NULL},
    {"preset mixture_of_depths", UINT64_C(0x9f259a6b89fe01d7), NULL},
    {"preset hash", UINT64_C(0x562ac7a7f5677064), NULL},
    {"preset base", UINT64_C(0xeabbe6f7363fc15a), NULL},
    {"preset stablemoe", UINT64_C(0x12389f7dda6f0299), "loss_stable_balance=0 loss_balance=0.01 student_dim=0"},
    {"preset dselect_k", UINT64_C(0x380e7811134fc784), "loss_selector_entropy=0 loss_entropy=0.001"},
    {"preset thor", UINT64_C(0x2c26b0a8b0c199ac), "sample_at=training sample_scope=token"},
    {"preset sinkhorn", UINT64_C(0x874d57deac9a43f3), NULL},
    {"preset soft_moe", UINT64_C(0xaa575799a3d157b5), NULL},
    {"preset top_p", UINT64_C(0x12d70f7fc87d9a10), NULL},
    {"preset dynmoe", UINT64_C(0xb9d057e9a80c3954), "loss_diversity=0 loss_simplicity=0"},
    {"preset competesmoe", UINT64_C(0x991d225b165813e9),
     "score=competition gate=identity weight=sum compete_rate=0 loss_distill=0 distill=ce_hard loss_balance=0"},
    {"preset remoe", UINT64_C(0x8235df2e2912da04), "l1_controller=layer"},
    {"preset mixtral", UINT64_C(0x55f7e4487fa9339b), NULL},
    {"preset qwen2_moe", UINT64_C(0x566adf938f3dc92a), NULL},
    {"preset qwen3_moe", UINT64_C(0xb6e5359f295ccf8c), NULL},
    {"preset olmoe", UINT64_C(0xb57b5a1abb2e97c6), NULL},
    {"preset deepseek_v2", UINT64_C(0xd9b37766c85554f3), "loss_balance=0 balance_scope=batch"},
    {"preset deepseek_v3", UINT64_C(0xdc127c90030deb10), "loss_balance=0 balance_scope=batch"},
    {"preset deepseek_v4", UINT64_C(0x72bc590ee0b0c0a4), "swiglu_limit=0"},
    {"preset llama4", UINT64_C(0x2a5405015d1e5a71), NULL},
    {"preset gpt_oss", UINT64_C(0x987270cd70f874f6), NULL},
    {"preset dbrx", UINT64_C(0xb6e5359f295ccf8c), NULL},
    {"preset grok1", UINT64_C(0x39f8de0be52320ab), "expert=swiglu act=relu"},
    {"preset phi35_moe", UINT64_C(0x39ccbbe5f29f7800), "sparsemixer_sample=0"},
    {"preset granite_moe", UINT64_C(0x676bf9340fb2d2f0), NULL},
    {"preset gemma4", UINT64_C(0x0282b10215945b28), "raw_input=0 expert=swiglu act=relu"},
    {"preset minimax_m2", UINT64_C(0x7dd230edf4d85d42), NULL},
    {"preset nemotron3", UINT64_C(0xb72e43b10f750e45), "loss_balance=0"}, /* this and the next seven: of 0.2.0 */
    {"preset sigma_moe", UINT64_C(0x7dc1792248e5eb5b), "loss_usage_entropy=0.001"},
    {"preset moe_pp", UINT64_C(0x14a40c2d5741d1c5), NULL},
    {"preset adamoe", UINT64_C(0xa0e6e88fb65019e6), "top_k=3 n_zero=4 loss_balance=0.01"},
    {"preset longcat_flash", UINT64_C(0x8ec33fff3be5f336), NULL},
    {"preset expert_threshold", UINT64_C(0x917acb10eefd2197), NULL},
    {"preset moge", UINT64_C(0x0057c10fdd8b30f1), NULL},
    {"preset grok2", UINT64_C(0xabb38bfe13a2234c), NULL},
    {"preset trinity", UINT64_C(0x3188e1b0af5d8280), NULL},
    {"net language model", UINT64_C(0x3e76ed6bbd77579b), NULL},
    {"model float", UINT64_C(0xd59b13e79c561bdd), NULL},
    {"model int8", UINT64_C(0xe7c74b54ae9c5ba7), NULL},
    {"model int4", UINT64_C(0xa365801046580499), NULL},
    {NULL, 0, NULL}};

static uint64_t hash;

static void add_bytes(const void *bytes, size_t size) {
    const unsigned char *b = (const unsigned char *)bytes;
    size_t i;
    for (i = 0; i < size; i++) hash = (hash ^ b[i]) * UINT64_C(1099511628211);
}

static void begin(void) { hash = UINT64_C(14695981039346656037); }

/* What a case takes stays until the next one. */
static void *grabbed[32];
static size_t n_grabbed;

static void *grab(size_t size) {
    void *p = calloc(1, size + 64);
    if (p == NULL || n_grabbed == sizeof grabbed / sizeof *grabbed) exit(2);
    grabbed[n_grabbed++] = p;
    return p;
}

static void let_go(void) {
    while (n_grabbed > 0) free(grabbed[--n_grabbed]);
}

static moe_real *normals(size_t count, moe_rng *rng) {
    moe_real *x = (moe_real *)grab(count * sizeof *x);
    size_t i;
    for (i = 0; i < count; i++) x[i] = moe_rng_normal(rng);
    return x;
}

static const row *find_row(const char *kind, const char *name) {
    char full[80];
    const row *r;
    sprintf(full, "%s %s", kind, name);
    for (r = rows; r->name != NULL && strcmp(r->name, full) != 0; r++) continue;
    return r;
}

static long passed, failed;
static int known; /* whether the hashes are of this build */

/* One row of the table: compares, or prints. */
static void judge(const char *kind, const char *name, int print) {
    const row *r = find_row(kind, name);
    if (print) {
        printf("    {\"%s %s\", UINT64_C(0x%08lx%08lx), NULL},\n", kind, name, (unsigned long)(hash >> 32),
               (unsigned long)(hash & 0xffffffffu));
        return;
    }
    if (!known) return;
    if (r->name != NULL && r->hash == hash) {
        passed++;
        return;
    }
    failed++;
    printf("%s %s: %s\n", kind, name, r->name == NULL ? "no hash is known" : "the bits differ from those of b43e510");
}

/* Everything that a router may read besides x. */
static void give_inputs(moe_call *call, const moe_layer_config *c, moe_rng *rng) {
    static int32_t ids[N], previous[N * PREVIOUS], home[N], given[N * EXPERTS], sequences[] = {0, 10, N};
    static moe_real weights[N * PREVIOUS];
    const unsigned traits = moe_router_traits(&c->router);
    const size_t heads = (size_t)c->router.heads, k = (size_t)c->router.top_k;
    moe_real *a = (moe_real *)grab(heads * N * N * sizeof *a);
    size_t i;
    for (i = 0; i < N; i++) {
        ids[i] = (int32_t)(i * 7 % 10);
        home[i] = (int32_t)(i % 2);
    }
    for (i = 0; i < N * k; i++) given[i] = (int32_t)((i % k + i / k) % EXPERTS);
    for (i = 0; i < N * PREVIOUS; i++) {
        previous[i] = (int32_t)((i / PREVIOUS + i % PREVIOUS * 3) % (size_t)c->router.n_experts);
        weights[i] = (moe_real)(i % PREVIOUS == 0 ? 0.75 : 0.25);
    }
    for (i = 0; i < heads * N * N; i++) {
        const size_t row = i / N % N;
        a[i] = i % N <= row ? (moe_real)1 / (moe_real)(row + 1) : 0;
    }
    call->token_ids = ids;
    call->sequences = sequences;
    call->n_sequences = 2;
    if ((traits & (unsigned)MOE_TRAIT_NEEDS_PREVIOUS_LAYER) != 0) {
        call->previous_input = normals(N * D, rng);
        call->previous_experts = previous;
        call->previous_weights = weights;
        call->n_previous = PREVIOUS;
    }
    if ((traits & (unsigned)MOE_TRAIT_NEEDS_ATTENTION) != 0) {
        call->attention_weights = a;
        call->attention_outputs = normals(heads * N * D, rng);
        call->attention_output = normals(N * D, rng);
    }
    call->token_machine = home;
    if (c->router.select == MOE_SELECT_GIVEN) call->given = given;
    if (c->router.loss_distill > 0 && !c->router.student) call->teacher = normals(N * (size_t)c->router.n_experts, rng);
}

/* EXPERTS experts, of each kind without matrices at most one. */
static void few_experts(moe_router_config *r) {
    r->n_experts = EXPERTS;
    r->n_zero = r->n_zero > 0;
    r->n_copy = r->n_copy > 0;
    r->n_constant = r->n_constant > 0;
    if (r->bias_real > 1) r->bias_real = 1;
}

static int run_preset(const char *name) {
    moe_layer_config c;
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    moe_error error;
    moe_rng rng, draws;
    moe_tensor tensor;
    moe_real *dy, *dx, *y;
    size_t bytes, i;
    void *work;
    memset(&call, 0, sizeof call);
    moe_rng_seed(&rng, 17);
    moe_rng_seed(&draws, 5);
    if (moe_layer_preset(name, &c, &error) != MOE_OK) return 0;
    if (moe_fields_apply(moe_layer_fields(), &c, find_row("preset", name)->was, &error) != MOE_OK) return 0;
    c.router.d_model = D;
    c.d_ff = 12;
    few_experts(&c.router);
    c.kernels = MOE_KERNELS_C;
    c.router.untrained = 1;
    if (c.router.select == MOE_SELECT_HASH || c.router.student_dim > 0) c.router.table_size = 10;
    if (c.router.select == MOE_SELECT_SOFT) c.router.soft_sequences = 2;
    if (c.router.score == MOE_SCORE_ATTENTIVE && c.router.router_hidden > 0) c.d_ff = c.router.router_hidden;
    if (c.router.top_k > 4) c.router.top_k = 4;
    if (c.router.select == MOE_SELECT_GROUPED_EACH) c.router.groups = 4;
    if (c.router.select == MOE_SELECT_GROUPED_TOP_K) {
        c.router.groups = 4;
        c.router.groups_kept = 3;
    }
    if (moe_layer_create(&layer, &c, 1, 42, NULL, &error) != MOE_OK) {
        printf("%s: %s\n", name, error.message);
        return 0;
    }
    call.n_tokens = N;
    call.training = 1;
    call.rng = &draws;
    call.x = normals(N * D, &rng);
    dy = normals(N * D, &rng);
    dx = (moe_real *)grab(N * D * sizeof *dx);
    y = (moe_real *)grab(N * D * sizeof *y);
    give_inputs(&call, &layer.config, &rng);
    if (moe_layer_work_size(&layer, N, 1, &bytes) != MOE_OK) return 0;
    work = grab(bytes);
    begin();
    if (moe_layer_forward(&layer, &call, y, work, bytes, &pass) != MOE_OK) return 0;
    add_bytes(y, N * D * sizeof *y);
    if (moe_layer_backward(&layer, dy, dx, NULL, &pass) != MOE_OK) return 0;
    add_bytes(dx, N * D * sizeof *dx);
    if (moe_layer_observe(&layer, &pass) != MOE_OK || moe_layer_advance(&layer) != MOE_OK) return 0;
    for (i = 0; moe_layer_tensor(&layer, i, &tensor) == MOE_OK; i++) {
        add_bytes(tensor.data, tensor.count * sizeof(moe_real));
        if (tensor.gradient != NULL) add_bytes(tensor.gradient, tensor.count * sizeof(moe_real));
    }
    call.training = 0;
    if (moe_layer_forward(&layer, &call, y, work, bytes, &pass) != MOE_OK) return 0;
    add_bytes(y, N * D * sizeof *y);
    moe_layer_free(&layer);
    return 1;
}

static moe_status build(moe_net *net, moe_error *error) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 4;
    c.d_ff = 8;
    moe_net_init(net, 0, MOE_KERNELS_C, NULL);
    moe_net_embedding(net, 11, D);
    moe_net_positions(net, 8);
    moe_net_rms_norm(net);
    moe_net_attention(net, NULL);
    moe_net_residual(net, 2);
    moe_net_rms_norm(net);
    moe_net_mixture(net, &c);
    moe_net_residual(net, 2);
    moe_net_layer_norm(net);
    moe_net_linear(net, 11);
    return moe_net_build(net, 1, 42, error);
}

static int run_model(const moe_net *net, const moe_data *data, int weights) {
    moe_model_config config;
    moe_built_model model;
    moe_error error;
    char *scratch;
    union {
        moe_real real[11];
        int8_t integer[64];
    } out;
    int32_t id;
    memset(&config, 0, sizeof config);
    config.weights = weights;
    config.calibration = data;
    config.length = 8;
    if (moe_model_create(&model, net, &config, &error) != MOE_OK) {
        printf("model: %s\n", error.message);
        return 0;
    }
    scratch = (char *)grab(model.model.scratch_size);
    begin();
    for (id = 0; id < 8; id++) {
        memset(&out, 0, sizeof out);
        if (moe_infer(&model.model, NULL, &id, &out, scratch, model.model.scratch_size) != MOE_OK) return 0;
        add_bytes(&out, sizeof out);
    }
    moe_model_free(&model);
    return 1;
}

static int run_net(int print) {
    enum { TOKENS = 64 };
    static int32_t ids[TOKENS], labels[TOKENS];
    moe_net net;
    moe_data data;
    moe_train_config training;
    moe_evaluation result;
    moe_error error;
    size_t i;
    for (i = 0; i < TOKENS; i++) {
        ids[i] = (int32_t)((i * i + 3 * i) % 11);
        labels[i] = (int32_t)(((i + 1) * (i + 1) + 3 * (i + 1)) % 11);
    }
    memset(&data, 0, sizeof data);
    memset(&training, 0, sizeof training);
    data.n = TOKENS;
    data.token_ids = ids;
    data.labels = labels;
    data.length = 8;
    training.epochs = 3;
    training.batch = 16;
    training.seed = 3;
    if (build(&net, &error) != MOE_OK || moe_fit(&net, &data, NULL, &training, &error) != MOE_OK ||
        moe_evaluate(&net, &data, MOE_CRITERION_CROSS_ENTROPY, &result, &error) != MOE_OK) {
        printf("net: %s\n", error.message);
        return 0;
    }
    begin();
    for (i = 0; i < net.n_tensors; i++) add_bytes(net.tensors[i].data, net.tensors[i].count * sizeof(moe_real));
    add_bytes(&result.loss, sizeof result.loss);
    judge("net", "language model", print);
    if (!run_model(&net, &data, MOE_WEIGHTS_FLOAT)) return 0;
    judge("model", "float", print);
    if (!run_model(&net, &data, MOE_WEIGHTS_INT8)) return 0;
    judge("model", "int8", print);
    if (!run_model(&net, &data, MOE_WEIGHTS_INT4)) return 0;
    judge("model", "int4", print);
    moe_net_free(&net);
    return 1;
}

int main(int argc, char **argv) {
    const int print = argc > 1 && strcmp(argv[1], "print") == 0;
    const moe_preset *preset;
#if defined(__x86_64__) && !defined(__FMA__)
    known = sizeof(moe_real) == sizeof(float);
#endif
    for (preset = moe_presets(); preset->name != NULL; preset++) {
        if (run_preset(preset->name)) judge("preset", preset->name, print);
        else {
            failed++;
            printf("%s: a call failed\n", preset->name);
        }
        let_go();
    }
    if (!run_net(print)) failed++;
    let_go();
    if (print) return failed > 0;
    if (!known) {
        printf("skip: the hashes are of float on x86-64\n0 passed, %ld failed, 1 skipped\n", failed);
        return failed > 0;
    }
    if (passed + failed != (long)(sizeof rows / sizeof *rows) - 1) {
        failed++;
        printf("a row of the table is of nothing that was run\n");
    }
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}
