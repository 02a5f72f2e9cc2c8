/* statistics.h - paired comparisons for the examples: Student's t, intervals, equivalence, Holm's
   correction. Plain C99, needs <math.h>.

   Two methods run with the same seeds; d_i is their difference for seed i. statistics_paired gives
   mean and 95 % interval of d and the two-sided p-value of "the mean is 0"; statistics_equivalence
   the p-value of "the mean is not within +-margin"; statistics_holm corrects the p-values of
   several claims judged together, so that any of them is accepted wrongly with a chance of at most
   5 %. */
#ifndef STATISTICS_H
#define STATISTICS_H

#include <math.h>
#include <stddef.h>

/* Mean of paired differences; see statistics_paired. */
typedef struct statistics_result {
    size_t n;         /* pairs */
    double mean;      /* of the differences */
    double error;     /* standard error of the mean: sample standard deviation / sqrt(n) */
    double low, high; /* 95 % interval of the mean by Student's t; unbounded (HUGE_VAL) for n < 2 */
    /* two-sided p-value of a mean of 0; 1 for n < 2. If all differences are equal: 1 if they are 0,
       else 0 */
    double p;
} statistics_result;

/* The continued fraction of the incomplete beta function, by Lentz' method; converges fast for x <
   (a + 1)/(a + b + 2). */
static inline double statistics_beta_fraction(double a, double b, double x) {
    const double tiny = 1e-300;
    double c = 1, d = 1 - (a + b) * x / (a + 1), value;
    int m;
    d = 1 / (fabs(d) < tiny ? tiny : d);
    value = d;
    for (m = 1; m <= 10000; m++) {
        double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)), before = value;
        double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
        d = 1 + even * d;
        c = 1 + even / c;
        d = 1 / (fabs(d) < tiny ? tiny : d);
        c = fabs(c) < tiny ? tiny : c;
        value *= c * d;
        d = 1 + odd * d;
        c = 1 + odd / c;
        d = 1 / (fabs(d) < tiny ? tiny : d);
        c = fabs(c) < tiny ? tiny : c;
        value *= c * d;
        if (fabs(value - before) <= 1e-15 * fabs(value)) break;
    }
    return value;
}

/* I_x(a,b), the regularized incomplete beta function; a, b > 0. */
static inline double statistics_beta(double a, double b, double x) {
    double front;
    if (x <= 0 || x >= 1) return x <= 0 ? 0 : 1;
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x));
    if (x < (a + 1) / (a + b + 2)) return front * statistics_beta_fraction(a, b, x) / a;
    return 1 - front * statistics_beta_fraction(b, a, 1 - x) / b;
}

/* P(|T| > |t|) for Student's T with `freedom` degrees of freedom: the two-sided p-value. */
static inline double statistics_t_p(double t, double freedom) {
    return statistics_beta(freedom / 2, 0.5, freedom / (freedom + t * t));
}

/* The t with P(T <= t) = p, 0 < p < 1. */
static inline double statistics_t_quantile(double p, double freedom) {
    double tail = p < 0.5 ? 2 * p : 2 * (1 - p), low = 0;
    double high = 1;
    int i;
    while (statistics_t_p(high, freedom) > tail && high < 1e150) high *= 2;
    for (i = 0; i < 200; i++) {
        double middle = low + (high - low) / 2;
        if (statistics_t_p(middle, freedom) > tail) low = middle;
        else high = middle;
    }
    return p < 0.5 ? -high : high;
}

/* a and b [n], paired: d_i = a_i - b_i (b NULL: d = a). */
static inline statistics_result statistics_paired(size_t n, const double *a, const double *b) {
    statistics_result r = {0, 0, 0, -HUGE_VAL, HUGE_VAL, 1};
    double squares = 0, half;
    size_t i;
    r.n = n;
    for (i = 0; i < n; i++) r.mean += (a[i] - (b ? b[i] : 0)) / (double)n;
    if (n < 2) return r;
    for (i = 0; i < n; i++) squares += (a[i] - (b ? b[i] : 0) - r.mean) * (a[i] - (b ? b[i] : 0) - r.mean);
    r.error = sqrt(squares / (double)(n - 1) / (double)n);
    half = r.error * statistics_t_quantile(0.975, (double)(n - 1));
    r.low = r.mean - half;
    r.high = r.mean + half;
    if (r.error > 1e-15 * fabs(r.mean)) r.p = statistics_t_p(r.mean / r.error, (double)(n - 1));
    else r.p = fabs(r.mean) > 0 ? 0 : 1;
    return r;
}

/* The p-value against equivalence, by two one-sided tests: below 0.05 exactly when the 95 %
   interval lies within +-margin. (The 90 % interval is usual; this is stricter, and agrees with the
   interval that is shown.) */
static inline double statistics_equivalence(const statistics_result *r, double margin) {
    double room = margin - fabs(r->mean), p;
    if (r->n < 2) return 1;
    if (r->error <= 1e-15 * margin) return room > 0 ? 0 : 1;
    p = statistics_t_p(room / r->error, (double)(r->n - 1));
    return room > 0 ? p : 1;
}

/* adjusted [m] receives Holm's step-down p-values of p [m]: in ascending order the i-th, from 0, is
   multiplied by m - i, none falls below the one before, none exceeds 1 (Holm 1979, A simple
   sequentially rejective multiple test procedure). adjusted must not be p. */
static inline void statistics_holm(size_t m, const double *p, double *adjusted) {
    size_t i, j;
    for (i = 0; i < m; i++) {
        adjusted[i] = 0;
        for (j = 0; j < m; j++) { /* the largest product of i and of those that come before it */
            size_t k, rank = 0;
            double product;
            for (k = 0; k < m; k++) rank += p[k] < p[j] || (!(p[k] > p[j]) && k < j);
            product = p[j] * (double)(m - rank);
            if ((p[j] < p[i] || (!(p[j] > p[i]) && j <= i)) && product > adjusted[i]) adjusted[i] = product;
        }
        if (adjusted[i] > 1) adjusted[i] = 1;
    }
}

#endif /* STATISTICS_H */
