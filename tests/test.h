/* test.h - what test programs share: cases, checks, memory that is counted and fails, random data.

     CASE(test_something());         runs a call as a case, named as it stands there
     test_case("a name");            begins a case, which ends where the next begins, or the program
     CHECK(condition);               a case passes if all its checks do; it is the condition's value
     CHECK(condition, "a text");     the text is printed when the check fails
     CHECKF(condition, "%d", i);     and so is this
     return test_end();              prints "N passed, N failed", which counts cases

   Included after the header of the library that the program tests; what needs more than that header
   is left out. A program may define TEST_LOCK and TEST_UNLOCK, when threads check, and TEST_PRINT,
   which prints failures. */
#ifndef TEST_H
#define TEST_H

#include <stdio.h>
#include <string.h>

#ifndef TEST_LOCK
#define TEST_LOCK (void)0
#define TEST_UNLOCK (void)0
#endif
#ifndef TEST_PRINT
#define TEST_PRINT(...) printf(__VA_ARGS__)
#endif

enum { TEST_SHOWN_OF_A_CASE = 5, TEST_SHOWN = 60 }; /* failed checks */

static const char *test_name = "";  /* of the case, or empty before the first */
static const char *test_about = ""; /* what is being checked, for messages; a program may set it */
static long test_passed, test_failed, test_skipped;
static long test_wrong; /* failed checks of this case */
static long test_right; /* its others */
static int test_shown;  /* whether the last failed check was printed */

static inline void test_case(const char *name) {
    if (test_wrong > 0) test_failed++;
    else if (test_right > 0) test_passed++;
    test_wrong = test_right = 0;
    test_name = name;
}

static inline int check_that(int good, const char *file, int line, const char *what, const char *more) {
    TEST_LOCK;
    if (good) test_right++;
    else {
        test_shown = test_wrong++ < TEST_SHOWN_OF_A_CASE && test_failed < TEST_SHOWN;
        if (test_shown) {
            TEST_PRINT("FAILED: %s:%d: %s", file, line, what);
            if (more[0] != '\0') TEST_PRINT(": %s", more);
            if (test_about[0] != '\0') TEST_PRINT(" [%s]", test_about);
            TEST_PRINT(" (%s)\n", test_name);
        }
    }
    TEST_UNLOCK;
    return good;
}

static inline int check_result(int good) { return good; }

static inline int test_end(void) {
    test_case("");
    printf("%ld passed, %ld failed", test_passed, test_failed);
    if (test_skipped > 0) printf(", %ld skipped", test_skipped);
    printf("\n");
    return test_failed > 0;
}

#define CASE(call) (test_case(#call), (void)(call))
#define CHECK(...) TEST_CHECK(__LINE__, __VA_ARGS__, "", 0)
#define CHECK_AT(line, ...) TEST_CHECK(line, __VA_ARGS__, "", 0) /* in functions that a macro calls with its line */
#define TEST_CHECK(line, condition, more, ...) check_that((condition) ? 1 : 0, __FILE__, line, #condition, more)
#define CHECKF(condition, ...) \
    check_result(CHECK(condition) || (test_shown && (TEST_PRINT("    " __VA_ARGS__), TEST_PRINT("\n")) < 0))

#if defined(MOE_KERNELS_H) && !defined(MOE_NO_FLOAT)
#include <math.h>
#include <stdlib.h>

/* Both are statuses. */
#define CHECK_STATUS(got, ...) CHECK_STATUS_AT(__LINE__, got, __VA_ARGS__)
#define CHECK_STATUS_AT(line, got, ...) TEST_STATUS(line, got, __VA_ARGS__, "", 0)
#define TEST_STATUS(line, got, wanted, more, ...) check_statuses(got, wanted, __FILE__, line, #got, more)

static inline int check_statuses(moe_status got, moe_status wanted, const char *file, int line, const char *what,
                              const char *more) {
    if (!check_that(got == wanted, file, line, what, more) && test_shown)
        TEST_PRINT("    got \"%s\", not \"%s\"\n", moe_status_text(got), moe_status_text(wanted));
    return got == wanted;
}

/* got is at most this far from wanted. */
#define CHECK_NEAR(got, wanted, bound) CHECK_NEAR_AT(__LINE__, got, wanted, bound, "")
#define CHECK_NEAR_AT(line, got, wanted, bound, more) \
    check_distance((double)(got), (double)(wanted), (double)(bound), __FILE__, line, #got, more)

static inline int check_distance(double got, double wanted, double bound, const char *file, int line, const char *what,
                            const char *more) {
    const int good = fabs(got - wanted) <= bound;
    if (!check_that(good, file, line, what, more) && test_shown)
        TEST_PRINT("    got %.17g, wanted %.17g, allowed error %.3g\n", got, wanted, bound);
    return good;
}

/* Memory full of zeros. */
static inline void *grab(size_t count, size_t size) {
    void *p = calloc(count > 0 ? count : 1, size);
    if (p == NULL) {
        fprintf(stderr, "out of memory\n");
        exit(2);
    }
    return p;
}

static inline moe_real *reals(size_t count) { return (moe_real *)grab(count, sizeof(moe_real)); }

static inline moe_real *normals_of(moe_rng *rng, size_t count, double scale) {
    moe_real *v = reals(count);
    size_t i;
    for (i = 0; i < count; i++) v[i] = (moe_real)scale * moe_rng_normal(rng);
    return v;
}

static inline int same_bits(const void *a, const void *b, size_t n) { return n == 0 || memcmp(a, b, n) == 0; }
static inline int same_reals(const moe_real *a, const moe_real *b, size_t n) { return same_bits(a, b, n * sizeof *a); }
static inline int near_to(double a, double b, double tolerance) { return fabs(a - b) <= tolerance * (1.0 + fabs(b)); }
#endif

#if defined(MOE_ROUTERS_H) && !defined(MOE_NO_FLOAT)
#define TEST_AT_MOST_K(value, name, select, flags, traits) ((flags) & MOEI_SELECT_AT_MOST_K) != 0,

/* The most choices that a token may have at any step, which is the length of a row of given. */
static inline size_t most_choices(const moe_router_config *c) {
    static const int at_most_k[] = {MOE_SELECTS(TEST_AT_MOST_K)};
    const int switches = c->switch_at > 0 || c->switch_share > 0;
    if (!at_most_k[c->select] || (switches && !at_most_k[c->switch_from])) return (size_t)c->n_experts;
    return (size_t)(c->k_end > c->top_k ? c->k_end : c->top_k);
}
#endif

#if defined(MOE_H) && !defined(MOE_NO_FLOAT)
/* A heap that counts, moves every block that changes its size, and knows its size. */
typedef struct test_heap {
    long calls;     /* that wanted memory */
    long fail_at;   /* the number of the call that fails, from 1; 0: none */
    int fail_on;    /* all calls after it fail too */
    long blocks;    /* in use */
    size_t bytes;   /* in use */
    int wrong_size; /* a block came back with another size */
} test_heap;

static inline void *test_resize(void *ctx, void *block, size_t old_size, size_t new_size) {
    enum { BEFORE = 16 }; /* the block's size stands in front of it */
    test_heap *heap = (test_heap *)ctx;
    unsigned char *base = block != NULL ? (unsigned char *)block - BEFORE : NULL;
    unsigned char *made = NULL;
    size_t size = 0;
    if (base != NULL) memcpy(&size, base, sizeof size);
    if (size != old_size) heap->wrong_size = 1;
    if (new_size > 0) {
        heap->calls++;
        if (heap->calls == heap->fail_at) return NULL;
        if (heap->fail_on && heap->fail_at > 0 && heap->calls > heap->fail_at) return NULL;
        made = new_size <= SIZE_MAX - BEFORE ? (unsigned char *)malloc(BEFORE + new_size) : NULL;
        if (made == NULL) return NULL;
        memcpy(made, &new_size, sizeof new_size);
        if (base != NULL) memcpy(made + BEFORE, block, size < new_size ? size : new_size);
    }
    heap->blocks += (made != NULL) - (base != NULL);
    heap->bytes += new_size - size;
    free(base);
    return made != NULL ? made + BEFORE : NULL;
}

static inline moe_allocator test_allocator(test_heap *heap, long fail_at) {
    moe_allocator a;
    memset(heap, 0, sizeof *heap);
    heap->fail_at = fail_at;
    a.ctx = heap;
    a.resize = test_resize;
    return a;
}
#endif

/* What else gets smaller where a preset gets fewer experts: of each kind without matrices at most
   one, two groups with one choice each or, if the experts are an odd number, one. */
#define TEST_FEWER_EXPERTS(router) \
    do { \
        (router).n_zero = (router).n_zero > 0; \
        (router).n_copy = (router).n_copy > 0; \
        (router).n_constant = (router).n_constant > 0; \
        if ((router).bias_real > 0) (router).bias_real = 1; \
        if ((router).select == MOE_SELECT_GROUPED_EACH) \
            (router).groups = (router).top_k = (router).n_experts % 2 == 0 ? 2 : 1; \
    } while (0)

#endif
