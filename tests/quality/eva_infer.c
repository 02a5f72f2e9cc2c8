/* eva_infer.c - an entry for Frama-C's Eva: a model of one operation OP, checked by moe_model_check
   and run by moe_infer. tests/quality/static.sh runs it; no program.

   Eva follows ranges of values, so one run stands for every input within +-127, every byte of the
   constants, every shift, limit, factor and index, and for all widths from 1 to D (where GROUP is
   given, of inputs too). With HEADS, which is for rotate, it stands for all divisions of the width
   into heads and every place in sequences of that many tokens; with UNIT, which is for unit, for
   every `at`. With LENGTH, which is for attention, it stands for every place in sequences of that
   many tokens, any keys and values of earlier ones, and all divisions of the width into heads;
   query, key and value are the input. With VARY, D wide, the run stands for all offsets of that
   vector or table.
   No alarm means: the check itself has no runtime error for any of them, and moe_infer has none
   where it accepts. Bounds are put in by hand, because Eva loses sums and products of several
   unknowns, which the check compares: biases of products within +-MOST (the check accepts those
   below 2^30), and FACTORS; cosines and sines are above -32768, the one value that the check
   refuses. The constants fill their array: reading one byte more is an alarm.

   All 25 operations but the layer norm are proved, here or in eva_layer.c, mixture for the routers
   named there, row with TOKENS for any token; products and rotate where constants are read as words
   (little endian), not as bytes. NORM is a root mean square norm, in parts by where the largest
   input stands: it bounds the sum of squares from below. For a layer norm (index = 1) that is not
   enough: that n sum x^2 - (sum x)^2 bounds each n x_p - sum x is a fact about all inputs together,
   and Eva knows the range of each. */

#define MOE_NO_FLOAT
#define MOE_IMPLEMENTATION
#include "__fc_builtin.h"
#include <stddef.h>
#include <stdint.h>

/* Scratch memory below is aligned, so its first aligned address is its own: Eva knows nothing of
   the bits of an address. */
/*@ assigns \result \from scratch;
    ensures \result == (unsigned char *)scratch; */
static unsigned char *moei_int_scratch(void *scratch);

#if defined HEADS || defined GROUP
#define MOEI_FLASH_WORDS 1 /* so that Eva sees numbers where it would see bytes */
#endif
#include "moe.h"
#include "moe_check.h"

#ifndef LENGTH
#define LENGTH 0
#endif
#ifndef WIDEST
#define WIDEST D
#endif

enum { D = 8, CELLS = 80, CONSTANTS = 320, MOST = (1 << 30) - (1 << 25), STATE = LENGTH > 0 ? 4 + 2 * LENGTH * D : 0 };

static uint32_t scratch[CELLS / 2 + STATE / 4 + 2];
static moei_int_attention attention;
static unsigned char constants[CONSTANTS];
static moei_int_op op;
static moe_model model;

static int32_t any(int low, int high) { return Frama_C_interval(low, high); }

/* Of groups of GROUP outputs, which have `size` bytes each. */
static void biases(unsigned n, unsigned size) {
#ifdef GROUP
    unsigned i;
    for (i = 0; i < (n + GROUP - 1) / GROUP * GROUP; i++)
        *(int32_t *)(void *)(constants + i / GROUP * size + i % GROUP * 4) = any(-MOST, MOST);
#endif
}

static void model_of(unsigned n, unsigned k) {
    op.run = OP;
    op.shape.n = (uint16_t)n;
    op.shape.k = (uint16_t)k;
    op.shape.low = (int16_t)any(-32768, 32767);
    op.shape.high = (int16_t)any(-32768, 32767);
    op.shape.shift = (uint8_t)any(0, 255);
    op.other = 16;
    op.out = 48;
    op.factor = (int16_t)any(-FACTORS, FACTORS);
    op.factor2 = (int16_t)any(-FACTORS, FACTORS);
    op.index = (uint16_t)any(0, 65535);
    model.version = MOE_MODEL_VERSION;
    model.weights_are = MOE_WEIGHTS_INT8;
    model.run = moei_int_model_run;
    model.choices = moei_int_model_choices;
    model.d_in = D;
    model.d_out = n;
    model.scratch_size = 3 + 2 * CELLS + STATE;
    model.weights = constants;
    model.weights_size = CONSTANTS;
    model.ops = &op;
    model.n_ops = model.n_main = 1;
}

/* n / k heads, which the check refuses where k does not divide n. */
static void attention_of(unsigned n, unsigned k) {
    op.other = 0;
    attention.heads = (uint16_t)(n / k);
    attention.d_head = (uint16_t)k;
    attention.bits = (uint16_t)any(0, 255);
    attention.keys = 4;
    attention.values = 4 + LENGTH * D;
    attention.room = 64;
    model.length = LENGTH;
    model.state_size = STATE;
    model.attentions = &attention;
    model.n_attentions = 1;
}

static uint32_t wide(uint32_t low, uint32_t high) { return Frama_C_unsigned_int_interval(low, high); }

/* All of them, in parts within which Eva sees what the sum of squares may carry. */
static void unit_of(unsigned n, int at, int shift) {
    const uint32_t top = 0xffffffffu - n * 16129u; /* more leaves 32 bits */
    op.at = at == 0                         ? wide(0, 0xfffdffffu)
            : at == 1                       ? wide(0xfffe0000u, top < 0xffff0000u ? top : 0xfffeffffu)
            : at == 2 && top >= 0xffff0000u ? wide(0xffff0000u, top)
                                            : wide(top + 1, 0xffffffffu);
    op.shape.shift = (uint8_t)(shift == 0 ? any(0, 15) : shift == 1 ? 16 : any(17, 255));
}

/* A sequence of which some tokens have passed. */
static void earlier_tokens(void) {
    signed char *state = (signed char *)scratch;
    int i;
    scratch[0] = (uint32_t)Frama_C_interval_split(0, LENGTH - 1);
    for (i = 4; i < STATE; i++) state[i] = (signed char)any(-127, 127);
}

static int8_t input[D];
#ifdef TOKENS
static int32_t token;
#endif

static void inputs(void) {
    int i;
    for (i = 0; i < D; i++) input[i] = (int8_t)any(-127, 127);
    for (i = 0; i < CONSTANTS; i++) constants[i] = (unsigned char)any(0, 255);
#ifdef HEADS
    for (i = 0; i < CONSTANTS / 2; i++) ((int16_t *)(void *)constants)[i] = (int16_t)any(-32767, 32767);
#endif
}

#ifdef NORM
/* No layer norm. Parts 0 to 2 have all factors; the check must refuse the others: factors below and
   above, another index, constants of 2^61 or more (6: whose upper half is a negative number). */
static void norm_of(int part) {
    const int most = part == 5 ? 127 : part == 6 ? 255 : 31;
    op.index = (uint16_t)(part == 7 ? any(2, 65535) : 0);
    op.factor = (int16_t)(part < 3    ? any(3 * part, 3 * part + 2)
                          : part == 3 ? any(-FACTORS, -1)
                          : part == 4 ? any(9, FACTORS)
                                      : any(0, 8));
    constants[7] = (unsigned char)any(part == 5 ? 32 : part == 6 ? 128 : 0, most);
}

/* Code number `largest` is: 0, or within +-[1, 15] or +-[16, 127] by part. */
static void input_of(int largest, int part) {
    const int most = part == 0 ? 0 : part * part == 1 ? 15 : 127, least = part * part == 1 ? 1 : 16;
    int i;
    for (i = 0; i < D; i++) input[i] = (int8_t)any(-most, most);
    if (part < 0) input[largest] = (int8_t)any(-most, -least);
    if (part > 0) input[largest] = (int8_t)any(least, most);
}
#endif

/* Inputs and constants come first: behind, they would be drawn in every case. */
int main(void) {
    int16_t output[D];
    inputs();
#ifdef VARY
    model_of(D, D);
    op.VARY = (uint32_t)Frama_C_interval_split(0, CONSTANTS);
#else
    const unsigned n = (unsigned)Frama_C_interval_split(1, WIDEST);
#if defined GROUP || LENGTH > 0
    const unsigned k = (unsigned)Frama_C_interval_split(1, D);
    model_of(n, k);
#ifdef GROUP
    biases(n, (GROUP == 2 ? 12 : 32) + 2 * ((k + 3) / 4 * 4));
#else
    attention_of(n, k);
#endif
#else
    model_of(n, D);
#endif
#ifdef HEADS
    op.shape.k = (uint16_t)Frama_C_interval_split(1, D);
    op.shape.shift = (uint8_t)any(0, 255);
    op.at = any(0, 1) != 0 ? CONSTANTS : 0; /* behind the constants: the check must refuse it */
    model.length = HEADS;
    model.state_size = 4;
#endif
#ifdef TOKENS
    model.d_in = 0;
#endif
#ifdef NORM
    int part = Frama_C_interval_split(0, 7);
    norm_of(part);
#endif
#ifdef UNIT
    unit_of(n, Frama_C_interval_split(0, 3), Frama_C_interval_split(0, 2));
#endif
#endif
    if (moe_model_check(&model, NULL, scratch, sizeof scratch, NULL) != MOE_OK) return 1;
#if LENGTH > 0
    earlier_tokens();
#endif
#ifdef NORM
    part = Frama_C_interval_split(-2, 2);
    input_of(Frama_C_interval_split(0, (int)n - 1), part);
#endif
#ifdef HEADS
    scratch[0] = (uint32_t)any(0, HEADS);
#endif
#ifdef TOKENS
    token = Frama_C_interval_split(-1, D);
    if (token == -1) token = any(-2147483647 - 1, -1);
    if (token == D) token = any(D, 2147483647);
    return moe_infer(&model, NULL, &token, output, scratch, sizeof scratch);
#else
    return moe_infer(&model, NULL, input, output, scratch, sizeof scratch);
#endif
}
