/* What the examples that judge experiments share: means of few runs with t-intervals and tests, tables. A number that is not
   there is NONE. */
#ifndef STUDY_H
#define STUDY_H

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define LEVEL 0.05         /* intervals cover 95 %, verdicts have p below 5 % */
#define NONE ((double)NAN) /* a number that is not there */

enum { COLUMNS = 14, CELL = 160, TABLE_ROWS = 300 };

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
        double m = i, even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
               odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
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
    int n_cells[TABLE_ROWS]; /* of a row; a single one is a heading across the table */
    int n_rows, left;        /* left: so many columns stand at the left */
    int markdown;            /* 1: for a README */
} table;

static inline void table_new(int left) { table.n_rows = 0, table.left = left; }

static inline void table_row(void) { table.n_cells[table.n_rows++] = 0; }

static inline void table_put(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(table.cell[table.n_rows - 1][table.n_cells[table.n_rows - 1]++], CELL, format, arguments);
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

static inline void table_print_row(int row, int columns, const int *width) {
    const char *open = table.markdown ? "| " : "", *next = table.markdown ? " | " : "  ", *close = table.markdown ? " |" : "";
    int heading = table.n_cells[row] == 1;
    for (int c = 0; c < columns; c++) {
        int pad = table.markdown || heading || (c < table.left && c + 1 == columns) ? 0 : width[c];
        if (heading && c > 0 && !table.markdown) break;
        printf("%s%*s", c > 0 ? next : open, c < table.left ? -pad : pad, c < table.n_cells[row] ? table.cell[row][c] : "");
    }
    printf("%s\n", close);
}

/* Columns as wide as they must be, two spaces between them; or a table in Markdown. The first row holds the columns' names. */
static inline void table_print(void) {
    int width[COLUMNS] = {0}, columns = table.n_cells[0];
    for (int i = 0; i < table.n_rows; i++)
        for (int c = 0; c < columns && table.n_cells[i] > 1; c++)
            if ((int)strlen(table.cell[i][c]) > width[c]) width[c] = (int)strlen(table.cell[i][c]);
    for (int i = 0; i < table.n_rows; i++) {
        if (i > 0 && table.n_cells[i] == 1 && !table.markdown) printf("\n");
        table_print_row(i, columns, width);
        for (int c = 0; i == 0 && table.markdown && c < columns; c++)
            printf("|---%s%s", c < table.left ? "" : ":", c + 1 == columns ? "|\n" : "");
    }
    printf("\n");
}

#endif
