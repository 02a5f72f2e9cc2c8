/* bench.c - what things cost: tables of times, each beside the bound that it must keep. A bench is
   a row of the table at the end.

     cc -std=c99 -O2 -I. -pthread tests/bench/bench.c tests/bench/bench_peers.c -o bench -lm
     ./bench [NAME...] [OPTION...]      (-h explains)

   Times are those of one thread's processor, so that other programs on the machine disturb little;
   of a clock on the wall where threads share the work. What is compared runs in turn, round by
   round, and each round gives a ratio of its own: the clock may drift meanwhile. The machine's
   limits, multiply-adds between registers and a read of the weights, are contenders like the
   others. Other libraries come from tests/bench/bench_peers.c, as far as its macros say that they
   are there. Exit status 1 if a bound was missed that must hold. */

#if defined(__linux__)
#define _GNU_SOURCE /* sched_setaffinity */
#elif defined(__unix__) || defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#endif

#define MOE_IMPLEMENTATION
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__unix__) || defined(__APPLE__)
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#define BENCH_UNIX 1
#else
#define BENCH_UNIX 0
#endif
#if defined(__linux__)
#include <sched.h>
#endif
#if BENCH_UNIX && defined(__GNUC__) && !defined(__TINYC__)
#include <pthread.h>
#define BENCH_THREADS 1
#else
#define BENCH_THREADS 0
#endif

static long passed, failed, held, missed;

/* ---- what the command line asked for ---- */

enum { MOST_CHOICES = 16 };

typedef struct shape {
    int d, d_ff, experts, top_k;
} shape;

static struct options {
    int rounds, rounds_given, quick, csv, strict, small_pages, kernels, threads;
    int gated[2], n_kinds; /* 1: swiglu, 0: two matrices and relu */
    shape shapes[MOST_CHOICES];
    int n_shapes; /* 0: all */
    size_t tokens[MOST_CHOICES];
    int n_tokens; /* 0: all */
} options = {21, 0, 0, 0, 0, 0, MOE_KERNELS_AUTO, 1, {1, 0}, 2, {{0, 0, 0, 0}}, 0, {0}, 0};

static const moe_kernels *kernels; /* the table that options.kernels names */

/* ---- tools ---- */

static int on_the_wall; /* 1: times of threads that share the work */

/* Processor time in seconds where the system tells it in nanoseconds, else what there is. */
static double seconds(void) {
#if defined(CLOCK_PROCESS_CPUTIME_ID) && defined(CLOCK_MONOTONIC)
    struct timespec now;
    if (clock_gettime(on_the_wall ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID, &now) == 0)
        return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
#elif defined(TIME_UTC)
    struct timespec now;
    if (timespec_get(&now, TIME_UTC) == TIME_UTC) return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
#endif
    return (double)clock() / (double)CLOCKS_PER_SEC;
}

void *bench_memory(size_t count, size_t size) {
    void *p;
    if (count == 0) count = 1;
    if (count > (size_t)-1 / size) return NULL;
#if BENCH_UNIX
    {
        const size_t huge = (size_t)1 << 21, bytes = count * size;
        const int large = bytes >= huge && !options.small_pages;
        if (posix_memalign(&p, large ? huge : 64, bytes) != 0) return NULL;
#if defined(MADV_HUGEPAGE)
        if (large) (void)madvise(p, bytes, MADV_HUGEPAGE);
#endif
        memset(p, 0, bytes);
    }
#else
    p = calloc(count, size);
#endif
    return p;
}

static void *grab(size_t count, size_t size) {
    void *p = bench_memory(count, size);
    if (p == NULL) {
        fprintf(stderr, "bench: out of memory\n");
        exit(2);
    }
    return p;
}

/* Such memory for layers that own their tensors. */
static void *grab_resize(void *ctx, void *block, size_t old_size, size_t new_size) {
    void *p = new_size > 0 ? bench_memory(new_size, 1) : NULL;
    (void)ctx;
    if (new_size > 0 && p == NULL) return NULL;
    if (p != NULL && block != NULL) memcpy(p, block, old_size < new_size ? old_size : new_size);
    free(block);
    return p;
}

static moe_real *normals(size_t count, moe_rng *rng) {
    moe_real *v = (moe_real *)grab(count, sizeof *v);
    size_t i;
    for (i = 0; i < count; i++) v[i] = moe_rng_normal(rng);
    return v;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Sorts v; the value below which that share of them lies. */
static double quantile(double *v, int n, double share) {
    qsort(v, (size_t)n, sizeof *v, ascending);
    return v[(int)(share * (n - 1) + 0.5)];
}

static double median(double *v, int n) { return quantile(v, n, 0.5); }

/* Relative root mean square of the difference. */
static double distance(const moe_real *is, const moe_real *should_be, size_t n) {
    double off = 0.0, all = 0.0;
    size_t i;
    for (i = 0; i < n; i++) {
        const double difference = (double)is[i] - (double)should_be[i];
        off += difference * difference;
        all += (double)should_be[i] * (double)should_be[i];
    }
    return all > 0.0 ? sqrt(off / all) : off;
}

/* Bounds that hold and bounds that do not; the latter are failures when --strict says so. */
static const char *verdict(int holds) {
    if (holds) held++;
    else missed++;
    if (holds) passed++;
    else if (options.strict) failed++;
    return holds ? "ok" : "MISSED";
}

static void print_failure(const char *what, moe_status status, const moe_error *error) {
    fprintf(options.csv ? stderr : stdout, "%s: failed: %s%s%s\n", what, moe_status_text(status),
            error->message[0] != '\0' ? ": " : "", error->message);
    failed++;
}

/* ---- threads: a crew that shares tasks, and the processors that they stay on ---- */

#if defined(__linux__)
static cpu_set_t processors; /* those that the process started with */

/* Keeps the calling thread on the i-th of them. */
static void pin(int i) {
    int cpu, seen = 0, all = CPU_COUNT(&processors);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (cpu = 0; all > 0 && cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET((size_t)cpu, &processors) && seen++ == i % all) CPU_SET((size_t)cpu, &one);
    if (all > 0) (void)sched_setaffinity(0, sizeof one, &one);
}

static void find_processors(void) {
    if (sched_getaffinity(0, sizeof processors, &processors) != 0) CPU_ZERO(&processors);
}
#else
static void pin(int i) { (void)i; }
static void find_processors(void) {}
#endif

enum { MOST_THREADS = 64 };

typedef void task_fn(void *work, int index);

#if BENCH_THREADS
/* Workers look for a new job in a loop for some milliseconds before they sleep: a job may be as
   short as a few microseconds. */
enum { PATIENCE = 1000000 };

static struct crew {
    pthread_t workers[MOST_THREADS];
    int n; /* workers, the caller not counted */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int sleeping, job, over; /* job counts up */
    task_fn *task;
    void *work;
    int count, next, done;
} crew = {{0}, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, NULL, NULL, 0, 0, 0};

static void crew_work(void) {
    int i;
    while ((i = __atomic_fetch_add(&crew.next, 1, __ATOMIC_RELAXED)) < crew.count) crew.task(crew.work, i);
}

static void crew_sleep(int job) {
    pthread_mutex_lock(&crew.lock);
    crew.sleeping++;
    while (crew.job == job) pthread_cond_wait(&crew.wake, &crew.lock);
    crew.sleeping--;
    pthread_mutex_unlock(&crew.lock);
}

static void *crew_member(void *index) {
    int job = 0, turns;
    pin((int)(intptr_t)index);
    for (;;) {
        for (turns = 0; __atomic_load_n(&crew.job, __ATOMIC_ACQUIRE) == job; turns++)
            if (turns == PATIENCE) crew_sleep(job);
        job++;
        if (crew.over) return NULL;
        crew_work();
        __atomic_fetch_add(&crew.done, 1, __ATOMIC_RELEASE);
    }
}

static void crew_start(task_fn *task, void *work, int count) {
    pthread_mutex_lock(&crew.lock);
    crew.task = task;
    crew.work = work;
    crew.count = count;
    crew.next = 0;
    crew.done = 0;
    __atomic_fetch_add(&crew.job, 1, __ATOMIC_RELEASE);
    if (crew.sleeping > 0) pthread_cond_broadcast(&crew.wake);
    pthread_mutex_unlock(&crew.lock);
}

/* A parallel for: task(work, 0 .. count-1), on all threads of the crew, the caller's included. */
static void crew_run(void *ctx, task_fn *task, void *work, int count) {
    (void)ctx;
    crew_start(task, work, count);
    crew_work();
    while (__atomic_load_n(&crew.done, __ATOMIC_ACQUIRE) < crew.n) continue;
}

static void crew_end(void) {
    int i;
    crew.over = 1;
    crew_start(NULL, NULL, 0);
    for (i = 0; i < crew.n; i++) pthread_join(crew.workers[i], NULL);
    crew.n = crew.job = crew.over = 0;
}

/* Returns how many threads there are now, the caller's included. */
static int crew_begin(int threads) {
    for (crew.n = 0; crew.n + 1 < threads; crew.n++)
        if (pthread_create(&crew.workers[crew.n], NULL, crew_member, (void *)(intptr_t)(crew.n + 1)) != 0) break;
    return crew.n + 1;
}
#else
static void crew_run(void *ctx, task_fn *task, void *work, int count) {
    int i;
    (void)ctx;
    for (i = 0; i < count; i++) task(work, i);
}
static void crew_end(void) {}
static int crew_begin(int threads) {
    (void)threads;
    return 1;
}
#endif

/* ---- the machine's limits: multiply-adds between registers, a plain read ---- */

#if defined(MOEI_HAVE_AVX2) && (defined(__GNUC__) || defined(__clang__)) && !MOE_REAL_IS_DOUBLE
#define BENCH_X86 1
#else
#define BENCH_X86 0
#endif

enum { FORM_NONE, FORM_YMM, FORM_ZMM };
enum { FMA_STEPS = 50000 };

#if BENCH_X86
/* Twelve sums hide the latency of two instructions in every clock; sixteen registers hold no more.
   Returns the operations. */
__attribute__((target("avx2,fma"))) static double fma_ymm(void) {
    enum { SUMS = 12, LANES = 8 };
    const __m256 factor = _mm256_set1_ps(0.999f), term = _mm256_set1_ps(1e-3f);
    volatile float sink;
    float lanes[LANES];
    /* no two alike */
    __m256 s0 = _mm256_set1_ps(0.0f), s1 = _mm256_set1_ps(0.1f);
    __m256 s2 = _mm256_set1_ps(0.2f), s3 = _mm256_set1_ps(0.3f);
    __m256 s4 = _mm256_set1_ps(0.4f), s5 = _mm256_set1_ps(0.5f);
    __m256 s6 = _mm256_set1_ps(0.6f), s7 = _mm256_set1_ps(0.7f);
    __m256 s8 = _mm256_set1_ps(0.8f), s9 = _mm256_set1_ps(0.9f);
    __m256 sa = _mm256_set1_ps(1.0f), sb = _mm256_set1_ps(1.1f);
    int i;
    for (i = 0; i < FMA_STEPS; i++) {
        s0 = _mm256_fmadd_ps(s0, factor, term);
        s1 = _mm256_fmadd_ps(s1, factor, term);
        s2 = _mm256_fmadd_ps(s2, factor, term);
        s3 = _mm256_fmadd_ps(s3, factor, term);
        s4 = _mm256_fmadd_ps(s4, factor, term);
        s5 = _mm256_fmadd_ps(s5, factor, term);
        s6 = _mm256_fmadd_ps(s6, factor, term);
        s7 = _mm256_fmadd_ps(s7, factor, term);
        s8 = _mm256_fmadd_ps(s8, factor, term);
        s9 = _mm256_fmadd_ps(s9, factor, term);
        sa = _mm256_fmadd_ps(sa, factor, term);
        sb = _mm256_fmadd_ps(sb, factor, term);
    }
    s0 = _mm256_add_ps(_mm256_add_ps(s0, s1), _mm256_add_ps(s2, s3));
    s4 = _mm256_add_ps(_mm256_add_ps(s4, s5), _mm256_add_ps(s6, s7));
    s8 = _mm256_add_ps(_mm256_add_ps(s8, s9), _mm256_add_ps(sa, sb));
    _mm256_storeu_ps(lanes, _mm256_add_ps(s0, _mm256_add_ps(s4, s8)));
    sink = lanes[0];
    (void)sink;
    return 2.0 * SUMS * LANES * FMA_STEPS;
}

__attribute__((target("avx512f"))) static double fma_zmm(void) {
    enum { SUMS = 16, LANES = 16 };
    const __m512 factor = _mm512_set1_ps(0.999f), term = _mm512_set1_ps(1e-3f);
    volatile float sink;
    float lanes[LANES];
    __m512 s0 = _mm512_set1_ps(0.0f), s1 = _mm512_set1_ps(0.1f);
    __m512 s2 = _mm512_set1_ps(0.2f), s3 = _mm512_set1_ps(0.3f);
    __m512 s4 = _mm512_set1_ps(0.4f), s5 = _mm512_set1_ps(0.5f);
    __m512 s6 = _mm512_set1_ps(0.6f), s7 = _mm512_set1_ps(0.7f);
    __m512 s8 = _mm512_set1_ps(0.8f), s9 = _mm512_set1_ps(0.9f);
    __m512 sa = _mm512_set1_ps(1.0f), sb = _mm512_set1_ps(1.1f);
    __m512 sc = _mm512_set1_ps(1.2f), sd = _mm512_set1_ps(1.3f);
    __m512 se = _mm512_set1_ps(1.4f), sf = _mm512_set1_ps(1.5f);
    int i;
    for (i = 0; i < FMA_STEPS; i++) {
        s0 = _mm512_fmadd_ps(s0, factor, term);
        s1 = _mm512_fmadd_ps(s1, factor, term);
        s2 = _mm512_fmadd_ps(s2, factor, term);
        s3 = _mm512_fmadd_ps(s3, factor, term);
        s4 = _mm512_fmadd_ps(s4, factor, term);
        s5 = _mm512_fmadd_ps(s5, factor, term);
        s6 = _mm512_fmadd_ps(s6, factor, term);
        s7 = _mm512_fmadd_ps(s7, factor, term);
        s8 = _mm512_fmadd_ps(s8, factor, term);
        s9 = _mm512_fmadd_ps(s9, factor, term);
        sa = _mm512_fmadd_ps(sa, factor, term);
        sb = _mm512_fmadd_ps(sb, factor, term);
        sc = _mm512_fmadd_ps(sc, factor, term);
        sd = _mm512_fmadd_ps(sd, factor, term);
        se = _mm512_fmadd_ps(se, factor, term);
        sf = _mm512_fmadd_ps(sf, factor, term);
    }
    s0 = _mm512_add_ps(_mm512_add_ps(s0, s1), _mm512_add_ps(s2, s3));
    s4 = _mm512_add_ps(_mm512_add_ps(s4, s5), _mm512_add_ps(s6, s7));
    s8 = _mm512_add_ps(_mm512_add_ps(s8, s9), _mm512_add_ps(sa, sb));
    sc = _mm512_add_ps(_mm512_add_ps(sc, sd), _mm512_add_ps(se, sf));
    _mm512_storeu_ps(lanes, _mm512_add_ps(_mm512_add_ps(s0, s4), _mm512_add_ps(s8, sc)));
    sink = lanes[0];
    (void)sink;
    return 2.0 * SUMS * LANES * FMA_STEPS;
}

/* The sum of n floats, eight registers at a time; a rest of less than that is left out. */
__attribute__((target("avx2"))) static float read_ymm(const float *p, size_t n) {
    __m256 s0 = _mm256_setzero_ps(), s1 = s0;
    __m256 s2 = s0, s3 = s0;
    __m256 s4 = s0, s5 = s0;
    __m256 s6 = s0, s7 = s0;
    float lanes[8];
    size_t i;
    for (i = 0; i + 64 <= n; i += 64) {
        s0 = _mm256_add_ps(s0, _mm256_loadu_ps(p + i));
        s1 = _mm256_add_ps(s1, _mm256_loadu_ps(p + i + 8));
        s2 = _mm256_add_ps(s2, _mm256_loadu_ps(p + i + 16));
        s3 = _mm256_add_ps(s3, _mm256_loadu_ps(p + i + 24));
        s4 = _mm256_add_ps(s4, _mm256_loadu_ps(p + i + 32));
        s5 = _mm256_add_ps(s5, _mm256_loadu_ps(p + i + 40));
        s6 = _mm256_add_ps(s6, _mm256_loadu_ps(p + i + 48));
        s7 = _mm256_add_ps(s7, _mm256_loadu_ps(p + i + 56));
    }
    s0 = _mm256_add_ps(_mm256_add_ps(s0, s1), _mm256_add_ps(s2, s3));
    s4 = _mm256_add_ps(_mm256_add_ps(s4, s5), _mm256_add_ps(s6, s7));
    _mm256_storeu_ps(lanes, _mm256_add_ps(s0, s4));
    return lanes[0] + lanes[7];
}

__attribute__((target("avx512f"))) static float read_zmm(const float *p, size_t n) {
    __m512 s0 = _mm512_setzero_ps(), s1 = s0;
    __m512 s2 = s0, s3 = s0;
    __m512 s4 = s0, s5 = s0;
    __m512 s6 = s0, s7 = s0;
    float lanes[16];
    size_t i;
    for (i = 0; i + 128 <= n; i += 128) {
        s0 = _mm512_add_ps(s0, _mm512_loadu_ps(p + i));
        s1 = _mm512_add_ps(s1, _mm512_loadu_ps(p + i + 16));
        s2 = _mm512_add_ps(s2, _mm512_loadu_ps(p + i + 32));
        s3 = _mm512_add_ps(s3, _mm512_loadu_ps(p + i + 48));
        s4 = _mm512_add_ps(s4, _mm512_loadu_ps(p + i + 64));
        s5 = _mm512_add_ps(s5, _mm512_loadu_ps(p + i + 80));
        s6 = _mm512_add_ps(s6, _mm512_loadu_ps(p + i + 96));
        s7 = _mm512_add_ps(s7, _mm512_loadu_ps(p + i + 112));
    }
    s0 = _mm512_add_ps(_mm512_add_ps(s0, s1), _mm512_add_ps(s2, s3));
    s4 = _mm512_add_ps(_mm512_add_ps(s4, s5), _mm512_add_ps(s6, s7));
    _mm512_storeu_ps(lanes, _mm512_add_ps(s0, s4));
    return lanes[0] + lanes[15];
}

/* The widest registers that the kernels use; plain C is measured by those of AVX2. */
static int machine_form(void) {
    const unsigned features = moe_cpu_features();
    if (kernels->id == MOE_KERNELS_AVX512 && (features & MOE_CPU_AVX512F) != 0) return FORM_ZMM;
    return (features & MOE_CPU_AVX2) != 0 && (features & MOE_CPU_FMA) != 0 ? FORM_YMM : FORM_NONE;
}
#else
static double fma_ymm(void) { return 0.0; }
static double fma_zmm(void) { return 0.0; }
static float read_ymm(const float *p, size_t n) { return n > 0 ? p[0] : 0.0f; }
static float read_zmm(const float *p, size_t n) { return n > 0 ? p[0] : 0.0f; }
static int machine_form(void) { return FORM_NONE; } /* not known */
#endif

static double peak_gflops(void) {
    const int form = machine_form();
    double start = seconds(), flops;
    if (form == FORM_NONE) return 0.0;
    flops = form == FORM_ZMM ? fma_zmm() : fma_ymm();
    return 1e-9 * flops / (seconds() - start);
}

typedef struct block {
    const void *at;
    size_t bytes;
} block;

typedef struct machine {
    int form, threads;
    double flops; /* of one call of machine_fma, by each thread */
    const block *blocks;
    size_t n_blocks;
} machine;

static void fma_task(void *work, int index) {
    machine *m = (machine *)work;
    const double flops = m->form == FORM_ZMM ? fma_zmm() : fma_ymm();
    if (index == 0) m->flops = flops;
}

/* Each thread reads its part of every block. */
static void read_task(void *work, int index) {
    const machine *m = (const machine *)work;
    volatile float sink;
    float sum = 0.0f;
    size_t i;
    for (i = 0; i < m->n_blocks; i++) {
        const size_t n = m->blocks[i].bytes / sizeof(float) / (size_t)m->threads;
        const float *p = (const float *)m->blocks[i].at + n * (size_t)index;
        sum += m->form == FORM_ZMM ? read_zmm(p, n) : read_ymm(p, n);
    }
    sink = sum;
    (void)sink;
}

static void share_out(machine *m, task_fn *task) {
    if (m->threads > 1) crew_run(NULL, task, m, m->threads);
    else task(m, 0);
}

static void machine_fma(void *state, moe_real *y) {
    (void)y;
    share_out((machine *)state, fma_task);
}

static void machine_read(void *state, moe_real *y) {
    (void)y;
    share_out((machine *)state, read_task);
}

/* ---- a contest: who runs in turn ---- */

enum { MOST_CONTENDERS = 24, MOST_ROUNDS = 1000 };

typedef struct contender {
    void (*run)(void *state, moe_real *y);
    double (*clock)(const void *state); /* of another process; NULL: seconds */
    void *state;
    moe_real *y;
    long calls;    /* that are timed in one go */
    int again;     /* 1: short enough that a call before brings its data back into the caches */
    double *times; /* of one call, by round */
} contender;

typedef struct contest {
    contender list[MOST_CONTENDERS];
    int n, rounds;
    double values[MOST_ROUNDS];
} contest;

/* Returns its number. */
static int enter(contest *c, void (*run)(void *state, moe_real *y), void *state, moe_real *y) {
    contender *p = &c->list[c->n];
    memset(p, 0, sizeof *p);
    p->run = run;
    p->state = state;
    p->y = y;
    p->times = (double *)grab(MOST_ROUNDS, sizeof *p->times);
    return c->n++;
}

static double clock_of(const contender *p) { return p->clock != NULL ? p->clock(p->state) : seconds(); }

static double time_calls(contender *p, long calls) {
    double start;
    long i;
    if (p->again) p->run(p->state, p->y);
    start = clock_of(p);
    for (i = 0; i < calls; i++) p->run(p->state, p->y);
    return (clock_of(p) - start) / (double)calls;
}

/* So many calls that the clock's steps do not show. Returns the time of a round. */
static double settle(contender *p) {
    const double wanted = options.quick ? 2e-4 : 5e-4;
    double taken = time_calls(p, 1);
    p->again = taken < 0.02;
    p->calls = 1;
    while (p->again && (taken = time_calls(p, p->calls)) * (double)p->calls < 0.2 * wanted && p->calls < 10000000)
        p->calls *= 4;
    if (taken > 0.0 && taken < wanted) p->calls = (long)(wanted / taken) + 1;
    else p->calls = 1;
    return taken * (double)(p->calls + p->again);
}

/* Long contests get fewer rounds. Every other round runs backwards: nobody always follows the
   same. */
static void hold(contest *c) {
    const double patience = options.quick ? 3.0 : 20.0;
    double round = 0.0;
    int i, r;
    for (i = 0; i < c->n; i++) round += settle(&c->list[i]);
    c->rounds = options.rounds;
    if (!options.rounds_given && round * c->rounds > patience)
        c->rounds = round * 5 > patience ? 5 : (int)(patience / round);
    for (r = 0; r < c->rounds; r++)
        for (i = 0; i < c->n; i++) {
            contender *p = &c->list[r % 2 == 0 ? i : c->n - 1 - i];
            p->times[r] = time_calls(p, p->calls);
        }
}

static void contest_end(contest *c) {
    int i;
    for (i = 0; i < c->n; i++) free(c->list[i].times);
    memset(c, 0, sizeof *c);
}

/* The time of one call, or the quantile of it. */
static double time_of(contest *c, int i, double share) {
    memcpy(c->values, c->list[i].times, (size_t)c->rounds * sizeof *c->values);
    return quantile(c->values, c->rounds, share);
}

/* How many times as long a takes as b: the median over the rounds. */
static double ratio_of(contest *c, int a, int b) {
    int r;
    for (r = 0; r < c->rounds; r++) c->values[r] = c->list[a].times[r] / c->list[b].times[r];
    return median(c->values, c->rounds);
}

/* ---- a line of results, as a table's row or as CSV ---- */

enum { NOTHING = -1 }; /* a number that was not measured */

typedef struct line {
    const char *bench, *weights;
    shape s;
    int gated, threads, rounds;
    size_t tokens, used;
    double us, p10, p90, gflops, peak, peak_percent, read_us, read_gbs, roofline_percent, bound, ratio, rms, rms_bound;
    double framework;
    int by_memory, holds; /* holds: NOTHING where no bound applies */
    double peer_us[BENCH_PEERS], peer_ratio[BENCH_PEERS];
} line;

static line line_begin(const char *bench, const char *weights, const shape *s, int gated, size_t tokens) {
    line l;
    int i;
    memset(&l, 0, sizeof l);
    l.bench = bench;
    l.weights = weights;
    l.s = *s;
    l.gated = gated;
    l.tokens = tokens;
    l.threads = options.threads;
    l.us = l.p10 = l.p90 = l.gflops = l.peak = l.peak_percent = l.read_us = l.read_gbs = l.roofline_percent = NOTHING;
    l.bound = l.ratio = l.rms = l.rms_bound = l.framework = NOTHING;
    l.by_memory = l.holds = NOTHING;
    for (i = 0; i < BENCH_PEERS; i++) l.peer_us[i] = l.peer_ratio[i] = NOTHING;
    return l;
}

static const char *kind_name(int gated) { return gated ? "swiglu" : "relu"; }

static void csv_heading(void) {
    int i;
    printf("bench,expert,d,d_ff,experts,top_k,tokens,experts_used,kernels,threads,weights,rounds,us,us_p10,us_p90,"
           "gflops,peak_gflops,percent_of_peak,read_us,read_gb_s,limit,percent_of_roofline,bound,holds,ratio,relative_"
           "rms,rms_bound,framework_ratio");
    for (i = 0; i < 2 * BENCH_PEERS; i++) { /* the star is no good name of a column */
        const char *name = bench_peers[i / 2].name;
        const int length = (int)strcspn(name, "*");
        printf(",%.*s%s_%s", length, name, name[length] == '*' ? "_packed" : "", i % 2 == 0 ? "us" : "ratio");
    }
    printf("\n");
}

static void csv_number(double value) {
    if (value < 0.0) printf(",");
    else printf(",%.6g", value);
}

static void csv_line(const line *l) {
    const double numbers[] = {l->us, l->p10, l->p90, l->gflops, l->peak, l->peak_percent, l->read_us, l->read_gbs};
    size_t i;
    printf("%s,%s,%d,%d,%d,%d,%lu,%lu,%s,%d,%s,%d", l->bench, kind_name(l->gated), l->s.d, l->s.d_ff, l->s.experts,
           l->s.top_k, (unsigned long)l->tokens, (unsigned long)l->used, kernels->name, l->threads, l->weights,
           l->rounds);
    for (i = 0; i < sizeof numbers / sizeof numbers[0]; i++) csv_number(numbers[i]);
    printf(",%s", l->by_memory == NOTHING ? "" : l->by_memory ? "memory" : "compute");
    csv_number(l->roofline_percent);
    csv_number(l->bound);
    printf(",%s", l->holds == NOTHING ? "" : l->holds ? "1" : "0");
    csv_number(l->ratio);
    csv_number(l->rms);
    csv_number(l->rms_bound);
    csv_number(l->framework);
    for (i = 0; i < BENCH_PEERS; i++) {
        csv_number(l->peer_us[i]);
        csv_number(l->peer_ratio[i]);
    }
    printf("\n");
    fflush(stdout);
}

static void cell_text(double value, const char *format) {
    char text[32];
    if (value < 0.0) (void)snprintf(text, sizeof text, "-");
    else (void)snprintf(text, sizeof text, format, value);
    printf(" %9s", text);
}

/* ---- routers: a whole layer against the plain top-k layer ---- */

typedef struct row {
    const char *name;
    const char *settings; /* on top of the table's own */
    double bound;         /* most time, as a multiple of the plain layer's; 0: for information */
    int times_arithmetic; /* 1: the bound is multiplied by the method's arithmetic */
    int more;             /* so many times the rounds, for a bound as near as the noise of one round; 0: 1 */
} row;

/* Bounds: 1.05 times the arithmetic where it is large, 1.01 in all where it is next to nothing. */
static const row small_rows[] = {
    {"plain, against itself", "", 0, 0, 9},
    {"similarity", "refine=similarity", 1.05, 1, 0},
    {"similarity, causal", "refine=similarity causal=1", 1.05, 1, 0},
    {"similarity, unit vectors", "refine=similarity similarity_scale=l2", 0, 0, 0},
    {"similarity, lower entropy", "refine=similarity lower_entropy_only=1", 0, 0, 0},
    {"attention, one head", "refine=attention heads=1 attention_heads=fixed", 1.05, 1, 0},
    {"attention, one head, causal", "refine=attention heads=1 attention_heads=fixed causal=1", 0, 0, 0},
    {"attention, surest of 8 heads", "refine=attention heads=8 attention_heads=min_entropy", 0, 0, 0},
    {"attention, all of 8 heads", "refine=attention heads=8 attention_heads=all", 0, 0, 0},
    {"adaptive clustering", "input=adaptive_clustering", 1.01, 0, 9},
    {"adaptive clustering, mix 2", "input=adaptive_clustering ac_mix=2", 0, 0, 0},
    {"adaptive clustering, as code", "input=adaptive_clustering ac_mode=code", 0, 0, 0},
    {"cosine", "score=cosine", 1.01, 0, 9},
    {"cosine, projected to 8", "score=cosine cosine_dim=8", 0, 0, 0},
    {"mlp", "score=mlp", 0, 0, 0},
    {"noisy top-k, in evaluation", "noise=noisy_topk", 0, 0, 0},
    {"sinkhorn, in evaluation", "select=sinkhorn", 0, 0, 0},
    {"expert choice", "select=expert_choice capacity_factor=2", 0, 0, 0},
    {"top-p", "select=top_p top_p=0.3", 0, 0, 0},
    {"grouped top-k", "select=grouped_top_k groups=4 groups_kept=2", 0, 0, 0},
    {"hash", "select=hash table_size=1024", 0, 0, 0},
    {"affinity", "select=affinity", 0, 0, 0},
    {"soft, one slot per token", "select=soft slots=32", 0, 0, 0},
    {NULL, NULL, 0, 0, 0},
};

/* Equal parameters: d_wide = (3 d d_ff - d_low d) / (d_low + 2 d) = 3840 for d 768, d_ff 3072,
   d_low 256. */
static const row large_rows[] = {
    {"plain, against itself", "", 0, 0, 0},
    {"autonomy of experts", "score=norm weight=softmax expert=factorised d_low=256 d_ff=3840", 1.12, 0, 0},
    {NULL, NULL, 0, 0, 0},
};

enum { TOKENS = 512, HEADS = 8, IDS = 1024 };

/* Everything that a call of some router asks for. */
typedef struct surroundings {
    moe_call call;
    moe_real *x, *previous, *previous_weights, *attention, *outputs, *y;
    int32_t *previous_experts, *ids;
} surroundings;

/* Every token pays attention to all, most to itself; head h is the surer the larger h is. */
static void surround_attention(surroundings *s, size_t d, moe_rng *rng) {
    size_t h, i, j;
    s->attention = normals((size_t)HEADS * TOKENS * TOKENS, rng);
    s->outputs = normals((size_t)HEADS * TOKENS * d, rng);
    for (h = 0; h < HEADS; h++)
        for (i = 0; i < TOKENS; i++) {
            moe_real *a = s->attention + (h * TOKENS + i) * TOKENS, *o = s->outputs + (h * TOKENS + i) * d;
            a[i] += (moe_real)(2 + h);
            moe_softmax(NULL, TOKENS, a, 1, a);
            for (j = 0; j < d; j++) o[j] = s->x[i * d + j] + (moe_real)0.2 * o[j];
        }
}

static void surround(surroundings *s, size_t d, moe_rng *rng) {
    size_t i;
    memset(s, 0, sizeof *s);
    s->x = normals(TOKENS * d, rng);
    s->y = (moe_real *)grab(TOKENS * d, sizeof *s->y);
    s->previous = normals(TOKENS * d, rng);
    s->previous_experts = (int32_t *)grab(TOKENS * 2, sizeof *s->previous_experts);
    s->previous_weights = (moe_real *)grab(TOKENS * 2, sizeof *s->previous_weights);
    s->ids = (int32_t *)grab(TOKENS, sizeof *s->ids);
    for (i = 0; i < TOKENS; i++) {
        s->ids[i] = (int32_t)moe_rng_below(rng, IDS);
        s->previous_experts[2 * i] = (int32_t)moe_rng_below(rng, 8);
        s->previous_experts[2 * i + 1] = (int32_t)(8 + moe_rng_below(rng, 8));
        s->previous_weights[2 * i] = moe_rng_uniform(rng);
        s->previous_weights[2 * i + 1] = moe_rng_uniform(rng);
    }
    surround_attention(s, d, rng);
    s->call.n_tokens = TOKENS;
    s->call.x = s->x;
    s->call.token_ids = s->ids;
    s->call.previous_input = s->previous;
    s->call.previous_experts = s->previous_experts;
    s->call.previous_weights = s->previous_weights;
    s->call.n_previous = 2;
    s->call.attention_weights = s->attention;
    s->call.attention_outputs = s->outputs;
}

static void surroundings_free(surroundings *s) {
    free(s->x);
    free(s->y);
    free(s->previous);
    free(s->previous_experts);
    free(s->previous_weights);
    free(s->ids);
    free(s->attention);
    free(s->outputs);
}

/* A layer with its tensors and workspace. */
typedef struct bed {
    moe_layer layer;
    moe_real *values[MOE_LAYER_PARAMETER_COUNT]; /* its own tensors; the rest it shares with the plain layer */
    void *work;
    size_t work_size;
    double pairs, load; /* pairs per token; the largest load of an expert over the mean */
} bed;

/* For hash: token id i goes to experts i, i + 1, ...; for all else random numbers. */
static moe_real *fill(const moe_parameter *slot, int place, size_t experts, moe_rng *rng) {
    moe_real *v = normals(slot->count, rng);
    size_t i, columns = slot->shape[1];
    for (i = 0; i < slot->count; i++)
        v[i] = place == MOE_ROUTER_TABLE ? (moe_real)((i / columns + i % columns) % experts)
                                         : slot->init_value + slot->init_std * v[i];
    return v;
}

/* The same experts at the same addresses as in the plain layer wherever the shapes allow: what
   differs is the router. Every layer's tensors start from the same seed, so a linear score is the
   plain layer's too. */
static moe_status bed_make(bed *b, const char *base, const char *settings, const bed *plain, size_t tokens,
                           moe_error *error) {
    moe_layer_config config;
    moe_status status;
    moe_parameter slot;
    moe_rng rng = {7};
    int place;
    memset(b, 0, sizeof *b);
    memset(&config, 0, sizeof config);
    status = moe_fields_apply(moe_layer_fields(), &config, base, error);
    if (status == MOE_OK) status = moe_fields_apply(moe_layer_fields(), &config, settings, error);
    config.kernels = options.kernels;
    if (status == MOE_OK) status = moe_layer_init(&b->layer, &config, error);
    if (status != MOE_OK) return status;
    for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++) {
        if (moe_layer_parameter(&b->layer.config, place, &slot) != MOE_OK) continue;
        if (plain != NULL && place >= MOE_ROUTER_PARAMETER_COUNT && plain->layer.config.d_ff == b->layer.config.d_ff)
            b->layer.tensors[place] = plain->layer.tensors[place];
        if (b->layer.tensors[place] == NULL)
            b->layer.tensors[place] = b->values[place] = fill(&slot, place, (size_t)config.router.n_experts, &rng);
    }
    status = moe_layer_work_size(&b->layer, tokens, 0, &b->work_size);
    if (status == MOE_OK) b->work = grab(b->work_size, 1);
    return status;
}

static void bed_free(bed *b) {
    int place;
    for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++) free(b->values[place]);
    free(b->work);
    memset(b, 0, sizeof *b);
}

static double forward_seconds(bed *b, surroundings *s) {
    const double start = seconds();
    const moe_status status = moe_layer_forward(&b->layer, &s->call, s->y, b->work, b->work_size, NULL);
    const double taken = seconds() - start;
    return status == MOE_OK ? taken : -1.0;
}

/* A first call: who went where. */
static moe_status bed_look(bed *b, surroundings *s) {
    moe_layer_pass pass;
    const moe_status status = moe_layer_forward(&b->layer, &s->call, s->y, b->work, b->work_size, &pass);
    const size_t experts = (size_t)b->layer.config.router.n_experts;
    size_t e, most = 0, all;
    if (status != MOE_OK) return status;
    all = pass.routing.plan.offsets[experts];
    for (e = 0; e < experts; e++) {
        const size_t load = pass.routing.plan.offsets[e + 1] - pass.routing.plan.offsets[e];
        if (load > most) most = load;
    }
    /* soft: rows that experts work on */
    b->pairs = (double)(pass.routing.plan.rows > 0 ? pass.routing.plan.rows * experts : all) / TOKENS;
    b->load = all > 0 ? (double)most * (double)experts / (double)all : 0.0;
    return status;
}

/* Multiplications per token that the method asks for: sums along d, d_ff and d_low, for the pairs
   that were made. The smaller rest (softmax, entropies, S r, selection) counts as overhead. */
static double multiplications(const bed *b) {
    const moe_layer_config *c = &b->layer.config;
    const double d = c->router.d_model, experts = c->router.n_experts;
    const double f = c->d_ff, low = c->d_low;
    const double r = c->router.cosine_dim;
    const double h = c->router.router_hidden > 0 ? c->router.router_hidden : d;
    const double slots = experts * c->router.slots;
    const double heads = c->router.attention_heads == MOE_HEADS_ALL ? c->router.heads : 1.0;
    const double seen = c->router.causal ? 0.5 * (TOKENS + 1) : 1.0 * TOKENS;
    double count = 0;
    switch (c->router.score) {
    case MOE_SCORE_MLP:
        count += h * (d + experts);
        break;
    case MOE_SCORE_COSINE:
        count += r > 0 ? d * r + r * (experts + 1) : d * (experts + 1);
        break;
    case MOE_SCORE_NORM:
        count += d * low * experts;
        break;
    default:
        count += d * experts;
        break;
    }
    if (c->router.select == MOE_SELECT_SOFT) count = 3 * d * slots;
    if (c->router.input == MOE_INPUT_ADAPTIVE_CLUSTERING) count += d * c->router.ac_mix;
    if (c->router.refine == MOE_REFINE_SIMILARITY) count += d * seen;
    if (c->router.refine == MOE_REFINE_ATTENTION) count += d * seen * heads;
    if (c->expert == MOE_EXPERT_FACTORISED) return count + b->pairs * f * (low + 2 * d); /* reduce x is the score's */
    return count + b->pairs * 3 * d * f;
}

/* The plain layer before and after each call, so that a clock that drifts weighs on both. Returns 0
   when a call failed. */
static int race(bed *plain, bed *other, surroundings *s, int n, double *ratios, double *times) {
    double before = forward_seconds(plain, s), after;
    int i;
    for (i = 0; i < n; i++, before = after) {
        times[i] = forward_seconds(other, s);
        after = forward_seconds(plain, s);
        if (before <= 0.0 || after <= 0.0 || times[i] <= 0.0) return 0;
        ratios[i] = 2.0 * times[i] / (before + after);
    }
    return 1;
}

static void print_row(const row *r, const bed *b, double arithmetic, int n, double *ratios, double *times) {
    const double ratio = median(ratios, n), bound = r->times_arithmetic ? r->bound * arithmetic : r->bound;
    printf("%-28s %5.2f %5.2f %7.2f %6.3f %6.3f %6.3f %6.3f %6.3f", r->name, b->pairs, b->load, 1e3 * median(times, n),
           arithmetic, ratio, quantile(ratios, n, 0.1), quantile(ratios, n, 0.9), ratio / arithmetic);
    if (bound > 0) {
        printf(" %6.3f %s", bound, ratio <= bound ? "ok" : "MISSED");
        if (ratio <= bound) passed++;
        else failed++;
    }
    printf("\n");
    fflush(stdout);
}

/* The bounds of routers are near what the noise of a round is. */
static int route_rounds(void) { return options.rounds > 15 ? options.rounds : 15; }

static void route_row(const row *r, const char *base, bed *plain, surroundings *s) {
    const int n = r->more > 0 ? r->more * route_rounds() : route_rounds();
    double *ratios = (double *)grab((size_t)n, sizeof *ratios), *times = (double *)grab((size_t)n, sizeof *times);
    moe_error error = {MOE_OK, ""};
    bed b;
    moe_status status = bed_make(&b, base, r->settings, plain, TOKENS, &error);
    if (status == MOE_OK) status = bed_look(&b, s);
    if (status == MOE_OK && !race(plain, &b, s, n, ratios, times)) status = MOE_ERR_STATE;
    if (status == MOE_OK) print_row(r, &b, multiplications(&b) / multiplications(plain), n, ratios, times);
    else print_failure(r->name, status, &error);
    bed_free(&b);
    free(ratios);
    free(times);
}

/* How near the plain layer comes to the machine's peak, both measured in turn. */
static void print_speed(bed *plain, surroundings *s) {
    const int rounds = route_rounds();
    double *speeds = (double *)grab((size_t)rounds, sizeof *speeds);
    double *peaks = (double *)grab((size_t)rounds, sizeof *peaks), speed, peak;
    int i;
    for (i = 0; i < rounds; i++) {
        speeds[i] = 2e-9 * TOKENS * multiplications(plain) / forward_seconds(plain, s);
        peaks[i] = peak_gflops();
    }
    speed = median(speeds, rounds);
    peak = median(peaks, rounds);
    printf("\nplain layer: %.1f GFLOP/s", speed);
    if (peak > 0.0)
        printf(", %.0f %% of the %.1f that %s multiply-adds reach here\n\n", 100.0 * speed / peak, peak,
               machine_form() == FORM_ZMM ? "AVX-512" : "AVX2");
    else printf("\nskip: the machine's peak is measured on x86 only, by gcc and clang\n\n");
    free(speeds);
    free(peaks);
}

/* All rows at one size. */
static void route_table(const char *base, const row *rows) {
    surroundings s;
    moe_error error = {MOE_OK, ""};
    moe_rng rng = {1};
    bed plain;
    moe_status status = bed_make(&plain, base, "", NULL, TOKENS, &error);
    memset(&s, 0, sizeof s);
    if (status == MOE_OK) {
        surround(&s, (size_t)plain.layer.config.router.d_model, &rng);
        status = bed_look(&plain, &s);
    }
    if (status == MOE_OK) {
        printf("%s: %d tokens, kernels %s, %d rounds or more\n\n", base, (int)TOKENS, plain.layer.kernels->name,
               route_rounds());
        printf("%-28s %5s %5s %7s %6s %6s %6s %6s %6s %6s\n", "router", "pairs", "load", "ms", "arith", "time", "p10",
               "p90", "/arith", "bound");
        for (; rows->name != NULL; rows++) route_row(rows, base, &plain, &s);
        print_speed(&plain, &s);
    } else print_failure(base, status, &error);
    surroundings_free(&s);
    bed_free(&plain);
}

static void bench_routers(void) {
    if (options.csv) {
        fprintf(stderr, "bench: routers has no CSV\n");
        return;
    }
    printf("Routers: a whole layer's forward pass, as a multiple of the plain top-k layer's.\n"
           "  pairs     experts per token            load     the largest load of an expert over the mean\n"
           "  ms        median                       arith    multiplications that the method asks for\n"
           "  time      median of the rounds, p10 and p90: the spread; bound is the most that time may be\n\n");
    route_table("d_model=352 d_ff=352 n_experts=16 top_k=2", small_rows);
    route_table("d_model=768 d_ff=3072 n_experts=8 top_k=2", large_rows);
}

/* ---- layers: against the machine's limits and other libraries ---- */

/* d, d_ff, experts, per token */
static const shape all_shapes[] = {
    {64, 256, 8, 2}, {352, 352, 8, 2}, {512, 1024, 8, 2}, {768, 3072, 8, 2}, {352, 352, 64, 8}};
static const size_t all_tokens[] = {1, 8, 64, 512};

enum {
    ALL_SHAPES = sizeof all_shapes / sizeof all_shapes[0], ALL_TOKENS = sizeof all_tokens / sizeof all_tokens[0],
    QUICK_SHAPES = 2
};

/* What --shapes, --tokens and --quick leave. */
static int shape_count(void) {
    return options.n_shapes > 0 ? options.n_shapes : options.quick ? QUICK_SHAPES : ALL_SHAPES;
}
static const shape *shape_at(int i) { return options.n_shapes > 0 ? &options.shapes[i] : &all_shapes[i]; }
static int token_count(void) { return options.n_tokens > 0 ? options.n_tokens : ALL_TOKENS; }
static size_t tokens_at(int i) { return options.n_tokens > 0 ? options.tokens[i] : all_tokens[i]; }
static int is_shape(const shape *s, int d, int d_ff) { return s->d == d && s->d_ff == d_ff; }

/* Comparisons may lose so much to noise. */
static const double noise = 1.03;

/* Least percent of the roofline; 0: any d. The first row that fits counts. */
static const struct bar {
    size_t tokens;
    int d;
    double percent;
} bars[] = {{512, 64, 78}, {512, 0, 90}, {64, 64, 70}, {64, 512, 70}, {64, 0, 80}, {8, 0, 75}, {1, 64, 75}, {1, 0, 90}};

static int has_bars(void) { return kernels->id == MOE_KERNELS_AVX512 || kernels->id == MOE_KERNELS_AVX2; }

static double bar_of(const shape *s, size_t tokens) {
    size_t i;
    for (i = 0; i < sizeof bars / sizeof bars[0] && has_bars(); i++)
        if (bars[i].tokens == tokens && (bars[i].d == 0 || bars[i].d == s->d)) return bars[i].percent;
    return NOTHING;
}

/* What the best of ggml, PyTorch and ONNX Runtime took on a machine whose multiply-adds reached 198
   GFLOP/s with AVX-512 and 104 with AVX2: microseconds, 0 where nothing was measured. Floats with
   AVX-512 and AVX2, 8 bit and 4 bit with both. Times are carried over to this machine by its own
   peak, which suits cells that the arithmetic bounds. */
static const struct framework {
    int d, d_ff, experts, gated;
    size_t tokens;
    double avx512, avx2, q8_avx512, q8_avx2, q4_avx512, q4_avx2;
} frameworks[] = {
    {64, 256, 8, 1, 1, 9.25, 10.5, 9.81, 10.3, 5.38, 5.88},
    {64, 256, 8, 1, 8, 63.5, 69.9, 72.6, 75.7, 35.8, 38.9},
    {64, 256, 8, 1, 64, 437, 488, 526, 547, 279, 316},
    {64, 256, 8, 1, 512, 1583, 2117, 3976, 4600, 2289, 2679},
    {352, 352, 8, 1, 1, 113, 105, 48.2, 46.2, 31.2, 34.4},
    {352, 352, 8, 1, 8, 677, 539, 344, 343, 236, 258},
    {352, 352, 8, 1, 64, 1722, 2189, 2543, 2596, 1875, 2149},
    {352, 352, 8, 1, 512, 7213, 11785, 10917, 20968, 15420, 16978},
    {512, 1024, 8, 1, 1, 474, 471, 185, 181, 123, 134},
    {512, 1024, 8, 1, 8, 2163, 2341, 1341, 1338, 942, 1054},
    {512, 1024, 8, 1, 64, 7904, 9111, 10594, 10772, 7714, 8660},
    {512, 1024, 8, 1, 512, 27967, 46258, 39434, 79808, 60816, 66504},
    {768, 3072, 8, 1, 1, 2626, 3278, 1047, 1110, 577, 684},
    {768, 3072, 8, 1, 8, 14644, 20217, 6311, 8108, 4194, 4964},
    {768, 3072, 8, 1, 64, 40603, 49519, 45941, 50049, 36060, 41307},
    {768, 3072, 8, 1, 512, 118795, 212156, 155570, 368304, 259529, 313795},
    {352, 352, 64, 1, 1, 701, 647, 216, 236, 131, 145},
    {352, 352, 64, 1, 8, 3878, 3101, 1447, 1451, 972, 1067},
    {352, 352, 64, 1, 64, 13218, 15940, 11883, 12012, 8097, 9057},
    {352, 352, 64, 1, 512, 38126, 56545, 47739, 85596, 61792, 69652},
    {64, 256, 8, 0, 1, 5.95, 0, 0, 0, 0, 0},
    {64, 256, 8, 0, 8, 37.5, 0, 0, 0, 0, 0},
    {64, 256, 8, 0, 64, 217, 0, 0, 0, 0, 0},
    {64, 256, 8, 0, 512, 1023, 0, 0, 0, 0, 0},
    {352, 352, 8, 0, 1, 72.2, 0, 0, 0, 0, 0},
    {352, 352, 8, 0, 8, 440, 0, 0, 0, 0, 0},
    {352, 352, 8, 0, 64, 1122, 0, 0, 0, 0, 0},
    {352, 352, 8, 0, 512, 4839, 0, 0, 0, 0, 0},
    {512, 1024, 8, 0, 1, 297, 0, 0, 0, 0, 0},
    {512, 1024, 8, 0, 8, 1425, 0, 0, 0, 0, 0},
    {512, 1024, 8, 0, 64, 4175, 0, 0, 0, 0, 0},
    {512, 1024, 8, 0, 512, 17998, 0, 0, 0, 0, 0},
    {768, 3072, 8, 0, 1, 1619, 0, 0, 0, 0, 0},
    {768, 3072, 8, 0, 8, 8094, 0, 0, 0, 0, 0},
    {768, 3072, 8, 0, 64, 24615, 0, 0, 0, 0, 0},
    {768, 3072, 8, 0, 512, 76758, 0, 0, 0, 0, 0},
};

static double framework_peak(void) { return kernels->id == MOE_KERNELS_AVX512 ? 198.0 : 104.0; }

/* How many times as long as `us` the best framework would take here; bits: 32, 8 or 4. NOTHING: not
   known. */
static double framework_ratio(const shape *s, int gated, size_t tokens, int bits, double us, double peak) {
    const int wide = kernels->id == MOE_KERNELS_AVX512;
    size_t i;
    for (i = 0; i < sizeof frameworks / sizeof frameworks[0] && has_bars() && options.threads == 1; i++) {
        const struct framework *f = &frameworks[i];
        const double theirs = bits == 32  ? (wide ? f->avx512 : f->avx2)
                              : bits == 8 ? (wide ? f->q8_avx512 : f->q8_avx2)
                              : wide      ? f->q4_avx512
                                          : f->q4_avx2;
        if (is_shape(s, f->d, f->d_ff) && s->experts == f->experts && gated == f->gated && tokens == f->tokens &&
            theirs > 0.0 && peak > 0.0)
            return theirs * framework_peak() / (us * peak);
    }
    return NOTHING;
}

/* ---- how a layer may hold its weights ---- */

enum { AS_THEY_ARE = -1 };

/* A layer as one contender calls it. It shares the tensors of its bed. */
typedef struct entrant {
    moe_layer layer;
    moe_call call;
    moe_real *y;
    void *work, *packed;
    size_t work_size, packed_size;
    moe_status status; /* of the last call */
} entrant;

/* Packs the experts of a layer as type. THE place that knows the calls for packed and quantized
   weights. MOE_ERR_UNSUPPORTED: this version or machine has none of that type. */
static moe_status quantized_layer(entrant *e, int type, moe_error *error) {
    moe_status status = moe_layer_pack_size(&e->layer, type, 0, &e->packed_size, NULL);
    if (status != MOE_OK) return status;
    e->packed = grab(e->packed_size, 1);
    return moe_layer_pack(&e->layer, type, e->packed, e->packed_size, error);
}

/* Lets calls run on `threads` threads. */
static moe_status threaded_call(moe_call *call, int threads) {
    static moe_parallel parallel;
    if (threads > 1) {
        parallel.ctx = NULL;
        parallel.threads = threads;
        parallel.run = crew_run;
        call->parallel = &parallel;
    }
    return MOE_OK;
}

static void entrant_run(void *state, moe_real *y) {
    entrant *e = (entrant *)state;
    e->status = moe_layer_forward(&e->layer, &e->call, y, e->work, e->work_size, NULL);
}

static void entrant_end(entrant *e) {
    free(e->y);
    free(e->work);
    free(e->packed);
    memset(e, 0, sizeof *e);
}

/* ---- one cell: a layer and so many tokens ---- */

enum { MOST_ENTRANTS = 8 };

typedef struct cell {
    shape s;
    int gated;
    size_t tokens, used; /* experts that have tokens */
    double flops;        /* of one call, the router's included */
    moe_real *x;
    size_t *offsets; /* the plan, copied from a first call */
    moe_assignment *entries;
    moe_dispatch_plan plan;
    bench_case grouped;
    block *blocks[MOST_ENTRANTS];
    entrant entrants[MOST_ENTRANTS];
    int n_entrants;
    int runs[MOST_ENTRANTS], reads[MOST_ENTRANTS]; /* numbers in the contest */
    machine fma, read[MOST_ENTRANTS];
    int fma_at;
    moe_real *peer_y;
    void *peers[BENCH_PEERS];
    int peer_at[BENCH_PEERS]; /* NOTHING: not there */
    contest contest;
} cell;

static moe_status shape_bed(bed *b, const shape *s, int gated, moe_error *error) {
    char settings[128];
    (void)snprintf(settings, sizeof settings, "d_model=%d d_ff=%d n_experts=%d top_k=%d %s", s->d, s->d_ff, s->experts,
                   s->top_k, gated ? "expert=swiglu" : "expert=mlp act=relu no_expert_bias=1");
    return bed_make(b, settings, "", NULL, 1, error);
}

/* Tokens and where they go. */
static moe_status cell_route(cell *c, const bed *b) {
    entrant first;
    moe_layer_pass pass;
    moe_rng rng = {11};
    size_t e, experts = (size_t)c->s.experts, pairs;
    moe_status status;
    c->x = normals(c->tokens * (size_t)c->s.d, &rng);
    memset(&first, 0, sizeof first);
    first.layer = b->layer;
    first.call.n_tokens = c->tokens;
    first.call.x = c->x;
    first.y = (moe_real *)grab(c->tokens * (size_t)c->s.d, sizeof *first.y);
    status = moe_layer_work_size(&first.layer, c->tokens, 0, &first.work_size);
    if (status == MOE_OK) {
        first.work = grab(first.work_size, 1);
        status = moe_layer_forward(&first.layer, &first.call, first.y, first.work, first.work_size, &pass);
    }
    if (status == MOE_OK) {
        pairs = pass.routing.plan.offsets[experts];
        c->offsets = (size_t *)grab(experts + 1, sizeof *c->offsets);
        c->entries = (moe_assignment *)grab(pairs, sizeof *c->entries);
        memcpy(c->offsets, pass.routing.plan.offsets, (experts + 1) * sizeof *c->offsets);
        memcpy(c->entries, pass.routing.plan.assignments, pairs * sizeof *c->entries);
        c->plan.n_tokens = c->tokens;
        c->plan.n_experts = experts;
        c->plan.offsets = c->offsets;
        c->plan.assignments = c->entries;
        for (e = 0; e < experts; e++) c->used += c->offsets[e + 1] > c->offsets[e];
        c->flops =
            2.0 * ((double)c->tokens * c->s.d * c->s.experts + (double)pairs * (c->gated ? 3 : 2) * c->s.d * c->s.d_ff);
    }
    entrant_end(&first);
    return status;
}

static moe_status cell_begin(cell *c, const bed *b, const shape *s, int gated, size_t tokens) {
    int i;
    memset(c, 0, sizeof *c);
    c->s = *s;
    c->gated = gated;
    c->tokens = tokens;
    c->fma.form = machine_form();
    c->fma.threads = options.threads;
    c->fma_at = enter(&c->contest, machine_fma, &c->fma, NULL);
    for (i = 0; i < BENCH_PEERS; i++) c->peer_at[i] = NOTHING;
    return cell_route(c, b);
}

static void cell_end(cell *c) {
    int i;
    contest_end(&c->contest);
    for (i = 0; i < c->n_entrants; i++) {
        entrant_end(&c->entrants[i]);
        free(c->blocks[i]);
    }
    for (i = 0; i < BENCH_PEERS; i++)
        if (c->peers[i] != NULL) bench_peers[i].release(c->peers[i]);
    free(c->x);
    free(c->offsets);
    free(c->entries);
    free(c->peer_y);
    memset(c, 0, sizeof *c);
}

/* What a read of the weights must pass: the chosen experts' matrices, as tensors or packed, experts
   ascending. */
static size_t cell_blocks(cell *c, const entrant *e, block *blocks) {
    static const int gated_places[] = {MOE_EXPERTS_GATE, MOE_EXPERTS_UP, MOE_EXPERTS_DOWN},
                     plain_places[] = {MOE_EXPERTS_FC1_WEIGHT, MOE_EXPERTS_FC2_WEIGHT};
    const size_t experts = (size_t)c->s.experts, d = (size_t)c->s.d;
    const size_t f = (size_t)c->s.d_ff;
    const int *places = c->gated ? gated_places : plain_places, last = c->gated ? 2 : 1;
    size_t i, n = 0, bytes;
    int m;
    for (i = 0; i < experts; i++)
        for (m = 0; m <= last && c->offsets[i + 1] > c->offsets[i]; m++, n++) {
            const void *at = e->packed != NULL ? e->layer.packed[places[m]] : e->layer.tensors[places[m]];
            bytes = d * f * sizeof(moe_real);
            if (e->packed != NULL && moe_panel_size(e->layer.packed_type, m < last ? d : f, &bytes) == MOE_OK)
                bytes *= ((m < last ? f : d) + 15) / 16;
            blocks[n].at = (const char *)at + i * bytes;
            blocks[n].bytes = bytes;
        }
    return n;
}

/* Adds the layer with its weights as type and, where limits is 1, the read of these weights.
   Returns the entrant's number. */
static moe_status cell_enter(cell *c, const bed *b, int type, int threads, int limits, int *number, moe_error *error) {
    entrant *e = &c->entrants[c->n_entrants];
    moe_status status = MOE_OK;
    memset(e, 0, sizeof *e);
    e->layer = b->layer;
    e->call.n_tokens = c->tokens;
    e->call.x = c->x;
    if (type != AS_THEY_ARE) status = quantized_layer(e, type, error);
    if (status == MOE_OK) status = threaded_call(&e->call, threads);
    if (status == MOE_OK) status = moe_layer_work_size(&e->layer, c->tokens, 0, &e->work_size);
    if (status == MOE_OK) {
        e->work = grab(e->work_size, 1);
        e->y = (moe_real *)grab(c->tokens * (size_t)c->s.d, sizeof *e->y);
        entrant_run(e, e->y);
        status = e->status;
    }
    if (status != MOE_OK) {
        entrant_end(e);
        return status;
    }
    *number = c->n_entrants++;
    c->runs[*number] = enter(&c->contest, entrant_run, e, e->y);
    c->reads[*number] = NOTHING;
    if (!limits) return MOE_OK;
    c->blocks[*number] = (block *)grab((size_t)c->s.experts * 3, sizeof(block));
    c->read[*number] = c->fma;
    c->read[*number].blocks = c->blocks[*number];
    c->read[*number].n_blocks = cell_blocks(c, e, c->blocks[*number]);
    c->reads[*number] = enter(&c->contest, machine_read, &c->read[*number], NULL);
    return MOE_OK;
}

/* Other libraries on the first entrant's tokens. One whose result is not the layer's is a failure
   and takes no part. */
static void cell_enter_peers(cell *c, const bed *b) {
    bench_case *g = &c->grouped;
    const size_t count = c->tokens * (size_t)c->s.d;
    int i;
    if (options.threads > 1) return;
    g->kernels = kernels;
    g->tokens = c->tokens;
    g->d = (size_t)c->s.d;
    g->f = (size_t)c->s.d_ff;
    g->experts = (size_t)c->s.experts;
    g->gated = c->gated;
    g->w1 = b->layer.tensors[c->gated ? MOE_EXPERTS_GATE : MOE_EXPERTS_FC1_WEIGHT];
    g->up = c->gated ? b->layer.tensors[MOE_EXPERTS_UP] : NULL;
    g->w2 = b->layer.tensors[c->gated ? MOE_EXPERTS_DOWN : MOE_EXPERTS_FC2_WEIGHT];
    g->x = c->x;
    g->plan = &c->plan;
    c->peer_y = (moe_real *)grab(count, sizeof *c->peer_y);
    for (i = 0; i < BENCH_PEERS; i++) {
        double off;
        if (!bench_peers[i].installed || (c->peers[i] = bench_peers[i].prepare(g)) == NULL) continue;
        bench_peers[i].run(c->peers[i], c->peer_y);
        off = distance(c->peer_y, c->entrants[0].y, count);
        if (off < 1e-5) {
            c->peer_at[i] = enter(&c->contest, bench_peers[i].run, c->peers[i], c->peer_y);
            passed++;
        } else {
            fprintf(options.csv ? stderr : stdout, "%s: its result is off by %.2g at d_model=%d d_ff=%d, %lu tokens\n",
                    bench_peers[i].name, off, c->s.d, c->s.d_ff, (unsigned long)c->tokens);
            failed++;
        }
    }
}

/* The numbers of entrant i after the contest. */
static line cell_line(cell *c, const char *bench, int i, const char *weights) {
    line l = line_begin(bench, weights, &c->s, c->gated, c->tokens);
    contest *t = &c->contest;
    const contender *run = &t->list[c->runs[i]], *fma = &t->list[c->fma_at];
    double bytes = 0.0, by_memory = 0.0;
    size_t b;
    int r;
    l.used = c->used;
    l.rounds = t->rounds;
    l.us = 1e6 * time_of(t, c->runs[i], 0.5);
    l.p10 = 1e6 * time_of(t, c->runs[i], 0.1);
    l.p90 = 1e6 * time_of(t, c->runs[i], 0.9);
    l.gflops = 1e-3 * c->flops / l.us;
    for (r = 0; r < BENCH_PEERS; r++)
        if (c->peer_at[r] != NOTHING) {
            l.peer_us[r] = 1e6 * time_of(t, c->peer_at[r], 0.5);
            l.peer_ratio[r] = ratio_of(t, c->peer_at[r], c->runs[i]);
        }
    if (c->fma.form == FORM_NONE) return l;
    l.peak = 1e-9 * c->fma.flops * c->fma.threads / time_of(t, c->fma_at, 0.5);
    for (r = 0; r < t->rounds; r++)
        t->values[r] = 100.0 * c->flops / (run->times[r] * c->fma.flops * c->fma.threads / fma->times[r]);
    l.peak_percent = median(t->values, t->rounds);
    if (c->reads[i] == NOTHING) return l;
    for (b = 0; b < c->read[i].n_blocks; b++) bytes += (double)c->blocks[i][b].bytes;
    l.read_us = 1e6 * time_of(t, c->reads[i], 0.5);
    l.read_gbs = 1e-3 * bytes / l.read_us;
    for (r = 0; r < t->rounds; r++) {
        const double compute = c->flops * fma->times[r] / (c->fma.flops * c->fma.threads);
        const double memory = t->list[c->reads[i]].times[r];
        by_memory += memory > compute;
        t->values[r] = 100.0 * (memory > compute ? memory : compute) / run->times[r];
    }
    l.by_memory = 2.0 * by_memory > t->rounds;
    l.roofline_percent = median(t->values, t->rounds);
    return l;
}

static void layer_heading(int gated) {
    int i;
    printf("%s, kernels %s, %d thread%s\n\n%-10s %7s %6s %-7s %9s %7s %8s %6s %7s %8s %12s %-7s",
           gated ? "swiglu" : "two matrices and relu", kernels->name, options.threads, options.threads > 1 ? "s" : "",
           "d/d_ff", "experts", "tokens", "weights", "us", "p90/p10", "GFLOP/s", "peak", "read", "GB/s", "% roofline",
           "bound");
    for (i = 0; i < BENCH_PEERS; i++)
        if (bench_peers[i].installed) printf(" %9s", bench_peers[i].name);
    printf(" %9s\n", "framework");
}

/* A row, judged: the bound on the roofline, libxsmm in every cell of AVX-512, the frameworks. */
static void layer_row(line *l) {
    char name[32], experts[32], share[32];
    const int by_compute = l->by_memory == 0;
    int i;
    (void)snprintf(name, sizeof name, "%d/%d", l->s.d, l->s.d_ff);
    (void)snprintf(experts, sizeof experts, "%lu/%d", (unsigned long)l->used, l->s.experts);
    (void)snprintf(share, sizeof share, "%.0f %s", l->roofline_percent, l->by_memory ? "memory" : "compute");
    l->bound = bar_of(&l->s, l->tokens);
    l->framework = framework_ratio(&l->s, l->gated, l->tokens, 32, l->us, l->peak);
    if (!options.csv) {
        printf("%-10s %7s %6lu %-7s %9.2f %7.2f %8.1f", name, experts, (unsigned long)l->tokens, l->weights, l->us,
               l->p90 / l->p10, l->gflops);
        if (l->peak_percent < 0.0) printf(" %6s %7s %8s %12s %-7s", "-", "-", "-", "-", "-");
        else {
            printf(" %4.0f %% %7.2f %8.1f %12s", l->peak_percent, l->read_us, l->read_gbs, share);
            if (l->bound > 0.0) printf(" %5.0f %%", l->bound);
            else printf(" %-7s", "-");
        }
        for (i = 0; i < BENCH_PEERS; i++)
            if (bench_peers[i].installed) cell_text(l->peer_ratio[i], "%.2f");
        cell_text(l->framework, "%.2f");
    }
    if (l->bound > 0.0 && l->roofline_percent > 0.0) l->holds = l->roofline_percent * noise >= l->bound;
    if (!options.csv && l->holds != NOTHING) printf(" %s", verdict(l->holds));
    else if (l->holds != NOTHING) (void)verdict(l->holds);
    if (kernels->id == MOE_KERNELS_AVX512 && l->peer_ratio[BENCH_LIBXSMM_PEER] > 0.0) {
        const int holds = l->peer_ratio[BENCH_LIBXSMM_PEER] * noise >= 1.0;
        (void)verdict(holds);
        if (!holds && !options.csv) printf(" (libxsmm)");
    }
    if (l->framework > 0.0) {
        const double least = l->s.d == 64 ? 2.0 : by_compute ? 1.2 : 1.0;
        (void)verdict(l->framework * noise >= least);
        if (l->framework * noise < least && !options.csv) printf(" (framework: %.1f)", least);
    }
    if (options.csv) csv_line(l);
    else printf("\n");
    fflush(stdout);
}

static const struct holding {
    const char *name;
    int type;
} holdings[] = {{"plain", AS_THEY_ARE}, {"packed", MOE_TYPE_REAL}};

/* All that a cell of the bench "layers" measures. */
static void layer_cell(const bed *b, const shape *s, int gated, size_t tokens) {
    static cell c;
    moe_error error = {MOE_OK, ""};
    moe_status status = cell_begin(&c, b, s, gated, tokens);
    int numbers[2] = {NOTHING, NOTHING};
    size_t h;
    for (h = 0; status == MOE_OK && h < sizeof holdings / sizeof holdings[0]; h++) {
        status = cell_enter(&c, b, holdings[h].type, options.threads, 1, &numbers[h], &error);
        if (h > 0 && status == MOE_ERR_UNSUPPORTED) status = MOE_OK;
    }
    if (status == MOE_OK) {
        cell_enter_peers(&c, b);
        hold(&c.contest);
        for (h = 0; h < sizeof holdings / sizeof holdings[0]; h++)
            if (numbers[h] != NOTHING) {
                line l = cell_line(&c, "layers", numbers[h], holdings[h].name);
                layer_row(&l);
                passed++;
            }
    } else print_failure("a layer", status, &error);
    cell_end(&c);
}

/* Calls for each kind and shape, with a bed of it. */
static void for_all_layers(void (*heading)(int gated), void (*one)(const bed *b, const shape *s, int gated)) {
    int kind, i;
    for (kind = 0; kind < options.n_kinds; kind++) {
        if (!options.csv) heading(options.gated[kind]);
        for (i = 0; i < shape_count(); i++) {
            moe_error error = {MOE_OK, ""};
            bed b;
            moe_status status = shape_bed(&b, shape_at(i), options.gated[kind], &error);
            if (status == MOE_OK) one(&b, shape_at(i), options.gated[kind]);
            else print_failure("a layer", status, &error);
            bed_free(&b);
        }
        if (!options.csv) printf("\n");
    }
}

static void layer_shape(const bed *b, const shape *s, int gated) {
    int t;
    for (t = 0; t < token_count(); t++) layer_cell(b, s, gated, tokens_at(t));
}

static void bench_layers(void) {
    if (!options.csv)
        printf(
            "Layers: a forward pass against the machine's limits and other libraries.\n"
            "  experts    those that have tokens          weights    plain: tensors as they are; packed: by "
            "moe_layer_pack\n"
            "  peak       percent of the multiply-adds between registers       read, GB/s   us for a plain read of the "
            "weights of these experts\n"
            "  %% roofline the larger of both limits, as a percentage of the time; bound: the least that it must be\n"
            "  libraries  their time as a multiple of the layer's, for the experts alone, routing given to them (*: "
            "packed beforehand)\n"
            "  framework  the same for the best of ggml, PyTorch and ONNX Runtime, measured elsewhere and carried over "
            "by the peak\n\n");
    for_all_layers(layer_heading, layer_shape);
}

/* ---- training: forward and backward ---- */

typedef struct step {
    moe_layer layer;
    moe_call call;
    moe_real *x, *y, *dy, *dx;
    void *work;
    size_t work_size;
    moe_status status;
} step;

static void step_run(void *state, moe_real *y) {
    step *s = (step *)state;
    moe_layer_pass pass;
    s->status = moe_layer_forward(&s->layer, &s->call, y, s->work, s->work_size, &pass);
    memset(s->dx, 0, s->call.n_tokens * (size_t)s->layer.config.router.d_model * sizeof *s->dx);
    if (s->status == MOE_OK) s->status = moe_layer_backward(&s->layer, s->dy, s->dx, NULL, &pass);
}

static moe_status step_begin(step *s, const bed *b, size_t tokens, moe_error *error) {
    const moe_allocator memory = {NULL, grab_resize};
    const size_t count = tokens * (size_t)b->layer.config.router.d_model;
    moe_rng rng = {11};
    moe_status status;
    memset(s, 0, sizeof *s);
    status = moe_layer_create(&s->layer, &b->layer.config, 1, 42, &memory, error);
    if (status == MOE_OK) status = moe_layer_work_size(&s->layer, tokens, 1, &s->work_size);
    if (status != MOE_OK) return status;
    s->x = normals(count, &rng);
    s->dy = normals(count, &rng);
    s->y = normals(count, &rng);
    s->dx = normals(count, &rng);
    s->work = grab(s->work_size, 1);
    s->call.n_tokens = tokens;
    s->call.x = s->x;
    s->call.training = 1;
    status = threaded_call(&s->call, options.threads);
    if (status == MOE_OK) {
        step_run(s, s->y);
        status = s->status;
    }
    return status;
}

static void step_end(step *s) {
    moe_layer_free(&s->layer);
    free(s->x);
    free(s->y);
    free(s->dy);
    free(s->dx);
    free(s->work);
}

/* Milliseconds of the best framework's step at 512 tokens, by the peaks of frameworks[]. */
static const struct trainer {
    int d, gated;
    double avx512, avx2;
} trainers[] = {{64, 1, 5.0, 6.9}, {352, 1, 26.9, 40.7}, {512, 1, 96.6, 153.4}, {768, 1, 416.1, 680.5},
                {64, 0, 3.2, 4.4}, {352, 0, 15.3, 24.2}, {512, 0, 54.8, 94.0},  {768, 0, 253.6, 437.3}};

static double trainer_ratio(const line *l) {
    size_t i;
    for (i = 0; i < sizeof trainers / sizeof trainers[0] && has_bars() && options.threads == 1; i++)
        if (trainers[i].d == l->s.d && trainers[i].gated == l->gated && l->tokens == 512 && l->s.experts == 8)
            return 1e3 * (kernels->id == MOE_KERNELS_AVX512 ? trainers[i].avx512 : trainers[i].avx2) *
                   framework_peak() / (l->us * l->peak);
    return NOTHING;
}

static void training_heading(int gated) {
    printf("%s, kernels %s, %d thread%s\n\n%-10s %7s %6s %9s %7s %8s %6s %6s %9s\n",
           gated ? "swiglu" : "two matrices and relu", kernels->name, options.threads, options.threads > 1 ? "s" : "",
           "d/d_ff", "experts", "tokens", "ms", "p90/p10", "GFLOP/s", "peak", "bound", "framework");
}

static void training_row(line *l) {
    char name[32];
    (void)snprintf(name, sizeof name, "%d/%d", l->s.d, l->s.d_ff);
    l->framework = l->peak > 0.0 ? trainer_ratio(l) : NOTHING;
    if (has_bars() && l->peak > 0.0 && l->tokens == 512) {
        l->bound = l->s.d == 64 ? 65.0 : 75.0;
        l->holds = l->peak_percent * noise >= l->bound;
    }
    if (options.csv) {
        csv_line(l);
        if (l->holds != NOTHING) (void)verdict(l->holds);
        return;
    }
    printf("%-10s %7d %6lu %9.3f %7.2f %8.1f", name, l->s.experts, (unsigned long)l->tokens, 1e-3 * l->us,
           l->p90 / l->p10, l->gflops);
    if (l->peak > 0.0) printf(" %4.0f %%", l->peak_percent);
    else printf(" %6s", "-");
    if (l->bound > 0.0) printf(" %4.0f %%", l->bound);
    else printf(" %6s", "-");
    cell_text(l->framework, "%.2f");
    printf(" %s\n", l->holds != NOTHING ? verdict(l->holds) : "");
    fflush(stdout);
}

static void training_shape(const bed *b, const shape *s, int gated) {
    static cell c; /* its contest and limits */
    static step state;
    const size_t tokens = options.n_tokens > 0 ? options.tokens[0] : 512;
    moe_error error = {MOE_OK, ""};
    moe_status status = cell_begin(&c, b, s, gated, tokens);
    if (status == MOE_OK) status = step_begin(&state, b, tokens, &error);
    if (status == MOE_OK) {
        line l;
        c.flops *= 3.0;
        c.runs[0] = enter(&c.contest, step_run, &state, state.y);
        c.reads[0] = NOTHING;
        hold(&c.contest);
        l = cell_line(&c, "training", 0, "plain");
        training_row(&l);
        passed++;
    } else print_failure("training", status, &error);
    step_end(&state);
    memset(&state, 0, sizeof state);
    cell_end(&c);
}

static void bench_training(void) {
    if (!options.csv)
        printf("Training: forward and backward, no optimizer; three times the multiplications of forward.\n"
               "  peak: percent of the multiply-adds between registers; framework: PyTorch's time as a multiple of "
               "this, carried over by the peak\n\n");
    for_all_layers(training_heading, training_shape);
}

/* ---- text: training a byte language model, against PyTorch ---- */

/* tests/bench/peers/train_torch.py has the same numbers, and the same pieces of the same text. */
enum {
    TEXT_D = 128, TEXT_D_FF = 512, TEXT_LAYERS = 4, TEXT_HEADS = 4, TEXT_VOCABULARY = 256, TEXT_LENGTH = 128,
    TEXT_BATCH = 16
};
enum { TEXT_TOKENS = TEXT_LENGTH * TEXT_BATCH };
static const shape text_shape = {TEXT_D, TEXT_D_FF, 8, 2};
static const char *const text_file = "moe.h";

typedef struct student {
    moe_net net;
    moe_trainer trainer;
    moe_call call; /* for its threads */
    unsigned char *text;
    size_t size;
    int32_t tokens[TEXT_TOKENS], labels[TEXT_TOKENS];
    moe_step step;
    moe_status status;
    moe_error error;
} student;

static unsigned char *read_text(size_t *size) {
    enum { MOST = 1 << 24 };
    FILE *file = fopen(text_file, "rb");
    unsigned char *text;
    if (file == NULL) return NULL;
    text = (unsigned char *)grab(MOST, 1);
    *size = fread(text, 1, MOST, file);
    fclose(file);
    return text;
}

/* Sequence number s of all that are trained on starts at 9973 s, around the end. */
static void next_batch(student *s) {
    const size_t room = s->size - TEXT_LENGTH - 1;
    size_t i, t;
    for (i = 0; i < TEXT_BATCH; i++) {
        const unsigned char *from = s->text + ((size_t)s->trainer.steps * TEXT_BATCH + i) * 9973 % room;
        for (t = 0; t < TEXT_LENGTH; t++) {
            s->tokens[i * TEXT_LENGTH + t] = from[t];
            s->labels[i * TEXT_LENGTH + t] = from[t + 1];
        }
    }
}

static void student_run(void *state, moe_real *y) {
    student *s = (student *)state;
    moe_data batch;
    (void)y;
    if (s->status != MOE_OK) return;
    memset(&batch, 0, sizeof batch);
    next_batch(s);
    batch.n = TEXT_TOKENS;
    batch.length = TEXT_LENGTH;
    batch.token_ids = s->tokens;
    batch.labels = s->labels;
    batch.call = &s->call;
    s->status = moe_trainer_step(&s->trainer, &batch, &s->step, &s->error);
}

static void student_modules(moe_net *net) {
    moe_attention_config attention;
    moe_layer_config mixture;
    int i;
    memset(&attention, 0, sizeof attention);
    memset(&mixture, 0, sizeof mixture);
    attention.heads = TEXT_HEADS;
    attention.rotary = 1;
    mixture.d_ff = TEXT_D_FF;
    mixture.router.n_experts = text_shape.experts;
    mixture.router.top_k = text_shape.top_k;
    mixture.router.loss_balance = (moe_real)0.01;
    (void)moe_net_embedding(net, TEXT_VOCABULARY, TEXT_D);
    for (i = 0; i < TEXT_LAYERS; i++) {
        (void)moe_net_rms_norm(net);
        (void)moe_net_attention(net, &attention);
        (void)moe_net_residual(net, 2);
        (void)moe_net_rms_norm(net);
        (void)moe_net_mixture(net, &mixture);
        (void)moe_net_residual(net, 2);
    }
    (void)moe_net_rms_norm(net);
    (void)moe_net_tied(net);
}

/* On the standard heap, as PyTorch. */
static moe_status student_begin(student *s) {
    moe_train_config config;
    memset(s, 0, sizeof *s);
    memset(&config, 0, sizeof config);
    config.batch = TEXT_TOKENS;
    config.clip = (moe_real)1.0;
    s->text = read_text(&s->size);
    if (s->text == NULL || s->size < TEXT_LENGTH + 2) {
        (void)snprintf(s->error.message, sizeof s->error.message,
                       "%s cannot be read; start in the folder where it lies", text_file);
        return MOE_ERR_IO;
    }
    if (moe_net_init(&s->net, 0, kernels->id, NULL) == MOE_OK) student_modules(&s->net);
    s->status = moe_net_build(&s->net, 1, 42, &s->error);
    if (s->status == MOE_OK) s->status = moe_trainer_init(&s->trainer, &s->net, &config, &s->error);
    if (s->status == MOE_OK) s->status = threaded_call(&s->call, options.threads);
    if (s->status == MOE_OK) student_run(s, NULL);
    return s->status;
}

static void student_end(student *s) {
    moe_trainer_free(&s->trainer);
    moe_net_free(&s->net);
    free(s->text);
}

/* Multiply-adds of forward are two operations each, backward takes twice as many. A token sees half
   of its sequence. */
static double text_flops(void) {
    const double d = TEXT_D, f = TEXT_D_FF;
    const double layer = 4 * d * d + d * (TEXT_LENGTH + 1) + d * text_shape.experts + 3 * d * f * text_shape.top_k;
    return 3.0 * 2.0 * TEXT_TOKENS * (TEXT_LAYERS * layer + d * TEXT_VOCABULARY);
}

/* tests/bench/peers/train_torch.py, a process that takes a step whenever it is sent a line. */
typedef struct torch {
    FILE *ask, *answer;
    long process;
    double seconds, loss; /* of all steps so far; of the last one */
    int ended;
} torch;

/* How it may run: OpenBLAS's kernels, how the experts are computed. AVX2 kernels are compared with
   the first ones. */
static const struct torch_way {
    const char *core, *form;
} torch_ways[] = {{"Haswell", "loop"}, {"Haswell", "padded"}, {"SkylakeX", "loop"}, {"SkylakeX", "padded"}};

static void torch_run(void *state, moe_real *y) {
    torch *p = (torch *)state;
    char text[256];
    double taken;
    (void)y;
    if (p->ended) return;
    p->ended = fputs("step\n", p->ask) == EOF || fflush(p->ask) == EOF || fgets(text, sizeof text, p->answer) == NULL ||
               sscanf(text, "seconds %lf tokens_per_second %*f loss %lf", &taken, &p->loss) != 2;
    if (!p->ended) p->seconds += taken;
}

static double torch_clock(const void *state) { return ((const torch *)state)->seconds; }

#if BENCH_UNIX
/* BENCH_PYTHON is a Python that has PyTorch. Returns whether it took a step. */
static int torch_begin(torch *p, const struct torch_way *way) {
    static const char script[] = "tests/bench/peers/train_torch.py";
    const char *python = getenv("BENCH_PYTHON");
    int to[2], from[2];
    memset(p, 0, sizeof *p);
    p->ended = 1;
    if (python == NULL || python[0] == '\0' || access(script, R_OK) != 0 || pipe(to) != 0) return 0;
    if (pipe(from) != 0) {
        close(to[0]);
        close(to[1]);
        return 0;
    }
    (void)signal(SIGPIPE, SIG_IGN);
    fflush(stdout);
    if ((p->process = (long)fork()) == 0) {
        (void)dup2(to[0], 0);
        (void)dup2(from[1], 1);
        (void)close(to[0]);
        (void)close(to[1]);
        (void)close(from[0]);
        (void)close(from[1]);
        (void)setenv("OMP_NUM_THREADS", "1", 1);
        (void)setenv("OPENBLAS_NUM_THREADS", "1", 1);
        (void)setenv("OPENBLAS_CORETYPE", way->core, 1);
        (void)execlp(python, python, script, text_file, way->form, (char *)NULL);
        _exit(127);
    }
    (void)close(to[0]);
    (void)close(from[1]);
    p->ask = fdopen(to[1], "w");
    p->answer = fdopen(from[0], "r");
    p->ended = p->process < 0 || p->ask == NULL || p->answer == NULL;
    torch_run(p, NULL);
    return !p->ended;
}

static void torch_end(torch *p) {
    if (p->ask != NULL) fclose(p->ask);
    if (p->answer != NULL) fclose(p->answer);
    if (p->process > 0) (void)waitpid((pid_t)p->process, NULL, 0);
    memset(p, 0, sizeof *p);
}
#else
static int torch_begin(torch *p, const struct torch_way *way) {
    (void)way;
    memset(p, 0, sizeof *p);
    return 0;
}
static void torch_end(torch *p) { (void)p; }
#endif

/* The fastest way of three steps each, or NULL where there is no PyTorch. */
static const struct torch_way *torch_choose(void) {
    const size_t all = sizeof torch_ways / sizeof torch_ways[0], n = kernels->id == MOE_KERNELS_AVX512 ? all : all / 2;
    const struct torch_way *best = NULL;
    double fastest = 0.0;
    torch p;
    size_t i;
    int k;
    for (i = 0; i < n && options.threads == 1; i++) {
        double start = 0.0;
        if (torch_begin(&p, &torch_ways[i])) start = p.seconds;
        for (k = 0; k < 3; k++) torch_run(&p, NULL);
        if (!p.ended && (best == NULL || p.seconds - start < fastest)) {
            fastest = p.seconds - start;
            best = &torch_ways[i];
        }
        torch_end(&p);
    }
    return best;
}

static void text_print(const line *l, const student *s, const struct torch_way *way, double torch_seconds,
                       double torch_loss) {
    const double millions = 1e-6 * (double)moe_net_parameter_count(&s->net, NULL);
    printf("d %d, %d layers, %d experts (top %d), context %d, batch %d, %.1f million parameters, kernels %s, %d "
           "thread%s\n\n",
           TEXT_D, TEXT_LAYERS, text_shape.experts, text_shape.top_k, TEXT_LENGTH, TEXT_BATCH, millions, kernels->name,
           options.threads, options.threads > 1 ? "s" : "");
    printf("%-10s %9s %7s %9s %8s %6s %9s\n", "", "ms/step", "p90/p10", "tokens/s", "GFLOP/s", "peak", "loss");
    printf("%-10s %9.1f %7.2f %9.0f %8.1f", "this", 1e-3 * l->us, l->p90 / l->p10, 1e6 * TEXT_TOKENS / l->us,
           l->gflops);
    if (l->peak > 0.0) printf(" %4.0f %%", l->peak_percent);
    else printf(" %6s", "-");
    printf(" %9.3f\n", (double)s->step.loss);
    if (way == NULL) {
        printf("PyTorch: %s\n\n", options.threads > 1 ? "compared on one thread only"
                                                      : "not installed (Debian: python3-torch libopenblas0-pthread)");
        return;
    }
    printf("%-10s %9.1f %7s %9.0f %8.1f %6s %9.3f\n", "PyTorch", 1e3 * torch_seconds, "", TEXT_TOKENS / torch_seconds,
           1e-9 * text_flops() / torch_seconds, "", torch_loss);
    printf("ratio %.2f, bound %.1f: %s (experts: %s; OpenBLAS: %s)\n\n", l->ratio, l->bound, verdict(l->holds),
           way->form, way->core);
}

static void text_contest(student *s, const struct torch_way *way) {
    static contest c;
    machine fma = {FORM_NONE, 1, 0.0, NULL, 0};
    torch p;
    line l = line_begin("text", "plain", &text_shape, 1, TEXT_TOKENS);
    const int ours = enter(&c, student_run, s, NULL);
    int theirs = NOTHING, limit = NOTHING, r;
    fma.form = machine_form();
    fma.threads = options.threads;
    if (fma.form != FORM_NONE) limit = enter(&c, machine_fma, &fma, NULL);
    memset(&p, 0, sizeof p);
    if (way != NULL && torch_begin(&p, way)) {
        theirs = enter(&c, torch_run, &p, NULL);
        c.list[theirs].clock = torch_clock;
    }
    hold(&c);
    l.rounds = c.rounds;
    l.used = (size_t)text_shape.experts;
    l.us = 1e6 * time_of(&c, ours, 0.5);
    l.p10 = 1e6 * time_of(&c, ours, 0.1);
    l.p90 = 1e6 * time_of(&c, ours, 0.9);
    l.gflops = 1e-3 * text_flops() / l.us;
    if (limit != NOTHING) {
        l.peak = 1e-9 * fma.flops * fma.threads / time_of(&c, limit, 0.5);
        for (r = 0; r < c.rounds; r++)
            c.values[r] =
                100.0 * text_flops() / (c.list[ours].times[r] * fma.flops * fma.threads / c.list[limit].times[r]);
        l.peak_percent = median(c.values, c.rounds);
    }
    if (theirs != NOTHING && !p.ended) {
        l.ratio = ratio_of(&c, theirs, ours);
        l.bound = 1.6;
        l.holds = l.ratio >= l.bound;
    }
    if (options.csv) {
        csv_line(&l);
        if (l.holds != NOTHING) {
            (void)verdict(l.holds);
            fprintf(stderr, "PyTorch: experts %s, OpenBLAS with kernels %s\n", way->form, way->core);
        }
    } else
        text_print(&l, s, l.holds == NOTHING ? NULL : way, theirs == NOTHING ? 0.0 : time_of(&c, theirs, 0.5), p.loss);
    torch_end(&p);
    contest_end(&c);
}

static void bench_text(void) {
    static student s;
    moe_status status = student_begin(&s);
    if (!options.csv)
        printf(
            "Text: training steps of a byte language model (forward, backward, clipping, AdamW) on the bytes of %s.\n"
            "  peak: percent of the multiply-adds between registers; ratio: PyTorch's time as a multiple of this, "
            "measured in turns\n\n",
            text_file);
    if (status == MOE_OK) text_contest(&s, torch_choose());
    if (s.status == MOE_OK && status == MOE_OK) passed++;
    else print_failure("text", status != MOE_OK ? status : s.status, &s.error);
    student_end(&s);
}

/* ---- tiny: one token through next to nothing, against plain loops ---- */

enum { TINY_D = 16, TINY_F = 32, TINY_EXPERTS = 4 };

/* The layer as a user would write it: the forward loops of examples/lecture.c with K = 1. */
typedef struct plain_layer {
    const moe_real *x, *router;   /* [d], [E,d] */
    const moe_real *w1, *up, *w2; /* [E,f,d], [E,f,d] or NULL (relu), [E,d,f] */
    moe_real y[TINY_D];
} plain_layer;

static moe_real plain_hidden(const plain_layer *l, const moe_real *w1, const moe_real *up) {
    moe_real g = 0, u = 0;
    int i;
    for (i = 0; i < TINY_D; i++) g += w1[i] * l->x[i];
    if (up == NULL) return g > 0 ? g : 0;
    for (i = 0; i < TINY_D; i++) u += up[i] * l->x[i];
    return g / (1 + expf(-g)) * u;
}

static void plain_run(void *state, moe_real *y) {
    const plain_layer *l = (const plain_layer *)state;
    moe_real z[TINY_EXPERTS], p[TINY_EXPERTS], h[TINY_F], sum = 0;
    const moe_real *w = l->router;
    int e, f, i, best = 0, at;
    for (e = 0; e < TINY_EXPERTS; e++, w += TINY_D) {
        z[e] = 0;
        for (i = 0; i < TINY_D; i++) z[e] += w[i] * l->x[i];
        if (z[e] > z[best]) best = e;
    }
    for (e = 0; e < TINY_EXPERTS; e++) sum += p[e] = expf(z[e] - z[best]);
    for (e = 0; e < TINY_EXPERTS; e++) p[e] /= sum;
    at = best * TINY_F * TINY_D;
    for (f = 0; f < TINY_F; f++, at += TINY_D) h[f] = plain_hidden(l, l->w1 + at, l->up == NULL ? NULL : l->up + at);
    w = l->w2 + best * TINY_D * TINY_F;
    for (i = 0; i < TINY_D; i++, w += TINY_F) {
        y[i] = 0;
        for (f = 0; f < TINY_F; f++) y[i] += w[f] * h[f];
        y[i] *= p[best] / p[best]; /* its share of the chosen experts */
    }
}

/* Enters the plain loops, whose result must be the layer's. */
static int plain_enter(cell *c, const bed *b, plain_layer *l) {
    double off;
    l->x = c->x;
    l->router = b->layer.tensors[MOE_ROUTER_WEIGHT];
    l->w1 = b->layer.tensors[c->gated ? MOE_EXPERTS_GATE : MOE_EXPERTS_FC1_WEIGHT];
    l->up = c->gated ? b->layer.tensors[MOE_EXPERTS_UP] : NULL;
    l->w2 = b->layer.tensors[c->gated ? MOE_EXPERTS_DOWN : MOE_EXPERTS_FC2_WEIGHT];
    plain_run(l, l->y);
    off = distance(l->y, c->entrants[0].y, TINY_D);
    if (off < 1e-5) passed++;
    else {
        fprintf(options.csv ? stderr : stdout, "plain loops: the result is off by %.2g\n", off);
        failed++;
    }
    return enter(&c->contest, plain_run, l, l->y);
}

static void tiny_row(const line *l) {
    int i;
    if (options.csv) {
        csv_line(l);
        (void)verdict(l->holds);
        return;
    }
    printf("%-8s %-7s %9.3f %7.2f %7.2f %6.2f", kind_name(l->gated), l->weights, l->us, l->p90 / l->p10, l->ratio,
           l->bound);
    for (i = 0; i < BENCH_PEERS; i++)
        if (bench_peers[i].installed) cell_text(l->peer_ratio[i], "%.2f");
    printf(" %s\n", verdict(l->holds));
}

static void tiny_layer(int gated) {
    static const shape s = {TINY_D, TINY_F, TINY_EXPERTS, 1};
    static cell c;
    static plain_layer plain;
    int numbers[2] = {NOTHING, NOTHING}, loops = NOTHING;
    moe_error error = {MOE_OK, ""};
    bed b;
    size_t h;
    moe_status status = shape_bed(&b, &s, gated, &error);
    if (status == MOE_OK) status = cell_begin(&c, &b, &s, gated, 1);
    for (h = 0; status == MOE_OK && h < sizeof holdings / sizeof holdings[0]; h++) {
        status = cell_enter(&c, &b, holdings[h].type, 1, 1, &numbers[h], &error);
        if (h > 0 && status == MOE_ERR_UNSUPPORTED) status = MOE_OK;
    }
    if (status == MOE_OK) {
        loops = plain_enter(&c, &b, &plain);
        cell_enter_peers(&c, &b);
        hold(&c.contest);
    } else print_failure("a tiny layer", status, &error);
    for (h = 0; status == MOE_OK && h < sizeof holdings / sizeof holdings[0]; h++) {
        line l;
        if (numbers[h] == NOTHING) continue;
        l = cell_line(&c, "tiny", numbers[h], holdings[h].name);
        l.ratio = ratio_of(&c.contest, c.runs[numbers[h]], loops);
        l.bound = 1.8;
        l.holds = l.ratio <= l.bound * noise;
        passed++;
        tiny_row(&l);
    }
    cell_end(&c);
    bed_free(&b);
}

static void bench_tiny(void) {
    int i;
    if (!options.csv) {
        printf("Tiny: one token, d_model %d, d_ff %d, %d experts, the best one; kernels %s, one thread.\n"
               "loops: its time as a multiple of plain loops in C, routing included; libraries as in layers.\n\n"
               "%-8s %-7s %9s %7s %7s %6s",
               TINY_D, TINY_F, TINY_EXPERTS, kernels->name, "expert", "weights", "us", "p90/p10", "loops", "bound");
        for (i = 0; i < BENCH_PEERS; i++)
            if (bench_peers[i].installed) printf(" %9s", bench_peers[i].name);
        printf("\n");
    }
    for (i = 0; i < options.n_kinds; i++) tiny_layer(options.gated[i]);
    if (!options.csv) printf("\n");
}

/* ---- quant: smaller weights against our own floats ---- */

/* most_off: the relative root mean square that swiglu layers may be off. */
static const struct small {
    const char *name;
    int type, bits;
    double most_off;
} smalls[] = {
    {"f16", MOE_TYPE_F16, 16, NOTHING},       {"bf16", MOE_TYPE_BF16, 16, NOTHING}, {"int8", MOE_TYPE_Q8, 8, 0.03},
    {"int8/32", MOE_TYPE_Q8_BLOCK, 8, 0.018}, {"int4/32", MOE_TYPE_Q4, 4, 0.17},
};

enum { SMALLS = sizeof smalls / sizeof smalls[0] };

/* Least times as fast as floats: 8 bit at 512 tokens, and both at one token from memory. */
static double small_bound(const struct small *q, const shape *s, size_t tokens) {
    const int vnni = kernels->id == MOE_KERNELS_AVX512 && (moe_cpu_features() & MOE_CPU_AVX512VNNI) != 0;
    if (!has_bars()) return NOTHING;
    if (q->bits == 8 && tokens == 512) return vnni ? 2.5 : 1.3;
    if (tokens == 1 && is_shape(s, 768, 3072)) return q->bits == 8 ? 3.4 : q->bits == 4 ? 6.0 : NOTHING;
    return NOTHING;
}

static void small_heading(int gated) {
    printf("%s, kernels %s, %d thread%s\n\n%-10s %7s %6s %-8s %9s %7s %8s %7s %6s %7s %6s %9s\n",
           gated ? "swiglu" : "two matrices and relu", kernels->name, options.threads, options.threads > 1 ? "s" : "",
           "d/d_ff", "experts", "tokens", "weights", "us", "p90/p10", "GOP/s", "faster", "bound", "off", "bound",
           "framework");
}

static void small_row(line *l, const struct small *q) {
    char name[32];
    const double least = l->tokens == 512 ? 4.0 : 1.0;
    int holds = 1, bounds = 0;
    int framework_holds = 1;
    (void)snprintf(name, sizeof name, "%d/%d", l->s.d, l->s.d_ff);
    l->bound = small_bound(q, &l->s, l->tokens);
    l->framework = q->bits < 16 ? framework_ratio(&l->s, l->gated, l->tokens, q->bits, l->us, l->peak) : NOTHING;
    if (l->bound > 0.0) {
        holds = holds && l->ratio * noise >= l->bound;
        bounds = 1;
    }
    if (q->most_off > 0.0 && l->gated) {
        l->rms_bound = q->most_off;
        holds = holds && l->rms <= l->rms_bound;
        bounds = 1;
    }
    if (bounds) l->holds = holds;
    if (l->framework > 0.0) { /* a verdict of its own: it was not measured here */
        framework_holds = l->framework * noise >= least;
        (void)verdict(framework_holds);
    }
    if (options.csv) {
        csv_line(l);
        if (bounds) (void)verdict(holds);
        return;
    }
    printf("%-10s %7d %6lu %-8s %9.2f %7.2f %8.1f %7.2f", name, l->s.experts, (unsigned long)l->tokens, l->weights,
           l->us, l->p90 / l->p10, l->gflops, l->ratio);
    if (l->bound > 0.0) printf(" %6.1f", l->bound);
    else printf(" %6s", "-");
    printf(" %5.2f %%", 100.0 * l->rms);
    if (l->rms_bound > 0.0) printf(" %4.1f %%", 100.0 * l->rms_bound);
    else printf(" %6s", "-");
    cell_text(l->framework, "%.2f");
    printf(" %s", bounds ? verdict(holds) : "");
    if (!framework_holds) printf(" (framework: %.1f)", least);
    printf("\n");
    fflush(stdout);
}

static void small_cell(const bed *b, const shape *s, int gated, size_t tokens) {
    static cell c;
    moe_error error = {MOE_OK, ""};
    moe_status status = cell_begin(&c, b, s, gated, tokens);
    int numbers[SMALLS], reference, packed, i, entered = 0;
    if (status == MOE_OK) status = cell_enter(&c, b, AS_THEY_ARE, options.threads, 0, &reference, &error);
    if (status == MOE_OK && cell_enter(&c, b, MOE_TYPE_REAL, options.threads, 0, &packed, &error) == MOE_OK)
        reference = packed;
    for (i = 0; status == MOE_OK && i < SMALLS; i++) {
        const moe_status added = cell_enter(&c, b, smalls[i].type, options.threads, 1, &numbers[i], &error);
        if (added != MOE_OK) numbers[i] = NOTHING;
        if (added != MOE_OK && added != MOE_ERR_UNSUPPORTED) status = added;
        entered += added == MOE_OK;
    }
    if (status == MOE_OK && entered > 0) hold(&c.contest);
    for (i = 0; status == MOE_OK && i < SMALLS; i++) {
        line l;
        if (numbers[i] == NOTHING) continue;
        l = cell_line(&c, "quant", numbers[i], smalls[i].name);
        l.ratio = ratio_of(&c.contest, c.runs[reference], c.runs[numbers[i]]);
        l.rms = distance(c.entrants[numbers[i]].y, c.entrants[0].y, tokens * (size_t)s->d);
        l.roofline_percent = l.by_memory = NOTHING; /* the peak is that of floats */
        small_row(&l, &smalls[i]);
        passed++;
    }
    if (status != MOE_OK) print_failure("a layer with small weights", status, &error);
    else if (entered == 0) {
        if (!options.csv) printf("%d/%d, %lu tokens: not available\n", s->d, s->d_ff, (unsigned long)tokens);
        passed++;
    }
    cell_end(&c);
}

static void small_shape(const bed *b, const shape *s, int gated) {
    int t;
    for (t = 0; t < token_count(); t++) small_cell(b, s, gated, tokens_at(t));
}

static void bench_quant(void) {
    if (!options.csv)
        printf("Quant: experts with smaller weights.\n"
               "  faster     so many times as fast as floats (packed, where that exists) and its bound       off   "
               "relative root mean square, by the floats\n"
               "  framework  the best quantized figure of ggml and ONNX Runtime as a multiple of this, carried over by "
               "the peak; at least 1, 4 at 512 tokens\n\n");
    for_all_layers(small_heading, small_shape);
}

/* ---- threads: some against one ---- */

static void thread_heading(int gated) {
    printf("%s, kernels %s, 2 threads against 1\n\n%-10s %7s %6s %-7s %9s %9s %7s %6s %9s\n",
           gated ? "swiglu" : "two matrices and relu", kernels->name, "d/d_ff", "experts", "tokens", "weights", "us",
           "us of 1", "faster", "bound", "machine");
}

/* All threads at once and one alone, in turn. */
static void thread_cell(const bed *b, const shape *s, int gated, size_t tokens) {
    static cell c;
    static machine alone;
    moe_error error = {MOE_OK, ""};
    moe_status status = cell_begin(&c, b, s, gated, tokens);
    int one, two, at, packed = 1;
    char name[32];
    line l;
    c.fma.threads = options.threads;
    alone = c.fma;
    alone.threads = 1;
    at = enter(&c.contest, machine_fma, &alone, NULL);
    if (status == MOE_OK && cell_enter(&c, b, MOE_TYPE_REAL, 1, 0, &one, &error) != MOE_OK) packed = 0;
    if (status == MOE_OK && !packed) status = cell_enter(&c, b, AS_THEY_ARE, 1, 0, &one, &error);
    if (status == MOE_OK)
        status = cell_enter(&c, b, packed ? MOE_TYPE_REAL : AS_THEY_ARE, options.threads, 0, &two, &error);
    if (status == MOE_ERR_UNSUPPORTED && !options.csv)
        printf("%d/%d, %lu tokens: not available\n", s->d, s->d_ff, (unsigned long)tokens);
    if (status == MOE_ERR_UNSUPPORTED) passed++;
    else if (status != MOE_OK) print_failure("threads", status, &error);
    if (status == MOE_OK) {
        hold(&c.contest);
        l = cell_line(&c, "threads", two, packed ? "packed" : "plain");
        l.ratio = ratio_of(&c.contest, c.runs[one], c.runs[two]);
        l.bound = options.threads == 2 && tokens == 512 ? 1.8 : 1.0;
        l.holds = l.ratio * noise >= l.bound;
        passed++;
        (void)snprintf(name, sizeof name, "%d/%d", s->d, s->d_ff);
        if (options.csv) {
            csv_line(&l);
            (void)verdict(l.holds);
        } else
            printf("%-10s %7d %6lu %-7s %9.2f %9.2f %7.2f %6.1f %9.2f %s\n", name, s->experts, (unsigned long)tokens,
                   l.weights, l.us, 1e6 * time_of(&c.contest, c.runs[one], 0.5), l.ratio, l.bound,
                   options.threads * ratio_of(&c.contest, at, c.fma_at), verdict(l.holds));
        fflush(stdout);
    }
    cell_end(&c);
}

static void thread_shape(const bed *b, const shape *s, int gated) {
    int t;
    for (t = 0; t < token_count(); t++) thread_cell(b, s, gated, tokens_at(t));
}

static void use_threads(int threads);

static void bench_threads(void) {
    const int before = options.threads;
    if (!options.csv)
        printf("Threads: a forward pass on all of them against one, by the clock on the wall.\n"
               "  machine: what multiply-adds between registers gain, the most that can be reached\n\n");
    if (options.threads < 2) use_threads(2);
    for_all_layers(thread_heading, thread_shape);
    use_threads(before);
}

/* ---- all benches ---- */

static const struct bench {
    const char *name;
    void (*run)(void);
    const char *about;
} benches[] = {
    {"layers", bench_layers, "forward passes against the machine's limits and other libraries"},
    {"training", bench_training, "forward and backward against the machine's limit"},
    {"text", bench_text, "training steps of a language model, against PyTorch"},
    {"tiny", bench_tiny, "one token through a tiny layer"},
    {"quant", bench_quant, "16-bit, int8 and int4 weights against floats"},
    {"threads", bench_threads, "two threads against one"},
    {"routers", bench_routers, "what each router adds to the time of a layer"},
};

enum { BENCHES = sizeof benches / sizeof benches[0] };

static void use_threads(int threads) {
    crew_end();
    options.threads = crew_begin(threads);
    on_the_wall = options.threads > 1;
}

static void help(void) {
    int i;
    printf("bench [NAME...] [OPTION...]\n"
           "Measures; without a NAME everything. The last line is \"N passed, M failed\". A bound that is not kept is "
           "printed as MISSED; for routers and\n"
           "with --strict it is a failure. A NAME is one of\n");
    for (i = 0; i < BENCHES; i++) printf("  %-12s %s\n", benches[i].name, benches[i].about);
    printf(
        "OPTIONS\n"
        "  --csv              a line per result with all numbers instead of tables; empty: not measured (not routers)\n"
        "  --quick            fewer rounds; two shapes and swiglu alone, unless they are asked for\n"
        "  --strict           bounds that are not kept are failures\n"
        "  --small-pages      no huge pages for weights\n"
        "  --kernels NAME     c, avx2, avx512, neon, wasm or auto; other libraries are held to AVX2 with c and avx2\n"
        "  --threads N        threads that share a layer's work, 1 to %d (1; the bench threads: 2); without other "
        "libraries\n"
        "  --shapes LIST      D/FF or D/FF/EXPERTS/PER_TOKEN (8 and 2): --shapes 64/256,352/352/64/8\n"
        "  --tokens LIST      --tokens 1,8\n"
        "  --experts KIND     swiglu or relu; both without\n"
        "  -n ROUNDS          how often each comparison is made, 3 to %d (%d; long ones less; routers: at least 15)\n"
        "  -h                 this\n"
        "sh tests/run bench --write [OPTION...] measures all but routers, then writes tests/bench/results/*.csv and "
        "the tables of tests/bench/README.md;\n"
        "--verify tells whether these tables come from these rows\n",
        (int)MOST_THREADS, (int)MOST_ROUNDS, options.rounds);
}

static int refuse(const char *what, const char *value) {
    fprintf(stderr, "bench: %s: %s; bench -h explains\n", what, value != NULL ? value : "no value");
    return 2;
}

/* A number from `least` to `most`, or 0. The rest of the text is left in *rest. */
static long number(const char *text, long least, long most, char **rest) {
    const long n = strtol(text, rest, 10);
    return *rest != text && n >= least && n <= most ? n : 0;
}

static int read_shapes(const char *list) {
    char *rest = NULL;
    for (options.n_shapes = 0; options.n_shapes < MOST_CHOICES; list = rest + 1) {
        shape s = {0, 0, 8, 2};
        s.d = (int)number(list, 1, 65536, &rest);
        if (s.d == 0 || *rest != '/') return 0;
        s.d_ff = (int)number(rest + 1, 1, 65536, &rest);
        if (s.d_ff == 0) return 0;
        if (*rest == '/') {
            s.experts = (int)number(rest + 1, 1, 4096, &rest);
            if (s.experts == 0 || *rest != '/') return 0;
            s.top_k = (int)number(rest + 1, 1, s.experts, &rest);
            if (s.top_k == 0) return 0;
        }
        options.shapes[options.n_shapes++] = s;
        if (*rest != ',') break;
    }
    return *rest == '\0';
}

static int read_tokens(const char *list) {
    char *rest = NULL;
    for (options.n_tokens = 0; options.n_tokens < MOST_CHOICES; list = rest + 1) {
        const long n = number(list, 1, 1000000, &rest);
        if (n == 0) return 0;
        options.tokens[options.n_tokens++] = (size_t)n;
        if (*rest != ',') break;
    }
    return *rest == '\0';
}

static int read_kernels(const char *name) {
    for (options.kernels = 0; options.kernels < MOE_KERNELS_COUNT; options.kernels++)
        if (strcmp(name, moe_kernels_name(options.kernels)) == 0) return 1;
    return 0;
}

static int read_experts(const char *name) {
    options.n_kinds = 1;
    options.gated[0] = strcmp(name, "swiglu") == 0;
    return options.gated[0] || strcmp(name, "relu") == 0;
}

static int read_threads(const char *text) {
    char *rest;
    options.threads = (int)number(text, 1, MOST_THREADS, &rest);
    return options.threads > 0 && *rest == '\0';
}

static int read_rounds(const char *text) {
    char *rest;
    options.rounds = (int)number(text, 3, MOST_ROUNDS, &rest);
    options.rounds_given = 1;
    return options.rounds > 0 && *rest == '\0';
}

static const struct option {
    const char *name;
    int *flag;                      /* set to 1, or */
    int (*read)(const char *value); /* 0: no good value */
} known_options[] = {
    {"--csv", &options.csv, NULL},       {"--quick", &options.quick, NULL},
    {"--strict", &options.strict, NULL}, {"--small-pages", &options.small_pages, NULL},
    {"--kernels", NULL, read_kernels},   {"--threads", NULL, read_threads},
    {"--shapes", NULL, read_shapes},     {"--tokens", NULL, read_tokens},
    {"--experts", NULL, read_experts},   {"-n", NULL, read_rounds},
};

enum { OPTIONS = sizeof known_options / sizeof known_options[0] };

/* Returns 0, or the status to end with. */
static int read_arguments(int argc, char **argv, int *wanted, int *all) {
    int i, k;
    for (i = 1; i < argc; i++) {
        for (k = 0; k < OPTIONS && strcmp(argv[i], known_options[k].name) != 0; k++) continue;
        if (k < OPTIONS && known_options[k].flag != NULL) {
            *known_options[k].flag = 1;
            continue;
        }
        if (k < OPTIONS) {
            if (i + 1 == argc || !known_options[k].read(argv[i + 1]))
                return refuse(argv[i], i + 1 < argc ? argv[i + 1] : NULL);
            i++;
            continue;
        }
        for (k = 0; k < BENCHES && strcmp(argv[i], benches[k].name) != 0; k++) continue;
        if (k == BENCHES) return refuse("there is no such bench or option", argv[i]);
        wanted[k] = 1;
        *all = 0;
    }
    if (options.quick && !options.rounds_given) options.rounds = 7;
    if (options.quick && options.n_kinds == 2) options.n_kinds = 1;
    return 0;
}

/* ---- other libraries: they read their environment when they are loaded, so the program starts
   itself anew ---- */

#if BENCH_UNIX
static const char *own_path(const char *argv0) {
#if defined(__linux__)
    return access("/proc/self/exe", X_OK) == 0 ? "/proc/self/exe" : argv0;
#else
    return argv0;
#endif
}

/* How fast OpenBLAS is with the kernels that the environment names, in a process of its own: they
   may not run here at all. */
static double openblas_speed(const char *argv0) {
    char path[1024], command[1100];
    double speed = 0.0;
    FILE *answer;
    ssize_t n = -1;
#if defined(__linux__)
    n = readlink("/proc/self/exe", path, sizeof path - 1);
#endif
    if (n > 0) path[n] = '\0';
    else (void)snprintf(path, sizeof path, "%s", argv0);
    if (strchr(path, '\'') != NULL) return 0.0;
    (void)snprintf(command, sizeof command, "'%s' --openblas-speed 2>/dev/null", path);
    if ((answer = popen(command, "r")) == NULL) return 0.0;
    if (fscanf(answer, "%lf", &speed) != 1) speed = 0.0;
    (void)pclose(answer);
    return speed;
}

/* One thread each; for OpenBLAS the fastest kernels of the instruction set: its own choice may be
   far off on newer processors. */
static void restart(char **argv) {
    static const char *const cores[] = {"Haswell", "Zen", "SkylakeX", "Cooperlake", "Sapphirerapids"};
    const size_t n =
        kernels->id == MOE_KERNELS_AVX512 || kernels->id == MOE_KERNELS_AUTO ? sizeof cores / sizeof cores[0] : 2;
    const char *best = NULL;
    double fastest = 0.0;
    size_t i;
    if (getenv("BENCH_STARTED") != NULL) return;
    if (setenv("BENCH_STARTED", "1", 1) != 0) return;
    (void)setenv("OMP_NUM_THREADS", "1", 1);
    (void)setenv("OPENBLAS_NUM_THREADS", "1", 1);
    for (i = 0; bench_peers[BENCH_OPENBLAS_PEER].installed && getenv("OPENBLAS_CORETYPE") == NULL && i < n; i++) {
        double speed;
        (void)setenv("OPENBLAS_CORETYPE", cores[i], 1);
        speed = openblas_speed(argv[0]);
        (void)unsetenv("OPENBLAS_CORETYPE");
        if (speed > fastest) {
            fastest = speed;
            best = cores[i];
        }
    }
    if (best != NULL) (void)setenv("OPENBLAS_CORETYPE", best, 1);
    (void)execv(own_path(argv[0]), argv);
}
#else
static void restart(char **argv) { (void)argv; }
#endif

static void print_peers(FILE *to) {
    char about[256];
    int i;
    bench_peers_about(about, sizeof about);
    if (about[0] != '\0') fprintf(to, "Other libraries: %s\n", about);
    for (i = 0; i < BENCH_PEERS; i++)
        if (!bench_peers[i].installed)
            fprintf(to, "%s: not installed (Debian: %s)\n", bench_peers[i].name, bench_peers[i].package);
    fprintf(to, "\n");
}

int main(int argc, char **argv) {
    int wanted[BENCHES] = {0}, all = 1, i, b, status;
    for (i = 1; i < argc; i++)
        if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) {
            help();
            return 0;
        }
    if (argc == 2 && strcmp(argv[1], "--openblas-speed") == 0) {
        bench_peers_begin(MOE_KERNELS_AUTO, seconds);
        return printf("%f\n", bench_openblas_gflops()) < 0;
    }
    if ((status = read_arguments(argc, argv, wanted, &all)) != 0) return status;
    if ((kernels = moe_kernels_select(options.kernels)) == NULL)
        return refuse("this machine or build has no kernels", moe_kernels_name(options.kernels));
    restart(argv);
    bench_peers_begin(kernels->id, seconds);
    find_processors();
    pin(0);
    use_threads(options.threads);
    print_peers(options.csv ? stderr : stdout);
    if (options.csv) csv_heading();
    for (b = 0; b < BENCHES; b++)
        if (all || wanted[b]) benches[b].run();
    crew_end();
    if (missed > 0)
        fprintf(options.csv ? stderr : stdout, "note: %ld of %ld bounds are missed%s\n", missed, held + missed,
                options.strict ? "" : " (they count with --strict)");
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0 || passed == 0;
}
