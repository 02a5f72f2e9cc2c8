/* scale.h - a model of training on many ranks: from costs measured on one machine it predicts the
   time of a training step on 1 to 1024 ranks (processes that share the experts, moe_ranks.h), and
   compares predictions with runs on a few. examples/mpi/scale.c prints its tables;
   tests/examples/scale.c tests it.

   THE MODEL. R ranks, p of them on each machine, n = R/p machines; T tokens per rank and step, N =
   R T; L MoE layers of E experts, E/R of them on each rank. A link takes a + b/B seconds for a
   message of b bytes: a is its latency, B its bandwidth in each direction (full duplex). near:
   inside a machine, for every rank; far: between machines, for all ranks of a machine together. An
   all-to-all is R - 1 messages of every rank.
     compute   L rows (forward + backward) + T other + L N route E/E0 + numbers optimizer, times the
               crowd max(1, p threads/cores) (rows: assignments/R, of the mean rank; route: of the
               tokens of all ranks, on each rank; numbers: shared parameters and those of local
               experts)
     rows      4 L all-to-alls (x, f(x), w dy, dx) of assignments_remote/R rows of d_model numbers
     gather    L all-to-alls that bring what routing needs to every rank: the logits of all tokens,
               T E numbers from every other rank, and little else
     counts    L (4 + gathers) + 3 all-to-alls of a few words: settings and tokens, statuses, rows
               for each expert, the loss
     sums      gradients of the parameters that all ranks hold, in L + 1 ranges, summed as in
               examples/extras/moe_mpi.h: two all-to-alls of 1/R of a range per pair of ranks
               (--ring: a ring, 2 (R - 1) messages of that size)
     waiting   for the busiest rank, which has `imbalance` times the mean's rows: max(0, imbalance -
               crowd) of the mean's expert time, imbalance - 1 of the time of the rows' bytes
     hidden    with C chunks: (1 - 1/C) of the smaller of expert time and rows, forward and backward
               separately; the latency of rows counts C times
   Local routing (moe_transport.local_routing): every rank routes only its own tokens; no gather,
   route of T tokens instead of N, and for the router's state a sum of 2 (E + 1) numbers and two
   more all-to-alls of a word.
   Two levels: rows for another machine go through the rank of the sender's machine that has the
   receiver's position there: p - 1 near messages and n - 1 far ones instead of p - 1 and R - p, and
   (p - 1)/p of the far bytes travel near as well, before anything else starts; an all-to-all of n
   words precedes each such exchange. Everything else uses one level.

   ASSUMPTIONS. The prediction of a run uses the times of the run with one rank, the links and the
   run's counts (assignments, remote ones, imbalance), never the run's own times.
   A rank sends one message after the other, near ones before far ones; no contention in switches;
   the far link of a machine is shared evenly. Messages progress while a rank computes (many MPIs
   need a thread for that). Ranks that wait leave their cores to others. Costs per row do not
   depend on how many rows there are, and p ranks on p cores do not slow each other down (they share
   caches and memory: measure with all cores busy, or expect less). Packing of rows is free. Nothing
   fails.
   Beyond what was measured: T is constant (weak scaling); E = max(E0, R), E0 measured; route and
   the logits grow with E (measured by moe_route with a batch, E 8 to 256: 2 to 17 ns per token and
   expert), other does not (scores of a linear router do); assignments per token are constant; the
   share of assignments that leave their rank is l (1 - 1/R), that leave the machine m (1 - 1/n),
   with l and m relative to random routing (1), measured on the most ranks and machines that were
   run; imbalance is that of the largest R' up to R for which it is known (fewer experts per rank
   make it larger, capacity bounds it), with global or local routing.
   Memory: moe_route keeps 29 to 60 bytes per token of the batch and expert on every rank
   (moe_route_batch_size, float, training); the tables say 30. That is for routing only:
   moe_layer_work_size also has room for all rows that local experts may receive.

   THE FILE. First line "moe-scale 1", then "key value" lines: head, then methods, each with its
   costs and its runs; the table below (keys) lists them. A method and the head may be continued
   further down, so that several programs can append to one file; a repeated value must be the same.
   # begins a comment.

   SOURCES OF THE NETWORK DEFAULTS. Published measurements with MPI between two machines:
     ib100  1.2 us, 12.3 GB/s  Omni-Path 12.38 GB/s
            (gist.github.com/hppritcha/8da4436a216c9d96bf10ad9d403da03f), 0.9 us and more than 10
            GB/s on 100 Gb/s (gist.github.com/jfgrimm/3af692a5475bdd4ed836b5a18197a209), ConnectX-6
            24.6 GB/s in both directions (github.com/openucx/ucx/issues/7245), 1.2 us Aries
            (gist.github.com/hppritcha/6a3acd0c192fcfd082bd543fc98e6fe6)
     tcp10  48 us, 1.19 GB/s   round trips of 92 to 100 us and 95 % of 10 Gb/s
            (blogs.scalablelogic.com/2014/01/enhanced-networking-in-aws-cloud-part-2.html)
     tcp1   25 us, 0.117 GB/s  TCP on 1 Gb/s, the middle column of jfgrimm's; 15 us and 118 MB/s
            elsewhere (www.nw-grid.ac.uk/LivMPI)
     near   0.2 us, 8 GB/s     0.18 us (github.com/open-mpi/ompi/issues/7861), 16 GB/s in both
            directions (github.com/openucx/ucx/issues/8210) */
#ifndef SCALE_H
#define SCALE_H


#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_METHODS = 8, MOST_RUNS = 16, POWERS = 17 /* 1 .. 65536 */, MOST_RANKS = 1024, MOST_BYTES = 1 << 20 };
enum { PASSES = 4, STEP_CALLS = 3, STEP_WORDS = 8 }; /* of a step of training */

/* ---- what is predicted ---- */

typedef struct wire {
    double latency, bandwidth; /* seconds per message, bytes per second and direction */
} wire;

typedef struct machine {
    wire near_link, far_link;
    double cores; /* of a machine */
    double ranks_per_machine;
    int one_machine; /* 1: the machines are declared, all ranks share these cores and everything travels by near_link */
    int two_level, chunks, ring, local_routing;
} machine;

/* Seconds, as in the file. */
typedef struct costs {
    double expert_forward, expert_backward; /* per row of one MoE layer */
    double route;                           /* per token of all ranks and MoE layer */
    double other;                           /* per own token */
    double optimizer;                       /* per number */
} costs;

/* One step of R ranks. */
typedef struct work {
    double ranks, tokens;                 /* tokens: per rank */
    double layers, experts, base_experts; /* base: when route was measured */
    double assignments;                         /* per token */
    double away, far;                     /* shares of the assignments */
    double imbalance;
    double d_model, real_bytes;
    double shared_numbers, expert_numbers;
    double threads;
    double gathers, gather_bytes; /* per MoE layer; bytes per token besides its logits */
} work;

/* The time of an exchange: what messages take without bytes, and what bytes take. */
typedef struct parts {
    double latency, bytes;
} parts;

/* Seconds of a step by cause, and its traffic. */
typedef struct times {
    double experts, route, other, optimizer; /* compute */
    parts rows, gather, counts, sums;        /* exchange */
    parts rows_inside;                       /* that part of rows that travels near */
    double waiting, hidden, step;
    /* of rows, that the mean rank sends in a step; with two levels, rows passing through count as
       near, too */
    double near_bytes, far_bytes;
    double near_messages, far_messages; /* of a rank in one all-to-all */
    /* that all ranks send in a step: rows on each hop, gathered data and counts, as in
       moe_traffic */
    double bytes;
    double memory; /* bytes that every rank keeps for all tokens, per MoE layer */
} times;

static double more(double a, double b) { return a > b ? a : b; }
static double less(double a, double b) { return a < b ? a : b; }

/* Ranks on a machine that has any. */
static double on_node(const machine *m, const work *w) { return less(w->ranks, m->ranks_per_machine); }

/* The slowdown of a rank compared to one with cores of its own. */
static double crowd(const machine *m, const work *w) {
    const double ranks = m->one_machine ? w->ranks : on_node(m, w);
    return more(1, ranks * w->threads / m->cores);
}

static double near_messages(const machine *m, const work *w) { return on_node(m, w) - 1; }

static double far_messages(const machine *m, const work *w) {
    const double p = on_node(m, w);
    return m->two_level ? w->ranks / p - 1 : w->ranks - p;
}

/* Far bytes that also travel inside the machine, to the rank that sends them on. */
static double passing(const machine *m, const work *w, double far_bytes) {
    const double p = on_node(m, w);
    return m->two_level ? far_bytes * (p - 1) / p : 0;
}

/* An all-to-all in which every rank sends near_bytes inside its machine and far_bytes to others:
   the part inside, including what passes through, and the part between machines. */
static parts inside(const machine *m, const work *w, double near_bytes, double far_bytes) {
    const double slow = crowd(m, w);
    parts t;
    t.latency = near_messages(m, w) * slow * m->near_link.latency;
    t.bytes = (near_bytes + passing(m, w, far_bytes)) * slow / m->near_link.bandwidth;
    return t;
}

static parts across(const machine *m, const work *w, double far_bytes) {
    const double slow = crowd(m, w);
    parts t;
    t.latency = far_messages(m, w) * (m->one_machine ? slow * m->near_link.latency : m->far_link.latency);
    t.bytes =
        m->one_machine ? far_bytes * slow / m->near_link.bandwidth : far_bytes * on_node(m, w) / m->far_link.bandwidth;
    return t;
}

static parts sum_of_two(parts a, parts b) {
    a.latency += b.latency;
    a.bytes += b.bytes;
    return a;
}

static parts scaled(parts t, double factor) {
    t.latency *= factor;
    t.bytes *= factor;
    return t;
}

static double total(parts t) { return t.latency + t.bytes; }

/* An exchange with the same number of bytes to each rank, on one level. */
static parts to_all(const machine *m, const work *w, double bytes) {
    const double p = on_node(m, w);
    machine direct = *m;
    direct.two_level = 0;
    return sum_of_two(inside(&direct, w, (p - 1) * bytes, 0), across(&direct, w, (w->ranks - p) * bytes));
}

/* Each step of a ring takes as long as its slowest hop; one rank of a machine sends to another
   machine at a time. */
static parts ring_sum(const machine *m, const work *w, double bytes) {
    const double steps = 2 * (w->ranks - 1), slow = crowd(m, w);
    const double part = bytes / w->ranks;
    const int is_far = !m->one_machine && w->ranks > m->ranks_per_machine;
    parts t;
    t.latency = slow * m->near_link.latency;
    t.bytes = part * slow / m->near_link.bandwidth;
    if (is_far) {
        t.latency = more(t.latency, m->far_link.latency);
        t.bytes = more(t.bytes, part / m->far_link.bandwidth);
    }
    return scaled(t, steps);
}

/* Every rank sums a part and sends the sums to all. */
static parts sum_of(const machine *m, const work *w, double bytes) {
    return m->ring ? ring_sum(m, w, bytes) : scaled(to_all(m, w, bytes / w->ranks), 2);
}

/* The part of the exchanges before and after the experts that chunks hide behind computing: all but
   the dispatch of the first chunk and the combine of the last one. */
static double hidden(const machine *m, double computing, double moving) {
    return (1 - 1 / (double)m->chunks) * less(computing, moving);
}

/* Bytes of the rows of the mean rank, in one pass of one MoE layer. */
static double pass_bytes(const work *w, double share) {
    return w->tokens * w->assignments * share * w->d_model * w->real_bytes;
}

static void predict_compute(const machine *m, const costs *c, const work *w, times *t) {
    const double slow = crowd(m, w);
    const double rows = w->layers * w->tokens * w->assignments, all_tokens = w->ranks * w->tokens;
    const double numbers = w->shared_numbers + w->layers * w->expert_numbers * w->experts / w->ranks;
    t->experts = slow * rows * (c->expert_forward + c->expert_backward);
    t->route = slow * w->layers * (m->local_routing ? w->tokens : all_tokens) * c->route * w->experts / w->base_experts;
    t->other = slow * w->tokens * c->other;
    t->optimizer = slow * numbers * c->optimizer;
}

/* With local routing nothing is gathered; the counts for the router's state are summed, each as two
   numbers, and two words are exchanged. */
static double gathers(const machine *m, const work *w) { return m->local_routing ? 0 : w->gathers; }

static parts sum_of_state(const machine *m, const work *w) {
    enum { FEW = 512 }; /* up to this many, every rank sends all of them to all others */
    const double numbers = 2 * (w->experts + 1);
    const parts none = {0, 0};
    if (!m->local_routing) return none;
    return numbers <= FEW ? to_all(m, w, numbers * w->real_bytes) : sum_of(m, w, numbers * w->real_bytes);
}

/* Words of 8 bytes that every rank sends to every other for one MoE layer: 5 and 1 to begin with, 1
   before each gathering, a status and the rows of each expert; 1 in the backward pass. */
static double count_words(const machine *m, const work *w) {
    return 8 + gathers(m, w) + 2 * m->local_routing + ceil(w->experts / w->ranks);
}

/* The same for the hops of two levels, which tell the ranks of a machine how much will pass. */
static int hops(const machine *m, const work *w) {
    return m->two_level && w->ranks > m->ranks_per_machine ? PASSES * m->chunks : 0;
}

static void predict_rows(const machine *m, const work *w, double near_pass, double far_pass, times *t) {
    const double all = PASSES * w->layers;
    t->rows_inside = scaled(inside(m, w, near_pass, far_pass), all);
    t->rows_inside.latency *= m->chunks;
    t->rows = scaled(across(m, w, far_pass), all);
    t->rows.latency *= m->chunks;
    t->rows = sum_of_two(t->rows, t->rows_inside);
    t->near_bytes = all * (near_pass + passing(m, w, far_pass));
    t->far_bytes = all * far_pass;
    t->near_messages = near_messages(m, w);
    t->far_messages = far_messages(m, w);
}

static void predict_exchange(const machine *m, const work *w, times *t) {
    const double gathered = m->local_routing ? 0 : w->tokens * (w->experts * w->real_bytes + w->gather_bytes);
    const double nodes = w->ranks / on_node(m, w), others = w->ranks - 1;
    const double kept = w->tokens * (m->local_routing ? 1 : w->ranks);
    const double counts =
        8 * (w->layers * (count_words(m, w) + hops(m, w) * nodes) + STEP_WORDS + 2 * m->local_routing);
    predict_rows(m, w, pass_bytes(w, w->away - w->far), pass_bytes(w, w->far), t);
    t->gather = scaled(to_all(m, w, gathered), w->layers);
    t->gather.latency *= gathers(m, w);
    t->counts = to_all(m, w, counts);
    t->counts.latency *=
        w->layers * (4 + gathers(m, w) + 2 * m->local_routing + hops(m, w)) + STEP_CALLS + m->local_routing;
    t->sums = sum_of(m, w, w->shared_numbers * w->real_bytes);
    t->sums.latency *= w->layers + 1;
    t->sums = sum_of_two(t->sums, scaled(sum_of_state(m, w), w->layers));
    t->bytes = w->ranks * (t->near_bytes + t->far_bytes + others * (w->layers * gathered + counts));
    t->memory = kept * w->experts * 7.5 * w->real_bytes;
}

static times predict(const machine *m, const costs *c, const work *w) {
    const double slow = crowd(m, w), forward = c->expert_forward / more(1e-300, c->expert_forward + c->expert_backward);
    times t;
    double moving;
    predict_compute(m, c, w, &t);
    predict_exchange(m, w, &t);
    /* the first of two hops ends before anything else begins */
    moving = (total(t.rows) - (m->two_level ? total(t.rows_inside) : 0)) / 2;
    t.waiting = more(0, w->imbalance / slow - 1) * t.experts + (w->imbalance - 1) * t.rows.bytes;
    t.hidden = hidden(m, forward * t.experts, moving) + hidden(m, (1 - forward) * t.experts, moving);
    t.step = t.experts + t.route + t.other + t.optimizer + total(t.rows) + total(t.gather) + total(t.counts) +
             total(t.sums) + t.waiting - t.hidden;
    return t;
}

/* ---- measurements ---- */

typedef struct figures {
    double cores, threads, real_bytes, d_model, experts, layers, near_latency, near_bandwidth;
} figures;

typedef struct a_run {
    double ranks, tokens, ranks_per_machine, two_level, chunks, local_routing, step, compute, exchange, waiting;
    double assignments, assignments_remote, assignments_off_machine, rows_sent, bytes_sent, imbalance, loss;
    double imbalance_at[POWERS]; /* of 2^i ranks */
} a_run;

typedef struct a_method {
    char name[24];
    double top_k, capacity_factor, expert_forward, expert_backward, route, optimizer, other, shared_numbers,
        expert_numbers, experts_most, gathers, gather_bytes;
    a_run runs[MOST_RUNS];
    int n_runs;
} a_method;

typedef struct measurements {
    figures head;
    a_method methods[MOST_METHODS];
    int n_methods;
    char wrong[200]; /* what is wrong with the file, or "" */
} measurements;

#define UNKNOWN (-1.0)
static int known(double value) { return value >= 0; }

enum { HEAD, METHOD, RUN };
static const struct key {
    const char *name;
    int level, whole;
    double least, most;
    size_t at;
    const char *help;
} keys[] = {
    {"cores", HEAD, 1, 1, 1e6, offsetof(figures, cores), "processor cores that the ranks share"},
    {"threads", HEAD, 1, 1, 1e6, offsetof(figures, threads), "threads of a rank [1]"},
    {"real_bytes", HEAD, 1, 4, 8, offsetof(figures, real_bytes), "of a number"},
    {"d_model", HEAD, 1, 1, 1e8, offsetof(figures, d_model), "numbers of a row"},
    {"experts", HEAD, 1, 1, 65536, offsetof(figures, experts), "of one MoE layer"},
    {"layers", HEAD, 1, 1, 1e4, offsetof(figures, layers), "MoE layers"},
    {"near_latency", HEAD, 0, 1e-12, 10, offsetof(figures, near_latency),
     "seconds per message between two ranks here [0.2e-6]"},
    {"near_bandwidth", HEAD, 0, 1, 1e15, offsetof(figures, near_bandwidth), "bytes per second in one direction [8e9]"},
    {"top_k", METHOD, 1, 1, 65536, offsetof(a_method, top_k), "experts per token before capacity"},
    {"capacity_factor", METHOD, 0, 0, 1e6, offsetof(a_method, capacity_factor), "for the heading"},
    {"expert_forward", METHOD, 0, 0, 10, offsetof(a_method, expert_forward),
     "seconds per row at an expert, one MoE layer"},
    {"expert_backward", METHOD, 0, 0, 10, offsetof(a_method, expert_backward), "the same, backward"},
    {"route", METHOD, 0, 0, 10, offsetof(a_method, route), "seconds per token of all ranks and MoE layer [0]"},
    {"optimizer", METHOD, 0, 0, 1, offsetof(a_method, optimizer), "seconds per number [0]"},
    {"other", METHOD, 0, 0, 100, offsetof(a_method, other),
     "seconds per local token for everything else [what is left of the step with one rank]"},
    {"shared_numbers", METHOD, 1, 0, 1e15, offsetof(a_method, shared_numbers), "parameters that every rank holds"},
    {"expert_numbers", METHOD, 1, 0, 1e15, offsetof(a_method, expert_numbers), "parameters of one expert"},
    {"experts_most", METHOD, 1, 0, 65536, offsetof(a_method, experts_most),
     "the number of experts must divide this [0: any]"},
    {"gathers", METHOD, 1, 0, 1e4, offsetof(a_method, gathers),
     "arrays of all tokens that every rank gathers, per MoE layer [2: padding, logits]"},
    {"gather_bytes", METHOD, 0, 0, 1e9, offsetof(a_method, gather_bytes), "their bytes besides logits, per token [1]"},
    {"tokens", RUN, 1, 1, 1e12, offsetof(a_run, tokens), "per step, all ranks together"},
    {"ranks_per_machine", RUN, 1, 1, 65536, offsetof(a_run, ranks_per_machine), "as declared [all]"},
    {"two_level", RUN, 1, 0, 1, offsetof(a_run, two_level), "[0]"},
    {"chunks", RUN, 1, 1, 65536, offsetof(a_run, chunks), "[1]"},
    {"local_routing", RUN, 1, 0, 1, offsetof(a_run, local_routing),
     "1: every rank routes its own tokens [0: global routing]"},
    {"step", RUN, 0, 1e-12, 1e6, offsetof(a_run, step), "seconds, median"},
    {"compute", RUN, 0, 0, 1e6, offsetof(a_run, compute), "seconds per step, mean over ranks"},
    {"exchange", RUN, 0, 0, 1e6, offsetof(a_run, exchange), "seconds per step in the transport"},
    {"waiting", RUN, 0, 0, 1e6, offsetof(a_run, waiting), "seconds per step for other ranks"},
    {"assignments", RUN, 0, 0, 1e15, offsetof(a_run, assignments),
     "token-expert assignments, one MoE layer, all ranks"},
    {"assignments_remote", RUN, 0, 0, 1e15, offsetof(a_run, assignments_remote),
     "those to experts of other ranks"},
    {"assignments_off_machine", RUN, 0, 0, 1e15, offsetof(a_run, assignments_off_machine), "... on another machine"},
    {"rows_sent", RUN, 0, 0, 1e15, offsetof(a_run, rows_sent), "to other ranks, four passes, one MoE layer, all ranks"},
    {"bytes_sent", RUN, 0, 0, 1e18, offsetof(a_run, bytes_sent),
     "to other ranks per step, by all MoE layers of all ranks"},
    {"imbalance", RUN, 0, 1, 65536, offsetof(a_run, imbalance), "rows of the busiest rank divided by the mean"},
    {"loss", RUN, 0, 0, 1e30, offsetof(a_run, loss), "for the heading"}};
enum { KEYS = sizeof keys / sizeof *keys };

static void set_unknown(double *from, size_t count) {
    size_t i;
    for (i = 0; i < count; i++) from[i] = UNKNOWN;
}

static double *field(char *record, size_t at) { return (double *)(void *)(record + at); }

static void forget(char *record, int level) {
    int i;
    for (i = 0; i < KEYS; i++)
        if (keys[i].level == level) *field(record, keys[i].at) = UNKNOWN;
}

/* The state of the reader. */
typedef struct reading {
    measurements *m;
    a_method *method;
    a_run *run;
    int line;
} reading;

static int complain(reading *r, const char *format, const char *what, const char *why) {
    char text[160];
    snprintf(text, sizeof text, format, what, why);
    snprintf(r->m->wrong, sizeof r->m->wrong, "line %d: %s", r->line, text);
    return 0;
}

static int read_number(const char *text, double *value) {
    char *end;
    *value = strtod(text, &end);
    return end != text && *end == '\0' && *value >= 0 && *value <= 1e30;
}

static int power_of(double ranks) {
    int i = 0;
    while (i < POWERS - 1 && ldexp(1, i) < ranks) i++;
    return i;
}

static int is_power(double ranks) { return ldexp(1, power_of(ranks)) - ranks == 0; }

static int start_method(reading *r, const char *name) {
    measurements *m = r->m;
    int i = 0;
    if (strlen(name) >= sizeof m->methods[0].name || name[0] == '\0')
        return complain(r, "method %s: 1 to 23 letters%s", name, "");
    while (i < m->n_methods && strcmp(m->methods[i].name, name) != 0) i++;
    if (i == MOST_METHODS) return complain(r, "method %s: more than 8 methods%s", name, "");
    r->method = m->methods + i;
    r->run = NULL;
    if (i < m->n_methods) return 1;
    m->n_methods++;
    strcpy(r->method->name, name);
    forget((char *)r->method, METHOD);
    return 1;
}

static int start_run(reading *r, const char *text) {
    double ranks;
    int i;
    if (r->method == NULL) return complain(r, "run %s: there is no method above it%s", text, "");
    if (!read_number(text, &ranks) || ranks < 1 || ranks > 65536 || floor(ranks) < ranks)
        return complain(r, "run %s: not a number of ranks%s", text, "");
    for (i = 0; i < r->method->n_runs; i++)
        if (r->method->runs[i].ranks - ranks == 0)
            return complain(r, "run %s occurs twice for method %s", text, r->method->name);
    if (i == MOST_RUNS) return complain(r, "run %s: more than 16 runs of method %s", text, r->method->name);
    r->run = r->method->runs + r->method->n_runs++;
    forget((char *)r->run, RUN);
    r->run->ranks = ranks;
    set_unknown(r->run->imbalance_at, POWERS);
    return 1;
}

/* A value may be repeated. */
static int keep_value(reading *r, const char *name, double *place, double value) {
    if (known(*place) && fabs(*place - value) > 1e-9 * value)
        return complain(r, "%s has another value above%s: runs of different configurations in one file?", name, "");
    *place = value;
    return 1;
}

static int read_imbalance_at(reading *r, const char *name, const char *text) {
    double ranks, value;
    if (!read_number(name + strlen("imbalance_at_"), &ranks) || !is_power(ranks) || ranks > 65536)
        return complain(r, "%s: ranks are a power of 2 up to 65536%s", name, "");
    if (r->run == NULL) return complain(r, "%s: there is no run above it%s", name, "");
    if (!read_number(text, &value) || value < 1 || value > ranks + 1e-6)
        return complain(r, "%s %s: not from 1 to the number of ranks", name, text);
    return keep_value(r, name, r->run->imbalance_at + power_of(ranks), value);
}

static int read_value(reading *r, const char *name, const char *text) {
    const struct key *k = keys;
    double value;
    char *record;
    if (strncmp(name, "imbalance_at_", strlen("imbalance_at_")) == 0) return read_imbalance_at(r, name, text);
    while (k < keys + KEYS && strcmp(k->name, name) != 0) k++;
    if (k == keys + KEYS) return complain(r, "%s: no such key%s; -h lists them", name, "");
    record = k->level == HEAD ? (char *)&r->m->head : k->level == METHOD ? (char *)r->method : (char *)r->run;
    if (record == NULL) return complain(r, "%s: there is no %s above it", name, k->level == METHOD ? "method" : "run");
    if (!read_number(text, &value) || value < k->least || value > k->most || (k->whole && floor(value) < value))
        return complain(r, "%s %s: not a value that it can have", name, text);
    return keep_value(r, name, field(record, k->at), value);
}

/* A line without its end: empty, a comment, or a key and a value. */
static int read_line(reading *r, const char *line, size_t length) {
    char key[40], value[40], rest[2], copy[120];
    int words;
    if (length >= sizeof copy)
        return length > 0 && line[0] == '#' ? 1 : complain(r, "it is longer than 119 bytes%s%s", "", "");
    memcpy(copy, line, length);
    copy[length] = '\0';
    if (memchr(copy, '\0', length) != NULL) return complain(r, "it contains a zero byte%s%s", "", "");
    words = sscanf(copy, "%39s %39s %1s", key, value, rest);
    if (words <= 0 || key[0] == '#') return 1;
    if (words != 2) return complain(r, "%s: a line is a key and a value%s", key, "");
    if (strcmp(key, "method") == 0) return start_method(r, value);
    return strcmp(key, "run") == 0 ? start_run(r, value) : read_value(r, key, value);
}

static int incomplete(measurements *m, const char *where, const char *what) {
    snprintf(m->wrong, sizeof m->wrong, "%s: %s", where, what);
    return 0;
}

static a_run *find_run(a_method *f, double ranks) {
    int i;
    for (i = 0; i < f->n_runs; i++)
        if (f->runs[i].ranks - ranks == 0) return f->runs + i;
    return NULL;
}

static void set_default(double *value, double usual) {
    if (!known(*value)) *value = usual;
}

static int check_run(measurements *m, const a_method *f, a_run *r) {
    char where[80];
    snprintf(where, sizeof where, "method %s, run %.0f", f->name, r->ranks);
    if (!known(r->tokens) || !known(r->step) || !known(r->assignments))
        return incomplete(m, where, "tokens, step or assignments are missing");
    if (r->ranks > m->head.experts) return incomplete(m, where, "there are more ranks than experts");
    if (r->ranks > 1 && !known(r->assignments_remote)) return incomplete(m, where, "assignments_remote is missing");
    set_default(&r->ranks_per_machine, r->ranks);
    set_default(&r->two_level, 0);
    set_default(&r->chunks, 1);
    set_default(&r->local_routing, 0);
    set_default(&r->assignments_remote, 0);
    set_default(&r->assignments_off_machine, 0);
    if (fmod(r->ranks, r->ranks_per_machine) > 0)
        return incomplete(m, where, "ranks_per_machine must divide the ranks");
    if (r->assignments_remote > r->assignments * (1 + 1e-9) ||
        r->assignments_off_machine > r->assignments_remote * (1 + 1e-9))
        return incomplete(m, where, "assignments >= assignments_remote >= assignments_off_machine does not hold");
    if (known(r->rows_sent) && r->two_level <= 0 &&
        fabs(r->rows_sent - PASSES * r->assignments_remote) > 0.01 * r->rows_sent)
        return incomplete(m, where, "rows_sent is not 4 assignments_remote: x, f(x), w dy and dx");
    if (r->assignments > r->tokens * m->head.experts)
        return incomplete(m, where, "there are more assignments than tokens times experts");
    if (known(r->imbalance) && r->imbalance > r->ranks * (1 + 1e-6))
        return incomplete(m, where, "imbalance is above the number of ranks");
    return 1;
}

static double own_numbers(const figures *h, const a_method *f) {
    return f->shared_numbers + h->layers * h->experts * f->expert_numbers;
}

/* The time per token of the step with one rank, less everything that has a measured cost of its
   own. */
static double left_over(const figures *h, const a_method *f, const a_run *one) {
    const double rows = one->assignments * (f->expert_forward + f->expert_backward), decide = one->tokens * f->route;
    return (one->step - h->layers * (rows + decide) - own_numbers(h, f) * f->optimizer) / one->tokens;
}

static int check_method(measurements *m, a_method *f) {
    a_run *one = find_run(f, 1);
    int i;
    if (!known(f->expert_forward) || !known(f->expert_backward) || !known(f->shared_numbers) ||
        !known(f->expert_numbers))
        return incomplete(m, f->name,
                          "expert_forward, expert_backward, shared_numbers or expert_numbers are missing: the program "
                          "writes them with one rank");
    for (i = 0; i < f->n_runs; i++)
        if (!check_run(m, f, f->runs + i)) return 0;
    if (one == NULL) return incomplete(m, f->name, "the run with one rank is missing");
    set_default(&f->route, 0);
    set_default(&f->optimizer, 0);
    set_default(&f->experts_most, 0);
    set_default(&f->gathers, 2);
    set_default(&f->gather_bytes, 1);
    if (known(f->other)) return 1;
    f->other = left_over(&m->head, f, one);
    if (f->other * one->tokens < -0.5 * one->step)
        return incomplete(m, f->name,
                          "the costs add up to more than 1.5 times the step with one rank: not measured together?");
    f->other = more(0, f->other);
    return 1;
}

static int check_all(measurements *m) {
    figures *h = &m->head;
    int i;
    if (!known(h->cores) || !known(h->real_bytes) || !known(h->d_model) || !known(h->experts) || !known(h->layers))
        return incomplete(m, "the head", "cores, real_bytes, d_model, experts or layers are missing");
    if (m->n_methods == 0) return incomplete(m, "the file", "it has no method");
    set_default(&h->threads, 1);
    set_default(&h->near_latency, 0.2e-6);
    set_default(&h->near_bandwidth, 8e9);
    for (i = 0; i < m->n_methods; i++)
        if (!check_method(m, m->methods + i)) return 0;
    return 1;
}

/* Returns 1, or 0 with a message in m->wrong. */
static int read_measurements(measurements *m, const char *text, size_t size) {
    const char *end = text + size, *stop;
    reading r;
    memset(m, 0, sizeof *m);
    memset(&r, 0, sizeof r);
    forget((char *)&m->head, HEAD);
    for (r.m = m, r.line = 1; text < end; text = stop + 1, r.line++) {
        stop = (const char *)memchr(text, '\n', (size_t)(end - text));
        if (stop == NULL) return complain(&r, "the line does not end%s%s", "", "");
        if (r.line == 1 && ((size_t)(stop - text) != 11 || memcmp(text, "moe-scale 1", 11) != 0))
            return complain(&r, "it is not \"%s\"%s", "moe-scale 1", "");
        if (r.line > 1 && !read_line(&r, text, (size_t)(stop - text))) return 0;
    }
    return check_all(m);
}

/* ---- from measurements to work ---- */

static costs costs_of(const a_method *f) {
    costs c;
    c.expert_forward = f->expert_forward;
    c.expert_backward = f->expert_backward;
    c.route = f->route;
    c.other = f->other;
    c.optimizer = f->optimizer;
    return c;
}

static work work_of(const figures *h, const a_method *f) {
    work w;
    memset(&w, 0, sizeof w);
    w.layers = h->layers;
    w.experts = w.base_experts = h->experts;
    w.d_model = h->d_model;
    w.real_bytes = h->real_bytes;
    w.threads = h->threads;
    w.gathers = f->gathers;
    w.gather_bytes = f->gather_bytes;
    w.shared_numbers = f->shared_numbers;
    w.expert_numbers = f->expert_numbers;
    w.imbalance = 1;
    return w;
}

/* The work of a run, from its counts. */
static work work_of_run(const figures *h, a_method *f, const a_run *r) {
    const a_run *one = find_run(f, 1);
    const double at = one->imbalance_at[power_of(r->ranks)];
    work w = work_of(h, f);
    w.ranks = r->ranks;
    w.tokens = r->tokens / r->ranks;
    w.assignments = r->assignments / r->tokens;
    if (r->assignments > 0) {
        w.away = r->assignments_remote / r->assignments;
        w.far = r->assignments_off_machine / r->assignments;
    }
    if (r->ranks > 1) w.imbalance = known(r->imbalance) ? r->imbalance : is_power(r->ranks) && known(at) ? at : 1;
    return w;
}

static machine machine_of_run(const figures *h, const a_run *r) {
    machine m;
    memset(&m, 0, sizeof m);
    m.near_link.latency = h->near_latency;
    m.near_link.bandwidth = h->near_bandwidth;
    m.far_link = m.near_link;
    m.cores = h->cores;
    m.ranks_per_machine = r->ranks_per_machine;
    m.one_machine = 1;
    m.two_level = r->two_level > 0;
    m.local_routing = r->local_routing > 0;
    m.chunks = (int)r->chunks;
    return m;
}

/* The share of assignments that leave their rank or machine, relative to random routing: of the run
   with the most ranks or machines; UNKNOWN if none has more than one. */
static double locality(const a_method *f, int of_nodes) {
    double most = 1, found = UNKNOWN;
    int i;
    for (i = 0; i < f->n_runs; i++) {
        const a_run *r = f->runs + i;
        const double homes = of_nodes ? r->ranks / r->ranks_per_machine : r->ranks;
        if (homes > most && r->assignments > 0) {
            most = homes;
            found = (of_nodes ? r->assignments_off_machine : r->assignments_remote) / r->assignments / (1 - 1 / homes);
        }
    }
    return found;
}

static double random_away(double homes) { return 1 - 1 / homes; }

static double imbalance_up_to(a_method *f, double ranks) {
    const a_run *one = find_run(f, 1);
    double imbalance = 1;
    int i;
    for (i = 1; i <= power_of(ranks); i++) {
        const a_run *r = find_run(f, ldexp(1, i));
        if (known(one->imbalance_at[i])) imbalance = one->imbalance_at[i];
        else if (r != NULL && known(r->imbalance)) imbalance = r->imbalance;
    }
    return imbalance;
}

/* The work of `ranks` ranks with `tokens` tokens each. */
static work work_beyond(const figures *h, a_method *f, double ranks, double ranks_per_machine, double tokens) {
    const a_run *one = find_run(f, 1);
    const double nodes = ranks > ranks_per_machine ? ranks / ranks_per_machine : 1;
    const double l = locality(f, 0), k = locality(f, 1);
    work w = work_of(h, f);
    w.ranks = ranks;
    w.tokens = tokens;
    w.assignments = one->assignments / one->tokens;
    w.experts = more(h->experts, ranks);
    w.away = less(1, (known(l) ? l : 1) * random_away(ranks));
    w.far = less(w.away, (known(k) ? k : known(l) ? l : 1) * random_away(nodes));
    w.imbalance = imbalance_up_to(f, ranks);
    return w;
}

static int can_have(const a_method *f, double experts) {
    return f->experts_most <= 0 || (experts <= f->experts_most && fmod(f->experts_most, experts) <= 0);
}

/* Seconds of a step that a rank computes, and exchanges. */
static double computing(const times *t) { return t->experts + t->route + t->other + t->optimizer; }
static double moving(const times *t) { return total(t->rows) + total(t->gather) + total(t->counts) + total(t->sums); }

#endif
