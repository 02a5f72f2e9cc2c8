/* judge.h - verdicts of the bench: paired differences with 95 % intervals, what they say about a
   claim's margin, Holm's correction, intervals over blocks of text. */
#ifndef BENCH_JUDGE_H
#define BENCH_JUDGE_H

#include "../statistics.h"
#include <math.h>
#include <stdint.h>

enum { REPRODUCED, OPPOSITE, EXCLUDED, NO_EFFECT, UNDERPOWERED, NOT_RUN, NO_NUMBER, N_VERDICTS };
static const char *const verdict_names[N_VERDICTS] = {
    "reproduced", "opposite", "excluded", "no effect beyond the margin", "underpowered", "not run yet",
    "no number: a run diverged"};

typedef struct judgement {
    statistics_result r;          /* of arm - baseline */
    double arm, baseline;         /* means */
    double block_low, block_high; /* 95 % interval over blocks of text, by bootstrap; NaN: none */
    double p, holm;               /* holm: for primary claims corrected over the papers */
    double level;                 /* below which p is below 0.05 once corrected */
    int verdict, seeds;           /* seeds: how many would decide an underpowered claim; 0: unknown */
} judgement;

/* The number of seeds, at most 2 % above the least, that would decide with this deviation: a mean
   that does not differ from 0 at this level is then so small that its 95 % interval ends below the
   margin. level: 0.05, or less if p is corrected. */
static inline int judge_seeds(double deviation, double margin, double level) {
    int n = 3;
    while (n < 100000 && (statistics_t_quantile(0.975, n - 1) + statistics_t_quantile(1 - level / 2, n - 1)) *
                                 deviation / sqrt(n) > margin)
        n += 1 + n / 50;
    return n;
}

/* The verdict on a difference r that should have this sign and be at least the margin in magnitude;
   p decides whether it differs from 0. papers 1: the margin is the paper's effect. keeps 1: the
   claim is that the outcome is worse by less than the margin; sign is the better direction. */
static inline int judge(const statistics_result *r, int sign, double margin, int papers, int keeps, double p) {
    double low = sign > 0 ? r->low : -r->high, high = sign > 0 ? r->high : -r->low; /* towards the prediction */
    if (r->n < 2) return NOT_RUN;
    if (!isfinite(r->mean)) return NO_NUMBER;
    if (keeps) return low > -margin ? REPRODUCED : high < -margin ? OPPOSITE : UNDERPOWERED;
    if (p < 0.05 && high < 0) return OPPOSITE;
    if (p < 0.05 && low > 0 && high >= margin / 2) return REPRODUCED;
    if (high < margin) return papers ? EXCLUDED : low > -margin ? NO_EFFECT : EXCLUDED;
    return UNDERPOWERED;
}

/* The 95 % interval of the mean of d [n], by 2,000 bootstrap samples of blocks; deterministic. */
static inline void judge_blocks(const double *d, int n, double *low, double *high) {
    enum { TIMES = 2000, EDGE = TIMES / 40 };
    double lowest[EDGE], highest[EDGE];
    uint64_t state = 1;
    int kept = 0;
    for (int i = 0; i < TIMES; i++) {
        double sum = 0;
        int k;
        for (int b = 0; b < n; b++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            sum += d[(state >> 33) % (uint64_t)n] / n;
        }
        for (k = kept < EDGE ? kept : EDGE - 1; k > 0 && lowest[k - 1] > sum; k--) lowest[k] = lowest[k - 1];
        if (kept < EDGE || k < EDGE - 1 || sum < lowest[k]) lowest[k] = sum;
        for (k = kept < EDGE ? kept : EDGE - 1; k > 0 && highest[k - 1] < sum; k--) highest[k] = highest[k - 1];
        if (kept < EDGE || k < EDGE - 1 || sum > highest[k]) highest[k] = sum;
        kept += kept < EDGE;
    }
    *low = lowest[EDGE - 1];
    *high = highest[EDGE - 1];
}

#endif
