/* moe_mpi.h - experts on several machines by MPI: the three functions of a moe_transport, with times and an end to endless waiting. Copy it into your
   program, include it behind moe.h, compile with mpicc. C99 or C++11; any MPI 3.

     moe_mpi mpi;
     moe_transport transport;
     moe_error error;
     MPI_Init(NULL, NULL);
     if (moe_mpi_open(&mpi, MPI_COMM_WORLD, 30) != MOE_OK) give up, mpi.error says why;
     transport = moe_mpi_transport(&mpi);       its chunks, ranks_per_node, two_level and traffic may be set now
     if (moe_transport_begin(&transport, &error) != MOE_OK) give up, error.message says why;
     net.transport = &transport;                or config.transport of a layer
     ...                                        MOE_ERR_TRANSPORT from any call: print mpi.error if it is not empty, MPI_Abort
     moe_mpi_close(&mpi);
     MPI_Finalize();

   Everything is sent by collective calls that do not block, which are then asked for until they are done: so a rank that waits in vain notices, and asks all
   the others where they are. Those that wait too answer; those that are dead, stand still or compute do not, and mpi.error names them. Patience counts from
   the beginning of a wait, so it must be longer than the longest work between two exchanges.
   What is received from many ranks is added up in the order of ranks: sums have the same bits on all ranks and with any MPI. */
#ifndef MOE_MPI_H
#define MOE_MPI_H

#include <limits.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOE_MPI_TYPES = 8, MOE_MPI_ASK = 1, MOE_MPI_ANSWER = 2 /* tags */, MOE_MPI_LONGEST = 1 << 27 /* numbers of a sum that are added at a time */ };

/* What a rank may be busy with. */
enum { MOE_MPI_NOTHING = 0, MOE_MPI_COUNTS, MOE_MPI_ROWS, MOE_MPI_SUM };

typedef struct moe_mpi {
    MPI_Comm comm;       /* a copy of the caller's */
    int rank, n_ranks;
    double patience;     /* seconds that it waits for others; 0: for ever */
    int timed;           /* 1: a barrier goes along with every exchange, which tells waiting from exchanging; 0: all is exchanging [1] */
    double waiting;      /* seconds, since it was opened: until the last rank had come to the exchange */
    double exchanging;   /* and from then on until everything had arrived */
    uint64_t *sum_bytes; /* [n_ranks] bytes sent to each rank for sums (moe_traffic has the rest) */
    uint64_t calls;      /* of the three functions, this one included */
    char error[400];     /* what failed; empty: nothing */
    /* Private. */
    int doing;
    MPI_Request work[MOE_EXCHANGES + 1], barrier[MOE_EXCHANGES + 1]; /* the last of each: of counts and sums */
    int *numbers;                                                  /* [MOE_EXCHANGES + 1][4][n_ranks] counts and places of an exchange */
    MPI_Datatype type[MOE_MPI_TYPES];
    size_t type_bytes[MOE_MPI_TYPES];
    int next_type;
    moe_real *room;
    size_t room_size; /* numbers */
} moe_mpi;

static inline const char *moe_mpi_name(int doing) {
    static const char *const names[] = {"no exchange", "an exchange of counts", "an exchange of rows", "a sum"};
    return names[doing >= 0 && doing <= MOE_MPI_SUM ? doing : 0];
}

/* MOE_OK, or *m holds what MPI says. */
static inline moe_status moe_mpi_check(moe_mpi *m, int result) {
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    if (result == MPI_SUCCESS) return MOE_OK;
    MPI_Error_string(result, text, &length);
    snprintf(m->error, sizeof m->error, "rank %d: %s: %s", m->rank, moe_mpi_name(m->doing), text);
    return MOE_ERR_TRANSPORT;
}

static inline moe_status moe_mpi_refuse(moe_mpi *m, const char *what) {
    snprintf(m->error, sizeof m->error, "rank %d: %s: %s", m->rank, moe_mpi_name(m->doing), what);
    return MOE_ERR_TRANSPORT;
}

/* ---- waiting ------------------------------------------------------------------------------------------------------------------------ */

/* Answers ranks that ask where this one is, and takes answers in: place [2 n_ranks] calls and doing of each rank, or NULL. */
static inline void moe_mpi_talk(moe_mpi *m, uint64_t *place, unsigned char *answered) {
    MPI_Status status;
    int there = 0;
    uint64_t mine[2], theirs[2];
    char byte;
    while (MPI_Iprobe(MPI_ANY_SOURCE, MOE_MPI_ASK, m->comm, &there, &status) == MPI_SUCCESS && there) {
        int from = status.MPI_SOURCE;
        if (MPI_Recv(&byte, 1, MPI_CHAR, from, MOE_MPI_ASK, m->comm, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
        mine[0] = m->calls, mine[1] = (uint64_t)m->doing;
        if (MPI_Send(mine, 2, MPI_UINT64_T, from, MOE_MPI_ANSWER, m->comm) != MPI_SUCCESS) return; /* two numbers never wait */
    }
    there = 0;
    while (place != NULL && MPI_Iprobe(MPI_ANY_SOURCE, MOE_MPI_ANSWER, m->comm, &there, &status) == MPI_SUCCESS && there) {
        int from = status.MPI_SOURCE;
        if (MPI_Recv(theirs, 2, MPI_UINT64_T, from, MOE_MPI_ANSWER, m->comm, MPI_STATUS_IGNORE) != MPI_SUCCESS) return;
        place[2 * from] = theirs[0], place[2 * from + 1] = theirs[1], answered[from] = 1;
    }
}

static inline void moe_mpi_pause(double seconds) {
#if defined _POSIX_C_SOURCE && _POSIX_C_SOURCE >= 199309L
    struct timespec t;
    t.tv_sec = 0, t.tv_nsec = (long)(seconds * 1e9);
    nanosleep(&t, NULL);
#else
    (void)seconds; /* MPI_Test gives the processor away where there are more ranks than processors */
#endif
}

/* Nothing has come for too long: asks all ranks, and writes into m->error which do not answer or are elsewhere. */
static inline moe_status moe_mpi_lost(moe_mpi *m, double waited) {
    size_t n = (size_t)m->n_ranks, used, silent = 0, elsewhere = 0;
    uint64_t *place = (uint64_t *)calloc(2 * n, sizeof *place);
    unsigned char *answered = (unsigned char *)calloc(n, 1);
    double began = MPI_Wtime(), most = m->patience / 4 < 5 ? m->patience / 4 + 0.5 : 5;
    char byte = 0;
    int r;
    if (place == NULL || answered == NULL) {
        free(place), free(answered);
        return moe_mpi_refuse(m, "another rank does not come");
    }
    for (r = 0; r < m->n_ranks; r++)
        if (r != m->rank) (void)MPI_Send(&byte, 1, MPI_CHAR, r, MOE_MPI_ASK, m->comm); /* a byte never waits */
    while (MPI_Wtime() - began < most) moe_mpi_talk(m, place, answered), moe_mpi_pause(0.001);
    for (r = 0; r < m->n_ranks; r++) {
        if (r == m->rank) continue;
        if (!answered[r]) silent++;
        else if (place[2 * r] != m->calls || place[2 * r + 1] != (uint64_t)m->doing) elsewhere++;
    }
    used = (size_t)snprintf(m->error, sizeof m->error, "rank %d has waited %.1f s in %s, the %.0f. call; ", m->rank, waited, moe_mpi_name(m->doing),
                            (double)m->calls);
    for (r = 0; r < m->n_ranks && used < sizeof m->error - 100; r++) {
        if (r == m->rank) continue;
        if (silent > 0 && !answered[r])
            used += (size_t)snprintf(m->error + used, sizeof m->error - used, "rank %d does not answer; ", r);
        if (silent == 0 && elsewhere > 0 && (place[2 * r] != m->calls || place[2 * r + 1] != (uint64_t)m->doing))
            used += (size_t)snprintf(m->error + used, sizeof m->error - used, "rank %d waits in %s, its %.0f. call; ", r, moe_mpi_name((int)place[2 * r + 1]),
                                     (double)place[2 * r]);
    }
    snprintf(m->error + used, sizeof m->error - used, "%s", silent > 0 ? "it is dead, stands still, or works for longer than this patience" :
             elsewhere > 0 ? "the ranks do not make the same calls" : "all ranks wait there: a message was lost");
    free(place), free(answered);
    return MOE_ERR_TRANSPORT;
}

/* Until a request is done. */
static inline moe_status moe_mpi_wait(moe_mpi *m, MPI_Request *request) {
    double began = MPI_Wtime(), waited = 0;
    moe_status status = MOE_OK;
    int done = 0;
    while ((status = moe_mpi_check(m, MPI_Test(request, &done, MPI_STATUS_IGNORE))) == MOE_OK && !done) {
        waited = MPI_Wtime() - began;
        if (waited < 0.0005) continue;
        moe_mpi_pause(waited < 0.02 ? 0.00005 : 0.0002); /* others may want the processor, as the rank that is waited for */
        moe_mpi_talk(m, NULL, NULL);
        if (m->patience > 0 && waited > m->patience) return moe_mpi_lost(m, waited);
    }
    return status;
}

/* Ends what was started in a slot, and counts the time. */
static inline moe_status moe_mpi_finish(moe_mpi *m, int slot) {
    double began = MPI_Wtime(), came = began;
    moe_status status = MOE_OK;
    if (m->timed) {
        status = moe_mpi_wait(m, &m->barrier[slot]);
        came = MPI_Wtime(), m->waiting += came - began;
    }
    if (status == MOE_OK) status = moe_mpi_wait(m, &m->work[slot]);
    m->exchanging += MPI_Wtime() - came;
    return status;
}

/* Begins a call of one of the three functions: the barrier that goes along. */
static inline moe_status moe_mpi_start(moe_mpi *m, int doing, int slot) {
    m->calls++, m->doing = doing;
    return m->timed ? moe_mpi_check(m, MPI_Ibarrier(m->comm, &m->barrier[slot])) : MOE_OK;
}

/* ---- the three functions ------------------------------------------------------------------------------------------------------------ */

static inline moe_status moe_mpi_counts(void *ctx, size_t n, const uint64_t *send, uint64_t *receive) {
    moe_mpi *m = (moe_mpi *)ctx;
    moe_status status;
    if (m->n_ranks == 1) return memcpy(receive, send, n * sizeof *send), MOE_OK;
    status = moe_mpi_start(m, MOE_MPI_COUNTS, MOE_EXCHANGES);
    if (n > INT_MAX) return moe_mpi_refuse(m, "more than 2^31 - 1 numbers for a rank");
    if (status == MOE_OK)
        status = moe_mpi_check(m, MPI_Ialltoall(send, (int)n, MPI_UINT64_T, receive, (int)n, MPI_UINT64_T, m->comm, &m->work[MOE_EXCHANGES]));
    if (status == MOE_OK) status = moe_mpi_finish(m, MOE_EXCHANGES);
    m->doing = MOE_MPI_NOTHING;
    return status;
}

/* The MPI type of so many bytes: MPI counts in int, and rows are far fewer than their bytes. */
static inline moe_status moe_mpi_type(moe_mpi *m, size_t bytes, MPI_Datatype *type) {
    moe_status status = MOE_OK;
    int i;
    if (bytes == 0 || bytes > INT_MAX) return moe_mpi_refuse(m, "a row has no bytes, or more than 2^31 - 1");
    for (i = 0; i < MOE_MPI_TYPES; i++)
        if (m->type_bytes[i] == bytes) return *type = m->type[i], MOE_OK;
    i = m->next_type, m->next_type = (i + 1) % MOE_MPI_TYPES;
    if (m->type_bytes[i] != 0) status = moe_mpi_check(m, MPI_Type_free(&m->type[i])); /* exchanges under way keep it as long as they want */
    m->type_bytes[i] = 0;
    if (status == MOE_OK) status = moe_mpi_check(m, MPI_Type_contiguous((int)bytes, MPI_BYTE, &m->type[i]));
    if (status == MOE_OK) status = moe_mpi_check(m, MPI_Type_commit(&m->type[i]));
    if (status == MOE_OK) m->type_bytes[i] = bytes, *type = m->type[i];
    return status;
}

/* numbers [4][n_ranks] of a slot, from the exchange. */
static inline moe_status moe_mpi_numbers(moe_mpi *m, const moe_exchange *x, int *numbers) {
    const size_t *from[4];
    int i, r;
    from[0] = x->send_counts, from[1] = x->send_at, from[2] = x->receive_counts, from[3] = x->receive_at;
    for (i = 0; i < 4; i++)
        for (r = 0; r < m->n_ranks; r++) {
            int unused = i % 2 == 1 && from[i - 1][r] == 0; /* a place where nothing is */
            if (!unused && from[i][r] > INT_MAX) return moe_mpi_refuse(m, "more than 2^31 - 1 rows in an exchange: smaller batches, or more chunks");
            numbers[i * m->n_ranks + r] = unused ? 0 : (int)from[i][r];
        }
    return MOE_OK;
}

static inline moe_status moe_mpi_begin_rows(moe_mpi *m, const moe_exchange *x) {
    int n = m->n_ranks, *numbers = m->numbers + (size_t)x->slot * 4 * (size_t)n;
    double began = MPI_Wtime();
    MPI_Datatype type = MPI_BYTE;
    moe_status status = moe_mpi_start(m, MOE_MPI_ROWS, x->slot);
    if (status == MOE_OK) status = moe_mpi_numbers(m, x, numbers);
    if (status == MOE_OK) status = moe_mpi_type(m, x->row_bytes, &type);
    if (status == MOE_OK)
        status = moe_mpi_check(m, MPI_Ialltoallv(x->send, numbers, numbers + n, type, x->receive, numbers + 2 * n, numbers + 3 * n, type, m->comm,
                                                 &m->work[x->slot]));
    m->exchanging += MPI_Wtime() - began;
    return status;
}

static inline moe_status moe_mpi_rows(void *ctx, int stage, const moe_exchange *x) {
    moe_mpi *m = (moe_mpi *)ctx;
    moe_status status = MOE_OK;
    if (m->n_ranks == 1) {
        if ((stage & MOE_EXCHANGE_BEGIN) && x->send_counts[0] > 0)
            memcpy((char *)x->receive + x->receive_at[0] * x->row_bytes, (const char *)x->send + x->send_at[0] * x->row_bytes, x->send_counts[0] * x->row_bytes);
        return MOE_OK;
    }
    m->doing = MOE_MPI_ROWS;
    if (x->slot < 0 || x->slot >= MOE_EXCHANGES) return moe_mpi_refuse(m, "the slot is none");
    if (stage & MOE_EXCHANGE_BEGIN) status = moe_mpi_begin_rows(m, x);
    if (status == MOE_OK && (stage & MOE_EXCHANGE_END)) status = moe_mpi_finish(m, x->slot);
    m->doing = MOE_MPI_NOTHING;
    return status;
}

/* Room for n numbers; NULL: there is none. */
static inline moe_real *moe_mpi_room(moe_mpi *m, size_t n) {
    if (n > m->room_size) {
        free(m->room);
        m->room = n < SIZE_MAX / sizeof *m->room ? (moe_real *)malloc(n * sizeof *m->room) : NULL;
        m->room_size = m->room != NULL ? n : 0;
    }
    return m->room;
}

/* to [n] = the sum of n_ranks rows [n], that of rank 0 first. */
static inline void moe_mpi_add(const moe_mpi *m, size_t n, const moe_real *rows, moe_real *to) {
    size_t i;
    int r;
    for (i = 0; i < n; i++) to[i] = rows[i];
    for (r = 1; r < m->n_ranks; r++)
        for (i = 0; i < n; i++) to[i] += rows[(size_t)r * n + i];
}

/* Few numbers: every rank gets all of them. */
static inline moe_status moe_mpi_sum_few(moe_mpi *m, size_t n, moe_real *values) {
    MPI_Datatype type = MPI_BYTE;
    moe_real *room = moe_mpi_room(m, n * (size_t)m->n_ranks);
    moe_status status;
    int r;
    if (room == NULL) return moe_mpi_refuse(m, "out of memory");
    status = moe_mpi_type(m, sizeof *values, &type);
    if (status == MOE_OK) status = moe_mpi_check(m, MPI_Iallgather(values, (int)n, type, room, (int)n, type, m->comm, &m->work[MOE_EXCHANGES]));
    if (status == MOE_OK) status = moe_mpi_finish(m, MOE_EXCHANGES);
    if (status == MOE_OK) moe_mpi_add(m, n, room, values);
    for (r = 0; r < m->n_ranks; r++)
        if (r != m->rank) m->sum_bytes[r] += n * sizeof *values;
    return status;
}

/* Rank r adds up part r and sends the sums to all. */
static inline moe_status moe_mpi_sum_many(moe_mpi *m, size_t n, moe_real *values) {
    size_t ranks = (size_t)m->n_ranks, own = n / ranks + ((size_t)m->rank < n % ranks), at = 0, r;
    int *counts = m->numbers + (size_t)MOE_EXCHANGES * 4 * ranks, *places = counts + ranks, *own_counts = places + ranks, *own_places = own_counts + ranks;
    MPI_Datatype type = MPI_BYTE;
    moe_real *room = moe_mpi_room(m, (ranks + 1) * (n / ranks + 1));
    moe_status status;
    if (room == NULL) return moe_mpi_refuse(m, "out of memory");
    for (r = 0; r < ranks; r++) {
        size_t count = n / ranks + (r < n % ranks);
        counts[r] = (int)count, places[r] = (int)at, own_counts[r] = (int)own, own_places[r] = (int)(r * own), at += count;
        if (r != (size_t)m->rank) m->sum_bytes[r] += (count + own) * sizeof *values;
    }
    status = moe_mpi_type(m, sizeof *values, &type);
    if (status == MOE_OK)
        status = moe_mpi_check(m, MPI_Ialltoallv(values, counts, places, type, room, own_counts, own_places, type, m->comm, &m->work[MOE_EXCHANGES]));
    if (status == MOE_OK) status = moe_mpi_finish(m, MOE_EXCHANGES);
    if (status != MOE_OK) return status;
    moe_mpi_add(m, own, room, room + ranks * own);
    status = moe_mpi_start(m, MOE_MPI_SUM, MOE_EXCHANGES);
    if (status == MOE_OK)
        status = moe_mpi_check(m, MPI_Iallgatherv(room + ranks * own, (int)own, type, values, counts, places, type, m->comm, &m->work[MOE_EXCHANGES]));
    return status == MOE_OK ? moe_mpi_finish(m, MOE_EXCHANGES) : status;
}

static inline moe_status moe_mpi_sum(void *ctx, size_t n, moe_real *values) {
    moe_mpi *m = (moe_mpi *)ctx;
    moe_status status = MOE_OK;
    while (n > 0 && m->n_ranks > 1 && status == MOE_OK) {
        size_t part = n < (size_t)MOE_MPI_LONGEST ? n : (size_t)MOE_MPI_LONGEST;
        status = moe_mpi_start(m, MOE_MPI_SUM, MOE_EXCHANGES);
        if (status == MOE_OK) status = part <= 512 ? moe_mpi_sum_few(m, part, values) : moe_mpi_sum_many(m, part, values);
        n -= part, values += part;
    }
    m->doing = MOE_MPI_NOTHING;
    return status;
}

/* ---- open and close ----------------------------------------------------------------------------------------------------------------- */

/* After MPI_Init. comm: the ranks that take part; patience: seconds after which waiting for them is an error, 0: never. Collective. MOE_ERR_MEMORY,
   MOE_ERR_TRANSPORT: m->error says what. */
static inline moe_status moe_mpi_open(moe_mpi *m, MPI_Comm comm, double patience) {
    moe_status status;
    int i;
    memset(m, 0, sizeof *m);
    m->comm = MPI_COMM_NULL, m->patience = patience, m->timed = 1;
    for (i = 0; i <= MOE_EXCHANGES; i++) m->work[i] = m->barrier[i] = MPI_REQUEST_NULL;
    status = moe_mpi_check(m, MPI_Comm_dup(comm, &m->comm));
    if (status == MOE_OK) status = moe_mpi_check(m, MPI_Comm_set_errhandler(m->comm, MPI_ERRORS_RETURN));
    if (status == MOE_OK) status = moe_mpi_check(m, MPI_Comm_rank(m->comm, &m->rank));
    if (status == MOE_OK) status = moe_mpi_check(m, MPI_Comm_size(m->comm, &m->n_ranks));
    if (status != MOE_OK) return status;
    m->numbers = (int *)calloc((size_t)(MOE_EXCHANGES + 1) * 4 * (size_t)m->n_ranks, sizeof *m->numbers);
    m->sum_bytes = (uint64_t *)calloc((size_t)m->n_ranks, sizeof *m->sum_bytes);
    if (m->numbers != NULL && m->sum_bytes != NULL) return MOE_OK;
    snprintf(m->error, sizeof m->error, "rank %d: out of memory", m->rank);
    return MOE_ERR_MEMORY;
}

/* What moe_transport_begin wants; points to *m, which must stay where it is. */
static inline moe_transport moe_mpi_transport(moe_mpi *m) {
    moe_transport t;
    memset(&t, 0, sizeof t);
    t.ctx = m, t.rank = m->rank, t.n_ranks = m->n_ranks;
    t.counts = moe_mpi_counts, t.rows = moe_mpi_rows, t.sum = moe_mpi_sum;
    return t;
}

/* Before MPI_Finalize, when nothing is under way. Collective. */
static inline void moe_mpi_close(moe_mpi *m) {
    int i;
    for (i = 0; i < MOE_MPI_TYPES; i++)
        if (m->type_bytes[i] != 0) (void)MPI_Type_free(&m->type[i]);
    if (m->comm != MPI_COMM_NULL) (void)MPI_Comm_free(&m->comm);
    free(m->numbers), free(m->sum_bytes), free(m->room);
    memset(m, 0, sizeof *m);
    m->comm = MPI_COMM_NULL;
}

#endif
