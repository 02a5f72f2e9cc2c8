/* Special experiments for some claims of papers, each with a verdict over seeds and a picture.
   cc -std=c99 -O2 -I. examples/studies.c -o studies -lm && ./studies
   (or: sh examples/run studies) */

#define MOE_IMPLEMENTATION
#include "moe.h"

#include "language.h"
#include "report.h"
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

static const char help[] =
    "studies                  lists the studies\n"
    "studies NAME [options]   runs one: claim, test, numbers with 95 % intervals, verdict\n"
    "  --seeds N    how often all is repeated with other data and weights, 2 to 64 (5)\n"
    "  --first N    the first seed (1)\n"
    "  --data FILE  the text of locmoe and finetune; an article begins at a line \" = Title = \"\n"
    "               as in WikiText (the library's own three headers, each an article)\n"
    "  --svg FILE   draws the curves (aoe_toy, locmoe)\n" REPORT_HELP
    "studies --check          tests the parts of the studies, in seconds\n";
static const char *svg_path, *data_path;
static size_t seeds = 5, first_seed = 1;
static volatile sig_atomic_t interrupted;

static void on_interrupt(int number) {
    (void)number;
    interrupted = 1;
}

/* Ends the program. */
static void refuse(const char *what, const char *why) {
    fprintf(stderr, "studies: %s: %s\n", what, why);
    exit(EXIT_USAGE);
}

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

/* A status line on the terminal that the next one overwrites; nothing if the errors go to a
   file. */
static void progress(const char *format, ...) {
    va_list arguments;
    if (!isatty(2)) return;
    va_start(arguments, format);
    fprintf(stderr, "\r\033[K");
    vfprintf(stderr, format, arguments);
    va_end(arguments);
}

/* Called between steps: ends the program if the user wants it. An interrupted study has no
   conclusion. */
static void pause_for_user(void) {
    if (!interrupted) return;
    progress("");
    fprintf(stderr, "studies: stopped; no verdict\n");
    exit(130);
}

static double mean_of(const double *values, size_t n) { return statistics_paired(n, values, NULL).mean; }

/* "0.123 +-0.004": mean over seeds and half of its 95 % interval. Each of eight calls has its own
   text. */
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
static const char *const outcomes[] = {"refuted", "undecided", "confirmed"};

/* A part of a claim, as one number per seed whose mean is negative if the part holds. */
typedef struct part {
    const char *claim, *text; /* what it is a part of */
    double value[MAX_SEEDS];
} part;

enum { MAX_PARTS = 8 };

/* outcome [m] by Student's t, with Holm's correction for m parts; p [m] receives the corrected
   p-values. */
static void judge(const part *parts, size_t m, size_t n, int *outcome, double *p) {
    double plain[MAX_PARTS];
    for (size_t i = 0; i < m; i++) plain[i] = statistics_paired(n, parts[i].value, NULL).p;
    statistics_holm(m, plain, p);
    for (size_t i = 0; i < m; i++)
        outcome[i] = p[i] >= 0.05 ? UNDECIDED : mean_of(parts[i].value, n) < 0 ? CONFIRMED : REFUTED;
}

/* A claim is confirmed if all of its parts are, refuted if one of them is. */
static int verdict_on(const char *claim, const part *parts, size_t m, const int *outcome) {
    int verdict = CONFIRMED;
    for (size_t i = 0; i < m; i++)
        if (strcmp(parts[i].claim, claim) == 0 && outcome[i] < verdict) verdict = outcome[i];
    return verdict;
}

/* The parts as a table of the report. */
static void report_parts(const part *parts, size_t m, const double *p, const int *outcome) {
    static const char *const heads[] = {"mean", "p", "outcome"};
    moe_figure *f = report_add(MOE_FIGURE_TABLE, "What was claimed to be below 0", m, 3);
    const char **names = (const char **)report_grab(m, sizeof *names);
    const char **cells = (const char **)report_grab(3 * m, sizeof *cells);
    double *values = (double *)report_grab(3 * m, sizeof *values);
    double *spread = (double *)report_grab(3 * m, sizeof *spread);
    for (size_t i = 0; i < m; i++) {
        statistics_result r = statistics_paired(seeds, parts[i].value, NULL);
        names[i] = parts[i].text;
        values[3 * i] = r.mean;
        spread[3 * i] = r.high - r.mean;
        values[3 * i + 1] = p[i];
        spread[3 * i + 1] = -1;
        cells[3 * i + 2] = outcomes[outcome[i] + 1];
    }
    f->caption = "Mean over seeds with its 95 % interval; p after Holm's correction.";
    f->row_names = names;
    f->column_names = heads;
    f->values = values;
    f->half_widths = spread;
    f->cells = cells;
    f->row_label = "part";
}

/* Prints the parts and the conclusion. */
static void conclude(const part *parts, size_t m) {
    int outcome[MAX_PARTS];
    double p[MAX_PARTS];
    judge(parts, m, seeds, outcome, p);
    printf("\nClaimed to be below 0 (mean over %d seeds, its 95 %% interval, p after Holm's correction):\n",
           (int)seeds);
    for (size_t i = 0; i < m; i++) {
        statistics_result r = statistics_paired(seeds, parts[i].value, NULL);
        printf("  %-50s %7.3f [%.3f, %.3f]  p %.2g  %s\n", parts[i].text, r.mean, r.low, r.high, p[i],
               outcomes[outcome[i] + 1]);
    }
    if (report_path != NULL) report_parts(parts, m, p, outcome);
    for (size_t i = 0; i < m; i++)
        if (i == 0 || strcmp(parts[i].claim, parts[i - 1].claim) != 0)
            printf("Verdict: %s: %s.\n", parts[i].claim, outcomes[verdict_on(parts[i].claim, parts, m, outcome) + 1]);
}

/* ---- pictures ---- */

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
    *x0 = *y0 = HUGE_VAL;
    *x1 = *y1 = -HUGE_VAL;
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
    for (i = 0; i < s->n; i++)
        fprintf(f, "%.1f,%.1f ", LEFT + (s->x[i] - x0) * sx, HIGH - BOTTOM - (s->high[i] - y0) * sy);
    for (i = s->n; i-- > 0;)
        fprintf(f, "%.1f,%.1f ", LEFT + (s->x[i] - x0) * sx, HIGH - BOTTOM - (s->low[i] - y0) * sy);
    fprintf(f, "\"/>\n<polyline points=\"");
    for (i = 0; i < s->n; i++)
        fprintf(f, "%.1f,%.1f ", LEFT + (s->x[i] - x0) * sx, HIGH - BOTTOM - (s->y[i] - y0) * sy);
    fprintf(f, "\"/>\n");
    for (i = 0; i < s->n && s->n <= 12; i++)
        fprintf(f, "<circle r=\"3\" cx=\"%.1f\" cy=\"%.1f\"/>\n", LEFT + (s->x[i] - x0) * sx,
                HIGH - BOTTOM - (s->y[i] - y0) * sy);
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
        fprintf(f, "<text text-anchor=\"end\" x=\"%d\" y=\"%.1f\">%.4g</text>\n", LEFT - 6, y + 4,
                fabs(tick) < step / 2 ? 0 : tick);
    }
    for (step = tick_step(x1 - x0), tick = ceil(x0 / step) * step; tick <= x1; tick += step)
        fprintf(f, "<text text-anchor=\"middle\" x=\"%.1f\" y=\"%.0f\">%.4g</text>\n",
                LEFT + (tick - x0) * (WIDE - LEFT - RIGHT) / (x1 - x0), base + 16, fabs(tick) < step / 2 ? 0 : tick);
    for (int l = 0; l < p->n_lines; l++) {
        draw_line(f, &p->line[l], l, x0, x1, y0, y1);
        fprintf(f, "<text class=\"c%d name\" x=\"%d\" y=\"%d\">%s</text>\n", l, LEFT + 134 * (l % 3), 38 + 16 * (l / 3),
                p->line[l].name);
    }
}

/* The panels as figures of the report; the lines of one share their places on the x axis. */
static void report_panels(const panel *panels, int n) {
    for (int i = 0; i < n; i++) {
        const panel *p = &panels[i];
        moe_figure *f = report_add(MOE_FIGURE_LINES, p->title, (size_t)p->n_lines, MAX_POINTS);
        const char **names = (const char **)report_grab(MAX_LINES, sizeof *names);
        double *values = (double *)report_grab(MAX_LINES * MAX_POINTS, sizeof *values);
        int longest = 0;
        for (int l = 0; l < p->n_lines; l++) {
            if (p->line[l].n > p->line[longest].n) longest = l;
            for (int k = 0; k < MAX_POINTS; k++)
                values[l * MAX_POINTS + k] = k < p->line[l].n ? p->line[l].y[k] : HUGE_VAL;
            names[l] = report_text(p->line[l].name);
        }
        f->columns = (size_t)p->line[longest].n;
        f->stride = MAX_POINTS;
        f->values = values;
        f->row_names = names;
        f->x = report_numbers(p->line[longest].x, f->columns);
        f->column_label = report_text(p->x_label);
        f->caption = "Means over seeds.";
    }
}

/* Panels, two per row, in one self-contained file; its colors follow the reader's light or dark
   setting. */
static void draw(const char *path, const panel *panels, int n) {
    FILE *f;
    if (report_path != NULL) report_panels(panels, n);
    if (path == NULL) return;
    f = fopen(path, "wb");
    int failed, wide = WIDE * (n < IN_A_ROW ? n : IN_A_ROW), high = HIGH * ((n + IN_A_ROW - 1) / IN_A_ROW);
    if (f == NULL) stop(path, "cannot be written");
    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" ", wide, high);
    fprintf(f, "font-family=\"sans-serif\" font-size=\"12\">\n");
    fprintf(
        f,
        "<style>.paper{fill:#fff}text{fill:#222}.title{font-size:14px;font-weight:bold}.name{fill:currentColor}.grid{"
        "stroke:#ddd}\n"
        "polyline{fill:none;stroke:currentColor;stroke-width:2}circle{fill:currentColor}polygon{fill:currentColor;"
        "opacity:.15}\n"
        ".c0{color:#0b62c4}.c1{color:#c2410c}.c2{color:#15803d}.c3{color:#7e22ce}.c4{color:#a16207}.c5{color:#0e7490}\n"
        "@media(prefers-color-scheme:dark){.paper{fill:#161616}text{fill:#e6e6e6}.grid{stroke:#333}.name{fill:"
        "currentColor}\n"
        ".c0{color:#6cb2ff}.c1{color:#ff9d6b}.c2{color:#6fdc8c}.c3{color:#d3a4ff}.c4{color:#f0cc5a}.c5{color:#63d8e8}}<"
        "/style>\n"
        "<rect class=\"paper\" width=\"%d\" height=\"%d\"/>\n",
        wide, high);
    for (int i = 0; i < n; i++) {
        fprintf(f, "<g transform=\"translate(%d %d)\">\n", i % IN_A_ROW * WIDE, i / IN_A_ROW * HIGH);
        draw_panel(f, &panels[i]);
        fprintf(f, "</g>\n");
    }
    fprintf(f, "</svg>\n");
    failed = ferror(f);
    if (fclose(f) != 0 || failed) stop(path, "could not be written");
}

/* Appends to s the mean over seeds of values [n], with its interval. */
static void add_point(series *s, double x, const double *values, size_t n) {
    statistics_result r = statistics_paired(n, values, NULL);
    if (s->n == MAX_POINTS) stop(s->name, "too many points");
    s->x[s->n] = x;
    s->y[s->n] = r.mean;
    s->low[s->n] = n < 2 ? r.mean : r.low;
    s->high[s->n] = n < 2 ? r.mean : r.high;
    s->n++;
}

/* ---- aoe_toy: experts without a router, on three Gaussians ----
   Tokens come from three overlapping Gaussians c, and each has a linear map of its own to learn: y
   = A_c x. One layer of six factorised experts, two per token, sees a new batch in every step.
   Gaussians far apart would be told apart by random experts from the start. */

enum {
    CLUSTERS = 3, TOY_IN = 16, TOY_OUT = 8, TOY_EXPERTS = 6, TOY_FF = 32, TOY_STEPS = 2000, TOY_BATCH = 64,
    TOY_TEST = 1500
};
enum { TOY_TIMES = 41 /* at which it is tested */ };
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
        for (int i = 0; i < TOY_OUT * TOY_IN; i++)
            w->map[c][i / TOY_IN][i % TOY_IN] = moe_rng_normal(rng) * (moe_real)0.25;
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
    c.router.n_experts = TOY_EXPERTS;
    c.d_ff = TOY_FF;
    c.d_out = TOY_OUT;
    /* everything else is the same, including the experts */
    if (kind == TOY_LINEAR) {
        c.router.score = MOE_SCORE_LINEAR;
        c.router.norm_node = 0;
    }
    moe_net_init(net, TOY_IN, 0, NULL);
    moe_net_mixture(net, &c);
    must(moe_net_build(net, 1, seed, &error), &error);
}

/* The range of the mean logits (norms, for AoE) of an expert over the clusters, divided by the mean
   logit; the mean over experts. */
static double toy_apart(const moe_routing *r, const int32_t *cluster) {
    double sum[TOY_EXPERTS][CLUSTERS] = {{0}}, n[CLUSTERS] = {0};
    double apart = 0;
    for (size_t t = 0; t < r->n_tokens; t++) {
        n[cluster[t]]++;
        for (int e = 0; e < TOY_EXPERTS; e++) sum[e][cluster[t]] += (double)r->logits[t * TOY_EXPERTS + (size_t)e];
    }
    for (int e = 0; e < TOY_EXPERTS; e++) {
        double low = HUGE_VAL, high = -HUGE_VAL;
        double all = 0;
        for (int c = 0; c < CLUSTERS; c++) {
            all += sum[e][c];
            widen(sum[e][c] / n[c], &low, &high);
        }
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
    call.n_tokens = test->n;
    call.x = test->x;
    must(moe_net_forward(net, &call, work, bytes, &pass), NULL);
    routing = moe_net_routing(net, &pass, 0);
    must(moe_metrics_init(&metrics, TOY_EXPERTS, CLUSTERS, memory, sizeof memory), NULL);
    must(moe_metrics_add(&metrics, routing, NULL, test->cluster), NULL);
    must(moe_metrics_report(&metrics, &report), NULL);
    numbers[TOY_LOSS] = (double)moe_squared_error(test->n, TOY_OUT, pass.y, test->y, NULL);
    numbers[TOY_GATE] = report.gate_entropy;
    numbers[TOY_USAGE] = report.usage_entropy;
    numbers[TOY_INFORMATION] = report.information - report.information_chance;
    numbers[TOY_APART] = toy_apart(routing, test->cluster);
}

/* Steps after which the test is run: dense at first, when most happens. */
static int toy_time(int i) { return TOY_STEPS * i * i / ((TOY_TIMES - 1) * (TOY_TIMES - 1)); }

/* Trains one layer; numbers [TOY_TIMES][TOY_NUMBERS] receives the results of the test at each
   time. */
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
    moe_rng_seed(&rng, ~seed); /* another stream than that of the weights */
    toy_create(&world, &rng);
    toy_draw(&world, &rng, TOY_TEST, &test);
    toy_build(&net, kind, seed);
    training.criterion = MOE_CRITERION_SQUARED_ERROR;
    training.batch = TOY_BATCH;
    training.rate = (moe_real)0.003;
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

/* b when a has first done such a part of its change from first to last; between two times on a
   straight line. */
static double when(int n, const double *a, double part_of_a, const double *b) {
    double before = 0, now = 0;
    int i = 0;
    if (part_of_a <= 0 || part_of_a >= 1) return b[part_of_a <= 0 ? 0 : n - 1];
    while (now < part_of_a && i < n - 1) {
        before = now;
        i++;
        now = (a[i] - a[0]) / (a[n - 1] - a[0]);
    }
    return b[i - 1] + (part_of_a - before) / (now - before) * (b[i] - b[i - 1]);
}

/* Which part of b's change is done when half of a's is; 1 when b changes by less than `least`. */
static double done_at_half(int n, const double *a, const double *b, double least) {
    return fabs(b[n - 1] - b[0]) < least ? 1 : (when(n, a, 0.5, b) - b[0]) / (b[n - 1] - b[0]);
}

static const char *const toy_kinds[TOY_KINDS] = {"AoE", "linear router"};
static const char *const toy_numbers[TOY_NUMBERS] = {"loss", "H_b", "I - chance", "H_e", "norms apart"};

static void toy_picture(double (*found)[TOY_NUMBERS][TOY_TIMES][MAX_SEEDS]) {
    static panel panels[TOY_APART];
    static const char *const titles[TOY_APART] = {"squared error", "H_b: entropy of the gate, nats",
                                                  "I(expert; cluster) - chance, nats",
                                                  "H_e: entropy of the usage, nats"};
    for (int q = 0; q < TOY_APART; q++) {
        panels[q].title = titles[q];
        panels[q].x_label = "steps";
        panels[q].n_lines = TOY_KINDS;
        for (int kind = 0; kind < TOY_KINDS; kind++) {
            panels[q].line[kind].name = toy_kinds[kind];
            for (int i = 0; i < TOY_TIMES; i++) add_point(&panels[q].line[kind], toy_time(i), found[kind][q][i], seeds);
        }
    }
    draw(svg_path, panels, TOY_APART);
}

/* The curve of one seed, in out. */
static void curve(double (*values)[MAX_SEEDS], size_t seed, double *out) {
    for (int i = 0; i < TOY_TIMES; i++) out[i] = values[i][seed];
}

static void toy_table(double (*found)[TOY_NUMBERS][TOY_TIMES][MAX_SEEDS]) {
    static const struct {
        const char *name;
        double part_of_loss;
    } places[] = {{"start", 0}, {"half of the loss gone", 0.5}, {"nine tenths gone", 0.9}, {"end", 1}};
    enum { PLACES = sizeof places / sizeof places[0] };
    double values[MAX_SEEDS], loss[TOY_TIMES], other[TOY_TIMES];
    printf("%-23s", "");
    for (int q = 0; q < TOY_NUMBERS; q++) printf("%15s", toy_numbers[q]);
    for (int kind = 0; kind < TOY_KINDS; kind++) {
        printf("\n%s\n", toy_kinds[kind]);
        for (int place = 0; place < PLACES; place++) {
            printf("%s%-23s", place > 0 ? "\n" : "", places[place].name);
            for (int q = 0; q < (kind == TOY_AOE ? TOY_NUMBERS : TOY_APART); q++) {
                for (size_t s = 0; s < seeds; s++) {
                    curve(found[kind][TOY_LOSS], s, loss);
                    curve(found[kind][q], s, other);
                    values[s] = when(TOY_TIMES, loss, places[place].part_of_loss, other);
                }
                printf("%15s", plus_minus(values, seeds));
            }
        }
    }
    printf("\n");
    printf("%-23s", "AoE - linear, at end");
    for (int q = 0; q < TOY_APART; q++)
        printf("%15s", difference(found[TOY_AOE][q][TOY_TIMES - 1], found[TOY_LINEAR][q][TOY_TIMES - 1], seeds));
    printf("\n");
}

/* The claim for one kind of layer. */
static void toy_parts(double (*found)[TOY_TIMES][MAX_SEEDS], part *parts) {
    parts[0].claim = parts[1].claim = parts[2].claim = "first alike, then specialised";
    parts[0].text = "part of I's rise done at half of the loss - 1/2";
    parts[1].text = "part of H_b's fall done at half of the loss - 1/2";
    parts[2].text = "0.05 nats - rise of I from start to end";
    for (size_t s = 0; s < seeds; s++) {
        double loss[TOY_TIMES], information[TOY_TIMES], gate[TOY_TIMES];
        curve(found[TOY_LOSS], s, loss);
        curve(found[TOY_INFORMATION], s, information);
        curve(found[TOY_GATE], s, gate);
        parts[0].value[s] = done_at_half(TOY_TIMES, loss, information, 0.05) - 0.5;
        parts[1].value[s] = done_at_half(TOY_TIMES, loss, gate, 0.05) - 0.5;
        parts[2].value[s] = 0.05 - (information[TOY_TIMES - 1] - information[0]);
    }
}

static void aoe_toy(void) {
    static double found[TOY_KINDS][TOY_NUMBERS][TOY_TIMES][MAX_SEEDS], numbers[TOY_TIMES][TOY_NUMBERS];
    static part parts[3];
    int outcome[3];
    double p[3];
    printf("Tokens from three Gaussians c in %d directions; to learn: y = A_c x. %d factorised experts, 2 per\n"
           "token; %d steps of %d new tokens; test on %d. When the loss has done half of its fall, how much\n"
           "of the specialising is done: the rise of I(expert; cluster), the fall of H_b? About 1/2 if all\n"
           "went together, less if there are two stages.\n\n", TOY_IN, TOY_EXPERTS, TOY_STEPS, TOY_BATCH, TOY_TEST);
    for (size_t s = 0; s < seeds; s++)
        for (int kind = 0; kind < TOY_KINDS; kind++) {
            progress("seed %d of %d: %s", (int)s + 1, (int)seeds, toy_kinds[kind]);
            toy_train(kind, first_seed + s, TOY_TIMES, numbers);
            for (int i = 0; i < TOY_TIMES; i++)
                for (int q = 0; q < TOY_NUMBERS; q++) found[kind][q][i][s] = numbers[i][q];
        }
    progress("");
    toy_table(found);
    if (svg_path != NULL || report_path != NULL) toy_picture(found);
    toy_parts(found[TOY_LINEAR], parts);
    judge(parts, 3, seeds, outcome, p);
    printf("\nThe linear router by the same test, which is no part of the claim: two stages %s.\n",
           outcomes[verdict_on(parts[0].claim, parts, 3, outcome) + 1]);
    toy_parts(found[TOY_AOE], parts);
    conclude(parts, 3);
}

/* ---- the text and the language model of the other studies ---- */

enum { MAX_SECTIONS = 1000, MAX_CLASSES = 8, VOCABULARY = 512 };
enum { WIDTH = 64, FF = 64, LAYERS = 2, EXPERTS = 8, CONTEXT = 64, SEQUENCES = 8, TOKENS = SEQUENCES * CONTEXT };

/* A text, split into a training and a test part; the largest articles also separately, as the
   classes of a task. */
typedef struct corpus {
    moe_buffer text;
    struct language language;
    language_text train, held, class_train[MAX_CLASSES], class_held[MAX_CLASSES];
    int classes;
} corpus;

static const char *text_name(void) { return data_path != NULL ? data_path : "the headers"; }

typedef struct section {
    size_t from, size;
} section;

static int larger_first(const void *a, const void *b) {
    const section *x = (const section *)a, *y = (const section *)b;
    return x->size != y->size ? (x->size < y->size) - (x->size > y->size) : (x->from > y->from) - (x->from < y->from);
}

/* Whether a line is a heading " = Title = ", not " = = of a part = = ". */
static int is_heading(const char *line, size_t left) {
    return left > 4 && memcmp(line, " = ", 3) == 0 && line[3] != '=';
}

/* The articles of one text: from heading to heading. */
static size_t find_articles(const moe_buffer *text, section *sections) {
    const char *bytes = (const char *)text->data;
    size_t n = 0;
    for (size_t at = 0; at < text->size; at++) {
        if (at > 0 && (bytes[at - 1] != '\n' || !is_heading(bytes + at, text->size - at))) continue;
        if (n == MAX_SECTIONS) break; /* the last article takes the rest */
        if (n > 0) sections[n - 1].size = at - sections[n - 1].from;
        sections[n++].from = at;
    }
    if (n > 0) sections[n - 1].size = text->size - sections[n - 1].from;
    return n;
}

static size_t read_sections(moe_buffer *text, section *sections) {
    const char *const *headers = example_headers();
    moe_error error;
    if (data_path != NULL) {
        must(language_read(&data_path, 1, text, &error), &error);
        return find_articles(text, sections);
    }
    for (size_t i = 0; i < 3; i++) {
        sections[i].from = text->size;
        must(language_read(&headers[i], 1, text, &error), &error);
        sections[i].size = text->size - sections[i].from;
    }
    return 3;
}

/* Splits sections: the last fifth of each quarter of each section is for the test. */
static void deal(const corpus *c, const section *sections, size_t n, language_text *train, language_text *held) {
    moe_buffer to_learn = {0}, to_test = {0};
    moe_error error;
    for (size_t i = 0; i < n; i++) {
        moe_buffer piece = {0};
        piece.data = c->text.data + sections[i].from;
        piece.size = sections[i].size;
        must(language_split(&piece, 4, 0.2, &to_learn, &to_test, &error), &error);
    }
    must(language_encode(&c->language, &to_learn, train, &error), &error);
    must(language_encode(&c->language, &to_test, held, &error), &error);
    moe_buffer_free(&to_learn);
    moe_buffer_free(&to_test);
}

/* words: the most frequent ones instead of bytes. */
static void corpus_read(corpus *c, int words) {
    static section sections[MAX_SECTIONS];
    moe_error error;
    size_t n;
    memset(c, 0, sizeof *c);
    n = read_sections(&c->text, sections);
    must(language_learn(&c->language, &c->text, words, VOCABULARY, &error), &error);
    deal(c, sections, n, &c->train, &c->held);
    if (c->held.n < 2 * TOKENS) stop(text_name(), "too short");
    qsort(sections, n, sizeof *sections, larger_first);
    for (size_t i = 0; i < n && i < MAX_CLASSES; i++, c->classes++) {
        deal(c, &sections[i], 1, &c->class_train[i], &c->class_held[i]);
        if (c->class_held[i].n > 4 * CONTEXT) continue;
        free(c->class_train[i].ids);
        free(c->class_held[i].ids);
        break;
    }
}

static void corpus_free(corpus *c) {
    moe_buffer_free(&c->text);
    free(c->language.word);
    free(c->train.ids);
    free(c->held.ids);
    for (int i = 0; i < c->classes; i++) {
        free(c->class_train[i].ids);
        free(c->class_held[i].ids);
    }
}

/* The network of language.h, with one output per id for a language model, per class for a task. */
static void build_net(moe_net *net, const corpus *c, const moe_layer_config *layers, int outputs, uint64_t seed) {
    moe_attention_config attention = {.rotary = 1};
    moe_error error;
    moe_net_init(net, 0, MOE_KERNELS_AUTO, NULL);
    moe_net_embedding(net, c->language.size, WIDTH);
    for (int l = 0; l < LAYERS; l++) {
        moe_net_rms_norm(net);
        moe_net_attention(net, &attention);
        moe_net_residual(net, 2);
        moe_net_rms_norm(net);
        moe_net_mixture(net, &layers[l]);
        moe_net_residual(net, 2);
    }
    moe_net_rms_norm(net);
    moe_net_linear(net, outputs);
    must(moe_net_build(net, 1, seed, &error), &error);
}

/* SEQUENCES sequences and their labels: what comes next, or in a task one label at the end of
   each. */
typedef struct text_batch {
    int32_t ids[TOKENS], labels[TOKENS];
} text_batch;

static void draw_text(const corpus *c, moe_rng *rng, text_batch *b) {
    language_draw(&c->train, SEQUENCES, CONTEXT, rng, b->ids, b->labels);
}

/* Trains on batches of draw_batch; look (or NULL) is called before each step and after the last. */
static void train(moe_net *net, const corpus *c, void (*draw_batch)(const corpus *, moe_rng *, text_batch *), int steps,
                  uint64_t seed, void (*look)(void *ctx, int step), void *ctx) {
    static text_batch batch;
    moe_train_config config = {0};
    moe_data data = {.n = TOKENS, .labels = batch.labels, .token_ids = batch.ids, .length = CONTEXT};
    moe_trainer trainer;
    moe_error error;
    moe_rng rng;
    moe_rng_seed(&rng, ~seed);
    config.batch = TOKENS;
    config.clip = 1;
    config.seed = seed;
    config.rate = (moe_real)0.004;
    config.final_rate = (moe_real)0.1;
    config.warmup = steps / 20;
    config.total_steps = steps;
    must(moe_trainer_init(&trainer, net, &config, &error), &error);
    for (int step = 0; step < steps; step++) {
        if (look != NULL) look(ctx, step);
        draw_batch(c, &rng, &batch);
        must(moe_trainer_step(&trainer, &data, NULL, &error), &error);
        pause_for_user();
    }
    if (look != NULL) look(ctx, steps);
    moe_trainer_free(&trainer);
}

/* Runs sequences through net, SEQUENCES in a call; after each call found(ctx, pass, first), first
   the place in ids where it began. */
static void run_text(const moe_net *net, const int32_t *ids, size_t sequences,
                     void (*found)(void *, const moe_net_pass *, size_t), void *ctx) {
    int32_t offsets[SEQUENCES + 1];
    moe_call call = {0};
    moe_net_pass pass;
    moe_rng rng = {1}; /* for dropping at random */
    size_t bytes;
    void *work;
    must(moe_net_work_size(net, TOKENS, 0, &bytes), NULL);
    work = grab(bytes, 1);
    for (int s = 0; s <= SEQUENCES; s++) offsets[s] = s * CONTEXT;
    for (size_t s = 0; s < sequences; s += call.n_sequences) {
        call.n_sequences = sequences - s < SEQUENCES ? sequences - s : SEQUENCES;
        call.sequences = offsets;
        call.n_tokens = call.n_sequences * CONTEXT;
        call.token_ids = ids + s * CONTEXT;
        call.rng = &rng;
        must(moe_net_forward(net, &call, work, bytes, &pass), NULL);
        found(ctx, &pass, s * CONTEXT);
    }
    free(work);
}

enum { TEST_SEQUENCES = 128 };

typedef struct text_test {
    size_t vocabulary;
    int32_t ids[TEST_SEQUENCES * CONTEXT], labels[TEST_SEQUENCES * CONTEXT];
    size_t sequences;
    double loss; /* sum */
} text_test;

static void add_loss(void *ctx, const moe_net_pass *pass, size_t first) {
    text_test *t = (text_test *)ctx;
    for (size_t i = 0; i < pass->n_tokens; i++)
        t->loss += language_loss(t->vocabulary, pass->y + t->vocabulary * i, t->labels[first + i]);
}

/* Mean loss per token on the held text. */
static double text_loss(const moe_net *net, const corpus *c) {
    static text_test t;
    t.sequences = language_spread(&c->held, TEST_SEQUENCES, CONTEXT, t.ids, t.labels);
    t.loss = 0;
    t.vocabulary = (size_t)c->language.size;
    run_text(net, t.ids, t.sequences, add_loss, &t);
    return t.loss / (double)(t.sequences * CONTEXT);
}

/* ---- locmoe: fewer tokens served, the same loss? ----
   LocMoE+ sends a token to its nearest expert, and an expert keeps its nearest tokens only; the
   others go by on the residual. The twin of each such network serves as many tokens, but drops by
   lot: an expert takes C of its tokens, C such that as many are served in all. */

enum { LOC_STEPS = 400, LOC_LOOKS = 33, LOC_ALL = 0, LOC_PRIMARY = 2, LOC_SUM = 4 };
#define LOC_MARGIN 0.02

static const struct loc_row {
    const char *name;
    double mass, sum;
} loc_rows[] = {
    {"all", 0, 0}, {"mass 0.75", 0.75, 0}, {"mass 0.5", 0.5, 0}, {"mass 0.25", 0.25, 0}, {"sum 12", 0, 12},
};
enum { LOC_ROWS = sizeof loc_rows / sizeof loc_rows[0] };

/* Results of one network: at each look the share of served tokens and their mean affinity to their
   experts; the mean share; the final loss. */
typedef struct loc_result {
    double served[LOC_LOOKS], affinity[LOC_LOOKS], mean, loss;
} loc_result;

/* The observation of a network: how many tokens are nearest to each expert, how many are served. */
typedef struct loc_watch {
    const moe_net *net;
    int32_t ids[TOKENS], labels[TOKENS];
    int looks, place;
    size_t counts[LAYERS][LOC_LOOKS][EXPERTS];
    double kept[LAYERS][LOC_LOOKS], affinity[LAYERS][LOC_LOOKS];
} loc_watch;

static int loc_time(int i) { return LOC_STEPS * i / (LOC_LOOKS - 1); }

static void loc_found(void *ctx, const moe_net_pass *pass, size_t first) {
    loc_watch *w = (loc_watch *)ctx;
    (void)first;
    for (size_t l = 0; l < LAYERS; l++) {
        const moe_routing *r = moe_net_routing(w->net, pass, language_module(l));
        size_t *counts = w->counts[l][w->looks];
        memset(counts, 0, sizeof w->counts[l][0]);
        w->affinity[l][w->looks] = 0;
        for (size_t t = 0; t < r->n_tokens; t++) {
            int32_t best;
            moe_top_k(EXPERTS, r->logits + t * EXPERTS, 1, &best);
            counts[best]++;
            w->affinity[l][w->looks] += (double)r->logits[t * EXPERTS + (size_t)best] / (double)r->n_tokens;
        }
        w->kept[l][w->looks] = (double)r->plan.offsets[EXPERTS];
    }
}

static void loc_look(void *ctx, int step) {
    loc_watch *w = (loc_watch *)ctx;
    if (w->looks == LOC_LOOKS || step != loc_time(w->looks)) return;
    run_text(w->net, w->ids, SEQUENCES, loc_found, w);
    w->looks++;
}

/* The capacity at which the observed loads of layer l would have served as many tokens. */
static int loc_capacity(const loc_watch *w, int l) {
    double kept = 0, served = 0;
    double before = 0;
    int capacity = 0;
    for (int i = 0; i < w->looks; i++) kept += w->kept[l][i];
    while (served < kept && capacity < TOKENS) {
        capacity++;
        before = served;
        served = 0;
        for (int i = 0; i < w->looks; i++)
            for (int e = 0; e < EXPERTS; e++) served += fmin((double)w->counts[l][i][e], capacity);
    }
    return capacity > 1 && kept - before < served - kept ? capacity - 1 : capacity;
}

/* capacity 0: by affinity. */
static void loc_config(moe_layer_config *c, const struct loc_row *row, int capacity) {
    moe_error error;
    must(moe_layer_preset("locmoe_plus", c, &error), &error);
    c->router.n_experts = EXPERTS;
    c->d_ff = FF;
    c->router.affinity_mass = (moe_real)row->mass;
    c->router.affinity_sum = (moe_real)row->sum;
    c->router.affinity_sum_auto = c->router.switch_share = 0;
    if (capacity == 0) return;
    c->router.select = MOE_SELECT_TOP_K;
    c->router.affinity_mass = c->router.affinity_sum = 0;
    c->router.drop_capacity = capacity;
    c->router.drop_order = MOE_DROP_RANDOM;
}

/* Trains one network; capacity NULL: by affinity, else its layers' capacities. w keeps the
   observations. */
static void loc_train(const corpus *c, const struct loc_row *row, const int *capacity, uint64_t seed, int steps,
                      loc_watch *w, loc_result *result) {
    moe_layer_config layers[LAYERS];
    moe_net net;
    for (int l = 0; l < LAYERS; l++) loc_config(&layers[l], row, capacity != NULL ? capacity[l] : 0);
    build_net(&net, c, layers, c->language.size, seed);
    w->net = &net;
    w->looks = 0;
    language_spread(&c->held, SEQUENCES, CONTEXT, w->ids, w->labels);
    train(&net, c, draw_text, steps, seed, loc_look, w);
    result->loss = text_loss(&net, c);
    result->mean = 0;
    for (int i = 0; i < w->looks; i++) {
        result->served[i] = result->affinity[i] = 0;
        for (int l = 0; l < LAYERS; l++) {
            result->served[i] += w->kept[l][i] / (LAYERS * TOKENS);
            result->affinity[i] += w->affinity[l][i] / LAYERS;
        }
        result->mean += result->served[i] / w->looks;
    }
    moe_net_free(&net);
}

static void loc_picture(double (*share)[LOC_ROWS][MAX_SEEDS], double (*loss)[LOC_ROWS][MAX_SEEDS],
                        double (*served)[LOC_LOOKS][MAX_SEEDS], double (*capacity)[MAX_SEEDS]) {
    static panel panels[3];
    static const char *const names[2] = {"LocMoE+", "dropped by lot"};
    panels[0].title = "loss on held text, nats per byte";
    panels[0].x_label = "share of the tokens that is served";
    panels[0].n_lines = 2;
    for (int kind = 0; kind < 2; kind++) {
        int order[LOC_ROWS];
        for (int row = 0; row < LOC_ROWS; row++) { /* by share */
            int at = row;
            double x = mean_of(share[kind][row], seeds);
            for (; at > 0 && mean_of(share[kind][order[at - 1]], seeds) > x; at--) order[at] = order[at - 1];
            order[at] = row;
        }
        panels[0].line[kind].name = names[kind];
        for (int i = 0; i < LOC_ROWS; i++)
            add_point(&panels[0].line[kind], mean_of(share[kind][order[i]], seeds), loss[kind][order[i]], seeds);
    }
    panels[1].title = "LocMoE+: share of the tokens that is served";
    panels[1].x_label = "steps";
    panels[1].n_lines = LOC_ROWS;
    for (int row = 0; row < LOC_ROWS; row++) {
        panels[1].line[row].name = loc_rows[row].name;
        for (int i = 0; i < LOC_LOOKS; i++) add_point(&panels[1].line[row], loc_time(i), served[row][i], seeds);
    }
    panels[2].title = "LocMoE+, sum 12: capacity, tokens per expert";
    panels[2].x_label = "steps";
    panels[2].n_lines = 1;
    panels[2].line[0].name = loc_rows[LOC_SUM].name;
    for (int i = 0; i < LOC_LOOKS; i++) add_point(&panels[2].line[0], loc_time(i), capacity[i], seeds);
    draw(svg_path, panels, 3);
}

/* Mean of the looks from..to-1 of one seed. */
static double loc_mean(double (*values)[MAX_SEEDS], int from, int to, size_t seed) {
    double sum = 0;
    for (int i = from; i < to; i++) sum += values[i][seed] / (to - from);
    return sum;
}

static void loc_parts(double (*loss)[LOC_ROWS][MAX_SEEDS], double (*capacity)[MAX_SEEDS], part *parts) {
    parts[0].claim = "serving fewer tokens keeps the loss";
    parts[1].claim = "the nearest tokens are better ones to serve than any";
    parts[2].claim = parts[3].claim = "capacity falls, then settles";
    parts[0].text = "loss: mass 0.5 - all tokens - 0.02";
    parts[1].text = "loss: mass 0.5 - as many tokens by lot";
    parts[2].text = "capacity, sum 12: last eighth of training - first";
    parts[3].text = "its fall in the second half - 1/4 of all its fall";
    for (size_t s = 0; s < seeds; s++) {
        double first = loc_mean(capacity, 0, LOC_LOOKS / 8, s);
        double middle = loc_mean(capacity, LOC_LOOKS / 2 - 2, LOC_LOOKS / 2 + 2, s);
        double last = loc_mean(capacity, LOC_LOOKS - LOC_LOOKS / 8, LOC_LOOKS, s);
        parts[0].value[s] = loss[0][LOC_PRIMARY][s] - loss[0][LOC_ALL][s] - LOC_MARGIN;
        parts[1].value[s] = loss[0][LOC_PRIMARY][s] - loss[1][LOC_PRIMARY][s];
        parts[2].value[s] = last - first;
        parts[3].value[s] = (middle - last) - (first - last) / 4;
    }
}

static void loc_tables(double (*share)[LOC_ROWS][MAX_SEEDS], double (*loss)[LOC_ROWS][MAX_SEEDS],
                       double (*served)[LOC_LOOKS][MAX_SEEDS], double (*capacity)[MAX_SEEDS]) {
    printf("%-10s%15s%15s%15s%15s%15s%15s\n", "", "", "", "loss - that of", "by lot:", "", "LocMoE+");
    printf("%-10s%15s%15s%15s%15s%15s%15s\n", "", "served", "loss", "all tokens", "served", "loss", "- by lot");
    for (int row = 0; row < LOC_ROWS; row++) {
        printf("%-10s%15s%15s", loc_rows[row].name, plus_minus(share[0][row], seeds), plus_minus(loss[0][row], seeds));
        if (row != LOC_ALL)
            printf("%15s%15s", difference(loss[0][row], loss[0][LOC_ALL], seeds), plus_minus(share[1][row], seeds));
        if (row != LOC_ALL)
            printf("%15s%15s", plus_minus(loss[1][row], seeds), difference(loss[0][row], loss[1][row], seeds));
        printf("\n");
    }
    printf("\n%-20s", "after so many steps");
    for (int i = 0; i < LOC_LOOKS; i += 8) printf("%15d", loc_time(i));
    for (int row = 1; row < LOC_ROWS; row++) {
        printf("\nserved, %-12s", loc_rows[row].name);
        for (int i = 0; i < LOC_LOOKS; i += 8) printf("%15s", plus_minus(served[row][i], seeds));
    }
    printf("\ncapacity, %-10s", loc_rows[LOC_SUM].name);
    for (int i = 0; i < LOC_LOOKS; i += 8) {
        statistics_result r = statistics_paired(seeds, capacity[i], NULL);
        printf("%7.1f +-%5.1f", r.mean, (r.high - r.low) / 2);
    }
    printf("\n");
}

static void locmoe(void) {
    static double share[2][LOC_ROWS][MAX_SEEDS], loss[2][LOC_ROWS][MAX_SEEDS]; /* by affinity, by lot */
    static double served[LOC_ROWS][LOC_LOOKS][MAX_SEEDS], capacity[LOC_LOOKS][MAX_SEEDS];
    static loc_watch watch;
    static part parts[4];
    static corpus c;
    corpus_read(&c, 0);
    printf("A language model of bytes: %d layers, width %d, %d experts, 1 per token; %d steps of %d tokens. An\n"
           "expert keeps its nearest tokens, up to a mass (part of the sum of its tokens' affinities) or a sum\n"
           "of affinity; the others go by. This selection sees the whole batch, later tokens too: it is not\n"
           "causal. By lot: an expert takes C tokens at most, whoever they are, C such that as many are served\n"
           "as with LocMoE+ (mean over training). Capacity: how many tokens of mean affinity make up the sum.\n\n",
           LAYERS, WIDTH, EXPERTS, LOC_STEPS, TOKENS);
    for (size_t s = 0; s < seeds; s++)
        for (int row = 0; row < LOC_ROWS; row++) {
            int places[LAYERS];
            loc_result by_affinity, by_lot;
            progress("seed %d of %d: %s", (int)s + 1, (int)seeds, loc_rows[row].name);
            for (int l = 0; l < LAYERS; l++) places[l] = TOKENS;
            loc_train(&c, &loc_rows[row], row == LOC_ALL ? places : NULL, first_seed + s, LOC_STEPS, &watch,
                      &by_affinity);
            for (int l = 0; l < LAYERS; l++) places[l] = loc_capacity(&watch, l);
            by_lot = by_affinity;
            if (row != LOC_ALL) loc_train(&c, &loc_rows[row], places, first_seed + s, LOC_STEPS, &watch, &by_lot);
            share[0][row][s] = by_affinity.mean;
            share[1][row][s] = by_lot.mean;
            loss[0][row][s] = by_affinity.loss;
            loss[1][row][s] = by_lot.loss;
            for (int i = 0; i < LOC_LOOKS; i++) served[row][i][s] = by_affinity.served[i];
            for (int i = 0; i < LOC_LOOKS && row == LOC_SUM; i++)
                capacity[i][s] = loc_rows[row].sum / by_affinity.affinity[i];
        }
    progress("");
    loc_tables(share, loss, served, capacity);
    if (svg_path != NULL || report_path != NULL) loc_picture(share, loss, served, capacity);
    loc_parts(loss, capacity, parts);
    conclude(parts, 4);
    corpus_free(&c);
}

/* ---- finetune: does fine-tuning keep the ranking? ---- */

enum { TUNE_PRE = 250, TUNE_STEPS = 250, TUNE_WINDOWS = 1024 };

static const char *const tune_routers[] = {"smoe", "similarity_smoe", "acmoe", "aoe", "smoe_dropout"};
enum { TUNE_ROUTERS = sizeof tune_routers / sizeof tune_routers[0] };

/* Every router has the same number of expert parameters, 8 experts, 2 per token. */
static void tune_config(const char *name, moe_layer_config *c) {
    moe_error error;
    must(moe_layer_preset(name, c, &error), &error);
    c->router.n_experts = EXPERTS;
    c->router.top_k = 2;
    c->router.loss_balance = (moe_real)0.01;
    c->d_ff = FF;
    if (c->expert == MOE_EXPERT_FACTORISED) {
        c->d_low = (WIDTH + 2) / 3;
        c->d_ff = (3 * WIDTH * FF - c->d_low * WIDTH) / (c->d_low + 2 * WIDTH);
    }
    if (c->router.input == MOE_INPUT_ADAPTIVE_CLUSTERING) c->router.ac_mode = MOE_AC_RUNNING;
}

/* Adaptive clustering needs the clusters of a previous layer: its first layer is a plain one. */
static void tune_layers(const char *name, moe_layer_config *layers) {
    for (int l = 0; l < LAYERS; l++) tune_config(name, &layers[l]);
    if (layers[0].router.input == MOE_INPUT_ADAPTIVE_CLUSTERING) tune_config("smoe", &layers[0]);
}

/* Copies the tensors that both networks have in the same size; returns how many. */
static int copy_tensors(const moe_net *from, moe_net *to) {
    int copied = 0;
    for (size_t i = 0; i < from->n_tensors; i++) {
        const moe_tensor *source = &from->tensors[i];
        moe_tensor target;
        if (moe_net_find(to, source->name, &target) != MOE_OK || target.count != source->count) continue;
        memcpy(target.data, source->data, source->count * sizeof *source->data);
        copied++;
    }
    return copied;
}

/* Windows of random articles; the label, at the last token only, is the article. */
static void draw_windows(const corpus *c, moe_rng *rng, text_batch *b) {
    for (int s = 0; s < SEQUENCES; s++) {
        int32_t class_ = (int32_t)moe_rng_below(rng, (uint64_t)c->classes);
        language_draw(&c->class_train[class_], 1, CONTEXT, rng, b->ids + s * CONTEXT, b->labels + s * CONTEXT);
        for (int t = 0; t < CONTEXT; t++) b->labels[s * CONTEXT + t] = t == CONTEXT - 1 ? class_ : -1;
    }
}

typedef struct window_test {
    int classes;
    int32_t class_;
    double wrong;
} window_test;

static void add_wrong(void *ctx, const moe_net_pass *pass, size_t first) {
    window_test *t = (window_test *)ctx;
    (void)first;
    for (size_t i = CONTEXT - 1; i < pass->n_tokens; i += CONTEXT) {
        int32_t best;
        moe_top_k((size_t)t->classes, pass->y + i * (size_t)t->classes, 1, &best);
        t->wrong += best != t->class_;
    }
}

/* Error rate on windows of held-out text; all articles have equal weight. */
static double task_error(const moe_net *net, const corpus *c) {
    static int32_t ids[TUNE_WINDOWS * CONTEXT], next[TUNE_WINDOWS * CONTEXT];
    double error = 0;
    for (int i = 0; i < c->classes; i++) {
        window_test t = {c->classes, i, 0};
        size_t n = language_spread(&c->class_held[i], (size_t)(TUNE_WINDOWS / c->classes), CONTEXT, ids, next);
        run_text(net, ids, n, add_wrong, &t);
        error += t.wrong / (double)n / c->classes;
    }
    return error;
}

/* Kendall's tau-b: pairs in the same order less pairs in the opposite, over the mean number of
   pairs that are not tied; 0 without any. */
static double kendall(size_t n, const double *a, const double *b) {
    double sum = 0, in_a = 0;
    double in_b = 0;
    for (size_t i = 0; i < n; i++)
        for (size_t j = i + 1; j < n; j++) {
            int x = (a[i] > a[j]) - (a[i] < a[j]), y = (b[i] > b[j]) - (b[i] < b[j]);
            sum += x * y;
            in_a += x != 0;
            in_b += y != 0;
        }
    return in_a > 0 && in_b > 0 ? sum / sqrt(in_a * in_b) : 0;
}

/* Pre-trains (steps > 0), then fine-tunes; *loss on text in between, *error on the task at the
   end. */
static void tune_one(const corpus *c, const char *name, int pre_steps, int steps, uint64_t seed, double *loss,
                     double *error) {
    moe_layer_config layers[LAYERS];
    moe_net pre, net;
    tune_layers(name, layers);
    build_net(&pre, c, layers, c->language.size, seed);
    if (pre_steps > 0) train(&pre, c, draw_text, pre_steps, seed, NULL, NULL);
    *loss = text_loss(&pre, c);
    build_net(&net, c, layers, c->classes, seed + 1000000);
    if (pre_steps > 0) copy_tensors(&pre, &net);
    train(&net, c, draw_windows, steps, seed, NULL, NULL);
    *error = task_error(&net, c);
    moe_net_free(&pre);
    moe_net_free(&net);
}

static void finetune(void) {
    static double loss[TUNE_ROUTERS + 1][MAX_SEEDS], error[TUNE_ROUTERS + 1][MAX_SEEDS], tau[MAX_SEEDS];
    static part parts[1];
    static corpus c;
    double means[2][TUNE_ROUTERS];
    corpus_read(&c, 1);
    if (c.classes < 2) stop(text_name(), "fewer than two long articles; one begins at a line \" = Title = \"");
    printf("A language model of words (%d layers, width %d, %d experts, 2 per token) learns %d steps of %d\n"
           "tokens; then, with a new head, to tell from %d words which of %d articles they come from, in %d\n"
           "steps of %d windows. Tested on text that it has not seen; error by guessing: %.3f. Kendall's tau\n"
           "between loss and error over the %d routers, within each seed: above 0 if ranks are kept.\n\n",
           LAYERS, WIDTH, EXPERTS, TUNE_PRE, TOKENS, CONTEXT, c.classes, TUNE_STEPS, SEQUENCES, 1 - 1.0 / c.classes,
           TUNE_ROUTERS);
    for (size_t s = 0; s < seeds; s++) {
        double x[TUNE_ROUTERS], y[TUNE_ROUTERS];
        for (int r = 0; r <= TUNE_ROUTERS; r++) { /* the last: not pre-trained */
            const char *name = tune_routers[r % TUNE_ROUTERS];
            progress("seed %d of %d: %s", (int)s + 1, (int)seeds, name);
            tune_one(&c, name, r < TUNE_ROUTERS ? TUNE_PRE : 0, TUNE_STEPS, first_seed + s, &loss[r][s], &error[r][s]);
            if (r < TUNE_ROUTERS) {
                x[r] = loss[r][s];
                y[r] = error[r][s];
            }
        }
        tau[s] = kendall(TUNE_ROUTERS, x, y);
        parts[0].value[s] = -tau[s];
    }
    progress("");
    printf("%-22s%20s%20s%20s\n", "", "loss before", "error after", "- not pre-trained");
    for (int r = 0; r <= TUNE_ROUTERS; r++) {
        const char *name = r < TUNE_ROUTERS ? tune_routers[r] : "smoe, not pre-trained";
        printf("%-22s%20s%20s", name, plus_minus(loss[r], seeds), plus_minus(error[r], seeds));
        if (r < TUNE_ROUTERS) printf("%20s", difference(error[r], error[TUNE_ROUTERS], seeds));
        printf("\n");
        if (r < TUNE_ROUTERS) {
            means[0][r] = mean_of(loss[r], seeds);
            means[1][r] = mean_of(error[r], seeds);
        }
    }
    printf("\nKendall's tau within a seed %s", plus_minus(tau, seeds));
    printf("; of the routers' means %.3f\n", kendall(TUNE_ROUTERS, means[0], means[1]));
    if (statistics_paired(seeds, error[0], error[TUNE_ROUTERS]).high >= 0)
        printf("Pre-training is not shown to lower the error: at this size the task cannot say much about it.\n");
    parts[0].claim = "fine-tuning keeps the ranking";
    parts[0].text = "- Kendall's tau of loss and error, within a seed";
    conclude(parts, 1);
    corpus_free(&c);
}

/* ---- tests of the parts ---- */

static long passed, failed;

static void check(int good, const char *what) {
    if (good) passed++;
    else {
        failed++;
        printf("FAILED: %s\n", what);
    }
}

static int near(double a, double b) { return fabs(a - b) < 1e-9; }

static void check_parts(void) {
    static const double fall[] = {8, 6, 2, 0}, late[] = {0, 0, 0.5, 2};
    static const double with[] = {0, 1, 3, 4}, flat[] = {1, 1, 1, 1.01};
    static const double a[] = {1, 2, 3, 4}, b[] = {1, 3, 2, 4};
    static const double back[] = {4, 3, 2, 1}, tied[] = {1, 1, 2, 2};
    static const part below = {"a", "", {-0.1, -0.2, -0.15, -0.1}}, above = {"a", "", {0.1, 0.2, 0.15, 0.1}};
    static const part around = {"b", "", {-0.1, 0.2, 0.1, -0.3}};
    part parts[2];
    int outcome[2];
    double p[2];
    check(near(done_at_half(4, fall, late, 0.05), 0.125), "late: an eighth is done when half of the loss is gone");
    check(near(done_at_half(4, fall, with, 0.05), 0.5), "together: half is done");
    check(near(done_at_half(4, fall, flat, 0.05), 1), "no change counts as against");
    check(near(when(4, fall, 0.5, late), 0.25) && near(when(4, fall, 0, late), 0) && near(when(4, fall, 1, late), 2),
          "the value at half");
    check(near(kendall(4, a, b), 2.0 / 3) && near(kendall(4, a, back), -1) && near(kendall(4, a, tied), 4 / sqrt(24)),
          "Kendall's tau");
    parts[0] = parts[1] = below;
    judge(parts, 2, 4, outcome, p);
    check(verdict_on("a", parts, 2, outcome) == CONFIRMED, "two parts that hold confirm");
    check(p[0] > 1.9 * statistics_paired(4, below.value, NULL).p, "p is corrected");
    parts[1] = around;
    judge(parts, 2, 4, outcome, p);
    check(verdict_on("b", parts, 2, outcome) == UNDECIDED, "what may go either way is left open");
    check(verdict_on("a", parts, 2, outcome) == CONFIRMED, "which is nothing to another claim");
    parts[1] = above;
    judge(parts, 2, 4, outcome, p);
    check(verdict_on("a", parts, 2, outcome) == REFUTED, "a part that fails refutes");
    check(near(tick_step(10), 2) && near(tick_step(0.9), 0.2) && near(tick_step(3), 1), "ticks");
}

static void check_aoe_toy(void) {
    static double numbers[TOY_TIMES][TOY_NUMBERS], again[3][TOY_NUMBERS];
    toy_train(TOY_AOE, 7, TOY_TIMES, numbers);
    check(numbers[TOY_TIMES - 1][TOY_LOSS] < 0.3 * numbers[0][TOY_LOSS], "aoe_toy: the layer learns");
    check(numbers[TOY_TIMES - 1][TOY_INFORMATION] > numbers[0][TOY_INFORMATION] + 0.05,
          "aoe_toy: the experts tell the clusters apart");
    check(numbers[TOY_TIMES - 1][TOY_APART] > numbers[0][TOY_APART], "aoe_toy: the norms part");
    toy_train(TOY_AOE, 7, 3, again);
    check(memcmp(again, numbers, sizeof again) == 0, "aoe_toy: the same seed gives the same numbers");
}

static void check_locmoe(void) {
    static loc_watch watch;
    static corpus c;
    static loc_result all, few, lot, again;
    int places[LAYERS] = {TOKENS, TOKENS};
    corpus_read(&c, 0);
    check(c.train.n > 3 * c.held.n && c.held.n > 0, "the text is dealt out");
    loc_train(&c, &loc_rows[LOC_ALL], places, 7, 41, &watch, &all);
    check(all.loss < 5 && near(all.mean, 1), "locmoe: places for all serve all, and the net learns");
    loc_train(&c, &loc_rows[LOC_PRIMARY], NULL, 7, 41, &watch, &few);
    check(few.mean < 0.5 && few.mean > 0.1, "locmoe: less mass serves fewer");
    for (int l = 0; l < LAYERS; l++) places[l] = loc_capacity(&watch, l);
    loc_train(&c, &loc_rows[LOC_PRIMARY], places, 7, 41, &watch, &lot);
    check(fabs(lot.mean - few.mean) < 0.1, "locmoe: the twin serves as many");
    loc_train(&c, &loc_rows[LOC_PRIMARY], NULL, 7, 41, &watch, &again);
    check(again.loss == few.loss, "locmoe: the same seed gives the same loss");
    corpus_free(&c);
}

static void check_finetune(void) {
    static corpus c;
    static text_batch batch;
    moe_layer_config layers[LAYERS];
    moe_net pre, net;
    moe_rng rng = {1};
    double loss, error, untrained;
    int labels = 0, none = 0;
    corpus_read(&c, 1);
    check(c.classes >= 2, "finetune: there are articles");
    draw_windows(&c, &rng, &batch);
    for (int t = 0; t < TOKENS; t++) {
        labels += batch.labels[t] >= 0 && batch.labels[t] < c.classes;
        none += batch.labels[t] == -1;
    }
    check(labels == SEQUENCES && none == TOKENS - SEQUENCES && batch.labels[CONTEXT - 1] >= 0,
          "finetune: only the last token has a label");
    for (int r = 0; r < TUNE_ROUTERS; r++) {
        size_t parameters, smoe;
        tune_layers("smoe", layers);
        build_net(&pre, &c, layers, c.language.size, 1);
        smoe = moe_net_parameter_count(&pre, NULL);
        moe_net_free(&pre);
        tune_layers(tune_routers[r], layers);
        build_net(&pre, &c, layers, c.language.size, 1);
        build_net(&net, &c, layers, c.classes, 2);
        parameters = moe_net_parameter_count(&pre, NULL);
        check(parameters < smoe + smoe / 50 && parameters > smoe - smoe / 50, "finetune: as many parameters as smoe");
        check(copy_tensors(&pre, &net) == (int)pre.n_tensors - 2, "finetune: all tensors but the head's are copied");
        moe_net_free(&pre);
        moe_net_free(&net);
    }
    tune_layers("smoe", layers);
    build_net(&net, &c, layers, c.classes, 3);
    untrained = task_error(&net, &c);
    moe_net_free(&net);
    /* long enough that seeds and kernels make no difference: 0.35 to 0.41 against 0.67 */
    tune_one(&c, "acmoe", 40, 180, 7, &loss, &error);
    check(loss < 5 && error < untrained - 0.1, "finetune: loss and error fall");
    corpus_free(&c);
}

/* ---- the command line ---- */

static const struct study {
    const char *name, *claim, *source;
    void (*run)(void);
    void (*check)(void);
    int picture; /* whether it draws one */
} studies[] = {
    {"aoe_toy", "experts without a router first behave alike, then specialise",
     "Lv et al. 2025, Autonomy-of-experts models", aoe_toy, check_aoe_toy, 1},
    {"locmoe", "experts that keep only the tokens nearest to them keep the loss", "Li et al. 2024, LocMoE+", locmoe,
     check_locmoe, 1},
    {"finetune", "fine-tuning keeps the ranking of the routers",
     "as in Nielsen et al. 2025, Tight clusters make specialized experts", finetune, check_finetune, 0},
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
    if (end == text || *end != '\0' || value < (long)least || (size_t)value > most)
        refuse(option, "not a value of this option; -h explains");
    return (size_t)value;
}

int main(int count, char **words) {
    const struct study *study = NULL;
    for (int i = 1; i < count; i++) {
        const char *word = words[i], *value = i + 1 < count ? words[i + 1] : "";
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) return fputs(help, stdout) < 0;
        if (strcmp(word, "--check") == 0) return check_all();
        if (strcmp(word, "--seeds") == 0) {
            seeds = read_number(word, value, 2, MAX_SEEDS);
            i++;
        } else if (strcmp(word, "--first") == 0) {
            first_seed = read_number(word, value, 0, 1000000);
            i++;
        } else if (strcmp(word, "--svg") == 0 && *value != '\0') {
            svg_path = value;
            i++;
        } else if (strcmp(word, "--report") == 0 && *value != '\0') {
            report_path = value;
            i++;
        } else if (strcmp(word, "--data") == 0 && *value != '\0') {
            data_path = value;
            i++;
        } else if (word[0] == '-' || study != NULL)
            refuse(word, "no such option, its value is missing, or a second name; -h explains");
        else {
            for (int k = 0; k < STUDIES; k++)
                if (strcmp(word, studies[k].name) == 0) study = &studies[k];
            if (study == NULL) refuse(word, "no such study; studies lists them");
        }
    }
    if (study == NULL) {
        for (int k = 0; k < STUDIES; k++)
            printf("  %-10s %s (%s)\n", studies[k].name, studies[k].claim, studies[k].source);
        return 0;
    }
    if (svg_path != NULL && !study->picture) refuse(study->name, "this study has no picture for --svg");
    if (report_refused() != NULL) stop(report_path, report_refused());
    signal(SIGINT, on_interrupt);
    printf("Claim: %s (%s)\n", study->claim, study->source);
    study->run();
    if (report_write_added("studies", study->claim)) return 1;
    return fflush(stdout) != 0 || ferror(stdout);
}
