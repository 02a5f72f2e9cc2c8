/* Shared by the examples for --report FILE: a page (.html), a picture (.svg) or text of their
   results. Include it after moe.h. */
#ifndef REPORT_H
#define REPORT_H

#include "extras/moe_report.h"

#include "cli.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

#define REPORT_HELP \
    "  --report FILE   figures and tables of the results: a page (FILE.html), the first figure (FILE.svg) or text " \
    "(FILE.txt, FILE.md); -: on the screen\n"

static const char *report_path; /* of --report; NULL: none */
static const char *const report_kinds = "a report is a page (.html), a picture (.svg) or text (.txt, .md)";

/* NULL if the report can be written, else the reason. Called before long computations. */
static inline const char *report_refused(void) {
    static const char *const known[] = {".html", ".htm", ".svg", ".txt", ".text", ".md", ".log"};
    const char *path = report_path, *base = path == NULL ? NULL : strrchr(path, '/');
    const char *ending = path == NULL ? NULL : strrchr(base != NULL ? base : path, '.');
    size_t i;
    if (path == NULL || strcmp(path, "-") == 0) return NULL;
    for (i = 0; ending != NULL && i < sizeof known / sizeof *known && strcmp(ending, known[i]) != 0; i++) continue;
    if (i == sizeof known / sizeof *known) return report_kinds;
    return not_writable(path);
}

/* 0 if the report can be written, else the exit status after an error message. */
static inline int report_checked(const char *program) {
    const char *why = report_refused();
    if (why == NULL) return 0;
    fprintf(stderr, "%s: %s: %s\n", program, report_path, why);
    return why == report_kinds ? EXIT_USAGE : 1;
}

static inline moe_status report_to_screen(void *ctx, const void *from, size_t size) {
    return fwrite(from, 1, size, (FILE *)ctx) == size ? MOE_OK : MOE_ERR_IO;
}

/* ---- figures that a program collects while it runs; their arrays and texts are kept until the
   report is written ---- */

enum { REPORT_MOST = 256 };
static moe_figure report_figures[REPORT_MOST + 1];
static size_t report_n, report_lost; /* report_lost: figures for which there was no room */
static void *report_blocks; /* a linked list */

/* Zeroed memory. */
static inline void *report_grab(size_t count, size_t size) {
    void **block = (void **)(count < SIZE_MAX / 2 / size ? calloc(1, 2 * sizeof(double) + count * size) : NULL);
    if (block == NULL) exit(fputs("the report: out of memory\n", stderr) < 0 ? 2 : 1);
    *block = report_blocks;
    report_blocks = block;
    return (char *)block + 2 * sizeof(double);
}

static inline const char *report_text(const char *text) {
    return (const char *)memcpy(report_grab(strlen(text) + 1, 1), text, strlen(text) + 1);
}

/* Adds a figure with these fields, others zero; beyond REPORT_MOST it returns a spare one, which is
   not written. */
static inline moe_figure *report_add(int kind, const char *title, size_t rows, size_t columns) {
    moe_figure *f = &report_figures[report_n < REPORT_MOST ? report_n : REPORT_MOST];
    report_lost += report_n == REPORT_MOST;
    report_n += report_n < REPORT_MOST;
    memset(f, 0, sizeof *f);
    f->kind = kind;
    f->title = report_text(title);
    f->rows = rows;
    f->columns = columns;
    return f;
}

/* Adds an existing figure; its title is copied. */
static inline moe_figure *report_take(moe_figure made, const char *title) {
    moe_figure *f = report_add(made.kind, title, 0, 0);
    made.title = f->title;
    *f = made;
    return f;
}

/* A copy of numbers. */
static inline const double *report_numbers(const double *x, size_t n) {
    return (const double *)memcpy(report_grab(n + 1, sizeof *x), x, n * sizeof *x);
}

static inline void report_free(void) {
    for (void **block; (block = (void **)report_blocks) != NULL; free(block)) report_blocks = *block;
    report_n = report_lost = 0;
}

/* ---- writing ---- */

/* Writes the figures to path, "-" for standard output, with colors if it is a terminal; returns 1
   after an error message. Does nothing without a path. */
static inline int report_write(const char *program, const char *title, const moe_figure *figures, size_t n) {
    const char *path = report_path;
    moe_stream screen = {stdout, NULL, report_to_screen, NULL};
    moe_error error = {MOE_OK, ""};
    moe_status status = MOE_OK;
    size_t i;
    if (path == NULL) return 0;
    if (strcmp(path, "-") != 0) status = moe_report_save(path, title, figures, n, &error);
    for (i = 0; strcmp(path, "-") == 0 && i < n && status == MOE_OK; i++) {
        printf("\n");
        status = moe_report_text(&figures[i], 0, isatty(1) && getenv("NO_COLOR") == NULL, &screen, &error);
    }
    if (status != MOE_OK) {
        fprintf(stderr, "%s: the report: %s\n", program, error.message);
        return 1;
    }
    if (strcmp(path, "-") != 0) printf("report written to %s\n", path);
    return 0;
}

/* The same with the figures that were added. */
static inline int report_write_added(const char *program, const char *title) {
    int failed = report_write(program, title, report_figures, report_n);
    if (report_path != NULL && report_lost > 0)
        fprintf(stderr, "%s: the report has the first %d figures, %d are left out\n", program, REPORT_MOST,
                (int)report_lost);
    report_free();
    return failed;
}

#endif
