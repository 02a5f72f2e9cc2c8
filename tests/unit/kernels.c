/* Tests moe_kernels.h: every kernel table against naive sums over all remainders, strides and
   misalignments; the activations, softmax, norms, top-k, random numbers and message tools against
   their definitions.
       cc -std=c99 -O2 -I. tests/unit/kernels.c -o kernels -lm && ./kernels
   Also meant to pass with -DMOE_REAL=double, -DMOE_NO_SIMD, -DMOE_STATIC, with the sanitizers on,
   and as C++11. With the argument "quick" it takes fewer sizes, for emulators. */

#define MOE_IMPLEMENTATION
#include "moe_kernels.h"
#include "../test.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef MOE_NO_TRAIN
#error "tests/unit/kernels.c tests the backward functions too: build it without MOE_NO_TRAIN"
#endif

/* References are computed in double, and in the double build in long double; tcc 0.9.27 gets
   differences of those wrong, so there in double too. */
#if !MOE_REAL_IS_DOUBLE || defined(__TINYC__)
typedef double wide;
#define WIDE_EPSILON DBL_EPSILON
#define W(literal) literal
#define WF(name) name
#else
typedef long double wide;
#define WIDE_EPSILON LDBL_EPSILON
#define W(literal) literal##L
#define WF(name) name##l
#endif

#if MOE_REAL_IS_DOUBLE
#define EPSILON DBL_EPSILON
#define TINIEST 4.9406564584124654e-324
#define SMALLEST DBL_MIN
#else
#define EPSILON FLT_EPSILON
#define TINIEST 1.4012984643e-45
#define SMALLEST FLT_MIN
#endif

static int quick; /* the program's argument */

/* |got - want| <= bound. NaN on either side fails. */
static int check_near(wide got, wide want, wide bound, const char *file, int line, const char *what) {
    const wide error = got > want ? got - want : want - got;
    const int good = error <= bound || (got >= want && got <= want);
    if (!CHECK_AT(line, good, what) && test_shown)
        printf("    got %.17g, want %.17g, allowed error %.3g\n", (double)got, (double)want, (double)bound);
    return good;
}

#define NEAR(got, want, bound) check_near((wide)(got), (wide)(want), (wide)(bound), __FILE__, __LINE__, #got)

static const moe_real INF = (moe_real)HUGE_VAL;

static moe_real not_a_number(void) {
    const moei_bits bits = MOEI_INFINITY_BITS | (MOEI_INFINITY_BITS >> 1);
    moe_real x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static int is_nan(moe_real x) {
    return moei_is_nan(x);
}

static int same_real(moe_real a, moe_real b) {
    return memcmp(&a, &b, sizeof a) == 0;
}

static wide absolute(wide x) {
    return x < 0 ? -x : x;
}

/* Between -1 and 1. */
static moe_real random_real(moe_rng *rng) {
    return moe_rng_uniform(rng) * 2 - 1;
}

/* n reals that end where their block ends and start one element off its alignment; freed by
   give_back. */
static moe_real *borrow(size_t n) {
    moe_real *block = (moe_real *)malloc((n + 1) * sizeof(moe_real));
    if (block == NULL) {
        printf("out of memory\n");
        exit(1);
    }
    block[0] = 12345;
    return block + 1;
}

static void give_back(moe_real *p) {
    CHECK(same_real(p[-1], 12345));
    free(p - 1);
}

/* ---- products ---- */

/* A rows x columns matrix in exactly the elements it needs; what lies between the rows is NaN. */
static moe_real *make_matrix(moe_rng *rng, size_t rows, size_t columns, size_t stride, int powers) {
    const size_t count = rows == 0 ? 0 : (rows - 1) * stride + columns;
    moe_real *x = borrow(count);
    size_t i;
    for (i = 0; i < count; i++) {
        moe_real value = random_real(rng);
        if (powers)
            value = (moe_real)(1 << moe_rng_below(rng, 3)) * (moe_rng_below(rng, 2) ? MOEI_R(0.5) : MOEI_R(-0.5));
        x[i] = i % stride < columns ? value : not_a_number();
    }
    return x;
}

typedef struct product {
    int op, accumulate, powers;
    size_t m, n, k, pad;
} product;

/* Runs one product on a table and compares every element with the naive sum. */
static void check_product(const moe_kernels *table, product s, uint64_t seed) {
    const size_t a_rows = s.op == MOE_MATMUL_TN ? s.k : s.m, a_columns = s.op == MOE_MATMUL_TN ? s.m : s.k;
    const size_t b_rows = s.op == MOE_MATMUL_NT ? s.n : s.k, b_columns = s.op == MOE_MATMUL_NT ? s.k : s.n;
    const size_t lda = a_columns + s.pad + (a_columns == 0);
    const size_t ldb = b_columns + 2 * s.pad + (b_columns == 0), ldc = s.n + s.pad;
    const wide terms = (wide)(s.k < 256 ? s.k : 256 + s.k / 256) + 2;
    moe_rng rng;
    moe_real *a, *b, *c, *before;
    size_t i, j, p, count = (s.m - 1) * ldc + s.n, wrong = 0;
    moe_rng_seed(&rng, seed);
    a = make_matrix(&rng, a_rows, a_columns, lda, s.powers);
    b = make_matrix(&rng, b_rows, b_columns, ldb, s.powers);
    c = borrow(count);
    before = borrow(count);
    for (i = 0; i < count; i++)
        c[i] = before[i] = s.accumulate || i % ldc >= s.n ? (moe_real)(int)(i % 13) - 6 : not_a_number();
    moe_matmul(table, s.op, MOE_TYPE_REAL, s.m, s.n, s.k, a, lda, b, ldb, c, ldc, s.accumulate);
    for (i = 0; i < s.m; i++) {
        for (j = 0; j < s.n; j++) {
            wide sum = s.accumulate ? (wide)before[i * ldc + j] : 0, size = absolute(sum), error;
            for (p = 0; p < s.k; p++) {
                const wide x = (wide)(s.op == MOE_MATMUL_TN ? a[p * lda + i] : a[i * lda + p]);
                const wide y = (wide)(s.op == MOE_MATMUL_NT ? b[j * ldb + p] : b[p * ldb + j]);
                sum += x * y;
                size += absolute(x * y);
            }
            error = absolute((wide)c[i * ldc + j] - sum);
            if (!(error <= (s.powers ? 0 : terms * (wide)EPSILON * size))) wrong++;
        }
        for (j = s.n; j < ldc && i * ldc + j < count; j++)
            if (!same_real(c[i * ldc + j], before[i * ldc + j])) wrong++;
    }
    if (!CHECK(wrong == 0) && test_shown)
        printf("    table %s op %d m %lu n %lu k %lu pad %lu accumulate %d: %lu wrong\n", table->name, s.op,
               (unsigned long)s.m, (unsigned long)s.n, (unsigned long)s.k, (unsigned long)s.pad, s.accumulate,
               (unsigned long)wrong);
    give_back(a);
    give_back(b);
    give_back(c);
    give_back(before);
}

static void check_size(const moe_kernels *table, size_t m, size_t n, size_t k) {
    product s;
    for (s.op = 0; s.op < MOE_MATMUL_COUNT; s.op++) {
        s.m = m;
        s.n = n;
        s.k = k;
        s.accumulate = (int)((m + n + k) % 2);
        s.pad = (m * 3 + n + k * 5) % 4;
        s.powers = (m + 2 * n + k) % 5 == 0 && k < 64;
        check_product(table, s, m * 1000003 + n * 1009 + k);
        s.accumulate = !s.accumulate;
        if (m % 4 == 1) check_product(table, s, m * 1000003 + n * 1009 + k);
    }
}

static void test_products(const moe_kernels *table) {
    static const size_t some_m[] = {1, 2, 3, 4, 5, 13}, some_n[] = {3, 8, 16, 19, 41, 64};
    static const size_t some_k[] = {255, 256, 257, 512, 513, 770};
    size_t m, n, k, i;
    for (m = 1; m <= 67; m += quick ? 1 + m % 7 : 1)
        for (n = 1; n <= 67; n += quick ? 1 + n % 6 : 1) check_size(table, m, n, 1 + (m * 7 + n * 3) % 19);
    for (k = 0; k <= 67; k += quick ? 7 : 1)
        for (i = quick ? k % 2 : 0; i < 36; i += quick ? 2 : 1) check_size(table, some_m[i / 6], some_n[i % 6], k);
    for (i = 0; i < 36; i += quick ? 5 : 1) check_size(table, some_m[i / 6], 11 + i, some_k[i % 6]);
    check_size(table, 1, 9, 2309);
    check_size(table, 2, 5, 1300); /* several steps of four blocks */
    for (m = 190; m < 400; m += quick ? 71 : 19) check_size(table, m, 7 + m % 12, 5 + m % 9);
}

/* A row of C has the same bits whatever rows are computed with it, where products underflow too. */
static void test_row_independence(const moe_kernels *table) {
    static const size_t widths[] = {1, 5, 8, 10, 24, 37, 64}, depths[] = {3, 64, 259, 513};
    const moe_real tiny = (moe_real)(MOE_REAL_IS_DOUBLE ? 1e-300 : 1e-30);
    enum { ROWS = 40 };
    size_t w, d, i, r;
    int op;
    for (op = 0; op < MOE_MATMUL_COUNT; op++)
        for (w = 0; w < 7; w++)
            for (d = 0; d < 4; d++) {
                const size_t n = widths[w], k = depths[d];
                const size_t lda = op == MOE_MATMUL_TN ? (size_t)ROWS : k;
                const size_t ldb = op == MOE_MATMUL_NT ? k : n;
                moe_rng rng = {7};
                moe_real *a = make_matrix(&rng, op == MOE_MATMUL_TN ? k : (size_t)ROWS, lda, lda, 0);
                moe_real *b = make_matrix(&rng, op == MOE_MATMUL_NT ? n : k, ldb, ldb, 0);
                const size_t next = op == MOE_MATMUL_TN ? 1 : lda;
                moe_real *all = borrow(ROWS * n), *parts = borrow(ROWS * n);
                for (i = 0; d == 0 && i < ROWS * k; i++) a[i] *= tiny;
                for (i = 0; d == 0 && i < n * k; i++) b[i] *= tiny;
                moe_matmul(table, op, MOE_TYPE_REAL, ROWS, n, k, a, lda, b, ldb, all, n, 0);
                for (r = 1; r <= 15; r += quick ? 3 : 1) {
                    for (i = 0; i + r <= ROWS; i += r)
                        moe_matmul(table, op, MOE_TYPE_REAL, r, n, k, a + i * next, lda, b, ldb, parts + i * n, n, 0);
                    CHECK(memcmp(parts, all, i * n * sizeof(moe_real)) == 0);
                }
                give_back(a);
                give_back(b);
                give_back(all);
                give_back(parts);
            }
}

/* Whether a table fuses multiplications into additions; plain C does what the compiler makes of
   it. */
static int fuses(const moe_kernels *table) {
#ifdef MOEI_HAVE_V4
    if (table->id == MOE_KERNELS_NEON || table->id == MOE_KERNELS_WASM) return MOEI_V4_FUSED;
#endif
    return table->id == MOE_KERNELS_AVX2 || table->id == MOE_KERNELS_AVX512;
}

/* One element in the documented order, to the bit: blocks of 256 from 0, each then added. */
static moe_real ordered_sum(const moe_kernels *table, size_t k, const moe_real *x, const moe_real *y, moe_real start) {
    moe_real total = start;
    size_t p, q;
    for (p = 0; p < k; p += 256) {
        moe_real block = 0;
        for (q = p; q < k && q < p + 256; q++) {
            MOEI_KEEP_ORDER;
            if (fuses(table)) block = MOEI_F(fma)(x[q], y[q], block);
            else if (table->id == MOE_KERNELS_C) MOEI_ADD_TO(block, x[q], y[q]);
            else block += x[q] * y[q];
        }
        total += block;
    }
    return total;
}

static void test_order(const moe_kernels *table) {
    static const size_t depths[] = {1, 7, 64, 255, 256, 257, 512, 700};
    enum { M = 9, N = 27 };
    size_t d, i, j;
    for (d = 0; d < 8; d++) {
        const size_t k = depths[d];
        moe_rng rng = {k};
        moe_real *a = make_matrix(&rng, M, k, k, 0), *b = make_matrix(&rng, N, k, k, 0);
        moe_real *c = make_matrix(&rng, M, N, N, 0);
        moe_real *sum = borrow(M * N);
        for (i = 0; i < M; i++)
            for (j = 0; j < N; j++) sum[i * N + j] = ordered_sum(table, k, a + i * k, b + j * k, c[i * N + j]);
        moe_matmul(table, MOE_MATMUL_NT, MOE_TYPE_REAL, M, N, k, a, k, b, k, c, N, 1);
        CHECK(memcmp(c, sum, M * N * sizeof *c) == 0);
        for (i = 0; i < M; i++)
            for (j = 0; j < N; j++) sum[i * N + j] = ordered_sum(table, k, a + i * k, b + j * k, 0);
        moe_matmul(table, MOE_MATMUL_NT, MOE_TYPE_REAL, M, N, k, a, k, b, k, c, N, 0);
        CHECK(memcmp(c, sum, M * N * sizeof *c) == 0);
        if (table->id == MOE_KERNELS_C) CHECK(same_real(moe_dot(table, k, a, b), sum[0]));
        give_back(a);
        give_back(b);
        give_back(c);
        give_back(sum);
    }
}

/* With small powers of two every order of summation is exact, so all tables and orientations agree
   to the bit. */
static void test_exact_across_tables(const moe_kernels *table) {
    enum { M = 37, N = 43, K = 300 };
    static moe_real a[M * K], at[K * M], b[N * K], bt[K * N], plain[M * N], fast[M * N];
    moe_rng rng = {11};
    size_t i, p;
    int op;
    for (p = 0; p < K; p++) {
        for (i = 0; i < M; i++) at[p * M + i] = a[i * K + p] = (moe_real)(1 << moe_rng_below(&rng, 4)) * MOEI_R(0.25);
        for (i = 0; i < N; i++) bt[p * N + i] = b[i * K + p] = (moe_real)(1 << moe_rng_below(&rng, 4)) * MOEI_R(-0.5);
    }
    moe_matmul(NULL, MOE_MATMUL_NT, MOE_TYPE_REAL, M, N, K, a, K, b, K, plain, N, 0);
    for (op = 0; op < MOE_MATMUL_COUNT; op++) {
        const moe_real *left = op == MOE_MATMUL_TN ? at : a, *right = op == MOE_MATMUL_NT ? b : bt;
        moe_matmul(table, op, MOE_TYPE_REAL, M, N, K, left, op == MOE_MATMUL_TN ? M : K, right,
                   op == MOE_MATMUL_NT ? K : N, fast, N, 0);
        CHECK(memcmp(plain, fast, sizeof fast) == 0);
    }
    plain[0] = 1;
    /* no such orientation: nothing happens */
    moe_matmul(table, MOE_MATMUL_COUNT, MOE_TYPE_REAL, M, N, K, a, K, b, K, plain, N, 0);
    moe_matmul(table, MOE_MATMUL_NT, MOE_TYPE_COUNT, M, N, K, a, K, b, K, plain, N, 0);
    CHECK(same_real(plain[0], 1));
}

/* The rows of x [rows,columns] so far apart; what lies between them is NaN. */
static moe_real *spread(size_t rows, size_t columns, const moe_real *x, size_t stride) {
    const size_t count = (rows - 1) * stride + columns;
    moe_real *to = borrow(count);
    size_t i;
    for (i = 0; i < count; i++) to[i] = i % stride < columns ? x[i / stride * columns + i % stride] : not_a_number();
    return to;
}

/* Rows a multiple of 2 or 4 KB apart, and matrices that are too large for caches, are read in other
   orders: no bit may differ from the product of dense rows. */
static void test_strides(const moe_kernels *table) {
    static const size_t strides[] = {512, 1024, 2048};
    static const size_t some_n[] = {1, 8, 23, 33, 70}, some_k[] = {3, 255, 258, 511, 900};
    size_t m, i, j, l;
    for (m = 1; m <= 9; m++)
        for (i = 0; i < 3; i++)
            for (j = 0; j < 5; j++)
                for (l = 0; l < 5; l += quick ? 1 + j % 2 : 1) {
                    const size_t n = some_n[j], k = some_k[l] < strides[i] ? some_k[l] : strides[i];
                    const int accumulate = (m + i + j + l) % 2 == 0;
                    moe_rng rng = {m * 1009 + n * 31 + k};
                    moe_real *a = make_matrix(&rng, m, k, k, 0), *w = make_matrix(&rng, n, k, k, 0);
                    moe_real *far_a = spread(m, k, a, strides[i]), *far_w = spread(n, k, w, strides[i]);
                    moe_real *c = make_matrix(&rng, m, n, n, 0), *want = spread(m, n, c, n);
                    moe_matmul(table, MOE_MATMUL_NT, MOE_TYPE_REAL, m, n, k, a, k, w, k, want, n, accumulate);
                    moe_matmul(table, MOE_MATMUL_NT, MOE_TYPE_REAL, m, n, k, far_a, strides[i], far_w, strides[i], c, n,
                               accumulate);
                    CHECK(memcmp(c, want, m * n * sizeof *c) == 0);
                    give_back(a);
                    give_back(w);
                    give_back(far_a);
                    give_back(far_w);
                    give_back(c);
                    give_back(want);
                }
}

/* ---- products with packed weights ---- */

/* The rows of w[n,k] in panels of 16, so many numbers from the start of one to the start of the
   next, in exactly the elements they need. What lies between the panels is NaN. */
static moe_real *make_panels(size_t n, size_t k, const moe_real *w, size_t panel) {
    const size_t count = (n - 1) / 16 * panel + k * 16;
    moe_real *b = borrow(count);
    size_t i, j, p;
    for (i = 0; i < count; i++) b[i] = not_a_number();
    for (j = 0; j < (n + 15) / 16 * 16; j++)
        for (p = 0; p < k; p++) b[j / 16 * panel + p * 16 + j % 16] = j < n ? w[j * k + p] : 0;
    return b;
}

/* Rows from the given one on of a[.,k], or with turned of a^T, in exactly the elements they
   need. */
static moe_real *make_left(size_t from, size_t m, size_t k, const moe_real *a, size_t pad, int turned, size_t *ra,
                           size_t *ca) {
    const size_t length = turned ? m : k, stride = length + pad;
    const size_t rows = turned ? k : m;
    const size_t count = rows == 0 ? 0 : (rows - 1) * stride + length;
    moe_real *left = borrow(count);
    size_t i, p;
    *ra = turned ? 1 : stride;
    *ca = turned ? stride : 1;
    for (i = 0; i < count; i++) left[i] = not_a_number();
    for (i = 0; i < m; i++)
        for (p = 0; p < k; p++) left[i * *ra + p * *ca] = a[(from + i) * k + p];
    return left;
}

/* Elements that differ from the naive sum by more than rounding. */
static size_t wrong_sums(size_t m, size_t n, size_t k, const moe_real *a, const moe_real *w, const moe_real *start,
                         const moe_real *c) {
    const wide terms = (wide)(k < 256 ? k : 256 + k / 256) + 2;
    size_t i, j, p, wrong = 0;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            wide sum = start != NULL ? (wide)start[i * n + j] : 0, size = absolute(sum);
            for (p = 0; p < k; p++) {
                const wide term = (wide)a[i * k + p] * (wide)w[j * k + p];
                sum += term;
                size += absolute(term);
            }
            if (!(absolute((wide)c[i * n + j] - sum) <= terms * (wide)EPSILON * size)) wrong++;
        }
    return wrong;
}

/* m rows, from the given one on, of a table's product with panels have the bits of want [.,n], and
   the numbers between the rows of C stay: they are -0, which even an added 0 would change. start
   (NULL: overwrite C) [.,n] is what C holds before. */
static int panels_give(const moe_kernels *table, moe_panels_fn *panels, size_t from, size_t m, size_t n, size_t k,
                       const moe_real *a, const moe_real *b, size_t panel, const moe_real *start, const moe_real *want,
                       size_t pad, int turned) {
    const size_t ldc = n + pad, count = (m - 1) * ldc + n;
    size_t ra, ca, i, wrong = 0;
    moe_real *left = make_left(from, m, k, a, pad, turned, &ra, &ca), *c = borrow(count);
    for (i = 0; i < count; i++)
        c[i] = i % ldc >= n ? MOEI_R(-0.0) : start != NULL ? start[(from + i / ldc) * n + i % ldc] : not_a_number();
    panels(m, n, k, left, ra, ca, b, panel, c, ldc, start != NULL);
    for (i = 0; i < count; i++)
        wrong += !same_real(c[i], i % ldc < n ? want[(from + i / ldc) * n + i % ldc] : MOEI_R(-0.0));
    give_back(left);
    give_back(c);
    if (wrong > 0 && test_shown)
        printf("    table %s m %lu n %lu k %lu panel %lu pad %lu turned %d accumulate %d: %lu wrong\n", table->name,
               (unsigned long)m, (unsigned long)n, (unsigned long)k, (unsigned long)panel, (unsigned long)pad, turned,
               start != NULL, (unsigned long)wrong);
    return wrong == 0;
}

/* What the table of another maker's processors reads weights from memory with, or NULL. */
static moe_panels_fn *other_streamed(const moe_kernels *table) {
    moe_panels_fn *streams = NULL, *stream = NULL;
#ifdef MOEI_HAVE_AVX2
    if (table->id == MOE_KERNELS_AVX2) {
        streams = moei_panels_streams_avx2;
        stream = moei_panels_stream_avx2;
    }
#endif
#ifdef MOEI_HAVE_AVX512
    if (table->id == MOE_KERNELS_AVX512) {
        streams = moei_panels_streams_avx512;
        stream = moei_panels_stream_avx512;
    }
#endif
    return table->streamed == streams ? stream : streams;
}

static void check_panels(const moe_kernels *table, size_t m, size_t n, size_t k, int ways) {
    moe_rng rng = {m * 1000003 + n * 1009 + k};
    moe_real *a = make_matrix(&rng, m, k, k > 0 ? k : 1, 0), *w = make_matrix(&rng, n, k, k > 0 ? k : 1, 0);
    moe_real *start = make_matrix(&rng, m, n, n, 0), *want = borrow(m * n);
    int way;
    for (way = 0; way < 4; way++) {
        const int turned = way % 2, accumulate = way / 2;
        const size_t pad = (m + n + k) % 3, panel = k * 16 + ((m + k) % 2 ? 0 : (n % 3) * k * 16 + k % 5);
        moe_real *b;
        if (!(ways >> way & 1)) continue;
        b = make_panels(n, k, w, panel);
        memcpy(want, start, m * n * sizeof *want);
        moe_matmul(table, MOE_MATMUL_NT, MOE_TYPE_REAL, m, n, k, a, k, w, k, want, n, accumulate);
        if (!turned || !(ways >> (way - 1) & 1)) CHECK(wrong_sums(m, n, k, a, w, accumulate ? start : NULL, want) == 0);
        CHECK(panels_give(table, table->panels, 0, m, n, k, a, b, panel, accumulate ? start : NULL, want, pad, turned));
        if (table->streamed != table->panels)
            CHECK(panels_give(table, table->streamed, 0, m, n, k, a, b, panel, accumulate ? start : NULL, want, pad,
                              turned));
        if (other_streamed(table) != NULL)
            CHECK(panels_give(table, other_streamed(table), 0, m, n, k, a, b, panel, accumulate ? start : NULL, want,
                              pad, turned));
        give_back(b);
    }
    give_back(a);
    give_back(w);
    give_back(start);
    give_back(want);
}

static void test_panels(const moe_kernels *table) {
    static const size_t some_m[] = {1, 2, 3, 4, 7, 13, 15, 40, 200}, some_n[] = {1, 16, 24, 33, 64, 70, 100};
    static const size_t long_k[] = {255, 256, 257, 300, 520, 1100};
    size_t m, n, k, i, j;
    for (m = 1; m <= 40; m += quick ? 1 + m % 5 : 1)
        for (n = 1; n <= 70; n += quick ? 1 + n % 7 : 1)
            check_panels(table, m, n, (m * 7 + n * 3) % 23, 1 << (m + n / 2) % 4);
    for (n = 71; n <= 300; n += quick ? 75 : 13) {
        check_panels(table, n % 5 + 1, n, n % 41, 1 << n % 4);
        check_panels(table, n, n, 9, 1 << n % 4);
    }
    for (k = 0; k <= 40; k += quick ? 4 : 1)
        for (i = 0; i < 8; i++)
            for (j = 0; j < 7; j++)
                if (!quick || (i + j + k / 4) % 3 == 0)
                    check_panels(table, some_m[i], some_n[j], k, quick ? 1 << (i + j) % 4 : 15);
    for (k = 0; k < 6; k++)
        for (i = 0; i < 9; i += quick ? 2 : 1)
            for (j = 0; j < 7; j += quick ? 2 : 1)
                if (!quick || some_m[i] * some_n[j] < 1000)
                    check_panels(table, some_m[i], some_n[j], long_k[k], 1 << (i + j + k) % 4);
    if (!quick) check_panels(table, 200, 40, 1100, 15);
    /* more of the left operand than a second-level cache holds */
    check_panels(table, quick ? 201 : 385, 17, 700, quick ? 1 : 15);
}

/* Whatever rows are computed with it, a row has the same bits; no rows or no columns are nothing to
   do. */
static void test_panel_rows(const moe_kernels *table) {
    static const size_t widths[] = {1, 5, 16, 24, 37, 64, 70, 130}, depths[] = {3, 64, 259, 600};
    enum { ROWS = 200 };
    size_t w, d, m, from;
    for (w = 0; w < 8; w++)
        for (d = quick ? w % 2 * 2 : 0; d < 4; d += quick ? 4 : 1) {
            const size_t n = widths[w], k = depths[d];
            const size_t panel = k * 16;
            moe_rng rng = {n + k};
            moe_real *a = make_matrix(&rng, ROWS, k, k, 0);
            moe_real *weights = make_matrix(&rng, n, k, k, 0), *all = borrow(ROWS * n);
            moe_real *b = make_panels(n, k, weights, panel), *start = make_matrix(&rng, ROWS, n, n, 0);
            memcpy(all, start, ROWS * n * sizeof *all);
            table->panels(ROWS, n, k, a, k, 1, b, panel, all, n, 1);
            table->panels(0, n, k, a, k, 1, b, panel, start, n, 0);
            table->panels(ROWS, 0, k, a, k, 1, b, panel, start, n, 0);
            table->streamed(0, n, k, a, k, 1, b, panel, start, n, 0);
            table->streamed(ROWS, 0, k, a, k, 1, b, panel, start, n, 0);
            for (m = 1; m <= 40; m += quick ? 1 + m % 3 : 1)
                for (from = m % 11; from + m <= ROWS; from += 61)
                    CHECK(panels_give(table, m % 2 ? table->panels : table->streamed, from, m, n, k, a, b, panel, start,
                                      all, 0, (int)(from % 2)));
            give_back(a);
            give_back(weights);
            give_back(all);
            give_back(b);
            give_back(start);
        }
}

/* ---- vectors ---- */

/* Rows added at once have the bits of rows added one by one, and nothing behind them changes. */
static void test_axpy_rows(const moe_kernels *table) {
    size_t n, count, i;
    for (n = 0; n <= 170; n++)
        for (count = 0; count <= 9; count += 1 + n % 3) {
            const size_t ldx = n + n % 2 + 1;
            moe_rng rng = {n * 10 + count};
            moe_real *x = make_matrix(&rng, count, n, ldx, 0), *alpha = make_matrix(&rng, 1, count, count + 1, 0);
            moe_real *want = make_matrix(&rng, 1, n, n + 1, 0), *got = borrow(n);
            memcpy(got, want, n * sizeof *got);
            for (i = 0; i < count; i++) moe_axpy(table, n, alpha[i], x + i * ldx, want);
            table->axpy_rows(count, n, alpha, x, ldx, got);
            for (i = 0; i < n && same_real(got[i], want[i]); i++) {
            }
            CHECK(i == n);
            give_back(x);
            give_back(alpha);
            give_back(want);
            give_back(got);
        }
}

static void test_vectors(const moe_kernels *table) {
    size_t n, i;
    for (n = 0; n <= 600; n += n < 70 ? 1 : 53) {
        moe_rng rng = {n + 1};
        moe_real *x = make_matrix(&rng, 1, n, n + 1, 0), *y = make_matrix(&rng, 1, n, n + 1, 0);
        moe_real *z = borrow(n);
        wide sum = 0, size = 0;
        for (i = 0; i < n; i++) {
            z[i] = y[i];
            sum += (wide)x[i] * (wide)y[i];
            size += absolute((wide)x[i] * (wide)y[i]);
        }
        NEAR(moe_dot(table, n, x, y), sum, (wide)(n + 2) * (wide)EPSILON * size);
        moe_axpy(table, n, MOEI_R(-1.5), x, z);
        for (i = 0; i < n; i++) NEAR(z[i], (wide)y[i] - (wide)1.5 * (wide)x[i], 2 * (wide)EPSILON * 3);
        give_back(x);
        give_back(y);
        give_back(z);
    }
}

/* ---- activations ---- */

/* Twice the argument of the tanh of gelu_tanh. */
static wide gelu_tanh_exponent(wide x) {
    return W(1.595769121605730711759784239737527474) * x * (1 + W(0.044715) * x * x);
}

static wide act_reference(int act, wide x) {
    switch (act) {
    case MOE_ACT_RELU: return x > 0 ? x : 0;
    case MOE_ACT_RELU2: return x > 0 ? x * x : 0;
    case MOE_ACT_GELU_TANH: return x / (1 + WF(exp)(-gelu_tanh_exponent(x)));
    case MOE_ACT_SILU: return x / (1 + WF(exp)(-x));
    case MOE_ACT_GELU: return x * WF(erfc)(-x * W(0.707106781186547524400844362104849039)) / 2;
    case MOE_ACT_TANH: return WF(tanh)(x);
    case MOE_ACT_SIGMOID: return 1 / (1 + WF(exp)(-x));
    default: return x;
    }
}

/* Five points, error h^4 / 30 times the fifth derivative: below 1e-12 for these functions, 1e-11
   for gelu_tanh. */
static wide slope_reference(int act, wide x) {
    const wide h = W(1e-3);
    if (act == MOE_ACT_RELU2) return x > 0 ? 2 * x : 0; /* not smooth at 0 */
    const wide far = act_reference(act, x + 2 * h) - act_reference(act, x - 2 * h);
    return (8 * (act_reference(act, x + h) - act_reference(act, x - h)) - far) / (12 * h);
}

/* Relative error in epsilons that an activation may have. Plain C computes gelu through erfc(-x /
   sqrt 2), which turns the rounding of its argument into x^2 epsilons in the negative tail;
   gelu_tanh is exp(a) there, with twice the rounding of a, and |a| is at most x^2 beyond 2. */
static wide act_bound(const moe_kernels *table, int act, wide x) {
    if (act == MOE_ACT_GELU)
        return x < 0 && table->activate == moe_kernels_select(MOE_KERNELS_C)->activate ? 4 + x * x : 4;
    if (act == MOE_ACT_GELU_TANH && x < 0) return 3 + 2 * (x > -2 ? x * x : -gelu_tanh_exponent(x));
    if (act == MOE_ACT_RELU2) return 1;
    return act == MOE_ACT_TANH || act == MOE_ACT_SILU || act == MOE_ACT_SIGMOID || act == MOE_ACT_GELU_TANH ? 3 : 0;
}

static void test_activations(const moe_kernels *table) {
    enum { COUNT = 4001 };
    static moe_real x[COUNT], y[COUNT], dy[COUNT], dx[COUNT];
    moe_rng rng = {3};
    int act, i;
    for (i = 0; i < COUNT; i++) {
        const moe_real range = i % 4 == 0 ? 1 : i % 4 == 1 ? MOEI_R(0.01) : i % 4 == 2 ? 10 : 120;
        x[i] = random_real(&rng) * range;
        dy[i] = random_real(&rng);
    }
    for (act = 0; act < MOE_ACT_COUNT; act++) {
        size_t n;
        moe_activate(table, act, COUNT, x, y);
        moe_activate_backward(table, act, COUNT, x, dy, dx);
        for (i = 0; i < COUNT; i++) {
            const wide want = act_reference(act, (wide)x[i]), slope = slope_reference(act, (wide)x[i]);
            const wide bound = act_bound(table, act, (wide)x[i]) * (wide)EPSILON * absolute(want);
            NEAR(y[i], want, bound + 2 * (wide)TINIEST * (1 + absolute((wide)x[i])));
            if (act == MOE_ACT_RELU) NEAR(dx[i], x[i] > 0 ? dy[i] : 0, 0);
            else
                NEAR(dx[i], slope * (wide)dy[i],
                     10 * (wide)EPSILON * (act == MOE_ACT_RELU2 ? 1 + absolute(slope) : 1) + W(1e-11) +
                         2000 * (1 + absolute((wide)x[i])) * (wide)WIDE_EPSILON);
        }
        for (n = 0; n <= 67; n++) {
            /* every remainder, in place, nothing beside it; a lane's value does not depend on the
               remainder */
            moe_real *p = borrow(n), *q = borrow(n);
            memcpy(p, x, n * sizeof *p);
            memcpy(q, dy, n * sizeof *q);
            moe_activate_backward(table, act, n, p, q, q);
            moe_activate(table, act, n, p, p);
            CHECK(memcmp(p, y, n * sizeof *p) == 0 && memcmp(q, dx, n * sizeof *q) == 0);
            give_back(p);
            give_back(q);
        }
    }
}

static void test_activation_edges(const moe_kernels *table) {
    static const int limit_above[MOE_ACT_COUNT] = {2, 2, 2, 1, 1, 2, 2, 3}; /* 2: infinite, 3: its slope too */
    static const int limit_below[MOE_ACT_COUNT] = {0, 0, 0, -1, 0, -2, 0, 0};
    int act, lane;
    for (act = 0; act < MOE_ACT_COUNT; act++)
        for (lane = 0; lane < 10; lane++) {
            moe_real x[10] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, one[10] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, y[10], dx[10];
            x[lane] = INF;
            moe_activate(table, act, 10, x, y);
            moe_activate_backward(table, act, 10, x, one, dx);
            if (limit_above[act] >= 2)
                CHECK(same_real(y[lane], INF) && same_real(dx[lane], limit_above[act] == 2 ? 1 : INF));
            else CHECK(same_real(y[lane], (moe_real)limit_above[act]) && same_real(dx[lane], 0));
            x[lane] = -INF;
            moe_activate(table, act, 10, x, y);
            moe_activate_backward(table, act, 10, x, one, dx);
            if (limit_below[act] == -2) CHECK(y[lane] < 0 && !moe_is_finite(y[lane]));
            else {
                NEAR(y[lane], limit_below[act], 0);
                NEAR(dx[lane], 0, 0);
            }
            x[lane] = not_a_number();
            moe_activate(table, act, 10, x, y);
            moe_activate_backward(table, act, 10, x, one, dx);
            CHECK(is_nan(y[lane]) && moe_is_finite(y[(lane + 1) % 10]));
            if (act != MOE_ACT_RELU && act != MOE_ACT_IDENTITY) CHECK(is_nan(dx[lane]));
            x[lane] = 0;
            moe_activate(table, act, 10, x, y);
            moe_activate_backward(table, act, 10, x, one, dx);
            NEAR(y[lane], act == MOE_ACT_SIGMOID ? 0.5 : 0.0, 0);
            if (act == MOE_ACT_TANH) CHECK(same_real(y[lane], 0)); /* not -0 */
            if (act == MOE_ACT_RELU || act == MOE_ACT_RELU2) NEAR(dx[lane], 0, 0);
        }
}

/* An activation that does not exist acts as the identity. */
static void test_no_activation(const moe_kernels *table) {
    static const int acts[3] = {-1, MOE_ACT_COUNT, 1000};
    static const moe_real x[3] = {-2, 1, 3}, dy[3] = {5, 6, 7};
    static const moe_real times[3] = {2, 3, 4};
    moe_real y[3], dx[3], d_times[3];
    int i, j;
    for (i = 0; i < 3; i++) {
        moe_activate(table, acts[i], 3, x, y);
        moe_activate_backward(table, acts[i], 3, x, dy, dx);
        CHECK(memcmp(y, x, sizeof y) == 0 && memcmp(dx, dy, sizeof dx) == 0);
        moe_gated(table, acts[i], 1, 3, x, 3, times, 3, y, 3);
        moe_gated_backward(table, acts[i], 3, x, times, dy, dx, d_times);
        for (j = 0; j < 3; j++)
            CHECK(same_real(y[j], x[j] * times[j]) && same_real(dx[j], dy[j] * times[j]) &&
                  same_real(d_times[j], dy[j] * x[j]));
    }
}

/* m x n of act(x) times `times`: against the definition, and nothing beside the rows. in_place: 1 y
   is x, 2 y is times. */
static void check_gated(const moe_kernels *table, int act, size_t m, size_t n, int with_times, int in_place) {
    const size_t ldx = n + m % 3, ldt = n + (m + 1) % 3;
    const size_t ldy = in_place == 1 ? ldx : in_place == 2 ? ldt : n + (m + 2) % 3;
    moe_rng rng = {m * 100 + n};
    moe_real *x = make_matrix(&rng, m, n, ldx, 0), *times = make_matrix(&rng, m, n, ldt, 0);
    moe_real *alone = borrow(n);
    const size_t x_count = (m - 1) * ldx + n, t_count = (m - 1) * ldt + n;
    const size_t count = (m - 1) * ldy + n;
    moe_real *x_before = borrow(x_count), *t_before = borrow(t_count);
    moe_real *y = in_place == 1 ? x : in_place == 2 ? times : borrow(count);
    size_t i, j, wrong = 0;
    for (i = 0; i < x_count; i++) x[i] *= i % 5 == 0 ? 30 : 4;
    if (in_place == 0)
        for (i = 0; i < count; i++) y[i] = -7;
    memcpy(x_before, x, x_count * sizeof *x);
    memcpy(t_before, times, t_count * sizeof *times);
    moe_gated(table, act, m, n, x, ldx, with_times ? times : NULL, ldt, y, ldy);
    for (i = 0; i < m; i++) {
        moe_activate(table, act, n, x_before + i * ldx, alone);
        for (j = 0; j < n; j++) {
            const wide value = (wide)x_before[i * ldx + j], factor = with_times ? (wide)t_before[i * ldt + j] : 1;
            const wide want = act_reference(act, value) * factor;
            const wide bound = (act_bound(table, act, value) + 1) * (wide)EPSILON * absolute(want) + 70 * (wide)TINIEST;
            if (!(absolute((wide)y[i * ldy + j] - want) <= bound)) wrong++;
            if (!with_times && !same_real(y[i * ldy + j], alone[j])) wrong++;
        }
        for (j = n; j < ldy && i + 1 < m; j++) {
            const moe_real kept = in_place == 1 ? x_before[i * ldx + j] : in_place == 2 ? t_before[i * ldt + j] : -7;
            if (!same_real(y[i * ldy + j], kept)) wrong++;
        }
    }
    if (in_place != 1 && memcmp(x, x_before, x_count * sizeof *x) != 0) wrong++;
    if (in_place != 2 && memcmp(times, t_before, t_count * sizeof *times) != 0) wrong++;
    if (!CHECK(wrong == 0) && test_shown)
        printf("    table %s act %d m %lu n %lu times %d in place %d: %lu wrong\n", table->name, act, (unsigned long)m,
               (unsigned long)n, with_times, in_place, (unsigned long)wrong);
    if (in_place == 0) give_back(y);
    give_back(x);
    give_back(times);
    give_back(alone);
    give_back(x_before);
    give_back(t_before);
}

static void test_gated(const moe_kernels *table) {
    size_t n, m;
    int act;
    for (act = 0; act < MOE_ACT_COUNT; act++) {
        for (n = 1; n <= 140; n += n < 70 && !quick ? 1 : 7)
            for (m = 1; m <= 4; m++) {
                check_gated(table, act, m, n, 0, 0);
                check_gated(table, act, m, n, 0, 1);
                check_gated(table, act, m, n, 1, 0);
                check_gated(table, act, m, n, 1, 1);
                check_gated(table, act, m, n, 1, 2);
            }
        for (n = 0; n < 10; n++) { /* NaN in either operand comes through and stays in its place */
            moe_real x[10] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, times[10] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, y[10], z[10];
            x[n] = not_a_number();
            times[9 - n] = not_a_number();
            moe_gated(table, act, 2, 5, x, 5, times, 5, y, 5);
            moe_gated(table, act, 2, 5, x, 5, NULL, 0, z, 5);
            for (m = 0; m < 10; m++) CHECK(is_nan(y[m]) == (m == n || m == 9 - n) && is_nan(z[m]) == (m == n));
            y[0] = 5;
            moe_gated(table, act, 0, 5, x, 5, times, 5, y, 5);
            moe_gated(table, act, 3, 0, x, 5, times, 5, y, 5);
            CHECK(same_real(y[0], 5));
        }
    }
}

/* Against the two backward functions it is made of. over: 1 dx is dy, 2 d_times is dy. */
static void check_gated_backward(const moe_kernels *table, int act, size_t n, int over) {
    moe_rng rng = {n};
    moe_real *x = make_matrix(&rng, 1, n, n + 1, 0), *times = make_matrix(&rng, 1, n, n + 1, 0);
    moe_real *dy = make_matrix(&rng, 1, n, n + 1, 0);
    moe_real *in = make_matrix(&rng, 1, n, n + 1, 0), *out = borrow(n);
    moe_real *kept = borrow(n);
    moe_real *dx = over == 1 ? dy : borrow(n), *d_times = over == 2 ? dy : borrow(n);
    size_t i;
    for (i = 0; i < n; i++) {
        x[i] *= i % 5 == 0 ? 30 : 4;
        in[i] = dy[i] * times[i];
        kept[i] = dy[i];
    }
    moe_activate_backward(table, act, n, x, in, in);
    moe_activate(table, act, n, x, out);
    moe_gated_backward(table, act, n, x, times, dy, dx, d_times);
    for (i = 0; i < n; i++) {
        const wide d_in = (wide)in[i], d_out = (wide)out[i] * (wide)kept[i];
        NEAR(dx[i], d_in, 4 * (wide)EPSILON * absolute(d_in) + 2 * (wide)TINIEST);
        NEAR(d_times[i], d_out, 3 * (wide)EPSILON * absolute(d_out) + 2 * (wide)TINIEST);
    }
    if (over == 0) CHECK(memcmp(dy, kept, n * sizeof *dy) == 0);
    if (over != 1) give_back(dx);
    if (over != 2) give_back(d_times);
    give_back(x);
    give_back(times);
    give_back(dy);
    give_back(in);
    give_back(out);
    give_back(kept);
}

static void test_gated_backward(const moe_kernels *table) {
    size_t n;
    int act;
    for (act = 0; act < MOE_ACT_COUNT; act++)
        for (n = 0; n <= 200; n += n < 70 ? 1 : 13) {
            check_gated_backward(table, act, n, 0);
            check_gated_backward(table, act, n, 1);
            check_gated_backward(table, act, n, 2);
        }
}

/* m and v against their formulas, w against its own with the m and v that came out. */
static void check_adamw(const moe_kernels *table, const moe_adamw_step *step, size_t n) {
    moe_rng rng = {n};
    moe_real *gradient = make_matrix(&rng, 1, n, n + 1, 0);
    moe_real *m = make_matrix(&rng, 1, n, n + 1, 0), *v = borrow(n);
    moe_real *w = make_matrix(&rng, 1, n, n + 1, 0);
    moe_real *old_m = borrow(n), *old_v = borrow(n);
    moe_real *old_w = borrow(n);
    size_t i;
    for (i = 0; i < n; i++) {
        v[i] = i % 7 == 3 ? 0 : moe_rng_uniform(&rng);
        if (i % 7 == 3) gradient[i] = m[i] = 0; /* so starts a weight that gets no gradient */
        old_m[i] = m[i];
        old_v[i] = v[i];
        old_w[i] = w[i];
    }
    moe_adamw(table, step, n, gradient, m, v, w);
    for (i = 0; i < n; i++) {
        const wide g = (wide)step->scale * (wide)gradient[i], eps = (wide)EPSILON;
        const wide rate = (wide)step->lr, decay = (wide)step->weight_decay;
        const wide kept = (wide)step->beta1 * (wide)old_m[i], taken = (1 - (wide)step->beta1) * g;
        const wide second = (wide)step->beta2 * (wide)old_v[i] + (1 - (wide)step->beta2) * g * g;
        const wide way = (wide)m[i] * (wide)step->correction1 /
                         (WF(sqrt)((wide)v[i] * (wide)step->correction2) + (wide)step->epsilon);
        moe_real alone_m = old_m[i], alone_v = old_v[i];
        moe_real alone_w = old_w[i];
        NEAR(m[i], kept + taken, 3 * eps * (absolute(kept) + absolute(taken)));
        NEAR(v[i], second, 5 * eps * second);
        NEAR(w[i], (wide)old_w[i] - rate * (way + decay * (wide)old_w[i]),
             6 * eps * rate * (absolute(way) + decay * absolute((wide)old_w[i])) + eps * absolute((wide)old_w[i]));
        if (i % 7 == 3 && !(step->weight_decay > 0)) CHECK(same_real(w[i], old_w[i]));
        moe_adamw(table, step, 1, gradient + i, &alone_m, &alone_v, &alone_w);
        CHECK(same_real(alone_m, m[i]) && same_real(alone_v, v[i]) && same_real(alone_w, w[i]));
    }
    give_back(gradient);
    give_back(m);
    give_back(v);
    give_back(w);
    give_back(old_m);
    give_back(old_v);
    give_back(old_w);
}

static void test_adamw(const moe_kernels *table) {
    const moe_adamw_step first = {1, MOEI_R(0.001), MOEI_R(0.9), MOEI_R(0.999), MOEI_R(1e-8), 0, 10, 1000};
    const moe_adamw_step later = {MOEI_R(0.3),  MOEI_R(0.05), MOEI_R(0.8),  MOEI_R(0.95),
                                  MOEI_R(1e-3), MOEI_R(0.1),  MOEI_R(1.01), MOEI_R(1.25)};
    size_t n;
    for (n = 0; n <= 200; n += n < 70 ? 1 : 13) {
        check_adamw(table, &first, n);
        check_adamw(table, &later, n);
    }
}

static void test_scalars(void) {
    int i;
    for (i = -2000; i <= 2000; i++) {
        const moe_real x = (moe_real)i * MOEI_R(0.0553);
        const wide plus = (x > 0 ? (wide)x : 0) + WF(log1p)(WF(exp)(-absolute((wide)x)));
        const wide sigmoid = 1 / (1 + WF(exp)(-(wide)x));
        NEAR(moei_softplus(x), plus, 3 * (wide)EPSILON * plus + 2 * (wide)TINIEST);
        NEAR(moe_sigmoid(x), sigmoid, 3 * (wide)EPSILON * sigmoid + 2 * (wide)TINIEST);
    }
    CHECK(same_real(moei_softplus(MOEI_R(1e4)), MOEI_R(1e4)) && same_real(moei_softplus(-MOEI_R(1e4)), 0));
    CHECK(!moe_is_finite(moei_softplus(INF)) && same_real(moei_softplus(-INF), 0) &&
          is_nan(moei_softplus(not_a_number())));
    CHECK(same_real(moe_sigmoid(INF), 1) && same_real(moe_sigmoid(-INF), 0) && is_nan(moe_sigmoid(not_a_number())));
    CHECK(moe_is_finite(0) && moe_is_finite(MOEI_R(3e38)) && moe_is_finite((moe_real)TINIEST));
    CHECK(!moe_is_finite(INF) && !moe_is_finite(-INF) && !moe_is_finite(not_a_number()));
}

/* ---- softmax ---- */

static void test_softmax(const moe_kernels *table) {
    static const moe_real temperatures[] = {1, MOEI_R(0.5), 3}, scales[] = {1, 30, 1000};
    size_t n, i, t;
    for (n = 0; n <= 67; n++)
        for (t = 0; t < 9; t++) {
            const moe_real temperature = temperatures[t % 3], scale = scales[t / 3];
            moe_rng rng = {n * 9 + t};
            moe_real *x = make_matrix(&rng, 1, n, n + 1, 0), *y = borrow(n);
            moe_real *dy = make_matrix(&rng, 1, n, n + 1, 0), *dx = borrow(n);
            wide max = -W(1e30), sum = 0;
            wide mean = 0;
            for (i = 0; i < n; i++) {
                x[i] *= scale;
                dx[i] = 1;
                if ((wide)x[i] > max) max = (wide)x[i];
            }
            if (n > 3) x[n / 2] = -INF;
            for (i = 0; i < n; i++) sum += WF(exp)(((wide)x[i] - max) / (wide)temperature);
            if (n > 3 && !(sum >= 1)) { /* the maximum was the one replaced */
                for (max = -W(1e30), sum = 0, i = 0; i < n; i++)
                    if ((wide)x[i] > max) max = (wide)x[i];
                for (i = 0; i < n; i++) sum += WF(exp)(((wide)x[i] - max) / (wide)temperature);
            }
            moe_softmax(table, n, x, temperature, y);
            for (i = 0; i < n; i++) {
                const wide z = (max - (wide)x[i]) / (wide)temperature, want = WF(exp)(-z) / sum;
                if (!moe_is_finite(x[i])) CHECK(same_real(y[i], 0));
                else NEAR(y[i], want, ((wide)n + 6 + 2 * z) * (wide)EPSILON * want + 2 * (wide)TINIEST);
                mean += (wide)y[i] * (wide)dy[i];
            }
            moe_softmax_backward(n, y, dy, temperature, dx);
            for (i = 0; i < n; i++)
                NEAR(dx[i], 1 + (wide)y[i] * ((wide)dy[i] - mean) / (wide)temperature,
                     ((wide)n + 8) * 2 * (wide)EPSILON);
            moe_softmax(table, n, x, temperature, x);
            CHECK(n == 0 || memcmp(x, y, n * sizeof *x) == 0);
            give_back(x);
            give_back(y);
            give_back(dy);
            give_back(dx);
        }
}

static void test_softmax_edges(const moe_kernels *table) {
    size_t n, i, at;
    for (n = 1; n <= 20; n++)
        for (at = 0; at < n; at++) {
            moe_real x[20], y[20];
            int zeros = 1, nans = 1;
            for (i = 0; i < n; i++) x[i] = -INF;
            moe_softmax(table, n, x, 1, y);
            for (i = 0; i < n; i++) zeros &= same_real(y[i], 0);
            CHECK(zeros);
            x[at] = MOEI_R(-3e38); /* far down, but the only one there is */
            moe_softmax(table, n, x, MOEI_R(0.01), y);
            for (i = 0; i < n; i++) zeros &= same_real(y[i], i == at ? 1 : 0);
            CHECK(zeros);
            for (i = 0; i < n; i++) x[i] = i == at ? MOEI_R(3e38) : MOEI_R(-3e38);
            moe_softmax(table, n, x, MOEI_R(0.5), y);
            for (i = 0; i < n; i++) zeros &= same_real(y[i], i == at ? 1 : 0);
            CHECK(zeros);
            for (i = 0; i < n; i++) x[i] = (moe_real)i;
            x[at] = not_a_number();
            moe_softmax(table, n, x, 1, y);
            for (i = 0; i < n; i++) nans &= is_nan(y[i]);
            x[at] = INF;
            moe_softmax(table, n, x, 1, y);
            for (i = 0; i < n; i++) nans &= is_nan(y[i]);
            for (i = 0; i < n; i++) x[i] = -INF;
            x[at] = not_a_number();
            moe_softmax(table, n, x, 1, y);
            for (i = 0; i < n; i++) nans &= is_nan(y[i]);
            CHECK(nans);
        }
}

/* ---- rows: products, spreads, a softmax in steps, entropy ---- */

static void test_rows(const moe_kernels *table) {
    size_t n, i, j;
    for (n = 0; n <= 67; n++) {
        const size_t count = 1 + n % 9, stride = n + n % 4 + 1;
        const int squared = (int)(n / 2 % 2);
        moe_rng rng = {n};
        moe_real *a = make_matrix(&rng, 1, n, n + 1, 0), *b = make_matrix(&rng, 1, n, n + 1, 0);
        moe_real *y = borrow(n);
        moe_real *x = make_matrix(&rng, count, n, stride, 0);
        int32_t rows[9];
        /* in any order, some more than once */
        for (i = 0; i < count; i++) rows[i] = (int32_t)moe_rng_below(&rng, count);
        moei_multiply(table, n, a, b, y);
        for (j = 0; j < n; j++) NEAR(y[j], (wide)a[j] * (wide)b[j], (wide)EPSILON * absolute((wide)y[j]));
        moei_multiply(table, n, a, b, b);
        CHECK(n == 0 || memcmp(b, y, n * sizeof *y) == 0);
        moei_dispersion(table, squared, count, rows, n, x, stride, a, y);
        for (j = 0; j < n; j++) {
            wide sum = 0;
            for (i = 0; i < count; i++) {
                const wide off = absolute((wide)x[(size_t)rows[i] * stride + j] - (wide)a[j]);
                sum += squared ? off * off : off;
            }
            NEAR(y[j], sum / (wide)count, ((wide)count + 4) * (wide)EPSILON * 4);
        }
        moei_dispersion(table, squared, count, rows, n, x, stride, a, a);
        CHECK(n == 0 || memcmp(a, y, n * sizeof *y) == 0);
        give_back(a);
        give_back(b);
        give_back(y);
        give_back(x);
    }
}

/* Weights of all sizes; about a third count as nothing. */
static moe_real random_prior(moe_rng *rng) {
    const moe_real u = moe_rng_uniform(rng) + MOEI_R(0.001);
    switch (moe_rng_below(rng, 12)) {
    case 0: return 0;
    case 1: return -u;
    case 2: return not_a_number();
    case 3: return -INF;
    case 4: return u * (moe_real)SMALLEST; /* subnormal */
    case 5: return (moe_real)TINIEST;
    case 6: return u * MOEI_R(1e30);
    case 7: return 1;
    case 8: return 1 - u / 1024;
    default: return u;
    }
}

static void test_posterior(const moe_kernels *table) {
    size_t n, i;
    int kind;
    for (n = 0; n <= 67; n++)
        for (kind = 0; kind < 8; kind++) {
            const moe_real scale = kind / 4 ? MOEI_R(0.75) : 40;
            moe_rng rng = {n * 8 + (size_t)kind};
            moe_real *y = make_matrix(&rng, 1, n, n + 1, 0);
            moe_real *shift = make_matrix(&rng, 1, n, n + 1, 0), *prior = borrow(n);
            moe_real *before = borrow(n), max, most = -INF, sum;
            wide total = 0;
            for (i = 0; i < n; i++) {
                prior[i] = random_prior(&rng);
                before[i] = y[i];
            }
            max = moei_log_posterior(table, n, scale, kind & 1 ? shift : NULL, kind & 2 ? prior : NULL, y);
            for (i = 0; i < n; i++) {
                const wide near = (wide)scale * ((wide)before[i] - (kind & 1 ? (wide)shift[i] : 0));
                const wide far = prior[i] > 0 ? WF(log)((wide)prior[i]) : 0;
                if (y[i] > most) most = y[i];
                if ((kind & 2) && !(prior[i] > 0)) CHECK(same_real(y[i], -INF));
                else if (kind & 2) NEAR(y[i], near + far, 3 * (wide)EPSILON * (absolute(near) + absolute(far)));
                else NEAR(y[i], near, 2 * (wide)EPSILON * absolute(near));
                before[i] = y[i];
            }
            CHECK(same_real(max, most));
            if (max > -INF) {
                sum = moei_exp_sum(table, n, max, y);
                for (i = 0; i < n; i++) {
                    const wide z = (wide)max - (wide)before[i], want = before[i] > -INF ? WF(exp)(-z) : 0;
                    if (!(before[i] > -INF)) CHECK(same_real(y[i], 0));
                    else NEAR(y[i], want, (3 + z) * (wide)EPSILON * want + (wide)SMALLEST);
                    total += (wide)y[i];
                }
                NEAR(sum, total, (wide)n * (wide)EPSILON * total);
            }
            give_back(y);
            give_back(shift);
            give_back(prior);
            give_back(before);
        }
}

static void test_posterior_edges(const moe_kernels *table) {
    size_t n, at, i;
    for (n = 1; n <= 20; n++)
        for (at = 0; at < n; at++) {
            moe_real y[20], prior[20];
            int good = 1;
            for (i = 0; i < n; i++) {
                y[i] = 1;
                prior[i] = 0;
            }
            CHECK(same_real(moei_log_posterior(table, n, 2, y, prior, y), -INF));
            for (i = 0; i < n; i++) good &= same_real(y[i], -INF);
            CHECK(same_real(moei_exp_sum(table, n, 0, y), 0));
            for (i = 0; i < n; i++) good &= same_real(y[i], 0);
            /* far below the maximum: nothing, and no more than that */
            for (i = 0; i < n; i++) {
                y[i] = -200;
                prior[i] = 1;
            }
            y[at] = 3;
            CHECK(same_real(moei_exp_sum(table, n, 3, y), 1));
            for (i = 0; i < n; i++) good &= MOE_REAL_IS_DOUBLE || same_real(y[i], i == at ? 1 : 0);
            for (i = 0; i < n; i++) y[i] = 1;
            y[at] = not_a_number();
            (void)moei_log_posterior(table, n, 2, NULL, prior, y);
            good &= is_nan(y[at]) && is_nan(moei_exp_sum(table, n, 2, y));
            for (i = 0; i < n; i++) y[i] = 1;
            prior[at] = INF;
            CHECK(same_real(moei_log_posterior(table, n, 2, NULL, prior, y), INF));
            CHECK(good);
        }
}

static void test_entropy(const moe_kernels *table) {
    size_t n, i;
    for (n = 0; n <= 67; n++) {
        moe_rng rng = {n};
        moe_real *p = borrow(n);
        wide want = 0, size = 0;
        for (i = 0; i < n; i++) {
            p[i] = random_prior(&rng);
            if (p[i] > 2) p[i] = MOEI_R(0.25);
            if (p[i] > 0) want -= (wide)p[i] * WF(log)((wide)p[i]);
            if (p[i] > 0) size += absolute((wide)p[i] * WF(log)((wide)p[i]));
        }
        NEAR(moei_row_entropy(table, n, p), want,
             ((wide)n + 4) * (wide)EPSILON * size + (wide)n * 1000 * (wide)SMALLEST);
        for (i = 0; i < n; i++) p[i] = (moe_real)(i % 2); /* sure of every one of them */
        CHECK(same_real(moei_row_entropy(table, n, p), 0));
        for (i = 0; i < n; i++) p[i] = MOEI_R(1.0) / (moe_real)n;
        if (n > 0) NEAR(moei_row_entropy(table, n, p), WF(log)((wide)n), 8 * (wide)EPSILON * (1 + WF(log)((wide)n)));
        give_back(p);
    }
}

static void test_log_sum_exp(void) {
    const moe_real pair[2] = {0, MOEI_R(-20.0)}, huge[3] = {MOEI_R(1e30), MOEI_R(1e30), 0};
    const moe_real low[2] = {-INF, -INF};
    const moe_real mixed[3] = {-INF, 2, -INF}, top[3] = {INF, 1, INF};
    const moe_real bad[3] = {1, not_a_number(), 2}, worse[2] = {INF, not_a_number()};
    moe_rng rng = {5};
    size_t n, i;
    NEAR(moe_log_sum_exp(2, pair), WF(log1p)(WF(exp)(-W(20.0))), 3 * (wide)EPSILON * W(2.1e-9));
    NEAR(moe_log_sum_exp(3, huge), W(1e30), W(1e30) * 2 * (wide)EPSILON);
    CHECK(same_real(moe_log_sum_exp(0, NULL), -INF) && same_real(moe_log_sum_exp(2, low), -INF));
    CHECK(same_real(moe_log_sum_exp(3, mixed), 2) && same_real(moe_log_sum_exp(3, top), INF));
    CHECK(is_nan(moe_log_sum_exp(3, bad)) && is_nan(moe_log_sum_exp(2, worse)) && is_nan(moe_log_sum_exp(1, bad + 1)));
    for (n = 1; n <= 67; n++) {
        moe_real *x = make_matrix(&rng, 1, n, n + 1, 0);
        wide sum = 0;
        for (i = 0; i < n; i++) sum += WF(exp)((wide)x[i]);
        NEAR(moe_log_sum_exp(n, x), WF(log)(sum), ((wide)n + 4) * (wide)EPSILON);
        give_back(x);
    }
}

/* ---- norms ---- */

/* sum_i dy_i y_i for the layer norm (centered) or the rms norm of x: its slope is what the backward
   pass gives. */
static wide norm_reference(int centered, size_t n, const wide *x, const wide *gain, const moe_real *dy, wide eps,
                           wide *y) {
    wide mean = 0, squares = 0;
    wide total = 0, scale;
    size_t i;
    for (i = 0; centered && i < n; i++) mean += x[i] / (wide)n;
    for (i = 0; i < n; i++) squares += (x[i] - mean) * (x[i] - mean) / (wide)n;
    scale = 1 / WF(sqrt)(squares + eps);
    for (i = 0; i < n; i++) {
        const wide value = (x[i] - mean) * scale * gain[i];
        if (y != NULL) y[i] = value;
        total += value * (wide)dy[i];
    }
    return total;
}

static wide norm_slope(int centered, size_t n, wide *x, wide *gain, const moe_real *dy, wide eps, wide *moved) {
    const wide h = W(1e-4), kept = *moved;
    wide up, down;
    *moved = kept + h;
    up = norm_reference(centered, n, x, gain, dy, eps, NULL);
    *moved = kept - h;
    down = norm_reference(centered, n, x, gain, dy, eps, NULL);
    *moved = kept;
    return (up - down) / (2 * h);
}

static void test_norm(int centered, size_t n, int with_gain) {
    const moe_real eps = MOEI_R(1e-5);
    const wide bound = (wide)(n + 20) * 4 * (wide)EPSILON;
    moe_rng rng = {n};
    moe_real *x = make_matrix(&rng, 1, n, n + 1, 0), *dy = make_matrix(&rng, 1, n, n + 1, 0);
    moe_real *gain = make_matrix(&rng, 1, n, n + 1, 0);
    moe_real *y = borrow(n), *dx = borrow(n);
    moe_real *dgain = borrow(n), *dbias = borrow(n);
    moe_real mean = 0, scale = 0;
    enum { LONGEST_NORM = 600 }; /* the backward pass takes pieces of 256 */
    wide wx[LONGEST_NORM], wgain[LONGEST_NORM], wy[LONGEST_NORM], steep;
    size_t i;
    for (i = 0; i < n; i++) {
        dx[i] = dgain[i] = dbias[i] = 2;
        x[i] += MOEI_R(0.5);
        wx[i] = (wide)x[i];
        wgain[i] = with_gain ? (wide)gain[i] : 1;
    }
    norm_reference(centered, n, wx, wgain, dy, (wide)eps, wy);
    if (centered) {
        moe_layer_norm(n, x, with_gain ? gain : NULL, with_gain ? dy : NULL, eps, y, &mean, &scale);
        moe_layer_norm_backward(n, x, with_gain ? gain : NULL, mean, scale, dy, dx, dgain, dbias);
    } else {
        moe_rms_norm(n, x, with_gain ? gain : NULL, eps, y, &scale);
        moe_rms_norm_backward(n, x, with_gain ? gain : NULL, scale, dy, dx, dgain);
    }
    steep = 4 * (1 + (wide)scale) * (1 + (wide)scale);
    for (i = 0; i < n; i++) {
        NEAR(y[i], wy[i] + (centered && with_gain ? (wide)dy[i] : 0), bound * (1 + (wide)scale));
        NEAR(dx[i], 2 + norm_slope(centered, n, wx, wgain, dy, (wide)eps, &wx[i]), (bound + W(1e-6)) * steep);
        NEAR(dgain[i], 2 + norm_slope(centered, n, wx, wgain, dy, (wide)eps, &wgain[i]),
             (bound + W(1e-8)) * (2 + (wide)scale));
        if (centered) NEAR(dbias[i], 2 + (wide)dy[i], 4 * (wide)EPSILON);
    }
    /* in place, and with everything optional left out */
    if (centered) moe_layer_norm(n, x, with_gain ? gain : NULL, with_gain ? dy : NULL, eps, x, NULL, NULL);
    else moe_rms_norm(n, x, with_gain ? gain : NULL, eps, x, NULL);
    CHECK(memcmp(x, y, n * sizeof *x) == 0);
    moe_layer_norm_backward(n, x, NULL, mean, scale, dy, NULL, NULL, NULL);
    moe_rms_norm_backward(n, x, NULL, scale, dy, NULL, NULL);
    give_back(x);
    give_back(dy);
    give_back(gain);
    give_back(y);
    give_back(dx);
    give_back(dgain);
    give_back(dbias);
}

static void test_norms(void) {
    moe_real constant[4] = {3, 3, 3, 3}, y[4];
    moe_real mean = 1, scale = 1;
    size_t n;
    for (n = 1; n <= 67; n++) {
        test_norm(0, n, 0);
        test_norm(0, n, 1);
        test_norm(1, n, 0);
        test_norm(1, n, 1);
    }
    test_norm(0, 300, 1);
    test_norm(0, 600, 0);
    test_norm(0, 600, 1);
    moe_layer_norm(4, constant, NULL, NULL, MOEI_R(1e-5), y, &mean, &scale); /* no variance: 0, not NaN */
    NEAR(y[2], 0, 0);
    NEAR(mean, 3, 0);
    /* what overflows is the sum of squares, or already that of x */
    constant[0] = MOE_REAL_IS_DOUBLE ? (moe_real)9e153 : (moe_real)1e19;
    constant[1] = -constant[0];
    moe_layer_norm(2, constant, NULL, NULL, MOEI_R(1e-5), y, NULL, NULL);
    NEAR(y[1], -1, 1e-6);
    constant[1] = -3 * constant[0];
    moe_layer_norm(2, constant, NULL, NULL, MOEI_R(1e-5), y, NULL, &scale);
    CHECK(same_real(scale, 0) && !(y[0] < 0 || y[0] > 0) && y[0] - y[0] >= 0);
    constant[0] = constant[1] = MOE_REAL_IS_DOUBLE ? (moe_real)1e308 : (moe_real)3e38;
    moe_layer_norm(2, constant, NULL, NULL, MOEI_R(1e-5), y, NULL, NULL);
    CHECK(!(y[0] - y[0] >= 0));
    moe_layer_norm(0, NULL, NULL, NULL, MOEI_R(1e-5), NULL, &mean, &scale);
    CHECK(same_real(mean, 0) && same_real(scale, 0));
    moe_rms_norm(0, NULL, NULL, MOEI_R(1e-5), NULL, &scale);
    CHECK(same_real(scale, 0));
}

/* ---- top-k ---- */

/* Takes the best that is left, k times. */
static size_t top_k_reference(size_t n, const moe_real *score, size_t k, int32_t *index) {
    char used[80] = {0};
    size_t taken, i;
    for (taken = 0; taken < k; taken++) {
        size_t best = n;
        for (i = 0; i < n; i++)
            if (!used[i] && !is_nan(score[i]) && score[i] > -INF && (best == n || score[i] > score[best])) best = i;
        if (best == n) break;
        used[best] = 1;
        index[taken] = (int32_t)best;
    }
    return taken;
}

static void test_top_k(void) {
    moe_rng rng = {17};
    int round;
    for (round = 0; round < 4000; round++) {
        const size_t n = (size_t)moe_rng_below(&rng, 70), k = (size_t)moe_rng_below(&rng, n + 4);
        moe_real *score = borrow(n);
        int32_t got[80], want[80];
        size_t i, taken;
        for (i = 0; i < n; i++) {
            const uint64_t kind = moe_rng_below(&rng, 12);
            score[i] = kind == 0   ? not_a_number()
                       : kind == 1 ? -INF
                       : kind == 2 ? INF
                       : kind < 8  ? (moe_real)kind
                                   : random_real(&rng);
        }
        for (i = 0; i < 80; i++) got[i] = want[i] = -7;
        taken = moe_top_k(n, score, k, got);
        CHECK(taken == top_k_reference(n, score, k, want) && memcmp(got, want, sizeof got) == 0);
        give_back(score);
    }
    CHECK(moe_top_k(0, NULL, 3, NULL) == 0 && moe_top_k(3, NULL, 0, NULL) == 0);
}

/* ---- random numbers ---- */

/* The documented formula in floating point. */
static wide normal_reference(moe_rng *rng) {
    wide r = 0, q;
    int i;
    for (i = 0; i < 6; i++) {
        const uint64_t draw = moe_rng_next(rng);
        r += ((wide)(draw >> 32) + W(0.5)) / W(4294967296.0) + ((wide)(draw & 0xffffffffu) + W(0.5)) / W(4294967296.0);
    }
    r = (r - 6) / 4;
    q = r * r;
    return r *
           (W(3.949846138) + q * (W(0.252408784) + q * (W(0.076542912) + q * (W(0.008355968) + q * W(0.029899776)))));
}

static void test_random(void) {
    enum { DRAWS = 200000 };
    static const wide pinned[3] = {-W(446544480.0), -W(1132953887.0), W(269100800.0)}; /* times 2^30 */
    moe_rng rng, other;
    double mean = 0, second = 0;
    double fourth = 0, uniform = 0;
    double low = 1, high = 0;
    uint64_t n;
    int i, counts[7] = {0};
    moe_rng_seed(&rng, 0);
    CHECK(moe_rng_next(&rng) == UINT64_C(0xe220a8397b1dcdaf));
    CHECK(moe_rng_next(&rng) == UINT64_C(0x6e789e6aa1b965f4));
    CHECK(moe_rng_next(&rng) == UINT64_C(0x06c45d188009454f));
    moe_rng_seed(&rng, 0);
    for (i = 0; i < 3; i++) CHECK(same_real(moe_rng_normal(&rng), (moe_real)(pinned[i] / 1073741824)));
    moe_rng_seed(&rng, 42);
    other = rng;
    for (i = 0; i < DRAWS; i++) {
        const moe_real x = moe_rng_normal(&rng);
        const wide want = normal_reference(&other);
        const double d = (double)x;
        NEAR(x, want, absolute(want) * (wide)EPSILON + W(2e-8));
        mean += d;
        second += d * d;
        fourth += d * d * d * d;
    }
    CHECK(rng.state == other.state); /* six draws each */
    mean /= DRAWS;
    second /= DRAWS;
    fourth /= DRAWS;
    NEAR(mean, 0, 0.01);
    NEAR(second, 1, 0.015);
    NEAR(fourth / (second * second), 3, 0.06);
    for (other = rng, i = 0; i < 100; i++) { /* the top bits of one draw */
        const uint64_t draw = moe_rng_next(&other) >> (MOE_REAL_IS_DOUBLE ? 11 : 40);
        CHECK((uint64_t)((double)moe_rng_uniform(&rng) * (MOE_REAL_IS_DOUBLE ? 9007199254740992.0 : 16777216.0)) ==
              draw);
    }
    for (i = 0; i < DRAWS; i++) {
        const double u = (double)moe_rng_uniform(&rng);
        uniform += u;
        low = u < low ? u : low;
        high = u > high ? u : high;
    }
    CHECK(low >= 0 && low < 1e-4 && high < 1 && high > 1 - 1e-4);
    NEAR(uniform / DRAWS, 0.5, 0.003);
    for (i = 0; i < 70000; i++) {
        const uint64_t draw = moe_rng_below(&rng, 7);
        CHECK(draw < 7);
        counts[draw % 7]++;
    }
    for (i = 0; i < 7; i++) NEAR(counts[i], 10000, 400);
    for (n = 1; n < UINT64_C(1) << 62; n = n * 3 + 1) CHECK(moe_rng_below(&rng, n) < n);
    CHECK(moe_rng_below(&rng, 0) == 0 && moe_rng_below(&rng, 1) == 0);
    /* every fourth draw has to be thrown away, or the lower third would come up every second
       time */
    n = UINT64_C(3) << 62;
    for (i = 0, counts[0] = 0; i < 9000; i++) counts[0] += moe_rng_below(&rng, n) < n / 3;
    NEAR(counts[0], 3000, 250);
}

/* ---- messages ---- */

static const char *real_text(moe_real value) {
    static char text[48];
    moei_text t;
    t.out = text;
    t.room = sizeof text;
    t.length = 0;
    moei_put_real(&t, value);
    return text;
}

static int parses(const char *text, moe_real want) {
    moe_real got = MOEI_R(-77.0);
    return moei_parse_real(text, strlen(text), &got) && same_real(got, want);
}

static void test_messages(void) {
    static const char *const refused[] = {"",   "-",  ".",    "+.",  "1e",  "1e+",   "e5",
                                          "1.2.3", "1 ", " 1", "0x10", "nan", "inf", "1e400", "-1e999999999999"};
    moe_error error;
    char narrow[5];
    moei_text t;
    moe_rng rng = {23};
    moe_real back;
    size_t i;
    CHECK(moei_error(&error, MOE_ERR_CONFIG, "top_k = %d: %s has %z, at %g %%", -3, "layer", (size_t)8, 0.25) ==
          MOE_ERR_CONFIG);
    CHECK(error.code == MOE_ERR_CONFIG && strcmp(error.message, "top_k = -3: layer has 8, at 0.25 %") == 0);
    CHECK(moei_error(NULL, MOE_ERR_IO, "%s", "nobody listens") == MOE_ERR_IO);
    moei_error(&error, MOE_ERR_IO, "%s%s", NULL, "x");
    CHECK(strcmp(error.message, "x") == 0);
    for (i = 0, error.message[0] = '\0'; i < 3; i++)
        moei_error(&error, MOE_ERR_FORMAT, "%s%s%s%s",
                   "0123456789012345678901234567890123456789012345678901234567890123456789",
                   "0123456789012345678901234567890123456789012345678901234567890123456789",
                   "0123456789012345678901234567890123456789012345678901234567890123456789",
                   "0123456789012345678901234567890123456789");
    CHECK(strlen(error.message) == sizeof error.message - 1);
    t.out = narrow;
    t.room = sizeof narrow;
    t.length = 0;
    moei_put(&t, "abcdefgh", 8);
    CHECK(strcmp(narrow, "abcd") == 0 && t.length == 4);
    CHECK(strcmp(real_text(0), "0") == 0 && strcmp(real_text(MOEI_R(0.01)), "0.01") == 0 &&
          strcmp(real_text(12), "12") == 0);
    CHECK(strcmp(real_text(MOEI_R(-1.5)), "-1.5") == 0 && strcmp(real_text(MOEI_R(1e-8)), "1e-8") == 0);
    CHECK(strcmp(real_text(INF), "inf") == 0 && strcmp(real_text(-INF), "-inf") == 0 &&
          strcmp(real_text(not_a_number()), "nan") == 0);
    CHECK(parses("0", 0) && parses("+12.50", MOEI_R(12.5)) && parses("-.5e1", -5) && parses("1e-2", MOEI_R(0.01)) &&
          parses("5.", 5));
    CHECK(parses("100000000000000000000", MOEI_R(1e20)) && parses("0.000000000000000000001", MOEI_R(1e-21)));
    CHECK(parses("1e-340", 0) && parses("12345678901234567890e-700", 0) && parses("-1e-999999999999", MOEI_R(-0.0)));
    CHECK(MOE_REAL_IS_DOUBLE || (parses("1e-300", 0) && parses("0.0001e-296", 0)));
    for (i = 0; i < sizeof refused / sizeof *refused; i++)
        CHECK(!moei_parse_real(refused[i], strlen(refused[i]), &back));
    for (i = 0; i < 3000; i++) {
        const moei_bits bits = (moei_bits)(moe_rng_next(&rng) >> 3);
        moe_real value;
        memcpy(&value, &bits, sizeof value);
        if (i < 1500) value = random_real(&rng) * (moe_real)(1 << (i % 20)); /* everyday sizes, then any bits at all */
        if (!moe_is_finite(value)) continue;
        back = 0;
        CHECK(moei_parse_real(real_text(value), strlen(real_text(value)), &back));
#if MOE_REAL_IS_DOUBLE /* the decimal tools compute in double, so the last places of a double may be lost */
        NEAR(back, value, absolute((wide)value) * 64 * (wide)EPSILON + (wide)TINIEST);
#else
        NEAR(back, value, 0);
#endif
    }
}

/* Whether the table has products of its own, and not those of AVX2 under another name. */
static int is_faster_than_avx2(const moe_kernels *table) {
    const moe_kernels *avx2 = moe_kernels_select(MOE_KERNELS_AVX2);
    return avx2 == NULL ||
           (table->matmul[MOE_MATMUL_NT][0] != avx2->matmul[MOE_MATMUL_NT][0] && table->panels != avx2->panels);
}

/* What the processor and the operating system can do, as the compiler's own library sees it. */
static void test_features(void) {
#if defined(__GNUC__) && !defined(__TINYC__) && (defined(__x86_64__) || defined(__i386__)) && !defined(MOE_NO_SIMD)
    const unsigned features = moe_cpu_features();
    CHECK(((features & MOE_CPU_AVX2) != 0) == (__builtin_cpu_supports("avx2") != 0));
    CHECK(((features & MOE_CPU_FMA) != 0) == (__builtin_cpu_supports("fma") != 0));
    CHECK(((features & MOE_CPU_AVX512F) != 0) == (__builtin_cpu_supports("avx512f") != 0));
    CHECK(((features & MOE_CPU_AVX512VNNI) != 0) == (__builtin_cpu_supports("avx512vnni") != 0));
#endif
}

static void test_constants(void) {
    static const char *const names[MOE_KERNELS_COUNT] = {"auto", "c", "avx2", "avx512", "neon", "wasm"};
    const unsigned features = moe_cpu_features();
    int id;
#define STATUS(name, value, text) CHECK(name == (value) && strcmp(moe_status_text(name), text) == 0);
    MOE_STATUS_LIST(STATUS)
    CHECK(strcmp(moe_status_text(1), "unknown status") == 0 && strcmp(moe_status_text(-99), "unknown status") == 0);
    CHECK(strcmp(moe_version(), MOE_VERSION) == 0);
    for (id = -2; id <= MOE_KERNELS_COUNT + 1; id++) {
        const moe_kernels *table = moe_kernels_select(id);
        const char *name = moe_kernels_name(id);
        const int known = id >= 0 && id < MOE_KERNELS_COUNT;
        CHECK(known ? name != NULL && strcmp(name, names[id]) == 0 : name == NULL);
        CHECK(known || table == NULL);
        if (id == MOE_KERNELS_AUTO || id == MOE_KERNELS_C) CHECK(table != NULL);
        if (table != NULL && id != MOE_KERNELS_AUTO) CHECK(table->id == id && strcmp(table->name, name) == 0);
        if (table != NULL)
            CHECK(table->matmul[0][0] && table->matmul[1][0] && table->matmul[2][0] && table->dot && table->axpy);
        if (table != NULL) CHECK(table->activate && table->activate_backward && table->softmax && table->multiply);
        if (table != NULL) CHECK(table->dispersion && table->log_posterior && table->exp_sum && table->entropy);
        if (table != NULL) CHECK(table->panels && table->gated && table->gated_backward && table->adamw);
        if (table != NULL && table->id == MOE_KERNELS_AVX2)
            CHECK((features & MOE_CPU_AVX2) && (features & MOE_CPU_FMA));
        if (table != NULL && table->id == MOE_KERNELS_AVX512)
            CHECK((features & MOE_CPU_AVX512F) && is_faster_than_avx2(table));
        if (table != NULL && table->id == MOE_KERNELS_NEON) CHECK(features & MOE_CPU_NEON);
        if (table != NULL && table->id == MOE_KERNELS_WASM) CHECK(features & MOE_CPU_WASM_SIMD);
    }
    CHECK(moe_kernels_select(MOE_KERNELS_AUTO) == moe_kernels_select(moe_kernels_select(MOE_KERNELS_AUTO)->id));
}

int main(int argc, char **argv) {
    int id;
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    CASE(test_features());
    CASE(test_constants());
    for (id = 1; id < MOE_KERNELS_COUNT; id++) {
        const moe_kernels *table = moe_kernels_select(id);
        if (table == NULL) continue;
        printf("table %s\n", table->name);
        CASE(test_products(table));
        CASE(test_row_independence(table));
        CASE(test_order(table));
        CASE(test_exact_across_tables(table));
        CASE(test_strides(table));
        CASE(test_panels(table));
        CASE(test_panel_rows(table));
        CASE(test_vectors(table));
        CASE(test_axpy_rows(table));
        CASE(test_activations(table));
        CASE(test_activation_edges(table));
        CASE(test_no_activation(table));
        CASE(test_gated(table));
        CASE(test_gated_backward(table));
        CASE(test_adamw(table));
        CASE(test_softmax(table));
        CASE(test_softmax_edges(table));
        CASE(test_rows(table));
        CASE(test_posterior(table));
        CASE(test_posterior_edges(table));
        CASE(test_entropy(table));
    }
    CASE(test_scalars());
    CASE(test_log_sum_exp());
    CASE(test_norms());
    CASE(test_top_k());
    CASE(test_random());
    CASE(test_messages());
    return test_end();
}
