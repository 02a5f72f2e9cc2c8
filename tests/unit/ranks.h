/* ranks.h - ranks as threads of one process: a transport for tests, with no message-passing
   library. Include after moe.h, with POSIX threads.

   Every rank is a thread. A function of the transport posts what its rank has, meets the other
   ranks, copies, and meets them again. What a real transport would let pass in silence is a fault
   here, kept as a text in the world:
     - ranks that call different functions, or the same with other sizes, slots or places in the
       order of calls
     - counts of rows that differ between the two sides; rows whose places overlap; send and receive
       that overlap
     - an exchange that is begun twice, ended without a beginning, ended with other arrays, or never
       ended
     - rows that change before the exchange has ended, and places for rows that are written to
       meanwhile (they are filled with 0xFF at BEGIN, so that whoever reads too early reads NaN)
   Rows move at END, at BEGIN, or by turns. A rank may be told to fail at its k-th call; then, and
   when a rank leaves while others wait for it, the others get MOE_ERR_TRANSPORT: nothing hangs. */
#ifndef RANKS_H
#define RANKS_H

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS_MOST = 8 };
/* When rows move. */
enum { RANKS_AT_END = 0, RANKS_AT_BEGIN, RANKS_BY_TURNS, RANKS_MOVING };
/* What calls are, in the order that all ranks must have. */
enum { RANKS_COUNTS = 1, RANKS_SUM, RANKS_BEGIN, RANKS_END, RANKS_BOTH };

/* An exchange under way: what it was at BEGIN. */
typedef struct ranks_pending {
    int begun, moved;
    moe_exchange exchange;
    const moe_exchange *whose;
    size_t send_counts[RANKS_MOST], send_at[RANKS_MOST], receive_counts[RANKS_MOST], receive_at[RANKS_MOST];
    uint64_t sum; /* of the bytes to be sent */
} ranks_pending;

struct ranks_world;

typedef struct ranks_rank {
    struct ranks_world *world;
    int rank;
    unsigned long calls, begins; /* of the transport's functions; exchanges begun */
    unsigned long fail_at;       /* this call fails, counted from 1; 0: none */
    int fail_late;               /* 1: it does its work first, and fails here alone */
    /* this call, if it is one of counts, receives `lie` from another rank as number lie_word; 0:
       none */
    unsigned long lie_at;
    size_t lie_word;
    uint64_t lie;
    int lied;           /* 1: it did */
    uint64_t history;   /* a hash of the calls so far */
    const void *posted; /* what the others may read between two meetings */
    size_t n;
    ranks_pending pending[MOE_EXCHANGES];
    uint64_t bytes[RANKS_MOST], rows[RANKS_MOST]; /* sent to each rank, in all kinds of calls; rows in exchanges */
    uint64_t messages[RANKS_MOST];                /* exchanges with at least a row for that rank */
    uint64_t summed, counted;                     /* bytes of calls of sum and of counts to one other rank */
    void (*task)(struct ranks_rank *self, void *ctx);
    void *ctx;
} ranks_rank;

typedef struct ranks_world {
    int n_ranks, moving;
    ranks_rank ranks[RANKS_MOST];
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int waiting, gone, broken;
    unsigned long generation;
    char fault[200]; /* the first thing that is against the rules, or "" */
} ranks_world;

static void ranks_begin(ranks_world *w, int n_ranks, int moving) {
    int i;
    memset(w, 0, sizeof *w);
    w->n_ranks = n_ranks;
    w->moving = moving;
    for (i = 0; i < n_ranks; i++) {
        w->ranks[i].world = w;
        w->ranks[i].rank = i;
    }
    if (pthread_mutex_init(&w->mutex, NULL) != 0 || pthread_cond_init(&w->changed, NULL) != 0) {
        fprintf(stderr, "ranks: no mutex\n");
        exit(2);
    }
}

static void ranks_end(ranks_world *w) {
    pthread_mutex_destroy(&w->mutex);
    pthread_cond_destroy(&w->changed);
}

/* ---- meetings ---- */

static void ranks_break(ranks_world *w) {
    w->broken = 1;
    pthread_cond_broadcast(&w->changed);
}

/* Keeps the first fault and ends all waiting. */
static moe_status ranks_fault(ranks_rank *r, const char *what) {
    ranks_world *w = r->world;
    pthread_mutex_lock(&w->mutex);
    if (w->fault[0] == '\0') sprintf(w->fault, "rank %d, call %lu: %.150s", r->rank, r->calls, what);
    ranks_break(w);
    pthread_mutex_unlock(&w->mutex);
    return MOE_ERR_TRANSPORT;
}

/* Waits until all ranks are here; 0: they will never be. */
static int ranks_meet(ranks_world *w) {
    unsigned long mine;
    int met;
    pthread_mutex_lock(&w->mutex);
    mine = w->generation;
    if (!w->broken && ++w->waiting == w->n_ranks) {
        w->waiting = 0;
        w->generation++;
        pthread_cond_broadcast(&w->changed);
    } else if (!w->broken && w->waiting + w->gone == w->n_ranks) ranks_break(w);
    while (!w->broken && w->generation == mine) pthread_cond_wait(&w->changed, &w->mutex);
    met = w->generation != mine;
    pthread_mutex_unlock(&w->mutex);
    return met;
}

static void ranks_leave(ranks_world *w) {
    pthread_mutex_lock(&w->mutex);
    w->gone++;
    if (w->waiting > 0 && w->waiting + w->gone == w->n_ranks) ranks_break(w);
    pthread_mutex_unlock(&w->mutex);
}

static uint64_t ranks_hash(uint64_t hash, const void *bytes, size_t size) {
    const unsigned char *p = (const unsigned char *)bytes;
    size_t i;
    for (i = 0; i < size; i++) hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Counts a call. Not MOE_OK: it is the one that fails. */
static moe_status ranks_enter(ranks_rank *r, int kind, size_t n, size_t also) {
    const uint64_t what[3] = {(uint64_t)kind, (uint64_t)n, (uint64_t)also};
    r->calls++;
    r->history = ranks_hash(r->history, what, sizeof what);
    if (r->history % 5 == (uint64_t)r->rank) sched_yield();
    if (r->calls != r->fail_at || r->fail_late) return MOE_OK;
    pthread_mutex_lock(&r->world->mutex);
    ranks_break(r->world);
    pthread_mutex_unlock(&r->world->mutex);
    return MOE_ERR_TRANSPORT;
}

static moe_status ranks_done(const ranks_rank *r) { return r->calls == r->fail_at ? MOE_ERR_TRANSPORT : MOE_OK; }

/* Meets the others, who must have made the same calls. */
static moe_status ranks_agree(ranks_rank *r) {
    ranks_world *w = r->world;
    int i;
    if (!ranks_meet(w)) return MOE_ERR_TRANSPORT;
    for (i = 0; i < w->n_ranks; i++)
        if (w->ranks[i].history != r->history || w->ranks[i].calls != r->calls)
            return ranks_fault(r, "another rank makes another call");
    return MOE_OK;
}

/* ---- the three functions ---- */

static moe_status ranks_counts(void *ctx, size_t n, const uint64_t *send, uint64_t *receive) {
    ranks_rank *r = (ranks_rank *)ctx;
    ranks_world *w = r->world;
    moe_status status = ranks_enter(r, RANKS_COUNTS, n, 0);
    int i;
    if (status != MOE_OK) return status;
    r->posted = send;
    status = ranks_agree(r);
    if (status != MOE_OK) return status;
    for (i = 0; i < w->n_ranks; i++) {
        if (n > 0)
            memcpy(receive + (size_t)i * n, (const uint64_t *)w->ranks[i].posted + (size_t)r->rank * n,
                   n * sizeof *receive);
        if (i != r->rank) r->bytes[i] += n * sizeof *receive;
    }
    r->counted += n * sizeof *receive;
    if (r->calls == r->lie_at && r->lie_word < n) {
        receive[(size_t)((r->rank + 1) % w->n_ranks) * n + r->lie_word] = r->lie;
        r->lied = 1;
    }
    return ranks_meet(w) ? ranks_done(r) : MOE_ERR_TRANSPORT;
}

static moe_status ranks_sum(void *ctx, size_t n, moe_real *values) {
    ranks_rank *r = (ranks_rank *)ctx;
    ranks_world *w = r->world;
    moe_status status = ranks_enter(r, RANKS_SUM, n, 0);
    moe_real *sums;
    size_t k;
    int i, met;
    if (status != MOE_OK) return status;
    for (i = 0; i < MOE_EXCHANGES; i++)
        if (r->pending[i].begun) return ranks_fault(r, "a sum while an exchange is under way");
    r->posted = values;
    status = ranks_agree(r);
    if (status != MOE_OK) return status;
    sums = (moe_real *)calloc(n > 0 ? n : 1, sizeof *sums);
    if (sums == NULL) return ranks_fault(r, "out of memory");
    for (i = 0; i < w->n_ranks; i++)
        for (k = 0; k < n; k++) sums[k] += ((const moe_real *)w->ranks[i].posted)[k];
    met = ranks_meet(w);
    if (met && n > 0) memcpy(values, sums, n * sizeof *values);
    free(sums);
    r->summed += n * sizeof *values;
    return met ? ranks_done(r) : MOE_ERR_TRANSPORT;
}

/* Rows that go to one rank, or come from one. */
static unsigned char *ranks_rows_at(const void *rows, size_t row_bytes, size_t at) {
    unsigned char *p;
    memcpy(&p, &rows, sizeof p);
    return p != NULL ? p + row_bytes * at : p;
}

static int ranks_overlap(const unsigned char *a, size_t size, const unsigned char *b, size_t other) {
    return size > 0 && other > 0 && (size_t)a < (size_t)b + other && (size_t)b < (size_t)a + size;
}

static uint64_t ranks_send_sum(const ranks_rank *r, const ranks_pending *p) {
    uint64_t sum = UINT64_C(0xcbf29ce484222325);
    int i;
    for (i = 0; i < r->world->n_ranks; i++)
        sum = ranks_hash(sum, ranks_rows_at(p->exchange.send, p->exchange.row_bytes, p->send_at[i]),
                         p->send_counts[i] * p->exchange.row_bytes);
    return sum;
}

/* What is wrong with an exchange as one rank sees it, or NULL. */
static const char *ranks_bad_exchange(const ranks_rank *r, const ranks_pending *p) {
    const moe_exchange *e = &p->exchange;
    int i, k, n = r->world->n_ranks;
    size_t sent = 0, received = 0;
    if (e->row_bytes == 0) return "row_bytes is 0";
    for (i = 0; i < n; i++) {
        sent += p->send_counts[i];
        received += p->receive_counts[i];
    }
    if ((sent > 0 && e->send == NULL) || (received > 0 && e->receive == NULL))
        return "there are rows and no place for them";
    if (p->send_counts[r->rank] != p->receive_counts[r->rank])
        return "a rank gets more or fewer rows from itself than it sends";
    for (i = 0; i < n; i++)
        for (k = 0; k < n; k++) {
            const unsigned char *to = ranks_rows_at(e->receive, e->row_bytes, p->receive_at[i]);
            const size_t size = p->receive_counts[i] * e->row_bytes;
            if (i != k && ranks_overlap(to, size, ranks_rows_at(e->receive, e->row_bytes, p->receive_at[k]),
                                        p->receive_counts[k] * e->row_bytes))
                return "the places for two ranks' rows overlap";
            if (ranks_overlap(to, size, ranks_rows_at(e->send, e->row_bytes, p->send_at[k]),
                              p->send_counts[k] * e->row_bytes))
                return "send and receive overlap";
        }
    return NULL;
}

/* Copies what the others have for this rank. */
static moe_status ranks_move(ranks_rank *r, int slot) {
    ranks_world *w = r->world;
    ranks_pending *own = &r->pending[slot];
    const size_t bytes = own->exchange.row_bytes;
    moe_status status = ranks_agree(r);
    int i, differ = 0, met;
    if (status != MOE_OK) return status;
    for (i = 0; i < w->n_ranks; i++) {
        const ranks_pending *other = &w->ranks[i].pending[slot];
        if (other->send_counts[r->rank] != own->receive_counts[i]) differ = 1;
        else if (own->receive_counts[i] > 0)
            memcpy(ranks_rows_at(own->exchange.receive, bytes, own->receive_at[i]),
                   ranks_rows_at(other->exchange.send, bytes, other->send_at[r->rank]), own->receive_counts[i] * bytes);
        r->rows[i] += own->send_counts[i];
        r->messages[i] += own->send_counts[i] > 0;
        if (i != r->rank) r->bytes[i] += own->send_counts[i] * bytes;
    }
    own->moved = 1;
    met = ranks_meet(w); /* nobody leaves, and takes its rows away, before all have copied */
    return differ ? ranks_fault(r, "the counts of the two sides differ") : met ? MOE_OK : MOE_ERR_TRANSPORT;
}

static void ranks_poison(const ranks_rank *r, const ranks_pending *p) {
    int i;
    for (i = 0; i < r->world->n_ranks; i++)
        if (p->receive_counts[i] > 0)
            memset(ranks_rows_at(p->exchange.receive, p->exchange.row_bytes, p->receive_at[i]), 0xFF,
                   p->receive_counts[i] * p->exchange.row_bytes);
}

static int ranks_is_poison(const ranks_rank *r, const ranks_pending *p) {
    size_t k;
    int i, good = 1;
    for (i = 0; i < r->world->n_ranks; i++) {
        const unsigned char *rows = ranks_rows_at(p->exchange.receive, p->exchange.row_bytes, p->receive_at[i]);
        for (k = 0; k < p->receive_counts[i] * p->exchange.row_bytes; k++) good &= rows[k] == 0xFF;
    }
    return good;
}

static moe_status ranks_begin_rows(ranks_rank *r, const moe_exchange *e, int at_once) {
    const size_t size = (size_t)r->world->n_ranks * sizeof(size_t);
    ranks_pending *p = &r->pending[e->channel];
    const char *bad;
    int now;
    if (p->begun) return ranks_fault(r, "an exchange begins in a slot that is taken");
    memset(p, 0, sizeof *p);
    p->begun = 1;
    p->exchange = *e;
    p->whose = e;
    memcpy(p->send_counts, e->send_counts, size);
    memcpy(p->send_at, e->send_at, size);
    memcpy(p->receive_counts, e->receive_counts, size);
    memcpy(p->receive_at, e->receive_at, size);
    bad = ranks_bad_exchange(r, p);
    if (bad != NULL) return ranks_fault(r, bad);
    p->sum = ranks_send_sum(r, p);
    ranks_poison(r, p);
    now = at_once || r->world->moving == RANKS_AT_BEGIN || (r->world->moving == RANKS_BY_TURNS && r->begins % 3 != 1);
    r->begins++;
    return now ? ranks_move(r, e->channel) : MOE_OK;
}

static moe_status ranks_end_rows(ranks_rank *r, const moe_exchange *e) {
    const size_t size = (size_t)r->world->n_ranks * sizeof(size_t);
    ranks_pending *p = &r->pending[e->channel];
    moe_status status = MOE_OK;
    if (!p->begun) return ranks_fault(r, "an exchange ends that has not begun");
    if (e->send != p->exchange.send || e->receive != p->exchange.receive || e->row_bytes != p->exchange.row_bytes ||
        memcmp(e->send_counts, p->send_counts, size) != 0 || memcmp(e->send_at, p->send_at, size) != 0 ||
        memcmp(e->receive_counts, p->receive_counts, size) != 0 || memcmp(e->receive_at, p->receive_at, size) != 0)
        return ranks_fault(r, "an exchange ends with other arrays than it began with");
    if (ranks_send_sum(r, p) != p->sum) return ranks_fault(r, "rows changed before they were sent");
    if (!p->moved && !ranks_is_poison(r, p)) return ranks_fault(r, "something was written where rows were to come");
    if (!p->moved) status = ranks_move(r, e->channel);
    p->begun = 0;
    return status;
}

static moe_status ranks_rows(void *ctx, int stage, const moe_exchange *exchange) {
    ranks_rank *r = (ranks_rank *)ctx;
    const int both = stage == (MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END);
    const int kind = both ? RANKS_BOTH : stage == MOE_EXCHANGE_BEGIN ? RANKS_BEGIN : RANKS_END;
    moe_status status;
    if (!both && stage != MOE_EXCHANGE_BEGIN && stage != MOE_EXCHANGE_END) return ranks_fault(r, "rows: no such stage");
    if (exchange == NULL || exchange->channel < 0 || exchange->channel >= MOE_EXCHANGES)
        return ranks_fault(r, "rows: no such slot");
    status = ranks_enter(r, kind, exchange->row_bytes, (size_t)exchange->channel);
    if (status == MOE_OK && (stage & MOE_EXCHANGE_BEGIN)) status = ranks_begin_rows(r, exchange, both);
    if (status == MOE_OK && (stage & MOE_EXCHANGE_END)) status = ranks_end_rows(r, exchange);
    return status == MOE_OK ? ranks_done(r) : status;
}

/* The transport of one rank; moe_transport_begin is the caller's. */
static moe_transport ranks_transport(ranks_rank *r) {
    moe_transport t;
    memset(&t, 0, sizeof t);
    t.ctx = r;
    t.rank = r->rank;
    t.n_ranks = r->world->n_ranks;
    t.counts = ranks_counts;
    t.rows = ranks_rows;
    t.sum = ranks_sum;
    return t;
}

/* ---- threads ---- */

static void *ranks_main(void *p) {
    ranks_rank *r = (ranks_rank *)p;
    r->task(r, r->ctx);
    ranks_leave(r->world);
    return NULL;
}

/* Runs task on all ranks and waits for them. NULL: all kept the rules, and came to the end of the
   same calls; else what was wrong. */
static const char *ranks_run(ranks_world *w, void (*task)(ranks_rank *self, void *ctx), void *ctx) {
    pthread_t threads[RANKS_MOST];
    int i, slot;
    w->waiting = w->gone = w->broken = 0;
    for (i = 0; i < w->n_ranks; i++) {
        w->ranks[i].task = task;
        w->ranks[i].ctx = ctx;
        if (pthread_create(&threads[i], NULL, ranks_main, &w->ranks[i]) != 0) {
            fprintf(stderr, "ranks: a thread cannot be started\n");
            exit(2);
        }
    }
    for (i = 0; i < w->n_ranks; i++) pthread_join(threads[i], NULL);
    if (w->fault[0] != '\0') return w->fault;
    if (w->broken) return "a rank failed, or left while others waited for it";
    for (i = 0; i < w->n_ranks; i++) {
        if (w->ranks[i].history != w->ranks[0].history) return "the last calls of two ranks differ";
        for (slot = 0; slot < MOE_EXCHANGES; slot++)
            if (w->ranks[i].pending[slot].begun) return "an exchange was begun and not ended";
    }
    return NULL;
}

#endif
