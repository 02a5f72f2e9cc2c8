/* Tests packed weights in moe_kernels.h: 16-bit floats over all their patterns, packing, the common
   layouts of blocks, the rows of quantized activations and their products on every instruction set
   that the machine has, against sums of integers in double.
       cc -std=c99 -O2 -I. tests/unit/quant.c -o quant -lm && ./quant
   Also meant to pass with -DMOE_REAL=double, -DMOE_NO_SIMD, with the sanitizers on, and as C++11.
   "quant quick" runs fewer sizes. */

#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef MOE_NO_QUANT
#error "tests/unit/quant.c tests what MOE_NO_QUANT leaves out"
#endif

#if MOE_REAL_IS_DOUBLE
#define EPSILON DBL_EPSILON
#define LARGEST DBL_MAX
#define SMALLEST DBL_MIN
#else
#define EPSILON FLT_EPSILON
#define LARGEST FLT_MAX
#define SMALLEST FLT_MIN
#endif

enum { KINDS = 3 };
static const int kinds[KINDS] = {MOE_TYPE_Q8, MOE_TYPE_Q8_BLOCK, MOE_TYPE_Q4};

static int quick;

static double absolute(double x) {
    return x < 0 ? -x : x;
}

static int same_real(moe_real a, moe_real b) {
    return memcmp(&a, &b, sizeof a) == 0;
}

static moe_real not_a_number(void) {
    const moei_bits bits = MOEI_INFINITY_BITS | MOEI_INFINITY_BITS >> 1;
    moe_real x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- memory of exact size, off its alignment, with a guard in front and, where the sanitizers do
   not look, behind ---- */

enum { GUARD = 64 };

static void *take(size_t bytes) {
    void *memory = malloc(bytes > 0 ? bytes : 1);
    if (memory == NULL) {
        printf("out of memory\n");
        exit(1);
    }
    return memory;
}

static void *borrow(size_t bytes) {
    unsigned char *block = (unsigned char *)take(bytes + 2 * GUARD + 16);
    memset(block, 0xa5, bytes + 2 * GUARD + 16);
    memcpy(block, &bytes, sizeof bytes);
    return block + GUARD + sizeof(moe_real);
}

static void give_back(void *memory) {
    unsigned char *block = (unsigned char *)memory - GUARD - sizeof(moe_real);
    size_t bytes, i, wrong = 0;
    memcpy(&bytes, block, sizeof bytes);
    for (i = sizeof bytes; i < GUARD + sizeof(moe_real); i++) wrong += block[i] != 0xa5;
    for (i = GUARD + sizeof(moe_real) + bytes; i < bytes + 2 * GUARD + 16; i++) wrong += block[i] != 0xa5;
    CHECK(wrong == 0);
    free(block);
}

/* What is only read, so that a sanitizer sees a byte too many. */
static void *exact(const void *from, size_t bytes) {
    void *copy = take(bytes);
    memcpy(copy, from, bytes);
    return copy;
}

static double *doubles(size_t count) {
    return (double *)take(count * sizeof(double));
}

static moe_real *borrow_reals(size_t count) {
    return (moe_real *)borrow(count * sizeof(moe_real));
}

static moe_real *normals(moe_rng *rng, size_t count) {
    moe_real *x = borrow_reals(count);
    size_t i;
    for (i = 0; i < count; i++) x[i] = moe_rng_normal(rng);
    return x;
}

/* ---- the instruction sets ---- */

/* Copies of tables with the entries of one set each, whatever table the machine would get. */
static moe_kernels levels[8];
static size_t n_levels;

static moe_kernels *add_level(const char *name) {
    moe_kernels *level = &levels[n_levels++];
    *level = *moe_kernels_select(MOE_KERNELS_C);
    level->name = name;
    return level;
}

#define ADD_LEVEL(set, widener)                                          \
    do {                                                                 \
        moe_kernels *level = add_level(#set);                            \
        level->quantized[MOE_TYPE_Q8] = moei_q8_##set;                       \
        level->quantized[MOE_TYPE_Q8_BLOCK] = moei_q8_block_##set;           \
        level->quantized[MOE_TYPE_Q4] = moei_q4_##set;                       \
        level->quantize = moei_quantize_##set;                           \
        level->widen = moei_widen_##widener;                             \
        level->half = moei_half_##widener;                               \
        level->unpacked = moei_unpacked_##set;                           \
        level->panels = moei_panels_##widener;                           \
    } while (0)

/* The kernels with vectors of 8 outputs, as AVX-512 has them: the same text for machines without
   AVX-VNNI. */
#if defined(MOEI_VNNI512) && !defined(MOE_NO_AVX512) && (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
#define HAVE_TWIN 1
#define TWIN __attribute__((target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")))
MOEI_VNNI_256(twin, TWIN, _mm256_dpbusd_epi32)
#define moei_quantize_twin moei_quantize_avx2
#endif

static void find_levels(void) {
    const unsigned features = moe_cpu_features(), avx2 = MOE_CPU_AVX2 | MOE_CPU_FMA | MOE_CPU_F16C;
    add_level("c");
    (void)features;
    (void)avx2;
#ifdef MOEI_HAVE_AVX2
    if ((features & avx2) == avx2) ADD_LEVEL(avx2, avx2);
#ifdef MOEI_AVXVNNI
    if ((features & (avx2 | MOE_CPU_AVXVNNI)) == (avx2 | MOE_CPU_AVXVNNI)) ADD_LEVEL(avxvnni, avx2);
#endif
#ifdef HAVE_TWIN
    if ((features & (avx2 | MOE_CPU_AVX512VNNI)) == (avx2 | MOE_CPU_AVX512VNNI) && __builtin_cpu_supports("avx512vl"))
        ADD_LEVEL(twin, avx2);
#endif
#if defined(MOEI_VNNI512) && !defined(MOE_NO_AVX512)
    if ((features & (avx2 | MOE_CPU_AVX512VNNI)) == (avx2 | MOE_CPU_AVX512VNNI)) ADD_LEVEL(vnni512, avx512);
#endif
#endif
#ifdef MOEI_V4_IEEE
    ADD_LEVEL(v4, v4);
#ifdef MOEI_DOTPROD
    if (features & MOE_CPU_DOTPROD) ADD_LEVEL(v4_dot, v4);
#endif
#ifdef MOEI_I8MM
    if (features & MOE_CPU_I8MM) ADD_LEVEL(v4_mm, v4);
#endif
#endif
}

/* Each table that can be selected is complete, and its entries are those of a set. */
static void test_tables(void) {
    int id;
    size_t i, t;
    for (id = 0; id < MOE_KERNELS_COUNT; id++) {
        const moe_kernels *table = moe_kernels_select(id);
        int found = 0;
        if (table == NULL) continue;
        CHECK(table->quantize != NULL && table->widen != NULL && table->unpacked != NULL);
        for (t = 0; t < MOE_TYPE_COUNT; t++) CHECK((table->quantized[t] != NULL) == (t >= MOE_TYPE_Q8));
        for (i = 0; i < n_levels; i++)
            found |= memcmp(levels[i].quantized, table->quantized, sizeof table->quantized) == 0;
        CHECK(found);
        printf("table %s: %s\n", moe_kernels_name(id), table->name);
    }
    for (i = 0; i < n_levels; i++) printf("level %s\n", levels[i].name);
}

/* ---- 16-bit floats ---- */

static double half_value(int type, unsigned bits) {
    const int wide = type == MOE_TYPE_F16 ? 10 : 7, bias = type == MOE_TYPE_F16 ? 15 : 127;
    const unsigned exponent = (bits & 0x7fffu) >> wide, mantissa = bits & ((1u << wide) - 1);
    const unsigned last = type == MOE_TYPE_F16 ? 31 : 255;
    const unsigned whole = exponent == 0 ? mantissa : mantissa + (1u << wide);
    double size = ldexp((double)whole, (int)(exponent == 0 ? 1 : exponent) - bias - wide);
    if (exponent == last) size = HUGE_VAL;
    return bits & 0x8000u ? -size : size;
}

static int half_is_nan(int type, unsigned bits) {
    return (bits & 0x7fffu) > (type == MOE_TYPE_F16 ? 0x7c00u : 0x7f80u);
}

static unsigned narrowed(int type, moe_real x) {
    uint16_t packed[16];
    CHECK(moe_pack(NULL, type, 1, 1, &x, 1, packed, 1) == MOE_OK);
    CHECK(packed[1] == 0 && packed[15] == 0);
    return packed[0];
}

static moe_real neighbor(moe_real x, int up) {
    moei_bits bits;
    memcpy(&bits, &x, sizeof bits);
    bits = up == (x > 0) ? bits + 1 : bits - 1;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

static void test_halves(int type) {
    enum { DEPTH = 4096 };
    static uint16_t panel[DEPTH * 16], back[DEPTH * 16];
    static moe_real w[16 * DEPTH], wide[DEPTH * 16];
    const unsigned infinity = type == MOE_TYPE_F16 ? 0x7c00u : 0x7f80u;
    size_t i, l, wrong = 0;
    unsigned h;
    for (h = 0; h < 65536; h++) panel[h] = (uint16_t)h;
    CHECK(moe_unpack(type, 16, DEPTH, panel, 1, w, DEPTH) == MOE_OK);
    CHECK(moe_pack(NULL, type, 16, DEPTH, w, DEPTH, back, 1) == MOE_OK);
    for (h = 0; h < 65536; h++) {
        const moe_real got = w[h % 16 * DEPTH + h / 16];
        if (half_is_nan(type, h))
            wrong += !moei_is_nan(got) || !half_is_nan(type, back[h]) || (back[h] & 0x8000u) != (h & 0x8000u);
        else wrong += !same_real(got, (moe_real)half_value(type, h)) || back[h] != h;
    }
    CHECK(wrong == 0);
    for (l = 0; l < n_levels; l++) {
        unsigned char *bytes = (unsigned char *)exact(panel, sizeof panel);
        for (i = 0; i < sizeof wide / sizeof wide[0]; i++) wide[i] = 1;
        levels[l].widen(type, DEPTH, bytes, wide);
        for (h = 0, wrong = 0; h < 65536; h++)
            if (half_is_nan(type, h)) wrong += !moei_is_nan(wide[h]);
            else wrong += !same_real(wide[h], w[h % 16 * DEPTH + h / 16]);
        CHECK(wrong == 0);
        wide[16] = 1;
        levels[l].widen(type, 1, bytes, wide);
        CHECK(same_real(wide[16], 1) && same_real(wide[15], (moe_real)half_value(type, 15)));
        free(bytes);
    }
    for (h = 0, wrong = 0; h + 1 < infinity; h++) {
        /* half-way between neighbors to the even one, and just beside it */
        const moe_real middle = (moe_real)((half_value(type, h) + half_value(type, h + 1)) / 2);
        if ((double)middle > half_value(type, h) && (double)middle < half_value(type, h + 1)) {
            /* exact, but for subnormal bf16 in float */
            wrong += narrowed(type, middle) != h + h % 2 || narrowed(type, -middle) != (0x8000u | (h + h % 2));
            wrong += narrowed(type, neighbor(middle, 0)) != h || narrowed(type, neighbor(middle, 1)) != h + 1;
        }
    }
    CHECK(wrong == 0);
    { /* half a unit above the largest is the first that becomes infinite */
        const double top = half_value(type, infinity - 1), unit = top - half_value(type, infinity - 2);
        const moe_real limit = (moe_real)(top + unit / 2);
        CHECK(narrowed(type, limit) == infinity && narrowed(type, -limit) == (0x8000u | infinity));
        CHECK(narrowed(type, neighbor(limit, 0)) == infinity - 1);
        CHECK(narrowed(type, (moe_real)LARGEST) == infinity && narrowed(type, (moe_real)HUGE_VAL) == infinity);
        CHECK(narrowed(type, -(moe_real)HUGE_VAL) == (0x8000u | infinity));
        CHECK(narrowed(type, (moe_real)SMALLEST * (moe_real)EPSILON) == 0);
    }
}

/* ---- panels ---- */

static void test_panel_sizes(void) {
    static const size_t real = sizeof(moe_real);
    size_t k, bytes = 7;
    int type;
    for (k = 0; k < 200; k++) {
        const size_t blocks = (k + 31) / 32;
        CHECK(moe_panel_size(MOE_TYPE_REAL, k, &bytes) == MOE_OK && bytes == 16 * real * k);
        CHECK(moe_panel_size(MOE_TYPE_F16, k, &bytes) == MOE_OK && bytes == 32 * k);
        CHECK(moe_panel_size(MOE_TYPE_BF16, k, &bytes) == MOE_OK && bytes == 32 * k);
        CHECK(moe_panel_size(MOE_TYPE_Q8, k, &bytes) == MOE_OK && bytes == 512 * blocks + 64);
        CHECK(moe_panel_size(MOE_TYPE_Q8_BLOCK, k, &bytes) == MOE_OK && bytes == (544 * blocks + 63) / 64 * 64);
        CHECK(moe_panel_size(MOE_TYPE_Q4, k, &bytes) == MOE_OK && bytes == (288 * blocks + 63) / 64 * 64);
        for (type = 0; type < MOE_TYPE_COUNT; type++) {
            const size_t size = moe_quantized_row_size(type, k), groups = type == MOE_TYPE_Q8 ? 1 : blocks;
            if (type < MOE_TYPE_Q8) CHECK(size == 0);
            else
                CHECK(size % 128 == 64 && size >= 32 * blocks + groups * (real + 4) &&
                      size < 32 * blocks + groups * (real + 4) + 192);
        }
    }
    for (type = 0; type < MOE_TYPE_COUNT; type++) {
        moe_real x = 1;
        bytes = 7;
        CHECK(moe_panel_size(type, (size_t)-1, &bytes) == MOE_ERR_OVERFLOW && bytes == 7);
        CHECK(moe_panel_size(type, (size_t)-1 / 16, NULL) == MOE_ERR_ARGUMENT);
        CHECK(moe_pack(NULL, type, 1, 1, &x, 1, NULL, 0) == MOE_ERR_ARGUMENT);
        CHECK(moe_unpack(type, 1, 1, NULL, 0, &x, 1) == MOE_ERR_ARGUMENT);
        CHECK(moe_pack(NULL, type, (size_t)-1, (size_t)1 << 20, &x, 1, NULL, 1) == MOE_ERR_OVERFLOW);
        CHECK(moe_pack(NULL, type, 1, 1, &x, 1, NULL, (size_t)-1 / 8) == MOE_ERR_OVERFLOW);
        CHECK(moe_pack(NULL, type, 0, 5, NULL, 5, NULL, 1) == MOE_OK &&
              moe_unpack(type, 0, 5, NULL, 1, NULL, 5) == MOE_OK);
    }
    CHECK(moe_panel_size(-1, 1, &bytes) == MOE_ERR_ARGUMENT &&
          moe_panel_size(MOE_TYPE_COUNT, 1, &bytes) == MOE_ERR_ARGUMENT);
    CHECK(moe_quantized_row_size(MOE_TYPE_Q8, (size_t)-1) == 0 &&
          moe_quantized_row_size(MOE_TYPE_Q4, (size_t)-1 - 31) == 0);
    CHECK(moe_quantized_row_size(-1, 4) == 0 && moe_quantized_row_size(MOE_TYPE_COUNT, 4) == 0);
}

/* The documented layout, read here on its own: a quantized weight and its scale. */
static int level_in(int type, const unsigned char *panel, size_t p, size_t j) {
    const size_t b = p / 32, t = p % 32;
    if (type == MOE_TYPE_Q4) {
        const unsigned byte = panel[((b * 4 + t % 16 / 4) * 16 + j) * 4 + t % 4];
        return (int)(t < 16 ? byte % 16 : byte / 16) - 8;
    }
    return (int)panel[(p / 4 * 16 + j) * 4 + p % 4] - 128;
}

static double scale_in(int type, size_t k, const unsigned char *panel, size_t p, size_t j) {
    const size_t blocks = (k + 31) / 32;
    uint16_t half;
    float scale;
    if (type == MOE_TYPE_Q8) {
        memcpy(&scale, panel + blocks * 512 + 4 * j, sizeof scale);
        return (double)scale;
    }
    memcpy(&half, panel + blocks * (type == MOE_TYPE_Q4 ? 256 : 512) + 2 * (p / 32 * 16 + j), sizeof half);
    return half_value(MOE_TYPE_F16, half);
}

/* The number in binary16 nearest to x, ties to even, by trying all. */
static double nearest_half(double x) {
    unsigned h, low = 0, high = 0x7bff;
    const double size = absolute(x);
    while (low + 1 < high) {
        h = (low + high) / 2;
        if (half_value(MOE_TYPE_F16, h) <= size) low = h;
        else high = h;
    }
    {
        const double below = size - half_value(MOE_TYPE_F16, low), above = half_value(MOE_TYPE_F16, high) - size;
        h = below < above || (below <= above && low % 2 == 0) ? low : high;
    }
    return x < 0 ? -half_value(MOE_TYPE_F16, h) : half_value(MOE_TYPE_F16, h);
}

/* One group of weights and what it became: the scale by its rule, and no weight that another level
   would come closer to. */
static size_t wrong_in_group(int type, size_t n, const moe_real *x, const int *level, double scale) {
    moe_real most = 0, want;
    size_t i, wrong = 0;
    for (i = 0; i < n; i++)
        if (absolute((double)x[i]) > absolute((double)most)) most = x[i];
    want = type == MOE_TYPE_Q4 ? most / -8 : (most < 0 ? -most : most) / 127;
    if (type == MOE_TYPE_Q8) wrong += absolute(scale - (double)(float)want) > 0;
    else wrong += absolute(scale - nearest_half((double)want)) > 0;
    for (i = 0; i < n; i++) {
        const double at = absolute(scale) > 0 ? (double)x[i] / scale : 0;
        const int least = type == MOE_TYPE_Q4 ? -8 : -127, largest = type == MOE_TYPE_Q4 ? 7 : 127;
        if (level[i] < least || level[i] > largest) wrong++;
        else if (!(absolute((double)level[i] - at) <= 0.5 + 64 * (double)EPSILON) &&
                 !(level[i] == largest && at > largest) && !(level[i] == least && at < least))
            wrong++;
    }
    return wrong;
}

static void check_pack(int type, size_t n, size_t k, size_t pad, size_t stride, uint64_t seed) {
    const size_t ldw = k + pad, panels = (n + 15) / 16;
    const size_t count = (n - 1) * ldw + k;
    size_t size = 0, bytes, j, p, i, wrong = 0;
    moe_rng rng;
    moe_real *w, *back = borrow_reals(count), *before;
    unsigned char *packed;
    moe_rng_seed(&rng, seed);
    w = normals(&rng, count);
    if (seed % 3 == 0)
        for (i = 0; i < count; i++)
            w[i] *= moe_rng_below(&rng, 9) == 0 ? 0 : (moe_real)ldexp(1, (int)moe_rng_below(&rng, 30) - 24);
    before = (moe_real *)exact(w, count * sizeof *w);
    CHECK(moe_panel_size(type, k, &size) == MOE_OK);
    bytes = ((panels - 1) * stride + 1) * size;
    packed = (unsigned char *)borrow(bytes);
    CHECK(moe_pack(moe_kernels_select(0), type, n, k, before, ldw, packed, stride) == MOE_OK);
    for (i = 0; i < panels; i++)
        for (p = size; i + 1 < panels && p < size * stride; p++) wrong += packed[i * stride * size + p] != 0xa5;
    CHECK(wrong == 0);
    for (i = 0; i < count; i++) back[i] = -77;
    CHECK(moe_unpack(type, n, k, packed, stride, back, ldw) == MOE_OK);
    for (i = 0; i < count; i++) wrong += i % ldw >= k && !same_real(back[i], -77);
    for (j = 0; j < panels * 16; j++) {
        const unsigned char *panel = packed + j / 16 * stride * size;
        const size_t full = type < MOE_TYPE_Q8 ? k : (k + 31) / 32 * 32;
        for (p = 0; p < full; p++) {
            const int there = j < n && p < k;
            if (type == MOE_TYPE_REAL) {
                moe_real x;
                memcpy(&x, panel + (p * 16 + j % 16) * sizeof x, sizeof x);
                wrong += !same_real(x, there ? w[j * ldw + p] : 0) || (there && !same_real(x, back[j * ldw + p]));
            } else if (type < MOE_TYPE_Q8) {
                uint16_t half;
                memcpy(&half, panel + (p * 16 + j % 16) * 2, 2);
                wrong += half != (there ? narrowed(type, w[j * ldw + p]) : 0);
                wrong += there && !same_real((moe_real)half_value(type, half), back[j * ldw + p]);
            } else {
                const int level = level_in(type, panel, p, j % 16);
                const double scale = scale_in(type, k, panel, p, j % 16);
                if (!there) wrong += level != 0 || (j >= n && absolute(scale) > 0);
                else wrong += !same_real((moe_real)level * (moe_real)scale + 0, back[j * ldw + p] + 0);
            }
        }
        for (p = 0; j < n && type >= MOE_TYPE_Q8 && p < k; p += type == MOE_TYPE_Q8 ? k : 32) {
            const size_t length = type == MOE_TYPE_Q8 ? k : k - p < 32 ? k - p : 32;
            int *level = (int *)borrow(length * sizeof(int));
            for (i = 0; i < length; i++) level[i] = level_in(type, panel, p + i, j % 16);
            wrong += wrong_in_group(type, length, w + j * ldw + p, level, scale_in(type, k, panel, p, j % 16));
            give_back(level);
        }
    }
    if (!CHECK(wrong == 0))
        printf("    type %d n %lu k %lu: %lu wrong\n", type, (unsigned long)n, (unsigned long)k, (unsigned long)wrong);
    free(before);
    give_back(w);
    give_back(back);
    give_back(packed);
}

static void test_packing(void) {
    size_t n, k;
    int type;
    for (type = 0; type < MOE_TYPE_COUNT; type++) {
        for (k = 1; k <= 70; k++) check_pack(type, 1 + k * 7 % 40, k, k % 3, 1 + k % 2, k);
        for (n = 1; n <= 70; n += quick ? 9 : 1) check_pack(type, n, 1 + n * 5 % 70, n % 2, 1 + n % 3, n + 100);
        check_pack(type, 17, 300, 1, 2, 3);
    }
}

static void check_largest_levels(unsigned char *packed, moe_real *w) {
    enum { K = 40, N = 3 };
    size_t i;
    for (i = 0; i < N * K; i++) w[i] = 0; /* the usual rule of Q4_0: the number of the largest size gets level -8 */
    w[0] = 8;
    w[1] = -7;
    w[2] = MOEI_R(0.5);
    w[3] = MOEI_R(-0.5);
    w[4] = MOEI_R(0.500003);
    w[32] = -8;
    w[33] = 8;
    CHECK(moe_pack(NULL, MOE_TYPE_Q4, 1, K, w, K, packed, 1) == MOE_OK);
    CHECK(level_in(MOE_TYPE_Q4, packed, 0, 0) == -8 && level_in(MOE_TYPE_Q4, packed, 1, 0) == 7);
    /* x / scale + 8.5 is cut off */
    CHECK(level_in(MOE_TYPE_Q4, packed, 2, 0) == 0 && level_in(MOE_TYPE_Q4, packed, 3, 0) == 1);
    CHECK(level_in(MOE_TYPE_Q4, packed, 4, 0) == -1);
    CHECK(level_in(MOE_TYPE_Q4, packed, 32, 0) == -8 && level_in(MOE_TYPE_Q4, packed, 33, 0) == 7);
    w[0] = 127;
    w[1] = MOEI_R(-2.5);
    w[2] = MOEI_R(2.5);
    w[3] = MOEI_R(-126.75);
    CHECK(moe_pack(NULL, MOE_TYPE_Q8_BLOCK, 1, K, w, K, packed, 1) == MOE_OK);
    CHECK(level_in(MOE_TYPE_Q8_BLOCK, packed, 1, 0) == -3 && level_in(MOE_TYPE_Q8_BLOCK, packed, 2, 0) == 3);
    CHECK(level_in(MOE_TYPE_Q8_BLOCK, packed, 3, 0) == -127 && level_in(MOE_TYPE_Q8_BLOCK, packed, 0, 0) == 127);
}

/* Numbers at the ends of their range. */
static void test_weight_edges(void) {
    enum { K = 40, N = 3 };
    static unsigned char packed[1 << 13], before[1 << 13];
    static moe_real w[N * K], back[N * K];
    size_t i, t;
    for (t = 0; t < KINDS; t++) {
        const int type = kinds[t];
        const moe_real bad[3] = {not_a_number(), (moe_real)HUGE_VAL, -(moe_real)HUGE_VAL};
        const moe_real steps = type == MOE_TYPE_Q4 ? 8 : 127;
        for (i = 0; i < 3; i++) {
            size_t j;
            for (j = 0; j < N * K; j++) w[j] = (moe_real)j;
            w[2 * K + 39] = bad[i];
            memset(packed, 0x5a, sizeof packed);
            memset(before, 0x5a, sizeof before);
            CHECK(moe_pack(NULL, type, N, K, w, K, packed, 1) == MOE_ERR_NONFINITE &&
                  memcmp(packed, before, sizeof packed) == 0);
        }
        for (i = 0; i < N * K; i++) w[i] = 0;
        CHECK(moe_pack(NULL, type, N, K, w, K, packed, 1) == MOE_OK &&
              moe_unpack(type, N, K, packed, 1, back, K) == MOE_OK);
        for (i = 0; i < N * K; i++) CHECK(same_real(back[i] + 0, 0));
        w[K + 1] = steps * 65519;
        w[K + 2] = -1; /* the largest scale in binary16, and one that is too large */
        CHECK(moe_pack(NULL, type, N, K, w, K, packed, 1) == MOE_OK &&
              moe_unpack(type, N, K, packed, 1, back, K) == MOE_OK);
        CHECK(same_real(back[K + 1], steps * (type == MOE_TYPE_Q8 ? 65519 : 65504)) && same_real(back[K] + 0, 0));
        w[K + 1] = -steps * 65520;
        memcpy(before, packed, sizeof packed);
        CHECK(moe_pack(NULL, type, N, K, w, K, packed, 1) == (type == MOE_TYPE_Q8 ? MOE_OK : MOE_ERR_OVERFLOW));
        CHECK(type == MOE_TYPE_Q8 || memcmp(packed, before, sizeof packed) == 0);
        w[K + 1] = (moe_real)LARGEST;
        CHECK(moe_pack(NULL, type, N, K, w, K, packed, 1) ==
              (type == MOE_TYPE_Q8 && !MOE_REAL_IS_DOUBLE ? MOE_OK : MOE_ERR_OVERFLOW));
        w[K + 1] = (moe_real)SMALLEST * (moe_real)EPSILON; /* the scale underflows */
        w[K + 2] = -w[K + 1];
        CHECK(moe_pack(NULL, type, N, K, w, K, packed, 1) == MOE_OK &&
              moe_unpack(type, N, K, packed, 1, back, K) == MOE_OK);
        for (i = 0; i < N * K; i++) CHECK(same_real(back[i] + 0, 0));
        w[K + 1] = (moe_real)ldexp((double)steps * 0.75, -24); /* rounds up to the smallest scale */
        w[K + 2] = 0;
        CHECK(moe_pack(NULL, type, N, K, w, K, packed, 1) == MOE_OK &&
              moe_unpack(type, N, K, packed, 1, back, K) == MOE_OK);
        CHECK(absolute((double)back[K + 1] - (double)w[K + 1]) <= ldexp(0.51, -24));
        /* rounds down to it: the largest weight has no level of its own */
        w[K + 1] = (moe_real)ldexp((double)steps * 1.4, -24);
        CHECK(moe_pack(NULL, type, N, K, w, K, packed, 1) == MOE_OK &&
              moe_unpack(type, N, K, packed, 1, back, K) == MOE_OK);
        if (type != MOE_TYPE_Q8) CHECK(absolute((double)back[K + 1] - ldexp((double)steps, -24)) <= 0);
    }
    check_largest_levels(packed, w);
}

/* ---- the common layouts ---- */

static moe_status from_common(int type, size_t n, size_t k, const void *blocks, void *packed, size_t stride) {
    return moe_import_pack_blocks(type, n, k, blocks, packed, stride);
}

static moe_status to_common(int type, size_t n, size_t k, const void *packed, size_t stride, void *blocks) {
    return moe_import_unpack_blocks(type, n, k, packed, stride, blocks);
}

/* Element p of a row of blocks, by the layouts' definitions. */
static double common_value(int type, const unsigned char *row, size_t p) {
    const unsigned char *block = row + p / 32 * (type == MOE_TYPE_Q4 ? 18 : 34);
    const double scale = half_value(MOE_TYPE_F16, (unsigned)block[0] + 256u * block[1]);
    const size_t t = p % 32;
    if (type != MOE_TYPE_Q4) return scale * (block[2 + t] < 128 ? (double)block[2 + t] : (double)block[2 + t] - 256);
    return scale * ((double)(t < 16 ? block[2 + t] % 16 : block[2 + t - 16] / 16) - 8);
}

static void test_common(int type) {
    const size_t each = type == MOE_TYPE_Q4 ? 18 : 34;
    size_t n, k, i, p, stride, size = 0;
    for (n = 0; n <= 40; n += n < 18 ? 1 : 11)
        for (k = 0; k <= 160; k += 32) {
            const size_t bytes = n * (k / 32) * each, panels = (n + 15) / 16;
            moe_rng rng = {n * 1000 + k};
            unsigned char *blocks = (unsigned char *)borrow(bytes);
            unsigned char *back = (unsigned char *)borrow(bytes), *packed, *read;
            moe_real *w = borrow_reals(n * k);
            size_t wrong = 0;
            for (i = 0; i < bytes; i++) blocks[i] = (unsigned char)moe_rng_below(&rng, 256);
            for (i = 0; i < bytes; i += each)
                /* for half of the sizes the scales are finite */
                if ((blocks[i + 1] & 0x7c) == 0x7c && n % 2 == 0) blocks[i + 1] ^= 0x40;
            stride = 1 + (n + k / 32) % 2;
            CHECK(moe_panel_size(type, k, &size) == MOE_OK);
            packed = (unsigned char *)borrow(panels == 0 ? 0 : ((panels - 1) * stride + 1) * size);
            read = (unsigned char *)exact(blocks, bytes);
            CHECK(from_common(type, n, k, read, packed, stride) == MOE_OK);
            CHECK(to_common(type, n, k, packed, stride, back) == MOE_OK && memcmp(back, blocks, bytes) == 0);
            CHECK(moe_unpack(type, n, k, packed, stride, w, k) == MOE_OK);
            for (i = 0; i < n; i++)
                for (p = 0; p < k; p++) {
                    const double want = common_value(type, read + i * (k / 32) * each, p);
                    if (moe_is_finite((moe_real)want)) wrong += !same_real(w[i * k + p] + 0, (moe_real)want + 0);
                }
            if (n % 2 == 0) CHECK(wrong == 0);
            free(read);
            give_back(blocks);
            give_back(back);
            give_back(packed);
            give_back(w);
        }
    {
        unsigned char block[34] = {0}, panel[1024];
        CHECK(from_common(type, 1, 33, block, panel, 1) == MOE_ERR_SHAPE &&
              to_common(type, 1, 31, panel, 1, block) == MOE_ERR_SHAPE);
        CHECK(from_common(type, 1, 32, block, panel, 0) == MOE_ERR_ARGUMENT &&
              to_common(type, 1, 32, panel, 0, block) == MOE_ERR_ARGUMENT);
        CHECK(from_common(type, (size_t)-1, (size_t)1 << 20, block, panel, 1) == MOE_ERR_OVERFLOW);
    }
}

/* ---- matrices in files ---- */

static double half_at(const unsigned char *b) { return half_value(MOE_TYPE_F16, (unsigned)b[0] + 256u * b[1]); }
static int nibble(const unsigned char *q, int e) { return e < 16 ? q[e] % 16 : q[e - 16] / 16; }
static double power_of(unsigned e) { return ldexp(1.0, (int)e - 127); }

static const double e2m1[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6};
static const double iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static double small_block_value(int code, const unsigned char *b, int e) {
    const int fifth = code == 6 || code == 7 ? b[(code == 6 ? 2 : 4) + e / 8] >> e % 8 & 1 : 0;
    switch (code) {
    case 2: return half_at(b) * (nibble(b + 2, e) - 8);
    case 3: return half_at(b) * nibble(b + 4, e) + half_at(b + 2);
    case 6: return half_at(b) * (nibble(b + 6, e) + 16 * fifth - 16);
    case 7: return half_at(b) * (nibble(b + 8, e) + 16 * fifth) + half_at(b + 2);
    case 8: return half_at(b) * (b[2 + e] < 128 ? b[2 + e] : b[2 + e] - 256);
    case 20: return half_at(b) * iq4[nibble(b + 2, e)];
    default: return power_of(b[0]) * e2m1[nibble(b + 1, e)];
    }
}

static int six_bits(const unsigned char *s, int j, int minimum) {
    if (j < 4) return s[j + 4 * minimum] % 64;
    return (minimum ? s[j + 4] / 16 : s[j + 4] % 16) + s[j - 4 + 4 * minimum] / 64 * 16;
}

/* Element e = 128 h + 32 k + l = 32 j + l of a block of 256. */
static double large_block_value(int code, const unsigned char *b, int e) {
    const int h = e / 128, k = e / 32 % 4;
    const int l = e % 32, j = e / 32;
    const int i = e / 16;
    const unsigned char *s = b + 96, *q = b + (code == 13 ? 48 : 16) + 32 * (j / 2) + l;
    int low, scale;
    switch (code) {
    case 10: return half_at(b + 80) * (b[i] % 16) * (b[16 + 32 * h + l] >> 2 * k & 3) - half_at(b + 82) * (b[i] / 16);
    case 11:
        scale = (i < 8 ? s[i] % 16 : s[i - 8] / 16) + (s[8 + i % 4] >> 2 * (i / 4) & 3) * 16 - 32;
        return half_at(b + 108) * scale * ((b[32 + 32 * h + l] >> 2 * k & 3) - (b[l] >> (4 * h + k) & 1 ? 0 : 4));
    case 12:
    case 13:
        low = (j % 2 ? *q / 16 : *q % 16) + (code == 13 ? 16 * (b[16 + l] >> j & 1) : 0);
        return half_at(b) * six_bits(b + 4, j, 0) * low - half_at(b + 2) * six_bits(b + 4, j, 1);
    case 14:
        low = b[64 * h + 32 * (k & 1) + l];
        low = (k > 1 ? low / 16 : low % 16) + (b[128 + 32 * h + l] >> 2 * k & 3) * 16 - 32;
        return half_at(b + 208) * (b[192 + i] < 128 ? b[192 + i] : b[192 + i] - 256) * low;
    default:
        scale = (b[4 + j / 2] >> 4 * (j & 1) & 15) + (((b[2] + 256 * b[3]) >> 2 * j & 3) << 4);
        return half_at(b) * (scale - 32) * iq4[nibble(b + 8 + 16 * j, l)];
    }
}

/* A matrix in a file: its bytes, and its values by the layouts' definitions. */
typedef struct in_file {
    moe_external w;
    unsigned char *bytes, *scales;
    size_t n, k, size;
    moe_real *values;  /* [n,k] as it is unpacked */
} in_file;

/* Where the binary16 numbers of a block are, which must be finite; 255: there is none. */
static void finite_halves(int code, unsigned char *b) {
    static const unsigned char at[][3] = {{2, 0, 255},   {3, 0, 2},      {6, 0, 255},     {7, 0, 2},
                                          {8, 0, 255},   {10, 80, 82},   {11, 108, 255},  {12, 0, 2},
                                          {13, 0, 2},    {14, 208, 255}, {20, 0, 255},    {23, 0, 255}};
    size_t i, j;
    for (i = 0; i < sizeof at / sizeof at[0]; i++)
        for (j = 1; j < 3 && at[i][0] == code; j++)
            if (at[i][j] != 255) b[at[i][j] + 1] = (unsigned char)((b[at[i][j] + 1] & 0x83) | 0x24);
}

/* gap: unused bytes between blocks and between rows. */
static in_file make_in_file(const moei_block_type *type, size_t n, size_t k, size_t gap, uint64_t seed) {
    const size_t block = (size_t)type->external.block, each = (size_t)type->external.bytes;
    moe_rng rng = {seed};
    in_file f;
    size_t i, p;
    memset(&f, 0, sizeof f);
    f.n = n;
    f.k = k;
    f.w.type = &type->external;
    f.w.column = each + gap;
    f.w.row = k / block * f.w.column + gap;
    f.size = (n - 1) * f.w.row + (k / block - 1) * f.w.column + each;
    f.bytes = (unsigned char *)take(f.size);
    for (i = 0; i < f.size; i++) f.bytes[i] = (unsigned char)moe_rng_below(&rng, 256);
    for (i = 0; i < n; i++)
        for (p = 0; p < k / block; p++) {
            unsigned char *b = f.bytes + i * f.w.row + p * f.w.column;
            finite_halves(type->code, b);
            if (type->code == 39) b[0] = (unsigned char)(120 + b[0] % 8);
            if (type->code == 30) b[1] = (unsigned char)((b[1] & 0x83) | 0x3c);
        }
    f.w.data = f.bytes;
    if (type->code == MOEI_TYPE_MXFP4) {
        f.scales = (unsigned char *)take(n * (k / 32));
        for (i = 0; i < n * (k / 32); i++) f.scales[i] = (unsigned char)(120 + moe_rng_below(&rng, 8));
        f.w.scales = f.scales;
        f.w.scale_row = k / 32;
        f.w.scale_rows = 1;
        f.w.scale_columns = 32;
    }
    f.values = (moe_real *)take(n * k * sizeof(moe_real));
    for (i = 0; i < n; i++) f.w.type->unpack(&levels[0], &f.w, i, 0, k, f.values + i * k);
    return f;
}

static void free_in_file(in_file *f) {
    free(f->bytes);
    free(f->scales);
    free(f->values);
}

static double in_file_value(const in_file *f, int code, size_t i, size_t p) {
    const size_t block = (size_t)f->w.type->block;
    const unsigned char *b = f->bytes + i * f->w.row + p / block * f->w.column;
    const int e = (int)(p % block);
    if (code == MOEI_TYPE_MXFP4)
        return power_of(f->scales[i * f->w.scale_row + p / 32]) * e2m1[e % 2 == 0 ? b[e / 2] % 16 : b[e / 2] / 16];
    return block == 256 ? large_block_value(code, b, e) : small_block_value(code, b, e);
}

static void test_blocks(void) {
    size_t t, i, p;
    int types = 0;
    for (t = 0; t < MOEI_GGUF_TYPE_COUNT; t++) {
        const moei_block_type *type = &moei_gguf_types[t];
        size_t wrong = 0;
        in_file f;
        if (type->codes == NULL) continue;
        types++;
        f = make_in_file(type, 5, 768, t % 3, t);
        for (i = 0; i < f.n; i++)
            for (p = 0; p < f.k; p++) {
                const moe_real want = (moe_real)in_file_value(&f, type->code, i, p);
                wrong += !(f.values[i * f.k + p] <= want && f.values[i * f.k + p] >= want);
            }
        CHECKF(wrong == 0, "%s: %d of %d values", type->external.name, (int)wrong, (int)(f.n * f.k));
        free_in_file(&f);
    }
    CHECK(types == 14);
}

/* Blocks of zeros but for the bytes given, and values worked out by hand. */
static void test_worked_blocks(void) {
    static const struct {
        int code;
        unsigned char set[10][2];
        int e[3];
        double value[3];
    } worked[] = {
        {2, {{1, 0x3c}, {2, 0x9f}}, {0, 16, 1}, {7, 1, -8}},
        {3, {{1, 0x3c}, {3, 0xc0}, {4, 0x2f}}, {0, 16, 1}, {13, 0, -2}},
        {6, {{1, 0x40}, {2, 0x01}, {4, 0x01}, {6, 0x21}}, {0, 16, 1}, {2, 4, -32}},
        {7, {{1, 0x3c}, {3, 0x38}, {4, 0x02}, {9, 0x03}}, {1, 17, 0}, {19.5, .5, .5}},
        {8, {{1, 0x38}, {2, 0x80}, {33, 0x7f}}, {0, 31, 1}, {-64, 63.5, 0}},
        {10, {{0, 0x21}, {81, 0x3c}, {83, 0x40}, {16, 0x03}}, {0, 1, 16}, {-1, -4, 0}},
        {11, {{109, 0x3c}, {96, 0x01}, {104, 0x03}, {32, 0x02}, {0, 0x01}}, {0, 1, 16}, {34, -68, 128}},
        {12, {{1, 0x3c}, {3, 0x3c}, {4, 0xc3}, {8, 0x05}, {12, 0x12}, {16, 0x27}, {80, 0x04}}, {0, 128, 1},
         {16, 199, -5}},
        {13, {{1, 0x3c}, {3, 0x3c}, {4, 0x03}, {8, 0x05}, {16, 0x01}, {48, 0x27}}, {0, 32, 1}, {64, 0, -5}},
        {14, {{209, 0x3c}, {192, 0xff}, {0, 0x21}, {128, 0x03}}, {0, 1, 16}, {-17, 32, 0}},
        {20, {{1, 0x3c}, {2, 0xf8}}, {0, 16, 1}, {1, 113, -127}},
        {23, {{1, 0x3c}, {2, 0x02}, {4, 0x01}, {8, 0x0f}}, {0, 1, 32}, {113, -127, 4064}},
        {39, {{0, 128}, {1, 0xf7}}, {0, 16, 1}, {12, -12, 0}}};
    unsigned char block[256];
    moe_real values[256];
    size_t i, j;
    for (i = 0; i < sizeof worked / sizeof worked[0]; i++) {
        moe_external w;
        memset(block, 0, sizeof block);
        memset(&w, 0, sizeof w);
        for (j = 0; j < 10 && (worked[i].set[j][0] != 0 || worked[i].set[j][1] != 0); j++)
            block[worked[i].set[j][0]] = worked[i].set[j][1];
        w.type = &moei_gguf_type_find(worked[i].code)->external;
        w.data = block;
        w.column = (size_t)w.type->bytes;
        w.type->unpack(&levels[0], &w, 0, 0, (size_t)w.type->block, values);
        for (j = 0; j < 3; j++)
            CHECKF(absolute((double)values[worked[i].e[j]] - worked[i].value[j]) <= 0, "%s, element %d: %g, not %g",
                   w.type->name, worked[i].e[j], (double)values[worked[i].e[j]], worked[i].value[j]);
    }
}

/* FP8: all bytes, with a grid of scales; numbers with any strides. */
static void test_numbers_in_files(void) {
    enum { ROWS = 7, COLUMNS = 256 };
    static const int codes[3] = {0, 1, 30};
    static unsigned char bytes[ROWS * COLUMNS * 4], scales[4 * 3 * 4];
    moe_real values[COLUMNS];
    moe_external w;
    size_t i, p, t, wrong = 0;
    for (i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(i % 256);
    for (i = 0; i < sizeof scales / 4; i++) {
        const float scale = (float)i + 0.5f;
        uint32_t bits;
        memcpy(&bits, &scale, 4);
        for (p = 0; p < 4; p++) scales[4 * i + p] = (unsigned char)(bits >> 8 * p);
    }
    memset(&w, 0, sizeof w);
    w.type = &moei_gguf_type_find(MOEI_TYPE_E4M3)->external;
    w.data = bytes;
    w.row = COLUMNS;
    w.column = 1;
    w.scales = scales;
    w.scale_row = 3 * 4;
    w.scale_rows = 2;
    w.scale_columns = 100;
    for (i = 0; i < ROWS; i++) {
        w.type->unpack(&levels[0], &w, i, 0, COLUMNS, values);
        for (p = 0; p < COLUMNS; p++) {
            const int exponent = (int)(p / 8 % 16), mantissa = (int)(p % 8);
            double want = ldexp(exponent == 0 ? mantissa : mantissa + 8, (exponent == 0 ? 1 : exponent) - 10);
            want *= ((double)(i / 2 * 3 + p / 100) + 0.5) * (p < 128 ? 1 : -1);
            if (p % 128 == 127) wrong += moe_is_finite(values[p]) != 0;
            else wrong += absolute((double)values[p] - want) > 0;
        }
    }
    CHECKF(wrong == 0, "FP8: %d", (int)wrong);
    for (t = 0; t < 3; t++) { /* a transposed matrix of which every second column counts */
        const moei_block_type *type = moei_gguf_type_find(codes[t]);
        const size_t size = (size_t)type->external.bytes;
        memset(&w, 0, sizeof w);
        w.type = &type->external;
        w.data = bytes;
        w.row = 2 * size;
        w.column = 2 * ROWS * size;
        for (i = 0, wrong = 0; i < ROWS; i++) {
            w.type->unpack(&levels[0], &w, i, 0, 100, values);
            for (p = 0; p < 100; p++) {
                const unsigned char *b = bytes + p * w.column + i * w.row;
                const uint32_t bits = t == 0 ? b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24
                                             : (uint32_t)b[0] << 16 | (uint32_t)b[1] << 24;
                float whole;
                memcpy(&whole, &bits, 4);
                if (t == 1) whole = (float)half_at(b);
                wrong += moe_is_finite((moe_real)whole) && !same_real(values[p] + 0, (moe_real)whole + 0);
            }
        }
        CHECKF(wrong == 0, "%s: %d", type->external.name, (int)wrong);
    }
}

/* The largest |x| of each 32, over 254 * 254: half a unit of what the second codes stand for. */
static double half_step(const moe_real *x, size_t p) {
    double most = 0;
    size_t i;
    for (i = p / 32 * 32; i < p / 32 * 32 + 32; i++)
        if (absolute((double)x[i]) > most) most = absolute((double)x[i]);
    return most / 254 / 254;
}

typedef struct wanted {
    double want, bound, all; /* the sum, what rounded inputs and what other orders may change */
    double square;           /* of what rounded inputs change, its mean */
} wanted;

static double spread; /* squares of what inputs changed over such means, in products of all calls */
static size_t n_spread;

/* The products by definition, the same for every level; the caller frees them. */
static wanted *wanted_of(const in_file *f, size_t m, const moe_real *x) {
    const size_t n = f->n, k = f->k;
    wanted *sums = (wanted *)take(m * n * sizeof *sums);
    double *step = (double *)take(k * sizeof *step);
    size_t i, j, p;
    for (i = 0; i < m; i++) {
        for (p = 0; p < k; p++) step[p] = p % 32 == 0 ? half_step(x + i * k, p) : step[p - 1];
        for (j = 0; j < n; j++) {
            double want = 0, bound = 0;
            double all = 0, square = 0;
            for (p = 0; p < k; p++) {
                const double w = (double)f->values[j * k + p], v = (double)x[i * k + p];
                want += w * v;
                bound += absolute(w) * step[p] * 1.001;
                all += absolute(w * v);
                square += w * step[p] * w * step[p] / 3;
            }
            sums[i * n + j].want = want;
            sums[i * n + j].bound = bound;
            sums[i * n + j].square = square;
            sums[i * n + j].all = (all + bound) * 1e-5 * (MOE_REAL_IS_DOUBLE ? 1e-6 : 1);
        }
    }
    free(step);
    return sums;
}

/* Products with quantized activations: of all tables, near the sums in double and near plain C. No
   rows of x or C touch; work is aligned as products want it, or not at all. */
static void check_product_in_file(const in_file *f, const moei_block_type *type, size_t m, const moe_real *x) {
    const size_t n = f->n, k = f->k;
    const size_t ldc = n + 3, ldx = k + 5;
    const size_t size = moe_external_work_size(&f->w, m, k), one = moe_external_work_size(&f->w, 1, k);
    moe_real *c = borrow_reals(m * ldc), *plain = borrow_reals(m * ldc);
    moe_real *row = borrow_reals(n);
    unsigned char *memory = (unsigned char *)borrow(size + 64), *work1 = (unsigned char *)borrow(one);
    moe_real *apart_x = borrow_reals(m * ldx);
    wanted *sums = wanted_of(f, m, x);
    size_t l, i, j;
    size_t far = 0, differ = 0;
    size_t apart = 0, outside = 0;
    double off = 0, square = 0;
    CHECK(size > one || m == 1);
    for (i = 0; i < m * ldx; i++) apart_x[i] = i % ldx < k ? x[i / ldx * k + i % ldx] : 1000;
    for (l = 0; l < n_levels; l++) {
        unsigned char *work = memory + (64 - (uintptr_t)memory % 64) % 64 + l % 2;
        for (i = 0; i < m * ldc; i++) c[i] = 7;
        moe_matmul_external(&levels[l], &f->w, 0, m, n, k, apart_x, ldx, work, c, ldc);
        outside += l == 0 && work[size] != 0xa5;
        if (l == 0) memcpy(plain, c, m * ldc * sizeof *c);
        for (i = 0; i < m; i++) {
            for (j = 0; j < n; j++) {
                const wanted s = sums[i * n + j];
                const double error = absolute((double)c[i * ldc + j] - s.want);
                far += !(error <= s.bound + s.all);
                off += error * error;
                square += s.square;
                apart += !(absolute((double)c[i * ldc + j] - (double)plain[i * ldc + j]) <= s.all);
            }
            for (j = n; j < ldc; j++) outside += !(c[i * ldc + j] <= 7 && c[i * ldc + j] >= 7);
            moe_matmul_external(&levels[l], &f->w, 0, 1, n, k, x + i * k, k, work1, row, n);
            differ += memcmp(row, c + i * ldc, n * sizeof *row) != 0;
            if (n < 4) continue;
            moe_matmul_external(&levels[l], &f->w, 3, 1, n - 3, k, x + i * k, k, work1, row, n - 3);
            differ += memcmp(row, c + i * ldc + 3, (n - 3) * sizeof *row) != 0;
        }
        CHECKF(far + differ + apart + outside == 0, "%s, %s, m %d, n %d, k %d: %d far, %d differ, %d apart, %d outside",
               type->external.name, levels[l].name, (int)m, (int)n, (int)k, (int)far, (int)differ, (int)apart,
               (int)outside);
    }
    if (square > 0) spread += off / square;
    n_spread += square > 0;
    give_back(c);
    give_back(row);
    give_back(plain);
    give_back(memory);
    give_back(work1);
    give_back(apart_x);
    free(sums);
}

/* A type's fill that counts rows which the matrix does not have. */
static const moei_block_type *filled_type;
static size_t filled_rows, filled_beyond;

static void fill_within(const moe_kernels *k, const moe_external *w, size_t row, size_t rows, size_t from,
                        size_t count, unsigned char *codes, moe_real *scales, moe_real *minima) {
    filled_beyond += rows == 0 || rows > 16 || row + rows > filled_rows;
    filled_type->external.fill(k, w, row, rows, from, count, codes, scales, minima);
}

static void test_products_in_files(void) {
    static const size_t heights[] = {1, 2, 3, 5, 9, 14, 30}, widths[] = {1, 16, 21, 32, 50};
    size_t t, i = 0;
    for (t = 0; t < MOEI_GGUF_TYPE_COUNT; t++) {
        const moei_block_type *type = &moei_gguf_types[t];
        const size_t block = (size_t)type->external.block;
        size_t k, a, b;
        if (type->codes == NULL) continue;
        for (k = block; k <= 1280; k += k < 2 * block ? block : k < 512 ? 512 - k % 512 : 768)
            for (a = 0; a < 7; a++, i++) {
                moe_rng rng = {i};
                moei_block_type own = *type;
                moe_real *x;
                in_file f;
                size_t p;
                if (quick && (a + i) % 4 != 0) continue;
                b = i % 5;
                f = make_in_file(type, widths[b], k, i % 3, i);
                own.external.fill = fill_within;
                f.w.type = &own.external;
                filled_type = type;
                filled_rows = f.n;
                x = normals(&rng, heights[a] * k);
                if (k > 32) memset(x, 0, 32 * sizeof *x);
                for (p = k; p < 2 * k && p < heights[a] * k; p++) x[p] *= (moe_real)1e-6;
                check_product_in_file(&f, type, heights[a], x);
                give_back(x);
                free_in_file(&f);
            }
    }
    CHECKF(n_spread > 60 && spread < 1.3 * (double)n_spread, "inputs are rounded to the nearest: %g",
           spread / (double)n_spread);
}

static void run_in_turn(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    int i;
    (void)ctx;
    for (i = 0; i < count; i++) task(work, i);
}

/* Biases that lie in a file, of more numbers than are unpacked at once: the bits of tensors, in one
   task or several. They are read instead of a tensor that is set. */
static void test_biases_in_files(void) {
    enum { N = 5, D = 8, F = 300 };
    const int slots[2] = {MOE_EXPERTS_FC1_BIAS, MOE_EXPERTS_FC2_BIAS};
    moe_parallel team = {NULL, 1, 1, run_in_turn};
    moe_layer_config config;
    moe_external external[2];
    in_file f[2];
    moe_layer layer;
    moe_call call;
    moe_rng rng = {4};
    moe_real *x = normals(&rng, N * D), y[N * D], want[N * D], *to;
    size_t bytes = 0, i;
    unsigned char *work;
    memset(&config, 0, sizeof config);
    config.router.d_model = D;
    config.router.n_experts = 1;
    config.router.top_k = 1;
    config.expert = MOE_EXPERT_MLP;
    config.d_ff = F;
    memset(&call, 0, sizeof call);
    call.n_tokens = N;
    call.x = x;
    if (!CHECK(moe_layer_create(&layer, &config, 0, 5, NULL, NULL) == MOE_OK)) return;
    CHECK(moe_layer_work_size(&layer, N, 0, &bytes) == MOE_OK);
    work = (unsigned char *)take(bytes);
    for (i = 0; i < 2; i++) {
        f[i] = make_in_file(moei_gguf_type_find(30), 1, i == 0 ? F : D, 0, i); /* bfloat16 */
        external[i] = f[i].w;
        memcpy(&to, &layer.tensors[slots[i]], sizeof to);
        memcpy(to, f[i].values, f[i].k * sizeof *to);
    }
    CHECK(moe_layer_forward(&layer, &call, want, work, bytes, NULL) == MOE_OK);
    for (i = 0; i < 2; i++) {
        layer.external[slots[i]] = &external[i];
        if (i > 0) layer.tensors[slots[i]] = NULL;
    }
    for (i = 1; i < 4; i++) {
        team.threads = (int)i;
        call.parallel = &team;
        memset(y, 0, sizeof y);
        CHECK(moe_layer_forward(&layer, &call, y, work, bytes, NULL) == MOE_OK);
        CHECK(memcmp(y, want, sizeof y) == 0);
    }
    for (i = 0; i < 2; i++) free_in_file(&f[i]);
    free(work);
    give_back(x);
    moe_layer_free(&layer);
}

/* Long rows, more panels than a direct product takes at once, and outputs that fill none. */
static void test_long_rows_in_files(void) {
    size_t t;
    for (t = 0; t < MOEI_GGUF_TYPE_COUNT; t++) {
        const moei_block_type *type = &moei_gguf_types[t];
        moe_rng rng = {t};
        moe_real *x;
        in_file f;
        if (type->external.direct == NULL) continue;
        f = make_in_file(type, 135, 2304, 0, t);
        x = normals(&rng, 2 * f.k);
        check_product_in_file(&f, type, 2, x);
        give_back(x);
        free_in_file(&f);
    }
}

/* Activations as they are: the bits of moe_matmul. */
static void test_exact_in_files(void) {
    size_t t, l, j;
    for (t = 0; t < MOEI_GGUF_TYPE_COUNT; t++)
        for (l = 0; l < n_levels && moei_gguf_types[t].codes != NULL; l++) {
            in_file f = make_in_file(&moei_gguf_types[t], 21, 768, 0, t);
            moe_rng rng = {t};
            moe_real *x = normals(&rng, 3 * f.k), *c = borrow_reals(3 * f.n);
            moe_real *want = borrow_reals(3 * f.n);
            f.w.exact = 1;
            CHECK(moe_external_work_size(&f.w, 3, f.k) == 0);
            moe_matmul(&levels[l], MOE_MATMUL_NT, MOE_TYPE_REAL, 3, f.n, f.k, x, f.k, f.values, f.k, want, f.n, 0);
            moe_matmul_external(&levels[l], &f.w, 0, 3, f.n, f.k, x, f.k, NULL, c, f.n);
            CHECK(memcmp(c, want, 3 * f.n * sizeof *c) == 0);
            moe_matmul_external(&levels[l], &f.w, 0, 3, f.n, 0, x, f.k, NULL, c, f.n);
            for (j = 0; j < 3 * f.n; j++) CHECK(same_real(c[j], 0));
            f.w.exact = 0;
            CHECK(moe_external_work_size(&f.w, (size_t)-1, f.k) == 0);
            CHECK(moe_external_work_size(&f.w, 1, (size_t)-1) == 0);
            give_back(x);
            give_back(c);
            give_back(want);
            free_in_file(&f);
        }
}

/* ---- layers whose experts lie in files ---- */

enum { LAYER_TOKENS = 37, LAYER_EXPERTS = 5 };

/* The matrices of a layer from parameter `first` on in files of these types, in turn; its tensors
   get their values. */
static void put_in_files(moe_layer *layer, size_t first, const int *codes, moe_external *matrices, in_file *files,
                         size_t *n_files) {
    size_t i, e, at = 0;
    for (i = first; i < MOE_LAYER_PARAMETER_COUNT; i++) {
        moe_parameter slot;
        size_t blocks, n, k;
        if (moe_layer_parameter(&layer->config, (int)i, &slot) != MOE_OK || slot.n_dims < 2 ||
            (slot.n_dims == 2 && i < MOE_SHARED_GATE))
            continue;
        blocks = slot.n_dims == 3 ? slot.shape[0] : 1;
        n = slot.shape[slot.n_dims - 2];
        k = slot.shape[slot.n_dims - 1];
        layer->external[i] = matrices + at;
        for (e = 0; e < blocks; e++, at++) {
            in_file *f = files + (*n_files)++;
            moe_real *to;
            memcpy(&to, &layer->tensors[i], sizeof to);
            *f = make_in_file(moei_gguf_type_find(codes[i % 3]), n, k, 0, at);
            matrices[at] = f->w;
            memcpy(to + e * n * k, f->values, n * k * sizeof *to);
        }
    }
}

/* A call that trains is refused, one that keeps all rows gives the same bits. */
static void check_other_calls(const moe_layer *layer, moe_call *call, const moe_real *want, moe_real *row) {
    unsigned char *work;
    size_t bytes;
    CHECK(moe_layer_work_size(layer, 1, 1, &bytes) == MOE_OK);
    work = (unsigned char *)take(bytes);
    call->training = 1;
    CHECK(moe_layer_forward(layer, call, row, work, bytes, NULL) == MOE_ERR_UNSUPPORTED);
    CHECK(strstr(call->error->message, "lies in a file (layer.external): it cannot be trained") != NULL);
    call->training = 0;
    call->keep = 1;
    CHECK(moe_layer_forward(layer, call, row, work, bytes, NULL) == MOE_OK);
    CHECK(memcmp(row, want, (size_t)layer->config.router.d_model * sizeof *row) == 0);
    free(work);
}

static void check_layer_in_files(const moe_layer_config *config, size_t first, const int *codes, int exact) {
    static moe_external matrices[64];
    static in_file files[64];
    static moe_layer layer, plain; /* the stack of WebAssembly has 64 KB */
    const size_t d = (size_t)config->router.d_model;
    size_t n_files = 0, bytes, i, wrong = 0;
    moe_error error;
    moe_rng rng = {9};
    moe_real *x = normals(&rng, LAYER_TOKENS * d), *y = borrow_reals(LAYER_TOKENS * d);
    moe_real *row = borrow_reals(d), *want = borrow_reals(LAYER_TOKENS * d);
    unsigned char *work;
    double square = 0, apart = 0;
    moe_call call;
    if (!CHECK(moe_layer_create(&layer, config, 0, 5, NULL, &error) == MOE_OK)) return;
    put_in_files(&layer, first, codes, matrices, files, &n_files);
    for (i = 0; i < n_files; i++) matrices[i].exact = exact;
    memset(&call, 0, sizeof call);
    call.n_tokens = LAYER_TOKENS;
    call.x = x;
    call.error = &error;
    plain = layer;
    memset(plain.external, 0, sizeof plain.external);
    CHECK(moe_layer_work_size(&plain, LAYER_TOKENS, 0, &bytes) == MOE_OK);
    work = (unsigned char *)take(bytes);
    CHECK(moe_layer_forward(&plain, &call, want, work, bytes, NULL) == MOE_OK);
    free(work);
    for (i = MOE_EXPERTS_GATE; i < MOE_LAYER_PARAMETER_COUNT; i++)
        if (layer.external[i] != NULL) layer.tensors[i] = NULL;
    CHECK(moe_layer_work_size(&layer, LAYER_TOKENS, 0, &bytes) == MOE_OK);
    work = (unsigned char *)take(bytes);
    CHECK(moe_layer_forward(&layer, &call, y, work, bytes - 1, NULL) == MOE_ERR_SPACE);
    CHECKF(moe_layer_forward(&layer, &call, y, work, bytes, NULL) == MOE_OK, "%s", error.message);
    for (i = 0; i < LAYER_TOKENS * d; i++) {
        square += (double)want[i] * (double)want[i];
        apart += ((double)y[i] - (double)want[i]) * ((double)y[i] - (double)want[i]);
    }
    if (exact) CHECKF(memcmp(y, want, LAYER_TOKENS * d * sizeof *y) == 0, "the bits of the tensors");
    else CHECKF(apart < 2e-4 * 2e-4 * square, "%g of %g", sqrt(apart), sqrt(square));
    for (i = 0; i < LAYER_TOKENS; i++) { /* token by token */
        call.n_tokens = 1;
        call.x = x + i * d;
        CHECK(moe_layer_forward(&layer, &call, row, work, bytes, NULL) == MOE_OK);
        wrong += memcmp(row, y + i * d, d * sizeof *row) != 0;
    }
    CHECKF(wrong == 0, "%d tokens alone", (int)wrong);
    free(work);
    check_other_calls(&layer, &call, y + (LAYER_TOKENS - 1) * d, row);
    for (i = 0; i < n_files; i++) free_in_file(&files[i]);
    give_back(x);
    give_back(y);
    give_back(row);
    give_back(want);
    moe_layer_free(&layer);
}

static void test_layers_in_files(void) {
    static const int codes[4][3] = {{8, 8, 8}, {2, 14, 39}, {MOEI_TYPE_MXFP4, 12, 3}, {30, 8, 30}};
    static const char *const presets[4] = {"mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe"};
    size_t i, j;
    int exact_ones;
    for (i = 0; i < 4; i++)
        for (j = 0; j < 4; j++)
            for (exact_ones = 0; exact_ones < 2; exact_ones++) {
                moe_layer_config config;
                if (!CHECK(moe_layer_preset(presets[i], &config, NULL) == MOE_OK)) continue;
                config.router.d_model = 256;
                config.router.n_experts = LAYER_EXPERTS;
                config.router.top_k = 2;
                config.router.groups = config.router.groups_kept = 0;
                config.d_ff = 256;
                if (config.n_shared > 0) config.d_shared = 256;
                if (quick && (i + j) % 2 != 0) continue;
                check_layer_in_files(&config, MOE_EXPERTS_GATE, codes[j], exact_ones);
                if (i > 0 || j > 0) continue;
                config.d_latent = 128; /* only its matrices */
                check_layer_in_files(&config, MOE_LATENT_IN, codes[j], exact_ones);
            }
}

/* What a layer reads as a tensor must be one. */
static void test_vectors_in_files(void) {
    static const int params[] = {MOE_SHARED_SIGMOID, MOE_EXPERTS_CONSTANT, MOE_EXPERTS_CONSTANT_GATE};
    static const moe_real x[32] = {1, 2, 3};
    in_file f = make_in_file(moei_gguf_type_find(8), 2, 32, 0, 1);
    moe_real y[32];
    size_t bytes, i;
    void *work;
    static moe_layer_config config;
    static moe_layer layer;
    moe_call call;
    moe_error error;
    memset(&call, 0, sizeof call);
    call.n_tokens = 1;
    call.x = x;
    call.error = &error;
    for (i = 0; i < 3; i++) {
        memset(&config, 0, sizeof config);
        config.router.d_model = 32;
        config.router.n_constant = 7;
        config.n_shared = config.shared_sigmoid = 1;
        if (!CHECK(moe_layer_create(&layer, &config, 0, 1, NULL, &error) == MOE_OK)) return;
        layer.external[params[i]] = &f.w;
        layer.tensors[params[i]] = NULL;
        CHECK(moe_layer_work_size(&layer, 1, 0, &bytes) == MOE_OK);
        work = take(bytes);
        CHECK(moe_layer_forward(&layer, &call, y, work, bytes, NULL) == MOE_ERR_ARGUMENT);
        CHECK(strstr(error.message, "is not set: layer.tensors") != NULL);
        free(work);
        moe_layer_free(&layer);
    }
    free_in_file(&f);
}

/* An output of heads that are wider together than all else in an MLA: its rows have room. */
static void test_wide_values_in_files(void) {
    enum { N = 9, D = 64, WIDE = 512 };
    moe_external places[MOE_MODULE_SLOTS];
    moe_attention_config c;
    moe_rng rng = {7};
    moe_real *x = normals(&rng, N * D);
    double square = 0, apart = 0;
    moe_net_pass pass;
    static moe_net net;
    moe_call call;
    in_file f = make_in_file(moei_gguf_type_find(8), D, WIDE, 0, 1);
    size_t bytes[2], i;
    unsigned char *work[2];
    const moe_real *y[2];
    memset(places, 0, sizeof places);
    memset(&c, 0, sizeof c);
    memset(&call, 0, sizeof call);
    c.heads = 4;
    c.d_head = 8;
    c.d_value = WIDE / 4;
    c.rotary = 1;
    c.rotary_dims = c.kv_lora = 4;
    call.n_tokens = N;
    call.x = x;
    moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
    moe_net_attention(&net, &c);
    if (!CHECK(moe_net_build(&net, 0, 5, NULL) == MOE_OK)) return;
    memcpy(net.modules[0].tensors[MOE_MODULE_OUTPUT], f.values, D * WIDE * sizeof(moe_real));
    for (i = 0; i < 2; i++) {
        CHECK(moe_net_work_size(&net, N, 0, &bytes[i]) == MOE_OK);
        work[i] = (unsigned char *)take(bytes[i]);
        CHECK(moe_net_forward(&net, &call, work[i], bytes[i], &pass) == MOE_OK);
        y[i] = pass.y;
        places[MOE_MODULE_OUTPUT] = f.w;
        net.modules[0].external = places;
    }
    for (i = 0; i < (int)N * D; i++) {
        square += (double)y[0][i] * (double)y[0][i];
        apart += ((double)y[1][i] - (double)y[0][i]) * ((double)y[1][i] - (double)y[0][i]);
    }
    CHECKF(apart < 2e-4 * 2e-4 * square, "%g of %g", sqrt(apart), sqrt(square));
    free(work[0]);
    free(work[1]);
    give_back(x);
    free_in_file(&f);
    moe_net_free(&net);
}

/* ---- rows ---- */

typedef struct row_view {
    const signed char *level;
    const unsigned char *scales, *starts;
    size_t groups, length;
} row_view;

static row_view view_of(int type, size_t k, const unsigned char *row) {
    row_view v;
    v.length = (k + 31) / 32 * 32;
    v.groups = type == MOE_TYPE_Q8 ? 1 : v.length / 32;
    v.level = (const signed char *)row;
    v.scales = row + v.length;
    v.starts = v.scales + v.groups * sizeof(moe_real);
    return v;
}

static moe_real scale_of(row_view v, size_t p) {
    moe_real scale;
    memcpy(&scale, v.scales + (v.groups == 1 ? 0 : p / 32) * sizeof scale, sizeof scale);
    return scale;
}

/* Bytes of a row that have a meaning. */
static size_t row_bytes(int type, size_t k) {
    const size_t blocks = (k + 31) / 32;
    if (type == MOE_TYPE_Q8) return blocks * 32 + sizeof(moe_real) + 4 * ((k + 65535) / 65536);
    return blocks * (32 + sizeof(moe_real) + 4);
}

static size_t wrong_in_row(int type, size_t k, const moe_real *x, const unsigned char *row) {
    const row_view v = view_of(type, k, row);
    const size_t width = type == MOE_TYPE_Q8 ? v.length : 32, limit = type == MOE_TYPE_Q8 ? 65536 : 32;
    size_t p, i, wrong = 0;
    for (p = 0; p < v.length; p += width) {
        moe_real most = 0, scale;
        volatile moe_real factor;
        for (i = p; i < p + width && i < k; i++)
            if (absolute((double)x[i]) > (double)most) most = x[i] < 0 ? -x[i] : x[i];
        if (most < 64 * (moe_real)SMALLEST) most = 0;
        scale = most / 127;
        factor = most > 0 ? 127 / most : 0;
        wrong += !same_real(scale, scale_of(v, p));
        for (i = p; i < p + width; i++) {
            volatile moe_real level = i < k ? x[i] * factor : 0;
            wrong += v.level[i] != (int)rint((double)level);
        }
    }
    for (p = 0; p < v.length; p += limit) {
        int32_t start, sum = 0;
        for (i = p; i < p + limit && i < v.length; i++) sum += v.level[i];
        memcpy(&start, v.starts + p / limit * 4, sizeof start);
        wrong += start != sum * (type == MOE_TYPE_Q4 ? -8 : -128);
    }
    return wrong;
}

static void check_rows(int type, size_t m, size_t k, size_t pad, uint64_t seed) {
    const size_t size = moe_quantized_row_size(type, k), used = row_bytes(type, k);
    const size_t ldx = k + pad, count = (m - 1) * ldx + k;
    unsigned char *plain = (unsigned char *)borrow(m * size + 1) + 1, *rows = (unsigned char *)borrow(m * size);
    moe_rng rng;
    moe_real *filled, *x;
    size_t l, i;
    moe_rng_seed(&rng, seed);
    filled = normals(&rng, count);
    for (i = 0; i < count; i++) {
        if (i % ldx >= k) filled[i] = not_a_number();
        else if (seed % 4 == 0) filled[i] = (moe_real)((int)moe_rng_below(&rng, 509) - 254) / 2; /* ties */
        else if (seed % 4 == 1) filled[i] *= (moe_real)ldexp(1, (int)moe_rng_below(&rng, 200) - 100);
    }
    x = (moe_real *)exact(filled, count * sizeof *x);
    moe_rows_quantize(NULL, type, m, k, x, ldx, plain);
    for (i = 0; i < m; i++) CHECK(wrong_in_row(type, k, x + i * ldx, plain + i * size) == 0);
    for (l = 0; l < n_levels; l++) {
        int same = 1;
        memset(rows, 0x77, m * size);
        moe_rows_quantize(&levels[l], type, m, k, x, ldx, rows);
        for (i = 0; i < m; i++) same &= memcmp(rows + i * size, plain + i * size, used) == 0;
        if (!CHECK(same))
            printf("    level %s type %d m %lu k %lu\n", levels[l].name, type, (unsigned long)m, (unsigned long)k);
    }
    free(x);
    give_back(filled);
    give_back(plain - 1);
    give_back(rows);
}

static void test_rows(void) {
    size_t k, t;
    for (t = 0; t < KINDS; t++) {
        for (k = 1; k <= 200; k++) check_rows(kinds[t], 1 + k % 5, k, k % 3, k);
        check_rows(kinds[t], 2, 1000, 1, 4);
        check_rows(kinds[t], 1, 4097, 0, 5);
    }
    if (!quick) {
        check_rows(MOE_TYPE_Q8, 2, 65536, 0, 8);
        check_rows(MOE_TYPE_Q8, 1, 65537, 0, 8);
        check_rows(MOE_TYPE_Q8, 1, 140000, 0, 9);
    }
}

/* ---- products ---- */

typedef struct problem {
    int type;
    size_t m, n, k, stride, row_size, step;
    moe_real *x, *w;
    unsigned char *rows, *packed;
} problem;

/* Quantized operands, in exactly the memory they need. shift moves both off their alignment. */
static problem make_problem(int type, size_t m, size_t n, size_t k, size_t stride, size_t shift, uint64_t seed) {
    problem s;
    const size_t panels = (n + 15) / 16;
    moe_rng rng;
    moe_rng_seed(&rng, seed);
    s.type = type;
    s.m = m;
    s.n = n;
    s.k = k;
    s.stride = stride;
    s.row_size = moe_quantized_row_size(type, k);
    CHECK(moe_panel_size(type, k, &s.step) == MOE_OK);
    s.step *= stride;
    s.x = normals(&rng, m * k);
    s.w = normals(&rng, n * k);
    s.rows = (unsigned char *)borrow(m * s.row_size + shift) + shift;
    s.packed = (unsigned char *)borrow((panels - 1) * s.step + s.step / stride + shift) + shift;
    moe_rows_quantize(NULL, type, m, k, s.x, k, s.rows);
    CHECK(moe_pack(NULL, type, n, k, s.w, k, s.packed, stride) == MOE_OK);
    return s;
}

static void end_problem(problem *s, size_t shift) {
    give_back(s->x);
    give_back(s->w);
    give_back(s->rows - shift);
    give_back(s->packed - shift);
}

/* An element by its formula, in double; *size = the sum of the sizes of its terms. */
static double element(const problem *s, size_t i, size_t j, double *size) {
    const row_view v = view_of(s->type, s->k, s->rows + i * s->row_size);
    const unsigned char *panel = s->packed + j / 16 * s->step;
    const size_t width = s->type == MOE_TYPE_Q8 ? 65536 : 32;
    double total = 0;
    size_t p, q;
    *size = 0;
    for (p = 0; p < s->k; p += width) {
        const double scale = (double)scale_of(v, p) * scale_in(s->type, s->k, panel, p, j % 16);
        double sum = 0;
        for (q = p; q < p + width && q < s->k; q++)
            sum += (double)v.level[q] * (double)level_in(s->type, panel, q, j % 16);
        total += sum * scale;
        *size += absolute(sum * scale);
    }
    return total;
}

static void check_product(int type, size_t m, size_t n, size_t k) {
    const size_t shift = (m + n + k) % 3, pad = (m + k) % 4;
    const size_t ldc = n + pad, stride = 1 + (n + k) % 2;
    problem s = make_problem(type, m, n, k, stride, shift, m * 1000003 + n * 1009 + k);
    moe_real *c = borrow_reals((m - 1) * ldc + n), *plain = borrow_reals((m - 1) * ldc + n);
    double *want = doubles(m * n), *size = doubles(m * n);
    unsigned char *rows = (unsigned char *)exact(s.rows, m * s.row_size);
    unsigned char *packed = (unsigned char *)exact(s.packed, ((n + 15) / 16 - 1) * s.step + s.step / stride);
    const double terms = (double)(type == MOE_TYPE_Q8 ? k / 65536 + 1 : k / 32 + 1) + 3;
    size_t i, j, l;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) want[i * n + j] = element(&s, i, j, &size[i * n + j]);
    for (l = 0; l < n_levels; l++) {
        size_t wrong = 0;
        for (i = 0; i < (m - 1) * ldc + n; i++) c[i] = -77;
        moe_matmul_quantized(&levels[l], type, m, n, k, s.rows, s.packed, stride, c, ldc);
        for (i = 0; i < m; i++)
            for (j = 0; j < ldc && i * ldc + j < (m - 1) * ldc + n; j++) {
                const moe_real got = c[i * ldc + j];
                if (j >= n) wrong += !same_real(got, -77);
                else wrong += !(absolute((double)got - want[i * n + j]) <= terms * (double)EPSILON * size[i * n + j]);
            }
        if (l == 0) memcpy(plain, c, ((m - 1) * ldc + n) * sizeof *c);
        /* one product, same bits */
        if (type == MOE_TYPE_Q8 && k <= 65536) wrong += memcmp(plain, c, ((m - 1) * ldc + n) * sizeof *c) != 0;
        { /* the same operands elsewhere in memory, and not a byte more than they need */
            moe_real *again = borrow_reals((m - 1) * ldc + n);
            for (i = 0; i < (m - 1) * ldc + n; i++) again[i] = -77;
            moe_matmul_quantized(&levels[l], type, m, n, k, rows, packed, stride, again, ldc);
            wrong += memcmp(again, c, ((m - 1) * ldc + n) * sizeof *c) != 0;
            give_back(again);
        }
        if (!CHECK(wrong == 0))
            printf("    level %s type %d m %lu n %lu k %lu: %lu wrong\n", levels[l].name, type, (unsigned long)m,
                   (unsigned long)n, (unsigned long)k, (unsigned long)wrong);
    }
    free(rows);
    free(packed);
    free(want);
    free(size);
    give_back(c);
    give_back(plain);
    end_problem(&s, shift);
}

static void test_products(void) {
    static const size_t some_m[] = {1, 2, 3, 5, 13}, some_n[] = {16, 32, 48, 33, 7};
    static const size_t some_k[] = {352, 511, 1024, 3072, 770};
    size_t m, n, k, t, i;
    for (t = 0; t < KINDS; t++) {
        for (m = 1; m <= 33; m += quick ? 5 : 1)
            for (n = 1; n <= 70; n += quick ? 13 : 3) check_product(kinds[t], m, n, 1 + (m * 7 + n * 3) % 70);
        for (n = 1; n <= 70; n += quick ? 7 : 1) check_product(kinds[t], 1 + n % 14, n, 40 + n % 3);
        for (k = 1; k <= 70; k++)
            for (i = 0; i < 5; i += quick ? 3 : 1) check_product(kinds[t], some_m[i], some_n[(i + k) % 5], k);
        for (i = 0; i < 5; i++) check_product(kinds[t], some_m[i], some_n[i], some_k[i]);
        check_product(kinds[t], 61, 40, 100);
    }
    if (quick) return;
    check_product(MOE_TYPE_Q8, 3, 17, 65536);
    check_product(MOE_TYPE_Q8, 8, 33, 65600);
    check_product(MOE_TYPE_Q8, 1, 5, 140000);
}

/* Blocks with scales of 1: all levels at the least, at the most, at -1 or 0 in the first outputs,
   any in the others. */
static void fill_blocks(size_t each, size_t n, size_t blocks_per_row, uint64_t seed, unsigned char *block) {
    static const unsigned char ends[4] = {0x80, 0x7f, 0xff, 0x00};
    moe_rng rng;
    size_t i, t;
    moe_rng_seed(&rng, seed);
    for (i = 0; i < n * blocks_per_row; i++, block += each) {
        const size_t output = i / blocks_per_row;
        block[0] = 0;
        block[1] = 0x3c;
        for (t = 2; t < each; t++) {
            const unsigned char any = (unsigned char)moe_rng_below(&rng, 256);
            block[t] = output < 4 ? ends[output] : any;
        }
    }
}

/* Row 0 is all 127, row 1 all -127, row 2 both in turns, the others are any numbers with one of 127
   in each block: scales of 1. */
static void fill_rows(size_t m, size_t k, uint64_t seed, moe_real *x) {
    moe_rng rng;
    size_t i, p;
    moe_rng_seed(&rng, seed);
    for (i = 0; i < m; i++)
        for (p = 0; p < k; p++, x++) {
            const int any = (int)moe_rng_below(&rng, 255) - 127;
            *x = (moe_real)(i == 0        ? 127
                            : i == 1      ? -127
                            : i == 2      ? (p % 2 == 0 ? 127 : -127)
                            : p % 32 == 0 ? 127
                                          : any);
        }
}

/* The levels of Q8_BLOCK's panels with a scale of 1 for each output. */
static void to_whole_rows(size_t n, size_t k, const unsigned char *blocks, unsigned char *packed) {
    size_t from = 0, to = 0, j;
    moe_panel_size(MOE_TYPE_Q8_BLOCK, k, &from);
    moe_panel_size(MOE_TYPE_Q8, k, &to);
    for (j = 0; j < n; j++) {
        const float one = 1;
        if (j % 16 == 0) memcpy(packed + j / 16 * to, blocks + j / 16 * from, 16 * k);
        memcpy(packed + j / 16 * to + 16 * k + 4 * (j % 16), &one, 4);
    }
}

/* With scales of 1 the sums themselves come out: exact on every set, at the ends of the ranges of
   both operands. */
static void test_exact(void) {
    enum { M = 15, N = 48, MOST = 1024 };
    static moe_real x[M * MOST], c[M * N];
    static unsigned char blocks[N * MOST / 32 * 34], panels[N * MOST * 2], packed[N * MOST * 2];
    size_t k, t, l, i, j, p;
    for (t = 0; t < KINDS; t++)
        for (k = 32; k <= MOST; k += k < 128 ? 32 : 224) {
            const int type = kinds[t];
            unsigned char *rows = (unsigned char *)borrow(M * moe_quantized_row_size(type, k));
            size_t step = 0;
            moe_panel_size(type, k, &step);
            fill_rows(M, k, k, x);
            fill_blocks(type == MOE_TYPE_Q4 ? 18 : 34, N, k / 32, k, blocks);
            if (type == MOE_TYPE_Q8) {
                CHECK(from_common(MOE_TYPE_Q8_BLOCK, N, k, blocks, panels, 1) == MOE_OK);
                to_whole_rows(N, k, panels, packed);
            } else CHECK(from_common(type, N, k, blocks, packed, 1) == MOE_OK);
            for (l = 0; l < n_levels; l++) {
                size_t wrong = 0;
                moe_rows_quantize(&levels[l], type, M, k, x, k, rows);
                moe_matmul_quantized(&levels[l], type, M, N, k, rows, packed, 1, c, N);
                for (i = 0; i < M; i++)
                    for (j = 0; j < N; j++) {
                        double sum = 0;
                        for (p = 0; p < k; p++)
                            sum += (double)x[i * k + p] * level_in(type, packed + j / 16 * step, p, j % 16);
                        wrong += absolute((double)c[i * N + j] - sum) > 0;
                    }
                if (!CHECK(wrong == 0))
                    printf("    level %s type %d k %lu: %lu wrong\n", levels[l].name, type, (unsigned long)k,
                           (unsigned long)wrong);
            }
            give_back(rows);
        }
}

/* 16-bit weights of more inputs than are widened at a time: integers, whose sums are exact. */
static void test_long_halves(int type) {
    enum { M = 3, N = 40, K = 600 };
    moe_real *a = borrow_reals(M * K), *w = borrow_reals(N * K);
    moe_real *c = borrow_reals(M * N);
    size_t size = 0, l, i, j, p;
    unsigned char *packed;
    CHECK(moe_panel_size(type, K, &size) == MOE_OK);
    packed = (unsigned char *)borrow(3 * size);
    for (i = 0; i < M * K; i++) a[i] = (moe_real)(i % 5) - 2;
    for (i = 0; i < N * K; i++) w[i] = (moe_real)(i % 7) - 3;
    CHECK(moe_pack(NULL, type, N, K, w, K, packed, 1) == MOE_OK);
    for (l = 0; l < n_levels; l++) {
        moe_matmul_packed(&levels[l], type, M, N, K, a, K, packed, c, N);
        for (i = 0; i < M; i++)
            for (j = 0; j < N; j++) {
                double sum = 0;
                for (p = 0; p < K; p++) sum += (double)a[i * K + p] * (double)w[j * K + p];
                CHECK(absolute((double)c[i * N + j] - sum) <= 0);
            }
    }
    give_back(a);
    give_back(w);
    give_back(c);
    give_back(packed);
}

/* The products of few rows with 16-bit weights widened in registers: the bits of the same table's
   product with panels widened in memory, over every remainder of rows and columns and on both
   sides of a block of k; nothing beside C is written. */
static void test_few_halves(int type) {
    enum { M = 49, N = 139, K = 515, LDC = 141 };
    static const size_t depths[] = {0, 1, 37, 256, 257, K};
    moe_rng rng;
    moe_real *a, *w, *c = borrow_reals(M * LDC), *want = borrow_reals(M * LDC);
    size_t size = 0, l, d, m, n, i, wrong;
    int id;
    unsigned char *packed;
    moe_rng_seed(&rng, 15);
    a = normals(&rng, M * K);
    w = normals(&rng, N * K);
    CHECK(moe_panel_size(type, K, &size) == MOE_OK);
    packed = (unsigned char *)borrow((N + 15) / 16 * size);
    for (id = MOE_KERNELS_C; id < MOE_KERNELS_COUNT; id++) {
        const moe_kernels *table = moe_kernels_select(id);
        moe_kernels in_memory;
        if (table == NULL || table->half == NULL) continue;
        in_memory = *table;
        in_memory.half = NULL;
        for (d = 0; d < sizeof depths / sizeof *depths; d++) {
            CHECK(moe_pack(NULL, type, N, depths[d], w, depths[d], packed, 1) == MOE_OK);
            wrong = 0;
            for (m = 0; m <= M; m += m < 13 ? 1 : 12)
                for (n = 1; n <= N; n += n < 35 && m < 10 ? 1 : 7) {
                    for (i = 0; i < M * LDC; i++) c[i] = want[i] = 7;
                    moe_matmul_packed(&in_memory, type, m, n, depths[d], a, K, packed, want, LDC);
                    moe_matmul_packed(table, type, m, n, depths[d], a, K, packed, c, LDC);
                    wrong += memcmp(c, want, M * LDC * sizeof *c) != 0;
                }
            CHECK(wrong == 0);
        }
    }
    for (l = 0; l < n_levels; l++) { /* one of them against the sum in double */
        double sum = 0;
        for (i = 0; i < K; i++) sum += (double)a[i] * (double)moei_panel_get(type, K, packed, i, 0);
        moe_matmul_packed(&levels[l], type, 1, N, K, a, K, packed, c, LDC);
        CHECK(absolute((double)c[0] - sum) < 1e-3);
    }
    give_back(a);
    give_back(w);
    give_back(c);
    give_back(want);
    give_back(packed);
}

/* The largest sums that an int32 meets: k = 65536 and beyond, all numbers at the end of their
   range. */
static void test_long_sums(void) {
    static const size_t depths[] = {65536, 65568, 131072 + 32};
    size_t d, l, p;
    for (d = 0; d < 3; d++) {
        const size_t k = depths[d], size = moe_quantized_row_size(MOE_TYPE_Q8, k);
        moe_real *x = borrow_reals(k), *w = borrow_reals(2 * k);
        moe_real c[2] = {0, 0};
        unsigned char *rows = (unsigned char *)borrow(size), *packed = (unsigned char *)borrow(k * 16 + 64);
        for (p = 0; p < k; p++) {
            x[p] = 127;
            w[p] = 127;
            w[k + p] = -127;
        }
        moe_rows_quantize(NULL, MOE_TYPE_Q8, 1, k, x, k, rows);
        CHECK(moe_pack(NULL, MOE_TYPE_Q8, 2, k, w, k, packed, 1) == MOE_OK);
        for (l = 0; l < n_levels; l++) {
            moe_matmul_quantized(&levels[l], MOE_TYPE_Q8, 1, 2, k, rows, packed, 1, c, 2);
            CHECK(absolute((double)c[0] / (16129.0 * (double)k) - 1) < 4 * (double)EPSILON);
            CHECK(absolute((double)c[1] / (-16129.0 * (double)k) - 1) < 4 * (double)EPSILON);
        }
        give_back(x);
        give_back(w);
        give_back(rows);
        give_back(packed);
    }
}

/* A row has the same bits alone and among any others. */
static void test_independence(void) {
    enum { M = 33 };
    static const size_t depths[] = {5, 64, 257};
    size_t t, d, l, m, i;
    for (t = 0; t < KINDS; t++)
        for (d = 0; d < 3; d++) {
            const size_t n = 16 + 9 * d + 16 * t;
            problem s = make_problem(kinds[t], M, n, depths[d], 1, 0, d + 10);
            moe_real *one = borrow_reals(M * n), *many = borrow_reals(M * n);
            for (l = 0; l < n_levels; l++) {
                for (i = 0; i < M; i++)
                    moe_matmul_quantized(&levels[l], s.type, 1, n, s.k, s.rows + i * s.row_size, s.packed, 1,
                                         one + i * n, n);
                for (m = 1; m <= M; m++) {
                    for (i = 0; i < M * n; i++) many[i] = -1;
                    for (i = 0; i + m <= M; i += m)
                        moe_matmul_quantized(&levels[l], s.type, m, n, s.k, s.rows + i * s.row_size, s.packed, 1,
                                             many + i * n, n);
                    CHECK(memcmp(many, one, i * n * sizeof *one) == 0);
                }
            }
            give_back(one);
            give_back(many);
            end_problem(&s, 0);
        }
}

/* What is not finite, and what is very small or large. */
static void test_row_edges(void) {
    enum { M = 9, N = 20, K = 70 };
    size_t t, l, i, j;
    for (t = 0; t < KINDS; t++) {
        const int type = kinds[t];
        problem s = make_problem(type, M, N, K, 1, 0, 5);
        static moe_real c[M * N], usual[M * N];
        for (i = 0; i < K; i++) { /* rows 2 and 7 give 0 */
            s.x[2 * K + i] = 0;
            s.x[7 * K + i] *= (moe_real)SMALLEST;
        }
        for (i = 0; i < K; i++) s.x[5 * K + i] *= (moe_real)LARGEST / 10;
        s.x[1 * K + 69] = not_a_number();
        s.x[3 * K] = (moe_real)HUGE_VAL;
        s.x[4 * K + 33] = -(moe_real)HUGE_VAL;
        for (i = 0; i < K; i++) s.x[8 * K + i] = not_a_number();
        for (l = 0; l < n_levels; l++) {
            moe_rows_quantize(&levels[l], type, M, K, s.x, K, s.rows);
            moe_matmul_quantized(&levels[l], type, M, N, K, s.rows, s.packed, 1, c, N);
            moe_rows_quantize(&levels[l], type, 1, K, s.x, K, s.rows);
            moe_matmul_quantized(&levels[l], type, 1, N, K, s.rows, s.packed, 1, usual, N);
            CHECK(memcmp(usual, c, N * sizeof *c) == 0); /* no other row matters */
            for (j = 0; j < N; j++) {
                CHECK(moe_is_finite(c[j]) && same_real(c[2 * N + j] + 0, 0) && same_real(c[7 * N + j] + 0, 0));
                CHECK(moei_is_nan(c[N + j]) && moei_is_nan(c[3 * N + j]) && moei_is_nan(c[4 * N + j]) &&
                      moei_is_nan(c[8 * N + j]));
                CHECK(!moei_is_nan(c[5 * N + j]) && moe_is_finite(c[6 * N + j]));
            }
        }
        end_problem(&s, 0);
    }
}

static void test_arguments(void) {
    moe_real c[6] = {1, 2, 3, 4, 5, 6};
    unsigned char row[256];
    size_t l, i;
    int type;
    for (l = 0; l < n_levels; l++) {
        for (type = -1; type <= MOE_TYPE_COUNT; type++) {
            const int quantized = type >= MOE_TYPE_Q8 && type < MOE_TYPE_COUNT;
            for (i = 0; i < 6; i++) c[i] = (moe_real)(i + 1);
            moe_matmul_quantized(&levels[l], type, 0, 3, 5, NULL, NULL, 1, c, 3);
            moe_matmul_quantized(&levels[l], type, 3, 0, 5, NULL, NULL, 1, c, 3);
            CHECK(same_real(c[0], 1) && same_real(c[5], 6));
            moe_matmul_quantized(&levels[l], type, 2, 2, 0, NULL, NULL, 1, c, 3);
            CHECK(same_real(c[0], quantized ? 0 : 1) && same_real(c[4], quantized ? 0 : 5) && same_real(c[2], 3) &&
                  same_real(c[5], 6));
            memset(row, 0x33, sizeof row);
            moe_rows_quantize(&levels[l], type, 0, 5, NULL, 5, row);
            CHECK(row[0] == 0x33);
            moe_rows_quantize(&levels[l], type, 1, 1, c, 1, row);
            CHECK((row[1] == 0x33) == !quantized);
        }
        moe_rows_quantize(&levels[l], MOE_TYPE_Q8, 1, 0, c, 0, row);
    }
}

/* ---- errors on normal data ---- */

static void test_errors(void) {
    static const double least[KINDS] = {0.008, 0.005, 0.07}, most[KINDS] = {0.014, 0.009, 0.095};
    enum { M = 24, N = 48, K = 352 };
    size_t t, l, i, j, p;
    for (t = 0; t < KINDS; t++) {
        problem s = make_problem(kinds[t], M, N, K, 1, 0, 21);
        static moe_real c[M * N];
        for (l = 0; l < n_levels; l++) {
            double wrong = 0, all = 0, relative;
            moe_rows_quantize(&levels[l], s.type, M, K, s.x, K, s.rows);
            moe_matmul_quantized(&levels[l], s.type, M, N, K, s.rows, s.packed, 1, c, N);
            for (i = 0; i < M; i++)
                for (j = 0; j < N; j++) {
                    double sum = 0;
                    for (p = 0; p < K; p++) sum += (double)s.x[i * K + p] * (double)s.w[j * K + p];
                    wrong += ((double)c[i * N + j] - sum) * ((double)c[i * N + j] - sum);
                    all += sum * sum;
                }
            relative = sqrt(wrong / all);
            if (l == 0) printf("note: type %d: relative error %.4f\n", s.type, relative);
            CHECK(relative > least[t] && relative < most[t]);
        }
        end_problem(&s, 0);
    }
}

int main(int count, char **arguments) {
    quick = count > 1 && strcmp(arguments[1], "quick") == 0;
    find_levels();
    CASE(test_tables());
    CASE(test_halves(MOE_TYPE_F16));
    CASE(test_halves(MOE_TYPE_BF16));
    CASE(test_panel_sizes());
    CASE(test_packing());
    CASE(test_weight_edges());
    CASE(test_common(MOE_TYPE_Q8_BLOCK));
    CASE(test_common(MOE_TYPE_Q4));
    CASE(test_blocks());
    CASE(test_worked_blocks());
    CASE(test_numbers_in_files());
    CASE(test_products_in_files());
    CHECK(filled_beyond == 0);
    CASE(test_biases_in_files());
    CASE(test_long_rows_in_files());
    CASE(test_exact_in_files());
    CASE(test_layers_in_files());
    CASE(test_vectors_in_files());
    CASE(test_wide_values_in_files());
    CASE(test_rows());
    CASE(test_products());
    CASE(test_exact());
    CASE(test_long_halves(MOE_TYPE_F16));
    CASE(test_long_halves(MOE_TYPE_BF16));
    CASE(test_few_halves(MOE_TYPE_F16));
    CASE(test_few_halves(MOE_TYPE_BF16));
    if (!quick) CASE(test_long_sums());
    CASE(test_independence());
    CASE(test_row_edges());
    CASE(test_arguments());
    CASE(test_errors());
    return test_end();
}
