/* scale.c - prints the predictions of scale.h's model for many ranks.

       cc -std=c99 -O2 -I. examples/mpi/scale.c -o scale -lm && ./scale FILE

   FILE holds measurements (`sh examples/run mpi --measure FILE` writes them, scale_measured.txt is
   one); see -h. */

#include "scale.h"

/* ---- tables ---- */

static const struct network {
    const char *name, *about;
    wire link;
} networks[] = {{"ib100", "100 Gb/s InfiniBand or Omni-Path", {1.2e-6, 12.3e9}},
                {"tcp10", "TCP on 10 Gb/s Ethernet", {48e-6, 1.19e9}},
                {"tcp1", "TCP on 1 Gb/s Ethernet", {25e-6, 0.117e9}}};
enum { NETWORKS = sizeof networks / sizeof *networks };

/* The options; 0: the default. */
static struct {
    const char *file, *network;
    double far_latency, far_bandwidth, near_latency, near_bandwidth, cores, ranks_per_machine, tokens, chunks, most,
        within;
    double bytes_within, two_level, local_routing, ring, markdown;
} set = {NULL, "ib100", 0, 0, 0, 0, 0, 8, 0, 1, MOST_RANKS, 0, 0, 0, 0, 0, 0};

enum { FLAG, WHOLE, REAL, TEXT };
static const struct option {
    const char *name, *value;
    int kind;
    void *at;
    double least, most;
    const char *help;
} options[] = {
    {"--network", "NAME", TEXT, &set.network, 0, 0, "between machines: ib100, tcp10 or tcp1"},
    {"--far-latency", "S", REAL, &set.far_latency, 1e-12, 10, "instead: seconds per message between machines"},
    {"--far-bandwidth", "B", REAL, &set.far_bandwidth, 1, 1e15, "bytes per second, of a machine in each direction"},
    {"--near-latency", "S", REAL, &set.near_latency, 1e-12, 10, "inside a machine (as in FILE)"},
    {"--near-bandwidth", "B", REAL, &set.near_bandwidth, 1, 1e15, "of a rank (as in FILE)"},
    {"--ranks-per-machine", "N", WHOLE, &set.ranks_per_machine, 1, 65536, "ranks on a machine, a power of 2 (8)"},
    {"--cores", "N", WHOLE, &set.cores, 1, 1e6, "cores of a machine (as many as the threads of its ranks)"},
    {"--tokens", "N", WHOLE, &set.tokens, 1, 1e9, "tokens per rank and step (as in the run with one rank)"},
    {"--chunks", "N", WHOLE, &set.chunks, 1, 65536, "parts in which experts compute while others travel (1)"},
    {"--two-level", "", FLAG, &set.two_level, 0, 0, "rows for other machines go through one rank of the sender's"},
    {"--local-routing", "", FLAG, &set.local_routing, 0, 0, "every rank routes its own tokens"},
    {"--ring", "", FLAG, &set.ring, 0, 0, "shared gradients are summed in a ring"},
    {"--most", "N", WHOLE, &set.most, 1, 65536, "number of ranks in the last line (1024)"},
    {"--within", "X", REAL, &set.within, 1, 100,
     "fails when a run of FILE is more than X times faster or slower than predicted"},
    {"--bytes-within", "P", REAL, &set.bytes_within, 0.001, 100,
     "fails when a run of FILE sent P percent more or fewer bytes than predicted"},
    {"--markdown", "", FLAG, &set.markdown, 0, 0, "the table of examples/mpi/README.md"}};
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
    m.ranks_per_machine = set.ranks_per_machine;
    m.cores = set.cores > 0 ? set.cores : set.ranks_per_machine * h->threads;
    m.two_level = set.two_level > 0;
    m.ring = set.ring > 0;
    m.local_routing = set.local_routing > 0;
    m.chunks = (int)set.chunks;
    return m;
}

static double tokens_beyond(a_method *f) { return set.tokens > 0 ? set.tokens : find_run(f, 1)->tokens; }

static times predict_beyond(const figures *h, a_method *f, double ranks, work *w) {
    const machine m = machine_beyond(h);
    const costs c = costs_of(f);
    *w = work_beyond(h, f, ranks, set.ranks_per_machine, tokens_beyond(f));
    return predict(&m, &c, w);
}

static void show_machine(const figures *h) {
    const machine m = machine_beyond(h);
    printf("Machines of %.0f ranks on %.0f cores like those measured; inside a machine %.3g us and %.3g GB/s, between "
           "machines %.3g us and %.3g GB/s\n",
           m.ranks_per_machine, m.cores, m.near_link.latency * 1e6, m.near_link.bandwidth / 1e9,
           m.far_link.latency * 1e6, m.far_link.bandwidth / 1e9);
    printf("%.0f MoE layer%s of %.0f experts, beyond that as many as ranks; rows of %.0f numbers; %s, %d chunk%s; %s\n",
           h->layers, h->layers > 1 ? "s" : "", h->experts, h->d_model, m.two_level ? "two levels" : "one level",
           m.chunks, m.chunks > 1 ? "s" : "", m.local_routing ? "local routing" : "global routing");
}

/* Milliseconds of a step by cause, for 1, 2, 4, ... ranks. */
static void show_method(const figures *h, a_method *f) {
    double ranks, alone = 0;
    printf("\n%s: %.0f tokens per rank, %.3g rows at experts per token; assignments leave their rank %.3g and the "
           "machine %.3g times as often as at random\n",
           f->name, tokens_beyond(f), find_run(f, 1)->assignments / find_run(f, 1)->tokens,
           known(locality(f, 0)) ? locality(f, 0) : 1,
           known(locality(f, 1))   ? locality(f, 1)
           : known(locality(f, 0)) ? locality(f, 0)
                                   : 1);
    printf("%6s %7s %9s %9s %8s %8s %8s %8s %8s %8s %8s %8s %6s %9s\n", "ranks", "experts", "step ms", "experts",
           "other", "route", "update", "rows", "gather", "counts", "sums", "waiting", "rate", "memory MB");
    for (ranks = 1; ranks <= set.most; ranks *= 2) {
        work w;
        const times t = predict_beyond(h, f, ranks, &w);
        if (ranks <= 1) alone = t.step;
        if (!can_have(f, w.experts)) {
            printf("%6.0f %7.0f  this router cannot have that many experts: they must divide %.0f\n", ranks, w.experts,
                   f->experts_most);
            continue;
        }
        printf("%6.0f %7.0f %9.4g %9.4g %8.3g %8.3g %8.3g %8.3g %8.3g %8.3g %8.3g %8.3g %6.3f %9.3g\n", ranks,
               w.experts, t.step * 1e3, t.experts * 1e3, t.other * 1e3, t.route * 1e3, t.optimizer * 1e3,
               (total(t.rows) - t.hidden) * 1e3, total(t.gather) * 1e3, total(t.counts) * 1e3, total(t.sums) * 1e3,
               t.waiting * 1e3, alone / t.step, t.memory / 1e6);
    }
}

static void show_legend(void) {
    printf("\nexperts, other, route (deciding which token goes where), update: computing. rows, gather (logits of all "
           "tokens to every rank), counts,\n"
           "sums (shared gradients): exchange, in rows without what chunks hide. memory: for routing one MoE layer "
           "on every rank. waiting: for the busiest rank. rate: tokens per second and rank against one rank.\n"
           "The assumptions are listed in examples/mpi/scale.h.\n");
}

/* ---- measurements beside predictions ---- */

static double off_by(double measured, double predicted) { return more(measured / predicted, predicted / measured); }

static void show_pair(double measured, double predicted) {
    if (known(measured)) printf("  %8.4g %8.4g", measured * 1e3, predicted * 1e3);
    else printf("  %8s %8.4g", "-", predicted * 1e3);
}

/* The largest errors of the runs with several ranks: the step's factor, the bytes' percent. */
typedef struct errors {
    double factor, percent;
} errors;

static void show_run(const figures *h, a_method *f, const a_run *r, errors *worst) {
    const machine m = machine_of_run(h, r);
    const costs c = costs_of(f);
    const work w = work_of_run(h, f, r);
    const times t = predict(&m, &c, &w);
    const double percent = known(r->bytes_sent) && r->bytes_sent > 0 ? (t.bytes / r->bytes_sent - 1) * 100 : 0;
    printf("%-14s %5.0f %5.0f", f->name, r->ranks, r->ranks / r->ranks_per_machine);
    show_pair(r->step, t.step);
    printf(" %+6.0f %%", (t.step / r->step - 1) * 100);
    show_pair(r->compute, computing(&t));
    show_pair(r->exchange, moving(&t) - t.hidden);
    show_pair(r->waiting, t.waiting);
    if (known(r->bytes_sent) && r->bytes_sent > 0) printf("  %+6.1f %%", percent);
    printf("\n");
    if (r->ranks > 1) {
        worst->factor = more(worst->factor, off_by(r->step, t.step));
        worst->percent = more(worst->percent, fabs(percent));
    }
}

static errors show_runs(measurements *m) {
    errors worst = {1, 0};
    int i, k;
    printf("\nRuns on %.0f core%s, milliseconds per step: measured, predicted. bytes: how many more are "
           "predicted than were sent. The step of one rank is exact\n"
           "where `other` is what it had left over. Ranks that share cores wait for them: what is computing in the "
           "prediction is waiting in the measurement.\n",
           m->head.cores, m->head.cores > 1 ? "s" : "");
    printf("%-14s %5s %5s  %17s %8s  %17s  %17s  %17s  %8s\n", "", "ranks", "machines", "step", "error", "computing",
           "exchange", "waiting", "bytes");
    for (i = 0; i < m->n_methods; i++)
        for (k = 0; k < m->methods[i].n_runs; k++) show_run(&m->head, m->methods + i, m->methods[i].runs + k, &worst);
    return worst;
}

/* ---- the table of examples/mpi/README.md ---- */

/* At least three significant digits; 12,345. */
static void show_number(double x) {
    const double whole = floor(x + 0.5);
    const double thousands = floor(whole / 1000);
    if (whole >= 1e6) printf(" %.0f,%03.0f,%03.0f |", floor(whole / 1e6), fmod(thousands, 1000), fmod(whole, 1000));
    else if (whole >= 1000) printf(" %.0f,%03.0f |", thousands, fmod(whole, 1000));
    else printf(" %.*f |", x >= 99.5 || x <= 0 ? 0 : x >= 9.95 ? 1 : x >= 0.995 ? 2 : 3, x);
}

enum { GLOBAL, LOCAL, ROWS, PARTS };

/* Milliseconds of a step with global and with local routing, and of its rows. */
static void show_cell(const figures *h, a_method *f, double ranks, int part) {
    work w;
    times t;
    set.local_routing = part != GLOBAL;
    t = predict_beyond(h, f, ranks, &w);
    if (!can_have(f, w.experts)) printf(" - |");
    else show_number((part == ROWS ? total(t.rows) - t.hidden : t.step) * 1e3);
}

static const char *printed_name(const char *name) {
    return strcmp(name, "locmoe") == 0 ? "LocMoE" : strcmp(name, "locmoe_plus") == 0 ? "LocMoE+" : name;
}

static void show_markdown(measurements *m) {
    static const char *const parts_of[PARTS] = {"global: ", "local: ", "rows: "};
    const char *first = printed_name(m->methods[0].name);
    double ranks;
    int i, part;
    printf("| ranks | experts |");
    for (part = 0; part < PARTS; part++)
        for (i = 0; i < m->n_methods; i++)
            printf(" %s%s |", i == 0 ? parts_of[part] : "", printed_name(m->methods[i].name));
    printf(" global, %s: gather, decide | memory, MB |\n|", first);
    for (i = 0; i < PARTS * m->n_methods + 4; i++) printf("---|");
    printf("\n");
    for (ranks = 1; ranks <= set.most; ranks *= 2) {
        work w;
        times t;
        set.local_routing = 0;
        t = predict_beyond(&m->head, m->methods, ranks, &w);
        printf("| %.0f | %.0f |", ranks, w.experts);
        for (part = 0; part < PARTS; part++)
            for (i = 0; i < m->n_methods; i++) show_cell(&m->head, m->methods + i, ranks, part);
        show_number((total(t.gather) + t.route) * 1e3);
        show_number(t.memory / 1e6);
        printf("\n");
    }
}

/* ---- the program ---- */

static int fail(const char *what, const char *why) {
    fprintf(stderr, "scale: %s: %s\n", what, why);
    return 2;
}

/* Flushes the output; fails if it could not be written. */
static int finish(void) { return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0; }

static int show_help(void) {
    static const char *const levels[] = {
        "head:", "method NAME begins or continues a method; its first run has one rank:", "run R, of R ranks:"};
    const struct option *o;
    const struct key *k;
    printf("scale FILE [options]    predicts the time of a training step on many ranks from what FILE says was "
           "measured on a few\n");
    for (o = options; o < options + OPTIONS; o++) printf("  %-18s %-5s %s\n", o->name, o->value, o->help);
    printf("\nFILE begins with the line moe-scale 1; then lines \"key value\": seconds, bytes, numbers. Lines that "
           "begin with # are skipped.\n");
    for (k = keys; k < keys + KEYS; k++) {
        if (k == keys || k->level != k[-1].level) printf("%s\n", levels[k->level]);
        printf("  %-18s %s\n", k->name, k->help);
    }
    printf("  %-18s in run 1: the imbalance that R = 2, 4, 8, ... ranks would have\n", "imbalance_at_R");
    printf("Exit status: 0 done, 1 --within or --bytes-within failed, 2 all else that fails.\n");
    return finish();
}

static int set_option(const struct option *o, const char *value) {
    double number;
    if (o->kind == TEXT) {
        *(const char **)o->at = value;
        return 0;
    }
    if (!read_number(value, &number) || number < o->least || number > o->most ||
        (o->kind == WHOLE && floor(number) < number)) {
        fprintf(stderr, "scale: %s %s: not a value from %g to %g; see -h\n", o->name, value, o->least, o->most);
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
        else if (o == options + OPTIONS) return fail(word, "no such option, or a second file; see -h");
        else if (o->kind == FLAG) *(double *)o->at = 1;
        else if (--count == 0) return fail(word, "its value is missing; see -h");
        else if (set_option(o, *++words)) return 2;
    }
    if (network_named(set.network) == NULL)
        return fail(set.network, "no such network; ib100, tcp10 and tcp1 are known");
    if (!is_power(set.ranks_per_machine)) return fail("--ranks-per-machine", "it must be a power of 2");
    return set.file == NULL ? fail("options", "the file is missing; see -h") : 0;
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

static int show_all(measurements *m) {
    errors worst;
    int i, bad = 0;
    show_machine(&m->head);
    for (i = 0; i < m->n_methods; i++) show_method(&m->head, m->methods + i);
    show_legend();
    worst = show_runs(m);
    if (finish()) return 2;
    if (set.within > 0 && worst.factor > set.within) {
        bad = 1;
        fprintf(stderr, "scale: a step of several ranks is off by a factor of %.3g\n", worst.factor);
    }
    if (set.bytes_within > 0 && worst.percent > set.bytes_within) {
        bad = 1;
        fprintf(stderr, "scale: the bytes of a step are off by %.3g %%\n", worst.percent);
    }
    return bad;
}

int main(int count, char **words) {
    static measurements m;
    int status;
    if (count == 1) {
        show_help();
        return 2;
    }
    if (strcmp(words[1], "-h") == 0 || strcmp(words[1], "--help") == 0) return show_help();
    status = read_options(count, words);
    if (status == 0) status = read_file(&m);
    if (status != 0 || set.markdown <= 0) return status != 0 ? status : show_all(&m);
    show_markdown(&m);
    return finish();
}
