/* moe_mpi.h - an MPI transport for moe_ranks.h - an extra of moe, included after moe_ranks.h.

   Implements the three functions of a moe_transport with non-blocking collective calls of MPI 3,
   measures their time, and has a timeout that names the ranks that do not answer.

   Contents: search for
     >>recipe   >>program   >>options   >>manual
     >>functions  moe_mpi; moe_mpi_open, moe_mpi_transport, moe_mpi_close
     >>code       the implementation: waiting, the three functions, open and close

   >>recipe
     In the one source file that defines MOE_IMPLEMENTATION, and wherever you call these functions:
       #include "moe.h"
       #include "examples/extras/moe_ranks.h"
       #include "examples/extras/moe_mpi.h"
     Compile and link with mpicc or mpicxx, -lm; run with mpirun -n R.

   >>program: every rank trains on its own samples; rank 0 writes one file with all experts.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "examples/extras/moe_ranks.h"
 * #include "examples/extras/moe_mpi.h"
 * #include <stdio.h>
 *
 * static int fail(const char *why) {
 *     fprintf(stderr, "%s\n", why);
 *     return MPI_Abort(MPI_COMM_WORLD, 1);
 * }
 *
 * int main(void) {
 *     static moe_real x[64 * 4], y[64 * 4];
 *     moe_mpi mpi;
 *     moe_transport transport;
 *     moe_layer_config config = {0}; // C++: {}
 *     moe_train_config training = {0};
 *     moe_data batch = {0};
 *     moe_step step = {0};
 *     moe_net net;
 *     moe_trainer trainer;
 *     moe_error error;
 *     int i;
 *     MPI_Init(NULL, NULL);
 *     if (moe_mpi_open(&mpi, MPI_COMM_WORLD, 30)) return fail(mpi.error);
 *     transport = moe_mpi_transport(&mpi); // set chunks, two_level, ... here
 *     if (moe_transport_begin(&transport, &error)) return fail(error.message);
 *     for (i = 0; i < 64 * 4; i++) {
 *         x[i] = (moe_real)((i * 37 + transport.rank * 11) % 64 - 32) / 32;
 *         y[i] = 2 * x[i];
 *     }
 *     batch.n = 64;
 *     batch.x = x;
 *     batch.targets = y;
 *     training.criterion = MOE_CRITERION_SQUARED_ERROR;
 *     training.batch = 64;
 *     moe_net_init(&net, 4, MOE_KERNELS_AUTO, NULL);
 *     net.transport = &transport; // before the modules
 *     moe_net_mixture(&net, &config);
 *     if (moe_net_build(&net, 1, 42, &error)) return fail(error.message);
 *     if (moe_trainer_init(&trainer, &net, &training, &error)) return fail(error.message);
 *     for (i = 0; i < 500; i++)
 *         if (moe_trainer_step(&trainer, &batch, &step, &error)) return fail(error.message);
 *     if (moe_net_save(&net, "doubles.safetensors", &error)) return fail(error.message);
 *     printf("rank %d of %d: loss %.3f\n", transport.rank, transport.n_ranks, (double)step.loss);
 *     moe_trainer_free(&trainer);
 *     moe_net_free(&net);
 *     moe_transport_end(&transport);
 *     moe_mpi_close(&mpi);
 *     return MPI_Finalize();
 * }
 * --- end ---

   >>options
     None of its own. MOE_NO_FLOAT leaves out everything. In the double build each public name
     carries the suffix _f64, as in moe.h. With _POSIX_C_SOURCE >= 199309L a waiting rank sleeps
     between polls; without it the rank keeps its processor busy.

   >>manual
     Errors.  MOE_ERR_TRANSPORT from any call: print mpi.error if it is not empty, then MPI_Abort.

     Timeout.  Ranks wait by polling. A rank that has waited for too long queries all others. Those
     that are waiting as well answer; those that are dead, hang or compute do not, and mpi.error
     names them. The time counts from the beginning of a wait, so the timeout must be longer than
     the longest computation between two exchanges.

     Sums.  Contributions of ranks are added in the order of ranks: a sum has the same bits on all
     ranks and with any MPI. For up to 512 values every rank gets all contributions; for more, rank
     r sums part r and sends it to all.
*/
#ifndef MOE_RANKS_H
#error "moe_mpi.h: include moe_ranks.h before it"
#endif

#ifndef MOE_MPI_H
#define MOE_MPI_H

#ifndef MOE_NO_FLOAT
#if MOE_REAL_IS_DOUBLE
#define moe_mpi_close moe_mpi_close_f64
#define moe_mpi_open moe_mpi_open_f64
#define moe_mpi_transport moe_mpi_transport_f64
#endif

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>functions ---- */

enum { MOEI_MPI_TYPES = 8 };

/* A communicator and the state of the transport. Read the times and error; set timed and
   timeout. */
typedef struct moe_mpi {
    MPI_Comm comm;       /* a duplicate of the caller's */
    int rank, n_ranks;
    double timeout;      /* longest wait in seconds; 0: no limit */
    int timed;           /* 1: a barrier at each exchange separates waiting from exchanging; 0: all
                            time counts as exchanging [1] */
    double waiting;      /* total seconds since open until the last rank had entered each exchange */
    double exchanging;   /* total seconds from then until all data had arrived */
    uint64_t *sum_bytes; /* [n_ranks] bytes sent to each rank for sums; moe_traffic has the rest */
    uint64_t calls;      /* number of calls of MPI's collective functions but barriers */
    char error[400];     /* a description of the failure, or "" */
    /* Private. The last request of each array is for counts and sums, the others for the
       channels. */
    int doing; /* MOEI_MPI_ */
    MPI_Request work[MOE_EXCHANGES + 1], barrier[MOE_EXCHANGES + 1];
    int *numbers; /* [MOE_EXCHANGES+1][4][n_ranks] counts and offsets of an exchange */
    MPI_Datatype type[MOEI_MPI_TYPES];
    size_t type_bytes[MOEI_MPI_TYPES]; /* 0: no type */
    int next_type;
    moe_real *room; /* [room_size] for sums */
    size_t room_size;
} moe_mpi;

/* Call it after MPI_Init. comm: the ranks that take part. timeout: seconds after which a wait is an
   error, 0: never. Collective. MOE_ERR_MEMORY, MOE_ERR_TRANSPORT: m->error says why; call
   moe_mpi_close after an error, too. */
MOE_API moe_status moe_mpi_open(moe_mpi *m, MPI_Comm comm, double timeout);
/* A transport for moe_transport_begin. It points to *m, which must stay at its address. */
MOE_API moe_transport moe_mpi_transport(moe_mpi *m);
/* Call it before MPI_Finalize, with no exchange in flight. Collective. */
MOE_API void moe_mpi_close(moe_mpi *m);

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_FLOAT */
#endif /* MOE_MPI_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_MPI_IMPLEMENTED)
#define MOEI_MPI_IMPLEMENTED
#ifndef MOE_NO_FLOAT

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>code ================================================================================== */

enum {
    MOEI_MPI_ASK = 1, /* tags */
    MOEI_MPI_ANSWER = 2,
    MOEI_MPI_FEW = 512,         /* up to this many values are summed by an all-gather */
    MOEI_MPI_LONGEST = 1 << 27, /* at most this many values are summed at a time */
    MOEI_MPI_OTHER = MOE_EXCHANGES /* the channel of counts and sums */
};

/* What a rank is doing. */
enum {
    MOEI_MPI_NOTHING = 0,
    MOEI_MPI_COUNTS,
    MOEI_MPI_ROWS,
    MOEI_MPI_SUM
};

static const char *moei_mpi_name(int doing) {
    static const char *const names[] = {"no exchange", "an exchange of counts", "an exchange of rows", "a sum"};
    return names[doing >= 0 && doing <= MOEI_MPI_SUM ? doing : 0];
}

static moe_status moei_mpi_refuse(moe_mpi *m, const char *what) {
    snprintf(m->error, sizeof m->error, "rank %d: %s: %s", m->rank, moei_mpi_name(m->doing), what);
    return MOE_ERR_TRANSPORT;
}

/* MOE_OK, or MOE_ERR_TRANSPORT with MPI's message in m->error. */
static moe_status moei_mpi_check(moe_mpi *m, int result) {
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    if (result == MPI_SUCCESS) return MOE_OK;
    MPI_Error_string(result, text, &length);
    return moei_mpi_refuse(m, text);
}

/* ---- waiting ---- */

/* What the other ranks are doing, as far as they have answered. */
typedef struct moei_mpi_position {
    uint64_t calls, doing;
    int answered;
} moei_mpi_position;

/* Answers queries of other ranks and stores received answers in places [n_ranks] (NULL: discards
   them). */
static void moei_mpi_talk(moe_mpi *m, moei_mpi_position *places) {
    MPI_Status status;
    int there = 0;
    uint64_t words[2];
    char byte;
    while (MPI_Iprobe(MPI_ANY_SOURCE, MOEI_MPI_ASK, m->comm, &there, &status) == MPI_SUCCESS && there) {
        int from = status.MPI_SOURCE;
        if (MPI_Recv(&byte, 1, MPI_CHAR, from, MOEI_MPI_ASK, m->comm, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
        words[0] = m->calls;
        words[1] = (uint64_t)m->doing;
        if (MPI_Send(words, 2, MPI_UINT64_T, from, MOEI_MPI_ANSWER, m->comm) != MPI_SUCCESS) return; /* never blocks */
    }
    if (places == NULL) return;
    there = 0;
    while (MPI_Iprobe(MPI_ANY_SOURCE, MOEI_MPI_ANSWER, m->comm, &there, &status) == MPI_SUCCESS && there) {
        int from = status.MPI_SOURCE;
        if (MPI_Recv(words, 2, MPI_UINT64_T, from, MOEI_MPI_ANSWER, m->comm, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
        places[from].calls = words[0];
        places[from].doing = words[1];
        places[from].answered = 1;
    }
}

static void moei_mpi_pause(double seconds) {
#if defined _POSIX_C_SOURCE && _POSIX_C_SOURCE >= 199309L
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = (long)(seconds * 1e9);
    nanosleep(&t, NULL);
#else
    (void)seconds; /* MPI_Test yields the processor where there are more ranks than processors */
#endif
}

static int moei_mpi_is_elsewhere(const moe_mpi *m, const moei_mpi_position *p) {
    return p->calls != m->calls || p->doing != (uint64_t)m->doing;
}

/* Writes to m->error which ranks do not answer, or else which are in another call. */
static void moei_mpi_blame(moe_mpi *m, const moei_mpi_position *places, double waited) {
    size_t used, silent = 0, elsewhere = 0;
    int r;
    const char *why = "all ranks wait in the same call: a message was lost";
    for (r = 0; r < m->n_ranks; r++) {
        if (r == m->rank) continue;
        if (!places[r].answered) silent++;
        else if (moei_mpi_is_elsewhere(m, &places[r])) elsewhere++;
    }
    if (silent > 0) why = "it is dead, hangs, or computes for longer than the timeout";
    else if (elsewhere > 0) why = "the ranks do not make the same calls";
    used = (size_t)snprintf(m->error, sizeof m->error, "rank %d has waited %.1f s in %s, call %.0f; ", m->rank, waited,
                            moei_mpi_name(m->doing), (double)m->calls);
    for (r = 0; r < m->n_ranks && used < sizeof m->error - 100; r++) {
        const moei_mpi_position *p = &places[r];
        char *at = m->error + used;
        size_t left = sizeof m->error - used;
        if (r == m->rank) continue;
        if (!p->answered) used += (size_t)snprintf(at, left, "rank %d does not answer; ", r);
        else if (silent == 0 && moei_mpi_is_elsewhere(m, p))
            used += (size_t)snprintf(at, left, "rank %d waits in %s, its call %.0f; ", r, moei_mpi_name((int)p->doing),
                                     (double)p->calls);
    }
    snprintf(m->error + used, sizeof m->error - used, "%s", why);
}

/* After a timeout: queries all ranks. */
static moe_status moei_mpi_lost(moe_mpi *m, double waited) {
    moei_mpi_position *places = (moei_mpi_position *)calloc((size_t)m->n_ranks, sizeof *places);
    double began = MPI_Wtime(), most = m->timeout / 4 < 5 ? m->timeout / 4 + 0.5 : 5;
    char byte = 0;
    int r;
    if (places == NULL) return moei_mpi_refuse(m, "another rank does not answer");
    for (r = 0; r < m->n_ranks; r++)
        if (r != m->rank) (void)MPI_Send(&byte, 1, MPI_CHAR, r, MOEI_MPI_ASK, m->comm); /* never blocks */
    while (MPI_Wtime() - began < most) {
        moei_mpi_talk(m, places);
        moei_mpi_pause(0.001);
    }
    moei_mpi_blame(m, places, waited);
    free(places);
    return MOE_ERR_TRANSPORT;
}

/* Waits until a request is done. */
static moe_status moei_mpi_wait(moe_mpi *m, MPI_Request *request) {
    double began = MPI_Wtime(), waited;
    moe_status status = MOE_OK;
    int done = 0;
    for (;;) {
        status = moei_mpi_check(m, MPI_Test(request, &done, MPI_STATUS_IGNORE));
        if (status != MOE_OK || done) return status;
        waited = MPI_Wtime() - began;
        if (waited < 0.0005) continue;
        moei_mpi_pause(waited < 0.02 ? 0.00005 : 0.0002); /* the other rank may need the processor */
        moei_mpi_talk(m, NULL);
        if (m->timeout > 0 && waited > m->timeout) return moei_mpi_lost(m, waited);
    }
}

/* Begins a collective call on a channel by starting its barrier. */
static moe_status moei_mpi_start(moe_mpi *m, int doing, int channel) {
    m->calls++;
    m->doing = doing;
    return m->timed ? moei_mpi_check(m, MPI_Ibarrier(m->comm, &m->barrier[channel])) : MOE_OK;
}

/* Ends a collective call and adds up its time. */
static moe_status moei_mpi_finish(moe_mpi *m, int channel) {
    double began = MPI_Wtime(), came = began;
    moe_status status = MOE_OK;
    if (m->timed) {
        status = moei_mpi_wait(m, &m->barrier[channel]);
        came = MPI_Wtime();
        m->waiting += came - began;
    }
    if (status == MOE_OK) status = moei_mpi_wait(m, &m->work[channel]);
    m->exchanging += MPI_Wtime() - came;
    return status;
}

/* ---- counts and rows ---- */

static moe_status moei_mpi_counts(void *ctx, size_t n, const uint64_t *send, uint64_t *receive) {
    moe_mpi *m = (moe_mpi *)ctx;
    MPI_Request *work = &m->work[MOEI_MPI_OTHER];
    moe_status status;
    if (m->n_ranks == 1) {
        memcpy(receive, send, n * sizeof *send);
        return MOE_OK;
    }
    status = moei_mpi_start(m, MOEI_MPI_COUNTS, MOEI_MPI_OTHER);
    if (n > INT_MAX) return moei_mpi_refuse(m, "more than 2^31 - 1 numbers for a rank");
    if (status == MOE_OK)
        status = moei_mpi_check(
            m, MPI_Ialltoall(send, (int)n, MPI_UINT64_T, receive, (int)n, MPI_UINT64_T, m->comm, work));
    if (status == MOE_OK) status = moei_mpi_finish(m, MOEI_MPI_OTHER);
    m->doing = MOEI_MPI_NOTHING;
    return status;
}

/* An MPI type of that many bytes: MPI counts in int, and there are far fewer rows than bytes. */
static moe_status moei_mpi_type(moe_mpi *m, size_t bytes, MPI_Datatype *type) {
    moe_status status = MOE_OK;
    int i;
    if (bytes == 0 || bytes > INT_MAX) return moei_mpi_refuse(m, "a row has no bytes, or more than 2^31 - 1");
    for (i = 0; i < MOEI_MPI_TYPES; i++)
        if (m->type_bytes[i] == bytes) {
            *type = m->type[i];
            return MOE_OK;
        }
    i = m->next_type;
    m->next_type = (i + 1) % MOEI_MPI_TYPES;
    if (m->type_bytes[i] != 0) status = moei_mpi_check(m, MPI_Type_free(&m->type[i])); /* exchanges in flight keep it */
    m->type_bytes[i] = 0;
    if (status == MOE_OK) status = moei_mpi_check(m, MPI_Type_contiguous((int)bytes, MPI_BYTE, &m->type[i]));
    if (status == MOE_OK) status = moei_mpi_check(m, MPI_Type_commit(&m->type[i]));
    if (status != MOE_OK) return status;
    m->type_bytes[i] = bytes;
    *type = m->type[i];
    return MOE_OK;
}

/* The counts and offsets of an exchange in MPI's form: numbers [4][n_ranks]. */
static moe_status moei_mpi_numbers(moe_mpi *m, const moe_exchange *x, int *numbers) {
    const size_t *from[4];
    int i, r;
    from[0] = x->send_counts;
    from[1] = x->send_at;
    from[2] = x->receive_counts;
    from[3] = x->receive_at;
    for (i = 0; i < 4; i++)
        for (r = 0; r < m->n_ranks; r++) {
            int unused = i % 2 == 1 && from[i - 1][r] == 0; /* the offset of no rows */
            if (!unused && from[i][r] > INT_MAX)
                return moei_mpi_refuse(m, "more than 2^31 - 1 rows in an exchange: use smaller batches or more chunks");
            numbers[i * m->n_ranks + r] = unused ? 0 : (int)from[i][r];
        }
    return MOE_OK;
}

static moe_status moei_mpi_begin_rows(moe_mpi *m, const moe_exchange *x) {
    int n = m->n_ranks, *numbers = m->numbers + (size_t)x->channel * 4 * (size_t)n;
    double began = MPI_Wtime();
    MPI_Datatype type = MPI_BYTE;
    moe_status status = moei_mpi_start(m, MOEI_MPI_ROWS, x->channel);
    if (status == MOE_OK) status = moei_mpi_numbers(m, x, numbers);
    if (status == MOE_OK) status = moei_mpi_type(m, x->row_bytes, &type);
    if (status == MOE_OK)
        status = moei_mpi_check(m, MPI_Ialltoallv(x->send, numbers, numbers + n, type, x->receive, numbers + 2 * n,
                                                  numbers + 3 * n, type, m->comm, &m->work[x->channel]));
    m->exchanging += MPI_Wtime() - began;
    return status;
}

/* Copies the rows that a rank sends to itself. */
static void moei_mpi_copy_rows(const moe_exchange *x) {
    const char *from = (const char *)x->send + x->send_at[0] * x->row_bytes;
    char *to = (char *)x->receive + x->receive_at[0] * x->row_bytes;
    if (x->send_counts[0] > 0) memcpy(to, from, x->send_counts[0] * x->row_bytes);
}

static moe_status moei_mpi_rows(void *ctx, int stage, const moe_exchange *x) {
    moe_mpi *m = (moe_mpi *)ctx;
    moe_status status = MOE_OK;
    if (m->n_ranks == 1) {
        if (stage & MOE_EXCHANGE_BEGIN) moei_mpi_copy_rows(x);
        return MOE_OK;
    }
    m->doing = MOEI_MPI_ROWS;
    if (x->channel < 0 || x->channel >= MOE_EXCHANGES) return moei_mpi_refuse(m, "there is no such channel");
    if (stage & MOE_EXCHANGE_BEGIN) status = moei_mpi_begin_rows(m, x);
    if (status == MOE_OK && (stage & MOE_EXCHANGE_END)) status = moei_mpi_finish(m, x->channel);
    m->doing = MOEI_MPI_NOTHING;
    return status;
}

/* ---- sums ---- */

/* Room for n values, or NULL. */
static moe_real *moei_mpi_room(moe_mpi *m, size_t n) {
    if (n > m->room_size) {
        free(m->room);
        m->room = n < SIZE_MAX / sizeof *m->room ? (moe_real *)malloc(n * sizeof *m->room) : NULL;
        m->room_size = m->room != NULL ? n : 0;
    }
    return m->room;
}

/* to [n] = the sum of the rows [n_ranks,n], rank 0 first. */
static void moei_mpi_add(const moe_mpi *m, size_t n, const moe_real *rows, moe_real *to) {
    size_t i;
    int r;
    for (i = 0; i < n; i++) to[i] = rows[i];
    for (r = 1; r < m->n_ranks; r++)
        for (i = 0; i < n; i++) to[i] += rows[(size_t)r * n + i];
}

/* A sum of few values: every rank gathers all contributions. */
static moe_status moei_mpi_sum_few(moe_mpi *m, size_t n, moe_real *values) {
    MPI_Request *work = &m->work[MOEI_MPI_OTHER];
    MPI_Datatype type = MPI_BYTE;
    moe_real *room = moei_mpi_room(m, n * (size_t)m->n_ranks);
    moe_status status;
    int r;
    if (room == NULL) return moei_mpi_refuse(m, "out of memory");
    status = moei_mpi_type(m, sizeof *values, &type);
    if (status == MOE_OK)
        status = moei_mpi_check(m, MPI_Iallgather(values, (int)n, type, room, (int)n, type, m->comm, work));
    if (status == MOE_OK) status = moei_mpi_finish(m, MOEI_MPI_OTHER);
    if (status == MOE_OK) moei_mpi_add(m, n, room, values);
    for (r = 0; r < m->n_ranks; r++)
        if (r != m->rank) m->sum_bytes[r] += n * sizeof *values;
    return status;
}

/* A sum of many values: rank r sums part r and sends it to all. */
static moe_status moei_mpi_sum_many(moe_mpi *m, size_t n, moe_real *values) {
    size_t ranks = (size_t)m->n_ranks, r;
    size_t own = n / ranks + ((size_t)m->rank < n % ranks), at = 0;
    int *counts = m->numbers + (size_t)MOEI_MPI_OTHER * 4 * ranks, *offsets = counts + ranks;
    int *own_counts = offsets + ranks, *own_offsets = own_counts + ranks;
    MPI_Request *work = &m->work[MOEI_MPI_OTHER];
    MPI_Datatype type = MPI_BYTE;
    moe_real *room = moei_mpi_room(m, (ranks + 1) * (n / ranks + 1)), *sums;
    moe_status status;
    if (room == NULL) return moei_mpi_refuse(m, "out of memory");
    sums = room + ranks * own;
    for (r = 0; r < ranks; r++) {
        size_t count = n / ranks + (r < n % ranks);
        counts[r] = (int)count;
        offsets[r] = (int)at;
        own_counts[r] = (int)own;
        own_offsets[r] = (int)(r * own);
        at += count;
        if (r != (size_t)m->rank) m->sum_bytes[r] += (count + own) * sizeof *values;
    }
    status = moei_mpi_type(m, sizeof *values, &type);
    if (status == MOE_OK)
        status = moei_mpi_check(m, MPI_Ialltoallv(values, counts, offsets, type, room, own_counts, own_offsets, type,
                                                  m->comm, work));
    if (status == MOE_OK) status = moei_mpi_finish(m, MOEI_MPI_OTHER);
    if (status != MOE_OK) return status;
    moei_mpi_add(m, own, room, sums);
    status = moei_mpi_start(m, MOEI_MPI_SUM, MOEI_MPI_OTHER);
    if (status == MOE_OK)
        status = moei_mpi_check(m, MPI_Iallgatherv(sums, (int)own, type, values, counts, offsets, type, m->comm, work));
    return status == MOE_OK ? moei_mpi_finish(m, MOEI_MPI_OTHER) : status;
}

static moe_status moei_mpi_sum(void *ctx, size_t n, moe_real *values) {
    moe_mpi *m = (moe_mpi *)ctx;
    moe_status status = MOE_OK;
    size_t part;
    if (m->n_ranks == 1) return MOE_OK;
    for (; n > 0 && status == MOE_OK; n -= part, values += part) {
        part = n < (size_t)MOEI_MPI_LONGEST ? n : (size_t)MOEI_MPI_LONGEST;
        status = moei_mpi_start(m, MOEI_MPI_SUM, MOEI_MPI_OTHER);
        if (status != MOE_OK) break;
        status = part <= MOEI_MPI_FEW ? moei_mpi_sum_few(m, part, values) : moei_mpi_sum_many(m, part, values);
    }
    m->doing = MOEI_MPI_NOTHING;
    return status;
}

/* ---- open and close ---- */

moe_status moe_mpi_open(moe_mpi *m, MPI_Comm comm, double timeout) {
    moe_status status;
    int i;
    memset(m, 0, sizeof *m);
    m->comm = MPI_COMM_NULL;
    m->timeout = timeout;
    m->timed = 1;
    for (i = 0; i <= MOE_EXCHANGES; i++) {
        m->work[i] = MPI_REQUEST_NULL;
        m->barrier[i] = MPI_REQUEST_NULL;
    }
    status = moei_mpi_check(m, MPI_Comm_dup(comm, &m->comm));
    if (status == MOE_OK) status = moei_mpi_check(m, MPI_Comm_set_errhandler(m->comm, MPI_ERRORS_RETURN));
    if (status == MOE_OK) status = moei_mpi_check(m, MPI_Comm_rank(m->comm, &m->rank));
    if (status == MOE_OK) status = moei_mpi_check(m, MPI_Comm_size(m->comm, &m->n_ranks));
    if (status != MOE_OK) return status;
    m->numbers = (int *)calloc((size_t)(MOE_EXCHANGES + 1) * 4 * (size_t)m->n_ranks, sizeof *m->numbers);
    m->sum_bytes = (uint64_t *)calloc((size_t)m->n_ranks, sizeof *m->sum_bytes);
    if (m->numbers != NULL && m->sum_bytes != NULL) return MOE_OK;
    snprintf(m->error, sizeof m->error, "rank %d: out of memory", m->rank);
    return MOE_ERR_MEMORY;
}

moe_transport moe_mpi_transport(moe_mpi *m) {
    moe_transport t;
    memset(&t, 0, sizeof t);
    t.ctx = m;
    t.rank = m->rank;
    t.n_ranks = m->n_ranks;
    t.counts = moei_mpi_counts;
    t.rows = moei_mpi_rows;
    t.sum = moei_mpi_sum;
    return t;
}

void moe_mpi_close(moe_mpi *m) {
    int i;
    for (i = 0; i < MOEI_MPI_TYPES; i++)
        if (m->type_bytes[i] != 0) (void)MPI_Type_free(&m->type[i]);
    if (m->comm != MPI_COMM_NULL) (void)MPI_Comm_free(&m->comm);
    free(m->numbers);
    free(m->sum_bytes);
    free(m->room);
    memset(m, 0, sizeof *m);
    m->comm = MPI_COMM_NULL;
}

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_FLOAT */
#endif /* MOE_IMPLEMENTATION */
