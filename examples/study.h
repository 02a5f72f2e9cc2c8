/* What the examples that judge experiments share: t-intervals and tests for means of few runs, tables. Include it behind language.h, or the standard headers
   that it names. A number that is not there is NONE. */
#ifndef STUDY_H
#define STUDY_H

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define LEVEL 0.05         /* intervals cover 95 %, verdicts have p below 5 % */
#define NONE ((double)NAN) /* a number that is not there */

enum { COLUMNS = 14, CELL = 48, TABLE_ROWS = 300 };

/* ---- statistics ---------------------------------------------------------------------------------------------------------------------- */

/* The regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz's method). */
static inline double incomplete_beta(double a, double b, double x) {
    const double tiny = 1e-300;
    double front, c = 1, d, f, step;
    if (x <= 0 || x >= 1) return x <= 0 ? 0 : 1;
    if (x > (a + 1) / (a + b + 2)) return 1 - incomplete_beta(b, a, 1 - x);
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a;
    d = 1 - (a + b) * x / (a + 1);
    d = 1 / (fabs(d) < tiny ? tiny : d), f = d;
    for (int i = 1; i < 500; i++) {
        double m = i, even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)), odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
        d = 1 + even * d, c = 1 + even / c;
        d = 1 / (fabs(d) < tiny ? tiny : d), c = fabs(c) < tiny ? tiny : c, f *= d * c;
        d = 1 + odd * d, c = 1 + odd / c;
        d = 1 / (fabs(d) < tiny ? tiny : d), c = fabs(c) < tiny ? tiny : c, f *= step = d * c;
        if (fabs(step - 1) < 1e-15) break;
    }
    return front * f;
}

/* Probability that |T| > |t| for Student's T with so many degrees of freedom. */
static inline double student_p(double t, double freedom) { return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)); }

/* t with student_p(t) = p. */
static inline double student_t(double p, double freedom) {
    double low = 0, high = 1;
    while (student_p(high, freedom) > p && high < 1e12) high *= 2;
    for (int i = 0; i < 200; i++) {
        double middle = (low + high) / 2;
        if (student_p(middle, freedom) > p) low = middle;
        else high = middle;
    }
    return (low + high) / 2;
}

/* Mean of n numbers, half the width of its interval, and p of the mean being `null`. */
typedef struct estimate {
    int n;
    double mean, half, p;
} estimate;

static inline estimate estimate_of(const double *x, int n, double null) {
    estimate e = {n, NONE, NONE, NONE};
    double sum = 0, squares = 0, error;
    for (int i = 0; i < n; i++) sum += x[i];
    if (n > 0) e.mean = sum / n;
    if (n < 2) return e;
    for (int i = 0; i < n; i++) squares += (x[i] - e.mean) * (x[i] - e.mean);
    error = sqrt(squares / (n - 1) / n);
    e.half = student_t(LEVEL, n - 1) * error;
    e.p = error > 0 ? student_p((e.mean - null) / error, n - 1) : e.mean - null < 0 || e.mean - null > 0 ? 0 : 1;
    return e;
}

/* Replaces p values by those that hold for all of them together (Holm 1979). NONE stays and is not counted. */
static inline void holm(double *p, int n) {
    int left = 0, done[TABLE_ROWS] = {0};
    double least = 0;
    for (int i = 0; i < n; i++) left += !isnan(p[i]);
    for (; left > 0; left--) {
        int best = -1;
        for (int i = 0; i < n; i++)
            if (!done[i] && !isnan(p[i]) && (best < 0 || p[i] < p[best])) best = i;
        least = fmax(least, fmin(1, left * p[best]));
        p[best] = least, done[best] = 1;
    }
}

/* ---- tables -------------------------------------------------------------------------------------------------------------------------- */

static struct {
    char cell[TABLE_ROWS][COLUMNS][CELL];
    int n_rows, n_columns, left; /* left: so many columns stand at the left */
    int markdown;                /* 1: for a README */
} table;

static inline void table_new(int left) { table.n_rows = table.n_columns = 0, table.left = left; }

static inline void table_row(void) { table.n_columns = 0, table.n_rows++; }

static inline void table_put(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(table.cell[table.n_rows - 1][table.n_columns++], CELL, format, arguments);
    va_end(arguments);
}

static inline void table_number(double value, int decimals) {
    if (isnan(value)) table_put("-");
    else table_put("%.*f", decimals, value);
}

static inline void table_signed(double value, int decimals) {
    if (isnan(value)) table_put("-");
    else table_put("%+.*f", decimals, value);
}

static inline void table_heads(const char *names) {
    table_row();
    while (*names != '\0') {
        int length = (int)strcspn(names, "|");
        table_put("%.*s", length, names);
        names += length + (names[length] == '|');
    }
}

/* Columns as wide as they must be, two spaces between them; or a table in Markdown. */
static inline void table_print(void) {
    int width[COLUMNS] = {0};
    for (int i = 0; i < table.n_rows; i++)
        for (int c = 0; c < table.n_columns; c++) width[c] = (int)fmax(width[c], (double)strlen(table.cell[i][c]));
    for (int i = 0; i < table.n_rows; i++) {
        for (int c = 0; c < table.n_columns; c++) {
            int pad = table.markdown || (c < table.left && c + 1 == table.n_columns) ? 0 : width[c];
            printf("%s%*s", table.markdown ? c > 0 ? " | " : "| " : c > 0 ? "  " : "", c < table.left ? -pad : pad, table.cell[i][c]);
        }
        printf(table.markdown ? " |\n" : "\n");
        for (int c = 0; i == 0 && table.markdown && c < table.n_columns; c++) printf("|---%s%s", c < table.left ? "" : ":", c + 1 == table.n_columns ? "|\n" : "");
    }
    printf("\n");
}

#endif
