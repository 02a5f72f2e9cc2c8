/* What the examples share for --report FILE: a page (.html), a picture (.svg) or text of what they found. It is included after moe.h. */
#ifndef REPORT_H
#define REPORT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

#define REPORT_HELP "  --report FILE   pictures and tables of what was found: FILE.html is a page, FILE.svg the first picture, else it is text; -: on the screen\n"

/* Whether a report can be written to path: asked before the long work, for nothing is more annoying behind it. */
static inline int report_possible(const char *path) {
    FILE *f;
    int there;
    if (path == NULL || strcmp(path, "-") == 0) return 1;
    f = fopen(path, "rb"), there = f != NULL;
    if (f != NULL) fclose(f);
    if ((f = fopen(path, "ab")) == NULL) return 0;
    return fclose(f) == 0 && (there || remove(path) == 0);
}

static inline moe_status report_to_screen(void *ctx, const void *from, size_t size) {
    return fwrite(from, 1, size, (FILE *)ctx) == size ? MOE_OK : MOE_ERR_IO;
}

/* Writes the figures to path, "-" to standard output, with colours if it is a terminal; 1 after saying what failed. Without a path it does nothing. */
static inline int report_write(const char *program, const char *path, const char *title, const moe_figure *figures, size_t n) {
    moe_stream screen = {stdout, NULL, report_to_screen};
    moe_error error = {MOE_OK, ""};
    moe_status status = MOE_OK;
    size_t i;
    if (path == NULL) return 0;
    if (strcmp(path, "-") != 0) status = moe_report_save(path, title, figures, n, &error);
    for (i = 0; strcmp(path, "-") == 0 && i < n && status == MOE_OK; i++) {
        printf("\n");
        status = moe_report_text(&figures[i], 0, isatty(1) && getenv("NO_COLOR") == NULL, &screen, &error);
    }
    if (status != MOE_OK) return fprintf(stderr, "%s: the report: %s\n", program, error.message), 1;
    if (strcmp(path, "-") != 0) printf("report written to %s\n", path);
    return 0;
}

#endif
