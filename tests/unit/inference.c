/* Tests models for small machines: moe_model_create, moe_infer, moe_export_c. Integer models are
   run a second time by a slow interpreter that is written from the comments in the headers; both
   must agree in every bit. Integers against the network in floating point, every failure, scratch
   memory.
       cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/inference.c -o inference -lm && ./inference
   "inference quick" takes fewer nets. "inference write FOLDER" writes the headers that
   tests/port/export.sh compiles, and what these models must answer. */

#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int quick, verbose;

#define CHECK_SAYS(got, wanted, what, error) CHECKF((got) == (wanted), "%s: %s", what, (error).message)

/* ---- a second interpreter of integer models ----
   It knows nothing of moe_infer's code: constants are unpacked into levels first, all sums are of
   64 bits, >> is a division. Scratch memory is an array of cells, one for each int16, which
   remember who wrote them: a vector that two operations wrote into is found as such. */

typedef struct cell {
    int64_t value;
    long writer;  /* number of the operation's run, from 1; 0: nobody */
    size_t index; /* in that operation's result */
} cell;

typedef struct machine {
    const moe_model *model;
    const unsigned char *experts, *base;
    cell *cells;
    size_t n_cells;
    long runs, kept;
    int32_t token;
    int64_t weight;
    size_t multiplications, longest;
    const char *wrong; /* the first thing that no model may do */
    int unknown;       /* an operation that this interpreter does not know */
} machine;

static void machine_wrong(machine *m, const char *what) {
    if (m->wrong == NULL) m->wrong = what;
}

/* v / 2^bits, rounded down. */
static int64_t floor_half(int64_t v, int bits) {
    const int64_t by = (int64_t)1 << bits;
    return v >= 0 ? v / by : -((-v + by - 1) / by);
}

static int64_t rounding(int shift) { return shift > 0 ? (int64_t)1 << (shift - 1) : 0; }

static int64_t between(int64_t v, int64_t low, int64_t high) { return v < low ? low : v > high ? high : v; }

static size_t up_to_4(size_t n) { return n % 4 > 0 ? n + 4 - n % 4 : n; }

static int64_t bytes_unsigned(const unsigned char *at, int count) {
    int64_t v = 0;
    while (count-- > 0) v = v * 256 + at[count];
    return v;
}

static int64_t bytes_signed(const unsigned char *at, int count) {
    const int64_t v = bytes_unsigned(at, count), all = (int64_t)1 << (8 * count);
    return v >= all / 2 ? v - all : v;
}

/* Vectors of int16: the width, and zeros behind it; of int32: two cells for each. */
static void vector_write(machine *m, uint32_t at, size_t n, const int64_t *values) {
    size_t i;
    m->runs++;
    if (at % 2 != 0 || at + up_to_4(n) > m->n_cells) {
        machine_wrong(m, "a vector outside of scratch memory");
        return;
    }
    for (i = 0; i < up_to_4(n); i++) {
        cell *c = &m->cells[at + i];
        c->value = i < n ? values[i] : 0;
        c->writer = m->runs;
        c->index = i;
        if (c->value < INT16_MIN || c->value > INT16_MAX) machine_wrong(m, "a level beyond 16 bits");
    }
}

static int64_t *vector_read(machine *m, uint32_t at, size_t n, int64_t limit) {
    int64_t *values = (int64_t *)grab(n, sizeof *values);
    size_t i;
    if (at + n > m->n_cells) {
        machine_wrong(m, "a vector outside of scratch memory");
        return values;
    }
    for (i = 0; i < n; i++) {
        const cell *c = &m->cells[at + i];
        values[i] = c->value;
        if (c->writer == 0 || c->writer != m->cells[at].writer || c->index != i)
            machine_wrong(m, "a vector that not one operation wrote");
        if (c->value < -limit || c->value > limit) machine_wrong(m, "a level beyond the limit of its reader");
    }
    return values;
}

static void sums_write(machine *m, uint32_t at, size_t n, const int64_t *values) {
    size_t i;
    m->runs++;
    if (at % 2 != 0 || at + 2 * n > m->n_cells) {
        machine_wrong(m, "sums outside of scratch memory");
        return;
    }
    for (i = 0; i < n; i++) {
        m->cells[at + 2 * i].value = values[i];
        m->cells[at + 2 * i].writer = m->cells[at + 2 * i + 1].writer = m->runs;
        m->cells[at + 2 * i].index = m->cells[at + 2 * i + 1].index = i;
        if (values[i] <= -((int64_t)1 << 30) || values[i] >= (int64_t)1 << 30)
            machine_wrong(m, "a sum of experts beyond 2^30");
    }
}

static int64_t *sums_read(machine *m, uint32_t at, size_t n) {
    int64_t *values = (int64_t *)grab(n, sizeof *values);
    size_t i;
    for (i = 0; i < n && at + 2 * n <= m->n_cells; i++) {
        const cell *c = &m->cells[at + 2 * i];
        values[i] = c->value;
        if (c->writer == 0 || c->writer != m->cells[at].writer || c[1].writer != c->writer || c->index != i)
            machine_wrong(m, "sums that not one operation wrote");
    }
    return values;
}

/* A product's constants as numbers. */
typedef struct levels {
    size_t n, k;
    int64_t *w; /* [n][k], int4: times its block's multiplier */
    int64_t *bias, *factor;
} levels;

static void levels_free(levels *l) {
    free(l->w);
    free(l->bias);
    free(l->factor);
}

static levels levels_begin(size_t n, size_t k) {
    levels l;
    l.n = n;
    l.k = k;
    l.w = (int64_t *)grab(n * k, sizeof *l.w);
    l.bias = (int64_t *)grab(n, sizeof *l.bias);
    l.factor = (int64_t *)grab(n, sizeof *l.factor);
    return l;
}

static levels levels_of_int8(const unsigned char *data, size_t n, size_t k) {
    const size_t pair = 12 + 2 * up_to_4(k);
    levels l = levels_begin(n, k);
    size_t j, p;
    for (j = 0; j < n; j++) {
        const unsigned char *at = data + j / 2 * pair;
        const int alone = j % 2 == 0 && j + 1 == n;
        l.bias[j] = bytes_signed(at + 4 * (j % 2), 4);
        l.factor[j] = bytes_signed(at + (alone ? 4 : 8 + 2 * (j % 2)), 2);
        for (p = 0; p < k; p++)
            l.w[j * k + p] = alone        ? bytes_signed(at + 8 + p / 4 * 4 + (size_t)"\0\2\1\3"[p % 4], 1)
                             : j % 2 == 0 ? bytes_signed(at + 12 + 2 * p, 1)
                                          : (bytes_signed(at + 12 + 2 * p, 2) - bytes_signed(at + 12 + 2 * p, 1)) / 256;
    }
    return l;
}

/* The lowest three of the four levels of an input have 8 more. */
static levels levels_of_int4(const unsigned char *data, size_t n, size_t k) {
    const size_t blocks = (k + 31) / 32, four = 24 + 8 * blocks + 2 * up_to_4(k);
    levels l = levels_begin(n, k);
    size_t j, p;
    for (j = 0; j < n; j++) {
        const unsigned char *at = data + j / 4 * four;
        const size_t side = j % 4;
        l.bias[j] = bytes_signed(at + 4 * side, 4);
        l.factor[j] = bytes_signed(at + four - 8 + 2 * side, 2);
        for (p = 0; p < k; p++) {
            const size_t first = p / 32 * 32, count = up_to_4(k) - first < 32 ? up_to_4(k) - first : 32;
            const unsigned char *block = at + 16 + p / 32 * 72; /* 64 bytes of levels, 8 of multipliers */
            const int64_t w = floor_half(bytes_signed(block + 2 * (p % 32), 2), (int)(4 * side));
            l.w[j * k + p] = (side == 3 ? w : (w % 16 + 16) % 16 - 8) * bytes_signed(block + 2 * (count + side), 2);
        }
    }
    return l;
}

/* t of all outputs of a product of x, before it is stored. */
static int64_t *product_of(machine *m, const moei_int_op *op, int int4, const int64_t *x) {
    levels l = int4 ? levels_of_int4(m->base + op->at, op->shape.n, op->shape.k)
                    : levels_of_int8(m->base + op->at, op->shape.n, op->shape.k);
    int64_t *t = (int64_t *)grab(l.n, sizeof *t);
    size_t j, p;
    for (j = 0; j < l.n; j++) {
        int64_t sum = l.bias[j], bound = l.bias[j] < 0 ? -l.bias[j] : l.bias[j];
        for (p = 0; p < l.k; p++) {
            const int64_t w = l.w[j * l.k + p];
            sum += w * x[p];
            bound += 127 * (w < 0 ? -w : w);
        }
        if (bound >= (int64_t)1 << 30) machine_wrong(m, "weights whose sums can reach 2^30");
        if (l.factor[j] < 0) machine_wrong(m, "a negative factor");
        t[j] = floor_half(sum * l.factor[j], 16);
    }
    m->multiplications += l.n * l.k;
    levels_free(&l);
    return t;
}

/* The sums of the blocks of an int4 product's input are written, or they are there. */
static void block_sums(machine *m, const moei_int_op *op, const int64_t *x) {
    const size_t blocks = (op->shape.k + 31u) / 32;
    int64_t *sums = (int64_t *)grab(blocks, sizeof *sums), *kept;
    size_t p;
    for (p = 0; p < blocks; p++) sums[p] = 0;
    for (p = 0; p < op->shape.k; p++) sums[p / 32] -= 8 * x[p];
    if (op->index == 0) vector_write(m, op->other, blocks, sums);
    kept = vector_read(m, op->other, blocks, 32767);
    for (p = 0; p < blocks; p++)
        if (kept[p] != sums[p]) machine_wrong(m, "the sums of another input");
    m->kept += op->index;
    free(sums);
    free(kept);
}

static int64_t *product(machine *m, const moei_int_op *op, int int4) {
    int64_t *x = vector_read(m, op->in, op->shape.k, 127), *t = product_of(m, op, int4, x);
    if (int4) block_sums(m, op, x);
    free(x);
    return t;
}

/* v of a product whose inputs have 16 bits: the powers of two in which they are finest, two halves
   of 8 bits, biases behind the constants. */
static int64_t *product_16(machine *m, const moei_int_op *op, int64_t weight) {
    const size_t n = op->shape.n, k = op->shape.k;
    const unsigned char *bias = m->base + op->at + n / 2 * (12 + 2 * up_to_4(k)) + n % 2 * (8 + up_to_4(k));
    int64_t *x = vector_read(m, op->in, k, 32767), *upper = (int64_t *)grab(k, sizeof *upper);
    int64_t *t, *low, all = 0;
    size_t i;
    int e = 0;
    for (i = 0; i < k; i++) all |= x[i] < 0 ? -x[i] : x[i];
    while (e < 14 && all * ((int64_t)2 << e) <= 32639) e++;
    for (i = 0; i < k; i++) {
        x[i] *= (int64_t)1 << e;
        upper[i] = between(floor_half(x[i] + 128, 8), -127, 127);
        x[i] = between(x[i] - 256 * upper[i], -127, 127);
    }
    t = product_of(m, op, 0, upper);
    low = product_of(m, op, 0, x);
    for (i = 0; i < n; i++) {
        if (t[i] > 1000000000 || t[i] < -1000000000) machine_wrong(m, "a product beyond 32 bits");
        t[i] = 1 + floor_half(t[i] * weight, 16) + floor_half(low[i] * floor_half(weight + 128, 8), 16);
        if (e <= 6) t[i] *= (int64_t)1 << (6 - e);
        else t[i] = floor_half(t[i] + rounding(e - 6), e - 6);
        t[i] += floor_half(bytes_signed(bias + 4 * i, 4) * weight, 16);
        if (t[i] <= -((int64_t)1 << 30) || t[i] >= (int64_t)1 << 30) machine_wrong(m, "a product beyond 2^30");
    }
    free(x);
    free(upper);
    free(low);
    return t;
}

static int64_t stored(const moei_int_op *op, int64_t v) {
    return between(floor_half(v + rounding(op->shape.shift), op->shape.shift), op->shape.low, op->shape.high);
}

static void machine_ops(machine *m, uint32_t first, uint32_t n);

/* The experts of a mixture one after the other, each from its block. */
static void machine_mixture(machine *m, const moei_int_op *op) {
    const moei_int_mixture *x = &m->model->mixtures[op->index];
    const size_t most = x->router.most;
    int16_t *z16 = (int16_t *)grab(x->router.n_experts, sizeof *z16), *experts = (int16_t *)grab(most, sizeof *experts);
    int16_t *weights = (int16_t *)grab(most, sizeof *weights);
    int32_t *p = (int32_t *)grab(x->router.scratch, sizeof *p);
    int64_t *z, *sums = (int64_t *)grab(op->shape.n, sizeof *sums), *made = (int64_t *)grab(1 + 2 * most, sizeof *made);
    size_t count = 0, i, e;
    machine_ops(m, x->score, x->n_score);
    z = vector_read(m, x->z, x->n_score > 0 ? x->router.n_experts : 0, 32767);
    for (i = 0; i < x->router.n_experts && x->n_score > 0; i++) z16[i] = (int16_t)z[i];
    if (moei_int_route(&x->router, m->model->weights, m->token, z16, p, experts, weights, &count) != MOE_OK ||
        count > most)
        machine_wrong(m, "a router that failed");
    made[0] = (int64_t)count;
    for (i = 0; i < count && i < most; i++) {
        made[1 + i] = experts[i];
        made[1 + most + i] = weights[i];
        for (e = 0; e < i; e++)
            if (experts[e] == experts[i]) machine_wrong(m, "an expert that was chosen twice");
    }
    vector_write(m, x->choices, 1 + 2 * most, made);
    for (i = 0; i < op->shape.n; i++) sums[i] = ((int64_t)count * op->factor + op->factor2) / 2;
    sums_write(m, x->sum, op->shape.n, sums);
    for (i = 0; i < count && m->wrong == NULL; i++) {
        const unsigned char *before = m->base;
        m->base = m->experts + x->experts + (size_t)experts[i] * x->stride;
        m->weight = weights[i];
        machine_ops(m, x->expert, x->n_expert);
        m->base = before;
        m->weight = 32767;
    }
    machine_ops(m, x->shared, x->n_shared);
    free(sums);
    sums = sums_read(m, x->sum, op->shape.n);
    for (i = 0; i < op->shape.n; i++) sums[i] = stored(op, sums[i]);
    vector_write(m, op->out, op->shape.n, sums);
    free(z16);
    free(experts);
    free(weights);
    free(p);
    free(z);
    free(sums);
    free(made);
}

/* The room of a product of 16-bit inputs may be overwritten at any time. */
static void machine_spoil(machine *m, const moei_int_op *op) {
    const size_t room = 2 * up_to_4(op->shape.k) + 2 * up_to_4(op->shape.n);
    size_t i;
    m->runs++;
    for (i = 0; i < room && op->other + room <= m->n_cells; i++) m->cells[op->other + i].writer = 0;
    if (op->other + room > m->n_cells) machine_wrong(m, "room outside of scratch memory");
}

static void machine_product_16(machine *m, const moei_int_op *op, int adds) {
    int64_t *v = product_16(m, op, adds ? m->weight : 127 * 256), *sums = NULL;
    size_t j;
    machine_spoil(m, op);
    if (adds) sums = sums_read(m, op->out, op->shape.n);
    for (j = 0; j < op->shape.n; j++) v[j] = adds ? sums[j] + v[j] : stored(op, v[j]);
    if (adds) sums_write(m, op->out, op->shape.n, v);
    else vector_write(m, op->out, op->shape.n, v);
    free(sums);
    free(v);
}

static void machine_product(machine *m, const moei_int_op *op, int int4) {
    int64_t *t = product(m, op, int4);
    size_t j;
    for (j = 0; j < op->shape.n; j++) t[j] = stored(op, t[j]);
    vector_write(m, op->out, op->shape.n, t);
    free(t);
}

static void machine_product_add(machine *m, const moei_int_op *op, int int4) {
    int64_t *t = product(m, op, int4), *sums = sums_read(m, op->out, op->shape.n);
    size_t j;
    for (j = 0; j < op->shape.n; j++) sums[j] += floor_half(t[j] * m->weight, 16);
    sums_write(m, op->out, op->shape.n, sums);
    free(t);
    free(sums);
}

static void machine_curve(machine *m, const moei_int_op *op) {
    int64_t *x = vector_read(m, op->in, op->shape.n, 32767);
    size_t i;
    for (i = 0; i < op->shape.n; i++) {
        const int64_t u = x[i] + 32768, part = u / 1024;
        const int64_t rest = u % 1024;
        const unsigned char *points = m->model->weights + op->at;
        const int64_t from = bytes_signed(points + 2 * part, 2), to = bytes_signed(points + 2 * part + 2, 2);
        x[i] = stored(op, from + floor_half((to - from) * rest, 10));
    }
    vector_write(m, op->out, op->shape.n, x);
    free(x);
}

/* in * other; in * factor + other * factor2 */
static void machine_two(machine *m, const moei_int_op *op, int multiply, int64_t factor, int64_t factor2) {
    int64_t *a = vector_read(m, op->in, op->shape.n, 32767), *b = vector_read(m, op->other, op->shape.n, 32767);
    size_t i;
    if (factor < 0 || factor2 < 0 || (!multiply && factor2 != 0 && (factor > 16383 || factor2 > 16383)))
        machine_wrong(m, "a factor out of its range");
    for (i = 0; i < op->shape.n; i++) a[i] = stored(op, multiply ? a[i] * b[i] : a[i] * factor + b[i] * factor2);
    vector_write(m, op->out, op->shape.n, a);
    free(a);
    free(b);
}

/* in * weight, where a level of the weight is worth factor / 32768; what follows has weight 1. */
static void machine_weigh(machine *m, const moei_int_op *op) {
    int64_t *x = vector_read(m, op->in, op->shape.n, 32767);
    const int64_t by = floor_half(m->weight * op->factor + rounding(15), 15);
    size_t i;
    for (i = 0; i < op->shape.n; i++) x[i] = stored(op, x[i] * by);
    vector_write(m, op->out, op->shape.n, x);
    m->weight = 32767;
    free(x);
}

/* The weight times in. */
static void machine_accumulate(machine *m, const moei_int_op *op) {
    int64_t *x = vector_read(m, op->in, op->shape.n, 32767), *sums = sums_read(m, op->out, op->shape.n);
    size_t i;
    for (i = 0; i < op->shape.n; i++)
        sums[i] += floor_half(x[i] * m->weight + rounding(op->shape.shift), op->shape.shift);
    sums_write(m, op->out, op->shape.n, sums);
    free(x);
    free(sums);
}

/* What the experts' weights leave of 1, times in. */
static void machine_rest(machine *m, const moei_int_op *op) {
    const size_t most = m->model->mixtures[op->index].router.most;
    int64_t *x = vector_read(m, op->in, op->shape.n, 32767);
    int64_t *sums = sums_read(m, op->out, op->shape.n);
    int64_t *choices = vector_read(m, op->other, 1 + 2 * most, 32767);
    int64_t taken = 0, rest;
    size_t i;
    for (i = 0; i < (size_t)choices[0]; i++) taken += choices[1 + most + i];
    rest = between((int64_t)op->at - floor_half(taken, op->factor2), -32767, 32767);
    for (i = 0; i < op->shape.n; i++)
        sums[i] += floor_half(floor_half(x[i] * op->factor + rounding(op->shape.shift), op->shape.shift) * rest, 16);
    sums_write(m, op->out, op->shape.n, sums);
    free(x);
    free(sums);
    free(choices);
}

static void machine_weight(machine *m, const moei_int_op *op) {
    int64_t *x = vector_read(m, op->in, 1, 32767);
    m->weight = x[0];
    free(x);
}

static void machine_ops(machine *m, uint32_t first, uint32_t n) {
    const moei_int_op *op = m->model->ops + first, *end = op + n;
    if (first + n > m->model->n_ops) machine_wrong(m, "operations beyond the list");
    for (; op < end && m->wrong == NULL; op++) {
        if (op->run == moei_int_op_int8) machine_product(m, op, 0);
        else if (op->run == moei_int_op_int4) machine_product(m, op, 1);
        else if (op->run == moei_int_op_int8_add) machine_product_add(m, op, 0);
        else if (op->run == moei_int_op_int4_add) machine_product_add(m, op, 1);
        else if (op->run == moei_int_op_int16) machine_product_16(m, op, 0);
        else if (op->run == moei_int_op_int16_add) machine_product_16(m, op, 1);
        else if (op->run == moei_int_op_curve) machine_curve(m, op);
        else if (op->run == moei_int_op_multiply) machine_two(m, op, 1, 0, 0);
        else if (op->run == moei_int_op_add) machine_two(m, op, 0, op->factor, op->factor2);
        else if (op->run == moei_int_op_rescale) machine_two(m, op, 0, op->factor, 0);
        else if (op->run == moei_int_op_mixture) machine_mixture(m, op);
        else if (op->run == moei_int_op_apply_weight) machine_weigh(m, op);
        else if (op->run == moei_int_op_set_weight) machine_weight(m, op);
        else if (op->run == moei_int_op_accumulate) machine_accumulate(m, op);
        else if (op->run == moei_int_op_add_rest) machine_rest(m, op);
        else {
            m->unknown = 1;
            machine_wrong(m, "an operation that this interpreter does not know");
        }
    }
}

static machine machine_begin(const moe_model *model, const unsigned char *experts) {
    machine m;
    memset(&m, 0, sizeof m);
    m.model = model;
    m.experts = experts;
    m.weight = 32767;
    m.n_cells = (model->scratch_size - model->state_size - 3) / 2;
    m.cells = (cell *)grab(m.n_cells, sizeof *m.cells);
    return m;
}

/* One call of a model that has no sequences. */
static void machine_infer(machine *m, const signed char *input, int16_t *output) {
    const moei_int_op *last = &m->model->ops[m->model->n_main - 1];
    int64_t *x = (int64_t *)grab(m->model->d_in, sizeof *x), *y;
    size_t i;
    memset(m->cells, 0, m->n_cells * sizeof *m->cells);
    m->base = m->model->weights;
    m->multiplications = 0;
    for (i = 0; i < m->model->d_in; i++) x[i] = input[i];
    vector_write(m, 0, m->model->d_in, x);
    machine_ops(m, 0, m->model->n_main);
    y = vector_read(m, last->out, m->model->d_out, 32767);
    for (i = 0; i < m->model->d_out; i++) output[i] = (int16_t)y[i];
    if (m->multiplications > m->longest) m->longest = m->multiplications;
    free(x);
    free(y);
}

/* How many experts mixture i took in the last call, and which with what weight in units of
   2^-15. */
static size_t machine_choices(machine *m, size_t mixture, moe_choice *choices) {
    const moei_int_mixture *x = &m->model->mixtures[mixture];
    const size_t most = x->router.most;
    int64_t *made = vector_read(m, x->choices, 1 + 2 * most, 32767);
    size_t count = (size_t)made[0], i;
    for (i = 0; i < count; i++) {
        const int64_t w = made[1 + most + i];
        choices[i].expert = (int32_t)made[1 + i];
        choices[i].weight =
            (int32_t)(x->weight_bits < 0 ? floor_half(w, -x->weight_bits) : w * ((int64_t)1 << x->weight_bits));
    }
    free(made);
    return count;
}

/* ---- networks ---- */

enum { ROWS = 2000, WIDEST = 70, MOST_EXPERTS = 16 };

static size_t below(moe_rng *rng, size_t n) { return (size_t)moe_rng_below(rng, n); }

static int one_of(moe_rng *rng, int n) { return (int)below(rng, (size_t)n); }

static void normals(moe_rng *rng, size_t n, double spread, moe_real *x) {
    size_t i;
    for (i = 0; i < n; i++) x[i] = (moe_real)spread * moe_rng_normal(rng);
}

static moe_layer_config random_experts(moe_rng *rng) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.expert = one_of(rng, MOE_EXPERT_COUNT);
    if (c.expert != MOE_EXPERT_LINEAR) c.d_ff = 1 + one_of(rng, 40);
    if (c.expert == MOE_EXPERT_FACTORISED) c.d_low = 1 + one_of(rng, 9);
    if (c.expert == MOE_EXPERT_MLP || c.expert == MOE_EXPERT_GLU) c.act = one_of(rng, MOE_ACT_COUNT);
    if (c.expert == MOE_EXPERT_MLP || c.expert == MOE_EXPERT_LINEAR) c.no_expert_bias = one_of(rng, 2);
    if (c.expert == MOE_EXPERT_SWIGLU && one_of(rng, 2)) {
        c.expert_bias = one_of(rng, 2);
        c.swiglu_alpha = (moe_real)(one_of(rng, 2) * 1.702);
        c.swiglu_limit = (moe_real)(one_of(rng, 3) * 3.5);
        c.swiglu_offset = (moe_real)(one_of(rng, 3) - 1);
    }
    return c;
}

/* The options of a router that integers know, and sometimes one that they do not. */
static void random_router(moe_rng *rng, moe_router_config *r) {
    r->n_experts = 1 + one_of(rng, MOST_EXPERTS);
    r->top_k = 1 + one_of(rng, r->n_experts < 4 ? r->n_experts : 4);
    r->router_bias = one_of(rng, 2);
    if (one_of(rng, 2)) return;
    r->gate = one_of(rng, MOE_GATE_COUNT);
    r->weight = one_of(rng, MOE_WEIGHT_COUNT);
    r->select = one_of(rng, MOE_SELECT_COUNT);
    if (r->select == MOE_SELECT_GROUPED_TOP_K) {
        r->n_experts = 8;
        r->groups = 4;
        r->groups_kept = 2;
        r->top_k = 1 + one_of(rng, 4);
    }
    if (r->select == MOE_SELECT_HASH || r->student_dim > 0) r->table_size = 9;
    if (one_of(rng, 3) == 0) r->selection_bias = 1;
    if (one_of(rng, 3) == 0) r->expert_scale = 1;
    if (one_of(rng, 3) == 0) r->scale = (moe_real)1.7;
}

static void random_mixture(moe_rng *rng, moe_net *net) {
    moe_layer_config c = random_experts(rng);
    random_router(rng, &c.router);
    c.d_out = one_of(rng, 2) ? 0 : 1 + one_of(rng, 40);
    if (one_of(rng, 3) == 0) {
        c.n_shared = 1 + one_of(rng, 2);
        c.d_shared = 1 + one_of(rng, 20);
        c.shared_sigmoid = one_of(rng, 2);
    }
    if (one_of(rng, 6) == 0) {
        c.add_input = 1;
        c.d_out = 0;
    }
    if (one_of(rng, 6) == 0) c.router.apply_to = MOE_APPLY_INPUT;
    (void)moe_net_mixture(net, &c);
}

static int width_after(const moe_net *net) {
    return net->n_modules > 0 ? net->modules[net->n_modules - 1].d_out : net->d_in;
}

static int width_before(const moe_net *net, size_t module) {
    return module > 0 ? net->modules[module - 1].d_out : net->d_in;
}

static void random_residual(moe_rng *rng, moe_net *net) {
    const size_t span = net->n_modules > 0 ? 1 + below(rng, net->n_modules) : 0;
    if (span > 0 && width_before(net, net->n_modules - span) == width_after(net))
        (void)moe_net_residual(net, (int)span);
}

static void random_module(moe_rng *rng, moe_net *net) {
    moe_layer_config c = random_experts(rng);
    switch (one_of(rng, 8)) {
    case 0:
        (void)moe_net_linear(net, 1 + one_of(rng, WIDEST));
        break;
    case 1:
        (void)moe_net_activation(net, one_of(rng, MOE_ACT_COUNT));
        break;
    case 2:
        (void)moe_net_linear(net, 1 + one_of(rng, WIDEST));
        (void)moe_net_activation(net, MOE_ACT_RELU);
        break;
    case 3:
        (void)moe_net_feed_forward(net, &c);
        break;
    case 4:
        (void)moe_net_dropout(net, (moe_real)0.1);
        break;
    case 5:
        random_residual(rng, net);
        break;
    default:
        random_mixture(rng, net);
        break;
    }
}

/* Weights as training might leave them: biases, outputs that matter little, a row of zeros,
   everything larger or smaller. */
static void random_tensors(moe_rng *rng, moe_net *net) {
    size_t i, j;
    for (i = 0; i < net->n_tensors; i++) {
        moe_tensor *t = &net->tensors[i];
        const moe_real times = (moe_real)(one_of(rng, 4) == 0 ? 0.01 : one_of(rng, 4) == 0 ? 5 : 1);
        int zero = 1;
        for (j = 0; j < t->count; j++) zero &= !(t->data[j] < 0) && !(t->data[j] > 0);
        if (strstr(t->name, "table") != NULL) continue;
        if (zero) normals(rng, t->count, 0.3, t->data);
        if (strstr(t->name, "router") != NULL) continue;
        for (j = 0; j < t->count; j++) t->data[j] *= times;
        if (one_of(rng, 10) == 0) memset(t->data, 0, t->count / 2 * sizeof *t->data);
    }
}

/* A network of 1..7 modules; 0 where the options do not go together. */
static int random_net(moe_rng *rng, moe_net *net) {
    moe_error error;
    const int n = 1 + one_of(rng, 6);
    int i;
    (void)moe_net_init(net, 1 + one_of(rng, WIDEST), MOE_KERNELS_C, NULL);
    for (i = 0; i < n; i++) random_module(rng, net);
    if (net->n_modules == 0 || moe_net_build(net, 0, moe_rng_next(rng), &error) != MOE_OK) {
        moe_net_free(net);
        return 0;
    }
    random_tensors(rng, net);
    return 1;
}

/* ---- data ---- */

static moe_data random_rows(moe_rng *rng, size_t n, size_t width, double spread) {
    moe_data data;
    moe_real *x = (moe_real *)grab(n * width, sizeof *x);
    memset(&data, 0, sizeof data);
    normals(rng, n * width, spread, x);
    data.n = n;
    data.x = x;
    return data;
}

static void drop_data(moe_data *data) {
    void *x;
    memcpy(&x, &data->x, sizeof x);
    free(x);
    memset(data, 0, sizeof *data);
}

/* Levels of an input: what comes, and the corners of what may come. */
static void random_levels(moe_rng *rng, size_t kind, size_t n, signed char *x) {
    size_t i;
    for (i = 0; i < n; i++) {
        const int any = one_of(rng, 255) - 127;
        switch (kind % 8) {
        case 0:
            x[i] = 127;
            break;
        case 1:
            x[i] = -127;
            break;
        case 2:
            x[i] = (signed char)(i % 2 ? -127 : 127);
            break;
        case 3:
            x[i] = 0;
            break;
        case 4:
            x[i] = (signed char)(one_of(rng, 2) ? 127 : -127);
            break;
        case 5:
            x[i] = (signed char)(one_of(rng, 9) ? 0 : any);
            break;
        default:
            x[i] = (signed char)any;
            break;
        }
    }
}

/* ---- both interpreters on one model ---- */

/* Scratch memory of exactly the model's size at any address, with guards on both sides, or none
   behind it, where the sanitizers look. */
enum { GUARD = 32, FILL = 0xa5 };

typedef struct place {
    unsigned char *block;
    size_t size, before, behind;
} place;

static place place_of(size_t size, size_t turn) {
    place p;
    p.size = size;
    p.before = GUARD + turn % 8;
    p.behind = turn / 8 % 2 * GUARD;
    p.block = (unsigned char *)grab(p.before + size + p.behind, 1);
    memset(p.block, FILL, p.before + size + p.behind);
    return p;
}

static void *place_memory(const place *p) { return p->block + p->before; }

static int place_free(place *p) {
    size_t i, wrong = 0;
    for (i = 0; i < p->before; i++) wrong += p->block[i] != FILL;
    for (i = 0; i < p->behind; i++) wrong += p->block[p->before + p->size + i] != FILL;
    free(p->block);
    return wrong == 0;
}

/* A loader that copies, and looks at what it is asked for. */
typedef struct shelf {
    const unsigned char *bytes;
    size_t size, fetched, last, fail_at;
    int wrong;
} shelf;

static moe_status shelf_fetch(void *ctx, size_t at, size_t size, void *to) {
    shelf *s = (shelf *)ctx;
    if (at > s->size || size > s->size - at || (uintptr_t)to % 4 != 0 || at % 4 != 0) {
        s->wrong = 1;
        return MOE_ERR_IO;
    }
    if (++s->fetched == s->fail_at) return MOE_ERR_IO;
    memcpy(to, s->bytes + at, size);
    return MOE_OK;
}

typedef struct agreement {
    long models, refused, calls, kept; /* kept: products that found the sums of their input */
    long ops[64]; /* how often each of op_names stood in a model */
} agreement;

static int same_choices(machine *m, const moe_model *model, const void *scratch) {
    moe_choice ours[MOST_EXPERTS], theirs[MOST_EXPERTS];
    size_t i, j, count, expected;
    for (i = 0; i < model->n_mixtures; i++) {
        if (moe_infer_choices(model, i, scratch, theirs, MOST_EXPERTS, &count) != MOE_OK) return 0;
        expected = machine_choices(m, i, ours);
        if (count != expected) return 0;
        for (j = 0; j < count; j++)
            if (ours[j].expert != theirs[j].expert || ours[j].weight != theirs[j].weight) return 0;
    }
    return 1;
}

/* Many inputs through both; their outputs in every bit, choices, and what scratch memory may
   hold. */
static void compare_interpreters(moe_rng *rng, const moe_built_model *built, size_t n, agreement *all) {
    const moe_model *model = &built->model;
    machine m = machine_begin(model, built->experts.data);
    signed char *x = (signed char *)grab(model->d_in, 1);
    int16_t *ours = (int16_t *)grab(model->d_out, sizeof *ours);
    int16_t *theirs = (int16_t *)grab(model->d_out, sizeof *theirs);
    shelf s;
    moe_loader loader;
    size_t i, wrong = 0, choices = 0;
    size_t outside = 0;
    moe_status status = MOE_OK;
    memset(&s, 0, sizeof s);
    s.bytes = built->experts.data;
    s.size = built->experts.size;
    loader.ctx = &s;
    loader.fetch = shelf_fetch;
    for (i = 0; i < n && status == MOE_OK && m.wrong == NULL; i++) {
        place scratch = place_of(model->scratch_size, i);
        random_levels(rng, i, model->d_in, x);
        machine_infer(&m, x, ours);
        memset(theirs, 0x55, model->d_out * sizeof *theirs);
        if (built->external) status = moe_infer(model, &loader, x, theirs, place_memory(&scratch), model->scratch_size);
        else status = moe_infer(model, NULL, x, theirs, place_memory(&scratch), model->scratch_size);
        wrong += memcmp(ours, theirs, model->d_out * sizeof *ours) != 0;
        choices += m.wrong == NULL && !same_choices(&m, model, place_memory(&scratch));
        outside += !place_free(&scratch);
    }
    CHECK(m.wrong == NULL, m.wrong != NULL ? m.wrong : "what no model may do");
    CHECK_STATUS(status, MOE_OK, "moe_infer");
    CHECK(wrong == 0, "outputs of both interpreters in every bit");
    CHECK(choices == 0, "choices of both interpreters");
    CHECK(outside == 0, "nothing is written around scratch memory");
    CHECK(!s.wrong, "a loader is asked for bytes within the experts', for memory aligned to 4");
    CHECK(m.longest <= model->multiplications, "no call takes more multiplications than the model says");
    all->calls += (long)i;
    all->kept += m.kept;
    free(m.cells);
    free(x);
    free(ours);
    free(theirs);
}

/* The operations that random networks have. */
#define WALKED_OPS(X) \
    X(int8) \
    X(int4) \
    X(int8_add) X(int4_add) X(int16) X(int16_add) X(curve) X(multiply) X(add) X(rescale) X(mixture) X(apply_weight) \
        X(set_weight) X(accumulate) X(add_rest)
static void (*const op_functions[])(const moei_int_op *op, moei_int_run *run) = {
#define OP_FUNCTION(name) moei_int_op_##name,
    WALKED_OPS(OP_FUNCTION)
#undef OP_FUNCTION
};
static const char *const op_names[] = {
#define OP_NAME(name) #name,
    WALKED_OPS(OP_NAME)
#undef OP_NAME
};
enum { OPS = sizeof op_names / sizeof *op_names };

static void count_ops(const moe_model *model, agreement *all) {
    size_t i, j;
    for (i = 0; i < model->n_ops; i++)
        for (j = 0; j < OPS; j++) all->ops[j] += model->ops[i].run == op_functions[j];
}

/* Whether a module makes a number of these rows that is larger than most, or none. */
static int overflows(const moe_net *net, const moe_data *rows, double most) {
    moe_net_pass pass;
    moe_call call;
    size_t size = 0, i, j;
    void *work;
    int found = 0;
    memset(&call, 0, sizeof call);
    call.n_tokens = rows->n;
    call.x = rows->x;
    CHECK_STATUS(moe_net_work_size(net, rows->n, 0, &size), MOE_OK, "work size");
    work = grab(size, 1);
    CHECK_STATUS(moe_net_forward(net, &call, work, size, &pass), MOE_OK, "forward");
    for (i = 0; i < net->n_modules; i++)
        for (j = 0; j < rows->n * (size_t)net->modules[i].d_out; j++)
            found = found || !(fabs((double)pass.modules[i].y[j]) <= most);
    free(work);
    return found;
}

static void test_random_nets(void) {
    const size_t nets = quick ? 60 : 1500;
    agreement all;
    moe_rng rng;
    size_t i, tries = 0;
    memset(&all, 0, sizeof all);
    moe_rng_seed(&rng, 1);
    for (i = 0; i < nets && tries < 100 * nets; i++, tries++) {
        moe_net net;
        moe_model_config config;
        moe_built_model built;
        moe_error error;
        moe_data rows;
        moe_status status;
        if (!random_net(&rng, &net)) {
            i--;
            continue;
        }
        rows = random_rows(&rng, 40, (size_t)net.d_in, one_of(&rng, 3) ? 1 : 30);
        memset(&config, 0, sizeof config);
        memset(&error, 0, sizeof error);
        config.weights = i % 2 ? MOE_WEIGHTS_INT4 : MOE_WEIGHTS_INT8;
        config.calibration = &rows;
        config.loader = i % 5 == 0;
        status = moe_model_create(&built, &net, &config, &error);
        if (status == MOE_ERR_UNSUPPORTED) {
            if (!CHECK(strstr(error.message, "module ") != NULL, "a refusal names the module"))
                printf("    %s\n", error.message);
            all.refused++;
            i--;
        } else if (status == MOE_ERR_NONFINITE) { /* some random networks do grow without bounds */
            CHECK(strstr(error.message, "module ") != NULL && overflows(&net, &rows, DBL_MAX),
                  "only a net that computes infinite numbers is refused for that");
            all.refused++;
            i--;
        } else if (status == MOE_ERR_OVERFLOW) { /* or beyond what a scale holds */
            CHECK(strstr(error.message, "module ") != NULL && overflows(&net, &rows, 1e15),
                  "only a net that computes huge numbers is refused for that");
            all.refused++;
            i--;
        } else if (CHECK_SAYS(status, MOE_OK, "moe_model_create", error)) {
            count_ops(&built.model, &all);
            compare_interpreters(&rng, &built, 16, &all);
            all.models++;
            moe_model_free(&built);
        }
        drop_data(&rows);
        moe_net_free(&net);
    }
    CHECK(all.models == (long)nets, "as many models as wanted");
    CHECK(all.kept > all.models, "int4 products of one input share its sums");
    for (i = 0; i < OPS; i++) CHECK(quick || all.ops[i] > 10, op_names[i]);
    printf("note: %ld random models, %ld calls agree in every bit; %ld nets refused\n", all.models, all.calls,
           all.refused);
}

/* ---- integers against the network in floating point ---- */

/* The network's outputs, and with routing the experts of its mixture `module`. */
typedef struct floats {
    void *work;
    moe_net_pass pass;
} floats;

static floats floats_of(const moe_net *net, const moe_data *rows) {
    floats f;
    moe_call call;
    size_t size = 0;
    memset(&call, 0, sizeof call);
    call.n_tokens = rows->n;
    call.x = rows->x;
    CHECK_STATUS(moe_net_work_size(net, rows->n, 0, &size), MOE_OK, "work size");
    f.work = grab(size, 1);
    CHECK_STATUS(moe_net_forward(net, &call, f.work, size, &f.pass), MOE_OK, "forward");
    return f;
}

static void levels_of(const moe_model *model, const moe_real *x, signed char *levels_in) {
    size_t i;
    for (i = 0; i < model->d_in; i++) {
        const double level = floor((double)x[i] / (double)model->input_scale + 0.5);
        levels_in[i] = (signed char)(level > 127 ? 127 : level < -127 ? -127 : level);
    }
}

/* Whether a row went to the same experts in all mixtures. */
static int same_experts(const moe_net *net, const floats *f, size_t row, const moe_model *model, const void *scratch) {
    moe_choice chosen[MOST_EXPERTS];
    size_t i, j, k, count, mixture = 0;
    for (i = 0; i < net->n_modules; i++) {
        const moe_routing *r = moe_net_routing(net, &f->pass, i);
        if (r == NULL) continue;
        if (moe_infer_choices(model, mixture++, scratch, chosen, MOST_EXPERTS, &count) != MOE_OK ||
            (int32_t)count != r->n_choices[row])
            return 0;
        for (j = 0; j < count; j++) {
            for (k = 0; k < count && r->choices[row * r->max_choices + k] != chosen[j].expert;) k++;
            if (k == count) return 0;
        }
    }
    return 1;
}

typedef struct closeness {
    double error;     /* of the rows that went to the same experts: sqrt(sum of squared differences / sum of squares) */
    double elsewhere; /* share of rows that did not */
    double accuracy, exact_accuracy; /* where the rows have labels */
} closeness;

static size_t largest(size_t n, const double *y) {
    size_t i, best = 0;
    for (i = 1; i < n; i++)
        if (y[i] > y[best]) best = i;
    return best;
}

static closeness compare_with_floats(const moe_net *net, const moe_model *model, const moe_data *rows) {
    floats f = floats_of(net, rows);
    void *scratch = grab(model->scratch_size, 1);
    signed char *x = (signed char *)grab(model->d_in, 1);
    int16_t *y = (int16_t *)grab(model->d_out, sizeof *y);
    double *ours = (double *)grab(model->d_out, sizeof *ours);
    double *exact = (double *)grab(model->d_out, sizeof *exact), off = 0;
    double all = 0;
    closeness c;
    size_t i, j, wrong = 0, elsewhere = 0;
    size_t right = 0, exact_right = 0;
    memset(&c, 0, sizeof c);
    for (i = 0; i < rows->n; i++) {
        levels_of(model, rows->x + i * model->d_in, x);
        wrong += moe_infer(model, NULL, x, y, scratch, model->scratch_size) != MOE_OK;
        for (j = 0; j < model->d_out; j++) {
            ours[j] = y[j] * (double)model->output_scale;
            exact[j] = (double)f.pass.y[i * model->d_out + j];
        }
        if (rows->labels != NULL) {
            right += largest(model->d_out, ours) == (size_t)rows->labels[i];
            exact_right += largest(model->d_out, exact) == (size_t)rows->labels[i];
        }
        if (!same_experts(net, &f, i, model, scratch)) {
            elsewhere++;
            continue;
        }
        for (j = 0; j < model->d_out; j++) {
            off += (ours[j] - exact[j]) * (ours[j] - exact[j]);
            all += exact[j] * exact[j];
        }
    }
    CHECK(wrong == 0, "moe_infer");
    c.error = sqrt(off / all);
    c.elsewhere = (double)elsewhere / (double)rows->n;
    c.accuracy = (double)right / (double)rows->n;
    c.exact_accuracy = (double)exact_right / (double)rows->n;
    free(f.work);
    free(scratch);
    free(x);
    free(y);
    free(ours);
    free(exact);
    return c;
}

/* What stands between a linear module and another. error8, error4: the most that int8 and int4 may
   be off; elsewhere8, elsewhere4: the largest share of rows that may go to other experts. All are
   some 1.2 times what was measured: a wrong scale is off by more. */
typedef struct kind {
    const char *name;
    int module, expert, act;
    int shared, gate, select, weight;
    double error8, error4, elsewhere8, elsewhere4;
} kind;

static const kind kinds[] = {
    {"dropout", MOE_MODULE_DROPOUT, 0, 0, 0, 0, 0, 0, 0.018, 0.132, 0, 0},
    {"residual", MOE_MODULE_RESIDUAL, 0, 0, 0, 0, 0, 0, 0.023, 0.155, 0, 0},
    {"relu", MOE_MODULE_ACTIVATION, 0, MOE_ACT_RELU, 0, 0, 0, 0, 0.019, 0.144, 0, 0},
    {"silu", MOE_MODULE_ACTIVATION, 0, MOE_ACT_SILU, 0, 0, 0, 0, 0.026, 0.141, 0, 0},
    {"gelu", MOE_MODULE_ACTIVATION, 0, MOE_ACT_GELU, 0, 0, 0, 0, 0.027, 0.145, 0, 0},
    {"tanh", MOE_MODULE_ACTIVATION, 0, MOE_ACT_TANH, 0, 0, 0, 0, 0.018, 0.138, 0, 0},
    {"sigmoid", MOE_MODULE_ACTIVATION, 0, MOE_ACT_SIGMOID, 0, 0, 0, 0, 0.01, 0.125, 0, 0},
    {"identity", MOE_MODULE_ACTIVATION, 0, MOE_ACT_IDENTITY, 0, 0, 0, 0, 0.018, 0.132, 0, 0},
    {"feed_forward swiglu", MOE_MODULE_FEED_FORWARD, MOE_EXPERT_SWIGLU, 0, 0, 0, 0, 0, 0.071, 0.243, 0, 0},
    {"feed_forward gelu", MOE_MODULE_FEED_FORWARD, MOE_EXPERT_MLP, MOE_ACT_GELU, 0, 0, 0, 0, 0.037, 0.18, 0, 0},
    {"feed_forward factorised", MOE_MODULE_FEED_FORWARD, MOE_EXPERT_FACTORISED, 0, 0, 0, 0, 0, 0.084, 0.285, 0, 0},
    {"swiglu experts", MOE_MODULE_MIXTURE, MOE_EXPERT_SWIGLU, 0, 0, 0, 0, 0, 0.071, 0.265, 0.03, 0.157},
    {"relu experts", MOE_MODULE_MIXTURE, MOE_EXPERT_MLP, MOE_ACT_RELU, 0, 0, 0, 0, 0.031, 0.195, 0.03, 0.154},
    {"linear experts", MOE_MODULE_MIXTURE, MOE_EXPERT_LINEAR, 0, 0, 0, 0, 0, 0.029, 0.183, 0.03, 0.16},
    {"factorised experts", MOE_MODULE_MIXTURE, MOE_EXPERT_FACTORISED, 0, 0, 0, 0, 0, 0.089, 0.284, 0.03, 0.161},
    {"shared experts", MOE_MODULE_MIXTURE, MOE_EXPERT_SWIGLU, 0, 1, 0, 0, 0, 0.075, 0.247, 0.03, 0.159},
};

static int kind_net(const kind *k, moe_net *net) {
    moe_layer_config c;
    moe_error error;
    memset(&c, 0, sizeof c);
    c.expert = k->expert;
    c.act = k->act;
    c.d_ff = k->expert == MOE_EXPERT_LINEAR ? 0 : 32;
    (void)moe_net_init(net, 20, MOE_KERNELS_C, NULL);
    (void)moe_net_linear(net, 24);
    if (k->module == MOE_MODULE_DROPOUT) (void)moe_net_dropout(net, (moe_real)0.5);
    else if (k->module == MOE_MODULE_ACTIVATION) (void)moe_net_activation(net, k->act);
    else if (k->module == MOE_MODULE_FEED_FORWARD) (void)moe_net_feed_forward(net, &c);
    else if (k->module == MOE_MODULE_MIXTURE) {
        c.router.n_experts = 8;
        c.router.top_k = 2;
        c.router.gate = k->gate;
        c.router.select = k->select;
        c.router.weight = k->weight;
        if (k->shared) {
            c.n_shared = 1;
            c.d_shared = 16;
        }
        (void)moe_net_mixture(net, &c);
    } else {
        (void)moe_net_linear(net, 24);
        (void)moe_net_residual(net, 1);
    }
    (void)moe_net_linear(net, 10);
    if (!CHECK_SAYS(moe_net_build(net, 0, 11, &error), MOE_OK, k->name, error)) return 0;
    return 1;
}

static void test_accuracy(void) {
    moe_rng rng;
    size_t i;
    int weights;
    moe_rng_seed(&rng, 5);
    for (i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        moe_net net;
        moe_data rows = random_rows(&rng, ROWS, 20, 1), fresh = random_rows(&rng, ROWS, 20, 1);
        for (weights = MOE_WEIGHTS_INT8; weights <= MOE_WEIGHTS_INT4 && kind_net(&kinds[i], &net); weights++) {
            const double most = weights == MOE_WEIGHTS_INT8 ? kinds[i].error8 : kinds[i].error4;
            const double elsewhere = weights == MOE_WEIGHTS_INT8 ? kinds[i].elsewhere8 : kinds[i].elsewhere4;
            moe_model_config config;
            moe_built_model built;
            moe_error error;
            closeness c;
            memset(&config, 0, sizeof config);
            memset(&error, 0, sizeof error);
            config.weights = weights;
            config.calibration = &rows;
            if (CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, kinds[i].name, error)) {
                c = compare_with_floats(&net, &built.model, &fresh);
                if (!CHECK(c.error <= most && c.elsewhere <= elsewhere, kinds[i].name) || verbose)
                    printf("    %s int%d: error %.4f, at most %.4f; %.4f of the rows to other experts, at most %.4f\n",
                           kinds[i].name, weights == MOE_WEIGHTS_INT8 ? 8 : 4, c.error, most, c.elsewhere, elsewhere);
                moe_model_free(&built);
            }
            moe_net_free(&net);
        }
        drop_data(&rows);
        drop_data(&fresh);
    }
}

/* ---- each operation against floats on the same inputs ----
   The inputs are codes and the weights are multiples of their row's or block's scale, so that both
   compute with the same numbers and what differs is the operation. */

enum { PRODUCT, CURVE, SUM, NARROW, EXPERTS_MLP, EXPERTS_GLU, EXPERTS_LINEAR, EXPERTS_INPUT, EXPERTS_SHARED };
enum { OPERATIONS = EXPERTS_SHARED + 1 };

/* most: relative RMS error, above what was measured. Hidden codes of experts and weighted inputs
   have 127 steps up to the largest number that calibration met, and most products of two are far
   below it: there the steps are the error. */
static const struct operation {
    const char *name;
    double most, most_relu2;
} operations[OPERATIONS] = {
    {"product", 0.001, 0},
    {"curve", 0.005, 0.005},
    {"sum", 0.01, 0},
    {"narrow copy", 0.015, 0},
    {"mlp experts", 0.02, 0.04},
    {"glu experts", 0.1, 0.08},
    {"linear experts, input added", 0.008, 0},
    {"linear experts, weighted inputs", 0.03, 0},
    {"linear experts, shared glu", 0.025, 0},
};

static int operation_net(int operation, int act, int d_in, moe_net *net) {
    moe_layer_config c;
    moe_error error;
    memset(&c, 0, sizeof c);
    c.act = act;
    c.router.n_experts = 4;
    c.router.select = MOE_SELECT_DENSE;
    c.expert = operation == EXPERTS_MLP ? MOE_EXPERT_MLP : MOE_EXPERT_LINEAR;
    if (operation == EXPERTS_GLU) c.expert = MOE_EXPERT_GLU;
    if (c.expert != MOE_EXPERT_LINEAR) c.d_ff = 24;
    if (operation == EXPERTS_INPUT) c.router.apply_to = MOE_APPLY_INPUT;
    c.add_input = operation == EXPERTS_LINEAR;
    c.n_shared = c.shared_sigmoid = operation == EXPERTS_SHARED;
    c.d_shared = operation == EXPERTS_SHARED ? 16 : 0;
    (void)moe_net_init(net, d_in, MOE_KERNELS_C, NULL);
    if (operation >= EXPERTS_MLP) (void)moe_net_mixture(net, &c);
    else (void)moe_net_linear(net, 24);
    if (operation == CURVE) (void)moe_net_activation(net, act);
    if (operation == SUM || operation == NARROW) (void)moe_net_linear(net, 24);
    if (operation == SUM) (void)moe_net_residual(net, 1);
    return CHECK_SAYS(moe_net_build(net, 0, 1, &error), MOE_OK, operations[operation].name, error);
}

/* Weights k / most of 1 / sqrt(d), the first of each row +-most. */
static void coded_weights(moe_rng *rng, moe_net *net, int most) {
    size_t i, j;
    for (i = 0; i < net->n_tensors; i++) {
        const moe_tensor *t = &net->tensors[i];
        const size_t width = (size_t)t->shape[t->n_dims - 1];
        for (j = 0; j < t->count; j++) {
            const int code = j % width % 32 == 0 ? (one_of(rng, 2) ? most : -most) : one_of(rng, 2 * most + 1) - most;
            t->data[j] = (moe_real)(code / (double)most / sqrt(t->n_dims > 1 ? (double)width : 9.0));
        }
    }
}

static void try_operation(moe_rng *rng, int operation, int act, int d_in, int weights) {
    moe_data rows = random_rows(rng, 400, (size_t)d_in, 1);
    moe_real *x = (moe_real *)(uintptr_t)rows.x;
    const double most = act == MOE_ACT_RELU2 ? operations[operation].most_relu2 : operations[operation].most;
    moe_model_config config;
    moe_built_model built;
    moe_error error;
    moe_net net;
    size_t i;
    memset(&config, 0, sizeof config);
    config.weights = weights;
    config.calibration = &rows;
    if (!operation_net(operation, act, d_in, &net)) return;
    coded_weights(rng, &net, weights == MOE_WEIGHTS_INT8 ? 127 : 7);
    if (CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, operations[operation].name, error)) {
        closeness c;
        rows.n = 100;
        for (i = 0; i < rows.n; i++) {
            signed char *codes = (signed char *)grab((size_t)d_in, 1);
            int p;
            levels_of(&built.model, x + i * (size_t)d_in, codes);
            for (p = 0; p < d_in; p++) x[i * (size_t)d_in + (size_t)p] = codes[p] * (moe_real)built.model.input_scale;
            free(codes);
        }
        c = compare_with_floats(&net, &built.model, &rows);
        if (!CHECK(c.error <= most && c.elsewhere <= 0, operations[operation].name) || verbose)
            printf("    %s, %s, %d inputs, int%d: error %.4f, at most %.4f\n", operations[operation].name,
                   moei_act_names[act], d_in, weights == MOE_WEIGHTS_INT8 ? 8 : 4, c.error, most);
        moe_model_free(&built);
    }
    moe_net_free(&net);
    drop_data(&rows);
}

static void test_operations(int operation) {
    static const int widths[] = {2, 5, 12, 512, 3, 4, 8, 16, 33, 64};
    const size_t n = quick ? 4 : sizeof widths / sizeof *widths;
    moe_rng rng;
    size_t i;
    int act, weights;
    moe_rng_seed(&rng, 26);
    for (i = 0; i < n; i++)
        for (weights = MOE_WEIGHTS_INT8; weights <= MOE_WEIGHTS_INT4; weights++)
            for (act = 0; act < MOE_ACT_COUNT; act++) {
                const int acts = operation == CURVE || operation == EXPERTS_MLP || operation == EXPERTS_GLU;
                if (act == 0 || acts) try_operation(&rng, operation, act, widths[i], weights);
            }
}

/* ---- handwritten digits ---- */

enum { PIXELS = 64, CLASSES = 10, MOST_DIGITS = 5000 };

/* examples/data/digits.csv; no rows where it is not to be found. */
static moe_data read_digits(void) {
    moe_data data;
    moe_real *x = (moe_real *)grab((size_t)MOST_DIGITS * PIXELS, sizeof *x);
    int32_t *labels = (int32_t *)grab(MOST_DIGITS, sizeof *labels);
    FILE *f = fopen("examples/data/digits.csv", "r");
    char line[1024];
    int i;
    memset(&data, 0, sizeof data);
    data.x = x;
    data.labels = labels;
    for (; f != NULL && data.n < MOST_DIGITS && fgets(line, sizeof line, f) != NULL; data.n++) {
        char *at = line;
        for (i = 0; i < PIXELS; i++, at += *at == ',')
            x[data.n * PIXELS + (size_t)i] = (moe_real)((double)strtol(at, &at, 10) / 16.0);
        labels[data.n] = (int32_t)strtol(at, NULL, 10);
    }
    if (f != NULL) fclose(f);
    return data;
}

static void digits_mixture(moe_net *net) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 8;
    c.router.top_k = 2;
    c.router.loss_balance = (moe_real)0.05;
    c.expert = MOE_EXPERT_MLP;
    c.d_ff = 16;
    c.d_out = 32;
    (void)moe_net_mixture(net, &c);
    (void)moe_net_linear(net, CLASSES);
}

static void digits_mlp(moe_net *net) {
    (void)moe_net_linear(net, 32);
    (void)moe_net_activation(net, MOE_ACT_RELU);
    (void)moe_net_linear(net, 16);
    (void)moe_net_activation(net, MOE_ACT_RELU);
    (void)moe_net_linear(net, CLASSES);
}

/* The network of examples/quickstart.c. */
static void digits_quickstart(moe_net *net) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 8;
    c.router.top_k = 2;
    c.router.loss_balance = (moe_real)0.05;
    c.d_ff = 32;
    (void)moe_net_linear(net, 64);
    (void)moe_net_layer_norm(net);
    (void)moe_net_mixture(net, &c);
    (void)moe_net_residual(net, 2);
    (void)moe_net_layer_norm(net);
    (void)moe_net_linear(net, CLASSES);
}

static const struct digits_net {
    const char *name;
    void (*add)(moe_net *net);
    double less8, less4; /* the most that accuracy may fall */
} digits_nets[] = {{"digits: relu", digits_mlp, 0.005, 0.03}, {"digits: mixture", digits_mixture, 0.005, 0.03},
                   {"digits: quickstart", digits_quickstart, 0.005, 0.03}};

/* Trains one network on three rows of five, and judges its models by the other two. */
static void test_digits_net(const struct digits_net *row, const moe_data *train, const moe_data *test) {
    moe_net net;
    moe_error error;
    moe_train_config c;
    int weights;
    memset(&c, 0, sizeof c);
    memset(&error, 0, sizeof error);
    c.epochs = 20;
    c.batch = 32;
    c.rate = (moe_real)0.004;
    c.seed = 1;
    (void)moe_net_init(&net, PIXELS, MOE_KERNELS_C, NULL);
    row->add(&net);
    if (!CHECK_SAYS(moe_net_build(&net, 1, 1, &error), MOE_OK, row->name, error)) return;
    CHECK_SAYS(moe_fit(&net, train, NULL, &c, &error), MOE_OK, row->name, error);
    for (weights = MOE_WEIGHTS_INT8; weights <= MOE_WEIGHTS_INT4; weights++) {
        moe_model_config config;
        moe_built_model built;
        closeness close;
        memset(&config, 0, sizeof config);
        config.weights = weights;
        config.calibration = train;
        if (!CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, row->name, error)) continue;
        close = compare_with_floats(&net, &built.model, test);
        if (!CHECK(close.accuracy >= close.exact_accuracy - (weights == MOE_WEIGHTS_INT8 ? row->less8 : row->less4),
                   row->name) ||
            !CHECK(close.exact_accuracy > 0.9, "the net has learned") || verbose)
            printf("    %s int%d: accuracy %.4f, in floating point %.4f; error %.4f; %.4f of the rows to other "
                   "experts; %u bytes, scratch %u\n",
                   row->name, weights == MOE_WEIGHTS_INT8 ? 8 : 4, close.accuracy, close.exact_accuracy, close.error,
                   close.elsewhere, (unsigned)(built.model.weights_size + built.model.experts_size),
                   (unsigned)built.model.scratch_size);
        moe_model_free(&built);
    }
    moe_net_free(&net);
}

static void test_digits(void) {
    moe_data all = read_digits(), train = all;
    moe_data test = all;
    size_t i;
    train.n = all.n / 5 * 3;
    test.n = all.n - train.n;
    test.x += train.n * PIXELS;
    test.labels += train.n;
    if (CHECK(all.n > 1000, "examples/data/digits.csv"))
        for (i = 0; i < sizeof digits_nets / sizeof *digits_nets; i++) test_digits_net(&digits_nets[i], &train, &test);
    free((void *)(uintptr_t)all.labels);
    drop_data(&all);
}

/* ---- failures ---- */

/* All that takes memory: products of both kinds of constants, a router with a table, a shared
   expert, a residual. */
static int rich_net(moe_net *net) {
    moe_layer_config c;
    moe_error error;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 4;
    c.router.top_k = 2;
    c.router.expert_scale = 1;
    c.router.router_bias = 1;
    c.d_ff = 7;
    c.n_shared = 1;
    c.d_shared = 5;
    (void)moe_net_init(net, 9, MOE_KERNELS_C, NULL);
    (void)moe_net_linear(net, 6);
    (void)moe_net_activation(net, MOE_ACT_GELU);
    (void)moe_net_mixture(net, &c);
    (void)moe_net_residual(net, 1);
    c.router.expert_scale = 0;
    c.expert = MOE_EXPERT_MLP;
    c.n_shared = c.d_shared = 0;
    (void)moe_net_mixture(net, &c);
    (void)moe_net_linear(net, 3);
    return CHECK_SAYS(moe_net_build(net, 0, 3, &error), MOE_OK, "rich net", error);
}

static moe_model_config int8_config(const moe_data *rows) {
    moe_model_config c;
    memset(&c, 0, sizeof c);
    c.weights = MOE_WEIGHTS_INT8;
    c.calibration = rows;
    return c;
}

/* A built model of the rich net, and what it was made of. */
typedef struct rich {
    moe_net net;
    moe_data rows;
    moe_model_config config;
    moe_built_model built;
} rich;

static int rich_begin(rich *r, int loader) {
    moe_rng rng;
    moe_error error;
    moe_rng_seed(&rng, 8);
    memset(&r->built, 0, sizeof r->built);
    r->rows = random_rows(&rng, 50, 9, 1);
    if (!rich_net(&r->net)) return 0;
    r->config = int8_config(&r->rows);
    r->config.loader = loader;
    return CHECK_SAYS(moe_model_create(&r->built, &r->net, &r->config, &error), MOE_OK, "model of the rich net", error);
}

static void rich_end(rich *r) {
    moe_model_free(&r->built);
    moe_net_free(&r->net);
    drop_data(&r->rows);
}

static void untouched_begin(moe_built_model *built) { memset(built, FILL, sizeof *built); }

static int untouched(const moe_built_model *built) {
    const unsigned char *p = (const unsigned char *)built;
    size_t i;
    for (i = 0; i < sizeof *built; i++)
        if (p[i] != FILL) return 0;
    return 1;
}

static void test_allocations(void) {
    rich r;
    int turn;
    if (!rich_begin(&r, 0)) return;
    for (turn = MOE_REAL_IS_DOUBLE ? 2 : 0; turn < 2 * MOE_WEIGHTS_COUNT; turn++) { /* float models want float */
        const int weights = turn / 2, once = turn % 2;
        long at = 0, calls = 1;
        for (r.config.weights = weights; at < calls && at < 2000; ) {
            moe_built_model built;
            moe_status status;
            moe_error error;
            test_heap heap;
            untouched_begin(&built);
            r.config.allocator = test_allocator(&heap, ++at);
            heap.fail_on = !once;
            status = moe_model_create(&built, &r.net, &r.config, &error);
            calls = heap.calls;
            if (status == MOE_OK) {
                /* a buffer that cannot double tries less */
                CHECK(calls < at || once, "an allocation that fails is seen");
                moe_model_free(&built);
                moe_model_free(&built);
            } else if (CHECK_SAYS(status, MOE_ERR_MEMORY, "an allocation that fails", error))
                CHECK(error.code == MOE_ERR_MEMORY && error.message[0] != '\0' && untouched(&built),
                      "a failed call says so and changes nothing");
            CHECK(heap.blocks == 0 && !heap.wrong_size, "all memory is given back, by its size");
            if (status != MOE_OK && calls == at) calls++;
        }
        CHECK(at < 2000 && (weights == MOE_WEIGHTS_FLOAT || at > 20), "all allocations have failed once");
    }
    memset(&r.config.allocator, 0, sizeof r.config.allocator);
    rich_end(&r);
}

/* A stream whose fail_at-th write fails. */
typedef struct sink {
    long writes, fail_at;
    size_t size;
} sink;

static moe_status sink_write(void *ctx, const void *from, size_t size) {
    sink *s = (sink *)ctx;
    (void)from;
    if (++s->writes == s->fail_at) return MOE_ERR_IO;
    if (s->fail_at > 0 && s->writes > s->fail_at) return MOE_ERR_STATE; /* nobody writes after a failure */
    s->size += size;
    return MOE_OK;
}

static void test_streams(void) {
    int experts;
    for (experts = 0; experts < 2; experts++) {
        rich r;
        moe_status status = MOE_ERR_IO;
        long at;
        if (!rich_begin(&r, experts)) continue;
        for (at = 1; status != MOE_OK && at < 100000; at++) {
            moe_error error;
            moe_stream stream;
            sink s;
            memset(&s, 0, sizeof s);
            memset(&stream, 0, sizeof stream);
            s.fail_at = at;
            stream.ctx = &s;
            stream.write = sink_write;
            status = experts ? moe_export_experts(&r.built, &stream, &error)
                             : moe_export_c(&r.built, "rich", &stream, &error);
            if (status == MOE_OK) CHECK(s.writes < at && s.size > 100, "all writes have failed once");
            else if (status != MOE_ERR_IO || error.code != MOE_ERR_IO || s.writes != at) break;
        }
        CHECK_STATUS(status, MOE_OK, "each write that fails ends the export at once");
        rich_end(&r);
    }
}

#define REFUSED(wanted, word, net) \
    do { \
        moe_built_model not_built; \
        moe_error why; \
        memset(&why, 0, sizeof why); \
        untouched_begin(&not_built); \
        if (!CHECK_SAYS(moe_model_create(&not_built, net, &config, &why), wanted, word, why)) break; \
        if (strstr(why.message, word) == NULL) CHECKF(0, "\"%s\" does not say %s", why.message, word); \
        CHECK(untouched(&not_built), "a failed call changes nothing"); \
        CHECK_STATUS(moe_model_create(&not_built, net, &config, NULL), wanted, "error may be NULL"); \
    } while (0)

/* What the header of a float model says of its mixtures: swiglu experts are three matrices of 6 x
   5. */
static void test_float_comment(void) {
    static const char masks[] =
        "#if defined(MOE_IMPLEMENTATION) && defined(MOE_NO_TRAIN) && !defined(MOE_H) && !defined(MOE_KEEP_ALL)\n"
        "#define MOE_KEEP_ACTS 3\n#define MOE_KEEP_SCORES 1\n#define MOE_KEEP_GATES 1\n#define MOE_KEEP_SELECTS 1\n"
        "#define MOE_KEEP_WEIGHTS 1\n#define MOE_KEEP_INPUTS 1\n#define MOE_KEEP_REFINES 1\n"
        "#define MOE_KEEP_MODULES 11\n#define MOE_KEEP_EXTRAS 0\n"
        "#ifndef MOE_NO_MESSAGES\n#define MOE_NO_MESSAGES\n#endif\n#endif\n\n#include \"moe.h\"\n";
    char line[100];
    const char *after;
    moe_model_config config;
    moe_built_model built;
    moe_layer_config c;
    moe_buffer text;
    moe_stream stream;
    moe_net net;
    int i;
    if (sizeof(moe_real) != sizeof(float)) return;
    memset(&config, 0, sizeof config);
    memset(&c, 0, sizeof c);
    memset(&text, 0, sizeof text);
    config.weights = MOE_WEIGHTS_FLOAT;
    config.same_bits = 1;
    c.router.n_experts = 4;
    c.router.top_k = 2;
    c.d_ff = 5;
    (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
    (void)moe_net_linear(&net, 6);
    (void)moe_net_mixture(&net, &c);
    (void)moe_net_activation(&net, MOE_ACT_RELU);
    c.router.n_experts = 7;
    c.router.top_k = 3;
    (void)moe_net_mixture(&net, &c);
    stream = moe_buffer_stream(&text);
    if (!CHECK(moe_net_build(&net, 0, 5, NULL) == MOE_OK && moe_model_create(&built, &net, &config, NULL) == MOE_OK,
               "a float model"))
        return;
    CHECK(moe_export_c(&built, "said", &stream, NULL) == MOE_OK && stream.write(stream.ctx, "", 1) == MOE_OK,
          "is printed, and ends as a string");
    after = (const char *)text.data;
    CHECK(strstr(after, masks) != NULL, "what the build leaves out");
    after = strstr(after, " has left out: define MOE_KEEP_ALL before both");
    CHECK(after != NULL && strstr(after + 2, "has left out") == NULL, "once");
    for (i = 0; i < 2; i++) {
        sprintf(line, "MoE layer %d %d experts of %lu bytes, at most %d per token\n", i, i ? 7 : 4,
                (unsigned long)(90 * sizeof(moe_real)), i ? 3 : 2);
        CHECK(text.data != NULL && strstr((const char *)text.data, line) != NULL, line);
    }
    CHECK(text.data != NULL && strstr((const char *)text.data,
                                      "     static unsigned char scratch[SAID_SCRATCH];\n"
                                      "     float input[SAID_INPUTS]; float output[SAID_OUTPUTS];\n") != NULL,
          "how it is called");
    moe_model_free(&built);
    moe_net_free(&net);
    moe_buffer_free(&text);
}

/* Why there is no float model: in the double build there is none of any net. */
static const char *no_float_model(const char *word) {
    return sizeof(moe_real) == sizeof(float) ? word : "MOE_REAL is double";
}

/* No model, of integers or of floats, holds functions of the caller, neither from the start nor
   until switch_at. */
static void test_refused_functions(void) {
    static const char *const settings[] = {"score=custom", "select=custom", "switch_at=3 switch_from=custom",
                                           "switch_at=3 switch_from=hash table_size=9",
                                           "student=1 freeze_at=3 loss_distill=1 student_dim=2 table_size=9"};
    static const char *const words[] = {"score = custom", "custom", "custom", "select = hash", "student_dim"};
    size_t i;
    for (i = 0; i < sizeof settings / sizeof *settings; i++) {
        moe_model_config config;
        moe_layer_config c;
        moe_net net;
        memset(&config, 0, sizeof config);
        memset(&c, 0, sizeof c);
        config.weights = MOE_WEIGHTS_FLOAT;
        config.same_bits = 1;
        c.router.n_experts = 4;
        c.router.top_k = 2;
        c.d_ff = 5;
        CHECK(moe_fields_apply(moe_layer_fields(), &c, settings[i], NULL) == MOE_OK, settings[i]);
        (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
        (void)moe_net_mixture(&net, &c);
        if (CHECK(moe_net_build(&net, 0, 5, NULL) == MOE_OK, settings[i]))
            REFUSED(MOE_ERR_UNSUPPORTED, no_float_model(words[i]), &net);
        moe_net_free(&net);
    }
}

static void test_refused_configs(void) {
    const moe_real infinity_real = (moe_real)HUGE_VAL;
    rich r;
    moe_model_config config;
    moe_data rows;
    moe_net empty;
    moe_real *x, kept;
    if (!rich_begin(&r, 0)) return;
    config = r.config;
    CHECK_STATUS(moe_model_create(NULL, &r.net, &config, NULL), MOE_ERR_ARGUMENT, "built NULL");
    REFUSED(MOE_ERR_ARGUMENT, "net", NULL);
    (void)moe_net_init(&empty, 3, MOE_KERNELS_C, NULL);
    REFUSED(MOE_ERR_STATE, "net", &empty);
    moe_net_free(&empty);
    config.weights = MOE_WEIGHTS_COUNT;
    REFUSED(MOE_ERR_CONFIG, "weights = 3", &r.net);
    config.weights = -1;
    REFUSED(MOE_ERR_CONFIG, "weights = -1", &r.net);
    config.weights = MOE_WEIGHTS_INT4;
    config.loader = 2;
    REFUSED(MOE_ERR_CONFIG, "loader = 2", &r.net);
    config.weights = MOE_WEIGHTS_FLOAT;
    config.loader = 1;
    REFUSED(MOE_ERR_UNSUPPORTED, "loader = 1", &r.net);
    config = r.config;
    config.calibration = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "calibration", &r.net);
    rows = r.rows;
    rows.n = 0;
    config.calibration = &rows;
    REFUSED(MOE_ERR_ARGUMENT, "calibration", &r.net);
    rows = r.rows;
    rows.x = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "x", &r.net);
    rows = r.rows;
    rows.length = 7;
    REFUSED(MOE_ERR_ARGUMENT, "length = 7", &r.net);
    rows = r.rows;
    x = (moe_real *)(uintptr_t)r.rows.x;
    kept = x[17];
    x[17] = infinity_real;
    REFUSED(MOE_ERR_NONFINITE, "x[1][8]", &r.net);
    x[17] = infinity_real - infinity_real;
    REFUSED(MOE_ERR_NONFINITE, "x[1][8]", &r.net);
    x[17] = kept;
    x = net_tensor(&r.net, "0.weight")->data;
    kept = x[3];
    x[3] = infinity_real;
    REFUSED(MOE_ERR_NONFINITE, "0.weight[3]", &r.net);
    x[3] = infinity_real - infinity_real;
    REFUSED(MOE_ERR_NONFINITE, "0.weight[3]", &r.net);
    x[3] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e300 : 1e37);
    x = net_tensor(&r.net, "5.weight")->data;
    x[0] = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e300 : 1e37);
    REFUSED(MOE_ERR_NONFINITE, "calibration", &r.net);
    rich_end(&r);
}

/* Modules and options without an integer form. */
static void test_refused_modules(void) {
    moe_rng rng;
    moe_data rows;
    moe_net net;
    moe_error error;
    moe_model_config config;
    moe_layer_config c;
    int i;
    moe_rng_seed(&rng, 4);
    rows = random_rows(&rng, 10, 6, 1);
    config = int8_config(&rows);
    for (i = 0; i < 6; i++) {
        static const char *const words[6] = {"score", "refine", "apply_to", "select", "select", "expert_choice"};
        memset(&c, 0, sizeof c);
        c.router.n_experts = 4;
        if (i == 0) {
            c.router.score = MOE_SCORE_DSELECT;
            c.router.weight = MOE_WEIGHT_RAW;
        }
        if (i == 1) c.router.refine = MOE_REFINE_SIMILARITY;
        if (i == 2) {
            c.router.score = MOE_SCORE_NORM;
            c.router.apply_to = MOE_APPLY_INPUT;
            c.expert = MOE_EXPERT_FACTORISED;
        }
        if (i == 3) c.router.select = MOE_SELECT_GIVEN;
        if (i == 4) {
            c.router.select = MOE_SELECT_HASH;
            c.router.table_size = 10;
        }
        if (i == 5) {
            c.router.select = MOE_SELECT_EXPERT_CHOICE;
            c.router.weight = MOE_WEIGHT_RAW;
        }
        (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
        (void)moe_net_linear(&net, 6);
        (void)moe_net_mixture(&net, &c);
        if (CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, words[i], error)) {
            REFUSED(MOE_ERR_UNSUPPORTED, words[i], &net);
            REFUSED(MOE_ERR_UNSUPPORTED, "module 1", &net);
        }
        config.weights = i == 3 || i == 4 ? MOE_WEIGHTS_FLOAT : config.weights; /* that no integers could tell */
        if (config.weights == MOE_WEIGHTS_FLOAT) REFUSED(MOE_ERR_UNSUPPORTED, no_float_model(words[i]), &net);
        config.weights = MOE_WEIGHTS_INT8;
        moe_net_free(&net);
    }
    drop_data(&rows);
}

/* Widths at the end of what an operation can say. */
static void test_widths(void) {
    static const struct {
        int d_in, d_out;
        moe_status status;
    } widths[] = {
        {65532, 1, MOE_OK}, {1, 65532, MOE_OK}, {65533, 1, MOE_ERR_UNSUPPORTED}, {1, 65533, MOE_ERR_UNSUPPORTED}};
    moe_rng rng;
    size_t i;
    moe_rng_seed(&rng, 4);
    for (i = 0; i < sizeof widths / sizeof *widths; i++) {
        moe_data rows = random_rows(&rng, 2, (size_t)widths[i].d_in, 1);
        moe_model_config config = int8_config(&rows);
        moe_net net;
        moe_error error;
        (void)moe_net_init(&net, widths[i].d_in, MOE_KERNELS_C, NULL);
        (void)moe_net_linear(&net, widths[i].d_out);
        if (!CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "a wide net", error)) continue;
        if (widths[i].status == MOE_OK) {
            agreement all;
            moe_built_model built;
            memset(&all, 0, sizeof all);
            if (CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "the widest model", error)) {
                compare_interpreters(&rng, &built, 4, &all);
                moe_model_free(&built);
            }
        } else REFUSED(widths[i].status, "module 0", &net);
        moe_net_free(&net);
        drop_data(&rows);
    }
}

/* Mixtures behind a linear module and another mixture, with and without what takes memory of its
   own. */
static const char *const mixtures[] = {
    "score=mlp router_hidden=5 router_act=tanh",
    "score=cosine cosine_dim=3 n_shared=1 d_shared=4 shared_sigmoid=1",
    "score=cosine input=scaled_rms expert_scale=1",
    "score=norm norm_node=gate",
    "score=norm norm_node=output norm_order=l1 expert=mlp act=gelu",
    "score=grap grap_cosine=1",
    "score=grap input=scaled_rms selection_bias=1",
    "score=attentive router_act=tanh",
    "score=competition gate=identity weight=softmax",
    "input=adaptive_clustering ac_mode=running ac_mix=2",
    "gate=sigmoid select=threshold threshold_learned=1 weight=raw",
    "expert=factorised d_low=3 add_input=1",
    "swiglu_limit=3 swiglu_alpha=1.7 swiglu_offset=1 expert_bias=1 apply_to=input",
    "d_latent=3 n_shared=1 d_shared=4 shared_sigmoid=1",
};

/* Each allocation fails once: the call ends with MOE_ERR_MEMORY, says so, gives all memory back and
   changes nothing. */
static void fail_each(const moe_net *net, moe_model_config *config, const char *what) {
    moe_status status = MOE_ERR_MEMORY;
    long at;
    for (at = 1; status == MOE_ERR_MEMORY && at < 5000; at++) {
        moe_built_model built;
        moe_error error;
        test_heap heap;
        untouched_begin(&built);
        error.message[0] = '\0';
        config->allocator = test_allocator(&heap, at);
        status = moe_model_create(&built, net, config, &error);
        if (status == MOE_OK) moe_model_free(&built);
        else CHECK(error.code == status && error.message[0] != '\0' && untouched(&built), what);
        CHECK(heap.blocks == 0 && !heap.wrong_size, what);
    }
    CHECK(at > 20, what);
    CHECK_STATUS(status, MOE_OK, what);
    memset(&config->allocator, 0, sizeof config->allocator);
}

static void test_failing_mixtures(void) {
    moe_rng rng;
    moe_data rows;
    size_t i;
    moe_rng_seed(&rng, 40);
    rows = random_rows(&rng, 8, 6, 1);
    for (i = 0; i < sizeof mixtures / sizeof *mixtures; i++) {
        moe_model_config config = int8_config(&rows);
        moe_layer_config c;
        moe_error error;
        moe_net net;
        memset(&c, 0, sizeof c);
        c.router.n_experts = 4;
        c.router.top_k = 2;
        c.d_ff = 5;
        (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
        (void)moe_net_linear(&net, 8);
        (void)moe_net_mixture(&net, &c);
        CHECK_SAYS(moe_fields_apply(moe_layer_fields(), &c, mixtures[i], &error), MOE_OK, mixtures[i], error);
        (void)moe_net_mixture(&net, &c);
        (void)moe_net_layer_norm(&net);
        (void)moe_net_linear(&net, 3);
        if (CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, mixtures[i], error)) {
            random_tensors(&rng, &net);
            fail_each(&net, &config, mixtures[i]);
        }
        moe_net_free(&net);
    }
    drop_data(&rows);
}

/* Of several obstacles the first is told: the data, then the tensors, then the modules. */
static void test_first_obstacle(void) {
    moe_model_config config;
    moe_layer_config c, rms;
    moe_error error;
    moe_data rows, uneven;
    moe_net net;
    moe_rng rng;
    moe_real *weight, kept;
    moe_rng_seed(&rng, 41);
    rows = random_rows(&rng, 10, 6, 1);
    config = int8_config(&rows);
    memset(&c, 0, sizeof c);
    c.router.n_experts = 4;
    (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
    (void)moe_net_linear(&net, 6);
    c.router.score = MOE_SCORE_DSELECT;
    c.router.weight = MOE_WEIGHT_RAW;
    (void)moe_net_mixture(&net, &c);
    memset(&c.router, 0, sizeof c.router);
    c.router.n_experts = 4;
    c.router.gate = MOE_GATE_IDENTITY;
    c.router.weight = MOE_WEIGHT_RAW;
    c.router.score = MOE_SCORE_NORM;
    c.router.norm_node = MOE_NODE_GATE;
    c.router.apply_to = MOE_APPLY_INPUT;
    c.router.refine = MOE_REFINE_SIMILARITY;
    c.router.causal = 1;
    c.swiglu_limit = 2;
    (void)moe_net_mixture(&net, &c);
    memset(&rms, 0, sizeof rms);
    rms.router.n_experts = 4;
    rms.router.input = MOE_INPUT_ADAPTIVE_CLUSTERING;
    rms.router.ac_mode = MOE_AC_RUNNING;
    rms.router.ac_mix = 2;
    (void)moe_net_mixture(&net, &rms);
    CHECK(moe_layer_preset("stablemoe", &c, NULL) == MOE_OK);
    c.router.freeze_at = 5;
    c.router.student_dim = 0;
    (void)moe_net_mixture(&net, &c);
    (void)moe_net_linear(&net, 65533);
    if (!CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "a net of obstacles", error)) return;
    net_tensor(&net, "4.router.step")->data[0] = 10;
    weight = net_tensor(&net, "0.weight")->data;
    kept = weight[3];
    weight[3] = weight[5] = (moe_real)HUGE_VAL;
    config.calibration = NULL;
    REFUSED(MOE_ERR_ARGUMENT, "calibration: integer weights need some rows", &net);
    uneven = rows;
    uneven.length = 4;
    config.calibration = &uneven;
    REFUSED(MOE_ERR_ARGUMENT, "calibration: n = 10: must be a multiple of length = 4", &net);
    config.calibration = &rows;
    REFUSED(MOE_ERR_NONFINITE, "0.weight[3]", &net);
    weight[3] = weight[5] = kept;
    REFUSED(MOE_ERR_UNSUPPORTED, "module 1: score = dselect", &net);
    moe_net_free(&net);
    drop_data(&rows);
}

/* Hidden widths and states beyond what an operation can say are refused by module. */
static void test_beyond_operations(void) {
    static const struct {
        const char *settings;
        int attentions, d_head;
    } rows[] = {{"expert=mlp d_ff=65533", 0, 0}, {NULL, 1, 2048}, {NULL, 2, 1024}};
    moe_rng rng;
    size_t i;
    int32_t ids[2] = {0, 1};
    moe_rng_seed(&rng, 42);
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe_data data;
        moe_model_config config;
        moe_layer_config c;
        moe_attention_config a;
        moe_error error;
        moe_net net;
        char word[40];
        int j;
        memset(&data, 0, sizeof data);
        memset(&a, 0, sizeof a);
        memset(&c, 0, sizeof c);
        data.n = 2;
        data.token_ids = ids;
        data.length = 1;
        config = int8_config(&data);
        config.length = 65535;
        a.heads = 16;
        a.d_head = rows[i].d_head;
        (void)moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
        (void)moe_net_embedding(&net, 2, 16);
        if (rows[i].settings != NULL) {
            CHECK(moe_fields_apply(moe_layer_fields(), &c, rows[i].settings, &error) == MOE_OK, error.message);
            (void)moe_net_feed_forward(&net, &c);
        }
        for (j = 0; j < rows[i].attentions; j++) (void)moe_net_attention(&net, &a);
        sprintf(word, "module %d: sizes", rows[i].attentions > 1 ? rows[i].attentions : 1);
        if (CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, word, error)) REFUSED(MOE_ERR_OVERFLOW, word, &net);
        moe_net_free(&net);
    }
}

/* Attention counts tokens in 16 bits; a table of the angles of more of them is not begun. */
static void test_long_sequences(void) {
    static const size_t lengths[] = {65536, (size_t)1 << 24};
    static double memory[1 << 17];
    int32_t ids[2] = {0, 1};
    moe_attention_config rotary;
    moe_arena arena;
    moe_data data;
    int i;
    moe_model_config config;
    moe_error error;
    moe_net net;
    memset(&data, 0, sizeof data);
    data.n = 2;
    data.token_ids = ids;
    data.length = 1;
    memset(&rotary, 0, sizeof rotary);
    rotary.rotary = 1;
    config = int8_config(&data);
    (void)moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
    (void)moe_net_embedding(&net, 2, 16);
    (void)moe_net_attention(&net, &rotary);
    if (CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "a network", error))
        for (i = 0; i < 2; i++) {
            memset(&arena, 0, sizeof arena);
            arena.base = memory;
            arena.size = sizeof memory;
            config.allocator = moe_arena_allocator(&arena);
            config.length = lengths[i];
            REFUSED(MOE_ERR_UNSUPPORTED, "module 1: attention over a length of more than 65535", &net);
        }
    moe_net_free(&net);
}

/* Calibration data has no longer sequences than the network has positions. */
static void test_calibrated_positions(void) {
    int32_t ids[6] = {0, 1, 0, 1, 1, 0};
    moe_data data;
    moe_model_config config;
    moe_built_model built;
    moe_error error;
    moe_net net;
    memset(&data, 0, sizeof data);
    data.n = 6;
    data.token_ids = ids;
    data.length = 3;
    config = int8_config(&data);
    config.length = 2;
    (void)moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
    (void)moe_net_embedding(&net, 2, 16);
    (void)moe_net_positions(&net, 3);
    if (CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "a network", error)) {
        CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "", error);
        CHECK(built.model.length == 2);
        moe_model_free(&built);
        data.length = 6;
        REFUSED(MOE_ERR_ARGUMENT, "calibration: length = 6: the network has 3 positions", &net);
    }
    moe_net_free(&net);
}

static void unpack(const moe_kernels *k, const moe_external *w, size_t row, size_t from, size_t count,
                   moe_real *values) {
    (void)k;
    memcpy(values, w->data + row * w->row + from * sizeof *values, count * sizeof *values);
}

/* Matrices in a file, as those of imported models, which run, but have no floats to convert. */
static void test_weights_in_a_file(void) {
    static const moe_external_type type = {"test", 1, (int)sizeof(moe_real), unpack, 0, 0, NULL, NULL};
    moe_external in_file;
    moe_rng rng;
    moe_data rows;
    moe_model_config config;
    moe_net net;
    int i;
    moe_rng_seed(&rng, 45);
    rows = random_rows(&rng, 8, 6, 1);
    config = int8_config(&rows);
    (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
    (void)moe_net_linear(&net, 6);
    CHECK(moe_net_build(&net, 0, 1, NULL) == MOE_OK);
    memset(&in_file, 0, sizeof in_file);
    in_file.type = &type;
    in_file.data = (const unsigned char *)net.modules[0].tensors[MOE_MODULE_WEIGHT];
    in_file.row = 6 * sizeof(moe_real);
    in_file.column = sizeof(moe_real);
    in_file.exact = 1;
    net.modules[0].external = &in_file;
    net.modules[0].tensors[MOE_MODULE_WEIGHT] = net.tensors[0].data = NULL;
    for (i = MOE_REAL_IS_DOUBLE; i < MOE_WEIGHTS_COUNT; i++) {
        config.weights = i;
        REFUSED(MOE_ERR_UNSUPPORTED, "module 0: tensor weight lies in a file", &net);
    }
    moe_net_free(&net);
    drop_data(&rows);
}

/* Weights that may be negative are not mixed: those of a layer before with another gate, scale or
   scales of experts. */
static void test_negative_mixes(void) {
    static const char *const before[] = {"gate=identity weight=raw", "expert_scale=1", "scale=-1", "scale=1.5"};
    moe_rng rng;
    moe_data rows;
    size_t i;
    moe_rng_seed(&rng, 44);
    rows = random_rows(&rng, 8, 6, 1);
    for (i = 0; i < 4; i++) {
        moe_model_config config = int8_config(&rows);
        moe_layer_config c;
        moe_built_model built;
        moe_error error;
        moe_net net;
        memset(&c, 0, sizeof c);
        CHECK(moe_fields_apply(moe_layer_fields(), &c, "n_experts=4 top_k=2 d_ff=5", &error) == MOE_OK);
        CHECK(moe_fields_apply(moe_layer_fields(), &c, before[i], &error) == MOE_OK, before[i]);
        (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
        (void)moe_net_mixture(&net, &c);
        memset(&c, 0, sizeof c);
        CHECK(moe_fields_apply(moe_layer_fields(), &c,
                               "n_experts=4 d_ff=5 input=adaptive_clustering ac_mode=running ac_mix=2",
                               &error) == MOE_OK);
        (void)moe_net_mixture(&net, &c);
        if (CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, before[i], error)) {
            if (i < 3) REFUSED(MOE_ERR_UNSUPPORTED, "module 1: ac_mix = 2 of weights that may be negative", &net);
            else if (CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, before[i], error))
                moe_model_free(&built);
        }
        moe_net_free(&net);
    }
    drop_data(&rows);
}

/* A norm whose gains are all 0 leaves what is added behind it. */
static void test_norm_of_zeros(void) {
    moe_rng rng;
    moe_data rows;
    moe_model_config config;
    moe_built_model built;
    moe_error error;
    moe_net net;
    moe_real *bias;
    moe_rng_seed(&rng, 45);
    rows = random_rows(&rng, 8, 6, 1);
    config = int8_config(&rows);
    (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
    (void)moe_net_linear(&net, 6);
    (void)moe_net_rms_norm(&net);
    (void)moe_net_linear(&net, 3);
    if (!CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "a norm", error)) return;
    memset(net_tensor(&net, "1.weight")->data, 0, 6 * sizeof(moe_real));
    bias = net_tensor(&net, "2.bias")->data;
    bias[0] = 1;
    bias[1] = (moe_real)-0.5;
    bias[2] = (moe_real)0.25;
    if (CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "a norm of zeros", error)) {
        const double scale = (double)built.model.output_scale;
        void *room = grab(built.model.scratch_size, 1);
        signed char in[6];
        int16_t out[3];
        levels_of(&built.model, rows.x, in);
        CHECK_STATUS(moe_infer(&built.model, NULL, in, out, room, built.model.scratch_size), MOE_OK);
        CHECK_NEAR(scale * out[0], 1, 0.01);
        CHECK_NEAR(scale * out[1], -0.5, 0.01);
        CHECK_NEAR(scale * out[2], 0.25, 0.01);
        free(room);
        moe_model_free(&built);
    }
    moe_net_free(&net);
    drop_data(&rows);
}

/* A float model's header keeps the code of capacities for layers that have one. */
static void test_kept_capacity(void) {
    static const char *const settings[] = {"top_k=2", "capacity_factor=4", "capacity_factor_eval=4",
                                           "capacity_factor=4 drop_rule=gshard"};
    size_t i;
    if (sizeof(moe_real) != sizeof(float)) return;
    for (i = 0; i < sizeof settings / sizeof *settings; i++) {
        moe_model_config config;
        moe_layer_config c;
        moe_built_model built;
        moe_buffer text;
        moe_stream stream;
        moe_error error;
        moe_net net;
        char line[40];
        memset(&config, 0, sizeof config);
        memset(&c, 0, sizeof c);
        memset(&text, 0, sizeof text);
        config.weights = MOE_WEIGHTS_FLOAT;
        config.same_bits = 1;
        c.router.n_experts = 4;
        c.d_ff = 3;
        CHECK(moe_fields_apply(moe_layer_fields(), &c, settings[i], &error) == MOE_OK, settings[i]);
        (void)moe_net_init(&net, 6, MOE_KERNELS_C, NULL);
        (void)moe_net_mixture(&net, &c);
        stream = moe_buffer_stream(&text);
        if (CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, settings[i], error) &&
            CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, settings[i], error)) {
            CHECK_STATUS(moe_export_c(&built, "kept", &stream, &error), MOE_OK);
            CHECK_STATUS(stream.write(stream.ctx, "", 1), MOE_OK);
            sprintf(line, "#define MOE_KEEP_EXTRAS %d\n", i > 0);
            CHECK(strstr((const char *)text.data, line) != NULL, settings[i]);
            moe_model_free(&built);
        }
        moe_buffer_free(&text);
        moe_net_free(&net);
    }
}

/* A float model takes its attention from the network. */
static void test_attention_missing(void) {
    moe_model_config config;
    moe_layer_config c;
    moe_error error;
    moe_net net;
    memset(&config, 0, sizeof config);
    memset(&c, 0, sizeof c);
    config.weights = MOE_WEIGHTS_FLOAT;
    config.same_bits = 1;
    CHECK(moe_fields_apply(moe_layer_fields(), &c, "n_experts=4 refine=attention attention_heads=fixed causal=1 d_ff=3",
                           &error) == MOE_OK);
    (void)moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
    (void)moe_net_embedding(&net, 5, 6);
    (void)moe_net_mixture(&net, &c);
    if (CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "attention of the caller's", error))
        REFUSED(MOE_ERR_UNSUPPORTED,
                no_float_model("module 1 (mixture): refine = attention: there is no attention before it in the net"),
                &net);
    moe_net_free(&net);
}

/* A float model of single tokens routes as decoding does: by the predictor, not by a choice among
   the one token of the call. */
static void test_float_predictor(void) {
    enum { WIDTH = 6, TOKENS = 16, ROOM = 1 << 16 };
    static unsigned char scratch[ROOM], work[ROOM];
    moe_model_config config;
    moe_layer_config c;
    moe_built_model built;
    moe_net_pass pass;
    moe_call call;
    moe_error error;
    moe_net net;
    moe_rng rng = {5};
    moe_real x[WIDTH], y[WIDTH];
    size_t t, differ = 0;
    if (sizeof(moe_real) != sizeof(float)) return;
    memset(&config, 0, sizeof config);
    CHECK_STATUS(moe_layer_preset("mixture_of_depths", &c, &error), MOE_OK);
    c.router.n_experts = 3;
    c.d_ff = 5;
    (void)moe_net_init(&net, WIDTH, MOE_KERNELS_C, NULL);
    (void)moe_net_mixture(&net, &c);
    if (CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "a predictor", error) &&
        CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "a predictor", error)) {
        CHECK(built.model.length == 0 && built.model.scratch_size <= sizeof scratch);
        for (t = 0; t < TOKENS; t++) {
            normals(&rng, WIDTH, 1.0, x);
            memset(&call, 0, sizeof call);
            call.n_tokens = 1;
            call.x = x;
            CHECK_STATUS(moe_infer(&built.model, NULL, x, y, scratch, sizeof scratch), MOE_OK);
            CHECK_STATUS(moe_net_forward(&net, &call, work, sizeof work, &pass), MOE_OK);
            differ += memcmp(pass.y, y, sizeof y) != 0;
            call.decoding = 1;
            CHECK_STATUS(moe_net_forward(&net, &call, work, sizeof work, &pass), MOE_OK);
            CHECK(memcmp(pass.y, y, sizeof y) == 0);
        }
        CHECKF(differ > 0 && differ < TOKENS, "the predictor declines in %d of %d tokens", (int)differ, (int)TOKENS);
        moe_model_free(&built);
    }
    moe_net_free(&net);
}

/* Calibration takes a sequence as a whole, however long, and short ones many at a time: a token
   whose row is 100 times as large widens the range from the last place of all, and sequences that
   were there before do not. */
static void test_long_calibration(void) {
    enum { LONG = 300, MANY = 290, WORDS = 8 };
    moe_rng rng;
    int turn;
    moe_rng_seed(&rng, 43);
    for (turn = 0; turn < 2; turn++) {
        int32_t ids[2 * LONG];
        moe_data data;
        moe_model_config config;
        moe_built_model built, twice;
        moe_error error;
        moe_net net;
        size_t i, n = turn ? 2 * MANY : LONG;
        for (i = 0; i < n; i++) ids[i] = i < n / 2 || !turn ? one_of(&rng, WORDS - 1) : ids[i - n / 2];
        memset(&data, 0, sizeof data);
        data.n = n;
        data.token_ids = ids;
        data.length = turn ? 2 : LONG;
        config = int8_config(&data);
        config.length = LONG;
        (void)moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
        (void)moe_net_embedding(&net, WORDS, 8);
        (void)moe_net_attention(&net, NULL);
        (void)moe_net_residual(&net, 1);
        (void)moe_net_linear(&net, 3);
        if (!CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "a net that reads texts", error)) return;
        for (i = 0; i < 8; i++) net.tensors[0].data[(WORDS - 1) * 8 + i] *= 100;
        if (CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "calibration", error)) {
            data.n = turn ? n / 2 : n;
            CHECK_SAYS(moe_model_create(&twice, &net, &config, &error), MOE_OK, "calibration", error);
            CHECK_NEAR(built.model.output_scale, twice.model.output_scale, 0);
            moe_model_free(&twice);
            data.n = n;
            ids[n - 1] = WORDS - 1;
            CHECK_SAYS(moe_model_create(&twice, &net, &config, &error), MOE_OK, "calibration", error);
            CHECKF(twice.model.output_scale > 2 * built.model.output_scale, "%g, %g", (double)built.model.output_scale,
                   (double)twice.model.output_scale);
            moe_model_free(&twice);
            moe_model_free(&built);
        }
        moe_net_free(&net);
    }
}

/* The order of the rows does not matter: an outlier counts in the first row as in the last. */
static void test_calibration_order(void) {
    enum { ROWS = 9, WIDTH = 4 };
    moe_real x[ROWS * WIDTH];
    moe_layer_config experts;
    moe_data data;
    moe_model_config config;
    moe_built_model built, turned;
    moe_error error;
    moe_net net;
    moe_rng rng;
    size_t i;
    moe_rng_seed(&rng, 44);
    for (i = 0; i < ROWS * WIDTH; i++) x[i] = moe_rng_normal(&rng) * (i < WIDTH ? (moe_real)9 : (moe_real)1);
    memset(&data, 0, sizeof data);
    data.n = ROWS;
    data.x = x;
    config = int8_config(&data);
    memset(&experts, 0, sizeof experts);
    experts.d_ff = 5;
    (void)moe_net_init(&net, WIDTH, MOE_KERNELS_C, NULL);
    (void)moe_net_mixture(&net, &experts);
    (void)moe_net_linear(&net, 3);
    if (!CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "a net", error)) return;
    CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "calibration", error);
    for (i = 0; i < WIDTH; i++) {
        const moe_real first = x[i];
        x[i] = x[(ROWS - 1) * WIDTH + i];
        x[(ROWS - 1) * WIDTH + i] = first;
    }
    CHECK_SAYS(moe_model_create(&turned, &net, &config, &error), MOE_OK, "calibration", error);
    CHECK(built.model.weights_size == turned.model.weights_size &&
              memcmp(built.model.weights, turned.model.weights, built.model.weights_size) == 0 &&
              built.model.n_ops == turned.model.n_ops,
          "the same constants");
    moe_model_free(&turned);
    moe_model_free(&built);
    moe_net_free(&net);
}

/* What a header says of how its model is called, and nothing but that. */
static void check_hint(const moe_built_model *built, const char *call) {
    moe_buffer text;
    moe_stream stream;
    memset(&text, 0, sizeof text);
    stream = moe_buffer_stream(&text);
    CHECK_STATUS(moe_export_c(built, "m", &stream, NULL), MOE_OK, "export");
    CHECK_STATUS(stream.write(stream.ctx, "", 1), MOE_OK, "its end");
    CHECK(text.data != NULL && strstr((const char *)text.data, call) != NULL, call);
    moe_buffer_free(&text);
}

static void refuse_exports(rich *r, rich *behind, moe_stream *stream, moe_stream *deaf, sink *s) {
    static const char *const names[] = {
        "",
        "switch",
        "auto",
        "virtual",
        "concept",
        "_Static_assert",
        "1a",
        "a b",
        "a-b",
        "a.b",
        "n\xc3\xa4me",
        "a\n",
        "a_name_that_is_much_longer_than_any_name_that_somebody_would_type_into_a_program_by_hand_and_then_some"};
    moe_built_model nothing;
    moe_error error;
    size_t i;
    for (i = 0; i < sizeof names / sizeof *names; i++)
        CHECK(moe_export_c(&r->built, names[i], stream, &error) == MOE_ERR_ARGUMENT &&
                  strstr(error.message, "name") != NULL,
              "a name that is no identifier");
    CHECK_STATUS(moe_export_c(NULL, "a", stream, NULL), MOE_ERR_ARGUMENT, "export: built NULL");
    memset(&nothing, 0, sizeof nothing);
    CHECK_STATUS(moe_export_c(&nothing, "a", stream, NULL), MOE_ERR_ARGUMENT, "export: nothing was built");
    CHECK_STATUS(moe_export_c(&r->built, NULL, stream, NULL), MOE_ERR_ARGUMENT, "name NULL");
    CHECK_STATUS(moe_export_c(&r->built, "a", NULL, NULL), MOE_ERR_ARGUMENT, "stream NULL");
    CHECK_STATUS(moe_export_c(&r->built, "a", deaf, NULL), MOE_ERR_ARGUMENT, "a stream that does not write");
    CHECK_STATUS(moe_export_experts(NULL, stream, NULL), MOE_ERR_ARGUMENT, "experts: built NULL");
    CHECK_STATUS(moe_export_experts(&behind->built, NULL, NULL), MOE_ERR_ARGUMENT, "experts: stream NULL");
    CHECK_STATUS(moe_export_experts(&behind->built, deaf, NULL), MOE_ERR_ARGUMENT,
                 "experts: a stream that does not write");
    CHECK_STATUS(moe_export_experts(&r->built, stream, NULL), MOE_ERR_STATE, "experts that are part of the model");
    CHECK(s->writes == 0, "a refused export writes nothing");
}

static void refuse_choices(rich *r, signed char *in, int16_t *out, unsigned char *room, size_t size) {
    moe_model model;
    moe_choice choices[4];
    size_t count = 77;
    model = r->built.model;
    model.version++;
    CHECK_STATUS(moe_infer(&model, NULL, in, out, room, size), MOE_ERR_UNSUPPORTED, "another version");
    CHECK_STATUS(moe_infer_choices(&model, 0, room, choices, 4, &count), MOE_ERR_UNSUPPORTED,
                 "choices: another version");
    CHECK_STATUS(moe_infer_choices(NULL, 0, room, choices, 4, &count), MOE_ERR_ARGUMENT, "choices: model NULL");
    CHECK_STATUS(moe_infer_choices(&r->built.model, 0, room, NULL, 4, &count), MOE_ERR_ARGUMENT, "choices NULL");
    CHECK_STATUS(moe_infer_choices(&r->built.model, 0, NULL, choices, 4, &count), MOE_ERR_ARGUMENT,
                 "choices: scratch NULL");
    CHECK_STATUS(moe_infer_choices(&r->built.model, 0, room, choices, 4, NULL), MOE_ERR_ARGUMENT, "count NULL");
    CHECK_STATUS(moe_infer_choices(&r->built.model, 2, room, choices, 4, &count), MOE_ERR_NOT_FOUND, "no such mixture");
    CHECK(count == 77, "a failed call changes nothing");
    CHECK_STATUS(moe_infer_choices(&r->built.model, 1, room, NULL, 0, &count), MOE_OK, "how many were chosen");
    CHECK(count == 2, "two were chosen");
    choices[1].expert = 77;
    CHECK_STATUS(moe_infer_choices(&r->built.model, 1, room, choices, 1, &count), MOE_OK, "the first choice");
    CHECK(count == 2 && choices[1].expert == 77, "no more than there is room for");
}

static void test_refused_calls(void) {
    rich r, behind;
    moe_stream stream, deaf;
    moe_loader loader;
    sink s;
    shelf books;
    signed char in[9];
    int16_t out[3];
    unsigned char *room;
    size_t size;
    memset(in, 1, sizeof in);
    memset(&s, 0, sizeof s);
    memset(&stream, 0, sizeof stream);
    memset(&deaf, 0, sizeof deaf);
    memset(&books, 0, sizeof books);
    stream.ctx = &s;
    stream.write = sink_write;
    moe_model_free(NULL);
    if (!rich_begin(&r, 0) || !rich_begin(&behind, 1)) return;
    size = r.built.model.scratch_size;
    room = (unsigned char *)grab(size, 1);
    CHECK_STATUS(moe_infer(NULL, NULL, in, out, room, size), MOE_ERR_ARGUMENT, "model NULL");
    CHECK_STATUS(moe_infer(&r.built.model, NULL, NULL, out, room, size), MOE_ERR_ARGUMENT, "input NULL");
    CHECK_STATUS(moe_infer(&r.built.model, NULL, in, NULL, room, size), MOE_ERR_ARGUMENT, "output NULL");
    CHECK_STATUS(moe_infer(&r.built.model, NULL, in, out, NULL, size), MOE_ERR_ARGUMENT, "scratch NULL");
    CHECK_STATUS(moe_infer(&r.built.model, NULL, in, out, room, size - 1), MOE_ERR_SPACE, "a byte too few");
    CHECK_STATUS(moe_infer(&r.built.model, NULL, in, out, room, 0), MOE_ERR_SPACE, "no scratch room");
    CHECK_STATUS(moe_infer(&r.built.model, NULL, in, out, room, size), MOE_OK, "exact scratch room");
    CHECK_STATUS(moe_infer(&r.built.model, NULL, in, out, room, size), MOE_OK, "no loader where none is needed");
    refuse_choices(&r, in, out, room, size);
    refuse_exports(&r, &behind, &stream, &deaf, &s);
    check_hint(&r.built, "moe_infer(&m, NULL, input,");
    check_hint(&behind.built, "moe_infer(&m, &loader, input,");
    free(room);
    size = behind.built.model.scratch_size;
    room = (unsigned char *)grab(size, 1);
    CHECK_STATUS(moe_infer(&behind.built.model, NULL, in, out, room, size), MOE_ERR_UNSUPPORTED, "a loader is needed");
    loader.ctx = &books;
    loader.fetch = NULL;
    CHECK_STATUS(moe_infer(&behind.built.model, &loader, in, out, room, size), MOE_ERR_UNSUPPORTED,
                 "a loader that does nothing");
    loader.fetch = shelf_fetch;
    books.bytes = behind.built.experts.data;
    books.size = behind.built.experts.size;
    for (books.fail_at = 1; books.fail_at <= 4; books.fail_at++, books.fetched = 0)
        CHECK_STATUS(moe_infer(&behind.built.model, &loader, in, out, room, size), MOE_ERR_IO, "a loader that fails");
    CHECK_STATUS(moe_infer(&behind.built.model, &loader, in, out, room, size), MOE_OK, "a loader that does not");
    CHECK(books.fetched == 4 && !books.wrong, "an expert is fetched once");
    free(room);
    rich_end(&r);
    rich_end(&behind);
}

/* A built model may be copied to another place; the old one is then nobody's. */
static void test_moved(void) {
    rich r;
    moe_built_model moved;
    moe_rng rng;
    agreement all;
    moe_stream stream;
    sink s;
    memset(&all, 0, sizeof all);
    memset(&s, 0, sizeof s);
    memset(&stream, 0, sizeof stream);
    stream.ctx = &s;
    stream.write = sink_write;
    moe_rng_seed(&rng, 6);
    if (!rich_begin(&r, 0)) return;
    moved = r.built;
    memset(&r.built, 0x5a, sizeof r.built);
    compare_interpreters(&rng, &moved, 4, &all);
    CHECK_STATUS(moe_export_c(&moved, "moved", &stream, NULL), MOE_OK, "export of a moved model");
    moe_model_free(&moved);
    memset(&r.built, 0, sizeof r.built);
    rich_end(&r);
}

/* Calibration that says little: one row, the same row again, zeros, tiny and large numbers. */
static void test_poor_calibration(void) {
    moe_rng rng;
    size_t i, j;
    int turn;
    moe_rng_seed(&rng, 21);
    for (turn = 0; turn < 12; turn++) {
        moe_data rows = random_rows(&rng, 50, 9, 1);
        moe_real *x = (moe_real *)(uintptr_t)rows.x;
        moe_model_config config = int8_config(&rows);
        moe_built_model built;
        moe_error error;
        moe_net net;
        agreement all;
        memset(&all, 0, sizeof all);
        memset(&error, 0, sizeof error);
        config.weights = turn % 2 ? MOE_WEIGHTS_INT4 : MOE_WEIGHTS_INT8;
        for (i = 0; i < 50 * 9; i++) {
            if (turn / 2 == 1) x[i] = x[i % 9];
            if (turn / 2 == 2) x[i] = 0;
            if (turn / 2 == 3) x[i] *= (moe_real)1e-20;
            if (turn / 2 == 4) x[i] *= (moe_real)5;
        }
        if (turn / 2 == 0) rows.n = 1;
        if (!rich_net(&net)) return;
        for (i = 0; i < net.n_tensors && turn / 2 == 5; i++)
            for (j = 0; j < net.tensors[i].count; j++) net.tensors[i].data[j] = 0;
        if (CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "poor calibration", error)) {
            CHECK(built.model.input_scale > 0 && built.model.input_scale < 1e6f && built.model.output_scale > 0 &&
                      built.model.output_scale < 1e6f,
                  "scales are positive numbers");
            compare_interpreters(&rng, &built, 8, &all);
            moe_model_free(&built);
        }
        moe_net_free(&net);
        drop_data(&rows);
    }
}

/* Scratch memory that no call has seen: nobody was chosen. */
static void test_choices_before(void) {
    int weights;
    for (weights = MOE_REAL_IS_DOUBLE ? 1 : 0; weights < MOE_WEIGHTS_COUNT; weights++) {
        rich r;
        moe_choice choices[4];
        size_t count = 77;
        void *room;
        moe_error error;
        if (!rich_begin(&r, 0)) return;
        moe_model_free(&r.built);
        r.config.weights = weights;
        if (CHECK_SAYS(moe_model_create(&r.built, &r.net, &r.config, &error), MOE_OK, "a model", error)) {
            room = grab(r.built.model.scratch_size, 1);
            CHECK_STATUS(moe_infer_choices(&r.built.model, 1, room, choices, 4, &count), MOE_OK,
                         "choices before the first call");
            CHECK(count == 0, "nobody was chosen yet");
            free(room);
        }
        rich_end(&r);
    }
}

/* Three MoE layers, of which the second can fail: in floats its logits are large, and its table has
   fewer ids than the embedding. */
static int late_net(moe_net *net, int form) {
    const int ids = form == 4;
    moe_layer_config c, hash;
    moe_tensor w;
    moe_error error;
    size_t i;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 8;
    c.router.top_k = 2;
    c.d_ff = 4;
    hash = c;
    hash.router.select = MOE_SELECT_HASH;
    hash.router.table_size = 5;
    (void)moe_net_init(net, ids ? 0 : 16, MOE_KERNELS_C, NULL);
    if (ids) (void)moe_net_embedding(net, 9, 16);
    (void)moe_net_mixture(net, &c);
    (void)moe_net_linear(net, 64);
    (void)moe_net_activation(net, MOE_ACT_RELU);
    (void)moe_net_linear(net, 16);
    (void)moe_net_mixture(net, ids ? &hash : &c);
    (void)moe_net_mixture(net, &c);
    if (!CHECK_SAYS(moe_net_build(net, 0, 5, &error), MOE_OK, "a net of three MoE layers", error)) return 0;
    for (i = 0; form < 2 && CHECK_STATUS(moe_net_find(net, "4.router.weight", &w), MOE_OK) && i < w.count; i++)
        w.data[i] *= (moe_real)1e25;
    return 1;
}

/* All three layers have choices, or none. */
static void late_choices(const moe_model *model, const void *room) {
    size_t layer, i;
    for (layer = 0; layer < 3; layer++) {
        moe_choice choices[8];
        size_t count = 77;
        CHECK_STATUS(moe_infer_choices(model, layer, room, choices, 8, &count), MOE_OK, "choices");
        if (!CHECKF(count == 0 || count == 2, "layer %d has %d choices", (int)layer, (int)count)) continue;
        for (i = 0; i < count; i++) CHECK(choices[i].expert >= 0 && choices[i].expert < 8, "experts that there are");
    }
}

/* The layers that a failed call has not reached have the choices of an earlier call or none. form 0
   and 1: float models of both kinds, 2 and 3: experts in a file, 4: ids without a row. */
static void test_choices_after(int form) {
    moe_model_config config;
    moe_built_model built;
    moe_data data;
    moe_error error;
    moe_net net;
    moe_rng rng;
    moe_loader loader;
    shelf books = {0};
    union {
        moe_real x[16];
        int8_t levels[16];
        int32_t id;
    } in;
    moe_real out[16], *x;
    int32_t ids[24];
    void *room;
    size_t i, q;
    if (!late_net(&net, form)) return;
    moe_rng_seed(&rng, 3);
    x = normals_of(&rng, 24 * 16, 1);
    for (i = 0; i < 24; i++) ids[i] = (int32_t)(i % 5);
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    data.n = 24;
    if (form == 4) data.token_ids = ids;
    else data.x = x;
    config.weights = form < 2 ? MOE_WEIGHTS_FLOAT : form == 3 ? MOE_WEIGHTS_INT4 : MOE_WEIGHTS_INT8;
    config.same_bits = form == 1;
    config.loader = form == 2 || form == 3;
    config.calibration = &data;
    if (!CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "a model", error)) return;
    loader.ctx = &books;
    loader.fetch = shelf_fetch;
    books.bytes = built.experts.data;
    books.size = built.experts.size;
    room = grab(built.model.scratch_size, 1);
    for (i = 0; i < 14; i++) { /* a call fetches six times */
        const int fails = config.loader ? i % 7 < 6 : i % 2 == 0;
        moe_status status;
        memset(&in, 0, sizeof in);
        for (q = 0; q < 16 && form < 2; q++) in.x[q] = (moe_real)q - 8;
        for (q = 0; q < 16 && (form == 2 || form == 3); q++) in.levels[q] = (int8_t)(127 - 17 * (int)q);
        if (form < 2 && fails) in.x[2] = i % 4 == 0 ? (moe_real)HUGE_VAL : (moe_real)1e10;
        if (form == 4) in.id = fails ? 7 : 3;
        books.fetched = 0;
        books.fail_at = config.loader && fails ? i % 7 + 1 : 0;
        status = moe_infer(&built.model, config.loader ? &loader : NULL, &in, out, room, built.model.scratch_size);
        CHECKF((status != MOE_OK) == fails, "call %d is %d", (int)i, (int)status);
        late_choices(&built.model, room);
    }
    free(room);
    free(x);
    moe_model_free(&built);
    moe_net_free(&net);
}

/* A network of one mixture that adds the input's rest, its weights times scale. */
static int scaled_net(moe_net *net, moe_real scale) {
    moe_layer_config c;
    moe_error error;
    (void)moe_layer_preset("mixtral", &c, NULL);
    c.router.n_experts = 4;
    c.d_ff = 5;
    c.add_input = 1;
    c.router.scale = scale;
    (void)moe_net_init(net, 9, MOE_KERNELS_C, NULL);
    (void)moe_net_mixture(net, &c);
    return CHECK_SAYS(moe_net_build(net, 0, 3, &error), MOE_OK, "scaled net", error);
}

/* Weights far from 1: their exponents are beyond any shift. */
static void test_scales(void) {
    static const moe_real scales[] = {(moe_real)1e-20, (moe_real)1e-12, (moe_real)1e-6, (moe_real)1e6};
    moe_rng rng;
    size_t i, q;
    moe_rng_seed(&rng, 31);
    for (i = 0; i < sizeof scales / sizeof *scales; i++) {
        moe_data rows = random_rows(&rng, 50, 9, 1);
        moe_model_config config = int8_config(&rows);
        moe_built_model built;
        moe_choice choices[4];
        signed char in[9];
        int16_t out[9];
        size_t count = 0;
        moe_error error;
        moe_net net;
        if (!scaled_net(&net, scales[i])) return;
        if (CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "far from 1", error)) {
            void *room = grab(built.model.scratch_size, 1);
            double sum = 0;
            levels_of(&built.model, rows.x, in);
            CHECK_STATUS(moe_infer(&built.model, NULL, in, out, room, built.model.scratch_size), MOE_OK, "a call");
            CHECK_STATUS(moe_infer_choices(&built.model, 0, room, choices, 4, &count), MOE_OK, "its choices");
            for (q = 0; q < count && q < 4; q++) sum += choices[q].weight;
            CHECK(count == 2 && (fabs(sum - 32768 * (double)scales[i]) <= 32768 * (double)scales[i] * 1e-3 + 2 ||
                                 sum >= 2147483647.0),
                  "weights add up to the scale");
            for (q = 0; q < 9 && (double)scales[i] < 1e-3; q++)
                CHECK(fabs((double)built.model.output_scale * out[q] - (double)rows.x[q]) <=
                          0.02 * (double)built.model.input_scale * 127,
                      "nothing but the input is left");
            free(room);
            moe_model_free(&built);
        }
        moe_net_free(&net);
        drop_data(&rows);
    }
}

/* Scales that a float cannot tell, and numbers that the network itself cannot. */
static void test_numbers_without_scale(void) {
    static const struct hopeless {
        double first, second;
        moe_status status;
    } rows[] = {{1e20, 1e20, MOE_ERR_NONFINITE}, {1e-20, 1e-24, MOE_ERR_OVERFLOW}};
    moe_rng rng;
    size_t i, q;
    moe_rng_seed(&rng, 32);
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe_data data = random_rows(&rng, 50, 9, 1);
        moe_model_config config = int8_config(&data);
        moe_built_model built;
        moe_error error;
        moe_net net;
        (void)moe_net_init(&net, 9, MOE_KERNELS_C, NULL);
        (void)moe_net_linear(&net, 5);
        (void)moe_net_linear(&net, 4);
        if (!CHECK_SAYS(moe_net_build(&net, 0, 3, &error), MOE_OK, "two products", error)) return;
        for (q = 0; q < net.tensors[0].count; q++) net.tensors[0].data[q] *= (moe_real)rows[i].first;
        for (q = 0; q < net.tensors[2].count; q++) net.tensors[2].data[q] *= (moe_real)rows[i].second;
        if (MOE_REAL_IS_DOUBLE && i == 0) {
            net.tensors[0].data[0] *= (moe_real)1e200;
            net.tensors[2].data[0] *= (moe_real)1e200;
        }
        untouched_begin(&built);
        CHECK_SAYS(moe_model_create(&built, &net, &config, &error), rows[i].status, "numbers without a scale", error);
        CHECK(untouched(&built) && strstr(error.message, "module") != NULL, "it says where");
        moe_net_free(&net);
        drop_data(&data);
    }
}

/* A norm of numbers that are small beside its eps. */
static void test_small_norms(void) {
    moe_rng rng;
    int turn;
    moe_rng_seed(&rng, 33);
    for (turn = 0; turn < 8; turn++) {
        const double size = pow(10.0, -2.0 * (turn / 2));
        moe_data rows = random_rows(&rng, 50, 9, 1);
        moe_model_config config = int8_config(&rows);
        moe_built_model built;
        moe_net_pass pass;
        moe_error error;
        moe_call call;
        moe_net net;
        size_t i, q, bytes = 0;
        (void)moe_net_init(&net, 9, MOE_KERNELS_C, NULL);
        (void)moe_net_linear(&net, 9);
        if (turn % 2) (void)moe_net_rms_norm(&net);
        else (void)moe_net_layer_norm(&net);
        if (!CHECK_SAYS(moe_net_build(&net, 0, 3, &error), MOE_OK, "a norm", error)) return;
        for (q = 0; q < net.tensors[0].count; q++) net.tensors[0].data[q] *= (moe_real)size;
        memset(&call, 0, sizeof call);
        call.n_tokens = 50;
        call.x = rows.x;
        (void)moe_net_work_size(&net, 50, 0, &bytes);
        if (CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "model of a norm", error)) {
            void *room = grab(built.model.scratch_size, 1), *work = grab(bytes, 1);
            double wrong = 0, whole = 0;
            CHECK_STATUS(moe_net_forward(&net, &call, work, bytes, &pass), MOE_OK, "the net");
            for (i = 0; i < 50; i++) {
                signed char in[9];
                int16_t out[9];
                levels_of(&built.model, rows.x + i * 9, in);
                (void)moe_infer(&built.model, NULL, in, out, room, built.model.scratch_size);
                for (q = 0; q < 9; q++) {
                    const double y = (double)pass.y[i * 9 + q], off = y - (double)built.model.output_scale * out[q];
                    wrong += off * off / 450;
                    whole += y * y / 450;
                }
            }
            if (!CHECK(sqrt(wrong) < 0.03 * sqrt(whole) + 1.0 / 32000, "as with floats"))
                printf("    size %g: %g of %g\n", size, sqrt(wrong), sqrt(whole));
            free(work);
            free(room);
            moe_model_free(&built);
        }
        moe_net_free(&net);
        drop_data(&rows);
    }
}

/* The same network gives the same bytes. */
static void test_determinism(void) {
    rich a, b;
    moe_buffer first, second;
    moe_stream stream;
    memset(&first, 0, sizeof first);
    memset(&second, 0, sizeof second);
    if (!rich_begin(&a, 0) || !rich_begin(&b, 0)) return;
    stream = moe_buffer_stream(&first);
    CHECK_STATUS(moe_export_c(&a.built, "twice", &stream, NULL), MOE_OK, "export");
    stream = moe_buffer_stream(&second);
    CHECK_STATUS(moe_export_c(&b.built, "twice", &stream, NULL), MOE_OK, "export");
    CHECK(first.size > 0 && first.size == second.size && memcmp(first.data, second.data, first.size) == 0,
          "the same net is the same model");
    moe_buffer_free(&first);
    moe_buffer_free(&second);
    rich_end(&a);
    rich_end(&b);
}

/* ---- files for tests/port/export.sh: NAME.h as moe_export_c writes it, NAME_cases.h with inputs
   and what the model must answer ---- */

enum { CASES = 24 };

static void write_text(const char *folder, const char *name, const char *end, const void *bytes, size_t size) {
    char path[1000];
    FILE *f;
    sprintf(path, "%.800s/%s%s", folder, name, end);
    f = fopen(path, "wb");
    CHECK(f != NULL && fwrite(bytes, 1, size, f) == size, path);
    if (f != NULL) CHECK(fclose(f) == 0, path);
}

static void print_into(moe_buffer *b, const char *text) {
    moe_stream stream = moe_buffer_stream(b);
    CHECK_STATUS(stream.write(stream.ctx, text, strlen(text)), MOE_OK, "a buffer");
}

static void print_numbers(moe_buffer *b, const char *type, const char *name, const char *what, size_t n,
                          const int64_t *numbers) {
    char text[200];
    size_t i;
    sprintf(text, "static const %s %.60s_%s[%u] = {", type, name, what, (unsigned)n);
    print_into(b, text);
    for (i = 0; i < n; i++) {
        sprintf(text, "%d%s", (int)numbers[i], i + 1 == n ? "};\n" : i % 24 == 23 ? ",\n" : ",");
        print_into(b, text);
    }
}

/* NAME_wrong(room): the number of wrong answers with scratch memory there. The macros are those of
   NAME.h. */
static const char cases_code[] =
    "static int NAME_wrong(unsigned char *room) {\n"
    "    short y[BIG_OUTPUTS];\n"
    "    int wrong = 0, i, j;\n"
    "    for (i = 0; i < NAME_cases; i++) {\n"
    "        wrong += moe_infer(&NAME, NAME_LOADER, NAME_in + i * BIG_INPUTS, y, room, BIG_SCRATCH) != MOE_OK;\n"
    "        for (j = 0; j < BIG_OUTPUTS; j++) wrong += y[j] != NAME_out[i * BIG_OUTPUTS + j];\n"
    "    }\n"
    "    return wrong;\n"
    "}\n";

static const char loader_code[] =
    "static moe_status NAME_fetch(void *ctx, size_t at, size_t size, void *to) {\n"
    "    const unsigned char *from = NAME_bytes + at;\n"
    "    unsigned char *p = (unsigned char *)to;\n"
    "    (void)ctx;\n"
    "    while (size-- > 0) *p++ = *from++;\n"
    "    return MOE_OK;\n"
    "}\n"
    "static const moe_loader NAME_loader = {NULL, NAME_fetch};\n";

static void print_code(moe_buffer *b, const char *code, const char *name, const char *big, const char *loader) {
    for (; *code != '\0'; code++) {
        const char *put = NULL;
        char one[2] = {'\0', '\0'};
        if (strncmp(code, "NAME_LOADER", 11) == 0) {
            put = loader;
            code += 10;
        } else if (strncmp(code, "NAME", 4) == 0) {
            put = name;
            code += 3;
        } else if (strncmp(code, "BIG", 3) == 0) {
            put = big;
            code += 2;
        }
        one[0] = *code;
        print_into(b, put != NULL ? put : one);
    }
}

static void write_model(const char *folder, const char *name, const char *big, const moe_built_model *built,
                        moe_rng *rng) {
    const moe_model *model = &built->model;
    machine m = machine_begin(model, built->experts.data);
    moe_buffer b, experts;
    moe_stream stream = moe_buffer_stream(&b), other = moe_buffer_stream(&experts);
    moe_error error;
    int64_t *in = (int64_t *)grab(CASES * model->d_in, sizeof *in);
    int64_t *out = (int64_t *)grab(CASES * model->d_out, sizeof *out), *bytes;
    signed char *x = (signed char *)grab(model->d_in, 1);
    int16_t *y = (int16_t *)grab(model->d_out, sizeof *y);
    char text[400], loader[80];
    size_t i, j;
    memset(&b, 0, sizeof b);
    memset(&experts, 0, sizeof experts);
    CHECK_SAYS(moe_export_c(built, name, &stream, &error), MOE_OK, name, error);
    write_text(folder, name, ".h", b.data, b.size);
    b.size = 0;
    for (i = 0; i < CASES; i++) {
        random_levels(rng, i, model->d_in, x);
        machine_infer(&m, x, y);
        for (j = 0; j < model->d_in; j++) in[i * model->d_in + j] = x[j];
        for (j = 0; j < model->d_out; j++) out[i * model->d_out + j] = y[j];
    }
    CHECK(m.wrong == NULL, name);
    sprintf(text, "/* weights %lu experts %lu scratch %lu multiplications %lu */\nenum { %s_cases = %d };\n",
            (unsigned long)built->weights.size, (unsigned long)built->experts.size, (unsigned long)model->scratch_size,
            (unsigned long)m.longest, name, CASES);
    print_into(&b, text);
    print_numbers(&b, "signed char", name, "in", CASES * model->d_in, in);
    print_numbers(&b, "short", name, "out", CASES * model->d_out, out);
    sprintf(loader, built->external ? "&%.60s_loader" : "NULL", name);
    if (built->external) {
        CHECK_SAYS(moe_export_experts(built, &other, &error), MOE_OK, name, error);
        CHECK(experts.size == built->experts.size, "all experts are written");
        bytes = (int64_t *)grab(experts.size, sizeof *bytes);
        for (i = 0; i < experts.size; i++) bytes[i] = experts.data[i];
        print_numbers(&b, "unsigned char", name, "bytes", experts.size, bytes);
        print_code(&b, loader_code, name, big, loader);
        free(bytes);
    }
    print_code(&b, cases_code, name, big, loader);
    write_text(folder, name, "_cases.h", b.data, b.size);
    moe_buffer_free(&b);
    moe_buffer_free(&experts);
    free(m.cells);
    free(in);
    free(out);
    free(x);
    free(y);
}

static void dense_modules(moe_net *net) {
    (void)moe_net_linear(net, 21);
    (void)moe_net_activation(net, MOE_ACT_RELU);
    (void)moe_net_linear(net, 13);
    (void)moe_net_activation(net, MOE_ACT_TANH);
    (void)moe_net_linear(net, 5);
}

static void sparse_modules(moe_net *net) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 6;
    c.router.top_k = 2;
    c.expert = MOE_EXPERT_MLP;
    c.d_ff = 9;
    c.d_out = 11;
    (void)moe_net_mixture(net, &c);
    (void)moe_net_linear(net, 7);
}

static void rich_modules(moe_net *net) {
    moe_layer_config c;
    memset(&c, 0, sizeof c);
    c.router.n_experts = 5;
    c.router.top_k = 2;
    c.router.expert_scale = 1;
    c.router.selection_bias = 1;
    c.d_ff = 14;
    c.n_shared = 1;
    c.d_shared = 10;
    (void)moe_net_linear(net, 35);
    (void)moe_net_activation(net, MOE_ACT_SILU);
    (void)moe_net_mixture(net, &c);
    (void)moe_net_residual(net, 1);
    (void)moe_net_feed_forward(net, NULL);
    (void)moe_net_linear(net, 3);
}

static void write_models(const char *folder) {
    static const struct {
        const char *name, *big;
        void (*add)(moe_net *net);
        int weights, loader;
    } models[] = {{"dense", "DENSE", dense_modules, MOE_WEIGHTS_INT8, 0},
                  {"dense4", "DENSE4", dense_modules, MOE_WEIGHTS_INT4, 0},
                  {"sparse", "SPARSE", sparse_modules, MOE_WEIGHTS_INT8, 0},
                  {"rich4", "RICH4", rich_modules, MOE_WEIGHTS_INT4, 0},
                  {"rich", "RICH", rich_modules, MOE_WEIGHTS_INT8, 0},
                  {"behind", "BEHIND", sparse_modules, MOE_WEIGHTS_INT8, 1}};
    moe_rng rng;
    size_t i;
    moe_rng_seed(&rng, 17);
    for (i = 0; i < sizeof models / sizeof *models; i++) {
        moe_data rows = random_rows(&rng, 60, 18, 1);
        moe_model_config config = int8_config(&rows);
        moe_built_model built;
        moe_error error;
        moe_net net;
        config.weights = models[i].weights;
        config.loader = models[i].loader;
        (void)moe_net_init(&net, 18, MOE_KERNELS_C, NULL);
        models[i].add(&net);
        if (CHECK_SAYS(moe_net_build(&net, 0, 5, &error), MOE_OK, models[i].name, error)) {
            random_tensors(&rng, &net);
            if (CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, models[i].name, error)) {
                write_model(folder, models[i].name, models[i].big, &built, &rng);
                moe_model_free(&built);
            }
        }
        moe_net_free(&net);
        drop_data(&rows);
    }
}

/* Levels of real inputs: to nearest, held within +-127, whatever comes. */
static void test_levels(void) {
    static const double x[9] = {0, 0.26, 0.24, -0.26, 1e30, -1e30, 63.4, 63.6, -63.3}; /* in units of 2 got */
    static const int expected[9] = {0, 1, 0, -1, 127, -127, 127, 127, -127};
    moe_real inputs[9];
    int8_t got[9];
    moe_model model;
    int i;
    memset(&model, 0, sizeof model);
    model.d_in = 9;
    model.input_scale = 0.5f;
    for (i = 0; i < 9; i++) inputs[i] = (moe_real)x[i];
    moe_infer_levels(&model, inputs, got);
    for (i = 0; i < 9; i++) CHECK(got[i] == expected[i], "level of a real input");
    /* infinite */
    inputs[0] = inputs[4] * inputs[4] * inputs[4] * inputs[4] * inputs[4] * inputs[4] * inputs[4] * inputs[4] *
                inputs[4] * inputs[4] * inputs[4];
    inputs[1] = inputs[0] - inputs[0];
    moe_infer_levels(&model, inputs, got);
    CHECK(got[0] == 127 && got[1] == 0, "got of an infinite number and of none");
    moe_infer_levels(NULL, inputs, got);
    moe_infer_levels(&model, NULL, got);
    moe_infer_levels(&model, inputs, NULL);
}

/* Calibration sees every number of the experts' outputs, and nothing else: rows of kernels with
   vectors have gaps, those of kept outputs have none. */
static void test_output_range(void) {
    enum { TOKENS = 40, WIDTH = 12 };
    moe_layer_config c;
    moe_layer layer;
    moe_layer_pass pass;
    moe_call call;
    moei_ranges range;
    double most = 0, shared = 0;
    size_t size = 0, i;
    moe_real *x, *y;
    void *work;
    moe_rng rng;
    memset(&c, 0, sizeof c);
    memset(&call, 0, sizeof call);
    memset(&range, 0, sizeof range);
    c.router.d_model = WIDTH;
    c.router.score = MOE_SCORE_COMPETITION;
    c.n_shared = 1;
    if (!CHECK(moe_layer_create(&layer, &c, 0, 1, NULL, NULL) == MOE_OK)) return;
    moe_rng_seed(&rng, 1);
    x = normals_of(&rng, TOKENS * WIDTH, 1.0);
    y = reals(TOKENS * WIDTH);
    call.n_tokens = TOKENS;
    call.x = x;
    call.keep = 1;
    CHECK(moe_layer_work_size(&layer, TOKENS, 1, &size) == MOE_OK);
    work = grab(size, 1);
    if (CHECK(moe_layer_forward(&layer, &call, y, work, size, &pass) == MOE_OK)) {
        moei_ranges_layer(&layer, &pass, &range);
        for (i = 0; i < TOKENS * WIDTH * (size_t)layer.config.router.n_experts; i++)
            most = fmax(most, fabs((double)pass.all[MOE_NODE_OUTPUT][i]));
        for (i = 0; i < TOKENS * WIDTH; i++) shared = fmax(shared, fabs((double)pass.shared[MOE_NODE_OUTPUT][i]));
        CHECK_NEAR(range.node[MOE_NODE_OUTPUT].most, most, 0);
        CHECK_NEAR(range.shared[MOE_NODE_OUTPUT].most, shared, 0);
    }
    moe_layer_free(&layer);
    free(work);
    free(x);
    free(y);
}

/* A token that only the last batch of calibration has: its row of the embedding is 100 times as
   large as the other, so the range of the output grows. */
static void test_late_token(void) {
    enum { TOKENS = 2 * MOEI_CALIBRATION_ROWS + 3, WIDTH = 64 };
    int32_t ids[TOKENS];
    double scale[2];
    int late, i;
    for (late = 0; late < 2; late++) {
        moe_data data;
        moe_model_config config;
        moe_built_model built;
        moe_error error;
        moe_net net;
        memset(ids, 0, sizeof ids);
        memset(&data, 0, sizeof data);
        ids[TOKENS - 1] = late;
        data.n = TOKENS;
        data.token_ids = ids;
        config = int8_config(&data);
        (void)moe_net_init(&net, 0, MOE_KERNELS_C, NULL);
        (void)moe_net_embedding(&net, 2, WIDTH);
        (void)moe_net_linear(&net, 3);
        if (!CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "a net of two tokens", error)) return;
        for (i = 0; i < 2 * WIDTH; i++)
            net.modules[0].tensors[MOE_MODULE_WEIGHT][i] = (moe_real)(i < WIDTH ? 0.01 : 1.0) * (moe_real)(i % 3 + 1);
        for (i = 0; i < 3 * WIDTH; i++) net.modules[1].tensors[MOE_MODULE_WEIGHT][i] = 1;
        if (!CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "calibration", error)) return;
        scale[late] = (double)built.model.output_scale;
        moe_model_free(&built);
        moe_net_free(&net);
    }
    CHECKF(scale[1] > 2 * scale[0], "output_scale %g without the late token, %g with it", scale[0], scale[1]);
}

/* Where weights and inputs are codes already, an output is wrong by its rounding alone: to the
   nearest code and, half way between two, up. A code is a few units of the sum, so ties are common;
   rounding down would be wrong by -0.25 or more in the mean. */
static void test_rounding(void) {
    enum { SAMPLES = 300, IN = 32, OUT = 24 };
    moe_real *x = reals(SAMPLES * IN);
    double sum = 0, most = 0;
    moe_model_config config;
    moe_built_model built;
    moe_error error;
    moe_data data;
    moe_rng rng;
    moe_net net;
    size_t row, i, j;
    moe_rng_seed(&rng, 77);
    for (i = 0; i < SAMPLES * IN; i++) x[i] = (moe_real)(one_of(&rng, 255) - 127) / 127;
    x[0] = 1; /* the largest: a code is 1 / 127 */
    memset(&data, 0, sizeof data);
    data.n = SAMPLES;
    data.x = x;
    config = int8_config(&data);
    (void)moe_net_init(&net, IN, MOE_KERNELS_C, NULL);
    (void)moe_net_linear(&net, OUT);
    if (!CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "a linear module", error)) return;
    for (i = 0; i < OUT * IN; i++)
        net.modules[0].tensors[MOE_MODULE_WEIGHT][i] = (moe_real)(i % IN == 0 ? 127 : one_of(&rng, 255) - 127) / 127;
    if (!CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "calibration", error)) return;
    for (row = 0; row < SAMPLES; row++) {
        int8_t codes[IN];
        int16_t y[OUT];
        void *scratch = grab(built.model.scratch_size, 1);
        moe_infer_levels(&built.model, x + row * IN, codes);
        CHECK_STATUS(moe_infer(&built.model, NULL, codes, y, scratch, built.model.scratch_size), MOE_OK, "a row");
        for (j = 0; j < OUT; j++) {
            double want = (double)net.modules[0].tensors[MOE_MODULE_BIAS][j], error_in_codes;
            for (i = 0; i < IN; i++)
                want += (double)x[row * IN + i] * (double)net.modules[0].tensors[MOE_MODULE_WEIGHT][j * IN + i];
            error_in_codes = y[j] - want / (double)built.model.output_scale;
            sum += error_in_codes;
            most = fmax(most, fabs(error_in_codes));
        }
        free(scratch);
    }
    sum /= SAMPLES * OUT;
    CHECKF(sum > -0.05 && sum < 0.3 && most < 1, "errors in codes: mean %g, largest %g", sum, most);
    moe_model_free(&built);
    moe_net_free(&net);
    free(x);
}

/* Whether each table of a C file, "name[N] = {", has N rows and an end. */
static int tables_close(const char *c) {
    const char *p = c;
    size_t tables = 0;
    while ((p = strstr(p, "] = {")) != NULL) {
        const char *digits = p;
        unsigned long rows = 1;
        int depth = 0;
        while (digits > c && digits[-1] >= '0' && digits[-1] <= '9') digits--;
        for (p += 4; *p != '\0'; p++) {
            depth += (*p == '{') - (*p == '}');
            if (depth == 0) break;
            rows += depth == 1 && *p == ',' && p[1 + strspn(p + 1, " \n")] != '}';
        }
        if (*p == '\0' || p[1] != ';' || strtoul(digits, NULL, 10) != rows) return 0;
        tables++;
    }
    return tables > 0;
}

/* A network with two of everything that has a table: attentions, mixtures. */
static void test_tables(void) {
    moe_rng rng;
    moe_data rows;
    moe_model_config config;
    moe_built_model built;
    moe_attention_config a;
    moe_layer_config c;
    moe_buffer b;
    moe_stream stream = moe_buffer_stream(&b);
    moe_error error;
    moe_net net;
    int i;
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    memset(&c, 0, sizeof c);
    c.router.n_experts = 3;
    c.d_ff = 4;
    a.heads = 2;
    moe_rng_seed(&rng, 5);
    rows = random_rows(&rng, 40, 8, 1);
    rows.length = 8;
    config = int8_config(&rows);
    config.length = 8;
    (void)moe_net_init(&net, 8, MOE_KERNELS_C, NULL);
    for (i = 0; i < 2; i++) {
        (void)moe_net_attention(&net, &a);
        (void)moe_net_mixture(&net, &c);
    }
    if (CHECK_SAYS(moe_net_build(&net, 0, 1, &error), MOE_OK, "tables", error) &&
        CHECK_SAYS(moe_model_create(&built, &net, &config, &error), MOE_OK, "tables", error)) {
        CHECK_SAYS(moe_export_c(&built, "two", &stream, &error), MOE_OK, "tables", error);
        CHECK_STATUS(stream.write(stream.ctx, "", 1), MOE_OK, "its end");
        CHECK(tables_close((const char *)b.data), "rows and ends of tables");
        moe_buffer_free(&b);
        moe_model_free(&built);
    }
    moe_net_free(&net);
    drop_data(&rows);
}

int main(int argc, char **argv) {
    int operation, form;
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    verbose = argc > 1 && strcmp(argv[1], "verbose") == 0;
    if (argc > 2 && strcmp(argv[1], "write") == 0) {
        write_models(argv[2]);
        return test_end();
    }
    CASE(test_tables());
    CASE(test_output_range());
    CASE(test_levels());
    CASE(test_random_nets());
    CASE(test_accuracy());
    for (operation = 0; operation < OPERATIONS; operation++) CASE(test_operations(operation));
    CASE(test_allocations());
    CASE(test_streams());
    CASE(test_float_comment());
    CASE(test_refused_functions());
    CASE(test_refused_configs());
    CASE(test_refused_modules());
    CASE(test_widths());
    CASE(test_failing_mixtures());
    CASE(test_first_obstacle());
    CASE(test_beyond_operations());
    CASE(test_long_sequences());
    CASE(test_calibrated_positions());
    CASE(test_weights_in_a_file());
    CASE(test_attention_missing());
    CASE(test_kept_capacity());
    CASE(test_float_predictor());
    CASE(test_negative_mixes());
    CASE(test_norm_of_zeros());
    CASE(test_long_calibration());
    CASE(test_calibration_order());
    CASE(test_late_token());
    CASE(test_rounding());
    CASE(test_refused_calls());
    CASE(test_moved());
    CASE(test_poor_calibration());
    CASE(test_choices_before());
    for (form = MOE_REAL_IS_DOUBLE ? 2 : 0; form < 5; form++) CASE(test_choices_after(form));
    CASE(test_scales());
    CASE(test_numbers_without_scale());
    CASE(test_small_norms());
    CASE(test_determinism());
    if (!quick) CASE(test_digits());
    return test_end();
}
