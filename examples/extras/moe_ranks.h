/* moe_ranks.h - expert parallelism over several processes - an extra of moe, included after moe.h.

   Processes share the experts of MoE layers. Layers, networks, training and files work as in one
   process; the bytes travel through three functions that you supply (moe_mpi.h has them for MPI).

   Contents: search for
     >>recipe   >>program   >>options   >>manual   >>glossary
     >>transport  moe_exchange, moe_traffic, moe_transport; moe_transport_begin, _end, _agree,
                  _status
     >>files      moe_rank_part; moe_layer_read_part, _load_part; moe_net_read_part, _load_part
     >>code       the implementation, in the order of data flow

   >>recipe
     In the one source file that defines MOE_IMPLEMENTATION, and wherever you call these functions:
       #include "moe.h"
       #include "examples/extras/moe_ranks.h"
       #include "examples/extras/moe_mpi.h"      only with MPI
     Link as for moe.h (-lm).

   >>program: one rank with a loopback transport; it needs no message-passing library.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "examples/extras/moe_ranks.h"
 * #include <stdio.h>
 * #include <string.h>
 *
 * // One rank receives what it sends. With MPI: MPI_Alltoall, MPI_Alltoallv and MPI_Allreduce.
 * static moe_status counts(void *ctx, size_t n, const uint64_t *send, uint64_t *receive) {
 *     (void)ctx;
 *     memcpy(receive, send, n * sizeof *send);
 *     return MOE_OK;
 * }
 * static moe_status rows(void *ctx, int stage, const moe_exchange *e) {
 *     const char *from = (const char *)e->send + e->send_at[0] * e->row_bytes;
 *     char *to = (char *)e->receive + e->receive_at[0] * e->row_bytes;
 *     size_t bytes = e->send_counts[0] * e->row_bytes;
 *     (void)ctx;
 *     if ((stage & MOE_EXCHANGE_BEGIN) && bytes > 0) memcpy(to, from, bytes);
 *     return MOE_OK;
 * }
 * static moe_status sum(void *ctx, size_t n, moe_real *values) {
 *     (void)ctx, (void)n, (void)values;
 *     return MOE_OK;
 * }
 *
 * int main(void) {
 *     static moe_real x[64 * 4], y[64 * 4];
 *     moe_transport transport = {0}; // C++: {}
 *     moe_layer_config config = {0};
 *     moe_train_config training = {0};
 *     moe_data batch = {0};
 *     moe_step step = {0};
 *     moe_net net;
 *     moe_trainer trainer;
 *     moe_error error;
 *     int i;
 *     transport.rank = 0;
 *     transport.n_ranks = 1;
 *     transport.counts = counts;
 *     transport.rows = rows;
 *     transport.sum = sum;
 *     for (i = 0; i < 64 * 4; i++) {
 *         x[i] = (moe_real)((i * 37) % 64 - 32) / 32;
 *         y[i] = 2 * x[i];
 *     }
 *     batch.n = 64; // the samples of this rank
 *     batch.x = x;
 *     batch.targets = y;
 *     training.criterion = MOE_CRITERION_SQUARED_ERROR;
 *     training.batch = 64;
 *     if (moe_transport_begin(&transport, &error)) return puts(error.message), 1;
 *     moe_net_init(&net, 4, MOE_KERNELS_AUTO, NULL);
 *     net.transport = &transport; // before the modules
 *     moe_net_mixture(&net, &config);
 *     if (moe_net_build(&net, 1, 42, &error)) return puts(error.message), 1;
 *     if (moe_trainer_init(&trainer, &net, &training, &error)) return puts(error.message), 1;
 *     for (i = 0; i < 500; i++)
 *         if (moe_trainer_step(&trainer, &batch, &step, &error)) return puts(error.message), 1;
 *     printf("rank %d of %d: loss %.3f\n", transport.rank, transport.n_ranks, (double)step.loss);
 *     moe_trainer_free(&trainer);
 *     moe_net_free(&net);
 *     moe_transport_end(&transport);
 *     return 0;
 * }
 * --- end ---

   >>options
     None of its own. MOE_NO_TRAIN leaves the forward pass and loading; MOE_NO_STDIO leaves out
     _load_part, MOE_NO_FLOAT everything. In the double build each public name carries the suffix
     _f64, as in moe.h.

   >>manual
     Distribution.  Rank r holds part moe_rank_part(E, r, R) of a layer's E experts: its local
     experts. Everything else (router, shared experts, attention, ...) is replicated on all ranks,
     bit for bit.

     A call.  Every rank passes its own tokens, or none. Together they form one batch, in the order
     of the ranks:
       forward    dispatch plan -> counts -> rows of x to the owning ranks -> local experts ->
                  rows of f_e(x) back -> y
       backward   rows of w dy to the owning ranks -> local experts -> rows of dx back -> dx
     The result equals that of one process with a moe_call of all tokens. With the plain C kernels
     y, dx and the experts' gradients are bit-identical (other kernels: within rounding); capacity,
     losses, metrics and the routers' state are those of the whole batch. Gradients of replicated
     tensors are this rank's share; the trainer completes them with moe_transport.sum over all
     ranks, so they agree within rounding. So do dx and the experts' gradients of routers that read
     experts (MOE_TRAIT_NEEDS_ALL_EXPERTS).

     Global and local routing.  By default every rank receives the logits of all tokens and routes
     all of them, which costs R times its own share: little on a few ranks, almost all the time on a
     hundred. With local_routing = 1 each rank routes only its own tokens (the groups of GShard;
     Lepikhin et al. 2020): results are those of one process that makes one call per rank, in order;
     losses are weighted by the rank's share of the tokens; random stages draw from a generator per
     rank, except that compete_rate makes the experts compete on all ranks or on none. The routers'
     state still follows all tokens: counts are summed; capacity_bound and affinity_sum_auto use the
     maximum over the ranks. Local routing with ac_mode = running or l1_controller is
     MOE_ERR_CONFIG, and so is global routing with select = soft and input = adaptive_clustering.

     Networks.  Set net.transport after moe_net_init and before the modules:
       - moe_net_build, moe_trainer_init and loading compare the settings of all ranks before they
         allocate: a difference is MOE_ERR_CONFIG on all ranks, and error names rank, module and
         field. Tensors start with the same bits as in one process. Trainable networks need the
         same kernels on all ranks: select them in moe_net_init if machines differ.
       - moe_net_forward and _backward: every rank passes whole sequences, or none. Dropout and
         routers draw the same numbers as one process: call.rng is the same on all ranks before and
         after. call.batch must be NULL. Losses, metrics and routings of training are those of all
         tokens.
       - moe_trainer_step, _accumulate and _update: every rank passes its own samples (n may be 0 on
         some). *step and the mean are over the labeled samples of all ranks. Gradients of
         replicated tensors are summed once per step; clipping uses the norm of the whole network.
       - moe_fit and moe_evaluate: all ranks pass the same samples; each takes its part
         (moe_rank_part) of every batch of config.batch samples. Results and progress are the same
         on all ranks; a callback that stops one rank stops all. Without length the samples of a
         rank are one sequence.
       - moe_net_write, _save, moe_trainer_write, _save, moe_layer_write, _save: rank 0 writes one
         ordinary file, byte for byte the file of one process with the same values; it fetches the
         experts of the others in pieces of 256 KiB, once for the checksums and once for the file.
         stream and path of the other ranks are not used and may be NULL.
       - moe_net_load_part, moe_layer_load_part and moe_trainer_load read files written by any
         number of ranks. Each rank needs access to the file, and memory for its own part. Checksums
         are verified; those of experts and moments are combined from the parts that the ranks have
         read.

     Collective calls.  All calls above, moe_net_observe, and moe_layer_create, _forward, _backward,
     _observe, _write and _save with config.transport are collective: all ranks make the same calls
     in the same order with the same configuration. If a call fails on one rank it fails on all: the
     others get MOE_ERR_PEER, and error names the rank and its status; all ranks can continue, as
     after any failed call. (A rank whose layer, network or trainer is NULL cannot notify the
     others, which wait for it.) Trainers that differ in steps, learning rate, random state,
     accumulated batches or frozen tensors get MOE_ERR_STATE before a batch is processed, and so do
     calls of layers whose call.rng differs where all ranks must draw the same numbers.
     MOE_ERR_TRANSPORT: a function of the transport failed. The state of the ranks may differ, and
     exchanges in flight may still write to the workspace: cancel them before you free it, or end
     all ranks.

     Limits.  R <= E. Sequences do not span ranks. MOE_ERR_UNSUPPORTED: n_past, decoding, a layer's
     call.batch, inference models, modular networks, criteria that read experts; expert_outputs of a
     pass is NULL. Load the file without a transport for these. Fewer than 2^31 tokens over all
     ranks. The workspace has room for all rows that may be sent to the local experts, R n min(K,
     local experts), and with global routing for R n decisions: on many ranks use local routing and
     few tokens per call. loss_locality does not read the transport: set call.token_machine (the
     machine of this rank's tokens), expert_machine and config.router.nodes. A custom score gets the
     tokens of its rank only: if it reads other tokens, results are not those of one process.

   >>glossary
     rank               a process, 0..R-1 as in MPI
     local expert       an expert that this rank holds; the rank is its owning rank
     received tokens    rows that other ranks, or the rank itself, sent to the local experts
     remote             on another rank;  off-machine: on another machine
     global routing     each rank routes all tokens;  local routing: each rank routes its own
*/
#ifndef MOE_H
#error "moe_ranks.h: include moe.h before it"
#endif

#ifndef MOE_RANKS_H
#define MOE_RANKS_H

#ifndef MOE_NO_FLOAT
#if MOE_REAL_IS_DOUBLE
#define moe_layer_load_part moe_layer_load_part_f64
#define moe_layer_read_part moe_layer_read_part_f64
#define moe_net_load_part moe_net_load_part_f64
#define moe_net_read_part moe_net_read_part_f64
#define moe_rank_part moe_rank_part_f64
#define moe_transport_agree moe_transport_agree_f64
#define moe_transport_begin moe_transport_begin_f64
#define moe_transport_end moe_transport_end_f64
#define moe_transport_status moe_transport_status_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>transport ---- */

/* The number of exchanges that may be in flight at a time, and the two stages of an exchange. */
enum {
    MOE_EXCHANGES = 2,
    MOE_EXCHANGE_BEGIN = 1,
    MOE_EXCHANGE_END = 2
};

/* One exchange of rows, like MPI_Ialltoallv: sends send_counts[r] rows of send, from row send_at[r]
   on, to rank r; rows from rank r are stored in receive from row receive_at[r] on. The struct and
   all arrays remain valid and unchanged until the exchange has ended. */
typedef struct moe_exchange {
    size_t row_bytes;             /* of one row; the transport treats rows as bytes */
    const void *send;             /* of any alignment, like receive */
    const size_t *send_counts;    /* [R]; includes the rank itself */
    const size_t *send_at;        /* [R]; ranges may overlap */
    void *receive;                /* does not overlap send */
    const size_t *receive_counts; /* [R] the send_counts of the senders, known in advance */
    const size_t *receive_at;     /* [R]; other rows of receive remain unchanged */
    int channel;                  /* 0..MOE_EXCHANGES-1; exchanges in flight have different channels */
} moe_exchange;

/* What a rank has sent in layer calls. The library adds to it; set it to {0} first. The arrays
   belong to the caller, [R] or NULL. Calls of sum are not counted; files count only as bytes. */
typedef struct moe_traffic {
    /* rows of tokens to each rank, including itself: x, w dy and the rows that are returned */
    uint64_t *rows;
    /* all bytes to each rank: rows, gathered router data, counts; with two_level counted for the
       next rank on the path; 0 for the rank itself */
    uint64_t *bytes;
    uint64_t tokens;               /* tokens routed */
    uint64_t assignments;          /* token-expert assignments */
    uint64_t assignments_remote;   /* those to experts of other ranks */
    uint64_t assignments_off_machine; /* those to experts on other machines */
    uint64_t exchanges;            /* calls of rows with MOE_EXCHANGE_BEGIN */
    /* other ranks that were sent at least one row, summed over exchanges */
    uint64_t messages;
    uint64_t messages_off_machine; /* those to other machines */
} moe_traffic;

/* The functions by which ranks communicate. Set the fields from ctx to allocator, others to 0, then
   call moe_transport_begin. The struct must not move and must outlive the layers and networks that
   are configured with it. Use it from one thread at a time. The functions return MOE_OK or
   MOE_ERR_TRANSPORT. All ranks call them in the same order, begin exchanges on the same channels
   and end each one. While one is in flight (begun, not ended), counts and an exchange on the other
   channel may be called, but not sum. The functions are called with one rank, too. */
typedef struct moe_transport {
    moe_batch batch;       /* private, and first: the part that moe.h uses */
    void *ctx;             /* passed to every function */
    int rank, n_ranks;     /* r and R, 0 <= r < R <= MOE_MAX_EXPERTS */
    int ranks_per_machine; /* consecutive ranks that share a machine; divides R [R] */
    /* 1: rows to another machine are sent through the rank of this machine that has the destination
       rank's position within its machine: fewer, longer messages between machines, at the cost of
       one more call of counts and a first hop inside the machine, which does not overlap with
       computation [0] */
    int two_level;
    /* 1: every rank routes only its own tokens, see the manual [0: global] */
    int local_routing;
    /* the local experts are computed in this many parts, at most one per expert; the rows of one
       part are exchanged while another is computed [1] */
    int chunks;
    /* All-to-all: receive[r n + i] = send[own rank n + i] of rank r; both arrays are [R,n]. */
    moe_status (*counts)(void *ctx, size_t n, const uint64_t *send, uint64_t *receive);
    /* stage is MOE_EXCHANGE_BEGIN, which starts the transfer; MOE_EXCHANGE_END with the same
       exchange, which returns when the rows have arrived; or both bits: a blocking exchange. A
       transport that cannot overlap transfers everything at BEGIN. */
    moe_status (*rows)(void *ctx, int stage, const moe_exchange *exchange);
    /* All-reduce: values[i] = the sum of values[i] over all ranks, with the same bits on each. */
    moe_status (*sum)(void *ctx, size_t n, moe_real *values);
    moe_traffic *traffic;           /* receives the counts, or NULL */
    const moe_allocator *allocator; /* for 128 bytes per rank [the standard heap] */
    uint64_t *memory;               /* private, set by moe_transport_begin: [2,R,8] */
    size_t memory_size;
} moe_transport;

/* Checks the transport, fills in defaults and allocates its memory; on failure it is unchanged.
   Collective. MOE_ERR_CONFIG: a field is out of range, or differs on another rank, or version or
   MOE_REAL do (error names field and rank); MOE_ERR_ARGUMENT: a function is NULL; MOE_ERR_PEER: the
   call failed on another rank; MOE_ERR_MEMORY; MOE_ERR_TRANSPORT. A rank that lacks a function or
   memory, or whose rank or n_ranks is out of range, cannot notify the others, which wait for it. */
MOE_API moe_status moe_transport_begin(moe_transport *transport, moe_error *error);
/* Frees what begin allocated. NULL, {0} and a second call are allowed. Not collective. */
MOE_API void moe_transport_end(moe_transport *transport);
/* Compares n numbers across ranks, for settings of your own: MOE_OK on all ranks if they are the
   same everywhere, else MOE_ERR_CONFIG on all. *rank and *i (each may be NULL) receive the first
   rank that differs from this one, and the first number that differs. Collective. MOE_ERR_ARGUMENT:
   not begun, or values is NULL and n > 0; MOE_ERR_TRANSPORT. */
MOE_API moe_status moe_transport_agree(const moe_transport *transport, size_t n, const uint64_t *values, int *rank,
                                       size_t *i);
/* All-gather of status, after work that may have failed on some rank: MOE_OK if all ranks pass
   MOE_OK; else each rank gets its own failure, or MOE_ERR_PEER. Collective. MOE_ERR_ARGUMENT: not
   begun; MOE_ERR_TRANSPORT. */
MOE_API moe_status moe_transport_status(const moe_transport *transport, moe_status status);

/* ---- >>files ---- */

/* Part `rank` of n items: *count of them, from *first on. Parts are consecutive and their lengths
   differ by at most one. 0 <= rank < n_ranks. Thread-safe. */
MOE_API void moe_rank_part(size_t n, int rank, int n_ranks, size_t *first, size_t *count);
/* moe_layer_read and moe_net_read on several ranks: config.transport or net.transport becomes
   transport; every rank reads the same file, written by any number of ranks, and keeps its own
   experts. The file of a trainer is also accepted as that of its network. Collective. transport
   NULL: a single process. Also MOE_ERR_CONFIG (error names what differs between ranks),
   MOE_ERR_PEER, MOE_ERR_TRANSPORT. */
MOE_API moe_status moe_layer_read_part(moe_layer *layer, const void *bytes, size_t size, int trainable, int kernels,
                                       const moe_transport *transport, const moe_allocator *allocator,
                                       moe_error *error);
MOE_API moe_status moe_net_read_part(moe_net *net, const void *bytes, size_t size, int trainable, int kernels,
                                     const moe_transport *transport, const moe_allocator *allocator,
                                     moe_error *error);
#ifndef MOE_NO_STDIO
/* The same from a file, of which each rank reads its part; also the errors of moe_file_read. */
MOE_API moe_status moe_layer_load_part(moe_layer *layer, const char *path, int trainable, int kernels,
                                       const moe_transport *transport, const moe_allocator *allocator,
                                       moe_error *error);
MOE_API moe_status moe_net_load_part(moe_net *net, const char *path, int trainable, int kernels,
                                     const moe_transport *transport, const moe_allocator *allocator,
                                     moe_error *error);
#endif

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_FLOAT */
#endif /* MOE_RANKS_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_RANKS_IMPLEMENTED)
#define MOEI_RANKS_IMPLEMENTED
#ifndef MOE_NO_FLOAT

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>code ================================================================================== */

void moe_rank_part(size_t n, int rank, int n_ranks, size_t *first, size_t *count) {
    moei_nth_part(n, rank > 0 ? (size_t)rank : 0, n_ranks > 0 ? (size_t)n_ranks : 1, first, count);
}

/* ---- collective calls on a few numbers ---- */

/* The largest count of numbers per rank in one all-gather; the transport's memory holds them. */
enum { MOEI_WORDS = 8 };

/* Sends n numbers from every rank to every rank. */
static moe_status moei_all_to_all(const moe_transport *t, size_t n, const uint64_t *send, uint64_t *receive) {
    int r;
    if (t->traffic != NULL && t->traffic->bytes != NULL)
        for (r = 0; r < t->n_ranks; r++)
            if (r != t->rank) t->traffic->bytes[r] += n * sizeof(uint64_t);
    return t->counts(t->ctx, n, send, receive) == MOE_OK ? MOE_OK : MOE_ERR_TRANSPORT;
}

/* Sends the same n <= MOEI_WORDS numbers to all ranks. Those of rank r are at *all + r n until the
   next all-gather. */
static moe_status moei_all_gather(const moe_transport *t, size_t n, const uint64_t *values, const uint64_t **all) {
    uint64_t *send = t->memory, *receive = send + (size_t)t->n_ranks * MOEI_WORDS;
    int r;
    for (r = 0; r < t->n_ranks; r++) memcpy(send + (size_t)r * n, values, n * sizeof *values);
    *all = receive;
    return moei_all_to_all(t, n, send, receive);
}

static uint64_t moei_status_word(moe_status status) { return (uint64_t)(unsigned)-(int)status; }

/* This rank's failure, or MOE_ERR_PEER if another rank's status word is a failure; error then names
   that rank. Words are `stride` numbers apart. */
static moe_status moei_status_of_all(const moe_transport *t, moe_status own, const uint64_t *words, size_t stride,
                                     moe_error *error) {
    uint64_t word;
    int r;
    for (r = 0; r < t->n_ranks && own == MOE_OK; r++) {
        word = words[(size_t)r * stride];
        if (word == 0) continue;
        own = moei_error(error, MOE_ERR_PEER, "rank %d: %s", r, word < 100 ? moe_status_text(-(int)word) : "failed");
    }
    return own;
}

moe_status moe_transport_status(const moe_transport *transport, moe_status status) {
    const uint64_t *all;
    uint64_t word = moei_status_word(status);
    moe_status sent;
    if (transport == NULL || transport->batch.hooks == NULL) return MOE_ERR_ARGUMENT;
    sent = moei_all_gather(transport, 1, &word, &all);
    return sent == MOE_OK ? moei_status_of_all(transport, status, all, 1, NULL) : sent;
}

/* All-gather of own[0..n-1], whose first number is set to the status; error names the rank that
   failed. MOE_ERR_TRANSPORT is returned without an exchange. */
static moe_status moei_gather_status(const moe_transport *t, moe_status status, size_t n, uint64_t *own,
                                     const uint64_t **all, moe_error *error) {
    if (status == MOE_ERR_TRANSPORT) return status;
    own[0] = moei_status_word(status);
    if (moei_all_gather(t, n, own, all) != MOE_OK)
        return moei_error(error, MOE_ERR_TRANSPORT, "the transport's exchange of counts failed");
    return moei_status_of_all(t, status, *all, n, error);
}

static uint64_t moei_double_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double moei_bits_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* moei_hooks.add: an all-reduce of status and n < MOEI_WORDS doubles. */
static moe_status moei_ranks_add(const moe_batch *group, moe_status status, size_t n, double *values,
                                 moe_error *error) {
    const moe_transport *t = (const moe_transport *)(const void *)group;
    uint64_t own[MOEI_WORDS];
    const uint64_t *all = NULL;
    size_t i, r;
    for (i = 0; i < n; i++) own[1 + i] = moei_double_bits(values[i]);
    status = moei_gather_status(t, status, n + 1, own, &all, error);
    if (status != MOE_OK) return status;
    for (i = 0; i < n; i++)
        for (r = 0, values[i] = 0.0; r < group->total; r++) values[i] += moei_bits_double(all[r * (n + 1) + 1 + i]);
    return MOE_OK;
}

/* The tokens of all ranks, from the ranks' token counts, which are `stride` numbers apart. */
static moe_status moei_tokens_of(const moe_transport *t, const uint64_t *numbers, size_t stride, moei_tokens *tokens) {
    uint64_t first = 0, total = 0;
    uint64_t most = 0, n;
    int r;
    for (r = 0; r < t->n_ranks; r++) {
        n = numbers[(size_t)r * stride];
        if (n > (uint64_t)INT32_MAX - total) return MOE_ERR_OVERFLOW;
        if (r < t->rank) first += n;
        if (n > most) most = n;
        total += n;
    }
    tokens->first = (size_t)first;
    tokens->total = (size_t)total;
    tokens->most = (size_t)most;
    return MOE_OK;
}

/* ---- settings that all ranks must share ---- */

/* The first difference between ranks. */
typedef struct moei_difference {
    int rank;        /* the first rank that differs from this one */
    size_t i;        /* the index of the first number that differs between any rank and rank 0 */
    uint64_t theirs; /* the value of `rank` */
} moei_difference;

/* MOE_OK on all ranks if all have the same n numbers, else MOE_ERR_CONFIG on all. */
static moe_status moei_compare(const moe_transport *t, size_t n, const uint64_t *values, moei_difference *d) {
    const uint64_t *all;
    size_t from, part, j;
    int r;
    for (from = 0; from < n; from += part) {
        part = n - from < MOEI_WORDS ? n - from : (size_t)MOEI_WORDS;
        if (moei_all_gather(t, part, values + from, &all) != MOE_OK) return MOE_ERR_TRANSPORT;
        for (j = 0; j < part; j++)
            for (r = 1; r < t->n_ranks; r++) {
                if (all[(size_t)r * part + j] == all[j]) continue;
                d->rank = 0;
                while (all[(size_t)d->rank * part + j] == all[(size_t)t->rank * part + j]) d->rank++;
                d->i = from + j;
                d->theirs = all[(size_t)d->rank * part + j];
                return MOE_ERR_CONFIG;
            }
    }
    return MOE_OK;
}

moe_status moe_transport_agree(const moe_transport *transport, size_t n, const uint64_t *values, int *rank,
                               size_t *i) {
    moei_difference d;
    moe_status status;
    if (transport == NULL || transport->batch.hooks == NULL || (n > 0 && values == NULL)) return MOE_ERR_ARGUMENT;
    status = moei_compare(transport, n, values, &d);
    if (status == MOE_ERR_CONFIG && rank != NULL) *rank = d.rank;
    if (status == MOE_ERR_CONFIG && i != NULL) *i = d.i;
    return status;
}

/* moei_compare for n named numbers. */
static moe_status moei_compare_named(const moe_transport *t, size_t n, const char *const *names,
                                     const uint64_t *values, const char *where, moe_error *error) {
    moei_difference d;
    moe_status status = moei_compare(t, n, values, &d);
    if (status == MOE_OK) return status;
    if (status == MOE_ERR_TRANSPORT)
        return moei_error(error, status, "%sthe ranks could not compare their settings: %s", where,
                          moe_status_text(status));
    return moei_error(error, status, "%s%s: rank %d differs; all ranks must have the same", where, names[d.i],
                      d.rank);
}

/* The value of a field as a number. */
static uint64_t moei_field_bits(const moe_field *field, const void *config) {
    const unsigned char *at = (const unsigned char *)config + field->offset;
    moe_real real;
    int integer;
    if (field->kind == MOE_FIELD_REAL) {
        memcpy(&real, at, sizeof real);
        return moei_double_bits((double)real);
    }
    memcpy(&integer, at, sizeof integer);
    return (uint64_t)(int64_t)integer;
}

/* The text of a field's value on another rank; config is scratch. */
static void moei_bits_text(const moe_field *field, uint64_t bits, void *config, char *text, size_t room) {
    unsigned char *at = (unsigned char *)config + field->offset;
    moe_real real = (moe_real)moei_bits_double(bits);
    int integer = (int)(int64_t)bits;
    if (field->kind == MOE_FIELD_REAL) memcpy(at, &real, sizeof real);
    else memcpy(at, &integer, sizeof integer);
    moe_field_text(field, config, text, room);
}

/* The kernels may differ between ranks. */
static int moei_is_shared_field(const moe_field *field) { return moei_strcmp(field->name, "kernels") != 0; }

/* A hash of all settings. */
static uint64_t moei_fields_hash(const moe_field *fields, const void *config) {
    uint64_t hash = 0;
    for (; fields->name != NULL; fields++)
        if (moei_is_shared_field(fields))
            hash = (hash ^ moei_field_bits(fields, config)) * UINT64_C(0x9e3779b97f4a7c15) + (hash >> 29);
    return hash;
}

/* moei_compare_named for the fields of a configuration: compares a hash, and each field if that
   differs; scratch is a copy of config. */
static moe_status moei_compare_fields(const moe_transport *t, const moe_field *fields, const void *config,
                                      void *scratch, const char *where, moe_error *error) {
    char own[40], other[40];
    moei_difference d;
    uint64_t bits = moei_fields_hash(fields, config);
    moe_status status = moei_compare(t, 1, &bits, &d);
    if (status == MOE_OK) return MOE_OK;
    for (; fields->name != NULL && status != MOE_ERR_TRANSPORT; fields++) {
        if (!moei_is_shared_field(fields)) continue;
        bits = moei_field_bits(fields, config);
        status = moei_compare(t, 1, &bits, &d);
        if (status != MOE_ERR_CONFIG) continue;
        moe_field_text(fields, config, own, sizeof own);
        moei_bits_text(fields, d.theirs, scratch, other, sizeof other);
        return moei_error(error, status, "%s%s = %s: rank %d has %s; all ranks must have the same settings", where,
                          fields->name, own, d.rank, other);
    }
    return status != MOE_ERR_TRANSPORT ? MOE_OK : moei_error(error, status, "%sthe transport failed", where);
}

/* Rejects layer settings that are incompatible with several ranks. */
static moe_status moei_ranks_check(const moe_layer_config *c, moe_error *error) {
    const moe_transport *t = c->transport;
    if (MOEI_REAL_EXPERTS(&c->router) < c->router.n_experts)
        return moei_error(error, MOE_ERR_CONFIG,
                          "n_zero = %d, n_copy = %d, n_constant = %d: experts without matrices are incompatible with a "
                          "transport",
                          c->router.n_zero, c->router.n_copy, c->router.n_constant);
    if (t->local_routing && (c->router.l1_controller || c->router.ac_mode == MOE_AC_RUNNING))
        return moei_error(error, MOE_ERR_CONFIG,
                          "%s is incompatible with a transport whose local_routing = 1: "
                          "it needs the tokens of all ranks",
                          c->router.l1_controller ? "l1_controller" : "ac_mode = running");
    if (!t->local_routing && moei_is_soft(&c->router) && moei_crosses_sequences(&c->router))
        return moei_error(error, MOE_ERR_CONFIG,
                          "select = soft with input = adaptive_clustering is incompatible with a transport "
                          "whose local_routing = 0: the clusters depend on the tokens of all ranks");
    if (t->n_ranks > c->router.n_experts)
        return moei_error(error, MOE_ERR_CONFIG,
                          "n_experts = %d: the transport has n_ranks = %d, and every rank needs at least "
                          "one expert",
                          c->router.n_experts, t->n_ranks);
    return MOE_OK;
}

static moe_status moei_ranks_layer_agree(const moe_layer_config *config, int trainable, uint64_t seed,
                                         moe_error *error) {
    static const char *const names[] = {"seed", "trainable"};
    moe_layer_config scratch = *config;
    uint64_t values[2];
    moe_status status = moei_compare_fields(config->transport, moei_layer_fields, config, &scratch, "", error);
    values[0] = seed;
    values[1] = trainable != 0;
    return status == MOE_OK ? moei_compare_named(config->transport, 2, names, values, "", error) : status;
}

/* ---- a layer's call ---- */

/* Counts and offsets of the rows of one exchange, [R] each. */
typedef struct moei_row_map {
    size_t *send_counts, *send_at, *receive_counts, *receive_at;
} moei_row_map;

/* In the workspace: the state of a call on ranks, besides the pass over this rank's tokens. */
typedef struct moei_ranks {
    const moe_transport *transport;
    moe_batch batch;
    size_t max_tokens;            /* the largest number of tokens of a rank */
    size_t n_local, max_local;    /* local experts; the largest number of them on a rank */
    size_t chunks;
    int is_broken;                /* the transport has failed and must not be called again */
    moe_error *error;             /* of the call, or NULL */
    size_t *first_tokens;         /* [R+1] offsets of the tokens of each rank, and the end */
    /* [R,max_local+1] to each rank: a status, then rows for each of its experts */
    uint64_t *counts_out;
    uint64_t *counts_in;          /* the same from each rank */
    moei_row_map map[MOE_EXCHANGES];
    moe_exchange exchange[MOE_EXCHANGES];
    moei_row_map hop_map[MOE_EXCHANGES]; /* two_level: of the current hop */
    moe_exchange hop[MOE_EXCHANGES];
    unsigned char *hop_send[MOE_EXCHANGES], *hop_receive[MOE_EXCHANGES];
    size_t hop_bytes;             /* size of each of these buffers; 0: one level */
    /* [R,machines] rows for the ranks of one position in each machine */
    uint64_t *hop_counts_out, *hop_counts_in;
    unsigned char *copy;          /* own rows of an all-gather */
    /* [own rows of the plan; d, o, o] inputs, f(x) and its gradient */
    moe_real *sent, *outputs, *d_outputs;
    /* [received rows; d, o, d] inputs, f(x) or its gradient, dx */
    moe_real *received, *computed, *d_received;
    size_t max_received;
    /* [n_local+1] offsets of the plan of the local experts for one chunk */
    size_t *chunk_offsets;
    moe_layer local;              /* the local experts as a layer: rows in, rows out */
    moe_layer_pass local_pass;    /* its pass over the received rows */
    /* for scores that read experts: the local experts' pass over the tokens of all ranks */
    moe_layer_pass scored_pass;
    moe_real *all_x, *d_all_x;    /* [R max_tokens,d] */
    /* [E,max_tokens,width] the activations of the own tokens that the score reads */
    moe_real *scored, *d_scored;
    moe_real *parts;              /* [R max_tokens,d] gradients of the own tokens from each rank */
    moe_rng rng;                  /* local routing: the rank's own generator */
    uint64_t jitter_before, jitter_after; /* moei_soft_jitter of the ranks before and after this one */
    /* [E+1] local routing: loads and tokens of all ranks, for the router's state */
    size_t *counts;
    moe_real *load;               /* [2,E+1] the same as floats, for sum */
} moei_ranks;

static void moei_experts_of(const moe_layer *layer, int rank, size_t *first, size_t *count) {
    moe_rank_part((size_t)layer->config.router.n_experts, rank, layer->config.transport->n_ranks, first, count);
}

/* The experts from..to-1 of a chunk on a rank that has `experts` experts. */
static void moei_chunk_of(const moei_ranks *k, size_t experts, size_t chunk, size_t *from, size_t *to) {
    size_t count;
    moei_nth_part(experts, chunk, k->chunks, from, &count);
    *to = *from + count;
}

/* The number of tokens of a rank. */
static size_t moei_tokens_from(const moei_ranks *k, int rank) {
    return k->first_tokens[rank + 1] - k->first_tokens[rank];
}

/* ---- exchanges of rows ---- */

static int moei_is_off_machine(const moe_transport *t, int rank) {
    return rank / t->ranks_per_machine != t->rank / t->ranks_per_machine;
}

/* Runs a stage of an exchange and counts its traffic. */
static moe_status moei_exchange_rows(const moe_transport *t, int stage, const moe_exchange *e) {
    moe_traffic *traffic = stage & MOE_EXCHANGE_BEGIN ? t->traffic : NULL;
    int r;
    if (traffic != NULL) {
        traffic->exchanges++;
        for (r = 0; r < t->n_ranks; r++) {
            if (r == t->rank || e->send_counts[r] == 0) continue;
            if (traffic->bytes != NULL) traffic->bytes[r] += e->send_counts[r] * e->row_bytes;
            traffic->messages++;
            traffic->messages_off_machine += (uint64_t)moei_is_off_machine(t, r);
        }
    }
    return t->rows(t->ctx, stage, e) == MOE_OK ? MOE_OK : MOE_ERR_TRANSPORT;
}

static unsigned char *moei_copy_rows(unsigned char *to, const void *rows, size_t at, size_t count, size_t bytes) {
    if (count > 0) memcpy(to, (const unsigned char *)rows + at * bytes, count * bytes);
    return to + count * bytes;
}

/* Computes the offsets of a hop's rows, ordered by rank. */
static void moei_hop_offsets(const moei_ranks *k, const moei_row_map *map) {
    size_t out = 0, in = 0;
    int r;
    for (r = 0; r < k->transport->n_ranks; r++) {
        map->send_at[r] = out;
        map->receive_at[r] = in;
        out += map->send_counts[r];
        in += map->receive_counts[r];
    }
}

/* The first hop of two_level, inside the machine: rows to the ranks at position j of all machines
   are sent to position j of this one; also exchanges the counts per machine. */
static moe_status moei_hop_inside(moei_ranks *k, int channel, const moe_exchange *e) {
    const moe_transport *t = k->transport;
    const moei_row_map *map = &k->hop_map[channel];
    int each = t->ranks_per_machine, machines = t->n_ranks / each;
    int first = t->rank / each * each, r, m;
    unsigned char *out = k->hop_send[channel];
    size_t room = k->hop_bytes / e->row_bytes;
    memset(map->send_counts, 0, (size_t)t->n_ranks * sizeof *map->send_counts);
    memset(map->receive_counts, 0, (size_t)t->n_ranks * sizeof *map->receive_counts);
    memset(k->hop_counts_out, 0, (size_t)t->n_ranks * (size_t)machines * sizeof(uint64_t));
    for (r = first; r < first + each; r++)
        for (m = 0; m < machines; m++) {
            int goal = m * each + r % each;
            k->hop_counts_out[(size_t)r * (size_t)machines + (size_t)m] = e->send_counts[goal];
            map->send_counts[r] += e->send_counts[goal];
            out = moei_copy_rows(out, e->send, e->send_at[goal], e->send_counts[goal], e->row_bytes);
        }
    if (moei_all_to_all(t, (size_t)machines, k->hop_counts_out, k->hop_counts_in) != MOE_OK) return MOE_ERR_TRANSPORT;
    for (r = first; r < first + each; r++)
        for (m = 0; m < machines; m++) {
            uint64_t count = k->hop_counts_in[(size_t)r * (size_t)machines + (size_t)m];
            if (count > room) return MOE_ERR_TRANSPORT; /* more rows than ranks can send */
            room -= (size_t)count;
            map->receive_counts[r] += (size_t)count;
        }
    moei_hop_offsets(k, map);
    k->hop[channel] = *e;
    k->hop[channel].send = k->hop_send[channel];
    k->hop[channel].receive = k->hop_receive[channel];
    k->hop[channel].send_counts = map->send_counts;
    k->hop[channel].send_at = map->send_at;
    k->hop[channel].receive_counts = map->receive_counts;
    k->hop[channel].receive_at = map->receive_at;
    return moei_exchange_rows(t, MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END, &k->hop[channel]);
}

/* The second hop, between machines: sends the rows of this machine's ranks to each other machine,
   ordered by rank. */
static moe_status moei_hop_across(moei_ranks *k, int channel, const moe_exchange *e) {
    const moe_transport *t = k->transport;
    const moei_row_map *map = &k->hop_map[channel];
    int each = t->ranks_per_machine, machines = t->n_ranks / each;
    int first = t->rank / each * each, r, m, i;
    unsigned char *out = k->hop_send[channel];
    for (m = 0; m < machines; m++)
        /* rows from rank i of this machine: for machine 0, 1, ... */
        for (i = 0; i < each; i++) {
            const uint64_t *counts = k->hop_counts_in + (size_t)(first + i) * (size_t)machines;
            size_t at = map->receive_at[first + i];
            for (r = 0; r < m; r++) at += (size_t)counts[r];
            out = moei_copy_rows(out, k->hop_receive[channel], at, (size_t)counts[m], e->row_bytes);
        }
    for (r = 0; r < t->n_ranks; r++) {
        map->send_counts[r] = 0;
        map->receive_counts[r] = 0;
        if (r % each != t->rank % each) continue;
        m = r / each;
        for (i = 0; i < each; i++) {
            map->send_counts[r] += (size_t)k->hop_counts_in[(size_t)(first + i) * (size_t)machines + (size_t)m];
            map->receive_counts[r] += e->receive_counts[m * each + i];
        }
    }
    moei_hop_offsets(k, map);
    return moei_exchange_rows(t, MOE_EXCHANGE_BEGIN, &k->hop[channel]);
}

static moe_status moei_two_hops(moei_ranks *k, int channel, int stage) {
    const moe_exchange *e = &k->exchange[channel];
    const unsigned char *in = k->hop_receive[channel];
    moe_status status = MOE_OK;
    int r;
    if (stage & MOE_EXCHANGE_BEGIN) {
        status = moei_hop_inside(k, channel, e);
        if (status == MOE_OK) status = moei_hop_across(k, channel, e);
    }
    if (status != MOE_OK || !(stage & MOE_EXCHANGE_END)) return status;
    status = moei_exchange_rows(k->transport, MOE_EXCHANGE_END, &k->hop[channel]);
    for (r = 0; r < k->transport->n_ranks && status == MOE_OK; r++) {
        size_t bytes = e->receive_counts[r] * e->row_bytes;
        if (bytes > 0) memcpy((unsigned char *)e->receive + e->receive_at[r] * e->row_bytes, in, bytes);
        in += bytes;
    }
    return status;
}

/* Kinds of rows: gathered router data, not counted; tokens; tokens by the dispatch plan, which may
   use two levels. */
enum {
    MOEI_ROWS_UNCOUNTED = 0,
    MOEI_ROWS_TOKENS,
    MOEI_ROWS_PLANNED
};

enum { MOEI_EXCHANGE_NOW = MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END };

/* Runs a stage of the exchange on a channel. */
static moe_status moei_move(moei_ranks *k, int channel, int stage, int kind) {
    const moe_transport *t = k->transport;
    int r;
    if (kind != MOEI_ROWS_UNCOUNTED && t->traffic != NULL && t->traffic->rows != NULL && (stage & MOE_EXCHANGE_BEGIN))
        for (r = 0; r < t->n_ranks; r++) t->traffic->rows[r] += k->exchange[channel].send_counts[r];
    if (kind == MOEI_ROWS_PLANNED && k->hop_bytes > 0) return moei_two_hops(k, channel, stage);
    return moei_exchange_rows(t, stage, &k->exchange[channel]);
}

/* Prepares the exchange of a channel whose map is set; back: in the opposite direction. */
static void moei_prepare(moei_ranks *k, int channel, size_t row_bytes, const void *send, void *receive, int back) {
    const moei_row_map *map = &k->map[channel];
    moe_exchange *e = &k->exchange[channel];
    e->channel = channel;
    e->row_bytes = row_bytes;
    e->send = send;
    e->receive = receive;
    e->send_counts = back ? map->receive_counts : map->send_counts;
    e->send_at = back ? map->receive_at : map->send_at;
    e->receive_counts = back ? map->send_counts : map->receive_counts;
    e->receive_at = back ? map->send_at : map->receive_at;
}

/* The map of an all-gather of rows of tokens. */
static void moei_map_all(const moei_ranks *k, const moei_row_map *map) {
    int r;
    for (r = 0; r < k->transport->n_ranks; r++) {
        map->send_counts[r] = moei_tokens_from(k, k->transport->rank);
        map->send_at[r] = 0;
        map->receive_counts[r] = moei_tokens_from(k, r);
        map->receive_at[r] = k->first_tokens[r];
    }
}

/* moe_batch.gather of the router. */
static moe_status moei_ranks_gather(void *ctx, moe_status status, size_t row_bytes, void *rows) {
    moei_ranks *k = (moei_ranks *)ctx;
    size_t own = moei_tokens_from(k, k->transport->rank);
    uint64_t word = moei_status_word(status);
    const uint64_t *all;
    if (k->is_broken) return MOE_ERR_TRANSPORT;
    k->is_broken = moei_all_gather(k->transport, 1, &word, &all) != MOE_OK;
    status = k->is_broken ? MOE_ERR_TRANSPORT : moei_status_of_all(k->transport, status, all, 1, k->error);
    if (status != MOE_OK) return status;
    if (own > 0) memcpy(k->copy, (unsigned char *)rows + k->batch.first * row_bytes, own * row_bytes);
    moei_map_all(k, &k->map[0]);
    moei_prepare(k, 0, row_bytes, k->copy, rows, 0);
    status = moei_move(k, 0, MOEI_EXCHANGE_NOW, MOEI_ROWS_UNCOUNTED);
    k->is_broken = status != MOE_OK;
    return status;
}

/* ---- workspace ---- */

/* The local experts as a layer of their own. */
static moe_layer moei_local_layer(const moe_layer *layer) {
    moe_layer local = *layer;
    size_t first;
    local.config.router.n_experts = (int)moei_own_experts(&layer->config, &first);
    local.config.router.select = MOE_SELECT_TOP_K;
    local.config.router.top_k = 1;
    local.config.router.apply_to = MOE_APPLY_OUTPUT;
    local.config.router.score = MOE_SCORE_LINEAR;
    local.config.router.compete_rate = 0;
    local.config.transport = NULL;
    local.config.n_shared = 0;
    return local;
}

/* The largest number of rows that one expert, and all local experts together, may receive. */
static int moei_max_received(const moe_layer *layer, const moei_ranks *k, size_t *of_one, size_t *of_all) {
    const moe_layer_config *c = &layer->config;
    size_t choices = moei_max_choices(&c->router), experts = k->n_local;
    if (!moei_is_soft(&c->router) && choices < experts) experts = choices;
    return moei_mul(moei_expert_rows(c, k->max_tokens), (size_t)k->transport->n_ranks, of_one) &&
           moei_mul(*of_one, experts, of_all);
}

#ifdef MOE_NO_QUANT
#define moei_take_quantized(layer, l, rows, n, p) (void)0 /* there are no quantized rows */
#endif

static void moei_local_layout(const moe_layer *layer, moei_ranks *k, int training, moei_layout *l) {
    moei_expert_run run = moei_expert_run_begin(&k->local, k->local.config.expert, 0);
    moe_layer_pass *p = &k->local_pass;
    size_t of_one = 0, of_all = 0;
    size_t stride = moei_stride(layer, run.width[MOEI_X]);
    if (!moei_max_received(layer, k, &of_one, &of_all) || !MOEI_FITS_INT32(of_all)) l->overflow = 1;
    k->max_received = of_all;
    memset(p, 0, sizeof *p);
    p->call.n_tokens = of_one; /* the rows that one expert may receive */
    p->routing.plan.offsets = (size_t *)moei_take(l, k->n_local + 1, sizeof(size_t));
    p->routing.plan.assignments = (moe_assignment *)moei_take(l, of_all, sizeof(moe_assignment));
    p->routing.plan.n_experts = k->n_local;
    k->chunk_offsets = (size_t *)moei_take(l, k->n_local + 1, sizeof(size_t));
    k->received = moei_take_reals(l, of_all, run.width[MOEI_X]);
    k->computed = moei_take_reals(l, of_all, run.width[MOE_NODE_OUTPUT]);
    p->x = p->inputs = k->received;
    p->rows = moei_take_lines(layer, l, of_one, stride);
    moei_take_activations(&run, l, training ? of_all : of_one, training, p->node);
    if (!training) {
        moei_take_quantized(&k->local, l, of_one, of_one, p);
        return;
    }
    p->routing.d_weight_out = moei_take_reals(l, of_all, 1);
    k->d_received = moei_take_reals(l, of_all, run.width[MOEI_X]);
    p->d_rows = moei_take_lines(layer, l, of_one, stride);
    moei_take_activations(&run, l, of_one, 1, p->d_node);
}

/* Lays out the pass of the local experts over the tokens of all ranks, for scores that read
   experts. */
static void moei_scored_layout(const moe_layer *layer, moei_ranks *k, int training, moei_layout *l) {
    const moe_layer_config *c = &layer->config;
    moei_expert_run run = moei_expert_run_begin(layer, layer->config.expert, training);
    moe_layer_pass *p = &k->scored_pass;
    size_t total = 0, cells = 0;
    size_t own = 0, d = run.width[MOEI_X];
    memset(p, 0, sizeof *p);
    if (run.scored < 0) return;
    if (!moei_mul((size_t)k->transport->n_ranks, k->max_tokens, &total) || !moei_mul(total, k->n_local, &cells) ||
        !moei_mul(k->max_tokens, (size_t)c->router.n_experts, &own))
        l->overflow = 1;
    k->all_x = moei_take_reals(l, total, d);
    k->scored = moei_take_reals(l, own, run.width[run.scored]);
    p->clean = moei_take_reals(l, total, d);
    moei_take_scored(&run, l, cells, p->all);
    if (!training) {
        moei_take_quantized(layer, l, total, total, p);
        return;
    }
    k->d_scored = moei_take_reals(l, own, run.width[run.scored]);
    k->d_all_x = moei_take_reals(l, total, d);
    k->parts = moei_take_reals(l, total, d);
    moei_take_scored(&run, l, cells, p->d_all);
}

/* Bytes of the longest row that a router gathers. */
static size_t moei_longest_row(const moe_router_config *c) {
    size_t width = (size_t)(c->n_experts > c->d_model ? c->n_experts : c->d_model);
    size_t reals = (width < 2 ? 2 : width) * sizeof(moe_real), choices = moei_max_choices(c) * sizeof(int32_t);
    return reals > choices ? reals : choices;
}

/* Lays out what runs on the rank of the token: the shared expert and the matrices of d_latent. */
static void moei_shared_layout(const moe_layer *layer, size_t n, int training, moei_layout *l, moe_layer_pass *p) {
    moei_expert_run shared;
    moei_take_latent(&layer->config, l, n, training, p);
    if (layer->config.n_shared > 0) {
        shared = moei_expert_run_begin(layer, MOEI_SHARED, 0);
        moei_take_activations(&shared, l, n, training, p->shared);
        p->shared_factor = moei_take_reals(l, n, 1);
        if (training) moei_take_activations(&shared, l, n, 1, p->d_shared);
    }
    if (!training && (layer->config.n_shared > 0 || layer->config.d_latent > 0))
        moei_take_quantized(layer, l, n, n, p);
}

/* The widths of the experts' inputs and outputs, which are the rows that ranks exchange. */
static size_t moei_width_in(const moe_layer *layer) {
    return (size_t)moei_activation_width(&layer->config, layer->config.expert, MOEI_X);
}

static size_t moei_width_out(const moe_layer *layer) {
    return (size_t)moei_activation_width(&layer->config, layer->config.expert, MOE_NODE_OUTPUT);
}

static void moei_take_map(moei_layout *l, size_t ranks, moei_row_map *map) {
    map->send_counts = (size_t *)moei_take(l, ranks, sizeof(size_t));
    map->send_at = (size_t *)moei_take(l, ranks, sizeof(size_t));
    map->receive_counts = (size_t *)moei_take(l, ranks, sizeof(size_t));
    map->receive_at = (size_t *)moei_take(l, ranks, sizeof(size_t));
}

/* Lays out the buffers of two_level. An intermediate rank holds the rows of all ranks of its
   machine, or those to the ranks at its position in all machines; the destination holds what it
   receives. */
static void moei_hop_layout(moei_ranks *k, size_t own_rows, size_t width, moei_layout *l) {
    size_t ranks = (size_t)k->transport->n_ranks, each = (size_t)k->transport->ranks_per_machine;
    size_t machines = ranks / each, most = 0;
    size_t words = 0;
    int channel;
    if (!moei_mul(own_rows, each > machines ? each : machines, &most) || !moei_mul(ranks, machines, &words))
        l->overflow = 1;
    if (most < k->max_received) most = k->max_received;
    if (!moei_mul(most > 0 ? most : 1, width, &k->hop_bytes) ||
        !moei_mul(k->hop_bytes, sizeof(moe_real), &k->hop_bytes))
        l->overflow = 1;
    k->hop_counts_out = (uint64_t *)moei_take(l, words, sizeof(uint64_t));
    k->hop_counts_in = (uint64_t *)moei_take(l, words, sizeof(uint64_t));
    for (channel = 0; channel < MOE_EXCHANGES; channel++) {
        moei_take_map(l, ranks, &k->hop_map[channel]);
        k->hop_send[channel] = (unsigned char *)moei_take(l, k->hop_bytes, 1);
        k->hop_receive[channel] = (unsigned char *)moei_take(l, k->hop_bytes, 1);
    }
}

/* Sets what is known before the memory is laid out: sizes, and the local experts. */
static void moei_ranks_sizes(const moe_layer *layer, size_t max_tokens, moei_ranks *k) {
    const moe_transport *t = layer->config.transport;
    size_t ranks = (size_t)t->n_ranks, first;
    memset(k, 0, sizeof *k);
    k->transport = t;
    k->max_tokens = max_tokens;
    k->n_local = moei_own_experts(&layer->config, &first);
    k->max_local = ((size_t)layer->config.router.n_experts + ranks - 1) / ranks;
    k->chunks = t->chunks > 1 ? (size_t)t->chunks : 1;
    if (k->chunks > k->max_local) k->chunks = k->max_local;
    k->local = moei_local_layer(layer);
}

/* Lays out a pass in which each rank has at most max_tokens tokens. With an empty base it only
   counts bytes; `counting` then replaces the returned struct. */
static moei_ranks *moei_ranks_layout(const moe_layer *layer, size_t max_tokens, int training, moei_layout *l,
                                     moe_layer_pass *p, moei_ranks *counting) {
    const moe_transport *t = layer->config.transport;
    const moei_expert_run run = moei_expert_run_begin(layer, layer->config.expert, training);
    moei_ranks *k = (moei_ranks *)moei_take(l, 1, sizeof *k);
    size_t ranks = (size_t)t->n_ranks, experts = (size_t)layer->config.router.n_experts;
    size_t d = moei_width_in(layer), o = moei_width_out(layer);
    size_t total = 0, rows = 0;
    size_t words = 0;
    int channel;
    memset(p, 0, sizeof *p);
    if (k == NULL) k = counting;
    moei_ranks_sizes(layer, max_tokens, k);
    if (!moei_mul(max_tokens, ranks, &total) || !MOEI_FITS_INT32(total) ||
        !moei_kept_rows(&layer->config, max_tokens, &rows) || !moei_mul(ranks, k->max_local + 1, &words))
        l->overflow = 1;
    k->first_tokens = (size_t *)moei_take(l, ranks + 1, sizeof(size_t));
    k->counts_out = (uint64_t *)moei_take(l, words, sizeof(uint64_t));
    k->counts_in = (uint64_t *)moei_take(l, words, sizeof(uint64_t));
    for (channel = 0; channel < MOE_EXCHANGES; channel++) moei_take_map(l, ranks, &k->map[channel]);
    if (t->local_routing) {
        k->counts = (size_t *)moei_take(l, experts + 1, sizeof(size_t));
        k->load = moei_take_reals(l, experts + 1, 2);
    } else
        k->copy = (unsigned char *)moei_take(l, max_tokens, moei_longest_row(&layer->config.router));
    if (l->overflow || moe_route_batch_size(&layer->router, max_tokens, t->local_routing ? max_tokens : total, training,
                                            &p->route_size) != MOE_OK)
        l->overflow = 1;
    p->route_memory = moei_take(l, p->route_size, 1);
    p->clean = run.scored >= 0 ? moei_take_reals(l, max_tokens, d) : NULL;
    k->sent = moei_take_reals(l, rows, d);
    k->outputs = moei_take_reals(l, rows, o);
    if (training) k->d_outputs = moei_take_reals(l, rows, o);
    moei_local_layout(layer, k, training, l);
    if (t->two_level && t->ranks_per_machine < t->n_ranks) moei_hop_layout(k, rows, d > o ? d : o, l);
    moei_scored_layout(layer, k, training, l);
    moei_shared_layout(layer, max_tokens, training, l, p);
    p->d_rows = training ? k->sent : NULL;
    p->ranks = k;
    return k;
}

static moe_status moei_ranks_size(const moe_layer *layer, size_t n, int training, size_t *bytes) {
    moei_layout l = moei_layout_begin(NULL);
    moe_layer_pass p;
    moei_ranks counting;
    (void)moei_ranks_layout(layer, n, training, &l, &p, &counting);
    if (l.overflow) return MOE_ERR_OVERFLOW;
    *bytes = l.used;
    return MOE_OK;
}

/* ---- the dispatch plan of the local experts ---- */

/* All-to-all of the number of rows per expert, or of a failure. */
static moe_status moei_exchange_counts(const moe_layer *layer, const moe_layer_pass *p, moe_status status) {
    moei_ranks *k = p->ranks;
    size_t n = k->max_local + 1, first, count, e;
    int r;
    memset(k->counts_out, 0, (size_t)k->transport->n_ranks * n * sizeof(uint64_t));
    for (r = 0; r < k->transport->n_ranks; r++) {
        uint64_t *out = k->counts_out + (size_t)r * n;
        moei_experts_of(layer, r, &first, &count);
        out[0] = moei_status_word(status);
        for (e = 0; e < count && status == MOE_OK; e++) out[1 + e] = moei_rows_of(p, first + e);
    }
    if (moei_all_to_all(k->transport, n, k->counts_out, k->counts_in) != MOE_OK) return MOE_ERR_TRANSPORT;
    return moei_status_of_all(k->transport, status, k->counts_in, n, k->error);
}

/* Builds the dispatch plan of the received rows. The rows of an expert are ordered by rank, then as
   the rank sent them, which is token order. They arrive chunk by chunk, within a chunk rank by
   rank, within a rank expert by expert. Impossible counts are a transport error. */
static moe_status moei_local_plan(moei_ranks *k) {
    moe_dispatch_plan *plan = &k->local_pass.routing.plan;
    size_t ranks = (size_t)k->transport->n_ranks, n = k->max_local + 1;
    size_t *next = k->chunk_offsets; /* the position of an expert's next row */
    size_t e, at = 0;
    size_t chunk, from, to, r, i;
    for (e = 0; e < k->n_local; e++)
        for (r = 0, plan->offsets[e] = at; r < ranks; r++) {
            uint64_t count = k->counts_in[r * n + 1 + e];
            if (count > k->local_pass.call.n_tokens / ranks) return MOE_ERR_TRANSPORT; /* of one rank */
            if (count > k->max_received - at) return MOE_ERR_TRANSPORT;
            at += (size_t)count;
        }
    plan->offsets[k->n_local] = at;
    plan->n_tokens = at;
    memcpy(next, plan->offsets, (k->n_local + 1) * sizeof(size_t));
    for (chunk = 0, at = 0; chunk < k->chunks; chunk++) {
        moei_chunk_of(k, k->n_local, chunk, &from, &to);
        for (r = 0; r < ranks; r++)
            for (e = from; e < to; e++)
                for (i = 0; i < (size_t)k->counts_in[r * n + 1 + e]; i++) {
                    moe_assignment *entry = plan->assignments + next[e]++;
                    entry->token = (int32_t)at++;
                    entry->choice = 0;
                    entry->weight_in = MOEI_R(1.0);
                    entry->weight_out = MOEI_R(1.0);
                }
    }
    return MOE_OK;
}

/* The first row of expert e in the dispatch plan. */
static size_t moei_first_row(const moe_layer_pass *p, size_t e) {
    return p->routing.plan.rows > 0 ? e * p->routing.plan.rows : p->routing.plan.offsets[e];
}

/* The map of a chunk's rows, in this rank's dispatch plan and among the received rows. */
static void moei_map_chunk(const moe_layer *layer, const moe_layer_pass *p, size_t chunk, const moei_row_map *map) {
    const moei_ranks *k = p->ranks;
    size_t n = k->max_local + 1, first, count, from, to, e, at;
    int r;
    moei_chunk_of(k, k->n_local, chunk, &from, &to);
    /* all rows of earlier chunks, which hold the earlier experts */
    at = k->local_pass.routing.plan.offsets[from];
    for (r = 0; r < k->transport->n_ranks; r++) {
        map->receive_counts[r] = 0;
        for (e = from; e < to; e++) map->receive_counts[r] += (size_t)k->counts_in[(size_t)r * n + 1 + e];
        map->receive_at[r] = at;
        at += map->receive_counts[r];
    }
    for (r = 0; r < k->transport->n_ranks; r++) {
        moei_experts_of(layer, r, &first, &count);
        moei_chunk_of(k, count, chunk, &from, &to);
        map->send_counts[r] = 0;
        for (e = from; e < to; e++) map->send_counts[r] += moei_rows_of(p, first + e);
        map->send_at[r] = map->send_counts[r] > 0 ? moei_first_row(p, first + from) : 0;
    }
}

/* The local pass restricted to the rows of one chunk: other experts have none, and all rows keep
   their positions. */
static void moei_chunk_pass(moei_ranks *k, size_t chunk, moe_layer_pass *pass) {
    const size_t *all = k->local_pass.routing.plan.offsets;
    size_t from, to, e;
    moei_chunk_of(k, k->n_local, chunk, &from, &to);
    for (e = 0; e <= k->n_local; e++) k->chunk_offsets[e] = all[e < from ? from : e > to ? to : e];
    *pass = k->local_pass;
    pass->routing.plan.offsets = k->chunk_offsets;
}

/* ---- dispatch and combine ---- */

/* A round trip: rows are sent to the owning ranks, processed there, and the results are
   returned. */
typedef struct moei_trip {
    const moe_layer *layer;
    moe_layer_pass *p;
    const moe_parallel *team;
    size_t d_sent, d_returned;    /* widths of rows */
    const moe_real *sent;      /* [own rows,d_sent] */
    moe_real *received;        /* [received rows,d_sent] */
    moe_real *computed;        /* [received rows,d_returned] */
    moe_real *returned;        /* [own rows,d_returned] */
    void (*compute)(const struct moei_trip *trip, moe_layer_pass *pass);
} moei_trip;

enum {
    MOEI_DISPATCH = 0, /* the channels of a trip */
    MOEI_COMBINE = 1
};

static moe_status moei_begin_dispatch(const moei_trip *trip, size_t chunk) {
    moei_ranks *k = trip->p->ranks;
    moei_map_chunk(trip->layer, trip->p, chunk, &k->map[MOEI_DISPATCH]);
    moei_prepare(k, MOEI_DISPATCH, trip->d_sent * sizeof(moe_real), trip->sent, trip->received, 0);
    return moei_move(k, MOEI_DISPATCH, MOE_EXCHANGE_BEGIN, MOEI_ROWS_PLANNED);
}

static moe_status moei_begin_back(const moei_trip *trip, size_t chunk) {
    moei_ranks *k = trip->p->ranks;
    moei_map_chunk(trip->layer, trip->p, chunk, &k->map[MOEI_COMBINE]);
    moei_prepare(k, MOEI_COMBINE, trip->d_returned * sizeof(moe_real), trip->computed, trip->returned, 1);
    return moei_move(k, MOEI_COMBINE, MOE_EXCHANGE_BEGIN, MOEI_ROWS_PLANNED);
}

static void moei_compute_chunk(const moei_trip *trip, size_t chunk) {
    moei_ranks *k = trip->p->ranks;
    moe_layer_pass pass;
    size_t first, end;
    moei_chunk_pass(k, chunk, &pass);
    first = pass.routing.plan.offsets[0];
    end = pass.routing.plan.offsets[k->n_local];
    if (end > first)
        memset(trip->computed + first * trip->d_returned, 0, (end - first) * trip->d_returned * sizeof(moe_real));
    trip->compute(trip, &pass);
}

/* Dispatch, computation and return of all chunks. One chunk is exchanged while another is
   computed. */
static moe_status moei_run_trip(const moei_trip *trip) {
    moei_ranks *k = trip->p->ranks;
    size_t chunk;
    moe_status status = moei_begin_dispatch(trip, 0);
    for (chunk = 0; chunk < k->chunks && status == MOE_OK; chunk++) {
        status = moei_move(k, MOEI_DISPATCH, MOE_EXCHANGE_END, MOEI_ROWS_PLANNED);
        if (status == MOE_OK && chunk + 1 < k->chunks) status = moei_begin_dispatch(trip, chunk + 1);
        if (status == MOE_OK) moei_compute_chunk(trip, chunk);
        if (status == MOE_OK && chunk > 0) status = moei_move(k, MOEI_COMBINE, MOE_EXCHANGE_END, MOEI_ROWS_PLANNED);
        if (status == MOE_OK) status = moei_begin_back(trip, chunk);
    }
    return status == MOE_OK ? moei_move(k, MOEI_COMBINE, MOE_EXCHANGE_END, MOEI_ROWS_PLANNED) : status;
}

static void moei_trip_forward(const moei_trip *trip, moe_layer_pass *pass) {
    const moe_layer *local = &trip->p->ranks->local;
    moei_expert_run run = moei_expert_run_begin(local, local->config.expert, 0);
    moei_chosen_experts(local, pass, &run, trip->computed, NULL, NULL, trip->team);
}

/* The number of rows of this rank's dispatch plan. */
static size_t moei_plan_length(const moe_layer *layer, const moe_layer_pass *p) {
    size_t experts = (size_t)layer->config.router.n_experts;
    return p->routing.plan.rows > 0 ? experts * p->routing.plan.rows : p->routing.plan.offsets[experts];
}

/* The row of assignment i of expert e in this rank's dispatch plan. */
static size_t moei_plan_row(const moe_layer_pass *p, size_t e, const moe_assignment *entry, size_t i) {
    return moei_first_row(p, e) + (p->routing.plan.rows > 0 ? (size_t)entry->choice : i);
}

/* Whether the rows of the plan are unweighted rows of x. */
static int moei_is_plain(const moe_layer *layer, const moe_layer_pass *p) {
    return p->routing.plan.rows == 0 && layer->config.router.apply_to == MOE_APPLY_OUTPUT;
}

/* Copies the experts' inputs by the plan, times their input weight; soft mixes tokens. */
static void moei_dispatch(const moe_layer *layer, const moe_layer_pass *p, moe_real *rows) {
    size_t d = moei_width_in(layer), e, i;
    int plain = moei_is_plain(layer, p);
    if (!plain) memset(rows, 0, moei_plan_length(layer, p) * d * sizeof(moe_real));
    for (e = 0; e < (size_t)layer->config.router.n_experts; e++)
        for (i = 0; i < moei_entry_count(p, e); i++) {
            const moe_assignment *entry = p->routing.plan.assignments + p->routing.plan.offsets[e] + i;
            const moe_real *x = p->inputs + (size_t)entry->token * d;
            moe_real *row = rows + moei_plan_row(p, e, entry, i) * d;
            if (plain) memcpy(row, x, d * sizeof(moe_real));
            else moe_axpy(layer->kernels, d, entry->weight_in, x, row);
        }
}

/* y_t += w_te f_e(x_t), experts in ascending order. */
static void moei_combine(const moe_layer *layer, const moe_layer_pass *p, const moe_real *outputs, moe_real *y) {
    size_t o = moei_width_out(layer), e, i;
    for (e = 0; e < (size_t)layer->config.router.n_experts; e++)
        for (i = 0; i < moei_entry_count(p, e); i++) {
            const moe_assignment *entry = p->routing.plan.assignments + p->routing.plan.offsets[e] + i;
            const moe_real *output = outputs + moei_plan_row(p, e, entry, i) * o;
            moe_axpy(layer->kernels, o, entry->weight_out, output, y + (size_t)entry->token * o);
        }
}

static void moei_count_assignments(const moe_layer *layer, const moe_layer_pass *p) {
    const moe_transport *t = layer->config.transport;
    size_t first, count, e, rows;
    int r;
    if (t->traffic == NULL) return;
    t->traffic->tokens += moei_real_tokens(&p->call, 0, p->call.n_tokens);
    for (r = 0; r < t->n_ranks; r++) {
        moei_experts_of(layer, r, &first, &count);
        for (e = first, rows = 0; e < first + count; e++) rows += moei_rows_of(p, e);
        t->traffic->assignments += rows;
        if (r != t->rank) t->traffic->assignments_remote += rows;
        if (moei_is_off_machine(t, r)) t->traffic->assignments_off_machine += rows;
    }
}

/* ---- scores that read experts ---- */

/* The map of the scored activations of expert e of every rank: from the owning rank, which computes
   them for all tokens, to the tokens' ranks. */
static void moei_map_scored(const moe_layer *layer, const moei_ranks *k, size_t e, const moei_row_map *map) {
    size_t own = moei_tokens_from(k, k->transport->rank), first, count;
    int r;
    for (r = 0; r < k->transport->n_ranks; r++) {
        moei_experts_of(layer, r, &first, &count);
        map->send_counts[r] = e < k->n_local ? moei_tokens_from(k, r) : 0;
        map->send_at[r] = e < k->n_local ? e * k->batch.total + k->first_tokens[r] : 0;
        map->receive_counts[r] = e < count ? own : 0;
        map->receive_at[r] = e < count ? (first + e) * own : 0;
    }
}

/* The local experts as a layer for the score. */
static moe_layer moei_scored_layer(const moe_layer *layer) {
    moe_layer local = *layer;
    size_t first;
    local.config.router.n_experts = (int)moei_own_experts(&layer->config, &first);
    local.config.transport = NULL;
    return local;
}

/* Computes the activation of every expert for this rank's tokens: sends the tokens to all ranks and
   receives the activations of their experts. */
static moe_status moei_ranks_score(const moe_layer *layer, moe_layer_pass *p, const moe_parallel *team) {
    moei_ranks *k = p->ranks;
    moe_layer_pass *all = &k->scored_pass;
    moe_layer local = moei_scored_layer(layer);
    moei_expert_run run;
    size_t e, width;
    moe_status status;
    int scored;
    run = moei_expert_run_begin(&local, local.config.expert, MOEI_COMPETED(&p->call));
    scored = run.scored;
    if (scored < 0) return MOE_OK;
    width = run.width[scored];
    moei_clean(&p->call, run.width[MOEI_X], p->inputs, p->clean);
    moei_map_all(k, &k->map[0]);
    moei_prepare(k, 0, run.width[MOEI_X] * sizeof(moe_real), p->clean, k->all_x, 0);
    status = moei_move(k, 0, MOEI_EXCHANGE_NOW, MOEI_ROWS_TOKENS);
    if (status != MOE_OK) return status;
    all->x = all->inputs = k->all_x;
    all->call.x = k->all_x;
    all->call.n_tokens = k->batch.total;
    all->call.training = p->call.training;
    all->call.keep = p->call.keep;
    moei_scored_forward(&local, all, &run, team);
    for (e = 0; e < k->max_local && status == MOE_OK; e++) {
        moei_map_scored(layer, k, e, &k->map[0]);
        moei_prepare(k, 0, width * sizeof(moe_real), all->all[scored], k->scored, 0);
        status = moei_move(k, 0, MOEI_EXCHANGE_NOW, MOEI_ROWS_TOKENS);
    }
    p->call.activations = k->scored;
    p->call.activation_width = width;
    return status;
}

/* ---- forward ---- */

/* The words that ranks exchange at the start of a call. */
enum {
    MOEI_CALL_STATUS = 0,
    MOEI_CALL_TOKENS,
    MOEI_CALL_SETTINGS,
    MOEI_CALL_KIND,
    MOEI_CALL_RNG,
    MOEI_CALL_WORDS
};

/* The tokens for which select = soft draws jitter. Its global routing does so on the token's rank
   alone, and the other ranks skip these numbers. */
static uint64_t moei_soft_jitter(const moe_layer *layer, const moe_call *call) {
    const moe_router_config *c = &layer->config.router;
    if (!moei_is_soft(c) || c->input != MOE_INPUT_JITTER || layer->config.transport->local_routing) return 0;
    return call->training && call->jitter == NULL ? moei_real_tokens(call, 0, call->n_tokens) : 0;
}

static void moei_skip_soft_jitter(const moe_layer *layer, const moe_layer_pass *p, uint64_t tokens) {
    uint64_t i;
    if (p->call.rng == NULL) return;
    for (i = 0; i < tokens * (uint64_t)layer->config.router.d_model; i++) (void)moe_rng_uniform(p->call.rng);
}

/* The state of call.rng where this rank draws numbers that all ranks must draw; 0: it draws none,
   or the call fails without rng. With local routing ranks only decide together whether the experts
   compete. Outside training the order of drops is random only with an rng. */
static uint64_t moei_shared_rng(const moe_layer *layer, const moe_call *call) {
    const moe_router_config *c = &layer->config.router;
    int draws = call->training ? moei_needs_rng(c, call) : c->drop_order == MOE_DROP_RANDOM;
    if (layer->config.transport->local_routing) draws = 0;
    if (!draws && !moei_draws_competition(layer, call)) return 0;
    if (call->rng == NULL) return !call->training;
    return call->rng->state > 1 ? call->rng->state : 2;
}

/* The bits of the word MOEI_CALL_KIND that are the same on all ranks. */
enum { MOEI_KIND_BITS = 2 };

/* Gathers the token counts, and whether all ranks make the same call. *all stays in the transport's
   memory. */
static moe_status moei_ranks_meet(const moe_layer *layer, const moe_call *call, moe_status status, size_t *max_tokens,
                                  const uint64_t **all) {
    const moe_transport *t = layer->config.transport;
    uint64_t own[MOEI_CALL_WORDS], sum = 0, draws = 0;
    int r;
    own[MOEI_CALL_STATUS] = moei_status_word(status);
    own[MOEI_CALL_TOKENS] = call->n_tokens;
    own[MOEI_CALL_SETTINGS] = moei_fields_hash(moei_layer_fields, &layer->config);
    own[MOEI_CALL_KIND] = (uint64_t)(unsigned)(call->training != 0) | (uint64_t)(unsigned)(call->keep != 0) << 1;
    if (status == MOE_OK) own[MOEI_CALL_KIND] |= moei_soft_jitter(layer, call) << MOEI_KIND_BITS;
    own[MOEI_CALL_RNG] = status == MOE_OK ? moei_shared_rng(layer, call) : 0;
    if (moei_all_gather(t, MOEI_CALL_WORDS, own, all) != MOE_OK) return MOE_ERR_TRANSPORT;
    status = moei_status_of_all(t, status, *all, MOEI_CALL_WORDS, call->error);
    for (r = 0, *max_tokens = 0; r < t->n_ranks && status == MOE_OK; r++) {
        const uint64_t *other = *all + (size_t)r * MOEI_CALL_WORDS;
        uint64_t n = other[MOEI_CALL_TOKENS];
        if (other[MOEI_CALL_SETTINGS] != (*all)[MOEI_CALL_SETTINGS])
            status = moei_error(call->error, MOE_ERR_CONFIG, "the layer's settings: rank %d differs from rank 0", r);
        if (((other[MOEI_CALL_KIND] ^ (*all)[MOEI_CALL_KIND]) & ((1u << MOEI_KIND_BITS) - 1)) != 0)
            status = moei_error(call->error, MOE_ERR_STATE, "call.training or keep: rank %d differs from rank 0", r);
        if (draws != 0 && other[MOEI_CALL_RNG] != 0 && draws != other[MOEI_CALL_RNG])
            status = moei_error(call->error, MOE_ERR_STATE, "call.rng: rank %d differs from a rank before it", r);
        if (draws == 0) draws = other[MOEI_CALL_RNG];
        if (n > INT32_MAX || sum + n > INT32_MAX)
            return moei_error(call->error, MOE_ERR_OVERFLOW, "n_tokens of all ranks: too many");
        if (other[MOEI_CALL_KIND] >> MOEI_KIND_BITS > n) return MOE_ERR_TRANSPORT; /* more jitter than tokens */
        sum += n;
        if (n > *max_tokens) *max_tokens = (size_t)n;
    }
    return status;
}

/* The batch of this call, from what moei_ranks_meet gathered. */
static void moei_ranks_batch(moei_ranks *k, const uint64_t *all) {
    int r;
    k->first_tokens[0] = 0;
    for (r = 0; r < k->transport->n_ranks; r++) {
        const uint64_t *words = all + (size_t)r * MOEI_CALL_WORDS;
        k->first_tokens[r + 1] = k->first_tokens[r] + (size_t)words[MOEI_CALL_TOKENS];
        if (r < k->transport->rank) k->jitter_before += words[MOEI_CALL_KIND] >> MOEI_KIND_BITS;
        if (r > k->transport->rank) k->jitter_after += words[MOEI_CALL_KIND] >> MOEI_KIND_BITS;
    }
    k->batch.first = k->first_tokens[k->transport->rank];
    k->batch.total = k->first_tokens[k->transport->n_ranks];
    k->batch.lead = k->transport->rank == 0;
    k->batch.ctx = k;
    k->batch.gather = moei_ranks_gather;
}

/* Reports a failure of the transport in a call. */
static moe_status moei_transport_failed(const moe_call *call, moe_status status) {
    return status != MOE_ERR_TRANSPORT ? status : moei_error(call->error, status, "%s", moe_status_text(status));
}

/* The router of this call. With local routing each loss is scaled by the rank's share of tokens. */
static moe_router moei_ranks_router(const moe_layer *layer, const moe_layer_pass *p) {
    moe_router router;
#ifndef MOE_NO_TRAIN
    size_t total = p->ranks->batch.total;
    moe_real share = total > 0 ? (moe_real)p->call.n_tokens / (moe_real)total : 0, factor;
    int loss;
    moei_layer_router(layer, &router);
    if (!layer->config.transport->local_routing) return router;
    for (loss = 0; loss < MOE_LOSS_COUNT; loss++) {
        unsigned char *at = (unsigned char *)&router.config + moei_loss_fields[loss];
        memcpy(&factor, at, sizeof factor);
        factor *= share;
        memcpy(at, &factor, sizeof factor);
    }
    router.config.loss_similarity_diff *= share;
#else
    moei_layer_router(layer, &router);
    (void)p;
#endif
    return router;
}

/* With local routing random stages draw from the rank's own generator, and the caller's generator
   advances by one number on all ranks, after the draw for the competition. */
static void moei_ranks_rng(const moe_layer *layer, moe_layer_pass *p) {
    const moe_transport *t = p->ranks->transport;
    int draws = p->call.training || layer->config.router.drop_order == MOE_DROP_RANDOM;
    if (!t->local_routing || p->call.rng == NULL || !draws) return;
    moe_rng_seed(&p->ranks->rng, moe_rng_next(p->call.rng) + (uint64_t)t->rank);
    p->call.rng = &p->ranks->rng;
}

/* Routes this rank's tokens, sends their rows to the experts and receives the results. */
static moe_status moei_ranks_experts(const moe_layer *layer, moe_layer_pass *p, const moe_parallel *team) {
    moei_ranks *k = p->ranks;
    moe_router router = moei_ranks_router(layer, p);
    moei_trip trip;
    moe_status status;
    p->inputs = p->x;
    if (layer->config.d_latent > 0) moei_inputs_forward(layer, p, team);
    status = moei_ranks_score(layer, p, team);
    if (status != MOE_OK) return status;
    status = moe_route(&router, &p->call, p->route_memory, p->route_size, &p->routing);
    if (k->is_broken) return MOE_ERR_TRANSPORT;
    status = moei_exchange_counts(layer, p, status);
    if (status == MOE_OK) status = moei_local_plan(k);
    if (status != MOE_OK) return status;
    moei_count_assignments(layer, p);
    moei_dispatch(layer, p, k->sent);
    k->local_pass.call.training = p->call.training;
    k->local_pass.call.keep = p->call.keep;
    trip.layer = layer;
    trip.p = p;
    trip.team = team;
    trip.d_sent = moei_width_in(layer);
    trip.d_returned = moei_width_out(layer);
    trip.sent = k->sent;
    trip.received = k->received;
    trip.computed = k->computed;
    trip.returned = k->outputs;
    trip.compute = moei_trip_forward;
    return moei_run_trip(&trip);
}

/* Checks of a call before the ranks communicate. */
static moe_status moei_ranks_call_check(const moe_layer *layer, const moe_call *call, const moe_real *y,
                                        const void *work) {
    const char *set = NULL;
    moei_expert_run run;
    moe_status status;
    if (work == NULL || (call->n_tokens > 0 && y == NULL))
        return moei_error(call->error, MOE_ERR_ARGUMENT, "%s is NULL", work == NULL ? "work" : "y");
    run = moei_expert_run_begin(layer, layer->config.expert, 0);
    status = moei_layer_call_check(layer, &run, call);
    if (status != MOE_OK) return status;
    if (moei_draws_competition(layer, call) && call->rng == NULL)
        return moei_missing(call, "rng", "compete_rate");
    if (call->training && call->n_tokens > 0 && call->rng == NULL && moei_needs_rng(&layer->config.router, call))
        return moei_missing(call, "rng", "a random stage in training");
    if (call->batch != NULL) set = "batch";
    if (call->decoding) set = "decoding";
    if (call->n_past > 0) set = "n_past";
    return set == NULL ? MOE_OK
                       : moei_error(call->error, MOE_ERR_UNSUPPORTED, "call.%s is incompatible with a transport", set);
}

static moe_status moei_ranks_pass(const moe_layer *layer, const moe_call *call, moe_real *y, void *work,
                                  size_t work_size, moe_layer_pass *pass) {
    moei_layout l = moei_layout_begin(NULL);
    moe_layer_pass p;
    moei_ranks counting;
    const uint64_t *all;
    moe_parallel team;
    moe_real *sum;
    size_t width;
    size_t max_tokens = 0;
    moe_status status = moei_ranks_call_check(layer, call, y, work);
    status = moei_ranks_meet(layer, call, status, &max_tokens, &all);
    if (status != MOE_OK) return status;
    (void)moei_ranks_layout(layer, max_tokens, moei_keeps(call), &l, &p, &counting);
    if (l.overflow) status = moei_error(call->error, MOE_ERR_OVERFLOW, "the workspace exceeds size_t");
    else if (l.used > work_size)
        status =
            moei_error(call->error, MOE_ERR_SPACE, "work_size = %z: the call takes %z bytes", work_size, l.used);
    else {
        l = moei_layout_begin(work);
        moei_ranks_batch(moei_ranks_layout(layer, max_tokens, moei_keeps(call), &l, &p, &counting), all);
    }
    status = moei_vote(layer->config.transport, status, call->error);
    if (status != MOE_OK) return status;
    p.call = *call;
    p.ranks->error = call->error;
    if (!layer->config.transport->local_routing) p.call.batch = &p.ranks->batch;
    (void)moei_compete_begin(layer, &p.call); /* cannot fail: rng was checked */
    moei_ranks_rng(layer, &p);
    p.x = call->x;
    team = moei_team(call);
    moei_skip_soft_jitter(layer, &p, p.ranks->jitter_before);
    status = moei_ranks_experts(layer, &p, &team);
    if (status != MOE_OK) return status;
    moei_skip_soft_jitter(layer, &p, p.ranks->jitter_after);
    sum = layer->config.d_latent > 0 ? p.latent[2] : y;
    width = (size_t)moei_activation_width(&layer->config, layer->config.expert, MOE_NODE_OUTPUT);
    if (call->n_tokens > 0) memset(sum, 0, call->n_tokens * width * sizeof *sum);
    moei_combine(layer, &p, p.ranks->outputs, sum);
    if (layer->config.d_latent > 0) moei_latent_product(layer, &p, MOEI_LATENT_OUT, 0, y, NULL, &team);
    if (layer->config.add_input) moei_add_input(layer, &p, y);
    if (layer->config.n_shared > 0) moei_shared_forward(layer, &p, y, &team);
    if (pass != NULL) *pass = p;
    return MOE_OK;
}

/* A failed call leaves call.rng as it was, because some ranks drew more numbers than others. */
static moe_status moei_ranks_forward(const moe_layer *layer, const moe_call *call, moe_real *y, void *work,
                                     size_t work_size, moe_layer_pass *pass) {
    const uint64_t state = call->rng != NULL ? call->rng->state : 0;
    const moe_status status = moei_ranks_pass(layer, call, y, work, work_size, pass);
    if (status != MOE_OK && call->rng != NULL) call->rng->state = state;
    return moei_transport_failed(call, status);
}

/* ---- backward ---- */

#ifndef MOE_NO_TRAIN

static void moei_trip_backward(const moei_trip *trip, moe_layer_pass *pass) {
    const moe_layer *local = &trip->p->ranks->local;
    const moei_expert_run run = moei_expert_run_begin(local, local->config.expert, MOEI_COMPETED(&pass->call));
    moei_returned back;
    back.dy = trip->received;
    back.d_outputs = NULL;
    back.d_weights = NULL;
    moei_chosen_experts(local, pass, &run, NULL, &back, trip->computed, trip->team);
}

/* Rows of w_te dy_t. */
static void moei_dispatch_gradients(const moe_layer *layer, const moe_layer_pass *p, const moe_real *dy,
                                    moe_real *rows) {
    size_t o = moei_width_out(layer), e, i;
    memset(rows, 0, moei_plan_length(layer, p) * o * sizeof(moe_real));
    for (e = 0; e < (size_t)layer->config.router.n_experts; e++)
        for (i = 0; i < moei_entry_count(p, e); i++) {
            const moe_assignment *entry = p->routing.plan.assignments + p->routing.plan.offsets[e] + i;
            moe_real *row = rows + moei_plan_row(p, e, entry, i) * o;
            moe_axpy(layer->kernels, o, entry->weight_out, dy + (size_t)entry->token * o, row);
        }
}

/* dx_t += w_in dx_row, dw_out = dy_t . f_e(x_t), dw_in = dx_row . x_t; experts ascending. */
static void moei_combine_gradients(const moe_layer *layer, moe_layer_pass *p, const moe_real *dy,
                                   const moe_real *d_rows, moe_real *dx) {
    size_t d = moei_width_in(layer), o = moei_width_out(layer);
    size_t e, i;
    int plain = moei_is_plain(layer, p);
    for (e = 0; e < (size_t)layer->config.router.n_experts; e++)
        for (i = 0; i < moei_entry_count(p, e); i++) {
            size_t at = p->routing.plan.offsets[e] + i;
            const moe_assignment *entry = p->routing.plan.assignments + at;
            size_t row = moei_plan_row(p, e, entry, i), t = (size_t)entry->token;
            if (dx != NULL) moe_axpy(layer->kernels, d, entry->weight_in, d_rows + row * d, dx + t * d);
            p->routing.d_weight_out[at] = moe_dot(layer->kernels, o, dy + t * o, p->ranks->outputs + row * o);
            if (!plain) p->routing.d_weight_in[at] = moe_dot(layer->kernels, d, d_rows + row * d, p->inputs + t * d);
        }
}

/* The backward pass of the activations that the score reads: their gradients are sent to the owning
   ranks; gradients of tokens are received from every rank and added in the order of ranks. */
static moe_status moei_ranks_score_backward(const moe_layer *layer, moe_layer_pass *p, moe_real *dx) {
    moei_ranks *k = p->ranks;
    moe_layer_pass *all = &k->scored_pass;
    moe_layer local = moei_scored_layer(layer);
    moei_expert_run run;
    size_t ranks = (size_t)k->transport->n_ranks, own = p->call.n_tokens;
    size_t d = moei_width_in(layer), e, t, r;
    moe_status status = MOE_OK;
    int scored;
    run = moei_expert_run_begin(&local, local.config.expert, MOEI_COMPETED(&p->call));
    scored = run.scored;
    if (scored < 0) return MOE_OK;
    moei_scored_zero(&local, all, &run);
    for (e = 0; e < k->max_local && status == MOE_OK; e++) {
        moei_map_scored(layer, k, e, &k->map[0]);
        moei_prepare(k, 0, run.width[scored] * sizeof(moe_real), k->d_scored, all->d_all[scored], 1);
        status = moei_move(k, 0, MOEI_EXCHANGE_NOW, MOEI_ROWS_TOKENS);
    }
    if (status != MOE_OK) return status;
    memset(k->d_all_x, 0, k->batch.total * d * sizeof(moe_real));
    moei_scored_backward(&local, all, &run, k->d_all_x);
    moei_map_all(k, &k->map[0]);
    for (r = 0; r < ranks; r++) k->map[0].send_at[r] = r * own; /* positions for rank r */
    moei_prepare(k, 0, d * sizeof(moe_real), k->d_all_x, k->parts, 1);
    status = moei_move(k, 0, MOEI_EXCHANGE_NOW, MOEI_ROWS_TOKENS);
    if (status != MOE_OK || dx == NULL) return status;
    for (r = 0; r < ranks; r++)
        for (t = 0; t < own; t++) {
            const moe_real *part = k->parts + (r * own + t) * d;
            moe_axpy(layer->kernels, d, MOEI_R(1.0), part, dx + t * d);
        }
    return MOE_OK;
}

static moe_status moei_ranks_return(const moe_layer *layer, const moei_returned *returned, moe_real *dx,
                                    moe_real *d_router_x, moe_layer_pass *pass) {
    moei_ranks *k = pass->ranks;
    moei_returned back = *returned;
    moe_real *d_inputs;
    moe_parallel team = moei_team(&pass->call);
    moe_router router = moei_ranks_router(layer, pass);
    moei_trip trip;
    moe_status status = MOE_OK;
    size_t own = pass->call.n_tokens, experts = (size_t)layer->config.router.n_experts;
    const int scored = moei_expert_run_begin(layer, layer->config.expert, MOEI_COMPETED(&pass->call)).scored;
    if (pass->d_rows == NULL || !pass->call.training)
        status = moei_error(pass->call.error, MOE_ERR_STATE, MOEI_NOT_TRAINING);
    else if (own > 0 && back.dy == NULL) status = moei_error(pass->call.error, MOE_ERR_ARGUMENT, "dy is NULL");
    status = moei_vote(k->transport, status, pass->call.error);
    if (status != MOE_OK) return status;
    if (own > 0 && layer->config.n_shared > 0) moei_shared_backward(layer, pass, back.dy, dx, &team);
    d_inputs = moei_sum_backward(layer, pass, &back, dx, &team);
    moei_dispatch_gradients(layer, pass, back.dy, k->d_outputs);
    trip.layer = layer;
    trip.p = pass;
    trip.team = &team;
    trip.d_sent = moei_width_out(layer);
    trip.d_returned = moei_width_in(layer);
    trip.sent = k->d_outputs;
    trip.received = k->computed;
    trip.computed = k->d_received;
    trip.returned = k->sent;
    trip.compute = moei_trip_backward;
    status = moei_run_trip(&trip);
    if (status != MOE_OK) return status;
    moei_combine_gradients(layer, pass, back.dy, k->sent, d_inputs);
    if (own > 0 && layer->config.add_input) moei_add_input_backward(layer, pass, returned->dy, dx);
    if (scored >= 0) memset(k->d_scored, 0, experts * own * pass->call.activation_width * sizeof(moe_real));
    if (pass->call.router_x == NULL) d_router_x = dx;
    status = moe_route_backward(&router, &pass->call, &pass->routing, layer->gradients, d_router_x,
                                scored < 0 ? NULL : k->d_scored);
    /* any other score cannot fail */
    if (layer->config.router.score == MOE_SCORE_CUSTOM) status = moei_vote(k->transport, status, pass->call.error);
    if (status == MOE_OK) status = moei_ranks_score_backward(layer, pass, d_inputs);
    if (status == MOE_OK) moei_inputs_backward(layer, pass, dx, &team);
    return status;
}

static moe_status moei_ranks_backward(const moe_layer *layer, const moei_returned *returned, moe_real *dx,
                                      moe_real *d_router_x, moe_layer_pass *pass) {
    return moei_transport_failed(&pass->call, moei_ranks_return(layer, returned, dx, d_router_x, pass));
}

enum { MOEI_COUNT_PART = 256 };

/* *bound = its maximum over all ranks; it is not negative. */
static moe_status moei_max_over(const moe_transport *t, moe_real *bound) {
    uint64_t word = moei_double_bits((double)*bound); /* the bits of positive floats are ordered like the floats */
    const uint64_t *all;
    int r;
    if (moei_all_gather(t, 1, &word, &all) != MOE_OK) return MOE_ERR_TRANSPORT;
    for (r = 0; r < t->n_ranks; r++)
        if (all[r] > word) word = all[r];
    *bound = (moe_real)moei_bits_double(word);
    return MOE_OK;
}

/* Updates the router's state after a pass. With local routing, counts and cutoffs are summed over
   all ranks; C_min and the affinity sum are the maximum over all ranks. */
static moe_status moei_ranks_observe(const moe_layer *layer, const moe_layer_pass *pass, moe_real *const *state) {
    moei_ranks *k = pass->ranks;
    moe_router router;
    moe_routing r = pass->routing;
    size_t experts = r.n_experts, e;
    moe_real *low, *high; /* parts of a count whose sums are exact in moe_real */
    moei_scratch m;
    moe_status status;
    moei_layer_router(layer, &router);
    if (!k->transport->local_routing) return moe_router_observe(&router, &pass->call, &r, state);
    if (!(moe_router_traits(&layer->config.router) & MOE_TRAIT_STATEFUL)) return MOE_OK;
    low = k->load;
    high = k->load + experts + 1;
    for (e = 0; e <= experts; e++) {
        size_t count = e < experts ? r.counts[e] : r.n_real;
        low[e] = (moe_real)(count % MOEI_COUNT_PART);
        high[e] = (moe_real)(count / MOEI_COUNT_PART);
    }
    status = k->transport->sum(k->transport->ctx, 2 * (experts + 1), k->load);
    if (status != MOE_OK) return MOE_ERR_TRANSPORT;
    status = moei_max_over(k->transport, &r.bound_now);
    if (status == MOE_OK) status = moei_max_over(k->transport, &r.affinity_now);
    if (status != MOE_OK) return status;
    moei_scratch_of(&router, &pass->call, &r, &m);
    if (m.cutoffs != NULL && k->transport->sum(k->transport->ctx, experts + 1, m.cutoffs) != MOE_OK)
        return MOE_ERR_TRANSPORT;
    for (e = 0; e <= experts; e++) k->counts[e] = (size_t)low[e] + MOEI_COUNT_PART * (size_t)high[e];
    r.n_real = k->counts[experts];
    r.n_tokens = k->counts[experts];
    r.counts = k->counts;
    return moe_router_observe(&router, &pass->call, &r, state);
}

#endif

/* ---- networks ---- */

/* "module 3 (mixture): " */
static const char *moei_module_where(const moe_net *net, size_t i, char out[64]) {
    const char *name = moei_module_names[net->modules[i].kind];
    moei_text t;
    t.out = out;
    t.room = 64;
    t.length = 0;
    moei_put(&t, "module ", 7);
    moei_put_unsigned(&t, i);
    moei_put(&t, " (", 2);
    moei_put(&t, name, moei_strlen(name));
    moei_put(&t, "): ", 3);
    return out;
}

/* The kernels as a setting of training: with different kernels the replicated tensors would
   diverge. */
static uint64_t moei_kernels_word(const moe_kernels *kernels, int trainable) {
    return trainable ? (uint64_t)(int64_t)moei_table(kernels)->id : 0;
}

static moe_status moei_module_agree(const moe_net *net, size_t i, moe_error *error) {
    static const char *const names[] = {"the kind of module", "the width"};
    const moe_module *m = &net->modules[i];
    moe_module scratch = *m;
    char where[64];
    uint64_t values[2];
    moe_status status;
    (void)moei_module_where(net, i, where);
    values[0] = (uint64_t)m->kind;
    values[1] = (uint64_t)m->d_out;
    status = moei_compare_named(net->transport, 2, names, values, where, error);
    if (status != MOE_OK) return status;
    return moei_compare_fields(net->transport, moei_module_fields[m->kind], moei_module_settings(m),
                               moei_module_settings(&scratch), where, error);
}

static moe_status moei_ranks_net_agree(const moe_net *net, int trainable, uint64_t seed, moe_error *error) {
    static const char *const names[] = {"d_in", "the number of modules", "trainable", "seed",
                                        "kernels (auto selects the best of each machine)"};
    uint64_t values[5];
    size_t i;
    moe_status status;
    values[0] = (uint64_t)net->d_in;
    values[1] = net->n_modules;
    values[2] = trainable != 0;
    values[3] = seed;
    values[4] = moei_kernels_word(net->kernels, trainable);
    status = moei_compare_named(net->transport, 5, names, values, "the network: ", error);
    for (i = 0; i < net->n_modules && status == MOE_OK; i++) status = moei_module_agree(net, i, error);
    return status;
}

/* The words that ranks exchange at the start of a pass. */
enum {
    MOEI_PASS_STATUS = 0,
    MOEI_PASS_TOKENS,
    MOEI_PASS_TRAINING,
    MOEI_PASS_RNG,
    MOEI_PASS_WORDS
};

/* Checks that all ranks train or none does, and that all draw the same random numbers. */
static moe_status moei_ranks_net_meet(const moe_net *net, const moe_call *call, size_t work_size, moe_status status,
                                      moei_tokens *tokens) {
    moei_extent e;
    const moe_transport *t = net->transport;
    const uint64_t *all = NULL;
    uint64_t own[MOEI_PASS_WORDS] = {0};
    moe_error *error = call != NULL ? call->error : NULL;
    size_t r;
    if (status == MOE_OK) {
        own[MOEI_PASS_TOKENS] = call->n_tokens;
        own[MOEI_PASS_TRAINING] = call->training != 0;
        own[MOEI_PASS_RNG] = call->training && call->rng != NULL ? call->rng->state : 0;
    }
    status = moei_gather_status(t, status, MOEI_PASS_WORDS, own, &all, error);
    if (status != MOE_OK) return status;
    for (r = 1; r < t->batch.total; r++) {
        const uint64_t *other = all + r * MOEI_PASS_WORDS;
        if (other[MOEI_PASS_TRAINING] != all[MOEI_PASS_TRAINING] || other[MOEI_PASS_RNG] != all[MOEI_PASS_RNG])
            return moei_error(error, MOE_ERR_STATE, "call.training or call.rng: rank %z differs from rank 0", r);
    }
    status = moei_tokens_of(t, all + MOEI_PASS_TOKENS, MOEI_PASS_WORDS, tokens);
    if (status != MOE_OK) return moei_error(error, status, "n_tokens of all ranks: too many");
    e = moei_extent_of(tokens->most, moei_keeps(call));
    return moei_vote(t, moei_net_fits(net, call, &e, work_size), error);
}

/* ---- training ---- */

#ifndef MOE_NO_TRAIN

/* Checks that all ranks have the same samples, which they split. data NULL: no samples. */
static moe_status moei_ranks_data_agree(const moe_net *net, const moe_data *data, int criterion, const char *where,
                                        moe_error *error) {
    static const char *const names[] = {"criterion", "n", "length", "x", "token_ids", "labels", "targets"};
    uint64_t values[7] = {0};
    size_t n = data != NULL ? data->n : 0;
    int squared = moei_is_squared(criterion);
    values[0] = (uint64_t)criterion;
    values[1] = n;
    values[2] = data != NULL ? data->length : 0;
    if (n > 0 && net->d_in > 0) values[3] = moei_hash(0, data->x, n * (size_t)net->d_in * sizeof(moe_real));
    if (n > 0 && data->token_ids != NULL) values[4] = moei_hash(0, data->token_ids, n * sizeof(int32_t));
    if (n > 0 && !squared) values[5] = moei_hash(0, data->labels, n * sizeof(int32_t));
    if (n > 0 && squared) values[6] = moei_hash(0, data->targets, n * (size_t)net->d_out * sizeof(moe_real));
    return moei_compare_named(net->transport, 7, names, values, where, error);
}

static moe_status moei_group_agree(const moe_net *net, const moe_train_config *c, int g, moe_error *error) {
    static const char *const names[] = {"the pattern"};
    moe_param_group scratch = c->groups[g];
    uint64_t pattern = moei_hash(0, scratch.pattern, moei_strlen(scratch.pattern));
    char where[40];
    moei_text text;
    moe_status status;
    text.out = where;
    text.room = sizeof where;
    text.length = 0;
    moei_put(&text, "groups[", 7);
    moei_put_integer(&text, g);
    moei_put(&text, "]: ", 3);
    status = moei_compare_named(net->transport, 1, names, &pattern, where, error);
    if (status != MOE_OK) return status;
    return moei_compare_fields(net->transport, moei_group_fields, &c->groups[g], &scratch, where, error);
}

static moe_status moei_ranks_train_agree(const moe_net *net, const moe_train_config *c, moe_error *error) {
    static const char *const names[] = {"seed", "checkpoint (a file, or none)"};
    moe_train_config scratch = *c;
    uint64_t values[2];
    int g;
    moe_status status = moei_compare_fields(net->transport, moei_train_fields, c, &scratch, "training: ", error);
    values[0] = c->seed;
    values[1] = c->checkpoint != NULL;
    if (status == MOE_OK) status = moei_compare_named(net->transport, 2, names, values, "training: ", error);
    for (g = 0; g < c->n_groups && status == MOE_OK; g++) status = moei_group_agree(net, c, g, error);
    return status;
}

/* A hash of the state that must be the same on all ranks between two batches; otherwise they would
   silently diverge. */
static uint64_t moei_trainer_mark(const moe_trainer *t) {
    uint64_t mark = moei_hash(t->steps, &t->rng.state, sizeof t->rng.state);
    size_t i;
    mark = moei_hash(mark, &t->rate, sizeof t->rate);
    mark = moei_hash(mark, &t->n_accumulated, sizeof t->n_accumulated);
    for (i = 0; i < t->net->n_tensors; i++) {
        unsigned char trained = (unsigned char)moei_is_trained(&t->net->tensors[i]);
        mark = moei_hash(mark, &trained, 1);
    }
    return mark;
}

/* The words that ranks exchange before a batch and before a step of the optimizer. */
enum {
    MOEI_TRAINER_STATUS = 0,
    MOEI_TRAINER_MARK,
    MOEI_TRAINER_SAMPLES,
    MOEI_TRAINER_COUNTED,
    MOEI_TRAINER_WORDS
};

/* Checks that a batch or a step may begin, and gathers what all ranks contribute to it. */
static moe_status moei_ranks_train_meet(const moe_trainer *trainer, moe_status status, moei_brought *b,
                                        moe_error *error) {
    const moe_transport *t = trainer->net->transport;
    uint64_t own[MOEI_TRAINER_WORDS] = {0};
    const uint64_t *all = NULL;
    size_t r;
    own[MOEI_TRAINER_MARK] = moei_trainer_mark(trainer);
    own[MOEI_TRAINER_SAMPLES] = b->tokens.total;
    own[MOEI_TRAINER_COUNTED] = b->counted;
    status = moei_gather_status(t, status, MOEI_TRAINER_WORDS, own, &all, error);
    if (status != MOE_OK) return status;
    for (r = 1; r < t->batch.total; r++)
        if (all[r * MOEI_TRAINER_WORDS + MOEI_TRAINER_MARK] != all[MOEI_TRAINER_MARK])
            return moei_error(error, MOE_ERR_STATE,
                              "rank %z is out of step with rank 0: its steps, batches since the last one, "
                              "learning rate, random state or frozen tensors differ",
                              r);
    status = moei_tokens_of(t, all + MOEI_TRAINER_SAMPLES, MOEI_TRAINER_WORDS, &b->tokens);
    if (status != MOE_OK) return moei_error(error, status, "the samples of all ranks: %s", moe_status_text(status));
    for (r = 0, b->counted = 0; r < t->batch.total; r++)
        b->counted += (size_t)all[r * MOEI_TRAINER_WORDS + MOEI_TRAINER_COUNTED];
    return MOE_OK;
}

#ifndef MOEI_SUM_MOST
#define MOEI_SUM_MOST 16777216 /* values in one call of sum */
#endif

/* Sums n gradients over all ranks. */
static moe_status moei_sum_gradients(const moe_transport *t, moe_real *values, size_t n) {
    size_t part;
    for (; n > 0; values += part, n -= part) {
        part = n < MOEI_SUM_MOST ? n : (size_t)MOEI_SUM_MOST;
        if (t->sum(t->ctx, part, values) != MOE_OK) return MOE_ERR_TRANSPORT;
    }
    return MOE_OK;
}

/* Sums the gradients of the replicated tensors; runs of them between expert tensors in one call. */
static moe_status moei_ranks_reduce(const moe_trainer *trainer, moe_error *error) {
    const moe_net *net = trainer->net;
    size_t i, n = 0;
    moe_real *from = NULL;
    moe_status status = MOE_OK;
    for (i = 0; i < net->n_tensors && status == MOE_OK; i++) {
        const moe_tensor *t = &net->tensors[i];
        if (moei_parted(net, t) == 0) {
            if (n == 0) from = t->gradient;
            n += t->count;
            continue;
        }
        status = moei_sum_gradients(net->transport, from, n);
        n = 0;
    }
    if (status == MOE_OK) status = moei_sum_gradients(net->transport, from, n);
    return status == MOE_OK ? status : moei_error(error, status, "the transport's sum of gradients failed");
}

#endif

/* ---- files ---- */

#ifndef MOE_NO_TRAIN

/* Moves n values of rank r to rank 0. */
static moe_status moei_fetch_piece(const moe_transport *t, int r, const moe_real *own, size_t n, moe_real *piece) {
    size_t *counts = (size_t *)(void *)t->memory; /* the last all-gather has been read */
    size_t *zeros = counts + t->n_ranks;
    moe_exchange e;
    memset(&e, 0, sizeof e);
    memset(counts, 0, 2 * (size_t)t->n_ranks * sizeof *counts);
    if (t->rank == 0) counts[r] = n;
    else if (t->rank == r) counts[0] = n;
    e.row_bytes = sizeof(moe_real);
    e.send = own;
    e.send_counts = t->rank == r ? counts : zeros;
    e.send_at = zeros;
    e.receive = piece;
    e.receive_counts = t->rank == 0 ? counts : zeros;
    e.receive_at = zeros;
    if (t->traffic != NULL && t->traffic->bytes != NULL && t->rank == r) t->traffic->bytes[0] += n * sizeof(moe_real);
    return t->rows(t->ctx, MOEI_EXCHANGE_NOW, &e) == MOE_OK ? MOE_OK : MOE_ERR_TRANSPORT;
}

/* Writes a tensor of `experts` experts; data [tensor->count] is this rank's part. */
static moe_status moei_ranks_write(const moei_writing *w, moe_status status, size_t experts, const moe_tensor *tensor,
                                   const moe_real *data, moe_error *error) {
    const moe_transport *t = w->net->transport;
    size_t row = tensor->count / tensor->shape[0], at, n, first, count;
    int r;
    for (r = 0; r < t->n_ranks; r++) {
        moe_rank_part(experts, r, t->n_ranks, &first, &count);
        for (at = 0; at < count * row; at += n) {
            const moe_real *piece = r > 0 ? w->piece : data + at;
            n = count * row - at < MOEI_PIECE ? count * row - at : (size_t)MOEI_PIECE;
            if (r > 0 && moei_fetch_piece(t, r, t->rank == r ? data + at : NULL, n, w->piece) != MOE_OK)
                return moei_error(error, MOE_ERR_TRANSPORT, "%s: the transport's exchange of rows failed",
                                  tensor->name);
            if (t->rank > 0 || status != MOE_OK) continue;
            status = moei_write_reals(w->stream, piece, n, error);
        }
    }
    return moei_ranks_add(&t->batch, status, 0, NULL, error);
}

#endif

#ifndef MOE_NO_STDIO

static moe_status moei_contents_read(moei_contents *c, size_t at, void *to, size_t size, moe_error *error) {
    FILE *f = (FILE *)c->disk;
    size_t done = 0, got = 1;
    int good;
    errno = 0;
    good = moei_disk_seek(f, (uint64_t)at);
    for (; good && done < size && got > 0; done += got) got = fread((unsigned char *)to + done, 1, size - done, f);
    if (good && done == size) return MOE_OK;
    if (good && !ferror(f))
        return moei_error(error, MOE_ERR_FORMAT, "%s: the file was truncated: it ends before byte %z", c->path,
                          at + size);
    return moei_file_failed(error, "cannot read", c->path, errno);
}

/* Reads and checks the header of the file. */
static moe_status moei_contents_header(moei_contents *c, moe_error *error) {
    unsigned char first[8];
    uint64_t size, length;
    moe_status status;
    errno = 0;
    if (!moei_disk_size((FILE *)c->disk, &size)) return moei_file_failed(error, "cannot read", c->path, errno);
    if (size < 8) return moei_error(error, MOE_ERR_FORMAT, "%s: the file has fewer than 8 bytes", c->path);
    if (size > (uint64_t)(size_t)-1 / 2)
        return moei_error(error, MOE_ERR_OVERFLOW, "%s: the file size exceeds size_t", c->path);
    status = moei_contents_read(c, 0, first, sizeof first, error);
    if (status != MOE_OK) return status;
    length = moei_load(first, 8);
    if (length > MOEI_FILE_MAX_HEADER || length > size - 8)
        return moei_error(error, MOE_ERR_FORMAT,
                          "%s: not a safetensors file, or one cut short: its header is longer than the rest",
                          c->path);
    status = moei_buffer_reserve(&c->bytes, 8 + (size_t)length);
    if (status != MOE_OK) return moei_error(error, status, "no memory for a header of %z bytes", (size_t)length);
    c->bytes.size = 8 + (size_t)length;
    status = moei_contents_read(c, 0, c->bytes.data, c->bytes.size, error);
    return status == MOE_OK ? moei_file_check(&c->file, c->bytes.data, (size_t)size, 1, error) : status;
}

/* Opens a file of which each rank reads its part. */
static moe_status moei_ranks_open(const moe_batch *group, moei_contents *c, const char *path, moe_error *error) {
    int reason;
    (void)group;
    if (path == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "path is NULL");
    if (moei_allocator_check(&c->allocator, error) != MOE_OK) return MOE_ERR_ARGUMENT;
    c->disk = moei_file_open(path, &reason);
    if (c->disk == NULL) return moei_file_failed(error, "cannot open", path, reason);
    c->read = moei_contents_read;
    return moei_contents_header(c, error);
}

#endif

/* Checks that all ranks read the same file with the same settings, by its length and the data that
   all of them need, and verifies the checksums of what they have read in parts. */
static moe_status moei_ranks_file_agree(const moe_batch *group, const moei_contents *c, int trainable,
                                        const moe_kernels *kernels, moe_error *error) {
    static const char *const names[] = {"its length", "its contents", "trainable",
                                        "kernels (auto selects the best of each machine)"};
    const moe_transport *t = (const moe_transport *)(const void *)group;
    const uint64_t *all;
    uint64_t values[4], damage = c->damage;
    moe_status status;
    int r;
    values[0] = c->file.size;
    values[1] = c->read != NULL ? c->mark : moei_hash(0, c->file.bytes, c->file.size);
    values[2] = trainable != 0;
    values[3] = moei_kernels_word(kernels, trainable);
    status = moei_compare_named(t, 4, names, values, "the file: ", error);
    if (status != MOE_OK) return status;
    if (moei_all_gather(t, 1, &damage, &all) != MOE_OK)
        return moei_error(error, MOE_ERR_TRANSPORT, "the transport's exchange of counts failed");
    for (r = 0, damage = 0; r < t->n_ranks; r++) damage ^= all[r];
    if (damage == 0) return MOE_OK;
    return moei_error(error, MOE_ERR_FORMAT,
                      "a tensor of experts, or one of the trainer, is damaged: the CRC-32 of its parts on all ranks "
                      "does not match the saved one (metadata " MOEI_SUMS_KEY ")");
}

moe_status moe_layer_read_part(moe_layer *layer, const void *bytes, size_t size, int trainable, int kernels,
                               const moe_transport *transport, const moe_allocator *allocator, moe_error *error) {
    const moei_net_options options = {kernels, allocator, transport, trainable};
    moei_contents c;
    const moe_status status = moei_contents_memory(&c, bytes, size, allocator, error);
    return moei_object_read(1, layer, &c, status, &options, error);
}

moe_status moe_net_read_part(moe_net *net, const void *bytes, size_t size, int trainable, int kernels,
                             const moe_transport *transport, const moe_allocator *allocator, moe_error *error) {
    const moei_net_options options = {kernels, allocator, transport, trainable};
    moei_contents c;
    const moe_status status = moei_contents_memory(&c, bytes, size, allocator, error);
    return moei_object_read(0, net, &c, status, &options, error);
}

#ifndef MOE_NO_STDIO

moe_status moe_layer_load_part(moe_layer *layer, const char *path, int trainable, int kernels,
                               const moe_transport *transport, const moe_allocator *allocator, moe_error *error) {
    const moei_net_options options = {kernels, allocator, transport, trainable};
    moei_contents c;
    moe_status status = moei_contents_file(&c, path, transport, allocator, error);
    status = moei_object_read(1, layer, &c, status, &options, error);
    moei_contents_close(&c);
    return status;
}

moe_status moe_net_load_part(moe_net *net, const char *path, int trainable, int kernels,
                             const moe_transport *transport, const moe_allocator *allocator, moe_error *error) {
    const moei_net_options options = {kernels, allocator, transport, trainable};
    moei_contents c;
    moe_status status = moei_contents_file(&c, path, transport, allocator, error);
    status = moei_object_read(0, net, &c, status, &options, error);
    moei_contents_close(&c);
    return status;
}

#endif

/* ---- the transport ---- */

static const struct moei_hooks moei_ranks_hooks = {
    moei_ranks_check,    moei_ranks_layer_agree, moei_ranks_size, moei_ranks_forward, moei_ranks_net_agree,
    moei_ranks_net_meet, moei_ranks_add,         moei_ranks_file_agree,
#ifndef MOE_NO_STDIO
    moei_ranks_open,
#endif
#ifndef MOE_NO_TRAIN
    moei_ranks_backward, moei_ranks_observe,     moei_ranks_data_agree, moei_ranks_train_agree,
    moei_ranks_train_meet, moei_ranks_reduce,    moei_ranks_write,
#endif
};

/* The checks of fields without which a rank cannot communicate. */
static moe_status moei_transport_can_gather(const moe_transport *t, moe_error *error) {
    const char *missing = t->counts == NULL ? "counts" : t->rows == NULL ? "rows" : t->sum == NULL ? "sum" : NULL;
    if (missing != NULL) return moei_error(error, MOE_ERR_ARGUMENT, "transport: %s must not be NULL", missing);
    if (t->n_ranks < 1 || t->n_ranks > MOE_MAX_EXPERTS)
        return moei_error(error, MOE_ERR_CONFIG, "n_ranks = %d: must be 1 to %d", t->n_ranks, (int)MOE_MAX_EXPERTS);
    if (t->rank < 0 || t->rank >= t->n_ranks)
        return moei_error(error, MOE_ERR_CONFIG, "rank = %d: must be 0 to n_ranks - 1 = %d", t->rank, t->n_ranks - 1);
    return moei_allocator_check(t->allocator, error);
}

static moe_status moei_transport_check(const moe_transport *t, moe_error *error) {
    int each = t->ranks_per_machine;
    if (each < 0 || (each > 0 && t->n_ranks % each != 0))
        return moei_error(error, MOE_ERR_CONFIG, "ranks_per_machine = %d: must divide n_ranks = %d", each, t->n_ranks);
    if (t->local_routing != 0 && t->local_routing != 1)
        return moei_error(error, MOE_ERR_CONFIG, "local_routing = %d: must be 0 or 1", t->local_routing);
    if (t->two_level != 0 && t->two_level != 1)
        return moei_error(error, MOE_ERR_CONFIG, "two_level = %d: must be 0 or 1", t->two_level);
    if (t->chunks < 0 || t->chunks > MOE_MAX_EXPERTS)
        return moei_error(error, MOE_ERR_CONFIG, "chunks = %d: must be 0 to %d", t->chunks, (int)MOE_MAX_EXPERTS);
    return MOE_OK;
}

/* Checks that all ranks have set up the same transport; made has memory and defaults. */
static moe_status moei_transport_compare(const moe_transport *made, moe_status status, moe_error *error) {
    static const char *const names[] = {"version of moe", "size of moe_real", "n_ranks",      "ranks_per_machine",
                                        "two_level",      "chunks",           "local_routing"};
    uint64_t values[7], word = moei_status_word(status);
    const uint64_t *all;
    moei_difference d;
    if (moei_all_gather(made, 1, &word, &all) != MOE_OK)
        return moei_error(error, MOE_ERR_TRANSPORT, "the transport's exchange of counts failed");
    status = moei_status_of_all(made, status, all, 1, error);
    if (status != MOE_OK) return status;
    values[0] = MOE_VERSION_MAJOR * 1000000 + MOE_VERSION_MINOR * 1000 + MOE_VERSION_PATCH;
    values[1] = sizeof(moe_real);
    values[2] = (uint64_t)made->n_ranks;
    values[3] = (uint64_t)made->ranks_per_machine;
    values[4] = (uint64_t)made->two_level;
    values[5] = (uint64_t)made->chunks;
    values[6] = (uint64_t)made->local_routing;
    status = moei_compare(made, 7, values, &d);
    if (status == MOE_OK) return status;
    if (status == MOE_ERR_TRANSPORT) return moei_error(error, status, "the transport's exchange of counts failed");
    return moei_error(error, status, "%s = %z: rank %d has %z; all ranks must have the same", names[d.i],
                      (size_t)values[d.i], d.rank, (size_t)d.theirs);
}

static moe_allocator moei_transport_allocator(const moe_transport *t) {
    moe_allocator none;
    memset(&none, 0, sizeof none);
    return t->allocator != NULL ? *t->allocator : none;
}

moe_status moe_transport_begin(moe_transport *transport, moe_error *error) {
    moe_transport made;
    moe_allocator allocator;
    moe_status status;
    if (transport == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "transport must not be NULL");
    status = moei_transport_can_gather(transport, error);
    if (status != MOE_OK) return status;
    made = *transport;
    allocator = moei_transport_allocator(transport);
    if (made.ranks_per_machine == 0) made.ranks_per_machine = made.n_ranks;
    if (made.chunks == 0) made.chunks = 1;
    made.memory_size = 2 * MOEI_WORDS * (size_t)made.n_ranks * sizeof(uint64_t);
    made.memory = (uint64_t *)moei_alloc(&allocator, made.memory_size, 1);
    if (made.memory == NULL)
        return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of the transport", made.memory_size);
    status = moei_transport_compare(&made, moei_transport_check(transport, error), error);
    if (status != MOE_OK) {
        moei_free(&allocator, made.memory, made.memory_size);
        return status;
    }
    memset(&made.batch, 0, sizeof made.batch);
    made.batch.first = (size_t)made.rank;
    made.batch.total = (size_t)made.n_ranks;
    made.batch.lead = made.rank == 0;
    made.batch.hooks = &moei_ranks_hooks;
    *transport = made;
    return MOE_OK;
}

void moe_transport_end(moe_transport *transport) {
    moe_allocator allocator;
    if (transport == NULL) return;
    allocator = moei_transport_allocator(transport);
    if (transport->memory != NULL) moei_free(&allocator, transport->memory, transport->memory_size);
    transport->memory = NULL;
    transport->memory_size = 0;
    transport->batch.hooks = NULL;
}

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_FLOAT */
#endif /* MOE_IMPLEMENTATION */
