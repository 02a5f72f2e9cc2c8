/* bench.h - what tests/bench/bench.c and tests/bench/bench_peers.c tell each other: one grouped
   product, and the libraries that compute it. */

#ifndef BENCH_H
#define BENCH_H

#include "../../moe.h"

/* The experts' part of a layer: for expert e, the rows x_t of its entries in the plan; y_t +=
   weight_out * f_e(x_t).
     gated   f(x) = w2 (silu(w1 x) * (up x))      else   f(x) = w2 relu(w1 x)
   Everything belongs to the caller and stays as it is until the peers that prepared for it are
   released. */
typedef struct bench_case {
    const moe_kernels *kernels; /* for activations, products of elements and the scatter */
    size_t tokens, d, f, experts;
    int gated;
    const moe_real *w1, *up, *w2; /* [E,f,d], [E,f,d] or NULL, [E,d,f] */
    const moe_real *x;            /* [tokens,d] */
    const moe_dispatch_plan *plan;
} bench_case;

/* A library that multiplies matrices, driven expert by expert. */
typedef struct bench_peer {
    const char *name;    /* the column */
    const char *package; /* Debian's name of what is missing */
    int installed;
    void *(*prepare)(const bench_case *c); /* packs weights, takes memory; NULL: it cannot do this case */
    void (*run)(void *state, moe_real *y); /* y [tokens,d] is overwritten */
    void (*release)(void *state);
} bench_peer;

enum { BENCH_OPENBLAS_PEER, BENCH_ONEDNN_PEER, BENCH_ONEDNN_PACKED_PEER, BENCH_LIBXSMM_PEER, BENCH_PEERS };

extern const bench_peer bench_peers[BENCH_PEERS];

/* Before any other call. seconds: the clock. Holds the libraries that can be held while they run to
   the instruction set of a kernel table: MOE_KERNELS_AVX2 and MOE_KERNELS_C allow AVX2, the rest
   everything. */
void bench_peers_begin(int kernels, double (*seconds)(void));
/* Zeros at the start of a cache line, or NULL; for free(). Large blocks lie in huge pages where the
   system gives them (not with --small-pages): which small pages a block happens to get weighs up to
   a third on how fast it can be read. */
void *bench_memory(size_t count, size_t size);

/* One line: versions and the instruction sets that the libraries use, "" for those that are not
   there. */
void bench_peers_about(char *text, size_t room);
/* How fast OpenBLAS multiplies as it was started; 0 where it is not there. Its kernels can be
   chosen before it is loaded only. */
double bench_openblas_gflops(void);

#endif
