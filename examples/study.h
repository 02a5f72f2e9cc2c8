/* Shared by the examples that evaluate experiments: means of a few runs with t-intervals and tests,
   and tables. A missing number is NONE. */
#ifndef STUDY_H
#define STUDY_H

#include "report.h"
#include "statistics.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define LEVEL 0.05         /* intervals cover 95 %, verdicts have p below 5 % */
#define NONE ((double)NAN) /* a missing number */

enum { COLUMNS = 14, CELL = 160, TABLE_ROWS = 300 };

/* ---- statistics ---- */

/* Mean of n numbers, half the width of its interval, and the p-value of the mean being `null`. */
typedef struct estimate {
    int n;
    double mean, half, p;
} estimate;

static inline estimate estimate_of(const double *x, int n, double null) {
    statistics_result r = statistics_paired((size_t)n, x, NULL);
    estimate e = {n, n > 0 ? r.mean : NONE, NONE, NONE};
    if (n < 2) return e;
    e.half = r.high - r.mean;
    e.p = r.error > 0 ? statistics_t_p((r.mean - null) / r.error, n - 1) : fabs(r.mean - null) > 0 ? 0 : 1;
    return e;
}

/* Replaces p-values by Holm's adjusted ones. NONE is kept and not counted. */
static inline void holm(double *p, int n) {
    double there[TABLE_ROWS], adjusted[TABLE_ROWS];
    size_t m = 0;
    for (int i = 0; i < n; i++)
        if (!isnan(p[i])) there[m++] = p[i];
    statistics_holm(m, there, adjusted);
    m = 0;
    for (int i = 0; i < n; i++)
        if (!isnan(p[i])) p[i] = adjusted[m++];
}

/* ---- tables ---- */

static struct {
    char cell[TABLE_ROWS][COLUMNS][CELL];
    int n_cells[TABLE_ROWS]; /* of a row; a single cell is a heading across the table */
    int n_rows, left;        /* left: number of left-aligned columns */
    int markdown;            /* 1: for a README */
} table;

static inline void table_new(int left) {
    table.n_rows = 0;
    table.left = left;
}

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
    const char *open = table.markdown ? "| " : "", *next = table.markdown ? " | " : "  ";
    const char *close = table.markdown ? " |" : "";
    int heading = table.n_cells[row] == 1;
    for (int c = 0; c < columns; c++) {
        int pad = table.markdown || heading || (c < table.left && c + 1 == columns) ? 0 : width[c];
        if (heading && c > 0 && !table.markdown) break;
        printf("%s%*s", c > 0 ? next : open, c < table.left ? -pad : pad,
               c < table.n_cells[row] ? table.cell[row][c] : "");
    }
    printf("%s\n", close);
}

/* Prints the table with minimal column widths, two spaces between columns, or in Markdown. The
   first row holds the column names. */
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

/* Adds the table to the report, if there is one. */
static inline void table_report(const char *title, const char *caption) {
    int columns = table.n_cells[0], rows = table.n_rows - 1;
    moe_figure *f;
    const char **names, **heads, **cells;
    if (report_path == NULL || rows < 1 || columns < 2) return;
    f = report_add(MOE_FIGURE_TABLE, title, (size_t)rows, (size_t)columns - 1);
    names = (const char **)report_grab((size_t)rows, sizeof *names);
    heads = (const char **)report_grab((size_t)columns, sizeof *heads);
    cells = (const char **)report_grab((size_t)(rows * (columns - 1)), sizeof *cells);
    for (int c = 1; c < columns; c++) heads[c - 1] = report_text(table.cell[0][c]);
    for (int r = 0; r < rows; r++) {
        names[r] = report_text(table.cell[r + 1][0]);
        for (int c = 1; c < columns; c++)
            cells[r * (columns - 1) + c - 1] = c < table.n_cells[r + 1] ? report_text(table.cell[r + 1][c]) : "";
    }
    f->caption = caption;
    f->row_names = names;
    f->column_names = heads;
    f->cells = cells;
    f->row_label = report_text(table.cell[0][0]);
}

#endif
