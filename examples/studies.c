/* Special experiments behind some claims of papers, each with a verdict by seeds and a picture.
   cc -std=c99 -O2 -I. examples/studies.c -o studies -lm && ./studies          (or: sh examples/run studies) */

#define MOE_IMPLEMENTATION
#include "moe.h"

#include "statistics.h"
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

enum { MAX_SEEDS = 64, MAX_POINTS = 64, MAX_LINES = 6, MAX_PANELS = 4 };

static const char help[] = "studies                  lists the studies\n"
                           "studies NAME [options]   runs one: what is claimed and how it is tested, numbers with 95 % intervals, verdict\n"
                           "  --seeds N    how often all is repeated with other data and weights, 2 to 64 (5)\n"
                           "  --first N    the first seed (1)\n"
                           "  --svg FILE   draws the curves\n"
                           "studies --check          tests the parts of the studies, in seconds\n";
static const char *svg_path;
static size_t seeds = 5, first_seed = 1;
static volatile sig_atomic_t interrupted;

static void on_interrupt(int number) { (void)number, interrupted = 1; }

/* Ends the program: errors of a study have no remedy here. */
static void stop(const char *what, const char *why) {
    fprintf(stderr, "studies: %s: %s\n", what, why);
    exit(1);
}

static void *grab(size_t count, size_t size) {
    void *block = calloc(count > 0 ? count : 1, size);
    if (block == NULL) stop("memory", "there is not enough");
    return block;
}

static void must(moe_status status, const moe_error *error) {
    if (status != MOE_OK) stop(moe_status_text(status), error != NULL ? error->message : "unexpected");
}

/* One line on the terminal that the next one overwrites; nothing when the errors go to a file. */
static void progress(const char *format, ...) {
    va_list arguments;
    if (!isatty(2)) return;
    va_start(arguments, format);
    fprintf(stderr, "\r\033[K");
    vfprintf(stderr, format, arguments);
    va_end(arguments);
}

/* Called between steps: ends the program when the user wants it. A study that is cut short concludes nothing. */
static void pause_for_user(void) {
    if (!interrupted) return;
    progress("");
    fprintf(stderr, "studies: stopped; no verdict\n");
    exit(130);
}

/* "0.123 +-0.004": mean over seeds and half of its 95 % interval. Each of eight calls has its own text. */
static const char *plus_minus(const double *values, size_t n) {
    static char texts[8][40];
    static int next;
    statistics_result r = statistics_paired(n, values, NULL);
    char *text = texts[next++ % 8];
    snprintf(text, sizeof texts[0], "%.3f +-%.3f", r.mean, (r.high - r.low) / 2);
    return text;
}

/* The same for paired differences a - b. */
static const char *difference(const double *a, const double *b, size_t n) {
    double d[MAX_SEEDS];
    for (size_t i = 0; i < n; i++) d[i] = a[i] - b[i];
    return plus_minus(d, n);
}

enum { REFUTED = -1, UNDECIDED, CONFIRMED };

static void say_verdict(int verdict, const char *why) {
    printf("\nVerdict: %s by %d seeds: %s.\n", verdict == CONFIRMED ? "confirmed" : verdict == REFUTED ? "refuted" : "undecided", (int)seeds, why);
}

/* ---- pictures ------------------------------------------------------------------------------------------------------------------------ */

typedef struct series {
    const char *name;
    int n;
    double x[MAX_POINTS], y[MAX_POINTS], low[MAX_POINTS], high[MAX_POINTS]; /* low and high: the interval around y */
} series;

typedef struct panel {
    const char *title, *x_label;
    int n_lines;
    series line[MAX_LINES];
} panel;

enum { WIDE = 480, HIGH = 320, LEFT = 60, RIGHT = 20, TOP = 64, BOTTOM = 46, IN_A_ROW = 2 }; /* of a panel, in pixels */

static void widen(double value, double *low, double *high) {
    if (value < *low) *low = value;
    if (value > *high) *high = value;
}

static void limits(const panel *p, double *x0, double *x1, double *y0, double *y1) {
    int l, i;
    *x0 = *y0 = HUGE_VAL, *x1 = *y1 = -HUGE_VAL;
    for (l = 0; l < p->n_lines; l++)
        for (i = 0; i < p->line[l].n; i++) {
            widen(p->line[l].x[i], x0, x1);
            widen(p->line[l].low[i], y0, y1);
            widen(p->line[l].high[i], y0, y1);
        }
    if (!(*x1 > *x0)) *x1 = *x0 + 1;
    if (!(*y1 > *y0)) *y1 = *y0 + 1;
}

/* The largest of 1, 2, 5 times a power of ten that gives at least three steps in a range. */
static double tick_step(double range) {
    double step = pow(10, floor(log10(range / 3)));
    return step * (5 * step <= range / 3 ? 5 : 2 * step <= range / 3 ? 2 : 1);
}

static void draw_line(FILE *f, const series *s, int number, double x0, double x1, double y0, double y1) {
    double sx = (WIDE - LEFT - RIGHT) / (x1 - x0), sy = (HIGH - TOP - BOTTOM) / (y1 - y0);
    int i;
    fprintf(f, "<g class=\"c%d\">\n<polygon points=\"", number);
    for (i = 0; i < s->n; i++) fprintf(f, "%.1f,%.1f ", LEFT + (s->x[i] - x0) * sx, HIGH - BOTTOM - (s->high[i] - y0) * sy);
    for (i = s->n; i-- > 0;) fprintf(f, "%.1f,%.1f ", LEFT + (s->x[i] - x0) * sx, HIGH - BOTTOM - (s->low[i] - y0) * sy);
    fprintf(f, "\"/>\n<polyline points=\"");
    for (i = 0; i < s->n; i++) fprintf(f, "%.1f,%.1f ", LEFT + (s->x[i] - x0) * sx, HIGH - BOTTOM - (s->y[i] - y0) * sy);
    fprintf(f, "\"/>\n");
    for (i = 0; i < s->n && s->n <= 12; i++)
        fprintf(f, "<circle r=\"3\" cx=\"%.1f\" cy=\"%.1f\"/>\n", LEFT + (s->x[i] - x0) * sx, HIGH - BOTTOM - (s->y[i] - y0) * sy);
    fprintf(f, "</g>\n");
}

static void draw_panel(FILE *f, const panel *p) {
    double x0, x1, y0, y1, step, tick, base = HIGH - BOTTOM;
    limits(p, &x0, &x1, &y0, &y1);
    fprintf(f, "<text class=\"title\" x=\"%d\" y=\"20\">%s</text>\n", LEFT, p->title);
    fprintf(f, "<text text-anchor=\"end\" x=\"%d\" y=\"%d\">%s</text>\n", WIDE - RIGHT, HIGH - 12, p->x_label);
    for (step = tick_step(y1 - y0), tick = ceil(y0 / step) * step; tick <= y1; tick += step) {
        double y = base - (tick - y0) * (HIGH - TOP - BOTTOM) / (y1 - y0);
        fprintf(f, "<path class=\"grid\" d=\"M%d %.1fh%d\"/>", LEFT, y, WIDE - LEFT - RIGHT);
        fprintf(f, "<text text-anchor=\"end\" x=\"%d\" y=\"%.1f\">%.4g</text>\n", LEFT - 6, y + 4, fabs(tick) < step / 2 ? 0 : tick);
    }
    for (step = tick_step(x1 - x0), tick = ceil(x0 / step) * step; tick <= x1; tick += step)
        fprintf(f, "<text text-anchor=\"middle\" x=\"%.1f\" y=\"%.0f\">%.4g</text>\n", LEFT + (tick - x0) * (WIDE - LEFT - RIGHT) / (x1 - x0),
                base + 16, fabs(tick) < step / 2 ? 0 : tick);
    for (int l = 0; l < p->n_lines; l++) {
        draw_line(f, &p->line[l], l, x0, x1, y0, y1);
        fprintf(f, "<text class=\"c%d name\" x=\"%d\" y=\"%d\">%s</text>\n", l, LEFT + 134 * (l % 3), 38 + 16 * (l / 3), p->line[l].name);
    }
}

/* Panels, two in a row, in one file that needs no other; its colours follow the reader's light or dark setting. */
static void draw(const char *path, const panel *panels, int n) {
    FILE *f = fopen(path, "wb");
    int wide = WIDE * (n < IN_A_ROW ? n : IN_A_ROW), high = HIGH * ((n + IN_A_ROW - 1) / IN_A_ROW);
    if (f == NULL) stop(path, "cannot be written");
    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" font-size=\"12\">\n", wide, high);
    fprintf(f, "<style>.paper{fill:#fff}text{fill:#222}.title{font-size:14px;font-weight:bold}.name{fill:currentColor}.grid{stroke:#ddd}\n"
               "polyline{fill:none;stroke:currentColor;stroke-width:2}circle{fill:currentColor}polygon{fill:currentColor;opacity:.15}\n"
               ".c0{color:#0b62c4}.c1{color:#c2410c}.c2{color:#15803d}.c3{color:#7e22ce}.c4{color:#a16207}.c5{color:#0e7490}\n"
               "@media(prefers-color-scheme:dark){.paper{fill:#161616}text{fill:#e6e6e6}.grid{stroke:#333}.name{fill:currentColor}\n"
               ".c0{color:#6cb2ff}.c1{color:#ff9d6b}.c2{color:#6fdc8c}.c3{color:#d3a4ff}.c4{color:#f0cc5a}.c5{color:#63d8e8}}</style>\n"
               "<rect class=\"paper\" width=\"%d\" height=\"%d\"/>\n", wide, high);
    for (int i = 0; i < n; i++) {
        fprintf(f, "<g transform=\"translate(%d %d)\">\n", i % IN_A_ROW * WIDE, i / IN_A_ROW * HIGH);
        draw_panel(f, &panels[i]);
        fprintf(f, "</g>\n");
    }
    fprintf(f, "</svg>\n");
    if ((ferror(f) != 0) | (fclose(f) != 0)) stop(path, "could not be written");
}

/* Appends to s the mean over seeds of values [n], with its interval. */
static void add_point(series *s, double x, const double *values, size_t n) {
    statistics_result r = statistics_paired(n, values, NULL);
    if (s->n == MAX_POINTS) stop(s->name, "too many points");
    s->x[s->n] = x, s->y[s->n] = r.mean;
    s->low[s->n] = n < 2 ? r.mean : r.low, s->high[s->n] = n < 2 ? r.mean : r.high;
    s->n++;
}

/* ---- aoe_toy: experts without a router, on three Gaussians ------------------------------------------------------------------------------
   Tokens come from three overlapping Gaussians c, and each has a linear map of its own to learn: y = A_c x. One layer of six factorised experts, two per
   token, sees a new batch in every step. With clear means the random start would tell the clusters apart, and there would be nothing to learn. */

enum { CLUSTERS = 3, TOY_IN = 16, TOY_OUT = 8, TOY_EXPERTS = 6, TOY_FF = 32, TOY_STEPS = 2000, TOY_BATCH = 64, TOY_TEST = 1500, TOY_TIMES = 41 };
enum { TOY_AOE, TOY_LINEAR, TOY_KINDS };
enum { TOY_LOSS, TOY_GATE, TOY_INFORMATION, TOY_USAGE, TOY_APART, TOY_NUMBERS };

typedef struct toy_world {
    moe_real mean[CLUSTERS][TOY_IN], map[CLUSTERS][TOY_OUT][TOY_IN];
} toy_world;

typedef struct toy_batch {
    size_t n;
    moe_real x[TOY_TEST * TOY_IN], y[TOY_TEST * TOY_OUT];
    int32_t cluster[TOY_TEST];
} toy_batch;

/* Means about 3 long, spread 1 in each of 16 directions: about 4 apart. */
static void toy_create(toy_world *w, moe_rng *rng) {
    for (int c = 0; c < CLUSTERS; c++) {
        for (int i = 0; i < TOY_IN; i++) w->mean[c][i] = moe_rng_normal(rng) * (moe_real)0.75;
        for (int i = 0; i < TOY_OUT * TOY_IN; i++) w->map[c][i / TOY_IN][i % TOY_IN] = moe_rng_normal(rng) * (moe_real)0.25;
    }
}

static void toy_draw(const toy_world *w, moe_rng *rng, size_t n, toy_batch *b) {
    b->n = n;
    for (size_t t = 0; t < n; t++) {
        moe_real *x = b->x + t * TOY_IN, *y = b->y + t * TOY_OUT;
        int c = (int)moe_rng_below(rng, CLUSTERS);
        b->cluster[t] = c;
        for (int i = 0; i < TOY_IN; i++) x[i] = w->mean[c][i] + moe_rng_normal(rng);
        for (int i = 0; i < TOY_OUT; i++) {
            y[i] = 0;
            for (int j = 0; j < TOY_IN; j++) y[i] += w->map[c][i][j] * x[j];
        }
    }
}

static void toy_build(moe_net *net, int kind, uint64_t seed) {
    moe_layer_config c;
    moe_error error;
    must(moe_layer_preset("aoe", &c, &error), &error);
    c.router.n_experts = TOY_EXPERTS, c.d_ff = TOY_FF, c.d_out = TOY_OUT;
    if (kind == TOY_LINEAR) c.router.score = MOE_SCORE_LINEAR, c.router.norm_node = 0; /* all else, the experts too, is the same */
    moe_net_init(net, TOY_IN, 0, NULL);
    moe_net_mixture(net, &c);
    must(moe_net_build(net, 1, seed, &error), &error);
}

/* How far the mean logits (norms, for AoE) of an expert in the clusters are apart, over the mean logit; the mean over experts. */
static double toy_apart(const moe_routing *r, const int32_t *cluster) {
    double sum[TOY_EXPERTS][CLUSTERS] = {{0}}, n[CLUSTERS] = {0}, apart = 0;
    for (size_t t = 0; t < r->n_tokens; t++) {
        n[cluster[t]]++;
        for (int e = 0; e < TOY_EXPERTS; e++) sum[e][cluster[t]] += (double)r->logits[t * TOY_EXPERTS + (size_t)e];
    }
    for (int e = 0; e < TOY_EXPERTS; e++) {
        double low = HUGE_VAL, high = -HUGE_VAL, all = 0;
        for (int c = 0; c < CLUSTERS; c++) all += sum[e][c], widen(sum[e][c] / n[c], &low, &high);
        apart += (high - low) / (all / (double)r->n_tokens) / TOY_EXPERTS;
    }
    return apart;
}

static void toy_look(const moe_net *net, const toy_batch *test, void *work, size_t bytes, double *numbers) {
    double memory[1024];
    moe_metrics metrics;
    moe_report report;
    moe_call call = {0};
    moe_net_pass pass;
    const moe_routing *routing;
    call.n_tokens = test->n, call.x = test->x;
    must(moe_net_forward(net, &call, work, bytes, &pass), NULL);
    routing = moe_net_routing(net, &pass, 0);
    must(moe_metrics_init(&metrics, TOY_EXPERTS, CLUSTERS, memory, sizeof memory), NULL);
    must(moe_metrics_add(&metrics, routing, NULL, test->cluster), NULL);
    must(moe_metrics_report(&metrics, &report), NULL);
    numbers[TOY_LOSS] = (double)moe_squared_error(test->n, TOY_OUT, pass.y, test->y, NULL);
    numbers[TOY_GATE] = report.gate_entropy, numbers[TOY_USAGE] = report.usage_entropy;
    numbers[TOY_INFORMATION] = report.information - report.information_chance;
    numbers[TOY_APART] = toy_apart(routing, test->cluster);
}

/* Steps after which the test is run: close together at first, when most happens. */
static int toy_time(int i) { return TOY_STEPS * i * i / ((TOY_TIMES - 1) * (TOY_TIMES - 1)); }

/* Trains one layer; numbers [TOY_TIMES][TOY_NUMBERS] receives what the test shows at each time. */
static void toy_train(int kind, uint64_t seed, int times, double (*numbers)[TOY_NUMBERS]) {
    static toy_world world;
    static toy_batch batch, test;
    moe_train_config training = {0};
    moe_data data = {.n = TOY_BATCH, .x = batch.x, .targets = batch.y};
    moe_trainer trainer;
    moe_net net;
    moe_error error;
    moe_rng rng;
    size_t bytes;
    void *work;
    moe_rng_seed(&rng, ~seed); /* not the numbers that the weights are made of */
    toy_create(&world, &rng);
    toy_draw(&world, &rng, TOY_TEST, &test);
    toy_build(&net, kind, seed);
    training.criterion = MOE_CRITERION_SQUARED_ERROR, training.batch = TOY_BATCH, training.rate = (moe_real)0.003;
    must(moe_trainer_init(&trainer, &net, &training, &error), &error);
    must(moe_net_work_size(&net, TOY_TEST, 0, &bytes), NULL);
    work = grab(bytes, 1);
    for (int step = 0, i = 0; i < times; step++) {
        while (i < times && step == toy_time(i)) toy_look(&net, &test, work, bytes, numbers[i++]);
        toy_draw(&world, &rng, TOY_BATCH, &batch);
        must(moe_trainer_step(&trainer, &data, NULL, &error), &error);
        pause_for_user();
    }
    free(work);
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

/* Which share of the change of b, from first to last, is done when a has done half of its own; 1 when b changes by less than `least`. */
static double done_at_half(int n, const double *a, const double *b, double least) {
    double half = (a[0] + a[n - 1]) / 2, between;
    int i = 1;
    if (fabs(b[n - 1] - b[0]) < least) return 1;
    while (i < n - 1 && (a[i] > half) == (a[0] > half)) i++;
    between = (half - a[i - 1]) / (a[i] - a[i - 1]);
    return (b[i - 1] + between * (b[i] - b[i - 1]) - b[0]) / (b[n - 1] - b[0]);
}

/* As values of the time when the loss has fallen by half. */
static double at_half(int n, const double *a, const double *b) { return b[0] + done_at_half(n, a, b, 0) * (b[n - 1] - b[0]); }

static const char *const toy_kinds[TOY_KINDS] = {"AoE", "linear router"};
static const char *const toy_numbers[TOY_NUMBERS] = {"loss", "H_b", "I - chance", "H_e", "norms apart"};

static void toy_picture(double (*found)[TOY_NUMBERS][TOY_TIMES][MAX_SEEDS]) {
    static panel panels[TOY_APART];
    static const char *const titles[TOY_APART] = {"squared error", "H_b: entropy of the gate, nats", "I(expert; cluster) - chance, nats",
                                                  "H_e: entropy of the usage, nats"};
    for (int q = 0; q < TOY_APART; q++) {
        panels[q].title = titles[q], panels[q].x_label = "steps", panels[q].n_lines = TOY_KINDS;
        for (int kind = 0; kind < TOY_KINDS; kind++) {
            panels[q].line[kind].name = toy_kinds[kind];
            for (int i = 0; i < TOY_TIMES; i++) add_point(&panels[q].line[kind], toy_time(i), found[kind][q][i], seeds);
        }
    }
    draw(svg_path, panels, TOY_APART);
}

/* The curve of one seed, in out. */
static const double *curve(double (*values)[MAX_SEEDS], size_t seed, double *out) {
    for (int i = 0; i < TOY_TIMES; i++) out[i] = values[i][seed];
    return out;
}

static void toy_table(double (*found)[TOY_NUMBERS][TOY_TIMES][MAX_SEEDS]) {
    static const char *const rows[] = {"start", "half of the loss gone", "end"};
    double values[MAX_SEEDS], loss[TOY_TIMES], other[TOY_TIMES];
    printf("%-13s %-22s", "", "");
    for (int q = 0; q < TOY_NUMBERS; q++) printf("%16s", toy_numbers[q]);
    for (int row = 0; row < 3 * TOY_KINDS; row++) {
        int kind = row / 3, place = row % 3;
        printf("\n%-13s %-22s", place == 0 ? toy_kinds[kind] : "", rows[place]);
        for (int q = 0; q < (kind == TOY_AOE ? TOY_NUMBERS : TOY_APART); q++) {
            for (size_t s = 0; s < seeds; s++)
                values[s] = place == 1 ? at_half(TOY_TIMES, curve(found[kind][TOY_LOSS], s, loss), curve(found[kind][q], s, other))
                                       : found[kind][q][place == 0 ? 0 : TOY_TIMES - 1][s];
            printf("%16s", plus_minus(values, seeds));
        }
    }
    printf("\n");
}

/* Both shares lie below 1/2 (or one above), corrected for there being two, and the experts specialise at all. */
static int toy_verdict(double (*share)[MAX_SEEDS], const double *rise, size_t n) {
    statistics_result shares[2], rises = statistics_paired(n, rise, NULL);
    double even[MAX_SEEDS], p[2], adjusted[2];
    for (size_t s = 0; s < n; s++) even[s] = 0.5;
    for (int i = 0; i < 2; i++) shares[i] = statistics_paired(n, share[i], even), p[i] = shares[i].p;
    statistics_holm(2, p, adjusted);
    if (rises.high < 0.05) return REFUTED;
    for (int i = 0; i < 2; i++)
        if (shares[i].mean > 0 && adjusted[i] < 0.05) return REFUTED;
    return rises.low > 0.05 && shares[0].mean < 0 && shares[1].mean < 0 && adjusted[0] < 0.05 && adjusted[1] < 0.05 ? CONFIRMED : UNDECIDED;
}

static void aoe_toy(void) {
    static double found[TOY_KINDS][TOY_NUMBERS][TOY_TIMES][MAX_SEEDS], numbers[TOY_TIMES][TOY_NUMBERS], share[TOY_KINDS][2][MAX_SEEDS];
    static double rise[TOY_KINDS][MAX_SEEDS];
    int verdict[TOY_KINDS];
    printf("Tokens: three Gaussians c in %d directions. To learn: y = A_c x. %d factorised experts, 2 per token; %d steps of %d new tokens; test on %d.\n"
           "Test: when the loss has done half of its fall, how much of the specialising is done: the rise of I(expert; cluster), the fall of H_b.\n"
           "About 1/2 if all went together. Two stages: both below 1/2 (t-test over seeds, Holm for two), and I rises by 0.05 nats at least.\n\n",
           TOY_IN, TOY_EXPERTS, TOY_STEPS, TOY_BATCH, TOY_TEST);
    for (size_t s = 0; s < seeds; s++)
        for (int kind = 0; kind < TOY_KINDS; kind++) {
            progress("seed %d of %d: %s", (int)s + 1, (int)seeds, toy_kinds[kind]);
            toy_train(kind, first_seed + s, TOY_TIMES, numbers);
            for (int i = 0; i < TOY_TIMES; i++)
                for (int q = 0; q < TOY_NUMBERS; q++) found[kind][q][i][s] = numbers[i][q];
        }
    progress("");
    toy_table(found);
    printf("\n%-36s%17s%17s%19s\n", "done when half of the loss is gone", "rise of I", "fall of H_b", "two stages?");
    for (int kind = 0; kind < TOY_KINDS; kind++) {
        for (size_t s = 0; s < seeds; s++) {
            double loss[TOY_TIMES], information[TOY_TIMES], gate[TOY_TIMES];
            curve(found[kind][TOY_LOSS], s, loss), curve(found[kind][TOY_INFORMATION], s, information), curve(found[kind][TOY_GATE], s, gate);
            rise[kind][s] = information[TOY_TIMES - 1] - information[0];
            share[kind][0][s] = done_at_half(TOY_TIMES, loss, information, 0.05);
            share[kind][1][s] = done_at_half(TOY_TIMES, loss, gate, 0.05);
        }
        verdict[kind] = toy_verdict(share[kind], rise[kind], seeds);
        printf("%-36s%17s%17s%19s\n", toy_kinds[kind], plus_minus(share[kind][0], seeds), plus_minus(share[kind][1], seeds),
               verdict[kind] == CONFIRMED ? "yes" : verdict[kind] == REFUTED ? "no" : "undecided");
    }
    printf("\n%-36s", "AoE - linear router at the end");
    for (int q = 0; q < TOY_USAGE; q++) printf("  %s %s", toy_numbers[q], difference(found[TOY_AOE][q][TOY_TIMES - 1], found[TOY_LINEAR][q][TOY_TIMES - 1], seeds));
    printf("\n");
    say_verdict(verdict[TOY_AOE], verdict[TOY_LINEAR] == CONFIRMED ? "so do the same experts behind a linear router, so it is not AoE's alone"
                                                                   : "the same experts behind a linear router are not shown to do so");
    if (svg_path != NULL) toy_picture(found);
}

/* ---- tests of the parts -------------------------------------------------------------------------------------------------------------- */

static long passed, failed;

static void check(int good, const char *what) {
    if (good) passed++;
    else failed++, printf("FAILED: %s\n", what);
}

static int near(double a, double b) { return fabs(a - b) < 1e-9; }

static void check_parts(void) {
    static const double fall[] = {8, 6, 2, 0}, late[] = {0, 0, 0.5, 2}, with[] = {0, 1, 3, 4}, flat[] = {1, 1, 1, 1.01};
    static double early[2][MAX_SEEDS] = {{0.1, 0.2, 0.15, 0.1}, {0.2, 0.1, 0.2, 0.15}}, mixed[2][MAX_SEEDS] = {{0.1, 0.2, 0.15, 0.1}, {0.6, 0.3, 0.5, 0.45}};
    static const double rises[] = {0.3, 0.2, 0.25, 0.3}, no_rise[] = {0, 0.01, 0.02, 0};
    check(near(done_at_half(4, fall, late, 0.05), 0.125), "late: an eighth is done when half of the loss is gone");
    check(near(done_at_half(4, fall, with, 0.05), 0.5), "together: half is done");
    check(near(done_at_half(4, fall, flat, 0.05), 1), "no change counts as against");
    check(near(at_half(4, fall, late), 0.25), "the value at half");
    check(toy_verdict(early, rises, 4) == CONFIRMED, "early shares confirm");
    check(toy_verdict(mixed, rises, 4) == UNDECIDED, "a share around one half does not");
    check(toy_verdict(early, no_rise, 4) == REFUTED, "nor does it without a rise");
    check(near(tick_step(10), 2) && near(tick_step(0.9), 0.2) && near(tick_step(3), 1), "ticks");
}

static void check_aoe_toy(void) {
    static double numbers[TOY_TIMES][TOY_NUMBERS], again[3][TOY_NUMBERS];
    toy_train(TOY_AOE, 7, TOY_TIMES, numbers);
    check(numbers[TOY_TIMES - 1][TOY_LOSS] < 0.3 * numbers[0][TOY_LOSS], "aoe_toy: the layer learns");
    check(numbers[TOY_TIMES - 1][TOY_INFORMATION] > numbers[0][TOY_INFORMATION] + 0.05, "aoe_toy: the experts tell the clusters apart");
    check(numbers[TOY_TIMES - 1][TOY_APART] > numbers[0][TOY_APART], "aoe_toy: the norms part");
    toy_train(TOY_AOE, 7, 3, again);
    check(memcmp(again, numbers, sizeof again) == 0, "aoe_toy: the same seed gives the same numbers");
}

/* ---- the command line ---------------------------------------------------------------------------------------------------------------- */

static const struct study {
    const char *name, *claim, *source;
    void (*run)(void);
    void (*check)(void);
} studies[] = {
    {"aoe_toy", "experts without a router first behave alike, then specialise", "Lv et al. 2025, Autonomy-of-experts models", aoe_toy, check_aoe_toy},
};
enum { STUDIES = sizeof studies / sizeof studies[0] };

static int check_all(void) {
    check_parts();
    for (int i = 0; i < STUDIES; i++) studies[i].check();
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}

static size_t read_number(const char *option, const char *text, size_t least, size_t most) {
    char *end;
    long value = strtol(text, &end, 10);
    if (end == text || *end != '\0' || value < (long)least || (size_t)value > most) stop(option, "not a value of this option; -h explains");
    return (size_t)value;
}

int main(int count, char **words) {
    const struct study *study = NULL;
    for (int i = 1; i < count; i++) {
        const char *word = words[i], *value = i + 1 < count ? words[i + 1] : "";
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) return fputs(help, stdout) < 0;
        if (strcmp(word, "--check") == 0) return check_all();
        if (strcmp(word, "--seeds") == 0) seeds = read_number(word, value, 2, MAX_SEEDS), i++;
        else if (strcmp(word, "--first") == 0) first_seed = read_number(word, value, 0, 1000000), i++;
        else if (strcmp(word, "--svg") == 0 && *value != '\0') svg_path = value, i++;
        else if (word[0] == '-' || study != NULL) stop(word, "no such option, its value is missing, or a second name; -h explains");
        else {
            for (int k = 0; k < STUDIES; k++)
                if (strcmp(word, studies[k].name) == 0) study = &studies[k];
            if (study == NULL) stop(word, "no such study; studies lists them");
        }
    }
    if (study == NULL) {
        for (int k = 0; k < STUDIES; k++) printf("  %-10s %s (%s)\n", studies[k].name, studies[k].claim, studies[k].source);
        return 0;
    }
    signal(SIGINT, on_interrupt);
    printf("Claim: %s (%s)\n", study->claim, study->source);
    study->run();
    return fflush(stdout) != 0 || ferror(stdout);
}
