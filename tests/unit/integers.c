/* Tests the integers of moe_kernels.h: products with int8 and int4 constants, what goes along
   vectors, and the single numbers, each against a slow reference in 64 bits that computes every
   level anew. Prints a hash over a fixed set of results, the same on every machine.
       cc -std=c99 -O2 -I. tests/unit/integers.c -o integers -lm && ./integers
   Also meant to pass with -DMOE_REAL=double, -DMOE_NO_SIMD, -DMOE_NO_FLOAT, -DMOE_NO_DSP, with the
   sanitizers on, and as C++11. "integers quick" runs fewer sizes. For a microcontroller:
   -DMOE_TEST_SMALL -DMOE_NO_FLOAT, which takes 5 KB of memory, no heap and no libm; on AVR once
   with -DMOE_NO_PROGMEM, since these constants are made at run time, and once without, which tests
   those in program memory alone. */

#define MOE_IMPLEMENTATION /* private functions are tested too */
#if defined(MOE_NO_FLOAT) || defined(MOE_NO_QUANT) || defined(MOE_NO_TRAIN)
#include "moe_kernels.h"
#else
#define TEST_PACKING 1
#include "moe.h"
#include "../../examples/extras/moe_export.h"
#endif
#include "../test.h"

#define CHECK_OF(condition, at) CHECKF(condition, "at %ld", (long)(at))

#ifndef MOE_NO_FLOAT
#include <math.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef MOE_TEST_SMALL
enum { LARGEST_INT8 = 604, LARGEST_INT4 = 540, WIDEST = 12, DATA = 1840 };
#else
enum { LARGEST_INT8 = 3000, LARGEST_INT4 = 3000, WIDEST = 160, DATA = 20000 };
#endif
enum { LONGEST = LARGEST_INT8 > LARGEST_INT4 ? LARGEST_INT8 : LARGEST_INT4 };

static int quick;
static uint32_t hash = 2166136261u;

/* FNV-1a over the lowest bytes of a value, the first the lowest. */
static void add_hash(int32_t value, int bytes) {
    uint32_t v = (uint32_t)value;
    for (; bytes > 0; bytes--, v >>= 8) hash = ((hash ^ (v & 255u)) * 16777619u) & 0xffffffffu;
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

/* ---- a product: everything about it is a function of the place ---- */

enum { RANDOM, HIGHEST, LOWEST, OPPOSITE, MODES };

typedef struct problem {
    int four; /* int4 */
    unsigned n, k;
    int mode;
    uint32_t seed;
} problem;

static int level(const problem *p, unsigned j, unsigned i) {
    const int low = p->four ? -8 : -127, high = p->four ? 7 : 127;
    if (p->mode == HIGHEST) return high;
    if (p->mode == LOWEST) return low;
    if (p->mode == OPPOSITE) return j & 1u ? low : high; /* the largest sums with either sign side by side */
    return (int)any(p->seed, j, i, low, high);
}

static int32_t bias(const problem *p, unsigned j) {
    const int32_t most = p->mode == RANDOM && p->k < 200 ? 400000000 : 500000;
    return any(p->seed + 1, j, 0, -most, most);
}

static int16_t factor(const problem *p, unsigned j) {
    return (int16_t)(p->mode != RANDOM ? 32767 - (int)j
                                       : any(p->seed + 2, j, 0, 0, any(p->seed + 2, j, 1, 0, 1) ? 32767 : 60));
}

static unsigned block_count(unsigned k) {
    return (k + 31) / 32;
}

/* Keeps the bound of a product: 127 * 8 * k * block below 5e8. */
static uint16_t block(const problem *p, unsigned j, unsigned b) {
    const int32_t room = 490000 / (int32_t)(p->k + 1), most = room < 32767 ? room : 32767;
    return (uint16_t)(p->mode != RANDOM ? most : any(p->seed + 3, j, b, 0, most));
}

static int16_t input(const problem *p, unsigned i) {
    if (p->mode != RANDOM) return (int16_t)(p->seed & 1u ? 127 : -127);
    return (int16_t)any(p->seed + 4, i, 0, -127, 127);
}

static unsigned char *put(unsigned char *at, uint32_t value, int bytes) {
    for (; bytes > 0; bytes--, value >>= 8) *at++ = (unsigned char)(value & 255u);
    return at;
}

/* The level's own bits, 0 behind the last input or output. */
static int level_or_0(const problem *p, unsigned j, unsigned i) {
    return j < p->n && i < p->k ? level(p, j, i) : 0;
}

/* Packs as the header describes it; returns the bytes. */
static size_t pack(const problem *p, unsigned char *out) {
    static const unsigned order[4] = {0, 2, 1, 3};
    const unsigned group = p->four ? 4 : 2, k4 = (p->k + 3) / 4 * 4;
    unsigned char *at = out;
    unsigned j, i, c;
    for (j = 0; j < p->n; j += group) {
        if (j + 1 == p->n && !p->four) {
            at = put(put(put(at, (uint32_t)bias(p, j), 4), (uint32_t)factor(p, j), 2), 0, 2);
            for (i = 0; i < k4; i++) at = put(at, (uint32_t)level_or_0(p, j, i / 4 * 4 + order[i % 4]), 1);
            break;
        }
        for (c = j; c < j + group; c++) at = put(at, c < p->n ? (uint32_t)bias(p, c) : 0, 4);
        for (c = j; c < j + 2 && !p->four; c++) at = put(at, c < p->n ? (uint32_t)factor(p, c) : 0, 2);
        for (i = 0; i < k4; i++) {
            if (!p->four) {
                at = put(at, (uint32_t)(level_or_0(p, j, i) + 256L * level_or_0(p, j + 1, i)), 2);
                continue;
            }
            at = put(at, (uint32_t)((level_or_0(p, j, i) + 8) + (level_or_0(p, j + 1, i) + 8) * 16 +
                                    (level_or_0(p, j + 2, i) + 8) * 256L + level_or_0(p, j + 3, i) * 4096L),
                     2);
            for (c = j; c < j + 4 && (i % 32 == 31 || i + 1 == k4); c++)
                at = put(at, c < p->n ? block(p, c, i / 32) : 0, 2);
        }
        for (c = j; c < j + 4 && p->four; c++) at = put(at, c < p->n ? (uint32_t)factor(p, c) : 0, 2);
    }
    return (size_t)(at - out);
}

/* ---- the reference ---- */

static int64_t floor_shift(int64_t value, int shift) {
    const int64_t unit = (int64_t)1 << shift;
    return value >= 0 ? value / unit : -((-value + unit - 1) / unit);
}

static int64_t rounded(int64_t value, int shift) {
    return floor_shift(value + (shift > 0 ? (int64_t)1 << (shift - 1) : 0), shift);
}

static int64_t held(int64_t value, const moei_int_shape *s) {
    return value < s->low ? s->low : value > s->high ? s->high : value;
}

static int64_t product(const problem *p, unsigned j) {
    int64_t sum = bias(p, j), part;
    unsigned i, b;
    for (b = 0; b < block_count(p->k); b++) {
        part = 0;
        for (i = b * 32; i < p->k && i < b * 32 + 32; i++) part += level(p, j, i) * input(p, i);
        sum += part * (p->four ? block(p, j, b) : 1);
    }
    return floor_shift(sum * factor(p, j), 16);
}

/* ---- memory: on a machine with a heap exactly what is needed, so that sanitizers see what is read
   beyond it ---- */

#ifdef MOE_TEST_SMALL
static int32_t room_data[DATA / 4], room_x[LONGEST / 2], room_y[(WIDEST + 4) / 2], room_sum[WIDEST + 4];
static int32_t room_blocks[LONGEST / 64 + 1];

static void *take(int32_t *room, size_t bytes, size_t most) {
    if (!CHECK_OF(bytes <= most, bytes)) exit(1);
    return room;
}
#define TAKE(room, bytes) take(room, bytes, sizeof room)
#define GIVE(memory) (void)(memory)
#else
static void *take(size_t bytes) {
    void *memory = malloc(bytes + (bytes == 0));
    if (memory == NULL) {
        printf("out of memory\n");
        exit(1);
    }
    return memory;
}
#define TAKE(room, bytes) take(bytes)
#define GIVE(memory) free(memory)
#endif

static unsigned up(unsigned n, unsigned to) {
    return (n + to - 1) / to * to;
}

static void run_product(const problem *p) {
    const size_t bytes = p->four ? moei_int4_size(p->n, p->k) : moei_int8_size(p->n, p->k);
    unsigned char *data = (unsigned char *)TAKE(room_data, bytes);
    int16_t *x = (int16_t *)TAKE(room_x, up(p->k, 4) * sizeof(int16_t));
    int16_t *y = (int16_t *)TAKE(room_y, (up(p->n, 4) + 1) * sizeof(int16_t));
    int32_t *sum = (int32_t *)TAKE(room_sum, (up(p->n, 4) + 1) * sizeof(int32_t));
    int16_t *blocks = (int16_t *)TAKE(room_blocks, block_count(p->k) * sizeof(int16_t));
    const int16_t weight = (int16_t)any(p->seed, 98, 0, -32767, 32767);
    moei_int_shape s;
    unsigned i;
    int good = 1;
    s.n = (uint16_t)p->n;
    s.k = (uint16_t)p->k;
    s.shift = (uint8_t)any(p->seed, 99, 0, 0, 16);
    s.low = (int16_t)any(p->seed, 99, 1, -32768, 10);
    s.high = (int16_t)any(p->seed, 99, 2, s.low, 32767);
    CHECK_OF(pack(p, data) == bytes, bytes);
    for (i = 0; i < up(p->k, 4); i++) x[i] = i < p->k ? input(p, i) : (int16_t)0;
    for (i = 0; i < up(p->n, 4) + 1; i++) y[i] = 12345;
    for (i = 0; i < up(p->n, 4) + 1; i++) sum[i] = any(p->seed, 97, i, -100000000, 100000000);
    if (p->four) {
        moei_int4_sums(p->k, x, blocks);
        moei_int4_product(&s, data, x, blocks, y);
        moei_int4_product_add(&s, data, x, blocks, weight, sum);
    } else {
        moei_int8_product(&s, data, x, y);
        moei_int8_product_add(&s, data, x, weight, sum);
    }
    for (i = 0; i < up(p->n, 4); i++) {
        const int64_t t = i < p->n ? product(p, i) : 0;
        const int64_t before = any(p->seed, 97, i, -100000000, 100000000);
        good = CHECK_OF(y[i] == (i < p->n ? held(rounded(t, s.shift), &s) : 0), i) && good;
        if (i < p->n) good = CHECK_OF(sum[i] == before + floor_shift(t * weight, 16), i) && good;
        add_hash(y[i], 2);
        if (i < p->n) add_hash(sum[i], 4);
    }
    CHECK_OF(y[i] == 12345, i);
    CHECK_OF(sum[up(p->n, 4)] == any(p->seed, 97, up(p->n, 4), -100000000, 100000000), i);
    for (i = 0; p->four && i < block_count(p->k); i++) {
        int32_t all = 0;
        unsigned q;
        for (q = 32 * i; q < 32 * i + 32 && q < p->k; q++) all += x[q];
        CHECK_OF(blocks[i] == -8 * all, i);
    }
    for (i = 0; i < up(p->k, 4); i++) good = good && x[i] == (i < p->k ? input(p, i) : 0);
    if (!CHECK_OF(good, p->k) && test_shown)
        printf("    int%d, n = %u, k = %u, mode %d\n", p->four ? 4 : 8, p->n, p->k, p->mode);
    GIVE(data);
    GIVE(x);
    GIVE(y);
    GIVE(sum);
    GIVE(blocks);
}

/* The set that the hash is of: the same sizes on every machine. */
static void fixed_products(void) {
    static const unsigned n[] = {1, 2, 3, 5, 7, 8}, k[] = {0, 1, 4, 7, 12, 16, 20, 31, 32, 33, 48, 64, 70, 100};
    problem p;
    unsigned i, j;
    for (p.four = 0; p.four < 2; p.four++) {
        for (i = 0; i < sizeof n / sizeof n[0]; i++)
            for (j = 0; j < sizeof k / sizeof k[0]; j++) {
                p.n = n[i];
                p.k = k[j];
                p.mode = RANDOM;
                p.seed = 100 * i + j;
                run_product(&p);
            }
        for (p.mode = RANDOM; p.mode < MODES; p.mode++)
            for (p.seed = 0; p.seed < 2; p.seed++) {
                for (p.n = 1; p.n <= 3; p.n++) {
                    p.k = p.four ? 540 : 604;
                    run_product(&p);
                    p.k = 512;
                    run_product(&p);
                }
            }
    }
}

static void all_products(void) {
    static const unsigned large[] = {124,  128,  200,  508,  511,  512,  513,  516,  1020, 1023,
                                     1024, 1025, 1028, 1056, 1536, 1540, 2047, 2052, 3000};
    problem p;
    size_t i;
    for (p.four = 0; p.four < 2; p.four++) {
        for (p.n = 1; p.n <= 9; p.n += quick ? 4 : 1)
            for (p.k = 1; p.k <= 70; p.k += quick ? 6 : 1)
                for (p.mode = 0; p.mode < MODES; p.mode++) {
                    p.seed = p.n * 1000 + p.k;
                    run_product(&p);
                }
        for (i = 0; i < sizeof large / sizeof large[0]; i += quick ? 2 : 1)
            for (p.mode = 0; p.mode < MODES; p.mode++)
                for (p.seed = 7; p.seed < 9; p.seed++) {
                    p.k = large[i];
                    for (p.n = 1; p.n <= 3; p.n += 2) run_product(&p);
                }
    }
    p.mode = RANDOM;
    p.seed = 5;
    for (p.four = 0; p.four < 2; p.four++)
        for (p.n = 64; p.n <= 130; p.n += 33) {
            p.k = 64;
            run_product(&p);
        }
    p.four = 0;
    p.n = 0;
    p.k = 8;
    run_product(&p);
}

/* ---- constants in program memory: the same bytes everywhere, written out; 3 outputs of 5 inputs
   ---- */

static const unsigned char in_flash[] MOE_FLASH = {
    /* biases 1000, -1000; factors 32767, 16384 */
    0xe8, 0x03, 0x00, 0x00, 0x18, 0xfc, 0xff, 0xff, 0xff, 0x7f, 0x00, 0x40,
    0x7f, 0x81, 0x81, 0x7e, 0x00, 0x00, 0x01, 0xff, 0xfe, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    /* a: 127 -127 0 1 -2; b: -127 127 0 -1 2 */
    0x40, 0xe2, 0x01, 0x00, 0xe8, 0x03, 0x00, 0x00, /* 123456, factor 1000 */
    0x0a, 0x1e, 0x14, 0x28, 0x32, 0x00, 0x00, 0x00, /* 10 20 30 40 50 */
};

static const unsigned char in_flash_4[] MOE_FLASH = {
    0xe8, 0x03, 0x00, 0x00, 0x18, 0xfc, 0xff, 0xff, 0x00, 0x00, 0x00, 0x00, 0x64, 0x00, 0x00, 0x00,
    /* a: -8 7 0 1 -2; b: 7 -8 -1 0 2; c: 0; d: -8 7 0 0 -1 */
    0xf0, 0x88, 0x0f, 0x78, 0x78, 0x08, 0x89, 0x08, 0xa6, 0xf8, 0x88, 0x08, 0x88, 0x08, 0x88, 0x08,
    0x03, 0x00, 0xe8, 0x03, 0x00, 0x00, 0x02, 0x00, /* block scales 3, 1000, 0, 2 */
    0xff, 0x7f, 0x00, 0x40, 0x00, 0x00, 0xff, 0x7f,
};

/* c_i = i - 32, but for the last: 40. */
#define POINT(i) (unsigned char)(((i) - 32) & 255), (unsigned char)((i) < 32 ? 255 : 0)
#define POINTS_8(i) \
    POINT(i), POINT((i) + 1), POINT((i) + 2), POINT((i) + 3), POINT((i) + 4), POINT((i) + 5), POINT((i) + 6), \
        POINT((i) + 7)
static const unsigned char curve_in_flash[130] MOE_FLASH = {
    POINTS_8(0),  POINTS_8(8),  POINTS_8(16), POINTS_8(24), POINTS_8(32),
    POINTS_8(40), POINTS_8(48), POINTS_8(56), 40,           0};

static void flash(void) {
    static const int16_t at[8] = {-32768, -32767, -1, 0, 1024, 31744, 32256, 32767};
    static const int16_t value[8] = {-32, -32, -1, 0, 1, 31, 35, 39};
    union {
        int32_t align;
        int16_t x[8];
    } in, out;
    int32_t sum[4] = {0, 0, 0, 0};
    int16_t block;
    moei_int_shape s;
    int i;
    for (i = 0; i < 8; i++) in.x[i] = (int16_t)(i < 5 ? 3 * i - 5 : 0); /* -5 -2 1 4 7 */
    s.n = 3;
    s.k = 5;
    s.low = -500;
    s.high = 32767;
    s.shift = 0;
    moei_int8_product(&s, in_flash, in.x, out.x);
    /* a: 1000 - 635 + 254 + 4 - 14 = 609; b: -1000 + 635 - 254 - 4 + 14 = -609; 123456 - 50 - 40 +
       30 + 160 + 350 */
    CHECK_OF(out.x[0] == 304 && out.x[1] == -153 && out.x[2] == 123906 * 1000 / 65536 && out.x[3] == 0, out.x[0]);
    s.high = 1000;
    s.low = -100;
    moei_int8_product(&s, in_flash, in.x, out.x);
    CHECK_OF(out.x[0] == 304 && out.x[1] == -100 && out.x[2] == 1000 && out.x[3] == 0, out.x[1]);
    moei_int8_product_add(&s, in_flash, in.x, -16384, sum);
    CHECK_OF(sum[0] == -76 && sum[1] == 38 && sum[2] == -473, sum[0]);
    s.n = 4;
    s.low = -32768;
    s.high = 32767;
    moei_int4_sums(5, in.x, &block);
    moei_int4_product(&s, in_flash_4, in.x, &block, out.x);
    /* a: 1000 + 3 (40 - 14 + 0 + 4 - 14) = 1048; b: -1000 + 1000 (-35 + 16 - 1 + 0 + 14) = -7000;
       d: 100 + 2 (40 - 14 - 7) = 138 */
    CHECK_OF(out.x[0] == 523 && out.x[1] == -1750 && out.x[2] == 0 && out.x[3] == 68, out.x[0]);
    s.n = 8;
    s.shift = 0;
    moei_int_curve(&s, curve_in_flash, at, out.x);
    for (i = 0; i < 8; i++) CHECK_OF(out.x[i] == value[i], i);
}

/* ---- along vectors ---- */

enum { STRIP = 7 }; /* numbers at a time, so that there are zeros behind */

typedef struct strip {
    int16_t a[8], b[8], y[12];
    int32_t sum[8];
} strip;

static int16_t wide(uint32_t seed, uint32_t i) {
    static const int16_t special[8] = {32767, -32767, 0, 1, -1, 1023, 1024, -1024};
    const int32_t draw = any(seed, i, 1, 0, 15);
    return draw < 8 ? special[draw] : (int16_t)any(seed, i, 2, -32767, 32767);
}

static moei_int_shape any_shape(uint32_t seed) {
    moei_int_shape s;
    s.n = STRIP;
    s.k = 0;
    s.shift = (uint8_t)any(seed, 1, 0, 0, any(seed, 1, 1, 0, 3) ? 18 : 30);
    s.low = (int16_t)any(seed, 2, 0, -32768, 100);
    s.high = (int16_t)any(seed, 3, 0, s.low, 32767);
    if (any(seed, 4, 0, 0, 3) == 0) {
        s.low = -32768;
        s.high = 32767;
    }
    return s;
}

static int32_t point(uint32_t seed, int i) {
    return seed % 3 == 0 ? (i & 1 ? 32767 : -32768) : any(seed, 5, (uint32_t)i, -32768, 32767);
}

static int64_t curve(uint32_t seed, int32_t x) {
    const int32_t u = x + 32768, i = u / 1024;
    const int32_t f = u % 1024;
    const int64_t c = point(seed, (int)i);
    return c + floor_shift((point(seed, (int)i + 1) - c) * f, 10);
}

static void vectors(uint32_t seed) {
    strip t;
    const moei_int_shape s = any_shape(seed);
    const int16_t f = (int16_t)any(seed, 6, 0, 0, 16383);
    const int16_t f2 = (int16_t)(seed % 5 == 0 ? 16383 : any(seed, 6, 1, 0, 16383));
    int i, round;
    for (i = 0; i < 8; i++) {
        t.a[i] = wide(seed, (uint32_t)i);
        t.b[i] = wide(seed + 1, (uint32_t)i);
    }
    for (i = 0; i < 8; i++) t.sum[i] = any(seed, 7, (uint32_t)i, -1073741823, 1073741823);
    for (round = 0; round < 4; round++) {
        for (i = 0; i < 12; i++) t.y[i] = 77;
        if (round == 0) moei_int_store(&s, t.sum, t.y);
        if (round == 1) moei_int_multiply(&s, t.a, t.b, t.y);
        if (round == 2) moei_int_add(&s, t.a, f, t.b, f2, t.y);
        if (round == 3) moei_int_add(&s, t.a, f, NULL, f2, t.y);
        for (i = 0; i < 12; i++) {
            int64_t v = 0;
            if (i < STRIP) {
                if (round == 0) v = t.sum[i];
                if (round == 1) v = (int64_t)t.a[i] * t.b[i];
                if (round == 2) v = (int64_t)t.a[i] * f + (int64_t)t.b[i] * f2;
                if (round == 3) v = (int64_t)t.a[i] * f;
                v = held(round == 0 ? floor_shift(v, s.shift) : rounded(v, s.shift), &s);
            }
            CHECK_OF(t.y[i] == (i < STRIP ? v : i == 7 ? 0 : 77), seed);
            add_hash(t.y[i], 2);
        }
    }
    for (i = 0; i < STRIP; i++) t.sum[i] = (int32_t)held(rounded((int64_t)t.a[i] * t.b[i], s.shift), &s);
    moei_int_multiply(&s, t.a, t.b, t.a); /* in place */
    for (i = 0; i < STRIP; i++) CHECK_OF(t.a[i] == t.sum[i], i);
}

#if !defined(__AVR__) || defined(MOE_NO_PROGMEM)
static void curves(uint32_t seed) {
    union {
        int32_t align;
        unsigned char bytes[130];
    } points;
    const moei_int_shape s = any_shape(seed);
    strip t;
    int32_t from;
    int i;
    for (i = 0; i < 65; i++) put(points.bytes + 2 * i, (uint32_t)point(seed, i) & 0xffffu, 2);
    for (from = -32768; from <= 32767; from += quick ? 1000 : seed < 6 ? STRIP : 200) {
        for (i = 0; i < STRIP; i++) t.a[i] = (int16_t)(from + i < 32767 ? from + i : 32767);
        for (i = 0; i < 12; i++) t.y[i] = 77;
        moei_int_curve(&s, points.bytes, t.a, t.y);
        for (i = 0; i < 12; i++)
            CHECK_OF(t.y[i] == (i < STRIP ? held(rounded(curve(seed, t.a[i]), s.shift), &s) : i == 7 ? 0 : 77), from);
        if (from % 1000 == -768) add_hash(t.y[0], 2);
    }
}
#endif

/* ---- single numbers ---- */

static void exponentials(void) {
    static const int bits[] = {0, 1, 5, 8, 12, 13, 14, 15, 16, 20, 31};
    size_t b;
    for (b = 0; b < sizeof bits / sizeof bits[0]; b++) {
        const uint32_t octave = (uint32_t)1 << bits[b], step = quick || bits[b] > 16 ? octave / 64 + 1 : 1;
        uint32_t d = 0, before = 32768;
        uint32_t i, bad = 0;
        uint32_t last = bits[b] > 27 ? 0xffffffffu : 18 * octave;
        for (i = 0; i <= 16; i++)
            if (bits[b] + 4 < 31 || i < 2)
                CHECK_OF(moei_int_exp2(i * octave, bits[b]) == ((uint32_t)65536 >> i) / 2 + (i == 16), i);
        for (;; d += step) {
            const uint32_t e = moei_int_exp2(d, bits[b]);
            bad += e > before;
            before = e;
#ifndef MOE_NO_FLOAT
            {
                const double exact = 32768.0 * exp2(-(double)d / (double)octave);
                const double off = (double)e < exact ? exact - (double)e : (double)e - exact;
                bad += !(off < (bits[b] > 14 ? 1.9 : 1.0)) || (exact > 4096.0 && !(off < exact / 4096.0));
            }
#endif
            if (d > last - step) break;
        }
        CHECK_OF(bad == 0, bits[b]);
        CHECK_OF(bits[b] > 27 || before == 0, bits[b]);
        for (i = 0; i < 40; i++)
            add_hash((int32_t)moei_int_exp2(mix(i) >> (28 - bits[b] > 0 ? 28 - bits[b] : 0), bits[b]), 2);
    }
    CHECK_OF(moei_int_exp2(0xffffffffu, 0) == 0 && moei_int_exp2(0xffffffffu, 20) == 0, 0);
}

static void roots(void) {
    uint32_t r;
    for (r = 0; r <= 65535; r += quick ? 97 : 1) {
        const uint32_t square = r * r;
        CHECK_OF(moei_int_sqrt(square) == r, r);
        if (r > 0) CHECK_OF(moei_int_sqrt(square - 1) == r - 1, r);
        CHECK_OF(moei_int_sqrt(square + 2 * r) == r, r);
        if (r % 97 == 0) add_hash((int32_t)moei_int_sqrt(mix(r)), 2);
    }
    CHECK_OF(moei_int_sqrt(4294836225u) == 65535 && moei_int_sqrt(0xffffffffu) == 65535, 0);
    CHECK_OF(moei_int_sqrt(4294836225u - 1) == 65534, 0);
}

static void softmaxes(void) {
    enum { MOST = 12 };
    int16_t z[MOST];
    uint16_t e[MOST + 1];
    size_t n, i;
    int bits;
    for (n = 0; n <= MOST; n++)
        for (bits = 0; bits <= 16; bits += 4) {
            int32_t max = -32768;
            uint32_t sum = 0;
            for (i = 0; i < n; i++) {
                z[i] = (int16_t)(any((uint32_t)n, (uint32_t)i, 3, 0, 5) == 0
                                     ? -32768
                                     : any((uint32_t)n, (uint32_t)i, (uint32_t)bits, -20000, 32767));
                if (z[i] > max) max = z[i];
            }
            e[n] = 777;
            sum = moei_int_softmax(n, z, bits, e);
            CHECK_OF(e[n] == 777, n);
            for (i = 0; i < n; i++) {
                CHECK_OF(e[i] == moei_int_exp2((uint32_t)(max - z[i]), bits), i);
                CHECK_OF(z[i] != max || e[i] == 32768u, i);
                sum -= e[i];
                add_hash(e[i], 2);
            }
            CHECK_OF(sum == 0, n);
        }
}

static void top_ks(void) {
    enum { MOST = 20 };
    int32_t key[MOST];
    int16_t index[MOST + 1];
    size_t n, k, i, j, before;
    uint32_t seed;
    for (seed = 0; seed < 6; seed++)
        for (n = 0; n <= MOST; n++)
            for (k = 0; k <= MOST; k += 1 + k / 4) {
                const size_t taken = n < k ? n : k;
                for (i = 0; i < n; i++) {
                    key[i] = seed < 2 ? any(seed, (uint32_t)i, (uint32_t)n, -2, 2)
                                      : any(seed, (uint32_t)i, 0, -2000000000, 147483647);
                    if (seed == 5) key[i] = i & 1u ? INT32_MIN : INT32_MAX;
                }
                for (i = 0; i <= MOST; i++) index[i] = -5;
                CHECK_OF(moei_int_top_k(n, key, k, index) == taken, n);
                CHECK_OF(index[taken] == -5, n);
                for (i = 0; i < taken; i++) { /* as many stand before it in the order as it has places in front */
                    const size_t c = (size_t)index[i];
                    if (!CHECK_OF(index[i] >= 0 && c < n, i)) break;
                    for (before = j = 0; j < n; j++) before += key[j] > key[c] || (key[j] == key[c] && j < c);
                    CHECK_OF(before == i, n);
                    add_hash(index[i], 2);
                }
            }
}

static void sizes(void) {
    CHECK_OF(moei_int8_size(0, 5) == 0 && moei_int8_size(1, 0) == 8 && moei_int8_size(1, 1) == 12 &&
                 moei_int8_size(2, 4) == 20 && moei_int8_size(3, 4) == 32,
             0);
    CHECK_OF(moei_int8_size(16, 64) == 8 * (12 + 128) && moei_int4_size(16, 64) == 4 * (24 + 16 + 128), 0);
    CHECK_OF(moei_int4_size(1, 0) == 24 && moei_int4_size(4, 33) == 24 + 16 + 72 &&
                 moei_int4_size(5, 32) == 2 * (24 + 8 + 64),
             0);
    CHECK_OF(moei_int8_size(65533, 1) == 0 && moei_int8_size(1, 65533) == 0 && moei_int4_size(65533, 1) == 0 &&
                 moei_int4_size(1, 65533) == 0,
             0);
    CHECK_OF(moei_int8_size((size_t)-1, (size_t)-1) == 0 && moei_int4_size((size_t)-1, (size_t)-1) == 0, 0);
#if SIZE_MAX > 65535
    CHECK_OF(moei_int8_size(1, 65532) == 65540 && moei_int8_size(65532, 65532) == (size_t)32766 * 131076, 0);
#else
    CHECK_OF(moei_int8_size(1, 65532) == 0 && moei_int4_size(2, 65532) == 0 && moei_int8_size(600, 600) == 0, 0);
#endif
}

/* ---- packing, and the sums of moe_matmul_quantized ---- */

#ifdef TEST_PACKING
typedef struct source {
    signed char *w;
    int32_t *bias;
    int16_t *factor;
    uint16_t *block;
    size_t ld;
} source;

static source make_source(const problem *p) {
    source s;
    unsigned j, i;
    s.ld = p->k + 3;
    s.w = (signed char *)take(p->n * s.ld);
    s.bias = (int32_t *)take(p->n * sizeof(int32_t));
    s.factor = (int16_t *)take(p->n * sizeof(int16_t));
    s.block = (uint16_t *)take(p->n * block_count(p->k) * sizeof(uint16_t));
    for (j = 0; j < p->n; j++) {
        for (i = 0; i < s.ld; i++) s.w[j * s.ld + i] = (signed char)(i < p->k ? level(p, j, i) : -128);
        s.bias[j] = bias(p, j);
        s.factor[j] = factor(p, j);
        for (i = 0; i < block_count(p->k); i++) s.block[j * block_count(p->k) + i] = block(p, j, i);
    }
    return s;
}

static void free_source(source *s) {
    free(s->w);
    free(s->bias);
    free(s->factor);
    free(s->block);
}

static moe_status pack_by_library(const problem *p, const source *s, unsigned char *out) {
    return p->four ? moei_int4_pack(p->n, p->k, s->w, s->ld, s->bias, s->factor, s->block, out)
                   : moei_int8_pack(p->n, p->k, s->w, s->ld, s->bias, s->factor, out);
}

/* Nothing may be written when a call fails. */
static void refused(const problem *p, const source *s, moe_status expected, int line) {
    const size_t bytes = p->four ? moei_int4_size(p->n, p->k) : moei_int8_size(p->n, p->k);
    unsigned char *out = (unsigned char *)take(bytes);
    size_t i, same = 0;
    memset(out, 0x5a, bytes);
    CHECK_AT(line, pack_by_library(p, s, out) == expected, "refused");
    for (i = 0; i < bytes; i++) same += out[i] == 0x5a;
    CHECK_AT(line, same == bytes, "untouched");
    free(out);
}

/* A code or a factor out of range in a row of s, which has 3 rows of 40 codes. */
static void refuse_row(const problem *p, source *s, size_t row) {
    signed char *code = s->w + row * s->ld + (row == 0 ? 0 : 39);
    const int16_t factor = s->factor[row];
    *code = (signed char)(p->four ? 8 : -128);
    refused(p, s, MOE_ERR_ARGUMENT, __LINE__);
    if (p->four) {
        *code = -9;
        refused(p, s, MOE_ERR_ARGUMENT, __LINE__);
    }
    *code = 0;
    if (p->four) {
        const uint16_t before = s->block[row * 2 + 1];
        s->block[row * 2 + 1] = 32768;
        refused(p, s, MOE_ERR_ARGUMENT, __LINE__);
        s->block[row * 2 + 1] = before;
    }
    s->factor[row] = -1;
    refused(p, s, MOE_ERR_ARGUMENT, __LINE__);
    s->factor[row] = factor;
}

static void refuse_sources(problem *p) {
    source s, t;
    size_t row;
    p->n = 3;
    p->k = 40;
    s = make_source(p);
    for (row = 0; row < 3; row++) refuse_row(p, &s, row);
    s.factor[1] = 0;
    t = s;
    t.w = NULL;
    refused(p, &t, MOE_ERR_ARGUMENT, __LINE__);
    t = s;
    t.factor = NULL;
    refused(p, &t, MOE_ERR_ARGUMENT, __LINE__);
    t = s;
    t.ld = 39;
    refused(p, &t, MOE_ERR_ARGUMENT, __LINE__);
    if (p->four) {
        t = s;
        t.block = NULL;
        refused(p, &t, MOE_ERR_ARGUMENT, __LINE__);
    }
    CHECK_OF(pack_by_library(p, &s, NULL) == MOE_ERR_ARGUMENT, p->four);
    memset(s.w, 0, 3 * s.ld);
    s.bias[2] = 1073741823;
    t = s;
    t.bias = NULL;
    {
        unsigned char *out = (unsigned char *)take(p->four ? moei_int4_size(3, 40) : moei_int8_size(3, 40));
        CHECK_OF(pack_by_library(p, &s, out) == MOE_OK, p->four);
        CHECK_OF(pack_by_library(p, &t, out) == MOE_OK && (out[0] | out[1] | out[2] | out[3]) == 0, p->four);
        free(out);
    }
    s.bias[2] = -1073741823 - 1;
    refused(p, &s, MOE_ERR_OVERFLOW, __LINE__);
    s.bias[2] = INT32_MIN;
    refused(p, &s, MOE_ERR_OVERFLOW, __LINE__);
    s.bias[2] = 1073741823 - 127 * (p->four ? 5 : 1);
    s.w[2 * s.ld + 39] = 1;
    s.block[5] = 5;
    {
        unsigned char *out = (unsigned char *)take(p->four ? moei_int4_size(3, 40) : moei_int8_size(3, 40));
        CHECK_OF(pack_by_library(p, &s, out) == MOE_OK, p->four);
        free(out);
    }
    s.bias[2]++;
    s.w[2 * s.ld + 39] = -1;
    refused(p, &s, MOE_ERR_OVERFLOW, __LINE__);
    free_source(&s);
}

static void packing(void) {
    problem p;
    for (p.four = 0; p.four < 2; p.four++) {
        source s;
        p.mode = RANDOM;
        p.seed = 11;
        for (p.n = 1; p.n <= 5; p.n++)
            for (p.k = 0; p.k <= 70; p.k++) {
                const size_t bytes = p.four ? moei_int4_size(p.n, p.k) : moei_int8_size(p.n, p.k);
                unsigned char *mine = (unsigned char *)take(bytes), *out = (unsigned char *)take(bytes);
                s = make_source(&p);
                CHECK_OF(pack(&p, mine) == bytes && pack_by_library(&p, &s, out) == MOE_OK &&
                             memcmp(mine, out, bytes) == 0,
                         p.k);
                free_source(&s);
                free(mine);
                free(out);
            }
        refuse_sources(&p);
    }
    CHECK_OF(moei_int8_pack(0, 5, NULL, 0, NULL, NULL, NULL) == MOE_OK, 0);
    CHECK_OF(moei_int8_pack(65533, 1, NULL, 1, NULL, NULL, NULL) == MOE_ERR_OVERFLOW, 0);
}
#endif

#ifdef TEST_PACKING
/* With a largest level of 127 in every row and in the input both scales of moe_matmul_quantized are
   1, and its sums come out exactly. Those of moei_int8_product_add come out whole by floor(s / 16)
   + floor((s + 1) / 16) + ... + floor((s + 15) / 16) = s. */
static void same_sums(unsigned n, unsigned k) {
    const moe_kernels *table = moe_kernels_select(MOE_KERNELS_AUTO);
    signed char *w = (signed char *)take((size_t)n * k);
    moe_real *real = (moe_real *)take((size_t)n * k * sizeof(moe_real));
    moe_real *x_real = (moe_real *)take(k * sizeof(moe_real));
    moe_real *c = (moe_real *)take(n * sizeof(moe_real));
    int16_t *x = (int16_t *)take(up(k, 4) * sizeof(int16_t)), *factors = (int16_t *)take(n * sizeof(int16_t));
    int32_t *biases = (int32_t *)take(n * sizeof(int32_t)), *sum = (int32_t *)take(up(n, 4) * sizeof(int32_t));
    unsigned char *data = (unsigned char *)take(moei_int8_size(n, k));
    void *rows = take(moe_quantized_row_size(MOE_TYPE_Q8, k)), *packed;
    size_t bytes = 0, i, j;
    int32_t b;
    moei_int_shape s;
    memset(&s, 0, sizeof s);
    s.n = (uint16_t)n;
    s.k = (uint16_t)k;
    for (i = 0; i < up(k, 4); i++) x[i] = 0;
    for (i = 0; i < k; i++) {
        x[i] = (int16_t)(i == k / 2 ? -127 : any(k, (uint32_t)i, 0, -127, 127));
        x_real[i] = (moe_real)x[i];
        for (j = 0; j < n; j++) {
            w[j * k + i] = (signed char)(i == j % k ? 127 : any(k, (uint32_t)i, (uint32_t)j + 1, -127, 127));
            real[j * k + i] = (moe_real)w[j * k + i];
        }
    }
    for (j = 0; j < n; j++) factors[j] = 16384;
    for (j = 0; j < up(n, 4); j++) sum[j] = 0;
    CHECK_OF(moe_panel_size(MOE_TYPE_Q8, k, &bytes) == MOE_OK, k);
    packed = take(up(n, 16) / 16 * bytes);
    CHECK_OF(moe_pack(table, MOE_TYPE_Q8, n, k, real, k, packed, 1) == MOE_OK, k);
    moe_rows_quantize(table, MOE_TYPE_Q8, 1, k, x_real, k, rows);
    moe_matmul_quantized(table, MOE_TYPE_Q8, 1, n, k, rows, packed, 1, c, n);
    for (b = 0; b < 16; b++) {
        for (j = 0; j < n; j++) biases[j] = b;
        CHECK_OF(moei_int8_pack(n, k, w, k, biases, factors, data) == MOE_OK, k);
        moei_int8_product_add(&s, data, x, 16384, sum);
    }
    for (j = 0; j < n; j++) CHECK_OF((double)c[j] >= (double)sum[j] && (double)c[j] <= (double)sum[j], sum[j]);
    free(w);
    free(real);
    free(x_real);
    free(c);
    free(x);
    free(factors);
    free(biases);
    free(sum);
    free(data);
    free(rows);
    free(packed);
}
#endif

#if !defined(__AVR__) || defined(MOE_NO_PROGMEM)
/* What stands in the hash, then more of it. */
static void hashed(void) {
    const int kept = quick; /* what is hashed must not depend on how much is run */
    uint32_t before, seed;
    quick = 1;
    test_case("curves");
    for (seed = 0; seed < 8; seed++) curves(seed);
    CASE(exponentials());
    CASE(softmaxes());
    CASE(top_ks());
    CASE(roots());
    before = hash;
    quick = kept;
#ifndef MOE_TEST_SMALL
    CASE(all_products());
#endif
    if (!quick) {
        test_case("curves");
        for (seed = 0; seed < 20; seed++) curves(seed);
        test_case("vectors");
        for (; seed < 4000; seed++) vectors(seed);
        CASE(exponentials());
        CASE(roots());
    }
    hash = before;
}
#endif

int main(int argc, char **argv) {
    uint32_t seed;
#ifdef MOE_TEST_SMALL
    quick = 1;
#endif
    if (argc > 1 && argv[1][0] == 'q') quick = 1;
    CASE(flash());
#if !defined(__AVR__) || defined(MOE_NO_PROGMEM)
    CASE(fixed_products());
    test_case("vectors");
    for (seed = 0; seed < 40; seed++) vectors(seed);
#ifdef MOE_TEST_SMALL
    (void)all_products;
#endif
    hashed();
#else
    (void)fixed_products;
    (void)all_products;
    (void)vectors;
    (void)exponentials;
    (void)roots;
    (void)softmaxes;
    (void)top_ks;
    (void)seed;
    (void)curve;
#endif
    CASE(sizes());
#ifdef TEST_PACKING
    CASE(packing());
#endif
#ifdef TEST_PACKING
    test_case("same_sums");
    for (seed = 1; seed < 40; seed++) same_sums(seed, 13 * seed);
#endif
    printf("note: hash %08lx\n", (unsigned long)hash);
    return test_end();
}
