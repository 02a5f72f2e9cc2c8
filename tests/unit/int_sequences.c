/* Tests what integer models of sequences consist of: rows, norms, turns and attention, each against
   a slow reference in 64 bits that follows its definition in moe.h to the bit and against real
   numbers; then whole models, token by token, against the networks they are made of. Prints a hash
   over what a model of fixed constants says, the same on every machine.
       cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/int_sequences.c -o int_sequences -lm
       ./int_sequences
   Also with -DMOE_REAL=double, with the sanitizers on, and as C++11. "int_sequences quick" takes
   fewer numbers. For a microcontroller: -DMOE_TEST_SMALL, which makes the hash alone, in 5 KB of
   memory, without heap and libm (the constants are made at run time, so on AVR they stay in
   memory). */

#ifdef MOE_TEST_SMALL
#ifndef MOE_NO_FLOAT
#define MOE_NO_FLOAT
#endif
#ifndef MOE_NO_PROGMEM
#define MOE_NO_PROGMEM
#endif
#endif
#define MOE_IMPLEMENTATION /* private functions are tested too */
#include "../all.h"
#include "../test.h"

#define CHECK_OF(condition, at) CHECKF(condition, "at %ld", (long)(at))

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t hash = 2166136261u;
static int hashing = 1; /* what is small enough for all machines */

/* FNV-1a over the two bytes of each level, the lower first. */
static void add_hash(unsigned n, const int16_t *levels) {
    unsigned i;
    for (i = 0; i < n && hashing; i++) {
        const uint32_t v = (uint16_t)levels[i];
        hash = ((hash ^ (v & 255u)) * 16777619u) & 0xffffffffu;
        hash = ((hash ^ v >> 8) * 16777619u) & 0xffffffffu;
    }
}

static uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* Uniform enough in low..high, a function of three numbers. */
static int32_t any(uint32_t seed, uint32_t i, uint32_t j, int32_t low, int32_t high) {
    return (int32_t)((uint32_t)low + mix(mix(seed * 7919u + i) + j) % ((uint32_t)high - (uint32_t)low + 1));
}

static void put(unsigned char *at, uint32_t v, int bytes) {
    for (; bytes > 0; bytes--, v >>= 8) *at++ = (unsigned char)(v & 255u);
}

/* ---- a place for one operation ---- */

#ifdef MOE_TEST_SMALL
enum { CONSTANTS = 2700, VECTORS = 240, STATE = 700 };
#else
enum { CONSTANTS = 500000, VECTORS = 200000, STATE = 400000 };
#endif

static union {
    uint32_t aligned;
    unsigned char bytes[CONSTANTS];
} constants;
static union {
    uint32_t aligned;
    int16_t levels[VECTORS];
} vectors;
static union {
    uint32_t aligned;
    unsigned char bytes[STATE];
} state;
static moe_model model;
static moei_int_attention attention;
static moei_int_run run;
static moei_int_op op;

/* An operation that reads vector 0 and writes vector `out`, filled with what it must overwrite. */
static void begin(unsigned n, unsigned k, int limit, int shift, uint32_t out) {
    size_t i;
    memset(&op, 0, sizeof op);
    memset(&run, 0, sizeof run);
    op.shape.n = (uint16_t)n;
    op.shape.k = (uint16_t)k;
    op.shape.shift = (uint8_t)shift;
    op.shape.low = (int16_t)-limit;
    op.shape.high = (int16_t)limit;
    op.out = out;
    for (i = 0; i < (n + 3) / 4 * 4; i++) vectors.levels[out + i] = 12345;
    model.attentions = &attention;
    model.n_attentions = 1;
    model.weights = constants.bytes;
    run.model = &model;
    run.base = constants.bytes;
    run.vectors = vectors.levels;
    run.state = state.bytes;
    run.weight = 32767;
}

static int zeros_behind(unsigned n, const int16_t *y) {
    int good = 1;
    for (; n % 4 != 0; n++) good &= y[n] == 0;
    return good;
}

/* The root of m < 2^32, rounded down, by halving. */
static uint32_t root_of(uint64_t m) {
    uint32_t low = 0, high = 65536;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if ((uint64_t)middle * middle <= m) low = middle;
        else high = middle;
    }
    return low;
}

/* ---- what references need ---- */

#ifndef MOE_TEST_SMALL
/* v / 2^shift, rounded down. */
static int64_t floor_of(int64_t v, int shift) {
    const int64_t unit = (int64_t)1 << shift;
    return v >= 0 ? v / unit : -((unit - 1 - v) / unit);
}

static int64_t ended(int64_t v) {
    const int64_t y = floor_of(v + (op.shape.shift > 0 ? (int64_t)1 << (op.shape.shift - 1) : 0), op.shape.shift);
    return y < op.shape.low ? op.shape.low : y > op.shape.high ? op.shape.high : y;
}
#endif

/* ---- rows ---- */

#ifndef MOE_TEST_SMALL
/* By the definition. */
static void row_exact(int32_t r, uint32_t seed) {
    const size_t pair = 12 + 2 * ((op.shape.n + 3u) / 4 * 4);
    const unsigned char *head = constants.bytes + (size_t)r / 2 * pair;
    const int alone = r % 2 == 0 && r + 1 == op.shape.k, at = alone ? 4 : 8 + r % 2 * 2;
    const int64_t factor = head[at] | head[at + 1] << 8;
    int good = 1;
    unsigned p;
    for (p = 0; p < op.shape.n; p++) {
        const int64_t bytes = head[12 + 2 * p] | (int64_t)head[13 + 2 * p] << 8;
        const int64_t both = bytes < 32768 ? bytes : bytes - 65536, a = (bytes + 128) % 256 - 128;
        const int64_t one = (signed char)head[8 + p / 4 * 4 + (unsigned)"\0\2\1\3"[p % 4]];
        const int64_t level = alone ? one : r % 2 ? (both - a) / 256 : a;
        good &= vectors.levels[p] == ended(floor_of(level * 32768 * factor, 16));
    }
    CHECK_OF(good, seed);
}
#endif

static void rows(uint32_t seed) {
    const unsigned n = (unsigned)any(seed, 0, 0, 1, seed % 7 == 0 ? 33 : 12), k = (unsigned)any(seed, 0, 1, 1, 9);
    const size_t pair = 12 + 2 * ((n + 3) / 4 * 4);
    const int limit = seed % 2 ? 127 : 32767, shift = seed % 2 ? 14 : 6;
    const int32_t token = any(seed, 0, 2, 0, (int32_t)k - 1);
    unsigned p;
    for (p = 0; p < (k + 1) / 2 * pair; p++) constants.bytes[p] = (unsigned char)any(seed, 1, p, 0, 255);
    for (p = 0; p < (k + 1) / 2; p++) {
        put(constants.bytes + p * pair + 8, (uint32_t)any(seed, 2, p, 0, 32767), 2);
        put(constants.bytes + p * pair + 10, (uint32_t)any(seed, 3, p, 0, 32767), 2);
        if (2 * p + 1 == k) put(constants.bytes + p * pair + 4, (uint32_t)any(seed, 2, p, 0, 32767), 2);
    }
    begin(n, k, limit, shift, 0);
    op.index = (uint16_t)(seed / 2 % 2);
    run.token = op.index == 0 ? token : 999;
    run.place = op.index == 1 ? (uint32_t)token : 999;
    moei_int_op_row(&op, &run);
    CHECK_OF(run.status == MOE_OK, seed);
    add_hash(n, vectors.levels);
    CHECK_OF(zeros_behind(n, vectors.levels), seed);
#ifndef MOE_TEST_SMALL
    row_exact(token, seed);
#endif
    /* nothing is read outside of the table: these tokens are far from it */
    op.index = 0;
    run.token = seed % 3 == 0 ? -1 : seed % 3 == 1 ? (int32_t)k : seed % 2 ? INT32_MAX : INT32_MIN;
    moei_int_op_row(&op, &run);
    CHECK_OF(run.status == MOE_ERR_ARGUMENT, seed);
}

/* ---- norms ---- */

typedef struct norm_case {
    unsigned n;
    int centered, limit, spread, digits; /* spread: levels of x; digits: the operation's factor */
    uint64_t eps;
} norm_case;

static int32_t norm_level(const norm_case *c, uint32_t seed, unsigned p) {
    if (seed % 11 == 0) return 0;
    if (seed % 11 == 1) return p == seed % c->n ? c->spread : 0;       /* the largest number of spreads */
    if (seed % 11 == 2) return c->spread;                             /* no variance */
    if (seed % 11 == 3) return p % 2 ? c->spread : -c->spread;
    if (seed % 11 == 4) return p % 2 ? c->spread : c->spread - 1;      /* little variance about a large mean */
    return any(seed, 5, p, -c->spread, c->spread);
}

static int16_t norm_gain(uint32_t seed, unsigned p) {
    return (int16_t)(seed % 5 == 0 && p % 3 == 0 ? -32767 : any(seed, 6, p, seed % 3 ? 16000 : -32767, 32767));
}

static int32_t norm_bias(uint32_t seed, unsigned p) {
    return seed % 4 == 0 ? (p % 2 ? 1073741823 : -1073741823) : any(seed, 7, p, -100000000, 100000000);
}

static void norm_run(const norm_case *c, uint32_t seed) {
    const unsigned even = (c->n + 1) / 2 * 2;
    unsigned p;
    memset(constants.bytes, 77, 8 + 2 * even);
    put(constants.bytes, (uint32_t)(c->eps & 0xffffffffu), 4);
    put(constants.bytes + 4, (uint32_t)(c->eps >> 32), 4);
    for (p = 0; p < c->n; p++) {
        vectors.levels[p] = (int16_t)norm_level(c, seed, p);
        put(constants.bytes + 8 + 2 * p, (uint32_t)norm_gain(seed, p), 2);
        if (c->centered) put(constants.bytes + 8 + 2 * even + 4 * p, (uint32_t)norm_bias(seed, p), 4);
    }
    begin(c->n, 0, c->limit, c->limit == 127 ? 15 : 7, even + 2);
    op.index = (uint16_t)c->centered;
    op.factor = (int16_t)c->digits;
    moei_int_op_norm(&op, &run);
    CHECK_OF(run.status == MOE_OK, seed);
    CHECK_OF(zeros_behind(c->n, vectors.levels + op.out), seed);
    add_hash(c->n, vectors.levels + op.out);
}

#ifndef MOE_TEST_SMALL
/* By the definition. */
static void norm_exact(const norm_case *c, uint32_t seed) {
    const int16_t *y = vectors.levels + op.out;
    uint64_t d = 0, m;
    int64_t s = 0, inverse, worst = 0;
    unsigned p;
    int e = 0;
    for (p = 0; p < c->n; p++) {
        const int64_t x = norm_level(c, seed, p);
        d += (uint64_t)(x * x);
        s += x;
    }
    if (!c->centered) s = 0;
    d = (d * c->n - (uint64_t)(s * s)) * ((uint64_t)1 << 2 * c->digits) + c->eps;
    for (m = d > 0 ? d : 1; m >= (uint64_t)1 << 32; m /= 4) e++;
    for (; m < (uint64_t)1 << 30; m *= 4) e--;
    inverse = 1073741823 / (int64_t)root_of(m);
    for (p = 0; p < c->n; p++) {
        const int64_t v = (int64_t)c->n * norm_level(c, seed, p) - s, g = norm_gain(seed, p);
        const int up = 7 + c->digits - e;
        const int64_t scaled = up < 0 ? floor_of(v, -up) : v * ((int64_t)1 << up), t = floor_of(scaled * inverse, 16);
        const int64_t want =
            ended(floor_of((g < 0 ? -t : t) * (g < 0 ? -g : g), 16) + (c->centered ? norm_bias(seed, p) : 0));
        const int64_t off = want - y[p];
        if (scaled > 2147483647 || scaled < -2147483647) worst = 100000;
        if (off > worst) worst = off;
        if (-off > worst) worst = -off;
    }
    CHECK_OF(worst == 0, seed);
}

/* In floats: half a level, and 2^-13 of the number. */
static void norm_real(const norm_case *c, uint32_t seed) {
    double sum = 0, squares = 0, spread;
    double worst = 0;
    unsigned p;
    for (p = 0; p < c->n; p++) sum += norm_level(c, seed, p);
    if (!c->centered) sum = 0;
    for (p = 0; p < c->n; p++) {
        const double v = norm_level(c, seed, p) - sum / c->n;
        squares += v * v;
    }
    spread = sqrt(squares / c->n + ldexp((double)c->eps, -2 * c->digits) / c->n / c->n);
    for (p = 0; p < c->n; p++) {
        const double z = spread > 0 ? (norm_level(c, seed, p) - sum / c->n) / spread : 0;
        double scaled = z * 32 * norm_gain(seed, p) / (1 << op.shape.shift);
        double want = scaled + (c->centered ? norm_bias(seed, p) : 0) / (double)(1 << op.shape.shift);
        double off;
        want = want < -c->limit ? -c->limit : want > c->limit ? c->limit : want;
        off = fabs(want - vectors.levels[op.out + p]) - fabs(scaled) / 8192;
        if (off > worst) worst = off;
    }
    CHECK_OF(worst <= 0.51, seed);
}
#endif

static void norms(uint32_t seed, int32_t widest) {
    static const int spreads[6] = {1, 3, 127, 5000, 32767, 32767};
    norm_case c;
    c.n = (unsigned)any(seed, 0, 0, seed % 16 == 0 ? widest : 1, seed % 8 == 0 || widest < 100 ? widest : 100);
    c.centered = (int)(mix(seed) % 2);
    c.limit = mix(seed) / 2 % 2 ? 127 : 32767;
    c.spread = spreads[any(seed, 1, 0, 0, 5)];
    c.eps = seed % 3 == 0 ? 0
            : seed % 3 == 1
                ? (uint64_t)any(seed, 2, 0, 0, 1000)
                : (uint64_t)((uint32_t)1 << any(seed, 2, 0, 0, 29)) * ((uint32_t)1 << any(seed, 2, 1, 0, 31));
    c.digits = c.n > 128 ? 0 : any(seed, 3, 0, 0, 8);
    norm_run(&c, seed);
#ifndef MOE_TEST_SMALL
    norm_exact(&c, seed);
    norm_real(&c, seed);
#endif
}

/* ---- turns ---- */

/* Cosine and sine of angle i in a row of the table: any two numbers that lie on the circle will
   do. */
static void turn_row(uint32_t seed, unsigned row, unsigned i, int32_t *c, int32_t *s) {
    *c = any(seed, 100 + row, i, -32767, 32767);
    *s = (int32_t)root_of((uint64_t)(32767LL * 32767 - (int64_t)*c * *c));
    if (any(seed, 300 + row, i, 0, 1)) *s = -*s;
}

static int32_t turn_level(uint32_t seed, unsigned i) {
    return seed % 5 == 0 ? (any(seed, 8, i, 0, 1) ? 23169 : -23169) : any(seed, 8, i, -23169, 23169);
}

#ifndef MOE_TEST_SMALL
/* By the definition. */
static void turn_exact(unsigned heads, unsigned half, uint32_t seed) {
    const int16_t *y = vectors.levels + op.out;
    int64_t worst = 0;
    unsigned i, j;
    for (j = 0; j < heads; j++)
        for (i = 0; i < half; i++) {
            const int64_t a = turn_level(seed, 2 * j * half + i), b = turn_level(seed, (2 * j + 1) * half + i);
            int32_t c1, s1, c2, s2;
            int64_t c, s;
            turn_row(seed, run.place % 16, i, &c1, &s1);
            turn_row(seed, 16 + run.place / 16, i, &c2, &s2);
            c = floor_of((int64_t)c1 * c2 - (int64_t)s1 * s2, 15);
            s = floor_of((int64_t)s1 * c2 + (int64_t)c1 * s2, 15);
            worst |= y[2 * j * half + i] - ended(a * c - b * s);
            worst |= y[(2 * j + 1) * half + i] - ended(a * s + b * c);
        }
    CHECK_OF(worst == 0, seed);
}
#endif

static void turns(uint32_t seed, int32_t widest) {
    const unsigned half = (unsigned)any(seed, 0, 0, 1, widest);
    const unsigned heads = (unsigned)any(seed, 0, 1, 1, 4), n = heads * 2 * half;
    const uint32_t place = (uint32_t)any(seed, 0, 2, 0, 40);
    const int shift = seed % 2 ? 15 : 22, limit = seed % 2 ? 32767 : 127;
    unsigned row, i, out = seed % 3 ? 4 * ((n + 3) / 4) : 0;
    for (row = 0; row < 16 + 3; row++)
        for (i = 0; i < half; i++) {
            int32_t c, s;
            turn_row(seed, row, i, &c, &s);
            put(constants.bytes + (row * half + i) * 4, (uint32_t)c, 2);
            put(constants.bytes + (row * half + i) * 4 + 2, (uint32_t)s, 2);
        }
    begin(n, 2 * half, limit, shift, out);
    for (i = 0; i < n; i++) vectors.levels[i] = (int16_t)turn_level(seed, i);
    run.place = place;
    moei_int_op_rotate(&op, &run);
    add_hash(n, vectors.levels + out);
    CHECK_OF(zeros_behind(n, vectors.levels + out), seed);
#ifndef MOE_TEST_SMALL
    turn_exact(heads, half, seed);
#endif
}

/* ---- attention ---- */

static int32_t query_level(uint32_t seed, unsigned p) { return any(seed, 20, p, -23169, 23169); }

/* Key (which = 0) or value (1) number p of token j. */
static int key_level(uint32_t seed, int which, unsigned j, unsigned p) {
    if (seed % 9 == 0) return which == 0 ? 0 : 127; /* all alike */
    if (seed % 9 == 1) return which == 0 ? (j == 3 ? 127 : -127) : any(seed, 22, j, -127, 127);
    return any(seed, 24 + (uint32_t)which, j * 977 + p, -127, 127);
}

#ifndef MOE_TEST_SMALL
enum { LONGEST = 1100 };

/* One head's sums as moe.h defines them, in 64 bits. */
static void attention_head(uint32_t seed, unsigned first, unsigned d_head, unsigned n, int64_t *y) {
    static int64_t w[LONGEST];
    int64_t most = INT64_MIN, total = 0, r;
    unsigned j, p, less = 0, down = 0;
    while ((n - 1) / 512 >> less != 0) less++;
    for (j = 0; j < n; j++) {
        for (w[j] = 0, p = 0; p < d_head; p++)
            w[j] += (int64_t)query_level(seed, first + p) * key_level(seed, 0, j, first + p);
        if (w[j] > most) most = w[j];
    }
    for (j = 0; j < n; j++) {
        w[j] = floor_of((int64_t)moei_int_exp2((uint32_t)floor_of((most - w[j]) * op.factor, 16), attention.bits),
                        (int)less);
        if (w[j] > 32767) w[j] = 32767;
        total += w[j];
    }
    while (floor_of(total, (int)down) >= 65536) down++;
    r = ((int64_t)op.factor2 << 15 >> less) / floor_of(total, (int)down);
    for (p = 0; p < d_head; p++) {
        const int shift = (int)op.shape.shift - (int)less;
        int64_t sum = 0;
        for (j = 0; j < n; j++) sum += w[j] * key_level(seed, 1, j, first + p);
        sum = floor_of(floor_of(floor_of(sum, (int)down) * r, 16) + ((int64_t)1 << (shift - 1)), shift);
        y[p] = sum < op.shape.low ? op.shape.low : sum > op.shape.high ? op.shape.high : sum;
    }
}

/* The same in floats: what weights of 15 bits may be off, and half a level. */
static double attention_off(uint32_t seed, unsigned first, unsigned d_head, unsigned n, const int16_t *y) {
    static double w[LONGEST];
    const double octave = op.factor / 65536.0 / ldexp(1, attention.bits);
    const double ratio = op.factor2 / ldexp(1, op.shape.shift + 1);
    double most = -1e300, total = 0;
    double worst = 0;
    unsigned j, p;
    for (j = 0; j < n; j++) {
        for (w[j] = 0, p = 0; p < d_head; p++)
            w[j] += (double)query_level(seed, first + p) * key_level(seed, 0, j, first + p);
        if (w[j] > most) most = w[j];
    }
    for (j = 0; j < n; j++) {
        w[j] = exp((w[j] - most) * octave * 0.6931471805599453);
        total += w[j];
    }
    for (p = 0; p < d_head; p++) {
        double sum = 0, off;
        for (j = 0; j < n; j++) sum += w[j] / total * key_level(seed, 1, j, first + p) * ratio;
        sum = sum > 127 ? 127 : sum < -127 ? -127 : sum;
        off = fabs(sum - y[p]) - 127 * ratio * (1 / 1024.0 + 2 * n / (32768.0 * total));
        if (off > worst) worst = off;
    }
    return worst;
}

static void attention_exact(unsigned n, uint32_t seed) {
    static int64_t want[64];
    const unsigned d_head = attention.d_head;
    const int16_t *y = vectors.levels + op.out;
    unsigned head, p;
    int good = 1;
    for (head = 0; head < attention.heads; head++, y += d_head) {
        attention_head(seed, head * d_head, d_head, n, want);
        for (p = 0; p < d_head; p++) good &= y[p] == want[p];
        CHECK_OF(attention_off(seed, head * d_head, d_head, n, y) <= 0.52, seed);
    }
    CHECK_OF(good, seed);
}
#endif

/* Over 1 to longest tokens, or exactly -longest. */
static void attentions(uint32_t seed, int32_t longest, int32_t widest) {
    const unsigned heads = (unsigned)any(seed, 0, 0, 1, 3);
    const unsigned d_head = (unsigned)any(seed, 0, 1, 1, widest), width = heads * d_head;
    const unsigned n = longest < 0 ? (unsigned)-longest : (unsigned)any(seed, 0, 2, 1, longest);
    const unsigned last = n - 1, room = (width + 3) / 4 * 4;
    unsigned j, p;
    int kept = 1;
    memset(&attention, 0, sizeof attention);
    attention.heads = (uint16_t)heads;
    attention.d_head = (uint16_t)d_head;
    attention.keys = 4;
    attention.values = 4 + (width * n + 3) / 4 * 4;
    attention.value = 2 * room;
    attention.room = 4 * room;
    attention.bits = (uint16_t)any(seed, 0, 3, 6, 16);
    if (!CHECK_OF(attention.values + width * n <= STATE && 4 * room + 3 * (n + 1) <= VECTORS, seed)) return;
    begin(width, width, 127, any(seed, 0, 4, 7, 13), 3 * room);
    op.other = room;
    op.factor = (int16_t)any(seed, 0, 5, 16384, 32767);
    op.factor2 = (int16_t)(seed % 4 == 0 ? 32766 : any(seed, 0, 6, 16384, 32766));
    run.place = last;
    model.length = n;
    memset(state.bytes, 99, 4);
    for (p = 0; p < width; p++) {
        vectors.levels[p] = (int16_t)query_level(seed, p);
        vectors.levels[room + p] = (int16_t)key_level(seed, 0, last, p);
        vectors.levels[2 * room + p] = (int16_t)key_level(seed, 1, last, p);
        for (j = 0; j < last; j++) {
            state.bytes[attention.keys + j * width + p] = (unsigned char)(key_level(seed, 0, j, p) & 255);
            state.bytes[attention.values + j * width + p] = (unsigned char)(key_level(seed, 1, j, p) & 255);
        }
    }
    moei_int_op_attention(&op, &run);
    CHECK_OF(run.status == MOE_OK, seed);
    add_hash(width, vectors.levels + 3 * room);
    CHECK_OF(zeros_behind(width, vectors.levels + 3 * room), seed);
    for (j = 0; j < n; j++)
        for (p = 0; p < width; p++) {
            kept &= state.bytes[attention.keys + j * width + p] == (unsigned char)(key_level(seed, 0, j, p) & 255);
            kept &= state.bytes[attention.values + j * width + p] == (unsigned char)(key_level(seed, 1, j, p) & 255);
        }
    CHECK_OF(kept && state.bytes[0] == 99 && state.bytes[3] == 99, seed);
#ifndef MOE_TEST_SMALL
    attention_exact(n, seed);
#endif
}

/* ---- a model of fixed constants ---- */

enum { ID = 21, D = 10, HEADS = 2, D_HEAD = 6, W = HEADS * D_HEAD, PLACES = 9, FF = 14, FIXED_OPS = 15 };

/* Random constants of an int8 product with outputs n, inputs k, at `at`; where they end. */
static uint32_t fixed_product(uint32_t at, unsigned n, unsigned k, int32_t factor) {
    const unsigned k4 = (k + 3) / 4 * 4;
    unsigned char *head = constants.bytes + at;
    unsigned i, j;
    for (i = 0; i < n; i += 2) {
        const int alone = i + 1 == n;
        const unsigned factors = alone ? 4 : 8, weights = alone ? 8 : 12;
        memset(head, 0, 12 + 2 * k4);
        for (j = 0; j < (alone ? 1 : 2); j++) {
            put(head + 4 * j, (uint32_t)any(at, 1, i + j, -3000, 3000), 4);
            put(head + factors + 2 * j, (uint32_t)any(at, 2, i + j, factor / 2, factor), 2);
        }
        for (j = 0; j < k; j++) {
            const int32_t a = any(at, 3 + i, j, -127, 127);
            if (alone) put(head + 8 + j / 4 * 4 + (unsigned)"\0\2\1\3"[j % 4], (uint32_t)a, 1);
            else put(head + 12 + 2 * j, (uint32_t)(a + 256 * any(at, 4 + i, j, -127, 127)), 2);
        }
        head += weights + (alone ? 1 : 2) * k4;
    }
    return (uint32_t)(head - constants.bytes);
}

static uint32_t fixed_norm(uint32_t at, unsigned n, int centered) {
    const unsigned even = (n + 1) / 2 * 2;
    unsigned i;
    put(constants.bytes + at, 900, 4);
    put(constants.bytes + at + 4, 0, 4);
    for (i = 0; i < even; i++)
        put(constants.bytes + at + 8 + 2 * i, i < n ? (uint32_t)any(at, 1, i, 20000, 32767) : 0, 2);
    for (i = 0; centered && i < n; i++)
        put(constants.bytes + at + 8 + 2 * even + 4 * i, (uint32_t)any(at, 2, i, -300000, 300000), 4);
    return at + 8 + 2 * even + (centered ? 4 * n : 0);
}

static uint32_t fixed_turns(uint32_t at) {
    unsigned row, i;
    for (row = 0; row < 17; row++)
        for (i = 0; i < D_HEAD / 2; i++) {
            int32_t c, s;
            turn_row(at, row, i, &c, &s);
            put(constants.bytes + at + (row * D_HEAD / 2 + i) * 4, (uint32_t)c, 2);
            put(constants.bytes + at + (row * D_HEAD / 2 + i) * 4 + 2, (uint32_t)s, 2);
        }
    return at + 17 * D_HEAD / 2 * 4;
}

static moei_int_op fixed_op(void (*function)(const moei_int_op *, moei_int_run *), unsigned n, unsigned k, int limit,
                            int shift, uint32_t at, uint32_t in, uint32_t other, uint32_t out) {
    begin(n, k, limit, shift, out);
    op.run = function;
    op.at = at;
    op.in = in;
    op.other = other;
    return op;
}

static void fixed_weights(uint32_t *at) {
    at[0] = 0;
    at[1] = fixed_product(at[0], ID, D, 32767);
    at[2] = fixed_product(at[1], PLACES, D, 32767);
    at[3] = fixed_norm(at[2], D, 1);
    at[4] = fixed_product(at[3], W, D, 32767);
    at[5] = fixed_product(at[4], W, D, 32767);
    at[6] = fixed_product(at[5], W, D, 20000);
    at[7] = fixed_turns(at[6]);
    at[8] = fixed_product(at[7], D, W, 20000);
    at[9] = fixed_norm(at[8], D, 0);
    at[10] = fixed_product(at[9], FF, D, 20000);
    at[11] = fixed_product(at[10], D, FF, 20000);
    CHECK_OF(at[11] <= sizeof constants.bytes, at[11]);
}

/* row, + place, layer norm, q, k, v, turns, attention, output, +, rms norm, relu product, product,
   logits of the embedding's rows. */
static moe_model fixed_model(moei_int_op *ops) {
    enum { X = 0, PLACE = 12, Y = 24, Q = 36, K = 48, V = 60, MIXED = 72, OUT = 84, H = 96, LOGITS = 112, ROOM = 136 };
    static moei_int_attention heads;
    moe_model made;
    uint32_t at[14];
    fixed_weights(at);
    ops[0] = fixed_op(moei_int_op_row, D, ID, 32767, 6, at[0], X, X, X);
    ops[1] = fixed_op(moei_int_op_row, D, PLACES, 32767, 6, at[1], X, X, PLACE);
    ops[1].index = 1;
    ops[2] = fixed_op(moei_int_op_add, D, 0, 32767, 14, 0, X, PLACE, X);
    ops[2].factor = 9000;
    ops[2].factor2 = 5000;
    ops[3] = fixed_op(moei_int_op_norm, D, 0, 127, 14, at[2], X, X, Y);
    ops[3].index = 1;
    ops[4] = fixed_op(moei_int_op_int8, W, D, 23169, 0, at[3], Y, Y, Q);
    ops[5] = fixed_op(moei_int_op_int8, W, D, 23169, 0, at[4], Y, Y, K);
    ops[6] = fixed_op(moei_int_op_int8, W, D, 127, 8, at[5], Y, Y, V);
    ops[7] = fixed_op(moei_int_op_rotate, W, D_HEAD, 32767, 15, at[6], Q, Q, Q);
    ops[8] = fixed_op(moei_int_op_rotate, W, D_HEAD, 127, 22, at[6], K, K, K);
    ops[9] = fixed_op(moei_int_op_attention, W, W, 127, 13, 0, Q, K, MIXED);
    ops[9].factor = 20000;
    ops[9].factor2 = 24000;
    ops[10] = fixed_op(moei_int_op_int8, D, W, 32767, 0, at[7], MIXED, MIXED, OUT);
    ops[11] = fixed_op(moei_int_op_add, D, 0, 32767, 14, 0, X, OUT, X);
    ops[11].factor = 8192;
    ops[11].factor2 = 12000;
    ops[12] = fixed_op(moei_int_op_norm, D, 0, 127, 14, at[8], X, X, Y);
    ops[13] = fixed_op(moei_int_op_int8, FF, D, 127, 6, at[9], Y, Y, H);
    ops[13].shape.low = 0;
    ops[14] = fixed_op(moei_int_op_int8, ID, D, 32767, 2, at[0], Y, Y, LOGITS);
    memset(&heads, 0, sizeof heads);
    heads.heads = HEADS;
    heads.d_head = D_HEAD;
    heads.keys = 4;
    heads.values = 4 + PLACES * W;
    heads.value = V;
    heads.room = ROOM;
    heads.bits = 8;
    memset(&made, 0, sizeof made);
    made.version = MOE_MODEL_VERSION;
    made.weights_are = MOE_WEIGHTS_INT8;
    made.run = moei_int_model_run;
    made.d_out = ID;
    made.length = PLACES;
    made.state_size = 4 + 2 * PLACES * W;
    made.scratch_size = 3 + made.state_size + 2 * (ROOM + 3 * (PLACES + 1));
    made.weights = constants.bytes;
    made.weights_size = at[11];
    made.ops = ops;
    made.n_ops = made.n_main = FIXED_OPS;
    made.attentions = &heads;
    made.n_attentions = 1;
    return made;
}

static void fixed(void) {
    static moei_int_op ops[FIXED_OPS];
    static unsigned char scratch[700];
    const moe_model made = fixed_model(ops);
    int16_t output[ID];
    int32_t token;
    unsigned i, t, other = 0;
    int32_t sum = 0;
    CHECK_OF(made.scratch_size <= sizeof scratch, made.scratch_size);
    for (t = 0; t < PLACES; t++) {
        token = any(5, 5, t, 0, ID - 1);
        if (!CHECK_OF(moe_infer(&made, NULL, &token, output, scratch, sizeof scratch) == MOE_OK, t)) return;
        add_hash(ID, output);
        for (i = 0; i < ID; i++) {
            sum += output[i] < 0 ? -output[i] : output[i];
            other += output[i] != output[0];
        }
    }
    CHECK_OF(sum > 20 * ID * PLACES && sum < 30000L * ID * PLACES && other > 100, sum); /* it says something */
    CHECK_OF(moe_infer(&made, NULL, &token, output, scratch, sizeof scratch) == MOE_ERR_STATE, 0);
}

#ifndef MOE_TEST_SMALL
/* ---- networks and the models that are made of them ---- */

#if !defined(MOE_NO_TRAIN) && !defined(MOE_NO_QUANT)

/* A small language model. norm: 0 none, 1 root mean square, 2 layer; experts = 0: a
   feed_forward. */
typedef struct shape {
    const char *what;
    int d, layers, norm, positions, heads, d_head, rotary, experts, expert, tied;
} shape;

static const shape shapes[] = {
    {"as texts are written", 32, 2, 1, 0, 2, 0, 1, 4, MOE_EXPERT_SWIGLU, 1},
    {"positions, layer norms", 24, 2, 2, 1, 3, 0, 0, 4, MOE_EXPERT_MLP, 1},
    {"no experts, linear", 32, 1, 1, 1, 1, 0, 0, 0, MOE_EXPERT_SWIGLU, 0},
    {"narrow heads", 20, 1, 1, 0, 5, 2, 1, 3, MOE_EXPERT_MLP, 0},
    {"odd heads, wider than the net", 18, 1, 2, 1, 3, 7, 0, 0, MOE_EXPERT_MLP, 1},
    {"one wide head", 16, 1, 1, 0, 1, 66, 1, 2, MOE_EXPERT_SWIGLU, 0},
    {"three layers", 16, 3, 1, 0, 2, 0, 1, 3, MOE_EXPERT_SWIGLU, 1},
    {"no norms", 16, 1, 0, 1, 2, 0, 0, 0, MOE_EXPERT_MLP, 1},
};
enum {
    SHAPES = sizeof shapes / sizeof *shapes, VOCABULARY = 40, LENGTH = 37, SEQUENCES = 8, TOKENS = LENGTH * SEQUENCES
};

static void norm_module(moe_net *net, const shape *s) {
    if (s->norm == 1) moe_net_rms_norm(net);
    if (s->norm == 2) moe_net_layer_norm(net);
}

static int net_begin(moe_net *net, const shape *s, int trainable, uint64_t seed) {
    moe_attention_config a;
    moe_layer_config c;
    moe_error error;
    int i;
    moe_net_init(net, 0, MOE_KERNELS_AUTO, NULL);
    moe_net_embedding(net, VOCABULARY, s->d);
    if (s->positions) moe_net_positions(net, LENGTH + 5);
    for (i = 0; i < s->layers; i++) {
        memset(&a, 0, sizeof a);
        memset(&c, 0, sizeof c);
        a.heads = s->heads;
        a.d_head = s->d_head;
        a.rotary = s->rotary;
        c.expert = s->expert;
        c.d_ff = 24;
        norm_module(net, s);
        moe_net_attention(net, &a);
        moe_net_residual(net, s->norm ? 2 : 1);
        norm_module(net, s);
        if (s->experts > 0) {
            c.router.n_experts = s->experts;
            c.router.top_k = s->experts > 2 ? 2 : 1;
            moe_net_mixture(net, &c);
        } else moe_net_feed_forward(net, &c);
        moe_net_residual(net, s->norm ? 2 : 1);
    }
    norm_module(net, s);
    if (s->tied) moe_net_tied(net);
    else moe_net_linear(net, VOCABULARY);
    return CHECK_OF(moe_net_build(net, trainable, seed, &error) == MOE_OK, seed);
}

/* Gains, biases and attention that matter, which a new network has not. */
static void net_stir(moe_net *net, uint32_t seed) {
    moe_rng rng;
    size_t t, i;
    moe_rng_seed(&rng, seed);
    for (t = 0; t < net->n_tensors; t++) {
        moe_tensor *x = &net->tensors[t];
        const int sharp = strstr(x->name, "query") != NULL || strstr(x->name, "key") != NULL;
        for (i = 0; i < x->count; i++) {
            if (sharp) x->data[i] *= 2;
            else if (x->data[i] >= 1 && x->data[i] <= 1)
                x->data[i] = (moe_real)1.0 + (moe_real)0.3 * moe_rng_normal(&rng);
            else if (x->data[i] >= 0 && x->data[i] <= 0) x->data[i] = (moe_real)0.1 * moe_rng_normal(&rng);
        }
    }
}

static void ids_fill(int32_t *ids, size_t n, uint32_t seed) {
    size_t i;
    for (i = 0; i < n; i++) ids[i] = any(seed, 31, (uint32_t)i, 0, VOCABULARY - 1);
}

/* The network's own answer [n,d_out] to sequences of `length`; the caller frees it. */
static moe_real *net_answer(const moe_net *net, const int32_t *ids, const moe_real *x, size_t n, size_t length) {
    moe_real *y = (moe_real *)grab(n, (size_t)net->d_out * sizeof *y);
    int32_t *starts = (int32_t *)grab(n / length + 1, sizeof *starts);
    moe_net_pass pass;
    moe_call call;
    size_t i, bytes = 0;
    void *work;
    memset(&call, 0, sizeof call);
    CHECK_OF(moe_net_work_size(net, n, 0, &bytes) == MOE_OK, n);
    work = grab(bytes, 1);
    for (i = 0; i <= n / length; i++) starts[i] = (int32_t)(i * length);
    call.n_tokens = n;
    call.token_ids = ids;
    call.x = x;
    call.n_sequences = n / length;
    call.sequences = starts;
    if (CHECK_OF(moe_net_forward(net, &call, work, bytes, &pass) == MOE_OK, n))
        memcpy(y, pass.y, n * (size_t)net->d_out * sizeof *y);
    free(work);
    free(starts);
    return y;
}

static int model_begin(moe_built_model *built, const moe_net *net, int weights, const int32_t *ids, const moe_real *x,
                       size_t n, size_t length) {
    moe_model_config config;
    moe_data data;
    moe_error error;
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    memset(&error, 0, sizeof error);
    data.n = n;
    data.token_ids = ids;
    data.x = x;
    data.length = net->d_in == 0 ? length : 0;
    config.weights = weights;
    config.calibration = &data;
    config.length = length;
    if (CHECK_OF(moe_model_create(built, net, &config, &error) == MOE_OK, weights)) return 1;
    printf("        %s\n", error.message);
    return 0;
}

/* How far a model is from its network. */
typedef struct distance {
    /* of a token's logits, relative, the median; share of the same best token; cross-entropies */
    double error, same, loss, net_loss;
} distance;

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double log_sum(const double *z, size_t n) {
    double most = -1e300, sum = 0;
    size_t i;
    for (i = 0; i < n; i++) most = z[i] > most ? z[i] : most;
    for (i = 0; i < n; i++) sum += exp(z[i] - most);
    return log(sum) + most;
}

static distance compare(const moe_model *m, const moe_net *net, const int32_t *ids, const int32_t *labels, size_t n,
                        size_t length) {
    moe_real *y = net_answer(net, ids, NULL, n, length);
    void *scratch = grab(m->scratch_size, 1);
    int16_t output[VOCABULARY];
    double *errors = (double *)grab(n, sizeof *errors), z[VOCABULARY], want[VOCABULARY];
    distance r;
    size_t i, j;
    memset(&r, 0, sizeof r);
    for (i = 0; i < n; i++) {
        size_t best = 0, wanted = 0;
        double off = 0, all = 0;
        if (i % length == 0) begin_sequence(scratch, m->scratch_size);
        if (!CHECK_OF(moe_infer(m, NULL, &ids[i], output, scratch, m->scratch_size) == MOE_OK, i)) break;
        for (j = 0; j < VOCABULARY; j++) {
            z[j] = output[j] * (double)m->output_scale;
            want[j] = (double)y[i * VOCABULARY + j];
            off += (z[j] - want[j]) * (z[j] - want[j]);
            all += want[j] * want[j];
            if (z[j] > z[best]) best = j;
            if (want[j] > want[wanted]) wanted = j;
        }
        errors[i] = sqrt(off / all);
        r.same += (best == wanted) / (double)n;
        if (labels != NULL) {
            r.loss += (log_sum(z, VOCABULARY) - z[labels[i]]) / (double)n;
            r.net_loss += (log_sum(want, VOCABULARY) - want[labels[i]]) / (double)n;
        }
    }
    /* the median: where a choice of experts is close, rounding may change it, and then all of that
       token */
    qsort(errors, n, sizeof *errors, by_size);
    r.error = errors[n / 2];
    free(y);
    free(scratch);
    free(errors);
    return r;
}

/* Whole models of random nets. */
static void whole(const shape *s, uint32_t seed) {
    moe_net net;
    moe_built_model built;
    int32_t ids[TOKENS], other[TOKENS];
    distance r;
    int weights;
    ids_fill(ids, TOKENS, seed);
    ids_fill(other, TOKENS, seed + 77);
    if (!net_begin(&net, s, 0, seed)) return;
    net_stir(&net, seed);
    for (weights = MOE_WEIGHTS_INT8; weights <= MOE_WEIGHTS_INT4; weights++) {
        if (!model_begin(&built, &net, weights, ids, NULL, TOKENS, LENGTH)) break;
        r = compare(&built.model, &net, other, NULL, TOKENS, LENGTH);
        if (!CHECK_OF(r.error < (weights == MOE_WEIGHTS_INT8 ? 0.1 : 0.55) &&
                          r.same > (weights == MOE_WEIGHTS_INT8 ? 0.8 : 0.4),
                      seed))
            printf("        %s, weights %d: error %.4f, same %.3f\n", s->what, weights, r.error, r.same);
        moe_model_free(&built);
    }
    moe_net_free(&net);
}

/* Attention that looks everywhere alike, because its keys are 0, or its queries, or its values. */
static void indifferent(const shape *s, uint32_t seed) {
    static const char *const which[] = {"key", "query", "value"};
    int i;
    for (i = 0; i < 3; i++) {
        moe_net net;
        moe_built_model built;
        int32_t ids[TOKENS];
        distance r;
        size_t t;
        ids_fill(ids, TOKENS, seed);
        if (!net_begin(&net, s, 0, seed)) return;
        net_stir(&net, seed);
        for (t = 0; t < net.n_tensors; t++)
            if (strstr(net.tensors[t].name, which[i]) != NULL)
                memset(net.tensors[t].data, 0, net.tensors[t].count * sizeof(moe_real));
        if (model_begin(&built, &net, MOE_WEIGHTS_INT8, ids, NULL, TOKENS, LENGTH)) {
            r = compare(&built.model, &net, ids, NULL, TOKENS, LENGTH);
            if (!CHECK_OF(r.error < 0.1 && r.same > 0.8, i))
                printf("        %s, no %s: error %.4f, same %.3f\n", s->what, which[i], r.error, r.same);
            moe_model_free(&built);
        }
        moe_net_free(&net);
    }
}

/* A language that has something to learn: most of the time a token follows from the one before it,
   or is the one before that. */
static void language(int32_t *ids, int32_t *labels, size_t n, uint32_t seed) {
    size_t i;
    int32_t a = 1, b = 2, next;
    for (i = 0; i < n; i++) {
        next = any(seed, 40, (uint32_t)i, 0, 9) > 7 ? any(seed, 41, (uint32_t)i, 0, VOCABULARY - 1)
               : b % 3 == 0                         ? a
                                                    : (b * 7 + 3) % VOCABULARY;
        ids[i] = b;
        labels[i] = next;
        a = b;
        b = next;
    }
}

/* After training the cross-entropy on new text is the network's, but for 1 % (int8) and 8 %
   (int4). */
static void trained(const shape *s, uint32_t seed) {
    enum { N = LENGTH * 320, TEST = LENGTH * 48 };
    int32_t *ids = (int32_t *)grab(N + TEST, sizeof *ids), *labels = (int32_t *)grab(N + TEST, sizeof *labels);
    moe_net net;
    moe_built_model built;
    moe_train_config t;
    moe_data data;
    moe_error error;
    int weights;
    memset(&t, 0, sizeof t);
    memset(&data, 0, sizeof data);
    language(ids, labels, N + TEST, seed);
    data.n = N;
    data.token_ids = ids;
    data.labels = labels;
    data.length = LENGTH;
    t.epochs = 12;
    t.rate = (moe_real)0.004;
    t.batch = LENGTH * 8;
    t.clip = 1;
    t.final_rate = (moe_real)0.1;
    if (net_begin(&net, s, 1, seed) && CHECK_OF(moe_fit(&net, &data, NULL, &t, &error) == MOE_OK, seed)) {
        for (weights = MOE_WEIGHTS_INT8; weights <= MOE_WEIGHTS_INT4; weights++) {
            distance r;
            if (!model_begin(&built, &net, weights, ids, NULL, LENGTH * 32, LENGTH)) break;
            r = compare(&built.model, &net, ids + N, labels + N, TEST, LENGTH);
            CHECK_OF(r.net_loss < 3, seed); /* 3.69 knows nothing */
            if (!CHECK_OF(r.loss < r.net_loss * (weights == MOE_WEIGHTS_INT8 ? 1.01 : 1.08) &&
                              r.same > (weights == MOE_WEIGHTS_INT8 ? 0.93 : 0.7),
                          seed))
                printf("the next line is wrong\n");
            printf("note: %s, %s: loss %.4f, in integers %.4f, same best token %.3f\n", s->what,
                   weights == MOE_WEIGHTS_INT8 ? "int8" : "int4", r.net_loss, r.loss, r.same);
            moe_model_free(&built);
        }
        moe_net_free(&net);
    }
    free(ids);
    free(labels);
}

/* ---- single modules ---- */

/* Norms of rows that are exact levels, some next to nothing, so that 1e-5 under the root
   matters. */
static void norm_module_case(int layer, int d, double scale, uint32_t seed) {
    const size_t n = 40;
    moe_real *x = (moe_real *)grab(n, (size_t)d * sizeof *x), *y;
    int8_t *levels = (int8_t *)grab(n, (size_t)d);
    int16_t *output = (int16_t *)grab((size_t)d, sizeof *output);
    moe_built_model built;
    moe_net net;
    moe_error error;
    size_t i, j;
    double worst = 0;
    for (i = 0; i < n; i++)
        for (j = 0; j < (size_t)d; j++) {
            const int32_t most = i < 10 ? 1 : i < 20 ? 6 : 127;
            levels[i * (size_t)d + j] =
                (int8_t)(i == 0              ? 0
                         : i == 39 && j == 0 ? 127
                                             : any(seed, (uint32_t)i, (uint32_t)j, -most, most));
            x[i * (size_t)d + j] = (moe_real)(levels[i * (size_t)d + j] * scale);
        }
    moe_net_init(&net, d, MOE_KERNELS_AUTO, NULL);
    if (layer) moe_net_layer_norm(&net);
    else moe_net_rms_norm(&net);
    if (CHECK_OF(moe_net_build(&net, 0, 1, &error) == MOE_OK, d)) {
        net_stir(&net, seed);
        y = net_answer(&net, NULL, x, n, n);
        if (model_begin(&built, &net, MOE_WEIGHTS_INT8, NULL, x, n, n)) {
            void *scratch = grab(built.model.scratch_size, 1);
            CHECK_OF(fabs((double)built.model.input_scale / scale - 1) < 1e-5, d);
            for (i = 0; i < n; i++) {
                CHECK_OF(moe_infer(&built.model, NULL, levels + i * (size_t)d, output, scratch,
                                   built.model.scratch_size) == MOE_OK,
                         i);
                for (j = 0; j < (size_t)d; j++) {
                    const double want = (double)y[i * (size_t)d + j];
                    const double off = fabs(output[j] * (double)built.model.output_scale - want);
                    if (off - fabs(want) / 4096 - 1.5 * (double)built.model.output_scale > worst) worst = off;
                }
            }
            if (!CHECK_OF(worst <= 0, d)) printf("        layer %d, scale %g: %g\n", layer, scale, worst);
            free(scratch);
            moe_model_free(&built);
        }
        free(y);
        moe_net_free(&net);
    }
    free(x);
    free(levels);
    free(output);
}

/* Rows as the network has them but for half a level of 127 of each row; a place's row on top for
   positions. */
static void row_module_case(int positions, uint32_t seed) {
    enum { WIDE = 19 };
    moe_net net;
    moe_error error;
    moe_built_model built;
    int32_t ids[TOKENS];
    size_t i, j;
    int good = 1;
    ids_fill(ids, TOKENS, seed);
    moe_net_init(&net, 0, MOE_KERNELS_AUTO, NULL);
    moe_net_embedding(&net, VOCABULARY, WIDE);
    if (positions) moe_net_positions(&net, LENGTH);
    if (!CHECK_OF(moe_net_build(&net, 0, seed, &error) == MOE_OK, seed)) return;
    for (i = 0; i < VOCABULARY; i++)
        for (j = 0; j < WIDE; j++) net.tensors[0].data[i * WIDE + j] *= (moe_real)(i == 3 ? 0 : i % 5 == 0 ? 0.03 : 1);
    if (model_begin(&built, &net, MOE_WEIGHTS_INT4, ids, NULL, TOKENS, LENGTH)) {
        void *scratch = grab(built.model.scratch_size, 1);
        int16_t output[WIDE];
        for (i = 0; i < LENGTH; i++) {
            double limit = 0, most = 0;
            CHECK_OF(moe_infer(&built.model, NULL, &ids[i], output, scratch, built.model.scratch_size) == MOE_OK, i);
            for (j = 0; j < WIDE; j++)
                limit = fmax(limit, fabs((double)net.tensors[0].data[(size_t)ids[i] * WIDE + j]));
            for (j = 0; j < WIDE && positions; j++) most = fmax(most, fabs((double)net.tensors[1].data[i * WIDE + j]));
            for (j = 0; j < WIDE; j++) {
                const double want = (double)net.tensors[0].data[(size_t)ids[i] * WIDE + j] +
                                    (positions ? (double)net.tensors[1].data[i * WIDE + j] : 0);
                good &= fabs(output[j] * (double)built.model.output_scale - want) <=
                        (limit + most) * 0.505 / 127 + 2.5 * (double)built.model.output_scale;
            }
        }
        CHECK_OF(good, seed);
        free(scratch);
        moe_model_free(&built);
    }
    moe_net_free(&net);
}

/* The bias of a token whose row is nothing but `row`: zeros, or small beside its bias. */
static void tied_bias(double row, double bias) {
    moe_net net;
    moe_built_model built;
    moe_error error;
    int32_t ids[TOKENS];
    int16_t output[VOCABULARY];
    size_t i;
    ids_fill(ids, TOKENS, 8);
    moe_net_init(&net, 0, MOE_KERNELS_AUTO, NULL);
    moe_net_embedding(&net, VOCABULARY, 12);
    moe_net_tied(&net);
    if (!CHECK_OF(moe_net_build(&net, 0, 8, &error) == MOE_OK, 0)) return;
    for (i = 0; i < 12; i++) net.tensors[0].data[5 * 12 + i] = (moe_real)row;
    net.tensors[1].data[5] = (moe_real)bias;
    if (model_begin(&built, &net, MOE_WEIGHTS_INT8, ids, NULL, TOKENS, LENGTH)) {
        void *scratch = grab(built.model.scratch_size, 1);
        CHECK_OF(built.model.input_scale >= 1 && built.model.input_scale <= 1, 0);
        for (i = 0; i < 4; i++) {
            CHECK_OF(moe_infer(&built.model, NULL, &ids[i], output, scratch, built.model.scratch_size) == MOE_OK, i);
            CHECK_OF(fabs(output[5] * (double)built.model.output_scale - bias) < 0.01 * (1 + bias), output[5]);
        }
        free(scratch);
        moe_model_free(&built);
    }
    moe_net_free(&net);
}

/* A bias so small that its row's scale is 0 as moe_real leaves the codes of zero weights alone. */
static void tiny_bias(void) {
    moe_net net;
    moe_built_model built[2];
    moe_error error;
    moe_real x[8 * 12];
    size_t i, j, differ = 0, size[2] = {0, 0};
    for (i = 0; i < 8 * 12; i++) x[i] = (moe_real)any(5, 31, (uint32_t)i, -1000, 1000) / 1000;
    moe_net_init(&net, 12, MOE_KERNELS_AUTO, NULL);
    moe_net_linear(&net, 2);
    if (!CHECK_OF(moe_net_build(&net, 0, 8, &error) == MOE_OK, 0)) return;
    for (i = 0; i < 12; i++) net.tensors[0].data[12 + i] = 0;
    for (j = 0; j < 2; j++) {
        net.tensors[1].data[1] = (moe_real)(j * 1e-44);
        if (model_begin(&built[j], &net, MOE_WEIGHTS_INT8, NULL, x, 8, 0)) size[j] = built[j].model.weights_size;
    }
    if (CHECK_OF(size[0] > 0 && size[0] == size[1], (long)size[1])) {
        const unsigned char *a = (const unsigned char *)built[0].model.weights,
                            *b = (const unsigned char *)built[1].model.weights;
        for (i = 0; i < size[0]; i++) differ += a[i] != b[i];
        CHECK_OF(differ <= sizeof(int32_t) + sizeof(int16_t), (long)differ); /* the bias and the factor */
    }
    for (j = 0; j < 2; j++)
        if (size[j] > 0) moe_model_free(&built[j]);
    moe_net_free(&net);
}

/* Biases of a product of 16-bit inputs, far above what its weights add to them. */
static void large_bias(void) {
    moe_net net;
    moe_built_model built;
    moe_error error;
    moe_real x[12 * 12];
    int8_t levels[12];
    int16_t output[2];
    size_t i;
    for (i = 0; i < 12 * 12; i++) x[i] = (moe_real)(i == 0 ? 1 : 0.01); /* a peak: 8 bits lose the rest */
    moe_net_init(&net, 12, MOE_KERNELS_AUTO, NULL);
    moe_net_linear(&net, 12);
    moe_net_linear(&net, 2);
    if (!CHECK_OF(moe_net_build(&net, 0, 8, &error) == MOE_OK, 0)) return;
    for (i = 0; i < 12 * 12; i++) net.tensors[0].data[i] = i % 13 == 0;
    for (i = 0; i < 2 * 12; i++) net.tensors[2].data[i] = (moe_real)1e-6;
    for (i = 0; i < 2; i++) net.tensors[3].data[i] = (moe_real)(1 - 2 * (double)i);
    if (model_begin(&built, &net, MOE_WEIGHTS_INT8, NULL, x, 12, 0)) {
        void *scratch = grab(built.model.scratch_size, 1);
        moe_infer_levels(&built.model, x, levels);
        CHECK_OF(built.ops[built.model.n_ops - 1].run == moei_int_op_int16, 0);
        CHECK_OF(moe_infer(&built.model, NULL, levels, output, scratch, built.model.scratch_size) == MOE_OK, 0);
        for (i = 0; i < 2; i++)
            CHECK_OF(fabs(output[i] * (double)built.model.output_scale - (1 - 2 * (double)i)) < 1e-3, output[i]);
        free(scratch);
        moe_model_free(&built);
    }
    moe_net_free(&net);
}

/* A tied module reads the embedding's bytes: a model has them once. */
static void tied_once(void) {
    const shape *s = &shapes[0];
    shape linear = *s;
    moe_net net, plain;
    moe_built_model a, b;
    int32_t ids[TOKENS];
    ids_fill(ids, TOKENS, 3);
    linear.tied = 0;
    if (!net_begin(&net, s, 0, 3) || !net_begin(&plain, &linear, 0, 3)) return;
    if (model_begin(&a, &net, MOE_WEIGHTS_INT8, ids, NULL, TOKENS, LENGTH) &&
        model_begin(&b, &plain, MOE_WEIGHTS_INT8, ids, NULL, TOKENS, LENGTH)) {
        const size_t size = moei_int8_size(VOCABULARY, 32);
        CHECK_OF(b.model.weights_size - a.model.weights_size == size, (long)size);
        moe_model_free(&a);
        moe_model_free(&b);
    }
    moe_net_free(&net);
    moe_net_free(&plain);
}

/* What a header says of attention: its heads, their width. */
static void said(void) {
    const shape s = {"", 18, 2, 1, 1, 3, 7, 0, 0, MOE_EXPERT_MLP, 1};
    moe_net net;
    moe_built_model built;
    moe_buffer text;
    moe_stream stream;
    int32_t ids[TOKENS];
    memset(&text, 0, sizeof text);
    ids_fill(ids, TOKENS, 4);
    if (!net_begin(&net, &s, 0, 4)) return;
    if (model_begin(&built, &net, MOE_WEIGHTS_INT8, ids, NULL, TOKENS, LENGTH)) {
        char line[100];
        sprintf(line, "static const moei_int_attention said_attentions[2] = {\n    {%d, %d, ",
                (int)built.model.attentions[0].heads, (int)built.model.attentions[0].d_head);
        stream = moe_buffer_stream(&text);
        CHECK_OF(moe_export_c(&built, "said", &stream, NULL) == MOE_OK && stream.write(stream.ctx, "", 1) == MOE_OK, 0);
        CHECK_OF(text.data != NULL && strstr((const char *)text.data, line) != NULL, 1);
        moe_buffer_free(&text);
        moe_model_free(&built);
    }
    moe_net_free(&net);
}

static void multiplications(void) {
    const shape s = {"", 18, 2, 1, 1, 3, 7, 0, 0, MOE_EXPERT_MLP, 1};
    moe_net net;
    moe_built_model built;
    int32_t ids[TOKENS];
    ids_fill(ids, TOKENS, 4);
    if (!net_begin(&net, &s, 0, 4)) return;
    if (model_begin(&built, &net, MOE_WEIGHTS_INT8, ids, NULL, TOKENS, LENGTH)) {
        const size_t want = 2 * (5 * 18 * 21 /* the last of four has 16-bit inputs */ + 2 * 21 * LENGTH + 2 * 18 * 24) +
                            VOCABULARY * 18;
        CHECK_OF(built.model.multiplications == want, (long)built.model.multiplications);
        CHECK_OF(built.model.length == LENGTH && built.model.state_size == 4 + 2 * 2 * (21 * LENGTH + 3) / 4 * 4,
                 (long)built.model.state_size);
        moe_model_free(&built);
    }
    moe_net_free(&net);
}

/* ---- sequences ---- */

static void decode_sequences(moe_built_model *built, int32_t *ids, unsigned char *scratch, size_t size) {
    enum { FEW = 9 };
    int32_t bad[4] = {-1, VOCABULARY, INT32_MAX, INT32_MIN};
    int16_t first[FEW][VOCABULARY], output[VOCABULARY];
    unsigned char *moved, *kept;
    size_t i, j;
    moved = (unsigned char *)grab(size + 16, 1);
    kept = (unsigned char *)grab(size + 16, 1);
    /* zeroed memory begins a sequence */
    for (i = 0; i < FEW; i++) CHECK_OF(moe_infer(&built->model, NULL, &ids[i], first[i], scratch, size) == MOE_OK, i);
    CHECK_OF(memcmp(first[0], first[1], sizeof first[0]) != 0, 0);
    /* it is full now: nothing changes */
    memcpy(kept, scratch, size);
    CHECK_OF(moe_infer(&built->model, NULL, &ids[0], output, scratch, size) == MOE_ERR_STATE, 0);
    CHECK_OF(memcmp(kept, scratch, size) == 0, 0);
    /* again, in memory that held something else */
    memset(scratch, 0x5a, size);
    CHECK_OF(moe_infer(&built->model, NULL, &ids[0], output, scratch, size) == MOE_ERR_STATE, 0);
    begin_sequence(scratch, size);
    for (i = 0; i < FEW; i++) {
        CHECK_OF(moe_infer(&built->model, NULL, &ids[i], output, scratch, size) == MOE_OK, i);
        CHECK_OF(memcmp(output, first[i], sizeof output) == 0, i);
    }
    /* in the middle of it: ids that are not there, too little memory, and memory that moves by
       multiples of 4 */
    begin_sequence(scratch, size);
    for (i = 0; i < FEW; i++) {
        for (j = 0; j < 4; j++)
            CHECK_OF(moe_infer(&built->model, NULL, &bad[j], output, scratch, size) == MOE_ERR_ARGUMENT, j);
        CHECK_OF(moe_infer(&built->model, NULL, &ids[i], output, scratch, size - 1) == MOE_ERR_SPACE, i);
        memset(moved, 0x33, size + 16);
        memcpy(moved + 4 * (i % 3), scratch, built->model.state_size + 3);
        memset(scratch, 0x77, size);
        CHECK_OF(moe_infer(&built->model, NULL, &ids[i], output, moved + 4 * (i % 3), size) == MOE_OK, i);
        CHECK_OF(memcmp(output, first[i], sizeof output) == 0, i);
        memcpy(scratch, moved + 4 * (i % 3), size);
    }
    /* any alignment, and nothing is written outside */
    memset(moved, 0x44, size + 16);
    begin_sequence(moved + 3, size);
    for (i = 0; i < FEW; i++) {
        CHECK_OF(moe_infer(&built->model, NULL, &ids[i], output, moved + 3, size) == MOE_OK, i);
        CHECK_OF(memcmp(output, first[i], sizeof output) == 0, i);
    }
    CHECK_OF(moved[2] == 0x44 && moved[3 + size] == 0x44 && moved[size + 15] == 0x44, 0);
    /* the end of the last sequence is not seen by the next: other tokens, then the same again */
    begin_sequence(scratch, size);
    CHECK_OF(moe_infer(&built->model, NULL, &ids[20], output, scratch, size) == MOE_OK, 0);
    begin_sequence(scratch, size);
    CHECK_OF(moe_infer(&built->model, NULL, &ids[0], output, scratch, size) == MOE_OK, 0);
    CHECK_OF(memcmp(output, first[0], sizeof output) == 0, 0);
    /* and what came before is */
    begin_sequence(scratch, size);
    CHECK_OF(moe_infer(&built->model, NULL, &ids[1], output, scratch, size) == MOE_OK, 0);
    CHECK_OF(memcmp(output, first[1], sizeof output) != 0, 0);
    free(scratch);
    free(moved);
    free(kept);
}

static void sequences(const shape *s) {
    enum { FEW = 9 };
    moe_net net;
    moe_built_model built;
    int32_t ids[TOKENS];
    unsigned char *scratch;
    size_t size;
    ids_fill(ids, TOKENS, 9);
    if (!net_begin(&net, s, 0, 9)) return;
    net_stir(&net, 9);
    if (!model_begin(&built, &net, MOE_WEIGHTS_INT8, ids, NULL, 30 * FEW, FEW)) {
        moe_net_free(&net);
        return;
    }
    moe_net_free(&net); /* a model in integers keeps nothing of it */
    size = built.model.scratch_size;
    scratch = (unsigned char *)grab(size + 16, 1);
    decode_sequences(&built, ids, scratch, size);
    moe_model_free(&built);
}

/* ---- what is exported ---- */

static moe_status keep_text(void *ctx, const void *bytes, size_t size) {
    moe_buffer *b = (moe_buffer *)ctx;
    char *to = (char *)realloc(b->data, b->size + size + 1);
    if (to == NULL) return MOE_ERR_MEMORY;
    memcpy(to + b->size, bytes, size);
    b->data = (unsigned char *)to;
    b->size += size;
    to[b->size] = '\0';
    return MOE_OK;
}

/* The constants of an attention stand in the header as they are in memory. */
static void exported(void) {
    moe_net net;
    moe_built_model built;
    moe_buffer text;
    moe_stream stream;
    moe_error error;
    char want[120];
    int32_t ids[TOKENS];
    uint32_t i;
    ids_fill(ids, TOKENS, 6);
    memset(&text, 0, sizeof text);
    memset(&stream, 0, sizeof stream);
    stream.ctx = &text;
    stream.write = keep_text;
    if (!net_begin(&net, &shapes[6], 0, 6)) return;
    if (model_begin(&built, &net, MOE_WEIGHTS_INT8, ids, NULL, TOKENS, LENGTH)) {
        CHECK_OF(moe_export_c(&built, "small", &stream, &error) == MOE_OK && text.data != NULL, 0);
        CHECK_OF(built.model.n_attentions == 3, built.model.n_attentions);
        for (i = 0; i < built.model.n_attentions && text.data != NULL; i++) {
            const moei_int_attention *a = &built.model.attentions[i];
            sprintf(want, "{%d, %d, %lu, %lu, %lu, %lu, %d}", a->heads, a->d_head, (unsigned long)a->keys,
                    (unsigned long)a->values, (unsigned long)a->value, (unsigned long)a->room, a->bits);
            CHECK_OF(strstr((char *)text.data, want) != NULL, i);
        }
        CHECK_OF(text.data != NULL && strstr((char *)text.data, "moei_int_op_attention") != NULL &&
                     strstr((char *)text.data, "moei_int_op_rotate") != NULL,
                 0);
        moe_model_free(&built);
    }
    free(text.data);
    moe_net_free(&net);
}

/* ---- failures ---- */

static void no_memory(const shape *s) {
    moe_net net;
    moe_built_model built;
    moe_model_config config;
    moe_data data;
    moe_error error;
    test_heap m;
    int32_t ids[TOKENS];
    moe_status status = MOE_ERR_MEMORY;
    long at;
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    ids_fill(ids, TOKENS, 5);
    if (!net_begin(&net, s, 0, 5)) return;
    data.n = LENGTH;
    data.token_ids = ids;
    data.length = LENGTH;
    config.weights = MOE_WEIGHTS_INT8;
    config.calibration = &data;
    config.length = LENGTH;
    config.allocator = test_allocator(&m, 0);
    for (at = 1; status == MOE_ERR_MEMORY && at < 100000; at++) {
        m.calls = 0;
        m.fail_at = at;
        status = moe_model_create(&built, &net, &config, &error);
        if (status == MOE_OK) moe_model_free(&built);
        if (m.blocks != 0) break;
    }
    CHECK_OF(status == MOE_OK && at > 10 && m.blocks == 0, at);
    moe_net_free(&net);
}

static void refused(int embedding, int d, const char *word) {
    moe_net net;
    moe_built_model built;
    moe_model_config config;
    moe_data data;
    moe_error error;
    const int32_t ids[1] = {0};
    moe_real *x = (moe_real *)grab((size_t)d, sizeof *x);
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    memset(&error, 0, sizeof error);
    moe_net_init(&net, embedding > 0 ? 0 : d, MOE_KERNELS_AUTO, NULL);
    if (embedding > 0) moe_net_embedding(&net, embedding, d);
    if (word[0] == 'l') {
        moe_net_attention(&net, NULL);
        config.length = 65536;
    }
    if (embedding == 0) moe_net_layer_norm(&net);
    CHECK_OF(moe_net_build(&net, 0, 1, &error) == MOE_OK, d);
    data.n = 1;
    data.token_ids = ids;
    data.x = x;
    data.length = embedding > 0;
    config.weights = MOE_WEIGHTS_INT8;
    config.calibration = &data;
    CHECK_OF(moe_model_create(&built, &net, &config, &error) == MOE_ERR_UNSUPPORTED, d);
    CHECK_OF(strstr(error.message, word) != NULL, d);
    moe_net_free(&net);
    free(x);
}

static void nets(uint32_t seeds) {
    uint32_t seed;
    int i;
    for (i = 0; i < SHAPES; i++)
        for (seed = 1; seed <= seeds; seed++) whole(&shapes[i], seed);
    indifferent(&shapes[0], 5);
    indifferent(&shapes[4], 6);
    for (i = 0; i < (int)seeds; i++) trained(&shapes[i], 11);
    for (i = 0; i < 2; i++) {
        norm_module_case(i, 1, 0.01, 1);
        norm_module_case(i, 7, 1e-4, 2);
        norm_module_case(i, 64, 1e-5, 3);
        norm_module_case(i, 64, 0.003, 4);
        norm_module_case(i, 33, 1, 5);
        norm_module_case(i, 300, 50, 6);
        norm_module_case(i, 3000, 1e-3, 7);
        for (seed = 1; seed < 5; seed++) row_module_case(i, seed);
    }
    tied_once();
    tied_bias(0, 0.7);
    tied_bias(0.01, 7000);
    tiny_bias();
    large_bias();
    multiplications();
    said();
    for (i = 0; i < SHAPES; i++) sequences(&shapes[i]);
    exported();
    no_memory(&shapes[0]);
    no_memory(&shapes[1]);
    no_memory(&shapes[4]);
    refused(65533, 1, "rows");
    refused(0, 32768, "norms");
    refused(2, 4, "length");
}
#else
static void nets(uint32_t seeds) { (void)seeds; }
#endif
#endif

/* A product of one output with inputs of 16 bits, added with weights up to the largest, where an
   int has 16 bits, too. */
static void product_16(void) {
    static const int16_t weights[] = {1, 256, 32639, 32640, 32767, -32767};
    static const int16_t inputs[] = {1, 127, 128, 16511, 32639, -32639};
    unsigned i, j;
    for (i = 0; i < 36; i++) {
        const int32_t weight = weights[i / 6], x = inputs[i % 6];
        int32_t sum[4] = {0, 0, 0, 0}, off;
        begin(1, 1, 32767, 0, 8);
        memset(constants.bytes, 0, 24);
        put(constants.bytes + 4, 16384, 2);   /* the factor */
        constants.bytes[8] = 127;             /* of the first input */
        put(constants.bytes + 12, 262144, 4); /* the bias, 4 weights */
        op.other = 16;
        run.weight = (int16_t)weight;
        for (j = 0; j < 4; j++) vectors.levels[j] = (int16_t)(j == 0 ? x : 0);
        memcpy(vectors.levels + 8, sum, sizeof sum);
        moei_int_op_int16_add(&op, &run);
        memcpy(sum, vectors.levels + 8, sizeof sum);
        off = sum[0] - (127 * (x * weight / 65536) / 16 + 4 * weight);
        CHECK_OF(off > -200 && off < 200, i); /* a unit is 64 */
    }
}

int main(int argc, char **argv) {
#ifndef MOE_TEST_SMALL /* a board need not fill in argc */
    const uint32_t quick = argc > 1 && strcmp(argv[1], "quick") == 0 ? 50 : 1;
#endif
    uint32_t seed;
    (void)argc;
    (void)argv;
    CASE(fixed());
    test_case("small sizes");
    for (seed = 0; seed < 40; seed++) {
        rows(seed);
        norms(seed, 40);
        turns(seed, 3);
        attentions(seed, 12, 9);
    }
    CHECK_OF(hash == 0x070896a3u, hash);
    hashing = 0;
    CASE(product_16());
#ifndef MOE_TEST_SMALL
    test_case("all sizes");
    for (seed = 0; seed < 1000 / quick; seed++) {
        rows(seed);
        norms(seed, 8200);
        turns(seed, 9);
        attentions(seed, 20, 33);
    }
    test_case("the longest");
    for (seed = 0; seed < 59 / quick + 1; seed++) attentions(seed, LONGEST, 33);
    test_case("beyond it");
    for (seed = 0; seed < 19 / quick + 1; seed++) {
        attentions(seed, -512, 9);
        attentions(seed, -513, 9);
        attentions(seed, -1024, 9);
        attentions(seed, -1025, 9);
    }
    CASE(nets(quick > 1 ? 1 : 3));
#endif
    printf("hash %08lx\n", (unsigned long)hash);
    return test_end();
}
