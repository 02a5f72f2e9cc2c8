/* scale.c - tests the model of training on many ranks, examples/mpi/scale.h.

       cc -std=c99 -O2 -I. tests/examples/scale.c -o scale -lm && ./scale
*/

#include "../../examples/mpi/scale.h"
#include "../test.h"

/* ---- tests ---- */

static int near_to(double a, double b) { return fabs(a - b) <= 1e-12 * more(fabs(a), fabs(b)); }
static int exactly(double a, double b) { return !(a < b) && !(a > b); }

static unsigned long random_state;
static size_t below(size_t n) {
    random_state = (random_state * 1664525u + 1013904223u) & 0xFFFFFFFFu;
    return (size_t)(random_state >> 8) % n;
}

/* Eight ranks on two machines, with numbers that are easy on paper. */
static machine paper_machine(void) {
    machine m;
    memset(&m, 0, sizeof m);
    m.near_link.latency = 1e-6;
    m.near_link.bandwidth = 1e9;
    m.far_link.latency = 1e-5;
    m.far_link.bandwidth = 1e8;
    m.cores = 4;
    m.ranks_per_machine = 4;
    m.chunks = 1;
    return m;
}

static costs paper_costs(void) {
    costs c;
    c.expert_forward = 1e-5;
    c.expert_backward = 3e-5;
    c.route = 1e-6;
    c.other = 1e-4;
    c.optimizer = 1e-8;
    return c;
}

static work paper_work(double ranks) {
    work w;
    memset(&w, 0, sizeof w);
    w.ranks = ranks;
    w.tokens = 1000;
    w.layers = 2;
    w.experts = 16;
    w.base_experts = 16;
    w.assignments = 2;
    w.away = 0.5;
    w.far = 0.25;
    w.imbalance = 1;
    w.d_model = 250;
    w.real_bytes = 4;
    w.shared_numbers = 1e6;
    w.expert_numbers = 1e5;
    w.threads = 1;
    w.gathers = 1;
    w.gather_bytes = 0;
    if (ranks <= 1) {
        w.away = 0;
        w.far = 0;
    }
    return w;
}

static machine random_machine(void) {
    static const double nodes[] = {1, 2, 4, 8};
    machine m = paper_machine();
    m.ranks_per_machine = nodes[below(4)];
    m.cores = (double)(1 + below(8));
    m.chunks = 1 + (int)below(5);
    m.two_level = (int)below(2);
    m.near_link.latency = 1e-7 * (double)(1 + below(50));
    m.near_link.bandwidth = 1e8 * (double)(1 + below(50));
    m.far_link.latency = 1e-6 * (double)(1 + below(50));
    m.far_link.bandwidth = 1e7 * (double)(1 + below(50));
    m.one_machine = below(4) == 0;
    m.ring = (int)below(2);
    m.local_routing = (int)below(2);
    return m;
}

static work random_work(void) {
    work w = paper_work(ldexp(1, (int)below(11)));
    w.tokens = (double)(1 + below(4000));
    w.experts = w.ranks * (double)(1 + below(4));
    w.base_experts = (double)(1 + below(64));
    w.layers = (double)(1 + below(6));
    w.assignments = 0.25 * (double)(1 + below(16));
    w.away = (double)below(101) / 100;
    w.far = w.away * (double)below(101) / 100;
    w.imbalance = 1 + 0.01 * (double)below(300);
    w.d_model = (double)(1 + below(2000));
    w.threads = (double)(1 + below(3));
    w.gathers = (double)below(5);
    w.gather_bytes = (double)below(20);
    if (w.ranks <= 1) {
        w.away = 0;
        w.far = 0;
        w.imbalance = 1;
    }
    return w;
}

/* The case that is worked out on paper, number by number: one level, then by a ring, two levels,
   chunks, an uneven load, local routing, fewer cores. */
static void test_paper_parts(void) {
    machine m = paper_machine();
    costs c = paper_costs();
    work w = paper_work(8);
    times t = predict(&m, &c, &w);
    CHECK(near_to(t.experts, 0.16)); /* 2 mixtures, 1000 tokens, 2 assignments: 4000 rows of 40 us */
    CHECK(near_to(t.route, 0.016));  /* 2 times 8000 tokens of 1 us */
    CHECK(near_to(t.other, 0.1));
    CHECK(near_to(t.optimizer, 0.014)); /* 10^6 shared and 2 x 16/8 x 10^5 own numbers, 10 ns each */
    CHECK(near_to(t.near_bytes, 4e6));  /* 8 exchanges of 2000 x 1/4 rows of 1000 bytes */
    CHECK(near_to(t.far_bytes, 4e6));
    CHECK(near_to(t.rows.latency, 8 * (3e-6 + 4e-5)));
    CHECK(near_to(t.rows.bytes, 8 * (5e5 / 1e9 + 4 * 5e5 / 1e8)));
    CHECK(near_to(t.gather.latency, 2 * (3e-6 + 4e-5)));
    CHECK(near_to(t.gather.bytes, 2 * (3 * 64000 / 1e9 + 4 * 4 * 64000 / 1e8))); /* 1000 x 16 logits to 3 near, 4 far */
    CHECK(near_to(t.counts.latency, (2 * 5 + 3) * (3e-6 + 4e-5)) &&
          near_to(t.counts.bytes, (2 * 88 + 64) * (3 / 1e9 + 4 * 4 / 1e8))); /* 9 words and 16/8 experts; 8 words */
    /* parts of 4 10^6 / 8 bytes, out and back */
    CHECK(near_to(t.sums.bytes, 2 * (3 * 5e5 / 1e9 + 4 * 4 * 5e5 / 1e8)));
    /* before, between and behind two mixtures */
    CHECK(near_to(t.sums.latency, 3 * 2 * (3e-6 + 4e-5)));
    CHECK(exactly(t.waiting, 0) && exactly(t.hidden, 0));
    CHECK(near_to(t.step, 0.29 + 0.000344 + 0.164 + 0.000086 + 0.020864 + 0.000559 + 0.00003912 + 0.163 + 0.000258));
    CHECK(exactly(t.near_messages, 3) && exactly(t.far_messages, 4));
    CHECK(near_to(t.memory, 8000 * 16 * 30));
    CHECK(near_to(t.bytes, 8 * 2 * (4 * 1e6 + 7 * (64000 + 88 + 32))));
}

static void test_paper_ways(void) {
    machine m = paper_machine();
    const costs c = paper_costs();
    work w = paper_work(8);
    times t;
    m.ring = 1;
    t = predict(&m, &c, &w);
    m.ring = 0;
    CHECK(near_to(t.sums.bytes, 14 * 5e5 / 1e8) && near_to(t.sums.latency, 3 * 14e-5));
    m.two_level = 1;
    t = predict(&m, &c, &w);
    CHECK(exactly(t.near_messages, 3) && exactly(t.far_messages, 1));
    /* three of four far rows pass through another rank */
    CHECK(near_to(t.near_bytes, 4e6 + 3e6) && near_to(t.far_bytes, 4e6));
    CHECK(near_to(t.rows.latency, 8 * (3e-6 + 1e-5)));
    CHECK(near_to(t.rows.bytes, 8 * ((5e5 + 3.75e5) / 1e9 + 4 * 5e5 / 1e8)));
    CHECK(near_to(t.gather.latency, 2 * (3e-6 + 4e-5)) && near_to(t.sums.latency, 3 * 2 * (3e-6 + 4e-5)));
    CHECK(near_to(t.counts.latency, (2 * 9 + 3) * (3e-6 + 4e-5)));
    /* before each hop a word for each of two machines */
    CHECK(near_to(t.bytes, 8 * (1.1e7 + 7 * (2 * (64000 + 88 + 4 * 16) + 64))));
    m.chunks = 2;
    t = predict(&m, &c, &w);
    m.chunks = 1; /* only what travels far can hide, under 20 ms forward and 60 ms backward of half the experts */
    CHECK(near_to(t.counts.latency, (2 * 13 + 3) * (3e-6 + 4e-5)));
    CHECK(near_to(t.rows.latency, 2 * 8 * (3e-6 + 1e-5)) &&
          near_to(t.hidden, 0.5 * (0.04 + 8 * (1e-5 * 2 + 0.02) / 2)));
    m.two_level = 0;
    w.imbalance = 1.5;
    t = predict(&m, &c, &w);
    CHECK(near_to(t.waiting, 0.5 * 0.16 + 0.5 * t.rows.bytes));
    w.imbalance = 1;
    m.chunks = 4;
    t = predict(&m, &c, &w);
    CHECK(near_to(t.rows.latency, 4 * 8 * 43e-6));
    CHECK(near_to(t.hidden,
                  /* forward 40 ms of experts hide under rows, backward all rows under 120 ms */
                  0.75 * (0.04 + total(t.rows) / 2)));
}

static void test_paper_machines(void) {
    machine m = paper_machine();
    const costs c = paper_costs();
    work w = paper_work(8);
    times t;
    m.local_routing = 1;
    t = predict(&m, &c, &w);
    CHECK(near_to(t.route, 0.002) && exactly(total(t.gather), 0));   /* 2 times 1000 tokens */
    /* no word before gathering, two for the state, one for the routers' loss */
    CHECK(near_to(t.counts.latency, (2 * 6 + 4) * 43e-6));
    CHECK(near_to(t.sums.latency, (3 * 2 + 2) * 43e-6));             /* 34 numbers of state go to all at once */
    CHECK(near_to(t.sums.bytes, 2 * (3 * 5e5 / 1e9 + 4 * 4 * 5e5 / 1e8) + 2 * 136 * (3 / 1e9 + 4 * 4 / 1e8)));
    CHECK(near_to(t.bytes, 8 * (2 * 4 * 1e6 + 7 * 8 * (2 * 12 + 10))) && near_to(t.memory, 1000 * 16 * 30));
    w.experts = 256;
    t = predict(&m, &c, &w);
    w.experts = 16; /* 514 numbers are added up part by part */
    CHECK(near_to(t.sums.latency, (3 * 2 + 2 * 2) * 43e-6));
    m = paper_machine();
    m.cores = 2;
    t = predict(&m, &c, &w);
    CHECK(near_to(t.experts, 0.32) && near_to(t.other, 0.2)); /* four ranks on two cores */
    w.imbalance = 1.9;
    t = predict(&m, &c, &w);
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
        w.ranks = 1;
        w.away = w.far = 0;
        w.imbalance = 1;
        t = predict(&m, &c, &w);
        slow = more(1, w.threads / m.cores);
        CHECK(exactly(moving(&t), 0) && exactly(t.waiting, 0) && exactly(t.hidden, 0) && exactly(t.bytes, 0));
        CHECK(exactly(t.near_messages, 0) && exactly(t.far_messages, 0));
        CHECK(near_to(t.step, slow * (w.layers * w.tokens * (w.assignments * 4e-5 + 1e-6 * w.experts / w.base_experts) +
                                      w.tokens * 1e-4 + (1e6 + w.layers * w.experts * 1e5) * 1e-8)));
    }
}

/* Messages and bytes that cost nothing leave computing and the wait for the fullest. Twice the
   bandwidth halves the bytes' time, and nothing else changes. */
static void test_links(void) {
    int i;
    for (i = 0; i < 500; i++) {
        machine m = random_machine(), fast = m;
        machine late = m, no_cost = m;
        costs c = paper_costs();
        work w = random_work();
        times t, other;
        double hiding;
        if (w.ranks <= m.ranks_per_machine) w.far = 0;
        t = predict(&m, &c, &w);
        no_cost.near_link.latency = no_cost.far_link.latency = 0;
        no_cost.near_link.bandwidth = no_cost.far_link.bandwidth = HUGE_VAL;
        other = predict(&no_cost, &c, &w);
        CHECK(exactly(moving(&other), 0) &&
              near_to(other.step, computing(&other) + more(0, w.imbalance / crowd(&m, &w) - 1) * other.experts));
        CHECK(exactly(computing(&other), computing(&t)) && exactly(other.bytes, t.bytes));
        fast.near_link.bandwidth *= 2;
        fast.far_link.bandwidth *= 2;
        other = predict(&fast, &c, &w);
        CHECK(exactly(other.rows.bytes, t.rows.bytes / 2) && exactly(other.gather.bytes, t.gather.bytes / 2));
        CHECK(exactly(other.counts.bytes, t.counts.bytes / 2) && exactly(other.sums.bytes, t.sums.bytes / 2));
        CHECK(exactly(other.rows.latency, t.rows.latency) && exactly(other.sums.latency, t.sums.latency) &&
              exactly(computing(&other), computing(&t)));
        late.near_link.latency *= 2;
        late.far_link.latency *= 2;
        other = predict(&late, &c, &w);
        CHECK(exactly(other.rows.latency, 2 * t.rows.latency) && exactly(other.gather.latency, 2 * t.gather.latency));
        CHECK(near_to(other.sums.latency, 2 * t.sums.latency) && exactly(other.rows.bytes, t.rows.bytes));
        fast = m;
        fast.far_link.latency *= 2;
        fast.far_link.bandwidth /= 3;
        other = predict(&fast, &c, &w);
        /* then nothing goes by the far link */
        if (m.one_machine || w.ranks <= m.ranks_per_machine) CHECK(exactly(other.step, t.step));
        else CHECK(other.step > t.step);
        hiding = total(t.rows) - (m.two_level ? total(t.rows_inside) : 0);
        CHECK(near_to(t.step, computing(&t) + moving(&t) + t.waiting - t.hidden));
        CHECK(near_to(t.hidden, (m.chunks - 1.0) / m.chunks *
                                    (less(t.experts / 4, hiding / 2) + less(t.experts * 3 / 4, hiding / 2))));
        CHECK(t.step >= computing(&t) && t.hidden <= more(total(t.rows), t.experts));
    }
}

/* Two levels: fewer messages wherever there are several ranks on several machines, the same far
   bytes, no fewer near ones. */
static void test_levels(void) {
    double ranks, p;
    for (p = 1; p <= 16; p *= 2)
        for (ranks = 1; ranks <= 1024; ranks *= 2) {
            machine one = paper_machine(), two;
            costs c = paper_costs();
            work w = paper_work(ranks);
            times a, b;
            one.ranks_per_machine = one.cores = p;
            one.ring = 1;
            if (ranks <= p) w.far = 0;
            two = one;
            two.two_level = 1;
            a = predict(&one, &c, &w);
            b = predict(&two, &c, &w);
            CHECK(exactly(a.near_messages + a.far_messages, ranks - 1));
            if (p > 1 && ranks > p)
                CHECK(b.near_messages + b.far_messages < ranks - 1 && b.far_messages < a.far_messages);
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
            if (k == 0) w.assignments *= 1.25;
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
            w.ranks *= 2;
            w.experts *= 2;
            w.away = more(w.away, 0.01);
            CHECK(predict(&m, &c, &w).gather.bytes >= predict(&m, &c, &base).gather.bytes &&
                  predict(&m, &c, &w).route > predict(&m, &c, &base).route);
            m.local_routing = 1; /* local routing: as many tokens as one rank has; only the experts have doubled */
            CHECK(near_to(predict(&m, &c, &w).route * crowd(&m, &base),
                          2 * predict(&m, &c, &base).route * crowd(&m, &w)));
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
    size_t mate = from / p * p + to % p; /* of the own machine, in the place of the goal */
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
            t->near_rows += from / p == to / p ? t->rows[from][to] : 0;
            t->far_rows += from / p != to / p ? t->rows[from][to] : 0;
        }
        t->most_near = more(t->most_near, (double)near_count);
        t->most_far = more(t->most_far, (double)far_count);
    }
}

/* Tokens choose experts at random; what is counted row by row is what the formulas say of the mean
   rank. Every row arrives or stays. */
static void test_rows(void) {
    int trial;
    for (trial = 0; trial < 200; trial++) {
        const size_t ranks = (size_t)1 << below(5), p = (size_t)1 << below(5);
        const size_t on = p < ranks ? p : ranks, tokens = 1 + below(SOME_TOKENS);
        machine m = paper_machine();
        costs c = paper_costs();
        work w = paper_work((double)ranks);
        tally t;
        times predicted;
        size_t i, far_pairs = 0;
        memset(&t, 0, sizeof t);
        m.ranks_per_machine = (double)p;
        m.two_level = (int)below(2);
        for (i = 0; i < ranks * tokens; i++) {
            const size_t from = i / tokens, to = below(ranks);
            send_row(&t, from, to, on, m.two_level);
            far_pairs += from / on != to / on;
        }
        count_messages(&t, ranks, on, m.two_level);
        w.tokens = (double)tokens;
        w.assignments = 1;
        w.away = 1 - t.kept / (double)(ranks * tokens);
        w.far = (double)far_pairs / (double)(ranks * tokens);
        w.layers = 1;
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
            m.ranks_per_machine = (double)p;
            m.two_level = 1;
            w.tokens = (double)ranks;
            w.assignments = 1;
            w.away = random_away((double)ranks);
            w.far = random_away((double)(ranks / p));
            w.layers = 1;
            predicted = predict(&m, &c, &w);
            CHECK(near_to(predicted.near_bytes * (double)ranks, 4000 * t.near_rows) &&
                  near_to(predicted.far_bytes * (double)ranks, 4000 * t.far_rows));
        }
}

/* A ring that really sums: as many messages and numbers as the formula has, and every rank ends
   with the sum. */
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
        for (s = 0; s + 1 < 2 * ranks - 1; s++) {
            /* first parts are added up on their way round, then they go round once more */
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
        m.ranks_per_machine = m.cores = 64;
        m.near_link.latency = 1;
        m.near_link.bandwidth = 1;
        m.ring = 1;
        w.shared_numbers = (double)(ranks * PART);
        w.real_bytes = 1;
        CHECK(near_to(predict(&m, &c, &w).sums.bytes, (double)(messages * PART)));
        CHECK(near_to(predict(&m, &c, &w).sums.latency, (double)(3 * messages)));
        m.cores = 0.5; /* and so on half a core for all of them, the same many times slower */
        CHECK(near_to(predict(&m, &c, &w).sums.bytes, (double)(messages * PART * ranks * 2)));
        m.cores = 64;
        m.ring = 0; /* on one machine the other way moves as much in as many messages */
        CHECK(near_to(predict(&m, &c, &w).sums.bytes, (double)(messages * PART)) &&
              near_to(predict(&m, &c, &w).sums.latency, (double)(3 * messages)));
    }
}

/* The parts of an exchange and of a computation one after another, as they really could run: parts
   travel there as early as the link is free with two under way, and back when they are computed. */
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

/* What is said to be hidden is no more than a real order of events hides, but for one part's
   computation. */
static void test_chunks(void) {
    int i;
    for (i = 0; i < 500; i++) {
        machine m = paper_machine();
        const double travel = 0.01 * (double)(1 + below(100)), compute = 0.01 * (double)(1 + below(100));
        double real, said;
        m.chunks = 1 + (int)below(32);
        real = pipeline(m.chunks, travel / 2, compute, travel / 2);
        said = travel + compute - hidden(&m, compute, travel);
        CHECK(said >= more(travel, compute) - 1e-12 && said <= travel + compute + 1e-12);
        CHECK(fabs(real - said) <= (more(compute, travel) / m.chunks) * (1 + 1e-9));
        if (m.chunks == 1) CHECK(near_to(real, said) && near_to(said, travel + compute));
        if (compute >= travel) CHECK(near_to(real, said));
    }
}

static const char *const example =
    "moe-scale 1\n# two seeds\n\ncores 2\nreal_bytes 4\nd_model 64\nexperts 8\nlayers 2\nnear_latency "
    "1e-6\nnear_bandwidth 2e9\n"
    "method baseline\ntop_k 2\ncapacity_factor 1.1\nexpert_forward 4e-6\nexpert_backward 8e-6\nroute 1e-6\noptimizer "
    "1e-9\nshared_numbers 100000\nexpert_numbers 10000\n"
    "run 1\ntokens 1000\nstep 0.1\ncompute 0.1\nassignments 2000\nimbalance_at_2 1.1\nimbalance_at_4 "
    "1.2\nimbalance_at_8 1.5\nloss 2\n"
    "method locmoe_plus\ntop_k 1\nexpert_forward 4e-6\nexpert_backward 8e-6\nother 6e-5\nshared_numbers "
    "100000\nexpert_numbers 10000\nexperts_most 64\nrun 1\ntokens 1000\n"
    "step 0.09\nassignments 600\n"
    "cores 2\nmethod baseline\nrun 4\ntokens 1000\nranks_per_machine 2\nstep 0.06\ncompute 0.05\nexchange "
    "0.005\nwaiting 0.005\nassignments 2000\nassignments_remote 750\nassignments_off_machine 250\n"
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
    CHECK(exactly(m->head.d_model, 64) && exactly(m->head.threads, 1) && exactly(f->route, 1e-6) &&
          exactly(four->assignments_off_machine, 250) && exactly(find_run(f, 1)->imbalance_at[2], 1.2));
    CHECK(strcmp(m->methods[1].name, "locmoe_plus") == 0 && exactly(m->methods[1].other, 6e-5) &&
          exactly(m->methods[1].route, 0));
    CHECK(near_to(f->other, (0.1 - 2 * (2000 * 12e-6 + 1e-3) - 260000e-9) / 1000)); /* left over */
    w = work_of_run(&m->head, f, find_run(f, 1));
    local_machine = machine_of_run(&m->head, find_run(f, 1));
    {
        const costs c = costs_of(f);
        t = predict(&local_machine, &c, &w);
        CHECK(near_to(t.step, 0.1));
        w = work_of_run(&m->head, f, four);
        local_machine = machine_of_run(&m->head, four);
        CHECK(exactly(w.ranks, 4) && exactly(w.tokens, 250) && exactly(w.assignments, 2) && exactly(w.away, 0.375) &&
              exactly(w.far, 0.125));
        CHECK(exactly(w.imbalance, 1.25));
        t = predict(&local_machine, &c, &w);
        CHECK(near_to(t.bytes,
                      2 * (3000 * 64 * 4 +
                           4 * 3 *
                               (250 * 33 + 8 * 12 +
                                /* rows; logits and mask of 250 tokens, 10 words and 2 experts, half
                                   of 8 words, to three ranks */
                                32))));
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
    CHECK(near_to(w.away, 0.5 * 63 / 64) && near_to(w.far, 0.25 * 7 / 8) && exactly(w.experts, 64) &&
          exactly(w.base_experts, 8));
    CHECK(exactly(w.imbalance, 1.5) && exactly(w.assignments, 2) && exactly(w.tokens, 500));
    CHECK(exactly(imbalance_up_to(f, 1), 1) && exactly(imbalance_up_to(f, 2), 1.1) &&
          exactly(imbalance_up_to(f, 4), 1.2) && exactly(imbalance_up_to(f, 1024), 1.5));
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
    CHECK(exactly(m->head.threads, 1) && exactly(f->route, 0) && exactly(f->optimizer, 0) &&
          exactly(f->experts_most, 64) && exactly(m->methods[0].experts_most, 0));
    CHECK(exactly(f->gathers, 2) && exactly(f->gather_bytes, 1) && exactly(r->assignments_remote, 0) &&
          exactly(r->assignments_off_machine, 0));
    CHECK(exactly(r->ranks_per_machine, 1) && exactly(r->two_level, 0) && exactly(r->chunks, 1) &&
          !known(r->imbalance));
    m = read_other("near_latency 1e-6\nnear_bandwidth 2e9\n", "");
    CHECK(exactly(m->head.near_latency, 0.2e-6) && exactly(m->head.near_bandwidth, 8e9));
    m = read_other("other 6e-5\n", "other 0\nroute 2e-6\ngathers 0\n");
    CHECK(exactly(m->methods[1].other, 0) && exactly(m->methods[1].route, 2e-6) && exactly(m->methods[1].gathers, 0));
    m = read_other("imbalance 1.25\n", ""); /* then what the run with one rank says of four */
    CHECK(exactly(work_of_run(&m->head, m->methods, find_run(m->methods, 4)).imbalance, 1.2));
    m = read_other("run 4\ntokens 1000\nranks_per_machine 2\n", "run 3\ntokens 1000\n");
    CHECK(exactly(work_of_run(&m->head, m->methods, find_run(m->methods, 3)).imbalance, 1.25) &&
          exactly(find_run(m->methods, 3)->ranks_per_machine, 3));
    m = read_other("assignments 600\n", "assignments 0\nimbalance 1\n"); /* nothing is routed */
    CHECK(exactly(work_of_run(&m->head, m->methods + 1, m->methods[1].runs).away, 0) &&
          exactly(work_of_run(&m->head, m->methods + 1, m->methods[1].runs).assignments, 0));
    m = read_other("run 4\n", "run 8\n"); /* as many ranks as experts */
    CHECK(exactly(machine_of_run(&m->head, find_run(m->methods, 8)).ranks_per_machine, 2) &&
          machine_of_run(&m->head, find_run(m->methods, 8)).one_machine);
    m = read_other("assignments_remote 750\nassignments_off_machine 250\nrows_sent 3000\n",
                   /* none stays: twice the machine's share */
                   "assignments_remote 2000\nassignments_off_machine 2000\ntwo_level 1\nchunks 3\nlocal_routing 1\n");
    CHECK(exactly(work_beyond(&m->head, m->methods, 64, 8, 1).away, 1) &&
          exactly(work_beyond(&m->head, m->methods, 64, 8, 1).far, 1));
    CHECK(machine_of_run(&m->head, find_run(m->methods, 4)).two_level == 1 &&
          machine_of_run(&m->head, find_run(m->methods, 4)).chunks == 3 &&
          machine_of_run(&m->head, find_run(m->methods, 4)).local_routing == 1 &&
          !machine_of_run(&m->head, m->methods[0].runs).local_routing);
    CHECK(power_of(1) == 0 && power_of(3) == 2 && power_of(65536) == 16 && power_of(1e9) == 16 && is_power(65536) &&
          !is_power(131072) && !is_power(3));
}

/* A step that is a little shorter than its parts leaves nothing over. */
static void test_left_over(void) {
    measurements *m = read_other("step 0.1\n", "step 0.04\n");
    CHECK(exactly(m->methods[0].other, 0));
    m = read_other("step 0.1\n", "step 0.06\n");
    CHECK(near_to(m->methods[0].other, (0.06 - 2 * (2000 * 12e-6 + 1e-3) - 260000e-9) / 1000));
}

/* Files that are refused, and what is said of them: the example with a line that is left out, put
   in or replaced. */
static const struct {
    const char *old, *now, *says;
} refusals[] = {
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
    {"run 4\n", "run 1\n", "run 1 occurs twice"},
    {"run 4\n", "run 4.5\n", "not a number of ranks"},
    {"run 4\n", "run 3\n", "ranks_per_machine must divide"},
    {"run 4\n", "run 16\n", "more ranks than experts"},
    {"assignments_remote 750\n", "", "assignments_remote is missing"},
    {"assignments_remote 750\n", "assignments_remote 2001\n", "does not hold"},
    {"rows_sent 3000\n", "rows_sent 2900\n", "rows_sent is not"},
    {"assignments_remote 750\n", "assignments_remote 240\n", "does not hold"},
    {"imbalance 1.25\n", "imbalance 4.1\n", "imbalance is above"},
    {"imbalance 1.25\n", "imbalance 0.9\n", "not a value"},
    {"imbalance_at_4 1.2", "imbalance_at_3 1.2", "a power of 2"},
    {"imbalance_at_4 1.2", "imbalance_at_4 4.2", "not from 1 to the number"},
    {"imbalance_at_4 1.2", "imbalance_at_2 1.2", "imbalance_at_2 has another value"},
    {"top_k 2\n", "top_k 2\nimbalance_at_2 1\n", "there is no run above it"},
    {"assignments 600\n", "assignments 8001\n", "more assignments than"},
    {"step 0.09\n", "", "tokens, step or assignments are missing"},
    {"expert_forward 4e-6\nexpert_backward 8e-6\nother", "other", "locmoe_plus: expert_forward"},
    {"step 0.1\n", "step 0.01\n", "add up to more than 1.5 times"},
    {"run 1\ntokens 1000\nstep 0.09\n", "run 2\nassignments_remote 1\ntokens 1000\nstep 0.09\n",
     "the run with one rank is missing"},
    {"method locmoe_plus\n", "method a_name_of_more_than_23_letters\n", "1 to 23 letters"},
    {"imbalance 1.25\n", "imbalance 1.25", "the line does not end"},
    {"loss 2\n",
     "loss 2                                                                                              "
     "                      \n",
     "longer than 119"}};

static void test_refusals(void) {
    char text[4000];
    static measurements m;
    size_t i;
    for (i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const char *at = strstr(example, refusals[i].old);
        if (!CHECK(at != NULL)) continue;
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - example), example, refusals[i].now,
                 at + strlen(refusals[i].old));
        if (!CHECK(!read_measurements(&m, text, strlen(text)) && strstr(m.wrong, refusals[i].says) != NULL))
            printf("    %s: %s\n", refusals[i].now, m.wrong);
    }
    CHECK(!read_measurements(&m, "", 0) && strstr(m.wrong, "the head") != NULL);
    CHECK(!read_measurements(&m, "moe-scale 1\n\0a 1\n", 17) && strstr(m.wrong, "zero byte") != NULL);
    strcpy(text, example);
    for (i = 0; i < MOST_METHODS; i++) snprintf(text + strlen(text), 40, "method m%d\n", (int)i);
    CHECK(!read_measurements(&m, text, strlen(text)) && strstr(m.wrong, "more than 8 methods") != NULL);
    strcpy(text, example);
    for (i = 0; i < MOST_RUNS; i++) snprintf(text + strlen(text), 40, "run %d\n", 100 + (int)i);
    CHECK(!read_measurements(&m, text, strlen(text)) && strstr(m.wrong, "more than 16 runs") != NULL);
}

/* Every prefix of a file, and files with one byte changed, are read or refused with words; nothing
   else happens. */
static void test_damage(void) {
    char text[4000];
    static measurements m;
    const size_t size = strlen(example);
    size_t i, good = 0;
    for (i = 0; i < size; i++) good += read_measurements(&m, example, i) ? m.n_methods > 0 : m.wrong[0] != '\0';
    for (i = 0; i < 4000; i++) {
        strcpy(text, example);
        text[below(size)] = (char)below(256);
        good += read_measurements(&m, text, size) ? m.n_methods > 0 : m.wrong[0] != '\0';
    }
    CHECK(good == size + 4000);
}

int main(void) {
    CASE(test_paper_parts());
    CASE(test_paper_ways());
    CASE(test_paper_machines());
    CASE(test_one_rank());
    CASE(test_links());
    CASE(test_levels());
    CASE(test_monotonic());
    CASE(test_rows());
    CASE(test_passing());
    CASE(test_ring());
    CASE(test_chunks());
    CASE(test_reading());
    CASE(test_beyond());
    CASE(test_defaults());
    CASE(test_left_over());
    CASE(test_refusals());
    CASE(test_damage());
    return test_end();
}
