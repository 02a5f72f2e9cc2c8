/* eva_layer.c - an entry for Frama-C's Eva: a model of one MoE layer of up to 4 experts, in which
   operation OP stands, checked by moe_model_check and run by moe_infer. tests/quality/static.sh
   runs it; no program. What eva_infer.c says holds here too, but for:

   The layer is 8 wide; the input is z and what experts read. It takes the 1 to TAKEN experts of the
   largest logits, in any order, with any weights within int16. OP stands
     by itself         in the list of the experts, up to D wide; SHARED: also in that of the shared
                       expert
     with GROUP        the same for products, of one expert and up to WIDEST outputs: its block is
                       read at 0, or at its end
     with AFTER        behind the layer, whose choices it reads, of which up to 5
     with SCORE        before the router: with one operation behind it, it makes the logits of every
                       expert, of EXPERTS, with factor2 from -1 to 15
     with ROUTER       it is the layer: that selection, all gates and shares (sqrt_softplus with
                       ROOTS = 2), the weights in `weights` or WEIGHT, all numbers and no tables but
                       `scales` at 0. GROUPS: in all numbers of groups. TOKENS, which is for the
                       hash: for any token, also those that must be refused, and every table of up
                       to TOKENS rows. OVER, which is for the weights `over`: those over some
                       choices are OVER, by two of the gates; all ranges of experts that keep
                       theirs, by both of its gates.
   An index that leaves its vector, but not the scratch memory, is no alarm.
   Bounds by hand are those of eva_infer.c. */

#define MOE_NO_FLOAT
#define MOE_IMPLEMENTATION
#include "__fc_builtin.h"
#include <stddef.h>
#include <stdint.h>

/*@ assigns \result \from scratch;
    ensures \result == (unsigned char *)scratch; */
static unsigned char *moei_int_scratch(void *scratch);

#ifdef GROUP
#define MOEI_FLASH_WORDS 1 /* so that Eva sees biases where it would see bytes */
#endif
#include "moe.h"
#include "moe_check.h"

#ifndef TAKEN
#define TAKEN 4
#endif

#ifdef GROUP
#define EXPERTS 1
#elif !defined EXPERTS
#define EXPERTS 4
#endif

enum { E = EXPERTS, D = 8, CONSTANTS = 72, MOST = (1 << 30) - (1 << 25) };
enum { OUT = 8, Z = 16, INNER = 24, P = 32, CHOICES = 58, SUM = 72 };
#ifdef GROUP
enum { BLOCK = 160, ROOM = SUM + 2 * D, CELLS = ROOM + 4 * D };
#else
enum { BLOCK = 64, ROOM = CHOICES, CELLS = SUM + 2 * D };
#endif

static uint32_t scratch[CELLS / 2 + 1];
static unsigned char constants[CONSTANTS], experts[E * BLOCK];
static moei_int_op ops[3];
static moei_int_mixture mixture;
static moe_model model;
static int8_t input[D];
#ifdef TOKENS
static int32_t token;
#endif

static int32_t any(int low, int high) { return Frama_C_interval(low, high); }

static void op_of(moei_int_op *op, void (*run)(const moei_int_op *op, moei_int_run *run), unsigned n, unsigned k) {
    op->run = run;
    op->shape.n = (uint16_t)n;
    op->shape.k = (uint16_t)k;
    op->shape.low = (int16_t)any(-32768, 32767);
    op->shape.high = (int16_t)any(-32768, 32767);
    op->shape.shift = (uint8_t)any(0, 255);
    op->factor = (int16_t)any(-FACTORS, FACTORS);
    op->factor2 = (int16_t)any(-FACTORS, FACTORS);
    op->index = (uint16_t)any(0, 65535);
}

#ifndef WIDEST
#define WIDEST D
#endif

#ifndef VALUES
#define VALUES moei_int_gate_logits
#endif

/* The top_k largest logits; weights are any int16. */
static void router_of(moei_int_router *r, unsigned top_k) {
    r->select = moei_int_select_logits;
    r->values = VALUES;
    r->weight = moei_int_weight_raw;
    r->scale = moei_int_scale_weights;
    r->n_experts = E;
    r->top_k = (uint16_t)top_k;
    r->most = r->top_k;
    r->scratch = E;
    r->weight_shift = (uint8_t)any(0, 255);
    r->bias = MOEI_INT_NONE;
    r->thresholds = MOEI_INT_NONE;
    r->scales = 0;
}

static void model_of(unsigned top_k) {
    op_of(&ops[0], moei_int_op_mixture, D, 0);
    ops[0].out = OUT;
    mixture.experts = 0;
    mixture.stride = BLOCK;
    mixture.z = 0;
    mixture.p = P;
    mixture.sum = SUM;
    mixture.choices = CHOICES;
    mixture.block = MOEI_INT_NONE;
    mixture.zeros = mixture.copies = mixture.constants = E;
    router_of(&mixture.router, top_k);
    model.version = MOE_MODEL_VERSION;
    model.weights_are = MOE_WEIGHTS_INT8;
    model.run = moei_int_model_run;
    model.choices = moei_int_model_choices;
    model.d_in = D;
    model.d_out = D;
    model.scratch_size = 3 + 2 * CELLS;
    model.weights = constants;
    model.weights_size = CONSTANTS;
    model.experts = experts;
    model.experts_size = E * BLOCK;
    model.ops = ops;
    model.n_ops = 3;
    model.n_main = 1;
    model.mixtures = &mixture;
    model.n_mixtures = 1;
}

/* Of groups of GROUP outputs, which have `size` bytes each. */
static void biases(unsigned char *at, unsigned n, unsigned size) {
#ifdef GROUP
    unsigned i;
    for (i = 0; i < (n + GROUP - 1) / GROUP * GROUP; i++)
        *(int32_t *)(void *)(at + i / GROUP * size + i % GROUP * 4) = any(-MOST, MOST);
#endif
}

/* OP in the lists of the experts and of the shared expert. */
static void adds(unsigned n, unsigned k) {
    mixture.expert = mixture.n_expert = 1;
#ifdef SHARED
    mixture.shared = mixture.n_shared = 1;
#endif
    op_of(&ops[1], OP, n, k);
    ops[1].in = 0;
    ops[1].out = SUM;
    ops[1].other = ROOM;
    ops[1].at = (uint32_t)Frama_C_unsigned_int_interval(0, 0xffffffffu);
}

#ifdef ROUTER
#ifndef ROOTS
#define ROOTS 0
#endif

enum { GATES = 10, OTHERS = 2 };
static moei_int_gate *const gates[GATES] = {
    moei_int_gate_sqrt_softplus, moei_int_share_sqrt_softplus, moei_int_gate_logits,   moei_int_gate_relu,
    moei_int_gate_softmax,       moei_int_gate_sigmoid,        moei_int_gate_predicted, moei_int_share_softmax,
    moei_int_share_sigmoid,      NULL};
static moei_int_weight *const weights[] = {moei_int_weight_raw, moei_int_weight_sum, moei_int_weight_softmax,
                                           moei_int_weight_uniform, moei_int_weight_one};
#ifndef WEIGHT
#define WEIGHT weights[Frama_C_interval_split(0, 4)]
#endif

/* part 0: no gate is sqrt_softplus, for which the check reads z_bits; 1: that of the selection is;
   2: that of the weights. */
static void any_router(moei_int_router *r, int part) {
    r->gate = gates[part == 1 ? any(0, OTHERS - 1) : any(part == 0 ? OTHERS : 0, GATES - 1)];
    r->values = gates[part == 2 ? any(0, OTHERS - 1) : any(part == 0 ? OTHERS : 0, GATES - 1)];
    r->scale = any(0, 1) ? moei_int_scale_weights : NULL;
    r->most = E;
    r->scratch = 2 * E;
    r->groups = (uint16_t)any(0, 65535);
    r->groups_kept = (uint16_t)any(0, 65535);
    r->factor = (int16_t)any(-32768, 32767);
    r->z_bits = (uint8_t)any(0, 255);
    r->flags = (uint8_t)any(0, 255);
    r->threshold = any(-2147483647 - 1, 2147483647);
}

#ifdef OVER
/* `from` and `end` as they are, E for itself and all above; end == from: none is kept. */
static void kept_of(moei_int_router *r, int from, int end) {
    r->values = any(0, 1) ? moei_int_gate_logits : moei_int_share_softmax;
    r->over = OVER;
    r->kept = any(0, 1) ? moei_int_gate_softmax : moei_int_gate_sigmoid;
    r->kept_from = (uint16_t)(from < E ? from : any(E, 65535));
    r->kept_end = (uint16_t)(end == from ? any(0, from) : end < E ? end : any(E, 65535));
}
#endif
#endif

#ifdef TOKENS
enum { TABLE = CONSTANTS - TOKENS * E };

/* A row of 4 codes makes the logits. The first `good` choices of up to TOKENS tokens are experts,
   the next is none: the check must refuse it if there are more. */
static void hash_of(moei_int_router *r, int tokens, int good) {
    int i;
    r->tokens = tokens > 0 ? tokens : any(-2147483647 - 1, 0);
    r->table = TABLE;
    for (i = 0; i < good; i++) constants[TABLE + i] = (unsigned char)any(0, E - 1);
    if (good < tokens * r->top_k) constants[TABLE + good] = (unsigned char)any(E, 255);
    model.d_in = 0;
    mixture.score = mixture.n_score = 1;
    op_of(&ops[1], moei_int_op_row, E, TOKENS);
    ops[1].out = 0;
    ops[1].at = 0;
}
#endif

/* OP behind the layer. */
static void after(unsigned n) {
    op_of(&ops[1], OP, n, D);
    ops[1].in = 0;
    ops[1].out = INNER;
    ops[1].other = CHOICES;
    ops[1].at = (uint32_t)Frama_C_unsigned_int_interval(0, 0xffffffffu);
    model.n_main = 2;
    model.d_out = n;
}

/* OP makes the logits. */
static void score(unsigned n) {
    mixture.score = mixture.n_score = 1;
    mixture.z = Z;
    op_of(&ops[1], OP, n, 1);
    ops[1].in = INNER;
    ops[1].out = Z;
    ops[1].other = 0;
    ops[1].at = (uint32_t)Frama_C_unsigned_int_interval(0, 0xffffffffu);
    op_of(&ops[2], moei_int_op_rescale, D, D);
    ops[2].shape.low = -32767;
    ops[2].shape.high = 32767;
    ops[2].out = INNER;
}

/* What does not differ from case to case comes first: behind, it would be drawn in every case. */
int main(void) {
    int16_t output[D];
    unsigned i, n, top_k;
    int part;
    for (i = 0; i < D; i++) input[i] = (int8_t)any(-127, 127);
    for (i = 0; i < CONSTANTS; i++) constants[i] = (unsigned char)any(0, 255);
    for (i = 0; i < E * BLOCK; i++) experts[i] = (unsigned char)any(0, 255);
    top_k = (unsigned)Frama_C_interval_split(1, TAKEN);
    model_of(top_k);
#if defined AFTER
    n = (unsigned)Frama_C_interval_split(1, D);
    part = Frama_C_interval_split(0, 1);
    after(n);
    ops[1].factor2 = (int16_t)(part ? any(2, E + 1) : any(-32768, 1));
#elif defined ROUTER
    n = D;
    any_router(&mixture.router, Frama_C_interval_split(0, ROOTS));
#ifdef GROUPS
    part = Frama_C_interval_split(0, E + 1);
    mixture.router.groups = (uint16_t)(part <= E ? part : any(E + 1, 65535));
#endif
    mixture.router.select = ROUTER;
#ifdef OVER
    part = Frama_C_interval_split(0, E);
    kept_of(&mixture.router, part, Frama_C_interval_split(part, E));
#endif
    mixture.router.weight = WEIGHT;
#ifdef TOKENS
    part = Frama_C_interval_split(0, TOKENS);
    hash_of(&mixture.router, part, Frama_C_interval_split(0, part * (int)top_k));
#endif
#elif defined SCORE
    part = Frama_C_interval_split(0, 3); /* n up to 1, 2, 4 or 8 */
    n = (unsigned)any((1 << part) / 2 + 1, 1 << part);
    part = Frama_C_interval_split(-1, 15);
    score(n);
    ops[1].factor2 = (int16_t)part;
#elif defined GROUP
    n = (unsigned)Frama_C_interval_split(1, WIDEST);
    part = Frama_C_interval_split(1, D);
    adds(n, (unsigned)part);
    ops[1].at = Frama_C_interval_split(0, 1) != 0 ? BLOCK : 0; /* the end: the check must refuse it */
    biases(experts, n, (GROUP == 2 ? 12 : 32) + 2 * (((unsigned)part + 3) / 4 * 4));
#else
    n = (unsigned)any(1, D);
    part = Frama_C_interval_split(0, 1);
    adds(n, D);
    ops[1].shape.shift = (uint8_t)(part ? any(16, 255) : any(0, 15));
#endif
    if (moe_model_check(&model, NULL, scratch, sizeof scratch, NULL) != MOE_OK) return 1;
#ifdef TOKENS
    token = Frama_C_interval_split(-1, TOKENS);
    if (token == -1) token = any(-2147483647 - 1, -1);
    if (token == TOKENS) token = any(TOKENS, 2147483647);
    return moe_infer(&model, NULL, &token, output, scratch, sizeof scratch);
#else
    return moe_infer(&model, NULL, input, output, scratch, sizeof scratch);
#endif
}
