/* A small model of scale: from costs measured on one machine it predicts the time of a training step on 1 to 1024 ranks (processes that share the
   experts, moe.h "experts on several machines") and shows how far it is from what was measured on a few.
       cc -std=c99 -O2 -I. tests/scale.c -o scale -lm && ./scale
   ./scale tests the model; ./scale FILE prints its tables for the measurements in FILE (`sh examples/run mpi --measure FILE` writes them); -h explains.

   THE MODEL. R ranks, p of them on each node, n = R/p nodes; T tokens per rank and step, N = R T; L mixtures of E experts, rank r has E/R
   of them. A link takes a + b/B seconds for a message of b bytes: a its latency, B its bandwidth, for both directions at a time (full
   duplex). near: inside a node, for every rank; far: between nodes, for all ranks of a node together. An all-to-all is R - 1 messages of
   every rank.
     compute   L rows (forward + backward) + T other + L N route E/E0 + numbers optimiser, times the crowd max(1, p threads/cores)
               (rows: pairs/R, of the mean rank; route: what each rank decides for the tokens of all ranks; numbers: shared ones and those
               of own experts)
     rows      4 L all-to-alls (x, f(x), w dy, dx) of pairs_away/R rows of d_model numbers
     gather    L all-to-alls that bring what a decision needs to every rank: the logits of all tokens, T E numbers from every other rank,
               and little else
     counts    L (4 + gathers) + 3 all-to-alls of a few words: settings and tokens, whether all is well, rows for each expert, the loss
     sums      gradients of what all ranks hold, L + 1 stretches of them, as examples/moe_mpi.h adds them: two all-to-alls of 1/R of a
               stretch per pair of ranks (--ring: a ring, 2 (R - 1) messages of as much)
     waiting   for the fullest rank, which has `imbalance` times the mean's rows: max(0, imbalance - crowd) of the mean's expert time,
               imbalance - 1 of the bytes of rows
     hidden    with C chunks: (1 - 1/C) of the smaller one of expert time and rows, forward and backward apart; the latency of rows counts C
               times
   Apart (moe_transport.apart): every rank decides for its own tokens alone; no gather, route of T tokens instead of N, and for the router's state
   a sum of E + 1 numbers and two more all-to-alls of a word.
   Two levels: rows for another node go through the rank of the own node that has their goal's place there: p - 1 near messages and n - 1
   far ones instead of p - 1 and R - p, and (p - 1)/p of the far bytes travel near as well, before anything else goes on; an
   all-to-all of n words precedes each such exchange. All else goes by one level.

   WHAT IS ASSUMED. A run is compared with times that come from the run with one rank, from links and from counts (pairs, those away,
   imbalance), never from that run's own times.
   Messages of a rank follow each other, near ones before far ones; no contention in switches; the far link of a node is shared evenly. What
   is under way moves on while a rank computes (many MPIs need a thread for that). Ranks that wait leave their cores to others. Costs per
   row do not depend on how many rows there are, and p ranks on p cores do not slow each other down (they share caches and memory: measure
   with all cores busy, or expect less). Packing of rows is free. Nothing fails.
   Beyond what was measured: T stays (weak scaling); E = max(E0, R), E0 measured; route and the logits grow with E (measured by moe_route
   with a batch, E 8 to 256: 2 to 17 ns per token and expert), other does not (scores of a linear router do); pairs per token stay; the
   share of pairs that leave home is l (1 - 1/R), that leave the node m (1 - 1/n), l and m measured against 1, random routing, on the most
   ranks and nodes that were run; imbalance is that of the largest R' up to R of which it is known (fewer experts per rank make it larger,
   capacity bounds it), apart or together.
   Memory: moe_route keeps 29 to 60 bytes per token of the batch and expert on every rank (moe_route_batch_size, float, training); the
   tables say 30. That is the decision alone: moe_layer_work_size has room for all rows that may come to the own experts besides.

   THE FILE. First line "moe-scale 1", then "key value" lines: head, then methods, each with its costs and its runs; the tables below (keys)
   say which. A method and the head may be continued further down, so that several programs can append to one file; a value that comes again
   must be the same. # begins a remark.

   WHERE NETWORKS' DEFAULTS COME FROM. Measured by others with MPI between two nodes, as published:
     ib100  1.2 us, 12.3 GB/s  Omni-Path 12.38 GB/s (gist.github.com/hppritcha/8da4436a216c9d96bf10ad9d403da03f), 0.9 us and more than 10
            GB/s on 100 Gb/s (gist.github.com/jfgrimm/3af692a5475bdd4ed836b5a18197a209), ConnectX-6 24.6 GB/s in both directions
            (github.com/openucx/ucx/issues/7245), 1.2 us Aries (gist.github.com/hppritcha/6a3acd0c192fcfd082bd543fc98e6fe6)
     tcp10  48 us, 1.19 GB/s   round trips of 92 to 100 us and 95 % of 10 Gb/s
            (blogs.scalablelogic.com/2014/01/enhanced-networking-in-aws-cloud-part-2.html)
     tcp1   25 us, 0.117 GB/s  TCP on 1 Gb/s, the middle column of jfgrimm's; 15 us and 118 MB/s elsewhere (www.nw-grid.ac.uk/LivMPI)
     near   0.2 us, 8 GB/s     0.18 us (github.com/open-mpi/ompi/issues/7861), 16 GB/s in both directions
            (github.com/openucx/ucx/issues/8210)*/

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_METHODS = 8, MOST_RUNS = 16, POWERS = 17 /* 1 .. 65536 */, MOST_RANKS = 1024, MOST_BYTES = 1 << 20 };
enum { PASSES = 4, STEP_CALLS = 3, STEP_WORDS = 8 }; /* of a step of training */

/* ---- what is predicted ------------------------------------------------------------------------------------------------------------ */

typedef struct wire {
    double latency, bandwidth; /* seconds per message, bytes per second and direction */
} wire;

typedef struct machine {
    wire near_link, far_link;
    double cores; /* of a node */
    double ranks_per_node;
    int one_machine; /* 1: the nodes are declared, all ranks share these cores and everything travels by near_link */
    int two_level, chunks, ring, apart;
} machine;

/* Seconds, as the file has them. */
typedef struct costs {
    double expert_forward, expert_backward; /* per row of one mixture */
    double route;                           /* per token of all ranks and mixture */
    double other;                           /* per own token */
    double optimiser;                       /* per number */
} costs;

/* One step of R ranks. */
typedef struct work {
    double ranks, tokens;                 /* tokens: per rank */
    double layers, experts, base_experts; /* base: when route was measured */
    double pairs;                         /* per token */
    double away, far;                     /* shares of the pairs */
    double imbalance;
    double d_model, real_bytes;
    double shared_numbers, expert_numbers;
    double threads;
    double gathers, gather_bytes; /* per mixture; bytes per token besides its logits */
} work;

/* The time of an exchange: what messages take without bytes, and what bytes take. */
typedef struct parts {
    double latency, bytes;
} parts;

/* Seconds of a step by their reason, and what travels. */
typedef struct times {
    double experts, route, other, optimiser; /* compute */
    parts rows, gather, counts, sums;        /* exchange */
    parts rows_inside;                       /* that part of rows that travels near */
    double waiting, hidden, step;
    double near_bytes, far_bytes;            /* of rows, that the mean rank sends in a step; with two levels what passes through is near as well */
    double near_messages, far_messages; /* of a rank in one all-to-all */
    double bytes;  /* that all ranks send in a step: rows, on each hop, what is gathered and counts, as moe_traffic has it */
    double memory; /* bytes of what every rank keeps of all tokens, per mixture */
} times;

static double more(double a, double b) { return a > b ? a : b; }
static double less(double a, double b) { return a < b ? a : b; }

/* Ranks on a node that holds any. */
static double on_node(const machine *m, const work *w) { return less(w->ranks, m->ranks_per_node); }

/* How much slower a rank is than one that has its cores for itself. */
static double crowd(const machine *m, const work *w) {
    const double ranks = m->one_machine ? w->ranks : on_node(m, w);
    return more(1, ranks * w->threads / m->cores);
}

static double near_messages(const machine *m, const work *w) { return on_node(m, w) - 1; }

static double far_messages(const machine *m, const work *w) {
    const double p = on_node(m, w);
    return m->two_level ? w->ranks / p - 1 : w->ranks - p;
}

/* Far bytes that travel inside the node as well, on their way to the rank that sends them off. */
static double passing(const machine *m, const work *w, double far_bytes) {
    const double p = on_node(m, w);
    return m->two_level ? far_bytes * (p - 1) / p : 0;
}

/* An all-to-all in which every rank sends so many bytes to the ranks of its node: the part inside, with what passes through; and the part between nodes. */
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
    t.bytes = m->one_machine ? far_bytes * slow / m->near_link.bandwidth : far_bytes * on_node(m, w) / m->far_link.bandwidth;
    return t;
}

static parts sum_of_two(parts a, parts b) {
    a.latency += b.latency, a.bytes += b.bytes;
    return a;
}

static parts scaled(parts t, double factor) {
    t.latency *= factor, t.bytes *= factor;
    return t;
}

static double total(parts t) { return t.latency + t.bytes; }

/* What goes to all ranks alike, so many bytes to each, on one level. */
static parts to_all(const machine *m, const work *w, double bytes) {
    const double p = on_node(m, w);
    machine direct = *m;
    direct.two_level = 0;
    return sum_of_two(inside(&direct, w, (p - 1) * bytes, 0), across(&direct, w, (w->ranks - p) * bytes));
}

/* The messages of each step of a ring go round at the pace of the slowest hop; one rank of a node sends to another node at a time. */
static parts ring_sum(const machine *m, const work *w, double bytes) {
    const double steps = 2 * (w->ranks - 1), slow = crowd(m, w), part = bytes / w->ranks;
    const int is_far = !m->one_machine && w->ranks > m->ranks_per_node;
    parts t;
    t.latency = slow * m->near_link.latency, t.bytes = part * slow / m->near_link.bandwidth;
    if (is_far) t.latency = more(t.latency, m->far_link.latency), t.bytes = more(t.bytes, part / m->far_link.bandwidth);
    return scaled(t, steps);
}

/* Everybody adds up a part and sends the sums to all. */
static parts sum_of(const machine *m, const work *w, double bytes) {
    return m->ring ? ring_sum(m, w, bytes) : scaled(to_all(m, w, bytes / w->ranks), 2);
}

/* What chunks hide of the exchange before and behind the experts: only the first part's way there and the last one's way back have nothing to hide under. */
static double hidden(const machine *m, double computing, double moving) { return (1 - 1 / (double)m->chunks) * less(computing, moving); }

/* Rows of the mean rank, in one pass of one mixture. */
static double pass_bytes(const work *w, double share) { return w->tokens * w->pairs * share * w->d_model * w->real_bytes; }

static void predict_compute(const machine *m, const costs *c, const work *w, times *t) {
    const double slow = crowd(m, w);
    const double rows = w->layers * w->tokens * w->pairs, all_tokens = w->ranks * w->tokens;
    const double numbers = w->shared_numbers + w->layers * w->expert_numbers * w->experts / w->ranks;
    t->experts = slow * rows * (c->expert_forward + c->expert_backward);
    t->route = slow * w->layers * (m->apart ? w->tokens : all_tokens) * c->route * w->experts / w->base_experts;
    t->other = slow * w->tokens * c->other;
    t->optimiser = slow * numbers * c->optimiser;
}

/* Ranks that decide apart gather nothing; what they count for the router's state is added up: E + 1 numbers and a word. */
static double gathers(const machine *m, const work *w) { return m->apart ? 0 : w->gathers; }

static parts sum_of_state(const machine *m, const work *w) {
    enum { FEW = 512 }; /* up to so many every rank sends all of them to all others */
    const double numbers = w->experts + 1;
    const parts none = {0, 0};
    if (!m->apart) return none;
    return numbers <= FEW ? to_all(m, w, numbers * w->real_bytes) : sum_of(m, w, numbers * w->real_bytes);
}

/* Words of 8 bytes that every rank sends to every other for one mixture: 4 and 1 to begin with, 1 before each gathering, a status and the rows of each expert;
   1 on the way back. */
static double count_words(const machine *m, const work *w) { return 7 + gathers(m, w) + m->apart + ceil(w->experts / w->ranks); }

/* ... and for its hops: two levels tell the ranks of a node how much will pass. */
static int hops(const machine *m, const work *w) { return m->two_level && w->ranks > m->ranks_per_node ? PASSES * m->chunks : 0; }

static void predict_rows(const machine *m, const work *w, double near_pass, double far_pass, times *t) {
    const double all = PASSES * w->layers;
    t->rows_inside = scaled(inside(m, w, near_pass, far_pass), all);
    t->rows_inside.latency *= m->chunks;
    t->rows = scaled(across(m, w, far_pass), all);
    t->rows.latency *= m->chunks;
    t->rows = sum_of_two(t->rows, t->rows_inside);
    t->near_bytes = all * (near_pass + passing(m, w, far_pass)), t->far_bytes = all * far_pass;
    t->near_messages = near_messages(m, w), t->far_messages = far_messages(m, w);
}

static void predict_exchange(const machine *m, const work *w, times *t) {
    const double gathered = m->apart ? 0 : w->tokens * (w->experts * w->real_bytes + w->gather_bytes);
    const double nodes = w->ranks / on_node(m, w), others = w->ranks - 1, kept = w->tokens * (m->apart ? 1 : w->ranks);
    const double counts = 8 * (w->layers * (count_words(m, w) + hops(m, w) * nodes) + STEP_WORDS + 2 * m->apart);
    predict_rows(m, w, pass_bytes(w, w->away - w->far), pass_bytes(w, w->far), t);
    t->gather = scaled(to_all(m, w, gathered), w->layers);
    t->gather.latency *= gathers(m, w);
    t->counts = to_all(m, w, counts);
    t->counts.latency *= w->layers * (4 + gathers(m, w) + m->apart + hops(m, w)) + STEP_CALLS + m->apart;
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
    moving = (total(t.rows) - (m->two_level ? total(t.rows_inside) : 0)) / 2; /* the first of two hops ends before anything else begins */
    t.waiting = more(0, w->imbalance / slow - 1) * t.experts + (w->imbalance - 1) * t.rows.bytes;
    t.hidden = hidden(m, forward * t.experts, moving) + hidden(m, (1 - forward) * t.experts, moving);
    t.step = t.experts + t.route + t.other + t.optimiser + total(t.rows) + total(t.gather) + total(t.counts) + total(t.sums) + t.waiting -
             t.hidden;
    return t;
}

/* ---- measurements ------------------------------------------------------------------------------------------------------------------- */

typedef struct figures {
    double cores, threads, real_bytes, d_model, experts, layers, near_latency, near_bandwidth;
} figures;

typedef struct a_run {
    double ranks, tokens, ranks_per_node, two_level, chunks, apart, step, compute, exchange, waiting;
    double pairs, pairs_away, pairs_far, rows_sent, bytes_sent, imbalance, loss;
    double imbalance_at[POWERS]; /* of 2^i ranks */
} a_run;

typedef struct a_method {
    char name[24];
    double top_k, capacity_factor, expert_forward, expert_backward, route, optimiser, other, shared_numbers, expert_numbers, experts_most,
        gathers, gather_bytes;
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
    {"experts", HEAD, 1, 1, 65536, offsetof(figures, experts), "of one mixture"},
    {"layers", HEAD, 1, 1, 1e4, offsetof(figures, layers), "mixtures"},
    {"near_latency", HEAD, 0, 1e-12, 10, offsetof(figures, near_latency), "seconds per message between two ranks here [0.2e-6]"},
    {"near_bandwidth", HEAD, 0, 1, 1e15, offsetof(figures, near_bandwidth), "bytes per second in one direction [8e9]"},
    {"top_k", METHOD, 1, 1, 65536, offsetof(a_method, top_k), "experts per token before capacity"},
    {"capacity_factor", METHOD, 0, 0, 1e6, offsetof(a_method, capacity_factor), "for the heading"},
    {"expert_forward", METHOD, 0, 0, 10, offsetof(a_method, expert_forward), "seconds per row at an expert, one mixture"},
    {"expert_backward", METHOD, 0, 0, 10, offsetof(a_method, expert_backward), "the same on the way back"},
    {"route", METHOD, 0, 0, 10, offsetof(a_method, route), "seconds per token of all ranks and mixture [0]"},
    {"optimiser", METHOD, 0, 0, 1, offsetof(a_method, optimiser), "seconds per number [0]"},
    {"other", METHOD, 0, 0, 100, offsetof(a_method, other), "seconds per own token, all else [what the step of one rank has left over]"},
    {"shared_numbers", METHOD, 1, 0, 1e15, offsetof(a_method, shared_numbers), "numbers that every rank holds"},
    {"expert_numbers", METHOD, 1, 0, 1e15, offsetof(a_method, expert_numbers), "numbers of one expert of one mixture"},
    {"experts_most", METHOD, 1, 0, 65536, offsetof(a_method, experts_most), "experts that the router can have and divides by [0: any]"},
    {"gathers", METHOD, 1, 0, 1e4, offsetof(a_method, gathers),
     "things that every rank gets of all tokens, per mixture [2: which are padding, logits]"},
    {"gather_bytes", METHOD, 0, 0, 1e9, offsetof(a_method, gather_bytes), "of them besides logits, per token [1]"},
    {"tokens", RUN, 1, 1, 1e12, offsetof(a_run, tokens), "per step, all ranks together"},
    {"ranks_per_node", RUN, 1, 1, 65536, offsetof(a_run, ranks_per_node), "as declared [all]"},
    {"two_level", RUN, 1, 0, 1, offsetof(a_run, two_level), "[0]"},
    {"chunks", RUN, 1, 1, 65536, offsetof(a_run, chunks), "[1]"},
    {"apart", RUN, 1, 0, 1, offsetof(a_run, apart), "1: every rank decides for its own tokens [0: together]"},
    {"step", RUN, 0, 1e-12, 1e6, offsetof(a_run, step), "seconds, median"},
    {"compute", RUN, 0, 0, 1e6, offsetof(a_run, compute), "seconds per step, mean over ranks"},
    {"exchange", RUN, 0, 0, 1e6, offsetof(a_run, exchange), "seconds per step in the transport"},
    {"waiting", RUN, 0, 0, 1e6, offsetof(a_run, waiting), "seconds per step for other ranks"},
    {"pairs", RUN, 0, 0, 1e15, offsetof(a_run, pairs), "tokens times experts that took them, one mixture, all ranks"},
    {"pairs_away", RUN, 0, 0, 1e15, offsetof(a_run, pairs_away), "those whose expert lives on another rank"},
    {"pairs_far", RUN, 0, 0, 1e15, offsetof(a_run, pairs_far), "... on another node"},
    {"rows_sent", RUN, 0, 0, 1e15, offsetof(a_run, rows_sent), "to other ranks, four passes, one mixture, all ranks"},
    {"bytes_sent", RUN, 0, 0, 1e18, offsetof(a_run, bytes_sent), "to other ranks per step, by all mixtures of all ranks"},
    {"imbalance", RUN, 0, 1, 65536, offsetof(a_run, imbalance), "rows of the fullest rank by the mean's"},
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

/* What was read so far, and where. */
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
    if (strlen(name) >= sizeof m->methods[0].name || name[0] == '\0') return complain(r, "method %s: 1 to 23 letters%s", name, "");
    while (i < m->n_methods && strcmp(m->methods[i].name, name) != 0) i++;
    if (i == MOST_METHODS) return complain(r, "method %s: more than 8 methods%s", name, "");
    r->method = m->methods + i, r->run = NULL;
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
        if (r->method->runs[i].ranks - ranks == 0) return complain(r, "run %s stands twice for method %s", text, r->method->name);
    if (i == MOST_RUNS) return complain(r, "run %s: more than 16 runs of method %s", text, r->method->name);
    r->run = r->method->runs + r->method->n_runs++;
    forget((char *)r->run, RUN);
    r->run->ranks = ranks;
    set_unknown(r->run->imbalance_at, POWERS);
    return 1;
}

/* The same value may come again. */
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

/* A line without its end: nothing, a remark, or a key and a value. */
static int read_line(reading *r, const char *line, size_t length) {
    char key[40], value[40], rest[2], copy[120];
    int words;
    if (length >= sizeof copy) return length > 0 && line[0] == '#' ? 1 : complain(r, "it is longer than 119 bytes%s%s", "", "");
    memcpy(copy, line, length), copy[length] = '\0';
    if (memchr(copy, '\0', length) != NULL) return complain(r, "a byte 0 stands there%s%s", "", "");
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
    if (!known(r->tokens) || !known(r->step) || !known(r->pairs)) return incomplete(m, where, "tokens, step or pairs are missing");
    if (r->ranks > m->head.experts) return incomplete(m, where, "there are more ranks than experts");
    if (r->ranks > 1 && !known(r->pairs_away)) return incomplete(m, where, "pairs_away is missing");
    set_default(&r->ranks_per_node, r->ranks), set_default(&r->two_level, 0), set_default(&r->chunks, 1), set_default(&r->apart, 0);
    set_default(&r->pairs_away, 0), set_default(&r->pairs_far, 0);
    if (fmod(r->ranks, r->ranks_per_node) > 0) return incomplete(m, where, "ranks_per_node must divide the ranks");
    if (r->pairs_away > r->pairs * (1 + 1e-9) || r->pairs_far > r->pairs_away * (1 + 1e-9))
        return incomplete(m, where, "pairs >= pairs_away >= pairs_far does not hold");
    if (known(r->rows_sent) && r->two_level <= 0 && fabs(r->rows_sent - PASSES * r->pairs_away) > 0.01 * r->rows_sent)
        return incomplete(m, where, "rows_sent is not 4 pairs_away: x, f(x), w dy and dx");
    if (r->pairs > r->tokens * m->head.experts) return incomplete(m, where, "there are more pairs than tokens times experts");
    if (known(r->imbalance) && r->imbalance > r->ranks * (1 + 1e-6)) return incomplete(m, where, "imbalance is above the number of ranks");
    return 1;
}

static double own_numbers(const figures *h, const a_method *f) { return f->shared_numbers + h->layers * h->experts * f->expert_numbers; }

/* What the step with one rank has left over when all that has a cost of its own is taken away, per token. */
static double left_over(const figures *h, const a_method *f, const a_run *one) {
    const double rows = one->pairs * (f->expert_forward + f->expert_backward), decide = one->tokens * f->route;
    return (one->step - h->layers * (rows + decide) - own_numbers(h, f) * f->optimiser) / one->tokens;
}

static int check_method(measurements *m, a_method *f) {
    a_run *one = find_run(f, 1);
    int i;
    if (!known(f->expert_forward) || !known(f->expert_backward) || !known(f->shared_numbers) || !known(f->expert_numbers))
        return incomplete(
            m, f->name,
            "expert_forward, expert_backward, shared_numbers or expert_numbers are missing: the program writes them with one rank");
    for (i = 0; i < f->n_runs; i++)
        if (!check_run(m, f, f->runs + i)) return 0;
    if (one == NULL) return incomplete(m, f->name, "the run with one rank is missing");
    set_default(&f->route, 0), set_default(&f->optimiser, 0), set_default(&f->experts_most, 0);
    set_default(&f->gathers, 2), set_default(&f->gather_bytes, 1);
    if (known(f->other)) return 1;
    f->other = left_over(&m->head, f, one);
    if (f->other * one->tokens < -0.5 * one->step)
        return incomplete(m, f->name, "the costs add up to more than 1.5 times the step with one rank: not measured together?");
    f->other = more(0, f->other);
    return 1;
}

static int check_all(measurements *m) {
    figures *h = &m->head;
    int i;
    if (!known(h->cores) || !known(h->real_bytes) || !known(h->d_model) || !known(h->experts) || !known(h->layers))
        return incomplete(m, "the head", "cores, real_bytes, d_model, experts or layers are missing");
    if (m->n_methods == 0) return incomplete(m, "the file", "it has no method");
    set_default(&h->threads, 1), set_default(&h->near_latency, 0.2e-6), set_default(&h->near_bandwidth, 8e9);
    for (i = 0; i < m->n_methods; i++)
        if (!check_method(m, m->methods + i)) return 0;
    return 1;
}

/* 1, or 0 and m->wrong says what is wrong. */
static int read_measurements(measurements *m, const char *text, size_t size) {
    const char *end = text + size, *stop;
    reading r;
    memset(m, 0, sizeof *m), memset(&r, 0, sizeof r);
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

/* ---- from measurements to work ---------------------------------------------------------------------------------------------------------- */

static costs costs_of(const a_method *f) {
    costs c;
    c.expert_forward = f->expert_forward, c.expert_backward = f->expert_backward;
    c.route = f->route, c.other = f->other, c.optimiser = f->optimiser;
    return c;
}

static work work_of(const figures *h, const a_method *f) {
    work w;
    memset(&w, 0, sizeof w);
    w.layers = h->layers, w.experts = w.base_experts = h->experts, w.d_model = h->d_model, w.real_bytes = h->real_bytes,
    w.threads = h->threads;
    w.gathers = f->gathers, w.gather_bytes = f->gather_bytes;
    w.shared_numbers = f->shared_numbers, w.expert_numbers = f->expert_numbers, w.imbalance = 1;
    return w;
}

/* What was run, by its counts. */
static work work_of_run(const figures *h, a_method *f, const a_run *r) {
    const a_run *one = find_run(f, 1);
    const double at = one->imbalance_at[power_of(r->ranks)];
    work w = work_of(h, f);
    w.ranks = r->ranks, w.tokens = r->tokens / r->ranks, w.pairs = r->pairs / r->tokens;
    if (r->pairs > 0) w.away = r->pairs_away / r->pairs, w.far = r->pairs_far / r->pairs;
    if (r->ranks > 1) w.imbalance = known(r->imbalance) ? r->imbalance : is_power(r->ranks) && known(at) ? at : 1;
    return w;
}

static machine machine_of_run(const figures *h, const a_run *r) {
    machine m;
    memset(&m, 0, sizeof m);
    m.near_link.latency = h->near_latency, m.near_link.bandwidth = h->near_bandwidth, m.far_link = m.near_link;
    m.cores = h->cores, m.ranks_per_node = r->ranks_per_node, m.one_machine = 1, m.two_level = r->two_level > 0, m.apart = r->apart > 0, m.chunks = (int)r->chunks;
    return m;
}

/* The share of pairs that leave, against that of random routing over so many homes: of the run with the most homes. 1 when there is none. */
static double locality(const a_method *f, int of_nodes) {
    double most = 1, found = UNKNOWN;
    int i;
    for (i = 0; i < f->n_runs; i++) {
        const a_run *r = f->runs + i;
        const double homes = of_nodes ? r->ranks / r->ranks_per_node : r->ranks;
        if (homes > most && r->pairs > 0) most = homes, found = (of_nodes ? r->pairs_far : r->pairs_away) / r->pairs / (1 - 1 / homes);
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

/* What `ranks` ranks would have to do, with so many tokens each. */
static work work_beyond(const figures *h, a_method *f, double ranks, double ranks_per_node, double tokens) {
    const a_run *one = find_run(f, 1);
    const double nodes = ranks > ranks_per_node ? ranks / ranks_per_node : 1, l = locality(f, 0), k = locality(f, 1);
    work w = work_of(h, f);
    w.ranks = ranks, w.tokens = tokens, w.pairs = one->pairs / one->tokens;
    w.experts = more(h->experts, ranks);
    w.away = less(1, (known(l) ? l : 1) * random_away(ranks));
    w.far = less(w.away, (known(k) ? k : known(l) ? l : 1) * random_away(nodes));
    w.imbalance = imbalance_up_to(f, ranks);
    return w;
}

static int can_have(const a_method *f, double experts) {
    return f->experts_most <= 0 || (experts <= f->experts_most && fmod(f->experts_most, experts) <= 0);
}

/* ---- tables ------------------------------------------------------------------------------------------------------------------------------ */

static const struct network {
    const char *name, *about;
    wire link;
} networks[] = {{"ib100", "100 Gb/s InfiniBand or Omni-Path", {1.2e-6, 12.3e9}},
                {"tcp10", "TCP on 10 Gb/s Ethernet", {48e-6, 1.19e9}},
                {"tcp1", "TCP on 1 Gb/s Ethernet", {25e-6, 0.117e9}}};
enum { NETWORKS = sizeof networks / sizeof *networks };

/* What the command line says; 0: the usual. */
static struct {
    const char *file, *network;
    double far_latency, far_bandwidth, near_latency, near_bandwidth, cores, ranks_per_node, tokens, chunks, most, within;
    double bytes_within, two_level, apart, ring, markdown, idle;
} set = {NULL, "ib100", 0, 0, 0, 0, 0, 8, 0, 1, MOST_RANKS, 0, 0, 0, 0, 0, 0, 0};

enum { FLAG, WHOLE, REAL, TEXT };
static const struct option {
    const char *name, *value;
    int kind;
    void *at;
    double least, most;
    const char *help;
} options[] = {
    {"--network", "NAME", TEXT, &set.network, 0, 0, "between nodes: ib100, tcp10 or tcp1"},
    {"--far-latency", "S", REAL, &set.far_latency, 1e-12, 10, "instead: seconds per message between nodes"},
    {"--far-bandwidth", "B", REAL, &set.far_bandwidth, 1, 1e15, "bytes per second, of a node in each direction"},
    {"--near-latency", "S", REAL, &set.near_latency, 1e-12, 10, "inside a node (as in FILE)"},
    {"--near-bandwidth", "B", REAL, &set.near_bandwidth, 1, 1e15, "of a rank (as in FILE)"},
    {"--ranks-per-node", "N", WHOLE, &set.ranks_per_node, 1, 65536, "ranks on a node, a power of 2 (8)"},
    {"--cores", "N", WHOLE, &set.cores, 1, 1e6, "cores of a node (as many as its ranks have threads)"},
    {"--tokens", "N", WHOLE, &set.tokens, 1, 1e9, "tokens per rank and step (as the run with one rank)"},
    {"--chunks", "N", WHOLE, &set.chunks, 1, 65536, "parts in which experts compute while others travel (1)"},
    {"--two-level", "", FLAG, &set.two_level, 0, 0, "rows for other nodes go through one rank of the own node"},
    {"--apart", "", FLAG, &set.apart, 0, 0, "every rank decides for its own tokens alone"},
    {"--ring", "", FLAG, &set.ring, 0, 0, "shared gradients are added round a ring"},
    {"--most", "N", WHOLE, &set.most, 1, 65536, "ranks of the last line (1024)"},
    {"--within", "X", REAL, &set.within, 1, 100, "fails when a run of FILE is more than X times faster or slower than predicted"},
    {"--bytes-within", "P", REAL, &set.bytes_within, 0.001, 100,
     "fails when a run of FILE sent P percent more or fewer bytes than predicted"},
    {"--idle", "", FLAG, &set.idle, 0, 0, "instead: fails when a process does not have a processor for itself now"},
    {"--markdown", "", FLAG, &set.markdown, 0, 0, "the table of README.md"}};
enum { OPTIONS = sizeof options / sizeof *options };

static const struct network *network_named(const char *name) {
    int i = 0;
    while (i < NETWORKS && strcmp(networks[i].name, name) != 0) i++;
    return i < NETWORKS ? networks + i : NULL;
}

static machine machine_beyond(const figures *h) {
    machine m;
    memset(&m, 0, sizeof m);
    m.near_link.latency = set.near_latency > 0 ? set.near_latency : h->near_latency;
    m.near_link.bandwidth = set.near_bandwidth > 0 ? set.near_bandwidth : h->near_bandwidth;
    m.far_link = network_named(set.network)->link;
    if (set.far_latency > 0) m.far_link.latency = set.far_latency;
    if (set.far_bandwidth > 0) m.far_link.bandwidth = set.far_bandwidth;
    m.ranks_per_node = set.ranks_per_node;
    m.cores = set.cores > 0 ? set.cores : set.ranks_per_node * h->threads;
    m.two_level = set.two_level > 0, m.ring = set.ring > 0, m.apart = set.apart > 0, m.chunks = (int)set.chunks;
    return m;
}

static double tokens_beyond(a_method *f) { return set.tokens > 0 ? set.tokens : find_run(f, 1)->tokens; }

static times predict_beyond(const figures *h, a_method *f, double ranks, work *w) {
    const machine m = machine_beyond(h);
    const costs c = costs_of(f);
    *w = work_beyond(h, f, ranks, set.ranks_per_node, tokens_beyond(f));
    return predict(&m, &c, w);
}

static double computing(const times *t) { return t->experts + t->route + t->other + t->optimiser; }
static double moving(const times *t) { return total(t->rows) + total(t->gather) + total(t->counts) + total(t->sums); }

static void show_machine(const figures *h) {
    const machine m = machine_beyond(h);
    printf(
        "Nodes of %.0f ranks on %.0f cores like those measured; inside a node %.3g us and %.3g GB/s, between nodes %.3g us and %.3g GB/s\n",
        m.ranks_per_node, m.cores, m.near_link.latency * 1e6, m.near_link.bandwidth / 1e9, m.far_link.latency * 1e6,
        m.far_link.bandwidth / 1e9);
    printf("%.0f mixture%s of %.0f experts, as many as ranks beyond; rows of %.0f numbers; %s, %d chunk%s; %s\n", h->layers,
           h->layers > 1 ? "s" : "", h->experts, h->d_model, m.two_level ? "two levels" : "one level", m.chunks, m.chunks > 1 ? "s" : "",
           m.apart ? "every rank decides for its own tokens" : "all decide together");
}

/* Milliseconds of a step by their reason, for 1, 2, 4, ... ranks. */
static void show_method(const figures *h, a_method *f) {
    double ranks, alone = 0;
    printf(
        "\n%s: %.0f tokens per rank, %.3g rows at experts per token; pairs leave home %.3g and the node %.3g times as often as at random\n",
        f->name, tokens_beyond(f), find_run(f, 1)->pairs / find_run(f, 1)->tokens, known(locality(f, 0)) ? locality(f, 0) : 1,
        known(locality(f, 1))   ? locality(f, 1)
        : known(locality(f, 0)) ? locality(f, 0)
                                : 1);
    printf("%6s %7s %9s %9s %8s %8s %8s %8s %8s %8s %8s %8s %6s %9s\n", "ranks", "experts", "step ms", "experts", "other", "route",
           "update", "rows", "gather", "counts", "sums", "waiting", "rate", "memory MB");
    for (ranks = 1; ranks <= set.most; ranks *= 2) {
        work w;
        const times t = predict_beyond(h, f, ranks, &w);
        if (ranks <= 1) alone = t.step;
        if (!can_have(f, w.experts)) {
            printf("%6.0f %7.0f  this router cannot have so many experts: they must divide %.0f\n", ranks, w.experts, f->experts_most);
            continue;
        }
        printf("%6.0f %7.0f %9.4g %9.4g %8.3g %8.3g %8.3g %8.3g %8.3g %8.3g %8.3g %8.3g %6.3f %9.3g\n", ranks, w.experts, t.step * 1e3,
               t.experts * 1e3, t.other * 1e3, t.route * 1e3, t.optimiser * 1e3, (total(t.rows) - t.hidden) * 1e3, total(t.gather) * 1e3,
               total(t.counts) * 1e3, total(t.sums) * 1e3, t.waiting * 1e3, alone / t.step, t.memory / 1e6);
    }
}

static void show_legend(void) {
    printf("\nexperts, other, route (deciding which token goes where), update: computing. rows, gather (logits of all tokens to every "
           "rank), counts,\n"
           "sums (shared gradients): exchange, in rows without what chunks hide. memory: of one mixture's decision on every rank. waiting: "
           "for the fullest rank. rate: tokens per second and rank against one rank.\n"
           "What is assumed is listed in tests/scale.c.\n");
}

/* ---- what was run, beside what the model says -------------------------------------------------------------------------------------------- */

static double off_by(double measured, double predicted) { return more(measured / predicted, predicted / measured); }

static void show_pair(double measured, double predicted) {
    if (known(measured)) printf("  %8.4g %8.4g", measured * 1e3, predicted * 1e3);
    else printf("  %8s %8.4g", "-", predicted * 1e3);
}

/* By how much the worst run with several ranks is off: the step's factor, the bytes' percent. */
typedef struct errors {
    double factor, percent;
} errors;

static void show_run(const figures *h, a_method *f, const a_run *r, errors *worst) {
    const machine m = machine_of_run(h, r);
    const costs c = costs_of(f);
    const work w = work_of_run(h, f, r);
    const times t = predict(&m, &c, &w);
    const double percent = known(r->bytes_sent) && r->bytes_sent > 0 ? (t.bytes / r->bytes_sent - 1) * 100 : 0;
    printf("%-14s %5.0f %5.0f", f->name, r->ranks, r->ranks / r->ranks_per_node);
    show_pair(r->step, t.step);
    printf(" %+6.0f %%", (t.step / r->step - 1) * 100);
    show_pair(r->compute, computing(&t)), show_pair(r->exchange, moving(&t) - t.hidden), show_pair(r->waiting, t.waiting);
    if (known(r->bytes_sent) && r->bytes_sent > 0) printf("  %+6.1f %%", percent);
    printf("\n");
    if (r->ranks > 1) worst->factor = more(worst->factor, off_by(r->step, t.step)), worst->percent = more(worst->percent, fabs(percent));
}

static errors show_runs(measurements *m) {
    errors worst = {1, 0};
    int i, k;
    printf("\nWhat was run on %.0f core%s, milliseconds per step: measured, predicted. bytes: how many more are predicted than were sent. "
           "The step of one rank is exact\n"
           "where `other` is what it had left over. Ranks that share cores wait for them: what is computing in the prediction is waiting "
           "in the measurement.\n",
           m->head.cores, m->head.cores > 1 ? "s" : "");
    printf("%-14s %5s %5s  %17s %8s  %17s  %17s  %17s  %8s\n", "", "ranks", "nodes", "step", "error", "computing", "exchange", "waiting",
           "bytes");
    for (i = 0; i < m->n_methods; i++)
        for (k = 0; k < m->methods[i].n_runs; k++) show_run(&m->head, m->methods + i, m->methods[i].runs + k, &worst);
    return worst;
}

/* ---- the table of README.md ------------------------------------------------------------------------------------------------------------------ */

/* Three digits or more; 12,345. */
static void show_number(double x) {
    const double whole = floor(x + 0.5);
    if (whole >= 1000) printf(" %.0f,%03.0f |", floor(whole / 1000), fmod(whole, 1000));
    else printf(" %.*f |", x >= 99.5 || x <= 0 ? 0 : x >= 9.95 ? 1 : x >= 0.995 ? 2 : 3, x);
}

enum { TOGETHER, APART, ROWS, PARTS };

/* Milliseconds of a step where ranks decide together, apart, and of its rows. */
static void show_cell(const figures *h, a_method *f, double ranks, int part) {
    work w;
    times t;
    set.apart = part != TOGETHER, t = predict_beyond(h, f, ranks, &w);
    if (!can_have(f, w.experts)) printf(" - |");
    else show_number((part == ROWS ? total(t.rows) - t.hidden : t.step) * 1e3);
}

static const char *printed_name(const char *name) {
    return strcmp(name, "locmoe") == 0 ? "LocMoE" : strcmp(name, "locmoe_plus") == 0 ? "LocMoE+" : name;
}

static void show_markdown(measurements *m) {
    static const char *const parts_of[PARTS] = {"together: ", "apart: ", "rows: "};
    const char *first = printed_name(m->methods[0].name);
    double ranks;
    int i, part;
    printf("| ranks | experts |");
    for (part = 0; part < PARTS; part++)
        for (i = 0; i < m->n_methods; i++) printf(" %s%s |", i == 0 ? parts_of[part] : "", printed_name(m->methods[i].name));
    printf(" together, %s: gather, decide | memory, MB |\n|", first);
    for (i = 0; i < PARTS * m->n_methods + 4; i++) printf("---|");
    printf("\n");
    for (ranks = 1; ranks <= set.most; ranks *= 2) {
        work w;
        times t;
        set.apart = 0, t = predict_beyond(&m->head, m->methods, ranks, &w);
        printf("| %.0f | %.0f |", ranks, w.experts);
        for (part = 0; part < PARTS; part++)
            for (i = 0; i < m->n_methods; i++) show_cell(&m->head, m->methods + i, ranks, part);
        show_number((total(t.gather) + t.route) * 1e3), show_number(t.memory / 1e6);
        printf("\n");
    }
}

/* ---- tests ---------------------------------------------------------------------------------------------------------------------------------- */

static long passed, failed;

#define CHECK(condition) check((condition) ? 1 : 0, __LINE__, #condition)

static int check(int good, int line, const char *what) {
    if (good) passed++;
    else if (++failed <= 40) printf("tests/scale.c:%d: %s\n", line, what);
    return good;
}

static int near_to(double a, double b) { return fabs(a - b) <= 1e-12 * more(fabs(a), fabs(b)); }
static int exactly(double a, double b) { return !(a < b) && !(a > b); }

static unsigned long random_state;
static size_t below(size_t n) {
    random_state = (random_state * 1664525u + 1013904223u) & 0xFFFFFFFFu;
    return (size_t)(random_state >> 8) % n;
}

/* Eight ranks on two nodes, with numbers that are easy on paper. */
static machine paper_machine(void) {
    machine m;
    memset(&m, 0, sizeof m);
    m.near_link.latency = 1e-6, m.near_link.bandwidth = 1e9, m.far_link.latency = 1e-5, m.far_link.bandwidth = 1e8;
    m.cores = 4, m.ranks_per_node = 4, m.chunks = 1;
    return m;
}

static costs paper_costs(void) {
    costs c;
    c.expert_forward = 1e-5, c.expert_backward = 3e-5, c.route = 1e-6, c.other = 1e-4, c.optimiser = 1e-8;
    return c;
}

static work paper_work(double ranks) {
    work w;
    memset(&w, 0, sizeof w);
    w.ranks = ranks, w.tokens = 1000, w.layers = 2, w.experts = 16, w.base_experts = 16, w.pairs = 2, w.away = 0.5, w.far = 0.25;
    w.imbalance = 1, w.d_model = 250, w.real_bytes = 4, w.shared_numbers = 1e6, w.expert_numbers = 1e5, w.threads = 1, w.gathers = 1,
    w.gather_bytes = 0;
    if (ranks <= 1) w.away = 0, w.far = 0;
    return w;
}

static machine random_machine(void) {
    static const double nodes[] = {1, 2, 4, 8};
    machine m = paper_machine();
    m.ranks_per_node = nodes[below(4)], m.cores = (double)(1 + below(8)), m.chunks = 1 + (int)below(5), m.two_level = (int)below(2);
    m.near_link.latency = 1e-7 * (double)(1 + below(50)), m.near_link.bandwidth = 1e8 * (double)(1 + below(50));
    m.far_link.latency = 1e-6 * (double)(1 + below(50)), m.far_link.bandwidth = 1e7 * (double)(1 + below(50));
    m.one_machine = below(4) == 0, m.ring = (int)below(2), m.apart = (int)below(2);
    return m;
}

static work random_work(void) {
    work w = paper_work(ldexp(1, (int)below(11)));
    w.tokens = (double)(1 + below(4000)), w.experts = w.ranks * (double)(1 + below(4)), w.base_experts = (double)(1 + below(64)),
    w.layers = (double)(1 + below(6));
    w.pairs = 0.25 * (double)(1 + below(16)), w.away = (double)below(101) / 100, w.far = w.away * (double)below(101) / 100,
    w.imbalance = 1 + 0.01 * (double)below(300);
    w.d_model = (double)(1 + below(2000)), w.threads = (double)(1 + below(3)), w.gathers = (double)below(5),
    w.gather_bytes = (double)below(20);
    if (w.ranks <= 1) w.away = 0, w.far = 0, w.imbalance = 1;
    return w;
}

/* The case that is worked out on paper, number by number. */
static void test_paper(void) {
    machine m = paper_machine();
    costs c = paper_costs();
    work w = paper_work(8);
    times t = predict(&m, &c, &w);
    CHECK(near_to(t.experts, 0.16)); /* 2 mixtures, 1000 tokens, 2 pairs: 4000 rows of 40 us */
    CHECK(near_to(t.route, 0.016));  /* 2 times 8000 tokens of 1 us */
    CHECK(near_to(t.other, 0.1));
    CHECK(near_to(t.optimiser, 0.014)); /* 10^6 shared and 2 x 16/8 x 10^5 own numbers, 10 ns each */
    CHECK(near_to(t.near_bytes, 4e6));  /* 8 exchanges of 2000 x 1/4 rows of 1000 bytes */
    CHECK(near_to(t.far_bytes, 4e6));
    CHECK(near_to(t.rows.latency, 8 * (3e-6 + 4e-5)));
    CHECK(near_to(t.rows.bytes, 8 * (5e5 / 1e9 + 4 * 5e5 / 1e8)));
    CHECK(near_to(t.gather.latency, 2 * (3e-6 + 4e-5)));
    CHECK(near_to(t.gather.bytes, 2 * (3 * 64000 / 1e9 + 4 * 4 * 64000 / 1e8))); /* 1000 x 16 logits to 3 near, 4 far */
    CHECK(near_to(t.counts.latency, (2 * 5 + 3) * (3e-6 + 4e-5)) &&
          near_to(t.counts.bytes, (2 * 80 + 64) * (3 / 1e9 + 4 * 4 / 1e8))); /* 8 words and 16/8 experts; 8 words */
    CHECK(near_to(t.sums.bytes, 2 * (3 * 5e5 / 1e9 + 4 * 4 * 5e5 / 1e8)));   /* parts of 4 10^6 / 8 bytes, out and back */
    CHECK(near_to(t.sums.latency, 3 * 2 * (3e-6 + 4e-5)));                   /* before, between and behind two mixtures */
    CHECK(exactly(t.waiting, 0) && exactly(t.hidden, 0));
    CHECK(near_to(t.step, 0.29 + 0.000344 + 0.164 + 0.000086 + 0.020864 + 0.000559 + 0.000036512 + 0.163 + 0.000258));
    CHECK(exactly(t.near_messages, 3) && exactly(t.far_messages, 4));
    CHECK(near_to(t.memory, 8000 * 16 * 30));
    CHECK(near_to(t.bytes, 8 * 2 * (4 * 1e6 + 7 * (64000 + 80 + 32))));
    m.ring = 1, t = predict(&m, &c, &w), m.ring = 0;
    CHECK(near_to(t.sums.bytes, 14 * 5e5 / 1e8) && near_to(t.sums.latency, 3 * 14e-5));
    m.two_level = 1, t = predict(&m, &c, &w);
    CHECK(exactly(t.near_messages, 3) && exactly(t.far_messages, 1));
    CHECK(near_to(t.near_bytes, 4e6 + 3e6) && near_to(t.far_bytes, 4e6)); /* three of four far rows pass through another rank */
    CHECK(near_to(t.rows.latency, 8 * (3e-6 + 1e-5)));
    CHECK(near_to(t.rows.bytes, 8 * ((5e5 + 3.75e5) / 1e9 + 4 * 5e5 / 1e8)));
    CHECK(near_to(t.gather.latency, 2 * (3e-6 + 4e-5)) && near_to(t.sums.latency, 3 * 2 * (3e-6 + 4e-5)));
    CHECK(near_to(t.counts.latency, (2 * 9 + 3) * (3e-6 + 4e-5)));
    CHECK(near_to(t.bytes, 8 * (1.1e7 + 7 * (2 * (64000 + 80 + 4 * 16) + 64)))); /* before each hop a word for each of two nodes */
    m.chunks = 2, t = predict(&m, &c, &w),
    m.chunks = 1; /* only what travels far can hide, under 20 ms forward and 60 ms backward of half the experts */
    CHECK(near_to(t.counts.latency, (2 * 13 + 3) * (3e-6 + 4e-5)));
    CHECK(near_to(t.rows.latency, 2 * 8 * (3e-6 + 1e-5)) && near_to(t.hidden, 0.5 * (0.04 + 8 * (1e-5 * 2 + 0.02) / 2)));
    m.two_level = 0, w.imbalance = 1.5, t = predict(&m, &c, &w);
    CHECK(near_to(t.waiting, 0.5 * 0.16 + 0.5 * t.rows.bytes));
    w.imbalance = 1, m.chunks = 4, t = predict(&m, &c, &w);
    CHECK(near_to(t.rows.latency, 4 * 8 * 43e-6));
    CHECK(near_to(t.hidden,
                  0.75 * (0.04 + total(t.rows) / 2))); /* forward 40 ms of experts hide under rows, backward all rows under 120 ms */
    m = paper_machine(), m.apart = 1, t = predict(&m, &c, &w);
    CHECK(near_to(t.route, 0.002) && exactly(total(t.gather), 0));   /* 2 times 1000 tokens */
    CHECK(near_to(t.counts.latency, (2 * 5 + 4) * 43e-6));           /* no word before gathering, one for the state, one for the routers' loss */
    CHECK(near_to(t.sums.latency, (3 * 2 + 2) * 43e-6));             /* 17 numbers of state go to all at once */
    CHECK(near_to(t.sums.bytes, 2 * (3 * 5e5 / 1e9 + 4 * 4 * 5e5 / 1e8) + 2 * 68 * (3 / 1e9 + 4 * 4 / 1e8)));
    CHECK(near_to(t.bytes, 8 * (2 * 4 * 1e6 + 7 * 8 * (2 * 10 + 10))) && near_to(t.memory, 1000 * 16 * 30));
    w.experts = 512, t = predict(&m, &c, &w), w.experts = 16;        /* 513 numbers are added up part by part */
    CHECK(near_to(t.sums.latency, (3 * 2 + 2 * 2) * 43e-6));
    m = paper_machine(), m.cores = 2, t = predict(&m, &c, &w);
    CHECK(near_to(t.experts, 0.32) && near_to(t.other, 0.2)); /* four ranks on two cores */
    w.imbalance = 1.9, t = predict(&m, &c, &w);
    CHECK(near_to(t.waiting, 0.9 * t.rows.bytes)); /* the others' cores help the fullest rank */
}

/* One rank sends nothing; its step is the sum of its costs. */
static void test_one_rank(void) {
    int i;
    for (i = 0; i < 200; i++) {
        machine m = random_machine();
        costs c = paper_costs();
        work w = random_work();
        times t;
        double slow;
        w.ranks = 1, w.away = w.far = 0, w.imbalance = 1;
        t = predict(&m, &c, &w), slow = more(1, w.threads / m.cores);
        CHECK(exactly(moving(&t), 0) && exactly(t.waiting, 0) && exactly(t.hidden, 0) && exactly(t.bytes, 0));
        CHECK(exactly(t.near_messages, 0) && exactly(t.far_messages, 0));
        CHECK(near_to(t.step, slow * (w.layers * w.tokens * (w.pairs * 4e-5 + 1e-6 * w.experts / w.base_experts) + w.tokens * 1e-4 +
                                      (1e6 + w.layers * w.experts * 1e5) * 1e-8)));
    }
}

/* Messages and bytes that cost nothing leave computing and the wait for the fullest. Twice the bandwidth halves the bytes' time, and nothing else changes. */
static void test_links(void) {
    int i;
    for (i = 0; i < 500; i++) {
        machine m = random_machine(), fast = m, late = m, no_cost = m;
        costs c = paper_costs();
        work w = random_work();
        times t, other;
        double hiding;
        if (w.ranks <= m.ranks_per_node) w.far = 0;
        t = predict(&m, &c, &w);
        no_cost.near_link.latency = no_cost.far_link.latency = 0, no_cost.near_link.bandwidth = no_cost.far_link.bandwidth = HUGE_VAL;
        other = predict(&no_cost, &c, &w);
        CHECK(exactly(moving(&other), 0) &&
              near_to(other.step, computing(&other) + more(0, w.imbalance / crowd(&m, &w) - 1) * other.experts));
        CHECK(exactly(computing(&other), computing(&t)) && exactly(other.bytes, t.bytes));
        fast.near_link.bandwidth *= 2, fast.far_link.bandwidth *= 2, other = predict(&fast, &c, &w);
        CHECK(exactly(other.rows.bytes, t.rows.bytes / 2) && exactly(other.gather.bytes, t.gather.bytes / 2));
        CHECK(exactly(other.counts.bytes, t.counts.bytes / 2) && exactly(other.sums.bytes, t.sums.bytes / 2));
        CHECK(exactly(other.rows.latency, t.rows.latency) && exactly(other.sums.latency, t.sums.latency) &&
              exactly(computing(&other), computing(&t)));
        late.near_link.latency *= 2, late.far_link.latency *= 2, other = predict(&late, &c, &w);
        CHECK(exactly(other.rows.latency, 2 * t.rows.latency) && exactly(other.gather.latency, 2 * t.gather.latency));
        CHECK(near_to(other.sums.latency, 2 * t.sums.latency) && exactly(other.rows.bytes, t.rows.bytes));
        fast = m, fast.far_link.latency *= 2, fast.far_link.bandwidth /= 3, other = predict(&fast, &c, &w);
        if (m.one_machine || w.ranks <= m.ranks_per_node) CHECK(exactly(other.step, t.step)); /* then nothing goes by the far link */
        else CHECK(other.step > t.step);
        hiding = total(t.rows) - (m.two_level ? total(t.rows_inside) : 0);
        CHECK(near_to(t.step, computing(&t) + moving(&t) + t.waiting - t.hidden));
        CHECK(near_to(t.hidden, (m.chunks - 1.0) / m.chunks * (less(t.experts / 4, hiding / 2) + less(t.experts * 3 / 4, hiding / 2))));
        CHECK(t.step >= computing(&t) && t.hidden <= more(total(t.rows), t.experts));
    }
}

/* Two levels: fewer messages wherever there are several ranks on several nodes, the same far bytes, no fewer near ones. */
static void test_levels(void) {
    double ranks, p;
    for (p = 1; p <= 16; p *= 2)
        for (ranks = 1; ranks <= 1024; ranks *= 2) {
            machine one = paper_machine(), two;
            costs c = paper_costs();
            work w = paper_work(ranks);
            times a, b;
            one.ranks_per_node = one.cores = p, one.ring = 1;
            if (ranks <= p) w.far = 0;
            two = one, two.two_level = 1;
            a = predict(&one, &c, &w), b = predict(&two, &c, &w);
            CHECK(exactly(a.near_messages + a.far_messages, ranks - 1));
            if (p > 1 && ranks > p) CHECK(b.near_messages + b.far_messages < ranks - 1 && b.far_messages < a.far_messages);
            else CHECK(exactly(b.near_messages + b.far_messages, ranks - 1) && exactly(total(b.rows), total(a.rows)));
            if (ranks <= p) CHECK(exactly(a.step, b.step));
            CHECK(exactly(a.far_bytes, b.far_bytes) && a.near_bytes <= b.near_bytes && a.bytes <= b.bytes);
        }
}

/* More of anything that costs takes no less time. */
static void test_monotonic(void) {
    int i, k;
    for (i = 0; i < 300; i++) {
        machine m = random_machine();
        costs c = paper_costs();
        const work base = random_work();
        double before = predict(&m, &c, &base).step;
        for (k = 0; k < 8; k++) {
            work w = base;
            if (k == 0) w.pairs *= 1.25;
            if (k == 1) w.tokens += 1;
            if (k == 2) w.imbalance = base.ranks > 1 ? w.imbalance + 0.25 : 1;
            if (k == 3) w.away = w.away + (1 - w.away) * (base.ranks > 1 ? 0.5 : 0);
            if (k == 4) w.d_model += 10;
            if (k == 5) w.experts *= 2;
            if (k == 6) w.layers += 1;
            if (k == 7) w.shared_numbers *= 2;
            CHECK(predict(&m, &c, &w).step >= before * (1 - 1e-12));
        }
        if (base.ranks < 1024) {
            work w = base;
            w.ranks *= 2, w.experts *= 2, w.away = more(w.away, 0.01);
            CHECK(predict(&m, &c, &w).gather.bytes >= predict(&m, &c, &base).gather.bytes &&
                  predict(&m, &c, &w).route > predict(&m, &c, &base).route);
            m.apart = 1; /* apart: as many tokens as one rank has; only the experts have doubled */
            CHECK(near_to(predict(&m, &c, &w).route * crowd(&m, &base), 2 * predict(&m, &c, &base).route * crowd(&m, &w)));
        }
    }
}

enum { SOME_RANKS = 16, SOME_TOKENS = 40 };

/* Messages and rows of one all-to-all, message by message. */
typedef struct tally {
    double rows[SOME_RANKS][SOME_RANKS]; /* on the wire from rank to rank */
    double kept, near_rows, far_rows, most_near, most_far;
} tally;

static void send_row(tally *t, size_t from, size_t to, size_t p, int two_level) {
    size_t mate = from / p * p + to % p; /* of the own node, in the place of the goal */
    if (from == to) t->kept++;
    else if (from / p == to / p) t->rows[from][to]++;
    else if (!two_level) t->rows[from][to]++;
    else {
        if (mate != from) t->rows[from][mate]++;
        t->rows[mate][to]++;
    }
}

/* Who ever sends to whom, as every rank sends to all. */
static void count_messages(tally *t, size_t ranks, size_t p, int two_level) {
    tally all;
    size_t from, to, near_count, far_count;
    memset(&all, 0, sizeof all);
    for (from = 0; from < ranks; from++)
        for (to = 0; to < ranks; to++) send_row(&all, from, to, p, two_level);
    for (from = 0; from < ranks; from++) {
        for (to = near_count = far_count = 0; to < ranks; to++) {
            if (all.rows[from][to] > 0 && from / p == to / p) near_count++;
            if (all.rows[from][to] > 0 && from / p != to / p) far_count++;
            t->near_rows += from / p == to / p ? t->rows[from][to] : 0, t->far_rows += from / p != to / p ? t->rows[from][to] : 0;
        }
        t->most_near = more(t->most_near, (double)near_count), t->most_far = more(t->most_far, (double)far_count);
    }
}

/* Tokens choose experts at random; what is counted row by row is what the formulas say of the mean rank. Every row arrives or stays. */
static void test_rows(void) {
    int trial;
    for (trial = 0; trial < 200; trial++) {
        const size_t ranks = (size_t)1 << below(5), p = (size_t)1 << below(5), on = p < ranks ? p : ranks, tokens = 1 + below(SOME_TOKENS);
        machine m = paper_machine();
        costs c = paper_costs();
        work w = paper_work((double)ranks);
        tally t;
        times predicted;
        size_t i, far_pairs = 0;
        memset(&t, 0, sizeof t);
        m.ranks_per_node = (double)p, m.two_level = (int)below(2);
        for (i = 0; i < ranks * tokens; i++) {
            const size_t from = i / tokens, to = below(ranks);
            send_row(&t, from, to, on, m.two_level), far_pairs += from / on != to / on;
        }
        count_messages(&t, ranks, on, m.two_level);
        w.tokens = (double)tokens, w.pairs = 1, w.away = 1 - t.kept / (double)(ranks * tokens),
        w.far = (double)far_pairs / (double)(ranks * tokens), w.layers = 1;
        predicted = predict(&m, &c, &w);
        CHECK(exactly(predicted.near_messages, t.most_near) && exactly(predicted.far_messages, t.most_far));
        CHECK(fabs(predicted.far_bytes * (double)ranks - 4000 * t.far_rows) < 1e-6);
        if (m.two_level) { /* the mean: which rows pass through a mate is a matter of chance */
            CHECK(t.near_rows + 1e-9 >= (double)(ranks * tokens) - t.kept - (double)far_pairs &&
                  t.near_rows <= (double)(ranks * tokens) - t.kept + 1e-9);
        } else
            CHECK(fabs(predicted.near_bytes * (double)ranks - 4000 * t.near_rows) < 1e-6 &&
                  near_to(t.near_rows + t.far_rows + t.kept, (double)(ranks * tokens)));
    }
}

/* Every rank sends one row to every rank: then what passes through is no matter of chance. */
static void test_passing(void) {
    size_t ranks, p;
    for (ranks = 1; ranks <= SOME_RANKS; ranks *= 2)
        for (p = 1; p <= ranks; p *= 2) {
            machine m = paper_machine();
            costs c = paper_costs();
            work w = paper_work((double)ranks);
            tally t;
            times predicted;
            size_t from, to;
            memset(&t, 0, sizeof t);
            for (from = 0; from < ranks; from++)
                for (to = 0; to < ranks; to++) send_row(&t, from, to, p, 1);
            count_messages(&t, ranks, p, 1);
            m.ranks_per_node = (double)p, m.two_level = 1;
            w.tokens = (double)ranks, w.pairs = 1, w.away = random_away((double)ranks), w.far = random_away((double)(ranks / p)),
            w.layers = 1;
            predicted = predict(&m, &c, &w);
            CHECK(near_to(predicted.near_bytes * (double)ranks, 4000 * t.near_rows) &&
                  near_to(predicted.far_bytes * (double)ranks, 4000 * t.far_rows));
        }
}

/* A ring that really sums: as many messages and numbers as the formula has, and every rank ends with the sum. */
static void test_ring(void) {
    enum { PART = 3 };
    static long data[SOME_RANKS][SOME_RANKS * PART], sent[SOME_RANKS][PART];
    size_t ranks;
    for (ranks = 1; ranks <= SOME_RANKS; ranks++) {
        machine m = paper_machine();
        costs c = paper_costs();
        work w = paper_work((double)ranks);
        size_t r, i, s, messages = 0, good = 0;
        for (r = 0; r < ranks; r++)
            for (i = 0; i < ranks * PART; i++) data[r][i] = (long)(r * 100 + i);
        for (s = 0; s + 1 < 2 * ranks - 1; s++) { /* first parts are added up on their way round, then they go round once more */
            for (r = 0; r < ranks; r++) memcpy(sent[r], data[r] + (r + 2 * ranks - s) % ranks * PART, sizeof sent[r]);
            for (r = 0; r < ranks; r++)
                for (i = 0; i < PART; i++) {
                    const size_t from = (r + ranks - 1) % ranks;
                    long *to = data[r] + (from + 2 * ranks - s) % ranks * PART + i;
                    *to = s + 1 < ranks ? *to + sent[from][i] : sent[from][i];
                }
            messages++;
        }
        for (r = 0; r < ranks; r++)
            for (i = 0; i < ranks * PART; i++) good += data[r][i] == (long)(ranks * (ranks - 1) / 2 * 100 + ranks * i);
        CHECK(good == ranks * ranks * PART);
        m.ranks_per_node = m.cores = 64, m.near_link.latency = 1, m.near_link.bandwidth = 1, m.ring = 1;
        w.shared_numbers = (double)(ranks * PART), w.real_bytes = 1;
        CHECK(near_to(predict(&m, &c, &w).sums.bytes, (double)(messages * PART)));
        CHECK(near_to(predict(&m, &c, &w).sums.latency, (double)(3 * messages)));
        m.cores = 0.5; /* and so on half a core for all of them, the same many times slower */
        CHECK(near_to(predict(&m, &c, &w).sums.bytes, (double)(messages * PART * ranks * 2)));
        m.cores = 64;
        m.ring = 0; /* on one node the other way moves as much in as many messages */
        CHECK(near_to(predict(&m, &c, &w).sums.bytes, (double)(messages * PART)) &&
              near_to(predict(&m, &c, &w).sums.latency, (double)(3 * messages)));
    }
}

/* The parts of an exchange and of a computation one after another, as they really could run: parts travel there as early as the link is free with two under
   way, and back when they are computed. */
static double pipeline(int chunks, double there, double compute, double back) {
    double arrived[64], computed[64], link_free = 0, core_free = 0;
    int i;
    for (i = 0; i < chunks; i++) {
        link_free = arrived[i] = link_free + there / chunks;
        if (i >= 1) link_free = more(link_free, computed[i - 1]) + back / chunks;
        core_free = computed[i] = more(core_free, arrived[i]) + compute / chunks;
    }
    return more(link_free, computed[chunks - 1]) + back / chunks;
}

/* What is said to be hidden is no more than a real order of events hides, but for one part's computation. */
static void test_chunks(void) {
    int i;
    for (i = 0; i < 500; i++) {
        machine m = paper_machine();
        const double travel = 0.01 * (double)(1 + below(100)), compute = 0.01 * (double)(1 + below(100));
        double real, said;
        m.chunks = 1 + (int)below(32);
        real = pipeline(m.chunks, travel / 2, compute, travel / 2), said = travel + compute - hidden(&m, compute, travel);
        CHECK(said >= more(travel, compute) - 1e-12 && said <= travel + compute + 1e-12);
        CHECK(fabs(real - said) <= (more(compute, travel) / m.chunks) * (1 + 1e-9));
        if (m.chunks == 1) CHECK(near_to(real, said) && near_to(said, travel + compute));
        if (compute >= travel) CHECK(near_to(real, said));
    }
}

static const char *const example =
    "moe-scale 1\n# two seeds\n\ncores 2\nreal_bytes 4\nd_model 64\nexperts 8\nlayers 2\nnear_latency 1e-6\nnear_bandwidth 2e9\n"
    "method baseline\ntop_k 2\ncapacity_factor 1.1\nexpert_forward 4e-6\nexpert_backward 8e-6\nroute 1e-6\noptimiser 1e-9\nshared_numbers "
    "100000\nexpert_numbers 10000\n"
    "run 1\ntokens 1000\nstep 0.1\ncompute 0.1\npairs 2000\nimbalance_at_2 1.1\nimbalance_at_4 1.2\nimbalance_at_8 1.5\nloss 2\n"
    "method locmoe_plus\ntop_k 1\nexpert_forward 4e-6\nexpert_backward 8e-6\nother 6e-5\nshared_numbers 100000\nexpert_numbers "
    "10000\nexperts_most 64\nrun 1\ntokens 1000\n"
    "step 0.09\npairs 600\n"
    "cores 2\nmethod baseline\nrun 4\ntokens 1000\nranks_per_node 2\nstep 0.06\ncompute 0.05\nexchange 0.005\nwaiting 0.005\npairs "
    "2000\npairs_away 750\npairs_far 250\n"
    "rows_sent 3000\nbytes_sent 2e6\nimbalance 1.25\n";

static measurements *read_example(void) {
    static measurements m;
    CHECK(read_measurements(&m, example, strlen(example)));
    return &m;
}

static void test_reading(void) {
    measurements *m = read_example();
    a_method *f = m->methods;
    a_run *four = find_run(f, 4);
    machine local_machine;
    work w;
    times t;
    if (!CHECK(m->n_methods == 2 && f->n_runs == 2 && four != NULL)) return;
    CHECK(exactly(m->head.d_model, 64) && exactly(m->head.threads, 1) && exactly(f->route, 1e-6) && exactly(four->pairs_far, 250) &&
          exactly(find_run(f, 1)->imbalance_at[2], 1.2));
    CHECK(strcmp(m->methods[1].name, "locmoe_plus") == 0 && exactly(m->methods[1].other, 6e-5) && exactly(m->methods[1].route, 0));
    CHECK(near_to(f->other, (0.1 - 2 * (2000 * 12e-6 + 1e-3) - 260000e-9) / 1000)); /* left over */
    w = work_of_run(&m->head, f, find_run(f, 1)), local_machine = machine_of_run(&m->head, find_run(f, 1));
    {
        const costs c = costs_of(f);
        t = predict(&local_machine, &c, &w);
        CHECK(near_to(t.step, 0.1));
        w = work_of_run(&m->head, f, four), local_machine = machine_of_run(&m->head, four);
        CHECK(exactly(w.ranks, 4) && exactly(w.tokens, 250) && exactly(w.pairs, 2) && exactly(w.away, 0.375) && exactly(w.far, 0.125));
        CHECK(exactly(w.imbalance, 1.25));
        t = predict(&local_machine, &c, &w);
        CHECK(near_to(t.bytes,
                      2 * (3000 * 64 * 4 +
                           4 * 3 *
                               (250 * 33 + 8 * 11 +
                                32)))); /* rows; logits and mask of 250 tokens, 9 words and 2 experts, half of 8 words, to three ranks */
        CHECK(near_to(t.experts, 2 * 2 * 500 * 12e-6)); /* crowd 2: four ranks on two cores */
        CHECK(near_to(t.rows.bytes, 2 * 8 * 187.5 * 256 / 2e9) && near_to(t.rows.latency, 2 * 8 * 3 * 1e-6));
    }
}

/* Shares and imbalance beyond what was run. */
static void test_beyond(void) {
    measurements *m = read_example();
    a_method *f = m->methods, *plus = f + 1;
    work w = work_beyond(&m->head, f, 64, 8, 500);
    CHECK(near_to(locality(f, 0), 0.375 / 0.75) && near_to(locality(f, 1), 0.125 / 0.5));
    CHECK(near_to(w.away, 0.5 * 63 / 64) && near_to(w.far, 0.25 * 7 / 8) && exactly(w.experts, 64) && exactly(w.base_experts, 8));
    CHECK(exactly(w.imbalance, 1.5) && exactly(w.pairs, 2) && exactly(w.tokens, 500));
    CHECK(exactly(imbalance_up_to(f, 1), 1) && exactly(imbalance_up_to(f, 2), 1.1) && exactly(imbalance_up_to(f, 4), 1.2) &&
          exactly(imbalance_up_to(f, 1024), 1.5));
    w = work_beyond(&m->head, f, 1, 8, 500);
    CHECK(exactly(w.away, 0) && exactly(w.far, 0) && exactly(w.imbalance, 1) && exactly(w.experts, 8));
    w = work_beyond(&m->head, plus, 16, 8, 500); /* no run tells: as at random */
    CHECK(!known(locality(plus, 0)) && near_to(w.away, 15.0 / 16) && near_to(w.far, 0.5));
    CHECK(can_have(plus, 64) && can_have(plus, 8) && !can_have(plus, 128) && !can_have(plus, 24) && can_have(f, 1000));
}

/* The example with one line replaced; it must be read. */
static measurements *read_other(const char *old, const char *now) {
    static char text[4000];
    static measurements m;
    const char *at = strstr(example, old);
    if (!CHECK(at != NULL)) return read_example();
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - example), example, now, at + strlen(old));
    if (!CHECK(read_measurements(&m, text, strlen(text)))) printf("    %s: %s\n", now, m.wrong);
    return &m;
}

/* What is left out has its usual value, and 0 is a value. */
static void test_defaults(void) {
    measurements *m = read_example();
    a_method *f = m->methods + 1;
    a_run *r = f->runs;
    CHECK(exactly(m->head.threads, 1) && exactly(f->route, 0) && exactly(f->optimiser, 0) && exactly(f->experts_most, 64) &&
          exactly(m->methods[0].experts_most, 0));
    CHECK(exactly(f->gathers, 2) && exactly(f->gather_bytes, 1) && exactly(r->pairs_away, 0) && exactly(r->pairs_far, 0));
    CHECK(exactly(r->ranks_per_node, 1) && exactly(r->two_level, 0) && exactly(r->chunks, 1) && !known(r->imbalance));
    m = read_other("near_latency 1e-6\nnear_bandwidth 2e9\n", "");
    CHECK(exactly(m->head.near_latency, 0.2e-6) && exactly(m->head.near_bandwidth, 8e9));
    m = read_other("other 6e-5\n", "other 0\nroute 2e-6\ngathers 0\n");
    CHECK(exactly(m->methods[1].other, 0) && exactly(m->methods[1].route, 2e-6) && exactly(m->methods[1].gathers, 0));
    m = read_other("imbalance 1.25\n", ""); /* then what the run with one rank says of four */
    CHECK(exactly(work_of_run(&m->head, m->methods, find_run(m->methods, 4)).imbalance, 1.2));
    m = read_other("run 4\ntokens 1000\nranks_per_node 2\n", "run 3\ntokens 1000\n");
    CHECK(exactly(work_of_run(&m->head, m->methods, find_run(m->methods, 3)).imbalance, 1.25) &&
          exactly(find_run(m->methods, 3)->ranks_per_node, 3));
    m = read_other("pairs 600\n", "pairs 0\nimbalance 1\n"); /* nothing is routed */
    CHECK(exactly(work_of_run(&m->head, m->methods + 1, m->methods[1].runs).away, 0) &&
          exactly(work_of_run(&m->head, m->methods + 1, m->methods[1].runs).pairs, 0));
    m = read_other("run 4\n", "run 8\n"); /* as many ranks as experts */
    CHECK(exactly(machine_of_run(&m->head, find_run(m->methods, 8)).ranks_per_node, 2) &&
          machine_of_run(&m->head, find_run(m->methods, 8)).one_machine);
    m = read_other("pairs_away 750\npairs_far 250\nrows_sent 3000\n",
                   "pairs_away 2000\npairs_far 2000\ntwo_level 1\nchunks 3\napart 1\n"); /* none stays: twice the node's share */
    CHECK(exactly(work_beyond(&m->head, m->methods, 64, 8, 1).away, 1) && exactly(work_beyond(&m->head, m->methods, 64, 8, 1).far, 1));
    CHECK(machine_of_run(&m->head, find_run(m->methods, 4)).two_level == 1 &&
          machine_of_run(&m->head, find_run(m->methods, 4)).chunks == 3 &&
          machine_of_run(&m->head, find_run(m->methods, 4)).apart == 1 && !machine_of_run(&m->head, m->methods[0].runs).apart);
    CHECK(power_of(1) == 0 && power_of(3) == 2 && power_of(65536) == 16 && power_of(1e9) == 16 && is_power(65536) && !is_power(131072) &&
          !is_power(3));
}

/* A step that is a little shorter than its parts leaves nothing over. */
static void test_left_over(void) {
    measurements *m = read_other("step 0.1\n", "step 0.04\n");
    CHECK(exactly(m->methods[0].other, 0));
    m = read_other("step 0.1\n", "step 0.06\n");
    CHECK(near_to(m->methods[0].other, (0.06 - 2 * (2000 * 12e-6 + 1e-3) - 260000e-9) / 1000));
}

/* Files that are refused, and what is said of them: the example with a line that is left out, put in or replaced. */
static void test_refusals(void) {
    static const struct {
        const char *old, *now, *says;
    } cases[] = {
        {"moe-scale 1\n", "moe-scale 2\n", "line 1: it is not \"moe-scale 1\""},
        {"d_model 64\n", "", "cores, real_bytes, d_model"},
        {"d_model 64\n", "d_model 64\nd_modle 3\n", "line 7: d_modle: no such key"},
        {"d_model 64\n", "d_model 64.5\n", "line 6: d_model 64.5: not a value"},
        {"d_model 64\n", "d_model 64x\n", "not a value"},
        {"experts 8\n", "experts 8.5\n", "experts 8.5: not a value"},
        {"d_model 64\n", "d_model nan\n", "not a value"},
        {"d_model 64\n", "d_model -1\n", "not a value"},
        {"d_model 64\n", "d_model\n", "a line is a key and a value"},
        {"d_model 64\n", "d_model 64 65\n", "a line is a key and a value"},
        {"cores 2\nmethod", "cores 4\nmethod", "cores has another value above"},
        {"top_k 2\n", "top_k 2\ntop_k 1\n", "top_k has another value above"},
        {"method baseline\ntop", "top", "top_k: there is no method above it"},
        {"method baseline\ntop", "run 1\nmethod baseline\ntop", "run 1: there is no method"},
        {"run 1\ntokens 1000\nstep 0.1\n", "tokens 1000\nrun 1\nstep 0.1\n", "tokens: there is no run"},
        {"run 4\n", "run 1\n", "run 1 stands twice"},
        {"run 4\n", "run 4.5\n", "not a number of ranks"},
        {"run 4\n", "run 3\n", "ranks_per_node must divide"},
        {"run 4\n", "run 16\n", "more ranks than experts"},
        {"pairs_away 750\n", "", "pairs_away is missing"},
        {"pairs_away 750\n", "pairs_away 2001\n", "does not hold"},
        {"rows_sent 3000\n", "rows_sent 2900\n", "rows_sent is not"},
        {"pairs_away 750\n", "pairs_away 240\n", "does not hold"},
        {"imbalance 1.25\n", "imbalance 4.1\n", "imbalance is above"},
        {"imbalance 1.25\n", "imbalance 0.9\n", "not a value"},
        {"imbalance_at_4 1.2", "imbalance_at_3 1.2", "a power of 2"},
        {"imbalance_at_4 1.2", "imbalance_at_4 4.2", "not from 1 to the number"},
        {"imbalance_at_4 1.2", "imbalance_at_2 1.2", "imbalance_at_2 has another value"},
        {"top_k 2\n", "top_k 2\nimbalance_at_2 1\n", "there is no run above it"},
        {"pairs 600\n", "pairs 8001\n", "more pairs than"},
        {"step 0.09\n", "", "tokens, step or pairs are missing"},
        {"expert_forward 4e-6\nexpert_backward 8e-6\nother", "other", "locmoe_plus: expert_forward"},
        {"step 0.1\n", "step 0.01\n", "add up to more than 1.5 times"},
        {"run 1\ntokens 1000\nstep 0.09\n", "run 2\npairs_away 1\ntokens 1000\nstep 0.09\n", "the run with one rank is missing"},
        {"method locmoe_plus\n", "method a_name_of_more_than_23_letters\n", "1 to 23 letters"},
        {"imbalance 1.25\n", "imbalance 1.25", "the line does not end"},
        {"loss 2\n",
         "loss 2                                                                                                                    \n",
         "longer than 119"}};
    char text[4000];
    static measurements m;
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *at = strstr(example, cases[i].old);
        if (!CHECK(at != NULL)) continue;
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - example), example, cases[i].now, at + strlen(cases[i].old));
        if (!CHECK(!read_measurements(&m, text, strlen(text)) && strstr(m.wrong, cases[i].says) != NULL))
            printf("    %s: %s\n", cases[i].now, m.wrong);
    }
    CHECK(!read_measurements(&m, "", 0) && strstr(m.wrong, "the head") != NULL);
    CHECK(!read_measurements(&m, "moe-scale 1\n\0a 1\n", 17) && strstr(m.wrong, "byte 0") != NULL);
    strcpy(text, example);
    for (i = 0; i < MOST_METHODS; i++) snprintf(text + strlen(text), 40, "method m%d\n", (int)i);
    CHECK(!read_measurements(&m, text, strlen(text)) && strstr(m.wrong, "more than 8 methods") != NULL);
    strcpy(text, example);
    for (i = 0; i < MOST_RUNS; i++) snprintf(text + strlen(text), 40, "run %d\n", 100 + (int)i);
    CHECK(!read_measurements(&m, text, strlen(text)) && strstr(m.wrong, "more than 16 runs") != NULL);
}

/* Every prefix of a file, and files with one byte changed, are read or refused with words; nothing else happens. */
static void test_damage(void) {
    char text[4000];
    static measurements m;
    const size_t size = strlen(example);
    size_t i, good = 0;
    for (i = 0; i < size; i++) good += read_measurements(&m, example, i) ? m.n_methods > 0 : m.wrong[0] != '\0';
    for (i = 0; i < 4000; i++) {
        strcpy(text, example), text[below(size)] = (char)below(256);
        good += read_measurements(&m, text, size) ? m.n_methods > 0 : m.wrong[0] != '\0';
    }
    CHECK(good == size + 4000);
}

static int run_tests(void) {
    test_paper();
    test_one_rank();
    test_links();
    test_levels();
    test_monotonic();
    test_rows();
    test_passing();
    test_ring();
    test_chunks();
    test_reading();
    test_beyond();
    test_defaults();
    test_left_over();
    test_refusals();
    test_damage();
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}

/* ---- the program ---------------------------------------------------------------------------------------------------------------------------- */

static int fail(const char *what, const char *why) { return fprintf(stderr, "scale: %s: %s\n", what, why), 2; }

static int show_help(void) {
    static const char *const levels[] = {
        "head:", "method NAME begins a method or goes on with it; its first run has one rank:", "run R, of R ranks:"};
    const struct option *o;
    const struct key *k;
    printf("scale                   tests the model\nscale FILE [options]    predicts the time of a training step on many ranks from what "
           "FILE says was measured on a few\n");
    for (o = options; o < options + OPTIONS; o++) printf("  %-18s %-5s %s\n", o->name, o->value, o->help);
    printf("\nFILE begins with the line moe-scale 1; then lines \"key value\": seconds, bytes, numbers. Lines that begin with # are "
           "skipped.\n");
    for (k = keys; k < keys + KEYS; k++) {
        if (k == keys || k->level != k[-1].level) printf("%s\n", levels[k->level]);
        printf("  %-18s %s\n", k->name, k->help);
    }
    printf("  %-18s in run 1: the imbalance that R = 2, 4, 8, ... ranks would have\n", "imbalance_at_R");
    return printf("Exit status: 0 done, 1 a test or --within failed, 2 the file or an option is wrong.\n") < 0;
}

static int set_option(const struct option *o, const char *value) {
    double number;
    if (o->kind == TEXT) {
        *(const char **)o->at = value;
        return 0;
    }
    if (!read_number(value, &number) || number < o->least || number > o->most || (o->kind == WHOLE && floor(number) < number)) {
        fprintf(stderr, "scale: %s %s: not a value from %g to %g; -h explains\n", o->name, value, o->least, o->most);
        return 2;
    }
    *(double *)o->at = number;
    return 0;
}

static int read_options(int count, char **words) {
    while (--count > 0) {
        const char *word = *++words;
        const struct option *o = options;
        while (o < options + OPTIONS && strcmp(word, o->name) != 0) o++;
        if (*word != '-' && set.file == NULL) set.file = word;
        else if (o == options + OPTIONS) return fail(word, "no such option, or a second file; -h explains");
        else if (o->kind == FLAG) *(double *)o->at = 1;
        else if (--count == 0) return fail(word, "its value is missing; -h explains");
        else if (set_option(o, *++words)) return 2;
    }
    if (network_named(set.network) == NULL) return fail(set.network, "no such network; ib100, tcp10 and tcp1 are known");
    if (!is_power(set.ranks_per_node)) return fail("--ranks-per-node", "it must be a power of 2");
    return set.file == NULL && set.idle <= 0 ? fail("options", "the file is missing; -h explains") : 0;
}

static int read_file(measurements *m) {
    static char text[MOST_BYTES];
    FILE *f = fopen(set.file, "rb");
    size_t size;
    int good;
    if (f == NULL) return fail(set.file, "it cannot be opened; `sh examples/run mpi --measure FILE` writes one");
    size = fread(text, 1, sizeof text, f);
    good = !ferror(f);
    fclose(f);
    if (!good) return fail(set.file, "it cannot be read");
    if (size == sizeof text) return fail(set.file, "it is larger than 1 MB");
    return read_measurements(m, text, size) ? 0 : fail(set.file, m->wrong);
}

/* What was printed has arrived; else that is the failure. */
static int finish(void) { return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0; }

static int show_all(measurements *m) {
    errors worst;
    int i, bad = 0;
    show_machine(&m->head);
    for (i = 0; i < m->n_methods; i++) show_method(&m->head, m->methods + i);
    show_legend();
    worst = show_runs(m);
    if (finish()) return 2;
    if (set.within > 0 && worst.factor > set.within)
        bad = 1, fprintf(stderr, "scale: a step of several ranks is off by a factor of %.3g\n", worst.factor);
    if (set.bytes_within > 0 && worst.percent > set.bytes_within)
        bad = 1, fprintf(stderr, "scale: the bytes of a step are off by %.3g %%\n", worst.percent);
    return bad;
}

/* Works for two seconds of the clock on the wall, and looks how many of them it had. */
static int is_idle(void) {
    time_t began = time(NULL), first;
    clock_t from;
    double share;
    while ((first = time(NULL)) == began) continue;
    from = clock();
    while (difftime(time(NULL), first) < 2) continue;
    share = (double)(clock() - from) / CLOCKS_PER_SEC / 2;
    printf("a process has %.0f %% of a processor\n", 100 * share);
    return share < 0.9;
}

int main(int count, char **words) {
    static measurements m;
    int status;
    if (count == 1) return run_tests();
    if (strcmp(words[1], "-h") == 0 || strcmp(words[1], "--help") == 0) return show_help();
    status = read_options(count, words);
    if (status == 0 && set.idle > 0) return is_idle();
    if (status == 0) status = read_file(&m);
    if (status != 0 || set.markdown <= 0) return status != 0 ? status : show_all(&m);
    show_markdown(&m);
    return finish();
}
