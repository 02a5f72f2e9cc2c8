/* moe_report.h - figures for moe.h: tables, bars, curves and maps as SVG, HTML or text

   An extra of moe.h. It draws what a mixture of experts did: which expert took which class, how the
   load was shared, how training went, which expert read which word. The output is one file without
   scripts, fonts or links, for browsers and terminals. MIT or public domain, as moe.h.

   Contents (search for the tag)
     >>figures     moe_figure: what one figure shows
     >>write       SVG, HTML, text, files
     >>ready       figures of moe_metrics_report, and curves over training
     >>private     the implementation

   Recipe
     1. Copy moe_report.h into your project, beside moe.h.
     2. Include it after moe.h. Where MOE_IMPLEMENTATION is defined, it brings its implementation.
     It needs no option and no other extra.

   First program: a table of two experts and three classes on the terminal.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "moe_report.h"
 * #include <stdio.h>
 *
 * int main(void) {
 *     static const double tokens[2 * 3] = {40, 3, 11, 2, 45, 19};
 *     static const char *const classes[3] = {"cat", "dog", "bird"};
 *     static moe_figure figure; // zeros: a table of colors; every field has a default
 *     static moe_buffer text;
 *     moe_stream stream = moe_buffer_stream(&text);
 *     moe_error error;
 *     figure.title = "Tokens by expert and class";
 *     figure.rows = 2;
 *     figure.columns = 3;
 *     figure.values = tokens;
 *     figure.column_names = classes;
 *     if (moe_report_text(&figure, 0, 0, &stream, &error)) return printf("%s\n", error.message);
 *     fwrite(text.data, 1, text.size, stdout);
 *     moe_buffer_free(&text);
 *     return 0;
 * }
 * --- end ---

   Options: those of moe.h. MOE_NO_STDIO leaves out moe_report_save. MOE_NO_TRAIN and MOE_NO_FLOAT
   leave out everything.

   Manual
     A figure is plain data: fill in a moe_figure, or get one from a function of >>ready.
       moe_figure figures[2];
       figures[0] = moe_figure_classes(&report);                   report: of moe_metrics_report
       figures[1] = moe_figure_history(&history, 0, 2, names);     history: of moe_history_add
       moe_report_save("report.html", "My experts", figures, 2, &error);
     The ending of the file name selects the format: HTML page (.html), picture (.svg), else text.

     Errors, NULL and _f64 (in the double build every function has that suffix) are as in moe.h.
     Threads. There are no globals: calls on different streams may run at the same time.
*/
#ifndef MOE_H
#error "moe_report.h: include moe.h before it"
#endif

#ifndef MOE_REPORT_H
#define MOE_REPORT_H

#ifndef MOE_NO_TRAIN
#if MOE_REAL_IS_DOUBLE
#define moe_figure_classes moe_figure_classes_f64
#define moe_figure_history moe_figure_history_f64
#define moe_figure_load moe_figure_load_f64
#define moe_history_add moe_history_add_f64
#define moe_report_html moe_report_html_f64
#define moe_report_save moe_report_save_f64
#define moe_report_svg moe_report_svg_f64
#define moe_report_text moe_report_text_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>figures: what a figure shows ========================================================== */

/* The kinds of figures: constant, private name, default title, default labels of rows and columns,
   whether its table of numbers is transposed, private name of its description. */
#define MOEI_FIGURES(X) \
    X(HEAT, heat, "Values", "expert", "column", 0, cells) \
    X(BARS, bars, "Bars", "expert", NULL, 0, cells) \
    X(LINES, lines, "Curves", "series", "step", 1, lines) \
    X(TOKENS, tokens, "Tokens by expert", "layer", "token", 1, experts) \
    X(TABLE, table, "Table", NULL, NULL, 0, table) \
    X(MAP, map, "Regions by expert", NULL, NULL, 0, experts)
#define MOEI_FIGURE_CONSTANT(constant, name, title, row, column, transposed, description) MOE_FIGURE_##constant,

/* MOE_FIGURE_HEAT (0, the default), MOE_FIGURE_BARS, MOE_FIGURE_LINES, MOE_FIGURE_TOKENS,
   MOE_FIGURE_TABLE, MOE_FIGURE_MAP; MOE_FIGURE_COUNT is their number.
     HEAT    a table colored by value: expert x class, layer x expert
     BARS    a bar per row, for up to 4 columns side by side; half_widths are whiskers
     LINES   a curve per row through the columns that have a value: losses over steps. The first 32
             rows have different styles and a name in the legend
     TOKENS  a text, one column per token, with the expert that each row (a layer) chose for it;
             values are the weights of the choices, 0 to 1
     TABLE   numbers, or texts if cells is set; half_widths print as "0.52 +- 0.03"
     MAP     the expert at each point of a grid, row 0 at the top */
enum { MOEI_FIGURES(MOEI_FIGURE_CONSTANT) MOE_FIGURE_COUNT };

/* One figure. All of it belongs to the caller and is read during the call only. A zeroed figure is
   empty; its picture says so. In the comments [x] is the default that 0 or NULL selects. Texts are
   UTF-8, zero-terminated, with any content: HTML is escaped; invalid UTF-8, control characters and
   characters that change the writing direction show as U+FFFD (TOKENS marks line breaks, tabs and
   spaces with symbols). A value that is NaN or infinite is missing: it is omitted or shown as a
   dash. Data too large for a picture is thinned, and the picture says how. */
typedef struct moe_figure {
    int kind;                     /* MOE_FIGURE_ */
    const char *title;            /* one line [the name of the kind] */
    const char *caption;          /* a paragraph [none] */
    size_t rows, columns;
    size_t stride;                /* from one row to the next of all arrays [rows,columns] [columns] */
    const double *values;         /* [rows,columns]. Optional for TOKENS and MAP, and for TABLE with cells */
    const double *half_widths;    /* [rows,columns] of the intervals of BARS and TABLE; negative or NaN: none [none] */
    const int32_t *experts;       /* [rows,columns] of TOKENS and MAP; negative: none */
    const char *const *cells;     /* [rows,columns] texts of TABLE; for a NULL text the value is shown [none] */
    const char *const *row_names; /* [rows] [row_label and 0, 1, ...] */
    const char *const *column_names; /* [columns], the tokens' texts of TOKENS [column_label and 0, 1, ...] */
    const char *row_label;        /* what a row is [TOKENS "layer", LINES "series", HEAT and BARS "expert"] */
    const char *column_label;     /* what a column is [LINES "step", TOKENS "token", HEAT "column"] */
    const char *value_label;      /* what a number is, with its unit: "tokens", "loss (nats)" [none] */
    const double *x;              /* [columns] positions of the columns of LINES [1, 2, ...] and MAP [no axis] */
    const double *y;              /* [rows] positions of the rows of MAP [no axis] */
    int n_experts;                /* of TOKENS and MAP: the legend has experts 0 to n_experts - 1, and all that occur */
    int decimals;                 /* digits after the point, up to 9; -1: none [0: as many as the numbers need] */
    double reference;             /* BARS, LINES: a line at this value, such as an even load or chance [0: none] */
    const char *reference_name;   /* ["reference"] */
} moe_figure;

/* ==== >>write: SVG, HTML, text, files ========================================================= */

/* Writes figure as one SVG file. It has no scripts and loads nothing; the same figure gives the
   same bytes. Colors follow the reader's light or dark scheme, text has a contrast of at least 4.5,
   and experts and series differ by number, name or pattern as well as by color. Title and
   description say in words what the picture shows. Lengths are in pixels; text is at least 12 high.
   The picture is as wide as a phone screen if the figure allows, and scales to at most 1.5 times.
   MOE_ERR_ARGUMENT: NULL, an unknown kind, columns > stride, or an array is missing (error names
   figure and field); MOE_ERR_OVERFLOW: rows times stride; else what the stream returned. Allocates
   nothing. Thread-safe. */
MOE_API moe_status moe_report_svg(const moe_figure *figure, moe_stream *stream, moe_error *error);

/* Writes n figures, 0 or more, as one HTML page with the properties of moe_report_svg. The page has
   as many columns of figures as fit the screen; a wide figure scrolls in its own frame. Each has
   its numbers in a table of at most 1000 rows. title NULL: "Report". Errors as moe_report_svg. */
MOE_API moe_status moe_report_html(const char *title, const moe_figure *figures, size_t n, moe_stream *stream,
                                   moe_error *error);

/* Writes figure as text in lines of at most `columns` characters, 40 to 400 (0: 80). Frames and
   bars are ASCII. color 1 adds ANSI color codes (ESC [ 48;5;n m); only the caller knows whether the
   stream is a terminal. Errors as moe_report_svg, and MOE_ERR_ARGUMENT for columns. */
MOE_API moe_status moe_report_text(const moe_figure *figure, int columns, int color, moe_stream *stream,
                                   moe_error *error);

#ifndef MOE_NO_STDIO
/* Replaces the file at path by moe_file_replace: a page if the name ends in .html or .htm, the
   first figure as a picture if it ends in .svg, else all figures as text in 80 columns.
   MOE_ERR_ARGUMENT: path NULL, or .svg and n = 0; else the errors of moe_report_svg and
   moe_file_replace. */
MOE_API moe_status moe_report_save(const char *path, const char *title, const moe_figure *figures, size_t n,
                                   moe_error *error);
#endif

/* ==== >>ready: figures of what the library measures =========================================== */

/* Figures of a report of moe_metrics_report. They point into the memory of the metrics; any field
   may be changed afterwards. classes: HEAT of the token-expert assignments, expert x class. load:
   BARS of the assignments of each expert, with a line at their mean. The figure is zeroed for NULL
   and for a report without these numbers. */
MOE_API moe_figure moe_figure_classes(const moe_report *report);
MOE_API moe_figure moe_figure_load(const moe_report *report);

/* Numbers recorded during training, in a struct of fixed size. Each time it is full, every second
   point is dropped and the recording interval doubles; the first and the newest point are always
   kept. A zeroed history is empty. Every field may be read; only moe_history_add may change it. */
enum { MOE_HISTORY_POINTS = 512, MOE_HISTORY_SERIES = 8 };
typedef struct moe_history {
    size_t n;                    /* points */
    double at[MOE_HISTORY_POINTS];
    double values[MOE_HISTORY_SERIES][MOE_HISTORY_POINTS];
    size_t seen, every;          /* private: points added; one in `every` is kept */
} moe_history;

/* Adds a point at `at` (a step, an epoch) to the first `count` series; the other series, and those
   whose value is NaN, get none. Call it from the progress callback of moe_fit, for example with
   loss, router_loss and test.loss. MOE_ERR_ARGUMENT: NULL (values may be NULL for count = 0), or
   count > MOE_HISTORY_SERIES. */
MOE_API moe_status moe_history_add(moe_history *history, double at, const double *values, size_t count);

/* LINES of `count` series from `first` on. names [count] belong to the caller; NULL: numbers. The
   figure points into history, which must outlive it. It is zeroed for history NULL and for series
   that do not exist. */
MOE_API moe_figure moe_figure_history(const moe_history *history, size_t first, size_t count, const char *const *names);

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_TRAIN */
#endif /* MOE_REPORT_H */

/* ==== >>private: the implementation =========================================================== */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_REPORT_IMPLEMENTED)
#define MOEI_REPORT_IMPLEMENTED
#ifndef MOE_NO_TRAIN

#include <float.h>
#include <stdarg.h>
#include <string.h>

/* ---- characters and numbers ---- */

/* Buffered output; after the stream has failed, the rest is dropped. */
typedef struct moei_pen {
    moe_stream *stream;
    moe_status status;
    int xml, color; /* xml: escape texts; color: emit terminal colors */
    size_t used;
    size_t blanks;  /* text: pending spaces, written when something follows them on the line */
    size_t columns, column; /* text: the longest line, and the length of this one */
    int escape;     /* text: 1 within a color code, which has no width */
    char buffer[512];
} moei_pen;

static void moei_pen_flush(moei_pen *p) {
    if (p->status == MOE_OK && p->used > 0) p->status = p->stream->write(p->stream->ctx, p->buffer, p->used);
    p->used = 0;
}

static void moei_pen_byte(moei_pen *p, char c) {
    if (p->used == sizeof p->buffer) moei_pen_flush(p);
    p->buffer[p->used++] = c;
}

/* Text: writes the pending spaces, or a line break if `width` more columns do not fit behind
   them. */
static void moei_pen_advance(moei_pen *p, size_t width) {
    if (p->column + p->blanks + width > p->columns) {
        moei_pen_byte(p, '\n');
        p->column = p->blanks = 0;
    }
    p->column += p->blanks + width;
    for (; p->blanks > 0; p->blanks--) moei_pen_byte(p, ' ');
}

/* In a text, moei_pen_char has advanced for bytes beyond ASCII. */
static void moei_pen_put(moei_pen *p, const char *s, size_t n) {
    for (; n > 0; s++, n--) {
        if (!p->xml && *s == ' ') {
            p->blanks++;
            continue;
        }
        if (*s == '\x1b') p->escape = 1;
        if (*s == '\n') p->column = p->blanks = 0;
        else if (!p->xml && ((unsigned char)*s & 0x80) == 0) moei_pen_advance(p, p->escape ? 0 : 1);
        if (*s == 'm') p->escape = 0;
        moei_pen_byte(p, *s);
    }
}

static void moei_pen_repeat(moei_pen *p, const char *s, size_t times) {
    for (; times > 0; times--) moei_pen_put(p, s, moei_strlen(s));
}

/* Whether a character changes the writing direction. */
static int moei_is_bidi(uint32_t c) {
    return c == 0x61Cu || c == 0x200Eu || c == 0x200Fu || (c >= 0x202Au && c <= 0x202Eu) ||
           (c >= 0x2066u && c <= 0x2069u);
}

/* The next character of a text, as it is shown: a space for white space; U+FFFD for invalid UTF-8,
   control characters and characters that change the writing direction. */
static uint32_t moei_next_shown(const char **text) {
    uint32_t code;
    if (!moei_next_utf8(text, NULL, &code)) return 0xFFFDu;
    if (code == '\t' || code == '\n' || code == '\r' || code == 0x2028u || code == 0x2029u) return ' ';
    if (code < 0x20u || (code >= 0x7Fu && code < 0xA0u) || code == 0xFFFEu || code == 0xFFFFu) return 0xFFFDu;
    return moei_is_bidi(code) ? 0xFFFDu : code;
}

/* The width of a character in columns: 0 for combining characters and joiners, 2 for East Asian
   scripts and emoji. */
static size_t moei_char_width(uint32_t c) {
    static const struct {
        uint32_t first, last;
    } wide[] = {{0x1100u, 0x115Fu}, {0x2E80u, 0xA4CFu}, {0xAC00u, 0xD7A3u}, {0xF900u, 0xFAFFu},
                {0xFE30u, 0xFE6Fu}, {0xFF00u, 0xFF60u}, {0x1F300u, 0x1FAFFu}, {0x20000u, 0x3FFFFu}};
    size_t i;
    if ((c >= 0x300u && c < 0x370u) || (c >= 0x200Bu && c <= 0x200Du) || (c >= 0xFE00u && c <= 0xFE0Fu)) return 0;
    for (i = 0; i < sizeof wide / sizeof *wide; i++)
        if (c >= wide[i].first && c <= wide[i].last) return 2;
    return 1;
}

static size_t moei_text_width(const char *s) {
    size_t width = 0;
    while (*s != '\0') width += moei_char_width(moei_next_shown(&s));
    return width;
}

static const char *moei_xml_escape(uint32_t c) {
    switch (c) {
    case '&': return "&amp;";
    case '<': return "&lt;";
    case '>': return "&gt;";
    case '"': return "&quot;";
    case '\'': return "&#39;";
    default: return NULL;
    }
}

static void moei_pen_char(moei_pen *p, uint32_t c) {
    char bytes[4];
    size_t n = c < 0x80u ? 1 : c < 0x800u ? 2 : c < 0x10000u ? 3 : 4, width = moei_char_width(c), i;
    const char *escape = p->xml ? moei_xml_escape(c) : NULL;
    for (i = n - 1; i > 0; i--, c >>= 6) bytes[i] = (char)(unsigned char)(0x80u | (c & 63u));
    bytes[0] = (char)(unsigned char)(n == 1 ? c : (0xF00u >> n & 0xF0u) | c);
    if (n > 1 && !p->xml) moei_pen_advance(p, width);
    if (escape != NULL) moei_pen_put(p, escape, moei_strlen(escape));
    else moei_pen_put(p, bytes, n);
}

/* Writes a text, cut to `most` columns with an ellipsis; returns its width. */
static size_t moei_pen_clip(moei_pen *p, const char *s, size_t most) {
    size_t width = 0, whole = moei_text_width(s);
    while (*s != '\0') {
        uint32_t c = moei_next_shown(&s);
        if (whole > most && width + moei_char_width(c) >= most) {
            moei_pen_char(p, p->xml ? 0x2026u : '~');
            return width + 1;
        }
        width += moei_char_width(c);
        moei_pen_char(p, c);
    }
    return width;
}

/* An empty text whose buffer is `out`. */
static moei_text moei_text_in(char *out, size_t room) {
    moei_text t;
    t.out = out;
    t.room = room;
    t.length = 0;
    return t;
}

/* A coordinate, rounded to tenths. */
static void moei_put_tenths(moei_text *t, double x) {
    double tenths = x * 10.0, rounded = tenths < 0.0 ? tenths - 0.5 : tenths + 0.5;
    int64_t whole = tenths > -1e9 && tenths < 1e9 ? (int64_t)rounded : 0;
    int64_t magnitude = whole < 0 ? -whole : whole;
    if (whole < 0) moei_put(t, "-", 1);
    moei_put_integer(t, magnitude / 10);
    if (magnitude % 10 == 0) return;
    moei_put(t, ".", 1);
    moei_put_integer(t, magnitude % 10);
}

/* %s is trusted text, %t the caller's text, %d an int, %z a size_t, %c a coordinate. */
static void moei_pen_print(moei_pen *p, const char *format, ...) {
    char digits[32];
    va_list arguments;
    va_start(arguments, format);
    for (; *format != '\0'; format++) {
        moei_text t = moei_text_in(digits, sizeof digits);
        if (*format != '%') {
            moei_pen_put(p, format, 1);
            continue;
        }
        format++;
        if (*format == 's') moei_pen_repeat(p, va_arg(arguments, const char *), 1);
        else if (*format == 't') (void)moei_pen_clip(p, va_arg(arguments, const char *), SIZE_MAX);
        else if (*format == 'd') moei_put_integer(&t, va_arg(arguments, int));
        else if (*format == 'z') moei_put_unsigned(&t, va_arg(arguments, size_t));
        else if (*format == 'c') moei_put_tenths(&t, va_arg(arguments, double));
        else moei_pen_put(p, "%", 1);
        moei_pen_put(p, digits, t.length);
    }
    va_end(arguments);
}

static int moei_is_number(double x) { return x >= -DBL_MAX && x <= DBL_MAX; }

/* The largest power of ten not above x, for 1e-300 < x. */
static double moei_power_below(double x) {
    double power = 1.0;
    while (power > x) power /= 10.0;
    while (x / power >= 10.0) power *= 10.0;
    return power;
}

/* Digits after the point for numbers up to `most` in magnitude; integers: all of them are integers.
   A result -n below -1 means n significant digits, with an exponent. */
static int moei_decimals_for(double most, int integers) {
    if (integers) return 0;
    if (most >= 1e6 || (most > 0.0 && most < 1e-3)) return -4;
    return most >= 100.0 ? 1 : most >= 10.0 ? 2 : most >= 0.1 ? 3 : most >= 0.01 ? 4 : 5;
}

enum { MOEI_LABEL_SIZE = 48 };

/* value as text, "-" when it is missing; returns buffer. */
static const char *moei_number(char buffer[MOEI_LABEL_SIZE], double value, int decimals) {
    moei_text t = moei_text_in(buffer, MOEI_LABEL_SIZE);
    double magnitude = value < 0.0 ? -value : value, power = 1.0, scaled;
    uint64_t whole, unit;
    int i;
    if (!moei_is_number(value)) {
        moei_put(&t, "-", 1);
        return buffer;
    }
    for (i = 0; i < decimals; i++) power *= 10.0;
    if (!(magnitude > 0.0)) decimals = decimals < 0 ? 0 : decimals;
    if (decimals < 0 || magnitude >= 1e17 / power) {
        moei_put_digits(&t, value, decimals < -1 ? -decimals : 4);
        return buffer;
    }
    scaled = magnitude * power;
    whole = (uint64_t)scaled;
    unit = (uint64_t)power;
    if (scaled - (double)whole >= 0.5) whole++;
    if (value < 0.0 && whole > 0) moei_put(&t, "-", 1);
    moei_put_unsigned(&t, whole / unit);
    if (decimals > 0) moei_put(&t, ".", 1);
    for (i = 0; i < decimals; i++) {
        unit /= 10;
        moei_put_unsigned(&t, whole / unit % 10);
    }
    return buffer;
}

/* ---- what a figure holds ---- */

typedef struct moei_plot moei_plot;

/* A kind of figure. */
typedef struct moei_figure_kind {
    const char *name, *row_label, *column_label;
    int transposed;                /* its table of numbers has one row */
    void (*plan)(moei_plot *);     /* computes width, height and the input of draw */
    void (*draw)(moei_plot *);
    void (*describe)(moei_plot *); /* a description in words */
    void (*text)(moei_plot *, size_t columns);
} moei_figure_kind;

/* A figure that is being written. */
struct moei_plot {
    const moe_figure *f;
    const moei_figure_kind *kind;
    moei_pen *p;
    size_t rows, columns;                         /* the rows and columns that are shown */
    size_t row_step, column_step;                 /* rows, columns per shown one: their mean, in MAP the first */
    size_t n_experts, number;                     /* number: of the figure in its page */
    double low, high;                             /* of the values */
    int has_value, decimals, show_numbers;        /* show_numbers: in the cells */
    int heads_rotated;                            /* names of columns are rotated */
    double left, top, width, height, cell_w, cell_h;
    size_t number_width, name_width, head_width;  /* of the widest number, name of a row and of a column */
};

/* In place of the number of an expert: all others, from MOEI_LEGEND_MOST on. */
#define MOEI_OTHERS "64+"
enum { MOEI_LEGEND_MOST = 64, MOEI_TINTS = 16, MOEI_LEVELS = 10, MOEI_STROKES = 8, MOEI_TOKENS_MOST = 3000 };

/* In pixels; most figures are as wide as a phone. */
static const double moei_char_pixels = 7.4, moei_line_height = 18.0;
static const double moei_phone_width = 340.0, moei_plot_height = 190.0;

static size_t moei_min_size(size_t a, size_t b) { return a < b ? a : b; }
static size_t moei_max_size(size_t a, size_t b) { return a > b ? a : b; }
static double moei_max_double(double a, double b) { return a > b ? a : b; }
static double moei_min_double(double a, double b) { return a < b ? a : b; }

static size_t moei_at(const moe_figure *f, size_t row, size_t column) {
    return row * (f->stride > 0 ? f->stride : f->columns) + column;
}

static int moei_value(const moe_figure *f, size_t row, size_t column, double *value) {
    *value = f->values != NULL ? f->values[moei_at(f, row, column)] : (double)MOEI_INFINITY;
    return moei_is_number(*value);
}

static double moei_half_width(const moe_figure *f, size_t row, size_t column) {
    double s = f->half_widths != NULL ? f->half_widths[moei_at(f, row, column)] : -1.0;
    return moei_is_number(s) && s >= 0.0 ? s : -1.0;
}

/* The mean of the values in a block of cells; 0 when there are none. */
static int moei_mean(const moei_plot *q, size_t row, size_t column, double *mean) {
    const moe_figure *f = q->f;
    size_t r, c, n = 0;
    double value;
    *mean = 0.0;
    for (r = row * q->row_step; r < moei_min_size((row + 1) * q->row_step, f->rows); r++)
        for (c = column * q->column_step; c < moei_min_size((column + 1) * q->column_step, f->columns); c++)
            if (moei_value(f, r, c, &value)) {
                n++;
                *mean += value / (double)n - *mean / (double)n;
            }
    return n > 0;
}

static int32_t moei_figure_expert(const moei_plot *q, size_t row, size_t column) {
    int32_t e = q->f->experts[moei_at(q->f, row * q->row_step, column * q->column_step)];
    return e < 0 ? -1 : e;
}

static const char *moei_label(const char *label, const char *instead) { return label != NULL ? label : instead; }

/* names[i], or label and i, or i if there is no label. */
static const char *moei_name(const char *const *names, const char *label, size_t i, char buffer[MOEI_LABEL_SIZE]) {
    moei_text t;
    if (names != NULL && names[i] != NULL) return names[i];
    t = moei_text_in(buffer, MOEI_LABEL_SIZE);
    if (label != NULL && moei_strlen(label) < 24) {
        moei_put(&t, label, moei_strlen(label));
        moei_put(&t, " ", 1);
    }
    moei_put_unsigned(&t, i);
    return buffer;
}

static const char *moei_row_label(const moei_plot *q) { return moei_label(q->f->row_label, q->kind->row_label); }

static const char *moei_column_label(const moei_plot *q) {
    return moei_label(q->f->column_label, q->kind->column_label);
}


static const char *moei_row_name(const moei_plot *q, size_t i, char buffer[MOEI_LABEL_SIZE]) {
    return moei_name(q->f->row_names, moei_row_label(q), i, buffer);
}

static const char *moei_column_name(const moei_plot *q, size_t i, char buffer[MOEI_LABEL_SIZE]) {
    const double *x = q->f->x;
    moei_text t;
    if (q->kind->transposed && q->f->column_names == NULL && x != NULL && moei_is_number(x[i])) { /* such as steps */
        t = moei_text_in(buffer, MOEI_LABEL_SIZE);
        if (x[i] < 0.0 || x[i] > 0.0) moei_put_digits(&t, x[i], 6);
        else moei_put(&t, "0", 1);
        return buffer;
    }
    return moei_name(q->f->column_names, moei_column_label(q), i, buffer);
}

/* Limits a non-empty figure to at most `rows` rows and `columns` columns. */
static void moei_downsample(moei_plot *q, size_t rows, size_t columns) {
    q->row_step = (q->f->rows - 1) / rows + 1;
    q->column_step = (q->f->columns - 1) / columns + 1;
    q->rows = (q->f->rows - 1) / q->row_step + 1;
    q->columns = (q->f->columns - 1) / q->column_step + 1;
}

static void moei_include(moei_plot *q, double value) {
    if (!moei_is_number(value)) return;
    q->low = !q->has_value || value < q->low ? value : q->low;
    q->high = !q->has_value || value > q->high ? value : q->high;
    q->has_value = 1;
}

static int moei_has_reference(const moei_plot *q) {
    return moei_is_number(q->f->reference) && (q->f->reference < 0.0 || q->f->reference > 0.0);
}

static int moei_is_integer(double x) {
    return x > -1e15 && x < 1e15 && !((double)(int64_t)x < x) && !((double)(int64_t)x > x);
}

/* Computes the range of the values and the format of numbers, for column `only`, or for all
   (SIZE_MAX). */
static void moei_measure_values(moei_plot *q, size_t only) {
    const moe_figure *f = q->f;
    size_t r, c, first = only < f->columns ? only : 0, end = only < f->columns ? only + 1 : f->columns;
    double value, most = 0.0;
    int integers = 1;
    q->has_value = 0;
    q->low = q->high = 0.0;
    for (r = 0; r < f->rows; r++)
        for (c = first; c < end; c++) {
            double half_width = moei_half_width(f, r, c);
            if (!moei_value(f, r, c, &value)) continue;
            moei_include(q, value);
            most = moei_max_double(most, moei_max_double(value < 0.0 ? -value : value, half_width));
            integers = integers && half_width < 0.0 && moei_is_integer(value);
        }
    if (f->decimals > 0) q->decimals = f->decimals < 9 ? f->decimals : 9;
    else q->decimals = f->decimals < 0 ? 0 : moei_decimals_for(most, integers);
}

/* Half of high - low; the difference itself could overflow. */
static double moei_half_range(const moei_plot *q) { return q->high * 0.5 - q->low * 0.5; }

/* The position of a value between low and high, 0 to 1. */
static double moei_fraction(const moei_plot *q, double value) {
    double fraction = q->high > q->low ? (value * 0.5 - q->low * 0.5) / moei_half_range(q) : 0.0;
    return !(fraction > 0.0) ? 0.0 : fraction > 1.0 ? 1.0 : fraction; /* denormal numbers give 0 / 0 */
}

/* Computes the widths of names, cut at `most` columns, and of numbers. */
static void moei_measure_names(moei_plot *q, size_t most) {
    const moe_figure *f = q->f;
    char buffer[MOEI_LABEL_SIZE];
    size_t i, r, c;
    double value;
    q->name_width = q->head_width = q->number_width = 0;
    for (i = 0; i < f->rows; i++)
        q->name_width = moei_max_size(q->name_width, moei_text_width(moei_name(f->row_names, NULL, i, buffer)));
    for (i = 0; i < f->columns; i++)
        q->head_width = moei_max_size(q->head_width, moei_text_width(moei_name(f->column_names, NULL, i, buffer)));
    for (r = 0; r < q->rows; r++)
        for (c = 0; c < q->columns; c++) {
            if (!moei_mean(q, r, c, &value)) continue;
            q->number_width = moei_max_size(q->number_width, moei_strlen(moei_number(buffer, value, q->decimals)));
        }
    q->name_width = moei_min_size(q->name_width, most);
    q->head_width = moei_min_size(q->head_width, most);
}

/* ---- colors ---- */

/* Colors are hexadecimal RGB for the light and the dark scheme, then indices of the 256 terminal
   colors. The first eight tints and the strokes are distinguishable with color blindness: hues as
   in Okabe and Ito 2008, Color universal design. Numbers, stripes and dashes distinguish the
   rest. */

/* Background of the numbers of experts. */
static const struct {
    char rgb[2][7];
    unsigned char terminal;
} moei_tints[MOEI_TINTS] = {
    {{"9ecbff", "1f4e86"}, 153}, {{"ffc28a", "8a4b08"}, 216}, {{"98e0b0", "1c6b3f"}, 157}, {{"f7b6d9", "8a2c66"}, 218},
    {{"f6e27a", "6b5c00"}, 228}, {{"d0d0d0", "555b63"}, 252}, {{"9be7ee", "0b6470"}, 159}, {{"cdb8ff", "553f9e"}, 183},
    {{"6fb0f0", "163d6b"}, 75}, {{"e8964a", "6c3a06"}, 173}, {{"55bb82", "145030"}, 78}, {{"de80ba", "701f52"}, 175},
    {{"ccb133", "524600"}, 178}, {{"a3a3a3", "434850"}, 247}, {{"46bcc9", "074c55"}, 80}, {{"a78eea", "432f85"}, 141}};

/* Background of values from low to high, with the color of text on it, and a character for plain
   text. */
static const struct {
    char rgb[2][7], ink[2][4];
    unsigned char terminal, terminal_ink;
    char shade[2];
} moei_levels[MOEI_LEVELS] = {
    {{"f1f6fb", "1d2733"}, {"000", "fff"}, 255, 16, " "},
    {{"deebf7", "20364c"}, {"000", "fff"}, 195, 16, "."},
    {{"c6dbef", "234766"}, {"000", "fff"}, 153, 16, ":"},
    {{"a5cbe6", "275a82"}, {"000", "fff"}, 117, 16, "-"},
    {{"7fb5da", "2f6f9f"}, {"000", "fff"}, 81, 16, "="},
    {{"5a9dcc", "3f87ba"}, {"000", "000"}, 74, 16, "+"},
    {{"3b82bd", "5ba0d0"}, {"000", "000"}, 68, 16, "*"},
    {{"2468a4", "80b9e0"}, {"fff", "000"}, 25, 231, "#"},
    {{"124e87", "abd2ee"}, {"fff", "000"}, 24, 231, "%"},
    {{"08306b", "d8ebf9"}, {"fff", "000"}, 17, 231, "@"}};

/* Curves and bars. */
static const char moei_strokes[MOEI_STROKES][2][7] = {
    {"0b62b8", "6cb2ff"}, {"b8460b", "ff9a5c"}, {"0a7a4b", "5fd39a"}, {"a3327f", "ff8ccf"},
    {"7a6500", "e3cb52"}, {"4d5560", "b9c1cc"}, {"00788a", "58d3e0"}, {"6842c2", "b9a1ff"}};

static void moei_write_colors(moei_pen *p, int dark) {
    static const struct {
        const char *ground, *ink, *muted, *grid, *on_tint;
    } schemes[2] = {{"fff", "1c2330", "55606e", "d5dbe3", "000"}, {"171b21", "e8ecf1", "a9b3c0", "39424e", "fff"}};
    int i;
    moei_pen_print(p, ".moe .bg{fill:#%s}.moe text,.moe .u{fill:#%s}", schemes[dark].ground, schemes[dark].ink);
    moei_pen_print(p, ".moe .m{fill:#%s}.moe .g{stroke:#%s}", schemes[dark].muted, schemes[dark].grid);
    moei_pen_print(p, ".moe .a{stroke:#%s}", schemes[dark].muted);
    moei_pen_print(p, ".moe .e{fill:#%s;color:#%s}", schemes[dark].on_tint, schemes[dark].on_tint);
    for (i = 0; i < MOEI_TINTS; i++)
        moei_pen_print(p, ".moe .c%d{fill:#%s;background:#%s}", i, moei_tints[i].rgb[dark], moei_tints[i].rgb[dark]);
    for (i = 0; i < MOEI_LEVELS; i++) {
        moei_pen_print(p, ".moe .h%d{fill:#%s}", i, moei_levels[i].rgb[dark]);
        moei_pen_print(p, ".moe .i%d{fill:#%s}", i, moei_levels[i].ink[dark]);
    }
    for (i = 0; i < MOEI_STROKES; i++) {
        moei_pen_print(p, ".moe .s%d{stroke:#%s}", i, moei_strokes[i][dark]);
        moei_pen_print(p, ".moe .f%d{fill:#%s}", i, moei_strokes[i][dark]);
    }
}

static void moei_write_style(moei_pen *p) {
    moei_pen_print(p, ".moe text{font:13px system-ui,-apple-system,\"Segoe UI\",Roboto,\"Noto Sans\",sans-serif;"
                      "white-space:pre}.moe .b{font-size:16px;font-weight:600}.moe .r{text-anchor:end}"
                      ".moe .n{text-anchor:middle}"
                      ".moe .k{font-family:ui-monospace,\"DejaVu Sans Mono\",Menlo,Consolas,monospace}"
                      ".moe .l{fill:none;stroke-width:2;stroke-linecap:round;stroke-linejoin:round}"
                      ".moe .g,.moe .a{fill:none}.moe .z{shape-rendering:crispEdges}.moe .d1{stroke-dasharray:7 4}"
                      ".moe .d2{stroke-dasharray:2 4}.moe .d3{stroke-dasharray:9 4 2 4}");
    moei_write_colors(p, 0);
    moei_pen_print(p, "@media(prefers-color-scheme:dark){");
    moei_write_colors(p, 1);
    moei_pen_print(p, "}");
}

/* ---- pieces of pictures ---- */

static void moei_begin_text(moei_plot *q, double x, double y, const char *class_name) {
    moei_pen_print(q->p, "<text x=\"%c\" y=\"%c\"", x, y);
    if (*class_name != '\0') moei_pen_print(q->p, " class=\"%s\"", class_name);
    moei_pen_print(q->p, ">");
}

/* Begins a text at the left margin, in the muted color. */
static void moei_begin_note(moei_plot *q, double y) { moei_pen_print(q->p, "<text y=\"%c\" class=\"m\">", y); }

static void moei_end_text(moei_plot *q) { moei_pen_print(q->p, "</text>\n"); }

static void moei_write_at(moei_plot *q, double x, double y, const char *class_name, const char *s, size_t most) {
    moei_begin_text(q, x, y, class_name);
    (void)moei_pen_clip(q->p, s, most);
    moei_end_text(q);
}

/* number >= 0 is appended to the name of the class. */
static void moei_rect(moei_plot *q, double x, double y, double width, double height, const char *class_name,
                      int number) {
    moei_pen_print(q->p, "<rect x=\"%c\" y=\"%c\" width=\"%c\" height=\"%c\"", x, y, width, height);
    moei_pen_print(q->p, " class=\"%s", class_name);
    if (number >= 0) moei_pen_print(q->p, "%d", number);
    moei_pen_print(q->p, "\"/>");
}

static void moei_line_at(moei_plot *q, double x1, double y1, double x2, double y2, const char *class_name) {
    moei_pen_print(q->p, "<path d=\"M%c %cL%c %c\" class=\"%s\"/>\n", x1, y1, x2, y2, class_name);
}

/* The end of the line of at most `width` columns that begins at s; *next: the start of the next
   one. width is at least 2, and a line holds at least one character. */
static const char *moei_wrap(const char *s, size_t width, const char **next) {
    const char *end = s, *space = NULL;
    size_t taken = 0;
    while (*end != '\0') {
        const char *at = end;
        uint32_t c = moei_next_shown(&end);
        taken += moei_char_width(c);
        if (c == ' ') {
            space = at;
            *next = end;
        }
        if (taken > width) {
            if (space == NULL || space == s) *next = space = at;
            return space;
        }
    }
    return *next = end;
}

/* Writes a paragraph from y on, if draw is set; returns the y after it. */
static double moei_paragraph(moei_plot *q, const char *s, double y, const char *class_name, size_t width, int draw) {
    while (s != NULL && *s != '\0') {
        const char *next = s, *end = moei_wrap(s, width, &next);
        y += moei_line_height + (*class_name == 'b' ? 3 : 0);
        if (draw) {
            moei_pen_print(q->p, "<text y=\"%c\" class=\"%s\">", y - 4.0, class_name);
            while (s < end) moei_pen_char(q->p, moei_next_shown(&s));
            moei_end_text(q);
        }
        s = next;
    }
    return y;
}

/* An expert: its tint, with its number on it. */
static void moei_chip(moei_plot *q, double x, double y, double width, double height, int32_t e) {
    char buffer[MOEI_LABEL_SIZE];
    if (e < 0) return;
    moei_rect(q, x, y, width, height, "c", (int)(e % MOEI_TINTS));
    moei_write_at(q, x + width / 2.0, y + height - 4.0, "e n", moei_number(buffer, (double)e, 0), 9);
}

/* The share of expert e among the cells with an expert, in row `row` or in all rows (SIZE_MAX).
   MOEI_LEGEND_MOST: of this expert and all after it. */
static double moei_expert_share(const moei_plot *q, size_t row, int32_t e) {
    size_t rows = (q->f->rows - 1) / q->row_step + 1, columns = (q->f->columns - 1) / q->column_step + 1;
    size_t r = row < rows ? row : 0, end = row < rows ? row + 1 : rows;
    size_t c, all = 0, of_expert = 0;
    for (; r < end; r++)
        for (c = 0; c < columns; c++) {
            int32_t found = moei_figure_expert(q, r, c);
            all += found >= 0;
            of_expert += e < MOEI_LEGEND_MOST ? found == e : found >= e;
        }
    return all > 0 ? (double)of_expert / (double)all : 0.0;
}

/* Draws the experts and their shares, from y on, if draw is set; returns the height. */
static double moei_legend(moei_plot *q, double y, int draw) {
    char buffer[MOEI_LABEL_SIZE];
    size_t e, shown = 0, lines;
    for (e = 0; e < moei_min_size(q->n_experts, MOEI_LEGEND_MOST + 1); e++) {
        double share = moei_expert_share(q, SIZE_MAX, (int32_t)e);
        double x = (double)(shown % 4) * 85.0, at = y + (double)(shown / 4) * 22.0;
        if (!(share > 0.0) && (q->f->n_experts <= (int)e || e == MOEI_LEGEND_MOST)) continue;
        if (draw) {
            if (e < MOEI_LEGEND_MOST) moei_chip(q, x, at, 28.0, 18.0, (int32_t)e);
            else moei_write_at(q, x, at + 14.0, "m", MOEI_OTHERS, 4);
            moei_begin_text(q, x + 33.0, at + 14.0, "m");
            moei_pen_print(q->p, "%s %%", moei_number(buffer, 100.0 * share, 1));
            moei_end_text(q);
        }
        shown++;
    }
    lines = (shown + 3) / 4;
    return (double)lines * 22.0 + 6.0;
}

/* The number of digits of n - 1, the number of the last expert. */
static size_t moei_digits_of(size_t n) {
    size_t digits = 1;
    for (; n > 10; n = (n + 9) / 10) digits++;
    return digits;
}

static void moei_count_experts(moei_plot *q) {
    size_t r, c;
    q->n_experts = q->f->n_experts > 0 ? (size_t)q->f->n_experts : 0;
    for (r = 0; r < q->f->rows; r++)
        for (c = 0; c < q->f->columns; c++) {
            int32_t e = q->f->experts[moei_at(q->f, r, c)];
            if (e >= 0 && (size_t)e >= q->n_experts) q->n_experts = (size_t)e + 1;
        }
}

/* ---- tables colored by value ---- */

/* Extends the range to 0 if 0 is near. */
static void moei_from_zero(moei_plot *q) {
    if (q->low > 0.0 && q->low <= q->high * 0.5) q->low = 0.0;
}

static int moei_level(const moei_plot *q, double value) {
    return (int)moei_min_double(moei_fraction(q, value) * 10.0, 9.0);
}

static void moei_plan_heat(moei_plot *q) {
    size_t label;
    moei_downsample(q, 128, 128);
    moei_measure_values(q, SIZE_MAX);
    moei_from_zero(q);
    moei_measure_names(q, 16);
    q->show_numbers = q->column_step == 1 && q->row_step == 1 && q->columns <= 48 && q->number_width <= 10;
    label = moei_text_width(moei_row_label(q));
    q->left = (double)moei_max_size(q->name_width, moei_min_size(label, 10)) * moei_char_pixels + 8.0;
    q->cell_w = q->show_numbers ? (double)q->number_width * moei_char_pixels + 6.0 : 12.0;
    q->cell_w = moei_max_double(q->cell_w, moei_min_double((moei_phone_width - q->left) / (double)q->columns, 60.0));
    q->cell_h = q->show_numbers ? 24.0 : 14.0;
    q->heads_rotated = (double)q->head_width * moei_char_pixels > q->cell_w - 2.0;
    q->top = moei_line_height + (q->heads_rotated ? (double)q->head_width * moei_char_pixels + 10.0 : moei_line_height);
    q->width = moei_max_double(moei_phone_width, q->left + (double)q->columns * q->cell_w);
    q->height = q->top + (double)q->rows * q->cell_h + 50.0;
}

/* Draws the color scale from low to high. */
static void moei_draw_scale(moei_plot *q, double y) {
    char buffer[MOEI_LABEL_SIZE];
    const char *low = moei_number(buffer, q->low, q->decimals);
    double x = q->left + (double)moei_strlen(low) * moei_char_pixels + 6.0;
    int i;
    if (!q->has_value) return;
    moei_write_at(q, q->left, y + 14.0, "m", low, 20);
    for (i = 0; i < MOEI_LEVELS; i++) moei_rect(q, x + 10.0 * i, y, 10.0, 18.0, "h", i);
    moei_pen_print(q->p, "\n");
    moei_begin_text(q, x + 106.0, y + 14.0, "m");
    moei_pen_print(q->p, "%s ", moei_number(buffer, q->high, q->decimals));
    (void)moei_pen_clip(q->p, moei_label(q->f->value_label, ""), 14);
    moei_end_text(q);
}

static void moei_draw_heads(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    double head = q->heads_rotated ? 14.0 : (double)q->head_width * moei_char_pixels + 4.0;
    size_t c, every = (size_t)(head / q->cell_w) + 1;
    for (c = 0; c < q->columns; c += every) {
        double x = q->left + ((double)c + 0.5) * q->cell_w;
        const char *name = moei_name(q->f->column_names, NULL, c * q->column_step, buffer);
        if (!q->heads_rotated) {
            moei_write_at(q, x, q->top - 5.0, "n", name, q->head_width);
            continue;
        }
        moei_pen_print(q->p, "<text transform=\"translate(%c %c)rotate(-90)\">", x + 4.5, q->top - 5.0);
        (void)moei_pen_clip(q->p, name, q->head_width);
        moei_end_text(q);
    }
}

static void moei_draw_heat_cell(moei_plot *q, size_t r, size_t c) {
    char buffer[MOEI_LABEL_SIZE];
    double x = q->left + (double)c * q->cell_w, y = q->top + (double)r * q->cell_h;
    double value;
    int found = moei_mean(q, r, c, &value), level = found ? moei_level(q, value) : 0;
    if (found) moei_rect(q, x, y, q->cell_w - 1.0, q->cell_h - 1.0, "h", level);
    if (found && !q->show_numbers) return;
    x += q->cell_w / 2.0 - 0.5;
    y += q->cell_h / 2.0 + 4.0;
    moei_pen_print(q->p, "<text x=\"%c\" y=\"%c\" class=\"n ", x, y);
    moei_pen_print(q->p, found ? "i%d\">" : "m\">", level);
    moei_pen_print(q->p, "%s</text>", moei_number(buffer, found ? value : (double)MOEI_INFINITY, q->decimals));
}

static void moei_draw_heat(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    size_t r, c;
    moei_write_at(q, q->left, 14.0, "m", moei_column_label(q), 30);
    moei_write_at(q, 0.0, q->top - 5.0, "m", moei_row_label(q), 10);
    moei_draw_heads(q);
    for (r = 0; r < q->rows; r++) {
        const char *name = moei_name(q->f->row_names, NULL, r * q->row_step, buffer);
        double y = q->top + (double)r * q->cell_h + q->cell_h / 2.0 + 4.5;
        moei_write_at(q, q->left - 6.0, y, "r", name, q->name_width);
        for (c = 0; c < q->columns; c++) moei_draw_heat_cell(q, r, c);
        moei_pen_print(q->p, "\n");
    }
    moei_draw_scale(q, q->top + (double)q->rows * q->cell_h + 14.0);
}

/* Describes the position of the largest (sign 1) or smallest (-1) value. */
static void moei_describe_extreme(moei_plot *q, const char *what, double sign) {
    char buffer[MOEI_LABEL_SIZE];
    size_t r, c, row = 0, column = 0;
    double value, best = 0.0;
    int any = 0;
    for (r = 0; r < q->f->rows; r++)
        for (c = 0; c < q->f->columns; c++) {
            if (!moei_value(q->f, r, c, &value) || (any && !(value * sign > best * sign))) continue;
            best = value;
            row = r;
            column = c;
            any = 1;
        }
    moei_pen_print(q->p, "%s %s at ", what, moei_number(buffer, best, q->decimals));
    moei_pen_print(q->p, "%t", moei_row_name(q, row, buffer));
    if (q->f->columns > 1) moei_pen_print(q->p, ", %t", moei_column_name(q, column, buffer));
    moei_pen_print(q->p, ". ");
}

static void moei_describe_cells(moei_plot *q) {
    moei_pen_print(q->p, "%z x %z numbers", q->f->rows, q->f->columns);
    if (q->f->value_label != NULL) moei_pen_print(q->p, ", %t", q->f->value_label);
    moei_pen_print(q->p, ". ");
    moei_measure_values(q, SIZE_MAX);
    if (!q->has_value) {
        moei_pen_print(q->p, "None has a value.");
        return;
    }
    moei_describe_extreme(q, "Largest:", 1.0);
    moei_describe_extreme(q, "Smallest:", -1.0);
}

/* ---- bars ---- */

/* The range of values and intervals; it contains 0 and the reference. */
static void moei_measure_bars(moei_plot *q) {
    size_t r, c;
    double value;
    moei_measure_values(q, SIZE_MAX);
    for (r = 0; r < q->f->rows; r++)
        for (c = 0; c < q->f->columns; c++) {
            double half_width = moei_half_width(q->f, r, c);
            if (half_width < 0.0 || !moei_value(q->f, r, c, &value)) continue;
            moei_include(q, value - half_width);
            moei_include(q, value + half_width);
        }
    if (moei_has_reference(q)) moei_include(q, q->f->reference);
    if (q->has_value) moei_include(q, 0.0);
}

/* Means of several rows have no interval. */
static double moei_shown_half_width(const moei_plot *q, size_t row, size_t column) {
    return q->row_step == 1 ? moei_half_width(q->f, row, column) : -1.0;
}

/* A number, and its interval if it has one. */
static void moei_draw_value(moei_plot *q, double value, double half_width) {
    char buffer[MOEI_LABEL_SIZE];
    moei_pen_print(q->p, "%s", moei_number(buffer, value, q->decimals));
    if (half_width < 0.0) return;
    moei_pen_print(q->p, q->p->xml ? " \xC2\xB1 %s" : " +- %s", moei_number(buffer, half_width, q->decimals));
}

static size_t moei_value_width(const moei_plot *q, double value, double half_width) {
    char buffer[MOEI_LABEL_SIZE];
    size_t width = moei_strlen(moei_number(buffer, value, q->decimals));
    if (half_width < 0.0) return width;
    return width + (q->p->xml ? 3 : 4) + moei_strlen(moei_number(buffer, half_width, q->decimals));
}

static void moei_measure_intervals(moei_plot *q) {
    size_t r, c, width;
    double value;
    for (r = 0; r < q->rows; r++)
        for (c = 0; c < q->columns; c++) {
            if (!moei_mean(q, r, c, &value)) continue;
            width = moei_value_width(q, value, moei_shown_half_width(q, r, c));
            q->number_width = moei_max_size(q->number_width, width);
        }
}

static void moei_plan_bars(moei_plot *q) {
    size_t label = 0;
    moei_downsample(q, 256, SIZE_MAX);
    moei_measure_bars(q);
    moei_measure_names(q, 16);
    moei_measure_intervals(q);
    if (q->f->row_names == NULL) label = moei_min_size(moei_text_width(moei_row_label(q)), 10);
    q->top = moei_line_height + 6.0;
    q->left = (double)moei_max_size(q->name_width, label) * moei_char_pixels + 8.0;
    q->cell_h = q->columns > 1 ? (double)q->columns * 16.0 + 6.0 : 21.0;
    q->cell_w = moei_phone_width - q->left - (double)q->number_width * moei_char_pixels - 8.0;
    if (q->cell_w < 80.0) q->cell_w = 80.0;
    q->width = q->left + q->cell_w + 8.0 + (double)q->number_width * moei_char_pixels;
    q->height = q->top + (double)q->rows * q->cell_h + 6.0 + (moei_has_reference(q) ? moei_line_height : 0.0);
    q->height += (q->columns > 1 ? (double)q->columns * moei_line_height + 4.0 : 0.0);
}

static double moei_pixel_x(const moei_plot *q, double value) { return q->left + moei_fraction(q, value) * q->cell_w; }

static void moei_draw_bar(moei_plot *q, size_t row, size_t column, double y) {
    double zero = moei_pixel_x(q, 0.0), half_width = moei_shown_half_width(q, row, column);
    double value, end, length, from, to;
    int found = moei_mean(q, row, column, &value);
    if (found) {
        end = moei_pixel_x(q, value);
        length = moei_max_double(end > zero ? end - zero : zero - end, 1.0);
        moei_rect(q, moei_min_double(zero, end), y, length, 14.0, "f", (int)(column % MOEI_STROKES));
    }
    if (found && half_width >= 0.0) {
        from = moei_pixel_x(q, value - half_width);
        to = moei_pixel_x(q, value + half_width);
        moei_pen_print(q->p, "<path d=\"M%c %cv6M%c %cv6", from, y + 4.0, to, y + 4.0);
        moei_pen_print(q->p, "M%c %cH%c\" class=\"a\"/>", from, y + 7.0, to);
    }
    moei_begin_text(q, q->width, y + 11.5, "r");
    if (found) moei_draw_value(q, value, half_width);
    else moei_pen_print(q->p, "-");
    moei_end_text(q);
}

/* The digits after the point of the reference, which need not be an integer if the values are. */
static int moei_reference_decimals(const moei_plot *q) {
    const double at = q->f->reference;
    if (q->decimals != 0 || q->f->decimals != 0 || moei_is_integer(at)) return q->decimals;
    return moei_decimals_for(at < 0.0 ? -at : at, 0);
}

static void moei_draw_bar_reference(moei_plot *q, double bottom) {
    char buffer[MOEI_LABEL_SIZE];
    double x = moei_pixel_x(q, q->f->reference);
    const char *class_name = x > moei_phone_width * 0.75 ? "m r" : x > moei_phone_width * 0.35 ? "m n" : "m";
    moei_pen_print(q->p, "<path d=\"M%c %cV%c\" class=\"a d1\"/>", x, q->top - 2.0, bottom);
    moei_begin_text(q, x, bottom + 13.0, class_name);
    (void)moei_pen_clip(q->p, moei_label(q->f->reference_name, "reference"), 24);
    moei_pen_print(q->p, " %s", moei_number(buffer, q->f->reference, moei_reference_decimals(q)));
    moei_end_text(q);
}

static void moei_draw_bars(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    size_t r, c;
    double bottom = q->top + (double)q->rows * q->cell_h;
    if (q->f->row_names == NULL) moei_write_at(q, 0.0, 14.0, "m", moei_row_label(q), 10);
    if (q->f->value_label != NULL) moei_write_at(q, q->width, 14.0, "m r", q->f->value_label, 30);
    for (r = 0; r < q->rows; r++) {
        const char *name = moei_name(q->f->row_names, NULL, r * q->row_step, buffer);
        double y = q->top + (double)r * q->cell_h;
        moei_write_at(q, q->left - 6.0, y + q->cell_h / 2.0 + 1.5, "r", name, q->name_width);
        for (c = 0; c < q->columns; c++) moei_draw_bar(q, r, c, y + 16.0 * (double)c);
    }
    if (moei_has_reference(q)) {
        moei_draw_bar_reference(q, bottom);
        bottom += moei_line_height;
    }
    for (c = 0; c < q->columns && q->columns > 1; c++) {
        double y = bottom + 6.0 + moei_line_height * (double)c;
        moei_rect(q, q->left, y, 24.0, 12.0, "f", (int)(c % MOEI_STROKES));
        moei_write_at(q, q->left + 30.0, y + 10.5, "", moei_column_name(q, c, buffer), 24);
    }
}

/* ---- curves ---- */

static double moei_column_x(const moe_figure *f, size_t column) {
    return f->x != NULL ? f->x[column] : (double)column + 1.0;
}

/* The distance between ticks, a round number, that gives an axis about `most` ticks at most. */
static double moei_tick_step(const moei_plot *q, double most) {
    double raw = moei_half_range(q) / most * 2.0, power = moei_power_below(raw);
    raw *= 0.999999; /* so that a range of exactly `most` steps gets that step */
    return raw > power * 5.0 ? power * 10.0 : raw > power * 2.0 ? power * 5.0 : raw > power ? power * 2.0 : power;
}

/* Makes high - low larger than rounding errors, so that ticks differ. */
static void moei_widen(moei_plot *q) {
    double high = q->high < 0.0 ? -q->high : q->high, low = q->low < 0.0 ? -q->low : q->low;
    double magnitude = moei_max_double(high, low), more = magnitude < 1e-290 ? 1.0 : magnitude * 0.05;
    if (!q->has_value) {
        q->low = 0.0;
        q->high = 1.0;
    } else if (moei_half_range(q) <= magnitude * 1e-10 || magnitude < 1e-290) {
        q->low -= q->low > -1e300 ? more : 0.0;
        q->high += q->high < 1e300 ? more : 0.0;
    }
}

static int64_t moei_floor(double x) { return (int64_t)x - ((double)(int64_t)x > x); }

/* Tick i, at a round number from low to high; 0 after the last. */
static int moei_tick(const moei_plot *q, double most, int i, double *at) {
    double step = moei_tick_step(q, most);
    *at = (double)(i - moei_floor(-q->low / step + 1e-6)) * step;
    return moei_is_number(*at) && *at <= q->high + step * 1e-6;
}

/* The digits after the point of tick labels. */
static int moei_tick_decimals(const moei_plot *q, double most) {
    double step = moei_tick_step(q, most), magnitude = moei_max_double(q->high, -q->low);
    int decimals = 0, significant = 1;
    if (magnitude >= 1e6 || magnitude < 1e-4) {
        for (; magnitude > step * 1.5 && significant < 15; magnitude /= 10.0) significant++;
        return significant > 1 ? -significant : -2;
    }
    for (; step < 0.99 && decimals < 9; step *= 10.0) decimals++;
    return decimals;
}

/* Those of the reference among curves: one more. */
static int moei_finer_decimals(const moei_plot *q) {
    const int decimals = moei_tick_decimals(q, 5.0);
    return decimals < 0 ? decimals - 1 : decimals + 1;
}

static void moei_measure_x(moei_plot *q) {
    size_t c;
    q->has_value = 0;
    q->low = q->high = 0.0;
    for (c = 0; c < q->f->columns; c++)
        if (moei_is_number(moei_column_x(q->f, c))) moei_include(q, moei_column_x(q->f, c));
    moei_widen(q);
}

static void moei_measure_y(moei_plot *q) {
    double step, low, high;
    moei_measure_values(q, SIZE_MAX);
    if (moei_has_reference(q)) moei_include(q, q->f->reference);
    if (q->low > 0.0 && q->low < q->high * 0.3) q->low = 0.0;
    moei_widen(q);
    step = moei_tick_step(q, 5.0); /* extend the range to the next ticks */
    low = (double)moei_floor(q->low / step) * step;
    high = -(double)moei_floor(-q->high / step) * step;
    if (moei_is_number(low) && moei_is_number(high)) {
        q->low = low;
        q->high = high;
    }
}

enum { MOEI_BUCKETS = 320, MOEI_NAMED_LINES = 32 };

static size_t moei_legend_lines(const moei_plot *q) {
    return q->f->rows == 1 && q->f->row_names == NULL ? 0 : moei_min_size(q->f->rows, MOEI_NAMED_LINES);
}

static int moei_dash(size_t i) { return (int)((i + i / 8) % 4); }

static void moei_plan_lines(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    size_t lines = moei_legend_lines(q) + (q->f->rows > MOEI_NAMED_LINES) + (size_t)moei_has_reference(q);
    double at;
    int i, decimals;
    moei_measure_y(q);
    decimals = moei_tick_decimals(q, 5.0);
    for (i = 0; moei_tick(q, 5.0, i, &at); i++)
        q->number_width = moei_max_size(q->number_width, moei_strlen(moei_number(buffer, at, decimals)));
    q->left = (double)q->number_width * moei_char_pixels + 8.0;
    q->top = q->f->value_label != NULL ? moei_line_height + 8.0 : 8.0;
    q->width = moei_phone_width;
    q->cell_w = q->width - q->left - 8.0;
    q->height = q->top + moei_plot_height + moei_line_height * 2.0 + 4.0;
    q->height += (double)lines * moei_line_height;
}

static double moei_pixel_y(const moei_plot *q, double value) {
    return q->top + (1.0 - moei_fraction(q, value)) * moei_plot_height;
}

/* One point of a curve; *started is 0 before the first. h.1 draws a single point as a dot. */
static void moei_point(moei_plot *q, const moei_plot *x, size_t row, size_t column, int *started) {
    double value, at = moei_column_x(q->f, column);
    if (!moei_value(q->f, row, column, &value) || !moei_is_number(at)) return;
    at = q->left + moei_fraction(x, at) * q->cell_w;
    moei_pen_print(q->p, *started ? "L%c %c" : "M%c %ch.1", at, moei_pixel_y(q, value));
    *started = 1;
}

/* The columns of the lowest and the highest value of a bucket; `from` if it has no value. */
static void moei_find_extremes(const moe_figure *f, size_t row, size_t from, size_t end, size_t *lowest,
                               size_t *highest) {
    double value, low = 0.0, high = 0.0;
    size_t i;
    int any = 0;
    *lowest = *highest = from;
    for (i = from; i < end; i++) {
        if (!moei_value(f, row, i, &value)) continue;
        if (!any || value < low) {
            low = value;
            *lowest = i;
        }
        if (!any || value > high) {
            high = value;
            *highest = i;
        }
        any = 1;
    }
}

static size_t moei_bucket_size(const moe_figure *f) {
    return f->columns > 2 * MOEI_BUCKETS ? (f->columns - 1) / MOEI_BUCKETS + 1 : 1;
}

/* Draws the lowest and the highest point of each bucket, in order. */
static void moei_draw_curve(moei_plot *q, const moei_plot *x, size_t row) {
    size_t c, n = q->f->columns, step = moei_bucket_size(q->f);
    int started = 0;
    moei_pen_print(q->p, "<path class=\"l s%d d%d\" d=\"", (int)(row % MOEI_STROKES), moei_dash(row));
    for (c = 0; c < n; c += step) {
        size_t low, high;
        moei_find_extremes(q->f, row, c, moei_min_size(c + step, n), &low, &high);
        moei_point(q, x, row, moei_min_size(low, high), &started);
        if (low != high) moei_point(q, x, row, moei_max_size(low, high), &started);
    }
    moei_pen_print(q->p, "\"/>\n");
}

static void moei_draw_axes(moei_plot *q, const moei_plot *x) {
    char buffer[MOEI_LABEL_SIZE];
    double at, bottom = q->top + moei_plot_height, y;
    int i, decimals = moei_tick_decimals(q, 5.0), x_decimals = moei_tick_decimals(x, 4.0);
    if (q->f->value_label != NULL) moei_write_at(q, 0.0, 14.0, "m", q->f->value_label, 44);
    for (i = 0; moei_tick(q, 5.0, i, &at); i++) {
        y = moei_pixel_y(q, at);
        moei_line_at(q, q->left, y, q->left + q->cell_w, y, "g");
        moei_write_at(q, q->left - 6.0, y + 4.5, "m r", moei_number(buffer, at, decimals), 20);
    }
    for (i = 0; moei_tick(x, 4.0, i, &at); i++) {
        double pixel = q->left + moei_fraction(x, at) * q->cell_w;
        const char *class_name = pixel > q->width - 30.0 ? "m r" : "m n";
        moei_line_at(q, pixel, bottom, pixel, bottom + 4.0, "a");
        moei_write_at(q, pixel, bottom + 17.0, class_name, moei_number(buffer, at, x_decimals), 20);
    }
    moei_write_at(q, q->left + q->cell_w / 2.0, bottom + 34.0, "m n", moei_column_label(q), 40);
    moei_line_at(q, q->left, bottom, q->left + q->cell_w, bottom, "a");
}

/* The line of the reference, and its entry in the legend at y. */
static void moei_draw_line_reference(moei_plot *q, double y) {
    char buffer[MOEI_LABEL_SIZE];
    double at = moei_pixel_y(q, q->f->reference);
    int decimals = moei_finer_decimals(q);
    moei_line_at(q, q->left, at, q->left + q->cell_w, at, "a d1");
    moei_line_at(q, q->left, y + 7.5, q->left + 32.0, y + 7.5, "a d1");
    moei_begin_text(q, q->left + 40.0, y + 12.0, "m");
    (void)moei_pen_clip(q->p, moei_label(q->f->reference_name, "reference"), 24);
    moei_pen_print(q->p, ": %s", moei_number(buffer, q->f->reference, decimals));
    moei_end_text(q);
}

static void moei_draw_lines(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    moei_plot x = *q;
    size_t r;
    double y = q->top + moei_plot_height + 40.0;
    moei_measure_x(&x);
    moei_draw_axes(q, &x);
    if (moei_has_reference(q)) {
        moei_draw_line_reference(q, y);
        y += moei_line_height;
    }
    for (r = 0; r < q->f->rows; r++) moei_draw_curve(q, &x, r);
    for (r = 0; r < moei_legend_lines(q); r++, y += moei_line_height) {
        moei_pen_print(q->p, "<path d=\"M%c %ch32\" ", q->left, y + 7.5);
        moei_pen_print(q->p, "class=\"l s%d d%d\"/>", (int)(r % MOEI_STROKES), moei_dash(r));
        moei_write_at(q, q->left + 40.0, y + 12.0, "", moei_row_name(q, r, buffer), 32);
    }
    if (q->f->rows <= MOEI_NAMED_LINES) return;
    moei_begin_text(q, q->left, y + 12.0, "m");
    moei_pen_print(q->p, "and %z more", q->f->rows - MOEI_NAMED_LINES);
    moei_end_text(q);
}

static void moei_describe_curve(moei_plot *q, size_t row) {
    char buffer[MOEI_LABEL_SIZE];
    double value, first = 0.0, last = 0.0;
    size_t c, low, high;
    int any = 0;
    moei_pen_print(q->p, "%t: ", moei_row_name(q, row, buffer));
    for (c = 0; c < q->f->columns; c++) {
        if (!moei_value(q->f, row, c, &value)) continue;
        first = any ? first : value;
        last = value;
        any = 1;
    }
    if (!any) {
        moei_pen_print(q->p, "no values. ");
        return;
    }
    moei_find_extremes(q->f, row, 0, q->f->columns, &low, &high);
    moei_pen_print(q->p, "from %s ", moei_number(buffer, first, q->decimals));
    moei_pen_print(q->p, "to %s, ", moei_number(buffer, last, q->decimals));
    (void)moei_value(q->f, row, low, &value);
    moei_pen_print(q->p, "least %s, ", moei_number(buffer, value, q->decimals));
    (void)moei_value(q->f, row, high, &value);
    moei_pen_print(q->p, "most %s. ", moei_number(buffer, value, q->decimals));
}

static void moei_describe_lines(moei_plot *q) {
    size_t r;
    moei_measure_values(q, SIZE_MAX);
    moei_pen_print(q->p, "%z series of %z points. ", q->f->rows, q->f->columns);
    for (r = 0; r < moei_min_size(q->f->rows, MOEI_NAMED_LINES); r++) moei_describe_curve(q, r);
}

/* ---- texts colored by expert ---- */

/* The text of a token, with symbols for white space. */
static const char *moei_token_text(const moei_plot *q, size_t i, char buffer[MOEI_LABEL_SIZE]) {
    const char *s = moei_name(q->f->column_names, NULL, i, buffer);
    if (*s == '\n' || *s == '\r') return "\\n";
    if (*s == '\t') return "\\t";
    if (*s == '\0' || (*s == ' ' && s[1] == '\0')) return "\xC2\xB7";
    return s;
}

/* Whether the line ends after a token. */
static int moei_token_breaks(const moei_plot *q, size_t i) {
    const char *s = q->f->column_names != NULL && q->f->column_names[i] != NULL ? q->f->column_names[i] : "";
    while (*s != '\0' && *s != '\n') s++;
    return *s == '\n';
}

static double moei_token_width(const moei_plot *q, size_t i) {
    char buffer[MOEI_LABEL_SIZE];
    size_t width = moei_min_size(moei_text_width(moei_token_text(q, i, buffer)), 36);
    return (double)moei_max_size(width, moei_digits_of(q->n_experts)) * 8.0 + 8.0;
}

static double moei_clamp_weight(double value) { return value < 0.0 ? 0.0 : value > 1.0 ? 1.0 : value; }

/* A token at x, y over a chip per layer. */
static void moei_draw_token(moei_plot *q, size_t i, double x, double y, double width) {
    char buffer[MOEI_LABEL_SIZE];
    double value;
    size_t r;
    moei_begin_text(q, x + 4.0, y + 15.0, "k");
    (void)moei_pen_clip(q->p, moei_token_text(q, i, buffer), 36);
    moei_pen_print(q->p, "</text>");
    for (r = 0; r < q->rows; r++) {
        double at = y + 20.0 + 20.0 * (double)r;
        moei_chip(q, x + 1.0, at, width - 2.0, 17.0, moei_figure_expert(q, r, i));
        if (!moei_value(q->f, r, i, &value) || moei_figure_expert(q, r, i) < 0) continue;
        moei_rect(q, x + 1.0, at + 16.0, (width - 2.0) * moei_clamp_weight(value), 2.5, "u", -1);
    }
}

/* Lays the tokens out in lines, and draws them if draw is set; returns the height. */
static double moei_token_flow(moei_plot *q, int draw) {
    const double line = 22.0 + (double)q->rows * 20.0 + 6.0;
    double x = 0.0, y = 2.0;
    size_t i;
    for (i = 0; i < q->columns; i++) {
        double width = moei_token_width(q, i);
        if (x > 0.0 && x + width > q->width) {
            x = 0.0;
            y += line;
        }
        if (draw) moei_draw_token(q, i, x, y, width);
        x += width;
        if (moei_token_breaks(q, i)) x = q->width;
    }
    return y + line;
}

static void moei_plan_tokens(moei_plot *q) {
    moei_count_experts(q);
    moei_downsample(q, SIZE_MAX, SIZE_MAX);
    q->columns = moei_min_size(q->columns, MOEI_TOKENS_MOST);
    q->rows = moei_min_size(q->rows, 64);
    q->width = moei_phone_width;
    q->top = moei_token_flow(q, 0);
    q->height = q->top + moei_legend(q, 0.0, 0) + moei_line_height * 2.0;
}

/* Explains the chips under a token. */
static void moei_describe_chips(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    if (q->f->rows == 1) moei_pen_print(q->p, "Under each token: its expert");
    else {
        moei_pen_print(q->p, "Under each token: its expert in %t", moei_row_name(q, 0, buffer));
        moei_pen_print(q->p, " to %t", moei_row_name(q, q->rows - 1, buffer));
    }
    if (q->f->values != NULL) moei_pen_print(q->p, "; line: weight");
}

static void moei_draw_tokens(moei_plot *q) {
    (void)moei_token_flow(q, 1);
    (void)moei_legend(q, q->top, 1);
    moei_begin_note(q, q->height - moei_line_height - 6.0);
    moei_describe_chips(q);
    moei_end_text(q);
    if (q->columns == q->f->columns) return;
    moei_begin_note(q, q->height - 4.0);
    moei_pen_print(q->p, "The first %z of %z tokens", q->columns, q->f->columns);
    moei_end_text(q);
}

static void moei_describe_experts(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    size_t r, e, groups = q->kind->transposed ? q->rows : moei_min_size(q->rows, 1);
    double others;
    for (r = 0; r < groups; r++) {
        if (q->kind->transposed) moei_pen_print(q->p, "%t: ", moei_row_name(q, r, buffer));
        for (e = 0; e < moei_min_size(q->n_experts, MOEI_LEGEND_MOST); e++) {
            double share = moei_expert_share(q, q->kind->transposed ? r : SIZE_MAX, (int32_t)e);
            if (share > 0.0) moei_pen_print(q->p, "expert %z %s %%, ", e, moei_number(buffer, 100.0 * share, 1));
        }
        others = moei_expert_share(q, q->kind->transposed ? r : SIZE_MAX, MOEI_LEGEND_MOST);
        if (others > 0.0) moei_pen_print(q->p, "others %s %%. ", moei_number(buffer, 100.0 * others, 1));
        else moei_pen_print(q->p, "no other. ");
    }
}

/* ---- tables ---- */

enum { MOEI_CELL_MOST = 30, MOEI_HEAD_MOST = 24 };

static const char *moei_cell_text(const moei_plot *q, size_t row, size_t column) {
    return q->f->cells != NULL ? q->f->cells[moei_at(q->f, row, column)] : NULL;
}

/* Whether a cell is text, which is left-aligned; numbers are right-aligned. */
static int moei_is_words(const moei_plot *q, size_t row, size_t column) {
    const char *text = moei_cell_text(q, row, column);
    return text != NULL && *text != '\0' && moei_memchr("0123456789+-.<>", *text, 15) == NULL;
}

static void moei_draw_cell(moei_plot *q, size_t row, size_t column, size_t most) {
    const char *text = moei_cell_text(q, row, column);
    double value;
    if (text != NULL) (void)moei_pen_clip(q->p, text, most);
    else if (moei_value(q->f, row, column, &value)) moei_draw_value(q, value, moei_half_width(q->f, row, column));
    else moei_pen_print(q->p, "-");
}

static size_t moei_cell_width(const moei_plot *q, size_t row, size_t column) {
    const char *text = moei_cell_text(q, row, column);
    double value;
    if (text != NULL) return moei_min_size(moei_text_width(text), MOEI_CELL_MOST);
    if (!moei_value(q->f, row, column, &value)) return 1;
    return moei_value_width(q, value, moei_half_width(q->f, row, column));
}

static const char *moei_column_head(const moei_plot *q, size_t column, char buffer[MOEI_LABEL_SIZE]) {
    return moei_name(q->f->column_names, q->f->column_label, column, buffer);
}

/* The width of a column and its name; sets its number format. *words: it has a cell of text. */
static size_t moei_column_width(moei_plot *q, size_t column, int *words) {
    char buffer[MOEI_LABEL_SIZE];
    size_t r, width = moei_min_size(moei_text_width(moei_column_head(q, column, buffer)), MOEI_HEAD_MOST);
    moei_measure_values(q, column);
    *words = 0;
    for (r = 0; r < q->rows; r++) {
        width = moei_max_size(width, moei_cell_width(q, r, column));
        *words = *words || moei_is_words(q, r, column);
    }
    return width;
}

/* Processes column by column, so that each is measured once. Draws if draw is set; returns the
   width. */
static double moei_table_columns(moei_plot *q, int draw) {
    char buffer[MOEI_LABEL_SIZE];
    double x = q->left;
    size_t r, c;
    int words;
    for (c = 0; c < q->columns; c++) {
        double width = (double)moei_column_width(q, c, &words) * moei_char_pixels, at = words ? x : x + width;
        if (draw) moei_write_at(q, at, 16.0, words ? "m" : "m r", moei_column_head(q, c, buffer), MOEI_HEAD_MOST);
        for (r = 0; draw && r < q->rows; r++) {
            moei_begin_text(q, at, (double)r * 24.0 + 41.0, words ? "" : "r");
            moei_draw_cell(q, r, c, MOEI_CELL_MOST);
            moei_end_text(q);
        }
        x += width + 14.0;
    }
    return x - 14.0;
}

static int moei_is_cut(const moei_plot *q) { return q->rows < q->f->rows || q->columns < q->f->columns; }

static void moei_plan_table(moei_plot *q) {
    size_t label;
    moei_downsample(q, SIZE_MAX, SIZE_MAX);
    q->rows = moei_min_size(q->rows, 256);
    q->columns = moei_min_size(q->columns, 64);
    moei_measure_names(q, MOEI_CELL_MOST);
    label = moei_text_width(moei_label(q->f->row_label, ""));
    q->left = (double)moei_max_size(q->name_width, label) * moei_char_pixels + 14.0;
    q->width = moei_max_double(moei_table_columns(q, 0), moei_phone_width);
    q->height = (double)q->rows * 24.0 + 32.0 + (moei_is_cut(q) ? moei_line_height : 0.0);
}

static void moei_draw_table(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    size_t r;
    moei_write_at(q, 0.0, 16.0, "m", moei_label(q->f->row_label, ""), MOEI_CELL_MOST);
    for (r = 0; r < q->rows; r++) {
        double y = (double)r * 24.0;
        moei_line_at(q, 0.0, y + 24.5, q->width, y + 24.5, "g");
        moei_write_at(q, 0.0, y + 41.0, "", moei_name(q->f->row_names, NULL, r, buffer), q->name_width);
    }
    (void)moei_table_columns(q, 1);
    if (!moei_is_cut(q)) return;
    moei_begin_note(q, q->height - 4.0);
    moei_pen_print(q->p, "The first %z of %z rows, ", q->rows, q->f->rows);
    moei_pen_print(q->p, "%z of %z columns", q->columns, q->f->columns);
    moei_end_text(q);
}

static void moei_describe_table(moei_plot *q) {
    moei_pen_print(q->p, "A table of %z rows and %z columns.", q->f->rows, q->f->columns);
}

/* ---- regions ---- */

static void moei_plan_map(moei_plot *q) {
    moei_count_experts(q);
    moei_downsample(q, 128, 128);
    q->left = q->f->y != NULL ? 48.0 : q->f->row_label != NULL ? 8.0 : 0.0;
    q->top = q->f->row_label != NULL ? moei_line_height + 4.0 : 2.0;
    q->width = moei_phone_width;
    q->cell_w = (q->width - q->left) / (double)q->columns;
    q->cell_h = moei_min_double(q->cell_w, 340.0 / (double)q->rows);
    q->height = q->top + (double)q->rows * q->cell_h;
    q->height += q->f->x != NULL || q->f->column_label != NULL ? 2.0 * moei_line_height : 0.0;
    q->height += 8.0 + moei_legend(q, 0.0, 0);
}

/* The end of the run of one expert that begins at a cell. */
static size_t moei_map_run(const moei_plot *q, size_t row, size_t column) {
    int32_t e = moei_figure_expert(q, row, column);
    size_t end = column + 1;
    while (end < q->columns && moei_figure_expert(q, row, end) == e) end++;
    return end;
}

/* Writes the number of an expert in the middle of its longest run and of the rows below it in which
   it has a run about as long. */
static void moei_name_region(moei_plot *q, int32_t e) {
    char buffer[MOEI_LABEL_SIZE];
    size_t r, c, end, middle, length = 0, rows = 0;
    size_t first = 0, from = 0;
    double x, y;
    for (r = 0; r < q->rows; r++)
        for (c = 0; c < q->columns; c = end) {
            end = moei_map_run(q, r, c);
            middle = from + length / 2;
            if (moei_figure_expert(q, r, c) != e) continue;
            if (end - c > length + length / 8) {
                length = end - c;
                from = c;
                first = r;
                rows = 1;
            } else if (r == first + rows && c < middle && end > middle && end - c + length / 8 >= length) rows++;
        }
    if ((double)length * q->cell_w < 10.0) return;
    x = q->left + ((double)from + (double)length / 2.0) * q->cell_w;
    y = q->top + ((double)first + (double)rows / 2.0) * q->cell_h + 4.5;
    moei_write_at(q, x, y, "e n", moei_number(buffer, (double)e, 0), 9);
}

static void moei_draw_map_axes(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    const moe_figure *f = q->f;
    moei_plot axis = *q;
    double bottom = q->top + (double)q->rows * q->cell_h;
    int decimals;
    moei_write_at(q, 0.0, 14.0, "m", moei_label(f->row_label, ""), 44);
    moei_write_at(q, (q->left + q->width) / 2.0, bottom + 18.0, "m n", moei_label(f->column_label, ""), 24);
    if (f->x != NULL) {
        moei_measure_x(&axis);
        decimals = moei_tick_decimals(&axis, 5.0);
        moei_write_at(q, q->left, bottom + 18.0, "m", moei_number(buffer, f->x[0], decimals), 12);
        moei_write_at(q, q->width, bottom + 18.0, "m r", moei_number(buffer, f->x[f->columns - 1], decimals), 12);
    }
    if (f->y == NULL) return;
    axis.has_value = 0;
    moei_include(&axis, f->y[f->rows - 1]);
    moei_include(&axis, f->y[0]);
    moei_widen(&axis);
    decimals = moei_tick_decimals(&axis, 5.0);
    moei_write_at(q, q->left - 6.0, q->top + 12.0, "m r", moei_number(buffer, f->y[0], decimals), 12);
    moei_write_at(q, q->left - 6.0, bottom, "m r", moei_number(buffer, f->y[f->rows - 1], decimals), 12);
}

/* Draws the cells of an expert from column `from` to before `end`: its tint, slightly larger so
   that no gaps show, and stripes if the tint is reused. */
static void moei_draw_map_run(moei_plot *q, int32_t e, size_t row, size_t from, size_t end) {
    double x = q->left + (double)from * q->cell_w, y = q->top + (double)row * q->cell_h;
    double width = (double)(end - from) * q->cell_w;
    if (e < 0) return;
    moei_rect(q, x, y, width + 0.2, q->cell_h + 0.2, "z c", (int)(e % MOEI_TINTS));
    if (e < MOEI_TINTS) return;
    moei_pen_print(q->p, "<rect x=\"%c\" y=\"%c\" width=\"%c\" height=\"%c\" ", x, y, width, q->cell_h);
    moei_pen_print(q->p, "fill=\"url(#h%z)\"/>", q->number);
}

static void moei_draw_map(moei_plot *q) {
    size_t r, c, end, e;
    if (q->n_experts > MOEI_TINTS)
        moei_pen_print(q->p, "<pattern id=\"h%z\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" "
                             "patternTransform=\"rotate(45)\"><path d=\"M0 0V7\" class=\"a\"/></pattern>\n", q->number);
    for (r = 0; r < q->rows; r++) {
        for (c = 0; c < q->columns; c = end) {
            end = moei_map_run(q, r, c);
            moei_draw_map_run(q, moei_figure_expert(q, r, c), r, c, end);
        }
        moei_pen_print(q->p, "\n");
    }
    for (e = 0; e < moei_min_size(q->n_experts, MOEI_LEGEND_MOST); e++) moei_name_region(q, (int32_t)e);
    moei_draw_map_axes(q);
    (void)moei_legend(q, q->height - moei_legend(q, 0.0, 0) + 2.0, 1);
}

/* ---- text ---- */

/* Writes a text in a field of `width` columns, right- or left-aligned. */
static void moei_field_text(moei_plot *q, const char *s, size_t width, int right) {
    size_t taken = moei_min_size(moei_text_width(s), width);
    if (right) moei_pen_repeat(q->p, " ", width - taken);
    (void)moei_pen_clip(q->p, s, width);
    if (!right) moei_pen_repeat(q->p, " ", width - taken);
}

static void moei_text_paragraph(moei_plot *q, const char *s, size_t columns) {
    while (s != NULL && *s != '\0') {
        const char *next, *end = moei_wrap(s, columns, &next);
        while (s < end) moei_pen_char(q->p, moei_next_shown(&s));
        moei_pen_print(q->p, "\n");
        s = next;
    }
}

/* Terminal colors of text and background, and their reset. */
enum { MOEI_BLACK = 16, MOEI_WHITE = 231 };
static void moei_begin_color(moei_plot *q, int color, int ink) {
    if (q->p->color) moei_pen_print(q->p, "\x1b[48;5;%d;38;5;%dm", color, ink);
}

static void moei_end_color(moei_plot *q) {
    if (q->p->color) moei_pen_print(q->p, "\x1b[0m");
}

static void moei_text_heat_cell(moei_plot *q, size_t r, size_t c, size_t width) {
    char buffer[MOEI_LABEL_SIZE];
    double value;
    int found = moei_mean(q, r, c, &value), level = found ? moei_level(q, value) : 0;
    if (found) moei_begin_color(q, moei_levels[level].terminal, moei_levels[level].terminal_ink);
    if (q->show_numbers) moei_field_text(q, found ? moei_number(buffer, value, q->decimals) : "-", width, 1);
    else moei_pen_put(q->p, found ? moei_levels[q->p->color ? 0 : level].shade : "?", 1);
    if (found) moei_end_color(q);
}

/* The names of the columns over their cells. */
static void moei_text_heads(moei_plot *q, size_t width) {
    char buffer[MOEI_LABEL_SIZE];
    size_t c;
    moei_field_text(q, "", q->name_width + 2, 0);
    moei_pen_print(q->p, "%t\n", moei_column_label(q));
    moei_field_text(q, moei_row_label(q), q->name_width, 0);
    for (c = 0; q->show_numbers && c < q->columns; c++) {
        moei_pen_print(q->p, "  ");
        moei_field_text(q, moei_name(q->f->column_names, NULL, c, buffer), width - 2, 1);
    }
    moei_pen_print(q->p, "\n");
}

static void moei_text_heat(moei_plot *q, size_t columns) {
    char buffer[MOEI_LABEL_SIZE];
    size_t r, c, cell;
    moei_downsample(q, 200, SIZE_MAX);
    moei_measure_values(q, SIZE_MAX);
    moei_from_zero(q);
    moei_measure_names(q, 16);
    q->name_width = moei_max_size(q->name_width, moei_min_size(moei_text_width(moei_row_label(q)), 16));
    cell = moei_max_size(q->number_width, moei_min_size(q->head_width, 8)) + 2;
    q->show_numbers = q->row_step == 1 && q->f->columns <= (columns - q->name_width) / cell;
    if (!q->show_numbers) moei_downsample(q, 200, columns - q->name_width - 2);
    moei_text_heads(q, cell);
    for (r = 0; r < q->rows; r++) {
        moei_field_text(q, moei_name(q->f->row_names, NULL, r * q->row_step, buffer), q->name_width, 1);
        if (!q->show_numbers) moei_pen_print(q->p, "  ");
        for (c = 0; c < q->columns; c++) moei_text_heat_cell(q, r, c, cell);
        moei_pen_print(q->p, "\n");
    }
    if (q->show_numbers || !q->has_value) return;
    moei_pen_print(q->p, "from %s (%s) ", moei_number(buffer, q->low, q->decimals), q->p->color ? "light" : "blank");
    moei_pen_print(q->p, "to %s (%s)\n", moei_number(buffer, q->high, q->decimals), q->p->color ? "dark" : "@");
}

static void moei_text_bar(moei_plot *q, size_t row, size_t column, size_t width) {
    double value, at, zero = moei_fraction(q, 0.0) * (double)width, end = zero;
    size_t i, last = 0, mark = width;
    if (moei_has_reference(q)) mark = (size_t)(moei_fraction(q, q->f->reference) * ((double)width - 1.0) + 0.5);
    if (moei_mean(q, row, column, &value)) end = moei_fraction(q, value) * (double)width;
    for (i = 0; i < width; i++) {
        at = (double)i + 0.5;
        if (i != mark && !(at > zero && at < end) && !(at < zero && at > end)) continue;
        moei_pen_repeat(q->p, " ", i - last);
        moei_pen_print(q->p, i == mark ? "|" : "#");
        last = i + 1;
    }
    moei_pen_print(q->p, "\n");
}

/* A line of a bar: names, value, bar. heads: the width of the column's name, or 0. */
static void moei_text_bar_line(moei_plot *q, size_t row, size_t column, size_t heads, size_t bar) {
    char buffer[MOEI_LABEL_SIZE];
    const char *name = column == 0 ? moei_name(q->f->row_names, NULL, row * q->row_step, buffer) : "";
    double value, half_width = moei_shown_half_width(q, row, column);
    int found = moei_mean(q, row, column, &value);
    size_t width = found ? moei_value_width(q, value, half_width) : 1;
    moei_field_text(q, name, q->name_width, q->f->row_names == NULL);
    if (heads > 0) {
        moei_pen_print(q->p, "  ");
        moei_field_text(q, moei_name(q->f->column_names, NULL, column, buffer), heads - 2, 0);
    }
    moei_pen_repeat(q->p, " ", 2 + q->number_width - moei_min_size(width, q->number_width));
    if (found) moei_draw_value(q, value, half_width);
    else moei_pen_print(q->p, "-");
    moei_pen_print(q->p, "  ");
    moei_text_bar(q, row, column, bar);
}

static void moei_text_reference(moei_plot *q, int decimals, const char *separator) {
    char buffer[MOEI_LABEL_SIZE];
    moei_pen_print(q->p, "%t%s", moei_label(q->f->reference_name, "reference"), separator);
    moei_pen_print(q->p, "%s\n", moei_number(buffer, q->f->reference, decimals));
}

static void moei_text_bars(moei_plot *q, size_t columns) {
    const char *label = moei_label(moei_row_label(q), "");
    size_t r, c, heads, used;
    moei_downsample(q, 200, SIZE_MAX);
    moei_measure_bars(q);
    moei_measure_names(q, 20);
    moei_measure_intervals(q);
    q->name_width = moei_max_size(q->name_width, moei_min_size(moei_text_width(label), 20));
    q->number_width = moei_min_size(q->number_width, 24);
    heads = q->columns > 1 ? moei_min_size(q->head_width, 12) + 2 : 0;
    used = q->name_width + heads + q->number_width + 4;
    moei_field_text(q, q->f->row_names == NULL ? label : "", q->name_width, 0);
    moei_field_text(q, "", heads + 2, 0);
    moei_pen_print(q->p, "%t\n", moei_label(q->f->value_label, ""));
    for (r = 0; r < q->rows; r++)
        for (c = 0; c < q->columns; c++) moei_text_bar_line(q, r, c, heads, columns > used + 8 ? columns - used : 8);
    if (!moei_has_reference(q)) return;
    moei_pen_print(q->p, "|: ");
    moei_text_reference(q, moei_reference_decimals(q), ", ");
}

enum { MOEI_TEXT_HEIGHT = 15, MOEI_TEXT_WIDTH = 400 };
static const char moei_curve_marks[] = "*+ox#@%&abcdefghijklmnpqrstuvwyz";

/* Draws a curve into the picture of characters, with straight lines between its points. */
static void moei_text_curve(const moei_plot *q, const moei_plot *x, size_t row, size_t width, char *picture) {
    const char mark = moei_curve_marks[row % (sizeof moei_curve_marks - 1)];
    double value, last_x = 0.0, last_y = 0.0;
    size_t c;
    int started = 0;
    for (c = 0; c < q->f->columns; c++) {
        double at = moei_column_x(q->f, c), px, py;
        size_t i, steps;
        if (!moei_value(q->f, row, c, &value) || !moei_is_number(at)) continue;
        px = moei_fraction(x, at) * (double)(width - 1);
        py = (1.0 - moei_fraction(q, value)) * (double)(MOEI_TEXT_HEIGHT - 1);
        steps = started ? (size_t)(px > last_x ? px - last_x : last_x - px) + 1 : 1;
        for (i = 1; i <= steps; i++) {
            double done = started ? (double)i / (double)steps : 1.0;
            size_t to_x = (size_t)(px * done + last_x * (1.0 - done) + 0.5);
            size_t to_y = (size_t)(py * done + last_y * (1.0 - done) + 0.5);
            picture[to_y * MOEI_TEXT_WIDTH + to_x] = mark;
        }
        last_x = px;
        last_y = py;
        started = 1;
    }
}

/* The picture line by line; every seventh line has its value. */
static void moei_text_picture(moei_plot *q, const char *picture, size_t width, int decimals) {
    char buffer[MOEI_LABEL_SIZE];
    size_t i;
    for (i = 0; i < MOEI_TEXT_HEIGHT; i++) {
        const char *line = picture + i * MOEI_TEXT_WIDTH;
        double share = 1.0 - (double)i / (double)(MOEI_TEXT_HEIGHT - 1);
        double value = q->low * (1.0 - share) + q->high * share;
        size_t end = width;
        while (end > 0 && line[end - 1] == ' ') end--;
        moei_field_text(q, i % 7 == 0 ? moei_number(buffer, value, decimals) : "", q->number_width, 1);
        moei_pen_print(q->p, " |");
        moei_pen_put(q->p, line, end);
        moei_pen_print(q->p, "\n");
    }
}

static void moei_text_lines(moei_plot *q, size_t columns) {
    char picture[MOEI_TEXT_HEIGHT * MOEI_TEXT_WIDTH], buffer[MOEI_LABEL_SIZE];
    moei_plot x = *q;
    size_t r, width;
    int decimals;
    moei_plan_lines(q);
    moei_measure_x(&x);
    decimals = moei_tick_decimals(q, 5.0);
    q->number_width = moei_strlen(moei_number(buffer, q->low, decimals));
    q->number_width = moei_max_size(q->number_width, moei_strlen(moei_number(buffer, q->high, decimals)));
    width = columns - moei_min_size(q->number_width, 20) - 2;
    memset(picture, ' ', sizeof picture);
    for (r = q->f->rows; r > 0; r--) moei_text_curve(q, &x, r - 1, width, picture); /* the first on top */
    if (q->f->value_label != NULL) moei_pen_print(q->p, "%t\n", q->f->value_label);
    moei_text_picture(q, picture, width, decimals);
    decimals = moei_tick_decimals(&x, 4.0);
    moei_field_text(q, "", q->number_width + 2, 0);
    moei_pen_print(q->p, "%t: from %s ", moei_column_label(q), moei_number(buffer, x.low, decimals));
    moei_pen_print(q->p, "to %s\n", moei_number(buffer, x.high, decimals));
    for (r = 0; r < moei_legend_lines(q); r++) {
        moei_pen_repeat(q->p, " ", q->number_width);
        moei_pen_put(q->p, &moei_curve_marks[r % (sizeof moei_curve_marks - 1)], 1);
        moei_pen_print(q->p, " %t\n", moei_row_name(q, r, buffer));
    }
    if (moei_has_reference(q)) moei_text_reference(q, moei_finer_decimals(q), ": ");
}

static size_t moei_token_columns(const moei_plot *q, size_t i) {
    char buffer[MOEI_LABEL_SIZE];
    size_t width = moei_min_size(moei_text_width(moei_token_text(q, i, buffer)), 36);
    return moei_max_size(width, moei_digits_of(q->n_experts)) + 1;
}

/* The end of the line of tokens that begins at token i. */
static size_t moei_token_line(const moei_plot *q, size_t i, size_t columns) {
    size_t width = moei_token_columns(q, i);
    for (i++; i < q->columns && !moei_token_breaks(q, i - 1); i++) {
        width += moei_token_columns(q, i);
        if (width > columns) break;
    }
    return i;
}

/* The text of a token (layer SIZE_MAX) or the number of its expert, in the expert's color. */
static void moei_text_token(moei_plot *q, size_t layer, size_t i) {
    char buffer[MOEI_LABEL_SIZE];
    const int is_text = layer == SIZE_MAX;
    int32_t e = moei_figure_expert(q, is_text ? 0 : layer, i);
    int colored = e >= 0 && (!is_text || q->rows == 1);
    const char *text;
    if (is_text) text = moei_token_text(q, i, buffer);
    else text = moei_number(buffer, e < 0 ? (double)MOEI_INFINITY : (double)e, 0);
    if (colored) moei_begin_color(q, moei_tints[e % MOEI_TINTS].terminal, MOEI_BLACK);
    moei_field_text(q, text, moei_token_columns(q, i) - 1, 0);
    if (colored) moei_end_color(q);
}

/* Tokens, and under them the numbers of their experts. */
static void moei_text_tokens(moei_plot *q, size_t columns) {
    size_t c, r, i, end;
    moei_plan_tokens(q);
    q->columns = q->f->columns;
    q->rows = q->f->rows;
    for (c = 0; c < q->columns; c = end) {
        end = moei_token_line(q, c, columns);
        for (r = 0; r <= q->rows; r++)
            for (i = c; i < end; i++) {
                moei_text_token(q, r == 0 ? SIZE_MAX : r - 1, i);
                moei_pen_print(q->p, i + 1 < end ? " " : "\n");
            }
        moei_pen_print(q->p, "\n");
    }
    moei_describe_chips(q);
    moei_pen_print(q->p, "\n");
}

enum { MOEI_TABLE_COLUMNS = 64 };

typedef struct moei_table_column {
    size_t width;
    int words, decimals;
} moei_table_column;

/* Prints the cells of the columns from `from` to before `end`. */
static void moei_text_table_part(moei_plot *q, const moei_table_column *format, size_t from, size_t end) {
    char buffer[MOEI_LABEL_SIZE];
    size_t r, c;
    for (r = 0; r < q->f->rows; r++) {
        moei_field_text(q, moei_name(q->f->row_names, NULL, r, buffer), q->name_width, 0);
        for (c = from; c < end; c++) {
            const moei_table_column *column = &format[c - from];
            size_t blank = column->width;
            q->decimals = column->decimals;
            blank -= moei_min_size(moei_cell_width(q, r, c), blank);
            moei_pen_repeat(q->p, " ", 2 + (column->words ? 0 : blank));
            moei_draw_cell(q, r, c, column->width);
            if (column->words) moei_pen_repeat(q->p, " ", blank);
        }
        moei_pen_print(q->p, "\n");
    }
}

/* Prints as many columns as fit, then the next ones below. */
static void moei_text_table(moei_plot *q, size_t columns) {
    char buffer[MOEI_LABEL_SIZE];
    const char *label = moei_label(q->f->row_label, "");
    moei_table_column format[MOEI_TABLE_COLUMNS];
    size_t from, end, c, width;
    moei_downsample(q, SIZE_MAX, SIZE_MAX);
    q->columns = 0;
    moei_measure_names(q, MOEI_CELL_MOST);
    q->name_width = moei_max_size(q->name_width, moei_min_size(moei_text_width(label), MOEI_CELL_MOST));
    for (from = 0; from < q->f->columns; from = end) {
        width = q->name_width;
        for (end = from; end < q->f->columns && end - from < MOEI_TABLE_COLUMNS; end++) {
            moei_table_column *column = &format[end - from];
            column->width = moei_column_width(q, end, &column->words);
            column->decimals = q->decimals;
            if (end > from && width + column->width + 2 > columns) break;
            width += column->width + 2;
        }
        if (from > 0) moei_pen_print(q->p, "\n");
        moei_field_text(q, label, q->name_width, 0);
        for (c = from; c < end; c++) {
            moei_pen_print(q->p, "  ");
            moei_field_text(q, moei_column_head(q, c, buffer), format[c - from].width, !format[c - from].words);
        }
        moei_pen_print(q->p, "\n");
        moei_pen_repeat(q->p, "-", moei_min_size(width, columns));
        moei_pen_print(q->p, "\n");
        moei_text_table_part(q, format, from, end);
    }
}

static void moei_text_map(moei_plot *q, size_t columns) {
    static const char signs[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    size_t r, c, rows;
    moei_downsample(q, SIZE_MAX, columns);
    rows = moei_max_size(q->f->rows / (2 * q->column_step), 1); /* characters are twice as high as wide */
    moei_downsample(q, moei_min_size(rows, columns), columns);
    for (r = 0; r < q->rows; r++) {
        for (c = 0; c < q->columns; c++) {
            int32_t e = moei_figure_expert(q, r, c);
            if (e >= 0) moei_begin_color(q, moei_tints[e % MOEI_TINTS].terminal, MOEI_BLACK);
            moei_pen_put(q->p, e < 0 ? " " : e < (int32_t)sizeof signs - 1 ? signs + e : "?", 1);
            if (e >= 0) moei_end_color(q);
        }
        moei_pen_print(q->p, "\n");
    }
    moei_count_experts(q);
    if (q->n_experts > 10) moei_pen_print(q->p, "a to z: 10 to 35, A to Z: 36 to 61, ?: others\n");
}

/* ---- the kinds ---- */

#define MOEI_FIGURE_ROW(constant, name, title, row, column, transposed, description) \
    {title, row, column, transposed, moei_plan_##name, moei_draw_##name, moei_describe_##description, moei_text_##name},
static const moei_figure_kind moei_figure_kinds[MOE_FIGURE_COUNT] = {MOEI_FIGURES(MOEI_FIGURE_ROW)};

static int moei_has_experts(const moe_figure *f) { return f->kind == MOE_FIGURE_TOKENS || f->kind == MOE_FIGURE_MAP; }

static int moei_is_empty(const moe_figure *f) { return f->rows == 0 || f->columns == 0; }

/* Checks that figure `number` of a page satisfies the description of moe_figure. */
static moe_status moei_figure_check(const moe_figure *f, size_t number, moe_error *error) {
    size_t stride = f->stride > 0 ? f->stride : f->columns, all;
    const char *missing = NULL;
    if (f->kind < 0 || f->kind >= MOE_FIGURE_COUNT)
        return moei_error(error, MOE_ERR_ARGUMENT, "figure %z: kind = %d, must be one of MOE_FIGURE_, 0 to %d", number,
                          f->kind, MOE_FIGURE_COUNT - 1);
    if (stride < f->columns)
        return moei_error(error, MOE_ERR_ARGUMENT, "figure %z: stride = %z, below columns = %z", number, stride,
                          f->columns);
    if (!moei_mul(f->rows, stride, &all) || !moei_mul(all, sizeof(double), &all))
        return moei_error(error, MOE_ERR_OVERFLOW, "figure %z: %z rows of %z numbers exceed memory", number, f->rows,
                          stride);
    if (moei_is_empty(f)) return MOE_OK;
    if (moei_has_experts(f)) missing = f->experts == NULL ? "experts" : NULL;
    else if (f->kind != MOE_FIGURE_TABLE || f->cells == NULL) missing = f->values == NULL ? "values" : NULL;
    if (missing != NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "figure %z: %s is NULL, but there are %z rows and %z columns",
                          number, missing, f->rows, f->columns);
    if (f->kind == MOE_FIGURE_BARS && f->columns > 4)
        return moei_error(error, MOE_ERR_ARGUMENT, "figure %z: columns = %z, bars have 1 to 4", number, f->columns);
    return MOE_OK;
}

static moei_plot moei_plot_of(const moe_figure *f, moei_pen *p) {
    moei_plot q;
    memset(&q, 0, sizeof q);
    q.f = f;
    q.kind = &moei_figure_kinds[f->kind];
    q.p = p;
    q.rows = f->rows;
    q.columns = f->columns;
    q.row_step = q.column_step = 1;
    return q;
}

static const char *moei_title(const moe_figure *f) { return moei_label(f->title, moei_figure_kinds[f->kind].name); }

static int moei_is_thinned(const moei_plot *q) {
    return q->row_step > 1 || q->column_step > 1 || (q->f->kind == MOE_FIGURE_LINES && moei_bucket_size(q->f) > 1);
}

/* Describes what the picture omits. */
static void moei_describe_sampling(moei_plot *q) {
    const int map = q->f->kind == MOE_FIGURE_MAP;
    const char *cells = map ? "One of %z x %z cells is shown." : "Each is the mean of %z x %z.";
    if (!moei_is_thinned(q)) return;
    if (q->row_step > 1 || q->column_step > 1) moei_pen_print(q->p, cells, q->row_step, q->column_step);
    else moei_pen_print(q->p, "Lowest and highest of every %z points.", moei_bucket_size(q->f));
}

/* Title and caption of a picture that stands alone; returns their height. Draws if draw is set. */
static double moei_picture_head(moei_plot *q, int draw) {
    size_t columns = (size_t)(q->width / 6.9);
    double y = moei_paragraph(q, moei_title(q->f), 0.0, "b", columns * 7 / 9, draw);
    return moei_paragraph(q, q->f->caption, y, "m", columns, draw) + 8.0;
}

/* The opening tag. A picture that stands alone has a margin and its size in pixels. */
static void moei_picture_begin(moei_plot *q, double height, int alone) {
    double margin = alone ? 10.0 : 0.0, width = q->width;
    moei_pen_print(q->p, "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"moe\" ");
    moei_pen_print(q->p, "viewBox=\"%d %d ", alone ? -10 : 0, alone ? -6 : 0);
    moei_pen_print(q->p, "%c %c\" ", width + 2.0 * margin, height);
    if (alone) moei_pen_print(q->p, "width=\"%c\" height=\"%c\" ", width + 2.0 * margin, height);
    moei_pen_print(q->p, "style=\"width:100%%;height:auto;max-width:%cpx;", width * 1.5);
    if (!alone && width > moei_phone_width + 1.0) moei_pen_print(q->p, "min-width:%cpx", width * 0.95);
    moei_pen_print(q->p, "\" role=\"img\" aria-labelledby=\"t%z d%z\">", q->number, q->number);
}

/* Title and description for screen readers. plan: the figure as it was planned. */
static void moei_picture_words(moei_plot *q, const moei_plot *plan) {
    moei_plot described = *plan;
    moei_pen_print(q->p, "<title id=\"t%z\">%t</title><desc id=\"d%z\">", q->number, moei_title(q->f), q->number);
    if (moei_is_empty(q->f)) moei_pen_print(q->p, "There is nothing to show.");
    else {
        q->kind->describe(&described);
        moei_pen_print(q->p, " ");
        moei_describe_sampling(q);
    }
    moei_pen_print(q->p, "</desc>\n");
}

/* The picture of figure `number` of a page, or one that stands alone (SIZE_MAX), with its title,
   caption and style. */
static void moei_picture(moei_plot *q, size_t number) {
    const int alone = number == SIZE_MAX;
    double top = 0.0, height;
    moei_plot plan;
    if (moei_is_empty(q->f)) {
        q->width = moei_phone_width;
        q->height = 30.0;
    } else q->kind->plan(q);
    q->number = alone ? 0 : number;
    plan = *q;
    if (moei_is_thinned(q)) q->height += moei_line_height;
    if (alone) top = moei_picture_head(q, 0);
    height = top + q->height + (alone ? 12.0 : 0.0);
    moei_picture_begin(q, height, alone);
    moei_picture_words(q, &plan);
    if (alone) {
        moei_pen_print(q->p, "<style>");
        moei_write_style(q->p);
        moei_pen_print(q->p, "</style>\n");
        moei_rect(q, -10.0, -6.0, q->width + 20.0, height, "bg", -1);
        (void)moei_picture_head(q, 1);
    }
    moei_pen_print(q->p, "<g transform=\"translate(0 %c)\">\n", top);
    if (moei_is_empty(q->f)) moei_write_at(q, 0.0, 18.0, "m", "There is nothing to show.", 40);
    else q->kind->draw(q);
    if (moei_is_thinned(q)) {
        moei_begin_note(q, q->height - 4.0);
        moei_describe_sampling(q);
        moei_pen_print(q->p, "</text>");
    }
    moei_pen_print(q->p, "</g></svg>\n");
}

/* ---- pages ---- */

enum { MOEI_PAGE_ROWS = 1000, MOEI_PAGE_COLUMNS = 100 };

/* A cell of a table of numbers, without its end tag. */
static void moei_page_cell(moei_plot *q, size_t row, size_t column) {
    char buffer[MOEI_LABEL_SIZE];
    double value;
    int32_t e;
    if (!moei_has_experts(q->f)) {
        moei_pen_print(q->p, moei_is_words(q, row, column) ? "<td class=\"q\">" : "<td>");
        moei_draw_cell(q, row, column, SIZE_MAX);
        return;
    }
    e = q->f->experts[moei_at(q->f, row, column)];
    moei_pen_print(q->p, "<td>%s", e < 0 ? "-" : moei_number(buffer, (double)e, 0));
    if (e >= 0 && moei_value(q->f, row, column, &value))
        moei_pen_print(q->p, " (%s)", moei_number(buffer, value, q->decimals));
}

/* The names of the columns of a table of numbers. */
static void moei_page_heads(moei_plot *q, size_t columns, size_t step) {
    char buffer[MOEI_LABEL_SIZE];
    const int transposed = q->kind->transposed, table = q->f->kind == MOE_FIGURE_TABLE;
    const char *corner = moei_label(transposed ? moei_column_label(q) : moei_row_label(q), "");
    size_t c;
    moei_pen_print(q->p, *corner != '\0' ? "<th scope=\"col\">%t</th>" : "<td></td>", corner);
    for (c = 0; c < columns; c += step) {
        const char *name = transposed ? moei_row_name(q, c, buffer) : moei_column_name(q, c, buffer);
        moei_pen_print(q->p, table && moei_is_words(q, 0, c) ? "<th scope=\"col\" class=\"q\">" : "<th scope=\"col\">");
        moei_pen_print(q->p, "%t</th>", name);
    }
}

/* The numbers of a figure as a table. */
static void moei_page_table(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    const int transposed = q->kind->transposed, map = q->f->kind == MOE_FIGURE_MAP;
    size_t rows = transposed ? q->f->columns : q->f->rows, columns = transposed ? q->f->rows : q->f->columns;
    size_t row_step = (rows - 1) / (map ? 32 : MOEI_PAGE_ROWS) + 1;
    size_t column_step = (columns - 1) / (map ? 32 : MOEI_PAGE_COLUMNS) + 1;
    size_t r, c;
    int decimals[MOEI_PAGE_COLUMNS] = {0};
    for (c = 0; c * column_step < columns; c++) {
        moei_measure_values(q, q->f->kind == MOE_FIGURE_TABLE ? c * column_step : SIZE_MAX);
        decimals[c] = q->decimals;
    }
    moei_pen_print(q->p, "<table><caption class=\"v\">%t: numbers</caption><thead><tr>", moei_title(q->f));
    moei_page_heads(q, columns, column_step);
    moei_pen_print(q->p, "</tr></thead><tbody>\n");
    for (r = 0; r < rows; r += row_step) {
        const char *name = transposed ? moei_column_name(q, r, buffer) : moei_row_name(q, r, buffer);
        moei_pen_print(q->p, "<tr><th scope=\"row\">%t</th>", name);
        for (c = 0; c < columns; c += column_step) {
            q->decimals = decimals[c / column_step];
            moei_page_cell(q, transposed ? c : r, transposed ? r : c);
            moei_pen_print(q->p, "</td>");
        }
        moei_pen_print(q->p, "</tr>\n");
    }
    moei_pen_print(q->p, "</tbody></table>\n");
    if (row_step > 1) moei_pen_print(q->p, "<p>One of %z rows is shown.</p>\n", row_step);
    if (column_step > 1) moei_pen_print(q->p, "<p>One of %z columns is shown.</p>\n", column_step);
}

static void moei_page_token(moei_plot *q, size_t i) {
    char buffer[MOEI_LABEL_SIZE];
    double value;
    size_t r;
    moei_pen_print(q->p, "<span class=\"t\"><b>%t</b>", moei_token_text(q, i, buffer));
    for (r = 0; r < q->rows; r++) {
        int32_t e = moei_figure_expert(q, r, i);
        if (e < 0) moei_pen_print(q->p, "<i>-");
        else moei_pen_print(q->p, "<i class=\"e c%d\">%d", (int)(e % MOEI_TINTS), (int)e);
        if (e >= 0 && moei_value(q->f, r, i, &value))
            moei_pen_print(q->p, "<u style=\"width:%c%%\"></u>", 100.0 * moei_clamp_weight(value));
        moei_pen_print(q->p, "</i>");
    }
    moei_pen_print(q->p, moei_token_breaks(q, i) ? "</span><br>\n" : "</span>\n");
}

/* Tokens as text that flows with the page. */
static void moei_page_tokens(moei_plot *q) {
    char buffer[MOEI_LABEL_SIZE];
    size_t i;
    q->kind->plan(q);
    moei_pen_print(q->p, "<div class=\"k\" role=\"img\" aria-label=\"");
    moei_describe_experts(q);
    moei_pen_print(q->p, "\">");
    for (i = 0; i < q->columns; i++) moei_page_token(q, i);
    moei_pen_print(q->p, "</div>\n<p>");
    moei_describe_chips(q);
    moei_pen_print(q->p, ".");
    if (q->columns < q->f->columns) moei_pen_print(q->p, " The first %z of %z tokens.", q->columns, q->f->columns);
    moei_pen_print(q->p, " Shares of the experts:</p>\n<p>");
    for (i = 0; i < moei_min_size(q->n_experts, MOEI_LEGEND_MOST + 1); i++) {
        double percent = 100.0 * moei_expert_share(q, SIZE_MAX, (int32_t)i);
        if (!(percent > 0.0) && (q->f->n_experts <= (int)i || i == MOEI_LEGEND_MOST)) continue;
        if (i == MOEI_LEGEND_MOST) moei_pen_print(q->p, "<span class=\"y\"><i>" MOEI_OTHERS "</i> ");
        else moei_pen_print(q->p, "<span class=\"y\"><i class=\"e c%d\">%z</i> ", (int)(i % MOEI_TINTS), i);
        moei_pen_print(q->p, "%s %%</span>\n", moei_number(buffer, percent, 1));
    }
    moei_pen_print(q->p, "</p>\n");
}

static void moei_page_style(moei_pen *p) {
    moei_write_style(p);
    moei_pen_print(p, "body{margin:0;background:#f3f5f8;color:#1c2330;"
                      "font:16px/1.5 system-ui,-apple-system,\"Segoe UI\",Roboto,\"Noto Sans\",sans-serif}"
                      "main{max-width:1340px;margin:auto;padding:8px;display:grid;gap:12px;align-items:start;"
                      "grid-auto-flow:dense;"
                      "grid-template-columns:repeat(auto-fill,minmax(min(100%%,364px),1fr))}"
                      "h1{grid-column:1/-1;font-size:1.6rem;line-height:1.25;margin:.6rem .4rem .2rem}"
                      "h2{font-size:1.1rem;line-height:1.3;margin:0}"
                      "p{margin:.3rem 0 .6rem;color:#55606e;font-size:.9rem}h1,h2,p{overflow-wrap:anywhere}"
                      "figure{box-sizing:border-box;margin:0;padding:8px;min-width:0;background:#fff;"
                      "border:1px solid #d5dbe3;border-radius:10px}.w{grid-column:1/-1}"
                      ".box{overflow:auto;position:relative}"
                      ".box:focus-visible{outline:3px solid #0b62b8;outline-offset:1px}svg{display:block}"
                      "details{margin-top:.4rem;font-size:.9rem}summary{cursor:pointer;padding:.25rem 0}"
                      "details .box{max-height:22rem}"
                      "table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}"
                      "th,td{padding:.2rem .6rem;border-bottom:1px solid #d5dbe3;text-align:right;"
                      "white-space:nowrap}th:first-child,.q{text-align:left}td{vertical-align:top}"
                      "td.q{white-space:normal;min-width:9rem;max-width:26rem}th:first-child{padding-left:0}"
                      ".v{position:absolute;clip-path:inset(50%%);width:1px;height:1px;overflow:hidden;"
                      "white-space:nowrap}"
                      ".t{display:inline-block;vertical-align:top;margin:0 1px 7px;font-size:14px;"
                      "line-height:20px;text-align:center;unicode-bidi:isolate}"
                      ".t b{display:block;font-weight:400;padding:0 3px;white-space:pre;text-align:left}"
                      ".y{display:inline-block;width:6.2rem}"
                      ".y i{display:inline-block;min-width:28px;text-align:center;font-style:normal}"
                      ".t i{display:block;position:relative;font:12px/18px system-ui,sans-serif;"
                      "margin-bottom:2px;min-width:18px}"
                      ".t u{position:absolute;left:0;bottom:0;height:2px;background:currentColor}"
                      "@media(min-width:780px){.w{grid-column:span 2}.x{grid-column:1/-1}main{padding:16px}"
                      "figure{padding:14px}}"
                      "@media(prefers-color-scheme:dark){body{background:#0f1216;color:#e8ecf1}p{color:#a9b3c0}"
                      "figure{background:#171b21;border-color:#39424e}th,td{border-color:#39424e}"
                      ".box:focus-visible{outline-color:#6cb2ff}}");
}

static void moei_page_figure(moei_plot *q, size_t number) {
    moei_plot table = *q, plan = *q;
    const int empty = moei_is_empty(q->f);
    const int is_table = !empty && q->f->kind == MOE_FIGURE_TABLE;
    const int is_tokens = !empty && q->f->kind == MOE_FIGURE_TOKENS;
    const char *class_name;
    if (!empty) q->kind->plan(&plan);
    if (is_table) plan.width *= 1.25; /* tables have larger text */
    class_name = is_tokens || plan.width > 800.0 ? " class=\"w x\"" : plan.width > 380.0 ? " class=\"w\"" : "";
    moei_pen_print(q->p, "<figure%s aria-labelledby=\"f%z\">", class_name, number);
    moei_pen_print(q->p, "<figcaption><h2 id=\"f%z\">%t</h2>\n", number, moei_title(q->f));
    if (q->f->caption != NULL && *q->f->caption != '\0') moei_pen_print(q->p, "<p>%t</p>", q->f->caption);
    moei_pen_print(q->p, "</figcaption>\n");
    if (is_tokens) moei_page_tokens(q);
    else {
        moei_pen_print(q->p, "<div class=\"box\"");
        if (plan.width > moei_phone_width + 1.0 || is_table)
            moei_pen_print(q->p, " tabindex=\"0\" role=\"group\" aria-labelledby=\"f%z\"", number);
        moei_pen_print(q->p, ">\n");
        if (is_table) moei_page_table(q);
        else moei_picture(q, number);
        moei_pen_print(q->p, "</div>\n");
    }
    if (!empty && !is_table) {
        moei_pen_print(q->p, "<details><summary>Numbers</summary><div class=\"box\" tabindex=\"0\" role=\"group\" ");
        moei_pen_print(q->p, "aria-label=\"Numbers: %t\">\n", moei_title(q->f));
        moei_page_table(&table);
        moei_pen_print(q->p, "</div></details>\n");
    }
    moei_pen_print(q->p, "</figure>\n");
}

/* ---- calls ---- */

static moe_status moei_report_begin(moei_pen *p, const moe_figure *figures, size_t n, moe_stream *stream,
                                    moe_error *error) {
    size_t i;
    moe_status status = MOE_OK;
    if ((figures == NULL && n > 0) || stream == NULL || stream->write == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "figures or stream is NULL, or the stream has no write function");
    for (i = 0; i < n && status == MOE_OK; i++) status = moei_figure_check(&figures[i], i, error);
    memset(p, 0, sizeof *p);
    p->stream = stream;
    return status;
}

static moe_status moei_report_end(moei_pen *p, moe_error *error) {
    moei_pen_flush(p);
    if (p->status == MOE_OK) return MOE_OK;
    return moei_error(error, p->status, "the stream failed: %s", moe_status_text(p->status));
}

moe_status moe_report_svg(const moe_figure *figure, moe_stream *stream, moe_error *error) {
    moei_pen p;
    moei_plot q;
    moe_status status = moei_report_begin(&p, figure, 1, stream, error);
    if (status != MOE_OK) return status;
    p.xml = 1;
    q = moei_plot_of(figure, &p);
    moei_picture(&q, SIZE_MAX);
    return moei_report_end(&p, error);
}

moe_status moe_report_html(const char *title, const moe_figure *figures, size_t n, moe_stream *stream,
                           moe_error *error) {
    moei_pen p;
    moei_plot q;
    size_t i;
    moe_status status = moei_report_begin(&p, figures, n, stream, error);
    if (status != MOE_OK) return status;
    p.xml = 1;
    title = moei_label(title, "Report");
    moei_pen_print(&p, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
                       "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
                       "<meta name=\"color-scheme\" content=\"light dark\">");
    moei_pen_print(&p, "<title>%t</title>\n<style>", title);
    moei_page_style(&p);
    moei_pen_print(&p, "</style></head>\n<body class=\"moe\"><main><h1>%t</h1>\n", title);
    for (i = 0; i < n; i++) {
        q = moei_plot_of(&figures[i], &p);
        moei_page_figure(&q, i);
    }
    moei_pen_print(&p, "</main></body></html>\n");
    return moei_report_end(&p, error);
}

static void moei_write_text(const moe_figure *figure, moei_pen *p, size_t columns) {
    moei_plot q = moei_plot_of(figure, p);
    moei_text_paragraph(&q, moei_title(figure), columns);
    moei_text_paragraph(&q, figure->caption, columns);
    moei_pen_print(p, "\n");
    if (moei_is_empty(figure)) {
        moei_pen_print(p, "There is nothing to show.\n");
        return;
    }
    q.kind->text(&q, columns);
    if (q.row_step == 1 && q.column_step == 1) return;
    moei_describe_sampling(&q);
    moei_pen_print(p, "\n");
}

moe_status moe_report_text(const moe_figure *figure, int columns, int color, moe_stream *stream, moe_error *error) {
    moei_pen p;
    moe_status status = moei_report_begin(&p, figure, 1, stream, error);
    if (status != MOE_OK) return status;
    if (columns != 0 && (columns < 40 || columns > 400))
        return moei_error(error, MOE_ERR_ARGUMENT, "columns = %d, must be 0 or 40 to 400", columns);
    p.color = color;
    p.columns = columns == 0 ? 80 : (size_t)columns;
    moei_write_text(figure, &p, p.columns);
    return moei_report_end(&p, error);
}

#ifndef MOE_NO_STDIO
typedef struct moei_report_file {
    const char *path, *title;
    const moe_figure *figures;
    size_t n;
    moe_error *error;
} moei_report_file;

static int moei_name_ends(const char *s, const char *ending) {
    size_t n = moei_strlen(s), m = moei_strlen(ending);
    return n >= m && moei_strcmp(s + n - m, ending) == 0;
}

static moe_status moei_report_write(void *ctx, moe_stream *stream) {
    const moei_report_file *r = (const moei_report_file *)ctx;
    moe_status status = MOE_OK;
    size_t i;
    if (moei_name_ends(r->path, ".html") || moei_name_ends(r->path, ".htm"))
        return moe_report_html(r->title, r->figures, r->n, stream, r->error);
    if (moei_name_ends(r->path, ".svg")) return moe_report_svg(r->figures, stream, r->error);
    for (i = 0; i < r->n && status == MOE_OK; i++) {
        if (i > 0) status = stream->write(stream->ctx, "\n", 1);
        if (status == MOE_OK) status = moe_report_text(&r->figures[i], 0, 0, stream, r->error);
    }
    return status;
}

moe_status moe_report_save(const char *path, const char *title, const moe_figure *figures, size_t n, moe_error *error) {
    moei_report_file r;
    if (path == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "path is NULL");
    if (n == 0 && moei_name_ends(path, ".svg"))
        return moei_error(error, MOE_ERR_ARGUMENT, "%s: a picture shows one figure, and there is none", path);
    if (figures == NULL && n > 0) return moei_error(error, MOE_ERR_ARGUMENT, "figures is NULL, n = %z", n);
    r.path = path;
    r.title = title;
    r.figures = figures;
    r.n = n;
    r.error = error;
    return moe_file_replace(path, moei_report_write, &r, error);
}
#endif

/* ---- figures of what the library measures ---- */

moe_figure moe_figure_classes(const moe_report *report) {
    moe_figure f;
    memset(&f, 0, sizeof f);
    if (report == NULL || report->classes == NULL) return f;
    f.kind = MOE_FIGURE_HEAT;
    f.title = "Experts and classes";
    f.row_label = "expert";
    f.column_label = "class";
    f.value_label = "tokens";
    f.rows = report->n_experts;
    f.columns = report->n_classes;
    f.values = report->classes;
    return f;
}

moe_figure moe_figure_load(const moe_report *report) {
    moe_figure f;
    memset(&f, 0, sizeof f);
    if (report == NULL || report->load == NULL || report->n_experts == 0) return f;
    f.kind = MOE_FIGURE_BARS;
    f.title = "Load of the experts";
    f.row_label = "expert";
    f.value_label = "tokens";
    f.rows = report->n_experts;
    f.columns = 1;
    f.values = report->load;
    f.reference = report->n_assignments / (double)report->n_experts;
    f.reference_name = "even";
    return f;
}

moe_status moe_history_add(moe_history *history, double at, const double *values, size_t count) {
    moe_history *h = history;
    size_t i, s;
    int append;
    if (h == NULL || (values == NULL && count > 0) || count > MOE_HISTORY_SERIES || h->n > MOE_HISTORY_POINTS)
        return MOE_ERR_ARGUMENT;
    if (h->every == 0) h->every = 1;
    append = h->n == 0 || (h->seen - 1) % h->every == 0; /* otherwise replaces the newest point, which is not kept */
    if (append && h->n == MOE_HISTORY_POINTS) {          /* drop every second point */
        for (i = 0; i < MOE_HISTORY_POINTS; i += 2) {
            h->at[i / 2] = h->at[i];
            for (s = 0; s < MOE_HISTORY_SERIES; s++) h->values[s][i / 2] = h->values[s][i];
        }
        h->n = MOE_HISTORY_POINTS / 2 + 1;
        h->every *= 2;
    } else if (append) h->n++;
    h->at[h->n - 1] = at;
    for (s = 0; s < MOE_HISTORY_SERIES; s++) h->values[s][h->n - 1] = s < count ? values[s] : (double)MOEI_INFINITY;
    h->seen++;
    return MOE_OK;
}

moe_figure moe_figure_history(const moe_history *history, size_t first, size_t count, const char *const *names) {
    moe_figure f;
    memset(&f, 0, sizeof f);
    if (history == NULL || history->n > MOE_HISTORY_POINTS) return f;
    if (first >= MOE_HISTORY_SERIES || count > MOE_HISTORY_SERIES - first) return f;
    f.kind = MOE_FIGURE_LINES;
    f.title = "Training";
    f.column_label = "step";
    f.rows = count;
    f.columns = history->n;
    f.stride = MOE_HISTORY_POINTS;
    f.values = history->values[first];
    f.x = history->at;
    f.row_names = names;
    return f;
}

#endif /* MOE_NO_TRAIN */
#endif /* MOE_IMPLEMENTATION */
