/* scaling.h - laws of size, declared before their rows exist. The worlds scale_WIDTH_EXPERTS of
   claims.h train two routers on text at four widths with three numbers of experts. For each router
   the loss is fitted by

     loss = a + b_E size^-c    size: parameters that a token uses, in millions; a >= 0

   with one a and c and a b for each number of experts E, on the three smaller widths alone. It then
   predicts the mean loss at the largest width over seeds and numbers of experts. Its 95 % interval
   is that of such a mean if the law is true: from LAW_DRAWS sets of losses with the deviation that
   seeds have within a cell, each fitted anew. A law whose interval is wider than +-LAW_MARGIN is
   not tested. The trend is the slope of the difference between the routers (autonomy minus smoe)
   over the doublings of width, one for each seed and number of experts; Lv et al. 2025, section
   4.2, say that the improvement is more pronounced in larger models, so it must be negative. Part
   of bench.c. */
#ifndef BENCH_SCALING_H
#define BENCH_SCALING_H

enum { LAW_WIDTHS = 4, LAW_EXPERTS = 3, LAW_FITTED = LAW_WIDTHS - 1, LAW_ARMS = 2, LAW_DRAWS = 2000 };
static const int law_widths[LAW_WIDTHS] = {12, 20, 32, 48}, law_experts[LAW_EXPERTS] = {4, 8, 16};
static const char *const law_arms[LAW_ARMS] = {"smoe", "autonomy"};
#define LAW_MARGIN 0.02   /* nats per byte; the margin of text.sparsity */
#define TREND_MARGIN 0.01 /* nats per byte and doubling of the width; the margin of text.aoe */

enum { LAW_NOT_RUN, LAW_DIVERGED, LAW_INSIDE, LAW_OUTSIDE, LAW_WIDE };
static const char *const law_verdicts[] = {"not run yet", "no number: a run diverged", "inside", "outside",
                                           "not tested: the interval is wider than the margin"};

/* What is fitted. */
typedef struct law_points {
    double size[LAW_EXPERTS][LAW_WIDTHS], loss[LAW_EXPERTS][LAW_WIDTHS]; /* loss: the mean over seeds */
} law_points;

typedef struct law {
    double a, b[LAW_EXPERTS], c, squares; /* squares: sum of the squared residuals */
} law;

/* What a router's rows say. */
typedef struct law_rows {
    int seeds; /* 0: rows are missing */
    law_points mean;
    double loss[LAW_EXPERTS][LAW_WIDTHS][MAX_SEEDS];
} law_rows;

typedef struct law_result {
    law fitted;
    double held, predicted, low, high; /* means over the numbers of experts, at the largest width */
    int verdict;
} law_result;

/* ---- the law ---- */

static double law_at(const law *l, int e, double size) { return l->a + l->b[e] * pow(size, -l->c); }

/* The least squares for a fixed exponent, which is linear in a and b. */
static law law_with(const law_points *p, double c) {
    double x[LAW_EXPERTS][LAW_FITTED];
    law l = {0};
    double above = 0, below = 0;
    l.c = c;
    for (int pass = 0; pass < 2; pass++) { /* a, then each b */
        for (int e = 0; e < LAW_EXPERTS; e++) {
            double sum_x = 0, sum_y = 0;
            double xx = 0, xy = 0;
            for (int w = 0; w < LAW_FITTED; w++) {
                double y = p->loss[e][w] - l.a;
                if (pass == 0) x[e][w] = pow(p->size[e][w], -c);
                sum_x += x[e][w];
                sum_y += y;
                xx += x[e][w] * x[e][w];
                xy += x[e][w] * y;
            }
            above += sum_y - xy * sum_x / xx;
            below += LAW_FITTED - sum_x * sum_x / xx;
            l.b[e] = xy / xx;
        }
        if (pass == 0) l.a = fmax(above / below, 0);
    }
    for (int e = 0; e < LAW_EXPERTS; e++)
        for (int w = 0; w < LAW_FITTED; w++) {
            double d = p->loss[e][w] - l.a - l.b[e] * x[e][w];
            l.squares += d * d;
        }
    return l;
}

/* The exponent from 0.02 to 4 with the least squares, on ever finer grids around the best one. */
static law law_fit(const law_points *p) {
    enum { POINTS = 20, ROUNDS = 8 };
    double low = log(0.02), high = log(4.0);
    law best = law_with(p, 1);
    for (int r = 0; r < ROUNDS; r++) {
        double step = (high - low) / POINTS;
        for (int i = 0; i <= POINTS; i++) {
            law l = law_with(p, exp(low + i * step));
            if (l.squares < best.squares) best = l;
        }
        low = fmax(log(best.c) - step, log(0.02));
        high = fmin(log(best.c) + step, log(4.0));
    }
    return best;
}

static double law_predicted(const law *l, const law_points *p) {
    double sum = 0;
    for (int e = 0; e < LAW_EXPERTS; e++) sum += law_at(l, e, p->size[e][LAW_FITTED]) / LAW_EXPERTS;
    return sum;
}

/* The standard deviation of a cell's mean over seeds, pooled over the cells that are fitted, for
   normal draws: widened by Student's t for its degrees of freedom. */
static double law_error(const law_rows *r) {
    double squares = 0, freedom = LAW_EXPERTS * LAW_FITTED * (r->seeds - 1.0);
    for (int e = 0; e < LAW_EXPERTS; e++)
        for (int w = 0; w < LAW_FITTED; w++)
            for (int s = 0; s < r->seeds; s++) {
                double d = r->loss[e][w][s] - r->mean.loss[e][w];
                squares += d * d;
            }
    return sqrt(squares / freedom / r->seeds) * statistics_t_quantile(0.975, freedom) / 1.959964;
}

static law_result law_test(const law_rows *r, int draws) {
    static double drawn[LAW_DRAWS];
    law_result t = {0};
    double error;
    moe_rng rng;
    if (r->seeds < 2) return t;
    t.verdict = LAW_DIVERGED;
    for (int e = 0; e < LAW_EXPERTS; e++) {
        for (int w = 0; w < LAW_WIDTHS; w++)
            if (!isfinite(r->mean.loss[e][w])) return t;
        t.held += r->mean.loss[e][LAW_FITTED] / LAW_EXPERTS;
    }
    t.fitted = law_fit(&r->mean);
    t.predicted = law_predicted(&t.fitted, &r->mean);
    error = law_error(r);
    moe_rng_seed(&rng, 1);
    for (int i = 0; i < draws; i++) {
        law_points p = r->mean;
        law l;
        for (int e = 0; e < LAW_EXPERTS; e++)
            for (int w = 0; w < LAW_FITTED; w++)
                p.loss[e][w] = law_at(&t.fitted, e, p.size[e][w]) + error * (double)moe_rng_normal(&rng);
        l = law_fit(&p);
        drawn[i] = law_predicted(&l, &p) + error / sqrt(LAW_EXPERTS) * (double)moe_rng_normal(&rng);
    }
    qsort(drawn, (size_t)draws, sizeof *drawn, by_size);
    t.low = drawn[draws / 40 - 1];
    t.high = drawn[draws - draws / 40];
    if (t.held < t.low || t.held > t.high) t.verdict = LAW_OUTSIDE;
    else t.verdict = fmax(t.high - t.predicted, t.predicted - t.low) <= LAW_MARGIN ? LAW_INSIDE : LAW_WIDE;
    return t;
}

/* The verdict on the trend of the difference a - b. */
static judgement law_trend(const law_rows *a, const law_rows *b) {
    judgement g = {0};
    double slopes[LAW_EXPERTS * MAX_SEEDS], middle = 0, squares = 0;
    int seeds = a->seeds < b->seeds ? a->seeds : b->seeds;
    for (int w = 0; w < LAW_WIDTHS; w++) middle += log2(law_widths[w]) / LAW_WIDTHS;
    for (int w = 0; w < LAW_WIDTHS; w++) squares += (log2(law_widths[w]) - middle) * (log2(law_widths[w]) - middle);
    for (int i = 0; i < LAW_EXPERTS * seeds; i++) {
        int e = i / seeds, s = i % seeds;
        slopes[i] = 0;
        for (int w = 0; w < LAW_WIDTHS; w++)
            slopes[i] += (log2(law_widths[w]) - middle) / squares * (a->loss[e][w][s] - b->loss[e][w][s]);
    }
    g.r = statistics_paired((size_t)(LAW_EXPERTS * seeds), slopes, NULL);
    g.verdict = judge(&g.r, -1, TREND_MARGIN, 0, 0, g.r.p);
    return g;
}

/* ---- its rows and tables ---- */

/* Reads all cells of a router; r->seeds 0 if one is missing. */
static void law_read(const char *name, law_rows *r) {
    memset(r, 0, sizeof *r);
    for (int e = 0; e < LAW_EXPERTS; e++)
        for (int w = 0; w < LAW_WIDTHS; w++) {
            char cell[24];
            double used[MAX_SEEDS];
            const world *at;
            snprintf(cell, sizeof cell, "scale_%d_%d", law_widths[w], law_experts[e]);
            at = find_world(cell);
            r->seeds = values_of(at, name, LOSS, r->loss[e][w]);
            if (r->seeds < seeds_of(at)) {
                r->seeds = 0;
                return;
            }
            (void)values_of(at, name, ACTIVE, used);
            r->mean.loss[e][w] = statistics_paired((size_t)r->seeds, r->loss[e][w], NULL).mean;
            r->mean.size[e][w] = used[0] / 1e6;
        }
}

static void print_laws(void) {
    static law_rows r[LAW_ARMS];
    judgement g;
    print("| router | fitted to widths 12, 20, 32 | loss at 48 with 4, 8, 16 experts | predicted | mean | "
          "predicted | verdict |\n|---|---|---|---|--:|--:|---|\n");
    for (int i = 0; i < LAW_ARMS; i++) {
        law_result t;
        law_read(law_arms[i], &r[i]);
        t = law_test(&r[i], LAW_DRAWS);
        print("| %s |", law_arms[i]);
        if (t.verdict <= LAW_DIVERGED) {
            print(" | | | | | %s |\n", law_verdicts[t.verdict]);
            continue;
        }
        print(" %.3f + (%.3g, %.3g, %.3g) size^-%.3f |", t.fitted.a, t.fitted.b[0], t.fitted.b[1], t.fitted.b[2],
              t.fitted.c);
        for (int e = 0; e < LAW_EXPERTS; e++) print("%s %.4f", e > 0 ? "," : "", r[i].mean.loss[e][LAW_FITTED]);
        print(" |");
        for (int e = 0; e < LAW_EXPERTS; e++)
            print("%s %.4f", e > 0 ? "," : "", law_at(&t.fitted, e, r[i].mean.size[e][LAW_FITTED]));
        print(" | %.4f | %.4f [%.4f, %.4f] | %s |\n", t.held, t.predicted, t.low, t.high, law_verdicts[t.verdict]);
    }
    g = law_trend(&r[1], &r[0]);
    print("\n| trend of %s minus %s | per doubling of the width | margin | p | verdict |\n|---|--:|--:|--:|---|\n",
          law_arms[1], law_arms[0]);
    print("| the improvement is more pronounced in larger models |");
    if (g.verdict >= NOT_RUN) print(" | |");
    else print(" %+.4f [%.4f, %.4f] | -%g | %.2g", g.r.mean, g.r.low, g.r.high, TREND_MARGIN, g.r.p);
    print(" | %s |\n", verdict_names[g.verdict]);
}

/* For --report: measured and fitted losses. */
static void report_laws(void) {
    enum { LINES = 2 * LAW_EXPERTS };
    static const char *const widths[LAW_WIDTHS] = {"12", "20", "32", "48"};
    static const char *const names[LINES] = {"4 experts", "its law", "8 experts", "its law", "16 experts", "its law"};
    static law_rows r;
    for (int i = 0; i < LAW_ARMS; i++) {
        double *values = (double *)report_grab(LINES * LAW_WIDTHS, sizeof *values);
        law_result t;
        moe_figure *f;
        law_read(law_arms[i], &r);
        t = law_test(&r, LAW_DRAWS);
        if (t.verdict <= LAW_DIVERGED) continue;
        for (int e = 0; e < LAW_EXPERTS; e++)
            for (int w = 0; w < LAW_WIDTHS; w++) {
                values[2 * e * LAW_WIDTHS + w] = r.mean.loss[e][w];
                values[(2 * e + 1) * LAW_WIDTHS + w] = law_at(&t.fitted, e, r.mean.size[e][w]);
            }
        f = report_add(MOE_FIGURE_LINES, law_arms[i], LINES, LAW_WIDTHS);
        f->values = values;
        f->row_names = names;
        f->column_names = widths;
        f->caption = "Loss by width; the law is fitted to widths 12, 20 and 32 and predicts 48";
        f->value_label = "loss, nats per byte";
        f->column_label = "width";
    }
}

#endif
