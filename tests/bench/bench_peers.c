/* bench_peers.c - the grouped products of tests/bench/bench.c by other libraries. Each is there
   when its macro is defined:

     cc -std=c99 -O2 -I. -DBENCH_OPENBLAS -DBENCH_ONEDNN -DBENCH_LIBXSMM \
        -c tests/bench/bench_peers.c

   BENCH_OPENBLAS  cblas_sgemm on the weights as they are (link -lopenblas)
   BENCH_ONEDNN    dnnl_sgemm on the weights as they are; inner products on weights that oneDNN
                   packed (link -ldnnl)
   BENCH_LIBXSMM   batch-reduce products on weights packed here in blocks (link -lxsmm, OpenBLAS or
                   -lxsmmnoblas, -lpthread -ldl -lrt -lm)

   The way around the products is the same for all: gather an expert's rows, multiply, activate by
   the kernels of the layer, multiply, add the weighted rows. Routing is given to them for
   nothing. */

#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MOE_REAL_IS_DOUBLE /* these products are products of floats */
#undef BENCH_OPENBLAS
#undef BENCH_ONEDNN
#undef BENCH_LIBXSMM
#endif

#if defined(BENCH_OPENBLAS)
#include <cblas.h>
#endif
#if defined(BENCH_ONEDNN)
#include <dnnl.h>
#endif
#if defined(BENCH_LIBXSMM)
#include <libxsmm.h>
#endif

static double (*peer_seconds)(void); /* the clock of the bench */

/* ---- what all peers share ---- */

#if defined(BENCH_OPENBLAS) || defined(BENCH_ONEDNN) || defined(BENCH_LIBXSMM)

enum { FIRST, UP, SECOND, MATRICES }; /* w1, up, w2 */

typedef struct group {
    bench_case c;
    size_t most;                       /* rows of the busiest expert */
    moe_real *rows, *inner, *up, *out; /* [most,d], [most,f], [most,f], [most,d] */
} group;

/* out [n,outputs] = in [n,inputs] . W_e^T, W_e matrix `which` of expert e */
typedef void product_fn(void *state, int which, size_t e, size_t n, const moe_real *in, moe_real *out);

static size_t group_count(const group *g, size_t e) { return g->c.plan->offsets[e + 1] - g->c.plan->offsets[e]; }
static size_t group_inputs(const group *g, int which) { return which == SECOND ? g->c.f : g->c.d; }
static size_t group_outputs(const group *g, int which) { return which == SECOND ? g->c.d : g->c.f; }

static const moe_real *group_weights(const group *g, int which, size_t e) {
    const moe_real *all = which == FIRST ? g->c.w1 : which == UP ? g->c.up : g->c.w2;
    return all + e * g->c.d * g->c.f;
}

static moe_real *reals(size_t count) { return (moe_real *)bench_memory(count, sizeof(moe_real)); }

static int group_begin(group *g, const bench_case *c) {
    size_t e;
    g->c = *c;
    for (e = 0; e < c->experts; e++)
        if (group_count(g, e) > g->most) g->most = group_count(g, e);
    g->rows = reals(g->most * c->d);
    g->out = reals(g->most * c->d);
    g->inner = reals(g->most * c->f);
    g->up = reals(g->most * c->f);
    return g->rows != NULL && g->out != NULL && g->inner != NULL && g->up != NULL;
}

static void group_end(group *g) {
    free(g->rows);
    free(g->inner);
    free(g->up);
    free(g->out);
}

static void group_expert(const group *g, product_fn *product, void *state, size_t e, moe_real *y) {
    const moe_assignment *entries = g->c.plan->assignments + g->c.plan->offsets[e];
    const moe_kernels *k = g->c.kernels;
    const size_t n = group_count(g, e), d = g->c.d;
    size_t i;
    for (i = 0; i < n; i++) memcpy(g->rows + i * d, g->c.x + (size_t)entries[i].token * d, d * sizeof *y);
    product(state, FIRST, e, n, g->rows, g->inner);
    moe_activate(k, g->c.gated ? MOE_ACT_SILU : MOE_ACT_RELU, n * g->c.f, g->inner, g->inner);
    if (g->c.gated) {
        product(state, UP, e, n, g->rows, g->up);
        k->multiply(n * g->c.f, g->inner, g->up, g->inner);
    }
    product(state, SECOND, e, n, g->inner, g->out);
    for (i = 0; i < n; i++) moe_axpy(k, d, entries[i].weight_out, g->out + i * d, y + (size_t)entries[i].token * d);
}

static void group_run(const group *g, product_fn *product, void *state, moe_real *y) {
    size_t e;
    memset(y, 0, g->c.tokens * g->c.d * sizeof *y);
    for (e = 0; e < g->c.experts; e++)
        if (group_count(g, e) > 0) group_expert(g, product, state, e, y);
}

#endif

/* What a peer that is not there leaves in the table. */
#if !defined(BENCH_OPENBLAS) || !defined(BENCH_ONEDNN) || !defined(BENCH_LIBXSMM)
static void *absent_prepare(const bench_case *c) {
    (void)c;
    return NULL;
}
static void absent_run(void *state, moe_real *y) {
    (void)state;
    (void)y;
}
static void absent_release(void *state) { (void)state; }
#endif

/* ---- products on weights as they are: OpenBLAS, oneDNN ---- */

#if defined(BENCH_OPENBLAS) || defined(BENCH_ONEDNN)
static void *plain_prepare(const bench_case *c) {
    group *g = (group *)calloc(1, sizeof *g);
    if (g != NULL && group_begin(g, c)) return g;
    if (g != NULL) group_end(g);
    free(g);
    return NULL;
}

static void plain_release(void *state) {
    group_end((group *)state);
    free(state);
}
#endif

#if defined(BENCH_OPENBLAS)
/* One row is a matrix times a vector: this version's sgemm does not see that by itself. */
static void openblas_product(void *state, int which, size_t e, size_t n, const moe_real *in, moe_real *out) {
    const group *g = (const group *)state;
    const int inputs = (int)group_inputs(g, which), outputs = (int)group_outputs(g, which);
    const moe_real *w = group_weights(g, which, e);
    if (n == 1) cblas_sgemv(CblasRowMajor, CblasNoTrans, outputs, inputs, 1.0f, w, inputs, in, 1, 0.0f, out, 1);
    else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n, outputs, inputs, 1.0f, in, inputs, w, inputs, 0.0f,
                    out, outputs);
}

static void openblas_run(void *state, moe_real *y) { group_run((const group *)state, openblas_product, state, y); }

/* Best of some products, half of them of few rows. */
double bench_openblas_gflops(void) {
    enum { WIDTH = 352, ROWS = 128, FEW = 16, TIMES = 9 };
    float *a = reals(ROWS * WIDTH), *b = reals(WIDTH * WIDTH);
    float *c = reals(ROWS * WIDTH);
    double best = 0.0;
    int i, few;
    for (i = 0; a != NULL && b != NULL && c != NULL && i < TIMES; i++) {
        const double start = peer_seconds();
        double taken;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, ROWS, WIDTH, WIDTH, 1.0f, a, WIDTH, b, WIDTH, 0.0f, c,
                    WIDTH);
        for (few = 0; few < ROWS; few += 4 * FEW)
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, FEW, WIDTH, WIDTH, 1.0f, a, WIDTH, b, WIDTH, 0.0f, c,
                        WIDTH);
        taken = peer_seconds() - start;
        if (taken > 0.0 && 2e-9 * 1.25 * ROWS * WIDTH * WIDTH / taken > best)
            best = 2e-9 * 1.25 * ROWS * WIDTH * WIDTH / taken;
    }
    free(a);
    free(b);
    free(c);
    return best;
}
#else
double bench_openblas_gflops(void) { return 0.0; }
#endif

#if defined(BENCH_ONEDNN)
static void onednn_product(void *state, int which, size_t e, size_t n, const moe_real *in, moe_real *out) {
    const group *g = (const group *)state;
    const dnnl_dim_t inputs = (dnnl_dim_t)group_inputs(g, which), outputs = (dnnl_dim_t)group_outputs(g, which);
    dnnl_sgemm('N', 'T', (dnnl_dim_t)n, outputs, inputs, 1.0f, in, inputs, group_weights(g, which, e), inputs, 0.0f,
               out, outputs);
}

static void onednn_run(void *state, moe_real *y) { group_run((const group *)state, onednn_product, state, y); }

/* ---- oneDNN's inner product: an object per expert and matrix, for that expert's number of rows
   ---- */

typedef struct inner {
    dnnl_primitive_t primitive;
    dnnl_memory_t in, weights, out;
    void *packed;
} inner;

typedef struct onednn {
    group g;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    inner *inner; /* [E,MATRICES] */
} onednn;

static int onednn_execute(onednn *o, dnnl_primitive_t primitive, int n, const dnnl_exec_arg_t *args) {
    return dnnl_primitive_execute(primitive, o->stream, n, args) == dnnl_success &&
           dnnl_stream_wait(o->stream) == dnnl_success;
}

static int onednn_pack(onednn *o, const dnnl_memory_desc_t *plain, const dnnl_memory_desc_t *packed, const moe_real *w,
                       dnnl_memory_t to) {
    dnnl_primitive_desc_t description = NULL;
    dnnl_primitive_t reorder = NULL;
    dnnl_memory_t from = NULL;
    dnnl_exec_arg_t args[2];
    int good =
        dnnl_memory_create(&from, plain, o->engine, (void *)(uintptr_t)w) == dnnl_success &&
        dnnl_reorder_primitive_desc_create(&description, plain, o->engine, packed, o->engine, NULL) == dnnl_success &&
        dnnl_primitive_create(&reorder, description) == dnnl_success;
    args[0].arg = DNNL_ARG_FROM;
    args[0].memory = from;
    args[1].arg = DNNL_ARG_TO;
    args[1].memory = to;
    good = good && onednn_execute(o, reorder, 2, args);
    dnnl_primitive_destroy(reorder);
    dnnl_primitive_desc_destroy(description);
    dnnl_memory_destroy(from);
    return good;
}

static int onednn_make(onednn *o, int which, size_t e, inner *p) {
    const dnnl_dim_t n = (dnnl_dim_t)group_count(&o->g, e), inputs = (dnnl_dim_t)group_inputs(&o->g, which);
    const dnnl_dim_t outputs = (dnnl_dim_t)group_outputs(&o->g, which);
    dnnl_dims_t in_shape = {0}, w_shape = {0};
    dnnl_dims_t out_shape = {0};
    dnnl_memory_desc_t in, plain, any, out;
    const dnnl_memory_desc_t *packed;
    dnnl_inner_product_desc_t product;
    dnnl_primitive_desc_t description = NULL;
    moe_real *from = which == SECOND ? o->g.inner : o->g.rows;
    moe_real *to = which == FIRST ? o->g.inner : which == UP ? o->g.up : o->g.out;
    int good;
    in_shape[0] = n;
    in_shape[1] = inputs;
    w_shape[0] = outputs;
    w_shape[1] = inputs;
    out_shape[0] = n;
    out_shape[1] = outputs;
    good =
        dnnl_memory_desc_init_by_tag(&in, 2, in_shape, dnnl_f32, dnnl_ab) == dnnl_success &&
        dnnl_memory_desc_init_by_tag(&plain, 2, w_shape, dnnl_f32, dnnl_ab) == dnnl_success &&
        dnnl_memory_desc_init_by_tag(&any, 2, w_shape, dnnl_f32, dnnl_format_tag_any) == dnnl_success &&
        dnnl_memory_desc_init_by_tag(&out, 2, out_shape, dnnl_f32, dnnl_ab) == dnnl_success &&
        dnnl_inner_product_forward_desc_init(&product, dnnl_forward_inference, &in, &any, NULL, &out) == dnnl_success &&
        dnnl_primitive_desc_create(&description, &product, NULL, o->engine, NULL) == dnnl_success &&
        dnnl_primitive_create(&p->primitive, description) == dnnl_success &&
        dnnl_memory_create(&p->in, &in, o->engine, from) == dnnl_success &&
        dnnl_memory_create(&p->out, &out, o->engine, to) == dnnl_success;
    packed = good ? dnnl_primitive_desc_query_md(description, dnnl_query_weights_md, 0) : NULL;
    good = packed != NULL && (p->packed = bench_memory(dnnl_memory_desc_get_size(packed), 1)) != NULL &&
           dnnl_memory_create(&p->weights, packed, o->engine, p->packed) == dnnl_success &&
           onednn_pack(o, &plain, packed, group_weights(&o->g, which, e), p->weights);
    dnnl_primitive_desc_destroy(description);
    return good;
}

static void onednn_packed_release(void *state) {
    onednn *o = (onednn *)state;
    size_t i;
    for (i = 0; o->inner != NULL && i < o->g.c.experts * MATRICES; i++) {
        dnnl_primitive_destroy(o->inner[i].primitive);
        dnnl_memory_destroy(o->inner[i].in);
        dnnl_memory_destroy(o->inner[i].weights);
        dnnl_memory_destroy(o->inner[i].out);
        free(o->inner[i].packed);
    }
    dnnl_stream_destroy(o->stream);
    dnnl_engine_destroy(o->engine);
    group_end(&o->g);
    free(o->inner);
    free(o);
}

static void *onednn_packed_prepare(const bench_case *c) {
    onednn *o = (onednn *)calloc(1, sizeof *o);
    size_t e;
    int which, good;
    if (o == NULL) return NULL;
    o->inner = (inner *)calloc(c->experts * MATRICES, sizeof *o->inner);
    good = group_begin(&o->g, c) && o->inner != NULL && dnnl_engine_create(&o->engine, dnnl_cpu, 0) == dnnl_success &&
           dnnl_stream_create(&o->stream, o->engine, dnnl_stream_default_flags) == dnnl_success;
    for (e = 0; good && e < c->experts; e++)
        for (which = FIRST; good && group_count(&o->g, e) > 0 && which < MATRICES; which++)
            if (which != UP || c->gated) good = onednn_make(o, which, e, &o->inner[e * MATRICES + (size_t)which]);
    if (good) return o;
    onednn_packed_release(o);
    return NULL;
}

/* in and out are the buffers that the objects were made for. */
static void onednn_packed_product(void *state, int which, size_t e, size_t n, const moe_real *in, moe_real *out) {
    onednn *o = (onednn *)state;
    const inner *p = &o->inner[e * MATRICES + (size_t)which];
    dnnl_exec_arg_t args[3];
    (void)n;
    (void)in;
    (void)out;
    args[0].arg = DNNL_ARG_SRC;
    args[0].memory = p->in;
    args[1].arg = DNNL_ARG_WEIGHTS;
    args[1].memory = p->weights;
    args[2].arg = DNNL_ARG_DST;
    args[2].memory = p->out;
    (void)onednn_execute(o, p->primitive, 3, args);
}

static void onednn_packed_run(void *state, moe_real *y) {
    group_run(&((onednn *)state)->g, onednn_packed_product, state, y);
}
#endif

/* ---- libxsmm: batch-reduce products ---- */

#if defined(BENCH_LIBXSMM)
/* Weights [outputs,inputs] become [outputs/wide][inputs/deep][deep][wide]. What is a row for C is a
   column for libxsmm: its product C[m,n] = sum over blocks of A[m,k] B[k,n] has m outputs, n
   tokens, k inputs, A = a block of weights, B = tokens, C = outputs. */
typedef struct blocking {
    size_t wide, deep;
} blocking;

enum { TOKEN_BLOCK = 64 };

typedef struct xsmm {
    group g;
    blocking blocks[MATRICES];
    libxsmm_smmfunction_reducebatch_strd kernels[2][TOKEN_BLOCK + 1]; /* for SECOND or not, by number of tokens */
    /* weights [E,MATRICES,d f], aligned to 64 bytes */
    moe_real *memory, *weights;
} xsmm;

static moe_real *xsmm_weights(const xsmm *s, int which, size_t e) {
    return s->weights + (e * MATRICES + (size_t)which) * s->g.c.d * s->g.c.f;
}

/* The largest power of two that divides n, from 8 to most; 0 when there is none. */
static size_t xsmm_divisor(size_t n, size_t most) {
    while (most >= 8 && n % most != 0) most /= 2;
    return most >= 8 ? most : 0;
}

static void xsmm_pack(const moe_real *w, size_t inputs, size_t outputs, blocking b, moe_real *to) {
    size_t o, i, wide;
    for (o = 0; o < outputs; o += b.wide)
        for (i = 0; i < inputs; i++)
            for (wide = 0; wide < b.wide; wide++) *to++ = w[(o + wide) * inputs + i];
}

/* NULL: libxsmm cannot make that kernel. */
static libxsmm_smmfunction_reducebatch_strd xsmm_kernel(const xsmm *s, int which, size_t tokens) {
    const blocking b = s->blocks[which];
    const libxsmm_blasint lda = (libxsmm_blasint)b.wide, ldb = (libxsmm_blasint)group_inputs(&s->g, which);
    const libxsmm_blasint ldc = (libxsmm_blasint)group_outputs(&s->g, which);
    const float alpha = 1.0f, beta = 0.0f;
    return libxsmm_smmdispatch_reducebatch_strd(
        lda, (libxsmm_blasint)tokens, (libxsmm_blasint)b.deep, (libxsmm_blasint)(b.wide * b.deep * sizeof(float)),
        (libxsmm_blasint)(b.deep * sizeof(float)), &lda, &ldb, &ldc, &alpha, &beta, NULL, NULL);
}

static int xsmm_need(xsmm *s, int which, size_t tokens) {
    libxsmm_smmfunction_reducebatch_strd *kernel = &s->kernels[which == SECOND][tokens];
    if (tokens > 0 && *kernel == NULL) *kernel = xsmm_kernel(s, which, tokens);
    return tokens == 0 || *kernel != NULL;
}

/* Kernels for whole blocks of tokens and for what each expert has left over. */
static int xsmm_make_kernels(xsmm *s) {
    size_t e, n;
    for (e = 0; e < s->g.c.experts; e++) {
        n = group_count(&s->g, e);
        if (!xsmm_need(s, FIRST, n % TOKEN_BLOCK) || !xsmm_need(s, SECOND, n % TOKEN_BLOCK)) return 0;
        if (n >= TOKEN_BLOCK && (!xsmm_need(s, FIRST, TOKEN_BLOCK) || !xsmm_need(s, SECOND, TOKEN_BLOCK))) return 0;
    }
    return 1;
}

static void xsmm_release(void *state) {
    xsmm *s = (xsmm *)state;
    group_end(&s->g);
    free(s->weights);
    free(s);
}

/* wide: outputs per block. */
static xsmm *xsmm_make(const bench_case *c, size_t wide) {
    xsmm *s = (xsmm *)calloc(1, sizeof *s);
    size_t e;
    int which, good;
    if (s == NULL) return NULL;
    good = group_begin(&s->g, c) && (s->weights = reals(c->experts * MATRICES * c->d * c->f)) != NULL;
    for (which = FIRST; which < MATRICES; which++) {
        s->blocks[which].wide = xsmm_divisor(group_outputs(&s->g, which), wide);
        s->blocks[which].deep = xsmm_divisor(group_inputs(&s->g, which), 64);
        good = good && s->blocks[which].wide > 0 && s->blocks[which].deep > 0;
    }
    if (!good || !xsmm_make_kernels(s)) {
        xsmm_release(s);
        return NULL;
    }
    for (e = 0; e < c->experts; e++)
        for (which = FIRST; which < MATRICES; which++)
            if (which != UP || c->gated)
                xsmm_pack(group_weights(&s->g, which, e), group_inputs(&s->g, which), group_outputs(&s->g, which),
                          s->blocks[which], xsmm_weights(s, which, e));
    return s;
}

/* A block of outputs stays in the cache while all tokens pass. */
static void xsmm_product(void *state, int which, size_t e, size_t n, const moe_real *in, moe_real *out) {
    const xsmm *s = (const xsmm *)state;
    const size_t inputs = group_inputs(&s->g, which), outputs = group_outputs(&s->g, which);
    const size_t wide = s->blocks[which].wide;
    const unsigned long long blocks = inputs / s->blocks[which].deep;
    const moe_real *w = xsmm_weights(s, which, e);
    size_t o, t;
    for (o = 0; o < outputs; o += wide)
        for (t = 0; t < n; t += TOKEN_BLOCK)
            s->kernels[which == SECOND][n - t < TOKEN_BLOCK ? n - t : TOKEN_BLOCK](w + o * inputs, in + t * inputs,
                                                                                   out + t * outputs + o, &blocks);
}

static void xsmm_run(void *state, moe_real *y) { group_run(&((xsmm *)state)->g, xsmm_product, state, y); }

/* Best of some runs; of one where they are long. */
static double xsmm_seconds(xsmm *s, moe_real *y) {
    double best = 1e30;
    int i;
    xsmm_run(s, y);
    for (i = 0; i < 5 && (i == 0 || best < 0.02); i++) {
        const double start = peer_seconds();
        double taken;
        xsmm_run(s, y);
        taken = peer_seconds() - start;
        if (taken < best) best = taken;
    }
    return best;
}

/* Which blocks are faster depends on the registers: 32 outputs with AVX2, mostly 64 with AVX-512.
   The case itself decides. */
static void *xsmm_prepare(const bench_case *c) {
    xsmm *narrow = xsmm_make(c, 32), *wide = c->d % 64 == 0 || c->f % 64 == 0 ? xsmm_make(c, 64) : NULL, *slower;
    moe_real *y = reals(c->tokens * c->d);
    if (narrow == NULL || wide == NULL || y == NULL) slower = narrow == NULL ? NULL : wide;
    else slower = xsmm_seconds(narrow, y) <= xsmm_seconds(wide, y) ? wide : narrow;
    free(y);
    if (slower != NULL) xsmm_release(slower);
    return slower == narrow && narrow != NULL ? wide : narrow != NULL ? narrow : wide;
}
#endif

/* ---- the table ---- */

const bench_peer bench_peers[BENCH_PEERS] = {
#if defined(BENCH_OPENBLAS)
    {"openblas", "libopenblas-dev", 1, plain_prepare, openblas_run, plain_release},
#else
    {"openblas", "libopenblas-dev", 0, absent_prepare, absent_run, absent_release},
#endif
#if defined(BENCH_ONEDNN)
    {"onednn", "libdnnl-dev", 1, plain_prepare, onednn_run, plain_release},
    {"onednn*", "libdnnl-dev", 1, onednn_packed_prepare, onednn_packed_run, onednn_packed_release},
#else
    {"onednn", "libdnnl-dev", 0, absent_prepare, absent_run, absent_release},
    {"onednn*", "libdnnl-dev", 0, absent_prepare, absent_run, absent_release},
#endif
#if defined(BENCH_LIBXSMM)
    {"libxsmm*", "libxsmm-dev", 1, xsmm_prepare, xsmm_run, xsmm_release},
#else
    {"libxsmm*", "libxsmm-dev", 0, absent_prepare, absent_run, absent_release},
#endif
};

void bench_peers_begin(int kernels, double (*seconds)(void)) {
    const int narrow = kernels == MOE_KERNELS_AVX2 || kernels == MOE_KERNELS_C;
    peer_seconds = seconds;
    (void)narrow;
#if defined(BENCH_ONEDNN)
    if (narrow) (void)dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
#endif
#if defined(BENCH_LIBXSMM)
    libxsmm_init();
    if (narrow) libxsmm_set_target_arch("hsw");
#endif
}

#if defined(BENCH_OPENBLAS)
/* How long the first two words of "OpenBLAS 0.3.21 NO_LAPACKE ..." are. */
static int openblas_name(const char *config) {
    const size_t first = strcspn(config, " ");
    return (int)(config[first] == ' ' ? first + 1 + strcspn(config + first + 1, " ") : first);
}
#endif

#if defined(BENCH_ONEDNN)
static const char *onednn_width(void) {
    return ((int)dnnl_get_effective_cpu_isa() & (int)dnnl_cpu_isa_avx512_core) == (int)dnnl_cpu_isa_avx512_core
               ? "AVX-512"
               : "at most AVX2";
}
#endif

void bench_peers_about(char *text, size_t room) {
    size_t used = 0;
    if (room > 0) text[0] = '\0';
    (void)used;
#if defined(BENCH_OPENBLAS)
    used += (size_t)snprintf(text + used, room - used, "%.*s with kernels %s", openblas_name(openblas_get_config()),
                             openblas_get_config(), openblas_get_corename());
#endif
#if defined(BENCH_ONEDNN)
    if (used < room)
        used += (size_t)snprintf(text + used, room - used, "%soneDNN %d.%d.%d with %s", used > 0 ? ", " : "",
                                 dnnl_version()->major, dnnl_version()->minor, dnnl_version()->patch, onednn_width());
#endif
#if defined(BENCH_LIBXSMM)
    if (used < room)
        (void)snprintf(text + used, room - used, "%slibxsmm %s for %s", used > 0 ? ", " : "", LIBXSMM_VERSION,
                       libxsmm_get_target_arch());
#endif
}
