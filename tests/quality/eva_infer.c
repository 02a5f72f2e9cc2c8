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

   All 25 operations are proved, here or in eva_layer.c, mixture for the routers named there, row
   with TOKENS for any token; products, norm and rotate where constants are read as words (little
   endian), not as bytes.
   NORM, which is for norm, stands for both norms and for every eps, gain, bias, factor and shift.
   One thing is taken for granted, in a copy of moe.h: |v_p| <= 2^(25 + e), a fact about all inputs
   together, of which Eva knows the range of each. eva_norm.c proves it for up to 8 inputs. */

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

#if defined HEADS || defined GROUP || defined NORM
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
/* 4^(e + 15) <= d < 4^(e + 16): so e never falls when d grows. */
static void roots(void) {
    const int k = Frama_C_interval_split(0, 31);
    const uint64_t least = (uint64_t)1 << 2 * k;
    int e;
    moei_int_inverse_root(Frama_C_unsigned_long_interval(least, least * 4 - 1), &e);
    /*@ assert e == k - 15; */
}

static void bias_of(unsigned n, unsigned p, int32_t low, int32_t high) {
    ((int32_t *)(void *)constants)[2 + (n + 1) / 2 + p] = any(low, high);
}

/* The check must refuse all but part 0: factors below (1) and above (2), eps of 2^61 or more (3,
   and 4, whose upper half is a negative number), bias number p above (5) and below (6) what the
   shift leaves room for, another index (7), and shifts above 30. Shifts up to 29 (29) leave more
   room than 30 does. */
static void norm_of(unsigned n, int shift, int part, unsigned p) {
    const int end = shift == 30 ? 1 << 30 : 3 << 29, high = 1 << 29;
    unsigned i;
    op.shape.shift = (uint8_t)(shift == 29 ? any(0, 29) : shift == 30 ? 30 : any(31, 255));
    op.index = (uint16_t)(part < 5 ? any(0, 1) : part < 7 ? 1 : any(2, 65535));
    op.factor = (int16_t)(part == 1 ? any(-FACTORS, -1) : part == 2 ? any(9, FACTORS) : any(0, 8));
    ((int32_t *)(void *)constants)[1] = part == 3   ? any(high, 2147483647)
                                        : part == 4 ? any(-2147483647 - 1, -1)
                                                    : any(0, high - 1);
    for (i = 0; i < n; i++) bias_of(n, i, 1 - end, end - 1);
    if (part == 5) bias_of(n, p, end, 2147483647);
    if (part == 6) bias_of(n, p, -2147483647 - 1, -end);
}
#endif

/* Inputs and constants come first: behind, they would be drawn in every case. */
int main(void) {
    int16_t output[D];
    inputs();
#ifdef NORM
    roots();
#endif
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
    const int shift = Frama_C_interval_split(29, 31), part = Frama_C_interval_split(0, 7);
    const unsigned p = (unsigned)Frama_C_interval_split(0, part == 5 || part == 6 ? (int)n - 1 : 0);
    norm_of(n, shift, part, p);
#endif
#ifdef UNIT
    unit_of(n, Frama_C_interval_split(0, 3), Frama_C_interval_split(0, 2));
#endif
#endif
    if (moe_model_check(&model, NULL, scratch, sizeof scratch, NULL) != MOE_OK) return 1;
#if LENGTH > 0
    earlier_tokens();
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
