/* Runs every operation of inference models on random data in several shapes, and says which: the
   lines "NAME A B C" are the features of moei_cost_of (moe_export.h). count.c counts the
   instructions of each; costs.py fits the constants of moei_costs to them. */

#define MOE_IMPLEMENTATION
#define MOE_NO_TRAIN
#define MOE_NO_STDIO
#define MOE_NO_MALLOC
#include "moe.h"

#include <stdio.h>

void device_begin(void);
void device_end(void);
void __attribute__((noinline, used)) device_begin(void) { __asm__ volatile("" ::: "memory"); }
void __attribute__((noinline, used)) device_end(void) { __asm__ volatile("" ::: "memory"); }

enum { VECTORS = 6144, CONSTANTS = 16384, STATE = 8192 };

static int16_t vectors[VECTORS];
static unsigned char constants[CONSTANTS], state[STATE], output[512], scratch[3000];
static moe_model model;
static moei_int_op ops[2];
static moei_int_mixture mixture;
static moei_int_attention attention;
static moei_int_run run;
static uint32_t seed = 1;

static uint32_t draw(void) { return (seed = seed * 1664525u + 1013904223u) >> 16; }

/* Random codes, or floats. */
static void fill(int reals) {
    float real;
    unsigned i;
    for (i = 0; i < VECTORS; i++) vectors[i] = (int16_t)(draw() % 201) - 100;
    for (i = 0; reals && i + 1 < VECTORS; i += 2) {
        real = (float)draw() / 32768 - 1;
        memcpy(vectors + i, &real, sizeof real);
    }
    for (i = 0; i < CONSTANTS; i++) constants[i] = (unsigned char)(draw() % 100);
    for (i = 0; reals && i + 3 < CONSTANTS; i += 4) {
        real = (float)draw() / 32768 + 1;
        memcpy(constants + i, &real, sizeof real);
    }
    for (i = 0; i < STATE; i++) state[i] = (unsigned char)draw();
    memset(&run, 0, sizeof run);
    run.model = &model;
    run.base = constants;
    run.vectors = vectors;
    run.state = state;
    run.weight = 20000;
    run.share = 0.5f;
}

static void say(const char *name, unsigned a, unsigned b, unsigned c) { printf("%s %u %u %u\n", name, a, b, c); }

static void measure(const char *name, moei_int_op op, unsigned a, unsigned b, unsigned c) {
    ops[0] = op;
    device_begin();
    moei_int_ops(&run, 0, 1);
    device_end();
    say(name, a, b, c);
}

static moei_int_op op_of(void (*function)(const moei_int_op *op, moei_int_run *run), unsigned n, unsigned k) {
    moei_int_op op;
    memset(&op, 0, sizeof op);
    op.run = function;
    op.shape.n = (uint16_t)n;
    op.shape.k = (uint16_t)k;
    op.shape.low = -32767;
    op.shape.high = 32767;
    op.shape.shift = 8;
    op.in = 0;
    op.other = 1024;
    op.out = 4096;
    op.factor = 4;
    op.factor2 = 1;
    return op;
}

/* The first k experts are chosen. */
static void choose(unsigned k) {
    unsigned i;
    vectors[1024] = (int16_t)k;
    for (i = 0; i < k; i++) vectors[1025 + i] = (int16_t)i;
}

static const unsigned widths[] = {4, 8, 16, 24, 48, 64, 96};
enum { WIDTHS = sizeof widths / sizeof *widths };

#define PRODUCT(family, name) \
    for (i = 0; i < WIDTHS; i++) \
        for (j = 0; j < WIDTHS; j++) \
            if (widths[i] * widths[j] < 3600) \
                measure("moei_" #family "_op_" #name, op_of(moei_##family##_op_##name, widths[i], widths[j]), \
                        widths[i], widths[j], widths[i] * widths[j]);
#define ALONG(family, name) \
    for (i = 0; i < WIDTHS; i++) \
        measure("moei_" #family "_op_" #name, op_of(moei_##family##_op_##name, widths[i], 4), widths[i], 4, \
                widths[i] * 4);

static void integers(void) {
    unsigned i, j;
    PRODUCT(int, int8)
    PRODUCT(int, int4)
    PRODUCT(int, int16)
    PRODUCT(int, int8_add)
    PRODUCT(int, int4_add)
    PRODUCT(int, int16_add)
    ALONG(int, curve)
    ALONG(int, multiply)
    ALONG(int, add)
    ALONG(int, rescale)
    ALONG(int, norm)
    ALONG(int, rotate)
    ALONG(int, unit)
    ALONG(int, apply_weight)
    ALONG(int, set_weight)
    ALONG(int, accumulate)
    choose(2);
    mixture.router.most = 2;
    ALONG(int, add_rest)
    ALONG(int, cluster)
    for (i = 0; i < WIDTHS; i++) {
        moei_int_op op = op_of(moei_int_op_row, widths[i], 8);
        measure("moei_int_op_row", op, widths[i], 8, widths[i] * 8);
    }
}

#define MEASURES(name) \
    for (i = 0; i < 4; i++) \
        for (j = 0; j < WIDTHS; j++) { \
            mixture.router.n_experts = (uint16_t)(2u << i); \
            measure("moei_int_op_" #name, op_of(moei_int_op_##name, widths[j], 0), 2u << i, widths[j], \
                    (2u << i) * widths[j]); \
        }

static void sequences(void) {
    unsigned i, j;
    MEASURES(norm_l1)
    MEASURES(norm_l2)
    MEASURES(norm_linf)
    MEASURES(match)
    for (i = 1; i <= 4; i *= 2)
        for (j = 2; j <= 32; j *= 2) {
            moei_int_op op = op_of(moei_int_op_attention, 16 * i, 16 * i);
            op.factor2 = 100;
            op.factor = 20000;
            attention.heads = (uint16_t)i;
            attention.d_head = 16;
            attention.values = 4096;
            attention.value = 2048;
            attention.room = 3000;
            attention.bits = 12;
            model.length = 32;
            run.place = j - 1;
            measure("moei_int_op_attention", op, 16 * i, i * j, 16 * i * j);
        }
    run.place = 0;
    model.length = 0;
}

#define ROUTE(name, call, a, b) \
    device_begin(); \
    call; \
    device_end(); \
    say(#name, a, b, (a) * (b));
#define GATE(name) ROUTE(moei_int_##name, moei_int_##name(r, n, z, p), n, 0)
#define SELECT(name) ROUTE(moei_int_select_##name, (void)moei_int_select_##name(r, constants, 1, z, p, experts), n, k)
#define WEIGHT(name) ROUTE(moei_int_weight_##name, moei_int_weight_##name(r, z, p, k, experts, weights), n, k)

static void routers(void) {
    static int32_t values[64], *p = values;
    static int16_t experts[64], weights[64];
    moei_int_router *r = &mixture.router;
    const int16_t *z = vectors;
    unsigned n, k, i;
    for (n = 2; n <= 32; n *= 2)
        for (k = 1; k <= n && k <= 8; k *= 2) {
            memset(r, 0, sizeof *r);
            r->n_experts = (uint16_t)n;
            r->top_k = r->most = (uint16_t)k;
            r->z_bits = 6;
            r->groups = 2;
            r->groups_kept = 1;
            r->bias = r->thresholds = r->scales = r->table = MOEI_INT_NONE;
            r->factor = 20000;
            r->tokens = 2;
            GATE(gate_logits)
            GATE(gate_relu)
            GATE(gate_softmax)
            GATE(gate_sigmoid)
            GATE(gate_sqrt_softplus)
            GATE(share_softmax)
            GATE(share_sigmoid)
            GATE(share_sqrt_softplus)
            SELECT(logits)
            for (i = 0; i < n; i++) p[i] = (int32_t)draw();
            SELECT(top_k)
            for (i = 0; i < n; i++) p[i] = (int32_t)draw();
            r->threshold = 1 << 30;
            SELECT(top_p)
            for (i = 0; i < k; i++) experts[i] = (int16_t)i;
            for (i = 0; i < k; i++) p[i] = (int32_t)draw();
            WEIGHT(sum)
            WEIGHT(raw)
            WEIGHT(softmax)
            WEIGHT(uniform)
            WEIGHT(one)
            ROUTE(moei_int_scale_weights, moei_int_scale_weights(r, constants, k, experts, weights), n, k)
        }
}

/* With top-k of the logits and weights of 1, whose instructions costs.py subtracts. */
static void mixtures(void) {
    unsigned n, k, i;
    for (i = 0; i < WIDTHS; i++)
        for (n = 4; n <= 16; n *= 2)
            for (k = 1; k <= n && k <= 8; k *= 2) {
                mixture.router.n_experts = mixture.zeros = (uint16_t)n;
                mixture.router.top_k = mixture.router.most = (uint16_t)k;
                mixture.router.select = moei_int_select_logits;
                mixture.router.weight = moei_int_weight_one;
                mixture.z = 0;
                mixture.p = 256;
                mixture.sum = 512;
                mixture.choices = 1024;
                mixture.router.tokens = 0;
                mixture.block = MOEI_INT_NONE;
                printf("minus moei_int_select_logits %u %u %u\n", n, k, n * k);
                printf("minus moei_int_weight_one %u %u %u\n", n, k, n * k);
                measure("moei_int_op_mixture", op_of(moei_int_op_mixture, widths[i], 0), widths[i], k, k * k);
            }
}

static void calls(int reals) {
    unsigned i, j;
    memset(scratch, 0, sizeof scratch);
    for (i = 0; i < WIDTHS; i++)
        for (j = 0; j < 3; j++) {
            model.version = MOE_MODEL_VERSION;
            model.run = reals ? moei_float_ops_run : moei_int_model_run;
            model.weights_are = reals ? MOE_WEIGHTS_FLOAT : MOE_WEIGHTS_INT8;
            model.d_in = widths[i];
            model.d_out = widths[j];
            model.n_main = 1;
            model.scratch_size = sizeof scratch;
            ops[0] = op_of(reals ? moei_float_op_set_weight : moei_int_op_set_weight, 1, 0);
            ops[0].out = 0;
            printf("minus moei_%s_op_set_weight 1 4 4\n", reals ? "float" : "int");
            device_begin();
            (void)moe_infer(&model, NULL, constants, output, scratch, sizeof scratch);
            device_end();
            say(reals ? "moei_float_ops_run" : "moei_int_model_run", widths[i], widths[j], 0);
        }
}

#define CHOICES(name) \
    for (i = 2; i <= 32; i *= 2) \
        for (j = 1; j <= i && j <= 8; j *= 2) { \
            moei_int_op op = op_of(moei_float_op_##name, i, j); \
            op.shape.low = (int16_t)j; \
            choose(j); \
            measure("moei_float_op_" #name, op, i, j, i * j); \
        }
#define ACT(value, name, act, backward) ALONG(float, value)

static void reals(void) {
    unsigned i, j;
    PRODUCT(float, product)
    PRODUCT(float, product_add)
    ALONG(float, multiply)
    ALONG(float, add)
    ALONG(float, layer_norm)
    ALONG(float, rms_norm)
    ALONG(float, row)
    ALONG(float, apply_weight)
    ALONG(float, set_weight)
    choose(1);
    ALONG(float, add_rest)
    ALONG(float, softmax)
    ALONG(float, sqrt_softplus)
    MOE_ACTS(ACT)
    CHOICES(choose)
    CHOICES(weigh)
    CHOICES(weigh_sum)
    CHOICES(weigh_softmax)
    CHOICES(weigh_scale)
    for (i = 0; i < WIDTHS; i++) {
        mixture.router.n_experts = 4;
        mixture.router.most = 1;
        measure("moei_float_op_mixture", op_of(moei_float_op_mixture, widths[i], 0), widths[i], 1, 1);
    }
}

int main(void) {
    model.ops = ops;
    model.mixtures = &mixture;
    model.attentions = &attention;
    model.weights = model.experts = constants;
    mixture.block = MOEI_INT_NONE;
    fill(0);
    device_begin();
    moei_int_ops(&run, 0, 0);
    device_end();
    say("nothing", 0, 0, 0);
    integers();
    sequences();
    routers();
    memset(&mixture, 0, sizeof mixture);
    fill(0);
    mixtures();
    calls(0);
    memset(&mixture, 0, sizeof mixture);
    mixture.block = MOEI_INT_NONE;
    fill(1);
    reals();
    calls(1);
    printf("end\n");
    return 0;
}
