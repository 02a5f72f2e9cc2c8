/* moe_check.h - is an inference model safe to run?

   An extra of moe.h. moe_infer trusts its model: it does not check offsets, sizes, shifts and table
   indices. moe_model_check reads a model from an untrusted source, and accepts it only if moe_infer
   cannot access memory outside its arrays and no sum can overflow. MIT or public domain, as moe.h.

   Contents (search for the tag)
     >>call        moe_model_check
     >>private     the implementation, in the order of the data:
       >>ranges       the vectors in scratch memory, and how large their codes can be
       >>constants    what products, norms and rotations read
       >>operations   one operation
       >>routers      integer routers
       >>mixtures     MoE layers and lists of operations
       >>floats       float models
       >>models       the whole model

   Recipe
     1. Copy moe_check.h into your project, beside moe.h.
     2. Include it after moe.h. Where MOE_IMPLEMENTATION is defined, it brings its implementation.
     It needs no option and no other extra. On a device it costs flash: it references all operations
     of integer models, so the linker keeps them. It is often better to check on the machine that
     builds the firmware.

   First program: a model of one product, checked, run, and refused when its shift is wrong.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "moe_check.h"
 * #include <stdio.h>
 *
 * // y = (x0 + 2 x1) / 4: bias 0 and 0, factor 16384 (1/4) and 0, codes 1 and 2, then padding
 * static const unsigned char weights[20] MOE_FLASH = {
 *     0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0};
 *
 * int main(void) {
 *     static unsigned char scratch[64];
 *     static moei_int_op op;
 *     static moe_model model;
 *     moe_error error;
 *     int8_t input[2] = {20, 30};
 *     int16_t output[1];
 *     op.run = moei_int_op_int8;
 *     op.shape.n = 1; // outputs
 *     op.shape.k = 2; // inputs
 *     op.shape.low = -32767;
 *     op.shape.high = 32767;
 *     op.out = 4; // after the input, in units of int16
 *     model.version = MOE_MODEL_VERSION;
 *     model.weights_are = MOE_WEIGHTS_INT8;
 *     model.run = moei_int_model_run;
 *     model.choices = moei_int_model_choices;
 *     model.d_in = 2;
 *     model.d_out = 1;
 *     model.scratch_size = 3 + 2 * 8;
 *     model.weights = weights;
 *     model.weights_size = sizeof weights;
 *     model.ops = &op;
 *     model.n_ops = model.n_main = 1;
 *     if (moe_model_check(&model, NULL, scratch, sizeof scratch, &error))
 *         return printf("%s\n", error.message);
 *     if (moe_infer(&model, NULL, input, output, scratch, sizeof scratch)) return 1;
 *     printf("(20 + 2 * 30) / 4 = %d\n", output[0]);
 *     op.shape.shift = 40;
 *     if (!moe_model_check(&model, NULL, scratch, sizeof scratch, &error)) return 1;
 *     printf("refused: %s\n", error.message);
 *     return 0;
 * }
 * --- end ---

   Options: those of moe.h. MOE_NO_FLOAT leaves out float models. With MOE_NO_MESSAGES an error has
   its code and no text.

   Manual
     What is checked.   Integer models: every operation, in the order in which moe_infer runs them,
     with every constant that it reads, including those of experts that a loader fetches. The check
     tracks the largest magnitude of every vector (the limits of the operation that wrote it last),
     and bounds each sum by it: sum |weight| * largest code + |bias|, and the sum of an MoE layer by
     the largest number of experts per token, at the largest weight. A model whose sums could exceed
     int32 is refused, even if its real inputs never make them. moe_model_create makes no such
     model. Float models: the network's modules, their settings and widths, that every parameter is
     present and finite, that kernels are NULL or a table that moe_kernels_select returns here, and
     the sizes of scratch memory.

     What is not checked.   Pointers: the arrays of a model must have the lengths that it states
     (weights_size bytes, n_ops operations; the parameters of a float model the shapes of its
     modules), as arrays compiled from C source have, and scratch memory scratch_size bytes.
     input_scale, output_scale and multiplications are informative; any value is accepted. The
     quality of the outputs is not checked.

     Scratch.   The check works in the scratch memory of the model and needs no other. It leaves
     scratch memory zeroed, which is the state at the start of a sequence.

     When.   Once, before the first moe_infer: the model must not change afterwards, nor the bytes
     that the loader fetches. It takes about as long as moe_infer with all experts chosen; models
     with rotations take length * d_head steps more.

     Errors, NULL and promises are as in moe.h. Threads: there are no globals; calls with different
     scratch memory may run at the same time.
*/
#ifndef MOE_H
#error "moe_check.h: include moe.h before it"
#endif

#ifndef MOE_CHECK_H
#define MOE_CHECK_H

#if MOE_REAL_IS_DOUBLE
#define moe_model_check moe_model_check_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>call ================================================================================== */

/* MOE_OK: moe_infer with this model, this loader and this much scratch memory reads and writes only
   the arrays that it is given, does not divide by 0, and no signed sum or shift overflows its type,
   for any input codes within +-127 and any token id. scratch [scratch_size], any alignment, is the
   workspace, and zeroed afterwards. loader as for moe_infer. Errors; error (may be NULL) names the
   operation and its field:
     MOE_ERR_ARGUMENT     model or scratch is NULL
     MOE_ERR_UNSUPPORTED  another version; experts that need a loader; a float model that is a list
                          of operations, or in a build with MOE_REAL=double or MOE_NO_FLOAT
     MOE_ERR_SPACE        scratch_size is smaller than the model's
     MOE_ERR_FORMAT       an offset, size, index, shift or function is not valid
     MOE_ERR_OVERFLOW     a sum can overflow its integer type
     MOE_ERR_NONFINITE    a parameter of a float model is infinite or NaN
   else what the loader returns, or what moe_layer_check returns for an MoE layer. */
MOE_API moe_status moe_model_check(const moe_model *model, const moe_loader *loader, void *scratch,
                                   size_t scratch_size, moe_error *error);

#ifdef __cplusplus
}
#endif
#endif /* MOE_CHECK_H */

/* ==== >>private =============================================================================== */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_CHECK_IMPLEMENTED)
#define MOEI_CHECK_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>ranges: vectors and how large their codes can be ---- */

/* Instead of codes, the vectors in scratch memory hold a uint16 for each: the largest magnitude
   that the code may have. ANY: unknown. ROUTED marks the choices of a router, which nothing may
   overwrite until the next call. */
enum { MOEI_CHECK_ANY = 32768, MOEI_CHECK_ROUTED = 65535 };

/* The lists of operations; ADDING: those that add to the sum of an MoE layer. */
enum {
    MOEI_CHECK_MAIN = 1,
    MOEI_CHECK_SCORE = 2,
    MOEI_CHECK_EACH = 4,
    MOEI_CHECK_EXPERT = 8,
    MOEI_CHECK_SHARED = 16,
    MOEI_CHECK_ADDING = 24,
    MOEI_CHECK_ALL = 31
};

/* int16 [n] from `at` in the vectors. */
typedef struct moei_check_span {
    uint32_t at, n;
} moei_check_span;

typedef struct moei_check {
    const moe_model *model;
    const moe_loader *loader;
    uint16_t *most; /* [n] instead of the vectors */
    size_t n;
    const unsigned char *base; /* [base_size] the operation's constants */
    size_t base_size;
    int list;                        /* the list of this operation */
    const moei_int_mixture *mixture; /* the MoE layer that is running */
    size_t index;                    /* its number */
    size_t main;                     /* operations of the main list that have run */
    moei_check_span sum, block;      /* of that layer: vectors may not overlap them; n = 0: none */
    int64_t added;                   /* the most that the current list adds to the sum */
    const char *what;                /* for errors: "op", its number and name */
    size_t number;
    const char *name;
    moe_error *error;
} moei_check;

/* Appends to a message of *at characters. Builds without floating point have no moei_error. */
static void moei_check_say(moe_error *error, size_t *at, const char *text) {
#ifdef MOE_NO_MESSAGES
    (void)text;
#else
    while (*text != '\0' && *at + 1 < sizeof error->message) error->message[(*at)++] = *text++;
#endif
    error->message[*at] = '\0';
}

static moe_status moei_check_refuse(const moei_check *c, moe_status code, const char *field, const char *why) {
    char digits[24];
    size_t at = 0, rest = c->number;
    size_t i = sizeof digits - 1;
    if (c->error == NULL) return code;
    digits[i] = '\0';
    do {
        digits[--i] = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest > 0);
    c->error->code = code;
    moei_check_say(c->error, &at, c->what);
    moei_check_say(c->error, &at, " ");
    moei_check_say(c->error, &at, digits + i);
    moei_check_say(c->error, &at, c->name);
    moei_check_say(c->error, &at, ": ");
    moei_check_say(c->error, &at, field);
    moei_check_say(c->error, &at, ": ");
    moei_check_say(c->error, &at, why);
    return code;
}

#define MOEI_CHECK_NEED(condition, field, why) \
    do { \
        if (!(condition)) return moei_check_refuse(c, MOE_ERR_FORMAT, field, why); \
    } while (0)
#define MOEI_CHECK_FITS(condition, field) \
    do { \
        if (!(condition)) return moei_check_refuse(c, MOE_ERR_OVERFLOW, field, "a sum can overflow"); \
    } while (0)
#define MOEI_CHECK_DO(call) \
    do { \
        const moe_status done = (call); \
        if (done != MOE_OK) return done; \
    } while (0)

static uint32_t moei_check_up(uint32_t n, uint32_t to) { return (n + to - 1) / to * to; }

static moei_check_span moei_check_span_of(uint32_t at, uint32_t n) {
    moei_check_span s;
    s.at = at;
    s.n = n;
    return s;
}

static int moei_check_meet(moei_check_span a, moei_check_span b) {
    return a.at < (uint64_t)b.at + b.n && b.at < (uint64_t)a.at + a.n && a.n > 0 && b.n > 0;
}

/* Whether a span lies in the vectors, aligned to 4 bytes, because processors load words. */
static int moei_check_inside(const moei_check *c, moei_check_span s) {
    return s.at % 2 == 0 && s.at <= c->n && s.n <= c->n - s.at;
}

/* Fills a span that lies in the vectors. */
static void moei_check_fill(moei_check *c, moei_check_span s, unsigned most) {
    size_t i;
    for (i = 0; i < s.n; i++) c->most[s.at + i] = (uint16_t)most;
}

/* Whether a span that lies in the vectors may be overwritten: it holds no choices of a router. */
static int moei_check_free(const moei_check *c, moei_check_span s) {
    size_t i;
    for (i = 0; i < s.n; i++)
        if (c->most[s.at + i] > MOEI_CHECK_ANY) return 0;
    return 1;
}

/* Sets *most (unless NULL) to the largest magnitude of n codes, which must be at most limit. */
static moe_status moei_check_read(const moei_check *c, const char *field, uint32_t at, uint32_t n, unsigned limit,
                                  int64_t *most) {
    const moei_check_span s = moei_check_span_of(at, n);
    unsigned found = 0;
    size_t i;
    MOEI_CHECK_NEED(moei_check_inside(c, s), field, "outside the vectors, or not aligned");
    for (i = 0; i < n; i++)
        if (c->most[at + i] > found) found = c->most[at + i];
    if (found > MOEI_CHECK_ANY || moei_check_meet(s, c->block) || moei_check_meet(s, c->sum)) found = MOEI_CHECK_ANY;
    MOEI_CHECK_NEED(found <= limit, field, "its codes may be larger than this operation allows");
    if (most != NULL) *most = found;
    return MOE_OK;
}

/* Records that n codes, padding included, have magnitudes of at most `most`. */
static moe_status moei_check_write(moei_check *c, const char *field, uint32_t at, uint32_t n, unsigned most) {
    const moei_check_span s = moei_check_span_of(at, n);
    MOEI_CHECK_NEED(moei_check_inside(c, s), field, "outside the vectors, or not aligned");
    MOEI_CHECK_NEED(!moei_check_meet(s, c->sum) && !moei_check_meet(s, c->block) && moei_check_free(c, s), field,
                    "overwrites a router's choices, a sum or the constants of an expert");
    moei_check_fill(c, s, most);
    return MOE_OK;
}

/* Checks the result of an operation. same: it may replace its input; else they may not overlap. */
static moe_status moei_check_result(moei_check *c, const moei_int_op *op, uint32_t n_in, int same) {
    const moei_int_shape *s = &op->shape;
    const int most = s->high > -s->low ? s->high : -s->low;
    const moei_check_span in = moei_check_span_of(op->in, n_in),
                          out = moei_check_span_of(op->out, moei_check_up(s->n, 4));
    MOEI_CHECK_NEED(s->low <= s->high && s->low >= -MOEI_CHECK_ANY + 1, "shape.low",
                    "must not exceed shape.high, nor be below -32767");
    MOEI_CHECK_NEED(!moei_check_meet(in, out) || (same && in.at == out.at), "out", "overlaps the input");
    return moei_check_write(c, "out", op->out, out.n, (unsigned)most);
}

/* ---- >>constants ---- */

/* size bytes of constants from `at` in a table of `room` bytes. */
static moe_status moei_check_bytes(const moei_check *c, const char *field, uint32_t at, uint64_t size, size_t room) {
    MOEI_CHECK_NEED(at % 4 == 0 && at <= room && size <= room - at, field,
                    "outside the constants, or not aligned");
    return MOE_OK;
}

static int64_t moei_check_size(int64_t v) { return v < 0 ? -v : v; }

/* sum |w| of output `side` of the pair at `pair`; -1: a weight exceeds 127. */
static int64_t moei_check_int8_row(const unsigned char *pair, uint32_t k, uint32_t side) {
    int64_t sum = 0;
    uint32_t p;
    for (p = 0; p < moei_check_up(k, 4); p++) {
        const int w = moei_int8_weight(pair, side, p);
        if (w < -127 || w > 127) return -1;
        sum += w < 0 ? -w : w;
    }
    return sum;
}

/* kept: the input's sums per block are read from memory, so only int16 bounds them. */
static int64_t moei_check_int4_row(const unsigned char *at, uint32_t k, uint32_t side, int kept) {
    const uint32_t k4 = moei_check_up(k, 4);
    int64_t sum = 0, part = 0;
    uint32_t p;
    for (p = 0, at += 16; p < k4; at += 2) {
        const int codes = (int16_t)(moei_flash_16(at) ^ 0x888), w = (int)((long)codes * (1 << (12 - 4 * (int)side)));
        part += moei_check_size((w & 0x7000) / 4096 - (w & 0x8000 ? 8 : 0));
        if (++p % MOEI_INT_BLOCK != 0 && p < k4) continue;
        if (moei_flash_16(at + 2 + 2 * side) < 0) return -1;
        if (kept) part = 259; /* 32768 / 127, rounded up */
        sum += part * moei_flash_16(at + 2 + 2 * side);
        part = 0;
        at += 8;
    }
    return sum;
}

/* The rows of a product. *most: the largest magnitude of sum * factor >> 16. |sum| < 2^30 is what
   moei_int8_pack and moei_int4_pack guarantee; then no partial sum overflows int32, whatever the
   order of addition: it starts at the bias, and 128 * 127 * 65532 more is below 2^31. */
static moe_status moei_check_product_rows(const moei_check *c, const moei_int_op *op, int int4, int64_t *most) {
    const uint32_t n = op->shape.n, k = op->shape.k;
    const uint32_t group = int4 ? 4 : 2;
    const size_t size = int4 ? moei_int4_four_size(k) : moei_int8_pair_size(k);
    uint32_t j;
    *most = 0;
    for (j = 0; j < (int4 ? moei_check_up(n, 4) : n); j++) {
        const unsigned char *at = c->base + op->at + j / group * size;
        const unsigned side = moei_int8_side(n, j);
        const int64_t row = int4 ? moei_check_int4_row(at, k, j % 4, op->index) : moei_check_int8_row(at, k, side);
        const int64_t sum = moei_check_size(moei_flash_32(at + 4 * (j % group))) + 127 * row;
        const int64_t factor = moei_flash_16(at + (int4 ? size - 8 + 2 * (j % 4) : moei_int8_factor_at(side)));
        MOEI_CHECK_NEED(row >= 0, "at", "a weight is beyond +-127, or the factor of a block is negative");
        MOEI_CHECK_NEED(factor >= 0, "at", "a factor of an output is negative");
        MOEI_CHECK_NEED(int4 || side < 2 || moei_flash_16(at + 6) == 0, "at", "no 0 after the last factor");
        MOEI_CHECK_FITS(sum < (int64_t)1 << 30, "at");
        if (sum * factor / 65536 + 1 > *most) *most = sum * factor / 65536 + 1;
    }
    return MOE_OK;
}

/* The input's sums per block, which an int4 product reads, or computes first. */
static moe_status moei_check_sums(moei_check *c, const moei_int_op *op) {
    const moei_check_span sums = moei_check_span_of(op->other, (op->shape.k + MOEI_INT_BLOCK - 1u) / MOEI_INT_BLOCK);
    MOEI_CHECK_NEED(op->index <= 1, "index", "must be 0 or 1");
    if (op->index == 1) return moei_check_read(c, "other", sums.at, sums.n, MOEI_CHECK_ANY, NULL);
    MOEI_CHECK_NEED(!moei_check_meet(sums, moei_check_span_of(op->in, moei_check_up(op->shape.k, 4))) &&
                        !moei_check_meet(sums, moei_check_span_of(op->out, moei_check_up(op->shape.n, 4))),
                    "other", "overlaps the input or the result");
    return moei_check_write(c, "other", sums.at, sums.n, MOEI_CHECK_ANY);
}

/* A product of 8-bit inputs. */
static moe_status moei_check_product(moei_check *c, const moei_int_op *op, int int4, int64_t *most) {
    const uint32_t n = op->shape.n, k = op->shape.k;
    const size_t size = int4 ? moei_int4_size(n, k) : moei_int8_size(n, k);
    MOEI_CHECK_NEED(k > 0 && size > 0, "shape.k", "must be 1 to 65532");
    MOEI_CHECK_DO(moei_check_bytes(c, "at", op->at, size, c->base_size));
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, moei_check_up(k, 4), 127, NULL));
    if (int4) MOEI_CHECK_DO(moei_check_sums(c, op));
    return moei_check_product_rows(c, op, int4, most);
}

/* See moei_int_op_norm: d < 2^62 makes its other bounds hold. */
static moe_status moei_check_norm(const moei_check *c, const moei_int_op *op, int64_t most) {
    const uint32_t n = op->shape.n, gains = 8 + moei_check_up(n, 2) * 2;
    const int64_t round = (int64_t)1 << op->shape.shift >> 1;
    const uint64_t squares = (uint64_t)n * n * (uint64_t)(most * most);
    const unsigned char *at;
    uint64_t eps;
    uint32_t p;
    MOEI_CHECK_NEED(n <= 32767, "shape.n", "must be at most 32767");
    MOEI_CHECK_NEED(op->index <= 1, "index", "must be 0 or 1");
    MOEI_CHECK_NEED(op->factor >= 0 && op->factor <= 8, "factor", "must be 0 to 8");
    MOEI_CHECK_DO(moei_check_bytes(c, "at", op->at, gains + (op->index != 0 ? 4 * n : 0), c->base_size));
    at = c->base + op->at;
    eps = (uint64_t)(uint32_t)moei_flash_32(at + 4) << 32 | (uint32_t)moei_flash_32(at);
    MOEI_CHECK_FITS(squares >> (61 - 2 * op->factor) == 0 && eps >> 61 == 0, "factor");
    for (p = 0; p < n && op->index != 0; p++)
        MOEI_CHECK_FITS(moei_check_size(moei_flash_32(at + gains + 4 * p)) + round < (int64_t)3 << 29, "at");
    return MOE_OK;
}

/* The numbers c and s of moei_int_op_rotate at every position. */
static moe_status moei_check_angles(const moei_check *c, const moei_int_op *op, int64_t most) {
    const uint32_t half = op->shape.k / 2u, length = c->model->length > 0 ? (uint32_t)c->model->length : 1;
    const uint32_t rows = MOEI_INT_ANGLES + (length - 1) / MOEI_INT_ANGLES + 1;
    const int64_t round = (int64_t)1 << op->shape.shift >> 1;
    const unsigned char *table;
    uint32_t place, i;
    MOEI_CHECK_NEED(half > 0 && op->shape.k % 2 == 0 && op->shape.n % op->shape.k == 0, "shape.k",
                    "must be even and divide shape.n");
    MOEI_CHECK_DO(moei_check_bytes(c, "at", op->at, (uint64_t)rows * half * 4, c->base_size));
    table = c->base + op->at;
    for (i = 0; i < rows * half * 2; i++)
        MOEI_CHECK_NEED(moei_flash_16(table + 2 * i) > -32768, "at", "a cosine or sine is -32768");
    for (place = 0; place < length; place++)
        for (i = 0; i < half; i++) {
            const unsigned char *at1 = table + (place % MOEI_INT_ANGLES * half + i) * 4;
            const unsigned char *at2 = table + ((MOEI_INT_ANGLES + place / MOEI_INT_ANGLES) * half + i) * 4;
            const int32_t c1 = moei_flash_16(at1), s1 = moei_flash_16(at1 + 2);
            const int32_t c2 = moei_flash_16(at2), s2 = moei_flash_16(at2 + 2);
            const int64_t both =
                moei_check_size((c1 * c2 - s1 * s2) >> 15) + moei_check_size((s1 * c2 + c1 * s2) >> 15);
            MOEI_CHECK_FITS(most * both + round <= INT32_MAX, "at");
        }
    return MOE_OK;
}

/* ---- >>operations ---- */

/* Checks n inputs and the result, which may be the same vector. */
static moe_status moei_check_plain(moei_check *c, const moei_int_op *op) {
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, op->shape.n, MOEI_CHECK_ANY, NULL));
    return moei_check_result(c, op, moei_check_up(op->shape.n, 4), 1);
}

static moe_status moei_check_op_int8(moei_check *c, const moei_int_op *op) {
    int64_t most;
    MOEI_CHECK_DO(moei_check_product(c, op, 0, &most));
    return moei_check_result(c, op, moei_check_up(op->shape.k, 4), 0);
}

static moe_status moei_check_op_int4(moei_check *c, const moei_int_op *op) {
    int64_t most;
    MOEI_CHECK_DO(moei_check_product(c, op, 1, &most));
    return moei_check_result(c, op, moei_check_up(op->shape.k, 4), 0);
}

/* Counts what this operation adds to the sum of its MoE layer. */
static moe_status moei_check_adds(moei_check *c, const moei_int_op *op, int64_t most) {
    MOEI_CHECK_NEED(op->out == c->sum.at && 2 * moei_check_up(op->shape.n, 4) <= c->sum.n, "out",
                    "not the sum of this MoE layer, or wider");
    c->added += most;
    return MOE_OK;
}

static moe_status moei_check_op_int8_add(moei_check *c, const moei_int_op *op) {
    int64_t most;
    MOEI_CHECK_DO(moei_check_product(c, op, 0, &most));
    return moei_check_adds(c, op, most / 2 + 1);
}

static moe_status moei_check_op_int4_add(moei_check *c, const moei_int_op *op) {
    int64_t most;
    MOEI_CHECK_DO(moei_check_product(c, op, 1, &most));
    return moei_check_adds(c, op, most / 2 + 1);
}

/* A product of 16-bit inputs, without its result; *most: the largest |v| of moei_int_op_int16. */
static moe_status moei_check_halves(moei_check *c, const moei_int_op *op, int64_t *most) {
    const uint32_t n = op->shape.n, k = op->shape.k;
    const uint32_t n2 = moei_check_up(n, 2), k4 = moei_check_up(k, 4);
    const size_t size = moei_int8_size(n, k);
    const moei_check_span room = moei_check_span_of(op->other, 2 * k4 + 2 * moei_check_up(n, 4));
    int64_t largest = 0;
    uint32_t j;
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, k, MOEI_CHECK_ANY, NULL));
    MOEI_CHECK_NEED(!moei_check_meet(room, moei_check_span_of(op->in, k)) &&
                        !moei_check_meet(room, moei_check_span_of(op->out, moei_check_up(n, 4))),
                    "other", "overlaps the input or the result");
    MOEI_CHECK_DO(moei_check_write(c, "other", room.at, room.n, MOEI_CHECK_ANY));
    MOEI_CHECK_NEED(k > 0 && size > 0, "shape.k", "must be 1 to 65532");
    MOEI_CHECK_DO(moei_check_bytes(c, "at", op->at, (uint64_t)size + 4 * n2, c->base_size));
    MOEI_CHECK_DO(moei_check_product_rows(c, op, 0, most));
    *most = (*most / 2 + *most / 512 + 4) * ((int64_t)1 << MOEI_INT_GUARD);
    for (j = 0; j < n; j++) {
        const int64_t size_j = moei_check_size(moei_flash_32(c->base + op->at + size + 4 * j));
        if (size_j > largest) largest = size_j;
    }
    *most += largest;
    MOEI_CHECK_FITS(*most < (int64_t)1 << 30, "at");
    return MOE_OK;
}

static moe_status moei_check_op_int16(moei_check *c, const moei_int_op *op) {
    int64_t most;
    MOEI_CHECK_DO(moei_check_halves(c, op, &most));
    return moei_check_result(c, op, op->shape.k, 0);
}

static moe_status moei_check_op_int16_add(moei_check *c, const moei_int_op *op) {
    int64_t most;
    MOEI_CHECK_DO(moei_check_halves(c, op, &most));
    return moei_check_adds(c, op, most);
}

static moe_status moei_check_op_curve(moei_check *c, const moei_int_op *op) {
    MOEI_CHECK_DO(moei_check_bytes(c, "at", op->at, 65 * 2, c->model->weights_size));
    return moei_check_plain(c, op);
}

/* The second input; its codes must be within limit, and it is the result or does not overlap it. */
static moe_status moei_check_other(const moei_check *c, const moei_int_op *op, unsigned limit, int64_t *most) {
    const uint32_t n = moei_check_up(op->shape.n, 4);
    MOEI_CHECK_NEED(op->other == op->out ||
                        !moei_check_meet(moei_check_span_of(op->other, n), moei_check_span_of(op->out, n)),
                    "other", "overlaps the result");
    return moei_check_read(c, "other", op->other, op->shape.n, limit, most);
}

static moe_status moei_check_op_multiply(moei_check *c, const moei_int_op *op) {
    MOEI_CHECK_DO(moei_check_other(c, op, MOEI_CHECK_ANY, NULL));
    return moei_check_plain(c, op);
}

static moe_status moei_check_op_add(moei_check *c, const moei_int_op *op) {
    const int64_t round = (int64_t)1 << op->shape.shift >> 1;
    int64_t a, b;
    MOEI_CHECK_DO(moei_check_other(c, op, MOEI_CHECK_ANY, &b));
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, op->shape.n, MOEI_CHECK_ANY, &a));
    MOEI_CHECK_FITS(a * moei_check_size(op->factor) + b * moei_check_size(op->factor2) + round <= INT32_MAX, "factor");
    return moei_check_plain(c, op);
}

static moe_status moei_check_op_row(moei_check *c, const moei_int_op *op) {
    const size_t size = moei_int8_size(op->shape.k, op->shape.n);
    MOEI_CHECK_NEED(op->index <= 1, "index", "must be 0 or 1");
    MOEI_CHECK_NEED(size > 0, "shape.k", "must be 1 to 65532");
    MOEI_CHECK_DO(moei_check_bytes(c, "at", op->at, size, c->base_size));
    return moei_check_result(c, op, 0, 1);
}

static moe_status moei_check_op_norm(moei_check *c, const moei_int_op *op) {
    int64_t most;
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, op->shape.n, MOEI_CHECK_ANY, &most));
    MOEI_CHECK_DO(moei_check_norm(c, op, most));
    return moei_check_plain(c, op);
}

static moe_status moei_check_op_rotate(moei_check *c, const moei_int_op *op) {
    int64_t most;
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, op->shape.n, MOEI_CHECK_ANY, &most));
    MOEI_CHECK_DO(moei_check_angles(c, op, most));
    return moei_check_plain(c, op);
}

/* int8 [length, width] in the state, after the position. */
static moe_status moei_check_cache(const moei_check *c, const char *field, uint32_t at, uint32_t width) {
    const size_t room = c->model->state_size;
    MOEI_CHECK_NEED(at >= sizeof(uint32_t) && at <= room && width <= (room - at) / c->model->length, field,
                    "outside the state");
    return MOE_OK;
}

/* The bounds that the comment of moei_int_op_attention states. */
static moe_status moei_check_op_attention(moei_check *c, const moei_int_op *op) {
    const uint32_t length = (uint32_t)c->model->length, scores = 2 * (length + 1) + length;
    const moei_int_attention *a;
    uint32_t width;
    int64_t most;
    MOEI_CHECK_NEED(length > 0, "length", "must not be 0 for attention");
    MOEI_CHECK_NEED(op->index < c->model->n_attentions, "index", "there is no such attention");
    a = c->model->attentions + op->index;
    width = (uint32_t)a->heads * a->d_head;
    MOEI_CHECK_NEED(width > 0 && width == op->shape.n, "shape.n", "must be heads * d_head of the attention");
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, width, MOEI_CHECK_ANY, &most));
    MOEI_CHECK_FITS(most * 127 * a->d_head < (int64_t)1 << 30, "in");
    MOEI_CHECK_DO(moei_check_read(c, "other", op->other, width, 127, NULL));
    MOEI_CHECK_DO(moei_check_read(c, "attention.value", a->value, width, 127, NULL));
    MOEI_CHECK_DO(moei_check_cache(c, "attention.keys", a->keys, width));
    MOEI_CHECK_DO(moei_check_cache(c, "attention.values", a->values, width));
    MOEI_CHECK_NEED(a->bits <= 31, "attention.bits", "must be at most 31");
    MOEI_CHECK_NEED(op->factor >= 0, "factor", "must not be negative");
    MOEI_CHECK_NEED(op->factor2 >= 0 && op->factor2 <= 32766, "factor2", "must be 0 to 32766");
    MOEI_CHECK_NEED(op->shape.shift >= 7, "shape.shift", "must be 7 to 30 for attention");
    MOEI_CHECK_NEED(!moei_check_meet(moei_check_span_of(a->room, scores), moei_check_span_of(op->in, width)) &&
                        !moei_check_meet(moei_check_span_of(a->room, scores),
                                         moei_check_span_of(op->out, moei_check_up(width, 4))),
                    "attention.room", "overlaps the query or the result");
    MOEI_CHECK_DO(moei_check_write(c, "attention.room", a->room, scores, MOEI_CHECK_ANY));
    return moei_check_result(c, op, width, 1);
}

/* The largest power / 2 that moei_int_squares finds for sums up to `sum`. */
static int moei_check_half_power(uint64_t sum) {
    int half = 0;
    for (; sum >> 32 != 0; sum >>= 2) half++;
    return half;
}

/* x m + round, where m <= factor and the shift is the largest possible; 2^15 * 32767 + 2^30
   fits. */
static moe_status moei_check_op_unit(moei_check *c, const moei_int_op *op) {
    int64_t most;
    int shift;
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, op->shape.n, MOEI_CHECK_ANY, &most));
    shift = 15 + op->shape.shift + moei_check_half_power((uint64_t)op->shape.n * (uint64_t)(most * most) + op->at);
    MOEI_CHECK_NEED(op->factor >= 0, "factor", "must not be negative");
    MOEI_CHECK_NEED(shift <= 31, "shape.shift", "too large for this width");
    return moei_check_plain(c, op);
}

/* Whether the router of MoE layer `index` has run, so that its choices are marked. */
static int moei_check_has_run(const moei_check *c, size_t index) {
    const moei_int_op *op = c->model->ops, *end = op + c->main;
    if ((c->list & MOEI_CHECK_ADDING) != 0 && index == c->index) return 1;
    while (op < end && (op->run != moei_int_op_mixture || op->index != index)) op++;
    return op < end;
}

/* Checks that op->other is the choices of MoE layer op->index, which has run. */
static moe_status moei_check_choices(const moei_check *c, const moei_int_op *op) {
    MOEI_CHECK_NEED(op->index < c->model->n_mixtures, "index", "there is no such MoE layer");
    MOEI_CHECK_NEED(op->other == c->model->mixtures[op->index].choices, "other", "not the choices of that MoE layer");
    MOEI_CHECK_NEED(moei_check_has_run(c, op->index), "index", "that MoE layer has not run yet");
    return MOE_OK;
}

/* Whether no weight of this router is negative. */
static int moei_check_weighs_up(const moei_check *c, const moei_int_router *r) {
    size_t e;
    if (r->values == moei_int_gate_logits) return 0;
    if (r->scale == NULL) return 1;
    if (r->scales == MOEI_INT_NONE) return r->factor >= 0;
    for (e = 0; e < r->n_experts; e++)
        if (moei_flash_16(c->model->weights + r->scales + 2 * e) < 0) return 0;
    return 1;
}

static moe_status moei_check_op_cluster(moei_check *c, const moei_int_op *op) {
    const moei_int_router *r;
    uint64_t rows;
    MOEI_CHECK_DO(moei_check_choices(c, op));
    r = &c->model->mixtures[op->index].router;
    rows = (uint64_t)r->n_experts * moei_check_up(op->shape.n, 4) * 2;
    MOEI_CHECK_NEED(op->factor2 >= 1, "factor2", "must be positive");
    MOEI_CHECK_NEED(op->factor2 == 1 || moei_check_weighs_up(c, r), "factor2",
                    "cannot normalize weights that may be negative");
    MOEI_CHECK_DO(moei_check_bytes(c, "at", op->at, rows, c->model->weights_size));
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, op->shape.n, MOEI_CHECK_ANY, NULL));
    return moei_check_result(c, op, moei_check_up(op->shape.n, 4), 0);
}

static moe_status moei_check_op_set_weight(moei_check *c, const moei_int_op *op) {
    return moei_check_read(c, "in", op->in, op->shape.k + 1u, MOEI_CHECK_ANY, NULL);
}

static moe_status moei_check_op_accumulate(moei_check *c, const moei_int_op *op) {
    const int64_t round = (int64_t)1 << op->shape.shift >> 1;
    int64_t most;
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, op->shape.n, MOEI_CHECK_ANY, &most));
    return moei_check_adds(c, op, ((most * 32768 + round) >> op->shape.shift) + 1);
}

static moe_status moei_check_op_add_rest(moei_check *c, const moei_int_op *op) {
    const int64_t round = (int64_t)1 << op->shape.shift >> 1;
    int64_t most;
    MOEI_CHECK_DO(moei_check_choices(c, op));
    MOEI_CHECK_NEED(op->factor2 >= 0 && op->factor2 <= 31, "factor2", "must be 0 to 31");
    MOEI_CHECK_NEED(op->at <= (uint32_t)1 << 30, "at", "must be at most 2^30");
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, op->shape.n, MOEI_CHECK_ANY, &most));
    most = (most * moei_check_size(op->factor) + round) >> op->shape.shift;
    return moei_check_adds(c, op, most / 2 + 1);
}

static moe_status moei_check_op_each(moei_check *c, const moei_int_op *op);
static moe_status moei_check_op_mixture(moei_check *c, const moei_int_op *op);

/* An operation: its function, which models store; the lists that may contain it; its check. */
typedef struct moei_check_row {
    void (*run)(const moei_int_op *op, moei_int_run *run);
    const char *name;
    int lists;
    moe_status (*check)(moei_check *c, const moei_int_op *op);
} moei_check_row;

static const moei_check_row moei_check_rows[] = {
    {moei_int_op_int8, " (int8)", MOEI_CHECK_ALL, moei_check_op_int8},
    {moei_int_op_int4, " (int4)", MOEI_CHECK_ALL, moei_check_op_int4},
    {moei_int_op_int8_add, " (int8_add)", MOEI_CHECK_ADDING, moei_check_op_int8_add},
    {moei_int_op_int16, " (int16)", MOEI_CHECK_ALL, moei_check_op_int16},
    {moei_int_op_int16_add, " (int16_add)", MOEI_CHECK_ADDING, moei_check_op_int16_add},
    {moei_int_op_int4_add, " (int4_add)", MOEI_CHECK_ADDING, moei_check_op_int4_add},
    {moei_int_op_curve, " (curve)", MOEI_CHECK_ALL, moei_check_op_curve},
    {moei_int_op_multiply, " (multiply)", MOEI_CHECK_ALL, moei_check_op_multiply},
    {moei_int_op_add, " (add)", MOEI_CHECK_ALL, moei_check_op_add},
    {moei_int_op_rescale, " (rescale)", MOEI_CHECK_ALL, moei_check_plain},
    {moei_int_op_mixture, " (mixture)", MOEI_CHECK_MAIN, moei_check_op_mixture},
    {moei_int_op_row, " (row)", MOEI_CHECK_ALL, moei_check_op_row},
    {moei_int_op_norm, " (norm)", MOEI_CHECK_ALL, moei_check_op_norm},
    {moei_int_op_rotate, " (rotate)", MOEI_CHECK_ALL, moei_check_op_rotate},
    {moei_int_op_attention, " (attention)", MOEI_CHECK_MAIN, moei_check_op_attention},
    {moei_int_op_unit, " (unit)", MOEI_CHECK_ALL, moei_check_op_unit},
    {moei_int_op_cluster, " (cluster)", MOEI_CHECK_ALL, moei_check_op_cluster},
    {moei_int_op_norm_l1, " (norm_l1)", MOEI_CHECK_SCORE, moei_check_op_each},
    {moei_int_op_norm_l2, " (norm_l2)", MOEI_CHECK_SCORE, moei_check_op_each},
    {moei_int_op_norm_linf, " (norm_linf)", MOEI_CHECK_SCORE, moei_check_op_each},
    {moei_int_op_match, " (match)", MOEI_CHECK_SCORE, moei_check_op_each},
    {moei_int_op_apply_weight, " (apply_weight)", MOEI_CHECK_ALL, moei_check_plain},
    {moei_int_op_set_weight, " (set_weight)", MOEI_CHECK_ALL, moei_check_op_set_weight},
    {moei_int_op_accumulate, " (accumulate)", MOEI_CHECK_ADDING, moei_check_op_accumulate},
    {moei_int_op_add_rest, " (add_rest)", MOEI_CHECK_ADDING, moei_check_op_add_rest},
    {NULL, "", MOEI_CHECK_ALL, NULL}};

/* Checks operation `number`; errors carry its name. */
static moe_status moei_check_op(moei_check *c, size_t number) {
    const moei_int_op *op = c->model->ops + number;
    const moei_check_row *row = moei_check_rows;
    while (row->run != NULL && row->run != op->run) row++;
    c->what = "op";
    c->number = number;
    c->name = row->name;
    MOEI_CHECK_NEED(row->run != NULL, "run", "not an operation of integer models");
    MOEI_CHECK_NEED((row->lists & c->list) != 0, "run", "not allowed in this list of operations");
    MOEI_CHECK_NEED(op->shape.n >= 1 && op->shape.n <= MOEI_INT_WIDEST, "shape.n", "must be 1 to 65532");
    MOEI_CHECK_NEED(op->shape.shift <= 30, "shape.shift", "must be at most 30");
    return row->check(c, op);
}

static moe_status moei_check_list(moei_check *c, int list, uint32_t first, uint32_t n) {
    size_t i;
    c->list = list;
    for (i = 0; i < n; i++) {
        if (list == MOEI_CHECK_MAIN) c->main = i;
        MOEI_CHECK_DO(moei_check_op(c, first + i));
    }
    return MOE_OK;
}

/* ---- >>routers ---- */

static moe_status moei_check_gate(const moei_check *c, const char *field, moei_int_gate *gate,
                                  const moei_int_router *r) {
    static moei_int_gate *const known[] = {moei_int_gate_predicted,      moei_int_gate_logits, moei_int_gate_relu,
                                           moei_int_gate_softmax,        moei_int_gate_sigmoid,
                                           moei_int_share_softmax,       moei_int_share_sigmoid,
                                           moei_int_gate_sqrt_softplus,  moei_int_share_sqrt_softplus};
    const size_t n = sizeof known / sizeof known[0];
    size_t i = 0;
    if (gate == NULL) return MOE_OK;
    while (i < n && known[i] != gate) i++;
    MOEI_CHECK_NEED(i < n, field, "not a gate of integer routers");
    MOEI_CHECK_NEED(i < n - 2 || (r->z_bits <= 14 && r->z_bits % 2 == 0), "router.z_bits",
                    "must be even and at most 14 for sqrt_softplus");
    return MOE_OK;
}

/* Sets *taken to the largest number of experts per token; checks the room for candidates. */
static moe_status moei_check_select(const moei_check *c, const moei_int_router *r, size_t *taken) {
    const int all = r->select == moei_int_select_top_p || r->select == moei_int_select_threshold;
    const int each = r->select == moei_int_select_each, grouped = each || r->select == moei_int_select_grouped;
    const int hash = r->select == moei_int_select_hash, logits = r->select == moei_int_select_logits;
    size_t room;
    MOEI_CHECK_NEED(all || grouped || hash || logits || r->select == moei_int_select_top_k, "router.select",
                    "not a selection of integer routers");
    MOEI_CHECK_NEED(r->gate != NULL || hash || logits, "router.gate", "must not be NULL with this selection");
    MOEI_CHECK_NEED(r->top_k >= 1 && r->top_k <= r->n_experts, "router.top_k", "must be 1 to n_experts");
    MOEI_CHECK_NEED(!grouped || (r->groups >= 1 && r->n_experts % r->groups == 0), "router.groups",
                    "must divide n_experts");
    MOEI_CHECK_NEED(!grouped || each || (r->groups_kept >= 1 && r->groups_kept <= r->groups), "router.groups_kept",
                    "must be 1 to groups");
    MOEI_CHECK_NEED(!grouped || each || r->top_k <= (uint32_t)r->n_experts / r->groups * r->groups_kept,
                    "router.top_k", "more than the groups that are kept have");
    MOEI_CHECK_NEED(!each || r->top_k % r->groups == 0, "router.groups", "must divide top_k");
    MOEI_CHECK_NEED(r->select != moei_int_select_top_p || r->threshold <= (int32_t)1 << 30, "router.threshold",
                    "must be at most 2^30");
    *taken = all ? r->n_experts : r->top_k;
    room = grouped && !each && r->groups_kept > *taken ? r->groups_kept : *taken;
    MOEI_CHECK_NEED(r->most >= room && r->most <= r->n_experts, "router.most", "no room for all choices");
    room = r->gate != NULL ? (size_t)r->n_experts + (grouped ? r->groups : 0u) : 0;
    if (r->values != NULL && room < *taken) room = *taken;
    if ((r->weight == moei_int_weight_softmax || r->weight == moei_int_weight_over) && room < r->n_experts)
        room = r->n_experts;
    MOEI_CHECK_NEED(r->scratch >= room, "router.scratch", "no room for p");
    return MOE_OK;
}

/* The rows of a hash: experts that exist, none of them twice. */
static moe_status moei_check_hash(const moei_check *c, const moei_int_router *r) {
    const unsigned char *table;
    size_t i, j;
    MOEI_CHECK_NEED(r->tokens > 0 && (uint32_t)r->tokens <= c->model->weights_size / r->top_k, "router.tokens",
                    "no such table");
    MOEI_CHECK_DO(moei_check_bytes(c, "router.table", r->table, (size_t)r->tokens * r->top_k, c->model->weights_size));
    table = c->model->weights + r->table;
    for (i = 0; i < (size_t)r->tokens * r->top_k; i++) {
        MOEI_CHECK_NEED(moei_flash_8(table + i) < r->n_experts, "router.table", "names an expert that does not exist");
        for (j = i - i % r->top_k; j < i; j++)
            MOEI_CHECK_NEED(moei_flash_8(table + i) != moei_flash_8(table + j), "router.table",
                            "names an expert twice");
    }
    return MOE_OK;
}

static moe_status moei_check_router(const moei_check *c, const moei_int_router *r, size_t *taken) {
    const size_t n = r->n_experts, room = c->model->weights_size;
    const int over = r->weight == moei_int_weight_over;
    const int reads = r->weight == moei_int_weight_raw || r->weight == moei_int_weight_sum ||
                      r->weight == moei_int_weight_norm || over;
    size_t e;
    MOEI_CHECK_NEED(n >= 1 && n <= MOEI_INT_EXPERTS, "router.n_experts", "must be 1 to 256");
    MOEI_CHECK_NEED(r->z_bits <= 27, "router.z_bits", "must be at most 27");
    MOEI_CHECK_NEED(r->weight_shift <= 30, "router.weight_shift", "must be at most 30");
    MOEI_CHECK_DO(moei_check_gate(c, "router.gate", r->gate, r));
    MOEI_CHECK_DO(moei_check_gate(c, "router.values", r->values, r));
    MOEI_CHECK_NEED(reads || r->weight == moei_int_weight_softmax || r->weight == moei_int_weight_uniform ||
                        r->weight == moei_int_weight_one || r->weight == moei_int_weight_sparsemixer,
                    "router.weight", "not a weight function of integer routers");
    MOEI_CHECK_NEED(reads == (r->values != NULL), "router.values", "must be set exactly if weight reads them");
    MOEI_CHECK_NEED(!over || r->over == moei_int_weight_sum || r->over == moei_int_weight_norm, "router.over",
                    "must be weight_sum or weight_norm");
    MOEI_CHECK_NEED(!over || r->kept == moei_int_gate_softmax || r->kept == moei_int_gate_sigmoid, "router.kept",
                    "must be gate_softmax or gate_sigmoid");
    MOEI_CHECK_NEED(r->scale == NULL || r->scale == moei_int_scale_weights, "router.scale",
                    "not a function of integer routers");
    MOEI_CHECK_NEED(r->values != moei_int_gate_predicted, "router.values", "this gate is only for selection");
    MOEI_CHECK_DO(moei_check_select(c, r, taken));
    if (r->select == moei_int_select_hash) MOEI_CHECK_DO(moei_check_hash(c, r));
    if (r->thresholds != MOEI_INT_NONE)
        MOEI_CHECK_DO(moei_check_bytes(c, "router.thresholds", r->thresholds, 4 * n, room));
    if (r->scales != MOEI_INT_NONE) MOEI_CHECK_DO(moei_check_bytes(c, "router.scales", r->scales, 2 * n, room));
    if (r->bias == MOEI_INT_NONE) return MOE_OK;
    MOEI_CHECK_DO(moei_check_bytes(c, "router.bias", r->bias, 4 * n, room));
    for (e = 0; e < n; e++)
        MOEI_CHECK_FITS(moei_check_size(moei_flash_32(c->model->weights + r->bias + 4 * e)) <= (int64_t)1 << 28,
                        "router.bias");
    return MOE_OK;
}

/* ---- >>mixtures ---- */

/* Marks a vector that may have been written before as unknown. */
static void moei_check_unknown(moei_check *c, uint32_t at, uint32_t n) {
    const moei_check_span s = moei_check_span_of(at, moei_check_up(n, 4));
    if (moei_check_inside(c, s) && moei_check_free(c, s)) moei_check_fill(c, s, MOEI_CHECK_ANY);
}

/* Marks the results of a list as unknown, because it may have run any number of times before.
   Errors in it are found when it is checked. */
static void moei_check_forget(moei_check *c, uint32_t first, uint32_t n) {
    size_t i;
    for (i = 0; i < n; i++) moei_check_unknown(c, c->model->ops[first + i].out, c->model->ops[first + i].shape.n);
}

/* Makes the first size bytes of an expert's block the constants of operations. */
static moe_status moei_check_block(moei_check *c, size_t expert, size_t size) {
    const moei_int_mixture *m = c->mixture;
    const size_t at = (size_t)m->experts + expert * (size_t)m->stride;
    moe_status status;
    c->base_size = size;
    c->base = c->model->experts != NULL ? c->model->experts + at : (const unsigned char *)(c->most + m->block);
    if (c->model->experts != NULL) return MOE_OK;
    status = c->loader->fetch(c->loader->ctx, at, size, c->most + m->block);
    if (status == MOE_OK) return MOE_OK;
    return moei_check_refuse(c, status, "experts", "the loader failed");
}

/* The number computed from the activation of an expert, before it is scaled. */
static moe_status moei_check_measure(const moei_check *c, const moei_int_op *op) {
    const uint32_t n = op->shape.n;
    int64_t most, other = 1;
    MOEI_CHECK_NEED(op->factor >= 0, "factor", "must not be negative");
    MOEI_CHECK_NEED(op->factor2 >= 0 && op->factor2 <= 14, "factor2", "must be 0 to 14");
    MOEI_CHECK_DO(moei_check_read(c, "in", op->in, n, MOEI_CHECK_ANY, &most));
    if (op->run == moei_int_op_match) MOEI_CHECK_DO(moei_check_read(c, "other", op->other, n, MOEI_CHECK_ANY, &other));
    if (op->run == moei_int_op_norm_l2) {
        MOEI_CHECK_FITS((uint64_t)n * (uint64_t)(most * most) >> (62 - 2 * op->factor2) == 0, "factor2");
        return MOE_OK;
    }
    if (op->run != moei_int_op_norm_linf) most *= n;
    MOEI_CHECK_FITS(most * other <= INT32_MAX >> op->factor2, "factor2");
    return MOE_OK;
}

/* An operation that runs the next shape.k operations for every expert. */
static moe_status moei_check_op_each(moei_check *c, const moei_int_op *op) {
    const unsigned char *base = c->base;
    const size_t base_size = c->base_size, number = c->number;
    const uint32_t experts = c->mixture->router.n_experts;
    const int list = c->list;
    const char *name = c->name;
    const moei_int_shape *s = &op->shape;
    size_t e;
    MOEI_CHECK_NEED(op->index == c->index, "index", "must be the MoE layer of this list");
    MOEI_CHECK_NEED(s->k < c->model->n_ops - number, "shape.k", "more operations than the model has");
    MOEI_CHECK_NEED(op->at <= c->mixture->stride, "at", "more bytes than an expert has");
    MOEI_CHECK_NEED(experts == c->mixture->zeros, "index", "an expert of that MoE layer has no block");
    /* holds the numbers of earlier experts, and is written by nothing else */
    c->sum = moei_check_span_of(op->out, moei_check_up(experts, 4));
    for (e = 0; e < experts; e++) {
        MOEI_CHECK_DO(moei_check_block(c, e, op->at));
        moei_check_forget(c, (uint32_t)number + 1, s->k);
        MOEI_CHECK_DO(moei_check_list(c, MOEI_CHECK_EACH, (uint32_t)number + 1, s->k));
        c->list = list;
        c->number = number;
        c->name = name;
        MOEI_CHECK_DO(moei_check_measure(c, op));
    }
    c->sum = moei_check_span_of(0, 0);
    c->base = base;
    c->base_size = base_size;
    MOEI_CHECK_NEED(s->low <= s->high && s->low >= -MOEI_CHECK_ANY + 1, "shape.low",
                    "must not exceed shape.high, nor be below -32767");
    return moei_check_write(c, "out", op->out, moei_check_up(experts, 4),
                            (unsigned)(s->high > -s->low ? s->high : -s->low));
}

/* Checks the fields of an MoE layer that its operations rely on. */
static moe_status moei_check_parts(const moei_check *c, const moei_int_mixture *m, size_t *taken) {
    const uint32_t n = c->model->n_ops;
    const size_t experts = c->model->experts_size;
    MOEI_CHECK_NEED(m->score <= n && m->n_score <= n - m->score, "n_score", "more operations than the model has");
    MOEI_CHECK_NEED(m->expert <= n && m->n_expert <= n - m->expert, "n_expert", "more operations than the model has");
    MOEI_CHECK_NEED(m->shared <= n && m->n_shared <= n - m->shared, "n_shared", "more operations than the model has");
    MOEI_CHECK_DO(moei_check_router(c, &m->router, taken));
    MOEI_CHECK_NEED(m->zeros >= 1 && m->zeros <= m->copies && m->copies <= m->constants &&
                        m->constants <= m->router.n_experts,
                    "zeros", "must be 1 <= zeros <= copies <= constants <= n_experts");
    MOEI_CHECK_NEED(m->copy <= n && m->n_copy <= n - m->copy, "n_copy", "more operations than the model has");
    MOEI_CHECK_NEED(m->constant <= n && (uint64_t)m->n_constant * (m->router.n_experts - m->constants) <=
                                            n - m->constant,
                    "n_constant", "more operations than the model has");
    MOEI_CHECK_NEED(m->stride % 4 == 0 && m->stride <= experts / m->zeros, "stride",
                    "more bytes than the model has, or not aligned");
    MOEI_CHECK_NEED((m->block == MOEI_INT_NONE) == (c->model->experts != NULL), "block",
                    "must be set exactly if a loader fetches the experts");
    return moei_check_bytes(c, "experts", m->experts, (size_t)m->stride * m->zeros, experts);
}

/* What the router reads and writes. */
static moe_status moei_check_routing(moei_check *c, const moei_int_mixture *m) {
    const uint32_t n = m->router.n_experts * (m->router.gate == moei_int_gate_predicted ? 2u : 1u);
    const uint32_t p = 2 * (uint32_t)m->router.scratch;
    const moei_check_span choices = moei_check_span_of(m->choices, 1 + 2 * (uint32_t)m->router.most);
    MOEI_CHECK_DO(moei_check_read(c, "z", m->z, n, MOEI_CHECK_ANY - 1, NULL));
    MOEI_CHECK_NEED(!moei_check_meet(moei_check_span_of(m->z, n), moei_check_span_of(m->p, p)), "p", "overlaps z");
    MOEI_CHECK_NEED(!moei_check_meet(moei_check_span_of(m->z, n), choices), "choices", "overlap z");
    MOEI_CHECK_NEED(!moei_check_meet(moei_check_span_of(m->p, p), choices), "choices", "overlap p");
    MOEI_CHECK_DO(moei_check_write(c, "p", m->p, p, MOEI_CHECK_ANY));
    return moei_check_write(c, "choices", m->choices, choices.n, MOEI_CHECK_ROUTED);
}

/* The operations of an expert. */
typedef struct moei_check_part {
    uint32_t first, n;
} moei_check_part;

static moei_check_part moei_check_part_of(const moei_int_mixture *m, size_t e) {
    moei_check_part part;
    part.first = e < m->zeros       ? m->expert
                 : e < m->constants ? m->copy
                                    : m->constant + (uint32_t)(e - m->constants) * m->n_constant;
    part.n = e < m->zeros ? m->n_expert : e < m->copies ? 0 : e < m->constants ? m->n_copy : m->n_constant;
    return part;
}

/* Bounds the sum of `taken` experts, no two of them the same: n[i] add at most most[i] each. */
static int64_t moei_check_most(const int64_t most[3], const size_t n[3], size_t taken) {
    int64_t sum = 0;
    size_t used[3] = {0, 0, 0}, i, best;
    for (; taken > 0; taken--, used[best]++) {
        best = 0;
        for (i = 1; i < 3; i++)
            if (used[i] < n[i] && (used[best] == n[best] || most[i] > most[best])) best = i;
        if (used[best] < n[best]) sum += most[best];
    }
    return sum;
}

/* Runs the lists of an MoE layer; *sum bounds what they add up to. */
static moe_status moei_check_layer(moei_check *c, const moei_int_mixture *m, uint32_t width, size_t taken,
                                   int64_t *sum) {
    const unsigned char *base = c->base;
    const size_t base_size = c->base_size, number = c->number;
    int64_t most[3] = {0, 0, 0}; /* of experts with matrices, copies and zeros, constants */
    size_t n[3] = {0, 0, 0}, e;
    MOEI_CHECK_DO(moei_check_list(c, MOEI_CHECK_SCORE, m->score, m->n_score));
    c->what = "op";
    c->number = number;
    c->name = " (mixture)";
    MOEI_CHECK_DO(moei_check_routing(c, m));
    MOEI_CHECK_DO(moei_check_write(c, "sum", m->sum, 2 * moei_check_up(width, 4), MOEI_CHECK_ANY));
    c->sum = moei_check_span_of(m->sum, 2 * moei_check_up(width, 4));
    for (e = 0; e < m->router.n_experts; e++)
        moei_check_forget(c, moei_check_part_of(m, e).first, moei_check_part_of(m, e).n);
    for (e = 0; e < m->router.n_experts; e++) {
        const moei_check_part part = moei_check_part_of(m, e);
        const int kind = (e >= m->zeros) + (e >= m->constants);
        c->added = 0;
        c->base = base;
        c->base_size = base_size;
        if (e < m->zeros) MOEI_CHECK_DO(moei_check_block(c, e, m->stride));
        MOEI_CHECK_DO(moei_check_list(c, MOEI_CHECK_EXPERT, part.first, part.n));
        moei_check_forget(c, part.first, part.n);
        n[kind]++;
        if (c->added > most[kind]) most[kind] = c->added;
    }
    c->base = base;
    c->base_size = base_size;
    c->added = 0;
    MOEI_CHECK_DO(moei_check_list(c, MOEI_CHECK_SHARED, m->shared, m->n_shared));
    *sum = moei_check_most(most, n, taken) + c->added;
    c->list = MOEI_CHECK_MAIN;
    c->number = number;
    c->name = " (mixture)";
    return MOE_OK;
}

static moe_status moei_check_op_mixture(moei_check *c, const moei_int_op *op) {
    const moei_int_mixture *m;
    moei_check_span block = moei_check_span_of(0, 0);
    size_t taken = 0;
    int64_t sum = 0;
    MOEI_CHECK_NEED(op->index < c->model->n_mixtures, "index", "there is no such MoE layer");
    m = c->model->mixtures + op->index;
    MOEI_CHECK_DO(moei_check_parts(c, m, &taken));
    c->mixture = m;
    c->index = op->index;
    if (m->block != MOEI_INT_NONE) {
        block = moei_check_span_of(m->block, m->stride / 2);
        MOEI_CHECK_DO(moei_check_write(c, "block", block.at, block.n, MOEI_CHECK_ANY));
        c->block = block;
    }
    MOEI_CHECK_DO(moei_check_layer(c, m, op->shape.n, taken, &sum));
    MOEI_CHECK_NEED(op->factor >= 0 && op->factor2 >= 0, "factor", "must not be negative");
    sum += ((int64_t)taken * op->factor + op->factor2) / 2;
    MOEI_CHECK_FITS(sum + ((int64_t)1 << op->shape.shift >> 1) <= INT32_MAX, "sum");
    c->block = moei_check_span_of(0, 0);
    moei_check_fill(c, block, MOEI_CHECK_ANY);
    MOEI_CHECK_DO(moei_check_result(c, op, 0, 1));
    c->sum = c->block;
    return MOE_OK;
}

/* ---- >>floats ---- */

#ifndef MOE_NO_FLOAT
static moe_status moei_check_attention(const moei_check *c, const moe_module *m) {
    moe_attention_config a = m->attention;
    moe_status status = moei_attention_check(&a, m->d_in, c->error);
    if (status != MOE_OK) return status;
    MOEI_CHECK_NEED(a.heads == m->attention.heads && a.d_head == m->attention.d_head, "attention",
                    "defaults are not filled in");
    return MOE_OK;
}

/* Whether kernels are none, or a table of this build that this machine can run. */
static int moei_check_kernels(const moe_kernels *kernels) {
    int id = MOE_KERNELS_AUTO;
    while (id < MOE_KERNELS_COUNT && moe_kernels_select(id) != kernels) id++;
    return kernels == NULL || id < MOE_KERNELS_COUNT;
}

/* Checks that a layer is as moe_layer_init makes it, except for its kernels. view: the modules
   before it. */
static moe_status moei_check_moe_layer(const moei_check *c, const moe_net *view, const moe_module *m) {
    moe_layer made;
    moe_layer_config config = m->layer.config, router;
    moe_status status;
    int i;
    config.kernels = MOE_KERNELS_C;
    MOEI_CHECK_NEED(config.transport == NULL, "transport", "must be NULL in a model");
    MOEI_CHECK_NEED(config.router.d_model == m->d_in && config.d_out == m->d_out, "d_model",
                    "not the width of the module");
    status = moe_layer_init(&made, &config, c->error);
    if (status == MOE_OK) status = moei_refine_fit(view, &config.router, c->error);
    if (status == MOE_OK && m->kind == MOE_MODULE_MIXTURE) status = moei_previous_check(view, &config.router, c->error);
    if (status != MOE_OK) return status;
    router = config;
    router.router = m->layer.router.config;
    MOEI_CHECK_NEED(memcmp(&made.config, &config, sizeof config) == 0, "config", "defaults are not filled in");
    MOEI_CHECK_NEED(memcmp(&router, &config, sizeof config) == 0, "router", "not that of the configuration");
    MOEI_CHECK_NEED(made.present == m->layer.present && made.router.present == m->layer.router.present, "present",
                    "not the parameters of the configuration");
    MOEI_CHECK_NEED(made.router.parts == m->layer.router.parts, "parts", "not those of the configuration");
    MOEI_CHECK_NEED(moei_check_kernels(m->layer.kernels) && moei_check_kernels(m->layer.router.kernels), "kernels",
                    "not a table of this build and machine");
    for (i = 0; i < MOE_LAYER_PARAMETER_COUNT; i++)
        MOEI_CHECK_NEED(m->layer.external[i] == NULL, "external", "must be NULL in a model");
    MOEI_CHECK_NEED(config.router.select != MOE_SELECT_CUSTOM && config.router.score != MOE_SCORE_CUSTOM &&
                        config.router.select != MOE_SELECT_GIVEN,
                    "router", "a model cannot use functions or choices of the caller");
    return MOE_OK;
}

/* Checks the settings of module i, whose kind and widths are valid. */
static moe_status moei_check_settings(const moei_check *c, const moe_net *net, size_t i) {
    const moe_module *m = &net->modules[i];
    moe_net view = *net;
    moe_module scratch = *m;
    const int rows = m->kind == MOE_MODULE_EMBEDDING || m->kind == MOE_MODULE_POSITIONS;
    view.n_modules = i;
    MOEI_CHECK_NEED((m->kind == MOE_MODULE_EMBEDDING) == (m->d_in == 0), "kind",
                    "an embedding is the first module, where d_in = 0");
    MOEI_CHECK_NEED(rows ? m->n_rows >= 1 && m->n_rows <= MOE_MAX_WIDTH : m->n_rows == 0, "n_rows",
                    "out of range, or set for a module without rows");
    MOEI_CHECK_NEED(m->kind != MOE_MODULE_ACTIVATION || (m->act >= 0 && m->act < MOE_ACT_COUNT), "act",
                    "no such activation");
    MOEI_CHECK_NEED(m->kind != MOE_MODULE_RESIDUAL || (m->span >= 1 && (size_t)m->span <= i &&
                                                       net->modules[i - (size_t)m->span].d_in == m->d_in),
                    "span", "the input that it adds is missing or of another width");
    MOEI_CHECK_NEED(m->kind != MOE_MODULE_TIED || (net->d_in == 0 && net->modules[0].d_out == m->d_in &&
                                                   net->modules[0].n_rows == m->d_out),
                    "kind", "not tied to an embedding of this width");
    MOEI_CHECK_NEED(m->kind == MOE_MODULE_LINEAR || m->kind == MOE_MODULE_EMBEDDING || m->kind == MOE_MODULE_TIED ||
                        moei_is_layer(m) || m->d_out == m->d_in,
                    "d_out", "must be d_in");
    MOEI_CHECK_NEED(m->external == NULL, "external", "must be NULL");
    MOEI_CHECK_NEED(!m->layer.is_packed, "is_packed", "must be 0 in a model");
    if (m->kind == MOE_MODULE_ATTENTION) return moei_check_attention(c, m);
    if (!moei_is_layer(m)) return moei_module_take(&scratch, m, c->error);
    return moei_check_moe_layer(c, &view, m);
}

/* Checks that every parameter is present and finite. */
static moe_status moei_check_parameters(const moei_check *c, const moe_net *net, size_t i) {
    const moe_module *m = &net->modules[i];
    moe_parameter parameter;
    size_t j;
    int index;
    MOEI_CHECK_NEED(m->kind != MOE_MODULE_TIED || m->tensors[MOE_MODULE_WEIGHT] == net->modules[0].tensors[0],
                    "weight", "not the embedding's");
    for (index = 0; index < MOE_LAYER_PARAMETER_COUNT; index++) {
        const moe_real *values;
        if (moei_module_parameter(net, i, index, &parameter) != MOE_OK) continue;
        values = moei_is_layer(m) ? m->layer.tensors[index] : m->tensors[index];
        MOEI_CHECK_NEED(values != NULL, parameter.name, "is missing");
        for (j = 0; j < parameter.count; j++)
            if (!moe_is_finite(values[j]))
                return moei_check_refuse(c, MOE_ERR_NONFINITE, parameter.name, "is not finite");
    }
    return MOE_OK;
}

static moe_status moei_check_float(moei_check *c) {
    const moe_model *model = c->model;
    const moe_net *net = model->net;
    size_t needs = 0, state = 0;
    size_t i;
    int width;
    moe_status status;
    if (MOE_REAL_IS_DOUBLE) return moei_check_refuse(c, MOE_ERR_UNSUPPORTED, "weights_are", "this build uses double");
    MOEI_CHECK_NEED(net != NULL && net->modules != NULL && net->built, "net", "missing, or not built");
    MOEI_CHECK_NEED(!net->external && net->cache_type == MOE_TYPE_REAL, "net", "external and cache_type must be 0");
    MOEI_CHECK_NEED(net->n_modules >= 1 && net->n_modules <= MOE_NET_MAX_MODULES, "net", "has no modules or too many");
    MOEI_CHECK_NEED(net->d_in >= 0 && (size_t)net->d_in == model->d_in, "d_in", "not the network's");
    MOEI_CHECK_NEED(net->d_out >= 0 && (size_t)net->d_out == model->d_out, "d_out", "not the network's");
    MOEI_CHECK_NEED(net->transport == NULL, "net", "has a transport");
    MOEI_CHECK_NEED(moei_check_kernels(net->kernels), "kernels", "not a table of this build and machine");
    c->what = "module";
    width = net->d_in;
    for (i = 0; i < net->n_modules; i++) {
        const moe_module *m = &net->modules[i];
        c->number = i;
        MOEI_CHECK_NEED(m->kind >= 0 && m->kind < MOE_MODULE_COUNT, "kind", "there is no such module");
        MOEI_CHECK_NEED(m->d_in == width && m->d_out >= 1 && m->d_out <= MOE_MAX_WIDTH, "d_in",
                        "not the output width of the module before it, or d_out is out of range");
        MOEI_CHECK_DO(moei_check_settings(c, net, i));
        MOEI_CHECK_DO(moei_check_parameters(c, net, i));
        width = m->d_out;
    }
    MOEI_CHECK_NEED(width == net->d_out, "d_out", "not the network's");
    status = moei_float_size(net, model->length, &needs, &state);
    c->what = "model";
    c->number = 0;
    if (status != MOE_OK) return moei_check_refuse(c, status, "length", "the network cannot run with this length");
    MOEI_CHECK_NEED(model->scratch_size >= needs, "scratch_size", "too small for the network");
    return MOE_OK;
}
#endif

/* ---- >>models ---- */

/* Whether the constants are aligned; builds that read them byte by byte accept any address. */
static int moei_check_aligned(const unsigned char *constants) {
#ifdef MOEI_FLASH_WORDS
    return (uintptr_t)constants % 4 == 0;
#else
    (void)constants;
    return 1;
#endif
}

/* Checks the fields of the model itself. */
static moe_status moei_check_fields(const moei_check *c, int known) {
    const moe_model *m = c->model;
    MOEI_CHECK_NEED(known, "run", "not the function for these weights");
    MOEI_CHECK_NEED(m->d_in <= MOEI_INT_WIDEST, "d_in", "must be at most 65532");
    MOEI_CHECK_NEED(m->state_size % 4 == 0 && (m->length == 0 || m->state_size >= sizeof(uint32_t)), "state_size",
                    "not a multiple of 4, or no room for the position");
    MOEI_CHECK_NEED(m->length <= 65535, "length", "must be at most 65535");
    MOEI_CHECK_NEED(m->scratch_size >= MOEI_INT_ALIGN - 1 && m->state_size <= m->scratch_size - (MOEI_INT_ALIGN - 1),
                    "scratch_size", "smaller than the state");
    MOEI_CHECK_NEED(m->weights != NULL || m->weights_size == 0, "weights", "missing");
    MOEI_CHECK_NEED(moei_check_aligned(m->weights), "weights", "not aligned to 4");
    MOEI_CHECK_NEED(moei_check_aligned(m->experts), "experts", "not aligned to 4");
    MOEI_CHECK_NEED(m->ops != NULL && m->n_main >= 1 && m->n_main <= m->n_ops, "n_main", "no operations, or too many");
    MOEI_CHECK_NEED(m->mixtures != NULL || m->n_mixtures == 0, "mixtures", "missing");
    MOEI_CHECK_NEED(m->attentions != NULL || m->n_attentions == 0, "attentions", "missing");
    MOEI_CHECK_NEED(m->d_out == m->ops[m->n_main - 1].shape.n, "d_out", "not the width of the last operation");
    if (m->experts == NULL && m->n_mixtures > 0 && (c->loader == NULL || c->loader->fetch == NULL))
        return moei_check_refuse(c, MOE_ERR_UNSUPPORTED, "experts", "they need a loader");
    return MOE_OK;
}

static moe_status moei_check_integers(moei_check *c, void *scratch) {
    const moe_model *m = c->model;
    const int known = m->run == moei_int_model_run && m->choices == moei_int_model_choices;
    unsigned char *memory = moei_int_scratch(scratch);
    const moei_int_op *last;
    size_t i;
    MOEI_CHECK_DO(moei_check_fields(c, known));
    c->most = (uint16_t *)(void *)(memory + m->state_size);
    c->n = (m->scratch_size - (MOEI_INT_ALIGN - 1) - m->state_size) / sizeof(int16_t);
    c->base = m->weights;
    c->base_size = m->weights_size;
    for (i = 0; i < c->n; i++) c->most[i] = MOEI_CHECK_ANY;
    MOEI_CHECK_DO(moei_check_write(c, "d_in", 0, moei_check_up((uint32_t)m->d_in, 4), 127));
    MOEI_CHECK_DO(moei_check_list(c, MOEI_CHECK_MAIN, 0, m->n_main));
    c->main = m->n_main;
    last = m->ops + m->n_main - 1;
    MOEI_CHECK_DO(moei_check_read(c, "out", last->out, last->shape.n, MOEI_CHECK_ANY, NULL));
    c->what = "mixture";
    c->name = "";
    for (i = 0; i < m->n_mixtures; i++) {
        c->number = i;
        MOEI_CHECK_NEED(moei_check_has_run(c, i), "choices", "no operation runs it");
    }
    return MOE_OK;
}

static moe_status moei_check_model(moei_check *c, void *scratch, size_t scratch_size) {
    const moe_model *m = c->model;
    if (m->version != MOE_MODEL_VERSION)
        return moei_check_refuse(c, MOE_ERR_UNSUPPORTED, "version", "not that of this moe.h");
    if (scratch_size < m->scratch_size)
        return moei_check_refuse(c, MOE_ERR_SPACE, "scratch_size", "larger than the memory that was passed");
    if (m->weights_are == MOE_WEIGHTS_INT8 || m->weights_are == MOE_WEIGHTS_INT4)
        return moei_check_integers(c, scratch);
    MOEI_CHECK_NEED(m->weights_are == MOE_WEIGHTS_FLOAT, "weights_are", "must be one of MOE_WEIGHTS_");
#ifdef MOE_NO_FLOAT
    return moei_check_refuse(c, MOE_ERR_UNSUPPORTED, "weights_are", "this build has no floating point");
#else
#if !MOE_REAL_IS_DOUBLE
    if (m->run == moei_float_ops_run)
        return moei_check_refuse(c, MOE_ERR_UNSUPPORTED, "run",
                                 "float operations are not checked: make the model with same_bits = 1");
#endif
    MOEI_CHECK_NEED(m->run == moei_float_model_run && m->choices == moei_float_model_choices, "run",
                    "not the function for these weights");
    return moei_check_float(c);
#endif
}

moe_status moe_model_check(const moe_model *model, const moe_loader *loader, void *scratch, size_t scratch_size,
                           moe_error *error) {
    moei_check c;
    moe_status status;
    memset(&c, 0, sizeof c);
    c.model = model;
    c.loader = loader;
    c.error = error;
    c.what = "model";
    c.name = "";
    if (model == NULL || scratch == NULL)
        return moei_check_refuse(&c, MOE_ERR_ARGUMENT, "model or scratch", "must not be NULL");
    status = moei_check_model(&c, scratch, scratch_size);
    memset(scratch, 0, scratch_size);
    return status;
}

#undef MOEI_CHECK_NEED
#undef MOEI_CHECK_FITS
#undef MOEI_CHECK_DO

#ifdef __cplusplus
}
#endif
#endif /* MOE_IMPLEMENTATION */
